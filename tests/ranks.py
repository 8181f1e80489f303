"""Ranks on this machine, processes with gloo, and a network whose training they can share."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

BATCH = 12
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "steradian.optim.fused.table",
    "steradian.watching.records",
]


def network() -> nn.Module:
    """Instance norm sees one sample at a time, so a batch can be split; 7 and 5 filters do not divide evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 7, 3, padding=1, bias=False), nn.InstanceNorm2d(7, affine=True), nn.Tanh(),
        nn.Conv2d(7, 5, 3, padding=1, bias=False), nn.InstanceNorm2d(5), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3),
    )  # fmt: skip
    return model.double()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, rank: int = 0, ranks: int = 1,
    after: Callable[[int], object] = lambda step: None,
) -> None:  # fmt: skip
    """A rank's share of the steps, which is all of them for one rank alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 2, 4, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rank::ranks]), labels[rank::ranks]).backward()
        optimizer.step()
        after(step)


def run(jobs: list[tuple[Any, ...]], ranks: int, folder: object) -> None:
    """Call function(rank, ranks, folder, *arguments) for each job (function, *arguments), on every rank.

    The ranks start once for all jobs: starting takes longer than most of them. They compute on the CPU, also if
    there is a GPU, which `fully_shard` would take.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # All ranks are forks of one process that has imported what they need, which is most of the work of starting them.
    multiprocessing.set_forkserver_preload(IMPORTED)
    errors = mp.get_context("forkserver").SimpleQueue()
    arguments = (ranks, port, jobs, str(folder), errors)
    try:
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1"):
            mp.start_processes(_process, arguments, nprocs=ranks, daemon=True, start_method="forkserver")
    except Exception as error:
        raise AssertionError(errors.get() if not errors.empty() else str(error)) from error


def _process(rank: int, ranks: int, port: int, jobs: list[tuple[Any, ...]], folder: str, errors: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for function, *arguments in jobs:
        try:
            function(rank, ranks, folder, *arguments)
        except BaseException:
            errors.put(f"{function.__name__}, {arguments}, {ranks} ranks:\n{traceback.format_exc()}")
            raise
    if dist.is_initialized():  # a job may end it
        dist.barrier()  # nobody leaves while another still waits for it
        dist.destroy_process_group()
    # All that was to be shown was asserted; threads of gloo that are not joined yet abort an ordinary exit at times.
    sys.stdout.flush()
    os._exit(0)

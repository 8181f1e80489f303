"""Two and three processes with gloo: DDP and FSDP2 give what one process gives."""

import os
import socket
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steradian import find_groups, optim

STEPS, BATCH = 20, 12
OPTIMIZERS = {
    "Adam abc": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="abc"),
    "Adam bc": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="bc"),
    "Adam a, decoupled": lambda groups: optim.Adam(
        groups, lr=0.02, weight_decay=0.5, without="a", decoupled_weight_decay=True
    ),
    "Adam abc, fused": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="abc", fused=True),
    "SGD bc": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.05, without="bc"),
    "AdamP": lambda groups: optim.AdamP(groups, lr=0.02),
    "AdamG": lambda groups: optim.AdamG(groups, lr=0.02),
}


def network():
    """Instance norm sees one sample at a time, so a batch can be split; 7 and 5 filters do not divide evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 7, 3, padding=1, bias=False), nn.InstanceNorm2d(7, affine=True), nn.Tanh(),
        nn.Conv2d(7, 5, 3, padding=1, bias=False), nn.InstanceNorm2d(5), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3),
    )  # fmt: skip
    return model.double()


def groups_of(model, rows="filter"):
    named = dict(model.named_parameters())
    radial = [p for name, p in named.items() if name.endswith(("0.weight", "3.weight"))]
    rest = [p for name, p in named.items() if not name.endswith(("0.weight", "3.weight"))]
    if rows == "joint":  # two filters that a rank may or may not hold together, as one row
        return [{"params": radial, "rows": "tensor", "joint": True}, {"params": rest}]
    return [{"params": radial, "rows": rows}, {"params": rest}]


def train(model, optimizer, steps, *, rank=0, ranks=1, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 2, 4, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rank::ranks]), labels[rank::ranks]).backward()
        optimizer.step()


def whole(model):
    state = {}
    for name, p in model.state_dict().items():
        state[name.removeprefix("module.")] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return state


def alone(kind, rows="filter"):
    model = network()
    optimizer = OPTIMIZERS[kind](groups_of(model, rows))
    train(model, optimizer, STEPS)
    return whole(model)


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def ddp(rank, ranks, kind, folder):
    model = DistributedDataParallel(network())
    train(model, OPTIMIZERS[kind](groups_of(model)), STEPS, rank=rank, ranks=ranks)
    assert_same(whole(model), alone(kind))


def fsdp(rank, ranks, kind, folder):
    model = network()
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = find_groups(model, images)
    assert groups.layouts == {"0.weight": "filter", "3.weight": "filter"}
    fully_shard(model)
    with pytest.raises(ValueError, match=r"0\.weight.*before fully_shard"):
        find_groups(model, images)
    optimizer = OPTIMIZERS[kind](groups.of(model).param_groups())
    train(model, optimizer, STEPS, rank=rank, ranks=ranks)
    assert_same(whole(model), alone(kind))


def save(rank, ranks, kind, folder):
    model = fully_shard(network())
    optimizer = OPTIMIZERS[kind](groups_of(model))
    train(model, optimizer, STEPS // 2, rank=rank, ranks=ranks)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def resume(rank, ranks, kind, folder):
    model = fully_shard(network())
    optimizer = OPTIMIZERS[kind](groups_of(model))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, STEPS - STEPS // 2, rank=rank, ranks=ranks, first=STEPS // 2)
    assert_same(whole(model), alone(kind))


def crossing(rank, ranks, kind, folder):
    for rows in ("tensor", ("axis", 1), "joint"):
        model = fully_shard(network())
        train(model, OPTIMIZERS[kind](groups_of(model, rows)), STEPS, rank=rank, ranks=ranks)
        assert_same(whole(model), alone(kind, rows))


def process(rank, ranks, port, jobs, folder, errors):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for task, kind in jobs:
        try:
            task(rank, ranks, kind, folder)
        except BaseException:
            errors.put(f"{task.__name__}, {kind}, {ranks} ranks:\n{traceback.format_exc()}")
            raise
    dist.barrier()  # nobody leaves while another still waits for it
    dist.destroy_process_group()
    # All that was to be shown was asserted; threads of gloo that are not joined yet abort an ordinary exit at times.
    sys.stdout.flush()
    os._exit(0)


def run(jobs, ranks, folder):
    """Start the ranks once for all jobs: starting takes longer than most of them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    errors = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(process, args=(ranks, port, jobs, folder, errors), nprocs=ranks, daemon=True)
    except Exception as error:
        raise AssertionError(errors.get() if not errors.empty() else str(error)) from error


PLAIN = [kind for kind in OPTIMIZERS if not kind.endswith("fused")]
# Fused on a CPU needs Triton's interpreter.
FUSED = [] if torch.cuda.is_available() else [(fsdp, "Adam abc, fused"), (crossing, "Adam abc, fused")]
TWO = [(ddp, "Adam abc"), *((fsdp, kind) for kind in PLAIN), (crossing, "Adam abc"), (crossing, "SGD bc"), *FUSED]
THREE = [(fsdp, "Adam abc"), (fsdp, "SGD bc"), (crossing, "Adam bc")]


def test_two_ranks_and_three_that_go_on_from_their_checkpoint(tmp_path):
    run([*TWO, (save, "Adam abc")], 2, str(tmp_path))
    run([*THREE, (resume, "Adam abc")], 3, str(tmp_path))

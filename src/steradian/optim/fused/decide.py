"""Which rows get the fused step, and that step as a whole, which is kept between steps."""

import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steradian.geometry import is_plain
from steradian.optim.rows import Options, RowSet

if TYPE_CHECKING:
    from steradian.optim.base import Classic, RowOptimizer, Work

_GRAD = attrgetter("grad")
_ALWAYS_A_TILE = 5 * 512
_DECIDING = ("rows", "joint", "without", "fused", "direction", "spread", "nesterov", "rest")  # which rows are fused


def available(params: Sequence[Tensor]) -> bool:
    """Whether Triton is installed and runs on the device of these parameters: a CUDA one, or any when interpreted."""
    if importlib.util.find_spec("triton") is None:
        return False
    return os.environ.get("TRITON_INTERPRET") == "1" or all(param.device.type == "cuda" for param in params)


@functools.cache
def runs_kernels(device: torch.device) -> bool:
    """Whether a kernel was compiled and launched on this device: it takes Triton, an NVIDIA GPU and a C compiler."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or torch.version.cuda is None or interpreted or importlib.util.find_spec("triton") is None:
        return False
    try:
        from steradian.optim.fused import kernels

        with torch.cuda.device(device):
            kernels.attempt[(1,)](torch.zeros(1, device=device))
    except Exception as error:  # whatever goes wrong in Triton, its compilers and the driver
        warnings.warn(f"the fused step does not work here, the plain one is used: {error}", stacklevel=2)
        return False
    return True


def can_step(rows: RowSet, group: Options) -> bool:
    """Whether the fused step takes these rows: one dense parameter, cut along dimension 0 alone.

    A tile must hold rows with element-wise second moments, and those of Angular in half precision, whose telemetry is
    that of the rounded weights, or along Muon's direction.
    """
    param, gradient, state = rows.params[0], rows.params[0].grad, rows.states[0]
    kind, (momentum, second, _) = _kind(group)
    if group.get("joint") or gradient is None or not rows.n or not rows.d or not rows.in_place:
        return False
    if not (is_plain(param) and is_plain(gradient)):
        return False
    fits = rows.d <= _ALWAYS_A_TILE
    if not fits and (kind == 1 or (kind > 1 and param.dtype.itemsize < 4)):
        return False
    if kind >= 4:  # a tile holds the row, also a longer one if it is aligned, and matrices lie in memory as they are
        aligned = all(each.data_ptr() % 16 == 0 for each in (param, gradient, state[momentum]))
        fits = fits or (aligned and rows.d <= 2 * _ALWAYS_A_TILE and rows.d % 8 == 0)
        if rows.sharded or not fits or not param.is_contiguous():
            return False
    if kind == 1 and state[second].stride() != param.stride():
        return False
    if kind != 1 and second != "step":
        rows.number(second)  # raises if its shape is wrong, which the kernel would not notice
    together = gradient.dtype == param.dtype and gradient.device == param.device == state["step"].device
    return together and rows.is_dense() and gradient.stride() == param.stride() == state[momentum].stride()


def _kind(group: Options) -> tuple[int, tuple[str, str, str]]:
    """The kernels' KIND for a group, and the names of momentum, second moment and step count in its states."""
    if "direction" in group:
        second = "norm_sq" if group["spread"] == "rms" else "step"  # without v nothing is read there
        along_matrices = 2 * (group["direction"] == "muon")
        return 2 + along_matrices + group["nesterov"], ("momentum_buffer", second, "step")
    return 0 if "a" in group["without"] else 1, ("exp_avg", "exp_avg_sq", "step")


class FusedStep:
    """A whole step of an optimizer: plans for the fused rows, and what gets the plain step.

    It is kept as long as the same parameters have gradients in the same groups.
    """

    def __init__(self, optimizer: "RowOptimizer", classic: "Classic", work: "Work") -> None:
        from steradian.optim.fused.table import Plan

        self.classic, self.made_from = classic, _made_from(optimizer)
        self.plain: Work = []
        chosen: dict[Any, list[tuple[Options, list[RowSet]]]] = {}
        for group, sets in work:
            by_kind: dict[Any, list[RowSet]] = {}
            fused = optimizer._is_fused(group)
            for rows in sets:
                alike = (*_kind(group), rows.params[0].device, rows.params[0].dtype)
                by_kind.setdefault(alike if fused and can_step(rows, group) else None, []).append(rows)
            for alike, same in by_kind.items():
                (self.plain if alike is None else chosen.setdefault(alike, [])).append((group, same))
        kept: list[object] = vars(optimizer).setdefault("_in_graphs", [])  # it must live as long as the optimizer
        self.plans = [Plan(entries, kind, names, kept) for (kind, names, *_), entries in chosen.items()]
        planned = [rows for plan in self.plans for _, rows in plan.sets]
        lengths = [len(buffer) for buffer in optimizer.telemetry.buffers] if optimizer.telemetry else []
        self.covers_telemetry = lengths == [sum(rows.n for rows in planned)]
        self.sharded: list[Any] = [rows for _, sets in work for rows in sets if rows.sharded]
        self.in_place = all(rows.in_place for rows in self.sharded)
        known = {id(param) for rows in planned for param in rows.owners}
        self.others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        self.idle = [param.grad is None for param in self.others]
        self.on_cuda = any(plan.device.type == "cuda" for plan in self.plans)
        fitting = [plan.fits() for plan in self.plans]
        assert all(fitting), "a plan fits what it was made for"

    def fits(self, optimizer: "RowOptimizer") -> bool:
        """Whether the optimizer's next step is this one: nothing that it was made from has changed."""
        # This runs in every step: no line of Python per parameter.
        now = _made_from(optimizer)
        return (
            self.in_place
            and len(now) == len(self.made_from)
            and all(map(is_, now, self.made_from))
            and all(rows.refresh() for rows in self.sharded)
            and all(plan.fits() for plan in self.plans)
            and list(map(is_, map(_GRAD, self.others), repeat(None))) == self.idle
        )

    def run(self, optimizer: "RowOptimizer") -> None:
        """Take the step."""
        scale, found = optimizer._scaler
        capturing = self.on_cuda and torch.cuda.is_current_stream_capturing()
        also, telemetry = None, optimizer.telemetry
        if telemetry is not None:
            # A captured graph would write to the same memory in every replay.
            telemetry.left = also = telemetry.also if self.covers_telemetry and not capturing else None
        for plan in self.plans:
            plan.launch(scale, found, also, capturing)
        if self.classic or self.plain:
            with torch.no_grad():
                optimizer._step_plain(self.classic, self.plain)


def _made_from(optimizer: "RowOptimizer") -> list[object]:
    """The objects that a step is made from: param groups, their parameters and deciding settings, and states."""
    found: list[object] = [*optimizer.param_groups, *optimizer.state.values()]
    for group in optimizer.param_groups:
        found += [*group["params"], optimizer._updates_rows(group), *map(group.get, _DECIDING)]
    return found

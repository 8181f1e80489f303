"""The fused Adam step: all rows of all parameters in one launch, driven by tables that are kept between steps.

A `Plan` is made for the parameters of one dtype on one device. It knows where everything lies and which program
steps which rows. A step compares addresses and settings with what the tables hold, copies what changed (pinned and
asynchronous, so the host never waits), and launches.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from steradian.optim import _kernels
from steradian.optim._rows import RowSet

if TYPE_CHECKING:
    from steradian.optim._base import Classic, RowOptimizer, Work

__all__ = ["FusedStep", "Plan", "available", "can_step"]

Options = Mapping[str, Any]

LANES = int(_kernels.LANES.value)
WARPS = 8
_DTYPES = {
    torch.float32: (tl.float32, tl.float32),
    torch.bfloat16: (tl.bfloat16, tl.float32),
    torch.float16: (tl.float16, tl.float32),
    torch.float64: (tl.float64, tl.float64),
}
_FLAGS = {"a": 1, "b": 2, "c": 4}
_CHUNK = 60
_ALWAYS_A_TILE = 5 * 512
_CAPTURES = 8


def available(device: torch.device) -> bool:
    """Whether kernels run on this device: a CUDA one, or any under Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def can_step(rows: RowSet, group: Options) -> bool:
    """Whether the fused step takes these rows: one dense parameter, cut along dimension 0 alone.

    Element-wise second moments take the fused step only where a tile holds the row.
    """
    param, state = rows.params[0], rows.states[0]
    gradient = param.grad
    if len(rows.params) > 1 or gradient is None or param.dtype not in _DTYPES or rows.n == 0 or rows.d == 0:
        return False
    if "a" not in group["without"] and (rows.d > _ALWAYS_A_TILE or state["exp_avg_sq"].stride() != param.stride()):
        return False
    together = gradient.dtype == param.dtype and gradient.device == param.device == state["step"].device
    return together and rows.is_dense() and gradient.stride() == param.stride() == state["exp_avg"].stride()


class FusedStep:
    """A whole step of an optimizer, remembered: plans for what is fused, and what else there is to do.

    It is kept as long as the same parameters have gradients under the same groups, so that a step does not walk
    through groups, layouts and states again.

    Args:
        optimizer: the optimizer.
        classic: groups for the classic update.
        work: groups with rows.
    """

    def __init__(self, optimizer: "RowOptimizer", classic: "Classic", work: "Work") -> None:
        self.classic = classic
        self.left: Work = []
        self.shape = _shape(optimizer)
        chosen: dict[tuple[object, ...], list[tuple[Options, list[RowSet]]]] = {}
        for group, sets in work:
            fused = [rows for rows in sets if optimizer._is_fused(group) and can_step(rows, group)]
            other = [rows for rows in sets if not any(rows is one for one in fused)]
            self.left += [(group, other)] if other else []
            for kind in dict.fromkeys((rows.params[0].device, rows.params[0].dtype) for rows in fused):
                part = [rows for rows in fused if (rows.params[0].device, rows.params[0].dtype) == kind]
                chosen.setdefault((*kind, "a" in group["without"]), []).append((group, part))
        self.plans = [Plan(entries, elementwise=not kind[2]) for kind, entries in chosen.items()]
        stepped = [param for _, params, _ in classic for param in params]
        stepped += [param for _, sets in self.left for rows in sets for param in rows.params]
        known = {id(param) for param in stepped} | {id(param) for plan in self.plans for param in plan.params}
        self.stepped = stepped
        self.idle = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]

    def fits(self, optimizer: "RowOptimizer") -> bool:
        """Whether the optimizer is to take this very step again."""
        return (
            self.shape == _shape(optimizer)
            and all(plan.fits() for plan in self.plans)
            and all(param.grad is not None for param in self.stepped)
            and all(param.grad is None for param in self.idle)
        )

    @torch.compiler.disable
    def run(self, optimizer: "RowOptimizer") -> None:
        """Take the step; a gradient scaler's scale and verdict are used where they are, on the device."""
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for plan in self.plans:
            plan.launch(grad_scale=scale, found_inf=found)
        for group, params, states in self.classic:
            optimizer._step_classic(params, states, group)
        for group, sets in self.left:
            for rows in sets:
                with rows.scaled(scale, found):
                    optimizer._reference(rows, group)
                rows.finish()


def _shape(optimizer: "RowOptimizer") -> list[tuple[object, ...]]:
    keys = ("rows", "joint", "without", "fused")
    return [(len(group["params"]), *(group.get(key) for key in keys)) for group in optimizer.param_groups]


class Plan:
    """Tables and launches for the rows of parameters of one dtype on one device.

    Args:
        work: param groups with the row sets that `can_step` accepted.
        elementwise: the second moments are element-wise ("a" is not among the letters).
    """

    def __init__(self, work: Sequence[tuple[Options, Sequence[RowSet]]], *, elementwise: bool) -> None:
        self.groups = [group for group, _ in work]
        self.sets = [(line, rows) for line, (_, sets) in enumerate(work) for rows in sets]
        self.params = [rows.params[0] for _, rows in self.sets]
        self.strides = [param.stride() for param in self.params]
        self.device, self.dtype = self.params[0].device, self.params[0].dtype
        self.elementwise = elementwise
        # Three programs on a multiprocessor instead of two, at the price of a few spilled numbers in long rows.
        self.registers = None if elementwise or self.dtype == torch.float64 else 80
        self.addresses: list[int] = []
        self.settings: list[tuple[Any, ...]] = []
        self.classes: list[int] = []
        count, groups = len(self.sets), len(self.groups)
        self.table = torch.zeros(count, 8, dtype=torch.int64, device=self.device)
        self.setting_table = torch.zeros(groups, 8, dtype=torch.float64, device=self.device)
        self.rates = torch.zeros(groups, dtype=torch.float64, device=self.device)
        self.rate_addresses = torch.zeros(groups, dtype=torch.int64, device=self.device)
        # Telemetry stays where it is as long as a plan lasts.
        targets = [rows.telemetry.data_ptr() for _, rows in self.sets if rows.telemetry is not None]
        self.emitting = bool(targets)
        self.emitted = self._host(torch.tensor(targets or [0])).to(self.device, non_blocking=True)
        self.finished = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.one, self.zero = torch.ones(1, device=self.device), torch.zeros(1, device=self.device)
        # A graph re-reads its source at every replay, so each capture gets memory of its own, set aside here.
        self.for_captures = [self._host(torch.zeros(count, 8, dtype=torch.int64)) for _ in range(_CAPTURES)]

    def launch(self, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Take one step of all rows."""
        self._refresh_addresses()
        self._refresh_settings()
        scaled = grad_scale is not None or found_inf is not None
        scale, found = self.one if grad_scale is None else grad_scale, self.zero if found_inf is None else found_inf
        emit = self.emitting
        tables = (self.table, self.setting_table, self.rate_addresses, self.emitted, self.sums, scale, found)
        entries, computed = _DTYPES[self.dtype]
        with torch.cuda.device_of(self.table):
            _kernels.step_rows[(self.items.shape[0],)](
                *(self.items, *tables, self.finished, len(self.sets)),
                *(self.present, self.elementwise, emit, scaled, entries, computed),
                num_warps=WARPS,
                maxnreg=self.registers,
            )
            if self.long_items.shape[0]:
                _kernels.apply_long_rows[(self.long_items.shape[0],)](
                    self.long_items, *tables, emit, scaled, entries, computed, num_warps=WARPS
                )

    def fits(self) -> bool:
        """Whether every parameter still has a gradient, laid out as the plan expects."""
        for param, stride in zip(self.params, self.strides, strict=True):
            gradient = param.grad
            if gradient is None or gradient.layout is not torch.strided or gradient.stride() != stride:
                return False
            if gradient.dtype is not self.dtype or param.stride() != stride:
                return False
        return True

    # Addresses and programs

    def _refresh_addresses(self) -> None:
        addresses = [param.data_ptr() for param in self.params]
        addresses += [param.grad.data_ptr() for param in self.params]  # type: ignore[union-attr]
        if addresses == self.addresses:
            return
        self.addresses = addresses
        lines, classes = [], []
        for k, (group, rows) in enumerate(self.sets):
            state = rows.states[0]
            moments = [state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq", "step")]
            where = [addresses[k], addresses[len(self.sets) + k], *moments]
            lines.append([*where, rows.d, rows.n, group])
            aligned = rows.d % 4 == 0 and rows.d * self.dtype.itemsize % 16 == 0
            aligned = aligned and all(address % 16 == 0 for address in where[:3])
            classes.append(_class(rows.d, aligned=aligned))
        self._fill(self.table, lines)
        if classes != self.classes:
            self.classes = classes
            self._make_items()

    def _make_items(self) -> None:
        """Which program steps which rows."""
        items, long_items, slot = [], [], 0
        for index, kind in sorted(enumerate(self.classes), key=lambda entry: -entry[1]):
            rows = self.sets[index][1]
            if kind == _CHUNK:
                chunks = math.ceil(rows.d / LANES)
                whole = torch.tensor([[row, chunk] for row in range(rows.n) for chunk in range(chunks)])
                row, chunk = whole.unbind(1)
                items.append(_columns(index, row, kind, chunk, slot + row * chunks + chunk))
                long_items.append(_columns(index, row, slot + row * chunks, chunks, chunk))
                slot += rows.n * chunks
            else:
                at_once = LANES // (4 if kind % 2 else 8) // (32 << kind // 10)
                items.append(_columns(index, torch.arange(0, rows.n, at_once), kind, 0, 0))
        self.present = sum(1 << kind for kind in set(self.classes))
        self.items = self._host(torch.cat(items)).to(self.device, non_blocking=True)
        long_table = torch.cat(long_items) if long_items else torch.zeros(0, 5, dtype=torch.int32)
        self.long_items = self._host(long_table).to(self.device, non_blocking=True)
        self.sums = torch.zeros(max(1, 7 * slot), dtype=torch.float64, device=self.device)

    # Settings

    def _refresh_settings(self) -> None:
        settings = [_setting(group, self.device) for group in self.groups]
        for k, group in enumerate(self.groups):
            if settings[k][0] == "copied":
                self.rates[k : k + 1].copy_(group["lr"].reshape(1), non_blocking=True)
        if settings == self.settings:
            return
        lines, rates, addresses = [], [], []
        for k, (kind, rate, beta1, beta2, eps, decay, flags) in enumerate(settings):
            logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
            lines.append([*logs, 1 - beta1, 1 - beta2, eps, decay, flags, kind == "address"])
            rates.append(rate if kind == "number" else 0.0)
            addresses.append(rate if kind == "address" else self.rates[k].data_ptr())
        numbers = [kind == "number" for kind, *_ in settings]
        if any(numbers):
            self.rates.copy_(self._host(torch.tensor(rates, dtype=torch.float64)), non_blocking=True)
        self.setting_table.copy_(self._host(torch.tensor(lines, dtype=torch.float64)), non_blocking=True)
        self.rate_addresses.copy_(self._host(torch.tensor(addresses)), non_blocking=True)
        self.settings = settings

    # Copies that the host does not wait for

    def _host(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values

    def _fill(self, table: Tensor, lines: list[list[int]]) -> None:
        source = torch.tensor(lines)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if not self.for_captures:
                raise RuntimeError(f"this optimizer's step was captured in more than {_CAPTURES} graphs")
            source = self.for_captures.pop().copy_(source)
            self.captured = [*getattr(self, "captured", []), source]
        else:
            source = self._host(source)
        table.copy_(source, non_blocking=True)


def _columns(*values: int | Tensor) -> Tensor:
    length = max(len(value) for value in values if isinstance(value, Tensor))
    parts = [value if isinstance(value, Tensor) else torch.full((length,), value) for value in values]
    return torch.stack(parts, dim=1).to(torch.int32)


def _class(d: int, *, aligned: bool) -> int:
    """The tile of a row: 10·log2(S/32) + 2(K − 1) for K ≤ 5 pieces of S lanes, + 1 for rows at 16 bytes.

    S is at most 1,024, and 512 for rows at odd addresses; longer rows are cut into chunks.
    """
    for k in range(6 if aligned else 5):
        lanes = 32 << k
        if d <= 5 * lanes:
            return 10 * k + 2 * (math.ceil(d / lanes) - 1) + aligned
    return _CHUNK


def _setting(group: Options, device: torch.device) -> tuple[Any, ...]:
    """What the tables hold of a group: the rate as a number, an address, or to be copied; and the rest."""
    lr = group["lr"]
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        rate: tuple[str, float] = ("number", float(lr))
    elif lr.dtype == torch.float32 and lr.device == device:
        rate = ("address", lr.data_ptr())
    else:
        rate = ("copied", 0.0)
    flags = sum(_FLAGS[letter] for letter in group["without"])
    flags += 8 * bool(group["decoupled_weight_decay"]) + 16 * bool(group["maximize"])
    return (*rate, *group["betas"], group["eps"], group["weight_decay"], flags)

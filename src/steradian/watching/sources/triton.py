"""The sums of `ObservedSource` in one launch over all rows, on a GPU."""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from steradian.optim.fused.table import Launch
from steradian.scheme import UnreadableOptimizerError, is_foreign, reader_of
from steradian.watching.kernels import sum_rows
from steradian.watching.rows import WatchedGroup
from steradian.watching.sources.observed import OF_GRADIENT, SUMS, ObservedSource

__all__ = ["TritonSource", "supports"]

_LONGEST = 2**14  # entries of a row that one program adds up
_ROWS, _LANES, _WARPS = 4, 128, 4
"""Rows of a program, entries of each that it reads at once, and warps: one per row, so that sums stay within a warp."""
_GRAD = attrgetter("grad")
_ENTRIES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def supports(group: WatchedGroup) -> bool:
    """Whether the launch can read these rows: contiguous, of a known state or from two points."""
    settings, optimizer = group.settings, group.optimizer
    try:
        reader_of(optimizer)
        known = isinstance(optimizer, Adam) or (isinstance(optimizer, SGD) and settings["momentum"])
        readable = known and not is_foreign(type(optimizer))
    except UnreadableOptimizerError:
        readable = type(optimizer).__name__ != "LBFGS"
    if not readable or settings.get("nesterov") or settings.get("dampening") == 1:
        return False
    if any(isinstance(beta, Tensor) for beta in settings.get("betas", ())):
        return False
    if len(group.params) > 1 or group.dtype not in _ENTRIES:
        return False
    here = group.local(group.params[0])
    # All ranks must decide alike, also one that has no row of a sharded parameter.
    if (not here.numel() and not group.sharded) or any(count != 1 for count in group.layout.blocks(here.shape)[1:]):
        return False
    # Slices of dimension 0 must follow each other in memory; their own entries may be in any order.
    order = sorted(range(1, here.ndim), key=here.stride().__getitem__, reverse=True)
    return here.is_contiguous() or (here.ndim > 0 and here.permute([0, *order]).is_contiguous())


class TritonSource(ObservedSource):
    """One launch after the step, for groups of one device and dtype for which `supports` is true.

    The weights are copied before the step only where the state does not tell it.
    """

    columns = SUMS

    def __init__(self, optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> None:
        super().__init__(optimizer, watched)
        # A subclass with a step of its own cannot be read, and may have another state.
        self.adam, self.sgd = (self.reader is not None and isinstance(optimizer, each) for each in (Adam, SGD))
        self._copies: list[Tensor] = []
        self._early: Tensor | None = None  # the sums before a step that may alter the gradient
        self._kept: list[Tensor] = []  # copies whose addresses are in the table, until the launch
        self._addresses, self._strides = list[int](), list[Any]()  # of the gradients
        self._launches: dict[bool, Launch] = {}  # from two points or not
        self._params = [group.params[0] for group in self.watched]
        self._sharded = any(group.sharded for group in self.watched)
        self._settings: list[tuple[float, ...]] = []
        self._table = torch.zeros(len(self.watched), 8, dtype=torch.int64, device=self.device)
        self._setting_table = torch.zeros(len(self.watched), 4, dtype=torch.float64, device=self.device)
        self._counts: dict[float, Tensor] = {}  # step counts that torch keeps on the host, on the device
        self._items, self._owner = self._programs()

    def _programs(self) -> tuple[Tensor, Tensor | None]:
        """Which program reads which rows or piece of a row, and the row of each piece unless every row is one piece."""
        items, owner, start = [], [], 0
        for line, group in enumerate(self.watched):
            pieces = -(-group.size // _LONGEST)
            at_once = _ROWS if pieces == 1 else 1
            first = torch.arange(0, group.n_rows, at_once, device="cpu").repeat_interleave(pieces)
            entry = torch.arange(pieces, device="cpu").repeat(-(-group.n_rows // at_once)) * _LONGEST
            rows, entries = (group.n_rows - first).clamp(max=at_once), (group.size - entry).clamp(max=_LONGEST)
            place = start + (first if pieces == 1 else torch.arange(len(first), device="cpu"))
            items.append(torch.stack([torch.full_like(first, line), first, rows, entry, entries, place], dim=1))
            owner.append((group.start + torch.arange(group.n_rows, device="cpu")).repeat_interleave(pieces))
            start += group.n_rows * pieces
        whole = start == len(self._sizes)
        return torch.cat(items).to(self.device), None if whole else torch.cat(owner).to(self.device)

    @torch.no_grad()
    def before(self) -> None:
        if self.two_points:
            now = [group.local(group.params[0]) if group.sharded else group.params[0] for group in self.watched]
            self._copies = [torch.empty_like(tensor, memory_format=torch.preserve_format) for tensor in now]
            torch._foreach_copy_(self._copies, now)
            if self.foreign and not self.closure:
                for group in self.watched:
                    group.held = group.gradients() if group.active() else None
                self._early = self._table.new_zeros(len(self._sizes), len(SUMS), dtype=self.dtype)
                self._launch(self._early)

    def after(self, out: Tensor) -> None:
        if self.two_points and not self._copies:
            return
        self._launch(out)
        if self._early is not None:
            out[:, OF_GRADIENT] = self._early[:, OF_GRADIENT]
        self._copies, self._early = [], None

    def _launch(self, out: Tensor) -> None:
        """Write the sums of the rows as they are now."""
        self._refresh()
        target = out if self._owner is None else out.new_empty(len(self._owner), out.shape[1])
        if self.two_points not in self._launches:
            tables = self._items, self._table, self._setting_table
            constants = self.adam, self.sgd, self.two_points, _ENTRIES[self.watched[0].dtype], _ROWS, _LANES
            options = {"num_warps": _WARPS}
            self._launches[self.two_points] = Launch(sum_rows, len(self._items), tables, (), constants, options)
        with torch.cuda.device_of(out):
            self._launches[self.two_points](target)
        if self._owner is not None:
            out.zero_().index_add_(0, self._owner, target)
        self._kept = []

    def _refresh(self) -> None:
        """Send addresses and settings that changed; from pinned memory, so that the host does not wait."""
        # This runs at every observed step, so there is no Python loop over parameters.
        gradients, state = list(map(_GRAD, self._params)), self.optimizer.state
        self.all_step = not any(map(is_, gradients, repeat(None)))
        known, addresses = None, list[int]()
        if self.all_step and not (self.two_points or self._sharded):
            known = list(map(id, state.values()))
            addresses = list(map(Tensor.data_ptr, gradients))  # torch frees gradients after each step
        moved = addresses != self._addresses
        if known is None or known != self.known or (moved and list(map(Tensor.stride, gradients)) != self._strides):
            self._param_groups = list({id(group.settings): group.settings for group in self.watched}.values())
            place = {id(settings): k for k, settings in enumerate(self._param_groups)}
            points: Sequence[Tensor | None] = self._copies or [None] * len(self.watched)
            setting_lines = [place[id(group.settings)] for group in self.watched]
            lines = list(map(self._line, self.watched, points, setting_lines))
            self._lines = torch.tensor(lines, dtype=torch.int64, device="cpu")
            self._send(self._lines, self._table)
            self.known = None if self._kept or not all(map(state.get, self._params)) else known
            self._strides = list(map(Tensor.stride, gradients)) if known else []
        elif moved or self._counts:
            numbers = self._lines.numpy()  # which takes lists faster
            numbers[:, 1] = addresses
            if self._counts:  # most parameters have the same
                steps = [state[param]["step"] for param in self._params]
                counts = list(map(float, steps))
                places = {count: self._count(step) for count, step in dict(zip(counts, steps, strict=True)).items()}
                numbers[:, 4] = list(map(places.__getitem__, counts))
            self._send(self._lines, self._table)
        self._addresses = addresses
        settings = list(map(self._setting, self._param_groups))
        if settings != self._settings:
            self._settings = settings
            sent = torch.tensor(settings, dtype=torch.float64, device="cpu")
            self._send(sent, self._setting_table[: len(settings)])

    def _line(self, group: WatchedGroup, point: Tensor | None, place: int) -> list[int]:
        """Addresses and numbers of one parameter; zeros if it took no step."""
        param, state = group.params[0], self.optimizer.state.get(group.params[0], {})
        names = ["exp_avg", "max_exp_avg_sq" if group.settings.get("amsgrad") else "exp_avg_sq"] if self.adam else []
        names += ["momentum_buffer"] if self.sgd and point is None else []
        if not group.active() or any(state.get(name) is None for name in names):
            return [0] * 8
        [dense] = group.gradients()
        tensors = [param, dense, *(state[name] for name in names)]
        if group.sharded:  # others are used directly, without the cost of detaching them
            tensors = group.locals(tensors)
            self._kept.append(tensors[0])
        elif dense is not param.grad:
            self._kept.append(dense)
        after, *others = tensors
        gradient, first, second, *_ = [*(self._address(tensor, after) for tensor in others), 0, 0]
        count = self._count(state["step"]) if self.adam else 0
        before = after if point is None else point
        return [before.data_ptr(), gradient, first, second, count, after.data_ptr(), group.size, place]

    def _address(self, tensor: Tensor, like: Tensor) -> int:
        """The address of a tensor, or of a copy that is laid out in memory as the weights are."""
        aligned = tensor.dtype == like.dtype and (tensor.stride() == like.stride() or _order(tensor) == _order(like))
        if not aligned or self._sharded:  # of a sharded tensor this may be a part that was just gathered
            tensor = tensor if aligned else torch.empty_like(like).copy_(tensor)
            self._kept.append(tensor)
        return tensor.data_ptr()

    def _count(self, step: Tensor) -> int:
        """The address of the step count on the device: torch keeps it on the host unless capturable or fused."""
        if step.device == self.device and step.dtype == torch.float32:
            return step.data_ptr()
        count = float(step)
        if count not in self._counts:
            self._counts = {count: torch.empty(1, device=self.device), **dict(list(self._counts.items())[:8])}
            self._send(torch.tensor([count], device="cpu"), self._counts[count])
        return self._counts[count].data_ptr()

    def _setting(self, group: dict[str, Any]) -> tuple[float, ...]:
        if self.adam:
            return (*(float(beta) for beta in group["betas"]), float(group["eps"]), 0.0)
        return (1 / (1 - float(group["dampening"])) if self.sgd else 0.0, 0.0, 0.0, 0.0)

    def _send(self, values: Tensor, to: Tensor) -> None:
        to.copy_(values.pin_memory() if self.device.type == "cuda" else values, non_blocking=True)

    def close(self) -> None:
        self._copies, self._early = [], None


def _order(tensor: Tensor) -> list[int]:
    """Where entries lie in memory; the stride of a dimension of size 1 says nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]

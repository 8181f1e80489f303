"""Steps of torch's Adam, AdamW and SGD on a GPU: the weights before the step, and one launch over all rows after it."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from steradian.image import ImageNumbers, invariance_defect
from steradian.scheme import UnreadableOptimizerError, reader_of
from steradian.watching.kernels import SUMS, sum_rows
from steradian.watching.rows import WatchedGroup, place
from steradian.watching.sources import PHENOMENA, UNMEASURED, Quantities, Source

__all__ = ["TritonSource", "supports"]

_LONGEST = 2**14
_WARPS = 8
_ENTRIES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def supports(optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> bool:
    """Whether one launch can read these rows: a known state, contiguous rows, on a GPU or in Triton's interpreter."""
    if watched[0].device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        reader_of(optimizer)
    except UnreadableOptimizerError:
        return False
    if not isinstance(optimizer, Adam | SGD):
        return False
    return len({group.dtype for group in watched}) == 1 and all(_supports(optimizer, group) for group in watched)


def _supports(optimizer: Optimizer, group: WatchedGroup) -> bool:
    settings = group.settings
    if isinstance(optimizer, SGD) and (not settings["momentum"] or settings["nesterov"] or settings["dampening"] == 1):
        return False
    if any(isinstance(beta, Tensor) for beta in settings.get("betas", ())):
        return False
    if len(group.params) > 1 or group.dtype not in _ENTRIES:
        return False
    here = group.local(group.params[0])
    if not here.numel() or any(count != 1 for count in group.layout.blocks(here.shape)[1:]):
        return False
    # Slices of dimension 0 must follow each other in memory; their own entries may be in any order.
    return here.is_contiguous() or (here.ndim > 0 and here.stride(0) == here[0].numel() and _dense(here))


def _dense(tensor: Tensor) -> bool:
    order = sorted(range(1, tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
    return tensor.permute([0, *order]).is_contiguous()


def _here(group: WatchedGroup, tensor: Tensor) -> Tensor:
    """The part on this rank; a tensor that is not sharded is used directly, without the cost of detaching it."""
    return group.local(tensor) if group.sharded else tensor


class TritonSource(Source):
    """A copy of the weights before the step, and one launch after it, which leaves nine sums per row.

    Args:
        optimizer: torch's Adam, AdamW or SGD.
        watched: groups on one device for which `supports` is true.
    """

    columns = SUMS
    dtype = torch.float64

    def __init__(self, optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> None:
        self._entries = _ENTRIES[watched[0].dtype]
        self.optimizer = optimizer
        self.adam = isinstance(optimizer, Adam)
        order = {id(param): k for k, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self.watched = place(watched, key=lambda group: order[id(group.params[0])])
        self.device = watched[0].device
        self.points: list[Tensor] = []
        self.addresses: list[int] = []
        self.known: list[tuple[Any, ...]] = []
        self.table = torch.zeros(len(self.watched), 8, dtype=torch.int64, device=self.device)
        self.settings = torch.zeros(len(self._param_groups()), 4, dtype=torch.float64, device=self.device)
        sizes = [torch.full((group.n_rows,), float(group.size), device="cpu") for group in self.watched]
        self._sizes = torch.cat(sizes).to(self.device)
        self._one = torch.ones(1, device=self.device)
        self._counts: dict[float, Tensor] = {}
        self._items()
        self.missing = dict.fromkeys(PHENOMENA, UNMEASURED)

    def _param_groups(self) -> list[dict[str, Any]]:
        """The present param groups of the rows: `load_state_dict` makes new ones."""
        return list({id(group.settings): group.settings for group in self.watched}.values())

    def _items(self) -> None:
        """Which program reads which piece of which row; long rows are cut, and the sums of their pieces added."""
        items: list[tuple[int, ...]] = []
        owner: list[int] = []
        for line, group in enumerate(self.watched):
            size = group.size
            for row in range(group.n_rows):
                for start in range(0, size, _LONGEST):
                    items.append((line, row, start, min(_LONGEST, size - start), len(items)))
                    owner.append(group.start + row)
        self.items = torch.tensor(items, dtype=torch.int64, device=self.device).reshape(-1, 5)
        rows = sum(group.n_rows for group in self.watched)
        self.owner = None if len(owner) == rows else torch.tensor(owner, device=self.device)

    def open(self) -> None:
        pass

    @torch.no_grad()
    def before(self) -> None:
        now = [_here(group, group.params[0]) for group in self.watched]
        if not self.points:
            self.points = [torch.empty_like(tensor, memory_format=torch.preserve_format) for tensor in now]
        torch._foreach_copy_(self.points, now)

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        if not all(group.active() for group in self.watched):
            out.fill_(float("nan"))
        self._refresh()
        target = out if self.owner is None else out.new_empty(len(self.items), out.shape[1])
        with torch.cuda.device_of(out):
            sum_rows[(len(self.items),)](
                *(self.items, self.table, self.settings, target, self.adam),
                *(self._entries, tl.float32),
                num_warps=_WARPS,
            )
        if self.owner is not None:
            out.zero_().index_add_(0, self.owner, target)

    def _refresh(self) -> None:
        """Send addresses and settings that changed; from pinned memory, so that the host does not wait."""
        known = self._param_groups()
        line_of = {id(settings): k for k, settings in enumerate(known)}
        lines: list[list[int]] = []
        counts: dict[float, Tensor] = {}
        for group, point in zip(self.watched, self.points, strict=True):
            param, size = group.params[0], group.size
            state = self.optimizer.state.get(param, {})
            moment = state.get("exp_avg" if self.adam else "momentum_buffer")
            if param.grad is None or moment is None:
                # The address of the point replaces a missing one; such rows are not recorded.
                lines.append([point.data_ptr()] * 4 + [self._one.data_ptr(), size, 0, 0])
                continue
            second = state["max_exp_avg_sq" if group.settings.get("amsgrad") else "exp_avg_sq"] if self.adam else moment
            tensors = [_here(group, tensor) for tensor in (param.grad, moment, second)]
            if any(tensor.stride() != point.stride() or tensor.dtype != point.dtype for tensor in tensors):
                raise ValueError(f"{group.name}: gradient and state are not laid out in memory as the weights are")
            step = self._count(state["step"], counts) if self.adam else self._one
            line = line_of[id(group.settings)]
            lines.append([point.data_ptr(), *(t.data_ptr() for t in tensors), step.data_ptr(), size, line, 0])
        self._counts = counts
        flat = [number for line in lines for number in line]
        if flat != self.addresses:
            self.addresses = flat
            self.table.copy_(self._pinned(torch.tensor(lines, dtype=torch.int64, device="cpu")), non_blocking=True)
        settings = [self._setting(group) for group in known]
        if settings != self.known:
            self.known = settings
            self.settings[: len(settings)].copy_(
                self._pinned(torch.tensor(settings, dtype=torch.float64, device="cpu")), non_blocking=True
            )

    def _count(self, step: Tensor, counts: dict[float, Tensor]) -> Tensor:
        """The step count on the device: torch keeps it on the host unless the optimizer is capturable or fused."""
        if step.device == self.device and step.dtype == torch.float32:
            return step
        at = float(step)
        if at not in counts:
            known = self._counts.get(at)
            counts[at] = (
                self._pinned(torch.tensor([at], device="cpu")).to(self.device, non_blocking=True)
                if known is None
                else known
            )
        return counts[at]

    def _setting(self, group: dict[str, Any]) -> tuple[float, ...]:
        if self.adam:
            return (*(float(beta) for beta in group["betas"]), float(group["eps"]), 0.0)
        return (1 / (1 - float(group["dampening"])), 0.0, 0.0, 0.0)

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values

    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        sums = dict(zip(self.columns, values.unbind(-1), strict=True))
        radius = sums["xx"].sqrt()
        safe = radius.masked_fill(radius == 0, 1)
        inward, slope, along = sums["qx"] / safe, sums["gx"] / safe, sums["ax"] / safe
        across = (sums["qq"] - inward**2).clamp(min=0)
        remaining = (sums["aa"] - along**2).clamp(min=0)
        product = sums["aq"] - along * inward
        # Whether a row is collapsed depends on the dtype that rows are computed in.
        image = ImageNumbers(
            radius=radius.float(),
            start=(radius * (1 - rates * decays)).float(),
            inward=inward.float(),
            across=across.sqrt().float(),
            lr=rates.float(),
            scale=(sums["bb"] / self._sizes).sqrt().float(),
        )
        length = sums["gg"].sqrt()
        found = {
            "deformation": torch.atan2((across * remaining - product**2).clamp(min=0).sqrt(), product),
            "defect": invariance_defect(slope, length),
            "gradient_norm": length,
            "lr": rates,
        }
        return image, {name: value.float() for name, value in found.items()}

    def close(self) -> None:
        self.points = []

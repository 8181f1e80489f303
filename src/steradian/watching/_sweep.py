"""The same as `_seen.Seen` for torch's Adam, AdamW and SGD on a GPU: a snapshot and one sweep over all rows."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from steradian.groups import Layout, is_sharded
from steradian.image import ImageStep
from steradian.scheme import UnreadableOptimizerError, reader_of
from steradian.watching._followed import Followed, part
from steradian.watching._kernel import SUMS, sweep_rows
from steradian.watching._source import PHENOMENA, UNMEASURED, Quantities, Source, of_image, placed

__all__ = ["Swept", "can_sweep"]

_LONGEST = 2**14
_WARPS = 8
_ENTRIES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def can_sweep(optimizer: Optimizer, followed: Sequence[Followed]) -> bool:
    """Whether one sweep reads these rows: known state, rows that lie behind each other, on a GPU."""
    if followed[0].device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        reader_of(optimizer)
    except UnreadableOptimizerError:
        return False
    if not isinstance(optimizer, Adam | SGD):
        return False
    dtypes = {entry.dtype for entry in followed}
    return len(dtypes) == 1 and all(_plain(optimizer, entry) for entry in followed)


def _plain(optimizer: Optimizer, entry: Followed) -> bool:
    options = entry.options
    if isinstance(optimizer, SGD) and (not options["momentum"] or options["nesterov"] or options["dampening"] == 1):
        return False
    if any(isinstance(beta, Tensor) for beta in options.get("betas", ())):
        return False
    if len(entry.params) > 1 or entry.dtype not in _ENTRIES:
        return False
    here = part(entry.params[0], entry.layout)
    if not here.numel() or any(count != 1 for count in entry.layout.blocks(here.shape)[1:]):
        return False
    # Slices of dimension 0 lie behind each other, in whatever order their own entries have.
    return here.is_contiguous() or (here.ndim > 0 and here.stride(0) == here[0].numel() and _dense(here))


def _dense(tensor: Tensor) -> bool:
    order = sorted(range(1, tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
    return tensor.permute([0, *order]).is_contiguous()


def _here(tensor: Tensor, layout: Layout) -> Tensor:
    """What this rank holds; without autograd, so that a tensor that is not sharded is taken as it is, not detached."""
    return part(tensor, layout) if is_sharded(tensor) else tensor


class Swept(Source):
    """Snapshot before the step, one launch after it.

    Args:
        optimizer: torch's Adam, AdamW or SGD.
        followed: rows on one device that `can_sweep` accepted.
    """

    def __init__(self, optimizer: Optimizer, followed: Sequence[Followed]) -> None:
        self._entries = _ENTRIES[followed[0].dtype]
        self.columns = SUMS
        self.dtype = torch.float64
        self.optimizer = optimizer
        self.adam = isinstance(optimizer, Adam)
        order = {id(param): k for k, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self.followed = placed(followed, key=lambda entry: order[id(entry.params[0])])
        self.device = followed[0].device
        self.points: list[Tensor] = []
        self.addresses: list[int] = []
        self.known: list[tuple[Any, ...]] = []
        self.table = torch.zeros(len(self.followed), 8, dtype=torch.int64, device=self.device)
        self.settings = torch.zeros(len(self._options()), 4, dtype=torch.float64, device=self.device)
        self._sizes = torch.cat([torch.full((e.rows,), float(e.size), device="cpu") for e in self.followed]).to(
            self.device
        )
        self._one = torch.ones(1, device=self.device)
        self._counts: dict[float, Tensor] = {}
        self._items()
        self.missing = dict.fromkeys(PHENOMENA, UNMEASURED)

    def _options(self) -> list[dict[str, Any]]:
        """The param groups of the rows as they are now: `load_state_dict` makes new ones."""
        return list({id(entry.options): entry.options for entry in self.followed}.values())

    def _items(self) -> None:
        """Which program sweeps which piece of which row; long rows are cut, and their pieces added up."""
        items: list[tuple[int, ...]] = []
        owner: list[int] = []
        for line, entry in enumerate(self.followed):
            starts = range(0, entry.size, _LONGEST)
            for row in range(entry.rows):
                for start in starts:
                    items.append((line, row, start, min(_LONGEST, entry.size - start), len(items)))
                    owner.append(entry.start + row)
        self.items = torch.tensor(items, dtype=torch.int64, device=self.device).reshape(-1, 5)
        rows = sum(entry.rows for entry in self.followed)
        self.owner = None if len(owner) == rows else torch.tensor(owner, device=self.device)

    @torch.no_grad()
    def before(self) -> None:
        now = [_here(entry.params[0], entry.layout) for entry in self.followed]
        if not self.points:
            self.points = [torch.empty_like(tensor, memory_format=torch.preserve_format) for tensor in now]
        torch._foreach_copy_(self.points, now)

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        if not all(entry.active for entry in self.followed):
            out.fill_(float("nan"))
        self._refresh()
        target = out if self.owner is None else out.new_empty(len(self.items), out.shape[1])
        with torch.cuda.device_of(out):
            sweep_rows[(len(self.items),)](
                *(self.items, self.table, self.settings, target, self.adam),
                *(self._entries, tl.float32),
                num_warps=_WARPS,
            )
        if self.owner is not None:
            out.zero_().index_add_(0, self.owner, target)

    def _refresh(self) -> None:
        """Copy addresses and settings that changed; pinned, so the host does not wait."""
        known = self._options()
        place = {id(options): k for k, options in enumerate(known)}
        lines: list[list[int]] = []
        counts: dict[float, Tensor] = {}
        for entry, point in zip(self.followed, self.points, strict=True):
            param, layout = entry.params[0], entry.layout
            state = self.optimizer.state.get(param, {})
            moment = state.get("exp_avg" if self.adam else "momentum_buffer")
            if param.grad is None or moment is None:
                # Swept all the same, over the point itself; such rows are not recorded.
                lines.append([point.data_ptr()] * 4 + [self._one.data_ptr(), entry.size, 0, 0])
                continue
            second = state["max_exp_avg_sq" if entry.options.get("amsgrad") else "exp_avg_sq"] if self.adam else moment
            tensors = [_here(tensor, layout) for tensor in (param.grad, moment, second)]
            if any(tensor.stride() != point.stride() or tensor.dtype != point.dtype for tensor in tensors):
                raise ValueError(f"{entry.name}: gradient and state are not laid out in memory as the weights are")
            step = self._count(state["step"], counts) if self.adam else self._one
            which = place[id(entry.options)]
            lines.append([point.data_ptr(), *(t.data_ptr() for t in tensors), step.data_ptr(), entry.size, which, 0])
        self._counts = counts
        flat = [number for line in lines for number in line]
        if flat != self.addresses:
            self.addresses = flat
            self.table.copy_(self._pinned(torch.tensor(lines, dtype=torch.int64, device="cpu")), non_blocking=True)
        settings = [self._setting(options) for options in known]
        if settings != self.known:
            self.known = settings
            self.settings[: len(settings)].copy_(
                self._pinned(torch.tensor(settings, dtype=torch.float64, device="cpu")), non_blocking=True
            )

    def _count(self, step: Tensor, counts: dict[float, Tensor]) -> Tensor:
        """The step count where the kernel can read it: torch keeps it on the host where nothing is captured."""
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

    def _setting(self, options: dict[str, Any]) -> tuple[float, ...]:
        if self.adam:
            return (*(float(beta) for beta in options["betas"]), float(options["eps"]), 0.0)
        return (1 / (1 - float(options["dampening"])), 0.0, 0.0, 0.0)

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values

    def quantities(self, values: Tensor, rates: Tensor, decays: Tensor) -> Quantities:
        sums = dict(zip(self.columns, values.unbind(-1), strict=True))
        radius = sums["xx"].sqrt()
        safe = radius.masked_fill(radius == 0, 1)
        inward, slope, along = sums["qx"] / safe, sums["gx"] / safe, sums["ax"] / safe
        across = (sums["qq"] - inward**2).clamp(min=0)
        remaining = (sums["aa"] - along**2).clamp(min=0)
        product = sums["aq"] - along * inward
        # What collapsed is a matter of the dtype that rows are computed in.
        image = ImageStep(
            radius=radius.float(),
            start=(radius * (1 - rates * decays)).float(),
            direction=torch.ones_like(radius).unsqueeze(-1),
            inward=inward.float(),
            tangential=across.sqrt().float().unsqueeze(-1),
            lr=rates.float(),
            scale=(sums["bb"] / self._sizes).sqrt().float(),
        )
        length = sums["gg"].sqrt()
        found = {
            "deformation": torch.atan2((across * remaining - product**2).clamp(min=0).sqrt(), product),
            "defect": (slope.abs() / length.masked_fill(length == 0, 1)).clamp(max=1),
            "gradient_norm": length,
            "lr": rates,
        }
        return of_image(image) | {name: value.float() for name, value in found.items()}

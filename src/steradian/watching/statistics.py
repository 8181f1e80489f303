"""Statistics over the rows of each group, for many steps and quantities at once, on the device of the numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steradian.optim.fused.decide import runs_kernels

__all__ = ["Statistics"]

_AT_ONCE = 2**23  # numbers that are padded and sorted at once
_LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)
_LENGTHS = (64, 256, 1024, 4096)  # that the kernel is compiled for; it reads longer groups in blocks of the last


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Groups of about one length, and where their quantiles lie in the order; all on the device."""

    groups: Tensor
    counts: Tensor
    index: Tensor
    there: Tensor
    low: Tensor
    high: Tensor
    share: Tensor


class Statistics:
    """Minimum, quantiles, maximum and mean over the rows of each group, in the order of `records.STATISTICS`.

    Quantiles are interpolated linearly, as in numpy. All statistics of a group with a NaN, or without rows, are NaN.
    On a GPU one launch computes them for all groups of about one length; elsewhere the rows are padded and sorted.

    Args:
        spans: the places of the rows of each group.
        device: of the numbers.

    >>> Statistics([slice(0, 3), slice(3, 4)])(torch.tensor([[1.0, 2.0, 3.0, 5.0]]))[0, :, 2].tolist()
    [2.0, 5.0]
    """

    def __init__(self, spans: Sequence[slice], *, device: torch.device | str = "cpu") -> None:
        self.groups = len(spans)
        by_kernel: dict[int, list[int]] = {}
        by_sorting: dict[int, list[int]] = {}
        kernels = runs_kernels(torch.device(device))
        for k, rows in enumerate(span.stop - span.start for span in spans):
            if rows and kernels:
                length = next((length for length in _LENGTHS if rows <= length), _LENGTHS[-1])
                by_kernel.setdefault(length, []).append(k)
            elif rows:
                by_sorting.setdefault(1 << (rows - 1).bit_length(), []).append(k)
        self.selected = {n: _places(chosen, [spans[k] for k in chosen], device) for n, chosen in by_kernel.items()}
        self.sorted = [_bucket(chosen, [spans[k] for k in chosen], n, device) for n, chosen in by_sorting.items()]

    def __call__(self, values: Tensor) -> Tensor:
        """(…, n) rows on the last dimension → (…, groups, 6)."""
        lead = values.shape[:-1]
        flat = values.reshape(-1, values.shape[-1])
        found = flat.new_full((len(flat), self.groups, len(_LEVELS) + 1), float("nan"))
        for length, places in self.selected.items():
            _select(flat.contiguous(), length, *places, out=found)
        for bucket in self.sorted:
            at_once = max(1, _AT_ONCE // bucket.index.numel())
            for start in range(0, len(flat), at_once):
                piece = slice(start, start + at_once)
                found[piece, bucket.groups] = _sort(flat[piece], bucket)
        return found.reshape(*lead, self.groups, len(_LEVELS) + 1)


def _places(groups: list[int], spans: list[slice], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The arguments `spans` and `shares` of `statistics_kernel` for some groups."""
    first = torch.tensor([[span.start, span.stop - span.start] for span in spans], device="cpu")
    at = torch.tensor(_LEVELS[1:-1], dtype=torch.float64, device="cpu") * (first[:, 1:] - 1)
    lines = torch.cat([first, torch.tensor(groups, device="cpu")[:, None], at.floor().long()], dim=1)
    return lines.int().to(device), (at - at.floor()).to(device)


def _select(values: Tensor, length: int, spans: Tensor, shares: Tensor, *, out: Tensor) -> None:
    """Write the statistics of some groups of at most `length` rows to their places in `out`, with the kernel."""
    import triton.language as tl

    from steradian.watching.kernels import statistics_kernel

    narrow = values.dtype == torch.float32
    how: dict[str, Any] = {"BITS": 32, "KIND": tl.float32} if narrow else {"BITS": 64, "KIND": tl.float64}
    how |= {"LENGTH": length, "num_warps": max(1, length // 1024)}
    if len(values):
        with torch.cuda.device_of(values):
            statistics_kernel[len(values), len(spans)](values, spans, shares, out, values.shape[1], out.shape[1], **how)


def _bucket(groups: list[int], spans: list[slice], length: int, device: torch.device | str) -> _Bucket:
    starts = torch.tensor([[span.start] for span in spans], device="cpu")
    counts = torch.tensor([[span.stop - span.start] for span in spans], device="cpu")
    places = torch.arange(length, device="cpu")
    there = places < counts
    at = torch.tensor(_LEVELS, dtype=torch.float64, device="cpu") * (counts - 1)
    low = at.floor().long()
    parts = {
        "groups": torch.tensor(groups, device="cpu"),
        "counts": counts.squeeze(1),
        "index": torch.where(there, starts + places, starts),
        "there": there,
        "low": low,
        "high": torch.minimum(low + 1, counts - 1),
        "share": at - low,
    }
    return _Bucket(**{name: value.to(device) for name, value in parts.items()})


def _sort(values: Tensor, bucket: _Bucket) -> Tensor:
    """The statistics of the groups of a bucket, (lines, groups, 6), by padding and sorting their rows."""
    padded = values[:, bucket.index]
    means = padded.masked_fill(~bucket.there, 0).sum(-1) / bucket.counts
    ordered = padded.masked_fill_(~bucket.there, float("inf")).sort(dim=-1).values
    places = (place.expand(len(values), -1, -1) for place in (bucket.low, bucket.high))
    below, above = (ordered.gather(-1, place) for place in places)
    share = bucket.share.to(values.dtype)
    # The difference of two equal infinities is NaN; if the share is 0 the upper value does not matter.
    quantiles = torch.where((share == 0) | (below == above), below, below + (above - below) * share)
    return torch.where(means.isnan()[..., None], means[..., None], torch.cat([quantiles, means[..., None]], dim=-1))

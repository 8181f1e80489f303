"""Statistics of each group of rows, for many steps and quantities at once, where the numbers are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Reduction"]

_AT_ONCE = 2**23
_LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Groups of about one length, and where to look for their statistics; all on the device."""

    groups: Tensor
    counts: Tensor
    index: Tensor
    there: Tensor
    low: Tensor
    high: Tensor
    share: Tensor


class Reduction:
    """Minimum, quantiles, maximum and mean over the rows of each group, in the order of `records.STATISTICS`.

    Groups of about one length are padded, sorted, and read at the places of the quantiles, with linear interpolation
    as numpy has it. A group with a NaN has NaN throughout, a group without rows too.

    Args:
        spans: where the rows of each group lie.
        device: where the numbers are.

    >>> Reduction([slice(0, 3), slice(3, 4)])(torch.tensor([[1.0, 2.0, 3.0, 5.0]]))[0, :, 2].tolist()
    [2.0, 5.0]
    """

    def __init__(self, spans: Sequence[slice], *, device: torch.device | str = "cpu") -> None:
        self.groups = len(spans)
        by_length: dict[int, list[int]] = {}
        for k, span in enumerate(spans):
            if span.stop > span.start:
                by_length.setdefault(1 << (span.stop - span.start - 1).bit_length(), []).append(k)
        self.buckets = [_bucket(chosen, [spans[k] for k in chosen], n, device) for n, chosen in by_length.items()]

    def __call__(self, values: Tensor) -> Tensor:
        """(…, n) rows on the last dimension → (…, groups, 6)."""
        lead = values.shape[:-1]
        flat = values.reshape(-1, values.shape[-1])
        found = flat.new_full((len(flat), self.groups, len(_LEVELS) + 1), float("nan"))
        for bucket in self.buckets:
            at_once = max(1, _AT_ONCE // bucket.index.numel())
            for start in range(0, len(flat), at_once):
                piece = slice(start, start + at_once)
                found[piece, bucket.groups] = _statistics(flat[piece], bucket)
        return found.reshape(*lead, self.groups, len(_LEVELS) + 1)


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


def _statistics(values: Tensor, bucket: _Bucket) -> Tensor:
    padded = values[:, bucket.index]
    means = padded.masked_fill(~bucket.there, 0).sum(-1) / bucket.counts
    ordered = padded.masked_fill_(~bucket.there, float("inf")).sort(dim=-1).values
    places = (place.expand(len(values), -1, -1) for place in (bucket.low, bucket.high))
    below, above = (ordered.gather(-1, place) for place in places)
    share = bucket.share.to(values.dtype)
    # Two infinities of one sign differ by NaN; where the share is 0 the upper one does not count.
    quantiles = torch.where(share == 0, below, below + (above - below) * share)
    return torch.where(means.isnan()[..., None], means[..., None], torch.cat([quantiles, means[..., None]], dim=-1))

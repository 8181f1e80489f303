"""Statistics of each group of rows, for many steps and quantities at once, where the numbers are."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["reduce_rows"]

_AT_ONCE = 2**23
_LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)


def reduce_rows(values: Tensor, spans: Sequence[slice]) -> Tensor:
    """Minimum, quantiles, maximum and mean over the rows of each group, in the order of `records.STATISTICS`.

    Groups are padded to a common length, sorted, and read at the places of the quantiles, with linear interpolation
    as numpy has it. A group with a NaN has NaN throughout, a group without rows too.

    Args:
        values: (…, n), rows on the last dimension.
        spans: where the rows of each group lie.

    Returns:
        (…, groups, 6).

    >>> reduce_rows(torch.tensor([[1.0, 2.0, 3.0, 5.0]]), [slice(0, 3), slice(3, 4)])[0, :, 2].tolist()
    [2.0, 5.0]
    """
    lead = values.shape[:-1]
    flat = values.reshape(-1, values.shape[-1])
    found = flat.new_full((len(flat), len(spans), len(_LEVELS) + 1), float("nan"))
    by_length: dict[int, list[int]] = {}
    for k, span in enumerate(spans):
        length = span.stop - span.start
        if length:
            by_length.setdefault(1 << (length - 1).bit_length(), []).append(k)
    for length, chosen in by_length.items():
        at_once = max(1, _AT_ONCE // (length * len(chosen)))
        which = torch.tensor(chosen, device=values.device)
        for start in range(0, len(flat), at_once):
            piece = slice(start, start + at_once)
            found[piece, which] = _statistics(flat[piece], [spans[k] for k in chosen], length)
    return found.reshape(*lead, len(spans), len(_LEVELS) + 1)


def _statistics(values: Tensor, spans: Sequence[slice], length: int) -> Tensor:
    device = values.device
    starts = torch.tensor([span.start for span in spans], device=device)
    counts = torch.tensor([span.stop - span.start for span in spans], device=device)
    places = torch.arange(length, device=device)
    there = places < counts[:, None]
    index = torch.where(there, starts[:, None] + places, starts[:, None])
    padded = values[:, index]
    means = padded.masked_fill(~there, 0).sum(-1) / counts
    ordered = padded.masked_fill(~there, float("inf")).sort(dim=-1).values
    at = torch.tensor(_LEVELS, dtype=torch.float64, device=device) * (counts[:, None] - 1)
    low = at.floor().long()
    high = torch.minimum(low + 1, counts[:, None] - 1)
    share = (at - low).to(values.dtype)
    below, above = (ordered.gather(-1, place.expand(len(values), -1, -1)) for place in (low, high))
    # Two infinities of one sign differ by NaN; where the share is 0 the upper one does not count.
    quantiles = torch.where(share == 0, below, below + (above - below) * share)
    return torch.where(means.isnan()[..., None], means[..., None], torch.cat([quantiles, means[..., None]], dim=-1))

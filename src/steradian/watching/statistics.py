"""Statistics over the rows of each group, for many steps and quantities at once, and over the sets of each pair."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from steradian.groups import Groups, Pair, is_sharded, set_numbers
from steradian.optim.fused.decide import runs_kernels
from steradian.watching.records import listed

__all__ = ["Imbalance", "Statistics"]

logger = logging.getLogger("steradian")
_AT_ONCE = 2**23  # numbers that are padded and sorted at once
_LEVELS = (0.0, 0.1, 0.5, 0.9, 1.0)
_LENGTHS = (64, 256, 1024, 4096)  # that the kernel is compiled for; it reads longer groups in blocks of the last


class Statistics:
    """Minimum, quantiles, maximum and mean over the rows of each group, in the order of `records.STATISTICS`.

    Quantiles are interpolated linearly, as in numpy. All statistics of a group with a NaN, or without rows, are NaN.
    On a GPU one launch computes them for all groups of about one length; elsewhere the rows are padded and sorted.

    >>> Statistics([slice(0, 3), slice(3, 4)])(torch.tensor([[1.0, 2.0, 3.0, 5.0]]))[0, :, 2].tolist()
    [2.0, 5.0]
    """

    def __init__(self, spans: Sequence[slice], *, device: torch.device | str = "cpu") -> None:
        self.groups = len(spans)
        kernels = runs_kernels(torch.device(device))
        by_length: dict[int, list[list[int]]] = {}
        for k, span in enumerate(spans):
            rows = span.stop - span.start
            length = 1 << (rows - 1).bit_length()
            if kernels:
                length = next((length for length in _LENGTHS if rows <= length), _LENGTHS[-1])
            if rows:
                by_length.setdefault(length, []).append([span.start, rows, k])
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}  # `spans` and `shares` of `statistics_kernel`
        self.sorted: dict[int, Tensor] = {}
        for length, of in by_length.items():
            lines = torch.tensor(of, device="cpu")
            if kernels:
                at = torch.tensor(_LEVELS[1:-1], dtype=torch.float64, device="cpu") * (lines[:, 1:2] - 1)
                places = torch.cat([lines, at.floor().long()], dim=1).int()
                self.selected[length] = places.to(device), (at - at.floor()).to(device)
            else:
                self.sorted[length] = lines.to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """(…, n) rows on the last dimension → (…, groups, 6)."""
        lead = values.shape[:-1]
        flat = values.reshape(-1, values.shape[-1])
        found = flat.new_full((len(flat), self.groups, len(_LEVELS) + 1), float("nan"))
        for length, places in self.selected.items():
            _select(flat.contiguous(), length, *places, out=found)
        for length, lines in self.sorted.items():
            at_once = max(1, _AT_ONCE // (len(lines) * length))
            for start in range(0, len(flat), at_once):
                piece = slice(start, start + at_once)
                found[piece, lines[:, 2]] = _sort(flat[piece], length, lines)
        return found.reshape(*lead, self.groups, len(_LEVELS) + 1)


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


def _sort(values: Tensor, length: int, lines: Tensor) -> Tensor:
    """The statistics of some groups of at most `length` rows, (lines, groups, 6), by padding and sorting their rows."""
    starts, counts = lines[:, :1], lines[:, 1:2]
    places = torch.arange(length, device=lines.device)
    beyond = places >= counts
    padded = values[:, torch.where(beyond, starts, starts + places)]
    means = padded.masked_fill(beyond, 0).sum(-1, keepdim=True) / counts
    ordered = padded.masked_fill_(beyond, float("inf")).sort(dim=-1).values
    at = torch.tensor(_LEVELS, dtype=torch.float64, device=lines.device) * (counts - 1)
    low = at.floor().long()
    high = torch.minimum(low + 1, counts - 1)
    below, above = (ordered.gather(-1, place.expand(len(values), -1, -1)) for place in (low, high))
    share = (at - low).to(values.dtype)
    # The difference of two equal infinities is NaN; if the share is 0 the upper value does not matter.
    quantiles = torch.where((share == 0) | (below == above), below, below + (above - below) * share)
    return torch.where(means.isnan(), means, torch.cat([quantiles, means], dim=-1))


_Term = tuple[int, Tensor, list[int], Tensor]
"""A side of a pair, a parameter of it, dimensions that lie within a set, and the sets along the others."""


class Imbalance:
    """√(Σ_a x² / Σ_b x²) for every set of every pair, reduced to statistics over the sets of each pair.

    Pairs that are sharded or on several devices are left out, and those without a parameter whose id is in `watched`.
    """

    def __init__(self, groups: Groups, watched: Collection[int]) -> None:
        self._pairs: dict[str, tuple[list[_Term], Tensor, Statistics]] = {}  # with room for the sums
        left = []
        for pair in groups.pairs:
            params = [groups.params[name] for name in (*pair.a, *pair.b)]
            device, dtype = params[0].device, torch.float32
            if not any(id(param) in watched for param in params):
                continue
            if any(param.device != device or is_sharded(param) for param in params):
                left.append(_name(pair))
                continue
            terms: list[_Term] = []
            for k, (param, spec) in enumerate(zip(params, (*pair.a_specs, *pair.b_specs), strict=True)):
                numbers = set_numbers(spec, param.shape)
                sets = torch.where(numbers < 0, pair.n, numbers).flatten().to(device)  # the last is what is in no set
                summed = [i for i, size in enumerate(numbers.shape) if size == 1]
                terms.append((int(k >= len(pair.a)), param, summed, sets))
                dtype = torch.promote_types(dtype, param.dtype)
            sums = torch.zeros(2, pair.n + 1, dtype=dtype, device=device)
            same = sum(name.partition(" (")[0] == _name(pair) for name in self._pairs)
            name = f"{_name(pair)} ({same + 1})" if same else _name(pair)
            self._pairs[name] = terms, sums, Statistics([slice(0, pair.n)], device=device)
        if left:
            logger.warning("no imbalance is recorded of sharded pairs, or on several devices: %s", listed(left))

    @torch.no_grad()
    def measure(self) -> dict[str, Tensor]:
        """The statistics of the present weights for each pair, on its device; the host does not wait."""
        found = {}
        for name, (terms, sums, statistics) in self._pairs.items():
            sums.zero_()
            for side, param, summed, sets in terms:
                squares = param.to(sums.dtype).square()
                sums[side].index_add_(0, sets, (squares.sum(summed) if summed else squares).flatten())
            found[name] = statistics((sums[0, :-1] / sums[1, :-1]).sqrt())[0]
        return found


def _name(pair: Pair) -> str:
    """The first name of each side, the second without the modules that it shares with the first.

    >>> _name(Pair(("mlp.up.weight", "mlp.up.bias"), ("mlp.down.weight",), ("filter",) * 2, (("axis", 1),), 8, ""))
    'mlp.up.weight / down.weight'
    """
    a, b = pair.a[0].split("."), pair.b[0].split(".")
    shared = 0
    while shared < len(b) - 2 and a[: shared + 1] == b[: shared + 1]:
        shared += 1
    return f"{pair.a[0]} / {'.'.join(b[shared:])}"

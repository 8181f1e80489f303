"""Parameters that are invariant only together: the null space of the matrix of ⟨∇L, x⟩ over probes.

If scaling all parameters of a set by one ρ changes nothing, then Σ ⟨∇L, x_i⟩ = 0 over the set, in every probe.
So joint sets are the vectors of zeros and ones in the null space of M, M[k, i] = ⟨∇L, x_i⟩ of parameter i in
probe k. There are fewer probes than parameters, which leaves a null space too large to be read from M by linear
algebra; being 0/1 and sparse makes the vectors unique. Sets of up to four are sought among all by sorting sums,
larger ones among the sets that the graph proposes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["TELLING", "Indices", "Matrix", "Parts", "minimal", "set_imbalance", "signed_set_imbalance", "zero_sums"]

Matrix = NDArray[np.float64]
Indices = tuple[int, ...]

TELLING = 50.0
"""How many times what is left of a sum its parts are on the average, where that is no chance."""
_LEAST_SLICES = 8
_ROUNDING = 1e-12
"""Share of its parts' sizes that a sum is at least measured as."""
_MOST_FOR_FOUR = 160
_MOST_FOR_THREE = 400
_MOST_FOUND = 2000


def set_imbalance(M: Matrix, sizes: Matrix, indices: Sequence[int]) -> Matrix:
    """|Σ M[:, i]| / √Σ sizes[:, i]² over a set, per probe: 0 where the set is jointly invariant.

    Args:
        M: ⟨∇L, x_i⟩, probes × parameters.
        sizes: what each is measured by; |M| with a floor, so that a probe in which it happens to be small does
            not magnify what ε leaves.
        indices: the set.

    >>> M = np.array([[3.0, -3.0], [1.0, 1.0]])
    >>> set_imbalance(M, abs(M), (0, 1)).round(3).tolist()
    [0.0, 1.414]
    """
    return np.abs(signed_set_imbalance(M, sizes, indices))


def signed_set_imbalance(M: Matrix, sizes: Matrix, indices: Sequence[int]) -> Matrix:
    """The same with its sign."""
    chosen = list(indices)
    size = np.sqrt(np.square(sizes[:, chosen]).sum(1))
    result: Matrix = M[:, chosen].sum(1) / np.where(size > 0, size, 1)
    return result


@dataclass(frozen=True)
class Parts:
    """What the members of one set add to its sum: of the whole tensors, or of each slice that they share.

    Rows of a set that happen to have next to no variance (a unit of ReLU that is hardly ever active) keep a large
    part of what ε does to them, and in the sum over all rows they drown the others. The slices tell them apart.

    Attributes:
        parts: ⟨∇L, x_i⟩, probes × members × slices.
        sizes: what each is measured by, as in `set_imbalance`.
        floor: per probe, the size up to which a slice says nothing.
    """

    parts: NDArray[np.float64]
    sizes: NDArray[np.float64]
    floor: NDArray[np.float64]

    def typical(self) -> Matrix:
        """Per probe, what is left of a typical slice's sum, relative to its parts; infinite where none speaks."""
        size = np.sqrt(np.square(self.sizes).sum(1))
        left = np.abs(self.parts.sum(1)) / np.where(size > 0, size, 1)
        medians = [np.median(d[s]) if s.any() else np.inf for d, s in zip(left, self._speaks(), strict=True)]
        return np.array(medians)

    def balanced(self, allowed: Sequence[float]) -> bool:
        """Whether a typical slice vanishes in every probe, up to what is allowed there.

        One of three may leave four times as much: where few units are active, ε has more weight at some points.
        """
        left = self.typical() / np.asarray(allowed)
        return bool((left > 1).sum() <= len(left) // 3) and bool((left <= 4).all())

    def cancels(self, least: float = TELLING) -> bool:
        """Whether each member's part is cancelled by the others, rather than small itself.

        A part is on the average (in the logarithm) 50 times what is left of the sum. In one probe it may happen to
        be no larger, and parts that do not belong together may happen to cancel. Of many slices, those do not count
        in which the part is small: a unit of ReLU that is always active does not need the bias of its weight. Parts
        that are rounding themselves, of rows that ε leaves no defect, cancel to the last bit as often as not.
        """
        tiny, slices = np.finfo(np.float64).tiny, self.parts.shape[2]
        rounding = _ROUNDING * np.sqrt(np.square(self.sizes).sum(1, keepdims=True)) + tiny
        left = np.maximum(np.abs(self.parts.sum(1, keepdims=True)), rounding)
        ratio = np.log(np.abs(self.parts) + tiny) - np.log(left)
        counts = np.broadcast_to(self._speaks()[:, None, :], ratio.shape)
        if slices > 1:
            counts = counts & (np.abs(self.parts) > self.sizes / 2)
        number = counts.sum((0, 2))
        if not self.parts.any() or bool((number < min(slices, _LEAST_SLICES)).any()):
            return False
        average = np.where(counts, ratio.clip(max=np.log(1e6)), 0).sum((0, 2)) / number
        return bool((average > np.log(least)).all())

    def _speaks(self) -> NDArray[np.bool_]:
        """Probes × slices."""
        return np.asarray(np.sqrt(np.square(self.sizes).sum(1)) > self.floor[:, None])


def zero_sums(
    M: Matrix, sizes: Matrix, tolerance: Sequence[float], *, most: int = 4, larger: float = 1.0
) -> list[Indices]:
    """Sets of two to four columns whose sum vanishes in every row, smallest first; some may contain others.

    Args:
        M: as in `set_imbalance`, the most telling probe first.
        sizes: as in `set_imbalance`.
        tolerance: imbalance allowed to a pair, per probe.
        most: columns of the largest set sought.
        larger: factor on it for sets of three and four, of which there are many more.

    >>> M = np.array([[3.0, -2.0, 1.0, -1.0], [1.0, 5.0, 2.0, -6.0]])
    >>> zero_sums(M, abs(M), [1e-9, 1e-9])
    [(0, 1, 3)]
    """
    n, allowed = M.shape[1], np.asarray(tolerance)
    single = np.arange(n)[:, None]
    pairs = np.array([(i, j) for i in range(n) for j in range(i + 1, n)], dtype=np.intp).reshape(-1, 2)
    found = _matches(M, sizes, single, single, allowed)
    if most >= 3 and 3 <= n <= _MOST_FOR_THREE:
        found += _matches(M, sizes, pairs, single, larger * allowed)
    if most >= 4 and 4 <= n <= _MOST_FOR_FOUR:
        found += _matches(M, sizes, pairs, pairs, larger * allowed)
    return list(dict.fromkeys(found))


def minimal(sets: Iterable[Indices]) -> list[Indices]:
    """The sets that contain no other, smallest first, in order.

    >>> minimal([(0, 1, 2), (0, 1), (1, 3)])
    [(0, 1), (1, 3)]
    """
    kept: list[frozenset[int]] = []
    for candidate in sorted({tuple(sorted(s)) for s in sets}, key=lambda s: (len(s), s)):
        if not any(smaller <= set(candidate) for smaller in kept):
            kept.append(frozenset(candidate))
    return [tuple(sorted(s)) for s in kept]


def _matches(
    M: Matrix, sizes: Matrix, left: NDArray[np.intp], right: NDArray[np.intp], allowed: Matrix
) -> list[Indices]:
    """Unions of a left and a right set whose sums cancel in all probes.

    Sums of the first probe are sorted, so that the possible partners of a sum lie in one interval.
    """
    a, b = M[:, left].sum(2), M[:, right].sum(2)
    size_a, size_b = np.square(sizes[:, left]).sum(2), np.square(sizes[:, right]).sum(2)
    order = np.argsort(b[0])
    # Partners of one set have one sum; that their parts are not much larger than it keeps the interval short.
    width = 8 * allowed[0] * np.sqrt(size_a[0])
    low, high = (np.searchsorted(b[0][order], -a[0] + sign * width) for sign in (-1, 1))
    counts = high - low
    i = np.repeat(np.arange(len(left)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    j = order[np.repeat(low, counts) + offsets]
    good = np.ones(len(i), dtype=bool)
    for k, tolerance in enumerate(allowed):
        i, j = i[good], j[good]
        good = np.abs(a[k, i] + b[k, j]) <= tolerance * np.sqrt(size_a[k, i] + size_b[k, j])
    sets = {tuple(sorted({*left[p].tolist(), *right[q].tolist()})) for p, q in zip(i[good], j[good], strict=True)}
    full = left.shape[1] + right.shape[1]
    return [s for s in sorted(sets) if len(s) == full][:_MOST_FOUND]

"""Parameters that are invariant only together: the null space of the matrix of ⟨∇L, x⟩ over probes.

If scaling all parameters of a set by one ρ changes nothing, then Σ ⟨∇L, x_i⟩ = 0 over the set, in every probe.
So joint sets are the vectors of zeros and ones in the null space of M, M[k, i] = ⟨∇L, x_i⟩ of parameter i in
probe k. There are fewer probes than parameters, which leaves a null space too large to be read from M by linear
algebra; being 0/1 and sparse makes the vectors unique. Sets of up to four are sought among all by sorting sums,
larger ones among the sets that the graph proposes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["minimal", "set_imbalance", "signed_set_imbalance", "zero_sums"]

Matrix = NDArray[np.float64]
Indices = tuple[int, ...]

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


def zero_sums(M: Matrix, sizes: Matrix, tolerance: Sequence[float], *, larger: float = 1.0) -> list[Indices]:
    """Sets of two to four columns whose sum vanishes in every row, smallest first; some may contain others.

    Args:
        M: as in `set_imbalance`, the most telling probe first.
        sizes: as in `set_imbalance`.
        tolerance: imbalance allowed to a pair, per probe.
        larger: factor on it for sets of three and four, of which there are many more.

    >>> M = np.array([[3.0, -2.0, 1.0, -1.0], [1.0, 5.0, 2.0, -6.0]])
    >>> zero_sums(M, abs(M), [1e-9, 1e-9])
    [(0, 1, 3)]
    """
    n, allowed = M.shape[1], np.asarray(tolerance)
    single = np.arange(n)[:, None]
    pairs = np.array([(i, j) for i in range(n) for j in range(i + 1, n)], dtype=np.intp).reshape(-1, 2)
    found = _matches(M, sizes, single, single, allowed)
    if 3 <= n <= _MOST_FOR_THREE:
        found += _matches(M, sizes, pairs, single, larger * allowed)
    if 4 <= n <= _MOST_FOR_FOUR:
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

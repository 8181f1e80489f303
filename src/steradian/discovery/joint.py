"""Parameters that are invariant only together: the null space of the matrix of ⟨∇L, x⟩ over probes.

If scaling all parameters of a set by one ρ changes nothing, then Σ ⟨∇L, x_i⟩ = 0 over the set, in every probe. So joint
sets are vectors of zeros and ones in the null space of M, M[k, i] = ⟨∇L, x_i⟩ of parameter i in probe k. There are
fewer probes than parameters, but sparse 0/1 vectors are unique. Sets of up to four are searched among all by sorting
sums, larger ones among the sets that the graph proposes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from steradian.discovery import thresholds
from steradian.discovery.invariance import Cut, Cuts, block_sums, cut_of, divided, falls, follows_growth

if TYPE_CHECKING:
    from steradian.discovery.measurements import Measurements
    from steradian.discovery.probe import Reading


Readings = Sequence["Reading"]
Array = NDArray[np.float64]
Indices = tuple[int, ...]
Names = tuple[str, ...]


def joint_sets(measured: "Measurements", names: list[str]) -> dict[Names, bool]:
    """Minimal sets whose sums vanish in every probe and fall, and whether the sum alone shows that ε is the cause."""
    # The last probe goes first: with the least left of ε, it is the best one to sort sums by.
    grown, precision = measured.grown[::-1], measured.prober.precision
    allowed = [precision.strict, min(30 * precision.strict, precision.loose)][: len(grown)]
    loose = [precision.loose] * len(measured.random)
    # Whether parts cancel shows best where ε is gone. A set that was found by trying alone must cancel in the other
    # probes too; the two growths of one point cancel alike, so that one of them is enough.
    independent = [*measured.random, grown[0]]
    proposed = {tuple(names[i] for i in indices) for indices in _proposed_sets(measured, names)}
    explained: dict[Names, bool] = {}
    for s in vanishing_sets(measured, grown, allowed, names, least=thresholds.CANCELLATION):
        at_grown, at_random = (_whole_parts(measured, of, s).defects() for of in (grown, measured.random))
        after, before = torch.tensor(at_grown[[0, -1]], device="cpu")
        linear = bool((np.abs(at_random) <= precision.linear).all())
        linear = linear and bool(follows_growth(before, after, precision.resolution, order=1))
        # Of the whole, and of a typical slice that the members share.
        views = _parts(measured, grown, s, [(), *_many_slices(measured, s)])
        left = [torch.tensor(parts.typical()[[-1, 0]], device="cpu")[:, None] for parts in views]
        falling = [bool(falls(old, new, precision.settled)) for old, new in left]
        where = grown if s in proposed else independent
        # A set that vanishes by chance at one point must not hide the larger one that it is part of.
        if (linear or any(falling)) and _vanishes(measured, measured.random, loose, s, where, thresholds.CANCELLATION):
            by_sum = falling[0] and bool(follows_growth(before, after, precision.resolution))
            explained[s] = linear or len(grown) < len(thresholds.GROWTH) or by_sum
    minimal: dict[Names, bool] = {}
    for s in sorted(explained, key=lambda s: (len(s), [names.index(name) for name in s])):
        if not any(set(smaller) <= set(s) for smaller in minimal):
            minimal[s] = explained[s]
    return minimal


def vanishing_sets(
    measured: "Measurements", readings: Readings, allowed: list[float], names: list[str], *, least: float
) -> list[Names]:
    """Sets whose sums vanish in these readings, up to the imbalance allowed in each, because their parts cancel."""
    # Sets that the graph proposes may contain parameters that look balanced alone: beside a small bias, the weight
    # nearly is. Other sets are searched among the unbalanced.
    if not names:
        return []
    whole, found = _whole_parts(measured, readings, names), dict[Names, None]()
    M, sizes = whole.parts[:, :, 0], whole.sizes[:, :, 0]
    for every in _proposed_sets(measured, names):
        # The members that take part in the sum go first, unless all leave much less of it. A row that is invariant
        # alone adds only its defect.
        parts = np.abs(M[:, every])
        takes_part = parts > thresholds.TAKES_PART * np.linalg.norm(parts, axis=1, keepdims=True)
        some = tuple(compress(every, takes_part.any(0)))
        left, left_of_all = (np.abs(M[:, s].sum(1)).max(initial=0) for s in (some, every))
        for indices in (every, some) if left_of_all < left / 4 else (some, every):
            of_set = tuple(names[i] for i in indices)
            if len(of_set) > 1 and _vanishes(measured, readings, allowed, of_set, readings, least):
                found[of_set] = None
                break
    unbalanced = [i for i, name in enumerate(names) if name not in measured.may_be_invariant]
    # Among thousands of sets, some vanish by chance in float32.
    most = 4 if measured.prober.precision.dtype == torch.float64 else 2
    for s in _zero_sums(M[:, unbalanced], sizes[:, unbalanced], allowed, most=most):
        of_set = tuple(names[unbalanced[i]] for i in s)
        if _whole_parts(measured, _reaching(readings, of_set), of_set).cancels(thresholds.CANCELLATION):
            found[of_set] = None
    return list(found)


def _vanishes(
    measured: "Measurements", readings: Readings, allowed: list[float], names: Names, shown: Readings, least: float
) -> bool:
    """Whether a sum vanishes, as a whole or in a typical shared slice, and its parts cancel where that shows."""
    reaching = _reaching(readings, names)
    limits = [limit for limit, reading in zip(allowed, readings, strict=True) if reading in reaching]
    views = [(), *_many_slices(measured, names)]
    balanced = any(parts.balanced(limits) for parts in _parts(measured, reaching, names, views))
    return balanced and any(parts.cancels(least) for parts in _parts(measured, _reaching(shown, names), names, views))


def _reaching(readings: Readings, names: Sequence[str]) -> list["Reading"]:
    """The readings that reach a set: chance or the data may skip it. All of them if none does."""
    return [reading for reading in readings if any(reading.slope[name] for name in names)] or list(readings)


def _proposed_sets(measured: "Measurements", names: Sequence[str]) -> list[Indices]:
    """The sets that the graph proposes and, as a graph may hide their inside, the parameters of each module."""
    modules: dict[str, list[str]] = {}
    for name in measured.prober.trainable:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    # A parameter that is not in names has no effect, so it may grow or not.
    place = {name: i for i, name in enumerate(names)}
    sets = [*measured.graph.proposals[0], *modules.values()]
    found = {tuple(sorted(place[name] for name in s if name in place)) for s in sets}
    return sorted(indices for indices in found if len(indices) > 1)


def _zero_sums(M: Array, sizes: Array, tolerance: Sequence[float], *, most: int = 4) -> list[Indices]:
    """Sets of two to `most` columns whose sum vanishes in every row, smallest first; some may contain others.

    The tolerance is the imbalance allowed to a pair, per probe; the probe with the least noise is the first.

    >>> M = np.array([[3.0, -2.0, 1.0, -1.0], [1.0, 5.0, 2.0, -6.0]])
    >>> _zero_sums(M, abs(M), [1e-9, 1e-9])
    [(0, 1, 3)]
    """
    n, allowed = M.shape[1], np.asarray(tolerance)
    single = np.arange(n)[:, None]
    pairs = np.stack(np.triu_indices(n, 1), axis=1)
    found = _matches(M, sizes, single, single, allowed)
    if most >= 3 and 3 <= n <= thresholds.MOST_FOR_THREE:
        found += _matches(M, sizes, pairs, single, thresholds.LARGER_SETS * allowed)
    if most >= 4 and 4 <= n <= thresholds.MOST_FOR_FOUR:
        found += _matches(M, sizes, pairs, pairs, thresholds.LARGER_SETS * allowed)
    return list(dict.fromkeys(found))


def _matches(M: Array, sizes: Array, left: NDArray[np.intp], right: NDArray[np.intp], allowed: Array) -> list[Indices]:
    """Unions of a left and a right set whose sums cancel in all probes."""
    a, b = M[:, left].sum(2), M[:, right].sum(2)
    size_a, size_b = np.square(sizes[:, left]).sum(2), np.square(sizes[:, right]).sum(2)
    # Sums of the first probe are sorted, so that the possible partners of a sum, those of opposite sums, lie in one
    # interval. That their parts are not much larger than the sum keeps it short.
    order = np.argsort(b[0])
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
    return [s for s in sorted(sets) if len(s) == full][: thresholds.MOST_SETS]


@dataclass(frozen=True)
class Parts:
    """What the members of one set add to its sum: of the whole tensors, or of each slice that they share.

    Rows of a set that happen to have next to no variance (a unit of ReLU that is hardly ever active) keep a large
    part of what ε does to them, and in the sum over all rows they dominate the others. The slices separate them.
    """

    parts: Array  # ⟨∇L, x_i⟩, probes × members × slices
    sizes: Array  # their absolute values, with a floor: a probe in which one is small must not magnify what ε leaves
    floor: Array  # per probe, the size up to which a slice is rounding

    def defects(self) -> Array:
        """What is left of each sum, relative to its parts: Σ parts / √Σ sizes², probes × slices."""
        size = np.linalg.norm(self.sizes, axis=1)
        return np.asarray(self.parts.sum(1) / np.where(size > 0, size, 1))

    def typical(self) -> Array:
        """Per probe, the defect of a typical slice; inf if no slice is measurable."""
        rows = zip(np.abs(self.defects()), self._measurable(), strict=True)
        return np.array([np.median(defects[counts]) if counts.any() else np.inf for defects, counts in rows])

    def balanced(self, allowed: Sequence[float]) -> bool:
        """Whether a typical slice vanishes in every probe, up to what is allowed there."""
        left = self.typical() / np.asarray(allowed)
        # One of three may leave four times as much: where few units are active, ε has more weight at some points.
        return bool((left > 1).sum() <= len(left) // 3) and bool((left <= 4).all())

    def cancels(self, least: float) -> bool:
        """Whether each member's part is, on average of the logarithm, `least` times what the others leave of it."""
        tiny, slices = np.finfo(np.float64).tiny, self.parts.shape[2]
        rounding = thresholds.ROUNDING_OF_SUM * np.sqrt(np.square(self.sizes).sum(1, keepdims=True)) + tiny
        left = np.maximum(np.abs(self.parts.sum(1, keepdims=True)), rounding)
        ratio = np.log(np.abs(self.parts) + tiny) - np.log(left)
        counts = np.broadcast_to(self._measurable()[:, None, :], ratio.shape)
        if slices > 1:
            # Those do not count in which the part is small: a unit of ReLU that is always active does not need a bias.
            counts = counts & (np.abs(self.parts) > self.sizes / 2)
        number = counts.sum((0, 2))
        if not self.parts.any() or bool((number < min(slices, thresholds.MANY_ROWS)).any()):
            return False
        average = np.where(counts, ratio.clip(max=np.log(1e6)), 0).sum((0, 2)) / number
        return bool((average > np.log(least)).all())

    def _measurable(self) -> NDArray[np.bool_]:
        """Probes × slices."""
        return np.asarray(np.sqrt(np.square(self.sizes).sum(1)) > self.floor[:, None])


def _parts(measured: "Measurements", readings: Readings, names: Sequence[str], views: list[Cuts]) -> Iterator[Parts]:
    """What each member adds in each slice, for the views whose tables the probes have; () is one of whole tensors."""
    for view in views:
        cuts = view or [()] * len(names)
        members = [(r.tables[name], cut) for r in readings for name, cut in zip(names, cuts, strict=True)]
        if all(divided(cut) in tables for tables, cut in members):
            sums = np.array([block_sums(*member)[:2].numpy() for member in members])
            sums = sums.reshape(len(readings), len(names), 2, -1)
            parts, effects = sums[:, :, 0], np.sqrt(sums[:, :, 1])
            least = thresholds.MEASURABLE if view else 0.0
            floor = np.array([least * measured.floor(reading, names) for reading in readings])
            yield Parts(parts, np.hypot(parts, thresholds.LEAST_SHARE * effects), floor)


def _whole_parts(measured: "Measurements", readings: Readings, names: Sequence[str]) -> Parts:
    return next(_parts(measured, readings, names, [()]))


def _many_slices(measured: "Measurements", names: Sequence[str]) -> list[Cuts]:
    """The ways in which the members share so many slices that a typical one can be judged."""
    shapes = [measured.shapes[name] for name in names]
    if all(len(shape) == 1 for shape in shapes):
        return []  # a single number of each
    return [cuts for cuts in alignments(shapes) if math.prod(cuts[0]) >= thresholds.MANY_ROWS]


def alignments(shapes: Sequence[tuple[int, ...]]) -> list[Cuts]:
    """The ways to lay slices of parameters of these shapes beside each other, one for each output.

    A bias has an entry for each output of its weight, and the outputs lie along dimension 0 of a convolution, along
    dimension 1 of a transposed one, and along g blocks of dimension 0 times dimension 1 of one with g groups.

    >>> alignments([(8, 3), (8,)]), alignments([(4, 6, 3, 3), (6,)]), alignments([(4, 3, 5, 5), (6,)])
    ([((8, 1), (8,))], [((1, 6, 1, 1), (6,))], [((2, 3, 1, 1), (6,))])
    """
    tensors, vectors = [s for s in shapes if len(s) > 1], {s for s in shapes if len(s) == 1}
    if len(vectors) > 1 or any(not s for s in shapes):
        return []
    if not tensors:
        return [tuple(shapes)]
    sizes = [(dim, tensors[0][dim]) for dim in range(min(map(len, tensors)))]
    blocks = [{dim: n} for dim, n in sizes if all(s[dim] == n for s in tensors) and vectors <= {(n,)}]
    for (length,) in vectors:
        groups = length // tensors[0][1]  # only convolutions have any
        if groups > 1 and all(len(s) > 2 and s[1] * groups == length and s[0] % groups == 0 for s in tensors):
            blocks.append({0: groups, 1: length // groups})
    return [tuple(s if len(s) == 1 else cut_of(len(s), of_dim) for s in shapes) for of_dim in blocks]


def coarser(cut: Cut, blocks: int) -> Cut | None:
    """The cut into so many equal blocks of slices, in their order; None if there is none.

    >>> coarser((1, 6, 1), 3), coarser((2, 3), 2), coarser((2, 3), 6), coarser((2, 3), 3)
    ((1, 3, 1), (2, 1), (2, 3), None)
    """
    counts = []
    for of_dim in cut:
        counts.append(math.gcd(blocks, of_dim))
        if counts[-1] not in (blocks, of_dim):
            return None
        blocks //= counts[-1]
    return tuple(counts)

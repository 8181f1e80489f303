"""Sides that scale against each other: f(αa, b/α) = f(a, b), such as the rows of `up` and the columns of `down`.

Then ⟨∇L, a⟩ = ⟨∇L, b⟩ in every probe, and the tables of the probes have these sums for every slice of every parameter.
The graph says which sides to compare: parameters that scale a tensor together (`proposals`) with those that multiply it
next (`readers`), or with parameters that scale another tensor which meets it before that, as queries meet keys. Sides
whose totals agree are cut into sets as finely as the sums of these agree.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steradian.discovery import thresholds
from steradian.discovery.invariance import Cut, block_sums, cut_of, divided, divisors, to_spec
from steradian.discovery.joint import Array, Names, coarser
from steradian.discovery.measurements import Measurements
from steradian.groups import Pair, Spec

Fold = tuple[int, int, int, int]
"""A dimension as a (g0, d0, g1, d1) array: a set has one index of each g and all of each d."""


@dataclass(frozen=True, eq=False)
class Side:
    """Parameters that scale together, and the slices of each that belong together: equal ranges of one dimension.

    Most are one range. Those of queries, keys and values may be one for each head, and where blocks of dimension 0
    have slices of their own, such as the groups of a convolution, it is one in each.
    """

    names: Names
    cuts: tuple[Cut, ...]  # of each parameter into its slices; a whole one is one slice
    sums: Array  # probes × 2 × slices: Σ g·x and Σ (g·x)² over the parameters
    ranges: int = 1
    start: int = 0  # of the first range
    stride: int = 0  # from one range to the next

    @property
    def size(self) -> int:
        """The number of slices."""
        return self.sums.shape[2]

    @property
    def length(self) -> int:
        """The number of slices of a range."""
        return self.size // self.ranges

    @cached_property
    def total(self) -> Array:
        """Σ g·x and Σ (g·x)² in the first probe."""
        return np.asarray(self.sums[0].sum(1))

    def piece(self, start: int, length: int, ranges: int) -> "Side":
        """A part of each range, or, of a single one, of so many equal parts of it."""
        shape = self.sums.shape[:2]
        sums = self.sums.reshape(*shape, ranges, -1)[..., start : start + length].reshape(*shape, -1)
        stride = self.stride if self.ranges > 1 or ranges == 1 else self.size // ranges
        return replace(self, start=self.start + start, sums=sums, ranges=ranges, stride=stride)

    def disjoint(self, other: "Side") -> bool:
        """Whether no slice is in both."""
        if self.names == other.names and self.cuts == other.cuts:
            return not np.isin(self._places, other._places, assume_unique=True).any()
        return set(self.names).isdisjoint(other.names)

    @cached_property
    def _places(self) -> NDArray[np.intp]:
        return self.start + np.add.outer(self.stride * np.arange(self.ranges), np.arange(self.length)).ravel()

    def within(self, other: "Side") -> bool:
        """Whether another side has these parameters, in ranges that meet, and perhaps more."""
        return set(self.names) <= set(other.names) and not self.disjoint(other)

    def fold(self, fold: Fold) -> Array:
        """The sums of each set."""
        shape = self.sums.shape[:2]
        return np.asarray(self.sums.reshape(*shape, *fold).sum((3, 5)).reshape(*shape, -1))

    def folds(self, g0: int, g1: int) -> list[tuple[Fold, Array]]:
        """The folds into g0 × g1 sets, with the sums of each set; slices of two dimensions are not folded."""
        rest = self.size // (g0 * g1)
        folds = [(g0, d0, g1, rest // d0) for d0 in (divisors(rest) if g1 > 1 else (rest,))]
        return [(fold, self.fold(fold)) for fold in folds if rest == 1 or all(len(divided(c)) < 2 for c in self.cuts)]

    def specs(self, fold: Fold, shapes: Mapping[str, Sequence[int]]) -> tuple[Spec, ...]:
        """How each parameter is cut by a fold of the slices."""
        g0, d0, g1, d1 = fold
        if d0 == 1 or g1 == 1:
            g0, d0, g1, d1 = g0 * g1, d0 * d1, 1, 1
        specs: list[Spec] = []
        for name, cut in zip(self.names, self.cuts, strict=True):
            *_, dim = 0, *divided(cut)
            if self.size == math.prod(cut) and g1 == 1:
                specs.append(to_spec(coarser(cut, g0) or (), shapes[name]))
            elif len(divided(cut)) > 1:
                specs.append(("fold", dim, self.start, self.length, 1, 1, 1, self.ranges))
            else:
                ranges = (self.ranges, self.stride) if self.ranges > 1 else ()
                specs.append(("fold", dim, self.start, g0, d0, g1, d1, *ranges))
        return tuple(specs)


def find_pairs(measured: Measurements, no_effect: Container[str]) -> list[Pair]:
    """The pairs by the readings, without those whose sides are invariant each by itself."""
    if measured.prober.precision.dtype != torch.float64 or not measured.graphs:
        return []  # in float32, sums agree by chance
    search = _Search(measured)
    reads, order = measured.graph.readers(), measured.graph.order_of_use
    names = frozenset(name for name in measured.names_with_effect() if name in order and name not in no_effect)
    place = {name: i for i, name in enumerate(measured.prober.trainable)}.__getitem__
    proposed = [*measured.graph.proposals[0], *((name,) for name in names)]
    sets = {tuple(sorted(names.intersection(s), key=place)) for s in proposed}
    # By what reads them, sides that may have another partner, with the number of sets of the pair that they are in.
    unpaired: dict[frozenset[str], list[tuple[list[Side], int]]] = {}
    for a in sorted(sets - {()}, key=lambda s: (len(s), [order[name] for name in s])):
        b = names & frozenset[str]().union(*(reads[name] for name in a)) - set(a)
        # Parts of a tensor are compared where few parameters are, not among all that write to a residual stream.
        if len(a) + len(b) > thresholds.MOST_WITH_PARTS and not _near(search.total(a), search.total(b)):
            continue
        sides = search.sides(a)
        left = search.pair_up(sides, search.sides(sorted(b, key=place))) if b else [(sides, 0)]
        if b and all(measured.prober.parameters[name].numel() == 1 for name in b):
            b = names.intersection(*(reads[name] for name in b))  # behind a temperature
        unpaired.setdefault(b, []).extend(left)
    for left in unpaired.values():
        left.sort(key=lambda part: -part[0][0].size)  # a part of a pair is none of its own
        totals = np.array([one[0].total for one, _ in left]).T
        for i, j in np.argwhere(np.triu(_near(totals[:, :, None], totals[:, None]), 1)):
            (one, n), (other, m) = sorted((left[i], left[j]), key=lambda part: order[part[0][0].names[0]])
            search.pair(one, other, "multiplied with each other", more_than=min(n, m))
    return sorted((pair for _, _, pair in search.found), key=lambda pair: order[pair.a[0]])


class _Search:
    def __init__(self, measured: Measurements) -> None:
        self.measured, self.shapes = measured, measured.shapes
        self.found: list[tuple[Side, Side, Pair]] = []
        exact = [measured.first, *(() if measured.late else measured.grown), measured.own]
        self.readings = [reading for reading in exact if reading.noise == measured.own.noise]

    def total(self, names: Iterable[str]) -> Array:
        """Σ g·x and Σ (g·x)² of some parameters in the first probe."""
        return sum((self.readings[0].tables[name][()][:2].numpy() for name in names), np.zeros(2))

    def sides(self, names: Sequence[str]) -> list[Side]:
        """The ways to lay slices of these parameters beside each other, the whole parameters last."""
        shapes = [self.shapes[name] for name in names]
        ways: dict[tuple[Cut, ...], int] = {}  # with the number of blocks
        for size in set[int](shapes[0]).intersection(*shapes) - {1}:
            for k in (0, 1, -1):
                dims = [k % len(s) if s[k % len(s)] == size else s.index(size) for s in shapes]
                ways[tuple(cut_of(len(shape), {dim: size}) for shape, dim in zip(shapes, dims, strict=True))] = 1
        blocks = self.measured.prober.blocks
        if len(found := {blocks[name] for name in names if name in blocks}) == 1 and all(shapes):
            number = found.pop()
            for k in (1, 2):
                cuts = [
                    cut_of(len(s), {0: number, k: s[k]} if n in blocks and k < len(s) else {0: s[0]})
                    for n, s in zip(names, shapes, strict=True)
                ]
                if len({math.prod(cut) for cut in cuts}) == 1:
                    ways[tuple(cuts)] = number
        ways[tuple(cut_of(len(shape), {}) for shape in shapes)] = 1
        sides = []
        for way, number in ways.items():
            members = list(zip(names, way, strict=True))
            sums = [[block_sums(r.tables[n], cut)[:2].numpy() for n, cut in members] for r in self.readings]
            stride = math.prod(way[0]) // number
            sides.append(Side(tuple(names), way, np.array(sums).sum(1), number, stride=stride))
        return sides

    def pair_up(self, a: list[Side], b: list[Side]) -> list[tuple[list[Side], int]]:
        """Add the pair of two sides, or of parts of one with the other; return a and its parts, and their sets."""
        # Parts are several in one tensor, as queries, keys and values, or of several, as in a concatenation, and may
        # have readers of their own.
        reason = "b reads what a scales"
        if n := self.pair(a, b, reason):
            return [(a, n)]
        left: dict[Any, tuple[list[Side], int]] = {}
        alone = [self.sides([name]) for name in b[0].names] if len(b[0].names) > 1 else []
        for reader in [b, *alone]:
            parts = [(part, s) for s, t in product(a, reader) for part in _parts(s, t)]
            for part, s in sorted(parts, key=lambda found: -found[0].size):  # the finest first
                n = self.pair([part], reader, reason) if _near(part.total, reader[0].total) else 0
                for p, sets in [(part, n), *((other, 0) for other in _beside(part, s) if n)]:
                    key = p.cuts, p.start, p.size, p.ranges
                    left[key] = [p], max(sets, left[key][1] if key in left else 0)
        for s, t in product(a, b):
            for part in _parts(t, s):
                if _near(part.total, s.total):
                    self.pair([s], [part], reason)
        return [(a, 0), *left.values()]

    def pair(self, a: list[Side], b: list[Side], reason: str, *, more_than: int = 0) -> int:
        """Add the pair with most sets, more than some number, among the ways to cut two sides; how many it has."""
        names = (*a[0].names, *b[0].names)
        for *both, pair in self.found:
            if set(names).issuperset((*pair.a, *pair.b)) and _follows((a[0], b[0]), both):
                return pair.n
        floor = np.array([[self.measured.floor(reading, names)] for reading in self.readings])
        able = [
            (one, other, math.gcd(one.size, other.size))
            for one, other in product(a, b)
            if one.disjoint(other)
            if self._agree(one.sums.sum(2, keepdims=True), other.sums.sum(2, keepdims=True), floor).all()
        ]
        for sets in sorted({sets for *_, most in able for sets in divisors(most) if sets > more_than}, reverse=True):
            for one, other, _ in (sides for sides in able if sides[2] % sets == 0):
                for (fold_a, sums_a), (fold_b, sums_b) in _folded(one, other, sets):
                    if self._agree(sums_a, sums_b, floor).all():
                        if not _has_effect(sums_a, sums_b, floor):
                            return 0
                        parts = self._split(one, other, sets, floor)
                        if parts and (n := self.pair(*parts[0], reason)):
                            return n + self.pair(*parts[1], reason)
                        a_specs, b_specs = one.specs(fold_a, self.shapes), other.specs(fold_b, self.shapes)
                        self.found.append((one, other, Pair(one.names, other.names, a_specs, b_specs, sets, reason)))
                        return sets
        return 0

    def _split(self, one: Side, other: Side, sets: int, floor: Array) -> list[tuple[list[Side], list[Side]]]:
        """Of both sides, the channels of each head that agree one by one, and the others, which are rotated."""
        least, most = sorted((one.size, other.size))
        found = []
        for heads in divisors(least) if sets < least and most % least == 0 else ():
            a, b = (side.fold((heads, side.size // least, least // heads, 1)) for side in (one, other))
            channels = np.atleast_1d(self._agree(a, b, floor).reshape(-1, least // heads).all(0))
            if not channels.all() and all(side.ranges in (1, heads * side.size // least) for side in (one, other)):
                runs = enumerate((channels, channels[::-1]))
                found += [(heads * int(run.cumprod().sum()), heads, behind) for behind, run in runs]
        n, heads, behind = max(found, default=(0, 1, 0))
        if n < max(sets, 1):
            return []
        size, rest = n // heads, (least - n) // heads
        ranges = [(rest, size), (0, rest)] if behind else [(0, size), (size, rest)]
        blocks = [heads * side.size // least for side in (one, other)]
        return [([one.piece(*where, blocks[0])], [other.piece(*where, blocks[1])]) for where in ranges]

    def _agree(self, sums_a: Array, sums_b: Array, floor: Array) -> NDArray[np.bool_]:
        """Whether ⟨∇L, a⟩ = ⟨∇L, b⟩ of each set in each reading, up to rounding."""
        allowed = self.measured.prober.precision.resolution * np.sqrt(sums_a[:, 1] + sums_b[:, 1]) + floor
        return np.asarray(np.abs(sums_a[:, 0] - sums_b[:, 0]) <= allowed)


def _near(sums: Any, other: Any) -> Any:
    """Whether sums nearly agree in the first probe: most do not, and there may be many."""
    return (sums[0] - other[0]) ** 2 <= thresholds.NEARLY_AGREE**2 * (sums[1] + other[1])


def _follows(both: Sequence[Side], known: Sequence[Side]) -> bool:
    """Whether one side is the same as in a known pair, and the other only has more parameters."""
    ways = product(permutations(both), permutations(known))
    return any(one.within(x) and other.within(y) and y.within(other) for (x, y), (one, other) in ways)


def _has_effect(sums_a: Array, sums_b: Array, floor: Array) -> bool:
    """Whether a typical set with an effect changes the outputs when one side alone is scaled."""
    effect = np.sqrt(np.maximum(sums_a[:, 1], sums_b[:, 1]))
    probes = zip(sums_a[:, 0], effect, effect > thresholds.MEASURABLE * floor, strict=True)
    shares = [np.median(np.abs(radial[counts]) / size[counts]) for radial, size, counts in probes if counts.any()]
    return bool(min(shares, default=0.0) > thresholds.INVARIANT_SIDE)


def _folded(a: Side, b: Side, sets: int) -> Iterator[tuple[tuple[Fold, Array], tuple[Fold, Array]]]:
    """Folds of both sides into so many sets, with the sums of each set."""
    for g0 in reversed(divisors(sets)):
        yield from product(a.folds(g0, sets // g0), b.folds(g0, sets // g0))


def _parts(side: Side, other: Side) -> Iterator[Side]:
    """Parts of a side that may go with another: of the whole, or of each of several equal blocks of it, as heads."""
    # Equal ones, both ends, or one large and two small ones. Where slices agree one by one, any range may.
    for blocks in divisors(math.gcd(side.size, other.size)) if side.ranges == 1 else (side.ranges,):
        n, size = side.size // blocks, other.size // blocks
        if size < n <= thresholds.MOST_PARTS * size and side.size // n * size > 1:
            small = (n - size) // 2
            starts = range(0, n, size) if n % size == 0 else (0, n - size)
            yield from (side.piece(start, size, blocks) for start in starts)
            if 2 * small + size == n and size % small == 0:
                yield from (side.piece(start, small, blocks) for start in (size, size + small))
    if side.ranges == 1 and 1 < other.size < side.size:
        strongest = int(other.sums[0, 1].argmax())
        near = np.flatnonzero(_near(side.sums[0], other.sums[0, :, strongest])) - strongest
        inside = near[(near >= 0) & (near <= side.size - other.size)]
        yield from (side.piece(start, other.size, 1) for start in inside.tolist())


def _beside(part: Side, side: Side) -> Iterator[Side]:
    """What a part leaves of each block: all before or behind it, the halves of that, or the same number of slices."""
    size, n = part.length, side.size // part.ranges
    first = part.start - side.start
    for start, stop in ((0, first), (first + size, n)):
        half = (stop - start) // 2
        cuts = {(start, stop), (start, start + half), (stop - half, stop), (start, stop - size), (stop - size, stop)}
        yield from (side.piece(i, j - i, part.ranges) for i, j in cuts if start <= i < j)

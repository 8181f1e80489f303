"""Sides that scale against each other: f(αa, b/α) = f(a, b), such as the rows of `up` and the columns of `down`.

Then ⟨∇L, a⟩ = ⟨∇L, b⟩ in every probe, and the tables of the probes have these sums for every slice of every parameter.
The graph says which sides to compare: parameters that scale a tensor together (`propose`) with those that multiply it
next (`readers`), or with parameters that scale another tensor which meets it before that, as queries meet keys. Sides
whose totals agree are cut into sets as finely as the sums of these agree.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations, product

import numpy as np
import torch

from steradian.discovery import thresholds
from steradian.discovery.graph import readers
from steradian.discovery.invariance import Cut, block_sums, cut_of, divisors, to_spec
from steradian.discovery.joint import Array
from steradian.discovery.measurements import Measurements, Names
from steradian.groups import Pair, Spec

Fold = tuple[int, int, int, int]
"""A dimension as a (g0, d0, g1, d1) array: a set has one index of each g and all of each d."""


@dataclass(frozen=True, eq=False)
class Side:
    """Parameters that scale together, and the slices of each that belong together: a range of one dimension.

    Where blocks of dimension 0 have slices of their own, such as the groups of a convolution, it is a range in each.
    """

    names: Names
    cuts: tuple[Cut, ...]  # of each parameter into its slices; a whole one is one slice
    sums: Array  # probes × 2 × slices: Σ g·x and Σ (g·x)² over the parameters
    blocks: int = 1
    start: int = 0  # of the range

    @property
    def size(self) -> int:
        """The number of slices."""
        return self.sums.shape[2]

    @cached_property
    def total(self) -> tuple[float, float]:
        """Σ g·x and Σ (g·x)² in the first probe."""
        radial, effect = self.sums[0].sum(1).tolist()
        return radial, effect

    def piece(self, start: int, size: int) -> "Side":
        """A range of the slices of each block."""
        inside = self.sums.reshape(*self.sums.shape[:2], self.blocks, -1)[..., start : start + size]
        return replace(self, start=start, sums=inside.reshape(*self.sums.shape[:2], -1))

    def disjoint(self, other: "Side") -> bool:
        """Whether no slice is in both."""
        if self.names == other.names and self.cuts == other.cuts:
            stop, other_stop = (side.start + side.size // side.blocks for side in (self, other))
            return stop <= other.start or other_stop <= self.start
        return set(self.names).isdisjoint(other.names)

    def within(self, other: "Side") -> bool:
        """Whether another side has these parameters, in the same range, and perhaps more."""
        return set(self.names) <= set(other.names) and not self.disjoint(other)

    def fold(self, fold: Fold) -> Array:
        """The sums of each set."""
        shape = self.sums.shape[:2]
        folded: Array = self.sums.reshape(*shape, *fold).sum((3, 5)).reshape(*shape, -1)
        return folded

    def folds(self, g0: int, g1: int) -> list[tuple[Fold, Array]]:
        """The folds into g0 × g1 sets, with the sums of each set; blocks are not folded."""
        rest = self.size // (g0 * g1)
        folds = [(g0, d0, g1, rest // d0) for d0 in (divisors(rest) if g1 > 1 else (rest,))]
        return [(fold, self.fold(fold)) for fold in folds if self.blocks == 1 or rest == 1]

    def specs(self, fold: Fold, shapes: Mapping[str, Sequence[int]]) -> tuple[Spec, ...]:
        """How each parameter is cut by a fold of the slices."""
        g0, d0, g1, d1 = fold
        if d0 == 1 or g1 == 1:
            g0, d0, g1, d1 = g0 * g1, d0 * d1, 1, 1
        specs: list[Spec] = []
        for name, cut in zip(self.names, self.cuts, strict=True):
            *_, dim = 0, *(i for i, n in enumerate(cut) if n > 1)
            if self.size == math.prod(cut) and g1 == 1:
                blocks = (*cut[:dim], g0 // math.prod(cut[:dim]), *cut[dim + 1 :])
                specs.append(to_spec(blocks, shapes[name]) if cut else "tensor")
            elif self.blocks == 1:
                specs.append(("fold", dim, self.start, g0, d0, g1, d1))
            else:
                specs.append(("fold", dim, self.start, g0 // self.blocks, 1, 1, 1, self.blocks))
        return tuple(specs)


def find_pairs(measured: Measurements, no_effect: Container[str]) -> list[Pair]:
    """The pairs by the readings, without those whose sides are invariant each by itself."""
    if measured.prober.precision.dtype != torch.float64 or not measured.graphs:
        return []  # in float32, sums agree by chance
    search = _Search(measured)
    reads, order = readers(measured.graph), measured.graph.order_of_use
    names = frozenset(name for name in measured.names_with_effect() if name in order and name not in no_effect)
    place = {name: i for i, name in enumerate(measured.prober.trainable)}.__getitem__
    proposed = [*measured.proposals.sets, *((name,) for name in names)]
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
        for (one, n), (other, m) in combinations(left, 2):
            if _near(one[0].total, other[0].total):
                search.pair(one, other, "multiplied with each other", more_than=min(n, m))
    return sorted((pair for _, _, pair in search.found), key=lambda pair: order[pair.a[0]])


class _Search:
    def __init__(self, measured: Measurements) -> None:
        self.measured, self.shapes = measured, measured.shapes
        self.found: list[tuple[Side, Side, Pair]] = []
        exact = [measured.first, *(() if measured.late else measured.grown), measured.own]
        self.readings = [r for r in exact if r is not None and r.noise == measured.own.noise]

    def total(self, names: Iterable[str]) -> tuple[float, float]:
        """Σ g·x and Σ (g·x)² of some parameters in the first probe."""
        first = self.readings[0]
        return sum(first.radial[name] for name in names), sum(first.effect[name] ** 2 for name in names)

    def sides(self, names: Sequence[str]) -> list[Side]:
        """The ways to lay slices of these parameters beside each other, the whole parameters last."""
        shapes = [self.shapes[name] for name in names]
        ways: dict[tuple[Cut, ...], int] = {}  # with the number of blocks
        for size in set[int](shapes[0]).intersection(*shapes) - {1}:
            for k in (0, 1, -1):
                dims = [k % len(s) if s[k % len(s)] == size else s.index(size) for s in shapes]
                ways[tuple(cut_of(len(shape), {dim: size}) for shape, dim in zip(shapes, dims, strict=True))] = 1
        blocks = self.measured.prober.blocks
        if len(found := {blocks[name] for name in names if name in blocks}) == 1:
            number = found.pop()
            for k in (1, 2):
                cuts = [
                    cut_of(len(s), {0: number, k: s[k]} if n in blocks and k < len(s) else {0: s[0]})
                    for n, s in zip(names, shapes, strict=True)
                ]
                if len({math.prod(cut) for cut in cuts}) == 1:
                    ways[tuple(cuts)] = number
        ways[tuple(cut_of(len(shape), {}) for shape in shapes)] = 1
        return [Side(tuple(names), cuts, self._sums(names, cuts), number) for cuts, number in ways.items()]

    def _sums(self, names: Sequence[str], cuts: Sequence[Cut]) -> Array:
        parts = [
            [block_sums(r.tables[name], cut)[:2].reshape(2, -1).numpy() for name, cut in zip(names, cuts, strict=True)]
            for r in self.readings
        ]
        return np.array(parts).sum(1)

    def pair_up(self, a: list[Side], b: list[Side]) -> list[tuple[list[Side], int]]:
        """Add the pair of two sides, or of parts of one with the other; return a and its parts, and the sets of each.

        Parts of a tensor are several in one, as queries, keys and values, or come from several, as a concatenation.
        """
        reason = "b reads what a scales"
        if n := self.pair(a, b, reason):
            return [(a, n)]
        parts = {(s.cuts, p.start, p.size): p for s in a for t in b for p in _parts(s, t.size)}
        finest_first = sorted(parts.values(), key=lambda part: -part.size)
        left = [([part], self.pair([part], b, reason)) for part in finest_first]
        for s, t in product(a, b):
            for part in _parts(t, s.size):
                self.pair([s], [part], reason)
        return [(a, 0), *left]

    def pair(self, a: list[Side], b: list[Side], reason: str, *, more_than: int = 0) -> int:
        """Add the pair of two sides that has most sets, if there is one; the number of sets, 0 for none.

        Args:
            a: the ways to cut one side.
            b: the ways to cut the other.
            reason: why they are a pair.
            more_than: sets that both have against a third side, so that fewer or as many follow from that.
        """
        names = (*a[0].names, *b[0].names)
        for *both, pair in self.found:
            if set(names).issuperset((*pair.a, *pair.b)) and _follows((a[0], b[0]), both):
                return pair.n
        floor = np.array([[self.measured.floor(reading, names)] for reading in self.readings])
        able = [
            (one, other, math.gcd(one.size, other.size))
            for one, other in product(a, b)
            if one.disjoint(other)
            and self._agree(one.fold((1, one.size, 1, 1)), other.fold((1, other.size, 1, 1)), floor)
        ]
        for sets in sorted({sets for *_, most in able for sets in divisors(most) if sets > more_than}, reverse=True):
            for one, other, _ in (sides for sides in able if sides[2] % sets == 0):
                for (fold_a, sums_a), (fold_b, sums_b) in _folded(one, other, sets):
                    if self._agree(sums_a, sums_b, floor):
                        if not _has_effect(sums_a, sums_b, floor):
                            return 0
                        a_specs, b_specs = one.specs(fold_a, self.shapes), other.specs(fold_b, self.shapes)
                        self.found.append((one, other, Pair(one.names, other.names, a_specs, b_specs, sets, reason)))
                        return sets
        return 0

    def _agree(self, sums_a: Array, sums_b: Array, floor: Array) -> bool:
        """Whether ⟨∇L, a⟩ = ⟨∇L, b⟩ of every set in every reading, up to rounding."""
        allowed = self.measured.prober.precision.resolution * np.sqrt(sums_a[:, 1] + sums_b[:, 1]) + floor
        return bool((np.abs(sums_a[:, 0] - sums_b[:, 0]) <= allowed).all())


def _near(total: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two totals nearly agree in the first probe: most do not, and there may be many."""
    return (total[0] - other[0]) ** 2 <= thresholds.NEARLY_AGREE**2 * (total[1] + other[1])


def _follows(both: Sequence[Side], known: Sequence[Side]) -> bool:
    """Whether one side is the same as in a known pair, and the other only has more parameters."""
    ways = product(permutations(both), permutations(known))
    return any(one.within(x) and other.within(y) and y.within(other) for (x, y), (one, other) in ways)


def _has_effect(sums_a: Array, sums_b: Array, floor: Array) -> bool:
    """Whether a typical set with an effect changes the outputs when one side alone is scaled."""
    effect = np.sqrt(np.maximum(sums_a[:, 1], sums_b[:, 1]))
    shares = [
        np.median(np.abs(radial[counts]) / size[counts])
        for radial, size, counts in zip(sums_a[:, 0], effect, effect > thresholds.MEASURABLE * floor, strict=True)
        if counts.any()
    ]
    return bool(min(shares, default=0.0) > thresholds.INVARIANT_SIDE)


def _folded(a: Side, b: Side, sets: int) -> Iterator[tuple[tuple[Fold, Array], tuple[Fold, Array]]]:
    """Folds of both sides into so many sets, with the sums of each set."""
    for g0 in reversed(divisors(sets)):
        yield from product(a.folds(g0, sets // g0), b.folds(g0, sets // g0))


def _parts(side: Side, size: int) -> Iterator[Side]:
    """Ranges of the slices that may go with so many others: equal parts, both ends, one large and two small parts."""
    n, size = side.size // side.blocks, size // side.blocks
    if 1 < size < n <= thresholds.MOST_PARTS * size:
        small = (n - size) // 2
        starts = range(0, n, size) if n % size == 0 else (0, n - size)
        yield from (side.piece(start, size) for start in starts)
        if 2 * small + size == n and size % small == 0:
            yield from (side.piece(start, small) for start in (size, size + small))

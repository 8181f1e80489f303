"""Sides that scale against each other: f(αa, b/α) = f(a, b), such as the rows of `up` and the columns of `down`.

Then ⟨∇L, a⟩ = ⟨∇L, b⟩ in every probe, and the tables of the probes have these sums for every slice of every parameter.
The graph says which sides to compare: parameters that scale a tensor together (`propose`) with those that multiply it
next (`readers`), or with parameters that scale another tensor which meets it before that, as queries meet keys. Sides
whose totals agree are cut into sets as finely as the sums of these agree.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
import torch

from steradian.discovery import thresholds
from steradian.discovery.graph import readers
from steradian.discovery.invariance import divisors, to_spec
from steradian.discovery.joint import Array
from steradian.discovery.measurements import Measurements, Names
from steradian.groups import Pair, Spec

Fold = tuple[int, int, int, int]
"""A dimension as a (g0, d0, g1, d1) array: a set has one index of each g and all of each d."""


@dataclass(frozen=True, eq=False)
class Side:
    """Parameters that scale together, and the slices of each that belong together: a range of one dimension."""

    names: Names
    dims: tuple[int | None, ...]  # along which the slices of each lie; None for a whole parameter, which is one slice
    start: int
    sums: Array  # probes × 2 × slices: Σ g·x and Σ (g·x)² over the parameters

    @property
    def size(self) -> int:
        """The number of slices."""
        return self.sums.shape[2]

    def piece(self, start: int, size: int) -> "Side":
        """A range of the slices."""
        return replace(self, start=start, sums=self.sums[:, :, start : start + size])

    def disjoint(self, other: "Side") -> bool:
        """Whether no slice is in both."""
        if self.names == other.names and self.dims == other.dims:
            return self.start + self.size <= other.start or other.start + other.size <= self.start
        return set(self.names).isdisjoint(other.names)

    def fold(self, fold: Fold) -> Array:
        """The sums of each set."""
        shape = self.sums.shape[:2]
        folded: Array = self.sums.reshape(*shape, *fold).sum((3, 5)).reshape(*shape, -1)
        return folded

    def within(self, other: "Side") -> bool:
        """Whether another side has these parameters, in the same range, and perhaps more."""
        return set(self.names) <= set(other.names) and not self.disjoint(other)

    def specs(self, fold: Fold, shapes: Mapping[str, Sequence[int]]) -> tuple[Spec, ...]:
        """How each parameter is cut by a fold of the slices."""
        g0, d0, g1, d1 = fold
        if d0 == 1 or g1 == 1:
            g0, d0, g1, d1 = g0 * g1, d0 * d1, 1, 1
        specs: list[Spec] = []
        for dim, shape in zip(self.dims, (shapes[name] for name in self.names), strict=True):
            if dim is None:
                specs.append("tensor")
            elif g1 == 1 and self.size == shape[dim]:
                specs.append(to_spec(tuple(g0 if i == dim else 1 for i in range(len(shape))), shape))
            else:
                specs.append(("fold", dim, self.start, g0, d0, g1, d1))
        return tuple(specs)


def find_pairs(measured: Measurements, no_effect: Container[str]) -> list[Pair]:
    """The pairs by the readings, without those whose sides are invariant each by itself."""
    if measured.prober.precision.dtype != torch.float64 or not measured.graphs:
        return []  # in float32, sums agree by chance
    search = _Search(measured)
    reads, order = readers(measured.graph), measured.graph.order_of_use
    names = {name for name in measured.names_with_effect() if name in order and name not in no_effect}
    place = {name: i for i, name in enumerate(measured.prober.trainable)}.__getitem__
    proposed = [*measured.proposals.sets, *((name,) for name in names)]
    sets = {tuple(sorted(names.intersection(s), key=place)) for s in proposed}
    unpaired: dict[frozenset[str], list[list[Side]]] = {}
    for a in sorted(sets - {()}, key=lambda s: (len(s), [order[name] for name in s])):
        b = frozenset[str]().union(*(reads[name] for name in a)) & names - set(a)
        sides = search.sides(a)
        unpaired.setdefault(b, []).extend(search.pair_up(sides, search.sides(sorted(b, key=place))) if b else [sides])
    for left in unpaired.values():
        for one, other in combinations(left, 2):
            search.pair(one, other, "multiplied with each other")
    return sorted((pair for _, _, pair in search.found), key=lambda pair: order[pair.a[0]])


class _Search:
    def __init__(self, measured: Measurements) -> None:
        self.measured, self.shapes = measured, measured.shapes
        self.found: list[tuple[Side, Side, Pair]] = []
        exact = [measured.first, *(() if measured.late else measured.grown), measured.own]
        self.readings = [r for r in exact if r is not None and r.noise == measured.own.noise]

    def sides(self, names: Sequence[str]) -> list[Side]:
        """The ways to lay slices of these parameters beside each other, the whole parameters last."""
        shapes = [self.shapes[name] for name in names]
        found = {
            tuple(k % len(s) if s[k % len(s)] == size else s.index(size) for s in shapes): None
            for size in set[int](shapes[0]).intersection(*shapes) - {1}
            for k in (0, 1, -1)
        }
        return [Side(tuple(names), dims, 0, self._sums(names, dims)) for dims in (*found, (None,) * len(shapes))]

    def _sums(self, names: Sequence[str], dims: Sequence[int | None]) -> Array:
        keys = [() if dim is None else (dim,) for dim in dims]
        return np.array(
            [
                sum(r.tables[name][key][:2].reshape(2, -1).numpy() for name, key in zip(names, keys, strict=True))
                for r in self.readings
            ]
        )

    def pair_up(self, a: list[Side], b: list[Side]) -> list[list[Side]]:
        """Add the pair of two sides, or of parts of one with the other; return what of a has no partner.

        Parts of a tensor are several in one, as queries, keys and values, or come from several, as a concatenation.
        """
        if self.pair(a, b, "b reads what a scales"):
            return []
        parts = {(s.dims, p.start, p.size): p for s in a for t in b for p in _parts(s, t.size)}
        left = [[part] for part in parts.values() if not self.pair([part], b, "b reads what a scales")]
        for s, t in product(a, b):
            for part in _parts(t, s.size):
                self.pair([s], [part], "b reads what a scales")
        return [a, *left]

    def pair(self, a: list[Side], b: list[Side], reason: str) -> bool:
        """Add the pair of two sides that has most sets, if there is one; whether there is.

        Args:
            a: the ways to cut one side.
            b: the ways to cut the other.
            reason: why they are a pair.
        """
        if any(one.within(a[0]) and other.within(b[0]) for one, other, _ in self.found):
            return True
        names = (*a[0].names, *b[0].names)
        floor = np.array([[self.measured.floor(reading, names)] for reading in self.readings])
        able = [
            (one, other, math.gcd(one.size, other.size))
            for one, other in product(a, b)
            if one.disjoint(other)
            and self._agree(one.fold((1, one.size, 1, 1)), other.fold((1, other.size, 1, 1)), floor)
        ]
        for sets in sorted({sets for *_, most in able for sets in divisors(most)}, reverse=True):
            for one, other, _ in (sides for sides in able if sides[2] % sets == 0):
                for (fold_a, sums_a), (fold_b, sums_b) in _folded(one, other, sets):
                    if self._agree(sums_a, sums_b, floor):
                        if not _has_effect(sums_a, sums_b, floor):
                            return False
                        a_specs, b_specs = one.specs(fold_a, self.shapes), other.specs(fold_b, self.shapes)
                        self.found.append((one, other, Pair(one.names, other.names, a_specs, b_specs, sets, reason)))
                        return True
        return False

    def _agree(self, sums_a: Array, sums_b: Array, floor: Array) -> bool:
        """Whether ⟨∇L, a⟩ = ⟨∇L, b⟩ of every set in every reading, up to rounding."""
        allowed = self.measured.prober.precision.resolution * np.sqrt(sums_a[:, 1] + sums_b[:, 1]) + floor
        return bool((np.abs(sums_a[:, 0] - sums_b[:, 0]) <= allowed).all())


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
        yield from product(
            *([(fold, side.fold(fold)) for fold in _folds(side.size, g0, sets // g0)] for side in (a, b))
        )


def _parts(side: Side, size: int) -> Iterator[Side]:
    """Ranges of the slices that may go with so many others: equal parts, both ends, one large and two small parts."""
    n = side.size
    if 1 < size < n <= thresholds.MOST_PARTS * size:
        small = (n - size) // 2
        starts = range(0, n, size) if n % size == 0 else (0, n - size)
        yield from (side.piece(start, size) for start in starts)
        if 2 * small + size == n and size % small == 0:
            yield from (side.piece(start, small) for start in (size, size + small))


def _folds(size: int, g0: int, g1: int) -> Iterator[Fold]:
    """The folds of so many slices into g0 × g1 sets."""
    rest = size // (g0 * g1)
    for d0 in divisors(rest) if g1 > 1 else (rest,):
        yield g0, d0, g1, rest // d0

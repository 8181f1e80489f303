"""The probes in their order, the candidates among the parameters, and the measures that a verdict needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .align import Alignment, alignments
from .curves import run_into_curves
from .defects import GROWTH, MANY, imbalance
from .graph import Proposals, members, propose
from .joint import Indices, Matrix, Parts, zero_sums
from .layouts import Evidence, Trial, pair_keys, partial_cut, slices_balanced
from .points import Point, is_matrix
from .probe import Prober, Reading
from .structure import Trace
from .tables import Key, Table

__all__ = ["Stand", "Survey", "joined_tables"]

_NEAR = 3
_REVIVALS = 2
_RESERVE = 4
"""Passes that the second growth and the verification need."""
_LARGER_SETS = 0.03
_NEIGHBORS = 8
_PART = 0.01
_LEAST_SHARE = 0.03
_SURE = 0.05
_LOST = 1e-4


@dataclass(frozen=True)
class Stand:
    """A probe, kept so that f(ρx) can be compared with its f(x)."""

    reading: Reading
    point: Point
    seed: int
    trace: Trace


class Survey:
    """Collects the probes.

    Attributes:
        own: the reading at the model's own point.
        near: readings at random points.
        far: readings at random points with grown candidates.
        ground: the first of the near probes.
        map: a trace whose graph leads from parameters to modules.
    """

    def __init__(self, prober: Prober, own: Reading) -> None:
        self.prober, self.own = prober, own
        self.near: list[Reading] = []
        self.far: list[Stand] = []
        self.ground: Stand | None = None
        self.map = Trace()
        self._growing: dict[str, float | torch.Tensor] = {}  # what grows: 1, or 1 on some blocks and 0 elsewhere
        self._together: set[str] = set()
        self._invariant: dict[str, bool] = {}
        self._revived: Stand | None = None
        self._used: list[str] | None = None
        self.proposals = Proposals()
        self._seed = 0

    # --- the probes ---------------------------------------------------------------------------------------------

    def look_near(self) -> None:
        """Random points of ordinary scale; candidates are what is balanced up to ε."""
        for _ in range(_NEAR):
            # One look at the modules and the graph is enough.
            trace = Trace(graph=True) if self.ground is None else None
            seed = self._next_seed()
            point = self._draw(seed)
            # Whether something is balanced up to some percent needs no float64.
            reading = self._probe(seed, point, trace, quick=trace is None)
            if reading is None:
                continue
            self.near.append(reading)
            if trace is not None and trace.graph is not None:
                self.ground = Stand(reading, point, seed, trace)
                self.map, self.proposals = trace, propose(trace.graph)
        for _ in range(_REVIVALS):
            self._revive()
        if not self.near:
            # The model bears no other point than its own.
            self.near = [self.own]
        self._choose_candidates()

    def _revive(self) -> None:
        """One more probe, in which what was silent speaks.

        Behind a unit of ReLU that is dead at every point lies a part of the model that nobody has seen, and what
        feeds it may look invariant. Where the parameters of such a unit change their sign, it is alive.
        """
        if self.ground is None or self.map.graph is None:
            return
        silent = [
            name
            for name in self.prober.trainable
            if all(reading.slope(name) == 0 for reading in self.near) and self.map.graph.leaf_node(name) is not None
        ]
        if silent:
            stand = self._revived or self.ground
            point = stand.point.scaled(dict.fromkeys(silent, -1.0))
            reading = self._probe(stand.seed, point, None)
            if reading is not None:
                self.near.append(reading)
                self._revived = Stand(reading, point, stand.seed, stand.trace)

    def look_far(self) -> None:
        """One random point with the candidates grown by two factors: how a defect falls tells where it is from.

        What is silent there and was not before is given the other sign, as in `_revive`.
        A parameter that was balanced by chance may saturate the model when it grows, and nothing is seen behind
        it. Then the candidates that are least balanced stay as they are in a second try.
        """
        self._grow()
        if self._starved() and self.prober.left >= 2 * len(GROWTH):
            sure = {
                name
                for name in self._growing
                if name in self._together or self._balanced_near(name, _SURE) or self._slices_balanced_near(name)
            }
            self._growing = {name: share for name, share in self._growing.items() if name in sure}
            self._grow()

    def _grow(self) -> None:
        pairs, seed = self._pairs(), self._next_seed()
        base = self._draw(seed)
        first = self._grown(base, seed, GROWTH[0], pairs)
        spoke = [name for name in self.prober.trainable if any(reading.slope(name) for reading in self.near)]
        silent = [name for name in spoke if first and first.reading.slope(name) == 0]
        if silent and self.prober.left > _RESERVE:
            base = base.scaled(dict.fromkeys(silent, -1.0))
            first = self._grown(base, seed, GROWTH[0], pairs)
        stands = first, self._grown(base, seed, GROWTH[1], pairs)
        self.far = [stand for stand in stands if stand is not None]

    def _grown(self, base: Point, seed: int, growth: float, pairs: Mapping[str, Sequence[Key]]) -> Stand | None:
        trace = Trace()
        point = base.scaled({name: 1 + (growth - 1) * share for name, share in self._growing.items()})
        reading = self._probe(seed, point, trace, pairs)
        return None if reading is None else Stand(reading, point, seed, trace)

    def _starved(self) -> bool:
        """Whether a candidate has lost its effect, which the growth of a row does not change."""
        if len(self.far) < len(GROWTH):
            return True
        grown = self.far[-1].reading
        return any(grown.effect(name) < _LOST * min(r.effect(name) for r in self.near) for name in self._growing)

    def _draw(self, seed: int) -> Point:
        return replace(self.prober.own, seed=1000 + seed)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _probe(
        self,
        seed: int,
        point: Point,
        trace: Trace | None,
        pairs: Mapping[str, Sequence[Key]] | None = None,
        *,
        quick: bool = False,
    ) -> Reading | None:
        """One reading; None if the model does not bear the point."""
        try:
            reading = self.prober.read(point, seed=seed, pairs=pairs, recorder=trace, quick=quick)
        except torch.OutOfMemoryError:  # says nothing about the point
            raise
        except Exception:  # a probe is no place to fail: the next one comes without noise on the inputs
            reading = None
        if reading is None or not reading.finite:
            self.prober.calm()
            return None
        return reading

    # --- candidates ---------------------------------------------------------------------------------------------

    def _choose_candidates(self) -> None:
        loose = self.prober.precision.loose
        names = self.effective()
        sets = self.vanishing(self.near, [loose] * len(self.near), names)
        told = [tuple(names[i] for i in s) for s in sets]
        self._together = {n for s, runs in zip(told, self.curved(told), strict=True) if not runs for n in s}
        single = [name for name in names if name not in self._together and self._invariant_near(name)]
        # Of a gain or a bias only a fact can be learned: it grows where that is next to certain.
        single = [name for name in single if is_matrix(self.shape(name)) or self._balanced_near(name, _SURE)]
        # What runs into a curve is no row, and grown it would only change what lies behind.
        alone = self.curved([(name,) for name in names])
        curved = {name for name, runs in zip(names, alone, strict=True) if runs}
        self._growing = dict.fromkeys([*(name for name in single if name not in curved), *self._together], 1.0)
        for name in names:
            if name not in self._growing and name not in curved and is_matrix(self.shape(name)):
                self._grow_blocks(name)

    def _balanced_near(self, name: str, share: float = 1.0) -> bool:
        return all(self.balance(reading, name) <= share * self.prober.precision.loose for reading in self.near)

    def _slices_balanced_near(self, name: str) -> bool:
        shape = self.shape(name)
        return is_matrix(shape) and slices_balanced(shape, self._near_trial(name))

    def _invariant_near(self, name: str) -> bool:
        """Whether a parameter may be invariant by itself, as a whole or slice by slice."""
        if name not in self._invariant:
            self._invariant[name] = self._balanced_near(name) or self._slices_balanced_near(name)
        return self._invariant[name]

    def vanishing(self, readings: Sequence[Reading], allowed: Sequence[float], names: list[str]) -> list[Indices]:
        """Sets of parameters whose sums vanish because their parts cancel.

        Sets that the graph proposes may contain parameters that look balanced alone: beside a small bias, the
        weight nearly is. Other sets are sought among the unbalanced.
        """
        M, sizes = self.matrices(readings, names)
        found: set[Indices] = set()
        for proposed in self._proposed(names):
            for indices in (_essential(M, proposed), proposed):
                if len(indices) > 1 and self.vanishes(readings, allowed, [names[i] for i in indices]):
                    found.add(indices)
                    break
        place = [i for i, name in enumerate(names) if not self._invariant_near(name)]
        for s in zero_sums(M[:, place], sizes[:, place], allowed, larger=_LARGER_SETS):
            indices = tuple(place[i] for i in s)
            if self.whole_parts(readings, [names[i] for i in indices]).cancels():
                found.add(indices)
        return list(found)

    def vanishes(
        self,
        readings: Sequence[Reading],
        allowed: Sequence[float],
        names: Sequence[str],
        independent: Sequence[Reading] | None = None,
    ) -> bool:
        """Whether the sum of a set vanishes because its parts cancel: as a whole, or in a typical shared slice.

        Args:
            readings: where it must vanish.
            allowed: up to what, per reading.
            names: the set.
            independent: readings that tell whether parts cancel, if not the same.
        """
        telling, shapes = independent or readings, [self.shape(name) for name in names]
        for alignment in (None, *(a for a in alignments(shapes) if a.slices >= MANY)):
            here, there = (self._parts(among, names, alignment) for among in (readings, telling))
            if here is not None and there is not None and here.balanced(allowed) and there.cancels():
                return True
        return False

    def whole_parts(self, readings: Sequence[Reading], names: Sequence[str]) -> Parts:
        """What whole parameters add to the sum of a set."""
        parts = self._parts(readings, names, None)
        assert parts is not None
        return parts

    def _parts(self, readings: Sequence[Reading], names: Sequence[str], alignment: Alignment | None) -> Parts | None:
        """What each member adds in each slice, or as a whole; None where a probe has no table of the slices."""
        rows, floor = [], []
        for reading in readings:
            of_names = [reading.tables[name] for name in names]
            tables = [t[()] for t in of_names]
            if alignment is not None:
                found = [alignment.table(t, self.shape(name)) for t, name in zip(of_names, names, strict=True)]
                tables = [t for t in found if t is not None]
                if len(tables) < len(names):
                    return None
            rows.append([t[:2].reshape(2, -1).numpy() for t in tables])
            floor.append(0.0 if alignment is None else 10 * max(self.floor(reading, name) for name in names))
        sums = np.array(rows)
        parts, effects = sums[:, :, 0], np.sqrt(sums[:, :, 1])
        return Parts(parts, np.hypot(parts, _LEAST_SHARE * effects), np.array(floor))

    def _grow_blocks(self, name: str) -> None:
        """Let only some blocks of a parameter grow, where only some are balanced."""
        shape = self.shape(name)
        found = partial_cut(shape, self._near_trial(name))
        if found is not None and len(found[1]) * 8 >= found[0]:
            share = torch.zeros(found[0])
            share[found[1]] = 1.0
            share = share.repeat_interleave(shape[0] // found[0]).to(self.prober.parameters[name].device)
            self._growing[name] = share.reshape(-1, *[1] * (len(shape) - 1))

    def _pairs(self) -> dict[str, list[Key]]:
        return {name: pair_keys(self.shape(name), self._near_trial(name)) for name in self._growing}

    def _proposed(self, names: Sequence[str]) -> list[Indices]:
        """The sets that the graph proposes, and the parameters of each module, as far as they lie in names.

        What is not in names has no effect, so it may grow or not.
        """
        place = {name: i for i, name in enumerate(names)}
        sets = [members(mask, self.order()) for mask in self.proposals.sets] + self._owned()
        found = {tuple(sorted(place[name] for name in s if name in place)) for s in sets}
        return sorted(indices for indices in found if len(indices) > 1)

    def order(self) -> list[str]:
        """Parameters by bit of the graph's sets."""
        return self.map.graph.names if self.map.graph is not None else []

    def _owned(self) -> list[tuple[str, ...]]:
        """Parameters of one module, for graphs that hide their inside."""
        owners: dict[str, list[str]] = {}
        for name in self.prober.trainable:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        return [tuple(names) for names in owners.values()]

    # --- measures -----------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        return self.prober.shapes[name]

    def effective(self) -> list[str]:
        """Real trainable parameters with an effect that is not rounding."""
        return [
            name
            for name in self.prober.trainable
            if not self.prober.parameters[name].is_complex() and self._speaks(name)
        ]

    def _speaks(self, name: str) -> bool:
        """Whether a parameter has an effect in some probe, beside all others or at least beside its neighbors.

        Rounding is in proportion to what passes through a place, and in float32 to what passes elsewhere too.
        """
        readings = (self.own, *self.near)
        return any(r.share(name) > r.noise for r in readings) or any(
            r.share(name, self.neighbors(name)) > r.noise for r in readings if r.noise == self.own.noise
        )

    def neighbors(self, name: str) -> Sequence[str]:
        """Parameters that are used shortly before and after one in the forward pass, and itself.

        In a deep model effects may grow by a constant factor from layer to layer, until the last ones are nothing
        beside the first. Beside its neighbors a parameter keeps its size.
        """
        if self._used is None:
            self._used = self.map.graph.order_of_use() if self.map.graph is not None else []
            self._used = [n for n in self._used if self.prober.parameters[n].requires_grad]
        if name not in self._used:
            return self.prober.trainable
        place = self._used.index(name)
        return self._used[max(0, place - _NEIGHBORS) : place + _NEIGHBORS + 1]

    def floor(self, reading: Reading, name: str) -> float:
        """The effect below which a row of this parameter says nothing."""
        return reading.noise * max(reading.effect(name), 1e-3 * reading.peak)

    def _near_trial(self, name: str) -> Trial:
        loose = self.prober.precision.loose
        return Trial([self._evidence(reading, (name,), loose) for reading in self.near])

    def far_trial(self, *names: str, alignment: Alignment | None = None) -> Trial:
        """All evidence about a parameter, or about several as one, slice beside slice as the alignment says."""
        precision = self.prober.precision
        near = [self._evidence(reading, names, precision.loose, alignment) for reading in self.near]
        readings = zip(self.far_readings(), self.far_tolerances(), strict=True)
        far = [self._evidence(reading, names, tolerance, alignment) for reading, tolerance in readings]
        return Trial(near, far, precision.settled, precision.flat, precision.resolution)

    def _evidence(
        self, reading: Reading, names: Sequence[str], tolerance: float, alignment: Alignment | None = None
    ) -> Evidence:
        floor = max(self.floor(reading, name) for name in names)
        return Evidence(self.tables(reading, names, alignment), floor, tolerance)

    def tables(self, reading: Reading, names: Sequence[str], alignment: Alignment | None) -> dict[Key, Table]:
        """Tables of several parameters as if they were one."""
        if alignment is None:
            return joined_tables(reading, names)
        return alignment.join([reading.tables[name] for name in names], [self.shape(name) for name in names])

    def far_readings(self) -> list[Reading]:
        """At the smaller growth and at the larger."""
        return [far.reading for far in self.far]

    def far_tolerances(self) -> list[float]:
        """The imbalance that each growth leaves to ε."""
        strict = self.prober.precision.strict
        return [min(30 * strict, self.prober.precision.loose), strict][-len(self.far) :]

    def grew(self, name: str) -> bool:
        """Whether a parameter, or a part of it, was a candidate."""
        return name in self._growing

    def balance(self, reading: Reading, name: str) -> float:
        """Imbalance of the whole parameter in one probe."""
        return float(imbalance(reading.tables[name][()], self.floor(reading, name)))

    def curved(self, sets: Sequence[tuple[str, ...]]) -> list[bool]:
        """Per set, whether it has a defect and runs into a curve: then ε need not be the reason."""
        if self.ground is None or self.map.graph is None:
            return [False] * len(sets)
        exact, runs = self.ground.reading, run_into_curves(self.map.graph, sets)
        evidence = [self._evidence(exact, names, self.prober.precision.resolution) for names in sets]
        defects = [float(imbalance(e.tables[()], e.floor)) > e.tolerance for e in evidence]
        return [a and b for a, b in zip(runs, defects, strict=True)]

    def matrices(self, readings: Sequence[Reading], names: Sequence[str]) -> tuple[Matrix, Matrix]:
        """⟨∇L, x⟩ per probe and parameter, and the size that its sums are measured by."""
        M = np.array([[r.radial(name) for name in names] for r in readings]).reshape(-1, len(names))
        effects = np.array([[r.effect(name) for name in names] for r in readings]).reshape(-1, len(names))
        return M, np.hypot(M, _LEAST_SHARE * effects)


def _essential(M: Matrix, indices: Indices) -> Indices:
    """The members that take part in a sum; a row that is invariant alone adds only its defect."""
    part = np.abs(M[:, list(indices)])
    counts = (part > _PART * np.sqrt(np.square(part).sum(1, keepdims=True))).any(0)
    return tuple(i for i, takes_part in zip(indices, counts, strict=True) if takes_part)


def joined_tables(reading: Reading, names: Sequence[str]) -> dict[Key, Table]:
    """Tables of several parameters as if they were one, wherever their dimensions agree; of one, its own."""
    tables = [reading.tables[name] for name in names]
    if len(tables) == 1:
        return tables[0]
    keys = [key for key in tables[0] if all(key in t and t[key].shape == tables[0][key].shape for t in tables)]
    return {key: torch.stack([t[key] for t in tables]).sum(0) for key in keys}

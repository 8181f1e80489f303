"""What the probes have measured: readings at random points and at grown ones, and what a verdict asks of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .align import Alignment
from .curves import run_into_curves, seen_through
from .defects import imbalance
from .evidence import Evidence, Trial
from .graph import Proposals
from .joint import Matrix
from .layouts import slices_balanced
from .outputs import difference
from .points import Point, is_matrix
from .probe import Prober, Reading
from .structure import Trace
from .tables import Key, Table

__all__ = ["LEAST_SHARE", "Stand", "Survey"]

LEAST_SHARE = 0.03
"""Share of its effect that a parameter's part of a sum is at least measured by."""
_NEIGHBORS = 8
_SUSPECTED = 5e-3
_ROUNDING = 100
"""How many times its noise a reading's imbalance is, if it is not rounding."""


@dataclass(frozen=True)
class Stand:
    """A probe, kept so that f(ρx) can be compared with its f(x)."""

    reading: Reading
    point: Point
    seed: int
    trace: Trace
    draw: int | None = None


class Survey:
    """All readings of a model.

    Attributes:
        own: the reading at the model's own point.
        near: readings at random points.
        far: readings at random points with grown candidates.
        further: the last of those at a point that reaches other parts of the model, and `late`, what only it reaches.
        ground: the first of the near probes.
        map: a trace whose graph leads from parameters to modules.
        other_maps: traces of passes that reach further parameters.
        proposals: what that graph says about sets.
        growing: what grows, by parameter: 1, or 1 on some blocks and 0 elsewhere.
        doubtful: the ground with grown parameters of next to no effect.
    """

    def __init__(self, prober: Prober, own: Reading) -> None:
        self.prober, self.own = prober, own
        self.near: list[Reading] = []
        self.far: list[Stand] = []
        self.further: Stand | None = None
        self.late: list[str] = []
        self.ground: Stand | None = None
        self.map = Trace()
        self.other_maps: list[Trace] = []
        self.proposals = Proposals()
        self.growing: dict[str, float | torch.Tensor] = {}
        self.doubtful: Reading | None = None
        self._invariant: dict[str, bool] = {}
        self._used: list[str] | None = None
        self._place: dict[str, int] = {}
        self._clear: dict[tuple[str, ...], bool] = {}
        self._undone: bool | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        return self.prober.shapes[name]

    def order(self) -> list[str]:
        """Parameters by bit of the graph's sets."""
        return self.map.graph.names if self.map.graph is not None else []

    def effective(self) -> list[str]:
        """Real trainable parameters with an effect that is not rounding."""
        return [
            name
            for name in self.prober.trainable
            if not self.prober.parameters[name].is_complex() and self.speaks(name)
        ]

    def speaks(self, name: str) -> bool:
        """Whether a parameter has an effect in some probe, beside all others or at least beside its neighbors.

        Rounding is in proportion to what passes through a place, and in float32 to what passes elsewhere too.
        """
        readings = (self.own, *self.near)
        return any(r.share(name) > r.noise for r in readings) or self.local_share(name) > self.own.noise

    def local_share(self, name: str) -> float:
        """The largest effect of a parameter beside its neighbors, in an exact reading if any reaches it.

        Chance or the data may lead past a part of the model, and then that reading says nothing about it.
        """
        readings = (self.own, *self.near)
        exact = [r for r in readings if r.noise == self.own.noise and r.slope(name)] or readings
        return max(reading.share(name, self.neighbors(name)) for reading in exact)

    def suspected(self, name: str) -> bool:
        """Whether a gain or a bias has so little effect that a normalization's ε may be all that lets it through."""
        return not is_matrix(self.shape(name)) and self.local_share(name) < _SUSPECTED

    def neighbors(self, name: str) -> Sequence[str]:
        """Parameters that are used shortly before and after one in the forward pass, and itself.

        In a deep model effects may grow by a constant factor from layer to layer, until the last ones are nothing
        beside the first. Beside its neighbors a parameter keeps its size.
        """
        used, place = self._order_of_use(), self._place.get(name)
        if place is None:
            return self.prober.trainable
        return used[max(0, place - _NEIGHBORS) : place + _NEIGHBORS + 1]

    def reach(self, names: Sequence[str]) -> int:
        """How many parameters lie between the first and the last of a set, by their use in the forward pass."""
        used = self._order_of_use()
        places = [self._place.get(name, len(used)) for name in names]
        return max(places) - min(places)

    def _order_of_use(self) -> list[str]:
        if self._used is None:
            self._used = self.map.graph.order_of_use() if self.map.graph is not None else []
            self._used = [n for n in self._used if self.prober.parameters[n].requires_grad]
            self._place = {used: place for place, used in reversed(list(enumerate(self._used)))}
        return self._used

    def floor(self, reading: Reading, name: str) -> float:
        """The effect below which a row of this parameter says nothing."""
        return reading.noise * max(reading.effect(name), 1e-3 * reading.peak)

    def balance(self, reading: Reading, name: str) -> float:
        """Imbalance of the whole parameter in one probe."""
        return float(imbalance(reading.tables[name][()], self.floor(reading, name)))

    def grew(self, name: str) -> bool:
        """Whether a parameter, or a part of it, was a candidate."""
        return name in self.growing

    def balanced_near(self, name: str, share: float = 1.0) -> bool:
        """Whether the whole parameter is balanced at random points, up to a share of what is allowed there."""
        return all(self.balance(reading, name) <= share * self.prober.precision.loose for reading in self.near)

    def mostly_balanced_near(self, name: str) -> bool:
        """Whether it is balanced at most random points, where the graph shows that no curve can be the reason.

        In a narrow model one sample may leave a normalization hardly any variance, and there ε has all the weight.
        """
        loose = self.prober.precision.loose
        balanced = [self.balance(reading, name) <= loose for reading in self.near if reading.slope(name)]
        return 2 * sum(balanced) > len(balanced) and self.transparent((name,))

    def slices_balanced_near(self, name: str) -> bool:
        """Whether many of its slices are, so that it cannot be chance."""
        shape = self.shape(name)
        return is_matrix(shape) and slices_balanced(shape, self.near_trial(name))

    def invariant_near(self, name: str) -> bool:
        """Whether a parameter may be invariant by itself, as a whole or slice by slice."""
        if name not in self._invariant:
            heard = any(reading.slope(name) for reading in self.near)
            self._invariant[name] = heard and (self.balanced_near(name) or self.slices_balanced_near(name))
        return self._invariant[name]

    def near_trial(self, name: str) -> Trial:
        """What the random points say about a parameter."""
        loose = self.prober.precision.loose
        return Trial([self._evidence(reading, (name,), loose) for reading in self.near])

    def far_trial(self, *names: str, alignment: Alignment | None = None) -> Trial:
        """All evidence about a parameter, or about several as one, slice beside slice as the alignment says."""
        precision = self.prober.precision
        near = [self._evidence(reading, names, precision.loose, alignment) for reading in self.near]
        # What a row of hardly any variance has left after the smaller growth, the larger one takes.
        tolerances = [precision.loose, precision.strict][-len(self.far) :]
        readings = zip(self.far_readings(), tolerances, strict=True)
        far = [self._evidence(reading, names, tolerance, alignment) for reading, tolerance in readings]
        return Trial(
            near,
            far,
            precision.settled,
            precision.flat,
            precision.flat if self.undone() else precision.flat / 10,
            precision.linear,
            self.transparent(names),
            precision.resolution,
        )

    def undone(self) -> bool:
        """Whether the outputs stay as they are from one growth to the other.

        Where another normalization undoes the growth of a row they do. A logarithm of its length also leaves a defect
        that stays, and moves the outputs.
        """
        if self._undone is None and len(self.far) > 1:
            first, last = self.far[0].reading.outputs, self.far[-1].reading.outputs
            self._undone = difference(first, last) <= 10 * self.prober.precision.same
        return bool(self._undone)

    def _evidence(
        self, reading: Reading, names: Sequence[str], tolerance: float, alignment: Alignment | None = None
    ) -> Evidence:
        floor = max(self.floor(reading, name) for name in names)
        return Evidence(self.tables(reading, names, alignment), floor, tolerance)

    def tables(self, reading: Reading, names: Sequence[str], alignment: Alignment | None) -> dict[Key, Table]:
        """Tables of several parameters as if they were one."""
        if alignment is None:
            return _joined_tables(reading, names)
        return alignment.join([reading.tables[name] for name in names], [self.shape(name) for name in names])

    def far_readings(self) -> list[Reading]:
        """At the smaller growth and at the larger."""
        return [far.reading for far in self.far]

    def is_grown(self, stand: Stand) -> bool:
        """Whether the candidates have their full growth there, so that ε has no weight."""
        return stand is self.far[-1] or stand is self.further

    def far_tolerances(self) -> list[float]:
        """The imbalance that each growth leaves to ε."""
        strict = self.prober.precision.strict
        return [min(30 * strict, self.prober.precision.loose), strict][-len(self.far) :]

    def add_map(self, trace: Trace) -> None:
        """One more map, which may have what the others have not."""
        self.other_maps.append(trace)
        self._clear.clear()

    def map_of(self, names: Sequence[str]) -> Trace:
        """The first map that has all of these parameters, or else the first of all."""
        for trace in (self.map, *self.other_maps):
            if trace.graph is not None and all(trace.graph.leaf_node(name) is not None for name in names):
                return trace
        return self.map

    def unmapped(self) -> list[str]:
        """Parameters with an effect that no map has, since chance or the data led past them there."""
        graph = self.map.graph
        return [name for name in self.effective() if graph is not None and graph.leaf_node(name) is None]

    def curved(self, sets: Sequence[tuple[str, ...]]) -> list[bool]:
        """Per set, whether it has a defect and runs into a curve: then ε need not be the reason."""
        return [runs and self._has_defect(names) for runs, names in zip(self.run_into_curves(sets), sets, strict=True)]

    def run_into_curves(self, sets: Sequence[tuple[str, ...]]) -> list[bool]:
        """Per set, whether a map shows that it runs into a curve."""
        maps = [self.map_of(names) for names in sets]
        runs = [False] * len(sets)
        for trace in (self.map, *self.other_maps):
            here = [i for i, of_set in enumerate(maps) if of_set is trace]
            if trace.graph is not None and here:
                for i, runs_into in zip(here, run_into_curves(trace.graph, [sets[i] for i in here]), strict=True):
                    runs[i] = runs_into
        return runs

    def _has_defect(self, names: tuple[str, ...]) -> bool:
        """Whether more than rounding is left of a set's sum, at the first of the near points that reach it."""
        heard = [r for r in self.near if any(r.slope(name) for name in names)]
        exact = [r for r in heard if self.ground is not None and r is self.ground.reading]
        for reading in (exact or heard)[:1]:
            # Next to the exact one, readings may be in the model's own float32.
            tolerance = self.prober.precision.resolution if exact else _ROUNDING * reading.noise
            evidence = self._evidence(reading, names, tolerance)
            return float(imbalance(evidence.tables[()], evidence.floor)) > evidence.tolerance
        return False

    def transparent(self, names: tuple[str, ...]) -> bool:
        """Whether a graph shows that no curve lies between a set and a normalization."""
        if names not in self._clear:
            self.see_through([names, *((name,) for name in self.prober.trainable)])
        return self._clear[names]

    def see_through(self, sets: Sequence[tuple[str, ...]]) -> None:
        """Find that out for many sets in one walk through each graph."""
        new = [names for names in sets if names not in self._clear]
        self._clear |= dict.fromkeys(new, False)
        maps = [self.map_of(names) for names in new]
        for graph in (trace.graph for trace in (self.map, *self.other_maps)):
            here = [n for n, of_set in zip(new, maps, strict=True) if of_set.graph is graph]
            if graph is not None and here:
                known = [names for names in here if all(graph.leaf_node(name) is not None for name in names)]
                self._clear |= dict(zip(known, seen_through(graph, known), strict=True))

    def matrices(self, readings: Sequence[Reading], names: Sequence[str]) -> tuple[Matrix, Matrix]:
        """⟨∇L, x⟩ per probe and parameter, and the size that its sums are measured by."""
        M = np.array([[r.radial(name) for name in names] for r in readings]).reshape(len(readings), -1)
        effects = np.array([[r.effect(name) for name in names] for r in readings]).reshape(len(readings), -1)
        return M, np.hypot(M, LEAST_SHARE * effects)


def _joined_tables(reading: Reading, names: Sequence[str]) -> dict[Key, Table]:
    """Tables of several parameters as if they were one, wherever their dimensions agree; of one, its own."""
    tables = [reading.tables[name] for name in names]
    if len(tables) == 1:
        return tables[0]
    keys = [key for key in tables[0] if all(key in t and t[key].shape == tables[0][key].shape for t in tables)]
    return {key: torch.stack([t[key] for t in tables]).sum(0) for key in keys}

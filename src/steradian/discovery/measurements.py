"""The readings of a model: which probe comes next, and the questions that are asked of all of them.

Three random points at least, then one more at which the candidates have grown 32-fold and 1024-fold. Further probes
only where these do not reach a part of the model, or where a gain or a bias has next to no effect.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from steradian.discovery import invariance, thresholds
from steradian.discovery.graph import Graph, Path, follow
from steradian.discovery.invariance import Cut, Cuts, Evidence, Trial, is_matrix, pair_keys, partial_cut
from steradian.discovery.joint import Names, vanishing_sets
from steradian.discovery.probe import Point, Prober, Reading, output_change
from steradian.groups import Group, Layout, set_numbers


class Measurements:
    """Makes the probes of a model and keeps their readings."""

    def __init__(self, prober: Prober, own: Reading) -> None:
        self.prober, self.own, self.shapes = prober, own, prober.shapes
        self.random: list[Reading] = []  # at random points, or `own` if the model only runs at its own weights
        self.grown: list[Reading] = []  # at a random point with the candidates grown, by the smaller factor first
        self.further: Reading | None = None  # the same with the larger factor, at a point that reaches other parts
        self.late: set[str] = set()  # parameters that only this one reaches
        self.graphs: list[Graph] = []  # of the first random point, and of passes that reach further parameters
        self.growing: dict[str, float | Tensor] = {}  # what grows: 1, or 1 on some blocks and 0 elsewhere
        self.suspects_grown: Reading | None = None  # the first random point, with parameters of next to no effect grown
        self.graph = Graph()  # the first of them
        self.slices: dict[Names, Cuts] = {}  # of joint sets that have several rows
        self._sets: list[Names] = []  # that may be jointly invariant
        self._in_sets: set[str] = set()
        self._seeds = count(1)
        self._real = [name for name in prober.trainable if not prober.parameters[name].is_complex()]
        self._paths: dict[Names, Path] = {}

    # Random points

    def probe_random_points(self) -> None:
        """Random points of ordinary scale; candidates are what is balanced up to ε."""
        for _ in range(thresholds.RANDOM_POINTS):
            # Balance up to some percent needs no float64. But random numbers differ in float32, so that what chance
            # skips there is not what it skips in float64.
            quick = bool(self.random) and all(self.first.slope[n] or not self.own.slope[n] for n in self.own.slope)
            seed = next(self._seeds)
            point = replace(self.prober.own, seed=1000 + seed)
            reading = self._probe(point, seed, graph=not self.random, quick=quick)
            self.random += [reading] if reading else []
        self.random = self.random or [self.own]
        # What feeds a unit of ReLU that is dead at every point may look invariant: if its parameters change sign, it is
        # active. What the model skips by chance may be there in another draw.
        last, silent = self.first, self._without_gradient()
        for _ in range(thresholds.SIGN_FLIPS):
            point = last.point.scaled(dict.fromkeys(silent, -1.0))
            flipped = self._probe(point, last.seed, draw=100 + len(self.random)) if silent else None
            if flipped is None:
                break
            self.random.append(flipped)
            last, before, silent = flipped, silent, self._without_gradient()
            if len(silent) == len(before):
                break
        self._choose_candidates()
        # Gains and biases of next to no effect lose it when they grow, if it is due to ε alone.
        suspects = [name for name in self.names_with_effect() if self.is_suspect(name)]
        if suspects and self.graphs and self.prober.left > thresholds.RESERVED_PASSES + 1:
            point = self.first.point.scaled(dict.fromkeys(suspects, thresholds.GROWTH[0]))
            self.suspects_grown = self._probe(point, self.first.seed)

    @property
    def first(self) -> Reading:
        """The first random point, with a graph."""
        return self.random[0]

    def _without_gradient(self) -> list[str]:
        """Parameters in the graph, or with a gradient at the model's own weights, that have none at random points."""
        silent = [n for n in self.prober.trainable if not any(reading.slope[n] for reading in self.random)]
        in_use = [n for n in silent if n in self.graph.leaf_nodes or self.own.slope[n]]
        return [n for n in in_use if self.prober.parameters[n].numel()] if self.graphs else []

    def _choose_candidates(self) -> None:
        names, loose = self.names_with_effect(), [self.prober.precision.loose] * len(self.random)
        # Sets whose sums vanish at the random points, up to what ε may leave of them there.
        vanishing = vanishing_sets(self, self.random, loose, names, least=thresholds.LIKELY_CANCELLATION)
        self._sets = [s for s in vanishing if not self.nonlinear(s)]
        self._in_sets = {name for s in self._sets for name in s}
        # What meets a nonlinearity is no row, and growing it would only change what lies behind.
        able = [name for name in names if not self.nonlinear((name,))]
        likely = [n for n in able if n in self.may_be_invariant or self._mostly_balanced(n) or self.path((n,)).removed]
        # A gain or a bias can only become a fact: it grows if that is next to certain.
        certain = [n for n in likely if is_matrix(self.shapes[n]) or self._balanced(n, thresholds.CERTAIN)]
        self.growing = dict.fromkeys([*certain, *self._in_sets], 1.0)
        # Some blocks may be invariant where others meet a nonlinearity, such as gates beside normalized queries.
        for name in [n for n in names if n not in self.growing and is_matrix(self.shapes[n])]:
            if found := partial_cut(self.shapes[name], self.trial((name,), grown=False)):
                blocks, which = found  # that are balanced: only these grow
                share = torch.isin(set_numbers(blocks, self.shapes[name]), torch.tensor(which, device="cpu"))
                self.growing[name] = share.to(self.prober.parameters[name].device)
        for name in self.growing:
            keys = pair_keys(self.shapes[name], self.trial((name,), grown=False))
            self.prober.pairs.setdefault(name, set()).update(keys)

    # Grown points

    def probe_grown_points(self) -> None:
        """One random point with the candidates grown by two factors: how a defect falls shows its origin."""
        self._grow()
        # A parameter that was balanced by chance may saturate the model when it grows. Then the candidates that are
        # least balanced, and those that meet a nonlinearity, do not grow in a second try. An invariant row keeps
        # its effect.
        least = {n: thresholds.LOST_EFFECT * min(r.effect[n] for r in self.random) for n in self.growing}
        lost = len(self.grown) < len(thresholds.GROWTH) or any(self.grown[-1].effect[n] < least[n] for n in least)
        if lost and self.prober.left >= 2 * len(thresholds.GROWTH):
            certain = {n for n in self.growing if self._balanced(n, thresholds.CERTAIN) or self._slices_balanced(n)}
            sets = [*self._sets, *((name,) for name in self.growing if name not in self._in_sets)]
            # A nonlinearity far out, as ReLU6's, leaves no defect at ordinary scale.
            clipped = {name for s in sets if self.path(s).nonlinear for name in s}
            kept = (certain | self._in_sets) - clipped
            self.growing = {name: share for name, share in self.growing.items() if name in kept}
            self._grow()
        self._reach_further()

    def _grow(self) -> None:
        """Both growths of one point; parameters that lose their gradient in the first change sign, as at random."""
        seed = next(self._seeds)
        base = replace(self.prober.own, seed=1000 + seed)
        first = self._probe_grown(base, seed, thresholds.GROWTH[0])
        unreached = [name for name in self.prober.trainable if first and first.slope[name] == 0]
        lost = [name for name in unreached if any(reading.slope[name] for reading in self.random)]
        if lost and self.prober.left > thresholds.RESERVED_PASSES:
            base = base.scaled(dict.fromkeys(lost, -1.0))
            first = self._probe_grown(base, seed, thresholds.GROWTH[0])
        readings = first, self._probe_grown(base, seed, thresholds.GROWTH[1])
        self.grown = [reading for reading in readings if reading is not None]

    def _probe_grown(self, base: Point, seed: int, growth: float, draw: int | None = None) -> Reading | None:
        # Parameters that this pass reaches and the first did not, by chance or by the data, need a graph too.
        able = growth == thresholds.GROWTH[0] and bool(self.graphs)
        wants_graph = able and not self.graph.leaf_nodes.keys() >= set(self.names_with_effect())
        point = base.scaled({name: 1 + (growth - 1) * share for name, share in self.growing.items()})
        return self._probe(point, seed, graph=wants_graph, draw=draw)

    def _reach_further(self) -> None:
        """Two more probes for candidates that the grown point does not reach: at a random one that does, grown."""
        # An expert may get no token, and a layer may be skipped by chance, at one point and not at another.
        if len(self.grown) < len(thresholds.GROWTH) or self.prober.left <= len(thresholds.GROWTH):
            return
        missed = self._whole_sets({n for n in self.growing if not all(r.slope[n] for r in self.grown)})
        reaching = [reading for reading in self.random if any(reading.slope[name] for name in missed)]
        if not reaching:
            return
        there = max(reaching, key=lambda reading: sum(reading.slope[name] > 0 for name in missed))
        probes = [self._probe_grown(there.point, there.seed, growth, there.draw) for growth in thresholds.GROWTH]
        found = [reading for reading in probes if reading is not None]
        if len(found) < len(thresholds.GROWTH):
            return
        self.further = found[-1]
        self.late = self._whole_sets({name for name in missed if all(reading.slope[name] for reading in found)})
        for reading, other in zip(self.grown, found, strict=True):
            for name in self.late:
                reading.put(name, other.tables[name])

    def _whole_sets(self, names: set[str]) -> set[str]:
        """Those in no set, or in one that is contained as a whole: its members are measured at one point."""
        return (names - self._in_sets) | {name for s in self._sets if names.issuperset(s) for name in s}

    def _probe(self, point: Point, seed: int, **options: Any) -> Reading | None:
        """A reading with the options of `Prober.read`; None if the model raises or gives no finite numbers there."""
        reading = self.prober.attempt(point, seed=seed, **options)
        if reading is None or not reading.finite:
            self.prober.noisy = False  # a failed probe is not fatal: the next one has no noise on the inputs
            return None
        if reading.graph is not None:  # which may have parameters that the others lack
            self.graphs.append(reading.graph)
            self.graph = self.graphs[0]
            self._paths.clear()
        return reading

    # Effects

    def names_with_effect(self) -> list[str]:
        """Real trainable parameters that the probes can change, with an effect that is not rounding."""
        probed = set(self.prober.probed)
        return [name for name in self._real if name in probed and self.local_share(name) > self.own.noise]

    def local_share(self, name: str) -> float:
        """The largest effect of a parameter relative to those used shortly before and after it in the forward pass."""
        # Chance or the data may skip a part of the model, and then a reading cannot judge that part. Exact readings
        # count if any reaches it.
        readings = [r for r in (self.own, *self.random) if r.slope[name]]
        if not readings:  # a tower without its input has many, and they need not be compared with all others
            return 0.0
        exact = [r for r in readings if r.noise == self.own.noise] or readings
        # In a deep model effects may grow by a constant factor per layer: there is no common scale.
        order, beside = self.graph.order_of_use, self.prober.trainable
        if name in order:
            beside = list(order)[max(0, order[name] - thresholds.NEIGHBORS) : order[name] + thresholds.NEIGHBORS + 1]
        return max(reading.share(name, beside) for reading in exact)

    def is_suspect(self, name: str) -> bool:
        """Whether a gain or a bias has so little effect that it may act through a normalization's ε alone."""
        return not is_matrix(self.shapes[name]) and self.local_share(name) < thresholds.LITTLE_EFFECT

    def floor(self, reading: Reading, names: Sequence[str]) -> float:
        """The effect below which a row of these parameters is rounding."""
        return max(reading.noise * max(reading.effect[name], thresholds.FLOOR_OF_PEAK * reading.peak) for name in names)

    # Balance, and where the graph explains it

    def imbalance(self, reading: Reading, *names: str) -> float:
        """Of a whole parameter, or of a set, in one probe."""
        sums = torch.stack([reading.tables[name][()] for name in names]).sum(0)
        return float(invariance.imbalance(sums, self.floor(reading, names)).abs())

    def _balanced(self, name: str, share: float = 1.0) -> bool:
        """Whether the whole parameter is balanced at random points, up to a share of the tolerance."""
        return all(self.imbalance(reading, name) <= share * self.prober.precision.loose for reading in self.random)

    def _mostly_balanced(self, name: str) -> bool:
        """Whether it is balanced at most random points, and the graph shows that no nonlinearity can be the reason."""
        # In a narrow model one sample may leave a normalization hardly any variance, and there ε dominates.
        loose = self.prober.precision.loose
        balanced = [self.imbalance(reading, name) <= loose for reading in self.random if reading.slope[name]]
        return 2 * sum(balanced) > len(balanced) and self.path((name,)).known

    def _slices_balanced(self, name: str) -> bool:
        """Whether so many of its slices are balanced that it cannot be chance."""
        shape = self.shapes[name]
        return is_matrix(shape) and invariance.slices_balanced(shape, self.trial((name,), grown=False))

    @cached_property
    def may_be_invariant(self) -> set[str]:
        """Parameters that may be invariant by themselves, as a whole or slice by slice, by the random points."""
        reached = [name for name in self._real if any(reading.slope[name] for reading in self.random)]
        return {name for name in reached if self._balanced(name) or self._slices_balanced(name)}

    def trial(self, names: Names, cuts: Cuts = (), *, grown: bool = True) -> Trial:
        """All evidence about a parameter, or about several as one, slice beside slice as they are cut."""

        def evidence(readings: Sequence[Reading], tolerances: list[float]) -> Evidence:
            tables = [invariance.join([reading.tables[name] for name in names], cuts) for reading in readings]
            return Evidence(tables, [self.floor(reading, names) for reading in readings], tolerances)

        precision, readings = self.prober.precision, self.grown if grown else []
        at_random = evidence(self.random, [precision.loose] * len(self.random))
        # What the smaller growth leaves of a row of hardly any variance, the larger one removes.
        at_grown = evidence(readings, [precision.loose, precision.strict][2 - len(readings) :])
        constant = precision.flat if readings and self._growth_undone else precision.flat / 10
        return Trial(precision, at_random, at_grown, constant, self.path(names).known, self._multiplied(names))

    @cached_property
    def _growth_undone(self) -> bool:
        """Whether the outputs stay the same from one growth to the other, as another normalization undoes it."""
        # A logarithm of the length of a row also leaves a defect that stays, but it moves the outputs.
        change = output_change(self.grown[0].outputs, self.grown[-1].outputs)
        return len(self.grown) > 1 and change <= 10 * self.prober.precision.same

    def is_fully_grown(self, reading: Reading) -> bool:
        """Whether the candidates have their full growth there, so that ε no longer shows."""
        return reading is self.grown[-1] or reading is self.further

    def row_sums(self, reading: Reading, group: Group) -> tuple[Tensor, float]:
        """The sums of `Table` per row of a group in one probe, and the effect below which they are rounding."""
        tables = invariance.join([reading.tables[n] for n in group.names], self.slices.get(group.names, ()))
        # Few tables are of two dimensions: the slices along one of them have to do.
        return invariance.block_sums(tables, invariance.slices(self._cut(group))), self.floor(reading, group.names)

    def worst_rows(self, group: Group) -> tuple[float, float]:
        """The largest imbalance of a row at random points, and the largest that growth has left."""
        trial, cut = self.trial(group.names, self.slices.get(group.names, ())), self._cut(group)
        return invariance.typical_and_worst(cut, trial)[1], float(trial.grown.beside_others(cut)[-1].max())

    def _cut(self, group: Group) -> Cut:
        one = len(group.names) == 1
        return Layout(group.spec).blocks(self.shapes[group.names[0]]) if one else (group.n_rows,)

    def graph_of(self, names: Names) -> Graph:
        """The first graph that has all of these parameters, or else the first of all."""
        return next((graph for graph in self.graphs if graph.leaf_nodes.keys() >= set(names)), self.graph)

    def path(self, names: Names) -> Path:
        """Where the factor goes by which a set grows."""
        if names not in self._paths:
            self._paths[names] = follow(self.graph_of(names), names)
        return self._paths[names]

    def _multiplied(self, names: Names) -> bool:
        """Whether other growing parameters multiply a set before its factor disappears."""
        graph, ends = self.graph_of(names), self.path(names).ends
        together = self.path(tuple(name for name in self.growing if name in graph.leaf_nodes)).power if ends else {}
        return bool(ends) and all(
            any(abs(together.get(i, 0.0)) > 1 for i in graph.nodes[end].inputs if i is not None) for end in ends
        )

    def nonlinear(self, names: Names) -> bool:
        """Whether a set has a defect and meets a nonlinearity: then ε need not be the reason."""
        reaching = [reading for reading in self.random if any(reading.slope[name] for name in names)]
        if not reaching or not self.path(names).nonlinear:
            return False
        exact = reaching[0] is self.first  # other readings may be in the model's own float32
        tolerance = self.prober.precision.resolution if exact else thresholds.ROUNDING_MULTIPLE * reaching[0].noise
        return self.imbalance(reaching[0], *names) > tolerance

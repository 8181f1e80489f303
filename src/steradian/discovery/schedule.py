"""Which probe comes next, and which parameters are candidates.

Three random points at least, then one more at which the candidates have grown 32-fold and 1024-fold. Further probes
only where these do not reach a part of the model, or where a gain or a bias has next to no effect.
"""

from dataclasses import replace
from itertools import count
from typing import Any

import torch

from steradian.discovery import thresholds
from steradian.discovery.invariance import Key, is_matrix, pair_keys, partial_cut
from steradian.discovery.joint import candidate_sets
from steradian.discovery.measurements import Measurements
from steradian.discovery.probe import Point, Prober, Reading


class Schedule:
    """Makes the probes of a model and collects their readings."""

    def __init__(self, prober: Prober, measured: Measurements) -> None:
        self.prober, self.measured = prober, measured
        self._sets: list[tuple[str, ...]] = []
        self._in_sets: set[str] = set()
        self._seeds = count(1)

    # Random points

    def probe_random_points(self) -> None:
        """Random points of ordinary scale; candidates are what is balanced up to ε."""
        measured = self.measured
        for _ in range(thresholds.RANDOM_POINTS):
            # Balance up to some percent needs no float64. But random numbers differ in float32, so that what chance
            # skips there is not what it skips in float64.
            seed, first = next(self._seeds), measured.first is None
            quick = not first and not self._skips_parts()
            reading = self._probe(self._random_point(seed), seed, graph=first, quick=quick)
            if reading is None:
                continue
            measured.random.append(reading)
            if first:
                measured.first = reading
        reading = measured.first
        for _ in range(thresholds.SIGN_FLIPS):
            reading = self._flip_signs(reading)
        if not measured.random:
            # The model only runs at its own weights.
            measured.random = [measured.own]
        self._choose_candidates()
        self._probe_suspects()

    def _skips_parts(self) -> bool:
        """Whether the first random point gives no gradient to something that has one at the model's own weights."""
        first, own = self.measured.first, self.measured.own
        return first is not None and any(own.slope[name] and not first.slope[name] for name in self.prober.trainable)

    def _flip_signs(self, reading: Reading | None) -> Reading | None:
        """One more probe that activates the parameters without gradient; None if there is no use in another.

        What feeds a unit of ReLU that is dead at every point may look invariant. If the parameters of the unit change
        sign, it is active. What the model skips by chance may be there in another draw.
        """
        without, random = self._without_gradient(), self.measured.random
        if reading is None or not without:
            return None
        point = reading.point.scaled(dict.fromkeys(without, -1.0))
        flipped = self._probe(point, reading.seed, draw=100 + len(random))
        if flipped is None:
            return None
        random.append(flipped)
        return flipped if len(self._without_gradient()) < len(without) else None

    def _without_gradient(self) -> list[str]:
        """Parameters in the graph, or with a gradient at the model's own weights, that have none at random points."""
        measured = self.measured
        if not measured.graphs:
            return []
        return [
            name
            for name in self.prober.trainable
            if all(reading.slope[name] == 0 for reading in measured.random)
            and (name in measured.graph.leaf_nodes or measured.own.slope[name])
            and self.prober.parameters[name].numel()
        ]

    def _probe_suspects(self) -> None:
        """One more probe if gains or biases have next to no effect: grown, they lose it if it is due to ε alone."""
        measured, first = self.measured, self.measured.first
        suspects = [name for name in measured.names_with_effect() if measured.is_suspect(name)]
        if suspects and first is not None and self.prober.left > thresholds.RESERVED_PASSES + 1:
            point = first.point.scaled(dict.fromkeys(suspects, thresholds.GROWTH[0]))
            measured.suspects_grown = self._probe(point, first.seed)

    # Candidates

    def _choose_candidates(self) -> None:
        measured, names = self.measured, self.measured.names_with_effect()
        self._sets = [s for s in candidate_sets(measured, names) if not measured.nonlinear(s)]
        self._in_sets = {name for s in self._sets for name in s}
        # What meets a nonlinearity is no row, and growing it would only change what lies behind.
        able = [name for name in names if not measured.nonlinear((name,))]
        single = [
            name
            for name in able
            if name not in self._in_sets
            and (measured.may_be_invariant(name) or measured.mostly_balanced(name) or measured.path((name,)).removed)
            # A gain or a bias can only become a fact: it grows if that is next to certain.
            and (is_matrix(measured.shapes[name]) or measured.balanced(name, thresholds.CERTAIN))
        ]
        measured.growing = dict.fromkeys([*single, *self._in_sets], 1.0)
        for name in able:
            if name not in measured.growing and is_matrix(measured.shapes[name]):
                self._grow_blocks(name)

    def _grow_blocks(self, name: str) -> None:
        """Grow only some blocks of a parameter, where only some are balanced."""
        shape = self.measured.shapes[name]
        found = partial_cut(shape, self.measured.random_trial(name))
        if found is not None:
            blocks, balanced = found
            share = torch.zeros(blocks, device="cpu")
            share[balanced] = 1.0
            share = share.repeat_interleave(shape[0] // blocks).to(self.prober.parameters[name].device)
            self.measured.growing[name] = share.reshape(-1, *[1] * (len(shape) - 1))

    # Grown points

    def probe_grown_points(self) -> None:
        """One random point with the candidates grown by two factors: how a defect falls shows its origin.

        A parameter that was balanced by chance may saturate the model when it grows. Then the candidates that are
        least balanced, and those that meet a nonlinearity, do not grow in a second try.
        """
        measured = self.measured
        self._grow()
        if self._effect_lost() and self.prober.left >= 2 * len(thresholds.GROWTH):
            clipped, balanced = self._clipped(), measured.balanced
            measured.growing = {
                name: share
                for name, share in measured.growing.items()
                if name not in clipped
                and (name in self._in_sets or balanced(name, thresholds.CERTAIN) or measured.slices_balanced(name))
            }
            self._grow()
        self._reach_further()

    def _grow(self) -> None:
        """Both growths of one point; parameters that lose their gradient in the first change sign, as at random."""
        measured, pairs, seed = self.measured, self._pairs(), next(self._seeds)
        base = self._random_point(seed)
        first = self._probe_grown(base, seed, thresholds.GROWTH[0], pairs)
        before = [name for name in self.prober.trainable if any(r.slope[name] for r in measured.random)]
        lost = [name for name in before if first and first.slope[name] == 0]
        if lost and self.prober.left > thresholds.RESERVED_PASSES:
            base = base.scaled(dict.fromkeys(lost, -1.0))
            first = self._probe_grown(base, seed, thresholds.GROWTH[0], pairs)
        readings = first, self._probe_grown(base, seed, thresholds.GROWTH[1], pairs)
        measured.grown = [reading for reading in readings if reading is not None]

    def _probe_grown(
        self, base: Point, seed: int, growth: float, pairs: dict[str, list[Key]], draw: int | None = None
    ) -> Reading | None:
        measured = self.measured
        wants_graph = False
        if growth == thresholds.GROWTH[0] and measured.graphs:
            # Parameters that this pass reaches and the first did not, by chance or by the data, need a graph too.
            wants_graph = not measured.graph.leaf_nodes.keys() >= set(measured.names_with_effect())
        point = base.scaled({name: 1 + (growth - 1) * share for name, share in measured.growing.items()})
        return self._probe(point, seed, graph=wants_graph, pairs=pairs, draw=draw)

    def _effect_lost(self) -> bool:
        """Whether a candidate has lost its effect, which the growth of an invariant row does not change."""
        measured = self.measured
        if len(measured.grown) < len(thresholds.GROWTH):
            return True
        least = {n: thresholds.LOST_EFFECT * min(r.effect[n] for r in measured.random) for n in measured.growing}
        return any(measured.grown[-1].effect[name] < least[name] for name in measured.growing)

    def _clipped(self) -> set[str]:
        """Candidates that meet a nonlinearity: one far out, as ReLU6's, leaves no defect at ordinary scale."""
        sets = [*self._sets, *((name,) for name in self.measured.growing if name not in self._in_sets)]
        clipped = {name for s in sets if self.measured.path(s).nonlinear for name in s}
        # A member of another set as well grows with that.
        return clipped - {name for s in sets if clipped.isdisjoint(s) for name in s}

    def _reach_further(self) -> None:
        """Two more probes for candidates that the grown point does not reach: at a random one that does, grown.

        An expert may get no token, and a layer may be skipped by chance, at one point and not at another.
        """
        measured = self.measured
        if len(measured.grown) < len(thresholds.GROWTH) or self.prober.left <= len(thresholds.GROWTH):
            return
        missed = self._whole_sets({n for n in measured.growing if not all(r.slope[n] for r in measured.grown)})
        reaching = [reading for reading in measured.random if any(reading.slope[name] for name in missed)]
        if not reaching:
            return
        there = max(reaching, key=lambda reading: sum(reading.slope[name] > 0 for name in missed))
        pairs = self._pairs()
        probes = [self._probe_grown(there.point, there.seed, g, pairs, there.draw) for g in thresholds.GROWTH]
        found = [reading for reading in probes if reading is not None]
        if len(found) < len(thresholds.GROWTH):
            return
        late = self._whole_sets({name for name in missed if all(reading.slope[name] for reading in found)})
        for reading, other in zip(measured.grown, found, strict=True):
            for name in late:
                reading.put(name, other.tables[name])
        measured.further, measured.late = found[-1], late

    def _whole_sets(self, names: set[str]) -> set[str]:
        """Those in no set, or in one that is contained as a whole: its members are measured at one point."""
        return (names - self._in_sets) | {name for s in self._sets if names.issuperset(s) for name in s}

    def _pairs(self) -> dict[str, list[Key]]:
        measured = self.measured
        return {name: pair_keys(measured.shapes[name], measured.random_trial(name)) for name in measured.growing}

    # Probes

    def _random_point(self, seed: int) -> Point:
        return replace(self.prober.own, seed=1000 + seed)

    def _probe(self, point: Point, seed: int, **options: Any) -> Reading | None:
        """A reading with the options of `Prober.read`; None if the model raises or gives no finite numbers there."""
        try:
            reading = self.prober.read(point, seed=seed, **options)
            if reading.finite:
                if reading.graph is not None:
                    self.measured.add_graph(reading.graph)
                return reading
        except torch.OutOfMemoryError:  # not a property of the point
            raise
        except Exception as error:
            self.prober.raised = error
        self.prober.noisy = False  # a failed probe is not fatal: the next one has no noise on the inputs
        return None

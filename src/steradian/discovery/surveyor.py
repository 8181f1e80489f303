"""The probes in their order, and the candidates among the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .defects import GROWTH
from .graph import propose
from .layouts import pair_keys, partial_cut
from .points import Point, is_matrix
from .probe import Prober, Reading
from .sets import vanishing_sets
from .structure import Trace
from .survey import Stand, Survey
from .tables import Key

__all__ = ["Surveyor"]

_NEAR = 3
_REVIVALS = 2
_RESERVE = 4
"""Passes that the second growth and the verification need."""
_SURE = 0.05
_LIKELY = 8.0
"""How many times what ε leaves of a sum its parts are on the average, for a set to be worth growing."""
_LOST = 1e-4


class Surveyor:
    """Makes the probes.

    Attributes:
        survey: where the readings are collected.
    """

    def __init__(self, prober: Prober, own: Reading) -> None:
        self.prober, self.survey = prober, Survey(prober, own)
        self._sets: list[tuple[str, ...]] = []
        self._together: set[str] = set()
        self._near: list[Stand] = []
        self._seed = 0

    def look_near(self) -> None:
        """Random points of ordinary scale; candidates are what is balanced up to ε."""
        for _ in range(_NEAR):
            # One look at the modules and the graph is enough.
            trace = Trace(graph=True) if self.survey.ground is None else None
            seed = self._next_seed()
            point = self._draw(seed)
            # Whether something is balanced up to some percent needs no float64. But random numbers are others in
            # float32, so that what chance leaves out there says nothing about what it leaves out in float64.
            reading = self._probe(seed, point, trace, quick=trace is None and not self._leaves_out())
            if reading is None:
                continue
            self._keep(Stand(reading, point, seed, trace or Trace()))
            if trace is not None and trace.graph is not None:
                self.survey.ground = self._near[-1]
                self.survey.map, self.survey.proposals = trace, propose(trace.graph)
        stand = self.survey.ground
        for _ in range(_REVIVALS):
            stand = self._revive(stand)
        if not self.survey.near:
            # The model bears no other point than its own.
            self.survey.near = [self.survey.own]
        self._choose_candidates()
        self._look_at_suspects()

    def _look_at_suspects(self) -> None:
        """One more probe if gains or biases have next to no effect: grown, they lose it if ε is all that gives it."""
        suspects = [name for name in self.survey.effective() if self.survey.suspected(name)]
        if suspects and self.survey.ground is not None and self.prober.left > _RESERVE + 1:
            stand = self.survey.ground
            point = stand.point.scaled(dict.fromkeys(suspects, GROWTH[0]))
            self.survey.doubtful = self._probe(stand.seed, point, None)

    def _leaves_out(self) -> bool:
        """Whether the first random point is silent about something that the model's own point speaks of."""
        ground, own = self.survey.ground, self.survey.own
        return ground is not None and any(
            own.slope(name) and not ground.reading.slope(name) for name in self.prober.trainable
        )

    def _keep(self, stand: Stand) -> None:
        self._near.append(stand)
        self.survey.near.append(stand.reading)

    def _revive(self, stand: Stand | None) -> Stand | None:
        """One more probe, in which what was silent speaks; None if there is no use in another.

        Behind a unit of ReLU that is dead at every point lies a part of the model that nobody has seen, and what
        feeds it may look invariant. Where the parameters of such a unit change their sign, it is alive. What the
        model leaves out by chance may be there in another draw.
        """
        silent = self._silent() if stand is not None else []
        if stand is None or not silent:
            return None
        point, draw = stand.point.scaled(dict.fromkeys(silent, -1.0)), self._next_draw()
        reading = self._probe(stand.seed, point, None, draw=draw)
        if reading is None:
            return None
        revived = Stand(reading, point, stand.seed, stand.trace, draw)
        self._keep(revived)
        return revived if len(self._silent()) < len(silent) else None

    def _silent(self) -> list[str]:
        """Parameters that the graph or the model's own point knows and that no other point has heard of."""
        graph = self.survey.map.graph
        return [
            name
            for name in self.prober.trainable
            if all(reading.slope(name) == 0 for reading in self.survey.near)
            and graph is not None
            and (graph.leaf_node(name) is not None or self.survey.own.slope(name))
            and self.prober.parameters[name].numel()
        ]

    def look_far(self) -> None:
        """One random point with the candidates grown by two factors: how a defect falls tells where it is from.

        What is silent there and was not before is given the other sign, as in `_revive`.
        A parameter that was balanced by chance may saturate the model when it grows, and nothing is seen behind
        it. Then the candidates that are least balanced stay as they are in a second try, and so do those that run
        into a curve.
        """
        self._grow()
        if self._starved() and self.prober.left >= 2 * len(GROWTH):
            sure = {
                name
                for name in self.survey.growing
                if name in self._together
                or self.survey.balanced_near(name, _SURE)
                or self.survey.slices_balanced_near(name)
            }
            sure -= self._clipped()
            self.survey.growing = {name: share for name, share in self.survey.growing.items() if name in sure}
            self._grow()
        self._reach_further()

    def _clipped(self) -> set[str]:
        """Candidates that run into a curve: one that bends only far out, as ReLU6 does, leaves no defect before."""
        single = [(name,) for name in self.survey.growing if name not in self._together]
        sets = [*self._sets, *single]
        clipped = {name for s, runs in zip(sets, self.survey.run_into_curves(sets), strict=True) if runs for name in s}
        # What is a part of another set as well grows with that.
        kept = {name for s in sets if clipped.isdisjoint(s) for name in s}
        return clipped - kept

    def _reach_further(self) -> None:
        """Two more probes for candidates that the grown point does not reach: at a near one that does, grown.

        An expert may get no token, and a layer may be left out by chance, at one point and not at another.
        """
        far = self.survey.far
        if len(far) < len(GROWTH) or self.prober.left <= len(GROWTH):
            return
        missed = {name for name in self.survey.growing if not all(stand.reading.slope(name) for stand in far)}
        missed = self._whole(missed)
        there = max(self._near, key=lambda stand: sum(stand.reading.slope(name) > 0 for name in missed))
        if not any(there.reading.slope(name) for name in missed):
            return
        stands = [self._grown(there.point, there.seed, growth, self._pairs(), there.draw) for growth in GROWTH]
        found = [stand for stand in stands if stand is not None]
        if len(found) < len(GROWTH):
            return
        late = self._whole({name for name in missed if all(stand.reading.slope(name) for stand in found)})
        for stand, other in zip(far, found, strict=True):
            stand.reading.tables.update({name: other.reading.tables[name] for name in late})
        self.survey.further, self.survey.late = found[-1], sorted(late)

    def _whole(self, names: set[str]) -> set[str]:
        """Those that are in no set, or in one that is there as a whole: its members are measured at one point."""
        return {name for name in names if name not in self._together} | {
            name for s in self._sets if names.issuperset(s) for name in s
        }

    def _grow(self) -> None:
        pairs, seed = self._pairs(), self._next_seed()
        base = self._draw(seed)
        first = self._grown(base, seed, GROWTH[0], pairs)
        spoke = [name for name in self.prober.trainable if any(reading.slope(name) for reading in self.survey.near)]
        silent = [name for name in spoke if first and first.reading.slope(name) == 0]
        if silent and self.prober.left > _RESERVE:
            base = base.scaled(dict.fromkeys(silent, -1.0))
            first = self._grown(base, seed, GROWTH[0], pairs)
        stands = first, self._grown(base, seed, GROWTH[1], pairs)
        self.survey.far = [stand for stand in stands if stand is not None]

    def _grown(
        self, base: Point, seed: int, growth: float, pairs: Mapping[str, Sequence[Key]], draw: int | None = None
    ) -> Stand | None:
        # What a pass reaches that the first did not is to be found on a map too.
        trace = Trace(graph=growth == GROWTH[0] and bool(self.survey.unmapped()))
        point = base.scaled({name: 1 + (growth - 1) * share for name, share in self.survey.growing.items()})
        reading = self._probe(seed, point, trace, pairs, draw=draw)
        if reading is None:
            return None
        if trace.graph is not None:
            self.survey.add_map(trace)
        return Stand(reading, point, seed, trace, draw)

    def _starved(self) -> bool:
        """Whether a candidate has lost its effect, which the growth of a row does not change."""
        if len(self.survey.far) < len(GROWTH):
            return True
        grown = self.survey.far[-1].reading
        return any(
            grown.effect(name) < _LOST * min(r.effect(name) for r in self.survey.near) for name in self.survey.growing
        )

    def _draw(self, seed: int) -> Point:
        return replace(self.prober.own, seed=1000 + seed)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _next_draw(self) -> int:
        return 100 + len(self._near)

    def _probe(
        self,
        seed: int,
        point: Point,
        trace: Trace | None,
        pairs: Mapping[str, Sequence[Key]] | None = None,
        *,
        quick: bool = False,
        draw: int | None = None,
    ) -> Reading | None:
        """One reading; None if the model does not bear the point."""
        try:
            reading = self.prober.read(point, seed=seed, pairs=pairs, recorder=trace, quick=quick, draw=draw)
        except torch.OutOfMemoryError:  # says nothing about the point
            raise
        except Exception as error:  # a probe is no place to fail: the next one comes without noise on the inputs
            reading, self.prober.raised = None, error
        if reading is None or not reading.finite:
            self.prober.calm()
            return None
        return reading

    def _choose_candidates(self) -> None:
        loose = self.prober.precision.loose
        names = self.survey.effective()
        sets = vanishing_sets(self.survey, self.survey.near, [loose] * len(self.survey.near), names, least=_LIKELY)
        told = [tuple(names[i] for i in s) for s in sets]
        self._sets = [s for s, runs in zip(told, self.survey.curved(told), strict=True) if not runs]
        self._together = {name for s in self._sets for name in s}
        single = [
            name
            for name in names
            if name not in self._together
            and (self.survey.invariant_near(name) or self.survey.mostly_balanced_near(name))
        ]
        # Of a gain or a bias only a fact can be learned: it grows where that is next to certain.
        single = [
            name for name in single if is_matrix(self.survey.shape(name)) or self.survey.balanced_near(name, _SURE)
        ]
        # What runs into a curve is no row, and grown it would only change what lies behind.
        alone = self.survey.curved([(name,) for name in names])
        curved = {name for name, runs in zip(names, alone, strict=True) if runs}
        self.survey.growing = dict.fromkeys([*(name for name in single if name not in curved), *self._together], 1.0)
        for name in names:
            if name not in self.survey.growing and name not in curved and is_matrix(self.survey.shape(name)):
                self._grow_blocks(name)

    def _grow_blocks(self, name: str) -> None:
        """Let only some blocks of a parameter grow, where only some are balanced."""
        shape = self.survey.shape(name)
        found = partial_cut(shape, self.survey.near_trial(name))
        if found is not None and len(found[1]) * 8 >= found[0]:
            share = torch.zeros(found[0], device="cpu")
            share[found[1]] = 1.0
            share = share.repeat_interleave(shape[0] // found[0]).to(self.prober.parameters[name].device)
            self.survey.growing[name] = share.reshape(-1, *[1] * (len(shape) - 1))

    def _pairs(self) -> dict[str, list[Key]]:
        return {name: pair_keys(self.survey.shape(name), self.survey.near_trial(name)) for name in self.survey.growing}

"""The forward checks: f(ρx) = f(x) with all rows scaled at once by random factors, f(αa, b/α) = f(a, b) of pairs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from steradian.discovery import thresholds
from steradian.discovery.graph import follow
from steradian.discovery.invariance import imbalance
from steradian.discovery.judge import Verdict
from steradian.discovery.measurements import Measurements
from steradian.discovery.probe import Factors, Prober, Reading, noise_of, output_change, output_spread
from steradian.groups import Group, Pair, Spec, set_numbers

T = TypeVar("T")


def verify(measured: Measurements, verdict: Verdict) -> Verdict:
    """Scale what was found, and keep what does not move the outputs."""
    # Rows are scaled at a point of ordinary scale, where nothing is saturated (unless ε alone moves the outputs there),
    # and then, together with the facts, at the grown one, where ε no longer shows.
    if not measured.grown:
        return verdict
    check, rows, facts = _ForwardCheck(measured), verdict.rows, verdict.facts
    readings = [*([measured.first] if measured.first else []), *measured.grown]
    # The first one where ε moves the outputs less than scaling a row would.
    usable = (reading for reading in readings if check.predicted(rows, reading) <= thresholds.MOST_PREDICTED)
    rows = check.passing(rows, [], next(usable, readings[-1]))
    late = [group for group in rows if not measured.late.isdisjoint(group.names)]
    if measured.further is not None and late and measured.prober.left > bool(facts):
        kept = check.passing(late, [], measured.further)
        rows = [group for group in rows if group not in late or group in kept]
    if facts:
        facts = check.passing(facts, rows, measured.grown[-1])
    elif measured.prober.left:
        rows = check.passing(rows, [], measured.grown[-1])
    return replace(verdict, rows=rows, facts=facts, rejected=check.rejected)


def verify_pairs(measured: Measurements, pairs: list[Pair]) -> list[Pair]:
    """The pairs that keep the outputs when all of them are scaled at once, at a random point."""
    before, prober = measured.first or measured.own, measured.prober

    def holds(tested: list[Pair]) -> bool:
        factors = [factor for i, pair in enumerate(tested) for factor in _pair_factors(pair, prober.parameters, i)]
        return _moved(prober, before, factors) <= prober.precision.same

    # What may meet a clamp, which shows far out only, is scaled apart from the others.
    clear = [pair for pair in pairs if follow(measured.graph, pair.a, pair.b).known]
    others = [pair for pair in pairs if pair not in clear]
    kept = [*_passing(clear, holds, prober)[0], *_passing(others, holds, prober)[0]]
    return [pair for pair in pairs if pair in kept]


def _passing(tested: list[T], holds: Callable[[list[T]], bool], prober: Prober) -> tuple[list[T], list[T]]:
    """What holds and what does not; on a failure, halves are tried while the budget lasts."""
    if not tested or (prober.left and holds(tested)):
        return tested, []
    if len(tested) == 1 or not prober.left:
        return [], tested
    half = len(tested) // 2
    (kept, rejected), (more_kept, more) = (_passing(h, holds, prober) for h in (tested[:half], tested[half:]))
    return kept + more_kept, rejected + more


def _moved(prober: Prober, before: Reading, factors: list[Factors]) -> float:
    """How far the outputs move from a reading when parameters are scaled, relative to their spread."""
    try:
        reading = prober.read(before.point.scaled(*factors), seed=before.seed, backward=False, draw=before.draw)
    except torch.OutOfMemoryError:  # not a property of the rows
        raise
    except Exception as error:  # a point at which the model fails proves nothing
        prober.raised = error
        return math.inf
    return output_change(before.outputs, reading.outputs)


def _pair_factors(pair: Pair, parameters: Mapping[str, Tensor], seed: int) -> list[Factors]:
    """A random α per set for one side, and 1/α for the other."""
    exponent = torch.empty(pair.n, dtype=torch.float64, device="cpu")
    exponent.uniform_(-thresholds.PAIR_FACTORS, thresholds.PAIR_FACTORS, generator=noise_of(seed)(exponent.device))
    sides = (exponent, pair.a, pair.a_specs), (-exponent, pair.b, pair.b_specs)
    return [_spread(power.exp2(), names, specs, parameters) for power, names, specs in sides]


def _row_factors(group: Group, parameters: Mapping[str, Tensor], seed: int, how: str, left_out: Tensor) -> Factors:
    """A random ρ per row, 1 for rows that are left out: 1/2 to 2 either way, 4 to 16 up, or 1.01 to 1.02 a little."""
    # Growing removes ε's weight, which moves a true row less than shrinking would, and any other row more.
    host = torch.device("cpu")
    generator = noise_of(seed)(host)
    exponent = 0.5 + 0.5 * torch.rand(group.n_rows, generator=generator, dtype=torch.float64, device=host)
    sign = torch.where(torch.rand(group.n_rows, generator=generator, device=host) < 0.5, -1.0, 1.0)
    rho = {"up": 4 * exponent, "either way": sign * exponent, "a little": 0.03 * sign * exponent}[how].exp2()
    return _spread(rho.masked_fill(left_out, 1.0), group.names, [group.spec] * len(group.names), parameters)


def _spread(factors: Tensor, names: Sequence[str], specs: Sequence[Spec], parameters: Mapping[str, Tensor]) -> Factors:
    """A factor per set of rows, repeated over its entries in each parameter; 1 for what is in no set."""
    factors = torch.cat([factors, factors.new_ones(1)])  # the last one is that of −1
    cut = zip(names, specs, strict=True)
    return {n: factors[set_numbers(spec, parameters[n].shape)].to(parameters[n].device) for n, spec in cut}


class _ForwardCheck:
    def __init__(self, measured: Measurements) -> None:
        self.prober, self.measured = measured.prober, measured
        self.rejected: list[Group] = []
        self._draw = 0

    def passing(self, tested: list[Group], known: list[Group], before: Reading) -> list[Group]:
        """The groups that hold, scaled together with known ones."""
        kept, rejected = _passing(tested, lambda groups: self._holds(groups, known, before), self.prober)
        self.rejected += rejected
        return kept

    def _holds(self, tested: list[Group], known: list[Group], before: Reading) -> bool:
        grown, scaled = self.measured.is_fully_grown(before), [*known, *tested]
        moved = self._moved(scaled, before, "either way" if grown else "up")
        if moved <= self._tolerance(scaled, before):
            return True
        # Where rows have next to no variance, ε does more than their derivatives predict, but gradually: a factor of
        # 1.02 does about a hundredth of what one of 4 to 16 does. What jumps at some size does more.
        known_path = all(self.measured.path(group.names).known for group in tested)
        if grown or moved > thresholds.MOST_GRADUAL_MOVE or not known_path or not self.prober.left:
            return False
        return self._moved(scaled, before, "a little") <= thresholds.GRADUAL * moved

    def _moved(self, scaled: list[Group], before: Reading, how: str) -> float:
        """How far the outputs move when the rows are scaled, relative to their spread."""
        self._draw += 1
        factors = [
            _row_factors(group, self.prober.parameters, 1000 * self._draw + i, how, self._left_out(group, before))
            for i, group in enumerate(scaled)
        ]
        return _moved(self.prober, before, factors)

    def _left_out(self, group: Group, before: Reading) -> Tensor:
        """Rows that ε dominates at ordinary scale, if they are few: they are scaled where they have grown."""
        dominated = imbalance(*self.measured.row_sums(before, group)) > thresholds.LEFT_OUT
        few = group.n_rows == len(dominated) and float(dominated.double().mean()) < thresholds.MOST_LEFT_OUT
        none = torch.zeros(group.n_rows, dtype=torch.bool, device="cpu")
        return dominated if before is self.measured.first and few else none

    def _tolerance(self, scaled: list[Group], before: Reading) -> float:
        """How far outputs may move: what ε does to a row, it does to the outputs when that row is scaled."""
        same, predicted = self.prober.precision.same, 3 * self.predicted(scaled, before)
        if self.measured.is_fully_grown(before):
            by_defect = max(10 * max(self.measured.worst_rows(group)[1] for group in scaled), predicted)
            return max(same, min(by_defect, thresholds.MOST_MOVE))
        least = max(same, thresholds.LEAST_MOVE, min(predicted, thresholds.MOST_PREDICTED))
        if before is not self.measured.first:
            return least
        return max(least, min(10 * max(self.measured.worst_rows(group)[0] for group in scaled), thresholds.MOST_MOVE))

    def predicted(self, scaled: list[Group], before: Reading) -> float:
        """How far the outputs move by ⟨∇L, x⟩ when ε loses its weight, relative to their spread."""
        # dL/d log ρ falls from D = ⟨∇L, x⟩ with 1/ρ², so that growing changes L by D/2. L is the outputs' product with
        # a normal vector, which changes about as much as they do. Rows may act together or each for itself.
        moves = [0.0]
        for reading in self.measured.random if before is self.measured.first else [before]:
            radial = [self.measured.row_sums(reading, group)[0][0] for group in scaled]
            change = sum(max(abs(float(D.sum())), float(D.norm())) for D in radial) / 2
            spread = math.hypot(*(output_spread(t) for t in reading.outputs))
            moves.append(change / spread if spread else 0.0)
        return max(moves)

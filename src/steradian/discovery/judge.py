"""The verdict: which parameters have rows, which sets have them together, and which have no effect; and its proof.

The forward checks are f(ρx) = f(x) with all rows scaled at once by random factors, and f(αa, b/α) = f(a, b) of pairs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from steradian.discovery import thresholds
from steradian.discovery.graph import follow
from steradian.discovery.invariance import Cuts, finest, imbalance, is_matrix, partial_cut, to_spec
from steradian.discovery.joint import Names, alignments, coarser, joint_sets
from steradian.discovery.measurements import Measurements
from steradian.discovery.probe import Factors, Prober, Reading, noise_of, output_change, output_spread
from steradian.groups import Group, Pair, Spec, set_numbers
from steradian.names import ranges

T = TypeVar("T")


@dataclass
class Verdict:
    """What was found about all parameters."""

    rows: list[Group] = field(default_factory=list)  # groups of weights, for optimizers
    # Further groups: of gains and biases, sets that overlap, members that act through each other.
    facts: list[Group] = field(default_factory=list)
    no_effect: dict[str, str] = field(default_factory=dict)  # parameters without effect, with what was measured
    partial: dict[str, str] = field(default_factory=dict)  # partly invariant parameters, with a description
    rejected: list[Group] = field(default_factory=list)  # groups that the forward check refuted or could not prove
    refuted: list[Group] = field(default_factory=list)  # those of them that moved the outputs by themselves
    nonlinear: list[Group] = field(default_factory=list)  # groups that are balanced, but possibly due to a nonlinearity
    deterministic: bool = True  # whether a repeated pass gives the same outputs


def judge(measured: Measurements) -> Verdict:
    """Rows, joint sets, parameters without effect and partly invariant ones."""
    verdict = Verdict(no_effect=_without_effect(measured))
    if not measured.grown:
        return verdict
    names = [name for name in measured.names_with_effect() if name not in verdict.no_effect]
    joint = joint_sets(measured, names)
    in_sets = {name for s in joint for name in s}
    for name in names:
        if name not in in_sets:
            _judge_single(measured, name, verdict)
    order = measured.graph.order_of_use
    places = {s: [order.get(name, len(order)) for name in s] for s in joint}
    # Of sets that share a bias the first one gets it: that of its own layer.
    for s in sorted(joint, key=lambda s: (len(s), max(places[s]) - min(places[s]))):
        _judge_joint(measured, s, verdict, by_epsilon=joint[s])
    verdict.nonlinear = [group for group in verdict.rows if measured.nonlinear(group.names)]
    verdict.rows = [group for group in verdict.rows if group not in verdict.nonlinear]
    verdict.facts = [group for group in verdict.facts if not measured.nonlinear(group.names)]
    return verdict


def _without_effect(measured: Measurements) -> dict[str, str]:
    found, grown = {}, measured.suspects_grown
    for name in measured.prober.probed:
        share = measured.local_share(name)
        text = f"effect {share:.1e} of the largest around it"
        if not any(reading.slope[name] for reading in (measured.own, *measured.random)):
            found[name] = "not reached: it is unused, or every pass skipped it by chance or by the data"
        elif share <= measured.own.noise:
            found[name] = text
        elif measured.is_suspect(name):
            # An effect due to ε is divided by the square of the growth, by its fourth power where two in a row grow.
            ratio = grown.effect[name] / (measured.first.effect[name] or 1.0) if grown else math.nan
            vanishes = any(0.5 < ratio * thresholds.GROWTH[0] ** power < 2 for power in (2, 4))
            if share < thresholds.NO_EFFECT or vanishes:
                found[name] = f"{text}: what a normalization's ε lets through"
    return found


def _judge_single(measured: Measurements, name: str, verdict: Verdict) -> None:
    """Add the rows of one parameter to the verdict, or the blocks of it that are invariant, if there are any."""
    shape, trial = measured.shapes[name], measured.trial((name,))
    active = all(r.effect[name] > thresholds.MEASURABLE * measured.floor(r, (name,)) for r in measured.grown)
    cut = finest(shape, trial) if active and math.prod(shape) > 1 else None
    if cut is None:
        if is_matrix(shape) and (found := partial_cut(shape, trial)):
            verdict.partial[name] = f"of {found[0]} equal blocks of dimension 0 only {ranges(found[1])} are invariant"
        return
    # A layer with one output has the shape of some gains. Those are seldom in front of what mixes all their numbers.
    one_filter = len(shape) > 1 and shape[1] == math.prod(shape)
    is_weight = is_matrix(shape) or (one_filter and math.prod(cut) == 1)
    group = _group(measured, (name,), to_spec(cut, shape), math.prod(cut))
    (verdict.rows if is_weight else verdict.facts).append(group)


def _judge_joint(measured: Measurements, names: Names, verdict: Verdict, *, by_epsilon: bool) -> None:
    """Add the rows of a joint set to the verdict, with the finest spec that its members share."""
    shapes = [measured.shapes[name] for name in names]
    size, whole = sum(map(math.prod, shapes)), tuple((1,) * len(shape) for shape in shapes)
    best: tuple[Cuts, Cuts] | None = None  # slices that lie beside each other, and the cut into rows of them
    for slices in (whole, *alignments(shapes)):
        n = math.prod(slices[0])
        found = finest((n, size // n), measured.trial(names, slices))
        rows = [coarser(cut, found[0]) for cut in slices] if found is not None else []
        cuts = tuple(cut for cut in rows if cut is not None)
        if len(cuts) == len(shapes) and (best is None or math.prod(cuts[0]) > math.prod(best[1][0])):
            best = slices, cuts
    if best is None and not by_epsilon:
        return
    measured.slices[names], cuts = best or ((), whole)
    n_rows, largest = math.prod(cuts[0]), max(range(len(names)), key=lambda i: len(cuts[i]))
    spec = to_spec(cuts[largest], shapes[largest]) if n_rows > 1 else "tensor"
    taken = {name for group in verdict.rows for name in group.names}
    graph, modules = measured.graph, {name.rpartition(".")[0] for name in names}
    parallel = graph.parallel(names) if graph.leaf_nodes.keys() >= set(names) else len(modules) == 1
    is_weight = parallel and any(map(is_matrix, shapes)) and not taken & set(names)
    (verdict.rows if is_weight else verdict.facts).append(_group(measured, names, spec, n_rows))


def _group(measured: Measurements, names: Names, spec: Spec, n_rows: int) -> Group:
    """The group with what was measured of its rows at the model's own weights."""
    size = sum(math.prod(measured.shapes[name]) for name in names) // n_rows
    group = Group(names, spec, n_rows, size, reason="", defect=0.0)
    at_random = [measured.row_sums(reading, group) for reading in measured.random]
    reached = torch.stack([sums[1].sqrt() > thresholds.MEASURABLE * floor for sums, floor in at_random]).any(0)
    # The model's own weights, or a random point if no row has an effect there.
    for sums, floor in (measured.row_sums(measured.own, group), *at_random):
        measurable = sums[1].sqrt() > thresholds.MEASURABLE * floor
        if bool(measurable.any()):
            break
    cosine = sums[0].abs() / (sums[2] * sums[3]).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    dominated = measurable & (imbalance(sums, floor).abs() > thresholds.EPSILON_DOMINATES) | (sums[3] == 0)
    defect = float(cosine[measurable].max()) if bool(measurable.any()) else 0.0
    return replace(group, defect=defect, unseen=int((~reached).sum()), small=int(dominated.sum()))


def verify(measured: Measurements, verdict: Verdict) -> Verdict:
    """Scale what was found, and keep what does not move the outputs."""
    # Rows are scaled at a point of ordinary scale, where nothing is saturated (unless ε alone moves the outputs there),
    # and then, together with the facts, at the grown one, where ε no longer shows.
    if not measured.grown:
        return verdict
    prober, check, rows, facts = measured.prober, _ForwardCheck(measured), verdict.rows, verdict.facts
    readings = [measured.first, *measured.grown]
    # The first one where ε moves the outputs less than scaling a row would.
    usable = (reading for reading in readings if check.predicted(rows, reading) <= thresholds.MOST_PREDICTED)
    rows = check.passing(rows, [], next(usable, readings[-1]))
    late = [group for group in rows if not measured.late.isdisjoint(group.names)]
    if measured.further is not None and late and prober.left > bool(facts):
        kept = check.passing(late, [], measured.further)
        rows = [group for group in rows if group not in late or group in kept]
    if facts:
        facts = check.passing(facts, rows, measured.grown[-1])
    elif prober.left:
        rows = check.passing(rows, [], measured.grown[-1])
    if prober.precision.dtype != torch.float64:
        # Less precise readings do not show how a defect falls: another branch beside the rows may pass for ε.
        rows = check.passing(rows, [], measured.grown[0], down=True)
        facts = check.passing(facts, [], measured.grown[0], down=True)
    rejected = [group for group in (*verdict.rows, *verdict.facts) if group not in (*rows, *facts)]
    same = not rejected or _moved(prober, measured.first, []) <= prober.precision.same or prober.raised is not None
    return replace(verdict, rows=rows, facts=facts, rejected=rejected, refuted=check.refuted, deterministic=same)


def verify_pairs(measured: Measurements, pairs: list[Pair]) -> list[Pair]:
    """The pairs that keep the outputs when all of them are scaled at once, at a random point."""
    prober, largest = measured.prober, thresholds.PAIR_FACTORS

    def holds(tested: list[Pair]) -> bool:
        factors = []
        for i, pair in enumerate(tested):
            exponent = torch.empty(pair.n, dtype=torch.float64, device="cpu")
            exponent.uniform_(-largest, largest, generator=noise_of(i)(exponent.device))
            sides = (exponent, pair.a, pair.a_specs), (-exponent, pair.b, pair.b_specs)
            factors += [_spread(power.exp2(), names, specs, prober.parameters) for power, names, specs in sides]
        return _moved(prober, measured.first, factors) <= prober.precision.same

    # What may meet a clamp, which shows far out only, is scaled apart from the others. A gain may have a further reader
    # without a derivative, such as a choice of tokens: where a check fails, matrices are scaled without gains.
    gains = [pair for pair in pairs if not any(is_matrix(measured.shapes[name]) for name in pair.a)]
    order = [*gains, *(pair for pair in pairs if pair not in gains)]
    clear = [pair for pair in order if follow(measured.graph, pair.a, pair.b).known]
    kept = _passing(clear, holds, prober, cut=sum(pair in gains for pair in clear))
    kept += _passing([pair for pair in order if pair not in clear], holds, prober)
    return [pair for pair in pairs if pair in kept]


def _passing(tested: list[T], holds: Callable[[list[T]], bool], prober: Prober, *, cut: int = 0) -> list[T]:
    """What holds; of what fails, cut there first, halves are tried while the budget lasts, the larger ones first."""
    kept: list[T] = []
    parts = [tested] if tested else []
    while parts and prober.left:
        part = parts.pop(0)
        if holds(part):
            kept += part
        elif len(part) > 1:
            middle = cut if part is tested and 0 < cut < len(part) else len(part) // 2
            parts += [part[:middle], part[middle:]]
    return [each for each in tested if each in kept]


def _moved(prober: Prober, before: Reading, factors: list[Factors]) -> float:
    """How far the outputs move from a reading when parameters are scaled, relative to their spread."""
    reading = prober.attempt(before.point.scaled(*factors), seed=before.seed, backward=False, draw=before.draw)
    # A point at which the model fails proves nothing.
    return output_change(before.outputs, reading.outputs) if reading else math.inf


def _spread(factors: Tensor, names: Sequence[str], specs: Sequence[Spec], parameters: Mapping[str, Tensor]) -> Factors:
    """A factor per set of rows, repeated over its entries in each parameter; 1 for what is in no set."""
    factors = torch.cat([factors, factors.new_ones(1)])  # the last one is that of −1
    cut = zip(names, specs, strict=True)
    return {n: factors[set_numbers(spec, parameters[n].shape)].to(parameters[n].device) for n, spec in cut}


class _ForwardCheck:
    def __init__(self, measured: Measurements) -> None:
        self.prober, self.measured = measured.prober, measured
        self.refuted: list[Group] = []  # what did not hold by itself
        self._draw = 0

    def passing(self, tested: list[Group], known: list[Group], before: Reading, *, down: bool = False) -> list[Group]:
        """The groups that hold, scaled together with known ones."""

        def holds(groups: list[Group]) -> bool:
            least = thresholds.SHRUNK * self.prober.precision.same
            held = self._moved(groups, before, "down") <= least if down else self._holds(groups, known, before)
            self.refuted += groups if not held and len(groups) == 1 else []
            return held

        return _passing(tested, holds, self.prober)

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
        """How far the outputs move when the rows are scaled, 4- to 16-fold up or down, by 1/2 to 2, or by 1.02."""
        # Growing removes ε's weight, which moves a true row less than shrinking would, and any other row more.
        self._draw += 1
        host, factors = torch.device("cpu"), []
        for i, group in enumerate(scaled):
            generator = noise_of(1000 * self._draw + i)(host)
            exponent = 0.5 + 0.5 * torch.rand(group.n_rows, generator=generator, dtype=torch.float64, device=host)
            sign = torch.where(torch.rand(group.n_rows, generator=generator, device=host) < 0.5, -1.0, 1.0)
            powers = {"up": 4 * exponent, "down": -(4 * exponent).round(), "either way": sign * exponent}
            rho = powers.get(how, 0.03 * sign * exponent).exp2()  # down by powers of two, which are not rounded
            if before is self.measured.first:
                # Few rows that ε dominates at ordinary scale are left out: they are scaled where they have grown.
                dominated = imbalance(*self.measured.row_sums(before, group)).abs() > thresholds.LEFT_OUT
                if len(dominated) == len(rho) and float(dominated.double().mean()) < thresholds.MOST_LEFT_OUT:
                    rho[dominated] = 1.0
            factors.append(_spread(rho, group.names, [group.spec] * len(group.names), self.prober.parameters))
        return _moved(self.prober, before, factors)

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

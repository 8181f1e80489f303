"""The verdict: which parameters have rows, which sets have them together, and which have no effect."""

import math
from dataclasses import dataclass, field, replace

import torch

from steradian.discovery import thresholds
from steradian.discovery.invariance import Cuts, finest, imbalance, is_matrix, partial_cut, to_spec
from steradian.discovery.joint import alignments, coarser, joint_sets
from steradian.discovery.measurements import Measurements, Names
from steradian.groups import Group, Spec
from steradian.names import ranges


@dataclass
class Verdict:
    """What was found about all parameters."""

    rows: list[Group] = field(default_factory=list)  # groups of weights, for optimizers
    # Further groups: of gains and biases, sets that overlap, members that act through each other.
    facts: list[Group] = field(default_factory=list)
    nonlinear: list[Group] = field(default_factory=list)  # groups that are balanced, but possibly due to a nonlinearity
    no_effect: dict[str, str] = field(default_factory=dict)  # parameters without effect, with what was measured
    partial: dict[str, str] = field(default_factory=dict)  # partly invariant parameters, with a description
    rejected: list[Group] = field(default_factory=list)  # groups that the forward check refuted or could not prove


def judge(measured: Measurements) -> Verdict:
    """Rows, joint sets, parameters without effect and partly invariant ones."""
    verdict = Verdict(no_effect=_without_effect(measured))
    if not measured.grown:
        return verdict
    names = [name for name in measured.names_with_effect() if name not in verdict.no_effect]
    joint = joint_sets(measured, names)
    in_sets = {name for s in joint for name in s}
    single = {name for name in names if name not in in_sets and _judge_single(measured, name, verdict)}
    order = measured.graph.order_of_use
    places = {s: [order.get(name, len(order)) for name in s] for s in joint}
    # Of sets that share a bias the first one gets it: that of its own layer.
    for s in sorted(joint, key=lambda s: (len(s), max(places[s]) - min(places[s]))):
        _judge_joint(measured, s, verdict, by_epsilon=joint[s])
    for name in (name for name in names if name not in single and name not in in_sets):
        if is_matrix(measured.shapes[name]) and not measured.nonlinear((name,)):
            found = partial_cut(measured.shapes[name], measured.trial((name,)))
            if found is not None:
                which = f"of {found[0]} equal blocks of dimension 0 only {ranges(found[1])} are invariant"
                verdict.partial[name] = which
    verdict.nonlinear = [group for group in verdict.rows if measured.nonlinear(group.names)]
    verdict.rows = [group for group in verdict.rows if group not in verdict.nonlinear]
    verdict.facts = [group for group in verdict.facts if not measured.nonlinear(group.names)]
    return verdict


def _without_effect(measured: Measurements) -> dict[str, str]:
    found = {}
    for name in measured.prober.trainable:
        share = measured.local_share(name)
        text = f"effect {share:.1e} of the largest around it"
        if not measured.has_effect(name):
            found[name] = text
        elif measured.is_suspect(name) and (share < thresholds.NO_EFFECT or _effect_vanishes(measured, name)):
            found[name] = f"{text}: what a normalization's ε lets through"
    return found


def _effect_vanishes(measured: Measurements, name: str) -> bool:
    """Whether the effect of a parameter is divided by the square of its growth, as ε is, or by its fourth power."""
    if measured.suspects_grown is None or measured.first is None:
        return False
    ratio = measured.suspects_grown.effect[name] / (measured.first.effect[name] or 1.0)
    return any(0.5 < ratio * thresholds.GROWTH[0] ** power < 2 for power in (2, 4))  # 4 where two in a row have grown


def _judge_single(measured: Measurements, name: str, verdict: Verdict) -> bool:
    """Add the rows of one parameter to the verdict, if it has any."""
    shape = measured.shapes[name]
    active = all(r.effect[name] > thresholds.MEASURABLE * measured.floor(r, (name,)) for r in measured.grown)
    cut = finest(shape, measured.trial((name,))) if active and math.prod(shape) > 1 else None
    if cut is None:
        return False
    # A layer with one output has the shape of some gains. Those are seldom in front of what mixes all their numbers.
    one_filter = len(shape) > 1 and shape[1] == math.prod(shape)
    is_weight = is_matrix(shape) or (one_filter and math.prod(cut) == 1)
    group = _group(measured, (name,), to_spec(cut, shape), math.prod(cut))
    (verdict.rows if is_weight else verdict.facts).append(group)
    return True


def _judge_joint(measured: Measurements, names: Names, verdict: Verdict, *, by_epsilon: bool) -> None:
    """Add the rows of a joint set to the verdict, with the finest spec that its members share."""
    shapes = [measured.shapes[name] for name in names]
    found = _finest_aligned(measured, names)
    if found is None and not by_epsilon:
        return
    measured.slices[names], cuts = found or ((), tuple((1,) * len(shape) for shape in shapes))
    n_rows, largest = math.prod(cuts[0]), max(range(len(names)), key=lambda i: len(cuts[i]))
    spec = to_spec(cuts[largest], shapes[largest]) if n_rows > 1 else "tensor"
    taken = {name for group in verdict.rows for name in group.names}
    # A set that the graph does not have is one of a module.
    known = measured.graph.leaf_nodes.keys() >= set(names)
    parallel = measured.proposals.parallel(names) if known else len({name.rpartition(".")[0] for name in names}) == 1
    is_weight = parallel and any(map(is_matrix, shapes)) and not taken & set(names)
    (verdict.rows if is_weight else verdict.facts).append(_group(measured, names, spec, n_rows))


def _finest_aligned(measured: Measurements, names: Names) -> tuple[Cuts, Cuts] | None:
    """The way to lay slices of the members beside each other that gives most rows, and the cut into these."""
    shapes = [measured.shapes[name] for name in names]
    size, best = sum(map(math.prod, shapes)), None
    for slices in (tuple((1,) * len(shape) for shape in shapes), *alignments(shapes)):
        n = math.prod(slices[0])
        found = finest((n, size // n), measured.trial(names, slices))
        rows = [coarser(cut, found[0]) for cut in slices] if found is not None else []
        cuts = tuple(cut for cut in rows if cut is not None)
        if len(cuts) == len(shapes) and (best is None or math.prod(cuts[0]) > math.prod(best[1][0])):
            best = slices, cuts
    return best


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
    dominated = measurable & (imbalance(sums, floor) > thresholds.EPSILON_DOMINATES) | (sums[3] == 0)
    return replace(
        group,
        defect=float(cosine[measurable].max()) if bool(measurable.any()) else 0.0,
        unseen=int((~reached).sum()),
        small=int(dominated.sum()),
    )

"""The verdict: which parameters have rows, which sets have them together, and which have no effect."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..groups import Spec
from .align import Alignment, alignments
from .defects import GROWTH, falls, obeys
from .evidence import Cut, block_sums, natural, remaining
from .joint import Indices, minimal, set_imbalance, signed_set_imbalance
from .layouts import finest, partial_cut, to_spec
from .points import is_matrix, is_one_filter
from .probe import Reading
from .sets import proposed_sets, slices_fall, vanishes, vanishing_sets
from .survey import Survey

__all__ = ["Finding", "Findings", "judge", "row_sums"]

_VANISHING = 1e-4


@dataclass(frozen=True)
class Finding:
    """A parameter, or a joint set, whose rows are balanced in every probe.

    Attributes:
        names: its parameters, in the model's order.
        cuts: blocks along each dimension, per parameter.
        layout: the same as plain data.
        weights: whether it holds a matrix, and no member acts through another: rows for an optimizer.
        natural: the largest imbalance of a row at ordinary scale.
        remaining: the largest imbalance that growth has left.
        alignment: how the members lie beside each other, where it is not dimension by dimension.
    """

    names: tuple[str, ...]
    cuts: tuple[Cut, ...]
    layout: Spec
    weights: bool
    natural: float
    remaining: float
    alignment: Alignment | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.cuts[0])


def row_sums(survey: Survey, reading: Reading, finding: Finding) -> tuple[Tensor, float]:
    """The sums of `Table` per row in one probe, and the effect below which they say nothing."""
    floor = max(survey.floor(reading, name) for name in finding.names)
    tables, cut = survey.tables(reading, finding.names, finding.alignment), finding.cuts[0]
    if finding.alignment is not None:
        return block_sums(tables, (finding.rows,)).reshape(4, -1), floor
    if sum(blocks > 1 for blocks in cut) > 1:
        # The table of a pair of dimensions is made for grown points only; here one of them has to do.
        widest = max(range(len(cut)), key=lambda i: cut[i])
        cut = tuple(blocks if i == widest else 1 for i, blocks in enumerate(cut))
    return block_sums(tables, cut).reshape(4, -1), floor


@dataclass
class Findings:
    """What the probes say about all parameters; `curved` is balanced, but by a curve for all that is known."""

    rows: list[Finding] = field(default_factory=list)
    facts: list[Finding] = field(default_factory=list)
    curved: list[Finding] = field(default_factory=list)
    no_effect: dict[str, str] = field(default_factory=dict)
    partial: dict[str, str] = field(default_factory=dict)


def judge(survey: Survey) -> Findings:
    """Rows, joint sets, parameters without effect and partly invariant ones."""
    findings = Findings()
    names = survey.effective()
    _judge_effects(survey, findings)
    names = [name for name in names if name not in findings.no_effect]
    if not survey.far:
        return findings
    joint = _joint_sets(survey, names)
    together = {names[i] for indices in joint for i in indices}
    survey.see_through([tuple(names[i] for i in indices) for indices in joint])
    single = {name for name in names if name not in together and _judge_single(survey, name, findings)}
    # Of sets that share a bias the first one gets it: its own layer's.
    for indices in sorted(joint, key=lambda s: (len(s), survey.reach([names[i] for i in s]))):
        _judge_joint(survey, tuple(names[i] for i in indices), findings, by_epsilon=joint[indices])
    curved = survey.curved([(name,) for name in names])
    for name, runs in zip(names, curved, strict=True):
        if is_matrix(survey.shape(name)) and name not in single and name not in together and not runs:
            _judge_blocks(survey, name, findings)
    findings.rows, findings.curved = _split(survey, findings.rows)
    findings.facts, _ = _split(survey, findings.facts)
    return findings


def _split(survey: Survey, found: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Findings that a normalization explains, and those that may come from a curve."""
    curved = survey.curved([finding.names for finding in found])
    pairs = list(zip(found, curved, strict=True))
    return [f for f, runs in pairs if not runs], [f for f, runs in pairs if runs]


def _judge_effects(survey: Survey, findings: Findings) -> None:
    for name in survey.prober.trainable:
        shape, share = survey.shape(name), survey.local_share(name)
        if not survey.speaks(name):
            findings.no_effect[name] = f"effect {share:.1e} of the largest around it"
        elif (share < _VANISHING and not is_matrix(shape)) or (survey.suspected(name) and _vanishes_with(survey, name)):
            findings.no_effect[name] = (
                f"effect {share:.1e} of the largest around it: what a normalization's ε lets through"
            )


def _vanishes_with(survey: Survey, name: str) -> bool:
    """Whether the effect of a parameter is divided by the square of its growth, as ε is, or by its fourth power.

    The latter where two of them in a row have grown.
    """
    if survey.doubtful is None or survey.ground is None:
        return False
    ratio = survey.doubtful.effect(name) / (survey.ground.reading.effect(name) or 1.0)
    return any(0.5 < ratio * GROWTH[0] ** power < 2 for power in (2, 4))


def _judge_single(survey: Survey, name: str, findings: Findings) -> bool:
    shape = survey.shape(name)
    alive = all(reading.effect(name) > 10 * survey.floor(reading, name) for reading in survey.far_readings())
    trial = survey.far_trial(name)
    cut = finest(shape, trial) if alive and math.prod(shape) > 1 else None
    if cut is None:
        return False
    defects = natural(cut, trial)[1], remaining(cut, trial)
    # A layer with one output has the shape of some gains. Those are seldom in front of what mixes all their numbers.
    weights = is_matrix(shape) or (is_one_filter(shape) and math.prod(cut) == 1)
    finding = Finding((name,), (cut,), to_spec(cut, shape), weights, *defects)
    (findings.rows if finding.weights else findings.facts).append(finding)
    return True


def _joint_sets(survey: Survey, names: list[str]) -> dict[Indices, bool]:
    """Minimal sets whose sums vanish in every probe and fall, and whether the sum alone tells that ε is the cause."""
    # The last probe goes first: it is the most telling one to sort sums by.
    readings, allowed = survey.far_readings()[::-1], survey.far_tolerances()[::-1]
    sets, far, near = (
        vanishing_sets(survey, readings, allowed, names),
        survey.matrices(readings, names),
        survey.matrices(survey.near, names),
    )
    # Whether parts cancel shows best where ε is gone. Of a set that was only found by trying, the other probes must
    # say so too; the two growths of one point cancel alike, so that one of them speaks for both.
    precision, independent = survey.prober.precision, [*survey.near, readings[0]]
    loose, proposed = [precision.loose] * len(survey.near), set(proposed_sets(survey, names))
    # A set that vanishes by chance at one point must not hide the larger one that it is part of.
    explained: dict[Indices, bool] = {}
    for s in sets:
        after, before = torch.tensor(signed_set_imbalance(*far, s), device="cpu")[[0, -1], None]
        linear = bool((set_imbalance(*near, s) <= precision.linear).all())
        linear = linear and bool(obeys(before, after, precision.resolution, order=1))
        falling, members = bool(falls(before.abs(), after.abs(), precision.settled)), [names[i] for i in s]
        if (linear or falling or slices_fall(survey, readings, members)) and vanishes(
            survey, survey.near, loose, members, readings if s in proposed else independent
        ):
            by_sum = falling and bool(obeys(before, after, precision.resolution))
            explained[s] = linear or len(readings) < len(GROWTH) or by_sum
    return {s: explained[s] for s in minimal(explained)}


def _judge_joint(survey: Survey, names: tuple[str, ...], findings: Findings, *, by_epsilon: bool) -> None:
    shapes = [survey.shape(name) for name in names]
    dims = min(map(len, shapes))
    common = [shapes[0][k] if len({shape[k] for shape in shapes}) == 1 else 1 for k in range(dims)]
    flat = (*common, sum(map(math.prod, shapes)) // math.prod(common))
    trial = survey.far_trial(*names)
    found = finest(flat, trial)
    aligned = _finest_aligned(survey, names)
    if found is None and aligned is None and not by_epsilon:
        return
    cut = (found or (1,) * len(flat))[:dims]
    cuts = tuple((*cut, *[1] * (len(shape) - dims)) for shape in shapes)
    layout = to_spec(cut, common) if math.prod(cut) > 1 else "tensor"
    taken = {name for finding in findings.rows for name in finding.names}
    weights = _parallel(survey, names) and any(map(is_matrix, shapes)) and not taken & set(names)
    finding = Finding(names, cuts, layout, weights, natural(cut, trial)[1], remaining(cut, trial))
    if aligned is not None and math.prod(aligned[1][0]) > finding.rows:
        finding = _aligned_finding(survey, names, *aligned, weights=weights)
    (findings.rows if weights else findings.facts).append(finding)


def _finest_aligned(survey: Survey, names: tuple[str, ...]) -> tuple[Alignment, tuple[Cut, ...]] | None:
    """The way to lay the members beside each other that gives most rows, and the cut of each member."""
    shapes, best = [survey.shape(name) for name in names], None
    for alignment in alignments(shapes):
        size = sum(map(math.prod, shapes)) // alignment.slices
        found = finest((alignment.slices, size), survey.far_trial(*names, alignment=alignment))
        cuts = [alignment.cut(found[0], shape) for shape in shapes] if found is not None else [None]
        known = tuple(cut for cut in cuts if cut is not None)
        if len(known) == len(shapes) and (best is None or math.prod(known[0]) > math.prod(best[1][0])):
            best = alignment, known
    return best


def _aligned_finding(
    survey: Survey, names: tuple[str, ...], alignment: Alignment, cuts: tuple[Cut, ...], *, weights: bool
) -> Finding:
    trial, rows = survey.far_trial(*names, alignment=alignment), (math.prod(cuts[0]),)
    largest = max(range(len(names)), key=lambda i: len(cuts[i]))
    layout = to_spec(cuts[largest], survey.shape(names[largest]))
    return Finding(names, cuts, layout, weights, natural(rows, trial)[1], remaining(rows, trial), alignment)


def _parallel(survey: Survey, names: tuple[str, ...]) -> bool:
    order = survey.order()
    if any(survey.map.graph is None or survey.map.graph.leaf_node(name) is None for name in names):
        return len({name.rpartition(".")[0] for name in names}) == 1
    return survey.proposals.parallel(sum(1 << order.index(name) for name in names))


def _judge_blocks(survey: Survey, name: str, findings: Findings) -> None:
    found = partial_cut(survey.shape(name), survey.far_trial(name))
    if found is not None and len(found[1]) * 8 >= found[0]:
        blocks, good = found
        findings.partial[name] = f"of {blocks} equal blocks of dimension 0 only {_ranges(good)} are invariant"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0–2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)

"""From what was found to `Groups`: defects, reasons, and words for a person."""

import math

import torch
from torch import Tensor, nn

from ..groups import Group, Groups
from .checks import in_words
from .defects import imbalance
from .judge import Finding, row_sums
from .structure import UNKNOWN
from .survey import Survey
from .verify import Verified

__all__ = ["assemble"]

_DOMINATED = 0.1


def assemble(survey: Survey, verified: Verified) -> Groups:
    """The answer of `find_groups`."""
    prober = survey.prober
    params = dict(prober.model.named_parameters())
    order = {name: i for i, name in enumerate(params)}
    groups = Groups(params, passes=(prober.forwards, prober.backwards))
    groups.groups = sorted((_group(survey, f, verified) for f in verified.rows), key=lambda g: order[g.names[0]])
    groups.facts = [_group(survey, f, verified) for f in verified.facts]
    groups.no_effect = list(verified.no_effect)
    groups.frozen = [name for name, p in params.items() if not p.requires_grad]
    groups.partial = {name: text for name, text in verified.partial.items() if name in groups.rest}
    groups.aliases = _aliases(prober.model)
    groups.details = {name: _details(survey, verified, name) for name in prober.trainable}
    groups.notes = _notes(survey, verified)
    return groups


def _group(survey: Survey, finding: Finding, verified: Verified) -> Group:
    sums, floor = _sums(survey, finding)
    seen = sums[1].sqrt() > 10 * floor
    cosine = sums[0].abs() / (sums[2] * sums[3]).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    size = sum(math.prod(survey.shape(name)) for name in finding.names) // finding.rows
    reasons = [verified.reasons.get(name, UNKNOWN) for name in finding.names]
    return Group(
        names=finding.names,
        layout=finding.layout,
        rows=finding.rows,
        size=size,
        reason=next((reason for reason in reasons if not reason.startswith(UNKNOWN)), reasons[0]),
        defect=float(cosine[seen].max()) if bool(seen.any()) else 0.0,
        unseen=_unseen(survey, finding),
        small=int((seen & (imbalance(sums, floor) > _DOMINATED) | (sums[3] == 0)).sum()),
    )


def _sums(survey: Survey, finding: Finding) -> tuple[Tensor, float]:
    """The sums per row at the model's own point, or at a random one where its own says nothing."""
    for reading in (survey.own, *survey.near):
        sums, floor = row_sums(survey, reading, finding)
        if bool((sums[1].sqrt() > 10 * floor).any()):
            break
    return sums, floor


def _unseen(survey: Survey, finding: Finding) -> int:
    seen = [
        sums[1].sqrt() > 10 * floor for sums, floor in (row_sums(survey, reading, finding) for reading in survey.near)
    ]
    return int((~torch.stack(seen).any(0)).sum())


def _details(survey: Survey, verified: Verified, name: str) -> str:
    if name in verified.no_effect:
        return verified.no_effect[name]
    if any(name in finding.names for finding in verified.rejected):
        return "⟨∇L, x⟩ vanishes, but the outputs moved when the rows were scaled, so nothing is proved"
    if any(name in finding.names for finding in verified.curved):
        return "⟨∇L, x⟩ nearly vanishes, but through a curved activation: no normalization explains it"
    if survey.grew(name) and not all(reading.slope(name) for reading in survey.far_readings()):
        return "balanced where a probe reached it, but none did after growing 1024-fold, so nothing is proved"
    near = max(survey.balance(reading, name) for reading in survey.near)
    text = f"|Σ g·x| / √Σ(g·x)² of the whole tensor up to {near:.1e} at random points"
    if survey.far and survey.grew(name):
        text += f", {survey.balance(survey.far[-1].reading, name):.1e} after growing 1024-fold"
    return text


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases.setdefault(first[id(parameter)], []).append(name)
    return aliases


def _notes(survey: Survey, verified: Verified) -> list[str]:
    prober, notes = survey.prober, list(survey.prober.remarks)
    if not prober.model.training:
        notes.append(
            "the model was handed over in eval mode and probed in training mode; with the running statistics of "
            "eval mode, rows under batch normalization are not invariant"
        )
    if prober.precision.dtype != torch.float64:
        types = "float32" if prober.precision.dtype is not None else "its own types"
        notes.append(f"the model does not run in float64, so it was probed in {types} with wider tolerances")
    if prober.precision.dtype is None and any(p.dtype.itemsize < 4 for p in prober.parameters.values()):
        notes.append("half precision tells invariance up to some percent: what is nearly invariant counts as rows here")
    if complex_ones := [name for name in prober.trainable if prober.parameters[name].is_complex()]:
        notes.append(
            "complex parameters are left to the rest, since rows are real vectors; a real parameter that forward takes "
            f"through torch.view_as_complex has rows: {', '.join(complex_ones)}"
        )
    raised = f"raised {in_words(prober.raised)}" if prober.raised is not None else ""
    if not survey.far:
        notes.append(f"the model {raised or 'gave no finite result'} with grown parameters, so nothing is proved")
    elif raised and verified.rejected:
        notes.append(f"the model {raised} in one of the passes")
    rejected = [", ".join(finding.names) for finding in (*verified.rejected, *verified.curved)]
    return [*notes, *(f"balanced but not proved, left to the rest: {names}" for names in rejected)]

"""Why rows are invariant, and what to tell the user about every parameter."""

from dataclasses import replace

import torch

from steradian.discovery.invariance import is_matrix
from steradian.discovery.judge import Verdict
from steradian.discovery.measurements import Measurements
from steradian.groups import Group, Groups, Pair, bare
from steradian.names import fold


def assemble(measured: Measurements, verdict: Verdict, pairs: list[Pair]) -> Groups:
    """The result of `find_groups`."""
    prober, params = measured.prober, measured.prober.parameters
    groups = Groups(params, pairs=pairs, partial=verdict.partial, passes=(prober.forwards, prober.backwards))
    rows = [replace(group, reason=_reason(measured, group)) for group in verdict.rows]
    groups.facts = [replace(group, reason=_reason(measured, group)) for group in verdict.facts]
    groups.groups = sorted(rows, key=lambda group: list(params).index(group.names[0]))
    groups.no_effect = list(verdict.no_effect)
    groups.frozen = [name for name, p in params.items() if not p.requires_grad]
    first = {id(parameter): name for name, parameter in params.items()}
    for name, parameter in prober.model.named_parameters(remove_duplicate=False):
        if bare(name) != first[id(parameter)]:
            groups.aliases.setdefault(first[id(parameter)], []).append(bare(name))
    groups.details = {name: _details(measured, verdict, name) for name in prober.trainable}
    groups.notes = _notes(measured, verdict)
    return groups


def _reason(measured: Measurements, group: Group) -> str:
    """The nearest modules that every path passes and in which a change of the rows' scale disappears, by the graph."""
    graph, path = measured.graph_of(group.names), measured.path(group.names)
    ends: dict[str, list[int]] = {}  # the nodes in which the change disappears, by innermost module
    for number in sorted(path.ends, key=lambda number: graph.nodes[number].sequence) if path.traced else ():
        around = graph.calls_around(graph.nodes[number].sequence)
        ends.setdefault(str(around[0]) if around and around[0].name else "", []).append(number)
    for module in list(ends):
        others = [number for other in ends if other != module for number in ends[other]]
        if graph.all_paths_pass(group.names, others):
            del ends[module]
    if not ends or "" in ends:
        return "unknown"
    own = graph.calls_around(min(graph.first_use(name) for name in group.names))
    # A module that contains the layer of the rows and much else is not a normalization.
    inside = any(call.composite and str(call) in ends for call in own)
    return f"unknown, inside {' and '.join(ends)}" if inside else " and ".join(ends)


def _details(measured: Measurements, verdict: Verdict, name: str) -> str:
    if name in verdict.no_effect:
        return verdict.no_effect[name]
    if name in measured.prober.captured:
        return "not tested: forward also uses it where a probe cannot change it"
    if rejected := [group for group in verdict.rejected if name in group.names]:
        why = "the outputs moved when the rows were scaled"
        if not verdict.deterministic:
            why = "the outputs moved when a pass was repeated: forward is not deterministic"
        elif not any(group in verdict.refuted for group in rejected):
            why += " together with others, and no pass was left to scale them alone"
        return f"⟨∇L, x⟩ vanishes, but {why}, so nothing is proved"
    if any(name in group.names for group in verdict.nonlinear):
        return "⟨∇L, x⟩ nearly vanishes, but through a nonlinear activation: no normalization explains it"
    growing = name in measured.growing
    if growing and not all(reading.slope[name] for reading in measured.grown):
        return "balanced where a probe reached it, but none did after growing 1024-fold, so nothing is proved"
    largest = max(measured.imbalance(reading, name) for reading in measured.random)
    text = f"|Σ g·x| / √Σ(g·x)² of the whole tensor up to {largest:.1e} at random points"
    if growing and measured.grown:
        text += f", {measured.imbalance(measured.grown[-1], name):.1e} after growing 1024-fold"
    return text


def _notes(measured: Measurements, verdict: Verdict) -> list[str]:
    prober, notes = measured.prober, list(measured.prober.remarks)
    if not prober.model.training:
        notes.append(
            "the model is in eval mode and was probed in training mode; with the running statistics of "
            "eval mode, rows under batch normalization are not invariant"
        )
    if prober.precision.dtype != torch.float64:
        types = "float32" if prober.precision.dtype is not None else "its own types"
        notes.append(f"the model does not run in float64, so it was probed in {types} with wider tolerances")
    if prober.precision.dtype is None and any(p.dtype.itemsize < 4 for p in prober.parameters.values()):
        notes.append("half precision shows invariance up to a few percent: nearly invariant rows count as rows here")
    if complex_ones := [name for name in prober.trainable if prober.parameters[name].is_complex()]:
        notes.append(
            "complex parameters are left to the rest, since rows are real vectors; a real parameter that forward "
            f"converts with torch.view_as_complex can have rows: {', '.join(complex_ones)}"
        )
    raised = f"raised {in_words(prober.raised)}" if prober.raised is not None else ""
    if not measured.grown:
        notes.append(f"the model {raised or 'gave no finite result'} with grown parameters, so nothing is proved")
    elif raised and verdict.rejected:
        notes.append(f"the model {raised} in one of the passes")
    if not verdict.deterministic:
        notes.append("forward is not deterministic: outputs moved when a pass was repeated, so they prove nothing")
    if captured := [name for name in prober.parameters if name in prober.captured]:
        names = ", ".join(text for text, _ in fold(captured))
        notes.append(f"nothing is proved about parameters that share memory or that a function holds: {names}")
    if unproved := [" + ".join(group.names) for group in (*verdict.rejected, *verdict.nonlinear)]:
        notes.append(f"balanced but not proved, left to the rest: {', '.join(text for text, _ in fold(unproved))}")
    return notes + _idle_parts(measured)


def _idle_parts(measured: Measurements) -> list[str]:
    """A note on weights, and on experts that are slices of one, that some pass did not reach: a larger batch may."""
    idle: dict[str, str] = {}  # which part of each name
    for name in measured.prober.probed:
        shape = measured.shapes[name]
        if len(shape) == 3 and shape[0] > 1:
            passes = [*measured.random, *measured.grown]
            slices = max(int((reading.tables[name][0,][2] == 0).sum()) for reading in passes)
            idle |= {name: f"{slices} of {shape[0]} slices of "} if slices else {}
        elif is_matrix(shape) and not all(reading.slope[name] for reading in measured.random):
            idle[name] = ""
    if not idle:
        return []
    parts = list(idle.values())
    texts = [f"{parts[members[0]]}{name}" for name, members in fold(list(idle), parts)]
    return [
        "what is found depends on the batch: in some passes or all no gradient reached these parts, as an expert that "
        f"gets no token; a larger batch may prove more: {', '.join(texts)}"
    ]


def in_words(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__} ({(str(error).strip().splitlines() or ['no message'])[0]})"

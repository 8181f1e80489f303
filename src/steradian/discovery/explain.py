"""Why rows are invariant, and what to tell the user about every parameter.

The reason is the layer in which a change of scale goes in and does not come out. No list of layers is consulted:
while the rows are scaled by random factors, every module call is compared with the same call before. A module whose
input changed and whose output did not makes rows invariant, and the autograd graph leads from a parameter to the
nearest such module.
"""

import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steradian.discovery.graph import Graph, read_graph
from steradian.discovery.sandbox import floating, tensors_in
from steradian.groups import Groups

if TYPE_CHECKING:
    from steradian.discovery.judge import Verdict
    from steradian.discovery.measurements import Measurements


UNKNOWN = "no known layer"

Fingerprint = tuple[float, float]
"""Norm and sum of a tensor, the sum divided by the root of the number of entries."""


# What the modules did in one pass


@dataclass
class Call:
    """One call of a module: its place in the module tree and in the graph, and fingerprints of its tensors."""

    name: str
    kind: str
    count: int
    parent: int | None
    composite: bool
    start: int
    end: int = -1
    inputs: list[Fingerprint] = field(default_factory=list)
    outputs: list[Fingerprint] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the same call in another pass."""
        return self.name, self.count

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


class Trace:
    """Records the calls of all modules in one forward pass, and, if asked, the autograd graph behind the outputs.

    Each tensor gets one fingerprint: the output of one module is the input of the next, and of the one around it.
    They are read after the pass, because reading a value waits for the GPU.
    """

    def __init__(self, *, graph: bool = False) -> None:
        self._wants_graph = graph
        self.calls: list[Call] = []
        self.graph = Graph([])
        self._open: list[int] = []
        self._counts: dict[str, int] = {}
        self._innermost: dict[int, int | None] = {}
        self._fingerprints: list[Tensor] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._to_read: list[tuple[list[Fingerprint], list[int]]] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hooks for one forward pass."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        parent = self._open[-1] if self._open else None
        composite = not name or any(True for _ in module.children())
        kind = type(module).__name__.removeprefix("Parametrized")
        call = Call(name, kind, count, parent, composite, torch._C._autograd._get_sequence_nr())
        self._take((args, kwargs), call.inputs)
        self._open.append(len(self.calls))
        self.calls.append(call)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._open:
            call = self.calls[self._open.pop()]
            call.end = torch._C._autograd._get_sequence_nr()
            self._take(output, call.outputs)

    @torch.no_grad()
    def _take(self, value: Any, to: list[Fingerprint]) -> None:
        """Compute the fingerprints of the tensors in a value, to be read into a list."""
        numbers = []
        with torch._C.DisableTorchFunction():  # the sandbox's dtype conversion is not needed here
            for tensor in tensors_in(value):
                if floating(tensor) and tensor.numel():
                    known = self._known.get(id(tensor))
                    if known is None or known[0]() is not tensor or known[1] != tensor._version:
                        known = weakref.ref(tensor), tensor._version, len(self._fingerprints)
                        self._known[id(tensor)] = known
                        self._fingerprints.append(_fingerprint(tensor))
                    numbers.append(known[2])
        self._to_read.append((to, numbers))

    def finish(self, outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> None:
        """Keep the graph and read the fingerprints."""
        if self._wants_graph:
            self.graph = read_graph(outputs, leaves)
        values: dict[int, Fingerprint] = {}
        for device in {t.device for t in self._fingerprints}:
            here = [i for i, t in enumerate(self._fingerprints) if t.device == device]
            values |= zip(here, map(tuple, torch.stack([self._fingerprints[i] for i in here]).tolist()), strict=True)
        for to, numbers in self._to_read:
            to.extend(values[i] for i in numbers)
        self._fingerprints, self._known, self._to_read = [], {}, []

    def calls_around(self, node: int) -> list[int]:
        """The innermost call during which a node of the graph was made and those around it, from the inside out."""
        sequence = self.graph.sequence[node]
        if sequence not in self._innermost:
            inside = [i for i, call in enumerate(self.calls) if call.start <= sequence < call.end]
            self._innermost[sequence] = inside[-1] if inside else None
        chain, call = [], self._innermost[sequence]
        while call is not None:
            chain.append(call)
            call = self.calls[call].parent
        return chain


def _fingerprint(tensor: Tensor) -> Tensor:
    """NaN where it cannot be computed: observing must not make a pass fail."""
    try:
        # Inside `torch.func.vmap` and `grad`, the wrapped tensor outlives the transformation.
        flat = _without_functorch(tensor).detach()
        flat = torch.nan_to_num(flat.abs() if flat.is_complex() else flat).flatten().double()
        return _without_functorch(torch.stack([torch.linalg.vector_norm(flat), flat.sum() / flat.numel() ** 0.5]))
    except RuntimeError:  # sparse and nested tensors support few operations
        return torch.full((2,), torch.nan, dtype=torch.float64, device=tensor.device)


def _without_functorch(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# The layer that explains an invariance


class Reasons:
    """Which calls let a change of scale in and not out, over several comparisons."""

    def __init__(self) -> None:
        self._absorbing: set[tuple[str, int]] = set()
        self._unchanged: set[tuple[str, int]] = set()

    def compare(self, before: Trace, after: Trace, *, same: float) -> None:
        """Learn from one point and the same with rows rescaled; a relative change up to `same` is none."""
        earlier = {call.key: call for call in before.calls}
        self._unchanged = set()
        for call in after.calls:
            if call.key in earlier and _difference(earlier[call.key].outputs, call.outputs) <= same:
                self._unchanged.add(call.key)
                if _difference(earlier[call.key].inputs, call.inputs) > 10 * same:
                    self._absorbing.add(call.key)

    def explain(self, trace: Trace, name: str) -> str:
        """The module that makes a parameter invariant which was rescaled in the last comparison.

        Args:
            trace: one with a graph that leads from parameters to modules.
            name: the parameter.
        """
        graph = trace.graph
        if name not in graph.leaf_nodes:
            return UNKNOWN
        leaf = graph.leaf_nodes[name]
        first = min(graph.consumers[leaf], key=lambda node: graph.sequence[node], default=None)
        own = trace.calls_around(first) if first is not None else []
        for i in (i for node in _downstream(graph, leaf) for i in trace.calls_around(node)):
            call = trace.calls[i]
            # The module that owns the parameter explains it only if its own output does not change.
            may_explain = i not in own or (call.key in self._unchanged and not call.composite)
            if may_explain and call.name and call.key in self._absorbing:
                return str(call)
        enclosing = next((trace.calls[i] for i in own if trace.calls[i].key in self._unchanged), None)
        if enclosing is None or not enclosing.name:
            return UNKNOWN
        return f"{UNKNOWN}, inside {enclosing}" if enclosing.composite else str(enclosing)


def _difference(before: list[Fingerprint], after: list[Fingerprint]) -> float:
    """Largest relative change; NaN if there is a tensor without a fingerprint, of which nothing is known."""
    if len(before) != len(after):
        return float("inf")
    changes = [
        max(abs(x - y) for x, y in zip(a, b, strict=True)) / (a[0] + sys.float_info.min)
        for a, b in zip(before, after, strict=True)
    ]
    return math.nan if any(map(math.isnan, changes)) else max(changes, default=0.0)


def _downstream(graph: Graph, leaf: int) -> Iterator[int]:
    """Nodes behind a parameter, nearest first."""
    visited, front = {leaf}, [leaf]
    while front:
        reached = sorted({c for node in front for c in graph.consumers[node]} - visited, key=graph.sequence.__getitem__)
        yield from reached
        visited.update(reached)
        front = reached


# What the user is told


def assemble(measured: "Measurements", verdict: "Verdict") -> Groups:
    """The result of `find_groups`."""
    prober = measured.prober
    params = dict(prober.model.named_parameters())
    order = {name: i for i, name in enumerate(params)}
    groups = Groups(params, passes=(prober.forwards, prober.backwards))
    groups.groups = sorted(verdict.rows, key=lambda group: order[group.names[0]])
    groups.facts = verdict.facts
    groups.no_effect = list(verdict.no_effect)
    groups.frozen = [name for name, p in params.items() if not p.requires_grad]
    groups.partial = {name: text for name, text in verdict.partial.items() if name in groups.rest}
    groups.aliases = _aliases(prober.model)
    groups.details = {name: _details(measured, verdict, name) for name in prober.trainable}
    groups.notes = _notes(measured, verdict)
    return groups


def _details(measured: "Measurements", verdict: "Verdict", name: str) -> str:
    if name in verdict.no_effect:
        return verdict.no_effect[name]
    if any(name in group.names for group in verdict.rejected):
        return "⟨∇L, x⟩ vanishes, but the outputs moved when the rows were scaled, so nothing is proved"
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


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Further names of tied parameters, by first name."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases.setdefault(first[id(parameter)], []).append(name)
    return aliases


def _notes(measured: "Measurements", verdict: "Verdict") -> list[str]:
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
    unproved = [", ".join(group.names) for group in (*verdict.rejected, *verdict.nonlinear)]
    return [*notes, *(f"balanced but not proved, left to the rest: {names}" for names in unproved)]


def in_words(error: Exception) -> str:
    """An exception in one line.

    >>> in_words(KeyError("x"))
    "KeyError ('x')"
    """
    return f"{type(error).__name__} ({(str(error).strip().splitlines() or ['no message'])[0]})"

"""Names the layer that explains an invariance: where a change of scale goes in and does not come out.

No list of layers is consulted. While the rows grow by random factors, every module call is compared with the
same call before: a module whose input changed and whose output did not is what makes the rows invariant. The
autograd graph then leads from a parameter to the nearest such module.
"""

import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .graph import Graph, read_graph
from .values import floating, tensors_in

__all__ = ["UNKNOWN", "Absorbers", "Trace"]

UNKNOWN = "no known layer"

Fingerprint = tuple[float, float]
"""Norm and sum of a tensor, the sum divided by the root of the number of entries."""


@dataclass
class Call:
    """One call of a module: its place in the nest and in the graph, and fingerprints of what went in and out."""

    name: str
    kind: str
    count: int
    parent: int | None
    composite: bool
    start: int
    end: int = -1
    went_in: list[int] = field(default_factory=list)
    came_out: list[int] = field(default_factory=list)
    inputs: list[Fingerprint] = field(default_factory=list)
    outputs: list[Fingerprint] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """The same call in another pass."""
        return self.name, self.count

    def label(self) -> str:
        """For people."""
        return f"{self.name} ({self.kind})"


class Trace:
    """Records the calls of all modules in one forward pass, and, if asked, the autograd graph behind the outputs."""

    def __init__(self, *, graph: bool = False) -> None:
        self._wants_graph = graph
        self.calls: list[Call] = []
        self.graph: Graph | None = None
        self._open: list[int] = []
        self._counts: dict[str, int] = {}
        self._innermost: dict[int, int | None] = {}
        self._prints = _Prints()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hooks for one forward pass. They are gone afterwards with everything else that the probe added."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> None:
        """Keep the graph and read the fingerprints."""
        if self._wants_graph:
            self.graph = read_graph(outputs, leaves)
        values = self._prints.read()
        for call in self.calls:
            call.inputs = [values[i] for i in call.went_in]
            call.outputs = [values[i] for i in call.came_out]

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            parent = self._open[-1] if self._open else None
            composite = not name or any(True for _ in module.children())
            call = Call(name, _kind(module), count, parent, composite, torch._C._autograd._get_sequence_nr())
            call.went_in = self._prints.take((args, kwargs))
            self._open.append(len(self.calls))
            self.calls.append(call)

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._open:
            call = self.calls[self._open.pop()]
            call.end = torch._C._autograd._get_sequence_nr()
            call.came_out = self._prints.take(output)

    def innermost(self, sequence: int) -> int | None:
        """The innermost call during which a node of the graph was made."""
        if sequence not in self._innermost:
            inside = [i for i, call in enumerate(self.calls) if call.start <= sequence < call.end]
            self._innermost[sequence] = inside[-1] if inside else None
        return self._innermost[sequence]

    def chain(self, call: int | None) -> list[int]:
        """A call and those around it, from the inside out."""
        chain = []
        while call is not None:
            chain.append(call)
            call = self.calls[call].parent
        return chain


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("Parametrized")


class _Prints:
    """Fingerprints of the tensors of one pass, each taken once and all read at the end.

    The output of one module is the input of the next, and of the one around it. On a GPU, reading a value waits
    for it, so that is left for when the pass is over.
    """

    def __init__(self) -> None:
        self._taken: list[Tensor] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    @torch.no_grad()
    def take(self, value: Any) -> list[int]:
        """The numbers under which the fingerprints of the tensors in a value will be found."""
        return [self._number(t) for t in tensors_in(value) if floating(t) and t.numel()]

    def _number(self, tensor: Tensor) -> int:
        known = self._known.get(id(tensor))
        version = tensor._version
        if known is None or known[0]() is not tensor or known[1] != version:
            known = weakref.ref(tensor), version, len(self._taken)
            self._known[id(tensor)] = known
            self._taken.append(_fingerprint(tensor))
        return known[2]

    def read(self) -> list[Fingerprint]:
        """All fingerprints, by number."""
        values: list[Fingerprint] = [(0.0, 0.0)] * len(self._taken)
        for device in {t.device for t in self._taken}:
            here = [i for i, t in enumerate(self._taken) if t.device == device]
            for i, (norm, total) in zip(here, torch.stack([self._taken[i] for i in here]).tolist(), strict=True):
                values[i] = norm, total
        self._taken, self._known = [], {}
        return values


def _fingerprint(tensor: Tensor) -> Tensor:
    """Not numbers where there is none: a look must not be what a pass fails at."""
    try:
        # Inside `torch.func.vmap` and `grad`, what lies beneath outlives the transformation.
        flat = _beneath(tensor).detach()
        flat = torch.nan_to_num(flat.abs() if flat.is_complex() else flat).flatten().double()
        return _beneath(torch.stack([torch.linalg.vector_norm(flat), flat.sum() / flat.numel() ** 0.5]))
    except RuntimeError:  # sparse and nested tensors know few operations
        return torch.full((2,), torch.nan, dtype=torch.float64, device=tensor.device)


def _beneath(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _difference(before: list[Fingerprint], after: list[Fingerprint]) -> float:
    if len(before) != len(after):
        return float("inf")
    changes = [_relative(a, b) for a, b in zip(before, after, strict=True)]
    # Of what has no fingerprint nobody can say that it changed, nor that it did not.
    return math.nan if any(map(math.isnan, changes)) else max(changes, default=0.0)


def _relative(before: Fingerprint, after: Fingerprint) -> float:
    change = max(abs(a - b) for a, b in zip(before, after, strict=True))
    return change / (before[0] + sys.float_info.min)


class Absorbers:
    """Which calls let a change of scale in and not out, over several comparisons."""

    def __init__(self) -> None:
        self.known: set[tuple[str, int]] = set()
        self.still: set[tuple[str, int]] = set()

    def compare(self, before: Trace, after: Trace, *, same: float) -> None:
        """Learn from one point and the same with rows rescaled; a relative change up to `same` is none."""
        earlier = {call.key: call for call in before.calls}
        self.still = set()
        for call in after.calls:
            if call.key in earlier and _difference(earlier[call.key].outputs, call.outputs) <= same:
                self.still.add(call.key)
                if _difference(earlier[call.key].inputs, call.inputs) > 10 * same:
                    self.known.add(call.key)

    def explain(self, trace: Trace, name: str) -> str:
        """The module that makes a parameter invariant which was rescaled in the last comparison.

        Args:
            trace: one with a graph that leads from parameters to modules.
            name: the parameter.
        """
        graph = trace.graph
        leaf = graph.leaf_node(name) if graph is not None else None
        if graph is None or leaf is None:
            return UNKNOWN
        first = min(graph.consumers[leaf], key=lambda node: graph.sequence[node], default=None)
        around = trace.chain(trace.innermost(graph.sequence[first])) if first is not None else []
        for node in _downstream(graph, leaf):
            for i in trace.chain(trace.innermost(graph.sequence[node])):
                if self._explains(trace.calls[i], own=i in around):
                    return trace.calls[i].label()
        enclosing = next((trace.calls[i] for i in around if trace.calls[i].key in self.still), None)
        if enclosing is None or not enclosing.name:
            return UNKNOWN
        return f"{UNKNOWN}, inside {enclosing.label()}" if enclosing.composite else enclosing.label()

    def _explains(self, call: Call, *, own: bool) -> bool:
        if call.key not in self.known or not call.name:
            return False
        # The module that owns the parameter explains it only if its own output stands still.
        return not own or (call.key in self.still and not call.composite)


def _downstream(graph: Graph, leaf: int) -> Iterator[int]:
    """Nodes behind a parameter, nearest first."""
    seen, front = {leaf}, [leaf]
    while front:
        reached = sorted({c for node in front for c in graph.consumers[node]} - seen, key=graph.sequence.__getitem__)
        yield from reached
        seen.update(reached)
        front = reached

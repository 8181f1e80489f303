"""Names the layer that explains an invariance: where a change of scale goes in and does not come out.

No list of layers is consulted. While the rows grow by random factors, every module call is compared with the
same call before: a module whose input changed and whose output did not is what makes the rows invariant. The
autograd graph then leads from a parameter to the nearest such module.
"""

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
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """The same call in another pass."""
        return self.name, self.count

    def label(self) -> str:
        """For people."""
        return f"{self.name} ({self.kind})"


class Trace:
    """Records the calls of all modules in one forward pass, and the autograd graph behind the outputs."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.graph: Graph | None = None
        self._open: list[int] = []
        self._counts: dict[str, int] = {}
        self._innermost: dict[int, int | None] = {}

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
        """Keep the graph."""
        self.graph = read_graph(outputs, leaves)

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            parent = self._open[-1] if self._open else None
            composite = not name or any(True for _ in module.children())
            call = Call(name, _kind(module), count, parent, composite, torch._C._autograd._get_sequence_nr())
            call.inputs = _fingerprints((args, kwargs))
            self._open.append(len(self.calls))
            self.calls.append(call)

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._open:
            call = self.calls[self._open.pop()]
            call.end = torch._C._autograd._get_sequence_nr()
            call.outputs = _fingerprints(output)

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


@torch.no_grad()
def _fingerprints(value: Any) -> list[Tensor]:
    prints = []
    for tensor in tensors_in(value):
        if floating(tensor) and tensor.numel():
            flat = (
                torch.nan_to_num(tensor.detach().abs() if tensor.is_complex() else tensor.detach()).flatten().double()
            )
            prints.append(torch.stack([flat.norm(), flat.sum() / flat.numel() ** 0.5]).cpu())
    return prints


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    if len(before) != len(after):
        return float("inf")
    tiny = torch.finfo(torch.float64).tiny
    return max(
        (float((a - b).abs().max() / (a[0].abs() + tiny)) for a, b in zip(before, after, strict=True)), default=0
    )


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

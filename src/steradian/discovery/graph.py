"""What the autograd graph says about which parameters must grow together.

For a tensor h inside the model, some set of parameters makes h grow with it: everything that writes to h. If
h is normalized, that set is jointly invariant. Nothing here knows what is normalized: every tensor of the graph
proposes its set, and the null space of the measured inner products decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

__all__ = ["Graph", "Proposals", "graph_nodes", "members", "propose", "read_graph"]

Mask = int
"""A set of parameters, one bit each, in the order of `Graph.names`."""


@dataclass
class Proposals:
    """What the graph says about sets.

    Attributes:
        sets: sets that may be jointly invariant.
        through: per parameter, those that it multiplies: a weight acts on everything upstream of it.
    """

    sets: set[Mask] = field(default_factory=set)
    through: dict[int, Mask] = field(default_factory=dict)

    def parallel(self, mask: Mask) -> bool:
        """Whether no member acts through another: weight and bias, two embeddings, not a residual stream.

        A recurrent weight acts through itself and so through everything beside it; that does not count.
        """
        return not any(
            mask >> bit & 1 and through & mask and not through >> bit & 1 for bit, through in self.through.items()
        )


_SUMS = ("add", "sub", "cat", "stack")
# fmt: off
_CURVED = {
    "softmax", "logsoftmax", "sigmoid", "logsigmoid", "tanh", "gelu", "silu", "exp", "expm1", "log", "log1p",
    "log2", "softplus", "elu", "erf", "sin", "cos", "tan", "atan", "hardtanh", "hardswish", "hardsigmoid",
    "pow", "sqrt", "rsqrt", "reciprocal", "clamp", "clampmin", "clampmax", "mish",
}
# fmt: on
_PRODUCTS = (
    "mul",
    "mm",
    "bmm",
    "mv",
    "matmul",
    "addmm",
    "baddbmm",
    "addmv",
    "convolution",
    "linear",
    "dot",
    "bilinear",
    "groupedmm",
)
_NORMS = (
    "nativelayernorm",
    "nativebatchnorm",
    "cudnnbatchnorm",
    "miopenbatchnorm",
    "nativegroupnorm",
    "fusedrmsnorm",
)


@dataclass
class Graph:
    """The autograd graph, inputs before consumers.

    Attributes:
        names: parameters by bit.
        operations: lower-case name of each node, without "backward".
        inputs: per node, the nodes that it reads; None for a constant.
        consumers: per node, the nodes that read it.
        leaf: per node, the bit of its parameter, or None.
        sequence: per node, its place in the forward pass.
        exponent: per node, the exponent of a power, else 1.
    """

    names: list[str]
    operations: list[str] = field(default_factory=list)
    inputs: list[list[int | None]] = field(default_factory=list)
    consumers: list[list[int]] = field(default_factory=list)
    leaf: list[int | None] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    exponent: list[float] = field(default_factory=list)

    def leaf_node(self, name: str) -> int | None:
        """The node of a parameter, None where no output depends on it."""
        return self._leaf_nodes.get(name)

    @cached_property
    def _leaf_nodes(self) -> dict[str, int]:
        # The first node of a parameter, should it have several.
        return {self.names[leaf]: node for node, leaf in reversed([*enumerate(self.leaf)]) if leaf is not None}

    def order_of_use(self) -> list[str]:
        """The parameters that outputs depend on, by their first use in the forward pass."""
        first = {
            self.names[leaf]: min(self.sequence[consumer] for consumer in self.consumers[node])
            for node, leaf in enumerate(self.leaf)
            if leaf is not None and self.consumers[node]
        }
        return sorted(first, key=first.__getitem__)


def read_graph(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> Graph:
    """The graph behind some outputs."""
    names = list(leaves)
    bits = {id(leaf): bit for bit, leaf in enumerate(leaves.values())}
    graph, index = Graph(names), {}
    nodes = graph_nodes(outputs)
    for number, node in enumerate(nodes):
        index[node] = number
        reads = [None if source is None else index[source] for source, _ in node.next_functions]
        graph.inputs.append(reads)
        graph.consumers.append([])
        for source in {r for r in reads if r is not None}:
            graph.consumers[source].append(number)
        variable = getattr(node, "variable", None)
        graph.leaf.append(bits.get(id(variable)) if variable is not None else None)
        graph.operations.append(_operation(node))
        graph.sequence.append(node._sequence_nr() if variable is None else -1)
        exponent = getattr(node, "_saved_exponent", None) if graph.operations[-1] == "pow" else None
        graph.exponent.append(float(exponent) if isinstance(exponent, int | float) else 1.0)
    return graph


def graph_nodes(outputs: Sequence[Tensor]) -> list[Any]:
    """All nodes behind some outputs, inputs before consumers."""
    nodes: dict[Any, None] = {}
    stack = [(t.grad_fn, False) for t in outputs if t.grad_fn is not None]
    while stack:
        node, expanded = stack.pop()
        if node in nodes:
            continue
        if expanded:
            nodes[node] = None
        else:
            stack.append((node, True))
            stack.extend((source, False) for source, _ in node.next_functions if source is not None)
    return list(nodes)


def _operation(node: Any) -> str:
    name = str(node.name()).rsplit("::", 1)[-1].lower()
    name = name.rstrip("0123456789").removesuffix("backward").replace("_", "")
    # At zero a threshold is ReLU; anywhere else it has a size of its own.
    return "relu" if name == "threshold" and getattr(node, "_saved_threshold", None) == 0 else name


def members(mask: Mask, names: Sequence[str]) -> tuple[str, ...]:
    """The parameters of a set."""
    found = []
    while mask:  # from one bit to the next: most sets are small, and there may be thousands of parameters
        lowest = mask & -mask
        found.append(names[lowest.bit_length() - 1])
        mask ^= lowest
    return tuple(found)


def propose(graph: Graph) -> Proposals:
    """For each tensor of the graph, the parameters that scale it when they grow together."""
    proposals = Proposals()
    scaling: list[Mask | None] = []
    reach: list[Mask] = []
    for node, leaf in enumerate(graph.leaf):
        reads = graph.inputs[node]
        if leaf is not None:
            reach.append(1 << leaf)
            scaling.append(1 << leaf)
            continue
        reach.append(_union(reach[r] for r in reads if r is not None))
        scaling.append(_scale_node(graph.operations[node], reads, scaling, reach, proposals.through))
        found = scaling[-1]
        if found is not None and found.bit_count() > 1:
            proposals.sets.add(found)
    return proposals


def _union(masks: Iterator[Mask]) -> Mask:
    total = 0
    for mask in masks:
        total |= mask
    return total


def _scale_node(
    operation: str, reads: list[int | None], scaling: list[Mask | None], reach: list[Mask], through: dict[int, Mask]
) -> Mask | None:
    """The parameters that scale this node's output, or None."""
    if operation in _CURVED:
        return None
    if operation in _NORMS:
        return _sum([r for r in reads[1:3] if r is not None], scaling)
    if operation.startswith("scaleddotproduct"):
        reads = reads[2:3]
    elif operation == "div":
        reads = reads[:1]
    elif operation in ("weightnorminterface", "weightnorm"):
        reads = reads[1:2]
    elif operation in _PRODUCTS:
        return _product(operation, reads, scaling, reach, through)
    if operation in _SUMS and None in reads:
        return None
    return _sum([r for r in reads if r is not None], scaling)


def _sum(reads: list[int], scaling: list[Mask | None]) -> Mask | None:
    """A sum is scaled when all its terms are."""
    masks = [scaling[r] for r in reads]
    known = [mask for mask in masks if mask is not None]
    return _union(iter(known)) if known and len(known) == len(masks) else None


def _product(
    operation: str, reads: list[int | None], scaling: list[Mask | None], reach: list[Mask], through: dict[int, Mask]
) -> Mask | None:
    """One factor scales a product: the one that depends on fewest parameters, normally a weight."""
    first = operation in ("addmm", "baddbmm", "addmv")
    factors, terms = (reads[1:], reads[:1]) if first else (reads[:2], reads[2:3])
    able = [r for r in factors if r is not None and scaling[r] is not None]
    if not able or (first and terms == [None]):
        return None
    chosen = min(able, key=lambda r: reach[r].bit_count())
    scaled = scaling[chosen]
    others = _union(reach[r] for r in factors if r is not None and r != chosen)
    if scaled is not None and scaled.bit_count() == 1:
        bit = scaled.bit_length() - 1
        through[bit] = through.get(bit, 0) | others
    return _sum([chosen, *(r for r in terms if r is not None)], scaling)

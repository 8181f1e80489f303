"""The autograd graph of a pass: which parameters may have to grow together, and what lies on their paths.

Two questions are answered from one table of operations. `propose`: for every tensor h of the model, which parameters
scale h when they grow together? If h is normalized, that set is jointly invariant; the graph does not know what is
normalized, so every tensor proposes its set, and the measured inner products decide. `meets_nonlinearity` and
`has_known_path`: where does the factor by which a set has grown go, before a normalization can remove it?
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

_KINDS = {
    # Not homogeneous: growing the input does not scale the output. Smooth activations become homogeneous as their
    # inputs grow (GELU, SiLU, Mish and softplus become ReLU), and what is left falls as a normalization's ε does.
    "nonlinear": """gelu silu mish elu celu softplus logsigmoid sigmoid tanh glu hardswish hardsigmoid hardtanh
        softshrink hardshrink threshold softmax logsoftmax logsumexp exp exp2 expm1 log log2 log10 log1p erf erfc
        sin cos tan asin acos atan sinh cosh asinh acosh atanh""",
    # Part of a normalization, of a polynomial, or of an activation with a threshold.
    "power": "pow sqrt rsqrt reciprocal clamp clampmin clampmax",
    # Homogeneous of degree 1 in all inputs together.
    "linear": """sum mean cumsum neg relu leakyrelu abs amax
        maxpool2dwithindices maxpool3dwithindices adaptivemaxpool2d adaptivemaxpool3d
        avgpool2d avgpool3d adaptiveavgpool2d adaptiveavgpool3d
        nativedropout fuseddropout embedding index indexselect gather
        view unsafeview reshapealias t transpose permute expand clone tocopy alias
        squeeze unsqueeze select slice split splitwithsizes unbind repeat
        roll flip diagonal tril triu asstrided pixelshuffle pixelunshuffle im2col col2im
        constantpadnd reflectionpad1d reflectionpad2d replicationpad1d replicationpad2d
        upsamplenearest1d upsamplenearest2d upsamplebilinear2d upsamplebicubic2d""",
    "sum": "add sub rsub",
    "concatenation": "cat stack",
    # Entries come from one input or another, or the inputs play different roles.
    "mixture": "max prelukernel rreluwithnoise trilinear lerp",
    "choice": "where maskedfill",
    # The first two inputs are multiplied, and the others added.
    "product": """mul mm bmm mv dot matmul groupedmm
        convolution mkldnnconvolution cudnnconvolution linear mkldnnlinear""",
    # The second and the third input are multiplied, and the first added.
    "sum of products": "addmm addbmm baddbmm addmv addcmul",
    "division": "div",
    # Lengths and sorted parts, which normalizations are made of.
    "length": "var std varmean stdmean linalgvectornorm norm sort topk scatteradd indexadd",
    "weight norm": "weightnorminterface weightnorm",
    # They remove the scale of the first input and give that of the gain and the bias, which come next.
    "normalization": "nativelayernorm nativebatchnorm cudnnbatchnorm miopenbatchnorm nativegroupnorm fusedrmsnorm",
}
_KIND = {operation: kind for kind, operations in _KINDS.items() for operation in operations.split()}

_HOMOGENEOUS = {"linear", "sum", "concatenation", "mixture", "choice", "product", "sum of products"}
"""Kinds whose output grows by a power of the factor when their inputs do. Any other, and any operation that is not in
the table, may be part of a normalization: nothing is known about the factor behind it."""
_KNOWN = (_HOMOGENEOUS - {"choice"}) | {"division", "length", "weight norm", "normalization"}
"""Kinds that a factor may meet without meeting a nonlinearity. A choice or a power may be part of one."""

Mask = int
"""A set of parameters, one bit each, in the order of `Graph.names`."""


@dataclass
class Graph:
    """The autograd graph, inputs before consumers.

    Attributes:
        names: parameters by bit.
        operations: lower-case name of each node, without "backward".
        kinds: kind of each node's operation, "" if it is not in the table.
        inputs: per node, the nodes that it reads; None for a constant.
        consumers: per node, the nodes that read it.
        leaf: per node, the bit of its parameter, or None.
        sequence: per node, its place in the forward pass.
        exponent: per node, the exponent of a power, else 1.
    """

    names: list[str]
    operations: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    inputs: list[list[int | None]] = field(default_factory=list)
    consumers: list[list[int]] = field(default_factory=list)
    leaf: list[int | None] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    exponent: list[float] = field(default_factory=list)

    @cached_property
    def leaf_nodes(self) -> dict[str, int]:
        """The first node of each parameter that an output depends on."""
        return {self.names[leaf]: node for node, leaf in reversed([*enumerate(self.leaf)]) if leaf is not None}

    @cached_property
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
    for number, node in enumerate(graph_nodes(outputs)):
        index[node] = number
        reads = [None if source is None else index[source] for source, _ in node.next_functions]
        graph.inputs.append(reads)
        graph.consumers.append([])
        for source in {r for r in reads if r is not None}:
            graph.consumers[source].append(number)
        variable = getattr(node, "variable", None)
        graph.leaf.append(bits.get(id(variable)) if variable is not None else None)
        operation = _operation(node)
        graph.operations.append(operation)
        graph.kinds.append(_KIND.get(operation, ""))
        graph.sequence.append(node._sequence_nr() if variable is None else -1)
        exponent = getattr(node, "_saved_exponent", None) if operation == "pow" else None
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
    # A threshold at zero is ReLU; anywhere else it is not homogeneous.
    return "relu" if name == "threshold" and getattr(node, "_saved_threshold", None) == 0 else name


def _union(masks: Iterable[Mask]) -> Mask:
    total = 0
    for mask in masks:
        total |= mask
    return total


# Which parameters may have to grow together


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
    depends: list[Mask] = []
    for node, leaf in enumerate(graph.leaf):
        if leaf is not None:
            depends.append(1 << leaf)
            scaling.append(1 << leaf)
            continue
        reads = graph.inputs[node]
        depends.append(_union(depends[r] for r in reads if r is not None))
        found = _scaling_of(graph, node, scaling, depends, proposals.through)
        scaling.append(found)
        if found is not None and found.bit_count() > 1:
            proposals.sets.add(found)
    return proposals


def _scaling_of(
    graph: Graph, node: int, scaling: list[Mask | None], depends: list[Mask], through: dict[int, Mask]
) -> Mask | None:
    """The parameters that scale this node's output, or None."""
    kind, reads = graph.kinds[node], graph.inputs[node]
    if kind in ("nonlinear", "power"):
        return None
    if kind in ("product", "sum of products"):
        return _scaling_of_product(kind, reads, scaling, depends, through)
    if kind in ("sum", "concatenation") and None in reads:
        return None
    if kind == "normalization":
        reads = reads[1:3]
    elif kind == "weight norm":
        reads = reads[1:2]
    elif kind == "division":
        reads = reads[:1]
    elif graph.operations[node].startswith("scaleddotproduct"):
        reads = reads[2:3]
    return _common(reads, scaling)


def _common(reads: list[int | None], scaling: list[Mask | None]) -> Mask | None:
    """A sum is scaled when all its terms are."""
    masks = [scaling[r] for r in reads if r is not None]
    known = [mask for mask in masks if mask is not None]
    return _union(known) if known and len(known) == len(masks) else None


def _scaling_of_product(
    kind: str, reads: list[int | None], scaling: list[Mask | None], depends: list[Mask], through: dict[int, Mask]
) -> Mask | None:
    """One factor scales a product: the one that depends on fewest parameters, normally a weight."""
    term_first = kind == "sum of products"
    factors, terms = (reads[1:], reads[:1]) if term_first else (reads[:2], reads[2:3])
    able = [r for r in factors if r is not None and scaling[r] is not None]
    if not able or (term_first and terms == [None]):
        return None
    chosen = min(able, key=lambda r: depends[r].bit_count())
    scaled = scaling[chosen]
    if scaled is not None and scaled.bit_count() == 1:
        bit = scaled.bit_length() - 1
        others = _union(depends[r] for r in factors if r is not None and r != chosen)
        through[bit] = through.get(bit, 0) | others
    return _common([chosen, *terms], scaling)


# What lies on the paths of a set


def meets_nonlinearity(graph: Graph, sets: Sequence[Sequence[str]]) -> list[bool]:
    """Per set of parameters, whether growing it scales the input of a nonlinearity by a power of the factor.

    A sum of different powers of the factor, as in a polynomial, is a nonlinearity too. In many rows a nonlinearity
    shows in the numbers, because each row's defect falls at its own pace; in few rows it may not.

    Args:
        graph: of one pass.
        sets: names of parameters, each set grown as one.
    """
    return _factor_reaches(graph, sets, lambda kind: kind == "nonlinear", mixtures=True)


def has_known_path(graph: Graph, sets: Sequence[Sequence[str]]) -> list[bool]:
    """Per set, whether it meets no nonlinearity and no operation that could hide one, such as a user's own."""
    return [not hidden for hidden in _factor_reaches(graph, sets, lambda kind: kind not in _KNOWN)]


Powers = dict[float, int]
"""Sets of which some power of the factor is in a tensor, one bit for each set, by that power."""


def _factor_reaches(
    graph: Graph, sets: Sequence[Sequence[str]], wanted: Callable[[str], bool], *, mixtures: bool = False
) -> list[bool]:
    """Per set, whether its factor is still in the input of such a kind of operation, or in a mixture of powers."""
    bits = {name: bit for bit, name in enumerate(graph.names)}
    marks = dict.fromkeys(range(len(graph.names)), 0)
    for number, names in enumerate(sets):
        for name in names:
            marks[bits[name]] |= 1 << number
    # Per node: the sets that it depends on, and the powers of their factors in it as far as they are known.
    depends: list[int] = []
    powers: list[Powers] = []
    hit = 0
    for node, leaf in enumerate(graph.leaf):
        if leaf is not None:
            depends.append(marks[leaf])
            powers.append({1.0: marks[leaf]})
            continue
        kind, reads = graph.kinds[node], [r for r in graph.inputs[node] if r is not None]
        # If the power is unknown in one input, it is unknown in the result.
        known = ~_union(depends[r] & ~_union(powers[r].values()) for r in reads)
        incoming = [{} if r is None else {d: m & known for d, m in powers[r].items()} for r in graph.inputs[node]]
        if wanted(kind):
            hit |= _union(mask for of_input in incoming for mask in of_input.values())
        found, mixed = _combine(graph, node, incoming, depends)
        if kind == "concatenation":
            # Where one part lacks the factor, a slice of the result may be of that part.
            for part in incoming:
                found = {d: mask & _union(part.values()) for d, mask in found.items()}
        removed = _union(incoming[0].values()) if kind == "normalization" else 0
        depends.append(_union(depends[r] & ~(removed if i == 0 else 0) for i, r in enumerate(reads)))
        powers.append(found)
        hit |= mixed if mixtures else 0
    return [bool(hit >> number & 1) for number in range(len(sets))]


def _combine(graph: Graph, node: int, incoming: list[Powers], depends: list[int]) -> tuple[Powers, int]:
    """The powers in the result of an operation, and the sets of which it mixes several."""
    kind, reads = graph.kinds[node], graph.inputs[node]
    if graph.operations[node] == "pow":
        return {graph.exponent[node] * d: mask for of_input in incoming[:1] for d, mask in of_input.items()}, 0
    if kind == "division":
        # Divided by something that depends on the set, there may be no scale left.
        left = ~_union(depends[r] for r in reads[1:] if r is not None)
        return {d: mask & left for d, mask in incoming[0].items()}, 0
    if kind == "normalization":
        # A known power of the factor is removed; any other dependence on the set stays unknown.
        left = ~_union(depends[r] & ~_union(incoming[0].values()) for r in reads[:1] if r is not None)
        given: Powers = {}
        for d, mask in (item for of_input in incoming[1:3] for item in of_input.items()):
            given[d] = given.get(d, 0) | mask & left
        return given, 0
    if kind not in _HOMOGENEOUS:
        return {}, 0
    if kind == "product":
        factors, terms = incoming[:2], incoming[2:]
    elif kind == "sum of products":
        factors, terms = incoming[1:3], incoming[:1]
    else:
        factors, terms = incoming[:1], incoming[1:]
    result = factors[0] if len(factors) < 2 else _product(*factors)
    for term in terms:
        result = {d: result.get(d, 0) | term.get(d, 0) for d in {*result, *term}}
    once, mixed = 0, 0
    for mask in result.values():
        mixed |= once & mask
        once |= mask
    kept = {d: mask & ~mixed for d, mask in result.items() if d and mask & ~mixed}
    return kept, 0 if kind in ("concatenation", "mixture", "choice") else mixed


def _product(a: Powers, b: Powers) -> Powers:
    """Powers add where both factors have one, and are kept where one has."""
    both = _union(a.values()) & _union(b.values())
    result: Powers = {}
    for d, mask in [*a.items(), *b.items()]:
        result[d] = result.get(d, 0) | mask & ~both
    for d, mask in a.items():
        for e, other in b.items():
            result[d + e] = result.get(d + e, 0) | mask & other
    return result

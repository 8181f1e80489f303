"""The autograd graph of a pass, and what it says about parameters that grow by one factor.

One table of operations answers three questions. `proposals`: for every tensor h of the model, which parameters scale h
when they grow together? If h is normalized, that set is jointly invariant; the graph does not know what is normalized,
so every tensor proposes its set, and the measured inner products decide. `readers`: which parameters multiply h next?
`follow`: where does the factor of a set go? It may reach a nonlinearity, and it disappears in a normalization.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from math import isnan, nan
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from steradian.groups import bare

_KINDS = {
    # Not homogeneous: growing the input does not scale the output. Smooth activations become homogeneous as their
    # inputs grow (GELU, SiLU, Mish and softplus become ReLU), and what is left falls as a normalization's ε does.
    "nonlinear": """gelu silu mish elu celu softplus logsigmoid sigmoid tanh glu hardswish hardsigmoid hardtanh
        softshrink hardshrink threshold softmax logsoftmax logsumexp exp exp2 expm1 log log2 log10 log1p erf erfc
        sin cos tan asin acos atan sinh cosh asinh acosh atanh""",
    # Part of a normalization, of a polynomial, or of an activation with a threshold.
    "power": "pow sqrt rsqrt reciprocal clamp clampmin clampmax",
    # Homogeneous of degree 1 in all inputs together.
    "linear": """sum mean cumsum neg relu leakyrelu abs amax maxpool2dwithindices maxpool3dwithindices adaptivemaxpool2d
        adaptivemaxpool3d avgpool2d avgpool3d adaptiveavgpool2d adaptiveavgpool3d nativedropout fuseddropout embedding
        embeddingbag channelshuffle nativechannelshuffle index indexselect gather view unsafeview reshapealias t
        transpose permute expand clone tocopy alias squeeze unsqueeze select slice split splitwithsizes unbind repeat
        roll flip diagonal tril triu asstrided pixelshuffle pixelunshuffle im2col col2im constantpadnd reflectionpad1d
        reflectionpad2d replicationpad1d replicationpad2d upsamplenearest1d upsamplenearest2d upsamplebilinear2d
        upsamplebicubic2d viewascomplex viewasreal fftr2c fftc2c fftc2r""",
    "sum": "add sub rsub",
    "concatenation": "cat stack copyslices",
    # Entries come from one input or another, or the inputs play different roles.
    "mixture": "max prelukernel rreluwithnoise trilinear lerp",
    "choice": "where maskedfill",
    # The first two inputs are multiplied, and the others added.
    "product": """mul mm bmm mv dot vdot matmul groupedmm
        convolution mkldnnconvolution cudnnconvolution linear mkldnnlinear""",
    # The second and the third input are multiplied, and the first added.
    "sum of products": "addmm addbmm baddbmm addmv addcmul",
    "division": "div",
    # Lengths and sorted parts, which normalizations are made of.
    "length": "var std varmean stdmean linalgvectornorm norm sort topk scatteradd indexadd indexput",
    "weight norm": "weightnorminterface weightnorm",
    # They remove the scale of the first input and give that of the gain and the bias, which come next.
    "normalization": "nativelayernorm nativebatchnorm cudnnbatchnorm miopenbatchnorm nativegroupnorm fusedrmsnorm",
}
_KIND = {operation: kind for kind, operations in _KINDS.items() for operation in operations.split()}
_EXPONENT = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "var": 2.0}

_HOMOGENEOUS = {"linear", "sum", "concatenation", "mixture", "choice", "product", "sum of products"}
"""Kinds whose output grows by a power of the factor when their inputs do. Any other may be part of a normalization."""
_KNOWN = (_HOMOGENEOUS - {"choice"}) | {"division", "length", "weight norm", "normalization"}
"""Kinds that a factor may meet without meeting a nonlinearity. A choice or a power may be part of one."""
_PARTS = {"select", "slice", "split", "splitwithsizes", "unbind"}
"""Operations that cut a tensor into parts."""
_SUMS = {"linear", "sum", "product", "sum of products"}
"""Kinds that add their inputs, or products of them."""


Mask = int
"""A set of parameters, one bit each."""


@dataclass
class Call:
    """One call of a module, by the sequence numbers of autograd between which it made its nodes."""

    name: str
    kind: str
    composite: bool
    start: int
    end: int = -1

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@contextmanager
def record_calls(model: nn.Module, calls: list[Call]) -> Iterator[None]:
    """Append the calls of all modules in a forward pass."""
    running: list[Call] = []

    def enter(name: str, module: nn.Module, _: Any) -> None:
        kind, composite = type(module).__name__.removeprefix("Parametrized"), any(True for _ in module.children())
        running.append(Call(name, kind, composite, torch._C._autograd._get_sequence_nr()))
        calls.append(running[-1])

    def leave(*_: Any) -> None:
        if running:
            running.pop().end = torch._C._autograd._get_sequence_nr()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, bare(name)), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


@dataclass
class Node:
    """An operation of a pass, or a parameter."""

    operation: str  # lower-case name, without "backward"
    kind: str  # of the operation, "" if it is not in the table
    inputs: list[int | None]  # numbers of the nodes that it reads; None for a constant
    exponents: list[float]  # the power of each input that it computes, 1 unless it is a root, a power or a variance
    parameter: str | None  # its name, if it is one
    sequence: int  # its place in the forward pass
    consumers: list[int] = field(default_factory=list)  # numbers of the nodes that read it


@dataclass
class Graph:
    """The nodes behind the outputs, inputs before consumers, and the calls of modules that made them."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @cached_property
    def leaf_nodes(self) -> dict[str, int]:
        """The node of each parameter that an output depends on."""
        return {node.parameter: i for i, node in enumerate(self.nodes) if node.parameter is not None}

    @cached_property
    def order_of_use(self) -> dict[str, int]:
        """The place of each parameter among all that outputs depend on, by their first use in the forward pass."""
        used = [name for name, leaf in self.leaf_nodes.items() if self.nodes[leaf].consumers]
        return {name: place for place, name in enumerate(sorted(used, key=self.first_use))}

    @cached_property
    def proposals(self) -> tuple[list[tuple[str, ...]], dict[str, set[str]]]:
        """Sets that may be jointly invariant, and for each parameter those that it multiplies: everything upstream."""
        names = list(self.leaf_nodes)
        bits = {name: 1 << i for i, name in enumerate(names)}
        sets: set[Mask] = set()
        through: dict[Mask, Mask] = {}
        scaling: list[Mask] = []  # the parameters that scale each node, 0 if none do
        depends: list[Mask] = []
        parts: set[int] = set()  # nodes that are parts of others
        for number, node in enumerate(self.nodes):
            if node.parameter is not None:
                depends.append(bits[node.parameter])
                scaling.append(bits[node.parameter])
                continue
            depends.append(_union(depends[i] for i in node.inputs if i is not None))
            terms, factors = _terms(node), _factors(node) if node.kind != "normalization" else []
            if node.operation in _PARTS or (node.kind == "linear" and not parts.isdisjoint(node.inputs)):
                parts.add(number)
            able = [i for i in factors if i is not None and scaling[i]] if terms is not None else []
            if able:
                # One factor scales a product: the one that depends on fewest parameters, normally a weight. A part of
                # a tensor does less likely, such as a gate beside shifts, which would scale too.
                chosen = min(able, key=lambda i: (i in parts, depends[i].bit_count()))
                if scaling[chosen].bit_count() == 1:
                    others = _union(depends[i] for i in factors if i is not None and i != chosen)
                    through[scaling[chosen]] = through.get(scaling[chosen], 0) | others
                terms = [chosen, *(terms or ())]
            masks = [scaling[i] for i in terms or () if i is not None] if able or not factors else []
            scaling.append(_union(masks) if all(masks) else 0)
            if scaling[-1].bit_count() > 1:
                sets.add(scaling[-1])
        acting = {names[one.bit_length() - 1]: set(_members(others, names)) for one, others in through.items()}
        return [_members(mask, names) for mask in sets], acting

    def readers(self) -> dict[str, set[str]]:
        """For each parameter, those that multiply what it scales: the first ones on every path downstream."""
        names = list(self.leaf_nodes)
        bits = {name: 1 << i for i, name in enumerate(names)}
        itself: list[Mask] = []  # the parameter, if a node is one or a view of one
        for node in self.nodes:
            reads = [i for i in node.inputs if i is not None]
            view = node.kind == "linear" and len(reads) == 1 and not node.operation.startswith("embedding")
            itself.append(bits[node.parameter] if node.parameter is not None else itself[reads[0]] if view else 0)
        found = [0] * len(self.nodes)
        for number in reversed(range(len(self.nodes))):
            for consumer in self.nodes[number].consumers:
                factors = () if itself[number] else _factors(self.nodes[consumer])
                others = (itself[i] for i in factors if i is not None and i != number) if number in factors else ()
                found[number] |= _union(others) or found[consumer]
        return {name: set(_members(found[leaf], names)) for name, leaf in self.leaf_nodes.items()}

    def parallel(self, names: Sequence[str]) -> bool:
        """Whether no member acts through another: weight and bias, two embeddings, not a residual stream."""
        # A recurrent weight acts through itself and so through everything beside it; that does not count.
        acting = {name: self.proposals[1].get(name, set()) for name in names}
        return all(others.isdisjoint(names) or name in others for name, others in acting.items())

    def first_use(self, name: str) -> int:
        """The sequence number of the first operation that reads a parameter."""
        return min(self.nodes[i].sequence for i in self.nodes[self.leaf_nodes[name]].consumers)

    def all_paths_pass(self, names: Sequence[str], through: Sequence[int]) -> bool:
        """Whether some of these nodes lie on every path from the parameters to the outputs."""
        seen, queue = set(through), [self.leaf_nodes[name] for name in names]
        while queue:
            consumers = self.nodes[queue.pop()].consumers
            if not consumers:
                return False
            queue += [i for i in consumers if i not in seen]
            seen.update(consumers)
        return True

    def calls_around(self, sequence: int) -> list[Call]:
        """The calls during which a node was made, from the inside out."""
        return [call for call in reversed(self.calls) if call.start <= sequence < call.end]


def read_graph(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], calls: Sequence[Call] = ()) -> Graph:
    """The graph behind some outputs."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    graph, numbers = Graph(calls=list(calls)), {}
    for number, source in enumerate(graph_nodes(outputs)):
        numbers[source] = number
        inputs = [None if read is None else numbers[read] for read, _ in source.next_functions]
        for read in {i for i in inputs if i is not None}:
            graph.nodes[read].consumers.append(number)
        operation = str(source.name()).rsplit("::", 1)[-1].lower()
        operation = operation.rstrip("0123456789").removesuffix("backward").replace("_", "")
        if operation == "threshold" and getattr(source, "_saved_threshold", None) == 0:
            operation = "relu"  # a threshold anywhere else is not homogeneous
        exponent = getattr(source, "_saved_exponent", None) if operation == "pow" else _EXPONENT.get(operation)
        exponents = [float(exponent) if isinstance(exponent, int | float) else 1.0] * len(inputs)
        for k, (i, (_, output)) in enumerate(zip(inputs, source.next_functions, strict=True)):
            if i is not None and graph.nodes[i].operation == "varmean" and output == 0:
                exponents[k] *= 2  # its other output is the mean
        name = names.get(id(getattr(source, "variable", None)))
        graph.nodes.append(Node(operation, _KIND.get(operation, ""), inputs, exponents, name, source._sequence_nr()))
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


def _terms(node: Node) -> list[int | None] | None:
    """The inputs that must all grow for the output to grow, beside a factor; None if a constant is added, or more."""
    reads, kind = node.inputs, node.kind
    added = {"sum": reads, "concatenation": reads, "sum of products": reads[:1]}.get(kind, [])
    if kind in ("nonlinear", "power") or None in added:
        return None
    if node.operation.startswith("scaleddotproduct"):
        return reads[2:3]
    some = {"normalization": reads[1:3], "weight norm": reads[1:2], "division": reads[:1], "product": reads[2:3]}
    return some.get(kind, added or reads)


def _members(mask: Mask, names: Sequence[str]) -> tuple[str, ...]:
    """The names of a set."""
    found = []
    while mask:  # from one bit to the next: most sets are small, and there may be thousands of parameters
        lowest = mask & -mask
        found.append(names[lowest.bit_length() - 1])
        mask ^= lowest
    return tuple(found)


def _union(masks: Iterable[Mask]) -> Mask:
    return reduce(or_, masks, 0)


def _factors(node: Node) -> list[int | None]:
    """The inputs that a node multiplies with each other."""
    if node.kind in ("product", "normalization"):
        return node.inputs[:2]
    return node.inputs[1:3] if node.kind == "sum of products" else []


@dataclass
class Path:
    """What the factor of a set meets on its way from the parameters."""

    # Whether it scales the input of a nonlinearity, or different powers of it are added, as in a polynomial. In many
    # rows a nonlinearity shows in the numbers, because each row's defect falls at its own pace; in few it may not.
    nonlinear: bool = False
    known: bool = True  # whether it meets neither that nor an operation that could hide one, such as a user's own
    ends: list[int] = field(default_factory=list)  # nodes in which it disappears: normalizations, if it is invariant
    traced: bool = True  # whether it disappears wherever it goes
    alone: bool = True  # whether nothing without it is added to what has it
    power: dict[int, float] = field(default_factory=dict)  # that each node has of it, NaN if unknown

    @property
    def removed(self) -> bool:
        """Whether normalizations alone remove it: then what is left of it is due to ε, however much that is."""
        return self.known and self.traced and self.alone and bool(self.ends)


def follow(graph: Graph, names: Sequence[str], against: Sequence[str] = ()) -> Path:
    """Follow the factor by which some parameters grow together, and others shrink, until it has disappeared."""
    # Each tensor has a power of the factor, NaN if it is unknown. It is certain up to the first operation that may be
    # part of a normalization: behind that, it explains an invariance, but does not refute one.
    given = dict.fromkeys(names, 1.0) | dict.fromkeys(against, -1.0)
    power, uncertain = {graph.leaf_nodes[n]: p for n, p in given.items() if n in graph.leaf_nodes}, set[int]()
    path = Path(known=len(power) == len(given), traced=len(power) == len(given), power=power)
    reached = {consumer for leaf in power for consumer in graph.nodes[leaf].consumers}
    number, last = min(reached, default=0) - 1, max(reached, default=-1)
    while (number := number + 1) <= last:
        if number not in reached:
            continue
        node = graph.nodes[number]
        reads = zip(node.inputs, node.exponents, strict=True)
        incoming = [0.0 if i is None else exponent * power.get(i, 0.0) for i, exponent in reads]
        certain = uncertain.isdisjoint(node.inputs)
        powers = _powers(node, incoming)
        path.alone &= len(powers) == 1
        powers -= {0.0}
        path.nonlinear |= certain and (node.kind == "nonlinear" or (len(powers) > 1 and node.kind in _SUMS))
        path.known &= not certain or node.kind in _KNOWN
        if not powers:
            path.ends.append(number)
            continue
        power[number] = powers.pop() if len(powers) == 1 else nan
        if not certain or isnan(power[number]) or not _stays_certain(node, incoming):
            uncertain.add(number)
        path.traced &= bool(node.consumers) and not isnan(power[number])
        reached.update(node.consumers)
        if not isnan(power[number]):  # behind what is unknown, everything is
            last = max([last, *node.consumers])
    return path


def _powers(node: Node, incoming: list[float]) -> set[float]:
    """The powers of the factor in the result of an operation."""
    first, second, third, *_ = [*incoming, 0.0, 0.0]
    if node.kind in ("normalization", "weight norm"):
        return {nan} if isnan(first) else {second, third}
    if node.kind == "division":
        return {first - second}
    if node.kind == "product":
        return {first + second, third} if node.inputs[2:] not in ([], [None]) else {first + second}
    if node.kind == "sum of products":
        return {first, second + third}
    if node.kind in _HOMOGENEOUS or node.kind in ("power", "length"):
        return set(incoming)
    if node.operation.startswith("scaleddotproduct") and not first and not second:
        return {third}
    return {nan}


def _stays_certain(node: Node, incoming: list[float]) -> bool:
    """Whether the power in the result is certain if it is in the inputs."""
    if node.kind == "division":
        return not any(incoming[1:])
    if node.kind == "concatenation":
        return all(incoming)  # a slice may be of a part that lacks the factor
    return node.kind in _HOMOGENEOUS or node.kind == "normalization" or node.operation == "pow"

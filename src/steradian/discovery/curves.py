"""Which parameters run straight into a curve, before anything could have taken their scale away.

A smooth activation grows into a homogeneous one as its inputs grow: GELU, SiLU and Mish into ReLU, softplus too.
What is left of the curve falls with the square of the growth, as a normalization's ε does, and where the inputs are
large it starts as small. In many rows that shows, because each row falls at its own pace; in few rows it may not,
and then numbers alone cannot tell a curve from ε. The autograd graph can: between a weight and its normalization
there is no curve. It has a say only where there is a defect to explain, and only against a row.
"""

from collections.abc import Callable, Iterable, Sequence

from .graph import Graph

__all__ = ["run_into_curves", "seen_through"]

# fmt: off
_CURVES = {
    "gelu", "silu", "mish", "elu", "celu", "softplus", "logsigmoid", "sigmoid", "tanh", "glu",
    "hardswish", "hardsigmoid", "hardtanh", "softshrink", "hardshrink", "threshold",
    "softmax", "logsoftmax", "logsumexp",
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
}
# Operations whose result is larger by a power of the factor when their inputs are. Any other, and any that is not
# known here, may be a normalization, so that nothing is said about what lies behind it.
_PASSING = {
    "convolution", "mkldnnconvolution", "cudnnconvolution", "linear", "mkldnnlinear",
    "mm", "bmm", "mv", "dot", "matmul", "addmm", "addbmm", "baddbmm", "addmv", "trilinear", "groupedmm",
    "mul", "add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "lerp", "addcmul",
    "relu", "leakyrelu", "rreluwithnoise", "prelukernel", "abs", "max", "amax", "where", "maskedfill",
    "maxpool2dwithindices", "maxpool3dwithindices", "adaptivemaxpool2d", "adaptivemaxpool3d",
    "avgpool2d", "avgpool3d", "adaptiveavgpool2d", "adaptiveavgpool3d",
    "nativedropout", "fuseddropout", "embedding", "index", "indexselect", "gather",
    "view", "unsafeview", "reshapealias", "t", "transpose", "permute", "expand", "clone", "tocopy", "alias",
    "squeeze", "unsqueeze", "select", "slice", "split", "splitwithsizes", "unbind", "cat", "stack", "repeat",
    "roll", "flip", "diagonal", "tril", "triu", "asstrided", "pixelshuffle", "pixelunshuffle", "im2col", "col2im",
    "constantpadnd", "reflectionpad1d", "reflectionpad2d", "replicationpad1d", "replicationpad2d",
    "upsamplenearest1d", "upsamplenearest2d", "upsamplebilinear2d", "upsamplebicubic2d",
}
# What else a factor may run into without meeting a curve: the normalizations that torch has, and lengths. A power or
# a clamp may be part of one, but also of a polynomial or of an activation with a threshold; so may a choice.
_KNOWN = (_PASSING - {"where", "maskedfill"}) | {
    "div", "var", "std", "varmean", "stdmean", "linalgvectornorm", "norm", "sort", "topk", "scatteradd", "indexadd",
    "nativelayernorm", "nativebatchnorm", "cudnnbatchnorm", "miopenbatchnorm", "nativegroupnorm", "fusedrmsnorm",
    "weightnorminterface", "accumulategrad",
}
# These take the scale of their first input away and give that of the gain and the bias, which come next.
_AFFINE = {
    "nativelayernorm", "nativebatchnorm", "cudnnbatchnorm", "miopenbatchnorm", "nativegroupnorm", "fusedrmsnorm",
}
# Of these the first two inputs are multiplied, of the next the second and the third; whatever else there is, is added.
_PRODUCTS = {
    "mul", "mm", "bmm", "mv", "dot", "matmul", "groupedmm",
    "convolution", "mkldnnconvolution", "cudnnconvolution", "linear", "mkldnnlinear",
}
_SUMS_OF_PRODUCTS = {"addmm", "addbmm", "baddbmm", "addmv", "addcmul"}
# These lay inputs beside each other, and these and others choose among them.
_LAID = {"cat", "stack"}
_BESIDE = {*_LAID, "where", "max", "prelukernel", "rreluwithnoise", "trilinear", "lerp"}
# fmt: on


def run_into_curves(graph: Graph, sets: Sequence[Sequence[str]]) -> list[bool]:
    """Per set of parameters, whether growing it moves the input of a curve by a power of the factor.

    A sum of different powers of the factor, as in a polynomial, is a curve too.

    Args:
        graph: of one pass.
        sets: names of parameters, each set grown as one.
    """
    return _reach(graph, sets, lambda operation: operation in _CURVES, mixtures=True)


def seen_through(graph: Graph, sets: Sequence[Sequence[str]]) -> list[bool]:
    """Per set, whether it runs into no curve, and into no operation that could hide one, such as a user's own."""
    return [not hidden for hidden in _reach(graph, sets, lambda operation: operation not in _KNOWN)]


Powers = dict[float, int]
"""Sets of which some power of the factor is in a tensor, one bit for each set, by that power."""


def _reach(
    graph: Graph, sets: Sequence[Sequence[str]], wanted: Callable[[str], bool], *, mixtures: bool = False
) -> list[bool]:
    """Per set, whether its factor is still in the input of such an operation, or in a mixture of powers."""
    bits = {name: bit for bit, name in enumerate(graph.names)}
    marks = dict.fromkeys(range(len(graph.names)), 0)
    for number, names in enumerate(sets):
        for name in names:
            marks[bits[name]] |= 1 << number
    # Per node: the sets it depends on, and the powers of their factors that are in it as far as that is known.
    depends: list[int] = []
    powers: list[Powers] = []
    hit = 0
    for node, leaf in enumerate(graph.leaf):
        if leaf is not None:
            depends.append(marks[leaf])
            powers.append({1.0: marks[leaf]})
            continue
        operation, reads = graph.operations[node], [r for r in graph.inputs[node] if r is not None]
        # A factor that is not known on one way leaves nothing to say about the sum or product.
        known = ~_union(depends[r] & ~_union(powers[r].values()) for r in reads)
        incoming = [{} if r is None else {d: m & known for d, m in powers[r].items()} for r in graph.inputs[node]]
        if wanted(operation):
            hit |= _union(mask for of_input in incoming for mask in of_input.values())
        found, mixed = _combine(operation, incoming, graph.exponent[node], depends, graph.inputs[node])
        if operation in _LAID:
            # Where a part is without the factor, what is cut out behind it may be of that part.
            for part in incoming:
                found = {d: mask & _union(part.values()) for d, mask in found.items()}
        taken = _union(incoming[0].values()) if operation in _AFFINE else 0
        depends.append(_union(depends[r] & ~(taken if i == 0 else 0) for i, r in enumerate(reads)))
        powers.append(found)
        hit |= mixed if mixtures else 0
    return [bool(hit >> number & 1) for number in range(len(sets))]


def _combine(
    operation: str, incoming: list[Powers], exponent: float, depends: list[int], reads: list[int | None]
) -> tuple[Powers, int]:
    """The powers in the result of an operation, and the sets of which it mixes several."""
    if operation == "pow":
        return {exponent * d: mask for of_input in incoming[:1] for d, mask in of_input.items()}, 0
    if operation == "div":
        # Behind a division by what depends on the set, there may be no scale left.
        left = ~_union(depends[r] for r in reads[1:] if r is not None)
        return {d: mask & left for d, mask in incoming[0].items()}, 0
    if operation in _AFFINE:
        # A power of the factor that is known is gone behind it; what else there is of the set is not known.
        left = ~_union(depends[r] & ~_union(incoming[0].values()) for r in reads[:1] if r is not None)
        given: Powers = {}
        for d, mask in (item for of_input in incoming[1:3] for item in of_input.items()):
            given[d] = given.get(d, 0) | mask & left
        return given, 0
    if operation not in _PASSING:
        return {}, 0
    if operation in _PRODUCTS:
        factors, terms = incoming[:2], incoming[2:]
    elif operation in _SUMS_OF_PRODUCTS:
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
    return kept, 0 if operation in _BESIDE else mixed


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


def _union(masks: Iterable[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total

"""Which parameters run straight into a curve, before anything could have taken their scale away.

A smooth activation grows into a homogeneous one as its inputs grow: GELU, SiLU and Mish into ReLU, softplus too.
What is left of the curve falls with the square of the growth, as a normalization's ε does, and where the inputs are
large it starts as small. In many rows that shows, because each row falls at its own pace; in few rows it may not,
and then numbers alone cannot tell a curve from ε. The autograd graph can: between a weight and its normalization
there is no curve. It has a say only where there is a defect to explain, and only against a row.
"""

from collections.abc import Callable, Sequence

from .graph import Graph

__all__ = ["run_into_curves", "seen_through"]

# fmt: off
_CURVES = {
    "gelu", "silu", "mish", "elu", "celu", "softplus", "logsigmoid", "sigmoid", "tanh", "glu",
    "hardswish", "hardsigmoid", "hardtanh", "softshrink", "hardshrink", "softmax", "logsoftmax", "logsumexp",
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
# Operations of normalizations that are written out, and the normalizations that torch has.
_KNOWN = _PASSING | {
    "div", "pow", "sqrt", "rsqrt", "reciprocal", "var", "std", "varmean", "stdmean", "linalgvectornorm", "norm",
    "clamp", "clampmin", "clampmax", "maximum", "minimum", "sort", "topk", "scatteradd", "indexadd", "copyslices",
    "nativelayernorm", "nativebatchnorm", "cudnnbatchnorm", "miopenbatchnorm", "nativegroupnorm", "fusedrmsnorm",
    "weightnorminterface", "accumulategrad",
}
# fmt: on


def run_into_curves(graph: Graph, sets: Sequence[Sequence[str]]) -> list[bool]:
    """Per set of parameters, whether growing it moves the input of a curve by a power of the factor.

    Args:
        graph: of one pass.
        sets: names of parameters, each set grown as one.
    """
    return _reach(graph, sets, lambda operation: operation in _CURVES)


def seen_through(graph: Graph, sets: Sequence[Sequence[str]]) -> list[bool]:
    """Per set, whether it runs into no curve, and into no operation that could hide one, such as a user's own."""
    return [not hidden for hidden in _reach(graph, sets, lambda operation: operation not in _KNOWN)]


def _reach(graph: Graph, sets: Sequence[Sequence[str]], wanted: Callable[[str], bool]) -> list[bool]:
    """Per set, whether its factor is still in the input of such an operation."""
    marks = dict.fromkeys(range(len(graph.names)), 0)
    bits = {name: bit for bit, name in enumerate(graph.names)}
    for number, names in enumerate(sets):
        for name in names:
            marks[bits[name]] |= 1 << number
    # Per node, with one bit for each set: it depends on the set; the factor is still in it; or was lost sight of.
    depends: list[int] = []
    moves: list[int] = []
    lost: list[int] = []
    hit = 0
    for node, leaf in enumerate(graph.leaf):
        operation, reads = graph.operations[node], [r for r in graph.inputs[node] if r is not None]
        if leaf is not None:
            depends.append(marks[leaf])
            moves.append(marks[leaf])
            lost.append(0)
            continue
        # A factor that is not known on one way leaves nothing to say about the sum or product.
        moved = _union(moves, reads) & ~_union(lost, reads)
        depends.append(_union(depends, reads))
        if wanted(operation):
            hit |= moved
        if operation == "div":
            moved &= ~_union(depends, [r for r in graph.inputs[node][1:] if r is not None])
        elif operation not in _PASSING:
            moved = 0
        moves.append(moved)
        lost.append(depends[-1] & ~moved)
    return [bool(hit >> number & 1) for number in range(len(sets))]


def _union(masks: Sequence[int], nodes: Sequence[int]) -> int:
    total = 0
    for node in nodes:
        total |= masks[node]
    return total

"""Every threshold and limit of the discovery, once, with its reason.

A defect is what is left of ⟨∇L, x⟩ of a row where it should be 0. The *imbalance* |Σ g·x| / √Σ(g·x)² measures it: of
order 1 where nothing cancels, about ε/σ² under a normalization, rounding where the invariance is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Passes
MOST_PASSES = 13  # forward passes through the model, with or without a backward pass: what a user waits for
USUAL_PASSES = 10  # passes of most models, for the progress bar
BAR_SECONDS = 3  # a progress bar for less would only flicker
RANDOM_POINTS = 3  # at which every model is probed: two could agree by chance
SIGN_FLIPS = 2  # further points, where what has no gradient changes sign: one after another activates deeper parts
RESERVED_PASSES = 4  # that must be left for the second growth and the forward check
GROWTH = (32.0, 1024.0)  # factors by which candidates grow: a defect due to ε is divided by their squares, 1e3 and 1e6
PACE = (GROWTH[0] / GROWTH[1]) ** 1.5  # a defect falls by this from one to the other: ε's by power 2, any other's by 1

# Effects: how much the outputs depend on a parameter or row, ‖g ⊙ x‖
MEASURABLE = 10  # multiple of the rounding level above which the effect of a row is not rounding
FLOOR_OF_PEAK = 1e-3  # share of the largest effect in the model whose rounding may show up in any other parameter
NO_EFFECT = 1e-4  # share of the largest effect around it below which a gain or bias acts through a normalization's ε
LITTLE_EFFECT = 5e-3  # the same share below which that is suspected and tested by growing the parameter
NEIGHBORS = 8  # parameters used before and after one, which it is compared with: effects may grow from layer to layer
LOST_EFFECT = 1e-4  # share of its effect that a candidate keeps when it grows, unless something has saturated
LEAST_EFFECT = 0.03  # share of the typical row's effect below which a row hardly moves the outputs
INACTIVE = 1e-6  # share of the typical row's effect below which a row cannot be judged at a grown point

# Balance of rows
MANY_ROWS = 8  # rows or slices that must agree to exclude chance
CERTAIN = 0.05  # share of the tolerance at random points below which a block is not balanced by chance
MANY_ROWS_TOLERANCE = 4  # multiple of that tolerance for the typical one of many rows, all of which fall as ε's defects
FASTER = 16  # how many times faster than the others a defect may fall; a path around the normalization saturates faster
MOST_FADED = 0.25  # share of the rows that may be judged by the others because they are inactive at a grown point
ROUNDING_MULTIPLE = 100  # multiple of its noise above which the imbalance of a reading is not rounding
LEAST_BLOCKS = 8  # a parameter is partly invariant if at least one in so many of its blocks is
EPSILON_DOMINATES = 0.1  # imbalance at the model's own weights above which a row is reported as dominated by ε

# Joint sets
CANCELLATION = 50.0  # how many times the remaining sum its parts are on average, where they do not cancel by chance
LIKELY_CANCELLATION = 8.0  # the same at ordinary scale, where ε leaves more of the sum, for a set worth growing
LEAST_SHARE = 0.03  # share of its effect that a parameter's part of a sum is at least measured by
ROUNDING_OF_SUM = 1e-12  # share of the sizes of its parts that a sum is at least measured as
TAKES_PART = 0.01  # share of a sum's parts from which a parameter takes part in it; an invariant row adds its defect
LARGER_SETS = 0.03  # factor on the tolerance for sets of three and four, of which many more vanish by chance
MOST_FOR_THREE, MOST_FOR_FOUR = 400, 160  # parameters that are searched for such sets: n² and n⁴ comparisons
MOST_SETS = 2000  # that one search returns

# Pairs
INVARIANT_SIDE = 1e-3  # share of its effect up to which ⟨∇L, a⟩ of a side is what ε leaves of an invariance
NEARLY_AGREE = 1e-6  # share of their effects by which the totals of two sides may differ at first sight
MOST_WITH_PARTS = 8  # parameters of two sides up to which parts of one are compared with the other
MOST_PARTS = 8  # equal parts of a tensor that are compared with another side one by one
PAIR_FACTORS = 8  # largest |log2 α| in the forward check f(αa, b/α) = f(a, b): far enough to reach a clamp

# Forward check f(ρx) = f(x): relative changes of the outputs
LEAST_MOVE, MOST_MOVE = 1e-3, 0.03  # between these, outputs may move as far as the defect of the worst row explains
LEFT_OUT, MOST_LEFT_OUT = 0.01, 0.25  # imbalance of rows that are not scaled at ordinary scale, and their largest share
MOST_GRADUAL_MOVE, GRADUAL = 0.1, 0.02  # a larger move may be due to ε if scaling by 1.02 gives this share of it
SHRUNK = 0.2  # share of `Precision.same` that outputs may move when rows shrink by powers of two, which rounds nothing
MOST_PREDICTED = 0.3  # largest move that the derivatives along all rows may predict: in a deep model ε's add up

# Points and inputs
SPREAD = 0.5  # relative noise on gains and other positive vectors, small enough to keep them positive
EPSILON = 1e-5  # largest ε at random points: what is proved does not depend on it, only how exactly it holds
SMALL_INPUT = 0.05  # inputs smaller than this are rescaled to 1: a normalization's ε would dominate them

# Limits of memory and recursion
CHUNK_CPU, CHUNK_GPU = 2**17, 2**23  # numbers processed at once: they fit into a CPU's caches, or are few for a GPU
NEST_DEPTH = 8  # levels of nested inputs and outputs that are searched for tensors
ATTRIBUTE_DEPTH = 4  # levels of containers in a module's attributes that are restored after a pass
MOST_ITEMS = 4096  # of a container that is searched; one with more holds data, not the state of a layer
MOST_NUMBERS = 2**20  # of a numpy array that is restored; one with more is data as well


@dataclass(frozen=True)
class Precision:
    """What counts as zero, by the arithmetic of the probes."""

    dtype: torch.dtype | None  # dtype of the probes; None keeps each tensor's own
    noise: float  # share of the largest effect in the model below which an effect is rounding
    loose: float  # imbalance of a candidate at ordinary scale, where a normalization's ε still shows
    strict: float  # imbalance of a proved row after its radius grew 1024-fold, where ε no longer shows
    settled: float  # imbalance after that growth which needs no explanation; a larger one must have fallen as ε's does
    flat: float  # imbalance that may stay, where another normalization undoes the growth
    linear: float  # imbalance at ordinary scale that may fall with the growth instead of its square
    same: float  # relative change of outputs that counts as none
    resolution: float  # largest rounding error of an imbalance


# noise, loose, strict, settled, flat, linear, same, resolution
_DOUBLE = (1e-10, 0.05, 1e-4, 1e-6, 1e-2, 5e-4, 1e-5, 1e-9)
_SINGLE = (1e-5, 0.05, 1e-2, 3e-4, 1e-2, 5e-4, 1e-2, 1e-3)
_HALF = (1e-2, 0.2, 0.1, 0.1, 0.1, 0.0, 0.1, 0.1)


def precision_of(dtype: torch.dtype | None, parameters: Sequence[Tensor]) -> Precision:
    """The thresholds of a probe in dtype (None: the parameters' own dtypes)."""
    eps = max(torch.finfo(dtype or p.dtype).eps for p in parameters)
    return Precision(dtype, *(_DOUBLE if eps < 1e-12 else _SINGLE if eps < 1e-6 else _HALF))

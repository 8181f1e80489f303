"""Every threshold and limit of the discovery, once, with its reason.

A defect is what is left of ⟨∇L, x⟩ of a row where it should be 0. The *imbalance* |Σ g·x| / √Σ(g·x)² measures it: of
order 1 where nothing cancels, about ε/σ² under a normalization, rounding where the invariance is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Passes

MOST_PASSES = 12
"""Forward passes through the model, with or without a backward pass: what a user waits for."""
USUAL_PASSES = 9
"""Passes of most models, for the progress bar."""
BAR_SECONDS = 3
"""A progress bar for less would only flicker."""
RANDOM_POINTS = 3
"""Random points at which every model is probed: two could agree by chance."""
SIGN_FLIPS = 2
"""Further points at which parameters without a gradient change sign: one after another may activate deeper parts."""
RESERVED_PASSES = 4
"""Passes that must be left for the second growth and the forward check."""
GROWTH = (32.0, 1024.0)
"""Factors by which candidates grow: a defect due to ε is divided by their squares, 1e3 and 1e6."""
PACE = (GROWTH[0] / GROWTH[1]) ** 1.5
"""Factor by which a defect must fall from one growth to the other: between ε's (power 2) and anything else's (1)."""

# Effects: how much the outputs depend on a parameter or row, ‖g ⊙ x‖

MEASURABLE = 10
"""Multiple of the rounding level above which the effect of a row is measured rather than rounding."""
FLOOR_OF_PEAK = 1e-3
"""Share of the largest effect in the model whose rounding may show up in any other parameter."""
NO_EFFECT = 1e-4
"""Share of the largest effect around it below which a gain or bias acts through a normalization's ε alone."""
LITTLE_EFFECT = 5e-3
"""The same share below which that is suspected and tested by growing the parameter."""
NEIGHBORS = 8
"""Parameters used before and after one, whose effects it is compared with: in deep models effects grow per layer."""
LOST_EFFECT = 1e-4
"""Share of its effect that a candidate must keep when it grows; if it does not, something has saturated."""
LEAST_EFFECT = 0.03
"""Share of the typical row's effect below which a row hardly moves the outputs."""
INACTIVE = 1e-6
"""Share of the typical row's effect below which a row cannot be judged at a grown point."""

# Balance of rows

MANY_ROWS = 8
"""Rows or slices that must agree to exclude chance."""
CERTAIN = 0.05
"""Share of the tolerance at random points below which a block is not balanced by chance."""
MANY_ROWS_TOLERANCE = 4
"""Multiple of that tolerance for the typical one of many rows, all of which fall as ε's defects do."""
FASTER = 16
"""How many times faster than the others a defect may fall; faster is a saturating path around the normalization."""
MOST_FADED = 0.25
"""Share of the rows that may be judged by the others because they are inactive at a grown point."""
ROUNDING_MULTIPLE = 100
"""Multiple of its noise above which the imbalance of a reading is not rounding."""
LEAST_BLOCKS = 8
"""A parameter counts as partly invariant if at least one in so many of its blocks is invariant."""
EPSILON_DOMINATES = 0.1
"""Imbalance at the model's own weights above which a row is reported as dominated by ε."""

# Joint sets

CANCELLATION = 50.0
"""How many times the remaining sum its parts are on average, where their cancellation is not chance."""
LIKELY_CANCELLATION = 8.0
"""The same at ordinary scale, where ε leaves more of the sum, for a set that is worth growing."""
LEAST_SHARE = 0.03
"""Share of its effect that a parameter's part of a sum is at least measured by."""
ROUNDING_OF_SUM = 1e-12
"""Share of the sizes of its parts that a sum is at least measured as."""
TAKES_PART = 0.01
"""Share of a sum's parts from which a parameter takes part in it; an invariant row adds only its defect."""
LARGER_SETS = 0.03
"""Factor on the tolerance for sets of three and four, of which there are many more that vanish by chance."""
MOST_FOR_THREE, MOST_FOR_FOUR = 400, 160
"""Parameters among which sets of three and of four are searched for: the search takes n² and n⁴ comparisons."""
MOST_SETS = 2000
"""Sets that one search returns."""

# Pairs

INVARIANT_SIDE = 1e-3
"""Share of its effect up to which ⟨∇L, a⟩ of a side is what ε leaves of an invariance at some point."""
NEARLY_AGREE = 1e-6
"""Share of their effects by which the totals of two sides may differ at first sight."""
MOST_WITH_PARTS = 8
"""Parameters of two sides up to which parts of one are compared with the other."""
MOST_PARTS = 8
"""Equal parts of a tensor that are compared with another side one by one."""
PAIR_FACTORS = 8
"""Largest |log2 α| in the forward check f(αa, b/α) = f(a, b): far enough to reach a clamp."""

# Forward check f(ρx) = f(x): relative changes of the outputs

LEAST_MOVE, MOST_MOVE = 1e-3, 0.03
"""Between these, outputs may move at ordinary scale as far as the defect of the worst row explains."""
LEFT_OUT, MOST_LEFT_OUT = 0.01, 0.25
"""Imbalance above which a row is not scaled at ordinary scale, and the share of rows that may be left out."""
MOST_GRADUAL_MOVE, GRADUAL = 0.1, 0.02
"""A larger move, up to the first, can be due to ε if scaling by 1.02 gives at most the second share of it."""
MOST_PREDICTED = 0.3
"""Largest move that the derivatives along all rows may predict together: in a deep model, what ε does adds up."""

# Points and inputs

SPREAD = 0.5
"""Relative noise on gains and other positive vectors, small enough to keep them positive."""
EPSILON = 1e-5
"""Largest ε of a normalization at random points: what is proved does not depend on it, only how exactly it holds."""
SMALL_INPUT = 0.05
"""Inputs smaller than this are rescaled to 1: a normalization's ε would dominate them."""

# Limits of memory and recursion

CHUNK_CPU, CHUNK_GPU = 2**17, 2**23
"""Numbers of a tensor that are processed at once: they fit into the caches of a CPU, or are small for a GPU."""
NEST_DEPTH = 8
"""Levels of nested inputs and outputs that are searched for tensors."""
ATTRIBUTE_DEPTH = 4
"""Levels of containers in a module's attributes that are restored after a pass."""
MOST_ITEMS = 4096
"""Items of a container that is searched; one with more holds data, not the state of a layer."""
MOST_NUMBERS = 2**20
"""Numbers of a numpy array that is restored; one with more is data as well."""


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

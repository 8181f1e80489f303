"""Adam whose geometric phenomena can be switched off on radially invariant rows (Section 4, App. D.2)."""

from torch import Tensor

from steradian.optim import reference
from steradian.optim.base import Params, RowOptimizer, settings
from steradian.optim.checks import Options, check
from steradian.optim.rows import peak_rate

__all__ = ["Adam", "AdamS", "AdamSRT"]


class Adam(RowOptimizer, emits=True):
    """Adam, and without any of the phenomena (a), (b), (c) on param groups that have rows.

    g = ∇L(x) + λx;  m ← β1 m + (1−β1) g;  v ← β2 v + (1−β2) g²;  x' = x − η m̂/(√v̂ + ε) with
    m̂ = m/(1−β1^t), v̂ = v/(1−β2^t), ε as in torch. Then, for every letter in `without`:

    | | phenomenon | what replaces it |
    |---|---|---|
    | "a" | the division by √v deforms the gradient | v is the mean of g² over the row: one number per row |
    | "b" | past gradients and L2 terms leave the tangent space | m is transported from u to u' |
    | "c" | past gradients are weighed by r_k/r_i | m ← (r/r') m and v ← (r/r')² v |

    "ab" and "abc" are the paper's; all eight subsets work. The transport is the paper's T where the step is along m
    ("ab", "abc"), else the general isometry. r is the radius before any decay. `without=""`, and every parameter whose
    group has no rows, gets `torch.optim.Adam`'s update, bit for bit.

    A row that has no direction before or after a step keeps its m and v as they are. A row whose ‖g‖² overflows takes
    no step. Neither touches other rows, and none becomes NaN.

    Args:
        params: parameters, or param groups with the keys "rows" and "joint" (`Groups.param_groups()`).
        lr: rate η, a number or a tensor.
        betas: β1 and β2.
        eps: ε.
        weight_decay: λ.
        without: letters out of "abc", in any order; a param group may have its own.
        decoupled_weight_decay: x ← (1−ηλ)x instead of the L2 term; on rows alone it is the paper's AdamW†.
        corrected_decay: on rows, λη/η_max in the place of λ, so that a falling rate is not undone by shrinking radii
            (AdamC: Defazio, 2025). η_max is the group's "max_lr", or else "initial_lr", which torch's schedulers set,
            or else the rate that it was made with.
        maximize: ascend.
        capturable: keep the step count on the device, for graphs.
        fused: None for the fused step (Triton kernels, and torch's for parameters without rows) where there is an
            NVIDIA GPU that they run on. False for the plain step. True to have an error where it cannot be fused.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(8, 3))
    >>> optimizer = Adam([{"params": [weight], "rows": "filter"}], lr=1e-3, without="abc")
    >>> weight.grad = torch.randn(8, 3)
    >>> optimizer.step()
    >>> optimizer.state[weight]["exp_avg_sq"].shape
    torch.Size([8])
    """

    update = staticmethod(reference.adam)
    _rest_pace = staticmethod(reference.adam_pace)
    _has_fused = True
    row_state = frozenset({"exp_avg_sq"})
    _marks = frozenset({"betas", "without"})
    _preset = ""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        without: str = "",
        decoupled_weight_decay: bool = False,
        corrected_decay: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if self._preset:
            check(without == "", "without", without, f"left out: {type(self).__name__} is without {self._preset!r}")
        without = self._preset or without
        super().__init__(params, settings(locals()))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's gradient scaler asks: the step takes its scale and verdict as tensors, on the device."""
        return all(self._is_fused(group) for group in self.param_groups)

    def _updates_rows(self, group: Options) -> bool:
        return group.get("rows") is not None and (bool(group["without"]) or peak_rate(group) is not None)

    def _per_row(self, group: Options) -> frozenset[str]:
        return super()._per_row(group) if "a" in group["without"] else frozenset()


class AdamS(Adam):
    """Adam without (a): the division standardized to one number per row, `Adam(..., without="a")`."""

    _preset = "a"


class AdamSRT(Adam):
    """Adam without (a), (b) and (c), Algorithm 1 of the paper: `Adam(..., without="abc")`."""

    _preset = "abc"

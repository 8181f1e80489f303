"""Adam-G of Cho & Lee (2017), which lives on the unit sphere, and the form that the paper describes."""

from torch import Tensor

from steradian.optim import reference
from steradian.optim.base import Params, RowOptimizer, settings

__all__ = ["AdamG"]


class AdamG(RowOptimizer, emits=True):
    """Adam-G on rows, which stay on the unit sphere; Adam on the other parameters.

    With h the tangent part of ∇L(x), clipped to ‖h‖ ≤ clip: m ← β1 m + (1−β1)h;  v ← β2 v + (1−β2)‖h‖²;
    δ = −η √(1−β2^t)/(1−β1^t) · m/√(v + ε);  x' = x cos‖δ‖ + (δ/‖δ‖) sin‖δ‖, and m is transported along the way.

    The paper's AdamG "projects the weight on the sphere after each step": that is `retraction=True`. The first step
    puts rows on the sphere: it starts from u and takes ∇L(u) as r∇L(x) (Lemma 1). A row of zeros stays until a gradient
    moves it.

    Args:
        params: parameters, or param groups with the keys "rows" and "joint" (`Groups.param_groups()`).
        lr: rate η on the sphere.
        betas: β1 and β2.
        eps: ε, inside the root on rows and outside on the other parameters.
        clip: longest tangent gradient.
        retraction: the form that the paper describes, x' = (x + δ)/‖x + δ‖ without the clip.
        weight_decay: L2 coefficient of the parameters without rows; rows have none.
        rest_lr: rate of param groups without rows that give no rate.
        maximize: ascend.
        capturable: keep the step count on the device, for graphs.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.randn(8, 3))
    >>> optimizer = AdamG([{"params": [weight], "rows": "filter"}], lr=0.01)
    """

    update = staticmethod(reference.adamg)
    row_state = frozenset({"exp_avg_sq"})
    _marks = frozenset({"clip", "retraction"})
    _fixes_radius = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        *,
        clip: float = 0.1,
        retraction: bool = False,
        weight_decay: float = 0.0,
        rest_lr: float = 1e-3,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, settings(locals()))

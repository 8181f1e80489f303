"""AdamP (Heo et al., 2021) for comparison: its test per step replaced by rows that are known to be radial."""

from torch import Tensor

from steradian.optim import reference, torch_updates
from steradian.optim.base import Params, RowOptimizer, settings

__all__ = ["AdamP"]


class AdamP(RowOptimizer, emits=True):
    """AdamP that projects its step on param groups that have rows, always, and nowhere else.

    q = m/(√(v/(1−β2^t)) + ε);  q^⊥ = q − ⟨q,ū⟩ū with ū = x/(‖x‖ + ε);  x' = (1 − ηλρ)x − η/(1−β1^t) q^⊥. The
    `adamp` package decides by the cosine of x and ∇L(x) in every step, for filters first and then for the whole
    tensor; where it projects, this is equal to it under "filter" and "tensor". Other parameters get AdamW's update.

    Args:
        params: parameters, or param groups with the keys "rows" and "joint" (`Groups.param_groups()`).
        lr: rate η.
        betas: β1 and β2.
        eps: ε.
        weight_decay: λ, decoupled.
        wd_ratio: ρ, what is left of the decay on rows.
        nesterov: step along β1 m + (1−β1)∇L(x).
        maximize: ascend.
        capturable: keep the step count on the device, for graphs.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.randn(8, 3))
    >>> optimizer = AdamP([{"params": [weight], "rows": "filter"}], lr=1e-3, weight_decay=1e-2)
    """

    update = staticmethod(reference.adamp)
    _step_rest = staticmethod(torch_updates.adamp)
    _marks = frozenset({"wd_ratio"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, settings(locals()))

"""AdaGradG: the scheme on the unit sphere that SGD is equivalent to (Section 3.2, Theorem 4)."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from steradian import geometry
from steradian.equivalence import adagradg_from_sgd
from steradian.groups import Layout
from steradian.optim import reference, torch_updates
from steradian.optim.base import Params, RowOptimizer, fill, settings
from steradian.optim.checks import Options, check, is_number
from steradian.optim.rows import State

__all__ = ["AdaGradG"]


class AdaGradG(RowOptimizer, emits=True):
    """AdaGradG on rows, which stay on the unit sphere; SGD on the other parameters.

    x̂ = x − η ∇L(x)/√v;  x' = x̂/‖x̂‖;  v ← β v + ‖∇L(x)‖², with v used before it is updated.

    The first step puts rows on the sphere: it starts from u and takes ∇L(u) as r∇L(x) (Lemma 1). A row of zeros stays
    until a gradient moves it. The defaults are what Theorem 4 makes of SGD with rate 0.1 and no L2 from radius 1.

    Args:
        params: parameters, or param groups with the keys "rows" and "joint" (`Groups.param_groups()`).
        lr: rate η on the sphere.
        beta: β, what each step keeps of v.
        v0: v before the first step: a number, or in a param group a tensor with one for each row, or a list of these.
        weight_decay: L2 coefficient of the parameters without rows; rows have none.
        rest_lr: rate of param groups without rows that give no rate.
        maximize: ascend.

    >>> weight = torch.nn.Parameter(torch.randn(8, 3))
    >>> optimizer = AdaGradG.from_sgd([{"params": [weight], "rows": "filter"}], lr=0.1, weight_decay=5e-4)
    """

    update = staticmethod(reference.adagradg)
    _step_rest = staticmethod(torch_updates.sgd)
    row_state = frozenset({"sum"})
    _marks = frozenset({"beta", "v0"})
    _fixes_radius = True
    _takes_sparse = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.5**0.5,
        beta: float = 1.0,
        v0: float | Tensor | list[Tensor] = 50.0,
        *,
        weight_decay: float = 0.0,
        rest_lr: float = 0.1,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings(locals()))

    @classmethod
    def from_sgd(cls, params: Iterable[dict[str, Any]], lr: float, weight_decay: float = 0.0) -> Self:
        """The AdaGradG that SGD with this rate and L2 from the present radii is equivalent to (Theorem 4).

        Args:
            params: param groups; `Groups.param_groups()` makes them.
            lr: SGD's rate η, also of the parameters without rows.
            weight_decay: SGD's L2 coefficient λ, also of the parameters without rows.
        """
        groups = []
        for group in params:
            if not isinstance(group, dict):
                raise TypeError(f"params must be param groups, of which some have rows, got {type(group).__name__}")
            if group.get("rows") is None:
                groups.append({**group, "lr": lr, "weight_decay": weight_decay})
                continue
            members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            tensors = [(member[1] if isinstance(member, tuple) else member).detach() for member in members]
            layout, count = Layout(group["rows"]), len(tensors)
            rows = [layout.join(tensors)] * count if group.get("joint") else [layout.rows(each) for each in tensors]
            made = [adagradg_from_sgd(lr, weight_decay, geometry.norm(each).squeeze(1)) for each in rows]
            groups.append({**group, **made[0], "params": members, "v0": [each["v0"] for each in made]})
        return cls(groups)

    def _check(self, group: Options) -> None:
        super()._check(group)
        v0 = group["v0"]
        if isinstance(v0, list):
            check(len(v0) == len(group["params"]), "v0", v0, "a list with one tensor for each parameter")
        for each in v0 if isinstance(v0, list) else [v0]:
            fine = bool((each > 0).all()) if isinstance(each, Tensor) else is_number(each) and each > 0
            check(fine, "v0", each, "positive: a number, or a tensor with one for each row")

    def _entries(self, group: Options) -> tuple[str, ...]:
        return ("sum",) if self._updates_rows(group) else ()

    def _new_state(self, param: Tensor, group: Options) -> State:
        state, v0 = super()._new_state(param, group), group["v0"]
        for v in state.values():
            if isinstance(v0, list):
                v0 = next(each for each, other in zip(v0, group["params"], strict=True) if other is param)
            v0 = torch.as_tensor(v0, dtype=v.dtype, device=v.device)
            check(v0.numel() in (1, len(v)), "v0", tuple(v0.shape), f"one number for each of {len(v)} rows")
            fill(v, v0.reshape(-1).expand(len(v)))
        return state

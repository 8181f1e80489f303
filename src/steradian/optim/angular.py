"""Angular: the rate is the angle by which a radially invariant row turns in a step."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo as untraced

from steradian.optim import reference, torch_updates
from steradian.optim.base import Params, RowOptimizer, settings
from steradian.optim.checks import Options, check
from steradian.optim.rows import RowSet, State, by_shape

__all__ = ["Angular"]

_REST_RATES = {"sgd": 0.1, "adamw": 1e-3}


class Angular(RowOptimizer, emits=True):
    """Every row turns by `lr` radians per step and keeps its radius; SGD or AdamW on the other parameters.

    On a row x = r u with h = r∇L(x)^⊥, which is ∇L(u): m ← β m + h;  n = m, with Nesterov n = h + β m;
    u' = Exp_u(−θ d/‖d‖);  x' = r u';  m is transported from u to u' (the general isometry). The scale of the loss, the
    radius of the row and weight decay have no effect on the directions.

    | direction | d |
    |---|---|
    | "gradient" | n |
    | "adam" | (n ⊘ √(V/(1−β2^t)))^⊥ with V ← β2 V + (1−β2) h² element-wise, 0/0 = 0 |
    | "muon" | NS(n)^⊥: the five Newton–Schulz steps of `torch.optim.Muon` |

    | spread | θ |
    |---|---|
    | "equal" | lr |
    | "rms" | min(lr ‖d‖/√(v/(1−β2^t)), ½) with v ← β2 v + (1−β2)‖d‖²: lr in the root mean square over time |

    Newton–Schulz takes the matrix of all rows of a parameter, or of each block where rows are blocks, such as heads: in
    bfloat16 on an accelerator, in float32 on a CPU, in float64 for float64 parameters. If parameters are sharded
    (FSDP2), "muon" gathers the momentum of each matrix in every step; the other directions communicate nothing.

    A row whose h is 0, up to the rounding of a radial gradient, does not turn, and m ← β m (dead filters, idle
    experts). A row without a direction does not turn either. A row whose ‖h‖² is not finite takes no step.

    Args:
        params: parameters, or param groups with the keys "rows" and "joint" (`Groups.param_groups()`).
        lr: the angle in radians, 0 ≤ lr ≤ 0.5, a number or a tensor.
        momentum: β, also of the parameters without rows (β1 of AdamW).
        beta2: β2 of V and v, and of AdamW.
        direction: "gradient", "adam" or "muon".
        spread: "equal" or "rms".
        nesterov: Nesterov's momentum, also in SGD of the parameters without rows.
        weight_decay: λ of the parameters without rows; rows have none.
        rest: the update of the parameters without rows, "sgd" (with momentum) or "adamw".
        rest_lr: rate of param groups without rows that give none; None for 0.1 (sgd) or 1e-3 (adamw).
        maximize: ascend.
        capturable: keep the step count on the device, for graphs.
        fused: None for the fused step where there is an NVIDIA GPU that it runs on (directions "gradient" and "muon");
            False for the plain step. True to have an error where it cannot be fused.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.randn(8, 3))
    >>> optimizer = Angular([{"params": [weight], "rows": "filter"}], lr=0.01)
    """

    update = staticmethod(reference.angular)
    _has_fused = True
    row_state = frozenset({"norm_sq"})
    _marks = frozenset({"direction", "spread"})
    _fixes_radius = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        *,
        beta2: float = 0.99,
        direction: str = "gradient",
        spread: str = "equal",
        nesterov: bool = False,
        weight_decay: float = 0.0,
        rest: str = "sgd",
        rest_lr: float | None = None,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        rest_lr = _REST_RATES.get(rest, 0.0) if rest_lr is None else rest_lr
        self.defaults = settings(locals())
        self._check({**self.defaults, "rows": "filter"})  # param groups without rows have `rest_lr` in the place of lr
        super().__init__(params, self.defaults)

    def _check(self, group: Options) -> None:
        super()._check(group)
        momentum, direction = group["momentum"], group["direction"]
        _check_angles([group])
        check(momentum < 1, "momentum", momentum, "a number in [0, 1)")
        fine = not group["fused"] or direction != "adam"
        check(fine, "fused", group["fused"], f"None or False for the direction {direction!r}")
        check(not group["nesterov"] or momentum > 0, "nesterov", group["nesterov"], "False without momentum")

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step, as `RowOptimizer.step`; a ValueError if a scheduler has made an angle of more than 0.5."""
        _check_angles(self.param_groups)
        return super().step(closure)

    def _is_fused(self, group: Options) -> bool:
        return group["direction"] != "adam" and super()._is_fused(group)

    def _entries(self, group: Options) -> tuple[str, ...]:
        if not self._updates_rows(group):
            return super()._entries(group) if group["rest"] == "adamw" else ()
        second = ("exp_avg_sq",) if group["direction"] == "adam" else ()
        return ("step", "momentum_buffer", *second, *(self.row_state if group["spread"] == "rms" else ()))

    def _together(self, sets: list[RowSet], group: Options) -> Iterable[RowSet]:
        return by_shape(sets) if group["direction"] == "muon" else super()._together(sets, group)

    def _step_rest(self, params: list[Tensor], states: list[State], group: Options) -> None:
        if group["rest"] == "sgd":
            torch_updates.sgd(params, states, group)
        else:
            betas = group["momentum"], group["beta2"]
            settings = {**group, "betas": betas, "eps": 1e-8, "decoupled_weight_decay": True}
            torch_updates.adam(params, states, settings)


@untraced
def _check_angles(groups: list[Options]) -> None:
    for lr in (group["lr"] for group in groups if group.get("rows") is not None):
        known = not isinstance(lr, Tensor) or lr.device.type == "cpu"  # that of an accelerator is not read
        check(not known or float(lr) <= 0.5, "lr", lr, "an angle of at most 0.5 radians on rows")

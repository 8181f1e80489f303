"""Optimizers of other authors that keep weights on spheres, written from their formulas.

N(·) is division by the norm. Both keep the norm that a row or tensor starts with; the rest gets SGD with momentum.
"""

from typing import Any

from torch import Tensor

from steradian.geometry import dot, norm
from steradian.optim import RowOptimizer, torch_updates
from steradian.optim.base import Params
from steradian.optim.reference import orthogonalized
from steradian.optim.rows import Options, RowSet, by_shape, rate_of
from steradian.optim.transport import emit

__all__ = ["Hyperball", "Rotational"]


def _rotational(rows: RowSet, group: Options) -> None:
    """`Rotational` on the rows of a parameter; a row whose u^⊥ was always 0 stays."""
    corrected = 1 - _KEPT ** rows.advance()
    theta = (2 * group["weight_decay"] / (1 + group["momentum"]) * rate_of(group)) ** 0.5
    mean = rows.number("norm_sq")
    for piece, (x, gradient, m) in rows.pieces("param", "grad", "momentum_buffer"):
        r = norm(x)
        m.mul_(group["momentum"]).add_(gradient)
        across = m - dot(m, x) / r.square() * x
        mean[piece] = _KEPT * mean[piece] + (1 - _KEPT) * norm(across).square()
        pace = theta * r / (mean[piece] / corrected).sqrt().to(x.dtype)
        pace = pace.masked_fill(mean[piece] == 0, 0)
        _land(rows, piece, x, x - pace * across, gradient, pace)


def _hyperball(rows: RowSet, group: Options) -> None:
    """`Hyperball` on rows of one shape; a row whose u is 0 stays."""
    rows.advance()
    beta = group["momentum"]
    for piece, (x, gradient, m) in rows.pieces("param", "grad", "momentum_buffer"):
        m.mul_(beta).add_(gradient)
        u = rows.on_matrices(orthogonalized, gradient.add(m, alpha=beta))
        length = norm(u)
        pace = (rate_of(group) * norm(x) / length).masked_fill(length == 0, 0)
        _land(rows, piece, x, x - pace * u, gradient, pace)


def _land(rows: RowSet, piece: slice, x: Tensor, y: Tensor, gradient: Tensor, pace: Tensor) -> None:
    """Move x to the point on its sphere in the direction of y."""
    landed = y * (norm(x) / norm(y))
    if rows.telemetry is not None:
        emit(rows, piece, x, y, gradient, pace=pace, end=landed)
    x.copy_(landed)


_KEPT = 0.9  # of the mean of ‖u^⊥‖² in a step


class Rotational(RowOptimizer, emits=True):
    """The rotational variant of SGD with momentum (Kosson et al., Rotational Equilibrium, 2023).

    m ← β m + ∇L(x);  u^⊥ = m − ⟨m,x⟩x/r²;  s² ← 0.9 s² + 0.1‖u^⊥‖² (bias-corrected);
    x' = r N(x − θ r u^⊥/s) with θ = √(2ηλ/(1+β)), the angle of SGD with momentum in equilibrium. Rows are not centred,
    which the authors' code does by default.

    Args:
        params: param groups with the key "rows".
        lr: η, a number or a tensor.
        momentum: β.
        weight_decay: λ; on parameters without rows it is L2.
        rest_lr: rate of param groups without rows that give none.
        capturable: keep the step count on the device, for graphs.
    """

    update = staticmethod(_rotational)
    row_state = frozenset({"norm_sq"})
    _marks = frozenset({"rest_lr"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        rest_lr: float = 0.1,
        capturable: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rest_lr": rest_lr}
        super().__init__(params, {**defaults, "capturable": capturable, "nesterov": False, "maximize": False})

    def _entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "momentum_buffer", *self.row_state) if group.get("rows") is not None else ()

    def _step_rest(self, params: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> None:
        torch_updates.sgd(params, states, {**group, "dampening": 0.0})


class Hyperball(Rotational, emits=True):
    """Hyperball with Muon's direction (2026), on whole tensors of fixed Frobenius norm R, or on other rows.

    m ← β m + ∇L(W);  u = NS(∇L(W) + β m), the five Newton–Schulz steps of `torch.optim.Muon`;  W' = R N(W − η R N(u)).
    A row turns by arctan η if u is orthogonal to it. The momentum is not transported.

    Args:
        params: param groups with the key "rows"; the authors' have the spec "tensor".
        **options: as for `Rotational`; weight_decay is L2 of parameters without rows.
    """

    update = staticmethod(_hyperball)
    row_state = frozenset()

    def _together(self, sets: list[RowSet], group: dict[str, Any]) -> list[RowSet]:
        return list(by_shape(sets))

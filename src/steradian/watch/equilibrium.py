r"""The radius and angle at which growth and weight decay balance, for the optimizers where they can be derived.

A row x of radius r has a gradient across it, ‖∇L(x)‖ = γ/r with γ = ‖∇L(u)‖ (Lemma 1). Steps across the row make it
longer, weight decay makes it shorter. If gradients of successive steps are uncorrelated (noise dominates, as it does
late in training at a constant rate), both per-step changes of r² are known to leading order in ηλ:

- A gradient g enters a momentum with weights (1−β)β^k, k = 0, 1, …: as a random walk, the row gains the square of the
  *whole* contribution, while one step moves by the square root of the sum of squares, which is smaller by
  √((1−β)/(1+β)). With momentum carried along (without (b)) the momentum stays tangent, and only the squares of the
  single steps count.
- **SGD**, x' = x − ηm, m = βm + g + λx: growth η²γ²/((1−β)²r²), decay 2ηλr²/(1−β), so
  r⁴ = ηγ²/(2λ(1−β)) and θ² = 2ηλ/(1+β).
- **Adam, decoupled decay**: a normalized step has norm √d, growth η²d, decay 2ηλr², so
  r² = ηd/(2λ) and θ² = 2ηλ(1−β1)/(1+β1).
- **Adam, coupled decay**: λx is divided by √v = γ/(r√d) too, decay 2ηλr³√d/γ, so r³ = ηγ√d/(2λ) and
  θ = η√(d(1−β1)/(1+β1))/r.
- **Without (b)** growth is that of single steps, and coupled decay acts on x alone, with (1−β1) of its weight: for
  Adam r³ = ηγ√d/(2λ(1+β1)); decoupled, r² = ηd(1−β1)/(2λ(1+β1)) and θ² = 2ηλ; for SGD
  r⁴ = ηγ²/(2λ(1−β²)) and θ² = 2ηλ. The radius is constant in equilibrium, so (c) changes nothing, and a second moment
  per row, (a), has the same norm.

See van Laarhoven, *L2 regularization versus batch and weight normalization* (2017); Li and Arora, *An exponential
learning rate schedule for deep learning* (2020); Wan et al., *Spherical motion dynamics* (2021); Kosson, Messmer and
Jaggi, *Rotational equilibrium* (2024), for the first two; the others follow in the same way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import optim

__all__ = ["Balance", "balance_of"]


@dataclass(frozen=True)
class Balance:
    """Where the rows of a group come to rest: r = (gain·η·γ^power)^(1/root), θ² = pace·η, or θ = pace·η/r.

    Attributes:
        gain: the factor under the root.
        power: of γ = ‖∇L(u)‖.
        root: 4 for SGD, 2 for Adam with decoupled decay, 3 with coupled.
        pace: the factor of the angle.
        free: the angle is √(pace·η) whatever the radius (SGD); otherwise pace·η/r.

    All may be tensors with one number per step and row.
    """

    gain: float | Tensor
    power: float | Tensor
    root: float | Tensor
    pace: float | Tensor
    free: bool | Tensor

    def __call__(self, rate: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Radius and angle in equilibrium, from the rate η and γ = ‖∇L(u)‖."""
        gain, power, root, pace, free = (
            torch.as_tensor(value, device=slope.device)
            for value in (self.gain, self.power, self.root, self.pace, self.free)
        )
        radius = (gain * rate * slope**power) ** (1 / root)
        steady = pace * rate / radius.masked_fill(radius == 0, math.inf)
        return radius, torch.where(free, (pace * rate).sqrt(), steady)

    @staticmethod
    def of_rows(
        balances: "Sequence[Sequence[Balance | str]]",
        rows: Tensor,
        steps: Tensor,
        *,
        send: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> "Balance | None":
        """One balance for all rows of several groups in several steps, (steps, rows); None where no group has one.

        Args:
            balances: of each group, under each of some settings; NaN stands where there is none.
            rows: the group of each row, on the device.
            steps: the settings of each step, by their place in `balances`, on the host.
            send: brings a tensor to the device.
            dtype: of the numbers there.
        """
        known = [[balance if isinstance(balance, Balance) else None for balance in under] for under in balances]
        if not any(any(under) for under in known):
            return None

        def column(name: str) -> Tensor:
            missing = False if name == "free" else math.nan
            values = torch.tensor(
                [[missing if balance is None else getattr(balance, name) for balance in under] for under in known],
                dtype=torch.bool if name == "free" else dtype,
                device="cpu",
            )
            return send(values[steps])[:, rows]

        return Balance(*(column(name) for name in ("gain", "power", "root", "pace", "free")))


def balance_of(optimizer: Optimizer, options: Mapping[str, Any], size: int) -> Balance | str:
    """The equilibrium of rows under these settings, or why there is none to tell.

    Args:
        optimizer: torch's or our SGD, Adam or AdamW; of any other nothing is told.
        options: the param group of the rows.
        size: the number d of entries in a row.

    Returns:
        A function of the rate and of γ = ‖∇L(u)‖ that gives radius and angle; or words for a person.

    >>> x = torch.nn.Parameter(torch.ones(1, 8))
    >>> adamw = torch.optim.AdamW([x], lr=0.1, weight_decay=0.05)
    >>> radius, angle = balance_of(adamw, adamw.param_groups[0], 8)(torch.tensor(0.1), torch.tensor(1.0))
    >>> round(radius.item(), 3), round(angle.item(), 4)
    (2.828, 0.0229)
    """
    decay = options.get("weight_decay", 0)
    if isinstance(decay, Tensor):
        decay = decay.item()
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | optim.SGD | optim.Adam):
        return f"no equilibrium is derived for {kind.__module__}.{kind.__qualname__}"
    if not decay:
        return "there is no weight decay: the radius only grows"
    if options.get("amsgrad"):
        return "no equilibrium is derived for amsgrad"
    without = options.get("without", "") if options.get("rows") is not None else ""
    if isinstance(optimizer, torch.optim.SGD | optim.SGD):
        return _sgd(options, float(decay), carried="b" in without and bool(options.get("momentum")))
    beta1 = options["betas"][0]
    beta1 = beta1.item() if isinstance(beta1, Tensor) else float(beta1)
    decoupled = bool(options.get("decoupled_weight_decay"))
    return _adam(beta1, float(decay), size, decoupled=decoupled, carried="b" in without)


def _sgd(options: Mapping[str, Any], decay: float, *, carried: bool) -> Balance:
    beta, damped = float(options.get("momentum", 0)), 1 - float(options.get("dampening", 0) or 0)
    if not beta:
        damped = 1.0
    # Squares of the weights with which a gradient enters the steps that follow it.
    squares = 1 / (1 - beta**2)
    if options.get("nesterov"):
        squares = (1 + beta) ** 2 + beta**4 / (1 - beta**2)
    whole = 1 / (1 - beta) ** 2 if not carried else squares
    # How often λx enters: through the momentum, or once, twice with Nesterov.
    held = 1 / (1 - beta) if not carried else 1 + beta * bool(options.get("nesterov"))

    gain, pace = damped * whole / (2 * decay * held), damped * 2 * decay * held * squares / whole
    return Balance(gain, power=2, root=4, pace=pace, free=True)


def _adam(beta1: float, decay: float, size: int, *, decoupled: bool, carried: bool) -> Balance:
    single = (1 - beta1) / (1 + beta1)  # square of one step over that of the whole contribution
    growth = single if carried else 1.0
    held = (1 - beta1) if carried and not decoupled else 1.0

    pace = (size * single) ** 0.5
    if decoupled:
        return Balance(size * growth / (2 * decay), power=0, root=2, pace=pace, free=False)
    return Balance(size**0.5 * growth / (2 * decay * held), power=1, root=3, pace=pace, free=False)

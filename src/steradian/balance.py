r"""The radius and angle at which growth and weight decay balance, for the optimizers where they can be derived.

The gradient of a row x of radius r is orthogonal to it, ‖∇L(x)‖ = γ/r with γ = ‖∇L(u)‖ (Lemma 1). Steps orthogonal to
the row make it longer, weight decay makes it shorter. If gradients of successive steps are uncorrelated (noise
dominates, as it does late in training at a constant rate), both changes of r² per step are known to leading order in
ηλ:

- A gradient g enters a momentum with weights (1−β)β^k, k = 0, 1, …. As in a random walk, the row gains the square of
  the *whole* contribution, while one step moves by the square root of the sum of squares, which is smaller by
  √((1−β)/(1+β)). If the momentum is transported with the row (without (b)), it stays tangent, and only the squares of
  the single steps count.
- **SGD**, x' = x − ηm, m = βm + g + λx: growth η²γ²/((1−β)²r²), decay 2ηλr²/(1−β), so
  r⁴ = ηγ²/(2λ(1−β)) and θ² = 2ηλ/(1+β).
- **Adam, decoupled decay**: a normalized step has norm √d, growth η²d, decay 2ηλr², so
  r² = ηd/(2λ) and θ² = 2ηλ(1−β1)/(1+β1).
- **Muon**: a step has one norm whatever the gradients, so its growth is that of Adam's and θ² is the same. With
  Nesterov, as in NAdam, a step contains more of the newest gradient: θ² = 2ηλ(1−β)²((1+β)² + β⁴/(1−β²)).
- **Lion**: a step has the norm √d too, and its signs are correlated as in `lion`.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Muon, NAdam, Optimizer, RAdam

__all__ = ["Balance", "Balanced", "adam", "balance_of", "lion", "muon", "register", "sgd"]


@dataclass(frozen=True)
class Balance:
    """The equilibrium of a group's rows: r = (gain·η·γ^power)^(1/root), and θ² = pace·η or θ = pace·η/r.

    Attributes:
        gain: the factor under the root.
        power: of γ = ‖∇L(u)‖.
        root: 4 for SGD, 2 for Adam with decoupled decay, 3 with coupled.
        pace: the factor of the angle.
        free: the angle is √(pace·η), independent of the radius (SGD); otherwise pace·η/r.

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


Balanced = Callable[[Mapping[str, Any], int], Balance]
"""The equilibrium under the settings of a param group, for rows of a size d; `register` adds it to a class."""
_balances: dict[type[Optimizer], Balanced] = {}


def register(kind: type[Optimizer]) -> Callable[[Balanced], Balanced]:
    """Decorator: this function gives the equilibrium of this class of optimizer and of its subclasses.

    It is called only for param groups with weight decay.

    >>> class Halved(torch.optim.SGD):
    ...     "SGD at half of its rate."
    >>> @register(Halved)
    ... def halved(settings, size):
    ...     balance = sgd(settings, size)
    ...     return Balance(balance.gain / 2, balance.power, balance.root, balance.pace / 2, balance.free)
    """

    def add(balanced: Balanced) -> Balanced:
        _balances[kind] = balanced
        return balanced

    return add


def balance_of(optimizer: Optimizer, settings: Mapping[str, Any], size: int) -> Balance | str:
    """The equilibrium of rows under these settings, or the reason why there is none.

    Args:
        optimizer: torch's or our SGD, Adam or AdamW, or one whose class was registered.
        settings: the param group of the rows.
        size: the number d of entries in a row.

    Returns:
        A function of the rate and of γ = ‖∇L(u)‖ that gives radius and angle; or a sentence for a person.

    >>> x = torch.nn.Parameter(torch.ones(1, 8))
    >>> adamw = torch.optim.AdamW([x], lr=0.1, weight_decay=0.05)
    >>> radius, angle = balance_of(adamw, adamw.param_groups[0], 8)(torch.tensor(0.1), torch.tensor(1.0))
    >>> round(radius.item(), 3), round(angle.item(), 4)
    (2.828, 0.0229)
    """
    kind = type(optimizer)
    balanced = next((_balances[each] for each in kind.__mro__ if each in _balances), _named.get(kind.__name__))
    if balanced is None:
        return f"no equilibrium is derived for {kind.__module__}.{kind.__qualname__}"
    if not _number(settings.get("weight_decay", 0)):
        return "there is no weight decay: the radius only grows"
    if settings.get("amsgrad"):
        return "no equilibrium is derived for amsgrad"
    return balanced(settings, size)


@register(SGD)
def sgd(settings: Mapping[str, Any], size: int) -> Balance:
    """SGD with L2: r⁴ = ηγ²/(2λ(1−β)), θ² = 2ηλ/(1+β); with dampening, Nesterov, or without (b) as well.

    Args:
        settings: a param group; "without" counts if it has "rows", as ours do.
        size: not used.
    """
    beta, damped = float(settings.get("momentum", 0)), 1 - float(settings.get("dampening", 0) or 0)
    decay, transported = _number(settings["weight_decay"]), bool(beta) and _transported(settings)
    if not beta:
        damped = 1.0
    # Squares of the weights with which a gradient enters the steps that follow it.
    squares = 1 / (1 - beta**2)
    if settings.get("nesterov"):
        squares = (1 + beta) ** 2 + beta**4 / (1 - beta**2)
    whole = squares if transported else 1 / (1 - beta) ** 2
    # How often λx enters: through the momentum, or once, twice with Nesterov.
    entered = 1 + beta * bool(settings.get("nesterov")) if transported else 1 / (1 - beta)
    gain, pace = damped * whole / (2 * decay * entered), damped * 2 * decay * entered * squares / whole
    return Balance(gain, power=2, root=4, pace=pace, free=True)


@register(NAdam)
@register(RAdam)
@register(Adam)
def adam(settings: Mapping[str, Any], size: int) -> Balance:
    """Adam, RAdam, NAdam: r³ = ηγ√d/(2λ), or decoupled r² = ηd/(2λ); θ = η√(d(1−β1)/(1+β1))/r; or without (b).

    Args:
        settings: a param group; "without" counts if it has "rows", as ours do.
        size: the number d of entries in a row.
    """
    beta1, decay = _number(settings["betas"][0]), _number(settings["weight_decay"])
    transported, decoupled = _transported(settings), bool(settings.get("decoupled_weight_decay"))
    single = _single(beta1, nesterov="momentum_decay" in settings)  # NAdam's factor has approached β1
    growth = single if transported else 1.0
    entered = (1 - beta1) if transported and not decoupled else 1.0
    pace = (size * single) ** 0.5
    if decoupled:
        return Balance(size * growth / (2 * decay), power=0, root=2, pace=pace, free=False)
    return Balance(size**0.5 * growth / (2 * decay * entered), power=1, root=3, pace=pace, free=False)


@register(Muon)
def muon(settings: Mapping[str, Any], size: int) -> Balance:
    """Muon: every step has one length, as Adam's with decoupled decay, so θ² = 2ηλ(1−β)/(1+β); more with Nesterov.

    The radius is not derived: it depends on the shape of the matrix and on how exact the orthogonalization is.
    """
    beta, decay = _number(settings["momentum"]), _number(settings["weight_decay"])
    pace = 2 * decay * _single(beta, nesterov=bool(settings.get("nesterov")))
    return Balance(math.nan, power=0, root=2, pace=pace, free=True)


def lion(settings: Mapping[str, Any], size: int) -> Balance:
    """Lion: every step has the norm √d, and r² = ηds/(2λ), θ² = 2ηλ/s with s the sum of the correlations of steps.

    A step is the sign of c = β1 m + (1−β1)∇L(x). Signs of Gaussian numbers of correlation ρ have the correlation
    (2/π) asin ρ, and c at a distance of k ≥ 1 steps has ρ_k ∝ β2^k. The momentum lasts so long that decay acts on what
    it added: s = 1 + (4/π) Σ (1−ηλ)^k asin ρ_k.

    Args:
        settings: a param group.
        size: the number d of entries in a row.
    """
    beta1, beta2 = (_number(beta) for beta in settings["betas"])
    decay = _number(settings["weight_decay"])
    kept = 1 - _number(settings.get("lr", 0)) * decay
    older = (beta1 * (1 - beta2)) ** 2 / (1 - beta2**2)
    first = (beta1 * (1 - beta1) * (1 - beta2) + beta2 * older) / ((1 - beta1) ** 2 + older)
    powers = range(1, 120, 2)  # of asin's series, whose terms are summed over k one by one
    asin = (math.comb(n - 1, n // 2) / 2 ** (n - 1) / n * first**n for n in powers)
    total = 1 + 4 / math.pi * sum(kept * term / (1 - kept * beta2**n) for n, term in zip(powers, asin, strict=True))
    return Balance(size * total / (2 * decay), power=0, root=2, pace=size**0.5, free=False)


_named: dict[str, Balanced] = {"Lion": lion}
"""Optimizers of other libraries, by the names of their classes."""


def _single(beta: float, *, nesterov: bool) -> float:
    """The square of one step over that of the whole contribution of a gradient, whose weights are (1−β)β^k.

    With Nesterov they are (1−β)(1+β) for the newest gradient and (1−β)β^(k+1) for older ones.
    """
    if nesterov:
        return (1 - beta) ** 2 * ((1 + beta) ** 2 + beta**4 / (1 - beta**2))
    return (1 - beta) / (1 + beta)


def _transported(settings: Mapping[str, Any]) -> bool:
    """Whether the momentum moves with its rows: without (b)."""
    return settings.get("rows") is not None and "b" in settings.get("without", "")


def _number(setting: float | Tensor) -> float:
    return setting.item() if isinstance(setting, Tensor) else float(setting or 0)

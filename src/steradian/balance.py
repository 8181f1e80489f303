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

**Under a schedule** the radius follows: with r* and θ* the equilibrium at the rate of a step, r² changes by the factor
1 + δ((r*/r)^k − 1), where k = 4 for SGD, 2 for decoupled and 3 for coupled Adam, and δ is the decay of r² in a step:
2ηλ/(1−β), 2ηλ, 2ηλr√d/γ. The angle is θ*(r*/r)² for SGD and θ*r*/r for the others. Adam's √v remembers γ/r of the past:
its steps are κ times as long, with κ² the present (γ/r)² over its mean with β2. `equilibrium` integrates this.

See van Laarhoven, *L2 regularization versus batch and weight normalization* (2017); Li and Arora, *An exponential
learning rate schedule for deep learning* (2020); Wan et al., *Spherical motion dynamics* (2021); Kosson, Messmer and
Jaggi, *Rotational equilibrium* (2024), for the first two; the others follow in the same way.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Muon, NAdam, Optimizer, RAdam

from steradian.groups import Groups, Layout

__all__ = [
    "Balance",
    "Balanced",
    "Equilibrium",
    "adam",
    "balance_of",
    "equilibrium",
    "lion",
    "muon",
    "register",
    "register_angle",
    "sgd",
]


@dataclass(frozen=True)
class Balance:
    """The equilibrium of a group's rows: r = (gain·η·γ^power)^(1/root), and θ² = pace·η or θ = pace·η/r.

    Attributes:
        gain: the factor under the root.
        power: of γ = ‖∇L(u)‖.
        root: 4 for SGD, 2 for Adam with decoupled decay, 3 with coupled.
        pace: the factor of the angle.
        free: the angle is √(pace·η), independent of the radius (SGD); otherwise pace·η/r.
        shrink: what r² loses in a step, over η; times r/γ where the decay is coupled and divided (root 3).

    All may be tensors with one number per step and row.
    """

    gain: float | Tensor
    power: float | Tensor
    root: float | Tensor
    pace: float | Tensor
    free: bool | Tensor
    shrink: float | Tensor = math.nan

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
_by_angle: set[type[Optimizer]] = set()


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


def register_angle(kind: type[Optimizer]) -> None:
    """The rate of this class of optimizer is the angle by which rows turn, and their radii stay."""
    _by_angle.add(kind)


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
    if not _by_angle.isdisjoint(kind.__mro__):
        return f"rows turn by the rate of {kind.__name__} and keep their radius: nothing has to balance"
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
    return Balance(gain, power=2, root=4, pace=pace, free=True, shrink=2 * decay * entered)


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
        return Balance(size * growth / (2 * decay), power=0, root=2, pace=pace, free=False, shrink=2 * decay)
    gain, shrink = size**0.5 * growth / (2 * decay * entered), 2 * decay * entered * size**0.5
    return Balance(gain, power=1, root=3, pace=pace, free=False, shrink=shrink)


@register(Muon)
def muon(settings: Mapping[str, Any], size: int) -> Balance:
    """Muon: every step has one length, as Adam's with decoupled decay, so θ² = 2ηλ(1−β)/(1+β); more with Nesterov.

    The radius is not derived: it depends on the shape of the matrix and on how exact the orthogonalization is.
    """
    beta, decay = _number(settings["momentum"]), _number(settings["weight_decay"])
    pace = 2 * decay * _single(beta, nesterov=bool(settings.get("nesterov")))
    return Balance(math.nan, power=0, root=2, pace=pace, free=True, shrink=2 * decay)


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
    return Balance(size * total / (2 * decay), power=0, root=2, pace=size**0.5, free=False, shrink=2 * decay)


_named: dict[str, Balanced] = {"Lion": lion}
"""Optimizers of other libraries, by the names of their classes."""


# Under a schedule ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equilibrium:
    """What `equilibrium` says about the rows of one group.

    Attributes:
        name: the parameters, or "param group k".
        angle: in radians per step: a number, or with `rates` one for each step; NaN if it is not known.
        radius: of a row, likewise.
        steps: after how many steps at the present rate 5 % of a disturbance of r² are left; inf without decay.
        note: what the prediction does not know, or takes for granted; may be empty.
    """

    name: str
    angle: float | Tensor
    radius: float | Tensor
    steps: float
    note: str = ""


def equilibrium(
    optimizer: Optimizer,
    groups: Groups | None = None,
    *,
    rates: Sequence[float] | Tensor | None = None,
    slopes: float | Sequence[float] | Tensor | Mapping[str, Any] | None = None,
    radius: float | Mapping[str, float] | None = None,
) -> list[Equilibrium]:
    """The angle and radius of rows where growth and weight decay balance, or on the way there under a schedule.

    r² ← r²(1 + δ((r*/r)^k − 1)) over the rates to come, with r* and θ* in equilibrium at each rate (see above). With
    Adam and decoupled decay this follows from the settings. SGD and coupled Adam need γ = ‖∇L(u)‖ over time: without
    `slopes` it is taken as constant, and the rows as in equilibrium at the first rate.

    Args:
        optimizer: torch's or our SGD, Adam or AdamW, `torch.optim.Muon`, Angular, or one whose class was registered.
        groups: the rows; one result for each of its groups. None: one for each param group of the optimizer.
        rates: the rate of each step to come. None: the present one, for ever.
        slopes: γ of each step, from a recorded run (radius times gradient norm), or one number; a mapping has one for
            each group, by the name of its first parameter.
        radius: of the rows before the first step, or a mapping likewise. None: the root mean square of the rows now.

    >>> x = torch.nn.Parameter(torch.ones(1, 8))
    >>> [found] = equilibrium(torch.optim.AdamW([x], lr=0.1, weight_decay=0.05))
    >>> round(found.angle, 4), round(found.steps)
    (0.0229, 300)
    """
    found = []
    for name, settings, size, now in _rows_of(optimizer, groups):
        gamma = slopes.get(name) if isinstance(slopes, Mapping) else slopes
        start = radius.get(name, now) if isinstance(radius, Mapping) else now if radius is None else radius
        found.append(_predicted(optimizer, name, settings, size, rates, gamma, start))
    return found


def _rows_of(optimizer: Optimizer, groups: Groups | None) -> Iterator[tuple[str, Mapping[str, Any], int | None, float]]:
    """Name, settings, size of a row (None: not known) and root mean square radius of each group.

    Without a size the radius is that of one entry.
    """
    if groups is None:
        for k, settings in enumerate(optimizer.param_groups):
            params = [param.detach() for param in settings["params"]]
            entries = sum(param.numel() for param in params)
            squares = sum(float(param.float().square().sum()) for param in params)
            yield f"param group {k}", settings, None, (squares / max(entries, 1)) ** 0.5
        return
    of_param = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    for group in groups.groups:
        params = [groups.params[name] for name in group.names]
        if id(params[0]) in of_param:
            rows = Layout(group.spec).join([param.detach().float() for param in params])
            yield group.names[0], of_param[id(params[0])], group.size, float(rows.square().sum(1).mean().sqrt())


def _predicted(
    optimizer: Optimizer,
    name: str,
    settings: Mapping[str, Any],
    size: int | None,
    rates: Sequence[float] | Tensor | None,
    slopes: Any,
    start: float,
) -> Equilibrium:
    present = _number(settings["lr"])
    path = [present] if rates is None else [float(rate) for rate in rates]
    if not _by_angle.isdisjoint(type(optimizer).__mro__):
        turned = present if rates is None else torch.tensor(path, dtype=torch.float64)
        return Equilibrium(name, turned, start if size else math.nan, 0.0, "rows turn by the rate")
    known: dict[float, Balance | str] = {}
    for rate in path:
        if rate not in known:
            known[rate] = balance_of(optimizer, {**settings, "lr": rate}, size or 1)
    first = known[path[0]]
    if isinstance(first, str):
        return Equilibrium(name, math.nan, math.nan, math.inf, first)
    notes = []
    hidden = bool(first.root == 2 and first.free)  # Muon: its steps have one unknown length, here 1
    if first.power and slopes is None:
        notes.append("the slopes ‖∇L(u)‖ are taken as constant, and the rows as in equilibrium at the first rate")
    if hidden and rates is not None:
        notes.append("the rows are taken as in equilibrium at the first rate")
    if size is None and not first.power:
        notes.append("the radius needs groups")
    series = slopes if isinstance(slopes, Sequence | Tensor) and not _is_single(slopes) else None
    if series is not None and len(series) != len(path):
        raise ValueError(f"slopes must have one number for each of the {len(path)} rates, got {len(series)}")
    r, angles, radii, steps, mean = start, [], [], math.inf, 0.0
    beta2 = _number(settings["betas"][1]) if "betas" in settings else 0.0
    for k, rate in enumerate(path):
        balance = known[rate]
        assert isinstance(balance, Balance), "the settings of one group"
        gamma = 1.0 if slopes is None else float(slopes if series is None else series[k])
        target, angle = _at(balance, rate, gamma, hidden=hidden)
        if rates is None or (k == 0 and (hidden or (first.power and slopes is None))):
            r = target
        coupled = balance.root == 3
        shrink = rate * float(balance.shrink) * (r / gamma if coupled and gamma else 1.0)
        if k == 0 and shrink:
            steps = 3 / (shrink * float(balance.root) / 2)
        mean = beta2 * mean + (1 - beta2) * (gamma / r) ** 2 if r else mean
        longer = gamma / r / (mean / (1 - beta2 ** (k + 1))) ** 0.5 if mean else 1.0
        angles.append(angle * (target / r) ** (2 if balance.root == 4 else 1) * longer if r else math.nan)
        radii.append(r)
        if r:
            growth = (target / r) ** float(balance.root) * longer**2
            r *= max(1 + shrink * (growth - (longer if coupled else 1.0)), 0.0) ** 0.5
    unknown = hidden or (first.power and slopes is None) or (size is None and not first.power)
    if rates is None:
        return Equilibrium(name, angles[0], math.nan if unknown else radii[0], steps, "; ".join(notes))
    of_radii = [math.nan] * len(radii) if unknown else radii
    turned, reached = (torch.tensor(values, dtype=torch.float64) for values in (angles, of_radii))
    return Equilibrium(name, turned, reached, steps, "; ".join(notes))


def _at(balance: Balance, rate: float, gamma: float, *, hidden: bool) -> tuple[float, float]:
    """r* and θ* at a rate."""
    gain = 1.0 if hidden else float(balance.gain)
    radius = (gain * rate * gamma ** float(balance.power)) ** (1 / float(balance.root))
    pace = float(balance.pace)
    return radius, (pace * rate) ** 0.5 if balance.free else pace * rate / radius if radius else 0.0


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


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

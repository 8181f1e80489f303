"""The radius and angle at which growth and weight decay balance, and the way there under a schedule.

Steps orthogonal to a row make it longer, weight decay makes it shorter. If gradients of successive steps are
uncorrelated, both changes of r² per step are known to leading order (docs/theory/equilibrium.md). What follows for an
optimizer is in the function that is registered for it, with γ = ‖∇L(u)‖, so that ‖∇L(x)‖ = γ/r (Lemma 1).

**Under a schedule** the radius follows: with r* and θ* the equilibrium at the rate of a step, r² changes by the factor
1 + δ((r*/r)^k − 1), where k = 4 for SGD, 2 for decoupled and 3 for coupled Adam, and δ is the decay of r² in a step:
2ηλ/(1−β), 2ηλ, 2ηλr√d/γ. The angle is θ*(r*/r)² for SGD and θ*r*/r for the others. Adam's √v remembers γ/r of the past:
its steps are κ times as long, with κ² the present (γ/r)² over its mean with β2. `equilibrium` integrates this.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Muon, NAdam, Optimizer, RAdam

from steradian.groups import Groups, Layout

__all__ = ["Balance", "Balanced", "Equilibrium", "adam", "balance_of", "equilibrium", "lion", "muon", "register"]
__all__ += ["register_angle", "sgd"]

Settings = Mapping[str, Any]  # a param group


@dataclass(frozen=True)
class Balance:
    """The equilibrium of a group's rows: r = (gain·η·γ^power)^(1/root), and θ² = pace·η or θ = pace·η/r.

    All may be tensors with one number per step and row.
    """

    gain: float | Tensor  #: the factor under the root; NaN if the radius is not derived
    power: float | Tensor  #: of γ = ‖∇L(u)‖
    root: float | Tensor  #: 4 for SGD, 2 for Adam with decoupled decay, 3 with coupled
    pace: float | Tensor  #: the factor of the angle
    free: bool | Tensor  #: the angle is √(pace·η), independent of the radius (SGD); otherwise pace·η/r
    shrink: float | Tensor = math.nan  #: what r² loses in a step, over η; times r/γ if coupled and divided (root 3)
    memory: float | Tensor = 0.0  #: β2 of the squared gradients that a step is divided by; 0 if it is not

    def __call__(self, rate: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Radius and angle in equilibrium, from the rate η and γ = ‖∇L(u)‖."""
        factors = self.gain, self.power, self.root, self.pace, self.free
        gain, power, root, pace, free = (torch.as_tensor(factor, device=slope.device) for factor in factors)
        radius = (gain * rate * slope**power) ** (1 / root)
        steady = pace * rate / radius.masked_fill(radius == 0, math.inf)
        return radius, torch.where(free.bool(), (pace * rate).sqrt(), steady)


Balanced = Callable[[Settings, int], Balance]
"""The equilibrium under the settings of a param group, for rows of d entries; `register` adds it to a class."""
_balances: dict[type[Optimizer], Balanced] = {}
_by_angle: set[type[Optimizer]] = set()
AT_ZERO = "its rate is 0 now, as at the start of a warm-up: ask before the schedule is made"


def register(kind: type[Optimizer]) -> Callable[[Balanced], Balanced]:
    """Decorator: this function gives the equilibrium of this class of optimizer and of its subclasses.

    It is called only for param groups with weight decay.

    >>> class HalfDecay(torch.optim.SGD): ...
    >>> @register(HalfDecay)
    ... def half_decay(settings, size):
    ...     return sgd({**settings, "weight_decay": settings["weight_decay"] / 2}, size)
    """

    def add(balanced: Balanced) -> Balanced:
        _balances[kind] = balanced
        return balanced

    return add


def register_angle(kind: type[Optimizer]) -> None:
    """The rate of this class of optimizer is the angle by which rows turn, and their radii stay."""
    _by_angle.add(kind)


def balance_of(optimizer: Optimizer, settings: Settings, size: int) -> Balance | str:
    """The equilibrium of rows under these settings, or the reason why there is none.

    Args:
        optimizer: torch's or our SGD, Adam or AdamW, or one whose class was registered.
        settings: the param group of the rows.
        size: the number d of entries in a row.

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
    if not float(settings.get("weight_decay", 0)):
        return "there is no weight decay: the radius only grows"
    if settings.get("amsgrad"):
        return "no equilibrium is derived for amsgrad"
    if float(settings.get("momentum") or 0) >= 1 or settings.get("dampening") == 1:
        return "a momentum of 1 forgets no gradient, and a dampening of 1 takes none"
    return balanced(settings, size)


@register(SGD)
def sgd(settings: Settings, size: int) -> Balance:
    """SGD with L2, x' = x − ηm, m = βm + g + λx: r⁴ = ηγ²/(2λ(1−β)), θ² = 2ηλ/(1+β).

    Growth is η²γ²/((1−β)²r²) and decay 2ηλr²/(1−β). Without (b), r⁴ = ηγ²/(2λ(1−β²)) and θ² = 2ηλ. Dampening and
    Nesterov change the weights of a gradient.
    """
    beta, decay = float(settings.get("momentum", 0)), float(settings["weight_decay"])
    nesterov, transported = bool(settings.get("nesterov")), bool(beta) and _transported(settings)
    damped = 1 - float(settings.get("dampening", 0) or 0) if beta else 1.0
    # Squares of the weights with which a gradient enters the steps that follow it.
    squares = (1 + beta) ** 2 + beta**4 / (1 - beta**2) if nesterov else 1 / (1 - beta**2)
    whole = squares if transported else 1 / (1 - beta) ** 2
    # How often λx enters: through the momentum, or once, twice with Nesterov.
    entered = 1 + beta * nesterov if transported else 1 / (1 - beta)
    gain, pace = damped * whole / (2 * decay * entered), damped * 2 * decay * entered * squares / whole
    return Balance(gain, power=2, root=4, pace=pace, free=True, shrink=2 * decay * entered)


@register(NAdam)
@register(RAdam)
@register(Adam)
def adam(settings: Settings, size: int) -> Balance:
    """Adam, RAdam, NAdam: r³ = ηγ√d/(2λ), or decoupled r² = ηd/(2λ); θ = η√(d(1−β1)/(1+β1))/r.

    A normalized step has the norm √d, so growth is η²d. Decoupled decay is 2ηλr², hence θ² = 2ηλ(1−β1)/(1+β1). Coupled
    decay is divided by √v = γ/(r√d) too and is 2ηλr³√d/γ. Without (b), r³ = ηγ√d/(2λ(1+β1)), or decoupled
    r² = ηd(1−β1)/(2λ(1+β1)) and θ² = 2ηλ.
    """
    (beta1, beta2), decay = map(float, settings["betas"]), float(settings["weight_decay"])
    transported = _transported(settings)
    single = _single(beta1, nesterov="momentum_decay" in settings)  # NAdam's factor has approached β1
    growth, pace = single if transported else 1.0, (size * single) ** 0.5
    if settings.get("decoupled_weight_decay"):
        gain, shrink = size * growth / (2 * decay), 2 * decay
        return Balance(gain, power=0, root=2, pace=pace, free=False, shrink=shrink, memory=beta2)
    entered = 2 * decay * (1 - beta1 if transported else 1.0)
    gain, shrink = size**0.5 * growth / entered, entered * size**0.5
    return Balance(gain, power=1, root=3, pace=pace, free=False, shrink=shrink, memory=beta2)


@register(Muon)
def muon(settings: Settings, size: int) -> Balance:
    """Muon: every step has one length, so θ² = 2ηλ(1−β)/(1+β), with Nesterov 2ηλ(1−β)²((1+β)² + β⁴/(1−β²)).

    The radius is not derived: it depends on the shape of the matrix and on how exact the orthogonalization is.
    """
    beta, decay = float(settings["momentum"]), float(settings["weight_decay"])
    pace = 2 * decay * _single(beta, nesterov=bool(settings.get("nesterov")))
    return Balance(math.nan, power=0, root=2, pace=pace, free=True, shrink=2 * decay)


def lion(settings: Settings, size: int) -> Balance:
    """Lion: every step has the norm √d, and r² = ηds/(2λ), θ² = 2ηλ/s with s the sum of the correlations of steps.

    A step is the sign of c = β1 m + (1−β1)∇L(x). Signs of Gaussian numbers of correlation ρ have the correlation
    (2/π) asin ρ, and c at a distance of k ≥ 1 steps has ρ_k ∝ β2^k. The momentum lasts so long that decay acts on what
    it added: s = 1 + (4/π) Σ (1−ηλ)^k asin ρ_k.
    """
    (beta1, beta2), decay = map(float, settings["betas"]), float(settings["weight_decay"])
    kept = 1 - float(settings.get("lr", 0)) * decay
    older = (beta1 * (1 - beta2)) ** 2 / (1 - beta2**2)
    first = (beta1 * (1 - beta1) * (1 - beta2) + beta2 * older) / ((1 - beta1) ** 2 + older)
    powers = range(1, 120, 2)  # of asin's series, whose terms are summed over k one by one
    asin = (math.comb(n - 1, n // 2) / 2 ** (n - 1) / n * first**n for n in powers)
    total = 1 + 4 / math.pi * sum(kept * term / (1 - kept * beta2**n) for n, term in zip(powers, asin, strict=True))
    return Balance(size * total / (2 * decay), power=0, root=2, pace=size**0.5, free=False, shrink=2 * decay)


_named: dict[str, Balanced] = {"Lion": lion}  # optimizers of other libraries, by the names of their classes


@dataclass(frozen=True)
class Equilibrium:
    """What `equilibrium` says about the rows of one group."""

    name: str  #: the parameters, or "param group k"
    angle: float | Tensor  #: in radians per step: a number, or with `rates` one for each step; NaN if it is not known
    radius: float | Tensor  #: of a row, likewise
    steps: float  #: after how many steps at the present rate 5 % of a disturbance of r² are left; inf without decay
    note: str = ""  #: what the prediction does not know, or takes for granted; may be empty


def equilibrium(
    optimizer: Optimizer,
    groups: Groups | None = None,
    *,
    rates: Sequence[float] | Tensor | None = None,
    slopes: float | Sequence[float] | Tensor | Mapping[str, Any] | None = None,
    radius: float | Mapping[str, float] | None = None,
) -> list[Equilibrium]:
    """The angle and radius of rows where growth and weight decay balance, or on the way there under a schedule.

    With Adam and decoupled decay this follows from the settings. SGD and coupled Adam need γ = ‖∇L(u)‖ over time:
    without `slopes` it is taken as constant, and the rows as in equilibrium at the first rate.

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
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one torch optimizer, got {type(optimizer).__name__}")
    path = None if rates is None else torch.as_tensor(rates, dtype=torch.float64, device="cpu")
    if path is not None and not (path.ndim == 1 and len(path) and bool((path >= 0).all())):
        raise ValueError(f"rates must be a number ≥ 0 for each step to come, got {rates!r}")
    found = []
    for name, settings, size, entry in _rows_of(optimizer, groups):
        gamma = slopes.get(name) if isinstance(slopes, Mapping) else slopes
        given = radius.get(name) if isinstance(radius, Mapping) else radius
        # If the number of entries in a row is not known, only what does not depend on it is said.
        predictions = [
            _predicted(optimizer, name, settings, d, path, gamma, entry * d**0.5 if given is None else given)
            for d in ((1, 4) if size is None else (size,))
        ]
        found.append(predictions[0] if size else _agreed(*predictions))
    return found


def _rows_of(optimizer: Optimizer, groups: Groups | None) -> Iterator[tuple[str, Settings, int | None, float]]:
    """Name, settings, size of a row (None: not known, or not the same) and root mean square entry of each group."""
    if groups is None:
        for k, settings in enumerate(optimizer.param_groups):
            params = [param.detach() for param in settings["params"]]
            entries = sum(param.numel() for param in params)
            squares = sum(float(param.float().square().sum()) for param in params)
            spec = None if settings.get("joint") else settings.get("rows")
            sizes = set() if spec is None else {Layout(spec).size(param.shape)[1] for param in params}
            size = sizes.pop() if len(sizes) == 1 else None
            yield f"param group {k}", settings, size, (squares / max(entries, 1)) ** 0.5
        return
    of_param = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    for group in groups.groups:
        params = [groups.params[name] for name in group.names]
        if id(params[0]) in of_param:
            rows = Layout(group.spec).join([param.detach().float() for param in params])
            yield group.names[0], of_param[id(params[0])], group.size, float(rows.square().mean().sqrt())


def _predicted(
    optimizer: Optimizer, name: str, settings: Settings, size: int, rates: Tensor | None, slopes: Any, radius: float
) -> Equilibrium:
    """The prediction for rows of one size; r* and θ* of all steps first, then the radius step by step."""
    path = torch.tensor([float(settings["lr"])], dtype=torch.float64, device="cpu") if rates is None else rates
    if not _by_angle.isdisjoint(type(optimizer).__mro__):
        if settings.get("rows") is None:
            return Equilibrium(name, math.nan, radius, math.nan, "no rows: this group has a rate and not an angle")
        return Equilibrium(name, path[0].item() if rates is None else path, radius, 0.0, "rows turn by the rate")
    if rates is None and not path[0]:
        return Equilibrium(name, math.nan, math.nan, math.inf, AT_ZERO)
    begin = int((path != 0).int().argmax())  # a warm-up may start at 0, where nothing moves
    distinct = path[path != 0].unique().tolist() or [0.0]
    known = {rate: balance_of(optimizer, {**settings, "lr": rate}, size) for rate in distinct}
    first = known[path[begin].item()]
    if isinstance(first, str):
        return Equilibrium(name, math.nan, math.nan, math.inf, first)
    gamma = torch.as_tensor(1.0 if slopes is None else slopes, dtype=torch.float64, device="cpu")
    if gamma.ndim and len(gamma) != len(path):
        raise ValueError(f"slopes must have one number for each of the {len(path)} rates, got {len(gamma)}")
    if bool((gamma < 0).any()) or radius < 0:
        raise ValueError(f"slopes and radius must be at least 0, got {slopes!r:.60} and {radius!r}")
    underived, blind = math.isnan(first.gain), bool(first.power) and slopes is None
    note = ""
    if blind:
        note = "the slopes ‖∇L(u)‖ are taken as constant, and the rows as in equilibrium at the first rate"
    elif underived and rates is not None:
        note = "the rows are taken as in equilibrium at the first rate"

    lines = {rate: tuple(vars(balance).values()) for rate, balance in known.items()}
    each = torch.tensor([lines[rate or path[begin].item()] for rate in path.tolist()], dtype=torch.float64)
    gain, power, roots, pace, free, shrinks, memory = each.unbind(1)
    gamma = gamma.expand(len(path))
    targets, steady = Balance(gain.nan_to_num(1.0), power, roots, pace, free)(path, gamma)
    r = targets[begin].item() if blind or underived or rates is None else radius
    decay = path * shrinks  # of r² in a step; times r/γ with coupled Adam
    lost = decay[begin].item() * (r / gamma[begin].item() if first.root == 3 and gamma[begin] else 1.0)
    steps = 3 / (lost * float(first.root) / 2) if lost else math.inf

    angles, radii, mean = [], [], 0.0
    columns = torch.stack([decay, gamma, targets, steady, roots, memory], dim=1).tolist()
    for k, (delta, slope, target, angle, root, beta2) in enumerate(columns):
        radii.append(r)
        if r == 0:
            angles.append(math.nan)
            continue
        mean = beta2 * mean + (1 - beta2) * (slope / r) ** 2
        longer = slope / r / (mean / (1 - beta2 ** (k + 1))) ** 0.5 if mean else 1.0
        angles.append(angle * (target / r) ** (2 if root == 4 else 1) * longer)
        growth, shrink = (target / r) ** root * longer**2, 1.0
        if root == 3:  # what decays is divided by √v too
            delta, shrink = delta * (r / slope if slope else 1.0), longer
        r *= max(1 + delta * (growth - shrink), 0.0) ** 0.5
    if blind or underived:
        radii = [math.nan] * len(radii)
    if rates is None:
        return Equilibrium(name, angles[0], radii[0], steps, note)
    turned, reached = (torch.tensor(values, dtype=torch.float64) for values in (angles, radii))
    return Equilibrium(name, turned, reached, steps, note)


def _agreed(one: Equilibrium, other: Equilibrium) -> Equilibrium:
    """A prediction for rows of unknown size from those for two sizes: NaN where they differ."""
    values: dict[str, Any] = {}
    for name in ("angle", "radius", "steps"):
        a, b = (torch.as_tensor(getattr(each, name), dtype=torch.float64) for each in (one, other))
        agreed = torch.where(a.isclose(b, rtol=1e-9, atol=0), a, math.nan)
        values[name] = agreed if agreed.ndim else agreed.item()
    known, said = (not torch.as_tensor(angle).isnan().any() for angle in (one.angle, values["angle"]))
    more = "it depends on the size of a row, which groups have" if known and not said else ""
    return replace(one, **values, note="; ".join(filter(None, [one.note, more])))


def _single(beta: float, *, nesterov: bool) -> float:
    """The square of one step over that of the whole contribution of a gradient, whose weights are (1−β)β^k."""
    if nesterov:  # they are (1−β)(1+β) for the newest gradient and (1−β)β^(k+1) for older ones
        return (1 - beta) ** 2 * ((1 + beta) ** 2 + beta**4 / (1 - beta**2))
    return (1 - beta) / (1 + beta)


def _transported(settings: Settings) -> bool:
    """Whether the momentum moves with its rows: without (b)."""
    return settings.get("rows") is not None and "b" in settings.get("without", "")

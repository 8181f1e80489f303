"""Any optimizer read as the generic scheme x' = (1 − ηδ)x − η a ⊘ b, a = β a_prev + ∇L(x) + λx (Section 2.2)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, Muon, NAdam, Optimizer, RAdam, RMSprop

from steradian.geometry import as_float

__all__ = ["Reader", "Step", "Taken", "UnreadableOptimizerError", "is_foreign", "read_adam", "read_sgd", "read_step"]
__all__ += ["reader_of", "register"]


@dataclass(frozen=True)
class Step:
    """One step of the generic scheme, x' = (1 − lr·decay)x − lr·a ⊘ b (Eqs. 3 and 4)."""

    a: Tensor  #: momentum, in the parameter's shape and in units of a gradient
    b: Tensor  #: division vector, in the parameter's shape (a stride-0 view where it is one number)
    lr: float | Tensor  #: the rate η of this step; a tensor where the optimizer holds one
    l2: float | Tensor = 0.0  #: the coupled L2 coefficient λ that a contains
    decay: float | Tensor = 0.0  #: the decoupled weight-decay coefficient δ, as in AdamW
    beta: float | Tensor = 0.0  #: the momentum factor β of a


@dataclass(frozen=True)
class Taken:
    """What a reader gets: a parameter after a step with its gradient, its param group and its optimizer state."""

    param: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    before: Tensor | None = None  #: the parameter before the step, where `read_step` was given it

    def need(self, key: str) -> Tensor:
        """The entry `key` of the parameter's state, as float32 or wider."""
        value = self.state.get(key)
        if value is None:
            raise ValueError(
                f"the parameter of shape {tuple(self.param.shape)} has no {key!r} in the optimizer's state: "
                "no step was taken yet, or the parameter had no gradient; call read_step after optimizer.step()"
            )
        value = value.detach()
        return value if value.dtype in (torch.float32, torch.float64) else as_float(value, key)

    def setting(self, key: str) -> float | Tensor:
        """A setting of the parameter's group; a tensor is copied, since a scheduler writes into it."""
        value = self.group[key]
        return value.detach().clone() if isinstance(value, Tensor) else float(value)

    def start(self) -> Tensor:
        """The parameter before the step, as float32 or wider."""
        if self.before is None:
            raise ValueError("the state does not tell this step: pass before=, the parameter before the step")
        return as_float(self.before.detach(), "before")

    def gradient(self) -> Tensor:
        """∇L(x) of the step, without the L2 term, with the sign of a minimization."""
        if self.param.grad is None:
            raise ValueError(
                f"the parameter of shape {tuple(self.param.shape)} has no gradient, and this optimizer keeps none: "
                "call read_step after optimizer.step() and before zero_grad()"
            )
        if self.param.grad.is_sparse:
            raise TypeError("the parameter has a sparse gradient; only dense gradients can be read")
        gradient = as_float(self.param.grad.detach(), "the gradient")
        return gradient.neg() if self.group.get("maximize") else gradient.clone()

    def regularized(self, pace: float | Tensor, *, pushed: float | Tensor = 0.0) -> Tensor:
        """∇L(x) + λx at the point before the step x' = x − pace·(∇L(x) + λx) − pushed.

        If `before` was not given it is (∇L(x) + λ(x' + pushed))/(1 − pace·λ).
        """
        gradient, l2 = self.gradient(), self.setting("weight_decay")
        if not isinstance(l2, Tensor) and l2 == 0:
            return gradient
        if self.before is not None:
            return gradient.add_(self.start() * l2)
        kept = 1 - (pace if isinstance(pace, Tensor) else torch.tensor(pace, dtype=torch.float64, device="cpu")) * l2
        if (smallest := kept.abs().min()) < 0.5:
            raise ValueError(
                "the point before this step cannot be recovered accurately from the point after it "
                f"(smallest |1 − rate·λ| = {smallest:.2g}): pass before=, the parameter before the step"
            )
        return gradient.add_((as_float(self.param.detach(), "param") + pushed) * l2).div_(kept)


Reader = Callable[[Taken], Step]
"""Reads the step that an optimizer just took; `register` adds it."""
_readers: dict[type[Optimizer], Reader] = {}


class UnreadableOptimizerError(TypeError):
    """There is no reader for the optimizer's class."""


def register(kind: type[Optimizer]) -> Callable[[Reader], Reader]:
    """Decorator: this function reads the steps of this class of optimizer.

    It is called after a step and must not change what it gets. It also reads subclasses that keep the class's `step`.

    >>> class Halved(torch.optim.Optimizer):
    ...     "x' = x − η∇L(x)/2"
    >>> @register(Halved)
    ... def read_halved(taken: Taken) -> Step:
    ...     gradient = taken.gradient()
    ...     return Step(a=gradient, b=torch.full_like(gradient, 2), lr=taken.setting("lr"))
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"kind must be a class of optimizers, not its name or an instance, got {kind!r}")

    def add(reader: Reader) -> Reader:
        _readers[kind] = reader
        _foreign.cache_clear()
        return reader

    return add


@torch.no_grad()
def read_step(optimizer: Optimizer, param: Tensor, *, before: Tensor | None = None) -> Step:
    """The generic step that the optimizer just took on a parameter.

    Call it after `optimizer.step()`, before the gradient is cleared and before a scheduler changes the rate.
    Reads torch's SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adafactor and Muon with all of their
    options, classes called Lion and schedule-free ones, and every class passed to `register`. The result is a snapshot,
    in float32 for half-precision parameters.

    Args:
        optimizer: the optimizer.
        param: one of its parameters.
        before: the parameter before the step. Adafactor, Muon and schedule-free optimizers need it. Of the others only
            those that keep no momentum, with L2: without it the point is recovered from the point after.

    Raises:
        UnreadableOptimizerError: the optimizer is none of these; `image.observed_step` needs only two points.
        ValueError: the parameter is not the optimizer's, has taken no step, or lost its gradient.
        TypeError: the parameter or its gradient is complex, of integers, or sparse.

    >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    >>> x.grad = torch.tensor([1.0, 2.0])
    >>> optimizer.step()
    >>> step = read_step(optimizer, x)
    >>> step.a.tolist(), step.b.tolist(), step.lr, step.beta
    ([1.0, 2.0], [1.0, 1.0], 0.1, 0.9)
    """
    reader = reader_of(optimizer)
    as_float(param, "param")
    if before is not None and before.shape != param.shape:
        raise ValueError(f"before must have the parameter's shape {tuple(param.shape)}, got {tuple(before.shape)}")
    for group in optimizer.param_groups:
        if any(param is other for other in group["params"]):
            return reader(Taken(param, group, optimizer.state.get(param, {}), before))
    raise ValueError(f"the parameter of shape {tuple(param.shape)} is not one of the optimizer's parameters")


def reader_of(optimizer: Optimizer) -> Reader:
    """The function that reads this optimizer's steps; an `UnreadableOptimizerError` if there is none."""
    if not isinstance(optimizer, Optimizer):
        raise UnreadableOptimizerError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    own = type(optimizer)
    if reader := _find_reader(own):
        return reader
    known = ", ".join(sorted({*_named, *(kind.__name__ for kind in _readers)}))
    raise UnreadableOptimizerError(
        f"cannot read {own.__module__}.{own.__qualname__} as a generic step; readable are {known}. "
        "scheme.register adds a reader; image.observed_step(x_before, x_after) works for every optimizer"
    )


def _find_reader(own: type[Optimizer]) -> Reader | None:
    """The reader of a class whose update this class keeps, or of its name."""
    for kind in own.__mro__:
        if kind in _readers and _update_of(kind) == _update_of(own):
            return _readers[kind]
    return _named.get(own.__name__)


def _update_of(kind: type[Any]) -> tuple[Any, Any]:
    """The functions that a class steps with: torch wraps `step` in every class, ours all call their `update`."""
    return inspect.unwrap(kind.step), getattr(kind, "update", None)


@functools.cache
def _foreign(kind: type[Optimizer]) -> bool:
    functions = (*_update_of(kind), _find_reader(kind))
    modules = [str(getattr(function, "__module__", "")) for function in functions if function is not None]
    return any(module.partition(".")[0] not in ("torch", "steradian") for module in modules)


is_foreign: Callable[[Any], bool] = _foreign
"""Whether the step of a class of optimizers, or the function that reads it, is neither torch's nor ours."""


def _uniform(value: float | Tensor, like: Tensor) -> Tensor:
    """One number as a stride-0 view in the shape of a tensor."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(like.shape)


@register(SGD)
def read_sgd(taken: Taken) -> Step:
    """SGD: a is the momentum buffer, b = 1, both over 1−τ with dampening; with Nesterov a = ∇L(x) + λx + β·buffer."""
    lr, l2, beta = taken.setting("lr"), taken.setting("weight_decay"), taken.setting("momentum")
    if beta == 0:
        a = taken.regularized(lr)
        return Step(a, _uniform(1, a), lr, l2=l2)
    buffer = taken.need("momentum_buffer")
    if taken.group["nesterov"]:
        a = taken.regularized(lr, pushed=buffer * (lr * beta)).add_(buffer * beta)
        return Step(a, _uniform(1, a), lr, l2=l2, beta=beta)
    kept = 1 - taken.setting("dampening")
    share = 1 / kept if kept > 0 else 1.0
    return Step(buffer * share, _uniform(share, buffer), lr, l2=l2, beta=beta)


@register(Adam)
def read_adam(taken: Taken) -> Step:
    """Adam and AdamW: a = m/(1−β1), b = (1−β1^{k+1})/(1−β1)·(√(v/(1−β2^{k+1})) + ε), ε as in torch (Section 2.2)."""
    m, beta1, beta2, step, share = _moments(taken)
    v = taken.need("max_exp_avg_sq" if taken.group["amsgrad"] else "exp_avg_sq")
    b = v.sqrt().mul_((share / (1 - beta2**step).sqrt()).to(v)).add_((share * taken.group["eps"]).to(v))
    return _adam_step(taken, m / (1 - beta1), b, beta1)


def _moments(taken: Taken) -> tuple[Tensor, Any, Any, Tensor, Tensor]:
    """The first moment m of Adam's family; β1, β2, the number t of steps and (1−β1^t)/(1−β1), in float64."""
    m, step = taken.need("exp_avg"), taken.need("step").to(torch.float64)
    beta1, beta2 = (beta.to(torch.float64) if isinstance(beta, Tensor) else beta for beta in taken.group["betas"])
    return m, beta1, beta2, step, (1 - beta1**step) / (1 - beta1)


def _adam_step(taken: Taken, a: Tensor, b: Tensor, beta1: Any) -> Step:
    """A step of Adam's family, whose weight decay is coupled or decoupled."""
    decay = {"decay" if taken.group.get("decoupled_weight_decay") else "l2": taken.setting("weight_decay")}
    return Step(a, b, taken.setting("lr"), **decay, beta=beta1)


@register(Adagrad)
def _read_adagrad(taken: Taken) -> Step:
    """Adagrad: a = ∇L(x) + λx, b = √(Σ a²) + ε, lr = η/(1 + k·lr_decay)."""
    if not taken.need("step").any():
        raise ValueError("no step was taken yet: call read_step after optimizer.step()")
    b = taken.need("sum").sqrt().add_(taken.group["eps"])
    lr, lr_decay = taken.setting("lr"), taken.group["lr_decay"]
    if lr_decay:
        lr = lr / (1 + (taken.need("step").to(torch.float64) - 1) * lr_decay)
    return Step(taken.regularized(lr / b), b, lr, l2=taken.setting("weight_decay"))


@register(RMSprop)
def _read_rmsprop(taken: Taken) -> Step:
    """RMSprop: b = √v + ε (v − m² when centered); a = ∇L(x) + λx, with momentum buffer ⊙ b, as it sums quotients."""
    v = taken.need("square_avg")
    if taken.group["centered"]:
        v = v.addcmul(taken.need("grad_avg"), taken.need("grad_avg"), value=-1)
    b = v.sqrt().add_(taken.group["eps"])
    lr, l2, beta = taken.setting("lr"), taken.setting("weight_decay"), taken.setting("momentum")
    a = taken.need("momentum_buffer") * b if beta > 0 else taken.regularized(lr / b)
    return Step(a, b, lr, l2=l2, beta=beta)


@register(NAdam)
def _read_nadam(taken: Taken) -> Step:
    """NAdam: a ⊘ b = (c₁(∇L(x) + λx) + c₂m) ⊘ (√(v/(1−β2^t)) + ε), scaled so that a is in units of a gradient."""
    m, beta1, beta2, step, _ = _moments(taken)
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (t * taken.group["momentum_decay"])) for t in (step, step + 1))
    product = taken.need("mu_product").to(torch.float64)
    first, second = (1 - mu) / (1 - product), following / (1 - product * following)
    unit = (first + second * (1 - beta1)).to(m)  # the weight of this step's gradient
    root = taken.need("exp_avg_sq").div((1 - beta2**step).to(m)).sqrt_().add_(taken.group["eps"])
    lr, first, second = taken.setting("lr"), first.to(m), second.to(m)
    decoupled = taken.group["decoupled_weight_decay"]
    slope = taken.gradient() if decoupled else taken.regularized(lr * first / root, pushed=lr * second * m / root)
    return _adam_step(taken, (first * slope + second * m) / unit, root / unit, beta1)


@register(RAdam)
def _read_radam(taken: Taken) -> Step:
    """RAdam: Adam's a; b is Adam's divided by the rectification, or only the bias correction in the first steps."""
    m, beta1, beta2, step, share = _moments(taken)
    root, limit = (1 - beta2**step).sqrt(), 2 / (1 - beta2) - 1
    length = limit - 2 * step * beta2**step / root**2
    rectified = ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)).clamp(min=0).sqrt()
    adapted = taken.need("exp_avg_sq").sqrt().add_(taken.group["eps"]) * (share / (root * rectified)).to(m)
    return _adam_step(taken, m / (1 - beta1), torch.where(length.to(m.device) > 5, adapted, share.to(m)), beta1)


@register(Adamax)
def _read_adamax(taken: Taken) -> Step:
    """Adamax: Adam's a, and b = (1−β1^t)/(1−β1)·max of the past gradients, faded by β2."""
    m, beta1, *_, share = _moments(taken)
    return _adam_step(taken, m / (1 - beta1), taken.need("exp_inf") * share.to(m), beta1)


@register(Adafactor)
@register(Muon)
def _read_displacement(taken: Taken) -> Step:
    """Optimizers that do not divide element by element: a = ((1 − ηδ)x − x')/η is their update, and b = 1."""
    one = _uniform(1, taken.start())
    return displaced(taken, Step(one, one, taken.setting("lr"), decay=taken.setting("weight_decay")))


def displaced(taken: Taken, step: Step) -> Step:
    """The step with the a that took the parameter from before to after, a = b ⊙ ((1 − ηδ)x − x')/η; 0 where η is 0."""
    lr = step.lr.reshape(()) if isinstance(step.lr, Tensor) else step.lr
    moved = taken.start() * (1 - lr * step.decay) - as_float(taken.param.detach(), "param")
    return replace(step, a=(moved * step.b / lr).masked_fill_(torch.as_tensor(lr == 0, device=moved.device), 0))


def _read_schedule_free(taken: Taken) -> Step:
    """Schedule-free: the weights are a mean of points, so a is the update; its decay is part of the gradient."""
    taken.need("z")
    return _read_displacement(replace(taken, group={**taken.group, "weight_decay": 0.0}))


def _read_lion(taken: Taken) -> Step:
    """Lion: a = sign(β1 m + (1−β1)∇L(x)) with the momentum m before the step, b = 1."""
    (beta1, beta2), gradient = taken.group["betas"], taken.gradient()
    m = (taken.need("exp_avg") - (1 - beta2) * gradient) / beta2
    a = (beta1 * m + (1 - beta1) * gradient).sign_()
    return Step(a, _uniform(1, a), taken.setting("lr"), decay=taken.setting("weight_decay"), beta=beta1)


_named: dict[str, Reader] = {  # third-party classes by name, so that their packages need not be installed
    "Lion": _read_lion,
    **dict.fromkeys(("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"), _read_schedule_free),
}

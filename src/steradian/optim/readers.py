"""How `scheme.read_step` reads our optimizers as the generic step x' = (1 − ηδ)x − η a ⊘ b; their equilibria.

A momentum that moves with its row stands in the state as it enters the next step, so a is what the step did:
a = b ⊙ ((1 − ηδ)x − x')/η, which needs the parameter before the step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steradian import balance, geometry, scheme
from steradian.groups import Layout
from steradian.optim.adagradg import AdaGradG
from steradian.optim.adam import Adam
from steradian.optim.adamg import AdamG
from steradian.optim.adamp import AdamP
from steradian.optim.angular import Angular
from steradian.optim.reference import orthogonalized
from steradian.optim.rows import RowSet, decay_of
from steradian.optim.sgd import SGD
from steradian.optim.transport import Motion
from steradian.scheme import Step, Taken, UnreadableOptimizerError, displaced, register

balance.register(Adam)(lambda settings, size: balance.adam({**settings, "weight_decay": decay_of(settings)}, size))
balance.register(SGD)(lambda settings, size: balance.sgd({**settings, "weight_decay": decay_of(settings)}, size))
balance.register_angle(Angular)


@register(Adam)
def read_adam(taken: Taken) -> Step:
    """Adam: a = m/(1−β1); from the displacement without (b) or (c), with v scaled back to the radius before."""
    without = taken.group["without"] if _radial(taken) else ""
    v = taken.need("exp_avg_sq")
    if "c" in without:
        x, y = _rows(taken, taken.start()), _rows(taken, taken.param)
        shrink = Motion(x, y).shrink
        v = v / shrink.squeeze(1) if "a" in without else _restore(taken, _rows(taken, v) / shrink)
    if "a" in without:
        v = _restore(taken, v.unsqueeze(1).expand(-1, _layout(taken).size(taken.param.shape)[1]))
    step = _classic(replace(taken, state={**taken.state, "exp_avg_sq": v}), scheme.read_adam, amsgrad=False)
    return displaced(taken, step) if "b" in without or "c" in without else step


@register(SGD)
def read_sgd(taken: Taken) -> Step:
    """SGD: a is the momentum buffer; from the displacement without (b) or (c)."""
    step = _classic(taken, scheme.read_sgd)
    moves = _radial(taken) and taken.group["momentum"] and set(taken.group["without"]) & set("bc")
    return displaced(taken, step) if moves else step


@register(AdamP)
def read_adamp(taken: Taken) -> Step:
    """AdamP: Adam's b, a from the displacement, decay λρ on rows and λ elsewhere."""
    decay = taken.group["weight_decay"] * (taken.group["wd_ratio"] if _radial(taken) else 1.0)
    step = _classic(taken, scheme.read_adam, amsgrad=False, decoupled_weight_decay=True, weight_decay=decay)
    return displaced(taken, step) if _radial(taken) or taken.group["nesterov"] else step


@register(AdamG)
def read_adamg(taken: Taken) -> Step:
    """AdamG: a = m/(1−β1) before its transport, b = (1−β1^t)/(1−β1)·√((v + ε)/(1−β2^t)), both at u; a/r and b/r² at r.

    Exp_u(δ) is in the direction of u + (tan θ/θ)δ with θ = ‖δ‖: b carries θ/tan θ. The generic step lands on the ray of
    x', not at radius 1.
    """
    if not _radial(taken):
        return _classic(taken, scheme.read_adam, amsgrad=False)
    (beta1, beta2), lr = taken.group["betas"], taken.setting("lr")
    t = taken.need("step").to(torch.float64)
    r, _, _, m = _back(taken, "exp_avg")
    root = (taken.need("exp_avg_sq").unsqueeze(1) + taken.group["eps"]).sqrt_()
    b = root * ((1 - beta1**t) / (1 - beta1) / (1 - beta2**t).sqrt()).to(root)
    a = m / (1 - beta1)
    if not taken.group["retraction"]:
        theta = geometry.norm(lr * a / b)
        b = torch.where(theta > 0, b * theta / torch.tan(theta), b)
    r = r.masked_fill(geometry.collapsed(r), 1)
    return Step(_restore(taken, a / r), _restore(taken, (b / r**2).expand_as(a)), lr, beta=beta1)


@register(AdaGradG)
def read_adagradg(taken: Taken) -> Step:
    """AdaGradG: a = ∇L(x), b = √v/r² with v before its update; it lands on the ray of x', not at radius 1."""
    if not _radial(taken):
        return _classic(taken, scheme.read_sgd, momentum=0.0)
    if not taken.group["beta"]:
        raise UnreadableOptimizerError("AdaGradG with beta=0 keeps nothing of the v that a step used")
    r, _ = geometry.split(_rows(taken, taken.start()), check=False)
    r = r.masked_fill(geometry.collapsed(r), 1)
    a = _rows(taken, taken.gradient())
    v = (taken.need("sum").unsqueeze(1) - geometry.dot(r * a, r * a)) / taken.group["beta"]
    return Step(_restore(taken, a), _restore(taken, (v.sqrt() / r**2).expand_as(a)), taken.setting("lr"))


@register(Angular)
def read_angular(taken: Taken) -> Step:
    """Angular: a = d/r and b = η‖d‖/(r² tan θ), with d before the step, so that the effective rate is tan θ/‖d‖.

    It lands on the ray of x', not at radius r. A row that did not turn has a = 0.
    """
    group = taken.group
    if not _radial(taken):
        if group["rest"] == "sgd":
            return _classic(taken, scheme.read_sgd, dampening=0.0)
        betas = group["momentum"], group["beta2"]
        return _classic(taken, scheme.read_adam, betas=betas, eps=1e-8, amsgrad=False, decoupled_weight_decay=True)
    r, u, p, n = _back(taken, "momentum_buffer")
    if group["nesterov"]:
        n = group["momentum"] * n + r * geometry.tangent(_rows(taken, taken.gradient()), u)
    if group["direction"] == "adam":
        v = _rows(taken, taken.need("exp_avg_sq")) / (1 - group["beta2"] ** taken.need("step").to(n))
        n = torch.where(v > 0, n / v.sqrt(), 0)
    if group["direction"] == "muon":
        n = RowSet(_layout(taken), [taken.start().contiguous()], [{}]).on_matrices(orthogonalized, n)
    d, slope = geometry.tangent(n, u), geometry.angle(u, p).tan()
    lr, turned = taken.setting("lr"), (slope > 0) & (r > 0)
    a, b = d / r, lr * geometry.norm(d) / (r**2 * slope)
    a, b = torch.where(turned, a, 0), torch.where(turned, b, 1)
    return Step(_restore(taken, a), _restore(taken, b.expand_as(a)), lr, beta=taken.setting("momentum"))


def _classic(taken: Taken, reader: Callable[[Taken], Step], **settings: Any) -> Step:
    """Torch's reader of the same update, with the weight decay of this step and settings that ours does not have."""
    return reader(replace(taken, group={**taken.group, "weight_decay": decay_of(taken.group), **settings}))


def _back(taken: Taken, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """r and u of the rows before the step, u' after it, and a momentum, transported back to u."""
    r, u = geometry.split(_rows(taken, taken.start()), check=False)
    _, p = geometry.split(_rows(taken, taken.param), check=False)
    return r, u, p, geometry.transport(_rows(taken, taken.need(name)), p, u)


def _radial(taken: Taken) -> bool:
    return taken.group.get("rows") is not None


def _layout(taken: Taken) -> Layout:
    if taken.group.get("joint") and len(taken.group["params"]) > 1:
        why = "rows that span several parameters cannot be read from one of them; the optimizer's telemetry has them"
        raise UnreadableOptimizerError(why)
    return Layout(taken.group["rows"])


def _rows(taken: Taken, tensor: Tensor) -> Tensor:
    return _layout(taken).rows(geometry.as_float(tensor.detach(), "rows"))


def _restore(taken: Taken, rows: Tensor) -> Tensor:
    return _layout(taken).restore(rows, taken.param.shape)

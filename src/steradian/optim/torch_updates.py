"""The update of parameters without rows: torch's own, bit for bit, and AdamP's without projection."""

from operator import attrgetter

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.sgd import sgd as torch_sgd

from steradian.optim.rows import Options, States, exact, rate_of

_KIND, _GRAD = attrgetter("device", "dtype"), attrgetter("grad")


def adam(params: list[Tensor], states: States, group: Options, *scaler: Tensor | None) -> None:
    """`torch.optim.Adam`'s update, or AdamW's if the decay is decoupled; a scaler (scale, found_inf) makes it fused."""
    lr, device, decoupled = group["lr"], params[0].device, group.get("decoupled_weight_decay", False)
    grad_scale, found_inf = scaler or (None, None)
    m, v, steps = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
    settings = {name: group[name] for name in ("weight_decay", "eps", "maximize")}
    settings |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False}
    # Every implementation but the fused one would wait for a step count on the device.
    fused = steps[0].device.type != "cpu" or grad_scale is not None
    if not fused or torch.compiler.is_compiling() or len(set(map(_KIND, params))) > 1:
        torch_adam(
            *(params, _gradients(params), m, v, [], steps),
            # torch accepts capturable on accelerators alone; on a CPU it has no meaning.
            capturable=group["capturable"] and device.type != "cpu",
            fused=True if fused else None,
            has_complex=any(map(torch.is_complex, params)),
            lr=lr,
            decoupled_weight_decay=decoupled,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **settings,
        )
        return
    # Its fused update. Its function sorts all tensors by device and dtype, which takes longer than the rest of a step.
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(device, non_blocking=True)
    scale, found = (each if each is None else each.to(device, non_blocking=True) for each in (grad_scale, found_inf))
    torch._foreach_add_(steps, 1)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(params, _gradients(params), m, v, [], steps, lr=lr, grad_scale=scale, found_inf=found, **settings)
    if found is not None:
        torch._foreach_sub_(steps, [found] * len(steps))


def sgd(params: list[Tensor], states: States, group: Options) -> None:
    """`torch.optim.SGD`'s update."""
    lr, momentum = rate_of(group), group.get("momentum", 0.0)
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        _sgd_without_reading(params, states, group, lr)
        return
    buffers, gradients = [state.get("momentum_buffer") for state in states], _gradients(params)
    torch_sgd(
        *(params, gradients, buffers),
        has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=lr,  # type: ignore[arg-type]  # torch's annotation leaves its own tensor rates out
        dampening=group.get("dampening", 0.0),
        nesterov=group.get("nesterov", False),
        maximize=group["maximize"],
    )
    for state, buffer in zip(states, buffers, strict=True):
        if buffer is not None:
            state["momentum_buffer"] = buffer


def _sgd_without_reading(params: list[Tensor], states: States, group: Options, lr: Tensor) -> None:
    """The same for a rate on an accelerator, for which torch's function would wait in every step."""
    decay, momentum = group["weight_decay"], group.get("momentum", 0.0)
    for param, gradient, state in zip(params, _gradients(params), states, strict=True):
        g = -gradient if group["maximize"] else gradient
        g = g.add(param, alpha=decay) if decay else g
        if momentum:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(momentum).add_(g, alpha=1 - group.get("dampening", 0.0))
            else:
                state["momentum_buffer"] = g.clone()
            g = g.add(state["momentum_buffer"], alpha=momentum) if group["nesterov"] else state["momentum_buffer"]
        param.sub_(g * lr)


def adamp(params: list[Tensor], states: States, group: Options) -> None:
    """AdamP where it does not project: AdamW's update, along β1 m + (1−β1)g with Nesterov."""
    if not group["nesterov"]:
        adam(params, states, {**group, "decoupled_weight_decay": True})
        return
    beta1, beta2 = group["betas"]
    lr = rate_of(group)
    for param, gradient, state in zip(params, _gradients(params), states, strict=True):
        state["step"] += 1
        step = state["step"].item() if state["step"].device.type == "cpu" else exact(state["step"])
        g = -gradient if group["maximize"] else gradient
        m, v = state["exp_avg"], state["exp_avg_sq"]
        if torch.is_complex(param):  # as torch does, real and imaginary parts by themselves
            param, g, m, v = map(torch.view_as_real, (param, g, m, v))
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        divisor = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        param.mul_(1 - lr * group["weight_decay"])
        param.sub_(m.lerp(g, 1 - beta1).div_(divisor).mul_(lr / (1 - beta1**step)))


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [gradient for gradient in map(_GRAD, params) if gradient is not None]

"""Whether a model is as it was: tensors, gradients, flags, hooks, generators and defaults."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def remember(model: nn.Module, inputs: Any) -> Callable[[], None]:
    """Give some parameters a gradient and record everything that a probe could change; call the result to compare."""
    for i, p in enumerate(model.parameters()):
        if p.requires_grad and i % 2:
            p.grad = torch.randn_like(p)
    modules = list(model.named_modules())
    tensors = {f"parameter {name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    tensors |= {f"buffer {name}": b for name, b in model.named_buffers(remove_duplicate=False)}
    tensors |= {f"input {i}": t for i, t in enumerate(_inputs(inputs))}
    grads = {name: p.grad for name, p in model.named_parameters()}
    before = {name: _snapshot(t) for name, t in (tensors | {f"grad {n}": g for n, g in grads.items()}).items()}
    training = {name: module.training for name, module in modules}
    hooks = {(name, kind): list(getattr(module, kind)) for name, module in modules for kind in _HOOKS}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    defaults = torch.get_default_dtype(), torch.is_grad_enabled()

    def unchanged() -> None:
        assert list(model.named_modules()) == modules
        after = {f"parameter {name}": p for name, p in model.named_parameters(remove_duplicate=False)}
        after |= {f"buffer {name}": b for name, b in model.named_buffers(remove_duplicate=False)}
        after |= {f"input {i}": t for i, t in enumerate(_inputs(inputs))}
        assert {name: id(t) for name, t in after.items()} == {name: id(t) for name, t in tensors.items()}
        now = {name: p.grad for name, p in model.named_parameters()}
        assert {name: id(g) for name, g in now.items()} == {name: id(g) for name, g in grads.items()}
        snapshots = {name: _snapshot(t) for name, t in (after | {f"grad {n}": g for n, g in now.items()}).items()}
        assert [name for name in before if not _same(before[name], snapshots[name])] == []
        assert {name: module.training for name, module in modules} == training
        assert {key: list(getattr(dict(modules)[key[0]], key[1])) for key in hooks} == hooks
        assert torch.equal(torch.get_rng_state(), generators[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == defaults

    return unchanged


def _inputs(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _inputs(list(value.values()))
    return [t for v in value for t in _inputs(v)] if isinstance(value, list | tuple) else []


def _snapshot(t: Tensor | None) -> tuple | None:
    if t is None:
        return None
    return t.detach().clone(), t.requires_grad, t.dtype, t.data_ptr(), t.grad is None if t.is_leaf else None


def _same(a: tuple | None, b: tuple | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a[0], b[0]) and a[1:] == b[1:]

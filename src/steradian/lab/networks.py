"""Networks of trainings: made by their seeds, their rows found once per kind, several of a kind stacked into one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steradian.discovery import find_groups
from steradian.groups import Group, Groups
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.models import build

__all__ = ["fill", "load_states", "member", "network", "stack"]


def network(configs: Sequence[Config], data: Resident) -> tuple[nn.Module, Groups]:
    """The networks of trainings of one kind as one, each as its seed makes it, and their rows."""
    first = configs[0]
    kind = (first.model, first.norm, data.channels, data.classes, data.size, first.width, first.released)
    with torch.random.fork_rng(devices=[]):
        made = []
        for config in configs:
            torch.manual_seed(config.seed)
            made.append(_built(*kind))
    if len(made) == 1:
        return made[0], replace(_rows(*kind), params=dict(made[0].named_parameters()))
    together = _built(*kind, members=len(made))
    fill(together, stack([each.state_dict() for each in made]))
    groups = [_stacked(group, len(made)) for group in _rows(*kind).groups]
    return together, Groups(dict(together.named_parameters()), groups)


def stack(states: Sequence[Any]) -> Any:
    """Nested states of several members as one: tensors behind each other along dimension 0, counts as they are."""
    first = states[0]
    if isinstance(first, Mapping):
        return {key: stack([state[key] for state in states]) for key in first}
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(states)) if len(states) > 1 else first
    return first


def member(state: Any, number: int, members: int, *, device: str | torch.device | None = None) -> Any:
    """One member's part of a nested state, sharing no memory with it: the inverse of `stack`."""
    if isinstance(state, Mapping):
        return {key: member(value, number, members, device=device) for key, value in state.items()}
    if isinstance(state, Tensor):
        part = state.detach().chunk(members)[number] if state.ndim else state.detach()
        return part.to(device or state.device, copy=True)
    return state


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers in place: torch's own way needs a version that plain dicts lack."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        names = ", ".join(sorted(own.keys() ^ weights.keys()))
        raise ValueError(f"the weights must be those of this network; they differ in {names}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def load_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[Any, Any]]) -> None:
    """Load optimizers' states, without their settings, in the memory format of the parameters."""
    for optimizer, state in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": member(state, 0, 1), "param_groups": groups})
        for param, values in optimizer.state.items():
            for name, value in values.items():
                # Fused steps walk through parameter and state in one order.
                if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                    values[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)


def _stacked(group: Group, members: int) -> Group:
    """The rows of a parameter of all members."""
    layout = group.spec
    if layout != "filter":
        layout = members * (1 if layout == "tensor" else int(layout))  # type: ignore[arg-type]
    return replace(group, spec=layout, n_rows=members * group.n_rows)


@lru_cache(maxsize=32)
def _rows(model: str, norm: str, channels: int, classes: int, size: int, width: int | None, released: bool) -> Groups:
    """The rows of a kind of network, found once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _built(model, norm, channels, classes, size, width, released)
        return find_groups(made, torch.randn(8, channels, size, size))


def _built(
    model: str,
    norm: str,
    channels: int,
    classes: int,
    size: int,
    width: int | None,
    released: bool,
    members: int = 1,
) -> nn.Module:
    kind = {"norm": norm, "channels": channels, "classes": classes, "size": size, "width": width}
    return build(model, members=members, released=released, **kind)  # type: ignore[arg-type]

"""Callbacks for training libraries: `callbacks.lightning` and `callbacks.transformers`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.watching.rows import declared_groups

__all__ = ["GroupsOf", "groups_of", "unwrapped"]

GroupsOf = Groups | Callable[[Any], Groups] | None


def groups_of(groups: GroupsOf, model: nn.Module, optimizers: list[Optimizer], inputs: Any, where: str) -> Groups:
    """The groups to watch.

    Args:
        groups: the groups, a function of the model that finds them, or None.
        model: the model that is trained.
        optimizers: its optimizers.
        inputs: an example batch to find groups with, or None.
        where: what the user could set so that there is an example batch.

    Raises:
        TypeError: `groups` is something else.
        ValueError: `groups` and `inputs` are None, and the optimizers declare no rows.
    """
    if isinstance(groups, Groups):
        return groups
    if callable(groups):
        found = groups(model)
        if not isinstance(found, Groups):
            raise TypeError(f"groups must return what find_groups returns, got {type(found).__name__}")
        return found
    if groups is not None:
        raise TypeError(f"groups must be what find_groups returned, or a function of it, got {type(groups).__name__}")
    params = dict(model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    if all(any(group.get("rows") is not None for group in each.param_groups) for each in optimizers):
        return Groups(params, [group for each in optimizers for group, *_ in declared_groups(each, names)])
    if inputs is None:
        raise ValueError(
            "it is unknown which rows to watch: pass groups=lambda model: find_groups(model, batch), make the "
            f"optimizer from groups.param_groups(), or set {where}"
        )
    inputs = _move(inputs, next(model.parameters()).device)
    if isinstance(inputs, Mapping):
        return find_groups(model, **inputs)
    return find_groups(model, *(inputs if isinstance(inputs, tuple | list) else (inputs,)))


def _move(inputs: Any, device: Any) -> Any:
    """A batch, nested or not, on a device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: _move(value, device) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_move(value, device) for value in inputs)
    return inputs


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a library's wrapper, whose hooks are called."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the trainer's optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer

"""What the callbacks for training libraries share: whose rows to follow, and where records go."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steradian.discovery import find_groups
from steradian.groups import Group, Groups, Layout

__all__ = ["GroupsOf", "counted", "folder_of_each", "groups_of", "move", "unwrapped"]

GroupsOf = Groups | Callable[[Any], Groups] | None


def groups_of(groups: GroupsOf, model: nn.Module, optimizers: list[Optimizer], inputs: Any, where: str) -> Groups:
    """The rows to follow.

    Args:
        groups: the rows, a function of the model that finds them, or None.
        model: the model that is trained.
        optimizers: its optimizers.
        inputs: an example batch to find rows with, or None.
        where: what the user could set so that there is one.

    Raises:
        TypeError: `groups` is something else.
        ValueError: nothing says which rows there are.
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
    if all(any(group.get("rows") is not None for group in each.param_groups) for each in optimizers):
        return _told(model, optimizers)
    if inputs is None:
        raise ValueError(
            "nothing says which rows to follow: pass groups=lambda model: find_groups(model, batch), make the "
            f"optimizer from groups.param_groups(), or set {where}"
        )
    inputs = move(inputs, next(model.parameters()).device)
    if isinstance(inputs, Mapping):
        return find_groups(model, **inputs)
    return find_groups(model, *(inputs if isinstance(inputs, tuple | list) else (inputs,)))


def _told(model: nn.Module, optimizers: list[Optimizer]) -> Groups:
    """The rows that param groups tell of, under the names that the model has for the parameters."""
    params = dict(model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    found = []
    for told in (
        group for optimizer in optimizers for group in optimizer.param_groups if group.get("rows") is not None
    ):
        layout = Layout(told["rows"])
        known = [(names[id(param)], param) for param in told["params"] if id(param) in names]
        for members in [known] if told.get("joint") else [[one] for one in known]:
            sizes = [layout.size(param.shape) for _, param in members]
            together = tuple(name for name, _ in members)
            found.append(Group(together, told["rows"], sizes[0][0], sum(d for _, d in sizes), "", float("nan")))
    return Groups(params, found)


def move(inputs: Any, device: Any) -> Any:
    """A batch, nested as it may be, on a device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: move(value, device) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(move(value, device) for value in inputs)
    return inputs


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a library's wrapper, which is the one whose hooks are called."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the trainer's optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def counted(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state counts its steps, as Adam's does."""
    return any("step" in state for state in optimizer.state.values())


def folder_of_each(to: Any, k: int, count: int) -> Any:
    """Where the k-th of several optimizers records: a folder inside of the one that was named, for each its own."""
    if count == 1:
        return to
    if isinstance(to, str | Path):
        return Path(to) / f"optimizer-{k}"
    if isinstance(to, list | tuple):
        return [folder_of_each(one, k, count) for one in to]
    return to

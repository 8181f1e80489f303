"""The state of a parameter: before the first step, and after loading."""

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steradian.geometry import is_plain
from steradian.groups import Layout, is_sharded
from steradian.optim.checks import check_rows
from steradian.optim.rows import arithmetic, check_shape

if TYPE_CHECKING:
    from steradian.optim.base import RowOptimizer

logger = logging.getLogger("steradian")

Options = dict[str, Any]


def sharding() -> ModuleType:
    """`steradian.optim.sharded`, imported when a parameter is sharded: not every torch has what it needs."""
    return importlib.import_module("steradian.optim.sharded")


def step_count(param: Tensor, *, on_device: bool) -> Tensor:
    """A counter: on the host, or on the device if the step must not depend on the host."""
    # On the host from a number, as torch does: then a fake tensor has a known value.
    return (
        torch.zeros((), dtype=torch.float32, device=param.device)
        if on_device
        else torch.tensor(0.0, dtype=torch.float32, device="cpu")
    )


def row_dtype(param: Tensor, group: Options) -> torch.dtype:
    """What the rows of a parameter are computed in, and what one number per row is kept in."""
    return arithmetic(*(each.dtype for each in group["params"])) if group.get("joint") else arithmetic(param.dtype)


def per_row(param: Tensor, group: Options) -> Tensor:
    """One zero for each row."""
    dtype, layout = row_dtype(param, group), Layout(group["rows"])
    if is_sharded(param):
        return sharding().per_row(param, layout, dtype)
    # Of the class of the momentum: plain tensors may not mix with it, and the parameter's class may encode its numbers.
    alike = param if is_plain(param) else torch.zeros_like(param)
    return alike.new_zeros(layout.size(param.shape)[0], dtype=dtype)


def fill(entry: Tensor, numbers: Tensor) -> None:
    """Copy numbers into an entry of the state; if it is sharded they may be those of the whole parameter."""
    if is_sharded(entry) and not is_sharded(numbers):
        sharding().keep(entry, numbers.to(entry.device).contiguous())
    else:
        entry.copy_(numbers)


def take_state(optimizer: "RowOptimizer", saved: Mapping[str, Any], before: Sequence[Options]) -> None:
    """Complete what torch's `load_state_dict` made of a saved state; `before` are the param groups before it.

    Raises:
        ValueError: the state does not fit the parameters, or was made by another optimizer or under other settings.
    """
    each = zip(optimizer.param_groups, saved["param_groups"], before, strict=True)
    for number, (group, of_group, old) in enumerate(each):
        if of_group.get("rows") is not None and not optimizer._marks <= of_group.keys():
            raise ValueError(
                f"a state of {type(optimizer).__name__} must have the settings {_quoted(optimizer._marks)} for its "
                f"rows, got {_quoted(of_group.keys() - {'params'})}: it was made by another optimizer"
            )
        group |= {**old, **group}
        optimizer._check(group)
        check_rows(group)
        for name in ("rows", "joint", "without"):
            if name in old and group[name] != old[name]:
                says = "load_state_dict: param group %d has %s=%r from the checkpoint now, instead of %r"
                logger.warning(says, number, name, group[name], old[name])
        for key, param in zip(of_group["params"], group["params"], strict=True):
            if param in optimizer.state:
                _take(optimizer, param, group, saved["state"][key])


def _take(optimizer: "RowOptimizer", param: Tensor, group: Options, saved: Mapping[str, Any]) -> None:
    """Copy the saved state of a parameter into a new one, which has the right dtypes, devices and memory formats."""
    saved = {name: value for name, value in saved.items() if value is not None}  # torch had momentum of 0 saved so
    if not saved:
        del optimizer.state[param]
        return
    state = optimizer._new_state(param, group)
    if not state.keys() <= saved.keys():
        raise ValueError(
            f"a state of {type(optimizer).__name__} must have {_quoted(state)} here, got {_quoted(saved)}: "
            "it was made by another optimizer or under other settings"
        )
    for name, value in saved.items():
        if name == "step":
            value = torch.as_tensor(
                value, device=None if isinstance(value, Tensor) else "cpu"
            )  # before torch 1.12 it was a plain number
            if value.numel() != 1:
                raise ValueError(f"the state 'step' must be one number, got {tuple(value.shape)}")
            value = value.reshape(())
        if not isinstance(value, Tensor):
            raise ValueError(f"the state {name!r} must be a tensor, got {value!r}")
        if name not in state:
            state[name] = torch.zeros_like(param)  # torch makes SGD's momentum in the first step
        fill(state[name], check_shape(name, value, state[name].shape))
    optimizer.state[param] = state


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))

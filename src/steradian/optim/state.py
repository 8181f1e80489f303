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
from steradian.optim.checks import check_rows, check_unsupported
from steradian.optim.rows import arithmetic, check_shape

if TYPE_CHECKING:
    from steradian.optim.base import RowOptimizer

__all__ = ["fill", "like", "per_row", "row_dtype", "sharding", "step_count", "take_state"]

logger = logging.getLogger("steradian")

Options = dict[str, Any]

_NAMED = ("rows", "joint", "without")


def sharding() -> ModuleType:
    """`steradian.optim.sharded`, imported when a parameter is sharded: not every torch has what it needs."""
    return importlib.import_module("steradian.optim.sharded")


def step_count(param: Tensor, *, on_device: bool) -> Tensor:
    """A counter: on the host, or on the device if the step must not depend on the host."""
    if on_device:
        return torch.zeros((), dtype=torch.float32, device=param.device)
    # From a number, as torch does: then a fake tensor has a known value.
    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def like(param: Tensor) -> Tensor:
    """Zeros in the shape and memory format of a parameter."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def row_dtype(param: Tensor, group: Options) -> torch.dtype:
    """What the rows of a parameter are computed in, and what one number per row is kept in."""
    return arithmetic(*(each.dtype for each in group["params"])) if group.get("joint") else arithmetic(param.dtype)


def per_row(param: Tensor, group: Options, layout: Layout) -> Tensor:
    """One zero for each row."""
    dtype = row_dtype(param, group)
    if is_sharded(param):
        return sharding().per_row(param, layout, dtype)
    # Of the class of the momentum: plain tensors may not mix with it, and the parameter's class may encode its numbers.
    alike = param if is_plain(param) else like(param)
    return alike.new_zeros(layout.size(param.shape)[0], dtype=dtype)


def fill(entry: Tensor, numbers: Tensor) -> None:
    """Copy numbers into an entry of the state; if it is sharded they may be those of the whole parameter."""
    if is_sharded(entry) and not is_sharded(numbers):
        sharding().keep(entry, numbers.to(entry.device).contiguous())
    else:
        entry.copy_(numbers)


# Loading ------------------------------------------------------------------------------------------------------------


def take_state(optimizer: "RowOptimizer", saved: Mapping[str, Any], before: Sequence[Options]) -> None:
    """Complete what torch made of a saved state, in the optimizer's groups and state.

    Args:
        optimizer: the optimizer, after torch's `load_state_dict`.
        saved: the saved state.
        before: the param groups before it, which have the settings that the saved ones lack.

    Raises:
        ValueError: the state does not fit the parameters, or was made by another optimizer or under other settings.
    """
    for number, (group, of_group, old) in enumerate(
        zip(optimizer.param_groups, saved["param_groups"], before, strict=True)
    ):
        if of_group.get("rows") is not None and not optimizer._marks <= of_group.keys():
            raise ValueError(
                f"a state of {type(optimizer).__name__} must have the settings {_quoted(optimizer._marks)} for its "
                f"rows, got {_quoted(of_group.keys() - {'params'})}: it was made by another optimizer"
            )
        for name, value in old.items():
            group.setdefault(name, value)
        optimizer._check(group)
        check_unsupported(group)
        check_rows(group)
        for name in _NAMED:
            if name in old and group[name] != old[name]:
                logger.warning(
                    "load_state_dict: param group %d has %s=%r from the checkpoint now, instead of %r",
                    *(number, name, group[name], old[name]),
                )
        for key, param in zip(of_group["params"], group["params"], strict=True):
            if param in optimizer.state:
                _take(optimizer, param, group, saved["state"][key])


def _take(optimizer: "RowOptimizer", param: Tensor, group: Options, saved: Mapping[str, Any]) -> None:
    """What torch made of the saved state of a parameter, as the optimizer keeps it."""
    state, per_row_names = optimizer.state[param], optimizer._per_row(group)
    for name in [name for name, value in state.items() if value is None]:  # torch had momentum of 0 saved so
        del state[name]
    if not state:
        del optimizer.state[param]
        return
    by_rows = optimizer._needed_by_rows if optimizer._layout(group) is not None else frozenset()
    needed = optimizer._needed | by_rows
    if not needed <= state.keys():
        raise ValueError(
            f"a state of {type(optimizer).__name__} must have {_quoted(needed)} here, got {_quoted(state)}: "
            "it was made by another optimizer or under other settings"
        )
    for name in sorted((optimizer._needed | optimizer._needed_by_rows) & state.keys() - {"step"}):
        if not isinstance(state[name], Tensor):
            raise ValueError(f"the state {name!r} must be a tensor, got {state[name]!r}")
        rows = Layout(group["rows"]).size(param.shape)[:1] if name in per_row_names else param.shape
        check_shape(name, state[name], rows)
    for name, value in state.items():
        if name == "step":
            # Before torch 1.12 it was a plain number.
            device = param.device if optimizer._on_device(group) else torch.device("cpu")
            step = torch.as_tensor(value, dtype=torch.float32, device=device)
            if step.numel() != 1:
                raise ValueError(f"the state 'step' must be one number, got {tuple(step.shape)}")
            state[name] = step.reshape(()).clone()
        elif name in per_row_names:
            state[name] = _laid_out_as(param, saved[name].to(param.device, row_dtype(param, group)))
        else:
            state[name] = _laid_out_as(param, value)


def _laid_out_as(param: Tensor, value: Any) -> Any:
    """A copy of an entry of the state, in the parameter's memory format: the fused step reads both in one order."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != param.shape or not is_plain(param):  # a class that encodes its numbers would encode the copy
        return value.clone()
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))

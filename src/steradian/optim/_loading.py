"""What is made of a saved state: the settings that it has and lacks, and its entries as the optimizers keep them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steradian.groups import Layout
from steradian.optim._checks import check_rows, check_unsupported
from steradian.optim._rows import arithmetic, check_shape
from steradian.optim._states import laid_out_as

if TYPE_CHECKING:
    from steradian.optim._base import RowOptimizer

__all__ = ["take_state"]

Options = dict[str, Any]


def take_state(optimizer: "RowOptimizer", saved: Mapping[str, Any], before: Sequence[Options]) -> None:
    """Go on from what torch made of a saved state, in the optimizer's groups and state.

    Args:
        optimizer: the optimizer, after torch's `load_state_dict`.
        saved: the saved state.
        before: the param groups before it, which have the settings that the saved ones lack.

    Raises:
        ValueError: the state does not fit the parameters, or was made under other settings.
    """
    for group, of_group, old in zip(optimizer.param_groups, saved["param_groups"], before, strict=True):
        for name, value in old.items():
            group.setdefault(name, value)
        optimizer._check(group)
        check_unsupported(group)
        check_rows(group)
        for key, param in zip(of_group["params"], group["params"], strict=True):
            if param in optimizer.state:
                _take(optimizer, param, group, saved["state"][key])


def _take(optimizer: "RowOptimizer", param: Tensor, group: Options, saved: Mapping[str, Any]) -> None:
    """What torch made of the saved state of a parameter, as the optimizer keeps it."""
    state, per_row = optimizer.state[param], optimizer._per_row(group)
    for name in [name for name, value in state.items() if value is None]:  # torch had momentum of 0 saved so
        del state[name]
    by_rows = optimizer._needed_by_rows if optimizer._layout(group) is not None else frozenset()
    needed = optimizer._needed | by_rows
    if state and not needed <= state.keys():
        raise ValueError(
            f"a state of {type(optimizer).__name__} must have {_quoted(needed)} here, got {_quoted(state)}: "
            "it was made by another optimizer or under other settings"
        )
    for name in sorted((optimizer._needed | optimizer._needed_by_rows) & state.keys() - {"step"}):
        rows = Layout(group["rows"]).size(param.shape)[:1] if name in per_row else param.shape
        check_shape(name, state[name], rows)
    for name, value in state.items():
        if name == "step":
            # Before torch 1.12 it was a plain number.
            device = param.device if optimizer._on_device(group) else torch.device("cpu")
            state[name] = torch.as_tensor(value, dtype=torch.float32, device=device).clone()
        elif name in per_row:
            state[name] = laid_out_as(param, saved[name].to(param.device, arithmetic(param.dtype)))
        else:
            state[name] = laid_out_as(param, value)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))

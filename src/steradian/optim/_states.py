"""Pieces of an optimizer's state, as they are at first and when they are loaded."""

from typing import Any

import torch
from torch import Tensor

from steradian.geometry import is_plain
from steradian.groups import Layout, is_sharded
from steradian.optim._optional import sharding
from steradian.optim._rows import arithmetic

__all__ = ["fill", "laid_out_as", "like", "per_row", "step_count"]


def step_count(param: Tensor, *, on_device: bool) -> Tensor:
    """A counter: on the host, and on the device where the step must not depend on the host."""
    if on_device:
        return torch.zeros((), dtype=torch.float32, device=param.device)
    # From a number, as torch does: a fake tensor that was made so knows its value.
    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def like(param: Tensor) -> Tensor:
    """Zeros in the shape and memory format of a parameter."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def per_row(param: Tensor, layout: Layout) -> Tensor:
    """One zero for each row, in the dtype that rows are computed in."""
    if is_sharded(param):
        return sharding().per_row(param, layout, arithmetic(param.dtype))
    # Of the class that the momentum has: plain numbers may not mix with it, and those of the parameter's may be coded.
    alike = param if is_plain(param) else like(param)
    return alike.new_zeros(layout.size(param.shape)[0], dtype=arithmetic(param.dtype))


def fill(entry: Tensor, numbers: Tensor) -> None:
    """Put numbers into an entry of the state; where it is sharded they may be those of the whole."""
    if is_sharded(entry) and not is_sharded(numbers):
        sharding().keep(entry, numbers.to(entry.device).contiguous())
    else:
        entry.copy_(numbers)


def laid_out_as(param: Tensor, value: Any) -> Any:
    """A copy of an entry of the state, in the parameter's memory format: the fused step walks both in one order."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != param.shape or not is_plain(param):  # of a class that codes its numbers, a copy would be coded
        return value.clone()
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)

"""Pieces of an optimizer's state, as they are at first."""

import torch
from torch import Tensor

from steradian.groups import Layout, is_sharded
from steradian.optim._optional import sharding
from steradian.optim._rows import arithmetic

__all__ = ["like", "per_row", "step_count"]


def step_count(param: Tensor, *, on_device: bool) -> Tensor:
    """A counter: on the host, and on the device where the step must not depend on the host."""
    return torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")


def like(param: Tensor) -> Tensor:
    """Zeros in the shape and memory format of a parameter."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def per_row(param: Tensor, layout: Layout) -> Tensor:
    """One zero for each row, in the dtype that rows are computed in."""
    if is_sharded(param):
        return sharding().per_row(param, layout, arithmetic(param.dtype))
    return torch.zeros(layout.size(param.shape)[0], dtype=arithmetic(param.dtype), device=param.device)

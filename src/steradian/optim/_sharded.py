"""Sharded parameters (DTensor, as FSDP2 makes them): each rank steps the rows that it holds.

`fully_shard` cuts dimension 0, so rows that are slices of it lie whole on one rank, and a step needs no communication.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from steradian.groups import Layout

__all__ = ["check_rows", "is_sharded", "local", "per_row"]


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return isinstance(param, DTensor)


def check_rows(param: Tensor, layout: Layout) -> None:
    """Raise a ValueError for rows that would lie on several ranks."""
    assert isinstance(param, DTensor)
    whole = not param.ndim or layout.blocks(param.shape)[0] == param.shape[0]
    for placement in param.placements:
        if isinstance(placement, Replicate) or (isinstance(placement, Shard) and placement.dim == 0 and whole):
            continue
        raise ValueError(
            f"rows {layout.spec!r} of a parameter of shape {tuple(param.shape)} would lie on several ranks under "
            f"{placement}: rows must be slices of dimension 0 where that is sharded, or the parameter replicated"
        )


def per_row(param: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """One zero for each row, sharded as the parameter's dimension 0 is."""
    assert isinstance(param, DTensor)
    rows = layout.size(param.shape)[0]
    return zeros(rows, dtype=dtype, device_mesh=param.device_mesh, placements=param.placements)


def local(param: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The part of a parameter, with its gradient, and of its state that this rank holds, sharing their memory."""
    gradient = param.grad
    assert isinstance(param, DTensor), "the parameters of a joint set are all sharded"
    assert isinstance(gradient, DTensor), "a sharded parameter has a sharded gradient"
    if gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    part = param.to_local().detach()
    part.grad = gradient.to_local().detach()
    return part, {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}

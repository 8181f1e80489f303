"""Sharded parameters (DTensor, as FSDP2 makes them).

`fully_shard` cuts dimension 0, so rows that are slices of it are whole on one rank: each rank steps its own, and
nothing is communicated. Rows that are spread over several ranks are gathered, every rank takes the same step, and keeps
its part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from steradian.groups import Layout
from steradian.optim.rows import RowSet


def _stays_whole(param: Tensor, layout: Layout) -> bool:
    """Whether every row of a sharded parameter is whole on one rank."""
    assert isinstance(param, DTensor)
    slices = not param.ndim or layout.blocks(param.shape)[0] == param.shape[0]
    return all(
        isinstance(placement, Replicate) or (isinstance(placement, Shard) and placement.dim == 0 and slices)
        for placement in param.placements
    )


def part(tensor: Tensor, layout: Layout) -> Tensor:
    """The part of a sharded tensor on this rank, or the whole tensor if its rows are spread over several ranks."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local() if _stays_whole(tensor, layout) else tensor.full_tensor()


def per_row(param: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """One zero for each row: sharded like the parameter's dimension 0, or on every rank if rows are spread out."""
    assert isinstance(param, DTensor)
    rows = layout.size(param.shape)[0]
    placements = param.placements if _stays_whole(param, layout) else [Replicate()] * param.device_mesh.ndim
    return zeros(rows, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


def count_rows(params: list[Tensor], layout: Layout) -> int:
    """How many rows `row_set` has."""
    param = params[0]
    assert isinstance(param, DTensor), "the parameters of a joint set are all sharded"
    whole = all(_stays_whole(each, layout) for each in params)
    return layout.size((param.to_local() if whole else param).shape)[0]


def row_set(
    layout: Layout,
    params: list[Tensor],
    states: list[dict[str, Any]],
    *,
    absent: Sequence[dict[str, Any]] = (),
    fresh: bool = False,
) -> RowSet:
    """The rows of sharded parameters that this rank steps: its own, or all if rows are spread over ranks."""
    pairs = list(zip(params, states, strict=True))
    others = [_local_state(state) for state in absent]
    if all(_stays_whole(param, layout) for param in params):
        parts = [_local(param, state) for param, state in pairs]
        rows = RowSet(layout, [part for part, _ in parts], [state for _, state in parts], absent=others, fresh=fresh)
        rows.owners, rows.sharded = params, True
        rows.refresh = lambda: all(_refresh(part, param) for part, param in zip(rows.params, params, strict=True))
        return rows
    wholes = [_gathered(param, state) for param, state in pairs]
    gathered = [full for full, _, _ in wholes], [state for _, state, _ in wholes]
    rows = RowSet(layout, *gathered, absent=others, fresh=fresh)

    def put_back() -> None:
        for _, _, put_one_back in wholes:
            put_one_back()

    rows.owners, rows.sharded, rows.in_place = params, True, False
    rows.finish = put_back
    return rows


def _local(param: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The part of a parameter, with its gradient, and of its state that this rank holds, sharing their memory."""
    assert isinstance(param, DTensor), "the parameters of a joint set are all sharded"
    part = param.to_local().detach()
    part.grad = _local_gradient(param)
    return part, _local_state(state)


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


def _local_gradient(param: DTensor) -> Tensor:
    gradient = param.grad
    assert isinstance(gradient, DTensor), "a sharded parameter has a sharded gradient"
    if gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    return gradient.to_local().detach()


def _refresh(part: Tensor, param: Tensor) -> bool:
    """Give a part the new gradient of its parameter; False if there is none or the parameter has moved in memory."""
    assert isinstance(param, DTensor)
    if param.grad is None or param.to_local().data_ptr() != part.data_ptr():
        return False
    part.grad = _local_gradient(param)
    return True


def _gathered(param: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any], Callable[[], None]]:
    """A whole parameter with its gradient, its whole state, and a function that writes this rank's part back."""
    gradient = param.grad
    assert isinstance(param, DTensor), "the parameters of a joint set are all sharded"
    assert isinstance(gradient, DTensor), "a sharded parameter has a sharded gradient"
    full = param.full_tensor().detach()
    full.grad = gradient.full_tensor().detach()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    def put_back() -> None:
        keep(param, full)
        for name, value in state.items():
            if isinstance(value, DTensor):
                keep(value, whole[name])

    return full, whole, put_back


def keep(sharded: Tensor, full: Tensor) -> None:
    """Copy this rank's part of a whole tensor, which every rank has, into a sharded one."""
    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    sharded.to_local().copy_(replicated.redistribute(placements=sharded.placements).to_local())

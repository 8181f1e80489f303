"""Sharded parameters (DTensor, as FSDP2 makes them).

`fully_shard` cuts dimension 0, so rows that are slices of it are whole on one rank: each rank steps its own, and
nothing is communicated, but for the momenta of whole matrices that Angular's "muon" needs. Rows that are spread over
several ranks are gathered, every rank takes the same step, and keeps its part.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, zeros

from steradian.groups import Layout
from steradian.optim.rows import Function, RowSet, States


def _stays_whole(param: DTensor, layout: Layout) -> bool:
    """Whether every row of a sharded parameter is whole on one rank."""
    slices = not param.ndim or layout.blocks(param.shape)[0] == param.shape[0]
    return all(placement.is_replicate() or (slices and placement.is_shard(0)) for placement in param.placements)


def part(tensor: DTensor, layout: Layout) -> Tensor:
    """The part of a sharded tensor on this rank, or the whole tensor if its rows are spread over several ranks."""
    return tensor.to_local() if _stays_whole(tensor, layout) else tensor.full_tensor()


def parts(tensors: list[DTensor], layout: Layout) -> list[Tensor]:
    """`part` of tensors that are sharded like one parameter, with one gather for all of them."""
    alike = len({(tensor.placements, tensor.dtype) for tensor in tensors}) == 1
    if not alike or _stays_whole(tensors[0], layout):
        return [part(tensor, layout) for tensor in tensors]
    stacked: Any = torch.stack(tuple(tensors))
    return list(stacked.full_tensor().unbind(0))


def per_row(param: DTensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """One zero for each row: sharded like the parameter's dimension 0, or on every rank if rows are spread out."""
    placements = param.placements if _stays_whole(param, layout) else [Replicate()] * param.device_mesh.ndim
    n_rows = layout.size(param.shape)[0]
    return zeros(n_rows, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


def count_rows(params: list[DTensor], layout: Layout) -> int:
    """How many rows a `ShardedRowSet` has."""
    whole = all(_stays_whole(param, layout) for param in params)
    return layout.size((params[0].to_local() if whole else params[0]).shape)[0]


def keep(sharded: DTensor, full: Tensor) -> None:
    """Copy this rank's part of a whole tensor, which every rank has, into a sharded one."""
    sharded.to_local().copy_(_part_of(sharded, full))


def _part_of(sharded: DTensor, full: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds if it is sharded like another."""
    mesh = sharded.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=sharded.placements).to_local()


class ShardedRowSet(RowSet):
    """The rows of sharded parameters that this rank steps: its own, or all if rows are spread over ranks."""

    sharded = True

    def __init__(self, layout: Layout, params: list[DTensor], states: States, absent: States, fresh: bool) -> None:
        self.in_place = all(_stays_whole(param, layout) for param in params)
        parts = [self._here(param) for param in params]
        own = [{k: self._here(v) if isinstance(v, DTensor) else v for k, v in state.items()} for state in states]
        # Only the step count and the numbers per row of these are written, and each rank has its own.
        others = [{k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()} for state in absent]
        super().__init__(layout, parts, own, others, fresh=fresh)
        self.owners: list[Any] = params
        self._sharded_states = states
        self.refresh()

    def refresh(self) -> bool:
        """Take the owners' new gradients; False if one has none or has moved in memory."""
        for part, param in zip(self.params, self.owners, strict=True):
            if param.grad is None or (self.in_place and param.to_local().data_ptr() != part.data_ptr()):
                return False
            gradient = param.grad
            if self.in_place and gradient.placements != param.placements:
                gradient = gradient.redistribute(placements=param.placements)
            part.grad = self._here(gradient)
        return True

    def finish(self) -> None:
        """Write this rank's part of gathered rows back."""
        if self.in_place:
            return
        for full, param in zip(self.params, self.owners, strict=True):
            keep(param, full)
        for whole, state in zip(self.states, self._sharded_states, strict=True):
            for name, value in state.items():
                if isinstance(value, DTensor):
                    keep(value, whole[name])

    def _on_whole(self, function: Function, rows: Tensor) -> Tensor:
        """The matrix of all ranks' rows, of which this rank keeps its own."""
        if not self.in_place:
            return super()._on_whole(function, rows)
        owner = self.owners[0]
        shape, stride = torch.Size((self.layout.size(owner.shape)[0], self.d)), (self.d, 1)
        mesh, placements = owner.device_mesh, owner.placements
        gathered = DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)
        return _part_of(owner, function(gathered.full_tensor().unsqueeze(0)).squeeze(0).contiguous())

    def _here(self, tensor: DTensor) -> Tensor:
        """The part on this rank, which shares the memory, or a copy of the whole tensor."""
        return (tensor.to_local() if self.in_place else tensor.full_tensor()).detach()

"""Rows that lie on several ranks, brought together on rank 0."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate

from steradian.watching._followed import Followed
from steradian.watching._reduce import Reduction

__all__ = ["Merge"]

Merged = tuple[NDArray[Any], NDArray[np.bool_], dict[str, NDArray[Any]]]


class Merge:
    """Gathers the rows of all ranks; every rank must call it as often as the others.

    Args:
        followed: this rank's rows, in the order of their places.
    """

    def __init__(self, followed: Sequence[Followed]) -> None:
        self.followed = followed
        self.mine = [self._is_mine(entry) for entry in followed]

    @staticmethod
    def _is_mine(entry: Followed) -> bool:
        """Whether this rank contributes the rows: what several ranks hold alike, the first of them does."""
        param = entry.params[0]
        if not isinstance(param, DTensor):
            return dist.get_rank() == 0
        if entry.rows == entry.layout.size(param.shape)[0]:  # gathered, or replicated: all have it
            return dist.get_rank() == 0
        coordinate = tuple(param.device_mesh.get_coordinate() or ())
        return all(
            at == 0
            for at, placement in zip(coordinate, param.placements, strict=True)
            if isinstance(placement, Replicate)
        )

    def __call__(self, rows: NDArray[Any], active: NDArray[np.bool_], *, together: bool) -> Merged | None:
        """Statistics, activity and whole rows by group, on rank 0; None elsewhere.

        Args:
            rows: (steps, quantities, n), this rank's.
            active: (steps, groups).
            together: all ranks take part; otherwise rank 0 has its own rows alone, and groups some of whose rows are
                elsewhere are left out, since statistics of a part are not those of the whole.
        """
        mine = [
            rows[:, :, entry.span] if own else rows[:, :, :0]
            for entry, own in zip(self.followed, self.mine, strict=True)
        ]
        shares: list[Any] = [(mine, active)]
        if together:
            rank = dist.get_rank()
            shares = [None] * dist.get_world_size()
            dist.gather_object((mine, active), shares if rank == 0 else None)
            if rank:
                return None
        elif dist.get_rank():
            return None
        whole, spans, start = {}, [], 0
        for k, entry in enumerate(self.followed):
            whole[entry.name] = np.concatenate([share[0][k] for share in shares], axis=2)
            width = whole[entry.name].shape[2]
            spans.append(slice(start, start + width))
            start += width
        stacked = torch.from_numpy(np.concatenate(list(whole.values()), axis=2))
        together_active = np.logical_or.reduce([share[1] for share in shares])
        together_active &= [
            whole[entry.name].shape[2] == entry.layout.size(entry.params[0].shape)[0] for entry in self.followed
        ]
        return Reduction(spans)(stacked).numpy(), together_active, whole

"""Rows on several ranks, gathered on rank 0. Imported only if a parameter is sharded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate

from steradian.watching.rows import WatchedGroup
from steradian.watching.statistics import Statistics

__all__ = ["Merge"]

Merged = tuple[NDArray[Any], NDArray[np.bool_], dict[str, NDArray[Any]]]


class Merge:
    """Gathers the rows of all ranks; every rank must call it equally often."""

    def __init__(self, watched: Sequence[WatchedGroup]) -> None:
        self.watched = watched
        self.mine = [_is_mine(group) for group in watched]

    def __call__(self, rows: NDArray[Any], active: NDArray[np.bool_], *, together: bool) -> Merged | None:
        """Statistics, activity and all rows by group, on rank 0; None on other ranks.

        Takes this rank's rows, (steps, quantities, n), and activity, (steps, groups). If not all ranks are `together`,
        groups with rows on other ranks are left out: statistics of a part are not those of the whole.
        """
        mine = [
            rows[:, :, group.span] if own else rows[:, :, :0]
            for group, own in zip(self.watched, self.mine, strict=True)
        ]
        shares: list[Any] = [(mine, active)]
        if together:
            shares = [None] * dist.get_world_size()
            dist.gather_object((mine, active), None if dist.get_rank() else shares)
        if dist.get_rank():
            return None
        whole, spans, start = {}, [], 0
        for k, group in enumerate(self.watched):
            whole[group.name] = np.concatenate([share[0][k] for share in shares], axis=2)
            width = whole[group.name].shape[2]
            spans.append(slice(start, start + width))
            start += width
        stacked = torch.from_numpy(np.concatenate(list(whole.values()), axis=2))
        stepped = np.logical_or.reduce([share[1] for share in shares])
        stepped &= [whole[group.name].shape[2] == group.total_rows for group in self.watched]
        return Statistics(spans)(stacked).numpy(), stepped, whole


def _is_mine(group: WatchedGroup) -> bool:
    """Whether this rank contributes the rows: of ranks that hold the same rows, the first does."""
    param = group.params[0]
    if not isinstance(param, DTensor) or group.gathered:
        return dist.get_rank() == 0
    coordinate = tuple(param.device_mesh.get_coordinate() or ())
    replicated = (
        at for at, placement in zip(coordinate, param.placements, strict=True) if isinstance(placement, Replicate)
    )
    return all(at == 0 for at in replicated)

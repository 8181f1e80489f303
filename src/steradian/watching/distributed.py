"""Rows on several ranks, gathered on rank 0. Imported only if a parameter is sharded."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate

from steradian.watching.rows import WatchedGroup
from steradian.watching.statistics import Statistics

__all__ = ["merged"]


def merged(
    watched: Sequence[WatchedGroup], rows: NDArray[Any], active: NDArray[np.bool_], *, together: bool
) -> tuple[NDArray[Any], NDArray[np.bool_], dict[str, NDArray[Any]]] | None:
    """Statistics, activity and all rows by group, on rank 0; None on other ranks, which must call it as often.

    Takes this rank's rows, (steps, quantities, n), and activity, (steps, groups). If not all ranks are `together`,
    groups with rows on other ranks are left out: statistics of a part are not those of the whole.
    """
    mine = [rows[:, :, group.span if _is_mine(group) else slice(0)] for group in watched]
    shares: list[Any] = [(mine, active)]
    if together:
        shares = [None] * dist.get_world_size()
        dist.gather_object((mine, active), None if dist.get_rank() else shares)
    if dist.get_rank():
        return None
    whole = {of.name: np.concatenate([share[0][k] for share in shares], axis=2) for k, of in enumerate(watched)}
    widths = [of.shape[2] for of in whole.values()]
    spans = [slice(end - width, end) for width, end in zip(widths, accumulate(widths), strict=True)]
    stacked = torch.from_numpy(np.concatenate(list(whole.values()), axis=2))
    stepped = np.logical_or.reduce([share[1] for share in shares])
    stepped &= [width == group.total_rows for width, group in zip(widths, watched, strict=True)]
    return Statistics(spans)(stacked).numpy(), stepped, whole


def _is_mine(group: WatchedGroup) -> bool:
    """Whether this rank contributes the rows: of ranks that hold the same rows, the first does."""
    param = group.params[0]
    if not isinstance(param, DTensor) or group.gathered:
        return dist.get_rank() == 0
    coordinate = param.device_mesh.get_coordinate() or ()
    places = zip(coordinate, param.placements, strict=True)
    return all(at == 0 for at, placement in places if isinstance(placement, Replicate))

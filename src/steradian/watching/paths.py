"""Directions of chosen rows over time, ever more rarely, so that a long training keeps few more than a short one."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from steradian.watching.records import Point
from steradian.watching.rows import WatchedGroup

__all__ = ["PathHistory", "Paths"]

_POINTS = 256
"""Points after which every second observation is left out, and again after each further half of them."""
_LONGEST = 2**14
"""Rows that are longer are not chosen unless the user names them."""
_AT_ONCE = 32
"""Points for which memory is allocated at once."""
_KEPT = 512
"""Points of a path on disk; of more, every second one is dropped."""


class Paths:
    """Rows whose directions are recorded.

    Args:
        watched: all watched groups.
        chosen: {group: [row, …]}. None: the first row of the first, the middle and the last group.
        rank: rank 0 records the rows that it holds; other ranks only help to gather rows that span several ranks.

    Attributes:
        chosen: the rows, each as its group and its number in the group.
    """

    chosen: list[tuple[WatchedGroup, int]]

    def __init__(
        self, watched: Sequence[WatchedGroup], chosen: Mapping[str, Sequence[int]] | None, *, rank: int = 0
    ) -> None:
        self.stride, self.points = 1, 0
        # Rows as views of the weights, and the addresses that they are valid for; None: rows are cut anew.
        self._views: list[Tensor] | None = None
        self._addresses: list[tuple[int, tuple[int, ...]]] = []
        self._orders: dict[str, list[int]] = {}
        # Memory for points, some observations at a time, and a view of it for each observation.
        self._memory: list[list[Tensor]] = []
        self._lines: list[tuple[Tensor, ...]] = []
        self._kept: list[int] = []
        if chosen is None:
            # Only on rank 0, which cannot make the other ranks gather rows.
            usual = [group for group in watched if group.n_rows and group.size <= _LONGEST]
            usual = [group for group in usual if not group.gathered]
            places = {0, len(usual) // 2, len(usual) - 1} if usual else set()
            self.chosen = [(usual[k], 0) for k in sorted(places)]
            return
        by_name = {group.name: group for group in watched}
        if rank:
            chosen = {name: rows for name, rows in chosen.items() if by_name[name].gathered}
        for name, rows in chosen.items():
            for row in rows:
                if not isinstance(row, Integral) or not 0 <= row < by_name[name].n_rows:
                    raise ValueError(f"paths: {name} has rows 0 to {by_name[name].n_rows - 1}, got {row!r}")
        self.chosen = [(by_name[name], int(row)) for name, rows in chosen.items() for row in rows]

    def observe(self, slot: int, number: int) -> None:
        """Copy the rows after an observed step, unless it is left out.

        Args:
            slot: the observation among those that are not flushed yet.
            number: the observation among all.
        """
        if not self.chosen or number % self.stride:
            return
        here = self._here()
        if len(self._kept) == len(self._lines):
            memory = [x.new_empty((_AT_ONCE, *x.shape), dtype=torch.float32) for x in here]
            self._memory.append(memory)
            self._lines += zip(*(each.unbind(0) for each in memory), strict=True)
        torch._foreach_copy_(self._lines[len(self._kept)], here)  # one launch for all
        self._kept.append(slot)
        self.points += 1
        if self.points >= _POINTS:
            self.stride, self.points = 2 * self.stride, _POINTS // 2

    def take(self) -> tuple[list[list[int]], list[Tensor]]:
        """What was copied since the last call: slots, some at a time, and for these the points of each row, (k, d).

        The tensors are overwritten by later observations.
        """
        kept = [self._kept[k : k + _AT_ONCE] for k in range(0, len(self._kept), _AT_ONCE)]
        del self._memory[len(kept) :], self._lines[len(kept) * _AT_ONCE :]
        self._kept = []
        return kept, [each[: len(k)] for k, memory in zip(kept, self._memory, strict=True) for each in memory]

    def _here(self) -> list[Tensor]:
        """The rows as they are now: views, which are reused while the weights stay at their addresses."""
        addresses: list[tuple[int, tuple[int, ...]]] = []
        for group, _ in self.chosen:
            param: Any = group.params[0]
            local = param.to_local() if group.sharded else param
            addresses.append((local.data_ptr(), local.stride()))
        if self._views is not None and addresses == self._addresses:
            return self._views
        with torch.no_grad():
            here, views = zip(*(self._row(group, row) for group, row in self.chosen), strict=True)
        self._views, self._addresses = list(here) if all(views) else None, addresses
        return list(here)

    def _row(self, group: WatchedGroup, row: int) -> tuple[Tensor, bool]:
        """One row as a vector, and whether it is a view of the parameter.

        The entries of a slice of dimension 0 are in the order of memory, so that it is a view; the order is that of the
        first call, so that a path keeps its coordinates if the memory format changes.
        """
        if len(group.params) > 1:
            return group.cut(group.params)[row], False
        base = group.local(group.params[0])
        if group.layout.spec != "filter" or not base.ndim:
            here = group.layout.rows(base)[row]
        else:
            order = self._orders.get(group.name)
            if order is None:
                order = sorted(range(base.ndim - 1), key=base[row].stride().__getitem__, reverse=True)
                self._orders[group.name] = order
            here = base[row].permute(order).reshape(-1)
        return here, here.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


class PathHistory:
    """All points of a run's paths so far; every second point of a path is dropped whenever it has more than 512."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, int], list[Point]] = {}

    def add(self, new: Iterable[Point]) -> list[Point]:
        """Add points; returns those that are kept, in the order of their steps."""
        for point in new:
            points = self._paths.setdefault((point[1], point[2]), [])
            points.append(point)
            if len(points) > _KEPT:
                del points[1:-1:2]
        return sorted((point for points in self._paths.values() for point in points), key=lambda point: point[0])

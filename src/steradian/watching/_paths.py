"""Directions of chosen rows over time, ever more rarely, so that a long training keeps no more than a short one."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from steradian.groups import is_sharded
from steradian.watching._followed import Followed, part

__all__ = ["Paths"]

_POINTS = 256
_LONGEST = 2**14
_AT_ONCE = 32


class Paths:
    """Rows whose directions are kept.

    Args:
        followed: all followed rows.
        chosen: {group: [row, …]}. None: the first row of the first, the middle and the last group.
        rank: rank 0 keeps the rows that it has; the others take part where rows lie on several ranks.

    Attributes:
        chosen: the rows, each as its group and its number there.
    """

    chosen: list[tuple[Followed, int]]

    def __init__(
        self, followed: Sequence[Followed], chosen: Mapping[str, Sequence[int]] | None, *, rank: int = 0
    ) -> None:
        by_name = {entry.name: entry for entry in followed}
        self.stride, self.points = 1, 0
        # Rows as views of the weights, and where the weights lay then; None: they must be cut anew.
        self._views: list[Tensor] | None = None
        self._addresses: list[tuple[int, tuple[int, ...]]] = []
        self._orders: dict[str, list[int]] = {}
        # Room for the points of some observations at a time, and its lines, one of each row for each observation.
        self._room: list[list[Tensor]] = []
        self._lines: list[tuple[Tensor, ...]] = []
        self._kept: list[int] = []
        if chosen is None:
            # Rank 0 alone comes here: it cannot ask the others for rows that lie on several ranks.
            usual = [entry for entry in followed if entry.rows and entry.size <= _LONGEST and not _gathered(entry)]
            places = {0, len(usual) // 2, len(usual) - 1} if usual else set()
            self.chosen = [(usual[k], 0) for k in sorted(places)]
            return
        if rank:
            chosen = {name: rows for name, rows in chosen.items() if _gathered(by_name[name])}
        for name, rows in chosen.items():
            for row in rows:
                if not isinstance(row, Integral) or not 0 <= row < by_name[name].rows:
                    raise ValueError(f"paths: {name} has rows 0 to {by_name[name].rows - 1}, got {row!r}")
        self.chosen = [(by_name[name], int(row)) for name, rows in chosen.items() for row in rows]

    def follow(self, index: int, number: int) -> None:
        """Keep where the rows are after an observed step, if it is its turn.

        Args:
            index: the observation among those that are not taken yet.
            number: the observation among all.
        """
        if not self.chosen or number % self.stride:
            return
        here = self._here()
        if len(self._kept) == len(self._lines):
            self._make_room(here)
        torch._foreach_copy_(self._lines[len(self._kept)], here)  # one launch for all
        self._kept.append(index)
        self.points += 1
        if self.points >= _POINTS:
            self.stride, self.points = 2 * self.stride, _POINTS // 2

    def take(self) -> tuple[list[list[int]], list[Tensor]]:
        """What was kept since the last time: observations, some at a time, and for these of each row (points, d).

        The tensors are overwritten by what is kept next.
        """
        kept = [self._kept[k : k + _AT_ONCE] for k in range(0, len(self._kept), _AT_ONCE)]
        del self._room[len(kept) :], self._lines[len(kept) * _AT_ONCE :]
        self._kept = []
        return kept, [each[: len(k)] for k, room in zip(kept, self._room, strict=True) for each in room]

    def _make_room(self, here: list[Tensor]) -> None:
        room = [x.new_empty((_AT_ONCE, *x.shape), dtype=torch.float32) for x in here]
        self._room.append(room)
        self._lines += zip(*(each.unbind(0) for each in room), strict=True)

    def _here(self) -> list[Tensor]:
        """The rows as they are now: views, which are kept as long as the weights stay in their memory."""
        addresses = [_address(entry.params[0]) for entry, _ in self.chosen]
        if self._views is not None and addresses == self._addresses:
            return self._views
        with torch.no_grad():
            here = [self._row(entry, row) for entry, row in self.chosen]
        viewed = all(_shares(x, entry) for x, (entry, _) in zip(here, self.chosen, strict=True))
        self._views, self._addresses = here if viewed else None, addresses
        return here

    def _row(self, entry: Followed, row: int) -> Tensor:
        """One row as a vector; of a slice of dimension 0 in the order of memory, which needs no copy of the others.

        The order is that of the first look: a path goes on in its coordinates where the memory format changes.
        """
        if len(entry.params) > 1 or entry.layout.spec != "filter" or not entry.params[0].ndim:
            return entry.cut(entry.params)[row]
        here = part(entry.params[0], entry.layout)[row]
        order = self._orders.get(entry.name)
        if order is None:
            order = sorted(range(here.ndim), key=here.stride().__getitem__, reverse=True)
            self._orders[entry.name] = order
        return here.permute(order).reshape(-1)


def _address(param: Any) -> tuple[int, tuple[int, ...]]:
    """Where a parameter lies and how; of a sharded one, which has no address of its own, the part that is here."""
    local = param.to_local() if is_sharded(param) else param
    return local.data_ptr(), local.stride()


def _shares(here: Tensor, entry: Followed) -> bool:
    """Whether a row lies in the memory of its only parameter."""
    base = part(entry.params[0], entry.layout)
    return len(entry.params) == 1 and here.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _gathered(entry: Followed) -> bool:
    """Whether rows lie on several ranks, so that all must take part in looking at one."""
    return is_sharded(entry.params[0]) and entry.rows == entry.layout.size(entry.params[0].shape)[0]

"""Directions of chosen rows over time, recorded ever less often, so that long trainings do not keep many more."""

from collections.abc import Mapping, Sequence
from numbers import Integral

import torch
from torch import Tensor

from steradian.watching.rows import INVARIANT, WatchedGroup

__all__ = ["Paths"]

_POINTS = 128  # points after which every second observation is left out, and again after each further half of them
_LONGEST = 2**10  # rows that are longer are not chosen unless the user names them


class Paths:
    """Rows whose directions are recorded: {group: [row, …]}, or the first row of the first, middle and last group.

    Rank 0 records its rows; other ranks only help to gather rows that span several ranks.
    """

    def __init__(
        self, watched: Sequence[WatchedGroup], chosen: Mapping[str, Sequence[int]] | None, *, rank: int = 0
    ) -> None:
        self.stride, self.points = 1, 0
        self._kept: list[tuple[int, list[Tensor]]] = []
        self._views, self._addresses = list[Tensor](), list[int]()
        by_name = {group.name: group for group in watched}
        if chosen is None:
            # Only on rank 0, which cannot make the other ranks gather rows.
            usual = [group for group in watched if group.n_rows and group.size <= _LONGEST and not group.gathered]
            usual = [group for group in usual if group.label == INVARIANT] or [g for g in usual if g.n_rows > 1]
            places = {0, len(usual) // 2, len(usual) - 1} if usual else set()
            chosen = {usual[k].name: [0] for k in sorted(places)}
        if rank:
            chosen = {name: rows for name, rows in chosen.items() if by_name[name].gathered}
        for name, rows in chosen.items():
            for row in rows:
                if not isinstance(row, Integral) or not 0 <= row < by_name[name].n_rows:
                    raise ValueError(f"paths: {name} has rows 0 to {by_name[name].n_rows - 1}, got {row!r}")
        self.chosen = [(by_name[name], int(row)) for name, rows in chosen.items() for row in rows]

    def observe(self, slot: int, number: int) -> None:
        """Copy the rows after an observed step, unless it is left out; `number` counts all, `slot` since a flush."""
        if not self.chosen or number % self.stride:
            return
        with torch.no_grad():
            here = self._here()
            copies = [torch.empty_like(row, dtype=torch.float32) for row in here]  # with its strides
            torch._foreach_copy_(copies, here)  # one launch for all
        self._kept.append((slot, copies))
        self.points += 1
        if self.points >= _POINTS:
            self.stride, self.points = 2 * self.stride, _POINTS // 2

    def _here(self) -> list[Tensor]:
        """The rows as they are; views of weights stay valid until a parameter lies elsewhere in memory."""
        dense = [param for group, _ in self.chosen for param in group.params if not group.sharded]
        addresses = list(map(Tensor.data_ptr, dense))
        if not self._views or addresses != self._addresses:
            rows = [group.row(row) for group, row in self.chosen]
            storages = {param.untyped_storage().data_ptr() for param in dense}
            stay = all(row.untyped_storage().data_ptr() in storages for row in rows)
            self._views, self._addresses = rows if stay else [], addresses
            return rows
        return self._views

    def take(self) -> tuple[list[int], list[Tensor]]:
        """The copies since the last call: slots, and the points of each row, (slots, d)."""
        kept, self._kept = self._kept, []
        rows = zip(*(copies for _, copies in kept), strict=True)
        return [slot for slot, _ in kept], [torch.stack(each).reshape(len(kept), -1) for each in rows]

"""Directions of chosen rows over time, ever more rarely, so that a long training keeps no more than a short one."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from steradian.groups import is_sharded
from steradian.watch._followed import Followed, part
from steradian.watch._handover import Handover

__all__ = ["Paths"]

_POINTS = 256
_LONGEST = 2**14


class Paths:
    """Rows whose directions are kept.

    Args:
        followed: all followed rows.
        chosen: {group: [row, …]}. None: the first row of the first, the middle and the last group.
        rank: rank 0 keeps the rows that it has; the others take part where rows lie on several ranks.
    """

    def __init__(
        self, followed: Sequence[Followed], chosen: Mapping[str, Sequence[int]] | None, *, rank: int = 0
    ) -> None:
        by_name = {entry.name: entry for entry in followed}
        self.stride, self.points = 1, 0
        self._views: dict[int, tuple[int, Tensor]] = {}
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
                if not 0 <= row < by_name[name].rows:
                    raise ValueError(f"paths: {name} has rows 0 to {by_name[name].rows - 1}, got {row}")
        self.chosen = [(by_name[name], row) for name, rows in chosen.items() for row in rows]

    def follow(self, handover: Handover) -> None:
        """Keep where the rows are after the step that was just taken in, if it is its turn; without autograd."""
        if not self.chosen or handover.observations % self.stride:
            return
        here = [self._where(k, entry, row) for k, (entry, row) in enumerate(self.chosen)]
        kept = [x.new_empty(x.shape, dtype=torch.float32) for x in here]
        torch._foreach_copy_(kept, here)  # one launch for all
        for (entry, row), x in zip(self.chosen, kept, strict=True):
            handover.path(entry.name, row, x)
        self.points += 1
        if self.points >= _POINTS:
            self.stride, self.points = 2 * self.stride, _POINTS // 2

    def _where(self, k: int, entry: Followed, row: int) -> Tensor:
        """The row as it is now: a view that is kept as long as the weights stay in their memory."""
        address = entry.params[0].data_ptr()
        known = self._views.get(k)
        if known is not None and known[0] == address:
            return known[1]
        here = _row(entry, row)
        base = part(entry.params[0], entry.layout)
        if here.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and len(entry.params) == 1:
            self._views[k] = (address, here)
        return here


def _row(entry: Followed, row: int) -> Tensor:
    """One row as a vector; of a slice of dimension 0 in the order of memory, which needs no copy of the others."""
    if len(entry.params) > 1 or entry.layout.spec != "filter" or not entry.params[0].ndim:
        return entry.cut(entry.params)[row]
    here = part(entry.params[0], entry.layout)[row]
    order = sorted(range(here.ndim), key=here.stride().__getitem__, reverse=True)
    return here.permute(order).reshape(-1)


def _gathered(entry: Followed) -> bool:
    """Whether rows lie on several ranks, so that all must take part in looking at one."""
    return is_sharded(entry.params[0]) and entry.rows == entry.layout.size(entry.params[0].shape)[0]

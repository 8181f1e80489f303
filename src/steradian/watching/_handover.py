"""From the devices to the host: observed steps become blocks, some steps at a time, in the order of the steps."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steradian.watching._block import Block
from steradian.watching._paths import Paths
from steradian.watching._station import Station
from steradian.watching._transfer import Transfer

if TYPE_CHECKING:
    from steradian.watching._merge import Merge

__all__ = ["Handover"]

Array = NDArray[Any]

_GRAD = attrgetter("grad")


@dataclass(eq=False)
class _Waiting:
    """Observed steps whose numbers are on their way."""

    transfer: Transfer
    steps: NDArray[np.int64]
    active: NDArray[np.bool_]
    quantities: list[tuple[str, ...]]
    kept: list[int]
    logged: list[tuple[int, str, float | None, bool]]
    paths: list[list[int]]


class Handover:
    """Gathers what is observed and hands it over as blocks.

    Args:
        run: the run's name.
        stations: where the numbers are.
        rows: names of groups all of whose rows are kept.
        rows_every: all rows of all groups are kept at every so many observations; 0: never.
        merge: brings rows of several ranks together.
        paths: rows whose directions are kept.

    Attributes:
        complete: no row that it follows is gone.
    """

    def __init__(
        self,
        run: str,
        stations: Sequence[Station],
        *,
        rows: frozenset[str],
        rows_every: int,
        merge: "Merge | None",
        paths: Paths,
    ) -> None:
        self.run = run
        self.stations = stations
        self.followed = [entry for station in stations for entry in station.followed]
        self.names = tuple(entry.name for entry in self.followed)
        self._params = [param for entry in self.followed for param in entry.params]
        self._all = self._now = [True] * len(self.followed)
        self.rows, self.rows_every = rows, rows_every
        self.merge = merge
        self.paths = paths
        self.observations = 0
        self.complete = True
        self._room = min(station.steps for station in stations)
        self._steps: list[int] = []
        self._active: list[list[bool]] = []
        self._logged: list[tuple[int, str, float | Tensor, Tensor | None]] = []
        self._waiting: deque[_Waiting] = deque()

    # On the devices

    def observe(self, step: int, *, again: bool = False) -> None:
        """Have the stations take in the step that was just made.

        Args:
            step: its number.
            again: the same parameters have gradients as in the last one, and autograd need not be off: turning it off
                takes longer than most of what there is to do then.
        """
        for station in self.stations:
            station.observe(len(self._steps))
        self._steps.append(step)
        if not again:
            # It may be in every step, so without a line of Python for each parameter.
            usual = self.complete and all(map(is_not, map(_GRAD, self._params), repeat(None)))
            self._now = self._all if usual else [entry.active for entry in self.followed]
        self._active.append(self._now)
        self.observations += 1
        self.paths.follow(len(self._steps) - 1, self.observations)

    def log(self, step: int, name: str, value: float | Tensor) -> None:
        """A number of the run as a whole."""
        skipped = next((station.skipped.clone() for station in self.stations if station.may_skip), None)
        self._logged.append((step, name, value, skipped))

    @property
    def full(self) -> bool:
        """Whether the stations can hold no more."""
        return len(self._steps) >= self._room

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._steps and not self._logged

    @property
    def waiting(self) -> bool:
        """Whether something was sent that is not handed over yet."""
        return bool(self._waiting)

    def send(self) -> None:
        """Reduce what the stations hold and send it on its way."""
        if self.empty:
            return
        count = len(self._steps)
        active = np.array(self._active, dtype=bool).reshape(count, len(self.followed))
        first = self.observations - count
        kept = [k for k in range(count) if self.rows_every > 0 and (first + k) % self.rows_every == 0]
        tensors, quantities = self._reduced(active, kept) if count else ([], [])
        tensors += [t for _, _, value, skipped in self._logged for t in (value, skipped) if isinstance(t, Tensor)]
        paths, points = self.paths.take()
        tensors += points
        self._waiting.append(
            _Waiting(
                Transfer(tensors),
                np.array(self._steps, dtype=np.int64),
                active,
                quantities,
                kept,
                [
                    (step, name, None if isinstance(value, Tensor) else float(value), skipped is not None)
                    for step, name, value, skipped in self._logged
                ],
                paths,
            )
        )
        self._steps, self._active, self._logged = [], [], []

    def _reduced(self, active: NDArray[np.bool_], kept: list[int]) -> tuple[list[Tensor], list[tuple[str, ...]]]:
        """For each station its statistics, rows and skipped steps, then the rows of each chosen group."""
        tensors: list[Tensor] = []
        quantities = []
        start, count = 0, len(active)
        for station in self.stations:
            mine = torch.from_numpy(active[:, start : start + len(station.followed)].copy())
            start += len(station.followed)
            statistics, rows = station.reduce(count, mine)
            quantities.append(station.quantities)
            # A slice, since a list of places would have to be sent to the device, and waited for.
            some = rows[slice(kept[0], None, self.rows_every)] if kept else rows[:0]
            tensors += [statistics, some if self.merge is None else rows]
            tensors.append(station.skips[:count].clone() if station.may_skip else station.skips[:0])
            tensors += [rows[:, :, entry.span] for entry in station.followed if entry.name in self.rows]
        return tensors, quantities

    # On the host

    def blocks(self, *, wait: bool = False, together: bool = True) -> Iterator[Block]:
        """What has arrived.

        Args:
            wait: for what has not.
            together: where rows are merged, all ranks take part.
        """
        while self._waiting and (wait or self._waiting[0].transfer.ready()):
            block = self._block(self._waiting.popleft(), together=together)
            if block is not None:
                yield block

    def _block(self, waiting: _Waiting, *, together: bool) -> Block | None:
        arrays = iter(waiting.transfer.arrays())
        union = tuple(dict.fromkeys(name for names in waiting.quantities for name in names))
        count = len(waiting.steps)
        steps, went, active = waiting.steps, np.ones(count, dtype=bool), waiting.active
        parts: list[Array] = []
        single: list[tuple[int, str, Array]] = []
        # Without observed steps there are numbers of the run as a whole alone.
        for station, names in zip(self.stations if count else (), waiting.quantities, strict=True):
            statistics, rows, skips = next(arrays), next(arrays), next(arrays)
            parts.append(_spread(statistics, names, union))
            if len(skips):
                went &= skips[:, 0] == 0
                steps = waiting.steps - skips[:, 1].astype(np.int64)
            chosen = {entry.name: next(arrays) for entry in station.followed if entry.name in self.rows}
            if self.merge is None:
                single += self._single(station, rows, chosen, waiting.kept, names, union)
            else:
                merged = self.merge(rows, active, together=together)
                if merged is None:
                    return None
                parts[-1], active, whole = merged
                single += [
                    (k, name, whole[name][k])
                    for k in range(count)
                    for name in whole
                    if k in waiting.kept or name in self.rows
                ]
        logged = []
        for step, name, value, may_skip in waiting.logged:
            value = float(next(arrays)) if value is None else value
            logged.append((max(0, step - int(next(arrays)) if may_skip else step), name, value))
        paths: list[tuple[int, str, int, Array]] = []
        for kept in waiting.paths:
            points = [(entry.name, row, _units(next(arrays))) for entry, row in self.paths.chosen]
            paths += [(k, group, row, u[i]) for i, k in enumerate(kept) for group, row, u in points]
        values = np.concatenate(parts, axis=2) if parts else np.zeros((0, len(union), len(self.names), 6))
        place = {name: k for k, name in enumerate(self.names)}
        return Block(
            run=self.run,
            steps=steps[went],
            groups=self.names,
            quantities=union,
            values=values[went],
            active=active[went],
            logged=logged,
            rows=[(int(steps[k]), name, v) for k, name, v in single if went[k] and active[k, place[name]]],
            paths=[(int(steps[k]), group, row, direction) for k, group, row, direction in paths if went[k]],
        )

    def _single(
        self,
        station: Station,
        rows: Array,
        chosen: dict[str, Array],
        kept: list[int],
        names: tuple[str, ...],
        union: tuple[str, ...],
    ) -> list[tuple[int, str, Array]]:
        """Single rows as (observation, group, (quantities, n))."""
        found = []
        for entry in station.followed:
            if entry.name in chosen:
                values = _spread(chosen[entry.name], names, union)
                found += [(k, entry.name, values[k]) for k in range(len(values))]
            else:
                values = _spread(rows[:, :, entry.span], names, union)
                found += [(k, entry.name, values[index]) for index, k in enumerate(kept)]
        return found


def _spread(values: Array, names: Sequence[str], union: Sequence[str]) -> Array:
    """Values of some quantities, on dimension 1, among those of all."""
    if tuple(names) == tuple(union):
        return values
    found = np.full((values.shape[0], len(union), *values.shape[2:]), np.nan, dtype=values.dtype)
    found[:, [union.index(name) for name in names]] = values
    return found


def _units(rows: Array) -> Array:
    """The directions of rows, (points, d); NaN for a row at the origin or at infinity, which has none."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    directions: Array = (rows / np.where((lengths == 0) | np.isinf(lengths), np.nan, lengths)).astype(rows.dtype)
    return directions

"""A block of observed steps on the host: what sinks get, and the one table made from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steradian.watching.records import COLUMNS, PATH_COLUMNS, ROW_COLUMNS, STATISTICS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Alert", "Block", "Columns", "Point", "Words", "path_columns"]

ONE_NUMBER = frozenset({"lr"})
"""Quantities of a group that are the same in all of its rows."""

_MEAN = STATISTICS.index("mean")


class Words(NamedTuple):
    """A column of words: which of the names each entry is."""

    codes: NDArray[Any]
    names: list[str]


Columns = dict[str, NDArray[Any] | Words | list[NDArray[Any]]]
Point = tuple[int, str, int, NDArray[Any]]
"""Where a row is after a step: step, group, row, direction."""


@dataclass(frozen=True)
class Alert:
    """Something that a person should know, said once.

    Attributes:
        step: when it was seen.
        group: the group's name; "" for the run as a whole.
        kind: one word for it.
        text: in words.
    """

    step: int
    group: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.group or 'all groups'}: {self.text}"


@dataclass(eq=False)
class Block:
    """Some observed steps of a run, as sinks get them.

    Attributes:
        run: the run's name.
        steps: (S,) step numbers.
        groups: names of the groups.
        quantities: names of the quantities.
        values: (S, quantities, groups, statistics); NaN where something is not known.
        active: (S, groups), where a group was stepped.
        logged: (step, name, value) of the run as a whole.
        rows: (step, group, (quantities, n)) single rows.
        paths: (step, group, row, direction).
    """

    run: str
    steps: NDArray[np.int64]
    groups: tuple[str, ...]
    quantities: tuple[str, ...]
    values: NDArray[Any]
    active: NDArray[np.bool_]
    logged: list[tuple[int, str, float]] = field(default_factory=list)
    rows: list[tuple[int, str, NDArray[Any]]] = field(default_factory=list)
    paths: list[Point] = field(default_factory=list)

    def columns(self) -> "Columns":
        """The columns run, step, group, quantity, statistic, value."""
        names = list(dict.fromkeys(name for _, name, _ in self.logged))
        code = {name: len(self.quantities) + k for k, name in enumerate(names)}
        extra = len(self.logged)
        places = _places(self.values.shape, tuple(name in ONE_NUMBER for name in self.quantities))
        if not self.active.all():
            places = places.where(self.active[places.step, places.group])

        def words(codes: NDArray[Any], more: list[int], names: list[str]) -> Words:
            return Words(np.append(codes, np.array(more, dtype=codes.dtype)), names)

        found: Columns = {
            "run": Words(np.zeros(len(places.flat) + extra, dtype=np.int16), [self.run]),
            "step": np.append(self.steps[places.step], np.array([step for step, *_ in self.logged], dtype=np.int64)),
            "group": words(places.group, [len(self.groups)] * extra, [*self.groups, ""]),
            "quantity": words(
                places.quantity, [code[name] for _, name, _ in self.logged], _distinct([*self.quantities, *names])
            ),
            "statistic": words(places.statistic, [_MEAN] * extra, list(STATISTICS)),
            "value": np.append(
                self.values.reshape(-1)[places.flat].astype(float), np.array([v for *_, v in self.logged], float)
            ),
        }
        return {name: found[name] for name in COLUMNS}

    def row_columns(self) -> "Columns":
        """The columns run, step, group, quantity, row, value of single rows."""
        counts = [values.size for *_, values in self.rows]
        groups = list(dict.fromkeys(group for _, group, _ in self.rows))
        places = [np.indices(values.shape, dtype=np.int32) for *_, values in self.rows]
        found: Columns = {
            "run": Words(np.zeros(sum(counts), dtype=np.int16), [self.run]),
            "step": np.repeat(np.array([step for step, *_ in self.rows], dtype=np.int64), counts),
            "group": Words(
                np.repeat(np.array([groups.index(g) for _, g, _ in self.rows], dtype=np.int16), counts), groups
            ),
            "quantity": Words(np.concatenate([at[0].ravel() for at in places]), list(self.quantities)),
            "row": np.concatenate([at[1].ravel() for at in places]),
            "value": np.concatenate([values.ravel() for *_, values in self.rows]).astype(float),
        }
        return {name: found[name] for name in ROW_COLUMNS}

    def table(self) -> "pd.DataFrame":
        """The one table, for pandas."""
        import pandas as pd

        made = {
            name: pd.Categorical.from_codes(column.codes, pd.Index(column.names))
            if isinstance(column, Words)
            else column
            for name, column in self.columns().items()
        }
        return pd.DataFrame(made)

    def scalars(self, k: int, statistics: Sequence[str]) -> dict[str, float]:
        """The k-th step as a flat dict, "radius/conv1.weight/median": what loggers take."""
        found = {}
        for q, quantity in enumerate(self.quantities):
            for g in np.flatnonzero(self.active[k]):
                name = f"{quantity}/{self.groups[g]}"
                if quantity in ONE_NUMBER:
                    found[name] = float(self.values[k, q, g, _MEAN])
                    continue
                for statistic in statistics:
                    found[f"{name}/{statistic}"] = float(self.values[k, q, g, STATISTICS.index(statistic)])
        return {name: value for name, value in found.items() if np.isfinite(value)}

    def at(self, k: int) -> dict[str, dict[str, dict[str, float]]]:
        """The k-th step as group → quantity → statistic → value."""
        return {
            self.groups[g]: {
                quantity: dict(zip(STATISTICS, map(float, self.values[k, q, g]), strict=True))
                for q, quantity in enumerate(self.quantities)
            }
            for g in np.flatnonzero(self.active[k])
        }


class _Places(NamedTuple):
    """Where numbers of a block stand: in its values, made flat, and along each dimension of them."""

    flat: NDArray[Any]
    step: NDArray[Any]
    quantity: NDArray[Any]
    group: NDArray[Any]
    statistic: NDArray[Any]

    def where(self, chosen: NDArray[np.bool_]) -> "_Places":
        """Some of them."""
        return _Places(*(each[chosen] for each in self))


@lru_cache(maxsize=2)
def _places(shape: tuple[int, ...], single: tuple[bool, ...]) -> _Places:
    """All numbers of blocks of this shape but, of quantities with a single one, all that are not the mean.

    A run's blocks are all alike but for the last, and finding the places takes longer than the rest of the columns.
    """
    there = np.ones(shape, dtype=bool)
    there[:, np.array(single, dtype=bool)] = np.arange(shape[3]) == _MEAN
    step, *codes = np.nonzero(there)
    return _Places(np.flatnonzero(there), step.astype(np.int32), *(code.astype(np.int16) for code in codes))


def path_columns(run: str, paths: Sequence[Point]) -> "Columns":
    """The columns run, step, group, row, direction: directions of rows, one list of numbers each."""
    code = {group: k for k, group in enumerate(dict.fromkeys(group for _, group, *_ in paths))}
    found: Columns = {
        "run": Words(np.zeros(len(paths), dtype=np.int16), [run]),
        "step": np.array([step for step, *_ in paths], dtype=np.int64),
        "group": Words(np.array([code[group] for _, group, *_ in paths], dtype=np.int16), list(code)),
        "row": np.array([row for _, _, row, _ in paths], dtype=np.int32),
        "direction": [direction.astype(np.float32) for *_, direction in paths],
    }
    return {name: found[name] for name in PATH_COLUMNS}


def _distinct(names: list[str]) -> list[str]:
    """Categories must differ; a logged quantity may be called like a recorded one."""
    seen: set[str] = set()
    result = []
    for name in names:
        while name in seen:
            name += " (logged)"
        seen.add(name)
        result.append(name)
    return result

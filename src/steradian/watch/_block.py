"""A block of observed steps on the host: what sinks get, and the one table made from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steradian.watch.records import COLUMNS, PATH_COLUMNS, ROW_COLUMNS, STATISTICS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Alert", "Block"]

ONE_NUMBER = frozenset({"lr"})
"""Quantities of a group that are the same in all of its rows."""


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
    """Some observed steps of a run.

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
    paths: list[tuple[int, str, int, NDArray[Any]]] = field(default_factory=list)

    def table(self) -> "pd.DataFrame":
        """The columns run, step, group, quantity, statistic, value."""
        import pandas as pd

        mean = STATISTICS.index("mean")
        there = np.broadcast_to(self.active[:, None, :, None], self.values.shape).copy()
        for k, quantity in enumerate(self.quantities):
            if quantity in ONE_NUMBER:
                there[:, k, :, :mean] = there[:, k, :, mean + 1 :] = False
        s, q, g, t = np.nonzero(there)
        names = list(dict.fromkeys(name for _, name, _ in self.logged))
        extra = len(self.logged)
        quantities, groups = [*self.quantities, *names], [*self.groups, ""]
        codes = {name: len(self.quantities) + k for k, name in enumerate(names)}
        more = np.array([codes[name] for _, name, _ in self.logged], dtype=int)
        columns = {
            "run": _words(np.zeros(len(s) + extra, dtype=int), [self.run]),
            "step": np.concatenate([self.steps[s], np.array([step for step, _, _ in self.logged], dtype=np.int64)]),
            "group": _words(np.concatenate([g, np.full(extra, len(self.groups))]), groups),
            "quantity": _words(np.concatenate([q, more]), _distinct(quantities)),
            "statistic": _words(np.concatenate([t, np.full(extra, mean)]), list(STATISTICS)),
            "value": np.concatenate(
                [self.values[there].astype(float), np.array([value for _, _, value in self.logged], dtype=float)]
            ),
        }
        return pd.DataFrame({name: columns[name] for name in COLUMNS})

    def row_table(self) -> "pd.DataFrame":
        """The columns run, step, group, quantity, row, value."""
        import pandas as pd

        parts: list[dict[str, Any]] = []
        for step, group, values in self.rows:
            q, row = (index.ravel() for index in np.indices(values.shape))
            parts.append({"step": np.full(q.size, step), "group": group, "q": q, "row": row, "value": values.ravel()})
        count = [part["q"].size for part in parts]
        groups = list(dict.fromkeys(part["group"] for part in parts))
        columns = {
            "run": _words(np.zeros(sum(count), dtype=int), [self.run]),
            "step": _joined(part["step"] for part in parts),
            "group": _words(np.repeat([groups.index(part["group"]) for part in parts], count).astype(int), groups),
            "quantity": _words(_joined(part["q"] for part in parts), list(self.quantities)),
            "row": _joined(part["row"] for part in parts),
            "value": _joined(part["value"] for part in parts).astype(float),
        }
        return pd.DataFrame({name: columns[name] for name in ROW_COLUMNS})

    def scalars(self, k: int, statistics: Sequence[str]) -> dict[str, float]:
        """The k-th step as a flat dict, "radius/conv1.weight/median": what loggers take."""
        found = {}
        for q, quantity in enumerate(self.quantities):
            for g in np.flatnonzero(self.active[k]):
                name = f"{quantity}/{self.groups[g]}"
                if quantity in ONE_NUMBER:
                    found[name] = float(self.values[k, q, g, STATISTICS.index("mean")])
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


def path_columns(run: str, paths: Sequence[tuple[int, str, int, NDArray[Any]]]) -> Mapping[str, Sequence[Any]]:
    """Directions of rows, one list of numbers each."""
    columns: dict[str, list[Any]] = {
        "run": [run] * len(paths),
        "step": [step for step, *_ in paths],
        "group": [group for _, group, *_ in paths],
        "row": [row for _, _, row, _ in paths],
        "direction": [direction.astype(np.float32) for *_, direction in paths],
    }
    return {name: columns[name] for name in PATH_COLUMNS}


def _words(codes: NDArray[Any], names: list[str]) -> "pd.Categorical[str]":
    import pandas as pd

    return pd.Categorical.from_codes(codes.astype(np.int32), pd.Index(names))


def _joined(parts: Any) -> NDArray[Any]:
    found = list(parts)
    return np.concatenate(found) if found else np.zeros(0, dtype=int)


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

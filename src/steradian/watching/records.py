"""What is recorded: the one table, the blocks that it is made of, and the folder of files that holds a run.

A run is a folder:

| file | contents |
|---|---|
| run.json | name, configuration, optimizer, groups, environment |
| part-00000.parquet, … | the table: run, step, group, quantity, statistic, value |
| rows-00000.parquet, … | single rows: run, step, group, quantity, row, value |
| path-00000.parquet, … | directions of chosen rows: run, step, group, row, direction |
| alerts.jsonl | one alert per line: step, group, kind, text |

Files appear under their names only when they are complete. A training that is resumed from step s records the steps
from s on again: of two parts with the same step the later one counts, and alerts from s on are removed.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLUMNS",
    "QUANTITIES",
    "STATISTICS",
    "Alert",
    "Block",
    "Cause",
    "Quantity",
    "RecordedRun",
    "Words",
    "alerts_of",
    "cause_of",
    "causes",
    "labels",
    "listed",
    "read_run",
]

COLUMNS = ("run", "step", "group", "quantity", "statistic", "value")
"""Columns of the table."""
ROW_COLUMNS = ("run", "step", "group", "quantity", "row", "value")
PATH_COLUMNS = ("run", "step", "group", "row", "direction")
ALERT_COLUMNS = ("step", "group", "kind", "text")
STATISTICS = ("min", "q10", "median", "q90", "max", "mean")
"""Over the rows of a group."""
_MEAN = STATISTICS.index("mean")
_ENTRIES = {"groups": list, "optimizer": dict, "missing": dict, "config": dict, "environment": dict}
"""Entries of run.json and their types."""


class Quantity(NamedTuple):
    """Name and meaning of a recorded quantity.

    Attributes:
        title: for headings.
        symbol: in the paper's letters; empty if it has none.
        meaning: in words.
    """

    title: str
    symbol: str
    meaning: str


QUANTITIES = {
    "radius": Quantity("Radius", "r", "the norm of the row; the network does not feel it, the effective rate does"),
    "effective_lr": Quantity("Effective rate", "η^e", "η^e = A/(1 − A⟨c,u⟩), the rate of the step on the sphere"),
    "direction_norm": Quantity("Effective direction", "‖c^⊥‖", "the length of the direction that η^e multiplies"),
    "velocity": Quantity("Velocity", "z", "z = η^e‖c^⊥‖, the speed on the sphere; H2 holds below π"),
    "angle": Quantity("Angle per step", "atan z", "how far the row turns in one step, in radians"),
    "update": Quantity("Relative update", "‖Δx‖/r", "the length of the update relative to the row's norm"),
    "radial_share": Quantity(
        "Radial share", "|⟨Δx,u⟩|/‖Δx‖", "the share of the update along the row, which does not turn it"
    ),
    "radial": Quantity("Radial part", "A⟨c,u⟩", "the share of the radius that the step takes; H1 holds below 1"),
    "taylor": Quantity("Taylor variable", "z²", "the variable that Theorem 4 takes to be small"),
    "nu": Quantity("Second moment on the sphere", "ν", "ν = r b̄, Adam's divisor as the sphere sees it"),
    "deformation": Quantity("(a) Deformation", "(a)", "turn of the direction by the element-wise division, radians"),
    "gradient_memory": Quantity("(b1) Gradient memory", "(b1)", "turn by past gradients left untransported, radians"),
    "l2_memory": Quantity("(b2) L2 memory", "(b2)", "turn by past points in the L2 term, radians"),
    "radius_ratio": Quantity("(c) Radius ratio", "(c)", "turn by the ratios of radii r_k/r_i, radians"),
    "defect": Quantity("Invariance defect", "|cos(x, ∇L)|", "0 for an invariant row, up to the normalization's ε"),
    "gradient_norm": Quantity("Gradient norm", "‖∇L(x)‖", "the norm of the row's gradient, without weight decay"),
    "collapsed": Quantity("Collapsed rows", "", "1 for a row whose radius is too small for a direction, else 0"),
    "equilibrium_radius": Quantity("Equilibrium radius", "r*", "the radius at which growth and decay balance"),
    "equilibrium_angle": Quantity("Equilibrium angle", "θ*", "the angle per step at that radius, in radians"),
    "lr": Quantity("Nominal rate", "η", "the rate in the optimizer's settings"),
}
"""Every quantity that may be recorded for a group. "lr" is one number per group and step: its statistic is "mean".

Quantities of the run as a whole, such as a loss, have the empty group and the statistic "mean".
"""
ONE_NUMBER = frozenset({"lr"})
"""Quantities that are the same in all rows of a group."""


# Blocks


class Words(NamedTuple):
    """A column of words: codes, and the word for each code."""

    codes: NDArray[Any]
    names: list[str]


Columns = dict[str, NDArray[Any] | Words | list[NDArray[Any]]]
Point = tuple[int, str, int, NDArray[Any]]
"""The direction of a row after a step: step, group, row, direction."""


@dataclass(frozen=True)
class Alert:
    """A message for the user, raised once.

    Attributes:
        step: when it was noticed.
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
        active: (S, groups), whether a group was stepped.
        logged: (step, name, value) of the run as a whole.
        defined: (quantities, groups), whether a quantity is recorded for a group.
        rows: (step, group, row numbers, (quantities, n)) single rows.
        paths: (step, group, row, direction).
    """

    run: str
    steps: NDArray[np.int64]
    groups: tuple[str, ...]
    quantities: tuple[str, ...]
    values: NDArray[Any]
    active: NDArray[np.bool_]
    defined: NDArray[np.bool_]
    logged: list[tuple[int, str, float]] = field(default_factory=list)
    rows: list[tuple[int, str, NDArray[Any], NDArray[Any]]] = field(default_factory=list)
    paths: list[Point] = field(default_factory=list)

    def columns(self) -> Columns:
        """The columns run, step, group, quantity, statistic, value."""
        names = list(dict.fromkeys(name for _, name, _ in self.logged))
        code = {name: len(self.quantities) + k for k, name in enumerate(names)}
        extra = len(self.logged)
        places = _places(self.values.shape, tuple(name in ONE_NUMBER for name in self.quantities))
        if not (self.active.all() and self.defined.all()):
            places = places.where(self.active[places.step, places.group] & self.defined[places.quantity, places.group])

        def words(codes: NDArray[Any], more: list[int], names: list[str]) -> Words:
            return Words(np.append(codes, np.array(more, dtype=codes.dtype)), names)

        return {
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

    def row_columns(self) -> Columns:
        """The columns run, step, group, quantity, row, value of single rows."""
        groups = list(dict.fromkeys(group for _, group, *_ in self.rows))
        parts: list[tuple[NDArray[Any], ...]] = []
        for at, group, numbers, values in self.rows:
            chosen = np.flatnonzero(self.defined[:, self.groups.index(group)])
            where = np.full((2, len(chosen) * len(numbers)), [[at], [groups.index(group)]])
            which = np.repeat(chosen, len(numbers)), np.tile(numbers, len(chosen))
            parts.append((*where, *which, values[chosen].reshape(-1)))
        step, code, quantity, row, value = (np.concatenate(each) for each in zip(*parts, strict=True))
        return {
            "run": Words(np.zeros(len(step), dtype=np.int16), [self.run]),
            "step": step.astype(np.int64),
            "group": Words(code.astype(np.int16), groups),
            "quantity": Words(quantity.astype(np.int16), list(self.quantities)),
            "row": row.astype(np.int32),
            "value": value.astype(float),
        }

    def thinned(self) -> "Block":
        """Every second step of this block; what was logged is kept."""
        return replace(
            self, steps=self.steps[::2], values=self.values[::2].copy(), active=self.active[::2], rows=[], paths=[]
        )

    def table(self) -> "pd.DataFrame":
        """The table of this block, with the columns `COLUMNS`."""
        import pandas as pd

        made = {
            name: pd.Categorical.from_codes(column.codes, pd.Index(column.names))
            if isinstance(column, Words)
            else column
            for name, column in self.columns().items()
        }
        return pd.DataFrame(made)

    def scalars(self, k: int, statistics: Sequence[str]) -> dict[str, float]:
        """The k-th step as a flat dict for loggers, such as {"radius/conv1.weight/median": 1.0}; finite values only."""
        found = {}
        for q, quantity in enumerate(self.quantities):
            for g in np.flatnonzero(self.active[k] & self.defined[q]):
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
                if self.defined[q, g]
            }
            for g in np.flatnonzero(self.active[k])
        }


class _Places(NamedTuple):
    """Places of numbers in a block's values: in the flattened array, and along each dimension."""

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
    """All places in a block of this shape; only the mean of quantities that are one number.

    Cached, because all blocks of a run but the last have one shape, and this takes longer than the rest of `columns`.
    """
    there = np.ones(shape, dtype=bool)
    there[:, np.array(single, dtype=bool)] = np.arange(shape[3]) == _MEAN
    step, *codes = np.nonzero(there)
    return _Places(np.flatnonzero(there), step.astype(np.int32), *(code.astype(np.int16) for code in codes))


def path_columns(run: str, paths: Sequence[Point]) -> Columns:
    """The columns run, step, group, row, direction: directions of rows, one list of numbers each."""
    code = {group: k for k, group in enumerate(dict.fromkeys(group for _, group, *_ in paths))}
    return {
        "run": Words(np.zeros(len(paths), dtype=np.int16), [run]),
        "step": np.array([step for step, *_ in paths], dtype=np.int64),
        "group": Words(np.array([code[group] for _, group, *_ in paths], dtype=np.int16), list(code)),
        "row": np.array([row for _, _, row, _ in paths], dtype=np.int32),
        "direction": [direction.astype(np.float32) for *_, direction in paths],
    }


def _distinct(names: list[str]) -> list[str]:
    """The names, changed so that all differ: a logged quantity may have the name of a recorded one."""
    found: list[str] = []
    for name in names:
        while name in found:
            name += " (logged)"
        found.append(name)
    return found


# Alerts

_PLURALS = {
    "H1": "H1 is violated (a step crossed the origin)",
    "H2": "H2 is violated (z is not below π)",
    "collapsed": "rows have collapsed",
    "equilibrium": "the angle is not that of the equilibrium",
    "weight decay": "weight decay has no effect",
    "defect": "the gradient is not orthogonal to the rows (ε of the normalization, or rounding)",
}
"""What is said of several groups, by the kind of their alerts."""


class Cause(NamedTuple):
    """Alerts that have one cause.

    Attributes:
        kind: of the alerts.
        step: the first one.
        groups: the groups that they are about, in the order of the alerts.
        what: in words, without step and groups.
        text: one line for all of them.
    """

    kind: str
    step: int
    groups: list[str]
    what: str
    text: str


def alerts_of(table: "pd.DataFrame") -> list[Alert]:
    """The alerts of a recorded run; one without a step is of step 0."""
    return [
        Alert(int(step) if step == step and step is not None else 0, str(group or ""), str(kind), str(text or kind))
        for step, group, kind, text in table[list(ALERT_COLUMNS)].itertuples(index=False)
    ]


def causes(alerts: Iterable[Alert]) -> list[Cause]:
    """Alerts, one entry for each cause, in the order of their first steps.

    >>> [cause.text for cause in causes(Alert(42, name, "H2", "H2 is violated: z = 4") for name in "ab")]
    ['H2 is violated (z is not below π) in 2 groups from step 42: a, b']
    """
    found: dict[str, list[Alert]] = {}
    for alert in alerts:
        found.setdefault(cause_of(alert), []).append(alert)
    return sorted((_cause(same) for same in found.values()), key=lambda cause: cause.step)


def cause_of(alert: Alert) -> str:
    """A text that is the same for all alerts of one cause."""
    # NaN in the weights of one group is NaN in the gradients of all. Other texts differ in their numbers.
    same = alert.kind == "not finite"
    return f"{alert.kind}: " + ("" if same else re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", alert.text))


def _cause(alerts: Sequence[Alert]) -> Cause:
    first = min(alerts, key=lambda alert: alert.step)
    groups = list(dict.fromkeys(alert.group for alert in alerts))
    if len(groups) == 1:
        return Cause(first.kind, first.step, groups, first.text, str(first))
    what = _PLURALS.get(first.kind, first.text)
    if "not invariant" in first.text:
        what = "the gradient is not orthogonal to the rows from the first steps on, so they are not invariant,"
    if first.kind == "not finite":
        words = [word for word in ("weights", "gradient") if any(word in alert.text for alert in alerts)]
        what = f"NaN or infinite {' or '.join(words).replace('gradient', 'gradients')}"
    line = f"{what} in {len(groups)} groups from step {first.step}: {listed(groups)}"
    return Cause(first.kind, first.step, groups, what, line)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names and the number of the others.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Labels

_REFUTED = 0.01
"""|cos(x, ∇L)| above which rows are not invariant: chance alone gives less in rows of more than 10,000 numbers."""
_ENOUGH = 5
"""Observed steps that a gradient must have refuted invariance in."""


def refuted(defects: Iterable[float]) -> bool:
    """Whether the gradient refutes the invariance of a group, from the median |cos(x, ∇L)| at each observed step."""
    finite = np.array([value for value in defects if np.isfinite(value)])
    return len(finite) >= _ENOUGH and float(np.median(finite)) > _REFUTED


def labels(run: "RecordedRun") -> dict[str, str]:
    """The label of each group of a run: "invariant", "not invariant" or "untested".

    A group that was not tested is not invariant if its gradient says so.
    """
    table = run.table
    medians = table[(table["quantity"] == "defect") & (table["statistic"] == "median")]
    by_group = {str(group): values.to_numpy() for group, values in medians.groupby("group", observed=True)["value"]}
    found = {}
    for group in run.about.get("groups") or ():
        label = str(group.get("label", "invariant"))  # 0.1 watched only invariant rows
        against = label == "untested" and refuted(by_group.get(group["name"], ()))
        found[str(group["name"])] = "not invariant" if against else label
    return found


# Summary

_SUMMARY = (
    ("rate", "lr", "mean"),
    ("effective rate", "effective_lr", "median"),
    ("angle", "angle", "median"),
    ("in equilibrium", "equilibrium_angle", "median"),
    ("update", "update", "median"),
    ("radius", "radius", "median"),
    ("in equilibrium", "equilibrium_radius", "median"),
    ("A⟨c,u⟩, largest", "radial", "max"),
    ("z, largest", "velocity", "max"),
    ("defect", "defect", "median"),
)
"""Title, quantity and statistic of each column."""


def summary(
    run: str, block: Block | None, names: Mapping[str, str], alerts: Sequence[Alert], missing: Mapping[str, str]
) -> str:
    """A table of the last step of a block, then alerts and what is missing.

    Args:
        run: the run's name.
        block: with the last step.
        names: the groups in the order of the table, with their labels.
        alerts: raised so far.
        missing: quantities that are not recorded, with the reason.
    """
    if block is None or not len(block.steps):
        return f"{run}: nothing observed yet"
    last = block.at(-1)
    columns = [column for column in _SUMMARY if column[1] in block.quantities]
    lines = [["group", *(title for title, _, _ in columns), "label"]]
    for group in (name for name in names if name in last):
        found = last[group]
        numbers = [f"{found[of][statistic]:.3g}" if of in found else "" for _, of, statistic in columns]
        lines.append([group, *numbers, names[group]])
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    text = [f"{run}, step {int(block.steps[-1])}"]
    for name, *cells in lines:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    text += [f"alert: {cause.text}" for cause in causes(alerts)]
    by_reason: dict[str, list[str]] = {}
    for name, why in missing.items():
        by_reason.setdefault(why, []).append(name)
    text += [f"not recorded: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return "\n".join(text)


# The folder of a run


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run as read from its folder.

    Attributes:
        name: the run's name.
        about: the contents of run.json: "run", "started", "every", "optimizer" ({"name", "groups": [settings]}),
            "groups" ([{"name", "names", "label", "layout", "shapes", "rows", "size", "reason", "defect"}]), "rest"
            (parameters that are not watched), "missing" ({quantity: why it is not recorded}), "config" (the user's),
            "cost" ({"share" of the time, "seconds" for each of "observed" steps, "bytes"}), "environment".
        table: `COLUMNS`; run, group, quantity and statistic are categories.
        rows: `ROW_COLUMNS`: all rows at some steps, chosen rows at all.
        paths: `PATH_COLUMNS`: directions u of chosen rows, each a list of d numbers.
        alerts: `ALERT_COLUMNS`.
    """

    name: str
    about: Mapping[str, Any]
    table: "pd.DataFrame"
    rows: "pd.DataFrame"
    paths: "pd.DataFrame"
    alerts: "pd.DataFrame"


def read_run(path: str | Path) -> RecordedRun:
    """Read the folder of a run, also of one that is still being written or was killed.

    Raises:
        ValueError: there is no such folder, it holds no run, or a file of the run is damaged.
    """
    import pandas as pd

    folder = Path(path)
    about_file = folder / "run.json"
    if not about_file.is_file():
        what = "has no run.json" if folder.is_dir() else "is not a folder"
        inside = ", ".join(sorted(str(file.parent) for file in folder.glob("*/run.json")))
        where = f"there are runs in it: {inside}" if inside else "watch(optimizer, to=…) writes one"
        raise ValueError(f"{folder} is not a recorded run: it {what}; {where}")
    about = _read_about(about_file)
    return RecordedRun(
        name=str(about["run"]),
        about=about,
        table=_read_parts(folder, "part", COLUMNS),
        rows=_read_parts(folder, "rows", ROW_COLUMNS),
        paths=_read_parts(folder, "path", PATH_COLUMNS),
        alerts=pd.DataFrame(read_alerts(folder / "alerts.jsonl"), columns=list(ALERT_COLUMNS)),
    )


def _read_about(file: Path) -> dict[str, Any]:
    """run.json, if its entries have the types that `watch` writes."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): the run's folder is damaged, or is not a run") from error
    known = isinstance(about, dict) and isinstance(about.get("run"), str)
    known = known and all(isinstance(about.get(name) or kind(), kind) for name, kind in _ENTRIES.items())
    if not known or not all(isinstance(group, dict) for group in about.get("groups") or ()):
        raise ValueError(f"{file} does not describe a recorded run: watch(optimizer, to=…) writes one")
    return dict(about)


def numbered_parts(folder: Path, kind: str) -> dict[int, Path]:
    """The parts of a kind ("part", "rows" or "path") by their numbers; files with other names are ignored."""
    found = ((re.fullmatch(rf"{kind}-(\d+)\.parquet", file.name), file) for file in folder.glob(f"{kind}-*.parquet"))
    return {int(name[1]): file for name, file in found if name is not None}


def _read_parts(folder: Path, kind: str, columns: tuple[str, ...]) -> "pd.DataFrame":
    """All parts of a kind in one table, without steps that a later part records again."""
    import pandas as pd
    import pyarrow as pa
    from pyarrow import compute, parquet

    words = [name for name in ("run", "group", "quantity", "statistic") if name in columns]
    tables: list[Any] = []
    begun = None
    for _, file in sorted(numbered_parts(folder, kind).items(), reverse=True):
        try:
            table = parquet.read_table(file, columns=list(columns), read_dictionary=words)
            for name, right in (("step", pa.types.is_integer), ("value", pa.types.is_floating)):
                if name in columns and not right(table.schema.field(name).type):
                    raise pa.ArrowTypeError(f"{name} is {table.schema.field(name).type}")
        except PermissionError:  # the part itself is fine
            raise
        except (pa.ArrowException, OSError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{file} is not a part of a run; remove it to read the others ({why})") from error
        if begun is not None:
            table = table.filter(compute.less(table["step"], begun))
        if table.num_rows:
            tables.append(table)
        # Logged numbers come after their step, and may be in a later part than the records of the step.
        first = compute.min(table.filter(compute.not_equal(table["group"].cast("string"), ""))["step"]).as_py()
        if first is not None:
            begun = first if begun is None else min(begun, first)
    if not tables:
        return pd.DataFrame({column: [] for column in columns})
    return pa.concat_tables(reversed(tables)).unify_dictionaries().to_pandas()


def read_alerts(file: Path) -> list[dict[str, Any]]:
    """The complete lines of alerts.jsonl, to which a process may be writing, or was writing when it was killed."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            alert = json.loads(line)
            if isinstance(alert, dict) and alert.keys() >= set(ALERT_COLUMNS):
                found.append(alert)
    return found

"""What is recorded: the one table, the blocks that it is made of, and the folder of files that holds a run.

A run is a folder with run.json, numbered parts of three tables (part-00000.parquet, rows-00000.parquet and
path-00000.parquet, …) and alerts.jsonl, an alert per line; `RecordedRun` says what they hold. Files appear under their
names only when they are complete. A training that is resumed from step s records the steps from s on again: of two
parts with the same step the later one counts, and alerts from s on are removed.
"""

import contextlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steradian.names import fold

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "QUANTITIES", "STATISTICS", "Alert", "Block", "Quantity", "RecordedRun", "labels", "read_run"]

COLUMNS = ("run", "step", "group", "quantity", "statistic", "value")  #: of the table
ROW_COLUMNS = ("run", "step", "group", "quantity", "row", "value")
PATH_COLUMNS = ("run", "step", "group", "row", "direction")
ALERT_COLUMNS = ("step", "group", "kind", "text")
STATISTICS = ("min", "q10", "median", "q90", "max", "mean")  #: over the rows of a group


class Quantity(NamedTuple):
    """A recorded quantity: its title, its symbol in the paper's letters ("" if it has none), its meaning in words."""

    title: str
    symbol: str
    meaning: str


WORDS = tomllib.loads((files("steradian.watching") / "words.toml").read_text(encoding="utf-8"))
"""What the watch says: names of quantities, alerts, and sentences of a verdict."""
QUANTITIES = {name: Quantity(*words) for name, words in WORDS["quantities"].items()}
"""Every quantity that may be recorded for a group. "lr" is one number per group and step: its statistic is "mean".

Quantities of the run as a whole, such as a loss, have the empty group and the statistic "mean"; so has `SECONDS`.
"""
IMBALANCE = "imbalance"
"""‖a‖/‖b‖, with statistics over the sets of a pair; the group is a pair, such as "up.weight / down.weight"."""
ONE_NUMBER = frozenset({"lr"})  # quantities that are the same in all rows of a group
SECONDS = "seconds"
"""Time since the start of the training at each observed step, without the time between a stop and a resumption."""

Columns = dict[str, Any]  # of a table: arrays, or categories for words


@dataclass(frozen=True)
class Alert:
    """A message for the user, raised once: when, about which group ("" for the run as a whole), its kind, in words."""

    step: int
    group: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.group or 'all groups'}: {self.text}"


@dataclass(eq=False)
class Block:
    """S observed steps of a run, as sinks get them."""

    run: str  #: the run's name
    steps: NDArray[np.int64]  #: (S,) step numbers
    groups: tuple[str, ...]  #: names of the groups
    quantities: tuple[str, ...]  #: names of the quantities
    values: NDArray[Any]  #: (S, quantities, groups, statistics); NaN where something is not known
    active: NDArray[np.bool_]  #: (S, groups), whether a group was stepped
    defined: NDArray[np.bool_]  #: (quantities, groups), whether a quantity is recorded for a group
    seconds: NDArray[Any] = field(default_factory=lambda: np.zeros(0))  #: (S,) since the start; empty if not known
    logged: list[tuple[int, str, float]] = field(default_factory=list)  #: (step, name, value) of the run as a whole
    #: (step, group, row numbers, (quantities, n)) of single rows
    rows: list[tuple[int, str, NDArray[Any], NDArray[Any]]] = field(default_factory=list)
    paths: list[tuple[int, str, int, NDArray[Any]]] = field(default_factory=list)  #: (step, group, row, direction)
    pairs: list[tuple[int, str, NDArray[Any]]] = field(default_factory=list)  #: (step, pair, imbalance in statistics)

    def columns(self) -> Columns:
        """The columns run, step, group, quantity, statistic, value."""
        there = np.broadcast_to((self.active[:, None] & self.defined)[..., None], self.values.shape).copy()
        there[:, [name in ONE_NUMBER for name in self.quantities]] &= np.array(STATISTICS) == "mean"
        step, quantity, group, statistic = np.nonzero(there)
        mean, own = STATISTICS.index("mean"), {*self.quantities, SECONDS}
        more = [(at, "", f"{name} (logged)" if name in own else name, mean, value) for at, name, value in self.logged]
        more += [(int(at), "", SECONDS, mean, float(of)) for at, of in zip(self.steps, self.seconds, strict=False)]
        more += [(at, name, IMBALANCE, k, float(value)) for at, name, of in self.pairs for k, value in enumerate(of)]
        steps, names, extra, statistics, values = zip(*more, strict=True) if more else ((), (), (), (), ())
        groups = list(dict.fromkeys([*self.groups, "", *names]))
        quantities = list(dict.fromkeys([*self.quantities, *extra]))
        return self._columns(
            np.append(self.steps[step], np.array(steps, dtype=np.int64)),
            _words(np.append(group, [groups.index(name) for name in names]), groups),
            quantity=_words(np.append(quantity, [quantities.index(name) for name in extra]), quantities),
            statistic=_words(np.append(statistic, statistics), STATISTICS),
            value=np.append(self.values[there].astype(float), values),
        )

    def row_columns(self) -> Columns:
        """The columns run, step, group, quantity, row, value of single rows."""
        parts: list[tuple[NDArray[Any], ...]] = []
        for at, name, numbers, values in self.rows:
            g, n = self.groups.index(name), len(numbers)
            chosen = np.flatnonzero(self.defined[:, g])
            step, group = np.full((2, len(chosen) * n), [[at], [g]])
            parts.append((step, group, np.repeat(chosen, n), np.tile(numbers, len(chosen)), values[chosen].ravel()))
        step, group, quantity, row, value = (np.concatenate(each) for each in zip(*parts, strict=True))
        words, row = _words(quantity, self.quantities), row.astype(np.int32)
        return self._columns(step, _words(group, self.groups), quantity=words, row=row, value=value.astype(float))

    def path_columns(self) -> Columns:
        """The columns run, step, group, row, direction: directions of rows, one list of numbers each."""
        steps, names, rows, directions = zip(*self.paths, strict=True)
        group = _words([self.groups.index(name) for name in names], self.groups)
        numbers = [direction.astype(np.float32) for direction in directions]
        return self._columns(np.array(steps, np.int64), group, row=np.array(rows, dtype=np.int32), direction=numbers)

    def _columns(self, step: NDArray[np.int64], group: Any, **others: Any) -> Columns:
        return {"run": _words(np.zeros(len(step)), [self.run]), "step": step, "group": group, **others}

    def scalars(self, k: int, statistics: Sequence[str]) -> dict[str, float]:
        """The k-th step as a flat dict for loggers, such as {"radius/conv1.weight/median": 1.0}; finite values only."""
        found = {}
        for q, quantity in enumerate(self.quantities):
            for g in np.flatnonzero(self.active[k] & self.defined[q]):
                for statistic in ("mean",) if quantity in ONE_NUMBER else statistics:
                    name = f"{quantity}/{self.groups[g]}" + ("" if quantity in ONE_NUMBER else f"/{statistic}")
                    found[name] = float(self.values[k, q, g, STATISTICS.index(statistic)])
        for step, pair, values in self.pairs:
            if step == self.steps[k]:
                found |= {f"{IMBALANCE}/{pair}/{name}": float(values[STATISTICS.index(name)]) for name in statistics}
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


def _words(codes: Any, names: Sequence[str]) -> Any:
    """A column of words, by the place of each among the names."""
    import pandas as pd

    return pd.Categorical.from_codes(np.asarray(codes, dtype=np.int32), pd.Index(names))


class Cause(NamedTuple):
    """Alerts of one cause: their kind, first step and groups; what it is, without these; one line with all of it."""

    kind: str
    step: int
    groups: list[str]
    what: str
    text: str


def alerts_of(table: "pd.DataFrame") -> list[Alert]:
    """The alerts of a recorded run."""
    return [Alert(int(step), *words) for step, *words in table[list(ALERT_COLUMNS)].itertuples(index=False)]


def causes(alerts: Iterable[Alert]) -> list[Cause]:
    """Alerts, one entry for each cause, in the order of their first steps.

    >>> [cause.text for cause in causes(Alert(42, name, "H2", "H2 is violated: z = 4") for name in "ab")]
    ['H2 is violated (z is not below π) in 2 groups from step 42: a, b']
    """
    found: dict[str, list[Alert]] = {}
    for alert in alerts:
        found.setdefault(cause_of(alert), []).append(alert)
    return sorted(map(_cause, found.values()), key=lambda cause: cause.step)


def cause_of(alert: Alert) -> str:
    """A text that is the same for all alerts of one cause: NaN in the weights of one is NaN in the gradients of all."""
    return "not invariant" if "not invariant" in alert.text else alert.kind


def _cause(alerts: Sequence[Alert]) -> Cause:
    first = min(alerts, key=lambda alert: alert.step)
    groups = list(dict.fromkeys(alert.group for alert in alerts))
    if len(groups) == 1:
        return Cause(first.kind, first.step, groups, first.text, str(first))
    what = WORDS["causes"].get(cause_of(first), first.text)
    if first.kind == "not finite":
        where = {"weights": "weights", "gradient": "gradients"}
        what = " or ".join(words for word, words in where.items() if any(word in alert.text for alert in alerts))
        what = f"NaN or infinite {what}"
    line = f"{what} in {len(groups)} groups from step {first.step}: {listed(groups)}"
    return Cause(first.kind, first.step, groups, what, line)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names and the number of the others.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_REFUTED = 0.01  # |cos(x, ∇L)| of rows that are not invariant: chance gives less in more than 10,000 numbers
_ENOUGH = 5  # observed steps that a gradient must have refuted invariance in


def relabelled(labels: Mapping[str, str], defects: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Labels of groups, where an untested one is not invariant if the gradient refutes it.

    `defects` are the medians of |cos(x, ∇L)| over the rows of a group at each observed step.
    """
    found = dict(labels)
    for name, medians in defects.items():
        finite = medians[np.isfinite(medians)]
        if found.get(name) == "untested" and len(finite) >= _ENOUGH and float(np.median(finite)) > _REFUTED:
            found[name] = "not invariant"
    return found


def labels(run: "RecordedRun") -> dict[str, str]:
    """The label of each group: "invariant", "not invariant" (refuted, perhaps by its gradient) or "untested"."""
    medians = run.table[(run.table["quantity"] == "defect") & (run.table["statistic"] == "median")]
    defects = {str(name): values.to_numpy() for name, values in medians.groupby("group", observed=True)["value"]}
    return relabelled({group["name"]: group["label"] for group in run.about["groups"]}, defects)


def layers(about: Mapping[str, Any]) -> set[str]:
    """The groups in run.json that are matrices or filters, not biases and gains; all groups if none is."""
    groups = about["groups"]
    several = [each for each in groups if each["rows"] > 1 or any(math.prod(shape[1:]) > 1 for shape in each["shapes"])]
    found = {each["name"] for each in several if each["size"] > 1}  # a row of one number never turns
    return found or {each["name"] for each in groups}


_LINES = 40  # groups from which on layers that repeat are one line


def last_step(run: str, block: Block | None, labels: Mapping[str, str]) -> str:
    """A table of the last step of a block: one line for each group, in the order of the labels.

    If there are many, those whose names differ by numbers alone are one line, with medians ("largest": maxima).
    """
    if block is None or not len(block.steps):
        return f"{run}: nothing observed yet"
    last = block.at(-1)
    columns = [column for column in WORDS["summary"] if column[1] in block.quantities]
    lines = [["group", *(title for title, _, _ in columns), "label"]]
    names = [name for name in labels if name in last]
    folds = len(names) > _LINES
    kinds = fold(names, [labels[name] for name in names]) if folds else [(name, [k]) for k, name in enumerate(names)]
    for shown, members in kinds:
        cells = []
        for _, of, statistic in columns:
            values = [last[names[k]][of][statistic] for k in members if of in last[names[k]]]
            cells.append(f"{(np.max if statistic == 'max' else np.median)(values):.3g}" if values else "")
        lines.append([shown, *cells, labels[names[members[0]]]])
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    title = f"{run}, step {int(block.steps[-1])}" + (", medians over layers" if folds else "")
    text = ("  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip() for name, *cells in lines)
    return "\n".join([title, *text])


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run as read from its folder.

    `about` is the contents of run.json: "run", "started", "every", "optimizer" ({"name", "groups": [settings]}),
    "groups" ([{"name", "names", "label", "layout", "shapes", "dtype", "rows", "size", "reason", "defect"}]), "rest"
    (parameters that are not watched), "missing" ({quantity: why it is not recorded}), "config" (the user's), "cost"
    ({"share" of the time, "seconds" for each of "observed" steps, "bytes"}), "last_step" (the last one that was taken,
    known when the watch has stopped), "not_finite" (groups with NaN or infinite weights at the end), "environment".
    What 0.1 did not write is filled in.
    """

    name: str  #: the run's name
    about: Mapping[str, Any]  #: what is known of the run
    table: "pd.DataFrame"  #: `COLUMNS`; run, group, quantity and statistic are categories
    rows: "pd.DataFrame"  #: `ROW_COLUMNS`: all rows at some steps, chosen rows at all
    paths: "pd.DataFrame"  #: `PATH_COLUMNS`: directions u of chosen rows, each a list of d numbers
    alerts: "pd.DataFrame"  #: `ALERT_COLUMNS`


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
    try:
        about = json.loads(about_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{about_file} is not JSON ({error}): the run's folder is damaged, or is not a run") from error
    if not isinstance(about, dict) or not isinstance(about.get("run"), str):
        raise ValueError(f"{about_file} does not describe a recorded run: watch(optimizer, to=…) writes one")
    # 0.1 watched only invariant rows.
    usual: dict[str, Any] = {"label": "invariant", "layout": None, "shapes": [], "reason": "", "defect": None}
    about["groups"] = [{"names": [group["name"]], **usual, **group} for group in about.get("groups", ())]
    empty: dict[str, Any] = {name: {} for name in ("missing", "config", "environment", "cost")}
    about = {"optimizer": {"name": "", "groups": []}, "rest": [], **empty, **about}
    kinds = (("part", COLUMNS), ("rows", ROW_COLUMNS), ("path", PATH_COLUMNS))
    table, rows, paths = (read_parts(folder, kind, columns) for kind, columns in kinds)
    alerts = pd.DataFrame(read_alerts(folder / "alerts.jsonl"), columns=list(ALERT_COLUMNS))
    return RecordedRun(about["run"], about, table, rows, paths, alerts)


def numbered_parts(folder: Path, kind: str) -> dict[int, Path]:
    """The parts of a kind ("part", "rows" or "path") by their numbers; files with other names are ignored."""
    found = ((re.fullmatch(rf"{kind}-(\d+)\.parquet", file.name), file) for file in folder.glob(f"{kind}-*.parquet"))
    return {int(name[1]): file for name, file in found if name is not None}


def read_parts(folder: Path, kind: str, columns: tuple[str, ...]) -> "pd.DataFrame":
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
        except PermissionError:  # the part itself is fine
            raise
        except (pa.ArrowException, OSError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{file} is not a part of a run; remove it to read the others ({why})") from error
        tables.append(table if begun is None else table.filter(compute.less(table["step"], begun)))
        # Logged numbers come after their step, and may be in a later part than the records of the step.
        groups = table.unify_dictionaries()["group"].combine_chunks()
        observed = compute.not_equal(groups.indices, compute.index(groups.dictionary, "").as_py())
        first = compute.min(table["step"].filter(observed)).as_py()
        if first is not None:
            begun = first if begun is None else min(begun, first)
    if not tables:
        return pd.DataFrame({column: [] for column in columns})
    return pa.concat_tables(reversed(tables)).unify_dictionaries().to_pandas()


def read_alerts(file: Path) -> list[dict[str, Any]]:
    """The complete lines of alerts.jsonl, to which a process may be writing, or was writing when it was killed."""
    found = []
    for line in file.read_bytes().split(b"\n") if file.is_file() else ():
        with contextlib.suppress(ValueError):
            alert = json.loads(line)
            if isinstance(alert, dict) and alert.keys() >= set(ALERT_COLUMNS):
                found.append(alert)
    return found

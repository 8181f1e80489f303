"""One table for everything that is recorded, and the folder of files that holds it: what a run is on disk.

A run is a folder:

| file | holds |
|---|---|
| run.json | name, configuration, optimizer, groups, environment |
| part-00000.parquet, … | the table: run, step, group, quantity, statistic, value |
| rows-00000.parquet, … | single rows: run, step, group, quantity, row, value |
| path-00000.parquet, … | directions of chosen rows: run, step, group, row, direction |
| alerts.jsonl | one alert per line: step, group, kind, text |

Files appear under their names only when they are complete. A training that is resumed from step s records the steps
from s on again: of two parts that hold the same step, the later one counts, and alerts from s on are taken out.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLUMNS",
    "QUANTITIES",
    "STATISTICS",
    "Quantity",
    "RecordedRun",
    "Records",
    "numbered",
    "read_lines",
    "read_run",
    "statistics",
]

COLUMNS = ("run", "step", "group", "quantity", "statistic", "value")
"""Of the table."""
ROW_COLUMNS = ("run", "step", "group", "quantity", "row", "value")
PATH_COLUMNS = ("run", "step", "group", "row", "direction")
ALERT_COLUMNS = ("step", "group", "kind", "text")
_ENTRIES = {"groups": list, "optimizer": dict, "missing": dict, "config": dict, "environment": dict}
STATISTICS = ("min", "q10", "median", "q90", "max", "mean")
"""Over the rows of a group."""


class Quantity(NamedTuple):
    """How a recorded quantity is called and what it is.

    Attributes:
        title: for headings.
        symbol: in the paper's letters; empty where it has none.
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
    "radial": Quantity("Radial part", "A⟨c,u⟩", "the share of the radius that the step takes; H1 holds below 1"),
    "taylor": Quantity("Taylor variable", "z²", "the variable that Theorem 4 takes to be small"),
    "nu": Quantity("Second moment on the sphere", "ν", "ν = r b̄, Adam's divisor as the sphere sees it"),
    "deformation": Quantity("(a) Deformation", "(a)", "turn of the direction by the element-wise division, radians"),
    "gradient_memory": Quantity("(b1) Gradient memory", "(b1)", "turn by past gradients left untransported, radians"),
    "l2_memory": Quantity("(b2) L2 memory", "(b2)", "turn by past points in the L2 term, radians"),
    "radius_ratio": Quantity("(c) Radius ratio", "(c)", "turn by the ratios of radii r_k/r_i, radians"),
    "defect": Quantity("Invariance defect", "|cos(x, ∇L)|", "0 for an invariant row; the normalization's ε shows here"),
    "gradient_norm": Quantity("Gradient norm", "‖∇L(x)‖", "the norm of the row's gradient, without weight decay"),
    "collapsed": Quantity("Collapsed rows", "", "1 for a row whose radius is too small for a direction, else 0"),
    "equilibrium_radius": Quantity("Equilibrium radius", "r*", "the radius at which growth and decay balance"),
    "equilibrium_angle": Quantity("Equilibrium angle", "θ*", "the angle per step at that radius, in radians"),
    "lr": Quantity("Nominal rate", "η", "the rate in the optimizer's settings"),
}
"""Every quantity that may be recorded for a group. "lr" is one number per group and step: its statistic is "mean".

Quantities of the run as a whole, such as a loss, have the empty group and the statistic "mean".
"""


def statistics(values: ArrayLike) -> dict[str, float]:
    """The statistics of one quantity over the rows of a group.

    >>> statistics([1.0, 2.0, 3.0])["median"]
    2.0
    """
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        raise ValueError("statistics need at least one row")
    low, tenth, median, ninetieth, high = np.quantile(array, [0, 0.1, 0.5, 0.9, 1])
    return dict(zip(STATISTICS, map(float, (low, tenth, median, ninetieth, high, array.mean())), strict=True))


@dataclass
class Records:
    """Rows of the table of one run, gathered in memory.

    >>> records = Records("adam")
    >>> records.add(0, "conv1.weight", {"radius": [1.0, 3.0]})
    >>> records.table().query("statistic == 'mean'")["value"].tolist()
    [2.0]
    """

    run: str
    rows: list[tuple[str, int, str, str, str, float]] = field(default_factory=list)

    def add(self, step: int, group: str, quantities: Mapping[str, ArrayLike]) -> None:
        """Reduce each quantity over the rows of a group to its statistics.

        Args:
            step: the number of the step.
            group: the group's name.
            quantities: by name, one number for each row.
        """
        for quantity, values in quantities.items():
            for statistic, value in statistics(values).items():
                self.rows.append((self.run, step, group, quantity, statistic, value))

    def table(self) -> "pd.DataFrame":
        """Everything recorded so far, as a pandas table with the columns `COLUMNS`."""
        import pandas as pd

        columns: Any = COLUMNS
        return pd.DataFrame(self.rows, columns=list(columns))


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run as its folder holds it.

    Attributes:
        name: the run's name.
        about: the contents of run.json: "run", "started", "every", "optimizer" ({"name", "groups": [settings]}),
            "groups" ([{"name", "names", "layout", "rows", "size", "reason", "defect"}]), "rest" (names),
            "missing" ({quantity: why it is not recorded}), "config" (the user's), "environment".
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
    """Read the folder of a run, also one that is still being written or was killed.

    Raises:
        ValueError: there is no such folder, it holds no run, or a file of the run is broken.
    """
    import pandas as pd

    folder = Path(path)
    about_file = folder / "run.json"
    if not about_file.is_file():
        what = "has no run.json" if folder.is_dir() else "is not a folder"
        inside = ", ".join(sorted(str(file.parent) for file in folder.glob("*/run.json")))
        where = f"there are runs in it: {inside}" if inside else "watch(optimizer, to=…) writes one"
        raise ValueError(f"{folder} is not a recorded run: it {what}; {where}")
    about = _about(about_file)
    alerts = pd.DataFrame(read_lines(folder / "alerts.jsonl"), columns=list(ALERT_COLUMNS))
    return RecordedRun(
        name=str(about["run"]),
        about=about,
        table=_parts(folder, "part", COLUMNS),
        rows=_parts(folder, "rows", ROW_COLUMNS),
        paths=_parts(folder, "path", PATH_COLUMNS),
        alerts=alerts,
    )


def _about(file: Path) -> dict[str, Any]:
    """run.json, as far as its entries are of the kinds that `watch` writes."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): the run's folder is broken, or is none") from error
    known = isinstance(about, dict) and isinstance(about.get("run"), str)
    known = known and all(isinstance(about.get(name) or kind(), kind) for name, kind in _ENTRIES.items())
    if not known or not all(isinstance(group, dict) for group in about.get("groups") or ()):
        raise ValueError(f"{file} does not describe a recorded run: watch(optimizer, to=…) writes one")
    return dict(about)


def numbered(folder: Path, kind: str) -> dict[int, Path]:
    """The parts of a kind by their numbers; files of other names are none."""
    found = ((re.fullmatch(rf"{kind}-(\d+)\.parquet", file.name), file) for file in folder.glob(f"{kind}-*.parquet"))
    return {int(name[1]): file for name, file in found if name is not None}


def _parts(folder: Path, kind: str, columns: tuple[str, ...]) -> "pd.DataFrame":
    """All parts of a kind in one table, without steps that a later part has again."""
    import pandas as pd
    import pyarrow as pa
    from pyarrow import compute, parquet

    words = [name for name in ("run", "group", "quantity", "statistic") if name in columns]
    tables: list[Any] = []
    begun = None
    for _, file in sorted(numbered(folder, kind).items(), reverse=True):
        try:
            table = parquet.read_table(file, columns=list(columns), read_dictionary=words)
            for name, right in (("step", pa.types.is_integer), ("value", pa.types.is_floating)):
                if name in columns and not right(table.schema.field(name).type):
                    raise pa.ArrowTypeError(f"{name} is {table.schema.field(name).type}")
        except PermissionError:  # nothing is wrong with the part
            raise
        except (pa.ArrowException, OSError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{file} is no part of a run; remove it to read the others ({why})") from error
        if begun is not None:
            table = table.filter(compute.less(table["step"], begun))
        if table.num_rows:
            tables.append(table)
        # What is logged comes after its step, and may stand in a later part than the step's own records.
        first = compute.min(table.filter(compute.not_equal(table["group"].cast("string"), ""))["step"]).as_py()
        if first is not None:
            begun = first if begun is None else min(begun, first)
    if not tables:
        return pd.DataFrame({column: [] for column in columns})
    return pa.concat_tables(reversed(tables)).unify_dictionaries().to_pandas()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Complete lines of a file to which a process may be writing, or was writing when it was killed."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            alert = json.loads(line)
            if isinstance(alert, dict) and alert.keys() >= set(ALERT_COLUMNS):
                found.append(alert)
    return found

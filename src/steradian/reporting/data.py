"""What a page draws: runs read and reduced in time, histograms, trajectories, and all numbers packed in one text."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from steradian.reporting.lines import Lines, aggregate, coarsen
from steradian.reporting.rows import cosines, histograms, spheres, trajectories
from steradian.watching.records import QUANTITIES, STATISTICS, read_run
from steradian.watching.verdict import Sentence, verdict

__all__ = ["BUDGET", "Pack", "PageRun", "load", "page_data", "unpack"]

POINTS = 480
FEWEST_POINTS = 48
BUDGET = 1_250_000  # numbers in all lines, four characters each
HYPOTHESES = ("radial", "velocity", "taylor")


class Pack:
    """Arrays concatenated in one text; each is found by its offset and its length.

    A number is the upper 24 bits of its float32, rounded: 16 binary digits, a relative error of at most 2^-16.
    Three bytes are four characters of base64, so number i is at the characters 4i to 4i + 4, and the browser
    decodes only what it draws. A number that is not finite is a gap, NaN.

    >>> pack = Pack()
    >>> pack.add([1.0, 2.0]), pack.add([0.1])
    (0, 2)
    >>> unpack(pack.text(), 2, 1)
    array([0.10000038], dtype=float32)
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def add(self, values: ArrayLike) -> int:
        """Append an array, flattened; its offset in numbers."""
        array = np.array(values, dtype=np.float32).ravel()
        array[~np.isfinite(array)] = np.nan
        bits = (array.view(np.uint32) + np.uint32(0x80)) >> np.uint32(8)
        three = np.ascontiguousarray(bits.astype("<u4")).view(np.uint8).reshape(-1, 4)[:, :3]
        self._parts.append(three.tobytes())
        offset = self.length
        self.length += array.size
        return offset

    def text(self) -> str:
        """Everything added so far."""
        return base64.b64encode(b"".join(self._parts)).decode("ascii")


def unpack(text: str, offset: int, length: int) -> np.ndarray:
    """The numbers that `Pack.add` packed, decoded as the page's script does."""
    three = np.frombuffer(base64.b64decode(text[4 * offset : 4 * (offset + length)]), np.uint8).reshape(-1, 3)
    four = np.concatenate([np.zeros((len(three), 1), np.uint8), three], axis=1)
    return np.ascontiguousarray(four).view("<f4").ravel()


@dataclass(frozen=True)
class Extreme:
    """The largest value of a quantity in a whole run, its step and group, and at how many steps it was not finite."""

    value: float
    step: int
    group: str
    not_finite: int = 0


@dataclass(frozen=True, eq=False)
class PageRun:
    """A run as the page needs it, reduced in time.

    Attributes:
        name: the run's name, distinct from those of the other runs.
        about: the contents of run.json.
        lines: its table, reduced in time.
        rows: single rows, `records.ROW_COLUMNS`.
        paths: directions, `records.PATH_COLUMNS`.
        alerts: `records.ALERT_COLUMNS`.
        extremes: the largest value of each quantity that a hypothesis bounds.
        not_finite: quantities that are not finite in some group at the end of the run.
        verdict: what the run says first, in words.
    """

    name: str
    about: Mapping[str, Any]
    lines: Lines
    rows: pd.DataFrame
    paths: pd.DataFrame
    alerts: pd.DataFrame
    extremes: dict[str, Extreme] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)
    verdict: list[Sentence] = field(default_factory=list)

    @property
    def quantities(self) -> set[str]:
        """Quantities recorded for at least one group."""
        return {name for name, groups in self.lines.values.items() if set(groups) - {""}}

    @property
    def groups(self) -> list[str]:
        """Its groups, in the order of run.json, which is the model's."""
        named = [str(group.get("name")) for group in self.about.get("groups") or []]
        recorded = {group for groups in self.lines.values.values() for group in groups} - {""}
        return [name for name in named if name in recorded] + sorted(recorded - set(named))


def load(paths: Sequence[str | Path]) -> list[PageRun]:
    """Read runs and reduce each in time.

    Raises:
        ValueError: no path, a path that is given twice, no run, or a run without a record.
    """
    if not paths:
        raise ValueError("a page needs at least one run: give the folder that watch(optimizer, to=…) wrote")
    folders = [Path(path).resolve() for path in paths]
    for path, folder in zip(paths, folders, strict=True):
        if folders.count(folder) > 1:
            raise ValueError(f"the run {path} is given twice")
    runs = [_load(path) for path in paths]
    names = distinct_names([run.name for run in runs], folders)
    return [PageRun(**{**vars(run), "name": name}) for run, name in zip(runs, names, strict=True)]


def _load(path: str | Path) -> PageRun:
    run = read_run(path)
    if run.table.empty:
        raise ValueError(f"the run {path} has no record yet: watch writes the first part at its first flush")
    found = {name: _extreme(run.table, name) for name in HYPOTHESES}
    extremes = {name: of for name, of in found.items() if of is not None}
    lines = aggregate(run.table, points=POINTS)
    not_finite = _not_finite(run.table)
    return PageRun(run.name, run.about, lines, run.rows, run.paths, run.alerts, extremes, not_finite, verdict(run))


def page_data(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Everything that the page's script draws, as JSON data."""
    pack = Pack()
    count = sum(run.lines.count() for run in runs)
    points = max(FEWEST_POINTS, min(POINTS, BUDGET // max(count, 1)))
    groups = list(dict.fromkeys(group for run in runs for group in run.groups))
    found = trajectories([run.paths for run in runs])
    balls = spheres(found)
    spread = histograms([run.rows for run in runs])
    data: dict[str, Any] = {
        "statistics": list(STATISTICS),
        "groups": groups,
        "quantities": _quantities(runs),
        "whole": sorted({name for run in runs for name, of in run.lines.values.items() if "" in of}),
        "runs": [_run(run, coarsen(run.lines, points), pack) for run in runs],
        "bins": len(spread[0].edges) - 1 if spread else 0,
        "histograms": [
            {
                "quantity": each.quantity,
                "group": each.group,
                "log": each.log,
                "edges": pack.add(each.edges),
                "counts": [
                    {"run": run, "steps": steps, "at": pack.add(counts)} for run, (steps, counts) in each.counts.items()
                ],
            }
            for each in spread
        ],
        "spheres": [
            {
                "group": each.group,
                "row": each.row,
                "size": each.size,
                "kept": round(each.kept, 4),
                "moved": round(each.moved, 4),
                "paths": [
                    {
                        "run": path.run,
                        "steps": path.steps.tolist(),
                        "at": pack.add(path.points),
                        "turned": round(path.turned, 4),
                        "travelled": round(path.travelled, 4),
                    }
                    for path in each.paths
                ],
            }
            for each in balls
        ],
        "cosines": [
            {"group": group, "row": row, "runs": list(pair), "steps": steps.tolist(), "at": pack.add(cosine)}
            for group, row in ((each.group, each.row) for each in balls)
            for pair, (steps, cosine) in cosines(found[group, row]).items()
        ],
    }
    data["pack"] = pack.text()
    return data


def _quantities(runs: Sequence[PageRun]) -> dict[str, dict[str, str]]:
    """Quantities recorded for groups, in the order of `QUANTITIES`, then unknown ones under their own names."""
    recorded = {name for run in runs for name in run.quantities}
    known = {name: QUANTITIES[name]._asdict() for name in QUANTITIES if name in recorded}
    other = {
        name: {"title": name.replace("_", " ").capitalize(), "symbol": "", "meaning": ""}
        for name in sorted(recorded - set(known))
    }
    return {**known, **other}


def _run(run: PageRun, lines: Lines, pack: Pack) -> dict[str, Any]:
    series: dict[str, dict[str, list[Any]]] = {}
    for quantity, groups in lines.values.items():
        for group, of in groups.items():
            refs = [_line(of[name], pack) if name in of else None for name in STATISTICS]
            series.setdefault(quantity, {})[group] = refs
    return {
        "name": run.name,
        "steps": lines.steps.tolist(),
        "last": lines.last_step,
        "drops": [asdict(drop) for drop in lines.drops],
        "groups": run.groups,
        "series": series,
    }


def _line(line: np.ndarray, pack: Pack) -> Any:
    """The offset of a line in the pack; [the value] for a constant line, such as the rate between two drops."""
    if np.isfinite(line).all() and (line == line[0]).all():
        return [float(f"{line[0]:.5g}")]
    return pack.add(line)


def distinct_names(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Names of runs; equal names get as much of their folder as distinguishes them.

    >>> distinct_names(["adam", "sgd", "adam"], [Path("a/run"), Path("b/run"), Path("c/run")])
    ['adam (a/run)', 'sgd', 'adam (c/run)']
    """
    result = []
    for name, folder in zip(names, folders, strict=True):
        twins = [other for n, other in zip(names, folders, strict=True) if n == name and other != folder]
        label = name
        for depth in range(1, len(folder.parts) + 1):
            tail = folder.parts[-depth:]
            if twins and all(other.parts[-depth:] != tail for other in twins):
                label = f"{name} ({'/'.join(tail)})"
                break
        result.append(label)
    return result


def _extreme(table: pd.DataFrame, quantity: str) -> Extreme | None:
    """The largest value of a quantity over all rows, groups and steps of a run's table."""
    part = table[(table["quantity"] == quantity) & (table["statistic"] == "max")]
    value = part["value"].to_numpy(float)
    if not np.isfinite(value).any():
        return None
    at = int(np.argmax(np.where(np.isfinite(value), value, -np.inf)))
    not_finite = part["step"][~np.isfinite(value)].nunique()
    return Extreme(float(value[at]), int(part["step"].iloc[at]), str(part["group"].iloc[at]), not_finite)


def _not_finite(table: pd.DataFrame) -> set[str]:
    """Quantities that are not finite in some group at the end."""
    part = table[table["statistic"].isin(["median", "mean"]) & (table["group"] != "")]
    last = part.drop_duplicates(["group", "quantity", "statistic"], keep="last")
    return {str(name) for name in last["quantity"][~np.isfinite(last["value"].to_numpy(float))]}

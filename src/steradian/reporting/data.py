"""What a page draws: runs read and reduced in time, histograms, trajectories, and all numbers packed in one text."""

import base64
import gzip
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from steradian.reporting.lines import Lines, aggregate, coarsen, points_for
from steradian.reporting.rows import cosines, histograms, spheres, trajectories
from steradian.watching.records import IMBALANCE, QUANTITIES, SECONDS, STATISTICS, labels, read_run
from steradian.watching.verdict import Sentence, verdict

__all__ = ["Pack", "PageRun", "compressed", "find_runs", "load", "page_data", "unpack"]

MANY = 300_000  # numbers in a pack
MANY_LAYERS = 24
HYPOTHESES = ("radial", "velocity", "taylor")


class Pack:
    """Arrays concatenated in one compressed text; each is found by its offset and its length.

    A number is the upper 24 bits of its float32, rounded to 16 binary digits, or to 11 if there are more than
    `MANY` numbers. All third bytes come first, then all second and all first ones, which compresses best. A number
    that is not finite is a gap, NaN.

    >>> pack = Pack()
    >>> pack.add([1.0, 2.0]), pack.add([0.1])
    (0, 2)
    >>> unpack(pack.text())
    array([1.        , 2.        , 0.10000038], dtype=float32)
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.float32]] = []
        self.length = 0

    def add(self, values: ArrayLike) -> int:
        """Append an array, flattened; its offset in numbers."""
        self._parts.append(np.asarray(values, dtype=np.float32).ravel())
        offset = self.length
        self.length += self._parts[-1].size
        return offset

    def text(self) -> str:
        """Everything added so far."""
        array = np.concatenate([np.zeros(0, np.float32), *self._parts])
        array[~np.isfinite(array)] = np.nan
        dropped = 8 if self.length <= MANY else 13
        bits = (array.view(np.uint32) + np.uint32(1 << (dropped - 1))) >> np.uint32(dropped) << np.uint32(dropped)
        return compressed(np.ascontiguousarray(bits.astype("<u4").view(np.uint8).reshape(-1, 4)[:, 1:].T).tobytes())


def compressed(content: bytes) -> str:
    """Bytes as text that the browser can unpack."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")


def unpack(text: str) -> np.ndarray:
    """All numbers that a `Pack` holds, decoded as the page's script does."""
    three = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8).reshape(3, -1)
    return np.ascontiguousarray(np.pad(three, ((1, 0), (0, 0))).T).view("<f4").ravel()


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
        times: steps and the seconds since the start at them; None if not all observed steps have one.
        rows: single rows, `records.ROW_COLUMNS`.
        paths: directions, `records.PATH_COLUMNS`.
        alerts: `records.ALERT_COLUMNS`.
        observed: how many steps were observed, of how many.
        labels: "invariant", "not invariant" or "untested" for each group.
        extremes: the largest value of each quantity that a hypothesis bounds.
        not_finite: quantities that are not finite in some group at the end of the run.
        verdict: what the run says first, in words.
    """

    name: str
    about: Mapping[str, Any]
    lines: Lines
    times: tuple[np.ndarray, np.ndarray] | None
    rows: pd.DataFrame
    paths: pd.DataFrame
    alerts: pd.DataFrame
    observed: tuple[int, int]
    labels: Mapping[str, str]
    extremes: dict[str, Extreme]
    not_finite: set[str]
    verdict: list[Sentence]

    @property
    def quantities(self) -> set[str]:
        """Quantities recorded for at least one group."""
        return {name for name, groups in self.lines.values.items() if set(groups) - {""}}

    @cached_property
    def recorded(self) -> set[str]:
        """What a figure may need: quantities, "rows", "paths", "whole", and "*", which every run has."""
        whole = any("" in of for of in self.lines.values.values())
        there = {"*": True, "rows": not self.rows.empty, "paths": bool(trajectories([self.paths])), "whole": whole}
        return self.quantities | {name for name, known in there.items() if known}

    @cached_property
    def vectors(self) -> set[str]:
        """Groups that are no matrices or filters, such as biases and gains, if there are others."""
        known: Sequence[Mapping[str, Any]] = self.about.get("groups") or []
        flat = {
            str(group["name"])
            for group in known
            if (group.get("rows") or 0) <= 1 and all(len(shape) <= 1 for shape in group.get("shapes") or ())
        }
        return flat if len(flat) < len(known) else set()

    @cached_property
    def groups(self) -> list[str]:
        """Its groups, in the order of run.json, which is the model's."""
        named = [str(group.get("name")) for group in self.about.get("groups") or []]
        recorded = {group for groups in self.lines.values.values() for group in groups} - {""}
        return [name for name in named if name in recorded] + sorted(recorded - set(named))


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The runs that these folders are, or that they contain."""
    found = []
    for path in map(Path, paths):
        inside = [] if (path / "run.json").is_file() else sorted(file.parent for file in path.rglob("run.json"))
        found += inside or [path]
    return found


def load(paths: Sequence[str | Path]) -> list[PageRun]:
    """Read runs and reduce each in time.

    Raises:
        ValueError: no path, a path that is given twice, no run, or a run without a record.
    """
    if not paths:
        raise ValueError("a page needs at least one run: give the folder that watch(optimizer, to=…) wrote")
    paths = find_runs(paths)
    folders = [Path(path).resolve() for path in paths]
    for path, folder in zip(paths, folders, strict=True):
        if folders.count(folder) > 1:
            raise ValueError(f"the run {path} is given twice")
    runs = [_load(path) for path in paths]
    names = distinct_names([run.name for run in runs], folders)
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _load(path: str | Path) -> PageRun:
    run = read_run(path)
    if run.table.empty:
        raise ValueError(f"the run {path} has no record yet: watch writes the first part at its first flush")
    table = run.table[(run.table["quantity"] != IMBALANCE) | (run.table["group"] == "")]  # a pair is not a layer
    run = replace(run, table=table)
    found = {name: _extreme(run.table, name) for name in HYPOTHESES}
    extremes = {name: of for name, of in found.items() if of is not None}
    steps = np.asarray(pd.unique(run.table["step"][run.table["group"] != ""]))
    is_time = (run.table["group"] == "") & (run.table["quantity"] == SECONDS)
    return PageRun(
        run.name,
        run.about,
        aggregate(run.table[~is_time]),
        _times(run.table[is_time], steps),
        run.rows,
        run.paths,
        run.alerts,
        (len(steps), int(run.table["step"].max() - run.table["step"].min()) + 1),
        labels(run),
        extremes,
        _not_finite(run.table, steps.max(initial=0)),
        verdict(run),
    )


def _times(table: pd.DataFrame, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and seconds; after the last observed step, the run goes on at its mean pace."""
    if len(table) < 2 or len(table) < len(observed):
        return None
    steps, seconds = table["step"].to_numpy(), table["value"].to_numpy(float)
    pace = (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
    more = 1_000_000
    return np.append(steps, steps[-1] + more), np.append(seconds, seconds[-1] + more * pace)


def page_data(runs: Sequence[PageRun]) -> tuple[dict[str, Any], str]:
    """Everything that the page's script draws: JSON data, and the `Pack` that its offsets point into."""
    pack = Pack()
    points = points_for(sum(len(run.lines.keys) for run in runs))
    groups = list(dict.fromkeys(group for run in runs for group in run.groups))
    found = trajectories([run.paths for run in runs])
    balls = spheres(found)
    spread = histograms([run.rows for run in runs])
    data: dict[str, Any] = {
        "statistics": list(STATISTICS),
        "groups": groups,
        "grid": grid(runs),
        "vectors": sorted(set().union(*(run.vectors for run in runs))),
        "quantities": _quantities(runs),
        "whole": sorted({name for run in runs for name, of in run.lines.values.items() if "" in of}),
        "runs": [_run(run, coarsen(run.lines, points), pack) for run in runs],
        "bins": len(spread[0].edges) - 1 if spread else 0,
        "histograms": [
            {
                **vars(each),
                "edges": pack.add(each.edges),
                "counts": [
                    {"run": run, "steps": steps, "at": pack.add(counts)} for run, (steps, counts) in each.counts.items()
                ],
            }
            for each in spread
        ],
        "spheres": [
            {
                **vars(each),
                "paths": [
                    {**vars(path), "steps": path.steps.tolist(), "points": pack.add(path.points)} for path in each.paths
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
    return data, pack.text()


def grid(runs: Sequence[PageRun]) -> dict[str, Any] | None:
    """Blocks, roles and the place of each group, from their names, if there are many layers that repeat in blocks."""
    vectors = set().union(*(run.vectors for run in runs))
    names = list(dict.fromkeys(group for run in runs for group in run.groups))
    split = {name: re.fullmatch(r"(.*?\b\d+)\.(.+?)(\.weight)?", name) for name in names}
    inside = {name: (found[1], found[2]) for name, found in split.items() if found}
    blocks, roles = (list(dict.fromkeys(of[k] for of in inside.values())) for k in (0, 1))
    kinds = {role for name, (_, role) in inside.items() if name not in vectors}
    if len(set(names) - vectors) < MANY_LAYERS or len(blocks) < 4 or not 2 <= len(kinds) <= 24:
        return None
    places = {name: [blocks.index(block), roles.index(role)] for name, (block, role) in inside.items()}
    return {"blocks": blocks, "roles": roles, "places": places}


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
        "times": None if run.times is None else np.interp(lines.steps, *run.times).round(4).tolist(),
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


def _not_finite(table: pd.DataFrame, last: int) -> set[str]:
    """Quantities that are not finite in some group at the last observed step."""
    part = table[(table["step"] == last) & (table["group"] != "") & ~np.isfinite(table["value"])]
    return {str(name) for name in part["quantity"][part["statistic"].isin(["median", "mean"])]}

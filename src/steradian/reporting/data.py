"""What a page draws: runs read and reduced in time, histograms, trajectories, and all numbers packed in one text."""

import base64
import gzip
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from steradian.reporting.lines import Lines, aggregate
from steradian.reporting.rows import cosines, histograms, spheres, trajectories
from steradian.watching.records import IMBALANCE, QUANTITIES, SECONDS, STATISTICS, RecordedRun, labels, layers, read_run
from steradian.watching.verdict import Sentence, verdict

__all__ = ["Pack", "PageRun", "compressed", "find_runs", "load", "page_data"]

MANY = 300_000  # numbers in a pack
MANY_LAYERS = 24
HYPOTHESES = ("radial", "velocity", "taylor")


class Pack:
    """Arrays concatenated in one compressed text; each is found by its offset and its length.

    A number is the upper 24 bits of its float32, rounded to 16 binary digits, or to 11 if there are more than
    `MANY` numbers. All third bytes come first, then all second and all first ones, which compresses best. A number
    that is not finite is a gap, NaN.
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


class Extreme(NamedTuple):
    """The largest value of a quantity in a whole run, its step and group, and at how many steps it was not finite."""

    value: float
    step: int
    group: str
    not_finite: int = 0


@dataclass(frozen=True, eq=False)
class PageRun(RecordedRun):
    """A run as the page needs it; its own `table` is empty."""

    lines: Lines  #: its table, reduced in time
    times: tuple[np.ndarray, np.ndarray] | None  #: steps and the seconds at them; None if some observed step has none
    observed: tuple[int, int]  #: how many steps were observed, of how many
    labels: dict[str, str]  #: "invariant", "not invariant" or "untested" for each group
    extremes: dict[str, Extreme]  #: the largest value of each quantity that a hypothesis bounds
    not_finite: set[str]  #: quantities that are not finite in some group at the end of the run
    verdict: list[Sentence]  #: what the run says first, in words

    @property
    def quantities(self) -> set[str]:
        """Quantities recorded for at least one group; a pair is not a group."""
        return {name for name, groups in self.lines.values.items() if set(groups) - {""} and name != IMBALANCE}

    @cached_property
    def recorded(self) -> set[str]:
        """What a figure may need: quantities, "rows", "paths", "whole", "imbalance", and "*", which every run has."""
        values = self.lines.values
        whole = any("" in of for of in values.values())
        there = {"*": True, "rows": not self.rows.empty, "paths": bool(trajectories([self.paths])), "whole": whole}
        there[IMBALANCE] = bool(values.get(IMBALANCE, {}).keys() - {""})
        return self.quantities | {name for name, known in there.items() if known}

    @cached_property
    def vectors(self) -> set[str]:
        """Groups that are no matrices or filters, such as biases and gains, if there are others."""
        return {group["name"] for group in self.about["groups"]} - layers(self.about)

    @cached_property
    def groups(self) -> list[str]:
        """Its groups, in the order of run.json, which is the model's."""
        named = [group["name"] for group in self.about["groups"]]
        recorded = {group for name in self.quantities for group in self.lines.values[name]} - {""}
        return [name for name in named if name in recorded] + sorted(recorded - set(named))


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The runs that these folders are, or that they contain; those without records are left out if others have any."""
    found = []
    for path in map(Path, paths):
        inside = [] if (path / "run.json").is_file() else sorted(file.parent for file in path.rglob("run.json"))
        found += [run for run in inside if any(run.glob("part-*.parquet"))] or inside or [path]
    return found


def load(paths: Sequence[str | Path]) -> list[PageRun]:
    """Read runs and reduce each in time; a path that is given twice, is no run or has no record is a ValueError."""
    if not paths:
        raise ValueError("a page needs at least one run: give the folder that watch(optimizer, to=…) wrote")
    folders = [path.resolve() for path in find_runs(paths)]
    if twice := [str(folder) for folder in folders if folders.count(folder) > 1]:
        raise ValueError(f"the run {twice[0]} is given twice")
    runs = [_load(path, len(folders)) for path in find_runs(paths)]
    names = [run.name for run in runs]
    for k, (name, folder) in enumerate(zip(names, folders, strict=True)):
        if names.count(name) > 1:  # equal names get their folder: "adam (a/run)"
            runs[k] = replace(runs[k], name=f"{name} ({folder.relative_to(os.path.commonpath(folders))})")
    return runs


def _load(path: str | Path, runs: int) -> PageRun:
    """Read one run, and reduce it to its share of a page with this many `runs`."""
    run = read_run(path)
    if run.table.empty:
        raise ValueError(f"the run {path} has no record yet: watch writes the first part at its first flush")
    table = run.table
    steps = np.asarray(pd.unique(table["step"][table["group"] != ""]))
    is_time = (table["group"] == "") & (table["quantity"] == SECONDS)
    last = table[(table["step"] == steps.max(initial=0)) & (table["group"] != "") & ~np.isfinite(table["value"])]
    return PageRun(
        **{**vars(run), "table": table[:0]},
        lines=aggregate(table[~is_time], runs=runs),
        times=_times(table[is_time], steps),
        observed=(len(steps), int(max(table["step"].max(), run.about.get("last_step") or 0) - table["step"].min()) + 1),
        labels=labels(run),
        extremes={name: worst for name in HYPOTHESES if (worst := _extreme(table, name))},
        not_finite={str(name) for name in last["quantity"][last["statistic"].isin(["median", "mean"])]},
        verdict=verdict(run),
    )


def _times(table: pd.DataFrame, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and seconds; after the last observed step, the run goes on at its mean pace."""
    if len(table) < 2 or len(table) < len(observed):
        return None
    steps, seconds, more = table["step"].to_numpy(), table["value"].to_numpy(float), 1_000_000
    pace = (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
    return np.append(steps, steps[-1] + more), np.append(seconds, seconds[-1] + more * pace)


def page_data(runs: Sequence[PageRun]) -> tuple[str, str]:
    """Everything that the page's script draws: JSON, and the `Pack` that its offsets point into."""
    pack, recorded = Pack(), {name for run in runs for name in run.quantities}
    known = {name: QUANTITIES[name]._asdict() for name in QUANTITIES if name in recorded}
    other = sorted(recorded - set(known))  # under their own names
    known |= {name: {"title": name.replace("_", " ").capitalize(), "symbol": "", "meaning": ""} for name in other}
    found = trajectories([run.paths for run in runs])
    balls = spheres(found)
    spread = histograms([run.rows for run in runs])
    data = {
        "statistics": STATISTICS,
        "groups": list(dict.fromkeys(group for run in runs for group in run.groups)),
        "grid": grid(runs),
        "vectors": sorted(set().union(*(run.vectors for run in runs))),
        "quantities": known,
        "whole": sorted({name for run in runs for name, of in run.lines.values.items() if "" in of}),
        "runs": [_run(run) for run in runs],
        "bins": len(spread[0].edges) - 1 if spread else 0,
        "histograms": spread,
        "spheres": balls,
        "cosines": [each for ball in balls for each in cosines(ball.group, ball.row, found[ball.group, ball.row])],
    }

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist() if value.dtype.kind == "i" else pack.add(value)
        return vars(value)

    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=plain), pack.text()


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


def _run(run: PageRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "steps": run.lines.steps,
        "times": None if run.times is None else np.interp(run.lines.steps, *run.times).round(4).tolist(),
        "last": run.lines.last_step,
        "drops": run.lines.drops,
        "groups": run.groups,
        "series": {
            quantity: {group: [_line(of.get(name)) for name in STATISTICS] for group, of in groups.items()}
            for quantity, groups in run.lines.values.items()
        },
    }


def _line(line: np.ndarray | None) -> np.ndarray | list[float] | None:
    """A line, or [the value] of a constant one, such as the rate between two drops."""
    constant = line is not None and np.isfinite(line).all() and (line == line[0]).all()
    return [float(f"{line[0]:.5g}")] if line is not None and constant else line


def _extreme(table: pd.DataFrame, quantity: str) -> Extreme | None:
    """The largest value of a quantity over all rows, groups and steps of a run's table."""
    part = table[(table["quantity"] == quantity) & (table["statistic"] == "max")]
    finite = part[np.isfinite(part["value"])]
    if finite.empty:
        return None
    worst = finite.iloc[finite["value"].argmax()]
    lost = part["step"][~np.isfinite(part["value"])].nunique()
    return Extreme(float(worst["value"]), int(worst["step"]), str(worst["group"]), lost)

"""The page's one block of data: runs reduced in time, histograms, trajectories, all numbers in one pack."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steradian.reporting.aggregate import Lines, aggregate, coarsen
from steradian.reporting.facts import Extreme, distinct_names, extreme, lost
from steradian.reporting.histograms import histograms
from steradian.reporting.pack import Pack
from steradian.reporting.sphere import cosines, spheres, trajectories
from steradian.watching.records import QUANTITIES, STATISTICS, read_run

__all__ = ["BUDGET", "PageRun", "block", "load"]

POINTS = 480
FEWEST_POINTS = 48
BUDGET = 1_250_000  # numbers in all lines, four characters each
HYPOTHESES = ("radial", "velocity", "taylor")


@dataclass(frozen=True, eq=False)
class PageRun:
    """A run as the page needs it: the long table is reduced already."""

    name: str
    folder: Path
    about: Mapping[str, Any]
    lines: Lines
    rows: pd.DataFrame
    paths: pd.DataFrame
    alerts: pd.DataFrame
    extremes: dict[str, Extreme] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    @property
    def quantities(self) -> set[str]:
        """Quantities recorded for at least one group."""
        return {name for name, groups in self.lines.values.items() if set(groups) - {""}}

    @property
    def groups(self) -> list[str]:
        """Its groups, in the order of run.json, which is the model's."""
        named = [str(group.get("name")) for group in self.about.get("groups") or []]
        seen = {group for groups in self.lines.values.values() for group in groups} - {""}
        return [name for name in named if name in seen] + sorted(seen - set(named))


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
        raise ValueError(f"the run {path} holds no record yet: watch writes the first part at its first flush")
    found = {name: extreme(run.table, name) for name in HYPOTHESES}
    extremes = {name: of for name, of in found.items() if of is not None}
    lines = aggregate(run.table, points=POINTS)
    return PageRun(run.name, Path(path), run.about, lines, run.rows, run.paths, run.alerts, extremes, lost(run.table))


def block(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Everything that the page's script draws, ready for JSON."""
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
    """Those recorded for groups, in the order of `QUANTITIES`, and others after them under their own names."""
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
        "extremes": {name: asdict(of) for name, of in run.extremes.items()},
        "groups": run.groups,
        "series": series,
    }


def _line(line: np.ndarray, pack: Pack) -> Any:
    """Where a line lies in the pack; of a constant one, [the constant], which is most of what schedules record."""
    if np.isfinite(line).all() and (line == line[0]).all():
        return [float(f"{line[0]:.5g}")]
    return pack.add(line)

"""Studies that record what happens within trainings: one Parquet table each, whole runs only, never repeated."""

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.fleet import prepare_device
from steradian.lab.recipes import pretraining, trajectories
from steradian.lab.results import Result, Store, environment, write_atomically
from steradian.lab.study import RESULTS, RUNS, Study, pick_device
from steradian.lab.tracking import compare_trajectories, track_hypotheses, watch_training
from steradian.lab.training import Execution
from steradian.watch.records import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Tracks", "track_study", "trajectory_study"]


@dataclass
class Tracks:
    """Recorded tables of a study in one Parquet file, with the columns of `watch.records`."""

    path: Path
    finished: bool = field(default=True)

    def table(self) -> "pd.DataFrame":
        """Everything recorded; empty where there is no file."""
        import pandas as pd

        return pd.read_parquet(self.path) if self.path.exists() else pd.DataFrame(columns=list(COLUMNS))

    def runs(self) -> set[str]:
        """Keys of the recorded runs."""
        return set(self.table()["run"])

    def add(self, added: "pd.DataFrame") -> None:
        """Add the table of a run."""
        import pandas as pd

        tables = [table for table in (self.table(), added) if len(table)]
        buffer = io.BytesIO()
        pd.concat(tables, ignore_index=True).to_parquet(buffer, compression="zstd")
        write_atomically(self.path, buffer.getvalue())


def track_study(
    configs: Sequence[Config],
    name: str,
    *,
    watched: bool = False,
    roots: Mapping[str, Path] | None = None,
    device: str | None = None,
    seconds: float | None = None,
    points: int = 400,
    folder: Path = RESULTS,
    runs: Path = RUNS,
) -> Tracks:
    """Track trainings one after the other; their curves are stored too.

    Args:
        configs: the trainings.
        name: of the study: folder/NAME.json and folder/NAME-tracks.parquet.
        watched: follow every step with `watch`, which measures the phenomena, as `watch_training` does; otherwise
            look at some steps alone, as `track_hypotheses` does.
        roots: folders of the data, by name.
        device: where.
        seconds: start no further training when this time is over.
        points: steps to record in each.
        folder: where the files go.
        runs: where the folders of watched runs go, of which `steradian report` makes a page.
    """
    where, began = pick_device(device), time.monotonic()
    prepare_device(where, exact=any(config.precision == "float32" for config in configs))
    tracks, store = Tracks(folder / f"{name}-tracks.parquet"), Store(folder / f"{name}.json")
    done = tracks.runs() & store.keys()
    data: dict[str, Resident] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for config in [config for config in configs if config.key not in done]:
            if seconds is not None and time.monotonic() - began > seconds:
                tracks.finished = False
                break
            if config.data not in data:
                data[config.data] = Resident(load(config.data, (roots or {}).get(config.data)), where)
            task = progress.add_task(config.key, total=config.epochs)
            options: dict[str, Any] = {"points": points, "execution": Execution(compiled=where.type == "cuda")}
            options["tell"] = lambda _, task=task: progress.advance(task)
            started = time.monotonic()
            if watched:
                to = runs / name / "watched" / config.key
                training, table = watch_training(config, data[config.data], to, **options)
            else:
                training, records = track_hypotheses(config, data[config.data], **options)
                table = records.table()
            tracks.add(table)
            facts = (training.diverged, training.collapsed()[0], time.monotonic() - started, environment(where))
            store.add([Result(config, training.curves, *facts)])
    return tracks


def trajectory_study(
    options: Mapping[str, Any],
    name: str | None = None,
    *,
    root: Path | None = None,
    device: str | None = None,
    seconds: float | None = None,
    points: int = 100,
    folder: Path = RESULTS,
    runs: Path = RUNS,
) -> Tracks:
    """Section 3.3: train the networks that are missing, then compare SGD, AdaGradG and AdaGrad from each of them.

    Args:
        options: of `recipes.pretraining`: data, columns, epochs, seeds; and "tuning", epochs of the comparison.
        name: of the study; None: trajectories-DATA.
        root: folder of the data.
        device: where.
        seconds: stop when this time is over.
        points: steps to compare at.
        folder: where results go.
        runs: where checkpoints and weights go.
    """
    import torch

    where, began = pick_device(device), time.monotonic()
    chosen = {key: value for key, value in options.items() if key not in ("tuning", "methods")}
    starts = pretraining(**chosen)
    name = name or f"trajectories-{starts[0].data}"
    study, tracks = Study(name, folder, runs), Tracks(folder / f"{name}-tracks.parquet")
    roots = {} if root is None else {starts[0].data: root}
    if not study.run(starts, roots=roots, device=where, seconds=seconds, keep_weights=True):
        tracks.finished = False
        return tracks
    prepare_device(where, exact=True)
    data = Resident(load(starts[0].data, root), where)
    done = tracks.runs()
    for start in starts:
        schemes = trajectories([start], epochs=options.get("tuning", 10))
        if schemes[0].key in done:
            continue
        if seconds is not None and time.monotonic() - began > seconds:
            tracks.finished = False
            break
        weights = torch.load(study.work / "weights" / f"{start.key}.pt", weights_only=True)
        tracks.add(compare_trajectories(schemes, data, weights, points=points).table())
    return tracks

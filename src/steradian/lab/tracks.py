"""Studies that record what happens within trainings: one Parquet table each, whole runs only, never repeated."""

import io
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from steradian.lab import claims
from steradian.lab.claims import Claims
from steradian.lab.comparing import compare_trajectories
from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.execution import Execution
from steradian.lab.fleet import prepare_device, read_state
from steradian.lab.members import Member
from steradian.lab.progress import Silent, Watcher
from steradian.lab.recipes import pretraining, trajectories
from steradian.lab.results import environment, locked, write_atomically
from steradian.lab.study import RESULTS, RUNS, Study, pick_device
from steradian.lab.tracking import PHENOMENA, Tracked
from steradian.lab.training import Training
from steradian.watching.records import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Tracks", "track_study", "trajectory_study"]

_ABOUT = b"steradian"


@dataclass(frozen=True)
class Tracks:
    """Recorded tables of a study in one Parquet file, with the columns of `watch.records`.

    What is known of each run stands in the file's own metadata: "config", "steps" in an epoch, "environment".
    """

    path: Path

    def table(self) -> "pd.DataFrame":
        """Everything recorded; empty where there is no file."""
        import pandas as pd

        if not self.path.exists():
            return pd.DataFrame(columns=list(COLUMNS))
        with self._named():
            table = pd.read_parquet(self.path)
            if missing := [name for name in COLUMNS if name not in table]:
                raise ValueError(f"it has no {', '.join(missing)}")
            if wrong := [name for name in ("step", "value") if not pd.api.types.is_numeric_dtype(table[name])]:
                raise ValueError(f"no numbers in {', '.join(wrong)}")
        return table

    def about(self) -> dict[str, dict[str, Any]]:
        """What is known of each run, by its key."""
        from pyarrow import parquet

        if not self.path.exists():
            return {}
        with self._named():
            told = json.loads((parquet.read_schema(self.path).metadata or {}).get(_ABOUT, b"{}"))
            for run, facts in told.items():
                if not {"config", "steps"} <= set(facts):
                    raise ValueError(f"it says nothing of the config and steps of {run}")
                if not isinstance(facts["steps"], int) or facts["steps"] < 1:
                    raise ValueError(f"steps in an epoch of {run} must be at least 1, got {facts['steps']!r}")
                try:
                    Config.from_dict(facts["config"])
                except (ValueError, TypeError) as error:
                    raise ValueError(f"run {run}: {error}") from error
        return dict(told)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever is wrong with the file is said with its name."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise ValueError(f"{self.path} is not a file of records: {error}") from error

    def runs(self) -> set[str]:
        """Keys of the recorded runs."""
        return set(self.about())

    def measured(self) -> set[str]:
        """Keys of the runs in which the phenomena were measured."""
        table = self.table()
        return set(table[table["quantity"].isin(PHENOMENA)]["run"])

    def add(self, config: Config, added: "pd.DataFrame", **about: Any) -> None:
        """Add the table of a run, in the place of what was recorded of it before; other processes may do so too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            self._add(config, added, about)

    def _add(self, config: Config, added: "pd.DataFrame", about: Mapping[str, Any]) -> None:
        import pandas as pd
        import pyarrow as pa
        from pyarrow import parquet

        runs = self.about() | {config.key: {"config": config.to_dict(), **about}}
        known = self.table()
        tables = [table for table in (known[known["run"] != config.key], added) if len(table)]
        joined = pa.Table.from_pandas(pd.concat(tables, ignore_index=True), schema=_schema(), preserve_index=False)
        buffer = io.BytesIO()
        metadata = {_ABOUT: json.dumps(runs, ensure_ascii=False).encode()}
        parquet.write_table(
            joined.replace_schema_metadata(metadata),
            buffer,
            compression="zstd",
            compression_level=9,
            use_dictionary=[name for name in COLUMNS if name != "value"],
            use_byte_stream_split=["value"],
        )
        write_atomically(self.path, buffer.getvalue())


def _schema() -> Any:
    """Words by number, and figures in single precision, which is more than a picture shows."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    kinds = {"step": pa.int32(), "value": pa.float32()}
    return pa.schema([(name, kinds.get(name, word)) for name in COLUMNS])


def track_study(
    configs: Sequence[Config],
    name: str,
    *,
    phenomena: Collection[str] = (),
    roots: Mapping[str, Path] | None = None,
    device: str | None = None,
    seconds: float | None = None,
    size: int | None = None,
    execution: Execution | None = None,
    points: int = 300,
    folder: Path = RESULTS,
    runs: Path = RUNS,
    watcher: Watcher | None = None,
) -> bool:
    """Train with some steps recorded, all trainings in flight; their curves are stored too.

    Args:
        configs: the trainings.
        name: of the study: folder/NAME.json and folder/NAME-tracks.parquet.
        phenomena: methods in whose trainings (a), (b1), (b2) and (c) are measured too.
        roots: folders of the data, by name.
        device: where.
        seconds: stop, with checkpoints, when this time is over.
        size: trainings in flight; None: as for `Study.run`.
        execution: how; None: as for `Study.run`.
        points: steps to record in each.
        folder: where the files go.
        runs: where checkpoints go.
        watcher: told what happens.

    Returns:
        Whether everything is finished.
    """
    where, study = pick_device(device), Study(name, folder, runs)
    tracks = Tracks(folder / f"{name}-tracks.parquet")
    lost = study.store.keys() - tracks.runs()
    lost &= {config.key for config in configs}
    if lost:
        raise ValueError(f"{study.store.path} holds {', '.join(sorted(lost))}, of which {tracks.path} has no record")
    asked = {config.key for config in configs if config.method in phenomena}
    if unseen := sorted((asked & tracks.runs()) - tracks.measured()):
        raise ValueError(
            f"{tracks.path} holds {', '.join(unseen)} without the phenomena: give the study that measures them a name "
            "of its own"
        )

    def deliver(training: Tracked) -> None:
        tracks.add(training.config, training.table(), steps=training.steps, environment=environment(where))

    def make(squad: Sequence[Config], *args: Any, **more: Any) -> Tracked:
        measured = squad[0].method in phenomena
        return Tracked(squad, *args, points=points, phenomena=measured, deliver=deliver, **more)

    options: dict[str, Any] = {"roots": roots, "device": where, "seconds": seconds, "size": size}
    options["execution"] = None if execution is None else replace(execution, members=1)
    return study.run(configs, make=make, watcher=watcher, **options)


def trajectory_study(
    options: Mapping[str, Any],
    name: str | None = None,
    *,
    tuning: int = 10,
    root: Path | None = None,
    device: str | None = None,
    seconds: float | None = None,
    size: int | None = None,
    execution: Execution | None = None,
    points: int = 100,
    folder: Path = RESULTS,
    runs: Path = RUNS,
    watcher: Watcher | None = None,
) -> tuple[Tracks, bool]:
    """Section 3.3: train the networks that are missing, then compare SGD, AdaGradG and AdaGrad from each of them.

    Several processes share both, as for `Fleet`.

    Args:
        options: of `recipes.pretraining`: data, columns, norms, epochs, seeds.
        name: of the study; None: trajectories-DATA.
        tuning: epochs of the comparison.
        root: folder of the data.
        device: where.
        seconds: stop when this time is over.
        size: networks that are trained at once; None: as for `Study.run`.
        execution: how they are trained; None: as for `Study.run`.
        points: steps to compare after.
        folder: where results go.
        runs: where checkpoints and weights go.
        watcher: told what happens to the trainings.

    Returns:
        The records, and whether everything is finished.
    """
    where, began = pick_device(device), time.monotonic()
    starts = pretraining(**options)
    name = name or f"trajectories-{starts[0].data}"
    study, tracks = Study(name, folder, runs), Tracks(folder / f"{name}-tracks.parquet")
    schemes = {start: trajectories([start], epochs=tuning) for start in starts}
    done = tracks.runs()
    left = [start for start in starts if schemes[start][0].key not in done]
    roots = {} if root is None else {starts[0].data: root}
    how: dict[str, Any] = {"size": size, "execution": execution, "keep_weights": True, "watcher": watcher}
    if not study.run(left, roots=roots, device=where, seconds=seconds, **how):
        return tracks, False
    prepare_device(where, exact=True)
    data = Resident(load(starts[0].data, root), where) if left else None
    with watcher or Silent() as watching, Claims(study.work / "claims") as own:
        watching.begin(len(starts), len(starts) - len(left))
        while left:
            if seconds is not None and time.monotonic() - began > seconds:
                return tracks, False
            start = next((start for start in left if own.take([schemes[start][0].key])), None)
            done = tracks.runs()  # others may have finished some meanwhile
            if start is None:
                watching.waiting(len(left))
                time.sleep(claims.AGAIN)
            elif schemes[start][0].key not in done:
                assert data is not None
                ended = _compare(schemes[start], _start_of(start, study), data, tracks, points, watching)
                watching.finished(ended)
                done.add(schemes[start][0].key)
            own.free([] if start is None else [schemes[start][0].key])
            left = [start for start in left if schemes[start][0].key not in done]
    return tracks, True


def _start_of(start: Config, study: Study) -> dict[str, torch.Tensor]:
    """The weights of a trained network."""
    if any(result.diverged for result in study.store.results() if result.config.key == start.key):
        raise ValueError(f"{start.key} diverged, so that nothing can start from it: choose other epochs or seeds")
    path = study.work / "weights" / f"{start.key}.pt"
    if not path.exists():
        raise ValueError(f"no {path}: bring that folder along, or take {start.key} out of {study.store.path}")
    return dict(read_state(path))


def _compare(
    schemes: Sequence[Config],
    weights: dict[str, torch.Tensor],
    data: Resident,
    tracks: Tracks,
    points: int,
    watching: Watcher,
) -> Member:
    """Compare the schemes from one network and record it; returns the last of them as it ended."""
    seen: list[Member] = []

    def tell(training: Training) -> None:
        seen[:] = training.members[:1]
        watching.epoch(seen[0])

    compared = compare_trajectories(schemes, data, weights, points=points, tell=tell)
    steps = data.counts["train"] // schemes[0].batch_size
    tracks.add(schemes[0], compared, steps=steps, environment=environment(data.device))
    return seen[0]

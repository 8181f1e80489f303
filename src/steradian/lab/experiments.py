"""Studies that record what happens within trainings: hypotheses and phenomena by step, comparisons of trajectories.

Their records are one Parquet table per study. A run is recorded as a whole and never repeated.
"""

import io
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steradian import geometry
from steradian.files import write_atomically
from steradian.groups import Layout
from steradian.lab import fleet
from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.fleet import Progress, prepare_device, read_state
from steradian.lab.recipes import pretraining, trajectories
from steradian.lab.results import Claims, environment, locked
from steradian.lab.study import RESULTS, RUNS, Study, pick_device
from steradian.lab.tracking import ALL, PHENOMENA, Tracked, recorded_steps, statistics_table
from steradian.lab.training import Training
from steradian.watching.records import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Tracks", "compare_trajectories", "track_study", "trajectory_study"]

_ABOUT = b"steradian"


@dataclass(frozen=True)
class Tracks:
    """Recorded tables of a study in one Parquet file, with the columns of a watch's records.

    The file's own metadata describe each run: "config", "steps" in an epoch, "environment".
    """

    path: Path

    def table(self) -> "pd.DataFrame":
        """Everything recorded; empty if there is no file."""
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
        """Metadata of each run, by its key."""
        from pyarrow import parquet

        if not self.path.exists():
            return {}
        with self._named():
            about = json.loads((parquet.read_schema(self.path).metadata or {}).get(_ABOUT, b"{}"))
            for run, facts in about.items():
                if not {"config", "steps"} <= set(facts):
                    raise ValueError(f"config and steps of {run} are missing")
                if not isinstance(facts["steps"], int) or facts["steps"] < 1:
                    raise ValueError(f"steps in an epoch of {run} must be at least 1, got {facts['steps']!r}")
                try:
                    Config.from_dict(facts["config"])
                except (ValueError, TypeError) as error:
                    raise ValueError(f"run {run}: {error}") from error
        return dict(about)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in every error."""
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
        """Add the table of a run, or replace it; other processes may do so at the same time."""
        import pandas as pd
        import pyarrow as pa
        from pyarrow import parquet

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
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
    """Strings as dictionary codes, and values in single precision, which is more than a figure shows."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    kinds = {"step": pa.int32(), "value": pa.float32()}
    return pa.schema([(name, kinds.get(name, word)) for name in COLUMNS])


def track_study(
    configs: Sequence[Config],
    name: str,
    *,
    phenomena: Collection[str] = (),
    points: int = 300,
    device: str | None = None,
    folder: Path = RESULTS,
    runs: Path = RUNS,
    **options: Any,
) -> bool:
    """Train with some steps recorded, all trainings in flight; their curves are stored too.

    Args:
        configs: the trainings.
        name: of the study: folder/NAME.json and folder/NAME-tracks.parquet.
        phenomena: methods in whose trainings (a), (b1), (b2) and (c) are measured too.
        points: steps to record in each.
        device: where.
        folder: where the files go.
        runs: where checkpoints go.
        **options: of `Study.run`: roots, size, seconds, execution, progress.

    Returns:
        Whether everything is finished.
    """
    where, study = pick_device(device), Study(name, folder, runs)
    tracks = Tracks(folder / f"{name}-tracks.parquet")
    keys, recorded = {config.key for config in configs}, tracks.runs()
    if lost := sorted(keys & study.store.keys() - recorded):
        raise ValueError(f"{study.store.path} contains {', '.join(lost)}, of which {tracks.path} has no record")
    wanted = {config.key for config in configs if config.method in phenomena}
    if unmeasured := sorted((wanted & recorded) - tracks.measured()):
        raise ValueError(
            f"{tracks.path} contains {', '.join(unmeasured)} without the phenomena: choose another name for the study "
            "that measures them"
        )

    def deliver(training: Tracked) -> None:
        tracks.add(training.config, training.table(), steps=training.steps, environment=environment(where))

    def make(config: Config, *args: Any, **more: Any) -> Tracked:
        measured = config.method in phenomena
        return Tracked(config, *args, points=points, phenomena=measured, deliver=deliver, **more)

    return study.run(configs, make=make, device=where, **options)


# Trajectories of several schemes from one point, compared filter by filter: the experiment of Section 3.3


def compare_trajectories(
    configs: Sequence[Config],
    data: Resident,
    weights: dict[str, Tensor],
    *,
    points: int = 200,
    report: Callable[[Training], object] = lambda _: None,
) -> "pd.DataFrame":
    """Cosine of every filter under each scheme with the same filter under the first one, over the same batches.

    Args:
        configs: the schemes, the reference first; they differ only by method, rate and momentum.
        data: their data.
        weights: where all of them start.
        points: about how many steps to compare after; see `tracking.recorded_steps`.
        report: called with the last scheme after every epoch.

    Returns:
        A table of "cosine" and "angle" by number of steps, whose run is the key of the reference. Statistics over the
        filters of the group "METHOD: PARAMETER" and over those of the whole network, "METHOD: all filters"; for three
        filters of every block the cosine, in the group "METHOD: PARAMETER[FILTER]" with the statistic "mean".
    """
    trainings = [Training(config, data, weights=weights) for config in configs]
    steps, done = trainings[0].steps, 0
    wanted = [step + 1 for step in recorded_steps(configs[0].epochs * steps, points)]
    found: list[NDArray[np.float64]] = []
    while not trainings[0].finished:
        left = steps
        while left:
            count = min(wanted[len(found)] - done, left)
            left = min(training.take(count) for training in trainings)
            done += count
            if done == wanted[len(found)]:
                found.append(_angles(trainings))
        for training in trainings:
            training.end_epoch()
        for training in trainings:
            training.collect()
        report(trainings[-1])
    return _comparison_table(trainings, wanted[: len(found)], np.stack(found))


def _angles(trainings: Sequence[Training]) -> NDArray[np.float64]:
    """Angles of each scheme but the first with the first, over all filters of the network, (schemes − 1, filters)."""
    for training in trainings:
        training.queue.wait()
    reference, *others = (_directions(training) for training in trainings)
    found = [[geometry.angle(u, p).squeeze(-1) for u, p in zip(reference, other, strict=True)] for other in others]
    return torch.stack([torch.cat(each) for each in found]).cpu().numpy()


def _directions(training: Training) -> list[Tensor]:
    """Directions of all rows, parameter by parameter."""
    params = training.groups.params
    parts = [Layout(g.spec).join([params[name].detach().double() for name in g.names]) for g in training.groups.groups]
    return [geometry.split(part, check=False)[1] for part in parts]


def _chosen_filters(training: Training) -> dict[str, list[int]]:
    """Three filters of every block of a network, by parameter, the same for all schemes."""
    random = np.random.Generator(np.random.Philox(key=0))
    blocks: dict[str, list[tuple[str, int]]] = {}
    for group in training.groups.groups:
        name = group.names[0]
        blocks.setdefault(name.rsplit(".", 2)[0], []).extend((name, k) for k in range(group.n_rows))
    chosen: dict[str, list[int]] = {}
    for filters in blocks.values():
        for k in sorted(random.choice(len(filters), size=min(3, len(filters)), replace=False).tolist()):
            chosen.setdefault(filters[k][0], []).append(filters[k][1])
    return chosen


def _comparison_table(
    trainings: Sequence[Training], steps: Sequence[int], found: NDArray[np.float64]
) -> "pd.DataFrame":
    import pandas as pd

    run, groups = trainings[0].config.key, trainings[0].groups.groups
    ends = np.cumsum([0, *(group.n_rows for group in groups)]).tolist()
    filters = _chosen_filters(trainings[0])
    blocks: dict[str, NDArray[np.float64]] = {}
    singles = []
    for number, other in enumerate(trainings[1:]):
        angles, method = found[:, number], other.config.method
        values = np.stack([np.cos(angles), angles], axis=1)
        blocks[f"{method}: {ALL}"] = values
        for group, start, end in zip(groups, ends[:-1], ends[1:], strict=True):
            name = group.names[0]
            blocks[f"{method}: {name}"] = values[:, :, start:end]
            for k in filters.get(name, []):
                cosines = {"step": steps, "value": values[:, 0, start + k]}
                words = {"run": run, "group": f"{method}: {name}[{k}]", "quantity": "cosine", "statistic": "mean"}
                singles.append(pd.DataFrame({**cosines, **words}))
    spread = statistics_table(run, steps, ["cosine", "angle"], blocks)
    return pd.concat([spread, *singles], ignore_index=True)[list(COLUMNS)]


def trajectory_study(
    recipe: Mapping[str, Any],
    name: str | None = None,
    *,
    tuning: int = 10,
    points: int = 100,
    root: Path | None = None,
    device: str | None = None,
    seconds: float | None = None,
    folder: Path = RESULTS,
    runs: Path = RUNS,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Tracks, bool]:
    """Section 3.3: train the networks that are missing, then compare SGD, AdaGradG and AdaGrad from each of them.

    Several processes share both, as for `Fleet`.

    Args:
        recipe: arguments of `recipes.pretraining`: data, columns, norms, epochs, seeds.
        name: of the study; None: trajectories-DATA.
        tuning: epochs of the comparison.
        points: steps to compare after.
        root: folder of the data.
        device: where.
        seconds: stop when this time is over.
        folder: where results go.
        runs: where checkpoints and weights go.
        progress: callbacks for the progress.
        **options: of `Study.run`, for the networks that are trained first: size, execution.

    Returns:
        The records, and whether everything is finished.
    """
    where, began = pick_device(device), time.monotonic()
    starts = pretraining(**recipe)
    name = name or f"trajectories-{starts[0].data}"
    study, tracks = Study(name, folder, runs), Tracks(folder / f"{name}-tracks.parquet")
    schemes = {start: trajectories([start], epochs=tuning) for start in starts}
    done = tracks.runs()
    left = [start for start in starts if schemes[start][0].key not in done]
    roots, progress = {} if root is None else {starts[0].data: root}, progress or Progress()
    options |= {"keep_weights": True, "progress": progress}
    if not study.run(left, roots=roots, device=where, seconds=seconds, **options):
        return tracks, False
    prepare_device(where, exact=True)
    data = Resident(load(starts[0].data, root), where) if left else None
    with progress, Claims(study.work / "claims") as claims:
        progress.begin(len(starts), len(starts) - len(left))
        while left:
            if seconds is not None and time.monotonic() - began > seconds:
                return tracks, False
            start = next((start for start in left if claims.take(schemes[start][0].key)), None)
            done = tracks.runs()  # other processes may have finished some meanwhile
            if start is None:
                progress.waiting(len(left))
                time.sleep(fleet.POLL)
            else:
                key = schemes[start][0].key
                if key not in done:
                    assert data is not None
                    _compare(schemes[start], _weights(start, study), data, tracks, points, progress)
                    done.add(key)
                claims.free(key)
            left = [start for start in left if schemes[start][0].key not in done]
    return tracks, True


def _weights(start: Config, study: Study) -> dict[str, Tensor]:
    """The weights of a trained network."""
    if any(result.diverged for result in study.store.results() if result.config.key == start.key):
        raise ValueError(f"{start.key} diverged, so nothing can start from it: choose other epochs or seeds")
    path = study.work / "weights" / f"{start.key}.pt"
    if not path.exists():
        raise ValueError(f"no {path}: copy that folder here, or remove {start.key} from {study.store.path}")
    return dict(read_state(path))


def _compare(
    schemes: Sequence[Config],
    weights: dict[str, Tensor],
    data: Resident,
    tracks: Tracks,
    points: int,
    progress: Progress,
) -> None:
    """Compare the schemes from one network and record it."""
    last: list[Training] = []

    def report(training: Training) -> None:
        last[:] = [training]
        progress.epoch(training.config, training.curves)

    compared = compare_trajectories(schemes, data, weights, points=points, report=report)
    steps = data.counts["train"] // schemes[0].batch_size
    tracks.add(schemes[0], compared, steps=steps, environment=environment(data.device))
    progress.finished(last[0].config, last[0].curves)

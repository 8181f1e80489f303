"""Where records go: a folder of Parquet parts, TensorBoard, Weights & Biases, MLflow, any callable log(dict, step)."""

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from steradian.watching._block import Alert, Block, Point, path_columns
from steradian.watching._store import Store
from steradian.watching.records import STATISTICS

__all__ = ["Calls", "Folder", "MLflow", "Sink", "TensorBoard", "WandB", "sinks_of"]

logger = logging.getLogger("steradian")

_KEPT = 256
_PATH_POINTS = 512
_FEW = ("median",)
_METRICS = 1000
_FORBIDDEN = re.compile(r"[^-/\w. :]+")
_WRITTEN: set[Path] = set()


class Sink(Protocol):
    """Takes blocks of observed steps."""

    def open(self, about: Mapping[str, Any]) -> None:
        """Called once, with what run.json would hold."""

    def write(self, block: Block) -> None:
        """Called with every block, in order."""

    def alert(self, alert: Alert) -> None:
        """Called with every alert."""

    def close(self) -> None:
        """Called once at the end; afterwards everything is where it belongs."""


class Folder:
    """A run on disk (`records.read_run` reads it). Parts are written by a thread of their own.

    When the disk fails, training goes on: it is said once, and what could not be written is kept and tried again
    with the next part, up to 256 parts. A folder that someone takes away is made again.
    """

    def __init__(self, path: str | Path) -> None:
        self.store = Store(path)
        self._tasks: queue.SimpleQueue[Callable[[], None] | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unsaved: list[Callable[[], None]] = []
        self._lost = 0
        self._failed = False
        self._begun = False
        self._about: Mapping[str, Any] = {}
        self._path: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        self._path_number = self.store.next_number("path")

    def open(self, about: Mapping[str, Any]) -> None:
        """Write run.json and start the thread.

        Raises:
            ValueError: another watch of this process writes to the folder.
        """
        place = self.store.folder.resolve()
        if place in _WRITTEN:
            raise ValueError(f"to must be a folder of its own for each watch, but another one writes to {place}")
        _WRITTEN.add(place)
        self._begun = False
        self._about = about
        self._save(lambda: self.store.describe(about))
        self._thread = threading.Thread(target=self._work, name="steradian-watch", daemon=True)
        self._thread.start()

    def write(self, block: Block) -> None:
        """Hand a block to the thread."""
        if len(block.steps) and not self._begun:
            first, self._begun = int(block.steps[0]), True
            self._tasks.put(lambda: self.store.drop_alerts(first))
        self._tasks.put(lambda: self.store.add("part", block.columns()))
        if block.rows:
            self._tasks.put(lambda: self.store.add("rows", block.row_columns()))
        if block.paths:
            points = self._thinned(block)
            self._tasks.put(lambda: self.store.add("path", path_columns(block.run, points), number=self._path_number))

    def alert(self, alert: Alert) -> None:
        """Hand an alert to the thread."""
        self._tasks.put(lambda: self.store.alert(vars(alert)))

    def drain(self) -> None:
        """Wait until everything handed over so far is written, or could not be."""
        # The thread of the process that opened it does not run in a fork.
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._tasks.put(done)
            done.wait()

    def close(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        self._retry()
        _WRITTEN.discard(self.store.folder.resolve())
        if self._unsaved or self._lost:
            logger.error("%s: %d parts could not be written", self.store.folder, len(self._unsaved) + self._lost)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
            else:
                self._save(task)

    def _save(self, task: Callable[[], None]) -> None:
        self._unsaved.append(task)
        self._retry()
        if len(self._unsaved) > _KEPT:
            self._unsaved.pop(0)
            self._lost += 1

    def _retry(self) -> None:
        while self._unsaved:
            try:
                if not self.store.folder.is_dir():  # someone took it away
                    self.store.describe(self._about)
                self._unsaved[0]()
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    logger.warning(
                        "cannot write to %s (%s): training goes on, and what is recorded is kept to be written later",
                        self.store.folder,
                        error,
                    )
                return
            except Exception:
                logger.exception("%s: a part was lost", self.store.folder)
                self._lost += 1
            self._unsaved.pop(0)

    def _thinned(self, block: Block) -> list[Point]:
        """All points of the paths so far, every second one dropped whenever a path has 512."""
        for step, group, row, direction in block.paths:
            points = self._path.setdefault((group, row), [])
            points.append((step, direction))
            if len(points) > _PATH_POINTS:
                del points[1:-1:2]
        found = [
            (step, group, row, direction) for (group, row), points in self._path.items() for step, direction in points
        ]
        return sorted(found, key=lambda point: point[0])


class Calls:
    """Calls `log(dict, step)` for every observed step: `wandb_run.log`, `mlflow.log_metrics`, or a function of yours.

    Args:
        log: called with {"radius/conv1.weight/median": 1.0, …} and the step.
        statistics: which statistics to hand over.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object], *, statistics: Sequence[str] = _FEW) -> None:
        unknown = sorted(set(statistics) - set(STATISTICS))
        if unknown:
            raise ValueError(f"statistics must be out of {STATISTICS}, got {unknown}")
        self.log = log
        self.statistics = tuple(statistics)

    def open(self, about: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def write(self, block: Block) -> None:
        """One call per step."""
        logged: dict[int, dict[str, float]] = {}
        for step, name, value in block.logged:
            logged.setdefault(step, {})[name] = value
        for k, step in enumerate(block.steps):
            self.log({**block.scalars(k, self.statistics), **logged.pop(int(step), {})}, int(step))
        for step, values in logged.items():
            self.log(values, step)

    def alert(self, alert: Alert) -> None:
        """Alerts are no numbers."""

    def close(self) -> None:
        """Nothing to close."""


class WandB(Calls):
    """Weights & Biases: scalars against their own step, "steradian/step", since records come some steps late.

    W&B counts every log as one step of its own and drops what comes with a smaller number, so log your own numbers
    without `step=` (with `define_metric` they have an axis too, as Lightning and transformers do it).

    Args:
        run: what `wandb.init()` returned.
        statistics: which statistics to hand over.
    """

    def __init__(self, run: Any, *, statistics: Sequence[str] = _FEW) -> None:
        super().__init__(self._log, statistics=statistics)
        self.run = run

    def open(self, about: Mapping[str, Any]) -> None:
        """Name the axis, and add the configuration."""
        self.run.define_metric("steradian/step")
        self.run.define_metric("steradian/*", step_metric="steradian/step")
        self.run.config.update({"steradian": {"optimizer": about["optimizer"], "every": about["every"]}})

    def _log(self, values: dict[str, float], step: int) -> None:
        self.run.log({"steradian/step": step, **{f"steradian/{name}": value for name, value in values.items()}})

    def alert(self, alert: Alert) -> None:
        """As an alert of W&B."""
        self.run.alert(title=f"{alert.kind}: {alert.group}", text=str(alert))


class MLflow(Calls):
    """MLflow: metrics of one run, a thousand in one call.

    Args:
        run_id: the run; None for the active one.
        statistics: which statistics to hand over.
    """

    def __init__(self, run_id: str | None = None, *, statistics: Sequence[str] = _FEW) -> None:
        super().__init__(self._log, statistics=statistics)
        self.run_id = run_id
        self._metrics: list[Any] = []

    def open(self, about: Mapping[str, Any]) -> None:
        """Find the active run."""
        import mlflow

        if self.run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ValueError("MLflow needs an active run: mlflow.start_run(), or pass run_id")
            self.run_id = active.info.run_id

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow's names may not hold every character that a group's name does.
        self._metrics += [Metric(_FORBIDDEN.sub("_", name), value, now, step) for name, value in values.items()]

    def write(self, block: Block) -> None:
        """All steps of the block in as few calls as MLflow takes."""
        import mlflow

        self._metrics = []
        super().write(block)
        for start in range(0, len(self._metrics), _METRICS):
            mlflow.MlflowClient().log_batch(self.run_id, self._metrics[start : start + _METRICS])

    def alert(self, alert: Alert) -> None:
        """As a tag of the run."""
        import mlflow

        assert self.run_id is not None
        mlflow.MlflowClient().set_tag(self.run_id, f"steradian.{alert.kind}.{alert.step}", str(alert))


class TensorBoard(Calls):
    """TensorBoard: scalars for every observed step, histograms where rows are kept.

    Args:
        writer: a `SummaryWriter`, or a folder for one.
        statistics: which statistics to hand over.
    """

    def __init__(self, writer: Any, *, statistics: Sequence[str] = _FEW) -> None:
        super().__init__(self._log, statistics=statistics)
        self.owned = isinstance(writer, str | Path)
        if self.owned:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(writer))
        self.writer = writer

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def write(self, block: Block) -> None:
        """Scalars, then histograms."""
        super().write(block)
        for step, group, values in block.rows:
            for quantity, row in zip(block.quantities, values, strict=True):
                finite = row[np.isfinite(row)]
                if finite.size > 1 and quantity != "lr":
                    self.writer.add_histogram(f"{quantity}/{group}", finite, step)

    def alert(self, alert: Alert) -> None:
        """As a text."""
        self.writer.add_text(f"alerts/{alert.kind}", str(alert), alert.step)

    def close(self) -> None:
        """Flush; close a writer of our own."""
        self.writer.flush()
        if self.owned:
            self.writer.close()


def sinks_of(to: Any) -> list[Sink]:
    """What `to` names: a path, a sink, a SummaryWriter, a W&B or MLflow run, a callable, or several of them.

    Raises:
        TypeError: it is none of these.
        ValueError: the path is empty.
    """
    if to is None:
        return []
    if isinstance(to, str) and not to:
        raise ValueError("to must be a folder, got '': write '.' for the present one")
    if isinstance(to, str | Path):
        return [Folder(to)]
    if all(hasattr(to, name) for name in ("open", "write", "alert", "close")):
        return [to]
    if hasattr(to, "add_scalar"):
        return [TensorBoard(to)]
    if hasattr(to, "define_metric"):
        return [WandB(to)]
    if hasattr(getattr(to, "info", None), "run_id"):
        return [MLflow(to.info.run_id)]
    if callable(to):
        return [Calls(to)]
    if isinstance(to, Iterable):
        return [sink for one in to for sink in sinks_of(one)]
    raise TypeError(
        f"to must be a folder, a callable log(dict, step), a SummaryWriter, a W&B or MLflow run, a sink, or several of "
        f"them, got {type(to).__name__}"
    )

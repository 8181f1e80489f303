"""Where records go: a folder of Parquet parts, TensorBoard, Weights & Biases, MLflow, any callable log(dict, step)."""

import errno
import io
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has none, and folders are not locked there
    fcntl = None  # type: ignore[assignment]

from steradian.files import write_atomically
from steradian.watching import records
from steradian.watching.records import COLUMNS, QUANTITIES, STATISTICS, Alert, Block, Columns

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Calls", "Folder", "MLflow", "Memory", "RunFiles", "Sink", "TensorBoard", "WandB", "sinks_of"]

logger = logging.getLogger("steradian")

_WAITING = 256  # parts that wait in memory while the disk is full
_MOST = 2**25  # numbers that are kept in memory
_FORBIDDEN = re.compile(r"[^-/\w. :]+")  # characters that MLflow does not allow in the name of a metric
_ORDER = list(dict.fromkeys(["effective_lr", "angle", *QUANTITIES]))  # of charts in TensorBoard and W&B


class Sink:
    """Takes blocks of observed steps; a class with the same methods is one too."""

    def open(self, about: Mapping[str, Any]) -> None:
        """Called once, with the contents of run.json."""

    def write(self, block: Block) -> None:
        """Called with every block, in order."""

    def alert(self, alert: Alert) -> None:
        """Called with every alert."""

    def close(self) -> None:
        """Called once at the end; must not return before everything is written."""


class RunFiles:
    """Writes the files of one run. A run that is already there is continued: new parts get the next numbers."""

    def __init__(self, folder: str | Path) -> None:
        try:
            # pyarrow imports pandas with its first array: better here than in the middle of a training.
            import pandas  # noqa: F401
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            needed = "pip install 'steradian[lab]'; a callable log(dict, step) needs neither"
            raise ImportError(f"recording to a folder needs pyarrow and pandas: {needed}") from error
        self.folder = Path(folder).absolute()  # the process may change its directory
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"to must be a folder, and {self.folder} is a file")

    def add(self, kind: str, columns: Columns) -> None:
        """Write one part of a kind ("part", "rows" or "path"), with the next number."""
        import pandas as pd
        import pyarrow as pa
        from pyarrow import parquet

        arrays = {
            name: pa.DictionaryArray.from_arrays(column.codes, list(column.categories))
            if isinstance(column, pd.Categorical)
            else pa.array(column)
            for name, column in columns.items()
        }
        number = max(records.numbered_parts(self.folder, kind), default=-1) + 1
        content = io.BytesIO()
        # Most values were computed in float32: half of their bytes are 0 and, split into streams, take no space.
        words, values = [name for name in columns if name != "value"], [name for name in columns if name == "value"]
        split: Any = {"use_dictionary": words, "use_byte_stream_split": values}
        parquet.write_table(pa.table(arrays), content, compression="zstd", **split)
        write_atomically(self.folder / f"{kind}-{number:05d}.parquet", content.getvalue())

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write run.json."""
        text = json.dumps(_with_text_keys(about), indent=1, ensure_ascii=False, default=str)
        write_atomically(self.folder / "run.json", (text + "\n").encode(errors="backslashreplace"))

    def alert(self, alert: Mapping[str, Any]) -> None:
        """Append one line to alerts.jsonl in one write; after an incomplete line it begins a new one."""
        line = _line(alert)
        with open(self.folder / "alerts.jsonl", "a+b", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def drop_alerts(self, step: int) -> None:
        """Remove the alerts from a step on: a training that starts there again raises its own."""
        file = self.folder / "alerts.jsonl"
        alerts = records.read_alerts(file)
        kept = [_line(alert) for alert in alerts if alert["step"] < step]
        if len(kept) < len(alerts):
            write_atomically(file, b"".join(kept))


def _with_text_keys(value: Any) -> Any:
    """The same with text for keys: a configuration may have others, and JSON may not."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(of) for key, of in value.items()}
    return [_with_text_keys(of) for of in value] if isinstance(value, list | tuple) else value


def _line(alert: Mapping[str, Any]) -> bytes:
    return (json.dumps(alert, ensure_ascii=False) + "\n").encode()


class Folder(Sink):
    """A run on disk (`records.read_run` reads it), written by its own thread.

    When the disk fails, training goes on: one warning is logged, and what could not be written is kept and tried again
    with the next part, up to 256 parts. A folder that is deleted is made again.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = RunFiles(path)
        self.seconds = 0.0  # time that its thread spent
        self._tasks: queue.SimpleQueue[Callable[[], None] | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unwritten: list[Callable[[], None]] = []
        self._lost = 0
        self._failed = self._begun = False
        self._lock: int | None = None

    def open(self, about: Mapping[str, Any]) -> None:
        self._lock = _locked(self.files.folder)
        self._begun = False
        self._thread = threading.Thread(target=self._work, name="steradian-watch", daemon=True)
        self._thread.start()
        self.describe(about)
        self.drain()

    def write(self, block: Block) -> None:
        if len(block.steps) and not self._begun:
            self._begun = True
            self._tasks.put(partial(self.files.drop_alerts, int(block.steps[0])))
        self._tasks.put(partial(self._add, "part", block.columns))
        if block.rows:
            self._tasks.put(partial(self._add, "rows", block.row_columns))
        if block.paths:
            self._tasks.put(partial(self._add, "path", block.path_columns))

    def _add(self, kind: str, columns: Callable[[], Columns]) -> None:
        self.files.add(kind, columns())

    def alert(self, alert: Alert) -> None:
        self._tasks.put(partial(self.files.alert, vars(alert)))

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write run.json: it has changed."""
        self._about = about
        self._tasks.put(partial(self.files.describe, about))

    def table(self) -> "pd.DataFrame":
        """Everything that was written so far, or waits for the disk."""
        import pandas as pd

        self.drain()
        waiting = [task.args[1]() for task in self._unwritten if isinstance(task, partial) and task.args[0] == "part"]
        written = records.read_parts(self.files.folder, "part", COLUMNS)
        tables = [*([written] if len(written) else ()), *map(pd.DataFrame, waiting)]
        return pd.concat(tables, ignore_index=True) if waiting else written

    def drain(self) -> None:
        """Wait until everything queued so far is written, or failed to be."""
        # In a fork the thread of the parent process does not run.
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._tasks.put(done)
            done.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        self._retry()
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing it would not be enough: processes that were forked have it
            os.close(self._lock)
            self._lock = None
        if self._unwritten or self._lost:
            logger.error("%s: %d parts could not be written", self.files.folder, len(self._unwritten) + self._lost)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
                continue
            began = time.thread_time()
            self._unwritten.append(task)
            self._retry()
            self.seconds += time.thread_time() - began
            if len(self._unwritten) > _WAITING:
                self._unwritten.pop(0)
                self._lost += 1

    def _retry(self) -> None:
        while self._unwritten:
            try:
                if not self.files.folder.is_dir():  # it was deleted
                    self.files.describe(self._about)
                self._unwritten[0]()
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    text = "cannot write to %s (%s): training goes on, and what is recorded is kept to be written later"
                    logger.warning(text, self.files.folder, error)
                return
            except Exception:
                logger.exception("%s: a part was lost", self.files.folder)
                self._lost += 1
            self._unwritten.pop(0)


def _locked(folder: Path) -> int | None:
    """An open descriptor of a folder that no other watch of this machine writes to; None where it cannot be locked."""
    if fcntl is None:
        return None
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # some network disks have no locks
    except OSError as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, BlockingIOError):
            text = f"to must be a separate folder for each watch, but another one writes to {folder}; stop() ends it"
            raise ValueError(text) from None
        return None
    return lock


class Memory:
    """Everything in memory; if there are too many numbers, every second observed step is dropped."""

    seconds = 0.0  # that a thread spent

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._dropped = False

    def write(self, block: Block) -> None:
        self._blocks.append(replace(block, rows=[], paths=[]))
        if sum(kept.values.size for kept in self._blocks) > _MOST:
            if not self._dropped:
                logger.warning("%s: every second step is dropped from memory: pass to= to keep all of them", block.run)
            self._dropped = True
            for k, kept in enumerate(self._blocks):
                half = {name: getattr(kept, name)[::2].copy() for name in ("steps", "seconds", "active", "values")}
                self._blocks[k] = replace(kept, **half)

    def table(self) -> "pd.DataFrame":
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("records() needs pandas: pip install 'steradian[lab]'; latest() does not") from error

        tables = [pd.DataFrame(block.columns()).astype({"quantity": str}) for block in self._blocks]
        table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame({name: [] for name in COLUMNS})
        return table.astype({"quantity": "category"})


class Calls(Sink):
    """Calls `log(dict, step)` for every observed step: `wandb_run.log`, `mlflow.log_metrics`, or a function of yours.

    `log` gets {"radius/conv1.weight/median": 1.0, …} and the step; `statistics` are those to log.
    """

    def __init__(self, log: Callable[[dict[str, float], int], Any], *, statistics: Sequence[str] = ("median",)) -> None:
        unknown = sorted(set(statistics) - set(STATISTICS))
        if unknown:
            raise ValueError(f"statistics must be out of {STATISTICS}, got {unknown}")
        self.log, self.statistics = log, tuple(statistics)

    def write(self, block: Block) -> None:
        logged: dict[int, dict[str, float]] = {}
        for step, name, value in block.logged:
            logged.setdefault(step, {})[name] = value
        for k, step in enumerate(block.steps):
            self.log({**block.scalars(k, self.statistics), **logged.pop(int(step), {})}, int(step))
        for step, values in logged.items():
            self.log(values, step)


def _numbered(name: str) -> str:
    """A name with the number of its quantity, since TensorBoard and W&B sort: effective rate and angle come first."""
    quantity, _, group = name.partition("/")
    return f"{_ORDER.index(quantity) + 1:02d}_{name}" if group and quantity in QUANTITIES else name


class WandB(Calls):
    """Weights & Biases: scalars against their own step, "steradian/step", since records come some steps late.

    W&B counts every log as one step and drops what comes with a smaller number, so log your own numbers
    without `step=` (with `define_metric` they have an axis too, as Lightning and transformers do it).

    `run` is what `wandb.init()` returned; `statistics` are those to log.
    """

    def __init__(self, run: Any, *, statistics: Sequence[str] = ("median",)) -> None:
        super().__init__(self._log, statistics=statistics)
        self.run = run

    def open(self, about: Mapping[str, Any]) -> None:
        self.run.define_metric("steradian/step")
        self.run.define_metric("steradian/*", step_metric="steradian/step")
        self.run.config.update({"steradian": {"optimizer": about["optimizer"], "every": about["every"]}})

    def _log(self, values: dict[str, float], step: int) -> None:
        named = {f"steradian/{_numbered(name)}": value for name, value in values.items()}
        self.run.log({"steradian/step": step, **named})

    def alert(self, alert: Alert) -> None:
        self.run.alert(title=f"{alert.kind}: {alert.group}", text=str(alert))


class MLflow(Calls):
    """MLflow: metrics of the run with this id, or of the active one (None); `statistics` are those to log."""

    def __init__(self, run_id: str | None = None, *, statistics: Sequence[str] = ("median",)) -> None:
        super().__init__(self._log, statistics=statistics)
        self.run_id = run_id

    def open(self, about: Mapping[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        if self.run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ValueError("MLflow needs an active run: mlflow.start_run(), or pass run_id")
            self.run_id = active.info.run_id

    def _log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(_FORBIDDEN.sub("_", name), value, now, step) for name, value in values.items()]

    def write(self, block: Block) -> None:
        self._metrics: list[Any] = []
        super().write(block)
        self._client.log_batch(self.run_id, self._metrics)

    def alert(self, alert: Alert) -> None:
        assert self.run_id is not None
        self._client.set_tag(self.run_id, f"steradian.{alert.kind}.{alert.step}", str(alert))


class TensorBoard(Calls):
    """TensorBoard: scalars for every observed step, histograms of rows that are recorded.

    `writer` is a `SummaryWriter`, or a folder for one; `statistics` are those to log.
    """

    def __init__(self, writer: Any, *, statistics: Sequence[str] = ("median",)) -> None:
        super().__init__(self._log, statistics=statistics)
        self.owned = isinstance(writer, str | Path)
        if self.owned:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(writer))
        self.writer = writer

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(_numbered(name), value, step)

    def write(self, block: Block) -> None:
        super().write(block)
        for step, group, _, values in block.rows:
            for quantity, row in zip(block.quantities, values, strict=True):
                finite = row[np.isfinite(row)]
                if finite.size > 1 and quantity not in records.ONE_NUMBER:
                    self.writer.add_histogram(_numbered(f"{quantity}/{group}"), finite, step)

    def alert(self, alert: Alert) -> None:
        self.writer.add_text(f"alerts/{alert.kind}", str(alert), alert.step)

    def close(self) -> None:
        self.writer.flush()
        if self.owned:
            self.writer.close()


def sinks_of(to: Any) -> list[Sink]:
    """The sinks for `to`: a path, a sink, a SummaryWriter, a W&B or MLflow run, a callable, or several of them."""
    if to is None:
        return []
    if isinstance(to, str) and not to:
        raise ValueError("to must be a folder, got '': write '.' for the current one")
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
    kinds = "a folder, a callable log(dict, step), a SummaryWriter, a W&B or MLflow run, a sink, or several of them"
    raise TypeError(f"to must be {kinds}, got {type(to).__name__}")

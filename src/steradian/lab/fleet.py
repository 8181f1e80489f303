"""Many trainings at once on one device, which can be stopped at any time and resumed.

On a GPU every training has its own stream and its own captured step, and several are in flight. Trainings share
only the data, which is never written, so their results are independent of each other.
"""

import io
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from steradian.files import remove_parts, write_atomically
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.registry import METHODS, NETWORKS, SCHEDULES, plugin_of
from steradian.lab.results import Result, Store, claim, environment, has_diverged
from steradian.lab.training import Execution, Training

__all__ = ["Fleet", "Progress", "prepare_device"]

POLL = 1.0
"""Seconds between checks for trainings that other processes run."""

_BURST = 25  # steps of one training that are enqueued before the next training's turn
_AHEAD = 2  # bursts that may be queued on the device
_PAUSE = 2e-4  # seconds between queries of the device
_INTERVAL = 30  # seconds between lines about trainings that are not finished
_STOPPING = "stopping when the current epochs end; Ctrl-C again to stop now and lose work since the last checkpoint"


def prepare_device(device: torch.device, *, exact: bool) -> None:
    """Settings of a process that trains on a device; with `exact`, no tf32, and no choice of algorithms by timing."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not exact
        torch.backends.cudnn.deterministic = exact
        torch.backends.cudnn.allow_tf32 = not exact


class Progress:
    """Epoch, loss, accuracy and time left of the trainings in flight: bars on a terminal, lines in other output."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock, self._last = console or Console(quiet=True), clock, clock()
        live = self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet
        lines = Console(quiet=True) if live else self.console
        self._print = partial(lines.print, markup=False, highlight=False, soft_wrap=True)
        columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn()
        where: dict[str, Any] = {"console": self.console, "transient": True, "disable": not live}
        self._bars = Bars(*columns, get_time=clock, speed_estimate_period=math.inf, **where)
        self._all, self._tasks = self._bars.add_task(""), dict[str, TaskID]()
        self._total = self._done = self._elsewhere = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, trainings: int, finished: int, continued: int = 0) -> None:
        """Show how many there are."""
        self._total, self._done = trainings, finished
        more = f", {continued} continue{'s' * (continued == 1)} from a checkpoint" if continued else ""
        self._note(f"{finished} of {trainings} trainings were finished before{more}")

    def epoch(self, config: Config, curves: Mapping[str, Sequence[float]]) -> None:
        """Update the bar of the training, or print a line at most every half a minute."""
        text, now, epoch = _line(config, curves), self.clock(), len(curves["train_loss"])
        if config.key not in self._tasks:
            self._tasks[config.key] = self._bars.add_task(text, total=config.epochs)
        self._bars.update(self._tasks[config.key], completed=epoch, description=text)
        if now - self._last > _INTERVAL and epoch < config.epochs:
            self._print(text)
            self._last = now

    def finished(self, result: Result) -> None:
        """Remove the bar, or print the result."""
        self._done += 1
        if result.config.key in self._tasks:
            self._bars.remove_task(self._tasks.pop(result.config.key))
        line = _line(result.config, result.curves, None if result.diverged else result)
        self._note(f"{self._done} of {self._total} trainings finished", f"  {line}")

    def waiting(self, trainings: int) -> None:
        """Show how many other processes run."""
        if trainings != self._elsewhere:
            self._note(f"waiting for {trainings} that other processes run")
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Show it."""
        self._note(_STOPPING)

    def _note(self, text: str, more: str = "") -> None:
        self._bars.update(self._all, description=text, total=self._total, completed=self._done)
        self._print(text + more)


def _line(config: Config, curves: Mapping[str, Sequence[float]], result: Result | None = None) -> str:
    loss = "diverged" if has_diverged(config, curves) else f"loss {curves['train_loss'][-1]:.3f}"
    tested = [f"test {value:.2f}" for value in curves["test_accuracy"] if value == value]  # NaN: not evaluated
    figures = loss, f"validation {curves['validation_accuracy'][-1]:.2f}", *tested[-1:]
    if result:  # the figures of the tables
        best = f"validation {max(curves['validation_accuracy']):.2f} at best, in epoch {result.best_epoch + 1}"
        figures = loss, best, f"test {result.accuracy:.2f} there"
    settings = f"lr {config.lr:g} λ {config.weight_decay:g} seed {config.seed}"
    name = " ".join(filter(None, (config.model, config.norm, config.data, config.method, settings)))
    return "  ".join((name, f"{len(curves['train_loss'])}/{config.epochs}", *figures))


@dataclass
class Fleet:
    """A study on one device: trainings that are finished, running, and waiting."""

    data: Mapping[str, Resident]  #: by name, the data sets that the trainings need, on one device
    store: Store  #: where results go
    work: Path  #: folder for checkpoints and, with `keep_weights`, for final weights
    size: int = 8  #: how many trainings are in flight
    execution: Execution = field(default_factory=Execution)  #: how they are run
    every: float = 120.0  #: seconds between checkpoints of a training, at ends of epochs; 20 × `size` if that is less
    keep_weights: bool = False  #: keep the weights of finished trainings
    progress: Progress = field(default_factory=Progress)  #: shows the progress
    make: Callable[..., Training] = Training  #: makes a training; a subclass may record more than curves
    clock: Callable[[], float] = time.monotonic  #: seconds, for tests

    def run(self, configs: Sequence[Config], *, seconds: float = math.inf) -> bool:
        """Train what is not finished yet.

        Trainings in the store are not repeated, those with a checkpoint resume from it. Several processes may run one
        study: each takes trainings that the others do not run, and waits at the end. After the last epoch that ends
        before `seconds` are over it stops with checkpoints. Interrupted (Ctrl-C, SIGTERM, SIGHUP), it does the same and
        then raises KeyboardInterrupt; a second interruption ends it at once. Returns whether everything is finished.
        """
        wanted, done = list(dict.fromkeys(configs)), self.store.keys()
        waiting = [config for config in wanted if config.key not in done]
        self._check(waiting)
        if waiting:
            self.store.prepare()
        for config in wanted:
            if config.key in done:  # left behind by a process that was killed
                self._path("checkpoints", config).unlink(missing_ok=True)
        self._deadline = self.clock() + seconds
        self._flying: list[_Flight] = []
        self._claims: dict[str, IO[bytes]] = {}  # locked while this process runs a training
        self._accounted, self._interrupted = self.clock(), False
        with self.progress, _first_interruption(self._interrupt):
            started = sum(self._path("checkpoints", config).exists() for config in waiting)
            self.progress.begin(len(wanted), len(wanted) - len(waiting), started)
            try:
                finished = self._work(waiting)
            finally:
                for file in self._claims.values():
                    file.close()
        if self._interrupted:  # also in the last epoch: the caller must not go on to the next study
            raise KeyboardInterrupt
        return finished

    def _work(self, waiting: list[Config]) -> bool:
        """Run trainings until all are finished or the time is over; returns whether they are finished."""
        while waiting or self._flying:
            while len(self._flying) < self.size and not self._late(0.0) and (flight := self._next(waiting)):
                self._flying.append(flight)
            if not all(flight.held for flight in self._flying):
                moved = [self._advance(flight) for flight in list(self._flying)]
                if not any(moved):
                    time.sleep(_PAUSE)
            elif self._flying or (waiting and self._late(0.0)):
                for flight in self._flying:
                    self._checkpoint(flight)
                return False
            elif waiting:
                self.progress.waiting(len(waiting))
                time.sleep(POLL)
        return True

    def _interrupt(self) -> None:
        self._interrupted, self._deadline = True, -math.inf
        self.progress.stopping()

    def _next(self, waiting: list[Config]) -> "_Flight | None":
        """Start the first training that no other process runs; None if others run all that are left."""
        for config in list(waiting):
            if file := claim(self.work / "claims" / f"{config.key}.lock"):
                waiting.remove(config)
                done = self.store.keys()
                self._claims[config.key] = file
                if config.key not in done:
                    return self._start(config)
                file.close()  # another process has finished it meanwhile
        return None

    def _advance(self, flight: "_Flight") -> bool:
        """Give a training more work, or read the figures of its epoch; returns whether there was anything to do."""
        training = flight.training
        if flight.held or training.queue.pending() >= (1 if flight.evaluating else _AHEAD):
            return False
        if not flight.evaluating:
            if not training.take(_BURST):
                training.end_epoch()
                flight.evaluating = True
            return True
        if not training.collect():
            return True
        flight.evaluating = False
        now = self.clock()
        for each in self._flying:
            each.seconds += (now - self._accounted) / len(self._flying)
        self._accounted = now
        self.progress.epoch(training.config, training.curves)
        # The first epoch, which includes compiling, does not count.
        flight.pace = 0.0 if flight.pace is None else min(flight.pace or math.inf, now - flight.began)
        if training.finished:
            self._finish(flight)
        elif self._late(flight.pace):
            flight.held = True
        elif now - flight.saved > min(self.every, 20.0 * self.size):
            self._checkpoint(flight)
        flight.began = now
        return True

    def _late(self, epoch: float) -> bool:
        """Whether another epoch of this many seconds might end after the deadline."""
        return self.clock() + 1.2 * epoch >= self._deadline

    def _start(self, config: Config) -> "_Flight":
        training = self.make(config, self.data[config.data], execution=self.execution)
        flight = _Flight(training, began=self.clock(), saved=self.clock())
        path = self._path("checkpoints", config)
        remove_parts(path)  # of a process that was killed while it wrote
        remove_parts(self._path("weights", config))
        if path.exists():
            state, data = read_state(path), training.data
            if state.get("data", data.fingerprint) != data.fingerprint:
                raise ValueError(f"{path} was started with other images of {data.name} than these; remove it")
            training.load(state["training"])
            flight.seconds = state["seconds"]
            self.progress.epoch(config, training.curves)
        return flight

    def _finish(self, flight: "_Flight") -> None:
        training = flight.training
        config, curves = training.config, training.curves
        where = {**environment(training.data.device), "data": training.data.fingerprint}
        if self.keep_weights and not training.diverged:
            _write(self._path("weights", config), training.weights())
        result = Result(config, curves, training.diverged, training.collapsed(), flight.seconds, where)
        self.store.add([result])
        # Only now: if the process is killed in between, the next one finds the result.
        self._path("checkpoints", config).unlink(missing_ok=True)
        self.progress.finished(result)
        self._claims[config.key].close()
        self._flying.remove(flight)

    def _checkpoint(self, flight: "_Flight") -> None:
        training = flight.training
        if training.epoch:
            state = {"training": training.state(), "seconds": flight.seconds, "data": training.data.fingerprint}
            _write(self._path("checkpoints", training.config), state)
        flight.saved = self.clock()

    def _check(self, configs: Sequence[Config]) -> None:
        for config in configs:
            for what, known in (("model", NETWORKS), ("method", METHODS), ("schedule", SCHEDULES)):
                if (name := getattr(config, what)) not in known:
                    raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}")
            if config.plugin != (expected := plugin_of(config)):
                raise ValueError(f"plugin must be {expected!r}, the hash of its source, got {config.plugin!r}")
            if config.batch_size > (count := self.data[config.data].counts["train"]):
                most = f"the {count} training images of {config.data}"
                raise ValueError(f"batch_size must be at most {most}, got {config.batch_size}")

    def _path(self, kind: str, config: Config) -> Path:
        return self.work / kind / f"{config.key}.pt"


@dataclass
class _Flight:
    training: Training
    began: float  # its epoch
    saved: float  # its last checkpoint
    seconds: float = 0.0  # its share of the device's time
    evaluating: bool = False  # the end of the epoch is in the queue
    held: bool = False  # it waits at the end of an epoch, since the time is over
    pace: float | None = None  # seconds of its shortest epoch; 0 after the first


@contextmanager
def _first_interruption(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C, SIGTERM or SIGHUP that is not ignored; the next has its usual effect."""
    main = threading.current_thread() is threading.main_thread()  # no other thread may handle signals
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    with ExitStack() as before:

        def first(*_: object) -> None:
            before.close()
            stop()

        for number in numbers:
            if (handler := signal.getsignal(number)) != signal.SIG_IGN:
                before.callback(signal.signal, number, handler)
                signal.signal(number, first)
        yield


def read_state(path: Path) -> Any:
    """Load a file of tensors and plain containers, without running code from it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own message may suggest to allow the code in the file
        raise ValueError(f"{path} cannot be read, it may be damaged; remove it to train from the start") from error


def _write(path: Path, content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())

"""The progress of a fleet: a bar for each training on a terminal, or a line now and then in a log."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from steradian.lab.config import Config
from steradian.lab.results import has_diverged

__all__ = ["Progress"]

_INTERVAL = 30  # seconds between lines about trainings that are not finished
_STOPPING = "stopping when the current epochs end; Ctrl-C again to stop now and lose work since the last checkpoint"


class Progress:
    """Epoch, loss, accuracy and time left of the trainings in flight.

    Args:
        console: where to; a terminal gets bars, anything else a line for each finished training, and one about the
            others every half a minute; None: nowhere.
        clock: seconds, for tests.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock, self._last = console or Console(quiet=True), clock, clock()
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet
        columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn()
        where: dict[str, Any] = {"console": self.console, "transient": True, "disable": not self.live}
        self._bars = Bars(*columns, get_time=clock, speed_estimate_period=math.inf, **where)
        self._all, self._tasks = self._bars.add_task(""), dict[str, TaskID]()
        self._total = self._done = self._elsewhere = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, trainings: int, finished: int) -> None:
        """Show how many there are."""
        self._total, self._done = trainings, finished
        self._note(f"{finished} of {trainings} trainings were finished before")

    def epoch(self, config: Config, curves: Mapping[str, Sequence[float]]) -> None:
        """Update the bar of the training, or print a line at most every half a minute."""
        text, now, epoch = _line(config, curves), self.clock(), len(curves["train_loss"])
        if config.key not in self._tasks:
            self._tasks[config.key] = self._bars.add_task(text, total=config.epochs)
        self._bars.update(self._tasks[config.key], completed=epoch, description=text)
        if now - self._last > _INTERVAL and epoch < config.epochs:
            self._print(text)
            self._last = now

    def finished(self, config: Config, curves: Mapping[str, Sequence[float]]) -> None:
        """Remove the bar, or print the result."""
        self._done += 1
        if config.key in self._tasks:
            self._bars.remove_task(self._tasks.pop(config.key))
        self._note(f"{self._done} of {self._total} trainings finished", f"  {_line(config, curves)}")

    def waiting(self, trainings: int) -> None:
        """Show how many other processes run."""
        if trainings != self._elsewhere:
            self._note(f"waiting for {trainings} that other processes run")
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Show it."""
        self._note(_STOPPING)

    def _note(self, text: str, more: str = "") -> None:
        """Show it above the trainings."""
        self._bars.update(self._all, description=text, total=self._total, completed=self._done)
        self._print(text + more)

    def _print(self, text: str) -> None:
        if not self.live:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _line(config: Config, curves: Mapping[str, Sequence[float]]) -> str:
    loss = "diverged" if has_diverged(config, curves) else f"loss {curves['train_loss'][-1]:.3f}"
    tested = [f"test {value:.2f}" for value in curves["test_accuracy"] if value == value]  # NaN: not evaluated
    name = f"{config.model} {config.norm} {config.data} {config.method} seed {config.seed}"
    figures = loss, f"validation {curves['validation_accuracy'][-1]:.2f}", *tested[-1:]
    return "  ".join((name, f"{len(curves['train_loss'])}/{config.epochs}", *figures))

"""The progress of a fleet on a terminal: a live table, or a line now and then."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from steradian.lab.config import Config
from steradian.lab.fleet import Progress
from steradian.lab.results import has_diverged
from steradian.lab.tables import duration

__all__ = ["Lines", "LiveTable", "progress_on"]

_ROWS = 40  # of the live table
_INTERVAL = 30  # seconds between lines about trainings that are not finished
_STOPPING = "stopping when the current epochs end; Ctrl-C again to stop now and lose work since the last checkpoint"

Curves = Mapping[str, Sequence[float]]


class LiveTable(Progress):
    """A live table: epoch, loss, accuracy and time left of each training in flight."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console()
        self.clock = clock
        self._rows: dict[str, tuple[str, ...]] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._total = self._done = self._elsewhere = 0
        self._stopping = False
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, trainings: int, finished: int) -> None:
        """Remember how many there are."""
        self._total, self._done = trainings, finished

    def epoch(self, config: Config, curves: Curves) -> None:
        """Update the row of the training."""
        now, epoch = self.clock(), len(curves["train_loss"])
        first, from_epoch = self._first.setdefault(config.key, (now, epoch))
        passed = epoch - from_epoch
        left = (now - first) / passed * (config.epochs - epoch) if passed else None
        self._rows[config.key] = (*_row(config, curves), "" if left is None else duration(left))

    def finished(self, config: Config, curves: Curves) -> None:
        """Remove the row."""
        self._done += 1
        self._rows.pop(config.key, None)

    def waiting(self, trainings: int) -> None:
        """Mention it above the table."""
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Mention it above the table."""
        self._stopping = True

    def _render(self) -> RenderableType:
        table = Table("training", "epoch", "loss", "validation", "test", "left", box=None)
        for row in list(self._rows.values())[:_ROWS]:
            table.add_row(*row)
        others = f", {self._elsewhere} with other processes" if self._elsewhere else ""
        heads = [f"{self._done} of {self._total} trainings finished{others}", *([_STOPPING] if self._stopping else [])]
        return Group(*map(Text, heads), table)


class Lines(Progress):
    """A line for each finished training, and one about the others every half a minute: for logs."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console()
        self.clock = clock
        self._last: float = clock()
        self._total = self._done = self._elsewhere = 0

    def begin(self, trainings: int, finished: int) -> None:
        """Print how many there are."""
        self._total, self._done = trainings, finished
        self._print(f"{finished} of {trainings} trainings were finished before")

    def epoch(self, config: Config, curves: Curves) -> None:
        """Print where a training is, at most every half a minute."""
        # The end of a training is printed by `finished`.
        if self.clock() - self._last > _INTERVAL and len(curves["train_loss"]) < config.epochs:
            self._print("  ".join(_row(config, curves)))
            self._last = self.clock()

    def finished(self, config: Config, curves: Curves) -> None:
        """Print its result."""
        self._done += 1
        self._print(f"{self._done} of {self._total}  " + "  ".join(_row(config, curves)))

    def waiting(self, trainings: int) -> None:
        """Print how many, whenever it changes."""
        if trainings != self._elsewhere:
            self._print(f"waiting for {trainings} that other processes run")
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Print it."""
        self._print(_STOPPING)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_on(console: Console) -> Progress:
    """A live table on a terminal, lines elsewhere and where the terminal cannot move its cursor."""
    return LiveTable(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console)


def _row(config: Config, curves: Curves) -> tuple[str, ...]:
    return (
        f"{config.model} {config.norm} {config.data} {config.method} seed {config.seed}",
        f"{len(curves['train_loss'])}/{config.epochs}",
        "diverged" if has_diverged(config, curves) else f"{curves['train_loss'][-1]:.3f}",
        f"{curves['validation_accuracy'][-1]:.2f}",
        f"{curves['test_accuracy'][-1]:.2f}",
    )

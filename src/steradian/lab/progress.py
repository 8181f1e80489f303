"""The progress of a fleet: a live table on a terminal, or a line now and then in a log."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from steradian.lab.config import Config
from steradian.lab.results import has_diverged
from steradian.lab.tables import duration

__all__ = ["Progress"]

_ROWS = 40  # of the live table
_INTERVAL = 30  # seconds between lines about trainings that are not finished
_STOPPING = "stopping when the current epochs end; Ctrl-C again to stop now and lose work since the last checkpoint"


class Progress:
    """Epoch, loss, accuracy and time left of the trainings in flight.

    Args:
        console: where to; a terminal gets a live table, anything else a line for each finished training, and one about
            the others every half a minute; None: nowhere.
        clock: seconds, for tests.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console or Console(quiet=True), clock
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet
        self._rows: dict[str, tuple[str, ...]] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._total = self._done = self._elsewhere = 0
        self._note, self._last = "", clock()
        self._table = Live(console=self.console, get_renderable=self.render, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self.live:
            self._table.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._table.stop()

    def begin(self, trainings: int, finished: int) -> None:
        """Show how many there are."""
        self._total, self._done = trainings, finished
        self._print(f"{finished} of {trainings} trainings were finished before")

    def epoch(self, config: Config, curves: Mapping[str, Sequence[float]]) -> None:
        """Update the row of the training, or print it at most every half a minute."""
        now, epoch = self.clock(), len(curves["train_loss"])
        first, from_epoch = self._first.setdefault(config.key, (now, epoch))
        passed = epoch - from_epoch
        left = duration((now - first) / passed * (config.epochs - epoch)) if passed else ""
        self._rows[config.key] = (*_row(config, curves), left)
        if now - self._last > _INTERVAL and epoch < config.epochs:
            self._print("  ".join(self._rows[config.key]))
            self._last = now

    def finished(self, config: Config, curves: Mapping[str, Sequence[float]]) -> None:
        """Remove the row, or print the result."""
        self._done += 1
        self._rows.pop(config.key, None)
        self._print(f"{self._done} of {self._total}  " + "  ".join(_row(config, curves)))

    def waiting(self, trainings: int) -> None:
        """Show how many other processes run."""
        if trainings != self._elsewhere:
            self._print(f"waiting for {trainings} that other processes run")
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Show it."""
        self._note = _STOPPING
        self._print(_STOPPING)

    def render(self) -> Group:
        """The live table."""
        table = Table("training", "epoch", "loss", "validation", "test", "left", box=None)
        for row in list(self._rows.values())[:_ROWS]:
            table.add_row(*row)
        others = f", {self._elsewhere} with other processes" if self._elsewhere else ""
        return Group(Text(f"{self._done} of {self._total} trainings finished{others}"), Text(self._note), table)

    def _print(self, text: str) -> None:
        if not self.live:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _row(config: Config, curves: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    tested = [value for value in curves["test_accuracy"] if value == value]  # NaN: not evaluated in this epoch
    return (
        f"{config.model} {config.norm} {config.data} {config.method} seed {config.seed}",
        f"{len(curves['train_loss'])}/{config.epochs}",
        "diverged" if has_diverged(config, curves) else f"{curves['train_loss'][-1]:.3f}",
        f"{curves['validation_accuracy'][-1]:.2f}",
        f"{tested[-1]:.2f}" if tested else "",
    )

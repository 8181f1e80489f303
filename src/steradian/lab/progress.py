"""What a fleet tells while it works: nothing, a live table, or a line now and then."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from steradian.lab.members import Member

__all__ = ["Lines", "Shown", "Silent", "Watcher", "watcher_for"]

_ROWS = 40  # of the live table
_STOPPING = (
    "stopping when the epochs under way end; once more (Ctrl-C) to stop now and lose what is not in a checkpoint"
)


class Watcher:
    """Told what a fleet does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, trainings: int, finished: int) -> None:
        """A study begins; so many of its trainings are finished already."""

    def epoch(self, training: "Member") -> None:
        """A training has finished an epoch."""

    def finished(self, training: "Member") -> None:
        """A training is finished."""

    def waiting(self, trainings: int) -> None:
        """Only trainings that other processes have are left, so many; told again and again."""

    def stopping(self) -> None:
        """It was asked to stop, and will when the epochs under way end."""


class Silent(Watcher):
    """Says nothing."""


class Shown(Watcher):
    """A live table: epoch, loss, accuracy and time left of each training in flight."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console()
        self.clock = clock
        self._rows: dict[str, tuple[str, ...]] = {}
        self._seen: dict[str, tuple[float, int]] = {}
        self._total = self._done = self._elsewhere = 0
        self._stopping = False
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, trainings: int, finished: int) -> None:
        """Remember how many there are."""
        self._total, self._done = trainings, finished

    def epoch(self, training: "Member") -> None:
        """A new line for the training."""
        config, now = training.config, self.clock()
        first, from_epoch = self._seen.setdefault(config.key, (now, training.epoch))
        gone = training.epoch - from_epoch
        left = (now - first) / gone * (config.epochs - training.epoch) if gone else None
        self._rows[config.key] = _row(training, "" if left is None else _duration(left))

    def finished(self, training: "Member") -> None:
        """Take the line away."""
        self._done += 1
        self._rows.pop(training.config.key, None)

    def waiting(self, trainings: int) -> None:
        """Say it above the table."""
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Say it above the table, too."""
        self._stopping = True

    def _render(self) -> RenderableType:
        table = Table("training", "epoch", "loss", "validation", "test", "left", box=None)
        for row in list(self._rows.values())[:_ROWS]:
            table.add_row(*row)
        others = f", {self._elsewhere} with other processes" if self._elsewhere else ""
        said = [f"{self._done} of {self._total} trainings finished{others}", *([_STOPPING] if self._stopping else [])]
        return Group(*map(Text, said), table)


class Lines(Watcher):
    """A line for each finished training, and one for the others every half a minute: for logs."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console()
        self.clock = clock
        self._said: float = clock()
        self._total = self._done = self._elsewhere = 0

    def begin(self, trainings: int, finished: int) -> None:
        """Say how many there are."""
        self._total, self._done = trainings, finished
        self._say(f"{finished} of {trainings} trainings were finished before")

    def epoch(self, training: "Member") -> None:
        """Say where a training is, rarely."""
        if self.clock() - self._said > 30 and training.epoch < training.config.epochs:  # its end is said anyway
            self._say("  ".join(_row(training, "")))
            self._said = self.clock()

    def finished(self, training: "Member") -> None:
        """Say what came of it."""
        self._done += 1
        self._say(f"{self._done} of {self._total}  " + "  ".join(_row(training, "")))

    def waiting(self, trainings: int) -> None:
        """Say how many, whenever it changes."""
        if trainings != self._elsewhere:
            self._say(f"waiting for {trainings} that other processes have")
        self._elsewhere = trainings

    def stopping(self) -> None:
        """Say it."""
        self._say(_STOPPING)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def watcher_for(console: Console) -> Watcher:
    """A live table on a terminal, lines elsewhere: also where the terminal cannot go back to a line."""
    return Shown(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console)


def _row(training: "Member", left: str) -> tuple[str, ...]:
    config, curves = training.config, training.curves
    return (
        f"{config.model} {config.norm} {config.data} {config.method} seed {config.seed}",
        f"{training.epoch}/{config.epochs}",
        "diverged" if training.diverged else f"{curves['train_loss'][-1]:.3f}",
        f"{curves['validation_accuracy'][-1]:.2f}",
        f"{curves['test_accuracy'][-1]:.2f}",
        left,
    )


def _duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes.

    >>> _duration(75), _duration(4000)
    ('1:15 min', '1:06 h')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"

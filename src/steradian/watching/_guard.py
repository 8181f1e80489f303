"""Nothing that goes wrong in a watch stops the training."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Guard"]

logger = logging.getLogger("steradian")


class Guard:
    """Around what a watch does: an exception is logged, the first one in full, and training goes on.

    Attributes:
        run: the name to log it under.
        error: the first exception.
        ended: what failed was the watch itself, not one of its sinks; its hooks do nothing then.
        handles: the hooks.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.error: Exception | None = None
        self.ended = False
        self.handles: list[Any] = []

    @contextmanager
    def __call__(self, *, fatal: bool = True) -> Iterator[None]:
        """Within it exceptions end here.

        Args:
            fatal: the watch ends with it.
        """
        try:
            yield
        except Exception as error:
            self.take(error, fatal=fatal)

    def take(self, error: Exception, *, fatal: bool = True) -> None:
        """The same for an exception at hand: what runs in every step has no time for a context manager."""
        first, self.error = self.error is None, self.error or error
        if first:
            text = ": the watch ends, training goes on" if fatal else ""
            logger.error("watching %s failed%s", self.run, text, exc_info=error)
        # The hooks stay until the watch is stopped: the optimizer may be going through them, and one that is taken
        # away meanwhile is an error of its step, unless it was the last.
        self.ended = self.ended or fatal

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

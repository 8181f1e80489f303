"""Signals: exit cleanly on them, or finish the current work on the first one and stop at once on the second."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Never

__all__ = ["deferred", "exiting_on_signals"]


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that a live table restores the cursor and a cluster is stopped."""
    with _handlers(_exit, (signal.SIGTERM, signal.SIGHUP), lambda handler: handler is not signal.SIG_IGN):
        yield


@contextmanager
def deferred(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop`, which is to end the work in good order, on the first interruption in this context.

    Interruptions are Ctrl-C, SIGTERM (sent by a cluster's scheduler before it kills) and SIGHUP (the terminal is
    closed). The next one has its usual effect. Nothing changes outside of the main thread, and for signals that the
    program handles itself or ignores, as under nohup.

    >>> with deferred(lambda: print("stopping")):
    ...     signal.raise_signal(signal.SIGINT)
    stopping
    """

    def first(_: int, __: object) -> None:
        restore()
        stop()

    usual = (signal.default_int_handler, signal.SIG_DFL, _exit)
    with _handlers(first, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda handler: handler in usual) as restore:
        yield


def _exit(number: int, _: object) -> Never:
    """Exit with the code of a signal, and close open resources on the way."""
    raise SystemExit(128 + number)


@contextmanager
def _handlers(
    handler: Callable[[int, Any], None], numbers: tuple[signal.Signals, ...], replaces: Callable[[Any], bool]
) -> Iterator[Callable[[], None]]:
    """Install a handler in place of those that it `replaces`, in the main thread; yields what restores them."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main and replaces(signal.getsignal(number))}

    def restore() -> None:
        for number, previous in before.items():
            signal.signal(number, previous)

    for number in before:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()

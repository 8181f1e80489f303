"""An interruption that waits for a good moment; the second one does not."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

__all__ = ["deferred", "exit_on_signal"]


def exit_on_signal(number: int, _: object) -> Never:
    """A handler that exits with the code that a signal has, so that open resources are closed on the way."""
    raise SystemExit(128 + number)


@contextmanager
def deferred(stop: Callable[[], None]) -> Iterator[None]:
    """Inside it the first interruption calls `stop`, which is to end the work in good order.

    Interruptions are Ctrl-C, SIGTERM (sent by a cluster's scheduler before it kills) and SIGHUP (the terminal is
    closed). The next one has its usual effect. Nothing is changed outside of the main thread, and for signals that the
    program handles itself or ignores, as under nohup.

    >>> with deferred(lambda: print("stopping")):
    ...     signal.raise_signal(signal.SIGINT)
    stopping
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    now = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    usual = (signal.default_int_handler, signal.SIG_DFL, exit_on_signal)
    ours = {number: handler for number, handler in now.items() if handler in usual}

    def restore() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)

    def first(_: int, __: object) -> None:
        restore()
        stop()

    for number in ours:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()

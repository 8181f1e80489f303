"""An interruption that waits for a good moment; the second one does not."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

__all__ = ["end", "patient"]


def end(number: int, _: object) -> Never:
    """A handler that closes what is open on the way out, with the exit code that a signal has."""
    raise SystemExit(128 + number)


@contextmanager
def patient(asked: Callable[[], None]) -> Iterator[None]:
    """Within it the first interruption calls a function, which is to bring about an end in good order.

    Interruptions are Ctrl-C, SIGTERM, which a cluster's scheduler sends before it kills, and SIGHUP, when a terminal is
    closed. The next one does what it ever does. Outside of the main thread, and where the program has a handler of its
    own or ignores the signal, as under nohup, nothing is changed.

    >>> with patient(lambda: print("asked to stop")):
    ...     signal.raise_signal(signal.SIGINT)
    asked to stop
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    now = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    usual = (signal.default_int_handler, signal.SIG_DFL, end)
    ours = {number: handler for number, handler in now.items() if handler in usual}

    def as_usual() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)

    def first(_: int, __: object) -> None:
        as_usual()
        asked()

    for number in ours:
        signal.signal(number, first)
    try:
        yield
    finally:
        as_usual()

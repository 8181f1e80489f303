"""An interruption that waits for a good moment; the second one does not."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["patient"]


@contextmanager
def patient(asked: Callable[[], None]) -> Iterator[None]:
    """Within it the first interruption (Ctrl-C) calls a function, which is to bring about an end in good order.

    The next one raises KeyboardInterrupt as ever. Outside of the main thread, or where the program has a handler of
    its own, nothing is changed.

    >>> with patient(lambda: print("asked to stop")):
    ...     signal.raise_signal(signal.SIGINT)
    asked to stop
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def first(_: int, __: object) -> None:
        signal.signal(signal.SIGINT, usual)
        asked()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)

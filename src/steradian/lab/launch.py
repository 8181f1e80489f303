"""How a piece of device work is repeated: by calling it, or by replaying a CUDA graph of it."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

__all__ = ["Captured", "Launcher", "Plain", "Queue"]


class Launcher(Protocol):
    """Something that does the same work again and again."""

    def __call__(self, times: int) -> None:
        """Do the work so many times, one after the other."""


class Plain:
    """The work, called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def __call__(self, times: int) -> None:
        """Call it."""
        for _ in range(times):
            self.work()


class Captured:
    """The work, captured once and replayed.

    Capturing does not run the work. It must have run before, so that everything lazy has happened, and may only depend
    on memory that stays where it is: counters and rates live on the device.

    Args:
        work: enqueues the work on the current stream.
        stream: the stream to capture on, and to replay on.
    """

    def __init__(self, work: Callable[[], None], stream: torch.cuda.Stream) -> None:
        self.stream, self.graph = stream, torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # memory that is freed during a capture must not belong to others
        try:
            with torch.cuda.stream(stream):
                # Other trainings go on meanwhile: only this thread's calls follow the rules of a capture.
                self.graph.capture_begin(capture_error_mode="thread_local")
                work()
                self.graph.capture_end()
        finally:
            if collecting:
                gc.enable()

    def __call__(self, times: int) -> None:
        """Replay it."""
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                self.graph.replay()


class Queue:
    """The order in which a training's work happens: a stream of its own on a GPU, the program's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._marks: deque[torch.cuda.Event] = deque()
        if self.stream:
            self.stream.wait_stream(torch.cuda.default_stream(device))

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside it, work is put into this queue."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> None:
        """Remember what has been put in so far."""
        if self.stream is not None:
            self._marks.append(self.stream.record_event())

    def pending(self) -> int:
        """Number of marks that the device has not reached."""
        while self._marks and self._marks[0].query():
            self._marks.popleft()
        return len(self._marks)

    def wait(self) -> None:
        """Wait until the device has reached every mark."""
        if self._marks:
            self._marks[-1].synchronize()
            self._marks.clear()

"""Which steps are observed, so that the watch stays cheap, and what it cost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Cost"]

_FIRST = 20  # steps that are all observed, from the first one on
_INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_EARLY = 1000  # steps before which the interval may be 10; later it is at least 50: 300 of the first 10,000 steps
_WARM_UP = 3  # observed steps whose cost is not counted: kernels are compiled and memory is allocated
_SAMPLED = 8  # with a given interval, one of so many observations is measured on the device: it costs host time
_CHEAP = 0.5  # times `share`: seconds that an observation may take on a CPU at every tenth of the first steps, 10 ms
_MARGIN = 2.0  # threads of one process disturb each other, which is not measured: about as much again


class Cost:
    """Measures the watch, and decides which steps it observes: multiples of `every`, or as often as `share` allows.

    On a GPU, `device`, the time that it takes there is measured too.
    """

    def __init__(self, every: int | None, share: float, device: torch.device | None) -> None:
        self.every, self.share, self.device = every, share, device
        self.interval = every or _INTERVALS[0]  # steps that are multiples of it are observed
        self.observed = 0  # steps so far
        self._first: int | None = None
        self._began: float | None = None  # when the measured time began
        self._last = 0.0  # when the last step was taken
        self._steps = self._counted = 0  # steps and observed steps in that time
        self._host = self._on_device = self._writing = 0.0
        self._events: list[tuple[Any, Any, int]] = []  # begin, end, and how often it counts
        self._first_event: tuple[Any, int] | None = None  # on the device, and the number of steps before it
        self._device_step = 0.0  # seconds per step there

    def wants(self, step: int) -> bool:
        """Whether this step is observed."""
        if self.every is not None:
            return step % self.every == 0
        if self._first is None:
            self._first = step
        shortest = 10 if step < _EARLY else 50
        return step - self._first < _FIRST or step % max(self.interval, shortest) == 0

    @property
    def first_choice(self) -> bool:
        """Whether all first steps were observed and the interval is not chosen yet."""
        return self.every is None and self.observed == _FIRST

    def count(self, *, observed: bool) -> None:
        """Count a step that was just taken."""
        self._last = time.perf_counter()
        self._steps += 1
        if observed:
            self.observed += 1
            self._counted += 1
            if self.observed == _WARM_UP:
                self._began, self._steps, self._counted, self._host = self._last, 0, 0, 0.0
                self._events, self._first_event = [], None

    @contextmanager
    def measured(self, *, device: bool = True, sampled: bool = False) -> Iterator[None]:
        """Measure what is done here on the host and on the `device`, there `sampled` if the interval is given."""
        began = time.perf_counter()
        events = None
        weight = _SAMPLED if sampled and self.every is not None else 1
        device = device and self.device is not None and self.observed % weight == 0
        if device and not torch.cuda.is_current_stream_capturing():
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record(torch.cuda.current_stream(self.device))
            self._first_event = self._first_event or (events[0], self._steps)
        try:
            yield
        finally:
            if events is not None:
                events[1].record(torch.cuda.current_stream(self.device))
                self._events.append((*events, weight))
            self._host += time.perf_counter() - began

    def choose(self, writing: float = 0.0) -> None:
        """Choose the interval from what was measured so far; `writing` are seconds of the thread that writes files."""
        self._writing = writing
        done = [pair for pair in self._events if pair[1].query()]
        self._events = self._events[len(done) :]
        self._on_device += sum(weight * start.elapsed_time(end) for start, end, weight in done) / 1000
        if done and self._first_event is not None:
            # The host may be many steps ahead of the device. The last event belongs to a step that is not counted yet.
            (first, before), last = self._first_event, done[-1][0]
            self._device_step = first.elapsed_time(last) / 1000 / max(1, self._steps - before)
        if self.every is None and self._counted > 1:
            training = max(self._training / max(1, self._steps), self._device_step)
            needed = _MARGIN * self.seconds_per_observation / (self.share * training)
            if self.device is None and self._steps < _EARLY and self.seconds_per_observation < _CHEAP * self.share:
                needed = 0.0  # a short training has a verdict, too
            self.interval = next((each for each in _INTERVALS if each >= needed), _INTERVALS[-1])

    @property
    def _training(self) -> float:
        """Seconds that the training took, without the watch."""
        return max(self._last - (self._began or self._last) - self._host, 1e-9)

    @property
    def seconds_per_observation(self) -> float:
        """The larger of the host's and the device's time, per observed step; NaN before it was measured."""
        spent = max(self._host + self._writing, self._on_device)
        return spent / self._counted if self._counted else float("nan")

    @property
    def share_of_time(self) -> float:
        """The cost so far as a share of the training's time; NaN before it was measured."""
        training = max(self._training, self._device_step * self._steps)
        return self.seconds_per_observation * self._counted / training if self._counted else float("nan")

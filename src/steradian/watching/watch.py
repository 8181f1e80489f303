"""Follows any torch optimizer through its hooks and records what its steps do on the spheres."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.groups import Groups, is_sharded
from steradian.optim._base import RowOptimizer
from steradian.watching._about import about
from steradian.watching._asked import check_asked, check_names, hooked, one_number
from steradian.watching._block import Alert
from steradian.watching._delivery import Delivery
from steradian.watching._followed import Followed, follow
from steradian.watching._guard import Guard
from steradian.watching._handover import Handover
from steradian.watching._membership import Membership
from steradian.watching._paths import Paths
from steradian.watching._settings import counted, decays, first_step
from steradian.watching._station import Station
from steradian.watching._summary import summary
from steradian.watching.alerts import Alerts
from steradian.watching.sinks import Folder, sinks_of

if TYPE_CHECKING:
    import pandas as pd

    from steradian.watching._merge import Merge

__all__ = ["Watch", "watch"]

logger = logging.getLogger("steradian")

_SECONDS = 30.0
_AGAIN = methodcaller("again")


def watch(
    optimizer: Optimizer, groups: Groups | None = None, *, every: int = 1, to: Any = None, **options: Any
) -> "Watch":
    """Follow an optimizer: a context manager that records what its steps do on the spheres.

    See `Watch` for the options.

    >>> weight = torch.nn.Parameter(torch.eye(3))
    >>> optimizer = torch.optim.SGD([{"params": [("w", weight)], "rows": "filter"}], lr=0.1)
    >>> with watch(optimizer) as seen:
    ...     weight.grad = torch.eye(3).roll(1, 0)
    ...     optimizer.step()
    >>> round(seen.latest()["w"]["angle"]["median"], 4)
    0.0997
    """
    return Watch(optimizer, groups, every=every, to=to, **options)


class Watch:
    """Records, per row and step, what an optimizer does on the spheres; see `records.QUANTITIES`.

    Our optimizers tell it themselves; of torch's SGD, Adam, AdamW, Adagrad and RMSprop the weights and the state are
    read around the step; of any other optimizer radius, angle and velocity are seen. Numbers are reduced to
    statistics over the rows of each group where they are, and sent to the host some steps at a time, without waiting.

    What is and is not a step: gradients that are only accumulated are none; a step that a gradient scaler skips is
    none; a step inside a replayed CUDA graph calls no hooks, so wrap the replay in `around()`. Under DDP rank 0
    records. Under FSDP2 every rank observes its rows and rank 0 records all: every rank must start and stop.

    Nothing that goes wrong here stops the training: it is logged and the watch ends.

    Args:
        optimizer: any torch optimizer, also as accelerate prepared it.
        groups: what `find_groups` found. None: the param groups' own "rows".
        every: observe every so many steps.
        to: where records go besides `records()`: a folder, a callable log(dict, step), a SummaryWriter, a W&B run, a
            sink of `steradian.watching.sinks`, or several of them. An existing run's folder is continued.
        run: the run's name; None: the folder's.
        rows: names of groups all of whose rows are kept at every observed step.
        rows_every: all rows of all groups are kept at every so many observations, for histograms; 0: never.
        paths: {group: [row, …]} whose directions are kept. None: the first row of three groups.
        phenomena: measure (b1), (b2) and (c), which takes every step and five tensors of the size of the weights.
            None: where the optimizer does not tell its steps itself and `every` is 1.
        config: anything that JSON can hold, kept with the run.
        step: the number of the first step. None: what the optimizer's state counted so far.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        optimizer: Optimizer,
        groups: Groups | None = None,
        *,
        every: int = 1,
        to: Any = None,
        run: str | None = None,
        rows: Sequence[str] = (),
        rows_every: int = 100,
        paths: Mapping[str, Sequence[int]] | None = None,
        phenomena: bool | None = None,
        config: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        asked: dict[str, Any] = {"every": every, "rows": rows, "rows_every": rows_every, "paths": paths}
        check_asked(optimizer, groups, **asked, config=config, step=step, run=run)
        self.optimizer = optimizer = hooked(optimizer)
        self.every = every = int(every)
        self.config = dict(config or {})
        self.followed = follow(optimizer, groups)
        self.names = self._order = tuple(entry.name for entry in self.followed)
        check_names("rows", rows, self.names)
        check_names("paths", paths or (), self.names)
        self.sharded = any(is_sharded(param) for entry in self.followed for param in entry.params)
        self.silent = _rank() != 0 and not self.sharded
        self.sinks = sinks_of(to) if _rank() == 0 else []
        folder = next((sink.store.folder for sink in self.sinks if isinstance(sink, Folder)), None)
        self.run = run or (folder.resolve().name if folder is not None else type(optimizer).__name__)
        self._guarded = Guard(self.run)
        self._delivery = Delivery(self.sinks, Alerts(decays(optimizer, self.followed)), self._guarded)
        if phenomena is None:
            phenomena = every == 1 and not isinstance(optimizer, RowOptimizer)
        devices = dict.fromkeys(entry.device for entry in self.followed)
        self.stations = [
            Station(optimizer, [e for e in self.followed if e.device == device], phenomena=phenomena, each=every == 1)
            for device in devices
        ]
        self.followed = [entry for station in self.stations for entry in station.followed]
        self.names = tuple(entry.name for entry in self.followed)
        merge = _merge(self.followed) if self.sharded else None
        kept = Paths(self.followed, paths if paths is not None or folder is not None else {}, rank=_rank())
        given: dict[str, Any] = {"rows": frozenset(rows), "rows_every": int(rows_every), "merge": merge, "paths": kept}
        self._handover = Handover(self.run, self.stations, **given)
        self._asked_step = step if step is None else int(step)
        self._all_names = {id(p): name for name, p in (groups.params if groups is not None else {}).items()}
        self._all_names |= {id(p): name for e in self.followed for name, p in zip(e.names, e.params, strict=True)}
        self._membership = Membership(optimizer, self.stations)
        self._calls: int | None = None
        self._looking = self._begun = self._again = False
        self._sources = [station.source for station in self.stations]
        self._each_step = any(source.each_step for source in self._sources)
        self._beforehand = any(source.beforehand for source in self._sources)
        self._cuda = any(station.device.type == "cuda" for station in self.stations)
        self._flushed_at = time.monotonic()
        # A notebook asks for what was seen while a thread of its own trains.
        self._turn = threading.RLock()
        self.running = self._stopped = False

    # Start and stop

    def start(self) -> "Watch":
        """Begin to follow; `with watch(…)` does it for you."""
        if self.running:
            raise RuntimeError("this watch is already running")
        self._stopped = False
        if self.silent:
            self.running = True
            return self
        self._delivery.open(self.about())
        if self._calls is not None:  # it was stopped before, and steps may have been taken since
            self._calls = max(self._calls, counted(self.optimizer) or 0)
        for station in self.stations:
            station.source.open()
        # Dynamo is not to look into the hooks of a compiled step.
        before, after = torch.compiler.disable(self._before_hook), torch.compiler.disable(self._after_hook)
        self._guarded.ended = False
        self._guarded.handles = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(after),
        ]
        self.running = True
        # Only the hooks hold the watch: it goes with the optimizer that it follows.
        self._at_exit = partial(_stop_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        return self

    def stop(self) -> None:
        """Stop following; everything observed so far is recorded."""
        self._stop(together=True)

    def _stop(self, *, together: bool) -> None:
        if not self.running:
            return
        self.running, self._stopped = False, True
        if not self.silent:
            atexit.unregister(self._at_exit)
        self._guarded.release()
        if not self.silent:
            with self._guarded(), self._turn:
                self._handover.send()
                self._settle(wait=True, together=together)
            for station in self.stations:
                with self._guarded():
                    station.source.close()
        self._delivery.close()

    def __enter__(self) -> "Watch":
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # Where an exception came up on one rank, the others may never come here.
        self._stop(together=kind is None)

    def __del__(self) -> None:
        if getattr(self, "running", False):
            self._stop(together=False)

    # What it sees

    def _before_hook(self, *_: Any) -> None:
        try:
            self._before()
        except Exception as error:
            self._guarded.take(error)

    def _after_hook(self, *_: Any) -> None:
        try:
            with self._turn:
                self._after()
        except Exception as error:
            self._guarded.take(error)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a step that calls no hooks: `with watch.around(): graph.replay()` for a captured step.

        Start the watch before the capture, so that what it needs is captured too.
        """
        if self.silent or not self.running:
            yield
            return
        self._before_hook()
        yield
        self._after_hook()

    def _before(self) -> None:
        self._begun = False
        if not self.running or self._guarded.ended:
            return
        if (self._beforehand or self._calls is None) and self._capturing():
            return
        if self._calls is None:
            self._calls = self._first_step()
        self._begun = True
        if not self._beforehand:
            return
        self._looking = self._calls % self.every == 0
        if not self._looking and not self._each_step:
            return
        self._look_at_groups()
        for station in self.stations:
            if self._looking or station.source.each_step:
                station.source.before()

    def _after(self) -> None:
        if not self._begun or self._guarded.ended:
            return
        assert self._calls is not None
        self._begun = False
        if not self._beforehand:
            if self._capturing():
                return
            self._looking = self._calls % self.every == 0
            self._again = self._looking and all(map(_AGAIN, self._sources))
            if self._looking and not self._again:
                self._look_at_groups()
        for station in self.stations:
            station.note_skip()
        if self._again:
            self._handover.observe(self._calls, again=True)
        elif self._looking or self._each_step:
            with torch.no_grad():
                self._look(self._calls)
        self._calls += 1
        late = not self.sharded and time.monotonic() - self._flushed_at > _SECONDS
        if self._handover.full or (late and not self._handover.empty):
            self._flushed_at = time.monotonic()
            self._handover.send()
        if self._handover.waiting:
            self._settle(wait=self.sharded and self._handover.empty)

    def _capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _look_at_groups(self) -> None:
        if lost := self._membership.look():
            text = "%s: %s not followed any more: no longer in the param group of before"
            logger.warning(text, self.run, ", ".join(lost))
            self._handover.complete = False

    def _look(self, step: int) -> None:
        if self._looking:
            self._handover.observe(step)
            return
        for station in self.stations:
            if station.source.each_step:
                station.source.after(station.scratch)

    def log(self, values: Mapping[str, float | Tensor] | None = None, **named: float | Tensor) -> None:
        """Record numbers of the run as a whole, such as a loss, at the last step.

        Args:
            values: by name; tensors with one number are not waited for.
            **named: the same.
        """
        given = {name: one_number(name, value) for name, value in {**(values or {}), **named}.items()}
        if self._stopped:
            logger.warning("%s: what is logged after stop() is not recorded", self.run)
        elif not self.silent:
            step = max(0, (self._first_step() if self._calls is None else self._calls) - 1)
            with self._turn:
                for name, value in given.items():
                    self._handover.log(step, name, value)

    # What it hands over

    def flush(self) -> None:
        """Record everything observed so far; waits for it. Under FSDP2 all ranks must call it together."""
        with self._turn:
            self._handover.send()
            self._settle(wait=True)

    def _settle(self, *, wait: bool = False, together: bool = True) -> None:
        """Hand what has arrived to the sinks."""
        for block in self._handover.blocks(wait=wait, together=together):
            self._delivery.take(block)

    # What a user asks

    def records(self) -> "pd.DataFrame":
        """Everything recorded so far: run, step, group, quantity, statistic, value."""
        if self.running:
            self.flush()
        return self._delivery.table()

    def latest(self) -> dict[str, dict[str, dict[str, float]]]:
        """The last observed step: group → quantity → statistic → value."""
        if self.running:
            self.flush()
        found = self._delivery.last.at(-1) if self._delivery.last is not None else {}
        return {name: found[name] for name in self._order if name in found}

    def summary(self) -> str:
        """The last observed step and the alerts, for a person."""
        if self.running:
            self.flush()
        return summary(self.run, self._delivery.last, self._order, self.alerts, self.missing)

    @property
    def next_step(self) -> int:
        """The number of the step that comes next; waits for the device where a gradient scaler may skip steps."""
        if self._calls is None:
            return self._first_step()
        return self._calls - max(int(station.skipped.item()) if station.may_skip else 0 for station in self.stations)

    @property
    def error(self) -> Exception | None:
        """The first thing that went wrong here, where something did."""
        return self._guarded.error

    @property
    def alerts(self) -> list[Alert]:
        """What was said so far."""
        return list(self._delivery.alerts.all)

    @property
    def missing(self) -> dict[str, str]:
        """Quantities that are not recorded, and why."""
        return {name: why for station in self.stations for name, why in station.missing().items()}

    def about(self) -> dict[str, Any]:
        """What is known of the run before its first step: the contents of run.json."""
        ordered = sorted(self.followed, key=lambda entry: self._order.index(entry.name))
        given = {"run": self.run, "every": self.every, "missing": self.missing, "config": self.config}
        return about(self.optimizer, ordered, self._all_names, **given)

    def _first_step(self) -> int:
        return self._asked_step if self._asked_step is not None else first_step(self.optimizer, self._delivery.folder)


def _stop_at_exit(watch: "weakref.ref[Watch]", process: int) -> None:
    """At the end of the process that started it: other ranks may never come here, and forks have their own ends."""
    still = watch()
    if still is not None and os.getpid() == process:
        still._stop(together=False)


def _merge(followed: Sequence[Followed]) -> "Merge":
    """What brings sharded rows together; imported where rows are sharded, since not every torch has what it needs."""
    from steradian.watching._merge import Merge

    return Merge(followed)


def _rank() -> int:
    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )

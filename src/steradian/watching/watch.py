"""`st.watch`: follows any torch optimizer through its hooks and records how far every weight turns."""

import atexit
import logging
import math
import os
import platform
import shutil
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from numbers import Integral, Real
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steradian.groups import Groups
from steradian.watching.alerts import Alerts
from steradian.watching.buffer import ON_INVARIANT, Buffer, decoupled_decay, sources_of
from steradian.watching.cost import Cost
from steradian.watching.flush import Flush, Output
from steradian.watching.paths import Paths
from steradian.watching.records import SECONDS, Alert, causes, last_step, relabelled
from steradian.watching.rows import INVARIANT, Membership, Model, nominal_rate, watched_groups
from steradian.watching.sinks import sinks_of
from steradian.watching.sources import UNMEASURED
from steradian.watching.statistics import Imbalance
from steradian.watching.verdict import Sentence, judge, time_taken

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Options", "Watch", "counted_steps", "inner_optimizers", "watch"]

logger = logging.getLogger("steradian")

Optimizers = Optimizer | Sequence[Optimizer]
_SECONDS = 30.0  # observed steps are flushed at least this often
_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # torch's wrapper around `step`, which calls the hooks
_OURS: "weakref.WeakSet[Any]" = weakref.WeakSet()  # post-hooks of watches, which do not change the weights
_NONE_PROVED = "no watched weight is known to be invariant: pass what find_groups returns instead of the model"


def watch(
    optimizer: Optimizers,
    model_or_groups: Model = None,
    *,
    to: Any = None,
    every: int | None = None,
    cost: float = 0.02,
    only: str | Sequence[str] | None = None,
    phenomena: bool = False,
    **options: Any,
) -> "Watch":
    """Watch every weight that an optimizer steps: a context manager that records how far each one turns.

    See `Watch` for the options.

    >>> model = torch.nn.Linear(3, 3, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(optimizer, model) as watched:
    ...     model.weight.data, model.weight.grad = torch.eye(3), torch.eye(3).roll(1, 0)
    ...     optimizer.step()
    >>> round(watched.latest()["weight"]["angle"]["median"], 4)
    0.0997
    """
    return Watch(optimizer, model_or_groups, to=to, every=every, cost=cost, only=only, phenomena=phenomena, **options)


class Watch:
    """Records, for each weight and each observed step, how far its rows turn; see `records.QUANTITIES`.

    Every parameter that the optimizers step is watched: matrices and filters by row, everything smaller as a whole.
    What means something only on invariant rows (equilibria, hypotheses, phenomena) is recorded on those alone that
    `find_groups` proved or that a param group declares.

    Accumulating gradients is not a step; a step that a gradient scaler skips is not recorded; a step inside a replayed
    CUDA graph calls no hooks, so wrap the replay in `around()`. With several optimizers a new step begins when one of
    them steps a second time. Under DDP rank 0 records. Under FSDP2 every rank observes its rows and rank 0 records all:
    every rank must start and stop the watch.

    The watch never ends a training: if there is nothing to watch it warns, and an error in it is logged and ends the
    watch.

    Args:
        optimizer: any torch optimizer, also as accelerate prepared it; a list of several that train one model.
        model_or_groups: the model, its parts, or what `find_groups` found in it: where names, and proved rows, come
            from. None: the optimizer's own names, or numbers.
        to: where records go besides `records()`: a folder, a callable log(dict, step), a SummaryWriter, a W&B run, a
            sink of `watching.sinks`, or several of them. An existing run's folder is continued.
        every: observe steps whose number is a multiple of this. None: the first 20, then as often as `cost` allows,
            at most 300 of 10,000; all of them with `phenomena`.
        cost: the share of the training's time that the watch may take.
        only: glob patterns of parameter names; others are not watched.
        phenomena: measure (a), (b1), (b2) and (c), which needs every step and five tensors of the size of the weights.
        run: the run's name; None: the folder's.
        record_rows: names of groups whose single rows are recorded at every observed step.
        rows_every: single rows of all groups, at most 64 of each, are recorded once in this many observations, for
            histograms; 0: never.
        paths: {group: [row, …]} whose directions are recorded. None: the first row of three groups.
        config: JSON data, saved with the run.
        step: the number of the first step. None: the number of steps in the optimizer's state.
    """

    @torch.inference_mode(False)
    def __init__(self, optimizer: Optimizers, model_or_groups: Model = None, *, to: Any = None, **options: Any) -> None:
        self.optimizers = inner_optimizers(optimizer)
        parts = model_or_groups if isinstance(model_or_groups, list | tuple) else [model_or_groups]
        if not isinstance(model_or_groups, Groups | None) and not all(isinstance(part, nn.Module) for part in parts):
            kinds = "a model, a list of its parts, or what find_groups returned"
            raise TypeError(f"the second argument must be {kinds}, got {type(model_or_groups).__name__}")
        given = Options.of(options)
        phenomena, paths, only = given.phenomena, given.paths, given.only
        every = int(given.every or 1) if phenomena or given.every is not None else None
        self.config = dict(given.config or {})
        watched, notes = watched_groups(self.optimizers, model_or_groups, [only] if isinstance(only, str) else only)
        self.watched = watched
        self.names = tuple(group.name for group in watched)  #: of the watched groups
        distributed = torch.distributed
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
        self.sharded = any(group.sharded for group in watched)
        self._idle = not watched or (rank != 0 and not self.sharded)
        self.sinks = [] if self._idle or rank else sinks_of(to)  #: where records go
        if rank == 0 and notes:
            logger.warning("; ".join(notes))
        if rank == 0 and not watched:
            why = "; ".join(note.removeprefix("not watched: ") for note in notes)
            why = why or "no optimizer steps a trainable parameter"
            warnings.warn(f"there is nothing to watch: {why}", stacklevel=4)
        for argument, names in (("record_rows", given.record_rows), ("paths", paths or ())):
            unknown = [name for name in names if name not in self.names]
            if unknown and watched:
                raise ValueError(f"{argument} names {unknown}, but the watched groups are {list(self.names)}")
        invariant = {group.name for group in watched if group.label == INVARIANT}
        self._output = Output(self.sinks, Alerts(invariant), partial(self._fail, fatal=False))
        folder = self._output.folder
        kinds = " + ".join(dict.fromkeys(type(each).__name__ for each in self.optimizers))
        self.run = given.run or (folder.files.folder.resolve().name if folder is not None else kinds)  #: its name
        self.buffers = [
            Buffer(source, each, every_step=every == 1)
            for each in self.optimizers
            for device in dict.fromkeys(group.device for group in watched)
            if (here := [group for group in watched if group.optimizer is each and group.device == device])
            for source in sources_of(each, here, phenomena=phenomena)
        ]
        imbalance = None
        if isinstance(model_or_groups, Groups) and model_or_groups.pairs and rank == 0:
            imbalance = Imbalance(model_or_groups, {id(param) for group in watched for param in group.params})
        self._flush = Flush(
            self.run,
            self.buffers,
            record_rows=frozenset(given.record_rows),
            rows_every=int(given.rows_every),
            paths=Paths(watched, paths if paths is not None or folder is not None else {}, rank=rank),
            imbalance=imbalance,
        )
        self._membership = Membership(watched)
        self._param_names = {id(p): name for g in watched for name, p in zip(g.group.names, g.params, strict=True)}
        if isinstance(model_or_groups, Groups):
            self._param_names |= {id(p): name for name, p in model_or_groups.params.items()}
        gpu = next((buffer.device for buffer in self.buffers if buffer.device.type == "cuda"), None)
        self._cost = Cost(every, float(given.cost), gpu)
        self._first = None if given.step is None else int(given.step)
        self._step: int | None = None  # the number of the step that is being taken, or that comes next
        self._closure = False  # whether the step that is being taken was called with a closure
        self._stepped: set[int] = set()  # the optimizers that have taken it
        self._begun: set[int] = set()  # the optimizers that are taking it
        self._observing = False
        self._flushed_at = time.monotonic()
        self._lock = threading.RLock()  # a notebook may call `records()` while another thread trains
        self.running = self._stopped = self._failed = False  #: it was started and not stopped
        self.error: Exception | None = None  #: the first exception in the watch, if there was one
        self._not_finite: list[str] = []  # groups whose weights were NaN or infinite when it stopped
        self._hooks: list[Any] = []
        self._last_hooks: dict[int, int] = {}  # the post-hook of each optimizer

    # Start

    def start(self) -> "Watch":
        """Start to watch; `with watch(…)` does it for you."""
        if self.running:
            raise RuntimeError("this watch is already running")
        self.running, self._stopped, self._process = self._idle, False, os.getpid()
        if self._idle:
            return self
        self._about = self.about()
        self._output.open(self._about)
        self._flush.began = time.monotonic() - self._flush.seconds
        if self._step is not None:  # it was stopped before, and steps may have been taken since
            self._step = max(self._step, counted_steps(self.optimizers) or 0)
        for buffer in self.buffers:
            buffer.source.open()
        self._failed, self._stepped, self._begun, self._not_finite = False, set(), set(), []
        for optimizer in self.optimizers if not self._hooks else ():
            # Dynamo must not trace into the hooks of a compiled step.
            before = torch.compiler.disable(partial(self._guarded, self._before))
            after = torch.compiler.disable(partial(self._guarded, self._after))
            self._hooks += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
            _OURS.add(after)
            self._last_hooks[id(optimizer)] = self._hooks[-1].id
        self.running = True
        # Only the hooks refer to the watch, so that it is collected with its optimizer.
        self._at_exit = partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        return self

    # At every step

    def _guarded(self, call: Callable[[Any], None], argument: Any, args: Any = (), kwargs: Any = None) -> None:
        """Call one of the hooks with the optimizer, and perhaps the arguments of its step, of which self is one."""
        try:
            with self._lock:
                self._closure = any(each is not None for each in (*args[1:], *(kwargs or {}).values()))
                call(argument)
        except Exception as error:
            self._fail(error)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a step that calls no hooks: `with watch.around(): graph.replay()` for a captured step.

        Start the watch before the capture, so that what it needs is captured too.
        """
        for optimizer in self.optimizers:
            self._guarded(self._before, optimizer)
        yield
        for optimizer in self.optimizers:
            self._guarded(self._after, optimizer)

    def _takes_part(self, optimizer: Optimizer) -> bool:
        """Whether this is a step to watch: not one that is captured, or that the optimizer's own step calls."""
        if self._idle or not self.running or self._failed or _steps_in_progress(optimizer) > 1:
            return False
        return self._cost.device is None or not torch.cuda.is_current_stream_capturing()

    def _before(self, optimizer: Optimizer) -> None:
        if not self._takes_part(optimizer):
            return
        if id(optimizer) in self._stepped:
            self._end_step()
        if self._step is None:
            self._step = self._first_step()
            folder = self._output.folder
            if folder is not None and any(folder.files.folder.glob("part-*")):
                table = folder.table()
                past = table["value"][(table["quantity"] == SECONDS) & (table["step"] < self._step)]
                self._flush.began -= past.max() if len(past) else 0.0
                if self._step == 0 and len(table):
                    text = "%s: this training begins at step 0, so it replaces the run that ended at step %d in %s"
                    logger.warning(text, self.run, table["step"].max(), folder.files.folder)
        if not self._stepped:
            self._observing = self._cost.wants(self._step)
        self._begun.add(id(optimizer))
        mine = [buffer.source for buffer in self.buffers if buffer.optimizer is optimizer]
        if self._observing and (self._others_follow(optimizer) or any(map(_forgets, optimizer.param_groups))):
            if not all(source.two_points for source in mine):
                self._flush.send(everything=False)  # what was read from the state so far is not of two points
            for source in mine:
                source.distrust_state()
        wanted = [source for source in mine if source.beforehand and (self._observing or source.each_step)]
        if wanted:
            with self._cost.measured():
                self._check_membership()
                for source in wanted:
                    source.closure = self._closure
                    source.before()

    def _after(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._begun or not self._takes_part(optimizer):
            return
        assert self._step is not None
        self._begun.discard(id(optimizer))
        mine = [buffer for buffer in self.buffers if buffer.optimizer is optimizer]
        for buffer in mine:
            buffer.count_skip()
        if self._observing:
            with self._cost.measured(sampled=True):
                self._check_membership()
                self._flush.observe(self._step, optimizer)
        else:
            for buffer in mine:
                if buffer.source.each_step:
                    buffer.source.after(buffer.scratch)
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers):
            self._end_step()

    def _end_step(self) -> None:
        """All optimizers that take part have taken the step."""
        assert self._step is not None
        self._step += 1
        self._stepped = set()
        self._cost.count(observed=self._observing)
        if self._observing and self._flush.wants_pairs:
            with self._cost.measured():
                self._flush.measure_pairs(self._step - 1)
        late = not self.sharded and time.monotonic() - self._flushed_at > _SECONDS
        everything = (self._observing and self._cost.first_choice) or late
        if self._flush.full or everything:
            if everything:
                self._flushed_at = time.monotonic()
            with self._cost.measured():
                self._flush.send(everything=everything)
            self._cost.choose(self._output.store.seconds)
            if self.sharded and self._cost.every is None:
                torch.distributed.broadcast_object_list(interval := [self._cost.interval])
                self._cost.interval = interval[0]
        if self._flush.sent:
            with self._cost.measured(device=False):
                self._write(wait=self.sharded)

    def _others_follow(self, optimizer: Optimizer) -> bool:
        """Whether other hooks may change the weights after the step; if so, they are called before ours."""
        hooks: Any = optimizer._optimizer_step_post_hooks
        if self._last_hooks.get(id(optimizer)) not in hooks or all(hook in _OURS for hook in hooks.values()):
            return False
        hooks.move_to_end(self._last_hooks[id(optimizer)])
        return True

    def _check_membership(self) -> None:
        if not self._membership.moved():
            return
        lost = self._membership.update()
        for buffer in self.buffers:
            buffer.source.known = None
            buffer.update_settings()
        if lost:
            text = "%s: %s not watched any more: out of the param group of before, or of another shape, dtype or device"
            logger.warning(text, self.run, ", ".join(lost))
            self._flush.complete = False

    def _first_step(self) -> int:
        """The number of the first step: given, counted by the optimizer, or after the last one in the run's folder."""
        if self._first is not None:
            return self._first
        counted = counted_steps(self.optimizers)
        folder = self._output.folder
        if counted is None and folder is not None and any(optimizer.state for optimizer in self.optimizers):
            steps = folder.table()["step"]
            return int(steps.max()) + 1 if len(steps) else 0
        return counted or 0

    def _fail(self, error: Exception, *, fatal: bool = True) -> None:
        """Log the first exception; after a fatal one the hooks do nothing, and are removed when the watch stops."""
        if self.error is None:
            self.error = error
            text = ": the watch ends, training goes on" if fatal else ""
            logger.error("watching %s failed%s", self.run, text, exc_info=error)
        self._failed = self._failed or fatal

    # Stop

    def stop(self) -> None:
        """Stop watching; everything observed so far is recorded."""
        self._stop(together=True)

    def _stop(self, *, together: bool) -> None:
        if not self.running:
            return
        self.running, self._stopped = False, True
        if not _steps_in_progress():  # a step iterates over its hooks; ours do nothing any more
            while self._hooks:
                self._hooks.pop().remove()
        if self._stepped and self._step is not None:  # some of the optimizers have taken the last step
            self._step, self._stepped = self._step + 1, set()
        if not self._idle:
            atexit.unregister(self._at_exit)
            self._guarded(self._finish, together)
        self._output.close()

    def _finish(self, together: bool) -> None:
        try:
            self._flush_all(together=together)
            self._cost.choose(self._output.store.seconds)
            if not (self._failed or self.sharded):  # the training is over, so the host may wait for the device
                self._not_finite = [g.name for g in self.watched if not all(p.isfinite().all() for p in g.params)]
        finally:
            for buffer in self.buffers:
                buffer.source.close()
            if self._output.folder is not None:
                known = {"missing": self.missing, "cost": self._cost_so_far(), "last_step": self._last_step}
                self._output.folder.describe({**self._about, **known, "not_finite": self._not_finite})

    def __enter__(self) -> "Watch":
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an exception on one rank, the others may never arrive here.
        self.stop() if kind is None else self._stop_alone()

    def _stop_alone(self) -> None:
        """Stop without the other ranks; a fork that ends does not stop the watch of the process that started it."""
        if getattr(self, "running", False) and os.getpid() == self._process:
            self._stop(together=False)

    __del__ = _stop_alone

    # Records

    def log(self, values: Mapping[str, float | Tensor] | None = None, **named: float | Tensor) -> None:
        """Record numbers of the run as a whole, such as a loss, at the last step; a tensor is not waited for."""
        given = {name: _one_number(value) for name, value in {**(values or {}), **named}.items()}
        if bad := [name for name, value in given.items() if value is None]:
            warnings.warn(f"not recorded: {', '.join(bad)}: what is logged must be one number", stacklevel=2)
        if self._stopped:
            logger.warning("%s: what is logged after stop() is not recorded", self.run)
        elif not self._idle:
            with self._lock:
                present = self._first_step() if self._step is None else self._step
                step = max(0, present if self._stepped else present - 1)
                for name, value in given.items():
                    if value is not None:
                        self._flush.log(step, name, value)

    def flush(self) -> None:
        """Record everything observed so far; waits for it. Under FSDP2 all ranks must call it together."""
        if self.running:
            with self._lock:
                self._flush_all()
            if self._output.folder is not None:
                self._output.folder.drain()

    def _flush_all(self, *, together: bool = True) -> None:
        if self._step is not None and not self._stepped:  # the last step has the imbalance of pairs
            self._flush.measure_pairs(self._step - 1)
        self._flush.send()
        self._write(wait=True, together=together)

    def _write(self, *, wait: bool, together: bool = True) -> None:
        for block in self._flush.blocks(wait=wait, together=together):
            self._output.write(block)

    def records(self) -> "pd.DataFrame":
        """Everything recorded so far: run, step, group, quantity, statistic, value."""
        self.flush()
        return self._output.store.table()

    def latest(self) -> dict[str, dict[str, dict[str, float]]]:
        """The last observed step: group → quantity → statistic → value."""
        self.flush()
        last = self._output.last
        found = last.at(-1) if last is not None else {}
        return {name: found[name] for name in self.names if name in found}

    def summary(self) -> str:
        """A verdict in words, the last observed step, the alerts, and what the watch cost, for a person."""
        if not self.names:
            return f"{self.run}: there is nothing to watch"
        if not (self.running or self._stopped):
            return f"{self.run}: not started yet, which `with watch(…):` or watch.start() does"
        self.flush()
        verdict = [f"- {sentence.text}" for sentence in self.verdict()]
        lines = [_wrapped(f"{self.run}: an error ended the watch: {self.error!r}"), ""] if self._failed else []
        lines += [f"{self.run}, verdict", *map(_wrapped, verdict), ""] if verdict else []
        lines.append(last_step(self.run, self._output.last, self.labels()))
        lines += [_wrapped(f"alert: {cause.text}") for cause in causes(self.alerts)]
        reasons: dict[str, list[str]] = {}
        for name, why in self.missing.items():
            # The verdict says how to prove rows, and phenomena are for those who ask.
            if self._output.last is not None and why not in (UNMEASURED, _NONE_PROVED):
                reasons.setdefault(why, []).append(name)
        lines += [_wrapped(f"not recorded: {', '.join(names)}: {why}") for why, names in reasons.items()]
        cost = self._cost_so_far()
        if cost["share"] is not None:
            lines.append(
                f"the watch took {time_taken(cost['share'])} ({1000 * cost['seconds']:.2g} ms "
                f"for each of {cost['observed']} observed steps) and {cost['bytes'] / 2**20:.3g} MB"
            )
        return "\n".join(lines)

    def verdict(self) -> list[Sentence]:
        """What the steps observed so far say about the training: at most seven sentences, the most severe first."""
        known = self.labels()
        with self._lock:
            return judge(self._output.history, self.about(), known, self.alerts)

    def labels(self) -> dict[str, str]:
        """The label of each group: "invariant", "not invariant" (refuted, perhaps by its gradient) or "untested"."""
        self.flush()
        with self._lock:
            return relabelled({group.name: group.label for group in self.watched}, self._output.history.defects())

    @property
    def next_step(self) -> int:
        """The number of the step that comes next; waits for the device if a gradient scaler may skip steps."""
        if self._step is None:
            return self._first_step()
        skipped = [int(buffer.skipped.item()) for buffer in self.buffers if buffer.may_skip]
        return self._step + bool(self._stepped) - max(skipped, default=0)

    @property
    def interval(self) -> int:
        """Steps that are multiples of it are observed, after the first 20; with `every=None` at least 10, later 50."""
        return self._cost.interval

    @property
    def alerts(self) -> list[Alert]:
        """Alerts raised so far."""
        return list(self._output.alerts.raised)

    @property
    def missing(self) -> dict[str, str]:
        """Quantities that are not recorded, with the reason."""
        found = {name: why for buffer in self.buffers for name, why in buffer.missing().items()}
        if self.watched and all(group.label != INVARIANT for group in self.watched):
            found = {**dict.fromkeys(ON_INVARIANT, _NONE_PROVED), **found}
        return found

    def about(self) -> dict[str, Any]:
        """The contents of run.json, written before the first step."""
        kinds = dict.fromkeys(f"{type(each).__module__}.{type(each).__qualname__}" for each in self.optimizers)
        rest = set(self._param_names.values()) - {name for group in self.watched for name in group.group.names}
        devices = dict.fromkeys(group.device for group in self.watched)
        models = [torch.cuda.get_device_name(each) if each.type == "cuda" else each.type for each in devices]
        device = ", ".join(dict.fromkeys(models))

        def plain(value: Any) -> Any:
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            return value if value is None or isinstance(value, str | int | float | list | tuple) else str(value)

        settings = [
            {"params": [self._param_names.get(id(param), "?") for param in group["params"]]}
            | {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        return {
            "run": self.run,
            "every": self._cost.every,
            "missing": self.missing,
            "config": self.config,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "optimizer": {"name": " + ".join(kinds), "groups": settings},
            "groups": [group.describe() for group in self.watched],
            "rest": sorted(rest),
            "cost": self._cost_so_far(),
            "last_step": self._last_step,
            "not_finite": self._not_finite,
            "environment": {"torch": torch.__version__, "python": platform.python_version(), "device": device},
        }

    @property
    def _last_step(self) -> int | None:
        """The number of the last step that was taken, observed or not; None if none was."""
        return None if self._step is None else self.next_step - 1

    def _cost_so_far(self) -> dict[str, Any]:
        share, seconds = self._cost.share_of_time, self._cost.seconds_per_observation
        nbytes = sum(buffer.nbytes() for buffer in self.buffers)
        numbers = {"share": share, "seconds": seconds, "observed": self._cost.observed, "bytes": nbytes}
        return {name: None if math.isnan(number) else number for name, number in numbers.items()}


def inner_optimizers(given: Any) -> list[Optimizer]:
    """The optimizers whose hooks are called: one, several, those in a container, or the inner ones of wrappers."""
    inside = getattr(given, "optimizers", None)
    several = inside if isinstance(inside, list | tuple) and inside else given
    found: dict[int, Optimizer] = {}
    for optimizer in several if isinstance(several, list | tuple) else [several]:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer or a list of them, got {type(optimizer).__name__}")
        while not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper, such as accelerate's
            inner = getattr(optimizer, "optimizer", None)
            if not isinstance(inner, Optimizer):
                name = type(optimizer).__name__
                raise TypeError(f"optimizer must have a torch optimizer's hooks, and {name} has none")
            optimizer = inner
        found[id(optimizer)] = optimizer
    if not found:
        raise ValueError("optimizer must be a torch optimizer or a list of them, got an empty list")
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `Watch`; a ValueError or TypeError for those that make no sense, whatever the model."""

    every: int | None = None
    cost: float = 0.02
    only: str | Sequence[str] | None = None
    phenomena: bool = False
    run: str | None = None
    record_rows: Sequence[str] = ()
    rows_every: int = 100
    paths: Mapping[str, Sequence[int]] | None = None
    config: Mapping[str, Any] | None = None
    step: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """These options; a TypeError for a name that is none of them."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise TypeError(f"a watch has no option {name!r}; it has {', '.join(['to', *names])}")
        return cls(**given)

    def __post_init__(self) -> None:
        paths, patterns = self.paths, [self.only] if isinstance(self.only, str) else self.only
        named = isinstance(patterns, Sequence) and patterns and all(isinstance(each, str) for each in patterns)
        by_group = isinstance(paths, Mapping) and all(isinstance(rows, Sequence) for rows in paths.values())
        for name, right, kind, must in (
            ("every", self.every is None or _at_least(1, self.every), ValueError, "None or an integer ≥ 1"),
            ("cost", isinstance(self.cost, Real) and self.cost > 0, ValueError, "a share of the time, such as 0.02"),
            ("rows_every", _at_least(0, self.rows_every), ValueError, "an integer ≥ 0 (0: never)"),
            ("step", self.step is None or _at_least(0, self.step), ValueError, "None or an integer ≥ 0"),
            ("only", self.only is None or named, TypeError, "a glob pattern of names, or a list of them"),
            ("record_rows", not isinstance(self.record_rows, str), TypeError, f"a list such as [{self.record_rows!r}]"),
            ("run", isinstance(self.run, str | None), TypeError, f"a name such as {str(self.run)!r}"),
            ("config", isinstance(self.config, Mapping | None), TypeError, "a dict"),
            ("paths", paths is None or by_group, TypeError, "{group: [row, …]}"),
        ):
            if not right:
                raise kind(f"{name} must be {must}, got {getattr(self, name)!r}")


def _at_least(least: int, value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= least


def _one_number(value: Any) -> float | Tensor | None:
    """A logged value; a tensor as a copy that is not waited for. None if it is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).clone()
    array = np.asarray(None if isinstance(value, list | tuple | Tensor) else value)
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else None


def counted_steps(optimizers: Sequence[Optimizer]) -> int | None:
    """How many steps the optimizers have counted in their states; None if they do not count."""
    # Some third-party optimizers also keep plain numbers in the state, beside the states of parameters.
    states = [state for each in optimizers for state in each.state.values() if isinstance(state, Mapping)]
    counts = [state["step"] for state in states if isinstance(state.get("step"), Real | Tensor)]
    single = [count for count in counts if not isinstance(count, Tensor) or count.numel() == 1]
    return int(max(map(float, single))) if single else None


def _steps_in_progress(optimizer: Optimizer | None = None) -> int:
    """How many calls of `step`, of this optimizer or of any, are in progress in this thread."""
    frame: FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        found += frame.f_code is _STEP and (optimizer is None or frame.f_locals.get("self") is optimizer)
        frame = frame.f_back
    return found


def _forgets(settings: Mapping[str, Any]) -> bool:
    """Whether a step of a param group keeps so little of the weights, 1 − ηδ, that it cannot be taken back."""
    rate, decay = nominal_rate(settings), decoupled_decay(settings)
    on_host = not isinstance(rate, Tensor) or rate.device.type == "cpu"  # others are not waited for
    return bool(decay and on_host and abs(1 - float(rate) * decay) < 0.1)


def _stop_at_exit(watch: "weakref.ref[Watch]") -> None:
    still = watch()
    if still is not None:
        still._stop_alone()


def _wrapped(line: str) -> str:
    """A sentence in lines of the terminal's width."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

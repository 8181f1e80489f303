"""`st.watch`: follows any torch optimizer through its hooks and records what its steps do on the spheres."""

import atexit
import json
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import optim
from steradian.groups import Groups
from steradian.watching.alerts import Alerts
from steradian.watching.buffer import Buffer
from steradian.watching.flush import Flush, Output
from steradian.watching.paths import Paths
from steradian.watching.records import Alert, read_run, summary
from steradian.watching.rows import Membership, WatchedGroup, watched_groups
from steradian.watching.sinks import sinks_of

if TYPE_CHECKING:
    import pandas as pd

    from steradian.watching.distributed import Merge

__all__ = ["Watch", "counted_steps", "watch"]

logger = logging.getLogger("steradian")

_SECONDS = 30.0
"""Observed steps are flushed at least this often."""


def watch(
    optimizer: Optimizer, groups: Groups | None = None, *, every: int = 1, to: Any = None, **options: Any
) -> "Watch":
    """Watch an optimizer: a context manager that records what its steps do on the spheres.

    See `Watch` for the options.

    >>> weight = torch.nn.Parameter(torch.eye(3))
    >>> optimizer = torch.optim.SGD([{"params": [("w", weight)], "rows": "filter"}], lr=0.1)
    >>> with watch(optimizer) as watched:
    ...     weight.grad = torch.eye(3).roll(1, 0)
    ...     optimizer.step()
    >>> round(watched.latest()["w"]["angle"]["median"], 4)
    0.0997
    """
    return Watch(optimizer, groups, every=every, to=to, **options)


class Watch:
    """Records, for each group of rows and each step, what an optimizer does on the spheres; see `records.QUANTITIES`.

    Our optimizers report their steps themselves. For torch's SGD, Adam, AdamW, Adagrad and RMSprop the weights and the
    state are read around the step; for any other optimizer radius, angle and velocity are measured from the weights
    before and after. Numbers are reduced to statistics over the rows of each group on their device, and copied to the
    host some steps at a time, without waiting.

    Accumulating gradients is not a step; a step that a gradient scaler skips is not recorded; a step inside a replayed
    CUDA graph calls no hooks, so wrap the replay in `around()`. Under DDP rank 0 records. Under FSDP2 every rank
    observes its rows and rank 0 records all: every rank must start and stop the watch.

    An error in the watch does not stop the training: it is logged, and the watch ends.

    Args:
        optimizer: any torch optimizer, also as accelerate prepared it.
        groups: what `find_groups` found. None: the rows that the param groups declare under "rows".
        every: observe steps whose number is a multiple of this.
        to: where records go besides `records()`: a folder, a callable log(dict, step), a SummaryWriter, a W&B run, a
            sink of `watching.sinks`, or several of them. An existing run's folder is continued.
        run: the run's name; None: the folder's.
        record_rows: names of groups whose single rows are recorded at every observed step.
        rows_every: single rows of all groups are recorded once in this many observations, for histograms; 0: never.
        paths: {group: [row, …]} whose directions are recorded. None: the first row of three groups.
        phenomena: measure (b1), (b2) and (c), which needs every step and five tensors of the size of the weights.
            None: if `every` is 1 and the optimizer is not one of ours.
        config: JSON data, saved with the run.
        step: the number of the first step. None: the number of steps in the optimizer's state.

    Attributes:
        run: the run's name.
        sinks: where records go.
        running: it was started and not stopped.
        error: the first exception in the watch, if there was one.
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
        record_rows: Sequence[str] = (),
        rows_every: int = 100,
        paths: Mapping[str, Sequence[int]] | None = None,
        phenomena: bool | None = None,
        config: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
        if groups is not None and not isinstance(groups, Groups):
            raise TypeError(f"groups must be what find_groups returned, got {type(groups).__name__}")
        _check_options(every, record_rows, rows_every, paths, config, step, run)
        self.optimizer = optimizer = _with_hooks(optimizer)
        self.every = every = int(every)
        self.config = dict(config or {})
        watched = watched_groups(optimizer, groups)
        self._order = tuple(group.name for group in watched)
        _check_names("record_rows", record_rows, self._order)
        _check_names("paths", paths or (), self._order)
        rank = _rank()
        self.sharded = any(group.sharded for group in watched)
        self._idle = rank != 0 and not self.sharded
        self.sinks = sinks_of(to) if rank == 0 else []
        self._output = Output(self.sinks, Alerts(_decays(optimizer, watched)), partial(self._fail, fatal=False))
        folder = self._output.folder
        self.run = run or (folder.files.folder.resolve().name if folder is not None else type(optimizer).__name__)
        self.buffers = [
            Buffer(
                optimizer,
                [group for group in watched if group.device == device],
                phenomena=phenomena,
                every_step=every == 1,
            )
            for device in dict.fromkeys(group.device for group in watched)
        ]
        self.watched = [group for buffer in self.buffers for group in buffer.watched]
        self._flush = Flush(
            self.run,
            self.buffers,
            record_rows=frozenset(record_rows),
            rows_every=int(rows_every),
            merge=_merge(self.watched) if self.sharded else None,
            paths=Paths(self.watched, paths if paths is not None or folder is not None else {}, rank=rank),
        )
        self._membership = Membership(optimizer, self.watched)
        self._param_names = {id(p): name for name, p in (groups.params if groups is not None else {}).items()}
        for group in self.watched:
            self._param_names |= {id(p): name for name, p in zip(group.group.names, group.params, strict=True)}
        self._sources = [buffer.source for buffer in self.buffers]
        self._each_step = any(source.each_step for source in self._sources)
        self._beforehand = any(source.beforehand for source in self._sources)
        self._cuda = any(buffer.device.type == "cuda" for buffer in self.buffers)
        self._first = step if step is None else int(step)
        self._step: int | None = None  # the number of the step that comes next
        self._observing = self._begun = False
        self._flushed_at = time.monotonic()
        # A notebook may call `records()` while another thread trains.
        self._lock = threading.RLock()
        self.running = self._stopped = self._failed = False
        self.error: Exception | None = None
        self._hooks: list[Any] = []

    # Start and stop

    def start(self) -> "Watch":
        """Start to watch; `with watch(…)` does it for you."""
        if self.running:
            raise RuntimeError("this watch is already running")
        self._stopped = False
        if self._idle:
            self.running = True
            return self
        self._output.open(self.about())
        if self._step is not None:  # it was stopped before, and steps may have been taken since
            self._step = max(self._step, counted_steps(self.optimizer) or 0)
        for source in self._sources:
            source.open()
        # Dynamo must not trace into the hooks of a compiled step.
        before, after = torch.compiler.disable(self._before_hook), torch.compiler.disable(self._after_hook)
        self._failed = False
        self._hooks = [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]
        self.running = True
        # Only the hooks refer to the watch, so that it is collected with its optimizer.
        self._at_exit = partial(_stop_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        return self

    def stop(self) -> None:
        """Stop watching; everything observed so far is recorded."""
        self._stop(together=True)

    def _stop(self, *, together: bool) -> None:
        if not self.running:
            return
        self.running, self._stopped = False, True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not self._idle:
            atexit.unregister(self._at_exit)
            with self._guard(), self._lock:
                self._flush.send()
                self._write(wait=True, together=together)
            for source in self._sources:
                with self._guard():
                    source.close()
        self._output.close()

    def __enter__(self) -> "Watch":
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an exception on one rank, the others may never arrive here.
        self._stop(together=kind is None)

    def __del__(self) -> None:
        if getattr(self, "running", False):
            self._stop(together=False)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception, *, fatal: bool = True) -> None:
        """Log the first exception; after a fatal one the hooks do nothing.

        They are removed only when the watch stops: the optimizer may be iterating over its hooks right now.
        """
        if self.error is None:
            self.error = error
            text = ": the watch ends, training goes on" if fatal else ""
            logger.error("watching %s failed%s", self.run, text, exc_info=error)
        self._failed = self._failed or fatal

    # At every step

    def _before_hook(self, *_: Any) -> None:
        try:
            self._before()
        except Exception as error:
            self._fail(error)

    def _after_hook(self, *_: Any) -> None:
        try:
            with self._lock:
                self._after()
        except Exception as error:
            self._fail(error)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a step that calls no hooks: `with watch.around(): graph.replay()` for a captured step.

        Start the watch before the capture, so that what it needs is captured too.
        """
        if self._idle or not self.running:
            yield
            return
        self._before_hook()
        yield
        self._after_hook()

    def _before(self) -> None:
        self._begun = False
        if not self.running or self._failed:
            return
        if (self._beforehand or self._step is None) and self._capturing():
            return
        if self._step is None:
            self._step = self._first_step()
        self._begun = True
        if not self._beforehand:
            return
        self._observing = self._step % self.every == 0
        if not self._observing and not self._each_step:
            return
        self._check_membership()
        for source in self._sources:
            if self._observing or source.each_step:
                source.before()

    def _after(self) -> None:
        if not self._begun or self._failed:
            return
        assert self._step is not None
        self._begun = False
        if not self._beforehand:
            if self._capturing():
                return
            self._observing = self._step % self.every == 0
            if self._observing:
                self._check_membership()
        for buffer in self.buffers:
            buffer.count_skip()
        if self._observing:
            self._flush.observe(self._step)
        elif self._each_step:
            for buffer in self.buffers:
                if buffer.source.each_step:
                    buffer.source.after(buffer.scratch)
        self._step += 1
        late = not self.sharded and time.monotonic() - self._flushed_at > _SECONDS
        if self._flush.full or (late and not self._flush.empty):
            self._flushed_at = time.monotonic()
            self._flush.send()
        if self._flush.pending:
            self._write(wait=self.sharded and self._flush.empty)

    def _capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _check_membership(self) -> None:
        if not self._membership.changed():
            return
        lost = self._membership.update()
        for buffer in self.buffers:
            buffer.update_settings()
        if lost:
            text = "%s: %s not watched any more: no longer in the param group of before"
            logger.warning(text, self.run, ", ".join(lost))
            self._flush.complete = False

    def _first_step(self) -> int:
        """The number of the first step: given, counted by the optimizer, or after the last one in the run's folder."""
        if self._first is not None:
            return self._first
        counted = counted_steps(self.optimizer)
        folder = self._output.folder
        if counted is None and folder is not None and self.optimizer.state:
            steps = read_run(folder.files.folder).table["step"]
            return int(steps.max()) + 1 if len(steps) else 0
        return counted or 0

    def log(self, values: Mapping[str, float | Tensor] | None = None, **named: float | Tensor) -> None:
        """Record numbers of the run as a whole, such as a loss, at the last step.

        Args:
            values: by name; tensors with one number are not waited for.
            **named: the same.
        """
        given = {name: _one_number(name, value) for name, value in {**(values or {}), **named}.items()}
        if self._stopped:
            logger.warning("%s: what is logged after stop() is not recorded", self.run)
        elif not self._idle:
            step = max(0, (self._first_step() if self._step is None else self._step) - 1)
            with self._lock:
                for name, value in given.items():
                    self._flush.log(step, name, value)

    def flush(self) -> None:
        """Record everything observed so far; waits for it. Under FSDP2 all ranks must call it together."""
        with self._lock:
            self._flush.send()
            self._write(wait=True)

    def _write(self, *, wait: bool = False, together: bool = True) -> None:
        for block in self._flush.blocks(wait=wait, together=together):
            self._output.write(block)

    # Records

    def records(self) -> "pd.DataFrame":
        """Everything recorded so far: run, step, group, quantity, statistic, value."""
        if self.running:
            self.flush()
        return self._output.table()

    def latest(self) -> dict[str, dict[str, dict[str, float]]]:
        """The last observed step: group → quantity → statistic → value."""
        if self.running:
            self.flush()
        found = self._output.last.at(-1) if self._output.last is not None else {}
        return {name: found[name] for name in self._order if name in found}

    def summary(self) -> str:
        """The last observed step and the alerts, for a person."""
        if self.running:
            self.flush()
        return summary(self.run, self._output.last, self._order, self.alerts, self.missing)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the watched groups."""
        return tuple(group.name for group in self.watched)

    @property
    def next_step(self) -> int:
        """The number of the step that comes next; waits for the device if a gradient scaler may skip steps."""
        if self._step is None:
            return self._first_step()
        return self._step - max(int(buffer.skipped.item()) if buffer.may_skip else 0 for buffer in self.buffers)

    @property
    def alerts(self) -> list[Alert]:
        """Alerts raised so far."""
        return list(self._output.alerts.raised)

    @property
    def missing(self) -> dict[str, str]:
        """Quantities that are not recorded, with the reason."""
        return {name: why for buffer in self.buffers for name, why in buffer.missing().items()}

    def about(self) -> dict[str, Any]:
        """The contents of run.json, written before the first step."""
        kind = type(self.optimizer)
        ordered = sorted(self.watched, key=lambda group: self._order.index(group.name))
        rest = set(self._param_names.values()) - {name for group in ordered for name in group.group.names}
        devices = dict.fromkeys(_device_name(group.device) for group in ordered)
        return {
            "run": self.run,
            "every": self.every,
            "missing": self.missing,
            "config": self.config,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "optimizer": {"name": f"{kind.__module__}.{kind.__qualname__}", "groups": self._settings()},
            "groups": [group.describe() for group in ordered],
            "rest": sorted(rest),
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": ", ".join(devices),
            },
        }

    def _settings(self) -> list[dict[str, Any]]:
        """The settings of every param group with the names of its parameters, as far as JSON can represent them."""
        found = []
        for group in self.optimizer.param_groups:
            settings: dict[str, Any] = {"params": [self._param_names.get(id(param), "?") for param in group["params"]]}
            for key, value in group.items():
                if key in ("params", "param_names"):
                    continue
                value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                try:
                    json.dumps(value)
                except TypeError:
                    value = str(value)
                settings[key] = value
            found.append(settings)
        return found


# Arguments


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose hooks are called: the inner one of a wrapper without hooks, such as accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(f"optimizer must have a torch optimizer's hooks, and {type(optimizer).__name__} has none")
        optimizer = inner
    return optimizer


def _check_options(
    every: int,
    record_rows: Sequence[str],
    rows_every: int,
    paths: Mapping[str, Sequence[int]] | None,
    config: Mapping[str, Any] | None,
    step: int | None,
    run: str | None,
) -> None:
    if not isinstance(every, Integral) or every < 1:
        raise ValueError(f"every must be an integer ≥ 1, got {every!r}")
    if isinstance(record_rows, str):
        raise TypeError(f"record_rows must be a list of names, got {record_rows!r}: write [{record_rows!r}]")
    if not isinstance(rows_every, Integral) or rows_every < 0:
        raise ValueError(f"rows_every must be an integer ≥ 0 (0: never), got {rows_every!r}")
    if step is not None and (not isinstance(step, Integral) or step < 0):
        raise ValueError(f"step must be None or an integer ≥ 0, got {step!r}")
    if run is not None and not isinstance(run, str):
        raise TypeError(f"run must be a name, got {run!r}: write {str(run)!r}")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config must be a dict, got {type(config).__name__}")
    if paths is not None:
        whole = isinstance(paths, Mapping) and all(isinstance(of, Sequence | range) for of in paths.values())
        if not whole:
            raise TypeError(f"paths must be {{group: [row, …]}}, got {paths!r}")


def _check_names(argument: str, names: Sequence[str] | Mapping[str, Any], watched: Sequence[str]) -> None:
    unknown = [name for name in names if name not in watched]
    if unknown:
        raise ValueError(f"{argument} names {unknown}, but the watched groups are {list(watched)}")


def _one_number(name: str, value: float | Tensor) -> float | Tensor:
    """A logged value; a tensor as a copy that is not waited for."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
        if value.is_complex():
            raise TypeError(f"{name} must be one number, got a tensor of type {value.dtype}")
        return value.detach().reshape(()).clone()
    if isinstance(value, np.ndarray | np.bool_) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be one number, got {value!r}")
    return float(value)


# The optimizer and the process


def counted_steps(optimizer: Optimizer) -> int | None:
    """How many steps an optimizer has counted in its state; None if it does not count."""
    # Some third-party optimizers also keep plain numbers in the state, beside the states of parameters.
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    counts = [state["step"] for state in states if isinstance(state.get("step"), Real | Tensor)]
    return int(max(float(count) for count in counts)) if counts else None


def _decays(optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> dict[str, float]:
    """Weight decay of the groups that have one; 0 if the optimizer keeps the radius fixed."""
    found = {}
    for group in watched:
        decay = group.settings.get("weight_decay", 0)
        decay = decay.item() if isinstance(decay, Tensor) else float(decay or 0)
        if decay:
            found[group.name] = 0.0 if isinstance(optimizer, optim.AdamG) else decay
    return found


def _stop_at_exit(watch: "weakref.ref[Watch]", process: int) -> None:
    """At the end of the process that started it, without the other ranks; a fork does not stop its parent's watch."""
    still = watch()
    if still is not None and os.getpid() == process:
        still._stop(together=False)


def _merge(watched: Sequence[WatchedGroup]) -> "Merge":
    """Imported only if rows are sharded, since not every torch has what it needs."""
    from steradian.watching.distributed import Merge

    return Merge(watched)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

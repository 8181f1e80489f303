"""Follows any torch optimizer through its hooks and records what its steps do on the spheres."""

import atexit
import logging
import os
import platform
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.groups import Groups, is_sharded
from steradian.optim._base import RowOptimizer
from steradian.watch._block import Alert, Block
from steradian.watch._followed import Followed, follow, settings_of
from steradian.watch._handover import Handover
from steradian.watch._paths import Paths
from steradian.watch._station import Station
from steradian.watch._summary import summary
from steradian.watch.alerts import Alerts
from steradian.watch.records import read_run
from steradian.watch.sinks import Folder, sinks_of

if TYPE_CHECKING:
    import pandas as pd

    from steradian.watch._merge import Merge

__all__ = ["Watch", "watch"]

logger = logging.getLogger("steradian")

_SECONDS = 30.0


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
        optimizer: any torch optimizer.
        groups: what `find_groups` found. None: the param groups' own "rows".
        every: observe every so many steps.
        to: where records go besides `records()`: a folder, a callable log(dict, step), a SummaryWriter, a W&B run, a
            sink of `steradian.watch.sinks`, or several of them. An existing run's folder is continued.
        run: the run's name; None: the folder's.
        rows: names of groups all of whose rows are kept at every observed step.
        rows_every: all rows of all groups are kept at every so many observations, for histograms; 0: never.
        paths: {group: [row, …]} whose directions are kept. None: the first row of three groups.
        phenomena: measure (b1), (b2) and (c), which takes every step and five tensors of the size of the weights.
            None: where the optimizer does not tell its steps itself and `every` is 1.
        config: anything that JSON can hold, kept with the run.
        step: the number of the first step. None: what the optimizer's state counted so far.
    """

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
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an integer ≥ 1, got {every!r}")
        if groups is not None and not isinstance(groups, Groups):
            raise TypeError(f"groups must be what find_groups returned, got {type(groups).__name__}")
        self.optimizer = optimizer
        self.every = every
        self.config = dict(config or {})
        self.followed = follow(optimizer, groups)
        self.names = self._order = tuple(entry.name for entry in self.followed)
        self._check_names("rows", rows)
        self._check_names("paths", paths or ())
        self.sharded = any(is_sharded(param) for entry in self.followed for param in entry.params)
        self.silent = _rank() != 0 and not self.sharded
        self.sinks = sinks_of(to) if _rank() == 0 else []
        folder = next((sink.store.folder for sink in self.sinks if isinstance(sink, Folder)), None)
        self.run = run or (folder.name if folder is not None else type(optimizer).__name__)
        if phenomena is None:
            phenomena = every == 1 and not isinstance(optimizer, RowOptimizer)
        devices = dict.fromkeys(entry.device for entry in self.followed)
        self.stations = [
            Station(optimizer, [e for e in self.followed if e.device == device], phenomena=phenomena)
            for device in devices
        ]
        self.followed = [entry for station in self.stations for entry in station.followed]
        self.names = tuple(entry.name for entry in self.followed)
        merge = _merge(self.followed) if self.sharded else None
        self._handover = Handover(self.run, self.stations, rows=frozenset(rows), rows_every=rows_every, merge=merge)
        in_files = any(isinstance(sink, Folder) for sink in self.sinks)
        self._paths = Paths(self.followed, paths if paths is not None or in_files else {}, rank=_rank())
        self._alerts = Alerts(self._decays())
        self._asked_step = step
        self._all_names = {id(p): name for name, p in (groups.params if groups is not None else {}).items()}
        self._all_names |= {id(p): name for e in self.followed for name, p in zip(e.names, e.params, strict=True)}
        self._param_groups = optimizer.param_groups
        self._calls: int | None = None
        self._looking = self._begun = False
        self._cuda = any(station.device.type == "cuda" for station in self.stations)
        self._blocks: list[Block] = []
        self._last: Block | None = None
        self._handles: list[Any] = []
        self._flushed_at = time.monotonic()
        self.error: Exception | None = None
        self.running = False

    # Start and stop

    def start(self) -> "Watch":
        """Begin to follow; `with watch(…)` does it for you."""
        if self.running:
            raise RuntimeError("this watch is already running")
        if self.silent:
            self.running = True
            return self
        about = self.about()
        for k, sink in enumerate(self.sinks):
            try:
                sink.open(about)
            except BaseException:
                for opened in self.sinks[:k]:
                    opened.close()
                raise
        for station in self.stations:
            station.source.open()
        # Dynamo is not to look into the hooks of a compiled step.
        before, after = torch.compiler.disable(self._before_hook), torch.compiler.disable(self._after_hook)
        self._handles = [
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
        self.running = False
        if not self.silent:
            atexit.unregister(self._at_exit)
        for handle in self._handles:
            handle.remove()
        if not self.silent:
            with self._guarded():
                self._handover.send()
                self._settle(wait=True, together=together)
            for station in self.stations:
                with self._guarded():
                    station.source.close()
        for sink in self.sinks:
            with self._guarded():
                sink.close()

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
        with self._guarded():
            self._before()

    def _after_hook(self, *_: Any) -> None:
        with self._guarded():
            self._after()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a step that calls no hooks: `with watch.around(): graph.replay()` for a captured step.

        Start the watch before the capture, so that what it needs is captured too.
        """
        if self.silent or not self.running:
            yield
            return
        with self._guarded():
            self._before()
        yield
        with self._guarded():
            self._after()

    def _before(self) -> None:
        if (self._cuda and torch.cuda.is_current_stream_capturing()) or not self.running:
            return
        if self._calls is None:
            self._calls = self._first_step()
        if self.optimizer.param_groups is not self._param_groups:
            self._follow_settings()
        self._looking = self._calls % self.every == 0
        self._begun = True
        for station in self.stations:
            if self._looking or station.source.each_step:
                station.source.before()

    def _after(self) -> None:
        if not self._begun:
            return
        assert self._calls is not None
        self._begun = False
        for station in self.stations:
            station.note_skip()
            if not self._looking and station.source.each_step:
                station.source.after(station.scratch)
        if self._looking:
            self._handover.observe(self._calls)
            self._paths.follow(self._handover)
        self._calls += 1
        late = not self.sharded and time.monotonic() - self._flushed_at > _SECONDS
        if self._handover.full or (late and not self._handover.empty):
            self._flushed_at = time.monotonic()
            self._handover.send()
        self._settle(wait=self.sharded and self._handover.empty)

    def log(self, values: Mapping[str, float | Tensor] | None = None, **named: float | Tensor) -> None:
        """Record numbers of the run as a whole, such as a loss, at the last step.

        Args:
            values: by name; tensors with one number are not waited for.
            **named: the same.
        """
        step = max(0, (self._first_step() if self._calls is None else self._calls) - 1)
        for name, value in {**(values or {}), **named}.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
                value = value.detach().reshape(()).clone()
            else:
                value = float(value)
            if not self.silent:
                self._handover.log(step, name, value)

    # What it hands over

    def flush(self) -> None:
        """Record everything observed so far; waits for it. Under FSDP2 all ranks must call it together."""
        self._handover.send()
        self._settle(wait=True)

    def _settle(self, *, wait: bool = False, together: bool = True) -> None:
        """Hand what has arrived to the sinks."""
        for block in self._handover.blocks(wait=wait, together=together):
            self._last = block if len(block.steps) else self._last
            if not any(isinstance(sink, Folder) for sink in self.sinks):
                self._blocks.append(block)
            for sink in self.sinks:
                with self._guarded(fatal=False):
                    sink.write(block)
            alerts = self._alerts.look(block)
            for kind in dict.fromkeys(alert.kind for alert in alerts):
                same = [alert for alert in alerts if alert.kind == kind]
                others = f" (and {len(same) - 1} more groups)" if len(same) > 1 else ""
                logger.warning("%s: %s%s", self.run, same[0], others)
            for alert in alerts:
                for sink in self.sinks:
                    with self._guarded(fatal=False):
                        sink.alert(alert)

    # What a user asks

    def records(self) -> "pd.DataFrame":
        """Everything recorded so far: run, step, group, quantity, statistic, value."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("records() needs pandas: pip install 'steradian[lab]'; latest() does not") from error

        if self.running:
            self.flush()
        folder = next((sink for sink in self.sinks if isinstance(sink, Folder)), None)
        if folder is not None:
            folder.drain()
            return read_run(folder.store.folder).table
        tables = [block.table() for block in self._blocks]
        if not tables:
            return pd.DataFrame({name: [] for name in ("run", "step", "group", "quantity", "statistic", "value")})
        table = pd.concat([table.astype({"quantity": str}) for table in tables], ignore_index=True)
        return table.astype({"quantity": "category"})

    def latest(self) -> dict[str, dict[str, dict[str, float]]]:
        """The last observed step: group → quantity → statistic → value."""
        if self.running:
            self.flush()
        found = self._last.at(-1) if self._last is not None else {}
        return {name: found[name] for name in self._order if name in found}

    def summary(self) -> str:
        """The last observed step and the alerts, for a person."""
        if self.running:
            self.flush()
        return summary(self.run, self._last, self._order, self.alerts, self.missing)

    @property
    def next_step(self) -> int:
        """The number of the step that comes next; waits for the device where a gradient scaler may skip steps."""
        if self._calls is None:
            return self._first_step()
        return self._calls - max(int(station.skipped.item()) if station.may_skip else 0 for station in self.stations)

    @property
    def alerts(self) -> list[Alert]:
        """What was said so far."""
        return list(self._alerts.all)

    @property
    def missing(self) -> dict[str, str]:
        """Quantities that are not recorded, and why."""
        return {name: why for station in self.stations for name, why in station.missing().items()}

    def about(self) -> dict[str, Any]:
        """What is known of the run before its first step: the contents of run.json."""
        kind = type(self.optimizer)
        names = set(self._all_names.values()) - {name for entry in self.followed for name in entry.names}
        return {
            "run": self.run,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "every": self.every,
            "optimizer": {
                "name": f"{kind.__module__}.{kind.__qualname__}",
                "groups": settings_of(self.optimizer, self._all_names),
            },
            "groups": [entry.about() for entry in sorted(self.followed, key=lambda e: self._order.index(e.name))],
            "rest": sorted(names),
            "missing": self.missing,
            "config": self.config,
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": ", ".join(dict.fromkeys(_device_name(entry.device) for entry in self.followed)),
            },
        }

    # Choices

    def _check_names(self, argument: str, names: Sequence[str] | Mapping[str, Any]) -> None:
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise ValueError(f"{argument} names {unknown}, but the followed groups are {list(self.names)}")

    def _decays(self) -> dict[str, float]:
        """Weight decay by group; 0 where there is one that rows of fixed radius do not feel."""
        from steradian import optim

        found = {}
        for entry in self.followed:
            decay = entry.options.get("weight_decay", 0)
            decay = decay.item() if isinstance(decay, Tensor) else float(decay or 0)
            if decay:
                found[entry.name] = 0.0 if isinstance(self.optimizer, optim.AdamG) else decay
        return found

    def _follow_settings(self) -> None:
        """`load_state_dict` puts new param groups in the place of those that were followed."""
        before = {id(group): k for k, group in enumerate(self._param_groups)}
        self._param_groups = self.optimizer.param_groups
        for station in self.stations:
            station.options[:] = [self._param_groups[before[id(options)]] for options in station.options]
            for entry in station.followed:
                entry.options = self._param_groups[before[id(entry.options)]]

    def _first_step(self) -> int:
        """What the optimizer counted so far; this is read once."""
        if self._asked_step is not None:
            return self._asked_step
        counts = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        if counts:
            return int(max(float(count) for count in counts))
        folder = next((sink for sink in self.sinks if isinstance(sink, Folder)), None)
        if folder is not None and self.optimizer.state:
            steps = read_run(folder.store.folder).table["step"]
            return int(steps.max()) + 1 if len(steps) else 0
        return 0

    @contextmanager
    def _guarded(self, *, fatal: bool = True) -> Iterator[None]:
        """Training goes on whatever happens here."""
        try:
            yield
        except Exception as error:
            first, self.error = self.error is None, self.error or error
            if first:
                logger.exception(
                    "watching %s failed%s", self.run, ": the watch ends, training goes on" if fatal else ""
                )
            if fatal:
                for handle in self._handles:
                    handle.remove()
                self._begun = False


def _stop_at_exit(watch: "weakref.ref[Watch]", process: int) -> None:
    """At the end of the process that started it: other ranks may never come here, and forks have their own ends."""
    still = watch()
    if still is not None and os.getpid() == process:
        still._stop(together=False)


def _merge(followed: Sequence[Followed]) -> "Merge":
    """What brings sharded rows together; imported where rows are sharded, since not every torch has what it needs."""
    from steradian.watch._merge import Merge

    return Merge(followed)


def _rank() -> int:
    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

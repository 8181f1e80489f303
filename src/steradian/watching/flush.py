"""From the buffers to the sinks: observed steps are reduced, copied to the host without waiting, and handed on."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from operator import attrgetter, is_not, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from steradian.watching.alerts import Alerts
from steradian.watching.buffer import Buffer, evenly
from steradian.watching.paths import Paths
from steradian.watching.records import STATISTICS, Block, cause_of, causes
from steradian.watching.sinks import Folder, Memory, Sink
from steradian.watching.statistics import Imbalance
from steradian.watching.verdict import History

if TYPE_CHECKING:
    import pandas as pd

    from steradian.watching.distributed import Merge

__all__ = ["Flush", "Output"]

Array = NDArray[Any]
_Part = tuple[tuple[str, ...], Tensor, Tensor, dict[str, Tensor], Tensor]
"""Of some observed steps: quantities, statistics, some rows, all rows of chosen groups, and the skipped steps."""
logger = logging.getLogger("steradian")
_GRAD = attrgetter("grad")
_STEPS, _NUMBERS = 64, 2**22
"""Reduced steps, or numbers of groups whose rows are recorded, that are copied to the host together."""


class _Copy:
    """Nested lists and dicts whose tensors are on their way to the host: one asynchronous copy per device and dtype."""

    def __init__(self, content: Any) -> None:
        self._leaves, self._form = tree_flatten(content)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for k, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                kinds.setdefault((leaf.device, leaf.dtype), []).append(k)
        self._copies: list[tuple[list[int], Tensor, Any]] = []
        for (device, _), places in kinds.items():
            flat, done = torch.cat([self._leaves[k].detach().reshape(-1) for k in places]), None
            host = flat
            if device.type == "cuda":
                with torch.cuda.device(device):
                    host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
                    host.copy_(flat, non_blocking=True)
                    done = torch.cuda.Event()
                    done.record()
            self._copies.append((places, host.cpu(), done))
            for k in places:
                self._leaves[k] = self._leaves[k].shape

    def ready(self) -> bool:
        """Whether everything has arrived."""
        return all(done is None or done.query() for _, _, done in self._copies)

    def content(self) -> Any:
        """The content with arrays for tensors; waits for what has not arrived."""
        for places, host, done in self._copies:
            if done is not None:
                done.synchronize()
            array, start = host.numpy() if host.dtype != torch.bfloat16 else host.float().numpy(), 0
            for k in places:
                size = self._leaves[k].numel()
                self._leaves[k] = array[start : start + size].reshape(self._leaves[k])
                start += size
        return tree_unflatten(self._leaves, self._form)


class Flush:
    """Collects observed steps in the buffers, and makes blocks of them.

    Args:
        run: the run's name.
        buffers: one for each source.
        record_rows: names of groups whose rows are recorded at every observation.
        rows_every: some rows of all groups are recorded once in this many observations; 0: never.
        merges: for each buffer, what gathers its rows from several ranks; None if no row is sharded.
        paths: rows whose directions are recorded.
        imbalance: of the pairs, if there are any.
    """

    def __init__(
        self,
        run: str,
        buffers: Sequence[Buffer],
        *,
        record_rows: frozenset[str],
        rows_every: int,
        merges: "Sequence[Merge] | None",
        paths: Paths,
        imbalance: Imbalance | None = None,
    ) -> None:
        self.run, self.buffers, self.merges, self.paths = run, buffers, merges, paths
        self.imbalance = imbalance
        self.wants_pairs = imbalance is not None  # pairs were not measured since the last steps were sent
        self._imbalances: dict[int, dict[str, Tensor]] = {}  # by the number of observed steps that are sent before it
        self._last_step = -1  # the last observed one
        self.record_rows, self.rows_every = record_rows, rows_every
        self.names = tuple(group.name for buffer in buffers for group in buffer.watched)
        self.observations = 0
        self.complete = True  # no watched group is gone
        ends = list(accumulate(len(buffer.watched) for buffer in buffers))
        # The places of each buffer's groups among all.
        self._spans = [slice(end - len(buffer.watched), end) for buffer, end in zip(buffers, ends, strict=True)]
        self._params = [[param for group in buffer.watched for param in group.params] for buffer in buffers]
        self._room = min((buffer.steps for buffer in buffers), default=1)
        self.began = time.monotonic()  # when `seconds` is 0
        self.seconds = 0.0  # at the last observed step
        self._steps: list[int] = []
        self._active: list[list[bool]] = []
        self._seconds: list[float] = []  # at the observed steps that were not sent yet
        self._logged: list[tuple[int, str, float | Tensor, int | Tensor]] = []
        # Steps, active groups, steps whose rows are recorded and, for each buffer, what is recorded of it.
        self._reduced: list[tuple[list[int], Array, list[int], list[_Part]]] = []
        self._sent: deque[_Copy] = deque()

    # At every step

    @torch.no_grad()
    def observe(self, step: int, optimizer: Optimizer) -> None:
        """Write what this optimizer did in the step with this number to its buffers."""
        if not self._steps or self._steps[-1] != step:
            self._steps.append(step)
            self._last_step = step
            self._active.append([False] * len(self.names))
            self.seconds = time.monotonic() - self.began
            self._seconds.append(self.seconds)
            self.observations += 1
            self.paths.observe(self._n_reduced + len(self._steps) - 1, self.observations)
        for buffer, span, params in zip(self.buffers, self._spans, self._params, strict=True):
            if buffer.optimizer is optimizer:
                buffer.observe(len(self._steps) - 1)
                # This may run at every step, so there is no Python loop over parameters.
                usual = self.complete and all(map(is_not, map(_GRAD, params), repeat(None)))
                groups = buffer.watched
                self._active[-1][span] = [True] * len(groups) if usual else [group.active() for group in groups]
                for group in groups:
                    group.held = None

    def measure_pairs(self, step: int) -> None:
        """Measure the imbalance of the pairs, if the step that was just taken is observed and not sent yet."""
        slot = self._n_reduced + len(self._steps) - 1
        if self.imbalance is not None and step == self._last_step and slot >= 0 and slot not in self._imbalances:
            self._imbalances[slot] = self.imbalance.measure()
            self.wants_pairs = False

    def log(self, step: int, name: str, value: float | Tensor) -> None:
        """Add a number of the run as a whole."""
        skipped = next((buffer.skipped.clone() for buffer in self.buffers if buffer.may_skip), 0)
        self._logged.append((step, name, value, skipped))

    @property
    def full(self) -> bool:
        """Whether a buffer is full."""
        return len(self._steps) >= self._room

    @property
    def pending(self) -> bool:
        """Whether something was sent from which no block was made yet."""
        return bool(self._sent)

    @property
    def _n_reduced(self) -> int:
        return sum(len(steps) for steps, *_ in self._reduced)

    def send(self, *, everything: bool = True) -> None:
        """Reduce the numbers in the buffers on their devices, and start to copy the results to the host.

        Args:
            everything: copy even a few steps; otherwise they may wait for more, since a block has a price of its own.
        """
        if self._steps:
            self._reduce()
        of_chosen = [rows for *_, parts in self._reduced for part in parts for rows in part[3].values()]
        many = self._n_reduced >= _STEPS or sum(rows.numel() for rows in of_chosen) >= _NUMBERS
        enough = many or self.merges is not None
        if not (self._reduced or self._logged) or not (everything or enough):
            return
        n_groups = len(self.names)
        steps = np.array([step for steps, *_ in self._reduced for step in steps], dtype=np.int64)
        active = np.concatenate([active for _, active, *_ in self._reduced] or [np.zeros((0, n_groups), dtype=bool)])
        whole = [k for _, _, whole, _ in self._reduced for k in whole]
        parts = [_joined(each) for each in zip(*(parts for *_, parts in self._reduced), strict=True)]
        pairs, self._imbalances = self._imbalances, {}
        self._sent.append(_Copy((steps, active, self._seconds, whole, parts, self._logged, self.paths.take(), pairs)))
        self._reduced, self._logged, self._seconds = [], [], []
        self.wants_pairs = self.imbalance is not None

    def _reduce(self) -> None:
        """Reduce what is in the buffers, on their devices."""
        count, start = len(self._steps), self._n_reduced
        active = np.array(self._active, dtype=bool)
        first = self.observations - count
        whole = [k for k in range(count) if self.rows_every > 0 and (first + k) % self.rows_every == 0]
        parts: list[_Part] = []
        for buffer, span in zip(self.buffers, self._spans, strict=True):
            names, statistics, rows = buffer.reduce(count, torch.from_numpy(active[:, span].copy()))
            # A slice, because indices in a list would be copied to the device and waited for.
            some = rows[slice(whole[0], None, self.rows_every) if whole else slice(0)][:, :, buffer.single]
            chosen = {
                group.name: rows[:, :, group.span].clone() for group in buffer.watched if group.name in self.record_rows
            }
            rows_of = (some, chosen) if self.merges is None else (rows, {})
            parts.append((names, statistics, *rows_of, buffer.skips[:count].clone()))
        self._reduced.append((self._steps, active, [start + k for k in whole], parts))
        self._steps, self._active = [], []

    # On the host

    def blocks(self, *, wait: bool = False, together: bool = True) -> Iterator[Block]:
        """Blocks of what has arrived.

        Args:
            wait: for what has not arrived.
            together: if rows are merged, all ranks take part.
        """
        while self._sent and (wait or self._sent[0].ready()):
            block = self._block(*self._sent.popleft().content(), together=together)
            if block is not None:
                yield block

    def _block(
        self,
        steps: Array,
        active: Array,
        seconds: list[float],
        whole: Any,
        parts: Any,
        logged: Any,
        paths: Any,
        pairs: Any,
        *,
        together: bool,
    ) -> Block | None:
        """What `send` has sent as a block; None on other ranks than 0."""
        quantities = tuple(dict.fromkeys(name for names, *_ in parts for name in names))
        shape = (len(steps), len(quantities), len(self.names), len(STATISTICS))
        dtype = np.result_type(np.float32, *(statistics for _, statistics, *_ in parts))
        values, defined = np.full(shape, np.nan, dtype), np.zeros(shape[1:3], dtype=bool)
        taken, late, active = np.ones(len(steps), dtype=bool), np.zeros(len(steps), dtype=np.int64), active.copy()
        rows: list[tuple[int, str, Array, Array]] = []
        elsewhere = False
        for k, (names, statistics, some, chosen, skips) in enumerate(parts):
            span, at = self._spans[k], [quantities.index(name) for name in names]
            taken, late = taken & (skips[:, 0] == 0), np.maximum(late, skips[:, 1].astype(np.int64))
            if self.merges is not None:
                merged = self.merges[k](some, active[:, span], together=together)
                if merged is None:
                    elsewhere = True
                    continue
                statistics, active[:, span], chosen = merged
            values[:, at, span] = statistics
            defined[at, span] = self.buffers[k].recorded(names)
            start = 0
            for group, numbers in zip(self.buffers[k].watched, self.buffers[k].single_rows, strict=True):
                every, found = group.name in self.record_rows, some[:, :, start : start + len(numbers)]
                start += len(numbers)
                mine = range(len(steps)) if every else whole
                if mine and (every or self.merges is not None):
                    found = chosen[group.name][mine]
                    numbers = np.arange(found.shape[2]) if every else evenly(found.shape[2])
                    found = found[:, :, numbers]
                for i, each in zip(mine, found, strict=False):
                    spread = np.full((len(quantities), len(numbers)), np.nan, dtype)
                    spread[at] = each
                    rows.append((i, group.name, numbers, spread))
        if elsewhere:
            return None
        slots, points = paths
        chosen_rows = zip(self.paths.chosen, points, strict=False)
        directions = [(group.name, row, _directions(of)) for (group, row), of in chosen_rows]
        step_of = (steps - late).tolist()
        return Block(
            run=self.run,
            steps=(steps - late)[taken],
            groups=self.names,
            quantities=quantities,
            values=values[taken],
            active=active[taken],
            defined=defined,
            seconds=np.array(seconds)[taken],
            logged=[(max(0, step - int(skipped)), name, float(value)) for step, name, value, skipped in logged],
            rows=[(step_of[k], n, r, v) for k, n, r, v in rows if taken[k] and active[k, self.names.index(n)]],
            paths=[
                (step_of[k], name, row, u[i]) for i, k in enumerate(slots) for name, row, u in directions if taken[k]
            ],
            pairs=[(step_of[k], name, of) for k, found in pairs.items() if taken[k] for name, of in found.items()],
        )


def _joined(parts: Sequence[_Part]) -> _Part:
    """What was recorded of one buffer, from several reductions; NaN for quantities that one of them did not have."""
    names = tuple(dict.fromkeys(name for part in parts for name in part[0]))

    def cat(tensors: Iterable[Tensor]) -> Tensor:
        wide = []
        for (own, *_), tensor in zip(parts, tensors, strict=True):
            if own != names:
                full = tensor.new_full((len(tensor), len(names), *tensor.shape[2:]), math.nan)
                full[:, [names.index(name) for name in own]] = tensor
                tensor = full
            wide.append(tensor)
        return torch.cat(wide)

    _, statistics, some, chosen, skips = zip(*parts, strict=True)
    groups = {name: cat(each[name] for each in chosen) for name in chosen[0]}
    return names, cat(statistics), cat(some), groups, torch.cat(skips)


def _directions(rows: Array) -> Array:
    """The directions of rows, (points, d); NaN for a row of length 0 or infinity, which has none."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    directions: Array = (rows / np.where((lengths == 0) | np.isinf(lengths), np.nan, lengths)).astype(rows.dtype)
    return directions


class Output:
    """Hands every block to every sink, keeps what a verdict needs, and raises alerts.

    Args:
        sinks: where blocks go.
        alerts: what checks them.
        fail: called with an exception of a sink, so that the other sinks still get theirs.
    """

    def __init__(self, sinks: Sequence[Sink], alerts: Alerts, fail: Callable[[Exception], None]) -> None:
        self.sinks, self.alerts, self._fail = sinks, alerts, fail
        self.last: Block | None = None  # the last block with a step
        self.history = History()
        self.folder = next((sink for sink in sinks if isinstance(sink, Folder)), None)
        self._memory = Memory()  # unless there is a folder
        self._logged: set[str] = set()  # causes of alerts

    def open(self, about: Mapping[str, Any]) -> None:
        """Open all sinks, or none."""
        for k, sink in enumerate(self.sinks):
            try:
                sink.open(about)
            except BaseException:
                for opened in self.sinks[:k]:
                    opened.close()
                raise

    def write(self, block: Block) -> None:
        """Hand on one block."""
        if len(block.steps):
            self.last = block
            self.history.add(block)
        if self.folder is None:
            self._memory.write(block)
        self._each(methodcaller("write", block))
        alerts = self.alerts.check(block)
        if alerts:
            for cause in causes(alert for alert in alerts if cause_of(alert) not in self._logged):
                logger.warning("%s: %s", block.run, cause.text)
            self._logged.update(map(cause_of, alerts))
        for alert in alerts:
            self._each(methodcaller("alert", alert))

    def close(self) -> None:
        """Close all sinks."""
        self._each(methodcaller("close"))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            try:
                call(sink)
            except Exception as error:
                self._fail(error)

    @property
    def seconds(self) -> float:
        """Time that writing files took so far, in a thread of its own."""
        return self.folder.seconds if self.folder is not None else 0.0

    def table(self) -> "pd.DataFrame":
        """Everything that was written: run, step, group, quantity, statistic, value."""
        return self._memory.table() if self.folder is None else self.folder.table()

"""From the buffers to the sinks: observed steps are reduced, copied to the host without waiting, and handed on."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import attrgetter, is_not, methodcaller
from typing import Any, NamedTuple

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

__all__ = ["Flush", "Output"]

Array = NDArray[Any]
logger = logging.getLogger("steradian")
_GRAD = attrgetter("grad")
_STEPS, _NUMBERS = 64, 2**22  # reduced steps, or numbers of recorded rows, that are copied to the host together


class _Part(NamedTuple):
    """What is recorded of one buffer, for some observed steps."""

    quantities: tuple[str, ...]
    statistics: Any  # (steps, quantities, groups, statistics)
    some: Any  # some rows of all groups, at some of the steps; all rows at all steps if they are on several ranks
    chosen: dict[str, Any]  # all rows of the groups that the user chose
    skips: Any  # (steps, 2): whether a gradient scaler skipped the step, and how many it skipped before


class _Reduced(NamedTuple):
    """Some observed steps: their numbers, the active groups, the steps whose rows are recorded, the buffers' parts."""

    steps: list[int]
    active: Array
    whole: list[int]
    parts: list[_Part]


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
            host = flat.to("cpu", non_blocking=device.type == "cuda")  # to pinned memory, which is not waited for
            if device.type == "cuda":
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(device))
            self._copies.append((places, host, done))
            for k in places:
                self._leaves[k] = self._leaves[k].shape

    def ready(self) -> bool:
        return all(done is None or done.query() for _, _, done in self._copies)

    def content(self) -> Any:
        """The content with arrays for tensors; waits for what has not arrived."""
        for places, host, done in self._copies:
            if done is not None:
                done.synchronize()
            host = host.float() if host.dtype == torch.bfloat16 else host
            parts = host.split([self._leaves[k].numel() for k in places])
            for k, part in zip(places, parts, strict=True):
                self._leaves[k] = part.reshape(self._leaves[k]).numpy()
        return tree_unflatten(self._leaves, self._form)


@dataclass(eq=False)
class Flush:
    """Collects observed steps in the buffers, one for each source, and makes blocks of them.

    Rows of the groups in `record_rows` are recorded at every observation, some rows of all groups at every
    `rows_every`-th one (0: never). Sharded rows are gathered on rank 0.
    """

    run: str
    buffers: Sequence[Buffer]
    record_rows: frozenset[str]
    rows_every: int
    paths: Paths
    imbalance: Imbalance | None

    def __post_init__(self) -> None:
        self.sharded = any(group.sharded for buffer in self.buffers for group in buffer.watched)
        self.names = tuple(group.name for buffer in self.buffers for group in buffer.watched)
        self.observations = 0
        self.complete = True  # no watched group is gone
        ends = list(accumulate(len(buffer.watched) for buffer in self.buffers))
        # The places of each buffer's groups among all.
        self._spans = [slice(end - len(buffer.watched), end) for buffer, end in zip(self.buffers, ends, strict=True)]
        self._params = [[param for group in buffer.watched for param in group.params] for buffer in self.buffers]
        self._room = min((buffer.steps for buffer in self.buffers), default=1)
        self.began = time.monotonic()  # when `seconds` is 0
        self.seconds = 0.0  # at the last observed step
        # In the buffers:
        self._steps: list[int] = []
        self._active: list[list[bool]] = []
        # Since steps were sent:
        self._reduced: list[_Reduced] = []
        self._seconds: list[float] = []
        self._logged: list[tuple[int, str, float | Tensor, int | Tensor]] = []
        self._imbalances: dict[int, dict[str, Tensor]] = {}  # by step
        self._last_step: int | None = None
        self.sent: deque[_Copy] = deque()  # from which no block was made yet

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
            self.paths.observe(step, self.observations)
        for buffer, span, params in zip(self.buffers, self._spans, self._params, strict=True):
            if buffer.optimizer is optimizer:
                buffer.observe(len(self._steps) - 1)
                # This may run at every step, so there is no Python loop over parameters.
                have_gradients = buffer.source.all_step or all(map(is_not, map(_GRAD, params), repeat(None)))
                usual = self.complete and have_gradients
                groups = buffer.watched
                self._active[-1][span] = [True] * len(groups) if usual else [group.active() for group in groups]
                if buffer.source.beforehand:  # only then gradients are held
                    for group in groups:
                        group.held = None

    def measure_pairs(self, step: int) -> None:
        """Measure the imbalance of the pairs, if the step that was just taken is observed and not sent yet."""
        if self.imbalance is not None and step == self._last_step and step not in self._imbalances:
            self._imbalances[step] = self.imbalance.measure()

    def log(self, step: int, name: str, value: float | Tensor) -> None:
        """Add a number of the run as a whole."""
        skipped = next((buffer.skipped.clone() for buffer in self.buffers if buffer.may_skip), 0)
        self._logged.append((step, name, value, skipped))

    @property
    def full(self) -> bool:
        """Whether a buffer is full."""
        return len(self._steps) >= self._room

    @property
    def wants_pairs(self) -> bool:
        """Whether pairs were not measured since steps were sent."""
        return self.imbalance is not None and not self._imbalances

    def send(self, *, everything: bool = True) -> None:
        """Reduce the numbers in the buffers on their devices, and start to copy the results to the host.

        Unless `everything` is sent, a few steps wait for more, since a block has a price of its own.
        """
        if self._steps:
            self._reduce()
        of_chosen = [rows for each in self._reduced for part in each.parts for rows in part.chosen.values()]
        many = len(self._seconds) >= _STEPS or sum(rows.numel() for rows in of_chosen) >= _NUMBERS
        if not (self._reduced or self._logged) or not (everything or many or self.sharded):
            return
        content = self._reduced, self._seconds, self._logged, self.paths.take(), self._imbalances
        self.sent.append(_Copy(content))
        self._reduced, self._seconds, self._logged, self._imbalances = [], [], [], {}
        self._last_step = None

    def _reduce(self) -> None:
        active = np.array(self._active, dtype=bool)
        count, first = len(self._steps), self.observations - len(self._steps)
        whole = [k for k in range(count) if self.rows_every > 0 and (first + k) % self.rows_every == 0]
        # A slice, because indices in a list would be copied to the device and waited for.
        at = slice(whole[0], None, self.rows_every) if whole else slice(0)
        parts = []
        for buffer, span in zip(self.buffers, self._spans, strict=True):
            quantities, statistics, rows = buffer.reduce(count, torch.from_numpy(active[:, span].copy()))
            some, chosen = rows, {}
            if not self.sharded:
                some = rows[at][:, :, buffer.single]
                groups = [group for group in buffer.watched if group.name in self.record_rows]
                chosen = {group.name: rows[:, :, group.span].clone() for group in groups}
            parts.append(_Part(quantities, statistics, some, chosen, buffer.skips[:count].clone()))
        self._reduced.append(_Reduced(self._steps, active, whole, parts))
        self._steps, self._active = [], []

    # On the host

    def blocks(self, *, wait: bool = False, together: bool = True) -> Iterator[Block]:
        """Blocks of what has arrived, or of everything if it may `wait`; `together`: all ranks take part in it."""
        while self.sent and (wait or self.sent[0].ready()):
            block = self._block(self.sent.popleft().content(), together=together)
            if block is not None:
                yield block

    def _block(self, content: Any, *, together: bool) -> Block | None:
        """What `send` has sent as a block; None on other ranks than 0."""
        reduced, seconds, logged, paths, pairs = content
        steps = np.array([step for each in reduced for step in each.steps], dtype=np.int64)
        parts = [part for each in reduced for part in each.parts]
        quantities = tuple(dict.fromkeys(name for part in parts for name in part.quantities))
        shape = (len(steps), len(quantities), len(self.names), len(STATISTICS))
        values = np.full(shape, np.nan, np.result_type(np.float32, *(part.statistics for part in parts)))
        active, defined = np.zeros((shape[0], shape[2]), dtype=bool), np.zeros(shape[1:3], dtype=bool)
        taken, late = np.ones(len(steps), dtype=bool), np.zeros(len(steps), dtype=np.int64)
        rows: list[tuple[int, str, Array, Array]] = []
        elsewhere, first = False, 0
        for each in reduced:
            here = slice(first, first + len(each.steps))
            for buffer, span, part in zip(self.buffers, self._spans, each.parts, strict=True):
                taken[here] &= part.skips[:, 0] == 0
                late[here] = np.maximum(late[here], part.skips[:, 1].astype(np.int64))
                statistics, stepped, chosen = part.statistics, each.active[:, span], part.chosen
                if not self.sharded:
                    ends = np.cumsum([len(numbers) for numbers in buffer.single_rows])
                    some = np.split(part.some, ends[:-1], axis=2)
                else:
                    from steradian.watching.distributed import merged  # not every torch has what it needs

                    of_all = merged(buffer.watched, part.some, stepped, together=together)
                    if of_all is None:
                        elsewhere = True
                        continue
                    statistics, stepped, chosen = of_all
                    some = [of[each.whole][:, :, evenly(of.shape[2])] for of in chosen.values()]
                at = [quantities.index(name) for name in part.quantities]
                values[here, at, span], active[here, span] = statistics, stepped
                defined[at, span] = buffer.recorded(part.quantities)
                for g, group in enumerate(buffer.watched):
                    every = group.name in self.record_rows
                    numbers = np.arange(group.total_rows) if every else evenly(group.total_rows)
                    slots, found = (range(len(each.steps)), chosen[group.name]) if every else (each.whole, some[g])
                    for slot, numbers_of_rows in zip(slots, found, strict=True):
                        if stepped[slot, g]:
                            spread = np.full((len(quantities), len(numbers)), np.nan, values.dtype)
                            spread[at] = numbers_of_rows
                            rows.append((first + slot, group.name, numbers, spread))
            first = here.stop
        if elsewhere:
            return None
        step_of = (steps - late).tolist()
        slot_of = {step: k for k, step in enumerate(steps.tolist()) if taken[k]}
        path_slots = [(i, slot_of[step]) for i, step in enumerate(paths[0]) if step in slot_of]
        chosen_rows = list(zip(self.paths.chosen, map(_directions, paths[1]), strict=False))
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
            rows=[(step_of[k], *of) for k, *of in rows if taken[k]],
            paths=[(step_of[k], group.name, row, u[i]) for i, k in path_slots for (group, row), u in chosen_rows],
            pairs=[(step_of[slot_of[step]], *of) for step, f in pairs.items() if step in slot_of for of in f.items()],
        )


def _directions(rows: Array) -> Array:
    """The directions of rows, (points, d); NaN for a row of length 0 or infinity, which has none."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    return (rows / np.where((lengths == 0) | np.isinf(lengths), np.nan, lengths)).astype(rows.dtype)


class Output:
    """Hands every block to every sink, keeps what a verdict needs, and raises alerts.

    `fail` is called with an exception of a sink, so that the other sinks still get theirs.
    """

    def __init__(self, sinks: Sequence[Sink], alerts: Alerts, fail: Callable[[Exception], None]) -> None:
        self.sinks, self.alerts, self._fail = sinks, alerts, fail
        self.last: Block | None = None  # the last block with a step
        self.history = History()
        self.folder = next((sink for sink in sinks if isinstance(sink, Folder)), None)
        self.store = self.folder or Memory()

    def open(self, about: Mapping[str, Any]) -> None:
        """Open all sinks, or none."""
        with ExitStack() as opened:
            for sink in self.sinks:
                sink.open(about)
                opened.callback(sink.close)
            opened.pop_all()

    def write(self, block: Block) -> None:
        """Hand on one block."""
        if self.folder is None:
            self.store.write(block)
        self._each(methodcaller("write", block))
        if not len(block.steps):
            return
        self.last = block
        self.history.add(block)
        known = set(map(cause_of, self.alerts.raised))
        alerts = self.alerts.check(block)
        new = [alert for alert in alerts if cause_of(alert) not in known]
        for cause in causes(new) if new else ():
            logger.warning("%s: %s", block.run, cause.text)
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

"""From the buffers to the sinks: observed steps are reduced, copied to the host without waiting, and handed on."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from operator import attrgetter, is_not, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from steradian.watching.alerts import Alerts
from steradian.watching.buffer import SINGLE, Buffer
from steradian.watching.paths import Paths
from steradian.watching.records import COLUMNS, STATISTICS, Block, cause_of, causes, read_run
from steradian.watching.sinks import Folder, Sink
from steradian.watching.verdict import History

if TYPE_CHECKING:
    import pandas as pd

    from steradian.watching.distributed import Merge

__all__ = ["Flush", "Output"]

Array = NDArray[Any]
Fail = Callable[[Exception], None]
logger = logging.getLogger("steradian")

_GRAD = attrgetter("grad")
_MOST = 2**25
"""Numbers that are kept in memory if there is no folder."""
_UNREAD = 2**20
"""Numbers of blocks that wait until a verdict needs them."""


class _Copy:
    """Tensors on their way to the host: one asynchronous copy for each device and dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for k, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(k)
        self.copies: list[tuple[list[int], Tensor, Any]] = []
        for (device, _), chosen in kinds.items():
            flat = torch.cat([tensors[k].detach().reshape(-1) for k in chosen])
            if device.type != "cuda":
                self.copies.append((chosen, flat.cpu(), None))
                continue
            with torch.cuda.device(device):
                host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
                host.copy_(flat, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            self.copies.append((chosen, host, done))

    def ready(self) -> bool:
        """Whether everything has arrived."""
        return all(done is None or done.query() for _, _, done in self.copies)

    def arrays(self) -> Iterator[Array]:
        """The tensors as arrays, in their order; waits for what has not arrived."""
        found: dict[int, Array] = {}
        for chosen, host, done in self.copies:
            if done is not None:
                done.synchronize()
            array, start = host.numpy() if host.dtype != torch.bfloat16 else host.float().numpy(), 0
            for k in chosen:
                size = int(np.prod(self.shapes[k], dtype=np.int64))
                found[k] = array[start : start + size].reshape(self.shapes[k])
                start += size
        return (found[k] for k in range(len(self.shapes)))


@dataclass(eq=False)
class _Sent:
    """Observed steps whose numbers are on their way to the host."""

    copy: _Copy
    steps: NDArray[np.int64]
    active: NDArray[np.bool_]
    quantities: list[tuple[str, ...]]
    whole: list[int]
    logged: list[tuple[int, str, float | None, bool]]
    paths: list[int]


class Flush:
    """Collects observed steps in the buffers, and makes blocks of them.

    Args:
        run: the run's name.
        buffers: one for each device.
        record_rows: names of groups whose rows are recorded at every observation.
        rows_every: some rows of all groups are recorded once in this many observations; 0: never.
        merges: for each buffer, what gathers its rows from several ranks; None if no row is sharded.
        paths: rows whose directions are recorded.

    Attributes:
        complete: no watched group is gone.
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
    ) -> None:
        self.run = run
        self.buffers = buffers
        self.watched = [group for buffer in buffers for group in buffer.watched]
        self.names = tuple(group.name for group in self.watched)
        self.record_rows, self.rows_every = record_rows, rows_every
        self.merges = merges
        self.paths = paths
        self.observations = 0
        self.complete = True
        starts = accumulate((len(buffer.watched) for buffer in buffers), initial=0)
        self._places = {id(buffer): start for buffer, start in zip(buffers, starts, strict=False)}
        self._params = {id(buffer): [p for group in buffer.watched for p in group.params] for buffer in buffers}
        self._room = min((buffer.steps for buffer in buffers), default=1)
        self._steps: list[int] = []
        self._active: list[list[bool]] = []
        self._logged: list[tuple[int, str, float | Tensor, Tensor | None]] = []
        self._sent: deque[_Sent] = deque()

    # At every step

    @torch.no_grad()
    def observe(self, step: int, optimizer: Optimizer) -> None:
        """Write what this optimizer did in the step with this number to its buffers."""
        if not self._steps or self._steps[-1] != step:
            self._steps.append(step)
            self._active.append([False] * len(self.watched))
            self.observations += 1
            self.paths.observe(len(self._steps) - 1, self.observations)
        slot, active = len(self._steps) - 1, self._active[-1]
        for buffer in self.buffers:
            if buffer.optimizer is optimizer:
                buffer.observe(slot)
                # This may run at every step, so there is no Python loop over parameters.
                usual = self.complete and all(map(is_not, map(_GRAD, self._params[id(buffer)]), repeat(None)))
                start, count = self._places[id(buffer)], len(buffer.watched)
                active[start : start + count] = [True] * count if usual else [g.active() for g in buffer.watched]
                for group in buffer.watched:
                    group.held = None

    def log(self, step: int, name: str, value: float | Tensor) -> None:
        """Add a number of the run as a whole."""
        skipped = next((buffer.skipped.clone() for buffer in self.buffers if buffer.may_skip), None)
        self._logged.append((step, name, value, skipped))

    @property
    def full(self) -> bool:
        """Whether a buffer is full."""
        return len(self._steps) >= self._room

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._steps and not self._logged

    @property
    def pending(self) -> bool:
        """Whether something was sent from which no block was made yet."""
        return bool(self._sent)

    # On the devices

    def send(self) -> None:
        """Reduce the numbers in the buffers, and start to copy the result to the host."""
        if self.empty:
            return
        count = len(self._steps)
        active = np.array(self._active, dtype=bool).reshape(count, len(self.watched))
        first = self.observations - count
        whole = [k for k in range(count) if self.rows_every > 0 and (first + k) % self.rows_every == 0]
        tensors, quantities = self._reduce(active, whole) if count else ([], [])
        tensors += [t for _, _, value, skipped in self._logged for t in (value, skipped) if isinstance(t, Tensor)]
        paths, points = self.paths.take()
        logged = [
            (step, name, None if isinstance(value, Tensor) else float(value), skipped is not None)
            for step, name, value, skipped in self._logged
        ]
        steps = np.array(self._steps, dtype=np.int64)
        self._sent.append(_Sent(_Copy(tensors + points), steps, active, quantities, whole, logged, paths))
        self._steps, self._active, self._logged = [], [], []

    def _reduce(self, active: NDArray[np.bool_], whole: list[int]) -> tuple[list[Tensor], list[tuple[str, ...]]]:
        """For each buffer its statistics, rows and skipped steps, then the rows of each group in `record_rows`."""
        tensors: list[Tensor] = []
        quantities = []
        start, count = 0, len(active)
        for buffer in self.buffers:
            mine = torch.from_numpy(active[:, start : start + len(buffer.watched)].copy())
            start += len(buffer.watched)
            names, statistics, rows = buffer.reduce(count, mine)
            quantities.append(names)
            # A slice, because indices in a list would be copied to the device and waited for.
            some = rows[slice(whole[0], None, self.rows_every)][:, :, buffer.single] if whole else rows[:0]
            tensors += [statistics, some if self.merges is None else rows]
            tensors.append(buffer.skips[:count].clone() if buffer.may_skip else buffer.skips[:0])
            tensors += [rows[:, :, group.span] for group in buffer.watched if group.name in self.record_rows]
        return tensors, quantities

    # On the host

    def blocks(self, *, wait: bool = False, together: bool = True) -> Iterator[Block]:
        """Blocks of what has arrived.

        Args:
            wait: for what has not arrived.
            together: if rows are merged, all ranks take part.
        """
        while self._sent and (wait or self._sent[0].copy.ready()):
            block = self._block(self._sent.popleft(), together=together)
            if block is not None:
                yield block

    def _block(self, sent: _Sent, *, together: bool) -> Block | None:
        arrays = sent.copy.arrays()
        union = tuple(dict.fromkeys(name for names in sent.quantities for name in names))
        count = len(sent.steps)
        steps, taken, active = sent.steps, np.ones(count, dtype=bool), sent.active.copy()
        parts: list[Array] = []
        defined: list[NDArray[np.bool_]] = []
        rows: list[tuple[int, str, Array, Array]] = []
        elsewhere = False  # rank 0 makes the block
        # Without observed steps there are only logged numbers.
        for k, (buffer, names) in enumerate(zip(self.buffers if count else (), sent.quantities, strict=True)):
            statistics, some, skips = next(arrays), next(arrays), next(arrays)
            parts.append(_spread(statistics, names, union))
            defined.append(_defined(buffer, names, union))
            if len(skips):
                taken &= skips[:, 0] == 0
                steps = sent.steps - skips[:, 1].astype(np.int64)
            chosen = {group.name: next(arrays) for group in buffer.watched if group.name in self.record_rows}
            if self.merges is not None:
                first = self._places[id(buffer)]
                mine = slice(first, first + len(buffer.watched))
                merged = self.merges[k](some, active[:, mine], together=together)
                if merged is None:
                    elsewhere = True
                    continue
                statistics, active[:, mine], by_group = merged
                parts[-1] = _spread(statistics, names, union)
                by_group = {name: _spread(each, names, union) for name, each in by_group.items()}
                for name, values in by_group.items():
                    everything = name in self.record_rows
                    most = values.shape[2] if everything else min(values.shape[2], SINGLE)
                    numbers = np.linspace(0, values.shape[2] - 1, most).round().astype(int)
                    at = range(count) if everything else sent.whole
                    rows += [(i, name, numbers, values[i][:, numbers]) for i in at]
                continue
            start = 0
            for group, single in zip(buffer.watched, buffer.single_rows, strict=True):
                everything = group.name in chosen
                values = chosen[group.name] if everything else some[:, :, start : start + len(single)]
                start += len(single)
                numbers, at = (np.arange(group.n_rows), range(count)) if everything else (single, sent.whole)
                rows += [(i, group.name, numbers, of) for i, of in zip(at, _spread(values, names, union), strict=True)]
        if elsewhere:
            return None
        logged = []
        for step, name, value, may_skip in sent.logged:
            value = float(next(arrays)) if value is None else value
            logged.append((max(0, step - int(next(arrays)) if may_skip else step), name, value))
        paths: list[tuple[int, str, int, Array]] = []
        if sent.paths:
            points = [(group.name, row, _directions(next(arrays))) for group, row in self.paths.chosen]
            paths = [(k, group, row, u[i]) for i, k in enumerate(sent.paths) for group, row, u in points]
        shape = (0, len(union), len(self.names), len(STATISTICS))
        values = np.concatenate(parts, axis=2) if parts else np.zeros(shape)
        place = {name: k for k, name in enumerate(self.names)}
        return Block(
            run=self.run,
            steps=steps[taken],
            groups=self.names,
            quantities=union,
            values=values[taken],
            active=active[taken],
            defined=np.concatenate(defined, axis=1) if defined else np.zeros((0, len(self.names)), dtype=bool),
            logged=logged,
            rows=[(int(steps[k]), name, n, v) for k, name, n, v in rows if taken[k] and active[k, place[name]]],
            paths=[(int(steps[k]), group, row, direction) for k, group, row, direction in paths if taken[k]],
        )


def _defined(buffer: Buffer, names: Sequence[str], union: Sequence[str]) -> NDArray[np.bool_]:
    """(quantities, groups): what is recorded of each group of a buffer."""
    absent = [False] * len(buffer.watched)
    return np.array([buffer.records(name) if name in names else absent for name in union], dtype=bool)


def _spread(values: Array, names: Sequence[str], union: Sequence[str]) -> Array:
    """Values of some quantities, on dimension 1, among those of all; NaN for the others."""
    if tuple(names) == tuple(union):
        return values
    found = np.full((values.shape[0], len(union), *values.shape[2:]), np.nan, dtype=values.dtype)
    found[:, [union.index(name) for name in names]] = values
    return found


def _directions(rows: Array) -> Array:
    """The directions of rows, (points, d); NaN for a row of length 0 or infinity, which has none."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    directions: Array = (rows / np.where((lengths == 0) | np.isinf(lengths), np.nan, lengths)).astype(rows.dtype)
    return directions


class Output:
    """Hands every block to every sink and raises alerts; without a folder, it keeps the blocks in memory.

    Args:
        sinks: where blocks go.
        alerts: what checks them.
        fail: called with an exception of a sink, so that the other sinks still get theirs.

    Attributes:
        last: the last block with a step.
        folder: the sink that keeps everything on disk, if there is one.
        defects: the median |cos(x, ∇L)| of each group at the last observed steps.
    """

    def __init__(self, sinks: Sequence[Sink], alerts: Alerts, fail: Fail) -> None:
        self.sinks = sinks
        self.alerts = alerts
        self.last: Block | None = None
        self.folder = next((sink for sink in sinks if isinstance(sink, Folder)), None)
        self._fail = fail
        self.defects: dict[str, deque[float]] = {}
        self._history: History | None = None
        self._unread: list[Block] = []  # blocks that are not in the history yet
        self._blocks: list[Block] = []
        self._dropped = False
        self._logged: set[str] = set()  # causes of alerts

    @property
    def seconds(self) -> float:
        """Time that writing files took so far, in a thread of its own."""
        return self.folder.seconds if self.folder is not None else 0.0

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
        self.last = block if len(block.steps) else self.last
        if len(block.steps):
            self._unread.append(replace(block, rows=[], paths=[]))
            if sum(each.values.size for each in self._unread) > _UNREAD:
                self.history()
        if self.folder is None:
            self._keep(block)
        if "defect" in block.quantities:
            medians = block.values[:, block.quantities.index("defect"), :, STATISTICS.index("median")]
            for name, values, active in zip(block.groups, medians.T, block.active.T, strict=True):
                self.defects.setdefault(name, deque(maxlen=64)).extend(map(float, values[active]))
        self._each(methodcaller("write", block))
        alerts = self.alerts.check(block)
        if alerts:
            for cause in causes(alert for alert in alerts if cause_of(alert) not in self._logged):
                logger.warning("%s: %s", block.run, cause.text)
            self._logged.update(map(cause_of, alerts))
        for alert in alerts:
            self._each(methodcaller("alert", alert))

    def history(self) -> History:
        """What a verdict is made from."""
        self._history = self._history or History()
        for block in self._unread:
            self._history.add(block)
        self._unread = []
        return self._history

    def _keep(self, block: Block) -> None:
        """Keep a block in memory; if there are too many numbers, every second observed step is dropped."""
        self._blocks.append(replace(block, rows=[], paths=[]))
        if sum(kept.values.size for kept in self._blocks) > _MOST:
            if not self._dropped:
                logger.warning("%s: every second step is dropped from memory: pass to= to keep all of them", block.run)
            self._dropped = True
            self._blocks = [kept.thinned() for kept in self._blocks]

    def close(self) -> None:
        """Close all sinks."""
        self._each(methodcaller("close"))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            try:
                call(sink)
            except Exception as error:
                self._fail(error)

    def table(self) -> "pd.DataFrame":
        """Everything that was written: run, step, group, quantity, statistic, value."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("records() needs pandas: pip install 'steradian[lab]'; latest() does not") from error

        if self.folder is not None:
            self.folder.drain()
            if self.folder.files.exist():
                return read_run(self.folder.files.folder).table
        tables = [block.table() for block in self._blocks]
        if not tables:
            return pd.DataFrame({name: [] for name in COLUMNS})
        table = pd.concat([table.astype({"quantity": str}) for table in tables], ignore_index=True)
        return table.astype({"quantity": "category"})

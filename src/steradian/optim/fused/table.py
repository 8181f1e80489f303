"""Tables and launches of the fused step for parameters of one dtype on one device.

A `Plan` holds the addresses of everything and assigns rows to programs. A step compares addresses and settings with the
table, copies the table if something changed (pinned and asynchronous, so the host never waits), and launches.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from steradian.optim.fused import kernels
from steradian.optim.reference import orthogonalized
from steradian.optim.rows import Options, RowSet, batches, peak_rate
from steradian.optim.telemetry import TELEMETRY

LANES = int(kernels.LANES.value)
_WARPS = 8
# More programs on a multiprocessor, for a few spilled registers in long rows: Adam's kind was fastest with 96.
_REGISTERS = {0: 96, 2: 80}
_FLAGS = {"a": 1, "b": 2, "c": 4}
_CHUNK = 60
_CAPTURES = 8
_ADDRESS, _STRIDE = Tensor.data_ptr, Tensor.stride
_DTYPE, _GRAD = operator.attrgetter("dtype"), operator.attrgetter("grad")
Launched = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(eq=False)
class Launch:
    """One kernel on a line of programs; from the second launch on, without Triton's dispatch."""

    kernel: Any
    programs: int
    tables: tuple[Tensor, ...]  # its first arguments, which lie at multiples of 16 bytes
    more: tuple[Tensor | int, ...]  # its arguments behind those that are given in each step
    constants: tuple[Any, ...]
    options: dict[str, Any]
    _run: Callable[..., object] | None = None
    _behind: tuple[Any, ...] = ()

    def __call__(self, *given: Tensor) -> None:
        """Launch on the current stream; all that is `given` is aligned as at the first launch."""
        if self._run is not None:
            self._run(*map(_ADDRESS, given), *self._behind)
            return
        compiled = self.kernel[(self.programs,)](*self.tables, *given, *self.more, *self.constants, **self.options)
        if isinstance(compiled, triton.compiler.CompiledKernel):
            self._run = functools.partial(compiled[(self.programs, 1, 1)], *map(_ADDRESS, self.tables))
            more = (each.data_ptr() if isinstance(each, Tensor) else each for each in self.more)
            self._behind = (*more, *self.constants)


class Plan:
    """The step of all rows of parameters of one dtype on one device; what a graph refers to is added to `kept`."""

    def __init__(
        self, work: Sequence[tuple[Options, Sequence[RowSet]]], kind: int, entries: Sequence[str], kept: list[object]
    ) -> None:
        self.groups = [group for group, _ in work]
        self.sets = [(line, rows) for line, (_, sets) in enumerate(work) for rows in sets]
        self.params = [rows.params[0] for _, rows in self.sets]
        self.states = [rows.states[0] for _, rows in self.sets]
        self.device, self.dtype, self.computed = self.params[0].device, self.params[0].dtype, self.sets[0][1].dtype
        self.kind, self.entries, self.kept = kind, operator.itemgetter(*entries), kept
        strides = [param.stride() for param in self.params]
        self.expected: list[object] = [*strides, *strides, *[self.dtype] * len(self.params)]
        self.seen, self.settings = list[Any](), list[tuple[Any, ...]]()
        self.classes, self.odd = list[int](), list[int]()
        self.launches: dict[bool, list[Launched]] = {}
        self._stack_matrices()
        self.finished = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.one, self.zero = torch.ones(1, device=self.device), torch.zeros(1, device=self.device)
        telemetry = self.sets[0][1].telemetry
        self.emitting = telemetry is not None
        # The buffer, of which each row set has a view.
        self.telemetry = self.zero if telemetry is None or telemetry._base is None else telemetry._base
        # One table: a line of eight for each parameter and each group, the rates, and their addresses.
        count, groups = len(self.sets), len(self.groups) + len(self.groups) % 2
        self.parts = [8 * count, 8 * groups, groups, groups]
        self.values = torch.zeros(sum(self.parts), dtype=torch.int64, device="cpu")
        # The same memory as arrays: a few numbers are written in a tenth of the time that torch's operations take.
        lines, groups_of, rates, self.host_addresses_of_rates = map(Tensor.numpy, self.values.split(self.parts))
        self.host_lines = lines.reshape(count, 8)
        self.host_groups, self.host_rates = groups_of.view(np.float64).reshape(-1, 8), rates.view(np.float64)
        self.host_lines[:, 5:] = [(rows.d, rows.n, group) for group, rows in self.sets]
        self._new_table()
        # A graph reads its source at every replay, and no memory can be pinned while it is captured.
        spare = _CAPTURES if any(group.get("capturable") for group in self.groups) else 0
        self.spare = [self._pinned(torch.zeros_like(self.values)) for _ in range(spare)]

    def _new_table(self) -> None:
        self.table = torch.zeros_like(self.values, device=self.device)
        self.lines, groups, rates, self.addresses_of_rates = self.table.split(self.parts)
        self.lines_of_groups, self.rates = groups.view(torch.float64), rates.view(torch.float64)
        self.launches = {}
        self.changed, self.moved, self.in_graph, self.only_captured = True, True, False, False

    def _make_items(self, classes: list[int]) -> None:
        """Which program steps which rows, as the distance of its line from the line of its parameter."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("take a step with the same parameters and gradients before one is captured in a graph")
        items, long_items, slot = [], [], 0
        for index, kind in sorted(enumerate(classes), key=lambda entry: -entry[1]):  # long rows first
            rows = self.sets[index][1]
            if kind == _CHUNK:
                chunks = math.ceil(rows.d / LANES)
                row = torch.arange(rows.n).repeat_interleave(chunks)
                chunk = torch.arange(chunks).repeat(rows.n)
                items.append(_columns(index, row, kind, chunk, slot + row * chunks + chunk))
                long_items.append(_columns(index, row, slot + row * chunks, chunks, chunk))
                slot += rows.n * chunks
            else:
                at_once = LANES // (4 if kind % 2 else 8) // (32 << kind // 10)
                row = torch.arange(0, rows.n, at_once)
                along = self.starts.get(id(rows), 0) + row * rows.d * bool(self.stacks)
                items.append(_columns(index, row, kind, along >> 24, along & 0xFFFFFF))
        self.present = sum(1 << kind for kind in set(classes))
        table = torch.cat(items)
        params, row, kinds, chunk, slots = table.unbind(1)
        across = torch.tensor([rows.d for _, rows in self.sets])[params] * row * self.dtype.itemsize
        numbers = across if self.kind == 1 else row * self.computed.itemsize
        nothing = torch.zeros_like(row)
        packed = [across, across, across, numbers, nothing, kinds << 32, (chunk << 32) - row, slots << 32]
        self.offsets = self._sent(torch.stack(packed, dim=1))
        self.param_of_item = self._sent(params)
        self.items = torch.empty_like(self.offsets)
        long_table = torch.cat(long_items) if long_items else torch.zeros(0, 5, dtype=torch.int64)
        self.long_items = self._sent(long_table.to(torch.int32))
        sums = torch.zeros(max(1, 7 * slot), dtype=torch.float64, device=self.device)
        self.sums = self.along if self.stacks else sums
        self.emitted, self.emitted_of_long_rows = self._targets(table), self._targets(long_table)
        self.launches = {}

    def _targets(self, table: Tensor) -> Tensor:
        """Where in `telemetry` each program writes, as an offset in numbers."""
        first = [rows.telemetry.storage_offset() for _, rows in self.sets if rows.telemetry is not None]
        return self._sent(torch.tensor(first)[table[:, 0]] + table[:, 1] * len(TELEMETRY)) if first else self.zero

    # What may have changed

    def fits(self) -> bool:
        """Read the present addresses of parameters, gradients and states; False if the plan was made for others."""
        params, count = self.params, len(self.params)
        gradients = list(map(_GRAD, params))
        try:
            entries = itertools.chain.from_iterable(map(self.entries, self.states))
            seen: list[Any] = [*map(_ADDRESS, params), *map(_ADDRESS, gradients), *map(_ADDRESS, entries)]
            seen += [*map(_STRIDE, params), *map(_STRIDE, gradients), *map(_DTYPE, gradients)]
        except (KeyError, TypeError, RuntimeError):  # one is not there, None, or sparse
            return False
        if seen == self.seen:
            return True
        if seen[5 * count :] != self.expected or any(p.dtype != self.dtype or p.device != self.device for p in params):
            return False
        # The user may have replaced a state or moved it to other memory.
        states = slice(2 * count, 5 * count)
        if self.seen and seen[states] != self.seen[states]:
            return False
        self._set_addresses(seen[:count], seen[count : 2 * count], seen[states])
        self.seen = seen
        return self.kind < 4 or _CHUNK not in self.classes

    # The step

    def launch(self, grad_scale: Tensor | None, found_inf: Tensor | None, also: Tensor | None, capturing: bool) -> None:
        """Take one step of all rows, after `fits`; `also` is a second tensor for the telemetry."""
        settings = [setting(group, self.device) for group in self.groups]
        if settings != self.settings:
            self.settings, self.changed = settings, True
            self.host_groups[: len(settings)] = [[*line, kind == "address"] for kind, _, *line in settings]
            self.host_rates[: len(settings)] = [rate if kind == "number" else 0.0 for kind, rate, *_ in settings]
        if self.changed or self.only_captured:
            self._write(capturing)
        for k, group in enumerate(self.groups):
            if self.settings[k][0] == "copied":
                self.rates[k : k + 1].copy_(group["lr"].reshape(1), non_blocking=True)
        scaled = grad_scale is not None or found_inf is not None
        if scaled not in self.launches:
            self.launches[scaled] = self._launches(scaled)
        scale = self.one if grad_scale is None else self._plain(grad_scale)
        found = self.zero if found_inf is None else self._plain(found_inf)
        if capturing:
            self.in_graph = True
            tables = self.table, self.items, self.long_items, self.sums, self.emitted, self.emitted_of_long_rows
            self.kept += [self, *tables, scale, found]
        also = self.telemetry if also is None else also
        here = self.device.type != "cuda" or torch.cuda.current_device() == self.device.index
        with nullcontext() if here else torch.cuda.device(self.device):
            for each in self.launches[scaled]:
                each(scale, found, also)

    def _plain(self, number: Tensor) -> Tensor:
        """A gradient scaler's number as the kernels are compiled for it."""
        number = number.to(self.device, torch.float32)
        return number if number.data_ptr() % 16 == 0 else number.clone()

    def _launches(self, scaled: bool) -> list[Launched]:
        entries, computed = (getattr(tl, str(dtype)[6:]) for dtype in (self.dtype, self.computed))
        tables = (self.lines, self.lines_of_groups, self.addresses_of_rates)
        constants = (self.kind, self.emitting, scaled, entries, computed)

        def step(kind: int) -> Launch:
            registers = _REGISTERS.get(kind) if self.dtype != torch.float64 else None
            return Launch(
                kernels.step_rows,
                len(self.items),
                tables=(self.items, *tables, self.emitted, self.telemetry, self.sums),
                more=(self.finished, len(self.sets)),
                constants=(self.present, kind, *constants[1:]),
                options={"num_warps": _WARPS, "maxnreg": registers},
            )

        made: list[Launched] = [step(self.kind)]
        if self.kind >= 4:
            made += [self._orthogonalize, step(6)]
        elif len(self.long_items):
            items = (self.long_items, *tables, self.emitted_of_long_rows, self.telemetry, self.sums)
            options = {"num_warps": _WARPS}
            made.append(Launch(kernels.step_long_rows, len(self.long_items), items, (), constants, options))
        return made

    def _stack_matrices(self) -> None:
        """Memory for what rows turn along, in which parameters of one shape follow each other."""
        self.stacks: list[Tensor] = []  # of matrices, (k, a, b): views of `along`
        self.starts = dict[int, int]()  # of each row set
        sets = [rows for _, rows in self.sets if self.kind >= 4]
        self.along = torch.zeros(sum(rows.n * rows.d for rows in sets), dtype=self.computed, device=self.device)

        def keep(stack: Tensor) -> Tensor:
            self.stacks.append(stack)
            return stack

        end = 0
        for same in batches(sets, [(rows.params[0].shape, rows.layout.spec) for rows in sets]):
            begin = end
            for rows in same:
                self.starts[id(rows)], end = end, end + rows.n * rows.d
            same[0].on_matrices(keep, self.along[begin:end].view(-1, same[0].d))

    @torch.no_grad()
    def _orthogonalize(self, *_: Tensor) -> None:
        for stack in self.stacks:
            stack.copy_(orthogonalized(stack))

    def _set_addresses(self, params: list[Any], gradients: list[Any], states: list[Any]) -> None:
        self.host_lines[:, 0] = params
        self.host_lines[:, 1] = gradients
        self.host_lines[:, 2:5] = np.reshape(states, (-1, 3))
        self.changed = self.moved = True
        # Usually only gradients have new addresses, with the same alignment as before.
        odd = [address % 16 for address in (*params, *gradients)]
        if odd == self.odd:
            return
        # Rows are read sixteen bytes at a time if all of their tensors are aligned to that.
        even = (self.host_lines[:, :3] % 16 == 0).all(axis=1).tolist()
        classes = [_class(rows, even=lies) for (_, rows), lies in zip(self.sets, even, strict=True)]
        if classes != self.classes:
            with torch.device("cpu"):  # whatever the default is
                self._make_items(classes)
        self.classes, self.odd = classes, odd

    def _write(self, capturing: bool) -> None:
        """Copy the values to the device; a table that a captured graph reads is not changed, a new one is made."""
        if self.in_graph:
            self._new_table()
            self.items = torch.empty_like(self.items)
        own = self.rates.data_ptr()
        addresses = [line[1] if line[0] == "address" else own + 8 * k for k, line in enumerate(self.settings)]
        self.host_addresses_of_rates[: len(addresses)] = addresses
        if capturing and not self.spare:
            raise RuntimeError(f"more than {_CAPTURES} graphs changed what this optimizer steps on")
        source = self.spare.pop().copy_(self.values) if capturing else self._pinned(self.values)
        self.kept += [source] if capturing else []
        self.table.copy_(source, non_blocking=True)
        # Programs hold addresses only: if just the rate changes, as under a schedule, they stay as they are.
        if self.moved or self.only_captured or capturing:
            torch.index_select(self.lines.view(-1, 8), 0, self.param_of_item, out=self.items)
            self.items += self.offsets
        # A captured copy has not run: until the graph is replayed, the table is empty.
        self.changed, self.moved, self.only_captured = False, capturing, capturing

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values

    def _sent(self, values: Tensor) -> Tensor:
        return self._pinned(values).to(self.device, non_blocking=True)


def _columns(*values: int | Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*map(torch.as_tensor, values)), dim=1)


def _class(rows: RowSet, *, even: bool) -> int:
    """The tile of a row: 10·log2(S/32) + 2(K − 1) for K ≤ 5 pieces of S lanes, + 1 for rows at 16 bytes.

    S is at most 1,024, and 512 for rows at odd addresses; longer rows are cut into chunks.
    """
    d = rows.d
    aligned = even and d % 4 == 0 and d * rows.params[0].dtype.itemsize % 16 == 0
    for k in range(6 if aligned else 5):
        lanes = 32 << k
        if d <= 5 * lanes:
            return 10 * k + 2 * (math.ceil(d / lanes) - 1) + aligned
    return _CHUNK


def setting(group: Options, device: torch.device) -> tuple[Any, ...]:
    """How the rate of a group is given (number, address, or copied), it, and what `kernels.settings_of` reads."""
    lr = group["lr"]
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        kind, rate = "number", float(lr)
    elif lr.dtype == torch.float32 and lr.device == device:
        kind, rate = "address", lr.data_ptr()
    else:
        kind, rate = "copied", 0.0
    if "direction" in group:
        beta1, beta2, eps, decay, flags = 0.0, group["beta2"], group["momentum"], 0.0, int(group["spread"] == "rms")
    else:
        (beta1, beta2), eps, decay, peak = group["betas"], group["eps"], group["weight_decay"], peak_rate(group)
        flags = 8 * bool(group["decoupled_weight_decay"]) + sum(_FLAGS[letter] for letter in group["without"])
        if peak is not None:
            decay, flags = decay / peak, flags + 32
    logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    return kind, rate, *logs, 1 - beta1, 1 - beta2, eps, decay, flags + 16 * bool(group["maximize"])

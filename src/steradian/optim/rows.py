"""What an optimizer steps on: the rows of one parameter, or of several together, with gradients and state."""

import functools
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from steradian.geometry import at_hand
from steradian.groups import Layout

Options = Mapping[str, Any]  # a param group
State = dict[str, Tensor]
States = Sequence[State]
Function = Callable[[Tensor], Tensor]

_PIECE = 2**18  # numbers of a tensor that one pass of a step works on, on a CPU: several temporaries stay in its cache


def sharding() -> ModuleType:
    """`steradian.optim.sharded`, imported when a parameter is sharded: not every torch has what it needs."""
    return importlib.import_module("steradian.optim.sharded")


def arithmetic(params: Iterable[Tensor]) -> torch.dtype:
    """The dtype that rows of these parameters are computed in, and that one number per row is kept in."""
    return torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32


def exact(step: Tensor) -> Tensor:
    """A step count, kept in float32 as torch does, in which 1 − β^t keeps its digits: float64, where there is one."""
    return step if step.device.type == "mps" else step.to(torch.float64)


def rate_of(group: Options) -> float | Tensor:
    """The learning rate: a number, or a tensor without dimensions that is never read back."""
    lr = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else float(lr)


def peak_rate(group: Options) -> float | None:
    """η_max of a group with a corrected decay: "max_lr", or else "initial_lr", or its first rate; None for others."""
    if not group.get("corrected_decay") or group.get("rows") is None or not group["weight_decay"]:
        return None
    return float(group.get("max_lr", group.get("initial_lr", group.get("first_lr")))) or None


def decay_of(group: Options) -> float | Tensor:
    """λ; where it is corrected λη/η_max, so that a falling rate is not undone by shrinking radii (Defazio, 2025)."""
    decay: float = group["weight_decay"]
    peak = peak_rate(group)
    return decay if peak is None else rate_of(group) * (decay / peak)


def check_shape(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """An entry of a state if it has this shape: it may have been made before the settings were changed."""
    if value.shape != shape:
        raise ValueError(
            f"the state {name!r} must have the shape {tuple(shape)} here, got {tuple(value.shape)}: "
            "it was made by another optimizer or under other settings"
        )
    return value


class RowSet:
    """The rows of one parameter, or of several that are invariant only together, in one step.

    `read` gives a parameter-shaped quantity as (n, d) rows: a view of its memory where the layout, the strides and the
    dtype allow, else a copy in the arithmetic's dtype. The entries within a row follow the parameter's strides, so that
    channels_last needs no copy. A step goes through the rows piece by piece (`pieces`), which puts copies back.
    """

    telemetry: Tensor | None = None  # memory for the numbers of `TELEMETRY`, (n, 7); None: it is off
    scale: Tensor | None = None  # what gradients are divided by when they are read
    sharded: bool = False
    in_place: bool = True  # the rows are the owners' memory, not copies for one step

    def __init__(
        self, layout: Layout, params: list[Tensor], states: States, absent: States = (), fresh: bool = False
    ) -> None:
        self.layout, self.params, self.states = layout, params, states  # the parameters all have a gradient
        self.absent = absent  # states of a joint set's parameters without: step count and numbers per row follow
        self.fresh = fresh  # the states were made for this step
        self.owners = params  # the optimizer's parameters, of which `params` may be parts or copies
        self.dtype = arithmetic(params)  # what rows are computed in
        self._cuts = [_cut(param.shape, param.stride(), layout) for param in params]
        self.n, self.d = self._cuts[0].n, sum(cut.d for cut in self._cuts)

    def finish(self) -> None:
        """Called after the step."""

    @property
    def whole(self) -> slice:
        """All rows, as a piece."""
        return slice(0, self.n)

    def pieces(self, *names: str, write: bool = True) -> Iterator[tuple[slice, list[Tensor]]]:
        """Ranges of rows, each with these rows of some quantities; changes in place are kept if `write` (not grad)."""
        at_once = self.n
        if self.params[0].device.type == "cpu" and not torch.compiler.is_compiling():
            # A piece is whole blocks of every tensor's outermost cut dimension.
            whole = math.lcm(*(cut.rows_per_block for cut in self._cuts))
            at_once = whole * max(1, _PIECE // max(1, self.d * whole))
        for start in range(0, self.n if self.d else 0, max(1, at_once)):
            piece = slice(start, min(start + at_once, self.n))
            tensors = [self.read(name, piece) for name in names]
            yield piece, tensors
            for name, rows in zip(names, tensors, strict=True):
                if write and name != "grad":
                    self._write(name, piece, rows)

    def read(self, name: str, piece: slice) -> Tensor:
        """Some rows of "param", "grad" or a parameter-shaped entry of the state."""
        tensors = zip(self._cuts, self._tensors(name), strict=True)
        parts = [cut.rows(tensor, piece).to(self.dtype) for cut, tensor in tensors]
        if name == "grad" and self.scale is not None:
            parts = [part / self.scale.to(part) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _write(self, name: str, piece: slice, rows: Tensor) -> None:
        """Put rows that came from `read` back; nothing to do where they are a view."""
        joint = len(self.params) > 1
        parts = torch.split(rows, [cut.d for cut in self._cuts], dim=1) if joint else (rows,)
        for cut, tensor, part in zip(self._cuts, self._tensors(name), parts, strict=True):
            if joint or tensor.dtype != self.dtype or not cut.is_view(tensor):
                place = cut.blocks(tensor, piece)
                place.copy_(_clamp_to(tensor.dtype, part).reshape(place.shape))

    def kept(self, rows: Tensor) -> Tensor:
        """Rows as the parameters will hold them: rounded where they are of half precision."""
        if all(param.dtype == self.dtype for param in self.params):
            return rows
        parts = zip(torch.split(rows, [cut.d for cut in self._cuts], dim=1), self.params, strict=True)
        return torch.cat([_clamp_to(param.dtype, part).to(param.dtype).to(self.dtype) for part, param in parts], dim=1)

    def on_matrices(self, function: Function, rows: Tensor) -> Tensor:
        """Rows after a function of matrices, (k, a, b): all rows are one, as filters are, or each block, as heads are.

        They may be the rows of several parameters like this one, under each other.
        """
        shape = self.owners[0].shape  # on a rank with one row of several, its part is one block
        if any(count == size > 1 for count, size in zip(self.layout.blocks(shape), shape, strict=True)):
            return self._on_whole(function, rows)
        parts = torch.split(rows, [cut.d for cut in self._cuts], dim=1)
        return torch.cat([cut.on_matrices(function, part) for cut, part in zip(self._cuts, parts, strict=True)], dim=1)

    def _on_whole(self, function: Function, rows: Tensor) -> Tensor:
        return function(rows.unflatten(0, (max(1, len(rows) // max(1, self.n)), -1))).flatten(0, 1)

    def is_dense(self) -> bool:
        """One parameter whose rows lie behind each other in memory."""
        return len(self.params) == 1 and self._cuts[0].is_dense(self.params[0])

    def number(self, name: str) -> Tensor:
        """An entry of the state with one number per row, (n, 1): a view of the first parameter's."""
        return check_shape(name, self.states[0][name], (self.n,)).unsqueeze(1)

    def share(self, name: str) -> None:
        """Give the number per row to the other parameters of a joint set, so that each state is complete."""
        for state in (*self.states[1:], *self.absent):
            if name in state:  # of a stack these are the step counts alone
                state[name].copy_(self.states[0][name])

    def advance(self) -> float | Tensor:
        """Count this step; returns its number, as a tensor if the host must not read it."""
        for state in (*self.states, *self.absent):
            state["step"] += 1
        step = self.states[0]["step"]
        return exact(step) if torch.compiler.is_compiling() or step.device.type != "cpu" else step.item()

    @contextmanager
    def scaled(self, scale: Tensor | None, found: Tensor | None) -> Iterator[None]:
        """Gradients are read unscaled; all is restored if the step is to be skipped, which the host does not know."""
        self.scale = scale
        if found is None:
            yield
        else:
            tensors = self.params if self.telemetry is None else [*self.params, self.telemetry]
            tensors = [*tensors, *(value for state in (*self.states, *self.absent) for value in state.values())]
            before = [tensor.detach().clone() for tensor in tensors]
            yield
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(torch.where(found.reshape(()).to(tensor.device) != 0, old, tensor))
        self.scale = None

    def _tensors(self, name: str) -> list[Tensor]:
        if name == "param":
            return [param.detach() for param in self.params]
        if name == "grad":
            return [param.grad.detach() for param in self.params if param.grad is not None]
        states = zip(self.states, self.params, strict=True)
        return [check_shape(name, state[name], param.shape) for state, param in states]


class _Cut:
    """How one tensor is cut into n rows of d numbers.

    Each dimension is split into blocks and what lies within a block. A row is the entries within one block of every
    dimension, in the order in which they lie in the parameter's memory.
    """

    def __init__(self, shape: torch.Size, strides: tuple[int, ...], layout: Layout) -> None:
        self.shape = layout.split(shape)
        self.n, self.d = layout.size(shape)
        # Dimensions of `self.shape` that count blocks, of more than one; those within a block, of more than one entry,
        # the outermost in memory first; and all, those of one entry last.
        order = range(len(self.shape))
        self.outer = [k for k in order[::2] if self.shape[k] != 1]
        self.inner = [k for k in order[1::2] if self.shape[k] != 1]
        self.inner.sort(key=lambda k: strides[k // 2], reverse=True)
        self.order = list(dict.fromkeys([*self.outer, *self.inner, *order]))

    @property
    def rows_per_block(self) -> int:
        """Rows in one block of the outermost dimension that is cut."""
        return math.prod(self.shape[k] for k in self.outer[1:]) or 1

    def blocks(self, tensor: Tensor, piece: slice) -> Tensor:
        """The memory of some rows: dimensions of blocks first, then those within a block."""
        split = tensor.reshape(self.shape).permute(self.order)
        if not self.outer:
            return split
        return split[piece.start // self.rows_per_block : piece.stop // self.rows_per_block]

    def rows(self, tensor: Tensor, piece: slice) -> Tensor:
        """Some rows of a tensor, (n, d): a view where `is_view` says so."""
        # Slices of dimension 0, in the logical order of their entries.
        if self.outer in ([], [0]) and self.inner == sorted(self.inner) and tensor.is_contiguous():
            return tensor.view(self.n, self.d)[piece]
        return self.blocks(tensor, piece).reshape(piece.stop - piece.start, self.d)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether the rows of a tensor of this shape can be seen in its memory without a copy."""
        return self._is_one(tensor, self.outer) and self._is_one(tensor, self.inner)

    def is_dense(self, tensor: Tensor) -> bool:
        """Whether the rows of a tensor of this shape lie behind each other in memory, without gaps."""
        run = [*self.outer, *self.inner]
        return self._is_one(tensor, run) and (not run or self._stride(tensor, run[-1]) == 1)

    def on_matrices(self, function: Function, rows: Tensor) -> Tensor:
        """Rows after a function of each of them as a matrix, (n, a, b), whose first dimension is the tensor's."""
        if 1 not in self.inner:
            return function(rows.unsqueeze(1)).squeeze(1)
        first = 1 + self.inner.index(1)
        split = rows.unflatten(1, [self.shape[k] for k in self.inner]).movedim(first, 1)
        stack = split.reshape(len(rows), self.shape[1], self.d // self.shape[1])
        return function(stack).reshape(split.shape).movedim(1, first).reshape(rows.shape)

    def _is_one(self, tensor: Tensor, dims: list[int]) -> bool:
        """Whether some of the split dimensions are as one in memory."""
        pairs = itertools.pairwise(dims)
        return all(self._stride(tensor, i) == self.shape[k] * self._stride(tensor, k) for i, k in pairs)

    def _stride(self, tensor: Tensor, k: int) -> int:
        return tensor.stride(k // 2) * (1 if k % 2 else self.shape[k + 1])


_cut = functools.lru_cache(2**12)(_Cut)


def _clamp_to(dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Rows within the range of a dtype: what lies beyond float16's would come back infinite."""
    largest = torch.finfo(dtype).max
    return rows.clamp(-largest, largest) if dtype == torch.float16 else rows


# Row sets together: torch takes about as long for an operation on a few numbers as on thousands ---------------------

_SMALL = 2**12  # numbers in a row set from which on the arithmetic takes longer than the calls
_MATRICES = 2**27  # numbers in matrices that are stepped at once: enough to fill a GPU, few enough for its memory


def together(sets: list[RowSet]) -> Iterable[RowSet]:
    """The row sets of a param group, on a CPU with small ones of one kind stacked; no digit depends on it."""
    if len(sets) < 2 or not at_hand(sets[0].params[0]):
        return sets
    return _stacked(sets, list(map(_kind, sets)), at_once=_PIECE)


def _kind(rows: RowSet) -> tuple[object, ...] | None:
    """What small row sets that are stepped together have in common; None for one that is stepped alone."""
    param, state = rows.params[0], rows.states[0]
    # In rows of one number, a number per row has the shape of a parameter.
    if rows.d < 2 or rows.n * rows.d > _SMALL or not param.is_cpu or param.dtype != rows.dtype:
        return None
    step, shape = state.get("step"), param.shape
    entries = [value for value in state.values() if value is not step]
    if not _can_stack(rows, entries) or any(value.shape not in (shape, (rows.n,)) for value in entries):
        return None
    shaped = tuple(value.shape == shape for value in entries)
    return rows.d, rows.dtype, rows.fresh, shaped, None if step is None else step.item()


def by_shape(sets: list[RowSet]) -> Iterable[RowSet]:
    """Row sets whose matrices are computed together: parameters of one shape stacked, each with its own step count."""
    kinds: list[object | None] = []
    for rows in sets:
        param = rows.params[0]
        kind = (param.shape, param.dtype, param.device, tuple(rows._cuts[0].inner), *rows.states[0])
        kinds.append(kind if _can_stack(rows, rows._tensors("momentum_buffer")) else None)
    return _stacked(sets, kinds)


def _can_stack(rows: RowSet, entries: list[Tensor]) -> bool:
    """Whether rows and entries of their state lie in memory so that they can be copied under those of others."""
    if rows.sharded or rows.absent or not rows.n * rows.d or not rows.is_dense():
        return False
    (param,), (gradient,), [cut] = rows.params, rows._tensors("grad"), rows._cuts
    return all(
        type(each) in (Tensor, nn.Parameter)
        and each.dtype == param.dtype
        and (cut.is_dense(each) if each.shape == param.shape else each.is_contiguous())
        for each in (param, gradient, *entries)
    )


def _stacked(sets: list[RowSet], kinds: Sequence[object | None], at_once: int = _MATRICES) -> Iterable[RowSet]:
    """Row sets of one kind as one; those without a kind stay alone."""
    times: Counter[int] = Counter()
    known: list[object] = list(range(len(sets)))
    for place, kind in enumerate(kinds):
        if kind is not None:
            address = sets[place].params[0].data_ptr()
            # Parameters that share their memory are stepped one after the other.
            times[address] += 1
            known[place] = kind, times[address]
    return (_Stack(same) if len(same) > 1 else same[0] for same in batches(sets, known, at_once))


def batches(sets: list[RowSet], kinds: Iterable[object], at_once: int = _MATRICES) -> Iterable[list[RowSet]]:
    """Row sets of one kind, as many as hold so many numbers."""
    alike: dict[object, list[RowSet]] = {}
    counts: Counter[object] = Counter()
    for rows, kind in zip(sets, kinds, strict=True):
        counts[kind] += rows.n * rows.d
        alike.setdefault((kind, counts[kind] // at_once), []).append(rows)
    return alike.values()


class _Stack(RowSet):
    """Row sets of one parameter each, of one kind, as one: copies under each other, which `finish` puts back."""

    def __init__(self, sets: list[RowSet]) -> None:
        first, owners = sets[0], [rows.params[0] for rows in sets]
        shapes = owners[0].shape, (first.n,)  # step counts, and what is not ours, have others
        entries = {name: value for name, value in first.states[0].items() if getattr(value, "shape", None) in shapes}
        shaped = ["param", "grad", *(name for name, value in entries.items() if value.shape == owners[0].shape)]
        parts = {name: [rows._cuts[0].rows(rows._tensors(name)[0], rows.whole) for rows in sets] for name in shaped}
        parts |= {name: [rows.states[0][name] for rows in sets] for name in entries.keys() - parts.keys()}
        if first.telemetry is not None:
            parts["telemetry"] = [rows.telemetry for rows in sets if rows.telemetry is not None]
        stacked = {name: torch.cat(each) for name, each in parts.items()}
        stacked["param"].grad = stacked["grad"]
        state = {name: stacked[name] for name in entries}
        steps = [{"step": rows.states[0]["step"]} for rows in sets if "step" in rows.states[0]]
        super().__init__(Layout("filter"), [stacked["param"]], [state], absent=steps, fresh=first.fresh)
        self.owners, self.telemetry = owners, stacked.get("telemetry")
        self._parts, self._stacked, self._sets = parts, stacked, sets

    def advance(self) -> float | Tensor:
        """Count this step; returns its number, or one for each row where parameters have taken different numbers."""
        steps = [state["step"] for state in self.absent]
        if steps[0].is_cpu and not torch.compiler.is_compiling() and len({step.item() for step in steps}) == 1:
            steps[0] += 1
            torch._foreach_copy_(steps[1:], steps[:1] * (len(steps) - 1))  # half the time of adding to each
            return steps[0].item()
        torch._foreach_add_(steps, 1)
        counts = exact(torch.stack(steps)).to(self.params[0].device, non_blocking=True)
        return counts.repeat_interleave(self._sets[0].n).unsqueeze(1)

    def on_matrices(self, function: Function, rows: Tensor) -> Tensor:
        """The matrices of the parameters stay apart."""
        return self._sets[0].on_matrices(function, rows)

    def finish(self) -> None:
        """Put the rows, their state and their telemetry back."""
        counts = [rows.n for rows in self._sets]
        for name, parts in self._parts.items():
            if name != "grad":
                torch._foreach_copy_(parts, self._stacked[name].split(counts))

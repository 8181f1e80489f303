"""Many small row sets in one step: torch takes about as long for an operation on a few numbers as on thousands."""

from collections import Counter

import torch
from torch import Tensor, nn

from steradian.geometry import at_hand
from steradian.optim._rows import RowSet, check_shape

__all__ = ["Stack", "together"]

# Entries of a row set from which on the numbers take longer than the calls.
_SMALL = 2**12
# Row sets of a stack, whose copies are to take no memory to speak of.
_AT_ONCE = 2**9
_PLAIN = (Tensor, nn.Parameter)


def together(sets: list[RowSet]) -> list[RowSet]:
    """The row sets of a param group, on a CPU with those stacked that are small and alike; no digit depends on it."""
    if len(sets) < 2 or not at_hand(sets[0].params[0]):
        return sets
    alike: dict[object, list[RowSet]] = {}
    met: Counter[int] = Counter()
    for place, rows in enumerate(sets):
        kind: object = _kind(rows)
        if kind is not None:
            # Parameters that share their memory are stepped one after the other.
            address = rows.params[0].data_ptr()
            met[address] += 1
            kind = kind, place // _AT_ONCE, met[address]
        alike.setdefault(place if kind is None else kind, []).append(rows)
    return [Stack(same) if len(same) > 1 else same[0] for same in alike.values()]


def _kind(rows: RowSet) -> tuple[object, ...] | None:
    """What row sets that are stepped together have in common; None for one that is stepped alone."""
    if rows.sharded or not 0 < rows.n * rows.d <= _SMALL or not rows.is_dense():
        return None
    param, state = rows.params[0], rows.states[0]
    step = state.get("step")
    entries = [value for value in state.values() if value is not step]
    if not all(_is_ready(tensor, rows.dtype) for tensor in (param, param.grad, *entries)):
        return None
    if step is not None and not step.is_cpu:
        return None
    return rows.d, rows.dtype, rows.fresh, None if step is None else step.item()


def _is_ready(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a tensor is memory on the host that needs no more than cutting to be rows in this dtype."""
    if tensor is None or type(tensor) not in _PLAIN:
        return False
    return tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()


class Stack(RowSet):
    """The rows of several sets under each other, in copies that `write`, `share` and `finish` put back.

    Args:
        sets: row sets of one parameter each, alike in all but the number of rows.
    """

    def __init__(self, sets: list[RowSet]) -> None:
        first = sets[0]
        self.layout, self.d, self.dtype, self.fresh = first.layout, first.d, first.dtype, first.fresh
        self.params = self.owners = [rows.params[0] for rows in sets]
        self.states = [rows.states[0] for rows in sets]
        self._counts = [rows.n for rows in sets]
        self.n = sum(self._counts)
        self._places: dict[str, list[Tensor]] = {}
        self._stacked: dict[str, Tensor] = {}
        told = [rows.telemetry for rows in sets if rows.telemetry is not None]
        if told:
            self.telemetry = self._stack("telemetry", told)
            self.finish = lambda: self.share("telemetry")

    def read(self, name: str) -> Tensor:
        """The rows of "param", "grad" or a parameter-shaped entry of the states."""
        return self._stack(name, [tensor.view(-1, self.d) for tensor in self._tensors(name)])

    def write(self, name: str, rows: Tensor) -> None:
        """Put rows that came from `read` back."""
        torch._foreach_copy_(self._places[name], rows.split(self._counts))

    def number(self, name: str) -> Tensor:
        """An entry of the states with one number per row, (n, 1)."""
        states = zip(self.states, self._counts, strict=True)
        return self._stack(name, [check_shape(name, state[name], (n,)).unsqueeze(1) for state, n in states])

    def share(self, name: str) -> None:
        """Put the numbers per row back."""
        self.write(name, self._stacked[name])

    def advance(self) -> float | Tensor:
        """Count this step; returns its number, which is the same for all."""
        torch._foreach_add_([state["step"] for state in self.states], 1)
        return self.states[0]["step"].item()

    def _stack(self, name: str, parts: list[Tensor]) -> Tensor:
        self._places[name] = parts
        self._stacked[name] = torch.cat(parts)
        return self._stacked[name]

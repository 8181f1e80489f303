"""What an optimizer steps on: the rows of one parameter, or of several together, with gradients and state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from steradian.groups import Layout

__all__ = ["RowSet", "arithmetic", "check_shape", "exact"]

# Entries of the rows that one pass of a step works on, on a CPU: two megabytes in float32 stay in its cache.
_IN_CACHE = 2**19


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype that rows of this dtype are computed in, and that one number per row is kept in.

    >>> arithmetic(torch.bfloat16), arithmetic(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(step: Tensor) -> Tensor:
    """A step count in which 1 − β^t keeps its digits: float64, where the device has it.

    It is kept in float32, as torch does; there 1 − 0.999^t has five digits.
    """
    return step if step.device.type == "mps" else step.to(torch.float64)


def check_shape(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """An entry of a state, which may have been loaded or made before the settings were changed."""
    if value.shape != shape:
        raise ValueError(
            f"the state {name!r} must have the shape {tuple(shape)} here, got {tuple(value.shape)}: "
            "it was made by another optimizer or under other settings"
        )
    return value


class RowSet:
    """The rows of one parameter, or of several that are invariant only together, in one step.

    `read` gives a parameter-shaped quantity as (n, d) rows: a view of its memory where the layout, the strides
    and the dtype allow, else a copy in the arithmetic's dtype, which `write` puts back. The order of the entries
    within a row is the same for everything read from one set, and follows the parameter's strides, so that
    channels_last needs no copy. Rows that span several tensors are always copied.

    Args:
        layout: how each tensor is cut.
        params: the parameters, all with a gradient.
        states: the optimizer's state of each.
        fresh: the states were made for this step.

    Attributes:
        n: number of rows.
        d: numbers in a row, over all parameters.
        dtype: what rows are computed in.
        telemetry: where the step leaves the numbers of `TELEMETRY` for each row, (n, 7); None: nowhere.
        scale: what gradients are divided by when they are read; None: nothing.
        owners: the optimizer's parameters, where `params` are parts or copies of sharded ones.
        sharded: they are.
        lasting: the rows are the owners' memory, not copies of it for one step.
        renew: to be called before the rows are stepped again: takes the owners' new gradients, and says if it could.
        finish: to be called when the rows have been stepped.
    """

    telemetry: Tensor | None = None
    scale: Tensor | None = None
    sharded: bool = False
    lasting: bool = True
    renew: Callable[[], bool] = staticmethod(lambda: True)
    finish: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, layout: Layout, params: list[Tensor], states: list[dict[str, Tensor]], *, fresh: bool = False
    ) -> None:
        self.layout = layout
        self.params = self.owners = params
        self.states = states
        self.fresh = fresh
        sizes = [layout.size(param.shape) for param in params]
        self.n, self.d = sizes[0][0], sum(width for _, width in sizes)
        self.dtype = arithmetic(params[0].dtype)
        self._widths = [width for _, width in sizes]
        self._orders = [self._order(param) for param in params]

    def read(self, name: str) -> Tensor:
        """The rows of "param", "grad" or a parameter-shaped entry of the state."""
        parts = [self._cut(*each) for each in zip(self._tensors(name), self._orders, self._widths, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, name: str, rows: Tensor) -> None:
        """Put rows that came from `read` back; nothing to do where they are a view."""
        joint = len(self.params) > 1
        pieces = torch.split(rows, self._widths, dim=1) if joint else (rows,)
        for tensor, order, piece in zip(self._tensors(name), self._orders, pieces, strict=True):
            piece = _held_by(tensor.dtype, piece)
            if order is None:
                tensor.copy_(self.layout.restore(piece, tensor.shape))
            elif joint or tensor.dtype != self.dtype or not tensor.permute(order).is_contiguous():
                stored = tensor.permute(order)
                stored.copy_(piece.reshape(stored.shape))

    def is_dense(self) -> bool:
        """One parameter whose rows lie behind each other in memory."""
        order = self._orders[0]
        return len(self.params) == 1 and order is not None and self.params[0].permute(order).is_contiguous()

    def number(self, name: str) -> Tensor:
        """An entry of the state with one number per row, (n, 1): a view of the first parameter's."""
        return check_shape(name, self.states[0][name], (self.n,)).unsqueeze(1)

    def share(self, name: str) -> None:
        """Give the number per row to the other parameters of a joint set, so that each state is complete."""
        for state in self.states[1:]:
            state[name].copy_(self.states[0][name])

    def advance(self) -> float | Tensor:
        """Count this step; returns its number, as a tensor where that must stay on the device."""
        for state in self.states:
            state["step"] += 1
        step = self.states[0]["step"]
        return exact(step) if torch.compiler.is_compiling() or step.device.type != "cpu" else step.item()

    def pieces(self) -> Iterator[slice]:
        """Ranges of rows to work on one after the other: on a CPU what its cache holds, elsewhere all at once."""
        at_once = self.n
        if self.params[0].device.type == "cpu" and not torch.compiler.is_compiling():
            at_once = max(1, _IN_CACHE // max(1, self.d))
        for start in range(0, self.n if self.d else 0, max(1, at_once)):
            yield slice(start, start + at_once)

    @contextmanager
    def scaled(self, scale: Tensor | None, found: Tensor | None) -> Iterator[None]:
        """Within it gradients are read unscaled; after it all is as before if the step was to be skipped.

        Args:
            scale: a gradient scaler's scale; None: gradients are not scaled.
            found: its verdict, 1 for a step to be skipped, which is not read back; None: none is.
        """
        if scale is None and found is None:
            yield
            return
        self.scale = scale
        tensors = [*self.params, *(value for state in self.states for value in state.values())]
        tensors += [] if self.telemetry is None else [self.telemetry]
        before = [tensor.detach().clone() for tensor in tensors]
        yield
        self.scale = None
        for tensor, old in zip(tensors, before, strict=True):
            if found is not None:
                tensor.copy_(torch.where(found.reshape(()).to(tensor.device) != 0, old, tensor))

    def _tensors(self, name: str) -> list[Tensor]:
        if name == "param":
            return [param.detach() for param in self.params]
        if name == "grad":
            gradients = [_gradient(param) for param in self.params]
            return gradients if self.scale is None else [g / self.scale.to(g) for g in gradients]
        states = zip(self.states, self.params, strict=True)
        return [check_shape(name, state[name], param.shape) for state, param in states]

    def _order(self, param: Tensor) -> list[int] | None:
        """Dimensions with the outermost in memory first, where only dimension 0 is cut; None for other layouts."""
        if any(count != 1 for count in self.layout.blocks(param.shape)[1:]):
            return None
        inner = sorted(range(1, param.ndim), key=param.stride().__getitem__, reverse=True)
        return [0, *inner] if param.ndim else []

    def _cut(self, tensor: Tensor, order: list[int] | None, width: int) -> Tensor:
        if order is None:
            return self.layout.rows(tensor).to(self.dtype)
        return tensor.permute(order).contiguous().view(self.n, width).to(self.dtype)


def _held_by(dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Rows as a dtype holds them: at the end of its range what lies beyond it, which would come back infinite."""
    # bfloat16 ends where float32 does.
    if dtype.itemsize > 2 or dtype == torch.bfloat16:
        return rows
    limits = torch.finfo(dtype)
    return rows.clamp(limits.min, limits.max)


def _gradient(param: Tensor) -> Tensor:
    gradient = param.grad
    assert gradient is not None, "a row set holds parameters with a gradient"
    return gradient.detach()

"""What momentum remembers, kept through a training: the sums of `phenomena.Memory`, updated by every step.

The update is part of the optimizer's step, as a hook that runs before it: where the step is captured the update is,
too, and it is replayed with it. Rows of all lengths are kept as one, filled up with zeros, since launches cost more
than numbers; zeros change neither norms nor inner products, and nothing else enters the sums.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from steradian import optim
from steradian.phenomena import Memory

__all__ = ["Remembered"]

Rows = Callable[[Callable[[Tensor], Tensor]], Tensor]


class Remembered:
    """The memory of all rows of a training.

    Args:
        optimizers: of the training; the first has the rows, and its momentum is the sum that the paper writes.
        batches: for each batch of rows of one length, a function that gives the rows of the points or of their
            gradients.

    Raises:
        ValueError: the momentum moves with its rows, which neutralizes the phenomena.
    """

    def __init__(self, optimizers: Sequence[Optimizer], batches: Sequence[Rows]) -> None:
        optimizer = optimizers[0]
        letters = set("".join(str(group.get("without", "")) for group in optimizer.param_groups))
        if letters & {"b", "c"} or not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | optim.Adam):
            raise ValueError(
                "phenomena are measured where momentum is a sum of past gradients, with SGD-M, Adam, AdamW† and "
                f"Adam w/o (a); got {type(optimizer).__name__} without {''.join(sorted(letters)) or 'nothing'}"
            )
        self.optimizer, self.batches = optimizer, batches
        self.shapes = [rows(Tensor.detach).shape for rows in batches]
        self.memory = Memory(check=False)
        self._last: tuple[Tensor, Tensor] | None = None
        self._rehearsing = True
        optimizer.register_step_pre_hook(self._update)

    @property
    def beta(self) -> float:
        """The momentum factor β."""
        group = self.optimizer.param_groups[0]
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    def part(self, number: int) -> Memory:
        """A copy of what is remembered of one batch."""
        start = sum(count for count, _ in self.shapes[:number])
        count, width = self.shapes[number]
        made = Memory(check=False)
        made.load({name: tensor[start : start + count, :width] for name, tensor in self.memory.state().items()})
        return made

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        points, gradients = self._rows(Tensor.detach), self._rows(_gradient)
        if self._rehearsing and not _capturing(points):
            self._last = points, gradients
        self.memory.update(points, gradients, beta=self.beta)

    def _rows(self, what: Callable[[Tensor], Tensor]) -> Tensor:
        """All rows behind each other, a copy."""
        widest = max(width for _, width in self.shapes)
        parts = [rows(what) for rows in self.batches]
        return torch.cat([functional.pad(part, (0, widest - part.shape[1])) for part in parts])

    def redo(self, kept: Mapping[str, Tensor]) -> None:
        """The last step that was taken, and no other, after a state: those before it were rehearsals."""
        assert self._last is not None, "a step must have been taken"
        self.memory.load(kept)
        self.memory.update(*self._last, beta=self.beta)
        self._last, self._rehearsing = None, False

    def state(self, *, device: str | torch.device | None = None) -> dict[str, Tensor]:
        """A copy of all sums."""
        return {name: t.to(device or t.device, copy=True) for name, t in self.memory.state().items()}

    def load(self, state: Mapping[str, Tensor], *, device: str | torch.device) -> None:
        """Go on from a copy."""
        self.memory.load({name: tensor.to(device) for name, tensor in state.items()})


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None, "every row has a gradient when its optimizer steps"
    return param.grad.detach()


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

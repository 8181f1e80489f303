"""What momentum remembers, kept through a training: the sums of `phenomena.Memory`, updated by every step.

The update is part of the optimizer's step, as a hook that runs before it: where the step is captured the update is,
too, and it is replayed with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import optim
from steradian.phenomena import Memory

__all__ = ["Remembered"]

Rows = Callable[[Callable[[Tensor], Tensor]], Tensor]


class Remembered:
    """A `Memory` for each batch of rows of one length.

    Args:
        optimizers: of a training; the first has the rows, and its momentum is the sum that the paper writes.
        batches: for each, a function that gives the rows of the points or of their gradients, as a copy.

    Raises:
        ValueError: the momentum moves with its rows, which neutralizes the phenomena.
    """

    def __init__(self, optimizers: Sequence[Optimizer], batches: Sequence[Rows]) -> None:
        optimizer = optimizers[0]
        self.optimizer, self.batches = optimizer, batches
        self.parts = [Memory(check=False) for _ in batches]
        self._last: list[tuple[Tensor, Tensor]] | None = []
        letters = set("".join(str(group.get("without", "")) for group in optimizer.param_groups))
        if letters & {"b", "c"} or not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | optim.Adam):
            raise ValueError(
                "phenomena are measured where momentum is a sum of past gradients, with SGD-M, Adam, AdamW† and "
                f"Adam w/o (a); got {type(optimizer).__name__} without {''.join(sorted(letters)) or 'nothing'}"
            )
        optimizer.register_step_pre_hook(self._update)

    @property
    def beta(self) -> float:
        """The momentum factor β."""
        group = self.optimizer.param_groups[0]
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        seen = [(rows(Tensor.detach), rows(_gradient)) for rows in self.batches]
        if self._last is not None and not _capturing(seen[0][0]):
            self._last = seen
        self._take(seen)

    def _take(self, seen: Sequence[tuple[Tensor, Tensor]]) -> None:
        for memory, (points, gradients) in zip(self.parts, seen, strict=True):
            memory.update(points, gradients, beta=self.beta)

    def redo(self, kept: Sequence[dict[str, Tensor]]) -> None:
        """The last step that was taken, and no other, after a state: those before it were rehearsals."""
        assert self._last, "a step must have been taken"
        self.load(kept, device=self._last[0][0].device)
        self._take(self._last)
        self._last = None

    def state(self, *, device: str | torch.device | None = None) -> list[dict[str, Tensor]]:
        """A copy of all sums."""
        return [
            {name: tensor.to(device or tensor.device, copy=True) for name, tensor in memory.state().items()}
            for memory in self.parts
        ]

    def load(self, states: Sequence[dict[str, Tensor]], *, device: str | torch.device) -> None:
        """Go on from a copy."""
        for memory, state in zip(self.parts, states, strict=True):
            memory.load({name: tensor.to(device) for name, tensor in state.items()})


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None, "every row has a gradient when its optimizer steps"
    return param.grad.detach()


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

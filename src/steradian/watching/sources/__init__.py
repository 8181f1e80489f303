"""How a step is known: from an optimizer's telemetry, from its state, or from the weights before and after it.

A source writes a few numbers per row for each observed step, on the device and without waiting for it. Everything else
follows from these numbers and is computed for many steps at once, when they are flushed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from steradian.image import ImageNumbers
from steradian.watching.rows import WatchedGroup

__all__ = ["PHENOMENA", "UNMEASURED", "Quantities", "Source"]

PHENOMENA = ("deformation", "gradient_memory", "l2_memory", "radius_ratio")  # (a), (b1), (b2) and (c)
UNMEASURED = "it needs every step and five tensors of the size of the weights: pass phenomena=True"
Quantities = dict[str, Tensor]


class Source(ABC):
    """Numbers per row for each observed step of rows on one device."""

    watched: Sequence[WatchedGroup]  # in the order of their places
    columns: tuple[str, ...]  # the names of the numbers
    dtype: torch.dtype  # of the numbers
    missing: dict[str, str]  # quantities that this source cannot give, with the reason
    each_step: bool = False  # `before` and `after` must be called at every step, also at those that are not recorded
    beforehand: bool = True  # `before` must be called at an observed step
    two_points: bool = True  # it reads the weights before and after the step, and does not rely on the state
    closure: bool = False  # the step was called with a closure, which computes the gradient
    known: list[int] | None = None  # what it read of parameters; None if they may lie elsewhere, or have other settings
    all_step: bool = False  # at the last observation every parameter had a gradient, as far as the source knows

    def open(self) -> None:  # noqa: B027
        """Called when the watch starts."""

    def before(self) -> None:  # noqa: B027
        """Called before a step."""

    @abstractmethod
    def after(self, out: Tensor) -> None:
        """Called after a step: write the numbers of the active rows to `out`, (n, columns)."""

    def expect(self, out: Tensor) -> None:  # noqa: B027
        """Called if the next step is observed too: its numbers go to `out`."""

    @abstractmethod
    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        """The images of many steps, (steps, n), and further quantities, from the numbers (steps, n, columns).

        `rates` and `decays` are the rate and the decoupled decay of each row in each step, or (steps, 1) of all rows.
        """

    def distrust_state(self) -> None:  # noqa: B027
        """Called if someone else may change the weights after the step: what the state says is not what happened."""

    def nbytes(self) -> int:
        """Memory on the device that the source holds now."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Called when the watch stops."""

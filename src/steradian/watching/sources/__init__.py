"""How a step is known: from an optimizer's telemetry, from its state, or from the weights before and after it.

A source writes a few numbers per row for each observed step, on the device and without waiting for it. Everything else
follows from these numbers and is computed for many steps at once, when they are flushed.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from steradian.image import ImageNumbers

__all__ = ["PHENOMENA", "UNMEASURED", "Quantities", "Source"]

PHENOMENA = ("gradient_memory", "l2_memory", "radius_ratio")
"""The phenomena that depend on earlier steps; the deformation (a) depends only on one step."""

UNMEASURED = "it needs every step and five tensors of the size of the weights: pass phenomena=True"

Quantities = dict[str, Tensor]


class Source(ABC):
    """Numbers per row for each observed step of the rows on one device.

    Attributes:
        columns: the names of the numbers.
        missing: quantities that this source cannot give, with the reason.
        each_step: `before` and `after` must be called at every step, also at those that are not recorded.
        beforehand: `before` must be called at an observed step.
        ahead: `expect` may be called with the place of the next observation.
        dtype: of the numbers; None: the one that rows are computed in.
    """

    columns: tuple[str, ...]
    missing: dict[str, str]
    each_step: bool = False
    beforehand: bool = True
    ahead: bool = False
    dtype: torch.dtype | None = None

    @abstractmethod
    def open(self) -> None:
        """Called when the watch starts."""

    @abstractmethod
    def before(self) -> None:
        """Called before a step."""

    @abstractmethod
    def after(self, out: Tensor) -> None:
        """Called after a step: write the numbers of the active rows to `out`, (n, columns)."""

    def expect(self, out: Tensor) -> None:
        """Called if the next step is observed too: its numbers go to `out`."""
        raise AssertionError("expect is called only if ahead is True")

    @abstractmethod
    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        """The images of many steps, (steps, n), and further quantities, from the numbers (steps, n, columns).

        Args:
            values: the numbers.
            rates: the rate of each row in each step.
            decays: its decoupled decay.
        """

    @abstractmethod
    def close(self) -> None:
        """Called when the watch stops."""

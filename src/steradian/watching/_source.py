"""What every source of numbers has in common: a few per row for each observed step, and what follows from them.

A source writes its numbers on the device and without waiting for it. Everything else follows from these numbers and is
computed for many steps at once, when they are handed over.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steradian.image import ImageStep
from steradian.optim._rows import arithmetic
from steradian.watching._followed import Followed

__all__ = [
    "PHENOMENA",
    "UNMEASURED",
    "Quantities",
    "Source",
    "decoupled",
    "dtype_of",
    "nominal",
    "of_image",
    "placed",
]

PHENOMENA = ("gradient_memory", "l2_memory", "radius_ratio")
"""The phenomena that need the steps before; the deformation (a) shows in one step."""

UNMEASURED = "it needs every step and five tensors of the size of the weights: pass phenomena=True"

Quantities = dict[str, Tensor]


class Source(ABC):
    """Numbers per row for each observed step of the rows on one device.

    Attributes:
        columns: the names of the numbers.
        missing: quantities that this source cannot give, and why.
        each_step: it must see every step, also those that are not recorded.
        beforehand: it must see what there is before a step, too.
        dtype: what the numbers are kept in; None: what rows are computed in.
    """

    columns: tuple[str, ...]
    missing: dict[str, str]
    each_step: bool = False
    beforehand: bool = True
    dtype: torch.dtype | None = None

    def open(self) -> None:  # noqa: B027
        """Called when observation begins."""

    def before(self) -> None:  # noqa: B027
        """Called before a step."""

    def again(self) -> bool:
        """Called after a step: whether it was one of the same parameters, in the same groups, as at the last call."""
        return False

    @abstractmethod
    def after(self, out: Tensor) -> None:
        """Called after a step: write the numbers of the active rows to `out`, (n, columns)."""

    def expect(self, out: Tensor) -> None:  # noqa: B027
        """Called where the next step is observed as well: its numbers will be wanted in `out`."""

    @abstractmethod
    def quantities(self, values: Tensor, rates: Tensor, decays: Tensor) -> Quantities:
        """Every quantity, (steps, n), from the numbers of many steps, (steps, n, columns).

        Args:
            values: the numbers.
            rates: the rate of each row in each step.
            decays: its decoupled decay.
        """

    def close(self) -> None:  # noqa: B027
        """Called when nothing more will be observed."""


def of_image(image: ImageStep) -> Quantities:
    """What the image of a step says of each row; without what two points cannot tell."""
    found = {
        "radius": image.radius,
        "angle": image.angle,
        "velocity": image.velocity,
        "taylor": image.taylor,
        "collapsed": image.collapsed.to(image.radius),
        "effective_lr": image.effective_lr,
        "direction_norm": image.direction_norm,
        "radial": image.radial,
        "nu": image.nu,
    }
    return {name: value for name, value in found.items() if value is not None}


def nominal(options: Mapping[str, Any]) -> float | Tensor:
    """The rate in a param group's settings; NaN where there is none, or the optimizer makes its own (lr=None)."""
    rate: float | Tensor | None = options.get("lr")
    return float("nan") if rate is None else rate


def decoupled(options: Mapping[str, Any]) -> float:
    """The decoupled decay δ that a param group's rows take: AdamW's, and that of our optimizers."""
    decay = options.get("weight_decay")
    if decay is None:
        return 0.0
    decay = float(decay.item() if isinstance(decay, Tensor) and decay.device.type == "cpu" else decay)
    if "wd_ratio" in options:
        return decay * float(options["wd_ratio"])
    return decay if options.get("decoupled_weight_decay") else 0.0


def placed(followed: Sequence[Followed], *, key: Callable[[Followed], Any]) -> list[Followed]:
    """The rows in the order in which a source writes them, each told its place."""
    ordered, start = sorted(followed, key=key), 0
    for entry in ordered:
        entry.start = start
        start += entry.rows
    return ordered


def dtype_of(followed: Iterable[Followed]) -> torch.dtype:
    """The dtype that numbers per row are kept in."""
    wide = any(arithmetic(param.dtype) == torch.float64 for entry in followed for param in entry.params)
    return torch.float64 if wide else torch.float32

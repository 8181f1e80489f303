"""Our optimizers' steps as they tell them themselves."""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from steradian.image import ImageStep
from steradian.optim import TELEMETRY
from steradian.optim._base import RowOptimizer
from steradian.optim._telemetry import Telemetry
from steradian.watching._followed import Followed
from steradian.watching._source import PHENOMENA, Quantities, Source, of_image, placed

__all__ = ["Told"]

_LISTENERS: WeakKeyDictionary[RowOptimizer, tuple[int, bool]] = WeakKeyDictionary()
"""How many watches listen to an optimizer's telemetry, and whether it was off before the first."""


class Told(Source):
    """The telemetry of our optimizers: one copy per observed step, or none where a fused step leaves it in place."""

    columns = TELEMETRY
    beforehand = False

    def __init__(self, optimizer: RowOptimizer, followed: Sequence[Followed]) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        order = {id(param): k for k, param in enumerate(params)}
        self.followed = placed(followed, key=lambda f: order[id(f.params[0])])
        self.optimizer = optimizer
        self._buffers: tuple[Tensor, ...] | None = None
        self._rows: list[tuple[Tensor, slice | None]] = []
        self._direct: bool | None = None
        self._last: weakref.ref[object] | None = None
        why = "this optimizer's telemetry does not hold it; pass phenomena=True to measure it from the weights"
        self.missing = dict.fromkeys(("deformation", *PHENOMENA), why)

    def again(self) -> bool:
        # The optimizer has compared parameters, groups and gradients, where it took a step that it remembers.
        taken = self.optimizer._remembered
        same = taken is not None and self._last is not None and self._last() is taken
        if not same:
            self._last = None if taken is None else weakref.ref(taken)
        return same

    def after(self, out: Tensor) -> None:
        telemetry = self.optimizer.telemetry
        if telemetry is None:  # someone else stopped it
            self.optimizer.emit()
            out.fill_(float("nan"))
            return
        if telemetry.left is out:  # by the step itself
            telemetry.left = None
            return
        if telemetry.buffers is not self._buffers:
            self._buffers, self._rows = telemetry.buffers, self._find(telemetry)
            self._direct = None
        for rows, span in self._rows:
            (out if span is None else out[span]).copy_(rows)

    def expect(self, out: Tensor) -> None:
        telemetry = self.optimizer.telemetry
        if telemetry is not None:
            if self._direct is None:  # looked at once: what comes later is like it
                self._direct = self._is_like_buffer(out)
            telemetry.also = out if self._direct else None

    def _is_like_buffer(self, out: Tensor) -> bool:
        """Whether `out` is laid out as the telemetry: its rows are those that are followed, and nothing else."""
        if self._buffers is None or len(self._buffers) != 1 or len(self._rows) != 1:
            return False
        [buffer], [(rows, span)] = self._buffers, self._rows
        return span is None and rows.shape == buffer.shape == out.shape and buffer.dtype == out.dtype

    def _find(self, telemetry: Telemetry) -> list[tuple[Tensor, slice | None]]:
        """Where the telemetry of the followed rows lies, and their places; all of them (None) if nothing is between."""
        there = [entry for entry in self.followed if entry.params[0] in telemetry]
        found = [(entry, *telemetry.place(entry.params[0])) for entry in there]
        behind = len(there) == len(self.followed) and all(
            one[1] == other[1] and one[2].stop == other[2].start for one, other in pairwise(found)
        )
        if found and behind:
            _, buffer, first = found[0]
            whole = telemetry.buffers[buffer][first.start : found[-1][2].stop]
            return [(whole, None)]
        return [(telemetry[entry.params[0]], entry.span) for entry in there]

    def quantities(self, values: Tensor, rates: Tensor, decays: Tensor) -> Quantities:
        told = dict(zip(self.columns, values.unbind(-1), strict=True))
        start = told["radius"] * (1 - rates * decays)
        along = start * (1 - told["radial"])
        image = ImageStep(
            radius=told["radius"],
            start=start,
            direction=torch.ones_like(along).unsqueeze(-1),
            inward=told["radial"] * start,
            tangential=(along * told["angle"].tan()).unsqueeze(-1),
            lr=1.0,
            scale=1 / (told["effective_lr"] * along * start),
        )
        # The image is that of a rate of 1, so its ν is that of the step over the rate.
        found = of_image(image)
        found |= {"nu": found["nu"] * rates, "radial": told["radial"], "angle": told["angle"]}
        # Of a row without a direction the telemetry has no rate to divide by.
        for name in ("nu", "direction_norm"):
            found[name] = found[name].masked_fill(image.collapsed, 0)
        return found | {"defect": told["defect"], "gradient_norm": told["gradient_norm"], "lr": rates}

    def open(self) -> None:
        listeners, ours = _LISTENERS.get(self.optimizer, (0, self.optimizer.telemetry is None))
        _LISTENERS[self.optimizer] = (listeners + 1, ours)
        self.optimizer.emit()

    def close(self) -> None:
        # An optimizer that is being collected is not among them any more, and needs nothing turned off.
        listeners, ours = _LISTENERS.pop(self.optimizer, (1, False))
        if self.optimizer.telemetry is not None:
            self.optimizer.telemetry.also = None
        if listeners > 1:
            _LISTENERS[self.optimizer] = (listeners - 1, ours)
        elif ours:
            self.optimizer.emit(False)

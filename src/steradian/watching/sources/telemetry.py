"""Steps of our optimizers, from the telemetry that they write themselves."""

from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from steradian.image import ImageNumbers
from steradian.optim import TELEMETRY, RowOptimizer, Telemetry
from steradian.watching.rows import WatchedGroup, dtype_of, place
from steradian.watching.sources import PHENOMENA, UNMEASURED, Quantities, Source

__all__ = ["TelemetrySource"]

_LISTENERS: WeakKeyDictionary[RowOptimizer, tuple[int, bool]] = WeakKeyDictionary()
"""How many watches use an optimizer's telemetry, and whether it was off before the first."""


class TelemetrySource(Source):
    """One copy of the telemetry per observed step, or none where a fused step writes it to the buffer itself."""

    columns = TELEMETRY
    beforehand = False

    def __init__(self, optimizer: RowOptimizer, watched: Sequence[WatchedGroup]) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        order = {id(param): k for k, param in enumerate(params)}
        self.watched = place(watched, key=lambda group: order[id(group.params[0])])
        self.optimizer = optimizer
        self.dtype = dtype_of(watched)
        self._buffers: tuple[Tensor, ...] | None = None
        self._rows: list[tuple[Tensor, slice | None]] = []
        self._direct: bool | None = None
        self.missing = dict.fromkeys(PHENOMENA, UNMEASURED)

    def open(self) -> None:
        listeners, ours = _LISTENERS.get(self.optimizer, (0, self.optimizer.telemetry is None))
        _LISTENERS[self.optimizer] = (listeners + 1, ours)
        self.optimizer.emit()

    def after(self, out: Tensor) -> None:
        telemetry = self.optimizer.telemetry
        if telemetry is None:  # turned off by someone else
            self.all_step = False
            self.optimizer.emit()
            out.fill_(float("nan"))
            return
        self.all_step = telemetry.left is out  # written by the step itself, for all rows
        if self.all_step:
            telemetry.left = None
            return
        if telemetry.buffers is not self._buffers:
            self._buffers, self._rows, self._direct = telemetry.buffers, self._find(telemetry), None
        for rows, span in self._rows:
            (out if span is None else out[span]).copy_(rows)

    def expect(self, out: Tensor) -> None:
        if self.optimizer.telemetry is not None:
            if self._direct is None and self._buffers and self._rows:  # checked once: later places have the same form
                # Whether the watched rows are all rows of the telemetry, in its order.
                buffer, (rows, span) = self._buffers[0], self._rows[0]
                one = len(self._buffers) == 1 and span is None
                self._direct = one and rows.shape == buffer.shape == out.shape and buffer.dtype == out.dtype
            self.optimizer.telemetry.also = out if self._direct else None

    def _find(self, telemetry: Telemetry) -> list[tuple[Tensor, slice | None]]:
        """The telemetry of the watched rows with their places; one piece for all (None) if it is contiguous."""
        there = [group for group in self.watched if group.params[0] in telemetry]
        found = [telemetry.place(group.params[0]) for group in there]
        contiguous = all(one[0] == other[0] and one[1].stop == other[1].start for one, other in pairwise(found))
        if found and contiguous and len(there) == len(self.watched):
            (buffer, first), (_, last) = found[0], found[-1]
            return [(telemetry.buffers[buffer][first.start : last.stop], None)]
        return [(telemetry[group.params[0]], group.span) for group in there]

    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        known = dict(zip(self.columns, values.unbind(-1), strict=True))
        start = known["radius"] * (1 - rates * decays)
        along = start * (1 - known["radial"])
        # The image of a step of rate 1, so that nothing is divided by a rate of 0.
        across, scale = (along * known["angle"].tan()).abs(), 1 / (known["effective_lr"] * along * start)
        image = ImageNumbers(known["radius"], start, known["radial"] * start, across, lr=1.0, scale=scale)
        assert image.nu is not None
        assert image.direction_norm is not None
        # Optimizers on the sphere also change the radius, which the image does not.
        radius, radius_after, angle = known["radius"], known["next_radius"], known["angle"]
        outward = (radius_after - radius - 2 * radius_after * (angle / 2).sin() ** 2).abs()
        length = torch.hypot(outward, radius_after * angle.sin())
        # The telemetry of a collapsed row has no effective rate to divide by.
        return image, {
            "update": (length / radius).masked_fill(image.collapsed, 0),
            "radial_share": (outward / length.masked_fill(length == 0, 1)).masked_fill(image.collapsed, 0),
            "direction_norm": image.direction_norm.masked_fill(image.collapsed, 0),
            "nu": (image.nu * rates).masked_fill(image.collapsed, 0),
            **{name: known[name] for name in ("radial", "angle", "defect", "gradient_norm")},
            "lr": rates,
        }

    def close(self) -> None:
        # An optimizer that is being garbage-collected is no longer a key, and needs nothing turned off.
        listeners, ours = _LISTENERS.pop(self.optimizer, (1, False))
        if self.optimizer.telemetry is not None:
            self.optimizer.telemetry.also = None
        if listeners > 1:
            _LISTENERS[self.optimizer] = (listeners - 1, ours)
        elif ours:
            self.optimizer.emit(False)

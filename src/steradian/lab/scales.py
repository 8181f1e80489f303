"""From data to a picture: axes, linear or logarithmic, and round numbers to put at them."""

import math
from collections.abc import Sequence
from typing import Self

__all__ = ["Scale", "label"]

_ABOUT = 6  # ticks


class Scale:
    """One axis.

    Args:
        low: the smallest value that is shown.
        high: the largest.
        start: where the smallest is.
        end: where the largest is.
        logarithmic: equal ratios take equal room.

    >>> scale = Scale(1, 100, 0, 200, logarithmic=True)
    >>> scale(10), [text for _, text in scale.ticks()]
    (100.0, ['1', '2', '5', '10', '20', '50', '100'])
    """

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> None:
        if logarithmic and low <= 0:
            raise ValueError(f"a logarithmic axis must begin above 0, got {low}")
        self.low, self.high = low, high if high > low else low + 1
        self.start, self.end, self.logarithmic = start, end, logarithmic

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float, *, logarithmic: bool = False) -> Self:
        """An axis with a little room around these values."""
        low, high = min(values, default=1.0), max(values, default=2.0)
        if logarithmic:
            room = max((high / low) ** 0.05, 1.05)
            return cls(low / room, high * room, start, end, logarithmic=True)
        gap = 0.05 * (high - low) or 0.5
        return cls(low - gap, high + gap, start, end)

    def __call__(self, value: float) -> float:
        """Where a value is."""
        low, high, at = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def has(self, value: float) -> bool:
        """Whether the value has a place at all."""
        return math.isfinite(value) and (value > 0 or not self.logarithmic)

    def shows(self, value: float) -> bool:
        """Whether the value lies between the ends."""
        return self.low <= value <= self.high

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers between the ends, and their labels: powers of ten where there are enough of them."""
        if self.logarithmic:
            powers = self._between(range(1, 2))
            if len(powers) > 3:
                return [(value, label(value, power=True)) for value in powers[:: math.ceil(len(powers) / _ABOUT)]]
            some = next(
                (found for found in (self._between((1, 2, 5)), self._between(range(1, 10))) if len(found) > 2), []
            )
            if some:
                return [(value, label(value)) for value in some]
        rough = (self.high - self.low) / _ABOUT
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
        found = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [(value, label(value)) for value in found]

    def _between(self, digits: Sequence[int]) -> list[float]:
        """These digits times powers of ten."""
        powers = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        return [float(f"{digit}e{k}") for k in powers for digit in digits if self.shows(float(f"{digit}e{k}"))]


def label(value: float, *, power: bool = False) -> str:
    """A tick in few characters.

    >>> label(400.0), label(0.30000000000000004), label(1e-5), label(0.001, power=True)
    ('400', '0.3', '10⁻⁵', '10⁻³')
    """
    exponent = round(math.log10(value)) if value > 0 else 0
    if value == float(f"1e{exponent}") and exponent and (power or not -5 < exponent < 5):
        return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:.4g}"

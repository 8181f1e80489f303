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
    >>> scale(10), scale.ticks()
    (100.0, [1.0, 10.0, 100.0])
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

    def ticks(self) -> list[float]:
        """Round numbers between the ends: powers of ten where there are at least two of them."""
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(powers) >= 2:
                return [10.0**k for k in powers[:: math.ceil(len(powers) / _ABOUT)]]
        rough = (self.high - self.low) / _ABOUT
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
        return [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def label(value: float, *, power: bool = False) -> str:
    """A tick in few characters.

    >>> label(400.0), label(0.30000000000000004), label(1e-5), label(0.001, power=True)
    ('400', '0.3', '10⁻⁵', '10⁻³')
    """
    exponent = math.log10(value) if value > 0 else 0.5
    if exponent == round(exponent) and (power or not 1e-4 <= value < 1e5) and value != 1:
        return "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:.4g}"

"""Welch's t-test of equal means from means and spreads alone."""

import math

__all__ = ["student_p", "welch_p"]

Sample = tuple[float, float, int]
"""Mean, standard deviation, and how many there were."""


def welch_p(one: Sample, other: Sample) -> float | None:
    """Two-sided p of equal means by Welch's t-test; None where there are fewer than two of one.

    >>> round(welch_p((91.92, 0.18, 5), (91.81, 0.20, 5)), 2)
    0.39
    """
    if one[2] < 2 or other[2] < 2:
        return None
    errors = [spread**2 / count for _, spread, count in (one, other)]
    if sum(errors) == 0:
        return 1.0 if one[0] == other[0] else 0.0
    freedom = sum(errors) ** 2 / sum(e**2 / (s[2] - 1) for e, s in zip(errors, (one, other), strict=True))
    return student_p((one[0] - other[0]) / math.sqrt(sum(errors)), freedom)


def student_p(t: float, freedom: float) -> float:
    """P(|T| ≥ |t|) of Student's distribution with ν degrees of freedom: I_x(ν/2, 1/2) with x = ν/(ν + t²).

    >>> round(student_p(2.776, 4), 3)  # the 5 % point of four degrees of freedom
    0.05
    """
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    fraction = 1.0
    for m in range(200, 0, -1):  # from the inside out; far more terms than doubles can tell apart
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    return front / (1 - (a + b) / (a + 1) * x / fraction)

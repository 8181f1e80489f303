"""Alerts about a training, each raised once."""

from collections.abc import Iterator, Mapping, Set

import numpy as np
from numpy.typing import NDArray

from steradian.watching.records import STATISTICS, Alert, Block

__all__ = ["Alerts"]

_TIMES = 3.0
"""An equilibrium counts as reached after this many times 1/(ηλ) steps, which leave 5 % of the way."""
_OUT = 2.0
"""The angle is out of its equilibrium beyond this factor."""
_APART = 100.0
"""Groups are far apart if their angles differ by this factor."""
_LARGE_DEFECT = 0.1
_FIRST = 10
"""Observed steps whose defects tell whether rows were ever invariant."""
_NEGLIGIBLE = 10.0
"""Weight decay has no effect yet if it balances at this many times the present radius."""
_EARLY = 50
"""Observations before which groups are not compared, nor weight decay judged."""

Numbers = NDArray[np.float64]


class Alerts:
    """Checks blocks of records; raises each alert once for each group.

    Args:
        decays: weight decay of each group that has one; 0 if it has no effect on the rows.
        invariant: names of the groups that are invariant; most alerts are about these.

    Attributes:
        raised: all alerts so far.
    """

    def __init__(self, decays: Mapping[str, float], invariant: Set[str]) -> None:
        self.decays, self.invariant = decays, invariant
        self.raised: list[Alert] = []
        self.observed = 0
        self.first: int | None = None
        self._early_defects: dict[str, list[float]] = {}

    def check(self, block: Block) -> list[Alert]:
        """New alerts in a block."""
        if not len(block.steps):
            return []
        if self.first is None:
            self.first = int(block.steps[0])
        known = {(alert.kind, alert.group) for alert in self.raised}
        new = []
        for check in (_not_finite, _h1, _h2, _collapsed, self._defect, self._equilibrium, self._no_effect, self._apart):
            for alert in check(block):
                # A bias that starts at 0 has no direction, and a row that is not invariant has a radial gradient.
                applies = alert.group in self.invariant or check is _not_finite
                if applies and (alert.kind, alert.group) not in known:
                    known.add((alert.kind, alert.group))
                    new.append(alert)
        self.observed += len(block.steps)
        self.raised += new
        return new

    def _defect(self, block: Block) -> Iterator[Alert]:
        """The gradient is not orthogonal to the rows."""
        if not _has(block, "defect"):
            return
        assert self.first is not None
        defect = _get(block, "defect", "median")
        for g, group in enumerate(block.groups):
            early = self._early_defects.setdefault(group, [])
            early += defect[block.active[:, g], g][: _FIRST - len(early)].tolist()
        large = (defect > _LARGE_DEFECT) & block.active
        for k, g, group in _where(block, large & (large.sum(axis=0) > len(large) / 2)):
            # ε matters only once a radius has become small, so not in the first steps of a training.
            always = self.first < _EARLY and np.median(self._early_defects[group]) > _LARGE_DEFECT
            why = (
                "this from the first steps on, so they are not invariant"
                if always
                else "the ε of its normalization matters, or the gradient is so small that it is rounding"
            )
            text = (
                f"the gradient is not orthogonal to the rows (|cos(x, ∇L)| = {defect[k, g]:.2g} in the median): {why}"
            )
            yield Alert(int(block.steps[k]), group, "defect", text)

    def _equilibrium(self, block: Block) -> Iterator[Alert]:
        """The angle is not that of the equilibrium, although there was time to reach it."""
        if not _has(block, "angle", "equilibrium_angle", "lr"):
            return
        angle, expected = _get(block, "angle", "median"), _get(block, "equilibrium_angle", "median")
        rates = _get(block, "lr", "mean")
        decays = np.array([self.decays.get(group, 0.0) for group in block.groups])
        assert self.first is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = angle / expected
            reached = (block.steps - self.first)[:, None] * rates * decays > _TIMES
        out = reached & block.active & (ratio > 0) & ((ratio > _OUT) | (ratio < 1 / _OUT))
        # Angles vary too much between steps to judge a single one.
        for g in np.flatnonzero(out.sum(0) > len(out) / 2):
            k = int(np.flatnonzero(out[:, g])[-1])
            text = (
                f"it turns {ratio[k, g]:.2g} times as far per step as in equilibrium "
                f"({angle[k, g]:.2g} instead of {expected[k, g]:.2g} rad): its effective rate is not the one that "
                "the rate and the weight decay lead to"
            )
            yield Alert(int(block.steps[k]), block.groups[g], "equilibrium", text)

    def _no_effect(self, block: Block) -> Iterator[Alert]:
        """Weight decay would balance only at a far larger radius, or the radius is fixed."""
        if self.observed < _EARLY:
            return
        for group, decay in self.decays.items():
            if decay == 0 and group in block.groups:
                text = "its weight decay has no effect: this optimizer keeps the radius fixed"
                yield Alert(int(block.steps[-1]), group, "weight decay", text)
        if not _has(block, "radius", "equilibrium_radius", "lr"):
            return
        radius, expected = _get(block, "radius", "median"), _get(block, "equilibrium_radius", "median")
        rates = _get(block, "lr", "mean")
        for k, g, group in _where(block, expected > _NEGLIGIBLE * radius):
            time = 1 / max(rates[k, g] * self.decays.get(group, 0.0), 1e-300)
            text = (
                f"its weight decay has no effect yet: it would balance at a radius {expected[k, g] / radius[k, g]:.2g} "
                f"times the present one, which takes about {time:.1g} steps"
            )
            yield Alert(int(block.steps[k]), group, "weight decay", text)

    def _apart(self, block: Block) -> Iterator[Alert]:
        """Some layers turn much faster than others."""
        if self.observed < _EARLY or len(block.groups) < 2 or not _has(block, "angle"):
            return
        invariant = np.array([group in self.invariant for group in block.groups])
        angle = np.where(block.active & invariant, _get(block, "angle", "median"), np.nan)[-1]
        if not (angle > 0).sum() > 1:
            return
        angle = np.where(angle > 0, angle, np.nan)
        high, low = int(np.nanargmax(angle)), int(np.nanargmin(angle))
        if angle[high] > _APART * angle[low]:
            text = (
                f"it turns {angle[high] / angle[low]:.2g} times as far per step as {block.groups[low]} "
                f"({angle[high]:.2g} and {angle[low]:.2g} rad): the effective rates of the layers are far apart"
            )
            yield Alert(int(block.steps[-1]), block.groups[high], "apart", text)


def _h1(block: Block) -> Iterator[Alert]:
    yield from _above(
        block, "radial", "max", 1.0, "H1", "H1 is violated: a step crossed the origin (A⟨c,u⟩ = {0:.3g}, not below 1)"
    )


def _h2(block: Block) -> Iterator[Alert]:
    yield from _above(block, "velocity", "max", np.pi, "H2", "H2 is violated: z = {0:.3g} is not below π")


def _collapsed(block: Block) -> Iterator[Alert]:
    text = "{1} of its rows collapsed: their radius is too small for a direction to exist"
    yield from _above(block, "collapsed", "mean", np.nextafter(0, 1), "collapsed", text)


def _not_finite(block: Block) -> Iterator[Alert]:
    found = [
        Alert(int(block.steps[k]), group, "not finite", f"its {what} NaN or infinite numbers")
        for quantity, what in (("radius", "weights hold"), ("gradient_norm", "gradient holds"))
        if _has(block, quantity)
        for k, _, group in _where(block, ~np.isfinite(_get(block, quantity, "mean")))
    ]
    # Of both, the first is reported. A step may skip a row whose gradient is not finite, so both are checked.
    yield from sorted(found, key=lambda alert: alert.step)


def _above(block: Block, quantity: str, statistic: str, bound: float, kind: str, text: str) -> Iterator[Alert]:
    if not _has(block, quantity):
        return
    values = _get(block, quantity, statistic)
    for k, g, group in _where(block, values >= bound):
        value = values[k, g]
        yield Alert(int(block.steps[k]), group, kind, text.format(value, f"{100 * value:.3g} %"))


def _where(block: Block, bad: NDArray[np.bool_]) -> Iterator[tuple[int, int, str]]:
    """Step and group of the first bad entry of every group."""
    bad = bad & block.active
    for g in np.flatnonzero(bad.any(axis=0)):
        yield int(bad[:, g].argmax()), int(g), block.groups[g]


def _has(block: Block, *quantities: str) -> bool:
    return all(quantity in block.quantities for quantity in quantities)


def _get(block: Block, quantity: str, statistic: str) -> Numbers:
    values: Numbers = block.values[:, block.quantities.index(quantity), :, STATISTICS.index(statistic)]
    return values.astype(np.float64)

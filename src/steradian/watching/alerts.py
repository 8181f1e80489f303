"""What a person should be told about a training, in words, once each."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from steradian.watching._block import Alert, Block
from steradian.watching.records import STATISTICS

__all__ = ["Alerts"]

# An equilibrium is reached within a few times 1/(ηλ) steps; three of them leave 5 % of the way.
_SETTLED = 3.0
_OUT = 2.0
_APART = 100.0
_LARGE_DEFECT = 0.1
_NEGLIGIBLE = 10.0
_EARLY = 50

Numbers = NDArray[np.float64]


class Alerts:
    """Looks through blocks of records; remembers what was said.

    Args:
        decays: weight decay of each group, for those that have one; 0 where it does nothing to the rows.
    """

    def __init__(self, decays: Mapping[str, float]) -> None:
        self.decays = decays
        self.said: set[tuple[str, str]] = set()
        self.all: list[Alert] = []
        self.observed = 0
        self.first: int | None = None

    def look(self, block: Block) -> list[Alert]:
        """New alerts in a block."""
        if not len(block.steps):
            return []
        if self.first is None:
            self.first = int(block.steps[0])
        found = []
        for check in (_not_finite, _h1, _h2, _collapsed, _defect, self._equilibrium, self._no_effect, self._apart):
            for alert in check(block):
                if (alert.kind, alert.group) not in self.said:
                    self.said.add((alert.kind, alert.group))
                    found.append(alert)
        self.observed += len(block.steps)
        self.all += found
        return found

    def _equilibrium(self, block: Block) -> Iterator[Alert]:
        """The angle is not the one that the rate and the weight decay lead to, though there was time for it."""
        if not _has(block, "angle", "equilibrium_angle", "lr"):
            return
        angle, expected = _get(block, "angle", "median"), _get(block, "equilibrium_angle", "median")
        rates = _get(block, "lr", "mean")
        decays = np.array([self.decays.get(group, 0.0) for group in block.groups])
        assert self.first is not None, "a block was looked at"
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = angle / expected
            settled = (block.steps - self.first)[:, None] * rates * decays > _SETTLED
        out = settled & block.active & (ratio > 0) & ((ratio > _OUT) | (ratio < 1 / _OUT))
        # The last steps differ too much in angle to judge one of them.
        for g in np.flatnonzero(out.sum(0) > len(out) / 2):
            k = int(np.flatnonzero(out[:, g])[-1])
            text = (
                f"it turns {ratio[k, g]:.2g} times as far per step as in equilibrium "
                f"({angle[k, g]:.2g} instead of {expected[k, g]:.2g} rad): its effective rate is not the one that "
                "the rate and the weight decay lead to"
            )
            yield Alert(int(block.steps[k]), block.groups[g], "equilibrium", text)

    def _no_effect(self, block: Block) -> Iterator[Alert]:
        """There is weight decay, and the radius that it would balance at is far away."""
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
        angle = np.where(block.active, _get(block, "angle", "median"), np.nan)[-1]
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


def _defect(block: Block) -> Iterator[Alert]:
    if not _has(block, "defect"):
        return
    defect = _get(block, "defect", "median")
    large = (defect > _LARGE_DEFECT) & block.active
    for k, g, group in _where(block, large & (large.sum(axis=0) > len(large) / 2)):
        text = (
            f"the gradient is not across the rows (|cos(x, ∇L)| = {defect[k, g]:.2g} in the median): the ε of its "
            "normalization matters, or the gradient is so small that it is rounding"
        )
        yield Alert(int(block.steps[k]), group, "defect", text)


def _not_finite(block: Block) -> Iterator[Alert]:
    found = [
        Alert(int(block.steps[k]), group, "not finite", f"its {what} NaN or infinite numbers")
        for quantity, what in (("radius", "weights hold"), ("gradient_norm", "gradient holds"))
        if _has(block, quantity)
        for k, _, group in _where(block, ~np.isfinite(_get(block, quantity, "mean")))
    ]
    # What came first is said. A row whose gradient is not finite may be left alone by the step, so both are looked at.
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


Check = Callable[[Block], Iterator[Alert]]

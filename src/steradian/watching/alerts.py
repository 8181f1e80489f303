"""Alerts about a training, each raised once."""

from collections.abc import Iterator, Mapping, Set
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from steradian.watching.records import STATISTICS, WORDS, Alert, Block

__all__ = ["Alerts"]

_TIMES = 3.0  # an equilibrium counts as reached after this many times 1/(ηλ) steps, which leave 5 % of the way
_OUT = 2.0  # the angle is out of its equilibrium beyond this factor
_APART = 100.0  # groups are far apart if their angles differ by this factor
_LARGE_DEFECT = 0.1
_FIRST = 10  # observed steps whose defects tell whether rows were ever invariant
_NEGLIGIBLE = 10.0  # weight decay has no effect yet if it balances at this many times the present radius
_EARLY = 50  # observations before which groups are not compared, nor weight decay judged

Numbers = NDArray[np.float64]


class Alerts:
    """Checks blocks of records; raises each alert once for each group."""

    def __init__(self, decays: Mapping[str, float], invariant: Set[str]) -> None:
        self.decays = decays  # of each group that has one; 0 if it has no effect on the rows
        self.invariant = invariant  # names of groups; most alerts are about these
        self.raised: list[Alert] = []
        self.observed = 0
        self.first = 0  # the number of the first observed step
        self._early_defects: dict[str, list[float]] = {}

    def check(self, block: Block) -> list[Alert]:
        """New alerts in a block."""
        if not len(block.steps):
            return []
        self.first = self.first if self.observed else int(block.steps[0])
        known = {(alert.kind, alert.group) for alert in self.raised}
        new = []
        checks = [_not_finite, _hypotheses, self._defect, self._equilibrium]
        checks += [self._no_effect, self._apart] if self.observed >= _EARLY else []
        with np.errstate(divide="ignore", invalid="ignore"):
            for alert in (alert for check in checks for alert in check(block)):
                # A bias that starts at 0 has no direction, and a row that is not invariant has a radial gradient.
                applies = alert.group in self.invariant or alert.kind == "not finite"
                if applies and (alert.kind, alert.group) not in known:
                    known.add((alert.kind, alert.group))
                    new.append(alert)
        self.observed += len(block.steps)
        self.raised += new
        return new

    def _defect(self, block: Block) -> Iterator[Alert]:
        """The gradient is not orthogonal to the rows."""
        defect = _get(block, "defect")
        for g, group in enumerate(block.groups):
            early = self._early_defects.setdefault(group, [])
            early += defect[block.active[:, g], g][: _FIRST - len(early)].tolist()
        large = (defect > _LARGE_DEFECT) & block.active
        for k, g in _where(block, large & (large.sum(axis=0) > len(large) / 2)):
            # ε matters only once a radius has become small, so not in the first steps of a training.
            always = self.first < _EARLY and np.median(self._early_defects[block.groups[g]]) > _LARGE_DEFECT
            yield _alert(block, k, g, "defect", "not_invariant" if always else "epsilon", value=defect[k, g])

    def _equilibrium(self, block: Block) -> Iterator[Alert]:
        """The angle is not that of the equilibrium, although there was time to reach it."""
        angle, expected = _get(block, "angle"), _get(block, "equilibrium_angle")
        decays = np.array([self.decays.get(group, 0.0) for group in block.groups])
        ratio = angle / expected
        reached = (block.steps - self.first)[:, None] * _get(block, "lr", "mean") * decays > _TIMES
        out = reached & block.active & (ratio > 0) & ((ratio > _OUT) | (ratio < 1 / _OUT))
        # Angles vary too much between steps to judge a single one.
        for g in np.flatnonzero(out.sum(0) > len(out) / 2):
            k = np.flatnonzero(out[:, g])[-1]
            numbers = {"ratio": ratio[k, g], "angle": angle[k, g], "expected": expected[k, g]}
            yield _alert(block, k, g, "equilibrium", **numbers)

    def _no_effect(self, block: Block) -> Iterator[Alert]:
        """Weight decay would balance only at a far larger radius, or the radius is fixed."""
        for group, decay in self.decays.items():
            if decay == 0 and group in block.groups:
                yield _alert(block, -1, block.groups.index(group), "weight decay", "fixed")
        ratio, rates = _get(block, "equilibrium_radius") / _get(block, "radius"), _get(block, "lr", "mean")
        for k, g in _where(block, ratio > _NEGLIGIBLE):
            time = 1 / max(rates[k, g] * self.decays.get(block.groups[g], 0.0), 1e-300)
            yield _alert(block, k, g, "weight decay", "no_effect", ratio=ratio[k, g], time=time)

    def _apart(self, block: Block) -> Iterator[Alert]:
        """Some layers turn much faster than others."""
        angle = _get(block, "angle")[-1]
        turning = (angle > 0) & block.active[-1] & [group in self.invariant for group in block.groups]
        low, high = np.where(turning, angle, np.inf).argmin(), np.where(turning, angle, 0.0).argmax()
        if turning.any() and angle[high] > _APART * angle[low]:
            numbers = {"ratio": angle[high] / angle[low], "high": angle[high], "low": angle[low]}
            yield _alert(block, -1, high, "apart", other=block.groups[low], **numbers)


def _hypotheses(block: Block) -> Iterator[Alert]:
    """H1, H2, and a radius."""
    for kind, quantity, statistic, bound in (
        ("H1", "radial", "max", 1.0),
        ("H2", "velocity", "max", np.pi),
        ("collapsed", "collapsed", "mean", np.nextafter(0, 1)),
    ):
        values = _get(block, quantity, statistic)
        for k, g in _where(block, values >= bound):
            yield _alert(block, k, g, kind, value=values[k, g], percent=100 * values[k, g])


def _not_finite(block: Block) -> Iterator[Alert]:
    """NaN or infinite weights or gradients."""
    found = [
        _alert(block, k, g, "not finite", what)
        for quantity, what in (("radius", "weights"), ("gradient_norm", "gradient"))
        if quantity in block.quantities
        for k, g in _where(block, ~np.isfinite(_get(block, quantity, "mean")))
    ]
    # Of both, the first is reported. A step may skip a row whose gradient is not finite, so both are checked.
    yield from sorted(found, key=lambda alert: alert.step)


def _alert(block: Block, k: SupportsIndex, g: SupportsIndex, kind: str, words: str = "", **fields: object) -> Alert:
    """An alert at the k-th step of a block about its g-th group; `words` is the key of its text, if not the kind."""
    return Alert(int(block.steps[k]), block.groups[g], kind, WORDS["alerts"][words or kind].format(**fields))


def _where(block: Block, bad: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Step and group of the first bad entry of every group."""
    bad = bad & block.active
    return ((int(bad[:, g].argmax()), int(g)) for g in np.flatnonzero(bad.any(axis=0)))


def _get(block: Block, quantity: str, statistic: str = "median") -> Numbers:
    """(steps, groups); NaN if the quantity is not recorded."""
    if quantity not in block.quantities:
        return np.full(block.active.shape, np.nan)
    values: Numbers = block.values[:, block.quantities.index(quantity), :, STATISTICS.index(statistic)]
    return values.astype(np.float64)

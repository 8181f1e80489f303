"""Alerts about a training, each raised once."""

from collections.abc import Iterator, Set
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from steradian.watching.records import STATISTICS, WORDS, Alert, Block

__all__ = ["Alerts"]

_LARGE_DEFECT = 0.1
_FIRST = 10  # observed steps whose defects tell whether rows were ever invariant
_EARLY = 50  # a watch that begins before this step has seen the first steps of the training


class Alerts:
    """Checks blocks of records; raises each alert once for each group."""

    def __init__(self, invariant: Set[str]) -> None:
        self.invariant = invariant  # names of groups; most alerts are about these
        self.raised: list[Alert] = []
        self.from_start: bool | None = None  # the first steps of the training were observed
        self._early_defects: dict[str, list[float]] = {}

    def check(self, block: Block) -> list[Alert]:
        """New alerts in a block with steps."""
        if self.from_start is None:
            self.from_start = block.steps[0] < _EARLY
        known = {(alert.kind, alert.group) for alert in self.raised}
        new = []
        for alert in (*_not_finite(block), *_hypotheses(block), *self._defect(block)):
            # A bias that starts at 0 has no direction, and a row that is not invariant has a radial gradient.
            applies = alert.group in self.invariant or alert.kind == "not finite"
            if applies and (alert.kind, alert.group) not in known:
                known.add((alert.kind, alert.group))
                new.append(alert)
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
            always = self.from_start and np.median(self._early_defects[block.groups[g]]) > _LARGE_DEFECT
            yield _alert(block, k, g, "defect", "not_invariant" if always else "epsilon", value=defect[k, g])


def _hypotheses(block: Block) -> Iterator[Alert]:
    """Rows in which H1 or H2 does not hold, and collapsed rows."""
    for kind, quantity, statistic, bound in (
        ("H1", "radial", "max", 1.0),
        ("H2", "velocity", "max", np.pi),
        ("collapsed", "collapsed", "mean", np.nextafter(0, 1)),
    ):
        values = _get(block, quantity, statistic)
        for k, g in _where(block, values >= bound):
            yield _alert(block, k, g, kind, value=values[k, g], percent=100 * values[k, g])


def _not_finite(block: Block) -> Iterator[Alert]:
    found = [
        _alert(block, k, g, "not finite", what)
        for quantity, what in (("radius", "weights"), ("gradient_norm", "gradient"))
        if quantity in block.quantities  # not every optimizer has all, nor every group
        for recorded in [block.defined[block.quantities.index(quantity)]]
        for k, g in _where(block, ~np.isfinite(_get(block, quantity, "mean")) & recorded)
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


def _get(block: Block, quantity: str, statistic: str = "median") -> NDArray[np.float64]:
    """(steps, groups); NaN if the quantity is not recorded."""
    if quantity not in block.quantities:
        return np.full(block.active.shape, np.nan)
    return block.values[:, block.quantities.index(quantity), :, STATISTICS.index(statistic)].astype(np.float64)

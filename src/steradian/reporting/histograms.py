"""Single rows: histograms over the rows of a group at the steps at which all of them were recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["Histogram", "histograms", "whole_steps"]

Floats: TypeAlias = NDArray[np.float64]

BINS, FEWEST_BINS = 80, 16
MOST_STEPS, FEWEST_STEPS = 24, 2
BUDGET = 900_000  # numbers in all histograms, counts and edges, four characters each


@dataclass(frozen=True, eq=False)
class Histogram:
    """How one quantity is spread over the rows of one group, in all runs, over common bins.

    Attributes:
        quantity: its name.
        group: its group.
        edges: of the bins, in the quantity's own unit; all histograms of a page have the same number of bins.
        log: whether the bins are equal in the logarithm.
        counts: run number → (steps, rows counted in each bin (steps, bins)).
    """

    quantity: str
    group: str
    edges: Floats
    log: bool
    counts: dict[int, tuple[list[int], NDArray[np.int64]]]


def whole_steps(step: NDArray[np.int64], most: int = MOST_STEPS) -> list[int]:
    """The steps at which all rows of a group were recorded.

    Args:
        step: of each recorded row of one group and one quantity. A row that is followed on its own is there at every
            step, so steps with fewer rows than others do not count.
        most: how many steps at most; of more, some are chosen evenly, the first and the last among them.

    >>> whole_steps(np.array([0, 0, 0, 1, 2, 3, 3, 3]))
    [0, 3]
    """
    steps, sizes = np.unique(step, return_counts=True)
    steps = steps[sizes == sizes.max()]
    if len(steps) > most:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    return [int(each) for each in steps]


def histograms(runs: Sequence[pd.DataFrame]) -> list[Histogram]:
    """Histograms of every quantity and group of which more than one row was recorded.

    Args:
        runs: each run's rows, with the columns `records.ROW_COLUMNS`.
    """
    found: dict[tuple[str, str], dict[int, tuple[list[int], list[Floats]]]] = {}
    parts = [rows.groupby(["quantity", "group"], observed=True, sort=False) for rows in runs]
    number_of = sum(each.ngroups for each in parts)
    each_has = BUDGET // max(number_of, 1)
    most = max(FEWEST_STEPS, min(MOST_STEPS, each_has // BINS - 1))
    bins = max(FEWEST_BINS, min(BINS, each_has // (most + 1)))
    for number, each in enumerate(parts):
        for (quantity, group), part in each:
            step, value = part["step"].to_numpy(np.int64), part["value"].to_numpy(float)
            steps = whole_steps(step, most)
            samples = [value[(step == each) & np.isfinite(value)] for each in steps]
            if max(map(len, samples)) > 1:
                found.setdefault((str(quantity), str(group)), {})[number] = (steps, samples)
    return [_histogram(quantity, group, of, bins) for (quantity, group), of in found.items()]


def _histogram(
    quantity: str, group: str, samples: Mapping[int, tuple[list[int], list[Floats]]], bins: int
) -> Histogram:
    every = np.concatenate([values for _, per_step in samples.values() for values in per_step])
    edges, log = _edges(every, bins)
    counts = {
        number: (steps, np.stack([np.histogram(values, edges)[0] for values in per_step]))
        for number, (steps, per_step) in samples.items()
    }
    return Histogram(quantity, group, edges, log, counts)


def _edges(values: Floats, bins: int) -> tuple[Floats, bool]:
    """Bins from the smallest to the largest value, equal in the logarithm where the values span a factor of 4."""
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low >= 4:
        edges, log = np.geomspace(low, high, bins + 1), True
        edges[0], edges[-1] = low, high  # geomspace rounds, and the outermost rows must fall inside
    else:
        room = (high - low) / 2 or abs(high) / 100 or 1.0
        centre = (high + low) / 2
        edges, log = np.linspace(min(low, centre - room), max(high, centre + room), bins + 1), False
    return edges, log

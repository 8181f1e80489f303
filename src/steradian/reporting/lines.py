"""Lines over time: a table of any length reduced to a few hundred points that keep extremes and sharp drops."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["Drop", "Lines", "aggregate", "buckets", "schedule"]

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Values: TypeAlias = dict[str, dict[str, dict[str, Floats]]]  # quantity → group → statistic → line

SHARP = 1.25  # a rate that changes by less than this factor has no drop
ALONE = 4.0  # a drop is this many times steeper than the schedule before and after it
MOST_DROPS = 24
POINTS, FEWEST_POINTS = 480, 32
BUDGET = 1_100_000  # numbers in all lines of a page, about two characters each


@dataclass(frozen=True)
class Drop:
    """A sudden change of the nominal rate: the first observed step with the new rate, and new over old."""

    step: int
    factor: float


@dataclass(frozen=True, eq=False)
class Lines:
    """The records of one run, over time in buckets.

    Quantities of the run as a whole have the group ""; their "min" and "max" are over the bucket.
    """

    steps: Integers  #: the middle step of each bucket, (B,)
    values: Values  #: (B,), NaN where nothing was recorded
    drops: list[Drop]  #: sudden changes of the nominal rate
    last_step: int  #: the last recorded one


def schedule(steps: Integers, rate: Floats) -> list[Drop]:
    """The isolated jumps of a nominal rate, the largest ones if there are many, in order.

    Between observed steps a smooth schedule may change a lot. A jump is steeper than the schedule on both sides of it,
    in the rate and in its logarithm: a warm-up is even in the first, an exponential decay in the second.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = rate[1:] / rate[:-1]
        size = np.abs(np.log(factor))
        alone = np.isfinite(size) & (size > np.log(SHARP))
        for change in (np.diff(rate), np.log(factor)):
            slope = np.abs(change) / np.diff(steps)
            # The first and the last change have one neighbour only, and are never called jumps.
            beside = np.pad(np.nan_to_num(slope, nan=0.0, posinf=np.inf), 1, constant_values=np.inf)
            alone &= slope > ALONE * np.maximum(beside[:-2], beside[2:])
    found = np.flatnonzero(alone)
    found = np.sort(found[np.argsort(-size[found], kind="stable")[:MOST_DROPS]])
    return [Drop(int(steps[i + 1]), round(float(factor[i]), 4)) for i in found]


def buckets(steps: Integers, points: int, edges: Sequence[int] = ()) -> Integers:
    """Where each bucket begins in the sorted `steps`, about `points` buckets in all.

    The first tenth of the points are single steps, since a training changes fastest at its beginning. No bucket
    reaches across a step in `edges`.
    """
    n = len(steps)
    if n <= points:
        return np.arange(n)
    head = max(1, points // 10)
    rest = np.linspace(head, n, points - head, endpoint=False)
    starts = np.concatenate([np.arange(head), rest.astype(np.int64), np.searchsorted(steps, edges)])
    return np.unique(starts[starts < n]).astype(np.int64)


def aggregate(table: pd.DataFrame, *, points: int | None = None, runs: int = 1) -> Lines:
    """Reduce a run's table to buckets: minima of minima, maxima of maxima, averages of the rest.

    There are about `points` buckets; None: as many as a page of this many runs has room for.
    """
    grouped = table.groupby(["quantity", "group", "statistic"], observed=True)
    line, keys = np.asarray(grouped.ngroup(), dtype=np.int64), list(grouped.size().index)
    position, steps = pd.factorize(table["step"].to_numpy(np.int64), sort=True)
    rated = next((k for k, (quantity, *_) in enumerate(keys) if quantity == "lr"), -1)
    rate = table[line == rated].sort_values("step", kind="stable")
    drops = schedule(rate["step"].to_numpy(), rate["value"].to_numpy())
    points = points or max(FEWEST_POINTS, min(POINTS, BUDGET // (runs * len(keys))))
    starts = buckets(steps, points, [drop.step for drop in drops])
    ends = np.append(starts[1:], len(steps))
    bucket = np.repeat(np.arange(len(starts)), ends - starts)[position]
    over = _reduce(line, bucket, table["value"].to_numpy(float), (len(keys), len(starts)))
    values: Values = {}
    for k, (quantity, group, statistic) in enumerate(keys):
        of = values.setdefault(quantity, {}).setdefault(group, {})
        of[statistic] = over.get(statistic, over["mean"])[k]
        if not group and statistic == "mean":  # one number per step: a band shows the range within a bucket
            of |= {extreme: over[extreme][k] for extreme in ("min", "max")}
    return Lines((steps[starts] + steps[ends - 1]) // 2, values, drops, int(steps[-1]))


def _reduce(line: Integers, bucket: Integers, value: Floats, shape: tuple[int, int]) -> dict[str, Floats]:
    """Mean, min and max of the values in each bucket of each line, (lines, buckets); NaN where none is finite."""
    finite = np.isfinite(value)
    cell, value, size = (line * shape[1] + bucket)[finite], value[finite], shape[0] * shape[1]
    with np.errstate(invalid="ignore"):
        mean = np.bincount(cell, value, minlength=size) / np.bincount(cell, minlength=size)
    low, high = np.full((2, size), np.nan)
    np.fmin.at(low, cell, value)
    np.fmax.at(high, cell, value)
    return {"mean": mean.reshape(shape), "min": low.reshape(shape), "max": high.reshape(shape)}

"""Lines over time: a table of any length reduced to a few hundred points that keep extremes and sharp drops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from steradian.watching.records import STATISTICS

__all__ = ["Drop", "Lines", "aggregate", "buckets", "coarsen", "reduce_lines", "schedule"]

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

SHARP = 1.25  # a rate that changes by more than this factor in one step is a drop (or a restart), not a slope
MOST_DROPS = 24


@dataclass(frozen=True)
class Drop:
    """A sudden change of the nominal rate: the first step with the new rate, and new over old."""

    step: int
    factor: float


@dataclass(frozen=True, eq=False)
class Lines:
    """The records of one run, over time in buckets.

    Attributes:
        steps: the middle step of each bucket, (B,).
        values: quantity → group → statistic → (B,), NaN where nothing was recorded. Quantities of the run as a
            whole have the group "": their "min" and "max" are over the bucket.
        drops: sudden changes of the nominal rate.
        last_step: the last recorded step.
    """

    steps: Integers
    values: dict[str, dict[str, dict[str, Floats]]]
    drops: list[Drop] = field(default_factory=list)
    last_step: int = 0

    def count(self) -> int:
        """How many lines there are."""
        return sum(len(lines) for groups in self.values.values() for lines in groups.values())


def schedule(steps: Integers, rate: Floats) -> list[Drop]:
    """The sudden changes in a nominal rate, the largest ones if there are many, in order.

    >>> schedule(np.arange(4), np.array([1.0, 1.0, 0.1, 0.1]))
    [Drop(step=2, factor=0.1)]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = rate[1:] / rate[:-1]
        size = np.abs(np.log(factor))
    found = np.flatnonzero(np.isfinite(size) & (size > np.log(SHARP)))
    found = np.sort(found[np.argsort(-size[found], kind="stable")[:MOST_DROPS]])
    return [Drop(int(steps[i + 1]), round(float(factor[i]), 4)) for i in found]


def buckets(steps: Integers, points: int, edges: Sequence[int] = ()) -> Integers:
    """Where each bucket begins in the sorted `steps`, about `points` buckets in all.

    The first tenth of the points are single steps, since a training changes fastest at its beginning. No bucket
    reaches across a step in `edges`.

    >>> buckets(np.arange(100), 10, edges=[50]).tolist()
    [0, 1, 12, 23, 34, 45, 50, 56, 67, 78, 89]
    """
    n = len(steps)
    if n <= points:
        return np.arange(n)
    head = max(1, points // 10)
    rest = np.linspace(head, n, points - head, endpoint=False)
    starts = np.concatenate([np.arange(head), rest.astype(np.int64), np.searchsorted(steps, edges)])
    return np.unique(starts[starts < n]).astype(np.int64)


def aggregate(table: pd.DataFrame, *, points: int = 480) -> Lines:
    """Reduce a table of records in time: minimum of minima, maximum of maxima, average of everything else.

    Args:
        table: records of one run, with the columns `records.COLUMNS`.
        points: about how many points a line may have.
    """
    codes = {name: table[name].astype("category").cat for name in ("group", "quantity", "statistic")}
    code = {name: np.asarray(column.codes) for name, column in codes.items()}
    labels = {name: [str(label) for label in column.categories] for name, column in codes.items()}
    step, value = table["step"].to_numpy(np.int64), table["value"].to_numpy(np.float64)
    steps = np.sort(pd.unique(step))
    masks = {name: code["quantity"] == i for i, name in enumerate(labels["quantity"])}
    drops = _drops(step, value, masks.get("lr"), code["group"])
    starts = buckets(steps, points, [drop.step for drop in drops])
    middle = _middle(steps, starts)
    lines: dict[str, dict[str, dict[str, Floats]]] = {}
    for quantity, mask in masks.items():
        if mask.any():
            where = (code["group"][mask].astype(np.int64), code["statistic"][mask].astype(np.int64))
            dense, own, keys = _dense(step[mask], value[mask], where)
            named = [(labels["group"][g], labels["statistic"][s]) for g, s in keys]
            bucket = np.searchsorted(starts, np.searchsorted(steps, own), side="right") - 1
            lines[quantity] = _named(named, dense, bucket, len(starts))
    return Lines(middle, lines, drops, int(steps[-1]))


def coarsen(lines: Lines, points: int) -> Lines:
    """The same lines with about `points` points, by the same rules."""
    starts = buckets(lines.steps, points, [drop.step for drop in lines.drops])
    if len(starts) >= len(lines.steps):
        return lines
    bucket = np.searchsorted(starts, np.arange(len(lines.steps)), side="right") - 1
    values = {
        quantity: {
            group: {
                statistic: reduce_lines(line[None], bucket, len(starts), statistic)[0] for statistic, line in of.items()
            }
            for group, of in groups.items()
        }
        for quantity, groups in lines.values.items()
    }
    return Lines(_middle(lines.steps, starts), values, lines.drops, lines.last_step)


def reduce_lines(dense: Floats, bucket: Integers, count: int, statistic: str) -> Floats:
    """Reduce the columns of `dense` (lines, steps) that share a bucket; NaN where nothing was recorded.

    >>> reduce_lines(np.array([[1.0, np.nan, 4.0]]), np.array([0, 0, 2]), 3, "max")
    array([[ 1., nan,  4.]])
    """
    result = np.full((len(dense), count), np.nan)
    own, first = np.unique(bucket, return_index=True)
    if statistic in ("min", "max"):
        result[:, own] = (np.fmin if statistic == "min" else np.fmax).reduceat(dense, first, axis=1)
        return result
    known = np.isfinite(dense)
    total = np.add.reduceat(np.where(known, dense, 0.0), first, axis=1)
    number = np.add.reduceat(known.astype(np.int64), first, axis=1)
    result[:, own] = np.where(number > 0, total / np.maximum(number, 1), np.nan)
    return result


def _middle(steps: Integers, starts: Integers) -> Integers:
    ends = np.append(starts[1:], len(steps)) - 1
    return (steps[starts] + steps[ends]) // 2


def _drops(step: Integers, value: Floats, mask: NDArray[np.bool_] | None, group: NDArray[np.int_]) -> list[Drop]:
    """Drops of the rate, read from the first group that has one."""
    if mask is None or not mask.any():
        return []
    chosen = mask & (group == group[mask][0])
    order = np.argsort(step[chosen], kind="stable")
    return schedule(step[chosen][order], value[chosen][order])


def _dense(
    step: Integers, value: Floats, where: tuple[Integers, Integers]
) -> tuple[Floats, Integers, list[tuple[int, int]]]:
    """One line per (group, statistic) over the steps that this quantity has."""
    own = np.sort(pd.unique(step))
    key = where[0] * (1 + int(where[1].max())) + where[1]
    line, position = _inverse(key)
    dense = np.full((len(position), len(own)), np.nan)
    dense[line, np.searchsorted(own, step)] = np.where(np.isfinite(value), value, np.nan)
    return dense, own, [(int(where[0][i]), int(where[1][i])) for i in position]


def _inverse(key: Integers) -> tuple[Integers, Integers]:
    """The number of each key among the distinct ones, and where each distinct one occurs first."""
    line, distinct = pd.factorize(key)
    position = np.full(len(distinct), len(key), np.int64)
    np.minimum.at(position, line, np.arange(len(key)))
    return line.astype(np.int64), position


def _named(
    named: Sequence[tuple[str, str]], dense: Floats, bucket: Integers, count: int
) -> dict[str, dict[str, Floats]]:
    found: dict[str, dict[str, Floats]] = {}
    for statistic in dict.fromkeys(s for _, s in named):
        chosen = [i for i, (_, s) in enumerate(named) if s == statistic]
        for i, line in zip(chosen, reduce_lines(dense[chosen], bucket, count, statistic), strict=True):
            found.setdefault(named[i][0], {})[statistic] = line
    run = found.get("", {})
    if set(run) == {"mean"}:  # one number per step: a band shows the range within a bucket
        whole = dense[[i for i, (g, _) in enumerate(named) if g == ""]]
        run["min"] = reduce_lines(whole, bucket, count, "min")[0]
        run["max"] = reduce_lines(whole, bucket, count, "max")[0]
    order: Mapping[str, int] = {name: i for i, name in enumerate(STATISTICS)}
    return {g: dict(sorted(of.items(), key=lambda item: order.get(item[0], 9))) for g, of in found.items()}

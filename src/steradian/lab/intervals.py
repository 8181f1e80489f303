"""95 % intervals of means and of their differences, with Holm's correction within a family of comparisons."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from steradian.lab.results import Result
from steradian.lab.tables import LEVEL, Rows, accuracy_columns

__all__ = ["Difference", "compare", "holm", "interval_rows", "mean_interval"]

MARGIN = 0.3
"""Points of accuracy: a difference whose 95 % interval lies within ± this is called none."""


class Difference(NamedTuple):
    """The difference of two means, its 95 % interval and the p of none by Welch's t-test; NaN for a single value.

    >>> Difference.of([1.0, 3.0], [5.0, 7.0])
    Difference(mean=-4.0, low=-10.08..., high=2.08..., p=0.10...)
    """

    mean: float
    low: float
    high: float
    p: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> "Difference":
        """Of the means of two samples."""
        mean = float(np.mean(values) - np.mean(others))
        if min(len(values), len(others)) < 2:
            return cls(mean, math.nan, math.nan, math.nan)
        if not np.ptp(values) and not np.ptp(others):
            return cls(mean, mean, mean, float(mean == 0))
        test = stats.ttest_ind(values, others, equal_var=False)
        low, high = test.confidence_interval(1 - LEVEL)
        return cls(mean, float(low), float(high), float(test.pvalue))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p: below 5 % where a family of comparisons may reject, with an error of 5 % in all.

    >>> [round(each, 3) for each in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    adjusted = np.maximum.accumulate([(len(p) - place) * p[k] for place, k in enumerate(order)])
    found = np.empty(len(p))
    found[order] = np.minimum(adjusted, 1)
    return [float(each) for each in found]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of a sample, and half of its 95 % interval by Student's t; NaN for a single value."""
    mean, n = float(np.mean(values)), len(values)
    return mean, float(stats.t.ppf(1 - LEVEL / 2, n - 1) * stats.sem(values)) if n > 1 else math.nan


def compare(
    samples: Mapping[str, Sequence[float]],
    baseline: str,
    *,
    digits: int = 2,
    better: str = "larger",
    margin: float | None = None,
) -> dict[str, list[str]]:
    """By name: mean ± half its 95 % interval, number of values, difference to the baseline, its interval, p, verdict.

    Args:
        samples: the values of each, such as accuracies over seeds. All but the baseline are one family, in which p is
            corrected by Holm's method.
        baseline: the one that the others are compared with.
        digits: of the figures.
        better: "larger" or "smaller".
        margin: a difference is called none only if its interval lies within ± this; None: never.
    """
    base = samples.get(baseline, ())
    others = {name: values for name, values in samples.items() if name != baseline and values and base}
    found = {name: Difference.of(values, base) for name, values in others.items()}
    tested = [name for name, each in found.items() if not math.isnan(each.p)]
    adjusted = dict(zip(tested, holm([found[name].p for name in tested]), strict=True))

    def signed(value: float) -> str:
        return f"{value:+.{digits}f}".replace("-", "−")

    lines = {}
    for name, values in samples.items():
        mean, half = mean_interval(values) if values else (math.nan, math.nan)
        text = f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"
        line, each = [text if values else "diverged", str(len(values))], found.get(name)
        line.append(signed(each.mean) if each else "")
        if each is None or name not in adjusted:
            lines[name] = [*line, "", "", ""]
            continue
        verdict = "better" if (each.mean > 0) == (better == "larger") else "worse"
        if margin is not None and -margin < each.low and each.high < margin:
            verdict = "no difference"
        elif adjusted[name] >= LEVEL:
            verdict = "not decided"
        lines[name] = [*line, f"{signed(each.low)} to {signed(each.high)}", f"{adjusted[name]:.2g}", verdict]
    return lines


def interval_rows(
    results: Iterable[Result],
    *,
    value: Callable[[Result], float] = lambda result: result.accuracy,
    what: str = "accuracy",
    baseline: str = "SGD-M",
    margin: float | None = MARGIN,
    **how: Any,
) -> Rows:
    """A table of the methods of every column, compared with one of them.

    Args:
        results: stored results, as for `tables.accuracy_columns`.
        value: the figure of one.
        what: its name.
        baseline: how the name of the method that others are compared with begins; the one with the most seeds.
        margin: as for `compare`.
        **how: other arguments of `compare`.
    """
    heads, lines = ["column", "method", "η, λ", what, "seeds", "− first", "95 % interval", "p (Holm)", "that is"], []
    for methods in (column.results for column in accuracy_columns(results)):
        samples = {method: [value(run) for run in runs if not run.diverged] for method, runs in methods.items()}
        base = max(samples, key=lambda method: (method.startswith(baseline), len(samples[method])))
        compared = compare(samples, base, margin=margin, **how)
        for method in sorted(compared, key=lambda method: method != base):
            c = methods[method][0].config
            column = f"{c.model} {c.norm}, {c.data}, {c.epochs} epochs"
            lines.append([column, method, f"{c.lr:g}, {c.weight_decay:g}", *compared[method]])
    return heads, lines

"""Quantities recorded within trainings in a few numbers: the tables below the figures."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from steradian.lab.config import METHODS
from steradian.lab.paper import NORM_NAMES
from steradian.lab.tables import Rows
from steradian.lab.tracking import ALL, LIVING, PHENOMENA
from steradian.watching.records import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SUMMARIES", "hypotheses_summary", "phenomena_summary", "trajectories_summary"]

About = Mapping[str, Mapping[str, Any]]


def hypotheses_summary(table: "pd.DataFrame", about: About) -> Rows:
    """For each method the largest |A⟨c,u⟩|, z and z² of a living filter at any recorded step, its epoch, and the usual.

    The usual value is the median, over the recorded steps after the first epoch, of the largest over the filters. Runs
    that recorded other quantities are left out.
    """
    heads = ["method"]
    for quantity in ("|A⟨c,u⟩|", "z", "z²"):
        heads += [f"largest {quantity}", "at epoch", "usually"]
    heads.append("filters that shrank away")
    lines = []
    recorded = set(table[table["quantity"] == "radial"]["run"])
    for run in sorted(recorded, key=lambda run: (METHODS.index(about[run]["config"]["method"]), run)):
        line = [str(about[run]["config"]["method"])]
        for quantity, power in (("radial", 1), ("velocity", 1), ("velocity", 2)):
            found = _of(table, run, LIVING, quantity)
            found = found[found["statistic"].isin(["min", "max"])]
            largest = found["value"].abs().groupby(found["step"]).max() ** power
            later = largest[largest.index >= about[run]["steps"]]
            usual = (later if len(later) else largest).median()
            when = f"{largest.idxmax() / about[run]['steps']:.3g}" if len(largest) else ""
            line += [_number(largest.max()), when, _number(usual)]
        living = _of(table, run, ALL, "living")
        share = living[living["statistic"] == "mean"].sort_values("step")["value"]
        lines.append([*line, f"{1 - share.iloc[-1]:.1%}" if len(share) else ""])
    return heads, lines


def trajectories_summary(table: "pd.DataFrame", about: About) -> Rows:
    """For each network and scheme, the cosine of the filters with those under SGD after the last iteration.

    A scheme that diverged has none; runs that recorded other quantities are left out.
    """
    lines = []
    compared = table[table["quantity"].isin(["cosine", "angle"])]
    for run in (run for run in about if run in set(compared["run"])):
        config, rows = about[run]["config"], compared[compared["run"] == run]
        last = rows[rows["step"] == rows["step"].max()]
        for method in ("AdaGradG", "AdaGrad"):
            own = last[last["group"] == f"{method}: {ALL}"].set_index(["quantity", "statistic"])["value"]
            network = f"{config['model']} {NORM_NAMES[config['norm']]}"
            figures = ["diverged", "", "", ""]
            if len(own):
                figures = [_cosine(own["cosine", name]) for name in ("min", "median", "mean")]
                figures.append(f"{own['angle', 'max']:.2g}")
            lines.append([network, method, f"{last['step'].max()}", *figures])
    return ["network", "scheme", "iterations", "lowest cosine with SGD", "median", "mean", "largest angle (rad)"], lines


def phenomena_summary(table: "pd.DataFrame", about: About) -> Rows:
    """For each method and phenomenon the median turn of a filter: in the first epoch, before rates fall, at the end.

    Also the layer in which the median is largest after the first epoch, with its epoch.
    """
    measured = set(table[table["quantity"] == PHENOMENA[0]]["run"])
    medians = table[table["statistic"] == "median"]
    lines = []
    for run in sorted(measured, key=lambda run: METHODS.index(about[run]["config"]["method"])):
        steps, config = about[run]["steps"], about[run]["config"]
        falls = [epoch for epoch in (*config["milestones"], config["epochs"]) if epoch]
        for quantity in PHENOMENA:
            own = medians[(medians["run"] == run) & (medians["quantity"] == quantity)]
            own = own.assign(epoch=own["step"] / steps)
            every = own[own["group"] == LIVING]
            parts = [_within(every, 0, 1), _within(every, 0.9 * falls[0], falls[0])]
            parts.append(_within(every, 0.95 * config["epochs"], config["epochs"]))
            layers = own[~own["group"].isin([ALL, LIVING]) & (own["epoch"] >= min(1, config["epochs"] / 2))]
            where = ""
            if len(layers):  # a diverged run may have none
                largest = layers.loc[layers["value"].idxmax()]
                where = f"{largest['value']:.2g} in {largest['group']}, epoch {largest['epoch']:.0f}"
            lines.append([str(config["method"]), QUANTITIES[quantity].title, *parts, where])
    heads = ["method", "phenomenon", "first epoch", "before the rate falls", "last epochs", "largest median of a layer"]
    return heads, lines


SUMMARIES: dict[str, Callable[["pd.DataFrame", About], Rows]] = {
    "hypotheses": hypotheses_summary,
    "trajectories": trajectories_summary,
    "phenomena": phenomena_summary,
}


def _cosine(value: float) -> str:
    """More digits near 1.

    >>> _cosine(0.98765), _cosine(1 - 2.34e-6)
    ('0.9877', '0.9999977')
    """
    return f"{value:.4f}" if value < 0.9995 else f"{value:.7f}"


def _of(table: "pd.DataFrame", run: str, group: str, quantity: str) -> "pd.DataFrame":
    return table[(table["run"] == run) & (table["group"] == group) & (table["quantity"] == quantity)]


def _within(rows: "pd.DataFrame", start: float, end: float) -> str:
    """The median over the recorded steps of some epochs; without any, the value of the nearest step."""
    inside = rows[(rows["epoch"] >= start) & (rows["epoch"] <= end)]
    if not len(inside) and len(rows):
        inside = rows.loc[[(rows["epoch"] - (start + end) / 2).abs().idxmin()]]
    return _number(inside["value"].median())


def _number(value: float) -> str:
    """Two digits; empty for NaN."""
    return "" if math.isnan(value) else f"{value:.2g}"

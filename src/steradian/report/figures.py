"""Recorded table → figure, one function each."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

__all__ = ["QUANTITIES", "over_steps"]

QUANTITIES = {
    "effective_lr": ("Effective rate", "η<sup>e</sup>"),
    "angle": ("Angle per step", "radians"),
    "radius": ("Radius", "r"),
    "identity_error": ("Error of the identity", "predicted − observed"),
}
"""Title and unit of each quantity that can be drawn."""

# Okabe and Ito's palette: told apart by colour-blind readers, on light and on dark.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")


def over_steps(table: pd.DataFrame, quantity: str, *, runs: Sequence[str]) -> go.Figure:
    """A quantity over the steps, one panel per run and one line per group: the median, in a band from q10 to q90.

    Args:
        table: records with the columns run, step, group, quantity, statistic, value.
        quantity: one of `QUANTITIES`.
        runs: the runs to draw, in order.

    Raises:
        ValueError: nothing of this quantity is recorded for one of the runs.
    """
    chosen = table[table["quantity"] == quantity]
    missing = [run for run in runs if not (chosen["run"] == run).any()]
    if missing:
        raise ValueError(f"no {quantity!r} is recorded for {', '.join(missing)}")
    _, unit = QUANTITIES[quantity]
    figure = make_subplots(cols=len(runs), shared_yaxes=True, subplot_titles=list(runs), horizontal_spacing=0.03)
    groups = list(dict.fromkeys(chosen["group"]))
    for column, run in enumerate(runs, start=1):
        for index, group in enumerate(groups):
            part = chosen[(chosen["run"] == run) & (chosen["group"] == group)]
            if part.empty:  # another run has this group
                continue
            wide = part.pivot(index="step", columns="statistic", values="value")
            for trace in _band(wide, group, _PALETTE[index % len(_PALETTE)], legend=column == 1):
                figure.add_trace(trace, row=1, col=column)
    figure.update_yaxes(type="log", exponentformat="power", minor={"showgrid": False})
    figure.update_yaxes(title_text=unit, col=1)
    figure.update_xaxes(title_text="step")
    figure.update_layout(
        height=380,
        margin={"l": 70, "r": 10, "t": 40, "b": 50},
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.25},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure


def _band(wide: pd.DataFrame, group: str, colour: str, *, legend: bool) -> list[Any]:
    steps = wide.index.to_numpy()
    shade = f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:], 16)},0.18)"
    shared = {"legendgroup": group, "hoverinfo": "skip", "mode": "lines", "line": {"width": 0}, "showlegend": False}
    return [
        go.Scatter(x=steps, y=wide["q10"].to_numpy(), **shared),
        go.Scatter(x=steps, y=wide["q90"].to_numpy(), fill="tonexty", fillcolor=shade, **shared),
        go.Scatter(
            x=steps,
            y=wide["median"].to_numpy(),
            name=group,
            legendgroup=group,
            showlegend=legend,
            mode="lines",
            line={"color": colour, "width": 1.6},
            hovertemplate="%{y:.3g}",
        ),
    ]

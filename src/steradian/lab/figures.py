"""The paper's figures from stored results: curves by epoch, with their zooms."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steradian.lab.charts import COLOURS, Chart, Line, svg
from steradian.lab.config import METHODS
from steradian.lab.results import Result, write_atomically
from steradian.watch.records import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FIGURES",
    "TRACK_FIGURES",
    "accuracy_figure",
    "hypotheses_figure",
    "loss_figure",
    "phenomena_figure",
    "trajectories_figure",
    "write_figure",
]


_WORTH_A_ZOOM = 12  # epochs


def loss_figure(results: Iterable[Result]) -> list[Chart]:
    """fig:loss_comparison: mean training loss by epoch, and the last quarter of the epochs."""
    return _by_epoch(results, "train_loss", "training loss", logarithmic=True, zoom=lambda n: (0.75 * n, n))


def accuracy_figure(results: Iterable[Result]) -> list[Chart]:
    """fig:acc_comparison: mean validation accuracy by epoch, and the first third of the epochs."""
    return _by_epoch(results, "validation_accuracy", "validation accuracy (%)", zoom=lambda n: (0, n / 3))


FIGURES: dict[str, Callable[[Iterable[Result]], list[Chart]]] = {"loss": loss_figure, "accuracy": accuracy_figure}


def write_figure(charts: Sequence[Chart], path: Path) -> None:
    """Write charts to an .svg, or to an .html with plotly that can be zoomed.

    Raises:
        ValueError: the file's name ends in something else, or there is nothing to show.
    """
    if not any(chart.lines for chart in charts):
        raise ValueError("there is nothing to show: no results of this kind")
    if path.suffix == ".svg":
        write_atomically(path, svg(charts).encode())
    elif path.suffix == ".html":
        write_atomically(path, _page(charts).encode())
    else:
        raise ValueError(f"the file of a figure must end in .svg or .html, got {path.name!r}")


def _by_epoch(
    results: Iterable[Result],
    curve: str,
    title: str,
    *,
    zoom: Callable[[int], tuple[float, float]],
    logarithmic: bool = False,
) -> list[Chart]:
    kinds: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
    for result in results:
        config = result.config
        if not result.diverged:
            methods = kinds.setdefault((config.model, config.norm, config.data), {})
            methods.setdefault(config.method, []).append(result)
    charts = []
    for kind, by_method in kinds.items():
        ordered = [method for method in METHODS if method in by_method]
        lines = [_line(method, [r.curves[curve] for r in by_method[method]]) for method in ordered]
        whole = Chart(" ".join(kind), "epoch", title, lines, logarithmic)
        longest = max(len(line.x) for line in lines)
        charts.append(whole)
        if longest >= _WORTH_A_ZOOM:
            charts.append(Chart("zoom", "epoch", title, lines, logarithmic, zoom(longest)))
    return charts


def _line(name: str, curves: Sequence[Sequence[float]]) -> Line:
    """The mean over seeds, and the band from the lowest to the highest."""
    length = min(map(len, curves))
    values = np.asarray([curve[:length] for curve in curves])
    epochs = [float(k) for k in range(1, length + 1)]
    band = (values.min(axis=0).tolist(), values.max(axis=0).tolist()) if len(curves) > 1 else ([], [])
    seeds = f"{name} ({len(curves)})"
    return Line(seeds, epochs, values.mean(axis=0).tolist(), *band)


def _page(charts: Sequence[Chart]) -> str:
    """A page with plotly inside, which opens without network."""
    from plotly.offline import get_plotlyjs

    parts = []
    for k, chart in enumerate(charts):
        data = json.dumps({"data": _traces(chart), "layout": _layout(chart)}).replace("</", "<\\/")
        parts.append(f'<div id="f{k}"></div><script>Plotly.newPlot("f{k}", {data})</script>')
    head = f'<meta charset="utf-8"><title>Figures</title><script>{get_plotlyjs()}</script>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _traces(chart: Chart) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(line.name for line in chart.lines))
    made: list[dict[str, Any]] = []
    for line in chart.lines:
        colour = COLOURS[names.index(line.name) % len(COLOURS)]
        shared = {"x": list(line.x), "mode": "lines", "legendgroup": line.name}
        hidden = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        if line.low:
            made.append({**shared, **hidden, "y": list(line.low)})
            made.append({**shared, **hidden, "y": list(line.high), "fill": "tonexty", "fillcolor": colour + "26"})
        first = all(trace.get("name") != line.name for trace in made)
        dash = {"dash": "dash"} if line.dashed else {}
        look = {"color": colour, "width": 1.5, **dash}
        made.append({**shared, "y": list(line.y), "name": line.name, "line": look, "showlegend": first})
    return made


def _layout(chart: Chart) -> dict[str, Any]:
    x: dict[str, Any] = {"title": {"text": chart.x_title}}
    if chart.x_range:
        x["range"] = list(chart.x_range)
    y = {"title": {"text": chart.y_title}, "type": "log" if chart.logarithmic else "linear"}
    return {"title": {"text": chart.title}, "xaxis": x, "yaxis": y, "template": "none"}


def hypotheses_figure(table: "pd.DataFrame") -> list[Chart]:
    """The figures of App. C.1.2 and fig:taylor: the largest |A⟨c,u⟩|, z and z² over all filters, by step."""
    wanted = {"radial": "|A⟨c,u⟩| (H1: below 1)", "velocity": "z (H2: below π)", "taylor": "z² (Taylor variable)"}
    charts = []
    for quantity, title in wanted.items():
        rows = table[(table["quantity"] == quantity) & table["statistic"].isin(["min", "max"])]
        largest = rows.assign(value=rows["value"].abs()).groupby(["run", "step"], sort=True)["value"].max()
        lines = []
        for run in dict.fromkeys(rows["run"]):
            series = largest[run]
            lines.append(Line(str(run), [float(step) for step in series.index], series.tolist()))
        charts.append(Chart(title, "step", "largest over all filters", lines, logarithmic=True))
    return charts


def trajectories_figure(table: "pd.DataFrame") -> list[Chart]:
    """fig:track_adamgradg_sgd: cosine of three filters of every layer with the same filter under SGD, by step."""
    charts = []
    for run in dict.fromkeys(table["run"]):
        rows = table[(table["run"] == run) & (table["statistic"] == "mean") & table["group"].str.endswith("]")]
        lines = []
        # In the order of the names AdaGradG comes last, and is seen above AdaGrad.
        for group, series in rows.groupby("group", sort=True):
            method = str(group).split(": ", 1)[0]
            lines.append(Line(method, series["step"].astype(float).tolist(), series["value"].tolist()))
        charts.append(Chart(str(run), "step", "cosine with SGD", lines))
    return charts


def phenomena_figure(table: "pd.DataFrame") -> list[Chart]:
    """Section 4.1 in figures: the median turn by (a), (b1), (b2) and (c) over the filters of each layer, by step."""
    charts = []
    for quantity in ("deformation", "gradient_memory", "l2_memory", "radius_ratio"):
        rows = table[(table["quantity"] == quantity) & (table["statistic"] == "median")]
        lines = []
        for group, series in rows.groupby("group", sort=False):
            lines.append(Line(str(group), series["step"].astype(float).tolist(), series["value"].tolist()))
        charts.append(Chart(QUANTITIES[quantity].title, "step", "turn (rad), median", lines, logarithmic=True))
    return charts


TRACK_FIGURES: dict[str, Callable[["pd.DataFrame"], list[Chart]]] = {
    "hypotheses": hypotheses_figure,
    "phenomena": phenomena_figure,
    "trajectories": trajectories_figure,
}

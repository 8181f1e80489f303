"""Figures as files: SVG for documents, or a page in which one can zoom."""

import html
import json
import math
from pathlib import Path
from typing import Any

from steradian.lab.charts import Chart, Figure, Line, Paint, Ramp, scales, svg
from steradian.lab.results import write_atomically

__all__ = ["write_figure"]


_ALONE = {"displaylogo": False, "plotlyServerURL": "", "modeBarButtonsToRemove": ["sendChartToCloud"]}
"""No button that sends the figure away."""


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to an .svg, or to an .html with plotly that can be zoomed.

    Raises:
        ValueError: the file's name ends in something else, or there is nothing to show.
    """
    if (kind := path.suffix.lower()) not in (".svg", ".html"):
        raise ValueError(f"the file of a figure must end in .svg or .html, got {path.name!r}")
    if figure.empty:
        raise ValueError("there is nothing to show: no results of this kind, or none that did not diverge")
    if kind == ".svg":
        write_atomically(path, svg(figure).encode())
    else:
        write_atomically(path, _page(figure).encode())


def _page(figure: Figure) -> str:
    """A page with plotly inside, which opens without network."""
    from plotly.offline import get_plotlyjs

    parts, paint = [], Paint(figure)
    for k, chart in enumerate(figure.charts):
        made = {"data": _traces(chart, paint), "layout": _layout(chart), "config": _ALONE}
        data = json.dumps(made).replace("</", "<\\/")
        parts.append(f'<div id="f{k}"></div><script>Plotly.newPlot("f{k}", {data})</script>')
    if figure.ramp is not None:
        parts.append(_legend(figure.ramp))
    head = f'<meta charset="utf-8"><title>Figures</title><script>{get_plotlyjs()}</script>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _legend(ramp: Ramp) -> str:
    """What the lines without a name are."""
    colours = "".join(
        f'<i style="background:{light};display:inline-block;width:.6em;height:1em"></i>' for light, _ in ramp.colours
    )
    return f'<p style="font-family:sans-serif">{html.escape(ramp.first)} {colours} {html.escape(ramp.last)}</p>'


def _traces(chart: Chart, paint: Paint) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for line in chart.lines:
        colour = paint.colour(line)[0]
        shared = {"x": list(line.x), "mode": "lines" if len(line.x) > 1 else "markers", "legendgroup": line.name}
        hidden = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        if line.low:
            made.append({**shared, **hidden, "y": list(line.low)})
            made.append({**shared, **hidden, "y": list(line.high), "fill": "tonexty", "fillcolor": colour + "26"})
        first = bool(line.name) and all(trace.get("name") != line.name for trace in made)
        look = {"color": colour, **_look(line)}
        made.append({**shared, "y": list(line.y), "name": line.name, "line": look, "showlegend": first})
    return made


def _look(line: Line) -> dict[str, Any]:
    return {"width": 0.7 if line.thin else 1.6, **({"dash": "dash"} if line.dashed else {})}


def _layout(chart: Chart) -> dict[str, Any]:
    # Plotly by itself makes room for every line, also for what a zoom leaves out.
    across, up = scales(chart, 1, 1)
    place = math.log10 if chart.logarithmic else float  # where plotly expects what is not data
    x = {"title": {"text": chart.x_title}, "range": [across.low, across.high]}
    y = {"title": {"text": chart.y_title}, "range": [place(up.low), place(up.high)], "exponentformat": "power"}
    y["type"] = "log" if chart.logarithmic else "linear"
    marks = [(level, text) for level, text in chart.marks if up.shows(level)]
    wide = {"xref": "paper", "x0": 0, "x1": 1}
    lines = [{"type": "line", **wide, "y0": level, "y1": level, "line": {"dash": "dot"}} for level, _ in marks]
    beside = {"xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom", "showarrow": False}
    words = [{**beside, "y": place(level), "text": text} for level, text in marks]
    axes = {"xaxis": x, "yaxis": y}
    return {"title": {"text": chart.title}, **axes, "shapes": lines, "annotations": words, "template": "none"}

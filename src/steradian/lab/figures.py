"""The paper's figures from stored results: curves by epoch with zooms, and quantities recorded within trainings.

A figure is first data (`Figure`, `Chart`, `Line`), then drawn by matplotlib as an SVG.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steradian.files import write_atomically
from steradian.lab.angle import ANGLES, TUNED
from steradian.lab.experiments import ALL, LIVING, PHENOMENA
from steradian.lab.paper import NORM_NAMES
from steradian.lab.registry import PAPERS
from steradian.lab.results import Result
from steradian.lab.tables import Rows, accuracy_columns, method_order
from steradian.watching.records import QUANTITIES

__all__ = ["FIGURES", "TRACK_FIGURES", "Chart", "Figure", "Line", "write_figure"]

About = Mapping[str, Mapping[str, Any]]
"""By run, as `Tracks.about` has it: "config" and "steps" in an epoch."""

# After Okabe and Ito, for any colour vision; the first are those of the paper's methods, in the registry's order.
_COLOURS = ["#4d4d4d", "#d55e00", "#d19a00", "#009e73", "#45a5de", "#0055a4", "#b5498a", "#7a5195"]
_COLOURS += ["#117a8b", "#a61e4d", "#5a7d00", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#1a1a8f", "#9e9e9e"]
_PLACES = {method: 8 + place for place, method in enumerate(sorted(TUNED.keys() - {*PAPERS}))}
_PLACES |= {method: place for place, method in enumerate(PAPERS)}
_MEAN = "#0055a4"
_LAYER_COLOURS = ("#fdbb4c", "#d6485c", "#3f1b6e")  # from the first layer to the last
_MIN_ZOOM_EPOCHS = 12  # shorter curves are not zoomed
_EARLY = 0.02  # share of the epochs whose figures are far from all others
_BEFORE_ZERO = 0.95  # share of the epochs before a cosine ends at 0, which has no logarithm
_LONG_NAME = 30  # letters beyond which two names do not fit below a chart
_ACROSS, _WIDTH, _HEIGHT = 2, 4.7, 3.1  # charts in a row, and inches of each


def method_colour(method: str) -> str:
    """The colour of a method, the same in all figures, whatever is registered."""
    place = _PLACES[method] if method in _PLACES else len(PAPERS) + sum(map(ord, method))
    return _COLOURS[place % len(_COLOURS)]


@dataclass(frozen=True)
class Line:
    """A line; lines that share a name are in the legend once, those without a name are not; thin: one of many."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # edges of a band around it
    high: Sequence[float] = ()
    dashed: bool = False
    colour: str = "#4d4d4d"
    thin: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes, of which a part may be shown; marks are levels to compare with, and their labels.

    With `names` the vertical axis has these, from 0 downwards, instead of numbers.
    """

    title: str
    x_title: str
    y_title: str
    lines: list[Line] = field(default_factory=list)
    logarithmic: bool = False
    x_range: tuple[float, float] | None = None
    marks: Sequence[tuple[float, str]] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """Charts that belong together, with one legend; `ramp` has the colours of the lines without a name."""

    charts: Sequence[Chart]
    ramp: Sequence[str] = ()
    ramp_name: str = ""

    @property
    def empty(self) -> bool:
        """There is no line to show."""
        return not any(chart.lines for chart in self.charts)


def _by_epoch(results: Iterable[Result], curve: str, title: str, *, logarithmic: bool = False) -> Figure:
    """Means over seeds for each column, the last quarter of the epochs and, of accuracies, the first third."""
    unique = {result.config.key: result for result in results}.values()
    columns = accuracy_columns(result for result in unique if not result.diverged)
    charts = []
    for column in columns:
        lines = []
        for method, found in column.results.items():
            shortest = min(len(result.curves[curve]) for result in found)
            values = np.asarray([result.curves[curve][:shortest] for result in found])
            low, high = (values.min(axis=0).tolist(), values.max(axis=0).tolist()) if len(found) > 1 else ([], [])
            name, mean = f"{method} ({len(found)} seed{'s' * (len(found) > 1)})", values.mean(axis=0).tolist()
            epochs = np.arange(1.0, shortest + 1).tolist()
            lines.append(Line(name, epochs, mean, low, high, colour=method_colour(method)))
        alike = [each for each in columns if each.name == column.name]
        name = column.name if len(alike) == 1 else f"{column.name}, {column.config.epochs} epochs"
        longest = float(max(len(line.x) for line in lines))
        start = 1 if logarithmic or _EARLY * longest < 1 else 1 + _EARLY * longest
        parts = {name: (start, longest)}
        if longest >= _MIN_ZOOM_EPOCHS:
            parts |= {} if logarithmic else {"the first epochs": (start, longest / 3)}
            parts["the last epochs"] = (0.75 * longest, longest)
        charts += [Chart(part, "epoch", title, lines, logarithmic, shown) for part, shown in parts.items()]
    return Figure(charts)


def _means(results: Iterable[Result]) -> Figure:
    """Mean test accuracies of each column's methods with their 95 % intervals, the best first; one seed has none."""
    charts = []
    for column in accuracy_columns(results):
        cells = sorted((cell for cell in column.cells.items() if math.isfinite(cell[1].half)), key=lambda c: -c[1].mean)
        lines = []
        for k, (_, cell) in enumerate(cells):
            ends = [cell.mean - cell.half, cell.mean + cell.half]
            lines += [Line("", [cell.mean], [k], colour=_MEAN), Line("", ends, [k, k], colour=_MEAN)]
        names = [f"{method} ({cell.count})" for method, cell in cells]
        charts.append(Chart(f"{column.name}, {column.length}", "test accuracy (%)", "", lines, names=names))
    return Figure([chart for chart in charts if chart.lines])


def _tuning(results: Iterable[Result]) -> Figure:
    """Best validation accuracies of the points that were tried, by the angle that they give in equilibrium."""
    found: dict[str, dict[float, list[float]]] = {}
    for result in results:
        c = result.config
        if c.method != "Adam w/o (ab)" and (c.lr, c.weight_decay) in (points := TUNED.get(c.method, [])):
            angle = ANGLES[points.index((c.lr, c.weight_decay))]
            reached = math.nan if result.diverged else max(result.curves["validation_accuracy"])
            found.setdefault(c.method, {}).setdefault(1e3 * angle, []).append(reached)
    lines = []
    for method in sorted(found, key=method_order):
        x = sorted(found[method])
        means = [float(np.mean(found[method][angle])) for angle in x]
        lines.append(Line(method, x, means, colour=method_colour(method)))
    axes = "angle in equilibrium (mrad per step)", "validation accuracy (%)"
    return Figure([Chart("The same nominal angles for every method", *axes, lines)] if lines else [])


FIGURES: dict[str, Callable[[Iterable[Result]], Figure]] = {
    "loss": partial(_by_epoch, curve="train_loss", title="training loss", logarithmic=True),  # fig:loss_comparison
    "accuracy": partial(_by_epoch, curve="validation_accuracy", title="validation accuracy (%)"),  # fig:acc_comparison
    "means": _means,
    "tuning": _tuning,
}
"""Figures of results, by their names on the command line."""


def _hypotheses(table: pd.DataFrame, about: About) -> tuple[Figure, Rows]:
    """The figures of App. C.1.2 and fig:taylor: the largest |A⟨c,u⟩|, z, and z² of SGD over all filters, by epoch.

    Only dashed lines include filters that shrank away. The table has the largest values of a living filter, their
    epochs, and the usual ones: medians, over the steps after the first epoch, of the largest over the filters.
    """
    h1 = Chart("H1: |A⟨c,u⟩| stays below 1", "epoch", "largest over all filters", [], True, marks=[(1.0, "1")])
    h2 = replace(h1, title="H2: z = ηᵉ‖c⊥‖ stays below π", lines=[], marks=[(np.pi, "π")])
    taylor = replace(h1, title="Theorem 4: the Taylor variable z² under SGD", lines=[], marks=[])
    charts, lines = {"|A⟨c,u⟩|": ("radial", 1, h1), "z": ("velocity", 1, h2), "z²": ("velocity", 2, taylor)}, []
    for run, method, colour in _by_method(about):
        if not len(_pick(table, run=run, quantity="radial")):
            continue
        line, steps = [method], about[run]["steps"]
        for quantity, power, chart in charts.values():
            living, every = (_largest(table, run, group, quantity) ** power for group in (LIVING, ALL))
            later = living[living.index >= steps]
            when = f"{living.idxmax() / steps:.3g}" if len(living) else ""
            line += [_number(living.max()), when, _number((later if len(later) else living).median())]
            if living.empty or (chart is taylor and method != "SGD"):
                continue
            shown = {method: living, f"{method}, with filters that shrank away": every}
            for name, values in list(shown.items())[: 1 if living.equals(every) else 2]:
                x = (values.index / steps).tolist()
                chart.lines.append(Line(name, x, values.tolist(), dashed=name != method, colour=colour))
        share = _pick(table, run=run, group=ALL, quantity="living", statistic="mean").sort_values("step")["value"]
        lines.append([*line, f"{1 - share.iloc[-1]:.1%}" if len(share) else ""])
    heads = [head for name in charts for head in (f"largest {name}", "at epoch", "usually")]
    figure = Figure([chart for chart in (h1, h2, taylor) if chart.lines])
    return figure, (["method", *heads, "filters that shrank away"], lines)


def _trajectories(table: pd.DataFrame, about: About) -> tuple[Figure, Rows]:
    """fig:track_adamgradg_sgd: cosines with the same filter under SGD by iteration, and a table of those at the end."""
    charts, lines = [], []
    for run in about:
        rows = table[(table["run"] == run) & table["quantity"].isin(["cosine", "angle"])]
        if not len(rows):
            continue
        config, last = about[run]["config"], rows[rows["step"] == rows["step"].max()]
        title = f"{config['model']} {NORM_NAMES[config['norm']]}"
        single, medians = [], []
        for method in ("AdaGrad", "AdaGradG"):  # the latter is drawn on top
            colour, own = method_colour(method), rows[rows["group"].str.startswith(f"{method}: ")]
            filters = own[own["group"].str.endswith("]")].astype({"group": str})
            for _, series in filters.groupby("group", sort=False):
                single.append(Line("", *_series(series), colour=colour, thin=True))
            median = _pick(own, group=f"{method}: {ALL}", quantity="cosine", statistic="median")
            medians.append(Line(f"{method}, median of all filters", *_series(median), colour=colour))
        charts.append(Chart(title, "iteration", "cosine with the filter under SGD", single + medians))
        for method in ("AdaGradG", "AdaGrad"):
            ends = _pick(last, group=f"{method}: {ALL}").set_index(["quantity", "statistic"])["value"]
            figures = ["diverged", "", "", ""]
            if len(ends):
                cosines = [ends["cosine", name] for name in ("min", "median", "mean")]
                figures = [f"{value:.4f}" if value < 0.9995 else f"{value:.7f}" for value in cosines]
                figures.append(f"{ends['angle', 'max']:.2g}")
            lines.append([title, method, f"{last['step'].max()}", *figures])
    heads = ["network", "scheme", "iterations", "lowest cosine with SGD", "median", "mean", "largest angle (rad)"]
    return Figure(charts), (heads, lines)


def _phenomena(table: pd.DataFrame, about: About) -> tuple[Figure, Rows]:
    """Section 4.1: the median turn by (a), (b1), (b2) and (c), by epoch: of Adam's layers, and of every method."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    medians = _pick(table, statistic="median")
    runs = {run: method for run, method, _ in _by_method(about) if len(_pick(medians, run=run, quantity=PHENOMENA[0]))}
    if not runs:
        return Figure([]), ([], [])
    shown = next((run for run, method in runs.items() if method == "Adam"), next(iter(runs)))
    layers = [name for name in dict.fromkeys(_pick(medians, run=shown)["group"]) if name not in (ALL, LIVING)]
    charts, ramp = [], LinearSegmentedColormap.from_list("layers", _LAYER_COLOURS)
    colours = [to_hex(ramp(k / max(1, len(layers) - 1))) for k in range(len(layers))]
    for quantity in PHENOMENA:
        wanted = [(shown, name, "", colour) for name, colour in zip(layers, colours, strict=True)]
        wanted += [(run, LIVING, f"{method}, all layers", method_colour(method)) for run, method in runs.items()]
        lines = []
        for run, group, name, colour in wanted:
            series = _series(_pick(medians, run=run, group=group, quantity=quantity), about[run]["steps"])
            lines.append(Line(name, *series, colour=colour, thin=not name))
        charts.append(Chart(QUANTITIES[quantity].title, "epoch", "median turn (radians)", lines, logarithmic=True))
    return Figure(charts, colours, f"{runs[shown]}, first layer to last layer"), _turns(medians, about)


def _turns(medians: pd.DataFrame, about: About) -> Rows:
    """Of each method and phenomenon the median turn of a filter, and the layer where it is largest after an epoch."""
    lines = []
    for run, method, _ in _by_method(about):
        config = about[run]["config"]
        end = config["epochs"]
        falls = next(epoch for epoch in (*config["milestones"], end) if epoch)
        for quantity in PHENOMENA:
            own = _pick(medians, run=run, quantity=quantity)
            if not len(own):
                continue
            own = own.assign(epoch=own["step"] / about[run]["steps"])
            every, parts = _pick(own, group=LIVING), []
            for first, last in ((0, 1), (0.9 * falls, falls), (0.95 * end, end)):
                inside = every[(every["epoch"] >= first) & (every["epoch"] <= last)]
                if not len(inside) and len(every):  # no step was recorded then: the nearest
                    inside = every.loc[[(every["epoch"] - (first + last) / 2).abs().idxmin()]]
                parts.append(_number(inside["value"].median()))
            layers = own[~own["group"].isin([ALL, LIVING]) & (own["epoch"] >= min(1, end / 2))]
            where = ""
            if len(layers):  # a diverged run may have none
                largest = layers.loc[layers["value"].idxmax()]
                where = f"{largest['value']:.2g} in {largest['group']}, epoch {largest['epoch']:.0f}"
            lines.append([method, QUANTITIES[quantity].title, *parts, where])
    heads = ["method", "phenomenon", "first epoch", "before the rate falls", "last epochs", "largest median of a layer"]
    return heads, lines


def _layers(table: pd.DataFrame, about: About) -> tuple[Figure, Rows]:
    """The root mean square of every layer's angle by epoch, and its median over the steps of each third."""
    chart, lines = Chart("Root mean square over a layer's filters", "epoch", "angle per step (rad)", [], True), []
    for run, method, colour in _by_method(about):
        own = _pick(table, run=run, quantity="angle", statistic="rms")
        layers = own.pivot(index="step", columns="group", values="value")
        if layers.empty:
            continue
        chart = replace(chart, x_range=(0, _BEFORE_ZERO * about[run]["config"]["epochs"]))
        x = (layers.index / about[run]["steps"]).tolist()
        chart.lines.extend(Line("", x, layers[name].tolist(), colour=colour, thin=True) for name in layers)
        chart.lines.append(Line(f"{method}, median layer", x, layers.median(axis=1).tolist(), colour=colour))
        # Of all steps: those at the start were recorded more often.
        every = layers.reindex(range(layers.index[-1] + 1)).interpolate(method="index")
        thirds = np.array_split(np.arange(len(every)), 3)
        for part, steps in zip(("first third", "second third", "last third"), thirds, strict=True):
            usual = every.iloc[steps].median()
            ends = f"{usual.min():.2g} ({usual.idxmin()})", f"{usual.max():.2g} ({usual.idxmax()})"
            lines.append([method, part, ends[0], f"{usual.median():.2g}", ends[1]])
    return Figure([chart] if chart.lines else []), (["method", "steps", "smallest", "median layer", "largest"], lines)


TRACK_FIGURES: dict[str, Callable[[pd.DataFrame, About], tuple[Figure, Rows]]] = {
    "hypotheses": _hypotheses,
    "layers": _layers,
    "phenomena": _phenomena,
    "trajectories": _trajectories,
}
"""Figures of recorded quantities, empty if others were recorded, and the tables below them."""


def _pick(table: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    """The rows with these entries."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    return table


def _by_method(about: About) -> list[tuple[str, str, str]]:
    """Runs in the order of their methods, with method and colour."""
    found = [(run, str(facts["config"]["method"])) for run, facts in about.items()]
    return [(run, m, method_colour(m)) for run, m in sorted(found, key=lambda each: method_order(each[1]))]


def _number(value: float) -> str:
    return f"{value:.2g}".replace("nan", "")


def _largest(table: pd.DataFrame, run: str, group: str, quantity: str) -> "pd.Series[float]":
    """The largest magnitude over the rows, by step."""
    rows = _pick(table, run=run, group=group, quantity=quantity)
    rows = rows[rows["statistic"].isin(["min", "max"])]
    return rows["value"].abs().groupby(rows["step"]).max()


def _series(rows: pd.DataFrame, steps: int = 1) -> tuple[list[float], list[float]]:
    """Epochs, or steps if an epoch has 1 step, and values."""
    return (rows["step"] / steps).tolist(), rows["value"].tolist()


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure that is not empty to an .svg, or to an .html that contains it."""
    if path.suffix not in (".svg", ".html"):
        raise ValueError(f"the file of a figure must end in .svg or .html, got {path.name!r}")
    if figure.empty:
        raise ValueError("there is nothing to show: no results of this kind, or all of them diverged")
    svg = to_svg(figure)
    page = f'<!doctype html><meta charset="utf-8"><title>Figure</title>{svg[svg.index("<svg") :]}'
    write_atomically(path, (svg if path.suffix == ".svg" else page).encode())


def to_svg(figure: Figure) -> str:
    """A figure as SVG."""
    import matplotlib

    buffer = io.BytesIO()
    # Text stays text, and the same figure is the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "steradian", "font.size": 9}):
        draw(figure).savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"(\.\d\d)\d+", r"\1", buffer.getvalue().decode())  # hundredths of a point are enough


def draw(figure: Figure) -> Any:
    """Charts two by two with one legend: in the free place if their number is odd, else below them."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    named = any(chart.names for chart in figure.charts)  # names take room
    columns = 1 if named else min(_ACROSS, len(figure.charts))
    rows = math.ceil(len(figure.charts) / columns)
    free = len(figure.charts) < rows * columns
    handles: dict[str, Any] = {}
    for line in (line for chart in figure.charts for line in chart.lines if line.name):
        look: dict[str, Any] = {"linewidth": 2, "color": line.colour, "linestyle": "--" if line.dashed else "-"}
        handles[_literal(line.name)] = Line2D([], [], **look)
    if figure.ramp:
        handles[figure.ramp_name] = tuple(Patch(color=colour) for colour in figure.ramp)
    beside = 1 if columns == 1 and max(map(len, handles), default=0) > _LONG_NAME else 2 * columns
    below = 0 if free else 0.25 * math.ceil(len(handles) / beside) + 0.2
    size = _WIDTH * (_ACROSS if named else columns), _HEIGHT * rows + below
    canvas = Canvas(figsize=size, layout="constrained", facecolor="white")
    grid = canvas.subplots(rows, columns, squeeze=False).flatten()
    for axes, chart in zip(grid, figure.charts, strict=False):
        _draw_chart(axes, chart)
    legend: dict[str, Any] = {"frameon": False, "handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)}}
    if free:
        grid[-1].axis("off")
        grid[-1].legend(handles.values(), handles.keys(), loc="upper left", **legend)
    elif handles:
        canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=beside, **legend)
    return canvas


def _literal(name: str) -> str:
    """A name that matplotlib does not read as a formula."""
    return name.replace("$", r"\$")


def _draw_chart(axes: Any, chart: Chart) -> None:
    axes.set_title(_literal(chart.title), loc="left", fontsize=10, fontweight="bold")
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    if chart.names:
        axes.set_yticks(range(len(chart.names)), list(map(_literal, chart.names)))
        axes.set_ylim(len(chart.names) - 0.5, -0.5)
    if chart.logarithmic:
        axes.set_yscale("log", nonpositive="mask")
    axes.margins(x=0.03 if chart.names else 0)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    for level, label in chart.marks:
        axes.axhline(level, color="#777777", linestyle=":", linewidth=1)
        axes.annotate(label, (1, level), xycoords=("axes fraction", "data"), va="bottom", ha="right")
    left, right = chart.x_range or (-math.inf, math.inf)
    for line in chart.lines:
        # Only what is shown, which sets the limits of the vertical axis.
        x, y, *edges = (np.asarray(each, dtype=float) for each in (line.x, line.y, line.low, line.high))
        shown = (x >= left) & (x <= right)
        if len(edges[0]):
            low, high = edges[0][shown], edges[1][shown]
            axes.fill_between(x[shown], low, high, color=line.colour, alpha=0.15, linewidth=0)
        look = {"color": line.colour, "linewidth": 0.8 if line.thin else 1.6, "alpha": 0.65 if line.thin else 1}
        marker = "o" if shown.sum() == 1 else ""
        axes.plot(x[shown], y[shown], "--" if line.dashed else "-", marker=marker, markersize=4, **look)
    if chart.x_range is not None and left < right:
        axes.set_xlim(left, right)

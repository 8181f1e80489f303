"""The paper's figures from stored results: curves by epoch with their zooms, and what was recorded within trainings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from steradian.lab.charts import Chart, Figure, Line, Ramp
from steradian.lab.colours import METHOD_COLOURS, ramp
from steradian.lab.config import METHODS
from steradian.lab.paper import DATA_NAMES, NORM_NAMES
from steradian.lab.results import Result
from steradian.lab.tables import place
from steradian.lab.tracking import ALL, LIVING, PHENOMENA
from steradian.watching.records import QUANTITIES

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
]

About = Mapping[str, Mapping[str, Any]]
"""By run, as `Tracks.about` has it: "config" and "steps" in an epoch."""

_WORTH_A_ZOOM = 12  # epochs
_EARLY = 0.02  # of the epochs, whose figures are far from all others


def loss_figure(results: Iterable[Result]) -> Figure:
    """fig:loss_comparison: mean training loss by epoch, and the last quarter of the epochs."""
    zooms = {"the last epochs": lambda n: (0.75 * n, float(n))}
    return _by_epoch(results, "train_loss", "training loss", zooms, logarithmic=True)


def accuracy_figure(results: Iterable[Result]) -> Figure:
    """fig:acc_comparison: mean validation accuracy by epoch, the first third of the epochs, and the last quarter."""
    zooms = {"the first epochs": lambda n: (_first(n), n / 3), "the last epochs": lambda n: (0.75 * n, float(n))}
    return _by_epoch(results, "validation_accuracy", "validation accuracy (%)", zooms)


FIGURES: dict[str, Callable[[Iterable[Result]], Figure]] = {"loss": loss_figure, "accuracy": accuracy_figure}


def _by_epoch(
    results: Iterable[Result],
    curve: str,
    title: str,
    zooms: Mapping[str, Callable[[int], tuple[float, float]]],
    *,
    logarithmic: bool = False,
) -> Figure:
    kinds: dict[tuple[str, str, str, int], dict[str, list[Result]]] = {}  # norm, network, data, epochs
    for result in {result.config.key: result for result in results}.values():
        config = result.config
        if not result.diverged and config.start is None:
            methods = kinds.setdefault((config.norm, config.model, config.data, config.epochs), {})
            methods.setdefault(config.method, []).append(result)
    charts = []
    for kind in sorted(kinds, key=lambda kind: place(*kind)):
        (norm, model, data, epochs), by_method = kind, kinds[kind]
        ordered = [method for method in METHODS if method in by_method]
        for method in ordered:
            if len({result.config.setting for result in by_method[method]}) > 1:
                raise ValueError(f"{model} {data} holds {method} with several settings: they have no mean over seeds")
        lines = [_line(method, [r.curves[curve] for r in by_method[method]]) for method in ordered]
        name = f"{model} {NORM_NAMES.get(norm, norm)}, {DATA_NAMES.get(data, data)}"
        if len([each for each in kinds if each[:3] == kind[:3]]) > 1:
            name += f", {epochs} epochs"
        longest = max(len(line.x) for line in lines)
        start = 1 if logarithmic else _first(longest)
        charts.append(Chart(name, "epoch", title, lines, logarithmic, (start, float(longest))))
        if longest >= _WORTH_A_ZOOM:
            charts += [Chart(part, "epoch", title, lines, logarithmic, cut(longest)) for part, cut in zooms.items()]
    return Figure(charts)


def _first(epochs: int) -> float:
    """The epoch after the early ones; of few epochs none is left out."""
    early = _EARLY * epochs
    return 1 + early if early >= 1 else 1


def _line(method: str, curves: Sequence[Sequence[float]]) -> Line:
    """The mean over seeds, and the band from the lowest to the highest."""
    length = min(map(len, curves))
    values = np.asarray([curve[:length] for curve in curves])
    epochs = [float(k) for k in range(1, length + 1)]
    low, high = (values.min(axis=0).tolist(), values.max(axis=0).tolist()) if len(curves) > 1 else ([], [])
    seeds = f"{method} ({len(curves)} seed{'s' if len(curves) > 1 else ''})"
    return Line(seeds, epochs, values.mean(axis=0).tolist(), low, high, colour=METHOD_COLOURS[method])


def hypotheses_figure(table: "pd.DataFrame", about: About) -> Figure:
    """The figures of App. C.1.2 and fig:taylor: the largest |A⟨c,u⟩|, z, and z² of SGD over all filters, by epoch.

    Filters that shrank to less than a thousandth of their first radius are left out of the full lines; where there are
    such, dashed lines have all filters.
    """
    wanted: list[tuple[str, str, Callable[[Any], Any], list[tuple[float, str]], tuple[str, ...]]] = [
        ("H1: |A⟨c,u⟩| stays below 1", "radial", np.abs, [(1.0, "1")], METHODS),
        ("H2: z = ηᵉ‖c⊥‖ stays below π", "velocity", np.abs, [(np.pi, "π")], METHODS),
        ("Theorem 4: the Taylor variable z² under SGD", "velocity", np.square, [], ("SGD",)),
    ]
    charts = []
    for title, quantity, of, marks, methods in wanted:
        lines = []
        for run in _ordered(about, methods):
            living, every = (_largest(table, run, group, quantity, about) for group in (LIVING, ALL))
            if not living[0]:
                continue  # it recorded other things
            method, colour = _method(about, run), METHOD_COLOURS[_method(about, run)]
            lines.append(Line(method, living[0], of(living[1]).tolist(), colour=colour))
            if living != every:
                y = of(every[1]).tolist()
                lines.append(Line(f"{method}, with filters that shrank away", every[0], y, dashed=True, colour=colour))
        if lines:
            charts.append(Chart(title, "epoch", "largest over all filters", lines, logarithmic=True, marks=marks))
    return Figure(charts)


def _largest(
    table: "pd.DataFrame", run: str, group: str, quantity: str, about: About
) -> tuple[list[float], list[float]]:
    """Epochs, and the largest magnitude over the rows."""
    rows = _rows(table, run, group, quantity)
    rows = rows[rows["statistic"].isin(["min", "max"])]
    series = rows.assign(value=rows["value"].abs()).groupby("step", sort=True)["value"].max()
    return [step / about[run]["steps"] for step in series.index], series.tolist()


def trajectories_figure(table: "pd.DataFrame", about: About) -> Figure:
    """fig:track_adamgradg_sgd: cosine with the same filter under SGD, three filters of every block, by iteration.

    Thick lines are the medians over all filters of the network.
    """
    charts = []
    for run in about:
        config, rows = about[run]["config"], table[(table["run"] == run) & (table["quantity"] == "cosine")]
        if not len(rows):
            continue  # it recorded other things
        lines, medians = [], []
        for method in ("AdaGrad", "AdaGradG"):  # the latter lies above
            own = rows[rows["group"].str.startswith(f"{method}: ")]
            colour = METHOD_COLOURS[method]
            single = own[own["group"].str.endswith("]")].astype({"group": str})
            for _, series in single.groupby("group", sort=False):
                lines.append(Line("", *_series(series), colour=colour, thin=True))
            median = own[(own["group"] == f"{method}: {ALL}") & (own["statistic"] == "median")]
            medians.append(Line(f"{method}, median of all filters", *_series(median), colour=colour))
        title = f"{config['model']} {NORM_NAMES[config['norm']]}"
        charts.append(Chart(title, "iteration", "cosine with the filter under SGD", lines + medians))
    return Figure(charts)


def phenomena_figure(table: "pd.DataFrame", about: About) -> Figure:
    """Section 4.1 in figures: the median turn by (a), (b1), (b2) and (c) over the filters of each layer, by epoch.

    Layers are those of Adam where it was tracked; thick lines are medians over all filters, of every method.
    """
    measured = set(table[table["quantity"] == PHENOMENA[0]]["run"])
    runs = [run for run in _ordered(about, METHODS) if run in measured]
    if not runs:
        return Figure([])
    shown = next((run for run in runs if _method(about, run) == "Adam"), runs[0])
    medians = table[table["statistic"] == "median"]
    layers = [name for name in dict.fromkeys(medians[medians["run"] == shown]["group"]) if name not in (ALL, LIVING)]
    colours = [ramp(k / max(1, len(layers) - 1)) for k in range(len(layers))]
    charts = []
    for quantity in PHENOMENA:
        lines = []
        for name, colour in zip(layers, colours, strict=True):
            lines.append(
                Line("", *_epochs(_rows(medians, shown, name, quantity), about[shown]), colour=colour, thin=True)
            )
        for run in runs:
            method = _method(about, run)
            series = _epochs(_rows(medians, run, LIVING, quantity), about[run])
            lines.append(Line(f"{method}, all layers", *series, colour=METHOD_COLOURS[method]))
        charts.append(Chart(QUANTITIES[quantity].title, "epoch", "median turn (radians)", lines, logarithmic=True))
    legend = Ramp(f"{_method(about, shown)}, first layer", "last layer", colours)
    return Figure(charts, legend)


TRACK_FIGURES: dict[str, Callable[["pd.DataFrame", About], Figure]] = {
    "hypotheses": hypotheses_figure,
    "phenomena": phenomena_figure,
    "trajectories": trajectories_figure,
}


def _method(about: About, run: str) -> str:
    return str(about[run]["config"]["method"])


def _ordered(about: About, methods: Sequence[str]) -> list[str]:
    """Runs of these methods, in their order."""
    return sorted(
        (run for run in about if _method(about, run) in methods), key=lambda r: METHODS.index(_method(about, r))
    )


def _rows(table: "pd.DataFrame", run: str, group: str, quantity: str) -> "pd.DataFrame":
    return table[(table["run"] == run) & (table["group"] == group) & (table["quantity"] == quantity)]


def _series(rows: "pd.DataFrame") -> tuple[list[float], list[float]]:
    return rows["step"].astype(float).tolist(), rows["value"].tolist()


def _epochs(rows: "pd.DataFrame", about: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    steps, values = _series(rows)
    return [step / about["steps"] for step in steps], values

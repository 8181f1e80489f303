"""Figures show what was stored, in colours that are the same everywhere."""

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from steradian.lab import paper
from steradian.lab.angle import TUNED
from steradian.lab.experiments import ALL, LIVING, PHENOMENA
from steradian.lab.figures import (
    FIGURES,
    TRACK_FIGURES,
    Chart,
    Figure,
    Line,
    draw,
    method_colour,
    write_figure,
)
from steradian.lab.registry import METHODS
from steradian.lab.tables import accuracy_columns

from lab.simulated import STEPS, column, compared, tracked, tuned, turned


def drawn(figure, tmp_path):
    write_figure(figure, tmp_path / "drawn.svg")
    return ET.parse(tmp_path / "drawn.svg").getroot()


def texts(root):
    return ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("}text")]


def lines_of(root, colour):
    """Points of every line of this colour within the axes: x, y with y upwards."""
    found = []
    for axes in root.iter():
        if not axes.get("id", "").startswith("axes_"):
            continue
        for path in axes.iter():
            if path.tag.endswith("}path") and f"stroke: {colour}" in path.get("style", "") and path.get("clip-path"):
                pairs = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))
                found.append([(float(x), -float(y)) for x, y in pairs])
    return found


def dots_of(root, colour):
    """Markers of this colour."""
    return [e for e in root.iter() if e.tag.endswith("}use") and f"fill: {colour}" in e.get("style", "")]


@pytest.mark.parametrize("kind", ["loss", "accuracy"])
def test_curves_show_every_method_with_its_seeds(tmp_path, kind):
    results = column(tmp_path, seeds=2, epochs=20, methods=["Adam", "AdamG", "SGD-M"])
    lost = replace(results[-1], diverged=True)
    short = [replace(r, curves={name: values[:5] for name, values in r.curves.items()}) for r in results]
    assert len(FIGURES[kind](short).charts) == 1  # five epochs need no zoom
    figure = FIGURES[kind]([*results[:-1], lost])
    whole, *zooms = figure.charts
    assert [line.name for line in whole.lines] == ["SGD-M (1 seed)", "Adam (2 seeds)", "AdamG† (2 seeds)"]
    assert [line.colour for line in whole.lines] == [method_colour(m) for m in ("SGD-M", "Adam", "AdamG†")]
    assert zooms[-1].x_range == (15, 20)
    curve = {"loss": "train_loss", "accuracy": "validation_accuracy"}[kind]
    runs = [r.curves[curve] for r in results if r.config.method == "Adam"]
    np.testing.assert_allclose(whole.lines[1].y, np.mean(runs, axis=0))
    np.testing.assert_allclose(whole.lines[1].high, np.max(runs, axis=0))
    write_figure(figure, tmp_path / "f.svg")
    write_figure(figure, tmp_path / "f.html")
    assert "AdamG† (2 seeds)" in texts(ET.parse(tmp_path / "f.svg").getroot())
    assert "<svg" in (tmp_path / "f.html").read_text()
    with pytest.raises(ValueError, match=r"must end in \.svg or \.html"):
        write_figure(figure, tmp_path / "f.png")
    with pytest.raises(ValueError, match="nothing to show"):
        write_figure(Figure([]), tmp_path / "f.svg")


def test_means_are_shown_with_their_intervals_the_best_first(tmp_path):
    results = column(tmp_path, seeds=3, epochs=2, methods=["Adam", "AdamG", "SGD-M"])
    one_seed = [r for r in results if r.config.method != "AdamG†" or r.config.seed == 0]
    [chart] = FIGURES["means"](one_seed).charts
    values = {m: [r.accuracy for r in results if r.config.method == m] for m in ("Adam", "SGD-M")}
    order = sorted(values, key=lambda m: -np.mean(values[m]))
    assert chart.names == [f"{m} (3)" for m in order]
    for k, method in enumerate(order):
        interval = stats.t.interval(0.95, 2, loc=np.mean(values[method]), scale=stats.sem(values[method]))
        mean, ends = (line for line in chart.lines if line.y[0] == k)
        np.testing.assert_allclose([*mean.x, *ends.x], [np.mean(values[method]), *interval])
    shown = texts(drawn(Figure([chart]), tmp_path))
    assert shown.index(chart.names[0]) < shown.index(chart.names[1])
    own = ["costs $5_{ and $6", *chart.names[1:]]  # a name of one's own is not a formula
    assert own[0] in texts(drawn(Figure([replace(chart, names=own)]), tmp_path))
    assert FIGURES["means"]([r for r in results if r.config.seed == 0]).empty


def test_curves_refuse_mixed_settings_and_ignore_duplicates(tmp_path):
    one, two = column(tmp_path, seeds=2, epochs=3, methods=["Adam"])
    [line] = FIGURES["loss"]([one, two, two]).charts[0].lines
    assert line.name == "Adam (2 seeds)"
    with pytest.raises(ValueError, match="Adam with several settings"):
        FIGURES["loss"]([one, replace(two, config=replace(two.config, lr=0.5))])


def test_charts_are_in_the_order_of_the_tables(tmp_path):
    [first, *_] = column(tmp_path)
    models = [("VGG16", "cifar10"), ("ResNet18", "mine"), ("ResNet18", "cifar10"), ("ResNet20", "cifar10")]
    results = [replace(first, config=replace(first.config, model=m, data=d)) for m, d in models]
    whole = [chart.title for chart in FIGURES["loss"](results).charts if chart.title != "the last epochs"]
    assert whole == [made.name for made in accuracy_columns(results)]
    assert whole[0].startswith("ResNet20")


def test_curves_of_different_lengths_have_their_own_charts(tmp_path):
    short, long = (column(tmp_path, seeds=1, epochs=n, methods=["Adam"]) for n in (3, 5))
    found = {chart.title: chart.lines[0].x[-1] for chart in FIGURES["loss"]([*short, *long]).charts}
    assert found == {"ResNet20 BN, CIFAR-10, 3 epochs": 3, "ResNet20 BN, CIFAR-10, 5 epochs": 5}


@pytest.mark.parametrize("kind", ["loss", "accuracy"])
@pytest.mark.parametrize("epochs", [1, 2, 12])
def test_curves_of_few_epochs_show_all_of_them(tmp_path, kind, epochs):
    whole = FIGURES[kind](column(tmp_path, seeds=1, epochs=epochs, methods=["Adam"])).charts[0]
    assert whole.x_range == (1, epochs)
    root = drawn(
        Figure([replace(whole, lines=[replace(whole.lines[0], y=[5.0 + k % 2 for k in range(epochs)])])]), tmp_path
    )
    colour = method_colour("Adam")
    if epochs == 1:  # in the middle, and large enough to be seen
        assert len(dots_of(root, colour)) == 1
    else:
        [line] = lines_of(root, colour)
        assert len(line) == epochs
        assert not dots_of(root, colour)


def test_a_figure_of_other_records_is_empty(tmp_path):
    others, own = compared(tmp_path, points=4), tracked(tmp_path, points=4)
    assert TRACK_FIGURES["hypotheses"](others.table(), others.about())[0].empty
    assert TRACK_FIGURES["trajectories"](own.table(), own.about())[0].empty


def test_a_chart_draws_points_at_their_coordinates(tmp_path):
    """A rising line goes from the lower left to the upper right, and NaN interrupts it."""
    line = Line("a", [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, math.nan, 100.0], colour="#123456")
    root = drawn(Figure([Chart("t", "x", "y", [line], True, marks=[(1000.0, "far")])]), tmp_path)
    points = lines_of(root, "#123456")[0]
    (x0, y0), (x1, y1), (x2, y2) = points[:3]
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.05)
    assert math.isclose(y1 - y0, y2 - y1, abs_tol=0.05)
    assert y0 < y2
    assert x0 < x2
    assert "far" in texts(root)


def test_a_zoom_draws_only_what_it_shows_and_fills_its_height(tmp_path):
    x = [float(k) for k in range(100)]
    line = Line(
        "a", x, [1e6 if k < 50 else k for k in x], [0.0] * 100, [2e6 if k < 50 else k for k in x], colour="#123456"
    )
    chart = Chart("t", "x", "y", [line], x_range=(60.0, 99.0))
    [axes] = draw(Figure([chart])).axes
    assert axes.get_xlim() == (60.0, 99.0)
    assert axes.get_ylim() == pytest.approx((-4.95, 103.95))
    [points] = lines_of(drawn(Figure([chart]), tmp_path), "#123456")
    assert max(p[0] for p in points) - min(p[0] for p in points) > 200  # of about 300 points of width


def test_the_same_figure_is_the_same_file(tmp_path):
    figure = Figure([Chart("t", "x", "y", [Line("a", [0.0, 1.0], [0.0, 1.0])])])
    for name in ("one.svg", "two.svg"):
        write_figure(figure, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    rows = paper.ACCURACY["bn"]
    assert len({method_colour(method) for method in rows}) == len(rows)


def test_the_colour_of_a_method_does_not_depend_on_what_is_registered(monkeypatch):
    before = method_colour("Mine")
    monkeypatch.setitem(METHODS, "Mine", None)
    assert method_colour("Mine") == before


def test_hypotheses_have_the_largest_of_all_filters(tmp_path):
    tracks = tracked(tmp_path, epochs=40)
    table, about = tracks.table(), tracks.about()
    first, second, taylor = TRACK_FIGURES["hypotheses"](table, about)[0].charts
    assert [line.name for line in first.lines] == ["SGD-M", "Adam", "SGD"]
    assert [line.name for line in taylor.lines] == ["SGD"]
    np.testing.assert_allclose(taylor.lines[0].y, np.square(second.lines[2].y), rtol=1e-6)
    adam = next(run for run in about if "adam" in run)
    own = table[(table["run"] == adam) & (table["quantity"] == "radial") & (table["group"] == ALL)]
    largest = own[own["statistic"] == "max"].sort_values("step")
    assert first.lines[1].y == largest["value"].tolist()
    np.testing.assert_allclose(first.lines[1].x, largest["step"] / STEPS)
    heads, lines = TRACK_FIGURES["hypotheses"](table, about)[1]
    summary = dict(zip(heads, lines[1], strict=False))
    assert (summary["method"], summary["filters that shrank away"]) == ("Adam", "0.0%")
    assert lines[1][1] == f"{largest['value'].max():.2g}"


def test_filters_that_shrank_away_have_their_own_line(tmp_path):
    tracks = tracked(tmp_path, epochs=40, shrunk=True)
    first = TRACK_FIGURES["hypotheses"](tracks.table(), tracks.about())[0].charts[0]
    dashed = [line for line in first.lines if line.dashed]
    assert [line.name for line in dashed] == ["Adam, with filters that shrank away"]
    assert max(dashed[0].y) == 3
    assert max(max(line.y) for line in first.lines if not line.dashed) < 1
    assert TRACK_FIGURES["hypotheses"](tracks.table(), tracks.about())[1][1][1][-1] == "8.3%"


def test_phenomena_by_layer_and_method(tmp_path):
    tracks = tracked(tmp_path, epochs=40)
    table, about = tracks.table(), tracks.about()
    figure = TRACK_FIGURES["phenomena"](table, about)[0]
    assert len(figure.charts) == len(PHENOMENA)
    for chart in figure.charts:
        assert [line.name for line in chart.lines] == ["", "", "", "SGD-M, all layers", "Adam, all layers"]
    assert (len(figure.ramp), figure.ramp_name) == (3, "Adam, first layer to last layer")
    assert figure.ramp_name in texts(drawn(figure, tmp_path))
    lines = TRACK_FIGURES["phenomena"](table, about)[1][1]
    assert [line[0] for line in lines] == ["SGD-M"] * 4 + ["Adam"] * 4
    adam = next(run for run in about if "adam" in run)
    own = table[(table["run"] == adam) & (table["quantity"] == "deformation") & (table["statistic"] == "median")]
    living = own[(own["group"] == LIVING) & (own["step"] <= STEPS)]
    assert lines[4][2] == f"{living['value'].median():.2g}"
    later = own[~own["group"].isin([ALL, LIVING]) & (own["step"] >= STEPS)]
    assert lines[4][-1].startswith(f"{later['value'].max():.2g} in {later.loc[later['value'].idxmax(), 'group']}")
    none = tracked(tmp_path, measured=(), name="none", epochs=2)
    assert TRACK_FIGURES["phenomena"](none.table(), none.about())[0].empty


def test_summaries_ignore_records_of_other_kinds(tmp_path):
    """Both kinds of records under the name of one study."""
    tracked(tmp_path, epochs=4, name="both")
    both = compared(tmp_path, points=4, name="both")
    table, about = both.table(), both.about()
    assert [line[0] for line in TRACK_FIGURES["hypotheses"](table, about)[1][1]] == ["SGD-M", "Adam", "SGD"]
    assert len(TRACK_FIGURES["phenomena"](table, about)[1][1]) == 8
    assert len(TRACK_FIGURES["trajectories"](table, about)[1][1]) == 6


def test_summaries_of_diverged_runs(tmp_path):
    tracks = tracked(tmp_path, epochs=40)
    table, about = tracks.table(), tracks.about()
    adam = next(run for run in about if "adam" in run)
    early = table[(table["run"] != adam) | (table["step"] < 3)]  # then nothing is a number any more
    assert [line[-1] for line in TRACK_FIGURES["phenomena"](early, about)[1][1][4:]] == [""] * 4
    gone = early[(early["run"] != adam) | ~early["group"].isin([LIVING]) & (early["quantity"] != "living")]
    line = TRACK_FIGURES["hypotheses"](gone, about)[1][1][1]
    assert line == ["Adam", *[""] * 10]
    others = compared(tmp_path)
    table = others.table()
    lost = table[~table["group"].str.startswith("AdaGrad:") | (table["step"] < 100)]
    lines = TRACK_FIGURES["trajectories"](lost, others.about())[1][1]
    assert [line[3] == "diverged" for line in lines] == [False, True] * 3


def test_trajectories_by_norm(tmp_path):
    tracks = compared(tmp_path)
    charts = TRACK_FIGURES["trajectories"](tracks.table(), tracks.about())[0].charts
    assert [chart.title for chart in charts] == ["ResNet20 BN", "ResNet20 BN without affine", "ResNet20 WN"]
    for chart in charts:
        assert [line.thin for line in chart.lines] == [True] * 6 + [False] * 2
        stays, leaves = chart.lines[-1], chart.lines[-2]
        assert stays.name.startswith("AdaGradG")
        assert stays.y[-1] > 0.999 > leaves.y[-1]
    lines = TRACK_FIGURES["trajectories"](tracks.table(), tracks.about())[1][1]
    assert [line[:3] for line in lines[:2]] == [["ResNet20 BN", "AdaGradG", "3710"], ["ResNet20 BN", "AdaGrad", "3710"]]
    for line in lines:
        assert math.isclose(float(line[3]), math.cos(float(line[-1])), abs_tol=0.06)


def test_the_angle_of_every_layer_and_its_spread(tmp_path):
    tracks = turned(tmp_path)
    figure, (_, lines) = TRACK_FIGURES["layers"](tracks.table(), tracks.about())
    assert lines[0] == ["SGD-M", "first third", "0.001 (conv1)", "0.002", "0.003 (layer2)"]
    assert lines[2] == ["SGD-M", "last third", "0.0001 (conv1)", "0.0002", "0.0003 (layer2)"]
    assert lines[3] == ["Adam", "first third", "0.003 (conv1)", "0.006", "0.009 (layer2)"]
    [chart] = figure.charts
    assert [line.thin for line in chart.lines] == [True, True, True, False] * 2
    assert chart.lines[3].y[0] == pytest.approx(2e-3)
    assert "SGD-M, median layer" in texts(drawn(figure, tmp_path))


def test_points_of_the_tuning_are_at_their_angles(tmp_path):
    results = tuned(tmp_path)
    [chart] = FIGURES["tuning"](results).charts
    assert {line.name: list(line.y) for line in chart.lines} == {"SGD-M": [90, 95], "Angular, muon": [90, 95]}
    for line in chart.lines:  # of SGD with rate 0.1 and momentum 0.9 at the smallest and the largest λ
        assert line.x == pytest.approx([1e3 * math.sqrt(2 * 0.1 * decay / 1.9) for decay in (1e-4, 32e-4)], rel=3e-3)
    assert FIGURES["tuning"]([replace(results[0], config=replace(results[0].config, lr=0.3))]).empty


def test_methods_that_are_shown_together_have_different_colours():
    for together in ([*TUNED], list(paper.ACCURACY["bn"]), [*paper.ACCURACY["bn"], "SGD"]):
        assert len({method_colour(method) for method in together}) == len(together)

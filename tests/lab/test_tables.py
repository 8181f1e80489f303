"""Stores, tables and figures: against scipy's test, by hand, and over rewriting, merging and damage."""

import math
import threading
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from steradian.lab import paper
from steradian.lab.charts import Chart, Line, svg
from steradian.lab.config import Config
from steradian.lab.figures import FIGURES, hypotheses_figure, trajectories_figure, write_figure
from steradian.lab.grids import grid_rows, is_grid, search
from steradian.lab.results import Result, Store
from steradian.lab.tables import Cell, accuracy_table, student_p, welch_p
from steradian.lab.training import CURVES
from steradian.watch.records import Records

CONFIG = Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3, epochs=4)


def result(method="Adam", seed=0, reached=90.0, diverged=False, **changes):
    config = replace(CONFIG, method=method, seed=seed, **changes)
    curves = {name: [1.0, 0.5, 0.25, 0.2] for name in CURVES}
    curves["validation_accuracy"] = [10.0, 80.0, 70.0, 80.0]
    curves["test_accuracy"] = [11.0, reached, 60.0, 61.0]
    if diverged:
        curves = {name: [1.0, math.nan] for name in CURVES}
    return Result(config, curves, diverged, 3, 1.5, {"device": "x"})


def test_the_test_set_counts_at_the_first_best_validation_epoch():
    assert (result().best_epoch, result(reached=91.0).accuracy, result().final_accuracy) == (1, 91.0, 61.0)
    assert math.isnan(result(diverged=True).accuracy)


def test_a_store_keeps_replaces_and_merges(tmp_path):
    store = Store(tmp_path / "deep" / "study.json")
    store.add([result(seed=1), result(seed=0), result("SGD-M", diverged=True)])
    store.add([result(seed=1, reached=95.0)])
    found = {r.config.key: r for r in store.results()}
    assert len(found) == 3
    assert found[result(seed=1).config.key].accuracy == 95.0
    assert found[result("SGD-M").config.key].diverged
    assert math.isnan(found[result("SGD-M").config.key].curves["train_loss"][-1])
    other = Store(tmp_path / "other.json")
    other.add(store.results())
    assert other.path.read_bytes() == store.path.read_bytes()
    other.path.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of results"):
        other.results()


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    def write(seed):
        for k in range(5):
            Store(tmp_path / "study.json").add([result(seed=10 * seed + k)])

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Store(tmp_path / "study.json").results()) == 20


def test_p_values_are_scipys():
    random = np.random.default_rng(0)
    for _ in range(50):
        t, freedom = random.normal(scale=4), random.uniform(1, 40)
        assert math.isclose(student_p(t, freedom), 2 * stats.t.sf(abs(t), freedom), rel_tol=1e-10)
        a, b = random.normal(size=random.integers(2, 7)), random.normal(0.5, 3, size=random.integers(2, 7))
        expected = stats.ttest_ind(a, b, equal_var=False).pvalue
        assert math.isclose(welch_p(Cell.of(a), Cell.of(b)), expected, rel_tol=1e-9)
    assert welch_p(Cell.of([1.0]), Cell.of([1.0, 2.0])) is None
    assert welch_p(Cell.of([1.0, 1.0]), Cell.of([1.0, 1.0])) == 1.0


def test_a_table_shows_ours_beside_the_papers_and_says_what_is_noise():
    ours = {"Adam w/o (ab)": (91.9, 92.1, 92.0), "Adam w/o (abc)": (91.8, 92.2, 91.9), "Adam": (90.0, 90.1, 90.2)}
    results = [result(m, seed, value) for m, values in ours.items() for seed, value in enumerate(values)]
    results += [result("SGD-M", 0, 92.5), result("SGD-M", 1, diverged=True)]
    table = accuracy_table(results)
    heads, lines = table.rows()
    assert heads == ["method", "ResNet20 cifar10", "paper"]
    cells = {line[0]: line[1:] for line in lines}
    assert cells["Adam w/o (ab)"] == ["92.00 ± 0.10 (3)", "91.92 ± 0.18"]
    assert cells["SGD-M"] == ["92.50 (1, 1 diverged)", "92.39"]
    order, distance, took = table.statements()
    assert took.endswith("11 trainings took 0.00 hours of x")
    p = stats.ttest_ind(ours["Adam w/o (ab)"], ours["Adam w/o (abc)"], equal_var=False).pvalue
    assert f"within the noise of it: Adam w/o (abc) (p = {p:.2g})" in order
    assert "Adam (p" not in order
    assert "Adam -0.88" in distance
    assert "SGD-M +0.11" in distance
    assert "| Adam | 90.10 ± 0.10 (3) | 90.98 ± 0.06 |" in table.markdown()


def test_a_table_does_not_mix_settings_norms_or_fine_tuning():
    with pytest.raises(ValueError, match="several settings"):
        accuracy_table([result(), result(weight_decay=1e-3)])
    results = [result(), result(norm="bn-no-affine", reached=80.0), result(start="something", reached=1.0)]
    assert accuracy_table(results).cells[paper.COLUMNS[0]]["Adam"].mean == 90.0
    assert accuracy_table(results, norm="bn-no-affine").cells[paper.COLUMNS[0]]["Adam"].mean == 80.0


def test_a_grid_is_searched_by_validation_accuracy_alone():
    def tried(decay, validation, test, seed=0, diverged=False):
        made = result("Adam w/o (a)", seed, diverged=diverged, weight_decay=decay)
        if diverged:
            return made
        curves = made.curves | {"validation_accuracy": [1.0, validation], "test_accuracy": [2.0, test]}
        return replace(made, curves=curves)

    results = [tried(1e-3, 70.0, 99.0), tried(1e-4, 80.0, 60.0), tried(1e-4, 82.0, 64.0, seed=1)]
    results += [tried(1e-2, 0.0, 0.0, diverged=True), result("SGD-M", reached=92.0)]
    first, second = search(results)
    assert (first.config.method, second.config.method) == ("SGD-M", "Adam w/o (a)")
    assert (second.config.weight_decay, second.validation, second.accuracy) == (1e-4, 81.0, 62.0)
    assert (second.seeds, second.points, second.diverged) == (2, 3, 1)
    assert is_grid(results)
    assert not is_grid(results[1:3])
    line = grid_rows(results)[1][1]
    assert line[2:4] == ["0.001, 0.0001, 0.99", "0.001, 3.125e-05, 0.99"]
    assert line[-1] == "3 (1 diverged)"


def test_one_seed_says_nothing():
    table = accuracy_table([result("Adam"), result("AdamW†", reached=91.0)])
    assert "by one seed, which says nothing" in table.statements()[0]


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_show_every_method_with_its_seeds(tmp_path, kind):
    results = [result(m, s) for m in ("Adam", "AdamG†") for s in (0, 1)] + [result("SGD-M", diverged=True)]
    assert len(FIGURES[kind](results)) == 1  # four epochs need no zoom
    long = [replace(r, curves={name: 5 * values for name, values in r.curves.items()}) for r in results]
    charts = FIGURES[kind](long)
    assert [line.name for line in charts[0].lines] == ["Adam (2)", "AdamG† (2)"]
    assert [chart.x_range is not None for chart in charts] == [False, True]
    write_figure(charts, tmp_path / "f.svg")
    write_figure(charts, tmp_path / "f.html")
    texts = [element.text for element in ET.parse(tmp_path / "f.svg").iter() if element.tag.endswith("text")]
    assert "AdamG† (2)" in texts
    assert '"AdamG\\u2020 (2)"' in (tmp_path / "f.html").read_text()
    with pytest.raises(ValueError, match=r"must end in \.svg or \.html"):
        write_figure(charts, tmp_path / "f.png")
    with pytest.raises(ValueError, match="nothing to show"):
        write_figure([], tmp_path / "f.svg")


def test_a_chart_puts_points_where_they_belong():
    """A rising line: its path goes from the lower left to the upper right of the axes."""
    drawn = ET.fromstring(svg([Chart("t", "x", "y", [Line("a", [0.0, 1.0, 2.0], [1.0, 10.0, 100.0])], True)]))
    [path] = [e.get("d") for e in drawn.iter() if e.tag.endswith("path") and e.get("fill") == "none"]
    points = [tuple(map(float, pair.split())) for pair in path[1:].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.2)
    assert math.isclose(y0 - y1, y1 - y2, abs_tol=0.2)
    assert y0 > y2


def test_figures_of_tracks():
    records = Records("run")
    for step in (0, 10):
        for name in ("a", "b"):
            records.add(step, name, {"radial": [0.1, -0.2], "velocity": [0.3], "taylor": [0.09]})
        records.add(step, "AdaGradG: a[3]", {"cosine": [0.99]})
        records.add(step, "AdaGradG: a", {"cosine": [0.5, 0.6]})
    first, *_ = hypotheses_figure(records.table())
    assert first.lines[0].y == [0.2, 0.2]
    [chart] = trajectories_figure(records.table())
    assert [(line.name, line.y) for line in chart.lines] == [("AdaGradG", [0.99, 0.99])]

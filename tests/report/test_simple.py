"""The first page of the demo: self-contained, complete or absent."""

import json
import re

import pandas as pd
import pytest

from steradian.report.figures import over_steps
from steradian.report.simple import Run, write_page
from steradian.watch.records import Records


def run(name="Adam", groups=("a.weight", "b.weight")):
    records = Records(name)
    for step in range(5):
        for scale, group in enumerate(groups, start=1):
            records.add(step, group, {"angle": [0.1 * scale, 0.2 * scale], "radius": [1.0, 2.0]})
    return Run(name, records.table(), {"Test accuracy": "98 % < 100 %"})


def figures_of(path):
    text = path.read_text()
    return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL).group(1)), text


def test_the_page_holds_what_was_recorded_and_nothing_from_outside(tmp_path):
    path = tmp_path / "deep" / "index.html"
    write_page(path, [run("SGD"), run("Adam")], title="A <b>title</b>")
    figures, text = figures_of(path)
    assert set(figures) == {"angle", "radius"}
    names = {trace["name"] for trace in figures["angle"]["data"] if "name" in trace}
    assert names == {"a.weight", "b.weight"}
    assert "A &lt;b&gt;title&lt;/b&gt;" in text
    assert "98 % &lt; 100 %" in text
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?:', text)
    assert [p.name for p in path.parent.iterdir()] == ["index.html"]


def test_group_names_cannot_end_the_script(tmp_path):
    write_page(tmp_path / "p.html", [run(groups=("</script><b>",))], title="t")
    figures, _ = figures_of(tmp_path / "p.html")
    assert figures["angle"]["data"][2]["name"] == "</script><b>"


def test_a_quantity_is_drawn_for_the_runs_that_have_it(tmp_path):
    other = Records("SGD")
    other.add(0, "a.weight", {"angle": [0.1]})
    write_page(tmp_path / "p.html", [run("Adam"), Run("SGD", other.table())], title="t")
    figures, _ = figures_of(tmp_path / "p.html")
    titles = {q: [note["text"] for note in figures[q]["layout"]["annotations"]] for q in figures}
    assert titles == {"angle": ["Adam", "SGD"], "radius": ["Adam"]}


def test_a_failed_page_leaves_the_old_one(tmp_path):
    path = tmp_path / "p.html"
    path.write_text("old")
    broken = Run("x", pd.DataFrame({"run": ["x"], "quantity": ["angle"], "group": ["g"]}))
    with pytest.raises(KeyError):
        write_page(path, [broken], title="t")
    assert path.read_text() == "old"
    with pytest.raises(ValueError, match="at least one run"):
        write_page(path, [], title="t")


def test_a_missing_run_is_named():
    with pytest.raises(ValueError, match="no 'angle' is recorded for SGD"):
        over_steps(run("Adam").table, "angle", runs=["Adam", "SGD"])


def test_lines_are_medians_in_a_band():
    figure = over_steps(run().table, "angle", runs=["Adam"])
    low, high, median = figure.data[:3]
    assert median.y[0] == pytest.approx(0.15)
    assert low.y[0] < median.y[0] < high.y[0]

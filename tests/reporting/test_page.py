"""The page's file: what is in it, what it says of what is missing, and what it refuses."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import simulate
import stress
from simulate import unpack

from steradian.reporting.data import load, page_data
from steradian.reporting.lines import BUDGET
from steradian.reporting.page import report
from steradian.reporting.sections import SECTIONS
from steradian.watching.records import read_run
from steradian.watching.sinks import RunFiles

LAYERS = {"conv1.weight": (6, 9), "conv2.weight": (8, 18)}


def write(folder, kind="Adam", **options):
    return simulate.write(folder, kind, **{"layers": LAYERS, "steps": 40, "every_rows": 10, **options})


def data_of(page):
    text = page.read_text(encoding="utf-8")
    parts = {name: re.search(rf'id="{name}">(.*?)</script>', text, re.DOTALL)[1] for name in ("data", "numbers")}
    return {**json.loads(gzip.decompress(base64.b64decode(parts["data"]))), "pack": unpack(parts["numbers"])}, text


def test_the_numbers_are_those_that_were_recorded(tmp_path):
    page = report([write(tmp_path / "run")], tmp_path / "deep" / "page.html")
    data, _ = data_of(page)
    table = read_run(tmp_path / "run").table
    (run,) = data["runs"]
    assert run["steps"] == list(range(40))
    for (quantity, group, statistic), part in table.groupby(["quantity", "group", "statistic"], observed=True):
        at = run["series"][quantity][group][data["statistics"].index(statistic)]
        line = np.full(40, at[0]) if isinstance(at, list) else data["pack"][at : at + 40]
        np.testing.assert_allclose(line, part.sort_values("step")["value"], rtol=2e-5, atol=1e-37)


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path):
    page = report([write(tmp_path / "run")], tmp_path / "out" / "page.html", title="A <b>title</b>")
    _, text = data_of(page)
    assert "A &lt;b&gt;title&lt;/b&gt;" in text
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?:', text)
    assert [file.name for file in page.parent.iterdir()] == ["page.html"]
    for section in SECTIONS:  # there is no second run to compare with, and no pair
        there = section.id not in ("trajectories", "pairs")
        assert (f'id="{section.id}"' in text) == (f'href="#{section.id}"' in text) == there


def test_the_papers_figures_are_named(tmp_path):
    runs = [write(tmp_path / name, name=name) for name in ("one", "two")]
    _, text = data_of(report(runs, tmp_path / "page.html"))
    index = text[text.index('id="paper"') :]
    for name in ("Figure 1", "Figure 2", "Figure 3", "Figures 4 and 5", "Tracking of A<sub>k</sub>⟨c", "App. C.1.5"):
        assert name in index
    for target in re.findall(r'href="#([\w-]+)"', text):
        assert f'id="{target}"' in text


def test_what_is_missing_is_left_out_and_said_in_one_line(tmp_path):
    folder = write(tmp_path / "run", only=["radius", "angle", "velocity"], paths=False, every_rows=0)
    _, text = data_of(report([folder], tmp_path / "page.html"))
    shown = set(re.findall(r'<figure class="figure" id="([\w-]+)"', text))
    assert shown == {"whole", "angle", "heat-map", "h2", "any"}
    assert 'id="phenomena"' not in text
    [line] = re.findall(r'<details class="card missing">(.*?)</details>', text)
    assert "Effective rate η<sup>e</sup>" in line
    assert "this optimizer cannot be read, only two points are known" in line
    assert line.count("<summary>") == 1


def test_alerts_groups_and_settings_are_told(tmp_path):
    alert = {"step": 7, "group": "conv1.weight", "kind": "h1", "text": "H1 is violated <here>."}
    _, text = data_of(report([write(tmp_path / "run", alerts=[alert])], tmp_path / "page.html"))
    assert "1 alert<" in text
    assert "H1 is violated &lt;here&gt;." in text
    assert "step 7 · conv1.weight" in text
    assert "<span>weight_decay</span> 0.005 / 0" in text
    assert "noise &lt;on&gt; spheres" in text
    assert "bn2: BatchNorm2d" in text
    assert "8 × 18" in text
    assert "2 other parameters are not watched" in text


def test_a_bound_that_is_broken_is_said_so(tmp_path):
    folder = write(tmp_path / "run")
    step = {"run": ["Adam"], "step": [40], "group": ["conv2.weight"], "quantity": ["radial"], "statistic": ["max"]}
    RunFiles(folder).add("part", {**step, "value": [1.25]})
    _, text = data_of(report([folder], tmp_path / "page.html"))
    assert re.search(r'class="failed"><b>Adam</b>: above the bound; largest 1.25 at step 40 in conv2.weight', text)
    assert text.count("shows absolute values, but only positive ones can pass the bound") == 1  # of H1
    assert text.count('class="held"') == 2  # H2 and the Taylor variable


def test_nothing_is_said_of_steps_that_are_not_a_number(tmp_path):
    folder = simulate.spoil(write(tmp_path / "run"), 30)
    _, text = data_of(report([folder], tmp_path / "page.html"))
    words = r'class="unsure"><b>Adam</b>: not a finite number at 10 steps, below the bound otherwise; largest'
    assert len(re.findall(words, text)) == 3
    assert "below the bound throughout" not in text
    assert "<dt>Effective rate, end</dt><dd>not a finite number</dd>" in text
    assert re.search(r"<dt>Nominal rate, end</dt><dd>[\d.e-]+</dd>", text)


def test_runs_of_one_name_are_told_apart(tmp_path):
    one, two = write(tmp_path / "x" / "run"), write(tmp_path / "y" / "run", seed=5)
    data, _ = data_of(report([one, two], tmp_path / "page.html"))
    assert [run["name"] for run in data["runs"]] == ["Adam (x/run)", "Adam (y/run)"]


def test_a_folder_stands_for_the_runs_in_it(tmp_path):
    write(tmp_path / "runs" / "two", name="two")
    write(tmp_path / "runs" / "deep" / "one", name="one")
    data, text = data_of(report([tmp_path / "runs"], tmp_path / "page.html"))
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    assert "<h1>one, two</h1>" in text


def test_what_was_recorded_is_said_in_steps(tmp_path):
    _, text = data_of(report([write(tmp_path / "run", every=7)], tmp_path / "page.html"))
    assert "<dt>Recorded</dt><dd>6 of 40 steps</dd>" in text
    _, text = data_of(report([write(tmp_path / "all")], tmp_path / "page.html"))
    assert "<dt>Recorded</dt><dd>every step</dd>" in text


def test_every_group_has_its_label_and_its_spec(tmp_path):
    run = write(tmp_path / "run")
    about = json.loads((run / "run.json").read_text())
    about["groups"][1]["label"] = "untested"
    (run / "run.json").write_text(json.dumps(about))
    _, text = data_of(report([run], tmp_path / "page.html"))
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    assert re.sub("<.*?>", "|", rows[0]).split("||")[1:3] == ["Label", "Spec"]
    assert [re.findall("<td>(.*?)</td>", row)[:3] for row in rows[1:]] == [
        ["conv1.weight", "invariant", "filter"],
        ["conv2.weight", "untested", "filter"],
    ]


def test_runs_may_have_different_groups(tmp_path):
    one = write(tmp_path / "one")
    two = write(tmp_path / "two", "SGD", layers={"conv2.weight": (8, 18), "conv3.weight": (4, 9)})
    data, text = data_of(report([one, two], tmp_path / "page.html"))
    assert data["groups"] == ["conv1.weight", "conv2.weight", "conv3.weight"]
    assert [run["groups"] for run in data["runs"]] == [
        ["conv1.weight", "conv2.weight"],
        ["conv2.weight", "conv3.weight"],
    ]
    assert "<h4>Adam</h4>" in text


def test_bad_input_is_refused_in_words(tmp_path):
    run = write(tmp_path / "run")
    empty = tmp_path / "empty"
    RunFiles(empty).describe({"run": "empty"})
    page = tmp_path / "page.html"
    page.write_text("old")
    cases = [
        ([], "at least one run"),
        ([tmp_path / "nothing"], "not a recorded run"),
        ([run, empty], "has no record yet"),
        ([run, run], "given twice"),
    ]
    for paths, words in cases:
        with pytest.raises(ValueError, match=words):
            report(paths, page)
    with pytest.raises(ValueError, match="is a folder"):
        report([run], tmp_path)
    for path in (run, str(run)):
        with pytest.raises(TypeError, match="runs must be a list of runs"):
            report(path, page)
    assert page.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "page.html", "run"]


def test_a_run_that_has_just_begun_does_not_keep_the_others_of_its_folder_from_the_page(tmp_path):
    write(tmp_path / "runs" / "a")
    RunFiles(tmp_path / "runs" / "b").describe({"run": "begun"})
    page = report([tmp_path / "runs"], tmp_path / "page.html")
    assert "begun" not in page.read_text(encoding="utf-8")


def test_a_link_to_a_page_stays_one_and_no_device_is_replaced(tmp_path):
    run, page, link, pipe = write(tmp_path / "run"), tmp_path / "page.html", tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to(page)
    assert report([run], link) == link
    assert link.is_symlink()
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="is not a file"):
        report([run], pipe)
    assert pipe.is_fifo()


def test_the_page_may_be_named_by_a_string(tmp_path):
    page = report([str(write(tmp_path / "run"))], str(tmp_path / "page.html"))
    assert page == tmp_path / "page.html"
    assert page.is_file()


def test_a_large_run_is_a_small_page(tmp_path):
    folder = stress.write(tmp_path / "run", groups=300, steps=500, every=10, rows=4, parts=2)
    page = report([folder], tmp_path / "page.html")
    assert page.stat().st_size < 5e6
    data, _ = data_of(page)
    assert 40 <= len(data["runs"][0]["steps"]) <= 44


def test_several_large_runs_are_no_larger_page(tmp_path):
    folders = [stress.write(tmp_path / name, steps=200, rows=10, parts=1, name=name) for name in "abc"]
    assert report(folders, tmp_path / "page.html").stat().st_size < 5e6


def test_more_lines_have_fewer_points(tmp_path, monkeypatch):
    folder = write(tmp_path / "run", steps=300, every_rows=0, paths=False)
    fine = len(unpack(page_data(load([folder]))[1]))
    monkeypatch.setattr("steradian.reporting.lines.BUDGET", BUDGET // 100)
    coarse, numbers = page_data(load([folder]))
    assert len(unpack(numbers)) < BUDGET / 100 * 1.1 < fine
    assert len(json.loads(coarse)["runs"][0]["steps"]) >= 32


def test_a_page_needs_no_torch():
    code = "import sys, steradian.reporting.page; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"

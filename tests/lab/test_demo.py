"""The demo, shortened: it trains, maps every step, and its page has every figure it promises."""

import re
import subprocess
import sys

import pytest

from steradian.lab import demo
from steradian.lab.data import digits
from steradian.report.figures import QUANTITIES


def test_the_demo_maps_every_step(tmp_path):
    results = demo.run(tmp_path, epochs=2)
    assert [r.name for r in results] == list(demo.METHODS)
    steps = 2 * (len(digits()[0].labels) // demo.BATCH)
    for result in results:
        table = result.records.table()
        assert set(table["step"]) == set(range(steps))
        assert set(table["quantity"]) == set(QUANTITIES)
        assert table["group"].nunique() == 3
        assert result.worst_error < 1e-5
    page = (tmp_path / "index.html").read_text()
    assert set(re.findall(r'data-figure="(\w+)"', page)) == set(QUANTITIES)


def test_the_split_is_a_partition():
    train, test = digits(seed=1)
    assert len(train.labels) + len(test.labels) == 1797
    assert train.images.mean().abs() < 0.05
    assert set(train.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_the_command_line_explains_itself(arguments):
    done = subprocess.run([sys.executable, "-m", "steradian", *arguments], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


def test_an_error_is_one_line_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "steradian", "demo", "--epochs", "1", "--out", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("steradian: ")

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
        assert table["group"].nunique() == 3
        predicted = result.name in ("SGD", "Adam")
        assert set(table["quantity"]) == set(QUANTITIES) - (set() if predicted else {"identity_error"})
        assert result.worst_error is None or result.worst_error < 1e-5
        assert (result.worst_error is not None) == predicted
    page = (tmp_path / "index.html").read_text()
    assert set(re.findall(r'data-figure="(\w+)"', page)) == set(QUANTITIES)


def test_the_split_is_a_partition():
    train, test = digits(seed=1)
    assert len(train.labels) + len(test.labels) == 1797
    assert train.images.mean().abs() < 0.05
    assert set(train.labels.tolist()) == set(range(10))


def call(*arguments):
    return subprocess.run([sys.executable, "-m", "steradian", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["inspect", "--help"]])
def test_the_command_line_explains_itself(arguments):
    done = call(*arguments)
    assert done.returncode == 0
    assert (arguments[0] if len(arguments) > 1 else "demo") in done.stdout


def test_inspect_prints_the_rows():
    done = call("inspect", "steradian.lab.models:small_cnn", "--input", "8x1x8x8")
    assert done.returncode == 0
    assert re.search(r"block2\.conv\.weight +filter +32 × 144 +block2\.bn", done.stdout)
    done = call("inspect", "steradian.lab.models:small_cnn", "--input", "8x1x8x8", "--explain", "head.weight")
    assert "head.weight" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--input", "2x3"], "package.module:factory"),
        (["no_such_module:x", "--input", "2x3"], "no_such_module"),
        (["steradian.lab.models:nothing", "--input", "2x3"], "has no 'nothing'"),
        (["steradian.lab.models:small_cnn", "--input", "2by3"], "8x3x32x32"),
        (["steradian.lab.models:small_cnn", "--input", "2x3"], "model raised"),
    ],
)
def test_inspect_says_what_is_wrong_in_one_line(arguments, words):
    done = call("inspect", *arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_one_line_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    done = call("demo", "--epochs", "1", "--out", str(tmp_path / "file"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("steradian: ")

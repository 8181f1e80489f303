"""The demo, shortened: it trains, maps every step, and its page has every figure it promises."""

import re

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

"""The demo, shortened: it trains, every step is recorded, and the page holds all three runs."""

import pytest

from steradian.lab import demo
from steradian.lab.data import digits
from steradian.watching.records import read_run


def test_the_demo_records_every_step(tmp_path):
    results = demo.run(tmp_path, epochs=2)
    assert [result.name for result in results] == list(demo.METHODS)
    steps = 2 * (len(digits()[0].labels) // demo.BATCH)
    for result in results:
        assert result.watch.error is None
        recorded = read_run(tmp_path / "runs" / result.name)
        assert set(recorded.table["step"]) == set(range(steps))
        layers = recorded.table[recorded.table["quantity"] != "imbalance"]  # which is of pairs of layers
        assert set(layers["group"]) == {*result.watch.names, ""}
        assert {"effective_lr", "angle", "radius", "radial", "nu", "loss"} <= set(recorded.table["quantity"])
    page = (tmp_path / "index.html").read_text()
    assert all(name in page for name in demo.METHODS)


def test_the_demo_replaces_only_its_own_runs(tmp_path, monkeypatch):
    """A training of the user's may be called Adam, too."""
    demo.run(tmp_path, epochs=1)
    monkeypatch.setattr(demo, "METHODS", {"Adam": demo.METHODS["Adam"]})
    demo.run(tmp_path, epochs=1)
    about = tmp_path / "runs" / "Adam" / "run.json"
    about.write_text(about.read_text().replace("small_cnn", "mine"))
    with pytest.raises(ValueError, match="Adam is not a run of the demo"):
        demo.run(tmp_path, epochs=1)
    about.unlink()
    with pytest.raises(ValueError, match="Adam is not a run of the demo"):
        demo.run(tmp_path, epochs=1)
    assert list(about.parent.iterdir())


def test_the_split_is_a_partition():
    train, test = digits(seed=1)
    assert len(train.labels) + len(test.labels) == 1797
    assert train.images.mean().abs() < 0.05
    assert set(train.labels.tolist()) == set(range(10))

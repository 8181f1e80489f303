"""A run that version 0.1 recorded is read, continued and shown on a page."""

import shutil
from pathlib import Path

import pytest

from steradian import report, watch
from steradian.watching.records import ALERT_COLUMNS, COLUMNS, PATH_COLUMNS, ROW_COLUMNS, read_run

from small import pair, series, set_gradients, train

OLD = Path(__file__).parent / "data" / "run-0.1"


def test_it_is_read():
    run = read_run(OLD)
    assert run.name == "sgd"
    assert run.about["config"] == {"seed": 0}
    tables = {"table": COLUMNS, "rows": ROW_COLUMNS, "paths": PATH_COLUMNS, "alerts": ALERT_COLUMNS}
    for name, columns in tables.items():
        assert tuple(getattr(run, name).columns) == columns
    assert series(run.table, "loss", "", "mean") == {0: 1.0, 1: 0.5, 2: pytest.approx(1 / 3), 3: 0.25}
    assert sorted(set(run.rows["step"])) == [0, 2]
    assert run.alerts["kind"].tolist() == ["H2", "H2"]


def test_its_numbers_are_those_that_are_recorded_now(tmp_path):
    optimizer, params = pair("SGD")
    with watch(optimizer, to=tmp_path, rows_every=2) as watcher:
        for step in range(4):
            set_gradients(params, step, scale=1e4 if step == 3 else 1.0)
            optimizer.step()
            if step == 1:
                watcher.flush()
    old, new = read_run(OLD), read_run(tmp_path)
    recorded = old.table[old.table["group"] != ""]
    keys = ["step", "group", "quantity", "statistic"]
    assert recorded[keys].astype(str).to_numpy().tolist() == watcher.records()[keys].astype(str).to_numpy().tolist()
    assert recorded["value"].tolist() == pytest.approx(watcher.records()["value"].tolist(), rel=1e-9, nan_ok=True)
    assert old.rows["value"].tolist() == pytest.approx(new.rows["value"].tolist(), rel=1e-9, nan_ok=True)
    for one, other in zip(old.paths["direction"], new.paths["direction"], strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-5)


def test_it_is_continued_and_has_a_page(tmp_path):
    shutil.copytree(OLD, tmp_path / "run")
    optimizer, params = pair("SGD")
    with watch(optimizer, to=tmp_path / "run", step=3):
        train(optimizer, params, 2, first=3)
    run = read_run(tmp_path / "run")
    assert list(series(run.table, "angle")) == [0, 1, 2, 3, 4]
    assert run.alerts.empty, "step 3, which raised them, was taken again"
    assert "v" in report([tmp_path / "run"], tmp_path / "page.html").read_text()

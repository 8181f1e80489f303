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


def values(table, quantities):
    """{(step, group, quantity, statistic or row): value} of some quantities."""
    chosen = table[table["quantity"].isin(quantities)]
    keys = chosen.drop(columns=["run", "value"]).astype(str).itertuples(index=False, name=None)
    found = dict(zip(keys, chosen["value"], strict=True))
    assert len(found) == len(chosen)
    return found


def test_its_numbers_are_those_that_are_recorded_now(tmp_path):
    optimizer, params = pair("SGD")
    with watch(optimizer, to=tmp_path, every=1, rows_every=2, phenomena=True) as watcher:
        for step in range(4):
            set_gradients(params, step, scale=1e4 if step == 3 else 1.0)
            optimizer.step()
            if step == 1:
                watcher.flush()
    old, new = read_run(OLD), read_run(tmp_path)
    quantities = set(old.rows["quantity"])
    assert set(new.rows["quantity"]) == quantities | {"update", "radial_share"}
    assert set(new.table["quantity"]) == set(new.rows["quantity"]) | {"seconds"}
    recorded = old.table[old.table["group"] != ""]
    for there, here in ((recorded, new.table), (recorded, watcher.records()), (old.rows, new.rows)):
        assert values(here, quantities) == pytest.approx(values(there, quantities), rel=1e-9, nan_ok=True)
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

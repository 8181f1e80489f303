"""The one table, and the folder that holds it, whole or not."""

import statistics
import time
from collections import OrderedDict

import pandas as pd
import pandas.testing as pd_testing
import pytest
import torch

from steradian import watch
from steradian.watching.records import COLUMNS, STATISTICS, read_run

from small import pair, series, train


@pytest.fixture
def run(tmp_path):
    """A run of two parts on disk."""
    optimizer, params = pair("Adam")
    with watch(optimizer, to=tmp_path / "runs" / "adam", step=3) as watcher:
        train(optimizer, params, 2)
        watcher.flush()
        train(optimizer, params, 2)
    return tmp_path / "runs" / "adam"


def test_the_table_has_one_line_per_statistic(run):
    table = read_run(run).table
    assert tuple(table.columns) == COLUMNS
    at = table[(table["step"] == 4) & (table["group"] == "w") & (table["quantity"] == "angle")]
    assert at["statistic"].tolist() == list(STATISTICS)
    assert table[(table["quantity"] == "lr") & (table["group"] == "w")]["statistic"].tolist() == ["mean"] * 4


def test_every_observed_step_has_its_time_and_a_resumed_run_goes_on_from_the_last_one(tmp_path):
    folder, began = tmp_path / "run", time.monotonic()
    optimizer, params = pair("Adam")
    with watch(optimizer, to=folder, every=2) as watcher:
        train(optimizer, params, 5)
        time.sleep(0.3)
        watcher.log(seconds=7.0)
        train(optimizer, params, 4)
    first, ended = series(watcher.records(), "seconds", "", "mean"), time.monotonic()
    assert list(first) == [0, 2, 4, 6, 8]
    assert list(first.values()) == sorted(set(first.values()))
    assert 0.3 <= first[6] - first[4] <= first[8] < ended - began
    assert series(watcher.records(), "seconds (logged)", "", "mean") == {4: 7.0}
    time.sleep(0.3)
    began = time.monotonic()
    with watch(optimizer, to=folder, every=2, step=6) as again:
        train(optimizer, params, 4)
    second = series(again.records(), "seconds", "", "mean")
    assert {step: second[step] for step in (0, 2, 4)} == {step: first[step] for step in (0, 2, 4)}
    assert list(second) == [0, 2, 4, 6, 8]
    assert first[4] < second[6] < second[8] < first[4] + time.monotonic() - began


def test_a_watch_that_is_started_again_does_not_count_the_time_between():
    optimizer, params = pair("Adam")
    watcher, watched = watch(optimizer), 0.0
    for _ in range(2):
        began = time.monotonic()
        with watcher:
            train(optimizer, params, 2)
        watched += time.monotonic() - began
        time.sleep(0.3)
    seconds = list(series(watcher.records(), "seconds", "", "mean").values())
    assert seconds == sorted(set(seconds))
    assert seconds[-1] < watched


@pytest.mark.parametrize("text", ["", '{"run":', "\xff", "[]", "{}", '{"run": 3}'])
def test_a_run_json_that_is_none_is_named(run, text):
    (run / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"adam/run\.json (is not JSON|does not describe a recorded run)"):
        read_run(run)


def test_a_broken_or_foreign_part_is_named_and_the_others_can_be_read_without_it(run):
    whole = len(read_run(run).table)
    for kind in ("part", "rows", "path"):
        data = (run / f"{kind}-00000.parquet").read_bytes()
        for spoiled in (b"", data[:50], data[:-4]):
            (run / f"{kind}-00000.parquet").write_bytes(spoiled)
            with pytest.raises(ValueError, match=rf"{kind}-00000\.parquet is not a part of a run; remove it"):
                read_run(run)
        (run / f"{kind}-00000.parquet").write_bytes(data)
    pd.DataFrame({"loss": [1.0]}).to_parquet(run / "part-00007.parquet")
    with pytest.raises(ValueError, match=r"part-00007\.parquet is not a part of a run"):
        read_run(run)
    (run / "part-00007.parquet").unlink()
    assert len(read_run(run).table) == whole


def test_a_part_that_may_not_be_read_is_not_to_be_removed(run, monkeypatch):
    from pyarrow import parquet

    def refused(file, **_):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(parquet, "read_table", refused)
    with pytest.raises(PermissionError, match=r"part-0000\d\.parquet"):
        read_run(run)


def test_files_that_are_not_of_the_run_are_left_alone(run):
    whole = read_run(run)
    for name in ("part-old.parquet", "part-00000-copy.parquet", "part-.parquet", "notes.txt"):
        (run / name).write_bytes(b"something else")
    with open(run / "alerts.jsonl", "a") as file:
        file.write('null\n3\n[]\n{"other": 1}\n{"step": 1, "group": "w", "kind": "H1", "text": "said"}\n')
    again = read_run(run)
    pd_testing.assert_frame_equal(again.table, whole.table)
    assert again.alerts["text"].tolist() == [*whole.alerts["text"], "said"]
    optimizer, params = pair("Adam")
    with watch(optimizer, to=run, step=7) as watcher:
        train(optimizer, params, 1)
    assert watcher.error is None
    assert sorted(read_run(run).table["step"].unique()) == [3, 4, 5, 6, 7]


def test_a_folder_of_runs_is_not_one_and_says_which_there_are(run):
    with pytest.raises(ValueError, match=r"there are runs in it: .*adam"):
        read_run(run.parent)


def test_the_summary_of_a_deep_model_folds_its_layers():
    layers = [{"up": torch.nn.Linear(4, 6), "down": torch.nn.Linear(6, 4)} for _ in range(12)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(OrderedDict(layer)) for layer in layers))
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(optimizer, model, every=1) as watcher:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    lines = [line.split() for line in watcher.summary().splitlines()]
    folded = {line[0]: line for line in lines if line and line[0].startswith("{0-11}")}
    assert set(folded) == {f"{{0-11}}.{layer}.{name}" for layer in ("up", "down") for name in ("weight", "bias")}
    angles = [watcher.latest()[f"{k}.up.weight"]["angle"]["median"] for k in range(12)]
    assert float(folded["{0-11}.up.weight"][3]) == pytest.approx(statistics.median(angles), rel=5e-3)

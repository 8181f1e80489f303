"""What a watch is asked for and cannot do is refused in words, before the training."""

import numpy as np
import pytest
import torch

from steradian import find_groups, optim, watch
from steradian.watching.records import read_run

from small import pair, series, train


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"every": 0}, ValueError, "every must be"),
        ({"every": 1.5}, ValueError, "every must be"),
        ({"record_rows": "w"}, TypeError, r"record_rows must be a list such as \['w'\], got 'w'"),
        ({"record_rows": ["x"]}, ValueError, r"record_rows names \['x'\], but the watched groups are \['w', 'v'\]"),
        ({"rows_every": None}, ValueError, "rows_every must be"),
        ({"rows_every": -1}, ValueError, "rows_every must be"),
        ({"paths": ["w"]}, TypeError, r"paths must be \{group"),
        ({"paths": {"w": 3}}, TypeError, r"paths must be \{group"),
        ({"paths": {"w": [4]}}, ValueError, "w has rows 0 to 3, got 4"),
        ({"paths": {"w": [1.5]}}, ValueError, "w has rows 0 to 3, got 1.5"),
        ({"paths": {"x": [0]}}, ValueError, "paths names"),
        ({"run": 3}, TypeError, "run must be a name such as '3', got 3"),
        ({"step": -1}, ValueError, "step must be"),
        ({"step": "three"}, ValueError, "step must be"),
        ({"config": "adam"}, TypeError, "config must be a dict, got 'adam'"),
        ({"evry": 1}, TypeError, "a watch has no option 'evry'; it has to, every, cost,"),
    ],
)
def test_what_makes_no_sense_is_refused(options, kind, words):
    optimizer, _ = pair()
    with pytest.raises(kind, match=words):
        watch(optimizer, **options)


def test_integers_of_numpys_are_integers(tmp_path):
    """A step of a table of records, plus one, is what a run goes on with."""
    optimizer, params = pair("SGD")
    whole = np.int64(2)
    with watch(optimizer, to=tmp_path, step=whole, every=whole, rows_every=whole, paths={"w": [whole]}) as watcher:
        train(optimizer, params, 4)
    assert list(series(watcher.records(), "angle")) == [2, 4]
    assert read_run(tmp_path).about["every"] == 2


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        (("adam",), {}, TypeError, "optimizer must be a torch optimizer or a list of them, got str"),
        (([],), {}, ValueError, "optimizer must be a torch optimizer or a list of them, got an empty list"),
        ((pair()[0], "model"), {}, TypeError, "the second argument must be a model, .* got str"),
        ((pair()[0], [3]), {}, TypeError, "the second argument must be a model, .* got list"),
        ((pair()[0],), {"only": "x*"}, ValueError, r"only: no name matches \['x\*'\]; the parameters are w, v"),
        ((pair()[0],), {"only": []}, TypeError, "only must be a glob pattern"),
        ((pair()[0],), {"only": [3]}, TypeError, "only must be a glob pattern"),
        ((pair()[0],), {"cost": 0}, ValueError, "cost must be a share"),
        ((pair()[0],), {"cost": "2 %"}, ValueError, "cost must be a share"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments, options, kind, words):
    with pytest.raises(kind, match=words):
        watch(*arguments, **options)


def test_a_model_without_invariant_rows_is_watched():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    groups = find_groups(model, torch.randn(8, 3))
    watcher = watch(torch.optim.SGD(model.parameters(), lr=0.1), groups)
    assert watcher.labels() == dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), "not invariant")
    # Rows that a param group declares, as for an optimizer that keeps every matrix on spheres, are not proved by that.
    declared = [{"params": [model[0].weight, model[2].weight], "rows": "filter"}]
    watcher = watch(optim.Angular(declared), groups)
    assert watcher.labels() == dict.fromkeys(("0.weight", "2.weight"), "not invariant")
    assert set(watch(optim.Angular(declared), model).labels().values()) == {"invariant"}


def test_joint_rows_that_two_optimizers_share_are_watched_one_by_one():
    """As where Muon steps the matrices and AdamW the rest: a weight and its bias in front of LN are rows together."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    groups = find_groups(model, torch.randn(10, 6))
    assert groups.joint == [("0.weight", "0.bias")]
    watcher = watch(torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1), groups)
    assert watcher.names == ("0.weight", "2.weight")
    assert watcher.labels()["0.weight"] == "untested"


def test_what_is_logged_must_be_a_number():
    optimizer, params = pair()
    with watch(optimizer) as watcher:
        train(optimizer, params, 1)
        for bad in ("fast", None, [1.0], torch.ones(2)):
            with pytest.warns(UserWarning, match="not recorded: loss: what is logged must be one number"):
                watcher.log(loss=bad)
        watcher.log(loss=np.float32(0.5), right=3, sure=True, rate=torch.tensor([0.25]))
    table = watcher.records()
    found = {name: series(table, name, "", "mean") for name in ("loss", "right", "sure", "rate")}
    assert found == {"loss": {0: 0.5}, "right": {0: 3.0}, "sure": {0: 1.0}, "rate": {0: 0.25}}


def test_numpys_numbers_are_numbers_and_complex_ones_are_none():
    """Whatever numpy makes of one number is logged, as tensors with one number are."""
    optimizer, params = pair()
    with watch(optimizer) as watcher:
        train(optimizer, params, 1)
        for bad in (1j, np.array(1j), torch.tensor(1j), np.ones(2), np.array("1"), np.array(None)):
            with pytest.warns(UserWarning, match="not recorded: loss: what is logged must be one number"):
                watcher.log(loss=bad)
        watcher.log(loss=np.array(0.5), right=np.array([3]), sure=np.bool_(True), rate=torch.tensor(False))
    assert watcher.error is None
    table = watcher.records()
    found = {name: series(table, name, "", "mean") for name in ("loss", "right", "sure", "rate")}
    assert found == {"loss": {0: 0.5}, "right": {0: 3.0}, "sure": {0: 1.0}, "rate": {0: 0.0}}


def test_what_is_logged_too_late_is_said_to_be_lost(caplog):
    optimizer, params = pair()
    watcher = watch(optimizer)
    with watcher:
        train(optimizer, params, 1)
    watcher.log(accuracy=0.9)
    assert "logged after stop() is not recorded" in caplog.text
    with watcher:
        train(optimizer, params, 1)
        watcher.log(accuracy=0.8)
    assert series(watcher.records(), "accuracy", "", "mean") == {1: 0.8}


@pytest.mark.parametrize("kind", ["Adam", "ours"])
def test_steps_that_nobody_watched_are_counted(kind):
    optimizer, params = pair(kind)
    watcher = watch(optimizer, phenomena=False)
    for _ in range(2):
        with watcher:
            train(optimizer, params, 2)
        train(optimizer, params, 3)
    assert list(series(watcher.records(), "angle")) == [0, 1, 5, 6]


def test_a_run_in_the_present_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    assert watch(pair()[0], to=".").run == "first"

"""Tracking changes nothing, interrupted or not, and records what `watch` records of the same training."""

import math
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from steradian import watch
from steradian.lab.experiments import (
    ALL,
    LIVING,
    PHENOMENA,
    RECORDED,
    Tracked,
    compare_trajectories,
    recorded_steps,
    track_study,
    trajectory_study,
)
from steradian.lab.recipes import trajectories
from steradian.lab.results import Store, Tracks
from steradian.lab.study import Study
from steradian.lab.training import Execution, Queue, Training

from lab.studies import CONFIG, comparable, curves, few, fleet, methods

CUDA = torch.cuda.is_available()
POINTS = 6


@pytest.fixture(scope="module")
def data():
    return few()


def finished(training):
    while not training.finished:
        training.run_epoch()
    return training


def by_place(table):
    return table.set_index(["step", "group", "quantity", "statistic"])["value"]


def watched(config, data, **execution):
    """The same training followed by `watch` at every step: an independent account of it."""
    training = Training(config, data, execution=Execution(captured=False, **execution))
    [optimizer] = training.optimizers
    with watch(optimizer, training.groups, every=1, phenomena=True) as seen:
        finished(training)
    assert seen.error is None
    return by_place(seen.records().astype({"quantity": str}))


def test_recorded_steps_are_dense_at_the_start_and_even_after_it():
    steps = recorded_steps(100_000, 300)
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert 250 < len(steps) <= 300
    assert steps[:4] == [0, 1, 2, 3]
    assert max(np.diff(steps)) <= 100_000 / 149 + 1
    assert recorded_steps(3, 300) == [0, 1, 2]
    with pytest.raises(ValueError, match="points must be at least 2"):
        recorded_steps(10, 1)


@pytest.mark.parametrize("method", ["SGD", "SGD-M", "Adam", "AdamW†", "Adam w/o (a)"])
def test_tracking_changes_nothing_and_agrees_with_watch(data, method, tmp_path):
    [config] = methods(method, epochs=2)
    plain, tracks = finished(Training(config, data)), Tracks(tmp_path / "tracks.parquet")
    tracked = finished(Tracked(config, data, points=POINTS, phenomena=True, tracks=tracks))
    assert comparable(tracked.curves) == comparable(plain.curves)
    table = tracked.table()
    np.testing.assert_array_equal(by_place(tracks.table()), by_place(table).astype(np.float32))
    steps = recorded_steps(2 * plain.steps, POINTS)
    assert sorted(set(table["step"])) == steps
    assert list(dict.fromkeys(table["group"])) == [*plain.groups.layouts, LIVING, ALL]
    assert set(table["quantity"]) == {*RECORDED, *PHENOMENA, "living"}
    found, expected = by_place(table), watched(config, data)
    shared = found.index.intersection(expected.index)
    assert len(shared) == len(steps) * 13 * len(RECORDED + PHENOMENA) * 6
    np.testing.assert_allclose(found[shared], expected[shared], rtol=2e-3, atol=1e-5)
    radial = table[(table["quantity"] == "radial") & (table["group"] == ALL)]["value"]
    assert (radial < 1).all()  # H1


def test_preparing_a_capture_leaves_the_sums_of_the_phenomena_alone(data, monkeypatch):
    """The preparation of a capture, without the capture."""
    monkeypatch.setattr(Queue, "capture", lambda self, work: work)
    [config] = methods("Adam", epochs=2)
    made = []
    for captured in (False, True):
        training = Tracked(config, data, points=POINTS, phenomena=True)
        training.execution = replace(training.execution, captured=captured)
        made.append(by_place(finished(training).table()))
    assert made[0].equals(made[1])


def test_interrupted_tracked_trainings_are_the_uninterrupted_ones(data, tmp_path):
    configs = methods("Adam", "SGD-M", epochs=3)
    tables = {}
    for name, seconds in (("whole", math.inf), ("parts", 12)):
        ticks, tracks = count(), Tracks(tmp_path / name / "tracks.parquet")
        made = partial(Tracked, points=POINTS, phenomena=True, tracks=tracks)
        runs = 1
        while True:
            study = fleet(tmp_path / name, data, size=2, make=made, clock=lambda t=ticks: float(next(t)))
            if study.run(configs, seconds=seconds):
                break
            runs += 1
            assert runs < 50
        tables[name] = {run: by_place(table) for run, table in tracks.table().groupby("run", observed=True)}
    assert runs > 1
    assert curves(Store(tmp_path / "whole" / "results.json")) == curves(Store(tmp_path / "parts" / "results.json"))
    for config in configs:
        assert tables["whole"][config.key].equals(tables["parts"][config.key])


def test_filters_that_shrank_away_are_left_out_of_their_layer(data):
    [config] = methods("Adam", epochs=1)
    training = Tracked(config, data, points=2)
    training.run_epoch()
    name = next(iter(training.groups.layouts))
    before = by_place(training.table())
    place = training.quantities.index("radius")
    training._values[-1][place, 0] *= 1e-4
    after = by_place(training.table())
    last = training._recorded[-1]
    assert after[last, ALL, "radius", "min"] < 1e-3 * before[last, ALL, "radius", "min"]
    assert after[last, LIVING, "radius", "min"] >= before[last, ALL, "radius", "min"]
    assert after[last, name, "radius", "min"] >= before[last, name, "radius", "min"]


def test_filters_of_a_training_that_diverges_did_not_shrink_away(data):
    [config] = methods("SGD", epochs=1, norm="wn")
    training = Tracked(replace(config, lr=1e30), data, points=6)
    training.run_epoch()
    assert training.diverged
    table = training.table()
    living = table[(table["quantity"] == "living") & (table["statistic"] == "mean")]
    assert len(living) < 6  # the others are not known
    assert (living["value"] == 1).all()


def test_phenomena_of_transported_momentum_are_refused(data):
    for method in ("Adam w/o (ab)", "AdamG†"):
        with pytest.raises(ValueError, match="where momentum is a sum of past gradients"):
            Tracked(methods(method)[0], data, phenomena=True)


def test_adagradg_stays_with_sgd_and_adagrad_does_not(data):
    start = finished(Training(replace(CONFIG, method="SGD-M", lr=0.1, epochs=3), data))
    schemes = trajectories([start.config], epochs=3)
    table = compare_trajectories(schemes, data, start.weights(), points=5)
    assert table["step"].min() == 1
    assert set(table["quantity"]) == {"cosine", "angle"}
    last = table[(table["step"] == 3 * start.steps) & (table["quantity"] == "cosine")]
    lost = {}
    for name in ("AdaGradG", "AdaGrad"):
        own = last[last["group"].str.startswith(f"{name}: ") & last["statistic"].isin(["min", "mean"])]
        lost[name] = 1 - own["value"].min()
        whole = own[(own["group"] == f"{name}: {ALL}") & (own["statistic"] == "min")]
        assert 1 - whole["value"].item() == lost[name]
    assert lost["AdaGradG"] < 1e-4
    assert lost["AdaGrad"] > 100 * lost["AdaGradG"]
    assert last["group"].str.endswith("]").sum() == 2 * 3 * 5  # the stages of VGG16


def test_recorded_studies_are_not_repeated(tmp_path, monkeypatch):
    small = few(train=60, test=20)
    for module in ("experiments", "study"):
        monkeypatch.setattr(f"steradian.lab.{module}.load", lambda *_: None)
        monkeypatch.setattr(f"steradian.lab.{module}.Resident", lambda *_: small)
    small_study, paths = (Study(name, tmp_path, tmp_path / "runs", device="cpu") for name in ("small", "paths"))
    configs = methods("SGD", "Adam", epochs=1)
    tracks = Tracks(tmp_path / "small-tracks.parquet")
    assert track_study(configs, small_study, phenomena={"Adam"}, points=2)
    before = tracks.path.read_bytes()
    assert track_study(configs, small_study, points=2)
    assert tracks.path.read_bytes() == before
    assert [about["config"]["method"] for about in tracks.about().values()] == ["SGD", "Adam"]
    table = tracks.table()
    measured = table[table["quantity"].isin(PHENOMENA)]
    assert set(measured["run"]) == {configs[1].key}
    tracks.path.unlink()
    with pytest.raises(ValueError, match="has no record"):
        track_study(configs, small_study)
    start = replace(CONFIG, method="SGD-M", epochs=1)
    made = Tracks(tmp_path / "paths-tracks.parquet")
    assert trajectory_study([start], paths, tuning=1, points=2)
    assert set(made.table()["run"]) == set(made.about()) == {trajectories([start], epochs=1)[0].key}
    weights = tmp_path / "runs" / "paths" / "weights" / f"{start.key}.pt"
    weights.unlink()
    assert trajectory_study([start], paths, tuning=1)
    with pytest.raises(ValueError, match="copy that folder here"):
        trajectory_study([start], paths, tuning=2)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["Adam", "SGD-M"])
def test_on_a_gpu_replayed_tracking_is_plain_tracking(exact, method):
    """Every recorded value, over a few steps; replayed steps round differently, since optimizers are fused there."""
    data = few("cuda", train=400, test=100)
    [config] = methods(method, epochs=1)
    made = []
    for execution in (Execution(), Execution(captured=False)):
        training = Tracked(config, data, execution=execution, points=POINTS, phenomena=True)
        made.append(by_place(finished(training).table()))
    shared = made[0].index.intersection(made[1].index)
    assert len(shared) == len(made[0])
    np.testing.assert_allclose(made[0][shared], made[1][shared], rtol=0.02, atol=1e-4)
    expected = watched(config, data)
    shared = made[0].index.intersection(expected.index)
    np.testing.assert_allclose(made[0][shared], expected[shared], rtol=0.02, atol=1e-4)

"""Recipes hold the trainings that the paper describes; tracking records what theory says of them."""

from dataclasses import replace

import numpy as np
import pytest

from steradian.lab import paper
from steradian.lab.figures import phenomena_figure
from steradian.lab.recipes import RECIPES, accuracy_tables, grid, pretraining, trajectories
from steradian.lab.tracking import compare_trajectories, track_hypotheses
from steradian.lab.tracks import Tracks, track_study, trajectory_study
from steradian.lab.training import Training
from steradian.report.page import report

from lab.studies import CONFIG, few, methods


def test_the_tables_are_seven_columns_of_seven_methods_and_five_seeds():
    for norm in ("bn", "bn-no-affine"):
        configs = accuracy_tables(norm=norm)
        assert len({c.key for c in configs}) == len(configs) == 7 * 7 * 5
        assert {(c.model, c.data) for c in configs} == set(paper.COLUMNS)
        assert {(c.epochs, c.milestones, c.batch_size, c.norm) for c in configs} == {(405, (135, 225, 315), 128, norm)}
    [one] = accuracy_tables(columns=["ResNet20 cifar10"], methods=["Adam w/o (abc)"], seeds=1)
    assert (one.lr, one.weight_decay, one.betas) == (1e-3, 5e-4, (0.9, 0.99))
    [sphere] = accuracy_tables(columns=["VGG16 cifar10"], methods=["AdamG"], seeds=1)
    assert (sphere.method, sphere.lr, sphere.weight_decay, sphere.betas) == ("AdamG†", 1e-2, 2.5e-4, (0.9, 0.999))


def test_recipes_scale():
    for recipe in RECIPES.values():
        configs = recipe(data="digits", columns=["VGG16"], methods=["Adam"], epochs=9, seeds=2)
        assert {(c.model, c.data, c.method, c.epochs, c.milestones) for c in configs} == {
            ("VGG16", "digits", "Adam", 9, (3, 5, 7))
        }
        assert {c.seed for c in configs} == {0, 1}
        with pytest.raises(ValueError, match="columns must be among"):
            recipe(columns=["ResNet50"])
        with pytest.raises(ValueError, match="methods must be among"):
            recipe(methods=["Lion"])


def test_the_grid_is_the_papers():
    configs = grid(columns=["ResNet20"], methods=["Adam", "SGD-M"], seeds=1)
    assert len(configs) == 4 * 8 * 3 + 4 * 8
    best = paper.BEST["Adam"][("ResNet20", "cifar10")]
    assert any((c.lr, c.weight_decay, c.betas[1]) == (1e-3, best.weight_decay, best.beta2) for c in configs)


def test_trajectories_start_from_the_pretrained_networks():
    starts = pretraining()
    assert [c.norm for c in starts] == ["bn", "bn-no-affine", "wn"]
    assert {(c.epochs, c.milestones, c.lr, c.weight_decay) for c in starts} == {(200, (80, 120, 160), 0.1, 1e-4)}
    made = trajectories(starts)
    assert [c.method for c in made[:3]] == ["SGD", "AdaGradG", "AdaGrad"]
    assert [c.lr for c in made[:3]] == [1e-2, 1e-2, 1e-3]
    assert {c.start for c in made[:3]} == {starts[0].key}


@pytest.fixture(scope="module")
def data():
    return few()


@pytest.mark.parametrize("method", ["SGD", "SGD-M", "Adam"])
def test_tracking_changes_nothing_and_sees_the_whole_training(data, method):
    [config] = methods(method, epochs=2)
    plain = Training(config, data)
    while not plain.finished:
        plain.run_epoch()
    told = []
    tracked, records = track_hypotheses(config, data, points=4, tell=lambda t: told.append(t.epoch))
    assert tracked.curves == plain.curves
    assert told == [1, 2]
    table = records.table()
    total = 2 * plain.steps
    assert sorted(set(table["step"])) == list(range(0, total, total // 4))
    assert set(table["group"]) == set(plain.groups.layouts)
    radial = table[table["quantity"] == "radial"]["value"]
    assert (radial < 1).all()  # H1
    velocity = table[(table["quantity"] == "velocity") & (table["statistic"] == "max")]
    taylor = table[(table["quantity"] == "taylor") & (table["statistic"] == "max")]
    np.testing.assert_allclose(velocity["value"].to_numpy() ** 2, taylor["value"].to_numpy(), rtol=1e-5)


def test_adagradg_stays_with_sgd_and_adagrad_does_not(data):
    start = Training(replace(CONFIG, method="SGD-M", lr=0.1, epochs=3), data)
    while not start.finished:
        start.run_epoch()
    schemes = trajectories([start.config], epochs=3)
    records = compare_trajectories(schemes, data, start.weights(), points=5)
    table = records.table()
    last = table[(table["step"] == table["step"].max()) & (table["statistic"] == "min")]
    lost = {
        name: 1 - last[last["group"].str.startswith(f"{name}: ")]["value"].min() for name in ("AdaGradG", "AdaGrad")
    }
    assert lost["AdaGradG"] < 1e-4
    assert lost["AdaGrad"] > 100 * lost["AdaGradG"]
    assert last["group"].str.endswith("]").sum() == 2 * 3 * 13


def test_studies_of_tracks_are_not_repeated(tmp_path, monkeypatch):
    small = few(train=60, test=20)
    for module in ("tracks", "study"):
        monkeypatch.setattr(f"steradian.lab.{module}.load", lambda *_: None)
        monkeypatch.setattr(f"steradian.lab.{module}.Resident", lambda *_: small)
    configs = methods("SGD", epochs=1)
    tracks = track_study(configs, "small", points=2, device="cpu", folder=tmp_path)
    before = tracks.path.read_bytes()
    assert track_study(configs, "small", device="cpu", folder=tmp_path).path.read_bytes() == before
    assert Tracks(tracks.path).runs() == {configs[0].key}
    where = {"device": "cpu", "folder": tmp_path, "runs": tmp_path / "runs"}
    watched = track_study(methods("Adam", epochs=1), "seen", watched=True, points=3, **where).table()
    assert {"deformation", "gradient_memory", "l2_memory", "radius_ratio"} <= set(watched["quantity"])
    assert [len(chart.lines) for chart in phenomena_figure(watched)] == [13] * 4
    report([tmp_path / "runs" / "seen" / "watched" / methods("Adam", epochs=1)[0].key], tmp_path / "page.html")
    monkeypatch.setattr("steradian.lab.tracks.pretraining", lambda **_: [replace(CONFIG, method="SGD-M", epochs=1)])
    made = trajectory_study({"tuning": 1}, "paths", points=2, **where)
    assert made.finished
    assert set(made.table()["quantity"]) == {"cosine"}
    assert trajectory_study({"tuning": 1}, "paths", **where).runs() == made.runs()

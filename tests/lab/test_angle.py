"""A given angle on rows, and the studies of the angle in a tiny form."""

import math
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from steradian import optim
from steradian.lab import angle
from steradian.lab.angle import CROSSED, MATCHED, PARTS, TUNED, AtAngle, angle_rows, angle_study
from steradian.lab.config import Config
from steradian.lab.fleet import Fleet, Progress
from steradian.lab.registry import METHODS
from steradian.lab.results import Result
from steradian.lab.rivals import Hyperball
from steradian.lab.study import Study
from steradian.lab.tables import interval_rows
from steradian.lab.training import Training

from lab.studies import few

SETTINGS = {"width": 4, "batch_size": 64, "precision": "float32"}
SHAPES = [(6, 3, 3, 3), (4, 10), (5, 7)]


def params(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def gradients(some, seed):
    torch.manual_seed(seed + 1)
    for param in some:
        param.grad = torch.randn_like(param)


def angles_between(before, after):
    """By atan2 in float64: arccos has no digits near 0."""
    a, b = before.double().flatten(1), after.double().flatten(1)
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    return 2 * torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1))


INNER = {
    "SGD-M": lambda rows, rest: torch.optim.SGD([*rows, *rest], 0.1, 0.9, weight_decay=0.01),
    "Adam": lambda rows, rest: torch.optim.Adam([*rows, *rest], 0.01, weight_decay=0.01),
    "(ab)": lambda rows, rest: optim.Adam([*rows, *rest], 0.01, without="ab"),
    "Muon": lambda rows, rest: Hyperball([{**group, "rows": "tensor"} for group in rows] + rest, 0.01, 0.95),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_turn_by_the_angle_and_radii_stay(name, dtype):
    some, twins = params(dtype), params(dtype)
    targets = torch.tensor([[0.01, 0.02], [0.03, 0.005], [0.002, 0.04]], dtype=torch.float64)

    def split(each):
        return [{"params": each[:2], "rows": "filter"}], [{"params": each[2:]}]

    optimizer, plain = AtAngle(INNER[name](*split(some)), split(some)[0], targets), INNER[name](*split(twins))
    for step in range(5):
        before = [param.detach().clone() for param in some]
        gradients([*some], step)
        optimizer.step()
        gradients([*twins], step)
        plain.step()
        for k in range(2):
            rms = angles_between(before[k], some[k].detach()).square().mean().sqrt().item()
            assert rms == pytest.approx(targets[min(step, 2), k].item(), abs=1e-6 if dtype == torch.float32 else 1e-14)
            lengths = [each.detach().double().flatten(1).norm(dim=1) for each in (before[k], some[k])]
            torch.testing.assert_close(*lengths, rtol=3e-7 if dtype == torch.float32 else 1e-14, atol=0)
        assert torch.equal(some[2], twins[2])


def test_one_factor_scales_a_layer_and_the_direction_is_the_others():
    some = params()
    rows = [{"params": some[:1], "rows": "filter"}]
    optimizer = AtAngle(torch.optim.Adam(rows, 0.01), rows, torch.tensor([[0.01]]))
    x = some[0].detach().clone().flatten(1).numpy()
    gradients(some[:1], 1)
    step = -0.01 * some[0].grad.sign().flatten(1).numpy()  # Adam's first
    optimizer.step()
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    across = step - (step * u).sum(axis=1, keepdims=True) * u
    turns = np.linalg.norm(across, axis=1) / np.linalg.norm(x, axis=1)
    turns *= 0.01 / math.sqrt((turns**2).mean())
    found = some[0].detach().flatten(1)
    np.testing.assert_allclose(angles_between(torch.from_numpy(x), found), turns, rtol=1e-5)
    moved = found.numpy() - x
    moved -= (moved * u).sum(axis=1, keepdims=True) * u
    cosine = (moved * across).sum(axis=1) / np.linalg.norm(moved, axis=1) / np.linalg.norm(across, axis=1)
    np.testing.assert_allclose(cosine, 1, rtol=1e-9)


def test_a_radial_step_does_not_turn_a_row():
    some = params()
    rows = [{"params": some[:1], "rows": "filter"}]
    optimizer = AtAngle(torch.optim.SGD(rows, 0.1), rows, torch.tensor([[0.01]]))
    before = some[0].detach().clone()
    some[0].grad = before.clone()
    some[0].grad[0] = torch.randn(3, 3, 3)
    optimizer.step()
    assert torch.equal(some[0][1:], before[1:])
    turned = angles_between(before[:1], some[0].detach()[:1]).item()
    assert turned == pytest.approx(0.01 * math.sqrt(6), rel=1e-6)


def test_a_layer_without_gradient_stays_and_a_saved_state_continues():
    targets = torch.linspace(0.01, 0.02, 6)[:, None].repeat(1, 2)

    def fresh():
        some = params()
        rows = [{"params": some[:2], "rows": "filter"}]
        return some, AtAngle(optim.Adam(rows, 0.01, without="ab"), rows, targets)

    def run(some, optimizer, steps):
        for step in steps:
            gradients(some[:1], step)
            optimizer.step()

    whole, optimizer = fresh()
    run(whole, optimizer, range(6))
    assert torch.equal(whole[1], params()[1])
    parts, first = fresh()
    run(parts, first, range(3))
    rows = [{"params": parts[:2], "rows": "filter"}]
    second = AtAngle(optim.Adam(rows, 0.01, without="ab"), rows, targets)
    second.load_state_dict(first.state_dict())
    run(parts, second, range(3, 6))
    assert torch.equal(parts[0], whole[0])


def test_angles_must_be_those_of_the_layers():
    rows = [{"params": params()[:2], "rows": "filter"}]
    with pytest.raises(ValueError, match="angles must have the shape"):
        AtAngle(torch.optim.SGD(rows, 0.1), rows, torch.zeros(3, 1))


def test_every_method_of_the_tuning_has_six_points_with_the_same_angles():
    assert {len(points) for points in TUNED.values()} == {6}
    assert all(name in METHODS for points, _ in PARTS.values() for name in points)
    for k in range(6):
        lr, decay = TUNED["SGD-M"][k]
        theta = math.sqrt(2 * lr * decay / 1.9)
        assert TUNED["Angular, gradient"][k][0] == pytest.approx(theta, rel=5e-3)
        lr, decay = TUNED["AdamW, decay on rows"][k]
        assert math.sqrt(2 * lr * decay * 0.1 / 1.9) == pytest.approx(theta, rel=1e-9)


def let_time_pass_after_an_epoch(patch):
    """The first epoch that ends takes all the time there is."""
    passed = []
    patch.setattr(Progress, "epoch", lambda *_: passed.append(100))
    patch.setattr("steradian.lab.study.Fleet", partial(Fleet, clock=lambda: time.monotonic() + sum(passed)))


@pytest.mark.parametrize("part", PARTS)
def test_a_study_that_is_stopped_and_continued_ends_in_the_same_table(part, tmp_path, monkeypatch):
    few = {
        "crossed": list(CROSSED)[1:3],
        "matched": [list(MATCHED)[k] for k in (2, 5, 7)],
        "tuned": ["Rotational SGD (REQ)"],
    }
    points = {"tuned": ({name: TUNED[name][2:4] for name in few["tuned"]}, 60)}
    monkeypatch.setattr(angle, "PARTS", PARTS | points)
    how = {"methods": few[part], "data": "digits", "epochs": 3, "seeds": 1, "points": 8, "settings": SETTINGS}
    tables = []
    for place, pauses in (("whole", 0), ("parts", 2)):
        study = Study("angle", tmp_path / place, tmp_path / f"{place}-runs", device="cpu")
        for _ in range(pauses):
            with monkeypatch.context() as patch:
                let_time_pass_after_an_epoch(patch)
                assert not angle_study(part, replace(study, deadline=time.monotonic() + 50), **how)
            assert any(study.runs.rglob("*.lock"))  # something was begun
        assert angle_study(part, study, **how)
        tables.append(
            ({r.config.key: str(r.curves) for r in study.store.results()}, interval_rows(study.store.results()))
        )
    assert tables[0] == tables[1]
    if part == "matched":
        about = study.tracks.about()
        assert [each["config"]["method"] for each in about.values()] == ["SGD-M", "Adam w/o (ab), rest SGD-M"]
        for run, record in study.tracks.table().groupby("run", observed=True):
            assert run in about
            assert (record["value"] > 0).all()
            assert set(record["group"]) == set(angle._curves["ResNet20 digits", "SGD-M"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Adam w/o (ab) at SGD-M's angle", [0.01] * 19),
        ("SGD-M at Adam w/o (ab)'s angle", [0.03] * 19),
        ("SGD-M at Adam w/o (ab)'s angle but for the last layer", [*[0.03] * 18, 0.01]),
    ],
)
def test_directions_turn_by_the_angle_of_the_method_that_is_named(name, expected, monkeypatch):
    data = few()
    config = Config(model="ResNet20", data="digits", method=name, lr=0.01, epochs=1, **SETTINGS | {"batch_size": 16})
    groups = Training(replace(config, method="SGD-M"), data).groups
    angles = {"SGD-M": 0.01, "Adam w/o (ab)": 0.03, angle._CONTROL: 0.03}
    curves = {(config.column, of): {each: np.full(3, angles[of]) for each in groups.layouts} for of in angles}
    monkeypatch.setattr(angle, "_curves", curves)
    training = Training(config, data)
    before = [rows.clone() for rows in training.rows()]
    training.take(1)
    found = [angles_between(*both).square().mean().sqrt() for both in zip(before, training.rows(), strict=True)]
    assert [rms.item() for rms in found] == pytest.approx(expected, rel=1e-3)


def result(method, seed, accuracy):
    config = Config(model="ResNet20", data="cifar10", method=method, lr=0.1, seed=seed, epochs=1, schedule="cosine")
    return Result(config, {"train_loss": [1.0], "validation_accuracy": [accuracy], "test_accuracy": [accuracy]})


def test_the_table_compares_with_sgd():
    noise = [0.0, 0.05, -0.05, 0.02]
    found = [result("SGD-M, rest SGD-M", k, 92 + each) for k, each in enumerate(noise)]
    found += [result("Adam w/o (ab), rest Adam", k, 91 + each) for k, each in enumerate(noise)]
    found += [result("SGD-M, rest Adam", k, 92.02 + each) for k, each in enumerate(noise)]
    _, lines = interval_rows(found)
    assert [(line[0], line[-1]) for line in lines] == [
        ("SGD-M, rest SGD-M", ""),
        ("SGD-M, rest Adam", "no difference"),
        ("Adam w/o (ab), rest Adam", "worse"),
    ]


def test_the_table_of_the_angle_compares_trainings_that_differ_in_one_thing():
    values = {
        "SGD-M, rest SGD-M": [91.9, 92.1, 92.3],
        "SGD-M at SGD-M's angle": [92.0, 92.3, 91.9, 92.2],
        "Adam w/o (ab) at SGD-M's angle": [92.1, 92.0, 92.4],
        "SGD-M at Adam w/o (ab)'s angle": [91.0, 91.1, 91.3],
        "Adam at SGD-M's angle": [91.0, 92.0, 91.4],  # nothing to compare it with
    }
    found = [result(method, k, each) for method, every in values.items() for k, each in enumerate(every)]
    _, lines = angle_rows(found)
    pairs = [
        ("angle", "SGD-M at SGD-M's angle", "SGD-M at Adam w/o (ab)'s angle"),
        ("spread in a layer", "SGD-M at SGD-M's angle", "Adam w/o (ab) at SGD-M's angle"),
        ("recorded angle, fixed radii, no L2", "SGD-M, rest SGD-M", "SGD-M at SGD-M's angle"),
    ]
    assert [tuple(line[:3]) for line in lines] == pairs
    tests = [stats.ttest_ind(values[after], values[before], equal_var=False) for _, before, after in pairs]
    (low, high), mean = tests[0].confidence_interval(0.95), np.mean(values[pairs[0][2]]) - np.mean(values[pairs[0][1]])
    shown = [f"{each:.2f}".replace("-", "−") for each in (mean, low, high)]
    assert lines[0][3:] == [shown[0], f"{shown[1]} to {shown[2]}", f"{3 * tests[0].pvalue:.2g}"]
    assert all(float(line[-1]) >= float(f"{test.pvalue:.2g}") for line, test in zip(lines, tests, strict=True))

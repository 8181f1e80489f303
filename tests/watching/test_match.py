"""`match` against equations written out by hand, walks on noise, and trainings that know nothing of the formulas."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import steradian as st
from steradian import find_groups, optim, watch
from steradian.watching.match import match, replay, unknown
from steradian.watching.records import read_run

from small import pair, series
from small import train as small_train

ANGLE, SIZE, SLOPE = 0.03, 32, 0.7


def row_groups(x):
    return [{"params": [x], "rows": "filter"}]


def unit_rows(n=16, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(nn.functional.normalize(torch.randn(n, SIZE, generator=generator, dtype=torch.float64)))


# From settings and angles


def coupled_angle(lr, decay, beta, shared):
    """r³ = ηγ√d/(2λ), without (b) that over 1+β1; θ = η√(d(1−β1)/(1+β1))/r."""
    radius = (lr * SLOPE * math.sqrt(SIZE) / (2 * decay * shared)) ** (1 / 3)
    return lr * math.sqrt(SIZE * (1 - beta) / (1 + beta)) / radius


TARGETS = {
    "SGD-M": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, lambda f: math.sqrt(2 * 0.05 * f["weight_decay"] / 1.9)),
    "AdamW": (
        torch.optim.AdamW,
        {"weight_decay": 0.5, "betas": (0.8, 0.99)},
        lambda f: math.sqrt(2 * 0.5 * f["lr"] * 0.2 / 1.8),
    ),
    "Adam": (optim.Adam, {"lr": 0.02, "betas": (0.9, 0.99)}, lambda f: coupled_angle(0.02, f["weight_decay"], 0.9, 1)),
    "Adam without abc": (
        optim.Adam,
        {"lr": 0.02, "betas": (0.9, 0.99), "without": "abc"},
        lambda f: coupled_angle(0.02, f["weight_decay"], 0.9, 1.9),
    ),
    "SGD without bc": (
        optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "without": "bc"},
        lambda f: math.sqrt(2 * 0.05 * f["weight_decay"]),
    ),
    "AdamG": (optim.AdamG, {"betas": (0.9, 0.99)}, lambda f: f["lr"] * math.sqrt(0.1 / 1.9)),
    "AdaGradG": (optim.AdaGradG, {"beta": 0.99}, lambda f: f["lr"] * 0.1),
    "Angular": (optim.Angular, {"spread": "rms"}, lambda f: f["lr"]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_settings_have_the_angle_by_hand_and_give_it_back(name):
    to, fixed, by_hand = TARGETS[name]
    needed = {"slope": SLOPE, "size": SIZE} if name.startswith("Adam ") or name == "Adam" else {}
    found = match(ANGLE, to=to, **needed, **fixed)
    assert len(found) == len(fixed) + 1
    assert by_hand(found) == pytest.approx(ANGLE, rel=1e-5)
    again = to(row_groups(unit_rows()), **found)
    assert match(again, to=optim.Angular, **needed)["lr"] == pytest.approx(ANGLE, rel=1e-5)


@pytest.mark.parametrize("name", ["Adam", "Adam without abc", "AdamG", "AdaGradG"])
def test_rows_under_noise_turn_by_the_matched_angle(name):
    """In the root mean square, in the last third of a walk whose gradients are noise across the rows, of length γ/r."""
    to, fixed, _ = TARGETS[name]
    x, steps = unit_rows(), 1200
    optimizer = to(row_groups(x), **match(ANGLE, to=to, slope=SLOPE, size=SIZE, **fixed))
    generator = torch.Generator().manual_seed(0)
    squares = []
    for k in range(steps):
        before = x.detach().clone()
        r = before.norm(dim=1, keepdim=True)
        noise = torch.randn(before.shape, generator=generator, dtype=torch.float64)
        across = noise - (noise * before).sum(1, keepdim=True) / r**2 * before
        x.grad = SLOPE / r * nn.functional.normalize(across)
        optimizer.step()
        if k >= 2 * steps // 3:
            chord = (nn.functional.normalize(x.detach()) - before / r).norm(dim=1)
            squares.append((2 * (chord / 2).asin()).square().mean())
    assert torch.stack(squares).mean().sqrt().item() == pytest.approx(ANGLE, rel=0.05)


def test_groups_with_rows_count_or_else_those_with_decay():
    x, y = unit_rows(), nn.Parameter(torch.ones(3))
    expected = math.sqrt(2 * 0.1 * 0.01)
    for groups in (
        [{"params": [x], "rows": "filter", "weight_decay": 0.01}, {"params": [y], "weight_decay": 0.3}],
        [{"params": [x], "weight_decay": 0.01}, {"params": [y]}],
    ):
        assert match(torch.optim.SGD(groups, lr=0.1), to=optim.Angular)["lr"] == pytest.approx(expected, rel=1e-5)


def sgd(**options):
    return torch.optim.SGD(row_groups(unit_rows()), **{"lr": 0.1, "weight_decay": 0.01} | options)


def different():
    return torch.optim.SGD([{"params": [unit_rows()], "weight_decay": each} for each in (0.1, 0.2)], lr=0.1)


@pytest.mark.parametrize(
    ("source", "to", "fixed", "words"),
    [
        (ANGLE, torch.optim.SGD, {}, "one of lr and weight_decay must be given .* got neither"),
        (ANGLE, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, "got lr=0.1, weight_decay=0.1"),
        (ANGLE, optim.Angular, {"lr": 0.1}, "lr must be left open"),
        (ANGLE, torch.optim.Adagrad, {"lr": 0.1}, "no equilibrium is derived for torch.*Adagrad"),
        (ANGLE, torch.optim.Adam, {"lr": 0.1}, "give slope.*and size"),
        (ANGLE, optim.AdaGradG, {"beta": 1.0}, "no angle"),
        (ANGLE, "SGD", {"lr": 0.1}, "to must be a class .* got 'SGD'$"),
        (ANGLE, torch.optim.SGD([torch.zeros(2)]), {"lr": 0.1}, "to must be a class .* got an instance of SGD$"),
        (1.0, optim.Angular, {}, "source must be an angle .* got 1.0"),
        (None, optim.Angular, {}, "source must be an optimizer, a recorded run or an angle, got NoneType"),
        (lambda: sgd(weight_decay=0), optim.Angular, {}, "no weight decay"),
        (lambda: sgd(lr=0.0), optim.Angular, {}, "SGD has no angle"),
        (different, optim.Angular, {}, "different angles, 0.141, 0.2"),
        (lambda: optim.Angular([unit_rows()]), torch.optim.SGD, {"lr": 0.1}, "no param group .* has rows"),
    ],
)
def test_what_cannot_be_matched_is_said(source, to, fixed, words):
    with pytest.raises((ValueError, TypeError), match=words):
        match(source() if callable(source) else source, to=to, **fixed)


# From recorded runs. Labels are half noise, so that gradients do not vanish, and the head learns slowly.

STEPS = 1500
SGD_M = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.02}


def train(make, folder, *, steps=STEPS, schedule=None, every=5):
    """Train a small BN network on noisy labels; returns the folder of the recorded run."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 48, generator=generator)
    labels = (inputs @ torch.randn(48, 10, generator=generator)).argmax(1)
    model = nn.Sequential(
        nn.Linear(48, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.Tanh(),
        nn.Linear(32, 24, bias=False),
        nn.BatchNorm1d(24),
        nn.Tanh(),
        nn.Linear(24, 10),
    )
    groups = find_groups(model, inputs[:64])
    optimizer = make(groups)
    scheduler = schedule(optimizer, groups) if schedule else None
    with watch(optimizer, groups, every=every, to=folder):
        for _ in range(steps):
            chosen = torch.randint(len(inputs), (32,), generator=generator)
            wrong = torch.randint(10, (32,), generator=generator)
            noisy = torch.rand(32, generator=generator) < 0.5
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), torch.where(noisy, wrong, labels[chosen])).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    return folder


def curves(folder, quantity="angle", statistic="median"):
    """{layer: values at the observed steps} of the invariant layers."""
    table = read_run(folder).table
    table = table[(table["quantity"] == quantity) & (table["statistic"] == statistic)]
    return {name: table[table["group"] == name].sort_values("step")["value"].to_numpy() for name in LAYERS}


LAYERS = ("0.weight", "3.weight")


def sgd_m(groups):
    return torch.optim.SGD(groups.param_groups(**SGD_M, rest={"lr": 0.005, "weight_decay": 0.0}))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return train(sgd_m, tmp_path_factory.mktemp("runs") / "sgd-m")


def test_matched_sgd_and_adamw_turn_every_layer_as_far(recorded, tmp_path):
    source = torch.optim.SGD(row_groups(unit_rows()), **SGD_M)
    found = match(source, to=torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99))
    rest = {"lr": 0.002, "weight_decay": 0.0}
    other = train(lambda groups: torch.optim.AdamW(groups.param_groups(**found, rest=rest)), tmp_path / "adamw")
    late = slice(2 * STEPS // 15, None)
    for name in LAYERS:
        of_sgd, of_adamw = (np.median(curves(run)[name][late]) for run in (recorded, other))
        assert of_adamw == pytest.approx(of_sgd, rel=0.1), name
        assert of_sgd == pytest.approx(match(source, to=optim.Angular)["lr"], rel=0.1), name


def test_the_angle_of_a_run_is_that_of_its_median_layer(recorded):
    by_hand = [np.sqrt(np.mean(curve[len(curve) // 2 :] ** 2)) for curve in curves(recorded).values()]
    assert match(recorded, to=optim.Angular)["lr"] == pytest.approx(np.median(by_hand), rel=0.005)
    assert match(read_run(recorded), to=optim.Angular, only="0.*")["lr"] == pytest.approx(by_hand[0], rel=0.005)
    decay = st.match(str(recorded), to=torch.optim.SGD, lr=0.02, momentum=0.9)["weight_decay"]
    assert decay == pytest.approx(SGD_M["weight_decay"], rel=0.2)  # λ is as θ²
    # γ and d of the layers are known: with them the angle of coupled Adam is found.
    adam = match(recorded, to=torch.optim.Adam, only="0.*", lr=0.01)
    radius, gradient = (curves(recorded, quantity)["0.weight"] for quantity in ("radius", "gradient_norm"))
    slope = np.sqrt(np.mean((radius * gradient) ** 2))
    angle = match(torch.optim.Adam([unit_rows()], **adam), to=optim.Angular, slope=slope, size=48)["lr"]
    assert angle == pytest.approx(by_hand[0], rel=0.05)
    with pytest.raises(ValueError, match=r"no layer that matches 'x\*'"):
        match(recorded, to=optim.Angular, only="x*")


def test_what_is_not_known_of_a_run_is_said(recorded, tmp_path):
    in_balance = unknown(recorded)
    assert not any("these layers were not in equilibrium" in sentence for sentence in in_balance)
    optimizer, params = pair("SGD")
    with watch(optimizer, to=tmp_path / "short"):
        small_train(optimizer, params, 20)
    assert any("not in equilibrium with its settings: w, v" in sentence for sentence in unknown(tmp_path / "short"))
    with watch(torch.optim.SGD([params[0]], lr=0.1), to=tmp_path / "untested") as watcher:
        small_train(watcher.optimizers[0], params, 20)
    assert any("No layer of this run is known to be invariant" in each for each in unknown(tmp_path / "untested"))


def cosine(optimizer, _):
    return LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 400))


def test_a_scheduler_that_has_changed_the_rate_is_a_warning():
    sgd = torch.optim.SGD([unit_rows()], lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(sgd, 0.01)
    with pytest.warns(UserWarning, match="The present rate 0.001 is matched, and the first one was 0.1"):
        match(sgd, to=optim.Angular)
    assert scheduler.get_last_lr() == [0.001]


@pytest.fixture(scope="module")
def falling(tmp_path_factory):
    return train(sgd_m, tmp_path_factory.mktemp("runs") / "cosine", steps=400, schedule=cosine)


def test_under_a_schedule_the_angle_is_that_at_the_largest_rate(falling):
    at_peak = curves(falling)["0.weight"][8:17]  # the rate is above 0.9 of its largest up to step 81
    with pytest.warns(UserWarning, match="not in equilibrium with its settings: 0.weight"):
        found = match(falling, to=optim.Angular, only="0.weight")["lr"]
    assert found == pytest.approx(np.sqrt(np.mean(at_peak**2)), rel=1e-5)


def test_angular_replays_recorded_angles_layer_by_layer(falling, tmp_path):
    made = train(
        lambda groups: optim.Angular(groups.param_groups()),
        tmp_path / "replay",
        steps=400,
        schedule=lambda optimizer, groups: replay(optimizer, falling, groups),
    )
    wanted = curves(falling)
    assert not np.allclose(wanted["0.weight"], wanted["3.weight"], rtol=0.05)
    for statistic in ("min", "median", "max"):
        for name, found in curves(made, "angle", statistic).items():
            np.testing.assert_allclose(found, wanted[name], rtol=0.03, atol=1e-6)
    rest = read_run(made).table.query("quantity == 'lr' and group == '6.weight'").sort_values("step")["value"]
    np.testing.assert_allclose(rest, 0.1 * (0.5 + 0.5 * np.cos(np.pi * np.arange(0, 400, 5) / 400)), rtol=1e-5)


def test_rows_of_several_parameters_are_replayed_together(tmp_path):
    runs = []
    for name in ("source", "replay"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        inputs, labels = torch.randn(64, 6), torch.randint(3, (64,))
        groups = find_groups(model, inputs)
        optimizer, scheduler = torch.optim.AdamW(groups.param_groups(), lr=0.01), None
        if runs:
            optimizer = optim.Angular(groups.param_groups())
            scheduler = replay(optimizer, runs[0], groups)
        runs.append(tmp_path / name)
        with watch(optimizer, groups, to=runs[-1], every=1):
            for _ in range(20):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if scheduler:
                    scheduler.step()
    source, replayed = (series(read_run(run).table, "angle", "0.weight + 0.bias") for run in runs)
    assert source == pytest.approx(replayed, rel=1e-4)


def test_a_replay_says_what_it_lacks(recorded):
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 10))
    groups = [{"params": [model[1].weight], "rows": "filter"}]
    with pytest.raises(ValueError, match=r"no angles of 'head\.weight'"):
        replay(optim.Angular(groups), recorded, nn.ModuleDict({"head": model[1]}))
    with pytest.raises(TypeError, match="optimizer must be an Angular"):
        replay(torch.optim.SGD(model.parameters()), recorded, model)

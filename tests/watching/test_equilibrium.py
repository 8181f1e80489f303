"""Predicted radius and angle against simulations and trainings that know nothing of the formulas."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from steradian import find_groups, optim, watch
from steradian.balance import balance_of
from steradian.lab.data import digits

from networks import NETWORKS, backward_passes

BETAS = (0.9, 0.99)


def in_rows(kind, **options):
    return lambda x: kind([{"params": [x], "rows": "filter"}], **options)


SIMULATED = {
    "SGD": in_rows(torch.optim.SGD, lr=0.1, weight_decay=0.05),
    "SGD-M": in_rows(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02),
    "SGD dampened": in_rows(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.04, dampening=0.5),
    "SGD Nesterov": in_rows(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02, nesterov=True),
    "AdamW": in_rows(torch.optim.AdamW, lr=0.01, weight_decay=0.5),
    "Adam": in_rows(torch.optim.Adam, lr=0.02, weight_decay=0.1, betas=BETAS),
    "RAdam": in_rows(torch.optim.RAdam, lr=0.01, weight_decay=0.5, betas=BETAS, decoupled_weight_decay=True),
    "NAdam": in_rows(torch.optim.NAdam, lr=0.01, weight_decay=0.5, decoupled_weight_decay=True, momentum_decay=1.0),
    "Muon": in_rows(torch.optim.Muon, lr=0.01, weight_decay=0.5),
    "Muon without Nesterov": in_rows(torch.optim.Muon, lr=0.01, weight_decay=0.5, momentum=0.9, nesterov=False),
    "Lion": lambda x: in_rows(pytest.importorskip("lion_pytorch").Lion, lr=0.003, weight_decay=1.0)(x),
    "Adam without 'a'": in_rows(optim.Adam, lr=0.02, weight_decay=0.1, betas=BETAS, without="a"),
    "Adam without 'ab'": in_rows(optim.Adam, lr=0.02, weight_decay=0.4, betas=BETAS, without="ab"),
    "Adam without 'abc'": in_rows(optim.Adam, lr=0.02, weight_decay=0.4, betas=BETAS, without="abc"),
    "Adam without 'abc', decoupled": in_rows(
        optim.Adam, lr=0.01, weight_decay=0.5, betas=BETAS, without="abc", decoupled_weight_decay=True
    ),
    "SGD without 'bc'": in_rows(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, without="bc"),
    "SGD without 'bc', Nesterov": in_rows(
        optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.05, without="bc", nesterov=True
    ),
    "SGD without 'bc', dampened": in_rows(
        optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.2, without="bc", dampening=0.5
    ),
}


ONE_OF_EACH = {
    "SGD-M",
    "SGD Nesterov",
    "AdamW",
    "Adam",
    "NAdam",
    "Muon",
    "Lion",
    "Adam without 'abc'",
    "SGD without 'bc'",
}


def simulate(build, slopes, *, size=32, steps=1500):
    """Radius and angle per row in the last third of a walk: the gradient is noise across the row, of length γ/r."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(steps, len(slopes), size, generator=generator, dtype=torch.float64)
    x = nn.Parameter(nn.functional.normalize(noise[0]))
    optimizer = build(x)
    radii, angles = [], []
    for k in range(steps):
        before = x.detach().clone()
        r = before.norm(dim=1, keepdim=True)
        across = noise[k] - (noise[k] * before).sum(1, keepdim=True) / r**2 * before
        x.grad = slopes[:, None] / r * nn.functional.normalize(across)
        optimizer.step()
        if k >= 2 * steps // 3:
            radii.append(r[:, 0])
            chord = (nn.functional.normalize(x.detach()) - before / r).norm(dim=1)
            angles.append(2 * (chord / 2).asin())
    group = optimizer.param_groups[0]
    expected = balance_of(optimizer, group, size)(torch.tensor(group["lr"], dtype=torch.float64), slopes)
    return (torch.stack(radii), torch.stack(angles)), expected


@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.slow) for name in SIMULATED]
)
def test_rows_under_pure_noise_come_to_rest_where_predicted(name):
    # Muon's five iterations do not orthogonalize rows of very different gradients completely; the more columns there
    # are, the less it matters which noise a row shares with the others.
    smallest, size = (1, 96) if name.startswith("Muon") else (0.5, 32)
    slopes = torch.linspace(smallest, 1 / smallest, 16, dtype=torch.float64)
    measured, expected = simulate(SIMULATED[name], slopes, size=size)
    if name.startswith("Muon"):  # its radius is not derived
        assert expected[0].isnan().all()
        measured, expected = measured[1:], expected[1:]
    for found, predicted in zip(measured, expected, strict=True):
        ratios = found.square().mean(0).sqrt() / predicted
        # A single row still wanders about its mean in the 500 steps that are measured.
        assert ratios.median().item() == pytest.approx(1, abs=0.05)
        assert (ratios - 1).abs().max() < 0.1


def closed_form(name, *, lr, decay, beta, size, slope):
    """(r*, θ*) as the equations read, one by one."""
    single = (1 - beta) / (1 + beta)
    if name == "SGD-M":
        return (lr * slope**2 / (2 * decay * (1 - beta))) ** 0.25, math.sqrt(2 * lr * decay / (1 + beta))
    if name == "SGD without 'bc'":
        return (lr * slope**2 / (2 * decay * (1 - beta**2))) ** 0.25, math.sqrt(2 * lr * decay)
    if name == "AdamW":
        return math.sqrt(lr * size / (2 * decay)), math.sqrt(2 * lr * decay * single)
    if name == "Adam without 'abc', decoupled":
        return math.sqrt(lr * size * single / (2 * decay)), math.sqrt(2 * lr * decay)
    shared = 1 + beta if "b" in name else 1.0
    radius = (lr * slope * math.sqrt(size) / (2 * decay * shared)) ** (1 / 3)
    return radius, lr * math.sqrt(size * single) / radius


@pytest.mark.parametrize(
    "name",
    ["SGD-M", "SGD without 'bc'", "AdamW", "Adam without 'abc', decoupled", "Adam", "Adam without 'abc'"],
)
def test_recorded_equilibria_follow_the_equations(name):
    """With γ² the mean of (r‖∇L(x)‖)² over past steps, each forgotten by 0.99 per observation."""
    torch.manual_seed(0)
    model = NETWORKS["BN"].build().double()
    groups = find_groups(model, torch.randn(8, 2, 6, 6, dtype=torch.float64))
    lr, decay, beta = 0.02, 0.1, 0.8
    first = {"momentum": beta} if "SGD" in name else {"betas": (beta, 0.95)}
    kind = {"SGD-M": torch.optim.SGD, "SGD without 'bc'": optim.SGD}.get(name)
    kind = kind or {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}.get(name, optim.Adam)
    ours = {"without": name.split("'")[1]} if "without" in name else {}
    ours |= {"decoupled_weight_decay": True} if "decoupled" in name else {}
    optimizer = kind(groups.param_groups(), lr=lr, weight_decay=decay, **first, **ours)
    squares = []
    with watch(optimizer, groups) as watcher:
        for k in backward_passes(model, 9):
            rate = lr / (1 + k)
            for group in optimizer.param_groups:
                group["lr"] = rate
            weight = model.get_parameter("3.weight")
            squares.append((weight.detach().flatten(1).norm(dim=1) * weight.grad.flatten(1).norm(dim=1)).square())
            optimizer.step()
    past = 0.99 ** np.arange(8, -1, -1)
    slopes = np.sqrt((past[:, None] * torch.stack(squares).numpy()).sum(0) / past.sum())
    expected = [closed_form(name, lr=rate, decay=decay, beta=beta, size=36, slope=slope) for slope in slopes]
    found = watcher.latest()["3.weight"]
    for quantity, values in zip(("equilibrium_radius", "equilibrium_angle"), zip(*expected, strict=True), strict=True):
        assert found[quantity]["mean"] == pytest.approx(np.mean(values), rel=1e-7)
        assert found[quantity]["min"] == pytest.approx(np.min(values), rel=1e-7)
        assert found[quantity]["q90"] == pytest.approx(np.quantile(values, 0.9), rel=1e-7)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, optim.Adam])
def test_an_equilibrium_is_that_of_the_settings_of_its_step(kind):
    """Schedules change weight decay and β in mid-run, whenever the numbers are handed over; without decay none is."""
    decays, betas = [0.0, 0.1, 0.1, 0.0, 0.3, 0.2], [0.9, 0.9, 0.8, 0.8, 0.8, 0.7]

    def recorded(*, flushing):
        x = nn.Parameter(torch.eye(3))
        y = nn.Parameter(torch.eye(4))
        plain = {"params": [("y", y)], "rows": "filter", "weight_decay": 0.1}
        optimizer = kind([{"params": [("x", x)], "rows": "filter"}, plain], lr=0.1)
        with watch(optimizer) as watcher:
            for decay, beta in zip(decays, betas, strict=True):
                group = optimizer.param_groups[0]
                group["weight_decay"] = decay
                group.update({"betas": (beta, 0.95)} if "betas" in group else {"momentum": beta})
                x.grad, y.grad = torch.eye(3).roll(1, 0), torch.eye(4).roll(1, 0)
                optimizer.step()
                if flushing:
                    watcher.flush()
        table = watcher.records()
        return table[table["quantity"].str.startswith("equilibrium")].set_index(
            ["step", "group", "quantity", "statistic"]
        )

    at_once, one_by_one = recorded(flushing=False)["value"], recorded(flushing=True)["value"]
    assert at_once.xs("x", level="group").isna().groupby("step").all().tolist() == [not decay for decay in decays]
    assert at_once.xs("y", level="group").notna().all()
    np.testing.assert_allclose(at_once, one_by_one.reindex(at_once.index), rtol=1e-6)


def test_nothing_is_predicted_before_a_gradient_is_finite():
    x = nn.Parameter(torch.eye(3))
    optimizer = SIMULATED["SGD-M"](x)
    with watch(optimizer) as watcher:
        for gradient in (torch.full((3, 3), torch.nan), torch.eye(3).roll(1, 0)):
            x.grad = gradient
            optimizer.step()
            optimizer.state.clear()  # the momentum is not finite either
            with torch.no_grad():
                x.copy_(torch.eye(3))
    table = watcher.records()
    chosen = table[(table["quantity"] == "equilibrium_radius") & (table["statistic"] == "median")]
    first, second = chosen["value"]
    assert math.isnan(first)
    assert second > 0


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (in_rows(torch.optim.SGD, lr=0.1), "no weight decay"),
        (in_rows(torch.optim.AdamW, lr=0.1, amsgrad=True), "amsgrad"),
        (in_rows(torch.optim.Adagrad, lr=0.1, weight_decay=0.1), "Adagrad"),
        (in_rows(optim.AdamG, lr=0.1), "AdamG"),
    ],
)
def test_where_there_is_no_equilibrium_it_says_why(build, why):
    optimizer = build(nn.Parameter(torch.ones(2, 3)))
    found = balance_of(optimizer, optimizer.param_groups[0], 3)
    assert isinstance(found, str)
    assert why in found


# Trainings. Rates and decays are such that the rows come to rest within some hundred steps. Labels are half noise,
# so that gradients are mostly noise as the derivation takes them to be; and the head, whose norm sets that of the
# gradients, is trained slowly, so that γ does not change while the rows come to rest.

TRAINED = {
    "SGD-M": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.02}, {"lr": 0.005}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": BETAS, "weight_decay": 0.5}, {"lr": 0.002}),
    "Adam without 'abc'": (
        optim.Adam,
        {"lr": 0.01, "betas": BETAS, "weight_decay": 0.01, "without": "abc"},
        {"lr": 0.002},
    ),
}


def teacher():
    """Gaussian inputs and the classes that a fixed linear map gives them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 64, generator=generator)
    return inputs, (inputs @ torch.randn(64, 10, generator=generator)).argmax(1)


def flat_digits():
    train, _ = digits()
    return train.images.flatten(1), train.labels


def trained(name, data, *, steps=2100, batch=32):
    """The table of a training at a constant rate, its last third, by invariant group."""
    kind, rows, rest = TRAINED[name]
    inputs, labels = data
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.Tanh(),
        nn.Linear(32, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    groups = find_groups(model, inputs[:64])
    rest = {**rows, **rest, "weight_decay": 0.0}
    rest.pop("without", None)
    settings = [{**group, **(rows if "rows" in group else rest)} for group in groups.param_groups()]
    optimizer = kind(settings)
    with watch(optimizer, groups, every=5) as watcher:
        for _ in range(steps):
            chosen = torch.randint(len(inputs), (batch,), generator=generator)
            wrong = torch.randint(10, (batch,), generator=generator)
            noisy = torch.rand(batch, generator=generator) < 0.5
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), torch.where(noisy, wrong, labels[chosen])).backward()
            optimizer.step()
    invariant = [name for name, label in watcher.labels().items() if label == "invariant"]
    assert invariant == ["0.weight", "3.weight"]
    table = watcher.records()
    table = table[(table["step"] >= 2 * steps // 3) & table["group"].isin(invariant)]
    return {
        group: {
            (quantity, statistic): part["value"].to_numpy()
            for (quantity, statistic), part in of_group.groupby(["quantity", "statistic"], observed=True)
        }
        for group, of_group in table.groupby("group", observed=True)
    }


def ratios(numbers):
    """Measured over predicted: the radius, the angle in the median, and its root mean square."""
    middle = {
        q: np.median(numbers[q, "median"]) for q in ("radius", "equilibrium_radius", "angle", "equilibrium_angle")
    }
    mean_square = np.sqrt(numbers["taylor", "mean"].mean())
    return (
        middle["radius"] / middle["equilibrium_radius"],
        middle["angle"] / middle["equilibrium_angle"],
        mean_square / middle["equilibrium_angle"],
    )


@pytest.mark.parametrize("name", [pytest.param("SGD-M", marks=pytest.mark.slow), "AdamW", "Adam without 'abc'"])
def test_a_long_training_comes_to_rest_within_a_tenth_of_the_prediction(name):
    for group, numbers in trained(name, teacher()).items():
        radius, angle, mean_square = ratios(numbers)
        assert radius == pytest.approx(1, abs=0.1), group
        assert angle == pytest.approx(1, abs=0.1), group
        assert mean_square == pytest.approx(1, abs=0.1), group


@pytest.mark.parametrize(
    "name", ["SGD-M", *(pytest.param(name, marks=pytest.mark.slow) for name in TRAINED if name != "SGD-M")]
)
def test_so_does_a_training_on_digits(name):
    """The derivation speaks of the mean of θ².

    Digits are far from isotropic, a row turns in few dimensions, and the median of θ lies up to a tenth below its
    root mean square.
    """
    for group, numbers in trained(name, flat_digits()).items():
        radius, angle, mean_square = ratios(numbers)
        assert radius == pytest.approx(1, abs=0.1), group
        assert mean_square == pytest.approx(1, abs=0.1), group
        assert angle < mean_square, group

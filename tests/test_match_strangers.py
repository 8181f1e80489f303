"""`match` and `equilibrium` by formulas written out by hand, and by walks on noise that know no formula.

In a walk the gradient of each row is noise across the row, of length γ/r, so that successive gradients are uncorrelated
and of known length at u: the assumptions of the equilibrium.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from torch import Tensor, nn

import steradian as st
from steradian import optim

ROWS, SIZE = 24, 96


def sgd_angle(lr: float, decay: float, beta: float) -> float:
    """θ² = 2ηλ/(1+β)."""
    return math.sqrt(2 * lr * decay / (1 + beta))


def adamw_angle(lr: float, decay: float, beta: float) -> float:
    """θ² = 2ηλ(1−β)/(1+β)."""
    return math.sqrt(2 * lr * decay * (1 - beta) / (1 + beta))


def parameter() -> nn.Parameter:
    generator = torch.Generator().manual_seed(3)
    return nn.Parameter(nn.functional.normalize(torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)))


def rows_of(x: nn.Parameter) -> list[dict[str, Any]]:
    return [{"params": [x], "rows": "filter"}]


def walk(make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], steps: int = 1500) -> Tensor:
    """The root mean square over rows of the angle of each step."""
    generator = torch.Generator().manual_seed(0)
    x = parameter()
    slopes = torch.linspace(0.8, 1.25, ROWS, dtype=torch.float64)[:, None]
    optimizer = make(rows_of(x))
    angles = []
    for _ in range(steps):
        before = x.detach().clone()
        r = before.norm(dim=1, keepdim=True)
        noise = torch.randn(before.shape, generator=generator, dtype=torch.float64)
        across = noise - (noise * before).sum(1, keepdim=True) / r**2 * before
        x.grad = slopes / r * nn.functional.normalize(across)
        optimizer.step()
        chord = (nn.functional.normalize(x.detach()) - before / r).norm(dim=1)
        angles.append((2 * (chord / 2).asin()).square().mean().sqrt())
    return torch.stack(angles)


def settled(angles: Tensor) -> float:
    return angles[2 * len(angles) // 3 :].square().mean().sqrt().item()


@cache
def proved() -> st.Groups:
    """Rows of the size of `parameter`, in front of a batch normalization."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, ROWS, bias=False), nn.BatchNorm1d(ROWS), nn.Tanh())
    return st.find_groups(model.double(), torch.randn(64, SIZE, dtype=torch.float64))


def source_sgd(**options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02} | options)


# --- from settings, by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "decay", "beta"), [(0.1, 5e-4, 0.9), (0.05, 0.02, 0.0), (0.3, 1e-3, 0.5)])
def test_sgd_to_an_angle(lr: float, decay: float, beta: float):
    source = torch.optim.SGD([parameter()], lr=lr, momentum=beta, weight_decay=decay)
    assert st.match(source, to=optim.Angular)["lr"] == pytest.approx(sgd_angle(lr, decay, beta), rel=1e-3)


@pytest.mark.parametrize(("lr", "decay", "beta"), [(1e-3, 0.1, 0.9), (3e-4, 0.5, 0.95)])
def test_adamw_to_an_angle(lr: float, decay: float, beta: float):
    source = torch.optim.AdamW([parameter()], lr=lr, weight_decay=decay, betas=(beta, 0.999))
    assert st.match(source, to=optim.Angular)["lr"] == pytest.approx(adamw_angle(lr, decay, beta), rel=1e-3)


def test_adamw_to_sgd_with_a_given_rate():
    source = torch.optim.AdamW([parameter()], lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999))
    decay = st.match(source, to=torch.optim.SGD, lr=0.1, momentum=0.9)["weight_decay"]
    assert sgd_angle(0.1, decay, 0.9) == pytest.approx(adamw_angle(1e-3, 0.1, 0.9), rel=1e-3)


def test_sgd_to_adamw_with_a_given_decay():
    lr = st.match(source_sgd(), to=torch.optim.AdamW, weight_decay=0.5, betas=(0.9, 0.99))["lr"]
    assert adamw_angle(lr, 0.5, 0.9) == pytest.approx(sgd_angle(0.05, 0.02, 0.9), rel=1e-3)


@pytest.mark.parametrize("angle", [0.002, 0.03])
def test_an_angle_to_settings(angle: float):
    decay = st.match(angle, to=torch.optim.SGD, lr=0.1, momentum=0.9)["weight_decay"]
    assert sgd_angle(0.1, decay, 0.9) == pytest.approx(angle, rel=1e-3)
    decay = st.match(angle, to=torch.optim.AdamW, lr=1e-3)["weight_decay"]
    assert adamw_angle(1e-3, decay, 0.9) == pytest.approx(angle, rel=1e-3)
    assert st.match(angle, to=optim.Angular)["lr"] == pytest.approx(angle, rel=1e-9)


def test_the_settings_of_the_same_class_come_back():
    found = st.match(source_sgd(), to=torch.optim.SGD, lr=0.05, momentum=0.9)
    assert found["weight_decay"] == pytest.approx(0.02, rel=1e-3)


def test_angular_is_its_own_angle():
    source = optim.Angular(rows_of(parameter()), lr=0.007)
    decay = st.match(source, to=torch.optim.SGD, lr=0.1, momentum=0.9)["weight_decay"]
    assert sgd_angle(0.1, decay, 0.9) == pytest.approx(0.007, rel=1e-3)


def test_what_is_left_open_must_be_given():
    for to in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(ValueError, match=r"lr.*weight_decay|weight_decay.*lr"):
            st.match(0.01, to=to)


def test_a_source_without_decay_has_no_equilibrium():
    with pytest.raises(ValueError, match=r"weight_decay|weight decay"):
        st.match(source_sgd(weight_decay=0.0), to=optim.Angular)


@pytest.mark.parametrize("bad", [-0.01, math.nan, "no/such/run"])
def test_a_bad_source_is_named(bad: Any):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=r"source|no/such/run"):
        st.match(bad, to=optim.Angular)


# --- closed loops ---------------------------------------------------------------------------------------------------

TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD-M": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "SGD Nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99)}),
    "Muon": (torch.optim.Muon, {"lr": 0.01, "momentum": 0.9}),
    "Lion": (Lion, {"lr": 0.003, "betas": (0.9, 0.99)}),
    "SGD without bc": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "without": "bc"}),
    # At this rate the walk starts near its equilibrium; at 0.01 it would need more steps than it takes.
    "Adam without abc, decoupled": (
        optim.Adam,
        {"lr": 0.015, "betas": (0.9, 0.99), "without": "abc", "decoupled_weight_decay": True},
    ),
    "Angular": (optim.Angular, {}),
    "Angular rms": (optim.Angular, {"spread": "rms"}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_matched_settings_turn_rows_as_far(name: str):
    to, fixed = TARGETS[name]
    found = st.match(source_sgd(), to=to, **fixed)
    expected = settled(walk(lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.02)))
    assert settled(walk(lambda groups: to(groups, **fixed | found))) == pytest.approx(expected, rel=0.1)


SOURCES: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5, betas=(0.9, 0.99)),
    "Muon": lambda groups: torch.optim.Muon(groups, lr=0.01, weight_decay=0.5),
    "Lion": lambda groups: Lion(groups, lr=0.003, weight_decay=1.0, betas=(0.9, 0.99)),
    "SGD without bc": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.02, without="bc"),
    "Adam without ab, decoupled": lambda groups: optim.Adam(
        groups, lr=0.01, weight_decay=0.5, betas=(0.9, 0.99), without="ab", decoupled_weight_decay=True
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_angle_matched_to_a_source_is_the_one_it_turns_by(name: str):
    found = st.match(SOURCES[name](rows_of(parameter())), to=optim.Angular)["lr"]
    assert found == pytest.approx(settled(walk(SOURCES[name])), rel=0.1)


# --- equilibrium under a schedule -----------------------------------------------------------------------------------

STEPS = 1200


def cosine(peak: float) -> Tensor:
    """From the peak to a twentieth of it."""
    phase = torch.linspace(0, math.pi, STEPS, dtype=torch.float64)
    return peak * (0.525 + 0.475 * phase.cos())


def warm_up_and_milestones(peak: float) -> Tensor:
    k = torch.arange(STEPS, dtype=torch.float64)
    return peak * (k / 100 + 0.01).clamp(max=1) * torch.where(k < 500, 1.0, torch.where(k < 900, 0.3, 0.1))


def constant(peak: float) -> Tensor:
    return torch.full((STEPS,), peak, dtype=torch.float64)


def measured(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], rates: Tensor, slopes: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """Root mean squares over rows of the angle and the radius, of each step of a walk."""
    generator = torch.Generator().manual_seed(1)
    x = parameter()
    with torch.no_grad():
        x.mul_(radius)
    optimizer = make(rows_of(x))
    angles, radii = [], []
    for rate, slope in zip(rates.tolist(), slopes, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        before = x.detach().clone()
        r = before.norm(dim=1, keepdim=True)
        noise = torch.randn(before.shape, generator=generator, dtype=torch.float64)
        across = noise - (noise * before).sum(1, keepdim=True) / r**2 * before
        x.grad = slope / r * nn.functional.normalize(across)
        optimizer.step()
        chord = (nn.functional.normalize(x.detach()) - before / r).norm(dim=1)
        angles.append((2 * (chord / 2).asin()).square().mean().sqrt())
        radii.append(r.square().mean().sqrt())
    return torch.stack(angles), torch.stack(radii)


def worst(predicted: Any, found: Tensor) -> float:
    """The largest relative error of means over 40 steps, in the last 80 % of the walk."""
    windows = [
        torch.as_tensor(t, dtype=torch.float64)[STEPS // 5 :].unfold(0, 40, 20).mean(1) for t in (predicted, found)
    ]
    return (windows[0] / windows[1] - 1).abs().max().item()


SCHEDULED: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "SGD-M": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.02),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.05),
    "SGD without bc": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.02, without="bc"),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.4, betas=(0.9, 0.98)),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.03, betas=(0.9, 0.98)),
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, cosine) for name in SCHEDULED), *((name, warm_up_and_milestones) for name in ("SGD-M", "AdamW"))],
)
def test_angle_and_radius_under_a_schedule(name: str, schedule: Callable[[float], Tensor]):
    make = SCHEDULED[name]
    optimizer = make(proved().param_groups())
    rates, slopes = schedule(optimizer.param_groups[0]["lr"]), torch.full((STEPS,), 1.0, dtype=torch.float64)
    [found] = st.equilibrium(optimizer, proved(), rates=rates, slopes=slopes, radius=1.5)
    angles, radii = measured(make, rates, slopes, 1.5)
    assert worst(found.angle, angles) < 0.1
    assert worst(found.radius, radii) < 0.05


@pytest.mark.parametrize("name", ["SGD-M", "Adam"])
def test_slopes_that_change_over_time(name: str):
    make = SCHEDULED[name]
    optimizer = make(proved().param_groups())
    rates = cosine(optimizer.param_groups[0]["lr"])
    slopes = torch.linspace(0, 3, STEPS, dtype=torch.float64).neg().exp() + 0.1
    [found] = st.equilibrium(optimizer, proved(), rates=rates, slopes=slopes, radius=1.0)
    angles, radii = measured(make, rates, slopes, 1.0)
    assert worst(found.angle, angles) < 0.15
    assert worst(found.radius, radii) < 0.1
    [blind] = st.equilibrium(optimizer, proved(), rates=rates, radius=1.0)
    assert "constant" in blind.note


def test_adamw_needs_no_slopes():
    optimizer = SCHEDULED["AdamW"](proved().param_groups())
    rates = cosine(0.01)
    [found] = st.equilibrium(optimizer, proved(), rates=rates, radius=1.0)
    slopes = torch.linspace(2, 1, STEPS, dtype=torch.float64)
    assert worst(found.angle, measured(SCHEDULED["AdamW"], rates, slopes, 1.0)[0]) < 0.1


def test_equilibrium_by_hand():
    [sgd] = st.equilibrium(source_sgd(), slopes=2.0)
    assert sgd.angle == pytest.approx(sgd_angle(0.05, 0.02, 0.9), rel=1e-6)
    assert sgd.radius == pytest.approx((0.05 * 2.0**2 / (2 * 0.02 * (1 - 0.9))) ** 0.25, rel=1e-6)
    [adamw] = st.equilibrium(SCHEDULED["AdamW"](proved().param_groups()), proved())
    assert adamw.angle == pytest.approx(adamw_angle(0.01, 0.4, 0.9), rel=1e-6)
    assert adamw.radius == pytest.approx(math.sqrt(0.01 * SIZE / (2 * 0.4)), rel=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows in the param group", "no rows"])
def test_without_groups_no_number_is_wrong(name: str, rows: bool):
    """Adam's steps grow with the number of entries in a row: it is in the param group, or the angle is not known."""
    optimizer = SCHEDULED[name](rows_of(parameter()) if rows else [{"params": [parameter()]}])
    [expected] = st.equilibrium(SCHEDULED[name](proved().param_groups()), proved(), slopes=1.0)
    [found] = st.equilibrium(optimizer, slopes=1.0)
    assert math.isnan(found.angle) or found.angle == pytest.approx(expected.angle, rel=1e-6)
    assert math.isnan(found.radius) or found.radius == pytest.approx(expected.radius, rel=1e-6)
    options = {"rates": constant(0.01), "slopes": 1.0, "radius": 1.5}
    [expected] = st.equilibrium(SCHEDULED[name](proved().param_groups()), proved(), **options)
    [found] = st.equilibrium(optimizer, **options)
    angle, right = (torch.as_tensor(e.angle, dtype=torch.float64).expand(STEPS) for e in (found, expected))
    known = ~angle.isnan()
    torch.testing.assert_close(angle[known], right[known])


def test_the_angle_of_angular_is_its_rate():
    optimizer = optim.Angular(proved().param_groups(), lr=0.02)
    assert st.equilibrium(optimizer, proved())[0].angle == pytest.approx(0.02)
    rates = cosine(0.02)
    [found] = st.equilibrium(optimizer, proved(), rates=rates, radius=1.5)
    torch.testing.assert_close(torch.as_tensor(found.angle, dtype=torch.float64), rates)
    assert (torch.as_tensor(found.radius) - 1.5).abs().max() < 1e-6


def test_every_param_group_has_a_result_of_its_own():
    x, y = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [x], "lr": 0.1}, {"params": [y], "lr": 0.4}], weight_decay=0.01)
    first, second = st.equilibrium(optimizer)
    assert second.angle == pytest.approx(2 * first.angle, rel=1e-9)
    assert second.steps < first.steps


# --- decay under a schedule -----------------------------------------------------------------------------------------

CORRECTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD without bc": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "without": "bc"}),
    "Adam": (optim.Adam, {"lr": 0.02}),
    "Adam without ab": (optim.Adam, {"lr": 0.02, "without": "ab"}),
    "Adam without abc, decoupled": (optim.Adam, {"lr": 0.02, "without": "abc", "decoupled_weight_decay": True}),
}


@pytest.mark.parametrize("largest", ["the constructor's", "initial_lr", "max_lr"])
@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_decay_is_the_decay_times_the_rate_over_the_largest(name: str, largest: str):
    make, options = CORRECTED[name]
    trained = []
    for corrected in (True, False):
        generator = torch.Generator().manual_seed(0)
        x, rest = parameter(), nn.Parameter(torch.ones(5, dtype=torch.float64))
        groups = [*rows_of(x), {"params": [rest]}]
        keywords = {"corrected_decay": True} if corrected else {}
        optimizer = make(groups, **options, weight_decay=0.3, **keywords)
        top = options["lr"]
        if largest != "the constructor's":
            top *= 4
            for group in optimizer.param_groups:
                group[largest] = top
        for k in range(12):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = rate = options["lr"] * (1 - k / 12)
            if not corrected:
                optimizer.param_groups[0]["weight_decay"] = 0.3 * rate / top
            x.grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            rest.grad = torch.randn(5, generator=generator, dtype=torch.float64)
            optimizer.step()
        trained.append((x.detach(), rest.detach()))
    for found, expected in zip(*trained, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

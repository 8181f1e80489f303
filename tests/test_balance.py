"""st.equilibrium: against random walks of rows under schedules, by hand at constant rates, and what it assumes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steradian as st
from steradian import geometry, optim
from steradian.groups import Group, Groups

N, D, STEPS = 60, 32, 1500
COSINE = [0.5 * (1 + math.cos(math.pi * k / STEPS)) for k in range(STEPS)]
STAIRS = [1.0 if k < 700 else 0.1 for k in range(STEPS)]

MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02),
    "SGD-M": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD-M bc": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02, without="bc"),
    "SGD-M corrected": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, corrected_decay=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.2),
    "AdamC": lambda p: optim.Adam(p, lr=0.02, weight_decay=0.2, decoupled_weight_decay=True, corrected_decay=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=2e-3),
}


def walk(make: Any, factors: list[float], slope: float = 3.0) -> tuple[Tensor, Tensor, Tensor, st.balance.Equilibrium]:
    """Rates, angles and radii of rows whose gradients at u are independent and of one length, and the prediction."""
    draw = torch.Generator().manual_seed(0)
    x = nn.Parameter(torch.randn(N, D, generator=draw, dtype=torch.float64))
    groups = Groups({"w": x}, [Group(("w",), "filter", N, D, "bn", 0.0)])
    optimizer = make(groups.param_groups())
    peak = optimizer.param_groups[0]["lr"]
    rates = torch.tensor([peak * factor for factor in factors], dtype=torch.float64)
    slopes = torch.linspace(slope, slope / 3, len(rates))
    [predicted] = st.equilibrium(optimizer, groups, rates=rates, slopes=slopes)
    angles, radii = [], []
    for rate, gamma in zip(rates.tolist(), slopes.tolist(), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        r, u = geometry.split(x.detach())
        noise = geometry.tangent(torch.randn(N, D, generator=draw, dtype=torch.float64), u)
        x.grad = gamma * noise / noise.norm(dim=1, keepdim=True) / r
        optimizer.step()
        angles.append(geometry.angle(r * u, x.detach()).square().mean().sqrt())
        radii.append(r.square().mean().sqrt())
    return rates, torch.stack(angles), torch.stack(radii), predicted


@pytest.mark.parametrize(
    ("name", "factors"),
    [(name, COSINE) for name in MAKE] + [("SGD-M", STAIRS), ("AdamW", STAIRS)],
    ids=[*MAKE, "SGD-M, stairs", "AdamW, stairs"],
)
def test_random_walks_under_a_schedule(name: str, factors: list[float]) -> None:
    """Angle and radius after the first 300 steps, where moments fill; not where the rate has come down to 1 %."""
    _, angles, radii, predicted = walk(MAKE[name], factors)
    assert predicted.note == ""
    there = slice(300, 1400)
    assert (radii[there] / predicted.radius[there] - 1).abs().max() < 0.07
    off = (angles[there] / predicted.angle[there] - 1).abs()
    if factors is STAIRS:  # momentum and second moments of the old rate fade
        off[390:450] = 0
    assert off.max() < 0.12
    assert off.mean() < 0.05


def test_the_constant_equilibrium_is_not_that_of_a_falling_rate() -> None:
    """What the integration is for: at the end of a cosine the radius is far above that of the small rate."""
    rates, angles, _, predicted = walk(MAKE["AdamW"], COSINE)
    constant = (2 * rates * 0.2 / 19).sqrt()
    assert angles[1350] < 0.7 * constant[1350]
    assert abs(angles[1350] / predicted.angle[1350] - 1) < 0.1


def test_constant_rates_give_the_formulas() -> None:
    x = nn.Parameter(torch.ones(4, 8))
    groups = Groups({"w": x}, [Group(("w",), "filter", 4, 8, "bn", 0.0)])
    sgd = torch.optim.SGD([x], lr=0.1, momentum=0.9, weight_decay=5e-4)
    [found] = st.equilibrium(sgd, groups, slopes=2.0)
    assert found.angle == pytest.approx(math.sqrt(2 * 0.1 * 5e-4 / 1.9))
    assert found.radius == pytest.approx((0.1 * 4 / (2 * 5e-4 * 0.1)) ** 0.25)
    assert found.steps == pytest.approx(3 / (2 * 2 * 0.1 * 5e-4 / 0.1))
    [unknown] = st.equilibrium(sgd)
    assert unknown.name == "param group 0"
    assert unknown.angle == found.angle
    assert math.isnan(unknown.radius)
    assert "slopes" in unknown.note
    [muon] = st.equilibrium(torch.optim.Muon([x], lr=0.02, momentum=0.95, nesterov=False, weight_decay=0.1))
    assert muon.angle == pytest.approx(math.sqrt(2 * 0.02 * 0.1 * 0.05 / 1.95))


def test_without_slopes_they_are_constant_and_it_says_so() -> None:
    """The angles are those of a walk of one slope that began in equilibrium."""
    x = nn.Parameter(torch.ones(4, 8))
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9, weight_decay=1e-2)
    rates = [0.1 * factor for factor in COSINE]
    [found] = st.equilibrium(optimizer, rates=rates)
    assert "taken as constant" in found.note
    assert found.angle[0] == pytest.approx(math.sqrt(2 * 0.1 * 1e-2 / 1.9))
    [known] = st.equilibrium(optimizer, rates=rates, slopes=7.0, radius=(0.1 * 49 / (2 * 1e-2 * 0.1)) ** 0.25)
    torch.testing.assert_close(found.angle, known.angle)
    assert not found.radius.isfinite().any()


def test_angular_turns_by_its_rate() -> None:
    x, bias = nn.Parameter(torch.ones(4, 9)), nn.Parameter(torch.ones(3))
    groups = Groups({"w": x, "b": bias}, [Group(("w",), "filter", 4, 9, "bn", 0.0)])
    optimizer = optim.Angular(groups.param_groups(), lr=0.01)
    [found] = st.equilibrium(optimizer, groups, rates=[0.01, 0.005])
    assert found.angle.tolist() == [0.01, 0.005]
    assert found.radius == pytest.approx(3.0)
    assert "keep their radius" in st.balance.balance_of(optimizer, optimizer.param_groups[0], 9)


@pytest.mark.parametrize("make", [MAKE["SGD-M"], MAKE["SGD-M corrected"], MAKE["AdamC"]])
def test_a_rate_of_zero_moves_nothing(make: Any) -> None:
    """Warm-ups begin and schedules end there; a corrected decay is then 0 too."""
    x = nn.Parameter(torch.ones(4, 8))
    groups = Groups({"w": x}, [Group(("w",), "filter", 4, 8, "bn", 0.0)])
    [found] = st.equilibrium(make(groups.param_groups()), groups, rates=[0.0, 0.01, 0.02, 0.0], slopes=1.0)
    assert found.angle[[0, 3]].tolist() == [0, 0]
    assert found.radius[0] == found.radius[1] == pytest.approx(8**0.5)
    assert (found.angle[1:3] > 0).all()
    [blind] = st.equilibrium(make(groups.param_groups()), groups, rates=[0.0, 0.01, 0.02, 0.0])
    assert blind.angle.isfinite().all()


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients: every step has one length, whatever the gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1})

    def step(self, closure: Any = None) -> None:
        """Not taken here."""


def test_steps_of_lion_do_not_depend_on_slopes() -> None:
    x = nn.Parameter(torch.ones(4, 8))
    groups = Groups({"w": x}, [Group(("w",), "filter", 4, 8, "bn", 0.0)])
    rates = [0.01 * factor for factor in COSINE[:100]]
    [one] = st.equilibrium(Lion([x]), groups, rates=rates, slopes=1.0)
    [two] = st.equilibrium(Lion([x]), groups, rates=rates, slopes=torch.linspace(5, 1, 100))
    torch.testing.assert_close(one.angle, two.angle)
    torch.testing.assert_close(one.angle, 0.01 * 8**0.5 * torch.tensor(COSINE[:100]).double() / one.radius)


def test_what_has_no_equilibrium_says_why() -> None:
    x = nn.Parameter(torch.ones(4, 9))
    [found] = st.equilibrium(torch.optim.SGD([x], lr=0.1))
    assert math.isnan(found.angle)
    assert "no weight decay" in found.note
    with pytest.raises(ValueError, match="slopes must have one number for each of the 3 rates, got 2"):
        st.equilibrium(torch.optim.SGD([x], lr=0.1, weight_decay=0.1), rates=[0.1] * 3, slopes=[1.0, 2.0])
    for bad in ({"slopes": [1.0, -1.0, 1.0]}, {"slopes": 1.0, "radius": -2.0}):
        with pytest.raises(ValueError, match="slopes and radius must be at least 0, got"):
            st.equilibrium(torch.optim.SGD([x], lr=0.1, weight_decay=0.1), rates=[0.1] * 3, **bad)


def test_what_angular_gives_a_rate_has_no_angle():
    rows, rest = (torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2))
    angled, rated = st.equilibrium(
        st.optim.Angular([{"params": [rows], "rows": "filter"}, {"params": [rest]}], lr=0.02)
    )
    assert angled.angle == 0.02
    assert math.isnan(rated.angle)
    assert "no rows" in rated.note


@pytest.mark.parametrize("rates", [[], 0.1, [0.1, math.nan], [-0.1]])
def test_rates_are_a_number_for_each_step(rates):
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 8))], lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="rates must be a number ≥ 0 for each step to come"):
        st.equilibrium(sgd, rates=rates)


def test_a_momentum_that_forgets_nothing_has_no_equilibrium():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 8))], lr=0.1, momentum=1.0, weight_decay=0.1)
    [found] = st.equilibrium(sgd)
    assert math.isnan(found.angle)
    assert "a momentum of 1 forgets no gradient" in found.note
    with pytest.raises(ValueError, match="a momentum of 1 forgets no gradient"):
        st.match(0.01, to=torch.optim.SGD, lr=0.1, momentum=1.0)


def test_several_optimizers_are_given_one_by_one():
    with pytest.raises(TypeError, match="optimizer must be one torch optimizer, got list"):
        st.equilibrium([torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 8))], lr=0.1)])


def test_at_a_rate_of_zero_the_note_says_why_there_is_no_angle():
    """As a scheduler with a warm-up leaves the optimizer before the first step."""
    x = torch.nn.Parameter(torch.ones(2, 8))
    optimizer = torch.optim.AdamW([x], lr=0.01, weight_decay=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    [found] = st.equilibrium(optimizer)
    assert math.isnan(found.angle)
    assert "its rate is 0 now, as at the start of a warm-up" in found.note
    with pytest.raises(ValueError, match="its rate is 0 now"):
        st.match(optimizer, to=torch.optim.SGD, lr=0.1)

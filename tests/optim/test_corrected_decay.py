"""corrected_decay: λη/η_max on rows, in every step of ours; torch's step with that λ is the twin."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from optim.table import groups, parameters, set_gradients
from steradian import balance, optim
from steradian.scheme import read_step

RATES = (0.1, 0.05, 0.02, 0.0)
MAKE = {
    "SGD": lambda made, **more: optim.SGD(made, lr=0.1, momentum=0.9, weight_decay=0.2, **more),
    "SGD-nesterov": lambda made, **more: optim.SGD(made, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2, **more),
    "SGD-bc": lambda made, **more: optim.SGD(made, lr=0.1, momentum=0.9, weight_decay=0.2, without="bc", **more),
    "SGD-alone": lambda made, **more: optim.SGD(made, lr=0.1, weight_decay=0.2, **more),
    "Adam": lambda made, **more: optim.Adam(made, lr=0.1, weight_decay=0.2, **more),
    "AdamW": lambda made, **more: optim.Adam(made, lr=0.1, weight_decay=0.2, decoupled_weight_decay=True, **more),
    "Adam-abc": lambda made, **more: optim.Adam(made, lr=0.1, weight_decay=0.2, without="abc", **more),
    "Adam-bc": lambda made, **more: optim.Adam(made, lr=0.1, weight_decay=0.2, without="bc", **more),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_rows_decay_by_the_share_of_the_rate_that_is_left(name: str, as_tensor: bool) -> None:
    """As the same optimizer without it, whose decay is set by hand in each step; the rest keeps its λ."""
    one = MAKE[name](groups(torch.float64), corrected_decay=True)
    other = MAKE[name](groups(torch.float64))
    for k, rate in enumerate(RATES):
        for group in one.param_groups:
            group["lr"] = torch.tensor(rate, dtype=torch.float64) if as_tensor else rate
        for group in other.param_groups:
            group["lr"] = rate
            group["weight_decay"] = 0.2 * (rate / 0.1 if "rows" in group else 1)
        for optimizer in (one, other):
            set_gradients(optimizer, k)
            optimizer.step()
    for p, q in zip(parameters(one), parameters(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_torch_is_the_twin_with_the_same_decay(name: str) -> None:
    p, q = (nn.Parameter(torch.randn(4, 5, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    ours = MAKE[name]([{"params": [p], "rows": "filter"}], corrected_decay=True)
    theirs: Any = {
        "SGD": lambda: torch.optim.SGD([q], lr=0.1, momentum=0.9, weight_decay=0.2),
        "Adam": lambda: torch.optim.Adam([q], lr=0.1, weight_decay=0.2),
        "AdamW": lambda: torch.optim.AdamW([q], lr=0.1, weight_decay=0.2),
    }[name]()
    for k, rate in enumerate(RATES):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = rate
        theirs.param_groups[0]["weight_decay"] = 0.2 * rate / 0.1
        p.grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(k + 1))
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_the_largest_rate_is_the_schedulers_or_that_of_the_group() -> None:
    """OneCycleLR's max_lr; initial_lr under a warm-up that begins at a small rate; the group's own otherwise.

    A rate that is changed before the first scheduler is the one that it schedules, as in torch's optimizers.
    """
    seen = {}
    for name in ("OneCycleLR", "LinearLR", "changed", "none"):
        p = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
        group = {"params": [p], "rows": "filter", "lr": 0.5}
        optimizer = optim.Adam([group], lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, corrected_decay=True)
        if name == "OneCycleLR":
            lr_scheduler.OneCycleLR(optimizer, max_lr=0.8, total_steps=10, cycle_momentum=False)
        if name == "changed":
            optimizer.param_groups[0]["lr"] = 2.0
        if name in ("LinearLR", "changed"):
            lr_scheduler.LinearLR(optimizer, start_factor=0.25)
        p.grad = torch.zeros_like(p)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        seen[name] = ((1 - p.detach()[0, 0]) / (rate * 0.1)).item(), rate
    assert seen["OneCycleLR"][0] == pytest.approx(seen["OneCycleLR"][1] / 0.8)
    assert seen["LinearLR"] == (pytest.approx(0.25), 0.125)
    assert seen["changed"] == (pytest.approx(0.25), 0.5)
    assert seen["none"] == (pytest.approx(1.0), 0.5)


def test_a_first_rate_of_zero_needs_a_largest_one() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"lr must be > 0 with corrected_decay, or give the group max_lr"):
        MAKE["Adam"]([{"params": [p], "rows": "filter", "lr": 0.0}], corrected_decay=True)
    optimizer = MAKE["AdamW"]([{"params": [p], "rows": "filter", "lr": 0.0, "max_lr": 0.5}], corrected_decay=True)
    optimizer.param_groups[0]["lr"] = 0.25
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2, 3), 1 - 0.25 * 0.2 * 0.5))


def test_it_survives_a_checkpoint() -> None:
    one = MAKE["Adam-abc"](groups(), corrected_decay=True)
    for group in one.param_groups:
        group["lr"] = 0.01
    set_gradients(one, 0)
    one.step()
    other = MAKE["Adam-abc"](groups())
    with torch.no_grad():
        for p, q in zip(parameters(one), parameters(other), strict=True):
            q.copy_(p)
    other.load_state_dict(one.state_dict())
    for optimizer in (one, other):
        set_gradients(optimizer, 1)
        optimizer.step()
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(p, q)


def test_readers_and_equilibria_know_it() -> None:
    p = nn.Parameter(torch.randn(2, 3))
    settings = {"weight_decay": 0.2, "decoupled_weight_decay": True, "corrected_decay": True}
    optimizer = optim.Adam([{"params": [p], "rows": "filter"}], lr=0.1, **settings)
    optimizer.param_groups[0]["lr"] = 0.05
    before = p.detach().clone()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert read_step(optimizer, p, before=before).decay == pytest.approx(0.1)
    found = balance.balance_of(optimizer, optimizer.param_groups[0], 3)
    _, angle = found(torch.tensor(0.05), torch.tensor(1.0))
    assert angle.item() == pytest.approx((2 * 0.05 * 0.1 * 0.1 / 1.9) ** 0.5)


def test_anything_but_true_and_false_is_refused() -> None:
    with pytest.raises(ValueError, match=r"corrected_decay must be True or False, got 0\.5"):
        optim.SGD([nn.Parameter(torch.ones(2))], corrected_decay=0.5)

"""Settings of the optimizers: what is refused, and what a param group may have of its own."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optim.table import TABLE, Make, assert_same, groups, parameters, set_gradients, train
from steradian import optim
from steradian.groups import Groups, Layout
from steradian.optim import checks

BAD: dict[str, list[Any]] = {
    "lr": [
        *(-1.0, float("nan"), float("inf"), "fast", torch.ones(2)),
        *map(torch.tensor, (-1.0, float("nan"), float("inf"), 1j)),
    ],
    "betas": [(0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9],
    "eps": [-1e-8, None],
    "weight_decay": [-0.1, float("inf")],
    "momentum": [-0.1],
    "dampening": [-0.1],
    "without": ["d", "aa", "A", None, ["a"]],
    "beta": [-0.1, 1.5],
    "v0": [0.0, -1.0, float("inf"), None, "50", (1.0,), [torch.ones(3)] * 5],
    "clip": [0.0, -1.0],
    "wd_ratio": [-0.1],
    "rest_lr": [-0.1],
}


@pytest.mark.parametrize("make", TABLE.values(), ids=TABLE)
def test_bad_settings_name_the_argument(make: Make) -> None:
    accepted = inspect.signature(type(make(groups()))).parameters
    for name, values in BAD.items():
        for value in values if name in accepted else ():
            with pytest.raises(ValueError, match=f"^{name} must be"):
                make(groups(), **{name: value})
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    with pytest.raises(TypeError, match=r"pass groups.param_groups\(\)"):
        make(Groups({}))


def test_a_part_of_a_joint_set_is_refused() -> None:
    """As ZeroRedundancyOptimizer hands them to ranks: rows of the weight alone are not invariant."""
    with pytest.raises(ValueError, match="joint must be for two parameters or more"):
        optim.Adam([{"params": [nn.Parameter(torch.ones(4, 3))], "rows": 2, "joint": True}])


@pytest.mark.parametrize("make", TABLE.values(), ids=TABLE)
@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_settings_of_torch_that_would_change_the_step_are_refused(make: Make, name: str) -> None:
    optimizer = make(groups())
    with pytest.raises(ValueError, match=f"{name} must be False"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], name: True})
    state = optimizer.state_dict()
    state["param_groups"][0][name] = True
    with pytest.raises(ValueError, match=f"{name} must be False"):
        make(groups()).load_state_dict(state)


def test_nesterov_needs_momentum() -> None:
    for options in ({"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="nesterov must be"):
            optim.SGD(groups(), lr=0.1, nesterov=True, **options)


def test_letters_in_any_order_and_per_group() -> None:
    one, other = optim.Adam(groups(), without="cab"), optim.Adam(groups(), without="abc")
    train(one)
    train(other)
    assert_same(one, other)
    mixed = groups()
    mixed[1]["without"] = "a"
    optimizer = optim.Adam(mixed, without="bc")
    train(optimizer)
    assert [group["without"] for group in optimizer.param_groups] == ["bc", "a", "bc", "bc"]
    assert optimizer.state[mixed[0]["params"][0]]["exp_avg_sq"].shape == (6, 4, 3, 3)
    assert optimizer.state[mixed[1]["params"][0]]["exp_avg_sq"].shape == (3,)


@pytest.mark.parametrize("kind", [optim.AdamG, optim.AdaGradG, optim.Angular])
def test_rates_of_the_rest(kind: Any) -> None:
    made = groups()
    made += [{"params": [nn.Parameter(torch.zeros(2))], **rate} for rate in ({"lr": 0.5}, {"rest_lr": 0.375})]
    optimizer = kind(made, lr=0.25, rest_lr=0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.25, 0.125, 0.5, 0.375]
    with pytest.raises(ValueError, match="rest_lr must be a number ≥ 0, got -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "rest_lr": -1})


def test_adagradg_from_sgd() -> None:
    made = groups()
    optimizer = optim.AdaGradG.from_sgd(made, lr=0.1, weight_decay=0.5)
    filters, joint, rest = optimizer.param_groups[0], optimizer.param_groups[2], optimizer.param_groups[3]
    beta = (1 - 0.1 * 0.5) ** 4
    assert (rest["lr"], rest["weight_decay"]) == (0.1, 0.5)
    for group in (filters, joint):
        assert group["beta"] == pytest.approx(beta)
        assert group["lr"] == pytest.approx((2 * beta) ** -0.5)
    p = filters["params"][0]
    expected = p.detach().flatten(1).norm(dim=1) ** 4 / (2 * 0.1**2 * beta**0.5)
    rows = Layout(2).join([q.detach() for q in joint["params"]])
    set_gradients(optimizer, 0)
    for q in parameters(optimizer):
        q.grad.zero_()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["sum"], beta * expected)
    together = beta * rows.norm(dim=1) ** 4 / (2 * 0.1**2 * beta**0.5)
    for q in joint["params"]:
        torch.testing.assert_close(optimizer.state[q]["sum"], together)


@pytest.mark.parametrize("make", TABLE.values(), ids=TABLE)
def test_numpys_numbers_are_numbers(make: Make) -> None:
    options = {"lr": 0.25, "weight_decay": 0.5}
    one = make(groups(), **options)
    other = make(groups(), **{name: np.float32(value) for name, value in options.items()})
    train(one)
    train(other)
    assert_same(one, other)


def test_adagradg_from_sgd_takes_param_groups_of_any_kind() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    for params in (weight, [weight], [("weight", weight)], iter([weight])):
        [group] = optim.AdaGradG.from_sgd([{"params": params, "rows": "filter"}], lr=0.1).param_groups
        assert group["params"] == [weight]
        assert group["v0"][0].shape == (4,)
    with pytest.raises(TypeError, match="params must be param groups"):
        optim.AdaGradG.from_sgd([weight], lr=0.1)


def test_an_endless_clip_is_none() -> None:
    one, other = (optim.AdamG(groups(radial_alone=True), clip=clip) for clip in (1e6, float("inf")))
    before = [p.detach().clone() for p in parameters(one)]
    train(one)
    train(other)
    assert_same(one, other)
    assert not any(torch.equal(p, old) for p, old in zip(parameters(other), before, strict=True))


@pytest.mark.parametrize(("make", "said"), [(optim.AdamSRT, True), (optim.AdamG, True), (optim.Adam, False)])
def test_an_optimizer_without_any_rows_says_so_once(make, said, caplog):
    checks.warn_once.cache_clear()
    weight = torch.nn.Parameter(torch.randn(3, 4))
    for _ in range(2):
        make([weight])
    made = [record.message for record in caplog.records if "no param group has rows" in record.message]
    assert len(made) == said
    assert all(f"{make.__name__}: " in text and "find_groups" in text for text in made)
    caplog.clear()
    checks.warn_once.cache_clear()
    make([{"params": [weight], "rows": "filter"}])
    assert not caplog.records


@pytest.mark.parametrize("kind", [optim.AdamG, optim.AdaGradG])
@pytest.mark.parametrize("rate", ["x", -1.0, float("nan")])
def test_a_rate_is_checked_where_no_group_has_rows(kind: Any, rate: Any) -> None:
    with pytest.raises(ValueError, match="lr must be"):
        kind([nn.Parameter(torch.ones(3))], lr=rate)


@pytest.mark.parametrize(("kind", "named"), [(optim.AdamG, True), (optim.AdaGradG, True), (optim.AdamSRT, False)])
def test_the_warning_names_the_rate_that_counts(kind: Any, named: bool, caplog: pytest.LogCaptureFixture) -> None:
    checks.warn_once.cache_clear()
    kind([nn.Parameter(torch.ones(3))])
    assert ("rest_lr" in caplog.text) == named


def test_a_model_without_rows_is_named_as_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    checks.warn_once.cache_clear()
    model = nn.Linear(3, 2)
    groups = Groups(dict(model.named_parameters())).param_groups()
    optim.AdamSRT(groups)
    assert "found no invariant weights in this model" in caplog.text
    assert "pass st.find_groups" not in caplog.text
    optim.AdamG(groups)


def test_two_optimizers_from_one_list_keep_their_own_settings() -> None:
    made = groups()
    kept = [dict(group) for group in made]
    one, other = optim.AdamG(made, lr=0.5, rest_lr=0.25), optim.Adam(made, lr=0.125, without="ab")
    third = optim.Adam(made, lr=2.0, without="abc")
    assert [group["lr"] for group in one.param_groups] == [0.5, 0.5, 0.5, 0.25]
    assert {group["lr"] for group in other.param_groups} == {0.125}
    assert {(group["lr"], group["without"]) for group in third.param_groups} == {(2.0, "abc")}
    assert [group.keys() for group in made] == [group.keys() for group in kept]


@pytest.mark.parametrize("kind", [optim.AdamG, optim.AdaGradG])
def test_rows_of_one_number_are_refused_on_the_unit_sphere(kind: Any) -> None:
    for shape, spec in (((4,), "filter"), ((4, 1), "filter"), ((1,), "tensor"), ((2, 3), ("grid", -1, -1))):
        with pytest.raises(
            ValueError, match=r"rows must have at least two numbers .* leave this parameter without rows"
        ):
            kind([{"params": [nn.Parameter(torch.ones(shape))], "rows": spec}])
    joint = [nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.ones(4))]
    kind([{"params": joint, "rows": "filter", "joint": True}])


def test_rows_of_one_number_are_warned_of_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    checks.warn_once.cache_clear()
    for _ in range(2):
        optim.Adam([{"params": [nn.Parameter(torch.ones(5))], "rows": "filter"}], without="ab")
    assert caplog.text.count("into rows of one number") == 1


@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_fused_is_none_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match=f"fused must be None, True or False, got {value!r}"):
        optim.Adam(groups(), fused=value)

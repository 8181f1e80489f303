"""Every recorded number against the slow twin: quantities × optimizers × networks, statistics and single rows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twin import (
    FLOORS,
    AdaGradGTwin,
    AdagradTwin,
    AdamGTwin,
    AdamTwin,
    Observed,
    RMSpropTwin,
    SGDTwin,
    Twin,
)

from steradian import find_groups, optim, watch
from steradian.watching.records import STATISTICS, read_run

from networks import NETWORKS, backward_passes

PHENOMENA = {"deformation", "gradient_memory", "l2_memory", "radius_ratio"}
EQUILIBRIUM = {"equilibrium_radius", "equilibrium_angle"}
BETAS = (0.8, 0.95)


@dataclass(frozen=True)
class Case:
    """An optimizer, its settings in its own words, and its twin."""

    optimizer: type
    options: dict[str, Any]
    twin: Any

    def build(self, model, groups):
        # Our optimizers read the rows from their param groups; torch's know of no rows.
        params = groups.param_groups() if self.optimizer.__module__.startswith("steradian") else model.parameters()
        return self.optimizer(params, **self.options)


def sgd(kind=torch.optim.SGD, *, lr=0.1, l2=0.02, without="", **options):
    ours = {"without": without} if kind is optim.SGD else {}
    return Case(kind, {"lr": lr, "weight_decay": l2, **options, **ours}, SGDTwin(l2=l2, without=without, **options))


def adam(kind=torch.optim.Adam, *, lr=0.02, decay=0.3, decoupled=False, without="", eps=1e-8, **options):
    ours = {"without": without, "decoupled_weight_decay": decoupled} if kind is optim.Adam else {}
    twin = AdamTwin(
        l2=0.0 if decoupled else decay,
        decay=decay if decoupled else 0.0,
        without=without,
        betas=BETAS,
        eps=eps,
        **options,
    )
    return Case(kind, {"lr": lr, "betas": BETAS, "weight_decay": decay, "eps": eps, **options, **ours}, twin)


TORCH = {
    "SGD": sgd(),
    "SGD-M": sgd(momentum=0.9),
    "Adam": adam(decay=0.03),
    "AdamW": adam(torch.optim.AdamW, decoupled=True),
}
MORE_OF_TORCH = {
    "SGD dampened": sgd(momentum=0.8, dampening=0.3),
    "SGD Nesterov": sgd(momentum=0.8, nesterov=True),
    "SGD ascending": sgd(momentum=0.8, maximize=True),
    "SGD without decay": sgd(momentum=0.8, l2=0.0),
    "Adam without decay": adam(decay=0.0),
    "Adam with a large eps": adam(decay=0.03, eps=0.1),
    "Adam amsgrad": adam(decay=0.03, amsgrad=True),
    "AdamW amsgrad": adam(torch.optim.AdamW, decoupled=True, amsgrad=True),
    "AdamW ascending": adam(torch.optim.AdamW, decoupled=True, maximize=True),
    "Adagrad": Case(torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.03}, AdagradTwin(l2=0.03)),
    "RMSprop": Case(torch.optim.RMSprop, {"lr": 0.02, "weight_decay": 0.03}, RMSpropTwin(l2=0.03, eps=1e-8)),
}
OURS = {
    **{f"Adam without {w!r}": adam(optim.Adam, decay=0.03, without=w) for w in ("", "a", "ab", "abc")},
    "Adam without 'abc', decoupled": adam(optim.Adam, without="abc", decoupled=True),
    "SGD without 'bc'": sgd(optim.SGD, momentum=0.9, without="bc"),
}
MORE_OF_OURS = {
    **{f"Adam without {w!r}": adam(optim.Adam, decay=0.03, without=w) for w in ("b", "c", "ac", "bc")},
    "Adam without 'ab', decoupled": adam(optim.Adam, without="ab", decoupled=True),
    "Adam without '', decoupled": adam(optim.Adam, decoupled=True),
    "SGD without ''": sgd(optim.SGD, momentum=0.9),
    "SGD without 'b'": sgd(optim.SGD, momentum=0.9, without="b"),
    "SGD without 'bc', Nesterov": sgd(optim.SGD, momentum=0.8, without="bc", nesterov=True),
    "SGD without 'bc', dampened": sgd(optim.SGD, momentum=0.8, without="bc", dampening=0.3),
    "AdaGradG": Case(optim.AdaGradG, {"lr": 0.5, "beta": 0.9, "v0": 2.0}, AdaGradGTwin(beta=0.9, v0=2.0)),
    "AdamG": Case(optim.AdamG, {"lr": 0.05, "betas": BETAS}, AdamGTwin(betas=BETAS)),
    "AdamG, retraction": Case(
        optim.AdamG, {"lr": 0.05, "betas": BETAS, "retraction": True}, AdamGTwin(betas=BETAS, retraction=True)
    ),
}


OTHER_WEIGHTS = {"SGD dampened", "SGD Nesterov"}
"""(b1), (b2) and (c) are defined for a momentum whose weights are β^(k−i)."""


def schedule(k):
    """A warm-up, a jump and a decline: the rate differs in every step."""
    return (k + 1) / 4 if k < 4 else 0.97**k if k < 9 else 0.3 * 0.9**k


IMAGES = torch.randn(8, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


FOUND = {}
"""What was found in the first network of each kind, which holds for all."""


def rows_of(model):
    dtype = next(model.parameters()).dtype
    kind = str(model), dtype
    if kind not in FOUND:
        FOUND[kind] = find_groups(model, IMAGES.to(dtype))
    return FOUND[kind].of(model)


def train(model, case, *, steps=13, groups=None, settings=None, rates=schedule, **options):
    """A watched training and the twins of its groups, by name."""
    groups = groups or rows_of(model)
    optimizer = case.build(model, groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    watcher = watch(optimizer, groups, **options)
    twins = {
        group.name: Twin(list(group.params), groups.layouts[group.group.names[0]], case.twin)
        for group in watcher.watched
        if group.group in groups.groups
    }
    rtol = 1e-11 if next(model.parameters()).dtype == torch.float64 else 1e-5
    with watcher:
        for k in backward_passes(model, steps):
            for group in optimizer.param_groups:
                group.update(settings(k) if settings else {})
            rate = optimizer.param_groups[0]["lr"]
            for twin in twins.values():
                twin.before(rate)
            optimizer.step()
            for twin in twins.values():
                twin.after(rtol=rtol)
            scheduler.step()
    assert watcher.error is None
    return watcher, twins


def check(watcher, twins, *, steps, missing=frozenset(), unchecked=frozenset(), rtol=1e-7, floor=0.0, floors=None):
    """All statistics of all quantities at these steps, and nothing else."""
    floors = floors or {}
    table = watcher.records()
    found = {
        key: float(value)
        for *key, value in table[["step", "group", "quantity", "statistic", "value"]].itertuples(index=False)
        for key in [tuple(key)]
    }
    assert len(found) == len(table), "a number is recorded twice"
    found = {key: value for key, value in found.items() if key[1] in twins}
    expected = {}
    for name, twin in twins.items():
        for step in steps:
            for quantity, values in twin.expected[step].items():
                if quantity in missing:
                    continue
                if quantity == "lr":
                    expected[step, name, quantity, "mean"] = values[0]
                    continue
                numbers = [*np.quantile(values, [0, 0.1, 0.5, 0.9, 1]), values.mean()]
                for statistic, number in zip(STATISTICS, numbers, strict=True):
                    expected[step, name, quantity, statistic] = number
    assert {key for key in found if key[2] not in EQUILIBRIUM} == set(expected)
    wrong = [
        f"{key}: recorded {found[key]:.12g}, twin {number:.12g}"
        for key, number in expected.items()
        if key[2] not in unchecked
        and not abs(found[key] - number)
        <= rtol * abs(number) + max(floors.get(key[2], floor), FLOORS.get(key[2], 1e-15))
    ]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ:\n" + "\n".join(wrong[:20])


def build(network):
    torch.manual_seed(1)
    return NETWORKS[network].build().double()


def crossed(names, networks):
    """Every name with every network; all but one pair for each of them are slow."""
    names, networks = list(names), list(networks)
    longer = max(len(names), len(networks))
    usual = {(names[k % len(names)], networks[k % len(networks)]) for k in range(longer)}
    pairs = [(name, network) for name in names for network in networks]
    return [pair if pair in usual else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("name", "network"), crossed(TORCH, NETWORKS))
def test_torchs_optimizers_on_every_network(name, network):
    watcher, twins = train(build(network), TORCH[name])
    assert len(twins) == 2
    check(watcher, twins, steps=range(13), missing=PHENOMENA)


@pytest.mark.parametrize(("name", "network"), crossed(TORCH, NETWORKS))
def test_phenomena_of_torchs_optimizers_on_every_network(name, network):
    check(*train(build(network), TORCH[name], phenomena=True), steps=range(13))


@pytest.mark.parametrize(("name", "network"), crossed(OURS, ["BN", "GN", "LN", "WN"]))
def test_our_optimizers(name, network):
    watcher, twins = train(build(network), OURS[name])
    assert len(twins) == 2
    assert set(watcher.missing) >= PHENOMENA
    check(watcher, twins, steps=range(13), missing=PHENOMENA)


@pytest.mark.parametrize("name", MORE_OF_TORCH)
def test_other_settings_of_torchs_optimizers(name):
    check(*train(build("GN"), MORE_OF_TORCH[name]), steps=range(13), missing=PHENOMENA)
    missing = PHENOMENA - {"deformation"} if name in OTHER_WEIGHTS else set()
    check(*train(build("GN"), MORE_OF_TORCH[name], phenomena=True), steps=range(13), missing=missing)


@pytest.mark.parametrize("name", MORE_OF_OURS)
def test_other_settings_of_our_optimizers(name):
    check(*train(build("GN"), MORE_OF_OURS[name]), steps=range(13), missing=PHENOMENA)


@pytest.mark.parametrize(("name", "network"), crossed(["SGD-M", "Adam", "AdamW"], ["BN", "GN", "LN", "WN"]))
def test_every_third_step(name, network):
    watcher, twins = train(build(network), TORCH[name], every=3)
    check(watcher, twins, steps=range(0, 13, 3), missing=PHENOMENA)


@pytest.mark.parametrize("name", ["SGD-M", "Adam", "AdamW"])
def test_phenomena_of_every_third_step_follow_all_steps(name):
    check(*train(build("BN"), TORCH[name], every=3, phenomena=True), steps=range(0, 13, 3))


@pytest.mark.parametrize("name", ["SGD without 'bc'", "Adam without 'abc'"])
def test_our_optimizers_every_third_step(name):
    check(*train(build("GN"), OURS[name], every=3), steps=range(0, 13, 3), missing=PHENOMENA)


@pytest.mark.parametrize("name", OURS)
def test_phenomena_of_our_optimizers(name):
    """Of a momentum that moves with its rows only (a) can be measured: the others are neutralized."""
    missing = set() if name in {"Adam without ''", "Adam without 'a'"} else PHENOMENA - {"deformation"}
    check(*train(build("BN"), OURS[name], phenomena=True), steps=range(13), missing=missing)


@pytest.mark.parametrize("case", [TORCH["AdamW"], OURS["Adam without 'ab'"]], ids=["AdamW", "Adam without 'ab'"])
def test_single_rows_on_disk(case, tmp_path):
    watcher, twins = train(build("BN"), case, record_rows=["3.weight"], rows_every=4, to=tmp_path / "run")
    missing = PHENOMENA & set(watcher.missing)
    check(watcher, twins, steps=range(13), missing=missing)
    found = read_run(tmp_path / "run").rows
    for group, steps in {"3.weight": range(13), "0.weight": range(0, 13, 4)}.items():
        of_group = found[found["group"] == group]
        assert sorted(set(of_group["step"])) == list(steps)
        for step in steps:
            at = of_group[of_group["step"] == step]
            expected = {q: v for q, v in twins[group].expected[step].items() if q not in missing}
            assert set(at["quantity"]) - EQUILIBRIUM == set(expected)
            for quantity, values in expected.items():
                numbers = at[at["quantity"] == quantity].sort_values("row")
                assert numbers["row"].tolist() == list(range(len(values)))
                np.testing.assert_allclose(
                    numbers["value"], values, rtol=1e-7, atol=FLOORS.get(quantity, 1e-15), err_msg=f"{quantity} {step}"
                )


@pytest.mark.parametrize(
    "case", [TORCH["SGD-M"], TORCH["AdamW"], OURS["Adam without 'abc'"]], ids=["SGD-M", "AdamW", "Adam without 'abc'"]
)
def test_a_normalization_whose_epsilon_matters(case):
    model = build("BN")
    groups = rows_of(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1
    watcher, twins = train(model, case, groups=groups)
    assert min(twin.expected[0]["defect"].max() for twin in twins.values()) > 1e-2
    check(watcher, twins, steps=range(13), missing=PHENOMENA & set(watcher.missing))


@pytest.mark.parametrize(
    "case", [TORCH["SGD-M"], TORCH["AdamW"], OURS["Adam without 'abc'"]], ids=["SGD-M", "AdamW", "Adam without 'abc'"]
)
def test_single_precision(case):
    """float32 has 6e-8; (b1) and (c) are angles of 1e-4 between directions that are summed over many steps."""
    torch.manual_seed(1)
    watcher, twins = train(NETWORKS["BN"].build(), case)
    missing = PHENOMENA & set(watcher.missing)
    # An update of 0.6 % of the weights is rounded to 1e-5 of itself.
    floors = {"radial_share": 1e-5}
    check(watcher, twins, steps=range(13), missing=missing, rtol=2e-4, floor=1e-6, floors=floors)


def test_a_momentum_that_is_scheduled():
    momenta = tuple(0.95 - 0.05 * abs(k - 6) for k in range(13))
    case = Case(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}, SGDTwin(0.02, momentum=momenta))
    check(*train(build("BN"), case, settings=lambda k: {"momentum": momenta[k]}, phenomena=True), steps=range(13))


def test_param_groups_of_different_settings():
    model = build("BN")
    slow, fast = sgd(lr=0.01, momentum=0.5, l2=0.1), sgd(lr=0.1, momentum=0.9, l2=0.01)
    rest = [p for n, p in model.named_parameters() if n not in ("0.weight", "3.weight")]
    optimizer = torch.optim.SGD(
        [
            {"params": rest, "lr": 0.3},
            {"params": [model.get_parameter("0.weight")], **slow.options},
            {"params": [model.get_parameter("3.weight")], **fast.options},
        ]
    )
    groups = rows_of(model)
    twins = {n: Twin([model.get_parameter(n)], "filter", c.twin) for n, c in (("0.weight", slow), ("3.weight", fast))}
    with watch(optimizer, groups) as watcher:
        for _ in backward_passes(model, 5):
            for twin, group in zip(twins.values(), optimizer.param_groups[1:], strict=True):
                twin.before(group["lr"])
            optimizer.step()
            for twin in twins.values():
                twin.after()
    check(watcher, twins, steps=range(5), missing=PHENOMENA)


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.Rprop])
def test_an_optimizer_that_cannot_be_read_is_observed(kind):
    watcher, twins = train(build("GN"), Case(kind, {"lr": 0.02}, Observed()))
    assert PHENOMENA | {"effective_lr", "direction_norm", "radial", "nu"} <= set(watcher.missing)
    check(watcher, twins, steps=range(13))


@pytest.mark.parametrize("case", [TORCH["SGD-M"], TORCH["AdamW"]], ids=["SGD-M", "AdamW"])
def test_a_rate_of_zero(case):
    """A warm-up that begins at 0: the step goes nowhere, but c and ν are what they are."""
    watcher, twins = train(build("BN"), case, steps=3, rates=lambda k: k / 4)
    check(watcher, twins, steps=range(3), missing=PHENOMENA & set(watcher.missing))


@pytest.mark.parametrize("name", ["SGD without 'bc'", "Adam without 'abc'"])
def test_a_rate_of_zero_of_our_optimizers(name):
    """Telemetry holds the product η^e‖c^⊥‖ and η^e: where these are 0, ‖c^⊥‖ and ν are not known."""
    unknown = {"direction_norm", "nu"}
    watcher, twins = train(build("BN"), OURS[name], steps=3, rates=lambda k: k / 4)
    table = watcher.records()
    at_zero = table[(table["step"] == 0) & table["quantity"].isin(unknown)]
    assert len(at_zero)
    assert at_zero["value"].isna().all()
    assert not table[(table["step"] > 0) & table["quantity"].isin(unknown)]["value"].isna().any()
    check(watcher, twins, steps=range(3), missing=PHENOMENA & set(watcher.missing), unchecked=unknown)


def test_nesterov_over_lists():
    case = sgd(momentum=0.8, nesterov=True, l2=0.0)
    watcher, twins = train(build("BN"), replace(case, options={**case.options, "foreach": True}))
    check(watcher, twins, steps=range(13), missing=PHENOMENA)


@pytest.mark.parametrize(
    "case",
    [TORCH["AdamW"], OURS["Adam without 'abc', decoupled"]],
    ids=["AdamW", "Adam without 'abc'"],
)
def test_a_weight_decay_that_is_scheduled(case):
    decays = [0.3 * (1 + k) for k in range(8)]
    twin = ScheduledDecay(decays, case.twin)
    watcher, twins = train(
        build("BN"), replace(case, twin=twin), steps=8, settings=lambda k: {"weight_decay": decays[k]}
    )
    missing = PHENOMENA & set(watcher.missing)
    check(watcher, twins, steps=range(8), missing=missing)


@dataclass(frozen=True)
class ScheduledDecay:
    """A twin whose decoupled decay is another one in every step."""

    decays: list
    twin: Any

    def quantities(self, row):
        return replace(self.twin, decay=self.decays[row.now]).quantities(row)


@pytest.mark.parametrize("name", ["SGD-M", "AdamW"])
def test_a_state_that_is_loaded_while_watched(name):
    model = build("BN")
    groups = rows_of(model)
    optimizer = TORCH[name].build(model, groups)
    rates = [0.01, 0.02, 0.03, 0.04]
    with watch(optimizer, groups) as watcher:
        for k in backward_passes(model, 4):
            if k == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                group["lr"] = rates[k]
            optimizer.step()
    table = watcher.records()
    recorded = table[(table["quantity"] == "lr") & (table["group"] == "0.weight")]
    assert recorded["value"].tolist() == pytest.approx(rates)


@pytest.mark.parametrize("name", [*TORCH, *(f"our {name}" for name in OURS)])
def test_steps_without_a_gradient_are_not_recorded(name):
    case = OURS[name.removeprefix("our ")] if name.startswith("our ") else TORCH[name]
    model = build("BN")
    groups = rows_of(model)
    optimizer = case.build(model, groups)
    weight, idle = model.get_parameter("3.weight"), {2, 3, 6}
    twin = Twin([weight], "filter", case.twin)
    with watch(optimizer, groups) as watcher:
        for k in backward_passes(model, 8):
            if k in idle:
                weight.grad = None
            else:
                twin.before(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if k not in idle:
                twin.after()
    table = watcher.records()
    table = table[(table["group"] == "3.weight") & (table["statistic"] == "mean")]
    went = [k for k in range(8) if k not in idle]
    assert sorted(set(table["step"])) == went
    for k, expected in zip(went, twin.expected, strict=True):
        found = table[table["step"] == k].set_index("quantity")["value"]
        for quantity in expected.keys() - (PHENOMENA & set(watcher.missing)):
            assert found[quantity] == pytest.approx(expected[quantity].mean(), rel=1e-7, abs=1e-13), (k, quantity)


def step_over_the_origin(kind):
    """The rows of x' = −x − g/2: one goes from (3, 4) to (1, −7), one is 0 before, one goes to its antipode."""
    x = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64))
    optimizer = kind([{"params": [("w", x)], "rows": "filter"}], lr=0.5, weight_decay=4.0)
    with watch(optimizer) as watcher:
        x.grad = torch.tensor([[-8.0, 6.0], [1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
        optimizer.step()
    return watcher.latest()["w"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_rows_that_collapse_and_rows_that_cross_the_origin(kind):
    """A row of zeros has no direction; one that passes the origin turns by more than a right angle: H1 fails."""
    found = step_over_the_origin(kind)
    first = np.arccos((3 - 28) / (5 * np.sqrt(50)))
    expected = {
        "collapsed": [0, 1, 0],
        "radius": [5, 0, 5],
        "radial": [2, 0, 2],
        "angle": [first, 0, np.pi],
        "velocity": [np.tan(first), 0, 0],
        "gradient_norm": [10, np.sqrt(5), 0],
        "defect": [0, 0, 0],
    }
    for quantity, values in expected.items():
        numbers = [*np.quantile(values, [0, 0.1, 0.5, 0.9, 1]), np.mean(values)]
        assert [found[quantity][name] for name in STATISTICS] == pytest.approx(numbers, rel=1e-7, abs=1e-12), quantity


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_a_collapsed_row_leaves_the_statistics_of_the_others(kind):
    for quantity, numbers in step_over_the_origin(kind).items():
        if quantity not in EQUILIBRIUM:
            assert np.isfinite(list(numbers.values())).all(), quantity

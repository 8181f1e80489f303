"""Every weight of every model is watched, and what is recorded is where the saved weights went."""

import copy
import importlib.util
import math

import numpy as np
import pytest
import torch
from saved import (
    MODELS,
    Point,
    assert_recorded,
    clones,
    images,
    llama,
    loss_of,
    quantities,
    qwen3,
    resnet,
    rows_of,
    spec_of,
    statistics,
    stepped,
    train,
    turned,
    values_of,
)
from torch import nn

import steradian as st
from steradian import watch
from steradian.image import image_step
from steradian.scheme import read_step
from steradian.watching.records import STATISTICS, read_run

from networks import NETWORKS, backward_passes

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

STEPS = 6


def matrices(params):
    return [param for param in params if param.ndim == 2]


def of(package, kind, **options):
    """An optimizer of another package, imported where it is used."""

    def make(params):
        return getattr(pytest.importorskip(package), kind)(params, **options)

    return make


def schedule_free(kind, **options):
    def make(params):
        optimizer = of("schedulefree", kind, **options)(params)
        optimizer.train()
        return optimizer

    return make


READABLE = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "SGD, Nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, maximize=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3),
    "AdamW, loop": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3, foreach=False),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, lr_decay=0.1, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.0005, weight_decay=0.1),
    "RMSprop, momentum": lambda params: torch.optim.RMSprop(params, lr=0.0005, momentum=0.9, centered=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.004, weight_decay=0.1),
    "NAdam, decoupled": lambda params: torch.optim.NAdam(
        params, lr=0.004, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01, weight_decay=0.1),
    "RAdam, decoupled": lambda params: torch.optim.RAdam(
        params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01, weight_decay=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01, weight_decay=0.1),
    "Muon": lambda params: torch.optim.Muon(matrices(params), lr=0.02, weight_decay=0.1),
}
"""By what `read_step` makes of them."""
TWO_POINTS = {
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0, weight_decay=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.002),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, weight_decay=0.1),
}
OTHERS = {
    "AdamP": of("adamp", "AdamP", lr=0.01, weight_decay=0.1),
    "SGDP": of("adamp", "SGDP", lr=0.05, momentum=0.9, weight_decay=0.01),
    "RiemannianAdam": of("geoopt.optim", "RiemannianAdam", lr=0.01, weight_decay=0.1),
    "Lion": of("lion_pytorch", "Lion", lr=0.003, weight_decay=0.1),
    "AdamWScheduleFree": schedule_free("AdamWScheduleFree", lr=0.01, weight_decay=0.1),
    "SGDScheduleFree": schedule_free("SGDScheduleFree", lr=0.05, weight_decay=0.1),
}
"""Of other packages."""
ALL = READABLE | TWO_POINTS | OTHERS


def watched(model, optimizer, folder, *, steps=STEPS, names=None, each=None, **options):
    """A training of all weights with their single rows recorded: the watch, the saved weights, their names."""
    names = stepped(model, optimizer) if names is None else names
    with watch(optimizer, model, to=folder, record_rows=names, **options) as watcher:
        history = train(model, optimizer, steps, each=each)
    return watcher, history, names


# Angle, radius and update


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("model", MODELS)
def test_every_row_of_every_weight_goes_where_the_saved_weights_went(model, kind, tmp_path):
    network = MODELS[model]()
    optimizer = ALL[kind](list(network.parameters()))
    watcher, history, names = watched(network, optimizer, tmp_path)
    assert set(watcher.names) == set(names)
    assert_recorded(watcher, history, names, run=read_run(tmp_path))
    assert any(np.abs(quantities(history[-1], [name])["angle"]).max() > 1e-3 for name in names), "nothing turned"


@pytest.mark.parametrize("kind", ["SGD, momentum", "Adam", "AdamW, foreach", "AdamW, fused", "RAdam", "Adadelta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_half_and_double_precision(dtype, kind, tmp_path):
    """Half-precision weights round: they turn less than the state of the optimizer says."""
    network = llama().to(dtype)
    optimizer = ALL[kind](list(network.parameters()))
    watcher, history, names = watched(network, optimizer, tmp_path)
    atol = 1e-6 if dtype == torch.bfloat16 else 1e-9
    assert_recorded(watcher, history, names, run=read_run(tmp_path), atol=atol)


def test_bfloat16_weights_that_a_small_rate_does_not_move(tmp_path):
    network = llama().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-7, weight_decay=0.0)
    watcher, history, names = watched(network, optimizer, tmp_path)
    assert_recorded(watcher, history, names, run=read_run(tmp_path))
    assert watcher.latest()["model.norm.weight"]["angle"]["max"] == 0.0


@pytest.mark.parametrize("kind", ["AdamW", "SGD, momentum", "RAdam"])
def test_all_that_is_recorded_of_any_row(kind, tmp_path):
    network = resnet().double()
    watcher, history, names = watched(network, ALL[kind](list(network.parameters())), tmp_path)
    everything = ("radius", "angle", "update", "radial_share", "defect", "gradient_norm")
    assert_recorded(watcher, history, names, run=read_run(tmp_path), atol=1e-9, of=everything)


def test_directions_in_float32():
    """The radial share is a quotient of small numbers, as exact as the weights can hold the update."""
    network = llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    with watch(optimizer, network) as watcher:
        history = train(network, optimizer, STEPS)
    allowed = {
        "radial_share": lambda numbers: 1e-5 + 1e-6 / max(numbers["update"][numbers["update"] > 0].min(), 1e-9),
        "defect": lambda numbers: 1e-5,
        "gradient_norm": lambda numbers: 1e-5 * numbers["gradient_norm"].max(),
    }
    assert_recorded(watcher, history, stepped(network, optimizer), atol=allowed, of=tuple(allowed))


def test_weights_that_change_between_the_steps(tmp_path):
    """As under a clamp, a copy of averaged weights or a pruning: the next step starts where the weights are."""
    network = llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)

    def scale(step):
        with torch.no_grad():
            for param in network.parameters():
                param.mul_(1.1).clamp_(-0.9, 0.9)

    watcher, history, names = watched(network, optimizer, tmp_path, each=scale)
    assert_recorded(watcher, history, names, run=read_run(tmp_path))


@pytest.mark.parametrize("kind", ["AdamW", "SGD, momentum", "RAdam"])
def test_weights_that_another_hook_changes_after_the_step(kind, tmp_path):
    """As optimizers on spheres are often written: what counts is where the weights are after `step()`."""
    network = llama()
    optimizer = ALL[kind](list(network.parameters()))

    def project(*_):
        with torch.no_grad():
            for param in network.parameters():
                param.div_(param.norm())

    project()
    optimizer.register_step_post_hook(project)
    watcher, history, names = watched(network, optimizer, tmp_path)
    assert_recorded(watcher, history, names, run=read_run(tmp_path))


class Twisted(torch.optim.AdamW):
    """Keeps a state as AdamW does, and steps in another way."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(param)}
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
            state["exp_avg"].lerp_(param.grad, 0.1)
            state["exp_avg_sq"].lerp_(param.grad.square(), 0.001)
            param.mul_(1.05).sub_(0.1 * state["exp_avg"])


class Enlarging(torch.optim.AdamW):
    """Calls the step that it overrides, whose hooks torch may call once more."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.mul_(1.05).add_(0.01)


class Lion(torch.optim.Optimizer):
    """Has a name that is known, and another step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.5)
            param.sub_(0.03 * self.state[param]["exp_avg"].tanh())


class AdamWScheduleFree(torch.optim.Optimizer):
    """Has a name that is known, and no state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(0.3 * param.grad)


class Misread(Lion):
    """Its reader is wrong about the rate."""


class MisreadAdam(Twisted):
    """Its reader is that of the class whose step it replaces."""


@st.scheme.register(Misread)
def read_misread(taken):
    gradient = taken.gradient()
    return st.scheme.Step(a=gradient, b=torch.ones_like(gradient), lr=taken.setting("lr"))


st.scheme.register(MisreadAdam)(st.scheme.read_adam)


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("kind", [Twisted, Lion, AdamWScheduleFree, Misread, MisreadAdam])
def test_an_optimizer_that_does_not_do_what_its_name_or_state_says_is_observed_from_two_points(kind, tmp_path):
    network = llama()
    watcher, history, names = watched(network, kind(list(network.parameters())), tmp_path)
    assert_recorded(watcher, history, names, run=read_run(tmp_path))
    assert "effective_lr" in watcher.missing
    assert "effective_lr" not in set(watcher.records()["quantity"])


@pytest.mark.filterwarnings("always::UserWarning")
def test_a_step_that_calls_the_step_of_its_class_is_one_step(tmp_path):
    network = llama()
    torch.optim.AdamW(network.parameters())  # from now on torch calls hooks in the inner step as well
    watcher, history, names = watched(network, Enlarging(list(network.parameters()), lr=0.01), tmp_path)
    assert_recorded(watcher, history, names, run=read_run(tmp_path))


def test_rows_that_are_zero_have_no_direction():
    """Biases and LoRA's second factors start so; nothing is NaN, and what is beside them is right."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watch(optimizer, model) as watcher:
        history = train(model, optimizer, 3, loss=lambda m, step: (m(torch.randn(5, 4)) - 1).square().mean())
    table = watcher.records()
    assert table.loc[table["quantity"].isin(["radius", "angle", "collapsed", "lr"]), "value"].notna().all()
    collapsed = values_of(table[table["quantity"] == "collapsed"], ("step", "group", "statistic"))
    assert collapsed[0, "2.weight", "mean"] == 1.0
    assert collapsed[1, "2.weight", "mean"] == collapsed[0, "0.weight", "mean"] == 0.0
    only = table["group"].isin(["0.weight", "2.bias"])
    found = values_of(table[only & (table["quantity"] == "angle")], ("step", "group", "statistic"))
    for step, point in enumerate(history):
        for name in ("0.weight", "2.bias"):
            for statistic, value in statistics(quantities(point, [name])["angle"]).items():
                assert found[step, name, statistic] == pytest.approx(value, abs=1e-6)


# Names and rows


def test_names_are_those_of_the_model_within_data_parallelism():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for wrapped in (nn.DataParallel(model), torch.compile(nn.DataParallel(model), backend="eager")):
        with watch(optimizer, wrapped, only="1.*") as watcher:
            train(model, optimizer, 2, loss=lambda m, step: m(torch.randn(5, 4)).square().mean())
        assert set(watcher.labels()) == {"1.weight", "1.bias"}


def test_names_are_those_of_a_scripted_model():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 4)))
    assert st.watch(torch.optim.SGD(model.parameters(), lr=0.1), model).names == ("0.weight", "0.bias")


def test_names_and_specs_are_those_of_the_model(tmp_path):
    network = qwen3()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    watcher = watch(optimizer, network, to=tmp_path)
    with watcher:
        train(network, optimizer, 1)
    params = dict(network.named_parameters())
    assert "lm_head.weight" not in params  # tied to the embedding
    assert set(watcher.names) == set(params)
    assert list(watcher.latest()) == list(params)
    about = {group["name"]: group for group in read_run(tmp_path).about["groups"]}
    for name, param in params.items():
        assert about[name].get("spec", about[name].get("layout")) == spec_of(param)
        assert about[name]["rows"] == (len(param) if param.ndim >= 2 else 1)


def test_slices_of_one_number_are_one_row():
    """The gains of weight_norm, (n, 1), and weights of one input: each number has only a sign, the vector turns."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    network.append(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    with watch(optimizer, network) as watcher:
        history = train(network, optimizer, 12, loss=lambda model, _: model(torch.randn(16, 1)).square().mean())
    for name in ("0.weight", "2.parametrizations.weight.original0"):
        expected = turned(*(tensors[name].double().numpy().T for tensors in (history[-1].before, history[-1].after)))
        assert watcher.latest()[name]["angle"]["median"] == pytest.approx(expected.item(), rel=1e-3)
    assert not [sentence for sentence in watcher.verdict() if sentence.kind == "frozen"]


def test_what_is_not_stepped_is_left_out():
    network = llama()
    network.model.norm.weight.requires_grad_(False)
    network.extra = nn.ParameterDict(
        {"empty": nn.Parameter(torch.zeros(0, 4)), "complex": nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))}
    )
    params = [param for name, param in network.named_parameters() if name != "lm_head.weight"]
    watcher = watch(torch.optim.SGD(params, lr=0.1), network)
    left_out = {"model.norm.weight", "lm_head.weight", "extra.empty", "extra.complex"}
    assert set(watcher.names) == set(dict(network.named_parameters())) - left_out


def test_names_come_from_the_optimizer_where_no_model_is_given(tmp_path):
    network = resnet()
    named = torch.optim.AdamW(network.named_parameters(), lr=0.01)
    with watch(named) as watcher:
        history = train(network, named, 3)
    assert set(watcher.names) == set(dict(network.named_parameters()))
    assert_recorded(watcher, history, stepped(network, named))

    unnamed = torch.optim.SGD([{"params": matrices(network.parameters())}, {"params": [network.fc.bias]}], lr=0.1)
    assert set(watch(unnamed).names) == {"group 0, parameter 0", "group 1, parameter 0"}


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("fc.*", ["fc.weight", "fc.bias"]),
        (["*.bn1.bias", "conv1.weight"], ["conv1.weight", "layer1.bn1.bias", "layer2.bn1.bias"]),
        (["layer1.*", "*.shortcut.0.weight"], None),
    ],
)
def test_only_chooses_by_patterns(only, chosen):
    network = resnet()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    if chosen is None:
        chosen = [name for name, _ in network.named_parameters() if name.startswith("layer1.") or "cut.0.w" in name]
    with watch(optimizer, network, only=only) as watcher:
        history = train(network, optimizer, 3)
    assert set(watcher.names) == set(chosen)
    assert_recorded(watcher, history, chosen)


def test_a_pattern_that_matches_nothing_is_an_error_with_names():
    network = resnet()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for only in ("head.*", ["head.*"], ["fc.*", "head.*"]):
        with pytest.raises(ValueError, match=r"head\.\*"):
            watch(optimizer, network, only=only)
    with pytest.raises(ValueError, match=r"conv1\.weight"):
        watch(optimizer, network, only=["head.*"])


def test_single_rows_are_thinned_where_nobody_asked_for_them(tmp_path):
    network = llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    with watch(optimizer, network, to=tmp_path, rows_every=2) as watcher:
        history = train(network, optimizer, 4)
    rows = read_run(tmp_path).rows
    assert set(rows["step"]) == {0, 2}
    assert set(rows["group"]) == set(watcher.names)
    chosen = rows[(rows["quantity"] == "angle") & (rows["step"] == 2) & (rows["group"] == "lm_head.weight")]
    assert 32 <= len(chosen) <= 64
    gaps = np.diff(sorted(chosen["row"]))
    assert gaps.max() <= gaps.min() + 1
    angles = quantities(history[2], ["lm_head.weight"])["angle"]
    np.testing.assert_allclose(chosen["value"], angles[chosen["row"]], atol=1e-6)


# Labels and what is recorded of whom

ON_ALL = {"radius", "angle", "update", "radial_share", "defect", "gradient_norm", "collapsed", "lr"}
ON_INVARIANT = {"velocity", "taylor", "radial", "direction_norm", "nu", "equilibrium_radius", "equilibrium_angle"}
PHENOMENA = {"deformation", "gradient_memory", "l2_memory", "radius_ratio"}


def recorded(table, group):
    return set(table[table["group"] == group]["quantity"])


@pytest.mark.parametrize("phenomena", [False, True])
def test_groups_label_the_model_and_choose_what_is_recorded(phenomena):
    network = resnet()
    groups = st.find_groups(network, images())
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
    with watch(optimizer, groups, phenomena=phenomena) as watcher:
        before = watcher.labels()
        history = train(network, optimizer, STEPS)
    proved = {name for group in groups.groups for name in group.names}
    assert proved == {name for name, param in network.named_parameters() if param.ndim == 4}
    expected = {name: "invariant" if name in proved else "not invariant" for name, _ in network.named_parameters()}
    assert before == watcher.labels() == expected
    assert_recorded(watcher, history, stepped(network, optimizer))
    table = watcher.records()
    for name in expected:
        more = ON_INVARIANT | (PHENOMENA if phenomena else set()) if name in proved else set()
        assert recorded(table, name) == ON_ALL | {"effective_lr"} | more, name
    assert table["value"].notna().all()
    velocity = values_of(table[table["quantity"] == "velocity"], ("step", "group", "statistic"))
    for step, point in enumerate(history):
        angle = quantities(point, ["conv1.weight"])["angle"]
        assert velocity[step, "conv1.weight", "max"] == pytest.approx(math.tan(angle.max()), rel=1e-4)


def test_invariant_rows_of_an_optimizer_that_cannot_be_read():
    network = resnet()
    optimizer = torch.optim.Adadelta(network.parameters())
    with watch(optimizer, st.find_groups(network, images())) as watcher:
        train(network, optimizer, 2)
    table = watcher.records()
    assert recorded(table, "conv1.weight") == ON_ALL | {"velocity", "taylor"}
    assert recorded(table, "fc.weight") == ON_ALL


class Hybrid(torch.optim.Optimizer):
    """Steps matrices with momentum and vectors without, as timm's Muon does it in its own way."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            step = param.grad
            if param.ndim > 1:
                step = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param)).lerp_(param.grad, 0.1)
            param.sub_(0.1 * step)


def test_joint_rows_whose_parameters_have_states_of_different_kinds():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 5))
    groups = st.find_groups(network, images())
    with watch(Hybrid(network.parameters(), {"weight_decay": 0.1}), groups) as watcher:
        [optimizer] = watcher.optimizers
        history = train(network, optimizer, 6)
    names = ["1.weight", "1.bias"]
    x, y = (rows_of([tensors[name] for name in names], 1) for tensors in (history[-1].before, history[-1].after))
    assert watcher.latest()[" + ".join(names)]["angle"]["max"] == pytest.approx(turned(x, y).item(), rel=1e-3)
    [share] = [sentence.text for sentence in watcher.verdict() if sentence.kind == "share"]
    assert share.endswith("weight decay does not regularize them.")  # no equilibrium is known


def test_joint_rows_are_one_group_and_the_rest_is_watched_too():
    network = NETWORKS["LN"].build()
    groups = st.find_groups(network, torch.randn(8, 2, 6, 6))
    specs = {tuple(group.names): group.spec for group in groups.groups}
    assert groups.joint
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    names = stepped(network, optimizer)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(0.01)  # no weight begins without a direction
    params, history = dict(network.named_parameters()), []
    with watch(optimizer, groups) as watcher:
        for _ in backward_passes(network, 3):
            before = clones(params)
            optimizer.step()
            history.append(Point(before, clones(params), {}))
    joint = {name for names in groups.joint for name in names}
    alone = [name for name in names if name not in joint]
    assert set(watcher.names) == {" + ".join(names) for names in groups.joint} | set(alone)
    assert_recorded(watcher, history, names, specs=specs)
    labels = watcher.labels()
    assert {labels[" + ".join(names)] for names in groups.joint} == {"invariant"}
    assert {labels[name] for name in groups.rest} == {"not invariant"}


def test_rows_that_the_param_groups_declare_are_kept(tmp_path):
    """Heads of queries and keys, as `groups.param_groups()` gives them to an optimizer."""
    network = qwen3()
    groups = st.find_groups(network, **network.dummy_inputs)
    specs = {tuple(group.names): group.spec for group in groups.groups}
    assert any(isinstance(spec, int) for spec in specs.values())
    optimizer = torch.optim.AdamW(groups.param_groups(), lr=0.01)
    with watch(optimizer, network) as watcher:
        history = train(network, optimizer, 3)
    names = stepped(network, optimizer)
    assert_recorded(watcher, history, names, specs=specs)
    labels = watcher.labels()
    assert {labels[name] for name in groups.layouts} == {"invariant"}
    assert {labels[name] for name in groups.rest} == {"untested"}
    assert recorded(watcher.records(), "model.norm.weight").isdisjoint(ON_INVARIANT)


def refuted(history, name):
    """Median over the steps of the median over the rows of |cos(x, ∇L)|, with and without rows of no gradient."""
    found = []
    for rows in (lambda g: np.ones(len(g), dtype=bool), lambda g: g > 0):
        medians = []
        for point in history:
            numbers = quantities(point, [name])
            medians.append(np.median(numbers["defect"][rows(numbers["gradient_norm"])]))
        found.append(np.median(medians))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_refutes_what_is_untested(model):
    network = MODELS[model]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with watch(optimizer, network) as watcher:
        history = train(network, optimizer, 4)
        assert set(watcher.labels().values()) == {"untested"}
        history += train(network, optimizer, 4)
        labels = watcher.labels()
    assert watcher.labels() == labels
    assert set(labels) == set(watcher.names)
    seen = set()
    for name, label in labels.items():
        defects = refuted(history, name)
        if max(defects) < 0.007:
            assert label == "untested", (name, defects)
        elif min(defects) > 0.014:
            assert label == "not invariant", (name, defects)
            seen.add(name)
    assert seen
    if model == "ResNet":
        assert labels["layer1.conv2.weight"] == "untested"
        assert labels["fc.weight"] == "not invariant"
    if model == "Llama":
        assert "not invariant" in {labels[name] for name in labels if "mlp" in name}
    assert not {"invariant"} & set(labels.values())


@pytest.mark.parametrize("phenomena", [False, True])
def test_a_model_without_groups_has_no_quantity_of_invariant_rows(phenomena):
    network = llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    with watch(optimizer, network, phenomena=phenomena) as watcher:
        train(network, optimizer, 3)
    table = watcher.records()
    for name in watcher.names:
        assert recorded(table, name) == ON_ALL | {"effective_lr"}, name
    assert table["value"].notna().all()
    statistics_of = table[table["quantity"] == "angle"]["statistic"]
    assert set(statistics_of) == set(STATISTICS)
    rates = table[table["quantity"] == "lr"]
    assert rates["value"].tolist() == pytest.approx([0.01] * len(rates))


# The effective rate


@pytest.mark.parametrize("kind", READABLE)
def test_the_effective_rate_is_that_of_the_step_as_it_is_read(kind):
    """And the step that is read leads from the point before to the point after."""
    network = llama().double()
    optimizer = ALL[kind](list(network.parameters()))
    params = {name: dict(network.named_parameters())[name] for name in stepped(network, optimizer)}
    with watch(optimizer, network) as watcher:
        for k in range(STEPS):
            network.zero_grad()
            loss_of(network, k).backward()
            before = {name: param.detach().clone() for name, param in params.items()}
            optimizer.step()
            found = watcher.latest()
            for name, param in params.items():
                x, step = before[name], read_step(optimizer, param, before=before[name])
                reached = (1 - step.lr * step.decay) * x - step.lr * step.a / step.b
                np.testing.assert_allclose(rows_of([reached]), rows_of([param]), atol=1e-6, err_msg=name)
                expected = statistics(image_step(x, step, spec_of(param)).effective_lr.double().numpy())
                assert found[name]["effective_lr"] == pytest.approx(expected, rel=1e-4), (name, k)
    assert "effective_lr" not in watcher.missing


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("kind", [*TWO_POINTS, *OTHERS])
def test_what_cannot_be_read_is_said_once_and_has_no_effective_rate(kind, caplog):
    network = llama()
    optimizer = ALL[kind](list(network.parameters()))
    with watch(optimizer, network) as watcher:
        train(network, optimizer, 3)
    has = "effective_lr" in set(watcher.records()["quantity"])
    assert has != ("effective_lr" in watcher.missing)
    if kind in TWO_POINTS:
        assert not has
        assert type(optimizer).__name__ in watcher.missing["effective_lr"]
    if kind in ("Lion", "AdamWScheduleFree"):
        assert has, watcher.missing
    assert sum(type(optimizer).__name__ in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.parametrize("kind", ["AdamW", "SGD, momentum", "Muon", "NAdam", "Adadelta", "AdamP"])
def test_a_watched_training_is_the_same_training(kind):
    """Bit for bit, whatever is recorded."""
    network = llama()
    twin = copy.deepcopy(network)
    history = {}
    for each, on in ((network, True), (twin, False)):
        optimizer = ALL[kind](list(each.parameters()))
        watcher = watch(optimizer, each).start() if on else None
        history[on] = train(each, optimizer, 3)
        if watcher is not None:
            watcher.stop()
    for one, other in zip(history[True], history[False], strict=True):
        assert all(torch.equal(one.after[name], other.after[name]) for name in one.after)


def test_the_packages_are_other_peoples():
    """Three of them at least are installed wherever the tests run."""
    found = [name for name in ("adamp", "geoopt", "lion_pytorch", "schedulefree") if importlib.util.find_spec(name)]
    assert {"adamp", "geoopt"} <= set(found)

"""Several optimizers of one model in one watch and one run, and models in several parts, as torchtitan has them."""

import pytest
import torch
from saved import Point, assert_recorded, clones, llama, loss_of, quantities, resnet, stepped, values_of
from torch import nn

import steradian as st
from steradian import watch
from steradian.watching.records import read_run

from networks import NETWORKS
from small import series

pytest.importorskip("transformers")
STEPS = 6


def muon_and_adamw(model):
    """Muon for the matrices within the layers, AdamW for the rest."""
    inner = [param for name, param in model.named_parameters() if "layers" in name and param.ndim == 2]
    others = [param for name, param in model.named_parameters() if "layers" not in name or param.ndim != 2]
    muon = torch.optim.Muon(inner, lr=0.02, weight_decay=0.1)
    return muon, torch.optim.AdamW(others, lr=0.003, weight_decay=0.1)


def train(models, step_of, steps=STEPS, *, loss=None, first=0):
    """Train, and save all weights around each step; `step_of(k)` steps what is stepped at the k-th."""
    models = models if isinstance(models, list) else [models]
    params = {(part, name): param for part, model in enumerate(models) for name, param in model.named_parameters()}
    history = []
    for k in range(first, first + steps):
        for model in models:
            model.zero_grad()
        (loss(k) if loss is not None else loss_of(models[0], k)).backward()
        before = clones(params)
        step_of(k)
        history.append(Point(before, clones(params), {}))
    return history


def of_one(history, part=0):
    """The same points with the plain names of one part."""
    plain = [{name: tensor for (k, name), tensor in each.before.items() if k == part} for each in history]
    after = [{name: tensor for (k, name), tensor in each.after.items() if k == part} for each in history]
    return [Point(x, y, {}) for x, y in zip(plain, after, strict=True)]


# Muon and AdamW


@pytest.mark.parametrize("order", ["as given", "the other way round"])
def test_muon_and_adamw_are_one_run(order, tmp_path):
    network = llama()
    muon, adamw = muon_and_adamw(network)
    stepping = (muon, adamw) if order == "as given" else (adamw, muon)
    names = stepped(network, muon, adamw)
    with watch([muon, adamw], network, to=tmp_path / "run", record_rows=names) as watcher:
        history = of_one(train(network, lambda k: [optimizer.step() for optimizer in stepping]))
        assert watcher.next_step == STEPS
    run = read_run(tmp_path / "run")
    assert set(watcher.names) == set(names) == set(dict(network.named_parameters()))
    assert_recorded(watcher, history, names, run=run)
    assert list(watcher.latest()) == names
    rates = values_of(run.table[run.table["quantity"] == "lr"], ("step", "group", "statistic"))
    for name in names:
        expected = 0.02 if name in stepped(network, muon) else 0.003
        assert rates[STEPS - 1, name, "mean"] == pytest.approx(expected)
    assert set(run.table["run"]) == {"run"}
    assert {group["name"] for group in run.about["groups"]} == set(names)


def test_both_are_read():
    """The effective rate is recorded for the weights of each."""
    network = llama()
    muon, adamw = muon_and_adamw(network)
    with watch((muon, adamw), network) as watcher:
        train(network, lambda k: (muon.step(), adamw.step()), 3)
    for name in watcher.names:
        assert len(series(watcher.records(), "effective_lr", name)) == 3, name


def test_one_of_them_cannot_be_read():
    network = llama()
    (muon, _), others = muon_and_adamw(network), []
    others = [p for p in network.parameters() if all(p is not q for q in muon.param_groups[0]["params"])]
    adadelta = torch.optim.Adadelta(others)
    with watch([muon, adadelta], network) as watcher:
        history = of_one(train(network, lambda k: (muon.step(), adadelta.step()), 3))
    table = watcher.records()
    assert_recorded(watcher, history, stepped(network, muon, adadelta))
    read = set(table[table["quantity"] == "effective_lr"]["group"])
    assert read == set(stepped(network, muon))
    assert "effective_lr" in watcher.missing
    assert table["value"].notna().all()


@pytest.mark.parametrize("every", [2, 3])
def test_both_are_observed_at_the_same_steps(every):
    network = llama()
    muon, adamw = muon_and_adamw(network)
    with watch([muon, adamw], network, every=every) as watcher:
        history = of_one(train(network, lambda k: (muon.step(), adamw.step())))
    for name in watcher.names:
        found = series(watcher.records(), "angle", name, "mean")
        assert list(found) == list(range(0, STEPS, every))
        expected = {step: quantities(history[step], [name])["angle"].mean() for step in found}
        assert found == pytest.approx(expected, abs=1e-6)


def test_what_is_logged_belongs_to_the_step():
    network = llama()
    muon, adamw = muon_and_adamw(network)
    with watch([muon, adamw], network) as watcher:

        def both(k):
            muon.step()
            adamw.step()
            watcher.log(loss=float(k))

        train(network, both, 4)
    assert series(watcher.records(), "loss", "", "mean") == {step: float(step) for step in range(4)}


# Steps


def two(seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"often": nn.Linear(4, 3), "seldom": nn.Linear(3, 2)})
    optimizers = (
        torch.optim.AdamW(model["often"].parameters(), lr=0.01),
        torch.optim.SGD(model["seldom"].parameters(), lr=0.1),
    )

    def loss(k):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(k))
        return (model["seldom"](model["often"](inputs).tanh()) - 1).square().mean()

    return model, optimizers, loss


def test_an_optimizer_that_steps_every_second_time():
    model, (often, seldom), loss = two()
    with watch([often, seldom], model) as watcher:
        history = of_one(train(model, lambda k: (often.step(), k % 2 or seldom.step()), 7, loss=loss))
    table = watcher.records()
    for name in watcher.names:
        steps = list(range(7)) if name.startswith("often") else [0, 2, 4, 6]
        found = series(table, "angle", name, "mean")
        assert list(found) == steps
        assert found == pytest.approx(
            {step: quantities(history[step], [name])["angle"].mean() for step in steps}, abs=1e-6
        )


def test_an_optimizer_that_begins_later():
    """As where a part of the model is frozen in the first epoch."""
    model, (often, seldom), loss = two()
    with watch([often, seldom], model) as watcher:
        train(model, lambda k: (often.step(), k < 3 or seldom.step()), 6, loss=loss)
    table = watcher.records()
    assert list(series(table, "angle", "often.weight", "mean")) == [0, 1, 2, 3, 4, 5]
    assert list(series(table, "angle", "seldom.weight", "mean")) == [3, 4, 5]


def test_alternating_trainings_count_rounds():
    """A generator after two steps of its critic: the second step of the critic begins a new step."""
    model, (critic, generator), loss = two()
    with watch([critic, generator], model) as watcher:
        train(model, lambda k: (critic.step(), critic.step(), generator.step()), 3, loss=loss)
    table = watcher.records()
    assert list(series(table, "angle", "often.weight", "mean")) == [0, 1, 2, 3, 4, 5]
    assert list(series(table, "angle", "seldom.weight", "mean")) == [1, 3, 5]


def test_a_run_goes_on_where_it_stopped(tmp_path):
    model, (often, seldom), loss = two()
    for first in (0, 3):
        with watch([often, seldom], model, to=tmp_path / "run"):
            train(model, lambda k: (often.step(), seldom.step()), 3, loss=loss, first=first)
    table = read_run(tmp_path / "run").table
    for name in ("often.weight", "seldom.weight"):
        assert list(series(table, "angle", name, "mean")) == [0, 1, 2, 3, 4, 5]


def test_stopping_ends_the_watch_of_all():
    model, (often, seldom), loss = two()
    watcher = watch([often, seldom], model).start()
    train(model, lambda k: (often.step(), seldom.step()), 2, loss=loss)
    watcher.stop()
    train(model, lambda k: (often.step(), seldom.step()), 2, loss=loss)
    assert set(watcher.records()["step"]) == {0, 1}


def test_one_optimizer_in_a_list_is_that_optimizer():
    tables = []
    for wrap in (lambda optimizer: optimizer, lambda optimizer: [optimizer]):
        network = llama()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        with watch(wrap(optimizer), network, run="run") as watcher:
            train(network, lambda k, step=optimizer.step: step(), 3)
        table = watcher.records().query("quantity != 'seconds'")
        tables.append(values_of(table, ("step", "group", "quantity", "statistic")))
    assert tables[0] == tables[1]


# Groups


def test_labels_with_groups():
    network = resnet()
    groups = st.find_groups(network, torch.randn(6, 3, 8, 8))
    filters = [p for p in network.parameters() if p.ndim == 4]
    others = [p for p in network.parameters() if p.ndim != 4]
    optimizers = [torch.optim.SGD(filters, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    with watch(optimizers, groups) as watcher:
        history = of_one(train(network, lambda k: [optimizer.step() for optimizer in optimizers], 3))
    labels = watcher.labels()
    assert {labels[name] for name in groups.layouts} == {"invariant"}
    assert {labels[name] for name in groups.rest} == {"not invariant"}
    assert_recorded(watcher, history, stepped(network, *optimizers))


@pytest.mark.filterwarnings("always::UserWarning")
def test_joint_rows_that_two_optimizers_share():
    """A weight and its bias before LN: Muon steps one and AdamW the other. Every weight is in one group."""
    network = NETWORKS["LN"].build()
    groups = st.find_groups(network, torch.randn(8, 2, 6, 6))
    assert groups.joint
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]

    def loss(k):
        return network(torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(k))).square().mean()

    with watch(optimizers, groups) as watcher:
        train(network, lambda k: [optimizer.step() for optimizer in optimizers], 3, loss=loss)
    inside = sorted(name for group in watcher.names for name in group.split(" + "))
    assert inside == sorted(dict(network.named_parameters()))
    for group in watcher.names:
        assert list(series(watcher.records(), "angle", group, "mean")) == [0, 1, 2], group


# Parts of a model


class Plain:
    """Steps all of its optimizers, and is no optimizer itself."""

    def __init__(self, parts, make):
        self.optimizers = [make(part) for part in parts]

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self, *given, **named):
        for optimizer in self.optimizers:
            optimizer.step(*given, **named)

    def zero_grad(self, *given, **named):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*given, **named)


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer of all parameters, for the hooks of others, that steps those of the parts."""

    def __init__(self, parts, make):
        self.optimizers = [make(part) for part in parts]
        params = [param for part in parts for param in part.parameters()]
        super().__init__(params, {"lr": 0.01})

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self, *given, **named):
        for optimizer in self.optimizers:
            optimizer.step(*given, **named)

    def zero_grad(self, *given, **named):
        super().zero_grad(*given, **named)
        for optimizer in self.optimizers:
            optimizer.zero_grad(*given, **named)


def parts(names=("layer", "layer")):
    """Two parts of a pipeline; each has a module of the given name."""
    torch.manual_seed(0)
    sizes = ((5, 4), (4, 3))
    made = [nn.ModuleDict({name: nn.Linear(*size)}) for name, size in zip(names, sizes, strict=True)]

    def loss(k):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(k))
        for part, name in zip(made, names, strict=True):
            x = part[name](x).tanh()
        return (x - 1).square().mean()

    return made, loss


def adamw(part):
    return torch.optim.AdamW(part.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [Plain, Container])
def test_model_parts_with_an_optimizer_each(kind, tmp_path):
    made, loss = parts(("first", "second"))
    container = kind(made, adamw)
    with watch(container, made, to=tmp_path / "run") as watcher:
        history = train(made, lambda k: container.step(), loss=loss)
    names = {0: ["first.weight", "first.bias"], 1: ["second.weight", "second.bias"]}
    assert set(watcher.names) == {*names[0], *names[1]}
    merged = [
        Point(
            {name: tensor for (_, name), tensor in each.before.items()},
            {name: tensor for (_, name), tensor in each.after.items()},
            {},
        )
        for each in history
    ]
    assert_recorded(watcher, merged, [*names[0], *names[1]])
    assert set(read_run(tmp_path / "run").table["step"]) == set(range(STEPS))


@pytest.mark.parametrize("kind", [Plain, Container, lambda made, make: [make(part) for part in made]])
def test_parts_with_the_same_names_are_told_apart(kind):
    made, loss = parts()
    optimizers = kind(made, adamw)
    step = optimizers.step if hasattr(optimizers, "step") else lambda: [each.step() for each in optimizers]
    with watch(optimizers, made) as watcher:
        history = train(made, lambda k: step(), loss=loss)
    assert len(set(watcher.names)) == 4
    table = watcher.records()
    for kept in ("layer.weight", "layer.bias"):
        groups = [name for name in watcher.names if kept in name]
        assert len(groups) == 2
        for part, group in enumerate(groups):
            found = series(table, "angle", group, "mean")
            points = of_one(history, part)
            expected = {k: quantities(point, [kept])["angle"].mean() for k, point in enumerate(points)}
            assert found == pytest.approx(expected, abs=1e-6), group


def test_patterns_choose_among_the_parts():
    made, loss = parts(("first", "second"))
    container = Container(made, adamw)
    with watch(container, made, only="*.weight") as watcher:
        train(made, lambda k: container.step(), 2, loss=loss)
    assert set(watcher.names) == {"first.weight", "second.weight"}


def test_a_container_of_several_optimizers_for_each_part():
    """Muon and AdamW in each of two parts: one call of `step()` is one step."""
    made, loss = parts(("first", "second"))
    optimizers = []
    for part in made:
        (module,) = part.values()
        optimizers += [torch.optim.Muon([module.weight], lr=0.02), torch.optim.AdamW([module.bias], lr=0.01)]
    container = Plain([], adamw)
    container.optimizers = optimizers
    with watch(container, made) as watcher:
        train(made, lambda k: container.step(), 4, loss=loss)
    assert len(watcher.names) == 4
    for name in watcher.names:
        assert list(series(watcher.records(), "angle", name, "mean")) == [0, 1, 2, 3]


def test_parts_on_which_the_container_has_hooks_of_others():
    """torchtitan registers hooks on the container; they go on being called, once for each step."""
    made, loss = parts()
    container = Container(made, adamw)
    calls = []
    container.register_step_pre_hook(lambda *_: calls.append("pre"))
    container.register_step_post_hook(lambda *_: calls.append("post"))
    with watch(container, made) as watcher:
        train(made, lambda k: container.step(), 3, loss=loss)
    assert calls == ["pre", "post"] * 3
    assert set(watcher.records()["step"]) == {0, 1, 2}


def test_two_optimizers_of_the_same_weights_have_names_of_their_own(tmp_path):
    """Adam first, then L-BFGS, which has no gradient of its own point."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    adam, lbfgs = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.LBFGS(model.parameters())
    x = torch.linspace(0, 1, 20)[:, None]

    def closure():
        model.zero_grad()
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        return loss

    with st.watch([adam, lbfgs], model, every=1, to=tmp_path) as watch:
        for optimizer in (adam, adam, adam, lbfgs, lbfgs):
            optimizer.step(closure)
    assert len(set(watch.names)) == 8
    angles = watch.records().query("quantity == 'angle' and statistic == 'max'")
    assert angles.groupby("group", observed=True).size().to_dict() == {
        name: 2 if "optimizer 1" in name else 3 for name in watch.names
    }
    assert watch.error is None
    assert not watch.alerts

"""What counts as a step, and what is recorded of it, in the ways that people train."""

import copy
import gc
import io
import math
import sys
import threading
import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import steradian as st
from steradian import geometry, watch
from steradian.watching.buffer import Buffer
from steradian.watching.records import read_run

from networks import NETWORKS, backward_passes
from small import OPTIMIZERS, groups_of, pair, rows, series, set_gradients, train

KINDS = tuple(OPTIMIZERS)
QUANTITIES = ("radius", "angle", "velocity", "effective_lr", "defect", "gradient_norm", "radial", "equilibrium_radius")


def assert_same_records(found, expected, *, rel=1e-9, groups=("w", "v")):
    for group in groups:
        for quantity in QUANTITIES:
            here, there = series(found, quantity, group), series(expected, quantity, group)
            assert list(here) == list(there), (group, quantity)
            assert here == pytest.approx(there, rel=rel, abs=1e-3 * rel), (group, quantity)


def plain(kind, steps):
    optimizer, params = pair(kind)
    with watch(optimizer, phenomena=False) as watcher:
        train(optimizer, params, steps)
    return watcher.records()


def without_memory(table):
    """Without what depends on the steps that were observed before: the mean gradient in the equilibrium."""
    return table[table["quantity"] != "equilibrium_radius"]


# What is a step


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients_are_one_step(kind):
    optimizer, params = pair(kind)
    with watch(optimizer, phenomena=False) as watcher:
        for step in range(4):
            set_gradients(params, step)
            whole = [param.grad.clone() for param in params]
            optimizer.zero_grad()
            for share in (0.25, 0.75):
                sum((share * g * p).sum() for g, p in zip(whole, params, strict=True)).backward()
            optimizer.step()
    assert_same_records(watcher.records(), plain(kind, 4))


def test_a_closure_is_part_of_its_step():
    model = NETWORKS["BN"].build().double()
    groups = st.find_groups(model, torch.randn(8, 2, 6, 6, dtype=torch.float64))
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, twin))
    with watch(optimizer, groups) as watcher:
        passes = backward_passes(model, 3)

        def closure():
            next(passes)
            return torch.zeros(())

        for _ in range(3):
            optimizer.step(closure)
    twins = st.find_groups(twin, torch.randn(8, 2, 6, 6, dtype=torch.float64))
    with watch(other, twins) as expected:
        for _ in backward_passes(twin, 3):
            other.step()
    assert_same_records(watcher.records(), expected.records(), groups=("0.weight", "3.weight"))


def nesterov(params, **options):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, **options)


@pytest.mark.parametrize("make", [nesterov, partial(nesterov, foreach=True), "AdamWScheduleFree"])
def test_a_closure_whose_gradient_the_step_overwrites(make):
    """As Lightning passes one: angles are those of the weights, and no gradient of another step is recorded."""
    make = getattr(pytest.importorskip("schedulefree"), make) if isinstance(make, str) else make
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 5))
    optimizer, expected = make([weight]), {}
    if hasattr(optimizer, "train"):
        optimizer.train()

    def closure():
        weight.grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(len(expected)))
        return torch.zeros(())

    with watch(optimizer, every=1) as watcher:
        for step in range(5):
            before = weight.detach().clone()
            optimizer.step(closure)
            expected[step] = float(geometry.angle(before.double(), weight.detach().double()).max())
    table = watcher.records()
    assert series(table, "angle", "group 0, parameter 0", "max") == pytest.approx(expected, abs=1e-6)
    assert {"defect", "gradient_norm"}.isdisjoint(table["quantity"])
    assert "the gradient that its closure computes" in watcher.missing["defect"]


class Altering(torch.optim.SGD):
    """A step of another library, after which p.grad is no longer ∇L(x)."""

    def __init__(self, params, alter):
        super().__init__(params, lr=0.1)
        self.alter = alter

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            gradient = param.grad
            self.alter(param)
            param.sub_(0.1 * gradient)


ALTERATIONS = {
    "clipped, as by LAMB": lambda param: param.grad.div_(param.grad.norm()),
    "with decay, as by MADGRAD": lambda param: param.grad.data.add_(param.data),
    "freed, as by HeavyBall": lambda param: setattr(param, "grad", None),
}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_step_of_another_library_that_alters_the_gradient(name, nesterov):
    """Rows are not refuted by the decay that it adds to their gradient."""
    [weight] = params = rows((4, 5))
    optimizer, angles, norms = Altering(groups_of(params), ALTERATIONS[name]), {}, {}
    optimizer.param_groups[0]["nesterov"] = nesterov
    with watch(optimizer, every=1) as watcher:
        for step in range(8):
            set_gradients(params, step)
            before, norms[step] = weight.detach().clone(), float(weight.grad.norm(dim=1).max())
            optimizer.step()
            angles[step] = float(geometry.angle(before, weight.detach()).max())
    table = watcher.records()
    assert series(table, "angle", "w", "max") == pytest.approx(angles)
    assert series(table, "gradient_norm", "w", "max") == pytest.approx(norms)
    assert max(series(table, "defect", "w", "max").values()) < 1e-9


def test_equilibria_of_invariant_rows_whose_gradient_is_overwritten_are_unknown():
    params = rows((4, 5))
    optimizer = torch.optim.SGD(groups_of(params), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    with watch(optimizer, every=1) as watcher:
        for step in range(3):
            optimizer.step(lambda step=step: set_gradients(params, step))
    assert watcher.error is None
    assert list(series(watcher.records(), "angle")) == [0, 1, 2]
    assert all(map(math.isnan, series(watcher.records(), "equilibrium_radius").values()))


def test_a_fused_step_that_unscales_the_gradient_itself():
    weight = nn.Parameter(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    optimizer, scaler = nesterov([weight], fused=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    angles, norms = {}, {}
    with watch(optimizer, every=1) as watcher:
        for step in range(4):
            gradient = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            weight.grad, before = 1024 * gradient, weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            angles[step] = float(geometry.angle(before.double(), weight.detach().double()).max())
            norms[step] = float(gradient.norm(dim=1).max())
    table = watcher.records()
    assert series(table, "angle", "group 0, parameter 0", "max") == pytest.approx(angles, abs=2e-6)
    assert series(table, "gradient_norm", "group 0, parameter 0", "max") == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_hook_that_is_registered_in_the_middle_leaves_earlier_steps_as_they_were(kind):
    """From then on the weights are read twice, and no longer the state."""
    expected = plain(kind, 6)
    optimizer, params = pair(kind)
    with watch(optimizer, phenomena=False) as watcher:
        train(optimizer, params, 3)
        optimizer.register_step_post_hook(lambda *_: None)
        train(optimizer, params, 3, first=3)
    assert_same_records(watcher.records(), expected)


class SharpnessAware(torch.optim.SGD):
    """Takes the gradient at other weights than those that it steps from."""

    @torch.no_grad()
    def step(self, closure):
        closure()
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for param in params:
            param.add_(param.grad / param.grad.norm())
        loss = closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old - 0.1 * param.grad)
        return loss


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("make", [SharpnessAware, torch.optim.SGD])
def test_a_closure_at_other_weights_refutes_nothing(make, proved):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    inputs, classes = torch.randn(64, 12), torch.randint(4, (64,))
    groups = st.find_groups(model, inputs) if proved else model
    optimizer = make(model.parameters(), lr=0.1)

    @torch.enable_grad()
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        return loss

    with watch(optimizer, groups, every=1) as watcher:
        for _ in range(20):
            optimizer.step(closure)
    assert watcher.labels()["0.weight"] == ("invariant" if proved else "untested")
    assert not watcher.alerts
    assert ("at other weights" in watcher.missing.get("defect", "")) is (make is SharpnessAware)
    assert watcher.latest()["0.weight"]["gradient_norm"]["min"] > 0


def test_lbfgs_is_seen_from_outside():
    model = NETWORKS["BN"].build().double()
    images = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        return loss

    weight = model[0].weight
    points = [weight.detach().flatten(1).clone()]
    with watch(optimizer, st.find_groups(model, images)) as watcher:
        for _ in range(3):
            optimizer.step(closure)
            points.append(weight.detach().flatten(1).clone())
    turned = [torch.arccos(nn.functional.cosine_similarity(x, y)).mean().item() for x, y in pairwise(points)]
    found = series(watcher.records(), "angle", "0.weight", "mean")
    assert found == pytest.approx(dict(enumerate(turned)), rel=1e-5)
    assert {"effective_lr", "radial", "defect", "gradient_norm"} <= set(watcher.missing)
    assert "defect" not in set(watcher.records()["quantity"])


def test_several_optimizers_at_once():
    one, first = pair("Adam", seed=1)
    other, second = pair("ours", seed=2)
    with watch(one, run="generator", phenomena=False) as left, watch(other, run="critic") as right:
        for step in range(6):
            set_gradients(first, step)
            one.step()
            if step % 3 == 0:
                set_gradients(second, step // 3)
                other.step()
    alone, params = pair("Adam", seed=1)
    with watch(alone, phenomena=False) as expected:
        train(alone, params, 6)
    assert_same_records(left.records(), expected.records())
    alone, params = pair("ours", seed=2)
    with watch(alone) as expected:
        train(alone, params, 2)
    assert_same_records(right.records(), expected.records())
    assert set(right.records()["run"]) == {"critic"}


# Rates


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", [one_cycle, plateau])
def test_the_rate_is_the_one_that_the_step_used(kind, schedule):
    optimizer, params = pair(kind)
    scheduler = schedule(optimizer)
    used = {}
    with watch(optimizer) as watcher:
        for step in range(7):
            used[step] = optimizer.param_groups[0]["lr"]
            set_gradients(params, step)
            optimizer.step()
            scheduler.step(*([1.0] if schedule is plateau else []))
    assert len(set(used.values())) > 1
    assert series(watcher.records(), "lr", statistic="mean") == pytest.approx(used, rel=1e-12)


@pytest.mark.parametrize("make", [torch.optim.Adam, st.optim.Adam])
def test_rates_may_be_tensors(make):
    rate = torch.tensor(0.05, dtype=torch.float64)
    options = {"foreach": False} if make is torch.optim.Adam else {}
    optimizer, params = pair(lambda groups: make(groups, lr=rate, **options))
    with watch(optimizer, phenomena=False) as watcher:
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
            rate.mul_(0.5)
    assert series(watcher.records(), "lr", statistic="mean") == pytest.approx({0: 0.05, 1: 0.025, 2: 0.0125})


# Parameters that come, go, or stand still


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_gradient_is_absent_from_that_step(kind):
    optimizer, params = pair(kind)
    with watch(optimizer, record_rows=["v"]) as watcher:
        for step in range(6):
            set_gradients(params, step)
            if step in (0, 2, 3):
                params[1].grad = None
            optimizer.step()
    table = watcher.records()
    assert list(series(table, "angle", "w")) == list(range(6))
    assert list(series(table, "angle", "v")) == [1, 4, 5]
    alone, others = pair(kind)
    with watch(alone) as expected:
        for step in (1, 4, 5):
            set_gradients(others, step)
            others[0].grad = None
            alone.step()
    there = dict(zip((1, 4, 5), series(expected.records(), "angle", "v").values(), strict=True))
    assert series(table, "angle", "v") == pytest.approx(there, rel=1e-9)
    assert set(watcher.latest()) == {"w", "v"}


def test_frozen_parameters_are_not_recorded():
    params = rows((4, 5), (3, 5))
    params[1].requires_grad_(False)
    optimizer = torch.optim.Adam(groups_of(params), lr=0.01)
    with watch(optimizer) as watcher:
        train(optimizer, params[:1], 3)
    assert set(watcher.records()["group"]) - {""} == {"w"}


@pytest.mark.parametrize("kind", KINDS)
def test_param_groups_that_are_added_later_are_not_followed(kind):
    optimizer, params = pair(kind)
    (late,) = rows((2, 5), seed=9)
    with watch(optimizer, phenomena=False) as watcher:
        train(optimizer, params, 2)
        optimizer.add_param_group({"params": [("late", late)], "rows": "filter"})
        late.grad = torch.ones_like(late)
        train(optimizer, params, 2, first=2)
    assert watcher.error is None
    assert_same_records(watcher.records(), plain(kind, 4))


def test_an_optimizer_that_was_not_told_of_the_rows_is_seen_from_outside():
    model = NETWORKS["BN"].build().double()
    groups = st.find_groups(model, torch.randn(8, 2, 6, 6, dtype=torch.float64))
    optimizer = st.optim.Adam(model.parameters(), lr=0.01)
    radii = []
    with watch(optimizer, groups) as watcher:
        for _ in backward_passes(model, 3):
            radii.append(model[0].weight.detach().flatten(1).norm(dim=1).mean().item())
            optimizer.step()
    assert list(series(watcher.records(), "radius", "0.weight", "mean").values()) == pytest.approx(radii, rel=1e-9)


# Compiled


@pytest.mark.parametrize(
    "kind", ["Adam", "ours", *(pytest.param(k, marks=pytest.mark.slow) for k in ("SGD", "ours, classic"))]
)
def test_a_compiled_step(kind):
    torch._dynamo.reset()
    optimizer, params = pair(kind)
    step = torch.compile(optimizer.step, backend="eager")
    radii, turned, slopes = {}, {}, {}
    with watch(optimizer, phenomena=False) as watcher:
        for k in range(3):
            set_gradients(params, k)
            x, slopes[k] = params[0].detach().clone(), params[0].grad.norm(dim=1).mean().item()
            step()
            radii[k] = x.norm(dim=1).mean().item()
            turned[k] = torch.arccos(nn.functional.cosine_similarity(x, params[0].detach())).mean().item()
    assert watcher.error is None
    # Under Dynamo the bias corrections of torch's Adam are in float32, where 1 − 0.999^t has five digits. So the twin
    # is what this step did, not what an uncompiled one does, and what is read from Adam's state differs by as much.
    for quantity, expected in (("radius", radii), ("gradient_norm", slopes), ("angle", turned)):
        exact = quantity == "gradient_norm" or kind != "Adam"
        found = series(watcher.records(), quantity, statistic="mean")
        assert found == pytest.approx(expected, rel=1e-9 if exact else 2e-5), quantity


def test_a_compiled_model():
    torch._dynamo.reset()
    model = NETWORKS["BN"].build().double()
    twin = copy.deepcopy(model)
    inputs = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    tables = []
    for one in (torch.compile(model, backend="eager"), twin):
        groups = st.find_groups(one, inputs)
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        with watch(optimizer, groups) as watcher:
            for _ in backward_passes(one, 3):
                optimizer.step()
        tables.append((watcher.names, watcher.records()))
    (names, found), (plain_names, expected) = tables
    for name, other in zip(names, plain_names, strict=True):
        assert series(found, "angle", name) == pytest.approx(series(expected, "angle", other), rel=1e-9)


# Copies, checkpoints, several watches


@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_optimizer_can_be_copied_and_saved(kind):
    optimizer, params = pair(kind)
    with watch(optimizer, phenomena=False) as watcher:
        train(optimizer, params, 1)
        twin = copy.deepcopy(optimizer)
        for value in (optimizer, optimizer.state_dict()):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=False)
        others = twin.param_groups[0]["params"]
        train(twin, others, 3, first=1)  # nobody watches the copy
        train(optimizer, params, 1, first=1)
    assert_same_records(watcher.records(), plain(kind, 2))
    twin.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_may_be_loaded_while_it_is_watched(kind):
    """load_state_dict puts new param groups in the place of the old ones; a scheduler changes the new ones."""
    optimizer, params = pair(kind)
    train(optimizer, params, 2)
    state = copy.deepcopy(optimizer.state_dict())
    with watch(optimizer, step=2) as watcher:
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = 0.123
        train(optimizer, params, 2, first=2)
    assert series(watcher.records(), "lr", statistic="mean") == pytest.approx({2: 0.123, 3: 0.123})


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_and_supersedes_the_steps_that_it_repeats(kind, tmp_path):
    expected = plain(kind, 9)
    optimizer, params = pair(kind)
    with watch(optimizer, to=tmp_path, phenomena=False):
        train(optimizer, params, 5)
        saved = [copy.deepcopy((params[k].detach(), optimizer.state_dict())) for k in range(2)]
        for param in params:
            param.data.mul_(1.01)  # steps 5 and 6 of this life are not those of the next
        train(optimizer, params, 2, first=5)

    optimizer, params = pair(kind)
    optimizer.load_state_dict(saved[0][1])
    with torch.no_grad():
        for param, (value, _) in zip(params, saved, strict=True):
            param.copy_(value)
    with watch(optimizer, to=tmp_path, phenomena=False, step=5 if kind == "SGD" else None) as watcher:
        watcher.log(validation=0.5)  # before the first step: belongs to the last one before
        train(optimizer, params, 4, first=5)
    table = read_run(tmp_path).table
    assert_same_records(without_memory(table), without_memory(expected))
    assert series(table, "validation", "", "mean") == {4: 0.5}


def test_a_new_training_in_the_folder_of_another_says_that_it_replaces_it(tmp_path, caplog):
    for again in (False, True):
        optimizer, params = pair("Adam")
        with watch(optimizer, to=tmp_path):
            train(optimizer, params, 3)
        assert ("replaces the run that ended at step 2" in caplog.text) == again


def test_a_run_whose_optimizer_does_not_count_goes_on_where_its_folder_ends(tmp_path):
    optimizer, params = pair("SGD")
    with watch(optimizer, to=tmp_path):
        train(optimizer, params, 3)
    with watch(optimizer, to=tmp_path):
        train(optimizer, params, 2, first=3)
    assert list(series(read_run(tmp_path).table, "angle")) == list(range(5))


@pytest.mark.parametrize("kind", KINDS)
def test_two_watches_of_one_optimizer(kind):
    optimizer, params = pair(kind)
    first, second = watch(optimizer, phenomena=False).start(), watch(optimizer, every=2, phenomena=False).start()
    train(optimizer, params, 3)
    first.stop()
    train(optimizer, params, 3, first=3)
    second.stop()
    expected = plain(kind, 6)
    assert_same_records(first.records(), expected[expected["step"] < 3])
    assert_same_records(without_memory(second.records()), without_memory(expected[expected["step"] % 2 == 0]))
    assert not [alert for alert in second.alerts if alert.kind == "not finite"]
    assert getattr(optimizer, "telemetry", None) is None
    assert not optimizer._optimizer_step_pre_hooks


def test_start_and_stop_twice(tmp_path):
    optimizer, params = pair("Adam")
    watcher = watch(optimizer, to=tmp_path)
    watcher.start()
    with pytest.raises(RuntimeError, match="already running"):
        watcher.start()
    train(optimizer, params, 2)
    watcher.stop()
    watcher.stop()
    with watcher:
        train(optimizer, params, 2, first=2)
    assert list(series(watcher.records(), "angle")) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_goes_with_its_optimizer(kind, tmp_path):
    def forgets():
        optimizer, params = pair(kind)
        watcher = watch(optimizer, to=tmp_path).start()
        train(optimizer, params, 3)
        return weakref.ref(optimizer), weakref.ref(watcher), weakref.ref(params[0])

    left = forgets()
    gc.collect()
    assert [ref() for ref in left] == [None] * 3
    assert list(series(read_run(tmp_path).table, "angle")) == [0, 1, 2]


# Choices


@pytest.mark.parametrize(("chosen", "other"), [("v", "w"), ("w", "v")])
def test_every_and_rows_every(tmp_path, chosen, other):
    optimizer, params = pair("Adam")
    with watch(optimizer, every=3, record_rows=[chosen], rows_every=2, to=tmp_path) as watcher:
        train(optimizer, params, 13)
    run = read_run(tmp_path)
    assert list(series(run.table, "angle")) == [0, 3, 6, 9, 12]
    assert sorted(set(run.rows[run.rows["group"] == chosen]["step"])) == [0, 3, 6, 9, 12]
    assert sorted(set(run.rows[run.rows["group"] == other]["step"])) == [0, 6, 12]
    radii = run.rows[run.rows["quantity"] == "radius"]
    for (step, group), part in radii.groupby(["step", "group"], observed=True):
        assert part["row"].tolist() == list(range(4 if group == "w" else 3))
        assert part["value"].mean() == pytest.approx(series(run.table, "radius", group, statistic="mean")[step])
    assert "gradient_memory" in watcher.missing


def test_single_rows_of_many_steps_and_wide_groups(tmp_path):
    """Steps are reduced a few at a time, and rows are recorded at some of them; all of it comes out as one run."""
    param = torch.nn.Parameter(torch.randn(1000, 8, dtype=torch.float64))
    optimizer = torch.optim.SGD([("w", param)], lr=0.1, momentum=0.9)
    radii = {}
    with watch(optimizer, every=1, rows_every=50, record_rows=["w"], to=tmp_path) as watcher:
        for step in range(130):
            radii[step] = param.detach().norm(dim=1)
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step), dtype=param.dtype)
            optimizer.step()
    assert watcher.error is None
    run = read_run(tmp_path)
    for step, radius in radii.items():
        rows = run.rows[(run.rows["quantity"] == "radius") & (run.rows["step"] == step)]
        np.testing.assert_allclose(rows.sort_values("row")["value"], radius, rtol=1e-6)
    found = run.table[(run.table["quantity"] == "radius") & (run.table["statistic"] == "median")]
    np.testing.assert_allclose(found["value"], [np.median(radius) for radius in radii.values()], rtol=1e-6)


@pytest.mark.parametrize("rows_every", [1, 7, 50])
def test_some_rows_of_wide_groups(rows_every, tmp_path):
    params = [torch.nn.Parameter(torch.randn(rows, 8)) for rows in (300, 4, 700)]
    optimizer = torch.optim.AdamW([(f"w{k}", param) for k, param in enumerate(params)])
    with watch(optimizer, every=1, rows_every=rows_every, to=tmp_path) as watcher:
        for _ in range(150):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
    assert watcher.error is None
    rows = read_run(tmp_path).rows
    assert sorted(set(rows["step"])) == list(range(0, 150, rows_every))
    assert rows.groupby("group")["row"].nunique().to_dict() == {"w0": 64, "w1": 4, "w2": 64}


def test_what_was_seen_may_be_asked_for_while_another_thread_trains(monkeypatch):
    """As in a notebook whose cells are free during a training: a step that is made meanwhile is not lost."""
    optimizer, params = pair()
    asking, stepped = threading.Event(), threading.Event()
    with watch(optimizer) as watcher:
        reduced = watcher.buffers[0].reduce

        def slowly(*given):
            asking.set()
            stepped.wait(0.5)
            return reduced(*given)

        train(optimizer, params, 2)
        monkeypatch.setattr(watcher.buffers[0], "reduce", slowly)
        other = threading.Thread(target=watcher.latest)
        other.start()
        asking.wait()
        train(optimizer, params, 1, first=2)
        watcher.log(loss=0.25)
        stepped.set()
        other.join()
        train(optimizer, params, 1, first=3)
    assert watcher.error is None
    table = watcher.records()
    assert list(series(table, "angle")) == [0, 1, 2, 3]
    assert series(table, "loss", "", "mean") == {2: 0.25}


def test_records_during_and_after():
    optimizer, params = pair("ours")
    with watch(optimizer, every=1) as watcher:
        assert watcher.records().empty
        assert watcher.latest() == {}
        assert "nothing observed" in watcher.summary()
        train(optimizer, params, 2)
        assert list(series(watcher.records(), "angle")) == [0, 1]
        train(optimizer, params, 300, first=2)
    assert list(series(watcher.records(), "angle")) == list(range(302))
    last = watcher.latest()
    assert last["w"]["angle"]["median"] == series(watcher.records(), "angle")[301]
    assert all(word in watcher.summary() for word in ("step 301", "w", "v", "effective rate", "the watch took"))
    assert set(watcher.missing) == {"deformation", "gradient_memory", "l2_memory", "radius_ratio"}


@pytest.mark.parametrize("steps", [7, 8, 9, 16])
def test_logged_numbers_belong_to_the_last_step(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[Buffer.__module__], "_STEPS", 8)  # a part has eight steps
    optimizer, params = pair("ours")
    with watch(optimizer, to=tmp_path) as watcher:
        for step in range(steps):
            set_gradients(params, step)
            optimizer.step()
            watcher.log({"loss": step}, accuracy=torch.tensor(step / 2))
    table = read_run(tmp_path).table
    assert list(series(table, "angle")) == list(range(steps))
    assert series(table, "loss", "", "mean") == {step: step for step in range(steps)}
    assert series(table, "accuracy", "", "mean") == {step: step / 2 for step in range(steps)}


@pytest.mark.parametrize("where", ["loop", "step", "around"])
def test_an_exception_loses_nothing_that_was_recorded(where, tmp_path):
    optimizer, params = pair("Adam")

    def loop(watcher):
        for step in range(10):
            set_gradients(params, step)
            if step == 7 and where == "loop":
                raise ArithmeticError

            def closure(step=step):
                if step == 7 and where == "step":
                    raise ArithmeticError

            optimizer.step(closure)
            watcher.log(loss=step)
            if step == 6 and where == "around":
                with watcher.around():
                    raise ArithmeticError

    with pytest.raises(ArithmeticError), watch(optimizer, to=tmp_path) as watcher:
        loop(watcher)
    table = read_run(tmp_path).table
    assert list(series(table, "angle")) == list(series(table, "loss", "", "mean")) == list(range(7))
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_nan_weights_are_recorded_as_such_and_the_others_are_not_touched(kind):
    optimizer, params = pair(kind)
    with torch.no_grad():
        params[1][0, 0] = float("nan")
    with watch(optimizer, phenomena=False) as watcher:
        train(optimizer, params, 3)
    assert watcher.error is None
    table, expected = watcher.records(), plain(kind, 3)
    assert series(table, "angle") == pytest.approx(series(expected, "angle"), rel=1e-9)
    assert all(math.isnan(value) for value in series(table, "radius", "v", "mean").values())
    assert [alert.group for alert in watcher.alerts if alert.kind == "not finite"] == ["v"]


@pytest.mark.parametrize("kind", ["Adam", "SGD", "ours"])
def test_a_rate_that_is_not_a_number_is_recorded_as_such(kind):
    """A schedule that divides zero by zero breaks the training, and the watch must be there to show it."""
    optimizer, params = pair(kind)
    with watch(optimizer) as watcher:
        train(optimizer, params, 2)
        optimizer.param_groups[0]["lr"] = math.nan
        train(optimizer, params, 2, first=2)
    assert watcher.error is None
    angles = series(watcher.records(), "angle", statistic="mean")
    assert [math.isnan(angles[step]) for step in range(4)] == [False, False, True, True]
    assert "not finite" in {alert.kind for alert in watcher.alerts}


def test_what_goes_wrong_inside_does_not_stop_the_training(caplog):
    optimizer, params = pair("Adam")
    with watch(optimizer) as watcher:
        train(optimizer, params, 2)
        watcher.buffers[0].observe = None
        train(optimizer, params, 3, first=2)
    assert isinstance(watcher.error, TypeError)
    assert len([record for record in caplog.records if "the watch ends" in record.message]) == 1
    assert list(series(watcher.records(), "angle")) == [0, 1]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_watch_that_fails_leaves_the_hooks_after_its_own_alone(where, monkeypatch):
    """torch goes through its hooks as they are: taking one away meanwhile would be an error of the step."""
    optimizer, params = pair(lambda groups: torch.optim.RMSprop(groups, lr=0.01))  # needs both hooks
    called = []
    with watch(optimizer) as watcher:
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        monkeypatch.setattr(watcher.buffers[0].source, where, None)
        train(optimizer, params, 2)
    assert called == ["before", "after"] * 2
    assert isinstance(watcher.error, TypeError)
    assert not watcher._hooks


@pytest.mark.parametrize("kind", ["SGD", "ours", "ours, classic"])
@pytest.mark.parametrize("phenomena", [False, True])
def test_a_default_device_is_not_where_numbers_are_kept(kind, phenomena, tmp_path):
    """`torch.set_default_device`, as many scripts have it: the parameters need not lie there."""
    optimizer, params = pair(kind)
    elsewhere = torch.device("meta")
    with elsewhere:
        watcher = watch(optimizer, phenomena=phenomena, to=tmp_path / "run").start()
    for step in range(4):
        set_gradients(params, step)
        with elsewhere:
            optimizer.step()
    with elsewhere:
        watcher.stop()
        table = watcher.records()
    assert watcher.error is None
    assert_same_records(table, plain(kind, 4))


@pytest.mark.parametrize("kind", ["SGD", "ours"])
def test_a_watch_may_be_made_in_inference_mode(kind):
    optimizer, params = pair(kind)
    with torch.inference_mode():
        watcher = watch(optimizer).start()
    train(optimizer, params, 4)
    watcher.stop()
    assert watcher.error is None
    assert_same_records(watcher.records(), plain(kind, 4))


@pytest.mark.parametrize("kind", ["Adam", "ours"])
def test_groups_are_told_in_the_order_of_the_model(kind):
    """Whatever order they are looked at in."""
    params = rows((3, 9), (4, 2), (2, 5), (3, 7))
    optimizer = OPTIMIZERS[kind](groups_of(params))
    with watch(optimizer) as watcher:
        train(optimizer, params, 2)
    assert [group["name"] for group in watcher.about()["groups"]] == ["w", "v", "s", "t"]
    assert list(watcher.latest()) == ["w", "v", "s", "t"]
    assert [line.split()[0] for line in watcher.summary().split("\n\n")[1].splitlines()[2:6]] == ["w", "v", "s", "t"]


@pytest.mark.parametrize("way", ["begun late", "stopped in between", "loaded"])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_memory_of_a_momentum_that_was_not_seen_is_not_known_until_it_has_faded(kind, way):
    whole, params = pair(kind)
    with watch(whole, step=0, every=1, phenomena=True) as all_of_it:
        train(whole, params, 100)
    optimizer, params = pair(kind)
    watcher = watch(optimizer, step=0, every=1, phenomena=True)
    if way == "stopped in between":
        with watcher:
            train(optimizer, params, 5)
    if way == "loaded":
        watcher.start()
        train(optimizer, params, 20)
        optimizer.load_state_dict(optimizer.state_dict())
        first = 0
    else:
        train(optimizer, params, 20 - watcher.next_step, first=watcher.next_step)
        watcher.start()
        first = 20 - watcher.next_step
    train(optimizer, params, 80, first=20)
    watcher.stop()
    assert watcher.error is None
    for quantity in ("gradient_memory", "l2_memory", "radius_ratio"):
        found, expected = (series(each.records(), quantity) for each in (watcher, all_of_it))
        known = {step + first: value for step, value in found.items() if step + first >= 20}
        assert [step for step, value in known.items() if math.isnan(value)] == list(range(20, 85))
        late = {step: value for step, value in known.items() if step >= 85}
        assert late == pytest.approx({step: expected[step] for step in late}, rel=0.1)

"""Whatever happens to the model, the state or the disk: the training goes on to its end, and the rest is recorded."""

import copy
import errno
import logging
import math
import os
import pickle
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from saved import Point, clones, llama, quantities, stepped, values_of
from torch import nn

import steradian as st
from steradian import watch
from steradian.watching.records import COLUMNS, read_run
from steradian.watching.sinks import Calls, RunFiles

from small import series

pytestmark = [
    # A warning of the watch's is no error here: each test says what it expects of it.
    pytest.mark.filterwarnings("always::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

STEPS = 8


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


ADAMW = {"lr": 0.01, "weight_decay": 0.1}
KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAMW),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
}
"""Read from its state, with a state that is empty, and two that are observed from two points."""


def gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = noise.to(param.dtype)


class Training:
    """A training step by step, which saves the weights around each step that was taken."""

    def __init__(self, params, optimizer):
        self.params, self.optimizer = dict(params), optimizer
        self.history = {}
        self.step = 0

    def take(self, steps=1):
        for _ in range(steps):
            gradients(self.params.values(), self.step)
            before = clones(self.params)
            self.optimizer.step()
            self.history[self.step] = Point(before, clones(self.params), {})
            self.step += 1
        return self


def training(kind="AdamW", model=None):
    model = network() if model is None else model
    return Training(model.named_parameters(), KINDS[kind](model.parameters())), model


def assert_angles(watcher, history, names, *, steps=None):
    """Radius, angle and update of these groups at exactly these steps are those of the saved weights."""
    table = watcher.records()
    steps = sorted(history) if steps is None else list(steps)
    for name in names:
        for quantity in ("radius", "angle", "update"):
            found = series(table, quantity, name, "mean")
            expected = {step: quantities(history[step], [name])[quantity].mean() for step in steps}
            assert list(found) == steps, (name, quantity)
            assert found == pytest.approx(expected, abs=1e-6), (name, quantity)


def said(caplog, recwarn=None):
    """What was logged as a warning or worse, and what was warned of."""
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return logged + [str(warning.message) for warning in (recwarn or [])]


# Nothing to watch


def frozen():
    model = network().requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def empty():
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(0, 4)), "v": nn.Parameter(torch.zeros(3, 0))})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def complex_only():
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("case", [frozen, empty, complex_only])
def test_nothing_to_watch_is_a_warning(case, tmp_path):
    model, optimizer = case()
    with pytest.warns(UserWarning, match="watch"):
        watcher = watch(optimizer, model, to=tmp_path / "run")
    with watcher:
        for step in range(3):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.ones_like(param) if param.requires_grad else None
            optimizer.step()
            watcher.log(loss=float(step))
        assert watcher.latest() == {}
    table = watcher.records()
    assert tuple(table.columns) == COLUMNS
    assert not len(table[table["group"] != ""])
    assert watcher.labels() == {}
    assert tuple(watcher.names) == ()
    assert watcher.summary().strip()


def test_nothing_to_watch_and_nothing_logged():
    model, optimizer = frozen()
    with pytest.warns(UserWarning, match="watch"):
        watcher = watch(optimizer, model)
    with watcher:
        optimizer.step()
    assert len(watcher.records()) == 0
    assert watcher.latest() == {}
    assert isinstance(watcher.summary(), str)


def test_a_model_without_invariant_weights_is_watched(recwarn):
    model = network()
    groups = st.find_groups(model, torch.randn(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    with watch(optimizer, groups) as watcher:
        history = Training(model.named_parameters(), optimizer).take(3).history
    assert_angles(watcher, history, stepped(model, optimizer))
    assert set(watcher.labels().values()) <= {"not invariant", "invariant"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_matrices(kind):
    """Norms and gains alone are trained in a fine-tuning; a number of its own may be beside them."""
    model = nn.Module()
    model.norm, model.scale = nn.LayerNorm(4), nn.Parameter(torch.tensor(2.0))
    nn.init.normal_(model.norm.bias)
    run, _ = training(kind, model)
    with watch(run.optimizer, model) as watcher:
        run.take(STEPS)
    assert set(watcher.names) == {"norm.weight", "norm.bias", "scale"}
    assert_angles(watcher, run.history, watcher.names)


# Wrong arguments


def module_and(**options):
    return lambda: watch(torch.optim.SGD(network().parameters(), lr=0.1), network(), **options)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: watch(3), TypeError, "optimizer"),
        (lambda: watch(network().parameters()), TypeError, "optimizer"),
        (lambda: watch([]), ValueError, "optimizer"),
        (lambda: watch([torch.optim.SGD(network().parameters()), 3]), TypeError, "optimizer"),
        (lambda: watch(torch.optim.SGD(network().parameters()), 3), TypeError, "model|groups"),
        (lambda: watch(torch.optim.SGD(network().parameters()), [network(), 3]), TypeError, "model|groups"),
        (module_and(every=0), ValueError, "every"),
        (module_and(every=1.5), (TypeError, ValueError), "every"),
        (module_and(cost=-0.1), ValueError, "cost"),
        (module_and(cost="cheap"), (TypeError, ValueError), "cost"),
        (module_and(cost=math.nan), ValueError, "cost"),
        (module_and(only=3), TypeError, "only"),
        (module_and(only=["nothing*"]), ValueError, "only"),
        (module_and(record_rows=["nothing"]), ValueError, "record_rows"),
    ],
)
def test_wrong_arguments_raise_when_the_watch_is_made(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_missing_package_raises_when_the_watch_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    model = network()
    with pytest.raises(ImportError, match="pyarrow"):
        watch(torch.optim.SGD(model.parameters(), lr=0.1), model, to=tmp_path / "run")


# Parameters that change


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_are_left_out(kind):
    model = network()
    model[0].requires_grad_(False)
    run = Training(model[2].named_parameters(prefix="2"), KINDS[kind](model.parameters()))
    with watch(run.optimizer, model) as watcher:
        run.take(STEPS)
    assert set(watcher.names) == {"2.weight", "2.bias"}
    assert_angles(watcher, run.history, watcher.names)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_frozen_and_freed_in_the_middle(kind):
    run, model = training(kind)
    weight, bias = run.params.pop("0.weight"), run.params.pop("0.bias")
    weight.requires_grad_(False)
    with watch(run.optimizer, model) as watcher:
        run.take(2)
        weight.requires_grad_(True)
        bias.requires_grad_(False)
        weight.grad = torch.ones_like(weight)
        run.take(3)
        weight.grad = None
        run.take(3)
    assert_angles(watcher, run.history, ["2.weight", "2.bias"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_missing(kind):
    """Of one parameter in some steps, and of all in one."""
    run, model = training(kind)
    with watch(run.optimizer, model) as watcher:
        run.take(2)
        weight = run.params.pop("0.weight")
        weight.grad = None
        run.take(2)
        run.optimizer.zero_grad()
        run.optimizer.step()
        run.step += 1
        run.params["0.weight"] = weight
        run.take(2)
    found = series(watcher.records(), "angle", "0.weight", "mean")
    assert len(found) == 4
    after = list(found.values())[2:]
    expected = [quantities(run.history[step], ["0.weight"])["angle"].mean() for step in (5, 6)]
    assert after == pytest.approx(expected, abs=1e-6)
    assert len(series(watcher.records(), "angle", "2.weight", "mean")) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["shape", "fewer dimensions", "dtype", "empty"])
def test_a_parameter_that_changes_in_the_middle(kind, change, caplog, recwarn):
    """As a vocabulary that grows, or a layer that is cast; the optimizer's state of it is reset."""
    run, model = training(kind)
    with watch(run.optimizer, model) as watcher:
        run.take(3)
        weight = run.params["2.weight"]
        weight.grad = None  # torch does not change the data of a parameter whose gradient has another shape
        changed = {
            "shape": torch.randn(7, 4),
            "fewer dimensions": torch.randn(12),
            "dtype": weight.detach().double(),
            "empty": torch.zeros(0, 4),
        }
        weight.data = changed[change]
        run.optimizer.state.pop(weight, None)
        run.take(STEPS - 3)
    assert run.step == STEPS
    others = [name for name in run.params if name != "2.weight"]
    assert_angles(watcher, run.history, others)
    found = series(watcher.records(), "angle", "2.weight", "mean")
    assert list(found)[:3] == [0, 1, 2]
    if len(found) < STEPS:
        assert any("2.weight" in text for text in said(caplog, recwarn))
        assert sum("2.weight" in text for text in said(caplog, recwarn)) == 1
    elif change != "empty":
        expected = {step: quantities(point, ["2.weight"])["angle"].mean() for step, point in run.history.items()}
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_parameter_that_changes_within_the_step(caplog, recwarn):
    class Prunes(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            first, *others = self.param_groups[0]["params"]
            for param in others:
                param.sub_(0.1 * param.grad)
            first.grad = None
            first.data = first.data[:-1].clone()

    model = nn.ParameterDict({"pruned": nn.Parameter(torch.randn(9, 4)), "w": nn.Parameter(torch.randn(3, 4))})
    run = Training(model.named_parameters(), Prunes([model["pruned"], model["w"]]))
    with watch(run.optimizer, model) as watcher:
        run.take(6)
    assert_angles(watcher, run.history, ["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_added_and_taken_away(kind):
    run, model = training(kind)
    late = nn.Parameter(torch.randn(6, 2))
    with watch(run.optimizer, model) as watcher:
        run.take(2)
        run.optimizer.add_param_group({"params": [late]})
        model.register_parameter("late", late)
        run.params["late"] = late
        run.take(3)
        del run.optimizer.param_groups[0]["params"][0]
        gone = run.params.pop("0.weight")
        gone.grad = None
        run.take(3)
    assert_angles(watcher, run.history, ["0.bias", "2.weight", "2.bias"])
    assert_angles(watcher, run.history, ["0.weight"], steps=range(5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_gradients_that_are_not_finite(kind, bad):
    run, model = training(kind)
    with watch(run.optimizer, model) as watcher:
        run.take(2)
        with torch.no_grad():
            run.params["0.weight"][1, 2] = bad
        run.take(STEPS - 2)
    assert_angles(watcher, run.history, ["2.weight", "2.bias"])
    assert list(series(watcher.records(), "angle", "0.weight", "mean"))[:2] == [0, 1]
    assert watcher.summary()


# States and steps of optimizers


class Bare(torch.optim.Optimizer):
    """No state, no rate, no settings."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(0.1 * param.grad)


def test_an_optimizer_without_state_and_settings():
    model = network()
    run = Training(model.named_parameters(), Bare(model.parameters()))
    with watch(run.optimizer, model) as watcher:
        run.take(STEPS)
    assert_angles(watcher, run.history, watcher.names)


@pytest.mark.parametrize("kind", ["AdamW", "RAdam"])
def test_a_state_that_is_lost_in_the_middle(kind):
    run, model = training(kind)
    with watch(run.optimizer, model) as watcher:
        run.take(3)
        run.optimizer.state.clear()
        run.take(3)
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.take(2)
    assert_angles(watcher, run.history, watcher.names)


@pytest.mark.parametrize("first", [0.5, 0.1])
def test_a_decay_that_takes_all_of_the_weights(first):
    """1 − ηλ = 0 in the second half: the state does not tell the point before the step."""
    model = network()
    run = Training(model.named_parameters(), torch.optim.AdamW(model.parameters(), lr=first, weight_decay=2.0))
    with watch(run.optimizer, model) as watcher:
        run.take(STEPS // 2)
        run.optimizer.param_groups[0]["lr"] = 0.5
        run.take(STEPS // 2)
    assert not watcher.alerts
    assert_angles(watcher, run.history, watcher.names)


class Fails(torch.optim.AdamW):
    """Raises in some of its calls, before or after it changed half of the weights."""

    def __init__(self, params, at=(3, 5)):
        super().__init__(params, **ADAMW)
        self.calls, self.at = 0, at

    def step(self, closure=None):
        self.calls += 1
        if self.calls - 1 in self.at:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(2)
            raise ArithmeticError("not this one")
        return torch.optim.AdamW.step.__wrapped__(self, closure)


def test_the_error_of_a_step_comes_through_and_later_steps_are_recorded():
    model = network()
    run = Training(model.named_parameters(), Fails(model.parameters()))
    angles = []
    with watch(run.optimizer, model) as watcher:
        for call in range(STEPS):
            if call in run.optimizer.at:
                with pytest.raises(ArithmeticError, match="not this one"):
                    run.take()
                continue
            run.take()
            angles.append(quantities(run.history[run.step - 1], ["0.weight"])["angle"].mean())
    found = series(watcher.records(), "angle", "0.weight", "mean")
    assert list(found.values()) == pytest.approx(angles, abs=1e-6)


def test_the_error_of_a_closure_comes_through():
    run, model = training("SGD")

    def closure():
        raise KeyError("no data")

    with watch(run.optimizer, model) as watcher:
        run.take(2)
        with pytest.raises(KeyError, match="no data"):
            run.optimizer.step(closure)
        run.take(2)
    found = series(watcher.records(), "angle", "0.weight", "mean")
    expected = [quantities(point, ["0.weight"])["angle"].mean() for point in run.history.values()]
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_with_its_closure(line_search):
    model = network().double()
    inputs, wanted = torch.randn(16, 5, dtype=torch.float64), torch.randn(16, 3, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn=line_search)

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        return loss

    params, history = dict(model.named_parameters()), {}
    with watch(optimizer, model) as watcher:
        for step in range(5):
            before = clones(params)
            optimizer.step(closure)
            history[step] = Point(before, clones(params), {})
    assert_angles(watcher, history, watcher.names)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("SparseAdam", {})],
)
def test_sparse_gradients(kind, options):
    model = nn.EmbeddingBag(30, 4, sparse=True, mode="sum")
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    history = {}
    params = dict(model.named_parameters())
    with watch(optimizer, model) as watcher:
        for step in range(STEPS):
            optimizer.zero_grad()
            words = torch.randint(30, (5, 3), generator=torch.Generator().manual_seed(step))
            model(words).square().sum().backward()
            before = clones(params)
            optimizer.step()
            history[step] = Point(before, clones(params), {})
    assert_angles(watcher, history, ["weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_complex_parameters_are_left_out(kind):
    model = network()
    model.register_parameter("phases", nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)))
    run = Training(list(model.named_parameters())[1:], KINDS[kind](model.parameters()))
    with watch(run.optimizer, model) as watcher:
        for _ in range(STEPS):
            model.phases.grad = torch.randn(3, 4, dtype=torch.complex64)
            run.take()
    assert "phases" not in watcher.names
    assert_angles(watcher, run.history, ["0.weight", "0.bias", "2.weight", "2.bias"])


# Hooks of others


@pytest.mark.parametrize("first", [True, False], ids=["registered before", "registered after"])
@pytest.mark.parametrize("moment", ["pre", "post"])
@pytest.mark.parametrize("kind", ["AdamW", "Adadelta"])
def test_a_watch_that_is_stopped_in_another_hook(kind, moment, first, tmp_path):
    """Hooks may not be removed while torch goes through them."""
    run, model = training(kind)
    calls = []

    def stops(*_):
        calls.append(run.step)
        if run.step == 3:
            watcher.stop()

    register = getattr(run.optimizer, f"register_step_{moment}_hook")
    if first:
        register(stops)
    watcher = watch(run.optimizer, model, to=tmp_path / "run").start()
    if not first:
        register(stops)
    run.take(STEPS)
    assert calls == list(range(STEPS))
    assert not watcher.running
    steps = list(series(watcher.records(), "angle", "0.weight", "mean"))
    assert steps in ([0, 1, 2], [0, 1, 2, 3])
    assert_angles(watcher, run.history, watcher.names, steps=steps)
    with watcher:
        run.take(2)
    assert len(series(watcher.records(), "angle", "0.weight", "mean")) == len(steps) + 2


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_a_watch_that_is_stopped_in_a_hook_of_all_optimizers(moment):
    from torch.optim import optimizer as module

    run, model = training()
    register = getattr(module, f"register_optimizer_step_{moment}_hook")
    handle = register(lambda *_: watcher.stop() if run.step == 3 else None)
    try:
        watcher = watch(run.optimizer, model).start()
        run.take(STEPS)
    finally:
        handle.remove()
    assert list(series(watcher.records(), "angle", "0.weight", "mean")) in ([0, 1, 2], [0, 1, 2, 3])


def test_a_watch_that_is_stopped_in_the_closure():
    run, model = training()

    def closure():
        if run.step == 3:
            watcher.stop()
        return torch.zeros(())

    watcher = watch(run.optimizer, model).start()
    for _ in range(STEPS):
        gradients(run.params.values(), run.step)
        run.optimizer.step(closure)
        run.step += 1
    assert len(series(watcher.records(), "angle", "0.weight", "mean")) in (3, 4)


def test_a_watch_that_is_stopped_by_what_it_logs_to():
    run, model = training()

    def log(values, step):
        if step == 1:
            watcher.stop()

    watcher = watch(run.optimizer, model, to=log).start()
    run.take(3)
    watcher.flush()
    run.take(STEPS - 3)
    watcher.stop()
    assert run.step == STEPS
    assert not watcher.running


def test_hooks_of_others_that_raise():
    """The error is theirs and comes through; the step after it is recorded as it was."""
    run, model = training()
    raising = set()

    def fails(*_):
        if run.step in raising:
            raising.discard(run.step)
            raise LookupError("another's")

    before = run.optimizer.register_step_pre_hook(fails)
    watcher = watch(run.optimizer, model).start()
    after = run.optimizer.register_step_pre_hook(fails)
    last = run.optimizer.register_step_post_hook(fails)
    run.take(2)
    for handle in (before, after):
        raising.add(run.step)
        with pytest.raises(LookupError, match="another's"):
            run.take()
        handle.remove()
    with torch.no_grad():
        run.params["0.weight"].mul_(3)
    run.take(2)
    last.remove()
    run.take(2)
    watcher.stop()
    found = list(series(watcher.records(), "angle", "0.weight", "mean").values())
    expected = [quantities(point, ["0.weight"])["angle"].mean() for point in run.history.values()]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_others_that_take_the_gradients_away(kind):
    """To free memory early; radius and angle do not need them."""
    run, model = training(kind)
    run.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    with watch(run.optimizer, model) as watcher:
        run.take(STEPS)
    assert_angles(watcher, run.history, watcher.names)


@pytest.mark.parametrize("kind", KINDS)
def test_watches_of_one_optimizer_within_each_other(kind, tmp_path):
    run, model = training(kind)
    with watch(run.optimizer, model, to=tmp_path / "outer") as outer:
        run.take(2)
        with watch(run.optimizer, model, every=2, to=tmp_path / "inner", step=2) as inner:
            run.take(4)
        run.take(2)
    assert_angles(outer, run.history, outer.names)
    assert_angles(inner, run.history, inner.names, steps=[2, 4])


# Copies


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_watched_optimizer_is_an_optimizer_of_its_own(kind, way):
    run, model = training(kind)
    with watch(run.optimizer, model) as watcher:
        run.take(2)
        twin, optimizer = way((model, run.optimizer))
        other = Training(twin.named_parameters(), optimizer)
        other.take(2)  # nobody watches it
        with watch(optimizer, twin, step=0) as second:
            other.history.clear()
            other.step = 0
            other.take(3)
        run.take(2)
    assert_angles(watcher, run.history, watcher.names)
    assert_angles(second, other.history, watcher.names)


def test_a_pickled_optimizer_keeps_the_names_of_its_parameters():
    model = network()
    optimizer = pickle.loads(pickle.dumps(torch.optim.AdamW(model.named_parameters(), **ADAMW)))
    run = Training(zip(dict(model.named_parameters()), optimizer.param_groups[0]["params"], strict=True), optimizer)
    with watch(optimizer) as watcher:
        run.take(3)
    assert_angles(watcher, run.history, ["0.weight", "0.bias", "2.weight", "2.bias"])


class TensorState(Bare):
    """The state of a parameter is a tensor by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param] = param.grad.sum()


@pytest.mark.parametrize("phenomena", [False, True])
def test_a_state_that_is_a_tensor(phenomena):
    model = network()
    run = Training(model.named_parameters(), TensorState(model.parameters()))
    with watch(run.optimizer, model, phenomena=phenomena) as watcher:
        run.take(STEPS)
    assert watcher.error is None
    assert_angles(watcher, run.history, watcher.names)


def test_the_summary_says_that_an_error_ended_the_watch():
    class Broken(dict):
        def items(self):
            raise LookupError("no entries")

    run, model = training("RAdam")
    with watch(run.optimizer, model) as watcher:
        run.take(2)
        assert "an error" not in watcher.summary()
        for param, state in list(run.optimizer.state.items()):
            run.optimizer.state[param] = Broken(state)
        run.take(STEPS)
    assert watcher.summary().startswith("RAdam: an error ended the watch: LookupError('no entries')\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("block", [False, True])
def test_a_fork_that_ends_does_not_stop_the_watch(block, tmp_path):
    """In a process of its own, since pytest must not end in the fork."""
    script = f"""
import os, sys, torch, steradian as st
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
watcher = st.watch(optimizer, model, to={str(tmp_path / "run")!r}, every=1)
def train():
    step()
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    step()
if {block}:
    with watcher:
        train()
else:
    watcher.start()
    train()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert sorted(set(read_run(tmp_path / "run").table["step"])) == [0, 1]


# Where records go


def test_a_log_that_raises(caplog, recwarn):
    run, model = training()

    def fails(values, step):
        raise ConnectionError("no network")

    with watch(run.optimizer, model, to=fails) as watcher:
        for _ in range(STEPS):
            run.take()
            watcher.flush()
    assert_angles(watcher, run.history, watcher.names)
    assert 1 <= len(said(caplog, recwarn)) <= 2


@pytest.mark.parametrize("method", ["write", "alert", "close"])
def test_a_sink_that_raises(method, tmp_path):
    class Broken(Calls):
        pass

    def fails(self, *_):
        raise RuntimeError("broken")

    setattr(Broken, method, fails)
    run, model = training()
    with watch(run.optimizer, model, to=[Broken(lambda values, step: None), tmp_path / "run"]) as watcher:
        run.take(2)
        with torch.no_grad():
            run.params["0.weight"].fill_(math.nan)  # an alert
        watcher.flush()
        run.take(STEPS - 2)
    assert_angles(watcher, run.history, ["2.weight"])
    assert list(series(read_run(tmp_path / "run").table, "angle", "2.weight", "mean")) == list(range(STEPS))


def test_a_folder_that_is_taken_away(tmp_path):
    run, model = training()
    with watch(run.optimizer, model, to=tmp_path / "run") as watcher:
        run.take(3)
        watcher.records()  # all of it is on the disk
        shutil.rmtree(tmp_path / "run")
        run.take(3)
        watcher.flush()
        run.take(2)
    assert run.step == STEPS
    assert watcher.summary()
    assert {6, 7} <= set(read_run(tmp_path / "run").table["step"])


def test_a_file_in_the_place_of_the_folder(tmp_path, caplog, recwarn):
    run, model = training()
    with watch(run.optimizer, model, to=tmp_path / "run") as watcher:
        run.take(3)
        watcher.records()  # all of it is on the disk
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("in the way")
        run.take(3)
        watcher.flush()
        run.take(2)
    assert run.step == STEPS
    assert watcher.summary()
    assert any(str(tmp_path / "run") in text for text in said(caplog, recwarn))


def refused(folder):
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    return folder


def below_a_file(folder):
    folder.write_text("no folder")
    return folder / "run"


def in_the_system(folder):
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    return "/proc/self/steradian-run"


@pytest.mark.parametrize("place", [refused, below_a_file, in_the_system])
def test_a_folder_that_cannot_be_written(place, tmp_path, caplog, recwarn):
    run, model = training()
    kept = {}
    to = [place(tmp_path / "place"), lambda values, step: kept.setdefault(step, values)]
    with watch(run.optimizer, model, to=to) as watcher:
        run.take(STEPS)
    assert said(caplog, recwarn)
    assert list(kept) == list(range(STEPS))  # what else gets the numbers gets them all
    assert set(watcher.latest()) == set(watcher.names)
    assert watcher.summary()
    assert watcher.records() is not None


def test_a_disk_that_is_full(tmp_path, caplog, recwarn, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, model = training()
    with watch(run.optimizer, model, to=tmp_path / "run") as watcher:
        run.take(2)
        watcher.records()  # these are on the disk
        for method in ("add", "describe", "alert"):
            monkeypatch.setattr(RunFiles, method, full)
        with torch.no_grad():
            run.params["0.weight"].fill_(math.nan)  # an alert, which is a file too
        for _ in range(STEPS - 2):
            run.take()
            watcher.flush()
    assert run.step == STEPS
    assert watcher.summary()
    texts = [text for text in said(caplog, recwarn) if "No space left" in text or "could not be written" in text]
    assert 1 <= len(texts) <= 2
    assert list(series(watcher.records(), "angle", "2.weight")) == list(range(STEPS))  # in memory
    assert {0, 1} <= set(read_run(tmp_path / "run").table["step"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_disk_that_takes_no_byte(from_the_start, tmp_path):
    """Whoever writes the files, and in whatever way: no file may grow any more."""
    child = os.fork()
    if not child:
        status = 1
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
            logging.disable()
            status = 0 if train_on_a_full_disk(tmp_path / "run", from_the_start) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def train_on_a_full_disk(folder, from_the_start):
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    run, model = training()
    if from_the_start:
        fill()
    with watch(run.optimizer, model, to=folder) as watcher:
        for _ in range(STEPS):
            run.take()
            watcher.flush()
            fill()
    return run.step == STEPS and bool(watcher.summary()) and set(watcher.latest()) == set(watcher.names)


# Trainers


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, k):
        words = torch.randint(70, (6,), generator=torch.Generator().manual_seed(k))
        return {"input_ids": words, "labels": words}


def fit_with_transformers(transformers, folder, callback, model):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=STEPS, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=1, learning_rate=0.01, dataloader_pin_memory=False, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), callbacks=[callback])
    trainer.train()
    return trainer


def assert_page(folder, out, model):
    """The run has every weight of the model, and its page opens."""
    table = read_run(folder).table
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert set(table["group"]) - {""} == names
    assert set(table[table["quantity"] == "angle"]["step"]) == set(range(STEPS))
    page = st.report([folder], out).read_text(encoding="utf-8")
    assert "<html" in page
    assert "</html>" in page
    assert "embed_tokens" in page


def test_transformers_trains_a_llama_to_the_end_and_the_page_opens(transformers, tmp_path):
    from steradian.watching.callbacks.transformers import WatchCallback

    model, callback = llama(), WatchCallback(to=tmp_path / "run")
    trainer = fit_with_transformers(transformers, tmp_path / "out", callback, model)
    assert trainer.state.global_step == STEPS
    assert not callback.watch.running
    assert_page(tmp_path / "run", tmp_path / "page.html", model)


@pytest.mark.parametrize("trouble", ["folder", "no matrices", "log"])
def test_transformers_trains_to_the_end_whatever_happens_to_the_watch(transformers, trouble, tmp_path):
    from steradian.watching.callbacks.transformers import WatchCallback

    def fails(values, step):
        raise ConnectionError("no network")

    model = llama()
    if trouble == "no matrices":
        for param in model.parameters():
            param.requires_grad_(param.ndim < 2)
    callback = WatchCallback(to=below_a_file(tmp_path / "place") if trouble == "folder" else fails)
    trainer = fit_with_transformers(transformers, tmp_path / "out", callback, model)
    assert trainer.state.global_step == STEPS
    assert set(callback.watch.latest()) == {name for name, param in model.named_parameters() if param.requires_grad}


def test_transformers_needs_no_example_of_the_inputs(transformers, tmp_path):
    from steradian.watching.callbacks.transformers import WatchCallback

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, input_ids, labels):
            return {"loss": self.inner(input_ids.float() / 70).square().mean()}

    callback = WatchCallback()
    trainer = fit_with_transformers(transformers, tmp_path / "out", callback, Plain())
    assert trainer.state.global_step == STEPS
    assert set(callback.watch.names) == {"inner.weight", "inner.bias"}


def lightning_module(model):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, k):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=0.01)

    return Module()


def fit_with_lightning(folder, callback, module):
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, callbacks=[callback], default_root_dir=str(folder),
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=2))
    return trainer


def test_lightning_trains_a_llama_to_the_end_and_the_page_opens(transformers, tmp_path):
    module = lightning_module(llama())
    from steradian.watching.callbacks.lightning import WatchCallback

    callback = WatchCallback(to=tmp_path / "run")
    trainer = fit_with_lightning(tmp_path / "out", callback, module)
    assert trainer.global_step == STEPS
    assert_page(tmp_path / "run", tmp_path / "page.html", module)


@pytest.mark.parametrize("trouble", ["folder", "no matrices", "log"])
def test_lightning_trains_to_the_end_whatever_happens_to_the_watch(transformers, trouble, tmp_path):
    def fails(values, step):
        raise ConnectionError("no network")

    module = lightning_module(llama())
    from steradian.watching.callbacks.lightning import WatchCallback

    if trouble == "no matrices":
        for param in module.parameters():
            param.requires_grad_(param.ndim < 2)
    callback = WatchCallback(to=below_a_file(tmp_path / "place") if trouble == "folder" else fails)
    trainer = fit_with_lightning(tmp_path / "out", callback, module)
    assert trainer.global_step == STEPS


def test_summaries_say_what_the_watch_cost():
    run, model = training()
    with watch(run.optimizer, model) as watcher:
        run.take(STEPS)
    last = watcher.summary().strip().splitlines()[-1]
    assert "% of the training's time" in last or "× the time of the training's own steps" in last
    assert any(unit in last for unit in ("MB", "MiB", "kB", "KiB", "KB", "GB", " B"))


def test_values_are_recorded_once():
    run, model = training()
    with watch(run.optimizer, model) as watcher:
        run.take(3)
        watcher.records()
        run.take(3)
    assert len(values_of(watcher.records(), ("step", "group", "quantity", "statistic")))

"""Readers of other people's optimizers: what they say is compared with the weights, and never changes an angle."""

import logging

import pytest
import torch
from saved import quantities
from test_never_ends_a_training import Training, assert_angles
from torch import nn

import steradian as st
from steradian import scheme, watch
from steradian.optim import RowOptimizer
from steradian.optim.reference import sgd
from steradian.scheme import Step

from small import groups_of, rows, series, set_gradients

STEPS = 6


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(scheme, "_readers", dict(scheme._readers))


class Momentum(torch.optim.Optimizer):
    """x' = (1 − ηδ)x − η m/s with m ← 0.9 m + ∇L(x), and s = the RMS of all of m if `normed`, else 1."""

    def __init__(self, params, lr=0.05, weight_decay=0.1, normed=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "normed": normed})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                m = state.setdefault("m", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                state["k"] = state.get("k", 0) + 1
                scale = m.square().mean().sqrt() if group["normed"] else 1
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m / scale * group["lr"])


def read_momentum(taken):
    a = taken.need("m")
    scale = a.square().mean().sqrt() if taken.group["normed"] else torch.ones((), dtype=a.dtype)
    return Step(a.clone(), scale.expand_as(a), taken.setting("lr"), decay=taken.setting("weight_decay"), beta=0.9)


def late(change):
    """A reader that is right until step 3, and then changes what it returns."""

    def read_late(taken):
        step = read_momentum(taken)
        return change(step) if taken.state["k"] > 3 else step

    return read_late


def network(wide=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 3))


def watched(reader, model=None, *, steps=STEPS, every=1, **options):
    """A training whose optimizer has this reader; the watch, and the weights around each step."""
    scheme.register(Momentum)(reader)
    model = network() if model is None else model
    optimizer = Momentum(model.parameters(), **options)
    training = Training(model.named_parameters(), optimizer)
    with watch(optimizer, model, every=every) as watcher:
        training.take(steps)
    assert watcher.error is None
    assert_angles(watcher, training.history, ["0.weight", "2.weight"])
    return watcher, training.history


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("normed", [False, True])
def test_a_reader_that_is_right_gives_the_effective_rate_of_every_step(normed, caplog):
    watcher, _ = watched(read_momentum, normed=normed)
    assert len(series(watcher.records(), "effective_lr", "0.weight")) == STEPS
    assert not lines(caplog)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: Step(step.a * 3, step.b, step.lr, decay=step.decay),
        lambda step: Step(step.a, step.b, step.lr, decay=7.0),
        lambda step: Step(step.a * torch.nan, step.b, step.lr),
        lambda step: Step(step.a, step.b, 1e30, decay=step.decay),
    ],
)
def test_a_reader_that_is_wrong_later_is_dropped_from_then_on(change, caplog):
    watcher, history = watched(late(change))
    table = watcher.records()
    for name in ("0.weight", "2.weight"):
        share = {step: quantities(point, [name])["radial_share"].mean() for step, point in history.items()}
        assert series(table, "radial_share", name, "mean") == pytest.approx(share, abs=1e-4)
        found = series(table, "effective_lr", name)
        assert [step for step, value in found.items() if value == value] == [0, 1, 2]
        assert list(series(table, "lr", name, "mean").values()) == pytest.approx([0.05] * STEPS)
    assert "effective_lr" in watcher.missing
    assert len(lines(caplog)) == 1


def test_no_quantity_of_a_reader_is_recorded_after_the_flush_that_finds_it_wrong(caplog):
    scheme.register(Momentum)(late(lambda step: Step(step.a, step.b * 2, step.lr)))
    params = rows((4, 5), (3, 5))
    optimizer = Momentum(groups_of(params), weight_decay=0.0)
    with watch(optimizer, every=1, phenomena=True) as watcher:
        for k in range(STEPS):
            set_gradients(params, k)
            optimizer.step()
            if k == STEPS - 2:
                watcher.flush()
    table = watcher.records()
    for quantity in ("effective_lr", "nu", "radial", "direction_norm", "deformation"):
        found = series(table, quantity)
        assert [step for step, value in found.items() if value == value] == [0, 1, 2], quantity
    assert len(series(table, "angle")) == STEPS
    assert len(lines(caplog)) == 1


def test_a_reader_that_disagrees_is_described(caplog):
    def read_half(taken):
        step = read_momentum(taken)
        return Step(step.a, step.b * 2, step.lr)

    watched(read_half, weight_decay=0.0)
    [line] = lines(caplog)
    for part in ("Momentum", "read_half", "0.weight", "relative error of 0.5 ", "0.5 times as long"):
        assert part in line


def fails(taken):
    raise AttributeError("no such thing")


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda taken: taken.group["lrr"], "KeyError: 'lrr'"),
        (fails, "AttributeError: no such thing"),
        (lambda taken: None, "AttributeError: 'NoneType' object has no attribute 'a'"),
        (lambda taken: Step(taken.gradient()[0], torch.ones(()), 0.1), "for 0.weight has a relative error of"),
        (lambda taken: Step(taken.gradient(), 1.0, 0.1), "AttributeError: 'float' object has no attribute"),
        (lambda taken: Step(taken.gradient(), torch.ones_like(taken.param), None), "TypeError: unsupported operand"),
    ],
)
def test_a_reader_that_fails_is_dropped_with_one_line(returned, says, steps_before, caplog):
    def read_badly(taken):
        return returned(taken) if taken.state["k"] > steps_before else read_momentum(taken)

    watcher, _ = watched(read_badly)
    [line] = lines(caplog)
    assert "Momentum" in line
    assert "read_badly" in line
    assert says in line
    assert "effective_lr" in watcher.missing


def test_a_reader_gets_whole_parameters():
    shapes = set()

    def read(taken):
        step = read_momentum(taken)
        shapes.add((taken.param.shape, taken.param.grad.shape, taken.state["m"].shape, taken.before.shape))
        assert taken.param.shape == taken.before.shape == taken.param.grad.shape == taken.state["m"].shape
        return step

    model = nn.Sequential(nn.Linear(400, 400, bias=False), nn.Unflatten(1, (4, 100)), nn.Conv1d(4, 3, 2, bias=False))
    torch.manual_seed(0)
    scheme.register(Momentum)(read)
    optimizer = Momentum(model.parameters(), normed=True)
    with watch(optimizer, model) as watcher:
        Training(model.named_parameters(), optimizer).take(2)
    assert {tuple(each[0]) for each in shapes} == {(400, 400), (3, 4, 2)}
    assert "effective_lr" in watcher.latest()["0.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_that_rounding_swallows_are_no_disagreement(dtype, caplog):
    watcher, _ = watched(read_momentum, network().to(dtype), lr=1e-7, weight_decay=0.0)
    assert "effective_lr" in watcher.latest()["0.weight"]
    assert not lines(caplog)


def test_a_reader_of_a_class_that_keeps_a_step_of_torch_is_compared_too(caplog):
    class Mine(torch.optim.Adam):
        """Adam, but its reader is wrong about it."""

    @scheme.register(Mine)
    def read_mine(taken):
        step = scheme.read_adam(taken)
        return Step(step.a, step.b, step.lr * 3)

    model = network()
    optimizer = Mine(model.parameters(), lr=0.01)
    training = Training(model.named_parameters(), optimizer)
    with watch(optimizer, model) as watcher:
        training.take(STEPS)
    assert_angles(watcher, training.history, ["0.weight", "2.weight"])
    assert "read_mine" in "".join(lines(caplog))
    assert "effective_lr" in watcher.missing


# Optimizers made of RowOptimizer


def shrink(rows, group):
    """x' = x − η∇L(x), and no telemetry."""
    for _, (x, gradient) in rows.pieces("param", "grad"):
        x.sub_(group["lr"] * gradient)


class Silent(RowOptimizer):
    update = staticmethod(shrink)

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def _entries(self, group):
        return ()


class SilentSGD(st.optim.SGD):
    """Has the update and the telemetry of SGD without momentum, but its own update where rows have a momentum."""

    update = staticmethod(shrink)


@pytest.mark.parametrize("make", [Silent, lambda params: SilentSGD(params, lr=0.05, momentum=0.9, without="bc")])
def test_an_optimizer_without_telemetry_is_observed_from_two_points(make, caplog):
    params = rows((4, 5), (3, 5))
    optimizer = make(groups_of(params))
    training = Training({"w": params[0], "v": params[1]}, optimizer)
    with watch(optimizer) as watcher:
        training.take(STEPS)
    assert watcher.error is None
    assert_angles(watcher, training.history, ["w", "v"])
    assert "effective_lr" in watcher.missing
    assert not {sentence.kind for sentence in watcher.verdict()} & {"dead", "collapsed", "not finite"}
    with pytest.raises(TypeError, match="emits=True"):
        optimizer.emit()


def test_a_class_with_an_update_that_emits_says_so():
    class Mine(st.optim.SGD, emits=True):
        update = staticmethod(sgd)

    class Same(Mine):
        """Keeps the update."""

    params = rows((4, 5))
    optimizer = Same(groups_of(params), lr=0.05, momentum=0.9, without="bc")
    optimizer.emit()
    set_gradients(params, 0)
    optimizer.step()
    assert (optimizer.telemetry[params[0]][:, :4] > 0).all()

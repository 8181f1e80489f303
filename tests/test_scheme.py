"""What read_step reads, what it refuses, and that the reading is a snapshot."""

import re

import pytest
import torch
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, RMSprop, Rprop
from torch.optim.lr_scheduler import ExponentialLR

import steradian as st
from steradian import scheme
from steradian.scheme import Step, UnreadableOptimizerError, read_step


def parameter(values=(3.0, 4.0), gradient=(1.0, 2.0), dtype=torch.float32):
    x = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    x.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return x


def stepped(x, optimizer):
    optimizer.step()
    return read_step(optimizer, x)


def test_adam_is_read_as_in_section_2():
    x = parameter(dtype=torch.float64)
    optimizer = Adam([x], lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.5)
    g0 = x.grad + 0.5 * x.detach()
    step = stepped(x, optimizer)
    torch.testing.assert_close(step.a, g0)  # a_0 = ∇L(x_0) + λx_0
    x.grad = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    g1 = x.grad + 0.5 * x.detach()
    step = stepped(x, optimizer)
    torch.testing.assert_close(step.a, 0.8 * g0 + g1)
    v = 0.95 * 0.05 * g0**2 + 0.05 * g1**2
    torch.testing.assert_close(step.b, (1 - 0.8**2) / (1 - 0.8) * ((v / (1 - 0.95**2)).sqrt() + 1e-3))
    assert (step.lr, step.l2, step.decay, step.beta) == (0.1, 0.5, 0.0, 0.8)


def test_adamw_decays_beside_the_step():
    x = parameter()
    step = stepped(x, AdamW([x], lr=0.1, weight_decay=0.3))
    assert (step.l2, step.decay) == (0.0, 0.3)
    torch.testing.assert_close(step.a, x.grad)


def test_sgd_momentum_obeys_the_recursion_of_the_generic_scheme():
    x = parameter(dtype=torch.float64)
    optimizer = SGD([x], lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.1)
    previous = stepped(x, optimizer).a
    for _ in range(5):
        x.grad = torch.randn(2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        regularized = x.grad + 0.1 * x.detach()
        step = stepped(x, optimizer)
        torch.testing.assert_close(step.a, 0.9 * previous + regularized)
        torch.testing.assert_close(step.b, torch.full_like(step.a, 1 / 0.75))
        previous = step.a


def test_settings_are_those_of_the_parameters_own_group():
    x, y = parameter(), parameter()
    optimizer = SGD([{"params": [x], "lr": 0.5}, {"params": [y], "weight_decay": 0.2}], lr=0.1)
    optimizer.step()
    assert (read_step(optimizer, x).lr, read_step(optimizer, x).l2) == (0.5, 0.0)
    assert (read_step(optimizer, y).lr, read_step(optimizer, y).l2) == (0.1, 0.2)


def test_the_reading_is_a_snapshot():
    x = parameter()
    rate = torch.tensor(0.1)
    optimizer = SGD([x], lr=rate, momentum=0.9)
    schedule = ExponentialLR(optimizer, 0.5)
    step = stepped(x, optimizer)
    a = step.a.clone()
    schedule.step()
    x.grad = torch.tensor([5.0, 5.0])
    optimizer.step()
    torch.testing.assert_close(step.a, a)
    assert float(step.lr) == pytest.approx(0.1)
    assert float(rate) == pytest.approx(0.05)


def test_reading_changes_nothing():
    x = parameter()
    optimizer = SGD([x], lr=0.1, weight_decay=0.1, maximize=True)
    optimizer.step()
    gradient, point = x.grad.clone(), x.detach().clone()
    read_step(optimizer, x)
    torch.testing.assert_close(x.grad, gradient, rtol=0, atol=0)
    torch.testing.assert_close(x.detach(), point, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_float32(dtype):
    x = parameter(dtype=dtype)
    step = stepped(x, Adam([x], lr=0.1))
    assert step.a.dtype == step.b.dtype == torch.float32


def test_subclasses_that_keep_the_step_are_read():
    class Renamed(Adam):
        pass

    class Changed(Adam):
        def step(self, closure=None):
            return None

    x = parameter()
    torch.testing.assert_close(stepped(x, Renamed([x], lr=0.1)).a, x.grad)
    with pytest.raises(UnreadableOptimizerError, match="Changed"):
        read_step(Changed([x], lr=0.1), x)


def test_an_optimizer_of_ones_own_can_be_registered(monkeypatch):
    monkeypatch.setattr(scheme, "_readers", dict(scheme._readers))

    class Sign(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad.sign(), alpha=-group["lr"])

    @scheme.register(Sign)
    def read(taken):
        gradient = taken.gradient()
        return Step(gradient, gradient.abs(), taken.setting("lr"))

    x = parameter()
    step = stepped(x, Sign([x]))
    torch.testing.assert_close(step.a / step.b, torch.ones(2))


@pytest.mark.parametrize("kind", [Rprop, ASGD])
def test_an_unknown_optimizer_is_named(kind):
    x = parameter()
    optimizer = kind([x])
    optimizer.step()
    with pytest.raises(UnreadableOptimizerError, match=rf"{kind.__name__}.*register.*observed_step") as error:
        read_step(optimizer, x)
    known = re.search(r"readable are (.*?)\.", str(error.value)).group(1).split(", ")
    assert {"SGD", "Adam", "AdamG", "Lion", "AdamWScheduleFree"} <= set(known)
    assert len(known) == len(set(known))


@pytest.mark.parametrize("kind", [Adam, AdamW, Adagrad, RMSprop, lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_no_step_taken(kind):
    x = parameter()
    with pytest.raises(ValueError, match="no step was taken"):
        read_step(kind([x]), x)


@pytest.mark.parametrize("kind", [lambda p: SGD(p, lr=0.1), Adagrad, RMSprop])
def test_a_cleared_gradient_is_said(kind):
    x = parameter()
    optimizer = kind([x])
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="before zero_grad"):
        read_step(optimizer, x)


def test_a_parameter_without_a_gradient_in_the_step_has_no_state():
    x, y = parameter(), parameter(gradient=None)
    optimizer = Adam([x, y])
    optimizer.step()
    with pytest.raises(ValueError, match=r"no '(step|exp_avg)'"):
        read_step(optimizer, y)


def test_bad_input():
    x = parameter()
    optimizer = SGD([x], lr=0.1)
    optimizer.step()
    with pytest.raises(ValueError, match="not one of the optimizer"):
        read_step(optimizer, parameter())
    with pytest.raises(ValueError, match="before must have"):
        read_step(optimizer, x, before=torch.zeros(3))
    with pytest.raises(UnreadableOptimizerError, match="got int"):
        read_step(3, x)


def test_complex_parameters_and_sparse_gradients_are_refused():
    z = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    optimizer = Adam([z])
    optimizer.step()
    with pytest.raises(TypeError, match="complex64"):
        read_step(optimizer, z)
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = SGD(table.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(TypeError, match="sparse"):
        read_step(optimizer, table.weight)


def test_an_unrecoverable_point_is_not_guessed():
    x = parameter()
    optimizer = SGD([x], lr=1.0, weight_decay=1.0)
    before = x.detach().clone()
    optimizer.step()
    with pytest.raises(ValueError, match="pass before="):
        read_step(optimizer, x)
    torch.testing.assert_close(read_step(optimizer, x, before=before).a, x.grad + before)


@pytest.mark.parametrize("kind", ["LionT", Adam([torch.nn.Parameter(torch.ones(2))]), int])
def test_only_a_class_of_optimizers_can_be_registered(kind):
    with pytest.raises(TypeError, match="class"):
        scheme.register(kind)


def test_a_subclass_of_ours_with_its_own_update_is_not_read_as_its_base():
    class Mine(st.optim.Adam):
        update = staticmethod(lambda rows, group: None)

    with pytest.raises(UnreadableOptimizerError, match="Mine"):
        scheme.reader_of(Mine([{"params": [parameter(((3.0, 4.0),), None)], "rows": "filter"}]))

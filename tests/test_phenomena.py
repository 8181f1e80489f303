"""The decomposition of c against the recursion in real optimizers, and the sizes of the phenomena."""

import math

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from steradian import geometry, phenomena
from steradian.image import image_step
from steradian.phenomena import Memory
from steradian.scheme import Step, read_step

from networks import NETWORKS, backward_passes

RATES = [0.01 * (1 + 0.5 * math.sin(k / 7)) for k in range(100)]


def recorded(optimizer_of, *, steps=100, network="BN", name="3.weight"):
    """Points, gradients and read steps of a training with varying rate."""
    torch.manual_seed(0)
    model = NETWORKS[network].build().double()
    optimizer = optimizer_of(model.parameters())
    param = model.get_parameter(name)
    points, gradients, read = [], [], []
    for k in backward_passes(model, steps):
        for group in optimizer.param_groups:
            group["lr"] = RATES[k % len(RATES)]
        points.append(param.detach().clone())
        gradients.append(param.grad.clone())
        optimizer.step()
        read.append(read_step(optimizer, param))
    return points, gradients, read


OPTIMIZERS = {
    "SGD-M": lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.05),
    "Adam": lambda p: Adam(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.05, eps=0),
    "AdamW": lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.05, eps=0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_history_form_of_c_equals_the_recursion_over_100_steps(name):
    points, gradients, steps = recorded(OPTIMIZERS[name])
    memory = Memory()
    for k, (x, g, step) in enumerate(zip(points, gradients, steps, strict=True)):
        memory.update(x, g, beta=step.beta)
        if k % 9 and k < 95:
            continue
        history, slopes = points[: k + 1], gradients[: k + 1]
        c_grad, c_l2 = phenomena.c_grad(history, slopes, step.beta), phenomena.c_l2(history, step.beta)
        scale = c_grad.abs().max()
        torch.testing.assert_close(memory.c_grad, c_grad, rtol=0, atol=1e-10 * scale)
        torch.testing.assert_close(memory.c_l2, c_l2, rtol=0, atol=1e-10)
        image = image_step(x, step)
        c = phenomena.c(history, slopes, step)
        if step.decay:
            c = c * (image.start / image.radius).unsqueeze(-1)  # c is defined with the radius after the decay
        torch.testing.assert_close(
            geometry.tangent(c, image.direction), image.effective_direction, rtol=0, atol=1e-10 * c.abs().max()
        )


def test_history_form_of_nu_equals_the_recursion_over_100_steps():
    points, gradients, steps = recorded(OPTIMIZERS["Adam"])
    for k in (0, 1, 10, 50, 99):
        nu = phenomena.nu(points[: k + 1], gradients[: k + 1], (0.9, 0.99), l2=0.05)
        torch.testing.assert_close(nu, image_step(points[k], steps[k]).nu, rtol=1e-10, atol=0)


def test_history_form_of_the_rescaled_nu():
    """Adam without (abc) multiplies v by (r/r')² after each step; r_k √v̂_k is then free of radius ratios."""
    points, gradients, _ = recorded(OPTIMIZERS["Adam"])
    rows = [x.flatten(1) for x in points]
    v = torch.zeros(6, dtype=torch.float64)
    for k, g in enumerate(gradients):
        v = 0.99 * v + 0.01 * ((g.flatten(1) + 0.05 * rows[k]) ** 2).mean(1)
        expected = rows[k].norm(dim=1) * (1 - 0.9 ** (k + 1)) / 0.1 * (v / (1 - 0.99 ** (k + 1))).sqrt()
        if k + 1 < len(rows):
            v = v * (rows[k].norm(dim=1) / rows[k + 1].norm(dim=1)) ** 2
        if k in (0, 1, 50, 99):
            nu = phenomena.nu(points[: k + 1], gradients[: k + 1], (0.9, 0.99), l2=0.05, rescaled=True)
            torch.testing.assert_close(nu, expected, rtol=1e-10, atol=0)


def measured(optimizer_of, **options):
    points, gradients, steps = recorded(optimizer_of, **options)
    memory = Memory()
    for x, g, step in zip(points, gradients, steps, strict=True):
        memory.update(x, g, beta=step.beta)
        yield memory.phenomena(step)


def test_what_an_optimizer_does_not_have_measures_zero():
    for step in measured(lambda p: SGD(p, lr=0.01, momentum=0.9), steps=20):
        assert step.deformation.angle.max() < 1e-7  # the division by 1
        assert step.l2_memory.angle.max() < 1e-7  # no L2
    for step in measured(lambda p: SGD(p, lr=0.01, weight_decay=0.1), steps=20):
        for effect in (step.gradient_memory, step.l2_memory, step.radius_ratio):
            assert effect.angle.max() < 1e-7  # no memory
    for step in measured(lambda p: AdamW(p, lr=0.01, weight_decay=0.1), steps=20):
        assert step.l2_memory.angle.max() < 1e-7  # decoupled: what AdamW is for


def test_adam_has_all_four():
    *_, last = measured(lambda p: Adam(p, lr=0.01, weight_decay=0.1), steps=50)
    for effect in (last.deformation, last.gradient_memory, last.l2_memory, last.radius_ratio):
        assert (effect.angle > 1e-6).all()
        assert (effect.change > 1e-6).all()
        assert (effect.angle < math.pi).all()


def test_a_constant_radius_has_no_radius_ratio():
    memory = Memory()
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        x = 2 * geometry.split(torch.randn(3, 5, dtype=torch.float64, generator=generator))[1]
        g = geometry.tangent(torch.randn(3, 5, dtype=torch.float64, generator=generator), x / 2)
        memory.update(x, g, beta=0.9)
    step = Step(memory.c_grad / 2, torch.ones(3, 5, dtype=torch.float64), lr=0.1, l2=0.01, beta=0.9)
    assert memory.phenomena(step).radius_ratio.angle.max() < 1e-12


def test_sizes_in_the_plane_are_the_angles_one_expects():
    """One past gradient along the motion by θ: projection keeps cos θ of it, transport all of it."""
    theta, u = 0.3, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    heading = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    p = math.cos(theta) * u + math.sin(theta) * heading
    sideways = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    memory = Memory()
    memory.update(u, heading, beta=1.0)
    memory.update(p, sideways, beta=1.0)
    effect = memory.phenomena(Step(memory.c_grad, torch.ones_like(u), lr=0.1)).gradient_memory
    assert effect.angle.item() == pytest.approx(math.pi / 4 - math.atan(math.cos(theta)), rel=1e-9)
    assert effect.change.item() == pytest.approx((1 - math.cos(theta)) / math.hypot(1, math.cos(theta)), rel=1e-9)
    deformed = Step(torch.tensor([[0.0, 1.0, 1.0]]).double(), torch.tensor([[1.0, 1.0, 3.0]]).double(), lr=0.1)
    memory = Memory()
    memory.update(u, heading + sideways, beta=0.0)
    assert memory.phenomena(deformed).deformation.angle.item() == pytest.approx(math.pi / 4 - math.atan(1 / 3))


def test_joint_rows():
    weight, bias = torch.randn(4, 3), torch.randn(4)
    memory = Memory(2)
    memory.update([weight, bias], [weight * 0.1, bias * 0.2], beta=0.9)
    assert memory.c_grad.shape == (2, 8)
    steps = [Step(torch.ones_like(t), torch.ones_like(t), lr=0.1) for t in (weight, bias)]
    assert memory.phenomena(steps).deformation.angle.shape == (2,)


def test_collapsed_rows_stay_finite():
    memory = Memory()
    for scale in (1.0, 0.0, 1.0):
        memory.update(torch.tensor([[1.0, 2.0], [scale, 0.0]]), torch.ones(2, 2), beta=0.9)
        effects = memory.phenomena(Step(torch.ones(2, 2), torch.ones(2, 2), lr=0.1, l2=0.1))
        for effect in vars(effects).values():
            assert effect.angle.isfinite().all()
            assert effect.change.isfinite().all()


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: phenomena.c_grad([], [], 0.9), "one gradient per point"),
        (lambda: phenomena.c_grad([ONE, ONE], [ONE], 0.9), "one gradient per point"),
        (lambda: phenomena.c_l2([ONE, torch.zeros(2, 3)], 0.9), "point 1 has a collapsed row"),
        (lambda: phenomena.c_l2([ONE * float("nan")], 0.9), "NaN"),
        (lambda: Memory().c_grad, "empty"),
        (lambda: Memory().update(ONE, torch.ones(3, 3), beta=0.9), "same shape"),
        (lambda: Memory().update(ONE, ONE * float("nan"), beta=0.9), "gradient has NaN"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_sums_stay_where_they_are_and_go_on_from_a_copy():
    torch.manual_seed(0)
    history = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(6)]
    whole, first = Memory(), Memory()
    for x, g in history:
        whole.update(x, g, beta=0.9)
    for x, g in history[:3]:
        first.update(x, g, beta=0.9)
    kept = {name: tensor.clone() for name, tensor in first.state().items()}
    where = [tensor.data_ptr() for tensor in first.state().values()]
    first.update(*history[0], beta=0.5)
    first.load(kept)
    fresh, emptied = Memory(), Memory()
    fresh.load(kept)
    for x, g in history[3:]:
        first.update(x, g, beta=0.9)
        fresh.update(x, g, beta=0.9)
    emptied.update(*history[1], beta=0.9)
    emptied.load({})
    for x, g in history:
        emptied.update(x, g, beta=0.9)
    assert [tensor.data_ptr() for tensor in first.state().values()] == where
    for other in (first, fresh, emptied):
        for name, tensor in whole.state().items():
            assert torch.equal(other.state()[name], tensor), name
    assert Memory().state() == {}

"""The decomposition of c against the recursion in real optimizers, and the sizes of the phenomena."""

import math

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from steradian import geometry
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


def history_form(points, gradients, beta):
    """c^grad and c^L2 from the whole history, as Eqs. 20 and 21 have them."""
    r, k = [x.flatten(1).norm(dim=1, keepdim=True) for x in points], len(points) - 1
    slopes = [r[i] * g.flatten(1) for i, g in enumerate(gradients)]  # ∇L(u_i), Lemma 1
    c_grad = sum(beta ** (k - i) * r[k] / r[i] * slope for i, slope in enumerate(slopes))
    c_l2 = sum(beta ** (k - i) * r[i] / r[k] * x.flatten(1) / r[i] for i, x in enumerate(points))
    return c_grad, c_l2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_history_form_of_c_equals_the_recursion_over_100_steps(name):
    points, gradients, steps = recorded(OPTIMIZERS[name])
    memory = Memory()
    for k, (x, g, step) in enumerate(zip(points, gradients, steps, strict=True)):
        memory.update(x, g, beta=step.beta)
        if k % 9 and k < 95:
            continue
        c_grad, c_l2 = history_form(points[: k + 1], gradients[: k + 1], step.beta)
        scale = c_grad.abs().max()
        torch.testing.assert_close(memory.c_grad, c_grad, rtol=0, atol=1e-10 * scale)
        torch.testing.assert_close(memory.c_l2, c_l2, rtol=0, atol=1e-10)
        image = image_step(x, step)
        b = step.b.flatten(1)
        c = (c_grad + step.l2 * image.radius.unsqueeze(-1) ** 2 * c_l2) / (b / b.square().mean(1, keepdim=True).sqrt())
        if step.decay:
            c = c * (image.start / image.radius).unsqueeze(-1)  # c is defined with the radius after the decay
        torch.testing.assert_close(
            geometry.tangent(c, image.direction), image.effective_direction, rtol=0, atol=1e-10 * c.abs().max()
        )


def test_history_form_of_nu_equals_the_recursion_over_100_steps():
    """ν_k = d^{-1/2} (1−β1^{k+1})/(1−β1) √((1−β2)/(1−β2^{k+1})) √(Σ β2^{k−i} (r_k/r_i)² ‖∇L(u_i) + λr_i²u_i‖²)."""
    points, gradients, steps = recorded(OPTIMIZERS["Adam"])
    rows = [(x.flatten(1), g.flatten(1)) for x, g in zip(points, gradients, strict=True)]
    for k in (0, 1, 10, 50, 99):
        # ‖∇L(u_i) + λr_i²u_i‖ is r_i‖∇L(x_i) + λx_i‖.
        terms = [0.99 ** (k - i) * (g + 0.05 * x).square().mean(1) for i, (x, g) in enumerate(rows[: k + 1])]
        root = (0.01 / (1 - 0.99 ** (k + 1)) * sum(terms)).sqrt()
        nu = rows[k][0].norm(dim=1) * (1 - 0.9 ** (k + 1)) / (1 - 0.9) * root
        torch.testing.assert_close(nu, image_step(points[k], steps[k]).nu, rtol=1e-10, atol=0)


def measured(optimizer_of, **options):
    points, gradients, steps = recorded(optimizer_of, **options)
    memory = Memory()
    for x, g, step in zip(points, gradients, steps, strict=True):
        memory.update(x, g, beta=step.beta)
        yield memory.phenomena(step)


def test_what_an_optimizer_does_not_have_measures_zero():
    for step in measured(lambda p: SGD(p, lr=0.01, momentum=0.9), steps=20):
        assert step.deformation.max() < 1e-7  # the division by 1
        assert step.l2_memory.max() < 1e-7  # no L2
    for step in measured(lambda p: SGD(p, lr=0.01, weight_decay=0.1), steps=20):
        for angle in (step.gradient_memory, step.l2_memory, step.radius_ratio):
            assert angle.max() < 1e-7  # no memory
    for step in measured(lambda p: AdamW(p, lr=0.01, weight_decay=0.1), steps=20):
        assert step.l2_memory.max() < 1e-7  # decoupled: what AdamW is for


def test_adam_has_all_four():
    *_, last = measured(lambda p: Adam(p, lr=0.01, weight_decay=0.1), steps=50)
    for angle in (last.deformation, last.gradient_memory, last.l2_memory, last.radius_ratio):
        assert (angle > 1e-6).all()
        assert (angle < math.pi).all()


def test_a_constant_radius_has_no_radius_ratio():
    memory = Memory()
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        x = 2 * geometry.split(torch.randn(3, 5, dtype=torch.float64, generator=generator))[1]
        g = geometry.tangent(torch.randn(3, 5, dtype=torch.float64, generator=generator), x / 2)
        memory.update(x, g, beta=0.9)
    step = Step(memory.c_grad / 2, torch.ones(3, 5, dtype=torch.float64), lr=0.1, l2=0.01, beta=0.9)
    assert memory.phenomena(step).radius_ratio.max() < 1e-12


def test_sizes_in_the_plane_are_the_angles_one_expects():
    """One past gradient along the motion by θ: projection keeps cos θ of it, transport all of it."""
    theta, u = 0.3, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    heading = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    p = math.cos(theta) * u + math.sin(theta) * heading
    sideways = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    memory = Memory()
    memory.update(u, heading, beta=1.0)
    memory.update(p, sideways, beta=1.0)
    angle = memory.phenomena(Step(memory.c_grad, torch.ones_like(u), lr=0.1)).gradient_memory
    assert angle.item() == pytest.approx(math.pi / 4 - math.atan(math.cos(theta)), rel=1e-9)
    deformed = Step(torch.tensor([[0.0, 1.0, 1.0]]).double(), torch.tensor([[1.0, 1.0, 3.0]]).double(), lr=0.1)
    memory = Memory()
    memory.update(u, heading + sideways, beta=0.0)
    assert memory.phenomena(deformed).deformation.item() == pytest.approx(math.pi / 4 - math.atan(1 / 3))


def test_joint_rows():
    weight, bias = torch.randn(4, 3), torch.randn(4)
    memory = Memory(2)
    memory.update([weight, bias], [weight * 0.1, bias * 0.2], beta=0.9)
    assert memory.c_grad.shape == (2, 8)
    steps = [Step(torch.ones_like(t), torch.ones_like(t), lr=0.1) for t in (weight, bias)]
    assert memory.phenomena(steps).deformation.shape == (2,)


def test_collapsed_rows_stay_finite():
    memory = Memory()
    for scale in (1.0, 0.0, 1.0):
        memory.update(torch.tensor([[1.0, 2.0], [scale, 0.0]]), torch.ones(2, 2), beta=0.9)
        angles = memory.phenomena(Step(torch.ones(2, 2), torch.ones(2, 2), lr=0.1, l2=0.1))
        for angle in vars(angles).values():
            assert angle.isfinite().all()


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
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

"""Theorem 1 on real training steps, and the image step at its edges."""

import math

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from steradian import geometry
from steradian.groups import Layout
from steradian.image import image_step, observed_step
from steradian.scheme import Step, read_step

from networks import NETWORKS, backward_passes, parameters, snapshot

OPTIMIZERS = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, L2": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "SGD, maximize": lambda p: SGD(p, lr=0.01, weight_decay=0.1, maximize=True),
    "SGD, momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "SGD, momentum, L2": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD, dampening": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "SGD, full dampening": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=1.0),
    "SGD, Nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, Nesterov, L2": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05),
    "SGD, foreach": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD, fused": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam, L2": lambda p: Adam(p, lr=0.01, weight_decay=0.01),
    "Adam, maximize": lambda p: Adam(p, lr=0.001, weight_decay=0.01, maximize=True),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "Adam, foreach": lambda p: Adam(p, lr=0.01, weight_decay=0.01, foreach=True),
    "Adam, fused": lambda p: Adam(p, lr=0.01, weight_decay=0.01, fused=True),
    # torch divides a tensor rate in the rate's own precision, so it is as wide as the parameters here.
    "Adam, tensor rate": lambda p: Adam(p, lr=torch.tensor(0.01, dtype=torch.float64), weight_decay=0.01),
    "Adam, decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.5, decoupled_weight_decay=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.5),
    "AdamW, amsgrad, fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.5, amsgrad=True, fused=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.05),
    "Adagrad, L2": lambda p: Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.01),
    "Adagrad, fused": lambda p: Adagrad(p, lr=0.05, lr_decay=0.1, fused=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
    "RMSprop, L2": lambda p: RMSprop(p, lr=0.01, weight_decay=0.01),
    "RMSprop, centered": lambda p: RMSprop(p, lr=0.003, weight_decay=0.01, centered=True),
    "RMSprop, momentum": lambda p: RMSprop(p, lr=0.003, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("network_name", NETWORKS)
def test_prediction_is_what_happens(network_name, optimizer_name, dtype):
    torch.manual_seed(0)
    network = NETWORKS[network_name]
    model = network.build().to(dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    images, reached = {names: [] for names in network.rows}, {names: [] for names in network.rows}
    for _ in backward_passes(model, 50):
        before = {names: snapshot(parameters(model, names)) for names in network.rows}
        optimizer.step()
        for names, rows in network.rows.items():
            params = parameters(model, names)
            steps = [read_step(optimizer, p, before=x) for p, x in zip(params, before[names], strict=True)]
            images[names].append(image_step(before[names], steps, rows))
            reached[names].append(Layout(rows).join([p.detach().clone() for p in params]))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for names, seen in images.items():
        r, u = geometry.split(torch.stack(reached[names]))
        torch.testing.assert_close(torch.stack([image.next_direction for image in seen]), u, atol=tolerance, rtol=0)
        radii = torch.stack([image.next_radius for image in seen])
        torch.testing.assert_close(radii, r.squeeze(-1), atol=0, rtol=tolerance)
        assert torch.stack([image.h1 & image.h2 for image in seen]).all()


@pytest.mark.parametrize("optimizer_name", ["SGD, L2", "SGD, Nesterov, L2", "SGD, maximize", "RMSprop"])
def test_the_point_before_is_recovered_where_it_is_not_given(optimizer_name):
    torch.manual_seed(0)
    model = NETWORKS["BN"].build().double()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for _ in backward_passes(model, 20):
        [before] = snapshot(parameters(model, ("0.weight",)))
        optimizer.step()
        param = model.get_parameter("0.weight")
        given, recovered = read_step(optimizer, param, before=before), read_step(optimizer, param)
        torch.testing.assert_close(recovered.a, given.a, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("network_name", NETWORKS)
def test_labelled_rows_are_radially_invariant(network_name):
    """Lemma 1: the gradient is tangent and (−1)-homogeneous, so the image step is one of the network's function."""
    torch.manual_seed(0)
    network = NETWORKS[network_name]
    model = network.build().double()
    for names, rows in network.rows.items():
        for _ in backward_passes(model, 1):
            points = Layout(rows).join(parameters(model, names)).detach()
            gradient = Layout(rows).join([p.grad for p in parameters(model, names)])
        with torch.no_grad():
            for p in parameters(model, names):
                p.mul_(3)
        for _ in backward_passes(model, 1):
            scaled = Layout(rows).join([p.grad for p in parameters(model, names)])
        cosine = geometry.dot(gradient, points) / (geometry.norm(gradient) * geometry.norm(points))
        assert cosine.abs().max() < 1e-12
        torch.testing.assert_close(3 * scaled, gradient, atol=1e-12, rtol=1e-10)


def twin(x, a, b, lr, decay):
    """Theorem 1 and Table 1 as the paper writes them, one row, Python floats."""
    r0 = math.sqrt(sum(v * v for v in x))
    r = r0 * (1 - lr * decay)
    u = [v / r0 for v in x]
    b_bar = math.sqrt(sum(v * v for v in b) / len(b))
    c = [r * p / (q / b_bar) for p, q in zip(a, b, strict=True)]
    A = lr / (r * r * b_bar)
    cu = sum(p * q for p, q in zip(c, u, strict=True))
    perp = [p - cu * q for p, q in zip(c, u, strict=True)]
    rate = A / (1 - A * cu)
    z = rate * math.sqrt(sum(v * v for v in perp))
    return {
        "radius": r0,
        "radial": A * cu,
        "nu": r * b_bar,
        "effective_lr": rate,
        "direction_norm": math.sqrt(sum(v * v for v in perp)),
        "velocity": z,
        "taylor": z * z,
        "angle": math.atan(z),
        "next_radius": r * (1 - A * cu) * math.sqrt(1 + z * z),
        "effective_direction": perp,
        "next_direction": [(p - rate * q) / math.sqrt(1 + z * z) for p, q in zip(u, perp, strict=True)],
    }


@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_every_quantity_equals_the_papers_formula(decay):
    generator = torch.Generator().manual_seed(1)
    x, a = torch.randn(2, 7, 5, dtype=torch.float64, generator=generator)
    b = torch.rand(7, 5, dtype=torch.float64, generator=generator) + 0.1
    image = image_step(x, Step(a, b, lr=0.3, decay=decay))
    for i in range(7):
        expected = twin(x[i].tolist(), a[i].tolist(), b[i].tolist(), 0.3, decay)
        if expected["radial"] >= 1:
            assert not image.h1[i]
            continue
        for name, value in expected.items():
            torch.testing.assert_close(
                getattr(image, name)[i], torch.tensor(value, dtype=torch.float64), rtol=1e-10, atol=1e-12, msg=name
            )


def test_table_of_effective_rates():
    """Table 1: SGD has η/r², with L2 η/(r²(1−ηλ)); the effective direction is the gradient on the sphere."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    tangent = torch.tensor([[-4.0, 3.0]], dtype=torch.float64)
    ones = torch.ones_like(x)
    plain = image_step(x, Step(tangent, ones, lr=0.1))
    assert plain.effective_lr.item() == pytest.approx(0.1 / 25)
    coupled = image_step(x, Step(tangent + 0.5 * x, ones, lr=0.1, l2=0.5))
    assert coupled.effective_lr.item() == pytest.approx(0.1 / (25 * (1 - 0.05)))
    torch.testing.assert_close(plain.effective_direction, 5 * tangent)
    torch.testing.assert_close(coupled.effective_direction, 5 * tangent)


@pytest.mark.parametrize("velocity", [1e-9, 1e-4, 0.1, 0.2499, 0.2501, 1.0, 3.0])
def test_exponential_form_and_its_error(velocity):
    """u' ≈ Exp_u(−η^e c^⊥), Eq. 12: the points are z − atan z apart."""
    x = torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64)
    image = image_step(
        x, Step(torch.tensor([[0.0, velocity, 0.0]], dtype=torch.float64) * 2, torch.ones_like(x), lr=1.0)
    )
    reached = geometry.exp(image.direction, -image.effective_lr.unsqueeze(-1) * image.effective_direction)
    measured = geometry.angle(reached, image.next_direction).item()
    assert measured == pytest.approx(velocity - math.atan(velocity), abs=4e-16)


def test_observed_step_tells_what_two_points_tell():
    torch.manual_seed(0)
    model = NETWORKS["BN"].build().double()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    param = model.get_parameter("3.weight")
    for _ in backward_passes(model, 5):
        before = param.detach().clone()
        optimizer.step()
        read, seen = image_step(before, read_step(optimizer, param)), observed_step(before, param)
        for name in ("radius", "next_radius", "velocity", "angle", "next_direction", "taylor"):
            torch.testing.assert_close(getattr(seen, name), getattr(read, name), rtol=1e-9, atol=1e-12)
        assert seen.h1.all()
        unknown = ("effective_lr", "effective_direction", "direction_norm", "radial", "nu")
        assert all(getattr(seen, name) is None for name in unknown)


def test_a_step_through_the_origin_is_still_exact():
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    image = image_step(x, Step(torch.tensor([[3.0, -1.0]], dtype=torch.float64), torch.ones_like(x), lr=1.0))
    assert not image.h1.item()
    torch.testing.assert_close(image.next_radius, torch.tensor([math.sqrt(5)], dtype=torch.float64))
    torch.testing.assert_close(image.next_direction, torch.tensor([[-2.0, 1.0]], dtype=torch.float64) / math.sqrt(5))
    assert image.angle.item() == pytest.approx(math.pi - math.atan(0.5))


def test_a_step_to_a_right_angle_has_an_infinite_rate_and_no_nan():
    x = torch.tensor([[1.0, 0.0]])
    image = image_step(x, Step(torch.tensor([[1.0, 1.0]]), torch.ones_like(x), lr=1.0))
    assert not image.h1.item()
    assert image.effective_lr.isinf().item()
    assert image.angle.item() == pytest.approx(math.pi / 2)
    assert not any(getattr(image, name).isnan().any() for name in QUANTITIES)


QUANTITIES = [
    "radius",
    "radial",
    "effective_lr",
    "velocity",
    "angle",
    "next_radius",
    "nu",
    "taylor",
    "direction_norm",
    "direction",
    "effective_direction",
    "next_direction",
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_collapsed_rows_are_flagged_and_leave_the_others_alone(dtype):
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]], dtype=dtype)
    a = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 0.0]], dtype=dtype)
    image = image_step(x, Step(a, torch.ones_like(a), lr=1.0))
    assert image.collapsed.tolist() == [True, False, True]
    assert image.h1.tolist() == [False, True, False]
    assert not any(getattr(image, name).isnan().any() for name in QUANTITIES)
    assert not any(getattr(image, name).isinf().any() for name in QUANTITIES)
    for name in ("angle", "velocity", "effective_lr", "radial"):
        assert getattr(image, name)[0] == getattr(image, name)[2] == 0
    alone = image_step(x[1:2], Step(a[1:2], torch.ones_like(a[1:2]), lr=1.0))
    for name in QUANTITIES:
        torch.testing.assert_close(getattr(image, name)[1:2], getattr(alone, name), rtol=0, atol=0)
    assert image.next_radius[0].item() == pytest.approx(math.sqrt(5), rel=1e-6)
    assert image.next_radius[2] == 0


def test_a_zero_row_that_stays_zero():
    image = observed_step(torch.zeros(1, 3), torch.zeros(1, 3))
    assert image.collapsed.item()
    assert image.angle.item() == image.velocity.item() == image.next_radius.item() == 0


@pytest.mark.parametrize("exponent", [-30, -15, 15, 30])
def test_tiny_and_huge_rows_in_float32(exponent):
    """The image of x and a scaled together, at one rate, is the same up to the radius."""
    generator = torch.Generator().manual_seed(2)
    x, a = torch.randn(2, 4, 9, generator=generator)
    near = image_step(x, Step(a, torch.ones_like(a), lr=0.1))
    far = image_step(x * 10.0**exponent, Step(a * 10.0**exponent, torch.ones_like(a), lr=0.1))
    torch.testing.assert_close(far.next_direction, near.next_direction, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(far.angle, near.angle, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(far.next_radius * 10.0**-exponent, near.next_radius, rtol=1e-5, atol=0)


def test_half_precision_is_computed_in_float32():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    image = image_step(x, Step(torch.ones_like(x), torch.ones_like(x), lr=1e-3))
    exact = image_step(x.double(), Step(torch.ones(4, 8).double(), torch.ones(4, 8).double(), lr=1e-3))
    assert image.angle.dtype == torch.float32
    torch.testing.assert_close(image.angle.double(), exact.angle, rtol=1e-5, atol=0)


def test_a_rate_of_zero_moves_nothing():
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image = image_step(x, Step(torch.ones_like(x), torch.ones_like(x), lr=0.0))
    assert image.angle.tolist() == [0.0] * 3
    torch.testing.assert_close(image.next_direction, image.direction)
    assert (image.direction_norm > 0).all()


def test_decoupled_decay_that_flips_a_row_breaks_h1():
    x = torch.tensor([[1.0, 0.0]])
    image = image_step(x, Step(torch.zeros(1, 2), torch.ones(1, 2), lr=1.0, decay=3.0))
    assert not image.h1.item()
    assert image.next_radius.item() == 2
    assert image.angle.item() == pytest.approx(math.pi)


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("x", "step", "error", "words"),
    [
        (torch.full((2, 3), float("nan")), Step(ONE, ONE, 0.1), ValueError, "NaN"),
        (torch.tensor([[1.0, 2.0, 3.0], [1.0, float("inf"), 0.0]]), Step(ONE, ONE, 0.1), ValueError, "1 of 2 rows"),
        (ONE, Step(ONE * float("nan"), ONE, 0.1), ValueError, "a ⊘ b"),
        (ONE, Step(ONE, torch.zeros(2, 3), 0.1), ValueError, "a ⊘ b"),
        (torch.ones(0, 3), Step(torch.ones(0, 3), torch.ones(0, 3), 0.1), ValueError, "no entries"),
        (torch.ones(3, 2), Step(ONE, ONE, 0.1), ValueError, "same shapes"),
        (ONE, Step(ONE, torch.ones(1), 0.1), ValueError, "step.b"),
        (ONE.to(torch.complex64), Step(ONE, ONE, 0.1), TypeError, "complex64"),
        (ONE.int(), Step(ONE, ONE, 0.1), TypeError, "int32"),
    ],
)
def test_bad_input(x, step, error, words):
    with pytest.raises(error, match=words):
        image_step(x, step)


def test_bad_points():
    with pytest.raises(ValueError, match="x_next"):
        observed_step(ONE, ONE * float("nan"))
    with pytest.raises(ValueError, match="x_next"):
        observed_step(ONE, torch.ones(3, 2))
    with pytest.raises(ValueError, match="joint rows take one step"):
        image_step([ONE, ONE], [Step(ONE, ONE, 0.1), Step(ONE, ONE, 0.2)])


def test_joint_steps_of_a_rate_that_is_not_a_number_share_it():
    image = image_step([ONE, ONE], [Step(ONE, ONE, float("nan"))] * 2, check=False)
    assert image.next_radius.isnan().all()
    with pytest.raises(ValueError, match="joint rows take one step"):
        image_step([ONE, ONE], [Step(ONE, ONE, 0.1), Step(ONE, ONE, float("nan"))])

"""Schemes that are one on the sphere: exactly (L2 as a schedule) and to the order that Theorem 4 promises."""

import math
from fractions import Fraction

import pytest
import torch
from torch.optim import SGD

from steradian import geometry
from steradian.equivalence import adagradg_from_sgd, exponential_schedule
from steradian.image import image_step
from steradian.scheme import read_step

from networks import NETWORKS, backward_passes

CONVOLUTIONS = ("0.weight", "3.weight")


def angles_between(run, other):
    """Between the rows of two runs of one parameter, at every point."""
    one, two = (torch.stack([x.flatten(1) for x in points]) for points in (run, other))
    return geometry.angle(one, two)


def sgd_run(steps, *, lr, weight_decay):
    """Points and image steps of the convolutions of a BN network without affine; the rest is frozen."""
    torch.manual_seed(0)
    model = NETWORKS["BN without affine"].build().double()
    params = [model.get_parameter(name) for name in CONVOLUTIONS]
    optimizer = SGD(params, lr=lr(0), weight_decay=weight_decay)
    points, images = [[] for _ in params], [[] for _ in params]
    for k in backward_passes(model, steps):
        optimizer.param_groups[0]["lr"] = lr(k)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        for i, p in enumerate(params):
            points[i].append(before[i])
            images[i].append(image_step(before[i], read_step(optimizer, p, before=before[i])))
    return points, images


def difference_of(run, other):
    """How far two runs are from the condition of Lemma 3: equal effective rates and directions at every step."""
    largest = 0.0
    for one, two in zip(run, other, strict=True):
        rates = one.effective_lr / two.effective_lr - 1
        directions = one.effective_direction - two.effective_direction
        turned = directions.norm(dim=1) / one.effective_direction.norm(dim=1)
        largest = max(largest, rates.abs().max().item(), turned.max().item())
    return largest


def test_l2_is_an_exponential_schedule_over_1000_steps():
    lr, weight_decay = 0.02, 0.05
    points, images = sgd_run(1000, lr=lambda k: lr, weight_decay=weight_decay)
    free_points, free_images = sgd_run(1000, lr=exponential_schedule(lr, weight_decay), weight_decay=0)
    for i in range(len(CONVOLUTIONS)):
        travelled = angles_between([points[i][0]], [points[i][-1]]).max()
        assert travelled > 0.1  # the runs went somewhere
        assert angles_between(points[i], free_points[i]).max() < 1e-9
        assert difference_of(images[i], free_images[i]) < 1e-8


def test_another_schedule_is_not_equivalent():
    points, images = sgd_run(200, lr=lambda k: 0.02, weight_decay=0.05)
    others, other_images = sgd_run(200, lr=lambda k: 0.02, weight_decay=0)
    assert angles_between(points[0], others[0]).max() > 1e-4
    assert difference_of(images[0], other_images[0]) > 1e-4


def adagradg_run(steps, *, lr, weight_decay):
    """AdaGradG as Section 3.2 writes it, in plain tensors, with the constants of Theorem 4."""
    torch.manual_seed(0)
    model = NETWORKS["BN without affine"].build().double()
    params = [model.get_parameter(name) for name in CONVOLUTIONS]
    constants = [adagradg_from_sgd(lr, weight_decay, p.detach().flatten(1).norm(dim=1)) for p in params]
    v = [c["v0"].clone() for c in constants]
    with torch.no_grad():
        for p in params:
            p.div_(p.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
    points = [[] for _ in params]
    for _ in backward_passes(model, steps):
        with torch.no_grad():
            for i, p in enumerate(params):
                points[i].append(p.detach().clone())
                p.sub_(constants[i]["lr"] * p.grad / v[i].sqrt().view(-1, 1, 1, 1))
                p.div_(p.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
                v[i] = constants[i]["beta"] * v[i] + p.grad.flatten(1).norm(dim=1) ** 2
    return points


def largest_angle(steps, lr, weight_decay):
    sgd, _ = sgd_run(steps, lr=lambda k: lr, weight_decay=weight_decay)
    adagradg = adagradg_run(steps, lr=lr, weight_decay=weight_decay)
    return max(angles_between(one, two).max().item() for one, two in zip(sgd, adagradg, strict=True))


def exponent(rates, angles):
    """Slope of log angle over log rate, by least squares."""
    x, y = torch.tensor(rates).log(), torch.tensor(angles).log()
    return (((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()).item()


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_sgd_is_adagradg_to_second_order_at_a_fixed_number_of_steps(weight_decay):
    """Dropping z⁴ in the radius leaves a relative error of order η⁴ in η^e; the angle is η^e times a sum: η⁵."""
    rates = [0.04, 0.02, 0.01, 0.005]
    angles = [largest_angle(20, lr, weight_decay) for lr in rates]
    assert exponent(rates, angles) == pytest.approx(5, abs=0.3)


def test_sgd_is_adagradg_to_second_order_over_a_fixed_horizon():
    """With the number of steps growing as 1/η, errors of order η⁴ per step add up to η³."""
    rates = [0.04, 0.02, 0.01, 0.005]
    angles = [largest_angle(round(0.8 / lr), lr, 0.05) for lr in rates]
    assert exponent(rates, angles) == pytest.approx(3, abs=0.3)


def test_the_papers_constants():
    constants = adagradg_from_sgd(1e-2, 1e-3, 1.0)
    assert constants["beta"] == pytest.approx(0.99996, abs=5e-7)
    assert constants["lr"] == pytest.approx(0.7071, abs=1e-4)


def test_the_schedule_keeps_its_digits():
    lr, weight_decay = 1e-3, 1e-5
    kept = 1 - Fraction(lr) * Fraction(weight_decay)
    expected = Fraction(lr) / kept**2001
    assert exponential_schedule(lr, weight_decay)(1000) == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: exponential_schedule(0.0, 0.1), "lr must be positive"),
        (lambda: exponential_schedule(2.0, 0.5), "below 1"),
        (lambda: exponential_schedule(0.1, -0.5), "not negative"),
        (lambda: adagradg_from_sgd(0.1, 0.1, torch.tensor([1.0, 0.0])), "radius must be positive"),
        (lambda: adagradg_from_sgd(0.1, 0.1, math.nan), "radius must be positive"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()

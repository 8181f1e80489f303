"""Rivals against twins in float64, written from the formulas."""

import math

import numpy as np
import pytest
import torch

from steradian.lab.rivals import Hyperball, Rotational
from steradian.watching.watch import watch


def gradients(shape, steps=6):
    random = np.random.default_rng(3)
    return [random.normal(size=shape) for _ in range(steps)]


def run(optimizer, param, found):
    for gradient in found:
        param.grad = torch.from_numpy(gradient).to(param.dtype)
        optimizer.step()
    return param.detach().double().numpy()


def polynomial(matrix):
    """Five Newton–Schulz steps on one matrix."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("capturable", [False, True])
def test_rotational_follows_its_formula(capturable):
    start, found, lr, decay, beta = (
        np.random.default_rng(0).normal(size=(5, 3, 2, 2)),
        gradients((5, 3, 2, 2)),
        0.1,
        5e-3,
        0.9,
    )
    param = torch.nn.Parameter(torch.from_numpy(start.copy()))
    rate = torch.tensor(lr, dtype=torch.float64) if capturable else lr
    groups = [{"params": [param], "rows": "filter"}]
    moved = run(Rotational(groups, rate, beta, weight_decay=decay, capturable=capturable), param, found)
    for k in range(5):
        x, m, mean = start[k].ravel(), 0.0, 0.0
        r = math.sqrt(x @ x)
        for t, gradient in enumerate(found, 1):
            m = beta * m + gradient[k].ravel()
            across = m - (m @ x) / r**2 * x
            mean = 0.9 * mean + 0.1 * across @ across
            y = x - math.sqrt(2 * lr * decay / (1 + beta)) * r * across / math.sqrt(mean / (1 - 0.9**t))
            x = r * y / np.linalg.norm(y)
        np.testing.assert_allclose(moved[k].ravel(), x, rtol=1e-12)


def test_hyperball_follows_its_formula_on_tensors_of_several_shapes():
    shapes, lr, beta = [(4, 6), (4, 6), (7, 3), (3, 2, 2, 2)], 0.05, 0.95
    starts = [np.random.default_rng(k).normal(size=shape) for k, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start in starts]
    optimizer = Hyperball([{"params": params, "rows": "tensor"}], lr, beta)
    found = [gradients(shape) for shape in shapes]
    for step in range(6):
        for param, each in zip(params, found, strict=True):
            param.grad = torch.from_numpy(each[step])
        optimizer.step()
    for param, start, each in zip(params, starts, found, strict=True):
        w, m = start.reshape(len(start), -1), 0.0
        radius = np.linalg.norm(w)
        for gradient in each:
            m = beta * m + gradient.reshape(w.shape)
            u = gradient.reshape(w.shape) + beta * m
            u = polynomial(u) if len(w) <= w.shape[1] else polynomial(u.T).T
            y = w - lr * radius * u / np.linalg.norm(u)
            w = radius * y / np.linalg.norm(y)
        np.testing.assert_allclose(param.detach().reshape(w.shape).numpy(), w, rtol=1e-10)


@pytest.mark.parametrize("make", [Rotational, Hyperball])
def test_rivals_give_the_rest_to_sgd_and_can_be_saved(make):
    start, found = torch.randn(4, 6), gradients((4, 6), 8)
    rows = "filter" if make is Rotational else "tensor"

    def fresh():
        params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
        groups = [{"params": params[:1], "rows": rows}, {"params": params[1:]}]
        return params, make(groups, 0.1, 0.9, weight_decay=0.01, rest_lr=0.2)

    def steps(params, optimizer, some):
        for gradient in some:
            for param in params:
                param.grad = torch.from_numpy(gradient).float()
            optimizer.step()

    params, optimizer = fresh()
    steps(params, optimizer, found)
    alone = torch.nn.Parameter(start.clone())
    run(torch.optim.SGD([alone], 0.2, 0.9, weight_decay=0.01), alone, found)
    torch.testing.assert_close(params[1], alone)
    again, first = fresh()
    steps(again, first, found[:4])
    continued = make([{"params": again[:1], "rows": rows}, {"params": again[1:]}], 0.1, 0.9, weight_decay=0.01)
    continued.load_state_dict(first.state_dict())
    steps(again, continued, found[4:])
    assert all(torch.equal(a, b) for a, b in zip(again, params, strict=True))


def test_a_watch_sees_the_angle_of_hyperball():
    param = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Hyperball([{"params": [param], "rows": "tensor"}], 0.05, 0.95)
    with watch(optimizer) as watched:
        before = param.detach().clone()
        run(optimizer, param, gradients((4, 6), 1))
    turned = torch.arccos((before * param).sum() / before.norm() ** 2).item()
    [found] = watched.latest().values()
    assert found["angle"]["median"] == pytest.approx(turned, rel=1e-3)
    assert param.norm().item() == pytest.approx(before.norm().item(), rel=1e-6)


def test_hyperball_turns_blocks_as_matrices_of_their_own():
    """Heads: blocks of rows of one matrix, each with its own norm."""
    start, found, lr, beta = np.random.default_rng(0).normal(size=(6, 4)), gradients((6, 4)), 0.05, 0.95
    whole, *heads = (torch.nn.Parameter(torch.from_numpy(part.copy())) for part in (start, *np.split(start, 3)))
    moved = run(Hyperball([{"params": [whole], "rows": 3}], lr, beta), whole, found)
    for k, head in enumerate(heads):
        parts = [np.split(gradient, 3)[k] for gradient in found]
        alone = run(Hyperball([{"params": [head], "rows": "tensor"}], lr, beta), head, parts)
        np.testing.assert_allclose(np.split(moved, 3)[k], alone, rtol=1e-12)

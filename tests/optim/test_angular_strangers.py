"""Angular against a loop over rows in float64, and the properties that its definition promises.

The twin is written from the definition alone, row by row: h = r ∇L(x)^⊥, m ← β m + h, n = m or h + β m, a direction d
from n, an angle, u' = cos θ u − sin θ d/‖d‖, and m carried from u to u' by the general isometry.
"""

import io
import math
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steradian import optim

DIRECTIONS = ("gradient", "adam", "muon")
SPREADS = ("equal", "rms")
WAYS = list(product(DIRECTIONS, SPREADS))

# how a parameter of a shape is cut into rows: spec, shape, and the shape of one row
CUTS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "filters of a matrix": ("filter", (4, 6), (6,)),
    "more filters than entries": ("filter", (7, 3), (3,)),
    "filters of a convolution": ("filter", (4, 2, 3, 3), (2, 3, 3)),
    "heads": (2, (6, 5), (3, 5)),
    "one tensor": ("tensor", (4, 5), (4, 5)),
    "slices of dimension 1": (("axis", 1), (5, 3), (5,)),
}


def cut(tensor: Tensor, spec: Any) -> Tensor:
    """(n, d), written anew."""
    if spec == "filter":
        return tensor.flatten(1)
    if spec == "tensor":
        return tensor.reshape(1, -1)
    if isinstance(spec, int):
        return tensor.reshape(spec, -1)
    return tensor.transpose(0, 1).flatten(1)


def paste(matrix: Tensor, spec: Any, shape: tuple[int, ...]) -> Tensor:
    if isinstance(spec, tuple):
        return matrix.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return matrix.reshape(shape)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps of X ← aX + bXXᵀX + c(XXᵀ)²X from X = M/‖M‖, on the wide side."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


class Twin:
    """The rows of one parameter under Angular, in float64."""

    def __init__(self, rows: Tensor, block: tuple[int, ...] | None, **settings: Any) -> None:
        self.x = rows.detach().double().clone()
        self.block = block  # the shape of a row if it is a matrix of its own, for "muon"
        self.settings = settings
        self.m = torch.zeros_like(self.x)
        self.big_v = torch.zeros_like(self.x)
        self.v = torch.zeros(len(rows), dtype=torch.float64)
        self.t = 0
        self.angles = torch.zeros(len(rows), dtype=torch.float64)

    def step(self, gradient: Tensor, lr: float) -> None:
        settings, gradient = self.settings, gradient.double()
        beta, beta2 = settings["momentum"], settings["beta2"]
        self.t += 1
        self.angles = torch.zeros_like(self.angles)
        units, heights, ns = [], [], []
        for i, x in enumerate(self.x):
            u = x / x.norm()
            h = x.norm() * (gradient[i] - gradient[i].dot(u) * u)
            if not gradient[i].any():
                h = torch.zeros_like(h)
            self.m[i] = beta * self.m[i] + h
            units.append(u)
            heights.append(h)
            ns.append(h + beta * self.m[i] if settings["nesterov"] else self.m[i].clone())
        for i, d in enumerate(self.directions(torch.stack(ns), heights, units)):
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * d.dot(d)
            if not heights[i].any():
                continue
            angle = lr
            if settings["spread"] == "rms":
                angle = min(lr * d.norm().item() / math.sqrt(self.v[i] / (1 - beta2**self.t)), 0.5)
            u = units[i]
            new = math.cos(angle) * u - math.sin(angle) * d / d.norm()
            self.x[i] = self.x[i].norm() * new
            tangent = self.m[i] - self.m[i].dot(u) * u
            self.m[i] = tangent - tangent.dot(new) / (1 + u.dot(new)) * (u + new)
            self.angles[i] = angle

    def directions(self, ns: Tensor, heights: list[Tensor], units: list[Tensor]) -> Iterator[Tensor]:
        if self.settings["direction"] == "muon" and self.block is None:
            ns = newton_schulz(ns)
        for i, (n, u) in enumerate(zip(ns, units, strict=True)):
            d = n
            if self.settings["direction"] == "muon" and self.block is not None:
                d = newton_schulz(n.reshape(self.block[0], -1)).flatten()
            if self.settings["direction"] == "adam":
                beta2 = self.settings["beta2"]
                self.big_v[i] = beta2 * self.big_v[i] + (1 - beta2) * heights[i] ** 2
                root = (self.big_v[i] / (1 - beta2**self.t)).sqrt()
                d = torch.where(root > 0, n / root, 0.0)
            yield d - d.dot(u) * u if self.settings["direction"] != "gradient" else d


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> Tensor:
    """Noise with a drift, with lengths that change from step to step, and not tangent."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, *shape, generator=generator, dtype=torch.float64)
    lengths = torch.randn(steps, *[1] * len(shape), generator=generator, dtype=torch.float64).exp()
    return lengths * (noise + torch.randn(shape, generator=generator, dtype=torch.float64))


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 9) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter((2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype))


def angular(x: nn.Parameter, rows: Any = "filter", **options: Any) -> optim.Angular:
    return optim.Angular([{"params": [x], "rows": rows}], **options)


def turned(before: Tensor, after: Tensor) -> Tensor:
    """Angles between rows, exact for small ones."""
    u, new = (nn.functional.normalize(t.detach().double(), dim=1) for t in (before, after))
    return 2 * ((u - new).norm(dim=1) / 2).asin()


def walk(optimizer: torch.optim.Optimizer, x: nn.Parameter, grads: Tensor) -> Tensor:
    """All points of a walk along given gradients, the first one included."""
    points = [x.detach().clone()]
    for g in grads:
        x.grad = g.to(x.dtype)
        optimizer.step()
        points.append(x.detach().clone())
    return torch.stack(points)


# --- the twin -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_every_step_is_the_twins(direction: str, spread: str, nesterov: bool, name: str):
    spec, shape, row = CUTS[name]
    settings = {"momentum": 0.8, "beta2": 0.9, "direction": direction, "spread": spread, "nesterov": nesterov}
    x = weight(shape)
    optimizer = angular(x, spec, lr=0.05, **settings)
    twin = Twin(cut(x, spec), row if name in ("heads", "one tensor") else None, **settings)
    for k, g in enumerate(gradients(shape, 12)):
        lr = optimizer.param_groups[0]["lr"] = 0.05 / (1 + k % 3)
        x.grad = g.clone()
        optimizer.step()
        twin.step(cut(g, spec), lr)
        torch.testing.assert_close(x.detach(), paste(twin.x, spec, shape), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_float32_follows_the_twin(direction: str, spread: str, nesterov: bool):
    settings = {"momentum": 0.9, "beta2": 0.99, "direction": direction, "spread": spread, "nesterov": nesterov}
    x = weight((5, 8), torch.float32)
    twin = Twin(x, None, **settings)
    points = walk(angular(x, lr=0.02, **settings), x, gradients((5, 8), 20).float())
    for g in gradients((5, 8), 20).float():
        twin.step(g, 0.02)
    torch.testing.assert_close(points[-1].double(), twin.x, rtol=1e-4, atol=1e-4)


def test_defaults_are_those_of_the_definition():
    x, y = weight((4, 6)), weight((4, 6))
    named = {"momentum": 0.9, "beta2": 0.99, "direction": "gradient", "spread": "equal", "nesterov": False}
    grads = gradients((4, 6), 5)
    assert torch.equal(walk(angular(x), x, grads), walk(angular(y, lr=0.01, **named), y, grads))


def test_the_first_step_goes_down_the_gradient_and_maximize_up():
    down, up, mirrored = (weight((4, 6)) for _ in range(3))
    g = gradients((4, 6), 1)
    before, after = walk(angular(down, lr=0.1), down, g)
    _, opposite = walk(angular(up, lr=0.1, maximize=True), up, g)
    tangent = g[0] - (g[0] * before).sum(1, keepdim=True) / before.square().sum(1, keepdim=True) * before
    assert ((after - before) * tangent).sum(1).max() < 0
    assert ((opposite - before) * tangent).sum(1).min() > 0
    torch.testing.assert_close(walk(angular(mirrored, lr=0.1), mirrored, -g)[1], opposite, rtol=1e-14, atol=1e-14)


def test_rows_over_several_parameters_are_one_row():
    settings = {"momentum": 0.8, "beta2": 0.9, "direction": "adam", "spread": "rms", "nesterov": True}
    w, b = weight((4, 6)), weight((4,), seed=3)
    optimizer = optim.Angular([{"params": [w, b], "rows": "filter", "joint": True}], lr=0.05, **settings)
    twin = Twin(torch.cat([w, b[:, None]], 1), None, **settings)
    for g in gradients((4, 7), 8):
        w.grad, b.grad = g[:, :6].clone(), g[:, 6].clone()
        optimizer.step()
        twin.step(g, 0.05)
    torch.testing.assert_close(torch.cat([w, b[:, None]], 1).detach(), twin.x, rtol=1e-9, atol=1e-9)


# --- what the trajectory of directions does not depend on -----------------------------------------------------------


def invariant_loss(x: Tensor, k: int) -> Tensor:
    """Depends on the directions of the rows alone, without any ε, and on the number of the step."""
    generator = torch.Generator().manual_seed(k)
    u = x / x.norm(dim=1, keepdim=True)
    target = torch.randn(3, x.shape[1], generator=generator, dtype=torch.float64)
    return (torch.tanh(u @ target.T) - 0.3).square().sum() + (u[:, :2] ** 3).sum() + (u[0] * u[1]).sum()


def directions(
    scale: Tensor | float = 1.0, factor: Callable[[int], float] = lambda k: 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Directions and radii of all points of a training on `invariant_loss`."""
    x = weight((4, 6))
    with torch.no_grad():
        x.mul_(scale)
    optimizer = angular(x, lr=0.03, momentum=0.8, beta2=0.9, **options)
    points = []
    for k in range(25):
        optimizer.zero_grad()
        (factor(k) * invariant_loss(x, k)).backward()
        optimizer.step()
        points.append(x.detach().clone())
    radii = torch.stack(points).norm(dim=2, keepdim=True)
    return torch.stack(points) / radii, radii


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize(("direction", "spread"), WAYS)
@pytest.mark.parametrize("how", ["rows rescaled", "weight decay", "loss times 1000", "loss over 1000"])
def test_directions_do_not_depend_on(how: str, direction: str, spread: str, nesterov: bool):
    options = {"direction": direction, "spread": spread, "nesterov": nesterov}
    expected, radii = directions(**options)
    if how == "rows rescaled":
        scale = torch.tensor([[0.01], [3.0], [70.0], [1.0]], dtype=torch.float64)
        found, other_radii = directions(scale, **options)
        torch.testing.assert_close(other_radii, radii * scale, rtol=1e-12, atol=0)
    elif how == "weight decay":
        found, _ = directions(weight_decay=0.3, **options)
        assert torch.equal(found, expected)
    else:
        factor = 1e3 if how == "loss times 1000" else 1e-3
        found, _ = directions(factor=lambda k: factor, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(radii, radii[:1].expand_as(radii), rtol=1e-12, atol=0)
    assert turned(expected[0], expected[-1]).min() > 0.05  # the walk is not trivial


@pytest.mark.parametrize("direction", ["gradient", "muon"])
def test_without_momentum_equal_spread_takes_the_direction_of_a_gradient_alone(direction: str):
    """A factor on the loss that changes from step to step changes nothing."""
    options = {"direction": direction, "spread": "equal"}
    grads = gradients((4, 6), 10)
    factors = gradients((1, 1), 10, seed=5).abs() + 0.01
    x, y = weight((4, 6)), weight((4, 6))
    expected = walk(angular(x, lr=0.05, momentum=0.0, **options), x, grads)
    found = walk(angular(y, lr=0.05, momentum=0.0, **options), y, factors * grads)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# --- the angle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lr", [1e-3, 0.02, 0.5])
def test_equal_spread_turns_every_row_by_lr(lr: float, direction: str, nesterov: bool, dtype: torch.dtype):
    x = weight((6, 40), dtype)
    points = walk(angular(x, lr=lr, direction=direction, nesterov=nesterov), x, gradients((6, 40), 15))
    for before, after in pairwise(points):
        assert (turned(before, after) - lr).abs().max() < 1e-6
    lengths = points.double().norm(dim=2)
    assert (lengths / lengths[0] - 1).abs().max() < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rms_spread_turns_rows_by_lr_in_the_root_mean_square(direction: str):
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(900, 6, 60, generator=generator, dtype=torch.float64)
    grads *= 1 + 0.5 * torch.rand(900, 6, 1, generator=generator, dtype=torch.float64)
    x = weight((6, 60))
    points = walk(angular(x, lr=0.02, momentum=0.5, direction=direction, spread="rms"), x, grads)
    angles = torch.stack([turned(points[k], points[k + 1]) for k in range(100, 900)])
    found = angles.square().mean(0).sqrt() / 0.02
    assert found.sub(1).abs().max() < 0.03
    if direction == "gradient":
        assert angles.std(0).min() > 0.02 * 0.02  # and not by lr in each step


def test_rms_spread_turns_more_where_gradients_are_large():
    x = weight((4, 30))
    grads = gradients((4, 30), 1)[0] * torch.tensor([1.0] * 30 + [3.0] + [1.0] * 5)[:, None, None]
    points = walk(angular(x, lr=0.01, momentum=0.0, beta2=0.99, spread="rms"), x, grads)
    angles = torch.stack([turned(a, b) for a, b in pairwise(points)])
    assert (angles[30] > 2 * angles[29]).all()
    assert (angles[31] < angles[29]).all()


def test_rms_spread_never_turns_by_more_than_half_a_radian():
    x = weight((4, 30))
    grads = gradients((4, 30), 31) * torch.tensor([1.0] * 30 + [1e4])[:, None, None]
    points = walk(angular(x, lr=0.2, momentum=0.0, beta2=0.99, spread="rms"), x, grads)
    torch.testing.assert_close(turned(points[-2], points[-1]), torch.full((4,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_rms_gradient_without_momentum_is_adam_g(beta2: float):
    x, y = weight((5, 8)), weight((5, 8))
    with torch.no_grad():
        for p in (x, y):
            p.div_(p.norm(dim=1, keepdim=True))
    grads = gradients((5, 8), 40)
    expected = walk(
        optim.AdamG([{"params": [y], "rows": "filter"}], lr=0.02, betas=(0.0, beta2), eps=0.0, clip=math.inf), y, grads
    )
    found = walk(angular(x, lr=0.02, momentum=0.0, beta2=beta2, spread="rms"), x, grads)
    assert turned(found[0], found[-1]).min() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_rms_gradient_has_the_angle_of_adam_without_abc_in_the_mean():
    """At η = θ √((1+β)/(d(1−β))) on noise; single steps differ."""
    theta, beta, size = 0.002, 0.8, 50
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(700, 20, size, generator=generator, dtype=torch.float64)
    x, y = weight((20, size)), weight((20, size))
    with torch.no_grad():
        for p in (x, y):
            p.div_(p.norm(dim=1, keepdim=True))
    lr = theta * math.sqrt((1 + beta) / (size * (1 - beta)))
    adam = optim.Adam([{"params": [y], "rows": "filter"}], lr=lr, betas=(beta, 0.99), eps=0.0, without="abc")
    means = []
    for points in (walk(angular(x, lr=theta, momentum=beta, beta2=0.99, spread="rms"), x, grads), walk(adam, y, grads)):
        angles = torch.stack([turned(points[k], points[k + 1]) for k in range(100, 700)])
        means.append(angles.mean())
    assert (means[0] / means[1]).item() == pytest.approx(1, abs=0.03)
    assert means[0].item() == pytest.approx(theta, rel=0.05)
    assert not torch.allclose(x, y, atol=1e-4)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.4], total_steps=12),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_sets_the_angle_and_the_rate_of_the_rest(name: str):
    x, rest = weight((4, 8)), weight((5,), seed=1)
    optimizer = optim.Angular(
        [{"params": [x], "rows": "filter"}, {"params": [rest]}], lr=0.04, rest_lr=0.2, momentum=0.0
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.04, 0.2]
    scheduler = SCHEDULES[name](optimizer)
    seen = []
    for g in gradients((4, 8), 10):
        for group in optimizer.param_groups:
            group["momentum"] = 0.0  # OneCycleLR moves it
        angle, rate = (float(group["lr"]) for group in optimizer.param_groups)
        before, before_rest = x.detach().clone(), rest.detach().clone()
        x.grad, rest.grad = g.clone(), g[0, :5].clone()
        optimizer.step()
        scheduler.step()
        assert (turned(before, x) - angle).abs().max() < 1e-9
        torch.testing.assert_close(rest.detach(), before_rest - rate * g[0, :5], rtol=1e-12, atol=1e-12)
        seen.append(angle)
    assert len(set(seen)) > 1


def test_a_rate_of_zero_turns_nothing():
    x = weight((4, 8))
    points = walk(angular(x, lr=0.0, spread="rms"), x, gradients((4, 8), 3))
    torch.testing.assert_close(points[-1], points[0], rtol=1e-15, atol=0)


def test_groups_may_have_angles_of_their_own():
    x, y = weight((4, 8)), weight((4, 8), seed=1)
    groups = [{"params": [x], "rows": "filter", "lr": 0.1}, {"params": [y], "rows": "filter"}]
    optimizer = optim.Angular(groups, lr=0.03)
    before = x.detach().clone(), y.detach().clone()
    x.grad, y.grad = gradients((2, 4, 8), 1)[0]
    optimizer.step()
    assert (turned(before[0], x) - 0.1).abs().max() < 1e-12
    assert (turned(before[1], y) - 0.03).abs().max() < 1e-12


# --- rows that do not turn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_a_row_without_gradient_stays_where_it_is(direction: str, spread: str, nesterov: bool):
    x = weight((4, 6))
    optimizer = angular(x, lr=0.05, direction=direction, spread=spread, nesterov=nesterov)
    grads = gradients((4, 6), 12)
    grads[5:9, 2] = 0.0  # in the midst of a training, with momentum
    grads[:, 3] = 0.0  # from the start
    points = walk(optimizer, x, grads)
    assert torch.equal(points[5, 2], points[9, 2])
    assert torch.equal(points[0, 3], points[-1, 3])
    assert points.isfinite().all()
    moved = turned(points[5], points[6])
    assert (moved[:2] > 1e-4).all()
    assert turned(points[9], points[10])[2] > 1e-4


def test_momentum_of_an_idle_row_decays():
    settings = {"momentum": 0.8, "beta2": 0.9, "direction": "gradient", "spread": "equal", "nesterov": False}
    x = weight((4, 6))
    twin = Twin(x, None, **settings)
    grads = gradients((4, 6), 12)
    grads[5:9, 2] = 0.0
    found = walk(angular(x, lr=0.05, **settings), x, grads)
    for g in grads:
        twin.step(g, 0.05)
    torch.testing.assert_close(found[-1], twin.x, rtol=1e-10, atol=1e-10)


def test_a_radial_gradient_is_no_reason_to_turn_far():
    """Rounding leaves a tangent part near 0, in no meaningful direction."""
    x = weight((4, 6), torch.float32)
    points = walk(angular(x, lr=0.05), x, x.detach()[None].clone())
    assert points.isfinite().all()
    assert turned(points[0], points[1]).max() < 0.05 + 1e-6


@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_a_collapsed_row_is_never_nan_and_never_touched(direction: str, spread: str):
    x = weight((4, 6))
    with torch.no_grad():
        x[1] = 0.0
    points = walk(angular(x, lr=0.05, direction=direction, spread=spread), x, gradients((4, 6), 5))
    assert points.isfinite().all()
    assert not points[:, 1].any()
    assert (turned(points[0], points[-1])[[0, 2, 3]] > 1e-3).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_a_gradient_that_is_not_finite_spoils_no_other_row(direction: str, spread: str, bad: float):
    x = weight((4, 6))
    grads = gradients((4, 6), 6)
    grads[2, 1, 3] = bad
    points = walk(angular(x, lr=0.05, direction=direction, spread=spread), x, grads)
    assert torch.equal(points[2, 1], points[3, 1])
    assert points.isfinite().all()
    assert (turned(points[2], points[3])[[0, 2, 3]] > 1e-4).all()
    assert (turned(points[3], points[4]) > 1e-4).all()  # and the row goes on


# --- half precision, telemetry --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_half_precision_rounds_the_exact_step(direction: str, spread: str, dtype: torch.dtype):
    settings = {"momentum": 0.8, "beta2": 0.9, "direction": direction, "spread": spread, "nesterov": False}
    x = weight((4, 32), dtype)
    optimizer = angular(x, lr=0.1, **settings)
    twin = Twin(x, None, **settings)
    unit = torch.finfo(dtype).eps
    for g in gradients((4, 32), 6).to(dtype):
        twin.x = x.detach().double().clone()  # the weights are rounded, the state is not
        x.grad = g.clone()
        optimizer.step()
        twin.step(g, 0.1)
        # half a unit of rounding, and what the momentum, carried along rounded or exact weights, differs by
        error = (x.detach().double() - twin.x).abs()
        assert (error <= unit * twin.x.abs() + unit * 0.1 * twin.x.norm(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_telemetry_tells_the_real_angle(direction: str, spread: str, dtype: torch.dtype):
    x = weight((4, 32), dtype)
    optimizer = angular(x, lr=0.02, direction=direction, spread=spread)
    optimizer.emit()
    for g in gradients((4, 32), 5).to(dtype):
        before = x.detach().clone()
        x.grad = g.clone()
        optimizer.step()
        told = dict(zip(optim.TELEMETRY, optimizer.telemetry[x].double().unbind(1), strict=True))
        torch.testing.assert_close(told["angle"], turned(before, x), rtol=2e-3, atol=2e-6)
        torch.testing.assert_close(told["radius"], before.double().norm(dim=1), rtol=1e-5, atol=0)
        torch.testing.assert_close(told["next_radius"], x.detach().double().norm(dim=1), rtol=1e-4, atol=0)
        torch.testing.assert_close(told["gradient_norm"], g.double().norm(dim=1), rtol=1e-5, atol=0)


# --- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            {"rest_lr": 0.03, "weight_decay": 0.2, "momentum": 0.7},
            lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.7, weight_decay=0.2),
        ),
        ({"rest": "adamw", "beta2": 0.999}, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)),
        (
            {"rest": "adamw", "beta2": 0.999, "rest_lr": 0.01, "weight_decay": 0.3},
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
        ),
        ({"maximize": True}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True)),
    ],
    ids=["sgd", "sgd with decay", "adamw", "adamw with decay", "maximize"],
)
def test_parameters_without_rows_get_torchs_own_step(options: dict[str, Any], other: Callable[..., Any]):
    x, mine, theirs = weight((4, 6)), weight((3, 5), seed=1), weight((3, 5), seed=1)
    optimizer = optim.Angular([{"params": [x], "rows": "filter"}, {"params": [mine]}], lr=0.02, **options)
    reference = other([theirs])
    for g, h in zip(gradients((4, 6), 10), gradients((3, 5), 10), strict=True):
        x.grad, mine.grad, theirs.grad = g.clone(), h.clone(), h.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_weight_decay_acts_on_the_rest_alone():
    decayed, rest = {}, {}
    for decay in (0.0, 0.5):
        x, y = weight((4, 6)), weight((3, 5), seed=1)
        optimizer = optim.Angular([{"params": [x], "rows": "filter"}, {"params": [y]}], lr=0.02, weight_decay=decay)
        for g, h in zip(gradients((4, 6), 5), gradients((3, 5), 5), strict=True):
            x.grad, y.grad = g.clone(), h.clone()
            optimizer.step()
        decayed[decay], rest[decay] = x.detach(), y.detach()
    assert torch.equal(decayed[0.0], decayed[0.5])
    assert not torch.allclose(rest[0.0], rest[0.5])


# --- state, arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize(("direction", "spread"), WAYS)
def test_a_saved_training_goes_on_with_the_same_bits(direction: str, spread: str, nesterov: bool, rest: str):
    options = {"lr": 0.05, "direction": direction, "spread": spread, "nesterov": nesterov, "rest": rest}
    grads, rest_grads = gradients((4, 6), 10), gradients((5,), 10)

    def make() -> tuple[nn.Parameter, nn.Parameter, optim.Angular]:
        x, y = weight((4, 6)), weight((5,), seed=1)
        return x, y, optim.Angular([{"params": [x], "rows": "filter"}, {"params": [y]}], **options)

    def train(x: nn.Parameter, y: nn.Parameter, optimizer: optim.Angular, steps: range) -> None:
        for k in steps:
            x.grad, y.grad = grads[k].clone(), rest_grads[k].clone()
            optimizer.step()

    whole, first, second = make(), make(), make()
    train(*whole, range(10))
    train(*first, range(4))
    file = io.BytesIO()
    torch.save(first[2].state_dict(), file)
    file.seek(0)
    second[2].load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for new, old in zip(second[:2], first[:2], strict=True):
            new.copy_(old)
    train(*second, range(4, 10))
    assert torch.equal(second[0], whole[0])
    assert torch.equal(second[1], whole[1])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lr", -0.1),
        ("lr", 0.6),
        ("lr", math.nan),
        ("momentum", -0.1),
        ("momentum", 1.0),
        ("beta2", -0.1),
        ("beta2", 1.0),
        ("direction", "newton"),
        ("spread", "mean"),
        ("weight_decay", -1.0),
        ("rest", "lion"),
        ("rest_lr", -1.0),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(argument: str, value: Any):
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b"):
        optim.Angular([{"params": [weight((4, 6))], "rows": "filter"}, {"params": [weight((5,))]}], **{argument: value})


def test_an_angle_of_a_group_is_checked_like_the_constructors():
    with pytest.raises(ValueError, match=r"\blr\b"):
        optim.Angular([{"params": [weight((4, 6))], "rows": "filter", "lr": 0.9}], lr=0.01)


def test_a_closure_is_evaluated_with_gradients():
    x = weight((4, 6))
    optimizer = angular(x, lr=0.05)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = invariant_loss(x, 0)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(15)]
    assert losses[-1] < losses[0]

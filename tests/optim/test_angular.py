"""Angular: what the angle is, what it does not depend on, and its matrices."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steradian import geometry, optim
from steradian.groups import Layout
from steradian.optim import TELEMETRY

DIRECTIONS, SPREADS = ("gradient", "adam", "muon"), ("equal", "rms")
ALL = list(product(DIRECTIONS, SPREADS))
ANGLE = TELEMETRY.index("angle")


def normalized(x: Tensor) -> Tensor:
    """A loss of the directions of the rows alone."""
    u = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True)
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(u.shape[1], 20, generator=draw, dtype=torch.float64).to(x)
    return ((u @ inputs).tanh() ** 2).mean() + (u**3).sum() / 7


def train(x: Tensor, steps: int = 15, *, scale: float = 1.0, **settings: Any) -> tuple[Tensor, optim.Angular]:
    """Directions after some steps, (steps, rows, d)."""
    p = nn.Parameter(x.clone())
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], **settings)
    optimizer.emit()
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        (scale * normalized(p)).backward()
        optimizer.step()
        seen.append(geometry.split(p.detach().flatten(1))[1])
    return torch.stack(seen), optimizer


def start(dtype: torch.dtype = torch.float64, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("direction", "spread"), ALL)
def test_radius_decay_and_scale_of_the_loss_do_not_change_the_directions(
    direction: str, spread: str, nesterov: bool
) -> None:
    settings = {"lr": 0.03, "direction": direction, "spread": spread, "nesterov": nesterov}
    expected, _ = train(start(), **settings)
    radii = torch.logspace(-6, 6, 6, dtype=torch.float64).view(-1, 1, 1)
    for found, _ in (
        train(start() * radii, **settings),
        train(start(), weight_decay=0.5, **settings),
        train(start(), scale=1e4, **settings),
        train(start(), scale=1e-4, **settings),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_row_turns_by_the_rate_and_keeps_its_radius(direction: str, nesterov: bool, dtype: torch.dtype) -> None:
    for lr in (0.007, 0.3):
        x = start(dtype) * torch.logspace(-3, 3, 6, dtype=dtype).view(-1, 1, 1)
        seen, optimizer = train(x, lr=lr, direction=direction, nesterov=nesterov)
        turned = geometry.angle(seen[1:].double(), seen[:-1].double())
        torch.testing.assert_close(turned, torch.full_like(turned, lr), rtol=0, atol=1e-6)
        [p] = optimizer.param_groups[0]["params"]
        torch.testing.assert_close(p.detach().flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-5, atol=0)
        torch.testing.assert_close(optimizer.telemetry[p][:, ANGLE], turned[-1, :, 0].to(dtype), rtol=0, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rms_turns_by_the_rate_in_the_root_mean_square(direction: str) -> None:
    """Over independent gradients of one size, after the memory of v has filled."""
    p = nn.Parameter(start(torch.float64, 40))
    optimizer = optim.Angular(
        [{"params": [p], "rows": "filter"}], lr=0.01, beta2=0.95, direction=direction, spread="rms"
    )
    optimizer.emit()
    draw, angles = torch.Generator().manual_seed(1), []
    for _ in range(300):
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        optimizer.step()
        angles.append(optimizer.telemetry[p][:, ANGLE].clone())
    found = torch.stack(angles[100:]).square().mean().sqrt()
    assert abs(found / 0.01 - 1) < 0.02
    assert torch.stack(angles).std() > 1e-4, "rows with larger gradients turn farther"


def test_rms_turns_by_half_a_radian_at_most() -> None:
    p = nn.Parameter(start())
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], lr=0.4, momentum=0.0, spread="rms")
    optimizer.emit()
    for size in (1e-3, 1.0):
        p.grad = size * torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(optimizer.telemetry[p][:, ANGLE], torch.full((6,), 0.5, dtype=p.dtype))


def test_without_momentum_gradient_with_rms_is_adamg_on_unit_rows() -> None:
    x = geometry.split(start().flatten(1))[1]
    p, q = nn.Parameter(x.clone()), nn.Parameter(x.clone())
    one = optim.Angular([{"params": [p], "rows": "filter"}], lr=0.02, momentum=0.0, beta2=0.97, spread="rms")
    other = optim.AdamG([{"params": [q], "rows": "filter"}], lr=0.02, betas=(0.0, 0.97), eps=0.0, clip=math.inf)
    draw = torch.Generator().manual_seed(5)
    for _ in range(30):
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        q.grad = p.grad.clone()
        one.step()
        other.step()
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-12)


def test_with_momentum_it_has_the_angle_of_adam_without_abc_in_the_mean() -> None:
    """At η = θ√((1+β)/(d(1−β))), for gradients that are independent and of one size; single angles differ."""
    theta, beta, n, d = 0.01, 0.9, 30, 64
    eta = theta * math.sqrt((1 + beta) / (d * (1 - beta)))
    draw = torch.Generator().manual_seed(2)
    x = geometry.split(torch.randn(n, d, generator=draw, dtype=torch.float64))[1]
    p, q = nn.Parameter(x.clone()), nn.Parameter(x.clone())
    one = optim.Angular([{"params": [p], "rows": "filter"}], lr=theta, momentum=beta, spread="rms")
    other = optim.Adam([{"params": [q], "rows": "filter"}], lr=eta, betas=(beta, 0.99), eps=0.0, without="abc")
    angles: list[list[Tensor]] = [[], []]
    for optimizer in (one, other):
        optimizer.emit()
    for _ in range(400):
        noise = torch.randn(n, d, generator=draw, dtype=torch.float64)
        for optimizer, weight, found in ((one, p, angles[0]), (other, q, angles[1])):
            r, u = geometry.split(weight.detach())
            weight.grad = geometry.tangent(noise, u) / r
            optimizer.step()
            # Adam's radius grows by 2 % in these steps; its angle is that at radius 1 over r.
            found.append(optimizer.telemetry[weight][:, ANGLE] * optimizer.telemetry[weight][:, 0])
    ours, theirs = (torch.stack(found[100:]) for found in angles)
    for found in (ours, theirs):
        assert abs(found.square().mean().sqrt() / theta - 1) < 0.02
    assert (ours / theirs - 1).abs().mean() > 0.01


# Rows that do not turn --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "spread"), ALL)
def test_a_row_without_gradient_does_not_turn_and_its_momentum_fades(direction: str, spread: str) -> None:
    p = nn.Parameter(start())
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], direction=direction, spread=spread)
    draw = torch.Generator().manual_seed(4)
    for _ in range(3):
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        optimizer.step()
    before, m = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
    p.grad[2] = 0
    optimizer.step()
    assert torch.equal(p.detach()[2], before[2])
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"][2], 0.9 * m[2])
    assert not (p.detach() == before).flatten(1).all(1)[[0, 1, 3, 4, 5]].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_bad_row_leaves_the_rest_of_its_matrix_finite(bad: float) -> None:
    p = nn.Parameter(start(torch.float32))
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], direction="muon", spread="rms")
    for k in range(4):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
        if k == 2:
            p.grad[1, 0] = bad
        before = p.detach().clone()
        optimizer.step()
        assert all(value.isfinite().all() for value in (p, *optimizer.state[p].values()))
        assert (p.detach() == before).flatten(1).all(1).tolist() == [k == 2 and row == 1 for row in range(6)]


# Matrices ---------------------------------------------------------------------------------------------------


def newton_schulz(n: Tensor) -> Tensor:
    """As torch.optim.Muon writes it, in float64 and without its ε."""
    x = n / n.norm()
    x = x.T if n.shape[0] > n.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if n.shape[0] > n.shape[1] else x


MATRICES_OF = {
    "filter": lambda g: [g.flatten(1)],
    "tensor": lambda g: [g.flatten(1)],
    2: lambda g: [part.flatten(1) for part in g.split(3)],
    ("axis", 1): lambda g: [g.transpose(0, 1).flatten(1)],
    ("grid", 1, 2): lambda g: [part.flatten(1) for part in g.split(2, dim=1)],
}


@pytest.mark.parametrize("memory", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("rows", MATRICES_OF, ids=str)
def test_the_first_step_goes_along_newton_schulz_of_the_matrix_or_of_each_block(rows: Any, memory: str) -> None:
    x = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arranged = {
        "contiguous": lambda t: t,
        "channels_last": lambda t: t.to(memory_format=torch.channels_last),
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    }[memory]
    layout = Layout(rows)
    p = nn.Parameter(arranged(x.clone()))
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    r, u = geometry.split(layout.rows(x))
    h = layout.restore(r * geometry.tangent(layout.rows(g), u), x.shape)
    found = [newton_schulz(matrix) for matrix in MATRICES_OF[rows](h)]
    along = {
        "filter": lambda: found[0].reshape(x.shape),
        "tensor": lambda: found[0].reshape(x.shape),
        2: lambda: torch.cat(found).reshape(x.shape),
        ("axis", 1): lambda: found[0].reshape(4, 6, 3, 3).transpose(0, 1),
        ("grid", 1, 2): lambda: torch.cat([part.reshape(6, 2, 3, 3) for part in found], dim=1),
    }[rows]()
    p.grad = arranged(g)
    optim.Angular([{"params": [p], "rows": rows}], lr=0.1, direction="muon").step()
    d = geometry.tangent(layout.rows(along), u)
    expected = r * geometry.exp(u, -0.1 * d / d.norm(dim=1, keepdim=True))
    torch.testing.assert_close(layout.rows(p.detach()), expected, rtol=0, atol=1e-10)


def test_a_bias_that_is_part_of_its_rows_is_a_column_of_the_matrix() -> None:
    weight, bias = (nn.Parameter(t) for t in start().flatten(1).split([11, 1], dim=1))
    alone = nn.Parameter(start().flatten(1))
    bias = nn.Parameter(bias.detach().flatten())
    one = optim.Angular([{"params": [weight, bias], "rows": "filter", "joint": True}], direction="muon")
    other = optim.Angular([{"params": [alone], "rows": "filter"}], direction="muon")
    for k in range(3):
        alone.grad = torch.randn(6, 12, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        weight.grad, bias.grad = alone.grad[:, :11].clone(), alone.grad[:, 11].clone()
        one.step()
        other.step()
    found = torch.cat([weight.detach(), bias.detach().unsqueeze(1)], dim=1)
    torch.testing.assert_close(found, alone.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("rows", ["filter", 2])
def test_parameters_of_one_shape_step_as_each_does_alone(rows: Any, capturable: bool) -> None:
    """Their matrices are multiplied together; one of them has no gradient in the first step."""
    shapes = [(6, 8), (8, 6), (6, 8), (4, 7), (6, 8)]
    draw = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    together, apart = ([nn.Parameter(t.clone()) for t in starts] for _ in range(2))
    settings: dict[str, Any] = {"direction": "muon", "spread": "rms", "nesterov": True, "capturable": capturable}
    optimizers = [optim.Angular([{"params": together, "rows": rows}], **settings)]
    optimizers += [optim.Angular([{"params": [p], "rows": rows}], **settings) for p in apart]
    for optimizer in optimizers:
        optimizer.emit()
    for step in range(3):
        for p, q in zip(together, apart, strict=True):
            p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
            q.grad = p.grad.clone()
        if step == 0:
            together[2].grad = apart[2].grad = None
        for optimizer in optimizers:
            optimizer.step()
    for p, q, alone in zip(together, apart, optimizers[1:], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(optimizers[0].telemetry[p], alone.telemetry[q], rtol=0, atol=1e-7)
        for name, value in optimizers[0].state[p].items():
            torch.testing.assert_close(value, alone.state[q][name], rtol=0, atol=1e-10)


def test_matrices_that_share_their_memory_are_stepped_one_after_the_other() -> None:
    x = start().flatten(1)
    shared, alone = nn.Parameter(x.clone()), nn.Parameter(x.clone())
    both = optim.Angular([{"params": [shared, nn.Parameter(shared.data)], "rows": "filter"}], direction="muon")
    for k, p in enumerate(both.param_groups[0]["params"]):
        p.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1 + k), dtype=x.dtype)
        alone.grad = p.grad.clone()
        optim.Angular([{"params": [alone], "rows": "filter"}], direction="muon").step()
    both.step()
    torch.testing.assert_close(shared.detach(), alone.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_filters_of_one_shape_step_as_each_does_alone(memory: torch.memory_format, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    starts = [torch.randn(6, 4, 3, 3, generator=draw).to(dtype, memory_format=memory) for _ in range(3)]
    together, apart = ([nn.Parameter(t.clone()) for t in starts] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "direction": "muon", "spread": "rms"}
    optimizers = [optim.Angular([{"params": together, "rows": "filter"}], **settings)]
    optimizers += [optim.Angular([{"params": [p], "rows": "filter"}], **settings) for p in apart]
    for _ in range(3):
        for p, q in zip(together, apart, strict=True):
            q.grad = torch.randn(p.shape, generator=draw).to(dtype, memory_format=memory)
            p.grad = q.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    tolerance: dict[str, float] = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for p, q, before in zip(together, apart, starts, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **tolerance)
        assert p.is_contiguous(memory_format=memory)
        turned = geometry.angle(*(geometry.split(t.detach().double().flatten(1))[1] for t in (before, p)))
        assert turned.min() > 0.1


# The rest, settings, half precision -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "theirs"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.1, nesterov=True)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)),
    ],
)
def test_the_rest_gets_the_step_of_torch(rest: str, theirs: Any) -> None:
    p, q = (nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    rows = nn.Parameter(start(torch.float32))
    one = optim.Angular(
        [{"params": [rows], "rows": "filter"}, {"params": [p]}],
        lr=0.02, momentum=0.8, beta2=0.95, nesterov=True, weight_decay=0.1, rest=rest,
    )  # fmt: skip
    other = theirs([q])
    assert [group["lr"] for group in one.param_groups] == [0.02, 0.1 if rest == "sgd" else 1e-3]
    for k in range(4):
        p.grad = torch.randn(5, generator=torch.Generator().manual_seed(k))
        q.grad = p.grad.clone()
        one.step()
        other.step()
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.6}, "lr must be an angle of at most 0.5 radians"),
        ({"lr": torch.tensor(0.6)}, "lr must be an angle"),
        ({"direction": "sgd"}, 'direction must be "gradient" or'),
        ({"spread": "even"}, "spread must be"),
        ({"rest": "adam"}, "rest must be"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
        ({"beta2": -0.1}, "beta2 must be"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov must be False without momentum"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.Angular([{"params": [nn.Parameter(start())], "rows": "filter"}], **settings)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_angle_that_a_scheduler_makes_too_large_is_refused(as_tensor: bool) -> None:
    """OneCycleLR's max_lr is a rate of its own, and no factor of the angle."""
    p = nn.Parameter(start())
    lr = torch.tensor(0.01) if as_tensor else 0.01
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], lr=lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
    while optimizer.param_groups[0]["lr"] <= 0.5:
        optimizer.step()
        scheduler.step()
    before = p.detach().clone()
    with pytest.raises(ValueError, match="lr must be an angle of at most"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_telemetry_tells_the_angle_of_the_rounded_weights(direction: str, dtype: torch.dtype) -> None:
    p = nn.Parameter(start(dtype))
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], lr=0.007, direction=direction)
    optimizer.emit()
    for k in range(3):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k)).to(dtype)
        before = p.detach().clone()
        optimizer.step()
    real = geometry.angle(before.double().flatten(1), p.detach().double().flatten(1))
    torch.testing.assert_close(optimizer.telemetry[p][:, ANGLE], real[:, 0].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("direction", "spread"), ALL)
def test_a_radial_gradient_turns_nothing(direction: str, spread: str, dtype: torch.dtype) -> None:
    """As a penalty of the radius in the loss gives it to a dead filter."""
    p = nn.Parameter(start(dtype))
    optimizer = optim.Angular([{"params": [p], "rows": "filter"}], direction=direction, spread=spread)
    for _ in range(3):
        p.grad = 0.3 * p.detach()
        optimizer.step()
    assert torch.equal(p.detach(), start(dtype))

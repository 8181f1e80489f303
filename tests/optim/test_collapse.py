"""Rows without a direction, and gradients at the ends of the range: never NaN or Inf, and no other row is touched."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.table import CLASSIC, MATRICES, TABLE, Make
from steradian import optim

# The classic updates are torch's, also in what they do at the ends of the range.
# In a matrix a row depends on the others: see test_angular.
OURS = {name: make for name, make in TABLE.items() if name not in CLASSIC | MATRICES}
OURS["AdamP-exact"] = partial(TABLE["AdamP"], eps=0.0)
ADAM = ["a", "b", "c", "ab", "ac", "bc", "abc"]


@pytest.fixture(params=OURS.values(), ids=OURS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def start(dtype: torch.dtype = torch.float32, rows: int = 4) -> Tensor:
    return torch.randn(rows, 9, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient(k: int, dtype: torch.dtype = torch.float32, rows: int = 4) -> Tensor:
    return torch.randn(rows, 9, generator=torch.Generator().manual_seed(10 + k)).to(dtype)


def assert_finite(optimizer: torch.optim.Optimizer, p: Tensor) -> None:
    assert torch.isfinite(p).all()
    for name, value in optimizer.state[p].items():
        assert torch.isfinite(value).all(), name


def run(make: Make, first: Tensor, gradients: list[Tensor], **options: Any) -> tuple[nn.Parameter, Any]:
    """Steps of a parameter of filter rows; everything is finite after each of them."""
    p = nn.Parameter(first.clone())
    optimizer = make([{"params": [p], "rows": "filter"}], **options)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
        assert_finite(optimizer, p)
    return p, optimizer


def assert_others_untouched(make: Make, first: Tensor, gradients: list[Tensor], *, bad: int = 1) -> None:
    """Rows behind the first, bad ones go, bit for bit, where they go next to rows that are well."""
    well = start(first.dtype, len(first))
    p, one = run(make, first, gradients)
    q, other = run(make, well, [torch.cat([well[bad : bad + 1].expand(bad, -1), g[bad:]]) for g in gradients])
    assert torch.equal(p[bad:], q[bad:])
    for name, value in one.state[p].items():
        if name != "step":
            assert torch.equal(value[bad:], other.state[q][name][bad:]), name


def with_row(t: Tensor, row: Tensor | float) -> Tensor:
    t = t.clone()
    t[0] = row
    return t


# The ends of the range --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_any_size(make: Make, dtype: torch.dtype) -> None:
    """One row of each size, always and as a sudden one between ordinary ones."""
    sizes = torch.tensor([1e30, 1e20, 1e15, 1e-15, 1e-20, 1e-30, 0.0, 1, 1, 1], dtype=dtype).unsqueeze(1)
    ordinary = [gradient(k, dtype, len(sizes)) for k in range(30)]
    once = [g * sizes if k == 7 else g for k, g in enumerate(ordinary)]
    assert_others_untouched(make, start(dtype, len(sizes)), [g * sizes for g in ordinary], bad=7)
    assert_others_untouched(make, start(dtype, len(sizes)), once, bad=7)


def test_what_float16_does_not_hold_is_kept_at_the_end_of_its_range(make: Make) -> None:
    """Gradients and radii that float16 has, whose squares, sums and ratios it does not have."""
    for size in (7e3, 1e3, 1e-3):
        for radius in (1e4, 1e2, 1.0, 1e-3):
            first = (start() * radius).to(torch.float16)
            run(make, first, [(gradient(k) * size).to(torch.float16) for k in range(8)])


def test_radii_of_any_size(make: Make) -> None:
    radii = torch.tensor([1e30, 1e18, 1e-12, 1e-20, 1e-30, 1e-40, 0.0, 1, 1, 1]).unsqueeze(1)
    gradients = [gradient(k, rows=len(radii)) for k in range(30)]
    assert_others_untouched(make, start(rows=len(radii)) * radii, gradients, bad=7)


@pytest.mark.parametrize("radius", [1e-12, 1e-18, 1e-25])
def test_tiny_rows_with_the_gradients_of_their_radius(make: Make, radius: float) -> None:
    """A gradient is r⁻¹ times the one on the sphere; beyond the range of squares the row waits, it never explodes."""
    p, _ = run(make, with_row(start(), start()[0] * radius), [with_row(gradient(0), gradient(0)[0] / radius)])
    q = nn.Parameter(p.detach().clone())
    optimizer = make([{"params": [q], "rows": "filter"}])
    for k in range(20):
        r = float(q[0].detach().double().norm())
        q.grad = with_row(gradient(k), gradient(k)[0] / max(r, 1e-30))
        optimizer.step()
        assert_finite(optimizer, q)
    if not isinstance(optimizer, optim.SGD):
        assert q[0].abs().max() < 10


@pytest.mark.parametrize("without", ADAM)
def test_an_overflowing_row_skips_the_step(without: str) -> None:
    make = lambda p: optim.Adam(p, lr=0.1, without=without)  # noqa: E731
    ordinary = [gradient(k) for k in range(5)]
    p, one = run(make, start(), ordinary)
    before, state = p.detach().clone(), {k: v.clone() for k, v in one.state[p].items()}
    p.grad = with_row(gradient(9), 1e30)
    one.step()
    assert torch.equal(p[0], before[0])
    assert torch.equal(one.state[p]["exp_avg_sq"][0], state["exp_avg_sq"][0])
    assert not torch.equal(p[1:], before[1:])
    p.grad = gradient(10)
    one.step()
    moved = (p[0] - before[0]).norm()
    assert 0 < moved < 10 * 0.1 * 3, "the row goes on with ordinary steps"


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("SGD")])
def test_a_row_whose_gradient_is_not_finite_takes_no_step(name: str, bad: float) -> None:
    """One such entry, early and late; SGD has no moments to protect, and does as torch's."""
    spoiled = [gradient(k) for k in range(8)]
    for k in (0, 5):
        spoiled[k][0, 3] = bad
    assert_others_untouched(OURS[name], start(), spoiled)
    p, optimizer = run(OURS[name], start(), spoiled[:5])
    r, before = p[0].norm(), p.detach()[0].clone()
    p.grad = spoiled[5]
    optimizer.step()
    torch.testing.assert_close(p[0] / p[0].norm(), before / r)


# No direction -----------------------------------------------------------------------------------------------


def test_a_row_of_zeros_stays_until_a_gradient_moves_it(make: Make) -> None:
    """Under Angular it stays: it has no direction that could turn."""
    still = [with_row(gradient(k), 0.0) for k in range(10)]
    p, _ = run(make, with_row(start(), 0.0), still)
    assert torch.equal(p[0], torch.zeros(9))
    q, optimizer = run(make, with_row(start(), 0.0), [*still, gradient(10), gradient(11)])
    assert q[0].abs().min() > 0 or isinstance(optimizer, optim.Angular)
    assert_finite(optimizer, q)
    assert_others_untouched(make, with_row(start(), 0.0), still)


@pytest.mark.parametrize("without", ["b", "c", "bc"])
def test_a_step_onto_the_origin_keeps_the_momentum(without: str) -> None:
    """x − ηg = 0 exactly: no direction is left, so there is nowhere to transport to and nothing to divide by."""
    first = start()
    p, optimizer = run(
        lambda p: optim.SGD(p, lr=0.5, momentum=0.5, without=without), first, [with_row(gradient(0), 2 * first[0])]
    )
    assert torch.equal(p[0], torch.zeros(9))
    assert torch.equal(optimizer.state[p]["momentum_buffer"][0], 2 * first[0])
    assert p[1:].abs().min() > 0


@pytest.mark.parametrize("without", ["ab", "abc"])
def test_a_row_through_the_origin_turns_over(without: str) -> None:
    """L2 alone, with a rate that throws the row to the other side: the direction is −u, the momentum stays 0."""
    still = with_row(gradient(0), 0.0)
    p, optimizer = run(lambda p: optim.Adam(p, lr=3.0, weight_decay=1.0, without=without), start(), [still])
    u, p0 = start()[0] / start()[0].norm(), p.detach()[0]
    torch.testing.assert_close(p0 / p0.norm(), -u)
    assert torch.equal(optimizer.state[p]["exp_avg"][0], torch.zeros(9))


@pytest.mark.parametrize("without", ["ab", "abc"])
def test_a_row_without_gradient_keeps_its_direction(without: str) -> None:
    still = [with_row(gradient(k), 0.0) for k in range(200)]
    p, _ = run(lambda p: optim.Adam(p, lr=1e-2, weight_decay=1e-2, without=without), start(), still)
    u, now = start()[0] / start()[0].norm(), p.detach()[0]
    assert now.norm() < start()[0].norm()
    torch.testing.assert_close(now / now.norm(), u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_thrown_far_out_keeps_a_momentum_of_its_new_size(dtype: torch.dtype) -> None:
    """From radius 1e-12 to 1e-1 in one step, in float32 too far for the momentum to be what it was at the old radius.

    r'm' has the length of r m^⊥ without (c): identities between the inner products would leave rounding of the
    old momentum, a hundred thousand times as long.
    """
    x = nn.Parameter(start(dtype)[:1] * 1e-12)
    r = x.detach().norm()
    optimizer = optim.Adam([{"params": [x], "rows": "filter"}], lr=0.1, without="abc")
    u = x.detach() / r
    g = gradient(0, dtype)[:1]
    g = g - (g * u).sum() * u
    x.grad = g / r
    optimizer.step()
    now = x.detach().norm()
    assert now / r > 1e10
    torch.testing.assert_close(now * optimizer.state[x]["exp_avg"].norm(), 0.1 * g.norm(), rtol=1e-3, atol=0)


# A long time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "steps"), [*((w, 3_000) for w in ADAM), pytest.param("abc", 100_000, marks=pytest.mark.slow)]
)
def test_a_filter_without_gradient_under_l2(without: str, steps: int) -> None:
    """NOTES, item 14: the row is driven to the origin and stays finite, whatever happens to its direction."""
    p = nn.Parameter(start()[:2].clone())
    p.grad = torch.zeros_like(p)
    p.grad[1] = 0.1
    optimizer = optim.Adam([{"params": [p], "rows": "filter"}], lr=1e-2, weight_decay=1e-2, without=without)
    optimizer.step()
    with torch.inference_mode():  # spares so small a step the tenth of it that is autograd's bookkeeping
        for k in range(1, steps):
            optimizer.step()
            if k % 1000 == 0:
                assert_finite(optimizer, p)
    assert_finite(optimizer, p)
    assert p.detach()[0].norm() < 0.5 * start()[0].norm()


@pytest.mark.parametrize("without", ["", "b", "c", "bc"])
def test_a_filter_without_gradient_under_l2_in_sgd(without: str) -> None:
    p = nn.Parameter(start().clone())
    p.grad = torch.zeros_like(p)
    optimizer = optim.SGD([{"params": [p], "rows": "filter"}], lr=0.1, momentum=0.9, weight_decay=0.1, without=without)
    for _ in range(2_000):
        optimizer.step()
    assert_finite(optimizer, p)
    assert p.detach().norm() < 1e-6 * start().norm()


STAYS = {
    **{f"Adam-{w}-{d}": partial(optim.Adam, without=w, decoupled_weight_decay=d) for w in ADAM for d in (False, True)},
    "AdamP": optim.AdamP,
    "AdamP-nesterov": partial(optim.AdamP, nesterov=True),
    "AdamG": optim.AdamG,
    "AdaGradG": optim.AdaGradG,
    "Angular": optim.Angular,
    "Angular-nesterov-rms": partial(optim.Angular, nesterov=True, spread="rms"),
    "Angular-adam-rms": partial(optim.Angular, direction="adam", spread="rms"),
    "Angular-muon-rms": partial(optim.Angular, direction="muon", spread="rms"),
}


@pytest.mark.parametrize(
    ("name", "value"),
    # AdamG clips a gradient of 1e30.
    [(name, v) for name in STAYS for v in (float("nan"), float("inf"), 1e30) if (name, v) != ("AdamG", 1e30)],
)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_a_row_that_takes_no_step_stays_as_it_is(name: str, value: float, first: bool) -> None:
    """Weight, momentum and second moment, also under decay, for the first step and later ones."""
    p = nn.Parameter(start() * 3)
    optimizer = STAYS[name]([{"params": [p], "rows": "filter"}], lr=0.1, weight_decay=0.5)
    optimizer.emit()
    if not first:
        p.grad = gradient(0)
        optimizer.step()
    before = {"weight": p.detach().clone(), **{k: v.clone() for k, v in optimizer.state[p].items() if k != "step"}}
    p.grad = with_row(gradient(1), value)
    optimizer.step()
    after = {"weight": p.detach(), **optimizer.state[p]}
    for key, old in before.items():
        assert torch.equal(after[key][0], old[0]), key
        assert not torch.equal(after[key][1:], old[1:]), key
    assert optimizer.telemetry[p][0, 1] == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("without", ADAM)
def test_a_row_that_takes_no_step_does_not_decay_in_the_fused_step_either(fused: bool, without: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for width in (9, 6000) if "a" in without else (9,):
        first = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(device)
        p = nn.Parameter(first.clone())
        optimizer = optim.Adam(
            [{"params": [p], "rows": "filter"}],
            lr=0.1, weight_decay=0.5, decoupled_weight_decay=True, without=without, fused=fused,
        )  # fmt: skip
        p.grad = torch.ones_like(first)
        p.grad[1, 3] = torch.nan
        optimizer.step()
        assert torch.equal(p[1], first[1])
        assert not torch.equal(p[0], first[0])
        assert torch.isfinite(p).all()


@pytest.mark.parametrize("without", ["b", "bc", "c"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_a_row_at_infinity_stays_finite(without: str, nesterov: bool) -> None:
    p, q = (nn.Parameter(with_row(start(), torch.inf)) for _ in range(2))
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    ours = optim.SGD([{"params": [p], "rows": "filter"}], without=without, **settings)
    theirs = torch.optim.SGD([q], **settings)
    for k in range(3):
        p.grad, q.grad = gradient(k), gradient(k)
        ours.step()
        theirs.step()
    m = ours.state[p]["momentum_buffer"]
    assert torch.isfinite(m).all()
    torch.testing.assert_close(m[0], theirs.state[q]["momentum_buffer"][0])

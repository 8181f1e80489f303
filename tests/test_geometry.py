"""The sphere against geoopt, against its own laws, and at the edges of floating point."""

import math

import geoopt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steradian import geometry
from steradian.geometry import angle, collapsed, dot, exp, log, norm, split, tangent, transport

EPS = {torch.float64: 1e-14, torch.float32: 4e-6}


def rows(seed, n, d, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


def unit(x):
    return split(x)[1]


def turned(u, heading, theta):
    """The point at this angle from u, towards a heading, built in float64."""
    wide = unit(u.double())
    return (math.cos(theta) * wide + math.sin(theta) * heading_at(wide, heading)).to(u.dtype)


def heading_at(u, q):
    """A unit tangent; projected twice, since the tangent part of a nearly radial q loses its digits."""
    return unit(tangent(unit(tangent(q.double(), u)), u))


seeds = st.integers(0, 2**31 - 1)
dimensions = st.integers(2, 40)
dtypes = st.sampled_from([torch.float64, torch.float32])
# Angles from the smallest that a float64 difference resolves up to π itself.
angles = st.one_of(
    st.floats(0, math.pi), st.floats(-15, 0).map(lambda k: 10.0**k), st.floats(-15, 0).map(lambda k: math.pi - 10.0**k)
)
exponents = st.integers(-300, 300)


def test_agrees_with_geoopt():
    sphere = geoopt.Sphere()
    u, q, p = unit(rows(0, 200, 17)), rows(1, 200, 17), unit(rows(2, 200, 17))
    w = tangent(q, u)
    torch.testing.assert_close(w, sphere.proju(u, q), rtol=0, atol=1e-12)
    torch.testing.assert_close(exp(u, w), sphere.expmap(u, w), rtol=0, atol=1e-12)
    torch.testing.assert_close(log(u, p), sphere.logmap(u, p), rtol=0, atol=1e-12)
    torch.testing.assert_close(angle(u, p), sphere.dist(u, p, keepdim=True), rtol=0, atol=1e-12)
    torch.testing.assert_close(split(q)[1], sphere.projx(q), rtol=0, atol=1e-12)


def test_transport_is_the_limit_of_geoopts_projections():
    """geoopt transports by projection; over ever shorter pieces of the geodesic that becomes parallel transport."""
    sphere = geoopt.Sphere()
    u, p, a = unit(rows(0, 20, 6)), unit(rows(1, 20, 6)), rows(2, 20, 6)
    a = tangent(a, u)
    errors = []
    for pieces in (500, 1000):
        moved, w = a, log(u, p)
        for k in range(pieces):
            moved = sphere.transp(exp(u, w * (k / pieces)), exp(u, w * ((k + 1) / pieces)), moved)
        errors.append(norm(moved - transport(a, u, p)).max().item())
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)  # first order in the length of a piece
    torch.testing.assert_close(2 * errors[1] - errors[0], 0.0, atol=5e-5, rtol=0)


@given(seeds, dimensions, dtypes)
def test_tangent_is_a_projection(seed, d, dtype):
    u, q = unit(rows(seed, 5, d, dtype)), rows(seed + 1, 5, d, dtype)
    w = tangent(q, u)
    assert (dot(w, u).abs() <= EPS[dtype] * norm(q)).all()
    torch.testing.assert_close(tangent(w, u), w, atol=EPS[dtype] * 10, rtol=0)


@given(seeds, dimensions, dtypes, st.floats(0, 20))
def test_exp_stays_on_the_sphere_and_moves_by_the_norm(seed, d, dtype, length):
    u = unit(rows(seed, 5, d, dtype))
    w = (length * heading_at(unit(u.double()), rows(seed + 1, 5, d))).to(dtype)
    p = exp(u, w)
    assert (norm(p) - 1).abs().max() <= EPS[dtype] * (1 + length)
    folded = abs((length + math.pi) % (2 * math.pi) - math.pi)
    assert (angle(u, p) - folded).abs().max() <= EPS[dtype] * 10 * (1 + length)


@settings(max_examples=300)
@given(seeds, dimensions, dtypes, angles)
def test_exp_of_log_is_the_identity(seed, d, dtype, theta):
    u = unit(rows(seed, 5, d, dtype))
    p = unit(turned(u, rows(seed + 1, 5, d, dtype), theta))
    w = log(u, p)
    assert dot(w, u).abs().max() <= EPS[dtype] * 10
    assert (norm(w) - theta).abs().max() <= EPS[dtype] * 10
    torch.testing.assert_close(exp(u, w), p, atol=EPS[dtype] * 10, rtol=0)


@settings(max_examples=300)
@given(seeds, dimensions, dtypes, angles)
def test_transport_is_an_isometry_between_tangent_spaces(seed, d, dtype, theta):
    u = unit(rows(seed, 5, d, dtype))
    p = unit(turned(u, rows(seed + 1, 5, d, dtype), theta))
    a, b = (tangent(rows(seed + k, 5, d, dtype), u) for k in (2, 3))
    ta, tb = transport(a, u, p), transport(b, u, p)
    size = (norm(a) * norm(b)).clamp(min=1)
    assert (dot(ta, tb) - dot(a, b)).abs().max() <= EPS[dtype] * 10 * size.max()
    assert dot(ta, p).abs().max() <= EPS[dtype] * 10 * size.max()
    back = transport(ta, p, u)
    torch.testing.assert_close(back, a, atol=EPS[dtype] * 100, rtol=0)


@given(seeds, st.floats(0.01, 3.0))
def test_transport_is_the_notes_formula_and_carries_the_velocity(seed, theta):
    u = unit(rows(seed, 5, 9))
    p = turned(u, rows(seed + 1, 5, 9), theta)
    a = rows(seed + 2, 5, 9)
    t = tangent(a, u)
    formula = t - dot(t, p) / (1 + dot(u, p)) * (u + p)
    torch.testing.assert_close(transport(a, u, p), formula, atol=1e-11, rtol=0)
    torch.testing.assert_close(transport(log(u, p), u, p), -log(p, u), atol=1e-11, rtol=0)


def test_the_papers_transport_agrees_in_the_plane_of_motion_only():
    u, p = unit(rows(0, 5, 9)), unit(rows(1, 5, 9))

    def paper(a):
        return dot(u, p) * a - dot(a, p) * u

    torch.testing.assert_close(paper(log(u, p)), transport(log(u, p), u, p), atol=1e-12, rtol=0)
    across = tangent(rows(2, 5, 9), u)
    across = across - dot(across, log(u, p)) / dot(log(u, p), log(u, p)) * log(u, p)
    torch.testing.assert_close(norm(paper(across)), dot(u, p).abs() * norm(across), atol=1e-12, rtol=0)
    torch.testing.assert_close(norm(transport(across, u, p)), norm(across), atol=1e-12, rtol=0)


@given(seeds, dimensions, exponents)
def test_split_at_every_radius(seed, d, exponent):
    x = rows(seed, 5, d) * 10.0**exponent
    r, u = split(x)
    assert (norm(u) - 1).abs().max() <= 1e-15 * 4
    torch.testing.assert_close(r * u, x, rtol=1e-14, atol=0)
    torch.testing.assert_close(u, split(rows(seed, 5, d))[1], rtol=1e-14, atol=1e-15)


@given(seeds, st.floats(-14, -1))
def test_small_angles_keep_their_digits(seed, exponent):
    """acos would return 0 here. The angle of x and x + δ is |δ^⊥|/r to first order."""
    theta = 10.0**exponent
    u = torch.zeros(1, 8, dtype=torch.float64)
    u[0, seed % 8] = 1
    p = turned(u, rows(seed, 1, 8), theta)
    assert angle(u, p).item() == pytest.approx(theta, rel=1e-9 + 1e-15 / theta)
    assert angle(u, -p).item() == pytest.approx(math.pi - theta, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_place_of_a_row_changes_no_digit_of_its_angle(dtype):
    """Whether a vector of the processor holds it or what remains behind the last one."""
    u, p = torch.randn(2, 100, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for q in (p, u + p / 100):
        assert torch.equal(angle(u, q), torch.stack([angle(u[k], q[k]) for k in range(100)]))


def test_angle_does_not_depend_on_the_radii():
    x, y = rows(0, 30, 7), rows(1, 30, 7)
    torch.testing.assert_close(angle(x * 1e200, y * 1e-200), angle(x, y), rtol=1e-13, atol=0)


def test_the_antipode_has_a_defined_log_and_transport():
    u = unit(rows(0, 6, 5))
    w = log(u, -u)
    torch.testing.assert_close(norm(w), torch.full((6, 1), math.pi, dtype=torch.float64))
    torch.testing.assert_close(exp(u, w), -u, atol=1e-14, rtol=0)
    a = tangent(rows(1, 6, 5), u)
    torch.testing.assert_close(norm(transport(a, u, -u)), norm(a), rtol=1e-13, atol=0)
    assert dot(transport(a, u, -u), u).abs().max() < 1e-14


def test_one_dimension_has_two_points_and_no_tangent():
    u = torch.tensor([[1.0], [-1.0]])
    assert tangent(torch.tensor([[5.0], [2.0]]), u).tolist() == [[0.0], [0.0]]
    assert log(u, -u).tolist() == [[0.0], [0.0]]
    assert transport(torch.ones(2, 1), u, -u).tolist() == [[0.0], [0.0]]
    assert angle(u, -u).tolist() == [[pytest.approx(math.pi)]] * 2


def test_zero_and_subnormal_rows_collapse():
    r, u = split(torch.tensor([[0.0, 0.0], [1e-42, 0.0], [1e-30, 0.0]]))
    assert collapsed(r).flatten().tolist() == [True, True, False]
    assert u.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    assert angle(torch.zeros(1, 2), torch.ones(1, 2)).item() == 0
    assert exp(u, torch.zeros(3, 2)).tolist() == u.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_through_float32(dtype):
    x, y = rows(0, 4, 9, dtype), rows(1, 4, 9, dtype)
    for result in (*split(x), tangent(x, y), exp(x, y), log(x, y), transport(x, x, y), angle(x, y)):
        assert result.dtype == torch.float32
    torch.testing.assert_close(angle(x, y).double(), angle(x.double(), y.double()), rtol=1e-5, atol=0)


def test_rows_broadcast_over_leading_dimensions():
    u = unit(rows(0, 6, 4)).view(2, 3, 4)
    q = rows(1, 1, 4)
    assert tangent(q, u).shape == (2, 3, 4)
    torch.testing.assert_close(tangent(q, u)[1, 2], tangent(q[0], u[1, 2]))


def test_a_nan_row_is_named_or_stays_alone():
    x = rows(0, 4, 3)
    x[2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"1 of 4 rows \(row 2\)"):
        split(x)
    r, u = split(x, check=False)
    assert r.isnan().flatten().tolist() == [False, False, True, False]
    assert u.isnan().any(-1).tolist() == [False, False, True, False]


def test_no_rows_at_all():
    r, u = split(torch.zeros(0, 3))
    assert (r.shape, u.shape) == ((0, 1), (0, 3))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: split(torch.ones(2, 3, dtype=torch.int64)), TypeError, "x must hold real floating-point"),
        (lambda: split(torch.ones(2, 3, dtype=torch.complex64)), TypeError, "complex64"),
        (lambda: split([1.0]), TypeError, "must be a tensor"),
        (lambda: split(torch.zeros(3, 0)), ValueError, "at least one number"),
        (lambda: split(torch.tensor(1.0)), ValueError, "at least one number"),
        (lambda: tangent(torch.ones(2, 3), torch.ones(2, 4)), ValueError, "q and u must have rows of one length"),
        (lambda: transport(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 4)), ValueError, "u and p"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("scale", [1.0, 1e150])
def test_gradients_flow_through_every_function(scale):
    u, p, a = (rows(seed, 3, 4).mul(scale).requires_grad_() for seed in range(3))

    def everything(u, p, a):
        (_, u), (_, p) = split(u), split(p)
        a = tangent(a / scale, u)
        return exp(u, a), log(u, p), transport(a, u, p), angle(u, p)

    assert torch.autograd.gradcheck(everything, (u, p, a), eps=1e-6 * scale)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_every_function_under_vmap():
    u, p, a = (torch.stack([rows(seed + k, 3, 4) for k in range(2)]) for seed in (0, 10, 20))

    def everything(u, p, a):
        (_, u), (_, p) = split(u, check=False), split(p, check=False)
        a = tangent(a, u)
        return norm(a), exp(u, a), log(u, p), transport(a, u, p), angle(u, p)

    for found, expected in zip(torch.func.vmap(everything)(u, p, a), everything(u, p, a), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("d", [4096, 8192, 12_345, 2**20 + 3, 2**22])
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_norms_of_long_rows_keep_their_digits(d, memory, draw):
    """torch adds such rows one number after the other on a CPU."""
    torch.manual_seed(0)
    x = draw(2, d)
    x = {"contiguous": x, "transposed": x.T.contiguous().T, "strided": x.repeat_interleave(2, -1)[..., ::2]}[memory]
    exact = x.double().square().sum(-1, keepdim=True).sqrt()
    for scale in (1.0, 1e30, 1e-30):
        r, u = geometry.split(x * scale)
        torch.testing.assert_close(
            r.double(), (x * scale).double().square().sum(-1, keepdim=True).sqrt(), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(geometry.norm(u).double(), torch.ones(2, 1).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(geometry.square(x).double(), exact**2, rtol=1e-6, atol=0)

"""The unit sphere, row by row: split, tangent, exp, log, transport, angle.

Every function works on the last dimension, broadcasts over the others, and has no loop over rows. Half
precision is computed and returned in float32. Only `check` synchronizes with the host.
"""

import math

import torch
from torch import Tensor

__all__ = ["angle", "collapsed", "exp", "log", "norm", "split", "tangent", "transport"]

_PIECE, _SCATTERED = 2**12, 2**8  # numbers that a CPU adds up to float32's last digits: neighbours, and others


def split(x: Tensor, *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Radius (…, 1) and direction of each row, x = r u (Section 2.1).

    Squares neither overflow nor vanish. A collapsed row (see `collapsed`) keeps its radius and gets the direction 0.

    Args:
        x: rows on the last dimension.
        check: raise on NaN and infinite entries. It reads one number back from the device; pass False inside
            captured or compiled code, where such a row stays NaN and does not affect others.

    >>> r, u = split(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    >>> r.squeeze(-1).tolist(), u.tolist()
    ([5.0, 0.0], [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]])
    """
    x = _rows(x, "x")
    r = norm(x)
    if check:
        check_finite(r, "x")
    return r, x / r.masked_fill(collapsed(r), math.inf)


def collapsed(r: Tensor) -> Tensor:
    """Where a radius is too small for a direction to exist: below the smallest normal number of its dtype.

    >>> collapsed(torch.tensor([1.0, 1e-30, 1e-40, 0.0])).tolist()
    [False, False, True, True]
    """
    return r < torch.finfo(r.dtype).tiny


def norm(q: Tensor) -> Tensor:
    """Length of each row, last dimension kept, without overflow or underflow of the squares.

    >>> norm(torch.tensor([[3e38, 0.0], [3e-30, 4e-30]])).log10().round(decimals=2).squeeze(-1).tolist()
    [38.47999954223633, -29.299999237060547]
    """
    q = _rows(q, "q")
    if at_hand(q):
        # Most rows need no scaling, because no square overflows and none that matters vanishes; every bit is the same.
        length, far = _root_of_squares(q), torch.finfo(q.dtype).max ** 0.375
        if length.numel() > 0 and bool((length.amin() > 1 / far) & (length.amax() < far)):
            return length
    if q.dtype == torch.float32 and q.device.type == "cuda":
        # The squares of all float32 numbers are normal float64 numbers: one pass, no scale needed.
        return torch.linalg.vector_norm(q, dim=-1, keepdim=True, dtype=torch.float64).to(torch.float32)
    # Two reductions: torch's infinity norm is not vectorized on the CPU and takes fifty times as long.
    largest = torch.maximum(q.amax(-1, keepdim=True), -q.amin(-1, keepdim=True))
    # Dividing by a power of two is exact.
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1).masked_fill_(largest == 0, 1)
    return scale * _root_of_squares(q / scale)


def square(q: Tensor) -> Tensor:
    """⟨q,q⟩ of each row, last dimension kept; inf or 0 where it is beyond the range of the dtype."""
    return _root_of_squares(q).square()


def tangent(q: Tensor, u: Tensor) -> Tensor:
    """Part of the rows q tangent to the sphere at the unit rows u, q^⊥ = q − ⟨q,u⟩u (Section 2.1).

    >>> tangent(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])).tolist()
    [0.0, 2.0]
    """
    q, u = _pair(q, u, "q", "u")
    return q - dot(q, u) * u


def exp(u: Tensor, w: Tensor) -> Tensor:
    """Exponential map, Exp_u(w) = cos‖w‖ u + sin‖w‖ w/‖w‖, of rows w tangent at the unit rows u (App. C.1.1).

    >>> exp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.pi / 2])).round(decimals=6).tolist()
    [-0.0, 1.0]
    """
    u, w = _pair(u, w, "u", "w")
    length = norm(w)
    return torch.cos(length) * u + torch.sinc(length / math.pi) * w


def log(u: Tensor, p: Tensor) -> Tensor:
    """Inverse of the exponential map of unit rows: the shortest tangent w at u with Exp_u(w) = p.

    ‖w‖ is the angle between u and p. At p = −u, where every direction is a shortest one, w is along the coordinate
    axis least aligned with u.

    >>> log(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).tolist()
    [0.0, 1.5707963705062866]
    """
    u, p = _pair(u, p, "u", "p")
    return angle(u, p) * _heading(u, p)


def transport(a: Tensor, u: Tensor, p: Tensor) -> Tensor:
    """Parallel transport Γ_u^p of the tangent part of a along the shortest geodesic (App. D.2, corrected).

    With e the heading from u to p at angle θ: a ↦ a + ⟨a,e⟩((cos θ − 1)e − sin θ u), which is
    a − ⟨a,p⟩/(1+⟨u,p⟩)·(u+p) and stays accurate up to the antipode. The paper's T(a) = ⟨u,p⟩a − ⟨a,p⟩u shrinks what is
    orthogonal to the plane of u and p by cos θ.

    Args:
        a: rows to transport, whose part tangent at u counts.
        u: unit rows where they are.
        p: unit rows where they go.

    >>> a, u, p = torch.tensor([[0.0, 0.3, 2.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> transport(a, u, p).round(decimals=6).tolist()
    [-0.30000001192092896, 0.0, 2.0]
    """
    a, u = _pair(a, u, "a", "u")
    u, p = _pair(u, p, "u", "p")
    e, theta = _heading(u, p), angle(u, p)
    a = tangent(a, u)
    return a + dot(a, e) * (-2 * torch.sin(theta / 2) ** 2 * e - torch.sin(theta) * u)


def angle(u: Tensor, p: Tensor) -> Tensor:
    """Angle between rows in [0, π], last dimension kept: 2 atan2(‖u/‖u‖ − p/‖p‖‖, ‖u/‖u‖ + p/‖p‖‖).

    The rows may have any length. Accurate near 0 and near π, where acos loses half of the digits. A collapsed row has
    the angle 0 to every other.

    >>> round(angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-6])).item(), 12)
    1e-06
    """
    u, p = _pair(u, p, "u", "p")
    ru, rp = norm(u), norm(p)
    u, p = u / _or_one(ru), p / _or_one(rp)
    # Not torch's atan2, whose last digit depends on where in a tensor the row lies; below ε² the angle is π anyway.
    along = norm(u + p).clamp(min=torch.finfo(u.dtype).eps ** 2)
    turned = 2 * torch.atan(norm(u - p) / along)
    return turned.masked_fill(collapsed(ru) | collapsed(rp), 0)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of rows, last dimension kept."""
    return (a * b).sum(-1, keepdim=True)


def as_float(x: Tensor, name: str) -> Tensor:
    """x in the dtype that it is computed in, float32 for half precision; a TypeError if it is no tensor of reals."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must hold real floating-point numbers, got {x.dtype}; convert it first")
    return x.float() if x.dtype.itemsize < 4 else x


def _rows(x: Tensor, name: str) -> Tensor:
    x = as_float(x, name)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must have rows of at least one number on its last dimension, got {tuple(x.shape)}")
    return x


def _pair(a: Tensor, b: Tensor, name_a: str, name_b: str) -> tuple[Tensor, Tensor]:
    a, b = _rows(a, name_a), _rows(b, name_b)
    if a.shape[-1] != b.shape[-1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"{name_a} and {name_b} must have rows of one length, got {shapes}")
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def at_hand(x: Tensor) -> bool:
    """Whether values can be read at no cost: they are on the host, and neither fake nor traced nor transformed."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.is_cpu and not traced and is_plain(x)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is the memory at its address; one of a class that wraps others, or a fake one, is not."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def _root_of_squares(q: Tensor) -> Tensor:
    """√⟨q,q⟩ of each row, in pieces: on a CPU torch adds up squares one by one, and 2²⁴ of them are 8e-4 short."""
    length, piece = q.shape[-1], _PIECE if q.stride(-1) == 1 else _SCATTERED
    pieces = length // piece
    if pieces < 2 or not q.is_cpu:
        return torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    whole = pieces * piece
    parts = torch.linalg.vector_norm(q[..., :whole].unflatten(-1, (pieces, piece)), dim=-1)
    if whole < length:
        parts = torch.cat([parts, torch.linalg.vector_norm(q[..., whole:], dim=-1, keepdim=True)], dim=-1)
    return _root_of_squares(parts)


def failing(condition: Tensor) -> Tensor | None:
    """The rows in which a condition fails; None if it holds in all, as far as the host knows without waiting."""
    return None if at_hand(condition) and bool(condition.all()) else ~condition


def zeroed(where: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
    """Rows with some of them set to 0, because 0·inf is NaN; None: no rows."""
    return rows if where is None else tuple(each.masked_fill(where, 0) for each in rows)


def _or_one(r: Tensor) -> Tensor:
    return r.masked_fill(collapsed(r), 1)


def _heading(u: Tensor, p: Tensor) -> Tensor:
    """Unit tangent at u that points to p; 0 where p = u."""
    # p − u near u and p + u near −u are exact subtractions, so their tangent part keeps its digits.
    behind = dot(u, p) < 0
    toward = tangent(torch.where(behind, p + u, p - u), u)
    axis = torch.zeros_like(u).scatter_(-1, u.abs().argmin(-1, keepdim=True), 1)
    toward = torch.where(behind & collapsed(norm(toward)), tangent(axis, u), toward)
    # The tangent part of a nearly radial vector is rounding errors: projecting its unit vector again makes it tangent.
    toward = tangent(toward / _or_one(norm(toward)), u)
    return toward / _or_one(norm(toward))


def check_finite(r: Tensor, name: str) -> None:
    """Raise a ValueError that names the rows whose radius (…, 1) is NaN or infinite."""
    bad = ~torch.isfinite(r.squeeze(-1))
    if bad.any():
        rows = bad.flatten().nonzero().flatten()
        shown = ", ".join(map(str, rows[:5].tolist())) + (", …" if len(rows) > 5 else "")
        raise ValueError(f"{name} has NaN or infinite entries in {len(rows)} of {bad.numel()} rows (row {shown})")

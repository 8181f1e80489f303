"""Momentum transported and rescaled after a step, and telemetry. Names and shapes are those of `reference`."""

import torch
from torch import Tensor

from steradian import geometry
from steradian.geometry import dot, failing, square, zeroed
from steradian.optim.rows import RowSet


class Motion:
    """⟨x,x⟩ and ⟨y,y⟩ of a step from x to y, the squared ratio (r/r')², and the rows whose m and v stay.

    These are the rows in `stays`, and those where (r/r')² v would overflow or where a radius is out of range.
    The squares must be normal numbers to all their digits: radii from 3e-16 to 1e19 in float32. A row that shrinks by
    more than the rounding unit has no direction left either: what remains of it is the rounding of the subtraction.
    """

    def __init__(self, x: Tensor, y: Tensor, v: Tensor | None = None, stays: Tensor | None = None) -> None:
        limits = torch.finfo(x.dtype)
        self.xx, self.yy = square(x), square(y)
        shrink, largest = self.xx / self.yy, self.yy
        if v is not None:
            largest = torch.maximum(largest, shrink * (v if v.shape[1] == 1 else v.amax(dim=1, keepdim=True)))
        there = (torch.minimum(self.xx, self.yy) >= limits.tiny / limits.eps) & (largest <= limits.max)
        there &= shrink <= limits.eps**-2
        self.gone = ~there if stays is None else ~there | stays
        self.shrink = shrink.masked_fill_(self.gone, 1)


def carry_in_plane(m: Tensor, x: Tensor, y: Tensor, motion: Motion, *, rescale: bool) -> None:
    """Transport, and rescale, a momentum in the plane of x and y, in place (App. D.2).

    T(m) = (⟨x,y⟩m − ⟨m,y⟩x)/(r r'), which drops the radial part of m; times r/r' it is Algorithm 1's line, corrected.
    The products are taken from the vectors: identities between them cancel when a row collapses or is thrown far out.
    """
    scale = motion.yy if rescale else motion.xx.sqrt() * motion.yy.sqrt()
    kept, removed = dot(x, y).div_(scale), dot(m, y).div_(scale)
    gone = motion.gone | ~torch.isfinite(removed)
    (x,) = zeroed(failing(~gone), x)
    m.mul_(kept.masked_fill_(gone, 1)).addcmul_(x, removed.masked_fill_(gone, 0), value=-1)


def carry(m: Tensor, x: Tensor, y: Tensor, motion: Motion, *, rescale: bool) -> None:
    """Transport, and rescale, any momentum, in place: the general isometry of `geometry.transport`.

    For steps that are not along the momentum. On tangent vectors the isometry is the reflection
    m ↦ m^⊥ − 2⟨m^⊥,w⟩/⟨w,w⟩·w with w = u + u', and ⟨w,w⟩ = 2(1 + ⟨u,u'⟩) would have no digits near the antipode.
    """
    x, y = zeroed(failing(~motion.gone), x, y)
    u = x / motion.xx.sqrt().masked_fill_(motion.gone, 1)
    w = torch.addcdiv(u, y, motion.yy.sqrt().masked_fill_(motion.gone, 1))
    inward, ww = dot(m, u), square(w)
    turn = (dot(m, w) - inward * ww / 2).mul_(2).div_(ww.masked_fill_(ww == 0, 1))  # ⟨u,w⟩ = ⟨w,w⟩/2
    gone = motion.gone | ~torch.isfinite(turn)
    if rescale:
        m.mul_(motion.shrink.sqrt())
        inward, turn = inward * motion.shrink.sqrt(), turn * motion.shrink.sqrt()
    m.addcmul_(u, inward.masked_fill_(gone, 0), value=-1).addcmul_(w, turn.masked_fill_(gone, 0), value=-1)


def emit(
    rows: RowSet,
    piece: slice,
    x: Tensor,
    y: Tensor,
    gradient: Tensor,
    *,
    pace: Tensor,
    start: float | Tensor = 1.0,
    end: Tensor | None = None,
    inward: Tensor | None = None,
) -> None:
    """Write the numbers of `TELEMETRY` for the step from x to y, whose effective rate (Section 2.4) is (η/b̄)/⟨x,x'⟩.

    `gradient` is ∇L(x), whatever its sign, `pace` η/b̄, `start` 1 − ηδ (what a decoupled decay δ leaves of x before the
    step), `end` where the row lands, if elsewhere on the ray of y, `inward` A⟨c,u⟩, if y is not on a straight line.
    """
    assert rows.telemetry is not None, "telemetry is off"
    gone = Motion(x, y).gone
    rate = pace / (start * dot(x, y))
    rate.masked_fill_(gone | ~torch.isfinite(pace), 0)
    radius, slope = geometry.norm(x), geometry.norm(gradient)
    defect = dot(x / radius, gradient / slope).abs_()
    defect.masked_fill_(gone | geometry.collapsed(slope) | ~torch.isfinite(slope), 0)
    next_radius = geometry.norm(y if end is None else end)
    # x − x' before the product: 1 − ⟨x,x'⟩/⟨x,x⟩ would keep no digit of a small radial part.
    radial = dot(x, start * x - y) / (start * dot(x, x)) if inward is None else inward
    radial.masked_fill_(gone | ~torch.isfinite(radial), 0)
    columns = [radius, geometry.angle(x, y), rate, next_radius, slope, defect, radial]
    rows.telemetry[piece] = torch.cat(columns, dim=1)

"""Rows that no tile holds: the sums of their chunks, and the step from the sums."""

import triton
import triton.language as tl

from steradian.optim import _kernel_parts as parts
from steradian.optim._kernel_parts import DECOUPLED, LANES, WITHOUT_B, WITHOUT_C

__all__ = ["apply_long_rows"]


@triton.jit
def _leave_sums(item, d, sums, settings, rates, grad_scale,
                EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """⟨g,g⟩, ⟨x,x⟩, ⟨x,m⟩, ⟨m,m⟩ of one chunk of a long row, with m as it will be; and v before the step.

    For telemetry also ⟨h,h⟩ and ⟨x,h⟩ of the gradient alone, without L2.
    """
    chunk, last = parts.high(parts.first(item + 6)), parts.first(item + 7)
    _l1, _l2, share1, _s2, _eps, decay, flags, _rate = parts.settings_of(settings, rates, parts.low(last), C)
    l2 = tl.where((flags & DECOUPLED) != 0, 0.0, decay).to(C)
    factor = parts.sign_and_scale(flags, grad_scale, SCALED, C)
    at = chunk.to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = at < d
    x = tl.load(parts.first(item).to(tl.pointer_type(P)) + at, mask=mask, other=0.0).to(C)
    g = tl.load(parts.first(item + 1).to(tl.pointer_type(P)) + at, mask=mask, other=0.0).to(C) * factor
    m = tl.load(parts.first(item + 2).to(tl.pointer_type(P)) + at, mask=mask, other=0.0).to(C)
    gl = g + l2 * x
    m = parts.lerp(m, tl.where((flags & WITHOUT_B) != 0, g, gl), share1.to(C))
    out = sums + (last >> 32) * 7
    tl.store(out, tl.sum(gl * gl, axis=0).to(tl.float64))
    tl.store(out + 1, tl.sum(x * x, axis=0).to(tl.float64))
    tl.store(out + 2, tl.sum(x * m, axis=0).to(tl.float64))
    tl.store(out + 3, tl.sum(m * m, axis=0).to(tl.float64))
    tl.store(out + 4, tl.load(parts.first(item + 3).to(tl.pointer_type(C))).to(tl.float64))
    if EMIT:
        tl.store(out + 5, tl.sum(g * g, axis=0).to(tl.float64))
        tl.store(out + 6, tl.sum(x * g, axis=0).to(tl.float64))


@triton.jit
def apply_long_rows(
    items, lines, settings, rates, emitted, told, sums, grad_scale, found_inf, also,
    EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The step of one chunk of a long row, from the sums of all of its chunks.

    `items` has five int32 per program: parameter, row, first slot of the row, number of chunks, chunk. The count
    of the step was already raised by `step_rows`.
    """
    item = items + tl.program_id(0).to(tl.int64) * 5
    index, row, slot, chunks, chunk = (
        tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4),
    )  # fmt: skip
    skipped = False
    if SCALED:
        skipped = tl.load(found_inf) != 0.0
    if not skipped:
        line = lines + index * 8
        gg, xx = _added(sums, slot, chunks)
        xm, mm = _added(sums + 2, slot, chunks)
        v = tl.load(sums + slot.to(tl.int64) * 7 + 4)
        d = tl.load(line + 5)
        wide: tl.constexpr = tl.float64
        log_beta1, log_beta2, share1, share2, eps, decay, flags, rate = parts.settings_of(
            settings, rates, tl.load(line + 7), wide
        )
        step = tl.load(tl.load(line + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
        pace, root = parts.bias_corrections(step, log_beta1, log_beta2, rate)
        decoupled = (flags & DECOUPLED) != 0
        start, l2 = tl.where(decoupled, 1.0 - rate * decay, 1.0), tl.where(decoupled, 0.0, decay)
        largest, _smallest, _steepest = parts.limits(C)
        usable = gg <= largest
        # The chunks could not know that the row takes no step: their ⟨x,m⟩ and ⟨m,m⟩ are of an m that it does not get.
        xm, mm = tl.where(usable, xm, 0.0), tl.where(usable, mm, 0.0)
        v = tl.where(usable, parts.lerp(v, tl.minimum(gg / d, largest), share2), v)
        s = parts.divided(v, usable, pace, root, eps)
        kept_x = start - tl.where((flags & WITHOUT_B) != 0, s * share1 * l2, 0.0)
        # y = kept_x·x − s·m, so its products follow from the sums; in float64 they keep float32's digits.
        xy, my = kept_x * xx - s * xm, kept_x * xm - s * mm
        yy = tl.maximum(kept_x * xy - s * my, 0.0)
        shrink, there = parts.motion(xx, yy, v, flags, C)
        kept, removed = parts.carried_in_plane(xx, yy, xy, my, shrink, there, flags, tl.float64)
        if chunk == 0:
            v_at = tl.load(line + 3).to(tl.pointer_type(C)) + row
            tl.store(v_at, (v * tl.where((flags & WITHOUT_C) != 0, shrink, 1.0)).to(C))
            if EMIT:
                place = tl.load(emitted + tl.program_id(0))
                hh, xh = _added(sums + 5, slot, chunks)
                across = tl.sqrt(tl.maximum(mm - xm * xm / tl.where(xx > 0, xx, 1.0), 0.0)) * s
                pace_e = share1 * pace / (tl.sqrt(v) / root + eps)
                radial = (start - kept_x + s * xm / tl.where(xx > 0, xx, 1.0)) / start
                parts.emit(
                    told + place, also + place, row >= 0, xx, yy, xy, hh, xh, across, radial, there, pace_e, start, C
                )
        factor = parts.sign_and_scale(flags, grad_scale, SCALED, C)
        cols = chunk.to(tl.int64) * LANES + tl.arange(0, LANES)
        at, mask = row.to(tl.int64) * d + cols, cols < d
        x_at = tl.load(line).to(tl.pointer_type(P)) + at
        m_at = tl.load(line + 2).to(tl.pointer_type(P)) + at
        x = tl.load(x_at, mask=mask, other=0.0).to(C)
        m = tl.load(m_at, mask=mask, other=0.0).to(C)
        g = tl.load(tl.load(line + 1).to(tl.pointer_type(P)) + at, mask=mask, other=0.0).to(C) * factor
        target = tl.where((flags & WITHOUT_B) != 0, g, g + l2.to(C) * x)
        m = tl.where(usable, parts.lerp(m, target, share1.to(C)), m)
        tl.store(x_at, parts.kept_in(kept_x.to(C) * x - s.to(C) * m, P), mask=mask)
        tl.store(m_at, parts.kept_in(kept.to(C) * m - removed.to(C) * x, P), mask=mask)


@triton.jit
def _added(sums, slot, chunks):
    """Two neighbouring sums of a row, over its chunks."""
    one = tl.zeros([256], dtype=tl.float64)
    other = one
    for block in range(0, chunks, 256):
        index = block + tl.arange(0, 256)
        mask = index < chunks
        at = sums + (slot + index).to(tl.int64) * 7
        one += tl.load(at, mask=mask, other=0.0)
        other += tl.load(at + 1, mask=mask, other=0.0)
    return tl.sum(one, axis=0), tl.sum(other, axis=0)

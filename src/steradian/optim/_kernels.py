"""The fused Adam step as Triton kernels: one program holds a tile of rows in registers, reads each entry once.

A row of d numbers is K ≤ 5 pieces of S lanes, so that rows of 2^k and of 9·2^k numbers, as 3 × 3 convolutions have
them, waste few lanes; a program steps as many rows as fill LANES/4 lanes with one piece (LANES/8 for rows at odd
addresses). Rows that no tile holds are cut into chunks of LANES: the first kernel leaves the sums of each chunk, the
second adds them up and applies the step. Arithmetic is `_reference.adam`'s, in float32 (float64 for float64).

Tables (see `_plan`): `lines` has one line of int64 per parameter (addresses of x, gradient, m, v and step count;
d; n; settings line), `settings` one line of float64 per group, `rates` the address of each group's rate. `items` has
a line for each program, at the address of its first row, so that a program reads its data after one look-up.
"""

import os

import triton
import triton.language as tl

from steradian.optim import _kernel_parts as parts
from steradian.optim._kernel_long import _leave_sums, apply_long_rows
from steradian.optim._kernel_parts import DECOUPLED, LANES, WITHOUT_B, WITHOUT_C

__all__ = ["LANES", "apply_long_rows", "step_rows"]

# What the cache does with gradients, which a step reads once, and with what it writes ("" for the ordinary).
READ_ONCE, WRITTEN = tl.constexpr(""), tl.constexpr("")
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _sums(a, b, c, d):
    """The sums over the rows of four tiles, in one reduction."""
    if _INTERPRETED:  # there a reduction by a function goes entry by entry
        return tl.sum(a, axis=1), tl.sum(b, axis=1), tl.sum(c, axis=1), tl.sum(d, axis=1)
    else:
        return tl.reduce((a, b, c, d), 1, _add4)


@triton.jit
def _tile(
    item, d, told, also, settings, rates, grad_scale,
    R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, ALIGNED: tl.constexpr, ELEMENTWISE: tl.constexpr,
    EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of up to R rows of d numbers of one parameter, each in K pieces of S lanes."""
    if ALIGNED:
        d = (d // 4) * 4  # tells the compiler that rows begin at multiples of 16 bytes
    x_at = parts.first(item).to(tl.pointer_type(P))
    g_at = parts.first(item + 1).to(tl.pointer_type(P))
    m_at = parts.first(item + 2).to(tl.pointer_type(P))
    if ALIGNED:
        x_at, g_at, m_at = tl.multiple_of(x_at, 16), tl.multiple_of(g_at, 16), tl.multiple_of(m_at, 16)
    rows, cols = tl.arange(0, R), tl.arange(0, S)
    alive = rows < parts.low(parts.first(item + 6))
    at = rows[:, None] * d + cols[None, :]
    xs, gs, ms = (), (), ()
    for k in tl.static_range(K):
        mask = alive[:, None] & (k * S + cols[None, :] < d)
        xs = xs + (tl.load(x_at + at + k * S, mask=mask, other=0.0).to(C),)
        gs = gs + (tl.load(g_at + at + k * S, mask=mask, other=0.0, eviction_policy=READ_ONCE).to(C),)
        ms = ms + (tl.load(m_at + at + k * S, mask=mask, other=0.0).to(C),)

    log_beta1, log_beta2, share1, share2, eps, decay, flags, rate = parts.settings_of(
        settings, rates, parts.low(parts.first(item + 7)), C
    )
    step = tl.load(parts.first(item + 4).to(tl.pointer_type(tl.float32))).to(C) + 1.0
    pace, root = parts.bias_corrections(step, log_beta1, log_beta2, rate)
    decoupled, transported = (flags & DECOUPLED) != 0, (flags & WITHOUT_B) != 0
    start = tl.where(decoupled, 1.0 - rate * decay, 1.0).to(C)
    l2 = tl.where(decoupled, 0.0, decay).to(C)
    outside = tl.where(transported, share1 * l2, 0.0).to(C)  # without (b) the L2 term acts on x alone
    inside = tl.where(transported, 0.0, l2).to(C)
    factor = parts.sign_and_scale(flags, grad_scale, SCALED, C)
    largest, _smallest, _steepest = parts.limits(C)

    squares = tl.zeros([R, S], dtype=C)
    for k in tl.static_range(K):
        g = gs[k] * factor + l2 * xs[k]
        squares += g * g
    gg = tl.sum(squares, axis=1)
    usable = gg <= largest
    if EMIT:
        ahh, axh = tl.zeros([R, S], dtype=C), tl.zeros([R, S], dtype=C)
        for k in tl.static_range(K):
            ahh += (gs[k] * factor) * (gs[k] * factor)
            axh += xs[k] * (gs[k] * factor)
        hh, xh = tl.sum(ahh, axis=1), tl.sum(axh, axis=1)
    moments = ()
    for k in tl.static_range(K):
        target = gs[k] * factor + inside * xs[k]
        moments = moments + (tl.where(usable[:, None], parts.lerp(ms[k], target, share1), ms[k]),)

    ys, vs = (), ()
    if ELEMENTWISE:
        v_at = parts.first(item + 3).to(tl.pointer_type(P))
        tops, spread = tl.zeros([R, S], dtype=C), tl.zeros([R, S], dtype=C)
        for k in tl.static_range(K):
            mask = alive[:, None] & (k * S + cols[None, :] < d)
            g = gs[k] * factor + l2 * xs[k]
            v = tl.load(v_at + at + k * S, mask=mask, other=0.0).to(C)
            v = tl.where(usable[:, None], parts.lerp(v, tl.minimum(g * g, largest), share2), v)
            s = parts.divided(v, usable[:, None], pace, root, eps)
            ys = ys + ((start - s * outside) * xs[k] - s * moments[k],)
            vs = vs + (v,)
            tops = tl.maximum(tops, v)
            divisor = tl.where(mask, tl.sqrt(v) / root + eps, 0.0)
            spread += divisor * divisor
        top = tl.max(tops, axis=1)
        mean_divisor = tl.sqrt(tl.sum(spread, axis=1) / d)
    else:
        v_at = parts.first(item + 3).to(tl.pointer_type(C))
        top = tl.load(v_at + rows, mask=alive, other=0.0)
        top = tl.where(usable, parts.lerp(top, tl.minimum(gg / d, largest), share2), top)
        mean_divisor = tl.sqrt(top) / root + eps
        s = parts.divided(top, usable, pace, root, eps)
        for k in tl.static_range(K):
            ys = ys + ((start - s * outside)[:, None] * xs[k] - s[:, None] * moments[k],)

    axx, ayy = tl.zeros([R, S], dtype=C), tl.zeros([R, S], dtype=C)
    axy, along = tl.zeros([R, S], dtype=C), tl.zeros([R, S], dtype=C)
    for k in tl.static_range(K):
        axx += xs[k] * xs[k]
        ayy += ys[k] * ys[k]
        axy += xs[k] * ys[k]
        along += moments[k] * (xs[k] if ELEMENTWISE else ys[k])
    xx, yy, xy, mxy = _sums(axx, ayy, axy, along)  # ⟨m,x⟩ where v is element-wise, else ⟨m,y⟩
    shrink, there = parts.motion(xx, yy, top, flags, C)
    growth = tl.where((flags & WITHOUT_C) != 0, shrink, 1.0)
    if ELEMENTWISE:
        # The step is not along m: the general isometry, m^⊥ − 2⟨m^⊥,w⟩/⟨w,w⟩·w with w = u + u'. From w's entries, since
        # ⟨w,w⟩ = 2(1 + ⟨u,u'⟩) has no digits near the antipode.
        r, q = tl.sqrt(tl.where(there, xx, 1.0)), tl.sqrt(tl.where(there, yy, 1.0))
        inward = mxy / (r * r)
        amw, aww = tl.zeros([R, S], dtype=C), tl.zeros([R, S], dtype=C)
        for k in tl.static_range(K):
            w = xs[k] / r[:, None] + ys[k] / q[:, None]
            amw += (moments[k] - inward[:, None] * xs[k]) * w
            aww += w * w
        mw, ww = tl.sum(amw, axis=1), tl.sum(aww, axis=1)
        turn = 2.0 * mw / tl.where(ww > 0, ww, 1.0)
        kept = tl.sqrt(growth)
        turned = transported & there & (tl.abs(turn) <= largest)
        by_x = tl.where(turned, kept * (inward + turn / r), 0.0)[:, None]
        by_y = tl.where(turned, kept * turn / q, 0.0)[:, None]
    else:
        kept, removed = parts.carried_in_plane(xx, yy, xy, mxy, shrink, there, flags, C)
        by_x = removed[:, None]
        tl.store(v_at + rows, top * growth, mask=alive)
    for k in tl.static_range(K):
        mask = alive[:, None] & (k * S + cols[None, :] < d)
        m = kept[:, None] * moments[k] - by_x * xs[k]
        if ELEMENTWISE:
            m -= by_y * ys[k]
            tl.store(v_at + at + k * S, parts.kept_in(vs[k] * growth[:, None], P), mask=mask)
        tl.store(x_at + at + k * S, parts.kept_in(ys[k], P), mask=mask, eviction_policy=WRITTEN)
        tl.store(m_at + at + k * S, parts.kept_in(m, P), mask=mask, eviction_policy=WRITTEN)

    if EMIT:
        # y − (⟨x,y⟩/⟨x,x⟩)x, entry by entry: its square from the sums would cancel for small angles.
        slope = tl.where(xx > 0, xy / tl.where(xx > 0, xx, 1.0), 0.0)[:, None]
        across, inward = tl.zeros([R, S], dtype=C), tl.zeros([R, S], dtype=C)
        for k in tl.static_range(K):
            across += (ys[k] - slope * xs[k]) * (ys[k] - slope * xs[k])
            inward += xs[k] * (start * xs[k] - ys[k])
        radial = tl.sum(inward, axis=1) / tl.where(there, start * xx, 1.0)
        pace_e = share1 * pace / mean_divisor
        across = tl.sqrt(tl.sum(across, axis=1))
        told, also = told + rows * 7, also + rows * 7
        parts.emit(told, also, alive, xx, yy, xy, hh, xh, across, radial, there, pace_e, start, C)


@triton.jit
def _count(lines, entries, finished, N_PARAMS: tl.constexpr):
    """The last program to finish counts the step of every parameter: by then all have read the old count."""
    # The barrier, because one thread counts for all: no warp may still be about to read the old count. Relaxed is
    # enough behind it, since nothing else is handed over; a fence would wait for all stores.
    tl.debug_barrier()
    if tl.atomic_add(finished, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(finished, 0)
        for block in range(0, entries, N_PARAMS):
            index = block + tl.arange(0, N_PARAMS)
            mask = index < entries
            steps = tl.load(lines + index * 8 + 4, mask=mask, other=0).to(tl.pointer_type(tl.float32))
            tl.store(steps, tl.load(steps, mask=mask, other=0.0) + 1.0, mask=mask)


@triton.jit
def step_rows(
    items, lines, settings, rates, emitted, told, sums, grad_scale, found_inf, also, finished, entries,
    CLASSES: tl.constexpr, ELEMENTWISE: tl.constexpr, EMIT: tl.constexpr, SCALED: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of all rows that a tile holds, and the sums of the chunks of all longer ones.

    `items` has a line of eight int64 per program: what `lines` has, at the first row of the program; with d its
    class, with n (the rows that are left) the number of a chunk, with the settings line the slot of a chunk, in the
    upper halves. CLASSES is a bit per class that occurs, so that no other code is compiled. Telemetry goes to `told`
    and `also`, in both as far from the beginning as `emitted` says for each program.
    """
    item = items + tl.program_id(0).to(tl.int64) * 8
    shape = parts.first(item + 5)
    kind, d = parts.high(shape), shape & 0xFFFFFFFF
    skipped = False
    if SCALED:
        skipped = tl.load(found_inf) != 0.0
    if not skipped:
        for k in tl.static_range(0, 60):
            if (CLASSES >> k) & 1:
                if kind == k:
                    S: tl.constexpr = 32 << (k // 10)
                    # Rows at odd addresses get tiles of another shape: where both kinds share one, the compiler
                    # shares their constants and carries whole tiles through shared memory from one to the other.
                    R: tl.constexpr = LANES // (4 if k % 2 == 1 else 8) // S
                    place = tl.zeros([], dtype=tl.int64)
                    if EMIT:
                        place = tl.load(emitted + tl.program_id(0))
                    _tile(item, d.to(tl.int32), told + place, also + place, settings, rates, grad_scale, R, S,
                          1 + (k // 2) % 5, k % 2 == 1, ELEMENTWISE, EMIT, SCALED, P, C)  # fmt: skip
        if (CLASSES >> 60) & 1:
            if kind == 60:
                _leave_sums(item, d, sums, settings, rates, grad_scale, EMIT, SCALED, P, C)
        _count(lines, entries, finished, 1024)

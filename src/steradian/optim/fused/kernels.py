"""The fused steps of Adam and Angular as Triton kernels: a program holds a tile of rows, reads each entry once.

A row of d numbers is K ≤ 5 pieces of S lanes, so that rows of 2^k and of 9·2^k numbers, as 3 × 3 convolutions have
them, waste few lanes; a program steps as many rows as fill LANES/4 lanes with one piece (LANES/8 for rows at odd
addresses). Rows that no tile holds are cut into chunks of LANES: the first kernel leaves the sums of each chunk, the
second adds them up and applies the step. Arithmetic is that of `reference`, in float32 (float64 for float64).

Tables (see `table`): `lines` has one line of int64 per parameter (addresses of x, gradient, m, v and step count;
d; n; settings line), `settings` one line of float64 per group, `rates` the address of each group's rate. `items` has
a line for each program, at the address of its first row, so that a program reads its data after one look-up.

EMIT: telemetry is on. SCALED: under a gradient scaler. P and C: the dtypes of the parameters and of the arithmetic.
KIND: 0 for Adam with a number per row, 1 with element-wise second moments, 2 for Angular, 3 with Nesterov. Along Muon's
direction Angular takes two launches: 4, or 5 with Nesterov, leaves the momenta; 6 turns rows along their matrices.
"""

import os
from typing import NamedTuple

import triton
import triton.language as tl

LANES = tl.constexpr(4096)

# PER_ROW: v has one number per row, in Adam without (a) and in Angular with the spread "rms".
PER_ROW, WITHOUT_B, WITHOUT_C = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
DECOUPLED, MAXIMIZE, CORRECTED = tl.constexpr(8), tl.constexpr(16), tl.constexpr(32)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Settings(NamedTuple):
    """Of one group; Angular has its β in the place of ε."""

    log_beta1: tl.tensor
    log_beta2: tl.tensor
    share1: tl.tensor  # 1 − β1
    share2: tl.tensor
    eps: tl.tensor
    decay: tl.tensor
    flags: tl.tensor
    rate: tl.tensor


@triton.jit
def settings_of(settings, rates, line, C: tl.constexpr):
    """The settings of a group from their line in the table, which has λ/η_max where the decay is corrected."""
    at = settings + line * 8
    address, single = tl.load(rates + line), tl.load(at + 7) != 0.0
    rate = tl.load(address.to(tl.pointer_type(tl.float32)), mask=single, other=0.0).to(tl.float64)
    rate += tl.load(address.to(tl.pointer_type(tl.float64)), mask=single == 0, other=0.0)
    log_beta1, log_beta2 = tl.load(at).to(C), tl.load(at + 1).to(C)
    share1, share2 = tl.load(at + 2).to(C), tl.load(at + 3).to(C)
    eps, decay, flags = tl.load(at + 4).to(C), tl.load(at + 5), tl.load(at + 6).to(tl.int32)
    decay = tl.where((flags & CORRECTED) != 0, decay * rate, decay).to(C)
    return Settings(log_beta1, log_beta2, share1, share2, eps, decay, flags, rate.to(C))


@triton.jit
def limits(C: tl.constexpr):
    """Largest number, smallest normal number over the rounding unit, rounding unit to the power −2."""
    if C == tl.float64:
        return 1.7976931348623157e308, 1.002084180004486e-292, 2.028240960365167e31
    else:
        return 3.4028234663852886e38, 9.860761315262648e-32, 7.0368744177664e13


@triton.jit
def sign_and_scale(flags, grad_scale, SCALED: tl.constexpr, C: tl.constexpr):
    """What the gradient is multiplied by: −1 to maximize, over the gradient scaler's scale."""
    factor = tl.where((flags & MAXIMIZE) != 0, -1.0, 1.0).to(C)
    if SCALED:
        factor = factor / tl.load(grad_scale).to(C)
    return factor


@triton.jit
def motion(xx, yy, v, flags, C: tl.constexpr):
    """(r/r')² and the rows that keep their direction: `transport.Motion`."""
    largest, smallest, steepest = limits(C)
    shrink = xx / yy
    there = (tl.minimum(xx, yy) >= smallest) & (yy <= largest) & (shrink <= steepest)
    there = there & (((flags & WITHOUT_C) == 0) | (v * shrink <= largest))
    return tl.where(there, shrink, 1.0), there


@triton.jit
def carried_in_plane(xx, yy, xy, my, shrink, moves, flags, C: tl.constexpr):
    """m ← kept·m − removed·x of a step along m: transport where (b), times r/r' where (c) is neutralized."""
    largest, _smallest, _steepest = limits(C)
    scale = tl.where((flags & WITHOUT_C) != 0, yy, tl.sqrt(xx) * tl.sqrt(yy))
    kept, removed = xy / scale, my / scale
    moved = moves & (tl.abs(removed) <= largest)
    transported = (flags & WITHOUT_B) != 0
    rescaled = tl.where((flags & WITHOUT_C) != 0, tl.sqrt(shrink), 1.0)
    kept = tl.where(transported, tl.where(moved, kept, 1.0), rescaled)
    return kept.to(C), tl.where(transported & moved, removed, 0.0).to(C)


@triton.jit
def one_minus_power(log_beta, step):
    """1 − β^t = −(e^u − 1) with u = t ln β: by its series for small u, where the difference would lose digits."""
    u = log_beta * step
    near = tl.maximum(u, -0.5)
    series = tl.zeros_like(near)
    for k in tl.static_range(14, 0, -1):
        series = (1.0 + series) * (near / k)
    return tl.where(u > -0.5, -series, 1.0 - tl.exp(u))


@triton.jit
def bias_corrections(step, group):
    """η/(1−β1^t) and √(1−β2^t)."""
    return group.rate / one_minus_power(group.log_beta1, step), tl.sqrt(one_minus_power(group.log_beta2, step))


@triton.jit
def lerp(old, new, share):
    """(1−s)·old + s·new as `Tensor.lerp` has it: from the nearer end, so that s = 1 leaves nothing of the old."""
    near = share < 0.5
    return tl.where(near, old, new) + tl.where(near, share, share - 1.0) * (new - old)


@triton.jit
def divided(v, usable, pace, root, eps):
    """s = η̂/(√v̂ + ε), 0 where that divides by 0 or the row is not usable."""
    divisor = tl.sqrt(v) / root + eps
    return tl.where(usable & (divisor > 0), pace / tl.where(divisor > 0, divisor, 1.0), 0.0)


@triton.jit
def kept_in(value, P: tl.constexpr):
    """A number as it is kept: at the end of float16's range what lies beyond it, which would come back infinite."""
    if P == tl.float16:
        value = tl.where(value > 65504.0, 65504.0, tl.where(value < -65504.0, -65504.0, value))
    return value.to(P)


@triton.jit
def first(at):
    """A number that every program begins with: worth keeping in the cache through a step that streams by."""
    return tl.load(at, eviction_policy="evict_last")


@triton.jit
def address(at, T: tl.constexpr):
    """Such a number that is the address of numbers of a dtype."""
    return first(at).to(tl.pointer_type(T))


@triton.jit
def low(packed):
    """The lower half of a packed number."""
    return (packed & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def high(packed):
    """The upper half of a packed number."""
    return (packed >> 32).to(tl.int32)


@triton.jit
def angle(across, along):
    """atan2(across, along) for across ≥ 0: the angle is halved three times, then its series converges fast."""
    length = tl.sqrt(across * across + along * along)
    t = across / tl.where(length > 0, length + tl.abs(along), 1.0)
    t = t / (1.0 + tl.sqrt(1.0 + t * t))
    t = t / (1.0 + tl.sqrt(1.0 + t * t))
    series = tl.zeros_like(t)
    for k in tl.static_range(10, -1, -1):
        series = 1.0 / (2 * k + 1) - t * t * series
    angle = 8.0 * t * series
    return tl.where(along < 0, 3.141592653589793 - angle, angle)


@triton.jit
def sine(theta):
    """Sin θ by its series, to the last digits for angles up to 1.5."""
    series = tl.zeros_like(theta)
    for k in tl.static_range(9, 0, -1):
        series = (1.0 - series) * (theta * theta / (2 * k * (2 * k + 1)))
    return theta * (1.0 - series)


@triton.jit
def emit(telemetry, also, alive, xx, yy, xy, hh, xh, across, radial, there, pace, start, C: tl.constexpr):
    """Write the numbers of `TELEMETRY` for each row, to two tensors; h is the gradient alone, without L2."""
    largest, _smallest, _steepest = limits(C)
    radius, slope = tl.sqrt(xx), tl.sqrt(hh)
    along = tl.where(there, xy / tl.where(there, radius, 1.0), 1.0)
    turned = tl.where(there, angle(across, along), 0.0)
    rate = tl.where(there, pace / tl.where(there, start * xy, 1.0), 0.0)
    rate = tl.where(tl.abs(pace) <= largest, rate, 0.0)
    inclined = there & (hh > 0) & (hh <= largest)
    defect = tl.where(inclined, tl.abs(xh) / tl.where(inclined, radius * slope, 1.0), 0.0)
    radial = tl.where(there & (tl.abs(radial) <= largest), radial, 0.0)
    columns = radius, turned, rate, tl.sqrt(yy), slope, defect, radial
    for k in tl.static_range(7):
        tl.store(telemetry + k, columns[k].to(C), mask=alive)
        tl.store(also + k, columns[k].to(C), mask=alive)


# Rows that a tile holds ---------------------------------------------------------------------------------------------


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sums2(a, b):
    """The sums over the rows of two tiles, in one reduction."""
    if _INTERPRETED:  # there a reduction by a function goes entry by entry
        return tl.sum(a, axis=1), tl.sum(b, axis=1)
    else:
        return tl.reduce((a, b), 1, _add2)


@triton.jit
def _sums3(a, b, c):
    """The sums over the rows of three tiles, in one reduction."""
    if _INTERPRETED:
        return tl.sum(a, axis=1), tl.sum(b, axis=1), tl.sum(c, axis=1)
    else:
        return tl.reduce((a, b, c), 1, _add3)


@triton.jit
def _read_tile(item, d, R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, ALIGNED: tl.constexpr,
               P: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Up to R rows of a parameter, each in K pieces of S lanes: d, which rows are there, where they lie, x, g and m."""
    # Not by `address`: the compiler drops hints about the result of a function.
    x_at = first(item).to(tl.pointer_type(P))
    g_at = first(item + 1).to(tl.pointer_type(P))
    m_at = first(item + 2).to(tl.pointer_type(P))
    if ALIGNED:
        d = (d // 4) * 4  # tells the compiler that rows begin at multiples of 16 bytes
        x_at, g_at, m_at = tl.multiple_of(x_at, 16), tl.multiple_of(g_at, 16), tl.multiple_of(m_at, 16)
    rows = tl.arange(0, R)
    alive = rows < low(first(item + 6))
    at = rows[:, None] * d + tl.arange(0, S)[None, :]
    xs, gs, ms = (), (), ()
    for k in tl.static_range(K):
        mask = _lanes(alive, k, S, d)
        xs = xs + (tl.load(x_at + at + k * S, mask=mask, other=0.0).to(C),)
        gs = gs + (tl.load(g_at + at + k * S, mask=mask, other=0.0).to(C),)
        ms = ms + (tl.load(m_at + at + k * S, mask=mask, other=0.0).to(C),)
    return d, alive, at, x_at, m_at, xs, gs, ms


@triton.jit
def _lanes(rows, k: tl.constexpr, S: tl.constexpr, d):
    """The lanes of piece k that hold numbers of these rows."""
    return rows[:, None] & (k * S + tl.arange(0, S)[None, :] < d)


@triton.jit
def _across(xs, ys, slope, zeros, K: tl.constexpr):
    """‖y − (⟨x,y⟩/⟨x,x⟩)x‖, entry by entry: its square from the sums would cancel for small angles."""
    squares = zeros
    for k in tl.static_range(K):
        part = ys[k] - slope[:, None] * xs[k]
        squares += part * part
    return tl.sqrt(tl.sum(squares, axis=1))


@triton.jit
def _step_tile(
    item, d, telemetry, also, settings, rates, grad_scale,
    R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, ALIGNED: tl.constexpr, ELEMENTWISE: tl.constexpr,
    EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of Adam."""
    d, alive, at, x_at, m_at, xs, gs, ms = _read_tile(item, d, R, S, K, ALIGNED, P, C)
    rows, zeros = tl.arange(0, R), tl.zeros([R, S], dtype=C)
    group = settings_of(settings, rates, low(first(item + 7)), C)
    pace, root = bias_corrections(tl.load(address(item + 4, tl.float32)).to(C) + 1.0, group)
    flags, decay, share1, share2, eps = group.flags, group.decay, group.share1, group.share2, group.eps
    decoupled, transported = (flags & DECOUPLED) != 0, (flags & WITHOUT_B) != 0
    l2 = tl.where(decoupled, 0.0, decay).to(C)
    outside = tl.where(transported, share1 * l2, 0.0).to(C)  # without (b) the L2 term acts on x alone
    inside = tl.where(transported, 0.0, l2).to(C)
    factor = sign_and_scale(flags, grad_scale, SCALED, C)
    largest, _smallest, _steepest = limits(C)

    squares, axx, moments = zeros, zeros, ()
    for k in tl.static_range(K):
        g = gs[k] * factor + l2 * xs[k]
        squares += g * g
        axx += xs[k] * xs[k]
        moments = moments + (lerp(ms[k], gs[k] * factor + inside * xs[k], share1),)
    gg, xx = _sums2(squares, axx)
    usable = gg <= largest
    stored = alive & usable  # a row that takes no step stays in memory as it is
    start = tl.where(decoupled & usable, 1.0 - group.rate * decay, 1.0).to(C)
    if EMIT:
        ahh, axh, steps = zeros, zeros, ()
        for k in tl.static_range(K):
            ahh += (gs[k] * factor) * (gs[k] * factor)
            axh += xs[k] * (gs[k] * factor)
            steps = steps + (tl.where(usable[:, None], moments[k], 0.0),)
        hh, xh, moments = tl.sum(ahh, axis=1), tl.sum(axh, axis=1), steps

    ys, vs = (), ()
    if ELEMENTWISE:
        v_at = address(item + 3, P)
        tops, spread = zeros, zeros
        for k in tl.static_range(K):
            mask = _lanes(alive, k, S, d)
            g = gs[k] * factor + l2 * xs[k]
            v = tl.load(v_at + at + k * S, mask=mask, other=0.0).to(C)
            v = tl.where(usable[:, None], lerp(v, tl.minimum(g * g, largest), share2), v)
            s = divided(v, usable[:, None], pace, root, eps)
            ys = ys + ((start[:, None] - s * outside) * xs[k] - s * moments[k],)
            vs = vs + (v,)
            tops = tl.maximum(tops, v)
            divisor = tl.where(mask, tl.sqrt(v) / root + eps, 0.0)
            spread += divisor * divisor
        top = tl.max(tops, axis=1)
        mean_divisor = tl.sqrt(tl.sum(spread, axis=1) / d)
    else:
        v_at = address(item + 3, C)
        top = tl.load(v_at + rows, mask=alive, other=0.0)
        top = tl.where(usable, lerp(top, tl.minimum(gg / d, largest), share2), top)
        mean_divisor = tl.sqrt(top) / root + eps
        s = divided(top, usable, pace, root, eps)
        for k in tl.static_range(K):
            ys = ys + ((start - s * outside)[:, None] * xs[k] - s[:, None] * moments[k],)

    ayy, axy, along = zeros, zeros, zeros
    for k in tl.static_range(K):
        # Written before the sums are known: its registers are free during the reduction.
        tl.store(x_at + at + k * S, kept_in(ys[k], P), mask=_lanes(stored, k, S, d))
        ayy += ys[k] * ys[k]
        axy += xs[k] * ys[k]
        along += moments[k] * (xs[k] if ELEMENTWISE else ys[k])
    yy, xy, mxy = _sums3(ayy, axy, along)  # ⟨m,x⟩ where v is element-wise, else ⟨m,y⟩
    shrink, there = motion(xx, yy, top, flags, C)
    growth = tl.where(usable & ((flags & WITHOUT_C) != 0), shrink, 1.0)
    if ELEMENTWISE:
        # The step is not along m: the general isometry, m^⊥ − 2⟨m^⊥,w⟩/⟨w,w⟩·w with w = u + u'. From w's entries, since
        # ⟨w,w⟩ = 2(1 + ⟨u,u'⟩) has no digits near the antipode.
        r, q = tl.sqrt(tl.where(there, xx, 1.0)), tl.sqrt(tl.where(there, yy, 1.0))
        inward = mxy / (r * r)
        amw, aww = zeros, zeros
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
        kept, removed = carried_in_plane(xx, yy, xy, mxy, shrink, there, flags, C)
        by_x = removed[:, None]
        tl.store(v_at + rows, top * growth, mask=alive)
    for k in tl.static_range(K):
        mask = _lanes(stored, k, S, d)
        m = kept[:, None] * moments[k] - by_x * xs[k]
        if ELEMENTWISE:
            m -= by_y * ys[k]
            tl.store(v_at + at + k * S, kept_in(vs[k] * growth[:, None], P), mask=mask)
        tl.store(m_at + at + k * S, kept_in(m, P), mask=mask)

    if EMIT:
        slope = tl.where(xx > 0, xy / tl.where(xx > 0, xx, 1.0), 0.0)
        inward = zeros
        for k in tl.static_range(K):
            inward += xs[k] * (start[:, None] * xs[k] - ys[k])
        radial = tl.sum(inward, axis=1) / tl.where(there, start * xx, 1.0)
        emit(telemetry + rows * 7, also + rows * 7, alive, xx, yy, xy, hh, xh, _across(xs, ys, slope, zeros, K),
             radial, there, share1 * pace / mean_divisor, start, C)  # fmt: skip


@triton.jit
def turn(xx, nn, xn, mn, xm, v, moves, usable, group, step, C: tl.constexpr):
    """How a row turns along −n^⊥, from products of x, n and m: `reference._turn`.

    Returns sin θ and cos θ, ‖d‖, the new v, and the factors of y = yx·x + yn·n and m' = m + mx·x + mn·n.
    """
    largest, _smallest, _steepest = limits(C)
    r, inward = tl.sqrt(xx), xn / xx
    length = tl.sqrt(tl.maximum(nn - xn * inward, 0.0))
    moves = moves & (length > 0)
    reach = tl.where(length > 0, length, 1.0)
    theta = tl.where(moves, group.rate, 0.0).to(C)
    if (group.flags & PER_ROW) != 0:
        v = tl.where(usable, lerp(v, tl.minimum(length * length, largest), group.share2), v).to(C)
        root = tl.sqrt(v) / tl.sqrt(one_minus_power(group.log_beta2, step))
        theta = tl.where(v > 0, tl.minimum(theta * length / tl.where(v > 0, root, 1.0), 0.5), 0.0).to(C)
    s, half = sine(theta), sine(0.5 * theta)
    lost = 2.0 * half * half  # 1 − cos θ
    k, along = r * s / reach, (mn - xm * inward) / reach
    turned = along * lost / reach
    return s, 1.0 - lost, reach, v, 1.0 - lost + k * inward, -k, along * s / r - xm / xx + turned * inward, -turned


@triton.jit
def _turn_tile(
    item, d, telemetry, also, settings, rates, grad_scale, n_at,
    R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr,
    EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of Angular: h from the sums of x and g, the turn along n from those of m.

    Kinds 4 and 5 only leave n at `n_at`, 0 for rows that take no step; kind 6 takes from there what they turn along.
    """
    d, alive, at, x_at, m_at, xs, gs, ms = _read_tile(item, d, R, S, K, ALIGNED, P, C)
    rows, zeros = tl.arange(0, R), tl.zeros([R, S], dtype=C)
    group = settings_of(settings, rates, low(first(item + 7)), C)
    factor, beta = sign_and_scale(group.flags, grad_scale, SCALED, C), group.eps
    largest, smallest, steepest = limits(C)
    axx, axg = zeros, zeros
    for k in tl.static_range(K):
        axx += xs[k] * xs[k]
        axg += xs[k] * (gs[k] * factor)
    xx, xg = _sums2(axx, axg)
    there = (xx >= smallest) & (xx <= largest)
    xx = tl.where(there, xx, 1.0)
    r, radial = tl.where(there, tl.sqrt(xx), 0.0)[:, None], (xg / xx)[:, None]
    ahh, amm, axm = zeros, zeros, zeros
    moments, ns = (), ()
    for k in tl.static_range(K):
        h = (gs[k] * factor - radial * xs[k]) * r
        m = beta * ms[k] + h
        ahh += h * h
        amm += m * m
        axm += xs[k] * m
        moments = moments + (m,)
        ns = ns + (h + beta * m if KIND == 3 or KIND == 5 else m,)
    if KIND == 4 or KIND == 5:
        usable = tl.sum(ahh, axis=1) * 1048576.0 <= largest
        for k in tl.static_range(K):
            n = tl.where(usable[:, None], ns[k], 0.0)
            tl.store(n_at + at + k * S, n, mask=_lanes(alive, k, S, d))
    else:
        hh, mm, xm = _sums3(ahh, amm, axm)
        usable = hh * 1048576.0 <= largest  # with room for the squares of m
        nn, xn, mn = mm, xm, mm
        if KIND == 6:
            ns = ()
            for k in tl.static_range(K):
                ns = ns + (tl.load(n_at + at + k * S, mask=_lanes(alive, k, S, d), other=0.0),)
        if KIND != 2:
            ann, axn, amn = zeros, zeros, zeros
            for k in tl.static_range(K):
                ann += ns[k] * ns[k]
                axn += xs[k] * ns[k]
                amn += moments[k] * ns[k]
            nn, xn, mn = _sums3(ann, axn, amn)
        # The tangent part of a radial gradient is rounding, which is no direction to turn in.
        moves = there & usable & (hh * steepest > 256.0 * xg * xg)
        counted = rows < tl.where((group.flags & PER_ROW) != 0, low(first(item + 6)), 0)
        v_at = address(item + 3, C) + rows
        step = tl.load(address(item + 4, tl.float32)).to(C) + 1.0
        v = tl.load(v_at, mask=counted, other=0.0)
        group = settings_of(settings, rates, low(first(item + 7)), C)  # again: kept until now they would take registers
        s, cosine, length, v, yx, yn, mx, by_n = turn(xx, nn, xn, mn, xm, v, moves, usable, group, step, C)
        tl.store(v_at, v, mask=counted)
        yx, yn, mx, by_n = yx[:, None], yn[:, None], mx[:, None], by_n[:, None]
        agg, ayy, axy, ys = zeros, zeros, zeros, ()
        for k in tl.static_range(K):
            mask = _lanes(alive & usable, k, S, d)
            y = kept_in(yx * xs[k] + yn * ns[k], P)
            m = moments[k] + by_n * ns[k] if KIND != 2 else (1.0 + by_n) * ns[k]
            tl.store(x_at + at + k * S, y, mask=mask)
            tl.store(m_at + at + k * S, kept_in(m + mx * xs[k], P), mask=mask)
            if EMIT:  # of the weights as they are kept: half precision rounds the angle
                y = tl.where(usable[:, None], y.to(C), xs[k])
                ys = ys + (y,)
                agg += (gs[k] * factor) * (gs[k] * factor)
                ayy += y * y
                axy += xs[k] * y
        if EMIT:
            gg, yy, xy = _sums3(agg, ayy, axy)
            across, pace = _across(xs, ys, xy / xx, zeros, K), s / (cosine * length) * xy
            xx = tl.where(there, xx, 0.0)
            emit(telemetry + rows * 7, also + rows * 7, alive, xx, yy, xy, gg, xg, across,
                 tl.zeros_like(xx), there, pace, 1.0, C)  # fmt: skip


# Rows that no tile holds --------------------------------------------------------------------------------------------


@triton.jit
def _leave_sums(item, d, sums, settings, rates, grad_scale, KIND: tl.constexpr,
                EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """The products of one chunk of a long row, and v before the step.

    Angular: ⟨x,x⟩, ⟨x,g⟩, ⟨g,g⟩, ⟨x,m⟩, ⟨m,m⟩, ⟨g,m⟩. Adam: ⟨x,x⟩, ⟨g,g⟩, ⟨x,m⟩, ⟨m,m⟩ with m as it will be, and for
    telemetry ⟨h,h⟩, ⟨x,h⟩ of the gradient alone, without L2.
    """
    chunk, last = high(first(item + 6)), first(item + 7)
    group = settings_of(settings, rates, low(last), C)
    factor = sign_and_scale(group.flags, grad_scale, SCALED, C)
    at = chunk.to(tl.int64) * LANES + tl.arange(0, LANES)
    x, g, m = _read_chunk(
        address(item, P) + at, address(item + 1, P) + at, address(item + 2, P) + at, at < d, factor, C
    )
    if KIND >= 2:
        products = x * x, x * g, g * g, x * m, m * m, g * m
    else:
        gl = g + tl.where((group.flags & DECOUPLED) != 0, 0.0, group.decay).to(C) * x
        m = lerp(m, tl.where((group.flags & WITHOUT_B) != 0, g, gl), group.share1)
        products = x * x, gl * gl, x * m, m * m
        if EMIT:
            products = products + (g * g, x * g)
    out = sums + (last >> 32) * 7
    for k in tl.static_range(len(products)):
        tl.store(out + k, tl.sum(products[k], axis=0).to(tl.float64))
    v = tl.load(address(item + 3, C), mask=(group.flags & PER_ROW) != 0, other=0.0)
    tl.store(out + 6, v.to(tl.float64))


@triton.jit
def _read_chunk(x_at, g_at, m_at, mask, factor, C: tl.constexpr):
    x, g = tl.load(x_at, mask=mask, other=0.0).to(C), tl.load(g_at, mask=mask, other=0.0).to(C) * factor
    return x, g, tl.load(m_at, mask=mask, other=0.0).to(C)


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


@triton.jit
def step_long_rows(
    items, lines, settings, rates, emitted, telemetry, sums, grad_scale, found_inf, also,
    KIND: tl.constexpr, EMIT: tl.constexpr, SCALED: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The step of one chunk of a long row, from the sums of all of its chunks.

    The products that follow from these sums keep float32's digits in float64. `items` has five int32 per program:
    parameter, row, first slot of the row, number of chunks, chunk. The count of the step was already raised by
    `step_rows`.
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
        d = tl.load(line + 5)
        wide: tl.constexpr = tl.float64
        group = settings_of(settings, rates, tl.load(line + 7), wide)
        flags, v = group.flags, tl.load(sums + slot.to(tl.int64) * 7 + 6)
        step = tl.load(tl.load(line + 4).to(tl.pointer_type(tl.float32))).to(wide)
        largest, smallest, steepest = limits(C)
        # Read before the sums are added up, so that the program does not wait for one after the other.
        cols = chunk.to(tl.int64) * LANES + tl.arange(0, LANES)
        at = row.to(tl.int64) * d + cols
        x_at = tl.load(line).to(tl.pointer_type(P)) + at
        g_at = tl.load(line + 1).to(tl.pointer_type(P)) + at
        m_at = tl.load(line + 2).to(tl.pointer_type(P)) + at
        x, g, m = _read_chunk(x_at, g_at, m_at, cols < d, sign_and_scale(flags, grad_scale, SCALED, C), C)
        if KIND < 2:
            xx, gg = _added(sums, slot, chunks)
            xm, mm = _added(sums + 2, slot, chunks)
            pace, root = bias_corrections(step, group)
            decoupled, share1 = (flags & DECOUPLED) != 0, group.share1
            usable = gg <= largest
            start = tl.where(decoupled & usable, 1.0 - group.rate * group.decay, 1.0)
            l2 = tl.where(decoupled, 0.0, group.decay)
            # The chunks did not know that the row takes no step: their m is one that it does not get.
            xm, mm = tl.where(usable, xm, 0.0), tl.where(usable, mm, 0.0)
            v = tl.where(usable, lerp(v, tl.minimum(gg / d, largest), group.share2), v)
            s, divisor = divided(v, usable, pace, root, group.eps), tl.sqrt(v) / root + group.eps
            kept_x = start - tl.where((flags & WITHOUT_B) != 0, s * share1 * l2, 0.0)
            xy, my = kept_x * xx - s * xm, kept_x * xm - s * mm  # of y = kept_x·x − s·m
            yy = tl.maximum(kept_x * xy - s * my, 0.0)
            shrink, there = motion(xx, yy, v, flags, C)
            moves = there & usable
            shrink = tl.where(moves, shrink, 1.0)
            kept, removed = carried_in_plane(xx, yy, xy, my, shrink, moves, flags, wide)
            v *= tl.where((flags & WITHOUT_C) != 0, shrink, 1.0)
        else:
            xx, xg = _added(sums, slot, chunks)
            gg, xm = _added(sums + 2, slot, chunks)
            mm, gm = _added(sums + 4, slot, chunks)
            beta, there = group.eps, (xx >= smallest) & (xx <= largest)
            xx = tl.where(there, xx, 1.0)
            r, radial = tl.where(there, tl.sqrt(xx), 0.0), xg / xx
            hh = r * r * (gg - radial * xg)
            usable = hh * 1048576.0 <= largest  # before the maximum, which drops NaN
            hh = tl.maximum(hh, 0.0)
            # In float32 the sums themselves are rounded: what is left of a radial gradient is larger than in a tile.
            moves = there & usable & (hh * tl.sqrt(steepest) > 16.0 * r * r * gg)
            hm = r * (gm - radial * xm)
            newest = beta * hm + hh  # ⟨h, m⟩ with the new m
            xm, mm = beta * xm, beta * (beta * mm + hm) + newest
            nn, xn, mn = mm, xm, mm
            if KIND == 3:
                nn, xn, mn = hh + 2.0 * beta * newest + beta * beta * mm, beta * xm, newest + beta * mm
            s, cosine, length, v, yx, yn, mx, by_n = turn(xx, nn, xn, mn, xm, v, moves, usable, group, step, wide)
        if chunk == 0:
            if (flags & PER_ROW) != 0:
                tl.store(tl.load(line + 3).to(tl.pointer_type(C)) + row, v.to(C))
            if EMIT:
                place = tl.load(emitted + tl.program_id(0))
                telemetry, also = telemetry + place, also + place
                if KIND < 2:
                    hh, xh = _added(sums + 4, slot, chunks)
                    inward = xm / tl.where(xx > 0, xx, 1.0)
                    across = tl.sqrt(tl.maximum(mm - xm * inward, 0.0)) * s
                    radial = (start - kept_x + s * inward) / start
                    emit(telemetry, also, row >= 0, xx, yy, xy, hh, xh, across, radial, there,
                         share1 * pace / divisor, start, C)  # fmt: skip
                else:
                    pace = s / length * xx
                    xx = tl.where(there, xx, 0.0)
                    emit(telemetry, also, row >= 0, xx, xx, xx * cosine, gg, xg, tl.sqrt(xx) * s, 0.0 * xx, there,
                         pace, 1.0, C)  # fmt: skip
        if KIND < 2:
            m = lerp(m, tl.where((flags & WITHOUT_B) != 0, g, g + l2.to(C) * x), share1.to(C))
            y, m = kept_x.to(C) * x - s.to(C) * m, kept.to(C) * m - removed.to(C) * x
        else:
            h = (g - radial.to(C) * x) * r.to(C)
            m = beta.to(C) * m + h
            n = h + beta.to(C) * m if KIND == 3 else m
            y, m = yx.to(C) * x + yn.to(C) * n, m + by_n.to(C) * n + mx.to(C) * x
        stored = cols < tl.where(usable, d, 0)
        tl.store(x_at, kept_in(y, P), mask=stored)
        tl.store(m_at, kept_in(m, P), mask=stored)


# All rows -----------------------------------------------------------------------------------------------------------


@triton.jit
def _count(lines, entries, finished, N_PARAMS: tl.constexpr):
    """The last program to finish increments every step count: by then all programs have read the old one."""
    # One thread counts for all, so no warp may still read the old count: hence the barrier. Relaxed order is enough
    # behind it, because nothing else depends on the counter; a fence would wait for all stores.
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
    items, lines, settings, rates, emitted, telemetry, sums, grad_scale, found_inf, also, finished, entries,
    CLASSES: tl.constexpr, KIND: tl.constexpr, EMIT: tl.constexpr, SCALED: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of all rows that a tile holds, and the sums of the chunks of all longer ones.

    `items` has a line of eight int64 per program: what `lines` has, at the first row of the program; with d its
    class, with n (the rows that are left) the number of a chunk, with the settings line the slot of a chunk, in the
    upper halves. From kind 4 on, `sums` holds what rows turn along, and these two halves say where: in units of 2^24
    numbers, and the rest. CLASSES is a bit per class that occurs, so that no other code is compiled. Each program
    writes its telemetry to `telemetry` and `also`, at the offset in `emitted`.
    """
    item = items + tl.program_id(0).to(tl.int64) * 8
    shape = first(item + 5)
    kind, d = high(shape), shape & 0xFFFFFFFF
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
                    n_at = sums
                    if KIND >= 4:
                        n_at = sums + high(first(item + 6)).to(tl.int64) * 16777216 + high(first(item + 7))
                    if KIND < 2:
                        _step_tile(item, d.to(tl.int32), telemetry + place, also + place, settings, rates, grad_scale,
                                   R, S, 1 + (k // 2) % 5, k % 2 == 1, KIND == 1, EMIT, SCALED, P, C)  # fmt: skip
                    else:
                        _turn_tile(item, d.to(tl.int32), telemetry + place, also + place, settings, rates, grad_scale,
                                   n_at, R, S, 1 + (k // 2) % 5, k % 2 == 1, KIND, EMIT, SCALED, P, C)  # fmt: skip
        if (CLASSES >> 60) & 1:
            if kind == 60:
                _leave_sums(item, d, sums, settings, rates, grad_scale, KIND, EMIT, SCALED, P, C)
        if KIND != 4 and KIND != 5:
            _count(lines, entries, finished, 1024)


@triton.jit
def attempt(x):
    """The smallest kernel, to see whether any runs here."""
    tl.store(x, 1.0)

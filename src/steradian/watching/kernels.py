"""Triton kernels: sums over rows of weights, gradients and state, and statistics over the rows of a group."""

import triton
import triton.language as tl

__all__ = ["statistics_kernel", "sum_rows"]

LANES = tl.constexpr(1024)


@triton.jit
def sum_rows(items, lines, settings, out, ADAM: tl.constexpr, SGD: tl.constexpr, POINTS: tl.constexpr, P: tl.constexpr):
    """The sums of `observed.SUMS` over one piece of a row, in float64 whatever the dtype of the rows.

    q is the displacement from the point before the step to the point after it (POINTS), or q = a ⊘ b from the state. a
    and b are read as in `scheme`: a = m/(1−β1) and b = (1−β1^t)/(1−β1)·(√(v/(1−β2^t)) + ε) for Adam, a = m/(1−τ) and
    b = 1/(1−τ) for SGD with momentum; b = 0 for an optimizer that cannot be read.

    `items` has five int64 per program: line, row, first entry, entries, place in `out`. `lines` has eight per
    parameter: addresses of x, gradient, m, v, step count and the point after; entries of a row; line of settings. A
    line whose first address is 0 is skipped. `settings` has four float64 per param group: for Adam β1, β2, ε; for SGD
    1/(1−τ).
    """
    item = items + tl.program_id(0).to(tl.int64) * 5
    line = lines + tl.load(item) * 8
    at = tl.load(item + 1) * tl.load(line + 6) + tl.load(item + 2)
    entries, place = tl.load(item + 3), tl.load(item + 4)
    entries = tl.where(tl.load(line) == 0, 0, entries)
    x_at, g_at = tl.load(line).to(tl.pointer_type(P)) + at, tl.load(line + 1).to(tl.pointer_type(P)) + at
    m_at, v_at = tl.load(line + 2).to(tl.pointer_type(P)) + at, tl.load(line + 3).to(tl.pointer_type(P)) + at
    y_at = tl.load(line + 5).to(tl.pointer_type(P)) + at
    group = settings + tl.load(line + 7) * 4
    first, second, third = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    grown, scale, shift = first, first, first * 0.0
    if ADAM:
        step = tl.load(tl.load(line + 4).to(tl.pointer_type(tl.float32)), mask=entries > 0, other=1.0).to(tl.float64)
        share = (1.0 - tl.exp(step * tl.log(first))) / (1.0 - first)
        grown = 1.0 / (1.0 - first)
        scale, shift = share / tl.sqrt(1.0 - tl.exp(step * tl.log(second))), share * third
    zero = tl.zeros([LANES], dtype=tl.float64)
    xx, qx, qq, gg, gx, gq, bb = zero, zero, zero, zero, zero, zero, zero
    for block in range(0, entries, LANES):
        lanes = block + tl.arange(0, LANES)
        mask = lanes < entries
        x = tl.load(x_at + lanes, mask=mask, other=0.0).to(tl.float64)
        g = tl.load(g_at + lanes, mask=mask, other=0.0).to(tl.float64)
        b = zero
        if ADAM:
            v = tl.load(v_at + lanes, mask=mask, other=0.0).to(tl.float32)
            b = tl.where(mask, tl.sqrt(v).to(tl.float64) * scale + shift, 0.0)
        if SGD:
            b = tl.where(mask, scale + zero, 0.0)
        if POINTS:
            q = x - tl.load(y_at + lanes, mask=mask, other=0.0).to(tl.float64)
        else:
            a = tl.load(m_at + lanes, mask=mask, other=0.0).to(tl.float64) * grown
            q = tl.where(b > 0, a / tl.where(b > 0, b, 1.0), 0.0)
        xx += x * x
        qx += q * x
        qq += q * q
        gg += g * g
        gx += g * x
        gq += g * q
        bb += b * b
    to = out + place * 7
    tl.store(to, tl.sum(xx, axis=0))
    tl.store(to + 1, tl.sum(qx, axis=0))
    tl.store(to + 2, tl.sum(qq, axis=0))
    tl.store(to + 3, tl.sum(gg, axis=0))
    tl.store(to + 4, tl.sum(gx, axis=0))
    tl.store(to + 5, tl.sum(gq, axis=0))
    tl.store(to + 6, tl.sum(bb, axis=0))


@triton.jit
def _ordered(bits, BITS: tl.constexpr):
    """Integers in the order of the numbers that have these bits; its own inverse."""
    size = ~((bits * 0 + 1) << (BITS - 1))  # all bits but the sign
    return bits ^ ((bits >> (BITS - 1)) & size)


@triton.jit
def _quantile(key, place, share, BITS: tl.constexpr, KIND: tl.constexpr):
    """The value at `place` in the order and a share of the way to the next; none between equal infinities."""
    one = place.to(key.dtype) * 0 + 1
    sign = one << (BITS - 1)
    found = one * 0
    for k in range(BITS):
        more = found | (one << (BITS - 1 - k))
        below = tl.sum((key < (more ^ sign)).to(tl.int32), axis=0)
        found = tl.where(below <= place, more, found)
    found = found ^ sign
    last = tl.max(key, axis=0)
    upto = tl.sum((key <= found).to(tl.int32), axis=0)
    following = tl.where(upto > place + 1, found, tl.min(tl.where(key > found, key, last), axis=0))
    low = _ordered(found, BITS).to(KIND, bitcast=True)
    high = _ordered(following, BITS).to(KIND, bitcast=True)
    return tl.where((share == 0) | (low == high), low, low + (high - low) * share)


@triton.jit
def statistics_kernel(
    values, spans, shares, out, rows, groups, BITS: tl.constexpr, KIND: tl.constexpr, LENGTH: tl.constexpr
):
    """Minimum, three quantiles, maximum and mean of one group in one line of `values`, (lines, rows).

    The value at a place in the order is found bit by bit, from the number of values below, so that nothing is sorted,
    padded or written on the way.

    `spans` has six int32 for each group: its first row, how many there are, its place in `out`, and the places of the
    quantiles in the order; `shares` has three numbers, how far each quantile is from there to the next.
    """
    line = tl.program_id(0).to(tl.int64)
    span, share = spans + tl.program_id(1) * 6, shares + tl.program_id(1) * 3
    start, count, group = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    lane = tl.arange(0, LENGTH)
    there = lane < count
    value = tl.load(values + line * rows + start + lane, mask=there, other=float("inf"))
    mean = tl.sum(tl.where(there, value, 0.0), axis=0) / count.to(KIND)
    wrong = mean != mean
    key = _ordered(value.to(tl.int32 if BITS == 32 else tl.int64, bitcast=True), BITS)
    to = out + (line * groups + group) * 6
    tl.store(to, tl.where(wrong, mean, tl.min(value, axis=0)))
    for k in tl.static_range(3):
        quantile = _quantile(key, tl.load(span + 3 + k), tl.load(share + k).to(KIND), BITS, KIND)
        tl.store(to + 1 + k, tl.where(wrong, mean, quantile))
    tl.store(to + 4, tl.where(wrong, mean, tl.max(tl.where(there, value, float("-inf")), axis=0)))
    tl.store(to + 5, mean)

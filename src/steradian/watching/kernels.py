"""Triton kernels: sums over rows of weights, gradients and state, and statistics over the rows of a group."""

import triton
import triton.language as tl

__all__ = ["statistics_kernel", "sum_rows"]


@triton.jit
def sum_rows(
    items,
    lines,
    settings,
    out,
    ADAM: tl.constexpr,
    SGD: tl.constexpr,
    POINTS: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The sums of `observed.SUMS` over up to ROWS rows, or over one piece of a long row, in float64 for all dtypes.

    q is the displacement from the point before the step to the point after it (POINTS), or q = a ⊘ b from the state. a
    and b are read as in `scheme`: a = m/(1−β1) and b = (1−β1^t)/(1−β1)·(√(v/(1−β2^t)) + ε) for Adam, a = m/(1−τ) and
    b = 1/(1−τ) for SGD with momentum; b = 0 for an optimizer that cannot be read.

    `items` has six int64 per program: line, first row, rows, first entry, entries, place in `out`. `lines` has eight
    per parameter: addresses of x, gradient, m, v, step count and the point after; entries of a row; line of settings.
    A line whose first address is 0 is skipped. `settings` has four float64 per param group: for Adam β1, β2, ε; for SGD
    1/(1−τ).
    """
    item = items + tl.program_id(0).to(tl.int64) * 6
    line = lines + tl.load(item) * 8
    rows, entries, place = tl.load(item + 2), tl.load(item + 4), tl.load(item + 5)
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    at = (tl.load(item + 1) + row) * tl.load(line + 6) + tl.load(item + 3)
    here = row < tl.where(tl.load(line) == 0, 0, rows)
    x_at, g_at = tl.load(line).to(tl.pointer_type(P)) + at, tl.load(line + 1).to(tl.pointer_type(P)) + at
    m_at, v_at = tl.load(line + 2).to(tl.pointer_type(P)) + at, tl.load(line + 3).to(tl.pointer_type(P)) + at
    y_at = tl.load(line + 5).to(tl.pointer_type(P)) + at
    group = settings + tl.load(line + 7) * 4
    first, second, third = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    grown, scale, shift = first, first, first * 0.0
    if ADAM:
        counted = tl.load(line + 4)
        step = tl.load(counted.to(tl.pointer_type(tl.float32)), mask=counted != 0, other=1.0).to(tl.float64)
        share = (1.0 - tl.exp(step * tl.log(first))) / (1.0 - first)
        grown = 1.0 / (1.0 - first)
        scale, shift = share / tl.sqrt(1.0 - tl.exp(step * tl.log(second))), share * third
    zero = tl.zeros([ROWS, LANES], dtype=tl.float64)
    xx, qx, qq, gg, gx, gq, bb = zero, zero, zero, zero, zero, zero, zero
    for block in range(0, entries, LANES):
        lanes = block + tl.arange(0, LANES)[None, :]
        mask = (lanes < entries) & here
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
    to = out + (place + tl.arange(0, ROWS)) * 7
    there = tl.arange(0, ROWS) < rows
    tl.store(to, tl.sum(xx, axis=1), mask=there)
    tl.store(to + 1, tl.sum(qx, axis=1), mask=there)
    tl.store(to + 2, tl.sum(qq, axis=1), mask=there)
    tl.store(to + 3, tl.sum(gg, axis=1), mask=there)
    tl.store(to + 4, tl.sum(gx, axis=1), mask=there)
    tl.store(to + 5, tl.sum(gq, axis=1), mask=there)
    tl.store(to + 6, tl.sum(bb, axis=1), mask=there)


@triton.jit
def _ordered(bits, BITS: tl.constexpr):
    """Integers in the order of the numbers that have these bits; its own inverse."""
    size = ~((bits * 0 + 1) << (BITS - 1))  # all bits but the sign
    return bits ^ ((bits >> (BITS - 1)) & size)


@triton.jit
def _keys(values, block, count, BITS: tl.constexpr, LENGTH: tl.constexpr):
    """Numbers from `block` on, +∞ beyond the last, as integers in the same order."""
    lane = block + tl.arange(0, LENGTH)
    value = tl.load(values + lane, mask=lane < count, other=float("inf"))
    return _ordered(value.to(tl.int32 if BITS == 32 else tl.int64, bitcast=True), BITS)


@triton.jit
def _quantile(values, count, place, share, BITS: tl.constexpr, KIND: tl.constexpr, LENGTH: tl.constexpr, found):
    """The value at `place` in the order, whose key is `found`, and a share of the way to the next."""
    upto = tl.zeros([LENGTH], dtype=tl.int32)
    above = tl.zeros([LENGTH], dtype=found.dtype) + ((found * 0 - 1) ^ ((found * 0 + 1) << (BITS - 1)))  # the largest
    for block in range(0, count, LENGTH):
        key = _keys(values, block, count, BITS, LENGTH)
        upto += (key <= found).to(tl.int32)
        above = tl.minimum(above, tl.where(key > found, key, above))
    following = tl.where((tl.sum(upto, axis=0) > place + 1) | (place + 1 >= count), found, tl.min(above, axis=0))
    low = _ordered(found, BITS).to(KIND, bitcast=True)
    high = _ordered(following, BITS).to(KIND, bitcast=True)
    return tl.where((share == 0) | (low == high), low, low + (high - low) * share)


@triton.jit
def statistics_kernel(
    values, spans, shares, out, rows, groups, BITS: tl.constexpr, KIND: tl.constexpr, LENGTH: tl.constexpr
):
    """Minimum, three quantiles, maximum and mean of one group in one line of `values`, (lines, rows).

    The value at a place in the order is found bit by bit, from the number of values below, so that nothing is sorted,
    padded or written on the way. Groups of more than LENGTH rows are read in blocks.

    `spans` has six int32 for each group: its first row, how many there are, its place in `out`, and the places of the
    quantiles in the order; `shares` has three numbers, how far each quantile is from there to the next.
    """
    line = tl.program_id(0).to(tl.int64)
    span, share = spans + tl.program_id(1) * 6, shares + tl.program_id(1) * 3
    count, group = tl.load(span + 1), tl.load(span + 2)
    values += line * rows + tl.load(span)
    total = tl.zeros([LENGTH], dtype=KIND)
    least, most = total + float("inf"), total + float("-inf")
    for block in range(0, count, LENGTH):
        lane = block + tl.arange(0, LENGTH)
        value = tl.load(values + lane, mask=lane < count, other=0.0)
        total += value
        least = tl.minimum(least, tl.where(lane < count, value, float("inf")))
        most = tl.maximum(most, tl.where(lane < count, value, float("-inf")))
    mean = tl.sum(total, axis=0) / count.to(KIND)
    wrong = mean != mean
    to = out + (line * groups + group) * 6
    tl.store(to, tl.where(wrong, mean, tl.min(least, axis=0)))
    tl.store(to + 4, tl.where(wrong, mean, tl.max(most, axis=0)))
    tl.store(to + 5, mean)
    place0, place1, place2 = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5)
    one = place0.to(tl.int32 if BITS == 32 else tl.int64) * 0 + 1
    sign = one << (BITS - 1)
    found0, found1, found2 = one * 0, one * 0, one * 0
    for k in range(BITS):
        bit = one << (BITS - 1 - k)
        zero = tl.zeros([LENGTH], dtype=tl.int32)
        below0, below1, below2 = zero, zero, zero
        for block in range(0, count, LENGTH):
            key = _keys(values, block, count, BITS, LENGTH)
            below0 += (key < ((found0 | bit) ^ sign)).to(tl.int32)
            below1 += (key < ((found1 | bit) ^ sign)).to(tl.int32)
            below2 += (key < ((found2 | bit) ^ sign)).to(tl.int32)
        found0 = tl.where(tl.sum(below0, axis=0) <= place0, found0 | bit, found0)
        found1 = tl.where(tl.sum(below1, axis=0) <= place1, found1 | bit, found1)
        found2 = tl.where(tl.sum(below2, axis=0) <= place2, found2 | bit, found2)
    quantile = _quantile(values, count, place0, tl.load(share).to(KIND), BITS, KIND, LENGTH, found0 ^ sign)
    tl.store(to + 1, tl.where(wrong, mean, quantile))
    quantile = _quantile(values, count, place1, tl.load(share + 1).to(KIND), BITS, KIND, LENGTH, found1 ^ sign)
    tl.store(to + 2, tl.where(wrong, mean, quantile))
    quantile = _quantile(values, count, place2, tl.load(share + 2).to(KIND), BITS, KIND, LENGTH, found2 ^ sign)
    tl.store(to + 3, tl.where(wrong, mean, quantile))

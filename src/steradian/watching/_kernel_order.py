"""Statistics of groups of rows on a GPU: one launch for all steps, quantities and groups of about one length.

A program takes one group in one step. What lies at a place in the order of its numbers is found bit by bit, from the
number of those below, so that nothing is sorted, padded or written on the way.
"""

import triton
import triton.language as tl

__all__ = ["statistics_kernel"]


@triton.jit
def _ordered(bits, BITS: tl.constexpr):
    """Integers in the order of the numbers that have these bits; its own inverse."""
    size = ~((bits * 0 + 1) << (BITS - 1))  # all bits but the sign
    return bits ^ ((bits >> (BITS - 1)) & size)


@triton.jit
def _quantile(key, place, share, BITS: tl.constexpr, KIND: tl.constexpr):
    """What lies at `place` in the order and a share of the way to the next; infinities that are alike have none."""
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

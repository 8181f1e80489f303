"""Triton kernels of 3 × 3 convolutions with few channels, for many members in one launch.

Activations lie as (member, image, row, column, channel), weights as (member, filter, tap, channel). A program takes one
member and some pixels. Taps are numbered row by row; padding is 1, and what lies outside is 0. Where a pixel's taps lie
is one number per tap, whatever the pixel, and which of them lie inside is a bit per tap: loads cost few instructions,
which are what bounds these kernels.
"""

import triton
import triton.language as tl

__all__ = ["convolve_kernel", "weight_gradient_kernel"]


@triton.jit
def _bits(rows_0, rows_1, rows_2, columns_0, columns_1, columns_2):
    """Bit 3·i + j of each pixel: row i and column j of its taps lie inside."""
    rows = rows_0.to(tl.int32) * 0b111 + rows_1.to(tl.int32) * 0b111000 + rows_2.to(tl.int32) * 0b111000000
    columns = columns_0.to(tl.int32) * 0b1001001 + columns_1.to(tl.int32) * 0b10010010
    return rows & (columns + columns_2.to(tl.int32) * 0b100100100)


@triton.jit
def _around(image, row, column, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Pixel of the middle tap, and which taps lie inside, for a convolution's output pixels."""
    i, j = row * STRIDE, column * STRIDE
    inside = _bits(i > 0, i >= 0, i + 1 < HEIGHT, j > 0, j >= 0, j + 1 < WIDTH)
    return (image * HEIGHT + i) * WIDTH + j, tl.where(there, inside, 0)


@triton.jit
def _behind(image, row, column, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The same for the input pixels of a convolution with stride 2: output pixels that see this one through a tap."""
    i, j = row >> 1, column >> 1
    odd_row, odd_column = (row & 1) == 1, (column & 1) == 1
    inside = _bits(
        odd_row & (i + 1 < HEIGHT), odd_row == 0, odd_row, odd_column & (j + 1 < WIDTH), odd_column == 0, odd_column
    )
    return (image * HEIGHT + i) * WIDTH + j, tl.where(there, inside, 0)


@triton.jit
def convolve_kernel(
    x, weight, y, sums, images, members,
    CI: tl.constexpr, CO: tl.constexpr, KI: tl.constexpr, HI: tl.constexpr, WI: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x ∗ weight, and the sums of y and y² over this program's pixels; with BACK x is dy and y is dx."""
    part, member = tl.program_id(0), tl.program_id(1)
    filters, place = tl.arange(0, CO), tl.arange(0, TAPS * KI)
    channel = place % KI
    first = tl.zeros([BLOCK, CO], tl.float32)
    second = tl.zeros([BLOCK, CO], tl.float32)
    for k in range(TILES):
        pixel = (part * TILES + k) * BLOCK + tl.arange(0, BLOCK)
        there = pixel < images * HO * WO
        image, row, column = pixel // (HO * WO), pixel // WO % HO, pixel % WO
        if BACK and STRIDE == 2:
            middle, inside = _behind(image, row, column, there, HI, WI)
        else:
            middle, inside = _around(image, row, column, there, HI, WI, 1 if BACK else STRIDE)
        middle = (member * images * HI * WI + middle) * CI
        total = tl.zeros([BLOCK, CO], tl.float32)
        for group in tl.static_range((9 + TAPS - 1) // TAPS):
            tap = group * TAPS + place // KI
            if BACK and STRIDE == 2:
                far = tl.where(tap < 3, WI, 0) + tl.where(tap % 3 == 0, 1, 0)
            else:
                far = (tap // 3 - 1) * WI + tap % 3 - 1
            seen = ((inside[:, None] >> tap[None, :]) & 1) != 0
            if KI > CI:
                seen = seen & (channel < CI)[None, :]
            at = middle[:, None] + (far * CI + channel)[None, :]
            value = tl.load(x + at, mask=seen, other=0.0)
            if BACK:
                turned = tap if STRIDE == 2 else 8 - tap
                of = ((member * CI + channel) * 9 + turned)[:, None] * CO + filters[None, :]
            else:
                of = ((member * CO + filters)[None, :] * 9 + tap[:, None]) * CI + channel[:, None]
            taps = tl.load(weight + of, mask=((tap < 9) & (channel < CI))[:, None], other=0.0)
            total = tl.dot(value, taps.to(x.dtype.element_ty), total, input_precision=PRECISION)
        kept = total.to(y.dtype.element_ty)
        to = ((member * images * HO * WO + pixel) * CO)[:, None] + filters[None, :]
        tl.store(y + to, kept, mask=there[:, None])
        if SUMS:
            told = kept.to(tl.float32)
            first += told
            second += told * told
    if SUMS:
        to = (part * 2 * members + member) * CO + filters
        tl.store(sums + to, tl.sum(first, axis=0))
        tl.store(sums + to + members * CO, tl.sum(second, axis=0))


@triton.jit
def weight_gradient_kernel(
    x, dy, out, images, members,
    CI: tl.constexpr, CO: tl.constexpr, KI: tl.constexpr, HI: tl.constexpr, WI: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient to `TAPS` taps of the weight, over this program's pixels."""
    part, member = tl.program_id(0), tl.program_id(1)
    filters, place = tl.arange(0, CO), tl.arange(0, TAPS * KI)
    tap, channel = tl.program_id(2) * TAPS + place // KI, place % KI
    far = ((tap // 3 - 1) * WI + tap % 3 - 1) * CI + channel
    total = tl.zeros([CO, TAPS * KI], tl.float32)
    for k in range(TILES):
        pixel = (part * TILES + k) * BLOCK + tl.arange(0, BLOCK)
        there = pixel < images * HO * WO
        image, row, column = pixel // (HO * WO), pixel // WO % HO, pixel % WO
        middle, inside = _around(image, row, column, there, HI, WI, STRIDE)
        at = ((member * images * HO * WO + pixel) * CO)[:, None] + filters[None, :]
        back = tl.load(dy + at, mask=there[:, None], other=0.0)
        seen = ((inside[:, None] >> tap[None, :]) & 1) != 0
        if KI > CI:
            seen = seen & (channel < CI)[None, :]
        middle = (member * images * HI * WI + middle) * CI
        value = tl.load(x + middle[:, None] + far[None, :], mask=seen, other=0.0)
        total = tl.dot(tl.trans(back), value, total, input_precision=PRECISION)
    to = ((part * members + member) * CO + filters)[:, None] * 9 * CI + (tap * CI + channel)[None, :]
    tl.store(out + to, total, mask=((tap < 9) & (channel < CI))[None, :])

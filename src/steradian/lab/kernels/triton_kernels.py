"""Triton kernels of 3 × 3 convolutions with few channels.

Activations are (image, row, column, channel) in memory, weights (filter, tap, channel). A program takes some pixels.
Taps are numbered row by row, and the padding of 1 is 0. A tap has the same offset for every pixel, and one bit for each
pixel and tap says whether it is inside the image, so that loads cost few instructions, which bound these kernels.
"""

import triton
import triton.language as tl

__all__ = ["convolve_kernel", "rolling_kernel", "weight_gradient_kernel"]


@triton.jit
def _bits(rows_0, rows_1, rows_2, columns_0, columns_1, columns_2):
    """Bit 3·i + j of each pixel: the tap in row i and column j is inside."""
    rows = rows_0.to(tl.int32) * 0b111 + rows_1.to(tl.int32) * 0b111000 + rows_2.to(tl.int32) * 0b111000000
    columns = columns_0.to(tl.int32) * 0b1001001 + columns_1.to(tl.int32) * 0b10010010
    return rows & (columns + columns_2.to(tl.int32) * 0b100100100)


@triton.jit
def _around(image, row, column, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """For output pixels: the input pixel of the middle tap, and which taps are inside."""
    i, j = row * STRIDE, column * STRIDE
    inside = _bits(i > 0, i >= 0, i + 1 < HEIGHT, j > 0, j >= 0, j + 1 < WIDTH)
    return (image * HEIGHT + i) * WIDTH + j, tl.where(there, inside, 0)


@triton.jit
def _behind(image, row, column, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The same for input pixels of a convolution with stride 2: the output pixels that read them through each tap."""
    i, j = row >> 1, column >> 1
    odd_row, odd_column = (row & 1) == 1, (column & 1) == 1
    inside = _bits(
        odd_row & (i + 1 < HEIGHT), odd_row == 0, odd_row, odd_column & (j + 1 < WIDTH), odd_column == 0, odd_column
    )
    return (image * HEIGHT + i) * WIDTH + j, tl.where(there, inside, 0)


@triton.jit
def _tap(
    weight, channel, filters, tap: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One tap of every filter; with BACK filters and channels are exchanged, and with stride 1 the taps reversed."""
    if BACK:
        turned: tl.constexpr = tap if STRIDE == 2 else 8 - tap
        of = (channel * 9 + turned)[:, None] * CO + filters[None, :]
    else:
        of = (filters[None, :] * 9 + tap) * CI + channel[:, None]
    return tl.load(weight + of, mask=(channel < CI)[:, None], other=0.0).to(KIND)


@triton.jit
def convolve_kernel(
    x, weight, y, sums, images,
    CI: tl.constexpr, CO: tl.constexpr, KI: tl.constexpr, HI: tl.constexpr, WI: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x ∗ weight, and the sums of y and y² over this program's pixels; with BACK x is dy and y is dx."""
    part = tl.program_id(0)
    filters, channel = tl.arange(0, CO), tl.arange(0, KI)
    kind: tl.constexpr = x.dtype.element_ty
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
        at = (middle * CI)[:, None] + channel[None, :]
        total = tl.zeros([BLOCK, CO], tl.float32)
        for tap in tl.static_range(9):
            if BACK and STRIDE == 2:
                far = (WI if tap < 3 else 0) + (1 if tap % 3 == 0 else 0)
            else:
                far = (tap // 3 - 1) * WI + tap % 3 - 1
            mask = (((inside >> tap) & 1) != 0)[:, None]
            if KI > CI:
                mask = mask & (channel < CI)[None, :]
            value = tl.load(x + at + far * CI, mask=mask, other=0.0)
            taps = _tap(weight, channel, filters, tap, CI, CO, STRIDE, BACK, kind)
            total = tl.dot(value, taps, total, input_precision=PRECISION)
        kept = total.to(y.dtype.element_ty)
        to = (pixel * CO)[:, None] + filters[None, :]
        tl.store(y + to, kept, mask=there[:, None])
        if SUMS:
            stored = kept.to(tl.float32)
            first += stored
            second += stored * stored
    if SUMS:
        to = part * 2 * CO + filters
        tl.store(sums + to, tl.sum(first, axis=0))
        tl.store(sums + to + CO, tl.sum(second, axis=0))


@triton.jit
def rolling_kernel(
    x, weight, y, sums, images,
    CI: tl.constexpr, CO: tl.constexpr, KI: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BACK: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with stride 1, row after row: a loaded row serves the row above, itself and the row below.

    Three loads for each row instead of nine, and the weights are loaded once for all rows.
    """
    part, strip = tl.program_id(0), tl.program_id(1)
    channel, filters = tl.arange(0, KI), tl.arange(0, CO)
    kind: tl.constexpr = x.dtype.element_ty
    w0 = _tap(weight, channel, filters, 0, CI, CO, 1, BACK, kind)
    w1 = _tap(weight, channel, filters, 1, CI, CO, 1, BACK, kind)
    w2 = _tap(weight, channel, filters, 2, CI, CO, 1, BACK, kind)
    w3 = _tap(weight, channel, filters, 3, CI, CO, 1, BACK, kind)
    w4 = _tap(weight, channel, filters, 4, CI, CO, 1, BACK, kind)
    w5 = _tap(weight, channel, filters, 5, CI, CO, 1, BACK, kind)
    w6 = _tap(weight, channel, filters, 6, CI, CO, 1, BACK, kind)
    w7 = _tap(weight, channel, filters, 7, CI, CO, 1, BACK, kind)
    w8 = _tap(weight, channel, filters, 8, CI, CO, 1, BACK, kind)
    place = part * BLOCK + tl.arange(0, BLOCK)
    image, column = place // WIDTH, place % WIDTH
    there, real = image < images, (channel < CI)[None, :]
    left, right = there & (column > 0), there & (column < WIDTH - 1)
    middle = image * (HEIGHT * WIDTH) + column
    at = (middle * CI)[:, None] + channel[None, :]
    to = (middle * CO)[:, None] + filters[None, :]
    first = tl.zeros([BLOCK, CO], tl.float32)
    second = tl.zeros([BLOCK, CO], tl.float32)
    above = tl.zeros([BLOCK, CO], tl.float32)
    here = tl.zeros([BLOCK, CO], tl.float32)
    for k in range(ROWS + 2):
        row = strip * ROWS - 1 + k
        rows = tl.full([BLOCK], 0, tl.int32) + row  # Triton's interpreter takes no scalar condition as a mask
        inside = (rows >= 0) & (rows < HEIGHT)
        line = x + row * (WIDTH * CI)
        a = tl.load(line + at - CI, mask=(left & inside)[:, None] & real, other=0.0)
        b = tl.load(line + at, mask=(there & inside)[:, None] & real, other=0.0)
        c = tl.load(line + at + CI, mask=(right & inside)[:, None] & real, other=0.0)
        below = tl.zeros([BLOCK, CO], tl.float32)
        above = tl.dot(a, w6, above, input_precision=PRECISION)
        here = tl.dot(a, w3, here, input_precision=PRECISION)
        below = tl.dot(a, w0, below, input_precision=PRECISION)
        above = tl.dot(b, w7, above, input_precision=PRECISION)
        here = tl.dot(b, w4, here, input_precision=PRECISION)
        below = tl.dot(b, w1, below, input_precision=PRECISION)
        above = tl.dot(c, w8, above, input_precision=PRECISION)
        here = tl.dot(c, w5, here, input_precision=PRECISION)
        below = tl.dot(c, w2, below, input_precision=PRECISION)
        # The row above has met all rows around it. The first two of a strip belong to the strip before.
        done = there & (rows > strip * ROWS) & (rows <= HEIGHT)
        kept = above.to(y.dtype.element_ty)
        tl.store(y + (row - 1) * (WIDTH * CO) + to, kept, mask=done[:, None])
        if SUMS:
            stored = tl.where(done[:, None], kept.to(tl.float32), 0.0)
            first += stored
            second += stored * stored
        above = here
        here = below
    if SUMS:
        to = (part * tl.num_programs(1) + strip) * 2 * CO + filters
        tl.store(sums + to, tl.sum(first, axis=0))
        tl.store(sums + to + CO, tl.sum(second, axis=0))


@triton.jit
def weight_gradient_kernel(
    x, dy, out, images,
    CI: tl.constexpr, CO: tl.constexpr, KI: tl.constexpr, HI: tl.constexpr, WI: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient to the weight over this program's pixels, of DOWN rows and ACROSS columns of taps.

    A pixel is a row of x and a column of y. Rows of taps move dy, columns x: three loads of each for nine products.
    """
    part = tl.program_id(0)
    of_rows, of_columns = tl.arange(0, DOWN * CO), tl.arange(0, ACROSS * KI)
    groups: tl.constexpr = 3 if ACROSS == 1 else 1
    down = tl.program_id(1) // groups * DOWN + of_rows // CO
    across = tl.program_id(1) % groups * ACROSS + of_columns // KI
    filters, channel = of_rows % CO, of_columns % KI
    total = tl.zeros([DOWN * CO, ACROSS * KI], tl.float32)
    for k in range(TILES):
        place = (part * TILES + k) * BLOCK + tl.arange(0, BLOCK)
        image, row, column = place // (HI * WO), place // WO % HI, place % WO
        if STRIDE == 1:
            rows = (row + 1 < HI).to(tl.int32) + 0b010 + (row > 0).to(tl.int32) * 0b100
            behind, far = (image * HO + row) * WO + column, (1 - down) * WO
        else:
            odd = row & 1
            rows = (odd & (row + 1 < HI).to(tl.int32)) + (1 - odd) * 0b010 + odd * 0b100
            behind, far = (image * HO + (row >> 1)) * WO + column, tl.where(down == 0, WO, 0)
        columns = (column > 0).to(tl.int32) + 0b010 + (column * STRIDE + 1 < WI).to(tl.int32) * 0b100
        rows, columns = tl.where(image < images, rows, 0), tl.where(image < images, columns, 0)
        behind = behind * CO
        mask = ((rows[:, None] >> down[None, :]) & 1) != 0
        back = tl.load(dy + behind[:, None] + (far * CO + filters)[None, :], mask=mask, other=0.0)
        at = ((image * HI + row) * WI + column * STRIDE) * CI
        mask = ((columns[:, None] >> across[None, :]) & 1) != 0
        if KI > CI:
            mask = mask & (channel < CI)[None, :]
        value = tl.load(x + at[:, None] + ((across - 1) * CI + channel)[None, :], mask=mask, other=0.0)
        total = tl.dot(tl.trans(back), value, total, input_precision=PRECISION)
    to = ((part * CO + filters) * 9 + down * 3)[:, None] * CI + (across * CI + channel)[None, :]
    tl.store(out + to, total, mask=(down < 3)[:, None] & ((across < 3) & (channel < CI))[None, :])

"""Gluon kernel for Hopper GPUs: 3 × 3 convolutions with many channels, images 16 × 16 to 4 × 4, and gradients to x.

The product is taken transposed, yᵀ = W xᵀ: of each wgmma the filters are the rows and the pixels the columns. Pixels
lie in shared memory as (row, column, images): eight images fill one pattern of the swizzle, 1,024 bytes, so that every
tap lies whole patterns away. What lies outside of an image, and images after the last, are 0, from the copy engine.

A tile of y is 128 filters of two rows of IMAGES images; two warp groups take 64 filters each, with one accumulator per
row. For each block of 64 channels four rows of x pass through one ring, and nine taps of the weight through another,
each filled by a warp of its own. After the rows of x of a tile, four slots of the ring of rows are handed over empty:
rows of y leave through them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["convolve_blocks"]

CHANNELS = gl.constexpr(64)
GROUPS = gl.constexpr(2)
FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


@gluon.jit
def _barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """A barrier per slot, which COUNT arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=COUNT)
    return barriers


@gluon.jit
def _wait_full(full, at, SLOTS: gl.constexpr):
    """Wait until the ring's element `at` is there."""
    mbarrier.wait(full.index(at % SLOTS), at // SLOTS & 1)


@gluon.jit
def _wait_empty(empty, at, SLOTS: gl.constexpr):
    """Wait until the slot of the ring's element `at` is free."""
    mbarrier.wait(empty.index(at % SLOTS), (at // SLOTS + 1) & 1)


@gluon.jit
def _pixels(rows, at, across: gl.constexpr, SIZE: gl.constexpr, IMAGES: gl.constexpr, SLOTS: gl.constexpr):
    """SIZE columns of the ring's row `at`, from this one on, as (pixel, channel)."""
    pitch: gl.constexpr = (SIZE + 2) * IMAGES // 8
    start = rows.index(at % SLOTS * pitch + across * (IMAGES // 8))
    return start._reinterpret(gl.bfloat16, [SIZE * IMAGES, CHANNELS], FLAT)


@gluon.jit
def _load_rows(
    x, edge, rows, full, empty, first, count, blocks,
    SIZE: gl.constexpr, IMAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Fill the ring of rows: columns −1 to SIZE of four rows for each block, then four slots for y, for each tile."""
    pitch: gl.constexpr = (SIZE + 2) * IMAGES // 8
    at = 0
    for t in range(first, first + count):
        top = t % (SIZE // 2) * 2
        image = t // (SIZE // 2) * IMAGES
        for block in range(blocks):
            for r in range(4):
                _wait_empty(empty, at, SLOTS)
                barrier = full.index(at % SLOTS)
                mbarrier.expect(barrier, (SIZE + 2) * IMAGES * CHANNELS * 2)
                start = at % SLOTS * pitch
                body = rows.index(start)._reinterpret(gl.bfloat16, [1, SIZE, IMAGES, CHANNELS], BOX)
                tma.async_copy_global_to_shared(x, [top - 1 + r, -1, image, block * CHANNELS], barrier, body)
                end = rows.index(start + SIZE * (IMAGES // 8))._reinterpret(gl.bfloat16, [1, 2, IMAGES, CHANNELS], BOX)
                tma.async_copy_global_to_shared(edge, [top - 1 + r, SIZE - 1, image, block * CHANNELS], barrier, end)
                at += 1
        for _ in range(2 * GROUPS):
            _wait_empty(empty, at, SLOTS)
            mbarrier.arrive(full.index(at % SLOTS), count=1)
            at += 1


@gluon.jit
def _load_taps(
    weight, taps, full, empty, output, stride, count, blocks, BACK: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Fill the ring of taps: nine for each block, 64 × 64 for each warp group."""
    at = 0
    for _ in range(count):
        for block in range(blocks):
            for tap in range(9):
                _wait_empty(empty, at, SLOTS)
                barrier = full.index(at % SLOTS)
                mbarrier.expect(barrier, GROUPS * CHANNELS * CHANNELS * 2)
                for g in gl.static_range(GROUPS):
                    to = taps.index(at % SLOTS * GROUPS + g)
                    if BACK:
                        where = [block * CHANNELS, (8 - tap) * stride + output + g * CHANNELS]
                    else:
                        where = [output + g * CHANNELS, tap * stride + block * CHANNELS]
                    tma.async_copy_global_to_shared(weight, where, barrier, to)
                at += 1


@gluon.jit
def _multiply(
    G: gl.constexpr, y, sums, rows, row_full, row_empty, taps, tap_full, tap_empty,
    first, count, output, blocks,
    BACK: gl.constexpr, SIZE: gl.constexpr, IMAGES: gl.constexpr, ROW_SLOTS: gl.constexpr, TAP_SLOTS: gl.constexpr,
):  # fmt: skip
    """Add up 64 filters of tile after tile, and store. Taps come through registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE * IMAGES, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros([CHANNELS, SIZE * IMAGES], gl.float32, layout)
    if sums is not None:
        whole = gl.sum(zero, axis=1)
        square = whole
    for t in range(count):
        row_at = t * (4 * blocks + 2 * GROUPS)
        tap_at = t * (9 * blocks)
        upper = gl.zeros([CHANNELS, SIZE * IMAGES], gl.float32, layout)
        lower = gl.zeros([CHANNELS, SIZE * IMAGES], gl.float32, layout)
        for block in range(blocks):
            for tap in gl.static_range(9):
                if tap == 0:
                    _wait_full(row_full, row_at, ROW_SLOTS)
                if tap % 3 == 0:
                    _wait_full(row_full, row_at + (tap // 3 + 1), ROW_SLOTS)
                _wait_full(tap_full, tap_at + tap, TAP_SLOTS)
                left = taps.index((tap_at + tap) % TAP_SLOTS * GROUPS + G)
                if BACK:
                    left = left.permute([1, 0])
                left = left.load(operand)
                above = _pixels(rows, row_at + tap // 3, tap % 3, SIZE, IMAGES, ROW_SLOTS)
                below = _pixels(rows, row_at + (tap // 3 + 1), tap % 3, SIZE, IMAGES, ROW_SLOTS)
                upper = warpgroup_mma(left, above.permute([1, 0]), upper, is_async=True)
                lower = warpgroup_mma(left, below.permute([1, 0]), lower, is_async=True)
                # Only this tap is on its way then: what the one before it alone has read is given back. Registers that
                # are still being read at the end of the loop's body would make the compiler wait after every product.
                upper, lower = warpgroup_mma_wait(0 if tap == 8 else 2, deps=(upper, lower))
                gl.thread_barrier()
                if tap == 0:
                    if block > 0:
                        mbarrier.arrive(tap_empty.index((tap_at - 1) % TAP_SLOTS), count=1)
                        mbarrier.arrive(row_empty.index((row_at - 2) % ROW_SLOTS), count=1)
                        mbarrier.arrive(row_empty.index((row_at - 1) % ROW_SLOTS), count=1)
                else:
                    mbarrier.arrive(tap_empty.index((tap_at + (tap - 1)) % TAP_SLOTS), count=1)
                    if tap % 3 == 0:
                        mbarrier.arrive(row_empty.index((row_at + (tap // 3 - 1)) % ROW_SLOTS), count=1)
            row_at += 4
            tap_at += 9
        upper, lower = warpgroup_mma_wait(0, deps=(upper, lower))
        gl.thread_barrier()
        mbarrier.arrive(tap_empty.index((tap_at - 1) % TAP_SLOTS), count=1)
        mbarrier.arrive(row_empty.index((row_at - 2) % ROW_SLOTS), count=1)
        mbarrier.arrive(row_empty.index((row_at - 1) % ROW_SLOTS), count=1)
        top = (first + t) % (SIZE // 2) * 2
        image = (first + t) // (SIZE // 2) * IMAGES
        high = upper.to(gl.bfloat16)
        low = lower.to(gl.bfloat16)
        _store(y, high, rows, row_full, row_at + G, top, image, output + G * CHANNELS, SIZE, IMAGES, ROW_SLOTS)
        _store(
            y, low, rows, row_full, row_at + (GROUPS + G), top + 1, image, output + G * CHANNELS,
            SIZE, IMAGES, ROW_SLOTS,
        )  # fmt: skip
        if sums is not None:
            high = high.to(gl.float32)
            low = low.to(gl.float32)
            whole += gl.sum(high, axis=1) + gl.sum(low, axis=1)
            square += gl.sum(high * high, axis=1) + gl.sum(low * low, axis=1)
        # The slots through which the other warp group stores: known to be handed over before they are given back.
        _wait_full(row_full, row_at + (1 - G), ROW_SLOTS)
        _wait_full(row_full, row_at + (GROUPS + 1 - G), ROW_SLOTS)
        tma.store_wait(0)
        gl.thread_barrier()
        for k in gl.static_range(2 * GROUPS):
            mbarrier.arrive(row_empty.index((row_at + k) % ROW_SLOTS), count=1)
    if sums is not None:
        outputs = gl.num_programs(1) * (GROUPS * CHANNELS)
        to = sums + gl.program_id(0) * 2 * outputs + output + G * CHANNELS
        to += gl.arange(0, CHANNELS, whole.type.layout)
        gl.store(to, whole)
        gl.store(to + outputs, square)


@gluon.jit
def _store(
    y, kept, rows, full, at, row, image, output, SIZE: gl.constexpr, IMAGES: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Start the store of a row of y by way of the slot of the ring's element `at`."""
    pitch: gl.constexpr = (SIZE + 2) * IMAGES // 8
    _wait_full(full, at, SLOTS)
    _pixels(rows, at, 0, SIZE, IMAGES, SLOTS).store(kept.permute([1, 0]))
    fence_async_shared()
    gl.thread_barrier()
    body = rows.index(at % SLOTS * pitch)._reinterpret(gl.bfloat16, [1, SIZE, IMAGES, CHANNELS], BOX)
    tma.async_copy_shared_to_global(y, [row, 0, image, output], body)


@gluon.jit(do_not_specialize=["each", "tiles", "blocks"])
def convolve_blocks(
    x, edge, weight, y, sums, each, tiles, blocks, stride,
    BACK: gl.constexpr, SIZE: gl.constexpr, IMAGES: gl.constexpr, ROW_SLOTS: gl.constexpr, TAP_SLOTS: gl.constexpr,
):  # fmt: skip
    """y = x ∗ weight, and a part of the sums of y and y² unless `sums` is None; with BACK x is dy and y is dx.

    `x`, `edge` and `y` are described as (row, column, image, channel), with boxes of one row and SIZE, 2 and SIZE
    columns of IMAGES images, 64 channels, `weight` as (filter, tap · channel), with a box of 64 × 64; `stride` is the
    number of channels in it. The grid is (parts, 128s of channels of y). A part takes `each` of the `tiles` tiles;
    `blocks` is how many times 64 channels x has.
    """
    rows = gl.allocate_shared_memory(gl.bfloat16, [ROW_SLOTS * (SIZE + 2) * IMAGES // 8, 8, CHANNELS], FLAT)
    taps = gl.allocate_shared_memory(gl.bfloat16, [TAP_SLOTS * GROUPS, CHANNELS, CHANNELS], FLAT)
    row_full = _barriers(ROW_SLOTS, 1)
    row_empty = _barriers(ROW_SLOTS, GROUPS)
    tap_full = _barriers(TAP_SLOTS, 1)
    tap_empty = _barriers(TAP_SLOTS, GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    first = gl.program_id(0) * each
    count = gl.minimum(each, tiles - first)
    output = gl.program_id(1) * (GROUPS * CHANNELS)
    gl.warp_specialize(
        [
            (
                _multiply,
                (gl.constexpr(0), y, sums, rows, row_full, row_empty, taps, tap_full, tap_empty,
                 first, count, output, blocks, BACK, SIZE, IMAGES, ROW_SLOTS, TAP_SLOTS),
            ),
            (
                _multiply,
                (gl.constexpr(1), y, sums, rows, row_full, row_empty, taps, tap_full, tap_empty,
                 first, count, output, blocks, BACK, SIZE, IMAGES, ROW_SLOTS, TAP_SLOTS),
            ),
            (
                _load_rows,
                (x, edge, rows, row_full, row_empty, first, count, blocks, SIZE, IMAGES, ROW_SLOTS),
            ),
            (
                _load_taps,
                (weight, taps, tap_full, tap_empty, output, stride, count, blocks, BACK, TAP_SLOTS),
            ),
        ],
        [4, 1, 1],
        [232, 24, 24],
    )  # fmt: skip

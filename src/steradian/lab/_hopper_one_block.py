"""Gluon kernel for Hopper GPUs: 3 × 3 convolutions of 64 channels with 64 filters, images 32 × 32, and gradients to x.

The product is taken transposed, yᵀ = W xᵀ: of each wgmma the filters are the rows and the pixels the columns. Pixels
lie in shared memory as (row, column, eight images): the eight images fill one pattern of the swizzle, 1,024 bytes, so
that every tap lies whole patterns away, and each row is loaded once instead of once per column of taps. What lies
outside of an image is 0, from the copy engine.

A program takes eight images and ROWS rows of y. The ROWS + 2 rows of x around them pass through a ring of four slots,
row r (row `top` − 1 + r of the image) through slot r % 4. Row i of y needs rows i to i + 2; the slot of row i, free
then, holds row i of y on its way out, and row i + 4 of x after that. Two warp groups take the rows of y by turns: one
rounds and stores while the other multiplies.
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

__all__ = ["convolve_one_block"]

CHANNELS = gl.constexpr(64)
SIZE = gl.constexpr(32)
IMAGES = gl.constexpr(8)
COLUMNS = gl.constexpr(34)
SLOTS = gl.constexpr(4)
PIXELS = gl.constexpr(256)
FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
ROW_BYTES = gl.constexpr(34 * 8 * 64 * 2)
TAP_BYTES = gl.constexpr(64 * 64 * 2)


@gluon.jit
def _zero():
    """A zero that the compiler does not know: else it keeps the addresses of all rows in registers at once."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _slot():
    return gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, IMAGES, CHANNELS], FLAT)


@gluon.jit
def _barrier():
    """A barrier that one arrival completes."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _pixels(slot, column):
    """32 columns of a slot, from this one on, as (pixel, channel)."""
    return slot.index(column)._reinterpret(gl.bfloat16, [PIXELS, CHANNELS], FLAT)


@gluon.jit
def _load_row(x, edge, slot, barrier, row, image, BYTES: gl.constexpr):
    """Start the load of columns −1 to 32 of a row; BYTES is all that the barrier waits for."""
    mbarrier.expect(barrier, BYTES)
    body = slot.index(0)._reinterpret(gl.bfloat16, [1, 32, IMAGES, CHANNELS], BOX)
    tma.async_copy_global_to_shared(x, [row, -1, image, 0], barrier, body)
    end = slot.index(32)._reinterpret(gl.bfloat16, [1, 2, IMAGES, CHANNELS], BOX)
    tma.async_copy_global_to_shared(edge, [row, 31, image, 0], barrier, end)


@gluon.jit
def _load_taps(weight, taps, barrier, first: gl.constexpr):
    """Start the load of a row of taps."""
    for tap in gl.static_range(first, first + 3):
        tma.async_copy_global_to_shared(weight, [0, tap * CHANNELS], barrier, taps.index(tap))


@gluon.jit
def _start(x, edge, weight, ring, taps, barriers, top, image, BACK: gl.constexpr):
    """Start the first loads in the order of their use: three rows, each with the row of taps that meets it first."""
    fence_async_shared()
    gl.thread_barrier()
    for r in gl.static_range(3):
        _load_row(x, edge, ring[r], barriers[r], top + (r - 1), image, ROW_BYTES + 3 * TAP_BYTES)
        _load_taps(weight, taps, barriers[r], 3 * (2 - r if BACK else r))
    _load_row(x, edge, ring[3], barriers[3], top + 2, image, ROW_BYTES)


@gluon.jit
def _products(ring, taps, barriers, total, i: gl.constexpr, BACK: gl.constexpr):
    """Issue the nine taps of row i of y; they are on their way when this returns."""
    zero = _zero()
    for down in gl.static_range(3):
        mbarrier.wait(barriers[(i + down) % SLOTS], (i + down) // SLOTS % 2)
        for across in gl.static_range(3):
            value = _pixels(ring[(i + down) % SLOTS], zero + across).permute([1, 0])
            if BACK:
                tap = taps.index(zero + (8 - down * 3 - across)).permute([1, 0])
            else:
                tap = taps.index(zero + (down * 3 + across))
            total = warpgroup_mma(tap, value, total, use_acc=down + across > 0, is_async=True)
    return total


@gluon.jit
def _finish(x, edge, y, ring, barriers, total, i: gl.constexpr, top, image, ROWS: gl.constexpr):
    """Round row i of y, store it by way of the slot of row i of x, and fill that again; returns the rounded row.

    All warps that read the slot must have passed their wait before.
    """
    kept = total.to(gl.bfloat16)
    slot = ring[i % SLOTS]
    gl.thread_barrier()
    _pixels(slot, 0).store(kept.permute([1, 0]))
    fence_async_shared()
    gl.thread_barrier()
    row = slot.index(0)._reinterpret(gl.bfloat16, [1, 32, IMAGES, CHANNELS], BOX)
    tma.async_copy_shared_to_global(y, [top + i, 0, image, 0], row)
    if i + SLOTS < ROWS + 2:
        tma.store_wait(0)
        _load_row(x, edge, slot, barriers[i % SLOTS], top + (i + SLOTS - 1), image, ROW_BYTES)
    return kept


@gluon.jit
def _every_other_row(
    x, edge, y, sums, ring, taps, barriers, turns, top, image, part,
    WHO: gl.constexpr, BACK: gl.constexpr, SUMS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Rows WHO, WHO + 2, … of y. The turn passes on when only the last tap is on its way.

    That one reads no slot into which the other warp group stores next.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    zero = gl.zeros([CHANNELS, PIXELS], gl.float32, layout)
    if SUMS:
        first = gl.sum(zero, axis=1)
        second = first
    for k in gl.static_range(ROWS // 2):
        if 2 * k + WHO > 0:
            mbarrier.wait(turns[1 - WHO], (k + WHO + 1) % 2)
        total = _products(ring, taps, barriers, zero, 2 * k + WHO, BACK)
        total = warpgroup_mma_wait(1, deps=[total])
        if 2 * k + WHO < ROWS - 1:
            gl.thread_barrier()
            mbarrier.arrive(turns[WHO], count=1)
        total = warpgroup_mma_wait(0, deps=[total])
        kept = _finish(x, edge, y, ring, barriers, total, 2 * k + WHO, top, image, ROWS)
        if SUMS:
            told = kept.to(gl.float32)
            first += gl.sum(told, axis=1)
            second += gl.sum(told * told, axis=1)
    if SUMS:
        to = sums + (part + WHO) * 2 * CHANNELS + gl.arange(0, CHANNELS, first.type.layout)
        gl.store(to, first)
        gl.store(to + CHANNELS, second)
    tma.store_wait(0)


@gluon.jit
def convolve_one_block(x, edge, weight, y, sums, BACK: gl.constexpr, SUMS: gl.constexpr, ROWS: gl.constexpr):
    """y = x ∗ weight, and two parts of the sums of y and y²; with BACK x is dy and y is dx.

    `x`, `edge` and `y` are described as (row, column, image, channel), with boxes of one row and 32, 2 and 32 columns
    of eight images, `weight` as (filter, tap · channel), with a box for a tap.
    """
    part = gl.program_id(0)
    top = part % (SIZE // ROWS) * ROWS
    image = part // (SIZE // ROWS) * IMAGES
    ring = (_slot(), _slot(), _slot(), _slot())
    taps = gl.allocate_shared_memory(gl.bfloat16, [9, CHANNELS, CHANNELS], FLAT)
    barriers = (_barrier(), _barrier(), _barrier(), _barrier())
    turns = (_barrier(), _barrier())
    _start(x, edge, weight, ring, taps, barriers, top, image, BACK)
    gl.warp_specialize(
        [
            (_every_other_row, (x, edge, y, sums, ring, taps, barriers, turns, top, image, part * 2,
                                gl.constexpr(0), BACK, SUMS, ROWS)),
            (_every_other_row, (x, edge, y, sums, ring, taps, barriers, turns, top, image, part * 2,
                                gl.constexpr(1), BACK, SUMS, ROWS)),
        ],
        [4],
        [240],
    )  # fmt: skip
    # Copies and products use shared memory unseen by what hands it out.
    for k in gl.static_range(4):
        ring[k]._keep_alive()
        barriers[k]._keep_alive()
    turns[0]._keep_alive()
    turns[1]._keep_alive()
    taps._keep_alive()

"""Gluon kernel for Hopper GPUs: gradients to the weights of 3 × 3 convolutions with many channels.

dw[f, i, j, c] = Σ_p dy[p, f] · x[p + (i − 1, j − 1), c] over all pixels p. A program takes 64 filters, 64 channels and
all nine taps over some images. One warp loads tiles; three warp groups, one for each column j of taps, hold three
accumulators each, one for each row i. dy comes through registers, which serve three taps, and x from shared memory.

A pixel is a row of 128 bytes there, so that tap (i, j) begins i · width + j − 1 pixels into the tile: x is loaded once.
Where that leads across the edge of the image to the next row, dy is set to 0 in registers; what it meets there must
be finite, so zeros lie before and after every tile. Rows outside of an image are 0, from the copy engine.
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

__all__ = ["weight_gradient"]

CHANNELS = gl.constexpr(64)
GUARD = gl.constexpr(8)  # pixels of zeros between tiles: one pattern of the swizzle, 1,024 bytes
FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))


@gluon.jit
def _produce(
    dy, x, halo, dy_tiles, x_tiles, full, empty, image, first, channel, stages,
    SIZE: gl.constexpr, ROWS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, IMAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Fill slot after slot: ROWS rows of dy, and these of x with one more above and below, of IMAGES images."""
    tile: gl.constexpr = IMAGES * (UPPER + LOWER) * SIZE
    pitch: gl.constexpr = tile + GUARD
    for t in range(stages):
        slot = t % SLOTS
        n = image + t // (SIZE // ROWS) * IMAGES
        row = t % (SIZE // ROWS) * ROWS
        mbarrier.wait(empty.index(slot), (t // SLOTS + 1) & 1)
        barrier = full.index(slot)
        mbarrier.expect(barrier, 2 * CHANNELS * (IMAGES * ROWS * SIZE + tile))
        to = dy_tiles.index(slot * (IMAGES * ROWS * SIZE // UNIT))
        to = to._reinterpret(gl.bfloat16, [IMAGES, ROWS, SIZE, CHANNELS], BOX)
        tma.async_copy_global_to_shared(dy, [n, row, 0, first], barrier, to)
        at = (GUARD + slot * pitch) // 8
        to = x_tiles.index(at)._reinterpret(gl.bfloat16, [IMAGES, UPPER, SIZE, CHANNELS], BOX)
        tma.async_copy_global_to_shared(x, [n, row - 1, 0, channel], barrier, to)
        if LOWER > 0:
            to = x_tiles.index(at + UPPER * SIZE // 8)._reinterpret(gl.bfloat16, [IMAGES, LOWER, SIZE, CHANNELS], BOX)
            tma.async_copy_global_to_shared(halo, [n, row - 1 + UPPER, 0, channel], barrier, to)


@gluon.jit
def _consume(
    COLUMN: gl.constexpr, dy_tiles, x_tiles, full, empty, out, first, channel, channels, stages,
    SIZE: gl.constexpr, ROWS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, IMAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """The taps of one column: add up over all stages, UNIT pixels at a time, and store."""
    height: gl.constexpr = UPPER + LOWER
    pitch: gl.constexpr = IMAGES * height * SIZE + GUARD
    units: gl.constexpr = ROWS * SIZE // UNIT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    every: gl.constexpr = x_tiles.shape[0] * 8
    pixels = x_tiles._reinterpret(gl.bfloat16, [every, 1, CHANNELS], FLAT)
    column = gl.arange(0, UNIT, gl.SliceLayout(0, operand)) % SIZE
    inside = (column != (0 if COLUMN == 0 else SIZE - 1))[None, :]
    above = gl.zeros([CHANNELS, CHANNELS], gl.float32, layout)
    here = above
    below = above
    for t in range(stages):
        slot = t % SLOTS
        mbarrier.wait(full.index(slot), t // SLOTS & 1)
        for u in gl.static_range(IMAGES * units):
            back = dy_tiles.index(slot * (IMAGES * units) + u).permute((1, 0)).load(operand)
            if COLUMN != 1:
                back = gl.where(inside, back, 0.0)
            at = slot * pitch + (GUARD + COLUMN - 1 + u // units * (height * SIZE) + u % units * UNIT)
            a = pixels.index(at)._reinterpret(gl.bfloat16, [UNIT, CHANNELS], FLAT)
            b = pixels.index(at + SIZE)._reinterpret(gl.bfloat16, [UNIT, CHANNELS], FLAT)
            c = pixels.index(at + 2 * SIZE)._reinterpret(gl.bfloat16, [UNIT, CHANNELS], FLAT)
            above = warpgroup_mma(back, a, above, is_async=True)
            here = warpgroup_mma(back, b, here, is_async=True)
            below = warpgroup_mma(back, c, below, is_async=True)
            # Before a slot is given back, all that read it are waited for.
            above, here, below = warpgroup_mma_wait(3 if u < IMAGES * units - 1 else 0, deps=(above, here, below))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
    rows = first + gl.arange(0, CHANNELS, gl.SliceLayout(1, layout))
    columns = channel + gl.arange(0, CHANNELS, gl.SliceLayout(0, layout))
    to = out + rows[:, None] * (9 * channels) + (COLUMN * channels + columns)[None, :]
    gl.store(to, above)
    gl.store(to + 3 * channels, here)
    gl.store(to + 6 * channels, below)


@gluon.jit(do_not_specialize=["images"])
def weight_gradient(
    dy, x, halo, out, images, filters, channels,
    SIZE: gl.constexpr, ROWS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, IMAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """The gradient to 64 of the filters and 64 of the channels, over `images` images, which are one part of `out`.

    `dy`, `x` and `halo` are described as (image, row, column, channel), with boxes of IMAGES images, 64 channels, and
    ROWS, UPPER and LOWER rows: what x needs of rows more than dy may take a load of its own.
    """
    pitch: gl.constexpr = IMAGES * (UPPER + LOWER) * SIZE + GUARD
    gl.static_assert(UPPER + LOWER >= ROWS + 2)
    gl.static_assert(UNIT % SIZE == 0 and ROWS * SIZE % UNIT == 0 and SIZE % ROWS == 0)
    gl.static_assert(IMAGES == 1 or (SIZE == ROWS and LOWER == 0))
    dy_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * IMAGES * ROWS * SIZE // UNIT, UNIT, CHANNELS], FLAT)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [(SLOTS * pitch + GUARD) // 8, 8, CHANNELS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=3)
    zeros = gl.zeros([8, CHANNELS], gl.bfloat16, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
    for slot in gl.static_range(SLOTS + 1):
        x_tiles.index(slot * (pitch // 8)).store(zeros)
    fence_async_shared()
    gl.thread_barrier()
    first = gl.program_id(0) // (channels // CHANNELS) * CHANNELS
    channel = gl.program_id(0) % (channels // CHANNELS) * CHANNELS
    out += gl.program_id(1) * (filters * 9 * channels)
    stages = images // IMAGES * (SIZE // ROWS)
    image = gl.program_id(1) * images
    gl.warp_specialize(
        [
            (
                _consume,
                (gl.constexpr(0), dy_tiles, x_tiles, full, empty, out, first, channel, channels, stages,
                 SIZE, ROWS, UPPER, LOWER, IMAGES, SLOTS, UNIT),
            ),
            (
                _consume,
                (gl.constexpr(1), dy_tiles, x_tiles, full, empty, out, first, channel, channels, stages,
                 SIZE, ROWS, UPPER, LOWER, IMAGES, SLOTS, UNIT),
            ),
            (
                _consume,
                (gl.constexpr(2), dy_tiles, x_tiles, full, empty, out, first, channel, channels, stages,
                 SIZE, ROWS, UPPER, LOWER, IMAGES, SLOTS, UNIT),
            ),
            (
                _produce,
                (dy, x, halo, dy_tiles, x_tiles, full, empty, image, first, channel, stages,
                 SIZE, ROWS, UPPER, LOWER, IMAGES, SLOTS, UNIT),
            ),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip

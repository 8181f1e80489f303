"""Plans and launches of our convolutions for Hopper GPUs: 3 × 3, bf16, many channels, channels last.

Programs take about half of the chip, since other trainings have work for the rest: a program that has more to do spends
less of its time on beginning and ending. Kernels are imported when they are launched: the language they are written in
is there on a GPU's host alone.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["convolution_parts", "forward", "input_gradient", "weight_gradient", "weight_gradient_parts"]

_PROGRAMS = 32  # for a gradient to weights
_ROWS = 8  # of y, for a program with one block of channels


class _Blocks(NamedTuple):
    """Sizes of a convolution, as `convolve_blocks` has them, and tiles of a program."""

    images: int
    row_slots: int
    tap_slots: int
    each: int


class _Gradient(NamedTuple):
    """Sizes of a gradient to weights, as the kernel `weight_gradient` has them."""

    rows: int
    upper: int
    lower: int
    images: int
    slots: int
    unit: int


# By the height and width of the images.
_BLOCKS = {16: _Blocks(8, 8, 5, 2), 8: _Blocks(16, 6, 6, 1), 4: _Blocks(16, 8, 8, 1)}
_GRADIENTS = {
    32: _Gradient(rows=4, upper=4, lower=2, images=1, slots=5, unit=32),
    16: _Gradient(rows=8, upper=8, lower=2, images=1, slots=6, unit=32),
    8: _Gradient(rows=8, upper=16, lower=0, images=2, slots=4, unit=32),
    4: _Gradient(rows=4, upper=8, lower=0, images=8, slots=4, unit=16),
}


def convolution_parts(x: Tensor, outputs: int) -> int:
    """How many parts of its sums our convolution of x has, with so many channels of y; 0 where there is none for it."""
    batch, inputs, height, width = x.shape
    if height != width:
        return 0
    if (height, inputs, outputs, batch % 8) == (32, 64, 64, 0):
        return batch // 8 * (32 // _ROWS) * 2
    if height not in _BLOCKS or inputs % 64 or outputs % 128:
        return 0
    return -(-_tiles(x) // _BLOCKS[height].each)


def _tiles(x: Tensor) -> int:
    return -(-len(x) // _BLOCKS[x.shape[2]].images) * (x.shape[2] // 2)


def weight_gradient_parts(x: Tensor, filters: int) -> int:
    """How many parts our gradient to the weight of so many filters has; 0 where there is none for it."""
    batch, channels, height, width = x.shape
    plan = _GRADIENTS.get(height)
    if plan is None or width != height or channels % 64 or filters % 64 or batch % plan.images:
        return 0
    most, shares = max(1, _PROGRAMS // (filters // 64 * (channels // 64))), batch // plan.images
    return max(parts for parts in range(1, most + 1) if shares % parts == 0)


# Launches


def _described(x: Tensor, box: list[int], *, by_row: bool) -> "TensorDescriptor":
    """Images as (image, row, column, channel), or as (row, column, image, channel)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    order = (2, 3, 0, 1) if by_row else (0, 2, 3, 1)
    shape, strides = ([of(k) for k in order] for of in (x.size, x.stride))
    return TensorDescriptor(x, shape, strides, box, gl.NVMMASharedLayout(128, 16, 4))


def _launch(x: Tensor, weight: Tensor, y: Tensor, sums: Tensor | None, parts: int) -> None:
    """y = x ∗ weight with its sums; without sums the gradient to x, where x is dy."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from steradian.lab._hopper_blocks import convolve_blocks
    from steradian.lab._hopper_one_block import convolve_one_block

    size, places = x.shape[2], 9 * weight.shape[1]
    plan = _BLOCKS.get(size)
    images = 8 if plan is None else plan.images
    inside, edge, outside = (
        _described(tensor, [1, columns, images, 64], by_row=True) for tensor, columns in ((x, size), (x, 2), (y, size))
    )
    layout = gl.NVMMASharedLayout(128, 16, 2)
    taps = TensorDescriptor(weight, [len(weight), places], [places, 1], [64, 64], layout)
    tensors, how = (inside, edge, taps, outside, sums), {"BACK": sums is None, "num_warps": 4}
    if plan is None:
        how |= {"SUMS": sums is not None, "ROWS": 32 * (len(x) // 8) // (parts // 2), "maxnreg": 240}
        convolve_one_block[(parts // 2,)](*tensors, **how)
        return
    numbers = (-(-_tiles(x) // parts), _tiles(x), x.shape[1] // 64, weight.shape[1])
    how |= {"SIZE": size, "IMAGES": images, "ROW_SLOTS": plan.row_slots, "TAP_SLOTS": plan.tap_slots}
    convolve_blocks[parts, y.shape[1] // 128](*tensors, *numbers, **how)


def _launch_weight_gradient(x: Tensor, dy: Tensor, out: Tensor) -> None:
    from steradian.lab import _hopper_weight_gradient as kernels

    parts, filters, channels, size = len(out), dy.shape[1], x.shape[1], x.shape[2]
    plan = _GRADIENTS[size]
    back, upper, lower = (
        _described(tensor, [plan.images, rows, size, 64], by_row=False)
        for tensor, rows in ((dy, plan.rows), (x, plan.upper), (x, plan.lower or plan.upper))
    )
    how: dict[str, Any] = {name.upper(): value for name, value in plan._asdict().items()}
    kernels.weight_gradient[filters // 64 * (channels // 64), parts](
        back, upper, lower, out, len(x) // parts, filters, channels, SIZE=size, **how, num_warps=4
    )


# As operators that a compiler does not look into. What their results look like follows from their arguments alone: a
# compiler may remember it for longer than the plans above stay as they are.


@torch.library.custom_op("steradian::convolve_wide", mutates_args=())
def forward(x: Tensor, weight: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """x ∗ weight, and the parts of Σy and Σy² over all pixels, (parts, 2, filters)."""
    y, sums = _like_forward(x, weight, parts)
    _launch(x, weight, y, sums, parts)
    return y, sums


@forward.register_fake
def _like_forward(x: Tensor, weight: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    return _like(x, len(weight)), x.new_empty(parts, 2, len(weight), dtype=torch.float32)


@torch.library.custom_op("steradian::convolve_wide_input_gradient", mutates_args=())
def input_gradient(dy: Tensor, weight: Tensor, parts: int) -> Tensor:
    """The gradient to x."""
    dx = _like_input_gradient(dy, weight, parts)
    _launch(dy, weight, dx, None, parts)
    return dx


@input_gradient.register_fake
def _like_input_gradient(dy: Tensor, weight: Tensor, parts: int) -> Tensor:
    return _like(dy, weight.shape[1])


def _like(x: Tensor, channels: int) -> Tensor:
    size = (len(x), channels, *x.shape[2:])
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("steradian::convolve_wide_weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, dy: Tensor, parts: int) -> Tensor:
    """The parts of the gradient to the weight, (parts, filters, 3, 3, channels)."""
    out = _like_weight_gradient(x, dy, parts)
    _launch_weight_gradient(x, dy, out)
    return out


@weight_gradient.register_fake
def _like_weight_gradient(x: Tensor, dy: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, dy.shape[1], 3, 3, x.shape[1], dtype=torch.float32)

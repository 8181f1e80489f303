"""A 3 × 3 convolution with few channels that also adds up what BN needs.

Networks for small images have too few channels for kernels that are made for large ones. Σy and Σy² are added up as y
is stored, so that a normalization behind the convolution need not read it again for its statistics.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from steradian.lab.kernels import triton_kernels

__all__ = ["FILTERS", "by_channel", "convolve"]

FILTERS = (16, 32, 64)
"""Numbers of filters that are supported; of channels, too, if x needs a gradient."""


def convolve(x: Tensor, weight: Tensor, *, stride: int = 1, sums: bool = True) -> tuple[Tensor, Tensor]:
    """y = x ∗ weight with padding 1, channels last in the dtype of x; Σy and Σy², (2, filters) in float32, if wanted.

    x is (batch, channels, height, width), weight (filters, channels, 3, 3); stride 2 needs even height and width.
    """
    assert len(weight) in FILTERS, "the plans are for these"
    last = torch.channels_last
    x, weight = x.contiguous(memory_format=last), weight.contiguous(memory_format=last)
    return _Convolution.apply(x, weight, stride, sums)


class _Convolution(torch.autograd.Function):
    """The convolution with its gradients; partial sums are added up outside of the kernels, by a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, sums: bool) -> tuple[Tensor, Tensor]:
        grid = _FORWARD[stride][len(weight)].grid(len(x), x.shape[2] // stride, x.shape[3] // stride)
        y, parts = _forward(x, weight, stride, math.prod(grid) if sums else 0)
        ctx.save_for_backward(x, weight, y if sums else None)
        ctx.stride = stride
        ctx.set_materialize_grads(False)
        return y, parts.sum(dim=0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsums: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients to x and weight: Σy and Σy² send dΣ₁ + 2·dΣ₂·y back to y."""
        x, weight, y = ctx.saved_tensors
        dy = torch.zeros_like(y) if dy is None else dy
        if y is not None and dsums is not None:
            first, second = (by_channel(part) for part in dsums)
            dy = (dy.float() + first + 2 * second * y.float()).to(x.dtype)
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = _input_gradient(dy, weight, x, ctx.stride) if ctx.needs_input_grad[0] else None
        plan = _WEIGHT_GRADIENT[ctx.stride][dy.shape[1]]
        parts = _weight_gradient(x, dy, ctx.stride, plan.grid(len(x), x.shape[2], dy.shape[3])[0])
        return dx, parts.sum(dim=0).permute(0, 3, 1, 2).to(weight.dtype), None, None


def by_channel(term: Tensor) -> Tensor:
    """A number for each channel, to be multiplied with (batch, channels, height, width)."""
    return term.view(1, -1, 1, 1)


class _Tile(NamedTuple):
    """Pixels at a time, how many times, warps, and loads ahead."""

    block: int
    tiles: int
    warps: int = 4
    stages: int = 1

    def grid(self, images: int, height: int, width: int) -> tuple[int, ...]:
        return (-(-images * height * width // (self.block * self.tiles)),)


class _Strip(NamedTuple):
    """Pixels of a row at a time, rows one after the other, warps, and loads ahead."""

    block: int
    rows: int
    warps: int = 4
    stages: int = 2

    def grid(self, images: int, height: int, width: int) -> tuple[int, ...]:
        """Number of programs: along a row, and strips of rows."""
        return -(-images * width // self.block), -(-height // self.rows)


class _Corner(NamedTuple):
    """Pixels at a time, how many times, rows and columns of taps at a time (4: all 3), warps, and loads ahead."""

    block: int
    tiles: int
    down: int
    across: int
    warps: int = 4
    stages: int = 1

    def grid(self, images: int, height: int, width: int) -> tuple[int, ...]:
        """Number of programs for each share of the taps, and shares; pixels are rows of x and columns of y."""
        shares = (3 if self.down == 1 else 1) * (3 if self.across == 1 else 1)
        return -(-images * height * width // (self.block * self.tiles)), shares


# By stride and number of filters, or of channels for the gradient to x, from benchmarks/convolution.py --tune.
_Plan = _Tile | _Strip
_FORWARD: dict[int, dict[int, _Plan]] = {
    1: {16: _Strip(128, 16, 4, 3), 32: _Strip(64, 8, 4, 2), 64: _Tile(128, 1, 4, 1)},
    2: {16: _Tile(128, 4), 32: _Tile(256, 1, 8), 64: _Tile(128, 1)},
}
_INPUT_GRADIENT: dict[int, dict[int, _Plan]] = {
    1: {16: _Strip(128, 8, 4, 3), 32: _Strip(64, 8, 4, 2), 64: _Tile(128, 1, 4, 1)},
    2: {16: _Tile(256, 4), 32: _Tile(256, 1, 8), 64: _Tile(128, 1)},
}
_WEIGHT_GRADIENT: dict[int, dict[int, _Corner]] = {
    1: {16: _Corner(64, 16, 4, 4, 4, 2), 32: _Corner(64, 16, 4, 1, 4, 2), 64: _Corner(64, 16, 1, 1, 4, 3)},
    2: {16: _Corner(64, 32, 4, 4), 32: _Corner(64, 16, 4, 4, 8), 64: _Corner(64, 16, 4, 1, 8, 2)},
}


# The launches as operators that are opaque to a compiler. Shapes of their results depend only on their arguments, since
# a compiler caches them for longer than a plan above may last.


def _options(plan: _Plan | _Corner, x: Tensor) -> dict[str, Any]:
    """Options of a kernel on x, whose channels are padded to what the matrix units take at once."""
    made = {"KI": max(16, triton.next_power_of_2(x.shape[1])), "BLOCK": plan.block}
    made |= {"num_warps": plan.warps, "num_stages": plan.stages}
    return made | {"PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}


def _launch(plan: _Plan, x: Tensor, weight: Tensor, y: Tensor, parts: Tensor, stride: int, *, back: bool) -> None:
    """y = x ∗ weight, or dx = dy ∗ weight turned round, and the sums where parts has room for them."""
    (channels, height, width), (filters, *size) = x.shape[1:], y.shape[1:]
    shape = {"CI": channels, "CO": filters, "BACK": back, "SUMS": parts.numel() > 0} | _options(plan, x)
    if isinstance(plan, _Strip):
        kernel = triton_kernels.rolling_kernel
        shape |= {"HEIGHT": height, "WIDTH": width, "ROWS": plan.rows}
    else:
        kernel = triton_kernels.convolve_kernel
        shape |= {"HI": height, "WI": width, "HO": size[0], "WO": size[1], "STRIDE": stride, "TILES": plan.tiles}
    kernel[plan.grid(len(x), *size)](x, weight, y, parts, len(x), **shape)


@torch.library.custom_op("steradian::convolve", mutates_args=())
def _forward(x: Tensor, weight: Tensor, stride: int, parts: int) -> tuple[Tensor, Tensor]:
    y, sums = _like_forward(x, weight, stride, parts)
    _launch(_FORWARD[stride][y.shape[1]], x, weight, y, sums, stride, back=False)
    return y, sums


@_forward.register_fake
def _like_forward(x: Tensor, weight: Tensor, stride: int, parts: int) -> tuple[Tensor, Tensor]:
    size = (len(x), weight.shape[0], x.shape[2] // stride, x.shape[3] // stride)
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return y, x.new_empty((parts, 2, weight.shape[0]) if parts else (1, 0), dtype=torch.float32)


@torch.library.custom_op("steradian::convolve_input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, weight: Tensor, x: Tensor, stride: int) -> Tensor:
    dx = _like_input_gradient(dy, weight, x, stride)
    plan = _INPUT_GRADIENT[stride][x.shape[1]]
    _launch(plan, dy, weight, dx, dx.new_empty(0, dtype=torch.float32), stride, back=True)
    return dx


@_input_gradient.register_fake
def _like_input_gradient(dy: Tensor, weight: Tensor, x: Tensor, stride: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op("steradian::convolve_weight_gradient", mutates_args=())
def _weight_gradient(x: Tensor, dy: Tensor, stride: int, parts: int) -> Tensor:
    out = _like_weight_gradient(x, dy, stride, parts)
    plan = _WEIGHT_GRADIENT[stride][dy.shape[1]]
    shape = dict(zip(("CI", "HI", "WI", "CO", "HO", "WO"), (*x.shape[1:], *dy.shape[1:]), strict=True))
    shape |= {"STRIDE": stride, "TILES": plan.tiles, "DOWN": plan.down, "ACROSS": plan.across} | _options(plan, x)
    _, shares = plan.grid(len(x), x.shape[2], dy.shape[3])
    triton_kernels.weight_gradient_kernel[(parts, shares)](x, dy, out, len(x), **shape)
    return out


@_weight_gradient.register_fake
def _like_weight_gradient(x: Tensor, dy: Tensor, stride: int, parts: int) -> Tensor:
    return x.new_empty(parts, dy.shape[1], 3, 3, x.shape[1], dtype=torch.float32)

"""3 × 3 convolutions with many channels, in bf16 on Hopper GPUs: what our kernels do faster than cuDNN's.

These are gradients to weights, and convolutions of 64 channels with 64 filters of images 32 × 32, which add up what BN
needs as they store. Everything else is torch's.
"""

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["convolve", "works"]

_ROWS = 8  # rows of y of a program
_PROGRAMS = 64  # for a gradient to weights: half of the chip, since other trainings have work for the rest


def convolve(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """x ∗ weight with padding 1 and stride 1.

    Args:
        x: (batch, channels, height, width), in bf16 on a device where our kernels work.
        weight: (filters, channels, 3, 3); it is multiplied in the dtype of x.

    Returns:
        y, channels last, and Σy and Σy² over all pixels, (2, filters) in float32 and without a gradient; None where
        they were not added up.
    """
    last = torch.channels_last
    y, sums = _Convolution.apply(x.contiguous(memory_format=last), weight.contiguous(memory_format=last))
    return y, sums if sums.numel() else None


class _Convolution(torch.autograd.Function):
    """The convolution with its gradients; parts are added up where a compiler can join more to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve."""
        taps = weight.to(x.dtype)
        ctx.save_for_backward(x, taps)
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        if _is_ours(x, len(taps)):
            y, parts = _forward(x, taps, _ROWS)
            return y, parts.sum(dim=0)
        return functional.conv2d(x, taps, padding=1), x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The gradients to x and weight."""
        x, taps = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        ours, plan = _is_ours(x, len(taps)), _plan(x, len(taps))
        rest = [ctx.needs_input_grad[0] and not ours, plan is None, False]
        where = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        dx = dw = None
        if any(rest):
            dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, taps, None, *where, rest)
        if ours and ctx.needs_input_grad[0]:
            dx = _input_gradient(dy, taps, _ROWS)
        if plan is not None:
            parts = _weight_gradient(x, dy, plan.parts)
            dw = (parts[0] if len(parts) == 1 else parts.sum(dim=0)).permute(0, 3, 1, 2)
        assert dw is not None
        return dx, dw.to(ctx.dtype)


# What is ours


class _Plan(NamedTuple):
    """How a gradient to weights is found: sizes as `weight_gradient_kernel` has them, and parts of the batch."""

    rows: int
    upper: int
    lower: int
    images: int
    slots: int
    unit: int
    parts: int = 1


_PLANS = {
    32: _Plan(rows=4, upper=4, lower=2, images=1, slots=5, unit=32),
    16: _Plan(rows=8, upper=8, lower=2, images=1, slots=6, unit=32),
    8: _Plan(rows=8, upper=16, lower=0, images=2, slots=4, unit=32),
    4: _Plan(rows=4, upper=8, lower=0, images=8, slots=4, unit=16),
}
"""By the height and width of the images."""


def _plan(x: Tensor, filters: int) -> _Plan | None:
    """How the gradient to the weight of so many filters is found by our kernel; None: it is torch's."""
    batch, channels, height, width = x.shape
    plan = _PLANS.get(height)
    if plan is None or width != height or channels % 64 or filters % 64 or batch % plan.images:
        return None
    most, shares = max(1, _PROGRAMS // (filters // 64 * (channels // 64))), batch // plan.images
    return plan._replace(parts=max(parts for parts in range(1, most + 1) if shares % parts == 0))


def _is_ours(x: Tensor, filters: int) -> bool:
    """Whether the convolution itself is ours."""
    return tuple(x.shape[1:]) == (64, 32, 32) and filters == 64 and len(x) % 8 == 0


@functools.cache
def works(device: torch.device) -> bool:
    """Whether our kernels are for this device, and give what torch gives there."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        found = max(_error(size, channels, device) for size, channels in ((32, 64), (16, 128), (8, 64), (4, 64)))
    except Exception as error:  # the language they are written in is not settled yet
        warnings.warn(f"convolutions are cuDNN's here, since our kernels fail: {error}", stacklevel=2)
        return False
    if not found < 0.02:
        warnings.warn(f"convolutions are cuDNN's here, since our kernels are off by {found:.2g}", stacklevel=2)
        return False
    return True


def _error(size: int, channels: int, device: torch.device) -> float:
    """How far a small convolution and its gradients are from torch's in float32, relative to their size."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"x": (8, channels, size, size), "weight": (channels, channels, 3, 3), "dy": (8, channels, size, size)}
    made = {name: torch.randn(shape, device=device, generator=generator) for name, shape in shapes.items()}
    found: list[list[Tensor]] = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, dy = (tensor.bfloat16().to(dtype) for tensor in made.values())
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y = convolve(x, weight)[0] if dtype == torch.bfloat16 else functional.conv2d(x, weight, padding=1)
        found.append([y.detach(), *torch.autograd.grad(y, (x, weight), dy)])
    return max(float((one.float() - other).norm() / other.norm()) for one, other in zip(*found, strict=True))


# The launches, as operators that a compiler does not look into. What their results look like follows from their
# arguments alone: a compiler may remember it for longer than this file stays as it is.


def _described(x: Tensor, box: list[int], *, by_row: bool) -> "TensorDescriptor":
    """Images, channels last, as (image, row, column, channel), or as (row, column, image, channel)."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from steradian.lab._hopper_weight_gradient import BOX

    order = (2, 3, 0, 1) if by_row else (0, 2, 3, 1)
    shape, strides = ([of(k) for k in order] for of in (x.size, x.stride))
    return TensorDescriptor(x, shape, strides, box, BOX.value)


def _launch(x: Tensor, weight: Tensor, y: Tensor, sums: Tensor | None, rows: int) -> None:
    """With sums y = x ∗ weight, without them the gradient to x, where x is dy."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from steradian.lab._hopper_convolution import FLAT, convolve_kernel

    inside, edge, outside = (
        _described(tensor, [1, columns, 8, 64], by_row=True) for tensor, columns in ((x, 32), (x, 2), (y, 32))
    )
    taps = TensorDescriptor(weight, [64, 576], [576, 1], [64, 64], FLAT.value)
    how = {"BACK": sums is None, "SUMS": sums is not None, "ROWS": rows, "num_warps": 4, "maxnreg": 240}
    convolve_kernel[(len(x) // 8 * (32 // rows),)](inside, edge, taps, outside, sums, **how)


@torch.library.custom_op("steradian::convolve_wide", mutates_args=())
def _forward(x: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    y, sums = _like_forward(x, weight, rows)
    _launch(x, weight, y, sums, rows)
    return y, sums


@_forward.register_fake
def _like_forward(x: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(len(x) // 8 * (32 // rows) * 2, 2, 64, dtype=torch.float32)


@torch.library.custom_op("steradian::convolve_wide_input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, weight: Tensor, rows: int) -> Tensor:
    dx = _like_input_gradient(dy, weight, rows)
    _launch(dy, weight, dx, None, rows)
    return dx


@_input_gradient.register_fake
def _like_input_gradient(dy: Tensor, weight: Tensor, rows: int) -> Tensor:
    return torch.empty_like(dy)


@torch.library.custom_op("steradian::convolve_wide_weight_gradient", mutates_args=())
def _weight_gradient(x: Tensor, dy: Tensor, parts: int) -> Tensor:
    from steradian.lab._hopper_weight_gradient import weight_gradient_kernel

    out, plan = _like_weight_gradient(x, dy, parts), _PLANS[x.shape[2]]
    filters, channels, size = dy.shape[1], x.shape[1], x.shape[2]
    back, upper, lower = (
        _described(tensor, [plan.images, rows, size, 64], by_row=False)
        for tensor, rows in ((dy, plan.rows), (x, plan.upper), (x, plan.lower or plan.upper))
    )
    sizes = {"SIZE": size, "ROWS": plan.rows, "UPPER": plan.upper, "LOWER": plan.lower}
    sizes |= {"IMAGES": plan.images, "SLOTS": plan.slots, "UNIT": plan.unit}
    grid = (filters // 64 * (channels // 64), parts)
    weight_gradient_kernel[grid](back, upper, lower, out, len(x) // parts, filters, channels, **sizes, num_warps=4)
    return out


@_weight_gradient.register_fake
def _like_weight_gradient(x: Tensor, dy: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, dy.shape[1], 3, 3, x.shape[1], dtype=torch.float32)

"""3 × 3 convolutions with many channels, in bf16 on Hopper GPUs: by our kernels where there are some, else by torch's.

Ours are faster where several trainings share a GPU, and add up what BN needs as they store.
"""

import functools
import importlib.metadata
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steradian.lab import hopper

__all__ = ["convolve", "works"]


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
    return y, sums.detach() if sums.numel() else None


class _Convolution(torch.autograd.Function):
    """The convolution with its gradients; parts are added up where a compiler can join more to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve."""
        taps = weight.to(x.dtype)
        ctx.save_for_backward(x, taps)
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        if parts := hopper.convolution_parts(x, len(taps)):
            y, sums = hopper.forward(x, taps, parts)
            return y, sums.sum(dim=0)
        return functional.conv2d(x, taps, padding=1), x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The gradients to x and weight."""
        x, taps = ctx.saved_tensors
        wanted, _ = ctx.needs_input_grad
        dy = dy.contiguous(memory_format=torch.channels_last)
        to_x, to_weight = hopper.convolution_parts(dy, x.shape[1]), hopper.weight_gradient_parts(x, len(taps))
        rest = [wanted and not to_x, not to_weight, False]
        dx = dw = None
        if any(rest):
            where = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, taps, None, *where, rest)
        if wanted and to_x:
            dx = hopper.input_gradient(dy, taps, to_x)
        if to_weight:
            parts = hopper.weight_gradient(x, dy, to_weight)
            dw = (parts[0] if to_weight == 1 else parts.sum(dim=0)).permute(0, 3, 1, 2)
        assert dw is not None
        return dx, dw.to(ctx.dtype)


_TRITON = "3.6."
"""The versions that our kernels were tried with. Later ones spell their language differently."""

_SHAPES = ((32, 64), (16, 128), (8, 128), (4, 128))
"""Sizes and channels of convolutions that need every kernel in every way it is compiled."""


@functools.cache
def works(device: torch.device) -> bool:
    """Whether our kernels are for this device, and give what torch gives there."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if not _version("triton").startswith(_TRITON):
        return False
    try:
        found = [_error(size, channels, device) for size, channels in _SHAPES]
    except Exception as error:  # whatever goes wrong in a compiler or the driver
        warnings.warn(f"convolutions are cuDNN's here, since our kernels fail: {error}", stacklevel=2)
        return False
    if not all(error < 0.02 for error in found):
        told = ", ".join(f"{error:.2g}" for error in found)
        warnings.warn(f"convolutions are cuDNN's here, since our kernels are off by {told}", stacklevel=2)
        return False
    return True


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


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

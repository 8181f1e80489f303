"""Narrow residual networks with BN run by fewer, joint kernels: our own convolutions, and passes that a compiler joins.

Parameters and buffers are the same. In half precision fewer activations are stored, so that fewer are rounded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.lab.kernels.convolution import FILTERS, by_channel, convolve
from steradian.lab.models import Block, ResNet

__all__ = ["can_join", "forward"]

_LANES = 8  # channels that are loaded at once


def can_join(model: nn.Module) -> bool:
    """Whether `forward` can run this network: a residual one with BN whose convolutions our kernels support."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    fits = all(layer.bias is None and layer.out_channels in FILTERS for layer in layers)
    return isinstance(model, ResNet) and len(norms) == len(layers) and fits


def forward(model: ResNet, images: Tensor) -> Tensor:
    """Logits of a network that `can_join` for a batch of images; under autocast in its dtype, else in the images'."""
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
    a = functional.pad(images, (0, 0, 0, 0, 0, -images.shape[1] % _LANES)).to(dtype)
    a = _activated(model.conv1, model.norm1, a)
    for block in (each for each in model.stages.modules() if isinstance(each, Block)):
        h = _activated(block.conv1, block.norm1, a)
        if len(block.shortcut):
            added = _activated(block.shortcut[0], block.shortcut[1], a, rectified=False)
        else:
            added = functional.pad(a[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, 0, block.added))
        a = _activated(block.conv2, block.norm2, h, added=added)
    return model.head(a.mean(dim=(2, 3)))


def _activated(
    convolution: nn.Module, norm: nn.Module, x: Tensor, *, added: Tensor | None = None, rectified: bool = True
) -> Tensor:
    """relu(norm(convolution(x)) + added), in the dtype of x; without the ReLU if not rectified."""
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    sums: Tensor | tuple[Tensor, Tensor]
    stride = convolution.stride[0]
    if convolution.kernel_size == (1, 1):  # of a shortcut: a product of matrices
        pixels = x[:, :, ::stride, ::stride].permute(0, 2, 3, 1)
        y = functional.linear(pixels, convolution.weight.flatten(1)).permute(0, 3, 1, 2)
        exact = y.detach().float()
        sums = exact.sum(dim=(0, 2, 3)), exact.square().sum(dim=(0, 2, 3))
    else:
        weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, x.shape[1] - convolution.weight.shape[1]))
        y, sums = convolve(x, weight, stride=stride, sums=norm.training)
    count = y.numel() // y.shape[1]
    terms = [by_channel(term) for term in _terms(norm, sums, count)]
    share = 1 / count if norm.training else 0.0
    return _Normalization.apply(y, *terms, added, share, rectified)


class _Normalization(torch.autograd.Function):
    """relu(weight·ŷ + bias + added) with ŷ = (y − mean)/deviation, where mean and deviation are those of y itself.

    Inputs, outputs and saved tensors have the dtype of y, and gradients are computed from tensors that are stored
    anyway: nothing wider than y is written or read again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        mean: Tensor,
        inverse: Tensor,
        weight: Tensor,
        bias: Tensor,
        added: Tensor | None,
        share: float,
        rectified: bool,
    ) -> Tensor:
        """With 1/deviation, and the share of a pixel in the mean (0 if the statistics are not those of y)."""
        scale = _kept(inverse * weight)
        shift = _kept(bias - mean * scale)
        z = y.float() * scale + shift
        a = (z if added is None else z + added).to(y.dtype)
        a = torch.relu(a) if rectified else a
        # The zeros of ReLU can be found from y, which is read anyway, unless something was added to it.
        masked = (scale, shift) if added is None else (a, None)
        ctx.save_for_backward(y, mean, inverse, weight, *(masked if rectified else (None, None)))
        ctx.added, ctx.share = added is not None, share
        return a

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
        """dy = weight/deviation · (dz − mean(dz) − ŷ·mean(ŷ·dz))."""
        y, mean, inverse, weight, mask, shift = ctx.saved_tensors
        a = mask if shift is None else y.float() * mask + shift
        dz = da if a is None else torch.where(a <= 0, 0, da)
        unit, pixels = (y - mean) * inverse, (0, 2, 3)
        to_bias = dz.sum(pixels, keepdim=True, dtype=torch.float32)
        to_weight = (dz * unit).sum(pixels, keepdim=True)
        dy = (dz - ctx.share * to_bias - unit * (ctx.share * to_weight)) * (inverse * weight)
        return dy.to(y.dtype), None, None, to_weight, to_bias, dz if ctx.added else None, None, None


def _kept(term: Tensor) -> Tensor:
    """The term as a tensor in memory; otherwise a compiler computes it again for each pixel, which costs reads."""
    return term.as_strided(term.shape, term.stride())


def _terms(norm: nn.BatchNorm2d, sums: Tensor | tuple[Tensor, Tensor], count: int) -> tuple[Tensor, ...]:
    """BN's mean, 1/deviation, weight and bias, with its running statistics updated in training."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.momentum is not None
    mean, variance = norm.running_mean, norm.running_var
    if norm.training:
        with torch.no_grad():
            mean = sums[0] / count
            variance = (sums[1] / count - mean.square()).clamp(min=0)
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
    weight = torch.ones_like(mean) if norm.weight is None else norm.weight
    bias = torch.zeros_like(mean) if norm.bias is None else norm.bias
    return mean, torch.rsqrt(variance + norm.eps), weight, bias

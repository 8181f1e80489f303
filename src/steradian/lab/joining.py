"""Networks with BN carried out by joint kernels: convolutions of our own, and passes that a compiler joins.

The same network, with the same parameters and buffers, to rounding: in half precision activations are rounded where
they are stored, and fewer of them are. Of a narrow network all 3 × 3 convolutions are ours, and members lie behind each
other in the batch: what one loads is contiguous. Of a wide network the first is ours, since torch's are not made for
its few channels, and on a Hopper GPU what `wide` says.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.lab import wide
from steradian.lab.convolution import FILTERS, apart, by_channel, convolve, together
from steradian.lab.models import VGG, Block, ResNet

__all__ = ["can_join", "forward", "forward_on_hopper", "is_narrow"]

_Way = Literal["few", "many", "torch"]
"""Whose convolution it is: `convolution`'s, for few channels, `wide`'s, for many, or torch's."""

_LANES = 8  # channels that are loaded at once
_STEM_LANES = 4  # the same for the first convolution of a wide network, which takes all taps at once


def can_join(model: nn.Module) -> bool:
    """Whether `forward` can carry out this network."""
    if not isinstance(model, ResNet | VGG):
        return False
    layers = _convolutions(model)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    if len(norms) != len(layers) or any(layer.bias is not None for layer in layers):
        return False
    # Torch carries out members whose channels lie side by side.
    return _is_ours(layers[0]) and (layers[0].groups == 1 or all(map(_is_ours, layers)))


def is_narrow(model: nn.Module) -> bool:
    """Whether all its 3 × 3 convolutions can be ours."""
    return all(_is_ours(layer) for layer in _convolutions(model) if layer.kernel_size != (1, 1))


def _convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]


def _is_ours(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (3, 3) and layer.out_channels // layer.groups in FILTERS


def forward(model: ResNet | VGG, images: Tensor, *, hopper: bool = False) -> Tensor:
    """Logits of a batch of images; under autocast in its dtype, else in the images'.

    Args:
        model: a network that `can_join`.
        images: as the network takes them.
        hopper: take the kernels of `wide` for a network that is; only in bf16 where they work.
    """
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
    narrow = is_narrow(model)
    x = _apart(images, _convolutions(model)[0].groups, _LANES if narrow else _STEM_LANES).to(dtype)
    rest: _Way = "few" if narrow else "many" if hopper else "torch"
    if isinstance(model, VGG):
        return _vgg(model, x, rest)
    a = _activated(model.conv1, model.norm1, x, "few")
    for layer in model.stages.modules():
        if isinstance(layer, Block):
            a = _block(layer, a, rest)
    features = a.mean(dim=(2, 3)).unflatten(0, (model.members, -1))
    return model.head(features.transpose(0, 1).flatten(1))


def forward_on_hopper(model: ResNet | VGG, images: Tensor) -> Tensor:
    """The same with the kernels of `wide`."""
    return forward(model, images, hopper=True)


def _vgg(model: VGG, a: Tensor, rest: _Way) -> Tensor:
    way: _Way = "few"
    for stage in model:
        layers = iter(stage if isinstance(stage, nn.Sequential) else [stage])
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                a, way = _activated(layer, next(layers), a, way), rest
            elif not isinstance(layer, nn.ReLU):
                a = layer(a)
    return a


def _block(block: Block, a: Tensor, way: _Way) -> Tensor:
    h = _activated(block.conv1, block.norm1, a, way)
    return _activated(block.conv2, block.norm2, h, way, passed=_passed(block, a))


def _passed(block: Block, a: Tensor) -> Tensor:
    """What the shortcut adds."""
    if len(block.shortcut):
        convolution, norm = block.shortcut
        return _activated(convolution, norm, a, "torch", rectified=False)
    return functional.pad(a[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, 0, block.added))


def _activated(
    convolution: nn.Module,
    norm: nn.Module,
    x: Tensor,
    way: _Way,
    *,
    passed: Tensor | None = None,
    rectified: bool = True,
) -> Tensor:
    """relu(norm(convolution(x)) + passed), in the dtype of x; not rectified without the ReLU."""
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    members, [stride, _] = convolution.groups, convolution.stride
    sums: Tensor | tuple[Tensor, Tensor] | None = None
    if way == "few":
        weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, x.shape[1] - convolution.weight.shape[1]))
        y, sums = convolve(x, weight, members=members, stride=stride, sums=norm.training)
    elif way == "many" and stride == 1:
        y, sums = wide.convolve(x, convolution.weight)
    else:
        y = _by_torch(convolution, x)
    if sums is None:
        exact = y.detach().float()
        sums = exact.sum(dim=(0, 2, 3)), exact.square().sum(dim=(0, 2, 3))
    count = y.numel() // (members * y.shape[1])
    terms = [by_channel(term, members) for term in _terms(norm, sums, count)]
    share = 1 / count if norm.training else 0.0
    passed = None if passed is None else apart(passed, members)
    return together(_Normalization.apply(apart(y, members), *terms, passed, share, rectified))


class _Normalization(torch.autograd.Function):
    """relu(weight·ŷ + bias + passed) with ŷ = (y − mean)/deviation, where mean and deviation are those of y itself.

    What goes in and out is as it is stored, and gradients are found from what is stored anyway: nothing wider than y
    is written or read again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        mean: Tensor,
        inverse: Tensor,
        weight: Tensor,
        bias: Tensor,
        passed: Tensor | None,
        share: float,
        rectified: bool,
    ) -> Tensor:
        """With 1/deviation, and the share of a pixel in the mean (0 where the statistics are not those of y)."""
        scale = _kept(inverse * weight)
        shift = _kept(bias - mean * scale)
        z = y.float() * scale + shift
        a = (z if passed is None else z + passed).to(y.dtype)
        a = torch.relu(a) if rectified else a
        # Where ReLU is 0 can be found from y, which is read anyway, unless more was added to it.
        masked = (scale, shift) if passed is None else (a, None)
        ctx.save_for_backward(y, mean, inverse, weight, *(masked if rectified else (None, None)))
        ctx.passed, ctx.share = passed is not None, share
        return a

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
        """dy = weight/deviation · (dz − mean(dz) − ŷ·mean(ŷ·dz))."""
        y, mean, inverse, weight, mask, shift = ctx.saved_tensors
        a = mask if shift is None else y.float() * mask + shift
        dz = da if a is None else torch.where(a <= 0, 0, da)
        unit, pixels = (y - mean) * inverse, (-4, -2, -1)
        to_bias = dz.sum(pixels, keepdim=True, dtype=torch.float32)
        to_weight = (dz * unit).sum(pixels, keepdim=True)
        dy = (dz - ctx.share * to_bias - unit * (ctx.share * to_weight)) * (inverse * weight)
        return dy.to(y.dtype), None, None, to_weight, to_bias, dz if ctx.passed else None, None, None


def _kept(term: Tensor) -> Tensor:
    """The term as a tensor in memory: else a compiler computes it again for each pixel, which costs reads."""
    return term.as_strided(term.shape, term.stride())


def _by_torch(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """The convolution; one of 1 × 1 as a product of matrices."""
    if convolution.kernel_size != (1, 1):
        return convolution(x)
    down, across = convolution.stride
    pixels = x[:, :, ::down, ::across].permute(0, 2, 3, 1)
    return functional.linear(pixels, convolution.weight.flatten(1)).permute(0, 3, 1, 2)


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


def _apart(images: Tensor, members: int, lanes: int) -> Tensor:
    """The members' images behind each other, their channels filled up with zeros."""
    parts = images.unflatten(1, (members, -1)).transpose(0, 1).flatten(0, 1)
    return functional.pad(parts, (0, 0, 0, 0, 0, -parts.shape[1] % lanes))

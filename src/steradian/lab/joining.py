"""Networks with BN carried out by joint kernels: convolutions of our own, and passes that a compiler joins.

The same network, with the same parameters and buffers, to rounding: in half precision activations are rounded where
they are stored, and fewer of them are. Of a narrow network all 3 × 3 convolutions are ours, and members lie behind each
other in the batch: what one loads is contiguous. Of a wide network only the first is ours, since torch's are not made
for its few channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.lab.convolution import FILTERS, convolve
from steradian.lab.models import VGG, Block, ResNet

__all__ = ["can_join", "forward", "is_narrow"]

_LANES = 8  # channels that are loaded at once
_STEM_LANES = 4  # the same for the first convolution of a wide network, which takes all taps at once

# What a wide network gains from each of these can be measured without it.
_STEM = True  # its first convolution is ours
_PROJECTIONS = True  # its 1 × 1 convolutions are products of matrices
_SUMS = True  # BN behind torch's convolutions is computed from Σy and Σy²
_MASKS = True  # where ReLU is 0 is found from what is kept anyway: y, which BN's gradient needs, or what ReLU gave


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


def forward(model: ResNet | VGG, images: Tensor) -> Tensor:
    """Logits of a batch of images; under autocast in its dtype, else in the images'."""
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
    if isinstance(model, VGG):
        return _vgg(model, _apart(images, 1, _STEM_LANES).to(dtype))
    narrow = is_narrow(model)
    x = _apart(images, model.members, _LANES if narrow else _STEM_LANES).to(dtype)
    a = _activated(model.conv1, model.norm1, x, ours=narrow or _STEM)
    for layer in model.stages.modules():
        if isinstance(layer, Block):
            a = _block(layer, a, ours=narrow)
    features = a.mean(dim=(2, 3)).unflatten(0, (model.members, -1))
    return model.head(features.transpose(0, 1).flatten(1))


def _vgg(model: VGG, a: Tensor) -> Tensor:
    ours = _STEM
    for stage in model:
        layers = iter(stage if isinstance(stage, nn.Sequential) else [stage])
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                a, ours = _activated(layer, next(layers), a, ours=ours), False
            elif not isinstance(layer, nn.ReLU):
                a = layer(a)
    return a


def _block(block: Block, a: Tensor, *, ours: bool) -> Tensor:
    h = _activated(block.conv1, block.norm1, a, ours=ours)
    return _rounded_relu(_normalized(block.conv2, block.norm2, h, ours=ours) + _passed(block, a), a.dtype)


def _passed(block: Block, a: Tensor) -> Tensor:
    """What the shortcut adds."""
    if len(block.shortcut):
        convolution, norm = block.shortcut
        return _normalized(convolution, norm, a, ours=False)
    return functional.pad(a[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, 0, block.added))


def _activated(convolution: nn.Module, norm: nn.Module, x: Tensor, *, ours: bool) -> Tensor:
    """relu(norm(convolution(x))), in the dtype of x."""
    if not _MASKS or not (ours or _SUMS):
        return _rounded_relu(_normalized(convolution, norm, x, ours=ours), x.dtype)
    return _Activation.apply(*_scaled(convolution, norm, x, ours=ours), x.dtype).flatten(0, 1)


def _normalized(convolution: nn.Module, norm: nn.Module, x: Tensor, *, ours: bool) -> Tensor:
    """norm(convolution(x)), in float32, which is not stored where a compiler joins what follows."""
    if not (ours or _SUMS):
        return norm(_by_torch(convolution, x))
    y, scale, shift = _scaled(convolution, norm, x, ours=ours)
    return (y * scale + shift).flatten(0, 1)


def _rounded_relu(z: Tensor, dtype: torch.dtype) -> Tensor:
    """relu(z), rounded; with the rounding first its gradient needs nothing that is not stored."""
    return torch.relu(z.to(dtype)) if _MASKS else torch.relu(z).to(dtype)


class _Activation(torch.autograd.Function):
    """relu(scale·y + shift), whose gradient needs y and not what ReLU gave: BN's gradient needs y as well."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        """In this dtype; y is (members, batch, channels, height, width)."""
        ctx.save_for_backward(y, scale, shift)
        return torch.relu(y * scale + shift).to(dtype)

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients to y, scale and shift."""
        y, scale, shift = ctx.saved_tensors
        dz = torch.where(y * scale + shift <= 0, 0.0, da.float())
        pixels = (1, 3, 4)
        return dz * scale, (dz * y).sum(pixels, keepdim=True), dz.sum(pixels, keepdim=True), None


def _scaled(convolution: nn.Module, norm: nn.Module, x: Tensor, *, ours: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y, scale and shift in float32: norm(convolution(x)) is scale·y + shift.

    y is (members, batch, channels, height, width). What is stored of it has the dtype of x where a compiler joins what
    follows; its gradient is added up in float32 and rounded once.
    """
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    members, [stride, _] = convolution.groups, convolution.stride
    sums: Tensor | tuple[Tensor, Tensor]
    if ours:
        weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, x.shape[1] - convolution.weight.shape[1]))
        y, sums = convolve(x, weight, members=members, stride=stride, sums=norm.training)
        y = y.float()
    else:
        y = _by_torch(convolution, x).float()
        sums = y.sum(dim=(0, 2, 3)), y.square().sum(dim=(0, 2, 3))
    scale, shift = (term.view(members, 1, -1, 1, 1) for term in _terms(norm, sums, y.numel() // (members * y.shape[1])))
    return y.unflatten(0, (members, -1)), scale, shift


def _by_torch(convolution: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(convolution, nn.Conv2d)
    if convolution.kernel_size != (1, 1) or not _PROJECTIONS:
        return convolution(x)
    down, across = convolution.stride
    pixels = x[:, :, ::down, ::across].permute(0, 2, 3, 1)
    return functional.linear(pixels, convolution.weight.flatten(1)).permute(0, 3, 1, 2)


def _terms(norm: nn.BatchNorm2d, sums: Tensor | tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """BN as scale·y + shift, channel by channel, with its running statistics updated in training."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.momentum is not None
    if norm.training:
        mean = sums[0] / count
        variance = (sums[1] / count - mean.square()).clamp(min=0)
        with torch.no_grad():
            norm.running_mean.lerp_(mean.detach(), norm.momentum)
            norm.running_var.lerp_(variance.detach() * (count / (count - 1)), norm.momentum)
    else:
        mean, variance = norm.running_mean, norm.running_var
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def _apart(images: Tensor, members: int, lanes: int) -> Tensor:
    """The members' images behind each other, their channels filled up with zeros."""
    parts = images.unflatten(1, (members, -1)).transpose(0, 1).flatten(0, 1)
    return functional.pad(parts, (0, 0, 0, 0, 0, -parts.shape[1] % lanes))

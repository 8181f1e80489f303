"""ResNets with BN and few channels whose convolutions and normalizations are carried out by joint kernels.

The same network, with the same parameters and buffers, to rounding: in half precision activations are rounded where
they are stored, and fewer of them are. Members lie behind each other in the batch: what one loads is contiguous.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.lab.convolution import FILTERS, convolve
from steradian.lab.models import Block, ResNet

__all__ = ["can_join", "forward"]

_LANES = 8  # channels that are loaded at once


def can_join(model: nn.Module) -> bool:
    """Whether `forward` can carry out this network."""
    if not isinstance(model, ResNet) or not isinstance(model.norm1, nn.BatchNorm2d):
        return False
    convolutions = [
        layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and ".shortcut." not in name
    ]
    # Projections are carried out layer by layer, which needs the members' channels side by side.
    projects = any(isinstance(layer, Block) and len(layer.shortcut) for layer in model.modules())
    return (model.members == 1 or not projects) and all(
        layer.kernel_size == (3, 3) and layer.out_channels // layer.groups in FILTERS and layer.bias is None
        for layer in convolutions
    )


def forward(model: ResNet, images: Tensor) -> Tensor:
    """Logits of a batch of images; under autocast in its dtype, else in the images'."""
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
    a = torch.relu(_normalized(model.conv1, model.norm1, _apart(images, model.members).to(dtype))).to(dtype)
    for layer in model.stages.modules():
        if isinstance(layer, Block):
            a = _block(layer, a)
    features = a.mean(dim=(2, 3)).unflatten(0, (model.members, -1))
    return model.head(features.transpose(0, 1).flatten(1))


def _block(block: Block, a: Tensor) -> Tensor:
    h = torch.relu(_normalized(block.conv1, block.norm1, a)).to(a.dtype)
    return torch.relu(_normalized(block.conv2, block.norm2, h) + _passed(block, a)).to(a.dtype)


def _passed(block: Block, a: Tensor) -> Tensor:
    """What the shortcut adds."""
    if len(block.shortcut):
        return block.shortcut(a)
    return functional.pad(a[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, 0, block.added))


def _normalized(convolution: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    """norm(convolution(x)), in float32, which is not stored where a compiler joins what follows."""
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, -convolution.weight.shape[1] % _LANES))
    members, [stride, _] = convolution.groups, convolution.stride
    y, sums = convolve(x, weight, members=members, stride=stride, sums=norm.training)
    scale, shift = (term.view(members, 1, -1, 1, 1) for term in _terms(norm, sums, y.numel() // (members * y.shape[1])))
    return (y.unflatten(0, (members, -1)).float() * scale + shift).flatten(0, 1)


def _terms(norm: nn.BatchNorm2d, sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
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


def _apart(images: Tensor, members: int) -> Tensor:
    """The members' images behind each other, their channels filled up with zeros."""
    parts = images.unflatten(1, (members, -1)).transpose(0, 1).flatten(0, 1)
    return functional.pad(parts, (0, 0, 0, 0, 0, -parts.shape[1] % _LANES))

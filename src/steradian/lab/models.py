"""The paper's networks in their CIFAR forms, with any of its normalizations, and a small one for the demo.

A normalization follows every convolution: filters (BN, IN, WN), blocks of them (GN) or all together (LN) are invariant.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.registry import NETWORKS, register_network

__all__ = ["NORMS", "WeightNormConv2d", "build", "resnet18", "resnet20", "small_cnn", "vgg16"]

NORMS = ("bn", "bn-no-affine", "wn", "gn", "ln", "in")
"""Normalizations that every network can have."""
_GROUPS = 8  # of GN, or fewer if there are fewer channels


class Convolution(nn.Conv2d):
    """A convolution that pads its input channels with zeros to a multiple of `lanes`, which kernels take at once."""

    lanes: int = 1

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if missing := -self.in_channels % self.lanes:
            zeros = (0, 0, 0, 0, 0, missing)
            input, weight = functional.pad(input, zeros), functional.pad(weight, zeros)
        return super()._conv_forward(input, weight, bias)


class WeightNormConv2d(Convolution):
    """A convolution with weights g·v/‖v‖, filter by filter, and a bias (WN); `weight` is v and `gain` is g."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, *, gain: float = math.sqrt(2)) -> None:
        super().__init__(channels, out, kernel, stride, padding=kernel // 2)
        self.gain = nn.Parameter(torch.full((out, 1, 1, 1), gain))
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with the normalized weights."""
        length = torch.linalg.vector_norm(self.weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(input, self.weight * (self.gain / length), self.bias)


def _layers(
    norm: str, channels: int, out: int, kernel: int, stride: int = 1, *, branches: int = 1
) -> tuple[nn.Module, nn.Module]:
    """A convolution and the normalization behind it, where `branches` residual branches add up."""
    if norm == "wn":
        # Nothing else bounds the sum of the branches: each begins with its share of the variance.
        return WeightNormConv2d(channels, out, kernel, stride, gain=math.sqrt(2 / branches)), nn.Identity()
    convolution = Convolution(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    if norm in ("bn", "bn-no-affine"):
        layer = nn.BatchNorm2d(out, affine=norm == "bn")
        layer.num_batches_tracked = None  # only an average without momentum needs the count: one kernel less
        return convolution, layer
    if norm == "in":
        return convolution, nn.InstanceNorm2d(out, affine=True)
    if norm in ("gn", "ln"):
        return convolution, nn.GroupNorm(1 if norm == "ln" else math.gcd(_GROUPS, out), out)
    raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")


class Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut: a projection, or for ResNet20 (He et al.) zeros for new channels."""

    def __init__(self, channels: int, out: int, stride: int, *, norm: str, project: bool, branches: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _layers(norm, channels, out, 3, stride)
        self.conv2, self.norm2 = _layers(norm, out, out, 3, branches=branches)
        self.shortcut = nn.Sequential()
        self.stride, self.added = stride, out - channels
        if project and (stride > 1 or channels != out):
            projection, behind = _layers(norm, channels, out, 1, stride, branches=2)
            self.shortcut = _sequential(conv=projection, norm=behind)
            self.stride, self.added = 1, 0

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        h = functional.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        x = self.shortcut(x)
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.added:
            x = functional.pad(x, (0, 0, 0, 0, 0, self.added))
        return functional.relu(h + x)


class ResNet(nn.Module):
    """A residual network for small images: 3 × 3 stem, stages that double the channels, mean, linear head.

    `route`, if there is one, runs the same network in another way, called with it and the images.
    """

    route: Callable[["ResNet", Tensor], Tensor] | None = None

    def __init__(
        self, widths: list[int], blocks: int, *, norm: str, project: bool, channels: int, classes: int, size: int
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = _layers(norm, channels, widths[0], 3)
        self.stages, before = nn.Sequential(), widths[0]
        for number, width in enumerate(widths):
            # Maps of 2 × 2 are not halved again: IN and BN need more than one position.
            stride = 2 if number and size > 2 else 1
            size //= stride
            stage = nn.Sequential()
            for _ in range(blocks):
                branches = blocks * len(widths)
                stage.append(Block(before, width, stride, norm=norm, project=project, branches=branches))
                before, stride = width, 1
            self.stages.add_module(f"layer{number + 1}", stage)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        if self.route is not None:
            return self.route(self, x)
        x = functional.relu(self.norm1(self.conv1(x)))
        return self.head(self.stages(x).mean(dim=(2, 3)))


def resnet20(
    *, norm: str = "bn", channels: int = 3, classes: int = 10, size: int = 32, width: int = 16, project: bool = False
) -> nn.Module:
    """ResNet20 (16-32-64) of He et al. for CIFAR, with shortcuts that have no parameters.

    `channels` and `size` are those of the images, `width` is the number of channels of the first stage. With `project`,
    shortcuts that change the shape are convolutions with a normalization instead.

    >>> sum(p.numel() for p in resnet20().parameters())
    269722
    """
    widths = [width, 2 * width, 4 * width]
    return ResNet(widths, 3, norm=norm, project=project, channels=channels, classes=classes, size=size)


def resnet18(*, norm: str = "bn", channels: int = 3, classes: int = 10, size: int = 32, width: int = 64) -> nn.Module:
    """ResNet18 (64-128-256-512) with a 3 × 3 stem and projected shortcuts; arguments as for `resnet20`.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    widths = [width, 2 * width, 4 * width, 8 * width]
    return ResNet(widths, 2, norm=norm, project=True, channels=channels, classes=classes, size=size)


def vgg16(*, norm: str = "bn", channels: int = 3, classes: int = 10, size: int = 32, width: int = 64) -> nn.Module:
    """VGG16 with normalizations and one linear layer; arguments as for `resnet20`.

    >>> sum(p.numel() for p in vgg16().parameters())
    14724042
    """
    stages = [[width] * 2, [2 * width] * 2, [4 * width] * 3, [8 * width] * 3, [8 * width] * 3]
    made, before = dict[str, nn.Module](), channels
    for number, widths in enumerate(stages, start=1):
        layers: dict[str, nn.Module] = {}
        for k, out in enumerate(widths, start=1):
            layers[f"conv{k}"], layers[f"norm{k}"] = _layers(norm, before, out, 3)
            layers[f"relu{k}"], before = nn.ReLU(), out
        if number == len(stages):
            layers["pool"] = nn.MaxPool2d(2) if size == 2 else nn.AdaptiveAvgPool2d(1)
        elif size > 2:
            layers["pool"], size = nn.MaxPool2d(2), size // 2
        made[f"stage{number}"] = _sequential(**layers)
    return _sequential(**made, flatten=nn.Flatten(), head=nn.Linear(before, classes))


register_network("ResNet20", resnet20)
register_network("ResNet18", resnet18)
register_network("VGG16", vgg16)


def build(name: str, *, released: bool = False, **kind: Any) -> nn.Module:
    """A registered network by its name, for images of some channels, classes and size.

    With `released` it is that of the paper's released code: ResNet20 projects its shortcuts, and convolutions are
    initialized as torch does, with rows about 2.4 times shorter than He's if the number of channels is kept.

    >>> type(build("ResNet20", norm="wn").conv1).__name__
    'WeightNormConv2d'
    """
    model = NETWORKS[name](**kind | ({"project": True} if released and name == "ResNet20" else {}))
    if not isinstance(model, nn.Module):
        raise TypeError(f"network {name!r} must be a torch.nn.Module, got {type(model).__name__}")
    for layer in model.modules():
        if released and isinstance(layer, nn.Conv2d) and layer.bias is None:
            layer.reset_parameters()
    return model.train()  # some networks keep parts in evaluation mode there


def network(config: Config, data: Resident) -> tuple[nn.Module, Groups]:
    """The network of a training as its seed makes it, and its rows."""
    kind: dict[str, Any] = {"channels": data.channels, "classes": data.classes, "size": data.size}
    kind |= {name: getattr(config, name) for name in ("norm", "width", "released") if getattr(config, name)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        made = build(config.model, **kind)
    return made, replace(_rows(config.model, config.plugin, **kind), params=dict(made.named_parameters()))


@lru_cache(maxsize=32)
def _rows(model: str, plugin: str, **kind: Any) -> Groups:
    """The rows of a kind of network, found once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made, images = build(model, **kind), torch.randn(8, kind["channels"], kind["size"], kind["size"])
        with torch.no_grad():
            logits = made.eval()(images)
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(found, tuple) or found[:1] != (8,) or found[1:] != (kind["classes"],):
            raise ValueError(f"network {model!r} must return logits, of shape {(8, kind['classes'])} here, got {found}")
        return find_groups(made.train(), images)


def small_cnn(classes: int = 10, width: int = 16) -> nn.Sequential:
    """Three convolutions with BN and a linear head, for digits-sized images.

    >>> [name for name, _ in small_cnn().named_children()]
    ['block1', 'block2', 'block3', 'pool', 'flatten', 'head']
    """
    blocks = {}
    for k, (before, out, stride) in enumerate([(1, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)], 1):
        convolution = nn.Conv2d(before, out, 3, stride, padding=1, bias=False)
        blocks[f"block{k}"] = _sequential(conv=convolution, bn=nn.BatchNorm2d(out), relu=nn.ReLU())
    return _sequential(**blocks, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(2 * width, classes))


def _sequential(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))

"""Blocks of known convolutional architectures."""

import torch
from torch import nn
from torch.nn import functional

from cases._case import Custom, case, fill, images, net, parameter, randn, zero


def _residual() -> Custom:
    return Custom(
        lambda m, x: m.head((m.bn2(m.conv2(functional.relu(m.bn1(m.conv1(x))))) + m.bn3(m.shortcut(x))).relu()),
        conv1=nn.Conv2d(3, 5, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(5),
        conv2=nn.Conv2d(5, 4, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(4),
        shortcut=nn.Conv2d(3, 4, 1, bias=False),
        bn3=nn.BatchNorm2d(4),
        head=nn.Conv2d(4, 2, 1),
    )


def _squeeze_excite(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.bn1(m.conv1(x))
    gate = m.expand(functional.relu(m.squeeze(y.square().mean((2, 3))))).sigmoid()
    return m.head(m.bn2(m.conv2(y * gate[..., None, None])).tanh())


def _convnext(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = m.stem_norm(m.stem(x).permute(0, 2, 3, 1))
    y = m.norm(m.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
    x = x + m.scale * m.project(functional.gelu(m.expand(y)))
    return m.head(m.head_norm(x.mean((1, 2))))


def _demodulated(m: nn.Module, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
    w = m.weight * m.style(style)[:, None, :, None, None]
    w = w * w.square().sum((2, 3, 4), keepdim=True).rsqrt()
    y = functional.conv2d(x.reshape(1, -1, *x.shape[2:]), w.flatten(0, 1), groups=len(x))
    return y.reshape(len(x), -1, *y.shape[2:])


def _attention_gate(m: nn.Module, x: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
    both = functional.relu(m.bn1(m.of_features(x)) + m.bn2(m.of_signal(signal)))
    return m.head(x * m.bn3(m.gate(both)).sigmoid())


def _two_images() -> tuple[tuple[torch.Tensor, ...], dict]:
    return (torch.randn(6, 3, 8, 8), torch.randn(6, 3, 8, 8)), {}


CASES = [
    case(
        "attention_gate",  # of the Attention U-Net: its last filter is alone
        lambda: Custom(
            _attention_gate,
            of_features=nn.Conv2d(3, 5, 1, bias=False),
            bn1=nn.BatchNorm2d(5),
            of_signal=nn.Conv2d(3, 5, 1, bias=False),
            bn2=nn.BatchNorm2d(5),
            gate=nn.Conv2d(5, 1, 1, bias=False),
            bn3=nn.BatchNorm2d(1),
            head=nn.Conv2d(3, 2, 1),
        ),
        _two_images,
        rows={"of_features.weight": "filter", "of_signal.weight": "filter", "gate.weight": "filter"},
        facts=("bn1.weight bn1.bias bn2.weight bn2.bias",),
    ),
    case(
        "gain_of_channels_bn",  # every number of this gain is invariant, in the shape of one filter
        lambda: Custom(
            lambda m, x: m.head(m.bn(x * m.gain).tanh()),
            gain=nn.Parameter(torch.rand(1, 6, 1, 1) + 0.5),
            bn=nn.BatchNorm2d(6),
            head=nn.Conv2d(6, 2, 1),
        ),
        randn(6, 6, 8, 8),
        no_effect="gain",
    ),
    case(
        "two_layers_bn",
        lambda: net(
            conv1=nn.Conv2d(3, 5, 3),
            bn1=nn.BatchNorm2d(5),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(5, 6, 3, bias=False),
            bn2=nn.BatchNorm2d(6),
            relu2=nn.ReLU(),
            head=nn.Conv2d(6, 2, 1),
        ),
        images,
        rows={"conv1.weight": "filter", "conv2.weight": "filter"},
        no_effect="conv1.bias",
        facts=("bn1.weight bn1.bias",),
    ),
    case(
        "residual_block",
        _residual,
        images,
        rows={"conv1.weight": "filter", "conv2.weight": "filter", "shortcut.weight": "filter"},
        facts=("bn1.weight bn1.bias",),
    ),
    case(
        "residual_block_zero_gain",  # at the start nothing behind bn2 is felt, later it is
        lambda: zero(_residual(), "bn2.weight"),
        images,
        rows={"conv1.weight": "filter", "conv2.weight": "filter", "shortcut.weight": "filter"},
        facts=("bn1.weight bn1.bias",),
    ),
    case(
        "inverted_bottleneck",
        lambda: net(
            expand=nn.Conv2d(3, 6, 1, bias=False),
            bn1=nn.BatchNorm2d(6),
            act1=nn.Hardswish(),
            depthwise=nn.Conv2d(6, 6, 3, groups=6, bias=False),
            bn2=nn.BatchNorm2d(6),
            act2=nn.SiLU(),
            project=nn.Conv2d(6, 4, 1, bias=False),
            bn3=nn.BatchNorm2d(4),
            head=nn.Conv2d(4, 2, 1),
        ),
        images,
        rows={"expand.weight": "filter", "depthwise.weight": "filter", "project.weight": "filter"},
    ),
    case(
        "squeeze_excite",
        lambda: Custom(
            _squeeze_excite,
            conv1=nn.Conv2d(3, 5, 3, bias=False),
            bn1=nn.BatchNorm2d(5),
            squeeze=nn.Linear(5, 4),
            expand=nn.Linear(4, 5),
            conv2=nn.Conv2d(5, 4, 3, bias=False),
            bn2=nn.BatchNorm2d(4),
            head=nn.Conv2d(4, 2, 1),
        ),
        images,
        rows={"conv1.weight": "filter", "conv2.weight": "filter"},
    ),
    case(
        "dense_block",  # features beside the raw input, normalized together
        lambda: Custom(
            lambda m, x: m.bn2(m.conv2(m.bn1(torch.cat([x, m.conv1(x)], 1)).sigmoid())).tanh(),
            conv1=nn.Conv2d(3, 4, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(7),
            conv2=nn.Conv2d(7, 4, 3, bias=False),
            bn2=nn.BatchNorm2d(4),
        ),
        images,
        rows={"conv1.weight": "filter", "conv2.weight": "filter"},
    ),
    case(
        "convnext_block",  # the branch starts at a millionth of the stream
        lambda: Custom(
            _convnext,
            stem=nn.Conv2d(3, 6, 2, stride=2),
            stem_norm=nn.LayerNorm(6),
            depthwise=nn.Conv2d(6, 6, 3, padding=1, groups=6),
            norm=nn.LayerNorm(6),
            expand=nn.Linear(6, 12),
            project=nn.Linear(12, 6),
            scale=nn.Parameter(fill(torch.empty(6), 1e-6)),
            head_norm=nn.LayerNorm(6),
            head=nn.Linear(6, 3),
        ),
        images,
        joint={"stem.weight stem.bias": "tensor", "depthwise.weight depthwise.bias": "tensor"},
        facts=("stem_norm.weight stem_norm.bias depthwise.bias scale",),
    ),
    case(
        "demodulated_conv",  # no registered norm: the filters and the styles are divided out
        lambda: Custom(_demodulated, weight=parameter(4, 3, 3, 3), style=nn.Linear(5, 3)),
        lambda: ((torch.randn(4, 3, 6, 6), torch.randn(4, 5)), {}),
        rows={"weight": "filter"},
        joint={"style.weight style.bias": "tensor"},
    ),
    case(
        "norm_and_bypass",  # the same convolution also reaches the output unnormalized
        lambda: Custom(
            lambda m, x: m.bn(m.conv(x)).tanh() + m.conv(x),
            conv=nn.Conv2d(3, 4, 3, bias=False),
            bn=nn.BatchNorm2d(4),
        ),
        images,
    ),
    case(
        "norm_after_norm",  # what the first one adds or scales, the second one removes
        lambda: net(
            conv=nn.Conv2d(3, 5, 3),
            norm1=nn.InstanceNorm2d(5, affine=True),
            norm2=nn.BatchNorm2d(5),
            act=nn.Tanh(),
            head=nn.Conv2d(5, 2, 1),
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias norm1.weight norm1.bias",
    ),
    case(
        "scalar_before_bn",
        lambda: Custom(
            lambda m, x: m.head(m.bn(m.conv(x) * m.alpha).tanh()),
            conv=nn.Conv2d(3, 5, 3, bias=False),
            alpha=nn.Parameter(fill(torch.empty(()), 0.7)),
            bn=nn.BatchNorm2d(5),
            head=nn.Conv2d(5, 2, 1),
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="alpha",
    ),
    case(
        "scale_then_mixing_bn",  # a gain per channel in front of a mixing layer: one number is free
        lambda: Custom(
            lambda m, x: m.head(m.bn(m.mix(m.bn0(x) * m.gain[:, None, None])).tanh()),
            bn0=nn.BatchNorm2d(3, affine=False),
            gain=nn.Parameter(torch.rand(3) + 0.5),
            mix=nn.Conv2d(3, 5, 3, bias=False),
            bn=nn.BatchNorm2d(5),
            head=nn.Conv2d(5, 2, 1),
        ),
        randn(6, 3, 6, 6),
        rows={"mix.weight": "filter"},
        facts=("gain",),
    ),
]

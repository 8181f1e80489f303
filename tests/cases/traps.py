"""Weights that look invariant to one kind of test and are not, or the reverse."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from cases._case import Apply, Custom, case, images, net, parameter, randn, vectors


class FrozenBatchNorm(nn.BatchNorm2d):
    """Uses its running statistics in training too."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
        return super().train(False)


def _noisy(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y + torch.randn_like(y)).tanh()


def _noisy_gain(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y * (1 + 0.3 * torch.randn_like(y))).tanh()


def _steep(activation: nn.Module, norm: nn.Module | None = None, *, bias: bool = False) -> nn.Module:
    """A convolution ten times larger than usual, an activation, a normalization."""
    conv = nn.Conv2d(3, 16, 3, bias=bias)
    nn.init.normal_(conv.weight, std=2.0)
    return net(conv=conv, act=activation, norm=norm or nn.BatchNorm2d(16), tanh=nn.Tanh(), head=nn.Conv2d(16, 2, 1))


CASES = [
    case(
        "detached_length",  # the values do not change with the radius, but the gradient is not tangent
        lambda: Custom(lambda m, x: (functional.linear(x, m.w / m.w.norm().detach())).tanh(), w=parameter(5, 6)),
        vectors,
        facts=("w",),
    ),
    case(
        "detached_radius",  # the gradient is tangent, but the values change with the radius
        lambda: Custom(
            lambda m, x: functional.linear(x, m.w.norm().detach() * m.w / m.w.norm()).tanh(), w=parameter(5, 6)
        ),
        vectors,
    ),
    case(
        "gelu_nearly_relu_before_bn",  # with large weights a smooth activation is homogeneous up to some percent
        lambda: _steep(nn.GELU()),
        images,
    ),
    case(
        "gelu_mixer_before_bn",  # weight and bias balance each other up to what GELU is not ReLU
        lambda: net(
            stem=nn.Conv2d(3, 16, 2, stride=2),
            act1=nn.GELU(),
            bn1=nn.BatchNorm2d(16),
            depthwise=nn.Conv2d(16, 16, 3, padding=1, groups=16),
            act2=nn.GELU(),
            bn2=nn.BatchNorm2d(16),
            head=nn.Conv2d(16, 2, 1),
        ),
        images,
    ),
    case("silu_nearly_relu_before_bn", lambda: _steep(nn.SiLU()), images),
    case("hardswish_nearly_relu_before_bn", lambda: _steep(nn.Hardswish()), images),
    case("gelu_nearly_relu_before_gn", lambda: _steep(nn.GELU(), nn.GroupNorm(4, 16)), images),  # few rows
    case("mish_nearly_relu_before_gn", lambda: _steep(nn.Mish(), nn.GroupNorm(2, 16), bias=True), images),
    case("mish_nearly_relu_before_ln", lambda: _steep(nn.Mish(), nn.GroupNorm(1, 16)), images),  # one row
    case(
        "written_out_swish_before_ln",
        lambda: _steep(Apply(lambda x: x * torch.sigmoid(1.7 * x)), nn.GroupNorm(1, 16)),
        images,
    ),
    case("polynomial_before_bn", lambda: _steep(Apply(lambda x: x + x**3)), images),  # falls exactly as ε does
    case("threshold_before_bn", lambda: _steep(nn.Threshold(0.5, 0.0)), images),  # a jump that no gradient sees
    case(
        "jump_before_ln", lambda: _steep(Apply(lambda x: torch.where(x > 0.5, x, 0.1 * x)), nn.GroupNorm(1, 16)), images
    ),
    case(
        "shifted_squares_before_gn",  # what is added is removed with the mean
        lambda: _steep(Apply(lambda x: 0.9 * x.relu() ** 2 - 0.4), nn.GroupNorm(4, 16)),
        images,
        rows={"conv.weight": 4},
    ),
    case(
        "frozen_statistics",
        lambda: net(conv=nn.Conv2d(3, 5, 3, bias=False), bn=FrozenBatchNorm(5), act=nn.Tanh(), head=nn.Conv2d(5, 2, 1)),
        images,
    ),
    case(
        "noise_before_bn",
        lambda: Custom(_noisy, conv=nn.Conv2d(3, 5, 3, bias=False), bn=nn.BatchNorm2d(5)),
        images,
    ),
    case(
        "noisy_gain_before_bn",
        lambda: Custom(_noisy_gain, conv=nn.Conv2d(3, 5, 3, bias=False), bn=nn.BatchNorm2d(5)),
        images,
        rows={"conv.weight": "filter"},
    ),
    case(
        "constant_before_bn",  # a fixed map added to the features is felt by every filter
        lambda: Custom(
            lambda m, x: m.bn(m.conv(x) + torch.linspace(-1, 1, 6, dtype=x.dtype)).tanh(),
            conv=nn.Conv2d(3, 5, 3, bias=False),
            bn=nn.BatchNorm2d(5),
        ),
        images,
    ),
    case(
        "saturating_way_past_bn",  # one filter of many is felt elsewhere too, until it is large
        lambda: Custom(
            lambda m, x: (lambda y: m.head(m.bn(y).relu()) + y[:, :1].clamp(-1, 1))(m.conv(x)),
            conv=nn.Conv2d(3, 16, 3, bias=False),
            bn=nn.BatchNorm2d(16),
            head=nn.Conv2d(16, 2, 1),
        ),
        images,
    ),
    case(
        "residual_of_input_bn",
        lambda: Custom(
            lambda m, x: m.bn(x + m.conv(x)).tanh(),
            conv=nn.Conv2d(3, 3, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(3),
        ),
        images,
    ),
    case(
        "norm_before_weight",
        lambda: net(bn=nn.BatchNorm2d(3), act=nn.Tanh(), conv=nn.Conv2d(3, 5, 3)),
        images,
    ),
    case(
        "mean_removed_only",  # centered but not scaled
        lambda: Custom(lambda m, x: (m.fc(x) - m.fc(x).mean(0)).tanh(), fc=nn.Linear(6, 5)),
        vectors,
        no_effect="fc.bias",
    ),
    case(
        "soft_norm",  # divided by 1 + length
        lambda: Custom(lambda m, x: m.fc(x) / (1 + m.fc(x).norm(dim=-1, keepdim=True)), fc=nn.Linear(6, 5)),
        vectors,
    ),
    case(
        "half_power_norm",  # divided by the root of its length: half of the scale is left
        lambda: Custom(
            lambda m, x: m.fc(x) / m.fc(x).norm(dim=-1, keepdim=True).sqrt(), fc=nn.Linear(6, 5, bias=False)
        ),
        vectors,
    ),
    case(
        "ratio_of_layers",  # invariant together, and each is the inverse of the other alone
        lambda: Custom(
            lambda m, x: (m.a(x) / m.b(x).norm(dim=-1, keepdim=True)).tanh(),
            a=nn.Linear(6, 5, bias=False),
            b=nn.Linear(6, 4, bias=False),
        ),
        vectors,
        joint={"a.weight b.weight": "tensor"},
    ),
    case(
        "nearly_unit_length",  # |y|^0.01 is left: its defect stays, as that of a row does whose growth is undone
        lambda: net(
            fc=nn.Linear(6, 8, bias=False),
            norm=Apply(lambda y: y / y.norm(dim=-1, keepdim=True) ** 0.99),
            act=nn.Tanh(),
            head=nn.Linear(8, 3),
        ),
        vectors,
    ),
    case(
        "logarithm_past_ln",
        lambda: Custom(
            lambda m, x: (lambda y: m.head(m.norm(y).tanh() + 2e-3 * y.norm(dim=-1, keepdim=True).log()))(m.fc(x)),
            fc=nn.Linear(6, 8, bias=False),
            norm=nn.LayerNorm(8),
            head=nn.Linear(8, 3),
        ),
        vectors,
    ),
    case(
        "bn_of_one_branch_of_a_product",
        lambda: Custom(
            lambda m, x: m.bn(m.a(x)) * m.b(x),
            a=nn.Linear(6, 5, bias=False),
            bn=nn.BatchNorm1d(5),
            b=nn.Linear(6, 5),
        ),
        vectors,
        rows={"a.weight": "filter"},
    ),
    case(
        "tiny_weights_bn",  # small, but the variance still wins over epsilon
        lambda: net(conv=_scaled(nn.Conv2d(3, 5, 3, bias=False), 0.3), bn=nn.BatchNorm2d(5), act=nn.Tanh()),
        images,
        rows={"conv.weight": "filter"},
    ),
    case(
        "huge_weights_bn",
        lambda: net(conv=_scaled(nn.Conv2d(3, 5, 3, bias=False), 300.0), bn=nn.BatchNorm2d(5), act=nn.Tanh()),
        images,
        rows={"conv.weight": "filter"},
    ),
    case(
        "large_epsilon",  # a norm whose epsilon is of the size of the variance is not one
        lambda: Custom(
            lambda m, x: functional.batch_norm(m.conv(x), None, None, training=True, eps=1.0).tanh(),
            conv=nn.Conv2d(3, 5, 3, bias=False),
        ),
        randn(6, 3, 6, 6),
    ),
]


def _scaled(layer: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        layer.weight.mul_(factor)
    return layer

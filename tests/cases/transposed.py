"""Weights whose outputs are not on dimension 0: transposed convolutions and products x @ w."""

import torch
from torch import nn

from cases._case import Custom, case, net, parameter, randn, vectors

_maps = randn(4, 4, 4, 4)


def _head(channels: int = 6) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Conv2d(channels, 2, 1))


CASES = [
    case(
        "transposed_bn",
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3), bn=nn.BatchNorm2d(6), head=_head()),
        _maps,
        rows={"conv.weight": ("axis", 1)},
        no_effect="conv.bias",
    ),
    case(
        "transposed1d_in",
        lambda: net(
            conv=nn.ConvTranspose1d(5, 3, 3, bias=False),
            norm=nn.InstanceNorm1d(3),
            act=nn.GELU(),
            head=nn.Conv1d(3, 2, 1),
        ),
        randn(4, 5, 7),
        rows={"conv.weight": ("axis", 1)},
    ),
    case(
        "transposed3d_bn",
        lambda: net(conv=nn.ConvTranspose3d(2, 3, 2), bn=nn.BatchNorm3d(3), act=nn.GELU(), head=nn.Conv3d(3, 2, 1)),
        randn(4, 2, 3, 3, 3),
        rows={"conv.weight": ("axis", 1)},
        no_effect="conv.bias",
    ),
    case(
        "transposed_grouped_bn",
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3, groups=2), bn=nn.BatchNorm2d(6), head=_head()),
        _maps,
        rows={"conv.weight": ("grid", 2, -1)},
        no_effect="conv.bias",
    ),
    case(
        "transposed_depthwise_bn",
        lambda: net(conv=nn.ConvTranspose2d(4, 4, 3, groups=4, bias=False), bn=nn.BatchNorm2d(4), head=_head(4)),
        _maps,
        rows={"conv.weight": "filter"},
    ),
    case(
        "transposed_ln",
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3), norm=nn.GroupNorm(1, 6), head=_head()),
        _maps,
        joint={"conv.weight conv.bias": "tensor"},
    ),
    case(
        "transposed_gn",
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3, bias=False), norm=nn.GroupNorm(2, 6), head=_head()),
        _maps,
        rows={"conv.weight": ("grid", 1, 2)},
    ),
    case(
        "transposed_bias_gn",  # the bias goes with dimension 1 of the weight
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3), norm=nn.GroupNorm(2, 6), head=_head()),
        _maps,
        joint={"conv.weight conv.bias": ("grid", 1, 2)},
    ),
    case(
        "transposed_bias_gn_as_many_inputs",  # shapes alone do not say which dimension the bias goes with
        lambda: net(conv=nn.ConvTranspose2d(4, 4, 3), norm=nn.GroupNorm(2, 4), head=_head(4)),
        _maps,
        joint={"conv.weight conv.bias": ("grid", 1, 2)},
    ),
    case(
        "transposed_relu_bn",
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3), act=nn.ReLU(), bn=nn.BatchNorm2d(6), head=_head()),
        _maps,
        joint={"conv.weight conv.bias": ("axis", 1)},
    ),
    case(
        "transposed_grouped_relu_bn",
        lambda: net(conv=nn.ConvTranspose2d(4, 6, 3, groups=2), act=nn.ReLU(), bn=nn.BatchNorm2d(6), head=_head()),
        _maps,
        joint={"conv.weight conv.bias": ("grid", 2, -1)},
    ),
    case(
        "transposed_grouped_bias_gn",
        lambda: net(conv=nn.ConvTranspose2d(4, 8, 3, groups=2), norm=nn.GroupNorm(4, 8), head=_head(8)),
        _maps,
        joint={"conv.weight conv.bias": ("grid", 2, 2)},
    ),
    case(
        "transposed_convs_added_bn",
        lambda: Custom(
            lambda m, x: m.head(m.bn(m.a(x) + m.b(x.sin()))),
            a=nn.ConvTranspose2d(4, 6, 3, bias=False),
            b=nn.ConvTranspose2d(4, 6, 3, bias=False),
            bn=nn.BatchNorm2d(6),
            head=_head(),
        ),
        _maps,
        joint={"a.weight b.weight": ("axis", 1)},
    ),
    case(
        "product_bn",
        lambda: Custom(
            lambda m, x: m.head(m.bn(x @ m.w).tanh()),
            w=parameter(6, 5),
            bn=nn.BatchNorm1d(5),
            head=nn.Linear(5, 3),
        ),
        vectors,
        rows={"w": ("axis", 1)},
    ),
    case(
        "product_bias_relu_bn",
        lambda: Custom(
            lambda m, x: m.head(m.bn((x @ m.w + m.b).relu()).tanh()),
            w=parameter(6, 5),
            b=parameter(5),
            bn=nn.BatchNorm1d(5),
            head=nn.Linear(5, 3),
        ),
        vectors,
        joint={"w b": ("axis", 1)},
    ),
    case(
        "einsum_heads_rms_norm",  # w[d, h, k]: a head is a slice of the middle dimension
        lambda: Custom(
            lambda m, x: m.head(m.norm(torch.einsum("nd,dhk->nhk", x, m.w)).flatten(1).tanh()),
            w=parameter(6, 2, 4),
            norm=nn.RMSNorm(4),
            head=nn.Linear(8, 3),
        ),
        vectors,
        rows={"w": ("axis", 1)},
    ),
    case(
        "einsum_bn",  # w[h, d, k]: every (h, k) has its own statistics
        lambda: Custom(
            lambda m, x: m.head(m.bn(torch.einsum("nd,hdk->nhk", x, m.w).flatten(1)).tanh()),
            w=parameter(2, 6, 4),
            bn=nn.BatchNorm1d(8),
            head=nn.Linear(8, 3),
        ),
        vectors,
        rows={"w": ("grid", -1, 1, -1)},
    ),
    case(
        "einsum_inputs_first_bn",  # w[d, h, k]
        lambda: Custom(
            lambda m, x: m.head(m.bn(torch.einsum("nd,dhk->nhk", x, m.w).flatten(1)).tanh()),
            w=parameter(6, 2, 4),
            bn=nn.BatchNorm1d(8),
            head=nn.Linear(8, 3),
        ),
        vectors,
        rows={"w": ("grid", 1, -1, -1)},
    ),
]

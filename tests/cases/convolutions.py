"""One convolution in front of each kind of normalization."""

import torch
from torch import nn
from torch.nn import functional

from cases._case import Apply, Custom, case, images, net, randn


def _conv(out: int = 6, *, bias: bool = True, **options) -> nn.Conv2d:
    return nn.Conv2d(3, out, 3, bias=bias, **options)


def _head(channels: int = 6) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Conv2d(channels, 2, 1))


def _maxout(pieces: int) -> Apply:
    return Apply(lambda x: x.unflatten(1, (-1, pieces)).amax(2))


CASES = [
    case(
        "conv_bn",
        lambda: net(conv=_conv(), bn=nn.BatchNorm2d(6), head=_head()),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_bn_without_affine",
        lambda: net(conv=_conv(bias=False), bn=nn.BatchNorm2d(6, affine=False), head=_head()),
        images,
        rows={"conv.weight": "filter"},
    ),
    case(
        "conv_bn_without_running_statistics",
        lambda: net(conv=_conv(), bn=nn.BatchNorm2d(6, track_running_stats=False), head=_head()),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_sync_bn",
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(net(conv=_conv(), bn=nn.BatchNorm2d(6), head=_head())),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv1d_bn",
        lambda: net(conv=nn.Conv1d(3, 5, 3), bn=nn.BatchNorm1d(5), act=nn.GELU(), head=nn.Conv1d(5, 2, 1)),
        randn(6, 3, 9),
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv3d_bn",
        lambda: net(conv=nn.Conv3d(2, 4, 2), bn=nn.BatchNorm3d(4), act=nn.GELU(), head=nn.Conv3d(4, 2, 1)),
        randn(4, 2, 4, 4, 4),
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "grouped_conv_bn",
        lambda: net(conv=nn.Conv2d(4, 6, 3, groups=2), bn=nn.BatchNorm2d(6), head=_head()),
        randn(6, 4, 6, 6),
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "depthwise_conv_bn",
        lambda: net(conv=nn.Conv2d(3, 6, 3, groups=3, bias=False), bn=nn.BatchNorm2d(6), head=_head()),
        images,
        rows={"conv.weight": "filter"},
    ),
    case(
        "depthwise_then_pointwise_bn",  # no norm between them: the depthwise filters mix
        lambda: net(
            depthwise=nn.Conv2d(3, 3, 3, groups=3, bias=False),
            pointwise=nn.Conv2d(3, 6, 1, bias=False),
            bn=nn.BatchNorm2d(6),
            head=_head(),
        ),
        images,
        rows={"depthwise.weight": "tensor", "pointwise.weight": "filter"},
    ),
    case(
        "conv_relu_depthwise_bn",  # every filter keeps its own channel up to the norm
        lambda: net(
            conv=_conv(),
            relu=nn.ReLU(),
            depthwise=nn.Conv2d(6, 6, 3, groups=6),
            bn=nn.BatchNorm2d(6),
            head=_head(),
        ),
        images,
        rows={"depthwise.weight": "filter"},
        joint={"conv.weight conv.bias": "filter"},
        no_effect="depthwise.bias",
    ),
    case(
        "conv_gn",
        lambda: net(conv=_conv(), gn=nn.GroupNorm(2, 6), head=_head()),
        images,
        joint={"conv.weight conv.bias": 2},
    ),
    case(
        "conv_gn_without_bias",
        lambda: net(conv=_conv(bias=False), gn=nn.GroupNorm(3, 6), head=_head()),
        images,
        rows={"conv.weight": 3},
    ),
    case(
        "conv_gn_one_group",
        lambda: net(conv=_conv(), gn=nn.GroupNorm(1, 6), head=_head()),
        images,
        joint={"conv.weight conv.bias": "tensor"},
    ),
    case(
        "conv_gn_one_channel_per_group",  # an instance norm by another name
        lambda: net(conv=_conv(), gn=nn.GroupNorm(6, 6), head=_head()),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "grouped_conv_gn",  # two groups in the convolution, four in the norm
        lambda: net(conv=nn.Conv2d(4, 8, 3, groups=2, bias=False), gn=nn.GroupNorm(4, 8), head=_head(8)),
        randn(4, 4, 6, 6),
        rows={"conv.weight": 4},
    ),
    case(
        "conv_in",
        lambda: net(conv=_conv(), norm=nn.InstanceNorm2d(6), head=_head()),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv1d_in_affine_running_statistics",
        lambda: net(
            conv=nn.Conv1d(3, 5, 3),
            norm=nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
            act=nn.GELU(),
            head=nn.Conv1d(5, 2, 1),
        ),
        randn(4, 3, 12),
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_ln_over_image",
        lambda: net(conv=_conv(), norm=nn.LayerNorm((6, 6, 6)), head=_head()),
        images,
        joint={"conv.weight conv.bias": "tensor"},
    ),
    case(
        "conv_ln_over_image_without_affine",
        lambda: net(conv=_conv(bias=False), norm=nn.LayerNorm((6, 6, 6), elementwise_affine=False), head=_head()),
        images,
        rows={"conv.weight": "tensor"},
    ),
    case(
        "conv_ln_over_width",  # never mixes channels, and removes what is constant along the width
        lambda: net(conv=_conv(), norm=nn.LayerNorm(6), head=_head()),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_relu_bn",
        lambda: net(conv=_conv(), relu=nn.ReLU(), bn=nn.BatchNorm2d(6), head=_head()),
        images,
        joint={"conv.weight conv.bias": "filter"},
    ),
    case(
        "conv_gelu_bn",
        lambda: net(conv=_conv(bias=False), act=nn.GELU(), bn=nn.BatchNorm2d(6), head=_head()),
        images,
    ),
    case(
        "conv_pools_bn",
        lambda: net(
            conv=_conv(),
            maxpool=nn.MaxPool2d(2, 1),
            avgpool=nn.AvgPool2d(2, 1),
            bn=nn.BatchNorm2d(6),
            head=_head(),
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_dropout_bn",
        lambda: net(conv=_conv(bias=False), drop=nn.Dropout2d(0.3), bn=nn.BatchNorm2d(6), head=_head()),
        images,
        rows={"conv.weight": "filter"},
    ),
    case(
        "conv_pixelshuffle_bn",  # four filters make one channel
        lambda: net(conv=_conv(12), shuffle=nn.PixelShuffle(2), bn=nn.BatchNorm2d(3), head=_head(3)),
        images,
        joint={"conv.weight conv.bias": 3},
    ),
    case(
        "conv_pixelshuffle_bn_without_bias",
        lambda: net(conv=_conv(8, bias=False), shuffle=nn.PixelShuffle(2), bn=nn.BatchNorm2d(2), head=_head(2)),
        images,
        rows={"conv.weight": 2},
    ),
    case(
        "conv_channelshuffle_bn",
        lambda: net(
            conv=_conv(), shuffle=Apply(lambda x: functional.channel_shuffle(x, 2)), bn=nn.BatchNorm2d(6), head=_head()
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_channelshuffle_gn",  # each norm group takes every other filter: not blocks, so only the whole
        lambda: net(
            conv=_conv(bias=False),
            shuffle=Apply(lambda x: functional.channel_shuffle(x, 3)),
            gn=nn.GroupNorm(2, 6),
            head=_head(),
        ),
        images,
        rows={"conv.weight": "tensor"},
    ),
    case(
        "conv_maxout_bn",
        lambda: net(conv=_conv(), maxout=_maxout(3), bn=nn.BatchNorm2d(2), head=_head(2)),
        images,
        joint={"conv.weight conv.bias": 2},
    ),
    case(
        "conv_glu_bn",  # the half that is gated is invariant, the gate is not
        lambda: net(conv=_conv(12, bias=False), glu=nn.GLU(dim=1), bn=nn.BatchNorm2d(6), head=_head()),
        images,
    ),
    case(
        "convs_concatenated_bn",
        lambda: Custom(
            lambda m, x: m.head(m.bn(torch.cat([m.a(x), m.b(x)], 1))),
            a=_conv(4, bias=False),
            b=_conv(2),
            bn=nn.BatchNorm2d(6),
            head=_head(),
        ),
        images,
        rows={"a.weight": "filter", "b.weight": "filter"},
        no_effect="b.bias",
    ),
    case(
        "convs_added_bn",
        lambda: Custom(
            lambda m, x: m.head(m.bn(m.a(x) + m.b(x[..., 1:-1, 1:-1]))),
            a=_conv(),
            b=nn.Conv2d(3, 6, 1),
            bn=nn.BatchNorm2d(6),
            head=_head(),
        ),
        images,
        joint={"a.weight b.weight": "filter"},
        no_effect="a.bias b.bias",
    ),
    case(
        "conv_local_response_norm",
        lambda: net(conv=_conv(), norm=nn.LocalResponseNorm(3), head=_head()),
        images,
    ),
]

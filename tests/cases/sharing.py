"""Parameters that are tied, used twice, frozen or not used at all."""

import torch
from torch import nn
from torch.nn import functional

from cases._case import Apply, Custom, case, freeze, images, net, parameter, randn, tokens, vectors, zero


def _head(features: int = 8) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(features, 3))


def _language_model() -> nn.Module:
    model = net(embed=nn.Embedding(11, 8), ln=nn.LayerNorm(8), act=nn.Tanh(), head=nn.Linear(8, 11))
    model.head.weight = model.embed.weight
    return model


def _twins() -> nn.Module:
    model = Custom(
        lambda m, x: m.head(torch.cat([m.bn1(m.a(x)), m.bn2(m.b(x.sin()))], 1)),
        a=nn.Linear(6, 4, bias=False),
        bn1=nn.BatchNorm1d(4),
        b=nn.Linear(6, 4, bias=False),
        bn2=nn.BatchNorm1d(4),
        head=_head(),
    )
    model.b.weight = model.a.weight
    return model


def _linear_ln() -> nn.Module:
    return net(fc=nn.Linear(6, 8), ln=nn.LayerNorm(8), head=_head())


CASES = [
    case("tied_embedding_and_head", _language_model, tokens(6, 7)),
    case("tied_layers_bn", _twins, vectors, rows={"a.weight": "filter"}),
    case(
        "conv_used_twice_bn",
        lambda: Custom(
            lambda m, x: m.bn2(m.conv(m.bn1(m.conv(x)).sigmoid())).tanh(),
            conv=nn.Conv2d(3, 3, 3),
            bn1=nn.BatchNorm2d(3),
            bn2=nn.BatchNorm2d(3),
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="conv.bias",
    ),
    case(
        "conv_squared_bn",  # used twice in front of one norm: free, but as a whole
        lambda: Custom(
            lambda m, x: m.bn(m.conv(functional.relu(m.conv(x)))).tanh(),
            conv=nn.Conv2d(3, 3, 3, bias=False),
            bn=nn.BatchNorm2d(3),
        ),
        images,
        rows={"conv.weight": "tensor"},
    ),
    case(
        "used_once_without_norm",
        lambda: Custom(
            lambda m, x: m.bn(m.fc(x)).tanh() + m.fc(x.sin()).tanh(), fc=nn.Linear(6, 5), bn=nn.BatchNorm1d(5)
        ),
        vectors,
    ),
    case(
        "frozen_layer",
        lambda: freeze(
            net(
                a=nn.Linear(6, 8),
                bn=nn.BatchNorm1d(8),
                act=nn.GELU(),
                b=nn.Linear(8, 7),
                ln=nn.LayerNorm(7),
                head=_head(7),
            ),
            "a.weight",
            "a.bias",
            "bn.weight",
        ),
        vectors,
        joint={"b.weight b.bias": "tensor"},
        frozen="a.weight a.bias bn.weight",
    ),
    case("frozen_bias_ln", lambda: freeze(_linear_ln(), "fc.bias"), vectors, frozen="fc.bias"),
    case(
        "frozen_zero_bias_ln",  # a bias that stays zero takes nothing from the weight
        lambda: freeze(zero(_linear_ln(), "fc.bias"), "fc.bias"),
        vectors,
        rows={"fc.weight": "tensor"},
        frozen="fc.bias",
    ),
    case("frozen_weight_ln", lambda: freeze(_linear_ln(), "fc.weight"), vectors, frozen="fc.weight"),
    case(
        "low_rank_adapter_ln",  # what is added to a frozen weight is not free
        lambda: freeze(
            Custom(
                lambda m, x: m.head(m.ln(functional.linear(x, m.base + m.b @ m.a))),
                base=parameter(8, 6),
                a=parameter(2, 6),
                b=parameter(8, 2),
                ln=nn.LayerNorm(8),
                head=_head(),
            ),
            "base",
        ),
        vectors,
        frozen="base",
    ),
    case(
        "unused_parameters",
        lambda: Custom(
            lambda m, x: m.bn(m.conv(x)).tanh(),
            conv=nn.Conv2d(3, 4, 3, bias=False),
            bn=nn.BatchNorm2d(4),
            spare=nn.Conv2d(3, 4, 3),
            token=parameter(1, 4),
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="spare.weight spare.bias token",
    ),
    case(
        "dead_branch",
        lambda: Custom(
            lambda m, x: m.bn(m.conv(x)).tanh() + 0 * m.dead_bn(m.dead(x)).tanh(),
            conv=nn.Conv2d(3, 4, 3, bias=False),
            bn=nn.BatchNorm2d(4),
            dead=nn.Conv2d(3, 4, 3, bias=False),
            dead_bn=nn.BatchNorm2d(4),
        ),
        images,
        rows={"conv.weight": "filter"},
        no_effect="dead.weight dead_bn.weight dead_bn.bias",
    ),
    case(
        "auxiliary_output_not_returned",
        lambda: Custom(
            lambda m, x: (m.bn(m.a(x)).tanh(), m.b(x).detach()),
            a=nn.Linear(6, 5, bias=False),
            bn=nn.BatchNorm1d(5),
            b=nn.Linear(6, 5),
        ),
        vectors,
        rows={"a.weight": "filter"},
        no_effect="b.weight b.bias",
    ),
    case(
        "parameter_list",
        lambda: Custom(
            lambda m, x: torch.stack([functional.layer_norm(x @ w, (4,), eps=1e-9) for w in m.heads], 1).tanh(),
            heads=nn.ParameterList([parameter(6, 4), parameter(6, 4)]),
        ),
        vectors,
        rows={"heads.0": "tensor", "heads.1": "tensor"},
    ),
    case(
        "custom_norm",
        lambda: net(fc=nn.Linear(6, 8), norm=Apply(lambda x: x / x.norm(dim=-1, keepdim=True)), head=_head()),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "custom_norm_mean_absolute",
        lambda: net(
            conv=nn.Conv1d(3, 4, 3, bias=False),
            norm=Apply(lambda x: x / x.abs().mean((0, 2), keepdim=True)),
            act=nn.Tanh(),
            head=nn.Conv1d(4, 2, 1),
        ),
        randn(6, 3, 9),
        rows={"conv.weight": "filter"},
    ),
]

"""Linear layers in front of a normalization, chains that keep the scale, normalized outputs."""

import torch
from torch import nn
from torch.nn import functional

from cases._case import Apply, Custom, case, freeze, net, parameter, randn, vectors, zero


def _head(features: int = 8) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(features, 3))


def _normalize(dim: int = -1) -> Apply:
    return Apply(lambda x: functional.normalize(x, dim=dim))


def _soft_experts(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate = m.gate(x).softmax(-1)
    return m.head(m.norm(gate[:, :1] * m.a(x) + gate[:, 1:] * m.b(x)))


CASES = [
    case(
        "linear_bn",
        lambda: net(fc=nn.Linear(6, 8), bn=nn.BatchNorm1d(8), head=_head()),
        vectors,
        rows={"fc.weight": "filter"},
        no_effect="fc.bias",
    ),
    case(
        "one_output_bn",  # one filter, in the shape of a gain
        lambda: net(fc=nn.Linear(6, 1), bn=nn.BatchNorm1d(1), head=_head(1)),
        vectors,
        rows={"fc.weight": "filter"},
        no_effect="fc.bias",
    ),
    case(
        "linear_ln",
        lambda: net(fc=nn.Linear(6, 8), ln=nn.LayerNorm(8), head=_head()),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "gated_linear_bias_ln",  # {up.weight, down.bias} is another such set, and the bias is not up's
        lambda: Custom(
            lambda m, x: m.head(m.ln(m.down(functional.silu(m.gate(x)) * m.up(x)))),
            up=nn.Linear(6, 10, bias=False),
            gate=nn.Linear(6, 10, bias=False),
            down=nn.Linear(10, 8),
            ln=nn.LayerNorm(8),
            head=_head(),
        ),
        vectors,
        joint={"down.weight down.bias": "tensor"},
        facts=("up.weight down.bias",),
    ),
    case(
        "linear_ln_zero_bias",  # at zero the bias hides that the weight needs it
        lambda: zero(net(fc=nn.Linear(6, 8), ln=nn.LayerNorm(8), head=_head()), "fc.bias"),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "linear_ln_without_bias",
        lambda: net(fc=nn.Linear(6, 8, bias=False), ln=nn.LayerNorm(8, bias=False), head=_head()),
        vectors,
        rows={"fc.weight": "tensor"},
    ),
    case(
        "linear_ln_zero_head",  # no gradient passes the head at the start
        lambda: zero(net(fc=nn.Linear(6, 8, bias=False), ln=nn.LayerNorm(8), head=nn.Linear(8, 3)), "head.weight"),
        vectors,
        rows={"fc.weight": "tensor"},
    ),
    case(
        "linear_rms",
        lambda: net(fc=nn.Linear(6, 8), norm=nn.RMSNorm(8), head=_head()),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "linear_rms_without_bias",
        lambda: net(fc=nn.Linear(6, 8, bias=False), norm=nn.RMSNorm(8, eps=1e-6), head=_head()),
        vectors,
        rows={"fc.weight": "tensor"},
    ),
    case(
        "linear_gn",
        lambda: net(fc=nn.Linear(6, 8), norm=nn.GroupNorm(2, 8), head=_head()),
        vectors,
        joint={"fc.weight fc.bias": 2},
    ),
    # In one of eight samples hardly any unit is active, and there ε dominates.
    case(
        "narrow_relu_ln",
        lambda: net(
            fc1=nn.Linear(4, 4),
            bn=nn.BatchNorm1d(4),
            act=nn.ReLU(),
            fc2=nn.Linear(4, 4, bias=False),
            ln=nn.LayerNorm(4),
            head=nn.Linear(4, 2),
        ),
        randn(8, 4),
        rows={"fc1.weight": "filter", "fc2.weight": "tensor"},
        no_effect="fc1.bias",
        facts=("bn.weight bn.bias",),
    ),
    case(
        "linear_two_norms",  # each half of the features has its own norm
        lambda: Custom(
            lambda m, x: m.head(torch.cat([f(h) for f, h in zip((m.a, m.b), m.fc(x).chunk(2, -1), strict=True)], -1)),
            fc=nn.Linear(6, 8, bias=False),
            a=nn.LayerNorm(4),
            b=nn.RMSNorm(4),
            head=_head(),
        ),
        vectors,
        rows={"fc.weight": 2},
    ),
    case(
        "linear_half_normalized",
        lambda: Custom(
            lambda m, x: m.head(torch.cat([m.norm(m.fc(x)[:, :4]), m.fc(x)[:, 4:]], -1)),
            fc=nn.Linear(6, 8, bias=False),
            norm=nn.LayerNorm(4),
            head=_head(),
        ),
        vectors,
    ),
    case(
        "linear_dropout_ln",
        lambda: net(fc=nn.Linear(6, 8), drop=nn.Dropout(0.3), ln=nn.LayerNorm(8), head=_head()),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "mlp_bn_without_bias",
        lambda: net(
            fc1=nn.Linear(6, 7, bias=False),
            relu=nn.ReLU(),
            fc2=nn.Linear(7, 8, bias=False),
            bn=nn.BatchNorm1d(8),
            head=_head(),
        ),
        vectors,
        rows={"fc1.weight": "tensor", "fc2.weight": "filter"},
    ),
    case(
        "mlp_bn",
        lambda: net(fc1=nn.Linear(6, 7), relu=nn.ReLU(), fc2=nn.Linear(7, 8), bn=nn.BatchNorm1d(8), head=_head()),
        vectors,
        rows={"fc2.weight": "filter"},
        joint={"fc1.weight fc1.bias": "tensor"},
        no_effect="fc2.bias",
    ),
    case(
        "mlp_ln",  # the first layer needs the second bias, which belongs to the smaller set
        lambda: net(fc1=nn.Linear(6, 7), relu=nn.ReLU(), fc2=nn.Linear(7, 8), ln=nn.LayerNorm(8), head=_head()),
        vectors,
        joint={"fc2.weight fc2.bias": "tensor"},
        facts=("fc1.weight fc1.bias fc2.bias",),
    ),
    case(
        "mlp_ln_leaky",
        lambda: net(
            fc1=nn.Linear(6, 7),
            act=nn.LeakyReLU(0.2),
            fc2=nn.Linear(7, 8, bias=False),
            ln=nn.LayerNorm(8),
            head=_head(),
        ),
        vectors,
        rows={"fc2.weight": "tensor"},
        joint={"fc1.weight fc1.bias": "tensor"},
    ),
    case(
        "mlp_ln_gelu",
        lambda: net(fc1=nn.Linear(6, 7), act=nn.GELU(), fc2=nn.Linear(7, 8), ln=nn.LayerNorm(8), head=_head()),
        vectors,
        joint={"fc2.weight fc2.bias": "tensor"},
    ),
    case(
        "mlp_prelu_ln",
        lambda: net(
            fc1=nn.Linear(6, 7, bias=False),
            act=nn.PReLU(7),
            fc2=nn.Linear(7, 8, bias=False),
            ln=nn.LayerNorm(8),
            head=_head(),
        ),
        vectors,
        rows={"fc1.weight": "tensor", "fc2.weight": "tensor"},
    ),
    case(
        "swiglu_ln",  # linear in up and down, not in the gate
        lambda: Custom(
            lambda m, x: m.head(m.norm(m.down(functional.silu(m.gate(x)) * m.up(x)))),
            gate=nn.Linear(6, 7, bias=False),
            up=nn.Linear(6, 7, bias=False),
            down=nn.Linear(7, 8, bias=False),
            norm=nn.RMSNorm(8),
            head=_head(),
        ),
        vectors,
        rows={"up.weight": "tensor", "down.weight": "tensor"},
    ),
    case(
        "low_rank_bn",
        lambda: net(a=nn.Linear(6, 3, bias=False), b=nn.Linear(3, 8, bias=False), bn=nn.BatchNorm1d(8), head=_head()),
        vectors,
        rows={"a.weight": "tensor", "b.weight": "filter"},
    ),
    case(
        "deep_chain_normalized_output",
        lambda: net(
            fc1=nn.Linear(6, 7, bias=False),
            relu1=nn.ReLU(),
            fc2=nn.Linear(7, 8, bias=False),
            relu2=nn.ReLU(),
            fc3=nn.Linear(8, 5, bias=False),
            norm=_normalize(),
        ),
        vectors,
        rows={"fc1.weight": "tensor", "fc2.weight": "tensor", "fc3.weight": "tensor"},
    ),
    case(
        "normalized_over_batch",  # one length per feature, and no mean removed
        lambda: net(fc=nn.Linear(6, 5), norm=_normalize(0)),
        vectors,
        joint={"fc.weight fc.bias": "filter"},
    ),
    case(
        "cosine_classifier",
        lambda: Custom(
            lambda m, x: m.scale * functional.normalize(m.fc(x), dim=-1) @ functional.normalize(m.prototypes, dim=-1).T,
            fc=nn.Linear(6, 8),
            prototypes=parameter(4, 8),
            scale=nn.Parameter(torch.full((), 5.0)),
        ),
        vectors,
        rows={"prototypes": "filter"},
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "cosine_similarity",
        lambda: Custom(
            lambda m, x, y: functional.cosine_similarity(m.left(x), m.right(y), dim=-1),
            left=nn.Linear(6, 8, bias=False),
            right=nn.Linear(5, 8),
        ),
        lambda: ((torch.randn(10, 6), torch.randn(10, 5)), {}),
        rows={"left.weight": "tensor"},
        joint={"right.weight right.bias": "tensor"},
    ),
    case(
        "bilinear_bn",
        lambda: Custom(
            lambda m, x, y: m.head(m.bn(m.fc(x, y))),
            fc=nn.Bilinear(3, 4, 8),
            bn=nn.BatchNorm1d(8),
            head=_head(),
        ),
        lambda: ((torch.randn(10, 3), torch.randn(10, 4)), {}),
        rows={"fc.weight": "filter"},
        no_effect="fc.bias",
    ),
    case(
        "linears_added_ln",
        lambda: Custom(
            lambda m, x, y: m.head(m.ln(m.a(x) + m.b(y))),
            a=nn.Linear(6, 8, bias=False),
            b=nn.Linear(5, 8),
            ln=nn.LayerNorm(8),
            head=_head(),
        ),
        lambda: ((torch.randn(10, 6), torch.randn(10, 5)), {}),
        joint={"a.weight b.weight b.bias": "tensor"},
    ),
    case(
        "soft_experts_ln",
        lambda: Custom(
            _soft_experts,
            gate=nn.Linear(6, 2),
            a=nn.Linear(6, 8, bias=False),
            b=nn.Linear(6, 8, bias=False),
            norm=nn.LayerNorm(8),
            head=_head(),
        ),
        vectors,
        joint={"a.weight b.weight": "tensor"},
    ),
    case(
        "stacked_experts_ln",
        lambda: Custom(
            lambda m, x: m.head(m.norm(torch.einsum("ne,edo,nd->no", m.gate(x).softmax(-1), m.experts, x))),
            gate=nn.Linear(6, 3),
            experts=parameter(3, 6, 8),
            norm=nn.LayerNorm(8),
            head=_head(),
        ),
        vectors,
        rows={"experts": "tensor"},
    ),
    case(
        "low_rank_beside_frozen_rms",  # what two factors add to a small frozen matrix, as in LoRA
        lambda: freeze(
            Custom(
                lambda m, x: m.head(m.norm(m.base(x) + 16 * m.b(m.a(x)))),
                base=Custom(lambda m, x: 0.05 * m.fc(x), fc=nn.Linear(12, 16, bias=False)),
                a=nn.Linear(12, 4, bias=False),
                b=nn.Linear(4, 16, bias=False),
                norm=nn.RMSNorm(16, eps=1e-6),
                head=_head(16),
            ),
            "base.fc.weight",
        ),
        randn(20, 12),
        frozen="base.fc.weight",
    ),
    case("mlp_without_norm", lambda: net(fc1=nn.Linear(6, 7), relu=nn.ReLU(), fc2=nn.Linear(7, 3)), vectors),
    case(
        "linear_chain_without_norm",  # fc1 up and fc2 down is a symmetry, but not a sphere
        lambda: net(fc1=nn.Linear(6, 7, bias=False), relu=nn.ReLU(), fc2=nn.Linear(7, 3, bias=False)),
        vectors,
    ),
    case("linear_softmax", lambda: net(fc=nn.Linear(6, 5), softmax=nn.Softmax(-1)), vectors),
]

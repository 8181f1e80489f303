"""Attention with and without normalized queries and keys, and the transformers around it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from cases._case import Custom, case, net, parameter, sequences, tokens


class Attention(nn.Module):
    """Self-attention of width 8; `norm` makes the module that normalizes queries and keys."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module] | None = None,
        *,
        bias: str = "",
        kv_heads: int = 2,
        across: bool = False,
        cosine: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.across = 2, kv_heads, across
        self.q = nn.Linear(8, 8, bias="q" in bias)
        self.k = nn.Linear(8, 4 * kv_heads, bias="k" in bias)
        self.v = nn.Linear(8, 4 * kv_heads, bias="v" in bias)
        self.o = nn.Linear(8, 8, bias="o" in bias)
        if norm is not None:
            self.q_norm, self.k_norm = norm(8 if across else 4), norm(4 * kv_heads if across else 4)
        if cosine:
            self.scale = nn.Parameter(torch.full((2, 1, 1), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        if hasattr(self, "q_norm") and not self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        if hasattr(self, "scale"):
            q, k = self.scale * functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """Queries, keys and values from one weight, queries and keys normalized per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.o = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossCovariance(nn.Module):
    """Attention among channels: queries and keys are normalized over the words, values are not, all from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 4, 1)
        weights = (functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-1, -2)).softmax(-1)
        return self.o((weights @ v).permute(0, 3, 1, 2).flatten(2))


class Transformer(nn.Module):
    """Pre-norm: one residual stream to which every block adds, and a norm in front of the head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.word = nn.Embedding(11, 8)
        self.position = parameter(5, 8)
        self.ln1, self.attention = nn.LayerNorm(8), attention
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.ln, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.word(x) + self.position
        x = x + self.attention(self.ln1(x))
        x = x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))
        return self.head(self.ln(x))


_STREAM = "word.weight position attention.o.weight attention.o.bias fc2.weight fc2.bias"


def _pooled(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(m.norm((m.score(x).softmax(1) * m.value(x)).sum(1)))


CASES = [
    case("attention_plain", lambda: Attention(bias="qvo"), sequences),
    case("attention_key_bias", lambda: Attention(bias="qkvo"), sequences, no_effect="k.bias"),
    case(
        "multihead_attention",
        lambda: Custom(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(8, 2, batch_first=True)),
        sequences,
    ),
    case("cross_covariance", CrossCovariance, sequences),  # the first two thirds of qkv alone, which are no rows of it
    case(
        "qk_rms_norm",
        lambda: Attention(nn.RMSNorm),
        sequences,
        rows={"q.weight": 2, "k.weight": 2},
    ),
    case(
        "qk_rms_norm_biases",
        lambda: Attention(nn.RMSNorm, bias="qkvo"),
        sequences,
        joint={"q.weight q.bias": 2, "k.weight k.bias": 2},
    ),
    case(
        "qk_layer_norm",  # the softmax does not see what all keys have in common
        lambda: Attention(nn.LayerNorm, bias="kvo"),
        sequences,
        rows={"q.weight": 2},
        joint={"k.weight k.bias": 2},
        no_effect="k_norm.bias",
    ),
    case(
        "qk_norm_grouped_queries",
        lambda: Attention(nn.RMSNorm, kv_heads=1),
        sequences,
        rows={"q.weight": 2, "k.weight": "tensor"},
    ),
    case(
        "qk_norm_across_heads",
        lambda: Attention(nn.RMSNorm, across=True),
        sequences,
        rows={"q.weight": "tensor", "k.weight": "tensor"},
    ),
    case(
        "cosine_attention",
        lambda: Attention(cosine=True, bias="qvo"),
        sequences,
        rows={"k.weight": 2},
        joint={"q.weight q.bias": 2},
    ),
    case(
        "qk_norm_output_norm",  # without a residual the values and the projection are free too
        lambda: net(attention=Attention(nn.RMSNorm), ln=nn.LayerNorm(8), act=nn.Tanh(), head=nn.Linear(8, 3)),
        sequences,
        rows={"attention.q.weight": 2, "attention.k.weight": 2, "attention.v.weight": "tensor"}
        | {"attention.o.weight": "tensor"},
    ),
    case("fused_qk_norm", FusedAttention, sequences),
    case(
        "fused_qk_norm_output_norm",  # queries, keys and values are three rows; the values do not split further
        lambda: net(attention=FusedAttention(), ln=nn.LayerNorm(8), act=nn.Tanh(), head=nn.Linear(8, 3)),
        sequences,
        rows={"attention.qkv.weight": 3, "attention.o.weight": "tensor"},
    ),
    case("transformer_pre_norm", lambda: Transformer(Attention(bias="qvo")), tokens(3, 5), facts=(_STREAM,)),
    case(
        "transformer_pre_norm_qk_norm",
        lambda: Transformer(Attention(nn.RMSNorm, bias="vo")),
        tokens(3, 5),
        rows={"attention.q.weight": 2, "attention.k.weight": 2},
        facts=(_STREAM,),
    ),
    case(
        "transformer_post_norm",
        lambda: net(block=nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True), head=nn.Linear(8, 3)),
        sequences,
        facts=("block.norm1.weight block.norm1.bias block.linear1.bias block.linear2.bias",),
    ),
    case(
        "attention_pooling",
        lambda: Custom(
            _pooled,
            score=nn.Linear(8, 1),
            value=nn.Linear(8, 6),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 3),
        ),
        sequences,
        joint={"value.weight value.bias": "tensor"},
        no_effect="score.bias",
    ),
]

"""Models with hand-labelled pairs f(αa, b/α) = f(a, b), and models in which something breaks one."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from cases._case import Apply, Custom, PairCase, images, net, pair_case, parameter, sequences, tokens, vectors


def _rotated(x: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary positions: pairs of channels (i, i + d/2), or (2i, 2i + 1), turn with the position."""
    length, d = x.shape[-2:]
    angle = torch.arange(length, dtype=x.dtype)[:, None] / 3.0 ** torch.arange(d // 2, dtype=x.dtype)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, shared: int, turn=lambda x: x) -> Tensor:
    """Causal attention in which `shared` heads read the same keys and values."""
    q, k, v = (
        t.unflatten(-1, (-1, t.shape[-1] // n)).transpose(1, 2) for t, n in ((q, heads), (k, shared), (v, shared))
    )
    k, v = (t.repeat_interleave(heads // shared, 1) for t in (turn(k), v))
    return functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True).transpose(1, 2).flatten(2)


def _attention(m: nn.Module, x: Tensor, turn=lambda x: x) -> Tensor:
    return m.o(_attend(m.q(x), m.k(x), m.v(x), 4, m.k.out_features // 4, turn))


def _separate(shared: int, *, bias: bool = False, d: int = 4, **more: nn.Module) -> dict[str, nn.Module]:
    return dict(
        q=nn.Linear(8, 4 * d, bias=bias),
        k=nn.Linear(8, shared * d, bias=bias),
        v=nn.Linear(8, shared * d, bias=bias),
        o=nn.Linear(4 * d, 8),
        **more,
    )


def _fused(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).split([16, 8, 8], -1)
    return m.o(_attend(q, k, v, 4, 2, _rotated))


def _rms_attention(m: nn.Module, x: Tensor) -> Tensor:
    return x + _attention(m, m.norm(x), _rotated)


def _qk_norm(m: nn.Module, x: Tensor) -> Tensor:
    heads = [t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (m.q(x), m.k(x), m.v(x))]
    return m.o(
        functional.scaled_dot_product_attention(m.nq(heads[0]), m.nk(heads[1]), heads[2]).transpose(1, 2).flatten(2)
    )


def _residual_stream(m: nn.Module, x: Tensor) -> Tensor:
    x = m.stem(x)
    x = x + m.out1(m.in1(x).relu())
    return m.head((x + m.out2(m.in2(x).relu())).relu())


CASES: list[PairCase] = [
    pair_case(
        "relu_mlp",
        lambda: net(a=nn.Linear(6, 9), r=nn.ReLU(), b=nn.Linear(9, 7), s=nn.LeakyReLU(), c=nn.Linear(7, 3)),
        vectors,
        {"a.weight a.bias | b.weight": 9, "b.weight b.bias | c.weight": 7},
    ),
    pair_case(
        "relu_convolutions",  # each channel is a block of columns behind the flattening
        lambda: net(
            a=nn.Conv2d(3, 4, 3),
            r=nn.ReLU(),
            p=nn.MaxPool2d(2),
            b=nn.ConvTranspose2d(4, 6, 2, bias=False),
            s=nn.ReLU(),
            f=nn.Flatten(),
            c=nn.Linear(96, 3),
        ),
        images,
        {"a.weight a.bias | b.weight": 4, "b.weight | c.weight": 6},
    ),
    pair_case(
        "gated_mlp",
        lambda: Custom(
            lambda m, x: m.down(functional.silu(m.gate(x)) * m.up(x)),
            gate=nn.Linear(8, 12),
            up=nn.Linear(8, 12),
            down=nn.Linear(12, 8),
        ),
        sequences,
        {"up.weight up.bias | down.weight": 12},
    ),
    pair_case(
        "fused_gated_mlp",
        lambda: Custom(
            lambda m, x: m.down(_swiglu(m.both(x))),
            both=nn.Linear(8, 24, bias=False),
            down=nn.Linear(12, 8),
        ),
        sequences,
        {"both.weight | down.weight": 12},
    ),
    pair_case(
        "bilinear_mlp",  # without an activation, the gate is like the other
        lambda: Custom(
            lambda m, x: m.down(m.gate(x) * m.up(x)),
            gate=nn.Linear(8, 12),
            up=nn.Linear(8, 12),
            down=nn.Linear(12, 8),
        ),
        sequences,
        {"up.weight up.bias | down.weight": 12, "gate.weight gate.bias | down.weight": 12},
    ),
    pair_case(
        "attention",
        lambda: Custom(_attention, **_separate(4)),
        sequences,
        {"q.weight | k.weight": 16, "v.weight | o.weight": 16},
    ),
    pair_case(
        "attention_with_biases",  # that of the keys adds a constant to all scores of a query
        lambda: Custom(_attention, **_separate(4, bias=True)),
        sequences,
        {"q.weight q.bias | k.weight": 16, "v.weight v.bias | o.weight": 16},
    ),
    pair_case(
        "grouped_query_attention",
        lambda: Custom(_attention, **_separate(2)),
        sequences,
        {"q.weight | k.weight": 8, "v.weight | o.weight": 8},
    ),
    pair_case(
        "rotary_attention",
        lambda: Custom(lambda m, x: _attention(m, x, _rotated), **_separate(4, bias=True)),
        sequences,
        {"q.weight q.bias | k.weight k.bias": 8, "v.weight v.bias | o.weight": 16},
    ),
    pair_case(
        "rotary_grouped_query_attention",
        lambda: Custom(lambda m, x: _attention(m, x, _rotated), **_separate(2)),
        sequences,
        {"q.weight | k.weight": 4, "v.weight | o.weight": 8},
    ),
    pair_case(
        "interleaved_rotary_grouped_query_attention",
        lambda: Custom(lambda m, x: _attention(m, x, lambda t: _rotated(t, interleaved=True)), **_separate(2)),
        sequences,
        {"q.weight | k.weight": 4, "v.weight | o.weight": 8},
    ),
    pair_case(
        "fused_rotary_attention",  # queries, keys and values in one weight
        lambda: Custom(_fused, qkv=nn.Linear(8, 32), o=nn.Linear(16, 8)),
        sequences,
        {"qkv.weight qkv.bias | o.weight": 8, "qkv.weight qkv.bias | qkv.weight qkv.bias": 4},
    ),
    pair_case(
        "multihead_attention",
        lambda: Custom(
            lambda m, x: m.attention(x, x, x, need_weights=False)[0],
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        sequences,
        {
            "attention.in_proj_weight attention.in_proj_bias | attention.out_proj.weight": 8,
            "attention.in_proj_weight attention.in_proj_bias | attention.in_proj_weight attention.in_proj_bias": 8,
        },
    ),
    pair_case(
        "pre_norm_attention",  # a gain and the three matrices that read it
        lambda: Custom(_rms_attention, **_separate(2, norm=nn.RMSNorm(8))),
        sequences,
        {"norm.weight | q.weight k.weight v.weight": 8, "q.weight | k.weight": 4, "v.weight | o.weight": 8},
    ),
    pair_case(
        "qk_norm",  # the weights are invariant, and the gains of both norms multiply each other
        lambda: Custom(_qk_norm, **_separate(4, nq=nn.RMSNorm(4), nk=nn.RMSNorm(4))),
        sequences,
        {"nq.weight | nk.weight": 4, "v.weight | o.weight": 16},
    ),
    pair_case(
        "low_rank_adapter",
        lambda: Custom(
            lambda m, x: m.base(x) + m.b(m.a(x)),
            base=nn.Linear(8, 6).requires_grad_(False),
            a=nn.Linear(8, 2, bias=False),
            b=nn.Linear(2, 6, bias=False),
        ),
        sequences,
        {"a.weight | b.weight": 2},
    ),
    pair_case(
        "merged_low_rank_adapter",
        lambda: Custom(
            lambda m, x: functional.linear(x, m.w + m.b @ m.a).tanh(),
            w=parameter(6, 8),
            a=parameter(2, 8),
            b=parameter(6, 2),
        ),
        sequences,
        {"a | b": 2},
    ),
    pair_case(
        "affine_before_convolution",
        lambda: net(
            conv=nn.Conv2d(3, 5, 3, bias=False),
            bn=nn.BatchNorm2d(5),
            relu=nn.ReLU(),
            next=nn.Conv2d(5, 4, 3),
            last=nn.BatchNorm2d(4),
            tanh=nn.Tanh(),
        ),
        images,
        {"bn.weight bn.bias | next.weight": 5},
    ),
    pair_case(
        "affine_before_depthwise_convolution",  # each side is invariant by itself
        lambda: net(
            conv=nn.Conv2d(3, 5, 3, bias=False),
            bn=nn.BatchNorm2d(5),
            relu=nn.ReLU(),
            depthwise=nn.Conv2d(5, 5, 3, groups=5, bias=False),
            last=nn.BatchNorm2d(5),
            tanh=nn.Tanh(),
        ),
        images,
        {},
    ),
    pair_case(
        "scalar_beside_grouped_conv",  # without a slice for each group
        lambda: Custom(
            lambda m, x: m.head((m.conv(m.stem(x).relu()) + m.scale * m.stem(x).relu()).mean((2, 3))),
            stem=nn.Conv2d(3, 4, 3),
            conv=nn.Conv2d(4, 4, 1, groups=2, bias=False),
            scale=nn.Parameter(torch.tensor(1.3)),
            head=nn.Linear(4, 3),
        ),
        images,
        {"stem.weight stem.bias | conv.weight scale": 1, "conv.weight scale | head.weight": 1},
    ),
    pair_case(
        "layer_scale_and_temperature",
        lambda: Custom(
            lambda m, x: (x + m.scale * m.fc(x.tanh())) @ m.head * m.temperature,
            scale=parameter(8),
            fc=nn.Linear(8, 8),
            head=parameter(8, 3),
            temperature=nn.Parameter(torch.tensor(2.0)),
        ),
        sequences,
        {"fc.weight fc.bias | scale": 8, "head | temperature": 1},
    ),
    pair_case(
        "residual_stream",  # all that write a channel, against all that read it
        lambda: Custom(
            _residual_stream,
            stem=nn.Linear(6, 5),
            in1=nn.Linear(5, 7),
            out1=nn.Linear(7, 5),
            in2=nn.Linear(5, 7, bias=False),
            out2=nn.Linear(7, 5),
            head=nn.Linear(5, 3),
        ),
        vectors,
        {
            "in1.weight in1.bias | out1.weight": 7,
            "in2.weight | out2.weight": 7,
            "stem.weight stem.bias out1.weight out1.bias out2.weight out2.bias | in1.weight in2.weight head.weight": 5,
        },
    ),
    pair_case(
        "concatenation",
        lambda: Custom(
            lambda m, x: m.head(torch.cat([m.a(x).relu(), m.b(x).tanh()], -1)),
            a=nn.Linear(6, 5),
            b=nn.Linear(6, 4),
            head=nn.Linear(9, 3),
        ),
        vectors,
        {"a.weight a.bias | head.weight": 5},
    ),
    pair_case(
        "embedding",
        lambda: Custom(lambda m, i: m.fc(m.embed(i)).tanh(), embed=nn.Embedding(11, 6), fc=nn.Linear(6, 3)),
        tokens(4, 7),
        {"embed.weight | fc.weight": 6},
    ),
    pair_case(
        "clamps_and_one_pair",  # no unit is clamped at ordinary scale, in ten layers
        lambda: net(
            **{
                f"{kind}{i}": layer()
                for i in range(10)
                for kind, layer in (("fc", lambda: nn.Linear(6, 6)), ("clamp", lambda: Apply(lambda x: x.clamp(0, 20))))
            },
            a=nn.Linear(6, 8),
            relu=nn.ReLU(),
            b=nn.Linear(8, 3),
        ),
        vectors,
        {"a.weight a.bias | b.weight": 8},
    ),
    # Something breaks the pair
    *(
        pair_case(name, lambda act=act: net(a=nn.Linear(6, 8), act=act(), b=nn.Linear(8, 3)), vectors, {})
        for name, act in {
            "gelu_mlp": nn.GELU,
            "softplus_mlp": nn.Softplus,
            "relu6_mlp": nn.ReLU6,
            "clamped_far_out_mlp": lambda: Apply(lambda x: x.clamp(0, 40)),
            "shifted_relu_mlp": lambda: Apply(lambda x: (x - 0.01).relu()),
        }.items()
    ),
    pair_case(
        "residual_around_activation",
        lambda: Custom(lambda m, x: m.b(x + m.a(x).relu()), a=nn.Linear(6, 6), b=nn.Linear(6, 3)),
        vectors,
        {},
    ),
    pair_case(
        "tied_layers",
        lambda: Custom(lambda m, x: functional.linear(m.a(x).relu(), m.a.weight.T), a=nn.Linear(6, 8)),
        vectors,
        {},
    ),
    pair_case(
        "tied_embedding",  # the last gain is read by the embedding, which has another use
        lambda: Custom(
            lambda m, i: functional.linear(m.norm(m.fc(m.embed(i)).tanh()), m.embed.weight),
            embed=nn.Embedding(11, 6),
            fc=nn.Linear(6, 6),
            norm=nn.RMSNorm(6),
        ),
        tokens(4, 7),
        {},
    ),
    pair_case(
        "gain_read_and_given_out",
        lambda: Custom(
            lambda m, x: m.a(m.norm(x)).tanh() @ m.head + m.norm(x.tanh()),
            norm=nn.RMSNorm(8),
            a=nn.Linear(8, 8),
            head=parameter(8, 8),
        ),
        sequences,
        {},
    ),
    pair_case(
        "gain_used_twice",  # both readers together are the other side
        lambda: Custom(
            lambda m, x: m.a(m.norm(x)).tanh() + m.b(m.norm(x.tanh())).exp(),
            norm=nn.RMSNorm(8),
            a=nn.Linear(8, 8),
            b=nn.Linear(8, 8),
        ),
        sequences,
        {"norm.weight | a.weight b.weight": 8},
    ),
    pair_case(
        "gain_plus_one",
        lambda: Custom(
            lambda m, x: m.a(functional.rms_norm(x, (8,)) * (1 + m.gain)).tanh(), gain=parameter(8), a=nn.Linear(8, 8)
        ),
        sequences,
        {},
    ),
    pair_case(
        "penalized_hidden_layer",  # the hidden layer is an output too
        lambda: Custom(lambda m, x: (m.b(m.a(x).relu()), m.a(x).relu()), a=nn.Linear(6, 8), b=nn.Linear(8, 3)),
        vectors,
        {},
    ),
]


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up

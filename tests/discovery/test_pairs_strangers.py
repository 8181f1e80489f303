"""Pairs of slices with f(αa, b/α) = f(a, b), on small models that were labelled before the code was seen.

A label is a list of families of slices. Symmetry i of a family multiplies slice i of its `up` side by α and divides
slice i of its `down` side by α. `pairs` must be found. `also` are true as well, but need not be found: whole residual
streams, exponents other than ±1. `invariant` are slices that do not change the outputs by themselves. `false` look like
pairs and are none.

The labels are proved here without the library, in float64: forward passes with random α show that what is listed is
true or false, and the null space of the Jacobian with respect to the logarithms of all weights shows that nothing is
missing.

What `find_groups` claims is compared as a linear space: the exponents of α in all entries of all parameters. So it does
not matter which two of three equivalent pairs are listed, or whether a bias without effect stands beside its weight.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import steradian as st
from steradian.groups import Layout

Cut = tuple[str, Callable[[Tensor], Tensor]]
"""A parameter's name, and a function from the flat indices of its entries to those of each slice, (n, size)."""


@dataclass(frozen=True)
class Family:
    """n symmetries: slice i of each cut in `up` times α, slice i of each cut in `down` over α to the exponent."""

    up: tuple[Cut, ...]
    down: tuple[Cut, ...] = ()
    exponent: int = 1

    @property
    def names(self) -> frozenset[frozenset[str]]:
        return frozenset({frozenset(name for name, _ in self.up), frozenset(name for name, _ in self.down)})


@dataclass(frozen=True)
class Case:
    """A model with inputs and the label of its symmetries."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    pairs: list[Family] = field(default_factory=list)
    also: list[Family] = field(default_factory=list)
    invariant: list[Family] = field(default_factory=list)
    false: list[Family] = field(default_factory=list)
    one_form: bool = True  # the names of each pair follow from the symmetries; False: several choices have one span
    by_gradient: bool = True  # the gradient is that of the outputs, so that it shows that no symmetry is missing
    tolerance: float = 1e-9  # 1e-5 where the model computes in float32 by itself


CASES: list[Case] = []


def case(**label: object) -> Callable[[Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]], None]:
    def add(build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
        CASES.append(Case(build.__name__, build, **label))  # type: ignore[arg-type]

    return add


class Net(nn.Module):
    """Modules and parameters by name, and a forward function of them."""

    def __init__(self, run: Callable[..., object], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Tensor) -> object:
        return self.run(self, *inputs)


def rows(name: str) -> Cut:
    return name, lambda i: i.reshape(len(i), -1)


def cols(name: str, dim: int = 1) -> Cut:
    return name, lambda i: i.movedim(dim, 0).reshape(i.shape[dim], -1)


def blocks(name: str, count: int) -> Cut:
    return name, lambda i: i.reshape(count, -1)


def whole(name: str) -> Cut:
    return name, lambda i: i.reshape(1, -1)


def part(name: str, start: int, stop: int, dim: int = 0) -> Cut:
    """Slices start to stop of one dimension."""
    return name, lambda i: i.movedim(dim, 0)[start:stop].reshape(stop - start, -1)


def entries(name: str, start: int, stop: int) -> Cut:
    """Single entries of a vector."""
    return part(name, start, stop)


def writes(name: str, kv: int, size: int, *, rope: bool = False) -> Cut:
    """Rows of a projection to heads, by KV head and channel (pairs of channels c, c + size/2 under RoPE)."""

    def cut(i: Tensor) -> Tensor:
        if rope:
            return i.reshape(kv, -1, 2, size // 2, i[0].numel()).movedim(3, 1).reshape(kv * size // 2, -1)
        return i.reshape(kv, -1, size, i[0].numel()).movedim(2, 1).reshape(kv * size, -1)

    return name, cut


def reads(name: str, kv: int, size: int) -> Cut:
    """Columns of the projection from heads, by KV head and channel."""
    return name, lambda i: i.reshape(len(i), kv, -1, size).permute(1, 3, 0, 2).reshape(kv * size, -1)


def pair(up: Cut | tuple[Cut, ...], down: Cut | tuple[Cut, ...], exponent: int = 1) -> Family:
    def sides(side: Cut | tuple[Cut, ...]) -> tuple[Cut, ...]:
        return (side,) if isinstance(side[0], str) else side  # type: ignore[return-value]

    return Family(sides(up), sides(down), exponent)


def alone(*cuts: Cut) -> Family:
    return Family(cuts)


def with_bias(layer: str) -> tuple[Cut, ...]:
    return rows(f"{layer}.weight"), rows(f"{layer}.bias")


def vectors(count: int = 12, size: int = 5) -> Tensor:
    return torch.randn(count, size)


# --- networks without normalization ---------------------------------------------------------------------------------


@case(pairs=[pair(with_bias("0"), cols("2.weight"))], false=[pair(rows("0.weight"), cols("2.weight"))])
def relu_mlp():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (vectors(),)


@case(pairs=[pair(rows("0.weight"), cols("2.weight")), pair(rows("2.weight"), cols("4.weight"))])
def relu_mlp_deep_without_bias():
    layers = [
        nn.Linear(5, 6, bias=False),
        nn.ReLU(),
        nn.Linear(6, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 3, bias=False),
    ]
    return nn.Sequential(*layers), (vectors(),)


@case(pairs=[pair(with_bias("0"), cols("1.weight")), pair(with_bias("1"), cols("2.weight"))])
def linear_chain():
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6), nn.Linear(6, 3)), (vectors(),)


@case(pairs=[pair(with_bias("0"), cols("2.weight")), pair(with_bias("2"), cols("4.weight"))])
def prelu_and_leaky_relu():
    return nn.Sequential(nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 3)), (vectors(),)


@case(pairs=[pair(with_bias("0"), cols("3.weight")), pair(with_bias("3"), cols("7.weight"))])
def convolutions_with_pooling():
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3)), (torch.randn(6, 2, 8, 8),)


@case(
    pairs=[pair(with_bias("0"), ("3.weight", lambda i: i.reshape(3, 4, 4).movedim(1, 0).reshape(4, -1)))],
    false=[pair(with_bias("0"), part("3.weight", 0, 4, 1))],
)
def convolution_flattened_to_blocks_of_columns():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), (torch.randn(6, 2, 4, 4),)


@case(pairs=[pair(with_bias("0"), rows("2.weight")), pair(with_bias("2"), cols("4.weight"))])
def depthwise_separable():
    layers = [nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 3, 1)]
    return nn.Sequential(*layers), (torch.randn(5, 2, 5, 5),)


@case(
    pairs=[pair(with_bias("0"), ("2.weight", lambda i: i.reshape(2, 3, 2, -1).movedim(2, 1).reshape(4, -1)))],
    false=[pair(blocks("0.weight", 2), cols("2.weight"))],
)
def grouped_convolution():
    layers = [nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2)]
    return nn.Sequential(*layers), (torch.randn(5, 2, 5, 5),)


@case(pairs=[pair(with_bias("0"), rows("2.weight")), pair((cols("2.weight"), rows("2.bias")), cols("4.weight"))])
def transposed_convolution():
    layers = [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.ConvTranspose2d(3, 4, 2), nn.ReLU(), nn.Conv2d(4, 2, 2)]
    return nn.Sequential(*layers), (torch.randn(5, 2, 4, 4),)


@case(
    pairs=[pair((blocks("a.weight", 3), blocks("a.bias", 3)), cols("b.weight"))],
    false=[pair(part("a.weight", 0, 3), cols("b.weight"))],
)
def maxout():
    def run(net, x):
        return net.b(net.a(x).unflatten(-1, (3, 2)).amax(-1))

    return Net(run, a=nn.Linear(5, 6), b=nn.Linear(3, 4)), (vectors(20),)


@case(pairs=[pair(with_bias("0"), cols("3.weight"))])
def dropout_between():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3)), (vectors(30),)


@case(
    pairs=[pair(with_bias("a"), (cols("b.weight"), cols("c.weight")))],
    false=[pair(with_bias("a"), cols("b.weight")), pair(with_bias("a"), cols("c.weight"))],
)
def two_readers():
    def run(net, x):
        h = F.relu(net.a(x))
        return net.b(h), torch.tanh(net.c(h))

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 3), c=nn.Linear(4, 2)), (vectors(),)


@case(pairs=[pair(with_bias("a"), part("c.weight", 0, 4, 1)), pair(with_bias("b"), part("c.weight", 4, 7, 1))])
def concatenated_branches():
    def run(net, x):
        return net.c(torch.cat([F.relu(net.a(x)), F.leaky_relu(net.b(x))], -1))

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(5, 3), c=nn.Linear(7, 3)), (vectors(),)


@case(pairs=[pair(with_bias("a"), cols("b.weight"))])
def residual_around_the_pair():
    return Net(lambda net, x: x + net.b(F.relu(net.a(x))), a=nn.Linear(5, 4), b=nn.Linear(4, 5)), (vectors(),)


@case(
    pairs=[pair(with_bias("a"), cols("b.weight"))],
    also=[pair((*with_bias("e"), *with_bias("b")), (cols("a.weight"), cols("h.weight")))],
    false=[pair(with_bias("e"), cols("h.weight")), pair(with_bias("e"), cols("a.weight"))],
)
def residual_stream():
    def run(net, x):
        x = net.e(x)
        return net.h(x + net.b(F.relu(net.a(x))))

    return Net(run, e=nn.Linear(5, 4), a=nn.Linear(4, 3), b=nn.Linear(3, 4), h=nn.Linear(4, 3)), (vectors(),)


@case(pairs=[pair(cols("e.weight"), cols("f.weight"))])
def two_embeddings_multiplied():
    def run(net, i, j):
        return (net.e(i) * net.f(j)).sum(-1)

    index = torch.arange(48)
    return Net(run, e=nn.Embedding(6, 3), f=nn.Embedding(8, 3)), (index % 6, index // 6)


@case(
    pairs=[pair((cols("e.weight"), cols("p.weight")), cols("h.weight"))],
    false=[pair(cols("e.weight"), cols("h.weight"))],
)
def embedding_with_positions():
    def run(net, i):
        return net.h(net.e(i) + net.p.weight)

    index = torch.stack([torch.arange(6), torch.arange(5, -1, -1), torch.tensor([2, 4, 1, 5, 0, 3])])
    return Net(run, e=nn.Embedding(6, 4), p=nn.Embedding(6, 4), h=nn.Linear(4, 3)), (index,)


@case(pairs=[pair(with_bias("a"), cols("w.weight", 1)), pair(with_bias("b"), cols("w.weight", 2))])
def bilinear():
    def run(net, x, y):
        return net.w(net.a(x), F.relu(net.b(y)))

    return Net(run, a=nn.Linear(5, 3), b=nn.Linear(4, 2), w=nn.Bilinear(3, 2, 4)), (vectors(20), vectors(20, 4))


@case(pairs=[pair(with_bias("a"), with_bias("b"))])
def two_towers():
    def run(net, x, y):
        return net.a(x) @ net.b(y).T

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(3, 4)), (vectors(9), vectors(9, 3))


@case(
    pairs=[pair(rows("l.weight_hr_l0"), (cols("l.weight_hh_l0"), cols("h.weight")))],
    false=[pair(rows("l.weight_hr_l0"), cols("h.weight"))],
)
def lstm_with_projection():
    def run(net, x):
        return net.h(net.l(x)[0])

    return Net(run, l=nn.LSTM(3, 3, proj_size=2, batch_first=True, bias=False), h=nn.Linear(2, 3)), (
        torch.randn(6, 4, 3),
    )


# --- gains ----------------------------------------------------------------------------------------------------------


@case(
    pairs=[pair(with_bias("1"), cols("3.weight")), pair(with_bias("4"), cols("8.weight"))],
    invariant=[alone(rows("0.weight")), alone(rows("0.bias")), alone(rows("3.weight")), alone(rows("3.bias"))],
)
def batch_norm_affine_with_next_convolution():
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), (torch.randn(8, 2, 6, 6),)


@case(pairs=[pair(with_bias("0"), cols("1.weight")), pair(with_bias("1"), cols("3.weight"))])
def layer_norm_of_the_input():
    return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (vectors(20),)


@case(
    pairs=[pair(rows("n.weight"), (cols("a.weight"), cols("b.weight")))],
    invariant=[alone(whole("e.weight"), whole("e.bias"))],
    false=[pair(rows("n.weight"), cols("a.weight"))],
)
def rms_gain_with_two_readers():
    def run(net, x):
        h = net.n(net.e(x))
        return torch.tanh(net.a(h)), torch.sigmoid(net.b(h))

    parts = {"e": nn.Linear(5, 4), "n": nn.RMSNorm(4, eps=1e-6), "a": nn.Linear(4, 3), "b": nn.Linear(4, 2)}
    return Net(run, **parts), (vectors(20),)


@case(
    pairs=[pair(with_bias("1"), cols("3.weight"))],
    invariant=[alone(blocks("0.weight", 2), blocks("0.bias", 2))],
)
def group_norm_affine():
    layers = [nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2)]
    return nn.Sequential(*layers), (torch.randn(6, 2, 5, 5),)


@case(
    pairs=[pair((rows("0.parametrizations.weight.original0"), rows("0.bias")), cols("2.weight"))],
    invariant=[alone(rows("0.parametrizations.weight.original1"))],
)
def weight_norm_then_relu():
    return nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.ReLU(), nn.Linear(4, 3)), (vectors(),)


@case(pairs=[pair(rows("gain"), with_bias("b"))])
def layer_scale():
    def run(net, x):
        return x + net.gain * net.b(F.gelu(net.a(x)))

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 5), gain=nn.Parameter(torch.full((5,), 0.1))), (vectors(),)


@case(pairs=[pair(whole("gain"), (whole("b.weight"), whole("b.bias"))), pair(with_bias("a"), cols("b.weight"))])
def rezero_with_one_gain():
    def run(net, x):
        return x + net.gain * net.b(F.relu(net.a(x)))

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 5), gain=nn.Parameter(torch.ones(1))), (vectors(),)


@case(
    pairs=[pair(with_bias("n"), (cols("a.weight"), cols("b.weight")))],
    false=[pair(with_bias("n"), cols("a.weight")), pair(with_bias("n"), cols("b.weight"))],
)
def one_norm_called_twice():
    """A gain used twice, by two readers: it pairs with both together and with none alone."""

    def run(net, x, y):
        return torch.tanh(net.a(net.n(x))) + torch.sigmoid(net.b(net.n(y)))

    return Net(run, n=nn.LayerNorm(4), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), (vectors(20, 4), vectors(20, 4))


# --- gated MLPs -----------------------------------------------------------------------------------------------------


@case(pairs=[pair(with_bias("up"), cols("down.weight"))], false=[pair(with_bias("gate"), cols("down.weight"))])
def swiglu():
    def run(net, x):
        return net.down(F.silu(net.gate(x)) * net.up(x))

    return Net(run, gate=nn.Linear(5, 4), up=nn.Linear(5, 4), down=nn.Linear(4, 3)), (vectors(),)


@case(
    pairs=[pair(rows("up.weight"), cols("down.weight")), pair(rows("gate.weight"), cols("down.weight"))], one_form=False
)
def reglu():
    """With ReLU the gate is homogeneous as well: two symmetries per channel, in any two of three forms."""

    def run(net, x):
        return net.down(F.relu(net.gate(x)) * net.up(x))

    layers = {"gate": nn.Linear(5, 4, bias=False), "up": nn.Linear(5, 4, bias=False), "down": nn.Linear(4, 3)}
    return Net(run, **layers), (vectors(20),)


@case(
    pairs=[pair((part("both.weight", 0, 4), part("both.bias", 0, 4)), cols("down.weight"))],
    false=[pair((part("both.weight", 4, 8), part("both.bias", 4, 8)), cols("down.weight"))],
)
def fused_glu():
    return Net(lambda net, x: net.down(F.glu(net.both(x))), both=nn.Linear(5, 8), down=nn.Linear(4, 3)), (vectors(),)


@case(pairs=[pair(part("both.weight", 4, 8), cols("down.weight"))])
def fused_gate_and_up():
    def run(net, x):
        gate, up = net.both(x).chunk(2, -1)
        return net.down(F.silu(gate) * up)

    return Net(run, both=nn.Linear(5, 8, bias=False), down=nn.Linear(4, 3, bias=False)), (vectors(),)


# --- attention ------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, *, interleaved: bool = False) -> Tensor:
    """RoPE on (batch, heads, time, size): channels c and c + size/2, or 2c and 2c + 1."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 2.0 ** -torch.arange(half, dtype=x.dtype)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def attention(net, x, kv: int = 2, size: int = 2, prepare: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
    """Causal attention with projections q, k, v, o, where q may have more heads than k and v."""
    q, k, v = (layer(x).unflatten(-1, (-1, size)).transpose(1, 2) for layer in (net.q, net.k, net.v))
    k, v = (t.repeat_interleave(q.shape[1] // kv, 1) for t in (k, v))
    scores = prepare(q) @ prepare(k).transpose(-1, -2) / math.sqrt(size)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return net.o((scores.masked_fill(mask, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))


def projections(heads: int, kv: int, size: int, *, width: int = 4, bias: bool = False) -> dict[str, nn.Module]:
    shapes = {"q": (width, heads * size), "k": (width, kv * size), "v": (width, kv * size), "o": (heads * size, width)}
    return {name: nn.Linear(*shape, bias=bias) for name, shape in shapes.items()}


def tokens() -> tuple[Tensor]:
    return (torch.randn(6, 5, 4),)


@case(
    pairs=[pair(with_bias("q"), rows("k.weight")), pair(with_bias("v"), cols("o.weight"))],
    invariant=[alone(rows("k.bias"))],
    false=[pair(rows("q.weight"), rows("k.weight"))],
)
def attention_with_biases():
    """The bias of k adds the same number to all scores of a query, and has no effect."""
    return Net(lambda net, x: attention(net, x), **projections(2, 2, 2, bias=True)), tokens()


@case(
    pairs=[
        pair(writes("q.weight", 2, 2), writes("k.weight", 2, 2)),
        pair(writes("v.weight", 2, 2), reads("o.weight", 2, 2)),
    ],
    false=[pair(part("q.weight", 0, 4), rows("k.weight")), pair(rows("v.weight"), part("o.weight", 0, 4, 1))],
)
def grouped_queries():
    return Net(lambda net, x: attention(net, x), **projections(4, 2, 2)), tokens()


@case(
    pairs=[
        pair(writes("q.weight", 1, 4, rope=True), writes("k.weight", 1, 4, rope=True)),
        pair(writes("v.weight", 1, 4), reads("o.weight", 1, 4)),
    ],
    false=[pair(rows("k.weight"), ("q.weight", lambda i: i.reshape(2, 4, -1).movedim(1, 0).reshape(4, -1)))],
)
def grouped_queries_with_rope():
    def run(net, x):
        return attention(net, x, 1, 4, rotate)

    return Net(run, **projections(2, 1, 4)), tokens()


@case(
    pairs=[
        pair((blocks("q.weight", 4), blocks("q.bias", 4)), (blocks("k.weight", 4), blocks("k.bias", 4))),
        pair(with_bias("v"), cols("o.weight")),
    ],
    false=[pair(with_bias("q"), with_bias("k"))],
)
def interleaved_rope_with_biases():
    """Under RoPE the bias of k is turned by the position, and counts."""

    def run(net, x):
        return attention(net, x, 2, 4, lambda t: rotate(t, interleaved=True))

    return Net(run, **projections(2, 2, 4, bias=True)), tokens()


@case(
    pairs=[pair(rows("qn.weight"), rows("kn.weight")), pair(rows("v.weight"), cols("o.weight"))],
    invariant=[alone(blocks("q.weight", 2)), alone(blocks("k.weight", 2))],
    false=[pair(rows("q.weight"), rows("k.weight"))],
)
def qk_norm_with_gains():
    """q and k are invariant per head, which makes no pair of them; their gains are one."""

    def run(net, x):
        q, k = (n(w(x).unflatten(-1, (2, 3))).transpose(1, 2) for n, w in ((net.qn, net.q), (net.kn, net.k)))
        v = net.v(x).unflatten(-1, (2, 3)).transpose(1, 2)
        return net.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    norms = {"qn": nn.RMSNorm(3, eps=1e-6), "kn": nn.RMSNorm(3, eps=1e-6)}
    return Net(run, **projections(2, 2, 3), **norms), tokens()


@case(
    pairs=[
        pair((part("m.in_proj_weight", 0, 4), part("m.in_proj_bias", 0, 4)), part("m.in_proj_weight", 4, 8)),
        pair((part("m.in_proj_weight", 8, 12), part("m.in_proj_bias", 8, 12)), cols("m.out_proj.weight")),
    ],
    invariant=[alone(entries("m.in_proj_bias", 4, 8))],
    false=[pair(part("m.in_proj_weight", 0, 4), part("m.in_proj_weight", 8, 12))],
)
def torch_multihead_attention():
    def run(net, x):
        return net.m(x, x, x, need_weights=False)[0]

    return Net(run, m=nn.MultiheadAttention(4, 2, batch_first=True)), tokens()


@case(pairs=[pair(rows("v.weight"), cols("o.weight"))], false=[pair(rows("q.weight"), rows("k.weight"))])
def linear_attention_with_elu():
    def run(net, x):
        q, k = (F.elu(w(x)) + 1 for w in (net.q, net.k))
        weights = (q @ k.transpose(-1, -2)).tril()
        return net.o(weights / weights.sum(-1, keepdim=True) @ net.v(x))

    return Net(run, **projections(1, 1, 3)), tokens()


@case(
    pairs=[
        pair(whole("scale"), whole("q.weight")),
        pair(rows("q.weight"), rows("k.weight")),
        pair(rows("v.weight"), cols("o.weight")),
    ],
    one_form=False,
)
def attention_with_learned_temperature():
    def run(net, x):
        scores = net.scale * net.q(x) @ net.k(x).transpose(-1, -2)
        return net.o(scores.softmax(-1) @ net.v(x))

    return Net(run, scale=nn.Parameter(torch.ones(())), **projections(1, 1, 3)), tokens()


@case(pairs=[pair(rows("q.weight"), rows("k.weight")), pair(rows("v.weight"), cols("o.weight"))])
def attention_with_capped_scores():
    """The cap acts on the product of q and k, which the pair does not change."""

    def run(net, x):
        scores = 3 * torch.tanh(net.q(x) @ net.k(x).transpose(-1, -2) / 3)
        return net.o(scores.softmax(-1) @ net.v(x))

    return Net(run, **projections(1, 1, 3)), tokens()


@case(
    pairs=[pair(rows("q.weight"), (rows("k.weight"), cols("r"))), pair(rows("v.weight"), cols("o.weight"))],
    false=[pair(rows("q.weight"), rows("k.weight"))],
)
def attention_with_relative_positions():
    def run(net, x):
        scores = net.q(x) @ (net.k(x) + net.r).transpose(-1, -2)
        return net.o(scores.softmax(-1) @ net.v(x))

    return Net(run, r=nn.Parameter(torch.randn(5, 3)), **projections(1, 1, 3)), tokens()


@case(
    pairs=[
        pair(
            ("qkv.weight", lambda i: i.reshape(2, 3, 2, -1)[:, 0].flatten(0, 1)),
            ("qkv.weight", lambda i: i.reshape(2, 3, 2, -1)[:, 1].flatten(0, 1)),
        ),
        pair(("qkv.weight", lambda i: i.reshape(2, 3, 2, -1)[:, 2].flatten(0, 1)), cols("o.weight")),
    ],
    false=[pair(part("qkv.weight", 8, 12), cols("o.weight"))],
)
def queries_keys_and_values_by_head():
    """GPT-NeoX's order: q, k and v of the first head, then those of the second."""

    def run(net, x):
        q, k, v = net.qkv(x).unflatten(-1, (2, 6)).transpose(1, 2).chunk(3, -1)
        return net.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    return Net(run, qkv=nn.Linear(4, 12, bias=False), o=nn.Linear(4, 4, bias=False)), tokens()


@case(
    pairs=[
        pair(("kv.weight", lambda i: i.reshape(2, 5, -1)[:, :2].flatten(0, 1)), rows("q.weight")),
        pair(("kv.weight", lambda i: i.reshape(2, 5, -1)[:, 2:].flatten(0, 1)), cols("o.weight")),
    ],
    false=[pair(part("kv.weight", 0, 4), rows("q.weight"))],
)
def keys_and_values_by_head():
    """DeepSeek's order: two channels of k and three of v for each head."""

    def run(net, x):
        q = net.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
        k, v = net.kv(x).unflatten(-1, (2, 5)).transpose(1, 2).split([2, 3], -1)
        return net.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    layers = {"q": nn.Linear(4, 4, bias=False), "kv": nn.Linear(4, 10, bias=False), "o": nn.Linear(6, 4, bias=False)}
    return Net(run, **layers), tokens()


@case(
    also=[pair(part("p.weight", 2, 5), part("p.weight", 5, 8))],
    false=[pair(part("p.weight", 0, 2), part("p.weight", 2, 4))],
)
def product_of_two_parts_of_a_layer():
    """As B and C of a Mamba."""

    def run(net, x):
        step, b, c = net.p(x).split([2, 3, 3], -1)
        return torch.tanh(step).sum(-1)[:, :, None] * (b @ c.transpose(1, 2))

    return Net(run, p=nn.Linear(4, 8, bias=False)), tokens()


@case(pairs=[pair(part("p.weight", 0, 3), rows("c.weight"))], false=[pair(part("p.weight", 3, 6), rows("c.weight"))])
def part_of_a_layer_before_a_depthwise_convolution():
    """As the input projection of a Mamba."""

    def run(net, x):
        h, gate = net.p(x).transpose(1, 2).chunk(2, 1)
        return net.o((F.silu(net.c(h)[..., : x.shape[1]]) * F.silu(gate)).transpose(1, 2))

    conv = nn.Conv1d(3, 3, 2, groups=3, padding=1)
    return Net(run, p=nn.Linear(4, 6, bias=False), c=conv, o=nn.Linear(3, 4, bias=False)), tokens()


def partly_rotated(x: Tensor) -> Tensor:
    """RoPE on the first two channels alone."""
    return torch.cat([rotate(x[..., :2]), x[..., 2:]], -1)


def by_head(name: str, heads: int, start: int, stop: int, *, joined: int = 1) -> Cut:
    """Channels start to stop of each head as slices, or so many neighbours of them as one."""
    return name, lambda i: i.reshape(heads, len(i) // heads, -1)[:, start:stop].reshape(
        heads * (stop - start) // joined, -1
    )


@case(
    pairs=[
        pair(by_head("q.weight", 2, 0, 2, joined=2), by_head("k.weight", 2, 0, 2, joined=2)),
        pair(by_head("q.weight", 2, 2, 5), by_head("k.weight", 2, 2, 5)),
        pair(rows("v.weight"), cols("o.weight")),
    ],
    false=[pair(rows("q.weight"), rows("k.weight"))],
)
def partial_rope():
    """GPT-J's: some channels of a head turn in twos, the others not at all."""

    def run(net, x):
        return attention(net, x, 2, 5, partly_rotated)

    return Net(run, **projections(2, 2, 5)), tokens()


@case(
    pairs=[
        pair(
            ("q.weight", lambda i: i.reshape(2, 2, 4, -1)[:, :, :2].reshape(2, -1)),
            by_head("k.weight", 2, 0, 2, joined=2),
        ),
        pair(
            ("q.weight", lambda i: i.reshape(2, 2, 4, -1)[:, :, 2:].movedim(2, 1).reshape(4, -1)),
            by_head("k.weight", 2, 2, 4),
        ),
        pair(writes("v.weight", 2, 4), reads("o.weight", 2, 4)),
    ],
)
def grouped_queries_with_partial_rope():
    def run(net, x):
        return attention(net, x, 2, 4, partly_rotated)

    return Net(run, **projections(4, 2, 4, width=3)), (torch.randn(6, 5, 3),)


@case(
    pairs=[pair(by_head("qkv.weight", 2, 0, 2), by_head("qkv.weight", 2, 2, 4))],
    false=[pair(by_head("qkv.weight", 2, 4, 6), cols("o.weight"))],
)
def queries_and_keys_by_head_beside_activated_values():
    def run(net, x):
        q, k, v = net.qkv(x).unflatten(-1, (2, 6)).transpose(1, 2).chunk(3, -1)
        return net.o(((q @ k.transpose(-1, -2)).softmax(-1) @ F.gelu(v)).transpose(1, 2).flatten(2))

    return Net(run, qkv=nn.Linear(4, 12, bias=False), o=nn.Linear(4, 4, bias=False)), tokens()


# --- adapters -------------------------------------------------------------------------------------------------------


@case(pairs=[pair(rows("a.weight"), cols("b.weight"))])
def lora_on_a_frozen_layer():
    def run(net, x):
        return torch.tanh(net.w(x) + 2 * net.b(net.a(x)))

    layers = {"w": nn.Linear(5, 4), "a": nn.Linear(5, 2, bias=False), "b": nn.Linear(2, 4, bias=False)}
    layers["w"].requires_grad_(False)
    return Net(run, **layers), (vectors(),)


@case(pairs=[pair(rows("a"), cols("b"))])
def lora_beside_a_trained_layer():
    def run(net, x):
        return F.gelu(F.linear(x, net.w.weight + net.b @ net.a, net.w.bias))

    a, b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.zeros(4, 2))
    return Net(run, w=nn.Linear(5, 4), a=a, b=b), (vectors(),)


# --- traps ----------------------------------------------------------------------------------------------------------


@case(false=[pair(with_bias("a"), cols("b.weight"))])
def residual_that_breaks_the_pair():
    def run(net, x):
        h = net.a(x)
        return h + net.b(F.relu(h))

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 4)), (vectors(),)


@case(false=[pair(with_bias("a"), cols("b.weight"))])
def input_added_behind_the_activation():
    return Net(lambda net, x: net.b(F.relu(net.a(x)) + x), a=nn.Linear(4, 4), b=nn.Linear(4, 3)), (vectors(12, 4),)


class _Tied(nn.Module):
    """An autoencoder whose decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(x)) @ self.a.weight


@case(false=[alone(rows("a.weight"))])
def tied_transposed():
    return _Tied(), (vectors(),)


@case(false=[pair(rows("a.weight"), cols("c.weight")), pair((rows("a.weight"), rows("b.bias")), cols("c.weight"))])
def two_layers_with_one_weight():
    """The second layer's rows and the third layer's columns would pair, but the first layer has the same weight."""

    def run(net, x):
        return net.c(F.relu(net.b(torch.tanh(net.a(x)))))

    net = Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
    net.b.weight = net.a.weight
    return net, (vectors(12, 4),)


@case(false=[pair(with_bias("a"), cols("c.weight")), alone(rows("a.weight"))])
def one_layer_called_twice():
    def run(net, x):
        return net.c(F.relu(net.a(F.relu(net.a(x)))))

    return Net(run, a=nn.Linear(4, 4), c=nn.Linear(4, 3)), (vectors(12, 4),)


@case(false=[pair(cols("e.weight"), cols("a.weight")), pair(with_bias("a"), cols("e.weight"))])
def embedding_tied_to_the_head():
    def run(net, i):
        return F.gelu(net.a(net.e(i))) @ net.e.weight.T

    return Net(run, e=nn.Embedding(6, 4), a=nn.Linear(4, 4)), (torch.arange(6),)


@case(also=[pair(rows("gain"), cols("w.weight"), 2)], false=[pair(rows("gain"), cols("w.weight"))])
def gain_used_twice():
    """The gain multiplies twice before the layer: the layer must be divided by α²."""

    def run(net, x):
        return net.w(net.gain * F.relu(net.gain * x))

    return Net(run, gain=nn.Parameter(torch.ones(5)), w=nn.Linear(5, 3)), (vectors(),)


@case(false=[pair(rows("gain"), cols("w.weight"))])
def gain_used_in_front_and_behind():
    def run(net, x):
        return net.gain * torch.tanh(net.w(net.gain * x))

    return Net(run, gain=nn.Parameter(torch.ones(5)), w=nn.Linear(5, 5)), (vectors(),)


@case(false=[pair(with_bias("0"), cols("2.weight"))])
def gelu():
    return nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)), (vectors(),)


@case(false=[pair(with_bias("a"), cols("b.weight"))])
def clamped():
    return Net(lambda net, x: net.b(net.a(x).clamp(-2, 2)), a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (vectors(30),)


@case(false=[pair(with_bias("0"), cols("2.weight"))])
def relu_with_an_upper_end():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU6(), nn.Linear(4, 3)), (vectors(60) * 4,)


@case(false=[pair(rows("a.weight"), cols("b.weight"))])
def offset_before_the_relu():
    return Net(lambda net, x: net.b(F.relu(net.a(x) - 0.3)), a=nn.Linear(5, 4, bias=False), b=nn.Linear(4, 3)), (
        vectors(),
    )


@case(false=[pair(with_bias("a"), cols("b.weight"))])
def hidden_returned():
    def run(net, x):
        h = F.relu(net.a(x))
        return {"logits": net.b(h), "hidden": h}

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (vectors(),)


@case(false=[pair(with_bias("a"), cols("b.weight"))], by_gradient=False)
def detached_reader():
    """The gradient does not see the second reader: only a forward pass refutes the pair."""

    def run(net, x):
        h = F.relu(net.a(x))
        return net.b(h) + h.detach().sum(-1, keepdim=True)

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (vectors(),)


@case(false=[pair(with_bias("a"), cols("b.weight"))], by_gradient=False)
def rounded_straight_through():
    """The gradient is that of the identity, the forward pass rounds."""

    def run(net, x):
        h = F.relu(net.a(x))
        return net.b(h + ((8 * h).round() / 8 - h).detach())

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (vectors(),)


@case(false=[pair(with_bias("a"), cols("b.weight"))])
def penalty_among_the_outputs():
    def run(net, x):
        return net.b(F.relu(net.a(x))), net.a.weight.square().sum() + net.b.weight.square().sum()

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (vectors(),)


@case(false=[pair(rows("a.weight"), cols("b.weight"))])
def normalized_by_a_sum_with_one():
    """Looks like a normalization, but 1 + ‖h‖ is not homogeneous."""

    def run(net, x):
        h = net.a(x)
        return net.b(h / (1 + h.norm(dim=-1, keepdim=True)))

    return Net(run, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (vectors(),)


@case(false=[pair(with_bias("n"), cols("w.weight"))])
def layer_norm_behind_the_residual():
    """The normalized value goes on in the residual, so its gain is read by more than the next layer."""

    def run(net, x):
        h = net.n(x)
        return h + torch.tanh(net.w(h))

    return Net(run, n=nn.LayerNorm(4), w=nn.Linear(4, 4)), (vectors(20, 4),)


# --- transformers ---------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
    "use_cache": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Of a Llama and its relatives: two heads of four channels that share one KV head."""


def text() -> tuple[Tensor]:
    return (torch.stack([torch.randperm(8) for _ in range(8)]),)


def layer(name: str, number: int = 0) -> str:
    return f"model.layers.{number}.{name}.weight"


def llama_pairs(readers: tuple[Cut, ...], number: int = 0) -> list[Family]:
    """Gains with their readers, and v with o; `readers` read the second gain of the layer."""
    q, k, v, o = (layer(f"self_attn.{name}_proj", number) for name in "qkvo")
    return [
        pair(rows(layer("input_layernorm", number)), (cols(q), cols(k), cols(v))),
        pair(rows(layer("post_attention_layernorm", number)), readers),
        pair(writes(v, 1, 4), reads(o, 1, 4)),
    ]


HEAD = pair(rows("model.norm.weight"), cols("lm_head.weight"))
QUERIES_AND_KEYS = pair(
    writes(layer("self_attn.q_proj"), 1, 4, rope=True), writes(layer("self_attn.k_proj"), 1, 4, rope=True)
)
MLP = [
    *llama_pairs((cols(layer("mlp.gate_proj")), cols(layer("mlp.up_proj")))),
    pair(rows(layer("mlp.up_proj")), cols(layer("mlp.down_proj"))),
    HEAD,
]
STREAM = alone(whole("model.embed_tokens.weight"), whole(layer("self_attn.o_proj")), whole(layer("mlp.down_proj")))


@case(
    pairs=[*MLP, QUERIES_AND_KEYS],
    invariant=[STREAM],
    false=[
        pair(rows(layer("mlp.gate_proj")), cols(layer("mlp.down_proj"))),
        pair(rows(layer("input_layernorm")), cols(layer("self_attn.q_proj"))),
        pair(writes(layer("self_attn.q_proj"), 1, 4), rows(layer("self_attn.k_proj"))),
    ],
    tolerance=1e-5,
)
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES)), text()


def rope_pairs(name: str) -> Cut:
    """Channels c and c + 2 of the gain of a head."""
    return layer(name), lambda i: i.reshape(2, 2).T


@case(
    pairs=[*MLP, pair(rope_pairs("self_attn.q_norm"), rope_pairs("self_attn.k_norm"))],
    invariant=[STREAM, alone(blocks(layer("self_attn.q_proj"), 2)), alone(whole(layer("self_attn.k_proj")))],
    false=[QUERIES_AND_KEYS, pair(rows(layer("self_attn.q_norm")), rows(layer("self_attn.k_norm")))],
    tolerance=1e-5,
)
def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES)), text()


def qwen2_bias(name: str, cut: Callable[..., Cut] = writes, **options: bool) -> tuple[Cut, ...]:
    weight = layer(f"self_attn.{name}_proj")
    bias = weight.replace("weight", "bias")
    return cut(weight, 1, 4, **options), (bias, lambda i: writes(bias, 1, 4, **options)[1](i[:, None]))


@case(
    pairs=[
        *(
            family
            for family in MLP
            if layer("self_attn.o_proj") not in {name for side in family.names for name in side}
        ),
        pair(qwen2_bias("v"), reads(layer("self_attn.o_proj"), 1, 4)),
        pair(qwen2_bias("q", rope=True), qwen2_bias("k", rope=True)),
    ],
    invariant=[STREAM],
    false=[QUERIES_AND_KEYS],
    tolerance=1e-5,
)
def qwen2_with_biases():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES)), text()


@case(
    pairs=[
        family
        for i in range(2)
        for family in (
            *llama_pairs((cols(layer("mlp.gate_proj", i)), cols(layer("mlp.up_proj", i))), i),
            pair(rows(layer("mlp.up_proj", i)), cols(layer("mlp.down_proj", i))),
            pair(
                writes(layer("self_attn.q_proj", i), 1, 4, rope=True),
                writes(layer("self_attn.k_proj", i), 1, 4, rope=True),
            ),
        )
    ],
    also=[
        pair(
            (
                whole("model.embed_tokens.weight"),
                *(whole(layer(name, i)) for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")),
            ),
            whole("model.norm.weight"),
        )
    ],
    false=[
        pair(rows("model.norm.weight"), cols("model.embed_tokens.weight")),
        pair(rows(layer("mlp.up_proj", 0)), cols(layer("mlp.down_proj", 1))),
    ],
    tolerance=1e-5,
)
def llama_with_two_layers_and_a_tied_head():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": True})), text()


EXPERTS = "model.layers.0.mlp.experts"


@case(
    pairs=[
        *llama_pairs((cols(layer("mlp.gate")), cols(f"{EXPERTS}.gate_up_proj", 2))),
        pair(
            (f"{EXPERTS}.gate_up_proj", lambda i: i[:, 4:].reshape(12, -1)),
            (f"{EXPERTS}.down_proj", lambda i: i.transpose(1, 2).reshape(12, -1)),
        ),
        QUERIES_AND_KEYS,
        HEAD,
    ],
    invariant=[
        alone(whole("model.embed_tokens.weight"), whole(layer("self_attn.o_proj")), whole(f"{EXPERTS}.down_proj"))
    ],
    false=[pair(rows(layer("post_attention_layernorm")), cols(f"{EXPERTS}.gate_up_proj", 2))],
    tolerance=1e-5,
)
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts)), text()


BLOCK = "transformer.h.0"
ATTENTION = f"{BLOCK}.attn.c_attn"


@case(
    pairs=[
        pair(with_bias(f"{BLOCK}.ln_1"), rows(f"{ATTENTION}.weight")),
        pair(with_bias(f"{BLOCK}.ln_2"), rows(f"{BLOCK}.mlp.c_fc.weight")),
        pair(
            (part(f"{ATTENTION}.weight", 0, 8, 1), part(f"{ATTENTION}.bias", 0, 8)),
            part(f"{ATTENTION}.weight", 8, 16, 1),
        ),
        pair(
            (part(f"{ATTENTION}.weight", 16, 24, 1), part(f"{ATTENTION}.bias", 16, 24)),
            rows(f"{BLOCK}.attn.c_proj.weight"),
        ),
    ],
    also=[
        pair(
            tuple(
                whole(name)
                for name in (
                    "transformer.wte.weight",
                    "transformer.wpe.weight",
                    *(f"{BLOCK}.{part}.c_proj.{kind}" for part in ("attn", "mlp") for kind in ("weight", "bias")),
                )
            ),
            (whole("transformer.ln_f.weight"), whole("transformer.ln_f.bias")),
        )
    ],
    invariant=[alone(part(f"{ATTENTION}.bias", 8, 16))],
    false=[
        pair(with_bias("transformer.ln_f"), cols("transformer.wte.weight")),
        pair((cols(f"{BLOCK}.mlp.c_fc.weight"), rows(f"{BLOCK}.mlp.c_fc.bias")), rows(f"{BLOCK}.mlp.c_proj.weight")),
    ],
)
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": 8,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_inner": 6,
        "use_cache": False,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=1)), text()


def head_slices(name: str, number: int, start: int = 0, stop: int = 4, *, joined: int = 1) -> tuple[Cut, ...]:
    """Channels of the queries (0), keys (1) or values (2) in a weight and a bias that have them head by head."""

    def cut(i: Tensor) -> Tensor:
        inside = i.reshape(2, 3, 4, -1)[:, number, start:stop]
        return inside.reshape(2 * (stop - start) // joined, -1)

    return (f"{name}.weight", cut), (f"{name}.bias", cut)


NEOX = "gpt_neox.layers.0"
NEOX_QKV = f"{NEOX}.attention.query_key_value"


@case(
    pairs=[
        pair(with_bias(f"{NEOX}.input_layernorm"), cols(f"{NEOX_QKV}.weight")),
        pair(with_bias(f"{NEOX}.post_attention_layernorm"), cols(f"{NEOX}.mlp.dense_h_to_4h.weight")),
        pair(head_slices(NEOX_QKV, 0, 0, 2, joined=2), head_slices(NEOX_QKV, 1, 0, 2, joined=2)),
        pair(head_slices(NEOX_QKV, 0, 2, 4), head_slices(NEOX_QKV, 1, 2, 4)),
        pair(head_slices(NEOX_QKV, 2), cols(f"{NEOX}.attention.dense.weight")),
        pair(with_bias("gpt_neox.final_layer_norm"), cols("lm_head.weight")),
    ],
    invariant=[
        alone(
            whole("gpt_neox.embed_in.weight"),
            *(
                whole(f"{NEOX}.{part}.{k}")
                for part in ("attention.dense", "mlp.dense_4h_to_h")
                for k in ("weight", "bias")
            ),
        ),
        alone(head_slices(NEOX_QKV, 1, 2, 4)[1]),
    ],
    false=[pair(head_slices(NEOX_QKV, 0), head_slices(NEOX_QKV, 1))],
)
def gpt_neox():
    """Half of the channels of a head are rotated; the biases of the other keys have no effect."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = SIZES | {"rotary_pct": 0.5, "intermediate_size": 6}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)), text()


BLOOM = "transformer.h.0"
BLOOM_QKV = f"{BLOOM}.self_attention.query_key_value"


@case(
    pairs=[
        pair(with_bias(f"{BLOOM}.input_layernorm"), cols(f"{BLOOM_QKV}.weight")),
        pair(with_bias(f"{BLOOM}.post_attention_layernorm"), cols(f"{BLOOM}.mlp.dense_h_to_4h.weight")),
        pair(head_slices(BLOOM_QKV, 0), head_slices(BLOOM_QKV, 1)[:1]),
        pair(head_slices(BLOOM_QKV, 2), cols(f"{BLOOM}.self_attention.dense.weight")),
    ],
    also=[
        pair(
            whole("transformer.word_embeddings.weight"),
            (whole("transformer.ln_f.weight"), whole("transformer.ln_f.bias")),
        )
    ],
    invariant=[
        alone(
            *(
                whole(f"{part}.{kind}")
                for part in (
                    "transformer.word_embeddings_layernorm",
                    f"{BLOOM}.self_attention.dense",
                    f"{BLOOM}.mlp.dense_4h_to_h",
                )
                for kind in ("weight", "bias")
            )
        ),
        alone(head_slices(BLOOM_QKV, 1)[1]),
    ],
    false=[pair(with_bias("transformer.ln_f"), cols("transformer.word_embeddings.weight"))],
    tolerance=1e-6,
)
def bloom():
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2, use_cache=False, initializer_range=0.3)
    return BloomForCausalLM(config), text()


FALCON_QKV = f"{BLOOM}.self_attention.query_key_value.weight"


@case(
    pairs=[
        pair(with_bias(f"{BLOOM}.ln_attn"), cols(FALCON_QKV)),
        pair(with_bias(f"{BLOOM}.ln_mlp"), cols(f"{BLOOM}.mlp.dense_h_to_4h.weight")),
        pair(
            (FALCON_QKV, lambda i: i.reshape(2, 4, 2, -1)[:, :2].reshape(2, -1)),
            (FALCON_QKV, lambda i: i.reshape(2, 4, 2, -1)[:, 2].reshape(2, -1)),
        ),
        pair(
            (FALCON_QKV, lambda i: i.reshape(2, 4, 2, -1)[:, 3].reshape(4, -1)),
            reads(f"{BLOOM}.self_attention.dense.weight", 2, 2),
        ),
        pair(with_bias("transformer.ln_f"), cols("lm_head.weight")),
    ],
    invariant=[
        alone(
            whole("transformer.word_embeddings.weight"),
            whole(f"{BLOOM}.self_attention.dense.weight"),
            whole(f"{BLOOM}.mlp.dense_4h_to_h.weight"),
        )
    ],
    tolerance=1e-5,
)
def falcon():
    """Two KV heads of two channels, each behind the two heads of queries that share it."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "ffn_hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 4}
    options = {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False, "use_cache": False}
    return FalconForCausalLM(FalconConfig(**sizes, **options, initializer_range=0.3)), text()


MIXER = "backbone.layers.0.mixer"


@case(
    pairs=[
        pair(rows("backbone.layers.0.norm.weight"), cols(f"{MIXER}.in_proj.weight")),
        pair(part(f"{MIXER}.in_proj.weight", 0, 8), rows(f"{MIXER}.conv1d.weight")),
        pair(part(f"{MIXER}.x_proj.weight", 0, 2), cols(f"{MIXER}.dt_proj.weight")),
        pair(part(f"{MIXER}.x_proj.weight", 2, 5), part(f"{MIXER}.x_proj.weight", 5, 8)),
        pair(rows("backbone.norm_f.weight"), cols("lm_head.weight")),
    ],
    also=[
        pair(
            ((f"{MIXER}.x_proj.weight", lambda i: i[5:].reshape(1, -1)), whole(f"{MIXER}.D")),
            whole(f"{MIXER}.out_proj.weight"),
        )
    ],
    invariant=[alone(whole("backbone.embeddings.weight"), whole(f"{MIXER}.out_proj.weight"))],
    false=[
        pair(part(f"{MIXER}.in_proj.weight", 8, 16), cols(f"{MIXER}.out_proj.weight")),
        pair(rows(f"{MIXER}.D"), cols(f"{MIXER}.out_proj.weight")),
    ],
    tolerance=1e-5,
)
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "state_size": 3, "num_hidden_layers": 1, "time_step_rank": 2}
    options = {"conv_kernel": 2, "tie_word_embeddings": False, "use_cache": False, "initializer_range": 0.3}
    return MambaForCausalLM(MambaConfig(**sizes, **options)), text()


# --- the labels, without the library --------------------------------------------------------------------------------


def by_name(label: Case) -> str:
    return label.name


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def exact(label: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model in float64 and in training mode, at generic weights, with an ε of almost 0 in its normalizations."""
    torch.manual_seed(0)
    model, inputs = label.build()
    model.double().train()
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-12)  # not 0: a channel that is dead has no variance
    redraw(model, 0)
    return model, tuple(x.double() if x.is_floating_point() else x for x in inputs)


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Other weights of ordinary size, away from 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(model).values():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        parameter.copy_((draw + 0.2 * draw.sign()) / math.sqrt(fan_in))


def tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors(value)


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    torch.manual_seed(1)  # for dropout
    return torch.cat([t.flatten() for t in tensors(model(*inputs))])


def exponents(model: nn.Module, families: list[Family]) -> Tensor:
    """The exponent of α in every entry of every trained parameter, one row for each symmetry."""
    start, where = 0, {}
    for name, parameter in trained(model).items():
        where[name] = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
        start += parameter.numel()
    found = []
    for family in families:
        up, down = ([cut(where[name]) for name, cut in side] for side in (family.up, family.down))
        assert len({len(cut) for cut in up + down}) == 1, f"sides of unequal number in {family.names}"
        for i in range(len(up[0])):
            row = torch.zeros(start, dtype=torch.float64)
            for cut in up:
                row[cut[i]] += 1
            for cut in down:
                row[cut[i]] -= family.exponent
            found.append(row)
    return torch.stack(found) if found else torch.zeros(0, start, dtype=torch.float64)


@torch.no_grad()
def change(model: nn.Module, inputs: tuple[Tensor, ...], symmetries: Tensor) -> float:
    """Relative change of the outputs when every symmetry gets an α of its own between 0.4 and 2.5."""
    before = outputs(model, inputs)
    saved = [parameter.clone() for parameter in trained(model).values()]
    log_alpha = torch.linspace(-0.9, 0.9, 2 * len(symmetries) + 2, dtype=torch.float64)[1:-1:2]
    log_alpha = log_alpha[torch.randperm(len(log_alpha), generator=torch.Generator().manual_seed(2))]
    log_alpha = log_alpha + 0.05  # one symmetry alone must not get α = 1
    factors = (log_alpha @ symmetries).exp()
    for parameter, factor in zip(trained(model).values(), factors.split([p.numel() for p in saved]), strict=True):
        parameter.mul_(factor.reshape(parameter.shape))
    after = outputs(model, inputs)
    for parameter, old in zip(trained(model).values(), saved, strict=True):
        parameter.copy_(old)
    return ((after - before).norm() / before.norm()).item()


def rank(symmetries: Tensor) -> int:
    return int(torch.linalg.matrix_rank(symmetries)) if len(symmetries) else 0


def all_symmetries(model: nn.Module, inputs: tuple[Tensor, ...], tolerance: float) -> int:
    """Dimension of the space of all exponents s with Σ_j s_j x_j ∂f/∂x_j = 0 at several random weights x."""
    parameters = list(trained(model).values())
    total = sum(parameter.numel() for parameter in parameters)
    jacobian = []
    for seed in range(8):
        redraw(model, seed)
        output = outputs(model, inputs)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(total // 4 + 2):
            cotangent = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            gradients = torch.autograd.grad(output, parameters, cotangent, retain_graph=True)
            row = torch.cat([(g * p).detach().flatten() for g, p in zip(gradients, parameters, strict=True)])
            jacobian.append(row / row.norm())
    values = torch.linalg.svdvals(torch.stack(jacobian))
    null = values < tolerance * values[0]
    assert bool((values[~null] > 5 * tolerance * values[0]).all()), f"no gap in the singular values {values[-8:]}"
    return int(null.sum())


@pytest.mark.parametrize("label", CASES, ids=by_name)
def test_the_label_is_true_and_complete(label: Case):
    model, inputs = exact(label)
    listed = [*label.pairs, *label.also, *label.invariant]
    for family in listed:
        assert change(model, inputs, exponents(model, [family])) < label.tolerance, family.names
    for family in label.false:
        assert change(model, inputs, exponents(model, [family])) > 1e-3, family.names
    assert rank(exponents(model, label.pairs)) == len(exponents(model, label.pairs))
    if label.by_gradient:
        assert all_symmetries(model, inputs, label.tolerance) == rank(exponents(model, listed))


# --- what find_groups claims ----------------------------------------------------------------------------------------


def slices(indices: Tensor, spec: Any) -> Tensor:
    """The indices of each slice, (n, size). A fold cuts (g0, d0, g1, d1) entries of a dimension by both g.

    A further number says into how many blocks dimension 0 is cut before; two say how many ranges there are, and at
    which distance.
    """
    if not (isinstance(spec, tuple) and spec[0] == "fold"):
        return Layout(spec).rows(indices)
    _, dim, start, g0, d0, g1, d1, *more = spec
    if len(more) == 2:
        count, stride = more
        length = g0 * d0 * g1 * d1 // count
        inside = torch.cat([indices.movedim(dim, 0)[start + i * stride :][:length] for i in range(count)])
        return inside.reshape(g0, d0, g1, d1, -1).movedim(2, 1).reshape(g0 * g1, -1)
    cut = []
    for block in indices.chunk(more[0]) if more else [indices]:
        inside = block.movedim(dim, 0)[start : start + g0 * d0 * g1 * d1]
        cut.append(inside.reshape(g0, d0, g1, d1, -1).movedim(2, 1).reshape(g0 * g1, -1))
    return torch.cat(cut)


def claimed_family(claim: Any, model: nn.Module) -> Family:
    """A claim in the form of a label."""
    first_name = {id(parameter): name for name, parameter in trained(model).items()}
    every_name = dict(model.named_parameters(remove_duplicate=False))

    def side(names: tuple[str, ...], specs: tuple[object, ...]) -> tuple[Cut, ...]:
        return tuple(
            (first_name[id(every_name[name])], lambda i, spec=spec: slices(i, spec))
            for name, spec in zip(names, specs, strict=True)
        )

    return Family(side(claim.a, claim.a_specs), side(claim.b, claim.b_specs))


def names_and_numbers(model: nn.Module, families: list[Family], inert: Tensor) -> Counter[frozenset[frozenset[str]]]:
    """How many slices pair up between two sets of names; slices without effect, such as a bias of k, are left out."""
    parameters = trained(model)
    idle = dict(zip(parameters, inert.split([p.numel() for p in parameters.values()]), strict=True))
    found: Counter[frozenset[frozenset[str]]] = Counter()
    for family in families:
        effective = [
            frozenset(
                name
                for name, cut in side
                if not idle[name][cut(torch.arange(len(idle[name])).reshape(parameters[name].shape))].all()
            )
            for side in (family.up, family.down)
        ]
        found[frozenset(effective)] += len(exponents(model, [family]))
    return found


@pytest.mark.parametrize("label", CASES, ids=by_name)
def test_pairs_are_those_of_the_label(label: Case):
    torch.manual_seed(0)
    groups = st.find_groups(*_model_and_inputs(label))
    model, inputs = exact(label)
    claims = [claimed_family(claim, model) for claim in groups.pairs]
    for claim, family in zip(groups.pairs, claims, strict=True):
        symmetries = exponents(model, [family])
        assert claim.n == len(symmetries), f"{claim}: n is {claim.n}, but the specs give {len(symmetries)} slices"
        refuted = change(model, inputs, symmetries)
        assert refuted < label.tolerance, f"{claim} is claimed, but changes the outputs by {refuted:.1e}"
    invariant, expected, found = (exponents(model, part) for part in (label.invariant, label.pairs, claims))
    known = torch.cat([found, invariant])
    for family in label.pairs:
        missing = rank(torch.cat([known, exponents(model, [family])])) - rank(known)
        assert missing == 0, f"{missing} symmetries of {sorted(map(sorted, family.names))} are not in {groups.pairs}"
    for claim, family in zip(groups.pairs, claims, strict=True):
        alone = torch.cat([invariant, exponents(model, [family])])
        assert rank(alone) == rank(invariant) + claim.n, f"{claim}: its sides are invariant by themselves"
    if label.one_form:
        idle = [row for row in invariant if row.sum() == 1]
        inert = torch.stack(idle).sum(0) > 0 if idle else torch.zeros(found.shape[1], dtype=torch.bool)
        names = names_and_numbers(model, claims, inert)
        for sides, count in names_and_numbers(model, label.pairs, inert).items():
            assert names[sides] == count, f"{count} of {sorted(map(sorted, sides))}, got {names[sides]}: {groups.pairs}"
    assert rank(known) <= rank(torch.cat([expected, invariant, exponents(model, label.also)])), "more than there is"


def _model_and_inputs(label: Case) -> tuple[object, ...]:
    model, inputs = label.build()
    return model, *inputs


class RandomNet(nn.Module):
    """Layers that read any earlier value: branches, sums, products, layers called twice, detached values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.layers = nn.ModuleList()
        self.gains = nn.ParameterList()
        self.program: list[tuple[str, int, int, int]] = []
        kinds = ["linear"] * 5 + ["relu"] * 3 + ["leaky", "product", "sum", "gain", "norm", "batch norm"]
        kinds += ["tanh", "gelu", "clamp", "square", "again", "detach", "softmax"]
        for values in range(1, 10):
            kind, which = choose.choice(kinds), -1
            if kind == "again":
                known = [i for i, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
                kind, which = ("linear", choose.choice(known)) if known else ("relu", -1)
            elif kind in ("linear", "norm", "batch norm"):
                which = len(self.layers)
                makers = {"norm": lambda: nn.LayerNorm(4), "batch norm": lambda: nn.BatchNorm1d(4)}
                self.layers.append(makers.get(kind, lambda: nn.Linear(4, 4, bias=choose.random() < 0.5))())
            elif kind == "gain":
                which = len(self.gains)
                self.gains.append(nn.Parameter(torch.ones(choose.choice([1, 4]))))
            self.program.append(
                (kind, max(0, values - choose.choice([1, 1, 1, 2, 3])), choose.randrange(values), which)
            )
        self.outputs = [9, choose.randrange(5, 10)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        functions = {
            "relu": F.relu,
            "leaky": F.leaky_relu,
            "tanh": torch.tanh,
            "gelu": F.gelu,
            "clamp": lambda t: t.clamp(-1, 1),
            "square": torch.square,
            "detach": torch.detach,
            "softmax": lambda t: t.softmax(-1),
        }
        for kind, first, second, which in self.program:
            if kind in ("linear", "norm", "batch norm"):
                values.append(self.layers[which](values[first]))
            elif kind == "gain":
                values.append(self.gains[which] * values[first])
            elif kind == "product":
                values.append(values[first] * values[second])
            elif kind == "sum":
                values.append(values[first] + values[second])
            else:
                values.append(functions[kind](values[first]))
        return tuple(values[i] for i in self.outputs)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_claimed_of_a_random_network_that_a_forward_pass_refutes(seed: int):
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return RandomNet(seed), (vectors(16, 4),)

    label = Case(f"random network {seed}", build)
    torch.manual_seed(seed)
    model, inputs = exact(label)
    if not any(t.requires_grad for t in model(*inputs)):
        return
    groups = st.find_groups(*_model_and_inputs(label))
    for claim in groups.pairs:
        symmetries = exponents(model, [claimed_family(claim, model)])
        for point in range(3):
            redraw(model, point)
            assert change(model, inputs, symmetries) < label.tolerance, f"{claim}: {model.program}"


@pytest.mark.parametrize("name", ["relu_mlp", "swiglu", "grouped_queries_with_rope", "llama"])
def test_a_pair_says_its_names_and_its_reason(name: str):
    label = next(label for label in CASES if label.name == name)
    torch.manual_seed(0)
    groups = st.find_groups(*_model_and_inputs(label))
    assert groups.pairs
    for claim in groups.pairs:
        assert isinstance(claim.reason, str)
        assert claim.reason
        for parameter in (*claim.a, *claim.b):
            assert parameter in str(claim)
    assert "pair" in str(groups)


def test_pairs_do_not_depend_on_the_initial_weights_or_on_eval_mode():
    label = next(label for label in CASES if label.name == "llama")
    found = []
    for seed, training in ((0, True), (1, False)):
        torch.manual_seed(seed)
        model, *inputs = _model_and_inputs(label)
        groups = st.find_groups(model.train(training), *inputs)
        found.append(sorted((claim.a, claim.b, claim.n) for claim in groups.pairs))
        assert model.training is training
    assert found[0] == found[1]
    assert found[0]


def test_a_network_without_pairs_has_an_empty_list():
    groups = st.find_groups(nn.Linear(5, 3), vectors())
    assert groups.pairs == []

"""Normalizations that no module is registered for: they are written out in the forward pass, in various ways."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from cases._case import Custom, case, images, net, parameter, randn, sequences, vectors


class StandardDeviationNorm(nn.Module):
    """Layer normalization with ε added to the standard deviation instead of the variance."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


class StandardizedConv2d(nn.Conv2d):
    """Filters without mean, divided by their standard deviation and ε."""

    eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(x, w / (w.std((1, 2, 3), keepdim=True) + self.eps), self.bias)


class PixelNorm(nn.Module):
    eps = 1e-8

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps)


class NormFunction(torch.autograd.Function):
    """Divides by the length, with its own backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x / length, length)
        return x / length

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        direction, length = ctx.saved_tensors
        return (g - (g * direction).sum(-1, keepdim=True) * direction) / length


def _cholesky(m: nn.Module, x: Tensor) -> Tensor:
    """Whitened by a triangular matrix, which removes the scale of each feature."""
    y = m.fc(x)
    y = y - y.mean(0)
    factor = torch.linalg.cholesky(y.T @ y / len(y))
    return m.head(torch.linalg.solve_triangular(factor, y.T, upper=False).T)


def _symmetric(m: nn.Module, x: Tensor) -> Tensor:
    """Whitened by a symmetric matrix, which removes only the common scale of all features."""
    y = m.fc(x)
    y = y - y.mean(0)
    values, vectors_ = torch.linalg.eigh(y.T @ y / len(y))
    return m.head(y @ (vectors_ * values.rsqrt()) @ vectors_.T)


def _linear_attention(m: nn.Module, x: Tensor) -> Tensor:
    """Weights are positive and divided by their sum: queries and keys of each head are free."""
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (m.q(x).relu(), m.k(x).relu(), m.v(x)))
    total = q @ k.sum(-2, keepdim=True).transpose(-1, -2)
    return m.head((q @ (k.transpose(-1, -2) @ v) / (total + 1e-12)).transpose(1, 2).flatten(2))


def _recurrent(m: nn.Module, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), 6)
    for step in x.unbind(1):
        state = m.norm(m.enter(step) + m.again(state)).tanh()
    return m.head(state)


def _gates(m: nn.Module, x: Tensor) -> Tensor:
    """An LSTM that normalizes what enters and what returns, each for itself."""
    state, cell = x.new_zeros(len(x), 5), x.new_zeros(len(x), 5)
    for step in x.unbind(1):
        i, f, g, o = (m.norm1(m.enter(step)) + m.norm2(m.again(state))).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
    return m.head(state)


CASES = [
    case(
        "epsilon_beside_the_deviation",
        lambda: net(fc=nn.Linear(6, 8), norm=StandardDeviationNorm(), act=nn.Tanh(), head=nn.Linear(8, 3)),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "standardized_convolutions",
        lambda: net(
            a=StandardizedConv2d(3, 8, 3),
            act=nn.ReLU(),
            b=StandardizedConv2d(8, 8, 3),
            norm=nn.GroupNorm(2, 8),
            tanh=nn.Tanh(),
            head=nn.Conv2d(8, 2, 1),
        ),
        images,
        rows={"a.weight": "filter", "b.weight": "filter"},
    ),
    case(
        "pixel_norm",
        lambda: net(conv=nn.ConvTranspose2d(3, 6, 3), norm=PixelNorm(), act=nn.LeakyReLU(0.2), head=nn.Conv2d(6, 2, 1)),
        images,
        joint={"conv.weight conv.bias": "tensor"},
    ),
    case(
        "mean_of_absolute_values",
        lambda: Custom(
            lambda m, x: m.head((lambda y: y / y.abs().mean((1, 2, 3), keepdim=True))(m.conv(x)).tanh()),
            conv=nn.Conv2d(3, 6, 3, bias=False),
            head=nn.Conv2d(6, 2, 1),
        ),
        images,
        rows={"conv.weight": "tensor"},
    ),
    case(
        "own_backward_pass",
        lambda: Custom(
            lambda m, x: m.head(NormFunction.apply(m.fc(x)).tanh()), fc=nn.Linear(6, 8), head=nn.Linear(8, 3)
        ),
        vectors,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "cholesky_whitening",
        lambda: Custom(_cholesky, fc=nn.Linear(6, 4, bias=False), head=nn.Linear(4, 3)),
        randn(30, 6),
        rows={"fc.weight": "filter"},
    ),
    case(
        "symmetric_whitening",
        lambda: Custom(_symmetric, fc=nn.Linear(6, 4, bias=False), head=nn.Linear(4, 3)),
        randn(30, 6),
        rows={"fc.weight": "tensor"},
    ),
    case(
        "linear_attention",
        lambda: Custom(
            _linear_attention,
            q=nn.Linear(8, 8, bias=False),
            k=nn.Linear(8, 8, bias=False),
            v=nn.Linear(8, 8),
            head=nn.Linear(8, 3),
        ),
        randn(3, 9, 8),
        rows={"q.weight": 2, "k.weight": 2},
    ),
    case(
        "recurrent_sum_ln",  # what enters and what returns are added and normalized at every step
        lambda: Custom(
            _recurrent,
            enter=nn.Linear(8, 6, bias=False),
            again=nn.Linear(6, 6, bias=False),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 3),
        ),
        sequences,
        joint={"enter.weight again.weight": "tensor"},
    ),
    case(
        "lstm_of_normalized_parts",
        lambda: Custom(
            _gates,
            enter=nn.Linear(8, 20, bias=False),
            norm1=nn.LayerNorm(20),
            again=nn.Linear(5, 20, bias=False),
            norm2=nn.LayerNorm(20),
            head=nn.Linear(5, 3),
        ),
        sequences,
        rows={"enter.weight": "tensor", "again.weight": "tensor"},
    ),
    case(
        "columns_of_unit_length",
        lambda: Custom(
            lambda m, x: functional.linear(
                functional.normalize(functional.linear(x, functional.normalize(m.a, dim=1)), dim=1),
                functional.normalize(m.b, dim=0),
            ),
            a=parameter(8, 6),
            b=parameter(3, 8),
        ),
        vectors,
        rows={"a": "filter", "b": ("axis", 1)},
    ),
]

"""Weights that are normalized themselves: torch parametrizations and hand-written ones."""

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from cases._case import Custom, case, images, net, parameter, randn, vectors


def _old_weight_norm(layer: nn.Module, **options) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, **options)


class _Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, weight: Tensor) -> Tensor:
        return self.function(weight)


def _parametrized(layer: nn.Module, function) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", _Function(function))


def _standardized(w: Tensor) -> Tensor:
    return (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)


class _Standardized(nn.Module):
    """With an ε of some percent of the variance, as for filters with thousands of inputs."""

    eps = 2e-3

    def forward(self, w: Tensor) -> Tensor:
        variance, mean = torch.var_mean(w, (1, 2, 3), keepdim=True)
        return (w - mean) / (variance + self.eps).sqrt()


def _standardized_conv(inputs: int, outputs: int) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, 3)
    nn.init.normal_(conv.weight, std=0.2)
    return parametrize.register_parametrization(conv, "weight", _Standardized())


def _weighted(function, *shape: int) -> Custom:
    return Custom(lambda m, x: functional.linear(x, function(m.w)).tanh(), w=parameter(*shape))


CASES = [
    case(
        "weight_norm_old",
        lambda: net(conv=_old_weight_norm(nn.Conv2d(3, 5, 3)), act=nn.Tanh()),
        images,
        rows={"conv.weight_v": "filter"},
    ),
    case(
        "weight_norm",
        lambda: net(conv=parametrizations.weight_norm(nn.Conv2d(3, 5, 3)), act=nn.Tanh()),
        images,
        rows={"conv.parametrizations.weight.original1": "filter"},
    ),
    case(
        "weight_norm_dim1",
        lambda: net(fc=parametrizations.weight_norm(nn.Linear(6, 5), dim=1), act=nn.Tanh()),
        vectors,
        rows={"fc.parametrizations.weight.original1": ("axis", 1)},
    ),
    case(
        "weight_norm_old_whole",
        lambda: net(fc=_old_weight_norm(nn.Linear(6, 5), dim=None), act=nn.Tanh()),
        vectors,
        rows={"fc.weight_v": "tensor"},
    ),
    case(
        "weight_norm_bn",  # the length has one number per filter, and the norm removes it
        lambda: net(
            conv=parametrizations.weight_norm(nn.Conv2d(3, 5, 3, bias=False)),
            bn=nn.BatchNorm2d(5),
            act=nn.Tanh(),
        ),
        images,
        rows={"conv.parametrizations.weight.original1": "filter"},
        no_effect="conv.parametrizations.weight.original0",
    ),
    case(
        "spectral_norm_old",
        lambda: net(fc=nn.utils.spectral_norm(nn.Linear(6, 5)), act=nn.Tanh()),
        vectors,
        rows={"fc.weight_orig": "tensor"},
    ),
    case(
        "spectral_norm",
        lambda: net(conv=parametrizations.spectral_norm(nn.Conv2d(3, 5, 3)), act=nn.Tanh()),
        images,
        rows={"conv.parametrizations.weight.original": "tensor"},
    ),
    case(
        "spectral_norm_bn",
        lambda: net(
            fc=parametrizations.spectral_norm(nn.Linear(6, 5, bias=False)),
            bn=nn.BatchNorm1d(5),
            act=nn.Tanh(),
        ),
        vectors,
        rows={"fc.parametrizations.weight.original": "filter"},
    ),
    case(
        "spectral_norm_ln",  # the weight is free without the bias
        lambda: net(fc=parametrizations.spectral_norm(nn.Linear(6, 5)), ln=nn.LayerNorm(5), act=nn.Tanh()),
        vectors,
        rows={"fc.parametrizations.weight.original": "tensor"},
    ),
    case(
        "orthogonal",
        lambda: net(fc=parametrizations.orthogonal(nn.Linear(6, 6)), act=nn.Tanh()),
        vectors,
    ),
    case(
        "symmetric_bn",  # a row of the symmetric matrix is spread over the whole of the weight
        lambda: net(
            fc=_parametrized(nn.Linear(6, 6, bias=False), lambda w: w + w.T),
            bn=nn.BatchNorm1d(6),
            act=nn.Tanh(),
        ),
        vectors,
        rows={"fc.parametrizations.weight.original": "tensor"},
    ),
    case(
        "exponential_ln",
        lambda: net(fc=_parametrized(nn.Linear(6, 6, bias=False), torch.exp), ln=nn.LayerNorm(6), act=nn.Tanh()),
        vectors,
    ),
    case(
        "weight_standardization",
        lambda: net(conv=_parametrized(nn.Conv2d(3, 5, 3), _standardized), act=nn.Tanh()),
        images,
        rows={"conv.parametrizations.weight.original": "filter"},
    ),
    case(
        "scaled_weight_standardization",
        lambda: Custom(
            lambda m, x: functional.conv2d(x, m.gain * _standardized(m.weight), m.bias).tanh(),
            weight=parameter(5, 3, 3, 3),
            gain=nn.Parameter(torch.rand(5, 1, 1, 1) + 0.5),
            bias=parameter(5),
        ),
        images,
        rows={"weight": "filter"},
    ),
    case(
        "weight_standardization_with_large_epsilon",
        lambda: net(
            a=_standardized_conv(3, 16),
            relu=nn.ReLU(),
            b=_standardized_conv(16, 8),
            act=nn.Tanh(),
        ),
        images,
        rows={
            "a.parametrizations.weight.original": "filter",
            "b.parametrizations.weight.original": "filter",
        },
    ),
    case("weight_centered", lambda: _weighted(lambda w: w - w.mean(1, keepdim=True), 5, 6), vectors),
    case(
        "unit_filters",
        lambda: _weighted(lambda w: functional.normalize(w, dim=1), 5, 6),
        vectors,
        rows={"w": "filter"},
    ),
    case(
        "unit_columns",
        lambda: _weighted(lambda w: functional.normalize(w, dim=0), 5, 6),
        vectors,
        rows={"w": ("axis", 1)},
    ),
    case("unit_tensor", lambda: _weighted(lambda w: w / w.norm(), 5, 6), vectors, rows={"w": "tensor"}),
    case("unit_blocks", lambda: _weighted(_unit_blocks, 6, 4), randn(10, 4), rows={"w": 3}),
    case(
        "largest_entry_one",
        lambda: _weighted(lambda w: w / w.abs().amax(), 5, 6),
        vectors,
        rows={"w": "tensor"},
    ),
    case("softmax_of_weight", lambda: _weighted(lambda w: w.softmax(-1), 5, 6), vectors),
    case(
        "product_of_experts_weight",  # two factors of one weight, each free because the product is normalized
        lambda: Custom(
            lambda m, x: functional.linear(x, functional.normalize(m.a @ m.b, dim=1)).tanh(),
            a=parameter(5, 3),
            b=parameter(3, 6),
        ),
        vectors,
        rows={"a": "filter", "b": "tensor"},
    ),
    case(
        "sum_of_weights_unit",
        lambda: Custom(
            lambda m, x: functional.linear(x, functional.normalize(m.a + m.b.sin(), dim=1)),
            a=parameter(5, 6),
            b=parameter(5, 6),
        ),
        vectors,
    ),
]


def _unit_blocks(w: Tensor) -> Tensor:
    return functional.normalize(w.reshape(3, -1), dim=1).reshape(w.shape)

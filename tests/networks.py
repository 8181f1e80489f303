"""Small networks with hand-labelled rows, and real training steps on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


@dataclass(frozen=True)
class Network:
    """A builder and the rows of its radially invariant parameters, joint ones as tuples of names."""

    build: Callable[[], nn.Module]
    rows: dict[tuple[str, ...], str | int]


def convolutional(norm: Callable[[int], nn.Module], *, bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=bias),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, stride=2, bias=bias),
        norm(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def perceptron(norm: Callable[[int], nn.Module], *, bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(72, 8, bias=bias),
        norm(8),
        nn.Tanh(),
        nn.Linear(8, 6, bias=bias),
        norm(6),
        nn.Linear(6, 5),
    )


def weight_normalized() -> nn.Module:
    model = convolutional(lambda channels: nn.Identity(), bias=True)
    for layer in (model[0], model[3]):
        weight_norm(layer)
    return model


CONVOLUTIONS: dict[tuple[str, ...], str | int] = {("0.weight",): "filter", ("3.weight",): "filter"}

NETWORKS = {
    "BN": Network(lambda: convolutional(lambda c: nn.BatchNorm2d(c, eps=1e-30), bias=False), CONVOLUTIONS),
    "BN without affine": Network(
        lambda: convolutional(lambda c: nn.BatchNorm2d(c, eps=1e-30, affine=False), bias=False), CONVOLUTIONS
    ),
    "WN": Network(
        weight_normalized,
        {("0.parametrizations.weight.original1",): "filter", ("3.parametrizations.weight.original1",): "filter"},
    ),
    "IN": Network(
        lambda: convolutional(lambda c: nn.InstanceNorm2d(c, eps=1e-30, affine=True), bias=False), CONVOLUTIONS
    ),
    "GN": Network(
        lambda: convolutional(lambda c: nn.GroupNorm(2, c, eps=1e-30), bias=True),
        {("0.weight", "0.bias"): 2, ("3.weight", "3.bias"): 2},
    ),
    "LN": Network(
        lambda: perceptron(lambda c: nn.LayerNorm(c, eps=1e-30), bias=True),
        {("1.weight", "1.bias"): "tensor", ("4.weight", "4.bias"): "tensor"},
    ),
    "RMSNorm": Network(
        lambda: perceptron(lambda c: nn.RMSNorm(c, eps=1e-30), bias=False),
        {("1.weight",): "tensor", ("4.weight",): "tensor"},
    ),
}


def backward_passes(model: nn.Module, steps: int, *, seed: int = 0) -> Iterator[int]:
    """Yield once per training step, with fresh gradients of the model's parameters in place."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    images = torch.randn(64, 2, 6, 6, generator=generator).to(dtype)
    labels = torch.randint(5, (64,), generator=generator)
    for step in range(steps):
        batch = torch.randint(64, (16,), generator=generator)
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        yield step


def parameters(model: nn.Module, names: tuple[str, ...]) -> list[Tensor]:
    return [model.get_parameter(name) for name in names]


def snapshot(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]

"""The paper's networks: their standard sizes, and the rows that each normalization gives them."""

import copy
import math

import pytest
import torch

from steradian import find_groups
from steradian.lab.models import NORMS, Convolution, WeightNormConv2d, build


def convolutions(model):
    return {name + ".weight": m for name, m in model.named_modules() if isinstance(m, torch.nn.Conv2d)}


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    # He et al. give 0.27 million; the other two are 11.17 and 14.72 million with this stem and one linear layer.
    [("ResNet20", 269_722, 19), ("ResNet18", 11_173_962, 20), ("VGG16", 14_724_042, 13)],
)
def test_the_standard_networks_have_their_known_sizes(name, parameters, layers):
    model = build(name)
    assert count(model) == parameters
    assert len(convolutions(model)) == layers
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert count(build(name, norm="bn-no-affine")) < parameters
    assert build(name, classes=100)(torch.randn(2, 3, 32, 32)).shape == (2, 100)


def test_networks_of_the_released_code_project_their_shortcuts_and_begin_like_torchs():
    torch.manual_seed(0)
    model = build("ResNet20", released=True)
    # Two projections, 16 · 32 and 32 · 64 weights, each with its BN.
    assert count(model) == 269_722 + 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    assert len(convolutions(model)) == 21
    for each in (model, build("VGG16", released=True)):
        for layer in convolutions(each).values():
            # Uniform on ±1/√d: variance 1/(3d), so that a row of d has the length √(1/3).
            bound = layer.weight[0].numel() ** -0.5
            assert layer.weight.abs().max() <= bound
            torch.testing.assert_close(layer.weight.var(), torch.tensor(bound**2 / 3), rtol=0.1, atol=0)
    assert {g.reason.split(" ")[0] for g in find_groups(model, torch.randn(8, 3, 32, 32)).groups} >= {
        "stages.layer2.0.shortcut.norm",
        "stages.layer3.0.shortcut.norm",
    }


FEW = {"ResNet20": NORMS, "ResNet18": ("bn",), "VGG16": ("bn",)}  # every normalization and every network


@pytest.mark.parametrize(
    ("name", "norm"),
    [pytest.param(name, norm, marks=[] if norm in FEW[name] else pytest.mark.slow) for name in FEW for norm in NORMS],
)
def test_every_convolution_has_the_rows_of_its_normalization(name, norm):
    torch.manual_seed(0)
    model = build(name, norm=norm, channels=1, size=8, width=8)
    groups = find_groups(model, torch.randn(8, 1, 8, 8))
    expected = {}
    for weight, layer in convolutions(model).items():
        blocks = math.gcd(8, layer.out_channels)
        spec = {"gn": "filter" if blocks == layer.out_channels else blocks, "ln": "tensor"}.get(norm, "filter")
        expected[weight] = spec
    assert groups.layouts == expected
    assert not groups.joint


def test_weight_norm_has_weights_of_length_gain():
    layer = WeightNormConv2d(3, 4, 3, 1)
    with torch.no_grad():
        layer.gain.copy_(torch.arange(1.0, 5.0).view(4, 1, 1, 1))
    # A picture with one lit pixel reads the weights off the output.
    picture = torch.zeros(3, 3, 5, 5)
    picture[torch.arange(3), torch.arange(3), 2, 2] = 1
    read = layer(picture)[:, :, 1:4, 1:4].detach()
    torch.testing.assert_close(read.pow(2).sum(dim=(0, 2, 3)).sqrt(), torch.arange(1.0, 5.0))


@pytest.mark.parametrize("norm", ["bn", "wn"])
def test_zeros_beside_the_input_channels_change_nothing(norm):
    torch.manual_seed(0)
    plain = build("VGG16", norm=norm, size=8, width=4).double()
    filled = copy.deepcopy(plain)
    for layer in filled.modules():
        if isinstance(layer, Convolution):
            layer.lanes = 8
    images = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    for model in (plain, filled):
        model(images).square().sum().backward()
    for p, q in zip(plain.parameters(), filled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_unknown_norms_are_refused():
    with pytest.raises(ValueError, match="norm must be one of"):
        build("ResNet20", norm="batch")

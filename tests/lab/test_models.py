"""The paper's networks: their standard sizes, and the rows that each normalization gives them."""

import math

import pytest
import torch

from steradian import find_groups
from steradian.lab.models import MODELS, NORMS, WeightNormConv2d, build


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


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
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


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="model must be one of ResNet20"):
        build("ResNet21")
    with pytest.raises(ValueError, match="norm must be one of bn"):
        build("VGG16", norm="batch")

"""Deep and wide models: gradients that grow from layer to layer, and units that are hardly ever active."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from steradian.discovery import find_groups


class Mixer(nn.Module):
    """Convolutions with bias, ReLU and BN; the depthwise ones with a skip. Weight and bias are joint rows."""

    def __init__(self, width: int, depth: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), activation(), nn.BatchNorm2d(width))
        self.depthwise = nn.ModuleList(self._layer(width, activation, 3, groups=width) for _ in range(depth))
        self.pointwise = nn.ModuleList(self._layer(width, activation, 1) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    @staticmethod
    def _layer(width: int, activation: type[nn.Module], size: int, groups: int = 1) -> nn.Sequential:
        conv = nn.Conv2d(width, width, size, padding=size // 2, groups=groups)
        return nn.Sequential(conv, activation(), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = pointwise(x + depthwise(x))
        return self.head(x.mean((2, 3)))

    def sets(self) -> Iterable[tuple[str, str]]:
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d):
                yield f"{name}.weight", f"{name}.bias"


@pytest.mark.parametrize(
    ("width", "depth", "size"),
    [
        pytest.param(16, 32, 24, id="gradients grow a thousandfold"),
        pytest.param(512, 3, 16, id="some of many units are active once"),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_joint_rows_of_a_deep_model(width: int, depth: int, size: int, seed: int):
    torch.manual_seed(seed)
    model = Mixer(width, depth)
    groups = find_groups(model, torch.randn(4, 3, size, size))
    assert set(groups.joint) == set(model.sets())
    assert set(groups.layouts.values()) == {"filter"}
    assert groups.no_effect == []
    assert groups.notes == []


def test_a_deep_model_with_gelu_has_no_rows():
    torch.manual_seed(0)
    groups = find_groups(Mixer(32, 4, nn.GELU), torch.randn(4, 3, 24, 24))
    assert groups.layouts == {}
    assert groups.facts == []


def test_a_large_set_is_not_hidden_by_small_ones():
    """Among the parameters of a pre-norm transformer, some small sets cancel at one point by chance."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, nn.GELU(), norm_first=True, batch_first=True) for _ in range(6)
    ]
    model = nn.Sequential(nn.Linear(12, 16), *layers, nn.LayerNorm(16), nn.Linear(16, 3))
    groups = find_groups(model, torch.randn(3, 7, 12))
    stream = {name for name, _ in model.named_parameters() if ".out_proj." in name or ".linear2." in name}
    assert [set(fact.names) for fact in groups.facts] == [stream | {"0.weight", "0.bias"}]
    assert groups.layouts == {}

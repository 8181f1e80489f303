"""Models of which a pass may skip parts, by chance or depending on the data."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steradian.discovery import find_groups


def seeds(*always: int, more: Sequence[int]) -> list[Any]:
    """Seeds that `make test` runs, and those that `make test-all` runs too."""
    return [*always, *(pytest.param(seed, marks=pytest.mark.slow) for seed in more)]


class SkippedBlocks(nn.Module):
    """Residual blocks, each of which is skipped in some passes."""

    def __init__(self, *, probability: float, depth: int) -> None:
        super().__init__()
        self.probability, self.first, self.head = probability, nn.Linear(5, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand(()) > self.probability:
                x = x + block(x)
        return self.head(x)


class RandomLayers(nn.Module):
    """Layers chosen by Python's and numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(6) for _ in range(3)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i in (random.randrange(3), int(np.random.randint(3))):
            x = x + self.norms[i](self.layers[i](x)).tanh()
        return self.head(x)


class Experts(nn.Module):
    """Each sample goes to the experts that a router prefers."""

    def __init__(self, *, experts: int, best: int, normalized: bool) -> None:
        super().__init__()
        self.best, self.router = best, nn.Linear(6, experts, bias=False)
        middle = nn.LayerNorm(12) if normalized else nn.Identity()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12, bias=False), middle, nn.SiLU(), nn.Linear(12, 6, bias=False))
            for _ in range(experts)
        )
        self.norm, self.head = nn.Identity() if normalized else nn.RMSNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.best, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            samples, place = torch.where(chosen == number)
            if len(samples):
                y = y.index_add(0, samples, expert(x[samples]) * weights[samples, place][:, None])
        return self.head(self.norm(y))


@pytest.mark.parametrize("seed", seeds(0, 20, more=(1, 25, 29)))
def test_layers_skipped_by_chance(seed: int):
    torch.manual_seed(seed)
    groups = find_groups(SkippedBlocks(probability=0.3, depth=6), torch.randn(10, 5))
    assert {frozenset(names) for names in groups.joint} == {
        frozenset({f"blocks.{i}.0.weight", f"blocks.{i}.0.bias"}) for i in range(6)
    }
    assert set(groups.layouts.values()) == {"tensor"}
    assert groups.no_effect == []
    assert groups.passes[0] <= 13


def test_layers_chosen_by_other_generators():
    states = random.getstate(), np.random.get_state()[1].tolist()
    groups = find_groups(RandomLayers(), torch.randn(10, 6))
    assert groups.layouts == {f"layers.{i}.weight": "tensor" for i in range(3)}
    assert groups.no_effect == []
    assert all(group.reason.startswith("norms.") for group in groups.groups)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@pytest.mark.parametrize("seed", [0, 16, 18])
def test_every_sample_to_one_expert(seed: int):
    torch.manual_seed(seed)
    groups = find_groups(Experts(experts=4, best=1, normalized=False), torch.randn(24, 6))
    assert groups.layouts == {f"experts.{i}.3.weight": "tensor" for i in range(4)}
    assert groups.joint == []


@pytest.mark.parametrize("seed", seeds(0, 3, more=(1, 2, 4)))
def test_experts_with_few_samples(seed: int):
    """Some experts get no sample at one point, so their parameters have no effect there, but at other points."""
    torch.manual_seed(seed)
    groups = find_groups(Experts(experts=6, best=2, normalized=True), torch.randn(8, 6))
    first = {f"experts.{i}.0.weight": "tensor" for i in range(6)}
    assert groups.layouts.items() <= first.items()
    assert len(groups.layouts) >= 5
    for name in (name for name in first if name not in groups.layouts):
        # Either no grown probe reached the expert, or no probe at all.
        assert "nothing is proved" in groups.explain(name) or name in groups.no_effect
    reached = tuple(name.removesuffix("0.weight") for name in groups.layouts)
    assert not any(name.startswith(reached) for name in groups.no_effect)


@pytest.mark.parametrize("seed", seeds(0, 2, more=(1, 3, 4)))
def test_an_expert_that_is_seldom_reached_is_no_row(seed: int):
    torch.manual_seed(seed)
    groups = find_groups(Experts(experts=8, best=2, normalized=False), torch.randn(10, 6))
    assert not any(len(group.names) == 1 for group in groups.groups)


class Noisy(nn.Module):
    """Draws from its own generators."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(5, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 2)
        self.generators = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        of_torch, of_python, of_numpy = self.generators
        noise = torch.randn(x.shape, generator=of_torch, dtype=x.dtype) * of_python.random() + of_numpy.normal()
        return self.head(self.norm(self.fc(x + noise)))

    def states(self) -> tuple[list[int], object, object]:
        of_torch, of_python, of_numpy = self.generators
        return of_torch.get_state().tolist(), of_python.getstate(), of_numpy.bit_generator.state


def test_generators_of_the_model():
    model = Noisy()
    before = model.states()
    assert find_groups(model, torch.randn(10, 5)).layouts == {"fc.weight": "tensor"}
    assert model.states() == before

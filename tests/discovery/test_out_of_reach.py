"""What a model holds outside of its modules: weights, caches, teachers, generators, batches that are objects."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.discovery import find_groups
from steradian.groups import Groups


def mlp(depth: int = 1, width: int = 16) -> nn.Sequential:
    blocks = ((nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(width, 3))


class Around(nn.Module):
    """A network, and a function of it and of the input that is the forward pass."""

    def __init__(self, forward: Callable[..., Any], net: nn.Module | None = None, **attributes: Any) -> None:
        super().__init__()
        self.net, self.function = net or mlp(), forward
        self.__dict__.update(attributes)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Product:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Language(nn.Module):
    """A language model whose head has the weight of the embedding."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        weight = self.embed.weight
        if tie == "memory":
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight.data = weight.data
        elif tie == "object":
            self.head = Product(weight)
        else:
            self.head = partial(functional.linear, weight=weight) if tie == "partial" else lambda x: x @ weight.T

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.norm(self.embed(tokens))))


class TestWeights:
    @pytest.mark.parametrize("tie", ["object", "partial", "function", "memory"])
    def test_a_head_tied_in_passing(self, tie: str):
        """It depends on the scale of the embedding, whose rows are normalized elsewhere."""
        groups = find_groups(Language(tie), torch.randint(10, (7, 4)))
        assert not any("embed.weight" in group.names for group in (*groups.groups, *groups.facts))
        assert "embed.weight" in groups.rest
        if tie != "object":  # which is replaced
            assert "also uses it where a probe cannot change it" in groups.explain("embed.weight")
            assert any("nothing is proved about" in note and "embed.weight" in note for note in groups.notes)

    def test_a_weight_that_only_a_function_uses_has_an_effect(self):
        head = nn.Parameter(torch.randn(3, 3))
        model = Around(lambda self, x: self.net(x) @ head)
        model.head = head
        assert "head" not in find_groups(model, torch.randn(9, 16)).no_effect


class TestState:
    def test_a_cache_keeps_the_dtype_of_the_model(self):
        positions = cache(lambda n: torch.linspace(0, 1, n)[:, None])
        model = Around(lambda self, x: self.net(x + positions(len(x))))
        x = torch.randn(9, 16)
        groups = find_groups(model, x)
        assert (groups.layouts, groups.notes) == ({"net.0.weight": "filter"}, [])
        assert model(x).dtype == torch.float32

    @pytest.mark.parametrize("place", ["list", "attribute", "helper"])
    def test_a_teacher_that_is_not_registered(self, place: str):
        teacher = mlp()
        holder = {"list": [teacher], "attribute": teacher, "helper": SimpleNamespace(module=teacher, steps=0)}[place]
        get = {"list": lambda it: it[0], "attribute": lambda it: it, "helper": lambda it: it.module}[place]
        model = Around(lambda self, x: (self.net(x) - get(self.holder)(x).detach()).square().mean(), holder=holder)
        before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
        tensors = [*teacher.parameters(), *teacher.buffers()]
        groups = find_groups(model, torch.randn(9, 16))
        assert (groups.layouts, groups.notes) == ({"net.0.weight": "filter"}, [])
        assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
        assert all(a is b for a, b in zip(tensors, [*teacher.parameters(), *teacher.buffers()], strict=True))
        assert model.holder is holder

    def test_an_object_that_is_called(self):
        class Noise:
            def __init__(self) -> None:
                self.generator, self.calls = torch.Generator().manual_seed(0), 0

            def __call__(self, x: Tensor) -> Tensor:
                self.calls += 1
                return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

        noise = Noise()
        before = noise.generator.get_state()
        assert find_groups(Around(lambda self, x: self.net(self.noise(x)), noise=noise), torch.randn(9, 16)).layouts
        assert noise.calls == 0
        assert torch.equal(noise.generator.get_state(), before)

    def test_random_numbers_that_a_probe_cannot_repeat(self):
        rng = np.random.default_rng(0)
        model = Around(lambda self, x: self.net(x + torch.from_numpy(0.1 * rng.standard_normal(x.shape)).to(x)))
        groups = find_groups(model, torch.randn(9, 16))
        assert groups.layouts == {}
        assert "forward is not deterministic" in groups.explain("net.0.weight")
        assert any("forward is not deterministic" in note for note in groups.notes)

    @pytest.mark.parametrize("seed", range(3))
    def test_fresh_statistics_in_eval_mode(self, seed: int):
        """Of mean 0: a layer in front is invariant with its bias only until a checkpoint is loaded."""
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
        net[1].eval().requires_grad_(False)
        groups = find_groups(net, torch.randn(9, 6))
        assert groups.joint == [("3.weight", "3.bias")]
        assert not any("0.weight" in group.names for group in (*groups.groups, *groups.facts))
        assert not net[1].running_mean.any()


TABLE = torch.eye(16)  # in float32, so that the model does not run in float64


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.3])
def test_a_branch_beside_the_rows_in_float32(share: float, seed: int):
    """Grown 1024-fold it is too small for the tolerances of float32. Where the rows are small it dominates."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 3))
    model = Around(lambda self, x: self.net[1:](self.net[0](x @ TABLE) + share * (x @ TABLE)), net)
    expected = {} if share else {"net.0.weight": "tensor"}
    assert find_groups(model, torch.randn(24, 16)).layouts == expected


class TestOutputs:
    @pytest.mark.parametrize("depth", [1, 12])
    def test_a_logged_number_does_not_train(self, depth: int):
        model = Around(lambda self, x: {"y": self.net(x), "rms": self.net[0](x).square().mean().detach()}, mlp(depth))
        assert len(find_groups(model, torch.randn(32, 16)).layouts) == depth

    def test_rows_that_were_not_scaled_by_themselves(self):
        """One row moves an output without a gradient, and there are too many others to find out which."""
        model = Around(lambda self, x: self.net(x) + self.net[0](x).square().mean().detach(), mlp(24))
        groups = find_groups(model, torch.randn(32, 16))
        lost = [name for name in groups.rest if name not in groups.no_effect and "vanishes" in groups.explain(name)]
        assert any("no pass was left to scale them alone" in groups.explain(name) for name in lost)
        unproved = [note for note in groups.notes if "balanced but not proved" in note]
        assert len(unproved) == 1
        assert "{" in unproved[0]

    def test_layers_that_every_pass_skips(self):
        model = nn.ModuleDict({"net": mlp(), "unused": mlp()})
        model.forward = lambda x: model["net"](x)
        assert "not reached" in find_groups(model, torch.randn(9, 16)).explain("unused.0.weight")

    def test_a_model_that_only_runs_in_eval_mode(self):
        model = Around(lambda self, x: self.net(x) if not self.training else None + x).eval()
        with pytest.raises(RuntimeError, match=r"training mode: after model\.train\(\), call"):
            find_groups(model, torch.randn(9, 16))


@dataclass(slots=True)
class Batch:
    x: Tensor
    labels: Any = None


class TestBatches:
    @pytest.mark.parametrize("make", [SimpleNamespace, Batch])
    def test_an_object_that_forward_changes(self, make: Callable[..., Any]):
        def forward(self: Around, batch: Any) -> Tensor:
            batch.x = self.net(batch.x + batch.labels.y)
            return batch.x

        batch = make(x=torch.randn(9, 16), labels=SimpleNamespace(y=torch.randn(9, 16)))
        x, y = batch.x, batch.labels.y
        groups: Groups = find_groups(Around(forward), batch)
        assert (groups.layouts, groups.notes) == ({"net.0.weight": "filter"}, [])
        assert (batch.x is x, batch.labels.y is y) == (True, True)

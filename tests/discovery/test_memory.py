"""What find_groups keeps in memory beside the model: leaves of one dtype, and at most one gradient."""

import subprocess
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from steradian.discovery import find_groups


class CountsGradients(nn.Module):
    """Layers with BN that count, when the backward pass reaches the first one, which gradients still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        FORWARD.append([weakref.ref(p) for p in self.parameters()])
        for k, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = layer(x)
            if k == 0:
                x.register_hook(lambda _: BACKWARD.append([p for p in self.parameters() if p.grad is not None]))
            x = norm(x).relu()
        return self.head(x)


FORWARD: list[list[weakref.ref[Tensor]]] = []
BACKWARD: list[list[Tensor]] = []


def test_gradients_are_freed_one_by_one():
    BACKWARD.clear()
    groups = find_groups(CountsGradients(), torch.randn(8, 6))
    assert groups.layouts == {f"layers.{k}.weight": "filter" for k in range(5)}
    assert BACKWARD
    assert not any(BACKWARD)


def test_leaves_of_one_dtype_are_freed_before_the_next():
    dtypes: set[torch.dtype] = set()

    class Counting(CountsGradients):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            alive = {p.dtype for refs in FORWARD for ref in refs if (p := ref()) is not None}
            assert len(alive) == 1
            dtypes.update(alive)
            return y

    FORWARD.clear()
    find_groups(Counting(), torch.randn(8, 6))
    assert dtypes == {torch.float32, torch.float64}


class InParts(torch.autograd.Function):
    """z/‖z‖ of a layer's z, whose backward pass goes through the layer once for z and once for ‖z‖.

    Neither part of the layer's gradient is orthogonal to its weight: their sum is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer, ctx.x = layer, x.detach()
        with torch.no_grad():
            z = layer(x)
            return z / z.norm(dim=1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.x.requires_grad_()
        for of_norm in (False, True):
            with torch.enable_grad():
                z = ctx.layer(x)
                length = z.norm(dim=1, keepdim=True)
                torch.autograd.backward(z.detach() / length if of_norm else z / length.detach(), g)
        return x.grad, None


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(5, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(InParts.apply(self.stem(x), self.layer))


def test_a_gradient_that_comes_in_parts():
    torch.manual_seed(0)
    groups = find_groups(Normalized(), torch.randn(6, 5))
    assert groups.layouts == dict.fromkeys(("stem.weight", "stem.bias", "layer.weight"), "tensor")


def test_no_computer_algebra_is_loaded():
    """torch imports sympy, tens of megabytes and a second, where a backward pass gets gradients of its outputs."""
    code = """
import sys, torch, steradian
steradian.find_groups(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)), torch.randn(4, 3))
print("sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

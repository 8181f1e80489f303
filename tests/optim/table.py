"""The table that the contract runs over: every optimizer with its settings, and parameters of every kind."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steradian import optim

Make = Callable[..., torch.optim.Optimizer]

# name: optimizer with its settings; the rates are powers of two, exact in every dtype
RATE = 2.0**-5
TABLE: dict[str, Make] = {
    **{
        f"Adam-{w}": partial(optim.Adam, lr=RATE, weight_decay=0.25, without=w)
        for w in ("", "a", "b", "c", "bc", "abc")
    },
    "Adam-abc-decoupled": partial(
        optim.Adam, lr=RATE, weight_decay=0.25, without="abc", decoupled_weight_decay=True, eps=0.0
    ),
    "AdamS": partial(optim.AdamS, lr=RATE),
    "AdamSRT": partial(optim.AdamSRT, lr=RATE, weight_decay=0.25),
    "SGD": partial(optim.SGD, lr=RATE),
    "SGD-": partial(optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.25),
    "SGD-c": partial(optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.25, without="c"),
    "SGD-bc": partial(optim.SGD, lr=RATE, momentum=0.9, dampening=0.5, weight_decay=0.25, without="bc"),
    "SGD-bc-nesterov": partial(optim.SGD, lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.25, without="bc"),
    "AdaGradG": partial(optim.AdaGradG, lr=RATE, beta=0.9, v0=0.5),
    "AdamG": partial(optim.AdamG, lr=RATE),
    "AdamG-retraction": partial(optim.AdamG, lr=RATE, retraction=True),
    "Angular": partial(optim.Angular, lr=RATE, weight_decay=0.25),
    "Angular-adam-rms": partial(
        optim.Angular, lr=RATE, direction="adam", spread="rms", nesterov=True, rest="adamw", weight_decay=0.25
    ),
    "Angular-muon": partial(optim.Angular, lr=RATE, direction="muon"),
    "Angular-muon-rms": partial(optim.Angular, lr=RATE, direction="muon", spread="rms", nesterov=True),
    "AdamP": partial(optim.AdamP, lr=RATE, weight_decay=0.25),
    "AdamP-nesterov": partial(optim.AdamP, lr=RATE, weight_decay=0.25, nesterov=True),
}
CLASSIC = {"Adam-", "SGD", "SGD-"}
MATRICES = {"Angular-muon", "Angular-muon-rms"}
"""Steps in which the rows of a matrix depend on each other."""
KINDS = (
    "Angular",
    "Angular-adam-rms",
    "Angular-muon",
    "Adam-",
    "Adam-abc",
    "Adam-bc",
    "SGD-",
    "SGD-bc-nesterov",
    "AdaGradG",
    "AdamG",
    "AdamP",
)
"""One of every kind of step, for tests that take long; the others run with the slow tests."""


def kinds_first(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in names]


# name: shapes of the parameters of one param group, and its keys
SHAPES: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "filter": ([(6, 4, 3, 3), (3, 5)], {"rows": "filter"}),
    "axis": ([(4, 3, 2)], {"rows": ("axis", 1)}),
    "joint": ([(4, 5), (4,)], {"rows": 2, "joint": True}),
    "rest": ([(5,), (2, 3)], {}),
}


def groups(dtype: torch.dtype = torch.float32, *, radial_alone: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for shapes, keys in SHAPES.values():
        if keys or not radial_alone:
            tensors = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
            made.append({"params": [nn.Parameter(t) for t in tensors], **keys})
    return made


def one_of_each(**options: Any) -> list[dict[str, Any]]:
    """A single parameter of each kind, or joint set, where each costs a compilation or many trainings."""
    return [group if "joint" in group else {**group, "params": group["params"][-1:]} for group in groups(**options)]


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    draw = torch.Generator().manual_seed(100 + seed)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=draw).to(p)


def train(optimizer: torch.optim.Optimizer, steps: int = 3, start: int = 0) -> None:
    for k in range(start, start + steps):
        set_gradients(optimizer, k)
        optimizer.step()


def assert_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer, **tolerance: float) -> None:
    """Parameters and states are equal, to the bit unless a tolerance is given."""
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    for p, q in zip(parameters(one), parameters(other), strict=True):
        torch.testing.assert_close(p, q, **tolerance)
        assert one.state[p].keys() == other.state[q].keys()
        for key, value in one.state[p].items():
            torch.testing.assert_close(value, other.state[q][key], **tolerance)

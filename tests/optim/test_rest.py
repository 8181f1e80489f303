"""The update of parameters without rows is torch's, bit for bit, also where torch's own function is left out."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steradian import optim
from steradian.optim import Adam

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "L2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "maximize": {"maximize": True, "eps": 1e-3, "betas": (0.5, 0.75)},
    "tensor rate": {"lr": torch.tensor(0.05)},
}
SHAPES = [(4, 3), (5,), (2, 3, 3, 3)]


def made(seed: int = 0, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    pairs = zip(SHAPES, dtypes, strict=True)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape, dtype in pairs]


def give_gradients(params: list[Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=draw).to(param)


def assert_same_steps(one: Adam, other: torch.optim.Optimizer, *, scaler: list[tuple[float, float]]) -> None:
    for k, (scale, found) in enumerate(scaler):
        for optimizer in (one, other):
            give_gradients(optimizer.param_groups[0]["params"], k)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found)
            optimizer.step()
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    for p, q in pairs:
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        for name, value in other.state[q].items():
            torch.testing.assert_close(one.state[p][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_is_torchs_fused_adam_under_a_scaler(settings: dict[str, Any]) -> None:
    ours, theirs = Adam(made(), **settings), torch.optim.Adam(made(), fused=True, **settings)
    assert_same_steps(ours, theirs, scaler=[(1.0, 0.0), (8.0, 0.0), (8.0, 1.0), (4.0, 0.0)])
    assert ours.state[ours.param_groups[0]["params"][0]]["step"].item() == 3


def test_parameters_of_several_dtypes_are_sorted_by_torch() -> None:
    dtypes = (torch.float32, torch.float64, torch.float32)
    ours, theirs = Adam(made(dtypes=dtypes)), torch.optim.Adam(made(dtypes=dtypes), fused=True)
    assert_same_steps(ours, theirs, scaler=[(2.0, 0.0)] * 2)


def test_parameters_that_become_of_another_dtype_are_seen() -> None:
    ours, theirs = Adam(made()), torch.optim.Adam(made(), fused=True)
    assert_same_steps(ours, theirs, scaler=[(1.0, 0.0)] * 2)
    for optimizer in (ours, theirs):
        wide = optimizer.param_groups[0]["params"][1]
        wide.grad = None
        wide.data = wide.data.double()
        optimizer.load_state_dict(optimizer.state_dict())
    assert_same_steps(ours, theirs, scaler=[(1.0, 0.0)] * 2)


SPARSE = {
    "SGD": (partial(optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    "SGD-momentum": (partial(optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "AdaGradG": (partial(optim.AdaGradG, rest_lr=0.1), partial(torch.optim.SGD, lr=0.1)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_taken_as_torch_takes_them(name: str) -> None:
    tables = [nn.Embedding(6, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [make(table.parameters()) for make, table in zip(SPARSE[name], tables, strict=True)]
    for k in range(3):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor([0, 2, 2, k])).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


COMPLEX = {
    "Adam": (partial(optim.Adam, weight_decay=0.1), partial(torch.optim.Adam, weight_decay=0.1)),
    "AdamG": (partial(optim.AdamG, betas=(0.9, 0.999)), torch.optim.Adam),
    "AdamP": (optim.AdamP, partial(torch.optim.AdamW, weight_decay=0)),
    "SGD": (partial(optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters_are_stepped_as_torch_steps_them(name: str) -> None:
    draw = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    one, other = (nn.Parameter(draw.clone()) for _ in range(2))
    ours, theirs = (make([p]) for make, p in zip(COMPLEX[name], (one, other), strict=True))
    for _ in range(3):
        for p, optimizer in ((one, ours), (other, theirs)):
            p.grad = draw.conj() * p.detach()
            optimizer.step()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_adamp_with_nesterov_steps_complex_parameters_by_their_parts() -> None:
    draw = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    one, other = nn.Parameter(draw.clone()), nn.Parameter(torch.view_as_real(draw).clone())
    ours, parts = (optim.AdamP([p], nesterov=True) for p in (one, other))
    for _ in range(3):
        one.grad = draw.conj() * one.detach()
        other.grad = torch.view_as_real(one.grad).clone()
        ours.step()
        parts.step()
    assert torch.equal(torch.view_as_real(one.detach()), other)


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD, optim.AdamG, optim.AdaGradG, optim.AdamP])
def test_lazy_parameters_get_their_shape_after_the_optimizer_was_made(kind: Any) -> None:
    model = nn.LazyLinear(4)
    optimizer = kind(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (partial(optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.1)),
        (partial(optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        (partial(optim.AdaGradG), partial(torch.optim.SGD, lr=0.1)),
    ],
    ids=["SGD", "SGD-momentum", "AdaGradG"],
)
def test_the_state_holds_what_torchs_does(ours: Any, theirs: Any) -> None:
    states = []
    for make in (ours, theirs):
        p = nn.Parameter(torch.ones(3))
        optimizer = make([p])
        p.grad = torch.ones(3)
        for _ in range(2):
            optimizer.step()
        states.append(optimizer.state_dict()["state"])
    assert states[0].keys() == states[1].keys()
    assert all(one.keys() == other.keys() for one, other in zip(states[0].values(), states[1].values(), strict=True))

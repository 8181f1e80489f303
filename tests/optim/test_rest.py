"""The update of parameters without rows is torch's, bit for bit, also where torch's own function is left out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.table import CountOps
from steradian.optim import Adam, _rest

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
    assert not _rest._alike(made(dtypes=dtypes))
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


def test_is_two_operations_for_all_parameters() -> None:
    params = made()
    optimizer = Adam(params)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), None
    give_gradients(params, 0)
    optimizer.step()
    with CountOps() as ops:
        optimizer.step()
    assert sum(count for name, count in ops.counts.items() if name.startswith("aten.")) == 2

"""Every optimizer that torch has is followed, and what is recorded is where the weights went."""

import inspect
import math

import pytest
import torch
from torch.nn.functional import cosine_similarity

from steradian import watch

from small import groups_of, rows, set_gradients

KINDS = {
    name: kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OPTIONS = (
    {},
    {"maximize": True},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"weight_decay": 0.1},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
    {"lr": torch.tensor(0.01)},
    {"amsgrad": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "centered": True},
    {"initial_accumulator_value": 1.0, "lr_decay": 0.1},
)


def step(optimizer, params, k):
    def closure():
        set_gradients(params, k)
        if isinstance(optimizer, torch.optim.SparseAdam):
            for param in params:
                param.grad = param.grad.to_sparse(1)
        return torch.zeros(())

    closure()
    optimizer.step(closure)


@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_with_every_option_that_it_takes(name):
    accepted = inspect.signature(KINDS[name]).parameters
    for options in (options for options in OPTIONS if set(options) <= set(accepted)):
        params = rows((4, 5), (3, 5))
        optimizer = KINDS[name](groups_of(params), **{"lr": 0.01, **options})
        with watch(optimizer) as watcher:
            for k in range(3):
                before = [param.detach().clone() for param in params]
                step(optimizer, params, k)
        assert watcher.error is None, options
        for group, x, y in zip(("w", "v"), before, params, strict=True):
            found = watcher.latest()[group]
            assert found["radius"]["mean"] == pytest.approx(x.norm(dim=1).mean().item(), rel=1e-9), options
            turned = torch.arccos(cosine_similarity(x, y).clamp(-1, 1)).mean().item()
            assert found["angle"]["mean"] == pytest.approx(turned, rel=1e-5, abs=1e-7), options


class OfAnotherLibrary(torch.optim.Optimizer):
    """It makes its own rates (lr=None), and counts in the state of all, not in that of a parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": None, "weight_decay": None})
        self.state["k"] = torch.tensor([0])
        self.state["step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["k"] += 1
        self.state["step"] += 1
        for param in self.param_groups[0]["params"]:
            self.state[param]["step"] = "first"
            param -= 0.1 * param.grad


def test_settings_and_state_that_are_not_as_torchs_are_followed():
    params = rows((4, 5), (3, 5))
    optimizer = OfAnotherLibrary(groups_of(params))
    with watch(optimizer) as watcher:
        for k in range(3):
            before = params[0].detach().clone()
            step(optimizer, params, k)
    assert watcher.error is None
    turned = torch.arccos(cosine_similarity(before, params[0]).clamp(-1, 1)).mean().item()
    assert watcher.latest()["w"]["angle"]["mean"] == pytest.approx(turned, rel=1e-5)
    assert math.isnan(watcher.latest()["w"]["lr"]["mean"])

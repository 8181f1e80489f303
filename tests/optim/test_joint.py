"""Rows that span several parameters: of different dtypes, and with parameters that have no gradient for a while."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.table import CLASSIC, TABLE, Make
from steradian.groups import Layout

OURS = {name: make for name, make in TABLE.items() if name not in CLASSIC}


@pytest.fixture(params=OURS.values(), ids=OURS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("present", [[{0, 1}], [{0}], [{0, 1}, {0}], [{1}, {0, 1}]])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_of_several_dtypes_are_computed_in_the_widest(
    make: Make, order: tuple[int, int], present: list[set[int]]
) -> None:
    """A float64 bias behind a float32 weight goes where it goes behind a float64 weight of the same numbers."""
    shapes = [(4, 5), (4,)]
    finals = []
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float64)):
        params = [nn.Parameter(draw(k, *shapes[k]).float().to(dtypes[k])) for k in (0, 1)]
        optimizer = make([{"params": [params[k] for k in order], "rows": 2, "joint": True}])
        for step, members in enumerate(present):
            for k, p in enumerate(params):
                p.grad = draw(10 * (step + 1) + k, *shapes[k]).float().to(p.dtype) if k in members else None
            optimizer.step()
        finals.append([p.detach() for p in params])
        assert params[1].dtype == torch.float64
    torch.testing.assert_close(finals[0][0].double(), finals[1][0], rtol=1e-5, atol=1e-5)
    exact = {"rtol": 1e-12, "atol": 1e-14} if len(present) == 1 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(finals[0][1], finals[1][1], **exact)


def trained(make: Make, order: Any, present: list[set[int]]) -> tuple[dict[int, Tensor], Any]:
    """Three parameters of a joint set, of which some have a gradient in each step."""
    shapes = {0: (4, 5), 1: (4,), 2: (4, 2)}
    params = {k: nn.Parameter(draw(k, *shape)) for k, shape in shapes.items()}
    optimizer = make([{"params": [params[k] for k in order], "rows": "filter", "joint": True}])
    for step, members in enumerate(present):
        before = {k: p.detach().clone() for k, p in params.items()}
        for k, p in params.items():
            p.grad = draw(100 * (step + 1) + k, *shapes[k]) if k in members else None
        optimizer.step()
        for k, p in params.items():
            assert torch.equal(p, before[k]) == (k not in members), "a parameter without a gradient stays"
    return {k: p.detach() for k, p in params.items()}, {k: optimizer.state[p] for k, p in params.items()}


@pytest.mark.parametrize("late", [1, 3])
def test_a_parameter_without_a_gradient_for_some_steps_stays_in_step_with_its_set(make: Make, late: int) -> None:
    """Step count and numbers per row are the set's, whoever had a gradient; the order of the parameters is nothing."""
    everyone = {0, 1, 2}
    present = [everyone] * late + [{0, 2}, {0}, {1, 2}] + [everyone] * 2
    present = present if late > 1 else [{0}, {0, 1}, *present]  # some join after the first step
    outcomes = [trained(make, order, present) for order in itertools.permutations(everyone)]
    params, states = outcomes[0]
    for other, others in outcomes[1:]:
        for k in params:
            torch.testing.assert_close(params[k], other[k], rtol=1e-12, atol=1e-14)
            assert states[k].keys() == others[k].keys()
            for name, value in states[k].items():
                torch.testing.assert_close(value, others[k][name], rtol=1e-12, atol=1e-14)
    for name, value in states[0].items():
        if name == "step" or value.shape == (4,):
            assert all(torch.equal(states[k][name], value) for k in (1, 2)), name
    if "step" in states[0]:
        assert [state["step"].item() for state in states.values()] == [len(present)] * 3


def test_a_set_with_all_gradients_is_one_tensor(make: Make) -> None:
    """What a joint set is: the rows side by side in one parameter."""
    shapes = [(4, 5), (4,), (4, 2)]
    params = [nn.Parameter(draw(k, *shape)) for k, shape in enumerate(shapes)]
    whole = nn.Parameter(Layout("filter").join([p.detach() for p in params]))
    one = make([{"params": params, "rows": "filter", "joint": True}])
    other = make([{"params": [whole], "rows": "filter"}])
    for step in range(3):
        for k, p in enumerate(params):
            p.grad = draw(100 * step + k, *shapes[k])
        whole.grad = Layout("filter").join([p.grad for p in params])
        one.step()
        other.step()
    torch.testing.assert_close(Layout("filter").join([p.detach() for p in params]), whole.detach(), rtol=1e-12, atol=0)

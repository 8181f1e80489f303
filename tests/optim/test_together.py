"""Small row sets that are stepped together go, bit for bit, where they go alone."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.table import CLASSIC, RATE, TABLE, Make, assert_same, parameters, set_gradients, train
from steradian import optim
from steradian.optim import base
from steradian.optim import rows as row_sets

OURS = {name: make for name, make in TABLE.items() if name not in CLASSIC}
OURS["Adam-ab"] = partial(optim.Adam, lr=1e-3, weight_decay=0.3, without="ab")
OURS["Adam-ac"] = partial(optim.Adam, lr=1e-3, weight_decay=0.3, without="ac", maximize=True)
OURS["Adam-bc-decoupled"] = partial(
    optim.Adam, lr=1e-3, weight_decay=0.3, without="bc", decoupled_weight_decay=True, maximize=True
)

# Several of each width, so that they meet; vectors and their remainders; one too large.
SHAPES = [(4, 8), (1, 8), (17, 2, 4), (64, 9), (3, 1, 3, 3), (33, 9), (2, 257), (3, 257), (40, 257)]
SHAPES = 2 * [*SHAPES, (0, 8), (6, 8), (9, 8), (2, 100), (31, 100), (1, 1000), (2, 1000), (8, 3), (1, 3)]
# Rows of one number, which optimizers that fix the radius refuse.
SHORT = 2 * [(5, 1), (7,), (1,), ()]


@pytest.fixture(params=OURS.values(), ids=OURS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def groups(dtype: torch.dtype = torch.float32, rows: Any = "filter", *, short: bool = False) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    shapes = [*SHAPES, *SHORT] if short else SHAPES
    return [{"params": [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in shapes], "rows": rows}]


@contextmanager
def alone() -> Iterator[None]:
    """Within it every row set is stepped by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "together", lambda sets: sets)
        yield


def step_both(one: Any, other: Any) -> None:
    """One step of each, the second's alone; then they are the same in all that they hold and tell."""
    one.step()
    with alone():
        other.step()
    assert_same(one, other)
    if one.telemetry is not None:
        for p, q in zip(parameters(one), parameters(other), strict=True):
            assert torch.equal(one.telemetry[p], other.telemetry[q])


def stacks(optimizer: Any) -> list[int]:
    """How many row sets the parts of a step take together."""
    _, work = optimizer._collect()
    return [len(rows.owners) for group, sets in work for rows in row_sets.together(sets)]


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (torch.float32, "filter"),
        (torch.float64, "tensor"),
        pytest.param(torch.float64, "filter", marks=pytest.mark.slow),
        pytest.param(torch.float32, "tensor", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_each_alone(make: Make, dtype: torch.dtype, rows: str) -> None:
    """Also where some have no gradient and fall behind, with and without telemetry, and after loading."""
    short = not make.func._fixes_radius
    one, other = (make(groups(dtype, rows, short=short)) for _ in range(2))
    for k in range(6):
        for optimizer in (one, other):
            set_gradients(optimizer, k)
            optimizer.emit(k in (1, 2, 4))
            for p in parameters(optimizer)[k % 3 :: 7]:
                p.grad = None
            if k == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_both(one, other)
    assert max(stacks(one)) > 1


def test_maximize_and_a_rate_that_is_a_tensor(make: Make) -> None:
    one, other = (make(groups(), lr=torch.tensor(RATE), maximize=True) for _ in range(2))
    for k in range(3):
        set_gradients(one, k)
        set_gradients(other, k)
        step_both(one, other)


def test_memory_may_be_exchanged_between_steps(make: Make) -> None:
    one, other = make(groups()), make(groups())
    for k in range(4):
        for optimizer in (one, other):
            set_gradients(optimizer, k)
            for p in parameters(optimizer)[:: k + 1]:
                p.data = p.data.clone() * 2
                state = optimizer.state[p]
                state.update({name: value.clone() for name, value in state.items()})
        step_both(one, other)


def test_parameters_that_share_their_memory_are_stepped_one_after_the_other(make: Make) -> None:
    one, other = make(groups()), make(groups())
    for optimizer in (one, other):
        half = len(SHAPES) // 2
        for p, q in zip(parameters(optimizer)[:half:2], parameters(optimizer)[half::2], strict=True):
            q.data = p.data
    for k in range(3):
        set_gradients(one, k)
        set_gradients(other, k)
        step_both(one, other)


def test_rows_at_the_ends_of_the_range_touch_no_other_set(make: Make) -> None:
    one, other = make(groups()), make(groups())
    for k in range(4):
        for optimizer in (one, other):
            optimizer.emit()
            set_gradients(optimizer, k)
            first, second, third, *_ = parameters(optimizer)
            first.grad[0] = torch.inf if k == 1 and not isinstance(optimizer, optim.SGD) else 1e15
            third.grad[2] = 0
            if k == 2:
                second.data.zero_()
                third.data[1] = 1e-30
        step_both(one, other)


def arranged(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape[::-1]).t()


def test_what_is_not_alike_is_stepped_alone() -> None:
    """Other strides, dtypes, widths, layouts, sizes and joint sets."""
    make = OURS["Adam-abc"]
    shapes = {(4, 8): 2, (2, 8): 1, (3, 5): 1, (2**9, 9): 2}
    plain = [nn.Parameter(torch.randn(shape)) for shape, times in shapes.items() for _ in range(times)]
    mixed = [nn.Parameter(t) for t in (arranged((4, 8)), arranged((4, 8)), torch.randn(4, 8).half())]
    single = [nn.Parameter(torch.randn(4, 8, dtype=torch.float64))]
    optimizer = make([{"params": plain + mixed + single, "rows": "filter"}])
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(4, 8)) for _ in range(2)], "rows": ("axis", 1)})
    joint = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    optimizer.add_param_group({"params": joint, "rows": "filter", "joint": True})
    set_gradients(optimizer, 0)
    assert stacks(optimizer) == [3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    plain[0].grad = arranged((4, 8))
    optimizer.state[plain[2]]["step"] += 1
    assert stacks(optimizer) == [1] * 12 + [2]


def test_a_state_of_another_shape_is_refused_in_the_same_words() -> None:
    for name, shape in (("exp_avg", (8, 4)), ("exp_avg_sq", (4, 8))):
        optimizer = OURS["Adam-abc"](groups())
        train(optimizer, 1)
        optimizer.state[parameters(optimizer)[0]][name] = torch.zeros(shape)
        said = []
        for steps in (optimizer.step, alone()(optimizer.step)):
            with pytest.raises(ValueError, match=f"the state '{name}' must have the shape") as raised:
                steps()
            said.append(str(raised.value))
        assert said[0] == said[1]

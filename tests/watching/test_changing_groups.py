"""Param groups that change while they are watched, and parameters that are unlike others."""

import logging

import pytest
import torch
from torch import nn

import steradian as st
from steradian import watch
from steradian.groups import Group, Groups

from small import groups_of, rows, series, set_gradients, train

KINDS = {
    "torch": lambda groups: torch.optim.Adam(groups, lr=0.05),
    "unreadable": lambda groups: torch.optim.NAdam(groups, lr=0.05),
    "ours": lambda groups: st.optim.Adam(groups, lr=0.05, without="abc"),
    "ours fused": lambda groups: st.optim.Adam(groups, lr=0.05, without="abc", fused=True),
}


@pytest.fixture(params=KINDS)
def apart(request):
    """An optimizer of "w" and "v" in param groups of their own."""
    params = rows((4, 5), (3, 5))
    named = zip(("w", "v"), params, strict=True)
    return KINDS[request.param]([{"params": [pair], "rows": "filter"} for pair in named]), params


def test_rows_of_a_group_that_is_taken_out_are_not_recorded(apart, caplog):
    optimizer, params = apart
    with watch(optimizer) as watcher:
        train(optimizer, params, 2)
        del optimizer.param_groups[1], optimizer.state[params[1]]
        train(optimizer, params, 3, first=2)
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, params, 1, first=5)
    assert watcher.error is None
    table = watcher.records()
    assert list(series(table, "angle", "w")) == [0, 1, 2, 3, 4, 5]
    assert list(series(table, "angle", "v")) == [0, 1]
    said = [record.message for record in caplog.records if "not watched any more" in record.message]
    assert len(said) == 1
    assert "v not watched" in said[0]


def test_what_happens_between_observed_steps_is_seen_at_the_next_one(apart, caplog):
    optimizer, params = apart
    with watch(optimizer, every=3) as watcher:
        train(optimizer, params, 4)
        optimizer.load_state_dict(optimizer.state_dict())  # makes new groups
        train(optimizer, params, 1, first=4)
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[1]["params"][0] = rows((3, 5))[0]
        train(optimizer, params, 3, first=5)
    assert watcher.error is None
    table = watcher.records()
    assert list(series(table, "angle", "w")) == [0, 3, 6]
    assert list(series(table, "angle", "v")) == [0, 3]
    assert list(series(table, "lr", "w", "mean").values()) == pytest.approx([0.05, 0.05, 0.5])
    assert "v not watched any more" in caplog.text


def test_a_parameter_that_moves_to_another_group_is_not_recorded_with_the_settings_of_the_old_one(apart, caplog):
    optimizer, params = apart
    with watch(optimizer) as watcher:
        train(optimizer, params, 2)
        optimizer.param_groups[1]["params"].clear()
        optimizer.add_param_group({"params": [("v", params[1])], "rows": "filter", "lr": 0.5})
        train(optimizer, params, 2, first=2)
    assert watcher.error is None
    assert list(series(watcher.records(), "angle", "v")) == [0, 1]
    assert list(series(watcher.records(), "angle", "w")) == [0, 1, 2, 3]
    assert "v not watched any more" in caplog.text


def test_rows_without_a_gradient_are_recorded_when_they_step(apart):
    optimizer, params = apart
    there = [True, True, False, False, True, True, False]
    with watch(optimizer) as watcher:
        for step, both in enumerate(there):
            set_gradients(params, step)
            if not both:
                params[1].grad = None
            optimizer.step()
    assert watcher.error is None
    assert list(series(watcher.records(), "angle", "w")) == list(range(7))
    assert list(series(watcher.records(), "angle", "v")) == [0, 1, 4, 5]


def test_fused_steps_with_the_same_gradients_and_then_with_fewer():
    params = rows((4, 5), (3, 5))
    optimizer = KINDS["ours fused"](groups_of(params))
    with watch(optimizer) as watcher:
        train(optimizer, params, 5)
        params[1].grad = None
        optimizer.step()
    assert list(series(watcher.records(), "angle", "w")) == list(range(6))
    assert list(series(watcher.records(), "angle", "v")) == list(range(5))


def test_a_joint_set_may_lie_in_two_param_groups():
    """A bias without weight decay is stepped apart from its weight; a loaded state changes nothing in that."""
    weight, bias = rows((4, 5), (4,))
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}])
    found = Groups({"w": weight, "b": bias}, [Group(("w", "b"), 2, 2, 12, "norm", 1e-6)])
    with watch(optimizer, found) as watcher:
        for step in range(4):
            set_gradients([weight], step)
            bias.grad = torch.ones_like(bias)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    assert list(series(watcher.records(), "angle", "w + b")) == [0, 1, 2, 3]


def test_parameters_of_one_name_are_told_apart():
    """Two models in one optimizer, as actor and critic."""
    params = rows((4, 5), (3, 5))
    optimizer = torch.optim.SGD([{"params": [("w", param)], "rows": "filter"} for param in params], lr=0.1)
    with watch(optimizer) as watcher:
        train(optimizer, params, 2)
    assert list(watcher.latest()) == ["w", "w (group 1)"]
    radii = [series(watcher.records(), "radius", group)[0] for group in watcher.latest()]
    assert radii[0] != radii[1]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_rows_or_dimensions(kind, tmp_path, caplog):
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((0, 4), (3, 0))]
    params += [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(2.0))]
    optimizer = KINDS[kind](groups_of(params, names=("no rows", "no entries", "w", "number")))
    with watch(optimizer, to=tmp_path / "run") as watcher:
        for _ in range(2):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
    assert watcher.error is None
    assert list(watcher.latest()) == ["w", "number"]
    assert watcher.latest()["number"]["angle"]["max"] == pytest.approx(0, abs=1e-6)
    assert not any("NaN" in record.message for record in caplog.records if record.levelno >= logging.WARNING)


def test_nothing_to_watch_is_a_warning():
    complex_rows = [nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))]
    with pytest.warns(UserWarning, match=r"nothing to watch: w holds torch\.complex64"):
        watch(torch.optim.Adam(groups_of(complex_rows)))
    with pytest.warns(UserWarning, match="nothing to watch"):
        watcher = watch(torch.optim.Adam(groups_of([nn.Parameter(torch.zeros(0, 4))])))
    with watcher:
        assert watcher.latest() == {}
        assert watcher.records().empty
    assert "nothing to watch" in watcher.summary()

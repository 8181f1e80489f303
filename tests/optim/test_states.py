"""States that come from elsewhere: torch's optimizers, other settings, hooks that change what is loaded."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from optim.table import RATE, TABLE, Make, assert_same, groups, parameters, set_gradients, train
from steradian import optim

ADAM = ["", "a", "b", "c", "ab", "ac", "bc", "abc"]
SCALAR = ["AdaGradG", "Adam-abc", "AdamG"]


@pytest.fixture(params=TABLE.values(), ids=TABLE)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def without_rows(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in made]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda p: torch.optim.Adam(p, lr=RATE), lambda p: optim.Adam(p, lr=1.0)),
        (lambda p: torch.optim.AdamW(p, lr=RATE), lambda p: optim.Adam(p, lr=1.0)),
        (lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9), lambda p: optim.SGD(p, lr=1.0)),
    ],
    ids=["Adam", "AdamW", "SGD"],
)
def test_a_training_by_torch_goes_on(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    one = theirs(without_rows(groups()))
    train(one)
    other = ours(groups(seed=1))
    for p, q in zip(parameters(one), parameters(other), strict=True):
        q.data.copy_(p)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert [group.get("rows") for group in other.param_groups] == ["filter", ("axis", 1), 2, None]
    train(one, 2, start=3)
    train(other, 2, start=3)
    assert_same(one, other)


def test_a_step_count_that_is_a_number() -> None:
    """As torch saved it before 1.12."""
    one = torch.optim.Adam(without_rows(groups()), lr=RATE)
    train(one)
    state = copy.deepcopy(one.state_dict())
    for of_param in state["state"].values():
        of_param["step"] = int(of_param["step"])
    other = optim.Adam(groups(), lr=1.0)
    for p, q in zip(parameters(one), parameters(other), strict=True):
        q.data.copy_(p)
    other.load_state_dict(state)
    train(one, 2, start=3)
    train(other, 2, start=3)
    assert_same(one, other)


@pytest.mark.parametrize("name", ["SGD", "SGD-", "SGD-bc"])
def test_a_momentum_that_is_none(name: str) -> None:
    """As torch saved it for momentum=0."""
    one, other = TABLE[name](groups()), TABLE[name](groups())
    state = one.state_dict()
    state["state"] = {i: {"momentum_buffer": None} for i in range(len(parameters(one)))}
    one.load_state_dict(state)
    train(one)
    train(other)
    assert_same(one, other)


@pytest.mark.parametrize("name", ["Adam-", "Adam-abc", "AdamG", "AdamP", "SGD-bc", "AdaGradG"])
def test_a_state_of_another_kind_is_refused(name: str) -> None:
    other = torch.optim.RMSprop if name.startswith("Adam") else torch.optim.Adam
    theirs = other(without_rows(groups()), lr=RATE)
    train(theirs)
    with pytest.raises(ValueError, match=f"a state of {name.split('-')[0]} must have .* made by another optimizer"):
        TABLE[name](groups()).load_state_dict(theirs.state_dict())


def test_a_state_that_is_refused_leaves_the_optimizer_as_it_was(make: Make) -> None:
    """A setting that makes no sense, another optimizer's state, and parameters in another order."""
    one, twin = make(groups()), make(groups())
    train(one)
    train(twin)
    changed = [copy.deepcopy(one.state_dict()) for _ in range(3)]
    changed[0]["param_groups"][0]["rows"] = 5
    changed[1]["param_groups"][-1]["lr"] = -1.0
    first, second = (changed[2]["state"].get(k, {}) for k in range(2))
    changed[2]["state"] |= {0: second, 1: first}
    states = [*changed[:2], *([changed[2]] if first else [])]
    for state in states:
        with pytest.raises(ValueError, match=r"rows 5 do not divide|lr must be|must have the shape"):
            one.load_state_dict(state)
    if not isinstance(one, optim.SGD | optim.AdaGradG):
        theirs = torch.optim.RMSprop(without_rows(groups()), momentum=0.5)
        train(theirs)
        with pytest.raises(ValueError, match="made by another optimizer"):
            one.load_state_dict(theirs.state_dict())
    assert_same(one, twin)
    train(one, 2, start=3)
    train(twin, 2, start=3)
    assert_same(one, twin)


@pytest.mark.parametrize("before", ["", "b"])
@pytest.mark.parametrize("after", ["a", "abc"])
def test_second_moments_of_weights_are_not_taken_for_those_of_rows(before: str, after: str) -> None:
    for direction in (before, after), (after, before):
        one, other = (optim.Adam(groups(), without=letters) for letters in direction)
        train(one)
        state = {**one.state_dict(), "param_groups": other.state_dict()["param_groups"]}
        with pytest.raises(ValueError, match=r"'exp_avg_sq' must have the shape \(6,"):
            other.load_state_dict(state)


@pytest.mark.parametrize("before", ADAM)
def test_letters_that_change_between_steps_need_another_state(before: str) -> None:
    for after in ADAM:
        optimizer = optim.Adam(groups(), without=before)
        train(optimizer, 1)
        for group in optimizer.param_groups:
            group["without"] = after
        if ("a" in before) == ("a" in after):
            train(optimizer, 1)
        else:
            with pytest.raises(ValueError, match="made by another optimizer or under other settings"):
                train(optimizer, 1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("setting", "missing"), [("spread", "norm_sq"), ("direction", "exp_avg_sq"), ("rest", "exp_avg")]
)
def test_settings_of_angular_that_need_another_state(setting: str, missing: str, fused: bool) -> None:
    """The fused step in the interpreter, or on a GPU where there is one."""
    device = "cuda" if fused and torch.cuda.is_available() else "cpu"
    made = [{**group, "params": [nn.Parameter(p.detach().to(device)) for p in group["params"]]} for group in groups()]
    optimizer = optim.Angular(made, fused=fused)
    train(optimizer, 2)
    before = [p.detach().clone() for p in parameters(optimizer)]
    for group in optimizer.param_groups:
        group[setting] = {"spread": "rms", "direction": "adam", "rest": "adamw"}[setting]
    with pytest.raises(ValueError, match=f"must have .*'{missing}', .* by another optimizer or under other settings"):
        train(optimizer, 1)
    assert all(torch.equal(p, old) for p, old in zip(parameters(optimizer), before, strict=True))


def test_the_fused_step_does_not_take_second_moments_of_weights_for_those_of_rows() -> None:
    """In the interpreter, or on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    group = groups()[0]
    group["params"] = [nn.Parameter(p.detach().to(device)) for p in group["params"]]
    optimizer = optim.Adam([group], without="bc", fused=True)
    train(optimizer, 1)
    optimizer.param_groups[0]["without"] = "abc"
    with pytest.raises(ValueError, match="made by another optimizer or under other settings"):
        train(optimizer, 1)


@pytest.mark.parametrize("name", SCALAR)
def test_a_hook_may_put_another_state_in_its_place(name: str) -> None:
    one, other, twin = (TABLE[name](groups()) for _ in range(3))
    train(one)
    train(twin)

    def doubled(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {key: {n: 2 * v for n, v in of.items()} for key, of in state["state"].items()}}

    other.register_load_state_dict_pre_hook(doubled)
    other.load_state_dict(one.state_dict())
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert one.state[p].keys() == other.state[q].keys()
        for key, value in one.state[p].items():
            assert torch.equal(2 * value, other.state[q][key]), key
    assert_same(one, twin)


def test_a_hook_after_loading_has_the_last_word(make: Make) -> None:
    """It finds what a step goes on from, and what it changes stays."""
    one, other = make(groups(torch.bfloat16)), make(groups(torch.bfloat16))
    train(one)
    found = {}

    def change(optimizer: torch.optim.Optimizer) -> None:
        found.update({p: dict(state) for p, state in optimizer.state.items()})
        for p in optimizer.state:
            optimizer.state[p] = {name: torch.full_like(value, 7) for name, value in optimizer.state[p].items()}
        optimizer.param_groups[0]["lr"] = 0.125

    other.register_load_state_dict_post_hook(change)
    other.load_state_dict(one.state_dict())
    for p, q in zip(parameters(one), parameters(other), strict=True):
        for name, value in one.state[p].items():
            torch.testing.assert_close(found[q][name], value, rtol=0, atol=0)
            assert (other.state[q][name] == 7).all(), name
    assert other.param_groups[0]["lr"] == 0.125


def test_entries_of_others_are_kept(make: Make) -> None:
    one, other, twin = (make(groups() + groups(seed=1)) for _ in range(3))
    train(one)
    train(twin)
    for k, p in enumerate(parameters(one)):
        one.state[p] |= {"note": "x", "seen": torch.arange(7), **({"own": torch.ones_like(p)} if k % 2 else {})}
    other.load_state_dict(one.state_dict())
    for k, (p, q) in enumerate(zip(parameters(one), parameters(other), strict=True)):
        q.data.copy_(p)
        assert other.state[q]["note"] == "x"
        assert other.state[q]["seen"].tolist() == list(range(7))
        assert ("own" in other.state[q]) == bool(k % 2)
    train(other, 2, start=3)
    train(twin, 2, start=3)
    for q in parameters(other):
        for name in ("note", "seen", "own"):
            other.state[q].pop(name, None)
    assert_same(other, twin)


def test_rows_of_one_number_keep_their_state_in_float32() -> None:
    """A vector cut into filters has one number per row in the very shape of the vector."""
    made = [
        optim.Adam([{"params": [nn.Parameter(torch.arange(1.0, 6).bfloat16())], "rows": "filter"}], without="abc")
        for _ in range(2)
    ]
    train(made[0])
    made[1].load_state_dict(made[0].state_dict())
    per_row = [value for key, value in made[1].state[parameters(made[1])[0]].items() if key in ("exp_avg_sq", "sum")]
    assert [value.dtype for value in per_row] == [torch.float32]


def test_a_parameter_that_took_no_step_has_none_to_load(make: Make) -> None:
    one, other = make(groups()), make(groups())
    set_gradients(one, 0)
    parameters(one)[0].grad = None
    one.step()
    other.load_state_dict(one.state_dict())
    assert not other.state.get(parameters(other)[0])
    train(other)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        partial(optim.AdaGradG, v0=0.5),
        lambda made: optim.AdaGradG.from_sgd(made, lr=RATE, weight_decay=0.25),
        partial(optim.Angular, momentum=0.0),
        partial(optim.SGD, lr=RATE, weight_decay=0.25, corrected_decay=True),
    ],
    ids=["AdaGradG", "from_sgd", "Angular", "SGD"],
)
def test_torchs_checkpoint_restores_optimizers_that_keep_nothing_of_the_rest(make: Make, flat: bool) -> None:
    options, models, optimizers = StateDictOptions(flatten_optimizer_state_dict=flat), [], []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
        rows, rest = list(model[1].parameters()), [*model[0].parameters(), *model[2].parameters()]
        models.append(model)
        optimizers.append(make([{"params": rest[:2]}, {"params": rows, "rows": "filter"}, {"params": rest[2:]}]))
    one, other = optimizers
    train(one)
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(
        models[1], other, get_optimizer_state_dict(models[0], one, options=options), options=options
    )
    models[1].load_state_dict(models[0].state_dict())
    assert_same(one, other)
    train(one, 2, start=3)
    train(other, 2, start=3)
    assert_same(one, other)


def test_a_state_is_loaded_in_the_memory_format_of_its_parameter(make: Make) -> None:
    """A checkpoint of a contiguous model, or one that knows no formats, for a model in channels_last."""
    start = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    one, other = (
        make([{"params": [nn.Parameter(start.to(memory_format=form))], "rows": "filter"}])
        for form in (torch.contiguous_format, torch.channels_last)
    )
    train(one)
    other.load_state_dict(one.state_dict())
    (p,), (q,) = parameters(one), parameters(other)
    for name, value in other.state[q].items():
        assert torch.equal(value, one.state[p][name])
        assert value.shape != q.shape or value.stride() == q.stride(), name


def test_a_number_in_the_place_of_a_tensor_is_refused(make: Make) -> None:
    one, other = make(groups()), make(groups())
    train(one)
    state = copy.deepcopy(one.state_dict())
    for entries in state["state"].values():
        for name in entries.keys() - {"step"}:
            entries[name] = 0.5
    if any(entries.keys() - {"step"} for entries in state["state"].values()):
        with pytest.raises(ValueError, match=r"must be a tensor, got 0\.5"):
            other.load_state_dict(state)
    train(other)


def test_a_step_count_of_two_numbers_is_refused(make: Make) -> None:
    one = make(groups())
    train(one)
    state = copy.deepcopy(one.state_dict())
    for entries in state["state"].values():
        if "step" in entries:
            entries["step"] = torch.tensor([1.0, 2.0])
    if any("step" in entries for entries in state["state"].values()):
        with pytest.raises(ValueError, match=r"'step' must have the shape \(\) here, got \(2,\)"):
            make(groups()).load_state_dict(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [("Adam-abc", "AdamG"), ("AdamG", "Adam-abc"), ("Adam-bc", "AdamP"), ("AdamP", "Adam-bc"), ("AdaGradG", "AdamG")],
)
def test_the_state_of_another_of_our_optimizers_is_refused(one: str, other: str) -> None:
    """Their entries have the same names and shapes, and mean something else."""
    made, target = TABLE[one](groups()), TABLE[other](groups())
    train(made)
    with pytest.raises(ValueError, match="made by another optimizer"):
        target.load_state_dict(made.state_dict())
    train(target)


@pytest.mark.parametrize("kind", [optim.AdamP, optim.Angular, optim.Adam])
def test_a_checkpoint_makes_no_rows_of_parameters_that_have_none(kind: Any) -> None:
    """Param groups in another order, or an optimizer that was made without them."""
    (rows, other), rest = groups()[0]["params"], groups()[-1]
    old = kind([{"params": [rows], "rows": "filter"}, {"params": [other]}])
    train(old)
    for new in (kind([{"params": [other]}, {"params": [rows], "rows": "filter"}]), kind([{"params": [rows]}, rest])):
        kept = [group.get("rows") for group in new.param_groups]
        state = old.state_dict()
        state["param_groups"][1]["params"] = list(range(1, 1 + len(new.param_groups[1]["params"])))
        with pytest.raises(ValueError, match="rows of param group 0 must be None as in this optimizer, got 'filter'"):
            new.load_state_dict(state)
        assert [group.get("rows") for group in new.param_groups] == kept


def test_settings_that_a_checkpoint_replaces_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    one, other = optim.Adam(groups(), without="abc"), optim.Adam(groups(), without="ab")
    other.load_state_dict(one.state_dict())
    lines = [record.message for record in caplog.records]
    assert len(lines) == len(one.param_groups)
    assert lines[0] == "load_state_dict: param group 0 has without='abc' from the checkpoint now, instead of 'ab'"
    caplog.clear()
    optim.Adam(groups(), without="ab").load_state_dict(
        other.state_dict() | {"param_groups": one.state_dict()["param_groups"]}
    )
    assert caplog.records
    caplog.clear()
    optim.Adam(groups(), without="abc").load_state_dict(one.state_dict())
    assert not caplog.records

"""What every optimizer keeps: each test runs over the whole table."""

import copy
import inspect
import io
import itertools
import pickle
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

from optim.table import (
    CLASSIC,
    MATRICES,
    RATE,
    SHAPES,
    TABLE,
    Make,
    assert_same,
    groups,
    kinds_first,
    one_of_each,
    parameters,
    set_gradients,
    train,
)
from steradian.groups import Layout
from steradian.optim import SGD


@pytest.fixture(params=TABLE.values(), ids=TABLE)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


# The step ---------------------------------------------------------------------------------------------------


def test_is_a_torch_optimizer(make: Make) -> None:
    optimizer = make(groups())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ in repr(optimizer)


def test_closure_runs_once_under_grad(make: Make) -> None:
    optimizer, calls = make(groups()), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in parameters(optimizer))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.requires_grad
    assert optimizer.step() is None
    assert not any(p.grad_fn for p in parameters(optimizer))


def test_gradients_are_not_written(make: Make) -> None:
    optimizer = make(groups())
    for k in range(3):
        set_gradients(optimizer, k)
        kept = [(p.grad, p.grad.clone(), p.grad._version) for p in parameters(optimizer)]
        optimizer.step()
        for p, (gradient, value, version) in zip(parameters(optimizer), kept, strict=True):
            assert p.grad is gradient
            assert gradient._version == version
            assert torch.equal(gradient, value)


def test_gradients_are_zeroed_where_they_lie(make: Make) -> None:
    optimizer = make(groups())
    set_gradients(optimizer, 0)
    first, second, *others = parameters(optimizer)
    first.grad = None
    second.grad = second.grad * torch.ones((), requires_grad=True)
    kept = [(p, p.grad) for p in (second, *others)]
    optimizer.zero_grad(set_to_none=False)
    assert first.grad is None
    assert all(p.grad is gradient and not gradient.any() for p, gradient in kept)
    assert not second.grad.requires_grad
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters(optimizer))


def test_gradients_of_several_kinds_are_zeroed() -> None:
    dense, sparse, half = torch.ones(2, 3), torch.ones(2, 3).to_sparse(), torch.ones(4, dtype=torch.bfloat16)
    params = [nn.Parameter(torch.ones(gradient.shape, dtype=gradient.dtype)) for gradient in (dense, sparse, half)]
    for p, gradient in zip(params, (dense, sparse, half), strict=True):
        p.grad = gradient
    optimizer = SGD(params)
    optimizer.zero_grad(set_to_none=False)
    assert [p.grad is gradient for p, gradient in zip(params, (dense, sparse, half), strict=True)] == [True] * 3
    assert not dense.any()
    assert not half.any()
    assert not sparse.to_dense().any()
    assert "foreach" not in optimizer.defaults


def test_state_holds_tensors_alone(make: Make) -> None:
    optimizer = make(groups())
    train(optimizer)
    for p in parameters(optimizer):
        for name, value in optimizer.state[p].items():
            assert isinstance(value, Tensor), name
            assert not value.requires_grad
        if "step" in optimizer.state[p]:
            assert optimizer.state[p]["step"].dtype == torch.float32
            assert optimizer.state[p]["step"].shape == ()
            assert optimizer.state[p]["step"] == 3


def test_steps_change_parameters_and_keep_them_finite(make: Make) -> None:
    optimizer = make(groups())
    before = [p.clone() for p in parameters(optimizer)]
    train(optimizer)
    for p, old in zip(parameters(optimizer), before, strict=True):
        assert torch.isfinite(p).all()
        assert not torch.equal(p, old)


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_rate_of_zero_changes_no_digit(make: Make, gradient: float) -> None:
    """`set_optimizer_state_dict` takes such a step to have a state to load into, after the weights were loaded."""
    optimizer = make(groups())
    train(optimizer)
    before = [p.detach().clone() for p in parameters(optimizer)]
    set_gradients(optimizer, 5)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad.mul_(gradient)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters(optimizer), before, strict=True))


def test_maximize_is_descent_on_the_negative(make: Make) -> None:
    one, other = make(groups(), maximize=True), make(groups())
    for k in range(3):
        set_gradients(one, k)
        set_gradients(other, k)
        for p in parameters(other):
            p.grad.neg_()
        one.step()
        other.step()
    assert_same(one, other)


def test_parameters_without_gradient_are_left_alone(make: Make) -> None:
    optimizer = make(groups())
    set_gradients(optimizer, 0)
    left = [group["params"][-1] for group in optimizer.param_groups]
    before = [p.clone() for p in left]
    for p in left:
        p.grad = None
    optimizer.step()
    for p, old in zip(left, before, strict=True):
        assert torch.equal(p, old)
        assert not optimizer.state.get(p)
    train(optimizer)
    assert all(torch.isfinite(p).all() for p in parameters(optimizer))


@pytest.mark.parametrize("name", sorted(TABLE.keys() - MATRICES))
def test_rows_of_one_tensor_do_not_touch_each_other(name: str) -> None:
    make = TABLE[name]
    one, other = make(groups()), make(groups())
    for k in range(3):
        set_gradients(one, k)
        set_gradients(other, k)
        other.param_groups[0]["params"][0].grad[2] *= 3
        one.step()
        other.step()
    p, q = (optimizer.param_groups[0]["params"][0] for optimizer in (one, other))
    same = (p == q).flatten(1).all(dim=1)
    assert same.tolist() == [True, True, False, True, True, True]


def test_step_hooks_run(make: Make) -> None:
    optimizer, seen = make(groups()), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, 1)
    assert seen == ["before", "after"]


# Rates ------------------------------------------------------------------------------------------------------


def test_tensor_rate(make: Make) -> None:
    rate = torch.tensor(RATE)
    one, other = make(groups(), lr=rate), make(groups(), lr=RATE)
    for optimizer in (one, other):
        for group in optimizer.param_groups:
            group["lr"] = rate if optimizer is one else RATE
    train(one)
    train(other)
    assert_same(one, other, rtol=1e-6, atol=1e-7)
    rate.zero_()
    before = [p.clone() for p in parameters(one)]
    train(one, 1)
    for p, old in zip(parameters(one), before, strict=True):
        torch.testing.assert_close(p, old)


def test_tensor_rate_with_a_dimension(make: Make) -> None:
    one, other = make(groups(), lr=torch.tensor([RATE])), make(groups(), lr=RATE)
    train(one)
    train(other)
    assert_same(one, other, rtol=1e-6, atol=1e-7)


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    s = lr_scheduler
    return {
        "LambdaLR": lambda: s.LambdaLR(optimizer, lambda k: 0.9**k),
        "MultiplicativeLR": lambda: s.MultiplicativeLR(optimizer, lambda k: 0.9),
        "StepLR": lambda: s.StepLR(optimizer, 1),
        "MultiStepLR": lambda: s.MultiStepLR(optimizer, [1, 2]),
        "ConstantLR": lambda: s.ConstantLR(optimizer),
        "LinearLR": lambda: s.LinearLR(optimizer),
        "ExponentialLR": lambda: s.ExponentialLR(optimizer, 0.9),
        "SequentialLR": lambda: s.SequentialLR(
            optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)], milestones=[1]
        ),
        "PolynomialLR": lambda: s.PolynomialLR(optimizer),
        "CosineAnnealingLR": lambda: s.CosineAnnealingLR(optimizer, 5),
        "ChainedScheduler": lambda: s.ChainedScheduler([s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)]),
        "ReduceLROnPlateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0),
        "CyclicLR": lambda: s.CyclicLR(optimizer, 1e-3, 1e-2, cycle_momentum=cycles(optimizer)),
        "OneCycleLR": lambda: s.OneCycleLR(optimizer, 1e-2, total_steps=9, cycle_momentum=cycles(optimizer)),
        "CosineAnnealingWarmRestarts": lambda: s.CosineAnnealingWarmRestarts(optimizer, 2),
    }


def cycles(optimizer: torch.optim.Optimizer) -> bool:
    return "betas" in optimizer.defaults or bool(optimizer.defaults.get("momentum"))


SCHEDULERS = sorted(
    name
    for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass)
    if issubclass(kind, lr_scheduler.LRScheduler) and kind is not lr_scheduler.LRScheduler and not name.startswith("_")
)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(make: Make, name: str) -> None:
    """Every scheduler that torch has changes the step as setting the same rates by hand does, also as a tensor."""
    for rate in (RATE, torch.tensor(RATE)):
        optimizer, constant, by_hand = (make(one_of_each(), lr=each) for each in (rate, RATE, RATE))
        scheduler = schedulers(optimizer)[name]()
        for k in range(3):
            for group, other in zip(optimizer.param_groups, by_hand.param_groups, strict=True):
                other.update({key: group[key] for key in ("betas", "momentum") if key in group})
                other["lr"] = float(group["lr"])
            for each in (optimizer, constant, by_hand):
                train(each, 1, start=k)
            scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
        assert_same(optimizer, by_hand, rtol=1e-6, atol=1e-7)
        if name not in ("ConstantLR", "CyclicLR", "OneCycleLR"):
            pairs = zip(parameters(optimizer), parameters(constant), strict=True)
            assert not all(torch.equal(p, q) for p, q in pairs), "the rate has no effect"


# Saving and loading -----------------------------------------------------------------------------------------


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "carry", [lambda d: d, copy.deepcopy, through_file, lambda d: pickle.loads(pickle.dumps(d))], ids="drfp"
)
def test_state_dict_continues_bit_for_bit(make: Make, carry: Callable[[Any], Any]) -> None:
    one = make(groups())
    train(one)
    other = make(groups(seed=1))
    for p, q in zip(parameters(one), parameters(other), strict=True):
        q.data.copy_(p)
    other.load_state_dict(carry(one.state_dict()))
    assert_same(one, other)
    train(one, 3, start=3)
    train(other, 3, start=3)
    assert_same(one, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_continue_bit_for_bit(make: Make, copied: Callable[[Any], Any]) -> None:
    one = make(groups())
    one.emit()
    train(one)
    other = copied(one)
    assert other.telemetry is None
    train(one, 3, start=3)
    train(other, 3, start=3)
    assert_same(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_per_row_stay_float32_next_to_half_precision(make: Make, dtype: torch.dtype) -> None:
    one = make(groups(dtype))
    train(one)
    other = make(groups(dtype, seed=1))
    for p, q in zip(parameters(one), parameters(other), strict=True):
        q.data.copy_(p)
    other.load_state_dict(through_file(one.state_dict()))
    assert_same(one, other)
    per_row = 0
    for p in parameters(other):
        for name, value in other.state[p].items():
            if name != "step":
                assert value.dtype == (dtype if value.shape == p.shape else torch.float32)
                per_row += value.shape != p.shape
    scalar = not any(w in str(make.func) for w in ("SGD", "AdamP")) and "a" in make.keywords.get("without", "a")
    scalar = make.keywords.get("spread") == "rms" if "Angular" in str(make.func) else scalar
    assert bool(per_row) == scalar
    train(one, 2, start=3)
    train(other, 2, start=3)
    assert_same(one, other)


def test_state_of_float32_is_loaded_next_to_half_precision(make: Make) -> None:
    one, other = make(groups()), make(groups(torch.bfloat16))
    train(one)
    other.load_state_dict(one.state_dict())
    for p, q in zip(parameters(one), parameters(other), strict=True):
        for name, value in other.state[q].items():
            assert value.shape == one.state[p][name].shape
            if value.shape != q.shape and name != "step":
                assert value.dtype == torch.float32
                assert torch.equal(value, one.state[p][name])


def test_add_param_group(make: Make) -> None:
    whole, grown = make(groups()), make(groups()[:1])
    for group in groups()[1:]:
        grown.add_param_group(group)
    train(whole)
    train(grown)
    assert_same(whole, grown)


def test_a_bad_param_group_is_not_added(make: Make) -> None:
    optimizer = make(groups())
    p = nn.Parameter(torch.zeros(4, 3))
    for bad, message in (
        ({"rows": 3}, "rows 3 do not divide"),
        ({"rows": "filters"}, "rows must be"),
        ({"joint": True}, "joint must be"),
        ({"lr": -1.0}, "lr must be"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [p], **bad})
    other = nn.Parameter(torch.zeros(5))
    with pytest.raises(ValueError, match="different numbers of rows"):
        optimizer.add_param_group({"params": [p, other], "rows": "filter", "joint": True})
    assert len(optimizer.param_groups) == len(SHAPES)
    train(optimizer)


def test_named_parameters(make: Make) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = make([{"params": model.named_parameters(), "rows": "filter"}])
    train(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]


# Shapes, strides, dtypes ------------------------------------------------------------------------------------


def strided(t: Tensor) -> Tensor:
    room = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    room[..., ::2] = t
    return room[..., ::2]


LAYOUTS_IN_MEMORY = {
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": strided,
}


@pytest.mark.parametrize("rows", ["filter", "tensor", 3, ("axis", 1)], ids=str)
@pytest.mark.parametrize("memory", LAYOUTS_IN_MEMORY)
def test_memory_layout_does_not_matter(make: Make, memory: str, rows: Any) -> None:
    start = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    arranged = LAYOUTS_IN_MEMORY[memory]
    one = make([{"params": [nn.Parameter(start.clone())], "rows": rows}])
    other = make([{"params": [nn.Parameter(arranged(start))], "rows": rows}])
    (p,), (q,) = parameters(one), parameters(other)
    assert not q.is_contiguous()
    stride = q.stride()
    for k in range(3):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 + k))
        q.grad = p.grad.clone() if k == 1 else arranged(p.grad)
        one.step()
        other.step()
    assert q.stride() == stride
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def specs(shape: tuple[int, ...]) -> list[Any]:
    """Every layout that cuts a tensor of this shape."""
    found: list[Any] = ["filter", "tensor", *(g for g in (1, 2, 3) if shape and shape[0] % g == 0)]
    found += [("axis", k) for k in range(-len(shape), len(shape))]
    for blocks in itertools.product((1, 2, 3, -1), repeat=len(shape)):
        if all(g == -1 or size % g == 0 for size, g in zip(shape, blocks, strict=True)):
            found.append(("grid", *blocks))
    return found


SHAPES_OF_ONE_TO_THREE = [s for n in (1, 2, 3, 4) for s in itertools.product((1, 2, 3), repeat=n)]


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("name", kinds_first(name for name in TABLE if name not in CLASSIC | MATRICES))
def test_every_shape_and_spec(name: str, dims: int) -> None:
    """Rows of a view, rows of a copy, dimensions of one entry: as stepping the rows themselves, cut out before."""
    make = TABLE[name]
    shapes = [shape for shape in SHAPES_OF_ONE_TO_THREE if len(shape) == dims]
    shapes = shapes[:: 2 if dims == 3 else 1] if dims < 4 else [shape for shape in shapes if 1 in shape][::7]
    for shape in shapes:
        draw = torch.Generator().manual_seed(0)
        start, gradient = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
        for spec in specs(shape):
            layout = Layout(spec)
            if layout.size(shape)[1] == 1 and make.func._fixes_radius:
                continue
            p, rows = nn.Parameter(start.clone()), nn.Parameter(layout.rows(start).clone())
            one, other = make([{"params": [p], "rows": spec}]), make([{"params": [rows], "rows": "filter"}])
            for _ in range(2):
                p.grad, rows.grad = gradient.clone(), layout.rows(gradient).clone()
                one.step()
                other.step()
            torch.testing.assert_close(layout.rows(p.detach()), rows.detach(), rtol=1e-5, atol=1e-6)
            for name, value in one.state[p].items():
                theirs = other.state[rows][name]
                shaped = layout.restore(theirs, shape) if theirs.shape == rows.shape else theirs
                torch.testing.assert_close(value, shaped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("rows", [None, "filter", "tensor", 1], ids=str)
def test_small_shapes(make: Make, shape: tuple[int, ...], rows: Any) -> None:
    p = nn.Parameter(torch.ones(shape))
    if rows is not None and Layout(rows).size(shape)[1] == 1 and 0 not in shape and make.func._fixes_radius:
        with pytest.raises(ValueError, match="rows must have at least two numbers"):
            make([{"params": [p], "rows": rows}])
        return
    optimizer = make([{"params": [p], "rows": rows}])
    for _ in range(3):
        p.grad = torch.full(shape, 0.5)
        optimizer.step()
    assert p.shape == shape
    assert all(torch.isfinite(value).all() for value in (p, *optimizer.state[p].values()))
    other = make([{"params": [nn.Parameter(torch.ones(shape))], "rows": rows}])
    other.load_state_dict(optimizer.state_dict())
    assert [v.shape for v in other.state[parameters(other)[0]].values()] == [
        v.shape for v in optimizer.state[p].values()
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_computed_in_float32(make: Make, dtype: torch.dtype) -> None:
    """One step from half-precision numbers is the float32 step, rounded."""
    if make in [TABLE[name] for name in CLASSIC]:
        pytest.skip("torch's own update")
    one, other = make(groups(dtype, radial_alone=True)), make(groups(dtype, radial_alone=True))
    for p in parameters(other):
        p.data = p.data.float()
    set_gradients(one, 0)
    for p, q in zip(parameters(one), parameters(other), strict=True):
        q.grad = p.grad.float()
    one.step()
    other.step()
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(p, q.to(dtype))
        for name, value in one.state[p].items():
            assert torch.equal(value, other.state[q][name].to(value.dtype))


def test_float64_agrees_with_float32(make: Make) -> None:
    one, other = make(groups(torch.float64)), make(groups())
    train(one, 5)
    train(other, 5)
    for p, q in zip(parameters(one), parameters(other), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=1e-4, atol=1e-5)
        assert all(v.dtype == torch.float64 for k, v in one.state[p].items() if k != "step")


@pytest.mark.parametrize("rows", [None, "filter"])
def test_gradients_that_no_step_is_for_are_refused(make: Make, rows: Any) -> None:
    first, plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
    of = {d: nn.Parameter(torch.ones(3, 2).to(d), requires_grad=False) for d in (torch.int32, torch.float8_e5m2)}
    cases = [(p, f"needs parameters .*, got {dtype}") for dtype, p in of.items()]
    if rows is not None or not make.func._takes_sparse:
        cases.append((plain, "dense gradients"))
    for bad, message in cases:
        optimizer = make([{"params": [first]}, {"params": [bad], "rows": rows}])
        first.grad = torch.ones(3)
        bad.grad = torch.ones(3, 2).to_sparse() if bad is plain else torch.ones_like(bad)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert torch.equal(first, torch.ones(3)), "no parameter moves when one is refused"


def test_complex_and_lazy_parameters_are_refused_with_rows_when_the_optimizer_is_made(make: Make) -> None:
    for p, message in (
        (nn.Parameter(torch.ones(3, 2, dtype=torch.complex64)), "rows must be None for complex parameters"),
        (nn.LazyLinear(4).weight, "run the model once first"),
    ):
        with pytest.raises(ValueError, match=message):
            make([{"params": [p], "rows": "filter"}])


def test_parameters_of_a_wrapping_class_step_as_plain_ones(make: Make) -> None:
    one, other = make(one_of_each()), make(one_of_each())
    for group in other.param_groups:
        group["params"] = [nn.Parameter(TwoTensor(p.detach(), p.detach().clone())) for p in group["params"]]
    for k in range(2):
        set_gradients(one, k)
        for p, q in zip(parameters(one), parameters(other), strict=True):
            q.grad = TwoTensor(p.grad, p.grad.clone())
        one.step()
        other.step()
        other.load_state_dict(other.state_dict())
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(p, q.a)
        assert torch.equal(p, q.b)


# Inside torch's machinery -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds_first(name for name in TABLE if name not in ("AdamS", "AdamSRT")))
def test_compiled_step(name: str) -> None:
    """All but the presets, which are Adam and take its step."""
    make = TABLE[name]
    one, other = make(one_of_each()), make(one_of_each())
    train(one, 1)
    train(other, 1)
    torch._dynamo.reset()
    compiled = torch.compile(one.step, backend="eager")
    for k in range(1, 3):
        set_gradients(one, k)
        set_gradients(other, k)
        compiled()
        other.step()
    assert_same(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_step_by_the_default_backend() -> None:
    one, other = (TABLE["Adam-abc"](groups(torch.float64, radial_alone=True)[:1]) for _ in range(2))
    train(one, 1)
    train(other, 1)
    torch._dynamo.reset()
    compiled = torch.compile(one.step)
    for k in range(1, 3):
        set_gradients(one, k)
        set_gradients(other, k)
        compiled()
        other.step()
    assert_same(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", sorted(TABLE.keys() - CLASSIC))
def test_a_step_count_that_stays_a_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator and in a compiled step: the bias corrections keep float64's digits."""
    one, other = (TABLE[name](groups(torch.float64, radial_alone=True)) for _ in range(2))
    train(other)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    train(one)
    monkeypatch.undo()
    assert_same(one, other, rtol=1e-13, atol=1e-14)


def test_gradient_scaler(make: Make) -> None:
    """Scaled gradients are unscaled before the step, and one infinite entry skips it."""
    one, other = make(groups()), make(groups())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for k in range(3):
        set_gradients(other, k)
        other.step()
        set_gradients(one, k)
        for p in parameters(one):
            p.grad *= scaler.scale(torch.ones(()))
        scaler.step(one)
        scaler.update()
    assert_same(one, other)
    set_gradients(one, 9)
    parameters(one)[0].grad[0] = torch.inf
    scaler.step(one)
    scaler.update()
    assert_same(one, other)
    assert scaler.get_scale() == 2.0**3


@pytest.mark.parametrize("rate_on_device", [False, True])
def test_nothing_is_read_back(make: Make, rate_on_device: bool) -> None:
    """On the meta device, where there are no numbers to read: any attempt raises."""
    options = {"capturable": True} if counts_steps(make) and make is not TABLE["Adam-"] else {}
    made = one_of_each(radial_alone=bool(options))
    for group in made:
        group["params"] = [nn.Parameter(p.to("meta")) for p in group["params"]]
    optimizer = make(made, **options)
    if rate_on_device and (options or not counts_steps(make)):
        for group in optimizer.param_groups:
            group["lr"] = torch.full((), RATE, device="meta")
    optimizer.emit()
    for _ in range(2):
        for p in parameters(optimizer):
            p.grad = torch.empty_like(p)
        optimizer.step()


def counts_steps(make: Make) -> bool:
    return "capturable" in inspect.signature(make.func).parameters


def test_capturable(make: Make) -> None:
    if not counts_steps(make):
        pytest.skip("counts no steps")
    one, other = make(groups(), capturable=True), make(groups())
    train(one)
    train(other)
    assert_same(one, other)


def test_a_default_device_is_not_where_steps_are_counted(make: Make) -> None:
    """`torch.set_default_device`, as many scripts have it: parameters need not lie there."""
    one, other = make(groups()), make(groups())
    steps = []
    for k in range(3):
        set_gradients(other, k)
        steps.append([p.grad for p in parameters(other)])
    torch.set_default_device("meta")
    try:
        other.emit()
        for gradients in steps:
            for p, gradient in zip(parameters(other), gradients, strict=True):
                p.grad = gradient
            other.step()
            other.load_state_dict(other.state_dict())
    finally:
        torch.set_default_device(None)
    train(one)
    assert_same(one, other)


def test_a_step_without_numbers_has_the_shapes_of_one(make: Make) -> None:
    """As tools take it that count memory before there is any, on fake parameters."""
    real = make(one_of_each())
    train(real)
    with FakeTensorMode():
        fake = make(one_of_each())
        fake.emit()
        for _ in range(2):
            for p in parameters(fake):
                p.grad = torch.empty_like(p)
            fake.step()
    for p, q in zip(parameters(real), parameters(fake), strict=True):
        kept = [
            {name: (v.shape, v.dtype) for name, v in each.state[key].items()} for each, key in ((real, p), (fake, q))
        ]
        assert kept[0] == kept[1]


def test_what_is_made_in_inference_mode_is_stepped_outside(make: Make) -> None:
    one, other = make(groups()), make(groups())
    train(one)
    train(other)
    with torch.inference_mode():
        other.emit()
        other.load_state_dict(copy.deepcopy(other.state_dict()))
    train(one, start=3)
    train(other, start=3)
    assert_same(one, other)


def test_fused_is_refused_where_it_cannot_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if "fused" not in inspect.signature(type(make(groups()))).parameters:
        pytest.skip("has no such argument")
    make(groups(), fused=False)
    with pytest.raises(ValueError, match="fused must be None or False"):
        make(groups(), fused=True)


def test_no_warnings(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make(groups()))

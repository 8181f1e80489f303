"""The contract on an accelerator: nothing is read back, steps can be captured, state moves between devices."""

import copy
import inspect
from collections.abc import Iterator

import pytest
import torch

from optim.table import RATE, TABLE, Make, assert_same, groups, parameters, set_gradients, train
from steradian import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=TABLE.values(), ids=TABLE)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def on_device(make: Make, **options: object) -> torch.optim.Optimizer:
    made = groups()
    for group in made:
        group["params"] = [p.detach().cuda().requires_grad_() for p in group["params"]]
    return make(made, **options)


@pytest.fixture
def no_reading_back() -> Iterator[None]:
    """Any synchronization of the host with the device raises."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def assert_close_to_cpu(on_device: torch.optim.Optimizer, on_cpu: torch.optim.Optimizer) -> None:
    """Up to rounding; Newton–Schulz is computed in bfloat16 on a GPU and in float32 on a CPU."""
    muon = on_cpu.defaults.get("direction") == "muon"
    close = {"rtol": 0.0, "atol": 0.01} if muon else {"rtol": 1e-4, "atol": 1e-5}
    for p, q in zip(parameters(on_device), parameters(on_cpu), strict=True):
        torch.testing.assert_close(p.cpu(), q, **close)


def counts(make: Make) -> bool:
    return "capturable" in inspect.signature(type(make(groups()))).parameters


def test_agrees_with_the_cpu(make: Make) -> None:
    one, other = on_device(make), make(groups())
    train(one, 5)
    train(other, 5)
    assert_close_to_cpu(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("rate", ["number", "on the host", "on the device"])
def test_nothing_is_read_back(make: Make, rate: str, no_reading_back: None) -> None:
    """A rate on the device needs capturable=True where torch's own Adam update takes part."""
    options = {"capturable": True} if rate == "on the device" and counts(make) else {}
    optimizer = on_device(make, **options)
    for group in optimizer.param_groups:
        if rate != "number":
            group["lr"] = torch.tensor(RATE, device="cuda" if rate == "on the device" else "cpu")
    train(optimizer, 1)
    optimizer.emit()
    train(optimizer, 1)
    set_gradients(optimizer, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step()


def assert_replays_are_steps(
    graph: torch.cuda.CUDAGraph, one: torch.optim.Optimizer, other: torch.optim.Optimizer, steps: range
) -> None:
    """The graph has captured a step of the one, the other is stepped eagerly."""
    for k in steps:
        set_gradients(other, k)
        for p, q in zip(parameters(one), parameters(other), strict=True):
            p.grad.copy_(q.grad)
        graph.replay()
        other.step()
    assert_same(one, other)


def test_captured_step_is_the_eager_one(make: Make) -> None:
    options = {"capturable": True} if counts(make) else {}
    one, other = on_device(make, **options), on_device(make, **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(one, 2)
    torch.cuda.current_stream().wait_stream(side)
    train(other, 2)
    graph = torch.cuda.CUDAGraph()
    set_gradients(one, 2)
    with torch.cuda.graph(graph):
        one.step()
    assert_replays_are_steps(graph, one, other, range(2, 5))


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_one_step_before_a_capture_is_enough(rest: str) -> None:
    one, other = (on_device(optim.Angular, lr=RATE, rest=rest, capturable=True) for _ in range(2))
    for optimizer in (one, other):
        train(optimizer, 1)
    set_gradients(one, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.step()
    assert_replays_are_steps(graph, one, other, range(1, 3))


def test_a_graph_keeps_what_it_captured_through_eager_steps() -> None:
    """Eager steps with gradients elsewhere and another rate leave a graph's addresses and rate alone."""
    made = [on_device(TABLE["Adam-abc"], capturable=True, lr=0.25) for _ in range(2)]
    one, other = made
    for optimizer in made:
        train(optimizer, 2)
    set_gradients(one, 2)
    static = [p.grad for p in parameters(one)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.step()
    for k, rate in ((3, 0.5), (4, 0.25), (5, 0.125), (6, 0.25)):
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = rate
        set_gradients(other, k)
        if rate == 0.25:
            for p, g, q in zip(parameters(one), static, parameters(other), strict=True):
                p.grad = g.copy_(q.grad)
            graph.replay()
        else:
            set_gradients(one, k)
            one.step()
        other.step()
    assert_same(one, other)


def test_an_eager_step_between_capture_and_replay() -> None:
    """A capture with gradients elsewhere changes nothing that an eager step with the same gradients relies on."""
    one, other = (on_device(TABLE["Adam-abc"], capturable=True) for _ in range(2))
    kept = [[torch.ones_like(p) for p in parameters(one)] for _ in range(2)]
    for k, gradients in enumerate(kept):
        for optimizer in (one, other):
            for p, g in zip(parameters(optimizer), gradients, strict=True):
                p.grad = g
        if k:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                one.step()
            kept[0][0].fill_(7)  # what the table would still point at
        one.step()
        other.step()
    assert_same(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["Adam-", "Adam-abc", "Adam-bc"])
def test_a_gradient_scaler_needs_no_reading_back(name: str, no_reading_back: None) -> None:
    one, other = on_device(TABLE[name]), on_device(TABLE[name])
    assert one._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**4)
    scale = scaler.scale(torch.ones((), device="cuda"))
    for k in range(3):
        set_gradients(one, k)
        set_gradients(other, k)
        for p in parameters(one):
            p.grad *= scale
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if k else "default")
        scaler.step(one)
        torch.cuda.set_sync_debug_mode("default")
        other.step()
        scaler.update(2.0**4)
    assert_same(one, other, rtol=1e-6, atol=1e-7)
    set_gradients(one, 9)
    parameters(one)[0].grad[0] = torch.inf
    scaler.step(one)
    assert_same(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_without_capturable_is_refused(make: Make) -> None:
    if not counts(make):
        pytest.skip("counts no steps")
    optimizer = on_device(make)
    train(optimizer, 1)
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_state_moves_to_another_device(make: Make) -> None:
    one, other = make(groups()), on_device(make)
    train(one)
    with torch.no_grad():
        for p, q in zip(parameters(one), parameters(other), strict=True):
            q.copy_(p)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for q in parameters(other):
        assert all(value.is_cuda for name, value in other.state[q].items() if name != "step")
    train(one, 3, start=3)
    train(other, 3, start=3)
    assert_close_to_cpu(other, one)


def test_state_moves_to_the_host(make: Make) -> None:
    """Also the step count, which a fused step keeps on the device."""
    one, other = on_device(make), make(groups())
    train(one)
    with torch.no_grad():
        for p, q in zip(parameters(one), parameters(other), strict=True):
            q.copy_(p)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for q in parameters(other):
        assert not any(value.is_cuda for value in other.state[q].values())
    train(one, 3, start=3)
    train(other, 3, start=3)
    assert_close_to_cpu(one, other)


def test_the_fused_step_is_the_default(make: Make) -> None:
    optimizer = on_device(make)
    train(optimizer, 1)
    first = optimizer.param_groups[0]
    adam = isinstance(optimizer, optim.Adam) and bool(first["without"])
    fused = adam or (isinstance(optimizer, optim.Angular) and first["direction"] in ("gradient", "muon"))
    assert (optimizer._fused_step is not None) == fused


def test_a_default_device(make: Make) -> None:
    """The device as the default, as many scripts have it; parameters on it and on the host."""
    one, other, twin = on_device(make), make(groups()), make(groups())
    torch.set_default_device("cuda")
    try:
        for optimizer in (one, other):
            optimizer.emit()
            for k in range(3):
                with torch.device("cpu"):
                    set_gradients(optimizer, k)
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_device(None)
    train(twin)
    assert_same(other, twin)
    assert_close_to_cpu(one, twin)

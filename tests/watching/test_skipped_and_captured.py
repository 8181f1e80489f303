"""Where the host does not know what the device did: steps that a scaler skips, and replayed CUDA graphs."""

import math

import pytest
import torch

import steradian as st
from steradian import watch
from steradian.watching.records import read_run

from small import groups_of, rows, series, set_gradients, train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SCALED = {
    "not called": lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.01),
    "torch fused": lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.01, fused=True),
    "ours fused": lambda groups: st.optim.Adam(groups, lr=0.05, weight_decay=0.01, without="abc", fused=True),
    "ours reference": lambda groups: st.optim.Adam(groups, lr=0.05, weight_decay=0.01, without="abc", fused=False),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", SCALED)
def test_steps_that_a_scaler_skips_leave_no_record_and_are_not_counted(kind, every, tmp_path):
    params = rows((4, 5), (3, 5), dtype=torch.float32, device=DEVICE)
    optimizer = SCALED[kind](groups_of(params))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=10**6)
    infinite = (0, 3, 4)
    made = []
    with watch(optimizer, every=every, phenomena=False, to=tmp_path / "run", paths={"w": [0]}) as watcher:
        for step in range(8):
            set_gradients(params, len(made))
            slopes = [param.grad.clone() for param in params]
            optimizer.zero_grad()
            loss = sum((g * p).sum() for g, p in zip(slopes, params, strict=True))
            scaler.scale(loss * (math.inf if step in infinite else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step not in infinite:
                made.append(step)
                watcher.log(loss=step)
        assert watcher.next_step == len(made)
    assert watcher.error is None
    found = read_run(tmp_path / "run")

    twins = rows((4, 5), (3, 5), dtype=torch.float32, device=DEVICE)
    twin = SCALED[kind](groups_of(twins))
    with watch(twin, phenomena=False) as expected:
        train(twin, twins, len(made))
    here, there = (series(table, "radius") for table in (found.table, expected.records()))
    if every == 1:
        assert list(here) == list(range(len(made)))
    assert set(here) <= set(there)
    assert len(here)
    for quantity in ("radius", "angle", "effective_lr", "gradient_norm"):
        whole = series(expected.records(), quantity)
        for step, value in series(found.table, quantity).items():
            assert value == pytest.approx(whole[step], rel=1e-4), (quantity, step)
    assert series(found.table, "loss", "", "mean") == {k: float(step) for k, step in enumerate(made)}
    assert found.paths["step"].tolist() == list(here)
    assert not any(alert.kind == "not finite" for alert in watcher.alerts)


CAPTURED = {
    "torch": lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.01, capturable=True),
    "torch fused": lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.01, capturable=True, fused=True),
    "ours": lambda groups: st.optim.Adam(groups, lr=0.05, weight_decay=0.01, without="abc", capturable=True),
}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("kind", CAPTURED)
def test_a_replayed_graph_is_seen_by_around(kind):
    warm, replays = 3, 4
    params = rows((4, 5), (3, 5), dtype=torch.float32, device=DEVICE)
    optimizer = CAPTURED[kind](groups_of(params))
    with watch(optimizer, phenomena=False) as watcher:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            train(optimizer, params, warm)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        slopes = [torch.zeros_like(param) for param in params]
        for param, slope in zip(params, slopes, strict=True):
            param.grad = slope
        with torch.cuda.graph(graph):
            optimizer.step()
        for step in range(warm, warm + replays):
            set_gradients(params, step)
            for param, slope in zip(params, slopes, strict=True):
                slope.copy_(param.grad)
                param.grad = slope
            with watcher.around():
                graph.replay()
    assert watcher.error is None

    twins = rows((4, 5), (3, 5), dtype=torch.float32, device=DEVICE)
    twin = CAPTURED[kind](groups_of(twins))
    with watch(twin, phenomena=False) as expected:
        train(twin, twins, warm + replays)
    for quantity in ("radius", "angle", "effective_lr", "gradient_norm"):
        here, there = series(watcher.records(), quantity), series(expected.records(), quantity)
        assert list(here) == list(range(warm + replays))
        assert here == pytest.approx(there, rel=1e-4), quantity

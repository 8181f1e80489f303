"""What a watch costs without options: which steps it observes, its files, its memory."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import steradian
from steradian import watch
from steradian.watching.records import read_run

from small import series

INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Shrinks(torch.optim.Optimizer):
    """The cheapest step that there is: the watch is nearly all that its steps cost."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["params"][0].mul_(0.9999)


class Idle(Shrinks):
    def step(self, closure=None):
        pass


class Clock:
    """A clock that runs by `tick` whenever someone looks at it, and otherwise only when the training says so."""

    def __init__(self, tick):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """A training of 10 ms a step; the watch seems to cost `clock.tick` for each look at the clock."""
    made = Clock(1e-7)
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(made() * 1e9))
    return made


def small():
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    model.weight.grad = torch.randn(3, 4)
    return model, Shrinks(model.parameters())


def take(optimizer, steps, clock=None):
    for _ in range(steps):
        optimizer.step()
        if clock is not None:
            clock.now += 0.01


def observed(watcher, group="weight"):
    return list(series(watcher.records(), "angle", group, "mean"))


# Which steps


def assert_allowed(steps, total):
    assert steps[:20] == list(range(20))
    late = [step for step in steps if step >= 20]
    assert all(step % 10 == 0 for step in late if step < 1000)
    assert all(step % 50 == 0 for step in late if step >= 1000)
    assert len([step for step in steps if step < 10_000]) <= 400
    assert max(steps) < total


def test_a_watch_that_costs_nothing_observes_as_often_as_it_may(clock):
    model, optimizer = small()
    with watch(optimizer, model) as watcher:
        take(optimizer, 10_000, clock)
    steps = observed(watcher)
    assert_allowed(steps, 10_000)
    assert steps == [*range(20), *range(20, 1000, 10), *range(1000, 10_000, 50)]


@pytest.mark.parametrize("tick", [1e-6, 1e-4, 1e-2, 1.0])
def test_whatever_it_costs_the_steps_are_multiples_of_one_interval_after_another(tick, clock):
    clock.tick = tick
    model, optimizer = small()
    with watch(optimizer, model) as watcher:
        take(optimizer, 10_000, clock)
    assert_allowed(observed(watcher), 10_000)


def test_what_is_dear_is_observed_every_thousandth_time():
    """A weight of 16 MB and steps of microseconds, by the real clock: even once in a thousand steps is too much."""
    model = nn.Linear(2048, 2048, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = Idle(model.parameters())
    with watch(optimizer, model) as watcher:
        take(optimizer, 6000)
    steps = observed(watcher)
    assert_allowed(steps, 6000)
    assert [step for step in steps if step >= 3000] == [3000, 4000, 5000]


def test_the_share_of_the_time_that_it_may_take_is_chosen(clock):
    clock.tick = 1e-4
    counts = {}
    for cost in (1e-7, 0.02, 0.9):
        model, optimizer = small()
        with watch(optimizer, model, cost=cost) as watcher:
            take(optimizer, 6000, clock)
        steps = observed(watcher)
        assert_allowed(steps, 6000)
        counts[cost] = len(steps)
    assert counts[1e-7] <= counts[0.02] <= counts[0.9]
    assert counts[1e-7] < counts[0.9]


def test_with_the_real_clock(tmp_path):
    """Steps of microseconds: to observe is dear here, and becomes rare."""
    model, optimizer = small()
    with watch(optimizer, model, to=tmp_path / "run") as watcher:
        take(optimizer, 10_000)
    steps = observed(watcher)
    assert_allowed(steps, 10_000)
    assert len(steps) < 20 + 98 + 180
    assert list(series(read_run(tmp_path / "run").table, "angle", "weight", "mean")) == steps


@pytest.mark.parametrize("tick", [1e-7, 1.0])
@pytest.mark.parametrize("every", [1, 7])
def test_an_integer_is_kept_to_whatever_it_costs(every, tick, clock):
    clock.tick = tick
    model, optimizer = small()
    with watch(optimizer, model, every=every, cost=1e-6) as watcher:
        take(optimizer, 300, clock)
    assert observed(watcher) == list(range(0, 300, every))


def test_runs_compare_step_by_step(clock):
    """Late steps of a cheap run are those of a dear one, and more."""
    found = []
    for tick in (1e-7, 1e-2):
        clock.tick = tick
        model, optimizer = small()
        with watch(optimizer, model) as watcher:
            take(optimizer, 3000, clock)
        found.append(set(observed(watcher)))
    assert found[1] <= found[0]


def test_phenomena_are_not_measured_unasked():
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Adam([{"params": [("weight", model.weight)], "rows": "filter"}], lr=0.01)
    with watch(optimizer) as watcher:
        for _ in range(5):
            model.weight.grad = torch.randn(3, 4)
            optimizer.step()
    measured = set(watcher.records()["quantity"])
    assert not {"deformation", "gradient_memory", "l2_memory", "radius_ratio"} & measured
    assert "velocity" in measured


# Files


def many(make, rows):
    """200 parameters, half of them matrices, whose gradients are one tensor of noise; rows declared or not."""
    torch.manual_seed(0)
    model = nn.ParameterDict()
    shapes = [(8, 8) if k % 2 == 0 else (8,) for k in range(200)]
    noise, start = torch.zeros(100 * 72), 0
    for k, shape in enumerate(shapes):
        param = nn.Parameter(torch.randn(shape))
        param.grad = noise[start : start + param.numel()].view(shape)
        start += param.numel()
        model[f"layer{k:03d}"] = param
    matrices = [param for param in model.values() if param.ndim == 2]
    vectors = [param for param in model.values() if param.ndim == 1]
    declared = {"rows": "filter"} if rows else {}
    groups = [{"params": matrices, **declared}, {"params": vectors}]
    return model, make(groups, lr=0.001, weight_decay=0.1, fused=True), noise


@pytest.mark.parametrize(
    ("make", "rows"), [(torch.optim.SGD, True), pytest.param(torch.optim.AdamW, False, marks=pytest.mark.slow)]
)
def test_ten_thousand_steps_of_two_hundred_parameters_are_small(make, rows, tmp_path, clock):
    """As often as it may, with gradients that no file can compress; invariant rows have the most quantities."""
    model, optimizer, noise = many(make, rows)
    with watch(optimizer, model, to=tmp_path / "run") as watcher:
        for _ in range(10_000):
            noise.normal_()
            optimizer.step()
            clock.now += 0.01
    size = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert size < 25e6, f"{size / 1e6:.1f} MB"
    table = read_run(tmp_path / "run").table
    assert len(watcher.names) == 200
    assert set(table["group"]) - {""} == set(watcher.names)
    assert 20 <= table["step"].nunique() <= 400


# Memory


def memory(name):
    """Kilobytes, from /proc/self/status."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


@pytest.mark.parametrize("steps", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_steps(steps, tmp_path, clock):
    """A day of a fast training; what was observed is in the run's files."""
    model, optimizer = small()
    with watch(optimizer, model, to=tmp_path / "run") as watcher:
        take(optimizer, 10_000, clock)
        watcher.flush()
        gc.collect()
        blocks, resident = sys.getallocatedblocks(), memory("VmRSS")
        take(optimizer, steps, clock)
        watcher.flush()
        gc.collect()
        blocks, resident = sys.getallocatedblocks() - blocks, memory("VmRSS") - resident
    assert blocks < 3000 + steps / 100, "objects of Python's"
    assert resident < 10_000 + steps / 100, "kB"


MEASURE = """
import gc
import json
from pathlib import Path

import torch

from steradian import watch

torch.set_num_threads(1)
COUNT, ROWS, COLUMNS = 3, 2048, 1024
KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
}


def memory(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def peak(optimizer):
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    optimizer.step()
    return memory("VmHWM") - before


def measure(kind):
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(COUNT)])
    for param in model:
        param.grad = torch.randn(ROWS, COLUMNS)
    optimizer = KINDS[kind](model.parameters())
    found = {}
    for _ in range(8):  # the first steps of RAdam need less
        optimizer.step()
    gc.collect()
    for name, every in {"unwatched": None, "observed": 1, "not observed": 10**6}.items():
        watcher = None if every is None else watch(optimizer, model, every=every, step=0).start()
        for _ in range(2):
            optimizer.step()
        found[name] = sorted(peak(optimizer) for _ in range(3))[1]
        found[name + ", between steps"] = memory("VmRSS")
        if watcher is not None:
            watcher.stop()
            steps = set(watcher.records()["step"])
            assert steps == (set(range(5)) if every == 1 else {0}), steps
            assert len(watcher.names) == COUNT
    return found


print(json.dumps({kind: measure(kind) for kind in KINDS}))
"""


def test_memory_of_a_step():
    """At most 1.1 × the largest parameter above an unwatched step where the state tells the point before it.

    Two points need one copy, at most 1.1 × all weights, and in observed steps alone. Three parameters of 8 MB each, in
    a process of its own that gives freed tensors back to the system at once.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc/self/clear_refs")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = str(Path(steradian.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    bounds = {"AdamW": 8, "AdamW, fused": 8, "SGD": 8, "RAdam": 24, "Adadelta": 24}
    for kind, found in json.loads(done.stdout).items():
        assert found["observed"] - found["unwatched"] <= 1.1 * bounds[kind] + 0.5, (kind, found)
        assert found["observed, between steps"] - found["unwatched, between steps"] <= 12, (kind, found)
        assert found["not observed"] - found["unwatched"] <= 0.5, (kind, found)


def test_steps_that_are_not_observed_take_no_time_of_the_weights():
    """Reading 64 MB takes milliseconds; a step that is not observed adds less than one."""
    model = nn.Linear(4096, 4096, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = Idle(model.parameters())
    taken = []
    with watch(optimizer, model, every=1000) as watcher:
        for _ in range(200):
            started = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - started)
    assert observed(watcher) == [0]
    assert sorted(taken[1:])[100] < 1e-3
    assert sorted(taken[1:])[100] < taken[0] / 10

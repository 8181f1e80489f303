"""Time of one optimizer step, ours against the alternatives, side by side in one run.

    python benchmarks/step.py [--sets ResNet18 ...]

On a GPU: eager and as a CUDA graph, milliseconds, bytes of traffic per parameter and share of the measured copy
bandwidth; Angular's "muon" also over `torch.optim.Muon`; other packages on ResNet18 alone. On a CPU: ResNet18's
convolutions, in turns, beside torch's Adam of the same dtype, loop and fused; and the memory that a step of a 64 MB
parameter takes beyond weights, gradients and state. Prints tables and writes results/bench-step-DEVICE.json. `adamp`
and `geoopt` are measured where they are installed.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from steradian.optim import Adam, Angular

from harness import Table, write
from shapes import SETS

LOOP, FUSED = "torch.optim.Adam", "torch.optim.Adam(fused=True)"
OPTIONS = {"lr": 1e-3, "weight_decay": 1e-4}
# What one step has to move: gradient, x and m (and v) read, x and m (and v) written.
TRAFFIC = {"one number per row": 20, "momentum": 20, "element-wise": 28, "matrices": 20}


def ours(params: list[torch.nn.Parameter], **more: object) -> torch.optim.Optimizer:
    return Adam([{"params": params, "rows": "filter"}], without="abc", **OPTIONS, **more)


def angular(params: list[torch.nn.Parameter], **more: object) -> torch.optim.Optimizer:
    return Angular([{"params": params, "rows": "filter"}], **more)


def of_matrices(
    make: Callable[..., torch.optim.Optimizer], params: list[torch.nn.Parameter], **more: object
) -> torch.optim.Optimizer:
    """On the same numbers as matrices, which is all that `torch.optim.Muon` takes."""
    flat = []
    for p in params:
        assert p.grad is not None
        flat.append(torch.nn.Parameter(p.detach().flatten(1)))
        flat[-1].grad = p.grad.flatten(1)
    return make(flat, **more)


def riemannian(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import geoopt

    sphere = geoopt.Sphere()
    rows = []
    for p in params:
        assert p.grad is not None
        row = geoopt.ManifoldParameter(p.detach().flatten(1).clone(), manifold=sphere)
        row.grad = p.grad.flatten(1).clone()
        with torch.no_grad():
            row.proj_()
        rows.append(row)
    return geoopt.optim.RiemannianAdam(rows, lr=1e-3)


def adamp(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from adamp import AdamP

    return AdamP(params, **OPTIONS)


def torch_adam(params: list[torch.nn.Parameter], **more: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, **OPTIONS, **more)


def methods() -> dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, object], str, bool]]:
    """Name → constructor, options, traffic, and whether its step can be captured."""
    options: dict[str, object] = {"fused": True, "capturable": True}
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4)
    return {
        "torch.optim.Adam, fused": (torch_adam, options, "element-wise", True),
        "torch.optim.SGD, momentum, fused": (sgd, {"fused": True}, "momentum", True),
        'Adam, without="abc", fused': (ours, options, "one number per row", True),
        "Angular, fused": (angular, options, "one number per row", True),
        "torch.optim.Muon": (partial(of_matrices, torch.optim.Muon), {"nesterov": False}, "matrices", False),
        "Angular, muon, fused": (partial(of_matrices, angular), {"direction": "muon", **options}, "matrices", True),
        "torch.optim.Adam, foreach": (torch_adam, {"foreach": True, "capturable": True}, "element-wise", True),
        "adamp.AdamP": (adamp, {}, "element-wise", False),
        "geoopt RiemannianAdam": (riemannian, {}, "one number per row", False),
    }


def make(shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        p = torch.nn.Parameter((torch.randn(shape, device=device, generator=generator) * 0.05).to(dtype))
        p.grad = (torch.randn(shape, device=device, generator=generator) * 1e-3).to(dtype)
        params.append(p)
    return params


def events_ms(work: Callable[[], object], *, repeats: int, batch: int) -> float:
    """Median milliseconds on the device of a call, over batches between two events: three at least, for 0.5 s."""
    for _ in range(3):
        work()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < repeats and time.perf_counter() - began < 0.5):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(batch):
            work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / batch)
    return statistics.median(times)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (events_ms(lambda: target.copy_(source), repeats=10, batch=5) / 1e3)


def on_gpu(names: list[str]) -> None:
    bandwidth = copy_bandwidth()
    table = Table(
        "set", "method", "eager ms", "eager / fused Adam", "graph ms", "graph / fused Adam", "bytes", "share of copy"
    )
    for name in names:
        base, muon = (float("nan"), float("nan")), float("nan")
        for method, (build, options, traffic, capture) in methods().items():
            torch.cuda.empty_cache()
            params = make(SETS[name], "cuda")
            size = sum(p.numel() for p in params)
            # The other packages take up to a second for a step of the large ones.
            if size > 2e7 and method.startswith(("adamp", "geoopt")):
                continue
            try:
                optimizer = build(params, **options)
                # Those that cannot be captured take tens of milliseconds, so a few of their steps tell.
                batch = 20 if capture and size < 5e8 else 2
                eager = events_ms(optimizer.step, repeats=15 if capture else 7, batch=batch)
                replay = events_ms(captured(optimizer.step), repeats=15, batch=batch) if capture else float("nan")
            except ImportError:
                continue
            if method.endswith("Adam, fused"):
                base = (eager, replay)
            if method == "torch.optim.Muon":
                muon = eager
            if method.startswith("Angular, muon"):
                print(
                    f"{name}: {method} / torch.optim.Muon: eager {eager / muon:.3f}, graph {replay / muon:.3f}",
                    flush=True,
                )
            moved = TRAFFIC[traffic]
            share = moved * size / (min(eager, replay if capture else eager) / 1e3) / bandwidth
            table.add(name, method, eager, eager / base[0], replay, replay / base[1], moved, share)
            del optimizer, params
        write("bench-step-gpu", table, copy_bandwidth=bandwidth)


def cpu_methods() -> dict[str, tuple[torch.dtype, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]]:
    """Name → dtype of the parameters and constructor."""
    single, half = torch.float32, torch.bfloat16
    made: dict[str, tuple[torch.dtype, Callable[..., torch.optim.Optimizer]]] = {
        LOOP: (single, torch_adam),
        FUSED: (single, lambda params: torch_adam(params, fused=True)),
        f"{LOOP}, bf16": (half, torch_adam),
        f"{FUSED}, bf16": (half, lambda params: torch_adam(params, fused=True)),
    }
    for letters in ("a", "b", "c", "ab", "ac", "bc", "abc"):
        made[f'Adam, without="{letters}"'] = (single, partial(adam, letters))
    for letters in ("b", "abc"):
        made[f'Adam, without="{letters}", bf16'] = (half, partial(adam, letters))
        made[f'Adam, without="{letters}", joint with biases'] = (single, partial(adam, letters, joint=True))
        made[f'Adam, without="{letters}", rows ("axis", 1)'] = (single, partial(adam, letters, rows=("axis", 1)))
    for direction in ("gradient", "adam"):
        made[f"Angular, {direction}"] = (single, partial(angular, direction=direction))
    made["adamp.AdamP"] = (single, adamp)
    made["geoopt RiemannianAdam"] = (single, riemannian)
    return made


def adam(
    letters: str, params: list[torch.nn.Parameter], rows: object = "filter", *, joint: bool = False
) -> torch.optim.Optimizer:
    if not joint:
        return Adam([{"params": params, "rows": rows}], without=letters, **OPTIONS)
    groups = []
    for p in params:
        bias = torch.nn.Parameter(torch.randn(len(p)))
        bias.grad = torch.randn(len(p)) * 1e-3
        groups.append({"params": [p, bias], "rows": rows, "joint": True})
    return Adam(groups, without=letters, **OPTIONS)


def on_cpu(rounds: int = 15) -> None:
    """Every method takes one step in each round, so that a busy moment of the machine falls on all of them.

    Each has a process of its own, as in a training: how long memory takes to get depends on what else was allocated.
    """
    context = multiprocessing.get_context("spawn")
    pipes, dtypes, times = {}, {}, {}
    for method, (dtype, _) in cpu_methods().items():
        pipes[method], other = context.Pipe()
        context.Process(target=take_steps, args=(method, other), daemon=True).start()
        other.close()
        dtypes[method], times[method] = dtype, []
    there = [method for method, pipe in pipes.items() if pipe.recv()]
    for k in range(rounds + 2):
        for method in there:
            pipes[method].send(None)
            taken = pipes[method].recv()
            if k >= 2:
                times[method].append(taken)
    ms = {method: statistics.median(times[method]) for method in there}
    table = Table("set", "method", "ms", "× Adam", "× fused Adam", "dtype")
    for method in there:
        suffix = ", bf16" if dtypes[method] == torch.bfloat16 else ""
        ratios = ms[method] / ms[LOOP + suffix], ms[method] / ms[FUSED + suffix]
        table.add("ResNet18", method, ms[method], *ratios, str(dtypes[method]).removeprefix("torch."))
    write("bench-step-cpu", table, temporaries=temporaries())


def take_steps(method: str, pipe: Connection) -> None:
    """Take a step whenever asked, and tell its milliseconds; first, whether the method is installed."""
    dtype, build = cpu_methods()[method]
    try:
        step = build(make(SETS["ResNet18"], "cpu", dtype)).step
    except ImportError:
        pipe.send(False)
        return
    pipe.send(True)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        started = time.perf_counter()
        step()
        pipe.send(1e3 * (time.perf_counter() - started))


def temporaries() -> list[dict[str, object]]:
    """Megabytes that a step of a bf16 parameter of 64 MB takes beyond what stays, each in its own process."""
    found: list[dict[str, object]] = []
    for method in (f"{LOOP}, bf16", 'Adam, without="abc", bf16', 'Adam, without="b", bf16'):
        call = [sys.executable, __file__, "--temporaries", method]
        told = subprocess.run(call, capture_output=True, text=True, check=True).stdout
        found.append({"method": method, "megabytes": float(told)})
        print(f"temporaries of a step of 64 MB, {method}: {float(told):.0f} MB")
    return found


def temporaries_of(method: str) -> float:
    [param] = make([(8192, 4096)], "cpu", torch.bfloat16)
    optimizer = cpu_methods()[method][1]([param])
    optimizer.step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    optimizer.step()
    return (memory("VmHWM") - before) / 1024


def memory(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--temporaries", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.temporaries:
        print(temporaries_of(given.temporaries))
    elif torch.cuda.is_available():
        on_gpu(given.sets)
    else:
        on_cpu()

"""Time of one optimizer step, ours against the alternatives, side by side in one run.

    python benchmarks/step.py [--sets ResNet18 ...]

On a GPU: eager and as a CUDA graph, milliseconds, bytes of traffic per parameter and share of the measured copy
bandwidth. On a CPU: ResNet18's shapes, the default implementations. Prints a table and writes
results/bench-step-DEVICE.json. `adamp` and `geoopt` are measured where they are installed.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from steradian.optim import Adam

from harness import Table, median_ms, write
from shapes import SETS

OPTIONS = {"lr": 1e-3, "weight_decay": 1e-4}
# What one step has to move: gradient, x and m (and v) read, x and m (and v) written.
TRAFFIC = {"one number per row": 20, "element-wise": 28}


def ours(params: list[torch.nn.Parameter], **more: object) -> torch.optim.Optimizer:
    return Adam([{"params": params, "rows": "filter"}], without="abc", **OPTIONS, **more)


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


def methods(cuda: bool) -> dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, object], str, bool]]:
    """Name → constructor, options, traffic, and whether its step can be captured."""
    if not cuda:
        return {
            "torch.optim.Adam": (torch_adam, {}, "element-wise", False),
            'Adam, without="abc"': (ours, {}, "one number per row", False),
            "adamp.AdamP": (adamp, {}, "element-wise", False),
            "geoopt RiemannianAdam": (riemannian, {}, "one number per row", False),
        }
    return {
        "torch.optim.Adam, fused": (torch_adam, {"fused": True, "capturable": True}, "element-wise", True),
        'Adam, without="abc", fused': (ours, {"fused": True, "capturable": True}, "one number per row", True),
        "torch.optim.Adam, foreach": (torch_adam, {"foreach": True, "capturable": True}, "element-wise", True),
        "adamp.AdamP": (adamp, {}, "element-wise", False),
        "geoopt RiemannianAdam": (riemannian, {}, "one number per row", False),
    }


def make(shapes: list[tuple[int, ...]], device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device=device, generator=generator) * 0.05)
        p.grad = torch.randn(shape, device=device, generator=generator) * 1e-3
        params.append(p)
    return params


def events_ms(work: Callable[[], object], *, repeats: int, batch: int) -> float:
    """Median milliseconds on the device of a call, over batches between two events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
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
        base = (float("nan"), float("nan"))
        for method, (build, options, traffic, capture) in methods(cuda=True).items():
            torch.cuda.empty_cache()
            params = make(SETS[name], "cuda")
            size = sum(p.numel() for p in params)
            if size > 5e8 and not capture:
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
            moved = TRAFFIC[traffic]
            share = moved * size / (min(eager, replay if capture else eager) / 1e3) / bandwidth
            table.add(name, method, eager, eager / base[0], replay, replay / base[1], moved, share)
            del optimizer, params
    write("bench-step-gpu", table, copy_bandwidth=bandwidth)


def on_cpu() -> None:
    table = Table("set", "method", "ms", "× torch.optim.Adam")
    base = None
    for method, (build, options, _, _) in methods(cuda=False).items():
        params = make(SETS["ResNet18"], "cpu")
        ms = median_ms(build(params, **options).step)
        base = base or ms
        table.add("ResNet18", method, ms, ms / base)
    write("bench-step-cpu", table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    chosen = parser.parse_args().sets
    on_gpu(chosen) if torch.cuda.is_available() else on_cpu()

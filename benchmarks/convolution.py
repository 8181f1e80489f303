"""The convolutions of the lab against cuDNN's, and the choice of their plans.

    python benchmarks/convolution.py [--tune]

Microseconds of one 3 × 3 convolution of ResNet20 at batch 128: ours, which also adds up what BN needs, and cuDNN's;
forward, gradient to the input and to the weight. With --tune several plans are tried, and the best are printed and
measured. Writes results/bench-convolution.json.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from steradian.lab.kernels import convolution
from steradian.lab.kernels.convolution import _Corner, _Strip, _Tile

from harness import Table, write

Plan = _Tile | _Strip | _Corner
SHAPES = {16: 32, 32: 16, 64: 8}
KINDS = ("forward", "input gradient", "weight gradient")
TABLES = dict(zip(KINDS, ("_FORWARD", "_INPUT_GRADIENT", "_WEIGHT_GRADIENT"), strict=True))


def arguments(channels: int, batch: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    size, last = SHAPES[channels], torch.channels_last
    weight = torch.randn(channels, channels, 3, 3, device="cuda").div(12)
    made = {"weight": weight.to(memory_format=last)}
    for name in ("x", "dy"):
        image = torch.randn(batch, channels, size, size, device="cuda", dtype=torch.bfloat16)
        made[name] = image.to(memory_format=last)
    return made


def ours(kind: str, t: dict[str, Tensor]) -> Callable[[], object]:
    if kind == "forward":
        return lambda: convolution.convolve(t["x"], t["weight"])[1]
    if kind == "input gradient":
        return lambda: convolution._input_gradient(t["dy"], t["weight"], t["x"], 1)
    plan = convolution._WEIGHT_GRADIENT[1][t["dy"].shape[1]]
    parts, _ = plan.grid(len(t["x"]), *t["x"].shape[2:])
    return lambda: convolution._weight_gradient(t["x"], t["dy"], 1, parts).sum(dim=0)


def cudnn(kind: str, t: dict[str, Tensor]) -> Callable[[], object]:
    weight = t["weight"].bfloat16()
    if kind == "forward":
        return lambda: torch.nn.functional.conv2d(t["x"], weight, padding=1)
    wanted = [kind == "input gradient", kind == "weight gradient", False]
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)
    return lambda: torch.ops.aten.convolution_backward(t["dy"], t["x"], weight, None, *rest)


STRIPS = {
    16: "128 8 4 1, 128 8 4 2, 128 8 4 3, 128 16 4 3, 128 4 4 3, 64 8 4 3, 64 16 4 2, 256 8 8 2",
    32: "64 8 4 1, 64 8 4 2, 64 16 4 2, 64 4 4 2, 128 8 8 2, 128 4 4 2",
    64: "64 4 4 1, 64 8 4 1",
}
TILES = {16: "128 4, 256 4", 32: "256 1 8, 128 2", 64: "128 1, 64 1"}
CORNERS = {
    16: "64 32 4 4 4 1, 64 32 4 4 4 2, 128 16 4 4 4 1, 128 16 4 4 4 2, 64 16 4 4 4 2, 128 16 4 4 8 2, 64 64 4 4 4 3",
    32: "64 16 4 4 8 1, 64 16 4 4 8 2, 64 8 4 4 8 2, 64 16 4 4 4 1, 64 16 4 1 4 2, 32 32 4 4 8 2",
    64: "64 16 1 1 4 3, 64 8 1 1 4 3, 64 16 4 1 8 2, 64 8 4 1 8 1, 32 16 4 1 8 2",
}


def plans(kind: str, channels: int) -> Iterator[Plan]:
    """What is tried with stride 1."""
    texts = {_Corner: CORNERS} if kind == "weight gradient" else {_Strip: STRIPS, _Tile: TILES}
    for make, choices in texts.items():
        for choice in choices[channels].split(", "):
            yield make(*map(int, choice.split()))


def compile_some(work: list[tuple[str, int, Plan]], batch: int) -> None:
    """Launch once, so that the kernels are in Triton's cache."""
    made = {channels: arguments(channels, batch) for channels in SHAPES}
    for kind, channels, plan in work:
        getattr(convolution, TABLES[kind])[1][channels] = plan
        try:
            ours(kind, made[channels])()
            torch.cuda.synchronize()
        except triton.runtime.errors.OutOfResources:
            continue


def tune(batch: int, workers: int) -> None:
    work = [(kind, channels, plan) for kind in KINDS for channels in SHAPES for plan in plans(kind, channels)]
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=compile_some, args=(work[k::workers], batch)) for k in range(workers)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    for kind, channels in itertools.product(KINDS, SHAPES):
        made, found = arguments(channels, batch), []
        for plan in plans(kind, channels):
            getattr(convolution, TABLES[kind])[1][channels] = plan
            try:
                found.append((microseconds(ours(kind, made)), plan))
            except triton.runtime.errors.OutOfResources:
                continue
        found.sort()
        getattr(convolution, TABLES[kind])[1][channels] = found[0][1]
        for time, plan in found[:5]:
            print(f"{kind} {channels}: {time:.2f} µs {plan}", flush=True)


def microseconds(work: Callable[[], object]) -> float:
    return 1e3 * float(triton.testing.do_bench_cudagraph(work, rep=10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("cuDNN and our kernels are compared on a GPU, and there is none")
    torch.backends.cudnn.benchmark = True
    if options.tune:
        tune(options.batch, options.workers)
    table = Table("channels", "size", "kind", "ours µs", "cuDNN µs", "ours / cuDNN")
    for channels, size in SHAPES.items():
        made = arguments(channels, options.batch)
        for kind in KINDS:
            times = [microseconds(way(kind, made)) for way in (ours, cudnn)]
            table.add(channels, size, kind, *times, times[0] / times[1])
    write("bench-convolution", table, batch=options.batch)


if __name__ == "__main__":
    main()

"""The convolutions of the lab against cuDNN's, and the choice of their plans.

    python benchmarks/convolution.py [--members 5] [--tune | --wide]

Microseconds per member of one 3 × 3 convolution of ResNet20 at batch 128: ours, which adds up what BN needs as well,
and cuDNN's grouped one; forward, gradient to the input and to the weight. With --tune several plans are tried, and the
best are printed and measured. Writes results/bench-convolution.json.

With --wide those of ResNet18, one network alone, on a Hopper GPU: ours, with the share of the chip that it takes, and
cuDNN's. Where several trainings share the chip, the product of both is what counts. Writes
results/bench-convolution-wide.json.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from steradian.lab import convolution, hopper, wide
from steradian.lab.convolution import _Corner, _Strip, _Tile

from harness import Table, write

Plan = _Tile | _Strip | _Corner
SHAPES = {16: 32, 32: 16, 64: 8}
WIDE_SHAPES = {64: 32, 128: 16, 256: 8, 512: 4}
KINDS = ("forward", "input gradient", "weight gradient")
TABLES = dict(zip(KINDS, ("_FORWARD", "_INPUT_GRADIENT", "_WEIGHT_GRADIENT"), strict=True))


def arguments(channels: int, members: int, batch: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    size, like = SHAPES[channels], {"device": "cuda", "dtype": torch.bfloat16}

    def image(images: int, total: int) -> Tensor:
        return torch.randn(images, total, size, size, **like).to(memory_format=torch.channels_last)

    weight = torch.randn(members * channels, channels, 3, 3, device="cuda").div(12)
    made = {"weight": weight.to(memory_format=torch.channels_last)}
    for name in ("x", "dy"):
        made[name] = image(members * batch, channels)
        made[f"{name} side by side"] = image(batch, members * channels)
    return made


def ours(kind: str, t: dict[str, Tensor], members: int) -> Callable[[], object]:
    if kind == "forward":
        return lambda: convolution.convolve(t["x"], t["weight"], members=members).sums
    if kind == "input gradient":
        return lambda: convolution._input_gradient(t["dy"], t["weight"], t["x"], members, 1)
    plan = convolution._weight_gradient_plan(1, t["x"].shape[1], t["dy"].shape[1])
    parts = plan.parts(len(t["x"]) // members, *t["x"].shape[2:])
    return lambda: convolution._weight_gradient(t["x"], t["dy"], members, 1, parts).sum(dim=0)


def cudnn(kind: str, t: dict[str, Tensor], members: int) -> Callable[[], object]:
    weight = t["weight"].bfloat16()
    if kind == "forward":
        return lambda: torch.nn.functional.conv2d(t["x side by side"], weight, padding=1, groups=members)
    wanted = [kind == "input gradient", kind == "weight gradient", False]
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], members, wanted)
    return lambda: torch.ops.aten.convolution_backward(t["dy side by side"], t["x side by side"], weight, None, *rest)


STRIPS = {
    16: "128 8 4 1, 128 8 4 2, 128 8 4 3, 128 16 4 3, 128 4 4 3, 64 8 4 3, 64 16 4 2, 256 8 8 2",
    32: "64 8 4 1, 64 8 4 2, 64 16 4 2, 64 4 4 2, 128 8 8 2, 128 4 4 2",
    64: "64 4 4 1, 64 8 4 1",
}
TILES = {16: "128 4 1, 256 4 1", 32: "256 1 1 8, 128 2 1", 64: "128 1 1, 64 1 1"}
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


def compile_some(work: list[tuple[str, int, Plan]], members: int, batch: int) -> None:
    """Launch once, so that the kernels are in Triton's cache."""
    made = {channels: arguments(channels, members, batch) for channels in SHAPES}
    for kind, channels, plan in work:
        getattr(convolution, TABLES[kind])[1][channels] = plan
        try:
            ours(kind, made[channels], members)()
            torch.cuda.synchronize()
        except triton.runtime.errors.OutOfResources:
            continue


def tune(members: int, batch: int, workers: int) -> None:
    work = [(kind, channels, plan) for kind in KINDS for channels in SHAPES for plan in plans(kind, channels)]
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=compile_some, args=(work[k::workers], members, batch)) for k in range(workers)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    for kind, channels in itertools.product(KINDS, SHAPES):
        made, found = arguments(channels, members, batch), []
        for plan in plans(kind, channels):
            getattr(convolution, TABLES[kind])[1][channels] = plan
            try:
                found.append((microseconds(ours(kind, made, members)) / members, plan))
            except triton.runtime.errors.OutOfResources:
                continue
        found.sort()
        getattr(convolution, TABLES[kind])[1][channels] = found[0][1]
        for time, plan in found[:5]:
            print(f"{kind} {channels}: {time:.2f} µs {plan}", flush=True)


def wide_table(batch: int) -> Table:
    heads = ("ours µs", "programs", "ours µs × share of the chip", "cuDNN µs")
    table = Table("channels", "size", "kind", *heads)
    chip = torch.cuda.get_device_properties().multi_processor_count
    for channels, size in WIDE_SHAPES.items():
        SHAPES[channels] = size
        made = arguments(channels, 1, batch)
        x, dy, taps = made["x"], made["dy"], made["weight"].bfloat16()
        for kind in KINDS:
            work, programs = wide_work(kind, x, dy, taps)
            mine = microseconds(work)
            share = min(1.0, programs / chip) * mine
            table.add(channels, size, kind, mine, programs, share, microseconds(cudnn(kind, made, 1)))
    return table


def wide_work(kind: str, x: Tensor, dy: Tensor, taps: Tensor) -> tuple[Callable[[], object], int]:
    """Our way and its programs."""
    blocks = len(taps) // 64
    if kind == "weight gradient":
        parts = hopper.weight_gradient_parts(x, len(taps))
        return lambda: hopper.weight_gradient(x, dy, parts).sum(dim=0), parts * blocks**2
    parts = hopper.convolution_parts(x, len(taps))
    programs = parts // 2 if blocks == 1 else parts * blocks // 2
    if kind == "forward":
        return lambda: hopper.forward(x, taps, parts)[1].sum(dim=0), programs
    return lambda: hopper.input_gradient(dy, taps, parts), programs


def microseconds(work: Callable[[], object]) -> float:
    return 1e3 * float(triton.testing.do_bench_cudagraph(work, rep=10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--wide", action="store_true", help="those of ResNet18, on a Hopper GPU")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("cuDNN and our kernels are compared on a GPU, and there is none")
    torch.backends.cudnn.benchmark = True
    if options.wide:
        if not wide.works(torch.device("cuda")):
            parser.error("our convolutions with many channels are for Hopper GPUs")
        write("bench-convolution-wide", wide_table(options.batch), batch=options.batch)
        return
    if options.tune:
        tune(options.members, options.batch, options.workers)
    table = Table("channels", "size", "kind", "ours µs", "cuDNN µs", "ours / cuDNN")
    for channels, size in SHAPES.items():
        made = arguments(channels, options.members, options.batch)
        for kind in KINDS:
            times = [microseconds(way(kind, made, options.members)) / options.members for way in (ours, cudnn)]
            table.add(channels, size, kind, *times, times[0] / times[1])
    write("bench-convolution", table, members=options.members, batch=options.batch)


if __name__ == "__main__":
    main()

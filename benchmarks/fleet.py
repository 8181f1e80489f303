"""Milliseconds per training and step of a fleet, against a plain eager loop with a DataLoader in the same run.

    python benchmarks/fleet.py [--models ResNet20 ...] [--sizes 1 8 32] [--data FOLDER] [--seconds 200]

A fleet of N is N trainings in flight. Methods take turns: Adam, AdamW†, w/o (a), (ab), (abc), SGD-M. Both sides train
with bf16 autocast, channels last, batch 128, crops and flips; the evaluation is not measured. Without --data the images
are random.
--check compares the weights of trainings in a fleet with those of the same trainings alone.
Prints a table and writes results/bench-fleet.json (on a CPU bench-fleet-cpu.json), again after every measurement; none
is begun after --seconds.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from steradian.lab.config import Config
from steradian.lab.data import DataSet, Images, Resident, load
from steradian.lab.fleet import prepare_device
from steradian.lab.models import build
from steradian.lab.registry import NETWORKS
from steradian.lab.training import Execution, Training

from harness import Table, write

METHODS = ["Adam", "AdamW†", "Adam w/o (a)", "Adam w/o (ab)", "Adam w/o (abc)", "SGD-M"]
SIZES = {"ResNet20": [1, 8, 14, 20], "ResNet18": [1, 4, 8], "VGG16": [1, 4, 8]}
BURST, AHEAD = 10, 2


class Augmented(Dataset):
    """What a plain loop does for each image, on the host: crop, flip, normalize."""

    def __init__(self, images: Images) -> None:
        self.pixels = np.pad(images.pixels, ((0, 0), (4, 4), (4, 4), (0, 0)))
        self.labels, self.size = images.labels, images.size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        down, right, mirrored = torch.randint(9, (3,)).tolist()
        cut = self.pixels[index, down : down + self.size, right : right + self.size]
        cut = cut[:, ::-1] if mirrored % 2 else cut
        image = torch.from_numpy(np.ascontiguousarray(cut)).permute(2, 0, 1).float()
        return (image - 120.0) / 64.0, int(self.labels[index])


def batches(data: DataSet, args: argparse.Namespace) -> Iterator[list[torch.Tensor]]:
    """Batches of a DataLoader without end, for all networks.

    Ask for the first before CUDA is used: a worker forked later dies as soon as it frees one of its parent's tensors.
    """
    loader = DataLoader(
        Augmented(data.train),
        args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=args.device.type == "cuda",
        persistent_workers=args.workers > 0,
        multiprocessing_context="fork" if args.workers else None,
    )
    while True:
        yield from loader


def plain_loop(name: str, endless: Iterator[list[torch.Tensor]], args: argparse.Namespace) -> float:
    """Milliseconds per step of the usual way, with torch.optim.Adam as it is by default."""
    device = args.device
    torch.manual_seed(0)
    model = build(name, width=args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for step in range(args.eager_steps + 10):
        if step == 10:
            wait(device)
            began = time.perf_counter()
        images, labels = next(endless)
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
    wait(device)
    return 1e3 * (time.perf_counter() - began) / args.eager_steps


def execution(args: argparse.Namespace) -> Execution:
    return Execution(
        compiled=args.compile,
        captured=None if args.capture else False,
        joined=None if args.joined else False,
    )


def make_fleet(name: str, data: Resident, first: int, count: int, args: argparse.Namespace) -> list[Training]:
    """Trainings that are captured and have taken their first steps."""
    made = []
    for seed in range(first, first + count):
        method = args.methods[seed % len(args.methods)]
        rate = {"SGD-M": 0.1, "AdamG†": 0.01}.get(method, 1e-3)
        config = Config(model=name, data="cifar10", method=method, lr=rate, weight_decay=1e-4, width=args.width)
        config = replace(config, batch_size=args.batch, precision=args.precision, seed=seed)
        training = Training(config, data, execution=execution(args))
        training.take(2)
        made.append(training)
    wait(data.device)
    return made


def measure(fleet: list[Training], steps: int, *, warm: int | None = None) -> float:
    """Milliseconds per training and step, all in flight."""
    device = fleet[0].data.device

    def go(count: int) -> None:
        left = {id(training): count for training in fleet}
        while any(left.values()):
            for training in fleet:
                if not left[id(training)] or training.queue.pending() >= AHEAD:
                    continue
                burst = min(BURST, left[id(training)])
                if training.left < burst:
                    training.begin_epoch()  # once more, without an evaluation
                training.take(burst)
                left[id(training)] -= burst
        wait(device)

    go(steps // 4 if warm is None else warm)
    began = time.perf_counter()
    go(steps)
    return 1e3 * (time.perf_counter() - began) / (steps * len(fleet))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_images() -> DataSet:
    random = np.random.default_rng(0)

    def some(count: int) -> Images:
        return Images(random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, count))

    return DataSet("cifar10", some(50_000), some(10_000), [str(k) for k in range(10)])


def check(name: str, data: Resident, args: argparse.Namespace) -> None:
    """Fleet against single, float32, 50 steps: largest difference of any weight, for every method."""
    args.precision = "float32"
    prepare_device(args.device, exact=True)
    args.methods = [*METHODS, "AdamG†", "Adam w/o (ab)"]
    table = Table("network", "method", "seed", "fleet of 8 − alone", "replayed − plain, 5 steps")
    fleet = make_fleet(name, data, 0, 8, args)
    measure(fleet, 40, warm=10 - (fleet[0].steps - fleet[0].left))
    for training in fleet:
        config = training.config

        def alone(config: Config, count: int, how: Execution) -> dict[str, torch.Tensor]:
            other = Training(config, data, execution=how)
            for _ in range(count):
                other.take(1)
            wait(args.device)
            return other.weights()

        same = Execution(compiled=args.compile)
        plainly = replace(same, captured=False, compiled=False)
        far = difference(training.weights(), alone(config, 50, same))
        few = difference(alone(config, 5, same), alone(config, 5, plainly))
        table.add(name, config.method, config.seed, far, few)
    write("fleet-check", table, steps=50, compiled=args.compile)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[key] - other[key]).abs().max()) for key in one)


def profile(training: Training) -> None:
    """The kernels of one step that is not replayed, by their time on the device."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if training.data.device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(3):
            training.take_plainly()
        wait(training.data.device)
    order = "cuda_time_total" if len(kinds) > 1 else "cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--sizes", nargs="+", type=int, help="trainings in flight; by default depends on the network")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eager-steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=8, help="of the plain loop's DataLoader")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10, packed or as archives")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-capture", dest="capture", action="store_false")
    parser.add_argument("--tried", type=int, help="ways of cuDNN that are timed for each convolution; 0: all")
    parser.add_argument("--no-joined", dest="joined", action="store_false", help="cuDNN's convolutions alone")
    parser.add_argument("--no-eager", dest="eager", action="store_false", help="leave the plain loop out")
    parser.add_argument("--option", nargs="*", default=[], help="settings of torch._inductor.config, NAME=1")
    parser.add_argument("--check", action="store_true", help="compare weights instead: results/fleet-check.json")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--name", help="of the file in results/: bench-fleet, on a CPU bench-fleet-cpu")
    args = parser.parse_args()
    args.name = args.name or f"bench-fleet{'-cpu' if args.device.type == 'cpu' else ''}"
    if args.device.type == "cpu":
        args.compile = False
    began = time.perf_counter()
    images = load("cifar10", args.data) if args.data else random_images()
    if args.eager and not args.check:
        endless = batches(images, args)
        next(endless)
    prepare_device(args.device, exact=args.precision == "float32")
    if args.tried is not None:
        torch.backends.cudnn.benchmark_limit = args.tried
    for option in args.option:
        import torch._inductor.config as inductor

        key, value = option.split("=")
        setattr(inductor, key, type(getattr(inductor, key))(int(value)))
    data = Resident(images, args.device)
    if args.check:
        for name in args.models:
            check(name, data, args)
        return
    facts = {"batch": args.batch, "precision": args.precision, "steps": args.steps, "options": args.option}
    facts |= {
        "compiled": args.compile,
        "joined": args.joined,
        "tried": args.tried,
        "captured": args.capture,
    }
    table = Table("network", "way", "in flight", "ms per run and step", "× plain loop", "setup s")
    for name in args.models:
        plain = float("nan")
        if args.eager:
            plain = plain_loop(name, endless, args)
            table.add(name, "plain eager loop, DataLoader", 1, plain, 1.0, 0.0)
        fleet: list[Training] = []
        for size in sorted(set(args.sizes or SIZES[name])):
            if time.perf_counter() - began > args.seconds:
                print(f"time is over: {name} with {size} in flight is left out")
                break
            started = time.perf_counter()
            fleet += make_fleet(name, data, len(fleet), size - len(fleet), args)
            setup = time.perf_counter() - started
            per_step = measure(fleet, args.steps)
            table.add(name, "fleet", size, per_step, plain / per_step, setup)
            write(args.name, table, **facts)
        if args.profile and fleet:
            profile(fleet[0])
        del fleet
        if args.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

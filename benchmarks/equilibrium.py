"""How well `st.equilibrium` predicts the angles of a training under a schedule, layer by layer.

    python benchmarks/equilibrium.py
    python benchmarks/equilibrium.py --train --data data/cifar10 --device cuda

The first command takes two minutes on a CPU and writes results/bench-equilibrium.json:

- A small network with BN is trained on noisy labels under a cosine. Its slopes ‖∇L(u)‖ are recorded.
- The study's ResNet20 with SGD-M, 100 epochs with a rate that falls in steps (results/hypotheses-cifar10).
  It has no gradients, so the slope is derived from the recorded velocity z = η^e‖c^⊥‖ and effective rate. c^⊥ is the
  momentum on the sphere, whose norm is γ/√(1−β²) if gradients are uncorrelated. The error is then that of r² alone.

The second one trains a ResNet20 on CIFAR-10 with SGD-M under a cosine, by default 135 epochs at full width, watches it,
and writes results/bench-equilibrium-resnet20.json. With `--run FOLDER` the run is recorded there, or read if it is
there already.

From the radii at the start and the slopes, the angles of all steps are predicted and compared with the recorded medians
of the rows, in the median over the last 80 % of the training, without its last 2 % under a cosine, which ends at 0. A
prediction is a root mean square over steps, so it is also compared with that of the recorded angles ("in the mean").
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import steradian as st
from steradian.groups import Groups
from steradian.lab.data import Resident, load
from steradian.lab.models import build
from steradian.watching.records import read_run

from harness import RESULTS, Table, write

MEMORY = 50  # steps over which slopes are averaged
Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "SGD-M": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.2),
    "Adam, L2": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=2e-3),
}
COLUMNS = ("training", "layer", "median angle", "error %", "in the mean", "of the radius", "without slopes")


def small(name: str, table: Table, steps: int = 2000) -> None:
    """A small network on noisy labels, so that gradients do not vanish."""
    torch.manual_seed(0)
    model, images, labels = network(), torch.randn(256, 3, 8, 8), torch.randint(10, (256,))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(steps):
            chosen = torch.randint(256, (32,))
            yield images[chosen], torch.where(torch.rand(32) < 0.5, torch.randint(10, (32,)), labels[chosen])

    groups = st.find_groups(model, images[:16])
    records, rates = train(model, groups, MAKE[name], batches(), steps, every=1)
    compare(f"small network, {name}", MAKE[name](groups.param_groups()), groups, records, rates, table, end=0.98)


def resnet20(given: argparse.Namespace, table: Table) -> dict[str, object]:
    """ResNet20 on CIFAR-10 with SGD-M under a cosine."""
    torch.manual_seed(0)
    data = Resident(load("cifar10", given.data), given.device)
    model = build("ResNet20", norm="bn", width=given.width).to(given.device)
    per_epoch = data.counts["train"] // given.batch
    steps = given.epochs * per_epoch
    every = max(steps // 5000, 1)

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=given.lr, momentum=0.9, weight_decay=given.weight_decay)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        started = time.perf_counter()
        for epoch in range(given.epochs):
            for k, codes in enumerate(torch.from_numpy(data.plan(0, epoch, given.batch)).to(given.device)):
                yield data.batch(codes)
                if k % 500 == 0:
                    print(f"epoch {epoch}, step {k} of {per_epoch}, {time.perf_counter() - started:.0f} s", flush=True)

    groups = st.find_groups(model, data.batch(torch.arange(8, device=given.device) * data.views)[0])
    records, rates = train(model, groups, make, batches(), steps, every=every, to=given.run)
    compare("ResNet20, SGD-M", make(groups.param_groups()), groups, records, rates, table, end=0.98)
    return {
        **{k: v for k, v in vars(given).items() if k not in ("data", "run")},
        "steps": steps,
        "observed every": every,
    }


def study(table: Table) -> None:
    """The study's recorded ResNet20 with SGD-M."""
    runs = json.loads((RESULTS / "hypotheses-cifar10.json").read_text())["runs"]
    [run] = [run for run in runs if run["config"]["method"] == "SGD-M"]
    config = run["config"]
    records = pd.read_parquet(RESULTS / "hypotheses-cifar10-tracks.parquet")
    records = records[records.run.str.endswith(run["key"].rpartition("-")[2])]
    records = records[records.statistic == "median"].pivot(index=["group", "step"], columns="quantity", values="value")
    slope = records.velocity / records.effective_lr * (1 - config["momentum"] ** 2) ** 0.5
    records = records.assign(angle=np.arctan(records.velocity), gradient_norm=slope / records.radius)
    steps = 1 + records.index.get_level_values("step").max()
    per_epoch = steps // config["epochs"]
    passed = [sum(k >= m * per_epoch for m in config["milestones"]) for k in range(steps)]
    rates = [config["lr"] * config["gamma"] ** n for n in passed]
    model = build(config["model"], norm=config["norm"])
    groups = st.find_groups(model, torch.randn(4, 3, 32, 32))
    optimizer = torch.optim.SGD(
        groups.param_groups(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )
    compare("recorded ResNet20, SGD-M", optimizer, groups, records, rates, table, end=1.0)


def train(
    model: nn.Module,
    groups: Groups,
    make: Make,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    *,
    every: int,
    to: str | None = None,
) -> tuple[pd.DataFrame, list[float]]:
    """Train under a cosine; the recorded medians by group and step, and the rate of each step."""
    optimizer = make(groups.param_groups())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    peak = optimizer.param_groups[0]["lr"]
    if to is not None and Path(to, "run.json").exists():
        records = read_run(to).table.astype({"group": str, "quantity": str, "statistic": str})
    else:
        with st.watch(optimizer, groups, every=every, to=to) as watch:
            for images, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                schedule.step()
        records = watch.records()
    records = records[records.statistic == "median"]
    rates = [peak * (1 + math.cos(math.pi * k / steps)) / 2 for k in range(steps)]
    return records.pivot(index=["group", "step"], columns="quantity", values="value"), rates


def compare(
    training: str,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    records: pd.DataFrame,
    rates: Sequence[float],
    table: Table,
    *,
    end: float,
) -> None:
    """Add the error of each layer's predicted angle to the table, and of its radius, both with and without slopes."""
    layers = {group.names[0]: records.loc[group.names[0]] for group in groups.groups}
    start = {name: float(layer.radius.iloc[0]) for name, layer in layers.items()}
    slopes = {}
    for name, layer in layers.items():
        means = mean(layer.radius * layer.gradient_norm, len(rates))
        slopes[name] = np.interp(np.arange(len(rates)), means.index, means)
    known = st.equilibrium(optimizer, groups, rates=rates, slopes=slopes, radius=start)
    blind = st.equilibrium(optimizer, groups, rates=rates, radius=start)
    for with_slopes, without in zip(known, blind, strict=True):
        layer = layers[with_slopes.name]
        means = mean(layer.angle, len(rates))
        layer = layer[(layer.index >= len(rates) / 5) & (layer.index < end * len(rates))]

        def error(predicted: Any, measured: pd.Series) -> float:
            return float(100 * (predicted.numpy()[measured.index.to_numpy()] / measured - 1).abs().median())

        errors = (
            error(with_slopes.angle, layer.angle),
            error(with_slopes.angle, means[layer.index]),
            error(with_slopes.radius, layer.radius),
            error(without.angle, layer.angle),
        )
        table.add(training, with_slopes.name, float(layer.angle.median()), *errors)


def mean(values: pd.Series, steps: int) -> pd.Series:
    """The root mean square of what was recorded in the last `MEMORY` steps."""
    recorded = max(MEMORY // max(steps // len(values), 1), 1)
    return (values**2).rolling(recorded, min_periods=1).mean() ** 0.5


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train a ResNet20 on CIFAR-10")
    parser.add_argument("--data", help="folder of CIFAR-10, packed or the original archive")
    parser.add_argument("--run", help="folder to record the training in, or to read it from if it is there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=135)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    given, table = parser.parse_args(), Table(*COLUMNS)
    if given.train:
        write("bench-equilibrium-resnet20", table, **resnet20(given, table))
    else:
        for name in MAKE:
            small(name, table)
        study(table)
        write("bench-equilibrium", table)

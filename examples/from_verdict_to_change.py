"""From a verdict to a change: a fault that no loss shows, what the watch says of it, and what a change gains.

    python examples/from_verdict_to_change.py
    python examples/from_verdict_to_change.py --factor 1      # without the fault

The last two convolutions start 20 times too long, as after an initialization that was meant for other layers. BN
divides the length away, so that the network computes the same. But filters that are 20 times as long turn 400 times
less in the first step. The verdict of the first training names these layers, and how far they are behind the median
layer at the end. Then the advice is followed in three ways, each over several seeds. Needs the extra "lab".
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import steradian as st
from steradian.lab.data import digits

LONG = ("6.weight", "9.weight")  # the last two of four convolutions
TRAIN, TEST = digits()


def network(seed: int, factor: float) -> nn.Sequential:
    """Four convolutions with BN, of which the last two start too long."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, filters, stride in ((1, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [nn.Conv2d(inputs, filters, 3, stride, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    scale(model, factor)
    return model


@torch.no_grad()
def scale(model: nn.Module, factor: float) -> None:
    """Multiply the two weights."""
    for name in LONG:
        model.get_parameter(name).mul_(factor)


def sgd(params: Iterable[Any]) -> Optimizer:
    """The optimizer of the first training."""
    return SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4)


def fit(model: nn.Module, optimizer: Optimizer, epochs: int) -> float:
    """Train with a cosine; returns the test accuracy in percent."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(TRAIN.images) // 64))
    for _ in range(epochs):
        for batch in torch.randperm(len(TRAIN.images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(TRAIN.images[batch]), TRAIN.labels[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(TEST.images).argmax(1) == TEST.labels).float().mean().item()


def as_it_is(model: nn.Module, factor: float) -> Optimizer:
    """No change."""
    return sgd(model.parameters())


def own_rate(model: nn.Module, factor: float) -> Optimizer:
    """A param group with a higher rate for the two layers: the verdict says by which factors they are too slow."""
    slow = [model.get_parameter(name) for name in LONG]
    others = [param for param in model.parameters() if not any(param is each for each in slow)]
    return sgd([{"params": others}, {"params": slow, "lr": 0.1 * factor}])


def shorter(model: nn.Module, factor: float) -> Optimizer:
    """The weights divided: the network computes the same, since `find_groups` proves that only directions count."""
    assert set(LONG) <= set(st.find_groups(model, TRAIN.images[:8]).layouts)
    scale(model, 1 / factor)
    return sgd(model.parameters())


def angular(model: nn.Module, factor: float) -> Optimizer:
    """The angle set, to half of that of SGD's first steps without the fault: lengths at the start no longer matter."""
    groups = st.find_groups(model, TRAIN.images[:8])
    return st.optim.Angular(groups.param_groups(), lr=0.02, rest_lr=0.1, weight_decay=5e-4)


CHANGES: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "as it is": as_it_is,
    "a rate of their own for the two layers": own_rate,
    "the two weights divided": shorter,
    "Angular at 0.02 rad": angular,
}


def main() -> None:
    """Train, read the verdict, and compare the changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--factor", type=float, default=20.0, help="by which the two weights are too long")
    parser.add_argument("--out", type=Path, default=Path("runs/verdict"))
    args = parser.parse_args()
    model = network(0, args.factor)
    optimizer = as_it_is(model, args.factor)
    with st.watch(optimizer, model, to=args.out, every=1) as watch:
        fit(model, optimizer, args.epochs)
    for sentence in watch.verdict():
        print(f"- {sentence.text}")
    print(f"\n{'':40s}test accuracy over {args.seeds} seeds")
    for name, change in CHANGES.items():
        found = []
        for seed in range(args.seeds):
            model = network(seed, args.factor)
            found.append(fit(model, change(model, args.factor), args.epochs))
        spread = f" ± {stdev(found):.1f}" if len(found) > 1 else ""
        print(f"{name:40s}{mean(found):.1f}{spread} %")


if __name__ == "__main__":
    main()

"""What find_groups costs, as a multiple of one training step of the same model on the same batch.

Prints a table and writes results/discovery.json. One training step is forward, backward and SGD in the model's
own float32; the probes run in float64, which a CPU computes several times slower.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from steradian.discovery import find_groups

import harness
from models import resnet18


def mlp() -> nn.Module:
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(128), enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18 8x3x32x32": (resnet18, (8, 3, 32, 32)),
    "mlp bn 64x256": (mlp, (64, 256)),
    "pre-norm transformer 8x32x128": (transformer, (8, 32, 128)),
}


def step_seconds(model: nn.Module, inputs: Tensor, *, repeats: int = 7) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    table = harness.Table(
        "model", "forward passes", "backward passes", "seconds", "one step (s)", "steps it costs", "rows"
    )
    for name, (build, shape) in MODELS.items():
        torch.manual_seed(0)
        model, inputs = build(), torch.randn(shape)
        step = step_seconds(model, inputs)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            groups = find_groups(model, inputs)
            times.append(time.perf_counter() - started)
        seconds, rows = statistics.median(times), sum(group.n_rows for group in groups.groups)
        table.add(name, *groups.passes, seconds, step, seconds / step, rows)
    harness.write("discovery", table)


if __name__ == "__main__":
    main()

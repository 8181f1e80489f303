"""What find_groups costs: its time in training steps of the same model on the same batch, its memory in passes.

Prints a table and writes results/discovery.json. One training step is forward, backward and SGD in the model's
own float32; the probes run in float64, which a CPU computes several times slower. Memory is the peak of a process
above what it has when the model is made, beside that of one forward and backward pass of a float64 copy.
"""

import copy
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from steradian.discovery import find_groups

import harness
from models import resnet18, vit


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
    "vit, 8 blocks of 512, 4x3x224x224": (partial(vit, 512, 8, 8), (4, 3, 224, 224)),
    "vit-b/16 4x3x224x224": (vit, (4, 3, 224, 224)),
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


def peak(name: str, what: str) -> float:
    """Megabytes that find_groups or one pass of a float64 copy adds, beside the model, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, name, what], check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure_peak(name: str, what: str) -> None:
    """The same in this process, printed."""
    build, shape = MODELS[name]
    model, inputs = build(), torch.randn(shape)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    if what == "find_groups":
        find_groups(model, inputs)
    else:
        copy.deepcopy(model).double()(inputs.double()).square().mean().backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6)


def main() -> None:
    table = harness.Table(
        "model",
        "forward passes",
        "backward passes",
        "seconds",
        "one step (s)",
        "steps it costs",
        "rows",
        "peak (MB)",
        "float64 pass (MB)",
        "peak / pass",
    )
    for name, (build, shape) in MODELS.items():
        memory = peak(name, "find_groups"), peak(name, "pass")
        torch.manual_seed(0)
        model, inputs = build(), torch.randn(shape)
        step = step_seconds(model, inputs)
        times = []
        for _ in range(1 if step > 1 else 3):
            started = time.perf_counter()
            groups = find_groups(model, inputs)
            times.append(time.perf_counter() - started)
        seconds, rows = statistics.median(times), sum(group.n_rows for group in groups.groups)
        table.add(name, *groups.passes, seconds, step, seconds / step, rows, *memory, memory[0] / memory[1])
    harness.write("discovery", table)


if __name__ == "__main__":
    measure_peak(*sys.argv[1:]) if len(sys.argv) > 1 else main()

"""What find_groups costs: its time in training steps of the same model on the same batch, its memory in passes.

    python benchmarks/discovery.py            # results/discovery.json
    python benchmarks/discovery.py --memory   # results/discovery-memory.json, Linux only
    python benchmarks/discovery.py --gpu      # results/discovery-gpu.json

One training step is forward, backward and SGD in the model's own float32; the probes run in float64, which a CPU
computes several times slower. Memory is the peak of a process above what it has when the model is made, compared with
that of one forward and backward pass of a float64 copy of the model. On a GPU a Qwen3 of half a billion parameters is
searched, on 2 × 64 tokens.
"""

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
}
LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18 32x3x32x32": (resnet18, (32, 3, 32, 32)),
    "vit, 8 blocks of 512, 4x3x224x224": (partial(vit, 512, 8, 8), (4, 3, 224, 224)),
    "vit-b/16 4x3x224x224": (vit, (4, 3, 224, 224)),
}
"""Models whose weights and activations are larger than what libraries load with their first use."""


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


def megabytes(field: str) -> float:
    """Memory of this process: "VmRSS" now, "VmHWM" at its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024 / 1e6


def print_peak(name: str, what: str) -> None:
    """Print what find_groups or one float64 pass adds to the memory of this process."""
    build, shape = LARGE[name]
    model, inputs = build(), torch.randn(shape)
    before = megabytes("VmRSS")
    if what == "find_groups":
        find_groups(model, inputs)
    else:
        copy.deepcopy(model).double()(inputs.double()).square().mean().backward()
    print(megabytes("VmHWM") - before)


def measure_memory() -> None:
    table = harness.Table("model", "find_groups (MB)", "float64 pass (MB)", "find_groups / pass")
    for name in LARGE:
        peaks = []
        for what in ("find_groups", "pass"):  # each in a process of its own
            done = subprocess.run([sys.executable, __file__, name, what], check=True, capture_output=True, text=True)
            peaks.append(float(done.stdout))
        table.add(name, *peaks, peaks[0] / peaks[1])
    harness.write("discovery-memory", table)


def on_gpu() -> None:
    from watch import qwen3

    torch.manual_seed(0)
    model, _ = qwen3()
    ids = torch.randint(model.config.vocab_size, (2, 64), device="cuda")
    size = sum(param.numel() for param in model.parameters())
    table = harness.Table(
        "model", "parameters", "seconds", "forward passes", "backward passes", "groups", "pairs", "GB"
    )
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        groups = find_groups(model, input_ids=ids)
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() / 1e9
        table.add("Qwen3 0.5 B 2x64", size, seconds, *groups.passes, len(groups.groups), len(groups.pairs), peak)
    torch.cuda.reset_peak_memory_stats()
    copy.deepcopy(model).double()(input_ids=ids).logits.square().mean().backward()
    harness.write("discovery-gpu", table, gigabytes_of_a_float64_pass=torch.cuda.max_memory_allocated() / 1e9)


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
    match sys.argv[1:]:
        case ["--memory"]:
            measure_memory()
        case ["--gpu"]:
            on_gpu()
        case [name, what]:
            print_peak(name, what)
        case _:
            main()

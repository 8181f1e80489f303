"""Optimizers on whole models, as their users have them: weights that discovery proves on spheres, and all others.

    python benchmarks/model.py [--models ResNet50 ...]

On a GPU, for ResNet50 at 64 images of 224 × 224, a Qwen3 and an OLMo2 of half a billion parameters at 8 × 512 tokens:
the time of a step of the weights on spheres alone, of `optimizer.step()`, and of a whole training step (forward and
backward in bfloat16, eager) under our Adam and Angular, and under torch's fused AdamW, fused SGD with momentum, and
Muon with AdamW for what is no matrix; and the bytes of state per parameter. Prints a table and writes
results/bench-model.json.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import steradian
from watch import qwen3, tokens

from harness import Table, write

Optimizers = list[torch.optim.Optimizer]
Model = tuple[nn.Module, Callable[[], Tensor], tuple[object, ...], dict[str, Tensor]]
FUSED = "torch.optim.AdamW, fused"


def resnet50() -> Model:
    """The model, its loss, and what `find_groups` calls it with."""
    import timm

    model = timm.create_model("resnet50").to("cuda", memory_format=torch.channels_last)
    x = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(1000, (64,), device="cuda")
    return model, lambda: functional.cross_entropy(model(x), y), (x[:4],), {}


def language(made: tuple[nn.Module, Callable[[nn.Module], Tensor]]) -> Model:
    model, loss = made
    ids = torch.randint(model.config.vocab_size, (2, 64), device="cuda")
    return model, lambda: loss(model), (), {"input_ids": ids}


def olmo2() -> Model:
    shape = {"vocab_size": 100352, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22}
    return language(tokens("Olmo2", 8, 512, num_attention_heads=16, num_key_value_heads=16, **shape))


MODELS: dict[str, Callable[[], Model]] = {
    "ResNet50": resnet50,
    "Qwen3 0.5 B": lambda: language(qwen3(8, 512)),
    "OLMo2 0.5 B": olmo2,
}


def optimizers(params: list[nn.Parameter], rows: list[dict[str, Any]]) -> dict[str, Callable[[], Optimizers]]:
    """Name → constructor; the `rows` are param groups of our optimizers with the same parameters."""
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]

    def ours(make: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[[], Optimizers]:
        return lambda: [make([dict(group) for group in rows], lr=1e-4, **options)]

    def muon() -> Optimizers:
        adamw = [torch.optim.AdamW(others, lr=1e-4, fused=True)] if others else []
        return [torch.optim.Muon(matrices, lr=1e-3), *adamw]

    made: dict[str, Callable[[], Optimizers]] = {
        FUSED: lambda: [torch.optim.AdamW(params, lr=1e-4, fused=True)],
        "torch.optim.SGD, momentum, fused": lambda: [torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)],
        'Adam, without="abc"': ours(steradian.optim.Adam, without="abc"),
        "Angular": ours(steradian.optim.Angular, rest="adamw", rest_lr=1e-4),
    }
    if all(p.ndim <= 2 for p in params):  # torch's Muon takes matrices alone
        made["torch.optim.Muon and AdamW"] = muon
        made['Angular, direction="muon"'] = ours(steradian.optim.Angular, direction="muon", rest="adamw", rest_lr=1e-4)
    return made


def state_bytes(each: Iterable[torch.optim.Optimizer]) -> int:
    states = [state for optimizer in each for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def measure(loss: Callable[[], Tensor] | None, each: Optimizers, *, steps: int = 12) -> tuple[float, float]:
    """Median milliseconds of the optimizers' step and, with a loss, of a whole training step."""
    taken, whole = [], []
    for k in range(steps + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if loss is not None:
            for optimizer in each:
                optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                value = loss()
            value.backward()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for optimizer in each:
            optimizer.step()
        last.record()
        torch.cuda.synchronize()
        if k >= 3:
            taken.append(first.elapsed_time(last))
            whole.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken), statistics.median(whole)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    times = ("on spheres ms", "on spheres / AdamW", "step ms", "step / AdamW", "training ms", "training / AdamW")
    table = Table("model", "share on spheres", "optimizer", *times, "state bytes per parameter")
    for name in parser.parse_args().models:
        torch.manual_seed(0)
        model, loss, inputs, named = MODELS[name]()
        groups = steradian.find_groups(model, *inputs, **named)
        size = sum(p.numel() for p in model.parameters())
        share = sum(group.n_rows * group.size for group in groups.groups) / size
        of_all = groups.param_groups()
        spheres = [group for group in of_all if group.get("rows") is not None]
        alone = optimizers([p for group in spheres for p in group["params"]], spheres)
        base: list[float] = []
        for method, make in optimizers(list(model.parameters()), of_all).items():
            each = make()
            found = [*measure(loss, each)]
            state = state_bytes(each) / size
            del each
            found = [measure(None, alone[method]())[0] if method in alone else math.nan, *found]
            base = base or found  # fused AdamW is the first
            pairs = [number for one, other in zip(found, base, strict=True) for number in (one, one / other)]
            table.add(name, share, method, *pairs, state)
            torch.cuda.empty_cache()
        write("bench-model", table)
        del model, loss, groups, of_all, spheres, alone


if __name__ == "__main__":
    main()

"""What a watch costs: trainings under AdamW, watched as a user gets it by default, against the same unwatched.

    python benchmarks/watch.py [--cases Llama] [--blocks 20] [--name bench-watch-cpu]

On a CPU a narrow ResNet18 and a small Llama; on a GPU ResNet18, eager and captured in a CUDA graph, and a Qwen3 of half
a billion parameters, with `fused=True`; by default and with every=1. All weights are watched, and the run is written to
a folder. A watched training and two unwatched ones take turns, block by block in rotating order, so that a slow phase
of the host affects all of them. A block is as long as the interval of the watch, so that each has its observed step.

"ratio" is the median over all blocks of watched over unwatched time, "control" that of the second unwatched training
over the first: how far a ratio that should be 1 is from 1. "cost" is their difference. "of totals" includes the flushes
and every disturbance of the host. "peak" is the memory that a watched step takes above an unwatched one, relative to
the largest parameter. Prints a table and writes results/bench-watch-DEVICE.json.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import steradian

from harness import Table, write
from models import resnet18

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Loss = Callable[[], Tensor]


def images(width: int, batch: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A ResNet18 and its loss on random images."""
    model = resnet18(width=width).to(DEVICE, memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=DEVICE)
    return model, lambda net: functional.cross_entropy(net(x), y)


def tokens(kind: str, batch: int, length: int, **shape: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A language model from its config, and its loss on random tokens."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(tie_word_embeddings=True, use_cache=False, **shape)
    with DEVICE:
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    ids = torch.randint(config.vocab_size, (batch, length), device=DEVICE)
    return model, lambda net: net(input_ids=ids, labels=ids).loss


def small_llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return tokens("Llama", 4, 64, vocab_size=1024, hidden_size=192, intermediate_size=512, **heads)


def qwen3(batch: int = 8, length: int = 1024) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    shape = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    return tokens("Qwen3", batch, length, num_attention_heads=14, num_key_value_heads=2, head_dim=64, **shape)


@dataclass(frozen=True)
class Case:
    """A model, whether its step is captured, and how often it is observed."""

    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]
    every: int | None = None
    captured: bool = False


ON_CPU = {"narrow ResNet18": Case(lambda: images(16, 32)), "small Llama": Case(small_llama)}
ON_GPU = {
    "ResNet18, captured": Case(lambda: images(64, 128), captured=True),
    "ResNet18, captured, every=1": Case(lambda: images(64, 128), every=1, captured=True),
    "ResNet18, eager": Case(lambda: images(64, 128)),
    "ResNet18, eager, every=1": Case(lambda: images(64, 128), every=1),
    "Qwen3 0.5 B": Case(qwen3),
    "Qwen3 0.5 B, every=1": Case(qwen3, every=1),
}


class Training:
    """A training whose steps can be timed, watched or not, eager or captured."""

    def __init__(self, case: Case, *, watched: bool) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model, self.loss = case.make()
        options = {"fused": True, "capturable": case.captured} if CUDA else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **options)
        self.watch = None
        if watched:
            self.watch = steradian.watch(self.optimizer, self.model, to=tempfile.mkdtemp(), every=case.every).start()
        self.graph = self._capture() if case.captured else None

    def backward(self) -> None:
        """Forward and backward; a graph needs gradients that stay where they are."""
        self.optimizer.zero_grad(set_to_none=not self.case.captured)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = self.loss(self.model)
        loss.backward()

    def step(self) -> None:
        """One step of the training."""
        if self.graph is None:
            self.backward()
            self.optimizer.step()
        elif self.watch is None:
            self.graph.replay()
        else:
            with self.watch.around():
                self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.backward()
                self.optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.backward()
            self.optimizer.step()
        return graph

    def run(self, steps: int) -> float:
        """Milliseconds per step."""
        wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait()
        return 1e3 * (time.perf_counter() - started) / steps

    def peak(self, steps: int) -> float:
        """The most bytes that `optimizer.step()` takes above what was there before, on a GPU."""
        if not CUDA or self.graph is not None:
            return float("nan")
        most = 0
        for _ in range(steps):
            self.backward()
            wait()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.optimizer.step()
            most = max(most, torch.cuda.max_memory_allocated() - before)
        return most


def wait() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def measure(case: Case, blocks: int) -> list[float]:
    """The numbers of a line of the table."""
    plain, watched, again = Training(case, watched=False), Training(case, watched=True), Training(case, watched=False)
    each = (plain, watched, again)
    assert watched.watch is not None
    largest = max(param.numel() * param.element_size() for param in watched.model.parameters())
    for training in each:
        training.run(2)  # makes the state
    peaks = watched.peak(25) - plain.peak(25)  # all of the first 20 steps are observed, and flushed
    for training in each:
        training.run(25)
    length = 3 * case.every if case.every else min(100, max(10, watched.watch.interval))
    gc.collect()
    turns = []
    for turn in range(blocks):
        # None of them runs twice in a row, which would make it faster.
        order = each[turn % 3 :] + each[: turn % 3]
        took = {id(training): training.run(length) for training in order}
        turns.append([took[id(training)] for training in each])
    memory = watched.watch.about()["cost"]["bytes"] / 2**20
    watched.watch.stop()
    if watched.watch.error is not None:
        raise watched.watch.error
    unwatched = statistics.median((first + second) / 2 for first, _, second in turns)
    ratio = statistics.median(2 * took / (first + second) for first, took, second in turns)
    control = statistics.median(second / first for first, _, second in turns)
    first, all_watched, second = (sum(times) for times in zip(*turns, strict=True))
    totals = 2 * all_watched / (first + second)
    return [length, unwatched, ratio, control, ratio - control, totals, memory, peaks / largest]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=[], help="parts of names in the table")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--name", default=f"bench-watch-{'gpu' if CUDA else 'cpu'}", help="of the file in results/")
    options = parser.parse_args()
    heads = ("block", "unwatched ms", "ratio", "control", "cost", "of totals", "watch MiB", "peak")
    table = Table("training", *heads)
    for name, case in (ON_GPU if CUDA else ON_CPU).items():
        if not options.cases or any(part in name for part in options.cases):
            table.add(name, *measure(case, options.blocks))
            write(options.name, table, blocks=options.blocks, optimizer="torch.optim.AdamW")


if __name__ == "__main__":
    main()

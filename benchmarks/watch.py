"""The cost of watching: a training step of ResNet18 at batch 128, watched against unwatched, in one run.

    python benchmarks/watch.py [--steps 1000] [--batch 128] [--only without --name bench-watch-gpu-ours]

Our Adam without (abc) observed at every step, torch's fused Adam at every tenth and at every one; eager and, on a GPU,
captured in a CUDA graph. A watched training and two unwatched ones take many short turns, each from an observed step to
the next, in rotating order, so that a slow phase of the host affects all of them. The ratio is the median over all
rounds of a watched turn against the mean of the two unwatched turns of its round. The ratio of totals includes the
flushes, one in 256 steps, and every disturbance of the host. What a watch does once, such as imports, is done before.
The second unwatched training against the first is the control: how far a ratio that should be 1 is from 1. Prints a
table and writes results/bench-watch-DEVICE.json. --only measures the optimizers whose name contains a text.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

import steradian
from steradian.groups import Group, Groups

from harness import Table, write
from models import resnet18

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Make = Callable[[Groups], torch.optim.Optimizer]
CUDA = DEVICE.type == "cuda"


def ours(groups: Groups) -> torch.optim.Optimizer:
    params = groups.param_groups()
    return steradian.optim.Adam(params, lr=1e-3, weight_decay=1e-4, without="abc", capturable=CUDA)


def fused_adam(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups.param_groups(), lr=1e-3, weight_decay=1e-4, fused=True, capturable=CUDA)


CASES: dict[str, tuple[Make, int]] = {
    'Adam, without="abc", every=1': (ours, 1),
    "torch.optim.Adam, fused, every=10": (fused_adam, 10),
    "torch.optim.Adam, fused, every=1": (fused_adam, 1),
}


class Training:
    """A training whose step can be timed, watched or not, eager or captured."""

    def __init__(self, make: Make, layouts: Groups, batch: int, *, every: int | None, captured: bool) -> None:
        torch.manual_seed(0)
        self.captured = captured
        self.model = resnet18().to(DEVICE, memory_format=torch.channels_last)
        params = dict(self.model.named_parameters())
        self.groups = Groups(params, layouts.groups)
        self.optimizer = make(self.groups)
        self.images = torch.randn(batch, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,), device=DEVICE)
        self.watch = None
        if every is not None:
            folder = tempfile.mkdtemp()
            self.watch = steradian.watch(self.optimizer, self.groups, every=every, to=folder, phenomena=False).start()
        for _ in range(3):
            self.eager_step()
        self.graph = self._capture() if captured else None

    def eager_step(self) -> None:
        """Forward, backward, step."""
        self.optimizer.zero_grad(set_to_none=not self.captured)  # a graph needs gradients that stay where they are
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.eager_step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager_step()
        return graph

    def run(self, steps: int) -> float:
        """Milliseconds per step."""
        if CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            if self.graph is None:
                self.eager_step()
            elif self.watch is None:
                self.graph.replay()
            else:
                with self.watch.around():
                    self.graph.replay()
        if CUDA:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started) / steps

    def flush(self) -> None:
        """Flush the watch, so that everything that it does once is done."""
        if self.watch is not None:
            self.watch.flush()

    def stop(self) -> None:
        """Stop the watch; raise its error if it failed."""
        if self.watch is not None:
            self.watch.stop()
            if self.watch.error is not None:
                raise self.watch.error


@contextmanager
def memory() -> Iterator[Callable[[], float]]:
    """MiB taken on the device since the block began."""
    before = torch.cuda.memory_allocated() if CUDA else 0
    yield lambda: ((torch.cuda.memory_allocated() if CUDA else 0) - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000 if CUDA else 20, help="of each of both")
    parser.add_argument("--batch", type=int, default=128 if CUDA else 16)
    parser.add_argument("--only", default="", help="a part of an optimizer's name in the table")
    parser.add_argument(
        "--name", default=f"bench-watch-{'gpu' if CUDA else DEVICE.type}", help="of the file in results/"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Every convolution is followed by BN, which is what find_groups proves of this network.
    weights = [(name, p) for name, p in resnet18().named_parameters() if p.ndim == 4]
    layouts = Groups({}, [Group((name,), "filter", len(p), p[0].numel(), "BN", 0.0) for name, p in weights])
    heads = ("unwatched ms", "watched ms", "ratio", "ratio of totals", "control", "watch MiB")
    table = Table("optimizer", "step", *heads)
    for name, (make, every) in ((name, case) for name, case in CASES.items() if options.only in name):
        for captured in (False, True) if CUDA else (False,):
            plain = Training(make, layouts, options.batch, every=None, captured=captured)
            with memory() as taken:
                watched = Training(make, layouts, options.batch, every=every, captured=captured)
                both = taken()
            with memory() as taken:
                again = Training(make, layouts, options.batch, every=None, captured=captured)
                alone = taken()
            each, length = (plain, watched, again), max(4, every)
            for training in each:
                training.run(length)
                training.flush()
            gc.collect()
            turns = []
            for turn in range(max(2, options.steps // length)):
                # None of them runs twice in a row, which would make it faster.
                order = each[turn % 3 :] + each[: turn % 3]
                took = {id(training): training.run(length) for training in order}
                turns.append([took[id(training)] for training in each])
            watched.stop()
            before = statistics.median((first + second) / 2 for first, _, second in turns)
            after = statistics.median(took for _, took, _ in turns)
            ratio = statistics.median(2 * took / (first + second) for first, took, second in turns)
            control = statistics.median(second / first for first, _, second in turns)
            first, all_watched, second = (sum(times) for times in zip(*turns, strict=True))
            ratios = (ratio, 2 * all_watched / (first + second), control)
            table.add(name, "captured" if captured else "eager", before, after, *ratios, both - alone)
            del plain, watched, again, each, training
            facts = {"batch": options.batch, "steps": options.steps}
            write(options.name, table, **facts)


if __name__ == "__main__":
    main()

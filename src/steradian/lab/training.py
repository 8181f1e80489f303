"""One training: network, optimizers, batches, curves, and its whole state as plain tensors.

Nothing in a step is read back or decided by the host, so a step can be captured: the batch is found by a counter on
the device, the rate is a tensor there, and loss and hits are added up there until the epoch ends. On a CPU the same
code runs as a plain loop.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian import geometry
from steradian.discovery import find_groups
from steradian.groups import Groups, Layout
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.launch import Captured, Launcher, Plain, Queue
from steradian.lab.methods import optimizers, set_rates
from steradian.lab.models import build

__all__ = ["CURVES", "Execution", "Training"]

PARTS = ("train", "validation", "test")
CURVES = tuple(f"{part}_{what}" for part in PARTS for what in ("loss", "accuracy"))
"""One number per epoch: mean loss and accuracy in percent. Training's are over its augmented batches."""


@dataclass(frozen=True)
class Execution:
    """How trainings are carried out; their results depend on it by rounding alone.

    Attributes:
        captured: replay the step as a CUDA graph; None: on a GPU.
        compiled: compile the network with torch.compile.
        fused: take the fused optimizer steps; None: on a GPU.
        together: steps in one launch of a graph.
        chunk: images that are evaluated at once.
        channels_last: keep weights and images with channels last in memory; None: on a GPU.
    """

    captured: bool | None = None
    compiled: bool = False
    fused: bool | None = None
    together: int = 1
    chunk: int = 500
    channels_last: bool | None = None

    def on(self, device: torch.device) -> "Execution":
        """With everything that depends on the device decided."""
        gpu = device.type == "cuda"
        if self.captured and not gpu:
            raise ValueError("captured must be None or False on a CPU, got True")
        choose = {name: gpu for name in ("captured", "fused", "channels_last") if getattr(self, name) is None}
        return replace(self, **choose)


class Training:
    """A training that can be taken step by step, stopped, saved and continued.

    Args:
        config: what to train.
        data: its data, on the device to train on.
        execution: how.
        weights: parameters and buffers to start from, by name; None: a fresh network.

    Attributes:
        epoch: epochs that are finished.
        curves: by name in `CURVES`, one number for each of them.
    """

    def __init__(
        self,
        config: Config,
        data: Resident,
        *,
        execution: Execution | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.config, self.data = config, data
        self.execution = (execution or Execution()).on(data.device)
        self.epoch = 0
        self.curves: dict[str, list[float]] = {name: [] for name in CURVES}
        self.steps = data.counts["train"] // config.batch_size
        self.queue = Queue(data.device)
        with self.queue.here():
            self._build(weights)
        self._forward = _compiled(_loss) if self.execution.compiled else _loss
        self._judge = _compiled(_verdict) if self.execution.compiled else _verdict
        self._launch: dict[str, Launcher] = {}
        self._next_plan: Tensor | None = None
        self._taken = 0
        self._begun = False

    def _build(self, weights: dict[str, Tensor] | None) -> None:
        config, data, device = self.config, self.data, self.data.device
        model, found = _network(config, data)
        if weights is not None:
            _fill(model, weights)
        model.to(device)
        if self.execution.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self.groups = replace(found, params=dict(model.named_parameters()))
        captured, fused = bool(self.execution.captured), bool(self.execution.fused)
        self.optimizers = optimizers(config, self.groups, captured=captured, fused=fused)
        shape = (self.steps, config.batch_size)
        self._codes = torch.zeros(shape, dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._chunk_at = torch.zeros(1, dtype=torch.int64, device=device)
        self._totals = torch.zeros(len(PARTS), 2, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        self._plan_host = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._totals_host = torch.zeros(len(PARTS), 2, dtype=torch.float64, pin_memory=pinned)

    # The work of a step and of an evaluation, as it is captured

    def _step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        loss, hits = self._forward(self.model, self.data, self._codes[self._at][0], self.config.precision == "bf16")
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._totals[0] += torch.stack([loss.detach().double(), hits.double()])
        self._at += 1

    @torch.no_grad()
    def _evaluate(self, part: str) -> None:
        half, length = self.config.precision == "bf16", self._chunk_length(part)
        self._totals[PARTS.index(part)] += self._judge(self.model, self.data, part, self._chunk_at, length, half)
        self._chunk_at += length

    def _chunk_length(self, part: str) -> int:
        return min(self.execution.chunk, self.data.counts[part])

    # An epoch

    def begin_epoch(self) -> None:
        """Put the start of the next epoch into the queue: its rate and its plan."""
        config = self.config
        plan = self._next_plan if self._next_plan is not None else self._plan(self.epoch)
        self._next_plan = None
        with self.queue.here():
            self._plan_host.copy_(plan)
            self._codes.copy_(self._plan_host, non_blocking=True)
            set_rates(self.optimizers, config.rate_factor(self.epoch))
            self._at.zero_()
            self._totals.zero_()
        self._taken, self._begun = 0, True

    def take(self, most: int) -> int:
        """Put up to so many steps of the epoch into the queue; returns how many are left."""
        if not self._begun:
            self.begin_epoch()
        count = min(most, self.steps - self._taken)
        self._taken += count
        if count and "step" not in self._launch:
            count -= self._prepare()
        if count:
            self._launch["step"](count)
        self.queue.mark()
        return self.steps - self._taken

    def take_plainly(self) -> int:
        """Take one step that is not replayed and wait for it, so that the optimizers' state can be read after it."""
        if not self._begun:
            self.begin_epoch()
        with self.queue.here():
            self._step()
        self._taken += 1
        self.queue.mark()
        self.queue.wait()
        return self.steps - self._taken

    def end_epoch(self) -> None:
        """Put the evaluation into the queue, and prepare the next plan while it is busy."""
        self.model.eval()
        for part in PARTS[1:]:
            if part not in self._launch:
                self._launch[part] = self._evaluator(part)
            with self.queue.here():
                self._chunk_at.zero_()
            self._launch[part](math.ceil(self.data.counts[part] / self._chunk_length(part)))
        self.model.train()
        with self.queue.here():
            self._totals_host.copy_(self._totals, non_blocking=True)
        self.queue.mark()
        if self.epoch + 1 < self.config.epochs:
            self._next_plan = self._plan(self.epoch + 1)

    def collect(self) -> None:
        """Wait for the epoch's end and read its figures."""
        self.queue.wait()
        counts = [self.steps * self.config.batch_size, *(self.data.counts[part] for part in PARTS[1:])]
        for k, part in enumerate(PARTS):
            total, hits = self._totals_host[k].tolist()
            # The training loss is added up batch by batch, the others image by image.
            self.curves[f"{part}_loss"].append(total / (self.steps if k == 0 else counts[k]))
            self.curves[f"{part}_accuracy"].append(100 * hits / counts[k])
        self.epoch += 1
        self._begun = False

    def run_epoch(self) -> None:
        """A whole epoch, waited for."""
        while self.take(self.steps):
            pass
        self.end_epoch()
        self.collect()

    @property
    def diverged(self) -> bool:
        """The last epoch's training loss is not a number."""
        return bool(self.epoch) and not math.isfinite(self.curves["train_loss"][-1])

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        return self.diverged or self.epoch >= self.config.epochs

    def collapsed(self) -> int:
        """Rows that have no direction any more."""
        count = 0
        for group in self.groups.groups:
            tensors = [self.groups.params[name].detach() for name in group.names]
            count += int(geometry.collapsed(geometry.norm(Layout(group.layout).join(tensors))).sum())
        return count

    # Capturing

    def _prepare(self) -> int:
        """Make the launcher of steps; returns how many steps were taken on the way."""
        if not self.execution.captured:
            self._launch["step"] = Plain(self._step)
            return 0
        with self.queue.here():
            # Compiling, choosing algorithms and making buffers happens in steps that are then undone.
            kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            states = [_copied(optimizer.state_dict()["state"]) for optimizer in self.optimizers]
            at, totals = self._at.clone(), self._totals.clone()
            for _ in range(2):
                self._step()
                self._at.copy_(at)
            self._restore(kept, states)
            self._totals.copy_(totals)
            # The training's own first step: the optimizers make their state and tables, which a capture must find.
            self._step()
        self._launch["step"] = self._launcher(self._step, together=self.execution.together)
        return 1

    def _launcher(self, work: Callable[[], None], *, together: int = 1) -> Launcher:
        if not self.execution.captured or self.queue.stream is None:
            return Plain(work)
        torch.cuda.synchronize(self.data.device)
        return Captured(work, self.queue.stream, together=together)

    def _evaluator(self, part: str) -> Launcher:
        work = partial(self._evaluate, part)
        if self.execution.captured:
            with self.queue.here():
                kept = self._totals.clone()
                work()
                self._totals.copy_(kept)
        return self._launcher(work)

    def _plan(self, epoch: int) -> Tensor:
        return torch.from_numpy(self.data.plan(self.config.seed, epoch, self.config.batch_size))

    # State

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from the end of the last epoch, on the CPU."""
        self.queue.wait()
        return {
            "config": self.config.to_dict(),
            "epoch": self.epoch,
            "curves": {name: list(values) for name, values in self.curves.items()},
            "model": self.weights(),
            "optimizers": [_copied(o.state_dict()["state"], device="cpu") for o in self.optimizers],
        }

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, before the first step."""
        if Config.from_dict(state["config"]) != self.config:
            raise ValueError(f"the state belongs to another training than {self.config.key}")
        with self.queue.here():
            self._restore(state["model"], state["optimizers"])
        self.epoch = state["epoch"]
        self.curves = {name: list(values) for name, values in state["curves"].items()}
        self._next_plan, self._begun = None, False

    def _restore(self, model: dict[str, Tensor], states: list[dict[Any, Any]]) -> None:
        _fill(self.model, model)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": _copied(state), "param_groups": groups})


def _loss(model: nn.Module, data: Resident, codes: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Mean loss and number of hits of a batch."""
    images, labels = data.batch(codes)
    with torch.autocast(data.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        logits = model(images)
    logits = logits.float()
    return functional.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).sum()


def _verdict(model: nn.Module, data: Resident, part: str, start: Tensor, length: int, half: bool) -> Tensor:
    """Sum of the losses and number of hits of a chunk."""
    images, labels, there = data.chunk(part, start, length)
    with torch.autocast(data.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        logits = model(images)
    logits = logits.float()
    losses = functional.cross_entropy(logits, labels, reduction="none")
    hits = (logits.argmax(dim=1) == labels) & there
    return torch.stack([(losses * there).sum().double(), hits.sum().double()])


@lru_cache(maxsize=2)
def _compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    # One compiled function for all trainings: networks of one kind share what was compiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(work, dynamic=False)


def _network(config: Config, data: Resident) -> tuple[nn.Module, Groups]:
    """The network as its seed makes it, and the rows of its kind."""
    kind = (config.model, config.norm, data.channels, data.classes, data.size, config.width)
    found = _rows(*kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return _built(*kind), found


@lru_cache(maxsize=32)
def _rows(model: str, norm: str, channels: int, classes: int, size: int, width: int | None) -> Groups:
    """The rows of a kind of network, found once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = _built(model, norm, channels, classes, size, width)
        return find_groups(network, torch.randn(8, channels, size, size))


def _built(model: str, norm: str, channels: int, classes: int, size: int, width: int | None) -> nn.Module:
    return build(model, norm=norm, channels=channels, classes=classes, size=size, width=width)


@torch.no_grad()
def _fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy parameters and buffers in place: torch's own way needs a version that plain dicts lack."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(
            f"the weights must be those of this network; they differ in {sorted(own.keys() ^ weights.keys())}"
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def _copied(state: Any, *, device: str | None = None) -> Any:
    """A copy of a nested state that shares no memory with it."""
    if isinstance(state, Tensor):
        return state.detach().to(device or state.device, copy=True)
    if isinstance(state, dict):
        return {key: _copied(value, device=device) for key, value in state.items()}
    return state

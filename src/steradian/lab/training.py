"""A training, or several that differ by their seed alone: network, optimizers, batches, curves, state.

Nothing in a step is read back or decided by the host, so a step can be captured: the batch is found by a counter on
the device, the rate is a tensor there, and loss and hits are added up there until the epoch ends. On a CPU the same
code runs as a plain loop.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian import geometry
from steradian.groups import Layout
from steradian.lab import compiling
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.execution import Execution
from steradian.lab.launch import Captured, Launcher, Plain, Queue
from steradian.lab.members import PARTS, Member
from steradian.lab.methods import optimizers, set_rates
from steradian.lab.models import VGG, Convolution, ResNet
from steradian.lab.networks import fill, load_states, member, network, stack

__all__ = ["Training"]


class Training:
    """A training that can be taken step by step, stopped, saved and continued.

    Args:
        configs: what to train: one, or several that differ by their seed alone.
        data: its data, on the device to train on.
        execution: how.
        weights: parameters and buffers that all start from, by name; None: fresh networks.

    Attributes:
        members: the trainings.
        epoch: epochs that are finished.
    """

    def __init__(
        self,
        configs: Config | Sequence[Config],
        data: Resident,
        *,
        execution: Execution | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.members = [Member(config) for config in ([configs] if isinstance(configs, Config) else configs)]
        if len({each.config.setting for each in self.members}) != 1:
            raise ValueError("configs must be at least one, and differ by their seed alone")
        self.config, self.data = self.members[0].config, data
        self.execution = (execution or Execution()).on(data.device)
        self.epoch = 0
        self.steps = data.counts["train"] // self.config.batch_size
        self.queue = Queue(data.device)
        self._launch: dict[str, Launcher] = {}
        self._next_plan: Tensor | None = None
        self._taken, self._begun = 0, False
        compiled = self.execution.compiled
        self._loss = compiling.compiled(_losses) if compiled else _losses
        self._verdict = compiling.compiled(_verdicts) if compiled else _verdicts
        with self.queue.here():
            self._build(weights)

    def _build(self, weights: dict[str, Tensor] | None) -> None:
        device, count = self.data.device, len(self.members)
        model, groups = network([each.config for each in self.members], self.data)
        if weights is not None:
            fill(model, stack([weights] * count))
        model.to(device)
        if self.execution.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for layer in model.modules():
            if isinstance(layer, Convolution):
                layer.lanes = self.execution.lanes or 1
        if self.execution.joined and self._half:
            _join(model, device, compiled=self.execution.compiled)
        self.model = model
        self.groups = replace(groups, params=dict(model.named_parameters()))
        captured, fused = bool(self.execution.captured), bool(self.execution.fused)
        how = {"captured": captured, "fused": fused, "compiled": self.execution.compiled}
        self.optimizers = optimizers(self.config, self.groups, **how)
        plan, totals, pinned = (self.steps, count, self.config.batch_size), (len(PARTS), 2, count), captured
        self._codes = torch.zeros(plan, dtype=torch.int64, device=device)
        self._at, self._chunk_at, self._chunk_end = torch.zeros(3, 1, dtype=torch.int64, device=device).unbind()
        self._totals = torch.zeros(totals, dtype=torch.float64, device=device)
        self._judged = torch.zeros(totals[1:], dtype=torch.float64, device=device)
        self._plan_host = torch.zeros(plan, dtype=torch.int64, pin_memory=pinned)
        self._totals_host = torch.zeros(totals, dtype=torch.float64, pin_memory=pinned)

    # The work of a step and of an evaluation, as it is captured

    def _step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        losses, hits = self._loss(self.model, self.data, self._codes[self._at][0], self._half)
        losses.sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._totals[0] += torch.stack([losses.detach(), hits.to(losses.dtype)])
        self._at += 1

    @torch.no_grad()
    def _evaluate(self, length: int) -> None:
        members = len(self.members)
        self._judged += self._verdict(
            self.model, self.data, self._chunk_at, self._chunk_end, length, members, self._half
        )
        self._chunk_at += length

    @property
    def _half(self) -> bool:
        return self.config.precision == "bf16"

    # An epoch

    def begin_epoch(self) -> None:
        """Put the start of the next epoch into the queue: its rate and its plan."""
        plan = self._next_plan if self._next_plan is not None else self._plan(self.epoch)
        self._next_plan = None
        with self.queue.here():
            self._plan_host.copy_(plan)
            self._codes.copy_(self._plan_host, non_blocking=True)
            set_rates(self.optimizers, self.config.rate_factor(self.epoch))
            self._at.zero_()
            self._totals.zero_()
        self._taken, self._begun = 0, True

    @property
    def left(self) -> int:
        """Steps of this epoch that have not been put into the queue."""
        return self.steps - self._taken if self._begun else self.steps

    def take(self, most: int) -> int:
        """Put up to so many steps of the epoch into the queue; returns how many are left."""
        if not self._begun:
            self.begin_epoch()
        count = min(most, self.left)
        self._taken += count
        if count and "step" not in self._launch:
            count -= self._prepare()
        if count:
            with self.queue.here():
                self._launch["step"](count)
        self.queue.mark()
        return self.left

    def take_plainly(self) -> int:
        """Take one step that is not replayed and wait for it, so that the optimizers' state can be read after it."""
        if not self._begun:
            self.begin_epoch()
        with self.queue.here():
            self._step()
        self._taken += 1
        self.queue.mark()
        self.queue.wait()
        return self.left

    def end_epoch(self) -> None:
        """Put the evaluation into the queue, and prepare the next plan while it is busy."""
        self.model.eval()
        for part in PARTS[1:]:
            start, end = self.data.spans[part]
            with self.queue.here():
                self._chunk_at.fill_(start)
                self._chunk_end.fill_(end)
                launch, length = self._evaluator(end - start)
                self._judged.zero_()
                launch(math.ceil((end - start) / length))
                self._totals[PARTS.index(part)] = self._judged
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
            for each, total, hits in zip(self.members, *self._totals_host[k].tolist(), strict=True):
                if k == 0 and each.diverged:
                    continue
                if k and each.epoch == len(each.curves[f"{part}_loss"]):
                    continue  # it diverged before
                # The training loss is added up batch by batch, the others image by image.
                each.curves[f"{part}_loss"].append(total / (self.steps if k == 0 else counts[k]))
                each.curves[f"{part}_accuracy"].append(100 * hits / counts[k])
        self.epoch += 1
        self._begun = False

    def run_epoch(self) -> None:
        """A whole epoch, waited for."""
        while self.take(self.steps):
            pass
        self.end_epoch()
        self.collect()

    @property
    def curves(self) -> dict[str, list[float]]:
        """The curves of the first member."""
        return self.members[0].curves

    @property
    def diverged(self) -> bool:
        """All members have diverged."""
        return all(each.diverged for each in self.members)

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        return self.diverged or self.epoch >= self.config.epochs

    def collapsed(self) -> list[int]:
        """For each member, the rows that have no direction any more."""
        counts = torch.zeros(len(self.members), dtype=torch.int64)
        for group in self.groups.groups:
            tensors = [self.groups.params[name].detach() for name in group.names]
            gone = geometry.collapsed(geometry.norm(Layout(group.spec).join(tensors)))
            counts += gone.view(len(self.members), -1).sum(dim=1).cpu()
        return counts.tolist()

    # Capturing

    def _prepare(self) -> int:
        """Make the launcher of steps; returns how many steps were taken on the way."""
        if not self.execution.captured:
            self._launch["step"] = Plain(self._step)
            return 0
        with self.queue.here():
            # Compiling, choosing algorithms and making buffers happens in steps that are then undone.
            kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            states = [member(optimizer.state_dict()["state"], 0, 1) for optimizer in self.optimizers]
            at, totals = self._at.clone(), self._totals.clone()
            for _ in range(2):
                self._step()
                self._at.copy_(at)
            fill(self.model, kept)
            load_states(self.optimizers, states)
            self._totals.copy_(totals)
            # The training's own first step: the optimizers make their state and tables, which a capture must find.
            self._step()
        self._launch["step"] = self._launcher(self._step, together=self.execution.together)
        return 1

    def _evaluator(self, count: int) -> tuple[Launcher, int]:
        """What evaluates a chunk, and its length."""
        if not self.execution.captured:
            length = min(self.execution.chunk, count)
            return Plain(lambda: self._evaluate(length)), length
        length = self.execution.chunk
        if "evaluation" not in self._launch:
            at = self._chunk_at.clone()
            self._evaluate(length)
            self._chunk_at.copy_(at)
            self._launch["evaluation"] = self._launcher(lambda: self._evaluate(length))
        return self._launch["evaluation"], length

    def _launcher(self, work: Callable[[], None], *, together: int = 1) -> Launcher:
        assert self.queue.stream is not None, "only a GPU has graphs"
        torch.cuda.synchronize(self.data.device)
        return Captured(work, self.queue.stream, together=together)

    def _plan(self, epoch: int) -> Tensor:
        plans = [self.data.plan(each.config.seed, epoch, self.config.batch_size) for each in self.members]
        return torch.stack([torch.from_numpy(plan) for plan in plans], dim=1)

    # State

    def state(self, number: int = 0) -> dict[str, Any]:
        """Everything needed to go on with a member from the end of the last epoch, alone or not, on the CPU."""
        self.queue.wait()
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        each = self.members[number]
        return {
            "config": each.config.to_dict(),
            "epoch": self.epoch,
            "curves": {name: list(values) for name, values in each.curves.items()},
            "model": self.weights(number),
            "optimizers": [member(state, number, len(self.members), device="cpu") for state in states],
        }

    def weights(self, number: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers of a member by name, on the CPU."""
        return member(self.model.state_dict(), number, len(self.members), device="cpu")

    def load(self, *states: dict[str, Any]) -> None:
        """Go on from the members' states, before the first step."""
        known = [Config.from_dict(state["config"]) for state in states]
        if known != [each.config for each in self.members]:
            raise ValueError(f"the state belongs to another training than {self.config.key}")
        if len({state["epoch"] for state in states}) > 1:
            raise ValueError("the states must be of one epoch")
        with self.queue.here():
            fill(self.model, stack([state["model"] for state in states]))
            saved = zip(*(state["optimizers"] for state in states), strict=True)
            load_states(self.optimizers, [stack(parts) for parts in saved])
        self.epoch = states[0]["epoch"]
        for each, state in zip(self.members, states, strict=True):
            each.curves = {name: list(values) for name, values in state["curves"].items()}
        self._next_plan, self._begun = None, False


def _join(model: nn.Module, device: torch.device, *, compiled: bool) -> None:
    """Carry the network out by joint kernels, where there are such for it."""
    if importlib.util.find_spec("triton") is None:
        return
    from steradian.lab import joining, wide

    narrow = joining.is_narrow(model)
    # What a wide network gains is left to a compiler.
    if joining.can_join(model) and (compiled or narrow):
        assert isinstance(model, ResNet | VGG)
        model.route = joining.forward_on_hopper if not narrow and wide.works(device) else joining.forward


def _losses(model: nn.Module, data: Resident, codes: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Mean loss and number of hits of each member's batch."""
    images, labels = data.batch(codes)
    with torch.autocast(data.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        logits = model(images)
    logits = logits.float().view(*labels.shape, -1)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(dim=1), (logits.argmax(dim=2) == labels).sum(dim=1)


def _verdicts(
    model: nn.Module, data: Resident, start: Tensor, end: Tensor, length: int, members: int, half: bool
) -> Tensor:
    """Sum of the losses and number of hits of each member on a chunk, (2, members)."""
    images, labels, there = data.chunk(start, end, length, members)
    with torch.autocast(data.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        logits = model(images)
    logits = logits.float().view(members, length, -1)
    targets = labels.expand(members, -1)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(members, -1)
    hits = (logits.argmax(dim=2) == targets) & there
    return torch.stack([(losses * there).sum(dim=1).double(), hits.sum(dim=1).double()])

"""One training: network, optimizers, batches, curves, and a state from which it can be resumed.

Within a step the host reads nothing back and decides nothing, so a step can be captured in a CUDA graph: the batch is
selected by a counter on the device, the rate is a tensor there, and loss and hits are summed there until the epoch
ends. On a CPU the same code runs as a plain loop.
"""

import gc
import importlib.util
import inspect
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steradian import geometry
from steradian.groups import Layout
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.models import Convolution, ResNet, network
from steradian.lab.registry import METHODS
from steradian.lab.results import CURVES, PARTS, has_diverged

__all__ = ["Execution", "Training"]

Weights = Mapping[str, Tensor]
_CHUNK = 500  # images that are evaluated at once
_LANES = 8  # input channels that a GPU's matrix units take at once
_PLAIN = int | float | str | None  # kinds of values that a checkpoint holds as they are
_ALIKE = 0.01  # share of a move by which replayed steps of an unknown optimizer may differ from plain ones


@dataclass(frozen=True)
class Execution:
    """How trainings are run; results differ only by rounding."""

    captured: bool | None = None  #: replay the step as a CUDA graph; None: on a GPU
    compiled: bool = False  #: compile the network, and steps that have no fused form, with torch.compile
    joined: bool | None = None  #: run narrow ResNets with BN in bf16 by `lab.kernels.joining`; None: on a GPU


@lru_cache(maxsize=16)
def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled for the shapes that it is called with, shared by all trainings."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(work, dynamic=False)


class Queue:
    """The work of one training, in order: a CUDA stream on a GPU; on a CPU the work runs at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._marks: deque[torch.cuda.Event] = deque()
        if self.stream:
            self.stream.wait_stream(torch.cuda.default_stream(device))

    def here(self) -> AbstractContextManager[object]:
        """A context in which work is added to this queue."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> None:
        """Mark the end of the work that has been added so far."""
        if self.stream is not None:
            self._marks.append(self.stream.record_event())

    def pending(self) -> int:
        """Number of marks that the device has not reached."""
        while self._marks and self._marks[0].query():
            self._marks.popleft()
        return len(self._marks)

    def wait(self) -> None:
        """Wait until the device has reached every mark."""
        if self._marks:
            self._marks[-1].synchronize()
            self._marks.clear()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as a CUDA graph; returns a function that replays it.

        Capturing does not run the work, which must have run before and may only depend on memory that stays in place.
        """
        assert self.stream is not None, "only a GPU has graphs"
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.stream.device)
        with ExitStack() as after:
            if gc.isenabled():
                after.callback(gc.enable)
            gc.disable()  # memory that is freed during a capture must not belong to others
            after.enter_context(self.here())
            # Other trainings go on meanwhile: only this thread's calls follow the rules of a capture.
            graph.capture_begin(capture_error_mode="thread_local")
            after.callback(graph.capture_end)
            work()
        return graph.replay


class Training:
    """A training that can be run step by step, stopped, saved and continued, on the device of its data.

    It starts from `weights`, parameters and buffers by name, or from a fresh network. `curves` have one number for each
    finished epoch, of which there are `epoch`; of the `steps` of this epoch `left` have not been enqueued.
    """

    def __init__(
        self, config: Config, data: Resident, *, execution: Execution | None = None, weights: Weights | None = None
    ) -> None:
        self.config, self.data, given = config, data, execution or Execution()
        usual = {name: data.device.type == "cuda" for name in ("captured", "joined") if getattr(given, name) is None}
        self.execution = replace(given, **usual)
        self.epoch, self.curves = 0, {name: list[float]() for name in CURVES}
        self.steps = self.left = data.counts["train"] // config.batch_size
        self.queue = Queue(data.device)
        self._launch: dict[str, Callable[[], None]] = {}
        self._tested, self._half, self._random = False, config.precision == "bf16", torch.get_rng_state()
        self._loss = compiled(_loss) if self.execution.compiled else _loss
        self._score = compiled(_score) if self.execution.compiled else _score
        with self.queue.here():
            self._build(weights)

    def _build(self, weights: Weights | None) -> None:
        device, (model, groups) = self.data.device, network(self.config, self.data)
        if weights is not None:
            _fill(model, weights)
        model.to(device)
        if device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for layer in model.modules():
                if isinstance(layer, Convolution):
                    layer.lanes = _LANES
        if self.execution.joined and self._half and importlib.util.find_spec("triton"):
            from steradian.lab.kernels import joining

            if isinstance(model, ResNet) and joining.can_join(model):
                model.route = joining.forward
        self.model = model
        self.groups = replace(groups, params=dict(model.named_parameters()))
        self.optimizers = self._make_optimizers()
        plan, totals, pinned = (self.steps, self.config.batch_size), (len(PARTS), 2), bool(self.execution.captured)
        self._codes = torch.zeros(plan, dtype=torch.int64, device=device)
        self._at, self._chunk_at, self._chunk_end = torch.zeros(3, 1, dtype=torch.int64, device=device).unbind()
        self._totals = torch.zeros(totals, dtype=torch.float64, device=device)
        self._scored = torch.zeros(totals[1:], dtype=torch.float64, device=device)
        self._plan_host = torch.zeros(plan, dtype=torch.int64, pin_memory=pinned)
        self._totals_host = torch.zeros(totals, dtype=torch.float64, pin_memory=pinned)

    def _make_optimizers(self) -> list[Optimizer]:
        """The optimizers of the method, prepared for compiling and capturing."""
        made = METHODS[self.config.method](self.groups, self.config)
        made = [made] if isinstance(made, Optimizer) else made
        if not isinstance(made, list | tuple) or not all(isinstance(each, Optimizer) for each in made):
            raise TypeError(f"method {self.config.method!r} must return one or several optimizers, got {made!r:.60}")
        stepped = {id(p) for optimizer in made for group in optimizer.param_groups for p in group["params"]}
        if left := [name for name, param in self.groups.params.items() if id(param) not in stepped]:
            number = f"{len(left)} of {len(self.groups.params)} parameters, such as {left[0]}"
            warnings.warn(f"method {self.config.method!r} does not train {number}", stacklevel=2)
        for optimizer in made:
            if self.execution.compiled and isinstance(inspect.getattr_static(optimizer, "update", None), staticmethod):
                # Steps without a fused form take a few kernels per parameter instead of forty.
                optimizer.update = compiled(type(optimizer).update)  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                if "lr" not in group:
                    raise TypeError(f"param groups of method {self.config.method!r} must have 'lr', got {list(group)}")
                group["initial_lr"] = float(group["lr"])
                if self.execution.captured:
                    group["lr"] = torch.tensor(float(group["lr"]), device=self.data.device)
                    known = isinstance(optimizer, torch.optim.SGD | torch.optim.Adam)
                    group |= {name: True for name in ("capturable", *(["fused"] if known else [])) if name in group}
        _set_mode(made, "train")
        closures = [inspect.signature(optimizer.step).parameters.get("closure") for optimizer in made]
        self._closures = [closure is not None and closure.default is closure.empty for closure in closures]
        self._settings = [[dict(group) for group in optimizer.param_groups] for optimizer in made]
        return made

    def _set_rates(self, factor: float) -> None:
        """Set every rate to its initial value times a factor, in place if it is a tensor."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor

    # The work of a step and of an evaluation, as it is captured

    def _step(self) -> None:
        loss, hits = self._differentiate()
        for optimizer, closes in zip(self.optimizers, self._closures, strict=True):
            again: list[Any] = [lambda: self._differentiate()[0]] if closes else []
            optimizer.step(*again)
        self._totals[0] += torch.stack([loss.detach(), hits.to(loss.dtype)])
        self._at += 1

    def _differentiate(self) -> tuple[Tensor, Tensor]:
        """Compute the gradients of a batch; returns its loss and its number of hits."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss, hits = self._loss(self.model, self.data, self._codes[self._at][0], self._half)
        loss.backward()
        return loss, hits

    @torch.no_grad()
    def _evaluate(self, length: int) -> None:
        self._scored += self._score(self.model, self.data, self._chunk_at, self._chunk_end, length, self._half)
        self._chunk_at += length

    # An epoch

    def begin_epoch(self) -> None:
        """Enqueue the start of the epoch, its rate and its plan."""
        plan = self.data.plan(self.config.seed, self.epoch, self.config.batch_size)
        number = int(np.random.Philox(key=[self.config.seed, self.epoch]).random_raw())
        self._random = torch.Generator().manual_seed(number).get_state()
        with self.queue.here():
            self._plan_host.copy_(torch.from_numpy(plan))
            self._codes.copy_(self._plan_host, non_blocking=True)
            self._set_rates(self.config.rate_factor(self.epoch))
            self._at.zero_()
            self._totals.zero_()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Work is added to the queue; on a CPU, dropout draws numbers that depend on the seed and the epoch alone."""
        with self.queue.here(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            yield
            self._random = torch.get_rng_state()

    def take(self, most: int) -> int:
        """Enqueue up to `most` steps of the epoch; returns how many are left."""
        if self.left == self.steps:
            self.begin_epoch()
        count = min(most, self.left)
        self.left -= count
        if count and "step" not in self._launch:
            count -= self._prepare()
        with self._working():
            for _ in range(count):
                self._launch["step"]()
        self.queue.mark()
        return self.left

    def take_plainly(self) -> int:
        """Run one step without replaying it and wait for it, so that the optimizers' state can be read after it."""
        if self.left == self.steps:
            self.begin_epoch()
        with self._working():
            self._step()
        self.left -= 1
        self.queue.mark()
        self.queue.wait()
        return self.left

    def end_epoch(self) -> None:
        """Enqueue the evaluation on the validation images and, after the last epoch, on the test images."""
        self._enqueue_evaluation("validation")
        if self.epoch + 1 == self.config.epochs:
            self._enqueue_evaluation("test")

    def _enqueue_evaluation(self, part: str) -> None:
        start, end = self.data.spans[part]
        length = _CHUNK if self.execution.captured else min(_CHUNK, end - start)
        self.model.eval()
        with self._working():
            _set_mode(self.optimizers, "eval")
            self._chunk_end.fill_(end)
            if self.execution.captured and "evaluation" not in self._launch:
                self._evaluate(length)
                self._launch["evaluation"] = self.queue.capture(partial(self._evaluate, length))
            self._chunk_at.fill_(start)
            self._scored.zero_()
            for _ in range(math.ceil((end - start) / length)):
                self._launch.get("evaluation", partial(self._evaluate, length))()
            self._totals[PARTS.index(part)] = self._scored
            self._totals_host.copy_(self._totals, non_blocking=True)
            _set_mode(self.optimizers, "train")
        self.model.train()
        self._tested = part == "test"
        self.queue.mark()

    def collect(self) -> bool:
        """Wait for the evaluation and read the figures of the epoch; returns whether it is over.

        If the validation accuracy has improved, the test images are evaluated first; NaN stands for other epochs.
        """
        self.queue.wait()
        best = max(self.curves["validation_accuracy"], default=-1.0)
        if not self._tested and 100 * self._totals_host[1, 1].item() / self.data.counts["validation"] > best:
            self._enqueue_evaluation("test")
            return False
        if not self.diverged:
            if not self._tested:
                self._totals_host[2] = math.nan
            counts = self.data.counts | {"train": self.steps * self.config.batch_size}
            for part, (loss, hits) in zip(PARTS, self._totals_host.tolist(), strict=True):
                # The training loss is a sum over batches, the others are sums over images.
                self.curves[f"{part}_loss"].append(loss / (self.steps if part == "train" else counts[part]))
                self.curves[f"{part}_accuracy"].append(100 * hits / counts[part])
        self.epoch, self.left = self.epoch + 1, self.steps
        return True

    def run_epoch(self) -> None:
        """Run an epoch, or what is left of it, and wait for it."""
        while self.take(self.steps):
            continue
        self.end_epoch()
        while not self.collect():
            continue

    @property
    def diverged(self) -> bool:
        """The loss is no longer finite."""
        return has_diverged(self.config, self.curves)

    @property
    def finished(self) -> bool:
        """All epochs are done, or it diverged."""
        return self.diverged or self.epoch >= self.config.epochs

    def collapsed(self) -> int:
        """Number of collapsed rows."""
        return sum(int(geometry.collapsed(geometry.norm(rows)).sum()) for rows in self.rows())

    def rows(self, *, gradients: bool = False) -> list[Tensor]:
        """The rows of each group, or of their gradients."""
        params, kind = self.groups.params, "grad" if gradients else "data"
        return [Layout(g.spec).join([getattr(params[name], kind) for name in g.names]) for g in self.groups.groups]

    # Capturing

    def _prepare(self) -> int:
        """Make the function that runs a step; returns how many steps were taken meanwhile."""
        self._launch["step"] = self._step
        if not self.execution.captured:
            return 0
        with self.queue.here():
            before, at, totals = self._changing(), self._at.clone(), self._totals.clone()

            def restore() -> None:
                self._restore(before)
                self._at.copy_(at)
                self._totals.copy_(totals)

            if self.config.plugin and (reason := self._replays_differ(restore)):
                warnings.warn(f"steps of {self.config.method} are not replayed as a CUDA graph: {reason}", stacklevel=2)
                self.execution = replace(self.execution, captured=False)
                self.optimizers = self._make_optimizers()
                restore()
                self._set_rates(self.config.rate_factor(self.epoch))
                return 0
            # Compiling, choosing algorithms and allocating buffers happen in steps that are undone afterwards.
            for _ in range(2):
                self._step()
                self._at.copy_(at)
            restore()
            # The training's own first step: the optimizers make their state and tables, which a capture must find.
            self._step()
        self._launch["step"] = self.queue.capture(self._step)
        return 1

    def _replays_differ(self, restore: Callable[[], None]) -> str:
        """Why the steps of an unknown optimizer must not be replayed, "" if they may: three steps both ways."""

        def weights() -> Tensor:
            return torch.cat([param.detach().flatten() for param in self.model.parameters()])

        gpu, steps, found = self.data.device.type == "cuda", min(3, self.steps - int(self._at)), [weights()]
        for kind in ("first", "plain", "replayed"):
            step: Callable[[], None] = self._step
            try:
                if gpu and kind == "plain":  # what waits for the device cannot be captured
                    _set_sync_mode("error")
                for number in range(steps):
                    if kind == "replayed" and number == 1:
                        step = self.queue.capture(self._step)
                    step()
                found.append(weights())
            except Exception as error:
                return str(error.__context__ or error).splitlines()[0]
            finally:
                if gpu and kind == "plain":
                    _set_sync_mode("default")
                restore()
        before, _, plain, replays = found
        # Numbers that the optimizer computes on the host, such as a bias correction, are frozen in a graph.
        alike = (plain - replays).norm() <= _ALIKE * (plain - before).norm()
        return "" if alike else "replayed steps differ from plain ones"

    # State

    def _changing(self, device: str | None = None) -> dict[str, Any]:
        """Copies of what steps change, except counters."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        settings = [
            [_changed(group, first) for group, first in zip(optimizer.param_groups, groups, strict=True)]
            for optimizer, groups in zip(self.optimizers, self._settings, strict=True)
        ]
        return copied({"model": self.model.state_dict(), "settings": settings, "optimizers": states}, device=device)

    def _restore(self, state: Mapping[str, Any]) -> None:
        _fill(self.model, state["model"])
        settings = state.get("settings") or [[{} for _ in groups] for groups in self._settings]  # of older checkpoints
        for optimizer, saved, *more in zip(self.optimizers, state["optimizers"], settings, self._settings, strict=True):
            groups = optimizer.state_dict()["param_groups"]  # without their settings
            optimizer.load_state_dict({"state": copied(saved), "param_groups": groups})
            _keep_types(optimizer.state_dict()["state"], saved, str(self.data.device))
            for group, changed, first in zip(optimizer.param_groups, *more, strict=True):
                for name in _changed(group, first):
                    del group[name]
                group |= first | {"lr": group["lr"]}
                for name, value in changed.items():
                    if isinstance(group.get(name), Tensor):
                        group[name].copy_(value)  # groups may share it
                    else:
                        group[name] = copied(value, device=str(self.data.device))
            for param, values in optimizer.state.items():
                for name, value in values.items() if isinstance(param, Tensor) else ():
                    # Fused steps read parameter and state in one order.
                    if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                        values[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)

    def state(self) -> dict[str, Any]:
        """Everything needed to resume from the end of the last epoch, on the CPU."""
        self.queue.wait()
        about = {"config": asdict(self.config), "epoch": self.epoch, "curves": copied(self.curves)}
        return about | self._changing("cpu")

    def weights(self) -> Weights:
        """Parameters and buffers by name, on the CPU."""
        return copied(self.model.state_dict(), device="cpu")

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, before the first step."""
        if Config.from_dict(state["config"]) != self.config:
            raise ValueError(f"the state belongs to another training than {self.config.key}")
        with self.queue.here():
            self._restore(state)
        self.epoch, self.curves, self.left = state["epoch"], copied(state["curves"]), self.steps


def _set_sync_mode(mode: str) -> None:
    """Whether torch raises where work waits for the device; whatever the mode, it warns that it misses some."""
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode(mode)


def copied(state: Any, *, device: str | None = None) -> Any:
    """A nested state that shares no memory with the original, of kinds that a file can hold without code."""
    if isinstance(state, Mapping):
        return {key: copied(value, device=device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return (list if isinstance(state, list) else tuple)(copied(value, device=device) for value in state)
    if isinstance(state, Tensor):
        return state.detach().to(device or state.device, copy=True)
    if isinstance(state, np.generic):
        return state.item()
    if not isinstance(state, _PLAIN):
        kinds = "tensors, numbers, strings, and lists and dicts of them"
        raise TypeError(f"what an optimizer keeps in its state must be {kinds}, got {type(state).__name__}")
    return state


def _set_mode(optimizers: Sequence[Optimizer], mode: str) -> None:
    """Schedule-free optimizers, which have the methods `train` and `eval`, evaluate other weights than they train."""
    for optimizer in optimizers:
        getattr(optimizer, mode, lambda: None)()


def _changed(group: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a param group that steps may have changed: some optimizers count their steps there."""
    return {
        name: value
        for name, value in group.items()
        if isinstance(value, Tensor) or (isinstance(value, _PLAIN) and value is not first.get(name))
        if name not in ("params", "lr", "initial_lr")
    }


def _keep_types(loaded: dict[str, Any], saved: Mapping[str, Any], device: str) -> None:
    """Undo the casts of `Optimizer.load_state_dict`, which gives every state the type of its parameter."""
    for name in saved.keys() & loaded.keys():
        value, cast = saved[name], loaded[name]
        if isinstance(value, Mapping):
            _keep_types(cast, value, device)
        elif not isinstance(value, Tensor) or not isinstance(cast, Tensor) or cast.dtype != value.dtype:
            loaded[name] = copied(value, device=device)


@torch.no_grad()
def _fill(model: nn.Module, weights: Weights) -> None:
    """Copy parameters and buffers in place; `load_state_dict` needs a version that plain dicts lack."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        names = ", ".join(sorted(own.keys() ^ weights.keys()))
        raise ValueError(f"the weights must be those of this network; they differ in {names}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def _loss(model: nn.Module, data: Resident, codes: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Mean loss and number of hits of a batch."""
    losses, hits = _judge(model, *data.batch(codes), half)
    return losses.mean(), hits.sum()


def _score(model: nn.Module, data: Resident, start: Tensor, end: Tensor, length: int, half: bool) -> Tensor:
    """Sum of the losses and number of hits on a chunk, (2,)."""
    images, labels, inside = data.chunk(start, end, length)
    losses, hits = _judge(model, images, labels, half)
    return torch.stack([(losses * inside).sum().double(), (hits & inside).sum().double()])


def _judge(model: nn.Module, images: Tensor, labels: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """The loss of each image, and whether it is a hit."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        logits = model(images)
    logits = logits.float()
    return functional.cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=1) == labels

"""A training whose steps are measured on the spheres: the experiments of App. C.1.2 and C.1.5, and of Section 4.1.

Some steps are recorded. These are run without replaying them, so that the optimizer's state can be read; those in
between are replayed as in any fleet. `st.watch` measures the same quantities, and the tests compare the two, but it is
not used here for three reasons: it observes steps by hooks, which a replayed CUDA graph does not call, so it could not
keep the sums of the phenomena; a checkpoint must contain the recorded values; and the tables need statistics over all
filters of the network that have not shrunk away, where its records have statistics for each parameter.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from steradian import optim
from steradian.image import image_step
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.training import Training
from steradian.phenomena import Memory
from steradian.scheme import Step, read_step
from steradian.watching.records import COLUMNS, STATISTICS
from steradian.watching.rows import WatchedGroup, place, watched_groups

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ALL", "LIVING", "PHENOMENA", "RECORDED", "Tracked", "recorded_steps", "statistics_table"]

RECORDED = ("radial", "velocity", "radius", "effective_lr")
"""What every tracked training records of its rows: A⟨c,u⟩ (H1), z (H2, and z² is Theorem 4's variable), r and η^e."""
PHENOMENA = ("deformation", "gradient_memory", "l2_memory", "radius_ratio")
"""(a), (b1), (b2) and (c): the turn of the effective direction that each causes, in radians."""

ALL, LIVING = "all filters", "living filters"
"""Groups over the whole network: every row, and those that have at least a thousandth of their first radius."""
_LIVING = 1e-3


def recorded_steps(total: int, points: int) -> list[int]:
    """Steps to record: half of them evenly spaced, half in equal ratios, so that the start is resolved.

    The first and the last step are among them.

    >>> recorded_steps(1000, 10)
    [0, 5, 31, 177, 250, 500, 749, 999]
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    even = np.linspace(0, total - 1, max(2, points - points // 2))
    ratios = np.geomspace(1, total, points // 2) - 1
    return sorted({round(float(step)) for step in (*even, *ratios)})


class Tracked(Training):
    """A training that records some of its steps; `Fleet` runs it like any other.

    Args:
        config: what to train.
        data: its data.
        points: about how many steps to record; see `recorded_steps`.
        phenomena: measure (a), (b1), (b2) and (c) too, for which every step updates five tensors of the size of the
            weights; this is captured and replayed with the step.
        deliver: called with this training when it is finished.
        **how: `execution` and `weights`, as for `Training`.
    """

    def __init__(
        self,
        config: Config,
        data: Resident,
        *,
        points: int = 300,
        phenomena: bool = False,
        deliver: Callable[["Tracked"], None] = lambda _: None,
        **how: Any,
    ) -> None:
        super().__init__(config, data, **how)
        rows = self.optimizers[0]  # which has all rows of the network
        watched, _ = watched_groups([rows], self.groups)
        self.stacks = _stacks([each for each in watched if each.group in self.groups.groups])
        self.quantities = RECORDED + (PHENOMENA if phenomena else ())
        self.deliver = deliver
        self._wanted = recorded_steps(self.config.epochs * self.steps, points)
        self._recorded: list[int] = []
        self._values: list[NDArray[np.float32]] = []
        self._rehearsed = False
        self.memory = _MomentumMemory(rows, self.stacks) if phenomena else None

    @property
    def at(self) -> int:
        """The number of the next step, over all epochs."""
        return self.epoch * self.steps + self.steps - self.left

    def take(self, most: int) -> int:
        """Enqueue up to `most` steps, but none beyond the next that is recorded; or record that one.

        A step is recorded when the queue is empty, so that nothing waits here.
        """
        at, number = self.at, len(self._recorded)
        if number < len(self._wanted) and self._wanted[number] <= at:
            return self.left if self.queue.pending() else self._record(at)
        until = self._wanted[number] - at if number < len(self._wanted) else most
        if self.memory is None or self._rehearsed:
            return super().take(min(most, until))
        # Before a capture `Training` runs steps and undoes them; their effect on the memory is undone here.
        self._rehearsed = True
        with self.queue.here():
            kept = self.memory.state()
        left = super().take(1)
        with self.queue.here():
            self.memory.redo(kept)
        return left

    def collect(self) -> None:
        """Wait for the end of the epoch and read its figures; after the last epoch, deliver."""
        super().collect()
        if self.finished:
            self.deliver(self)

    def table(self) -> "pd.DataFrame":
        """The recorded statistics: over the living rows of each group, and over the groups `LIVING` and `ALL`.

        The quantity "living" of `ALL` is 1 for each living row and 0 for the others; rows whose radius is NaN are left
        out.
        """
        import pandas as pd

        spans = {"+".join(member.group.names): member.span for stack in self.stacks for member in stack.members}
        count = max(span.stop for span in spans.values())
        values = np.stack(self._values) if self._values else np.zeros((0, len(self.quantities), count), np.float32)
        radius = values[:, self.quantities.index("radius")]
        living = np.where(radius >= _LIVING * radius[:1], 1, np.nan).astype(np.float32)[:, None]
        names = ("+".join(group.names) for group in self.groups.groups)
        blocks = {name: (values * living)[:, :, spans[name]] for name in names}
        blocks |= {LIVING: values * living, ALL: values}
        share = np.where(np.isnan(radius)[:, None], np.nan, np.isfinite(living)).astype(np.float32)
        parts = [
            statistics_table(self.config.key, self._recorded, self.quantities, blocks),
            statistics_table(self.config.key, self._recorded, ["living"], {ALL: share}),
        ]
        return pd.concat(parts, ignore_index=True)

    # Recording

    def _record(self, number: int) -> int:
        with self.queue.here():
            params = [param for stack in self.stacks for member in stack.members for param in member.params]
            before = {param: param.detach().clone() for param in params}
        left = self.take_plainly()
        with self.queue.here():
            found = [self._measure(k, stack, before) for k, stack in enumerate(self.stacks)]
            self._values.append(torch.cat(found, dim=1).float().cpu().numpy())
        self._recorded.append(number)
        return left

    @torch.no_grad()
    def _measure(self, number: int, stack: "Stack", before: Mapping[Tensor, Tensor]) -> Tensor:
        """The quantities of the rows of a stack in the step that was just taken, (quantities, rows)."""
        params = [param for member in stack.members for param in member.params]
        steps = {param: read_step(self.optimizers[0], param, before=before[param]) for param in params}
        first = steps[params[0]]
        a, b = (_rows(stack, {param: getattr(step, part) for param, step in steps.items()}) for part in "ab")
        step = Step(a, b, first.lr, l2=first.l2, decay=first.decay, beta=first.beta)
        image = image_step(_rows(stack, before), step, check=False)
        found = [getattr(image, name) for name in RECORDED]
        if self.memory is not None:
            effects = self.memory.part(number).phenomena(step)
            found += [getattr(effects, name).angle for name in PHENOMENA]
        return torch.stack(found)

    # State

    def state(self) -> dict[str, Any]:
        """The training's state and the recorded values."""
        values = torch.from_numpy(np.stack(self._values)) if self._values else torch.zeros(0)
        memory = None if self.memory is None else self.memory.state(device="cpu")
        tracked = {"steps": list(self._recorded), "values": values, "memory": memory}
        return {**super().state(), "tracked": tracked}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        tracked = state["tracked"]
        steps = list(tracked["steps"])
        kinds = tracked["values"].shape[1] if steps else len(self.quantities)
        if (
            steps != self._wanted[: len(steps)]
            or kinds != len(self.quantities)
            or (self.memory is None) != (tracked["memory"] is None)
        ):
            raise ValueError("it was started with other points or other quantities: use the same")
        super().load(state)
        self._recorded, self._values = steps, list(tracked["values"].numpy())
        if self.memory is not None:
            with self.queue.here():
                self.memory.load(tracked["memory"], device=self.data.device)


@dataclass(frozen=True)
class Stack:
    """Groups whose rows have one length, handled as one block of rows to save launches; their places are in order."""

    members: list[WatchedGroup]

    def now(self) -> Tensor:
        """The present rows."""
        return torch.cat([member.cut(member.params) for member in self.members])

    def gradient(self) -> Tensor:
        """Their gradients."""
        return torch.cat([member.cut(member.gradients()) for member in self.members])


def _stacks(watched: Sequence[WatchedGroup]) -> list[Stack]:
    def size(group: WatchedGroup) -> int:
        return group.size

    return [Stack(list(members)) for _, members in groupby(place(watched, key=size), key=size)]


class _MomentumMemory:
    """The sums of `phenomena.Memory` for all rows of a training, updated by every step.

    The update is a hook that runs before the optimizer's step: if the step is captured, the update is, too, and is
    replayed with it. Rows of all lengths are padded with zeros and kept as one tensor, since launches cost more than
    arithmetic; zeros change neither norms nor inner products, and nothing else enters the sums.

    Args:
        optimizer: steps the rows; its momentum is the sum that the paper writes.
        stacks: the rows, in stacks of one row length.

    Raises:
        ValueError: the momentum is transported with its rows, which neutralizes the phenomena.
    """

    def __init__(self, optimizer: Optimizer, stacks: Sequence[Stack]) -> None:
        letters = set("".join(str(group.get("without", "")) for group in optimizer.param_groups))
        if letters & {"b", "c"} or not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | optim.Adam):
            raise ValueError(
                "phenomena are measured where momentum is a sum of past gradients, with SGD-M, Adam, AdamW† and "
                f"Adam w/o (a); got {type(optimizer).__name__} without {''.join(sorted(letters)) or 'nothing'}"
            )
        self.optimizer, self.stacks = optimizer, stacks
        self.memory = Memory(check=False)
        self._last: tuple[Tensor, Tensor] | None = None
        self._rehearsing = True
        optimizer.register_step_pre_hook(self._update)

    @property
    def beta(self) -> float:
        """The momentum factor β."""
        group = self.optimizer.param_groups[0]
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    def part(self, number: int) -> Memory:
        """A copy of the memory of one stack."""
        first, last = self.stacks[number].members[0], self.stacks[number].members[-1]
        made = Memory(check=False)
        state = self.memory.state().items()
        made.load({name: rows[first.start : last.span.stop, : first.size] for name, rows in state})
        return made

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        points = self._padded([stack.now() for stack in self.stacks])
        gradients = self._padded([stack.gradient() for stack in self.stacks])
        if self._rehearsing and not _capturing(points):
            self._last = points, gradients
        self.memory.update(points, gradients, beta=self.beta)

    @staticmethod
    def _padded(parts: Sequence[Tensor]) -> Tensor:
        """Rows of several lengths in one tensor."""
        widest = max(part.shape[1] for part in parts)
        return torch.cat([functional.pad(part, (0, widest - part.shape[1])) for part in parts])

    def redo(self, kept: Mapping[str, Tensor]) -> None:
        """Go back to a state and apply only the last step to it: those before it were undone."""
        assert self._last is not None, "a step must have been taken"
        self.memory.load(kept)
        self.memory.update(*self._last, beta=self.beta)
        self._last, self._rehearsing = None, False

    def state(self, *, device: str | torch.device | None = None) -> dict[str, Tensor]:
        """A copy of all sums."""
        return {name: t.to(device or t.device, copy=True) for name, t in self.memory.state().items()}

    def load(self, state: Mapping[str, Tensor], *, device: str | torch.device) -> None:
        """Resume from a copy."""
        self.memory.load({name: tensor.to(device) for name, tensor in state.items()})


def statistics_table(
    run: str, steps: Sequence[int], quantities: Sequence[str], blocks: Mapping[str, NDArray[Any]]
) -> "pd.DataFrame":
    """A table of `STATISTICS` over the last dimension of each group's (steps, quantities, rows).

    NaN is skipped; if no value remains there is no row.
    """
    import pandas as pd

    parts = []
    for group, values in blocks.items():
        quantile, mean = (np.nanquantile, np.nanmean) if np.isnan(values).any() else (np.quantile, np.mean)
        with warnings.catch_warnings(), np.errstate(invalid="ignore", over="ignore"):  # inf in a diverged training
            warnings.filterwarnings("ignore", "(All-NaN|Mean of empty) slice", RuntimeWarning)
            means = mean(values, axis=-1, dtype=np.float64, keepdims=True)
            spread = quantile(values, [0, 0.1, 0.5, 0.9, 1], axis=-1)
        figures = np.concatenate([np.moveaxis(spread, 0, -1), means], axis=-1)
        index = pd.MultiIndex.from_product([[run], steps, [group], quantities, STATISTICS], names=list(COLUMNS[:-1]))
        parts.append(pd.Series(figures.reshape(-1), index, dtype=float, name=COLUMNS[-1]).dropna())
    return pd.concat(parts).reset_index()


def _rows(stack: Stack, tensors: Mapping[Tensor, Tensor]) -> Tensor:
    """The tensors of all parameters of a stack as rows."""
    return torch.cat([member.cut([tensors[param] for param in member.params]) for member in stack.members])


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

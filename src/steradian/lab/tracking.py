"""A training looked at from within: what its steps do on the spheres, and how large the phenomena are in them.

These are the experiments of App. C.1.2 and C.1.5, and of Section 4.1. Some steps are recorded and taken plainly, so
that the optimizer's state can be read; those in between are replayed like in any fleet.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from steradian.groups import Group, Layout
from steradian.image import image_step
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.execution import Execution
from steradian.lab.remembering import Remembered
from steradian.lab.training import Training
from steradian.scheme import Step, read_step
from steradian.watching.records import COLUMNS, STATISTICS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ALL", "LIVING", "PHENOMENA", "SEEN", "Tracked", "recorded_steps", "statistics_table"]

SEEN = ("radial", "velocity", "radius", "effective_lr")
"""What every tracked training records of its rows: A⟨c,u⟩ (H1), z (H2, and z² is Theorem 4's variable), r and η^e."""
PHENOMENA = ("deformation", "gradient_memory", "l2_memory", "radius_ratio")
"""(a), (b1), (b2) and (c): the turn of the effective direction that each causes, in radians."""

ALL, LIVING = "all filters", "living filters"
"""Groups over the whole network: every row, and those that have at least a thousandth of their first radius."""
_LIVING = 1e-3


def recorded_steps(total: int, points: int) -> list[int]:
    """Steps to record: half of them evenly spread, half in equal ratios so that the start is seen.

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
    """A training some steps of which are recorded; `Fleet` carries it out like any other.

    Args:
        config: what to train.
        data: its data.
        execution: how.
        weights: as for `Training`.
        points: about how many steps to record; see `recorded_steps`.
        phenomena: measure (a), (b1), (b2) and (c) too, for which every step updates five tensors of the size of the
            weights, as part of what is replayed.
        deliver: called with this training when it is finished.
    """

    def __init__(
        self,
        config: Config | Sequence[Config],
        data: Resident,
        *,
        execution: Execution | None = None,
        weights: dict[str, Tensor] | None = None,
        points: int = 300,
        phenomena: bool = False,
        deliver: Callable[["Tracked"], None] = lambda _: None,
    ) -> None:
        super().__init__(config, data, execution=execution, weights=weights)
        if len(self.members) > 1:
            raise ValueError(f"a tracked training is one alone, got {len(self.members)} members")
        self.batches = _batches(self.groups.groups)
        self.quantities = SEEN + (PHENOMENA if phenomena else ())
        self.deliver = deliver
        self._wanted = recorded_steps(self.config.epochs * self.steps, points)
        self._steps: list[int] = []
        self._values: list[NDArray[np.float32]] = []
        self._rehearsed = False
        self.memory = Remembered(self.optimizers, [self._tensors(b) for b in self.batches]) if phenomena else None

    @property
    def at(self) -> int:
        """The number of the step that comes next, over all epochs."""
        return self.epoch * self.steps + self.steps - self.left

    def take(self, most: int) -> int:
        """Put up to so many steps into the queue, none beyond the next that is recorded, or record that one.

        A step is recorded when what was put into the queue before is done, so that nobody waits for it here.
        """
        at, begun = self.at, len(self._steps)
        if begun < len(self._wanted) and self._wanted[begun] <= at:
            return self.left if self.queue.pending() else self._record(at)
        until = self._wanted[begun] - at if begun < len(self._wanted) else most
        if self.memory is None or self._rehearsed:
            return super().take(min(most, until))
        # Before the first replay steps are rehearsed and undone; what the memory made of them is undone here.
        self._rehearsed = True
        with self.queue.here():
            kept = self.memory.state()
        left = super().take(1)
        with self.queue.here():
            self.memory.redo(kept)
        return left

    def collect(self) -> None:
        """Wait for the epoch's end and read its figures; after the last epoch, deliver."""
        super().collect()
        if self.finished:
            self.deliver(self)

    def table(self) -> "pd.DataFrame":
        """What was recorded: statistics over the living rows of each group, and over the groups `LIVING` and `ALL`.

        The quantity "living" of `ALL` has 1 for each row that lives and 0 for the others; a radius that is not a number
        tells nothing of its row.
        """
        import pandas as pd

        names = ["+".join(group.names) for batch in self.batches for group in batch]
        rows = [group.rows for batch in self.batches for group in batch]
        order = {"+".join(group.names): k for k, group in enumerate(self.groups.groups)}
        ends = np.cumsum([0, *rows]).tolist()
        values = np.stack(self._values) if self._values else np.zeros((0, len(self.quantities), ends[-1]), np.float32)
        radius = values[:, self.quantities.index("radius")]
        living = np.where(radius >= _LIVING * radius[:1], 1, np.nan).astype(np.float32)[:, None]
        spans = sorted(zip(names, ends[:-1], ends[1:], strict=True), key=lambda span: order[span[0]])
        blocks = {name: (values * living)[:, :, start:end] for name, start, end in spans}
        blocks |= {LIVING: values * living, ALL: values}
        share = np.where(np.isnan(radius)[:, None], np.nan, np.isfinite(living)).astype(np.float32)
        parts = [
            statistics_table(self.config.key, self._steps, self.quantities, blocks),
            statistics_table(self.config.key, self._steps, ["living"], {ALL: share}),
        ]
        return pd.concat(parts, ignore_index=True)

    # Recording

    def _record(self, number: int) -> int:
        with self.queue.here():
            before = {
                name: self.groups.params[name].detach().clone() for b in self.batches for g in b for name in g.names
            }
        left = self.take_plainly()
        with self.queue.here():
            found = [self._look(k, batch, before) for k, batch in enumerate(self.batches)]
            self._values.append(torch.cat(found, dim=1).float().cpu().numpy())
        self._steps.append(number)
        return left

    @torch.no_grad()
    def _look(self, number: int, batch: Sequence[Group], before: dict[str, Tensor]) -> Tensor:
        """The quantities of the rows of a batch in the step that was just taken, (quantities, rows)."""
        steps = {
            name: read_step(_owner(self.optimizers, param), param, before=before[name])
            for name, param in ((name, self.groups.params[name]) for group in batch for name in group.names)
        }
        first = next(iter(steps.values()))
        a, b = (_rows(batch, {name: getattr(step, part) for name, step in steps.items()}) for part in "ab")
        step = Step(a, b, first.lr, l2=first.l2, decay=first.decay, beta=first.beta)
        image = image_step(_rows(batch, before), step, check=False)
        seen = [getattr(image, name) for name in SEEN]
        if self.memory is not None:
            effects = self.memory.part(number).phenomena(step)
            seen += [getattr(effects, name).angle for name in PHENOMENA]
        return torch.stack(seen)

    def _tensors(self, batch: Sequence[Group]) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
        """What of each parameter of a batch, as rows: of the point itself, or of its gradient."""
        params = {name: self.groups.params[name] for group in batch for name in group.names}
        return lambda what: _rows(batch, {name: what(param) for name, param in params.items()})

    # State

    def state(self, number: int = 0) -> dict[str, Any]:
        """The training's state, with what was recorded."""
        values = torch.from_numpy(np.stack(self._values)) if self._values else torch.zeros(0)
        memory = None if self.memory is None else self.memory.state(device="cpu")
        tracked = {"steps": list(self._steps), "values": values, "memory": memory}
        return {**super().state(number), "tracked": tracked}

    def load(self, *states: dict[str, Any]) -> None:
        """Go on from a state."""
        tracked = states[0]["tracked"]
        steps = list(tracked["steps"])
        kinds = tracked["values"].shape[1] if steps else len(self.quantities)
        if (
            steps != self._wanted[: len(steps)]
            or kinds != len(self.quantities)
            or (self.memory is None) != (tracked["memory"] is None)
        ):
            raise ValueError("it was begun with other points, or with other quantities: ask for the same")
        super().load(*states)
        self._steps, self._values = list(tracked["steps"]), list(tracked["values"].numpy())
        if self.memory is not None:
            with self.queue.here():
                self.memory.load(tracked["memory"], device=self.data.device)


def statistics_table(
    run: str, steps: Sequence[int], quantities: Sequence[str], blocks: Mapping[str, NDArray[Any]]
) -> "pd.DataFrame":
    """A table of `watch.records.STATISTICS` over the last dimension of each group's (steps, quantities, rows).

    NaN counts as absent; where nothing is left there is no row.
    """
    import pandas as pd

    parts = []
    for group, values in blocks.items():
        quantile, mean = (np.nanquantile, np.nanmean) if np.isnan(values).any() else (np.quantile, np.mean)
        with warnings.catch_warnings(), np.errstate(invalid="ignore", over="ignore"):  # infinite where it diverges
            warnings.filterwarnings("ignore", "(All-NaN|Mean of empty) slice", RuntimeWarning)
            means = mean(values, axis=-1, dtype=np.float64, keepdims=True)
            spread = quantile(values, [0, 0.1, 0.5, 0.9, 1], axis=-1)
        figures = np.concatenate([np.moveaxis(spread, 0, -1), means], axis=-1)
        index = pd.MultiIndex.from_product([[run], steps, [group], quantities, STATISTICS], names=list(COLUMNS[:-1]))
        parts.append(pd.Series(figures.reshape(-1), index, dtype=float, name=COLUMNS[-1]).dropna())
    return pd.concat(parts).reset_index()


def _batches(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups whose rows have one length: looked at together, since launches cost more than rows."""
    made: dict[int, list[Group]] = {}
    for group in groups:
        made.setdefault(group.size, []).append(group)
    return list(made.values())


def _rows(batch: Sequence[Group], tensors: dict[str, Tensor]) -> Tensor:
    """The rows of several groups behind each other, a copy."""
    return torch.cat([Layout(group.layout).join([tensors[name] for name in group.names]) for group in batch])


def _owner(optimizers: Sequence[Optimizer], param: Tensor) -> Optimizer:
    return next(o for o in optimizers if any(param is p for group in o.param_groups for p in group["params"]))

"""Studies that record what happens within trainings: hypotheses and phenomena by step, comparisons of trajectories.

Recorded steps of a training are run without replaying them, so that the optimizer's state can be read; those in between
are replayed as in any fleet. `st.watch`, with which the tests compare, observes steps by hooks, which a replayed CUDA
graph does not call: between two recorded steps it could not keep the sums of the phenomena.
"""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.nn import functional

from steradian import geometry, optim
from steradian.groups import Group, Groups
from steradian.image import image_step
from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.fleet import Progress, prepare_device, read_state
from steradian.lab.recipes import trajectories
from steradian.lab.results import Result, Tracks, environment
from steradian.lab.study import Study, pick_device
from steradian.lab.training import Training, Weights, copied
from steradian.phenomena import Memory
from steradian.scheme import read_step
from steradian.watching.records import COLUMNS, STATISTICS
from steradian.watching.sources import PHENOMENA

__all__ = ["PHENOMENA", "RECORDED", "Tracked", "compare_trajectories", "track_study", "trajectory_study"]

RECORDED = ("radial", "velocity", "radius", "effective_lr")
"""What every tracked training records of its rows: A⟨c,u⟩ (H1), z (H2, and z² is Theorem 4's variable), r and η^e."""
ALL, LIVING = "all filters", "living filters"
"""Groups over the whole network: every row, and those that have at least a thousandth of their first radius."""
_LIVING = 1e-3


def recorded_steps(total: int, points: int) -> list[int]:
    """Steps to record, with the first and the last: half of them evenly spaced, half in equal ratios."""
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    even = np.linspace(0, total - 1, max(2, points - points // 2))
    ratios = np.geomspace(1, total, points // 2) - 1
    return sorted({round(float(step)) for step in (*even, *ratios)})


def statistics_table(
    run: str, steps: Sequence[int], quantities: Sequence[str], blocks: Mapping[str, NDArray[Any]]
) -> pd.DataFrame:
    """A table of `STATISTICS` over the last dimension of each group's (steps, quantities, rows), without NaN."""
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


class Tracked(Training):
    """A training that records some of its steps (App. C.1.2 and C.1.5, Section 4.1); `Fleet` runs it like any other.

    Args:
        points: about how many steps to record; see `recorded_steps`.
        phenomena: measure (a), (b1), (b2) and (c) too, for which every step updates five tensors of the size of the
            weights; this is captured and replayed with the step.
        tracks: where the recorded steps go when it is finished; None: nowhere.
        training: and `how`: as for `Training`.
    """

    def __init__(
        self, *training: Any, points: int = 300, phenomena: bool = False, tracks: Tracks | None = None, **how: Any
    ) -> None:
        super().__init__(*training, **how)
        self.quantities, self.tracks = RECORDED + (PHENOMENA if phenomena else ()), tracks
        self.memory = Memory(None, check=False) if phenomena else None
        self._optimizer = self.optimizers[0]  # which has all rows of the network
        self._wanted = recorded_steps(self.config.epochs * self.steps, points)
        self._recorded, self._values = list[int](), list[NDArray[np.float32]]()
        if phenomena:
            letters = set("".join(str(group.get("without", "")) for group in self._optimizer.param_groups))
            sums = isinstance(self._optimizer, torch.optim.SGD | torch.optim.Adam | optim.Adam)
            if letters & {"b", "c"} or not sums:
                where = "where momentum is a sum of past gradients, with SGD-M, Adam, AdamW† and Adam w/o (a)"
                raise ValueError(f"phenomena are measured {where}; got {self.config.method}")
            # A hook that runs before the optimizer's step is captured and replayed with it.
            self._optimizer.register_step_pre_hook(self._remember)

    def take(self, most: int) -> int:
        """Enqueue up to `most` steps, but none beyond the next that is recorded; or record it if the queue is empty."""
        at = self.epoch * self.steps + self.steps - self.left  # number of the next step, over all epochs
        if len(self._recorded) == len(self._wanted):
            return super().take(most)
        until = self._wanted[len(self._recorded)] - at
        if until > 0:
            return super().take(min(most, until))
        return self.left if self.queue.pending() else self._record(at)

    def collect(self) -> bool:
        """Wait for the evaluation and read the figures of the epoch; after the last epoch, store what was recorded."""
        over = super().collect()
        if over and self.finished and self.tracks is not None:
            self.tracks.add(self.config, self.table(), steps=self.steps, environment=environment(self.data.device))
        return over

    def table(self) -> pd.DataFrame:
        """The recorded statistics: over the living rows of each group, and over the groups `LIVING` and `ALL`.

        The quantity "living" of `ALL` is 1 for each living row and 0 for others, without rows whose radius is NaN.
        """
        values = np.stack(self._values)
        radius = values[:, self.quantities.index("radius")]
        living = np.where(radius >= _LIVING * radius[:1], 1, np.nan).astype(np.float32)[:, None]
        blocks = {"+".join(group.names): (values * living)[:, :, span] for group, span in self.spans()}
        blocks |= {LIVING: values * living, ALL: values}
        share = np.where(np.isnan(radius)[:, None], np.nan, np.isfinite(living)).astype(np.float32)
        about = self.config.key, self._recorded
        tables = statistics_table(*about, self.quantities, blocks), statistics_table(*about, ["living"], {ALL: share})
        return pd.concat(tables, ignore_index=True)

    def spans(self) -> list[tuple[Group, slice]]:
        """Each group, and the place of its rows among those of the network."""
        groups = self.groups.groups
        ends = np.cumsum([group.n_rows for group in groups]).tolist()
        return [(group, slice(end - group.n_rows, end)) for group, end in zip(groups, ends, strict=True)]

    def _record(self, number: int) -> int:
        with self.queue.here():
            before = {name: param.detach().clone() for name, param in self.groups.params.items()}
        left, blocks = self.take_plainly(), []
        with self.queue.here(), torch.no_grad():
            for group, span in self.spans():
                points = [before[name] for name in group.names]
                params = [self.groups.params[name] for name in group.names]
                steps = [read_step(self._optimizer, p, before=x) for p, x in zip(params, points, strict=True)]
                image = image_step(points, steps, group.spec, check=False)
                found = [getattr(image, name) for name in RECORDED]
                if self.memory is not None:
                    part = Memory(group.spec, check=False)
                    part.load({name: rows[span, : group.size] for name, rows in self.memory.state().items()})
                    effects = part.phenomena(steps)
                    found += [getattr(effects, name) for name in PHENOMENA]
                blocks.append(torch.stack(found))
            self._values.append(torch.cat(blocks, dim=1).float().cpu().numpy())
        self._recorded.append(number)
        return left

    @torch.no_grad()
    def _remember(self, *_: Any) -> None:
        """Update the sums of the phenomena, of norms and inner products alone, which the padding leaves as they are."""
        assert self.memory is not None
        # Rows padded to one length: launches cost more than arithmetic.
        longest = max(group.size for group in self.groups.groups)
        points, gradients = (
            torch.cat([functional.pad(rows, (0, longest - rows.shape[1])) for rows in kind])
            for kind in (self.rows(), self.rows(gradients=True))
        )
        settings = self._optimizer.param_groups[0]
        beta = settings["betas"][0] if "betas" in settings else settings["momentum"]
        self.memory.update(points, gradients, beta=float(beta))

    def _changing(self, device: str | None = None) -> dict[str, Any]:
        memory = None if self.memory is None else copied(self.memory.state(), device=device)
        return {**super()._changing(device), "memory": memory}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        if self.memory is not None:
            self.memory.load(copied(state["memory"], device=str(self.data.device)))

    def state(self) -> dict[str, Any]:
        """The training's state and the recorded values."""
        values = torch.from_numpy(np.stack(self._values)) if self._values else torch.zeros(0)
        return {**super().state(), "recorded": {"steps": list(self._recorded), "values": values}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        steps, values = state["recorded"]["steps"], state["recorded"]["values"]
        if steps != self._wanted[: len(steps)] or (self.memory is None) != (state.get("memory") is None):
            raise ValueError("it was started with other points or other quantities: use the same")
        super().load(state)
        self._recorded, self._values = list(steps), list(values.numpy())


def track_study(configs: Sequence[Config], study: Study, *, phenomena: Collection[str] = (), points: int = 300) -> bool:
    """Train with about `points` steps of each training recorded; returns whether everything is finished.

    Curves are stored too. A run is recorded as a whole and never repeated. In trainings of the methods `phenomena`,
    (a), (b1), (b2) and (c) are measured too.
    """
    tracks = study.tracks
    recorded = set(tracks.about())
    if lost := sorted({config.key for config in configs} & study.store.keys() - recorded):
        raise ValueError(f"{study.store.path} contains {', '.join(lost)}, of which {tracks.path} has no record")
    table = tracks.table()
    measured = set(table[table["quantity"].isin(PHENOMENA)]["run"])
    if bare := sorted({config.key for config in configs if config.method in phenomena} & recorded - measured):
        mend = "choose another name for the study that measures them"
        raise ValueError(f"{tracks.path} contains {', '.join(bare)} without the phenomena: {mend}")

    def make(config: Config, *args: Any, **more: Any) -> Tracked:
        return Tracked(config, *args, points=points, phenomena=config.method in phenomena, tracks=tracks, **more)

    return study.run(configs, make=make)


def compare_trajectories(
    configs: Sequence[Config], data: Resident, weights: Weights, *, points: int = 200, progress: Progress | None = None
) -> pd.DataFrame:
    """Section 3.3: cosines of every filter under each scheme with that under the first one, over the same batches.

    The schemes differ by method, rate and momentum, start from `weights`, and are compared at about `points` steps.

    Returns:
        The "cosine" and "angle" by number of steps; the run is the key of the reference. Statistics over the filters of
        a parameter, "METHOD: PARAMETER", and of the whole network, "METHOD: all filters"; for three filters of every
        block, "METHOD: PARAMETER[FILTER]", the cosine with the statistic "mean".
    """
    trainings, progress = [Training(config, data, weights=weights) for config in configs], progress or Progress()
    reference, last, done = trainings[0], trainings[-1], 0
    wanted = [step + 1 for step in recorded_steps(configs[0].epochs * reference.steps, points)]
    found: list[NDArray[np.float64]] = []
    while not reference.finished:
        while reference.left:
            for training in trainings:
                training.take(1)
            done += 1
            if done in wanted:
                found.append(_angles(trainings))
        for training in trainings:
            training.run_epoch()  # what is left of it: the evaluation
        progress.epoch(last.config, last.curves)
    progress.finished(Result(last.config, last.curves, last.diverged))
    return _comparison_table(configs, reference.groups, wanted[: len(found)], np.stack(found, axis=1))


def _angles(trainings: Sequence[Training]) -> NDArray[np.float64]:
    """Angles of each scheme but the first with the first, over all filters of the network, (schemes − 1, filters)."""
    for training in trainings:
        training.queue.wait()
    reference, *others = ([geometry.split(rows.double(), check=False)[1] for rows in each.rows()] for each in trainings)
    found = [[geometry.angle(u, p).squeeze(-1) for u, p in zip(reference, other, strict=True)] for other in others]
    return torch.stack([torch.cat(each) for each in found]).cpu().numpy()


def _comparison_table(
    configs: Sequence[Config], groups: Groups, steps: Sequence[int], found: NDArray[np.float64]
) -> pd.DataFrame:
    """The table of angles (schemes − 1, steps, filters), with the same three filters of every block for all schemes."""
    random, members = np.random.Generator(np.random.Philox(key=0)), dict[str, list[tuple[str, int]]]()
    sizes = {group.names[0]: group.n_rows for group in groups.groups}
    for name, size in sizes.items():
        members.setdefault(name.rsplit(".", 2)[0], []).extend((name, k) for k in range(size))
    chosen = []
    for filters in members.values():
        chosen += [filters[k] for k in sorted(random.choice(len(filters), min(3, len(filters)), replace=False))]
    run, blocks, singles = configs[0].key, dict[str, NDArray[np.float64]](), []
    for config, angles in zip(configs[1:], found, strict=True):
        values = np.stack([np.cos(angles), angles], axis=1)
        layers = dict(zip(sizes, np.split(values, np.cumsum([*sizes.values()])[:-1], axis=2), strict=True))
        blocks |= {f"{config.method}: {name}": own for name, own in {ALL: values, **layers}.items()}
        for name, k in chosen:
            words = {"run": run, "group": f"{config.method}: {name}[{k}]", "quantity": "cosine", "statistic": "mean"}
            singles.append(pd.DataFrame({"step": steps, "value": layers[name][:, 0, k], **words}))
    spread = statistics_table(run, steps, ["cosine", "angle"], blocks)
    return pd.concat([spread, *singles], ignore_index=True)[list(COLUMNS)]


def trajectory_study(starts: Sequence[Config], study: Study, *, tuning: int = 10, points: int = 100) -> bool:
    """Section 3.3: train the networks that are missing, then compare SGD, AdaGradG and AdaGrad from each of them.

    `starts` are the trainings of the networks, as `recipes.pretraining` gives them. They are compared over `tuning`
    epochs, after about `points` steps. Returns whether everything is finished.
    """
    schemes = {start: trajectories([start], epochs=tuning) for start in starts}
    left = [start for start in starts if schemes[start][0].key not in study.tracks.about()]
    if not study.run(left, keep_weights=True):
        return False
    where, progress = pick_device(study.device), study.progress
    prepare_device(where, exact=True)
    with progress:
        progress.begin(len(starts), len(starts) - len(left))
        for start in left:
            if time.monotonic() > study.deadline:
                return False
            path = study.work / "weights" / f"{start.key}.pt"
            if not path.exists():
                raise ValueError(f"no {path}: copy that folder here, or remove {start.key} from {study.store.path}")
            data = Resident(load(start.data, study.roots.get(start.data)), where)
            compared = compare_trajectories(schemes[start], data, read_state(path), points=points, progress=progress)
            steps = data.counts["train"] // start.batch_size
            study.tracks.add(schemes[start][0], compared, steps=steps, environment=environment(where))
    return True

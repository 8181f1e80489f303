"""Trajectories of several schemes from one point, compared filter by filter: the experiment of Section 3.3."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steradian import geometry
from steradian.groups import Layout
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.execution import Execution
from steradian.lab.tracking import ALL, recorded_steps, statistics_table
from steradian.lab.training import Training
from steradian.watching.records import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["chosen_filters", "compare_trajectories"]


def chosen_filters(training: Training, *, each: int = 3, seed: int = 0) -> dict[str, list[int]]:
    """So many filters of every block of a network, by parameter, drawn once for all schemes."""
    random = np.random.Generator(np.random.Philox(key=seed))
    blocks: dict[str, list[tuple[str, int]]] = {}
    for group in training.groups.groups:
        name = group.names[0]
        blocks.setdefault(name.rsplit(".", 2)[0], []).extend((name, k) for k in range(group.rows))
    chosen: dict[str, list[int]] = {}
    for filters in blocks.values():
        for k in sorted(random.choice(len(filters), size=min(each, len(filters)), replace=False).tolist()):
            chosen.setdefault(filters[k][0], []).append(filters[k][1])
    return chosen


def compare_trajectories(
    configs: Sequence[Config],
    data: Resident,
    weights: dict[str, Tensor],
    *,
    points: int = 200,
    execution: Execution | None = None,
    tell: Callable[[Training], object] = lambda _: None,
) -> "pd.DataFrame":
    """Cosine of every filter under each scheme with the same filter under the first one, over the same batches.

    Args:
        configs: the schemes, that of the reference first; they differ by method, rate and momentum alone.
        data: their data.
        weights: where all of them start.
        points: about how many steps to compare after; see `tracking.recorded_steps`.
        execution: how to train.
        tell: called after every epoch of the last scheme.

    Returns:
        A table of "cosine" and "angle" after so many steps, whose run is the key of the reference. Statistics over the
        filters of the group "METHOD: PARAMETER" and over those of the whole network, "METHOD: all filters"; for three
        filters of every block the cosine, in the group "METHOD: PARAMETER[FILTER]" with the statistic "mean".
    """
    trainings = [Training(config, data, execution=execution, weights=weights) for config in configs]
    steps, done = trainings[0].steps, 0
    wanted = [step + 1 for step in recorded_steps(configs[0].epochs * steps, points)]
    seen: list[NDArray[np.float64]] = []
    while not trainings[0].finished:
        left = steps
        while left:
            count = min(wanted[len(seen)] - done, left)
            left = min(training.take(count) for training in trainings)
            done += count
            if done == wanted[len(seen)]:
                seen.append(_angles(trainings))
        for training in trainings:
            training.end_epoch()
        for training in trainings:
            training.collect()
        tell(trainings[-1])
    return _table(trainings, wanted[: len(seen)], np.stack(seen))


def _angles(trainings: Sequence[Training]) -> NDArray[np.float64]:
    """Of each scheme but the first with the first, over all filters of the network, (schemes − 1, filters)."""
    for training in trainings:
        training.queue.wait()
    reference, *others = (_directions(training) for training in trainings)
    found = [[geometry.angle(u, p).squeeze(-1) for u, p in zip(reference, other, strict=True)] for other in others]
    return torch.stack([torch.cat(each) for each in found]).cpu().numpy()


def _directions(training: Training) -> list[Tensor]:
    """Of all rows, parameter by parameter."""
    params = training.groups.params
    parts = [
        Layout(g.layout).join([params[name].detach().double() for name in g.names]) for g in training.groups.groups
    ]
    return [geometry.split(part, check=False)[1] for part in parts]


def _table(trainings: Sequence[Training], steps: Sequence[int], seen: NDArray[np.float64]) -> "pd.DataFrame":
    import pandas as pd

    run, groups = trainings[0].config.key, trainings[0].groups.groups
    ends = np.cumsum([0, *(group.rows for group in groups)]).tolist()
    filters = chosen_filters(trainings[0])
    blocks: dict[str, NDArray[np.float64]] = {}
    singles = []
    for number, other in enumerate(trainings[1:]):
        angles, method = seen[:, number], other.config.method
        values = np.stack([np.cos(angles), angles], axis=1)
        blocks[f"{method}: {ALL}"] = values
        for group, start, end in zip(groups, ends[:-1], ends[1:], strict=True):
            name = group.names[0]
            blocks[f"{method}: {name}"] = values[:, :, start:end]
            for k in filters.get(name, []):
                cosines = {"step": steps, "value": values[:, 0, start + k]}
                words = {"run": run, "group": f"{method}: {name}[{k}]", "quantity": "cosine", "statistic": "mean"}
                singles.append(pd.DataFrame({**cosines, **words}))
    spread = statistics_table(run, steps, ["cosine", "angle"], blocks)
    return pd.concat([spread, *singles], ignore_index=True)[list(COLUMNS)]

"""Trainings looked at from within: the hypotheses of Theorem 1, and the trajectories of several schemes compared.

These are the experiments of App. C.1.2 and C.1.5, and of Section 3.3. Between the points that are recorded, steps are
replayed like in any fleet.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import geometry
from steradian.groups import Layout
from steradian.image import image_step
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.training import Execution, Training
from steradian.scheme import read_step
from steradian.watch.monitor import watch
from steradian.watch.records import Records

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["chosen_filters", "compare_trajectories", "track_hypotheses", "watch_training"]

Told = Callable[[Training], object]


def track_hypotheses(
    config: Config,
    data: Resident,
    *,
    points: int = 400,
    execution: Execution | None = None,
    tell: Told = lambda _: None,
) -> tuple[Training, Records]:
    """Train, and at evenly spread steps record what the step does on the spheres.

    For each parameter, over its rows: "radial" A⟨c,u⟩, which H1 bounds by 1; "velocity" z, which H2 bounds by π;
    "taylor" z², the variable of Theorem 4's expansion; "angle", "radius" and "effective_lr".

    Args:
        config: the training.
        data: its data.
        points: how many steps to record.
        execution: how to train.
        tell: called after every epoch.

    Returns:
        The finished training and the records, whose run is the training's key.
    """
    training = Training(config, data, execution=execution)
    records, total = Records(config.key), config.epochs * training.steps
    every = max(1, total // points)
    done = 0
    while not training.finished:
        left = training.steps
        while left:
            if done % every == 0:
                left = _recorded_step(training, records, done)
                done += 1
                continue
            count = min(every - done % every, left)
            left = training.take(count)
            done += count
        training.end_epoch()
        training.collect()
        tell(training)
    return training, records


def _recorded_step(training: Training, records: Records, number: int) -> int:
    params = {name: training.groups.params[name] for name in training.groups.layouts}
    with training.queue.here():
        before = {name: param.detach().clone() for name, param in params.items()}
        left = training.take_plainly()
        for name, layout in training.groups.layouts.items():
            step = read_step(_owner(training.optimizers, params[name]), params[name], before=before[name])
            image = image_step(before[name], step, layout)
            seen = {"velocity": image.velocity, "taylor": image.taylor, "angle": image.angle, "radius": image.radius}
            if image.radial is not None and image.effective_lr is not None:
                seen |= {"radial": image.radial, "effective_lr": image.effective_lr}
            records.add(number, name, {quantity: values.double().cpu().numpy() for quantity, values in seen.items()})
    return left


def _owner(optimizers: Sequence[Optimizer], param: Tensor) -> Optimizer:
    return next(o for o in optimizers if any(param is p for group in o.param_groups for p in group["params"]))


def watch_training(
    config: Config,
    data: Resident,
    folder: Path,
    *,
    points: int = 400,
    execution: Execution | None = None,
    tell: Told = lambda _: None,
) -> tuple[Training, "pd.DataFrame"]:
    """Train with every step followed by `watch`, the phenomena of Section 4.1 among what it records.

    Steps are not replayed, since a replayed step calls no hooks.

    Args:
        config: the training.
        data: its data.
        folder: where the run is recorded, anew; `steradian report` makes a page of it.
        points: how many steps to record.
        execution: how to train.
        tell: called after every epoch.

    Returns:
        The finished training and the table of its run, whose name is the training's key.
    """
    plainly = replace(execution or Execution(), captured=False)
    training = Training(config, data, execution=plainly)
    [optimizer] = training.optimizers
    shutil.rmtree(folder, ignore_errors=True)
    every = max(1, config.epochs * training.steps // points)
    kept = {"run": config.key, "config": config.to_dict(), "rows_every": 0}
    with watch(optimizer, training.groups, every=every, phenomena=True, to=folder, **kept) as seen:
        while not training.finished:
            training.run_epoch()
            seen.log({name: values[-1] for name, values in training.curves.items()})
            tell(training)
    if seen.error is not None:
        raise RuntimeError(f"watching {config.key} failed: {seen.error}") from seen.error
    return training, seen.records()


def chosen_filters(training: Training, *, each: int = 3, seed: int = 0) -> dict[str, list[int]]:
    """So many filters of every parameter that has rows, drawn once for all schemes."""
    random = np.random.Generator(np.random.Philox(key=seed))
    chosen = {}
    for group in training.groups.groups:
        picked = random.choice(group.rows, size=min(each, group.rows), replace=False)
        chosen[group.names[0]] = sorted(picked.tolist())
    return chosen


def compare_trajectories(
    configs: Sequence[Config],
    data: Resident,
    weights: dict[str, Tensor],
    *,
    points: int = 200,
    execution: Execution | None = None,
    tell: Told = lambda _: None,
) -> Records:
    """Cosine of every filter under each scheme with the same filter under the first one, over the same batches.

    Args:
        configs: the schemes, that of the reference first; they differ by method, rate and momentum alone.
        data: their data.
        weights: where all of them start.
        points: how many steps to compare at.
        execution: how to train.
        tell: called after every epoch of the last scheme.

    Returns:
        Records with the quantity "cosine" under the group "METHOD: PARAMETER" over all its filters, and for three
        filters of every parameter under "METHOD: PARAMETER[FILTER]".
    """
    trainings = [Training(config, data, execution=execution, weights=weights) for config in configs]
    records, steps = Records(configs[0].key), trainings[0].steps
    every = max(1, configs[0].epochs * steps // points)
    filters, done = chosen_filters(trainings[0]), 0
    while not trainings[0].finished:
        left = steps
        while left:
            count = min(every - done % every, left)
            left = min(training.take(count) for training in trainings)
            done += count
            if done % every == 0 or not left:
                _record_cosines(trainings, records, done, filters)
        for training in trainings:
            training.end_epoch()
        for training in trainings:
            training.collect()
        tell(trainings[-1])
    return records


def _record_cosines(trainings: Sequence[Training], records: Records, step: int, filters: dict[str, list[int]]) -> None:
    for training in trainings:
        training.queue.wait()
    reference, *others = trainings
    for other in others:
        for name, layout in reference.groups.layouts.items():
            u, p = (_directions(training, name, Layout(layout)) for training in (reference, other))
            cosines = geometry.dot(u, p).squeeze(-1).cpu().numpy()
            label = f"{other.config.method}: {name}"
            records.add(step, label, {"cosine": cosines})
            for k in filters[name]:
                records.add(step, f"{label}[{k}]", {"cosine": [float(cosines[k])]})


def _directions(training: Training, name: str, layout: Layout) -> Tensor:
    rows = layout.rows(training.groups.params[name].detach())
    return geometry.split(rows.to(torch.float64))[1]

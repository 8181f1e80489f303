"""`st.match`: settings with which an optimizer turns rows as far as another; `replay`: Angular along a recorded run.

The angle per step in equilibrium is a function of the settings (`steradian.balance`); where an optimizer fixes the
radius, its rate is the angle up to a factor. `match` takes an angle from a source and solves for the setting that gives
it. What it cannot know is said by `unknown`: weights that are not invariant, transients, and directions.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from steradian import optim
from steradian.balance import AT_ZERO, balance_of
from steradian.groups import Groups
from steradian.watching.records import WORDS, RecordedRun, labels, listed, read_run

__all__ = ["match", "replay", "unknown"]

_LARGEST = 0.5  # radians: the largest angle per step that Angular takes; an equilibrium is far below it
_AT_PEAK = 0.9  # a run's angle is measured at rates above this share of its largest one
_APART = 1.5  # angles that differ by more than this factor are said to
_EXACT = 1e-6  # relative error of a matched angle: balances are computed in single precision
_MEASURED = ["angle", "radius", "gradient_norm", "equilibrium_angle", "lr"]
_PER_RATE: dict[type[Optimizer], Callable[[Mapping[str, Any]], float]] = {
    optim.Angular: lambda _: 1.0,
    # m has the weights (1−β1)β1^k and v is the mean of ‖h‖².
    optim.AdamG: lambda group: math.sqrt((1 - group["betas"][0]) / (1 + group["betas"][0])),
    # v approaches ‖∇L(u)‖²/(1−β).
    optim.AdaGradG: lambda group: math.sqrt(1 - group["beta"]),
}
"""Optimizers that fix the radius, with the angle over the rate if successive gradients are uncorrelated."""


class _Turn(NamedTuple):
    """An angle per step, γ = ‖∇L(u)‖ and the entries in a row if known; of a run, the layer and its equilibrium."""

    angle: float
    slope: float | None
    size: int | None
    layer: str = ""
    label: str = ""
    equilibrium: float = math.nan


def match(
    source: Optimizer | str | Path | RecordedRun | float,
    to: type[Optimizer],
    *,
    only: str | None = None,
    slope: float | None = None,
    size: int | None = None,
    **fixed: Any,
) -> dict[str, Any]:
    """Settings with which `to` turns invariant rows by the source's angle per step.

    SGD, Adam (also without (a), (b), (c)), AdamW, NAdam, RAdam, Muon and Lion have an angle through their equilibrium
    (`balance`), so that lr and weight_decay are determined together: give one of them. In Angular, AdamG and AdaGradG
    lr alone determines it. The angle of a recorded run is that of its median layer: of invariant ones if there are
    any, each in the root mean square over the second half of the steps at the run's largest rate.

    Args:
        source: an optimizer, for the angle of its present settings in equilibrium; a recorded run or its folder, for
            the measured angle; or an angle in radians.
        to: class of the optimizer.
        only: of a run, the layers whose names match this glob pattern.
        slope: γ = ‖∇L(u)‖, which is r‖∇L(x)‖. Only the angle of Adam with coupled decay depends on it, and on
            `size`; a recorded run has both.
        size: the number d of entries in a row.
        **fixed: settings of `to`; defaults hold for those that are not given.

    Returns:
        `fixed` and the setting that was left open, with six digits. A warning says why the source's angle may not be
        the one that is meant: a schedule that has changed the rate, layers that are unproved or turn by other angles.

    Raises:
        ValueError: the source has no angle, or `fixed` leaves open more or less than one setting.

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(4, 3))], lr=0.1, momentum=0.9, weight_decay=5e-4)
    >>> match(sgd, to=optim.Angular)
    {'lr': 0.00725476}
    >>> match(sgd, to=torch.optim.AdamW, lr=1e-3)
    {'lr': 0.001, 'weight_decay': 0.5}
    """
    if not (isinstance(to, type) and issubclass(to, Optimizer)):
        got = repr(to) if isinstance(to, type | str) else f"an instance of {type(to).__name__}"
        raise TypeError(f"to must be a class of optimizers, such as torch.optim.AdamW, got {got}")
    choices = ("lr",) if issubclass(to, tuple(_PER_RATE)) else ("lr", "weight_decay")
    left = [name for name in choices if name not in fixed]
    if len(left) != 1:
        given = ", ".join(f"{name}={fixed[name]!r}" for name in choices if name in fixed) or "neither"
        wanted = "lr must be left open" if choices == ("lr",) else "one of lr and weight_decay must be given"
        raise ValueError(f"{wanted} to match the angle of {to.__name__}, got {given}")
    [name] = left
    # A row of its own: settings that `without` depends on, defaults, and errors in `fixed`.
    optimizer = to([{"params": [nn.Parameter(torch.ones(1, 2))], "rows": "filter"}], **{name: 0.01, **fixed})
    settings = optimizer.param_groups[0]

    def solved(turn: _Turn) -> float:
        return _solve(lambda value: _angle(optimizer, {**settings, name: value}, turn.slope, turn.size), turn.angle)

    turns = _turns(source, only, slope, size)
    value = np.median([solved(turn) for turn in turns])
    for doubt in _doubts(source, turns):
        warnings.warn(doubt, stacklevel=2)
    return {**fixed, name: float(f"{value:.6g}")}


def _turns(source: Any, only: str | None, slope: float | None, size: int | None) -> list[_Turn]:
    """The source's angle; of a run, those of its layers."""
    if isinstance(source, Optimizer):
        return [_Turn(_angle_of(source, slope, size), slope, size)]
    if isinstance(source, Real):
        if not 0 < float(source) <= _LARGEST:
            raise ValueError(f"source must be an angle of more than 0 and at most {_LARGEST} radians, got {source}")
        return [_Turn(float(source), slope, size)]
    if not isinstance(source, str | Path | RecordedRun):
        raise TypeError(f"source must be an optimizer, a recorded run or an angle, got {type(source).__name__}")
    run = source if isinstance(source, RecordedRun) else read_run(source)
    chosen = run.table["quantity"].isin(_MEASURED)
    chosen &= (run.table["statistic"] == "median") | (run.table["quantity"] == "lr")
    wide = run.table[chosen].pivot_table(index=["group", "step"], columns="quantity", values="value", observed=True)
    wide = wide.reindex(columns=_MEASURED)
    label, found = labels(run), []
    for entry in run.about["groups"]:
        name, proved = entry["name"], label[entry["name"]] == "invariant"
        layer = wide[(wide.index.get_level_values("group") == name) & (wide["angle"] > 0)].droplevel("group")
        if layer.empty or not (proved or (entry.get("rows") or 1) > 1) or not fnmatchcase(name, only or "*"):
            continue
        layer = layer[layer["lr"] >= _AT_PEAK * layer["lr"].max()]
        layer = layer[layer.index >= (layer.index[0] + layer.index[-1]) / 2]
        layer = layer.assign(slope=layer["radius"] * layer["gradient_norm"])
        root = (layer**2).mean() ** 0.5
        known = slope or (root["slope"] if root["slope"] > 0 else None)
        found.append(_Turn(root["angle"], known, size or entry["size"], name, label[name], root["equilibrium_angle"]))
    found = [turn for turn in found if turn.label == "invariant"] or found
    if not found:
        raise ValueError(f"source: no layer{f' that matches {only!r}' if only else ''} turns in the run {run.name}")
    return found


def _angle_of(optimizer: Optimizer, slope: float | None, size: int | None) -> float:
    """The angle of an optimizer's rows; of all groups with decay if no group has rows."""
    groups = [group for group in optimizer.param_groups if group.get("rows") is not None]
    if not groups and not isinstance(optimizer, tuple(_PER_RATE)):
        groups = [group for group in optimizer.param_groups if group.get("weight_decay")] or optimizer.param_groups
    angles = [_angle(optimizer, group, slope, size) for group in groups]
    if not angles:
        raise ValueError(f"source: no param group of this {type(optimizer).__name__} has rows")
    if not math.isclose(min(angles), max(angles), rel_tol=1e-6):
        several = ", ".join(f"{angle:.3g}" for angle in angles)
        raise ValueError(f"source: its param groups turn by different angles, {several}; match one of these")
    return angles[0]


def _angle(optimizer: Optimizer, settings: Mapping[str, Any], slope: float | None, size: int | None) -> float:
    """The angle per step under the settings of a param group; a ValueError if there is none."""
    kind, rate = type(optimizer).__name__, float(settings["lr"])
    if not rate:
        raise ValueError(f"{kind} has no angle in equilibrium: {AT_ZERO}")
    per_rate = next((_PER_RATE[each] for each in type(optimizer).__mro__ if each in _PER_RATE), None)
    if per_rate is not None:
        angle = per_rate(settings) * rate
    else:
        balance = balance_of(optimizer, settings, size or 1)
        if isinstance(balance, str):
            raise ValueError(f"{kind} has no angle in equilibrium: {balance}")
        given = 1.0 if slope is None else slope
        _, angles = balance(*(torch.tensor(each, dtype=torch.float64) for each in (rate, [given, 2 * given])))
        angle = angles[0].item()
        if (slope is None or size is None) and not torch.isclose(*angles):
            raise ValueError(WORDS["match"]["coupled"].format(kind=kind))
    if not 0 < angle < math.inf:
        raise ValueError(f"{kind} has no angle in equilibrium under these settings: it would be {angle}")
    return angle


def _solve(angle: Callable[[float], float], wanted: float) -> float:
    """Where an angle is the wanted one, by secants between logarithms: angles are powers of the settings, or nearly."""
    x, y = (-9.0, -5.0), [math.log(angle(math.exp(each)) / wanted) for each in (-9.0, -5.0)]
    for _ in range(50):
        if abs(y[1]) < _EXACT:
            return math.exp(x[1])
        x = x[1], x[1] - y[1] * (x[1] - x[0]) / (y[1] - y[0])
        y = [y[1], math.log(angle(math.exp(x[1])) / wanted)]
    raise ValueError(f"source: no setting gives its angle of {wanted:.3g} rad")


def unknown(source: Optimizer | str | Path | RecordedRun | float, only: str | None = None) -> list[str]:
    """What a match of this source cannot know, in sentences."""
    doubts = [] if isinstance(source, Optimizer | Real) else _doubts(source, _turns(source, only, None, None))
    return [WORDS["match"]["transient"], WORDS["match"]["rest"], *doubts]


def _doubts(source: Any, turns: list[_Turn]) -> list[str]:
    """Why the angle may not be the one that is meant."""
    words, found = WORDS["match"], list[str]()
    if isinstance(source, Optimizer):
        rates = [(float(group["lr"]), float(group.get("initial_lr", group["lr"]))) for group in source.param_groups]
        if changed := [pair for pair in rates if not math.isclose(*pair)]:
            found.append(words["scheduled"].format(rate=changed[0][0], first=changed[0][1]))
    elif not isinstance(source, Real):
        low, high = min(turns), max(turns)
        out = [turn.layer for turn in turns if abs(math.log(turn.angle / turn.equilibrium)) > math.log(_APART)]
        if turns[0].label != "invariant":
            found.append(words["untested"])
        if high.angle > _APART * low.angle:
            found.append(words["apart"].format(low=low, high=high))
        if out:
            found.append(words["out"].format(layers=listed(out)))
    return found


def replay(optimizer: optim.Angular, source: str | Path | RecordedRun, model_or_groups: nn.Module | Groups) -> LambdaLR:
    """A scheduler that turns each layer by the angle that was recorded for it, step by step.

    Between observed steps angles are interpolated, beyond the last one they stay. The angle of a layer is the median
    of its rows, at most 0.5. Parameters without rows keep their rate, times the recorded rate over its largest value.

    Args:
        optimizer: before its first step. Its param groups are split, so that each layer has its own.
        source: a recorded run or its folder, whose first step is the optimizer's first one.
        model_or_groups: where the names of the parameters come from.

    Returns:
        A scheduler to be stepped after each step of the optimizer.

    Raises:
        ValueError: a layer was not recorded.

    >>> optimizer = optim.Angular(groups.param_groups())  # doctest: +SKIP
    >>> scheduler = replay(optimizer, "runs/a", groups)  # doctest: +SKIP
    """
    if not isinstance(optimizer, optim.Angular):
        raise TypeError(f"optimizer must be an Angular, whose rate is an angle, got {type(optimizer).__name__}")
    run = source if isinstance(source, RecordedRun) else read_run(source)
    named = model_or_groups.params if isinstance(model_or_groups, Groups) else dict(model_or_groups.named_parameters())
    names = {id(param): name for name, param in named.items()}
    recorded = {each: entry["name"] for entry in run.about["groups"] for each in entry["names"]}
    made, schedules = [], []
    for group in optimizer.param_groups:
        rows = group.get("rows") is not None
        for params in [[each] for each in group["params"]] if rows and not group.get("joint") else [group["params"]]:
            layer = next((recorded[names[id(each)]] for each in params if names.get(id(each)) in recorded), None)
            chosen = (run.table["group"] == layer) & (run.table["quantity"] == ("angle" if rows else "lr"))
            curve = run.table[chosen & (run.table["statistic"] == ("median" if rows else "mean"))].dropna()
            values = np.minimum(curve["value"], _LARGEST) if rows else curve["value"]
            top = values.max()  # NaN if there are none
            made.append({**group, "params": params})
            if rows:
                if not len(values):
                    raise ValueError(f"source: the run {run.name} has no angles of {names.get(id(params[0]))!r}")
                made[-1]["lr"] = torch.full_like(group["lr"], top) if isinstance(group["lr"], Tensor) else float(top)
            schedules.append(partial(np.interp, xp=curve["step"], fp=values / top) if top > 0 else lambda _: 1.0)
    optimizer.param_groups[:] = made
    return LambdaLR(optimizer, schedules)

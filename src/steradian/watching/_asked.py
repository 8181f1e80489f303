"""What a watch is asked for: a TypeError or ValueError names the argument, the value and what would be right."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from steradian.groups import Groups

__all__ = ["check_asked", "check_names", "hooked", "one_number"]


def hooked(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose hooks are called: of a wrapper that has none, as accelerate's, the one inside."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(f"optimizer must have a torch optimizer's hooks, and {type(optimizer).__name__} has none")
        optimizer = inner
    return optimizer


def check_asked(
    optimizer: Optimizer,
    groups: Groups | None,
    *,
    every: int,
    rows: Sequence[str],
    rows_every: int,
    paths: Mapping[str, Sequence[int]] | None,
    config: Mapping[str, Any] | None,
    step: int | None,
    run: str | None,
) -> None:
    """The arguments of `Watch`, before anything is made of them."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    if groups is not None and not isinstance(groups, Groups):
        raise TypeError(f"groups must be what find_groups returned, got {type(groups).__name__}")
    if not isinstance(every, Integral) or every < 1:
        raise ValueError(f"every must be an integer ≥ 1, got {every!r}")
    if isinstance(rows, str):
        raise TypeError(f"rows must be a list of names, got {rows!r}: write [{rows!r}]")
    if not isinstance(rows_every, Integral) or rows_every < 0:
        raise ValueError(f"rows_every must be an integer ≥ 0 (0: never), got {rows_every!r}")
    if step is not None and (not isinstance(step, Integral) or step < 0):
        raise ValueError(f"step must be None or an integer ≥ 0, got {step!r}")
    if run is not None and not isinstance(run, str):
        raise TypeError(f"run must be a name, got {run!r}: write {str(run)!r}")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config must be a dict, got {type(config).__name__}")
    if paths is not None:
        whole = isinstance(paths, Mapping) and all(isinstance(of, Sequence | range) for of in paths.values())
        if not whole:
            raise TypeError(f"paths must be {{group: [row, …]}}, got {paths!r}")


def check_names(argument: str, names: Sequence[str] | Mapping[str, Any], followed: Sequence[str]) -> None:
    """Names of groups that are followed."""
    unknown = [name for name in names if name not in followed]
    if unknown:
        raise ValueError(f"{argument} names {unknown}, but the followed groups are {list(followed)}")


def one_number(name: str, value: float | Tensor) -> float | Tensor:
    """What is logged; a tensor as a copy that is not waited for."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
        if value.is_complex():
            raise TypeError(f"{name} must be one number, got a tensor of type {value.dtype}")
        return value.detach().reshape(()).clone()
    if isinstance(value, np.ndarray | np.bool_) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be one number, got {value!r}")
    return float(value)

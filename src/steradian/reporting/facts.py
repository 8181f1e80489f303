"""What the page says in words: names, settings, extremes, and what is missing and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["Extreme", "distinct_names", "extreme", "lost", "missing", "number", "settings"]


@dataclass(frozen=True)
class Extreme:
    """The largest value of a quantity in a whole run, where it was, and at how many steps it was not finite."""

    value: float
    step: int
    group: str
    blank: int = 0


def number(value: Any) -> str:
    """A number as people write it.

    >>> number(0.0005), number(2.5e-07), number(3), number((0.9, 0.999)), number(1234.5678), number(True), number(-0.0)
    ('0.0005', '2.5e-7', '3', '0.9, 0.999', '1235', 'yes', '0')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value + 0.0:.4g}"  # no -0
        head, exponent, power = text.partition("e")
        return f"{head}e{int(power)}" if exponent else text
    if isinstance(value, list | tuple):
        return ", ".join(map(number, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(of)}" for key, of in value.items())
    return "none" if value is None else str(value)


def settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The settings of an optimizer's param groups: each once, or the distinct values where groups differ.

    >>> settings([{"lr": 0.1, "rows": "filter"}, {"lr": 0.1}])
    {'lr': '0.1'}
    """
    result = {}
    for key in dict.fromkeys(key for group in groups for key in group):
        if key not in ("params", "rows", "joint", "names", "param_names"):  # the table of groups has these
            result[key] = " / ".join(dict.fromkeys(number(group[key]) for group in groups if key in group))
    return result


def distinct_names(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Names of runs; those that are the same get as much of their folder as tells them apart.

    >>> distinct_names(["adam", "sgd", "adam"], [Path("a/run"), Path("b/run"), Path("c/run")])
    ['adam (a/run)', 'sgd', 'adam (c/run)']
    """
    result = []
    for name, folder in zip(names, folders, strict=True):
        twins = [other for n, other in zip(names, folders, strict=True) if n == name and other != folder]
        label = name
        for depth in range(1, len(folder.parts) + 1):
            tail = folder.parts[-depth:]
            if twins and all(other.parts[-depth:] != tail for other in twins):
                label = f"{name} ({'/'.join(tail)})"
                break
        result.append(label)
    return result


def extreme(table: pd.DataFrame, quantity: str) -> Extreme | None:
    """The largest value of a quantity over all rows, groups and steps of a run's table."""
    part = table[(table["quantity"] == quantity) & (table["statistic"] == "max")]
    value = part["value"].to_numpy(float)
    if not np.isfinite(value).any():
        return None
    at = int(np.argmax(np.where(np.isfinite(value), value, -np.inf)))
    blank = part["step"][~np.isfinite(value)].nunique()
    return Extreme(float(value[at]), int(part["step"].iloc[at]), str(part["group"].iloc[at]), blank)


def lost(table: pd.DataFrame) -> set[str]:
    """Quantities that are not finite in some group at the end: of these there is nothing to say but that."""
    part = table[table["statistic"].isin(["median", "mean"]) & (table["group"] != "")]
    last = part.drop_duplicates(["group", "quantity", "statistic"], keep="last")
    return {str(name) for name in last["quantity"][~np.isfinite(last["value"].to_numpy(float))]}


def missing(about: Mapping[str, Any], recorded: set[str], quantity: str) -> str | None:
    """Why a run does not have a quantity; None if it has it."""
    if quantity in recorded:
        return None
    return str((about.get("missing") or {}).get(quantity) or "this run does not record it")

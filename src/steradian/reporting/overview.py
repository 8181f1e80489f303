"""What the page says of its runs before any figure: their cards, alerts, and tables of groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steradian.reporting.data import PageRun
from steradian.watching.records import alerts_of, causes

__all__ = ["alerts", "cards", "groups", "number"]

Entries = dict[str, dict[str, str]]
"""Kind → name → value of what a card may show."""


def cards(runs: Sequence[PageRun]) -> tuple[list[Entries], dict[str, str]]:
    """What the card of each run shows, of several runs what differs between them; and what is the same in all."""
    entries = [_entries(run) for run in runs]
    common: dict[str, str] = {}
    for kind, of in entries[0].items() if len(runs) > 1 else ():
        same = {name: value for name, value in of.items() if all(each[kind].get(name) == value for each in entries)}
        common |= same
        for each in entries:
            each[kind] = {name: value for name, value in each[kind].items() if name not in same}
    return entries, common


def _entries(run: PageRun) -> Entries:
    observed, steps = run.observed
    return {
        "Optimizer": {"Optimizer": run.about["optimizer"]["name"] or "not named"},
        "Settings": settings(run.about["optimizer"]["groups"]),
        "Facts": {
            "Last step": f"{run.lines.last_step:,}",
            "Recorded": "every step" if observed == steps else f"{observed:,} of {steps:,} steps",
            **_ends(run),
        },
        "Configuration": {key: number(of) for key, of in run.about["config"].items()},
        "Environment": {key: number(of) for key, of in run.about["environment"].items()},
    }


def _ends(run: PageRun) -> dict[str, str]:
    """Medians of the layers at the last recorded point, smallest to largest."""
    result = {}
    for quantity, label in (("lr", "Nominal rate"), ("effective_lr", "Effective rate"), ("angle", "Angle per step")):
        of = run.lines.values.get(quantity, {})
        lines = [line.get("median", line.get("mean")) for name, line in of.items() if name not in {"", *run.vectors}]
        last = [line[np.isfinite(line)][-1] for line in lines if line is not None and np.isfinite(line).any()]
        if quantity in run.not_finite:
            result[f"{label}, end"] = "not a finite number"
        elif last:
            low, high = number(float(min(last)), 2), number(float(max(last)), 2)
            result[f"{label}, end"] = low if low == high else f"{low} … {high}"
    return result


def alerts(runs: Sequence[PageRun]) -> list[tuple[int, str, str]]:
    """Run number, words and place of each cause of alerts."""
    found = []
    for i, run in enumerate(runs):
        for cause in causes(alerts_of(run.alerts)):
            one = len(cause.groups) == 1
            where = [run.name, f"step {cause.step}", cause.groups[0]] if one else [run.name]
            found.append((i, cause.what if one else cause.text, " · ".join(filter(None, where))))
    return found


def groups(runs: Sequence[PageRun]) -> list[tuple[list[str], list[str], list[list[str]], list[str]]]:
    """Tables of groups: the runs that share each, headings, lines, and parameters that are not watched."""
    shared: dict[str, list[PageRun]] = {}
    for run in runs:
        shared.setdefault(repr(_group_table(run)), []).append(run)
    return [([run.name for run in of], *_group_table(of[0])) for of in shared.values()]


def _group_table(run: PageRun) -> tuple[list[str], list[list[str]], list[str]]:
    """Headings and lines without the columns that are empty, and parameters that are not watched."""
    heads = ["Parameter", "Label", "Spec", "Rows × d", "Defect", "Because of"]
    lines = []
    for group in run.about["groups"]:
        defect = "" if group["defect"] is None else number(group["defect"], 2)
        spec, size = number(group["layout"]), f"{group['rows']} × {group['size']}"
        lines.append([" + ".join(group["names"]), run.labels[group["name"]], spec, size, defect, group["reason"]])
    shown = [k for k in range(len(heads)) if any(line[k] for line in lines)]
    return [heads[k] for k in shown], [[line[k] for k in shown] for line in lines], run.about["rest"]


def number(value: Any, digits: int = 4) -> str:
    """A number as people write it, rounded to at most four digits.

    >>> number(0.0005), number(2.5e-07), number(3), number((0.9, 0.999)), number(1234.5678), number(True), number(-0.0)
    ('0.0005', '2.5e-7', '3', '0.9, 0.999', '1235', 'yes', '0')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{float(f'{value:.{digits}g}') + 0.0:.4g}"  # no -0
        head, exponent, power = text.partition("e")
        return f"{head}e{int(power)}" if exponent else text
    if isinstance(value, list | tuple):
        return ", ".join(map(number, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(of)}" for key, of in value.items())
    return "none" if value is None else str(value)


def settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The settings of an optimizer's param groups: each once, or its distinct values if the groups differ.

    Settings that are off everywhere are left out. A rate is the one before the schedule.

    >>> settings([{"lr": 0.1, "rows": "filter", "foreach": None}, {"lr": 0.1}])
    {'lr': '0.1'}
    """
    result = {}
    groups = [{**group, "lr": group.get("initial_lr", group.get("lr")), "initial_lr": None} for group in groups]
    for key in dict.fromkeys(key for group in groups for key in group):
        values = [group[key] for group in groups if key in group]
        off = all(value is None or value is False for value in values)
        if not off and key not in ("params", "rows", "joint", "names", "param_names"):  # the table of groups has these
            result[key] = " / ".join(dict.fromkeys(map(number, values)))
    return result

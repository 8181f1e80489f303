"""What the page says of its runs: cards, alerts and tables of groups, then sections with the figures they can have.

The words of sections and figures are in assets/sections.toml.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np

from steradian.reporting.data import PageRun, grid
from steradian.watching.records import alerts_of, causes

__all__ = ["SECTIONS", "Figure", "Section", "alerts", "all_hold", "asset", "bounds", "cards", "groups", "left_out"]
__all__ += ["notes", "number", "shown_sections"]

Entries = dict[str, dict[str, str]]  # kind → name → value of what a card may show


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
            "Last step": f"{max(run.lines.last_step, run.about.get('last_step') or 0):,}",
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
    """
    result = {}
    hidden = dict.fromkeys(("initial_lr", "first_lr"))
    groups = [{**group, "lr": group.get("initial_lr", group.get("lr")), **hidden} for group in groups]
    for key in dict.fromkeys(key for group in groups for key in group):
        values = [group[key] for group in groups if key in group]
        off = all(value is None or value is False for value in values)
        if not off and key not in ("params", "rows", "joint", "names", "param_names"):  # the table of groups has these
            result[key] = " / ".join(dict.fromkeys(map(number, values)))
    return result


@dataclass(frozen=True)
class Figure:
    """One figure of a section. It is left out if no run has the quantities that it draws."""

    id: str  #: of its element
    kind: str  #: the function in assets/ that draws it
    needs: Sequence[str]  #: quantities, or what `PageRun.recorded` names; "pairs": trajectories in several runs
    title: str = ""  #: HTML
    caption: str = ""  #: what it shows, HTML
    controls: Sequence[str] = ()  #: its own selectors
    paper: str = ""  #: the figure of the paper that it corresponds to, HTML
    bound: Sequence[Any] | None = None  #: a value that is drawn as a line, and its name
    signed: bool = False  #: absolute values are drawn, but only positive ones can pass the bound


@dataclass(frozen=True)
class Section:
    """A section: an id for links, a heading, an introduction in HTML, figures, and where the paper treats it."""

    id: str
    title: str
    text: str
    figures: Sequence[Figure]
    paper: str = ""


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (files("steradian.reporting") / "assets" / name).read_text(encoding="utf-8")


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Texts in one line."""
    return {key: " ".join(of.split()) if isinstance(of, str) else of for key, of in entry.items()}


SECTIONS = tuple(
    Section(**_plain({**section, "figures": [Figure(**_plain(figure)) for figure in section["figures"]]}))
    for section in tomllib.loads(asset("sections.toml"))["section"]
)


def shown_sections(runs: Sequence[PageRun]) -> list[Section]:
    """The sections with the figures that some run has records for; where layers repeat in blocks, their maps first."""
    blocks = grid(runs) is not None
    # The figure of the effective rate shows the schedule, too, and for invariant rows it says more than the update.
    less = ["schedule"] if any("effective_lr" in run.recorded for run in runs) else []
    less += ["update", "radial-share"] if any("invariant" in run.labels.values() for run in runs) else []
    less += [] if blocks else ["blocks"]
    found = []
    for section in SECTIONS:
        figures = [each for each in section.figures if any(lacks(each, run, runs) is None for run in runs)]
        if figures:
            found.append(replace(section, figures=[each for each in figures if each.id not in less]))
    order = ["run", "heat"] if blocks else []
    return sorted(found, key=lambda section: order.index(section.id) if section.id in order else len(order))


def lacks(figure: Figure, run: PageRun, runs: Sequence[PageRun]) -> str | None:
    """Why a run cannot be in a figure; None if it can."""
    if "pairs" in figure.needs:
        return None if len(runs) > 1 and "paths" in run.recorded else "it takes several runs that follow the same rows"
    absent = [need for need in figure.needs if need not in run.recorded]
    if not absent or (figure.kind == "phenomena" and len(absent) < len(figure.needs)):
        return None
    return "; ".join(dict.fromkeys(run.about["missing"].get(need, "not recorded") for need in absent))


def notes(figure: Figure, runs: Sequence[PageRun]) -> str:
    """The runs that are not in a figure, and why."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if why := lacks(figure, run, runs):
            found.setdefault(why, []).append(run.name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in found.items())


def left_out(runs: Sequence[PageRun], shown: Sequence[Section]) -> dict[str, list[str]]:
    """Why figures are left out, and the titles of these figures."""
    there = {figure.id for section in shown for figure in section.figures} | {"imbalance"}  # many networks have no pair
    found: dict[str, list[str]] = {}
    for section in SECTIONS:
        for figure in section.figures:
            if figure.id not in there and (why := lacks(figure, runs[0], runs)):
                found.setdefault(why, []).append(figure.title or section.title)
    return found


def bounds(figure: Figure, runs: Sequence[PageRun]) -> Iterator[tuple[str, str, str, float]]:
    """A mark, run, words and largest value: whether a bound held at all recorded rows and steps, drawn or not."""
    for run in runs:
        worst = run.extremes.get(figure.needs[0])
        if worst is None or figure.bound is None:
            continue
        held = worst.value < figure.bound[0]
        mark, word = ("held", "below the bound throughout") if held else ("failed", "above the bound")
        if worst.not_finite:
            unknown = f"not a finite number at {worst.not_finite} step{'s' * (worst.not_finite > 1)}"
            word = f"{unknown}, below the bound otherwise" if held else f"{word}, and {unknown}"
            mark = "unsure" if held else mark
        where = f"{number(worst.value, 3)} at step {worst.step} in {worst.group}"
        sign = "; the figure shows absolute values, but only positive ones can pass the bound" if figure.signed else ""
        yield mark, run.name, f"{word}; largest {where}{sign}", worst.value


def all_hold(section: Section, runs: Sequence[PageRun]) -> str:
    """The largest value in each figure of a section whose bounds all held; "" if one did not, or there is none."""
    found = {figure.title.split(":")[0]: list(bounds(figure, runs)) for figure in section.figures}
    if not any(found.values()) or any(mark != "held" for of in found.values() for mark, *_ in of):
        return ""
    return ", ".join(f"{title} {number(max(value for *_, value in of), 3)}" for title, of in found.items())

"""The page's sections and figures, whose words are in assets/sections.toml: which of them some runs can have."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from steradian.reporting.data import PageRun, grid
from steradian.reporting.overview import number

__all__ = ["SECTIONS", "Figure", "Section", "all_hold", "asset", "bounds", "left_out", "notes", "shown_sections"]


@dataclass(frozen=True)
class Figure:
    """One figure of a section. It is left out if no run has the quantities that it draws."""

    id: str  #: of its element
    kind: str  #: the function in assets/ that draws it
    needs: tuple[str, ...]  #: quantities, or what `PageRun.recorded` names; "pairs": trajectories in several runs
    title: str = ""  #: HTML
    caption: str = ""  #: what it shows, HTML
    controls: tuple[str, ...] = ()  #: its own selectors
    paper: str = ""  #: the figure of the paper that it corresponds to, HTML
    bound: tuple[float, str] | None = None  #: a value that is drawn as a line, and its name


@dataclass(frozen=True)
class Section:
    """A section: an id for links, a heading, an introduction in HTML, figures, and where the paper treats it."""

    id: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    paper: str = ""


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (files("steradian.reporting") / "assets" / name).read_text(encoding="utf-8")


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Texts in one line, lists as tuples."""
    return {key: " ".join(of.split()) if isinstance(of, str) else tuple(of) for key, of in entry.items()}


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
            found.append(replace(section, figures=tuple(each for each in figures if each.id not in less)))
    order = ["run", "heat"] if blocks else []
    return sorted(found, key=lambda section: order.index(section.id) if section.id in order else len(order))


def lacks(figure: Figure, run: PageRun, runs: Sequence[PageRun]) -> str | None:
    """Why a run cannot be in a figure; None if it can."""
    if figure.needs == ("pairs",):
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
        yield mark, run.name, f"{word}; largest {where}", worst.value


def all_hold(section: Section, runs: Sequence[PageRun]) -> str:
    """The largest value in each figure of a section whose bounds all held; "" if one did not, or there is none."""
    found = {figure.title.split(":")[0]: list(bounds(figure, runs)) for figure in section.figures}
    if not any(found.values()) or any(mark != "held" for of in found.values() for mark, *_ in of):
        return ""
    return ", ".join(f"{title} {number(max(value for *_, value in of), 3)}" for title, of in found.items())

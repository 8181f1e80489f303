"""The HTML of the page: verdict, runs, alerts, the table of groups, sections, and what is left out. Escaped."""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steradian.reporting.data import PageRun, grid
from steradian.reporting.sections import SECTIONS, Figure, Section
from steradian.watching.records import QUANTITIES, alerts_of, causes
from steradian.watching.verdict import Sentence

__all__ = [
    "alerts",
    "contents",
    "groups",
    "left_out",
    "paper_index",
    "run_cards",
    "sections",
    "shown_sections",
    "verdict",
]

_CONTROLS = {
    "quantity": "Quantity",
    "statistic": "Over the rows",
    "scale": "Scale",
    "row-quantity": "Quantity",
    "row-group": "Layer",
    "row-step": "Step",
    "block-step": "Step",
    "sphere-row": "Row",
    "sphere-step": "Up to step",
    "reference": "Reference",
}


def escape(text: Any) -> str:
    """Text as HTML."""
    return html.escape(str(text))


# Runs, verdict, alerts, groups

Entries = dict[str, dict[str, str]]
"""Kind → name → value of what a card may show."""


def run_cards(runs: Sequence[PageRun]) -> str:
    """One card per run; of several runs, each with what differs, and one line with what is the same in all."""
    entries = [_entries(run) for run in runs]
    common: dict[str, str] = {}
    for kind, of in entries[0].items() if len(runs) > 1 else ():
        same = {name: value for name, value in of.items() if all(each[kind].get(name) == value for each in entries)}
        common |= same
        for each in entries:
            each[kind] = {name: value for name, value in each[kind].items() if name not in same}
    cards = "".join(_card(i, run, own) for i, (run, own) in enumerate(zip(runs, entries, strict=True)))
    listed = f'<details class="same"><summary>The same in all runs</summary>{_list(common)}</details>' if common else ""
    return f'<div class="runs">{cards}</div>{listed}'


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


def _card(i: int, run: PageRun, own: Entries) -> str:
    optimizer = "".join(f'<p class="optimizer">{escape(name)}</p>' for name in own["Optimizer"].values())
    chips = "".join(f"<li><span>{escape(key)}</span> {escape(value)}</li>" for key, value in own["Settings"].items())
    folded = "".join(
        f"<details><summary>{kind}</summary>{_list(own[kind])}</details>"
        for kind in ("Configuration", "Environment")
        if own[kind]
    )
    started = run.about.get("started")
    when = f'<p class="when">started {escape(str(started).replace("T", " ")[:16])}</p>' if started else ""
    return (
        f'<article class="card run" style="--run: var(--run-{i % 7})"><h3>{escape(run.name)}</h3>'
        f'{optimizer}<ul class="chips">{chips}</ul>{_list(own["Facts"])}{folded}{when}</article>'
    )


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
            low, high = (number(float(f"{value:.2g}")) for value in (min(last), max(last)))
            result[f"{label}, end"] = low if low == high else f"{low} … {high}"
    return result


def _list(items: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in items.items()) + "</dl>"


def verdict(runs: Sequence[PageRun], shown: Sequence[Section]) -> str:
    """What each run says first, in words, with links to the charts."""
    parts = []
    for i, run in enumerate(runs):
        name = f'<h3 style="color: var(--run-{i % 7})">{escape(run.name)}</h3>' if len(runs) > 1 else ""
        lines = [
            f'<li class="{"healthy" if sentence.kind == "healthy" else sentence.severity}">'
            f"{escape(sentence.text)}{_link(sentence, shown)}</li>"
            for sentence in run.verdict
        ]
        parts.append(f'{name}<ul class="findings">{"".join(lines)}</ul>' if lines else "")
    return "".join(parts) or '<p class="calm">No layer was observed.</p>'


def _link(sentence: Sentence, shown: Sequence[Section]) -> str:
    """A link to the figure of a sentence's quantity, which selects its layer; the last figure shows any quantity."""
    if not sentence.quantity:
        return ""
    figures = [figure for section in shown for figure in section.figures]
    figure = next((each for each in figures if sentence.quantity in each.needs), figures[-1])
    select = f'data-layer="{escape(sentence.group)}" data-quantity="{sentence.quantity}"'
    return f' <a href="#{figure.id}" {select}>{QUANTITIES[sentence.quantity].title}</a>'


def alerts(runs: Sequence[PageRun]) -> str:
    """The alerts of each run in words, one for each cause, with the first step and the groups."""
    lines = []
    for i, run in enumerate(runs):
        for cause in causes(alerts_of(run.alerts)):
            one = len(cause.groups) == 1
            where = [run.name, f"step {cause.step}", cause.groups[0]] if one else [run.name]
            lines.append(
                f'<li style="--run: var(--run-{i % 7})"><b>{escape(cause.what if one else cause.text)}</b>'
                f"<span>{escape(' · '.join(filter(None, where)))}</span></li>"
            )
    if not lines:
        return ""
    heading = "1 alert" if len(lines) == 1 else f"{len(lines)} alerts"
    return f'<div class="alerts" role="status"><h3>{heading}</h3><ul>{"".join(lines)}</ul></div>'


def groups(runs: Sequence[PageRun]) -> str:
    """The table of groups, once for all runs that share it."""
    tables: dict[str, list[str]] = {}
    for run in runs:
        tables.setdefault(_groups(run), []).append(run.name)
    if len(tables) == 1:
        return next(iter(tables))
    return "".join(f"<h4>{escape(', '.join(names))}</h4>{table}" for table, names in tables.items())


def _groups(run: PageRun) -> str:
    heads = ("Parameter", "Label", "Spec", "Rows × d", "Defect", "Because of")
    lines = []
    for group in run.about["groups"]:
        defect = "" if group["defect"] is None else number(float(f"{group['defect']:.2g}"))
        spec, size = number(group["layout"]), f"{group['rows']} × {group['size']}"
        lines.append([" + ".join(group["names"]), run.labels[group["name"]], spec, size, defect, group["reason"]])
    shown = [k for k in range(len(heads)) if any(line[k] for line in lines)]

    def row(tag: str, texts: Sequence[str]) -> str:
        right = {3: ' class="number"', 4: ' class="number"'}
        return "<tr>" + "".join(f"<{tag}{right.get(k, '')}>{escape(texts[k])}</{tag}>" for k in shown) + "</tr>"

    body = "".join(row("td", line) for line in lines)
    table = f"<table><thead>{row('th', heads)}</thead><tbody>{body}</tbody></table>"
    rest = run.about["rest"]
    others = "1 other parameter is" if len(rest) == 1 else f"{len(rest)} other parameters are"
    also = f"<details><summary>{others} not watched</summary><p>{escape(', '.join(rest))}</p></details>"
    return f'<div class="scroll" tabindex="0">{table}</div>{also if rest else ""}'


# Sections


def shown_sections(runs: Sequence[PageRun]) -> list[Section]:
    """The sections with the figures that some run has records for; where layers repeat in blocks, their maps first."""
    blocks = grid(runs) is not None
    # The figure of the effective rate shows the schedule, too, and for invariant rows it says more than the update.
    less = ["schedule"] if any("effective_lr" in run.recorded for run in runs) else []
    less += ["update", "radial-share"] if any("invariant" in run.labels.values() for run in runs) else []
    less += [] if blocks else ["blocks"]
    found = []
    for section in SECTIONS:
        figures = [each for each in section.figures if any(_lacks(each, run, runs) is None for run in runs)]
        if figures:
            found.append(replace(section, figures=tuple(each for each in figures if each.id not in less)))
    order = ["run", "heat"] if blocks else []
    return sorted(found, key=lambda section: order.index(section.id) if section.id in order else len(order))


def left_out(runs: Sequence[PageRun], shown: Sequence[Section]) -> str:
    """One line that names the figures without records, with the reasons folded."""
    there = {figure.id for section in shown for figure in section.figures} | {"imbalance"}  # many networks have no pair
    reasons: dict[str, list[str]] = {}
    for section in SECTIONS:
        for figure in section.figures:
            why = _lacks(figure, runs[0], runs)
            if figure.id not in there and why:
                reasons.setdefault(why, []).append(figure.title or section.title)
    if not reasons:
        return ""
    count = sum(map(len, reasons.values()))
    lines = "".join(f"<li>{'; '.join(titles)}: {escape(why)}</li>" for why, titles in reasons.items())
    words = "1 figure is left out: nothing was recorded for it"
    words = words if count == 1 else f"{count} figures are left out: nothing was recorded for them"
    return f'<details class="card missing"><summary>{words}</summary><ul>{lines}</ul></details>'


def contents(shown: Sequence[Section]) -> str:
    """The table of contents."""
    return "".join(f'<li><a href="#{s.id}">{s.title.split(":")[0]}</a></li>' for s in shown)


def paper_index(shown: Sequence[Section]) -> str:
    """Where a reader of the paper finds its figures."""
    figures = [figure for section in shown for figure in section.figures if figure.paper]
    return "<ul>" + "".join(f'<li><a href="#{each.id}">{each.paper}</a></li>' for each in figures) + "</ul>"


def sections(shown: Sequence[Section], runs: Sequence[PageRun]) -> str:
    """All sections that have figures."""
    return "\n".join(_section(section, runs) for section in shown)


def _section(section: Section, runs: Sequence[PageRun]) -> str:
    paper = f'<span class="paper">Paper: {escape(section.paper)}</span>' if section.paper else ""
    body = f"<p>{section.text}</p>" + "\n".join(_figure(figure, runs) for figure in section.figures)
    bounds = [line for figure in section.figures for line in _bounds(figure, runs)]
    if bounds and all(mark == "held" for mark, *_ in bounds):
        largest = ", ".join(
            f"{figure.title.split(':')[0]} {_rounded(max(value for *_, value in _bounds(figure, runs)))}"
            for figure in section.figures
        )
        body = (
            f'<details class="fold"><summary><span class="held"></span> All hold at every recorded step; largest '
            f"values {largest}</summary>{body}</details>"
        )
    return f'<section class="card" id="{section.id}"><h2>{escape(section.title)}</h2>{paper}{body}</section>'


def _figure(figure: Figure, runs: Sequence[PageRun]) -> str:
    lacks: dict[str, list[str]] = {}
    for run in runs:
        why = _lacks(figure, run, runs)
        if why:
            lacks.setdefault(why, []).append(run.name)
    notes = "; ".join(f"{', '.join(names)} ({why})" for why, names in lacks.items())
    note = f'<p class="missing">Not recorded in {escape(notes)}</p>' if notes else ""
    title = f"<h3>{figure.title}</h3>" if figure.title else ""
    controls = "".join(map(_control, figure.controls))
    bound = f' data-bound="{figure.bound[0]}" data-bound-name="{escape(figure.bound[1])}"' if figure.bound else ""
    bounds = "".join(f'<li class="{mark}">{text}</li>' for mark, text, _ in _bounds(figure, runs))
    held = f'<ul class="verdict">{bounds}</ul>' if bounds else ""
    needs, label = " ".join(figure.needs), re.sub("<.*?>", "", figure.title or figure.paper or figure.id)
    return (
        f'<figure class="figure" id="{figure.id}" data-kind="{figure.kind}" data-needs="{needs}"{bound}>'
        f'<div class="figure-head">{title}<div class="controls">{controls}</div></div>{held}'
        f'<div class="plot" role="img" aria-label="{label}"></div><div class="legend"></div><p class="note"></p>'
        f"<figcaption>{figure.caption}</figcaption>{note}</figure>"
    )


def _control(name: str) -> str:
    if name.endswith("-step"):
        slider = f'<input type="range" data-control="{name}" min="0" max="0" step="1"><output></output>'
        return f'<label class="slider">{_CONTROLS[name]} {slider}</label>'
    return f'<label>{_CONTROLS[name]} <select data-control="{name}"></select></label>'


def _lacks(figure: Figure, run: PageRun, runs: Sequence[PageRun]) -> str | None:
    """Why a run cannot be in a figure; None if it can."""
    if figure.needs == ("pairs",):
        return None if len(runs) > 1 and "paths" in run.recorded else "it takes several runs that follow the same rows"
    absent = [need for need in figure.needs if need not in run.recorded]
    if not absent or (figure.kind == "phenomena" and len(absent) < len(figure.needs)):
        return None
    return "; ".join(dict.fromkeys(run.about["missing"].get(need, "not recorded") for need in absent))


def _bounds(figure: Figure, runs: Sequence[PageRun]) -> Iterator[tuple[str, str, float]]:
    """A mark, words, and the largest value: whether a bound held at all recorded rows and steps, drawn or not."""
    for run in runs if figure.bound else ():
        worst = run.extremes.get(figure.needs[0])
        if worst is None or figure.bound is None:
            continue
        held = worst.value < figure.bound[0]
        mark, word = ("held", "below the bound throughout") if held else ("failed", "above the bound")
        if worst.not_finite:
            unknown = f"not a finite number at {worst.not_finite} step{'s' * (worst.not_finite > 1)}"
            word = f"{unknown}, below the bound otherwise" if held else f"{word}, and {unknown}"
            mark = "unsure" if held else mark
        where = f"{_rounded(worst.value)} at step {worst.step} in {escape(worst.group)}"
        yield mark, f"<b>{escape(run.name)}</b>: {word}; largest {where}", worst.value


# Numbers and settings in words


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


def _rounded(value: float) -> str:
    return number(float(f"{value:.3g}"))


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

"""The HTML of the page: runs, alerts, the table of groups, sections, and what a run did not record. Escaped."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from steradian.reporting.data import PageRun
from steradian.reporting.rows import has_trajectory
from steradian.reporting.sections import SECTIONS, Figure, Section
from steradian.watching.records import QUANTITIES, alerts_of, causes
from steradian.watching.verdict import Sentence

__all__ = ["alerts", "contents", "groups", "paper_index", "run_cards", "sections", "verdict"]

_LISTED = {
    "rows": "single rows; watch records them at some steps",
    "paths": "trajectories of two points or more; watch records them for chosen rows",
    "whole": "a quantity of the whole run, such as a loss",
    "pairs": "trajectories of the same row in two runs",
}
_CONTROLS = {
    "quantity": "Quantity",
    "statistic": "Over the rows",
    "scale": "Scale",
    "row-quantity": "Quantity",
    "row-group": "Layer",
    "row-step": "Step",
    "sphere-row": "Row",
    "sphere-step": "Up to step",
    "reference": "Reference",
}


def escape(text: Any) -> str:
    """Text as HTML."""
    return html.escape(str(text))


def run_cards(runs: Sequence[PageRun]) -> str:
    """One card per run: its optimizer, settings and last numbers."""
    return "\n".join(_card(i, run) for i, run in enumerate(runs))


def _card(i: int, run: PageRun) -> str:
    optimizer: Mapping[str, Any] = run.about.get("optimizer") or {}
    known = settings(optimizer.get("groups") or [])
    chips = "".join(f"<li><span>{escape(key)}</span> {escape(value)}</li>" for key, value in known.items())
    often = int(run.about.get("every") or 1)
    facts = {
        "Last step": number(run.lines.last_step),
        "Recorded": "every step" if often == 1 else f"every {often} steps",
    }
    facts |= _ends(run)
    folded = "".join(
        f"<details><summary>{label}</summary>{_list(_flat(run.about.get(key)))}</details>"
        for label, key in (("Configuration", "config"), ("Environment", "environment"))
        if run.about.get(key)
    )
    started = run.about.get("started")
    when = f'<p class="when">started {escape(str(started).replace("T", " ")[:16])}</p>' if started else ""
    name = escape(optimizer.get("name") or "optimizer not named")
    return (
        f'<article class="card run" style="--run: var(--run-{i % 7})"><h3>{escape(run.name)}</h3>'
        f'<p class="optimizer">{name}</p><ul class="chips">{chips}</ul>{_list(facts)}{folded}{when}</article>'
    )


def _ends(run: PageRun) -> dict[str, str]:
    """Medians of the layers at the last recorded point, smallest to largest."""
    result = {}
    for quantity, label in (
        ("lr", "Nominal rate, end"),
        ("effective_lr", "Effective rate, end"),
        ("angle", "Angle per step, end"),
    ):
        if quantity in run.not_finite:
            result[label] = "not a finite number"
            continue
        of = run.lines.values.get(quantity, {})
        lines = [line.get("median", line.get("mean")) for group, line in of.items() if group]
        last = [line[np.isfinite(line)][-1] for line in lines if line is not None and np.isfinite(line).any()]
        if last:
            low, high = number(float(f"{min(last):.2g}")), number(float(f"{max(last):.2g}"))
            result[label] = low if low == high else f"{low} … {high}"
    return result


def _flat(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(key): number(of) for key, of in value.items()}
    return {"": number(value)}


def _list(items: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in items.items()) + "</dl>"


def verdict(runs: Sequence[PageRun]) -> str:
    """What each run says first, in words, with links to the charts."""
    parts = []
    for i, run in enumerate(runs):
        name = f'<h3 style="color: var(--run-{i % 7})">{escape(run.name)}</h3>' if len(runs) > 1 else ""
        lines = [
            f'<li class="{"healthy" if sentence.kind == "healthy" else sentence.severity}">'
            f"{escape(sentence.text)}{_link(sentence)}</li>"
            for sentence in run.verdict
        ]
        parts.append(f'{name}<ul class="findings">{"".join(lines)}</ul>' if lines else "")
    return "".join(parts) or '<p class="calm">No layer was observed.</p>'


def _link(sentence: Sentence) -> str:
    """A link to the figure that shows a sentence's quantity; any quantity can be chosen in the last one."""
    if not sentence.quantity:
        return ""
    figures = [figure for section in SECTIONS for figure in section.figures]
    shown = next((each for each in figures if sentence.quantity in each.needs), figures[-1])
    return f' <a href="#{shown.id}">{QUANTITIES[sentence.quantity].title}</a>'


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
        return '<p class="calm">No alert was raised.</p>'
    heading = "1 alert" if len(lines) == 1 else f"{len(lines)} alerts"
    listed = "".join(lines)
    return f'<div class="alerts" role="status"><h3>{heading}</h3><ul>{listed}</ul></div>'


def groups(runs: Sequence[PageRun]) -> str:
    """The table of groups, once for all runs that share it."""
    tables: dict[str, list[str]] = {}
    for run in runs:
        tables.setdefault(_groups(run.about), []).append(run.name)
    if len(tables) == 1:
        return next(iter(tables))
    return "".join(f"<h4>{escape(', '.join(names))}</h4>{table}" for table, names in tables.items())


def _groups(about: Mapping[str, Any]) -> str:
    known: Iterable[Mapping[str, Any]] = about.get("groups") or []
    lines = []
    for group in known:
        n, d, defect = group.get("rows"), group.get("size"), group.get("defect")
        joint = [str(name) for name in group.get("names") or []]
        name = " + ".join(joint) if len(joint) > 1 else str(group.get("name"))
        shown = "" if defect is None else number(float(f"{defect:.2g}"))
        size = f"{n} × {d}" if n is not None and d is not None else ""
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(number(group.get("layout")))}</td>'
            f'<td class="number">{escape(size)}</td><td class="number">{shown}</td>'
            f"<td>{escape(group.get('reason') or '')}</td></tr>"
        )
    rest = [str(name) for name in about.get("rest") or []]
    summary = "1 other parameter is" if len(rest) == 1 else f"{len(rest)} other parameters are"
    listed = f"<details><summary>{summary} not on a sphere</summary><p>{escape(', '.join(rest))}</p></details>"
    also = listed if rest else ""
    if not lines:
        return '<p class="calm">The run does not say which rows are on spheres.</p>' + also
    return (
        '<div class="scroll" tabindex="0"><table><thead><tr><th>Parameter</th><th>Layout</th>'
        '<th class="number">Rows × d</th><th class="number">Defect</th><th>Because of</th></tr></thead><tbody>'
        + "".join(lines)
        + f"</tbody></table></div>{also}"
    )


def contents(shown: Sequence[Section] = SECTIONS) -> str:
    """The table of contents."""
    return "".join(f'<li><a href="#{s.id}">{_short(s.title)}</a></li>' for s in shown)


def _short(title: str) -> str:
    return title.split(":")[0]


def paper_index(shown: Sequence[Section] = SECTIONS) -> str:
    """Where a reader of the paper finds its figures."""
    items = "".join(
        f'<li><a href="#{figure.id}">{figure.paper}</a></li>'
        for section in shown
        for figure in section.figures
        if figure.paper
    )
    return f"<ul>{items}</ul>"


def sections(runs: Sequence[PageRun]) -> str:
    """All sections; a figure without records says so instead of being empty."""
    return "\n".join(_section(section, runs) for section in SECTIONS)


def _section(section: Section, runs: Sequence[PageRun]) -> str:
    paper = f'<span class="paper">Paper: {escape(section.paper)}</span>' if section.paper else ""
    body = "\n".join(_figure(figure, runs) for figure in section.figures)
    return (
        f'<section class="card" id="{section.id}"><h2>{escape(section.title)}</h2>{paper}'
        f"<p>{section.text}</p>{body}</section>"
    )


def _figure(figure: Figure, runs: Sequence[PageRun]) -> str:
    lacks = [_lacks(figure, run, runs) for run in runs]
    title = f"<h3>{figure.title}</h3>" if figure.title else ""
    notes = "".join(
        f"<li><b>{escape(run.name)}</b>: {escape(why)}</li>" for run, why in zip(runs, lacks, strict=True) if why
    )
    note = f'<div class="missing"><p>Not recorded</p><ul>{notes}</ul></div>' if notes else ""
    if all(lacks):
        return f'<div class="figure absent" id="{figure.id}">{title}{note}</div>'
    controls = "".join(map(_control, figure.controls))
    bound = f' data-bound="{figure.bound[0]}" data-bound-name="{escape(figure.bound[1])}"' if figure.bound else ""
    needs = " ".join(figure.needs)
    label = re.sub("<.*?>", "", figure.title or figure.paper or figure.id)
    return (
        f'<figure class="figure" id="{figure.id}" data-kind="{figure.kind}" data-needs="{needs}"{bound}>'
        f'<div class="figure-head">{title}<div class="controls">{controls}</div></div>{_verdict(figure, runs)}'
        f'<div class="plot" role="img" aria-label="{label}"></div><div class="legend"></div><p class="note"></p>'
        f"<figcaption>{figure.caption}</figcaption>{note}</figure>"
    )


def _control(name: str) -> str:
    label = _CONTROLS[name]
    if name.endswith("-step"):
        return (
            f'<label class="slider">{label} <input type="range" data-control="{name}" min="0" max="0" step="1">'
            f"<output></output></label>"
        )
    return f'<label>{label} <select data-control="{name}"></select></label>'


def _lacks(figure: Figure, run: PageRun, runs: Sequence[PageRun]) -> str | None:
    """What this run lacks for a figure, and why; None if it has everything."""
    need = figure.needs[0]
    if need == "*":
        return None
    if need in _LISTED:
        there = {
            "rows": not run.rows.empty,
            "paths": has_trajectory(run.paths),
            "whole": any("" in of for of in run.lines.values.values()),
            "pairs": len(runs) > 1 and has_trajectory(run.paths),
        }[need]
        if not there and need == "pairs" and len(runs) == 1:
            return "there is nothing to compare it with; give several runs that follow the same rows"
        return None if there else _LISTED[need]
    reasons: dict[str, list[str]] = {}
    for quantity in figure.needs:
        why = missing(run.about, run.quantities, quantity)
        if why:
            reasons.setdefault(why, []).append(quantity)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items()) or None


def _verdict(figure: Figure, runs: Sequence[PageRun]) -> str:
    """In words, whether a bound held at all recorded rows and steps, not only at those that are drawn."""
    if figure.bound is None:
        return ""
    lines = []
    for run in runs:
        worst = run.extremes.get(figure.needs[0])
        if worst is not None:
            held = worst.value < figure.bound[0]
            word = "below the bound throughout" if held else "above the bound"
            mark = "held" if held else "failed"
            if worst.not_finite:
                steps = "1 step" if worst.not_finite == 1 else f"{worst.not_finite} steps"
                unknown = f"not a finite number at {steps}"
                word = f"{unknown}, below the bound otherwise" if held else f"{word}, and {unknown}"
                mark = "unsure" if held else mark
            lines.append(
                f'<li class="{mark}"><b>{escape(run.name)}</b>: {word}; largest '
                f"{number(float(f'{worst.value:.3g}'))} at step {worst.step} in {escape(worst.group)}</li>"
            )
    return f'<ul class="verdict">{"".join(lines)}</ul>' if lines else ""


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


def settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The settings of an optimizer's param groups: each once, or its distinct values if the groups differ.

    >>> settings([{"lr": 0.1, "rows": "filter"}, {"lr": 0.1}])
    {'lr': '0.1'}
    """
    result = {}
    for key in dict.fromkeys(key for group in groups for key in group):
        if key not in ("params", "rows", "joint", "names", "param_names"):  # the table of groups has these
            result[key] = " / ".join(dict.fromkeys(number(group[key]) for group in groups if key in group))
    return result


def missing(about: Mapping[str, Any], recorded: set[str], quantity: str) -> str | None:
    """Why a run does not have a quantity; None if it has it."""
    if quantity in recorded:
        return None
    return str((about.get("missing") or {}).get(quantity) or "this run does not record it")

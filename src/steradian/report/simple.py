"""The demo's first page: figures over the steps from tables in memory."""

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from plotly.offline import get_plotlyjs

from steradian.report.figures import QUANTITIES, over_steps

__all__ = ["Run", "write_page"]

CAPTIONS = {
    "effective_lr": (
        "The rate of the step that the network feels: η<sup>e</sup> = A/(1 − A⟨c,u⟩) with A = η/(r²b̄). "
        "The configured rate is the same for every layer; this one is not."
    ),
    "angle": "How far each filter turns in one step, atan(η<sup>e</sup>‖c<sup>⊥</sup>‖).",
    "radius": (
        "The norm of each filter. It does not change the network, but it divides the effective rate: "
        "weight decay works through it."
    ),
    "identity_error": (
        "Theorem 1 predicts the next direction and radius from the optimizer's state. This is the distance to what "
        "the optimizer then did, the larger of the two: rounding, nothing else."
    ),
}


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run and what to say about it."""

    name: str
    table: pd.DataFrame
    facts: Mapping[str, str] = field(default_factory=dict)


def write_page(path: Path, runs: Sequence[Run], *, title: str) -> None:
    """Write the page; it opens without network. An existing one is replaced only when the new one is complete.

    Args:
        path: the HTML file; its folder is made.
        runs: the runs to compare.
        title: the page's heading.
    """
    if not runs:
        raise ValueError("a page needs at least one run")
    table = pd.concat([run.table for run in runs])
    where = {quantity: set(rows["run"]) for quantity, rows in table.groupby("quantity")}
    sections = [q for q in QUANTITIES if q in where]
    figures = {}
    for q in sections:
        having = [run.name for run in runs if run.name in where[q]]
        figures[q] = json.loads(over_steps(table, q, runs=having).to_json())
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(_document(title, runs, sections, figures), encoding="utf-8")
    os.replace(part, path)


def _document(title: str, runs: Sequence[Run], sections: Sequence[str], figures: Mapping[str, object]) -> str:
    # "</" would end the script element early.
    data = json.dumps(figures).replace("</", "<\\/")
    body = "\n".join(map(_section, sections))
    return _TEMPLATE.format(
        title=html.escape(title),
        style=_STYLE,
        facts="\n".join(_facts(run) for run in runs),
        body=body,
        plotly=get_plotlyjs(),
        data=data,
        script=_SCRIPT,
    )


def _section(quantity: str) -> str:
    heading, caption = QUANTITIES[quantity][0], CAPTIONS[quantity]
    figure = f'<div class="figure" data-figure="{quantity}"></div>'
    return f'<section id="{quantity}"><h2>{heading}</h2><p>{caption}</p>{figure}</section>'


def _facts(run: Run) -> str:
    items = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in run.facts.items())
    return f'<article class="run"><h2>{html.escape(run.name)}</h2><dl>{items}</dl></article>'


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="brand">Steradian</p>
<h1>{title}</h1>
<p>A filter followed by a normalization layer can be rescaled without changing the network: it trains on a unit
sphere. Lines are medians over the filters of a layer, bands reach from the 10th to the 90th percentile. Click a
layer in a legend to hide it.</p>
</header>
<main>
<div class="runs">{facts}</div>
{body}
</main>
<script>{plotly}</script>
<script type="application/json" id="figures">{data}</script>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #fff; --ink: #1d2327; --soft: #5b656d; --line: #dfe3e6; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181b; --card: #1c2226; --ink: #e7ebee; --soft: #9aa6ae; --line: #323a40; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
header, main { max-width: 1100px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
.brand { margin: 0; color: var(--soft); letter-spacing: .08em; text-transform: uppercase; font-size: 13px; }
h1 { margin: 4px 0 8px; font-size: 28px; line-height: 1.2; }
header p, section > p { color: var(--soft); max-width: 75ch; }
section, .run { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 18px 14px;
  margin: 16px 0; }
h2 { font-size: 18px; margin: 10px 0 2px; }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 16px; }
.run { margin: 8px 0; }
dl { display: grid; grid-template-columns: 1fr auto; gap: 2px 16px; margin: 6px 0; }
dt { color: var(--soft); } dd { margin: 0; font-variant-numeric: tabular-nums; }
.figure { min-height: 380px; }
"""

_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return { ink: style.getPropertyValue("--ink"), line: style.getPropertyValue("--line"),
           card: style.getPropertyValue("--card") };
};
function dressed(layout) {
  const { ink, line, card } = colours();
  const result = { ...layout, template: {}, font: { color: ink, family: "system-ui, sans-serif" },
                   hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } } };
  for (const key of Object.keys(layout))
    if (/^[xy]axis/.test(key))
      result[key] = { ...layout[key], gridcolor: line, linecolor: line, zerolinecolor: line, ticks: "outside",
                      tickcolor: line };
  return result;
}
function draw() {
  for (const place of document.querySelectorAll("[data-figure]")) {
    const figure = figures[place.dataset.figure];
    Plotly.react(place, figure.data, dressed(figure.layout), { responsive: true, displaylogo: false });
  }
}
dark.addEventListener("change", draw);
draw();
"""

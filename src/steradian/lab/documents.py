"""Documents whose tables and figures are made from stored results: marked regions are rewritten, the rest is kept.

A region lies between `<!-- begin KIND STUDY … -->` and `<!-- end KIND STUDY … -->`, each on its own line. KIND is one
of `KINDS`, a STUDY a file in the folder of results. If it does not exist, the region gets the command that makes it.
"""

import html
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from steradian.files import write_atomically
from steradian.lab import tables
from steradian.lab.angle import angle_rows
from steradian.lab.figures import FIGURES, TRACK_FIGURES, Figure, to_svg, write_figure
from steradian.lab.language import bits_rows, rate_rows
from steradian.lab.paper import COLUMNS
from steradian.lab.recipes import RECIPES
from steradian.lab.results import Result, Store, Tracks
from steradian.lab.tables import Column, Rows, accuracy_columns, interval_rows, markdown_table

__all__ = ["write_page", "write_up"]

_REGION = re.compile(r"^<!-- begin (?P<name>.+?) -->\n(?P<body>.*?)^<!-- end (?P=name) -->$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^<!-- (?:begin|end) .+? -->$", re.MULTILINE)


def regions(text: str) -> list[str]:
    """Names of the marked regions of a document; a mark without a counterpart raises a ValueError."""
    if alone := _MARK.findall(_REGION.sub(lambda region: region["body"], text)):
        raise ValueError(f"every begin needs an end of the same name, got {', '.join(alone)}")
    return [region["name"] for region in _REGION.finditer(text)]


def written(document: Path, *, results: Path, figures: Path) -> str:
    """The document with its regions rewritten; the figures are written to their folder."""
    if not document.is_file():
        raise ValueError(f"document must be a file, got {document}")
    text = document.read_text(encoding="utf-8")
    regions(text)

    def rewrite(match: re.Match[str]) -> str:
        kind, *studies = match["name"].split()
        if kind not in KINDS or not studies:
            raise ValueError(f"a region must name one of {', '.join(KINDS)} and a study, got {match['name']!r}")
        content = KINDS[kind](_Region(kind, studies, results, figures, document.parent))
        return f"<!-- begin {match['name']} -->\n\n{content}\n\n<!-- end {match['name']} -->"

    return _REGION.sub(rewrite, text)


def write_up(documents: Sequence[Path], *, results: Path, figures: Path) -> None:
    """Rewrite the regions of documents from a folder of results, with the figures in another folder."""
    made = {document: written(document, results=results, figures=figures) for document in documents}
    for document, text in made.items():  # only now: an error above leaves all documents unchanged
        write_atomically(document, text.encode())


class _Region:
    """What a region is made from: kind, studies and their results, folders of results, figures and document."""

    def __init__(self, kind: str, studies: Sequence[str], results: Path, figures: Path, document: Path) -> None:
        self.kind, self.studies, self.results, self.figures, self.document = kind, studies, results, figures, document
        stored = {study: Store(results / f"{study}.json").results() for study in studies}
        self.missing = [study for study, found in stored.items() if not found]
        self.every = [result for found in stored.values() for result in found]
        self.stored = list(stored.values())

    def joined(self, parts: Sequence[str]) -> str:
        """Paragraphs, and the commands that run what is missing."""
        return "\n\n".join([*parts, *map(_not_run, self.missing)])

    def show(self, figure: Figure, name: str) -> str:
        """Write a figure; returns the Markdown that shows it, with its caption."""
        path, caption = self.figures / f"{name}.svg", _CAPTIONS[self.kind]
        write_figure(figure, path)
        return f"![{caption}]({Path(os.path.relpath(path, self.document)).as_posix()})\n\n*{caption}*"


def _not_run(study: str) -> str:
    return f"*Not run yet: `{command(study)}`.*"


def command(study: str) -> str:
    """The command that runs a study; of a study with another name the recipe is unknown."""
    if study == "language" or study.startswith("angle-"):
        return f"steradian {study.replace('-', ' ')}"
    name, _, what = study.partition("-released-")
    flags = {"settings": " --settings released", "network": " --built-as released"}
    options = "".join(flag for each, flag in flags.items() if each in what)
    recipe, _, data = name.rpartition("-")
    models = {model.lower(): model for model, _ in COLUMNS}
    if recipe in models:
        return f"steradian reproduce tables --data {data} --columns {models[recipe]}{options}"
    if recipe in RECIPES:
        return f"steradian reproduce {recipe} --data {data}{options}"
    return f"steradian reproduce RECIPE --study {study}"


def _table(region: _Region) -> str:
    """Ours beside the paper's; a "table" has statements below it, "numbers" have none."""
    parts, columns = [], [column for found in region.stored for column in accuracy_columns(found)]
    for column in columns:
        parts.append(f"**{column.name}**, {column.length}\n\n{markdown_table(*column.rows())}")
        if region.kind == "table":
            parts.append("\n".join(f"- {text}" for text in column.statements()))
    return region.joined([*parts, tables.rule_of(columns)] if parts else [])


def _overview(region: _Region) -> str:
    """Mean accuracies of all methods in all columns, with the paper's in brackets."""
    heads, columns = ["method"], list[Column]()
    for study, found in zip(region.studies, region.stored, strict=True):
        _, released, what = study.partition("-released-")
        for column in accuracy_columns(found):
            heads.append(column.name + (f", released {what}" if released else ""))
            columns.append(column)
    lines = []
    for method in sorted({m for column in columns for m in column.cells}, key=tables.method_order):
        papers = [f" ({c.papers[method].mean:.2f})" if method in c.papers else "" for c in columns]
        ours = [str(c.cells.get(method, "")) for c in columns]
        lines.append([method, *(mean + paper if mean else "" for mean, paper in zip(ours, papers, strict=True))])
    return region.joined([markdown_table(heads, lines)] if lines else [])


_CAPTIONS = {
    "loss": "Training loss by epoch: mean over the seeds, with bands from the lowest seed to the highest.",
    "accuracy": "Validation accuracy by epoch: mean over the seeds, with bands from the lowest seed to the highest.",
    "means": "Mean test accuracy and its 95 % interval over the seeds, whose number is in brackets.",
    "tuning": "Best validation accuracy of each setting that was tried, by the angle that it gives in equilibrium.",
    "layers": "How far the filters of every layer turn per step, by epoch.",
    "hypotheses": "The largest of each quantity over all filters of all layers, at the recorded steps.",
    "trajectories": "Cosine of filters with the same filter under SGD: three filters of every block, drawn at random.",
    "phenomena": "How far each phenomenon turns the effective direction: medians over the filters of every layer.",
}


def _curves(region: _Region) -> str:
    figure = FIGURES[region.kind](region.every)
    if not figure.empty:
        return region.show(figure, f"{region.kind}-{region.studies[0]}")
    ran = any(result.config.start is None for result in region.every)
    return "*Nothing to show: every training diverged.*" if ran else "\n\n".join(map(_not_run, region.studies))


def _tracked(region: _Region) -> str:
    """A figure and its summary, from the first of the studies that has recorded it."""
    for study in region.studies:
        tracks = Tracks(region.results / f"{study}-tracks.parquet")
        figure, rows = TRACK_FIGURES[region.kind](tracks.table(), tracks.about())
        if not figure.empty:
            shown = region.show(figure, study if study.startswith(region.kind) else f"{region.kind}-{study}")
            return f"{shown}\n\n{markdown_table(*rows)}"
    return _not_run(region.studies[0])


def _machine_rows(results: Sequence[Result]) -> Rows:
    """What the trainings ran on."""
    where = [[str(r.environment.get(name, "")) for name in ("device", "torch", "python", "commit")] for r in results]
    lines = [[*kind, str(count)] for kind, count in Counter(map(tuple, where)).items()]
    return ["device", "torch", "Python", "commit", "trainings"], lines


def _setting_rows(results: Sequence[Result]) -> Rows:
    """Hyper-parameters of the trainings of each method."""
    lines: dict[tuple[str, ...], None] = {}
    for c in sorted((result.config for result in results), key=lambda config: tables.method_order(config.method)):
        adam = c.method.startswith("Ad")  # also AdaGrad
        momentum = {"SGD-M": f"β = {c.momentum:g}", "SGD": "none"}.get(c.method, f"β₁ = {c.betas[0]:g}" if adam else "")
        epochs = f"{c.epochs}, rate × {c.gamma:g} at {', '.join(map(str, c.milestones))}"
        if c.schedule != "steps":
            epochs = f"{c.epochs}, {c.schedule}" + (f" after {c.warmup} of warm-up" if c.warmup else "")
        rates, second = (f"{c.lr:g}", f"{c.weight_decay:g}"), f"{c.betas[1]:g}" if adam else ""
        lines[c.method, *rates, momentum, second, epochs, str(c.batch_size), c.precision] = None
    heads = ["method", "rate η", "L2 λ", "momentum", "β₂", "epochs", "batch", "precision"]
    return heads, [list(line) for line in lines]


_TABLES: dict[str, Callable[[Sequence[Result]], Rows]] = {
    "points": tables.point_rows,
    "intervals": interval_rows,
    "final": partial(interval_rows, value=lambda result: result.final_accuracy, what="at the end"),
    "bits": bits_rows,
    "rates": rate_rows,
    "angles": angle_rows,
    "machines": _machine_rows,
    "settings": _setting_rows,
}


def _rows(region: _Region) -> str:
    return region.joined([markdown_table(*_TABLES[region.kind](region.every))] if region.every else [])


KINDS: dict[str, Callable[[_Region], str]] = {
    **dict.fromkeys(("table", "numbers"), _table),
    "overview": _overview,
    **dict.fromkeys(_TABLES, _rows),
    **dict.fromkeys(FIGURES, _curves),
    **dict.fromkeys(TRACK_FIGURES, _tracked),
}


def write_page(results: Sequence[Result], path: Path) -> None:
    """Write the tables and curves of a comparison as one page, which opens without network."""
    parts = [f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(path.stem)}</title>']
    parts.append("<style>body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}</style>")
    for column in accuracy_columns(results):
        parts += [f"<h1>{html.escape(column.name)}, {column.length}</h1>", _html_table(*column.rows(seeds=True))]
        parts += [f"<p>{html.escape(text)}</p>" for text in (*column.statements(), tables.rule_of([column]))]
    parts.append(_html_table(*_setting_rows(results)))
    for figure in (make(results) for make in FIGURES.values()):
        if not figure.empty:
            svg = to_svg(figure)
            parts.append(f"<div>{svg[svg.index('<svg') :]}</div>")
    write_atomically(path, "\n".join(parts).encode())


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [f"<th>{'<th>'.join(map(html.escape, heads))}"]
    rows += [f"<td>{'<td>'.join(map(html.escape, line))}" for line in lines]
    return f"<table><tr>{'<tr>'.join(rows)}</table>"

"""Documents whose tables and figures are made from stored results: marked regions are rewritten, the rest is kept.

A region lies between `<!-- begin KIND STUDY … -->` and `<!-- end KIND STUDY … -->`, each on its own line. KIND is one
of `KINDS`, and the studies are names of files in the folder of results. For a study that has not been run the region
gets the command that runs it.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steradian.files import write_atomically
from steradian.lab.config import METHODS
from steradian.lab.figures import FIGURES, SUMMARIES, TRACK_FIGURES, Figure, write_figure
from steradian.lab.paper import COLUMNS
from steradian.lab.recipes import RECIPES
from steradian.lab.results import Result, Store, Tracks
from steradian.lab.tables import (
    RULE,
    Column,
    accuracy_columns,
    markdown_table,
    plain_loops,
    point_rows,
    time_rows,
)

__all__ = ["KINDS", "Place", "command", "fragment", "regions", "write_up", "written"]

_REGION = re.compile(r"^<!-- begin (?P<name>.+?) -->\n(?P<body>.*?)^<!-- end (?P=name) -->$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^<!-- (?:begin|end) .+? -->$", re.MULTILINE)


def regions(text: str) -> list[str]:
    r"""Names of the marked regions of a document.

    >>> regions("a\n<!-- begin table x -->\nold\n<!-- end table x -->\nb")
    ['table x']

    Raises:
        ValueError: a mark has no counterpart.
    """
    found = [match["name"] for match in _REGION.finditer(text)]
    if 2 * len(found) != len(_MARK.findall(text)):
        alone = [mark for mark in _MARK.findall(text) if not any(f" {name} -->" in mark for name in found)]
        raise ValueError(f"every begin needs an end of the same name, got {', '.join(alone or _MARK.findall(text))}")
    return found


def written(document: Path, *, results: Path, figures: Path) -> str:
    """The document with its regions rewritten; the figures are written to their folder."""
    text = document.read_text(encoding="utf-8")
    regions(text)
    place = Place(results, figures, document.parent)

    def rewrite(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- begin {name} -->\n\n{fragment(name, place)}\n\n<!-- end {name} -->"

    return _REGION.sub(rewrite, text)


def write_up(documents: Sequence[Path], *, results: Path, figures: Path) -> None:
    """Rewrite the regions of documents.

    Args:
        documents: files with marked regions.
        results: folder of the results.
        figures: folder for the figures.
    """
    for document in documents:
        if not document.is_file():
            raise ValueError(f"document must be a file, got {document}")
    made = {document: written(document, results=results, figures=figures) for document in documents}
    for document, text in made.items():  # only now: an error above leaves all documents unchanged
        write_atomically(document, text.encode())


# The content of a region


@dataclass(frozen=True)
class Place:
    """The folders of a document.

    Attributes:
        results: folder of the results.
        figures: folder for the figures.
        document: folder of the document, from which figures are linked.
    """

    results: Path
    figures: Path
    document: Path

    def store(self, study: str) -> list[Result]:
        """The results of a study; none if there is no file."""
        return Store(self.results / f"{study}.json").results()

    def tracks(self, study: str) -> Tracks:
        """The records of a study."""
        return Tracks(self.results / f"{study}-tracks.parquet")

    def show(self, figure: Figure, name: str, text: str) -> str:
        """Write a figure; returns the Markdown that shows it."""
        path = self.figures / f"{name}.svg"
        write_figure(figure, path)
        return f"![{text}]({Path(os.path.relpath(path, self.document)).as_posix()})"


def fragment(name: str, place: Place) -> str:
    """The content of a region by its name: a kind and the studies that it is made from.

    Raises:
        ValueError: there is no such kind, or no study is named.
    """
    kind, *studies = name.split()
    if kind not in KINDS or not studies:
        raise ValueError(f"a region must name one of {', '.join(KINDS)} and a study, got {name!r}")
    return KINDS[kind](kind, studies, place)


def command(study: str) -> str:
    """The command that runs a study; of a study with another name the recipe is unknown.

    >>> command("resnet20-cifar10")
    'steradian reproduce tables --data cifar10 --columns ResNet20'
    >>> command("hypotheses-cifar10")
    'steradian reproduce hypotheses --data cifar10'
    >>> command("resnet20-cifar10-released-settings")
    'steradian reproduce tables --data cifar10 --columns ResNet20 --settings released'
    >>> command("mine")
    'steradian reproduce RECIPE --study mine'
    """
    name = study
    study, _, what = study.partition("-released-")
    options = "".join(f" --{each} released" for each in what.split("-") if each)
    recipe, _, data = study.rpartition("-")
    model = next((model for model, _ in COLUMNS if model.lower() == recipe), None)
    if model is not None:
        return f"steradian reproduce tables --data {data} --columns {model}{options}"
    if recipe not in RECIPES:
        return f"steradian reproduce RECIPE --study {name}"
    return f"steradian reproduce {recipe} --data {data}{options}"


def _missing(studies: Sequence[str]) -> str:
    return "\n\n".join(f"*Not run yet: `{command(study)}`.*" for study in studies)


def _joined(parts: Sequence[str], missing: Sequence[str]) -> str:
    return "\n\n".join([*parts, *([_missing(missing)] if missing else [])])


def _columns(studies: Sequence[str], place: Place) -> tuple[list[Column], list[str]]:
    """The columns of these studies, and the studies that are missing."""
    found: list[Column] = []
    for study in studies:
        found += accuracy_columns(place.store(study))
    return found, [study for study in studies if not place.store(study)]


def _table(kind: str, studies: Sequence[str], place: Place) -> str:
    """Ours beside the paper's; a "table" has statements below it, "numbers" have none."""
    columns, missing = _columns(studies, place)
    parts = []
    for column in columns:
        parts.append(f"**{column.name}**, {column.length}\n\n{markdown_table(*column.rows())}")
        if kind == "table":
            parts.append("\n".join(f"- {text}" for text in column.statements()))
    return _joined([*parts, RULE] if parts else [], missing)


def _points(_: str, studies: Sequence[str], place: Place) -> str:
    """Every setting that was tried."""
    results = [result for study in studies for result in place.store(study) if result.config.start is None]
    missing = [study for study in studies if not place.store(study)]
    return _joined([markdown_table(*point_rows(results))] if results else [], missing)


def _times(_: str, studies: Sequence[str], place: Place) -> str:
    columns, missing = _columns(studies, place)
    plain = plain_loops(place.results / "bench-fleet.json")
    return _joined([markdown_table(*time_rows(columns, plain))] if columns else [], missing)


_CAPTIONS = {
    "loss": "Training loss by epoch: mean over the seeds, with bands from the lowest seed to the highest.",
    "accuracy": "Validation accuracy by epoch: mean over the seeds, with bands from the lowest seed to the highest.",
    "hypotheses": "The largest of each quantity over all filters of all layers, at the recorded steps.",
    "trajectories": "Cosine of filters with the same filter under SGD: three filters of every block, drawn at random.",
    "phenomena": "How far each phenomenon turns the effective direction: medians over the filters of every layer.",
}


def _curves(kind: str, studies: Sequence[str], place: Place) -> str:
    results = [result for study in studies for result in place.store(study)]
    figure = FIGURES[kind](results)
    if figure.empty:
        ran = any(result.config.start is None for result in results)
        return "*Nothing to show: every training diverged.*" if ran else _missing(studies)
    return f"{place.show(figure, f'{kind}-{studies[0]}', _CAPTIONS[kind])}\n\n*{_CAPTIONS[kind]}*"


def _tracked(kind: str, studies: Sequence[str], place: Place) -> str:
    """A figure and its summary, from the first of the studies that has recorded it."""
    for study in studies:
        tracks = place.tracks(study)
        table, about = tracks.table(), tracks.about()
        if about and not (figure := TRACK_FIGURES[kind](table, about)).empty:
            name = study if study.startswith(kind) else f"{kind}-{study}"
            shown = place.show(figure, name, _CAPTIONS[kind])
            return f"{shown}\n\n*{_CAPTIONS[kind]}*\n\n{markdown_table(*SUMMARIES[kind](table, about))}"
    return _missing(studies[:1])


def _machines(_: str, studies: Sequence[str], place: Place) -> str:
    """What the trainings ran on."""
    kinds: dict[tuple[str, ...], int] = {}
    for result in (result for study in studies for result in place.store(study)):
        kind = tuple(str(result.environment.get(name, "")) for name in ("device", "torch", "python", "commit"))
        kinds[kind] = kinds.get(kind, 0) + 1
    if not kinds:
        return _missing(studies)
    lines = [[*kind, str(count)] for kind, count in kinds.items()]
    return markdown_table(["device", "torch", "Python", "commit", "trainings"], lines)


def _settings(_: str, studies: Sequence[str], place: Place) -> str:
    """Hyper-parameters of the trainings of each method."""
    configs = [result.config for study in studies for result in place.store(study)]
    if not configs:
        return _missing(studies)
    lines: dict[tuple[str, ...], None] = {}
    for c in sorted(configs, key=lambda config: METHODS.index(config.method)):
        momentum = {"SGD-M": f"β = {c.momentum:g}", "SGD": "none"}.get(c.method, f"β₁ = {c.betas[0]:g}")
        second = "" if c.method.startswith("SGD") else f"{c.betas[1]:g}"
        epochs = f"{c.epochs}, rate × {c.gamma:g} at {', '.join(map(str, c.milestones))}"
        rates = (f"{c.lr:g}", f"{c.weight_decay:g}")
        lines[c.method, *rates, momentum, second, epochs, str(c.batch_size), c.precision] = None
    heads = ["method", "rate η", "L2 λ", "momentum", "β₂", "epochs", "batch", "precision"]
    return markdown_table(heads, [list(line) for line in lines])


KINDS: dict[str, Callable[[str, Sequence[str], Place], str]] = {
    "table": _table,
    "numbers": _table,
    "points": _points,
    "times": _times,
    "machines": _machines,
    "settings": _settings,
    **dict.fromkeys(FIGURES, _curves),
    **dict.fromkeys(TRACK_FIGURES, _tracked),
}
"""Kinds of regions."""

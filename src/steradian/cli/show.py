"""Commands that show what is stored: table, figure and report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from steradian.cli import app

if TYPE_CHECKING:
    from steradian.lab.results import Result

Folder = Annotated[Path, typer.Option("--results", help="Folder of the results.")]


@app.command()
def table(
    study: Annotated[str, typer.Argument(help="Name of a study in results/, such as resnet20-cifar10.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="For a document.")] = False,
    folder: Folder = Path("results"),
) -> None:
    """Print the accuracies of a study beside the paper's, with their spread over seeds and what is noise.

    Example: steradian table resnet20-cifar10
    """
    from steradian.lab.tables import accuracy_table

    results = _stored(study, folder)
    if not markdown:
        print_table(results, Console())
        return
    for norm in dict.fromkeys(result.config.norm for result in results):
        typer.echo(accuracy_table(results, norm=norm).markdown())


@app.command()
def figure(
    study: Annotated[str, typer.Argument(help="Name of a study in results/.")],
    kind: Annotated[str, typer.Argument(help="loss, accuracy, hypotheses, phenomena or trajectories.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="An .svg, or an .html that can be zoomed.")],
    folder: Folder = Path("results"),
) -> None:
    """Draw a figure of the paper from a study.

    Example: steradian figure resnet20-cifar10 loss --out loss.svg
    """
    from steradian.lab.figures import FIGURES, TRACK_FIGURES, write_figure
    from steradian.lab.tracks import Tracks

    if kind in FIGURES:
        charts = FIGURES[kind](_stored(study, folder))
    elif kind in TRACK_FIGURES:
        charts = TRACK_FIGURES[kind](Tracks(folder / f"{study}-tracks.parquet").table())
    else:
        raise ValueError(f"kind must be one of {', '.join([*FIGURES, *TRACK_FIGURES])}, got {kind!r}")
    write_figure(charts, out)
    Console().print(f"The figure: {out}", highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Recorded runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write one page from recorded runs, which opens without network.

    Example: steradian report runs/adam runs/ab --out page.html
    """
    from steradian.report import page

    page.report(runs, out)
    Console().print(f"The page: {out}", highlight=False, soft_wrap=True)


def print_table(results: "Sequence[Result]", console: Console) -> None:
    """Print one table for each normalization and what its figures say, or the best points of a grid."""
    from steradian.lab.grids import grid_rows, is_grid
    from steradian.lab.tables import RULE, accuracy_table

    if is_grid(results):
        heads, lines = grid_rows(results)
        found = Table(*heads, title="best of the grid, by validation accuracy")
        for line in lines:
            found.add_row(*line)
        console.print(found)
        return
    for norm in dict.fromkeys(result.config.norm for result in results):
        made = accuracy_table(results, norm=norm)
        heads, lines = made.rows()
        shown = Table(*heads, title=norm)
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
        for text in [RULE, *made.statements()]:
            console.print(text, highlight=False, soft_wrap=True)


def _stored(study: str, folder: Path) -> "list[Result]":
    from steradian.lab.results import Store

    results = Store(folder / f"{study}.json").results()
    if not results:
        there = sorted(path.stem for path in folder.glob("*.json"))
        raise ValueError(f"no results of {study!r} in {folder}; there are {', '.join(there) or 'none'}")
    return results

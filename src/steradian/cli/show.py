"""Commands that show stored results: table, figure, report, match and write-up."""

import ast
import importlib
import inspect
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from steradian.cli import app, screen

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from steradian.lab.results import Result

GRID = "best of the grid, by validation accuracy"
BITS = "Bits per byte of the validation text, mean ± half of the 95 % interval"
_KINDS = "loss, accuracy, means, tuning, hypotheses, layers, phenomena or trajectories."
Folder = Annotated[Path, typer.Option("--results", help="Folder of the results.")]


@app.command()
def table(
    study: Annotated[str, typer.Argument(help="Name of a study in results/, such as resnet20-cifar10.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="For a document.")] = False,
    folder: Folder = Path("results"),
) -> None:
    """Print what a study reached: accuracies beside the paper's, or bits per byte, with their spread over seeds.

    Example: steradian table resnet20-cifar10
    """
    from steradian.lab.language import bits_rows, is_text, rate_rows
    from steradian.lab.tables import accuracy_columns, grid_rows, is_grid, markdown_table, rule_of

    results = _results(study, folder)
    if is_text(results):
        title, rows = (study, rate_rows(results)) if is_grid(results) else (f"{study}: {BITS}", bits_rows(results))
        if markdown:
            typer.echo(markdown_table(*rows))
        else:
            show_rows(screen(), title, *rows)
    elif not markdown:
        print_table(results, screen())
    elif is_grid(results):
        typer.echo(f"{GRID}\n\n{markdown_table(*grid_rows(results))}\n")
    else:
        for column in accuracy_columns(results):
            texts = "\n".join(f"- {text}" for text in column.statements())
            table, rule = markdown_table(*column.rows()), rule_of([column])
            typer.echo(f"{column.name}, {column.length}\n\n{table}\n\n{rule}\n\n{texts}\n")


@app.command()
def figure(
    study: Annotated[str, typer.Argument(help="Name of a study in results/.")],
    kind: Annotated[str, typer.Argument(help=_KINDS)],
    out: Annotated[Path, typer.Option("--out", "-o", help="An .svg or an .html.")],
    folder: Folder = Path("results"),
) -> None:
    """Draw a figure of the paper from a study.

    Example: steradian figure resnet20-cifar10 loss --out loss.svg
    """
    from steradian.lab.config import match_names
    from steradian.lab.figures import FIGURES, TRACK_FIGURES, write_figure
    from steradian.lab.results import Tracks

    [kind] = match_names("kind", [kind], [*FIGURES, *TRACK_FIGURES])
    if kind in FIGURES:
        drawn = FIGURES[kind](_results(study, folder))
    else:
        tracks = Tracks(folder / f"{study}-tracks.parquet")
        if not tracks.path.exists():
            there = [path.name.removesuffix("-tracks.parquet") for path in sorted(folder.glob("*-tracks.parquet"))]
            raise ValueError(f"no records of {study!r} in {folder}; there are {', '.join(there) or 'none'}")
        drawn, _ = TRACK_FIGURES[kind](tracks.table(), tracks.about())
    write_figure(drawn, out)
    screen().print(f"The figure: {out}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Recorded runs, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its heading; the names of the runs by default.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve a page that follows the runs instead.")] = False,
    port: Annotated[int, typer.Option(help="Of the live page; 0 for any that is free.")] = 0,
) -> None:
    """Write one page from recorded runs, which opens without network, or serve one on this machine with --live.

    Runs are folders that watch(optimizer, to=…) writes; steradian demo leaves three in demo/runs.

    Example: steradian report demo/runs --out page.html
    """
    from steradian.reporting import page

    if live:
        from steradian.reporting.live import LiveServer

        with LiveServer(runs, port=port, title=title) as server, suppress(KeyboardInterrupt):
            screen().print(f"The page: {server.url} (Ctrl+C ends it)", soft_wrap=True)
            server.serve_forever()
        return
    page.report(runs, out, title=title)
    screen().print(f"The page: {out}", soft_wrap=True)


@app.command()
def match(
    source: Annotated[str, typer.Argument(help='A recorded run, an angle in radians, or "SGD(lr=0.1, …)".')],
    to: Annotated[str, typer.Option(help='The optimizer, with what is given: "AdamW(lr=1e-3)".')],
    only: Annotated[str | None, typer.Option(help="Of a run, the layers that match this glob pattern.")] = None,
    slope: Annotated[float | None, typer.Option(help="‖∇L(u)‖, for Adam with coupled decay.")] = None,
    size: Annotated[int | None, typer.Option(help="Numbers in a row, for Adam with coupled decay.")] = None,
) -> None:
    """Find settings with which an optimizer turns weights as far per step as another one, or as a recorded run.

    Optimizers are written as in Python; those of other libraries with their module, lion_pytorch.Lion(lr=1e-4).

    Example: steradian match demo/runs/SGD --to "AdamW(lr=1e-3)"
    """
    import torch

    from steradian import optim
    from steradian.watching.match import match as matched
    from steradian.watching.match import unknown

    origin: Optimizer | str | float = source
    with suppress(ValueError):
        origin = float(source)
    if "(" in source and not Path(source).exists():
        kind, settings = _optimizer(source)
        origin = kind([{"params": [torch.nn.Parameter(torch.ones(1, 2))], "rows": "filter"}], **settings)
    kind, settings = _optimizer(to)
    layers: dict[str, Any] = {"only": only, "slope": slope, "size": size}
    with warnings.catch_warnings(action="ignore"):  # said below
        found = matched(origin, to=kind, **layers, **settings)
        angle = matched(origin, to=optim.Angular, **layers)["lr"]
    console = screen()
    console.print(f"{source} turns rows by {angle:.4g} rad per step. The same angle:")
    said = ", ".join(f"{name}={value!r}" for name, value in found.items())
    console.print(f"\n    {kind.__name__}({said})\n")
    for sentence in unknown(origin, only):
        console.print(sentence, soft_wrap=True)


def _optimizer(text: str) -> "tuple[type[Optimizer], dict[str, Any]]":
    """Class and settings from "AdamW(lr=1e-3)", or "AdamW"; names without a module are ours, or else torch's."""
    import torch

    from steradian import optim
    from steradian.lab.config import match_names

    try:
        call = ast.parse(text, mode="eval").body
        call = call if isinstance(call, ast.Call) else ast.Call(call, [], [])
        if call.args:
            raise ValueError("settings have names")
        settings = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        module, _, name = ast.unparse(call.func).rpartition(".")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"an optimizer must be written like AdamW(lr=1e-3), got {text!r}") from error
    for place in [importlib.import_module(module)] if module else [optim, torch.optim]:
        if hasattr(place, name):
            kind = getattr(place, name)
            known = inspect.signature(kind).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
                match_names(f"settings of {name}", list(settings), known)
            return kind, settings
    raise ValueError(f"there is no optimizer {name!r} in {module or 'steradian.optim or torch.optim'}")


@app.command("write-up")
def write_up(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files with marked regions.")],
    figures: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("docs/study"),
    folder: Folder = Path("results"),
) -> None:
    """Rewrite the tables and figures of documents from results/, between their marks; the rest is kept.

    Example: steradian write-up docs/study.md
    """
    from steradian.lab import documents as lab_documents

    if not folder.is_dir():  # otherwise every region would say that its study has not been run
        raise ValueError(f"results must be a folder, got {str(folder)!r}")
    lab_documents.write_up(documents, results=folder, figures=figures)
    screen().print(f"Written: {', '.join(map(str, documents))}; the figures: {figures}", soft_wrap=True)


def print_table(results: "Sequence[Result]", console: Console) -> None:
    """Print one table for each column with its statements, or the best points of a grid."""
    from steradian.lab.tables import accuracy_columns, grid_rows, is_grid, rule_of

    if is_grid(results):
        show_rows(console, GRID, *grid_rows(results))
        return
    for column in (columns := accuracy_columns(results)):
        heads, lines = column.rows(seeds=True)
        if sum(3 + max(map(len, cells)) for cells in zip(heads, *lines, strict=True)) >= console.width:
            heads, lines = column.rows()
        show_rows(console, f"{column.name}, {column.length}", heads, lines)
        for text in column.statements():
            console.print(text, soft_wrap=True)
    if columns:
        console.print(rule_of(columns), soft_wrap=True)


def show_rows(console: Console, title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table whose cells are wrapped on a narrow screen, and never cut off."""
    table = Table(*(Column(head, overflow="fold") for head in heads), title=title)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _results(study: str, folder: Path) -> "list[Result]":
    from steradian.lab.results import Store

    if results := Store(folder / f"{study}.json").results():
        return results
    there = [path.stem for path in sorted(folder.glob("*.json")) if path.read_bytes().startswith(b'{"runs"')]
    raise ValueError(f"no results of {study!r} in {folder}; there are {', '.join(there) or 'none'}")

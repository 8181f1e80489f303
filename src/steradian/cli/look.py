"""Commands that look at a model: demo and inspect."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from steradian.cli import app, screen


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per method.")] = 30,
) -> None:
    """Find the spheres of a small BN network, train it on digits with three optimizers, watch them, write a page.

    Example: steradian demo --out demo
    """
    from steradian.lab import demo as lab_demo

    results = lab_demo.run(out, epochs=epochs)
    typer.echo(f"The spheres that find_groups proved:\n\n{results[0].groups}\n")
    for result in results:
        typer.echo(result.watch.summary() + "\n")
    table = Table("method", "test accuracy", "seconds, every step watched")
    for result in results:
        table.add_row(result.name, f"{100 * result.accuracy:.1f} %", f"{result.seconds:.1f}")
    console = screen()
    console.print(table)
    console.print(f"The page: {out / 'index.html'}", soft_wrap=True)


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(help="package.module:factory, file.py:factory, or timm:NAME where timm is installed.")
    ],
    input: Annotated[
        list[str], typer.Option(help="Shape of an input, e.g. 8x3x32x32, or 8x16:1000 for tokens; once per input.")
    ],
    explain: Annotated[str | None, typer.Option(help="Say more about one parameter.")] = None,
) -> None:
    """Find which weights of a model live on spheres, proved on the model itself, and why.

    Example: steradian inspect steradian.lab.models:small_cnn --input 8x1x8x8
    """
    from steradian.discovery import find_groups
    from steradian.lab.targets import example_input, load_model

    model = load_model(target)
    groups = find_groups(model, *map(example_input, input))
    typer.echo(groups.explain(explain) if explain else str(groups))

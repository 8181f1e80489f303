"""Commands that look at a model: demo and inspect."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from steradian.cli import app
from steradian.discovery import find_groups


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per method.")] = 30,
) -> None:
    """Find the spheres of a small BN network, train it on digits, map every step to them, and write a page.

    Example: steradian demo --out demo
    """
    from steradian.lab import demo as lab_demo

    results = lab_demo.run(out, epochs=epochs)
    table = Table("method", "test accuracy", "largest error of the identity", "seconds")
    for r in results:
        error = "" if r.worst_error is None else f"{r.worst_error:.1e}"
        table.add_row(r.name, f"{100 * r.accuracy:.1f} %", error, f"{r.seconds:.1f}")
    console = Console()
    console.print("The spheres that find_groups proved:\n")
    typer.echo(str(results[0].groups) + "\n")
    console.print(table)
    console.print(f"The page: {out / 'index.html'}")


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="package.module:factory, or timm:NAME where timm is installed.")],
    input: Annotated[list[str], typer.Option(help="Shape of an input, e.g. 8x3x32x32; once per input.")],
    explain: Annotated[str | None, typer.Option(help="Say more about one parameter.")] = None,
) -> None:
    """Find which weights of a model live on spheres, proved on the model itself, and why.

    Example: steradian inspect steradian.lab.models:small_cnn --input 8x1x8x8
    """
    from steradian.lab.targets import example_input, load_model

    model = load_model(target)
    groups = find_groups(model, *map(example_input, input))
    typer.echo(groups.explain(explain) if explain else str(groups))

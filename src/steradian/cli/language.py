"""The command that trains language models: language."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from steradian.cli import app, screen
from steradian.cli.show import show_rows
from steradian.cli.study import Device, Seconds


@app.command()
def language(
    root: Annotated[Path, typer.Option(help="Folder of the text, as steradian data corpus writes it.")],
    methods: Annotated[list[str] | None, typer.Option(help='e.g. "Muon"; once for each. All by default.')] = None,
    post_norms: Annotated[bool, typer.Option("--post-norms", help="Normalize after each layer, too.")] = False,
    lr: Annotated[list[float] | None, typer.Option(help="A rate to try, once for each; six by default.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many, for the best rate of each method.")] = 5,
    settings: Annotated[list[str] | None, typer.Option("--set", help="width=64, epochs=2, batch_size=8, …")] = None,
    seconds: Seconds = None,
    device: Device = None,
    study: Annotated[str, typer.Option(help="Name of the files in results/.")] = "language",
) -> None:
    """Train a byte-level language model with matrices on spheres or not: tune all methods alike, then over seeds.

    Finished trainings are never repeated: run the same command to continue.

    Example: steradian language --root data/python-source --device cuda --seconds 500
    """
    from steradian.lab.language import RATES, Shape, bits_rows, language_study
    from steradian.lab.study import Study

    given: dict[str, Any] = {}
    for text in settings or ():
        name, _, value = text.partition("=")
        given[name] = value if name == "precision" else json.loads(value)
    sizes = {name: given.pop(name) for name in list(given) if name in Shape.__dataclass_fields__}
    shape, made, console = Shape(post_norms=post_norms, **sizes), Study(study), screen()
    rates = lr or RATES
    how: dict[str, Any] = {"methods": methods, "rates": rates, "seeds": seeds, "device": device, "seconds": seconds}
    finished = language_study(
        shape, root, study=made, say=lambda text: console.print(text, soft_wrap=True), **how, **given
    )
    if results := made.store.results():
        show_rows(console, "Bits per byte of the validation text", *bits_rows(results))
    console.print(f"The results: {made.store.path}; recorded runs: {made.work}", soft_wrap=True)
    if not finished:
        console.print("Time is up before the end: run the same command again to continue.")

"""The command that compares optimizers at equal angles: angle."""

import json
from typing import Annotated, Any

import typer

from steradian.cli import app, screen
from steradian.cli.show import show_rows
from steradian.cli.study import Compile, Device, Root, Seconds, Size


@app.command()
def angle(
    part: Annotated[str, typer.Argument(help="crossed, matched or tuned.")],
    data: Annotated[str, typer.Option(help="digits, cifar10, cifar100, svhn, or packed.")] = "cifar10",
    network: Annotated[str, typer.Option(help="ResNet20, ResNet18 or VGG16.")] = "ResNet20",
    root: Root = None,
    methods: Annotated[list[str] | None, typer.Option(help="Some of them; once for each.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="135 by default, 60 for tuned.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    points: Annotated[int, typer.Option(min=2, help="matched: steps of SGD-M to record.")] = 600,
    settings: Annotated[list[str] | None, typer.Option("--set", help="width=8, batch_size=64, …")] = None,
    seconds: Seconds = None,
    size: Size = 14,
    device: Device = None,
    compile: Compile = None,
    study: Annotated[str | None, typer.Option(help="Name of the files in results/.")] = None,
) -> None:
    """Compare optimizers whose rest is exchanged (crossed), at SGD-M's angle (matched), or tuned alike (tuned).

    Finished trainings are never repeated: run the same command to continue.

    Example: steradian angle matched --root data/cifar10 --device cuda --seconds 500
    """
    from steradian.lab.angle import angle_study
    from steradian.lab.intervals import interval_rows
    from steradian.lab.progress import Progress
    from steradian.lab.study import Study

    given: dict[str, Any] = {}
    for text in settings or ():
        name, _, value = text.partition("=")
        given[name] = value if name in ("precision", "norm") else json.loads(value)
    usual = (network, data) == ("ResNet20", "cifar10")
    made = Study(study or f"angle-{part}" + ("" if usual else f"-{network}-{data}".lower()))
    console = screen()
    how: dict[str, Any] = {"methods": methods, "epochs": epochs, "seeds": seeds, "points": points, "settings": given}
    how |= {"roots": {data: root} if root else {}, "size": size, "device": device, "seconds": seconds}
    finished = angle_study(
        part, data=data, network=network, study=made, compiled=compile, progress=Progress(console), **how
    )
    if results := made.store.results():
        show_rows(console, "Test accuracy in percent, mean and 95 % interval over seeds", *interval_rows(results))
    console.print(f"The results: {made.store.path}", soft_wrap=True)
    if not finished:
        console.print("Time is up before the end: run the same command again to continue.")

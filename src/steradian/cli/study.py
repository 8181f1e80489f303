"""Commands that run trainings: train, reproduce and bench."""

import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steradian.cli import app, screen
from steradian.cli.show import print_table

if TYPE_CHECKING:
    from steradian.lab.config import Config
    from steradian.lab.training import Execution

Data = Annotated[str | None, typer.Option(help="Data set: digits, cifar10, cifar100, svhn, or a folder's name.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data: packed, original archives, or images.")]
Seconds = Annotated[
    float | None, typer.Option(min=0, help="Stop at a checkpoint when this time is over; run again to continue.")
]
Size = Annotated[int | None, typer.Option(min=1, help="Trainings in flight at once.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
Name = Annotated[str | None, typer.Option("--study", help="Name of the file in results/.")]
_OVER = "Time is up before the end: run the same command again to continue."
_STOPPED = "Stopped before the end: run the same command again to continue from the last checkpoint."


@app.command()
def train(
    model: Annotated[str, typer.Option(help="ResNet20, ResNet18 or VGG16.")] = "ResNet20",
    norm: Annotated[str, typer.Option(help="bn, bn-no-affine, wn, gn, ln or in.")] = "bn",
    data: Annotated[str, typer.Option(help="Data set.")] = "digits",
    root: Root = None,
    method: Annotated[str, typer.Option(help='e.g. "Adam w/o (ab)", or adam-wo-ab.')] = "Adam w/o (ab)",
    lr: Annotated[float | None, typer.Option(help="Rate; the paper's by default.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="The paper's by default.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch_size: Annotated[int | None, typer.Option(min=2, help="The paper's by default.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    device: Device = None,
    study: Name = None,
) -> None:
    """Train one network by one method and store the result.

    Example: steradian train --data digits --method "Adam w/o (ab)" --epochs 5
    """
    from dataclasses import replace

    from steradian.lab.config import match_name
    from steradian.lab.models import MODELS, NORMS
    from steradian.lab.paper import COLUMNS
    from steradian.lab.recipes import accuracy_tables
    from steradian.lab.study import Study

    if (network := match_name(model, MODELS)) is None:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    norm = match_name(norm, NORMS) or norm
    # A network that the paper did not train on this data takes its best settings on CIFAR-10.
    papers = [name for each, name in COLUMNS if each == network]
    like = data if data in papers or data not in {name for _, name in COLUMNS} else papers[0]
    configs = accuracy_tables(norm=norm, data=like, columns=[network], methods=[method], epochs=epochs, seeds=seeds)
    given: dict[str, Any] = {"data": data, "lr": lr, "weight_decay": weight_decay, "batch_size": batch_size}
    changes = {name: value for name, value in given.items() if value is not None}
    configs = [replace(config, **changes) for config in configs]
    made = Study(f"train-{configs[0].setting}" if study is None else study)
    roots, execution = _roots(configs, root), _execution(device)
    _run(partial(made.run, configs, roots=roots, device=device, execution=execution), made.store.path, configs)


@app.command()
def reproduce(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="tables, tables-no-affine, curves, hypotheses, phenomena, trajectories, grid.")
    ],
    data: Data = None,
    root: Root = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Fewer than the paper's; milestones scale.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many.")] = None,
    columns: Annotated[list[str] | None, typer.Option(help='e.g. "ResNet20 cifar10"; once for each.')] = None,
    methods: Annotated[list[str] | None, typer.Option(help='e.g. "Adam w/o (ab)"; once for each.')] = None,
    seconds: Seconds = None,
    size: Size = None,
    device: Device = None,
    engine: Annotated[str, typer.Option(help="local, or ray for many machines.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster; none: one is started here.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Compile the networks.")] = None,
    capture: Annotated[bool | None, typer.Option(help="Replay steps as CUDA graphs.")] = None,
    fused: Annotated[bool | None, typer.Option(help="Use the fused optimizer steps.")] = None,
    points: Annotated[
        int | None, typer.Option(min=2, help="hypotheses, phenomena, trajectories: steps to record.")
    ] = None,
    phenomena: Annotated[bool, typer.Option("--phenomena", help="hypotheses: measure (a) to (c) too.")] = False,
    tuning: Annotated[int | None, typer.Option(min=1, help="trajectories: epochs of the comparison.")] = None,
    settings: Annotated[
        str, typer.Option(help="Hyper-parameters: printed in the paper, or of the authors' released code.")
    ] = "printed",
    lr: Annotated[list[float] | None, typer.Option(help="grid: a rate; once for each.")] = None,
    weight_decay: Annotated[list[float] | None, typer.Option(help="grid: λ; once for each.")] = None,
    beta2: Annotated[list[float] | None, typer.Option(help="grid: β2; once for each.")] = None,
    network: Annotated[str, typer.Option(help="Networks: of the paper, or of the authors' released code.")] = "paper",
    study: Name = None,
) -> None:
    """Run the trainings behind a table or a figure of the paper, and show the results.

    Finished trainings are never repeated: after an interruption, run the same command to continue.

    Example: steradian reproduce tables --data digits --epochs 3 --seeds 2
    """
    from steradian.lab.experiments import track_study, trajectory_study
    from steradian.lab.recipes import RECIPES
    from steradian.lab.study import Study, study_name, sweep

    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    _check_options(context, recipe, engine)
    options: dict[str, Any] = {"data": data, "epochs": epochs, "seeds": seeds, "columns": columns, "methods": methods}
    options |= {"rates": lr, "decays": weight_decay, "beta2s": beta2, "released": network == "released"}
    options |= {"settings": settings if settings != "printed" else None}
    configs = RECIPES[recipe](**{name: value for name, value in options.items() if value})
    made = Study(study_name(recipe, configs, settings=settings) if study is None else study)
    how: dict[str, Any] = {"roots": _roots(configs, root), "size": size}
    if engine == "ray":
        how |= {"address": address, "size": size or 8}
        _run(partial(sweep, configs, made, **how), made.store.path, configs)
        return
    execution = _execution(device, compile, captured=capture, fused=fused)
    how |= {"device": device, "seconds": seconds, "execution": execution}
    if recipe not in ("hypotheses", "phenomena", "trajectories"):
        _run(partial(made.run, configs, **how), made.store.path, configs)
        return
    how |= {name: value for name, value in (("points", points), ("tuning", tuning)) if value}
    if recipe == "trajectories":
        work = partial(trajectory_study, configs, made.name, **how)
    else:
        measured = {config.method for config in configs} - ({"SGD"} if recipe == "hypotheses" else set())
        chosen = measured if phenomena or recipe == "phenomena" else set()
        work = partial(track_study, configs, made.name, phenomena=chosen, **how)
    _run(work, made.tracks.path)


@app.command(  # -h belongs to the benchmark
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A file of benchmarks/: step, image, discovery, fleet, watch, …")],
) -> None:
    """Run a benchmark of the source tree; arguments after its name are passed to it.

    Example: steradian bench fleet --models ResNet20 --sizes 1 8
    """
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    # The folder also has modules that benchmarks share.
    there = {path.stem: path for path in sorted(folder.glob("*.py")) if '__name__ == "__main__"' in path.read_text()}
    if name not in there:
        raise ValueError(f"no benchmark {name!r} in {folder}; there are {', '.join(there) or 'none'}")
    script = there[name]
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(script), run_name="__main__")


_FOR = {
    "methods": ("tables", "tables-no-affine", "curves", "hypotheses", "phenomena", "grid"),
    "points": ("hypotheses", "phenomena", "trajectories"),
    "phenomena": ("hypotheses", "phenomena"),
    "tuning": ("trajectories",),
    "lr": ("grid",),
    "weight-decay": ("grid",),
    "beta2": ("grid",),
    "settings": ("tables", "tables-no-affine", "curves", "phenomena"),
    "network": ("tables", "tables-no-affine", "curves", "phenomena"),
}
"""The recipes that have an option, for options that not every recipe has."""
_OF_ENGINE = {"local": ("seconds", "device", "compile", "capture", "fused"), "ray": ("address",)}
_ON_RAY = ("tables", "tables-no-affine", "curves", "grid")


def _check_options(context: typer.Context, recipe: str, engine: str) -> None:
    """Raise if a given option would be ignored by the recipe or the engine, or has no such choice."""
    for name, choices in (("engine", ("local", "ray")), ("network", ("paper", "released"))):
        if (value := context.params[name]) not in choices:
            raise ValueError(f"{name} must be {' or '.join(choices)}, got {value!r}")
    sources = {name.replace("_", "-"): context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    for name in given:
        if recipe not in _FOR.get(name, (recipe,)):
            raise ValueError(f"--{name} is for {', '.join(_FOR[name])}, not for {recipe}")
    if engine == "ray" and recipe not in _ON_RAY:
        raise ValueError(f"--engine ray is for {', '.join(_ON_RAY)}; {recipe} records steps on one machine")
    other = "local" if engine == "ray" else "ray"
    for name in given:
        if name in _OF_ENGINE[other]:
            raise ValueError(f"--{name} is for --engine {other}, not for {engine}")


def _execution(device: str | None, compiled: bool | None = None, **how: Any) -> "Execution":
    """How to train: networks are compiled on a GPU, unless an option says otherwise."""
    from steradian.lab.study import pick_device
    from steradian.lab.training import Execution

    return Execution(compiled=pick_device(device).type == "cuda" if compiled is None else compiled, **how)


def _run(work: Callable[..., bool], path: Path, configs: "Sequence[Config]" = ()) -> None:
    """Run trainings with their progress on the screen; print their table and where they are stored."""
    from steradian.cli.progress import progress_on
    from steradian.lab.results import Store

    console = screen()
    try:
        finished = work(progress=progress_on(console))
    except KeyboardInterrupt:
        console.print(_STOPPED, soft_wrap=True)
        raise
    if configs:
        keys = {config.key for config in configs}
        print_table([result for result in Store(path).results() if result.config.key in keys], console)
    console.print(f"The {'results' if configs else 'records'}: {path}", soft_wrap=True)
    if not finished:
        console.print(_OVER)


def _roots(configs: Sequence["Config"], root: Path | None) -> dict[str, Path]:
    """The given folder, for the one data set that the trainings need."""
    if root is None:
        return {}
    names = {config.data for config in configs}
    if len(names) > 1:
        raise ValueError(f"root is the folder of one data set; choose one with --data, not {', '.join(sorted(names))}")
    return {names.pop(): root}

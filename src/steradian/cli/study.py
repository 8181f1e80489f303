"""Commands that run trainings: train, reproduce and bench."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from steradian.cli import app, screen
from steradian.cli.show import print_table

if TYPE_CHECKING:
    from steradian.lab.config import Config
    from steradian.lab.fleet import Progress
    from steradian.lab.training import Execution

Data = Annotated[str | None, typer.Option(help="Data set: digits, cifar10, cifar100, svhn, or a folder's name.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data: packed, original archives, or images.")]
Seconds = Annotated[
    float | None, typer.Option(min=0, help="Stop at a checkpoint when this time is over; run again to continue.")
]
Size = Annotated[int | None, typer.Option(min=1, help="Trainings in flight at once.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
Compiled = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the networks.")]
Captured = Annotated[bool | None, typer.Option("--capture/--no-capture", help="Replay steps as CUDA graphs.")]
Fused = Annotated[bool | None, typer.Option("--fused/--no-fused", help="Use the fused optimizer steps.")]
_OVER = "Time is up before the end: run the same command again to continue."
_STOPPED = "Stopped before the end: run the same command again to continue from the last checkpoint."
Name = Annotated[str | None, typer.Option("--study", help="Name of the file in results/.")]


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

    from steradian.lab.config import meant
    from steradian.lab.models import MODELS, NORMS
    from steradian.lab.paper import COLUMNS
    from steradian.lab.recipes import accuracy_tables

    if (network := meant(model, MODELS)) is None:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    norm = meant(norm, NORMS) or norm
    # A network that the paper did not train on this data takes its best settings on CIFAR-10.
    papers = [name for each, name in COLUMNS if each == network]
    like = data if data in papers or data not in {name for _, name in COLUMNS} else papers[0]
    configs = accuracy_tables(norm=norm, data=like, columns=[network], methods=[method], epochs=epochs, seeds=seeds)
    given: dict[str, Any] = {"data": data, "lr": lr, "weight_decay": weight_decay, "batch_size": batch_size}
    changes = {name: value for name, value in given.items() if value is not None}
    configs = [replace(config, **changes) for config in configs]
    name = f"train-{configs[0].setting}" if study is None else study
    _run(configs, name, roots=_roots(configs, root), device=device, execution=_execution(device, None))


@app.command()
def reproduce(
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
    compiled: Compiled = None,
    captured: Captured = None,
    fused: Fused = None,
    points: Annotated[
        int | None, typer.Option(min=2, help="hypotheses, phenomena, trajectories: steps to record.")
    ] = None,
    phenomena: Annotated[bool, typer.Option("--phenomena", help="hypotheses: measure (a) to (c) too.")] = False,
    tuning: Annotated[int | None, typer.Option(min=1, help="trajectories: epochs of the comparison.")] = None,
    settings: Annotated[
        str, typer.Option(help="Hyper-parameters: printed in the paper, or of the authors' released code.")
    ] = "printed",
    rates: Annotated[list[float] | None, typer.Option("--lr", help="grid: a rate; once for each.")] = None,
    decays: Annotated[list[float] | None, typer.Option("--weight-decay", help="grid: λ; once for each.")] = None,
    beta2s: Annotated[list[float] | None, typer.Option("--beta2", help="grid: β2; once for each.")] = None,
    network: Annotated[str, typer.Option(help="Networks: of the paper, or of the authors' released code.")] = "paper",
    study: Name = None,
) -> None:
    """Run the trainings behind a table or a figure of the paper, and show the results.

    Finished trainings are never repeated: after an interruption, run the same command to continue.

    Example: steradian reproduce tables --data digits --epochs 3 --seeds 2
    """
    from steradian.lab.recipes import RECIPES
    from steradian.lab.study import study_name

    if recipe not in (*RECIPES, "trajectories"):
        raise ValueError(f"recipe must be one of {', '.join([*RECIPES, 'trajectories'])}, got {recipe!r}")
    if network not in ("paper", "released"):
        raise ValueError(f"network must be paper or released, got {network!r}")
    special: dict[str, Any] = {"points": points, "phenomena": phenomena, "tuning": tuning}
    special |= {"lr": rates, "weight-decay": decays, "beta2": beta2s}
    special |= {"settings": settings != "printed", "network": network != "paper"}
    local = {"seconds": seconds, "device": device, "compile": compiled, "capture": captured, "fused": fused}
    _check_options(recipe, engine, special, local, {"address": address})
    options: dict[str, Any] = {"data": data, "epochs": epochs, "seeds": seeds, "columns": columns, "methods": methods}
    options |= {"rates": rates, "decays": decays, "beta2s": beta2s, "released": special["network"]}
    options |= {"settings": settings if special["settings"] else None}
    options = {name: value for name, value in options.items() if value}
    execution = _execution(device, compiled, captured=captured, fused=fused)
    how: dict[str, Any] = {"device": device, "seconds": seconds, "size": size, "execution": execution}
    how |= {name: value for name, value in (("points", points), ("tuning", tuning)) if value}
    if recipe == "trajectories":
        _trajectories(options, study, root=root, **how)
        return
    configs = RECIPES[recipe](**options)
    name = study_name(recipe, configs, settings=settings) if study is None else study
    roots = _roots(configs, root)
    if recipe in ("hypotheses", "phenomena"):
        measured = {config.method for config in configs} - ({"SGD"} if recipe == "hypotheses" else set())
        _track(configs, name, phenomena=measured if phenomena or recipe == "phenomena" else set(), roots=roots, **how)
    elif engine == "ray":
        _run(configs, name, on_ray=True, roots=roots, address=address, size=size or 8)
    else:
        _run(configs, name, roots=roots, **how)


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
_ON_RAY = ("tables", "tables-no-affine", "curves", "grid")


def _check_options(
    recipe: str, engine: str, special: dict[str, Any], local: dict[str, Any], on_ray: dict[str, Any]
) -> None:
    """Raise if an option would be ignored by the recipe or the engine."""
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be local or ray, got {engine!r}")
    for name, recipes in _FOR.items():
        if special[name] and recipe not in recipes:
            raise ValueError(f"--{name} is for {', '.join(recipes)}, not for {recipe}")
    if engine == "ray" and recipe not in _ON_RAY:
        raise ValueError(f"--engine ray is for {', '.join(_ON_RAY)}; {recipe} records steps on one machine")
    for name, value in (local if engine == "ray" else on_ray).items():
        if value is not None:
            raise ValueError(f"--{name} is for --engine {'local' if engine == 'ray' else 'ray'}, not for {engine}")


def _execution(device: str | None, compiled: bool | None, **how: Any) -> "Execution":
    """How to train: networks are compiled on a GPU, unless an option says otherwise."""
    from steradian.lab.study import pick_device
    from steradian.lab.training import Execution

    return Execution(compiled=pick_device(device).type == "cuda" if compiled is None else compiled, **how)


@contextmanager
def _shown(console: Console) -> Iterator["Progress"]:
    """The progress on a console, with a message after an interruption."""
    from steradian.cli.progress import progress_on

    try:
        yield progress_on(console)
    except KeyboardInterrupt:
        console.print(_STOPPED, soft_wrap=True)
        raise


def _run(configs: Sequence["Config"], name: str, *, on_ray: bool = False, **options: Any) -> None:
    """Run the trainings; print their table, and where they are stored."""
    from steradian.lab.study import Study, sweep

    study, console = Study(name), screen()
    with _shown(console) as progress:
        run = partial(sweep, study=study) if on_ray else study.run
        finished = run(configs, progress=progress, **options)
    keys = {config.key for config in configs}
    print_table([result for result in study.store.results() if result.config.key in keys], console)
    _print_path("results", study.store.path, finished, console)


def _track(configs: Sequence["Config"], name: str, **options: Any) -> None:
    from steradian.lab.experiments import track_study
    from steradian.lab.study import RESULTS

    console = screen()
    with _shown(console) as progress:
        finished = track_study(configs, name, progress=progress, **options)
    _print_path("records", RESULTS / f"{name}-tracks.parquet", finished, console)


def _trajectories(recipe: dict[str, Any], study: str | None, **options: Any) -> None:
    from steradian.lab.experiments import trajectory_study

    if "methods" in recipe:
        raise ValueError("trajectories compare SGD, AdaGradG and AdaGrad: there are no methods to choose")
    console = screen()
    with _shown(console) as progress:
        tracks, finished = trajectory_study(recipe, study, progress=progress, **options)
    _print_path("records", tracks.path, finished, console)


def _print_path(what: str, path: Path, finished: bool, console: Console) -> None:
    console.print(f"The {what}: {path}", soft_wrap=True)
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

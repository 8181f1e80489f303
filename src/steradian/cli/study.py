"""Commands that run trainings: compare, tune, reproduce and bench."""

import inspect
import json
import re
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
    from steradian.lab.study import Study

Root = Annotated[Path | None, typer.Option(help="Folder of the data: packed, original archives, or images.")]
Seconds = Annotated[
    float | None, typer.Option(min=0, help="Stop at a checkpoint when this time is over; run again to continue.")
]
Size = Annotated[int | None, typer.Option(min=1, help="Trainings in flight at once.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
Name = Annotated[str | None, typer.Option("--study", help="Name of the file in results/.")]
Compile = Annotated[bool | None, typer.Option(help="Compile the networks; on a GPU by default.")]
Methods = Annotated[list[str], typer.Option(help='e.g. "Adam w/o (ab)", or adam-wo-ab; once for each.')]
Network = Annotated[str, typer.Option(help="ResNet20, ResNet18, VGG16, or a plugin's.")]
Data = Annotated[str, typer.Option(help="digits, cifar10, cifar100, svhn, a plugin's, or a folder's name.")]
Plugin = Annotated[list[Path] | None, typer.Option(help="A file that registers methods, networks or data.")]
Values = Annotated[list[str] | None, typer.Option(help="METHOD=VALUE, once for each; the paper's by default.")]
Grid = Annotated[list[str] | None, typer.Option(help="METHOD=VALUE, or METHOD=VALUE,VALUE,… to try these.")]
Epochs = Annotated[int, typer.Option(min=1)]
Seeds = Annotated[int, typer.Option(min=1, help="How many.")]
Schedule = Annotated[str, typer.Option(help="cosine, linear, constant, steps, or a plugin's.")]
Warmup = Annotated[int, typer.Option(min=0, help="Epochs in which the rate rises.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="norm=wn, batch_size=64, precision=float32, …")]
_TRACKED = ("hypotheses", "phenomena", "trajectories")


@app.command()
def compare(
    methods: Methods,
    network: Network = "ResNet20",
    data: Data = "digits",
    plugin: Plugin = None,
    root: Root = None,
    epochs: Epochs = 60,
    seeds: Seeds = 3,
    lr: Values = None,
    weight_decay: Values = None,
    schedule: Schedule = "cosine",
    warmup: Warmup = 0,
    settings: Settings = None,
    seconds: Seconds = None,
    size: Size = None,
    device: Device = None,
    compile: Compile = None,
    study: Name = None,
) -> None:
    """Train a network by several methods over seeds; print a table with Welch's test and write a page.

    Example: steradian compare --methods SGD-M --methods Adam --epochs 3
    """
    rates, decays = _by_method(lr), _by_method(weight_decay)
    if wrong := [name for values in (rates, decays) for name, each in values.items() if len(each) > 1]:
        raise ValueError(f"one value for each method, got several for {', '.join(wrong)}: steradian tune tries them")
    kind = {"network": network, "data": data, "epochs": epochs, "seeds": seeds, "schedule": schedule, "warmup": warmup}
    configs = _comparison(plugin, methods, rates, decays, settings, **kind)
    made = _study(study or f"compare-{network}-{data}")
    how: dict[str, Any] = {
        "roots": _roots(configs, root),
        "seconds": seconds,
        "size": size,
        "device": device,
        "compiled": compile,
    }
    _run(partial(made.run, configs, **how), made.store.path, configs, page=True)


@app.command()
def tune(
    methods: Methods,
    network: Network = "ResNet20",
    data: Data = "digits",
    plugin: Plugin = None,
    root: Root = None,
    points: Annotated[int, typer.Option(min=1, help="Rates for each method, a factor √10 apart.")] = 6,
    epochs: Epochs = 60,
    seeds: Seeds = 3,
    lr: Grid = None,
    weight_decay: Grid = None,
    schedule: Schedule = "cosine",
    warmup: Warmup = 0,
    settings: Settings = None,
    seconds: Seconds = None,
    size: Size = None,
    device: Device = None,
    compile: Compile = None,
    study: Name = None,
) -> None:
    """Try the same number of settings for every method on the validation set, then train the winners over new seeds.

    Example: steradian tune --methods SGD-M --methods Adam --points 2 --epochs 2
    """
    from dataclasses import replace

    from steradian.lab.recipes import by_method, tuning
    from steradian.lab.tables import search

    rates, decays = _by_method(lr), _by_method(weight_decay)
    kind = {"network": network, "data": data, "epochs": epochs, "seeds": 1, "schedule": schedule, "warmup": warmup}
    centres = _comparison(plugin, methods, rates, decays, settings, **kind)
    several = {name: values for name, values in by_method("lr", rates).items() if len(values) > 1}
    tried = tuning(centres, points=points, rates=several, decays=by_method("weight_decay", decays))
    name = study or f"tune-{network}-{data}"
    how: dict[str, Any] = {
        "roots": _roots(tried, root),
        "seconds": seconds,
        "size": size,
        "device": device,
        "compiled": compile,
    }
    made = _study(f"{name}-grid")
    if not _run(partial(made.run, tried, **how), made.store.path, tried):
        return
    keys = {config.key for config in tried}
    best = search(result for result in made.store.results() if result.config.key in keys)
    winners = [replace(each.config, seed=seed) for seed in range(1, seeds + 1) for each in best if each.runs]
    made = _study(name)
    _run(partial(made.run, winners, **how), made.store.path, winners, page=True)


@app.command()
def reproduce(
    recipe: Annotated[
        str, typer.Argument(help="tables, tables-no-affine, curves, hypotheses, phenomena, trajectories, grid.")
    ],
    data: Annotated[str | None, typer.Option(help="digits, cifar10, cifar100, svhn, or a folder's name.")] = None,
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
    compile: Compile = None,
    points: Annotated[
        int | None, typer.Option(min=2, help="hypotheses, phenomena, trajectories: steps to record.")
    ] = None,
    phenomena: Annotated[bool, typer.Option("--phenomena", help="hypotheses: measure (a) to (c) too.")] = False,
    tuning: Annotated[int | None, typer.Option(min=1, help="trajectories: epochs of the comparison.")] = None,
    settings: Annotated[
        str | None, typer.Option(help="Hyper-parameters: printed in the paper, or of the authors' released code.")
    ] = None,
    lr: Annotated[list[float] | None, typer.Option(help="grid: a rate; once for each.")] = None,
    weight_decay: Annotated[list[float] | None, typer.Option(help="grid: λ; once for each.")] = None,
    beta2: Annotated[list[float] | None, typer.Option(help="grid: β2; once for each.")] = None,
    built_as: Annotated[str | None, typer.Option(help="Networks: of the paper, or of the released code.")] = None,
    study: Name = None,
) -> None:
    """Run the trainings behind a table or a figure of the paper, and show the results.

    Finished trainings are never repeated: after an interruption, run the same command to continue.

    Example: steradian reproduce tables --data digits --epochs 3 --seeds 2
    """
    from steradian.lab.experiments import track_study, trajectory_study
    from steradian.lab.recipes import RECIPES
    from steradian.lab.study import study_name, sweep

    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    options: dict[str, Any] = {"data": data, "epochs": epochs, "seeds": seeds, "columns": columns, "methods": methods}
    options |= {"lr": lr, "weight_decay": weight_decay, "beta2": beta2, "settings": settings, "built_as": built_as}
    given = {name: value for name, value in options.items() if value}
    known = list(inspect.signature(RECIPES[recipe]).parameters)
    recorded = {"points": points, "tuning": tuning} if recipe in _TRACKED else {}
    ignored = {"points": points, "tuning": tuning, "phenomena": phenomena} if recipe not in _TRACKED else {}
    if wrong := [*(given.keys() - known), *(name for name, value in ignored.items() if value)]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"{recipe} has no option {names}; it has {', '.join(known)}")
    configs = RECIPES[recipe](**given)
    made = _study(study_name(recipe, configs, settings=settings or "printed") if study is None else study)
    how: dict[str, Any] = {"roots": _roots(configs, root), "size": size}
    if engine not in ("local", "ray") or (engine == "ray" and recipe in _TRACKED):
        raise ValueError(f"engine must be local, or ray if no steps are recorded, got {engine!r} for {recipe}")
    if engine == "ray":
        how |= {"address": address, "size": size or 8}
        _run(partial(sweep, configs, made, **how), made.store.path, configs)
        return
    how |= {"device": device, "seconds": seconds, "compiled": compile}
    if recipe not in _TRACKED:
        _run(partial(made.run, configs, **how), made.store.path, configs)
        return
    how |= {name: value for name, value in recorded.items() if value}
    if recipe == "trajectories":
        work = partial(trajectory_study, configs, made, **how)
    else:
        measured = {config.method for config in configs} - ({"SGD"} if recipe == "hypotheses" else set())
        chosen = measured if phenomena or recipe == "phenomena" else set()
        work = partial(track_study, configs, made, phenomena=chosen, **how)
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
    sys.argv = [str(there[name]), *context.args]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(there[name]), run_name="__main__")


def _comparison(
    plugins: list[Path] | None,
    methods: list[str],
    rates: dict[str, list[float]],
    decays: dict[str, list[float]],
    settings: list[str] | None,
    **kind: Any,
) -> "list[Config]":
    """The trainings of a comparison, with the first of the values of each method."""
    from steradian.lab.recipes import comparison
    from steradian.lab.registry import load_plugin

    for path in plugins or ():
        load_plugin(path)
    for text in settings or ():
        name, _, value = text.partition("=")
        kind[name] = json.loads(value) if re.match(r"[\d\[.-]", value) else value
    firsts = [{name: values[0] for name, values in each.items()} for each in (rates, decays)]
    return comparison(methods=methods, lr=firsts[0], weight_decay=firsts[1], **kind)


def _by_method(values: list[str] | None) -> dict[str, list[float]]:
    """The numbers of METHOD=NUMBER,… by method."""
    found = {}
    for text in values or ():
        name, _, numbers = text.rpartition("=")
        try:
            found[name] = [float(number) for number in numbers.split(",")]
        except ValueError:
            raise ValueError(f"a value must be METHOD=NUMBER, such as Adam=0.001, got {text!r}") from None
    return found


def _study(name: str) -> "Study":
    from steradian.lab.study import Study

    return Study(re.sub(r"[^\w.-]+", "-", name.lower()) if "/" not in name else name)


def _run(work: Callable[..., bool], path: Path, configs: "Sequence[Config]" = (), *, page: bool = False) -> bool:
    """Run trainings with their progress on the screen; print their table and where they are; whether all are done."""
    from steradian.cli.progress import Shown
    from steradian.lab.documents import write_page
    from steradian.lab.results import Store

    console = screen()
    again = "run the same command again to continue"
    try:
        finished = work(progress=Shown(console))
    except KeyboardInterrupt:
        console.print(f"Stopped before the end: {again} from the last checkpoint.", soft_wrap=True)
        raise
    if configs:
        keys = {config.key for config in configs}
        results = [result for result in Store(path).results() if result.config.key in keys]
        print_table(results, console)
        if page and results:
            write_page(results, path.with_suffix(".html"))
            console.print(f"The page: {path.with_suffix('.html')}", soft_wrap=True)
    console.print(f"The {'results' if configs else 'records'}: {path}", soft_wrap=True)
    if not finished:
        console.print(f"Time is up before the end: {again}.")
    return finished


def _roots(configs: Sequence["Config"], root: Path | None) -> dict[str, Path]:
    """The given folder, for the one data set that the trainings need."""
    if root is None:
        return {}
    names = {config.data for config in configs}
    if len(names) > 1:
        raise ValueError(f"root is the folder of one data set; choose one with --data, not {', '.join(sorted(names))}")
    return {names.pop(): root}

"""Commands that run trainings: compare, tune, reproduce, angle and language."""

import inspect
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steradian.cli import app, screen
from steradian.cli.show import BITS, print_table, show_rows

if TYPE_CHECKING:
    from steradian.lab.config import Config
    from steradian.lab.study import Study
    from steradian.lab.tables import Rows

Recorded = Annotated[int | None, typer.Option(min=2, help="hypotheses, phenomena, trajectories: steps to record.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data, packed or original archives; data/NAME if none.")]
_STOP = "Stop at a checkpoint when this time is over; run again to continue."
Seconds = Annotated[float, typer.Option(min=0, show_default=False, help=_STOP)]
Size = Annotated[int | None, typer.Option(min=1, help="Trainings in flight at once.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
Name = Annotated[str | None, typer.Option("--study", help="Name of the file in results/.")]
Compile = Annotated[bool | None, typer.Option(help="Compile the networks; on a GPU by default.")]
_RECORDED = dict.fromkeys(("hypotheses", "phenomena"), ("points", "phenomena")) | {"trajectories": ("points", "tuning")}
"""Recipes whose trainings are recorded, with the options of the records."""
_RECIPES = "tables, tables-no-affine, curves, hypotheses, phenomena, trajectories, grid."
_AGAIN = "run the same command again to continue"
_TUNE = """Try as many settings of every method on the validation set, then train the winners over new seeds.

Example: steradian tune --methods SGD-M --methods Adam --points 2 --epochs 2"""


@app.command("tune", help=_TUNE)
@app.command()
def compare(
    context: typer.Context,
    methods: Annotated[list[str], typer.Option(help='e.g. "Adam w/o (ab)", or adam-wo-ab; once for each.')],
    network: Annotated[str, typer.Option(help="ResNet20, ResNet18, VGG16, or a plugin's.")] = "ResNet20",
    data: Annotated[str, typer.Option(help="digits, cifar10, cifar100, svhn, a plugin's, or packed.")] = "digits",
    plugin: Annotated[list[Path] | None, typer.Option(help="A file that registers methods, networks or data.")] = None,
    root: Root = None,
    epochs: Annotated[int, typer.Option(min=1)] = 60,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    points: Annotated[int | None, typer.Option(min=1, help="tune: rates for each method; by default 6.")] = None,
    lr: Annotated[list[str] | None, typer.Option(help="METHOD=RATE; tune: or METHOD=RATE,RATE,…")] = None,
    weight_decay: Annotated[list[str] | None, typer.Option(help="METHOD=λ; tune: or METHOD=λ,λ,…")] = None,
    schedule: Annotated[str, typer.Option(help="cosine, linear, constant, steps, or a plugin's.")] = "cosine",
    warmup: Annotated[int, typer.Option(min=0, help="Epochs in which the rate rises.")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="norm=wn, batch_size=64, …")] = None,
    seconds: Seconds = math.inf,
    size: Size = None,
    device: Device = None,
    compile: Compile = None,
    study: Name = None,
) -> None:
    """Train a network by several methods over seeds; print a table with Welch's test and write a page.

    Example: steradian compare --methods SGD-M --methods Adam --epochs 3
    """
    import steradian.lab.angle  # noqa: F401  # registers its methods
    from steradian.lab.recipes import by_method, comparison, tuning
    from steradian.lab.registry import load_plugin
    from steradian.lab.study import file_name
    from steradian.lab.tables import at_edge, winners

    for path in plugin or ():
        load_plugin(path)
    rates, decays = by_method("lr", _numbers(lr)), by_method("weight_decay", _numbers(weight_decay))
    tunes = context.info_name == "tune"
    if points and not tunes:
        raise ValueError("--points is an option of steradian tune: compare trains one setting of each method")
    several = [method for method, values in [*rates.items(), *decays.items()] if len(values) > 1]
    if several and not tunes:
        raise ValueError(f"one value for each method, got several for {', '.join(several)}: steradian tune tries them")
    kind: dict[str, Any] = {"network": network, "data": data, "epochs": epochs, "schedule": schedule, "warmup": warmup}
    kind |= _settings(settings)
    kind |= {"lr": {m: each[0] for m, each in rates.items()}, "weight_decay": {m: v[0] for m, v in decays.items()}}
    configs = comparison(methods=methods, seeds=1 if tunes else seeds, **kind)
    name = study or file_name(f"{context.info_name}-{network}-{data}")
    made = _study(name, {config.data for config in configs}, root, seconds, size=size, device=device, compiled=compile)
    if tunes:
        tried = tuning(configs, points=points or 6, rates={m: v for m, v in rates.items() if len(v) > 1}, decays=decays)
        if not _run(partial(made.tuning.run, tried), partial(_show_table, made.tuning, tried)):
            return
        configs = winners(tried, made.tuning.store.results(), seeds)
        for text in at_edge(tried, configs):
            screen().print(text, soft_wrap=True)
    _run(partial(made.run, configs), partial(_show_table, made, configs, page=True))


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(help=_RECIPES)],
    data: Annotated[str | None, typer.Option(help="digits, cifar10, cifar100, svhn, or packed.")] = None,
    root: Root = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Fewer than the paper's; milestones scale.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many.")] = None,
    columns: Annotated[list[str] | None, typer.Option(help='e.g. "ResNet20 cifar10"; once for each.')] = None,
    methods: Annotated[list[str] | None, typer.Option(help='e.g. "Adam w/o (ab)"; once for each.')] = None,
    seconds: Seconds = math.inf,
    size: Size = None,
    device: Device = None,
    compile: Compile = None,
    points: Recorded = None,
    phenomena: Annotated[bool, typer.Option("--phenomena", help="hypotheses: measure (a) to (c) too.")] = False,
    tuning: Annotated[int | None, typer.Option(min=1, help="trajectories: epochs of the comparison.")] = None,
    settings: Annotated[str | None, typer.Option(help="Hyper-parameters: printed or released.")] = None,
    lr: Annotated[list[float] | None, typer.Option(help="grid: a rate; once for each.")] = None,
    weight_decay: Annotated[list[float] | None, typer.Option(help="grid: λ; once for each.")] = None,
    beta2: Annotated[list[float] | None, typer.Option(help="grid: β2; once for each.")] = None,
    built_as: Annotated[str | None, typer.Option(help="Networks as in the paper or released.")] = None,
    study: Name = None,
) -> None:
    """Run the trainings behind a table or a figure of the paper, and show the results.

    Finished trainings are never repeated: after an interruption, run the same command to continue.

    Example: steradian reproduce tables --data digits --epochs 3 --seeds 2
    """
    from steradian.lab.config import match_names
    from steradian.lab.experiments import track_study, trajectory_study
    from steradian.lab.recipes import RECIPES
    from steradian.lab.study import study_name

    [recipe] = match_names("recipe", [recipe], RECIPES)
    options: dict[str, Any] = {"data": data, "epochs": epochs, "seeds": seeds, "columns": columns, "methods": methods}
    options |= {"lr": lr, "weight_decay": weight_decay, "beta2": beta2, "settings": settings, "built_as": built_as}
    options |= {"points": points, "phenomena": phenomena, "tuning": tuning}
    given = {name: value for name, value in options.items() if value}
    extra = _RECORDED.get(recipe, ())
    known = [*inspect.signature(RECIPES[recipe]).parameters, *extra]
    if wrong := given.keys() - known:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        raise ValueError(f"{recipe} has no option {names}; it has {', '.join(known)}")
    recorded = {name: given.pop(name) for name in extra if name in given}
    configs = RECIPES[recipe](**given)
    name = study or study_name(recipe, configs, settings=settings or "printed")
    made = _study(name, {config.data for config in configs}, root, seconds, size=size, device=device, compiled=compile)
    if recipe not in _RECORDED:
        _run(partial(made.run, configs), partial(_show_table, made, configs))
        return
    work = partial(trajectory_study, configs, made, **recorded)
    if recipe != "trajectories":
        measured = {config.method for config in configs} - ({"SGD"} if recipe == "hypotheses" else set())
        chosen = measured if recorded.pop("phenomena", recipe == "phenomena") else set()
        work = partial(track_study, configs, made, phenomena=chosen, **recorded)
    _run(work, lambda: screen().print(f"The records: {made.tracks.path}", soft_wrap=True))


def _numbers(values: list[str] | None) -> dict[str, list[float]]:
    """The numbers of METHOD=NUMBER,… by method."""
    found = {}
    for text in values or ():
        name, _, numbers = text.rpartition("=")
        try:
            found[name] = [float(number) for number in numbers.split(",")]
        except ValueError:
            raise ValueError(f"a value must be METHOD=NUMBER, such as Adam=0.001, got {text!r}") from None
    return found


def _study(name: str, data: Collection[str], root: Path | None, seconds: float, **how: Any) -> "Study":
    """The study of this name, run as the options say; the root is the folder of its one data set."""
    from steradian.lab.fleet import Progress
    from steradian.lab.study import Study

    if root is not None and len(data) > 1:
        raise ValueError(f"root is the folder of one data set; choose one with --data, not {', '.join(sorted(data))}")
    roots = {} if root is None else dict.fromkeys(data, root)
    return Study(name, roots=roots, deadline=time.monotonic() + seconds, progress=Progress(screen()), **how)


def _run(work: Callable[[], bool], show: Callable[[], None]) -> bool:
    """Run trainings, show what they gave, and say how to continue; returns whether all are finished."""
    console = screen()
    try:
        finished = work()
    except KeyboardInterrupt:
        console.print(f"Stopped before the end: {_AGAIN}.")
        raise
    show()
    if not finished:
        console.print(f"Time is up before the end: {_AGAIN}.")
    return finished


def _show_table(study: "Study", configs: "Sequence[Config]", *, page: bool = False) -> None:
    """Print the table of these trainings, and where they are."""
    from steradian.lab.documents import write_page

    console, path, keys = screen(), study.store.path, {config.key for config in configs}
    results = [result for result in study.store.results() if result.config.key in keys]
    print_table(results, console)
    if page and results:
        write_page(results, path.with_suffix(".html"))
        console.print(f"The page: {path.with_suffix('.html')}", soft_wrap=True)
    console.print(f"The results: {path}", soft_wrap=True)


def _show_rows(study: "Study", title: str, rows: "Callable[..., Rows]", also: str = "") -> None:
    """Print one table of a study's results, which settings were the last that were tried, and where the results are."""
    from steradian.lab.tables import at_edge

    if results := study.store.results():
        show_rows(screen(), title, *rows(results))
    if tried := [result.config for result in study.tuning.store.results()]:
        for text in at_edge(tried, [result.config for result in results]):
            screen().print(text, soft_wrap=True)
    screen().print(f"The results: {study.store.path}{also}", soft_wrap=True)


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
    seconds: Seconds = math.inf,
    size: Size = 14,
    device: Device = None,
    compile: Compile = None,
    study: Name = None,
) -> None:
    """Compare optimizers whose rest is exchanged (crossed), at SGD-M's angle (matched), or tuned alike (tuned).

    Finished trainings are never repeated: run the same command to continue.

    Example: steradian angle matched --root data/cifar10 --device cuda --seconds 500
    """
    from steradian.lab.angle import angle_study
    from steradian.lab.study import file_name
    from steradian.lab.tables import interval_rows

    usual = (network, data) == ("ResNet20", "cifar10")
    name = study or f"angle-{part}" + ("" if usual else file_name(f"-{network}-{data}"))
    made = _study(name, [data], root, seconds, size=size, device=device, compiled=compile)
    how: dict[str, Any] = {"data": data, "network": network, "methods": methods, "settings": _settings(settings)}
    work = partial(angle_study, part, made, epochs=epochs, seeds=seeds, points=points, **how)
    _run(work, partial(_show_rows, made, "Test accuracy in percent, mean and 95 % interval over seeds", interval_rows))


@app.command()
def language(
    root: Annotated[Path, typer.Option(help="Folder of the text, as steradian data corpus writes it.")],
    methods: Annotated[list[str] | None, typer.Option(help='e.g. "Muon"; once for each. All by default.')] = None,
    post_norms: Annotated[bool, typer.Option("--post-norms", help="Normalize after each layer, too.")] = False,
    lr: Annotated[list[float] | None, typer.Option(help="A rate to try, once for each; six by default.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many, for the best rate of each method.")] = 5,
    settings: Annotated[list[str] | None, typer.Option("--set", help="width=64, epochs=2, batch_size=8, …")] = None,
    seconds: Seconds = math.inf,
    device: Device = None,
    study: Annotated[str, typer.Option(help="Name of the files in results/.")] = "language",
) -> None:
    """Train a byte-level language model with matrices on spheres or not: tune all methods alike, then over seeds.

    Finished trainings are never repeated: run the same command to continue.

    Example: steradian language --root data/python-source --device cuda --seconds 500
    """
    from steradian.lab.language import RATES, Shape, bits_rows, language_study

    given = _settings(settings, [*Shape.__dataclass_fields__, "weight_decay"])
    made = _study(study, (), None, seconds, device=device)
    sizes = {name: given.pop(name) for name in list(given) if name in Shape.__dataclass_fields__}
    shape, say = Shape(post_norms=post_norms, **sizes), partial(screen().print, soft_wrap=True)
    work = partial(language_study, shape, root, made, methods=methods, rates=lr or RATES, seeds=seeds, say=say, **given)
    _run(work, partial(_show_rows, made, BITS, bits_rows, also=f"; recorded runs: {made.work}"))


def _settings(given: Sequence[str] | None, also: Sequence[str] = ()) -> dict[str, Any]:
    """NAME=VALUE of fields of `Config`, with values as JSON or, if they are not, as they are."""
    from steradian.lab.config import Config, match_names

    found: dict[str, Any] = {}
    chosen = {"model", "data", "method", "lr", "weight_decay", "seed", "start", "plugin", *also}
    known = [*also, *(name for name in Config.__dataclass_fields__ if name not in chosen)]
    for text in given or ():
        name, _, value = text.partition("=")
        [name] = match_names("set", [name], known)
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found

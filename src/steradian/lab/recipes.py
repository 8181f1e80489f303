"""Trainings as lists of configurations: those behind each table and figure of the paper, and comparisons of one's own.

The paper's can be scaled down: with fewer epochs milestones scale, and seeds, columns and methods can be chosen. On
digits the networks are narrow, for a CPU. Methods and columns are found by letters and digits: "adamw" is AdamW†.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from shlex import quote
from typing import Any

from steradian.lab import paper
from steradian.lab.config import Config, match_name, match_names
from steradian.lab.models import NORMS
from steradian.lab.registry import METHODS, NETWORKS, SCHEDULES, plugin_of

__all__ = ["RECIPES", "accuracy_tables", "comparison", "grid", "hypotheses", "pretraining", "trajectories", "tuning"]

TABLE_METHODS = tuple(paper.ACCURACY["bn"])
"""Rows of our tables: the paper's six and SGD-M."""
_INVERTED = {"AdamG† as released": "AdamG†"}  # trained if named, with the settings of the other
_NETWORKS = ("ResNet20", "ResNet18", "VGG16")
Names = Sequence[str] | None
"""Some of the known names; None: all."""
Values = Mapping[str, Sequence[float]] | None
"""Several values of a setting, by method."""


def columns_of(data: str | None = None, columns: Names = None) -> list[tuple[str, str]]:
    """Network and data of the columns with such names; data that the paper lacks has a column for each network."""
    known = [column for column in paper.COLUMNS if data in (None, column[1])]
    every = known or [(model, str(data)) for model in _NETWORKS]
    found = {name: [c for c in every if match_name(name, (c[0], " ".join(c)))] for name in columns or ()}
    if unknown := [name for name, matches in found.items() if not matches]:
        raise ValueError(f"columns must be among {', '.join(' '.join(c) for c in every)}, got {', '.join(unknown)}")
    return [column for column in every if not columns or any(column in each for each in found.values())]


def accuracy_tables(
    *,
    norm: str = "bn",
    data: str | None = None,
    columns: Names = None,
    methods: Names = None,
    epochs: int = 405,
    seeds: int = 5,
    settings: str = "printed",
    built_as: str = "paper",
) -> list[Config]:
    """tab:results (norm "bn") and tab:results2 ("bn-no-affine"): every method at its best hyper-parameters.

    Data sets that the paper does not have take the hyper-parameters of CIFAR-10. "AdamG† as released" is trained only
    if it is named. `settings` are hyper-parameters as the paper prints them, or those of its released code: one of
    `paper.SETTINGS`. The networks are `built_as` in the "paper", or as in that code, "released".
    """
    taken = match_names("methods", methods or TABLE_METHODS, (*TABLE_METHODS, *_INVERTED))
    if settings not in paper.SETTINGS:
        raise ValueError(f"settings must be one of {', '.join(paper.SETTINGS)}, got {settings!r}")
    if built_as not in ("paper", "released"):
        raise ValueError(f"built_as must be paper or released, got {built_as!r}")
    # Seeds come first, so that an early stop leaves a whole table with fewer seeds.
    return [
        _best(column, method, settings, norm=norm, seed=seed, released=built_as == "released").scaled(epochs)
        for seed, column, method in product(range(seeds), columns_of(data, columns), taken)
    ]


def hypotheses(
    *, data: str | None = "cifar10", columns: Names = None, methods: Names = None, epochs: int = 405, seeds: int = 1
) -> list[Config]:
    """The figures on H1, H2 and fig:taylor: trainings to be tracked, with SGD-M, Adam and SGD."""
    taken = match_names("methods", methods, ("SGD-M", "Adam", "SGD"))
    return [
        replace(_best(column, "SGD-M" if method == "SGD" else method, seed=seed), method=method).scaled(epochs)
        for seed, column, method in product(range(seeds), columns_of(data, columns or ["ResNet20"]), taken)
    ]


def pretraining(
    *, data: str | None = "cifar10", columns: Names = None, epochs: int = 200, seeds: int = 1
) -> list[Config]:
    """App. C.1.6: the networks that the trajectories start from, trained by SGD with momentum."""
    kind = {"lr": 0.1, "weight_decay": 1e-4, "epochs": 200, "milestones": (80, 120, 160)}
    return [
        _config(column, "SGD-M", norm=norm, seed=seed, **kind).scaled(epochs)
        for seed, column in product(range(seeds), columns_of(data, columns or ["ResNet20"]))
        for norm in ("bn", "bn-no-affine", "wn")
    ]


def trajectories(starts: Iterable[Config], *, epochs: int = 1) -> list[Config]:
    """fig:track_adamgradg_sgd: SGD, AdaGradG and AdaGrad from each trained network, over the same batches.

    SGD has rate 1e-2 and L2 1e-3, AdaGradG what Theorem 4 makes of it, AdaGrad (Adam without momentum) rate 1e-3;
    parameters without rows get SGD in all three. In float32, since trajectories are compared.
    """
    made = []
    for start, (method, lr) in product(starts, {"SGD": 1e-2, "AdaGradG": 1e-2, "AdaGrad": 1e-3}.items()):
        kept = replace(start, method=method, start=start.key, precision="float32", epochs=epochs, milestones=())
        made.append(replace(kept, lr=lr, rest_lr=1e-2, weight_decay=1e-3, betas=(0.9, 0.999)))
    return made


def grid(
    *,
    data: str | None = "cifar10",
    columns: Names = None,
    methods: Names = None,
    epochs: int = 405,
    seeds: int = 1,
    lr: Sequence[float] | None = None,
    weight_decay: Sequence[float] | None = None,
    beta2: Sequence[float] | None = None,
) -> list[Config]:
    """The grid search of App. D.3: learning rate × weight decay × β2, for each method and column.

    By default the paper's four rates, eight λ and, but for SGD-M, three β2; the rest as for `accuracy_tables`.
    """
    taken, made = match_names("methods", methods, TABLE_METHODS), []
    for seed, column, method in product(range(seeds), columns_of(data, columns), taken):
        tried = (0.99,) if method == "SGD-M" else beta2 or paper.GRID["beta2"]
        for rate, decay, second in product(lr or paper.GRID["lr"], weight_decay or paper.GRID["weight_decay"], tried):
            config = _config(column, method, lr=rate, weight_decay=decay, betas=(0.9, second), seed=seed)
            made.append(config.scaled(epochs))
    return made


RECIPES: dict[str, Callable[..., list[Config]]] = {
    "tables": accuracy_tables,
    "tables-no-affine": partial(accuracy_tables, norm="bn-no-affine"),
    "curves": accuracy_tables,  # fig:loss_comparison, fig:acc_comparison and those of App. D.4
    "hypotheses": hypotheses,
    # Section 4.1, measured
    "phenomena": partial(accuracy_tables, data="cifar10", columns=["ResNet20"], methods=["Adam"], seeds=1),
    "trajectories": pretraining,  # of the networks that `trajectories` start from
    "grid": grid,
}


def comparison(
    *,
    methods: Sequence[str],
    network: str,
    data: str,
    epochs: int = 60,
    seeds: int = 3,
    lr: Mapping[str, float] | None = None,
    weight_decay: Mapping[str, float] | None = None,
    norm: str | None = None,
    schedule: str = "cosine",
    warmup: int = 0,
    **settings: Any,
) -> list[Config]:
    """Any registered methods on one network and data set, over seeds.

    The paper's methods have its best settings for this network on this data, or on CIFAR-10. `lr` and `weight_decay`
    are others by method; methods that the paper does not have need a rate, and their λ is 0. `norm` is that of the
    paper's networks, "bn" by default. The milestones of the schedule "steps" scale with the epochs; in the first
    `warmup` epochs the rate rises. `settings` are other fields of `Config`: batch_size, precision, momentum, betas, …
    """
    taken, [model] = match_names("methods", methods, METHODS), match_names("network", [network], NETWORKS)
    [schedule] = match_names("schedule", [schedule], SCHEDULES)
    own = model not in _NETWORKS
    norm = norm or ("" if own else "bn")
    if not own:
        [norm] = match_names("norm", [norm], NORMS)
    given = {"lr": by_method("lr", lr, taken), "weight_decay": by_method("weight_decay", weight_decay, taken)}
    if unknown := [method for method in taken if method not in paper.LEARNING_RATE and method not in given["lr"]]:
        ways = f"--lr {quote(f'{unknown[0]}=0.01')}, or lr={ {unknown[0]: 0.01} } in Python"
        raise ValueError(f"lr must be given for {', '.join(unknown)}: {ways}")
    made = []
    for seed, method in product(range(seeds), taken):
        known = method in paper.LEARNING_RATE
        config = (_best if known else partial(_config, lr=1.0))((model, data), method, norm=norm, seed=seed)
        changes = {name: values[method] for name, values in given.items() if method in values}
        changes |= {"width": None if own else config.width, "schedule": schedule, "warmup": warmup} | settings
        config = replace(config.scaled(epochs), **changes)
        made.append(replace(config, plugin=plugin_of(config)))
    return made


def tuning(configs: Iterable[Config], *, points: int = 6, rates: Values = None, decays: Values = None) -> list[Config]:
    """The grid of each training: every method gets the same number of points.

    `configs` has one training of each method, whose rate is in the middle of `points` rates, a factor √10 apart.
    `rates` and `decays` are, by method, the rates to try instead, and the λ to try with each rate.
    """
    made: dict[str, list[Config]] = {}
    for config in configs:
        spread = [float(f"{config.lr * 10 ** (0.5 * (k - (points - 1) // 2)):.3g}") for k in range(points)]
        tried = (rates or {}).get(config.method, spread), (decays or {}).get(config.method, [config.weight_decay])
        made[config.method] = [replace(config, lr=lr, weight_decay=decay) for lr, decay in product(*tried)]
    if len({len(each) for each in made.values()}) > 1:
        counts = ", ".join(f"{method} {len(each)}" for method, each in made.items())
        mend = "name as many λ (weight_decay) for the others, or more rates (lr)"
        raise ValueError(f"every method must have the same number of points, got {counts}: {mend}")
    return [config for each in made.values() for config in each]


def by_method(what: str, values: Mapping[str, Any] | None, known: Iterable[str] = METHODS) -> dict[str, Any]:
    """The same values under the known names of the methods."""
    return {match_names(f"methods of {what}", [name], known)[0]: value for name, value in (values or {}).items()}


def _config(column: tuple[str, str], method: str, **more: Any) -> Config:
    if column[1] == "digits":
        more |= {"width": 8, "batch_size": 64, "precision": "float32"}
    return Config(model=column[0], data=column[1], method=method, **more)


def _best(column: tuple[str, str], method: str, settings: str = "printed", **more: Any) -> Config:
    """A training with the best hyper-parameters of its column, or of CIFAR-10 for columns that the paper lacks."""
    like = (column, (column[0], "cifar10"), paper.COLUMNS[0])
    of = _INVERTED.get(method, method)
    best = next(paper.SETTINGS[settings][of][each] for each in like if each in paper.COLUMNS)
    rate, betas = paper.LEARNING_RATE[of], (0.9, best.beta2)
    return _config(column, method, lr=rate, weight_decay=best.weight_decay, betas=betas, **more)

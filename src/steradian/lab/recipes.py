"""The trainings behind each table and figure of the paper, as functions that return them.

Each can be scaled down: with fewer epochs milestones scale, and seeds, columns and methods can be chosen. On digits the
same networks are narrow and take 8 × 8 images, for a CPU. Methods and columns are found by their letters and digits:
"adamw" is AdamW†.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from steradian.lab import paper
from steradian.lab.config import Config, match_name, match_names

__all__ = [
    "RECIPES",
    "TABLE_METHODS",
    "accuracy_tables",
    "columns_of",
    "grid",
    "hypotheses",
    "phenomena",
    "pretraining",
    "trajectories",
]

TABLE_METHODS = tuple(paper.ACCURACY["bn"])
"""Rows of our tables: the paper's six and SGD-M."""

_DIGITS = {"width": 8, "batch_size": 64, "precision": "float32"}


def columns_of(data: str | None = None, columns: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Network and data of the chosen columns.

    Args:
        data: one data set; "digits" puts the three networks on digits. None: all of the paper's.
        columns: names such as "ResNet20 cifar10" or "ResNet20"; None: all.

    >>> columns_of("cifar10", ["ResNet20"]), columns_of("digits")
    ([('ResNet20', 'cifar10')], [('ResNet20', 'digits'), ('ResNet18', 'digits'), ('VGG16', 'digits')])
    """
    every = list(paper.COLUMNS)
    if data is not None and data not in {name for _, name in every}:
        every = [(model, data) for model in ("ResNet20", "ResNet18", "VGG16")]
    elif data is not None:
        every = [column for column in every if column[1] == data]
    if not columns:
        return every
    given = [columns] if isinstance(columns, str) else columns
    found = {name: [c for c in every if match_name(name, (c[0], " ".join(c)))] for name in given}
    if unknown := [name for name in given if not found[name]]:
        raise ValueError(f"columns must be among {', '.join(' '.join(c) for c in every)}, got {', '.join(unknown)}")
    return [column for column in every if any(column in each for each in found.values())]


def accuracy_tables(
    *,
    norm: str = "bn",
    data: str | None = None,
    columns: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    epochs: int = 405,
    seeds: int = 5,
    settings: str = "printed",
    released: bool = False,
) -> list[Config]:
    """tab:results (norm "bn") and tab:results2 ("bn-no-affine"): every method at its best hyper-parameters.

    Data sets that the paper does not have take the hyper-parameters of CIFAR-10.

    Args:
        norm: normalization.
        data: one data set; None: all of the paper's.
        columns: networks, or network and data; None: all.
        methods: None: all.
        epochs: of each training; milestones scale.
        seeds: number of seeds.
        settings: hyper-parameters as the paper prints them, or those of its released code: one of `paper.SETTINGS`.
        released: use the networks of that code.
    """
    taken = match_names("methods", methods, TABLE_METHODS)
    if settings not in paper.SETTINGS:
        raise ValueError(f"settings must be one of {', '.join(paper.SETTINGS)}, got {settings!r}")
    made = []
    # Seeds come first, so that an early stop leaves a whole table with fewer seeds.
    for seed, column, method in product(_seeds(seeds), columns_of(data, columns), taken):
        config = _best(column, method, settings, norm=norm, seed=seed, released=released)
        made.append(config.scaled(epochs))
    return made


def hypotheses(
    *,
    data: str | None = "cifar10",
    columns: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    epochs: int = 405,
    seeds: int = 1,
) -> list[Config]:
    """The figures on H1, H2 and fig:taylor: trainings to be tracked, with SGD-M, Adam and SGD."""
    taken = match_names("methods", methods, ("SGD-M", "Adam", "SGD"))
    made = []
    for seed, column, method in product(_seeds(seeds), columns_of(data, columns or ["ResNet20"]), taken):
        config = _best(column, "SGD-M" if method == "SGD" else method, seed=seed)
        made.append(replace(config, method=method).scaled(epochs))
    return made


def phenomena(
    *, columns: Sequence[str] | None = None, methods: Sequence[str] | None = None, **scale: Any
) -> list[Config]:
    """Section 4.1, measured: trainings to be tracked; by default Adam's of ResNet20 on CIFAR-10, with one seed."""
    wanted: dict[str, Any] = {"data": "cifar10", "seeds": 1} | scale
    return accuracy_tables(columns=columns or ["ResNet20"], methods=methods or ["Adam"], **wanted)


def pretraining(
    *,
    data: str | None = "cifar10",
    columns: Sequence[str] | None = None,
    norms: Sequence[str] = ("bn", "bn-no-affine", "wn"),
    epochs: int = 200,
    seeds: int = 1,
) -> list[Config]:
    """App. C.1.6: the networks that the trajectories start from, trained by SGD with momentum."""
    made = []
    for seed, column, norm in product(_seeds(seeds), columns_of(data, columns or ["ResNet20"]), norms):
        config = replace(_config(column, "SGD-M", 0.1, norm=norm, seed=seed), weight_decay=1e-4)
        made.append(replace(config, epochs=200, milestones=(80, 120, 160)).scaled(epochs))
    return made


def trajectories(starts: Iterable[Config], *, epochs: int = 1, methods: Sequence[str] | None = None) -> list[Config]:
    """fig:track_adamgradg_sgd: SGD, AdaGradG and AdaGrad from each trained network, over the same batches.

    SGD has rate 1e-2 and L2 1e-3, AdaGradG what Theorem 4 makes of it, AdaGrad (Adam without momentum) rate 1e-3;
    parameters without rows get SGD in all three. In float32, since trajectories are compared.
    """
    rates = {"SGD": 1e-2, "AdaGradG": 1e-2, "AdaGrad": 1e-3}
    made = []
    for start, method in product(starts, match_names("methods", methods, tuple(rates))):
        kept = replace(start, method=method, start=start.key, precision="float32", epochs=epochs, milestones=())
        made.append(replace(kept, lr=rates[method], rest_lr=1e-2, weight_decay=1e-3, betas=(0.9, 0.999)))
    return made


def grid(
    *,
    data: str | None = "cifar10",
    columns: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    epochs: int = 405,
    seeds: int = 1,
    rates: Sequence[float] | None = None,
    decays: Sequence[float] | None = None,
    beta2s: Sequence[float] | None = None,
) -> list[Config]:
    """The grid search of App. D.3: learning rate × weight decay × β2, for each method and column.

    Args:
        data: the data set.
        columns: networks, or network and data; None: all.
        methods: None: all.
        epochs: of each training; milestones scale.
        seeds: number of seeds.
        rates: η; None: the paper's four.
        decays: λ; None: the paper's eight.
        beta2s: β2, for all methods but SGD-M; None: the paper's three.
    """
    taken, made = match_names("methods", methods, TABLE_METHODS), []
    if beta2s and set(taken) == {"SGD-M"}:
        raise ValueError(f"beta2s are for the Adam variants, and SGD-M has none, got {', '.join(map(str, beta2s))}")
    for seed, column, method in product(_seeds(seeds), columns_of(data, columns), taken):
        tried = (0.99,) if method == "SGD-M" else beta2s or paper.GRID["beta2"]
        for lr, decay, beta2 in product(rates or paper.GRID["lr"], decays or paper.GRID["weight_decay"], tried):
            config = replace(_config(column, method, lr, seed=seed), weight_decay=decay, betas=(0.9, beta2))
            made.append(config.scaled(epochs))
    return made


RECIPES: dict[str, Callable[..., list[Config]]] = {
    "tables": accuracy_tables,
    "tables-no-affine": lambda **options: accuracy_tables(norm="bn-no-affine", **options),
    "curves": accuracy_tables,  # fig:loss_comparison, fig:acc_comparison and those of App. D.4
    "hypotheses": hypotheses,
    "phenomena": phenomena,
    "trajectories": pretraining,  # of the networks that `trajectories` start from
    "grid": grid,
}
"""Recipes by name."""


def _config(column: tuple[str, str], method: str, lr: float, **more: object) -> Config:
    model, data = column
    sized = _DIGITS if data == "digits" else {}
    return Config(model=model, data=data, method=method, lr=lr, **sized, **more)  # type: ignore[arg-type]


def _best(column: tuple[str, str], method: str, settings: str = "printed", **more: object) -> Config:
    """A training with the best hyper-parameters of its column, or of CIFAR-10 for data that the paper does not have."""
    known = column if column in paper.COLUMNS else (column[0], "cifar10")
    best = paper.SETTINGS[settings][method][known]
    config = _config(column, method, paper.LEARNING_RATE[method], **more)
    return replace(config, weight_decay=best.weight_decay, betas=(0.9, best.beta2))


def _seeds(count: int) -> range:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"seeds must be a number of at least 1, got {count!r}")
    return range(count)

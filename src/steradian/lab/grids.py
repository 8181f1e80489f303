"""The best point of a grid search, chosen by validation accuracy alone, beside the paper's."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from steradian.lab import paper
from steradian.lab.config import METHODS, Config
from steradian.lab.results import Result
from steradian.lab.tables import Cell, figure

__all__ = ["Best", "grid_rows", "is_grid", "point_rows", "search"]


@dataclass(frozen=True)
class Best:
    """What a grid search found for one method in one column.

    Attributes:
        config: the best setting, with its first seed; any of them where all diverged.
        validation: its mean best validation accuracy over seeds, in percent; NaN where all diverged.
        accuracy: its mean test accuracy at those epochs.
        seeds: how many.
        points: settings that were tried.
        diverged: how many of them diverged with every seed.
    """

    config: Config
    validation: float
    accuracy: float
    seeds: int
    points: int
    diverged: int


def is_grid(results: Iterable[Result]) -> bool:
    """Whether some method was trained with several settings in one column, with one network and equally long."""
    return any(len(settings) > 1 for settings in _searches(results))


def search(results: Iterable[Result]) -> list[Best]:
    """The best setting of each method in each column and length; the test set has no part in the choice."""
    found = []
    for settings in _searches(results):
        kept = {key: [r for r in runs if not r.diverged] for key, runs in settings.items()}
        alive = {key: runs for key, runs in kept.items() if runs}
        lost = len(settings) - len(alive)
        if not alive:
            [[first, *_], *_] = settings.values()
            found.append(Best(first.config, math.nan, math.nan, 0, len(settings), lost))
            continue
        best = max(alive.values(), key=_validation)
        accuracy = fmean(result.accuracy for result in best)
        found.append(Best(best[0].config, _validation(best), accuracy, len(best), len(settings), lost))
    return sorted(found, key=lambda best: (_where(best.config), METHODS.index(best.config.method), best.config.epochs))


def _searches(results: Iterable[Result]) -> list[dict[str, list[Result]]]:
    """By setting, what may be compared: one method in one column, with one network and equally long."""
    kinds: dict[tuple[str, str, bool, str, int], dict[str, list[Result]]] = {}
    for result in results:
        config = result.config
        kind = kinds.setdefault((config.column, config.norm, config.released, config.method, config.epochs), {})
        kind.setdefault(config.setting, []).append(result)
    return list(kinds.values())


def grid_rows(results: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table of `search`."""
    heads = ["column", "method", "epochs", "best: η, λ, β2", "paper: η, λ, β2", "validation", "test", "seeds", "points"]
    lines = []
    for best in search(results):
        config = best.config
        lost = f" ({best.diverged} diverged)" if best.diverged else ""
        ours = _setting(config.method, config.lr, config.weight_decay, config.betas[1]) if best.seeds else ""
        figures = [figure(best.validation), figure(best.accuracy), str(best.seeds), f"{best.points}{lost}"]
        where = [_where(config), config.method, str(config.epochs)]
        lines.append([*where, ours, _papers(config), *figures])
    return heads, lines


def point_rows(results: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table of every setting that was tried, with the paper's accuracy beside it."""
    settings: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        c = result.config
        place = (c.column, c.norm, c.released, METHODS.index(c.method), c.lr, c.weight_decay, c.betas[1], c.epochs)
        settings.setdefault(place, []).append(result)
    heads = ["column", "method", "η", "λ", "β₂", "epochs", "validation", "test", "seeds", "paper"]
    lines = []
    for _, runs in sorted(settings.items()):
        c, test = runs[0].config, Cell.of(result.accuracy for result in runs)
        kept = [result for result in runs if not result.diverged]
        numbers = [f"{c.lr:g}", f"{c.weight_decay:g}", "" if c.method.startswith("SGD") else f"{c.betas[1]:g}"]
        reached = [f"{_validation(kept):.2f}" if kept else "", str(test), test.count]
        papers = paper.ACCURACY.get(c.norm, {}).get(c.method, {}).get((c.model, c.data))
        lines.append(
            [_where(c), c.method, *numbers, str(c.epochs), *reached, "" if papers is None else f"{papers.mean:.2f}"]
        )
    return heads, lines


def _validation(results: Sequence[Result]) -> float:
    return fmean(max(result.curves["validation_accuracy"]) for result in results)


def _where(config: Config) -> str:
    return f"{config.column} {config.norm}" + (", released network" if config.released else "")


def _papers(config: Config) -> str:
    column = (config.model, config.data)
    if config.method not in paper.BEST or column not in paper.BEST[config.method]:
        return ""
    best = paper.BEST[config.method][column]
    return _setting(config.method, paper.LEARNING_RATE[config.method], best.weight_decay, best.beta2)


def _setting(method: str, lr: float, decay: float, beta2: float) -> str:
    """η, λ and, where the method has it, β2."""
    return f"{lr:g}, {decay:g}" + ("" if method.startswith("SGD") else f", {beta2:g}")

"""Tables from stored results: ours beside the paper's, with spread, number of seeds, and what is within the noise.

The rule: two figures differ when Welch's t-test on their seeds rejects equal means at 5 %. Otherwise the difference
is called within the noise; with one seed nothing is said.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from steradian.lab import paper
from steradian.lab.config import METHODS
from steradian.lab.results import Result

__all__ = ["LEVEL", "Cell", "Table", "accuracy_table", "student_p", "welch_p"]

LEVEL = 0.05
"""Below this p a difference of means is not called noise."""
_PAPERS_SEEDS = 5


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds."""

    mean: float
    spread: float
    seeds: int
    diverged: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Cell":
        """The figures of some trainings, in percent; NaN counts as diverged."""
        every = list(values)
        kept = [value for value in every if math.isfinite(value)]
        spread = float(np.std(kept, ddof=1)) if len(kept) > 1 else math.nan
        return cls(float(np.mean(kept)) if kept else math.nan, spread, len(kept), len(every) - len(kept))

    def __str__(self) -> str:
        if not self.seeds:
            return f"diverged ({self.diverged})"
        spread = f" ± {self.spread:.2f}" if self.seeds > 1 else ""
        lost = f", {self.diverged} diverged" if self.diverged else ""
        return f"{self.mean:.2f}{spread} ({self.seeds}{lost})"


@dataclass(frozen=True)
class Table:
    """One normalization's accuracies: by column, by method.

    Attributes:
        norm: the normalization.
        cells: ours, by column and method, each in the order of the paper.
        papers: the paper's, where it has them.
        epochs: of the trainings, by column.
        times: what each column took and where, in words.
    """

    norm: str
    cells: dict[tuple[str, str], dict[str, Cell]]
    papers: dict[tuple[str, str], dict[str, Cell]]
    epochs: dict[tuple[str, str], int]
    times: dict[tuple[str, str], str]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Headings and lines."""
        heads = ["method"]
        for column in self.cells:
            heads.append(" ".join(column))
            heads += ["paper"] if self.papers.get(column) else []
        used = [method for method in METHODS if any(method in column for column in self.cells.values())]
        lines = []
        for method in used:
            line = [method]
            for column, ours in self.cells.items():
                line.append(str(ours.get(method, "")))
                papers = self.papers.get(column)
                line += [_papers_text(papers.get(method))] if papers else []
            lines.append(line)
        return heads, lines

    def statements(self) -> list[str]:
        """What the figures say, and what is within the noise of the seeds."""
        said = []
        for column, ours in self.cells.items():
            where = f"{' '.join(column)} {self.norm}, {self.epochs[column]} epochs"
            texts = [_order(ours), _against(ours, self.papers.get(column, {})), self.times[column]]
            said += [f"{where}: {text}" for text in texts if text]
        return said

    def markdown(self) -> str:
        """The table for a document, with its statements below."""
        heads, lines = self.rows()
        table = ["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *lines]]
        return "\n".join([*table, "", RULE, "", *(f"- {text}" for text in self.statements())])


RULE = (
    "Test accuracy in percent at the best validation epoch, mean ± standard deviation (number of seeds). "
    f"“Within the noise”: Welch's t-test on the seeds does not reject equal means at {LEVEL:.0%}."
)


def accuracy_table(results: Iterable[Result], *, norm: str = "bn") -> Table:
    """The table of one normalization from stored results.

    Raises:
        ValueError: results of one method and column were trained differently, so that they have no common mean.
    """
    grouped: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        config = result.config
        if config.norm == norm and config.start is None:
            grouped.setdefault((config.model, config.data), {}).setdefault(config.method, []).append(result)
    order = {column: k for k, column in enumerate(paper.COLUMNS)}
    models = list(dict.fromkeys(model for model, _ in paper.COLUMNS))
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    epochs: dict[tuple[str, str], int] = {}
    for column in sorted(grouped, key=lambda c: (order.get(c, len(order)), c[1], models.index(c[0]))):
        cells[column] = {}
        for method, found in grouped[column].items():
            if len({result.config.setting for result in found}) > 1:
                raise ValueError(
                    f"{' '.join(column)} holds {method} with several settings: a grid has no table of means"
                )
            cells[column][method] = Cell.of(result.accuracy for result in found)
            epochs[column] = found[0].config.epochs
    times = {column: _time([r for found in grouped[column].values() for r in found]) for column in cells}
    return Table(norm, cells, {column: _papers(norm, column) for column in cells}, epochs, times)


def welch_p(one: Cell, other: Cell) -> float | None:
    """Two-sided p of equal means by Welch's t-test; None where the spread of one is not known."""
    if one.seeds < 2 or other.seeds < 2:
        return None
    errors = [cell.spread**2 / cell.seeds for cell in (one, other)]
    if sum(errors) == 0:
        return 1.0 if one.mean == other.mean else 0.0
    freedom = sum(errors) ** 2 / sum(e**2 / (c.seeds - 1) for e, c in zip(errors, (one, other), strict=True))
    return student_p((one.mean - other.mean) / math.sqrt(sum(errors)), freedom)


def student_p(t: float, freedom: float) -> float:
    """P(|T| ≥ |t|) of Student's distribution with ν degrees of freedom: I_x(ν/2, 1/2) with x = ν/(ν + t²).

    >>> round(student_p(2.776, 4), 3)  # the 5 % point of four degrees of freedom
    0.05
    """
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    fraction = 1.0
    for m in range(200, 0, -1):  # from the inside out; far more terms than doubles can tell apart
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    return front / (1 - (a + b) / (a + 1) * x / fraction)


def _papers(norm: str, column: tuple[str, str]) -> dict[str, Cell]:
    table = paper.ACCURACY.get(norm, {})
    found = {method: row[column] for method, row in table.items() if column in row}
    return {
        method: Cell(figure.mean, math.nan if figure.spread is None else figure.spread, _PAPERS_SEEDS)
        for method, figure in found.items()
    }


def _time(results: Sequence[Result]) -> str:
    """The device time of some trainings together, and the devices."""
    devices = sorted({result.environment.get("device", "an unknown device") for result in results})
    seconds = sum(result.seconds for result in results)
    return f"{len(results)} trainings took {seconds / 3600:.2f} hours of {', '.join(devices)}"


def _papers_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.mean:.2f}" + ("" if math.isnan(cell.spread) else f" ± {cell.spread:.2f}")


def _order(ours: dict[str, Cell]) -> str:
    """Which Adam variant is best, and which are within the noise of it."""
    variants = {method: cell for method, cell in ours.items() if method.startswith("Adam") and cell.seeds}
    if len(variants) < 2:
        return ""
    best = max(variants, key=lambda method: variants[method].mean)
    near, unknown = [], []
    for method, cell in variants.items():
        p = welch_p(cell, variants[best])
        if method != best and p is None:
            unknown.append(method)
        elif method != best and p is not None and p >= LEVEL:
            near.append(f"{method} (p = {p:.2g})")
    text = f"{best} has the best mean of the Adam variants, {variants[best].mean:.2f}; "
    text += f"within the noise of it: {', '.join(near)}" if near else "none is within the noise of it"
    return f"{best} is highest, by one seed, which says nothing" if unknown and not near else text


def _against(ours: dict[str, Cell], papers: dict[str, Cell]) -> str:
    """How far each mean is from the paper's."""
    parts = []
    for method, cell in ours.items():
        if method not in papers or not cell.seeds:
            continue
        there = papers[method]
        p = None if math.isnan(there.spread) else welch_p(cell, there)
        verdict = "" if p is None else ", within the noise" if p >= LEVEL else f", p = {p:.1g}"
        parts.append(f"{method} {cell.mean - there.mean:+.2f}{verdict}")
    return f"distance to the paper: {'; '.join(parts)}" if parts else ""

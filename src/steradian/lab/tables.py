"""Tables from stored results: accuracies beside the paper's, the best points of grids, and intervals of differences."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from steradian.lab import paper
from steradian.lab.config import Config
from steradian.lab.registry import METHODS
from steradian.lab.results import Result

__all__ = ["Best", "Cell", "Column", "Difference", "accuracy_columns", "compare", "grid_rows", "holm", "interval_rows"]
__all__ += ["at_edge", "is_grid", "point_rows", "search", "signed", "winners"]

Rows = tuple[list[str], list[list[str]]]
"""Headings and lines of a table."""

LEVEL = 0.05
"""Below this p a difference of means is not called noise."""
MARGIN = 0.3
"""Points of accuracy: a difference whose 95 % interval lies within ± this is called none."""
_BEST = "Adam w/o (ab)"  # the Adam variant that the paper finds best
_PAPERS_SEEDS = 5
_HOURS = 120  # seconds from which on a total is given in hours

_RULE = (
    "Test accuracy in percent at the best validation epoch, mean ± standard deviation over the seeds. “Within the "
    f"noise”: Welch's t-test on the seeds, each pair by itself, does not reject equal means at {LEVEL:.0%}. SGD-M is "
    "not in the paper's tables: its figure is from the authors' read-me."
)
_OWN_RULE = (
    "Test accuracy in percent at the best validation epoch, mean ± standard deviation over the seeds. Each method is "
    "compared with the best mean: the 95 % interval of the difference, and p by Welch's t-test, corrected by Holm's "
    "method. What is not decided may be equal or not: more seeds tell."
)


def method_order(method: str) -> tuple[int, str]:
    """Sort key of a method: as registered, then those whose plugin is not loaded."""
    return _index(list(METHODS), method), method


class Difference(NamedTuple):
    """A difference of two means, its 95 % interval, and p of none by Welch's t-test; NaN if one has no spread."""

    mean: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds."""

    mean: float
    spread: float
    seeds: int
    diverged: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Cell":
        """From the accuracies of some trainings, in percent; NaN counts as diverged."""
        every = list(values)
        kept = [value for value in every if math.isfinite(value)]
        spread = float(np.std(kept, ddof=1)) if len(kept) > 1 else math.nan
        return cls(float(np.mean(kept)) if kept else math.nan, spread, len(kept), len(every) - len(kept))

    def __str__(self) -> str:
        if not self.seeds:
            return "diverged" if self.diverged else ""
        return f"{self.mean:.2f}" + ("" if math.isnan(self.spread) else f" ± {self.spread:.2f}")

    @property
    def count(self) -> str:
        """The number of seeds, and of those that diverged."""
        return str(self.seeds) + (f" ({self.diverged} diverged)" if self.diverged else "")

    @property
    def half(self) -> float:
        """Half of the 95 % interval of the mean by Student's t; NaN without a spread."""
        if math.isnan(self.spread):
            return math.nan
        return float(stats.t.ppf(1 - LEVEL / 2, self.seeds - 1)) * self.spread / math.sqrt(self.seeds)

    def minus(self, other: "Cell") -> Difference:
        """The difference to another mean.

        >>> round(Cell(91.92, 0.18, 5).minus(Cell(91.81, 0.20, 5)).p, 2)
        0.39
        """
        mean, (ours, theirs) = self.mean - other.mean, (cell.spread**2 / cell.seeds for cell in (self, other))
        if math.isnan(ours + theirs):
            return Difference(mean, math.nan, math.nan, math.nan)
        if ours == theirs == 0:
            return Difference(mean, mean, mean, float(mean == 0))
        freedom = (ours + theirs) ** 2 / (ours**2 / (self.seeds - 1) + theirs**2 / (other.seeds - 1))
        error = math.sqrt(ours + theirs)
        half, p = stats.t.ppf(1 - LEVEL / 2, freedom) * error, 2 * stats.t.sf(abs(mean) / error, freedom)
        return Difference(mean, float(mean - half), float(mean + half), float(p))


class Column:
    """One network with one normalization on one data set, trained for one number of epochs.

    `results` are by method, in the order of `METHODS`, each by seed. `own`: it is a comparison of one's own, whose
    methods or schedules are not the paper's. `cells` are our accuracies by method, `papers` the paper's, if it has this
    column; SGD-M's comes from the authors' read-me.
    """

    def __init__(self, results: dict[str, list[Result]]) -> None:
        self.results, self.every = results, [result for found in results.values() for result in found]
        self.config = c = self.every[0].config
        norm, data = paper.NORM_NAMES.get(c.norm, c.norm), paper.DATA_NAMES.get(c.data, c.data)
        self.name = f"{c.model} {norm}".strip() + f", {data}"
        self.length = f"{c.epochs} epoch{'s' * (c.epochs != 1)}"
        self.own = any(result.config.plugin or result.config.schedule != "steps" for result in self.every)
        self.cells = {method: Cell.of(result.accuracy for result in found) for method, found in results.items()}
        table = {} if self.own else paper.ACCURACY.get(c.norm, {})
        printed = {method: row[c.model, c.data] for method, row in table.items() if (c.model, c.data) in row}
        self.papers = {method: Cell(*figure, _PAPERS_SEEDS) for method, figure in printed.items()}

    def rows(self, *, seeds: bool = False) -> Rows:
        """The table, optionally with the accuracy of every seed; beside the paper's, or beside the best method's."""
        numbers = sorted({result.config.seed for result in self.every}) if seeds else []
        papers, own = self.papers, self.own
        heads = ["method", *(f"seed {k}" for k in numbers), "ours" if papers else "mean accuracy", "seeds"]
        heads += ["paper", "ours − paper", "is that noise?"] if papers else []
        heads += ["minus the best", "95 % interval", "p (Holm)"] if own else []
        lines, others = [], self._against_best() if own else {}
        for method, cell in self.cells.items():
            single = {result.config.seed: _percent(result.accuracy) for result in self.results[method]}
            line = [method, *(single.get(k, "") for k in numbers), str(cell), cell.count]
            line += others.get(method, [])[2:5]
            other = papers.get(method)
            line += [str(other or "")] if papers else []
            if other and cell.seeds:
                mean, *_, p = cell.minus(other)
                noise = [] if math.isnan(p) else [f"{'within' if p >= LEVEL else 'beyond'} the noise, p = {p:.2g}"]
                line += [signed(mean), *noise]
            lines.append(line + [""] * (len(heads) - len(line)))
        return heads, lines

    def _against_best(self) -> dict[str, list[str]]:
        """`compare` of all methods with the one of the best mean."""
        kept = {m: [r.accuracy for r in results if not r.diverged] for m, results in self.results.items()}
        return compare(kept, next(iter(_ranked(self.cells, "")), ""))

    def statements(self) -> list[str]:
        """Cautions and conclusions, a sentence each."""
        found = {m: np.mean([r.collapsed for r in results]) for m, results in self.results.items()}
        means = ", ".join(f"{method} {mean:.3g}" for method, mean in found.items() if mean)
        shrunk = f"Filters without a direction at the end, mean over seeds: {means}." if means else ""
        return [text for text in (self.caution(), self.claim(), self.against_sgd(), shrunk, self.time()) if text]

    def caution(self) -> str:
        """How these trainings differ from the paper's, and from each other."""
        parts = []
        if self.papers and self.config.epochs != paper.EPOCHS:
            parts.append(f"trained for {self.length}, the paper's for {paper.EPOCHS}")
        best = {m: (paper.LEARNING_RATE[m], *paper.BEST[m][self.config.model, self.config.data]) for m in self.papers}
        ours = {(r.config.method, (r.config.lr, r.config.weight_decay, r.config.betas[1])) for r in self.every}
        if others := [m for m, printed in best.items() if any(m == each and s != printed for each, s in ours)]:
            parts.append(f"hyper-parameters other than the paper prints for {', '.join(others)}")
        if self.papers and any(result.config.released for result in self.every):
            parts.append("with the network of the paper's released code")
        if len({result.environment.get("data") for result in self.every} - {None}) > 1:
            parts.append(f"trained on different images that go by the name {self.config.data}")
        if missing := [method for method in self.papers if method not in self.results]:
            parts.append(f"not run yet: {', '.join(missing)}")
        few = [f"{method} {cell.seeds}" for method, cell in self.cells.items() if cell.seeds < _PAPERS_SEEDS]
        if self.papers and few:
            parts.append(f"fewer seeds than the paper's {_PAPERS_SEEDS}: {', '.join(few)}")
        return "Mind: " + "; ".join(parts) + "." if parts else ""

    def claim(self) -> str:
        """Which method, or which Adam variant in the paper's columns, is best, and what is sure about the others."""
        cells = _ranked(self.cells, "" if self.own else "Adam")
        if len(cells) < 2:
            return ""
        best = next(iter(cells))
        text = f"{best} has the best mean{'' if self.own else ' of the Adam variants'}, {cells[best]}"
        if any(cell.seeds < 2 for cell in cells.values()):
            return f"{text}; one seed says nothing about the order."
        if self.own:
            verdicts = {method: line[-1] for method, line in self._against_best().items()}
            worse, open_ = ([m for m in verdicts if verdicts[m] == v] for v in ("worse", "not decided"))
            return f"{text}; worse: {_listed(worse)}; not decided with these seeds: {_listed(open_)}."
        others = {m: cells[m].minus(cells[best]) for m in self.cells if m in cells and m != best}
        words = {m: f"{m} ({signed(each.mean)}, p = {each.p:.2g})" for m, each in others.items()}
        near, beaten = ([words[m] for m in words if (others[m].p >= LEVEL) == noise] for noise in (True, False))
        text += f"; within the noise of it: {_listed(near)}; beyond the noise: {_listed(beaten)}."
        if _BEST not in cells:
            return text
        rank = list(cells).index(_BEST) + 1
        verdict = "first" if rank == 1 else f"number {rank} of {len(cells)}"
        if papers := _ranked(self.papers, "Adam"):
            (first, ahead), (second, behind) = list(papers.items())[:2]
            lead = ahead.minus(behind)
            verdict += f" (in the paper's own figures {first} leads {second} by {lead.mean:.2f}, p = {lead.p:.2g})"
        return f"{text} The paper's best, {_BEST}, is {verdict}."

    def against_sgd(self) -> str:
        """The best Adam variant against SGD with momentum, which is not in the paper's table."""
        sgd, variants = self.cells.get("SGD-M"), _ranked(self.cells, "Adam")
        if sgd is None or not sgd.seeds or not variants or self.own:
            return ""
        best, cell = next(iter(variants.items()))
        lead, *_, p = sgd.minus(cell)
        sure = "" if math.isnan(p) else f", p = {p:.2g}"
        return f"SGD-M is {abs(lead):.2f} {'above' if lead >= 0 else 'below'} the best Adam variant, {best}{sure}."

    def time(self) -> str:
        """The device time of all trainings together, and the devices."""
        devices = sorted({result.environment.get("device", "an unknown device") for result in self.every})
        seconds = sum(result.seconds for result in self.every)
        took = f"{seconds / 3600:.2f} hours" if seconds >= _HOURS else f"{seconds:.0f} s"
        return f"{len(self.every)} training{'s' * (len(self.every) != 1)} took {took} on {', '.join(devices)}."


def rule_of(columns: Iterable[Column]) -> str:
    """What is below tables."""
    return _OWN_RULE if any(column.own for column in columns) else _RULE


def accuracy_columns(results: Iterable[Result]) -> list[Column]:
    """Tables from stored results, in the paper's order, one for each number of epochs; fine-tuning is left out.

    A ValueError is raised if results of one method and column were trained differently: they have no common mean.
    """
    ordered = sorted(results, key=lambda r: (_order(r.config), method_order(r.config.method), r.config.seed))
    made = []
    for found in _grouped((r for r in ordered if r.config.start is None), _order).values():
        methods: dict[str, list[Result]] = {}
        for method, runs in _grouped(found, lambda c: c.method).items():
            versions = _grouped(runs, lambda c: c.plugin)
            methods |= {method if len(versions) == 1 else f"{method} of {v}": each for v, each in versions.items()}
        column = Column(methods)
        for method, runs in column.results.items():
            if len({result.config.setting for result in runs}) > 1:
                what = f"{column.name} holds {method} with several settings"
                raise ValueError(f"{what}: they have no common mean; --study gives trainings a file of their own")
        made.append(column)
    return made


def _order(c: Config) -> tuple[Any, ...]:
    """Sort key of a column: in the paper's order, then by data and network."""
    models = list(dict.fromkeys(model for model, _ in paper.COLUMNS))
    column = _index(list(paper.COLUMNS), (c.model, c.data))
    return _index(list(paper.NORM_NAMES), c.norm), column, c.data, _index(models, c.model), c.norm, c.model, c.epochs


def _grouped(results: Iterable[Result], kind: Callable[[Config], Any]) -> dict[Any, list[Result]]:
    """Results by a property of their configurations, in the order in which they come."""
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(kind(result.config), []).append(result)
    return groups


def _ranked(cells: Mapping[str, Cell], prefix: str) -> dict[str, Cell]:
    """The methods of this prefix that did not always diverge, the best mean first."""
    found = [(method, cell) for method, cell in cells.items() if method.startswith(prefix) and cell.seeds]
    return dict(sorted(found, key=lambda each: -each[1].mean))


def _index(known: Sequence[object], name: object) -> int:
    """Position of a name; unknown names are last."""
    return known.index(name) if name in known else len(known)


def markdown_table(heads: list[str], lines: list[list[str]]) -> str:
    r"""Cells between bars.

    >>> print(markdown_table(["a", "b"], [["1", "|x|"]]))
    | a | b |
    | --- | --- |
    | 1 | \|x\| |
    """
    rows = [[cell.replace("|", "\\|") for cell in row] for row in [heads, ["---"] * len(heads), *lines]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def signed(difference: float, digits: int = 2) -> str:
    """A difference with its sign."""
    return f"{difference:+.{digits}f}".replace("-", "−")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _percent(accuracy: float) -> str:
    return "diverged" if math.isnan(accuracy) else f"{accuracy:.2f}"


@dataclass(frozen=True)
class Best:
    """What a grid search found for one method in one column."""

    config: Config  #: the best setting, with its first seed; any setting if all diverged
    runs: Sequence[Result]  #: its trainings that did not diverge
    points: int  #: settings that were tried
    diverged: int  #: settings that diverged with every seed


def is_grid(results: Iterable[Result]) -> bool:
    """Whether some method was trained with several settings in one column, with one network and equally long."""
    return any(len(settings) > 1 for settings in _searches(results))


def _validation(result: Result) -> float:
    return max(result.curves["validation_accuracy"])


def search(results: Iterable[Result], value: Callable[[Result], float] = _validation) -> list[Best]:
    """The best setting of each method in each column and length: the largest mean of a value, without the test set."""
    found = []
    for settings in _searches(results):
        alive = [kept for runs in settings.values() if (kept := [run for run in runs if not run.diverged])]
        best = max(alive, key=lambda runs: Cell.of(map(value, runs)).mean, default=[])
        [[first, *_], *_] = [best] if best else settings.values()
        found.append(Best(first.config, best, len(settings), len(settings) - len(alive)))
    return sorted(found, key=lambda best: (_where(best.config), method_order(best.config.method), best.config.epochs))


def winners(
    tried: Iterable[Config], results: Iterable[Result], seeds: int, value: Callable[[Result], float] = _validation
) -> list[Config]:
    """The best of the settings that were tried for each method, as trainings with the seeds 1, 2, …; see `search`."""
    keys = {config.key for config in tried}
    best = search((result for result in results if result.config.key in keys), value)
    return [replace(each.config, seed=seed) for seed in range(1, seeds + 1) for each in best if each.runs]


def at_edge(tried: Sequence[Config], chosen: Iterable[Config]) -> list[str]:
    """A sentence for each winner whose rate or λ is the smallest or the largest of several that were tried."""
    found = []
    for config, (field, name) in product(chosen, (("lr", "rate"), ("weight_decay", "weight decay"))):
        values = {getattr(each, field) for each in tried if each.method == config.method}
        value, ends = getattr(config, field), {min(values): "smallest", max(values): "largest"}
        if len(values) > 1 and value in ends:
            best = f"{config.method}: the best {name}, {value:g}"
            found.append(f"{best}, is the {ends[value]} that was tried. Try beyond it.")
    return list(dict.fromkeys(found))


def _searches(results: Iterable[Result]) -> list[dict[str, list[Result]]]:
    """Results that may be compared, by setting: one method in one column, with one network and equally long."""
    kinds = _grouped(results, lambda c: (c.column, c.norm, c.released, c.method, c.epochs, c.schedule, c.plugin))
    return [_grouped(found, lambda c: c.setting) for found in kinds.values()]


def grid_rows(results: Iterable[Result]) -> Rows:
    """The table of `search`."""
    lines, every = [], search(results)
    names = "η, λ" + ", β2" * any(best.config.method.startswith("Ad") for best in every)
    heads = ["column", "method", "epochs", f"best: {names}", f"paper: {names}", "validation", "test", "seeds", "points"]
    for best in every:
        c, runs = best.config, best.runs
        lost = f" ({best.diverged} diverged)" if best.diverged else ""
        ours = _setting(c.method, c.lr, c.weight_decay, c.betas[1]) if runs else ""
        cells = Cell.of(map(_validation, runs)), Cell.of(run.accuracy for run in runs)
        figures = [*(_percent(cell.mean) for cell in cells), str(len(runs)), f"{best.points}{lost}"]
        papers = paper.BEST.get(c.method, {}).get((c.model, c.data))
        printed = _setting(c.method, paper.LEARNING_RATE[c.method], *papers) if papers else ""
        lines.append([_where(c), c.method, str(c.epochs), ours, printed, *figures])
    if not any(line[4] for line in lines):
        heads, *lines = ([*row[:4], *row[5:]] for row in (heads, *lines))
    return heads, lines


def point_rows(results: Iterable[Result]) -> Rows:
    """A table of every setting that was tried, with the paper's accuracy beside it; fine-tuning is left out."""

    def kind(c: Config) -> tuple[Any, ...]:
        return c.column, c.norm, c.released, method_order(c.method), c.lr, c.weight_decay, c.betas[1], c.epochs

    heads = ["column", "method", "η", "λ", "β₂", "epochs", "validation", "test", "seeds", "paper"]
    lines = []
    for _, runs in sorted(_grouped((r for r in results if r.config.start is None), kind).items()):
        c, test = runs[0].config, Cell.of(result.accuracy for result in runs)
        kept = [_validation(result) for result in runs if not result.diverged]
        numbers = [f"{c.lr:g}", f"{c.weight_decay:g}", f"{c.betas[1]:g}" if c.method.startswith("Ad") else ""]
        reached = [_percent(Cell.of(kept).mean) if kept else "", str(test), test.count]
        papers = paper.ACCURACY.get(c.norm, {}).get(c.method, {}).get((c.model, c.data))
        lines.append([_where(c), c.method, *numbers, str(c.epochs), *reached, f"{papers.mean:.2f}" if papers else ""])
    return heads, lines


def _where(config: Config) -> str:
    return f"{config.column} {config.norm}" + (", released network" if config.released else "")


def _setting(method: str, lr: float, decay: float, beta2: float) -> str:
    """η, λ and, if the method has it, β2."""
    return f"{lr:g}, {decay:g}" + (f", {beta2:g}" if method.startswith("Ad") else "")


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p: below 5 % where a family of comparisons may reject, with an error of 5 % in all.

    >>> [round(each, 3) for each in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    adjusted = np.maximum.accumulate([(len(p) - place) * p[k] for place, k in enumerate(order)])
    return np.minimum(adjusted, 1)[np.argsort(order)].tolist()


def compare(
    samples: Mapping[str, Sequence[float]],
    baseline: str,
    *,
    digits: int = 2,
    better: str = "larger",
    margin: float | None = None,
) -> dict[str, list[str]]:
    """By name: mean ± half its 95 % interval, number of values, difference to the baseline, its interval, p, verdict.

    The samples are values such as accuracies over seeds; p is corrected by Holm's method over all but the baseline.
    `better` is "larger" or "smaller"; a difference is called none only if its interval lies within ± `margin`.
    """
    cells = {name: Cell.of(values) for name, values in samples.items()}
    base = cells.get(baseline, Cell.of(()))
    found = {name: cell.minus(base) for name, cell in cells.items() if name != baseline and cell.seeds and base.seeds}
    tested = [name for name, each in found.items() if not math.isnan(each.p)]
    adjusted = dict(zip(tested, holm([found[name].p for name in tested]), strict=True))
    lines = {}
    for name, cell in cells.items():
        text = f"{cell.mean:.{digits}f}" + ("" if math.isnan(cell.half) else f" ± {cell.half:.{digits}f}")
        lines[name] = [text if cell.seeds else "diverged", str(cell.seeds), "", "", "", ""]
        if name in found:
            lines[name][2] = signed(found[name].mean, digits)
        if name in adjusted:
            mean, low, high, _ = found[name]
            verdict = "better" if (mean > 0) == (better == "larger") else "worse"
            if margin is not None and -margin < low and high < margin:
                verdict = "no difference"
            elif adjusted[name] >= LEVEL:
                verdict = "not decided"
            interval = f"{signed(low, digits)} to {signed(high, digits)}"
            lines[name][3:] = [interval, f"{adjusted[name]:.2g}", verdict]
    return lines


def interval_rows(
    results: Iterable[Result],
    *,
    value: Callable[[Result], float] = lambda result: result.accuracy,
    what: str = "accuracy",
    baseline: str = "SGD-M",
    margin: float | None = MARGIN,
    **how: Any,
) -> Rows:
    """A table of the methods of every column, whose `value`s are compared with those of one of them; see `compare`.

    It is the one with the most seeds of those whose name begins with `baseline`. The only column is not named.
    """
    heads = ["column", "method", "η, λ", what, "seeds", "minus the first", "95 % interval", "p (Holm)", "verdict"]
    lines = []
    for methods in (column.results for column in accuracy_columns(results)):
        samples = {method: [value(run) for run in runs if not run.diverged] for method, runs in methods.items()}
        base = max(samples, key=lambda method: (method.startswith(baseline), len(samples[method])))
        compared = compare(samples, base, margin=margin, **how)
        for method in sorted(compared, key=lambda method: method != base):
            c = methods[method][0].config
            column = f"{c.model} {c.norm}, {c.data}, {c.epochs} epochs"
            lines.append([column, method, f"{c.lr:g}, {c.weight_decay:g}", *compared[method]])
    if len({line[0] for line in lines}) == 1:
        heads, *lines = (row[1:] for row in (heads, *lines))
    return heads, lines

"""What a run says about a training, in words: a few sentences from the table, run.json and the alerts. Without torch.

Layers are compared with each other: groups that are matrices or filters, not biases and gains. A sentence is about the
end of the run: the last tenth of the observed steps, at least five, but none in the first half of the run, of which
more steps are observed. It uses medians over these, because single steps are noisy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steradian.watching import records
from steradian.watching.records import STATISTICS, Alert, Block, RecordedRun, causes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SEVERITIES", "History", "Sentence", "judge", "time_taken", "verdict"]

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

SEVERITIES = ("bad", "warning", "note")
"""From the most severe one: "bad" stops or spoils the training, "warning" needs a look, "note" is for information."""
_MOST = 7  # sentences of a verdict
_FEWEST_STEPS = 5  # observed steps that the end of a run has, and below which nothing is judged
_FEWEST_LATE = 3  # of them in the second half of the run: the median of two is not robust
_APART = 3.0  # a layer is fast or slow if its angle differs from the median layer's by more than this factor
_FAR_APART = 5.0  # beyond this factor it is a warning
_OUT = 2.0  # an angle is far from its equilibrium beyond this factor
_TIMES = 3.0  # an equilibrium should be reached after this many times 1/(ηλ) steps
_BALANCED = 1.25  # weight decay is in balance if the radius is within this factor of its equilibrium
_STILL = 1e-7  # radians: what the rounding of float32 numbers alone may turn a row by
_LOST = 1e-8  # relative update of which the rounding of float32 weights leaves little or nothing
_STEADY = 0.6  # an optimizer pauses if it turned a group at less than this share of the steps up to the last turn
_FELL, _ROSE = 2.0, 1.25  # the rate fell, or the angle rose, if it did so by more than this factor
_COLLAPSING = 100.0  # a layer is collapsing if its radius fell by this factor
_KEPT = 2**22  # numbers that a history keeps: 16 MB
_OF_ALERTS = {"H1": "radial", "H2": "velocity", "defect": "defect"}  # alerts that no other sentence is about
_SEVERAL = {"is": "are", "was": "were", "turns": "turn", "its": "their"}
_PAIRS = [  # quantities and statistics that a verdict is made from
    *((quantity, "median") for quantity in ("angle", "radius", "defect", "equilibrium_angle", "equilibrium_radius")),
    *(("lr", "mean"), ("collapsed", "mean"), ("radius", "max"), ("update", "median")),
    *(("gradient_norm", statistic) for statistic in ("min", "q10", "median", "max")),
]


@dataclass(frozen=True)
class Sentence:
    """One sentence of a verdict.

    Its kind is "not finite", "frozen", "rounded", "dead", "collapsed", "fast", "slow", "equilibrium", "rate",
    "balance", "share", "healthy", "early", "find_groups", or the kind of an alert.
    """

    kind: str
    text: str
    group: str = ""  #: the layer that it names first; "" if it is about the whole run
    quantity: str = ""  #: what it is about, for a link to its chart; "" if no chart shows it
    severity: str = "note"  #: one of `SEVERITIES`


def verdict(run: RecordedRun) -> list[Sentence]:
    """At most seven sentences about a recorded run, the most severe first.

    >>> from steradian.watching.records import read_run
    >>> [sentence.text for sentence in verdict(read_run("runs/a"))]  # doctest: +SKIP
    ['Nothing is wrong up to step 1,999: …']
    """
    return judge(History.of_table(run.table), run.about, records.labels(run), records.alerts_of(run.alerts))


def judge(history: "History", about: Mapping[str, Any], labels: dict[str, str], alerts: list[Alert]) -> list[Sentence]:
    """The verdict from the numbers, the contents of run.json, the labels of its groups and its alerts."""
    if not len(history.steps):
        return []
    run = _Run(history, about, labels, alerts)
    if len(run.steps) < _FEWEST_STEPS:
        steps = "step was" if len(run.steps) == 1 else "steps were"
        return [*_not_finite(run), *run.say("early", steps=f"{len(run.steps)} {steps}")]
    if run.count < _FEWEST_LATE:
        taken = 1 + max(int(run.steps[-1]), about.get("last_step") or 0) - int(run.steps[0])
        every = max(each for each in (1, 2, 5, 10) if each == 1 or 10 * each <= taken)
        return [*_not_finite(run), *run.say("few", late=run.count, steps=len(run.steps), every=every)]
    kinds = _not_finite, _frozen, _dead, _collapsed, _pace, _rate, _equilibrium, _of_alerts, _balance, _share
    found = [sentence for kind in kinds for sentence in kind(run)]
    found.sort(key=lambda sentence: SEVERITIES.index(sentence.severity))
    if all(sentence.severity == "note" for sentence in found):
        found = [*_healthy(run), *found]
    if not run.invariant.any():
        layers = [run.groups[g] for g in np.flatnonzero(run.layers)]
        at_first = {group["name"]: group.get("label") for group in about["groups"]}
        refuted, by_gradient = (all(of.get(name) == "not invariant" for name in layers) for of in (at_first, labels))
        kind = "refuted" if refuted else "refuted_by_gradient" if by_gradient else "untested"
        found = [*found[: _MOST - 1], *run.say(kind)]
    return found[:_MOST]


@dataclass(eq=False)
class History:
    """The recorded numbers that a verdict needs."""

    groups: Sequence[str] = ()  #: their names
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  #: observed steps
    #: (steps, `_PAIRS`, groups); NaN for a number that was not recorded, infinity for one that is not finite
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, len(_PAIRS), 0), np.float32))
    _observed: int = 0
    _stride: int = 1

    @classmethod
    def of_table(cls, table: "pd.DataFrame") -> "History":
        """From a run's table."""
        import pandas as pd

        table = table[table["quantity"].isin({quantity for quantity, _ in _PAIRS}) & (table["group"] != "")]
        steps, groups = np.sort(table["step"].unique()).astype(np.int64), pd.Index(table["group"].unique(), dtype=str)
        values = np.full((len(steps), len(_PAIRS), len(groups)), np.nan, dtype=np.float32)
        for pair, chosen in table.groupby(["quantity", "statistic"], observed=True):
            if pair in _PAIRS:
                step, group = np.searchsorted(steps, chosen["step"]), groups.get_indexer(pd.Index(chosen["group"]))
                values[step, _PAIRS.index(pair), group] = _or_infinite(chosen["value"].to_numpy(float))
        return cls(groups.tolist(), steps, values)

    def add(self, block: Block) -> None:
        """Append some observed steps; if there are too many numbers, every second step of all is dropped."""
        kept = slice(-self._observed % self._stride, None, self._stride)
        values = np.full((len(block.steps[kept]), len(_PAIRS), len(block.groups)), np.nan, dtype=np.float32)
        for k, (quantity, statistic) in enumerate(_PAIRS):
            if quantity in block.quantities:
                q = block.quantities.index(quantity)
                found = _or_infinite(block.values[kept, q, :, STATISTICS.index(statistic)])
                values[:, k] = np.where(block.active[kept] & block.defined[q], found, np.nan)
        self.groups, self._observed = block.groups, self._observed + len(block.steps)
        self.steps = np.append(self.steps, block.steps[kept])
        self.values = np.concatenate([self.values, values]) if self.values.size else values
        while self.values.size > _KEPT and len(self.steps) > 1:
            self.steps, self.values, self._stride = self.steps[::2], self.values[::2].copy(), 2 * self._stride

    def defects(self) -> dict[str, NDArray[np.float32]]:
        """The median |cos(x, ∇L)| of each group at the observed steps."""
        return dict(zip(self.groups, self.values[:, _PAIRS.index(("defect", "median"))].T, strict=True))


def _or_infinite(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), values, np.inf).astype(np.float32)


def _median(values: Numbers) -> Numbers:
    """Over the first dimension, of the finite numbers alone; NaN if there is none."""
    return np.ma.filled(np.ma.median(np.ma.masked_invalid(values), axis=0), np.nan)


def _ratio(one: Any, other: Any) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(one, other)


class _Run:
    """A history, its groups in the order of run.json, with what run.json says of them; masks are over groups."""

    def __init__(self, history: History, about: Mapping[str, Any], labels: dict[str, str], alerts: list[Alert]) -> None:
        self.about, self.alerts, self.steps = about, alerts, history.steps
        self.entries = about["groups"]
        self.groups = [entry["name"] for entry in self.entries]
        never = np.full((*history.values.shape[:2], 1), np.nan)  # of groups that took no step
        places = [history.groups.index(name) if name in history.groups else -1 for name in self.groups]
        self._values = np.concatenate([history.values, never], axis=2)[:, :, places]
        owner = {name: settings for settings in about["optimizer"]["groups"] for name in settings["params"]}
        self.settings = [owner.get(entry["names"][0], {}) for entry in self.entries]
        # Their radius is fixed, and their rate is an angle or proportional to one.
        fixed = about["optimizer"]["name"].endswith(("AdamG", "AdaGradG"))
        of_rows = (settings if settings.get("rows") is not None else {} for settings in self.settings)
        self.turned = np.array([bool(settings.get("direction") or (settings and fixed)) for settings in of_rows])
        refuted = {alert.group for alert in alerts if "not invariant" in alert.text}  # by the gradient
        self.invariant = np.array([labels[n] == "invariant" and n not in refuted for n in self.groups], dtype=bool)
        self.layers = np.isin(self.groups, list(records.layers(about)))
        later = 2 * self.steps >= self.steps[0] + self.steps[-1]
        self.count = min(max(_FEWEST_STEPS, len(self.steps) // 10), int(later.sum()))
        self.end = slice(-self.count, None)  # the last observed steps, which a verdict is about
        self.angle, self.rate = self.now("angle"), self.now("lr", "mean")
        halves = np.array([entry.get("dtype") in ("bfloat16", "float16") for entry in self.entries], dtype=bool)
        # An optimizer that accumulates inside `step` pauses, perhaps at all observed steps of the end.
        angles = np.nan_to_num(self.get("angle"), posinf=0.0)
        moves, numbers = angles > _STILL, np.arange(1, len(angles) + 1)[:, None]
        pauses = (moves.sum(axis=0) < _STEADY * (moves * numbers).max(axis=0)) & (self.angle <= _STILL) & ~halves
        now = angles[self.end].mean(axis=0)
        self.angle = np.where(pauses, np.where(now > 0, now, angles.mean(axis=0)), self.angle)
        rates = self.get("lr", "mean")
        self.rates = np.where(np.isfinite(rates), rates, -1.0)  # −1 where no rate is known
        radius, gradient = self.get("radius", "max"), self.get("gradient_norm", "max")
        self.not_finite = np.isinf(radius) | np.isinf(gradient)
        measured, pulls = ~np.isnan(gradient[self.end]), gradient[self.end] > 0
        self.dead = self.layers & measured.any(axis=0) & ~pulls.any(axis=0)  # a gradient of exactly 0
        # It does not turn, although it has a gradient, and it turned before or others turn.
        speed = _ratio(self.get("angle"), rates)
        turned = np.where(np.isfinite(speed), speed, 0).max(axis=0) > 100 * _ratio(self.angle, self.rate)
        # At a minimum of the loss gradients vanish, and then it is right that nothing turns.
        pulled = _median(gradient[self.end]) > 0.01 * _median(gradient)
        others = _median(self.angle[(self.angle > _STILL) & self.layers]) > 100 * self.angle
        # Most rows have no gradient: now, as those that died, or from the start, as tokens that are in no batch.
        idle = self.now("gradient_norm") == 0
        unused = idle & (_median(self.get("gradient_norm")[: self.count]) == 0)
        turns = np.array([entry["size"] > 1 for entry in self.entries])  # a number has only a sign
        self.still = turns & (self.angle <= _STILL) & ((turned & pulled) | others) & ~self.dead & ~idle
        self.moving = (self.angle > 0) & ~(self.dead | self.still | unused | np.isinf(radius[self.end]).any(axis=0))
        # What rounding leaves of a step may be nothing, also of a bias or a gain. In float32 the state tells the step.
        single = np.array([entry.get("dtype") == "float32" for entry in self.entries], dtype=bool) & ~self.still
        lost = single & (np.fmax.reduce(self.get("update"), axis=0) < _LOST) | halves & (self.angle == 0)
        self.rounded = lost & (self.rate > 0) & (self.now("gradient_norm", "max") > 0) & ~idle

    @property
    def median_angle(self) -> float:
        """Of the layers that turn; of all groups that do if no layer does."""
        layers = self.layers & self.moving
        return float(_median(self.angle[layers if layers.any() else self.moving]))

    @property
    def pull(self) -> Numbers:
        """(steps, groups): the share of a radius that decay takes per step in equilibrium, θ*²/2 · (1+β)/(1−β)."""
        betas = [settings.get("betas") or [settings.get("momentum") or 0.0] for settings in self.settings]
        moved = ["b" in str(settings.get("without") or "") for settings in self.settings]  # with the row
        beta = np.where(moved, 0.0, [float(first) for first, *_ in betas])
        return self.get("equilibrium_angle") ** 2 / 2 * (1 + beta) / (1 - beta)

    def get(self, quantity: str, statistic: str = "median") -> Numbers:
        """(steps, groups)."""
        return self._values[:, _PAIRS.index((quantity, statistic))].astype(np.float64)

    def now(self, quantity: str, statistic: str = "median") -> Numbers:
        """(groups,): the median over the end."""
        return _median(self.get(quantity, statistic)[self.end])

    def start(self, now: Mask) -> int:
        """The place of the observed step from which on a condition, true where nothing is known, holds to the end."""
        ends = np.flatnonzero(~now)
        # The end as a whole was judged, so a single step in it does not matter.
        return min(int(ends[-1]) + 1, max(0, len(self.steps) - self.count)) if len(ends) else 0

    def since(self, now: Mask) -> str:
        start = self.start(now)
        return f"since step {self.steps[start]:,}" if start else "since the first observed step"

    def names(self, chosen: Mask) -> str:
        """The first of these groups, and how many more there are."""
        return records.listed([self.groups[g] for g in np.flatnonzero(chosen)], 1)

    def first(self, bad: Mask) -> int:
        """The place of the first observed step at which a condition holds in any group."""
        return int(bad.any(axis=1).argmax())

    def say(self, key: str, chosen: Any = None, by: Any = None, among: Any = None, **of: Any) -> Iterator[Sentence]:
        """The sentence of words.toml about the chosen groups, if there are any, out of those `among` which they are.

        It names the one with the largest number `by`, and says numbers of it, or since when a condition holds for it.
        """
        groups = np.flatnonzero(() if chosen is None else chosen)
        groups = groups if by is None else groups[np.argsort(-by[groups], kind="stable")]
        if chosen is not None and not len(groups):
            return
        names, number = [self.groups[g] for g in groups], len(groups) if among is None else among.sum()
        known: dict[str, Any] = {"group": "".join(names[:1]), "names": records.listed(names), "count": len(groups)}
        known |= {"more": f" (and of {_count(len(groups) - 1, 'more layer')})" if len(groups) > 1 else ""}
        known |= {"all": number, "s": "" if number == 1 else "s"}
        known |= {word: word if len(groups) == 1 else many for word, many in _SEVERAL.items()}
        for name, value in of.items():
            of_first: Any = value.T[groups[0]] if isinstance(value, np.ndarray) else value
            known[name] = self.since(of_first) if isinstance(of_first, np.ndarray) else of_first
        words = {"quantity": "", "severity": "note", **records.WORDS["verdict"][key]}
        text = words["text"].format_map({name: _shown(value) for name, value in known.items()})
        severity = of.get("severity", words["severity"])
        yield Sentence(words["kind"], text, known["group"], words["quantity"], severity)


# The sentences, whose texts are in words.toml, one function for each kind


def _not_finite(run: _Run) -> Iterator[Sentence]:
    """NaN or infinite numbers, unless an optimizer that froze is said to have done so after them."""
    weights, gradients = (np.isinf(run.get(quantity, "max")) for quantity in ("radius", "gradient_norm"))
    ended = np.isin(run.groups, run.about.get("not_finite", ())) & (run.get("radius", "max") >= 0).any(axis=0)
    lost, first = weights[run.end].any(axis=0) | ended, run.first(run.not_finite)
    if lost.any():
        steps = [*run.steps.tolist(), (run.about.get("last_step") or 0) + 1]  # after which the weights were tested
        at = run.first(np.vstack([weights, ended])[:, lost])
        known = at == 0 or steps[at] == steps[at - 1] + 1
        step = f"step {steps[at]:,}" if known else f"a step between {steps[at - 1] + 1:,} and {steps[at]:,}"
        what = " and ".join(name for name, bad in (("weights", weights), ("gradient", gradients)) if bad[first].any())
        seen = f"; it was first seen in the {what} of {run.names(run.not_finite[first])} at step {steps[first]:,}"
        yield from run.say("weights", lost, step=step, seen=seen if what and (known or first < at) else "")
    elif run.not_finite.any() and not any("after NaN" in sentence.text for sentence in _frozen(run)):
        times, where = _count(int(run.not_finite.any(axis=1).sum()), "observed step"), run.names(run.not_finite[first])
        given = {"severity": "bad" if run.not_finite[-1].any() else "warning", "first": run.steps[first]}
        yield from run.say("gradients", run.not_finite.any(axis=0), times=times, where=where, **given)


def _frozen(run: _Run) -> Iterator[Sentence]:
    """All weights, or some layers, no longer turn, or in half precision their steps are smaller than the rounding."""
    angles, rated = run.get("angle"), run.rate != 0
    frozen, turning = run.still & rated & ~run.rounded, (run.angle >= 0) & ~run.dead & rated
    if len(run.steps) >= _FEWEST_STEPS and frozen.any() and frozen.sum() >= 0.9 * turning.sum():
        start, first = run.start(~(_median(angles[:, frozen].T) > _STILL)), run.first(run.not_finite)
        cause = f"at step {run.steps[start]:,}" if start else "from the first step on"
        if run.not_finite.any() and 0 <= start - first <= 2:
            cause = f"after NaN or infinite gradients at step {run.steps[first]:,}"
        yield from run.say("optimizer", frozen, among=run.layers | True, cause=cause, angle=run.angle[frozen].max())
    else:
        why = np.where(rated, "updates are smaller than the rounding of the weights", "rate is 0")
        given = {"median": run.median_angle, "since": ~(angles > _STILL), "why": why}
        yield from run.say("frozen", run.still & run.layers & ~run.rounded, among=run.layers, **given)
    dtype = next((entry["dtype"] for entry, out in zip(run.entries, run.rounded, strict=True) if out), "")
    yield from run.say("rounded", run.rounded, among=run.layers | True, dtype=dtype)


def _dead(run: _Run) -> Iterator[Sentence]:
    """Layers and rows whose gradient is exactly 0, and layers without one."""
    gradient = run.get("gradient_norm", "max")
    every = run.dead.any() and not (gradient[run.end] > 0).any()  # also of biases and gains
    yield from run.say("loss" if every else "dead", run.dead, among=run.layers, since=~(gradient > 0))
    left = np.isnan(run.get("radius", "max"))
    gone = run.layers & left[run.end].all(axis=0)
    severity = "warning" if left[run.end].all() else "note"
    yield from run.say("left", gone, among=run.layers, since=left, severity=severity)
    smallest = run.get("gradient_norm", "min")
    zero, end = ~(smallest > 0), smallest[run.end]
    idle = (end == 0).any(axis=0) & ~(end > 0).any(axis=0) & run.layers & ~run.dead
    # Entries that few batches use, such as rare tokens, have no gradient at many steps before, too.
    rare = np.array([zero[: run.start(column) or None, g].mean() >= 0.1 for g, column in enumerate(zero.T)])
    rows = np.where(run.now("gradient_norm", "q10") == 0, "At least a tenth of the rows", "At least one row")
    yield from run.say("died", idle & ~rare, rows=rows, since=zero)
    yield from run.say("unused", idle & rare, rows=rows, last=min(run.count, len(run.steps)))


def _collapsed(run: _Run) -> Iterator[Sentence]:
    """Rows that have lost their radius, or are about to."""
    share, radius, shares = run.now("collapsed", "mean"), run.now("radius"), run.get("collapsed", "mean")
    # Rows that are 0 from the start, such as the one of a padding token, have never had a direction.
    born = np.isclose(share, shares[0]) & (run.now("gradient_norm", "min") == 0)
    given = {"percent": 100 * share, "since": ~(shares <= 0)}
    yield from run.say("collapsed", run.layers & (share > 0) & ~born, share, **given)
    yield from run.say("zero", run.layers & (share > 0) & born, share, **given)
    fell = _ratio(_median(run.get("radius")[: run.count]), radius)
    falling = run.layers & (fell > _COLLAPSING) & np.isfinite(fell) & ~(share > 0)
    yield from run.say("collapsing", falling, fell, run.layers, fell=fell, radius=radius)


def _pace(run: _Run) -> Iterator[Sentence]:
    """Layers that turn much faster or slower than the median layer under the same optimizer."""
    chosen = run.layers & run.moving & ~run.turned  # what is turned by a given angle is meant to
    owners = [frozenset(settings) - {"rows", "joint"} for settings in run.settings]  # each optimizer has its own
    for owner in dict.fromkeys(owners[g] for g in np.flatnonzero(chosen)):
        among = chosen & [each == owner for each in owners]
        usual, rate = float(_median(run.angle[among])), float(_median(run.rate[among]))
        ratio = np.where(among, run.angle / usual, 1.0)
        course = _ratio(run.get("angle").T, _median(np.where(among, run.get("angle"), np.nan).T))
        for key, factor, courses in (("fast", ratio, course), ("slow", 1 / ratio, _ratio(1.0, course))):
            out, parts = np.flatnonzero(factor > _APART), []
            for g in out[np.argsort(-factor[out])][:3]:
                rates = run.rate[g] / rate if rate > 0 else 1.0
                own = f", at {_shown(rates)} × the usual rate" if not 0.67 < rates < 1.5 else ""
                padded = np.pad(courses[g], _FEWEST_STEPS // 2, mode="edge")
                smooth = _median(np.lib.stride_tricks.sliding_window_view(padded, _FEWEST_STEPS).T)
                since = run.since(~(smooth <= _APART))
                parts.append(f"{run.groups[g]} {_shown(factor[g])} × ({_shown(run.angle[g])} rad, {since}{own})")
            parts += [f"and {len(out) - 3} more"] if len(out) > 3 else []
            given = {"apart": _APART, "median": usual, "each": ", ".join(parts)}
            given["severity"] = "warning" if factor.max() > _FAR_APART else "note"
            given["same"] = " under the same optimizer" if (chosen != among).any() else ""
            yield from run.say(key, factor > _APART, factor, among, **given)


def _rate(run: _Run) -> Iterator[Sentence]:
    """The rate fell, but the angle rose."""
    high = run.rates >= 0.9 * run.rates.max(axis=0)
    peak, before = (_median(np.where(high, values, np.nan)) for values in (run.rates, run.get("angle")))
    chosen = run.layers & run.moving & (before > 0)
    fell, rose = _ratio(peak, run.rate), _ratio(run.angle, before)
    out = chosen & (run.rate > 0) & (fell > _FELL) & (rose > _ROSE)
    last = run.steps[len(high) - 1 - high[::-1].argmax(axis=0)]  # at the high rate
    yield from run.say("rate", out, rose, chosen, step=last, fell=fell, rose=rose, before=before, angle=run.angle)


def _equilibrium(run: _Run) -> Iterator[Sentence]:
    """The angle is far above or below its equilibrium."""
    expected = run.now("equilibrium_angle")
    ratio = _ratio(run.angle, expected)
    known = run.invariant & run.moving & np.isfinite(ratio) & (ratio > 0)
    pull = np.nan_to_num(run.pull, posinf=0.0)
    # The observed time in units of the time that an equilibrium takes: the sum of ηλ.
    elapsed = np.diff(run.steps) @ ((pull[1:] + pull[:-1]) / 2)
    falls = _ratio(run.rates.max(axis=0), run.rate) > _FELL
    early = " (weight decay has not had the time to lead there)"
    why = np.where(falls, " (radii follow a falling rate slowly)", early)
    for word, factor in (("above", ratio), ("below", 1 / np.where(known, ratio, 1.0))):
        out = known & (factor > _OUT)
        given = {"word": word, "median": float(_median(factor[out])), "expected": expected, "why": why}
        given |= {"why": "", "severity": "warning"} if (elapsed[out & ~falls] > _TIMES).any() else {}
        yield from run.say("equilibrium", out, factor, known, angle=run.angle, **given)


def _of_alerts(run: _Run) -> Iterator[Sentence]:
    """Alerts that no other sentence is about, one for each cause."""
    for cause in causes(alert for alert in run.alerts if alert.kind in _OF_ALERTS):
        text = f"{cause.text[:1].upper()}{cause.text[1:]}."
        yield Sentence(cause.kind, text, cause.groups[0], _OF_ALERTS[cause.kind], "warning")


def _balance(run: _Run) -> Iterator[Sentence]:
    """Steps until weight decay is in balance with growth, at the present rate."""
    radius, expected = run.now("radius"), run.now("equilibrium_radius")
    ratio, turns = _ratio(radius, expected), _ratio(run.angle, run.now("equilibrium_angle"))
    known = run.invariant & ~run.dead & ~run.still & np.isfinite(ratio) & (ratio > 0)
    # The angle in equilibrium is known better than the radius, which depends on how noisy the gradients are. A row that
    # is too short turns too far.
    short = (ratio < 1 / _BALANCED) & (turns > _BALANCED)
    long = (ratio > _BALANCED) & ((turns < 1 / _BALANCED) | ~(turns > 0))
    ratio = np.where(known, ratio, 1.0)
    # r^p approaches its equilibrium exponentially, with p times the pull: p = 4 for SGD, whose growth is ∝ 1/r³.
    power = 4 if "SGD" in run.about["optimizer"]["name"] else 2
    edge = np.where(ratio > 1, _BALANCED, 1 / _BALANCED)
    distance = np.abs(ratio**power - 1) / np.abs(edge**power - 1)
    pull = np.nan_to_num(_median(run.pull[run.end]))
    needed = np.maximum(1.0, _ratio(np.log(np.maximum(distance, 1.0)), power * pull))
    needed[pull == 0] = math.inf
    away = known & (short | long)
    if away.any():
        g = int(np.where(away, needed, -math.inf).argmax())
        left = _steps_left(run, g)
        key = "never at all" if math.isinf(needed[g]) else "balance" if needed[g] <= left / 2 else "never"
        rate = f"the rate reaches 0 in about {_about(left)} steps" if left >= 1 else "the rate is almost 0"
        given = {"radius": radius, "expected": expected, "rate": rate, "needed": _about(needed[g])}
        yield from run.say(key, away, needed, known, **given)


def _steps_left(run: _Run, g: int) -> float:
    """Steps until the rate is 0, if it falls smoothly at the end of the run and goes on in a line; else infinity."""
    rates = run.get("lr", "mean")[run.end, g]
    steps, rates = run.steps[run.end][np.isfinite(rates)], rates[np.isfinite(rates)]
    if len(rates) and rates[-1] == 0:
        return 0.0
    if len(rates) < 3 or np.mean(np.diff(rates) < 0) < 0.8:
        return math.inf
    return float(rates[-1] * (steps[-1] - steps[0]) / (rates[0] - rates[-1]))


def _share(run: _Run) -> Iterator[Sentence]:
    """The share of the weights that is invariant."""
    sizes = np.array([entry["rows"] * entry["size"] for entry in run.entries])
    part, whole, turned = sizes[run.invariant].sum(), sizes.sum(), run.turned[run.invariant].all()
    if part:
        decays = any(run.settings[g].get("weight_decay") for g in np.flatnonzero(run.invariant))
        knob = "weight decay does not regularize them"
        if np.isfinite(run.get("equilibrium_angle")[:, run.invariant]).any():
            knob += "; once in balance it sets their angle per step"
        knob = knob if decays else "weight decay, which is 0, would set their angle per step and not regularize them"
        knob = "their rate sets their angle per step, and weight decay has no effect on them" if turned else knob
        yield from run.say("share", percent=f"{100 * part / whole:.3g}", part=part, whole=whole, knob=knob)


def _healthy(run: _Run) -> Iterator[Sentence]:
    """The angles of the layers and the cost of the watch."""
    among, share = run.layers & run.moving, run.about["cost"].get("share")
    took = "the watch's cost is not known yet"
    took = f"the watch took {time_taken(share)}" if share else took
    ends = [np.where(among, run.angle, math.inf).argmin(), np.where(among, run.angle, -math.inf).argmax()]
    least, most = (f"{_shown(run.angle[g])} ({run.groups[g]})" for g in ends)
    count = int(among.sum())
    median = f"the {'median ' * (count > 1)}layer turns {_shown(run.median_angle)} rad per step" if count else ""
    pace = f"{median}, the {count} layers from {least} to {most}" if count > 1 else median or "no layer turns"
    seen, last = int(run.steps[-1]), run.about.get("last_step") or 0
    late = last - seen > 0.1 * (last - run.steps[0])
    step = f"{seen:,}" + (f", the last observed one of {last + 1:,} steps" if late else "")
    yield from run.say("healthy", step=step, pace=pace, took=took)


def time_taken(share: float) -> str:
    """The time that the watch took, as a share of the training's without it."""
    longer = f"{_shown(share)} × the time of the training's own steps"
    return longer if share > 1 else f"{_shown(100 * share)} % of the training's time"


def _shown(value: Any) -> str:
    """A text as it is, a whole number with all digits, other numbers with two.

    >>> _shown(1234), _shown(0.0041999), _shown(123.4), _shown(12345.0)
    ('1,234', '0.0042', '120', '12,000')
    """
    if isinstance(value, str | Integral):
        return value if isinstance(value, str) else f"{value:,}"
    return f"{value:.2g}" if abs(value) < 99.5 and value else _about(value)


def _about(value: float) -> str:
    """A large number, rounded to two digits."""
    return f"{float(f'{value:.2g}'):,.0f}" if math.isfinite(value) else "infinitely many"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"

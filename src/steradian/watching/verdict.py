"""What a run says about a training, in words: a few sentences from the table, run.json and the alerts. Without torch.

Layers are compared with each other: groups that are matrices or filters, not biases and gains. A sentence is about the
end of the run, the last tenth of the observed steps, and uses medians over these, because single steps are noisy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steradian.watching.records import STATISTICS, Alert, Block, RecordedRun, alerts_of, causes, labels, layers, listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SEVERITIES", "History", "Sentence", "judge", "verdict"]

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

SEVERITIES = ("bad", "warning", "note")
"""From the most severe one: "bad" stops or spoils the training, "warning" needs a look, "note" is for information."""
_MOST = 7  # sentences of a verdict
_FEWEST_STEPS = 5  # observed steps that the end of a run has, and below which nothing is judged
_APART = 3.0  # a layer is fast or slow if its angle differs from the median layer's by more than this factor
_OUT = 2.0  # an angle is far from its equilibrium beyond this factor; `alerts` uses the same
_TIMES = 3.0  # an equilibrium should be reached after this many times 1/(ηλ) steps
_BALANCED = 1.25  # weight decay is in balance if the radius is within this factor of its equilibrium
_STILL = 1e-7  # radians: what the rounding of float32 numbers alone may turn a row by
_FELL, _ROSE = 2.0, 1.25  # the rate fell, or the angle rose, if it did so by more than this factor
_COLLAPSING = 100.0  # a layer is collapsing if its radius fell by this factor
_KEPT = 2**22  # numbers that a history keeps: 16 MB
_OF_ALERTS = {"H1": "radial", "H2": "velocity", "defect": "defect"}
"""The quantities of alerts that no other sentence is about, by their kind."""
_PAIRS = [
    *((quantity, "median") for quantity in ("angle", "radius", "defect", "equilibrium_angle", "equilibrium_radius")),
    *(("lr", "mean"), ("collapsed", "mean"), ("radius", "max")),
    *(("gradient_norm", statistic) for statistic in ("min", "q10", "median", "max")),
]
"""Quantities and statistics that a verdict is made from."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of a verdict.

    Attributes:
        kind: "not finite", "frozen", "dead", "collapsed", "fast", "slow", "equilibrium", "rate", "balance", "share",
            "healthy", "early", "find_groups", or the kind of an alert.
        text: the sentence.
        group: the layer that it names first; "" if it is about the whole run.
        quantity: what it is about, for a link to its chart; "" if no chart shows it.
        severity: one of `SEVERITIES`.
    """

    kind: str
    text: str
    group: str = ""
    quantity: str = ""
    severity: str = "note"


def verdict(run: RecordedRun) -> list[Sentence]:
    """At most seven sentences about a recorded run, the most severe first.

    >>> from steradian.watching.records import read_run
    >>> [sentence.text for sentence in verdict(read_run("runs/a"))]  # doctest: +SKIP
    ['Nothing is wrong up to step 1,999: …']
    """
    return judge(History.of_table(run.table), run.about, labels(run), alerts_of(run.alerts))


def judge(
    history: "History", about: Mapping[str, Any], labels: Mapping[str, str], alerts: Sequence[Alert]
) -> list[Sentence]:
    """The verdict from its parts, without pandas.

    Args:
        history: the numbers.
        about: the contents of run.json.
        labels: of each group: "invariant", "not invariant" or "untested".
        alerts: raised in the run.
    """
    if not len(history.steps):
        return []
    run = _Run(history, about, labels, alerts)
    if len(run.steps) < _FEWEST_STEPS:
        steps = "step was" if len(run.steps) == 1 else "steps were"
        early = f"Only {len(run.steps)} {steps} observed: too early to judge the layers."
        return [*_not_finite(run), Sentence("early", early)]
    kinds = (_not_finite, _frozen, _dead, _collapsed, _pace, _rate, _equilibrium, _of_alerts, _balance, _share)
    found = [sentence for kind in kinds for sentence in kind(run)]
    found.sort(key=lambda sentence: SEVERITIES.index(sentence.severity))
    if all(sentence.severity == "note" for sentence in found):
        found.insert(0, _healthy(run))
    if not run.invariant.any():
        text = (
            "No row is proved invariant, so nothing is said about the balance of weight decay or the share of "
            "invariant weights: watch(optimizer, find_groups(model, inputs)) proves rows."
        )
        if all(labels[name] == "not invariant" for name in np.array(run.groups)[run.layers]):
            text = "No layer is invariant: weight decay regularizes as usual, and there is no balance to speak of."
        found = [*found[: _MOST - 1], Sentence("find_groups", text)]
    return found[:_MOST]


# The numbers


@dataclass(eq=False)
class History:
    """The recorded numbers that a verdict needs.

    Attributes:
        groups: their names.
        steps: observed steps.
        values: (steps, `_PAIRS`, groups); NaN for a number that was not recorded, infinity for one that is not finite.
    """

    groups: Sequence[str] = ()
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
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
    found: Numbers = np.ma.filled(np.ma.median(np.ma.masked_invalid(values), axis=0), np.nan)
    return found


def _ratio(one: Any, other: Any) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(one, other)


class _Run:
    """A history, its groups in the order of run.json, with what run.json says of them.

    Attributes:
        end: the last observed steps, which a verdict is about.
        layers: (groups,), whether a group is a matrix or filters.
        invariant: whether a group is invariant and its gradient does not contradict it.
        dead: its gradient is exactly 0.
        still: it does not turn, although it has a gradient and others turn, or it turned before.
        moving: it is neither, and its weights are finite.
    """

    def __init__(
        self, history: History, about: Mapping[str, Any], labels: Mapping[str, str], alerts: Sequence[Alert]
    ) -> None:
        self.about, self.alerts, self.steps = about, alerts, history.steps
        self.entries = [entry for entry in about["groups"] if entry["name"] in history.groups]
        self.groups = [entry["name"] for entry in self.entries]
        self._values = history.values[:, :, [history.groups.index(name) for name in self.groups]]
        owner = {name: settings for settings in about["optimizer"]["groups"] for name in settings["params"]}
        self.settings = [owner.get(entry["names"][0], {}) for entry in self.entries]
        refuted = {alert.group for alert in alerts if "not invariant" in alert.text}
        self.invariant = np.array([labels[n] == "invariant" and n not in refuted for n in self.groups], dtype=bool)
        self.layers = np.isin(self.groups, list(layers(about)))
        self.count = max(_FEWEST_STEPS, len(self.steps) // 10)
        self.end = slice(-self.count, None)
        self.angle, self.rate = self.now("angle"), self.now("lr", "mean")
        radius, gradient = self.get("radius", "max"), self.get("gradient_norm", "max")
        self.not_finite = np.isinf(radius) | np.isinf(gradient)
        measured, pulls = ~np.isnan(gradient[self.end]), gradient[self.end] > 0
        self.dead = self.layers & measured.any(axis=0) & ~pulls.any(axis=0)
        speed = _ratio(self.get("angle"), self.get("lr", "mean"))
        turned = np.where(np.isfinite(speed), speed, 0).max(axis=0) > 100 * _ratio(self.angle, self.rate)
        # At a minimum of the loss gradients vanish, and then it is right that nothing turns.
        pulled = _median(gradient[self.end]) > 0.01 * _median(gradient)
        others = _median(self.angle[(self.angle > _STILL) & self.layers]) > 100 * self.angle
        unused = (self.get("gradient_norm")[self.end] == 0).all(axis=0)  # most rows, such as tokens in no batch
        self.still = (self.angle <= _STILL) & ((turned & pulled) | others) & ~self.dead & ~unused
        self.moving = (self.angle > 0) & ~self.dead & ~self.still & ~np.isinf(radius[self.end]).any(axis=0)

    @property
    def median_angle(self) -> float:
        """Of the layers that turn."""
        return float(_median(self.angle[self.layers & self.moving]))

    @property
    def pull(self) -> Numbers:
        """(steps, groups): the share of a radius that decay takes per step in equilibrium, θ*²/2 · (1+β)/(1−β).

        It is ηλ for AdamW, and half of the growth of r² per step; see `balance` for θ* and for the role of β.
        """
        gains = []
        for settings in self.settings:
            betas = settings.get("betas") or (settings.get("momentum") or 0.0,)
            beta = 0.0 if "b" in str(settings.get("without") or "") else float(betas[0])
            gains.append((1 + beta) / (1 - beta))
        return self.get("equilibrium_angle") ** 2 / 2 * np.array(gains)

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

    def first(self, bad: Mask) -> int:
        """The place of the first observed step at which a condition holds in any group."""
        return int(bad.any(axis=1).argmax())

    def names(self, chosen: NDArray[Any], most: int = 3) -> str:
        """Of groups, given by a mask or by their places."""
        return listed(np.array(self.groups)[chosen].tolist(), most)


# The sentences, one function for each kind


def _not_finite(run: _Run) -> Iterator[Sentence]:
    """NaN or infinite numbers, unless an optimizer that froze is said to have done so after them."""
    if not run.not_finite.any():
        return
    first = run.first(run.not_finite)
    weights, gradients = (np.isinf(run.get(quantity, "max")) for quantity in ("radius", "gradient_norm"))
    lost = np.flatnonzero(weights[run.end].any(axis=0))
    if len(lost):
        what, where = ("gradient", gradients[first]) if gradients[first].any() else ("weights", weights[first])
        text = (
            f"The weights of {_count(len(lost), 'group')} are NaN or infinite from step "
            f"{run.steps[run.first(weights[:, lost])]:,} on, and the training cannot recover from this; it was first "
            f"seen in the {what} of {run.names(where, 1)} at step {run.steps[first]:,}."
        )
        yield Sentence("not finite", text, run.groups[lost[0]], "radius", "bad")
    elif not any("after NaN" in sentence.text for sentence in _frozen(run)):
        groups = np.flatnonzero(run.not_finite.any(axis=0))
        what = "gradient of 1 group was" if len(groups) == 1 else f"gradients of {len(groups):,} groups were"
        text = (
            f"The {what} NaN or infinite at {_count(int(run.not_finite.any(axis=1).sum()), 'observed step')}, first at "
            f"step {run.steps[first]:,} in {run.names(run.not_finite[first], 1)}; the weights are finite."
        )
        severity = "bad" if run.not_finite[-1].any() else "warning"
        yield Sentence("not finite", text, run.groups[groups[0]], "gradient_norm", severity)


def _frozen(run: _Run) -> Iterator[Sentence]:
    """All weights, or some layers, no longer turn."""
    angles, rated = run.get("angle"), run.rate != 0
    frozen, layers = np.flatnonzero(run.still & rated), np.flatnonzero(run.still & run.layers)
    turning = (run.angle >= 0) & ~run.dead & rated
    if len(run.steps) >= _FEWEST_STEPS and len(frozen) and len(frozen) >= 0.9 * turning.sum():
        start, first = run.start(~(_median(angles[:, frozen].T) > _STILL)), run.first(run.not_finite)
        cause = f"at step {run.steps[start]:,}" if start else "from the first step on"
        if run.not_finite.any() and 0 <= start - first <= 2:
            cause = f"after NaN or infinite gradients at step {run.steps[first]:,}"
        text = (
            f"The optimizer froze {cause}: {len(frozen)} of {_count(len(run.groups), 'group')} no longer turn (at "
            f"most {_n(run.angle[frozen].max())} rad per step), although they have a rate and a gradient. A NaN in its "
            "state does this."
        )
        yield Sentence("frozen", text, run.groups[frozen[0]], "angle", "bad")
    elif len(layers):
        its = "its" if len(layers) == 1 else "their"
        why = "updates are smaller than the rounding of the weights" if rated[layers[0]] else "rate is 0"
        text = (
            f"{_of(layers, run.layers, 'layer', 'is')} frozen while the median layer turns "
            f"{_n(run.median_angle)} rad per step: {run.names(layers)}, "
            f"{run.since(~(angles[:, layers[0]] > _STILL))}; {its} {why}."
        )
        yield Sentence("frozen", text, run.groups[layers[0]], "angle", "warning")


def _dead(run: _Run) -> Iterator[Sentence]:
    """Layers and rows whose gradient is exactly 0."""
    dead = np.flatnonzero(run.dead)
    if len(dead):
        since = run.since(~(run.get("gradient_norm", "max")[:, dead[0]] > 0))
        who = _of(dead, run.layers, "layer", "is")
        text = f"{who} dead, with a gradient of exactly 0 {since}: {run.names(dead)}."
        yield Sentence("dead", text, run.groups[dead[0]], "gradient_norm", "bad")
    smallest = run.get("gradient_norm", "min")
    end = smallest[run.end]
    idle = (end == 0).any(axis=0) & ~(end > 0).any(axis=0) & run.layers & ~run.dead
    died: list[int] = []
    unused: list[int] = []
    for g in np.flatnonzero(idle).tolist():
        zero = ~(smallest[:, g] > 0)
        # Entries that few batches use, such as rare tokens, have no gradient at many steps before, too.
        (died if zero[: run.start(zero) or None].mean() < 0.1 else unused).append(g)
    last = f"at each of the last {min(run.count, len(run.steps))} observed steps"
    for groups in filter(None, (died, unused)):
        g = groups[0]
        many = run.now("gradient_norm", "q10")[g] == 0
        whose = f"{'At least a tenth of the rows' if many else 'At least one row'} of {run.groups[g]}"
        whose += f" (and of {_count(len(groups) - 1, 'more layer')})" if len(groups) > 1 else ""
        text = f"{whose} died: the gradient is exactly 0 {run.since(~(smallest[:, g] > 0))}."
        if groups is unused:
            text = f"{whose} had no gradient {last}: dead units, or entries that no batch used, such as rare tokens."
        yield Sentence("dead", text, run.groups[g], "gradient_norm", "warning" if groups is died else "note")


def _collapsed(run: _Run) -> Iterator[Sentence]:
    """Rows that have lost their radius, or are about to."""
    share, radius = run.now("collapsed", "mean"), run.now("radius")
    gone = np.flatnonzero(run.layers & (share > 0))
    if len(gone):
        g = gone[np.argmax(share[gone])]
        text = (
            f"Rows of {_count(len(gone), 'layer')} have collapsed: {100 * share[g]:.2g} % of {run.groups[g]} have had "
            f"a radius too small for a direction {run.since(~(run.get('collapsed', 'mean')[:, g] <= 0))}."
        )
        yield Sentence("collapsed", text, run.groups[g], "collapsed", "warning")
    fell = _ratio(_median(run.get("radius")[: run.count]), radius)
    falling = np.flatnonzero(run.layers & (fell > _COLLAPSING) & np.isfinite(fell) & ~(share > 0))
    if len(falling):
        g = falling[np.argmax(fell[falling])]
        text = (
            f"{_of(falling, run.layers, 'layer', 'is')} collapsing: the radius of {run.groups[g]} fell "
            f"{_n(fell[g])} × since the first observed steps, to {_n(radius[g])}."
        )
        yield Sentence("collapsed", text, run.groups[g], "radius", "warning")


def _pace(run: _Run) -> Iterator[Sentence]:
    """Layers that turn much faster or slower than the median layer."""
    chosen = run.layers & run.moving
    if not chosen.any():
        return
    usual = float(_median(run.rate[chosen]))
    course = _ratio(run.get("angle").T, _median(np.where(chosen, run.get("angle"), np.nan).T))
    ratio = np.where(chosen, run.angle / run.median_angle, 1.0)
    for kind, word, sign in (("fast", "faster", 1), ("slow", "slower", -1)):
        factor = ratio**sign
        out = np.flatnonzero(factor > _APART)
        out = out[np.argsort(-factor[out])]
        parts = []
        for g in out[:3]:
            rates = run.rate[g] / usual if usual > 0 else 1.0
            own = f", at {_n(rates)} × the usual rate" if not 0.67 < rates < 1.5 else ""
            since = run.since(~(_smooth(course[g] ** sign) <= _APART))
            parts.append(f"{run.groups[g]} {_n(factor[g])} × ({_n(run.angle[g])} rad, {since}{own})")
        if parts:
            more = f", and {len(out) - 3} more" if len(out) > 3 else ""
            text = (
                f"{_of(out, chosen, 'layer', 'turns')} more than {_APART:g} × {word} than the median layer "
                f"({_n(run.median_angle)} rad per step): {', '.join(parts)}{more}."
            )
            yield Sentence(kind, text, run.groups[out[0]], "angle", "warning")


def _smooth(values: Numbers) -> Numbers:
    """The median over each step and its neighbours."""
    padded = np.pad(values, _FEWEST_STEPS // 2, mode="edge")
    return _median(np.lib.stride_tricks.sliding_window_view(padded, _FEWEST_STEPS).T)


def _rate(run: _Run) -> Iterator[Sentence]:
    """The rate fell, but the angle rose."""
    rates = run.get("lr", "mean")
    finite = np.where(np.isfinite(rates), rates, -1.0)
    high = finite >= 0.9 * finite.max(axis=0)
    peak, before = (_median(np.where(high, values, np.nan)) for values in (rates, run.get("angle")))
    chosen = run.layers & run.moving & (before > 0)
    fell, rose = _ratio(peak, run.rate), _ratio(run.angle, before)
    out = np.flatnonzero(chosen & (run.rate > 0) & (fell > _FELL) & (rose > _ROSE))
    if len(out):
        g = out[np.argmax(rose[out])]
        text = (
            f"The rate fell {_n(fell[g])} × since step {run.steps[high[:, g]][-1]:,}, but "
            f"{_of(out, chosen, 'layer', 'turns')} further per step than before, {run.groups[g]} {_n(rose[g])} × "
            f"({_n(before[g])} to {_n(run.angle[g])} rad)."
        )
        yield Sentence("rate", text, run.groups[g], "angle", "warning")


def _equilibrium(run: _Run) -> Iterator[Sentence]:
    """The angle is far above or below its equilibrium."""
    expected = run.now("equilibrium_angle")
    ratio = _ratio(run.angle, expected)
    known = run.invariant & run.moving & np.isfinite(ratio) & (ratio > 0)
    pull = np.nan_to_num(run.pull, posinf=0.0)
    # The observed time in units of the time that an equilibrium takes: the sum of ηλ.
    elapsed = np.diff(run.steps) @ ((pull[1:] + pull[:-1]) / 2)
    for word, factor in (("above", ratio), ("below", 1 / np.where(known, ratio, 1.0))):
        out = np.flatnonzero(known & (factor > _OUT))
        if len(out):
            g = out[np.argmax(factor[out])]
            late = (elapsed[out] > _TIMES).any()
            why = "" if late else " (weight decay has not had the time to lead there)"
            text = (
                f"{_of(out, known, 'invariant layer', 'turns')} far {word} {'its' if len(out) == 1 else 'their'} "
                f"own equilibrium, by {_n(float(np.median(factor[out])))} × in the median and most in {run.groups[g]}, "
                f"{_n(run.angle[g])} instead of {_n(expected[g])} rad per step{why}."
            )
            yield Sentence("equilibrium", text, run.groups[g], "equilibrium_angle", "warning" if late else "note")


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
    away = np.flatnonzero(known & (short | long))
    if not len(away):
        return
    # r^p approaches its equilibrium exponentially, with p times the pull: p = 4 for SGD, whose growth is ∝ 1/r³.
    power = 4 if "SGD" in run.about["optimizer"]["name"] else 2
    edge = np.where(ratio > 1, _BALANCED, 1 / _BALANCED)
    distance = np.abs(ratio**power - 1) / np.abs(edge**power - 1)
    pull = np.nan_to_num(_median(run.pull[run.end]))
    needed = np.maximum(1.0, _ratio(np.log(np.maximum(distance, 1.0)), power * pull))
    needed[pull == 0] = math.inf
    g = away[np.argmax(needed[away])]
    left = _steps_left(run, g)
    place = f"{run.groups[g]} (radius {_n(radius[g])}, in balance {_n(expected[g])})"
    text = f"Weight decay is not in balance yet in {len(away):,} of {_count(int(known.sum()), 'invariant layer')}"
    if not math.isfinite(needed[g]) or needed[g] > left / 2:
        rate = f"the rate reaches 0 in about {_about(left)} steps" if left >= 1 else "the rate is almost 0"
        need = f", and {place} needs about {_about(needed[g])} at this rate" if math.isfinite(needed[g]) else ""
        text += f", and never will be under this schedule: {rate}{need}."
    else:
        text += f": {place} needs about {_about(needed[g])} more steps at this rate."
    yield Sentence("balance", text, run.groups[g], "equilibrium_radius")


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
    sizes = np.array([float(entry["rows"] * entry["size"]) for entry in run.entries])
    part, whole = sizes[run.invariant].sum(), sizes.sum()
    if part:
        decays = any(run.settings[g].get("weight_decay") for g in np.flatnonzero(run.invariant))
        knob = "weight decay sets their angle per step and does not regularize"
        knob = knob if decays else "weight decay, which is 0, would set their angle per step and not regularize"
        share = f"{100 * part / whole:.3g} % of the watched weights ({part:,.0f} of {whole:,.0f})"
        yield Sentence("share", f"{share} are invariant: {knob}.", "", "equilibrium_radius")


def _healthy(run: _Run) -> Sentence:
    chosen, share = np.flatnonzero(run.layers & run.moving), run.about["cost"].get("share")
    took = (
        f"the watch took {_n(100 * share)} % of the training's time" if share else "the watch's cost is not known yet"
    )
    text = f"No layer turns at step {run.steps[-1]:,}, and nothing is wrong; {took}."
    if len(chosen):
        low, high = chosen[np.argmin(run.angle[chosen])], chosen[np.argmax(run.angle[chosen])]
        text = (
            f"Nothing is wrong up to step {run.steps[-1]:,}: the median layer turns {_n(run.median_angle)} rad per "
            f"step, the {_count(len(chosen), 'layer')} from {_n(run.angle[low])} ({run.groups[low]}) to "
            f"{_n(run.angle[high])} ({run.groups[high]}), and {took}."
        )
    return Sentence("healthy", text, "", "angle")


# Words


def _n(value: float) -> str:
    """A number with two digits.

    >>> _n(0.0041999), _n(123.4), _n(12345.0)
    ('0.0042', '120', '12,000')
    """
    return f"{value:.2g}" if abs(value) < 99.5 and value else _about(value)


def _about(value: float) -> str:
    """A large number, rounded to two digits."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else "infinitely many"
    return f"{round(value, 1 - math.floor(math.log10(abs(value)))):,.0f}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _of(some: NDArray[Any], all_of: Mask, word: str, verb: str) -> str:
    """Such as "1 of 5 layers turns"."""
    verb = verb if len(some) == 1 else {"is": "are", "turns": "turn"}[verb]
    return f"{len(some):,} of {_count(int(all_of.sum()), word)} {verb}"

"""What a run says about a training, in words: a few sentences from the table, run.json and the alerts. Without torch.

Layers are compared with each other: groups that are matrices or filters, not biases and gains. A sentence is about the
end of the run, the last tenth of the observed steps, and uses medians over these, because single steps are noisy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steradian.watching.records import STATISTICS, Alert, Block, RecordedRun, alerts_of, causes, labels, listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SEVERITIES", "History", "Sentence", "judge", "verdict"]

Numbers = NDArray[np.float64]

SEVERITIES = ("bad", "warning", "note")
"""From the most severe one: "bad" stops or spoils the training, "warning" needs a look, "note" is for information."""
_MOST = 7
"""Sentences of a verdict."""
_FEWEST_STEPS = 5
"""Observed steps that the end of a run has, and below which nothing is judged."""
_APART = 3.0
"""A layer turns faster or slower than others if its angle differs from the median layer's by more than this factor."""
_OUT = 2.0
"""An angle is far from its equilibrium beyond this factor; `alerts` uses the same."""
_BALANCED = 1.25
"""Weight decay is in balance if the radius is within this factor of its equilibrium."""
_TIMES = 3.0
"""An equilibrium should be reached after this many times 1/(ηλ) steps."""
_STILL = 1e-7
"""Radians: what the rounding of float32 numbers alone may turn a row by."""
_FELL, _ROSE = 2.0, 1.25
"""The rate fell, or the angle rose, if it did so by more than this factor."""
_COLLAPSING = 100.0
"""A layer is collapsing if its radius fell by this factor."""
_KEPT = 2**22
"""Numbers that a history keeps: 16 MB."""
_COVERED = {"not finite", "collapsed", "equilibrium", "apart", "weight decay"}
"""Kinds of alerts that a sentence of its own is about."""

_PAIRS = (
    ("angle", "median"),
    ("radius", "median"),
    ("radius", "max"),
    ("gradient_norm", "min"),
    ("gradient_norm", "q10"),
    ("gradient_norm", "max"),
    ("collapsed", "mean"),
    ("lr", "mean"),
    ("equilibrium_angle", "median"),
    ("equilibrium_radius", "median"),
)
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


# The numbers


class History:
    """The recorded numbers that a verdict needs: for each pair of `_PAIRS` an array (steps, groups).

    NaN stands for a number that was not recorded, infinity for one that is not finite.
    """

    def __init__(
        self,
        steps: NDArray[np.int64] | None = None,
        groups: Sequence[str] = (),
        values: NDArray[np.float32] | None = None,
    ) -> None:
        self.steps = np.zeros(0, np.int64) if steps is None else steps
        self.groups = list(groups)
        self.values = np.zeros((0, len(_PAIRS), len(self.groups)), np.float32) if values is None else values
        self._observed, self._stride = 0, 1

    @classmethod
    def of_table(cls, table: "pd.DataFrame") -> "History":
        """From a run's table."""
        words = {name: table[name].astype("category").cat for name in ("group", "quantity", "statistic")}
        names = {name: [str(word) for word in column.categories] for name, column in words.items()}
        codes = {name: column.codes.to_numpy() for name, column in words.items()}
        all_steps, numbers = table["step"].to_numpy(), table["value"].to_numpy(float)
        groups = [name for name in names["group"] if name]
        place = np.array([groups.index(name) if name else -1 for name in names["group"]], dtype=np.int64)
        chosen = []
        for k, (quantity, statistic) in enumerate(_PAIRS):
            if quantity in names["quantity"] and statistic in names["statistic"]:
                is_quantity = codes["quantity"] == names["quantity"].index(quantity)
                found = np.flatnonzero(is_quantity & (codes["statistic"] == names["statistic"].index(statistic)))
                chosen.append((k, found[place[codes["group"][found]] >= 0]))
        steps = np.unique(np.concatenate([all_steps[found] for _, found in chosen])) if chosen else np.array([], int)
        values = np.full((len(steps), len(_PAIRS), len(groups)), np.nan, dtype=np.float32)
        for k, found in chosen:
            at = np.searchsorted(steps, all_steps[found]), k, place[codes["group"][found]]
            values[at] = _or_infinite(numbers[found])
        return cls(steps.astype(np.int64), groups, values)

    @classmethod
    def of_block(cls, block: Block) -> "History":
        """From some observed steps, as the watch hands them on."""
        values = np.full((len(block.steps), len(_PAIRS), len(block.groups)), np.nan, dtype=np.float32)
        for k, (quantity, statistic) in enumerate(_PAIRS):
            if quantity in block.quantities:
                q = block.quantities.index(quantity)
                known = block.active & block.defined[q]
                values[:, k] = np.where(known, _or_infinite(block.values[:, q, :, STATISTICS.index(statistic)]), np.nan)
        return cls(block.steps, block.groups, values)

    def add(self, block: Block) -> None:
        """Append some observed steps; if there are too many numbers, every second step of all is dropped."""
        more = History.of_block(block)
        if not self.groups:
            self.groups, self.values = more.groups, more.values[:0]
        kept = slice(-self._observed % self._stride, None, self._stride)
        self._observed += len(more.steps)
        self.steps = np.concatenate([self.steps, more.steps[kept]])
        self.values = np.concatenate([self.values, more.values[kept]])
        while self.values.size > _KEPT and len(self.steps) > 1:
            self.steps, self.values = self.steps[::2], self.values[::2].copy()
            self._stride *= 2

    def get(self, quantity: str, statistic: str = "median", *, group: int | None = None) -> Numbers:
        """(steps, groups), or (steps,) of one group."""
        values = self.values[:, _PAIRS.index((quantity, statistic))]
        return (values if group is None else values[:, group]).astype(np.float64)


def _or_infinite(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), values, np.inf).astype(np.float32)


def _median(values: Numbers) -> Numbers:
    """Over the first dimension, of the finite numbers alone; NaN if there is none."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)
    count = np.isfinite(ordered).sum(axis=0, keepdims=True)
    if not len(ordered):
        return np.full(values.shape[1:], np.nan)
    # NaN comes last, so without a finite number the entry at 0 is NaN.
    middle = [np.take_along_axis(ordered, np.maximum(k, 0), axis=0) for k in ((count - 1) // 2, count // 2)]
    found: Numbers = (middle[0] + middle[1])[0] / 2
    return found


class _Run:
    """A history, its groups in the order of run.json, with what run.json says of them.

    Attributes:
        end: the last observed steps, which a verdict is about.
        layers: (groups,), whether a group is a matrix or filters.
        invariant: (groups,), whether a group is invariant and its gradient does not contradict it.
    """

    def __init__(
        self, history: History, about: Mapping[str, Any], labels: Mapping[str, str], alerts: Sequence[Alert]
    ) -> None:
        entries = {str(entry.get("name")): entry for entry in about.get("groups") or ()}
        known_order = {name: k for k, name in enumerate(entries)}
        order = sorted(range(len(history.groups)), key=lambda g: known_order.get(history.groups[g], len(known_order)))
        history = History(history.steps, [history.groups[g] for g in order], history.values[:, :, order])
        self.history, self.about, self.alerts = history, about, alerts
        self.steps, self.groups = history.steps, history.groups
        self.entries = [entries.get(name, {}) for name in self.groups]
        layers = np.array([_is_layer(entry) for entry in self.entries], dtype=bool)
        self.layers = layers if layers.any() else ~layers
        refuted = {alert.group for alert in alerts if "not invariant" in alert.text}
        self.invariant = np.array([labels.get(n) == "invariant" and n not in refuted for n in self.groups], dtype=bool)
        self.count = max(_FEWEST_STEPS, len(self.steps) // 10)
        self.end = slice(-self.count, None)
        self.angle = _median(history.get("angle")[self.end])
        self.rate = _median(history.get("lr", "mean")[self.end])
        self.not_finite = np.isinf(history.get("radius", "max")) | np.isinf(history.get("gradient_norm", "max"))
        gradient = history.get("gradient_norm", "max")[self.end]
        known = ~np.isnan(gradient)
        self.dead = self.layers & known.any(axis=0) & ~(gradient > 0).any(axis=0)
        self.still = self._still()
        lost = np.isinf(history.get("radius", "max")[self.end]).any(axis=0)
        self.moving = (self.angle > 0) & ~self.dead & ~self.still & ~lost

    def _still(self) -> NDArray[np.bool_]:
        """(groups,): it does not turn, although it has a gradient and others turn, or it turned before."""
        others = float(_median(self.angle[(self.angle > _STILL) & self.layers]))
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = self.history.get("angle") / self.history.get("lr", "mean")
            turned = np.where(np.isfinite(speed), speed, 0).max(axis=0) > 100 * self.angle / self.rate
        gradient = self.history.get("gradient_norm", "max")
        # At a minimum of the loss gradients vanish, and then it is right that nothing turns.
        pulled = _median(gradient[self.end]) > 0.01 * _median(gradient)
        return (self.angle <= _STILL) & ((turned & pulled) | (others > 100 * self.angle)) & ~self.dead

    def since(self, now: NDArray[np.bool_]) -> int | None:
        """The observed step from which on a condition holds to the end; None: the first one.

        The condition must be true where nothing was recorded.
        """
        ends = np.flatnonzero(~now)
        # The end as a whole was judged, so a single step in it does not matter.
        first = max(0, len(self.steps) - self.count)
        return None if not len(ends) else int(self.steps[min(ends[-1] + 1, first)])

    def names(self, chosen: NDArray[Any], most: int = 3) -> str:
        return listed([self.groups[g] for g in chosen], most)

    def settings(self, g: int) -> Mapping[str, Any]:
        """The settings of the param group that a group is in."""
        name = (self.entries[g].get("names") or [self.groups[g]])[0]
        known: Sequence[Mapping[str, Any]] = (self.about.get("optimizer") or {}).get("groups") or ()
        return next((each for each in known if name in (each.get("params") or ())), {})


def _is_layer(entry: Mapping[str, Any]) -> bool:
    return (entry.get("rows") or 0) > 1 or any(len(shape) > 1 for shape in entry.get("shapes") or ())


# The sentences


def judge(
    history: History, about: Mapping[str, Any], labels: Mapping[str, str], alerts: Sequence[Alert]
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
    found = list(_broken(run))
    if len(run.steps) < _FEWEST_STEPS:
        steps = "step was" if len(run.steps) == 1 else "steps were"
        return [*found, Sentence("early", f"Only {len(run.steps)} {steps} observed: too early to judge the layers.")]
    for sentences in (_dead, _collapsed, _pace, _rate, _equilibrium, _of_alerts, _balance, _share):
        found += sentences(run)
    found.sort(key=lambda sentence: SEVERITIES.index(sentence.severity))
    if all(sentence.severity == "note" for sentence in found):
        found.insert(0, _healthy(run))
    if not run.invariant.any():
        text = (
            "No row is proved invariant, so nothing is said about the balance of weight decay or the share of "
            "invariant weights: watch(optimizer, find_groups(model, inputs)) proves rows."
        )
        found = [*found[: _MOST - 1], Sentence("find_groups", text)]
    return found[:_MOST]


def _broken(run: _Run) -> Iterator[Sentence]:
    """NaN or infinite numbers, and weights that no longer turn."""
    weights = np.isinf(run.history.get("radius", "max"))
    gradients = np.isinf(run.history.get("gradient_norm", "max"))
    lost = np.flatnonzero(weights[run.end].any(axis=0))
    first = int(run.not_finite.any(axis=1).argmax()) if run.not_finite.any() else None
    turns = (run.angle >= 0) & ~run.dead & (run.rate != 0)
    frozen = np.flatnonzero(run.still & (run.rate != 0))
    whole = len(frozen) > 0 and len(frozen) >= 0.9 * turns.sum() and len(run.steps) >= _FEWEST_STEPS
    if len(lost):
        began = int(weights[:, lost].any(axis=1).argmax())
        what = "weights" if first == began and not gradients[began].any() else "gradient"
        at = np.flatnonzero((gradients if what == "gradient" else weights)[first if first is not None else began])
        source = f"; it was first seen in the {what} of {run.names(at, 1)}" if len(at) else ""
        text = (
            f"The weights of {_count(len(lost), 'group')} are NaN or infinite from step {run.steps[began]:,} on, and "
            f"the training cannot recover from this{source}{_at(run, first)}."
        )
        yield Sentence("not finite", text, run.groups[lost[0]], "radius", "bad")
    when = run.since(~(_median(run.history.get("angle")[:, frozen].T) > _STILL)) if whole else None
    froze_at = 0 if when is None else int(np.searchsorted(run.steps, when))
    by_nan = whole and first is not None and 0 <= froze_at - first <= 2
    if not len(lost) and first is not None and not by_nan:
        groups = np.flatnonzero(run.not_finite.any(axis=0))
        steps = int(run.not_finite.any(axis=1).sum())
        what = "gradient of 1 group was" if len(groups) == 1 else f"gradients of {len(groups):,} groups were"
        text = (
            f"The {what} NaN or infinite at {_count(steps, 'observed step')}, first at step {run.steps[first]:,} in "
            f"{run.names(np.flatnonzero(run.not_finite[first]), 1)}; the weights are finite."
        )
        severity = "bad" if run.not_finite[-1].any() else "warning"
        yield Sentence("not finite", text, run.groups[groups[0]], "gradient_norm", severity)
    if len(run.steps) < _FEWEST_STEPS or not run.still.any():
        return
    if whole:
        cause = "from the first step on" if when is None else f"at step {when:,}"
        cause = f"after NaN or infinite gradients at step {run.steps[first]:,}" if by_nan else cause
        text = (
            f"The optimizer froze {cause}: {len(frozen)} of {_count(len(run.groups), 'group')} no longer turn (at "
            f"most {_n(run.angle[frozen].max())} rad per step), although they have a rate and a gradient. A NaN in its "
            "state does this."
        )
        yield Sentence("frozen", text, run.groups[frozen[0]], "angle", "bad")
        return
    still = np.flatnonzero(run.still & run.layers)
    if len(still):
        g = int(still[0])
        when = run.since(~(run.history.get("angle", group=g) > _STILL))
        its = "its" if len(still) == 1 else "their"
        why = f"{its} rate is 0" if run.rate[g] == 0 else f"{its} updates are smaller than the rounding of the weights"
        others = float(_median(run.angle[run.layers & run.moving]))
        text = (
            f"{_of(still, run.layers, 'layer')} {_is(len(still))} frozen while the median layer "
            f"turns {_n(others)} rad per step: {run.names(still)}, {_since(when)}; {why}."
        )
        yield Sentence("frozen", text, run.groups[g], "angle", "warning")


def _dead(run: _Run) -> Iterator[Sentence]:
    """Layers and rows whose gradient is exactly 0."""
    dead = np.flatnonzero(run.dead)
    gradient = run.history.get("gradient_norm", "max")
    if len(dead):
        when = run.since(~(gradient[:, dead[0]] > 0))
        text = (
            f"{_of(dead, run.layers, 'layer')} {_is(len(dead))} dead, with a gradient of exactly 0 "
            f"{_since(when)}: {run.names(dead)}."
        )
        yield Sentence("dead", text, run.groups[dead[0]], "gradient_norm", "bad")
    smallest = run.history.get("gradient_norm", "min")
    known = ~np.isnan(smallest[run.end])
    idle = known.any(axis=0) & (np.where(known, smallest[run.end], 0) == 0).all(axis=0) & run.layers & ~run.dead
    died: list[tuple[int, int | None]] = []
    unused: list[tuple[int, int | None]] = []
    for g in np.flatnonzero(idle).tolist():
        zero = ~(smallest[:, g] > 0)
        when = run.since(zero)
        earlier = zero if when is None else zero[run.steps < when]
        # Entries that few batches use, such as rare tokens, have no gradient at many steps before, too.
        (died if earlier.mean() < 0.1 else unused).append((g, when))
    for rows, severity in ((died, "warning"), (unused, "note")):
        if rows:
            g, when = rows[0]
            many = _median(run.history.get("gradient_norm", "q10")[run.end][:, [g]])[0] == 0
            whose = f"{'At least a tenth of the rows' if many else 'At least one row'} of {run.groups[g]}"
            whose += f" (and of {_count(len(rows) - 1, 'more layer')})" if len(rows) > 1 else ""
            if severity == "warning":
                text = f"{whose} died: the gradient is exactly 0 {_since(when)}."
            else:
                last = f"at each of the last {min(run.count, len(run.steps))} observed steps"
                text = (
                    f"{whose} had no gradient {last}: dead units, or entries that no batch used, such as rare tokens."
                )
            yield Sentence("dead", text, run.groups[g], "gradient_norm", severity)


def _collapsed(run: _Run) -> Iterator[Sentence]:
    """Rows that have lost their radius, or are about to."""
    share = _median(run.history.get("collapsed", "mean")[run.end])
    gone = np.flatnonzero(run.layers & (share > 0))
    if len(gone):
        g = int(gone[np.argmax(share[gone])])
        when = run.since(~(run.history.get("collapsed", "mean", group=g) <= 0))
        text = (
            f"Rows of {_count(len(gone), 'layer')} have collapsed: {100 * share[g]:.2g} % of {run.groups[g]} "
            f"{_has(when)} a radius too small for a direction {_since(when)}."
        )
        yield Sentence("collapsed", text, run.groups[g], "collapsed", "warning")
    radius = run.history.get("radius")
    with np.errstate(divide="ignore", invalid="ignore"):
        fell = np.where(run.layers, _median(radius[: run.count]) / _median(radius[run.end]), np.nan)
    falling = np.setdiff1d(np.flatnonzero((fell > _COLLAPSING) & np.isfinite(fell)), gone)
    if len(falling):
        g = int(falling[np.argmax(fell[falling])])
        text = (
            f"{_of(falling, run.layers, 'layer')} {_is(len(falling))} collapsing: the radius of "
            f"{run.groups[g]} fell {_n(fell[g])} × since the first observed steps, to "
            f"{_n(_median(radius[run.end])[g])}."
        )
        yield Sentence("collapsed", text, run.groups[g], "radius", "warning")


def _pace(run: _Run) -> Iterator[Sentence]:
    """Layers that turn much faster or slower than the median layer."""
    chosen = run.layers & run.moving
    middle = float(_median(run.angle[chosen]))
    ratio = np.where(chosen, run.angle / middle, 1.0) if middle > 0 else np.ones(len(run.groups))
    angles = run.history.get("angle")
    medians = _median(np.where(chosen, angles, np.nan).T)
    usual = float(_median(run.rate[chosen]))
    for kind, word, factor in (("fast", "faster", ratio), ("slow", "slower", 1 / ratio)):
        out = np.flatnonzero(factor > _APART)
        if not len(out):
            continue
        out = out[np.argsort(-factor[out])]
        parts = []
        for g in out[:3]:
            with np.errstate(divide="ignore", invalid="ignore"):
                course = _smooth(angles[:, g] / medians) ** (1 if kind == "fast" else -1)
            rates = run.rate[g] / usual if usual > 0 else 1.0
            own = f", at {_n(rates)} × the usual rate" if not 0.67 < rates < 1.5 else ""
            when = run.since(~(course <= _APART))
            parts.append(f"{run.groups[g]} {_n(factor[g])} × ({_n(run.angle[g])} rad, {_since(when)}{own})")
        more = f", and {len(out) - 3} more" if len(out) > 3 else ""
        text = (
            f"{_of(out, chosen, 'layer')} {_turn(len(out))} more than {_APART:g} × {word} than the "
            f"median layer ({_n(middle)} rad per step): {', '.join(parts)}{more}."
        )
        yield Sentence(kind, text, run.groups[out[0]], "angle", "warning")


def _rate(run: _Run) -> Iterator[Sentence]:
    """The rate fell, but the angle rose."""
    rates, angles = run.history.get("lr", "mean"), run.history.get("angle")
    finite = np.where(np.isfinite(rates), rates, -1.0)
    high = finite >= 0.9 * finite.max(axis=0)
    peak, before = _median(np.where(high, rates, np.nan)), _median(np.where(high, angles, np.nan))
    chosen = run.layers & run.moving & (before > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        fell, rose = peak / run.rate, run.angle / before
    out = np.flatnonzero(chosen & (run.rate > 0) & (fell > _FELL) & (rose > _ROSE))
    if len(out):
        g = int(out[np.argmax(rose[out])])
        last = int(np.flatnonzero(high[:, g])[-1])
        text = (
            f"The rate fell {_n(fell[g])} × since step {run.steps[last]:,}, but {_of(out, chosen, 'layer')} "
            f"{_turn(len(out))} further per step than before, {run.groups[g]} {_n(rose[g])} × "
            f"({_n(before[g])} to {_n(run.angle[g])} rad)."
        )
        yield Sentence("rate", text, run.groups[g], "angle", "warning")


def _equilibrium(run: _Run) -> Iterator[Sentence]:
    """The angle is far above or below its equilibrium."""
    expected = _median(run.history.get("equilibrium_angle")[run.end])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = run.angle / expected
    known = run.invariant & run.moving & np.isfinite(ratio) & (ratio > 0)
    for word, factor in (("above", ratio), ("below", 1 / np.where(known, ratio, 1.0))):
        out = np.flatnonzero(known & (factor > _OUT))
        if not len(out):
            continue
        g = int(out[np.argmax(factor[out])])
        late = [g for g in out if _elapsed(run, int(g)) > _TIMES]
        why = "" if late else " (weight decay has not had the time to lead there)"
        text = (
            f"{_of(out, known, 'invariant layer')} {_turn(len(out))} far {word} "
            f"{'its' if len(out) == 1 else 'their'} own equilibrium, by {_n(float(np.median(factor[out])))} × in the "
            f"median and most in {run.groups[g]}, {_n(run.angle[g])} instead of {_n(expected[g])} rad per step{why}."
        )
        yield Sentence("equilibrium", text, run.groups[g], "equilibrium_angle", "warning" if late else "note")


def _pull(run: _Run, g: int) -> Numbers:
    """How much of a group's radius the decay takes per step in equilibrium: θ*²/2 · (1+β)/(1−β), which is ηλ for AdamW.

    It equals half of the growth of r² per step; see `balance` for θ* and for the role of β.
    """
    settings = run.settings(g)
    betas = settings.get("betas") or (settings.get("momentum") or 0.0,)
    beta = 0.0 if "b" in str(settings.get("without") or "") else float(betas[0])
    return run.history.get("equilibrium_angle", group=g) ** 2 / 2 * (1 + beta) / (1 - beta)


def _elapsed(run: _Run, g: int) -> float:
    """The observed time in units of the time that an equilibrium takes: the sum of ηλ."""
    pull = _pull(run, g)
    pull = np.where(np.isfinite(pull), pull, 0.0)
    return float(np.sum(np.diff(run.steps) * (pull[1:] + pull[:-1]) / 2))


def _balance(run: _Run) -> Iterator[Sentence]:
    """Steps until weight decay is in balance with growth, at the present rate."""
    radius = _median(run.history.get("radius")[run.end])
    expected = _median(run.history.get("equilibrium_radius")[run.end])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = radius / expected
        turns = run.angle / _median(run.history.get("equilibrium_angle")[run.end])
    known = run.invariant & ~run.dead & ~run.still & np.isfinite(ratio) & (ratio > 0)
    # The angle in equilibrium is known better than the radius, which depends on how noisy the gradients are. A row that
    # is too short turns too far.
    short = (ratio < 1 / _BALANCED) & (turns > _BALANCED)
    long = (ratio > _BALANCED) & ((turns < 1 / _BALANCED) | ~(turns > 0))
    away = np.flatnonzero(known & (short | long))
    if not len(away):
        return
    # r^p approaches its equilibrium exponentially, with p times the pull: p = 4 for SGD, whose growth is ∝ 1/r³.
    power = 4 if "SGD" in str((run.about.get("optimizer") or {}).get("name")) else 2
    needed, left = np.zeros(len(away)), np.zeros(len(away))
    for k, g in enumerate(away.tolist()):
        pull = float(_median(_pull(run, g)[run.end][:, None])[0])
        distance = abs(ratio[g] ** power - 1) / abs(_BALANCED ** (power if ratio[g] > 1 else -power) - 1)
        needed[k] = max(1.0, math.log(max(distance, 1.0)) / (power * pull)) if pull > 0 else math.inf
        left[k] = _steps_left(run, g)
    worst = int(np.argmax(needed))
    g = int(away[worst])
    place = f"{run.groups[g]} (radius {_n(radius[g])}, in balance {_n(expected[g])})"
    head = f"Weight decay is not in balance yet in {_of(away, known, 'invariant layer')}"
    if not math.isfinite(needed[worst]) or needed[worst] > left[worst] / 2:
        rate = (
            f"the rate reaches 0 in about {_about(left[worst])} steps" if left[worst] >= 1 else "the rate is almost 0"
        )
        need = f", and {place} needs about {_about(needed[worst])} at this rate" if math.isfinite(needed[worst]) else ""
        text = f"{head}, and never will be under this schedule: {rate}{need}."
    else:
        text = f"{head}: {place} needs about {_about(needed[worst])} more steps at this rate."
    yield Sentence("balance", text, run.groups[g], "equilibrium_radius")


def _steps_left(run: _Run, g: int) -> float:
    """Steps until the rate is 0, if it falls smoothly at the end of the run and goes on in a line; else infinity."""
    rates = run.history.get("lr", "mean", group=g)[run.end]
    steps, rates = run.steps[run.end][np.isfinite(rates)], rates[np.isfinite(rates)]
    if len(rates) and rates[-1] == 0:
        return 0.0
    if len(rates) < 3 or np.mean(np.diff(rates) < 0) < 0.8:
        return math.inf
    return float(rates[-1] * (steps[-1] - steps[0]) / (rates[0] - rates[-1]))


def _share(run: _Run) -> Iterator[Sentence]:
    """The share of the weights that is invariant."""
    sizes = np.array([float((each.get("rows") or 0) * (each.get("size") or 0)) for each in run.entries])
    part, whole = sizes[run.invariant].sum(), sizes.sum()
    if part:
        decays = any(run.settings(int(g)).get("weight_decay") for g in np.flatnonzero(run.invariant))
        knob = "weight decay sets their angle per step and does not regularize"
        knob = knob if decays else "weight decay, which is 0, would set their angle per step and not regularize"
        share = f"{100 * part / whole:.3g} % of the watched weights ({part:,.0f} of {whole:,.0f})"
        text = f"{share} are invariant: {knob}."
        yield Sentence("share", text, "", "equilibrium_radius")


_OF_ALERTS = {"H1": "radial", "H2": "velocity", "defect": "defect"}


def _of_alerts(run: _Run) -> Iterator[Sentence]:
    """Alerts that no other sentence is about, one for each cause."""
    for cause in causes([alert for alert in run.alerts if alert.kind not in _COVERED]):
        text = f"{cause.text[:1].upper()}{cause.text[1:]}."
        yield Sentence(cause.kind, text, cause.groups[0], _OF_ALERTS.get(cause.kind, ""), "warning")


def _healthy(run: _Run) -> Sentence:
    chosen = np.flatnonzero(run.layers & run.moving)
    share = (run.about.get("cost") or {}).get("share")
    took = f"the watch took {_n(100 * share)} % of the training's time" if share else ""
    cost = took or "the watch's cost is not known yet"
    if not len(chosen):
        return Sentence(
            "healthy", f"No layer turns at step {run.steps[-1]:,}, and nothing is wrong; {cost}.", "", "angle"
        )
    low, high = chosen[np.argmin(run.angle[chosen])], chosen[np.argmax(run.angle[chosen])]
    spread = f"{_n(run.angle[low])} ({run.groups[low]}) to {_n(run.angle[high])} ({run.groups[high]})"
    middle = _n(float(_median(run.angle[chosen])))
    text = (
        f"Nothing is wrong up to step {run.steps[-1]:,}: the median layer turns {middle} rad per step, "
        f"the {_count(len(chosen), 'layer')} from {spread}, and {cost}."
    )
    return Sentence("healthy", text, "", "angle")


def _smooth(values: Numbers) -> Numbers:
    """The median over each step and its neighbours."""
    width = min(_FEWEST_STEPS, len(values))
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return _median(np.lib.stride_tricks.sliding_window_view(padded, width).T)


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
    digits = 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.0f}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _of(some: NDArray[Any], all_of: NDArray[np.bool_], word: str) -> str:
    return f"{len(some):,} of {_count(int(all_of.sum()), word)}"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _turn(number: int) -> str:
    return "turns" if number == 1 else "turn"


def _has(when: int | None) -> str:
    return "have had" if when is None else "have"


def _since(when: int | None) -> str:
    return "since the first observed step" if when is None else f"since step {when:,}"


def _at(run: _Run, k: int | None) -> str:
    return "" if k is None else f" at step {run.steps[k]:,}"

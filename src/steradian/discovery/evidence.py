"""Whether the blocks of a cut are radially invariant, by all that the probes say about them.

A block must be balanced at the larger growth, and what is left of it must have fallen as a normalization's ε does.
Most blocks are that plain; some stand still, fall otherwise, or have nothing to say at a grown point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

from .defects import GROWTH, MANY, fades, falls, imbalance, obeys, signed_imbalance
from .tables import Key, Table

__all__ = [
    "MOST_NATURAL",
    "PARTLY",
    "Cut",
    "Evidence",
    "Trial",
    "balanced_blocks",
    "block_sums",
    "cut_key",
    "make_cut",
    "natural",
    "remaining",
    "small_blocks",
    "speaking",
    "within",
]

MOST_NATURAL = 4
"""How many times the tolerance of near probes a typical one of many rows may have, all of which fall as ε's do."""
PARTLY = 0.05
"""Share of the tolerance of near probes that a block of a partly invariant parameter may take."""
_LEAST_EFFECT = 0.03
"""Share of the typical row's effect, below which a row hardly moves the outputs."""
_FASTER = 16
"""How many times faster than others a defect may fall."""
_MUTE = 1e-6
"""Share of the typical row's effect, below which a row says nothing at a grown point."""
_MOST_FADED = 0.25
"""Share of the rows that may be left to the others to speak for."""

Cut = tuple[int, ...]
"""Number of blocks along each dimension."""


@dataclass(frozen=True)
class Evidence:
    """One probe's tables of one parameter (or of several joined along dimension 0), and what to make of them.

    Attributes:
        tables: as in a `Reading`.
        floor: effects below this are rounding; a row with no other effect says nothing.
        tolerance: imbalance up to which a row counts as invariant.
    """

    tables: dict[Key, Table]
    floor: float
    tolerance: float


@dataclass(frozen=True)
class Trial:
    """All evidence about a parameter.

    Attributes:
        near: probes at random points, independent of each other.
        far: two growths of one more point, the smaller first; may be empty.
        settled: a defect above this must fall from one growth to the other as ε's does.
        flat: largest defect of a row that the others may speak for.
        still: largest defect that may stay as it is, where growth has no effect on it.
        linear: largest typical defect that may fall with the growth and not with its square.
        transparent: whether the graph shows that no curve lies in front of a normalization.
        resolution: largest rounding error of an imbalance.
    """

    near: Sequence[Evidence]
    far: Sequence[Evidence] = ()
    settled: float = 0.0
    flat: float = 0.0
    still: float = 0.0
    linear: float = 0.0
    transparent: bool = False
    resolution: float = 0.0

    def evidence(self, key: Key) -> list[Evidence]:
        """The probes that have a table of these dimensions."""
        return [e for e in (*self.near, *self.far) if key in e.tables]


def cut_key(cut: Cut) -> Key:
    """The dimensions that a cut divides."""
    return tuple(i for i, g in enumerate(cut) if g > 1)


def make_cut(dims: int, blocks: dict[int, int]) -> Cut:
    """The cut of so many dimensions that divides some of them."""
    return tuple(blocks.get(i, 1) for i in range(dims))


def block_sums(tables: dict[Key, Table], cut: Cut) -> Tensor:
    """The sums of `Table` on each block of a cut."""
    key = cut_key(cut)
    table = tables[key]
    for position, i in enumerate(key):
        table = table.unflatten(position + 1, (cut[i], -1)).sum(position + 2)
    return table


def small_blocks(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose imbalance is within its tolerance in every probe that decides, and falls as they grow."""
    if not trial.far:
        return torch.stack([within(cut, e, e.tolerance) for e in trial.near]).all(0)
    far = [imbalance(block_sums(e.tables, cut), e.floor) for e in trial.far]
    good = torch.stack([d <= e.tolerance for d, e in zip(far, trial.far, strict=True)]).all(0)
    falling = falls(far[0], far[-1], trial.settled)
    good &= falling if bool(falling.all()) else falling | _linear(cut, trial)
    return good if bool(good.all()) else good | _still(cut, trial) | _faded(cut, trial)


def balanced_blocks(cut: Cut, trial: Trial) -> Tensor:
    """Blocks that are small in this sense and whose defects have an explanation."""
    good = small_blocks(cut, trial)
    if len(trial.far) < 2 or not bool(good.any()):
        return good
    before, after = (signed_imbalance(block_sums(e.tables, cut), e.floor) for e in trial.far)
    # What is settled at both growths needs no explanation: a row of little effect has rounding of its own.
    settled = torch.maximum(before.abs(), after.abs()) <= trial.settled
    explained = settled | obeys(before, after, trial.resolution)
    if trial.transparent:
        # Where no curve can hide, what falls is ε's; where samples differ, it need not fall by exactly the square.
        explained = torch.ones_like(settled)
    explained |= _still(cut, trial) | _faded(cut, trial) | _linear(cut, trial)
    return good & explained & ~_saturated(cut, trial)


def _saturated(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect falls much faster than ε's, from ordinary scale to the smaller growth or from there on.

    Nothing that ε does is gone so soon. A way past the normalization that saturates may be, and its rows are none.
    """
    first, last = ((block_sums(trial.far[i].tables, cut), trial.far[i].floor) for i in (0, -1))
    before, (radial, effect) = imbalance(*first), (last[0][0].abs(), last[0][1].sqrt())
    pace = min(float(radial.median() / first[0][0].abs().median().clamp(min=1e-300)), (GROWTH[0] / GROWTH[1]) ** 2)
    fast = (before > 10 * trial.settled) & (radial < first[0][0].abs() * pace / _FASTER)
    fast &= effect >= _MUTE * effect.median()
    if cut_key(cut) not in trial.near[0].tables:
        return fast
    # A row of few numbers may act along its radius alone at some points, through ε: that is little beside the others.
    typical = torch.stack([_beside_others(block_sums(e.tables, cut), e.floor) for e in trial.near]).median(0).values
    tolerance = trial.near[0].tolerance
    if bool(typical.median() > PARTLY * tolerance):  # ε has weight everywhere
        return fast
    return fast | ((typical > tolerance) & (before < typical / (_FASTER * GROWTH[0] ** 2)))


def _still(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect stays as it was: where another normalization undoes the growth, ε keeps its weight."""
    before, after = (imbalance(block_sums(trial.far[i].tables, cut), trial.far[i].floor) for i in (0, -1))
    if cut_key(cut) not in trial.near[0].tables:
        return torch.zeros_like(after, dtype=torch.bool)
    small = torch.stack([within(cut, e, trial.still) for e in trial.evidence(cut_key(cut))]).all(0)
    # What grows with the row is a way past the normalization, however narrow.
    return small & (after > before / 4) & (after <= 4 * torch.maximum(before, before.median()).clamp(min=trial.settled))


def _linear(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect falls with the growth itself and is small at ordinary scale: (w − mean) / (std + ε).

    Whatever else is added before a normalization falls so too, but seldom starts so small.
    """
    before, after = (signed_imbalance(block_sums(trial.far[i].tables, cut), trial.far[i].floor) for i in (0, -1))
    if len(trial.far) < 2 or cut_key(cut) not in trial.near[0].tables:
        return torch.zeros_like(after, dtype=torch.bool)
    defects = torch.stack([imbalance(block_sums(e.tables, cut), e.floor).flatten() for e in trial.near])
    if bool((defects.median(1).values > trial.linear).any()):
        return torch.zeros_like(after, dtype=torch.bool)
    small = (defects <= trial.linear * (MOST_NATURAL if math.prod(cut) >= MANY else 1)).all(0).reshape(after.shape)
    return small & obeys(before, after, trial.resolution, order=1)


def _faded(cut: Cut, trial: Trial) -> Tensor:
    """Few blocks among others that ε dominates at one point, and that are balanced in most probes at ordinary scale.

    A unit of ReLU that is active once in a batch is normalized to the same number whatever its weights are: at that
    point they act through ε alone, and what is left of their effect has no reason to be balanced. It falls as ε does.
    Of one that has hardly any variance, the imbalance starts too high to end where others do; it falls as ε does, or
    is next to nothing in all other probes.
    """
    first, last = ((block_sums(trial.far[i].tables, cut), trial.far[i].floor) for i in (0, -1))
    before, after = imbalance(*first), imbalance(*last)
    # A unit that dies on the way has said what it could; one that was dead before had nothing to say.
    silent = [sums[1].sqrt() < _MUTE * sums[1].sqrt().median() for sums, _ in (first, last)]
    mute = silent[1] & (silent[0] | (before <= trial.far[-1].tolerance))
    if cut_key(cut) not in trial.near[0].tables:
        return mute if bool(mute.double().mean() <= _MOST_FADED) else torch.zeros_like(mute)
    balanced = torch.stack([within(cut, e, e.tolerance) for e in trial.near]).double().mean(0) > 0.5
    sure = torch.stack([within(cut, e, PARTLY * e.tolerance) for e in trial.near]).all(0)
    high = (before > trial.far[0].tolerance) | (after > trial.far[-1].tolerance) | ~falls(before, after, trial.settled)
    faded = mute & balanced & (first[0][1] > 0)
    faded |= balanced & fades(first[0][1].sqrt(), last[0][1].sqrt()) & (first[0][1] > 0)
    falling = fades(before, after) | ((after <= before * GROWTH[0] / GROWTH[1]) & trial.transparent)
    faded |= high & (after < trial.flat) & balanced & falling
    faded |= high & (_beside_others(*last) < trial.flat) & sure
    return faded if bool(faded.double().mean() <= _MOST_FADED) else torch.zeros_like(faded)


def natural(cut: Cut, trial: Trial) -> tuple[float, float]:
    """The imbalance of a typical row and of the worst one at random points of ordinary scale: what ε does there.

    Where the near probes have no table of a pair of dimensions, each of the two speaks for itself. Where no curve can
    hide, the typical row is that of a typical probe: one of few samples may leave a normalization hardly any variance.
    """
    cuts = [cut]
    if cut_key(cut) not in trial.near[0].tables:
        cuts = [make_cut(len(cut), {i: cut[i]}) for i in cut_key(cut)]
    sums = [[(block_sums(e.tables, c), e.floor) for e in trial.near] for c in cuts]
    across = median_low if trial.transparent else max
    heard = [[s for s in of_cut if bool(s[0][1].any())] or of_cut for of_cut in sums]
    typical = max(across([float(imbalance(*s).median()) for s in of_cut]) for of_cut in heard)
    return typical, max(_worst(*s) for of_cut in sums for s in of_cut)


def remaining(cut: Cut, trial: Trial) -> float:
    """The largest imbalance of a row that growth has left."""
    return max(_worst(block_sums(e.tables, cut), e.floor) for e in trial.far[-1:])


def _worst(sums: Tensor, floor: float) -> float:
    """The largest imbalance; one of a row with next to no effect beside the others does not count for much."""
    return float(_beside_others(sums, floor).max())


def _beside_others(sums: Tensor, floor: float) -> Tensor:
    return imbalance(sums, floor + _LEAST_EFFECT * float(sums[1].sqrt().median()))


def within(cut: Cut, evidence: Evidence, tolerance: float) -> Tensor:
    """Blocks whose imbalance in one probe is no larger than this."""
    return imbalance(block_sums(evidence.tables, cut), evidence.floor) <= tolerance


def speaking(cut: Cut, trial: Trial) -> list[Tensor]:
    """Per probe, the blocks that have an effect."""
    return [block_sums(e.tables, cut)[1].sqrt() > 10 * e.floor for e in trial.evidence(cut_key(cut))]

"""The finest layout whose rows are all radially invariant.

A cut divides each dimension into equal blocks; its rows are invariant when ⟨∇L, x⟩ vanishes on every block in
every probe. A cut that holds implies every coarser one, so the search goes from one block down each dimension,
and combines two dimensions only where each can be cut alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from ..groups import Spec
from .defects import MANY, fades, falls, imbalance, obeys, signed_imbalance
from .tables import Key, Table

__all__ = [
    "Cut",
    "Evidence",
    "Trial",
    "block_sums",
    "cut_key",
    "finest",
    "natural",
    "pair_keys",
    "partial_cut",
    "remaining",
    "slices_balanced",
    "to_spec",
]

_MOST_NATURAL = 4
"""How many times the tolerance of near probes a typical one of many rows may have, all of which fall as ε's do."""

_PARTLY = 0.05
"""Share of the tolerance of near probes that a block of a partly invariant parameter may take."""
_LEAST_EFFECT = 0.03
"""Share of the typical row's effect, below which a row hardly moves the outputs."""
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
        flat: largest defect that may stay as it is, where growth has no effect on it.
        linear: largest typical defect that may fall with the growth and not with its square.
        transparent: whether the graph shows that no curve lies in front of a normalization.
        resolution: largest rounding error of an imbalance.
    """

    near: Sequence[Evidence]
    far: Sequence[Evidence] = ()
    settled: float = 0.0
    flat: float = 0.0
    linear: float = 0.0
    transparent: bool = False
    resolution: float = 0.0

    def evidence(self, key: Key) -> list[Evidence]:
        """The probes that have a table of these dimensions."""
        return [e for e in (*self.near, *self.far) if key in e.tables]


def cut_key(cut: Cut) -> Key:
    """The dimensions that a cut divides."""
    return tuple(i for i, g in enumerate(cut) if g > 1)


def block_sums(tables: dict[Key, Table], cut: Cut) -> Tensor:
    """The sums of `Table` on each block of a cut."""
    key = cut_key(cut)
    table = tables[key]
    for position, i in enumerate(key):
        table = table.unflatten(position + 1, (cut[i], -1)).sum(position + 2)
    return table


def finest(shape: Sequence[int], trial: Trial) -> Cut | None:
    """The cut with most rows that holds in a trial; None where not even the whole tensor does.

    Dimension 0 is preferred between equals. Rows have at least two entries: the radius of a single number
    is all there is to it. Pairs of dimensions are tried where their table is there (see `pair_keys`).
    """
    whole = (1,) * len(shape)
    # In the sum of all rows, one of hardly any variance may drown the others.
    if not bool(_small(whole, trial).all()) and not slices_balanced(shape, trial):
        return None
    alone = {i: _most_blocks(shape, i, trial) for i in range(len(shape)) if shape[i] > 1}
    found = [_cut(len(shape), {i: g}) for i, g in alone.items() if g > 1]
    if _holds(whole, trial):
        found.append(whole)
    if not found:
        return None
    for i, j in combinations([i for i, g in alone.items() if g > 1], 2):
        if all((i, j) in e.tables for e in trial.far or trial.near):
            found += _finest_pair(shape, (i, alone[i]), (j, alone[j]), trial)
    return max(found, key=lambda cut: (math.prod(cut), cut))


def pair_keys(shape: Sequence[int], trial: Trial) -> list[Key]:
    """Pairs of dimensions that can each be cut alone: their common table is worth its memory."""
    if not _holds((1,) * len(shape), trial):
        return []
    able = [i for i in range(len(shape)) if shape[i] > 1 and _most_blocks(shape, i, trial) > 1]
    return list(combinations(able, 2)) if math.prod(shape) > 4 else []


def slices_balanced(shape: Sequence[int], trial: Trial) -> bool:
    """Whether the slices along some dimension are so often balanced that it cannot be chance.

    Where the rows are small, ε leaves a defect of several percent: too much to tell one row by, but not hundreds.
    A defect that ε leaves is spread like a normal variable, so that hardly any is four times the typical one.
    """
    for dim, size in enumerate(shape):
        if size >= MANY and math.prod(shape) > size:
            cut = _cut(len(shape), {dim: size})
            if all(_mostly_balanced(block_sums(e.tables, cut), e) for e in trial.near):
                return True
    return False


def _mostly_balanced(sums: Tensor, evidence: Evidence) -> bool:
    defects = imbalance(sums, evidence.floor)[sums[1].sqrt() > 10 * evidence.floor].sort().values
    if len(defects) < MANY:
        return False
    high = defects[int(0.98 * (len(defects) - 1))]
    return bool(defects[len(defects) // 2] <= 2 * evidence.tolerance) and bool(high <= 8 * evidence.tolerance)


def partial_cut(shape: Sequence[int], trial: Trial) -> tuple[int, list[int]] | None:
    """Blocks of dimension 0 of which some are invariant and others not: (blocks, the invariant ones).

    Of such cuts, the one that leaves least out and then the coarsest, as in a fused query-key-value weight
    under QK-norm: (3, [0, 1]).
    """
    best: tuple[int, list[int]] | None = None
    for blocks in _divisors(shape[0]) if shape else ():
        if 1 < blocks <= shape[0] // 2:
            good = _good_blocks(_cut(len(shape), {0: blocks}), trial).nonzero().flatten().tolist()
            if good and (best is None or len(good) * best[0] > len(best[1]) * blocks):
                best = blocks, good
    return best


def to_spec(cut: Cut, shape: Sequence[int]) -> Spec:
    """A cut as plain data.

    >>> to_spec((8, 1), (8, 3)), to_spec((4, 1), (8, 3)), to_spec((1, 3), (8, 3)), to_spec((2, 3, 1), (8, 3, 5))
    ('filter', 4, ('axis', 1), ('grid', 2, -1))
    """
    key = cut_key(cut)
    if not key:
        return "filter" if shape and shape[0] == 1 else "tensor"
    if key == (0,):
        return "filter" if cut[0] == shape[0] else cut[0]
    if len(key) == 1 and cut[key[0]] == shape[key[0]]:
        return ("axis", key[0])
    blocks = cut[: key[-1] + 1]
    return ("grid", *(-1 if g == size and g > 1 else g for g, size in zip(blocks, shape, strict=False)))


def _cut(dims: int, blocks: dict[int, int]) -> Cut:
    return tuple(blocks.get(i, 1) for i in range(dims))


@cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(g for g in range(1, n + 1) if n % g == 0)


def _most_blocks(shape: Sequence[int], dim: int, trial: Trial) -> int:
    if not trial.evidence((dim,)):
        return 1
    for blocks in reversed(_divisors(shape[dim])):
        if math.prod(shape) > blocks and _holds(_cut(len(shape), {dim: blocks}), trial):
            return blocks
    return 1


def _finest_pair(shape: Sequence[int], first: tuple[int, int], second: tuple[int, int], trial: Trial) -> Iterator[Cut]:
    (i, most_i), (j, most_j) = first, second
    cuts = [_cut(len(shape), {i: a, j: b}) for a in _divisors(most_i)[1:] for b in _divisors(most_j)[1:]]
    for cut in sorted(cuts, key=math.prod, reverse=True):
        if math.prod(shape) > math.prod(cut) and _holds(cut, trial):
            yield cut
            return


def _good_blocks(cut: Cut, trial: Trial) -> Tensor:
    """Blocks with an effect in every probe that is balanced; none where the others are nearly balanced too.

    Among so many blocks some are balanced by chance, up to the tolerance of a candidate: only a tighter one counts.
    """
    seen = torch.stack(_speaking(cut, trial)).all(0)
    sure = torch.stack([_within(cut, e, _PARTLY * e.tolerance) for e in trial.near]).all(0)
    good, last = _balanced(cut, trial) & seen & sure, trial.evidence(cut_key(cut))[-1]
    others = imbalance(block_sums(last.tables, cut), last.floor)[seen & ~good]
    clear = len(others) > 0 and bool(others.median() > trial.near[0].tolerance)
    return good if clear else torch.zeros_like(good)


def _holds(cut: Cut, trial: Trial) -> bool:
    if not bool(_balanced(cut, trial).all()):
        return False
    # What grows invariant, as GELU grows into ReLU, shows at ordinary scale; of many rows, in how the defects fall.
    most = max(e.tolerance for e in trial.near) * (_MOST_NATURAL if math.prod(cut) >= MANY else 1)
    if trial.far and natural(cut, trial)[0] > most:
        return False
    # A cut is evidence only if two of its rows speak: one row that does is no finer than the whole.
    return int(_seen(cut, trial).sum()) >= min(2, math.prod(cut))


def _balanced(cut: Cut, trial: Trial) -> Tensor:
    good = _small(cut, trial)
    if len(trial.far) < 2 or not bool(good.any()):
        return good
    before, after = (signed_imbalance(block_sums(e.tables, cut), e.floor) for e in trial.far)
    # What is settled at both growths needs no explanation: a row of little effect has rounding of its own.
    settled = torch.maximum(before.abs(), after.abs()) <= trial.settled
    explained = settled | obeys(before, after, trial.resolution)
    if trial.transparent and math.prod(cut) >= MANY:
        # Where no curve can hide, what falls is ε's; where samples differ, it need not fall by exactly the square.
        explained = torch.ones_like(settled)
    return good & (explained | _still(cut, trial) | _faded(cut, trial) | _linear(cut, trial))


def _small(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose imbalance is within its tolerance in every probe that decides, and falls as they grow."""
    if not trial.far:
        return torch.stack([_within(cut, e, e.tolerance) for e in trial.near]).all(0)
    far = [imbalance(block_sums(e.tables, cut), e.floor) for e in trial.far]
    good = torch.stack([d <= e.tolerance for d, e in zip(far, trial.far, strict=True)]).all(0)
    falling = falls(far[0], far[-1], trial.settled)
    good &= falling if bool(falling.all()) else falling | _linear(cut, trial)
    return good if bool(good.all()) else good | _still(cut, trial) | _faded(cut, trial)


def _still(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect stays as it was: where another normalization undoes the growth, ε keeps its weight."""
    before, after = (imbalance(block_sums(trial.far[i].tables, cut), trial.far[i].floor) for i in (0, -1))
    if cut_key(cut) not in trial.near[0].tables:
        return torch.zeros_like(after, dtype=torch.bool)
    within = torch.stack([_within(cut, e, trial.flat) for e in trial.evidence(cut_key(cut))]).all(0)
    return within & (after > before / 4)


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
    within = (defects <= trial.linear * (_MOST_NATURAL if math.prod(cut) >= MANY else 1)).all(0).reshape(after.shape)
    return within & obeys(before, after, trial.resolution, order=1)


def _faded(cut: Cut, trial: Trial) -> Tensor:
    """Few blocks among others that ε dominates at one point, and that are balanced in most probes at ordinary scale.

    A unit of ReLU that is active once in a batch is normalized to the same number whatever its weights are: at that
    point they act through ε alone, and what is left of their effect has no reason to be balanced. It falls as ε does.
    Of one that has hardly any variance, the imbalance starts too high to end where others do; it falls as ε does, or
    is next to nothing in all other probes.
    """
    first, last = ((block_sums(trial.far[i].tables, cut), trial.far[i].floor) for i in (0, -1))
    before, after = imbalance(*first), imbalance(*last)
    # A unit that dies on the way has said what it could.
    effect = last[0][1].sqrt()
    mute = (effect < _MUTE * effect.median()) & (before <= trial.far[-1].tolerance)
    if cut_key(cut) not in trial.near[0].tables:
        return mute if bool(mute.double().mean() <= _MOST_FADED) else torch.zeros_like(mute)
    balanced = torch.stack([_within(cut, e, e.tolerance) for e in trial.near]).double().mean(0) > 0.5
    sure = torch.stack([_within(cut, e, _PARTLY * e.tolerance) for e in trial.near]).all(0)
    high = (before > trial.far[0].tolerance) | (after > trial.far[-1].tolerance) | ~falls(before, after, trial.settled)
    faded = mute & balanced & (first[0][1] > 0)
    faded |= balanced & fades(first[0][1].sqrt(), last[0][1].sqrt()) & (first[0][1] > 0)
    faded |= high & (after < trial.flat) & balanced & fades(before, after)
    faded |= high & (_beside_others(*last) < trial.flat) & sure
    return faded if bool(faded.double().mean() <= _MOST_FADED) else torch.zeros_like(faded)


def natural(cut: Cut, trial: Trial) -> tuple[float, float]:
    """The imbalance of a typical row and of the worst one at random points of ordinary scale: what ε does there.

    Where the near probes have no table of a pair of dimensions, each of the two speaks for itself.
    """
    cuts = [cut]
    if cut_key(cut) not in trial.near[0].tables:
        cuts = [_cut(len(cut), {i: cut[i]}) for i in cut_key(cut)]
    sums = [(block_sums(e.tables, c), e.floor) for c in cuts for e in trial.near]
    return max(float(imbalance(*s).median()) for s in sums), max(_worst(*s) for s in sums)


def remaining(cut: Cut, trial: Trial) -> float:
    """The largest imbalance of a row that growth has left."""
    return max(_worst(block_sums(e.tables, cut), e.floor) for e in trial.far[-1:])


def _worst(sums: Tensor, floor: float) -> float:
    """The largest imbalance; one of a row with next to no effect beside the others does not count for much."""
    return float(_beside_others(sums, floor).max())


def _beside_others(sums: Tensor, floor: float) -> Tensor:
    return imbalance(sums, floor + _LEAST_EFFECT * float(sums[1].sqrt().median()))


def _within(cut: Cut, evidence: Evidence, tolerance: float) -> Tensor:
    return imbalance(block_sums(evidence.tables, cut), evidence.floor) <= tolerance


def _seen(cut: Cut, trial: Trial) -> Tensor:
    return torch.stack(_speaking(cut, trial)).any(0)


def _speaking(cut: Cut, trial: Trial) -> list[Tensor]:
    """Per probe, the blocks that have an effect."""
    return [block_sums(e.tables, cut)[1].sqrt() > 10 * e.floor for e in trial.evidence(cut_key(cut))]

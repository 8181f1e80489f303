"""The finest layout whose rows are all radially invariant.

A cut divides each dimension into equal blocks; its rows are invariant when ⟨∇L, x⟩ vanishes on every block in
every probe. A cut that holds implies every coarser one, so the search goes from one block down each dimension,
and combines two dimensions only where each can be cut alone.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from ..groups import Spec
from .defects import MANY, imbalance
from .evidence import (
    MOST_NATURAL,
    PARTLY,
    Cut,
    Evidence,
    Trial,
    balanced_blocks,
    block_sums,
    cut_key,
    make_cut,
    natural,
    small_blocks,
    speaking,
    within,
)
from .tables import Key

__all__ = ["finest", "pair_keys", "partial_cut", "slices_balanced", "to_spec"]


def finest(shape: Sequence[int], trial: Trial) -> Cut | None:
    """The cut with most rows that holds in a trial; None where not even the whole tensor does.

    Dimension 0 is preferred between equals. Rows have at least two entries: the radius of a single number
    is all there is to it. Pairs of dimensions are tried where their table is there (see `pair_keys`).
    """
    whole = (1,) * len(shape)
    # In the sum of all rows, one of hardly any variance may drown the others.
    if not bool(small_blocks(whole, trial).all()) and not slices_balanced(shape, trial):
        return None
    alone = {i: _most_blocks(shape, i, trial) for i in range(len(shape)) if shape[i] > 1}
    found = [make_cut(len(shape), {i: g}) for i, g in alone.items() if g > 1]
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
        # Of a set of parameters there are sums along their common slices alone.
        if size >= MANY and math.prod(shape) > size and all((dim,) in e.tables for e in trial.near):
            cut = make_cut(len(shape), {dim: size})
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
            good = _good_blocks(make_cut(len(shape), {0: blocks}), trial).nonzero().flatten().tolist()
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


@cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(g for g in range(1, n + 1) if n % g == 0)


def _most_blocks(shape: Sequence[int], dim: int, trial: Trial) -> int:
    if not trial.evidence((dim,)):
        return 1
    for blocks in reversed(_divisors(shape[dim])):
        if math.prod(shape) > blocks and _holds(make_cut(len(shape), {dim: blocks}), trial):
            return blocks
    return 1


def _finest_pair(shape: Sequence[int], first: tuple[int, int], second: tuple[int, int], trial: Trial) -> Iterator[Cut]:
    (i, most_i), (j, most_j) = first, second
    cuts = [make_cut(len(shape), {i: a, j: b}) for a in _divisors(most_i)[1:] for b in _divisors(most_j)[1:]]
    for cut in sorted(cuts, key=math.prod, reverse=True):
        if math.prod(shape) > math.prod(cut) and _holds(cut, trial):
            yield cut
            return


def _good_blocks(cut: Cut, trial: Trial) -> Tensor:
    """Blocks with an effect in every probe that is balanced; none where the others are nearly balanced too.

    Among so many blocks some are balanced by chance, up to the tolerance of a candidate: only a tighter one counts.
    """
    seen = torch.stack(speaking(cut, trial)).all(0)
    sure = torch.stack([within(cut, e, PARTLY * e.tolerance) for e in trial.near]).all(0)
    good, last = balanced_blocks(cut, trial) & seen & sure, trial.evidence(cut_key(cut))[-1]
    others = imbalance(block_sums(last.tables, cut), last.floor)[seen & ~good]
    clear = len(others) > 0 and bool(others.median() > trial.near[0].tolerance)
    return good if clear else torch.zeros_like(good)


def _holds(cut: Cut, trial: Trial) -> bool:
    if not bool(balanced_blocks(cut, trial).all()):
        return False
    # What grows invariant, as GELU grows into ReLU, shows at ordinary scale; of many rows, in how the defects fall.
    most = max(e.tolerance for e in trial.near) * (MOST_NATURAL if math.prod(cut) >= MANY else 1)
    if trial.far and natural(cut, trial)[0] > most:
        return False
    # A cut is evidence only if two of its rows speak: one row that does is no finer than the whole.
    return int(_seen(cut, trial).sum()) >= min(2, math.prod(cut))


def _seen(cut: Cut, trial: Trial) -> Tensor:
    return torch.stack(speaking(cut, trial)).any(0)

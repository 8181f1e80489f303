"""Whether a block of a parameter is radially invariant, and the finest spec whose rows all are.

A *cut* divides each dimension into equal blocks. A block is invariant if ⟨∇L, x⟩ vanishes on it in every probe, up to
the defect that a normalization's ε leaves. It differs from any other defect in how it falls as the row grows: with
the square of the factor. Most blocks are that simple; some stay constant because another normalization undoes their
growth, some fall linearly, and some are inactive at a grown point (`_constant`, `_linear`, `_faded`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

from steradian.discovery import thresholds
from steradian.discovery.thresholds import Precision
from steradian.groups import Spec

Key = tuple[int, ...]
"""Dimensions of a parameter, in order."""
Table = Tensor
"""Sums over all dimensions but those of its key of [g·x, (g·x)², g², x²], stacked in this order."""
Cut = tuple[int, ...]
"""Number of blocks along each dimension."""
Cuts = tuple[Cut, ...]
"""Of each parameter of a set into as many slices, of which those at the same place belong together."""


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether more than one dimension is longer than 1: a weight, not a gain, a bias or a token."""
    return sum(size > 1 for size in shape) >= 2


def imbalance(sums: Tensor, floor: float | Tensor) -> Tensor:
    """Σ g·x / √Σ(g·x)² per block, with effects up to `floor` as rounding; long rows have the same as short ones."""
    return sums[0] / (sums[1].sqrt() + floor)


def falls(before: Tensor, after: Tensor, settled: float) -> Tensor:
    """Whether a defect fell as one due to ε, with the square of the growth, or is settled anyway."""
    # Growing a row by ρ divides ε/σ² by ρ². Whatever else competes with the row, such as a branch added before the
    # normalization, loses weight with ρ only. The line is drawn between the two, at ρ^1.5.
    # The median helps a row whose defect happened to be small before.
    typical = torch.maximum(before, before.median())
    return after <= torch.clamp(typical * thresholds.PACE, min=settled)


def follows_growth(before: Tensor, after: Tensor, resolution: float, *, order: int = 2) -> Tensor:
    """Whether a signed defect is divided by the growth to this order, in most rows: 2 for ε, 1 for one added to σ."""
    # GELU, which becomes ReLU as its inputs grow, loses its defect at that pace on average, but each row at its own.
    power = (thresholds.GROWTH[1] / thresholds.GROWTH[0]) ** order
    typical = torch.maximum(before.abs(), before.abs().median())
    many = before.numel() >= thresholds.MANY_ROWS
    # Few rows may agree by chance.
    follows = (power * after - before).abs() <= typical / (4 if many else 16) + power * resolution
    measured = before.abs() > power * resolution
    if many and bool(measured.any()):
        # Units of ReLU that switch on the way disturb rows that are seldom active. Most rows decide for all: half of
        # those with a measurable defect, or nearly all where most have hardly any.
        half, most = follows[measured], (follows | ~measured)[before != 0]
        if half.double().mean() >= 0.5 or most.double().mean() >= 0.9:
            return torch.ones_like(follows)
    return follows


class Evidence:
    """The tables of one parameter (or of several joined along dimension 0) in some probes, and what to make of them.

    Results are probes × blocks of a cut.
    """

    def __init__(self, tables: Sequence[Mapping[Key, Table]], floors: list[float], tolerances: list[float]) -> None:
        self.tables = tables  # the sums that each probe kept, by key
        limits = torch.tensor([floors, tolerances], dtype=torch.float64, device="cpu")[..., None]
        self.floor = limits[0]  # effects below this are rounding; a row with no other effect cannot be judged
        self.tolerance = limits[1]  # imbalance up to which a row counts as invariant
        self.sums = cache(lambda cut: torch.stack([block_sums(of_probe, cut) for of_probe in tables], 1))
        self.signed = cache(lambda cut: imbalance(self.sums(cut), self.floor))

    def __len__(self) -> int:
        return len(self.tables)

    def knows(self, cut: Cut) -> bool:
        """Whether the probes have a table of the dimensions of a cut."""
        return divided(cut) in self.tables[0]

    def imbalance(self, cut: Cut) -> Tensor:
        """Of each block of a cut."""
        return self.signed(cut).abs()

    def balanced(self, cut: Cut, share: float = 1.0) -> Tensor:
        """Whether the imbalance is within this share of the tolerance."""
        return self.imbalance(cut) <= share * self.tolerance

    def beside_others(self, cut: Cut) -> Tensor:
        """The imbalance, but small for rows that hardly have an effect beside the typical one."""
        typical = self.sums(cut)[1].sqrt().median(1, keepdim=True).values
        return imbalance(self.sums(cut), self.floor + thresholds.LEAST_EFFECT * typical).abs()

    def measurable(self, cut: Cut) -> Tensor:
        """Blocks with an effect above rounding."""
        return self.sums(cut)[1].sqrt() > thresholds.MEASURABLE * self.floor


@dataclass(frozen=True)
class Trial:
    """All evidence about a parameter."""

    precision: Precision  # what counts as zero
    random: Evidence  # probes at random points, independent of each other; few of their tables are of two dimensions
    grown: Evidence  # two growths of one more point, the smaller first; may be empty
    constant: float  # largest defect that may stay as it is, where growth does not change it
    known_path: bool  # whether the graph shows that no nonlinearity lies in front of a normalization
    multiplied: bool  # whether other growing parameters multiply these in front of it

    def measurable(self, cut: Cut) -> Tensor:
        """Blocks with an effect above rounding, in all probes."""
        return torch.cat([e.measurable(cut) for e in (self.random, self.grown) if e])


@cache
def divided(cut: Cut) -> Key:
    """The dimensions that a cut divides."""
    return tuple(i for i, blocks in enumerate(cut) if blocks > 1)


def cut_of(dims: int, blocks: dict[int, int]) -> Cut:
    """The cut of so many dimensions that divides some of them."""
    return tuple(blocks.get(i, 1) for i in range(dims))


def slices(cut: Cut) -> Cut:
    """The blocks along the dimension that a cut divides most."""
    widest = max(range(len(cut)), key=lambda i: cut[i])
    return cut_of(len(cut), {widest: cut[widest]})


def block_sums(tables: Mapping[Key, Table], cut: Cut) -> Tensor:
    """The sums of `Table` on each block of a cut; if two dimensions have no table, those of the slice around it."""
    if divided(cut) not in tables:
        around = slices(cut)
        return block_sums(tables, around).reshape(4, *around).expand(4, *cut).reshape(4, -1)
    table = tables[divided(cut)]
    for dim, i in enumerate(divided(cut), 1):
        if table.shape[dim] > cut[i]:
            table = table.unflatten(dim, (cut[i], -1)).sum(dim + 1)
    return table.reshape(4, -1)


def join(tables: Sequence[Mapping[Key, Table]], cuts: Cuts) -> Mapping[Key, Table]:
    """The tables of several members as of one tensor whose dimension 0 are the slices; without cuts, of the whole."""
    if len(tables) == 1:
        return tables[0]
    joined: dict[Key, Table] = {(): torch.stack([of_member[()] for of_member in tables]).sum(0)}
    if cuts and all(divided(cut) in of_member for of_member, cut in zip(tables, cuts, strict=True)):
        joined[0,] = torch.stack([block_sums(*member) for member in zip(tables, cuts, strict=True)]).sum(0)
    return joined


def _invariant(cut: Cut, trial: Trial, *, explained: bool = True) -> Tensor:
    """Blocks whose imbalance is within its tolerance in every probe that decides and falls, as can be explained."""
    if not trial.grown:
        return trial.random.balanced(cut).all(0)
    before, after = trial.grown.signed(cut)[[0, -1]]
    special, linear = _constant(cut, trial) | _faded(cut, trial), _linear(cut, trial)
    falling = falls(before.abs(), after.abs(), trial.precision.settled)
    if trial.multiplied:
        # Two factors that grow divide a branch added beside their product by the square too, and ε's defect by the
        # fourth power.
        squares = (thresholds.GROWTH[1] / thresholds.GROWTH[0]) ** 2
        by_square = (squares * after - before).abs() <= before.abs() / 16
        falling &= ~by_square | (before.abs() <= trial.precision.resolution)
    good = special | (trial.grown.balanced(cut).all(0) & (falling | linear))
    if not explained or len(trial.grown) < 2 or not bool(good.any()):
        return good
    # What is settled at both growths needs no explanation: a row of little effect has rounding of its own. Without a
    # nonlinearity, what falls is due to ε; where samples differ, not by exactly the square.
    settled = torch.maximum(before.abs(), after.abs()) <= trial.precision.settled
    by_epsilon = settled | follows_growth(before, after, trial.precision.resolution) | trial.known_path
    return good & (by_epsilon | special | linear) & ~_saturated(cut, trial)


def _saturated(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect falls much faster than ε's, as a path around the normalization does that saturates."""
    sums, before = trial.grown.sums(cut), trial.grown.imbalance(cut)[0]
    (first, last), effect = sums[0, [0, -1]].abs(), sums[1, -1].sqrt()
    usual = (thresholds.GROWTH[0] / thresholds.GROWTH[1]) ** 2
    pace = min(float(last.median() / first.median().clamp(min=1e-300)), usual)
    fast = (before > 10 * trial.precision.settled) & (last < first * pace / thresholds.FASTER)
    fast &= effect >= thresholds.INACTIVE * effect.median()
    # A row of few numbers may act along its radius alone at some points, through ε: that is little beside the others.
    typical, tolerance = trial.random.beside_others(cut).median(0).values, trial.precision.loose
    if bool(typical.median() > thresholds.CERTAIN * tolerance):  # ε shows everywhere
        return fast
    return fast | ((typical > tolerance) & (before < typical / (thresholds.FASTER * thresholds.GROWTH[0] ** 2)))


def _constant(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect stays as it was: where another normalization undoes the growth, ε keeps its weight."""
    before, after = trial.grown.imbalance(cut)[[0, -1]]
    small = torch.cat([e.imbalance(cut) <= trial.constant for e in (trial.random, trial.grown)]).all(0)
    # A defect that grows with the row is a path around the normalization, however narrow.
    most = 4 * torch.maximum(before, before.median()).clamp(min=trial.precision.settled)
    return small & (after > before / 4) & (after <= most)


def _linear(cut: Cut, trial: Trial) -> Tensor:
    """Blocks whose defect falls with the growth itself and is small at ordinary scale: (w − mean) / (std + ε)."""
    # Anything else that is added before a normalization falls like that too, but seldom starts so small.
    before, after = trial.grown.signed(cut)[[0, -1]]
    if len(trial.grown) < 2:
        return torch.zeros_like(after, dtype=torch.bool)
    defects = trial.random.imbalance(cut)
    small = (defects <= _of_many(cut) * trial.precision.linear).all(0)
    typical = defects.median(1).values <= trial.precision.linear
    return typical.all() & small & follows_growth(before, after, trial.precision.resolution, order=1)


def _of_many(cut: Cut) -> int:
    """Multiple of a tolerance that the rows of a cut may have, 1 if they are few."""
    return thresholds.MANY_ROWS_TOLERANCE if math.prod(cut) >= thresholds.MANY_ROWS else 1


def _faded(cut: Cut, trial: Trial) -> Tensor:
    """Few blocks among others that ε dominates at one point, and that are balanced in most probes at ordinary scale."""
    # A unit of ReLU that is active once in a batch is normalized to the same number whatever its weights are: there
    # they act through ε alone. The imbalance of a unit with hardly any variance starts too high to end where others do;
    # it falls as ε does, or is next to nothing in all other probes.
    first, last = trial.grown.sums(cut)[1, [0, -1]].sqrt()  # effects
    before, after = trial.grown.imbalance(cut)[[0, -1]]
    allowed_before, allowed_after = trial.grown.tolerance[[0, -1]]
    # A unit that dies on the way was balanced before; one that was dead before cannot be judged.
    dead = [effect < thresholds.INACTIVE * effect.median() for effect in (first, last)]
    faded = dead[1] & (dead[0] | (before <= allowed_after))
    balanced = trial.random.balanced(cut).double().mean(0) > 0.5
    certain = trial.random.balanced(cut, thresholds.CERTAIN).all(0)
    # An effect ‖g ⊙ x‖ does not change when an invariant row grows, unless it is due to ε.
    faded = (faded | (last <= first * thresholds.PACE)) & balanced & (first > 0)
    high = (before > allowed_before) | (after > allowed_after)
    high |= ~falls(before, after, trial.precision.settled)
    slower = (after <= before * thresholds.GROWTH[0] / thresholds.GROWTH[1]) & trial.known_path
    falling = (after <= before * thresholds.PACE) | slower
    faded |= high & (after < trial.precision.flat) & balanced & falling
    faded |= high & (trial.grown.beside_others(cut)[-1] < trial.precision.flat) & certain
    return faded if bool(faded.double().mean() <= thresholds.MOST_FADED) else torch.zeros_like(faded)


def typical_and_worst(cut: Cut, trial: Trial) -> tuple[float, float]:
    """The imbalance of a typical row and of the worst one at random points of ordinary scale: what ε does there."""
    # With a known path, the probe is a typical one: few samples may leave a normalization hardly any variance.
    reached, of_probes = trial.random.sums(cut)[1].any(1), trial.random.imbalance(cut).median(1).values
    of_probes = of_probes[reached] if bool(reached.any()) else of_probes
    typical = of_probes.median() if trial.known_path else of_probes.max()
    return float(typical), float(trial.random.beside_others(cut).max())


def finest(shape: Sequence[int], trial: Trial) -> Cut | None:
    """The cut with most rows, of two entries or more, all of which are invariant; None if the whole tensor is not."""
    # A cut that holds implies every coarser one, so each dimension is divided by itself, and two together where each
    # can be and their table exists. The first dimensions are preferred between equals.
    whole = (1,) * len(shape)
    # In the sum of all rows, one of hardly any variance may dominate the others.
    if not bool(_invariant(whole, trial, explained=False).all()) and not slices_balanced(shape, trial):
        return None
    most = {i: g for i in range(len(shape)) if (g := _most_blocks(shape, i, trial)) > 1}
    found = [cut_of(len(shape), {i: g}) for i, g in most.items()]
    if _holds(whole, trial):
        found.append(whole)
    for i, j in combinations(most, 2):
        if (trial.grown or trial.random).knows(cut_of(len(shape), {i: most[i], j: most[j]})):
            blocks = product(divisors(most[i])[1:], divisors(most[j])[1:])
            cuts = sorted((cut_of(len(shape), {i: a, j: b}) for a, b in blocks), key=math.prod, reverse=True)
            found += [next((cut for cut in cuts if math.prod(shape) > math.prod(cut) and _holds(cut, trial)), whole)]
    return max(found, key=lambda cut: (math.prod(cut), cut), default=None)


def pair_keys(shape: Sequence[int], trial: Trial) -> list[Key]:
    """Pairs of dimensions that can each be divided alone: their common table is worth its memory."""
    if not _holds((1,) * len(shape), trial) or math.prod(shape) <= 4:
        return []
    return list(combinations([i for i in range(len(shape)) if _most_blocks(shape, i, trial) > 1], 2))


def slices_balanced(shape: Sequence[int], trial: Trial) -> bool:
    """Whether so many slices along some dimension are balanced that it cannot be chance."""
    # Where the rows are small, ε leaves a defect of several percent: too much to judge one row by, but not hundreds.
    # Defects due to ε are distributed like a normal variable, so that hardly any is four times the typical one.
    for dim, size in enumerate(shape):
        cut, tolerance = cut_of(len(shape), {dim: size}), trial.precision.loose
        if thresholds.MANY_ROWS <= size < math.prod(shape) and trial.random.knows(cut):
            probes = zip(trial.random.imbalance(cut), trial.random.measurable(cut), strict=True)
            sorted_defects = [defects[counts].sort().values for defects, counts in probes]
            if all(
                len(defects) >= thresholds.MANY_ROWS
                and bool(defects[len(defects) // 2] <= 2 * tolerance)
                and bool(defects[int(0.98 * (len(defects) - 1))] <= 8 * tolerance)
                for defects in sorted_defects
            ):
                return True
    return False


def partial_cut(shape: Sequence[int], trial: Trial) -> tuple[int, list[int]] | None:
    """Into how many blocks dimension 0 is cut and which are invariant, as (3, [0, 1]); None if too few are."""
    # The cut that leaves least out and then the coarsest, as in a fused query-key-value weight under QK-norm.
    best: tuple[int, list[int]] | None = None
    for blocks in divisors(shape[0])[1:-1]:
        cut = cut_of(len(shape), {0: blocks})
        # Among so many blocks some are balanced by chance, up to the tolerance of a candidate: only a tighter one
        # counts, an effect in every probe, and others that are not nearly balanced too.
        reached = trial.measurable(cut).all(0)
        good = _invariant(cut, trial) & reached & trial.random.balanced(cut, thresholds.CERTAIN).all(0)
        others = (trial.grown or trial.random).imbalance(cut)[-1][reached & ~good]
        found = good.nonzero().flatten().tolist()
        tells = len(found) > 0 and len(others) > 0 and bool(others.median() > trial.precision.loose)
        if tells and (best is None or len(found) * best[0] > len(best[1]) * blocks):
            best = blocks, found
    return best if best is not None and len(best[1]) * thresholds.LEAST_BLOCKS >= best[0] else None


def to_spec(cut: Cut, shape: Sequence[int]) -> Spec:
    """A cut as plain data.

    >>> to_spec((8, 1), (8, 3)), to_spec((4, 1), (8, 3)), to_spec((1, 3), (8, 3)), to_spec((2, 3, 1), (8, 3, 5))
    ('filter', 4, ('axis', 1), ('grid', 2, -1))
    """
    key = divided(cut)
    if not key:
        return "filter" if shape and shape[0] == 1 else "tensor"
    if key == (0,):
        return "filter" if cut[0] == shape[0] else cut[0]
    if len(key) == 1 and cut[key[0]] == shape[key[0]]:
        return ("axis", key[0])
    blocks = cut[: key[-1] + 1]
    return ("grid", *(-1 if g == size and g > 1 else g for g, size in zip(blocks, shape, strict=False)))


@cache
def divisors(n: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [g for g in range(1, math.isqrt(n) + 1) if n % g == 0]
    return (*small, *(n // g for g in reversed(small) if g * g < n))


def _most_blocks(shape: Sequence[int], dim: int, trial: Trial) -> int:
    """Into how many blocks a dimension can be divided; 1 if it cannot."""
    for blocks in reversed(divisors(shape[dim])):
        cut = cut_of(len(shape), {dim: blocks})
        if math.prod(shape) > blocks > 1 and trial.random.knows(cut) and _holds(cut, trial):
            return blocks
    return 1


def _holds(cut: Cut, trial: Trial) -> bool:
    """Whether all rows of a cut are invariant."""
    if not bool(_invariant(cut, trial).all()):
        return False
    # What becomes invariant as it grows, as GELU becomes ReLU, shows at ordinary scale; with many rows, in how the
    # defects fall.
    if trial.grown and typical_and_worst(cut, trial)[0] > _of_many(cut) * trial.precision.loose:
        return False
    # A cut is evidence only if two of its rows have an effect: with one, it is no finer than the whole.
    return int(trial.measurable(cut).any(0).sum()) >= min(2, math.prod(cut))

"""Sets of parameters whose ⟨∇L, x⟩ cancel: those that the graph proposes, and small ones found by trying."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from .align import Alignment, alignments
from .defects import MANY, falls
from .graph import members
from .joint import TELLING, Indices, Matrix, Parts, zero_sums
from .probe import Reading
from .survey import LEAST_SHARE, Survey

__all__ = ["proposed_sets", "slices_fall", "vanishes", "vanishing_sets"]

_LARGER_SETS = 0.03
_PART = 0.01


def vanishing_sets(
    survey: Survey, readings: Sequence[Reading], allowed: Sequence[float], names: list[str], *, least: float = TELLING
) -> list[Indices]:
    """Sets of parameters whose sums vanish because their parts cancel.

    Sets that the graph proposes may contain parameters that look balanced alone: beside a small bias, the
    weight nearly is. Other sets are sought among the unbalanced.

    Args:
        survey: all readings.
        readings: where sums must vanish.
        allowed: up to what, per reading.
        names: the parameters, which a set gives by their numbers.
        least: as in `Parts.cancels`, for the sets that are proposed.
    """
    M, sizes = survey.matrices(readings, names)
    found: set[Indices] = set()
    for proposed in proposed_sets(survey, names):
        for indices in _by_residue(M, {_essential(M, proposed), proposed}):
            if len(indices) > 1 and vanishes(survey, readings, allowed, [names[i] for i in indices], least=least):
                found.add(indices)
                break
    place = [i for i, name in enumerate(names) if not survey.invariant_near(name)]
    # Among thousands of sets, float32 finds some that vanish by chance.
    most = 4 if survey.prober.precision.dtype == torch.float64 else 2
    for s in zero_sums(M[:, place], sizes[:, place], allowed, most=most, larger=_LARGER_SETS):
        indices = tuple(place[i] for i in s)
        members_of_set = [names[i] for i in indices]
        if _whole_parts(survey, _hearing(readings, members_of_set), members_of_set).cancels():
            found.add(indices)
    return list(found)


def vanishes(
    survey: Survey,
    readings: Sequence[Reading],
    allowed: Sequence[float],
    names: Sequence[str],
    independent: Sequence[Reading] | None = None,
    *,
    least: float = TELLING,
) -> bool:
    """Whether the sum of a set vanishes because its parts cancel: as a whole, or in a typical shared slice.

    Args:
        survey: all readings.
        readings: where it must vanish.
        allowed: up to what, per reading.
        names: the set.
        independent: readings that tell whether parts cancel, if not the same.
        least: as in `Parts.cancels`.
    """
    heard = _hearing(readings, names)
    allowed = [limit for limit, reading in zip(allowed, readings, strict=True) if any(reading is one for one in heard)]
    readings, independent = heard, _hearing(independent or readings, names)
    shapes = [survey.shape(name) for name in names]
    views = (None, *(a for a in alignments(shapes) if a.slices >= MANY))
    here = (_parts(survey, readings, names, view) for view in views)
    if not any(parts is not None and parts.balanced(allowed) for parts in here):
        return False
    there = (_parts(survey, independent, names, view) for view in views)
    return any(parts is not None and parts.cancels(least) for parts in there)


def slices_fall(survey: Survey, readings: Sequence[Reading], names: Sequence[str]) -> bool:
    """Whether what is left of a typical shared slice falls as ε does, from the second reading to the first."""
    settled = survey.prober.precision.settled
    for alignment in alignments([survey.shape(name) for name in names]):
        parts = _parts(survey, readings, names, alignment) if alignment.slices >= MANY else None
        if parts is not None and len(readings) > 1:
            after, before = torch.tensor(parts.typical(), device="cpu")[:, None]
            if bool(falls(before, after, settled)):
                return True
    return False


def _hearing(readings: Sequence[Reading], names: Sequence[str]) -> list[Reading]:
    """The readings that reach a set: chance or the data may lead past it. All of them if none does."""
    return [reading for reading in readings if any(map(reading.slope, names))] or list(readings)


def _whole_parts(survey: Survey, readings: Sequence[Reading], names: Sequence[str]) -> Parts:
    """What whole parameters add to the sum of a set."""
    parts = _parts(survey, readings, names, None)
    assert parts is not None
    return parts


def _parts(
    survey: Survey, readings: Sequence[Reading], names: Sequence[str], alignment: Alignment | None
) -> Parts | None:
    """What each member adds in each slice, or as a whole; None where a probe has no table of the slices."""
    rows, floor = [], []
    for reading in readings:
        of_names = [reading.tables[name] for name in names]
        tables = [t[()] for t in of_names]
        if alignment is not None:
            found = [alignment.table(t, survey.shape(name)) for t, name in zip(of_names, names, strict=True)]
            tables = [t for t in found if t is not None]
            if len(tables) < len(names):
                return None
        rows.append([t[:2].reshape(2, -1).numpy() for t in tables])
        floor.append(0.0 if alignment is None else 10 * max(survey.floor(reading, name) for name in names))
    sums = np.array(rows)
    parts, effects = sums[:, :, 0], np.sqrt(sums[:, :, 1])
    return Parts(parts, np.hypot(parts, LEAST_SHARE * effects), np.array(floor))


def proposed_sets(survey: Survey, names: Sequence[str]) -> list[Indices]:
    """The sets that the graph proposes, and the parameters of each module, as far as they lie in names.

    What is not in names has no effect, so it may grow or not.
    """
    place = {name: i for i, name in enumerate(names)}
    sets = [members(mask, survey.order()) for mask in survey.proposals.sets] + _owned(survey)
    found = {tuple(sorted(place[name] for name in s if name in place)) for s in sets}
    return sorted(indices for indices in found if len(indices) > 1)


def _owned(survey: Survey) -> list[tuple[str, ...]]:
    """Parameters of one module, for graphs that hide their inside."""
    owners: dict[str, list[str]] = {}
    for name in survey.prober.trainable:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return [tuple(names) for names in owners.values()]


def _essential(M: Matrix, indices: Indices) -> Indices:
    """The members that take part in a sum; a row that is invariant alone adds only its defect."""
    part = np.abs(M[:, list(indices)])
    counts = (part > _PART * np.sqrt(np.square(part).sum(1, keepdims=True))).any(0)
    return tuple(i for i, takes_part in zip(indices, counts, strict=True) if takes_part)


def _by_residue(M: Matrix, sets: Collection[Indices]) -> list[Indices]:
    """The sets, smaller first, unless a larger one leaves much less: then what it has more takes part."""
    residue = {s: float(np.abs(M[:, list(s)].sum(1)).max(initial=0)) for s in sets}
    small, *larger = sorted(sets, key=len)
    return [*larger, small] if larger and residue[larger[0]] < residue[small] / 4 else [small, *larger]

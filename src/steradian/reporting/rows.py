"""Single rows: histograms over the rows of a group, and trajectories of single rows on the sphere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from steradian.reporting.lines import Floats, Integers

__all__ = ["Histogram", "Sphere", "Trajectory", "cosines", "histograms", "spheres", "trajectories"]

BINS, FEWEST_BINS = 80, 16
MOST_STEPS, FEWEST_STEPS = 24, 2
HISTOGRAM_BUDGET = 400_000  # numbers in all histograms, counts and edges
SHOWN = ("effective_lr", "angle", "radius", "update", "gradient_norm", "defect")
MOST_POINTS = 300
MOST_ROWS = 4  # of a group
MOST_SPHERES = 40
MOST_FITTED = 300  # points from which the principal directions are computed


@dataclass(frozen=True, eq=False)
class Histogram:
    """The distribution of one quantity over the rows of one group, in all runs, with common bins."""

    quantity: str
    group: str
    edges: Floats  #: of as many bins as all histograms of a page have
    log: bool  #: the bins are equal in the logarithm
    counts: list[dict[str, Any]]  #: for each "run", the rows in each bin "at" its "steps", (steps, bins)


def whole_steps(step: Integers, most: int = MOST_STEPS) -> list[int]:
    """Steps at which all rows of a group were recorded, at most `most` of them with the first and the last.

    `step` is that of each recorded row. Steps with fewer rows do not count: single rows may be recorded more often.
    """
    steps, sizes = np.unique(step, return_counts=True)
    steps = steps[sizes == sizes.max()]
    if len(steps) > most:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    return [int(each) for each in steps]


def histograms(runs: Sequence[pd.DataFrame]) -> list[Histogram]:
    """Histograms of the quantities in `SHOWN` for every group with several recorded rows; `runs`: each one's rows."""
    found: dict[tuple[str, str], list[tuple[int, list[int], list[Floats]]]] = {}
    chosen = [rows[rows["quantity"].isin(SHOWN)] for rows in runs]
    parts = [rows.groupby(["quantity", "group"], observed=True, sort=False) for rows in chosen]
    each_has = HISTOGRAM_BUDGET // max(sum(each.ngroups for each in parts), 1)
    most = max(FEWEST_STEPS, min(MOST_STEPS, each_has // BINS - 1))
    bins = max(FEWEST_BINS, min(BINS, each_has // (most + 1)))
    for number, each in enumerate(parts):
        for (quantity, group), part in each:
            step, value = part["step"].to_numpy(np.int64), part["value"].to_numpy(float)
            steps = whole_steps(step, most)
            samples = [value[(step == at) & np.isfinite(value)] for at in steps]
            if max(map(len, samples)) > 1:
                found.setdefault((str(quantity), str(group)), []).append((number, steps, samples))
    made = []
    for (quantity, group), of in found.items():
        edges, log = _edges(np.concatenate([values for *_, samples in of for values in samples]), bins)
        counts = []
        for number, steps, samples in of:
            at = np.array([np.histogram(values, edges)[0] for values in samples], dtype=float)
            counts.append({"run": number, "steps": steps, "at": at})
        made.append(Histogram(quantity, group, edges, log, counts))
    return made


def _edges(values: Floats, bins: int) -> tuple[Floats, bool]:
    """Bins from the smallest to the largest value, equal in the logarithm where the values span a factor of 4."""
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low >= 4:
        return np.geomspace(low, high, bins + 1), True
    room = 0.0 if high > low else abs(high) / 100 or 1.0
    return np.linspace(low - room, high + room, bins + 1), False


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The directions u of one row in one run: run number, steps (n,), directions (n, d)."""

    run: int
    steps: Integers
    directions: Floats


@dataclass(frozen=True, eq=False)
class Path3:
    """A trajectory in three dimensions."""

    run: int  #: run number
    steps: Integers  #: (n,)
    points: Floats  #: (n, 3), inside the unit ball
    turned: float  #: the angle between its first and last direction, in radians
    travelled: float  #: the sum of the angles between recorded directions, a lower bound of the path's length


@dataclass(frozen=True, eq=False)
class Sphere:
    """One row's trajectories, one per run, in the three principal directions that all runs share."""

    group: str
    row: int
    size: int  #: d, the dimension of the space in which the sphere lies
    kept: float  #: share of the squared length that the three directions hold, averaged over points
    moved: float  #: share of the motion, the squared distance from the mean direction, that they hold
    paths: list[Path3]


def trajectories(runs: Sequence[pd.DataFrame]) -> dict[tuple[str, int], list[Trajectory]]:
    """The trajectories in each run's paths by group and row; at most `MOST_POINTS` points of each, evenly chosen."""
    found: dict[tuple[str, int], list[Trajectory]] = {}
    for number, paths in enumerate(runs):
        for key, part in paths.groupby(["group", "row"], observed=True, sort=False):
            group, row = str(key[0]), int(str(key[1]))
            kept = part.drop_duplicates("step", keep="last").sort_values("step")
            # Strides are powers of two, so that longer and shorter runs share steps.
            stride = 2 ** max(0, math.ceil(math.log2(len(kept) / MOST_POINTS)))
            kept = kept.iloc[np.union1d(np.arange(0, len(kept), stride), len(kept) - 1)]
            directions = np.stack([np.asarray(u, dtype=float) for u in kept["direction"]])
            good = np.isfinite(directions).all(1) & directions.any(1)  # a row that collapsed has no direction
            if good.sum() >= 2:
                steps = kept["step"].to_numpy(np.int64)[good]
                found.setdefault((group, row), []).append(Trajectory(number, steps, directions[good]))
    return found


def principal_directions(points: Floats, weights: Floats) -> Floats:
    """The three orthonormal directions that hold most of the weighted squared length of `points` (n, d): (d, 3).

    They are not taken about the mean: the projection is then linear, and the unit sphere falls into the unit ball.
    """
    found = np.linalg.svd(points * np.sqrt(weights)[:, None], full_matrices=False)[2][:3]
    return np.pad(found.T, ((0, 0), (0, 3 - len(found))))


def spheres(found: dict[tuple[str, int], list[Trajectory]]) -> list[Sphere]:
    """Every recorded row in three dimensions, a few of each group."""
    chosen: list[Sphere] = []
    per_group: dict[str, int] = {}
    for (group, row), runs in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        per_group[group] = per_group.get(group, 0) + 1
        if per_group[group] <= MOST_ROWS and len(chosen) < MOST_SPHERES:
            size = runs[0].directions.shape[1]
            chosen.append(_sphere(group, row, [run for run in runs if run.directions.shape[1] == size]))
    return chosen


def _sphere(group: str, row: int, runs: Sequence[Trajectory]) -> Sphere:
    points = np.concatenate([run.directions for run in runs])
    weights = np.concatenate([np.full(len(run.steps), 1 / (len(runs) * len(run.steps))) for run in runs])
    every = slice(None, None, -(-len(points) // MOST_FITTED))
    basis = principal_directions(points[every], weights[every])

    def share(of: Floats) -> float:
        """Of the squared length, that the basis holds."""
        kept, whole = (float(weights @ (each**2).sum(1)) for each in (of @ basis, of))
        return min(kept / max(whole, 1e-300), 1.0)

    paths = []
    for run in runs:
        u = run.directions
        turned, travelled = float(_angle(u[:1], u[-1:])[0]), float(_angle(u[:-1], u[1:]).sum())
        paths.append(Path3(run.run, run.steps, u @ basis, turned, travelled))
    return Sphere(group, row, points.shape[1], share(points), share(points - weights @ points), paths)


def _angle(u: Floats, p: Floats) -> Floats:
    """Angles between unit rows, exact also for small ones: 2 atan2(‖u − p‖, ‖u + p‖)."""
    return 2 * np.arctan2(np.linalg.norm(u - p, axis=1), np.linalg.norm(u + p, axis=1))


def cosines(group: str, row: int, runs: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """⟨u, u'⟩ of the same row in two runs, at the steps that both have: "runs", "steps", and "at", the cosines."""
    found = []
    for one, two in combinations(runs, 2):
        steps, i, j = np.intersect1d(one.steps, two.steps, return_indices=True)
        if len(steps) and one.directions.shape[1] == two.directions.shape[1]:
            cosine = np.cos(_angle(one.directions[i], two.directions[j]))
            found.append({"group": group, "row": row, "runs": [one.run, two.run], "steps": steps, "at": cosine})
    return found

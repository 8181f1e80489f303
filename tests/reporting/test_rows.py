"""Single rows: histograms count each once, spheres keep lengths, comparisons are cosines."""

import numpy as np
import pandas as pd
import pytest

from steradian.reporting.rows import (
    BINS,
    HISTOGRAM_BUDGET,
    MOST_POINTS,
    MOST_STEPS,
    Trajectory,
    cosines,
    histograms,
    principal_directions,
    spheres,
    trajectories,
    whole_steps,
)


def rows(n=30, steps=(0, 50, 100), followed=None, scale=1.0, seed=0):
    data = np.random.default_rng(seed)
    lines = [(s, "a", "angle", row, scale * v) for s in steps for row, v in enumerate(data.lognormal(size=n))]
    if followed is not None:
        lines += [(s, "a", "angle", followed, 0.5) for s in range(100) if s not in steps]
    table = pd.DataFrame(lines, columns=["step", "group", "quantity", "row", "value"])
    return table.astype({"group": "category", "quantity": "category"})


def test_every_row_is_counted_once_at_the_steps_that_have_all():
    (found,) = histograms([rows(followed=3), rows(steps=(0, 60), scale=5.0)])
    assert found.log
    assert [(counts["run"], counts["steps"]) for counts in found.counts] == [(0, [0, 50, 100]), (1, [0, 60])]
    for counts in found.counts:
        assert counts["at"].shape == (len(counts["steps"]), BINS)
        assert (counts["at"].sum(1) == 30).all()


def test_many_steps_are_thinned_with_the_first_and_the_last():
    steps = whole_steps(rows(steps=range(200))["step"].to_numpy())
    assert len(steps) <= MOST_STEPS
    assert (steps[0], steps[-1]) == (0, 199)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
def test_rows_that_are_all_alike_have_a_histogram(value):
    table = rows()
    table["value"] = value
    (found,) = histograms([table])
    assert not found.log
    assert (found.counts[0]["at"].sum(1) == 30).all()


def test_histograms_of_many_layers_stay_within_their_budget():
    one = rows(n=4, steps=(0, 10, 20, 30))
    table = pd.concat([one.assign(group=f"layer {k}") for k in range(4500)]).astype({"group": "category"})
    found = histograms([table])
    assert len(found) == 4500
    assert sum(len(each.edges) - 1 + each.counts[0]["at"].size for each in found) <= HISTOGRAM_BUDGET
    assert {tuple(each.counts[0]["steps"]) for each in found} == {(0, 30)}
    assert all((each.counts[0]["at"].sum(1) == 4).all() for each in found)


def test_a_single_row_has_none():
    assert histograms([rows(n=1), rows(n=0)]) == []


def circle(d=7, steps=50, start=0.0, seed=0):
    """A trajectory in a random plane."""
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, 2)))[0]
    t = start + np.linspace(0, 2, steps)
    return np.stack([np.cos(t), np.sin(t)], 1) @ basis.T


def paths(directions, group="a", row=0, steps=None):
    steps = range(len(directions)) if steps is None else steps
    return pd.DataFrame({"step": list(steps), "group": group, "row": row, "direction": list(directions)})


@pytest.mark.parametrize("d", [2, 3, 7, 300])
def test_a_path_in_few_dimensions_is_seen_whole(d):
    u = circle(d)
    (sphere,) = spheres(trajectories([paths(u)]))
    (path,) = sphere.paths
    assert sphere.size == d
    assert (sphere.kept, sphere.moved) == (pytest.approx(1), pytest.approx(1))
    np.testing.assert_allclose(path.points @ path.points.T, u @ u.T, atol=1e-9)
    assert path.turned == pytest.approx(2)
    assert path.travelled == pytest.approx(2)


def test_runs_share_their_directions():
    one, two = circle(9, seed=1), circle(9, seed=1, start=0.5)
    (sphere,) = spheres(trajectories([paths(one), paths(two)]))
    first, second = sphere.paths
    np.testing.assert_allclose(first.points @ second.points.T, one @ two.T, atol=1e-9)


def test_the_directions_are_eigenvectors_of_the_weighted_squares():
    data = np.random.default_rng(0)
    for shape in ((40, 9), (20, 60)):
        points, weights = data.normal(size=shape), data.uniform(size=shape[0])
        mine = principal_directions(points, weights)
        twin = np.linalg.eigh(points.T @ np.diag(weights) @ points)[1][:, -3:]
        np.testing.assert_allclose(mine @ mine.T, twin @ twin.T, atol=1e-8)


def test_shares_are_shares_and_collapsed_rows_are_left_out():
    u = np.random.default_rng(0).normal(size=(500, 40))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    u[7] = np.nan
    (sphere,) = spheres(trajectories([paths(u)]))
    assert 0 < sphere.moved <= sphere.kept < 0.5
    assert len(sphere.paths[0].steps) <= MOST_POINTS + 1
    assert np.isfinite(sphere.paths[0].points).all()
    assert (np.linalg.norm(sphere.paths[0].points, axis=1) <= 1 + 1e-9).all()


def test_cosines_are_between_the_same_steps():
    one, two = circle(5, seed=2), circle(5, seed=2, start=0.3)
    steps = np.arange(50)
    (found,) = cosines("a", 0, [Trajectory(0, steps, one), Trajectory(2, 10 + steps, two)])
    assert found["runs"] == [0, 2]
    assert found["steps"].tolist() == list(range(10, 50))
    np.testing.assert_allclose(found["at"], (one[10:] * two[:40]).sum(1), atol=1e-12)


def test_runs_of_different_length_share_steps_after_thinning():
    u = circle(4, steps=2000)
    found = trajectories([paths(u), paths(u[:900])])["a", 0]
    (compared,) = cosines("a", 0, found)
    assert len(compared["steps"]) > 100
    np.testing.assert_allclose(compared["at"], 1)

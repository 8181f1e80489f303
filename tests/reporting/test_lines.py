"""Lines over time keep their extremes, their drops and their meaning."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate import unpack

from steradian.reporting.data import MANY, Pack
from steradian.reporting.lines import FEWEST_POINTS, POINTS, aggregate, buckets, schedule
from steradian.watching.records import COLUMNS, STATISTICS


def table(steps=3000, groups=("a", "b"), seed=0):
    """Three quantities with all statistics, one of them at every seventh step only, a rate that drops, and a loss."""
    data, lines = np.random.default_rng(seed), []
    for group in groups:
        for quantity, every in (("radius", 1), ("angle", 1), ("nu", 7)):
            for step in range(0, steps, every):
                values = np.sort(data.lognormal(size=6))
                lines += [("r", step, group, quantity, s, v) for s, v in zip(STATISTICS, values, strict=True)]
        lines += [("r", step, group, "lr", "mean", 0.1 if step < 1711 else 0.01) for step in range(steps)]
    lines += [("r", step, "", "loss", "mean", float(data.normal())) for step in range(steps)]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def test_extremes_survive_and_averages_are_averages():
    records = table()
    lines = aggregate(records, points=100)
    for (quantity, group), part in records[records["group"] != ""].groupby(["quantity", "group"]):
        of = lines.values[quantity][group]
        wide = part.pivot(index="step", columns="statistic", values="value")
        if quantity == "lr":
            assert set(of) == {"mean"}
            continue
        assert np.nanmin(of["min"]) == wide["min"].min()
        assert np.nanmax(of["max"]) == wide["max"].max()
        assert (wide["median"].min() <= of["median"][np.isfinite(of["median"])]).all()


def test_a_bucket_is_what_pandas_makes_of_its_steps():
    records = table(steps=500)
    lines = aggregate(records, points=40)
    steps = np.sort(records["step"].unique())
    starts = buckets(steps, 40, [drop.step for drop in lines.drops])
    part = records[(records["quantity"] == "nu") & (records["group"] == "b")]
    bucket = np.searchsorted(starts, np.searchsorted(steps, part["step"]), side="right") - 1
    for statistic, how in (("min", "min"), ("max", "max"), ("q10", "mean"), ("median", "mean"), ("mean", "mean")):
        mask = part["statistic"] == statistic
        twin = part["value"][mask].groupby(bucket[mask]).agg(how)
        line = lines.values["nu"]["b"][statistic]
        np.testing.assert_allclose(line[twin.index], twin.to_numpy(), rtol=1e-12)
        assert np.isfinite(line).sum() == len(twin)


def test_a_drop_of_the_rate_stays_sharp():
    for points in (60, 25):
        lines = aggregate(table(), points=points)
        assert [(drop.step, drop.factor) for drop in lines.drops] == [(1711, 0.1)]
        assert set(lines.values["lr"]["a"]["mean"].round(12)) == {0.1, 0.01}


def test_few_steps_are_kept_as_they_are():
    records = table(steps=30)
    lines = aggregate(records, points=480)
    assert lines.steps.tolist() == list(range(30))
    one = records[(records["quantity"] == "angle") & (records["group"] == "a") & (records["statistic"] == "q90")]
    np.testing.assert_array_equal(lines.values["angle"]["a"]["q90"], one["value"])


def test_a_quantity_of_the_run_shows_what_its_average_hides():
    records = table(steps=1000)
    loss = aggregate(records, points=50).values["loss"][""]
    raw = records.loc[records["quantity"] == "loss", "value"]
    assert (loss["min"].min(), loss["max"].max()) == (raw.min(), raw.max())
    assert (loss["min"] <= loss["mean"]).all()


def test_what_is_not_finite_is_a_gap():
    records = table(steps=20, groups=("a",))
    records.loc[(records["quantity"] == "angle") & (records["step"] == 3), "value"] = np.inf
    angle = aggregate(records).values["angle"]["a"]["max"]
    assert np.isnan(angle[3])
    assert np.isfinite(np.delete(angle, 3)).all()


@given(st.integers(1, 5000), st.integers(10, 500), st.lists(st.integers(0, 5000), max_size=5))
def test_buckets_cover_every_step_once(count, points, edges):
    starts = buckets(np.arange(count), points, edges)
    assert starts[0] == 0
    assert (np.diff(starts) > 0).all()
    assert starts[-1] < count
    assert len(starts) <= points + len(edges)
    assert {edge for edge in edges if edge < count} <= set(starts.tolist()) or count <= points


def test_many_runs_have_fewer_points_and_keep_the_extremes():
    one, many = (aggregate(table(), runs=runs) for runs in (1, 1000))
    assert (len(one.steps), len(many.steps)) == (pytest.approx(POINTS, abs=1), pytest.approx(FEWEST_POINTS, abs=1))
    assert many.values["radius"]["a"]["max"].max() == one.values["radius"]["a"]["max"].max()


def one_cycle(t):
    return np.where(t < 0.3, 0.04 + 0.96 * (1 - np.cos(np.pi * t / 0.3)) / 2, (1 + np.cos(np.pi * (t - 0.3) / 0.7)) / 2)


SMOOTH = {
    "cosine": lambda t: (1 + np.cos(np.pi * t)) / 2,
    "one cycle": one_cycle,
    "warm-up": lambda t: np.minimum(t / 0.1, 1) * (1 + np.cos(np.pi * t)) / 2,
    "short warm-up": lambda t: np.minimum(t / 0.002, 1.0),
    "linear": lambda t: 1 - t,
    "decay at the end": lambda t: np.minimum(1, (1 - t) / 0.2),
    "exponential": lambda t: np.exp(-9 * t),
    "inverse root": lambda t: 1 / np.sqrt(np.maximum(t, 1e-4)),
}


@pytest.mark.parametrize("interval", [1, 10, 50, 200])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_smooth_schedule_has_no_jump_however_sparsely_it_is_observed(name, interval):
    steps = np.unique(np.concatenate([np.arange(20), np.arange(0, 5001, interval)]))
    rate = 3e-3 * SMOOTH[name](steps / 5000)
    for end in (25, len(steps) // 2, len(steps)):  # also while the training runs
        assert schedule(steps[:end], rate[:end]) == []


@pytest.mark.parametrize("interval", [1, 10, 50, 200])
def test_an_isolated_jump_is_found_at_the_first_observed_step_after_it(interval):
    steps = np.unique(np.concatenate([np.arange(20), np.arange(0, 5001, interval)]))
    drops = schedule(steps, np.where(steps < 2500, 1.0, np.where(steps < 3750, 0.1, 0.01)))
    assert [(drop.step, drop.factor) for drop in drops] == [
        (steps[steps >= 2500][0], 0.1),
        (steps[steps >= 3750][0], 0.1),
    ]
    restarts = schedule(steps, (1.1 + np.cos(np.pi * (steps % 2500) / 2500)) / 2)
    assert [drop.step for drop in restarts] == [steps[steps >= 2500][0]]


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=50))
def test_packed_numbers_come_back(values):
    pack = Pack()
    first, second = pack.add(values), pack.add([np.inf, 1.5])
    back = unpack(pack.text())
    np.testing.assert_allclose(back[first:second], np.array(values, np.float32), rtol=2**-16, atol=1e-37)
    assert np.isnan(back[second])
    assert back[second + 1] == 1.5


def test_many_numbers_have_eleven_binary_digits():
    pack, values = Pack(), np.random.default_rng(0).lognormal(sigma=9, size=MANY + 1).astype(np.float32)
    pack.add(values)
    error = np.abs(unpack(pack.text()) / values - 1)
    assert 2**-13 < error.max() <= 2**-11

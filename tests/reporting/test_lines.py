"""Lines over time keep their extremes, their drops and their meaning."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steradian.reporting.data import Pack, unpack
from steradian.reporting.lines import Lines, aggregate, buckets, coarsen, schedule
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
    lines = aggregate(table(), points=60)
    assert [(drop.step, drop.factor) for drop in lines.drops] == [(1711, 0.1)]
    for reduced in (lines, coarsen(lines, 25)):
        assert set(reduced.values["lr"]["a"]["mean"].round(12)) == {0.1, 0.01}


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


def test_coarser_lines_keep_the_extremes():
    lines = aggregate(table(), points=200)
    coarse = coarsen(lines, 30)
    assert len(coarse.steps) <= 31
    assert coarse.values["radius"]["a"]["max"].max() == lines.values["radius"]["a"]["max"].max()
    assert isinstance(coarse, Lines)
    assert coarse.count() == lines.count()


def test_a_warm_up_is_no_drop_and_a_restart_is():
    rate = np.concatenate([np.linspace(0.02, 1, 200), np.cos(np.linspace(0, 1.5, 300)), np.ones(10)])
    assert [drop.step for drop in schedule(np.arange(510), rate) if drop.step > 20] == [500]


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=50))
def test_packed_numbers_come_back(values):
    pack = Pack()
    first, second = pack.add(values), pack.add([np.inf, 1.5])
    back = unpack(pack.text(), first, len(values))
    np.testing.assert_allclose(back, np.array(values, np.float32), rtol=2**-16, atol=1e-37)
    assert np.isnan(unpack(pack.text(), second, 2)[0])
    assert unpack(pack.text(), second, 2)[1] == pytest.approx(1.5)

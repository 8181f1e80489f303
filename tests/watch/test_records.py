"""The one table."""

import numpy as np
import pytest

from steradian.watch.records import COLUMNS, STATISTICS, Records, statistics


def test_statistics_are_numpys():
    values = np.random.default_rng(0).normal(size=101)
    found = statistics(values)
    assert tuple(found) == STATISTICS
    assert found["q10"] == pytest.approx(np.quantile(values, 0.1))
    assert found["mean"] == pytest.approx(values.mean())
    assert (found["min"], found["max"]) == (values.min(), values.max())


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="at least one row"):
        statistics([])


def test_the_table_has_one_line_per_statistic():
    records = Records("run")
    records.add(3, "conv.weight", {"radius": [1.0, 2.0], "angle": [0.1]})
    table = records.table()
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 2 * len(STATISTICS)
    assert set(table["step"]) == {3}

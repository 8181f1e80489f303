"""Intervals and Holm's correction, against scipy and by hand."""

import numpy as np
import pytest
from scipy import stats

from steradian.lab.tables import Cell, Difference, compare, holm


def test_holm_compares_the_smallest_p_with_the_number_of_tests():
    assert holm([0.04, 0.001, 0.02, 0.5]) == pytest.approx([0.08, 0.004, 0.06, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_intervals_are_those_of_students_t():
    values = [1.0, 1.3, 0.8, 1.1]
    cell = Cell.of(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (cell.mean - cell.half, cell.mean + cell.half) == pytest.approx((low, high))
    assert np.isnan(Cell.of([1.0]).half)


def test_a_difference_has_welchs_interval_and_p():
    a, b = np.random.default_rng(0).normal(0, [[1.0], [3.0]], (2, 6))
    found, test = Cell.of(a).minus(Cell.of(b)), stats.ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, test.pvalue))
    assert Cell.of([1.0, 1.0]).minus(Cell.of([2.0, 2.0])) == Difference(-1.0, -1.0, -1.0, 0.0)


def test_no_difference_is_said_only_within_the_margin():
    base = [90.0, 90.1, 89.9, 90.0, 90.05]
    samples = {"base": base, "same": [v + 0.05 for v in base], "above": [v + 0.5 for v in base]}
    samples |= {"noisy": [88.0, 92.0, 90.0, 91.0, 89.0], "one": [91.0], "none": []}
    found = {name: row[-1] for name, row in compare(samples, "base", margin=0.3).items()}
    assert found == {
        "base": "",
        "same": "no difference",
        "above": "better",
        "noisy": "not decided",
        "one": "",
        "none": "",
    }
    assert compare(samples, "base", better="smaller")["above"][-1] == "worse"
    assert compare(samples, "missing")["above"][2:] == ["", "", "", ""]
    assert compare(samples, "base", margin=0.3)["none"][0] == "diverged"

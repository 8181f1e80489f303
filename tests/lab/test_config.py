"""Configurations and the paper's tables: permanent keys, scaled milestones, complete tables."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from steradian.lab import paper
from steradian.lab.config import Config, match_name
from steradian.lab.registry import METHODS

CONFIG = Config(model="ResNet20", data="cifar10", method="Adam w/o (ab)", lr=1e-3, weight_decay=1.25e-4)


def test_a_key_never_changes_and_is_unique():
    assert CONFIG.key == "resnet20-bn-cifar10-adam-w-o-ab-s0-d46507fc"  # results refer to it
    assert Config.from_dict(json.loads(json.dumps(asdict(CONFIG)))) == CONFIG
    others = [
        replace(CONFIG, **{name: value})
        for name, value in {"seed": 1, "lr": 2e-3, "betas": (0.9, 0.999), "milestones": (1,), "width": 8}.items()
    ]
    assert len({CONFIG.key, *(other.key for other in others)}) == 6
    assert [other.setting == CONFIG.setting for other in others] == [True, False, False, False, False]


def test_equal_numbers_of_other_types_give_the_same_key():
    one = replace(CONFIG, lr=1, seed=np.int64(3), milestones=np.array([1, 2]), betas=[0, np.float64(0.5)])
    assert one.key == replace(CONFIG, lr=1.0, seed=3, milestones=(1, 2), betas=(0.0, 0.5)).key


def test_names_in_any_script_are_matched_by_letters_and_digits():
    known = ("Adam w/o (ab)", "αβ", "動量 2", "†")
    assert [match_name(name, known) for name in ("adam-wo-ab", "α β", "動量-2", "†")] == list(known)
    assert [match_name(name, known) for name in ("γδ", "動量", "‡", "")] == [None] * 4


def test_the_rate_falls_at_milestones():
    factors = [CONFIG.rate_factor(epoch) for epoch in range(405)]
    assert [factors.index(f) for f in sorted(set(factors), reverse=True)] == [0, 135, 225, 315]
    assert math.isclose(factors[-1], 1e-3)
    assert CONFIG.scaled(81).milestones == (27, 45, 63)
    assert [CONFIG.scaled(epochs).rate_factor(0) for epochs in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp8"}, "precision must be one of"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"lr": math.inf}, "lr must be positive and finite"),
        ({"betas": (0.9,)}, "betas must be β1 and β2"),
        ({"betas": (0.9, 1.0)}, "betas must be β1 and β2 in"),
        ({"momentum": 1}, "momentum must be in"),
        ({"warmup": 500}, "warmup must be at least 0 and less than 405"),
        ({"batch_size": "many"}, "batch_size has a value of the wrong kind, 'many'"),
        ({"betas": 0.9}, "betas has a value of the wrong kind, 0.9"),
    ],
)
def test_bad_settings_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **change)
    with pytest.raises(ValueError, match="unknown fields: colour"):
        Config.from_dict({"colour": 1, "data": "digits", "method": "Adam", "lr": 1.0})


def test_the_papers_tables_are_whole():
    for norm, rows in (("bn", 7), ("bn-no-affine", 6)):
        table = paper.ACCURACY[norm]
        assert len(table) == rows
        assert set(table) <= set(METHODS)
        assert all(tuple(row) == paper.COLUMNS for row in table.values())
        for column in paper.COLUMNS:  # as the text says, (ab) or (abc) is the best of the Adam variants
            best = max((m for m in table if m != "SGD-M"), key=lambda m: table[m][column].mean)
            assert best in ("Adam w/o (ab)", "Adam w/o (abc)")
    assert set(paper.BEST) == set(paper.LEARNING_RATE) == set(paper.ACCURACY["bn"])


def test_best_values_are_on_the_grid_that_the_paper_printed_rounded():
    for method, row in paper.BEST.items():
        assert paper.LEARNING_RATE[method] in paper.GRID["lr"]
        for setting in row.values():
            assert setting.weight_decay in paper.GRID["weight_decay"]
            assert setting.beta2 in paper.GRID["beta2"]
    assert paper.BEST["Adam w/o (a)"][("ResNet20", "cifar10")].weight_decay == 1e-3 / 32  # printed as 0.31e-4
    assert len(paper.GRID["weight_decay"]) == 8

"""Stores and tables: against scipy, against values by hand, with rewriting, merging and damage."""

import errno
import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from steradian.files import write_atomically
from steradian.lab.config import Config
from steradian.lab.results import CURVES, Result, Store
from steradian.lab.tables import Cell, accuracy_columns, grid_rows, is_grid, point_rows, search

from lab.simulated import column

CONFIG = Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3, epochs=4)


def result(method="Adam", seed=0, reached=90.0, diverged=False, **changes):
    config = replace(CONFIG, method=method, seed=seed, **changes)
    curves = {name: [1.0, 0.5, 0.25, 0.2] for name in CURVES}
    curves["validation_accuracy"] = [10.0, 80.0, 70.0, 80.0]
    curves["test_accuracy"] = [11.0, reached, 60.0, 61.0]
    if diverged:
        curves = {name: [1.0, math.nan] for name in CURVES}
    return Result(config, curves, diverged, 3, 1.5, {"device": "x"})


def test_curves_that_have_no_accuracy_or_another_length_are_an_error():
    for changed in ({"test_accuracy": []}, {"validation_loss": [1.0]}, {"train_loss": [1.0] * 5}):
        with pytest.raises(ValueError, match="curves must have a number per epoch for each of train_loss, validation"):
            replace(result(), curves=result().curves | changed)


def test_accuracy_is_taken_at_the_first_best_validation_epoch():
    assert (result().best_epoch, result(reached=91.0).accuracy, result().to_dict()["final_accuracy"]) == (1, 91.0, 61.0)
    assert math.isnan(result(diverged=True).accuracy)


def test_a_store_keeps_replaces_and_merges(tmp_path):
    store = Store(tmp_path / "deep" / "study.json")
    store.add([result(seed=1), result(seed=0), result("SGD-M", diverged=True)])
    store.add([result(seed=1, reached=95.0)])
    found = {r.config.key: r for r in store.results()}
    assert len(found) == 3
    assert found[result(seed=1).config.key].accuracy == 95.0
    assert found[result("SGD-M").config.key].diverged
    assert math.isnan(found[result("SGD-M").config.key].curves["train_loss"][-1])
    assert store.keys() == set(found) == Store(store.path).keys()
    other = Store(tmp_path / "other.json")
    assert other.keys() == set()
    other.add(store.results())
    assert other.keys() == set(found)
    assert other.path.read_bytes() == store.path.read_bytes()
    other.path.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of results"):
        other.results()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run.pop("curves"), "curves"),
        (lambda run: run["config"].update(cosine=True), "unknown fields: cosine"),
        (lambda run: run["config"].update(lr=0.5), "is not the key of its configuration"),
    ],
)
def test_an_error_names_the_broken_run_and_its_file(tmp_path, change, words):
    store = Store(tmp_path / "study.json")
    store.add([result()])
    content = json.loads(store.path.read_text())
    change(content["runs"][0])
    store.path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"study\.json, run {CONFIG.key}: .*{words}"):
        store.results()
    assert Store(tmp_path / "other.json").elsewhere([CONFIG.key]) == []  # and stops no other study


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    store = Store(tmp_path / "study.json")
    store.add([result()])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*study\.json"):
        store.add([result(seed=1)])
    assert [r.config.seed for r in store.results()] == [0]
    assert not list(tmp_path.glob(".*.part"))


def test_an_error_of_a_write_names_the_wanted_file(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "a part")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=r"Read-only file system: '.*loss\.svg'"):
        write_atomically(tmp_path / "loss.svg", b"")


def test_parts_of_killed_writers_are_removed(tmp_path):
    store = Store(tmp_path / "study [1].json")
    left, other = tmp_path / ".study [1].json.99999.part", tmp_path / ".study 1.json.99999.part"
    left.write_text("half of")
    other.write_text("somebody's")
    store.add([result()])
    assert not left.exists()
    assert other.exists()


def test_a_link_to_results_stays_a_link(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    Store(link).add([result()])
    Store(real).add([result(seed=1)])
    assert link.is_symlink()
    assert len(Store(link).results()) == 2


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    def write(seed):
        for k in range(5):
            Store(tmp_path / "study.json").add([result(seed=10 * seed + k)])

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Store(tmp_path / "study.json").results()) == 20


def test_p_values_are_scipys():
    random = np.random.default_rng(0)
    for _ in range(50):
        a, b = random.normal(size=random.integers(2, 7)), random.normal(0.5, 3, size=random.integers(2, 7))
        expected = stats.ttest_ind(a, b, equal_var=False).pvalue
        assert math.isclose(Cell.of(a).minus(Cell.of(b)).p, expected, rel_tol=1e-9)
    assert math.isnan(Cell.of([1.0]).minus(Cell.of([1.0, 2.0])).p)
    assert Cell.of([1.0, 1.0]).minus(Cell.of([1.0, 1.0])).p == 1.0
    assert Cell.of([1.0, 1.0]).minus(Cell.of([2.0, 2.0])).p == 0.0


def test_a_store_finds_what_other_studies_have_finished(tmp_path):
    Store(tmp_path / "one.json").add([result(seed=0), result(seed=1, reached=95.0)])
    (tmp_path / "bench.json").write_text('{"rows": []}')
    store = Store(tmp_path / "other.json")
    store.add([result(seed=0, reached=80.0)])
    keys = [result(seed=seed).config.key for seed in range(3)]
    found = store.elsewhere(keys)
    assert [r.config.key for r in found] == [keys[1]]
    store.add(found)
    assert {r.config.seed: r.accuracy for r in store.results()} == {0: 80.0, 1: 95.0}
    assert store.elsewhere(keys) == []


def test_a_table_compares_with_the_paper_and_marks_noise():
    ours = {"Adam w/o (ab)": (91.9, 92.1, 92.0), "Adam w/o (abc)": (91.8, 92.2, 91.9), "Adam": (90.0, 90.1, 90.2)}
    results = [result(m, seed, value) for m, values in ours.items() for seed, value in enumerate(values)]
    results += [result("SGD-M", 0, 92.5), result("SGD-M", 1, diverged=True)]
    [column] = accuracy_columns(results)
    heads, lines = column.rows(seeds=True)
    assert heads == ["method", "seed 0", "seed 1", "seed 2", "ours", "seeds", "paper", "ours − paper", "is that noise?"]
    cells = {line[0]: line[1:] for line in lines}
    assert list(cells) == ["SGD-M", "Adam", "Adam w/o (ab)", "Adam w/o (abc)"]
    p = stats.ttest_ind_from_stats(92.0, 0.1, 3, 91.92, 0.18, 5, equal_var=False).pvalue
    expected = [
        "91.90",
        "92.10",
        "92.00",
        "92.00 ± 0.10",
        "3",
        "91.92 ± 0.18",
        "+0.08",
        f"within the noise, p = {p:.2g}",
    ]
    assert cells["Adam w/o (ab)"] == expected
    assert cells["Adam"][-2] == "−0.88"
    assert cells["Adam"][-1].startswith("beyond the noise")
    assert cells["SGD-M"] == ["92.50", "diverged", "", "92.50", "1 (1 diverged)", "92.39 ± 0.12", "+0.11", ""]
    caution, claim, sgd, shrunk, took = column.statements()
    assert "trained for 4 epochs, the paper's for 405" in caution
    assert "not run yet: AdamW†, AdamG†, Adam w/o (a)" in caution
    assert "fewer seeds than the paper's 5: SGD-M 1, Adam 3" in caution
    p = stats.ttest_ind(ours["Adam w/o (ab)"], ours["Adam w/o (abc)"], equal_var=False).pvalue
    assert claim.startswith("Adam w/o (ab) has the best mean of the Adam variants, 92.00 ± 0.10; ")
    assert f"within the noise of it: Adam w/o (abc) (−0.03, p = {p:.2g}); beyond the noise: Adam (−1.90" in claim
    assert "is first (in the paper's own figures Adam w/o (ab) leads Adam w/o (abc) by 0.11, p = 0.39)" in claim
    assert sgd == "SGD-M is 0.50 above the best Adam variant, Adam w/o (ab)."
    assert shrunk.endswith("SGD-M 3, Adam 3, Adam w/o (ab) 3, Adam w/o (abc) 3.")
    assert took == "11 trainings took 16 s on x."


def test_a_complete_column_needs_no_caution_and_a_lost_first_place_is_stated(tmp_path):
    [found] = accuracy_columns(column(tmp_path))
    assert found.caution() == ""
    assert [len(line) for line in found.rows(seeds=True)[1]] == [11] * 7
    better = [replace(r, curves=r.curves | {"test_accuracy": [95.0] * 405}) for r in found.results["AdamG†"]]
    [other] = accuracy_columns([r for m, runs in found.results.items() for r in (better if m == "AdamG†" else runs)])
    assert other.claim().startswith("AdamG† has the best mean")
    assert "The paper's best, Adam w/o (ab), is number 2 of 6" in other.claim()


def test_other_hyper_parameters_and_networks_are_stated(tmp_path):
    runs = column(tmp_path)
    [changed] = [run for run in runs if run.config.method == "Adam w/o (a)" and run.config.seed == 0]
    others = [run for run in runs if run.config.method != "Adam w/o (a)"]
    [found] = accuracy_columns([*others, replace(changed, config=replace(changed.config, weight_decay=5e-4))])
    assert "hyper-parameters other than the paper prints for Adam w/o (a);" in found.caution()
    [found] = accuracy_columns([*others, replace(changed, config=replace(changed.config, released=True))])
    assert "with the network of the paper's released code" in found.caution()
    assert "hyper-parameters" not in found.caution()


def test_a_table_does_not_mix_settings_norms_lengths_or_fine_tuning():
    with pytest.raises(ValueError, match="several settings"):
        accuracy_columns([result(), result(weight_decay=1e-3)])
    short, long = accuracy_columns([result("SGD-M"), result(epochs=5), result()])
    assert (short.config.epochs, list(short.results)) == (4, ["SGD-M", "Adam"])
    assert (long.length, list(long.results)) == ("5 epochs", ["Adam"])
    results = [result(norm="bn-no-affine", reached=80.0), result(start="something", reached=1.0), result()]
    made = accuracy_columns(results)
    assert [(c.config.norm, c.cells["Adam"].mean) for c in made] == [("bn", 90.0), ("bn-no-affine", 80.0)]
    assert made[1].name == "ResNet20 BN without affine, CIFAR-10"


def test_a_grid_is_searched_by_validation_accuracy_alone():
    def tried(decay, validation, test, seed=0, diverged=False):
        made = result("Adam w/o (a)", seed, diverged=diverged, weight_decay=decay)
        if diverged:
            return made
        curves = {name: [1.0, 0.5] for name in CURVES}
        curves |= {"validation_accuracy": [1.0, validation], "test_accuracy": [2.0, test]}
        return replace(made, curves=curves)

    results = [tried(1e-3, 70.0, 99.0), tried(1e-4, 80.0, 60.0), tried(1e-4, 82.0, 64.0, seed=1)]
    results += [tried(1e-2, 0.0, 0.0, diverged=True), result("SGD-M", reached=92.0)]
    first, second = search(results)
    assert (first.config.method, second.config.method) == ("SGD-M", "Adam w/o (a)")
    assert second.config.weight_decay == 1e-4
    assert (len(second.runs), second.points, second.diverged) == (2, 3, 1)
    assert is_grid(results)
    assert not is_grid(results[1:3])
    heads, lines = point_rows(results)
    assert heads[3] == "λ"
    content = [(line[1], line[3], *line[6:]) for line in lines]
    assert content == [
        ("SGD-M", "0", "80.00", "92.00", "1", "92.39"),
        ("Adam w/o (a)", "0.0001", "81.00", "62.00 ± 2.83", "2", "91.15"),
        ("Adam w/o (a)", "0.001", "70.00", "99.00", "1", "91.15"),
        ("Adam w/o (a)", "0.01", "", "diverged", "0 (1 diverged)", "91.15"),
    ]
    line = grid_rows(results)[1][1]
    assert line[5:7] == ["81.00", "62.00"]
    assert line[2:5] == ["4", "0.001, 0.0001, 0.99", "0.001, 3.125e-05, 0.99"]
    assert grid_rows(results)[1][0][3] == "0.001, 0"  # SGD-M has no β2
    assert line[-1] == "3 (1 diverged)"


def test_the_winners_of_ones_own_methods_have_no_column_of_the_papers_and_no_beta2():
    own = [result(method=method, weight_decay=decay) for method in ("SGD-M", "Mine") for decay in (0.0, 0.1)]
    own = [replace(each, config=replace(each.config, data="mine")) for each in own]
    heads, lines = grid_rows(own)
    assert heads[3:5] == ["best: η, λ", "validation"]
    assert {len(line) for line in lines} == {len(heads)}
    assert {line[3] for line in lines} <= {"0.001, 0", "0.001, 0.1"}


def test_trainings_of_different_lengths_are_no_grid():
    """Fewer epochs are tried before many, under the name of one study."""
    lengths = [result(), result(seed=1), result(epochs=5, reached=95.0)]
    assert not is_grid(lengths)
    results = [*lengths, result(weight_decay=1e-3)]
    assert is_grid(results)
    assert [(best.config.epochs, best.points, len(best.runs)) for best in search(results)] == [(4, 2, 2), (5, 1, 1)]


def test_another_network_is_not_a_point_of_the_grid():
    results = [result(), result(released=True), result(released=True, weight_decay=1e-3)]
    assert not is_grid(results[:2])
    assert is_grid(results)
    assert [line[0] for line in grid_rows(results)[1]] == [
        "ResNet20 cifar10 bn",
        "ResNet20 cifar10 bn, released network",
    ]


def test_a_method_that_always_diverged_is_in_the_table_of_the_grid():
    [line] = grid_rows([result(diverged=True), result(diverged=True, weight_decay=1e-3)])[1]
    assert line[1:] == ["Adam", "4", "", "0.001, 0.00025, 0.99", "diverged", "diverged", "0", "2 (2 diverged)"]


def test_short_times_are_given_in_seconds():
    [column] = accuracy_columns([result(), result(seed=1)])
    assert column.time() == "2 trainings took 3 s on x."
    [column] = accuracy_columns([replace(result(), seconds=120.0)])
    assert column.time() == "1 training took 0.03 hours on x."


def test_different_images_under_one_name_are_stated():
    runs = [replace(result(seed=k), environment={"data": data}) for k, data in enumerate(("a", "a"))]
    assert (
        "different images" not in accuracy_columns([*runs, result(seed=2)])[0].caution()
    )  # an older result has no fingerprint
    other = replace(result(seed=3), environment={"data": "b"})
    assert "different images that go by the name cifar10" in accuracy_columns([*runs, other])[0].caution()


def test_one_seed_gives_no_order():
    [column] = accuracy_columns([result("Adam"), result("AdamW†", reached=91.0)])
    assert column.claim().endswith("91.00; one seed says nothing about the order.")

"""Studies: several processes, other data under the same name, checkpoints that do not fit, records."""

import errno
import fcntl
import io
import math
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from steradian.lab.data import DataSet, Images, Resident, load
from steradian.lab.experiments import Tracked, track_study
from steradian.lab.fleet import Progress
from steradian.lab.results import CURVES, Result, Store, claim, has_diverged
from steradian.lab.study import Study, study_name
from steradian.lab.training import Training

from lab.studies import CONFIG, few, fleet

ONE = replace(CONFIG, epochs=1, milestones=())


@pytest.fixture(scope="module")
def data():
    return few(train=60, test=20)


def other_images():
    """The digits' shapes with other pixels."""
    digits = load("digits")
    mirrored = Images(digits.train.pixels[:, :, ::-1], digits.train.labels)
    return DataSet("digits", mirrored, digits.test, digits.classes)


def test_a_claim_is_held_until_it_is_closed(tmp_path):
    with claim(tmp_path / "claims" / "a"), claim(tmp_path / "claims" / "b"):
        assert claim(tmp_path / "claims" / "a") is None
    with claim(tmp_path / "claims" / "a") as file:
        assert file


def test_a_file_system_without_locks_holds_results_and_claims(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    store, part = Store(tmp_path / "x.json"), tmp_path / ".x.json.1.part"
    part.write_text("of a writer who may be at work")
    store.add([Result(ONE, {name: [1.0] for name in CURVES})])
    assert store.keys() == {ONE.key}
    assert part.exists()
    with claim(tmp_path / "claims" / "a") as file:
        assert file


def test_a_study_continues_if_its_folder_is_removed(tmp_path, data, monkeypatch):
    here = fleet(tmp_path, data, size=1)
    monkeypatch.setattr(here.progress, "finished", lambda *_: shutil.rmtree(tmp_path / "work"))
    assert here.run([replace(ONE, seed=seed) for seed in range(2)])


def test_trainings_of_other_processes_are_skipped_and_awaited(tmp_path, data, monkeypatch):
    configs = [replace(ONE, seed=seed) for seed in range(2)]
    output = io.StringIO()
    here = fleet(tmp_path, data, progress=Progress(Console(file=output)))
    theirs = claim(tmp_path / "work" / "claims" / f"{configs[0].key}.lock")

    def meanwhile(*_):
        curves = {name: [1.0] for name in CURVES}
        here.store.add([Result(configs[0], curves, environment={"device": "theirs"})])
        theirs.close()

    monkeypatch.setattr(here.progress, "waiting", lambda count: (Progress.waiting(here.progress, count), meanwhile()))
    monkeypatch.setattr("steradian.lab.fleet.POLL", 0.0)
    assert here.run(configs)
    made = {result.config.seed: result.environment["device"] for result in here.store.results()}
    assert made[0] == "theirs" != made[1]
    assert "waiting for 1 that other processes run" in output.getvalue()


def test_leftovers_of_killed_processes_are_removed(tmp_path, data):
    """A part of the weights that were being written, and a checkpoint of a training whose result was stored."""
    left = tmp_path / "work" / "weights" / f".{ONE.key}.pt.99999.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of")
    assert fleet(tmp_path, data, keep_weights=True).run([ONE])
    assert not left.exists()
    checkpoint = tmp_path / "work" / "checkpoints" / f"{ONE.key}.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_bytes(b"of the epoch before the last")
    assert fleet(tmp_path, data).run([ONE])
    assert not checkpoint.exists()


def test_a_training_can_diverge_in_its_last_step():
    curves = {name: [0.5] for name in CURVES}
    assert not has_diverged(ONE, curves)
    curves["validation_loss"] = [math.nan]
    assert has_diverged(ONE, curves)
    assert not has_diverged(replace(ONE, epochs=2), curves)  # what is evaluated may recover


def test_a_batch_larger_than_the_data_is_refused_before_anything_is_trained(tmp_path, data):
    with pytest.raises(ValueError, match="batch_size must be at most the 48 training images of digits, got 49"):
        fleet(tmp_path, data).run([ONE, replace(ONE, batch_size=49)])


@pytest.mark.parametrize("change", [{"model": "ViT"}, {"method": "Lion"}, {"schedule": "exponential"}])
def test_an_unknown_network_is_refused_before_anything_is_trained(tmp_path, data, change):
    with pytest.raises(ValueError, match="must be one of"):
        fleet(tmp_path, data).run([ONE, replace(ONE, **change)])
    assert not (tmp_path / "results.json").exists()


def test_a_checkpoint_of_other_data_or_of_another_form_is_refused(tmp_path, data):
    training = Training(ONE, data)
    made = fleet(tmp_path, data)
    path = made._path("checkpoints", ONE)
    path.parent.mkdir(parents=True)
    state = {"training": training.state(), "seconds": 1.0, "data": "of others"}
    torch.save(state, path)
    with pytest.raises(ValueError, match="was started with other images of digits"):
        made.run([ONE])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"{path.name} cannot be read, .* remove it"):
        made.run([ONE])


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", pickle.dumps(ONE)])
def test_an_error_names_the_damaged_checkpoint_without_unsafe_advice(tmp_path, data, content):
    path = tmp_path / "work" / "checkpoints" / f"{ONE.key}.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} cannot be read, .*; remove it to train") as raised:
        fleet(tmp_path, data).run([ONE])
    assert "weights_only" not in str(raised.value)


def test_other_images_under_the_same_name_are_refused(tmp_path, monkeypatch):
    study = Study("mine", tmp_path, tmp_path / "runs")
    mine = Resident(other_images())
    curves = {name: [1.0] for name in CURVES}
    study.store.add([Result(ONE, curves, environment={"data": mine.fingerprint})])
    assert study.run([ONE])  # no data is read if nothing is left to do
    with pytest.raises(ValueError, match="trained on other data called digits"):
        replace(study, roots={"digits": None}).run([ONE])
    with pytest.raises(ValueError, match="trained on other data called digits"):
        Study("next", tmp_path, tmp_path / "runs").run([ONE, replace(ONE, seed=1)])
    assert not Study("next", tmp_path).store.results()


def test_a_fingerprint_depends_only_on_the_images():
    digits = load("digits")
    assert Resident(digits).fingerprint == Resident(replace(digits, name="others")).fingerprint
    assert Resident(digits).fingerprint != Resident(other_images()).fingerprint


def test_recording_resumes_only_with_the_same_points_and_quantities(data):
    configs = replace(ONE, method="Adam", epochs=2)
    begun = Tracked(configs, data, points=12)
    begun.run_epoch()
    state = begun.state()
    Tracked(configs, data, points=12).load(state)
    for change in ({"points": 2}, {"points": 12, "phenomena": True}):
        with pytest.raises(ValueError, match="started with other points or other quantities"):
            Tracked(configs, data, **change).load(state)


def test_a_study_recorded_without_phenomena_is_refused_if_they_are_wanted(tmp_path, data, monkeypatch):
    monkeypatch.setattr("steradian.lab.study.load", lambda *_: None)
    monkeypatch.setattr("steradian.lab.study.Resident", lambda *_: data)
    config = replace(ONE, method="Adam")
    study = Study("small", tmp_path, tmp_path / "runs", device="cpu")
    assert track_study([config], study, points=2)
    with pytest.raises(ValueError, match="without the phenomena"):
        track_study([config], study, phenomena={"Adam"}, points=2)


@pytest.mark.parametrize("name", ["", "../up", "a/b"])
def test_a_study_name_is_a_file_name(name):
    with pytest.raises(ValueError, match="study must be the name of a file"):
        Study(name)
    assert "/" not in study_name("tables", [replace(CONFIG, data="a/b")])

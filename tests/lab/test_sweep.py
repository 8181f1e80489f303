"""A sweep on a real Ray of two workers, whose driver and one worker are killed in the middle: the same results."""

import io
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from steradian.lab.data import DataSet, Images, pack
from steradian.lab.progress import Progress
from steradian.lab.recipes import accuracy_tables
from steradian.lab.results import CURVES, Result, Store
from steradian.lab.study import Study, _run_fleet, sweep

from lab.studies import curves

ray = pytest.importorskip("ray")
SMALL = {"size": 1, "every": 0.0}


@pytest.fixture
def two_workers(monkeypatch):
    # Ray's workers have low priority: next to two busy processes they would hardly run.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def configs():
    made = accuracy_tables(data="digits", columns=["VGG16"], methods=["Adam w/o (abc)"], epochs=3, seeds=2)
    return [replace(config, width=4) for config in made]


def drive(folder, address):
    sweep(configs(), Study("spread", folder / "results", folder / "runs"), address=address, **SMALL)


def first_checkpoint(study, seconds=250):
    """Wait for a worker and its first checkpoint; returns their folder."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for checkpoint in study.work.glob("fleet-*/checkpoints/*.pt"):
            if (checkpoint.parents[1] / "worker").exists():
                return checkpoint.parents[1]
        time.sleep(0.01)
    raise AssertionError("no worker wrote a checkpoint")


def kill_a_worker(study, killed):
    pid = int((first_checkpoint(study) / "worker").read_text())
    os.kill(pid, signal.SIGKILL)
    killed.append(pid)


@pytest.mark.timeout(600)
def test_killing_a_driver_and_a_worker_changes_no_result(tmp_path, two_workers):
    spread = Study("spread", tmp_path / "results", tmp_path / "runs")
    address = ray.get_runtime_context().gcs_address
    driver = multiprocessing.get_context("spawn").Process(target=drive, args=(tmp_path, address))
    driver.start()
    first_checkpoint(spread)
    driver.kill()
    driver.join()
    assert len(spread.store.keys()) < 2
    for path in spread.work.glob("fleet-*/worker"):
        path.unlink()

    killed = []
    hunter = threading.Thread(target=kill_a_worker, args=(spread, killed))
    hunter.start()
    assert sweep(configs(), spread, **SMALL)
    hunter.join()
    assert len(killed) == 1
    workers = {int(path.read_text()) for path in spread.work.glob("fleet-*/worker")}
    assert killed[0] not in workers
    here = Study("here", tmp_path / "results", tmp_path / "runs")
    assert here.run(configs(), size=2)
    assert curves(spread.store) == curves(here.store)
    assert len(here.store.results()) == 2

    for path in spread.work.glob("fleet-*/worker"):
        path.unlink()
    assert sweep(configs(), spread, **SMALL)
    assert not list(spread.work.glob("fleet-*/worker")), "what was finished was done again"


def test_results_of_other_studies_are_not_sent_to_workers(tmp_path, monkeypatch):
    def nobody(*_, **__):
        raise AssertionError("there is nothing to do")

    working = SimpleNamespace(is_initialized=lambda: True, cluster_resources=dict)
    working.remote = lambda **_: lambda _: SimpleNamespace(remote=nobody)
    monkeypatch.setattr("steradian.lab.study._ray", lambda: working)
    known = [Result(config, {name: [1.0] for name in CURVES}) for config in configs()]
    Store(tmp_path / "other.json").add(known)
    study = Study("spread", tmp_path, tmp_path / "runs")
    assert sweep(configs(), study)
    assert study.store.keys() == {config.key for config in configs()}


def test_results_of_a_worker_with_other_images_are_refused(tmp_path, monkeypatch):
    first, *_, last = configs()

    def of(config, images):
        return Result(config, {name: [1.0] for name in CURVES}, environment={"data": images})

    far = SimpleNamespace(is_initialized=lambda: True, cluster_resources=dict, exceptions=ray.exceptions)
    far.remote = lambda **_: lambda _: SimpleNamespace(remote=lambda *_: [of(last, "theirs").to_dict()])
    far.wait, far.get = (lambda left, num_returns: (left[:1], left[1:])), list
    monkeypatch.setattr("steradian.lab.study._ray", lambda: far)
    study = Study("spread", tmp_path, tmp_path / "runs")
    study.store.add([of(first, "ours")])
    with pytest.raises(ValueError, match=f"holds {first.key}, trained on other data called digits"):
        sweep([first, last], study)
    assert study.store.keys() == {first.key}


def test_workers_find_data_in_the_folder_of_the_driver(tmp_path, monkeypatch):
    """A worker has another working directory: here the driver's calls are run there."""

    def elsewhere(*arguments):
        with monkeypatch.context() as worker:
            worker.chdir("/")
            return _run_fleet(*arguments)

    here = SimpleNamespace(is_initialized=lambda: True, cluster_resources=dict, exceptions=ray.exceptions)
    here.remote = lambda **_: lambda _: SimpleNamespace(remote=elsewhere)
    here.wait, here.get = (lambda left, num_returns: (left[:1], left[1:])), list
    monkeypatch.setattr("steradian.lab.study._ray", lambda: here)
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    some = Images(random.integers(0, 256, (30, 8, 8, 1), dtype=np.uint8), random.integers(0, 2, 30))
    pack(DataSet("mine", some, some, ["a", "b"]), tmp_path / "data" / "mine", effort=0)
    [config] = accuracy_tables(data="mine", columns=["VGG16"], methods=["Adam"], epochs=1, seeds=1)
    small = replace(config, width=4, batch_size=8, precision="float32")
    output = io.StringIO()
    assert sweep([small], Study("spread", Path("results"), Path("runs")), progress=Progress(Console(file=output)))
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == [
        "0 of 1 trainings were finished before",
        "1 of 1",
    ]

"""A sweep on a real Ray of two workers, whose driver and one worker are killed in the middle: the same results."""

import io
import multiprocessing
import os
import signal
import sys
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
from steradian.lab.study import Study, sweep

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


def first_worker(study, seconds=250):
    """Wait for the first checkpoint; returns the process that holds the claim of this training."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for checkpoint in study.work.glob("checkpoints/*.pt"):
            inode = (study.work / "claims" / f"{checkpoint.stem}.lock").stat().st_ino
            for line in Path("/proc/locks").read_text().splitlines():
                _, kind, _, _, pid, place, *_ = line.split()
                if kind == "FLOCK" and place.endswith(f":{inode}"):
                    return int(pid)
        time.sleep(0.01)
    raise AssertionError("no worker wrote a checkpoint")


def kill_a_worker(study, killed):
    killed.append(first_worker(study))
    os.kill(killed[0], signal.SIGKILL)


@pytest.mark.timeout(600)
def test_killing_a_driver_and_a_worker_changes_no_result(tmp_path, two_workers):
    spread = Study("spread", tmp_path / "results", tmp_path / "runs")
    address = ray.get_runtime_context().gcs_address
    driver = multiprocessing.get_context("spawn").Process(target=drive, args=(tmp_path, address))
    driver.start()
    first_worker(spread)
    driver.kill()
    driver.join()
    assert len(spread.store.keys()) < 2

    killed = []
    hunter = threading.Thread(target=kill_a_worker, args=(spread, killed))
    hunter.start()
    output = io.StringIO()
    assert sweep(configs(), spread, progress=Progress(Console(file=output, width=160)), **SMALL)
    hunter.join()
    assert len(killed) == 1
    assert "2 of 2 trainings finished" in output.getvalue()
    here = Study("here", tmp_path / "alone", tmp_path / "runs")
    assert here.run(configs(), size=2)
    assert curves(spread.store) == curves(here.store)
    assert len(here.store.results()) == 2

    before = spread.store.path.read_bytes()
    assert sweep(configs(), spread, **SMALL)
    assert spread.store.path.read_bytes() == before, "what was finished was done again"


def test_workers_find_data_in_the_folder_of_the_driver(tmp_path, monkeypatch):
    """A worker has another working directory: here the driver's calls are run there."""

    def elsewhere(*arguments, **options):
        with monkeypatch.context() as worker:
            worker.chdir("/")
            return Study.run(*arguments, **options)

    here = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 1.0})
    here.remote = lambda **_: lambda _: SimpleNamespace(remote=elsewhere)
    here.wait, here.get = (lambda left, timeout: (left[:1], left[1:])), list
    monkeypatch.setitem(sys.modules, "ray", here)
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
        "1 of 1 trainings finished",
    ]

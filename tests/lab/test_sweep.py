"""A sweep on a real Ray of two workers, one of which is killed in the middle: the same results as without."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from steradian.lab.recipes import accuracy_tables
from steradian.lab.study import Study
from steradian.lab.sweep import sweep

from lab.studies import curves

ray = pytest.importorskip("ray")


@pytest.fixture
def two_workers():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def configs():
    made = accuracy_tables(data="digits", columns=["VGG16"], methods=["Adam", "Adam w/o (abc)"], epochs=3, seeds=2)
    return [replace(config, width=4) for config in made]


def kill_a_worker_once(folder, killed):
    """Kill the first worker that has written a checkpoint."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for checkpoint in folder.glob("fleet-*/checkpoints/*.pt"):
            pid = int((checkpoint.parents[1] / "worker").read_text())
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            return
        time.sleep(0.01)


def test_a_worker_killed_in_the_middle_changes_nothing(tmp_path, two_workers):
    spread = Study("spread", tmp_path / "results", tmp_path / "runs")
    killed = []
    hunter = threading.Thread(target=kill_a_worker_once, args=(spread.work, killed))
    hunter.start()
    assert sweep(configs(), spread, engine="ray", size=2, every=0.0)
    hunter.join()
    assert len(killed) == 1
    workers = {int(path.read_text()) for path in spread.work.glob("fleet-*/worker")}
    assert len(workers) == 2
    assert killed[0] not in workers
    here = Study("here", tmp_path / "results", tmp_path / "runs")
    assert sweep(configs(), here, engine="local", size=4)
    assert curves(spread.store) == curves(here.store)
    assert len(here.store.results()) == 4
    for path in spread.work.glob("fleet-*/worker"):
        path.unlink()
    assert sweep(configs(), spread, engine="ray", size=2)  # as a driver that was killed: it finds all of it done
    assert not list(spread.work.glob("fleet-*/worker"))


def test_an_unknown_engine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="engine must be local or ray"):
        sweep([], Study("x", tmp_path, tmp_path), engine="slurm")

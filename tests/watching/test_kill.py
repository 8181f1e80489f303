"""A process that is killed at any moment, and a disk that is full, leave files that can be read."""

import errno
import logging
import os
import random
import signal
import sys
import time

import pytest
import torch

from steradian import watch
from steradian.watching.records import read_run
from steradian.watching.sinks import Folder, RunFiles

from small import pair, series, set_gradients, train


def life(folder, flushed, kind):
    """Train and record until the end of time, and write down which steps were handed to the disk."""
    optimizer, params = pair(kind)
    with watch(optimizer, to=folder, every=1, rows_every=3) as watcher:
        step = 0
        while True:
            for _ in range(5):
                set_gradients(params, step)
                optimizer.step()
                watcher.log(loss=step)
                step += 1
            watcher.flush()
            watcher.sinks[0].drain()
            os.write(flushed, step.to_bytes(8, "little"))


def killed(folder, after, kind):
    """Have a life killed some seconds after its first part; the number of steps that it said were on disk."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        logging.disable()
        life(folder, write, kind)
        os._exit(1)
    os.close(write)
    told = os.read(read, 8)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    while more := os.read(read, 4096):
        told = more
    os.close(read)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return int.from_bytes(told[-8:], "little")


# Python warns of forks of a process with threads; the child uses none of them.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_can_be_read_and_lost_at_most_its_last_part(kills, tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    pair("Adam")  # what a first optimizer imports is imported here, once
    chance = random.Random(0)
    moments = set()
    for k in range(kills):
        folder = tmp_path / f"run-{k}"
        written = killed(folder, chance.uniform(0, 0.15), ("Adam", "ours")[k % 2])
        for file in folder.glob("*.parquet"):
            pyarrow.read_table(file)
        run = read_run(folder)
        for curve in (series(run.table, "angle"), series(run.table, "loss", "", "mean")):
            steps = list(curve)
            assert steps == list(range(len(steps)))
            assert len(steps) >= written
            assert len(steps) % 5 == 0
        assert run.about["run"] == folder.name
        moments.add(written)
    assert len(moments) > 1, "all were killed at the same moment"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_is_continued(tmp_path):
    written = killed(tmp_path, 0.02, "Adam")
    before = read_run(tmp_path).table
    optimizer, params = pair("Adam")
    train(optimizer, params, 3)
    with watch(optimizer, to=tmp_path):
        train(optimizer, params, 2, first=3)
    table = read_run(tmp_path).table
    assert written >= 5
    assert list(series(table, "angle")) == [0, 1, 2, 3, 4]
    earlier = before[before["step"] < 3]
    assert (
        table[table["step"] < 3].reset_index(drop=True).astype(str).equals(earlier.reset_index(drop=True).astype(str))
    )
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".parquet") and file.name.startswith(".")]


def test_alerts_that_were_cut_short_are_skipped(tmp_path):
    files = RunFiles(tmp_path)
    files.describe({"run": "run"})
    alert = {"step": 1, "group": "wé", "kind": "H1", "text": "…"}
    files.alert(alert)
    with open(tmp_path / "alerts.jsonl", "ab") as file:
        file.write('{"step": 2, "group": "é'.encode()[:-1])
    assert len(read_run(tmp_path).alerts) == 1
    files.alert(alert | {"step": 3})
    assert read_run(tmp_path).alerts["step"].tolist() == [1, 3]


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while `disk["full"]`; files are begun and cannot be finished."""
    state = {"full": False, "attempts": 0}
    add = RunFiles.add

    def failing(self, kind, columns):
        state["attempts"] += 1
        if state["full"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, kind, columns)

    monkeypatch.setattr(RunFiles, "add", failing)
    return state


def loud(caplog):
    return [record for record in caplog.records if "cannot write" in record.message or record.levelno >= logging.ERROR]


def test_a_full_disk_is_said_once_and_what_was_kept_is_written_when_there_is_room(disk, tmp_path, caplog):
    optimizer, params = pair("Adam")
    with watch(optimizer, to=tmp_path, every=1) as watcher:
        for step in range(60):
            disk["full"] = 10 <= step < 50
            set_gradients(params, step)
            optimizer.step()
            if step % 5 == 4:
                watcher.flush()
                watcher.sinks[0].drain()
                on_disk = len(series(read_run(tmp_path).table, "angle"))
                assert on_disk == (10 if disk["full"] else step + 1)
    assert watcher.error is None
    (warning,) = loud(caplog)
    assert "No space left" in warning.message
    assert str(tmp_path) in warning.message
    assert list(series(read_run(tmp_path).table, "angle")) == list(range(60))
    assert disk["attempts"] > 12


def test_a_disk_that_stays_full_loses_parts_and_says_so_at_the_end(disk, tmp_path, caplog):
    optimizer, params = pair("Adam")
    with watch(optimizer, to=tmp_path) as watcher:
        train(optimizer, params, 3)
        watcher.flush()
        watcher.sinks[0].drain()
        disk["full"] = True
        train(optimizer, params, 3, first=3)
    warning, error = loud(caplog)
    assert warning.levelno == logging.WARNING
    assert "could not be written" in error.message
    assert watcher.error is None
    assert list(series(read_run(tmp_path).table, "angle")) == [0, 1, 2]


def test_memory_is_bounded_while_the_disk_is_full(disk, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys.modules[Folder.__module__], "_WAITING", 8)
    optimizer, params = pair("Adam")
    disk["full"] = True
    with watch(optimizer, to=tmp_path, every=1, rows_every=0, paths={}) as watcher:
        for step in range(30):
            set_gradients(params, step)
            optimizer.step()
            watcher.flush()
        watcher.sinks[0].drain()
        assert len(watcher.sinks[0]._unwritten) == 8
        disk["full"] = False
    _, error = loud(caplog)
    assert "22 parts" in error.message
    assert list(series(read_run(tmp_path).table, "angle")) == list(range(22, 30))


def test_a_file_that_cannot_be_finished_is_removed(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = RunFiles(tmp_path)
    files.describe({"run": "run"})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.add("part", {"step": torch.arange(3).numpy()})
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]

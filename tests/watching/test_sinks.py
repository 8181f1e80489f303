"""What arrives where records go is what was recorded."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from steradian import watch
from steradian.watching.records import read_run
from steradian.watching.sinks import Calls, Folder, MLflow, TensorBoard, WandB, sinks_of

from small import pair, series, set_gradients, train

STEPS = 5


def medians(table):
    """{quantity/group/median: {step: value}} of everything that a logger should get."""
    found = {}
    for group in ("w", "v"):
        for quantity in set(table["quantity"]) - {"loss", "seconds"}:
            name = f"{quantity}/{group}" if quantity == "lr" else f"{quantity}/{group}/median"
            found[name] = series(table, quantity, group, "mean" if quantity == "lr" else "median")
    found["loss"] = series(table, "loss", "", "mean")
    return found


def watched(to, kind="Adam", steps=STEPS, **options):
    optimizer, params = pair(kind)
    with watch(optimizer, to=to, **options) as watcher:
        for step in range(steps):
            set_gradients(params, step)
            optimizer.step()
            watcher.log(loss=torch.tensor(1.0 / (step + 1)))
    assert watcher.error is None
    return watcher


@pytest.fixture
def in_memory():
    return medians(watched(None).records())


def same(found, expected, rel=1e-6):
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=rel, abs=1e-12), name


class Keeps:
    def __init__(self):
        self.found = {}

    def __call__(self, values, step):
        for name, value in values.items():
            assert step not in self.found.setdefault(name, {})
            self.found[name][step] = value


def test_a_callable_gets_every_step(in_memory):
    keeps = Keeps()
    watched(keeps)
    same(keeps.found, in_memory)


def test_a_folder_holds_the_table(in_memory, tmp_path):
    watcher = watched(tmp_path / "run")
    same(medians(read_run(tmp_path / "run").table), in_memory)
    assert read_run(tmp_path / "run").table.equals(watcher.records())


def test_several_at_once(in_memory, tmp_path):
    one, other = Keeps(), Keeps()
    watched([tmp_path / "run", one, Calls(other, statistics=("median", "max"))])
    same(one.found, in_memory)
    same({name: values for name, values in other.found.items() if not name.endswith("/max")}, in_memory)
    assert other.found["angle/w/max"] == series(read_run(tmp_path / "run").table, "angle", "w", "max")


def test_one_that_fails_does_not_keep_the_others_from_theirs(in_memory, caplog):
    def fails(values, step):
        raise ConnectionError("no network")

    keeps, (optimizer, params) = Keeps(), pair()
    with watch(optimizer, to=[fails, keeps]) as watcher:
        train(optimizer, params, STEPS)
        watcher.flush()
        train(optimizer, params, STEPS, first=STEPS)
    assert len(keeps.found["angle/w/median"]) == 2 * STEPS
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_two_watches_do_not_write_to_one_folder(tmp_path):
    (first, _), (second, _) = pair(), pair()
    with watch(first, to=tmp_path), pytest.raises(ValueError, match=r"separate folder for each watch.*; stop\(\) ends"):
        watch(second, to=tmp_path / ".." / tmp_path.name).start()
    with watch(second, to=tmp_path):
        pass


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    (optimizer, _), here = pair(), Path(__file__).parent
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]
from small import pair
from steradian import watch
watch(pair()[0], to={str(tmp_path)!r}).start()
"""
    with watch(optimizer, to=tmp_path):
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert other.returncode
    assert "separate folder for each watch" in other.stderr
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_folder_stays_where_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    optimizer, params = pair()
    with watch(optimizer, to="run") as watcher:
        train(optimizer, params, 2)
        monkeypatch.chdir("elsewhere")
        train(optimizer, params, 2, first=2)
        watcher.flush()
        assert list(series(read_run(tmp_path / "run").table, "angle")) == [0, 1, 2, 3]  # the files are there
    assert not list(Path().iterdir())


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    optimizer, params = pair()
    with watch(optimizer, to=tmp_path / "file" / "run") as watcher:
        train(optimizer, params, 2)
        assert list(series(watcher.records(), "angle")) == [0, 1]  # in memory
    assert "training goes on" in caplog.text
    assert list(watcher.latest()) == ["w", "v"]
    with pytest.raises(ValueError, match="to must be a folder"):
        watch(pair()[0], to=tmp_path / "file")


def test_a_folder_that_is_taken_away_is_made_again(tmp_path):
    optimizer, params = pair()
    with watch(optimizer, to=tmp_path / "run") as watcher:
        train(optimizer, params, 2)
        watcher.records()
        shutil.rmtree(tmp_path / "run")
        train(optimizer, params, 2, first=2)
        assert set(watcher.records()["step"]) == {2, 3}
        train(optimizer, params, 1, first=4)
    assert set(read_run(tmp_path / "run").table["step"]) == {2, 3, 4}


def test_a_configuration_whose_keys_are_no_words_does_not_cost_the_run(tmp_path):
    watcher = watched(tmp_path, config={(3, 4): "kernel", "sizes": [{0.5: 1}], "what": object})
    assert read_run(tmp_path).about["config"] == {"(3, 4)": "kernel", "sizes": [{"0.5": 1}], "what": str(object)}
    assert len(watcher.records())


def test_a_sink_that_cannot_be_opened_leaves_nothing_running(tmp_path):
    class Closed(Calls):
        def open(self, about):
            raise ConnectionError("no network")

    optimizer, params = pair("ours")
    watcher = watch(optimizer, to=[tmp_path, Closed(print)])
    with pytest.raises(ConnectionError):
        watcher.start()
    assert not watcher.running
    assert optimizer.telemetry is None
    assert not optimizer._optimizer_step_pre_hooks
    with watch(optimizer, to=tmp_path):
        train(optimizer, params, 1)


def opens_on_rate_and_angle(tags):
    """TensorBoard and W&B sort charts by their names."""
    quantities = dict.fromkeys(plain(tag).split("/")[0] for tag in sorted(tags) if "/" in tag)
    assert list(quantities)[:2] == ["effective_lr", "angle"]


def plain(tag):
    """A tag without the number of its quantity."""
    return re.sub(r"^\d\d_", "", tag)


def test_tensorboard_reads_back_scalars_and_histograms(in_memory, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watcher = watched([TensorBoard(tmp_path / "board"), tmp_path / "run"], rows_every=2)
    events = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    opens_on_rate_and_angle(tags["scalars"])
    scalars = {plain(tag): {event.step: event.value for event in events.Scalars(tag)} for tag in tags["scalars"]}
    same(scalars, in_memory)

    rows = read_run(watcher.sinks[1].files.folder).rows
    assert set(rows["step"]) == {0, 2, 4}
    assert "02_angle/w" in tags["histograms"]
    for tag in tags["histograms"]:
        quantity, group = plain(tag).split("/")
        for event in events.Histograms(tag):
            chosen = rows[(rows["quantity"] == quantity) & (rows["group"] == group) & (rows["step"] == event.step)]
            values, told = chosen["value"].to_numpy(), event.histogram_value
            assert told.num == len(values)
            assert (told.min, told.max) == pytest.approx((values.min(), values.max()))
            assert (told.sum, told.sum_squares) == pytest.approx((values.sum(), values @ values))


def test_tensorboard_takes_rows_that_are_not_finite(tmp_path):
    pytest.importorskip("tensorboard")
    optimizer, params = pair()
    with torch.no_grad():
        params[0][0, 0] = float("nan")
    with watch(optimizer, to=TensorBoard(tmp_path), rows_every=1) as watcher:
        train(optimizer, params, 2)
    assert watcher.error is None


class Run:
    """What the sink uses of a W&B run."""

    def __init__(self):
        self.config, self.logged, self.metrics, self.alerts = {}, [], {}, []

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, values):
        self.logged.append(values)

    def alert(self, title, text):
        self.alerts.append((title, text))


def test_wandb_gets_the_numbers_against_their_own_step(in_memory):
    run = Run()
    watched(run)
    found = {}
    for values in run.logged:
        step = values.pop("steradian/step")
        for name, value in values.items():
            found.setdefault(name.removeprefix("steradian/"), {})[step] = value
    opens_on_rate_and_angle(found)
    same({plain(name): values for name, values in found.items()}, in_memory)
    assert run.metrics == {"steradian/step": None, "steradian/*": "steradian/step"}
    assert run.config["steradian"]["optimizer"]["name"] == "torch.optim.adam.Adam"


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(mode="offline", console="off", x_disable_stats=True, x_disable_meta=True)
    with wandb.init(project="steradian", dir=str(tmp_path), settings=settings) as run:
        sinks = sinks_of(run)
        assert isinstance(sinks[0], WandB)
        watched(sinks)
    wandb.teardown()  # its own process writes the file, and has written it when it ends
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"steradian/02_angle/w/median" in written.read_bytes()


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*", "ignore::DeprecationWarning")
def test_mlflow_reads_back(in_memory, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as run:
        assert sinks_of(run)[0].run_id == run.info.run_id
        watched(MLflow())
    client = mlflow.MlflowClient()
    names = client.get_run(run.info.run_id).data.metrics
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    same({name: {metric.step: metric.value for metric in history} for name, history in histories.items()}, in_memory)
    with pytest.raises(ValueError, match="active run"):
        watched(MLflow())


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*", "ignore::DeprecationWarning")
def test_mlflow_takes_every_groups_name(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    weight, bias = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2))
    options = {"rows": "tensor", "joint": True, "params": [("0.weight", weight), ("0.bias", bias)]}
    optimizer = torch.optim.SGD([options], lr=0.1)
    with mlflow.start_run() as run, watch(optimizer, to=run) as watcher:
        weight.grad, bias.grad = torch.eye(2, 3), torch.ones(2)
        optimizer.step()
    assert watcher.error is None
    assert "radius/0.weight _ 0.bias/median" in mlflow.MlflowClient().get_run(run.info.run_id).data.metrics


def test_what_is_no_sink_is_an_error():
    with pytest.raises(TypeError, match="to must be a folder"):
        watch(pair()[0], to=3)
    with pytest.raises(ValueError, match="to must be a folder, got ''"):
        watch(pair()[0], to="")
    with pytest.raises(ValueError, match="statistics must be out of"):
        Calls(print, statistics=("mode",))


def test_a_folder_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="lab"):
        Folder(tmp_path)


def test_infinite_numbers_are_not_sent_to_loggers():
    optimizer, params = pair()
    with torch.no_grad():
        params[0][0, 0] = float("inf")
    keeps = Keeps()
    with watch(optimizer, to=keeps):
        train(optimizer, params, 1)
    assert all(np.isfinite(value) for values in keeps.found.values() for value in values.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_reads_what_was_written_and_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path):
    optimizer, params = pair()
    with watch(optimizer, to=tmp_path / "run") as watcher:
        train(optimizer, params, 2)
        expected = len(watcher.records())
        process = os.fork()
        if process == 0:
            signal.alarm(30)
            os._exit(0 if len(watcher.records()) == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        train(optimizer, params, 1, first=2)
    assert sorted(watcher.records()["step"].unique()) == [0, 1, 2]

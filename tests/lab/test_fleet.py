"""Trainings and fleets: against a plain loop, alone and together, killed, out of time and diverging."""

import contextlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch._dynamo.backends.debugging import aot_eager

from steradian import find_groups
from steradian.lab import training as lab_training
from steradian.lab.angle import CROSSED, MATCHED, TUNED
from steradian.lab.fleet import Fleet, Progress
from steradian.lab.models import small_cnn
from steradian.lab.registry import METHODS
from steradian.lab.results import Result, Store
from steradian.lab.training import Execution, Queue, Training

from lab.studies import CONFIG, comparable, curves, few, fleet, methods

CUDA = torch.cuda.is_available()
ALONE = [name for name in METHODS if name not in MATCHED]  # the others need a record of SGD-M's angles
OURS = [name for name in ALONE if name not in {*CROSSED, *TUNED} or name in ("SGD-M", "Adam w/o (ab)")]
KINDS = ["SGD-M", "AdamG†", "Adam w/o (abc)", "AdaGradG", "AdaGrad"]  # one of each kind of state


@pytest.fixture(scope="module")
def data():
    return few()


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(data, tmp_path):
    (tmp_path / "results").write_text("not a folder")
    study = fleet(tmp_path, data, make=lambda *_, **__: pytest.fail("a training was begun"))
    study.store = Store(tmp_path / "results" / "mine.json")
    with pytest.raises(OSError, match="results"):
        study.run([CONFIG])


def test_a_training_is_the_plain_loop(data):
    """Against torch.optim.Adam written out, batch by batch."""
    config = replace(CONFIG, method="Adam", epochs=2, milestones=(1,))
    training = Training(config, data)
    twin = Training(config, data).model
    optimizer = torch.optim.Adam(twin.parameters(), config.lr, config.betas, weight_decay=config.weight_decay)
    losses = []
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = config.lr * (1.0 if epoch == 0 else 0.1)
        mean = 0.0
        for codes in data.plan(config.seed, epoch, config.batch_size):
            images, labels = data.batch(torch.from_numpy(codes))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(twin(images), labels)
            loss.backward()
            optimizer.step()
            mean += loss.item()
        losses.append(mean / training.steps)
        training.run_epoch()
    np.testing.assert_allclose(training.curves["train_loss"], losses, rtol=1e-6)
    for p, q in zip(training.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    twin.eval()
    for part in ("validation", "test"):
        start, end = data.spans[part]
        images, labels, _ = data.chunk(torch.tensor([start]), torch.tensor([end]), end - start)
        hits = (twin(images).argmax(1) == labels).double().mean().item()
        assert math.isclose(training.curves[f"{part}_accuracy"][-1], 100 * hits)


@pytest.mark.parametrize("method", ALONE)
def test_every_method_resumes_from_its_state(data, method):
    [config] = methods(method, epochs=2)
    whole, first = Training(config, data), Training(config, data)
    whole.run_epoch()
    whole.run_epoch()
    first.run_epoch()
    state = first.state()
    first.run_epoch()  # a state shares no memory with the training that gave it
    second = Training(config, data)
    second.load(state)
    second.run_epoch()
    assert comparable(second.curves) == comparable(whole.curves) == comparable(first.curves)
    assert whole.finished
    assert not whole.diverged
    assert all(torch.equal(p, q) for p, q in zip(whole.weights().values(), second.weights().values(), strict=True))


@pytest.mark.parametrize("method", ALONE)
def test_every_method_descends_on_rows_and_rest(data, method):
    """⟨∇L, Δx⟩ < 0 for every parameter in the first step, and the loss of that batch is lower after it."""
    training = Training(methods(method)[0], data)
    codes = torch.from_numpy(data.plan(training.config.seed, 0, training.config.batch_size)[0])
    before = {name: param.detach().clone() for name, param in training.model.named_parameters()}
    first, _ = lab_training._loss(training.model, data, codes, False)
    training.take_plainly()
    for name, param in training.model.named_parameters():
        assert torch.dot(param.grad.flatten(), (param.detach() - before[name]).flatten()) < 0, name
    assert lab_training._loss(training.model, data, codes, False)[0] < first


REST = {"SGD-M": 0.9, "SGD": 0.0, "AdaGradG": 0.0, "AdaGrad": 0.0}
"""Methods whose rest is trained by torch's SGD, with this momentum; that of the others by torch's Adam."""


@pytest.mark.parametrize("method", OURS)
def test_every_method_treats_the_rest_as_torchs_own_optimizer_does(data, method):
    """The same gradients at every step: a twin of the parameters without rows, stepped by torch, stays with them."""
    [config] = methods(method, epochs=1)
    config = replace(config, rest_lr=2e-3 if method in ("AdamG†", "AdaGrad") else None)
    training = Training(config, data)
    rest = {name: training.groups.params[name] for name in training.groups.rest}
    assert set(rest) | set(training.groups.layouts) == set(training.groups.params)
    twin = {name: param.detach().clone().requires_grad_() for name, param in rest.items()}
    lr = config.rest_lr or config.lr
    if method in REST:
        exact = torch.optim.SGD(twin.values(), lr, REST[method], weight_decay=config.weight_decay)
    else:
        exact = torch.optim.Adam(twin.values(), lr, config.betas, weight_decay=config.weight_decay)
    for _ in range(3):
        training.take_plainly()
        for name, param in rest.items():
            twin[name].grad = param.grad.clone()
        exact.step()
        for name, param in rest.items():
            torch.testing.assert_close(param.detach(), twin[name].detach(), rtol=1e-5, atol=1e-7, msg=name)


def test_only_rows_differ_between_adam_and_its_variants(data):
    """After one step from the same start, parameters without rows are where Adam put them."""
    made = {}
    for config in methods("Adam", "AdamW†", "AdamG†", "Adam w/o (a)", "Adam w/o (ab)", "Adam w/o (abc)"):
        training = Training(config, data)
        training.take(1)
        made[config.method] = training
    adam = made.pop("Adam")
    for method, training in made.items():
        for name in training.groups.rest:
            torch.testing.assert_close(training.groups.params[name], adam.groups.params[name], msg=f"{method} {name}")
        moved = [
            n for n in training.groups.layouts if not torch.equal(training.groups.params[n], adam.groups.params[n])
        ]
        assert moved


def test_trainings_of_one_kind_share_what_was_compiled(monkeypatch):
    """Traced by torch.compile and run without code generation: the same figures, and nothing is traced twice."""
    traced, data = [], few(train=120, test=24)

    def small(config, _):
        torch.manual_seed(config.seed)
        model = small_cnn(width=4)
        return model, find_groups(model, torch.randn(8, 1, 8, 8))

    def backend(graph, inputs):
        traced.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(lab_training, "network", small)
    monkeypatch.setattr(lab_training, "compiled", lambda work: torch.compile(work, backend=backend, dynamic=False))
    shapes = len({tuple(p.shape) for p in Training(CONFIG, data).model.parameters() if p.ndim == 4})
    [config] = methods("AdamG†", epochs=1)
    for seed in (0, 1):
        config = replace(config, seed=seed)
        plain, compiled = Training(config, data), Training(config, data, execution=Execution(compiled=True))
        plain.run_epoch()
        compiled.run_epoch()
        for name, values in plain.curves.items():
            np.testing.assert_allclose(compiled.curves[name], values, rtol=1e-3, err_msg=name)
        # A step, an evaluation, and a step on rows for each shape.
        assert len(traced) == 2 + shapes
    torch._dynamo.reset()


def test_a_run_in_a_fleet_is_the_run_alone(tmp_path, data):
    configs = methods("Adam", "AdamG†", "Adam w/o (abc)", "SGD-M", epochs=2)
    configs.append(replace(configs[0], seed=1))
    together = fleet(tmp_path / "together", data, size=5)
    assert together.run(configs)
    for config in configs[:3]:
        alone = Training(config, data)
        while not alone.finished:
            alone.run_epoch()
        rounded = Result.from_dict(Result(config, alone.curves).to_dict()).curves
        assert curves(together.store)[config.key] == comparable(rounded)


def test_finished_trainings_are_not_repeated_and_the_rest_is_queued(tmp_path, data, monkeypatch):
    configs = methods("Adam", "SGD-M", "Adam w/o (a)", epochs=1)
    study = fleet(tmp_path, data, size=1)
    assert study.run(configs[:2])
    before = study.store.path.read_bytes()
    started = []
    start = Fleet._start
    monkeypatch.setattr(Fleet, "_start", lambda self, config: started.append(config) or start(self, config))
    assert study.run([*configs, *configs])
    assert started == configs[2:]
    assert len(study.store.results()) == 3
    assert study.run(configs)
    assert len(started) == 1
    assert before != study.store.path.read_bytes()
    assert not list((tmp_path / "work" / "checkpoints").glob("*"))


def test_time_that_is_over_stops_at_a_checkpoint(tmp_path, data):
    """With a clock that advances a second per call, so that a budget is a number of epochs."""
    ticks = iter(range(10**9))
    configs = methods("Adam", "Adam w/o (abc)", epochs=5)
    study = fleet(tmp_path, data, clock=lambda: float(next(ticks)))
    runs = 1
    while not study.run(configs, seconds=30):
        saved = list((tmp_path / "work" / "checkpoints").glob("*.pt"))
        assert saved
        runs += 1
        assert runs < 20
    assert runs > 1
    whole = fleet(tmp_path / "whole", data)
    whole.run(configs)
    assert curves(study.store) == curves(whole.store)


class Interrupting(Progress):
    """Presses Ctrl-C, or sends another signal, after the second epoch of a training, once or twice."""

    def __init__(self, times, number=signal.SIGINT):
        super().__init__(Console(file=io.StringIO(), width=160))
        self.times, self.number = times, number

    def epoch(self, config, curves):
        if len(curves["train_loss"]) == 2 and self.times:
            times, self.times = self.times, 0
            for _ in range(times):
                signal.raise_signal(self.number)


@pytest.fixture
def handler():
    """Sets a signal handler, and restores the old one."""
    before = {}

    def set_to(number, does):
        before.setdefault(number, signal.signal(number, does))

    yield set_to
    for number, does in before.items():
        signal.signal(number, does)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_stop_a_study_with_checkpoints(tmp_path, data, handler, number):
    handler(number, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt):
        fleet(tmp_path, data, progress=Interrupting(1, number)).run(methods("Adam", epochs=4))
    [saved] = (tmp_path / "work" / "checkpoints").glob("*.pt")
    assert torch.load(saved, weights_only=True)["training"]["epoch"] == 2
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_sighup_does_not_stop_a_study(tmp_path, data, handler):
    handler(signal.SIGHUP, signal.SIG_IGN)
    assert fleet(tmp_path, data, progress=Interrupting(1, signal.SIGHUP)).run(methods("Adam", epochs=3))


def test_an_interrupted_study_loses_nothing_and_a_second_time_stops_at_once(tmp_path, data):
    configs = methods("Adam", "SGD-M", epochs=4)
    before = signal.getsignal(signal.SIGINT)
    for times in (2, 1):
        progress = Interrupting(times)
        with pytest.raises(KeyboardInterrupt):
            fleet(tmp_path, data, progress=progress).run(configs)
        saved = [torch.load(p, weights_only=True) for p in (tmp_path / "work" / "checkpoints").glob("*.pt")]
        assert [state["training"]["epoch"] for state in saved] == ([] if times == 2 else [2, 2])
        assert progress.console.file.getvalue().count("stopping when the current epochs end") == 1
        assert signal.getsignal(signal.SIGINT) is before
    study = fleet(tmp_path, data)
    assert study.run(configs)
    whole = fleet(tmp_path / "whole", data)
    whole.run(configs)
    assert curves(study.store) == curves(whole.store)
    last = fleet(tmp_path / "last", data, progress=Interrupting(1))
    with pytest.raises(KeyboardInterrupt):  # also if nothing is left to do
        last.run(methods("Adam", epochs=2))
    assert len(last.store.results()) == 1


def test_the_first_epoch_does_not_count_for_the_pace(tmp_path, data):
    """The first epoch ends after 100 seconds, the others take 10: a sitting of 155 has room for five more."""
    now = [0.0]

    class Slow(Training):
        def end_epoch(self):
            now[0] += 10.0 if self.epoch else 100.0
            super().end_epoch()

    [config] = methods("Adam", epochs=9)
    study = fleet(tmp_path, data, make=Slow, clock=lambda: now[0])
    assert not study.run([config], seconds=155)
    [saved] = (tmp_path / "work" / "checkpoints").glob("*.pt")
    assert torch.load(saved, weights_only=True)["training"]["epoch"] == 6


def test_progress_shows_epoch_loss_accuracy_and_time_left(tmp_path, data):
    clock = iter(range(10**9))
    output = {}
    for live in (True, False):
        terminal = {"force_terminal": live, "_environ": {"TERM": "xterm"}}
        console = Console(file=io.StringIO(), width=160, **terminal)
        progress = Progress(console, clock=lambda: 40.0 * next(clock))
        fleet(tmp_path / str(live), data, progress=progress).run(methods("Adam", "SGD-M", epochs=4))
        if live:
            first = Training(methods("Adam")[0], data)
            with progress:
                progress.begin(3, 1)
                for _ in range(2):
                    first.run_epoch()
                    progress.epoch(first.config, first.curves)
                progress.stopping()
        output[live] = re.sub(r"\x1b\[[\d;?]*\w", "", console.file.getvalue())
    assert "1 of 3 trainings were finished before" in output[True]
    assert "Ctrl-C again to stop now" in output[True]
    *_, row = (line for line in output[True].splitlines() if "Adam lr 0.001 " in line and "2/3" in line)
    assert re.search(r"2/3  loss \d+\.\d{3}  validation [\d.]+  test [\d.]+ .*\d:\d\d:\d\d", row)
    assert re.search(
        r"2 of 2 trainings finished .*4/4  loss [\d.]+  validation [\d.]+ at best, in epoch [1-4]  test [\d.]+ there",
        output[False],
    )
    assert re.search(r"VGG16 bn digits Adam lr 0.001 λ [\d.e-]+ seed 0  [123]/4", output[False])


@pytest.mark.parametrize(("size", "seconds"), [(1, 29), (40, 5 * 29)])
def test_a_single_training_has_a_checkpoint_early_and_continues_from_it(tmp_path, data, size, seconds):
    """With epochs of half a minute; the study is killed when it has a checkpoint."""
    now, console = [0.0], Console(file=io.StringIO(), width=160)
    [config] = methods("Adam", epochs=8)

    class Slow(Progress):
        def epoch(self, config, curves):
            if (tmp_path / "work" / "checkpoints" / f"{config.key}.pt").exists():
                raise KeyboardInterrupt
            now[0] += 29.0

    run = {"size": size, "clock": lambda: now[0]}
    with pytest.raises(KeyboardInterrupt):
        fleet(tmp_path, data, progress=Slow(), **run).run([config])
    assert now[0] == seconds + 29, "it is noticed an epoch later"
    assert fleet(tmp_path, data, progress=Progress(console), **run).run([config])
    assert "0 of 1 trainings were finished before, 1 continues from a checkpoint\n" in console.file.getvalue()


def test_a_diverging_run_is_recorded_and_the_others_finish(tmp_path, data):
    [wild] = methods("SGD", epochs=3)
    wild, calm = replace(wild, lr=1e30, norm="wn"), CONFIG
    study = fleet(tmp_path, data)
    assert study.run([wild, calm])
    found = {result.config.key: result for result in study.store.results()}
    assert found[wild.key].diverged
    assert len(found[wild.key].curves["train_loss"]) < 3 or math.isnan(found[wild.key].curves["train_loss"][-1])
    assert math.isnan(found[wild.key].accuracy)
    assert not found[calm.key].diverged
    assert len(found[calm.key].curves["train_loss"]) == 3


def test_the_state_of_another_training_is_refused(data):
    with pytest.raises(ValueError, match="belongs to another training"):
        Training(CONFIG, data).load(Training(replace(CONFIG, seed=1), data).state())


STUDY = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from lab.studies import few, fleet, methods, without_discovery
without_discovery()  # which is not what is killed here
data = few(train=60, test=20)
configs = methods("Adam", "Adam w/o (abc)", "SGD-M", epochs=4)
print("ready", flush=True)
for folder in sys.stdin:  # a fresh process for each line, without importing everything again
    child = os.fork()
    if not child:
        fleet(Path(folder.strip()), data, size=2, every=0.0).run(configs)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Starter:
    """Starts processes that run the study in a folder."""

    def __init__(self):
        code = STUDY.format(tests=str(Path(__file__).parent.parent))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)

    def __enter__(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.communicate(timeout=60)

    def run(self, folder, *, kill_after=None):
        """Whether the study ended before it was killed."""
        print(folder, file=self.process.stdin, flush=True)
        child = int(self.process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline()) == 0


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_study_killed_several_times_gives_the_same_result(tmp_path, times):
    random, kills, study = np.random.default_rng(), 0, 0
    with Starter() as starter:
        began = time.monotonic()
        assert starter.run(tmp_path / "whole")
        whole = time.monotonic() - began
        while kills < times:
            # At any moment: in a step, in an evaluation, in a write. A study that ended is followed by another.
            ended = starter.run(tmp_path / f"killed {study}", kill_after=random.uniform(0.05, 0.3) * whole)
            kills, study = kills + (not ended), study + ended
        assert starter.run(tmp_path / f"killed {study}")
    expected = curves(Store(tmp_path / "whole" / "results.json"))
    assert len(expected) == 3
    for number in range(study + 1):
        assert curves(Store(tmp_path / f"killed {number}" / "results.json")) == expected


@pytest.mark.parametrize("method", KINDS)
def test_preparing_a_capture_changes_no_result_and_moves_no_memory(data, method, monkeypatch):
    """A capture without the graph: steps are run and undone, also in the middle of an epoch."""
    monkeypatch.setattr(Queue, "capture", lambda self, work: work)
    [config] = methods(method, epochs=2)
    plain, prepared = Training(config, data), Training(config, data)
    prepared.execution = replace(prepared.execution, captured=True)
    for training in (plain, prepared):
        training.take_plainly()
        training.take(2)
    where = _addresses(prepared)
    for _ in range(2):
        plain.run_epoch()
        prepared.run_epoch()
    assert _addresses(prepared) == where
    assert comparable(prepared.curves) == comparable(plain.curves)
    again = Training(config, data)
    again.execution = prepared.execution
    middle = Training(config, data)
    middle.run_epoch()
    again.load(middle.state())
    again.run_epoch()
    assert again.curves["train_loss"] == plain.curves["train_loss"]


def _addresses(training):
    states = [state for optimizer in training.optimizers for state in optimizer.state.values()]
    tensors = [*training.model.state_dict().values(), *(t for state in states for t in state.values() if t.ndim)]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a CPU kernels run in Triton's interpreter, which is off where there is a GPU"
)
def test_fused_steps_are_the_reference_and_their_state_has_the_layout_of_the_weights(data):
    """With channels last, from a fresh state and from one saved with channels first; fusion needs the layout."""
    config = replace(methods("Adam w/o (abc)", epochs=2)[0], batch_size=96)
    reference = Training(config, data)
    reference.run_epoch()
    fused, loaded = (Training(config, data) for _ in range(2))
    for training in (fused, loaded):
        training.optimizers[0].param_groups[0]["fused"] = True
        training.model.to(memory_format=torch.channels_last)
    fused.run_epoch()
    loaded.load(reference.state())
    reference.run_epoch()
    fused.run_epoch()
    loaded.run_epoch()
    for training in (fused, loaded):
        [optimizer] = training.optimizers
        filters = [(p, state) for p, state in optimizer.state.items() if p.ndim == 4]
        assert len(filters) == 13
        assert all(state["exp_avg"].stride() == p.stride() for p, state in filters)
        for name, tensor in reference.weights().items():
            torch.testing.assert_close(training.weights()[name], tensor, rtol=1e-3, atol=1e-4)


def steps(config, data, count, **execution):
    training = Training(config, data, execution=Execution(**execution))
    while count:
        training.take(1)
        count -= 1
    torch.cuda.synchronize()
    return training


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # float32 is meant to be float32 here
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_run_in_a_fleet_is_the_run_alone(exact, compiled):
    data = few("cuda", train=1000, test=100)
    configs = [replace(c, seed=s) for s in (0, 1) for c in methods("Adam", "AdamG†", "Adam w/o (abc)", "SGD-M")]
    fellows = [Training(config, data, execution=Execution(compiled=compiled)) for config in configs]
    for _ in range(10):
        for training in fellows:
            training.take(5)
    torch.cuda.synchronize()
    for training in fellows:
        alone = steps(training.config, data, 50, compiled=compiled).weights()
        for name, tensor in training.weights().items():
            torch.testing.assert_close(alone[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("method", ALONE)
def test_on_a_gpu_replayed_steps_are_the_plain_steps(exact, method):
    """Over a few steps, since plain steps round differently: the optimizers are not the fused ones."""
    data = few("cuda", train=1000, test=100)
    [config] = methods(method)
    plain, replayed = (steps(config, data, 5, captured=captured).weights() for captured in (False, True))
    if "muon" in config.method.lower():
        # Newton–Schulz runs in bfloat16: a change of the weights by 1e-7 turns five steps by up to 2 % of their length.
        start, *ends = (
            torch.cat([each[name].flatten().double() for name in plain if each[name].is_floating_point()])
            for each in (Training(config, data).weights(), plain, replayed)
        )
        assert torch.dist(*ends) <= 0.05 * torch.dist(start, ends[0])
        return
    for name, tensor in replayed.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_on_a_gpu_a_study_with_interruptions_is_the_study_without(exact, tmp_path):
    data = few("cuda", train=400, test=100)
    configs = [replace(c, seed=s) for s in (0, 1) for c in methods("Adam", "Adam w/o (abc)", epochs=4)]
    whole, parts = fleet(tmp_path / "whole", data), fleet(tmp_path / "parts", data)
    assert whole.run(configs)
    ticks = iter(range(10**9))
    parts.clock = lambda: float(next(ticks))
    runs = 1
    while not parts.run(configs, seconds=40):
        runs += 1
        assert runs < 50
    assert runs > 1
    for key, expected in curves(whole.store).items():
        np.testing.assert_allclose(curves(parts.store)[key]["train_loss"], expected["train_loss"], rtol=1e-4)

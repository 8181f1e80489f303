"""A plugin's optimizer, network and data set run through compare and tune, are killed, continued, and end the same."""

import io
import json
import linecache
import math
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from steradian import lab
from steradian.cli import main
from steradian.lab import angle, registry  # noqa: F401  # angle registers methods, which are kept
from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.recipes import comparison, tuning
from steradian.lab.results import CURVES, Result, Store
from steradian.lab.tables import accuracy_columns
from steradian.lab.training import Execution, Queue, Training

from lab.studies import CONFIG, curves, few, fleet

PLUGIN = '''
import numpy as np
import torch
from torch import nn
from steradian import lab


class Signs(torch.optim.Optimizer):
    """Steps by the sign of the momentum."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m.sign() * group["lr"])


def network(*, channels, classes, size):
    body = [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes))


def stripes(root):
    """Noisy stripes of two directions."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 320)
    images = random.integers(0, 200, (320, 8, 8, 1))
    images[labels == 0, ::2] += 40
    images[labels == 1, :, ::2] += 40
    images = images.astype(np.uint8)
    return images[:256], labels[:256], images[256:], labels[256:]


lab.register_method("Signs", lambda groups, c: Signs(groups.param_groups(), c.lr, c.weight_decay))
lab.register_network("Tiny", network)
lab.register_data("stripes", stripes)
lab.register_schedule("halves", lambda config, epoch: 0.5**epoch)
'''
OPTIONS = "--network Tiny --data stripes --plugin mine.py --methods Signs --methods sgd-m --lr Signs=0.003"
OPTIONS += " --set batch_size=32 --set precision=float32 --device cpu"


@pytest.fixture
def known(monkeypatch):
    """Nothing registered in a test is left, and no plugin was loaded before, as in a new process."""
    monkeypatch.setattr(registry, "_files", {})
    before = {kind: dict(names) for kind, names in registry._KNOWN.items()}, dict(registry._sources)
    yield
    for kind, names in before[0].items():
        registry._KNOWN[kind].clear()
        registry._KNOWN[kind].update(names)
    registry._sources.clear()
    registry._sources.update(before[1])


@pytest.fixture
def call(monkeypatch, tmp_path, known):
    """Run a command in a folder of its own that holds the plugin; returns what it prints."""

    def run(command, folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setenv("COLUMNS", "200")  # on narrow screens seeds are left out
        if not Path("mine.py").exists():
            Path("mine.py").write_text(PLUGIN)
        monkeypatch.setattr(sys, "argv", ["steradian", *command.split()])
        registry._files.clear()  # as in a new process
        with redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 0
        return output.getvalue()

    return run


def tables(output):
    """Without the times, which differ."""
    return [line for line in output.splitlines() if line[:1] in "┃│" or " has the best mean" in line]


def test_compare_killed_and_continued_ends_in_the_same_table(call, tmp_path):
    command = f"compare {OPTIONS} --epochs 12 --seeds 2"
    whole = call(command, "whole")
    assert re.search(r"│ Signs +│ [\d.]+ +│ [\d.]+ +│ [\d.]+ ± [\d.]+ +│ 2 ", whole)
    assert "Tiny, stripes, 12 epochs" in whole
    assert re.search(r"(Signs|SGD-M) has the best mean, .*; worse: .*; not decided with these seeds: ", whole)
    page = (tmp_path / "whole" / "results" / "compare-tiny-stripes.html").read_text()
    assert "<td>Signs" in page
    assert page.count("<svg") == 3

    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "mine.py").write_text(PLUGIN)
    killed = subprocess.Popen(
        [sys.executable, "-m", "steradian", *command.split()],
        cwd=tmp_path / "killed",
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("1 of 4") for line in killed.stdout)
    killed.kill()
    killed.communicate()
    store = Store(tmp_path / "killed" / "results" / "compare-tiny-stripes.json")
    before = len(store.results())
    assert before >= 1
    for _ in range(100):  # stopped by the clock in the middle of trainings, too
        output = call(f"{command} --seconds 0.3", "killed")
        if "Time is up" not in output:
            break
    assert tables(output) == tables(whole)

    # Half of the trainings use the edited plugin's optimizer, and all of them its network.
    plugin = tmp_path / "killed" / "mine.py"
    plugin.write_text(PLUGIN.replace("lerp_(p.grad, 0.1)", "lerp_(p.grad, 0.2)"))
    assert "0 of 4 trainings were finished before" in call(command, "killed")
    assert len(store.results()) == 8
    # Each version has a row of its own.
    versions = {r.config.plugin for r in store.results() if r.config.method == "Signs"}
    shown = call("table compare-tiny-stripes", "killed")
    assert len(versions) == 2
    assert all(f"Signs of {version}" in shown for version in versions)


def test_tune_gives_every_method_the_same_number_of_points(call, tmp_path):
    command = f"tune {OPTIONS} --epochs 3 --seeds 2 --points 2 --weight-decay SGD-M=0,1e-3 --weight-decay Signs=0,1"
    outputs = [call(f"{command} --seconds {seconds}", "one") for seconds in (0, 0.2, 600)]
    assert "Time is up" in outputs[0]
    assert tables(outputs[-1]) == tables(call(command, "two"))
    tried = Store(tmp_path / "two" / "results" / "tune-tiny-stripes-grid.json").results()
    points = {(r.config.method, r.config.lr, r.config.weight_decay) for r in tried}
    assert len(points) == len(tried) == 8
    assert {point[1:] for point in points if point[0] == "Signs"} == {
        (lr, decay) for lr in (0.003, 0.00949) for decay in (0, 1)
    }
    winners = Store(tmp_path / "two" / "results" / "tune-tiny-stripes.json").results()
    assert {(r.config.method, r.config.seed) for r in winners} == {(m, s) for m in ("Signs", "SGD-M") for s in (1, 2)}
    for method in ("Signs", "SGD-M"):
        assert f"{method}: the best rate, " in outputs[-1], "of two points each is at an edge"
        best = max((r for r in tried if r.config.method == method), key=lambda r: max(r.curves["validation_accuracy"]))
        assert {r.config.setting for r in winners if r.config.method == method} == {best.config.setting}


CELLS = {
    "imports": "import torch\nfrom steradian import lab\nimport opts_@",
    "rate": "RATE = 1.0",
    "helper": "def helper(config):\n    return config.lr * RATE",
    "class": "class Mine(torch.optim.SGD):\n    @torch.no_grad()\n    def step(self):\n        return 1",
    "other": "def other():\n    return 1",
    "maker": "def maker(cls, scale):\n    return lambda groups, config: cls([], helper(config) * opts_@.SCALE, scale)",
    "register": "lab.register_method('Mine', maker(Mine, 0.5))",
}


def test_in_a_notebook_all_that_a_method_names_is_part_of_the_key(known, tmp_path, monkeypatch):
    mark = re.sub(r"\W", "_", tmp_path.name)
    monkeypatch.syspath_prepend(tmp_path)

    def key(module="SCALE = 1", **changes):
        (tmp_path / f"opts_{mark}.py").write_text(module)
        names = {"__name__": "a_notebook"}
        for number, text in enumerate((CELLS | changes).values()):
            text, file = text.replace("opts_@", f"opts_{mark}"), f"/a/notebook/{number}"
            monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
            exec(compile(text, file, "exec"), names)
        return comparison(network="ResNet20", data="cifar10", methods=["Mine"], lr={"Mine": 1}, seeds=1)[0].key

    first = key()
    assert key() == first
    assert key(other="def other():\n    return 2") == first
    for name, old, new in (
        ("rate", "1", "2"),
        ("helper", "config.lr", "0.1"),
        ("class", "return 1", "return 2"),
        ("register", "0.5", "0.6"),
    ):
        assert key(**{name: CELLS[name].replace(old, new)}) != first
    assert key(module="SCALE = 2") != first
    names = {"__name__": "a_notebook", "lab": lab}
    with pytest.raises(ValueError, match="must be in a file or a notebook: it has no source"):
        exec("lab.register_method('Mine', lambda groups, config: None)", names)


def test_only_trainings_that_use_a_plugin_have_its_hash(known, tmp_path):
    plugin, wanted = tmp_path / "mine.py", {"methods": ["Signs", "SGD-M"], "lr": {"signs": 0.1}, "seeds": 1}
    found = []
    for source in (PLUGIN, PLUGIN + "# edited\n"):
        plugin.write_text(source)
        lab.load_plugin(plugin)
        found.append(comparison(network="ResNet20", data="cifar10", **wanted))
    assert found[0][0].key != found[1][0].key
    assert found[0][1].key == found[1][1].key
    assert (found[0][1].plugin, found[0][1].norm) == ("", "bn")
    [own] = comparison(network="Tiny", data="cifar10", methods=["Adam"], seeds=1, schedule="halves")
    assert (own.plugin, own.norm, own.width) == (found[1][0].plugin, "", None)
    with pytest.raises(ValueError, match="plugin must be"):
        fleet(tmp_path, few()).run([replace(CONFIG, method="Signs")])
    with pytest.raises(ValueError, match="name must not be that of a method of the lab"):
        lab.register_method("Adam", lambda groups, config: None)


@pytest.mark.parametrize(
    "make",
    [
        "from opts_@ import RATE\nmake = lambda groups, config: torch.optim.SGD(groups.param_groups(), RATE)",
        "import opts_@ as o\nmake = lambda groups, config: torch.optim.SGD(groups.param_groups(), o.RATE)",
        "def make(groups, config):\n    from mine_@.inner import RATE\n    return torch.optim.SGD([], RATE)",
    ],
)
def test_what_a_plugin_imports_is_part_of_the_hash(known, tmp_path, monkeypatch, make):
    """Also in functions, and through other modules."""
    mark = re.sub(r"\W", "_", tmp_path.name)  # the modules of other tests stay imported
    monkeypatch.setattr(sys, "path", [*sys.path])
    files = {
        "plugin.py": f"import json, torch\nfrom steradian import lab\n{make}\nlab.register_method('Mine', make)",
        "opts_@.py": "from mine_@.inner import RATE",
        "mine_@/__init__.py": "",
        "mine_@/inner.py": "from . import deeper\nRATE = deeper.RATE",
        "mine_@/deeper.py": "from rate_@ import RATE",
        "rate_@.py": "RATE = 0.1",
        "other.py": "",
    }

    def key(**changes):
        for name, text in (files | changes).items():
            path = tmp_path / name.replace("@", mark)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace("@", mark))
        lab.load_plugin(tmp_path / "plugin.py")
        return comparison(network="ResNet20", data="cifar10", methods=["Mine"], lr={"Mine": 1}, seeds=1)[0].key

    first = key()
    assert key(**{"other.py": "1"}) == first
    for name in ("rate_@.py", "mine_@/inner.py"):
        assert key(**{name: files[name] + "  # edited"}) != first
    assert key() == first


class Odd(torch.optim.Optimizer):
    """Keeps what torch's optimizers do not: settings that change, and a state of many kinds."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0, "mean": torch.tensor(0.0)})

    @torch.no_grad()
    def step(self):
        self.state["all"] = {"steps": self.state["all"].get("steps", 0) + 1}
        for group in self.param_groups:
            group["count"] += 1
            group["named later"] = group.get("named later", 1.0) * 0.9
            group["mean"].add_(0.1)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(size=1.0, word="up", pair=(1, None), past=[], root=np.float64(2.0))
                    state.update(sums=torch.zeros_like(p, dtype=torch.float64), positive=p > 0)
                state["size"] *= 0.99
                state["root"] = np.sqrt(state["root"])
                state["past"] = [*state["past"], p.grad.clone()][-3:]
                state["sums"] += p.grad.double().square()
                state["positive"] = state["positive"] ^ (p.grad > 0)
                state["pair"] = (state["pair"][0] + 1, None)
                step = sum(state["past"]) / (state["sums"].sqrt() + 1e-3).float() * state["size"] * state["root"]
                step[state["positive"]] *= 0.5
                share = group["lr"] * group["named later"] / (group["count"] + self.state["all"]["steps"])
                p.sub_(step * share / state["pair"][0] * (1 + group["mean"]) * len(state["word"]))


class ScheduleFree(torch.optim.Optimizer):
    """Gradients at y, evaluations at x (Defazio et al., The Road Less Scheduled, 2024)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0, "training": False})

    def train(self, mode=True):
        for group in self.param_groups:
            for p in group["params"] if group["training"] != mode else ():
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], 0.1 if mode else 1 - 1 / 0.9)
            group["training"] = mode

    def eval(self):
        self.train(False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["training"]
            group["count"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["count"]).sub_(p.grad, alpha=group["lr"] * (0.1 + 0.9 / group["count"]))
                z.sub_(p.grad, alpha=group["lr"])


class Still(nn.Sequential):
    """Its BN never leaves the evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def convolution(kind=nn.Sequential, *, drop=0.0, channels, classes, size):
    body = [nn.Conv2d(channels, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(drop)]
    return kind(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes))


STRANGE = {
    "state": (lambda groups, config: Odd(groups.param_groups(), config.lr), convolution),
    "modes": (lambda groups, config: ScheduleFree(groups.param_groups(), config.lr), convolution),
    "closure": (lambda groups, config: torch.optim.LBFGS(list(groups.params.values()), config.lr, 2), convolution),
    "dropout": (None, partial(convolution, drop=0.5)),
    "evaluation": (None, partial(convolution, Still)),
}


@pytest.fixture
def strange(known):
    """Configurations of the strange methods and networks, over two seeds."""

    def made(kind, epochs=3):
        method, network = STRANGE[kind]
        lab.register_method("Strange", method or (lambda groups, config: torch.optim.SGD(groups.param_groups(), 0.1)))
        lab.register_network("Strange", network)
        how = {"network": "Strange", "data": "digits", "epochs": epochs, "lr": {"Strange": 0.1}, "batch_size": 16}
        return comparison(methods=["Strange"], seeds=2, **how)

    return made


@pytest.mark.parametrize("kind", STRANGE)
def test_a_training_that_continues_from_files_is_the_same_bit_for_bit(strange, tmp_path, kind):
    data, whole, parts = few(), strange(kind), strange(kind)
    assert fleet(tmp_path / "whole", data).run(whole)
    for _ in range(20):
        passed = iter([0.0, 0.0, 0.0])  # the time is over after the first epoch that ends
        study = fleet(tmp_path / "parts", data, size=2, clock=lambda passed=passed: next(passed, 1e9))
        if study.run(parts, seconds=100):
            break
        torch.rand(7)  # somebody else's numbers
    stores = [Store(tmp_path / place / "results.json") for place in ("whole", "parts")]
    assert curves(stores[0]) == curves(stores[1])
    losses = [result.curves["train_loss"] for result in stores[0].results()]
    assert losses[0] != losses[1]
    assert all(min(each[1:]) < each[0] for each in losses)


def test_a_state_that_a_file_cannot_hold_is_refused_at_the_first_checkpoint(known):
    def make(groups, config):
        optimizer = torch.optim.SGD(groups.param_groups(), config.lr)
        optimizer.state["past"] = {"made by": iter([])}
        return optimizer

    lab.register_method("Odd", make)
    training = Training(replace(CONFIG, method="Odd"), few())
    with pytest.raises(TypeError, match=r"an optimizer keeps in its state must be tensors, .* got list_iterator"):
        training.state()


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (lambda **kind: None, "must be a torch.nn.Module, got NoneType"),
        (
            lambda **kind: convolution(**kind | {"classes": 2}),
            r"must return logits, of shape \(8, 10\) here, got \(8, 2\)",
        ),
        (lambda **kind: convolution(**kind)[:3], r"must return logits, .* got \(8, 4, 6, 6\)"),
        (lambda **kind: nn.Sequential(nn.Flatten(), nn.LSTM(64, 10)), "must return logits, .* got tuple"),
    ],
)
def test_a_network_that_gives_no_logits_is_refused_by_name(known, network, found):
    lab.register_network("Odd", network)
    with pytest.raises((TypeError, ValueError), match=f"network 'Odd' {found}"):
        Training(replace(CONFIG, model="Odd", norm="", width=None), few())


def test_an_optimizer_without_a_rate_is_refused_by_name(known):
    def make(groups, config):
        optimizer = torch.optim.SGD(groups.param_groups(), config.lr)
        del optimizer.param_groups[0]["lr"]
        return optimizer

    lab.register_method("Odd", make)
    with pytest.raises(TypeError, match="param groups of method 'Odd' must have 'lr'"):
        Training(replace(CONFIG, method="Odd"), few())


def test_two_plugins_must_not_share_a_name_and_one_may_be_loaded_again(known, tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / f"{name}.py").write_text(PLUGIN)
    lab.load_plugin(tmp_path / "mine.py")
    lab.load_plugin(tmp_path / "mine.py")
    with pytest.raises(ValueError, match=r"method 'Signs' of .*theirs.py has the name of one of .*mine.py"):
        lab.load_plugin(tmp_path / "theirs.py")
    assert comparison(network="ResNet20", data="digits", methods=["Signs"], lr={"Signs": 1}, seeds=1)[0].plugin


def test_a_method_of_another_kind_is_refused_by_name(known):
    with pytest.raises(TypeError, match=r"'Few' must be called as make\(groups, config\): too many"):
        lab.register_method("Few", lambda groups: None)
    for returned in (3, [3], None):
        lab.register_method("Odd", lambda groups, config, returned=returned: returned)
        with pytest.raises(
            TypeError, match=rf"'Odd' must return one or several optimizers, got {re.escape(str(returned))}$"
        ):
            Training(replace(CONFIG, method="Odd"), few())


def test_a_name_that_differs_in_a_sign_alone_is_that_of_its_method(known):
    lab.register_method("AdamW", lambda groups, config: torch.optim.AdamW(groups.param_groups(), config.lr))
    made = [comparison(network="ResNet20", data="digits", methods=[m], lr={m: 1}) for m in ("AdamW", "AdamW†", "adamw")]
    assert [each[0].method for each in made] == ["AdamW", "AdamW†", "AdamW†"]


def test_schedules_by_name_and_by_function(known):
    config = Config(model="ResNet20", data="cifar10", method="Adam", lr=0.1, epochs=10, warmup=2, schedule="cosine")
    factors = [config.rate_factor(epoch) for epoch in range(10)]
    warm = [1 / 3, 2 / 3]
    np.testing.assert_allclose(factors, [*warm, *(0.5 + 0.5 * math.cos(math.pi * k / 8) for k in range(8))])
    linear = replace(config, schedule="linear")
    np.testing.assert_allclose([linear.rate_factor(k) for k in range(10)], [*warm, *(1 - k / 8 for k in range(8))])
    lab.register_schedule("mine", lambda config, epoch: 0.5**epoch)
    made = comparison(network="ResNet20", data="cifar10", methods=["SGD-M"], schedule="mine", epochs=4)
    assert [made[0].rate_factor(epoch) for epoch in range(4)] == [1, 0.5, 0.25, 0.125]
    assert made[0].plugin


def test_every_method_must_have_as_many_points():
    configs = comparison(network="ResNet20", data="cifar10", methods=["SGD-M", "Adam"], seeds=1)
    assert [c.lr for c in tuning(configs, points=3)] == [0.0316, 0.1, 0.316, 0.000316, 0.001, 0.00316]
    with pytest.raises(ValueError, match="every method must have the same number of points, got SGD-M 1, Adam 6"):
        tuning(configs, rates={"SGD-M": [0.1]})


def test_a_plugin_that_fails_is_one_line_that_says_how_to_find_it(known, tmp_path, monkeypatch, capsys):
    plugin = tmp_path / "mine.py"
    lines = {
        "import sys; sys.exit(3)": f"plugin {plugin} ends the process when it is imported: SystemExit 3",
        "from . import other": "attempted relative import with no known parent package",
        "raise ValueError('no')": f"ValueError: no ({plugin}:1); STERADIAN_TRACEBACK=1 shows where",
        "x = 1": f"plugin {plugin} registers no method, network, data or schedule",
    }
    for source, said in lines.items():
        plugin.write_text(source)
        monkeypatch.setattr(sys, "argv", ["steradian", "compare", "--plugin", str(plugin), "--methods", "SGD-M"])
        with pytest.raises(SystemExit) as done:
            main()
        assert (done.value.code, capsys.readouterr().err) == (1, f"steradian: {said}\n")


def test_a_method_that_leaves_parameters_untrained_is_named(known):
    lab.register_method("Part", lambda groups, config: torch.optim.SGD(groups.param_groups()[:1], config.lr))
    config = Config(model="ResNet20", data="digits", method="Part", lr=0.1, width=4, epochs=1, milestones=())
    with pytest.warns(UserWarning, match=r"method 'Part' does not train \d+ of 59 parameters, such as "):
        Training(config, few("cpu", train=64, test=16))


def test_images_whose_mirror_image_has_another_label_need_not_be_mirrored(known):
    pixels, labels = np.zeros((8, 6, 6, 1), np.uint8), np.arange(8) % 2
    pixels[labels == 0, :, :3], pixels[labels == 1, :, 3:] = 255, 255
    for flip, bright in ((True, {0, 1}), (False, {0})):
        lab.register_data("halves", lambda root: (pixels, labels, pixels, labels), pad=0, flip=flip)
        data = Resident(load("halves"))
        images, found = data.batch(torch.arange(len(data.train_labels) * data.views))
        left, right = (half.mean((1, 2, 3))[found == 0] for half in (images[..., :3], images[..., 3:]))
        assert set((right > left).int().tolist()) == bright


def test_labels_without_a_training_image_are_an_error(known):
    images = np.zeros((4, 6, 6, 1), np.uint8)
    for labels, tests in (([1, 2, 1, 2], [1, 2, 1, 2]), ([0, 1, 0, 1], [0, 1, 3, 1])):
        lab.register_data("gaps", lambda root, both=(labels, tests): (images, both[0], images, both[1]))
        with pytest.raises(ValueError, match="data 'gaps': no training image has the label "):
            load("gaps")


def test_data_of_a_plugin_may_have_labels_of_any_integers_and_must_be_complete(known):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    for kind in ("uint8", "int32", "uint64"):
        labels = random.integers(0, 2, 40).astype(kind)
        lab.register_data("own", lambda root, labels=labels: (images[:30], labels[:30], images[30:], labels[30:]))
        training = Training(replace(CONFIG, data="own", epochs=1), Resident(load("own")))
        training.run_epoch()
        assert math.isfinite(training.curves["train_loss"][0])
    lab.register_data("own", lambda root: (images, labels))
    with pytest.raises(ValueError, match="'own' must be images, labels, test images and test labels, got 2 arrays"):
        load("own")
    lab.register_data("own", lambda root: (images, labels, images[:0], labels[:0]))
    with pytest.raises(ValueError, match=r"own must have .* a test image, got 40 and 0"):
        Resident(load("own"))


def test_results_written_by_another_program_have_a_table_and_figures(tmp_path, monkeypatch, capsys):
    """With the fields that the documentation names, and names that are no formulas."""
    rows = []
    for method, seed in product(("$\\frac a$", "_b$"), range(3)):
        config = {"model": "GPT", "norm": "", "data": "bytes", "method": method, "lr": 1, "seed": seed, "epochs": 2}
        curves = {name: [1.0, 2.0 + seed] for name in ("train_loss", "validation_accuracy", "test_accuracy")}
        rows.append({"config": config | {"schedule": "mine"}, "curves": curves})
    (tmp_path / "mine.json").write_text(json.dumps({"runs": rows}))
    for command in (["table", "mine"], ["figure", "mine", "accuracy", "--out", str(tmp_path / "mine.svg")]):
        monkeypatch.setattr(sys, "argv", ["steradian", *command, "--results", str(tmp_path)])
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    drawn = (tmp_path / "mine.svg").read_text()
    for method in ("$\\frac a$", "_b$"):
        assert f"│ {method} " in shown
        assert f"{method} (3 seeds)" in drawn
    (tmp_path / "mine.json").write_text('{"runs": [1]}')
    with pytest.raises(ValueError, match="is not a file of results"):
        Store(tmp_path / "mine.json").results()


def test_results_of_a_loop_of_ones_own_have_a_table(tmp_path):
    """Without a registered method, network or data set: results alone."""
    store = Store(tmp_path / "mine.json")
    for method, reached in (("Mine", 61.0), ("Theirs", 60.0)):
        for seed in range(3):
            config = Config(
                model="GPT", norm="", data="bytes", method=method, lr=0.1, seed=seed, epochs=1, schedule="own"
            )
            store.add([Result(config, {name: [reached + 0.1 * seed] for name in CURVES})])
    [column] = accuracy_columns(store.results())
    assert column.name == "GPT, bytes"
    lines = column.rows()[1]
    assert [line[0] for line in lines] == ["Mine", "Theirs"]
    difference, interval, p = lines[1][-3:]
    twin = scipy.stats.ttest_ind([60.0, 60.1, 60.2], [61.0, 61.1, 61.2], equal_var=False)
    low, high = twin.confidence_interval(0.95)
    assert (difference, interval) == ("−1.00", f"{low:+.2f} to {high:+.2f}".replace("-", "−"))
    assert float(p) == pytest.approx(twin.pvalue, rel=0.05)
    assert "worse: Theirs; not decided with these seeds: none" in column.claim()


def test_the_test_images_are_evaluated_when_validation_improves_and_at_the_end():
    training = Training(replace(CONFIG, epochs=8, lr=1e-2), few())
    while not training.finished:
        training.run_epoch()
    validation, test = training.curves["validation_accuracy"], training.curves["test_accuracy"]
    improved = [value > max(validation[:k], default=-1) for k, value in enumerate(validation)]
    assert [not math.isnan(value) for value in test] == [*improved[:-1], True]
    assert not all(improved)
    result = Result(training.config, training.curves)
    assert result.accuracy == test[validation.index(max(validation))]
    assert result.to_dict()["final_accuracy"] == test[-1]


class Frozen(torch.optim.SGD):
    """Its rate depends on a count that the host keeps, which a graph would freeze."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                with torch.no_grad():
                    p.sub_(p.grad * group["lr"] / self.state[p]["count"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["captured", "frozen", "item"])
def test_on_a_gpu_steps_that_cannot_be_replayed_run_plainly(known, exact, kind):
    """Over a few steps, since fused and plain steps of SGD round differently."""

    def make(groups, config):
        optimizer = (Frozen if kind == "frozen" else torch.optim.SGD)(groups.param_groups(), config.lr)
        if kind == "item":

            def wait(*_):
                groups.params[groups.rest[0]].sum().item()

            optimizer.register_step_pre_hook(wait)
        return optimizer

    lab.register_method("Odd", make)
    data = few("cuda", train=400, test=100)
    config = replace(CONFIG, method="Odd", lr=0.05, precision="float32")
    config = replace(config, plugin=registry.plugin_of(config))
    expected = Training(config, data, execution=Execution(captured=False))
    expected.take(5)
    training = Training(config, data)
    if kind == "captured":
        training.take(5)
    else:
        with pytest.warns(UserWarning, match="steps of Odd are not replayed as a CUDA graph"):
            training.take(5)
    assert training.execution.captured == (kind == "captured")
    torch.cuda.synchronize()
    for name, tensor in training.weights().items():
        torch.testing.assert_close(tensor, expected.weights()[name], rtol=1e-3, atol=1e-4)


def test_steps_that_a_graph_would_freeze_are_found(known, monkeypatch):
    """A capture that freezes what the host computes, without a graph."""

    def freeze(self, work):
        def replay():
            [optimizer] = training.optimizers
            counts = {p: state["count"] for p, state in optimizer.state.items()}
            work()
            for p, count in counts.items():
                optimizer.state[p]["count"] = count

        return replay

    monkeypatch.setattr(Queue, "capture", freeze)
    lab.register_method("Frozen", lambda groups, config: Frozen(groups.param_groups(), config.lr))
    config = replace(CONFIG, method="Frozen", lr=0.05)
    config = replace(config, plugin=registry.plugin_of(config))
    data = few()
    plain, training = Training(config, data), Training(config, data)
    training.execution = replace(training.execution, captured=True)
    plain.run_epoch()
    with pytest.warns(UserWarning, match="not replayed as a CUDA graph: replayed steps differ from plain ones"):
        training.run_epoch()
    assert training.curves["train_loss"] == plain.curves["train_loss"]

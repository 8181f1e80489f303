"""Every command in README and docs runs, with small stand-ins for what the reader has; trainings stop at once."""

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import steradian as st
from steradian.cli import main
from steradian.lab import registry
from steradian.lab.data import DataSet, Images, pack
from steradian.reporting.live import LiveServer

from pages import FENCE, PAGES, ROOT, blocks

INLINE = re.compile(r"`((?:steradian|make|python) [^`<]+)`")
TRAININGS = {"compare", "tune", "reproduce", "angle", "language"}
NO_EXAMPLE = {f"steradian {name}" for name in ("compare", "tune", "angle", "data pack")}  # names in sentences
MODELS = """
from collections import OrderedDict
from torch import nn
layer1 = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
factory = nn.Sequential(OrderedDict(layer1=layer1))
language_model = nn.Sequential(nn.Embedding(1000, 4), nn.LayerNorm(4))
"""
OTHERS = ("resnet20-cifar10", "mine")  # studies of which there are results


def commands(page):
    """The commands of a page, one line each, without comments."""
    text = page.read_text(encoding="utf-8")
    # A command in a sentence may be wrapped.
    found = [" ".join(each.split()) for each in INLINE.findall(FENCE.sub("", text))]
    for fence in FENCE.finditer(text):
        if fence["language"] in ("", "bash"):
            found += fence["text"].replace("\\\n", " ").splitlines()
    found = [line.split("  #")[0].strip() for line in found]
    return [line for line in found if line.split(" ")[0] in ("steradian", "make", "python")]


EVERY = sorted({(line, page.name) for page in PAGES for line in commands(page)})
OURS = [
    (line, page)
    for line, page in EVERY
    if line.startswith("steradian ") and line not in NO_EXAMPLE and "timm:" not in line
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The folder of a reader who has data, recorded runs, results, models and a plugin under the names of the pages."""
    folder = tmp_path_factory.mktemp("reader")
    random = np.random.default_rng(0)
    for name, classes in (("cifar10", 10), ("cifar100", 100), ("svhn", 10)):
        train, test = (
            Images(random.integers(0, 256, (n, 32, 32, 3), np.uint8), random.integers(0, classes, n)) for n in (400, 20)
        )
        pack(DataSet(name, train, test, [str(k) for k in range(classes)]), folder / "data" / name)
    for name in ("a", "b", "adam", "sgd", "first"):
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
        groups = st.find_groups(model, torch.randn(8, 4))
        optimizer = torch.optim.SGD(groups.param_groups(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        with st.watch(optimizer, groups, to=folder / "runs" / name):
            for _ in range(30):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mul(torch.arange(3)).sum().backward()
                optimizer.step()
    (folder / "results").mkdir()
    for name in OTHERS:
        (folder / "results" / f"{name}.json").symlink_to(ROOT / "results" / "resnet20-cifar10.json")
    (folder / "docs").mkdir()
    for name in ("study.md", "FILE…"):
        (folder / "docs" / name).write_text("<!-- begin numbers mine -->\n<!-- end numbers mine -->\n")
    for name in ("package/module.py", "folder/file.py"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(MODELS)
    [plugin, *_] = [block for block in blocks(ROOT / "docs" / "bring-your-own.md") if "# mine.py" in block.text]
    (folder / "mine.py").write_text(plugin.text)
    (folder / "sources").mkdir()
    for name in ("first", "second"):
        (folder / "sources" / f"{name}.py").write_text(f"# the {name} program\n" * 2000)
    return folder


@pytest.fixture
def call(reader, monkeypatch, capsys):
    """Run a command in the reader's folder; returns what it printed."""
    monkeypatch.chdir(reader)
    monkeypatch.syspath_prepend(str(reader))
    monkeypatch.setattr(LiveServer, "serve_forever", lambda self: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", list(arguments))
        with pytest.raises(SystemExit) as done:
            main()
        out, err = capsys.readouterr()
        assert not done.value.code, err
        return out

    yield run
    registry.METHODS.pop("Mine", None)


@pytest.mark.parametrize(("line", "page"), OURS)
def test_a_command_runs(line, page, call, reader, tmp_path, monkeypatch):
    """Without the brackets around what is optional."""
    arguments = shlex.split(re.sub(r"[\[\]]", "", line.replace("NAME --out FOLDER", f"cifar10 --out {tmp_path}")))
    if arguments[1] in TRAININGS:  # where there are no results of the study yet
        monkeypatch.chdir(tmp_path)
        for name in ("data", "mine.py", "sources"):
            (tmp_path / name).symlink_to(reader / name)
        arguments = [each if each != "cuda" else "cpu" for each in arguments] + ["--seconds", "0"]
    if arguments[1] == "inspect" and "hf:" in line:
        tiny_qwen3(reader / "folder")
    if arguments[1] == "language" and not (reader / "data" / "python-source").exists():
        call("steradian", "data", "corpus", "--out", "data/python-source", "--source", "sources")
    arguments += ["--source", "sources"] if arguments[1:3] == ["data", "corpus"] else []
    printed = call(*(f"docs/{each}" if each == "FILE…" else each for each in arguments))
    if arguments[1] in TRAININGS:
        assert "Time is up before the end" in printed
    else:
        assert printed.strip()


@pytest.mark.usefixtures("timm_starts")
@pytest.mark.parametrize("line", [line for line, _ in EVERY if "timm:" in line])
def test_a_command_with_timm_runs(line):
    called = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert called.returncode == 0, called.stderr
    assert "conv1.weight" in called.stdout


def tiny_qwen3(folder):
    """A config of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 32000, "head_dim": 4, "num_hidden_layers": 3, "pad_token_id": None, "bos_token_id": None}
    config = transformers.Qwen3Config(**sizes, eos_token_id=None, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)


@pytest.mark.parametrize("line", sorted({line for line, _ in EVERY if not line.startswith("steradian")}))
def test_what_another_command_names_is_there(line):
    program, name, *_ = line.split()
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert (ROOT / name).is_file()


def test_the_pages_have_commands():
    others = {"report", "match", "inspect", "table", "figure", "data"}
    assert {line.split()[1] for line, _ in OURS} >= TRAININGS | others

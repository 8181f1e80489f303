"""The command line: every command explains itself with an example, works, and says in one line what is wrong."""

import errno
import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from steradian import __version__
from steradian.cli import main
from steradian.groups import Groups
from steradian.lab.results import Store

from lab.simulated import column

COMMANDS = [
    "demo",
    "inspect",
    "compare",
    "tune",
    "reproduce",
    "table",
    "figure",
    "report",
    "match",
    "write-up",
    "data",
    "data pack",
    "data check",
]


def test_help_does_not_load_torch_nor_the_library_its_compiler():
    """In one new process: the command line, then the library, then every public name."""
    code = """
import sys
heavy = {"torch", "torch._dynamo", "triton", "pandas", "plotly"}
import steradian.cli
print(*sorted(heavy & sys.modules.keys()), sep=",")
import steradian.optim, steradian.discovery, steradian.watching.watch
print(*sorted(heavy & sys.modules.keys()), sep=",")
print(all(getattr(steradian, name) for name in (*steradian.__all__, "discovery", "lab")))
print(set(steradian.__all__) <= set(dir(steradian)), hasattr(steradian, "nothing"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "torch", "True", "True False"]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["steradian", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as done:
            code = done.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code or 0, out=out, err=err)

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(call, command):
    done = call(*command.split(), "--help")
    assert done.code == 0
    assert f"Example: steradian {command}" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_fits_in_one_line(call, command, monkeypatch):
    """On a screen of usual width it is one line, and what it names is there or made by another example."""
    monkeypatch.setenv("COLUMNS", "80")
    output = call(*command.split(), "--help").out.splitlines()
    [number] = [k for k, line in enumerate(output) if "Example:" in line]
    assert not output[number + 1].strip(" │")


def test_help_lists_the_commands(call):
    shown = call("--help").out
    assert all(command.split()[0] in shown for command in COMMANDS)


def test_python_m_steradian_is_the_command_line():
    call = [sys.executable, "-m", "steradian", "nothing"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("steradian: No such command")
    assert "Traceback" not in done.stderr


def test_version_and_a_short_help(call):
    assert call("--version").out == f"steradian {__version__}\n"
    assert call("report", "-h").out == call("report", "--help").out


def test_inspect_prints_the_rows(call):
    target = "steradian.lab.models:small_cnn"
    done = call("inspect", target, "--input", "8x1x8x8")
    assert done.code == 0
    assert re.search(r"block2\.conv\.weight +filter +32 × 144 +block2\.bn", done.out)
    assert "head.weight" in call("inspect", target, "--input", "8x1x8x8", "--explain", "head.weight").out


def test_inspect_takes_tokens(call, tmp_path, monkeypatch):
    (tmp_path / "language.py").write_text(
        "from torch import nn\nmodel = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = call("inspect", "language:model", "--input", "4x5:11")
    assert done.code == 0
    assert re.search(r"0\.weight +filter +11 × 6 +1 \(LayerNorm\)", done.out)


@pytest.fixture
def qwen3(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 11, "head_dim": 4, "num_hidden_layers": 5, "pad_token_id": None, "bos_token_id": None}
    config = transformers.Qwen3Config(**sizes, eos_token_id=None, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path / "qwen")
    return transformers.Qwen3ForCausalLM(config)


@pytest.mark.parametrize("place", ["qwen", "qwen/config.json"])
def test_inspect_builds_a_transformers_model_from_its_config(call, tmp_path, qwen3, place):
    done = call("inspect", f"hf:{tmp_path / place}", "--input", "4x6:11", "--layers", "3")
    assert done.code == 0, done.err
    heads = r"^model\.layers\.\{0-2\}\.self_attn\.q_proj\.weight +4 +4 × 64 +model\.layers\.\{0-2\}\.self_attn\.q_norm"
    assert re.search(heads, done.out, re.MULTILINE)
    assert "lm_head.weight" in done.out
    assert "layers.3" not in done.out
    assert done.out.startswith("3 of 5 layers: the shares are those of this smaller model.\n")
    whole = call("inspect", f"hf:{tmp_path / place}", "--input", "4x6:11", "--layers", "5")
    assert "of 5 layers" not in whole.out
    numbers = call("inspect", f"hf:{tmp_path / place}", "--input", "4x6")
    assert "an embedding takes token ids: pass whole numbers (steradian inspect: --input 4x64:32000)" in numbers.err
    missing = call("inspect", "hf:no/such/folder", "--input", "4x6:11").err
    assert missing.startswith("steradian: hf:no/such/folder: no such folder or file")


def test_inspect_saves_groups_for_a_training(call, tmp_path, qwen3):
    done = call("inspect", f"hf:{tmp_path / 'qwen'}", "--input", "4x6:11", "--save", tmp_path / "groups.json")
    groups = Groups.load(tmp_path / "groups.json", qwen3)
    assert str(groups) in done.out
    assert groups.layouts["model.layers.4.self_attn.k_proj.weight"] == 2
    assert groups.params["lm_head.weight"] is qwen3.lm_head.weight


def test_match_prints_settings_and_what_it_cannot_know(call):
    sgd = "SGD(lr=0.1, momentum=0.9, weight_decay=5e-4)"
    done = call("match", sgd, "--to", "torch.optim.AdamW(lr=1e-3, betas=(0.9, 0.95))")
    assert "AdamW(lr=0.001, betas=(0.9, 0.95), weight_decay=0.5)" in done.out
    assert f"{sgd} turns rows by 0.007255 rad" in done.out
    assert "not invariant" in done.out
    assert (
        "Adam(lr=0.001, without='abc'"
        in call("match", 0.007, "--to", "Adam(lr=1e-3, without='abc')", "--slope", 0.3, "--size", 144).out
    )


def test_inspect_names_the_missing_module(call, tmp_path):
    (tmp_path / "needs_more.py").write_text("import no_such_module.inside\n")
    done = call("inspect", "needs_more:model", "--input", "2x3")
    missing = "cannot be imported: it raised ModuleNotFoundError: No module named 'no_such_module'"
    assert done.err == f"steradian: needs_more {missing}\n"
    done = call("inspect", "no_such_module.inside:model", "--input", "2x3")
    assert done.err == f"steradian: no_such_module.inside {missing}\n"


def test_inspect_takes_a_file_in_any_folder(call, tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "parts.py").write_text("from torch import nn\nWIDTH = 6\n")
    (folder / "types.py").write_text(  # as a module of Python's is called
        "from parts import WIDTH, nn\n"
        "class Networks:\n"
        "    small = staticmethod(lambda: nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)))\n"
    )
    done = call("inspect", folder / "types.py:Networks.small", "--input", "8x4")
    assert re.search(r"0\.weight +filter +6 × 4 +1 \(BatchNorm1d\)", done.out), done.err
    assert "has no 'Networks.large'" in call("inspect", "a b/types.py:Networks.large", "--input", "8x4").err
    assert "a b/no.py cannot be imported" in call("inspect", "a b/no.py:model", "--input", "8x4").err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def model(:", "cannot be imported: it raised SyntaxError: invalid syntax"),
        ("1 / 0", "cannot be imported: it raised ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "cannot be imported: it raised SystemExit: 3"),
        ("import no_such_module", "cannot be imported: it raised ModuleNotFoundError: No module named"),
    ],
)
@pytest.mark.parametrize("name", ["broken:model", "broken.py:model"])
def test_inspect_reports_why_an_import_failed(call, tmp_path, monkeypatch, name, code, words):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    done = call("inspect", name, "--input", "2x3")
    assert done.code == 1
    assert re.fullmatch(rf"steradian: broken(\.py)? {re.escape(words)}.*\n", done.err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("inspect nothing --input 2x3", "package.module:factory"),
        ("inspect .here:x --input 2x3", "package.module:factory"),
        ("inspect no_such_module:x --input 2x3", "no_such_module"),
        ("inspect steradian.lab.models:nothing --input 2x3", "has no 'nothing'"),
        ("inspect steradian.lab.models:small_cnn --input 2by3", "8x3x32x32"),
        ("inspect steradian.lab.models:small_cnn --input 8x1x8x8 --layers 2", "--layers is for hf: models"),
        ("inspect steradian.lab.models:small_cnn --input 2x3", "model raised"),
        (
            "inspect torch.nn:Linear --input 2x3",
            "'torch.nn:Linear' must be a model, or make one when it is called without",
        ),
        ("inspect torch:pi --input 2x3", "'torch:pi' must be a model, or make one when it is called without"),
        ("inspect steradian.lab.models:small_cnn --input 2x3:many", "8x16:1000 for tokens"),
        ("reproduce nothing", "recipe must be among tables"),
        ("reproduce tables --data flowers", "data must be one of"),
        ("reproduce tables --data digits --columns ResNet50", "columns must be among"),
        ("reproduce tables --root .", "root is the folder of one data set"),
        ("compare --methods Adam --device tpu9", "device must be cpu, cuda"),
        ("compare --methods Lion", "methods must be among"),
        ("compare --methods Adam --lr Adam=fast", "a value must be METHOD=NUMBER"),
        ("compare --methods Adam --lr Adam=1,2", "one value for each method, got several for Adam"),
        ("compare --methods Adam --lr Lion=1", "methods of lr must be among SGD-M"),
        ("match 0.01 --to AdamW(lrr=1)", "did you mean 'lr'? settings of AdamW must be among params, lr, "),
        ("compare --methods SGD --lr SGD=.1 --lr Adam=.1", "methods of lr must be among SGD, got Adam"),
        ("compare --methods Adam --weight-decay SGD-M=0", "methods of weight_decay must be among Adam, got SGD-M"),
        ("compare --methods Adam --points 3", "--points is an option of steradian tune"),
        ("compare --methods Adm", "did you mean 'Adam'? methods must be among SGD-M; Adam; "),
        ("compare --methods Adam --lr Adm=1", "did you mean 'Adam'? methods of lr must be among"),
        ("compare --methods Adam --set nrom=wn", "did you mean 'norm'? set must be among norm, betas, momentum"),
        ("compare --methods Adam --set lr=0.1", "set must be among norm, betas"),
        ("language --root . --set haeds=3", "did you mean 'heads'? set must be among blocks, width"),
        ("compare --methods Adam --schedule exponential", "schedule must be among steps, cosine, linear"),
        ("compare --methods SGD", "lr must be given for SGD: --lr SGD=0.01, or lr={'SGD': 0.01} in Python"),
        ("compare --methods hyperball-muon", "--lr 'Hyperball, Muon=0.01'"),
        ("compare --methods Adam --plugin nowhere.py", "got 'nowhere.py', which does not exist"),
        ("compare --methods Adam --plugin .", "plugin must be a Python file, got '.'"),
        (
            "tune --methods Adam --methods SGD-M --lr Adam=1,2",
            "the same number of points, got Adam 2, SGD-M 6: name as many",
        ),
        ("table nothing", "no results of 'nothing'"),
        ("figure nothing loss -o x.svg", "no results of 'nothing'"),
        ("figure nothing pie -o x.svg", "kind must be among loss, accuracy"),
        ("figure nothing hypotheses -o x.svg", "no records of 'nothing' in results; there are none"),
        (
            "reproduce trajectories --methods Adam",
            "trajectories has no option --methods; it has data, columns, epochs, seeds",
        ),
        ("reproduce phenomena --data digits --methods AdamG --epochs 1", "where momentum is a sum of past gradients"),
        ("write-up nothing.md --results .", "document must be a file"),
        ("write-up nothing.md --results nowhere", "results must be a folder"),
        ("data check cifar10 --root nowhere", "root must be a folder"),
        ("inspect steradian.lab.models:small_cnn --input ²x3", "input must be a shape"),
        ("compare --methods Adam --data svhn --root nowhere", "root must be a folder"),
        ("compare --methods Adam --network ResNet50", "network must be among ResNet20"),
        ("compare --methods Adam --set norm=batch", "norm must be among bn"),
        ("compare --methods Adam --study ../up", "study must be the name of a file"),
        ("reproduce tables --data digits --points 3", "tables has no option --points"),
        ("reproduce hypotheses --data digits --tuning 3", "hypotheses has no option --tuning"),
        ("match 0.01 --to AdamW", "one of lr and weight_decay must be given"),
        ("match 0.01 --to AdamW(0.001)", "written like AdamW(lr=1e-3), got 'AdamW(0.001)'"),
        ("match 0.01 --to AdamX(lr=0.1)", "no optimizer 'AdamX' in steradian.optim or torch.optim"),
        ("match no/run --to Angular", "no/run is not a recorded run"),
        ("reproduce tables --data digits --settings guessed", "settings must be one of printed, released"),
        ("reproduce tables --data digits --built-as guessed", "built_as must be paper or released"),
        ("reproduce grid --data digits --settings released", "grid has no option --settings"),
        ("reproduce tables --data digits --weight-decay 0.1", "tables has no option --weight-decay"),
    ],
)
def test_errors_are_one_line(call, arguments, words):
    done = call(*arguments.split())
    assert done.code == 1
    assert words in done.err
    assert done.err.startswith("steradian: ")
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nothing", "No such command"),
        ("table", "Missing argument"),
        ("compare --epochs 0", "--epochs"),
        ("compare --nothing 1", "--nothing"),
        ("reproduce tables --seconds -1", "--seconds"),
    ],
)
def test_wrong_arguments_are_one_line_that_names_the_help(call, arguments, words):
    done = call(*arguments.split())
    assert done.code == 2
    assert re.fullmatch(rf"steradian: .*{re.escape(words)}.*; see steradian.* --help\n", done.err)


def test_an_unexpected_error_is_one_line_or_a_traceback(call, monkeypatch):
    def fail(_, **__):
        raise ZeroDivisionError("over\nlines")  # in code that is not the library's

    monkeypatch.setattr("steradian.cli.look.load_model", fail)
    done = call("inspect", "x:y", "--input", "1")
    place, said = rf"\({re.escape(__file__)}:\d+\)", "; STERADIAN_TRACEBACK=1 shows where\n"
    assert done.code == 1
    assert re.fullmatch(f"steradian: ZeroDivisionError: over lines {place}{said}", done.err)
    monkeypatch.setenv("STERADIAN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        call("inspect", "x:y", "--input", "1")


def test_an_error_of_a_file_begins_with_the_file(call, monkeypatch):
    def refuse(name, **_):
        raise PermissionError(errno.EACCES, "Permission denied", *([name] if name != "x:y" else []))

    monkeypatch.setattr("steradian.cli.look.load_model", refuse)
    assert call("inspect", "a file", "--input", "1").err == "steradian: a file: Permission denied\n"
    assert call("inspect", "x:y", "--input", "1").err == "steradian: Permission denied\n"


def test_an_error_of_a_missing_package_says_what_installs_it(call, monkeypatch):
    def lacks(name, **_):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("steradian.cli.look.load_model", lacks)
    done = call("inspect", "plotly.offline", "--input", "1")
    hint = ", which comes with the extra 'lab': pip install 'steradian[lab]'"
    assert (done.code, done.err) == (1, f"steradian: No module named 'plotly.offline'{hint}\n")
    assert call("inspect", "another", "--input", "1").err == "steradian: No module named 'another'\n"


def test_an_interruption_is_reported(call, monkeypatch):
    def stop(_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("steradian.cli.look.load_model", stop)
    done = call("inspect", "x:y", "--input", "1")
    assert (done.code, done.err.strip()) == (130, "steradian: interrupted")


def test_an_interrupted_study_says_how_to_continue(call, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("steradian.lab.study.Study.run", stop)
    done = call("compare", "--methods", "Adam", "--epochs", 1)
    assert (done.code, done.err.strip()) == (130, "steradian: interrupted")
    assert "run the same command again to continue" in done.out


def test_the_demo_refuses_a_file_as_its_folder(call, tmp_path):
    (tmp_path / "file").write_text("")
    done = call("demo", "--epochs", "1", "--out", tmp_path / "file")
    assert done.code == 1
    assert done.err == f"steradian: expected a folder, but {tmp_path / 'file'} is a file\n"


def test_training_a_table_and_a_figure(call, tmp_path):
    chosen = ["--columns", "vgg16", "--methods", "Adam", "--methods", "adamw"]
    done = call("reproduce", "tables", "--data", "digits", "--epochs", 1, "--seeds", 1, *chosen)
    assert done.code == 0, done.err
    assert "AdamW†" in done.out
    assert "one seed says nothing" in done.out
    results = Store(tmp_path / "results" / "vgg16-digits.json").results()
    assert {r.config.method for r in results} == {"Adam", "AdamW†"}
    again = call("reproduce", "tables", "--data", "digits", "--epochs", 1, "--seeds", 1, *chosen)
    assert "2 of 2 trainings were finished before" in again.out
    assert "| Adam |" in call("table", "vgg16-digits", "--markdown").out
    assert call("figure", "vgg16-digits", "loss", "-o", "loss.svg").code == 0
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    stopped = call("reproduce", "tables", "--data", "digits", "--epochs", 2, "--seeds", 1, *chosen, "--seconds", 0)
    assert "Time is up before the end" in stopped.out
    assert "Test accuracy" not in stopped.out  # there is no table yet


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_figure_is_cut_off_on_a_narrow_screen(call, tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    results = column(tmp_path)
    output = call("table", "resnet20-cifar10", "--results", tmp_path).out
    assert "…" not in output
    for result in results:
        assert f"{result.accuracy:.2f}" in output or width < 140
    table = output[: output.index("Adam w/o (ab) has") if "Adam w/o (ab) has" in output else None].splitlines()
    assert max(len(line) for line in table if line[:1] in "┏┃┡│└") <= width
    assert ("seed 4" in output) == (width >= 140)


def test_tracked_trainings_and_the_write_up(call, tmp_path):
    chosen = ["--data", "digits", "--columns", "VGG16", "--methods", "Adam", "--epochs", 1, "--points", 3]
    done = call("reproduce", "hypotheses", "--phenomena", *chosen)
    assert done.code == 0, done.err
    assert "hypotheses-digits-tracks.parquet" in done.out
    again = call("reproduce", "tables", *chosen[:-4], "--epochs", 1, "--seeds", 1)
    assert "1 of 1 trainings were finished before" in again.out  # it is the same training
    names = ["table vgg16-digits", "hypotheses hypotheses-digits", "phenomena hypotheses-digits"]
    (tmp_path / "docs.md").write_text("".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in names))
    done = call("write-up", "docs.md", "--figures", "pictures")
    assert done.code == 0, done.err
    assert "Not run" not in (tmp_path / "docs.md").read_text()
    assert len(list((tmp_path / "pictures").glob("*.svg"))) == 2
    assert call("figure", "hypotheses-digits", "Phenomena", "-o", "p.html").code == 0
    other = call("figure", "hypotheses-digits", "trajectories", "-o", "t.svg")
    assert "there is nothing to show: no results of this kind" in other.err


def test_data_are_packed_and_checked(call):
    assert call("data", "pack", "digits", "--out", "packed").code == 0
    done = call("data", "check", "digits", "--root", "packed")
    assert done.out == "digits: 1438 training and 359 test images of 8 × 8 × 1, 10 classes\n"

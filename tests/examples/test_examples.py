"""Every example as a user runs it: a process of its own in a folder of its own, and then what it left there."""

import base64
import gzip
import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import steradian
from steradian.cli import main
from steradian.watching.records import QUANTITIES, labels, read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(file.name for file in EXAMPLES.glob("*.py"))
PHENOMENA = {"deformation", "gradient_memory", "l2_memory", "radius_ratio"}
TOLD = set(QUANTITIES) - PHENOMENA
"""What is recorded by default of invariant rows under an optimizer of ours with weight decay."""
OF_ALL = {"radius", "angle", "update", "radial_share", "effective_lr", "defect", "gradient_norm", "collapsed", "lr"}
"""What is recorded of rows that are not invariant."""
NORMS = ["1.weight", "1.bias", "4.weight", "4.bias"]


def run(folder, script, *arguments, ranks=None, strict=True):
    """Run an example; `strict`: any warning is an error, else one from our lines is."""
    # Without GPUs, whatever the machine has, and without the interpreter that the tests choose for Triton.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    launch = []
    if ranks == 1:  # what torchrun would tell it
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    elif ranks:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(["-W", "error"] if strict else []), *launch, str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    ours = [str(place) for place in (Path(steradian.__file__).parent, EXAMPLES) if str(place) in done.stderr]
    assert not ours, done.stderr
    return done.stdout


def run_here(monkeypatch, folder, script, *arguments):
    """The same in this process, which has imported everything already."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def series(table, quantity, group="", statistic="median"):
    statistic = "mean" if group == "" or quantity == "lr" else statistic
    chosen = table[(table["quantity"] == quantity) & (table["group"] == group) & (table["statistic"] == statistic)]
    return dict(zip(chosen["step"], chosen["value"], strict=True))


def assert_recorded(folder, groups, rest, steps, quantities=TOLD, every=5):
    """Every quantity of every invariant group and, as far as it is for all rows, of the rest, at the observed steps.

    Numbers are finite, and rows turn; at a rate of 0 there is no direction.
    """
    found = read_run(folder)
    assert labels(found) == dict.fromkeys(groups, "invariant") | dict.fromkeys(rest, "not invariant")
    observed = list(series(found.table, "lr", groups[0]))
    assert observed == list(range(0, steps, every))
    for group in (*groups, *rest):
        of_group = quantities if group in groups else quantities & OF_ALL
        assert set(found.table[found.table["group"] == group]["quantity"]) == of_group
        moving = [step for step, rate in series(found.table, "lr", group).items() if rate > 0]
        assert len(moving) >= len(observed) - 1
        for quantity in of_group:
            values = series(found.table, quantity, group)
            assert list(values) == observed, (group, quantity)
            # A bias that starts at 0 has no direction at first.
            assert all(np.isfinite(values[step]) for step in moving[group in rest :]), (group, quantity)
        angles = series(found.table, "angle", group)
        assert all(angles[step] > 0 for step in moving[group in rest :])
    assert set(found.about["missing"]) == set(QUANTITIES) - quantities
    assert found.alerts.empty
    return found


def assert_learned(found, ratio=0.5):
    losses = list(series(found.table, "loss").values())
    few = max(1, len(losses) // 6)
    assert np.mean(losses[-few:]) < ratio * np.mean(losses[:few])


def assert_page(page, groups):
    """The page holds these runs, with lines of these groups: {run: groups}."""
    text = page.read_text(encoding="utf-8")
    packed = re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert {each["name"]: set(each["series"]["angle"]) for each in data["runs"]} == groups


def assert_told(said, page, groups, rest):
    """What a person reads: the rows that were found, the last observed step of all, and where the page is."""
    for group in (*groups, *rest):
        assert len(re.findall(rf"^{re.escape(group)} ", said, re.MULTILINE)) == 1 + (group in groups), group
    assert re.search(r"^the watch took .* the (training's time|time of the training)", said, re.MULTILINE)
    assert said.splitlines()[-1] == f"The page: {page}"


def test_the_plain_loop(tmp_path, monkeypatch, capsys):
    said = run(tmp_path, "plain_loop.py")
    out, groups, rest = tmp_path / "runs" / "plain-loop", ["0.weight", "3.weight"], [*NORMS, "7.weight", "7.bias"]
    found = assert_recorded(out / "adam-abc", groups, rest, 66)
    assert_learned(found)
    rates = series(found.table, "lr", "0.weight")
    assert rates == pytest.approx({step: 1e-2 * 0.9 ** (step // 22) for step in rates})
    assert list(series(found.table, "test accuracy")) == [21, 43, 65]
    assert_told(said, "runs/plain-loop/page.html", groups, rest)
    assert_page(out / "page.html", {"adam-abc": {*groups, *rest}})

    # The commands of README's last section, on what was just recorded.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["steradian", "report", str(out / "adam-abc"), "--out", "again.html"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert_page(tmp_path / "again.html", {"adam-abc": {*groups, *rest}})
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)  # the command does it too, and monkeypatch undoes it
    monkeypatch.setattr(sys, "argv", ["steradian", "inspect", "plain_loop:network", "--input", "16x1x8x8"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert re.search(r"3\.weight +filter +32 × 144 +4 \(BatchNorm2d\)", capsys.readouterr().out)


def test_a_plain_loop_that_was_interrupted_is_the_one_that_was_not(tmp_path, monkeypatch):
    options = ["--precision", "fp16", "--accumulate", "4", "--without", "ab"]
    run_here(monkeypatch, tmp_path, "plain_loop.py", *options, "--epochs", "2", "--out", "whole")
    run_here(monkeypatch, tmp_path, "plain_loop.py", *options, "--epochs", "1", "--out", "parts")
    run_here(monkeypatch, tmp_path, "plain_loop.py", *options, "--epochs", "2", "--out", "parts", "--resume")
    groups, rest = ["0.weight", "3.weight"], [*NORMS, "7.weight", "7.bias"]
    whole, parts = (assert_recorded(tmp_path / out / "adam-ab", groups, rest, 12).table for out in ("whole", "parts"))
    assert series(parts, "loss") == pytest.approx(series(whole, "loss"), rel=1e-6)
    for group in groups:
        for quantity in ("radius", "angle", "effective_lr", "nu", "lr"):
            here, there = series(parts, quantity, group), series(whole, quantity, group)
            assert here == pytest.approx(there, rel=1e-5), (group, quantity)


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")
def test_lightning(tmp_path):
    said = run(tmp_path, "with_lightning.py", strict=False)
    out, groups = tmp_path / "runs" / "lightning", ["network.0.weight", "network.3.weight"]
    rest = [f"network.{name}" for name in (*NORMS, "7.weight", "7.bias")]
    found = assert_recorded(out / "adam-ab", groups, rest, 66)
    assert_learned(found)
    assert found.about["config"] == {"lr": 1e-2, "without": "ab"}
    assert list(series(found.table, "accuracy")) == [21, 43, 65]
    reasons = {group["name"]: group["reason"] for group in found.about["groups"] if group["reason"]}
    assert reasons == {groups[0]: "network.1 (BatchNorm2d)", groups[1]: "network.4 (BatchNorm2d)"}
    assert (out / "last.ckpt").is_file()
    assert_told(said, "runs/lightning/page.html", groups, rest)
    assert_page(out / "page.html", {"adam-ab": {*groups, *rest}})


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_transformers(tmp_path):
    said = run(tmp_path, "with_transformers.py", "--steps", "40", strict=False)
    out = tmp_path / "runs" / "transformers"
    kinds = {"self_attn.q": 4, "self_attn.k": 2} | dict.fromkeys(
        ("self_attn.v", "self_attn.o", "mlp.up", "mlp.down"), "tensor"
    )
    layouts = {f"model.layers.{k}.{name}_proj.weight": rows for k in range(2) for name, rows in kinds.items()}
    groups = list(layouts)
    names = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
    names += ["self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj"]
    rest = [f"model.layers.{k}.{name}.weight" for k in range(2) for name in names]
    rest += ["model.embed_tokens.weight", "model.norm.weight"]
    found = assert_recorded(out / "adam-ab", groups, rest, 40)
    assert {group["name"]: group["layout"] for group in found.about["groups"] if group["name"] in groups} == layouts
    assert_learned(found, ratio=0.8)
    assert list(series(found.table, "eval_loss")) == [19, 39]
    assert (out / "checkpoints" / "checkpoint-40").is_dir()
    assert_told(said, "runs/transformers/page.html", groups, rest)
    assert_page(out / "page.html", {"adam-ab": {*groups, *rest}})


@pytest.mark.usefixtures("timm_starts")
def test_timm(tmp_path):
    said = run(tmp_path, "with_timm.py", strict=False)
    out = tmp_path / "runs" / "timm"
    saved = json.loads((out / "groups.json").read_text(encoding="utf-8"))
    groups = [group["names"][0] for group in saved["groups"]]
    # Every convolution is followed by BN, and the classifier by nothing.
    assert groups == [name for name, shape in saved["shapes"].items() if len(shape) == 4]
    rest = [name for name in saved["shapes"] if name not in groups]
    found = read_run(out / "adamw")
    assert labels(found) == dict.fromkeys(groups, "invariant") | dict.fromkeys(rest, "not invariant")
    assert_learned(found)
    decay = found.table[found.table["quantity"] == "equilibrium_angle"]
    assert set(decay["group"]) - {""} == set(groups)  # the rest has no weight decay
    assert_told(said, "runs/timm/page.html", [], [])  # it folds the names of repeated layers
    assert_page(out / "page.html", {"adamw": {*groups, *rest}})


def test_fsdp2(tmp_path):
    few = ["--batch", "96"]
    said = run(tmp_path, "with_fsdp2.py", *few, "--epochs", "1", ranks=2, strict=False)
    out = tmp_path / "runs" / "fsdp2"
    groups = ["classes", *(f"blocks.{k}.{name}.weight" for k in range(2) for name in ("query", "key"))]
    names = ["norm1.weight", "norm2.weight", "query_norm.weight", "key_norm.weight", "value.weight", "out.weight"]
    names += ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    rest = ["positions", "patches.weight", "patches.bias", *(f"blocks.{k}.{name}" for k in range(2) for name in names)]
    assert_recorded(out / "adam-ab", groups, rest, 15, every=1)
    assert_told(said, "runs/fsdp2/page.html", groups, rest)
    # The shards of two ranks are what one rank goes on from.
    run(tmp_path, "with_fsdp2.py", *few, "--epochs", "2", "--resume", "runs/fsdp2/epoch-1", ranks=1, strict=False)
    # Each of the two watches observes all of its first 20 steps.
    found = assert_recorded(out / "adam-ab", groups, rest, 30, every=1)
    assert_learned(found)
    radii = series(found.table, "radius", "blocks.0.query.weight")
    assert radii[15] == pytest.approx(radii[14], rel=1e-2)
    assert radii[15] != radii[0]
    assert_page(out / "page.html", {"adam-ab": {*groups, *rest}})


def test_an_optimizer_of_ones_own(tmp_path):
    said = run(tmp_path, "own_optimizer.py")
    out, groups = tmp_path / "runs" / "own-optimizer", ["0.weight", "3.weight", "6.weight"]
    rest = [*NORMS, "7.weight", "7.bias", "9.weight", "9.bias"]
    equilibrium = {"equilibrium_radius", "equilibrium_angle"}
    of_readers = PHENOMENA | {"effective_lr", "direction_norm", "radial", "nu"}
    signum = assert_recorded(out / "signum", groups, rest, 87, set(QUANTITIES) - equilibrium - of_readers, every=1)
    assert "cannot read __main__.Signum" in signum.about["missing"]["effective_lr"]
    read = assert_recorded(out / "signum-read", groups, rest, 87, set(QUANTITIES) - equilibrium, every=1)
    assert "no equilibrium is derived" in read.about["missing"]["equilibrium_angle"]
    for found in (signum, read):
        assert_learned(found)
    for quantity in ("radius", "angle", "update"):
        here, there = (series(found.table, quantity, "0.weight") for found in (signum, read))
        assert here == pytest.approx(there, rel=1e-5), (
            quantity
        )  # from two points of float32 weights, and from the state
    assert said.splitlines()[-1] == "The page: runs/own-optimizer/page.html"
    assert_page(out / "page.html", {"signum": {*groups, *rest}, "signum-read": {*groups, *rest}})


def test_the_verdict_names_the_slow_layers_and_each_change_helps(tmp_path):
    said = run(tmp_path, "from_verdict_to_change.py", "--seeds", "2")
    [slow] = re.findall(r"^- 2 of 5 layers turn more than 3 × slower.+$", said, re.MULTILINE)
    named = re.findall(r"(\w+\.weight) [\d.]+ × \([\d.e-]+ rad, since the first observed step\)", slow)
    assert sorted(named) == ["6.weight", "9.weight"]
    before, *after = (float(each) for each in re.findall(r"([\d.]+) ± [\d.]+ %$", said, re.MULTILINE))
    assert len(after) == 3
    assert min(after) > before + 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_readme_shows_every_example(script):
    command = rf"^(python|torchrun .*) examples/{re.escape(script)}"
    assert re.search(command, (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    # What it says of itself begins with the same command.
    assert re.search(rf"^ +{command[1:]}", (EXAMPLES / script).read_text(encoding="utf-8"), re.MULTILINE)

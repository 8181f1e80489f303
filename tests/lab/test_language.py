"""The language model, its text, and its study in a tiny form."""

import json
import math
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch

from steradian.cli import main
from steradian.discovery import find_groups
from steradian.lab import language
from steradian.lab.config import Config
from steradian.lab.language import METHODS, Corpus, LanguageModel, Shape, bits_rows, build_corpus, language_study
from steradian.lab.results import Result, Store
from steradian.lab.study import Study
from steradian.watching.records import read_run

SIZES = {"blocks": 1, "width": 16, "heads": 2, "hidden": 24, "length": 16}
TINY = {"epochs": 1, "batch_size": 4, "precision": "float32", "rates": (2e-3, 8e-3), "seeds": 2}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(language, "STEPS", 20)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("corpus")
    for k in range(30):
        (source / f"m{k}.py").write_text("".join(f"def f{j}(x):\n    return x + {j * k}\n" for j in range(40)))
    (source / "copy.py").write_text((source / "m3.py").read_text())
    (source / "short.py").write_text("x = 1\n")
    build_corpus(out, source)
    return out


def test_q_and_k_are_proved_per_head_and_no_other_matrix():
    shape = Shape(**SIZES | {"blocks": 2})
    groups = find_groups(LanguageModel(shape), torch.randint(256, (2, 16)))
    assert groups.layouts == {f"blocks.{k}.{name}.weight": 2 for k in range(2) for name in "qk"}


def test_post_norms_make_most_matrices_invariant():
    groups = find_groups(LanguageModel(Shape(**SIZES, post_norms=True)), torch.randint(256, (2, 16)))
    tensors = {f"blocks.0.{name}.weight": "tensor" for name in ("v", "o", "up", "down")}
    assert groups.layouts == {"blocks.0.q.weight": 2, "blocks.0.k.weight": 2} | tensors


def test_the_model_of_the_study_is_causal_and_has_29_million_parameters():
    with torch.device("meta"):
        assert round(sum(p.numel() for p in LanguageModel(Shape()).parameters()) / 1e6) == 29
    model, codes = LanguageModel(Shape(**SIZES)), torch.randint(256, (1, 16))
    changed = codes.clone()
    changed[0, 9] = (codes[0, 9] + 1) % 256
    difference = (model(codes) - model(changed)).abs().amax(dim=-1)[0]
    assert (difference[:9] == 0).all()
    assert (difference[9:] > 0).all()


def test_places_count_only_by_their_distance():
    model = LanguageModel(Shape(**SIZES | {"length": 64}))
    codes = torch.randint(256, (1, 20))
    with torch.no_grad():
        first = model(codes)
        model.turns = model.turns.roll(-30, 1)
        torch.testing.assert_close(model(codes), first, atol=1e-4, rtol=1e-4)


def test_a_corpus_has_each_content_once_and_is_checked(root, tmp_path):
    corpus = Corpus.read(root)
    whole = bytes(corpus.val.tolist()) + b"\0" + bytes(corpus.train.tolist())
    files = whole.split(b"\0")
    assert len(files) == len(set(files)) == 30
    assert min(map(len, files)) > 500
    for name in ("train.bin.xz", "val.bin.xz"):
        (tmp_path / name).write_bytes((root / name).read_bytes())
    about = json.loads((root / "meta.json").read_text())
    about["sha256"]["val"] = "0"
    (tmp_path / "meta.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="damaged"):
        Corpus.read(tmp_path)


def test_a_study_that_is_killed_and_continued_ends_in_the_same_table(root, tmp_path):
    shape, methods = Shape(**SIZES), ["Muon", "Muon, proved rows Angular"]
    whole = Study("language", tmp_path / "whole", tmp_path / "whole-runs", device="cpu")
    assert language_study(shape, root, methods=methods, study=whole, **TINY)
    parts, told = Study("language", tmp_path / "parts", tmp_path / "runs", device="cpu"), []

    def kill(text):
        told.append(text)
        if len(told) in (1, 3, 6):
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            language_study(shape, root, methods=methods, study=parts, say=kill, **TINY)
    assert not language_study(shape, root, methods=methods, study=replace(parts, deadline=0.0), say=kill, **TINY)
    assert language_study(shape, root, methods=methods, study=parts, say=kill, **TINY)
    assert len(told) == 8
    for name in ("language", "language-grid"):
        found = [{r.config.key: r.curves for r in Store(s.results / f"{name}.json").results()} for s in (whole, parts)]
        assert found[0] == found[1]
        assert len(found[0]) == 4
    assert bits_rows(whole.store.results()) == bits_rows(parts.store.results())
    recorded = [read_run(folder) for folder in parts.work.iterdir()]
    assert {run.name for run in recorded} == set(methods)


def test_training_in_bf16_warns_of_nothing(root, tmp_path):
    study = Study("language", tmp_path / "results", tmp_path / "runs", device="cpu")
    settings = TINY | {"precision": "bf16", "rates": (2e-3,), "seeds": 1}
    torch.set_warn_always(True)  # also of what another test has been warned of
    try:
        assert language_study(Shape(**SIZES), root, methods=["AdamW"], study=study, **settings)
    finally:
        torch.set_warn_always(False)


def test_a_rate_that_a_method_refuses_is_named_with_it(root, tmp_path):
    study = Study("language", tmp_path / "results", tmp_path / "runs", device="cpu")
    methods = ["Muon, proved rows Angular"]
    with pytest.raises(
        ValueError, match=r"Muon, proved rows Angular at the rate 5: lr must be an angle of at most 0.5"
    ):
        language_study(Shape(**SIZES), root, study=study, methods=methods, **TINY | {"rates": (5.0,)})


def test_processes_share_the_work(root, tmp_path):
    shape, told = Shape(**SIZES), []
    study = Study("language", tmp_path / "results", tmp_path / "runs", device="cpu")

    def other_process():
        """The lock of a training belongs to whoever opened it: another thread is as good as another process."""
        assert language_study(shape, root, methods=["Muon"], study=study, say=told.append, **TINY)

    thread = threading.Thread(target=other_process)

    def begin(text):
        told.append(text)
        if not thread.ident:
            thread.start()

    assert language_study(shape, root, methods=["Muon"], study=study, say=begin, **TINY)
    thread.join()
    assert len(told) == len(set(told)) == 4  # two rates, then two seeds: none was trained twice


def test_every_method_trains_and_spheres_keep_their_radii(root, tmp_path):
    study = Study("language", tmp_path / "results", tmp_path / "runs", device="cpu")
    shape = Shape(**SIZES, post_norms=True)
    language_study(shape, root, study=study, **TINY | {"rates": (8e-3,), "seeds": 1})
    heads, lines = bits_rows(study.store.results())
    assert sorted(line[heads.index("method")] for line in lines) == sorted(METHODS)
    figures = [float(line[heads.index("bits per byte")]) for line in lines]
    assert max(figures) < 8  # a byte's
    for folder in study.work.iterdir():
        run = read_run(folder)
        radii = run.table[(run.table["quantity"] == "radius") & (run.table["statistic"] == "median")]
        spread = radii.groupby("group", observed=True)["value"].agg(lambda v: v.max() / v.min() - 1)
        fixed = {name for name, grown in spread.items() if grown < 1e-5}
        matrices = {f"blocks.0.{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}
        heads = {"blocks.0.q.weight", "blocks.0.k.weight"}  # whose rows are heads, not the tensors of Hyperball
        expected = {"": set(), "all rows": matrices, "all tensors": matrices - heads}
        expected["proved rows"] = matrices - {"blocks.0.gate.weight"}
        assert fixed == expected[METHODS[next(m for m in METHODS if _key(m) in folder.name)][0]]


def test_the_command_names_a_winner_at_the_edge_of_its_rates(root, tmp_path, monkeypatch, capsys):
    kind = {"model": "bytes", "norm": "pre-norms", "data": "text", "epochs": 1, "schedule": "cosine"}
    curves = {"train_loss": [1.0], "validation_loss": [1.0], "validation_accuracy": [60.0], "test_accuracy": [60.0]}
    tried = [Config(**kind, method=m, lr=lr) for m in ("Muon", "AdamW") for lr in (0.001, 0.002, 0.004)]
    best = [replace(config, seed=1) for config in (tried[2], tried[4])]
    for name, configs in (("small-grid", tried), ("small", best)):
        Store(tmp_path / "results" / f"{name}.json").add(Result(config, curves) for config in configs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["steradian", "language", "--root", str(root), "--study", "small", "--seconds", "0"]
    )
    with pytest.raises(SystemExit):
        main()
    said = [line for line in capsys.readouterr().out.splitlines() if "that was tried" in line]
    assert said == ["Muon: the best rate, 0.004, is the largest that was tried. Try beyond it."]


@pytest.mark.parametrize("flag", [[], ["--markdown"]])
def test_a_table_has_bits_per_byte(tmp_path, monkeypatch, capsys, flag):
    def stored(name, figures):
        """By method, rate and seed the validation loss in nats."""
        kind = {"model": "bytes 1x16", "norm": "pre-norms", "data": "text", "epochs": 1, "schedule": "cosine"}
        results = []
        for (method, lr, seed), loss in figures.items():
            curves = {"train_loss": [1.0], "validation_loss": [loss], "validation_accuracy": [60.0]}
            config = Config(**kind, method=method, lr=lr, seed=seed)
            results.append(Result(config, {**curves, "test_accuracy": [60.0]}, diverged=math.isnan(loss)))
        Store(tmp_path / "results" / f"{name}.json").add(results)

    monkeypatch.setenv("COLUMNS", "200")  # on narrow screens cells are folded
    stored("grid", {("Muon", 0.1, 0): math.log(2), ("Muon", 0.2, 0): 2 * math.log(2), ("AdamW", 0.1, 0): math.nan})
    stored("seeds", {("Muon", 0.1, 1): math.log(2), ("Muon", 0.1, 2): 2 * math.log(2)})
    monkeypatch.chdir(tmp_path)
    for name, cells in (("grid", ["1.0000", "2.0000", "nan"]), ("seeds", ["1.5000 ± 6.3531"])):
        monkeypatch.setattr(sys, "argv", ["steradian", "table", name, *flag])
        with pytest.raises(SystemExit) as done:
            main()
        shown = capsys.readouterr().out
        assert done.value.code == 0
        assert all(cell in shown for cell in cells), shown
        assert "60.0" not in shown  # the share of guessed bytes


def _key(method):
    return "-post-norms-python-source-" + re.sub(r"[^a-z0-9]+", "-", method.lower()) + "-s1-"

"""Documents: regions are made from results, the rest is kept, and those of the repository are up to date."""

import importlib.util
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from steradian.lab.config import Config
from steradian.lab.documents import KINDS, command, regions, write_up, written
from steradian.lab.results import Result, Store

from lab.simulated import column, compared, tracked, tuned, turned

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "table resnet20-cifar10 resnet18-cifar10",
    "numbers resnet20-cifar10",
    "overview resnet20-cifar10",
    "points resnet20-cifar10",
    "machines resnet20-cifar10",
    "settings resnet20-cifar10",
    "loss resnet20-cifar10",
    "accuracy resnet20-cifar10",
    "hypotheses hypotheses-cifar10",
    "phenomena phenomena-cifar10 hypotheses-cifar10",
    "trajectories trajectories-cifar10",
    "intervals resnet20-cifar10",
    "final resnet20-cifar10",
    "bits language",
    "rates language",
    "means resnet20-cifar10",
    "angles resnet20-cifar10",
    "layers angle-cifar10",
    "tuning tuned-cifar10",
]


def trained(folder):
    """A language model that reaches one bit per byte, with two seeds."""
    kind = {"model": "bytes 8x512", "norm": "pre-norms", "data": "text", "method": "Muon", "lr": 0.01, "epochs": 1}
    accuracies = {f"{part}_accuracy": [60.0] for part in ("validation", "test")}
    curves = {"train_loss": [1.0], "validation_loss": [math.log(2)], **accuracies}
    Store(folder / "language.json").add(Result(Config(**kind, seed=seed), curves) for seed in (1, 2))


def document(path, names):
    marks = [f"Before {name}.\n\n<!-- begin {name} -->\nold\n<!-- end {name} -->\n\nAfter {name}." for name in names]
    path.write_text("# Title\n\n" + "\n\n".join(marks) + "\n")
    return path


def test_every_kind_of_region_is_rewritten_and_the_rest_is_kept(tmp_path):
    assert {name.split()[0] for name in NAMES} == set(KINDS)
    column(tmp_path, epochs=20, seeds=2)
    tracked(tmp_path, epochs=20)
    compared(tmp_path)
    trained(tmp_path)
    turned(tmp_path)
    tuned(tmp_path)
    made = document(tmp_path / "docs.md", NAMES)
    where = {"results": tmp_path, "figures": tmp_path / "pictures"}
    write_up([made], **where)
    text = made.read_text()
    assert regions(text) == NAMES
    assert all(f"Before {name}." in text and f"After {name}." in text for name in NAMES)
    assert "old" not in text
    links = re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE)
    expected = ["loss-resnet20-cifar10", "accuracy-resnet20-cifar10", "hypotheses-cifar10"]
    expected += ["phenomena-hypotheses-cifar10", "trajectories-cifar10", "means-resnet20-cifar10"]
    expected += ["layers-angle-cifar10", "tuning-tuned-cifar10"]
    assert links == [f"pictures/{name}.svg" for name in expected]
    assert all((tmp_path / link).read_text().startswith("<?xml") for link in links)
    assert "| AdamG† | 0.01 | 0.000125 | β₁ = 0.9 | 0.99 | 20, rate × 0.1 at 7, 11, 16 | 128 | bf16 |" in text
    assert re.search(r"^\| ResNet20 cifar10 bn \| AdamG† \| 0.01 \| 0.000125 \| 0.99 \| 20 \|", text, re.MULTILINE)
    assert re.search(r"^\| SGD-M \| 0.1, 0.00025 \| [\d.]+ ± [\d.]+ \| 2 \|", text, re.MULTILINE)
    assert "| Muon | 0.01, 0 | 1.0000 ± 0.0000 | 2 |  |" in text
    [missing] = re.findall(r"^\*Not run yet.+$", text, re.MULTILINE)
    assert missing == "*Not run yet: `steradian reproduce tables --data cifar10 --columns ResNet18`.*"
    again = document(tmp_path / "again.md", ["table resnet20-cifar10", "trajectories trajectories-cifar10"])
    write_up([again], **where)
    first = again.read_text()
    write_up([again], **where)
    assert again.read_text() == first


def test_the_overview_has_the_means_of_all_columns_and_the_papers(tmp_path):
    first = column(tmp_path, epochs=20, seeds=2)
    few = [replace(result, config=replace(result.config, method="Adam")) for result in first[:1]]
    Store(tmp_path / "resnet20-cifar10-released-settings.json").add(few)
    name = "overview resnet20-cifar10 resnet20-cifar10-released-settings"
    text = written(document(tmp_path / "docs.md", [name]), results=tmp_path, figures=tmp_path)
    adam = [result.accuracy for result in first if result.config.method == "Adam"]
    mean, spread = statistics.mean(adam), statistics.stdev(adam)
    heads = "| method | ResNet20 BN, CIFAR-10 | ResNet20 BN, CIFAR-10, released settings |"
    line = f"| Adam | {mean:.2f} ± {spread:.2f} (90.98) | {few[0].accuracy:.2f} (90.98) |"
    assert heads in text
    assert line in text
    assert re.search(r"^\| SGD-M \| [\d.]+ ± [\d.]+ \(92.39\) \|  \|$", text, re.MULTILINE)


def test_a_missing_study_gives_the_command_that_runs_it(tmp_path):
    made = document(tmp_path / "docs.md", NAMES)
    write_up([made], results=tmp_path / "results", figures=tmp_path / "pictures")
    text = made.read_text()
    assert text.count("*Not run yet: `steradian ") == len(NAMES) + 1
    assert "*Not run yet: `steradian language`" in text
    assert "`steradian reproduce trajectories --data cifar10`" in text
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        ("resnet20-cifar10", "reproduce tables --data cifar10 --columns ResNet20"),
        ("hypotheses-cifar10", "reproduce hypotheses --data cifar10"),
        (
            "resnet20-cifar10-released-settings",
            "reproduce tables --data cifar10 --columns ResNet20 --settings released",
        ),
        ("angle-matched", "angle matched"),
        ("language", "language"),
        ("mine", "reproduce RECIPE --study mine"),
    ],
)
def test_a_study_is_run_by_its_command(study, expected):
    assert command(study) == f"steradian {expected}"


def test_a_diverged_study_is_not_called_missing(tmp_path):
    results = column(tmp_path, name="mine")
    Store(tmp_path / "mine.json").add(replace(result, diverged=True) for result in results)
    made = document(tmp_path / "docs.md", ["loss mine", "loss yours"])
    write_up([made], results=tmp_path, figures=tmp_path)
    assert re.findall(r"^\*.+\*$", made.read_text(), re.MULTILINE) == [
        "*Nothing to show: every training diverged.*",
        "*Not run yet: `steradian reproduce RECIPE --study yours`.*",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- begin table x -->\n", "every begin needs an end"),
        ("<!-- begin table x -->\n<!-- end table y -->\n", "every begin needs an end"),
        ("<!-- begin pie x -->\n<!-- end pie x -->\n", "must name one of table"),
        ("<!-- begin table -->\n<!-- end table -->\n", "and a study"),
    ],
)
def test_wrong_marks_raise_and_nothing_is_written(tmp_path, text, words):
    made = tmp_path / "docs.md"
    made.write_text(text)
    with pytest.raises(ValueError, match=words):
        write_up([made], results=tmp_path, figures=tmp_path)
    assert made.read_text() == text
    with pytest.raises(ValueError, match="document must be a file"):
        write_up([tmp_path / "none.md"], results=tmp_path, figures=tmp_path)


def test_all_documents_are_written_or_none(tmp_path):
    good, wrong = document(tmp_path / "good.md", ["table x"]), document(tmp_path / "wrong.md", ["pie x"])
    before = good.read_text()
    with pytest.raises(ValueError, match="must name one of table"):
        write_up([good, wrong], results=tmp_path, figures=tmp_path)
    assert good.read_text() == before


@pytest.mark.parametrize("name", ["docs/study.md", "docs/study-details.md", "README.md"])
def test_the_documents_are_up_to_date_with_the_results(tmp_path, name):
    """`make study` would change nothing: no word of the text, and no figure by more than a rounding."""
    source = ROOT / name
    text = source.read_text()
    copy = tmp_path / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    assert written(copy, results=ROOT / "results", figures=tmp_path / "docs" / "study") == text
    for made in (tmp_path / "docs" / "study").glob("*.svg"):
        # Names of clip paths and markers are hashes of their coordinates.
        name, number = re.compile(r"#?\b[mp][0-9a-f]{10}\b"), re.compile(r"-?\d+(?:\.\d+)?")
        there, here = (name.sub("", path.read_text()) for path in (ROOT / "docs" / "study" / made.name, made))
        assert number.sub("#", here) == number.sub("#", there), made.name
        pairs = zip(number.findall(here), number.findall(there), strict=True)
        assert all(abs(float(a) - float(b)) < 0.15 for a, b in pairs), made.name


def test_the_steps_on_the_page_of_costs_are_those_of_the_file():
    [_, table] = (
        (ROOT / "docs" / "costs.md").read_text().split("| shapes of | eager | graph | share of copy bandwidth |\n")
    )
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[1:]]
    content = json.loads((ROOT / "results" / "bench-step-gpu.json").read_text())["rows"]
    names = ("eager / fused Adam", "graph / fused Adam", "share of copy")
    ours = [row for row in content if row["method"] == 'Adam, without="abc", fused']
    assert [line[1:] for line in lines] == [[f"{row[name]:.2f}" for name in names] for row in ours]
    assert [line[0].split()[0] for line in lines] == [row["set"].split()[0] for row in ours]
    [_, table] = (ROOT / "docs" / "costs.md").read_text().split("| Angular along Muon's direction, eager | graph |\n")
    lines = [line.strip("| ").split(" | ")[1:] for line in table.split("\n\n")[0].splitlines()[1:]]
    eager, graph = (
        {(row["set"], row["method"]): row[name] for row in content}
        for name in ("eager / fused Adam", "graph / fused Adam")
    )
    ms = {(row["set"], row["method"]): (row["eager ms"], row["graph ms"]) for row in content}
    for line, row in zip(lines, ours, strict=True):
        name = row["set"]
        muon = ms[name, "torch.optim.Muon"][0]
        angular, sgd = (name, "Angular, fused"), (name, "torch.optim.SGD, momentum, fused")
        ratios = [taken / muon for taken in ms[name, "Angular, muon, fused"]]
        assert line == [f"{ratio:.2f}" for ratio in (eager[angular], graph[angular], graph[sgd], *ratios)]


def test_whole_models_on_the_page_of_costs_are_those_of_the_file():
    [_, table] = (ROOT / "docs" / "costs.md").read_text().split("| training step | bytes of state |\n")
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[1:]]
    rows = json.loads((ROOT / "results" / "bench-model.json").read_text())["rows"]
    numbers = ("on spheres / AdamW", "step / AdamW", "training / AdamW")
    for line, row in zip(lines, rows, strict=True):
        assert line[-4:] == [*(f"{row[name]:.2f}" for name in numbers), f"{row['state bytes per parameter']:.1f}"]
    text = (ROOT / "README.md").read_text()
    ours = [f"{row['step / AdamW']:.2f}" for row in rows if row["optimizer"] == 'Adam, without="abc"']
    assert "ResNet50 {} of fused AdamW's time, a Qwen3 of half a billion {}, an OLMo2 {}".format(*ours) in text
    whole = [f"{row['training / AdamW']:.2f}" for row in rows if row["optimizer"] == 'Adam, without="abc"']
    assert "which vary more between runs, {}, {} and {} ".format(*whole) in text


def test_the_figures_in_the_readme_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "coverage.md").read_text()
    timm = json.loads((ROOT / "results" / "timm.json").read_text())["architectures"]
    large = {each["architecture"]: each["share"] for each in timm if each.get("share") is not None}
    types = json.loads((ROOT / "results" / "transformers.json").read_text())["types"]
    inspected = {each["type"] for each in types if "invariant" in each}
    assert f"{len(large):,} models of timm and {len(inspected)} types of transformers" in " ".join(text.split())
    names = {"ResNet50": "resnet50", "EfficientNet-B0": "efficientnet_b0", "ConvNeXt-T": "convnext_tiny"}
    names |= {"SwinV2-T": "swinv2_tiny_window8_256"}
    [_, table] = text.split("| architecture | invariant weights | because of |\n")
    for line in table.split("\n\n")[0].splitlines()[1:]:
        written, share, _ = line.strip("| ").split(" | ")
        for name in written.split(", "):
            if name in names:
                assert share == f"{100 * large[names[name]]:.1f} %", line
            else:
                assert re.search(rf"^\| {name} \| [\d,]+ \| {share} \|", page, re.MULTILINE), line
    study, words = (ROOT / "docs" / "study.md").read_text(), " ".join(text.split())
    tuned = re.search(
        r"`Angular` reaches (.+?) %, SGD-M .+? ([\d.]+ ± [\d.]+) %, .+ Hyperball .+?, ([\d.]+ ± [\d.]+) %", words
    )
    matched = re.search(r"by SGD-M and by Adam w/o \(ab\) give (.+?) and (.+?) %, .+ had (.+?) and (.+?) %", words)
    cells = zip(("Angular, gradient", "SGD-M", "Hyperball, Muon"), tuned.groups(), strict=True)
    at = [
        f"{of} at {angles}"
        for angles in ("SGD-M's angle", "Adam w/o (ab)'s angle")
        for of in ("SGD-M", "Adam w/o (ab)")
    ]
    at[-1] = "Adam w/o (ab) at its own angle"
    for method, figure in [*cells, *zip(at, matched.groups(), strict=True)]:
        assert re.search(rf"^\| {re.escape(method)} \| [\d., e-]+ \| {figure}", study, re.MULTILINE), (method, figure)


def test_the_costs_of_the_watch_are_those_of_the_file():
    rows = {r["training"]: r for r in json.loads((ROOT / "results" / "bench-watch-gpu.json").read_text())["rows"]}
    [_, table] = (ROOT / "docs" / "costs.md").read_text().split("| | by default | if every step is observed |\n")
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[1:]]
    assert len(lines) == 3
    for (_, *shown), name in zip(lines, ("ResNet18, captured", "ResNet18, eager", "Qwen3 0.5 B"), strict=True):
        for cell, row in zip(shown, (rows[name], rows[f"{name}, every=1"]), strict=True):
            assert cell.replace("−", "-").startswith(f"{100 * row['cost']:.1f} %"), (name, cell)
    text = (ROOT / "README.md").read_text()
    captured, eager, qwen = (max(0.0, 100 * rows[name]["cost"]) for name in list(rows)[::2])
    assert f"{captured:.1f}" == f"{eager:.1f}"
    assert (
        f"on an H200 {captured:.1f} % of ResNet18's, with and without CUDA graph, and {qwen:.1f} % of a Qwen3's" in text
    )


def test_benchmarks_write_valid_json(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmarks_harness", ROOT / "benchmarks" / "harness.py")
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    table = harness.Table("method", "ms")
    table.add("measured", 1.5)
    table.add("not measured", math.nan)
    harness.write("bench", table)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    content = json.loads((tmp_path / "bench.json").read_text(), parse_constant=refuse)
    assert [row["ms"] for row in content["rows"]] == [1.5, None]


def test_files_of_results_are_small():
    for path in (ROOT / "results").iterdir():
        assert path.stat().st_size < 5e6, path.name
    assert Store(ROOT / "results" / "no-such-study.json").results() == []

"""Record what a user of steradian sees, before and after a change of the code, and compare the two.

    python benchmarks/unchanged.py record before
    python benchmarks/unchanged.py record after
    python benchmarks/unchanged.py compare before after

| part | what is recorded | equal means |
|---|---|---|
| a | parameters and states after 20 steps of every optimizer: letters, layouts, dtypes, fused step | every bit |
| b | groups of all models of tests/cases at 5 seeds and of light timm architectures | exactly, defects to 1e-6 |
| c | records, rows, paths, alerts and run.json of watched trainings | exactly, numbers to 1e-12 |
| d | the tables that `steradian table` and `steradian write-up` make from results/ | exactly |

Tolerances are relative, and two numbers below 1e-12, which are rounding, are equal in b. NaN equals NaN. Sentences
(explanations, notes, alerts, statements below tables) are compared too; where they differ it is reported as wording,
which `--ignore-wording` leaves out of the exit code. Rounded numbers in explanations may differ by one digit.

Record on one machine with one torch, since sums are rounded differently elsewhere. The script records the source tree
that it is in and uses public names only, so that a copy of it runs in any version from 0.1 on. It takes about ten
minutes on one core, half of them for timm, and one for a.
"""

import argparse
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import steradian as st  # noqa: E402

Found = dict[str, Any]
Layouts = dict[str, tuple[list[tuple[int, ...]], Found]]
Make = Callable[[Any], torch.optim.Optimizer]

# (a) Steps of the optimizers

LETTERS = ("", "a", "b", "c", "ab", "ac", "bc", "abc")
DTYPES = {str(t)[6:]: t for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
DECAYS: dict[str, Found] = {"coupled": {}, "decoupled": {"decoupled_weight_decay": True}}
MOMENTA: dict[str, Found] = {"momentum": {}, "nesterov": {"nesterov": True}, "dampening": {"dampening": 0.5}}
ADAM = partial(st.optim.Adam, lr=2**-5, betas=(0.9, 0.99), weight_decay=0.1)
SGD = partial(st.optim.SGD, lr=2**-5, weight_decay=0.1)
MOMENTUM = partial(SGD, momentum=0.9)
OPTIMIZERS: dict[str, Make] = {
    **{f"Adam {w!r} {name}": partial(ADAM, without=w, **more) for w in LETTERS for name, more in DECAYS.items()},
    "Adam 'abc' maximize": partial(ADAM, without="abc", maximize=True),
    "Adam 'abc' capturable": partial(ADAM, without="abc", capturable=True),
    "Adam 'abc' tensor lr": lambda params: ADAM(params, lr=torch.tensor(2**-5), without="abc"),
    "AdamS": partial(st.optim.AdamS, lr=2**-5),
    "AdamSRT": partial(st.optim.AdamSRT, lr=2**-5, eps=0.0),
    "SGD": SGD,
    **{
        f"SGD {w!r} {m}": partial(MOMENTUM, without=w, **more)
        for w in ("", "b", "c", "bc")
        for m, more in MOMENTA.items()
    },
    "AdaGradG": partial(st.optim.AdaGradG, lr=2**-5, beta=0.9, v0=0.5, weight_decay=0.1),
    "AdaGradG.from_sgd": partial(st.optim.AdaGradG.from_sgd, lr=2**-5, weight_decay=0.1),
    "AdamG": partial(st.optim.AdamG, lr=2**-5, weight_decay=0.1),
    "AdamG retraction": partial(st.optim.AdamG, lr=2**-5, retraction=True, weight_decay=0.1),
    "AdamP": partial(st.optim.AdamP, lr=2**-5, weight_decay=0.1),
    "AdamP nesterov": partial(st.optim.AdamP, lr=2**-5, weight_decay=0.1, nesterov=True),
}
# Name: shapes of the parameters of one param group, and its keys. `train` treats three of them specially.
LAYOUTS: Layouts = {
    "filter": ([(6, 4, 3, 3), (3, 5), (7, 64)], {"rows": "filter"}),
    "channels last": ([(4, 3, 3, 3)], {"rows": "filter"}),
    "odd rows": ([(4, 5)], {"rows": "filter"}),
    "some gradients": ([(4, 5), (3, 2)], {"rows": "filter"}),
    "tensor": ([(4, 3, 3), (5, 6)], {"rows": "tensor"}),
    "blocks": ([(8, 3, 3, 3), (4, 7)], {"rows": 4}),
    "axis": ([(4, 3, 2), (5, 6)], {"rows": ("axis", 1)}),
    "grid": ([(4, 6, 3, 3)], {"rows": ("grid", 2, -1)}),
    "joint": ([(8, 5), (8,)], {"rows": "filter", "joint": True}),
    "joint blocks": ([(8, 5), (8,)], {"rows": 2, "joint": True}),
    "joint axis": ([(4, 6, 3, 3), (6,)], {"rows": ("axis", 1), "joint": True}),
    "no rows": ([(5,), (2, 3), ()], {}),
}
FUSED: Layouts = {
    "filter": ([(3, 2, 3, 3)], {"rows": "filter"}),
    "tensor": ([(3, 7)], {"rows": "tensor"}),
    "blocks": ([(4, 5)], {"rows": 2}),
    "no rows": ([(5,)], {}),
}


def train(make: Make, layouts: Layouts, dtype: torch.dtype) -> Found:
    """Parameters and states after 20 steps with random gradients, by layout, number of the parameter and key."""
    draw = torch.Generator().manual_seed(0)
    params: dict[tuple[str, int], nn.Parameter] = {}
    groups = []
    for name, (shapes, keys) in layouts.items():
        made = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]
        params |= {(name, i): param for i, param in enumerate(made)}
        groups.append({"params": made, **keys})
    optimizer = make(groups)
    for (name, _), param in params.items():
        if name == "channels last":
            param.data = param.data.to(memory_format=torch.channels_last)
        if name == "odd rows":
            param.data[0] = 0  # no direction
    for step in range(20):
        for (name, i), param in params.items():
            gradient = torch.randn(param.shape, generator=draw)
            if name == "odd rows":
                gradient[1] = 0
                gradient[2] *= 1e30 if step == 7 else 1  # its square overflows, and it is inf in half precision
            missing = name == "some gradients" and (step + i) % 3 == 0
            param.grad = None if missing else torch.empty_like(param).copy_(gradient)
        optimizer.step()
    found = {f"{name}/{i}/parameter": param.detach() for (name, i), param in params.items()}
    states = {place: optimizer.state[param] for place, param in params.items()}
    return found | {f"{name}/{i}/{key}": value for (name, i), state in states.items() for key, value in state.items()}


def record_steps(folder: Path, _: str) -> None:
    """The plain step: all layouts in one optimizer, and in float32 each alone."""
    found: Found = {}
    for name, make in OPTIMIZERS.items():
        found |= {f"{name}/{kind}/together": train(make, LAYOUTS, dtype) for kind, dtype in DTYPES.items()}
        found |= {f"{name}/float32/{key} alone": train(make, {key: LAYOUTS[key]}, torch.float32) for key in LAYOUTS}
    torch.save(found, folder / "a-steps.pt")


def record_fused(folder: Path, _: str) -> None:
    """The fused step in Triton's interpreter, which this process has in its environment."""
    try:
        import triton  # noqa: F401
    except ImportError:
        print("a: Triton is not installed, the fused step is skipped")
        return
    found = {}
    for w in LETTERS[1:]:
        for kind, decay in (("float32", "coupled"), ("float32", "decoupled"), ("bfloat16", "coupled")):
            make = partial(ADAM, without=w, fused=True, **DECAYS[decay])
            found[f"Adam {w!r} {decay} fused/{kind}"] = train(make, FUSED, DTYPES[kind])
    torch.save(found, folder / "a-fused.pt")


# (b) Groups of models

# Image size: light architectures, most of them the lightest of their family; "@" marks those that are built for a size.
TIMM = {
    128: """test_convnext test_efficientnet @test_vit test_nfnet test_mambaout test_byobnet test_resnet starnet_s050
        dla46x_c mobilevit_xxs mobilenetv3_small_050 ese_vovnet19b_slim_dw repghostnet_050 ghostnet_050 regnetx_002
        iformer_t cs3darknet_focus_s efficientvit_b0 swiftformer_xs pvt_v2_b0 fasternet_t0 fastvit_t8 lcnetv2_small
        inception_next_atto rexnet_100 @pit_ti_224 hardcorenas_b repvit_m1 @convit_tiny @deit_tiny_patch16_224
        hgnetv2_b0 efficientvim_m1 @vit_tiny_r_s16_p8_224 @vit_tiny_patch16_dinov3_qkvb poolformerv2_s12 resnetv2_18
        @swin_tiny_patch4_window7_224 @coat_tiny""",
    224: "efficientvit_m0 gmlp_ti16_224",
}


def describe(model: nn.Module, *inputs: Any, **named_inputs: Any) -> Found:
    """All that a user can ask of the groups of a model; what is under "words" may be worded otherwise."""
    try:
        groups = st.find_groups(model, *inputs, **named_inputs)
    except Exception as error:
        return {"error": type(error).__name__, "words": {"message": str(error)}}
    names = {id(param): name for name, param in groups.params.items()}
    public = ("layouts", "joint", "rest", "no_effect", "frozen", "aliases", "passes")
    return {
        **{name: getattr(groups, name, None) for name in public},
        "partial": list(groups.partial),
        "groups": {" + ".join(group.names): describe_group(group) for group in groups.groups},
        "facts": [{"names": group.names, **describe_group(group)} for group in groups.facts],
        "param_groups": [
            {**group, "params": [names[id(p)] for p in group["params"]]} for group in groups.param_groups()
        ],
        "words": {
            "partial": groups.partial,
            "notes": groups.notes,
            "table": str(groups).splitlines(),
            "explain": {name: groups.explain(name).splitlines() for name in groups.params},
        },
    }


def describe_group(group: Any) -> Found:
    """One group; what 0.1 calls `layout` and `rows` is `spec` and `n_rows` in later versions."""
    found = {name: getattr(group, name, None) for name in ("size", "reason", "defect", "unseen", "small")}
    try:
        return {"spec": group.spec, "n_rows": group.n_rows, **found}
    except AttributeError:
        return {"spec": group.layout, "n_rows": group.rows, **found}


def record_cases(folder: Path, pattern: str) -> None:
    """The models of tests/cases."""
    from cases import CASES

    found = {}
    for case in CASES:
        for seed in range(5) if re.search(pattern, case.name) else ():
            torch.manual_seed(seed)
            model = case.build()
            args, kwargs = case.inputs()
            found[f"{case.name}/{seed}"] = describe(model, *args, **kwargs)
    write_json(folder / "b-cases.json", found)


def record_timm(folder: Path, pattern: str) -> None:
    """Light architectures of timm, with random weights."""
    from no_torchvision import stand_in

    try:
        stand_in()
        import timm
    except ImportError:
        print("b: timm is not installed, its architectures are skipped")
        return
    found = {}
    for size, names in TIMM.items():
        for name in (name for name in names.split() if re.search(pattern, name.strip("@"))):
            torch.manual_seed(0)
            model = timm.create_model(name.strip("@"), **({"img_size": size} if name[0] == "@" else {}))
            found[name.strip("@")] = describe(model, torch.randn(4, 3, size, size))
    write_json(folder / "b-timm.json", found)


# (c) Watched trainings


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """x + f(x)."""
        return torch.add(x, super().forward(x))


def conv_network(norm: Callable[[int], nn.Module]) -> nn.Module:
    """A residual network of three convolutions, each followed by a normalization."""
    convs = [[nn.Conv2d(channels, 6, 3, padding=1, bias=False), norm(6)] for channels in (3, 6, 6)]
    block = Residual(*convs[1], nn.ReLU(), *convs[2])
    return nn.Sequential(*convs[0], nn.ReLU(), block, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def linear_network() -> nn.Module:
    """Layers whose weight and bias are invariant only together."""
    hidden = [nn.Linear(108, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 8), nn.LayerNorm(8)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 4))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "BN": lambda: conv_network(nn.BatchNorm2d),
    "GN": lambda: conv_network(partial(nn.GroupNorm, 2)),
    "LN": linear_network,
}
WATCHED: dict[str, Make] = {
    "SGD-M": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "torch Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=1e-2),
    "torch AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "torch RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "torch NAdam": partial(torch.optim.NAdam, lr=0.01),  # 0.1 cannot read it and observes two points
    "Adam 'abc'": partial(st.optim.Adam, lr=0.01, weight_decay=1e-2, without="abc"),
    "AdamG": partial(st.optim.AdamG, lr=0.01, weight_decay=1e-2),
}


def uneven(groups: list[Found]) -> torch.optim.Optimizer:
    """SGD that turns one parameter much less than the others and starts from a row of zeros."""
    groups[0]["params"][0].data *= 1000
    groups[0]["params"][-1].data[0] = 0
    return torch.optim.SGD(groups, lr=0.1)


# Long trainings out of balance, some of which raise alerts.
ALERTED: dict[str, Make] = {
    "SGD, large steps": partial(torch.optim.SGD, lr=100.0),
    "SGD, decay out of balance": partial(torch.optim.SGD, lr=0.5, weight_decay=0.5),
    "AdamW, negligible decay": partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-4),
    "AdamG, decay without effect": partial(st.optim.AdamG, lr=0.01, weight_decay=0.1),
    "SGD, uneven": uneven,
}
SEPARATE = ("started", "environment", "cost", "missing")
"""Entries of run.json that differ from run to run, or are compared by themselves."""
KEYS = ["training", "table", "step", "group", "quantity", "statistic"]


def watched(
    network: str, make: Make, dtype: torch.dtype, *, steps: int = 30, to: str | None = None, **options: Any
) -> tuple[pd.DataFrame, Found]:
    """Train on random images: what is recorded, as one table, and what else the watch says."""
    torch.manual_seed(0)
    model = NETWORKS[network]().to(dtype)
    images, labels = torch.randn(10, 8, 3, 6, 6).to(dtype), torch.randint(4, (10, 8))
    groups = st.find_groups(model, images[0])
    optimizer = make(groups.param_groups())
    with st.watch(optimizer, groups, to=to, run="run", **options) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[step % 10]), labels[step % 10])
            loss.backward()
            optimizer.step()
            watch.log(loss=loss.detach())
    tables = [watch.records().query("quantity != 'seconds'").assign(table="records")]
    about = json.loads((Path(to) / "run.json").read_text()) if to else {}
    names = {"row": "statistic", "direction": "value"}
    rows, paths = (sorted(Path(to).glob(f"{kind}-*.parquet")) if to else [] for kind in ("rows", "path"))
    tables += [pd.read_parquet(path).rename(columns=names).assign(table="rows") for path in rows]
    for path in paths:
        table = pd.read_parquet(path).explode("direction").rename(columns=names)
        entry = table.groupby(["step", "group", "statistic"], observed=True).cumcount()
        tables.append(table.assign(table="paths", quantity=[f"entry {i}" for i in entry]))
    told = {
        "run.json": {key: value for key, value in about.items() if key not in SEPARATE},
        "missing": list(watch.missing),
        "alerts": [(alert.step, alert.group, alert.kind) for alert in watch.alerts],
        "error": repr(watch.error),
        "words": {
            "missing": watch.missing,
            "alerts": [alert.text for alert in watch.alerts],
            "summary": [line for line in watch.summary().splitlines() if not line.startswith("the watch took ")],
        },
    }
    texts = dict.fromkeys(("table", "group", "quantity", "statistic"), str)
    return pd.concat([table.astype({**texts, "value": float}) for table in tables]), told


def record_watch(folder: Path, _: str) -> None:
    """Trainings that are watched in many ways: in memory or with a folder, whose rows and paths are recorded too."""
    trainings: dict[str, Callable[[], Any]] = {}
    for network, name, kind in product(NETWORKS, WATCHED, ("float64", "float32")):
        for every, phenomena in product((1, 5), (False, True)):
            run = partial(watched, network, WATCHED[name], DTYPES[kind], every=every, phenomena=phenomena)
            trainings[f"{network}/{name}/{kind}/every {every}{', phenomena' * phenomena}"] = run
    plain = partial(watched, dtype=torch.float32, every=1, phenomena=False)
    for network, name in product(("BN", "LN"), ALERTED):
        trainings[f"{network}/{name}"] = partial(plain, network, ALERTED[name], steps=300)
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(WATCHED):
            trainings[f"BN/{name}/folder"] = partial(plain, "BN", WATCHED[name], to=f"{place}/{number}")
        write_trainings(folder, "c-watch", trainings)


def record_interpreted(folder: Path, _: str) -> None:
    """What kernels observe on a GPU, in Triton's interpreter."""
    plain = partial(watched, dtype=torch.float32, steps=4, every=1, phenomena=False)
    trainings: dict[str, Callable[[], Any]] = {f"LN/{name}": partial(plain, "LN", WATCHED[name]) for name in WATCHED}
    trainings["BN/Adam 'abc' fused"] = partial(plain, "BN", partial(st.optim.Adam, without="abc", fused=True))
    write_trainings(folder, "c-interpreted", trainings)


def write_trainings(folder: Path, name: str, trainings: dict[str, Callable[[], Any]]) -> None:
    tables, told = [], {}
    for training, run in trainings.items():
        table, told[training] = run()
        tables.append(table.assign(training=training)[[*KEYS, "value"]])
    together = pd.concat(tables).astype(dict.fromkeys(set(KEYS) - {"step"}, "category"))
    together.to_parquet(folder / f"{name}.parquet", index=False)
    write_json(folder / f"{name}.json", told)


# (d) Tables of the study

REGIONS = """settings resnet20-cifar10 | table resnet20-cifar10 | numbers resnet20-cifar10 | machines resnet20-cifar10
    | table resnet20-cifar10-released-settings resnet20-cifar10-released-network | points grid-cifar10
    | settings hypotheses-cifar10 | hypotheses hypotheses-cifar10 | settings trajectories-cifar10
    | trajectories trajectories-cifar10 | phenomena phenomena-cifar10 hypotheses-cifar10"""


def record_tables(folder: Path, _: str) -> None:
    """What the commands print of every study in results/, and write into a document with marked regions."""
    found = {}
    for path in sorted((ROOT / "results").glob("*.json")):
        if isinstance(json.loads(path.read_text()).get("runs"), list):
            found[path.stem] = split_lines(run_command("table", path.stem))
            found[f"{path.stem} --markdown"] = split_lines(run_command("table", path.stem, "--markdown"))
    with tempfile.TemporaryDirectory() as place:
        document = Path(place) / "document.md"
        marks = [" ".join(region.split()) for region in REGIONS.split("|")]
        document.write_text("\n".join(f"<!-- begin {mark} -->\n<!-- end {mark} -->\n" for mark in marks))
        run_command("write-up", str(document), "--figures", f"{place}/figures")
        for region in document.read_text().split("<!-- begin ")[1:]:
            mark, _, text = region.partition(" -->")
            found[f"write-up {mark}"] = split_lines(text.partition("<!-- end ")[0])
    write_json(folder / "d-tables.json", found)


def run_command(*arguments: str) -> str:
    """What a command prints on a wide screen without colours."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": path}
    command = [sys.executable, "-m", "steradian", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def split_lines(text: str) -> Found:
    """The lines of tables, and the others."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    table = [line for line in lines if line[0] in "|│┃┏┡└"]
    return {"table": table, "words": {"lines": [line for line in lines if line not in table]}}


# Record

INTERPRETER = {"TRITON_INTERPRET": "1"}
PARTS: dict[str, dict[str, tuple[Callable[[Path, str], None], dict[str, str]]]] = {
    "a": {"a-steps": (record_steps, {}), "a-fused": (record_fused, INTERPRETER)},
    "b": {"b-cases": (record_cases, {}), "b-timm": (record_timm, {})},
    "c": {"c-watch": (record_watch, {}), "c-interpreted": (record_interpreted, INTERPRETER)},
    "d": {"d-tables": (record_tables, {})},
}


def record(folder: Path, parts: list[str], pattern: str) -> int:
    """Record each part in a process of its own, so that none depends on what ran before it."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"steradian": st.__version__, "torch": torch.__version__, "python": platform.python_version()}
    write_json(folder / "environment.json", versions)
    failed = False
    for name, (_, variables) in [item for part in parts for item in PARTS[part].items()]:
        started = time.monotonic()
        for path in folder.glob(f"{name}.*"):
            path.unlink()  # of an earlier recording
        environment = {key: value for key, value in os.environ.items() if key not in INTERPRETER}
        command = [sys.executable, __file__, "part", str(folder), name, "--models", pattern]
        code = subprocess.run(command, env={**environment, **variables, "OMP_NUM_THREADS": "1"}).returncode
        print(f"{name}: {f'failed ({code})' if code else 'done'}, {time.monotonic() - started:.0f} s", flush=True)
        failed = failed or code != 0
    return int(failed)


def record_part(folder: Path, name: str, pattern: str) -> int:
    """One part, in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("steradian").setLevel(logging.CRITICAL)
    PARTS[name[0]][name][0](folder, pattern)
    return 0


def write_json(path: Path, found: Found) -> None:
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False))


# Compare


class Difference(NamedTuple):
    """Where something differs, how, and whether it is only a sentence."""

    where: str
    how: str
    wording: bool = False


def compare(old: Path, new: Path, parts: list[str], pattern: str, *, ignore_wording: bool) -> int:
    """Print what differs; 1 if anything does."""
    files = [path for folder in (old, new) for part in parts for path in folder.glob(f"{part}-*")]
    names = sorted({path.name for path in files})
    count = 0
    for name in ["environment.json", *names]:
        if not (old / name).exists() or not (new / name).exists():
            print(f"{name}: only in {old if (old / name).exists() else new}")
            count += 1
            continue
        found, size = differences(old / name, new / name, pattern)
        wording = [each for each in found if each.wording]
        print(f"{name}: {size} compared, {len(found) - len(wording)} differ, and {len(wording)} in wording")
        report([each for each in found if not each.wording])
        report(wording)
        if name != "environment.json":
            count += len(found) - (len(wording) if ignore_wording else 0)
    for part in (part for part in parts if not any(name.startswith(f"{part}-") for name in names)):
        print(f"{part}: not recorded")
        count += 1
    print(f"{count} differences" if count else "equal")
    return int(count > 0)


def differences(old: Path, new: Path, pattern: str) -> tuple[list[Difference], int]:
    """The differences of two files, and the number of things that were compared."""
    if old.suffix == ".parquet":
        tables = pd.read_parquet(old), pd.read_parquet(new)
        return list(differing_tables(*tables)), len(tables[0])
    found = [torch.load(path) if path.suffix == ".pt" else json.loads(path.read_text()) for path in (old, new)]
    chosen = pattern if old.name.startswith("b-") else ""
    before, after = ({key: each[key] for key in each if re.search(chosen, key)} for each in found)
    return list(differing(before, after, "")), len(before)


def differing(old: Any, new: Any, where: str) -> Iterator[Difference]:
    """The differences of two nested values."""
    wording = "/words/" in where
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        yield from differing_tensors(old, new, where)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if key in old and key in new:
                yield from differing(old[key], new[key], f"{where}/{key}")
            else:
                yield Difference(where, f"{'no longer' if key in old else 'now'} has {key}", wording)
        if list(old) != list(new) and set(old) == set(new):
            yield Difference(where, f"order: {list(old)} → {list(new)}", wording)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differing(one, other, f"{where}/{i}")
    elif isinstance(old, list) and isinstance(new, list):
        yield from (Difference(where, f"no longer has {item!r}", wording) for item in old if item not in new)
        yield from (Difference(where, f"now has {item!r}", wording) for item in new if item not in old)
        yield Difference(where, f"{len(old)} → {len(new)} entries", wording)
    elif isinstance(old, float) and isinstance(new, float):
        tolerances = {"rel_tol": 1e-6, "abs_tol": 1e-12} if where.endswith("/defect") else {"rel_tol": 1e-12}
        if not math.isclose(old, new, **tolerances) and not (math.isnan(old) and math.isnan(new)):
            yield Difference(where, f"{old!r} → {new!r}")
    elif old != new and not (("/words/explain/" in where or "/words/table/" in where) and same_sentence(old, new)):
        yield Difference(where, change(repr(old), repr(new)), wording)


def change(old: str, new: str) -> str:
    """Old → new, of long texts from a little before the first difference on."""
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    start = max(0, first - 40) if max(len(old), len(new)) > 160 else 0
    return " → ".join(("…" if start else "") + text[start : start + 160] for text in (old, new))


def same_sentence(old: str, new: str) -> bool:
    """Whether sentences differ at most in blanks, in the last digit of rounded numbers, or in numbers below 1e-11."""
    number = r"\d+\.\d+(?:e[-+]?\d+)?"
    pairs = zip(re.findall(number, old), re.findall(number, new), strict=False)
    close = all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=1e-11) for a, b in pairs)
    return close and re.sub(number, "#", old).split() == re.sub(number, "#", new).split()


def differing_tensors(old: Tensor, new: Tensor, where: str) -> Iterator[Difference]:
    """Tensors differ if a bit does, except for two NaN."""
    kinds = [(str(tensor.dtype), tuple(tensor.shape), tensor.stride()) for tensor in (old, new)]
    if kinds[0] != kinds[1]:
        yield Difference(where, f"dtype, shape and strides: {kinds[0]} → {kinds[1]}")
        return
    a, b = old.double(), new.double()  # exact for all dtypes
    unequal = ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())
    if unequal.any():
        apart = (a - b).abs().nan_to_num(nan=math.inf).max()
        largest = a.abs().nan_to_num(nan=0.0).max()
        yield Difference(where, f"{unequal.sum()} of {a.numel()} numbers, by up to {apart:.1e}, largest {largest:.1e}")


def differing_tables(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[Difference]:
    """The keys in their order must be equal, and values to 1e-12 relative."""
    old, new = (table.astype(dict.fromkeys(KEYS, str)) for table in (old, new))
    others = dict(list(new.groupby("training", sort=False)))
    for name, one in old.groupby("training", sort=False):
        other = others.pop(name, new[:0])
        if one[KEYS].to_numpy().tolist() != other[KEYS].to_numpy().tolist():
            lost = one.merge(other, on=KEYS, how="outer", indicator=True).query("_merge != 'both'")
            such = f", such as {list(lost.iloc[0][KEYS[1:]])}" if len(lost) else ", the order differs"
            yield Difference(str(name), f"{len(one)} → {len(other)} records, {len(lost)} in one alone{such}")
            continue
        a, b = one["value"].to_numpy(), other["value"].to_numpy()
        with np.errstate(all="ignore"):
            apart = abs(a - b) / np.maximum(abs(a), abs(b))
        unequal = ~((a == b) | (apart <= 1e-12) | (np.isnan(a) & np.isnan(b)))
        for kind, rows in one.assign(new=b, apart=apart)[unequal].groupby(["table", "quantity"]):
            worst = rows.iloc[rows["apart"].fillna(math.inf).argmax()]
            place = ", ".join(worst[["step", "group", "statistic"]])
            how = f"{len(rows)} values, by up to {worst['apart']:.1e}: {worst['value']} → {worst['new']} (step {place})"
            yield Difference(f"{name}/{'/'.join(kind)}", how)
    yield from (Difference(str(name), f"now has {len(other)} records") for name, other in others.items())


def report(found: list[Difference], *, most: int = 20) -> None:
    """Print differences; equal ones in one line, with the first place. If there are many, say where they are."""
    places: dict[str, list[str]] = {}
    for each in found:
        places.setdefault(f"{'wording: ' if each.wording else ''}{each.how}", []).append(each.where)
    for how, where in list(places.items())[:most]:
        print(f"  {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {how}")
    if len(places) > most:
        counts = Counter(each.where.strip("/").partition("/")[0] for each in found)
        print(f"  and more, in all in {', '.join(f'{name} ({count})' for name, count in counts.items())}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="record into a folder")
    comparer = commands.add_parser("compare", help="compare two recorded folders")
    one_part = commands.add_parser("part", help="record one part; `record` does this in a process for each")
    for command, names in ((recorder, ("folder",)), (comparer, ("old", "new")), (one_part, ("folder",))):
        for name in names:
            command.add_argument(name, type=Path)
        command.add_argument("--models", default="", help="part b: models whose names match this regular expression")
    for command in (recorder, comparer):
        command.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    one_part.add_argument("name")
    comparer.add_argument("--ignore-wording", action="store_true", help="wording does not count as a difference")
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.old, given.new, given.only, given.models, ignore_wording=given.ignore_wording)
    if given.command == "part":
        return record_part(given.folder, given.name, given.models)
    return record(given.folder, given.only, given.models)


if __name__ == "__main__":
    raise SystemExit(main())

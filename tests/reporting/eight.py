"""Eight kinds of runs that a page must show well: five short trainings, and three from numbers alone."""

import numpy as np
import pyarrow as pa
import simulate
import torch
from pyarrow import parquet
from stress import words
from torch import nn
from torch.nn.functional import cross_entropy

import steradian as st
from steradian.lab import demo
from steradian.lab.models import resnet20
from steradian.watching.records import STATISTICS
from steradian.watching.sinks import RunFiles


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of momentum and gradient, as in its paper; sign(NaN) is NaN, and `where` makes it 0."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in (param for param in group["params"] if param.grad is not None):
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                sign = average.lerp(param.grad, 1 - beta1).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * torch.where(sign.isnan(), 0, sign))
                average.lerp_(param.grad, 1 - beta2)


def train(folder, model, optimizer, *, steps, watched=None, schedule=None, images=None, spoil=-1, **options):
    """Noise with labels that depend on it; at the step `spoil` every gradient is NaN."""
    draw = torch.Generator().manual_seed(0)
    with st.watch(optimizer, watched if watched is not None else model, to=folder, run=folder.name, **options) as watch:
        for step in range(steps):
            inputs = torch.randn((16, *(images or (12,))), generator=draw)
            loss = cross_entropy(model(inputs), (inputs.flatten(1).sum(1) > 0).long())
            optimizer.zero_grad()
            loss.backward()
            if step == spoil:
                for param in model.parameters():
                    param.grad.fill_(torch.nan)
            optimizer.step()
            watch.log(loss=loss)
            if schedule is not None:
                schedule.step()
    return folder


def mlp(width=24):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2),
    )  # fmt: skip


def one_cycle(folder):
    torch.manual_seed(0)
    model = resnet20(width=4, size=8, classes=2)
    groups = st.find_groups(model, torch.randn(8, 3, 8, 8))
    optimizer = torch.optim.SGD(groups.param_groups(weight_decay=5e-4), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=120)
    options = {"watched": groups, "images": (3, 8, 8), "schedule": schedule, "every": 2}
    return train(folder / "one cycle", model, optimizer, steps=120, **options)


def warm_up(folder):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    half = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=30)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 170)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [half, rest], [30])
    return train(folder / "warm-up and cosine", model, optimizer, steps=200, schedule=schedule, every=4)


def nan_under_lion(folder):
    model = mlp()
    return train(folder / "lion", model, Lion(model.parameters(), 1e-3), steps=80, spoil=42, every=1)


class Branched(nn.Module):
    """A perceptron and a branch beside it, whose ReLU lets nothing through."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch = mlp(), nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2))
        nn.init.constant_(self.branch[0].bias, -1e3)

    def forward(self, x):
        return self.trunk(x) + self.branch(x)


def dead_layer(folder):
    model = Branched()
    return train(folder / "dead", model, torch.optim.AdamW(model.parameters(), 1e-3), steps=80, every=1)


ROLES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def qwen3(folder):
    """Names and shapes of Qwen3 with 28 blocks, cosine, observed as by default; one layer turns five times as far."""
    names = [f"model.layers.{block}.{role}.weight" for block in range(28) for role in ROLES]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight", "lm_head.weight"]
    steps = np.concatenate([np.arange(20), np.arange(50, 10_000, 50)])
    rate = 3e-4 * (1 + np.cos(np.pi * steps / 10_000)) / 2
    fast = {"model.layers.17.mlp.up_proj.weight": 5.0}
    return numbers(folder / "qwen3", names, steps, rate, optimizer="torch.optim.adamw.AdamW", factors=fast)


def long_run(folder):
    """100,000 steps with two drops of the rate."""
    names = [f"features.{k}.weight" for k in range(6)]
    steps = np.concatenate([np.arange(20), np.arange(500, 100_000, 500)])
    rate = np.where(steps < 50_000, 0.1, np.where(steps < 75_000, 0.01, 0.001))
    return numbers(folder / "long", names, steps, rate, optimizer="torch.optim.sgd.SGD")


def numbers(folder, names, steps, rate, *, optimizer, factors=()):
    """A run from noise around the angle that follows from the rate; nothing is proved."""
    noise, files = np.random.default_rng(0), RunFiles(folder)
    files.folder.mkdir(parents=True, exist_ok=True)
    means = {"angle": rate / 0.03, "update": rate / 0.03, "effective_lr": rate / 1e-3, "radial_share": 0.02,
             "radius": 1.0, "gradient_norm": 0.1, "defect": 0.1, "collapsed": 0.0}  # fmt: skip
    over_rows = np.array([0.5, 0.7, 1.0, 1.4, 2.0, 1.05])
    parts = {"group": [], "quantity": [], "statistic": [], "value": []}
    for name in names:
        own = dict(factors).get(name, 1.0) * noise.lognormal(0, 0.15)
        for quantity, mean in [*means.items(), ("lr", rate)]:
            follows = quantity in ("angle", "update", "effective_lr")
            line = mean * (own if follows else 1) * (noise.lognormal(0, 0.08, len(steps)) if quantity != "lr" else 1)
            for statistic, factor in zip(STATISTICS, over_rows, strict=True):
                if quantity != "lr" or statistic == "mean":
                    parts["group"].append(name)
                    parts["quantity"].append(quantity)
                    parts["statistic"].append(statistic)
                    parts["value"].append(line if quantity == "lr" else factor * line)
    count = len(parts["value"])
    columns = {"run": words([folder.name], count * len(steps)), "step": np.tile(steps, count)}
    for column in ("group", "quantity", "statistic"):
        labels = list(dict.fromkeys(parts[column]))
        codes = np.repeat(np.array([labels.index(word) for word in parts[column]], dtype=np.int32), len(steps))
        columns[column] = pa.DictionaryArray.from_arrays(codes, labels)
    parquet.write_table(pa.table({**columns, "value": np.concatenate(parts["value"])}), folder / "part-00000.parquet")
    flat = ("norm.weight", "layernorm.weight")
    groups = [
        {"name": name, "names": [name], "label": "untested", "layout": "tensor" if name.endswith(flat) else "filter",
         "shapes": [[1024]] if name.endswith(flat) else [[1024, 1024]], "rows": 1 if name.endswith(flat) else 1024,
         "size": 1024, "reason": "", "defect": None}
        for name in names
    ]  # fmt: skip
    proved = ("velocity", "radial", "taylor", "nu", "equilibrium_radius", "equilibrium_angle")
    why = "no row of these groups is proved invariant: watch(optimizer, find_groups(model, inputs)) proves rows"
    files.describe({
        "run": folder.name, "every": None, "groups": groups, "config": {}, "environment": {"torch": "2.11"},
        "missing": dict.fromkeys(proved, why),
        "optimizer": {"name": optimizer, "groups": [{"params": names, "lr": float(rate[0]), "foreach": None}]},
    })  # fmt: skip
    return folder


def three(folder):
    kinds = {"SGD": "SGD-M", "Adam": "Adam", "Ours": "Adam without (abc)"}
    layers = {"conv1.weight": (8, 9), "layer1.conv.weight": (8, 18), "layer2.0.downsample.conv.weight": (12, 18)}
    return [simulate.write(folder / kind, kind, name=name, layers=layers, steps=120) for kind, name in kinds.items()]


def the_demo(folder):
    demo.run(folder, epochs=3)
    return [folder / "runs" / name for name in demo.METHODS]


RUNS = {
    "demo": the_demo,
    "one cycle": one_cycle,
    "warm-up and cosine": warm_up,
    "NaN under Lion": nan_under_lion,
    "dead layer": dead_layer,
    "Qwen3": qwen3,
    "100,000 steps": long_run,
    "three runs": three,
}
"""Name → a function of a folder that makes the run, or a list of runs."""

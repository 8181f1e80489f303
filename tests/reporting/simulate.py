"""A small training on spheres in numpy alone, recorded as `watch` would: runs for the page's tests and pictures."""

import base64
import gzip
from pathlib import Path

import numpy as np

from steradian.watching.records import QUANTITIES, read_run
from steradian.watching.sinks import RunFiles

LAYERS = {
    "conv1.weight": (16, 27),
    "layer1.0.conv1.weight": (16, 144),
    "layer1.0.conv2.weight": (16, 144),
    "layer2.0.conv1.weight": (32, 144),
    "layer2.0.conv2.weight": (32, 288),
    "layer3.0.conv1.weight": (64, 288),
}


def norm(rows):
    return np.linalg.norm(rows, axis=1, keepdims=True)


def dot(one, two):
    return (one * two).sum(1, keepdims=True)


def tangent(rows, u):
    return rows - dot(rows, u) * u


def turn(one, two):
    one, two = (v / np.maximum(norm(v), 1e-300) for v in (one, two))
    return 2 * np.arctan2(norm(one - two), norm(one + two))


def train(kind, n, d, *, steps, rate, decay, seed):
    """Every quantity per step and row, {name: (steps, n)}; directions of two rows, (steps, 2, d); the loss."""
    data = np.random.default_rng(seed)
    x = data.normal(size=(n, d)) / np.sqrt(d) * (1 + seed % 3)
    goal = data.normal(size=(n, d))
    goal /= norm(goal)
    m, moved, points = np.zeros((n, d)), np.zeros((n, d)), np.zeros((n, d))
    v, beta1, beta2, before = np.zeros((n, d)), 0.9, 0.99, None
    found, path, loss = {}, [], []
    for k in range(steps):
        eta = rate * (0.1 if k > 0.85 * steps else 0.32 if k > 0.6 * steps else 1.0)
        r, u = norm(x), x / norm(x)
        noise = 0.6 * data.normal(size=(n, d)) / np.sqrt(d)
        g = -tangent(goal + noise, u) / r
        loss.append(float(1 - dot(goal, u).mean()))
        slope = g + decay * x
        m = beta1 * m + slope
        if before is not None:
            moved = tangent(moved, u)
        moved = beta1 * moved + slope
        points = beta1 * points + x
        v = beta2 * v + (1 - beta2) * slope**2
        root = np.sqrt(v / (1 - beta2 ** (k + 1))) + 1e-8
        share = (1 - beta1 ** (k + 1)) / (1 - beta1)
        if kind == "SGD":
            b = np.ones_like(x)
        elif kind == "Adam":
            b = share * root
        else:
            b = share * np.ones_like(x) * norm(root) / np.sqrt(d)
        average = norm(b) / np.sqrt(d)
        c, a = r * m / (b / average), eta / (r**2 * average)
        radial = a * dot(c, u)
        side = tangent(c, u)
        effective = a / (1 - radial)
        z = effective * norm(side)
        zero = np.zeros((n, 1))
        values = {
            "radius": r,
            "effective_lr": effective,
            "direction_norm": norm(side),
            "velocity": z,
            "angle": np.arctan(z),
            "radial": radial,
            "taylor": z**2,
            "nu": r * average,
            "deformation": turn(side, tangent(m, u)) if kind == "Adam" else zero,
            "gradient_memory": zero if kind == "Ours" else turn(tangent(m, u), moved + 1e-9),
            "l2_memory": zero if kind == "Ours" else turn(tangent(m, u), tangent(m - decay * points, u)),
            "radius_ratio": zero if kind == "Ours" else turn(tangent(m, u), tangent(m, u) + 0.02 * norm(m) * z * noise),
            "defect": 1e-5 / r**2 * np.abs(data.normal(size=(n, 1))),
            "collapsed": zero,
            "lr": zero + eta,
            "equilibrium_radius": (norm(side) ** 2 * eta / (2 * decay) / average**2) ** 0.25 + 0 * r,
            "equilibrium_angle": zero + np.sqrt(2 * eta * decay / (1 - beta1) * (1 + beta1)),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value[:, 0])
        path.append(u[:2].copy())
        before = u
        x = x - eta * m / b
    return {name: np.stack(of) for name, of in found.items()}, np.stack(path), np.array(loss)


def write(
    folder, kind, *, name=None, layers=LAYERS, steps=300, seed=0, every=1, every_rows=30, only=None, paths=True,
    alerts=(),
):  # fmt: skip
    """Train every layer and write the run's folder; `only`: the quantities to record; the loss is in every step."""
    rate, decay, name = {"SGD": 0.05, "Adam": 0.01, "Ours": 0.01}[kind], 5e-3, name or kind
    kept = set(QUANTITIES) if only is None else set(only)
    parts, losses = {"part": [], "rows": [], "path": []}, []
    for i, (group, (n, d)) in enumerate(layers.items()):
        found, path, loss = train(kind, n, d, steps=steps, rate=rate, decay=decay, seed=seed + i)
        found = {quantity: of for quantity, of in found.items() if quantity in kept}
        losses.append(loss)
        parts["part"].append(table(name, group, found, every))
        parts["rows"].append(rows(name, group, found, every_rows))
        parts["path"].append(directions(name, group, path))
    parts["part"].append(whole(name, "loss", np.mean(losses, axis=0)))
    files = RunFiles(folder)
    for part, tables in parts.items():
        if part == "part" or (paths if part == "path" else every_rows):
            files.add(part, joined(tables))
    for alert in alerts:
        files.alert(alert)
    files.describe(about(kind, name, layers, rate, decay, kept))
    return Path(folder)


def spoil(folder, step):
    """From a step on, what a gradient that is not a number leaves: NaN, an equilibrium of 0, and the rate as it was."""
    table = read_run(folder).table.query("step >= @step").astype({"quantity": str})
    table.loc[~table["quantity"].isin(["lr", "collapsed", "equilibrium_angle"]), "value"] = np.nan
    table.loc[table["quantity"] == "equilibrium_radius", "value"] = 0.0
    RunFiles(folder).add("part", {name: table[name].tolist() for name in table.columns})
    return folder


def about(kind, name, layers, rate, decay, kept):
    return {
        "run": name,
        "started": "2025-01-31T12:00:00+00:00",
        "every": 1,
        "optimizer": {
            "name": f"torch.optim.{kind}" if kind != "Ours" else "steradian.optim.Adam",
            "groups": [
                {"params": list(layers), "lr": rate, "weight_decay": decay, "betas": [0.9, 0.99], "foreach": None},
                {"params": ["head.weight", "head.bias"], "lr": rate, "weight_decay": 0.0, "foreach": None},
            ],
        },
        "groups": [
            {
                "name": group,
                "names": [group],
                "layout": "filter",
                "rows": n,
                "size": d,
                "reason": group.replace("conv", "bn").replace(".weight", "") + ": BatchNorm2d",
                "defect": 1.3e-6 * (1 + i),
            }
            for i, (group, (n, d)) in enumerate(layers.items())
        ],
        "rest": ["head.weight", "head.bias"],
        "missing": dict.fromkeys(set(QUANTITIES) - kept, "this optimizer cannot be read, only two points are known"),
        "config": {"epochs": 30, "batch": 128, "data": "noise <on> spheres"},
        "environment": {"python": "3.12", "torch": "2.11", "device": "cpu"},
    }


def joined(tables):
    """The tables of all layers in one part: of two parts with the same step, the later one would count."""
    columns = {column: [table[column] for table in tables] for column in tables[0]}
    return {
        column: np.concatenate(of) if isinstance(of[0], np.ndarray) else [value for part in of for value in part]
        for column, of in columns.items()
    }


def whole(run, quantity, values):
    """A quantity of the run as a whole."""
    count = len(values)
    words = {"run": run, "group": "", "quantity": quantity, "statistic": "mean"}
    return {"step": np.arange(count), "value": values, **{column: [word] * count for column, word in words.items()}}


def table(run, group, found, every):
    parts = {name: [] for name in ("quantity", "statistic", "step", "value")}
    for quantity, values in found.items():
        steps, values = np.arange(0, len(values), every), values[::every]
        quantiles = np.quantile(values, [0, 0.1, 0.5, 0.9, 1], axis=1)
        of = dict(zip(("min", "q10", "median", "q90", "max"), quantiles, strict=True), mean=values.mean(1))
        for statistic, line in [("mean", of["mean"])] if quantity == "lr" else of.items():
            parts["quantity"] += [quantity] * len(steps)
            parts["statistic"] += [statistic] * len(steps)
            parts["step"].append(steps)
            parts["value"].append(line)
    step, value = np.concatenate(parts["step"]), np.concatenate(parts["value"])
    count = len(step)
    return {
        "run": [run] * count,
        "step": step,
        "group": [group] * count,
        "quantity": parts["quantity"],
        "statistic": parts["statistic"],
        "value": value,
    }


def rows(run, group, found, every):
    steps, names, numbers, values = [], [], [], []
    for quantity in ("radius", "effective_lr", "angle", "velocity"):
        if quantity in found:
            chosen = found[quantity][:: every or 1]
            n = chosen.shape[1]
            steps.append(np.repeat(np.arange(len(found[quantity]))[:: every or 1], n))
            numbers.append(np.tile(np.arange(n), len(chosen)))
            values.append(chosen.ravel())
            names += [quantity] * chosen.size
    return {
        "run": [run] * len(names),
        "step": np.concatenate(steps),
        "group": [group] * len(names),
        "quantity": names,
        "row": np.concatenate(numbers),
        "value": np.concatenate(values),
    }


def directions(run, group, path):
    steps, chosen, _ = path.shape
    count = steps * chosen
    return {
        "run": [run] * count,
        "step": np.repeat(np.arange(steps), chosen),
        "group": [group] * count,
        "row": np.tile(np.arange(chosen), steps),
        "direction": list(path.reshape(count, -1)),
    }


def unpack(text):
    """All numbers that a page's `Pack` holds, decoded as the page's script does."""
    three = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8).reshape(3, -1)
    return np.ascontiguousarray(np.pad(three, ((1, 0), (0, 0))).T).view("<f4").ravel()

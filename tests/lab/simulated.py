"""Invented results for the tests of tables, figures and documents."""

from itertools import product

import numpy as np
import pandas as pd

from steradian.lab import paper
from steradian.lab.angle import TUNED
from steradian.lab.config import Config
from steradian.lab.experiments import ALL, LIVING, PHENOMENA, RECORDED, recorded_steps, statistics_table
from steradian.lab.recipes import accuracy_tables, hypotheses, pretraining, trajectories
from steradian.lab.results import CURVES, Result, Store, Tracks
from steradian.watching.records import COLUMNS

STEPS = 371
WHERE = {"device": "NVIDIA H200", "torch": "2.11", "python": "3.12", "commit": "abc"}
LAYERS = ("conv1.weight", "stages.layer1.0.conv1.weight", "stages.layer2.0.conv1.weight")


def training(config, reached, *, random, seconds=60.0, **facts):
    """A result whose curves look like those of a training that reaches this test accuracy."""
    epochs = np.arange(1, config.epochs + 1)
    stage = np.array([config.rate_factor(k) for k in range(config.epochs)])
    noise = random.normal(0, 1, config.epochs)
    validation = (
        reached - 4 * stage**0.3 - 30 / epochs + 0.8 * stage**0.5 * noise + 0.02 * random.normal(size=config.epochs)
    )
    loss = 0.01 + 0.3 * stage**0.4 + 1 / epochs
    curves = {name: loss.tolist() for name in CURVES if name.endswith("loss")}
    curves |= {name: validation.tolist() for name in CURVES if name.endswith("accuracy")}
    test = validation.copy()
    test[int(np.argmax(validation))] = reached
    curves["test_accuracy"] = test.tolist()
    return Result(config, curves, seconds=seconds, environment=WHERE, **facts)


def column(folder, *, columns=("ResNet20",), epochs=405, seeds=5, methods=None, name="resnet20-cifar10", **facts):
    """A column of the paper's table, with accuracies around the paper's."""
    random, results = np.random.default_rng(0), []
    for config in accuracy_tables(data="cifar10", columns=columns, epochs=epochs, seeds=seeds, methods=methods):
        figure = paper.ACCURACY["bn"][config.method][config.model, config.data]
        reached = round(figure.mean + figure.spread * random.normal(), 2)
        results.append(training(config, reached, random=random, **facts))
    Store(folder / f"{name}.json").add(results)
    return results


def tracked(folder, *, epochs=405, points=60, measured=("SGD-M", "Adam"), shrunk=False, name="hypotheses-cifar10"):
    """Tracks of SGD-M, Adam and SGD: every quantity falls with the rate."""
    random, tracks = np.random.default_rng(1), Tracks(folder / f"{name}-tracks.parquet")
    for config in hypotheses(epochs=epochs):
        steps = recorded_steps(epochs * STEPS, points)
        rate = np.array([config.rate_factor(min(step // STEPS, epochs - 1)) for step in steps])
        quantities = RECORDED + (PHENOMENA if config.method in measured else ())
        shape = (len(steps), len(quantities), 12)
        values = (rate[:, None, None] * 10.0 ** random.normal(-2, 0.3, shape)).astype(np.float32)
        everything = values.copy()
        if shrunk and config.method == "Adam":
            everything[-20:, :, 0] = 3.0
        blocks = {layer: (k + 1) * values for k, layer in enumerate(LAYERS)} | {LIVING: values, ALL: everything}
        living = np.ones((len(steps), 1, 12), np.float32)
        living[-20:, :, 0] -= shrunk and config.method == "Adam"
        table = pd.concat(
            [
                statistics_table(config.key, steps, quantities, blocks),
                statistics_table(config.key, steps, ["living"], {ALL: living}),
            ]
        )
        tracks.add(config, table, steps=STEPS, environment=WHERE)
    return tracks


def compared(folder, *, points=40, epochs=10, name="trajectories-cifar10"):
    """Tracks of three comparisons: AdaGradG stays, AdaGrad leaves."""
    random, tracks = np.random.default_rng(2), Tracks(folder / f"{name}-tracks.parquet")
    for start in pretraining():
        config = trajectories([start], epochs=epochs)[0]
        steps = [step + 1 for step in recorded_steps(epochs * STEPS, points)]
        tables = []
        for method, speed in (("AdaGradG", 1e-6), ("AdaGrad", 2e-4)):
            angles = np.outer(steps, speed * random.lognormal(size=9))
            both = np.stack([np.cos(angles), angles], axis=1)
            blocks = {f"{method}: {ALL}": both} | {f"{method}: {layer}": both for layer in LAYERS}
            tables.append(statistics_table(config.key, steps, ["cosine", "angle"], blocks))
            words = {"run": config.key, "quantity": "cosine", "statistic": "mean"}
            for k in range(3):
                single = {"step": steps, "value": both[:, 0, k], "group": f"{method}: {LAYERS[0]}[{k}]"}
                tables.append(pd.DataFrame({**single, **words}))
        tracks.add(config, pd.concat(tables), steps=STEPS, environment=WHERE)
    return tracks


def turned(folder, name="angle-cifar10"):
    """Angles of three layers under SGD-M, and three times as large under Adam; a tenth in the last third."""
    tracks, steps = Tracks(folder / f"{name}-tracks.parquet"), np.arange(0, 30 * STEPS, STEPS // 2)
    fall = np.where(steps < 20 * STEPS, 1e-3, 1e-4)
    for method, factor in (("SGD-M", 1), ("Adam", 3)):
        config = Config(model="ResNet20", data="cifar10", method=method, lr=0.1, epochs=30, schedule="cosine")
        layers = enumerate(("conv1", "layer1", "layer2"), start=1)
        parts = [pd.DataFrame({"step": steps, "group": layer, "value": k * factor * fall}) for k, layer in layers]
        table = pd.concat(parts).assign(run=config.key, quantity="angle", statistic="rms")[list(COLUMNS)]
        tracks.add(config, table, steps=STEPS, environment=WHERE)
    return tracks


def tuned(folder, name="tuned-cifar10"):
    """The first and the last point of three methods, with validation accuracies of 90 and 95 %."""
    results = []
    for method, (k, accuracy) in product(("SGD-M", "Angular, muon", "Adam w/o (ab)"), ((5, 95.0), (0, 90.0))):
        lr, decay = TUNED[method][k]
        config = Config(model="ResNet20", data="cifar10", method=method, lr=lr, weight_decay=decay, epochs=1)
        curves = {"train_loss": [1.0], "validation_accuracy": [accuracy], "test_accuracy": [50.0]}
        results.append(Result(config, curves))
    Store(folder / f"{name}.json").add(results)
    return results

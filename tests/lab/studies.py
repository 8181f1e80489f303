"""Small studies that the tests of the lab share."""

from dataclasses import replace

import numpy as np

from steradian.groups import Group, Groups
from steradian.lab import models
from steradian.lab.config import Config
from steradian.lab.data import DataSet, Images, Resident, load
from steradian.lab.fleet import Fleet
from steradian.lab.results import Store

CONFIG = Config(
    model="VGG16",
    data="digits",
    method="Adam w/o (abc)",
    lr=1e-3,
    weight_decay=1e-4,
    epochs=3,
    milestones=(2,),
    batch_size=16,
    precision="float32",
    width=4,
)


def few(device="cpu", train=120, test=40):
    """A few digits, so that an epoch is short; similar images if scikit-learn is missing."""
    try:
        whole = load("digits")
    except ImportError:
        whole = like_digits()
    cut = DataSet(
        "digits",
        Images(whole.train.pixels[:train], whole.train.labels[:train]),
        Images(whole.test.pixels[:test], whole.test.labels[:test]),
        whole.classes,
    )
    return Resident(cut, device, validation=0.2)


def like_digits():
    """Ten patterns of 8 × 8 with noise."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 160, (10, 8, 8, 1))

    def some(count):
        labels = random.integers(0, 10, count)
        return Images((patterns[labels] + random.integers(0, 90, (count, 8, 8, 1))).astype(np.uint8), labels)

    return DataSet("digits", some(1438), some(359), [str(k) for k in range(10)])


def fleet(tmp_path, data, **options):
    return Fleet({"digits": data}, Store(tmp_path / "results.json"), tmp_path / "work", **options)


def curves(store):
    """By key; NaN, for epochs in which the test images were not evaluated, equals NaN."""
    return {result.config.key: comparable(result.curves) for result in store.results()}


def comparable(values):
    return {name: ["" if value != value else value for value in each] for name, each in values.items()}


def methods(*names, **changes):
    rates = {"SGD-M": 0.1, "AdamG†": 0.01, "SGD": 0.1, "AdaGradG": 0.1}
    return [replace(CONFIG, method=name, lr=rates.get(name, 1e-3), **changes) for name in names]


def without_discovery():
    """Every filter of every convolution is a row, as with BN, without a proof."""

    def rows(model, plugin, **kind):
        params = dict(models.build(model, **kind).named_parameters())
        filters = {name: p for name, p in params.items() if p.ndim == 4}
        return Groups(params, [Group((n,), "filter", len(p), p[0].numel(), "bn", 0.0) for n, p in filters.items()])

    models._rows = rows

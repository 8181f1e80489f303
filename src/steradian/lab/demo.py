"""The demo: find the spheres of a BN network on digits, watch three optimizers on them, and write a page."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from steradian import optim
from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.lab.data import digits
from steradian.lab.models import small_cnn
from steradian.reporting.page import report
from steradian.watching.watch import Watch

__all__ = ["METHODS", "Result", "run"]

METHODS: dict[str, Callable[[Groups], Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups.param_groups(), lr=0.1, momentum=0.9, weight_decay=5e-4),
    "Adam": lambda groups: torch.optim.Adam(groups.param_groups(), lr=1e-2, weight_decay=5e-4),
    "Adam without (abc)": lambda groups: optim.Adam(groups.param_groups(), lr=1e-2, weight_decay=5e-4, without="abc"),
}
"""Each method makes its optimizer from the rows of the network."""
BATCH = 64
_OWN = {"data": "digits", "model": "small_cnn"}
"""Entries of the config of every run of the demo."""


@dataclass(frozen=True, eq=False)
class Result:
    """One watched training: the method's name, its rows and watch, test accuracy from 0 to 1, and its duration."""

    name: str
    groups: Groups
    watch: Watch
    accuracy: float
    seconds: float


def run(out: Path, *, epochs: int = 30, seed: int = 0) -> list[Result]:
    """Train with each method, every step recorded in out/runs, and write the page, out/index.html.

    The rate falls to a tenth after 6/10 and 17/20 of the epochs. The seed is that of weights, split and batches.
    """
    train_split, test_split = digits(seed=seed)
    results, folders = [], [out / "runs" / name for name in METHODS]
    for folder in folders:
        about = folder / "run.json"
        config = json.loads(about.read_text(encoding="utf-8")).get("config", {}) if about.is_file() else {}
        if folder.exists() and any(config.get(name) != value for name, value in _OWN.items()):
            raise ValueError(f"{folder} is not a run of the demo, and would be overwritten: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    with Progress(transient=True) as progress:
        for name, folder in zip(METHODS, folders, strict=True):
            task = progress.add_task(f"{name} on digits", total=epochs * (len(train_split.labels) // BATCH))
            shutil.rmtree(folder, ignore_errors=True)
            torch.manual_seed(seed)
            model = small_cnn()
            groups = find_groups(model, train_split.images[:BATCH])
            optimizer = METHODS[name](groups)
            schedule = MultiStepLR(optimizer, [epochs * 6 // 10, epochs * 17 // 20], gamma=0.1)
            config = {**_OWN, "epochs": epochs, "batch": BATCH, "seed": seed}
            started, step = time.perf_counter(), 0
            with Watch(optimizer, groups, to=folder, run=name, config=config, every=1) as watch:
                for _ in range(epochs):
                    generator = torch.Generator().manual_seed(seed + step)
                    order = torch.randperm(len(train_split.labels), generator=generator)
                    for batch in order.split(BATCH)[: len(order) // BATCH]:
                        optimizer.zero_grad()
                        loss = nn.functional.cross_entropy(model(train_split.images[batch]), train_split.labels[batch])
                        loss.backward()
                        optimizer.step()
                        watch.log(loss=loss)
                        step += 1
                        progress.advance(task)
                    schedule.step()
                    with torch.no_grad():
                        right = model.eval()(test_split.images).argmax(1) == test_split.labels
                    accuracy = right.float().mean().item()
                    model.train()
                    watch.log({"test accuracy": accuracy})
            results.append(Result(name, groups, watch, accuracy, time.perf_counter() - started))
    report(folders, out / "index.html", title="A BN network on digits, seen on its spheres")
    return results

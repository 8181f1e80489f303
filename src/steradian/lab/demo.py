"""The demo: a BN network on digits, its spheres found, every step on them mapped, and a page that shows it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from steradian import geometry, optim
from steradian.discovery import find_groups
from steradian.groups import Groups, Layout, Spec
from steradian.image import ImageStep, image_step
from steradian.lab.data import Split, digits
from steradian.lab.models import small_cnn
from steradian.report.page import Run, write_page
from steradian.scheme import read_step
from steradian.watch.records import Records

__all__ = ["METHODS", "Result", "run", "train"]

METHODS: dict[str, Callable[[Groups], Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups.param_groups(), lr=0.1, momentum=0.9, weight_decay=5e-4),
    "Adam": lambda groups: torch.optim.Adam(groups.param_groups(), lr=1e-2, weight_decay=5e-4),
    "Adam without (abc)": lambda groups: optim.Adam(groups.param_groups(), lr=1e-2, weight_decay=5e-4, without="abc"),
}
BATCH = 64


@dataclass(frozen=True, eq=False)
class Result:
    """One training, every step mapped."""

    name: str
    groups: Groups
    records: Records
    accuracy: float
    seconds: float
    worst_error: float | None


def run(out: Path, *, epochs: int = 30, seed: int = 0) -> list[Result]:
    """Train with each method and write `out`/index.html."""
    train_split, test_split = digits(seed=seed)
    results = []
    with Progress(transient=True) as progress:
        steps = epochs * (len(train_split.labels) // BATCH)
        for name in METHODS:
            task = progress.add_task(f"{name} on digits", total=steps)
            tick = partial(progress.advance, task)
            results.append(train(name, train_split, test_split, epochs=epochs, seed=seed, tick=tick))
    runs = [Run(r.name, r.records.table(), _facts(r, epochs)) for r in results]
    write_page(out / "index.html", runs, title="A BN network on digits, seen on its spheres")
    return results


def train(
    name: str,
    train_split: Split,
    test_split: Split,
    *,
    epochs: int,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> Result:
    """One training with every step read and mapped to the sphere."""
    torch.manual_seed(seed)
    model = small_cnn()
    groups = find_groups(model, train_split.images[:BATCH])
    rows = groups.layouts
    optimizer = METHODS[name](groups)
    # Without (b) or (c) the momentum has moved on with the row when it is read: the step is then read from the two
    # points, and comparing it with the second one would say nothing.
    predicted = not isinstance(optimizer, optim.Adam)
    schedule = MultiStepLR(optimizer, [epochs * 6 // 10, epochs * 17 // 20], gamma=0.1)
    records, started = Records(name), time.perf_counter()
    step = 0
    for _ in range(epochs):
        for images, labels in _batches(train_split, seed=seed + step):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            before = {key: model.get_parameter(key).detach().clone() for key in rows}
            optimizer.step()
            for key, layout in rows.items():
                param = model.get_parameter(key)
                image = image_step(before[key], read_step(optimizer, param, before=before[key]), layout)
                records.add(step, key, _quantities(image))
                if predicted:
                    records.add(step, key, {"identity_error": _identity_error(image, param, layout)})
            step += 1
            tick()
        schedule.step()
    errors = [row[-1] for row in records.rows if row[3] == "identity_error" and row[4] == "max"]
    seconds = time.perf_counter() - started
    return Result(name, groups, records, _accuracy(model, test_split), seconds, max(errors, default=None))


def _quantities(image: ImageStep) -> dict[str, list[float]]:
    assert image.effective_lr is not None  # every method of the demo can be read
    return {
        "effective_lr": image.effective_lr.tolist(),
        "angle": image.angle.tolist(),
        "radius": image.radius.tolist(),
    }


def _identity_error(image: ImageStep, after: Tensor, layout: Spec) -> list[float]:
    """Distance of the predicted direction and radius from what the optimizer did, the larger of the two."""
    r, u = geometry.split(Layout(layout).rows(after.detach()))
    direction_error = geometry.norm(image.next_direction - u).squeeze(-1)
    radius_error = (image.next_radius / r.squeeze(-1) - 1).abs()
    return torch.maximum(direction_error, radius_error).tolist()


def _batches(split: Split, *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        index = order[start : start + BATCH]
        yield split.images[index], split.labels[index]


@torch.no_grad()
def _accuracy(model: nn.Module, split: Split) -> float:
    model.eval()
    return (model(split.images).argmax(1) == split.labels).float().mean().item()


def _facts(result: Result, epochs: int) -> dict[str, str]:
    facts = {
        "Test accuracy": f"{100 * result.accuracy:.1f} %",
        "Epochs": str(epochs),
        "Seconds, every step mapped": f"{result.seconds:.1f}",
    }
    if result.worst_error is not None:
        facts["Largest error of the identity"] = f"{result.worst_error:.1e}"
    return facts

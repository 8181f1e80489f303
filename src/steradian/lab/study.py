"""A study: where its files are, and its trainings on one device."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.fleet import Fleet, Progress, prepare_device
from steradian.lab.results import Store, Tracks
from steradian.lab.training import Execution, Training

__all__ = ["Study", "pick_device", "study_name"]


def pick_device(name: str | None = None) -> torch.device:
    """A device by name; None: the GPU if there is one. To be called before CUDA is used."""
    # By default streams share eight hardware queues, and the work of one waits behind another's.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu, since torch finds no GPU here, got {name!r}")
    return torch.device(name)


def file_name(text: str) -> str:
    """A text as the name of a study; data, for example, may be called by a path."""
    return re.sub(r"[^\w.-]+", "-", text.lower())


def study_name(recipe: str, configs: Sequence[Config], *, settings: str = "printed") -> str:
    """A name for the files of a recipe's trainings: the column if there is only one, otherwise the recipe and the data.

    >>> one = Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3)
    >>> study_name("tables", [one])
    'resnet20-cifar10'
    >>> study_name("tables", [one], settings="released")
    'resnet20-cifar10-released-settings'
    """
    columns = {config.column for config in configs}
    name = f"{recipe}-{'-'.join(sorted({config.data for config in configs}))}"
    if len(columns) == 1 and recipe in ("tables", "curves"):
        name = columns.pop()
    released = ["settings"] * (settings == "released") + ["network"] * any(config.released for config in configs)
    if released:
        name = "-".join([name, "released", *released])
    return file_name(name)


@dataclass(frozen=True)
class Study:
    """Where a study keeps its files, and how its trainings are run on one device."""

    name: str  #: of the study
    results: Path = Path("results")  #: folder of results, kept in the repository
    runs: Path = Path("runs")  #: folder of checkpoints and weights, not kept
    roots: Mapping[str, Path] = field(default_factory=dict)  #: folder of each data set, by name, as for `data.load`
    device: str | None = None  #: where; None: the GPU if there is one
    size: int | None = None  #: trainings in flight; None: 40 on a GPU, 1 on a CPU
    compiled: bool | None = None  #: compile the networks; None: on a GPU
    deadline: float = math.inf  #: stop, with checkpoints, before `time.monotonic()` is this
    progress: Progress = field(default_factory=Progress)  #: shows the progress

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name:
            raise ValueError(f"study must be the name of a file without its folder, got {self.name!r}")

    @property
    def store(self) -> Store:
        """The results."""
        return Store(self.results / f"{self.name}.json")

    @property
    def tracks(self) -> Tracks:
        """The recorded steps."""
        return Tracks(self.results / f"{self.name}-tracks.parquet")

    @property
    def tuning(self) -> "Study":
        """The study of the settings that were tried for this one."""
        return replace(self, name=f"{self.name}-grid")

    @property
    def work(self) -> Path:
        """Folder of checkpoints and weights."""
        return self.runs / self.name

    def run(
        self, configs: Sequence[Config], *, keep_weights: bool = False, make: Callable[..., Training] = Training
    ) -> bool:
        """Train what is not finished yet; returns whether everything is.

        Results that another study in the same folder has are copied, unless more is wanted: the weights of finished
        trainings are kept, or `make` makes trainings that record more, as for `Fleet`.
        """
        where = pick_device(self.device)
        prepare_device(where, exact=any(config.precision == "float32" for config in configs))
        keys, gpu = {config.key for config in configs}, where.type == "cuda"
        other = self.store.elsewhere(keys) if make is Training and not keep_weights else []
        known = {r.config.key: r for r in [*self.store.results(), *other] if r.config.key in keys}
        # A given folder is read even if nothing is left to do: its images may not be those of the results.
        needed = sorted({config.data for config in configs if config.key not in known or config.data in self.roots})
        data = {name: Resident(load(name, self.roots.get(name)), where) for name in needed}
        for key, result in known.items():
            name, made = result.config.data, result.environment.get("data")
            if name in data and made is not None and made != data[name].fingerprint:
                mend = "give this data another name with --data"
                raise ValueError(f"{self.results} holds {key}, trained on other data called {name}: {mend}")
        if other:
            self.store.add(other)
        size, compiled = self.size or (40 if gpu else 1), gpu if self.compiled is None else self.compiled
        how: dict[str, Any] = {"keep_weights": keep_weights, "make": make, "progress": self.progress}
        fleet = Fleet(data, self.store, self.work, size, Execution(compiled=compiled), **how)
        return fleet.run(configs, seconds=self.deadline - time.monotonic())

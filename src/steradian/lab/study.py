"""A study from start to end: where its files are, its data on a device, and who carries it out."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steradian.lab.config import Config
from steradian.lab.data import Resident, load
from steradian.lab.execution import Execution
from steradian.lab.fleet import CHECKPOINTS, Fleet, prepare_device
from steradian.lab.progress import Silent, Watcher
from steradian.lab.results import Result, Store
from steradian.lab.training import Training

__all__ = ["Study", "pick_device", "study_name"]

RESULTS, RUNS = Path("results"), Path("runs")
_LONGEST = 200  # bytes of a study's name


def pick_device(name: str | None = None) -> torch.device:
    """A device by name; None: the GPU where there is one. To be called before CUDA is used."""
    # By default streams share eight hardware queues, and the work of one waits behind another's.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda is not there: this machine or this torch has no GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one of the {torch.cuda.device_count()} GPUs there are, got {name!r}")
    return device


def study_name(recipe: str, configs: Sequence[Config], *, settings: str = "printed") -> str:
    """A name for the files: the column where there is only one, the recipe and the data otherwise.

    Args:
        recipe: what the trainings are for.
        configs: the trainings.
        settings: where their hyper-parameters are from, one of `paper.SETTINGS`.

    >>> one = Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3)
    >>> study_name("tables", [one])
    'resnet20-cifar10'
    >>> study_name("tables", [one], settings="released")
    'resnet20-cifar10-released-settings'
    """
    columns = {config.column for config in configs}
    if len(columns) == 1 and recipe in ("tables", "curves"):
        name = columns.pop().replace(" ", "-").lower()
    else:
        name = f"{recipe}-{'-'.join(sorted({config.data for config in configs}))}"
    released = {"settings": settings == "released", "network": any(config.released for config in configs)}
    if any(released.values()):
        name = "-".join([name, "released", *(what for what, is_so in released.items() if is_so)])
    return re.sub(r"[/\\\0]+", "-", name)  # a file, wherever its data's name points


@dataclass(frozen=True)
class Study:
    """Where a study keeps its files.

    Args:
        name: of the study.
        results: folder of results, kept in the repository.
        runs: folder of checkpoints and weights, not kept.
    """

    name: str
    results: Path = RESULTS
    runs: Path = RUNS

    def __post_init__(self) -> None:
        for name in ("results", "runs"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        if not self.name or self.name.startswith(".") or re.search(r"[/\\\0]", self.name):
            raise ValueError(f"study must be the name of a file without its folder, got {self.name!r}")
        if len(os.fsencode(self.name)) > _LONGEST:  # what is written beside a file has a longer name
            raise ValueError(f"study must have at most {_LONGEST} bytes, got {self.name!r}")

    @property
    def store(self) -> Store:
        """The results."""
        return Store(self.results / f"{self.name}.json")

    @property
    def work(self) -> Path:
        """Folder of checkpoints and weights."""
        return self.runs / self.name

    def run(
        self,
        configs: Sequence[Config],
        *,
        roots: Mapping[str, Path] | None = None,
        device: torch.device | str | None = None,
        size: int | None = None,
        seconds: float | None = None,
        execution: Execution | None = None,
        keep_weights: bool = False,
        every: float = CHECKPOINTS,
        watcher: Watcher | None = None,
        make: Callable[..., Training] = Training,
    ) -> bool:
        """Train what is not finished yet, on one device; returns whether everything is.

        What another study in the same folder has finished is taken from there, unless more than its result is needed.

        Args:
            configs: the trainings.
            roots: folder of each data set, by name; others are looked for where `data.load` does.
            device: where; None: the GPU where there is one.
            size: trainings in flight; None: 40 on a GPU, 1 on a CPU.
            seconds: stop, with checkpoints, when this time is over.
            execution: how; None: captured, compiled and fused on a GPU.
            keep_weights: keep the weights of finished trainings.
            every: seconds between checkpoints.
            watcher: told what happens.
            make: makes a training, as for `Fleet`.
        """
        device = device if isinstance(device, torch.device) else pick_device(device)
        gpu = device.type == "cuda"
        prepare_device(device, exact=any(config.precision == "float32" for config in configs))
        keys = {config.key for config in configs}
        other = self.store.elsewhere(keys) if make is Training and not keep_weights else []
        known = [result for result in [*self.store.results(), *other] if result.config.key in keys]
        done = {result.config.key for result in known}
        # Data that is shown is read even where nothing is left to do: it may not be what the results were made from.
        needed = sorted({config.data for config in configs if config.key not in done or config.data in (roots or {})})
        data = {name: Resident(load(name, (roots or {}).get(name)), device) for name in needed}
        self.check_data(known, {name: resident.fingerprint for name, resident in data.items()})
        if other:
            self.store.add(other)
        fleet = Fleet(
            data,
            self.store,
            self.work,
            size=size or (40 if gpu else 1),
            execution=execution or Execution(compiled=gpu),
            every=every,
            keep_weights=keep_weights,
            watcher=watcher or Silent(),
            make=make,
        )
        return fleet.run(configs, seconds=seconds)

    def check_data(self, known: Sequence[Result], data: Mapping[str, str]) -> None:
        """Refuse to go on with other images under the name of those that results were made from.

        Args:
            known: the results.
            data: fingerprints of the images, by name.
        """
        for result in known:
            name = result.config.data
            made = result.environment.get("data")
            if name in data and made is not None and made != data[name]:
                raise ValueError(
                    f"{self.results} holds {result.config.key}, trained on other data called {name}: give this data "
                    "another name with --data"
                )

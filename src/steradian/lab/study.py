"""A study: where its files are, and its trainings on one device or, by Ray, on many machines."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steradian.lab.config import Config
from steradian.lab.data import Resident, load, usual_root
from steradian.lab.fleet import CHECKPOINTS, Fleet, prepare_device
from steradian.lab.progress import Progress
from steradian.lab.results import Result, Store, Tracks
from steradian.lab.training import Execution, Training

__all__ = ["RESULTS", "RUNS", "Study", "pick_device", "study_name", "sweep"]

RESULTS, RUNS = Path("results"), Path("runs")
_RETRIES = 3  # of a fleet whose worker died


def pick_device(name: str | None = None) -> torch.device:
    """A device by name; None: the GPU if there is one. To be called before CUDA is used."""
    # By default streams share eight hardware queues, and the work of one waits behind another's.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    return torch.device(name)


def study_name(recipe: str, configs: Sequence[Config], *, settings: str = "printed") -> str:
    """A name for the files: the column if there is only one, otherwise the recipe and the data.

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
        name = "-".join([name, "released", *(what for what, used in released.items() if used)])
    return re.sub(r"[/\\\0]+", "-", name)  # the name of a data set may be a path


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
    def work(self) -> Path:
        """Folder of checkpoints and weights."""
        return self.runs / self.name

    def run(
        self,
        configs: Sequence[Config],
        *,
        roots: Mapping[str, Path] | None = None,
        device: torch.device | str | None = None,
        seconds: float | None = None,
        keep_weights: bool = False,
        make: Callable[..., Training] = Training,
        size: int | None = None,
        compiled: bool | None = None,
        **options: Any,
    ) -> bool:
        """Train what is not finished yet, on one device; returns whether everything is.

        Results that another study in the same folder has are copied, unless more than the result is needed.

        Args:
            configs: the trainings.
            roots: folder of each data set, by name; others are searched for as by `data.load`.
            device: where; None: the GPU if there is one.
            seconds: stop, with checkpoints, when this time is over.
            keep_weights: keep the weights of finished trainings.
            make: makes a training, as for `Fleet`.
            size: trainings in flight; None: 40 on a GPU, 1 on a CPU.
            compiled: compile the networks; None: on a GPU.
            **options: of `Fleet`: every, progress.
        """
        device = device if isinstance(device, torch.device) else pick_device(device)
        prepare_device(device, exact=any(config.precision == "float32" for config in configs))
        keys, roots, gpu = {config.key for config in configs}, roots or {}, device.type == "cuda"
        other = self.store.elsewhere(keys) if make is Training and not keep_weights else []
        known = [result for result in [*self.store.results(), *other] if result.config.key in keys]
        done = {result.config.key for result in known}
        # A given folder is read even if nothing is left to do: its images may not be those of the results.
        needed = sorted({config.data for config in configs if config.key not in done or config.data in roots})
        data = {name: Resident(load(name, roots.get(name)), device) for name in needed}
        self._check_images(known, {name: resident.fingerprint for name, resident in data.items()})
        if other:
            self.store.add(other)
        execution = Execution(compiled=gpu if compiled is None else compiled)
        options |= {"size": size or (40 if gpu else 1), "execution": execution, "keep_weights": keep_weights}
        return Fleet(data, self.store, self.work, make=make, **options).run(configs, seconds=seconds)

    def _check_images(self, known: Sequence[Result], data: Mapping[str, str]) -> None:
        """Raise if data, given by fingerprints, has the name but not the images that results were made from."""
        for result in known:
            name, made = result.config.data, result.environment.get("data")
            if name in data and made is not None and made != data[name]:
                raise ValueError(
                    f"{self.results} holds {result.config.key}, trained on other data called {name}: give this data "
                    "another name with --data"
                )


# Many machines


def sweep(
    configs: Sequence[Config],
    study: Study,
    *,
    address: str | None = None,
    roots: Mapping[str, Path] | None = None,
    size: int = 8,
    every: float = CHECKPOINTS,
    progress: Progress | None = None,
) -> bool:
    """Run a study on a Ray cluster, a fleet per task; returns whether everything is finished.

    If a worker dies, Ray starts its fleet again, which resumes from its checkpoints if it can read that folder. If the
    driver dies, its next start finds the results that had arrived. Finished trainings are never repeated.

    Args:
        configs: the trainings.
        study: where results and checkpoints go; workers keep their checkpoints in the same folder of their own file
            system.
        address: of an existing Ray cluster; None: one is started on this machine.
        roots: folders of the data, by name, as the workers see them; others are looked for where `data.load` does, from
            the driver's folder first, if the workers see it.
        size: trainings in a fleet.
        every: seconds between checkpoints.
        progress: shows the progress, of finished trainings alone.
    """
    ray, progress = _ray(), progress or Progress()
    started = not ray.is_initialized()
    if started:
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(address=address, **({} if address else quiet))
    try:
        trainings = {config.key: config for config in configs}
        study.store.add(study.store.elsewhere(trainings))
        known = [result for result in study.store.results() if result.config.key in trainings]
        done = {result.config.key for result in known}
        needs = {"num_gpus": 1} if ray.cluster_resources().get("GPU", 0) else {"num_cpus": 1}
        # Ray itself repeats a task whose worker died; an error in the task is an error of the study.
        work = ray.remote(**needs, max_retries=_RETRIES)(_run_fleet)
        # Workers have another working directory and may be on other machines.
        usual = {config.data: usual_root(config.data) for config in configs if usual_root(config.data).is_dir()}
        folders = {name: str(Path(root).absolute()) for name, root in (usual | dict(roots or {})).items()}
        # Networks of one kind share compiled code. Finished trainings count, too, so that every fleet keeps its folder.
        ordered = sorted(trainings.values(), key=lambda c: (c.model, c.norm, c.data, c.released))
        waiting = []
        for unit in (ordered[k : k + size] for k in range(0, len(ordered), size)):
            if left := [config.to_dict() for config in unit if config.key not in done]:
                folder = study.work.absolute() / f"fleet-{unit[0].key}"
                waiting.append(work.remote(left, str(folder), folders, every))
        with progress:
            progress.begin(len(trainings), len(done))
            while waiting:
                [ready], waiting = ray.wait(waiting, num_returns=1)
                arrived = [Result.from_dict(values) for values in ray.get(ready)]
                for result in arrived:
                    if images := result.environment.get("data"):  # other machines may have other images
                        study._check_images(known, {result.config.data: images})
                study.store.add(arrived)
                known += arrived
                for result in arrived:
                    if result.config.key not in done:  # a fleet also returns results that it had already
                        progress.finished(result.config, result.curves)
    finally:
        if started:
            ray.shutdown()
    return trainings.keys() <= study.store.keys()


def _run_fleet(configs: list[dict[str, Any]], folder: str, roots: dict[str, str], every: float) -> list[dict[str, Any]]:
    """The task of a worker: a fleet with its own store, which is found again after a restart."""
    unit, work = [Config.from_dict(values) for values in configs], Path(folder)
    study = Study(work.name, work.parent, work.parent)
    study.work.mkdir(parents=True, exist_ok=True)
    (study.work / "worker").write_text(str(os.getpid()))
    paths = {key: Path(root) for key, root in roots.items()}
    study.run(unit, roots=paths, size=len(unit), every=every)
    return [result.to_dict() for result in study.store.results()]


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError("many machines need Ray: pip install 'steradian[scale]'") from error
    return ray

"""A study over many machines: fleets as units of work, here or on a Ray cluster, results in one store.

A worker that dies is started again and goes on from its checkpoints, where its folder can be seen; a driver that is
killed finds on its next start what had arrived. Finished trainings are never repeated.
"""

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steradian.lab.config import Config
from steradian.lab.data import usual_root
from steradian.lab.fleet import CHECKPOINTS
from steradian.lab.members import Member
from steradian.lab.progress import Silent, Watcher
from steradian.lab.results import Result
from steradian.lab.study import Study, pick_device

__all__ = ["sweep", "units"]

_PATIENCE = 10.0  # seconds for a cluster to answer


def sweep(
    configs: Sequence[Config],
    study: Study,
    *,
    engine: str = "local",
    address: str | None = None,
    roots: Mapping[str, Path] | None = None,
    size: int = 8,
    retries: int = 3,
    every: float = CHECKPOINTS,
    watcher: Watcher | None = None,
) -> bool:
    """Carry out a study, fleet by fleet; returns whether everything is finished.

    Args:
        configs: the trainings.
        study: where results and checkpoints go; on a cluster, workers keep their checkpoints in the same folder of
            their own file system.
        engine: "local", or "ray".
        address: of an existing Ray cluster; None: one is started on this machine.
        roots: folders of the data, by name, as the workers see them; others are looked for where `data.load` does, from
            the driver's folder first, where the workers see it.
        size: trainings in a fleet.
        retries: how often a fleet whose worker died is started again.
        every: seconds between checkpoints.
        watcher: told what happens; of fleets on a cluster, what they have finished.
    """
    folders = {name: Path(root).absolute() for name, root in (roots or {}).items()}
    if engine == "local":
        return study.run(configs, roots=folders, size=size, every=every, watcher=watcher or Silent())
    if engine != "ray":
        raise ValueError(f"engine must be local or ray, got {engine!r}")
    return _on_ray(configs, study, address, folders, size, retries, every, watcher or Silent())


def units(configs: Sequence[Config], size: int) -> list[list[Config]]:
    """The trainings cut into fleets: one network and data set in each, so that what is compiled is shared.

    >>> made = [Config(model=m, data="digits", method="Adam", lr=1e-3) for m in ("VGG16", "ResNet20", "VGG16")]
    >>> [[config.model for config in unit] for unit in units(made, 2)]
    [['VGG16', 'VGG16'], ['ResNet20']]
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    kinds: dict[tuple[str, str, str, bool], list[Config]] = {}
    for config in configs:
        kinds.setdefault((config.model, config.norm, config.data, config.released), []).append(config)
    return [kind[k : k + size] for kind in kinds.values() for k in range(0, len(kind), size)]


def _on_ray(
    configs: Sequence[Config],
    study: Study,
    address: str | None,
    roots: Mapping[str, Path],
    size: int,
    retries: int,
    every: float,
    watcher: Watcher,
) -> bool:
    ray = _ray()
    if address is not None:
        _reach(address)
    started = not ray.is_initialized()
    if started:
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(address=address, **({} if address else quiet))
    try:
        study.store.adopt(config.key for config in configs)
        done = study.store.keys()
        keys = {config.key for config in configs}
        known = [result for result in study.store.results() if result.config.key in keys]
        gpus = ray.cluster_resources().get("GPU", 0)
        needs = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        # Ray itself starts a task again whose worker died; an error in the task is an error of the study.
        work = ray.remote(**needs, max_retries=retries)(_work)
        waiting = []
        folders = {name: str(root) for name, root in roots.items()}
        # Workers have another folder of their own, and perhaps another machine.
        usual = {name: str(usual_root(name).absolute()) for name in {config.data for config in configs} - set(roots)}
        # Fleets are cut from all trainings, so that each finds its folder again whatever has arrived since.
        every_one = list(dict.fromkeys(configs))
        for unit in units(every_one, size):
            left = [config.to_dict() for config in unit if config.key not in done]
            if left:
                waiting.append(work.remote(left, str(_folder(study, unit)), folders, usual, every))
        with watcher:
            watcher.begin(len(every_one), sum(config.key in done for config in every_one))
            while waiting:
                ready, waiting = ray.wait(waiting, num_returns=1)
                for unit_results in _got(ray, ready):
                    arrived = [Result.from_dict(values) for values in unit_results]
                    _take_in(arrived, known, study)
                    for result in arrived:
                        if result.config.key not in done:  # a fleet tells what it found finished, too
                            watcher.finished(Member(result.config, dict(result.curves)))
    finally:
        if started:
            ray.shutdown()
    return keys <= study.store.keys()


def _take_in(arrived: list[Result], known: list[Result], study: Study) -> None:
    """Store results; machines may have different images under one name, which are refused."""
    for result in arrived:
        if images := result.environment.get("data"):
            study.check_data(known, {result.config.data: images})
    study.store.add(arrived)
    known += arrived


def _reach(address: str) -> None:
    """Ask whether anybody listens there: Ray itself takes minutes to say no, in many lines."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or not port.isdigit():
        raise ValueError(f"address must be HOST:PORT, ray://HOST:PORT or auto, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from error


def _got(ray: Any, ready: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """What fleets delivered; what went wrong in one comes out as it was raised there."""
    try:
        return list(ray.get(ready))
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error))) from None
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"a fleet was lost ({error}); what has arrived is stored, and a new start goes on"
        ) from error


def _folder(study: Study, unit: Sequence[Config]) -> Path:
    """Where the worker of a fleet keeps its store and its checkpoints."""
    name = hashlib.sha256("".join(sorted(config.key for config in unit)).encode()).hexdigest()[:12]
    return study.work.absolute() / f"fleet-{name}"


def _work(
    configs: list[dict[str, Any]], folder: str, roots: dict[str, str], usual: dict[str, str], every: float
) -> list[dict[str, Any]]:
    """What a worker does: a fleet with a store of its own, which a second start finds."""
    unit, work = [Config.from_dict(values) for values in configs], Path(folder)
    study = Study(work.name, work.parent, work.parent)
    study.work.mkdir(parents=True, exist_ok=True)
    (study.work / "worker").write_text(str(os.getpid()))
    paths = {key: Path(root) for key, root in usual.items() if Path(root).is_dir()}
    paths |= {key: Path(root) for key, root in roots.items()}
    study.run(unit, roots=paths, device=pick_device(), size=len(unit), every=every)
    return [result.to_dict() for result in study.store.results()]


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError("many machines need Ray: pip install 'steradian[scale]'") from error
    return ray

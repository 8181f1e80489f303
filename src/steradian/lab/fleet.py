"""Many trainings at once on one device, stopped at any moment and continued where they were.

On a GPU every training has its own stream and its own captured step, and several are in flight. Trainings share
nothing but the data, which nobody writes, so none depends on its neighbours.
"""

import io
import math
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steradian.lab import claims
from steradian.lab.claims import Claims
from steradian.lab.config import Config
from steradian.lab.data import Resident
from steradian.lab.execution import Execution
from steradian.lab.interruption import patient
from steradian.lab.models import check_kind
from steradian.lab.progress import Silent, Watcher
from steradian.lab.results import Result, Store, environment, remove_parts, write_atomically
from steradian.lab.training import Training

__all__ = ["CHECKPOINTS", "Fleet", "prepare_device", "read_state"]

CHECKPOINTS = 120.0
"""Seconds between the checkpoints of a training: what a kill may cost."""

_BURST = 25  # steps that a training is given before the next one's turn
_AHEAD = 2  # turns that may wait on the device
_PAUSE = 2e-4  # seconds before asking the device again


def prepare_device(device: torch.device, *, exact: bool) -> None:
    """Settings of a process that trains a fleet.

    Args:
        device: the device.
        exact: float32 is to be float32, and the same every time: no tf32, no algorithms that add in any order, and
            none chosen by their speed.
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    with warnings.catch_warnings():  # torch may prefer another spelling of the same setting
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = not exact


@dataclass
class Fleet:
    """A study on one device: trainings that are finished, under way, and waiting.

    Args:
        data: by name, the data sets that the trainings need, on one device.
        store: where results go.
        work: folder for checkpoints and, with `keep_weights`, for final weights.
        size: how many trainings are in flight.
        execution: how they are carried out.
        every: seconds between checkpoints of a training, which are written when an epoch ends.
        keep_weights: keep the weights of finished trainings; others can start from them.
        watcher: told what happens.
        make: makes a training; a subclass of `Training` may see more of it than its curves.
        clock: seconds, for tests.
    """

    data: Mapping[str, Resident]
    store: Store
    work: Path
    size: int = 8
    execution: Execution = field(default_factory=Execution)
    every: float = CHECKPOINTS
    keep_weights: bool = False
    watcher: Watcher = field(default_factory=Silent)
    make: Callable[..., Training] = Training
    clock: Callable[[], float] = time.monotonic

    def run(self, configs: Sequence[Config], *, seconds: float | None = None) -> bool:
        """Train what is not finished yet.

        Several processes may carry out one study: each takes what the others have not, and waits for those at the end.
        Interrupted (Ctrl-C, SIGTERM, SIGHUP), it stops as at a deadline and then raises KeyboardInterrupt; the second
        time it ends at once.

        Args:
            configs: the trainings; those in the store are not repeated, those with a checkpoint go on from it.
            seconds: stop at the last epoch that ends before, with a checkpoint; None: until all is finished.

        Returns:
            Whether everything is finished.
        """
        self.work = Path(self.work)
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, got {seconds}")
        wanted = list(dict.fromkeys(configs))
        done = self.store.keys()
        left = [config for config in wanted if config.key not in done]
        self._check(left)
        self.store.prepare()
        for config in wanted:
            if config.key in done:  # a process that was killed before it could remove it
                self._checkpoint_path(config).unlink(missing_ok=True)
        waiting = self._squads(left)
        self._deadline = None if seconds is None else self.clock() + seconds
        self._flying: list[_Flight] = []
        self._accounted = self.clock()
        self._interrupted, finished = False, True
        with self.watcher, Claims(self.work / "claims") as self._claims, patient(self._interrupt):
            self.watcher.begin(len(wanted), len(wanted) - len(left))
            while waiting or self._flying:
                while waiting and self._aloft() < self.size and not self._late(0.0):
                    if (squad := self._claim(waiting)) is None:
                        break
                    self._flying.append(self._start(squad))
                if not self._flying and not waiting:
                    break  # others have finished the rest
                if not self._flying and not self._late(0.0):
                    self.watcher.waiting(sum(map(len, waiting)))
                    time.sleep(claims.AGAIN)
                    continue
                if all(flight.held for flight in self._flying):  # or the time is over before the first could start
                    for flight in self._flying:
                        self._checkpoint(flight)
                    finished = False
                    break
                moved = [self._advance(flight) for flight in list(self._flying)]
                if not any(moved):
                    time.sleep(_PAUSE)
        if self._interrupted:  # in the last epoch, too: what the caller has in mind next was to be stopped as well
            raise KeyboardInterrupt
        return finished

    def _interrupt(self) -> None:
        self._interrupted, self._deadline = True, -math.inf
        self.watcher.stopping()

    def _claim(self, waiting: list[list[Config]]) -> list[Config] | None:
        """Take the first trainings that no other process has; None where others have all that are left."""
        for squad in list(waiting):
            if not self._claims.take(config.key for config in squad):
                continue
            waiting.remove(squad)
            done = self.store.keys()
            # Others may have finished some of them meanwhile, or brought them unequally far.
            parts = self._squads([config for config in squad if config.key not in done])
            kept = {config.key for config in parts[0]} if parts else set()
            self._claims.free(config.key for config in squad if config.key not in kept)
            waiting[:0] = parts[1:]
            if parts:
                return parts[0]
        return None

    # What happens to a training in flight

    def _advance(self, flight: "_Flight") -> bool:
        """Give a training more work, or read its epoch's figures; returns whether there was anything to do."""
        training = flight.training
        pending = training.queue.pending()
        if flight.held or pending >= (1 if flight.evaluating else _AHEAD):
            return False
        if not flight.evaluating:
            if not training.take(_BURST):
                training.end_epoch()
                flight.evaluating = True
            return True
        training.collect()
        flight.evaluating = False
        self._account()
        for each in training.members:
            self.watcher.epoch(each)
        now = self.clock()
        if training.finished:
            self._finish(flight)
        elif self._late(flight.took(now)):
            flight.held = True
        elif now - flight.saved > self.every:
            self._checkpoint(flight)
        flight.began = now
        return True

    def _account(self) -> None:
        """Share the time since the last call among the trainings in flight."""
        now = self.clock()
        share = (now - self._accounted) / self._aloft()
        for flight in self._flying:
            flight.seconds = [seconds + share for seconds in flight.seconds]
        self._accounted = now

    def _late(self, epoch: float) -> bool:
        """Whether another epoch of so many seconds might end after the deadline."""
        return self._deadline is not None and self.clock() + 1.2 * epoch >= self._deadline

    def _aloft(self) -> int:
        return sum(len(flight.training.members) for flight in self._flying)

    def _squads(self, configs: Sequence[Config]) -> list[list[Config]]:
        """Trainings that differ by their seed alone and have come equally far, as many together as may be."""
        alike: dict[tuple[str, int], list[Config]] = {}
        most = min(self.execution.members, self.size)
        made: list[list[Config]] = []
        for config in configs:
            saved = self._saved(config) if most > 1 else None
            squad = alike.get(kind := (config.setting, saved["training"]["epoch"] if saved else 0))
            if squad is None or len(squad) >= most:
                squad = alike[kind] = []
                made.append(squad)
            squad.append(config)
        return made

    def _start(self, configs: Sequence[Config]) -> "_Flight":
        first = configs[0]
        weights = None if first.start is None else self._weights(first.start)
        training = self.make(configs, self.data[first.data], execution=self.execution, weights=weights)
        flight = _Flight(training, began=self.clock(), saved=self.clock(), seconds=[0.0] * len(configs))
        for config in configs:  # a process that was killed while it wrote
            remove_parts(self._checkpoint_path(config))
            remove_parts(self._weights_path(config.key))
        saved = [state for config in configs if (state := self._saved(config)) is not None]
        if len(saved) == len(configs):
            self._load(flight, saved)
        return flight

    def _load(self, flight: "_Flight", saved: Sequence[Any]) -> None:
        training = flight.training
        names = ", ".join(str(self._checkpoint_path(each.config)) for each in training.members)
        for state in saved:
            if state.get("data", training.data.fingerprint) != training.data.fingerprint:
                raise ValueError(f"{names} was begun on other data than {training.data.name} is now; remove it")
        try:
            training.load(*(state["training"] for state in saved))
            flight.seconds = [float(state["seconds"]) for state in saved]
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            raise ValueError(f"{names} does not fit ({error}); remove it to train from the start") from error

    def _finish(self, flight: "_Flight") -> None:
        training = flight.training
        where = {**environment(training.data.device), "data": training.data.fingerprint}
        facts = zip(training.members, training.collapsed(), flight.seconds, strict=True)
        results = [Result(m.config, m.curves, m.diverged, gone, seconds, where) for m, gone, seconds in facts]
        if self.keep_weights:
            for number, each in enumerate(training.members):
                if not each.diverged:
                    _write(self._weights_path(each.config.key), training.weights(number))
        self.store.add(results)
        # Only now: killed in between, the study finds the result and not a training without its checkpoint.
        for each in training.members:
            self._checkpoint_path(each.config).unlink(missing_ok=True)
            self.watcher.finished(each)
        self._claims.free(each.config.key for each in training.members)
        self._flying.remove(flight)

    def _checkpoint(self, flight: "_Flight") -> None:
        for number, each in enumerate(flight.training.members):
            if flight.training.epoch:
                state = {"training": flight.training.state(number), "seconds": flight.seconds[number]}
                state["data"] = flight.training.data.fingerprint
                _write(self._checkpoint_path(each.config), state)
        flight.saved = self.clock()

    # Files

    def _check(self, configs: Sequence[Config]) -> None:
        missing = {config.data for config in configs} - set(self.data)
        if missing:
            raise ValueError(f"data must hold {', '.join(sorted(missing))}, got {', '.join(self.data) or 'nothing'}")
        for config in configs:
            check_kind(config.model, config.norm)
            if config.batch_size > (count := self.data[config.data].counts["train"]):
                raise ValueError(
                    f"batch_size must be at most the {count} training images of {config.data}, got {config.batch_size}"
                )
        for start in {config.start for config in configs if config.start is not None}:
            if not self._weights_path(start).exists():
                raise ValueError(f"no weights of {start} under {self.work}: train it first, with keep_weights=True")

    def _saved(self, config: Config) -> Any:
        """The checkpoint of a training; None where it has none."""
        path = self._checkpoint_path(config)
        return read_state(path) if path.exists() else None

    def _checkpoint_path(self, config: Config) -> Path:
        return self.work / "checkpoints" / f"{config.key}.pt"

    def _weights_path(self, key: str) -> Path:
        return self.work / "weights" / f"{key}.pt"

    def _weights(self, key: str) -> dict[str, Tensor]:
        return read_state(self._weights_path(key))


@dataclass
class _Flight:
    """A training in flight.

    Attributes:
        training: the training.
        began: when its epoch began.
        saved: when its last checkpoint was written.
        seconds: each member's share of the device's time.
        evaluating: the epoch's end is in the queue.
        held: it waits at the end of an epoch, since the time is over.
        pace: seconds of its shortest epoch; 0 after the first, which holds compiling and capturing, too.
    """

    training: Training
    began: float
    saved: float
    seconds: list[float]
    evaluating: bool = False
    held: bool = False
    pace: float | None = None

    def took(self, now: float) -> float:
        """The pace, as an epoch ends now."""
        self.pace = 0.0 if self.pace is None else min(self.pace or math.inf, now - self.began)
        return self.pace


def read_state(path: Path) -> Any:
    """A file of tensors and plain containers; nothing in it is run.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    try:
        with warnings.catch_warnings():  # of what it then refuses
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # whose text advises to run what is in the file
            reason = "it is damaged, or holds more than tensors and plain containers"
        raise ValueError(f"{path} cannot be read ({reason}); remove it to train this one from its start") from error


def _write(path: Path, content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())

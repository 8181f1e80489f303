"""Results of trainings: one JSON file per study, written whole or not at all, and mergeable."""

import errno
import fcntl
import glob
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch

from steradian.lab.config import Config

__all__ = ["Result", "Store", "environment", "locked", "remove_parts", "write_atomically"]


@dataclass(frozen=True)
class Result:
    """What came of one training.

    Attributes:
        config: the training.
        curves: one number per epoch under each name of `members.CURVES`.
        diverged: its loss stopped being a number; it was ended there.
        collapsed: rows that had no direction at the end.
        seconds: its share of the device's time: time during which n trainings ran counts 1/n.
        environment: hardware, versions and commit.
    """

    config: Config
    curves: Mapping[str, list[float]]
    diverged: bool = False
    collapsed: int = 0
    seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def best_epoch(self) -> int:
        """The first epoch, from 0, with the best validation accuracy."""
        accuracies = self.curves["validation_accuracy"]
        return accuracies.index(max(accuracies))

    @property
    def accuracy(self) -> float:
        """Test accuracy in percent at the best validation epoch, as the authors report it; NaN if it diverged."""
        return float("nan") if self.diverged else self.curves["test_accuracy"][self.best_epoch]

    @property
    def final_accuracy(self) -> float:
        """Test accuracy in percent after the last epoch; NaN if it diverged."""
        return float("nan") if self.diverged else self.curves["test_accuracy"][-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what can be recomputed is written too, for readers without this library."""
        reached = {} if self.diverged else {"accuracy": self.accuracy, "final_accuracy": self.final_accuracy}
        return {
            "key": self.config.key,
            "config": self.config.to_dict(),
            "diverged": self.diverged,
            "collapsed": self.collapsed,
            **reached,
            "best_epoch": None if self.diverged else self.best_epoch,
            "seconds": self.seconds,
            "environment": dict(self.environment),
            "curves": {name: [_short(value) for value in values] for name, values in self.curves.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: something is missing, or not what `to_dict` writes.
        """
        missing = [name for name in ("config", *_FACTS, "curves") if name not in values]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if not all(isinstance(values[name], Mapping) for name in ("config", "environment", "curves")):
            raise ValueError("config, environment and curves must be mappings")
        if not all(isinstance(values[name], int | float) for name in ("diverged", "collapsed", "seconds")):
            raise ValueError("diverged, collapsed and seconds must be numbers")
        if not all(isinstance(fact, str) for fact in values["environment"].values()):
            raise ValueError("environment must hold words")
        config = Config.from_dict(values["config"])
        if values.get("key", config.key) != config.key:
            raise ValueError(f"{values['key']} is not the key of its configuration, which is {config.key}")
        curves = {name: _curve(name, curve) for name, curve in values["curves"].items()}
        lengths = {len(curves.get(name, [])) for name in (*_SHOWN, *curves)}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(f"its curves must be {', '.join(_SHOWN)} and others, with one number for each epoch")
        return cls(config, curves, *(values[name] for name in _FACTS))


_FACTS = ("diverged", "collapsed", "seconds", "environment")
_SHOWN = ("train_loss", "validation_accuracy", "test_accuracy")  # by tables and figures


def _curve(name: str, values: Any) -> list[float]:
    if not isinstance(values, list) or not all(v is None or isinstance(v, int | float) for v in values):
        raise ValueError(f"its curve {name} must be a list of numbers")
    return [float("nan") if value is None else value for value in values]


class Store:
    """The results of a study in one JSON file, a line for each training.

    Args:
        path: the file; it need not exist.

    >>> Store(Path("no-such-file.json")).results()
    []
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._known: tuple[tuple[int, int, int] | None, set[str]] = (None, set())

    def results(self) -> list[Result]:
        """Everything stored, ordered by key."""
        found = [self._read(number, row) for number, row in enumerate(self._rows())]
        return list({result.config.key: result for result in found}.values())  # files may have been joined by hand

    def keys(self) -> set[str]:
        """Keys of all finished trainings, without a look at what came of them."""
        # A fleet asks with every start. The file is replaced whole, so that a changed one is another file.
        state = self.path.stat() if self.path.exists() else None
        mark = state and (state.st_ino, state.st_mtime_ns, state.st_size)
        if mark is None or mark != self._known[0]:
            self._known = mark, {self._key(number, row) for number, row in enumerate(self._rows())}
        return set(self._known[1])

    def _key(self, number: int, row: Mapping[str, Any]) -> str:
        return str(row["key"]) if "key" in row else self._read(number, row).config.key

    def _rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise ValueError(f"{self.path} is not a file of results: {error}") from error
        rows = told.get("runs") if isinstance(told, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{self.path} is not a file of results: it has no list of runs")
        return rows

    def _read(self, number: int, row: Mapping[str, Any]) -> Result:
        try:
            return Result.from_dict(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}, run {row.get('key', number)}: {error}") from error

    def add(self, results: Iterable[Result]) -> None:
        """Add results, those of the same training replaced; other processes may do so at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            # What is stored stays as it is: it need not be understood anew with every training that ends.
            merged = {self._key(k, row): row for k, row in enumerate(self._rows())}
            merged |= {result.config.key: result.to_dict() for result in results}
            lines = [json.dumps(merged[key], ensure_ascii=False) for key in sorted(merged)]
            text = '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"
            write_atomically(self.path, text.encode())

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            OSError: results could not be written; it is better known before a training than after it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "no results can be written here", str(self.path.parent))

    def adopt(self, keys: Iterable[str]) -> list[str]:
        """Take in results of these trainings that other studies in the same folder hold; returns which."""
        found = self.elsewhere(keys)
        if found:
            self.add(found)
        return [result.config.key for result in found]

    def elsewhere(self, keys: Iterable[str]) -> list[Result]:
        """Results of these trainings that other studies in the same folder hold and this one does not, by key."""
        missing = set(keys) - self.keys()
        found: dict[str, Result] = {}
        for path in sorted(self.path.parent.glob("*.json")) if missing else []:
            with suppress(ValueError):  # not a file of results
                found |= {r.config.key: r for r in Store(path).results() if r.config.key in missing}
        return [found[key] for key in sorted(found)]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at every moment, power cuts included, the old or the new one is there, whole.

    A link stays one: what it points to is written.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:  # a full disk does not say for which file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # where nothing can be written nothing can be removed
            part.unlink(missing_ok=True)


def remove_parts(path: Path) -> None:
    """Remove what writers that were killed left of a file; to be called where nobody else may be writing it."""
    path = Path(os.path.realpath(path))
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        part.unlink(missing_ok=True)


def environment(device: torch.device) -> dict[str, str]:
    """What a training ran on."""
    from steradian import __version__

    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steradian": __version__,
        "commit": _commit(),
    }


@lru_cache(maxsize=1)
def _commit() -> str:
    """The commit of the source tree: STERADIAN_COMMIT where a copy without its history is told, or "" if unknown."""
    if told := os.environ.get("STERADIAN_COMMIT"):
        return told
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _short(value: float) -> float | None:
    """Seven digits are more than a curve has; JSON has no NaN."""
    return float(f"{value:.7g}") if abs(value) < float("inf") else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file for reading, changing and writing it: other processes that do so wait."""
    path = Path(os.path.realpath(path))  # whatever name it goes by
    with path.with_name(f".{path.name}.lock").open("w") as file:
        with suppress(OSError):  # a file system without locks cannot tell who writes: others' parts are left alone
            fcntl.flock(file, fcntl.LOCK_EX)
            remove_parts(path)
        yield

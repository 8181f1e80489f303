"""What a study stores: results in one JSON file, recorded steps in one Parquet file, shared by processes with locks."""

import fcntl
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Self

import pandas as pd
import pyarrow as pa
import torch
from pyarrow import parquet

from steradian.files import remove_parts, write_atomically
from steradian.lab.config import Config
from steradian.watching.records import COLUMNS

__all__ = ["CURVES", "PARTS", "Result", "Store", "Tracks", "environment", "has_diverged"]

PARTS = ("train", "validation", "test")
CURVES = tuple(f"{part}_{what}" for part in PARTS for what in ("loss", "accuracy"))
"""One number per epoch: mean loss and accuracy in percent. Training's are over its augmented batches."""

_ABOUT = b"steradian"  # key of the metadata of a file of records


def has_diverged(config: Config, curves: Mapping[str, Sequence[float]]) -> bool:
    """Whether the last training loss is not finite, or, after the last epoch, the validation loss is NaN."""
    losses = curves["train_loss"]
    if not losses:
        return False
    # No training loss shows the effect of the last step. Before the end the validation loss may recover.
    ended = len(losses) >= config.epochs and math.isnan(curves["validation_loss"][-1])
    return ended or not math.isfinite(losses[-1])


@dataclass(frozen=True)
class Result:
    """The result of one training."""

    config: Config  #: the training
    curves: Mapping[str, list[float]]  #: one number per epoch under each name of `CURVES`
    diverged: bool = False  #: its loss stopped being finite; it was ended there
    collapsed: int = 0  #: rows that had no direction at the end
    seconds: float = 0.0  #: its share of the device's time: while n trainings run, each is charged 1/n of it
    environment: Mapping[str, str] = field(default_factory=dict)  #: hardware, versions and commit

    def __post_init__(self) -> None:
        needed = ("train_loss", "validation_accuracy", "test_accuracy")
        lengths = {name: len(self.curves.get(name, ())) for name in {**dict.fromkeys(needed), **self.curves}}
        if len({*lengths.values()}) != 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"curves must have a number per epoch for each of {', '.join(needed)}, got {found}")

    @property
    def best_epoch(self) -> int:
        """The first epoch, from 0, with the best validation accuracy."""
        accuracies = self.curves["validation_accuracy"]
        return accuracies.index(max(accuracies))

    @property
    def accuracy(self) -> float:
        """Test accuracy in percent at the best validation epoch, as the authors report it; NaN if it diverged."""
        return math.nan if self.diverged else self.curves["test_accuracy"][self.best_epoch]

    @property
    def final_accuracy(self) -> float:
        """Test accuracy in percent after the last epoch; NaN if it diverged."""
        return math.nan if self.diverged else self.curves["test_accuracy"][-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with derived values for readers without this library."""
        reached = {} if self.diverged else {"accuracy": self.accuracy, "final_accuracy": self.final_accuracy}
        return {
            "key": self.config.key,
            "config": asdict(self.config),
            "diverged": self.diverged,
            "collapsed": self.collapsed,
            **reached,
            "best_epoch": None if self.diverged else self.best_epoch,
            "seconds": self.seconds,
            "environment": dict(self.environment),
            # Seven digits, more than a curve needs; JSON has no NaN.
            "curves": {
                name: [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]
                for name, values in self.curves.items()
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        config = Config.from_dict(values["config"])
        if values.get("key", config.key) != config.key:
            raise ValueError(f"{values['key']} is not the key of its configuration, which is {config.key}")
        curves = {name: [math.nan if v is None else float(v) for v in of] for name, of in values["curves"].items()}
        more = {name: values[name] for name in ("diverged", "collapsed", "seconds", "environment") if name in values}
        return cls(config, curves, **more)


class Store:
    """The results of a study in one JSON file, a line for each training; the file need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def results(self) -> list[Result]:
        """Everything stored, ordered by key."""
        found = []
        for key, row in self._rows().items():
            try:
                found.append(Result.from_dict(row))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path}, run {key}: {error}") from error
        return found

    def keys(self) -> set[str]:
        """Keys of all finished trainings, without parsing their results."""
        return set(self._rows())

    def _rows(self) -> dict[str, dict[str, Any]]:
        """What is stored, by key, since files may have been merged by hand."""
        if not self.path.exists():
            return {}
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["runs"]
            return {row.get("key") or Config.from_dict(row["config"]).key: row for row in rows}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is not a file of results: {error}") from error

    def prepare(self) -> None:
        """Make the folder; an OSError now, if it cannot be written, costs no training."""
        with _locked(self.path):
            pass

    def add(self, results: Iterable[Result]) -> None:
        """Add results and replace those of the same trainings; other processes may do so at the same time."""
        with _locked(self.path):
            merged = self._rows() | {result.config.key: result.to_dict() for result in results}
            lines = [json.dumps(merged[key], ensure_ascii=False) for key in sorted(merged)]
            write_atomically(self.path, ('{"runs": [\n' + ",\n".join(lines) + "\n]}\n").encode())

    def elsewhere(self, keys: Iterable[str]) -> list[Result]:
        """Results of these trainings that other studies in the same folder hold and this one does not, by key."""
        missing = set(keys) - self.keys()
        found: dict[str, Result] = {}
        for path in sorted(self.path.parent.glob("*.json")) if missing else []:
            with suppress(ValueError):  # not a file of results
                found |= {r.config.key: r for r in Store(path).results() if r.config.key in missing}
        return [found[key] for key in sorted(found)]


def environment(device: torch.device) -> dict[str, str]:
    """Hardware, versions and commit of a training."""
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
    """The commit of the source tree, "" if unknown; set STERADIAN_COMMIT for a copy without git history."""
    if commit := os.environ.get("STERADIAN_COMMIT"):
        return commit
    if Path(__file__).parents[2].name != "src":
        return ""  # installed: a repository around it is the user's
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@dataclass(frozen=True)
class Tracks:
    """Recorded steps of a study in one Parquet file, with the columns of a watch's records.

    The file's own metadata describe each run: "config", "steps" in an epoch, "environment".
    """

    path: Path

    def table(self) -> pd.DataFrame:
        """Everything recorded; empty if there is no file."""
        if not self.path.exists():
            return pd.DataFrame(columns=list(COLUMNS))
        return pd.read_parquet(self.path, columns=list(COLUMNS))

    def about(self) -> dict[str, dict[str, Any]]:
        """Metadata of each run, by its key."""
        if not self.path.exists():
            return {}
        return json.loads(parquet.read_schema(self.path).metadata[_ABOUT])

    def add(self, config: Config, added: pd.DataFrame, **about: Any) -> None:
        """Add the table of a run, or replace it; other processes may do so at the same time."""
        word = pa.dictionary(pa.int32(), pa.string())
        numbers = {"step": pa.int32(), "value": pa.float32()}  # more digits than a figure shows
        schema = pa.schema([(name, numbers.get(name, word)) for name in COLUMNS])
        with _locked(self.path):
            runs = self.about() | {config.key: {"config": asdict(config), **about}}
            known = self.table()
            tables = [table for table in (known[known["run"] != config.key], added) if len(table)]
            joined = pa.Table.from_pandas(pd.concat(tables, ignore_index=True), schema=schema, preserve_index=False)
            joined = joined.replace_schema_metadata({_ABOUT: json.dumps(runs, ensure_ascii=False).encode()})
            buffer = io.BytesIO()
            parquet.write_table(joined, buffer, compression="zstd")
            write_atomically(self.path, buffer.getvalue())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file while it is read, changed and written; other processes that do so wait."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        with suppress(OSError):  # without locks another process may be writing, and its unfinished files stay
            fcntl.flock(file, fcntl.LOCK_EX)
            remove_parts(path)
        yield


def claim(path: Path) -> IO[bytes] | None:
    """Lock a file until it is closed, or until the process ends for any reason; None if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks
        pass
    return file

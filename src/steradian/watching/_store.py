"""Writes the folder of a run: Parquet parts and run.json, each complete or not there."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steradian.watching._block import Columns, Words
from steradian.watching.records import numbered, read_lines

__all__ = ["Store"]


class Store:
    """The folder of one run, to which parts are added.

    A run that is already there is continued: new parts get the next numbers.

    Args:
        folder: made if it is not there.

    Raises:
        ImportError: pandas or pyarrow is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            # pyarrow takes pandas in with its first array: better here than in the middle of a training.
            import pandas  # noqa: F401
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "recording to a folder needs pyarrow and pandas: pip install 'steradian[lab]'; "
                "a callable log(dict, step) needs neither"
            ) from error
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, columns: Columns, *, number: int | None = None) -> None:
        """Write one part of a kind ("part", "rows" or "path"); a number names the part that it replaces."""
        import pyarrow as pa
        from pyarrow import parquet

        arrays = {
            name: pa.DictionaryArray.from_arrays(column.codes, column.names)
            if isinstance(column, Words)
            else pa.array(column)
            for name, column in columns.items()
        }
        number = self.next_number(kind) if number is None else number
        with _complete(self.folder / f"{kind}-{number:05d}.parquet") as unfinished:
            parquet.write_table(pa.table(arrays), unfinished, compression="zstd")

    def next_number(self, kind: str) -> int:
        """The number that a new part of a kind gets."""
        return max(numbered(self.folder, kind), default=-1) + 1

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write run.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_plain(about), indent=1, ensure_ascii=False, default=str)
        with _complete(self.folder / "run.json") as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")

    def drop_alerts(self, step: int) -> None:
        """Take out the alerts from a step on: a training that starts there again says its own."""
        file = self.folder / "alerts.jsonl"
        said = read_lines(file)
        kept = [line for line in said if line["step"] < step]
        if len(kept) < len(said):
            with _complete(file) as unfinished:
                unfinished.write_text("".join(map(_line, kept)), encoding="utf-8")

    def alert(self, alert: Mapping[str, Any]) -> None:
        """Append one line to alerts.jsonl, in one write; a line that was not finished before stays alone."""
        line = _line(alert)
        with open(self.folder / "alerts.jsonl", "a+b", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            data = line.encode()
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _plain(value: Any) -> Any:
    """The same with words for keys: a configuration may have others, and no run is to be lost for that."""
    if isinstance(value, Mapping):
        return {str(key): _plain(of) for key, of in value.items()}
    return [_plain(of) for of in value] if isinstance(value, list | tuple) else value


def _line(alert: Mapping[str, Any]) -> str:
    return json.dumps(alert, ensure_ascii=False) + "\n"


class _complete:  # noqa: N801 - used like a function
    """A path to write to; it gets its name when the block ends well, and is removed when not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")

    def __enter__(self) -> Path:
        return self.unfinished

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                with open(self.unfinished, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(self.unfinished, self.path)
        finally:
            self.unfinished.unlink(missing_ok=True)

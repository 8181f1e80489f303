"""Who carries out what: a training belongs to one process at a time, and is free again when that process ends."""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = ["AGAIN", "Claims"]

AGAIN = 1.0
"""Seconds before asking again for what other processes have."""


class Claims:
    """Trainings that this process holds, so that others with the same study leave them to it.

    A claim is a locked file. The system unlocks it when the process ends, however it ends, so that nothing has to be
    cleaned up after a kill.

    Args:
        folder: for the files; made where missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, IO[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free(list(self._held))

    def take(self, keys: Iterable[str]) -> bool:
        """Hold all of these or none of them; returns whether nobody else has one."""
        made: list[str] = []
        for key in keys:
            if (file := _locked(self._path(key))) is None:
                self.free(made)
                return False
            self._held[key] = file
            made.append(key)
        return True

    def free(self, keys: Iterable[str]) -> None:
        """Hold these no longer."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)  # while it is locked: see `_locked`
            self._held.pop(key).close()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.lock"


def _locked(path: Path) -> IO[bytes] | None:
    """The file, locked; None where another process has it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may clean up meanwhile
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks has nobody to tell apart
            return file
        # Who held it before may have removed it between opening and locking: then it is nobody's file.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()

"""Atomic writes: a file has its old or its new content, never a part of it."""

import glob
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file so that readers find its old or its new content, never a part of it, even after a power cut.

    The folder is created if it does not exist. If the path is a symbolic link, its target is written. If it cannot be
    written, an OSError names it, and the old file is unchanged.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:  # a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # on a read-only disk
            part.unlink(missing_ok=True)


def remove_parts(path: str | Path) -> None:
    """Remove the unfinished files of writers that were killed; no other process may be writing this file."""
    target = Path(os.path.realpath(path))
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        part.unlink(missing_ok=True)

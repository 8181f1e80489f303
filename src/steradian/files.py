"""Files that are complete or not there."""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file so that at every moment, power cuts included, the old or the new one is there, complete.

    The folder is made if it does not exist. A link stays a link: its target is written.

    Args:
        path: the file.
        content: its new content.

    Raises:
        OSError: it cannot be written; the old file is then unchanged.
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
        with suppress(OSError):  # on a read-only disk nothing can be removed either
            part.unlink(missing_ok=True)

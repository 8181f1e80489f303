"""A data set as plain arrays: uint8 pixels and labels, training and test."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataSet", "Images"]


@dataclass(frozen=True, eq=False)
class Images:
    """Square images (N, S, S, C) as uint8, C = 1 or 3, and labels (N,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        square = len(shape) == 4 and shape[1] == shape[2] > 0 and shape[3] in (1, 3)
        if self.pixels.dtype != np.uint8 or not square:
            raise ValueError(f"pixels must be uint8 (N, S, S, 1 or 3), got {self.pixels.dtype} {shape}")
        if self.labels.shape != shape[:1] or self.labels.dtype.kind not in "ui":
            found = f"{self.labels.dtype} {self.labels.shape}"
            raise ValueError(f"labels must be a whole number for each of {shape[0]} images, got {found}")

    @property
    def size(self) -> int:
        """Height and width."""
        return self.pixels.shape[1]

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.pixels.shape[3]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test images of one data set, in the source's order, and the names of its classes."""

    name: str
    train: Images
    test: Images
    classes: Sequence[str]

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            if len(split) and not 0 <= int(split.labels.min()) <= int(split.labels.max()) < len(self.classes):
                raise ValueError(f"labels of {self.name} must lie in [0, {len(self.classes)})")
        if (self.train.size, self.train.channels) != (self.test.size, self.test.channels):
            raise ValueError(f"training and test images of {self.name} have different shapes")

    def fingerprint(self) -> str:
        """A hash of pixels, labels and the number of classes, as sixteen hexadecimal digits."""
        digest = hashlib.blake2b(f"{len(self.classes)}".encode(), digest_size=8)
        for split in (self.train, self.test):
            digest.update(f"{split.pixels.shape}".encode())
            digest.update(np.ascontiguousarray(split.pixels).data)
            digest.update(np.ascontiguousarray(split.labels, dtype="<i8").data)
        return digest.hexdigest()

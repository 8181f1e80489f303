"""A data set as plain arrays, and its packed form.

Packed are lossless WebP mosaics, labels as .npy, and a meta.json with SHA-256 of every file.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steradian.files import write_atomically

__all__ = ["DataSet", "Images", "pack", "read_packed"]

_SIDE = 100  # tiles along a mosaic
_LARGEST = 16_383  # pixels along a WebP image


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


def pack(data: DataSet, root: Path | str, *, source: str = "", effort: int = 4) -> None:
    """Write a data set in the packed form, `meta.json` last, so that a folder that has one is complete.

    Args:
        data: the data set.
        root: the folder, made if missing.
        source: where the data came from.
        effort: WebP's effort from 0 (fast) to 6 (small).
    """
    from PIL import Image

    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    side = min(_SIDE, _LARGEST // data.train.size)
    splits: dict[str, Any] = {}
    sums: dict[str, str] = {}
    for name, images in (("train", data.train), ("test", data.test)):
        files = {}
        for k, start in enumerate(range(0, len(images), side * side)):
            picture = Image.fromarray(_mosaic(images.pixels[start : start + side * side], side))
            webp = io.BytesIO()
            picture.save(webp, "WEBP", lossless=True, exact=True, method=effort)
            files[f"{name}-{k}.webp"] = webp.getvalue()
        labels = io.BytesIO()
        np.save(labels, images.labels.astype(np.min_scalar_type(max(255, len(data.classes) - 1))))
        mosaics = list(files)
        files[f"{name}-labels.npy"] = labels.getvalue()
        for file, content in files.items():
            write_atomically(root / file, content)
            sums[file] = hashlib.sha256(content).hexdigest()
        splits[name] = {"images": mosaics, "labels": f"{name}-labels.npy", "count": len(images)}
    meta = {
        "name": data.name,
        "tile": data.train.size,
        "channels": data.train.channels,
        "mosaic": [side, side],
        "classes": list(data.classes),
        "splits": splits,
        "sha256": sums,
        "source": source,
    }
    write_atomically(root / "meta.json", json.dumps(meta, indent=1).encode())


def read_packed(root: Path) -> DataSet:
    """Read the packed form, every file checked against its SHA-256.

    Raises:
        ValueError: a file does not match `meta.json`.
    """
    try:
        meta = json.loads((root / "meta.json").read_text(encoding="utf-8"))
        splits = {name: _read_split(root, meta, meta["splits"][name]) for name in ("train", "test")}
        return DataSet(str(meta["name"]), splits["train"], splits["test"], tuple(map(str, meta["classes"])))
    except KeyError as error:
        raise ValueError(f"{root / 'meta.json'} does not describe packed data: it has no {error}") from error


def _read_split(root: Path, meta: dict[str, Any], split: dict[str, Any]) -> Images:
    from PIL import Image

    tile, (rows, columns), channels = meta["tile"], meta["mosaic"], meta.get("channels", 3)
    parts = []
    for file in split["images"]:
        with Image.open(io.BytesIO(_checked(root, file, meta))) as picture:
            mosaic = np.asarray(picture.convert("RGB"))
        tiles = mosaic.reshape(mosaic.shape[0] // tile, tile, columns, tile, 3).swapaxes(1, 2)
        parts.append(tiles.reshape(-1, tile, tile, 3)[: rows * columns, ..., :channels])
    pixels = np.concatenate(parts)[: split["count"]]
    labels = np.load(io.BytesIO(_checked(root, split["labels"], meta)), allow_pickle=False)
    return Images(np.ascontiguousarray(pixels), labels.astype(np.int64))


def _checked(root: Path, file: str, meta: dict[str, Any]) -> bytes:
    content = (root / file).read_bytes()
    if hashlib.sha256(content).hexdigest() != meta["sha256"].get(file):
        raise ValueError(f"{root / file} is damaged: its SHA-256 is not the one in meta.json")
    return content


def _mosaic(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Tiles in rows of `side`, the last row padded with black."""
    count, tile = pixels.shape[:2]
    rows = -(-count // side)
    full = np.zeros((rows * side, tile, tile, 3), dtype=np.uint8)
    full[:count] = pixels
    return full.reshape(rows, side, tile, tile, 3).swapaxes(1, 2).reshape(rows * tile, side * tile, 3)

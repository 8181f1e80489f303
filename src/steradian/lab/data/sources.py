"""Data sets as plain arrays, from scikit-learn, a packed folder, the authors' archives or a plugin.

The packed form is lossless WebP mosaics, labels as .npy, and a meta.json with SHA-256 of every file.
"""

import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steradian.files import write_atomically
from steradian.lab.registry import DATA, register_data

__all__ = ["DataSet", "Images", "Split", "digits", "load", "pack"]

CHECKSUMS = {
    "cifar10": {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
    "cifar100": {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
    "svhn": {
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
}
"""MD5 of each file of a data set, as its authors publish it."""
_SHAPES = {"digits": (10, 8), "cifar10": (10, 32), "cifar100": (100, 32), "svhn": (10, 32)}
"""Classes and size of the known data sets, so that other data is not compared with the paper under their names."""
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
        vars(self)["labels"] = self.labels.astype(np.int64, copy=False)

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


def load(name: str, root: Path | str | None = None) -> DataSet:
    """A registered data set (digits, cifar10, cifar100, svhn, or a plugin's), or packed data of any name, as arrays.

    `root` is a folder with packed data or the original archives; None: data/NAME. Without it digits are scikit-learn's.

    >>> data = load("digits")
    >>> data.train.pixels.shape, len(data.test)
    ((1438, 8, 8, 1), 359)
    """
    folder = None if root is None else Path(root)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"root must be a folder, got {str(root)!r}")
    found = DATA[name](folder) if name in DATA else _from_folder(name, folder)
    if isinstance(found, DataSet):
        return found
    arrays = list(map(np.asarray, found))
    if len(arrays) != 4:
        expected = "images, labels, test images and test labels"
        raise ValueError(f"data {name!r} must be {expected}, got {len(arrays)} arrays")
    train, test = Images(*arrays[:2]), Images(*arrays[2:])
    classes = range(1 + int(max(part.labels.max(initial=0) for part in (train, test))))
    if missing := {*classes} - {*train.labels.tolist()}:
        raise ValueError(f"data {name!r}: no training image has the label {min(missing)}; labels are 0, 1, 2, …")
    return DataSet(name, train, test, tuple(map(str, classes)))


def _from_folder(name: str, root: Path | None) -> DataSet:
    root = root or Path("data") / name
    if name == "digits" and not root.is_dir():
        return _digits()
    if (root / "meta.json").is_file():
        found = _read_packed(root)
        if name in _SHAPES and found.name != name:
            raise ValueError(f"{root} holds {found.name}, not {name}")
        found = replace(found, name=name)  # the name decides how it is augmented
    elif any((root / file).is_file() for file in CHECKSUMS.get(name, ())):
        found = _read_archive(name, root)
    elif files := " and ".join(CHECKSUMS.get(name, ())):
        mend = "put the data there, or give its folder as root"
        raise ValueError(f"{root} has neither meta.json nor {files}: {mend}")
    else:
        known = f"data must be one of {', '.join(DATA)}, a plugin's, or packed in a folder"
        raise ValueError(f"{known}: {root} has no meta.json")
    classes, size = _SHAPES.get(name, (len(found.classes), found.train.size))
    if (len(found.classes), found.train.size) != (classes, size):
        raise ValueError(f"{name} has {classes} classes of {size} × {size} pixels, and {root} has other data")
    return found


for _name in _SHAPES:
    _digit = _name in ("digits", "svhn")  # a mirrored digit is another one
    register_data(_name, partial(_from_folder, _name), pad=1 if _name == "digits" else 4, flip=not _digit)


def pack(data: DataSet, root: Path | str, *, source: str = "", effort: int = 4) -> None:
    """Write a data set in the packed form, `meta.json` last, so that a folder that has one is complete.

    `source` says where the data came from; `effort` is WebP's, from 0 (fast) to 6 (small).
    """
    from PIL import Image

    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    side = min(_SIDE, _LARGEST // data.train.size)
    splits, sums = dict[str, Any](), dict[str, str]()
    for name, images in (("train", data.train), ("test", data.test)):
        files = {}
        for k, start in enumerate(range(0, len(images), side * side)):
            pixels, webp = images.pixels[start : start + side * side], io.BytesIO()
            rows, tile = -(-len(pixels) // side), images.size
            full = np.zeros((rows * side, tile, tile, 3), dtype=np.uint8)  # the last row is padded with black
            full[: len(pixels)] = pixels
            mosaic = full.reshape(rows, side, tile, tile, 3).swapaxes(1, 2).reshape(rows * tile, side * tile, 3)
            Image.fromarray(mosaic).save(webp, "WEBP", lossless=True, exact=True, method=effort)
            files[f"{name}-{k}.webp"] = webp.getvalue()
        splits[name] = {"images": list(files), "labels": f"{name}-labels.npy", "count": len(images)}
        labels = io.BytesIO()
        np.save(labels, images.labels.astype(np.min_scalar_type(max(255, len(data.classes) - 1))))
        files[f"{name}-labels.npy"] = labels.getvalue()
        for file, content in files.items():
            write_atomically(root / file, content)
            sums[file] = hashlib.sha256(content).hexdigest()
    meta = {"name": data.name, "tile": data.train.size, "channels": data.train.channels, "mosaic": [side, side]}
    meta |= {"classes": list(data.classes), "splits": splits, "sha256": sums, "source": source}
    write_atomically(root / "meta.json", json.dumps(meta, indent=1).encode())


def _read_packed(root: Path) -> DataSet:
    """Read the packed form, every file checked against its SHA-256."""
    from PIL import Image

    meta = json.loads((root / "meta.json").read_text(encoding="utf-8"))

    def checked(file: str) -> io.BytesIO:
        content = (root / file).read_bytes()
        if hashlib.sha256(content).hexdigest() != meta["sha256"].get(file):
            raise ValueError(f"{root / file} is damaged: its SHA-256 is not the one in meta.json")
        return io.BytesIO(content)

    try:
        splits = []
        for split in (meta["splits"][name] for name in ("train", "test")):
            tile, (rows, columns), parts = meta["tile"], meta["mosaic"], []
            for file in split["images"]:
                with Image.open(checked(file)) as picture:
                    mosaic = np.asarray(picture.convert("RGB"))
                tiles = mosaic.reshape(mosaic.shape[0] // tile, tile, columns, tile, 3).swapaxes(1, 2)
                parts.append(tiles.reshape(-1, tile, tile, 3)[: rows * columns, ..., : meta.get("channels", 3)])
            pixels = np.ascontiguousarray(np.concatenate(parts)[: split["count"]])
            splits.append(Images(pixels, np.load(checked(split["labels"]), allow_pickle=False)))
        return DataSet(str(meta["name"]), splits[0], splits[1], tuple(map(str, meta["classes"])))
    except KeyError as error:
        raise ValueError(f"{root / 'meta.json'} does not describe packed data: it has no {error}") from error


def _read_archive(name: str, root: Path) -> DataSet:
    """CIFAR-10, CIFAR-100 or SVHN from the files in a folder that their authors distribute."""
    # The pickles inside could run any code: only the original ones are read.
    for file, expected in CHECKSUMS[name].items():
        with (root / file).open("rb") as content:
            found = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != expected:
            raise ValueError(f"{root / file} is damaged or not the original: MD5 {found}, expected {expected}")
    return _svhn(root) if name == "svhn" else _cifar(name, root / file)


def _cifar(name: str, path: Path) -> DataSet:
    if name == "cifar10":
        folder, parts, test = "cifar-10-batches-py", [f"data_batch_{k}" for k in range(1, 6)], "test_batch"
        meta, classes, label = "batches.meta", b"label_names", b"labels"
    else:
        folder, parts, test = "cifar-100-python", ["train"], "test"
        meta, classes, label = "meta", b"fine_label_names", b"fine_labels"
    with tarfile.open(path) as archive:
        files: dict[str, Any] = {}
        for file in (*parts, test, meta):
            content = archive.extractfile(f"{folder}/{file}")
            assert content is not None, f"{file} is a file"
            files[file] = pickle.load(content, encoding="bytes")
    splits = []
    for batches in ([files[part] for part in parts], [files[test]]):
        pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        splits.append(Images(np.ascontiguousarray(pixels), np.concatenate([batch[label] for batch in batches])))
    return DataSet(name, splits[0], splits[1], tuple(word.decode() for word in files[meta][classes]))


def _svhn(root: Path) -> DataSet:
    from scipy.io import loadmat

    splits = []
    for content in (loadmat(root / file) for file in CHECKSUMS["svhn"]):
        pixels = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        splits.append(Images(pixels, content["y"].reshape(-1).astype(np.int64) % 10))  # the digit 0 is labelled 10
    return DataSet("svhn", splits[0], splits[1], tuple(map(str, range(10))))


def _digits() -> DataSet:
    """scikit-learn's digits; a fifth of them, after a fixed shuffle, are test images."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(raw.target))
    pixels, labels = (raw.images[order, :, :, None] * 15).astype(np.uint8), raw.target[order].astype(np.int64)
    kept = len(labels) * 4 // 5 + 1
    train, test = Images(pixels[:kept], labels[:kept]), Images(pixels[kept:], labels[kept:])
    return DataSet("digits", train, test, tuple(map(str, range(10))))


@dataclass(frozen=True, eq=False)
class Split:
    """Images (N, C, H, W) and labels (N,) of one split."""

    images: Tensor
    labels: Tensor


def digits(*, seed: int = 0) -> tuple[Split, Split]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels as (train, test), a fifth of them for test, with mean 0 and spread 1.

    >>> train, test = digits()
    >>> train.images.shape, test.labels.shape
    (torch.Size([1438, 1, 8, 8]), torch.Size([359]))
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = (images[order] - images.mean()) / images.std(), labels[order]
    kept = len(labels) - round(0.2 * len(labels))
    return Split(images[:kept], labels[:kept]), Split(images[kept:], labels[kept:])

"""Where data comes from: scikit-learn's digits, a packed folder, original archives, the hub, or a plugin."""

import hashlib
import pickle
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steradian.lab.data.packed import DataSet, Images, read_packed
from steradian.lab.registry import DATA, register_data

__all__ = ["Split", "digits", "load", "read_archive", "usual_root"]

CHECKSUMS = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
"""MD5 of each file of CIFAR and SVHN, as its authors publish it."""
_CIFAR10, _CIFAR100, *_SVHN = CHECKSUMS
_FILES = {"cifar10": [_CIFAR10], "cifar100": [_CIFAR100], "svhn": _SVHN}
_HUB = {
    "cifar10": ("uoft-cs/cifar10", "plain_text", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "cifar100", "img", "fine_label"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits", "image", "label"),
}
_SHAPES = {"digits": (10, 8), "cifar10": (10, 32), "cifar100": (100, 32), "svhn": (10, 32)}
"""Classes and size of the known data sets, so that other data is not compared with the paper under their names."""


def load(name: str, root: Path | str | None = None) -> DataSet:
    """A data set as arrays.

    Args:
        name: of a registered data set (digits, cifar10, cifar100, svhn, or a plugin's), or any name for packed data.
        root: a folder with the packed form or with the original archives. None: data/NAME if that exists; otherwise
            digits come with scikit-learn and the others from the hub, through `datasets`.

    >>> data = load("digits")
    >>> data.train.pixels.shape, len(data.test)
    ((1438, 8, 8, 1), 359)
    """
    folder = None if root is None else Path(root)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"root must be a folder, got {str(root)!r}")
    found = DATA[name](folder) if name in DATA else _from_folder(name, folder or usual_root(name))
    if isinstance(found, DataSet):
        return found
    images, labels, test_images, test_labels = map(np.asarray, found)
    classes = tuple(map(str, range(1 + int(max(labels.max(), test_labels.max())))))
    return DataSet(name, Images(images, labels), Images(test_images, test_labels), classes)


def usual_root(name: str) -> Path:
    """The folder of a data set if none is given."""
    return Path("data") / name


def _known(name: str, root: Path | None) -> DataSet:
    """One of the known data sets, from a folder or from where it is published."""
    if root is None and not usual_root(name).is_dir():
        return _digits() if name == "digits" else _from_hub(name)
    root = root or usual_root(name)
    found, (classes, size) = _from_folder(name, root), _SHAPES[name]
    if (len(found.classes), found.train.size) != (classes, size):
        raise ValueError(f"{name} has {classes} classes of {size} × {size} pixels, and {root} has other data")
    return found


for _name in _SHAPES:
    register_data(_name, partial(_known, _name))


def _from_folder(name: str, root: Path) -> DataSet:
    if (root / "meta.json").is_file():
        data = read_packed(root)
        if name in _SHAPES and data.name != name:
            raise ValueError(f"{root} holds {data.name}, not {name}")
        return replace(data, name=name)  # the name decides how it is augmented
    if name in _FILES and (root / _FILES[name][0]).is_file():
        return read_archive(name, root)
    known = f"data must be one of {', '.join(DATA)}, a plugin's, or packed in a folder"
    raise ValueError(f"{known}: {root} has neither meta.json nor the archives of {name}")


def read_archive(name: str, root: Path, *, checksums: Mapping[str, str] = CHECKSUMS) -> DataSet:
    """CIFAR-10, CIFAR-100 or SVHN from the files that their authors distribute.

    Args:
        name: "cifar10", "cifar100" or "svhn".
        root: the folder that holds them.
        checksums: MD5 of each file.
    """
    for file in _FILES[name]:  # the pickles inside could run any code: only the original ones are read
        with (root / file).open("rb") as content:
            found = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != checksums[file]:
            raise ValueError(f"{root / file} is damaged or not the original: MD5 {found}, expected {checksums[file]}")
    return _svhn(root) if name == "svhn" else _cifar(name, root / _FILES[name][0])


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
        labels = np.concatenate([np.asarray(batch[label], dtype=np.int64) for batch in batches])
        splits.append(Images(np.ascontiguousarray(pixels), labels))
    return DataSet(name, splits[0], splits[1], tuple(word.decode() for word in files[meta][classes]))


def _svhn(root: Path) -> DataSet:
    from scipy.io import loadmat

    splits = []
    for file in _FILES["svhn"]:
        content = loadmat(root / file)
        pixels = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        splits.append(Images(pixels, content["y"].reshape(-1).astype(np.int64) % 10))  # the digit 0 is labelled 10
    return DataSet("svhn", splits[0], splits[1], tuple(map(str, range(10))))


def _digits() -> DataSet:
    """scikit-learn's digits; a fifth of them, after a fixed shuffle, are test images."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(raw.target))
    pixels = (raw.images[order, :, :, None] * 15).astype(np.uint8)
    labels = raw.target[order].astype(np.int64)
    kept = len(labels) * 4 // 5 + 1
    train, test = Images(pixels[:kept], labels[:kept]), Images(pixels[kept:], labels[kept:])
    return DataSet("digits", train, test, tuple(map(str, range(10))))


def _from_hub(name: str) -> DataSet:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is neither in data/{name} nor can it come from the hub: pip install datasets, "
            "or give the folder of the archives or of the packed form as root"
        ) from error
    repository, config, image, label = _HUB[name]
    raw: Any = datasets.load_dataset(repository, config)
    splits = []
    for rows in (raw["train"], raw["test"]):
        pixels = np.stack([np.asarray(row[image].convert("RGB"), dtype=np.uint8) for row in rows])
        splits.append(Images(pixels, np.asarray(rows[label], dtype=np.int64)))
    return DataSet(name, splits[0], splits[1], tuple(raw["train"].features[label].names))


# The digits as normalized tensors, for the demo and examples


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

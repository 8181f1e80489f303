"""The original archives of CIFAR and SVHN, checked by their published MD5."""

import hashlib
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from steradian.lab.data.images import DataSet, Images

__all__ = ["CHECKSUMS", "find_archive", "read_archive"]

CHECKSUMS = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
"""MD5 of each file, as its authors publish it."""

_FILES = {
    "cifar10": ("cifar-10-python.tar.gz",),
    "cifar100": ("cifar-100-python.tar.gz",),
    "svhn": ("train_32x32.mat", "test_32x32.mat"),
}


def find_archive(name: str, root: Path) -> bool:
    """Whether a folder holds the original files of a data set."""
    return name in _FILES and (root / _FILES[name][0]).is_file()


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

        def member(file: str) -> dict[bytes, Any]:
            content = archive.extractfile(f"{folder}/{file}")
            assert content is not None, f"{file} is a file"
            made: dict[bytes, Any] = pickle.load(content, encoding="bytes")
            return made

        splits = []
        for files in (parts, [test]):
            batches = [member(file) for file in files]
            pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = np.concatenate([np.asarray(batch[label], dtype=np.int64) for batch in batches])
            splits.append(Images(np.ascontiguousarray(pixels), labels))
        return DataSet(name, splits[0], splits[1], tuple(word.decode() for word in member(meta)[classes]))


def _svhn(root: Path) -> DataSet:
    from scipy.io import loadmat

    splits = []
    for file in _FILES["svhn"]:
        content = loadmat(root / file)
        pixels = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        splits.append(Images(pixels, content["y"].reshape(-1).astype(np.int64) % 10))  # the digit 0 is labelled 10
    return DataSet("svhn", splits[0], splits[1], tuple(map(str, range(10))))

"""Where data comes from: scikit-learn's digits, a folder in one of three forms, or the hub."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steradian.lab.data.archives import find_archive, read_archive
from steradian.lab.data.images import DataSet, Images
from steradian.lab.data.packed import read_packed

__all__ = ["NAMES", "Split", "digits", "load", "usual_root"]

NAMES = ("digits", "cifar10", "cifar100", "svhn")
"""The known data sets; any other name is an image folder."""

_HUB = {
    "cifar10": ("uoft-cs/cifar10", "plain_text", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "cifar100", "img", "fine_label"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits", "image", "label"),
}
_SHAPES = {"digits": (10, 8), "cifar10": (10, 32), "cifar100": (100, 32), "svhn": (10, 32)}
"""Classes and size of the known data sets, so that other data is not compared with the paper under their names."""
_PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm"}


def load(name: str, root: Path | str | None = None) -> DataSet:
    """A data set as arrays.

    Args:
        name: one of `NAMES`, or any name for a folder of images.
        root: a folder with the packed form, with the original archives, or with images as
            train/CLASS/FILE and test/CLASS/FILE, in folders within CLASS too, names that begin with a dot left out.
            None: data/NAME if that exists; otherwise digits come with scikit-learn and the others from the hub,
            through `datasets`.

    >>> data = load("digits")
    >>> data.train.pixels.shape, len(data.test)
    ((1438, 8, 8, 1), 359)
    """
    folder = Path(root) if root is not None else usual_root(name)
    if folder.is_dir():
        found = _from_folder(name, folder)
        shape = (len(found.classes), found.train.size)
        if shape != _SHAPES.get(name, shape):
            classes, size = _SHAPES[name]
            raise ValueError(
                f"{name} has {classes} classes of {size} × {size} pixels, and {folder} has {shape[0]} of {shape[1]} × "
                f"{shape[1]}: give it another name"
            )
        return found
    if root is not None:
        raise ValueError(f"root must be a folder, got {str(root)!r}")
    if name == "digits":
        return _digits()
    if name in _HUB:
        return _from_hub(name)
    raise ValueError(f"data must be one of {', '.join(NAMES)}, or come with the folder of its images, got {name!r}")


def usual_root(name: str) -> Path:
    """The folder of a data set if none is given."""
    return Path("data") / name


def _from_folder(name: str, root: Path) -> DataSet:
    if (root / "meta.json").is_file():
        data = read_packed(root)
        if name in NAMES and data.name != name:
            raise ValueError(f"{root} holds {data.name}, not {name}")
        return replace(data, name=name)  # the name decides how it is augmented
    if find_archive(name, root):
        return read_archive(name, root)
    if (root / "train").is_dir() and (root / "test").is_dir():
        return _from_images(name, root)
    raise ValueError(f"{root} has neither meta.json, nor the archives of {name}, nor the folders train and test")


def _digits() -> DataSet:
    """scikit-learn's digits; a fifth of them, after a fixed shuffle, are test images."""
    raw = _sklearn_digits()
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(raw.target))
    pixels = (raw.images[order, :, :, None] * 15).astype(np.uint8)
    labels = raw.target[order].astype(np.int64)
    kept = len(labels) * 4 // 5 + 1
    train, test = Images(pixels[:kept], labels[:kept]), Images(pixels[kept:], labels[kept:])
    return DataSet("digits", train, test, tuple(map(str, range(10))))


def _from_images(name: str, root: Path) -> DataSet:
    classes = _folders(root / "train")
    if not classes:
        raise ValueError(f"{root / 'train'} must have one folder for each class")
    if empty := [name for name in classes if not _files(root / "train" / name)]:
        raise ValueError(f"every class must have images under {root / 'train'}; none in {', '.join(empty)}")
    return DataSet(name, _read_pictures(root / "train", classes), _read_pictures(root / "test", classes), classes)


def _read_pictures(root: Path, classes: list[str]) -> Images:
    unknown = [name for name in _folders(root) if name not in classes]
    if unknown:
        raise ValueError(f"{root} has classes that train does not have: {', '.join(unknown)}")
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, each in enumerate(classes):
        for path in _files(root / each):
            array = _picture(path)
            if array.shape[0] != array.shape[1] or (pixels and array.shape != pixels[0].shape):
                others = f", after {pixels[0].shape[:2]} in others" if pixels else ""
                raise ValueError(f"images must be square and of one size, got {array.shape[:2]} in {path}{others}")
            pixels.append(array)
            labels.append(label)
    if not pixels:
        raise ValueError(f"no images under {root}")
    return Images(np.stack(pixels), np.asarray(labels, dtype=np.int64))


def _folders(root: Path) -> list[str]:
    """Names of the classes; hidden folders are left out."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(root: Path) -> list[Path]:
    """The images of a class, also in subfolders; none if it has no folder."""
    images = (path for path in root.rglob("*") if path.suffix.lower() in _PICTURES and not path.is_dir())
    return sorted(path for path in images if not any(part.startswith(".") for part in path.relative_to(root).parts))


def _picture(path: Path) -> NDArray[np.uint8]:
    """An image as (H, W, 3); transparency is dropped."""
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(path) as picture:
            warnings.simplefilter("ignore")  # about transparency and large images
            if picture.mode.startswith(("I", "F")):  # more than eight bits, or no fixed range
                raise ValueError(f"it must have 8 bits per channel, got the mode {picture.mode}")
            return np.asarray(picture.convert("RGB"))
    except Exception as error:  # damaged files raise many kinds of errors
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


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
    raw = _sklearn_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = (images[order] - images.mean()) / images.std(), labels[order]
    kept = len(labels) - round(0.2 * len(labels))
    return Split(images[:kept], labels[:kept]), Split(images[kept:], labels[kept:])


def _sklearn_digits() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()

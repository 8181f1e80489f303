"""A whole data set on the device: batches are cropped, flipped and normalized there by one gather."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steradian.lab.data.sources import DataSet
from steradian.lab.registry import AUGMENT

__all__ = ["Resident"]


class Resident:
    """Training, validation and test images on one device, as uint8.

    The share `validation` of the training images is held out, the same ones for every seed. An image can be cropped and
    flipped in `views` ways; `spans` are the places of validation and test images among those that are held out.
    """

    def __init__(self, data: DataSet, device: torch.device | str = "cpu", *, validation: float = 0.05) -> None:
        self.pad, self.flip = AUGMENT.get(data.name, (4, True))
        self.name, self.device, self.fingerprint = data.name, torch.device(device), data.fingerprint()
        self.size, self.channels, self.classes = data.train.size, data.train.channels, len(data.classes)
        train, test = data.train, data.test
        if len(train) < 2 or not len(test):
            needed = "2 training images, one of them for validation, and a test image"
            raise ValueError(f"{data.name} must have {needed}, got {len(train)} and {len(test)}")
        order = np.random.Generator(np.random.Philox(key=0)).permutation(len(train))
        count = min(max(1, round(validation * len(order))), len(order) - 1)
        held, kept = np.sort(order[:count]), np.sort(order[count:])
        self.counts = {"train": len(kept), "validation": len(held), "test": len(test)}
        self.spans = {"validation": (0, len(held)), "test": (len(held), len(held) + len(test))}
        pixels, room = train.pixels[kept], (self.pad, self.pad)
        padded = np.pad(pixels, ((0, 0), room, room, (0, 0)))  # black, as in random crops of image files
        self.train_pixels = torch.from_numpy(padded).flatten(1).to(self.device)
        self.train_labels = torch.from_numpy(train.labels[kept]).to(self.device)
        held_pixels = np.concatenate([train.pixels[held], test.pixels])
        self.held_pixels = torch.from_numpy(held_pixels).flatten(1).to(self.device)
        self.held_labels = torch.from_numpy(np.concatenate([train.labels[held], test.labels])).to(self.device)
        # Mean and spread of each channel, from its histogram: no copy of the images in floating point.
        counts = np.stack([np.bincount(pixels[..., c].reshape(-1), minlength=256) for c in range(self.channels)])
        share, values = counts / counts.sum(axis=1, keepdims=True), np.arange(256)
        mean = share @ values
        spread = np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1))
        self.mean = torch.tensor(mean, dtype=torch.float32, device=self.device)
        self.scale = torch.tensor(1 / np.maximum(spread, 1e-6), dtype=torch.float32, device=self.device)
        # For each view, where its pixels lie in a padded image, (views, S·S·C).
        wide = self.size + 2 * self.pad
        places = np.arange(wide * wide * self.channels).reshape(wide, wide, self.channels)
        views = np.lib.stride_tricks.sliding_window_view(places, (self.size, self.size), axis=(0, 1))
        views = views.transpose(0, 1, 3, 4, 2)  # (down, right, S, S, C)
        if self.flip:
            views = np.stack([views, views[:, :, :, ::-1]], axis=2)
        self.windows = torch.from_numpy(views.reshape(-1, self.size**2 * self.channels).copy()).to(self.device)
        self.views = len(self.windows)

    def plan(self, seed: int, epoch: int, batch: int) -> NDArray[np.int64]:
        """The images of every batch of an epoch and their views, as codes image·views + view, (steps, batch).

        They depend on seed and epoch alone, the keys of Philox. Images that do not fill a batch are left out.
        """
        random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        steps = self.counts["train"] // batch
        order = random.permutation(self.counts["train"])[: steps * batch]
        codes = order * self.views + random.integers(self.views, size=steps * batch)
        return codes.reshape(steps, batch).astype(np.int64)

    def batch(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, S, S), channels last in memory, and labels (B,), of one line of a plan."""
        image, view = codes // self.views, codes % self.views
        index = image[:, None] * self.train_pixels.shape[1] + self.windows[view]
        return self._normalized(self.train_pixels.view(-1)[index]), self.train_labels[image]

    def chunk(self, start: Tensor, end: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Validation or test images from `start`, without augmentation, labels, and which of them lie before `end`."""
        at = start + torch.arange(length, device=self.device)
        inside = at < end
        at = torch.minimum(at, end - 1)
        return self._normalized(self.held_pixels[at]), self.held_labels[at], inside

    def _normalized(self, pixels: Tensor) -> Tensor:
        images = pixels.unflatten(1, (self.size, self.size, self.channels))
        return ((images.to(torch.float32) - self.mean) * self.scale).permute(0, 3, 1, 2)

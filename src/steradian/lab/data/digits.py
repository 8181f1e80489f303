"""The digits as normalized tensors, for the demo."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Split", "digits"]


@dataclass(frozen=True, eq=False)
class Split:
    """Images (N, C, H, W) and labels (N,) of one split."""

    images: Tensor
    labels: Tensor


def digits(*, test_share: float = 0.2, seed: int = 0) -> tuple[Split, Split]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels as (train, test), centred and scaled to unit spread.

    >>> train, test = digits()
    >>> train.images.shape, test.labels.shape
    (torch.Size([1438, 1, 8, 8]), torch.Size([359]))
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'steradian[lab]'") from error
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = (images[order] - images.mean()) / images.std(), labels[order]
    kept = len(labels) - round(test_share * len(labels))
    return Split(images[:kept], labels[:kept]), Split(images[kept:], labels[kept:])

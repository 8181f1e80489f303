"""Gradients set to zero: one launch for all of one kind."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["zero"]


def zero(gradients: Iterable[Tensor]) -> None:
    """Set gradients to zero where they lie, cut off from the graph that made them.

    >>> gradient = torch.ones(3)
    >>> zero([gradient])
    >>> gradient.tolist()
    [0.0, 0.0, 0.0]
    """
    kinds: dict[tuple[object, ...], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.grad_fn is not None:
            gradient.detach_()
        elif gradient.requires_grad:
            gradient.requires_grad_(False)
        if gradient.layout != torch.strided:
            gradient.zero_()
        else:
            # Sharded tensors and others are not taken together.
            kinds.setdefault((type(gradient), gradient.device, gradient.dtype), []).append(gradient)
    for alike in kinds.values():
        torch._foreach_zero_(alike)

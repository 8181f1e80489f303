"""Random points of parameter space at which invariance is tested.

Radial invariance holds everywhere or not at all, so a probe may stand anywhere; it must not stand at a special
point. A bias of zeros has ⟨∇L, b⟩ = 0 for no deeper reason, a gain of zeros hides the branch behind it, a row
with one nonzero entry cannot show two terms that cancel. So every parameter is moved off such places.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["Factors", "Point", "is_matrix", "random_point", "scale"]

Point = dict[str, Tensor]
Factors = dict[str, float | Tensor]
Generator = Callable[[torch.device], torch.Generator]

_SPREAD = 0.5


def is_matrix(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether more than one dimension has a length: a weight, not a gain, a bias or a token.

    >>> is_matrix((8, 3)), is_matrix((8, 1, 1)), is_matrix(())
    (True, False, False)
    """
    return sum(size > 1 for size in shape) >= 2


def random_point(own: Mapping[str, Tensor], generator: Generator) -> Point:
    """A point near the model's own, with entries of ordinary size and no exact zeros."""
    return {name: _move(tensor, generator(tensor.device)) for name, tensor in own.items()}


def _move(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(_move(torch.view_as_real(tensor), generator))
    if tensor.numel() == 0:
        return tensor.clone()
    # Uniform numbers in float32: any spread will do, and they are drawn for every parameter of the model.
    dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    noise = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    noise = noise.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator).to(tensor.dtype)
    size = tensor.square().mean().sqrt()
    if is_matrix(tensor.shape):
        least = 1 / math.sqrt(tensor.numel() / tensor.shape[0])
        lift = torch.where(size > 0, (least / size).clamp(min=1, max=1e30), torch.zeros_like(size))
        return (tensor * lift + torch.clamp(size, min=least) * noise) / math.sqrt(2)
    least = 0.1 if bool(size > 0) else 0.5
    lifted = tensor * (least / size).clamp(min=1, max=1e30) if bool(size > 0) else tensor
    if bool((tensor <= 0).any()):
        # A bias: it must not keep a unit of ReLU dead at every point.
        return lifted + size.clamp(min=least) * noise
    # Positive all over, so it may stand under a root or a logarithm: it stays positive.
    return lifted * (1 + _SPREAD * torch.tanh(noise))


def scale(point: Mapping[str, Tensor], factors: Mapping[str, float | Tensor]) -> Point:
    """The point with some parameters multiplied; a factor broadcasts against its parameter."""
    return {name: tensor * factors[name] if name in factors else tensor for name, tensor in point.items()}

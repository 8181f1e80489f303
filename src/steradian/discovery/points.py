"""Random points of parameter space at which invariance is tested.

Radial invariance holds everywhere or not at all, so a probe may stand anywhere; it must not stand at a special
point. A bias of zeros has ⟨∇L, b⟩ = 0 for no deeper reason, a gain of zeros hides the branch behind it, a row
with one nonzero entry cannot show two terms that cancel. So every parameter is moved off such places.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["Factors", "Noise", "Point", "chunks", "is_matrix", "is_one_filter"]

Factors = Mapping[str, float | Tensor]

_SPREAD = 0.5
_CHUNK_CPU, _CHUNK_GPU = 2**17, 2**23


class Noise:
    """One generator per device, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, device: torch.device) -> torch.Generator:
        """The generator of a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(self.seed)
        return self._generators[device]


@dataclass(frozen=True)
class Point:
    """A point by its recipe: it is made anew, one parameter at a time, wherever it is needed.

    A model may take half of the device's memory, and a survey remembers several points of it.

    Attributes:
        parameters: the model's own.
        seed: of the noise that trainable parameters are moved by; None leaves them where they are.
        factors: what each parameter is multiplied by afterwards, broadcasting against it.
    """

    parameters: Mapping[str, Tensor]
    seed: int | None = None
    factors: Mapping[str, Sequence[float | Tensor]] = field(default_factory=dict)

    def scaled(self, *factors: Factors) -> "Point":
        """The point with some parameters multiplied."""
        merged = {name: list(of_name) for name, of_name in self.factors.items()}
        for more in factors:
            for name, factor in more.items():
                merged.setdefault(name, []).append(factor)
        return replace(self, factors=merged)

    @torch.no_grad()
    def write(self, leaves: Mapping[str, Tensor]) -> None:
        """Bring the leaves to this point."""
        noise = Noise(self.seed) if self.seed is not None else None
        for name, parameter in self.parameters.items():
            leaf = leaves[name]
            leaf.copy_(parameter)
            if noise is not None and parameter.requires_grad and leaf.numel():
                _move(torch.view_as_real(leaf) if leaf.is_complex() else leaf, noise(leaf.device))
            for factor in self.factors.get(name, ()):
                leaf.mul_(factor)


def is_matrix(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether more than one dimension has a length: a weight, not a gain, a bias or a token.

    >>> is_matrix((8, 3)), is_matrix((8, 1, 1)), is_matrix(())
    (True, False, False)
    """
    return sum(size > 1 for size in shape) >= 2


def is_one_filter(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether all numbers lie along dimension 1, as those of a layer with one output do.

    >>> is_one_filter((1, 8)), is_one_filter((1, 8, 1, 1)), is_one_filter((1, 1, 8)), is_one_filter((8, 1))
    (True, True, False, False)
    """
    return len(shape) > 1 and shape[1] == math.prod(shape) > 1


def chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor in slices along dimension 0 that fit into the caches of a CPU, or are no burden to a GPU."""
    most = _CHUNK_GPU if tensor.is_cuda else _CHUNK_CPU
    if tensor.ndim == 0 or tensor.numel() <= most:
        return (tensor,)
    return tensor.split(max(1, most * tensor.shape[0] // tensor.numel()))


def _move(tensor: Tensor, generator: torch.Generator) -> None:
    """Move a tensor to near where it was, with entries of ordinary size and no exact zeros.

    Nothing here asks a tensor for its value: on a GPU that would wait for it, once per parameter and point.
    """
    size = torch.linalg.vector_norm(tensor) / math.sqrt(tensor.numel())
    if is_matrix(tensor.shape):
        least = 1 / math.sqrt(tensor.numel() / tensor.shape[0])
        lift = (least / size).clamp(min=1, max=1e30) * (size > 0) / math.sqrt(2)
        spread = size.clamp(min=least) / math.sqrt(2)
        for part in chunks(tensor):
            part.mul_(lift).add_(_uniform(part, generator).mul_(spread))
        return
    noise = _uniform(tensor, generator)
    smallest = 0.5 - 0.4 * (size > 0)
    lifted = tensor * (smallest / size).clamp(min=1, max=1e30)
    # Positive all over, it may stand under a root or a logarithm: it stays positive. Otherwise it is a bias, which
    # must not keep a unit of ReLU dead at every point.
    positive = lifted * (1 + _SPREAD * torch.tanh(noise))
    tensor.copy_(torch.where((tensor > 0).all(), positive, lifted + size.clamp(min=smallest) * noise))


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers of variance 1, drawn in float32: any spread will do, and every parameter needs them."""
    dtype = torch.float32 if like.dtype == torch.float64 else like.dtype
    noise = torch.empty(like.shape, dtype=dtype, device=like.device)
    return noise.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator).to(like.dtype)

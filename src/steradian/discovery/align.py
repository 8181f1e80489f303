"""How the parameters of a joint set lie beside each other: which slice of one belongs to which of another.

A bias has an entry for each output of its weight, and the outputs lie along dimension 0 of a convolution, along
dimension 1 of a transposed one, and along g blocks of dimension 0 times dimension 1 of one with g groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .tables import Key, Table

__all__ = ["Alignment", "alignments", "pairs_to_align"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Alignment:
    """Slices of the members of a set, one for each output.

    Attributes:
        slices: how many.
        dim: the dimension of the larger members that they lie along; vectors have only one.
        groups: blocks of dimension 0 that they lie along too.
    """

    slices: int
    dim: int
    groups: int = 1

    def table(self, tables: Mapping[Key, Table], shape: Shape) -> Table | None:
        """The sums of one member per slice; None where the table that it needs was not made."""
        key = (0,) if len(shape) == 1 else (self.dim,) if self.groups == 1 else (0, self.dim)
        table = tables.get(key)
        if table is None or self.groups == 1 or len(shape) == 1:
            return table
        return table.unflatten(1, (self.groups, -1)).sum(2).flatten(1)

    def join(self, tables: Sequence[Mapping[Key, Table]], shapes: Sequence[Shape]) -> dict[Key, Table]:
        """The tables of all members as of one tensor whose dimension 0 are the slices."""
        parts = [self.table(of_member, shape) for of_member, shape in zip(tables, shapes, strict=True)]
        joined: dict[Key, Table] = {(): torch.stack([of_member[()] for of_member in tables]).sum(0)}
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            joined[0,] = torch.stack(known).sum(0)
        return joined

    def cut(self, blocks: int, shape: Shape) -> tuple[int, ...] | None:
        """Blocks along each dimension of a member, for the slices in so many equal blocks; None if there is no cut."""
        if len(shape) == 1:
            return (blocks,)
        counts = [1] * len(shape)
        if self.groups == 1:
            counts[self.dim] = blocks
        elif blocks <= self.groups:
            counts[0] = blocks
        elif blocks % self.groups:
            return None
        else:
            counts[0], counts[self.dim] = self.groups, blocks // self.groups
        return tuple(counts)


def alignments(shapes: Sequence[Shape]) -> list[Alignment]:
    """The ways in which parameters of these shapes may lie beside each other.

    >>> alignments([(8, 3), (8,)]), alignments([(4, 6, 3, 3), (6,)])
    ([Alignment(slices=8, dim=0, groups=1)], [Alignment(slices=6, dim=1, groups=1)])
    >>> alignments([(4, 3, 5, 5), (6,)])
    [Alignment(slices=6, dim=1, groups=2)]
    >>> pairs_to_align({"expand.weight": (12, 3, 1, 1), "expand.bias": (12,)})
    {}
    """
    tensors, vectors = [s for s in shapes if len(s) > 1], {s for s in shapes if len(s) == 1}
    if not tensors or len(vectors) > 1 or any(not s for s in shapes):
        return []
    found = []
    for dim in range(min(map(len, tensors))):
        size = tensors[0][dim]
        if all(s[dim] == size for s in tensors) and all(v == (size,) for v in vectors):
            found.append(Alignment(size, dim))
    for (length,) in vectors:
        groups = length // tensors[0][1]
        if groups > 1 and all(_grouped(s, length, groups) for s in tensors):
            found.append(Alignment(length, 1, groups))
    return found


def _grouped(shape: Shape, length: int, groups: int) -> bool:
    """Whether a weight may be that of a transposed convolution with groups.

    Convolutions alone have groups. A table of both dimensions of a matrix would be larger than the matrix, and so would
    be that of a 1 × 1 convolution, which has an entry of the vector for each slice of dimension 0 already.
    """
    if len(shape) < 3 or (math.prod(shape[2:]) == 1 and shape[0] == length):
        return False
    return shape[1] * groups == length and shape[0] % groups == 0


def pairs_to_align(shapes: Mapping[str, Shape]) -> dict[str, list[Key]]:
    """Tables that grouped slices need, by parameter: of weights beside a vector of the same module."""
    vectors: dict[str, set[Shape]] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            vectors.setdefault(name.rpartition(".")[0], set()).add(shape)
    return {
        name: [(0, 1)]
        for name, shape in shapes.items()
        if len(shape) > 1 and all(shape)
        if any(a.groups > 1 for s in vectors.get(name.rpartition(".")[0], ()) for a in alignments([shape, s]))
    }

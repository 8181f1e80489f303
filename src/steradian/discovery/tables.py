"""Sums of g·x and its companions over the slices of a parameter: all that a probe keeps of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .points import chunks

__all__ = ["Key", "Table", "tabulate", "to_host"]

Key = tuple[int, ...]
"""Dimensions of a parameter, in order."""
Table = Tensor
"""Sums over all dimensions but those of its key of [g·x, (g·x)², g², x²], stacked in this order."""


def tabulate(g: Tensor, x: Tensor, pairs: Sequence[Key]) -> dict[Key, Table]:
    """The tables of a parameter x with gradient g: of the whole, along each dimension, and along these pairs."""
    if g.is_complex():
        g, x = torch.view_as_real(g), torch.view_as_real(x)
    g, x = g.double(), x.double()
    keys: list[Key] = [(), *((i,) for i in range(x.ndim) if x.shape[i] > 1), *pairs]
    split = chunks(x)
    # One room for the terms of all chunks: fresh memory costs more than the arithmetic.
    terms = torch.empty(4, *split[0].shape, dtype=torch.float64, device=x.device)
    parts = [_chunk_tables(*chunk, terms, keys) for chunk in zip(chunks(g), split, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return {
        key: torch.cat([p[key] for p in parts], dim=1) if 0 in key else torch.stack([p[key] for p in parts]).sum(0)
        for key in keys
    }


def _chunk_tables(g: Tensor, x: Tensor, room: Tensor, keys: Sequence[Key]) -> dict[Key, Table]:
    """Each sum from the smallest partial sum that has the dimensions of its key.

    Passes over the whole tensor are what costs: one over the dimensions behind the first two, which lie together
    in memory, and one over the first two.
    """
    terms = room[:, : x.shape[0]] if x.ndim else room
    torch.mul(g, x, out=terms[0])
    for term, factor in zip(terms[1:], (terms[0], g, x), strict=True):
        torch.mul(factor, factor, out=term)
    outer = terms.flatten(3).sum(3) if x.ndim > 2 else terms
    inner = terms.flatten(1, 2).sum(1) if x.ndim > 2 else None

    def sum_to(key: Key) -> Table:
        source, first = terms, 0
        if all(i < 2 for i in key):
            source = outer
        elif inner is not None and all(i >= 2 for i in key):
            source, first = inner, 2
        others = [i + 1 for i in range(source.ndim - 1) if i + first not in key]
        return source.sum(others) if others else source.clone()

    return {key: sum_to(key) for key in keys}


def to_host(tables: dict[str, dict[Key, Table]]) -> dict[str, dict[Key, Table]]:
    """The same tables in the host's memory, moved in one piece per device: a GPU is waited for once, not per table."""
    places = [(name, key) for name, of_name in tables.items() for key in of_name]
    moved: dict[tuple[str, Key], Table] = {}
    for device in {tables[name][key].device for name, key in places}:
        here = [(name, key) for name, key in places if tables[name][key].device == device]
        shapes = [tables[name][key].shape for name, key in here]
        flat = torch.cat([tables[name][key].flatten() for name, key in here]).cpu()
        parts = flat.split([shape.numel() for shape in shapes])
        moved |= {place: part.reshape(shape) for place, part, shape in zip(here, parts, shapes, strict=True)}
    return {name: {key: moved[name, key] for key in of_name} for name, of_name in tables.items()}

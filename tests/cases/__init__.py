"""Models with hand-labelled rows, by subject. `find_groups` must get all of `CASES` right."""

from cases import (
    attention,
    blocks,
    calls,
    convolutions,
    linear,
    sequences,
    sharing,
    transposed,
    traps,
    weights,
    written_out,
)
from cases._case import Case

__all__ = ["CASES", "Case"]

CASES: list[Case] = [
    *convolutions.CASES,
    *transposed.CASES,
    *blocks.CASES,
    *linear.CASES,
    *sequences.CASES,
    *attention.CASES,
    *weights.CASES,
    *sharing.CASES,
    *calls.CASES,
    *traps.CASES,
    *written_out.CASES,
]

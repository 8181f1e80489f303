"""Which source an optimizer's rows have: told where it tells, else read from its state, else seen from outside."""

import importlib.util
from collections.abc import Sequence

from torch.optim import Optimizer

from steradian.groups import Layout
from steradian.optim._base import RowOptimizer
from steradian.scheme import UnreadableOptimizerError, reader_of
from steradian.watching._followed import Followed
from steradian.watching._seen import Seen
from steradian.watching._source import Source
from steradian.watching._told import Told

__all__ = ["source_of"]


def source_of(optimizer: Optimizer, followed: Sequence[Followed], *, phenomena: bool | None) -> Source:
    """The source for these rows of this optimizer: told where it tells, else read, else seen from outside.

    Args:
        optimizer: the optimizer.
        followed: rows on one device, in the order of their places.
        phenomena: measure (b1), (b2) and (c) too; None: where the weights are looked at in every step anyway.
    """
    if isinstance(optimizer, RowOptimizer) and not phenomena and all(_tells(entry) for entry in followed):
        return Told(optimizer, followed)
    try:
        reader = reader_of(optimizer)
    except UnreadableOptimizerError as error:
        return Seen(optimizer, followed, reader=None, why=str(error))
    if not phenomena and sweeps(optimizer, followed):
        from steradian.watching._sweep import Swept

        return Swept(optimizer, followed)
    return Seen(optimizer, followed, reader=reader, phenomena=bool(phenomena))


def sweeps(optimizer: Optimizer, followed: Sequence[Followed]) -> bool:
    """Whether a GPU can read these rows in one launch."""
    if followed[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from steradian.optim._fused import works
    from steradian.watching._sweep import can_sweep

    return works(followed[0].device) and can_sweep(optimizer, followed)


def _tells(entry: Followed) -> bool:
    """Whether the optimizer knows these rows as such, so that its telemetry holds them."""
    told = entry.options
    joint = bool(told.get("joint"))
    together = len(told["params"]) if joint else 1
    return told.get("rows") is not None and Layout(told["rows"]) == entry.layout and len(entry.params) == together

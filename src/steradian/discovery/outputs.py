"""How far the outputs of two passes are from each other."""

import torch
from torch import Tensor

__all__ = ["difference", "spread_of"]


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """How far the outputs moved, relative to the spread of each."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    return max((_relative(a, b) for a, b in zip(before, after, strict=True)), default=float("inf"))


def _relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ over the spread of a; entries that are infinite in both, such as masked logits, do not count."""
    finite = torch.isfinite(a)
    if not bool((finite == torch.isfinite(b)).all()):
        return float("inf")
    if a.numel() == 0 or not bool(finite.any()):
        return 0.0
    a, b = a[finite], b[finite]
    spread, moved = spread_of(a), _norm(a - b)
    return moved / spread if spread else moved


def spread_of(a: Tensor) -> float:
    """‖a − its mean‖, or ‖a‖ where all entries are the same."""
    if a.numel() == 0:
        return 0.0
    spread = _norm(a - a.mean())
    return spread if spread > 1e-9 * float(a.abs().max()) else _norm(a)


def _norm(a: Tensor) -> float:
    return float(a.abs().square().sum().sqrt())

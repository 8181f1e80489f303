"""How far a row is from invariance, and whether a normalization's ε is the reason: that falls as the row grows."""

import torch
from torch import Tensor

__all__ = ["GROWTH", "MANY", "fades", "falls", "imbalance", "obeys", "signed_imbalance"]

MANY = 8
"""Rows that must agree to exclude chance."""
GROWTH = (32.0, 1024.0)
"""Factors by which candidates grow."""
_PACE = (GROWTH[0] / GROWTH[1]) ** 1.5


def falls(before: Tensor, after: Tensor, settled: float) -> Tensor:
    """Whether a defect fell as one that comes from ε, with the square of the growth, or is settled anyway.

    Growing a row by ρ divides ε/σ² by ρ². What competes with the row otherwise, such as another branch added
    before the normalization, loses weight with ρ only. The line is drawn between the two, at ρ^1.5. (An ε that is
    added to σ loses weight with ρ too: `obeys` can ask for that, and only the size is left to tell it by.)

    Args:
        before: imbalances at the smaller growth.
        after: imbalances at the larger growth of the same point, with the same cotangents.
        settled: imbalance that needs no explanation.
    """
    # The median helps a row out whose defect happened to be small before.
    typical = torch.maximum(before, before.median())
    return after <= torch.clamp(typical * _PACE, min=settled)


def fades(before: Tensor, after: Tensor) -> Tensor:
    """Whether an effect ‖g ⊙ x‖, which growth leaves alone in an invariant row, falls as ε's defect does."""
    return after <= before * _PACE


def obeys(before: Tensor, after: Tensor, resolution: float, *, order: int = 2) -> Tensor:
    """Whether a defect, with its sign, is divided by the square of the growth, as ε's is to first order, in most rows.

    An activation such as GELU, which grows into ReLU, loses its defect at the same pace on the average over many
    units, but each row at its own.

    Args:
        before: Σ g·x / √Σ(g·x)² at the smaller growth.
        after: the same at the larger growth of the same point, with the same cotangents.
        resolution: largest rounding error of such a number.
        order: 1 for an ε that is added to a length and not to its square.
    """
    power = (GROWTH[1] / GROWTH[0]) ** order
    typical = torch.maximum(before.abs(), before.abs().median())
    many = before.numel() >= MANY
    # Few rows may agree by chance.
    obeying = (power * after - before).abs() <= typical / (4 if many else 16) + power * resolution
    telling, speaking = before.abs() > power * resolution, before != 0
    # Units of ReLU that change sides on the way disturb rows that are seldom active. Most rows speak for all: half of
    # those that have something to say, or nearly all where most have next to none.
    if (
        many
        and bool(telling.any())
        and (_share(obeying, telling) >= 0.5 or _share(obeying | ~telling, speaking) >= 0.9)
    ):
        return torch.ones_like(obeying)
    return obeying


def _share(rows: Tensor, among: Tensor) -> float:
    return float(rows[among].double().mean())


def imbalance(sums: Tensor, floor: float) -> Tensor:
    """|Σ g·x| / √Σ(g·x)² per block: of order 1 where nothing cancels, ε/σ² under a normalization.

    Unlike |cos(x, ∇L)| it does not shrink with the number of entries, so it separates long rows too.
    """
    return signed_imbalance(sums, floor).abs()


def signed_imbalance(sums: Tensor, floor: float) -> Tensor:
    """The same with its sign."""
    return sums[0] / (sums[1].sqrt() + floor)

"""When optimizers are equivalent on the sphere: L2 as a schedule, SGD as AdaGradG."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["adagradg_from_sgd", "exponential_schedule"]


def exponential_schedule(lr: float, weight_decay: float) -> Callable[[int], float]:
    """The rate at step k = 0, 1, … of SGD's L2-free twin: η_k = η(1−ηλ)^{−2k−1} (App. C.1.4).

    SGD with rate η and L2 λ moves the directions exactly as SGD without L2 and with this rate.

    Args:
        lr: η of the run with L2.
        weight_decay: its λ, with ηλ < 1.

    >>> schedule = exponential_schedule(0.1, 1e-2)
    >>> round(schedule(0), 7), round(schedule(1000), 4)
    (0.1001001, 0.7404)
    """
    _kept(lr, weight_decay)
    # exp and log1p keep the digits of a small ηλ over many steps.
    growth = -math.log1p(-lr * weight_decay)
    return lambda k: lr * math.exp((2 * k + 1) * growth)


def adagradg_from_sgd(lr: float, weight_decay: float, radius: float | Tensor) -> dict[str, float | Tensor]:
    """AdaGradG's constants from SGD's: β = (1−ηλ)⁴, rate (2β)^{−1/2}, v_0 = r_0⁴/(2η²β^{1/2}) (Theorem 4).

    Args:
        lr: SGD's rate η.
        weight_decay: SGD's L2 coefficient λ, with ηλ < 1.
        radius: r_0 of each row; v_0 has its shape.

    >>> constants = adagradg_from_sgd(1e-2, 1e-3, torch.tensor([1.0, 2.0]))
    >>> round(constants["lr"], 4), round(constants["beta"], 5), constants["v0"].round().tolist()
    (0.7071, 0.99996, [5000.0, 80002.0])
    """
    beta = _kept(lr, weight_decay) ** 4
    if not bool((torch.as_tensor(radius) > 0).all()):
        raise ValueError("radius must be positive: a row without a radius has no equivalent on the sphere")
    return {"lr": (2 * beta) ** -0.5, "beta": beta, "v0": radius**4 / (2 * lr**2 * beta**0.5)}


def _kept(lr: float, weight_decay: float) -> float:
    """1 − ηλ, checked."""
    if lr <= 0 or weight_decay < 0 or lr * weight_decay >= 1:
        right = "lr must be positive, weight_decay not negative and lr·weight_decay below 1"
        raise ValueError(f"{right}, got {lr} and {weight_decay}")
    return 1 - lr * weight_decay

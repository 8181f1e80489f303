"""Optimizers that step on the sphere: plain `torch.optim.Optimizer`s that know which rows are radial."""

from steradian.optim import readers  # noqa: F401  # makes them readable for scheme.read_step
from steradian.optim.adagradg import AdaGradG
from steradian.optim.adam import Adam, AdamS, AdamSRT
from steradian.optim.adamg import AdamG
from steradian.optim.adamp import AdamP
from steradian.optim.angular import Angular
from steradian.optim.base import RowOptimizer
from steradian.optim.sgd import SGD
from steradian.optim.telemetry import TELEMETRY, Telemetry

__all__ = ["SGD", "TELEMETRY", "AdaGradG", "Adam", "AdamG", "AdamP", "AdamS", "AdamSRT", "Angular", "RowOptimizer"]
__all__ += ["Telemetry"]

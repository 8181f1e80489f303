"""The methods of the paper's experiments as optimizers: variants on the rows, the plain method on the rest."""

from typing import Any

import torch
from torch.optim import Optimizer

from steradian import optim
from steradian.groups import Groups
from steradian.lab import compiling
from steradian.lab.config import Config
from steradian.optim.base import RowOptimizer

__all__ = ["optimizers", "set_rates"]


def optimizers(
    config: Config, groups: Groups, *, captured: bool = False, fused: bool = False, compiled: bool = False
) -> list[Optimizer]:
    """The optimizers of a training, each for its own parameters.

    Parameters without rows are trained by plain Adam with the same rate and L2 (`rest_lr` for AdamG), so that only
    what happens on the rows differs. AdaGrad is Adam without momentum; beside it and AdaGradG the rest gets SGD.

    Args:
        config: the training.
        groups: the rows of its network.
        captured: the step will be captured in a graph: rates become tensors on the device.
        fused: use the fused steps.
        compiled: compile the steps on rows that have no fused form: a few kernels per parameter instead of forty.
    """
    made = _build(config, groups, captured, fused)
    for optimizer in made:
        if compiled and isinstance(optimizer, RowOptimizer):
            optimizer.update = compiling.compiled(type(optimizer).update)  # type: ignore[method-assign]
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])
            if captured:
                group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
    return made


def set_rates(made: list[Optimizer], factor: float) -> None:
    """Set every rate to its initial value times a factor, in place where it is a tensor."""
    for optimizer in made:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor


def _build(config: Config, groups: Groups, captured: bool, fused: bool) -> list[Optimizer]:
    lr, decay = config.lr, config.weight_decay
    rest_lr = lr if config.rest_lr is None else config.rest_lr
    plain: dict[str, Any] = {"fused": True} if captured else {}
    graph: dict[str, Any] = {"capturable": captured}
    adam: dict[str, Any] = {"lr": lr, "betas": config.betas, "weight_decay": decay, **graph}
    match config.method:
        case "SGD-M":
            return [torch.optim.SGD(groups.param_groups(), lr, config.momentum, weight_decay=decay, **plain)]
        case "SGD":
            return [torch.optim.SGD(groups.param_groups(), lr, weight_decay=decay, **plain)]
        case "Adam":
            return [torch.optim.Adam(groups.param_groups(), **adam, **plain)]
        case "AdamW†":
            made = groups.param_groups()
            for group in made:
                group["decoupled_weight_decay"] = "rows" in group
            return [optim.Adam(made, **adam)]
        case "AdamG†":
            rest = 1e-3 if config.rest_lr is None else config.rest_lr
            return [
                optim.AdamG(
                    groups.param_groups(), lr, config.betas, weight_decay=decay, rest_lr=rest, capturable=captured
                )
            ]
        case "AdaGradG":
            return [optim.AdaGradG.from_sgd(groups.param_groups(), lr, decay)]
        case "AdaGrad":
            made = groups.param_groups()
            rows, rest_groups = [g for g in made if "rows" in g], [g for g in made if "rows" not in g]
            without_momentum = {**adam, "betas": (0.0, config.betas[1])}
            return [
                torch.optim.Adam(rows, **without_momentum, **plain),
                torch.optim.SGD(rest_groups, rest_lr, weight_decay=decay, **plain),
            ]
        case _:
            letters = config.method.removeprefix("Adam w/o (").removesuffix(")")
            return [optim.Adam(groups.param_groups(), **adam, without=letters, fused=fused or None)]

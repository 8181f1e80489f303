"""Steps of any optimizer, from the weights before and after."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from steradian import geometry
from steradian.image import ImageNumbers, invariance_defect, observed_step
from steradian.watching.rows import WatchedGroup, nominal_rate, stacks
from steradian.watching.sources import PHENOMENA, Quantities, Source

__all__ = ["ObservedSource"]


class ObservedSource(Source):
    """Radius, angle and velocity from two points; the gradient's norm and its defect.

    Args:
        optimizer: the optimizer.
        watched: groups on one device.
        why: the reason why the optimizer's state cannot be read.
    """

    columns = ("radius", "inward", "across", "gradient_norm", "slope", "rate")

    def __init__(self, optimizer: Optimizer, watched: Sequence[WatchedGroup], *, why: str) -> None:
        self.optimizer = optimizer
        self.stacks = stacks(watched, optimizer)
        self.missing = dict.fromkeys(("effective_lr", "direction_norm", "radial", "nu", "deformation", *PHENOMENA), why)
        # A line search leaves the gradient of another point than the one that the step started from.
        self.searches = isinstance(optimizer, LBFGS)
        if self.searches:
            self.missing |= dict.fromkeys(("defect", "gradient_norm"), "the gradient left behind is of another point")

    def open(self) -> None:
        pass

    @torch.no_grad()
    def before(self) -> None:
        for stack in self.stacks:
            stack.take(self.optimizer)

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        for stack in self.stacks:
            moved = stack.moved()
            if moved is None:
                continue
            members, points, raw = moved
            image = observed_step(points, stack.now(members), check=False)
            gradient = geometry.as_float(raw, "gradient")
            rate = torch.as_tensor(nominal_rate(members[0].settings), dtype=image.radius.dtype, device=out.device)
            columns = [
                image.radius,
                image.inward,
                image.across,
                geometry.norm(gradient).squeeze(-1),
                geometry.dot(gradient, image.direction).squeeze(-1),
                rate.reshape(()).expand(len(image.radius)),
            ]
            stack.write(members, columns, out)

    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        radius, inward, across, length, slope, rate = values.unbind(-1)
        image = ImageNumbers(radius=radius, start=radius, inward=inward, across=across, lr=1.0, scale=None)
        gradients = {} if self.searches else {"defect": invariance_defect(slope, length), "gradient_norm": length}
        return image, {**gradients, "lr": rate}

    def close(self) -> None:
        for stack in self.stacks:
            stack.release()

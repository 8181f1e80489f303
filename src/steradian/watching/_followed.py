"""Which rows of an optimizer are followed, and where each has its place among all."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.groups import Groups, Layout, is_flattened, is_sharded
from steradian.optim._optional import sharding

__all__ = ["Followed", "follow"]

Options = dict[str, Any]


@dataclass(eq=False)
class Followed:
    """The rows of one parameter, or of a joint set, that an optimizer steps.

    Attributes:
        name: the parameter's name; of a joint set, all names joined by " + ".
        names: the parameters' names.
        params: the parameters.
        layout: how each is cut.
        options: the optimizer's param group.
        rows: rows on this rank.
        size: numbers in a row.
        reason: the module that makes the rows invariant, where discovery named it.
        defect: what discovery measured.
        start: where its rows begin among all followed ones on its device; a source places them.
        gone: the optimizer does not step it any more, or not under the param group that it had.
    """

    name: str
    names: tuple[str, ...]
    params: list[Tensor]
    layout: Layout
    options: Options
    rows: int
    size: int
    reason: str = ""
    defect: float | None = None
    start: int = 0
    gone: bool = False

    @property
    def span(self) -> slice:
        """The place of its rows among all followed ones."""
        return slice(self.start, self.start + self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.params[0].device

    @property
    def active(self) -> bool:
        """Whether the step at hand has gradients for all of it."""
        return not self.gone and all(param.grad is not None for param in self.params)

    def about(self) -> dict[str, Any]:
        """What run.json says about it."""
        return {
            "name": self.name,
            "names": list(self.names),
            "layout": self.layout.spec,
            "shapes": [list(param.shape) for param in self.params],
            "rows": self.layout.size(self.params[0].shape)[0],
            "size": self.size,
            "reason": self.reason,
            "defect": self.defect,
        }

    def cut(self, tensors: Iterable[Tensor]) -> Tensor:
        """Tensors in the shapes of the parameters as (n, d) rows, of a sharded parameter those of this rank."""
        return self.layout.join([part(tensor, self.layout) for tensor in tensors])


def part(tensor: Tensor, layout: Layout) -> Tensor:
    """What a rank holds of a tensor, the whole tensor where its rows lie on several ranks."""
    if not is_sharded(tensor):
        return tensor.detach()
    return sharding().part(tensor.detach(), layout)


def follow(optimizer: Optimizer, groups: Groups | None) -> list[Followed]:
    """The rows to follow: those of `groups` that the optimizer steps, or those that its param groups name.

    Raises:
        ValueError: there are none, or they are no rows any more.
        TypeError: they do not hold real numbers.
    """
    found = _from_groups(optimizer, groups) if groups is not None else _from_options(optimizer)
    found = [followed for followed in found if followed.size and followed.layout.size(followed.params[0].shape)[0]]
    if not found:
        raise ValueError(_nothing(optimizer, groups))
    for followed in found:
        for param in followed.params:
            if not param.is_floating_point():
                raise TypeError(f"rows must hold real floating-point numbers, but {followed.name} has {param.dtype}")
        if any(map(is_flattened, followed.params)):
            raise ValueError(f"{followed.name} was made flat by FullyShardedDataParallel, where there are no rows")
        if len({param.device for param in followed.params}) > 1:
            raise ValueError(f"the joint rows of {followed.name} lie on several devices")
    return found


def _nothing(optimizer: Optimizer, groups: Groups | None) -> str:
    """Why there are no rows to follow."""
    if groups is None:
        return (
            "the optimizer's param groups say nothing of rows: pass groups=find_groups(model, inputs), or make the "
            "optimizer from groups.param_groups()"
        )
    if not groups.groups:
        return "there are no rows to follow: groups holds none, since no weight of the model is radially invariant"
    stepped = {id(param) for options in optimizer.param_groups for param in options["params"]}
    for group in groups.groups:
        here = [name for name in group.names if id(groups.params[name]) in stepped]
        if here and len(here) < len(group.names):
            return f"{' + '.join(group.names)} are rows only together, and this optimizer steps {here} alone"
    return "none of the rows in groups belongs to a parameter of this optimizer"


def _from_groups(optimizer: Optimizer, groups: Groups) -> list[Followed]:
    options = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    found = []
    for group in groups.groups:
        params = [groups.params[name] for name in group.names]
        if all(id(param) in options for param in params):
            made = _followed(group.names, params, Layout(group.layout), options[id(params[0])])
            made.reason, made.defect = group.reason, group.defect if isfinite(group.defect) else None
            found.append(made)
    return found


def _from_options(optimizer: Optimizer) -> list[Followed]:
    found = []
    taken: set[str] = set()
    for k, group in enumerate(optimizer.param_groups):
        if group.get("rows") is None:
            continue
        names = group.get("param_names") or [f"group {k}, parameter {i}" for i in range(len(group["params"]))]
        # Two models in one optimizer, such as actor and critic, may have parameters of one name.
        names = [f"{name} (group {k})" if name in taken else name for name in names]
        taken.update(names)
        layout = Layout(group["rows"])
        if group.get("joint"):
            found.append(_followed(tuple(names), list(group["params"]), layout, group))
        else:
            pairs = zip(names, group["params"], strict=True)
            found += [_followed((name,), [param], layout, group) for name, param in pairs]
    return found


def _followed(names: tuple[str, ...], params: list[Any], layout: Layout, options: Options) -> Followed:
    rows = layout.size(part(params[0], layout).shape)[0]
    size = sum(layout.size(param.shape)[1] for param in params)
    return Followed(" + ".join(names), names, params, layout, options, rows, size)

"""Which rows of an optimizer are watched: groups with their parameters, their settings and their place."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.groups import Group, Groups, Layout, is_flattened, is_sharded
from steradian.optim.state import sharding

__all__ = [
    "Membership",
    "Stack",
    "WatchedGroup",
    "declared_groups",
    "decoupled_decay",
    "dtype_of",
    "nominal_rate",
    "place",
    "stacks",
    "watched_groups",
]

Settings = dict[str, Any]
"""A param group of an optimizer."""


class WatchedGroup:
    """A group of rows that an optimizer steps.

    Args:
        group: as `find_groups` found it, or as a param group declares it.
        params: its parameters.
        settings: the param group of the first of them.

    Attributes:
        name: the parameter's name; of a joint set, all names joined by " + ".
        layout: how the parameters are cut.
        size: numbers in a row.
        n_rows: rows on this rank.
        total_rows: rows on all ranks.
        gathered: its rows span several ranks, and every rank gathers all of them.
        start: where its rows begin among all watched rows on its device; a source sets it with `place`.
        span: the places of its rows.
        gone: the optimizer no longer steps it, or no longer in the param group that it was in.
    """

    def __init__(self, group: Group, params: Sequence[Tensor], settings: Settings) -> None:
        self.group, self.params, self.settings = group, params, settings
        self.name = " + ".join(group.names)
        self.layout, self.size = Layout(group.spec), group.size
        self.device, self.dtype = params[0].device, params[0].dtype
        self.sharded = any(map(is_sharded, params))
        self.total_rows = self.layout.size(params[0].shape)[0]
        self.n_rows = self.layout.size(self.local(params[0]).shape)[0]
        self.gathered = self.sharded and self.n_rows == self.total_rows
        self.start, self.span = 0, slice(0, self.n_rows)
        self.gone = False

    def active(self) -> bool:
        """Whether all of its parameters have a gradient, so that the step moves it."""
        return not self.gone and all(param.grad is not None for param in self.params)

    def describe(self) -> dict[str, Any]:
        """Its entry in run.json."""
        return {
            "name": self.name,
            "names": list(self.group.names),
            "layout": self.layout.spec,
            "shapes": [list(param.shape) for param in self.params],
            "rows": self.total_rows,
            "size": self.size,
            "reason": self.group.reason,
            "defect": self.group.defect if math.isfinite(self.group.defect) else None,
        }

    def local(self, tensor: Tensor) -> Tensor:
        """The part on this rank of a tensor like a parameter; the whole tensor if its rows span several ranks."""
        tensor = tensor.detach()
        return sharding().part(tensor, self.layout) if self.sharded and is_sharded(tensor) else tensor

    def cut(self, tensors: Iterable[Tensor]) -> Tensor:
        """Tensors in the shapes of the parameters as (n, d) rows; of sharded parameters those of this rank."""
        return self.layout.join([self.local(tensor) for tensor in tensors])

    def gradient(self) -> Tensor:
        """The gradients as (n, d) rows; only for an active group."""
        gradients = [param.grad for param in self.params if param.grad is not None]
        return self.cut([grad.to_dense() if grad.layout != torch.strided else grad for grad in gradients])


def watched_groups(optimizer: Optimizer, groups: Groups | None) -> list[WatchedGroup]:
    """The rows to watch: those of `groups` that the optimizer steps, or those that its param groups declare.

    Raises:
        ValueError: there are none, or FSDP1 flattened them.
        TypeError: they do not hold real numbers.
    """
    if groups is None:
        found = [WatchedGroup(*declared) for declared in declared_groups(optimizer)]
    else:
        settings = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        found = [
            WatchedGroup(group, params, settings[id(params[0])])
            for group in groups.groups
            for params in [[groups.params[name] for name in group.names]]
            if all(id(param) in settings for param in params)
        ]
    found = [watched for watched in found if watched.size and watched.total_rows]
    if not found:
        raise ValueError(_why_nothing(optimizer, groups))
    for watched in found:
        for param in watched.params:
            if not param.is_floating_point():
                raise TypeError(f"rows must hold real floating-point numbers, but {watched.name} has {param.dtype}")
        if any(map(is_flattened, watched.params)):
            raise ValueError(f"{watched.name} was flattened by FullyShardedDataParallel and has no rows any more")
        if len({param.device for param in watched.params}) > 1:
            raise ValueError(f"the joint rows of {watched.name} are on several devices")
    return found


def declared_groups(
    optimizer: Optimizer, names: Mapping[int, str] | None = None
) -> Iterator[tuple[Group, list[Tensor], Settings]]:
    """The groups of rows that param groups declare under "rows" and "joint", with parameters and param group.

    Args:
        optimizer: the optimizer.
        names: names of parameters by their id; others are left out. None: the optimizer's own names, or numbers.
    """
    taken: set[str] = set()
    for k, settings in enumerate(optimizer.param_groups):
        if settings.get("rows") is None:
            continue
        params = settings["params"]
        if names is not None:
            known = [(names[id(param)], param) for param in params if id(param) in names]
        else:
            own = settings.get("param_names") or [f"group {k}, parameter {i}" for i in range(len(params))]
            # Two models in one optimizer, such as actor and critic, may have parameters of the same name.
            own = [f"{name} (group {k})" if name in taken else name for name in own]
            taken.update(own)
            known = list(zip(own, params, strict=True))
        layout = Layout(settings["rows"])
        for members in [known] if settings.get("joint") and known else [[one] for one in known]:
            sizes = [layout.size(param.shape) for _, param in members]
            together = tuple(name for name, _ in members)
            group = Group(together, layout.spec, sizes[0][0], sum(size for _, size in sizes), "", math.nan)
            yield group, [param for _, param in members], settings


def _why_nothing(optimizer: Optimizer, groups: Groups | None) -> str:
    if groups is None:
        return (
            "the optimizer's param groups declare no rows: pass groups=find_groups(model, inputs), or make the "
            "optimizer from groups.param_groups()"
        )
    if not groups.groups:
        return "there are no rows to watch: groups is empty, since no weight of the model is radially invariant"
    stepped = {id(param) for settings in optimizer.param_groups for param in settings["params"]}
    for group in groups.groups:
        here = [name for name in group.names if id(groups.params[name]) in stepped]
        if here and len(here) < len(group.names):
            return f"{' + '.join(group.names)} are rows only together, and this optimizer steps {here} alone"
    return "none of the rows in groups belongs to a parameter of this optimizer"


# Order and settings


def place(watched: Iterable[WatchedGroup], *, key: Callable[[WatchedGroup], Any]) -> list[WatchedGroup]:
    """The groups in the order in which a source writes their rows, each with its `start` set."""
    ordered, start = sorted(watched, key=key), 0
    for group in ordered:
        group.start, group.span = start, slice(start, start + group.n_rows)
        start += group.n_rows
    return ordered


def dtype_of(watched: Iterable[WatchedGroup]) -> torch.dtype:
    """The dtype of numbers per row: float64 if a parameter has it, else float32."""
    wide = any(param.dtype == torch.float64 for group in watched for param in group.params)
    return torch.float64 if wide else torch.float32


def nominal_rate(settings: Mapping[str, Any]) -> float | Tensor:
    """The rate in a param group; NaN if it has none, or if the optimizer computes its own (lr=None)."""
    rate: float | Tensor | None = settings.get("lr")
    return math.nan if rate is None else rate


def decoupled_decay(settings: Mapping[str, Any]) -> float:
    """The decoupled decay δ of a param group's rows, as in AdamW and in our optimizers."""
    decay = settings.get("weight_decay")
    if decay is None:
        return 0.0
    if "wd_ratio" in settings:
        return float(decay) * float(settings["wd_ratio"])
    return float(decay) if settings.get("decoupled_weight_decay") else 0.0


class Membership:
    """Keeps up with changes of an optimizer's param groups.

    `load_state_dict` replaces param groups: watched groups get the new settings. A group whose parameter left its param
    group is gone: it does not move any more, or moves under other settings.

    Args:
        optimizer: the optimizer.
        watched: its watched groups.
    """

    def __init__(self, optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> None:
        self.optimizer = optimizer
        self.watched = watched
        self._members = self._present()

    def _present(self) -> list[tuple[Settings, list[Tensor]]]:
        return [(group, list(group["params"])) for group in self.optimizer.param_groups]

    def changed(self) -> bool:
        """Whether param groups or their parameters are others than at the last call of `update`."""
        groups = self.optimizer.param_groups
        return len(groups) != len(self._members) or not all(
            group is known and len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, (known, params) in zip(groups, self._members, strict=True)
        )

    def update(self) -> list[str]:
        """Adopt the present param groups; returns the names of groups that are gone since the last call."""
        self._members = self._present()
        present = self.optimizer.param_groups
        owner = {id(param): settings for settings in present for param in settings["params"]}
        lost: list[str] = []
        for old in list({id(watched.settings): watched.settings for watched in self.watched}.values()):
            members = [watched for watched in self.watched if watched.settings is old]
            owners = (owner.get(id(watched.params[0])) for watched in members)
            kept = any(settings is old for settings in present)
            new = old if kept else next((settings for settings in owners if settings is not None), old)
            for watched in members:
                watched.settings = new
                # A joint set has the settings of its first parameter; the others may be in other param groups.
                first, *others = (owner.get(id(param)) for param in watched.params)
                if not watched.gone and (first is not new or any(other is None for other in others)):
                    watched.gone = True
                    lost.append(watched.name)
        return lost


# Rows of equal length


@dataclass(eq=False)
class Stack:
    """Watched groups of one row length, dtype and param group, handled as one block of rows to save launches.

    Attributes:
        members: the groups, whose places follow each other.
        points: the rows before the step, between `take` and `release`.
    """

    members: list[WatchedGroup]
    points: Tensor | None = None
    _gradients: dict[int, Tensor] = field(default_factory=dict)

    def take(self, optimizer: Optimizer) -> None:
        """Copy the rows before a step of this optimizer, and the gradients if the step overwrites them."""
        self.points = self.now(self.members)
        # With Nesterov, torch's step over lists adds the momentum to p.grad; before a closure there is no gradient.
        overwrites = self.members[0].settings.get("nesterov") and type(optimizer).__module__.startswith("torch.")
        known = [member for member in self.members if overwrites and member.active()]
        self._gradients = {id(member): member.gradient().clone() for member in known}

    def moved(self) -> tuple[list[WatchedGroup], Tensor, Tensor] | None:
        """The members that the step moved, their rows before it and their gradients; None if it moved none."""
        members = [member for member in self.members if member.active() and member.n_rows]
        if not members or self.points is None:
            return None
        points = self.part(members, self.points)
        kept = [(member, self._gradients.get(id(member))) for member in members]
        gradients = [member.gradient() if gradient is None else gradient for member, gradient in kept]
        return members, points, torch.cat(gradients)

    def now(self, members: Sequence[WatchedGroup]) -> Tensor:
        """The present rows of some members."""
        return torch.cat([member.cut(member.params) for member in members])

    def part(self, members: Sequence[WatchedGroup], rows: Tensor) -> Tensor:
        """The rows of some members out of those of all."""
        if len(members) == len(self.members):
            return rows
        return torch.cat([rows[self.place(member)] for member in members])

    def place(self, member: WatchedGroup) -> slice:
        """The place of a member's rows in the stack."""
        start = member.start - self.members[0].start
        return slice(start, start + member.n_rows)

    def write(self, members: Sequence[WatchedGroup], columns: Iterable[Tensor], out: Tensor) -> None:
        """Write numbers per row of some members to their places in `out`, and release the copies."""
        values = torch.stack([column.to(out.dtype) for column in columns], dim=1)
        if len(members) == len(self.members):
            out[self.members[0].start : self.members[-1].span.stop] = values
        else:
            for member, part in zip(members, values.split([m.n_rows for m in members]), strict=True):
                out[member.span] = part
        self.release()

    def release(self) -> None:
        """Free the copies."""
        self.points, self._gradients = None, {}


def stacks(watched: Iterable[WatchedGroup], optimizer: Optimizer) -> list[Stack]:
    """The groups in stacks, placed in this order."""
    index = {id(settings): k for k, settings in enumerate(optimizer.param_groups)}

    def kind(group: WatchedGroup) -> tuple[int, int, str]:
        return index[id(group.settings)], group.size, str(group.dtype)

    return [Stack(list(members)) for _, members in groupby(place(watched, key=kind), key=kind)]

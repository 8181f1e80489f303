"""Steps of optimizers that can be read: from the weights before the step and the state after it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import geometry
from steradian.image import ImageNumbers, ImageStep, image_of_rows, invariance_defect
from steradian.optim import RowOptimizer
from steradian.phenomena import Memory
from steradian.scheme import Reader, Step, Taken
from steradian.watching.rows import Stack, WatchedGroup, stacks
from steradian.watching.sources import PHENOMENA, UNMEASURED, Quantities, Source

__all__ = ["StateSource"]

_UNKNOWN = 1e-3
"""Phenomena are recorded once the momentum holds less than this share of gradients from before the watch.

Older gradients are turned further, so that a small share already matters.
"""
_NO_STATE = object()


class StateSource(Source):
    """The generic step that `scheme` reads, for rows of equal length together.

    Args:
        optimizer: the optimizer.
        watched: groups on one device.
        reader: reads its steps.
        phenomena: keep the sums behind (b1), (b2) and (c): five tensors of the size of the weights.
    """

    columns: tuple[str, ...] = (
        *("radius", "start", "inward", "across", "gradient_norm", "slope", "rate", "scale", "deformation"),
        *PHENOMENA,
    )

    def __init__(
        self, optimizer: Optimizer, watched: Sequence[WatchedGroup], *, reader: Reader, phenomena: bool
    ) -> None:
        self.optimizer = optimizer
        self.reader = reader
        self.stacks = stacks(watched, optimizer)
        other = next((why for why in map(_other_momentum, watched) if why), "")
        self.each_step = self.phenomena = phenomena and not other
        self.missing = {}
        if not self.phenomena:
            self.columns = self.columns[: -len(PHENOMENA)]
            self.missing = dict.fromkeys(PHENOMENA, other or UNMEASURED)
        self._memories = {id(stack): Memory(None, check=False) for stack in self.stacks}
        # By group: the optimizer's state that its memory belongs to, and the share of the momentum from before it.
        self._states: dict[int, object] = {}
        self._unknown: dict[int, float] = {}

    def open(self) -> None:
        # Steps may have been taken since the watch was stopped.
        self._states = {}

    @torch.no_grad()
    def before(self) -> None:
        if self.phenomena:
            self._forget()
        for stack in self.stacks:
            stack.take(self.optimizer)

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        for stack in self.stacks:
            if (moved := stack.moved()) is not None:
                found = self._read(stack, *moved)
                stack.write(moved[0], [found[name] for name in self.columns], out)

    def _read(self, stack: Stack, members: list[WatchedGroup], points: Tensor, raw: Tensor) -> Quantities:
        """The numbers of `columns` for the rows of some members of a stack, before the step and with its gradient."""
        ours = isinstance(self.optimizer, RowOptimizer)
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None and ours:  # torch's fused steps unscale p.grad, ours leave it as it is
            raw = raw / scale.to(raw)
        points, gradient = geometry.as_float(points, "x"), geometry.as_float(raw, "gradient")
        # Torch's optimizers are read only from the point before the step.
        step = self.reader(self._taken(members, points, stack.now(members) if ours else points, raw))
        image = image_of_rows(points, step, check=False)
        assert image.scale is not None
        found = {
            "radius": image.radius,
            "start": image.start,
            "inward": image.inward,
            "across": image.across,
            "gradient_norm": geometry.norm(gradient).squeeze(-1),
            "slope": geometry.dot(gradient, image.direction).squeeze(-1),
            "rate": _column(step.lr, image.radius),
            "scale": image.scale,
            "deformation": _deformation(image, step.a),
        }
        if self.phenomena:
            downhill = -gradient if members[0].settings.get("maximize") else gradient
            found |= self._remember(stack, members, points, downhill, step)
        return found

    def _taken(self, members: list[WatchedGroup], points: Tensor, now: Tensor, gradient: Tensor) -> Taken:
        """The rows of several parameters as one parameter, for the reader."""
        param = now.detach()
        param.grad = gradient.to(param.dtype)
        states = [[self.optimizer.state.get(param, {}) for param in member.params] for member in members]
        shape, settings = members[0].params[0].shape, members[0].settings
        per_row = getattr(self.optimizer, "row_state", ())
        joined: dict[str, Tensor] = {}
        for name, value in states[0][0].items():
            if not isinstance(value, Tensor):
                continue
            entries = [(member, [state[name] for state in each]) for member, each in zip(members, states, strict=True)]
            if name in per_row and not (value.shape == shape and "a" not in settings.get("without", "a")):
                joined[name] = torch.cat([member.local(each[0]) for member, each in entries])
            elif value.shape == shape or name in per_row:
                joined[name] = torch.cat([member.cut(each) for member, each in entries])
            elif value.numel() == 1:
                joined[name] = _count([(each[0], member.n_rows) for member, each in entries])
        return Taken(param, {**settings, "rows": "filter", "joint": False}, joined, points)

    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        known = dict(zip(self.columns, values.unbind(-1), strict=True))
        image = ImageNumbers(
            radius=known["radius"],
            start=known["start"],
            inward=known["inward"],
            across=known["across"],
            lr=known["rate"],
            scale=known["scale"],
        )
        return image, {
            **{name: known[name] for name in ("deformation", *PHENOMENA) if name in known},
            "defect": invariance_defect(known["slope"], known["gradient_norm"]),
            "gradient_norm": known["gradient_norm"],
            "lr": known["rate"],
        }

    def close(self) -> None:
        for stack in self.stacks:
            stack.release()

    # Phenomena (b1), (b2) and (c)

    def _forget(self) -> None:
        """Clear the memory of groups whose momentum was loaded, or accumulated before the watch started."""
        for stack in self.stacks:
            for member in stack.members:
                state = self.optimizer.state.get(member.params[0])
                if self._states.get(id(member), _NO_STATE) is not state:
                    self._states[id(member)] = state
                    self._unknown[id(member)] = 1.0 if state else 0.0
                    for rows in self._memories[id(stack)].state().values():
                        rows[stack.place(member)] = 0

    def _remember(
        self,
        stack: Stack,
        members: list[WatchedGroup],
        points: Tensor,
        gradient: Tensor,
        step: Step,
    ) -> Quantities:
        """Update the memory of some members; the angle by which each phenomenon turns their direction."""
        memory = self._memories[id(stack)]
        own = memory if len(members) == len(stack.members) else Memory(None, check=False)
        if own is not memory:
            own.load({name: stack.part(members, rows) for name, rows in memory.state().items()})
        own.update(points, gradient, beta=step.beta, skip=getattr(self.optimizer, "found_inf", None))
        if own is not memory:
            _write_back(stack, members, own, memory)
        effects = own.phenomena(step)
        found = {name: getattr(effects, name).angle for name in PHENOMENA}
        start = 0
        for member in members:
            self._states[id(member)] = self.optimizer.state.get(member.params[0])
            if self._unknown[id(member)]:
                self._unknown[id(member)] *= float(step.beta)
                if self._unknown[id(member)] > _UNKNOWN:
                    for angle in found.values():
                        angle[start : start + member.n_rows] = math.nan
            start += member.n_rows
        return found


def _write_back(stack: Stack, members: Sequence[WatchedGroup], some: Memory, memory: Memory) -> None:
    """Write the memory of some members into that of the stack."""
    state = some.state()
    if not memory.state():
        count = sum(member.n_rows for member in stack.members)
        memory.load({name: rows.new_zeros(count, rows.shape[1]) for name, rows in state.items()})
    for name, all_rows in memory.state().items():
        for member, rows in zip(members, state[name].split([m.n_rows for m in members]), strict=True):
            all_rows[stack.place(member)] = rows


def _deformation(image: ImageStep, a: Tensor) -> Tensor:
    """(a): the angle between c^⊥, along (a ⊘ b)^⊥, and a^⊥ (Section 4.1), with few passes over the rows.

    With e the unit vector of the former it is atan2 of the parts of a^⊥ orthogonal to e and along e.
    """
    length = image.across
    rest = a - geometry.dot(a, image.direction) * image.direction
    share = geometry.dot(rest, image.tangential) / length.masked_fill(length == 0, 1).square().unsqueeze(-1)
    rest = rest.addcmul_(share, image.tangential, value=-1)
    angle = torch.atan2(geometry.norm(rest).squeeze(-1), share.squeeze(-1) * length)
    return angle.masked_fill(length == 0, 0)


def _other_momentum(watched: WatchedGroup) -> str:
    """Why (b1), (b2) and (c) are not defined for this momentum; empty if they are."""
    settings = watched.settings
    if settings.get("nesterov") or (settings.get("momentum") and settings.get("dampening")):
        return "its momentum does not weight past gradients by β^(k−i) (Nesterov, dampening)"
    if settings.get("rows") is not None and set(settings.get("without", "")) & set("bc"):
        return "this optimizer's momentum moves with its rows, which neutralizes it"
    return ""


def _count(counts: list[tuple[Tensor, int]]) -> Tensor:
    """One step count if all groups have the same as far as the host knows, otherwise one per row, (n, 1)."""
    first = counts[0][0]
    if all(count.device.type == "cpu" for count, _ in counts) and len({count.item() for count, _ in counts}) == 1:
        return first.reshape(())
    return torch.cat([count.reshape(1, 1).expand(n, 1) for count, n in counts])


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    """A rate, or one per row, as one number for each row."""
    if isinstance(value, Tensor):
        return value.to(like).reshape(-1).expand(like.shape[0]) if value.numel() == 1 else value.to(like).reshape(-1)
    return torch.full_like(like, value)

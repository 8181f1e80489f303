"""Any optimizer's steps as the weights before and after show them, and as its state is read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import geometry
from steradian.image import ImageStep, image_step, observed_step
from steradian.optim._base import RowOptimizer
from steradian.phenomena import Memory
from steradian.scheme import Reader, Step, Taken
from steradian.watching._followed import Followed, part
from steradian.watching._source import PHENOMENA, UNMEASURED, Quantities, Source, nominal, of_image, placed

__all__ = ["Seen"]

# Of past gradients that the momentum holds and nobody saw; older ones are turned further, so little is too much.
_UNSEEN = 1e-3
_NO_STATE = object()


@dataclass(eq=False)
class Batch:
    """Followed rows of one length and one param group: looked at together, since launches cost more than rows."""

    members: list[Followed]
    points: Tensor | None = None
    slopes: dict[int, Tensor] = field(default_factory=dict)
    memory: Memory = field(default_factory=lambda: Memory(check=False))

    @property
    def span(self) -> slice:
        """The place of all of its rows."""
        return slice(self.members[0].start, self.members[-1].span.stop)

    def rows_of(self, members: Iterable[Followed], rows: Tensor) -> Tensor:
        """The rows of some members among those of all."""
        return torch.cat([rows[self.place(member)] for member in members])

    def place(self, member: Followed) -> slice:
        """The place of a member's rows among those of all."""
        start = self.members[0].start
        return slice(member.span.start - start, member.span.stop - start)

    def forget(self, member: Followed) -> None:
        """What the memory holds of a member."""
        for rows in self.memory.state().values():
            rows[self.place(member)] = 0

    def memory_of(self, members: Sequence[Followed]) -> Memory:
        """The memory of some members alone."""
        memory = Memory(check=False)
        memory.load({name: self.rows_of(members, rows) for name, rows in self.memory.state().items()})
        return memory

    def remember(self, members: Sequence[Followed], memory: Memory) -> None:
        """Take back what `memory_of` gave."""
        state, count = memory.state(), self.span.stop - self.span.start
        if not self.memory.state():
            self.memory.load({name: rows.new_zeros(count, rows.shape[1]) for name, rows in state.items()})
        for name, all_rows in self.memory.state().items():
            for member, rows in zip(members, state[name].split([m.rows for m in members]), strict=True):
                all_rows[self.place(member)] = rows


class Seen(Source):
    """The weights before and after a step and, where there is a reader, the optimizer's state.

    Args:
        optimizer: the optimizer.
        followed: the rows.
        reader: reads a step as the generic scheme; None: only the two points are used.
        why: why there is no reader.
        phenomena: keep the sums behind (b1), (b2) and (c): five tensors of the size of the weights.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        followed: Sequence[Followed],
        *,
        reader: Reader | None,
        why: str = "",
        phenomena: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.reader = reader
        index = {id(group): k for k, group in enumerate(optimizer.param_groups)}
        kind = lambda f: (index[id(f.options)], f.size, str(f.dtype))  # noqa: E731
        self.batches = [Batch(list(members)) for _, members in groupby(placed(followed, key=kind), key=kind)]
        # By member: the state that its memory belongs to, and the share of the momentum from before it.
        self._states: dict[int, object] = {}
        self._unseen: dict[int, float] = {}
        other = next((why for why in map(_other_momentum, followed) if why), "") if reader is not None else ""
        self.phenomena = phenomena and reader is not None and not other
        self.each_step = self.phenomena
        self.columns = ("radius", "start", "inward", "tangential", "gradient_norm", "slope", "rate")
        self.missing = {}
        # A line search leaves the gradient of another point than the one that the step started from.
        self.strays = isinstance(optimizer, torch.optim.LBFGS)
        if reader is None:
            lost = ("effective_lr", "direction_norm", "radial", "nu", "deformation", *PHENOMENA)
            self.missing = dict.fromkeys(lost, why)
            if self.strays:
                self.missing |= dict.fromkeys(
                    ("defect", "gradient_norm"), "the gradient left behind is of another point"
                )
        else:
            self.columns += ("scale", "deformation")
            if self.phenomena:
                self.columns += PHENOMENA
            else:
                self.missing = dict.fromkeys(PHENOMENA, other or UNMEASURED)

    def open(self) -> None:
        # Steps may have been taken since.
        self._states = {}

    @torch.no_grad()
    def before(self) -> None:
        if self.phenomena:
            self._begin()
        for batch in self.batches:
            batch.points = torch.cat([member.cut(member.params) for member in batch.members])
            batch.slopes = {}
            if batch.members[0].options.get("nesterov") and type(self.optimizer).__module__.startswith("torch."):
                # Torch's step over lists adds the momentum to p.grad; with a closure there is no gradient yet.
                known = [member for member in batch.members if member.active]
                batch.slopes = {id(member): member.cut(_gradients(member)).clone() for member in known}

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        for batch in self.batches:
            members = [member for member in batch.members if member.active and member.rows]
            points = batch.points
            if not members or points is None:
                continue
            if len(members) < len(batch.members):
                points = batch.rows_of(members, points)
            values = torch.stack([value.to(out.dtype) for value in self._look(batch, members, points)], dim=1)
            if len(members) == len(batch.members):
                out[batch.span] = values
            else:
                for member, part in zip(members, values.split([m.rows for m in members]), strict=True):
                    out[member.span] = part
            batch.points, batch.slopes = None, {}

    def _look(self, batch: Batch, members: list[Followed], points: Tensor) -> list[Tensor]:
        """The numbers of `columns` for the rows of some members of a batch."""
        # Torch's optimizers are read from the point before the step alone.
        apart = self.reader is None or isinstance(self.optimizer, RowOptimizer)
        now = torch.cat([member.cut(member.params) for member in members]) if apart else points
        known = [batch.slopes.get(id(member)) for member in members]
        pairs = zip(members, known, strict=True)
        slope = torch.cat([member.cut(_gradients(member)) if each is None else each for member, each in pairs])
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None and isinstance(self.optimizer, RowOptimizer):  # torch's fused steps write p.grad, ours not
            slope = slope / scale.to(slope)
        step = None
        if self.reader is None:
            image = observed_step(points, now, check=False)
        else:
            step = self.reader(self._taken(members, points, now, slope))
            image = image_step(points, step, check=False)
        gradient = geometry.as_float(slope, "gradient")
        found = {
            "radius": image.radius,
            "start": image.start,
            "inward": image.inward,
            "tangential": geometry.norm(image.tangential).squeeze(-1),
            "gradient_norm": geometry.norm(gradient).squeeze(-1),
            "slope": geometry.dot(gradient, image.direction).squeeze(-1),
            "rate": _column(nominal(members[0].options) if step is None else step.lr, image.radius),
        }
        if step is not None:
            assert image.scale is not None
            found["scale"] = image.scale
            found["deformation"] = _deformation(image, step.a, found["tangential"])
            if self.phenomena:
                downhill = -gradient if members[0].options.get("maximize") else gradient
                found |= self._remember(batch, members, points, downhill, step)
        return [found[name] for name in self.columns]

    def _taken(self, members: list[Followed], points: Tensor, now: Tensor, gradient: Tensor) -> Taken:
        """The rows of several parameters as one: what a reader gets."""
        param = now.detach()
        param.grad = gradient.to(param.dtype)
        states = [[self.optimizer.state.get(param, {}) for param in member.params] for member in members]
        first, per_row = states[0][0], getattr(self.optimizer, "_row_state", ())
        joined: dict[str, Tensor] = {}
        for name, value in first.items():
            entries = [[state[name] for state in each] for each in states]
            if not isinstance(value, Tensor):
                continue
            if value.shape == members[0].params[0].shape and name not in per_row:
                joined[name] = torch.cat([m.cut(each) for m, each in zip(members, entries, strict=True)])
            elif name in per_row:
                same = value.shape == members[0].params[0].shape and "a" not in members[0].options.get("without", "a")
                rows = [m.cut(e) if same else part(e[0], m.layout) for m, e in zip(members, entries, strict=True)]
                joined[name] = torch.cat(rows)
            elif value.numel() == 1:
                joined[name] = _count([each[0] for each in entries], [member.rows for member in members])
        group = {**members[0].options, "rows": "filter", "joint": False}
        return Taken(param, group, joined, points)

    def _begin(self) -> None:
        """Forget what is not of the present state: a momentum that was loaded, or made before the watch began."""
        for batch in self.batches:
            for member in batch.members:
                state = self.optimizer.state.get(member.params[0])
                if self._states.get(id(member), _NO_STATE) is not state:
                    self._states[id(member)] = state
                    self._unseen[id(member)] = 1.0 if state else 0.0
                    batch.forget(member)

    def _remember(
        self, batch: Batch, members: list[Followed], points: Tensor, gradient: Tensor, step: Step
    ) -> Quantities:
        whole = len(members) == len(batch.members)
        memory = batch.memory if whole else batch.memory_of(members)
        memory.update(points, gradient, beta=step.beta, skip=getattr(self.optimizer, "found_inf", None))
        if not whole:
            batch.remember(members, memory)
        effects = memory.phenomena(step)
        found = {name: getattr(effects, name).angle for name in PHENOMENA}
        start = 0
        for member in members:
            self._states[id(member)] = self.optimizer.state.get(member.params[0])
            if unseen := self._unseen[id(member)]:
                self._unseen[id(member)] = unseen = unseen * float(step.beta)
                if unseen > _UNSEEN:
                    for turned in found.values():
                        turned[start : start + member.rows] = float("nan")
            start += member.rows
        return found

    def quantities(self, values: Tensor, rates: Tensor, decays: Tensor) -> Quantities:
        seen = dict(zip(self.columns, values.unbind(-1), strict=True))
        image = ImageStep(
            radius=seen["radius"],
            start=seen["start"],
            direction=torch.ones_like(seen["radius"]).unsqueeze(-1),
            inward=seen["inward"],
            tangential=seen["tangential"].unsqueeze(-1),
            lr=1.0 if self.reader is None else seen["rate"],
            scale=seen.get("scale"),
        )
        length = seen["gradient_norm"]
        defect = (seen["slope"].abs() / length.masked_fill(length == 0, 1)).clamp(max=1)
        told = {name: seen[name] for name in ("deformation", *PHENOMENA) if name in seen}
        slopes = {} if self.strays else {"defect": defect, "gradient_norm": length}
        return of_image(image) | told | slopes | {"lr": seen["rate"]}


def _deformation(image: ImageStep, a: Tensor, length: Tensor) -> Tensor:
    """(a): the angle between c^⊥, along (a ⊘ b)^⊥, and a^⊥ (Section 4.1), with few passes over the rows.

    With e the unit vector of the former it is atan2 of what a^⊥ has across e and along e.
    """
    across = a - geometry.dot(a, image.direction) * image.direction
    share = geometry.dot(across, image.tangential) / length.masked_fill(length == 0, 1).square().unsqueeze(-1)
    across = across.addcmul_(share, image.tangential, value=-1)
    turned = torch.atan2(geometry.norm(across).squeeze(-1), share.squeeze(-1) * length)
    return turned.masked_fill(length == 0, 0)


def _other_momentum(entry: Followed) -> str:
    """Why the sums behind (b1), (b2) and (c) are not those of this momentum; empty where they are."""
    options = entry.options
    if options.get("nesterov") or (options.get("momentum") and options.get("dampening")):
        return "its momentum does not weight past gradients by β^(k−i) (Nesterov, dampening)"
    if options.get("rows") is not None and set(options.get("without", "")) & set("bc"):
        return "this optimizer's momentum moves with its rows, which neutralizes it"
    return ""


def _gradients(member: Followed) -> list[Tensor]:
    gradients = []
    for param in member.params:
        gradient = param.grad
        assert gradient is not None, "only active rows are looked at"
        gradients.append(gradient.to_dense() if gradient.layout != torch.strided else gradient)
    return gradients


def _count(counts: list[Tensor], rows: list[int]) -> Tensor:
    """One count where all are the same as far as the host knows, else one per row, (n, 1)."""
    if all(count.device.type == "cpu" for count in counts) and len({count.item() for count in counts}) == 1:
        return counts[0].reshape(())
    return torch.cat([count.reshape(1, 1).expand(n, 1) for count, n in zip(counts, rows, strict=True)])


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(like).reshape(-1).expand(like.shape[0]) if value.numel() == 1 else value.to(like).reshape(-1)
    return torch.full_like(like, value)

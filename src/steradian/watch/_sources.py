"""What one step of an optimizer leaves behind, row by row: as the optimizer tells it, as its state is read, as seen.

A source writes a few numbers per row for each step that is observed, on the device and without waiting for it.
Everything else follows from these numbers and is computed for many steps at once, when they are handed over.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import geometry
from steradian.groups import Layout
from steradian.image import ImageStep, image_step, observed_step
from steradian.optim import TELEMETRY
from steradian.optim._base import RowOptimizer
from steradian.optim._rows import arithmetic
from steradian.optim._telemetry import Telemetry
from steradian.phenomena import Memory
from steradian.scheme import Reader, Step, Taken, UnreadableOptimizerError, reader_of
from steradian.watch._followed import Followed, part

__all__ = ["PHENOMENA", "Quantities", "Source", "of_image", "placed", "source_of"]

PHENOMENA = ("gradient_memory", "l2_memory", "radius_ratio")
"""The phenomena that need the steps before; the deformation (a) shows in one step."""

Quantities = dict[str, Tensor]

_LISTENERS: WeakKeyDictionary[RowOptimizer, tuple[int, bool]] = WeakKeyDictionary()
"""How many watches listen to an optimizer's telemetry, and whether it was off before the first."""


class Source(ABC):
    """Numbers per row for each observed step of the rows on one device.

    Attributes:
        columns: the names of the numbers.
        missing: quantities that this source cannot give, and why.
        each_step: it must see every step, also those that are not recorded.
        dtype: what the numbers are kept in; None: what rows are computed in.
    """

    columns: tuple[str, ...]
    missing: dict[str, str]
    each_step: bool = False
    dtype: torch.dtype | None = None

    def open(self) -> None:  # noqa: B027
        """Called when observation begins."""

    def before(self) -> None:  # noqa: B027
        """Called before a step."""

    @abstractmethod
    def after(self, out: Tensor) -> None:
        """Called after a step: write the numbers of the active rows to `out`, (n, columns)."""

    @abstractmethod
    def quantities(self, values: Tensor, rates: Tensor) -> Quantities:
        """Every quantity, (steps, n), from the numbers of many steps, (steps, n, columns), and their rates."""

    def close(self) -> None:  # noqa: B027
        """Called when nothing more will be observed."""


def source_of(optimizer: Optimizer, followed: Sequence[Followed], *, phenomena: bool | None) -> Source:
    """The source for these rows of this optimizer: told where it tells, else read, else seen from outside.

    Args:
        optimizer: the optimizer.
        followed: rows on one device, in the order of their places.
        phenomena: measure (b1), (b2) and (c) too; None: where the weights are looked at in every step anyway.
    """
    if isinstance(optimizer, RowOptimizer) and not phenomena and all(_tells(entry) for entry in followed):
        return Told(optimizer, followed)
    try:
        reader = reader_of(optimizer)
    except UnreadableOptimizerError as error:
        return Seen(optimizer, followed, reader=None, why=str(error))
    if not phenomena and sweeps(optimizer, followed):
        from steradian.watch._sweep import Swept

        return Swept(optimizer, followed)
    return Seen(optimizer, followed, reader=reader, phenomena=bool(phenomena))


def sweeps(optimizer: Optimizer, followed: Sequence[Followed]) -> bool:
    """Whether a GPU can read these rows in one launch."""
    if followed[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from steradian.watch._sweep import can_sweep

    return can_sweep(optimizer, followed)


def _tells(entry: Followed) -> bool:
    """Whether the optimizer knows these rows as such, so that its telemetry holds them."""
    told = entry.options
    joint = bool(told.get("joint"))
    together = len(told["params"]) if joint else 1
    return told.get("rows") is not None and Layout(told["rows"]) == entry.layout and len(entry.params) == together


def of_image(image: ImageStep) -> Quantities:
    """What the image of a step says of each row; without what two points cannot tell."""
    found = {
        "radius": image.radius,
        "angle": image.angle,
        "velocity": image.velocity,
        "taylor": image.taylor,
        "collapsed": image.collapsed.to(image.radius),
        "effective_lr": image.effective_lr,
        "direction_norm": image.direction_norm,
        "radial": image.radial,
        "nu": image.nu,
    }
    return {name: value for name, value in found.items() if value is not None}


class Told(Source):
    """The telemetry of our optimizers: one copy per observed step."""

    columns = TELEMETRY

    def __init__(self, optimizer: RowOptimizer, followed: Sequence[Followed]) -> None:
        order = {id(param): k for k, param in enumerate(_params(optimizer))}
        self.followed = placed(followed, key=lambda f: order[id(f.params[0])])
        self.optimizer = optimizer
        self._buffers: tuple[Tensor, ...] | None = None
        self._rows: list[tuple[Tensor, slice]] = []
        decays = [torch.full((entry.rows,), _decoupled(entry)) for entry in self.followed]
        self._decays = torch.cat(decays).to(followed[0].device, dtype_of(followed))
        why = "this optimizer's telemetry does not hold it; pass phenomena=True to measure it from the weights"
        self.missing = dict.fromkeys(("deformation", *PHENOMENA), why)

    def after(self, out: Tensor) -> None:
        telemetry = self.optimizer.telemetry
        if telemetry is None:  # someone else stopped it
            self.optimizer.emit()
            out.fill_(float("nan"))
            return
        if telemetry.buffers is not self._buffers:
            self._buffers, self._rows = telemetry.buffers, self._find(telemetry)
        for rows, span in self._rows:
            out[span].copy_(rows)

    def _find(self, telemetry: Telemetry) -> list[tuple[Tensor, slice]]:
        """Where the telemetry of the followed rows lies: one tensor and its place, if nothing lies between them."""
        found = [(entry, *telemetry.place(entry.params[0])) for entry in self.followed]
        behind = all(one[1] == other[1] and one[2].stop == other[2].start for one, other in pairwise(found))
        if found and behind:
            _, buffer, first = found[0]
            whole = telemetry.buffers[buffer][first.start : found[-1][2].stop]
            return [(whole, slice(0, len(whole)))]
        return [(telemetry[entry.params[0]], entry.span) for entry in self.followed]

    def quantities(self, values: Tensor, rates: Tensor) -> Quantities:
        told = dict(zip(self.columns, values.unbind(-1), strict=True))
        start = told["radius"] * (1 - rates * self._decays)
        along = start * (1 - told["radial"])
        image = ImageStep(
            radius=told["radius"],
            start=start,
            direction=torch.ones_like(along).unsqueeze(-1),
            inward=told["radial"] * start,
            tangential=(along * told["angle"].tan()).unsqueeze(-1),
            lr=1.0,
            scale=1 / (told["effective_lr"] * along * start),
        )
        # The image is that of a rate of 1, so its ν is that of the step over the rate.
        found = of_image(image)
        found |= {"nu": found["nu"] * rates, "radial": told["radial"], "angle": told["angle"]}
        return found | {"defect": told["defect"], "gradient_norm": told["gradient_norm"], "lr": rates}

    def open(self) -> None:
        listeners, ours = _LISTENERS.get(self.optimizer, (0, self.optimizer.telemetry is None))
        _LISTENERS[self.optimizer] = (listeners + 1, ours)
        self.optimizer.emit()

    def close(self) -> None:
        # An optimizer that is being collected is not among them any more, and needs nothing turned off.
        listeners, ours = _LISTENERS.pop(self.optimizer, (1, False))
        if listeners > 1:
            _LISTENERS[self.optimizer] = (listeners - 1, ours)
        elif ours:
            self.optimizer.emit(False)


@dataclass(eq=False)
class Batch:
    """Followed rows of one length and one param group: looked at together, since launches cost more than rows."""

    members: list[Followed]
    points: Tensor | None = None

    @property
    def span(self) -> slice:
        """The place of all of its rows."""
        return slice(self.members[0].start, self.members[-1].span.stop)

    def rows_of(self, members: Iterable[Followed], rows: Tensor) -> Tensor:
        """The rows of some members among those of all."""
        start = self.members[0].start
        return torch.cat([rows[m.span.start - start : m.span.stop - start] for m in members])


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
        self.memories: dict[int, Memory] = {}
        self.phenomena = phenomena and reader is not None
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
                reason = "it needs every step and five tensors of the size of the weights: pass phenomena=True"
                self.missing = dict.fromkeys(PHENOMENA, reason)

    @torch.no_grad()
    def before(self) -> None:
        for batch in self.batches:
            batch.points = torch.cat([member.cut(member.params) for member in batch.members])

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        for batch in self.batches:
            members = [member for member in batch.members if member.active and member.rows]
            points = batch.points
            if not members or points is None:
                continue
            if len(members) < len(batch.members):
                points = batch.rows_of(members, points)
            values = torch.stack([value.to(out.dtype) for value in self._look(members, points)], dim=1)
            if len(members) == len(batch.members):
                out[batch.span] = values
            else:
                for member, part in zip(members, values.split([m.rows for m in members]), strict=True):
                    out[member.span] = part
            batch.points = None

    def _look(self, members: list[Followed], points: Tensor) -> list[Tensor]:
        """The numbers of `columns` for the rows of some members of a batch."""
        # Torch's optimizers are read from the point before the step alone.
        apart = self.reader is None or isinstance(self.optimizer, RowOptimizer)
        now = torch.cat([member.cut(member.params) for member in members]) if apart else points
        slope = torch.cat([member.cut(_gradients(member)) for member in members])
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
        rate: float | Tensor = members[0].options["lr"] if step is None and "lr" in members[0].options else 0.0
        found = {
            "radius": image.radius,
            "start": image.start,
            "inward": image.inward,
            "tangential": geometry.norm(image.tangential).squeeze(-1),
            "gradient_norm": geometry.norm(gradient).squeeze(-1),
            "slope": geometry.dot(gradient, image.direction).squeeze(-1),
            "rate": _column(step.lr if step is not None else rate, image.radius),
        }
        if step is not None:
            assert image.scale is not None
            found["scale"] = image.scale
            found["deformation"] = _deformation(image, step.a, found["tangential"])
            if self.phenomena:
                found |= self._remember(members, points, gradient, step)
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

    def _remember(self, members: list[Followed], points: Tensor, gradient: Tensor, step: Step) -> Quantities:
        sizes = [member.rows for member in members]
        found: dict[str, list[Tensor]] = {name: [] for name in PHENOMENA}
        pieces = zip(
            members, points.split(sizes), gradient.split(sizes), step.a.split(sizes), step.b.split(sizes), strict=True
        )
        for member, x, g, a, b in pieces:
            memory = self.memories.setdefault(id(member), Memory(check=False))
            memory.update(x, g, beta=step.beta, skip=getattr(self.optimizer, "found_inf", None))
            effects = memory.phenomena(Step(a, b, step.lr, l2=step.l2, decay=step.decay, beta=step.beta))
            for name in PHENOMENA:
                found[name].append(getattr(effects, name).angle)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def quantities(self, values: Tensor, rates: Tensor) -> Quantities:
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


def _decoupled(entry: Followed) -> float:
    """The decoupled decay δ of the rows of one of our optimizers."""
    decay, options = float(entry.options.get("weight_decay", 0)), entry.options
    if "wd_ratio" in options:
        return decay * float(options["wd_ratio"])
    return decay if options.get("decoupled_weight_decay") else 0.0


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def placed(followed: Sequence[Followed], *, key: Callable[[Followed], Any]) -> list[Followed]:
    """The rows in the order in which a source writes them, each told its place."""
    ordered, start = sorted(followed, key=key), 0
    for entry in ordered:
        entry.start = start
        start += entry.rows
    return ordered


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


def dtype_of(followed: Iterable[Followed]) -> torch.dtype:
    """The dtype that numbers per row are kept in."""
    wide = any(arithmetic(param.dtype) == torch.float64 for entry in followed for param in entry.params)
    return torch.float64 if wide else torch.float32

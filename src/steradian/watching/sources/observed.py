"""Steps of any optimizer: seven sums over each row of the weights, the gradient and the step.

Where the state tells the step, as in Adam and in SGD with momentum, x' = (1 − ηδ)x − ηq is solved for x, and nothing is
copied. Otherwise the weights are copied before an observed step. Half-precision weights round, and turn less than the
state says: they are always observed from two points.

From two points, radius, angle, update and radial share are those of the points. A reader only adds the rest. Those of
torch and ours also tell the displacement of float32 and float64 weights, without the rounding of x − x'. A reader of
somebody else's is compared with the points at every observed step, but not in half precision: if the state is rounded,
a right reading of a sign, as Lion's, may be off by a fifth.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, Optimizer

from steradian.image import ImageNumbers, invariance_defect
from steradian.optim import RowOptimizer
from steradian.scheme import Reader, Step, Taken, UnreadableOptimizerError, is_foreign, reader_of
from steradian.watching.rows import INVARIANT, Piece, WatchedGroup, dtype_of, nominal_rate, place
from steradian.watching.sources import PHENOMENA, UNMEASURED, Quantities, Source

__all__ = ["SUMS", "ObservedSource", "tells_step"]

SUMS = ("xx", "qx", "qq", "gg", "gx", "gq", "bb")
"""⟨x,x⟩, ⟨q,x⟩, ⟨q,q⟩, ⟨g,g⟩, ⟨g,x⟩, ⟨g,q⟩ and ⟨b,b⟩ of a row, with g = ∇L(x).

From two points, x is the point before and q = x − x'. From the state, x stands for the point after, and q = a ⊘ b.
"""
_COMPARED = ("missed", "predicted")
"""Squared lengths of x − x' less the displacement that somebody else's reader predicts, and of this displacement."""
_AGREES = 1e-2  # the reader of somebody else's optimizer must predict the displacement to this share of it
_ULPS = 4  # and to so many units in the last place of the weights, which are rounded
_ROUNDING = 1e-6

logger = logging.getLogger("steradian")


def tells_step(group: WatchedGroup) -> bool:
    """Whether state and settings after a step determine the point before it, if the optimizer can be read."""
    optimizer, settings = group.optimizer, group.settings
    if is_foreign(optimizer) or any(param.dtype not in (torch.float32, torch.float64) for param in group.params):
        return False
    with_momentum = isinstance(optimizer, SGD) and settings["momentum"] and not settings["nesterov"]
    return isinstance(optimizer, Adam) or bool(with_momentum)


class ObservedSource(Source):
    """Sums over the rows of an optimizer's groups on one device, piece by piece; `tells_step` is the same for all."""

    columns: tuple[str, ...] = (*SUMS, "rate", "kept")

    def __init__(self, optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> None:
        self.optimizer = optimizer
        order = {id(settings): k for k, settings in enumerate(optimizer.param_groups)}
        self.watched = place(watched, key=lambda group: order[id(group.settings)])
        self.device, self.row_dtype = watched[0].device, dtype_of(watched)
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.missing = dict.fromkeys(PHENOMENA, UNMEASURED)
        # Torch's step over lists adds Nesterov's momentum to p.grad, schedule-free steps divide it.
        named = type(optimizer).__name__.endswith("ScheduleFree")
        ours = isinstance(optimizer, RowOptimizer)
        self._overwrites = named or (not ours and any(group.settings.get("nesterov") for group in watched))
        self._invariant = any(group.label == INVARIANT for group in watched)
        self._points: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        sizes = np.repeat([float(group.size) for group in self.watched], [group.n_rows for group in self.watched])
        self._sizes = torch.from_numpy(sizes).to(self.dtype).to(self.device)
        # Whether somebody else's reader was wrong so far; of the first wrong step, per group, what `_heed` reads.
        self._wrong = torch.zeros((), dtype=torch.bool, device=self.device)
        self._verdict = torch.zeros(3, len(self.watched), dtype=self.dtype, device=self.device)
        self._told = torch.zeros_like(self._verdict, device="cpu", pin_memory=self.device.type == "cuda")
        self.reader: Reader | None = None
        try:
            self.reader = reader_of(optimizer)
        except UnreadableOptimizerError as error:
            self._drop_reader(str(error))
        self.reads = self.reader is not None  # whether quantities that need a reader are recorded, if only as NaN
        self.two_points = self.beforehand = self.reader is None or not all(map(tells_step, watched))
        self.foreign = self.reads and is_foreign(optimizer)
        if self.foreign:
            self.columns = (*self.columns, *_COMPARED)
        # Not of half-precision weights, which really move less, nor if someone else moves the weights after the step.
        half = any(param.dtype.itemsize <= 2 for group in watched for param in group.params)
        self._reads_displacement = not half and not self.foreign
        self._compares = not half and self.foreign
        # A line search leaves the gradient of another point than the one that the step started from.
        self.searches = isinstance(optimizer, LBFGS)
        if self.searches:
            self.missing |= dict.fromkeys(("defect", "gradient_norm"), "the gradient left behind is of another point")

    def _drop_reader(self, why: str) -> None:
        self.reader, self._wrong = None, torch.ones_like(self._wrong)
        # All ranks must record the same quantities.
        self.reads = any(group.sharded for group in self.watched)
        self.missing |= dict.fromkeys(("effective_lr", "direction_norm", "radial", "nu", *PHENOMENA), why)

    def distrust_state(self) -> None:
        self.two_points = self.beforehand = True
        self._reads_displacement = self._compares = False
        for group in self.watched:
            group.held = group.gradients() if group.active() else None

    def open(self) -> None:
        self._checked = False  # whether a step was compared with the reader

    @torch.no_grad()
    def before(self) -> None:
        if not self.two_points:
            return
        for group in self.watched:
            if not group.gone:
                self._points[id(group)] = [group.local(param).clone() for param in group.params]
                if self._overwrites and group.active():  # before a closure there is no gradient
                    self._gradients[id(group)] = [gradient.clone() for gradient in group.gradients()]

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        for group in self.watched:
            points = self._points.pop(id(group), None)
            gradients = self._gradients.pop(id(group), None)
            if not group.active() or (self.two_points and points is None):
                continue
            gradients = group.gradients() if gradients is None else gradients
            rows, parts = out[group.span].zero_(), group.parts(points, gradients)
            if self.foreign and group.n_rows:
                parts = self._read_parts(group, parts)
            for piece in group.pieces(parts):
                self._add_sums(group, piece, rows[piece.rows])
            if self.each_step:
                self.measure(group, parts, rows)
        if self._compares and not self._checked:  # before anything is recorded
            self._compare(dict(zip(self.columns, out[None].unbind(-1), strict=True)))
            self._heed()
        self._checked = True

    def measure(self, group: WatchedGroup, parts: Sequence[Piece], out: Tensor) -> None:
        """Called at every step of a source that needs each one: write what takes whole rows to `out`."""

    def _add_sums(self, group: WatchedGroup, piece: Piece, out: Tensor) -> None:
        """Add the sums over a piece to `out`, and write the rate η of the step and 1 − ηδ."""
        gradient = self._unscaled(piece.gradient)
        step = self._read(group, piece, gradient)
        g, y = gradient.to(self.dtype), piece.now.to(self.dtype)
        x = y if piece.before is None else piece.before.to(self.dtype)
        b = x.new_zeros(()) if step is None else step.b.to(self.dtype)
        q = x - y if step is None else step.a.to(self.dtype) / b
        rate, kept = (nominal_rate(group.settings), 1.0) if step is None else (step.lr, 1 - step.lr * step.decay)
        if piece.before is not None and step is not None:
            # The displacement that was read is exact where the weights are rounded; see `_reads_displacement`.
            predicted = (1 - kept) * x + rate * q if self._reads_displacement or self._compares else x - y
            q = predicted if self._reads_displacement else x - y
            if self._compares:
                for k, vector in enumerate((q - predicted, predicted), -len(_COMPARED)):
                    out[:, k] += torch.linalg.vecdot(vector, vector)
        for k, (one, other) in enumerate([(x, x), (q, x), (q, q), (g, g), (g, x), (g, q), (b, b)]):
            out[:, k] += torch.linalg.vecdot(one, other) if one.ndim else 0
        # 1 − ηδ is rounded as the step rounds it if the rate is a tensor.
        for k, setting in enumerate((rate, kept), len(SUMS)):
            out[:, k] = setting.reshape(-1) if isinstance(setting, Tensor) else setting

    def _unscaled(self, gradient: Tensor) -> Tensor:
        """Torch's fused steps unscale p.grad, ours leave it as it is."""
        scale = getattr(self.optimizer, "grad_scale", None)
        return gradient if scale is None or not isinstance(self.optimizer, RowOptimizer) else gradient / scale

    def _read(self, group: WatchedGroup, piece: Piece, gradient: Tensor) -> Step | None:
        """The step that the reader sees on rows, as if they were a parameter; None if the optimizer cannot be read."""
        if self.reader is None:
            return None
        if self.foreign:
            return replace(self._step, a=piece.state["a"], b=piece.state["b"])
        param = _computed(piece.now).detach()
        param.grad = gradient.to(param.dtype)
        settings = {**group.settings, "rows": None if group.settings.get("rows") is None else "filter", "joint": False}
        before = None if piece.before is None else _computed(piece.before)
        return self._ask(Taken(param, settings, piece.state, before))

    def _read_parts(self, group: WatchedGroup, parts: list[Piece]) -> list[Piece]:
        """Parts with a and b of their steps as their state: somebody else's reader gets whole parameters."""
        steps = []
        for part in parts:
            param = part.now.detach()
            param.grad = self._unscaled(part.gradient).to(param.dtype)
            step = self._ask(Taken(param, group.settings, part.state, part.before))
            if step is None:
                return parts
            steps.append(step)
        self._step = steps[0]
        return [part._replace(state={"a": step.a, "b": step.b}) for part, step in zip(parts, steps, strict=True)]

    def _ask(self, taken: Taken) -> Step | None:
        """The step that the reader sees; if there is none, the reader is dropped."""
        if self.reader is None:
            return None
        try:
            step = self.reader(taken)
            if self.foreign:
                _check_step(step, taken.param)
        except Exception as error:
            self._disagree(f"its reader {_name(self.reader)} failed: {type(error).__name__}: {error}")
            return None
        return step

    def _compare(self, sums: Mapping[str, Tensor]) -> Tensor:
        """(steps, 1): whether the reader was wrong by then; the host is told without waiting for it."""
        of_rows = [sums[name] for name in (*_COMPARED, "qq", "xx")]
        of_groups = [torch.stack([rows[:, group.span].sum(-1) for group in self.watched], dim=-1) for rows in of_rows]
        missed, predicted, moved, radius = (squares.sqrt() for squares in of_groups)
        eps = max(torch.finfo(param.dtype).eps for group in self.watched for param in group.params)
        wrong = moved.isfinite() & ~(missed <= _AGREES * moved + _ULPS * eps * radius)
        first = wrong.any(-1).int().argmax(0, keepdim=True)
        verdict = torch.stack([wrong.to(self.dtype), missed / moved, predicted / moved]).index_select(1, first)[:, 0]
        self._verdict = torch.where(self._wrong, self._verdict, verdict)
        late = (wrong.any(-1).cumsum(0) > 0) | self._wrong
        self._wrong = late[-1]
        self._told.copy_(self._verdict, non_blocking=self._checked and self.device.type == "cuda")
        return late[:, None]

    def _heed(self) -> None:
        """Drop the reader if it was wrong, as far as the host knows."""
        wrong, missed, ratio = self._told
        if self.reader is not None and wrong.any():
            k = int(wrong.argmax())
            self._disagree(
                f"the step that its reader {_name(self.reader)} predicts for {self.watched[k].name} has a relative "
                f"error of {missed[k]:.2g} and is {ratio[k]:.3g} times as long as the real step"
            )

    def _disagree(self, why: str) -> None:
        if not self.two_points:
            raise ValueError(why)
        if self.reader is not None:
            name = type(self.optimizer).__qualname__
            self._drop_reader(f"{name} is observed from two points: {why}")
            logger.warning("%s is observed from two points alone: %s", name, why)

    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        sums = dict(zip(self.columns, values.unbind(-1), strict=True))
        kept = sums["kept"] if "kept" in sums else (1 - rates * decays).to(self.dtype)
        nominal, rates, reads, wrong = rates, sums.get("rate", rates).to(self.dtype), self.reads, None
        if self.foreign:
            self._heed()  # of the last flush, where the host did not wait for it
            wrong = self._compare(sums)
            rates, kept = torch.where(wrong, nominal.to(self.dtype), rates), kept.masked_fill(wrong, 1)
            if self.device.type != "cuda":
                self._heed()
        elif reads and self.reader is None:
            wrong = self._wrong.reshape(1, 1)
        lost = 1 - kept
        xx, qx, qq, gx = (sums[name] for name in ("xx", "qx", "qq", "gx"))
        # In place where it can be: these numbers may be most of the memory that the watch takes in a step.
        if self.two_points:
            radius, moved, along = xx.sqrt(), qq.clone(), qx  # of x − x' = ηδx + ηq
        else:  # x = (x' + ηq)/(1 − ηδ)
            xx = (xx + 2 * rates * qx).add_(rates**2 * qq).div_(kept**2)
            # A row that was 0, such as a bias at first, is only rounding after the step is taken back.
            xx.masked_fill_(xx < _ROUNDING**2 * rates**2 * qq, 0)
            qx, gx = (rates * qq).add_(qx).div_(kept), (rates * sums["gq"]).add_(gx).div_(kept)
            along = (lost * xx).add_(rates * qx)
            moved = (lost**2 * xx).add_(2 * lost * rates * qx).add_(rates**2 * qq)
            radius = xx.sqrt_()
        safe = radius.masked_fill(radius == 0, 1)
        of_gradient = {}
        if not self.searches:
            length = sums["gg"].sqrt()
            defect = self._row(invariance_defect(gx / safe, length))
            of_gradient = {"defect": defect, "gradient_norm": self._row(length)}
            del length
        del xx, gx
        update, inward = moved.clamp(min=0).sqrt_(), along / safe
        across = _root(moved.sub_(inward**2))  # η‖q^⊥‖
        found = {"update": self._row((update / safe).masked_fill_(radius == 0, 0))}
        share = (along.abs() / safe).div_(update.masked_fill_(update == 0, 1)).clamp_(max=1)
        found |= {"radial_share": self._row(share), "lr": self._row(rates), **of_gradient}
        del moved, along, update, share
        inward -= lost * radius  # η⟨q,u⟩
        start = radius * kept
        scale = (sums["bb"] / self._sizes).sqrt_() if reads else None
        if scale is not None and wrong is not None:
            scale.masked_fill_(wrong, torch.nan)
        if scale is not None and self._invariant:
            nu = start * scale
            speed = across / rates.masked_fill(rates == 0, 1) if self.two_points else _root(qq - (qx / safe) ** 2)
            found |= {"nu": self._row(nu), "direction_norm": self._row(speed * nu)}
        if scale is not None:
            scale /= rates
        # The image of a step of rate 1, so that nothing is divided by a rate of 0.
        radius, start, inward, across = map(self._row, (radius, start, inward, across))
        scale = None if scale is None else self._row(scale)
        image = ImageNumbers(radius, start, inward, across, lr=1.0, scale=scale)
        if wrong is not None and image.radial is not None:
            found["radial"] = image.radial.masked_fill(wrong, torch.nan)
        return image, found

    def _row(self, numbers: Tensor) -> Tensor:
        """Numbers in the dtype in which they are recorded."""
        return numbers.to(self.row_dtype)

    def nbytes(self) -> int:
        """The copies; before a step they are counted as if they were there."""
        if not self.two_points:
            return 0
        return sum(group.n_rows * group.size * group.dtype.itemsize for group in self.watched)

    def close(self) -> None:
        self._points, self._gradients = {}, {}
        self._heed()


def _name(reader: Reader) -> str:
    return getattr(reader, "__qualname__", repr(reader))


def _check_step(step: Any, param: Tensor) -> None:
    """Raise an error if what a reader returned is not a step of a parameter."""
    if not isinstance(step, Step):
        raise TypeError(f"it must return a scheme.Step, got {type(step).__name__}")
    for name, tensor in (("a", step.a), ("b", step.b)):
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.device) != (param.shape, param.device):
            got = f"{tuple(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else repr(tensor)
            raise ValueError(f"{name} must be of shape {tuple(param.shape)} on {param.device}, got {got}")
    torch.as_tensor(step.lr * step.decay * step.beta).reshape(())  # all must be numbers, or tensors with one


def _computed(rows: Tensor) -> Tensor:
    """Rows in the dtype that they are computed in."""
    return rows.float() if rows.dtype.itemsize < 4 else rows


def _root(square: Tensor) -> Tensor:
    """The root of a difference that rounding may have made negative."""
    return square.clamp(min=0).sqrt()

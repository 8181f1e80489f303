"""Steps of any optimizer: seven sums over each row of the weights, the gradient and the step.

Where the state tells the step, as in Adam and in SGD with momentum, x' = (1 − ηδ)x − ηq is solved for x, and nothing is
copied. Otherwise the weights are copied before an observed step. Half-precision weights round, and turn less than the
state says: they are always observed from two points.

From two points, radius, angle, update and radial share are those of the points. A reader only adds the rest. Those of
torch and ours also tell the displacement of float32 and float64 weights, without the rounding of x − x'. A reader of
somebody else's is compared with the points at the first observed steps, but not in half precision: if the state is
rounded, a right reading of a sign, as Lion's, may be off by a fifth.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, Muon, Optimizer

from steradian.image import ImageNumbers, invariance_defect
from steradian.optim import RowOptimizer
from steradian.scheme import Reader, Step, Taken, UnreadableOptimizerError, is_foreign, reader_of
from steradian.watching.rows import INVARIANT, Piece, WatchedGroup, dtype_of, nominal_rate, place
from steradian.watching.sources import PHENOMENA, UNMEASURED, Quantities, Source

__all__ = ["OF_GRADIENT", "SUMS", "ObservedSource", "tells_step"]

SUMS = ("xx", "qx", "qq", "gg", "gx", "gq", "bb")
"""⟨x,x⟩, ⟨q,x⟩, ⟨q,q⟩, ⟨g,g⟩, ⟨g,x⟩, ⟨g,q⟩ and ⟨b,b⟩ of a row, with g = ∇L(x).

From two points, x is the point before and q = x − x'. From the state, x stands for the point after, and q = a ⊘ b.
"""
OF_GRADIENT = slice(3, 5)  # ⟨g,g⟩ and ⟨g,x⟩, which are known before the step
_FROM_GRADIENT = ("defect", "gradient_norm")
_COMPARED = 20  # observed steps at which the reader of somebody else's optimizer is compared with the weights
_AGREES = 1e-2  # it must predict the displacement to this share of it
_ULPS = 4  # and to so many units in the last place of the weights, which are rounded
_ROUNDING = 1e-6

logger = logging.getLogger("steradian")


def tells_step(group: WatchedGroup) -> bool:
    """Whether state and settings after a step determine the point before it, if the optimizer can be read."""
    optimizer, settings = group.optimizer, group.settings
    if is_foreign(type(optimizer)) or any(param.dtype not in (torch.float32, torch.float64) for param in group.params):
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
        self.device, self.row_dtype = watched[0].device, dtype_of(watched)  # in which numbers are recorded
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.missing = dict.fromkeys(PHENOMENA, UNMEASURED)
        # Torch's SGD over lists adds Nesterov's momentum to p.grad, schedule-free steps divide it.
        named = type(optimizer).__name__.endswith("ScheduleFree")
        known = isinstance(optimizer, RowOptimizer | Muon)
        self._overwrites = named or (not known and any(group.settings.get("nesterov") for group in watched))
        self.foreign = is_foreign(type(optimizer))  # its step may clip p.grad, add the decay to it, or free it
        self._points: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self._slopes: dict[int, Tensor] = {}  # before such a step: ⟨g,g⟩ and ⟨g,x⟩ of each row
        sizes = np.repeat([float(group.size) for group in self.watched], [group.n_rows for group in self.watched])
        self._sizes = torch.from_numpy(sizes).to(self.dtype).to(self.device)
        # Not of half-precision weights, which really move less, nor if someone else moves the weights after the step.
        half = any(param.dtype.itemsize <= 2 for group in watched for param in group.params)
        self._reads_displacement = not half and not self.foreign
        self._compared = self._left = 0 if half else _COMPARED  # observed steps at which the reader is compared
        self.reader: Reader | None = None
        self._reads = False
        try:
            self.reader = reader_of(optimizer)
        except UnreadableOptimizerError as error:
            self._drop_reader(str(error))
        self.two_points = self.beforehand = self.reader is None or not all(map(tells_step, watched))
        # What needs a reader is NaN from the step on at which it was dropped; all ranks record the same quantities.
        self._reads = self.reader is not None and self.foreign and any(group.sharded for group in watched)
        if isinstance(optimizer, LBFGS):
            self.missing |= dict.fromkeys(_FROM_GRADIENT, "the line search leaves the gradient of another point")

    def _drop_reader(self, why: str) -> None:
        self.reader, self._reads = None, self._reads or (self.foreign and self._left < self._compared)
        self.missing |= dict.fromkeys(("effective_lr", "direction_norm", "radial", "nu", *PHENOMENA), why)

    def distrust_state(self) -> None:
        self.two_points = self.beforehand = True
        self._reads_displacement, self._compared, self._left = False, 0, 0
        for group in self.watched:
            group.held = group.gradients() if group.active() else None

    def open(self) -> None:
        self._left = self._compared

    @torch.no_grad()
    def before(self) -> None:
        if not self.two_points:
            return
        if self._overwrites and self.closure and "gradient_norm" not in self.missing:
            self._reads_displacement = False
            self.missing |= dict.fromkeys(_FROM_GRADIENT, "the step overwrites the gradient that its closure computes")
        scale = getattr(self.optimizer, "grad_scale", None)
        for group in self.watched:
            if not group.gone:
                self._points[id(group)] = [group.local(param).clone() for param in group.params]
                if self._overwrites and "gradient_norm" not in self.missing and group.active():
                    gradients = group.gradients()
                    self._gradients[id(group)] = [g.clone() if scale is None else g / scale for g in gradients]
                if self.foreign and not self.closure and group.active():
                    self._slopes[id(group)] = self._read_gradient(group)

    def _read_gradient(self, group: WatchedGroup) -> Tensor:
        """⟨g,g⟩ and ⟨g,x⟩ of a group's rows before the step, until which its gradient is held."""
        group.held = group.gradients()
        found = torch.zeros(group.n_rows, 2, dtype=self.dtype, device=self.device)
        for piece in group.pieces(group.parts(None, group.held)):
            g, x = piece.gradient.to(self.dtype), piece.now.to(self.dtype)
            found[piece.rows] += torch.stack([torch.linalg.vecdot(g, g), torch.linalg.vecdot(g, x)], dim=1)
        return found

    @torch.no_grad()
    def after(self, out: Tensor) -> None:
        for group in self.watched:
            points = self._points.pop(id(group), None)
            gradients, slopes = self._gradients.pop(id(group), None), self._slopes.pop(id(group), None)
            if not group.active() or (self.two_points and points is None):
                continue
            gradients = group.gradients() if gradients is None else gradients
            rows, parts = out[group.span].zero_(), group.parts(points, gradients)
            if self.foreign and self.reader is not None and group.n_rows:
                parts = self._read_parts(group, parts)
            for piece in group.pieces(parts):
                self._add_sums(group, piece, rows[piece.rows])
            if slopes is not None:
                rows[:, OF_GRADIENT] = slopes
            if self.each_step:
                self.measure(group, parts, rows)
        self._left -= self._left > 0

    def measure(self, group: WatchedGroup, parts: Sequence[Piece], out: Tensor) -> None:
        """Called at every step of a source that needs each one: write what takes whole rows to `out`."""

    def _add_sums(self, group: WatchedGroup, piece: Piece, out: Tensor) -> None:
        """Add the sums over a piece to `out`, and write the rate η of the step and 1 − ηδ."""
        gradient = self._unscaled(piece.gradient)
        step = self._read(group, piece, gradient)
        g, y = gradient.to(self.dtype), piece.now.to(self.dtype)
        x = y if piece.before is None else piece.before.to(self.dtype)
        b = x.new_full((), torch.nan if self._reads else 0.0) if step is None else step.b.to(self.dtype)
        q = x - y if step is None else step.a.to(self.dtype) / b
        rate, kept = (nominal_rate(group.settings), 1.0) if step is None else (step.lr, 1 - step.lr * step.decay)
        if piece.before is not None and step is not None:
            # The displacement that was read is exact where the weights are rounded; see `_reads_displacement`.
            q = (1 - kept) * x + rate * q if self._reads_displacement else x - y
        for k, (one, other) in enumerate([(x, x), (q, x), (q, q), (g, g), (g, x), (g, q), (b, b)]):
            out[:, k] += torch.linalg.vecdot(one, other) if one.ndim else one
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
            step = self._ask(Taken(param, group.settings, part.state, part.before), group.name)
            if step is None:
                return parts
            steps.append(step)
        self._step = steps[0]
        return [part._replace(state={"a": step.a, "b": step.b}) for part, step in zip(parts, steps, strict=True)]

    def _ask(self, taken: Taken, name: str = "") -> Step | None:
        """The step that the reader sees; if there is none, or a wrong one, the reader is dropped."""
        if self.reader is None:
            return None
        of = f"its reader {getattr(self.reader, '__qualname__', self.reader)}"
        try:
            step = self.reader(taken)
            if self.foreign:
                step = replace(step, a=step.a.expand_as(taken.param), b=step.b.expand_as(taken.param))
            compares = self.foreign and self._left and getattr(self.optimizer, "found_inf", None) is None
            if compares and (wrong := _difference(taken, step)):
                self._disagree(f"the step that {of} predicts for {name} {wrong}")
        except Exception as error:
            self._disagree(f"{of} failed: {type(error).__name__}: {error}")
        return None if self.reader is None else step

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
        rates, reads = sums.get("rate", rates).to(self.dtype), self._reads or self.reader is not None
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
        if self.foreign and self.closure:
            self.missing.setdefault("defect", "the step may compute the gradient of its closure at other weights")
        if "gradient_norm" not in self.missing:
            length = sums["gg"].sqrt()
            of_gradient = {"gradient_norm": length.to(self.row_dtype)}
            if "defect" not in self.missing:
                of_gradient["defect"] = invariance_defect(gx / safe, length).to(self.row_dtype)
            del length
        del xx, gx
        update, inward = moved.clamp(min=0).sqrt_(), along / safe
        across = moved.sub_(inward**2).clamp(min=0).sqrt_()  # η‖q^⊥‖; rounding may make the difference negative
        found = {"update": (update / safe).masked_fill_(radius == 0, 0).to(self.row_dtype)}
        share = (along.abs() / safe).div_(update.masked_fill_(update == 0, 1)).clamp_(max=1)
        found |= {"radial_share": share.to(self.row_dtype), "lr": rates.to(self.row_dtype), **of_gradient}
        del moved, along, update, share
        inward -= lost * radius  # η⟨q,u⟩
        start = radius * kept
        scale = (sums["bb"] / self._sizes).sqrt_() if reads else None
        if scale is not None and any(group.label == INVARIANT for group in self.watched):
            nu = start * scale
            if self.two_points:
                speed = across / rates.masked_fill(rates == 0, 1)
            else:
                speed = (qq - (qx / safe) ** 2).clamp(min=0).sqrt_()
            found |= {"nu": nu.to(self.row_dtype), "direction_norm": (speed * nu).to(self.row_dtype)}
        if scale is not None:
            scale /= rates
        # The image of a step of rate 1, so that nothing is divided by a rate of 0.
        radius, start, inward, across = (each.to(self.row_dtype) for each in (radius, start, inward, across))
        scale = None if scale is None else scale.to(self.row_dtype)
        image = ImageNumbers(radius, start, inward, across, lr=1.0, scale=scale)
        if self._reads and scale is not None and image.radial is not None:
            found["radial"] = image.radial.masked_fill(scale.isnan(), torch.nan)
        return image, found

    def nbytes(self) -> int:
        """The copies; before a step they are counted as if they were there."""
        return sum(group.n_rows * group.size * group.dtype.itemsize for group in self.watched) if self.two_points else 0

    def close(self) -> None:
        self._points, self._gradients, self._slopes = {}, {}, {}


def _difference(taken: Taken, step: Step) -> str:
    """How a step differs from the one that the weights took; "" if it does not. The host waits for the answer."""
    assert taken.before is not None
    x = _computed(taken.before)
    moved, predicted = x - _computed(taken.param), step.lr * (step.decay * x + step.a / step.b)
    missed, length, expected, radius = (each.norm() for each in (moved - predicted, moved, predicted, x))
    allowed = _AGREES * length + _ULPS * torch.finfo(taken.param.dtype).eps * radius
    if missed <= allowed or not length.isfinite():
        return ""
    error, times = missed / length, expected / length
    return f"has a relative error of {error:.2g} and is {times:.3g} times as long as the real step"


def _computed(rows: Tensor) -> Tensor:
    """Rows in the dtype that they are computed in."""
    return rows.float() if rows.dtype.itemsize < 4 else rows

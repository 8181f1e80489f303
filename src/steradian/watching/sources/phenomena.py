"""The phenomena (a) to (c) of each step, for those who ask: they need every step and whole vectors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian import geometry
from steradian.image import ImageNumbers, ImageStep, image_of_rows
from steradian.phenomena import Memory
from steradian.watching.rows import Piece, WatchedGroup
from steradian.watching.sources import PHENOMENA, Quantities
from steradian.watching.sources.observed import ObservedSource

__all__ = ["PhenomenaSource"]

# Phenomena are recorded once the momentum holds less than this share of gradients from before the watch: older ones are
# turned further, so that a small share already matters.
_UNKNOWN = 1e-3


class PhenomenaSource(ObservedSource):
    """The sums of `ObservedSource`, and the angle by which each phenomenon turns the direction of a row."""

    columns = (*ObservedSource.columns, *PHENOMENA)
    each_step = True

    def __init__(self, optimizer: Optimizer, watched: Sequence[WatchedGroup]) -> None:
        super().__init__(optimizer, watched)
        self.two_points = self.beforehand = True
        reasons = [why for why in map(_other_momentum, watched) if why]
        self._remembers = not reasons and self.reader is not None
        if self.reader is not None:
            self.missing = dict.fromkeys(PHENOMENA[1:], reasons[0]) if reasons else {}
        self._memories = {id(group): Memory(None, check=False) for group in self.watched}
        # By group: the optimizer's state that its memory belongs to, and the share of the momentum from before it.
        self._states: dict[int, object] = {}
        self._unknown: dict[int, float] = {}

    def open(self) -> None:
        super().open()
        self._states = {}  # steps may have been taken since the watch was stopped

    @torch.no_grad()
    def before(self) -> None:
        for group in self.watched:
            state = self.optimizer.state.get(group.params[0])
            if id(group) not in self._states or self._states[id(group)] is not state:
                # The momentum was loaded, or holds gradients from before the watch.
                self._states[id(group)] = state
                self._unknown[id(group)] = 1.0 if isinstance(state, Tensor) or state else 0.0
                self._memories[id(group)] = Memory(None, check=False)
        super().before()

    def measure(self, group: WatchedGroup, parts: Sequence[Piece], out: Tensor) -> None:
        out[:, len(ObservedSource.columns) :] = math.nan
        if self.reader is None or not group.n_rows:
            return
        [piece] = group.pieces(parts, at_once=group.n_rows * group.size)
        raw = self._unscaled(piece.gradient)
        step = self._read(group, piece, raw)
        if step is None or piece.before is None:
            return
        before, gradient = geometry.as_float(piece.before, "x"), geometry.as_float(raw, "gradient")
        found = {"deformation": _deformation(image_of_rows(before, step, check=False), step.a)}
        if self._remembers:
            memory = self._memories[id(group)]
            downhill = -gradient if group.settings.get("maximize") else gradient
            memory.update(before, downhill, beta=step.beta, skip=getattr(self.optimizer, "found_inf", None))
            self._states[id(group)] = self.optimizer.state.get(group.params[0])
            self._unknown[id(group)] *= float(step.beta)
            if self._unknown[id(group)] <= _UNKNOWN:
                effects = memory.phenomena(step)
                found |= {name: getattr(effects, name) for name in PHENOMENA[1:]}
        for name, angles in found.items():
            out[:, self.columns.index(name)] = angles

    def numbers(self, values: Tensor, rates: Tensor, decays: Tensor) -> tuple[ImageNumbers, Quantities]:
        image, found = super().numbers(values, rates, decays)
        if self.reader is not None or self._reads:
            for name in PHENOMENA if self._remembers else PHENOMENA[:1]:
                found[name] = values[..., self.columns.index(name)].to(self.row_dtype)
        return image, found

    def nbytes(self) -> int:
        """The copies, and the sums of past gradients and points."""
        sums = [rows for memory in self._memories.values() for rows in memory.state().values()]
        return super().nbytes() + sum(rows.nbytes for rows in sums)


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

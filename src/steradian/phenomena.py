"""The geometric phenomena in Adam (Section 4.1): where c_k comes from, and how large a, b1, b2 and c are in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steradian import geometry
from steradian.groups import Layout, Spec
from steradian.image import Tensors
from steradian.scheme import Step

__all__ = ["Effect", "Memory", "Phenomena", "c", "c_grad", "c_l2", "nu"]


def c_grad(points: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, rows: Spec = "filter") -> Tensor:
    """c_k^grad = ∇L(u_k) + Σ_{i<k} β^{k−i} (r_k/r_i) ∇L(u_i), (n, d) rows (Eq. 20).

    Args:
        points: x_0 … x_k, in the parameter's shape.
        gradients: ∇L(x_0) … ∇L(x_k), without L2; on the sphere ∇L(u_i) = r_i∇L(x_i) (Lemma 1).
        beta: the momentum factor β.
        rows: how the parameter is cut into rows.
    """
    history, slopes = _history(points, gradients, rows)
    return geometry.norm(history[-1]) * _faded(slopes, beta)  # as (r_k/r_i)∇L(u_i) = r_k∇L(x_i)


def c_l2(points: Sequence[Tensor], beta: float, rows: Spec = "filter") -> Tensor:
    """c_k^L2 = u_k + Σ_{i<k} β^{k−i} (r_i/r_k) u_i, (n, d) rows (Eq. 21); arguments as in `c_grad`."""
    history, _ = _history(points, points, rows)
    return _faded(history, beta) / geometry.norm(history[-1])  # as r_i u_i = x_i


def c(points: Sequence[Tensor], gradients: Sequence[Tensor], step: Step, rows: Spec = "filter") -> Tensor:
    """c_k = (c_k^grad + λr_k² c_k^L2) ⊘ (b_k/b̄_k) from the recorded history, (n, d) rows (Eq. 19).

    Arguments are as in `c_grad`; of the step taken at x_k, β, λ and b are used.
    """
    r, beta = geometry.norm(Layout(rows).rows(points[-1].detach())), float(step.beta)
    momentum = c_grad(points, gradients, beta, rows) + step.l2 * r**2 * c_l2(points, beta, rows)
    return momentum / _deformation(Layout(rows).rows(step.b))


def nu(
    points: Sequence[Tensor],
    gradients: Sequence[Tensor],
    betas: tuple[float, float],
    l2: float = 0.0,
    rows: Spec = "filter",
    *,
    rescaled: bool = False,
) -> Tensor:
    """Adam's ν_k = r_k b̄_k from the recorded history, (n,), for ε = 0 (App. C.1.3).

    ν_k = d^{-1/2} (1−β1^{k+1})/(1−β1) √((1−β2)/(1−β2^{k+1})) · √(Σ β2^{k−i} (r_k/r_i)² ‖∇L(u_i) + λr_i²u_i‖²).

    Args:
        points: x_0 … x_k, in the parameter's shape.
        gradients: ∇L(x_0) … ∇L(x_k), without L2.
        betas: Adam's β1 and β2.
        l2: λ.
        rows: how the parameter is cut into rows.
        rescaled: ν^R_k of Adam without (abc) (App. D.2), whose summands are ‖∇L(u_i) + λr_i²u_i‖², free of r_k/r_i.
    """
    history, slopes = _history(points, gradients, rows)
    beta1, beta2 = betas
    count, d = len(history), history[0].shape[-1]
    terms = [
        (geometry.norm(x if rescaled else history[-1]) * geometry.norm(g + l2 * x)) ** 2
        for x, g in zip(history, slopes, strict=True)
    ]
    share = (1 - beta1**count) / (1 - beta1)
    return (share * ((1 - beta2) / (1 - beta2**count) * _faded(terms, beta2) / d).sqrt()).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Effect:
    """How much one phenomenon changes a direction in the tangent space, for each row.

    Attributes:
        angle: between the direction with the phenomenon and without it.
        change: norm of their difference relative to the direction with it.
    """

    angle: Tensor
    change: Tensor


@dataclass(frozen=True, eq=False)
class Phenomena:
    """The four phenomena in one step, each as the turn of the effective direction that it causes (Section 4.1).

    (a) compares c^⊥ with the momentum before the division, the others compare the tangent part of that momentum,
    c^grad + λr²c^L2, with what it would be without the one phenomenon.

    Attributes:
        deformation: (a), the element-wise division: against (r a)^⊥.
        gradient_memory: (b1), past gradients that left the tangent space: against their parallel transport.
        l2_memory: (b2), past points in the L2 term: against (c^grad)^⊥.
        radius_ratio: (c), the ratios r_k/r_i: against the same sums with every radius equal to r_k.
    """

    deformation: Effect
    gradient_memory: Effect
    l2_memory: Effect
    radius_ratio: Effect


class Memory:
    """The sums behind c_k, kept by recursion: what an optimizer's momentum remembers of one parameter.

    With a^grad_k = β a^grad_{k−1} + ∇L(x_k) and p_k = β p_{k−1} + x_k, c^grad = r_k a^grad and c^L2 = p/r_k. The same
    sums with transported gradients, and on the unit sphere, make five tensors of the parameter's size.

    Call `update` once per step with the point and gradient that the step starts from. A row that has no direction adds
    nothing to the sums on the sphere. With `check=False` all updates but the first can be captured in a CUDA graph.

    Args:
        rows: how the parameter is cut into rows. None: points, gradients and steps are (n, d) rows in float32 or
            float64 already.
        check: raise on NaN and infinite entries; it synchronizes with the device.

    >>> memory = Memory()
    >>> x, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[-4.0, 3.0]])
    >>> memory.update(x, g, beta=0.9)
    >>> memory.c_grad.tolist(), memory.c_l2.tolist()
    ([[-20.0, 15.0]], [[0.6000000238418579, 0.800000011920929]])
    """

    def __init__(self, rows: Spec | None = "filter", *, check: bool = True) -> None:
        self.layout = None if rows is None else Layout(rows)
        self._check = check
        self._state: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, x: Tensors, gradient: Tensors, *, beta: float | Tensor, skip: Tensor | None = None) -> None:
        """Add the point x_k that a step starts from and ∇L(x_k), without L2; β may differ from step to step.

        If `skip`, one number, is not 0, the step was skipped and the sums stay as they were.
        """
        point, slope = self._rows(x, "x"), self._rows(gradient, "gradient")
        if point.shape != slope.shape:
            raise ValueError(f"x and gradient must have the same shape, got {(*point.shape,)} and {(*slope.shape,)}")
        r, u = geometry.split(point, check=self._check)
        if self._check:
            geometry.check_finite(geometry.norm(slope), "gradient")
        terms = {"gradients": slope, "points": point, "transported": slope, "sphere": r * slope, "directions": u}
        if self._state:
            before = {**self._state, "transported": geometry.transport(self._state["transported"], self._state["u"], u)}
        else:
            before = {name: torch.zeros_like(term) for name, term in terms.items()}
        sums = {name: before[name] * beta + term for name, term in terms.items()}
        if skip is not None:  # x has not moved, so nothing needs to be transported back
            sums = {name: torch.where(skip.reshape(()) != 0, before[name], value) for name, value in sums.items()}
        self.load({**sums, "r": r, "u": u})

    def state(self) -> dict[str, Tensor]:
        """The sums, and radius and direction of the last update; empty before the first."""
        return dict(self._state)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state`; in place if there are sums already."""
        if not self._state:
            self._state = {name: tensor.clone() for name, tensor in state.items()}
        for name, kept in self._state.items():
            # Zeros are as before the first update: nothing is transported from the direction 0.
            kept.copy_(state[name]) if state else kept.zero_()

    @property
    def c_grad(self) -> Tensor:
        """c^grad of the last update (Eq. 20), (n, d)."""
        return self._known("gradients") * self._known("r")

    @property
    def c_l2(self) -> Tensor:
        """c^L2 of the last update (Eq. 21), (n, d); 0 for a row without a direction."""
        points, r = self._known("points"), self._known("r")
        gone = geometry.collapsed(r)
        return (points / r.masked_fill(gone, 1)).masked_fill_(gone, 0)

    @torch.no_grad()
    def phenomena(self, step: Step | Sequence[Step]) -> Phenomena:
        """How large a, b1, b2 and c are in the step taken from the last update's point.

        Args:
            step: as `scheme.read_step` gives it; one per tensor for joint rows.
        """
        steps = [step] if isinstance(step, Step) else list(step)
        a, b = (self._rows([getattr(s, name) for s in steps], f"step.{name}") for name in ("a", "b"))
        r = self._known("r")
        weight = steps[0].l2 * r**2
        gradients, points = self.c_grad, weight * self.c_l2
        return Phenomena(
            deformation=self._effect(r * a / _deformation(b), r * a),
            gradient_memory=self._effect(gradients + points, r * self._known("transported") + points),
            l2_memory=self._effect(gradients + points, gradients),
            radius_ratio=self._effect(gradients + points, self._known("sphere") + weight * self._known("directions")),
        )

    def _effect(self, with_it: Tensor, without: Tensor) -> Effect:
        """Compares the parts tangent at u of a direction with a phenomenon and without it."""
        one, two = (geometry.tangent(direction, self._known("u")) for direction in (with_it, without))
        length = geometry.norm(one)
        change = geometry.norm(one - two) / length.masked_fill(length == 0, 1)
        return Effect(geometry.angle(one, two).squeeze(-1), change.squeeze(-1))

    def _known(self, name: str) -> Tensor:
        if not self._state:
            raise ValueError("the memory is empty: call update(x, gradient, beta=…) first")
        return self._state[name]

    def _rows(self, value: Tensors, name: str) -> Tensor:
        tensors = [value] if isinstance(value, Tensor) else list(value)
        if self.layout is None:
            return tensors[0]
        return self.layout.join([geometry.as_float(tensor.detach(), name) for tensor in tensors])


def _deformation(b: Tensor) -> Tensor:
    """b/b̄, the division vector without its scheduling effect (Eq. 13)."""
    return b / (geometry.norm(b) / b.shape[-1] ** 0.5)


def _faded(terms: Sequence[Tensor], beta: float) -> Tensor:
    """Σ_i β^{k−i} q_i over the terms q_0 … q_k."""
    return torch.stack([beta ** (len(terms) - 1 - i) * term for i, term in enumerate(terms)]).sum(0)


def _history(points: Sequence[Tensor], gradients: Sequence[Tensor], rows: Spec) -> tuple[list[Tensor], list[Tensor]]:
    n, n_gradients, layout = len(points), len(gradients), Layout(rows)
    if not n or n != n_gradients:
        raise ValueError(f"a history needs one gradient per point, got {n} points and {n_gradients} gradients")
    history, slopes = ([layout.rows(geometry.as_float(x.detach(), "x")) for x in xs] for xs in (points, gradients))
    for i, x in enumerate(history):
        if bool(geometry.collapsed(geometry.split(x)[0]).any()):
            raise ValueError(f"point {i} has a collapsed row, which has no direction")
    return history, slopes

"""The geometric phenomena in Adam (Section 4.1): where c_k comes from, and how large a, b1, b2 and c are in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steradian import geometry
from steradian.groups import Layout, Spec
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
    radii = [geometry.split(x)[0] for x in history]
    last = len(radii) - 1
    terms = [
        beta ** (last - i) * (radii[last] / r) * (r * g) for i, (r, g) in enumerate(zip(radii, slopes, strict=True))
    ]
    return torch.stack(terms).sum(0)


def c_l2(points: Sequence[Tensor], beta: float, rows: Spec = "filter") -> Tensor:
    """c_k^L2 = u_k + Σ_{i<k} β^{k−i} (r_i/r_k) u_i, (n, d) rows (Eq. 21).

    Args:
        points: x_0 … x_k, in the parameter's shape.
        beta: the momentum factor β.
        rows: how the parameter is cut into rows.
    """
    history, _ = _history(points, points, rows)
    polar = [geometry.split(x) for x in history]
    last = len(polar) - 1
    terms = [beta ** (last - i) * (r / polar[last][0]) * u for i, (r, u) in enumerate(polar)]
    return torch.stack(terms).sum(0)


def c(points: Sequence[Tensor], gradients: Sequence[Tensor], step: Step, rows: Spec = "filter") -> Tensor:
    """c_k = (c_k^grad + λr_k² c_k^L2) ⊘ (b_k/b̄_k) from the recorded history, (n, d) rows (Eq. 19).

    Args:
        points: x_0 … x_k, in the parameter's shape.
        gradients: ∇L(x_0) … ∇L(x_k), without L2.
        step: the step taken at x_k, of which β, λ and b are used.
        rows: how the parameter is cut into rows.
    """
    r = geometry.split(Layout(rows).rows(points[-1].detach()))[0]
    beta = float(step.beta)
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
        rescaled: ν^R_k of Adam without (abc) (App. D.2), whose summands are ‖∇L(u_i) + λr_i²u_i‖², free of
            r_k/r_i. (The paper prints λr_i r_k in them; the recursion of v, rescaled at every step, gives λr_i².)
    """
    history, slopes = _history(points, gradients, rows)
    beta1, beta2 = betas
    last, d = len(history) - 1, history[0].shape[-1]
    radius = geometry.norm(history[last])
    total = torch.zeros_like(radius)
    for i, (x, g) in enumerate(zip(history, slopes, strict=True)):
        ratio = geometry.norm(x) if rescaled else radius
        total += beta2 ** (last - i) * (ratio * geometry.norm(g + l2 * x)) ** 2
    share = (1 - beta1 ** (last + 1)) / (1 - beta1)
    return (share * ((1 - beta2) / (1 - beta2 ** (last + 1)) * total / d).sqrt()).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Effect:
    """How much one phenomenon changes a direction in the tangent space.

    Attributes:
        angle: between the direction with the phenomenon and without it, (n,), in radians.
        change: norm of their difference relative to the direction with it, (n,).
    """

    angle: Tensor
    change: Tensor


@dataclass(frozen=True, eq=False)
class Phenomena:
    """The four phenomena in one step, each as the turn of the effective direction that it causes (Section 4.1).

    (a) compares c^⊥ with the momentum before the division. The others compare the tangent part of that
    momentum, c^grad + λr²c^L2, with what it would be without the one phenomenon, all else kept.

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

    With a^grad_k = β a^grad_{k−1} + ∇L(x_k) and p_k = β p_{k−1} + x_k it is c^grad = r_k a^grad and
    c^L2 = p/r_k. Beside them it keeps the same sums with gradients transported from point to point, and on
    the unit sphere, where no radius enters: five tensors of the parameter's size.

    Call `update` once per step with the point and gradient that the step starts from. A row that has no
    direction adds nothing to the sums on the sphere. After the first update the sums stay where they are in
    memory, so that with `check=False` further ones can be captured in a CUDA graph.

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
        self._sums: dict[str, Tensor] = {}
        self._r: Tensor
        self._u: Tensor

    @torch.no_grad()
    def update(
        self,
        x: Tensor | Sequence[Tensor],
        gradient: Tensor | Sequence[Tensor],
        *,
        beta: float | Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """Add the point x_k and ∇L(x_k), without L2; β may differ from step to step.

        Args:
            x: the point that the step starts from.
            gradient: the gradient there.
            beta: the momentum factor β.
            skip: one number; if it is not 0, the step was skipped and the sums stay as they were.
        """
        point, slope = (self._rows(value, name) for value, name in ((x, "x"), (gradient, "gradient")))
        if point.shape != slope.shape:
            raise ValueError(
                f"x and gradient must have the same shape, got {tuple(point.shape)} and {tuple(slope.shape)}"
            )
        r, u = geometry.split(point, check=self._check)
        if self._check:
            geometry.check_finite(geometry.norm(slope), "gradient")
        terms = {"gradients": slope, "points": point, "transported": slope, "sphere": r * slope, "directions": u}
        if not self._sums:
            before = {name: torch.zeros_like(term) for name, term in terms.items()}
        else:
            before = {**self._sums, "transported": geometry.transport(self._sums["transported"], self._u, u)}
        sums = {name: before[name] * beta + term for name, term in terms.items()}
        if skip is not None:  # x has not moved, so nothing needs to be transported back
            sums = {name: torch.where(skip.reshape(()) != 0, before[name], value) for name, value in sums.items()}
        if not self._sums:
            self._sums, self._r, self._u = sums, r, u
        else:
            torch._foreach_copy_([*self._sums.values(), self._r, self._u], [*sums.values(), r, u])

    def state(self) -> dict[str, Tensor]:
        """The sums, and radius and direction of the last update; empty before the first."""
        return {**self._sums, "r": self._r, "u": self._u} if self._sums else {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state`; in place if there are sums already."""
        if self._sums and not state:
            # As before the first update: β times 0 is 0, and nothing is transported from the direction 0.
            torch._foreach_zero_([*self._sums.values(), self._r, self._u])
        elif self._sums:
            torch._foreach_copy_(list(self.state().values()), [state[name] for name in self.state()])
        elif state:
            self._sums = {name: tensor.clone() for name, tensor in state.items() if name not in ("r", "u")}
            self._r, self._u = state["r"].clone(), state["u"].clone()

    @property
    def c_grad(self) -> Tensor:
        """c^grad of the last update (Eq. 20), (n, d)."""
        return self._known("gradients") * self._r

    @property
    def c_l2(self) -> Tensor:
        """c^L2 of the last update (Eq. 21), (n, d); 0 for a row without a direction."""
        points, gone = self._known("points"), geometry.collapsed(self._r)
        return (points / self._r.masked_fill(gone, 1)).masked_fill_(gone, 0)

    @torch.no_grad()
    def phenomena(self, step: Step | Sequence[Step]) -> Phenomena:
        """How large a, b1, b2 and c are in the step taken from the last update's point.

        Args:
            step: as `scheme.read_step` gives it; one per tensor for joint rows.
        """
        steps = [step] if isinstance(step, Step) else list(step)
        a, b = (self._rows([getattr(s, name) for s in steps], f"step.{name}") for name in ("a", "b"))
        weight = steps[0].l2 * self._r**2
        gradients, points = self.c_grad, weight * self.c_l2
        transported, level = self._sums["transported"], self._sums["sphere"] + weight * self._sums["directions"]
        return Phenomena(
            deformation=self._effect(self._r * a / _deformation(b), self._r * a),
            gradient_memory=self._effect(gradients + points, self._r * transported + points),
            l2_memory=self._effect(gradients + points, gradients),
            radius_ratio=self._effect(gradients + points, level),
        )

    def _effect(self, with_it: Tensor, without: Tensor) -> Effect:
        """Compares the parts tangent at u of a direction with a phenomenon and without it."""
        one, two = geometry.tangent(with_it, self._u), geometry.tangent(without, self._u)
        length = geometry.norm(one)
        change = geometry.norm(one - two) / length.masked_fill(length == 0, 1)
        return Effect(geometry.angle(one, two).squeeze(-1), change.squeeze(-1))

    def _known(self, name: str) -> Tensor:
        if not self._sums:
            raise ValueError("the memory is empty: call update(x, gradient, beta=…) first")
        return self._sums[name]

    def _rows(self, value: Tensor | Sequence[Tensor], name: str) -> Tensor:
        tensors = [value] if isinstance(value, Tensor) else list(value)
        if self.layout is None:
            return tensors[0]
        return self.layout.join([geometry.as_float(tensor.detach(), name) for tensor in tensors])


def _deformation(b: Tensor) -> Tensor:
    """b/b̄, the division vector without its scheduling effect (Eq. 13)."""
    return b / (geometry.norm(b) / b.shape[-1] ** 0.5)


def _history(points: Sequence[Tensor], gradients: Sequence[Tensor], rows: Spec) -> tuple[list[Tensor], list[Tensor]]:
    if not points or len(points) != len(gradients):
        raise ValueError(
            f"a history needs one gradient per point, got {len(points)} points and {len(gradients)} gradients"
        )
    layout = Layout(rows)
    history = [layout.rows(geometry.as_float(x.detach(), "points")) for x in points]
    for i, x in enumerate(history):
        if bool(geometry.collapsed(geometry.split(x)[0]).any()):
            raise ValueError(f"point {i} has a collapsed row, which has no direction")
    return history, [layout.rows(geometry.as_float(g.detach(), "gradients")) for g in gradients]

"""The geometric phenomena in Adam (Section 4.1): where c_k comes from, and how large a, b1, b2 and c are in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steradian import geometry
from steradian.groups import Layout, Spec
from steradian.image import Tensors
from steradian.scheme import Step

__all__ = ["Memory", "Phenomena"]


@dataclass(frozen=True, eq=False)
class Phenomena:
    """The angle by which each of the four phenomena turns the effective direction of a step, (n,) (Section 4.1).

    (a) compares c^⊥ with the momentum before the division, the others compare the tangent part of that momentum,
    c^grad + λr²c^L2, with what it would be without the one phenomenon.
    """

    deformation: Tensor  #: (a), the element-wise division: against (r a)^⊥
    gradient_memory: Tensor  #: (b1), past gradients that left the tangent space: against their parallel transport
    l2_memory: Tensor  #: (b2), past points in the L2 term: against (c^grad)^⊥
    radius_ratio: Tensor  #: (c), the ratios r_k/r_i: against the same sums with every radius equal to r_k


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
        """c_k^grad = ∇L(u_k) + Σ_{i<k} β^{k−i} (r_k/r_i) ∇L(u_i) of the last update (Eq. 20), (n, d)."""
        return self._known("gradients") * self._known("r")

    @property
    def c_l2(self) -> Tensor:
        """c_k^L2 = u_k + Σ_{i<k} β^{k−i} (r_i/r_k) u_i (Eq. 21), (n, d); 0 for a row without a direction."""
        points, r = self._known("points"), self._known("r")
        gone = geometry.collapsed(r)
        return (points / r.masked_fill(gone, 1)).masked_fill_(gone, 0)

    @torch.no_grad()
    def phenomena(self, step: Step | Sequence[Step]) -> Phenomena:
        """How large a, b1, b2 and c are in the step from the last update's point; joint rows: one step per tensor."""
        steps = [step] if isinstance(step, Step) else list(step)
        a, b = (self._rows([getattr(s, name) for s in steps], f"step.{name}") for name in ("a", "b"))
        r = self._known("r")
        weight = steps[0].l2 * r**2
        gradients, points = self.c_grad, weight * self.c_l2
        deformation = b / (geometry.norm(b) / b.shape[-1] ** 0.5)  # b/b̄ (Eq. 13)
        return Phenomena(
            deformation=self._turn(r * a / deformation, r * a),
            gradient_memory=self._turn(gradients + points, r * self._known("transported") + points),
            l2_memory=self._turn(gradients + points, gradients),
            radius_ratio=self._turn(gradients + points, self._known("sphere") + weight * self._known("directions")),
        )

    def _turn(self, with_it: Tensor, without: Tensor) -> Tensor:
        """The angle between the tangent parts at u of a direction with a phenomenon and without it."""
        one, two = (geometry.tangent(direction, self._known("u")) for direction in (with_it, without))
        return geometry.angle(one, two).squeeze(-1)

    def _known(self, name: str) -> Tensor:
        if not self._state:
            raise ValueError("the memory is empty: call update(x, gradient, beta=…) first")
        return self._state[name]

    def _rows(self, value: Tensors, name: str) -> Tensor:
        tensors = [value] if isinstance(value, Tensor) else list(value)
        if self.layout is None:
            return tensors[0]
        return self.layout.join([geometry.as_float(tensor.detach(), name) for tensor in tensors])

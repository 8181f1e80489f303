"""What one step does on the sphere: Theorem 1, the effective quantities, the radius, the hypotheses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from steradian import geometry
from steradian.geometry import dot, norm
from steradian.groups import Layout, Spec
from steradian.scheme import Step

__all__ = ["ImageNumbers", "ImageStep", "image_of_rows", "image_step", "invariance_defect", "observed_step"]

Tensors = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class ImageNumbers:
    """The image of a step on the unit sphere in numbers per row (Theorem 1, Table 1).

    With q = a ⊘ b the step is x' = (r̃ − η⟨q,u⟩)u − ηq^⊥, from which every quantity follows exactly, even where H1
    fails. A decoupled decay δ first moves a row along its own direction: r̃ = (1 − ηδ)r takes the place of r.
    In the paper's letters b̄ = d^{-1/2}‖b‖, c = r̃ a ⊘ (b/b̄) and A = η/(r̃²b̄).

    Properties have the shape of the radius, (n,) for the n rows of one step. Those that cannot be known from two points
    alone are None in an observed step.
    """

    radius: Tensor  #: r
    start: Tensor  #: r̃
    inward: Tensor  #: ⟨q,u⟩
    across: Tensor  #: ‖q^⊥‖
    lr: float | Tensor  #: the rate η
    scale: Tensor | None  #: b̄; None in an observed step

    @cached_property
    def collapsed(self) -> Tensor:
        """The row has no direction before or after the step: its numbers are 0, and the hypotheses do not hold."""
        return geometry.collapsed(self.radius) | geometry.collapsed(self.next_radius)

    @cached_property
    def radial(self) -> Tensor | None:
        """A⟨c,u⟩ = η⟨q,u⟩/r̃, the share of the radius that the step removes; H1 bounds it by 1."""
        return None if self.scale is None else self._ratio(self.lr * self.inward, self.start)

    @cached_property
    def nu(self) -> Tensor | None:
        """ν = r̃ b̄, the second-order moment on the sphere (App. C.1.3)."""
        return None if self.scale is None else self.start * self.scale

    @cached_property
    def effective_lr(self) -> Tensor | None:
        """η^e = A/(1 − A⟨c,u⟩) (Eq. 14); infinite where H1 fails with equality, negative beyond."""
        return None if self.nu is None else (self.lr / self.nu / self._along).masked_fill(self.collapsed, 0)

    @cached_property
    def direction_norm(self) -> Tensor | None:
        """‖c^⊥‖."""
        return None if self.nu is None else self.across * self.nu

    @cached_property
    def velocity(self) -> Tensor:
        """z = η^e‖c^⊥‖, the speed of the step on the sphere; negative where H1 fails."""
        return self._ratio(self.across * self.lr, self._along)

    @cached_property
    def angle(self) -> Tensor:
        """The angle by which the direction turns: atan z, beyond π/2 where H1 fails."""
        return torch.atan2(self.across * self.lr, self._along).masked_fill(self.collapsed, 0)

    @cached_property
    def next_radius(self) -> Tensor:
        """r' = r̃(1 − A⟨c,u⟩)√(1+z²) (Eq. 17)."""
        return torch.hypot(self._along, self.across * self.lr)

    @cached_property
    def h1(self) -> Tensor:
        """Hypothesis H1, A⟨c,u⟩ < 1: the step does not cross the origin."""
        return (self._along > 0) & (self.start > 0) & ~self.collapsed

    @cached_property
    def h2(self) -> Tensor:
        """Hypothesis H2, z < π."""
        return (self.velocity.abs() < torch.pi) & ~self.collapsed

    @cached_property
    def taylor(self) -> Tensor:
        """The Taylor variable of Theorem 4, z²: for SGD (η_k‖∇L(u)‖)²/r⁴ of its L2-free twin (App. C.1.5)."""
        return self.velocity**2

    @cached_property
    def _along(self) -> Tensor:
        return self.start - self.lr * self.inward

    def _ratio(self, part: Tensor, whole: Tensor) -> Tensor:
        """part/whole, 0 where the part is 0 and where the row is collapsed."""
        return (part / whole.masked_fill(part == 0, 1)).masked_fill(self.collapsed, 0)


@dataclass(frozen=True, eq=False)
class ImageStep(ImageNumbers):
    """The image of one step on the unit sphere: the numbers of `ImageNumbers`, and vectors, row by row."""

    direction: Tensor  #: u, (n, d); 0 for a row without a direction
    tangential: Tensor  #: q^⊥, (n, d)

    @cached_property
    def effective_direction(self) -> Tensor | None:
        """c^⊥, (n, d): the direction of a step of rate η^e on the sphere (Eq. 13)."""
        return None if self.nu is None else self.tangential * self.nu.unsqueeze(-1)

    @cached_property
    def next_direction(self) -> Tensor:
        """u' = (u − η^e c^⊥)/√(1+z²), (n, d) (Eq. 15); 0 for a row that collapsed."""
        gone = geometry.collapsed(self.next_radius).unsqueeze(-1)
        point = self._along.unsqueeze(-1) * self.direction - self.lr * self.tangential
        return (point / self.next_radius.unsqueeze(-1).masked_fill(gone, 1)).masked_fill_(gone, 0)


@torch.no_grad()
def image_step(x: Tensors, step: Step | Sequence[Step], rows: Spec = "filter", *, check: bool = True) -> ImageStep:
    """The image on the sphere of a generic step (Theorem 1), decoupled decay included.

    Args:
        x: the parameter before the step, in its own shape; several tensors for joint rows.
        step: the step, as `scheme.read_step` gives it; one per tensor for joint rows.
        rows: how the parameter is cut into rows.
        check: raise on NaN and infinite entries; it synchronizes with the device.

    >>> x, b = torch.tensor([[3.0, 4.0]]), torch.ones(1, 2)
    >>> image = image_step(x, Step(a=torch.tensor([[-8.0, 6.0]]), b=b, lr=0.25))
    >>> image.velocity.item(), round(image.effective_lr.item(), 6), round(image.next_radius.item(), 6)
    (0.5, 0.01, 5.59017)
    """
    layout, steps = Layout(rows), [step] if isinstance(step, Step) else list(step)
    points, a, b = _joined(layout, {"x": x, "step.a": [s.a for s in steps], "step.b": [s.b for s in steps]})
    for name in ("lr", "decay"):
        values = [getattr(s, name) for s in steps]
        # As texts: a diverged training may have the rate NaN, which is not equal to itself.
        if len({str(value) for value in values if not isinstance(value, Tensor)}) > 1:
            raise ValueError(f"joint rows take one step together, but their {name} differ: {values}")
    return image_of_rows(points, Step(a, b, steps[0].lr, decay=steps[0].decay), check=check)


@torch.no_grad()
def image_of_rows(x: Tensor, step: Step, *, check: bool = True) -> ImageStep:
    """As `image_step`, for (n, d) rows in float32 or float64 and a step whose a and b have their shape."""
    if step.a.shape != x.shape or step.b.shape != x.shape:
        shapes = f"{(*x.shape,)}, {(*step.a.shape,)} and {(*step.b.shape,)}"
        raise ValueError(f"x, a and b must have one shape, got {shapes}")
    scale = norm(step.b).squeeze(-1) / x.shape[-1] ** 0.5
    return _decompose(x, step.a.to(x.dtype) / step.b, step.lr, step.decay, scale, "the step a ⊘ b" if check else "")


@torch.no_grad()
def observed_step(x: Tensors, x_next: Tensors, rows: Spec = "filter", *, check: bool = True) -> ImageStep:
    """What two points show of a step: radii, directions, angle and the product z = η^e‖c^⊥‖.

    It works for every optimizer. A⟨c,u⟩, η^e, c^⊥ and ν are None: the points show only their product.

    Args:
        x: the parameter before the step; several tensors for joint rows.
        x_next: the parameter after it.
        rows: how the parameter is cut into rows.
        check: raise on NaN and infinite entries; it synchronizes with the device.

    >>> image = observed_step(torch.tensor([[2.0, 0.0]]), torch.tensor([[2.0, 2.0]]))
    >>> image.velocity.item(), image.angle.item(), image.effective_lr
    (1.0, 0.785398..., None)
    """
    points, next_points = _joined(Layout(rows), {"x": x, "x_next": x_next})
    return _decompose(points, points - next_points, 1.0, 0.0, None, "x_next" if check else "")


def invariance_defect(slope: Tensor, length: Tensor) -> Tensor:
    """|cos(x, ∇L)| of each row from ⟨u,∇L⟩ and ‖∇L‖: 0 if the row is invariant (Lemma 1), and for a gradient of 0."""
    return (slope.abs() / length.masked_fill(length == 0, 1)).clamp(max=1)


def _decompose(
    x: Tensor, q: Tensor, lr: float | Tensor, decay: float | Tensor, scale: Tensor | None, checked: str
) -> ImageStep:
    """Split q, which is overwritten, into its parts along u and orthogonal to u; `checked` is its name, if it is."""
    r, u = geometry.split(x, check=bool(checked))
    inward = dot(q, u)
    tangential = q.addcmul_(inward, u, value=-1)
    radius, start, inward, across = (t.squeeze(-1) for t in (r, r * (1 - lr * decay), inward, norm(tangential)))
    image = ImageStep(radius, start, inward, across, lr, scale, direction=u, tangential=tangential)
    if checked:
        geometry.check_finite(image.next_radius.unsqueeze(-1), checked)
    return image


def _joined(layout: Layout, named: Mapping[str, Tensors]) -> list[Tensor]:
    """The rows of lists of tensors that have the shapes of the first list, x."""
    lists = {name: [each] if isinstance(each, Tensor) else list(each) for name, each in named.items()}
    shapes = {name: [tuple(tensor.shape) for tensor in each] for name, each in lists.items()}
    first = shapes["x"]
    for name, others in shapes.items():
        if others != first:
            raise ValueError(f"x and {name} must have the same shapes, got {first} and {others}")
    if any(tensor.numel() == 0 for tensor in lists["x"]):
        raise ValueError(f"x has no entries: its shape is {first if len(first) > 1 else first[0]}")
    return [layout.join([geometry.as_float(t.detach(), name) for t in each]) for name, each in lists.items()]

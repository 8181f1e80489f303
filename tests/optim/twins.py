"""Slow twins of the optimizers: float64, one row vector at a time, written from the formulas of the paper.

Nothing here is shared with the library: rows are picked by counting indices, and parallel transport is a
rotation matrix. A twin keeps its own parameters and moments and only sees gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


def turn(u: Vector, e: Vector, theta: float) -> Matrix:
    """Rotation by θ in the plane of the orthonormal u and e: u ↦ cosθ u + sinθ e, e ↦ −sinθ u + cosθ e.

    R = I + (sinθ e + (cosθ − 1) u) uᵀ + ((cosθ − 1) e − sinθ u) eᵀ; what is orthogonal to the plane stays.
    """
    sine, lost = np.sin(theta), 2 * np.sin(theta / 2) ** 2
    return np.eye(len(u)) + np.outer(sine * e - lost * u, u) - np.outer(lost * e + sine * u, e)


def transport(a: Vector, u: Vector, p: Vector) -> Vector:
    """Parallel transport from u to p, along the shortest geodesic, of the tangent part of a.

    On a sphere it is the rotation that takes u to p in their plane, applied to a − ⟨a,u⟩u. The tangent part is
    taken a second time at p, for vectors that are almost radial and lose their digits in the first.
    """
    a = a - (a @ u) * u
    chord = p - u
    heading = chord - (chord @ u) * u
    length = np.linalg.norm(heading)
    if length == 0:
        if p @ u < 0 and len(u) > 1:
            raise ValueError("no shortest geodesic between antipodes")
        return a
    e = heading / length
    a = turn(u, e, float(np.arctan2(p @ e, p @ u))) @ a
    return a - (a @ p) * p


def carried(m: Vector, x: Vector, x_next: Vector, without: str) -> tuple[Vector, float]:
    """The momentum as it enters the next step, and the ratio r/r' (1 where "c" is kept).

    "b" (App. D.2): the tangent part of m is transported from u to u', the radial part is dropped.
    "c" (App. D.2): m is multiplied by r/r', with r the radius where the gradients of m were taken.
    """
    r, r_next = np.linalg.norm(x), np.linalg.norm(x_next)
    ratio = float(r / r_next) if "c" in without else 1.0
    if "b" in without:
        m = transport(m, x / r, x_next / r_next)
    return ratio * m, ratio


@dataclass
class Adam:
    """Adam without any of the phenomena a, b, c (Section 4.2, App. D.2, Algorithm 1), for one row.

    g = ∇L + λx (coupled), or x ← (1 − ηλ)x before the step (decoupled)
    m ← β1 m + (1 − β1) g
    v ← β2 v + (1 − β2) g², element by element; with "a" the mean of g² over the row instead
    x' = x − η m̂ / (√v̂ + ε), with m̂ = m/(1 − β1^k), v̂ = v/(1 − β2^k), k = 1, 2, …
    then "b": m ← Γ_u^{u'}(m^⊥), and "c": m ← (r/r') m, v ← (r/r')² v, r the radius before any decay, since a
    gradient taken at radius r is 1/r of the one on the sphere.
    """

    x: Vector
    without: str = ""
    steps: int = 0
    m: Vector = field(init=False)
    v: Vector | float = field(init=False)

    def __post_init__(self) -> None:
        self.m = np.zeros_like(self.x)
        self.v = 0.0 if "a" in self.without else np.zeros_like(self.x)

    def step(
        self,
        gradient: Vector,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
    ) -> None:
        start, (beta1, beta2) = self.x, betas
        self.steps += 1
        g = -gradient if maximize else gradient
        x = start
        if decoupled_weight_decay:
            x = (1 - lr * weight_decay) * start
        else:
            g = g + weight_decay * start
        square = (g @ g) / len(g) if "a" in self.without else g * g
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * square
        m_hat = self.m / (1 - beta1**self.steps)
        v_hat = self.v / (1 - beta2**self.steps)
        self.x = x - lr * m_hat / (np.sqrt(v_hat) + eps)
        if "b" in self.without or "c" in self.without:
            self.m, ratio = carried(self.m, start, self.x, self.without)
            self.v = ratio**2 * self.v


@dataclass
class SGD:
    """SGD with momentum, with and without the phenomena b and c, for one row; torch's conventions.

    g = ∇L + λx
    m ← g in the first step, then μ m + (1 − τ) g with the dampening τ
    x' = x − η m, or x − η (g + μ m) with Nesterov's momentum, or x − η g where μ = 0
    then "b": m ← Γ_u^{u'}(m^⊥), and "c": m ← (r/r') m.
    """

    x: Vector
    without: str = ""
    m: Vector | None = None

    def step(
        self,
        gradient: Vector,
        *,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        start = self.x
        g = (-gradient if maximize else gradient) + weight_decay * start
        if momentum == 0:
            self.x = start - lr * g
            return
        self.m = g if self.m is None else momentum * self.m + (1 - dampening) * g
        self.x = start - lr * (g + momentum * self.m if nesterov else self.m)
        if "b" in self.without or "c" in self.without:
            self.m, _ = carried(self.m, start, self.x, self.without)


def on_the_sphere(x: Vector) -> tuple[Vector, float]:
    """The direction of a row, and what turns a gradient at x into one there."""
    r = float(np.linalg.norm(x))
    return x / r, r


@dataclass
class AdaGradG:
    """AdaGradG (Section 3.2) for one row on the unit sphere: v is used first and updated afterwards.

    x̂ = x − η ∇L/√v;  x' = x̂/‖x̂‖;  v ← β v + ‖∇L‖².
    A row may start at any radius: the first step is taken at u, where ∇L(u) = r∇L(x) (Lemma 1).
    """

    x: Vector
    v: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.x, self.scale = on_the_sphere(self.x)

    def step(self, gradient: Vector, *, lr: float, beta: float, maximize: bool = False) -> None:
        g = (-self.scale if maximize else self.scale) * gradient
        self.scale = 1.0
        moved = self.x - lr * g / np.sqrt(self.v)
        self.x = moved / np.linalg.norm(moved)
        self.v = beta * self.v + float(g @ g)


def adagradg_from_sgd(lr: float, weight_decay: float, radius: float) -> dict[str, float]:
    """The constants of Theorem 4: β = (1 − ηλ)⁴, rate (2β)^{−1/2}, v_0 = r_0⁴/(2η²β^{1/2})."""
    beta = (1 - lr * weight_decay) ** 4
    return {"lr": (2 * beta) ** -0.5, "beta": beta, "v0": radius**4 / (2 * lr**2 * beta**0.5)}


@dataclass
class AdamG:
    """Adam-G on the unit sphere for one row: Cho & Lee's algorithm, or the retraction of the paper.

    h = ∇L − ⟨∇L,x⟩x, and h ← h·min(1, clip/‖h‖)
    m ← β1 m + (1 − β1) h;  v ← β2 v + (1 − β2)‖h‖²
    δ = −η √(1 − β2^k)/(1 − β1^k) · m/√(v + ε)
    x' = cos‖δ‖ x + sin‖δ‖ δ/‖δ‖, or (x + δ)/‖x + δ‖ as the retraction; m transported from x to x'.
    A row may start at any radius: the first step is taken at u, where ∇L(u) = r∇L(x) (Lemma 1).
    """

    x: Vector
    steps: int = 0
    v: float = 0.0
    m: Vector = field(init=False)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.x, self.scale = on_the_sphere(self.x)
        self.m = np.zeros_like(self.x)

    def step(
        self,
        gradient: Vector,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        clip: float | None = 0.1,
        retraction: bool = False,
        maximize: bool = False,
    ) -> None:
        x, (beta1, beta2) = self.x, betas
        self.steps += 1
        g = (-self.scale if maximize else self.scale) * gradient
        self.scale = 1.0
        h = g - (g @ x) * x
        length = np.linalg.norm(h)
        if clip is not None and length > clip:
            h = h * (clip / length)
        self.m = beta1 * self.m + (1 - beta1) * h
        self.v = beta2 * self.v + (1 - beta2) * float(h @ h)
        rate = lr * np.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        delta = -rate * self.m / np.sqrt(self.v + eps)
        theta = np.linalg.norm(delta)
        if theta == 0:
            return
        if retraction:
            self.x = (x + delta) / np.linalg.norm(x + delta)
            self.m = transport(self.m, x, self.x)
        else:
            along = turn(x, delta / theta, float(theta))
            self.x, self.m = along @ x, along @ self.m


@dataclass
class AdamP:
    """AdamP where it projects, for one row: the radial part of Adam's step is removed, the decay is scaled.

    m, v, m̂, √v̂ + ε as in Adam (no L2 in the gradient); q = m̂/(√v̂ + ε), with Nesterov
    (β1 m + (1 − β1)g)/(1 − β1^k) for m̂; ū = x/(‖x‖ + ε); q^⊥ = q − ⟨q,ū⟩ū; x' = (1 − ηλρ)x − η q^⊥.
    `projected=False`: the parameters that are not radial, q instead of q^⊥ and ρ = 1.
    """

    x: Vector
    projected: bool = True
    steps: int = 0
    m: Vector = field(init=False)
    v: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)

    def step(
        self,
        gradient: Vector,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        g, (beta1, beta2) = (-gradient if maximize else gradient), betas
        self.steps += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        ahead = beta1 * self.m + (1 - beta1) * g if nesterov else self.m
        q = ahead / (1 - beta1**self.steps) / (np.sqrt(self.v / (1 - beta2**self.steps)) + eps)
        if self.projected:
            unit = self.x / (np.linalg.norm(self.x) + eps)
            q = q - (q @ unit) * unit
        decay = weight_decay * (wd_ratio if self.projected else 1.0)
        self.x = (1 - lr * decay) * self.x - lr * q


def numbers(tensor: torch.Tensor) -> Vector:
    """The entries of a tensor in logical order, as float64."""
    return tensor.detach().to("cpu", torch.float64, copy=True).numpy().ravel()


def members(spec: Any, shape: Sequence[int]) -> list[list[int]]:
    """Positions of the entries of each row in the flattened tensor: every index is asked where it belongs.

    A layout of None is one row.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for position, index in enumerate(np.ndindex(*shape)):
        if spec is None or spec == "tensor":
            key: tuple[int, ...] = ()
        elif spec == "filter":
            key = (index[0],)
        elif isinstance(spec, int):
            key = (index[0] // (shape[0] // spec),)
        elif spec[0] == "axis":
            key = (index[spec[1]],)
        else:
            sizes = [1 if g == -1 else s // g for s, g in zip(shape, spec[1:], strict=False)]
            key = tuple(i // size for i, size in zip(index, sizes, strict=False))
        rows.setdefault(key, []).append(position)
    return [rows[key] for key in sorted(rows)]


class Rows:
    """The rows of one param group, each stepped by its own twin.

    Args:
        make: from the starting point of a row to its twin.
        tensors: the parameters. Without `joint` each has its own rows; with it, row i is row i of every one.
        spec: the layout, None for parameters that are not radial.
    """

    def __init__(
        self,
        make: Callable[[Vector], Any],
        tensors: Sequence[torch.Tensor],
        spec: Any = None,
        joint: bool = False,
    ):
        self.where = [members(spec, tuple(t.shape)) for t in tensors]
        self.joint = joint
        self.rows = [make(x) for x in self.cut(tensors)]

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[Vector]:
        """The rows of tensors that are shaped as the parameters."""
        flat = [numbers(t) for t in tensors]
        parts = [[entries[row] for row in rows] for entries, rows in zip(flat, self.where, strict=True)]
        if self.joint:
            return [np.concatenate(same) for same in zip(*parts, strict=True)]
        return [row for part in parts for row in part]

    def step(self, gradients: Sequence[torch.Tensor], **options: Any) -> None:
        """One step of every row."""
        for row, gradient in zip(self.rows, self.cut(gradients), strict=True):
            row.step(gradient, **options)

    def get(self, name: str) -> list[Any]:
        """One attribute of every row's twin: x, m, v."""
        return [getattr(row, name) for row in self.rows]


# What the twins are compared with, and on

SUBSETS = ["", "a", "b", "c", "ab", "ac", "bc", "abc"]


@dataclass(frozen=True)
class Implementation:
    """One way to compute a step, and how far from the float64 twin it may end."""

    name: str
    dtype: torch.dtype
    tolerance: float
    steps: int = 100
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


Cut = list[tuple[list[nn.Parameter], dict[str, Any]]]


def batch_norm_network() -> tuple[nn.Module, Cut, tuple[int, ...]]:
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU()),
        *(nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(45, 3)),
    )
    return model, [([model[0].weight, model[3].weight], {"rows": "filter"})], (8, 2, 7, 7)


def group_norm_network() -> tuple[nn.Module, Cut, tuple[int, ...]]:
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU()),
        *(nn.Conv2d(4, 6, 3, bias=False), nn.GroupNorm(3, 6), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(54, 3)),
    )
    joint = {"rows": 2, "joint": True}
    return model, [([model[0].weight, model[0].bias], joint), ([model[3].weight], {"rows": 3})], (8, 2, 7, 7)


def layer_norm_network() -> tuple[nn.Module, Cut, tuple[int, ...]]:
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU()),
        *(nn.Linear(8, 7, bias=False), nn.LayerNorm(7), nn.SiLU()),
        nn.Linear(7, 3),
    )
    joint = {"rows": "tensor", "joint": True}
    return (
        model,
        [([model[0].weight, model[0].bias], joint), ([model[3].weight], {"rows": "tensor"})],
        (16, 6),
    )


NETWORKS = {"bn": batch_norm_network, "gn": group_norm_network, "ln": layer_norm_network}


def network(name: str, implementation: Implementation) -> tuple[nn.Module, Cut, Iterator[None]]:
    """A seeded network, its param groups (the rest comes last), and a stream of training gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, cut, shape = NETWORKS[name]()
    model.to(implementation.device, implementation.dtype)
    radial = {id(p) for tensors, _ in cut for p in tensors}
    cut.append(([p for p in model.parameters() if id(p) not in radial], {}))

    def train() -> Iterator[None]:
        draw = torch.Generator().manual_seed(7)
        for _ in range(implementation.steps):
            inputs = torch.randn(shape, generator=draw, dtype=torch.float64)
            labels = torch.randint(3, shape[:1], generator=draw).to(implementation.device)
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs.to(next(model.parameters()))), labels).backward()
            yield

    return model, cut, train()

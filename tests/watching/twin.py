"""A slow twin of everything that is recorded: float64, row by row, from points and gradients alone.

It keeps the whole history (x_i, ∇L(x_i)) of a training, forms a_k and b_k by the paper's sums (Section 2.2 and
Appendix D) and derives each quantity from its definition. It shares no code with the package.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

FLOORS = {"defect": 1e-13, "radial": 1e-13, "radial_share": 1e-11}
"""Quantities that are a difference of nearly equal numbers, and what rounding leaves of it."""


def rows_of(tensors, layout):
    """One (n, d) array from one parameter, or from several that are invariant together."""
    parts = []
    for tensor in tensors:
        array = tensor.detach().double().numpy()
        blocks = {"filter": len(array), "tensor": 1}.get(layout, layout)
        parts.append([block.ravel().copy() for block in np.split(array, blocks)])
    return np.stack([np.concatenate(pieces) for pieces in zip(*parts, strict=True)])


def tangent(q, u):
    return q - (q @ u) * u


def turn(p, q):
    """The angle between two vectors, well conditioned near 0 and π; 0 where one of them vanishes."""
    p_norm, q_norm = np.linalg.norm(p), np.linalg.norm(q)
    if p_norm == 0 or q_norm == 0:
        return 0.0
    p, q = p / p_norm, q / q_norm
    return 2 * np.arctan2(np.linalg.norm(p - q), np.linalg.norm(p + q))


def relative_size(x, x_next):
    return np.linalg.norm(x_next - x) / np.linalg.norm(x)


def radial_share(x, x_next):
    length = np.linalg.norm(x_next - x)
    return abs((x_next - x) @ x) / np.linalg.norm(x) / length if length else 0.0


def carry(q, path):
    """Parallel transport of a tangent vector along great arcs from each point of the path to the next.

    In the plane of an arc the vector turns with it, across the plane it stays.
    """
    for u, p in pairwise(path):
        ahead = tangent(p, u)
        length = np.linalg.norm(ahead)
        if length == 0:
            continue
        e = ahead / length  # (u, e) spans the plane; the arc is cos t u + sin t e
        along = q @ e
        q = q - along * e + along * (-length * u + (p @ u) * e)
    return q


@dataclass
class Row:
    """The history of one row: x_0 … x_k, ∇L(x_0) … ∇L(x_k), η_0 … η_k."""

    points: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    rates: list = field(default_factory=list)

    def radius(self, i):
        return np.linalg.norm(self.points[i])

    def direction(self, i):
        return self.points[i] / self.radius(i)

    @property
    def now(self):
        return len(self.points) - 1


@dataclass(frozen=True)
class Generic:
    """What SGD, Adam, AdamW and the variants without phenomena have in common.

    a_k = Σ w_i (∇L(x_i) + λx_i). Without (b) a past term is its tangent part, transported; without (c) it is
    multiplied by r_i/r_k. Ascent (`maximize`) takes −∇L for ∇L.
    """

    l2: float = 0.0
    decay: float = 0.0
    without: str = ""
    maximize: bool = False

    def weights(self, k):
        raise NotImplementedError

    def divisor(self, row):
        raise NotImplementedError

    def slope(self, row, i):
        return -row.gradients[i] if self.maximize else row.gradients[i]

    def left(self, row, i, q):
        """What is left at step k of a term q of step i."""
        k = row.now
        if i < k and "b" in self.without:
            q = carry(tangent(q, row.direction(i)), [row.direction(j) for j in range(i, k + 1)])
        return q * row.radius(i) / row.radius(k) if "c" in self.without else q

    def terms(self, row):
        """What is left of each ∇L(x_i) and of each λx_i, with their weights."""
        weights = list(enumerate(self.weights(row.now)))
        gradients = [w * self.left(row, i, self.slope(row, i)) for i, w in weights]
        return gradients, [w * self.left(row, i, self.l2 * row.points[i]) for i, w in weights]

    def quantities(self, row):
        """The next point, and everything that is recorded at the last point of the history."""
        x, g, lr = row.points[-1], row.gradients[-1], row.rates[-1]
        gradients, points = self.terms(row)
        a, b = sum(gradients) + sum(points), self.divisor(row)
        r, u, d = np.linalg.norm(x), x / np.linalg.norm(x), len(x)
        start = (1 - lr * self.decay) * r
        b_bar = np.linalg.norm(b) / np.sqrt(d)
        c = start * a / (b / b_bar)
        A = lr / (start**2 * b_bar)
        radial = A * (c @ u)
        effective = A / (1 - radial)
        across = tangent(c, u)
        x_next = (1 - lr * self.decay) * x - lr * a / b
        return x_next, {
            "radius": r,
            "effective_lr": effective,
            "direction_norm": np.linalg.norm(across),
            "velocity": effective * np.linalg.norm(across),
            "angle": turn(x, x_next),
            "radial": radial,
            "taylor": (effective * np.linalg.norm(across)) ** 2,
            "nu": start * b_bar,
            "deformation": turn(across, tangent(a, u)),
            **self.phenomena(row, gradients, points),
            **seen(x, g),
            "lr": lr,
        }

    def phenomena(self, row, gradients, points):
        """(b1), (b2), (c): the angle between the momentum across u with each and without it (Section 4.1)."""
        k, u = row.now, row.direction(row.now)
        radii = [row.radius(i) for i in range(k + 1)]
        path = [row.direction(i) for i in range(k + 1)]
        carried, level = gradients, gradients + points
        if "b" not in self.without:
            carried = [carry(tangent(g, path[i]), path[i:]) for i, g in enumerate(gradients)]
        if "c" not in self.without:
            level = [g * r / radii[k] for g, r in zip(gradients, radii, strict=True)]
            level += [x * radii[k] / r for x, r in zip(points, radii, strict=True)]
        whole = tangent(sum(gradients) + sum(points), u)
        return {
            "gradient_memory": turn(whole, tangent(sum(carried) + sum(points), u)),
            "l2_memory": turn(whole, tangent(sum(gradients), u)),
            "radius_ratio": turn(whole, tangent(sum(level), u)),
        }


@dataclass(frozen=True)
class Observed(Generic):
    """What two points tell of any optimizer."""

    def quantities(self, row):
        return None, {"radius": row.radius(row.now), **seen(row.points[-1], row.gradients[-1]), "lr": row.rates[-1]}

    def moved(self, row, x):
        angle = turn(row.points[-1], x)
        return {"angle": angle, "velocity": np.tan(angle), "taylor": np.tan(angle) ** 2}


def seen(x, g):
    """What a point and its gradient tell, whatever the optimizer."""
    norms = np.linalg.norm(x) * np.linalg.norm(g)
    return {
        "defect": abs(x @ g) / norms if norms else 0.0,
        "gradient_norm": np.linalg.norm(g),
        "collapsed": float(np.linalg.norm(x) < np.finfo(float).tiny),
    }


@dataclass(frozen=True)
class SGDTwin(Generic):
    """a_k = Σ μ^{k−i} (∇L(x_i) + λx_i) and b = 1.

    torch begins its buffer with the first gradient undamped, and damps later ones; a is in units of a gradient, so
    the damping 1 − τ moves to b. Nesterov's step is along the gradient plus μ times the buffer.
    """

    momentum: float | tuple = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def weights(self, k):
        if isinstance(self.momentum, tuple):  # one for each step
            return [float(np.prod(self.momentum[i + 1 : k + 1])) for i in range(k + 1)]
        weights = [self.momentum ** (k - i) for i in range(k + 1)]
        if self.momentum and self.dampening:
            weights[0] /= 1 - self.dampening
        if self.nesterov:
            weights = [self.momentum * w for w in weights]
            weights[k] += 1
        return weights

    def divisor(self, row):
        damped = self.momentum and self.dampening
        return np.full(len(row.points[-1]), 1 / (1 - self.dampening) if damped else 1.0)


@dataclass(frozen=True)
class AdamTwin(Generic):
    """a = m/(1−β1) and b = (1−β1^{k+1})/(1−β1) · (√(v/(1−β2^{k+1})) + ε), v per row without (a)."""

    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def weights(self, k):
        return [self.betas[0] ** (k - i) for i in range(k + 1)]

    def second(self, row, k):
        v = 0.0
        for i in range(k + 1):
            square = (self.slope(row, i) + self.l2 * row.points[i]) ** 2
            if "a" in self.without:
                square = np.full(len(square), square.mean())
            if "c" in self.without:
                square = square * (row.radius(i) / row.radius(k)) ** 2
            v = v + (1 - self.betas[1]) * self.betas[1] ** (k - i) * square
        return v

    def divisor(self, row):
        k, (beta1, beta2) = row.now, self.betas
        v = self.second(row, k)
        if self.amsgrad:
            v = np.max([self.second(row, i) for i in range(k + 1)], axis=0)
        return (1 - beta1 ** (k + 1)) / (1 - beta1) * (np.sqrt(v / (1 - beta2 ** (k + 1))) + self.eps)


@dataclass(frozen=True)
class AdagradTwin(Generic):
    """a = ∇L(x) + λx and b = √(Σ (∇L + λx)²) + ε."""

    eps: float = 1e-10

    def weights(self, k):
        return [0.0] * k + [1.0]

    def divisor(self, row):
        squares = [(self.slope(row, i) + self.l2 * row.points[i]) ** 2 for i in range(row.now + 1)]
        return np.sqrt(sum(squares)) + self.eps


@dataclass(frozen=True)
class RMSpropTwin(AdagradTwin):
    """a = ∇L(x) + λx and b = √(α-mean of (∇L + λx)²) + ε."""

    alpha: float = 0.99

    def divisor(self, row):
        k = row.now
        squares = [
            (1 - self.alpha) * self.alpha ** (k - i) * (self.slope(row, i) + self.l2 * row.points[i]) ** 2
            for i in range(k + 1)
        ]
        return np.sqrt(sum(squares)) + self.eps


@dataclass(frozen=True)
class Sphere(Generic):
    """Optimizers that hold rows on the unit sphere: the first step starts from u, with ∇L(u) = r∇L(x).

    The image of the generic step is (u − η^e c^⊥)/‖…‖, so a move by the angle θ has z = tan θ, also along the
    exponential map, and ν follows from η^e = η/(rν) (Table 1, with r = 1 and ⟨c,u⟩ = 0).
    """

    def row_on_sphere(self, row):
        first = row.radius(0)
        return Row(
            points=[row.points[0] / first, *row.points[1:]],
            gradients=[row.gradients[0] * first, *row.gradients[1:]],
            rates=row.rates,
        )

    def move(self, row):
        """a and b of the move −η a/b along the tangent space."""
        raise NotImplementedError

    def land(self, row, delta):
        raise NotImplementedError

    def quantities(self, row):
        x, lr = row.points[-1], row.rates[-1]
        on = self.row_on_sphere(row)
        a, b = self.move(on)
        u = on.direction(on.now)
        x_next = self.land(on, -lr * a / b)
        angle = turn(x, x_next)
        across = np.linalg.norm(tangent(a, u))
        return x_next, {
            "angle": angle,
            "velocity": np.tan(angle),
            "taylor": np.tan(angle) ** 2,
            "direction_norm": across,
            "effective_lr": np.tan(angle) / across,
            "radial": lr / b * (a @ u),
            "nu": lr * across / np.tan(angle),
            "radius": 1.0,
            **seen(x, on.gradients[-1]),
            "lr": lr,
        }


@dataclass(frozen=True)
class AdaGradGTwin(Sphere):
    """x' = (x − η∇L(x)/√v)/‖…‖; v before step k is β^k v_0 + Σ_{i<k} β^{k−1−i}‖∇L(x_i)‖²."""

    beta: float = 1.0
    v0: float = 1.0

    def move(self, row):
        k = row.now
        v = self.beta**k * self.v0
        v += sum(self.beta ** (k - 1 - i) * (row.gradients[i] @ row.gradients[i]) for i in range(k))
        return row.gradients[-1], np.sqrt(v)

    def land(self, row, delta):
        x = row.points[-1] + delta
        return x / np.linalg.norm(x)


@dataclass(frozen=True)
class AdamGTwin(Sphere):
    """Cho and Lee's: tangent gradients, clipped; one second moment per row; the exponential map."""

    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    clip: float = 0.1
    retraction: bool = False

    def slopes(self, row):
        found = []
        for i in range(row.now + 1):
            h = tangent(row.gradients[i], row.direction(i))
            norm = np.linalg.norm(h)
            found.append(h if self.retraction or norm <= self.clip else h * self.clip / norm)
        return found

    def move(self, row):
        k, (beta1, beta2) = row.now, self.betas
        path = [row.direction(i) for i in range(k + 1)]
        slopes = self.slopes(row)
        a = sum(beta1 ** (k - i) * carry(h, path[i:]) for i, h in enumerate(slopes))
        v = sum((1 - beta2) * beta2 ** (k - i) * (h @ h) for i, h in enumerate(slopes))
        b = (1 - beta1 ** (k + 1)) / (1 - beta1) * np.sqrt((v + self.eps) / (1 - beta2 ** (k + 1)))
        return a, b

    def land(self, row, delta):
        x, length = row.points[-1], np.linalg.norm(delta)
        if self.retraction:
            return (x + delta) / np.linalg.norm(x + delta)
        return x * np.cos(length) + delta / length * np.sin(length)


class Twin:
    """The history of all rows of a group, and what should be recorded of each step."""

    def __init__(self, tensors, layout, scheme):
        self.tensors, self.layout, self.scheme = tensors, layout, scheme
        self.rows, self.expected = [], []
        self.predicted = None

    def before(self, lr):
        """Take in the points, the gradients and the rate of the step that comes now."""
        points = rows_of(self.tensors, self.layout)
        gradients = rows_of([tensor.grad for tensor in self.tensors], self.layout)
        self.rows = self.rows or [Row() for _ in points]
        for row, x, g in zip(self.rows, points, gradients, strict=True):
            row.points.append(x)
            row.gradients.append(g)
            row.rates.append(float(lr))
        predicted, per_row = zip(*map(self.scheme.quantities, self.rows), strict=True)
        self.expected.append({name: np.array([q[name] for q in per_row]) for name in per_row[0]})
        self.predicted = predicted

    def _moved(self, points):
        """The size of the update and its radial share, from two points."""
        on = self.scheme.row_on_sphere if isinstance(self.scheme, Sphere) else lambda row: row
        before = [on(row).points[-1] for row in self.rows]
        for name, of in (("update", relative_size), ("radial_share", radial_share)):
            self.expected[-1][name] = np.array([of(x, y) for x, y in zip(before, points, strict=True)])

    def after(self, *, rtol=1e-11):
        """The optimizer must have gone where the sums say, else the twin is of another optimizer."""
        points = rows_of(self.tensors, self.layout)
        self._moved(points)
        if isinstance(self.scheme, Observed):
            per_row = [self.scheme.moved(row, x) for row, x in zip(self.rows, points, strict=True)]
            self.expected[-1] |= {name: np.array([q[name] for q in per_row]) for name in per_row[0]}
            return
        np.testing.assert_allclose(points, self.predicted, rtol=0, atol=rtol * np.abs(points).max())

"""The steps in plain torch, row by row: the oracle of the fused ones, for any device and dtype.

One function per optimizer, whose class has the formulas, called with the rows of one parameter (or joint set) and its
param group. Rows are (n, d), numbers per row (n, 1); x is a row before the step and y the row after it. Nothing is read
back from the device. In all but SGD a row whose ‖∇L(x)‖² is not finite takes no step.
"""

import math

import torch
from torch import Tensor

from steradian import geometry
from steradian.geometry import dot, failing, norm, square, zeroed
from steradian.optim.rows import Options, RowSet, decay_of, exact, rate_of
from steradian.optim.transport import Motion, carry, carry_in_plane, emit


def adam(rows: RowSet, group: Options) -> None:
    """Adam without any of (a), (b), (c) (Section 4.2, App. D.2, Algorithm 1).

    Where (b) is neutralized the L2 term never enters m, since the transport drops it: it acts through
    x' = (1 − s(1−β1)λ)x − s m, so a row without a gradient keeps its direction.
    """
    step = rows.advance()
    beta1, beta2 = group["betas"]
    pace, root = rate_of(group) / (1 - beta1**step), (1 - beta2**step) ** 0.5
    v = rows.number("exp_avg_sq") if "a" in group["without"] else None
    for piece, tensors in rows.pieces("param", "grad", "exp_avg", *(["exp_avg_sq"] if v is None else [])):
        _adam(rows, piece, tensors if v is None else [*tensors, v[piece]], group, pace, root)
    if v is not None:
        rows.share("exp_avg_sq")


def _adam(
    rows: RowSet, piece: slice, tensors: list[Tensor], group: Options, pace: float | Tensor, root: float | Tensor
) -> None:
    """One piece of `adam`, whose temporaries are freed before the next piece."""
    x, gradient, m, v = tensors
    without, (beta1, beta2), decay = group["without"], group["betas"], decay_of(group)
    decays, decoupled = group["weight_decay"] != 0, group["decoupled_weight_decay"]
    gradient = -gradient if group["maximize"] else gradient
    g = _with_l2(gradient, x, decay) if decays and not decoupled else gradient
    gg, largest = square(g), torch.finfo(g.dtype).max
    usable = gg <= largest
    stays = failing(usable)
    target = gradient if "b" in without else g
    gg, g, target = zeroed(stays, gg, g, target)

    taken = usable.to(g.dtype)
    m.lerp_(target, taken * (1 - beta1))
    new = gg / rows.d if "a" in without else g.square()
    v.lerp_(new.clamp_(max=largest), taken * (1 - beta2))
    divisor = (v.sqrt() / root).add_(group["eps"])
    s = (taken * pace) / divisor
    if group["eps"] == 0:
        s.masked_fill_(divisor == 0, 0)

    start = _left_by_decay(1 - rate_of(group) * decay, stays, x.dtype) if decoupled and decays else 1.0
    outside = "b" in without and decays and not decoupled
    l2 = (1 - beta1) * decay
    kept = start - s * l2 if isinstance(l2, Tensor) else torch.rsub(s, start, alpha=l2)
    y = _moved(x, kept if outside else start, m, s)
    if "b" in without or "c" in without:
        motion = Motion(x, y, v if "c" in without else None, stays)
        if "b" in without:
            (carry_in_plane if "a" in without else carry)(m, x, y, motion, rescale="c" in without)
        else:
            m.mul_(motion.shrink.sqrt())
        if "c" in without:
            v.mul_(motion.shrink)
    if rows.telemetry is not None:
        emit(rows, piece, x, y, gradient, pace=(1 - beta1) * pace / _mean_square(divisor).sqrt_(), start=start)
    x.copy_(y)


def adam_pace(rows: RowSet, group: Options) -> tuple[Tensor, float | Tensor]:
    """η/b̄ and 1 − ηδ of rows that took torch's Adam step, from v as it left it."""
    step, (beta1, beta2) = exact(rows.states[0]["step"]), group["betas"]
    divisor = (rows.read("exp_avg_sq", rows.whole).sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    pace = rate_of(group) * (1 - beta1) / (1 - beta1**step) / _mean_square(divisor).sqrt_()
    return pace, 1 - rate_of(group) * group["weight_decay"] if group["decoupled_weight_decay"] else 1.0


def _with_l2(gradient: Tensor, x: Tensor, decay: float | Tensor) -> Tensor:
    """∇L(x) + λx."""
    return gradient + x * decay if isinstance(decay, Tensor) else gradient.add(x, alpha=decay)


def _left_by_decay(start: float | Tensor, stays: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    """What a decoupled decay leaves of each row: a row that takes no step does not decay."""
    if stays is None:
        return start
    # A number of the host is added, not copied: a copy would wait for the device.
    return torch.zeros_like(stays, dtype=dtype).add_(start).masked_fill_(stays, 1)


def _moved(x: Tensor, kept: float | Tensor, m: Tensor, s: float | Tensor) -> Tensor:
    """kept·x − s·m."""
    whole = isinstance(kept, float) and kept == 1
    if isinstance(s, Tensor) and s.ndim:
        return torch.addcmul(x, m, s, value=-1) if whole else (x * kept).addcmul_(m, s, value=-1)
    return (x if whole else x * kept) - m * s


def _mean_square(q: Tensor) -> Tensor:
    return dot(q, q) / q.shape[1]


def sgd(rows: RowSet, group: Options) -> None:
    """SGD whose momentum moves with the row; as in `adam`, where (b) is neutralized the L2 term acts on x alone."""
    for piece, tensors in rows.pieces("param", "grad", "momentum_buffer"):
        _sgd(rows, piece, tensors, group)


def _sgd(rows: RowSet, piece: slice, tensors: list[Tensor], group: Options) -> None:
    """One piece of `sgd`, whose temporaries are freed before the next piece."""
    x, gradient, m = tensors
    without, lr, decay, momentum = group["without"], rate_of(group), decay_of(group), group["momentum"]
    gradient = -gradient if group["maximize"] else gradient
    outside = decay if "b" in without else 0.0
    g = _with_l2(gradient, x, decay) if group["weight_decay"] and "b" not in without else gradient
    share = 1.0 if rows.fresh else 1 - group["dampening"]
    m.mul_(momentum).add_(g, alpha=share)

    direction, l2 = m, outside * share
    if group["nesterov"]:
        direction, l2 = g.add(m, alpha=momentum), outside + momentum * l2
    y = _moved(x, 1 - lr * l2, direction, lr)
    if "b" in without:
        (carry if group["nesterov"] else carry_in_plane)(m, x, y, Motion(x, y), rescale="c" in without)
    elif "c" in without:
        m.mul_(Motion(x, y).shrink.sqrt())
    if rows.telemetry is not None:
        emit(rows, piece, x, y, gradient, pace=sgd_pace(rows, group)[0])
    x.copy_(y)


def sgd_pace(rows: RowSet, group: Options) -> tuple[Tensor, float]:
    """η/b̄ of rows that took torch's SGD step, and 1: b is 1/(1−τ) where a is in units of a gradient."""
    pace = rate_of(group) * (1 - group["dampening"] if group["momentum"] else 1)
    return pace if isinstance(pace, Tensor) else torch.tensor(pace, dtype=rows.dtype, device="cpu"), 1.0


# On the unit sphere -----------------------------------------------------------------------------------------


def _direction(q: Tensor) -> tuple[Tensor, Tensor]:
    """r and u, 0 for a collapsed row; a row on the sphere is its u, so that a step of no length changes no digit."""
    r = norm(q)
    gone, there = geometry.collapsed(r), (r - 1).abs_() <= 4 * torch.finfo(r.dtype).eps
    return r, (q / r.masked_fill(gone | there, 1)).masked_fill_(gone, 0)


def _on_sphere(x: Tensor, gradient: Tensor, group: Options) -> tuple[Tensor, Tensor]:
    """u and ∇L(u) = r∇L(x) (Lemma 1); a row without a direction keeps its 0 and its gradient."""
    r, u = _direction(x)
    at_u = gradient * r.masked_fill(geometry.collapsed(r), 1)
    return u, -at_u if group["maximize"] else at_u


def _landed(u: Tensor, y: Tensor) -> Tensor:
    """The direction of y, and u where y has none."""
    r, direction = _direction(y)
    return torch.where(geometry.collapsed(r), u, direction)


def adagradg(rows: RowSet, group: Options) -> None:
    """AdaGradG (Section 3.2), whose v is used before it is updated."""
    v = rows.number("sum")
    for piece, (x, gradient) in rows.pieces("param", "grad"):
        u, g = _on_sphere(x, gradient, group)
        v_next = group["beta"] * v[piece] + square(g)
        usable = torch.isfinite(v_next)
        pace = torch.where(usable & (v[piece] > 0), rate_of(group) / v[piece].sqrt(), 0)
        y = u - pace * torch.where(usable, g, 0)
        landed = torch.where(usable, _landed(u, y), x)
        if rows.telemetry is not None:
            emit(rows, piece, u, y, g, pace=pace, end=landed)
        x.copy_(landed)
        v[piece] = torch.where(usable, v_next, v[piece])
    rows.share("sum")


def adamg(rows: RowSet, group: Options) -> None:
    """Adam-G of Cho & Lee (2017), with h the tangent gradient, clipped, and δ the step along the sphere."""
    step = rows.advance()
    beta1, beta2 = group["betas"]
    rate = rate_of(group) * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    v = rows.number("exp_avg_sq")
    for piece, (x, gradient, m) in rows.pieces("param", "grad", "exp_avg"):
        u, g = _on_sphere(x, gradient, group)
        h = geometry.tangent(g, u)
        if not group["retraction"]:
            h *= (group["clip"] / norm(h)).clamp_(max=1)
        hh = square(h)
        usable = torch.isfinite(hh)
        stays = failing(usable)
        h, hh = zeroed(stays, h, hh)
        moment = v[piece]
        moment.copy_(torch.where(usable, moment.lerp(hh, 1 - beta2), moment))
        root = (moment + group["eps"]).sqrt_()
        pace = torch.where(usable & (root > 0), rate / root, 0)
        m.lerp_(h, usable.to(m.dtype).mul_(1 - beta1))
        delta = -pace * m
        theta = norm(delta)
        reached = u + delta if group["retraction"] else theta.cos() * u + torch.sinc(theta / math.pi) * delta
        y = _landed(u, reached)
        carry_in_plane(m, u, y, Motion(u, y, stays=stays), rescale=False)
        landed = torch.where(usable, y, x)
        if rows.telemetry is not None:
            # tan θ = η^e‖c^⊥‖ with c = m/(1−β1) defines the effective rate of a step along a geodesic too.
            turned = pace if group["retraction"] else pace * (theta.tan() / theta).masked_fill_(theta == 0, 1)
            inward = dot(u, delta).neg_()
            emit(rows, piece, u, y, g, pace=(1 - beta1) * turned * dot(u, y), end=landed, inward=inward)
        x.copy_(landed)
    rows.share("exp_avg_sq")


def adamp(rows: RowSet, group: Options) -> None:
    """AdamP (Heo et al., 2021) on rows that are known to be radial: the step q is always projected."""
    step = rows.advance()
    beta1, beta2 = group["betas"]
    lr = rate_of(group)
    pace, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    for piece, (x, g, m, v) in rows.pieces("param", "grad", "exp_avg", "exp_avg_sq"):
        g = -g if group["maximize"] else g
        usable = torch.isfinite(square(g))
        stays = failing(usable)
        (safe,) = zeroed(stays, g)
        m.lerp_(safe, usable.to(m.dtype) * (1 - beta1))
        v.copy_(torch.where(usable, v * beta2 + safe.square().mul_(1 - beta2), v))
        divisor = (v.sqrt() / root).add_(group["eps"])
        ahead = m.lerp(safe, 1 - beta1) if group["nesterov"] else m
        q = torch.where(usable & (divisor > 0), ahead / divisor, 0)
        length = norm(x) + group["eps"]
        unit = x / length.masked_fill(length == 0, 1)
        q -= dot(q, unit) * unit
        kept = _left_by_decay(1 - lr * group["weight_decay"] * group["wd_ratio"], stays, x.dtype)
        y = x * kept - q * pace
        if rows.telemetry is not None:
            emit(rows, piece, x, y, g, pace=(1 - beta1) * pace / _mean_square(divisor).sqrt_(), start=kept)
        x.copy_(y)


def angular(rows: RowSet, group: Options) -> None:
    """Angular: a row turns by an angle θ along −d and keeps its radius; h = r∇L(x)^⊥ is the gradient at u."""
    if group["direction"] == "muon":
        if rows.d:
            _angular_by_matrix(rows, group)
    else:
        _angular_by_row(rows, group)
    if group["spread"] == "rms":
        rows.share("norm_sq")


def _angular_by_row(rows: RowSet, group: Options) -> None:
    """`angular` along n or n ⊘ √V, in one pass."""
    root = (1 - group["beta2"] ** rows.advance()) ** 0.5
    names = ["exp_avg_sq"] if group["direction"] == "adam" else []
    for piece, (x, gradient, m, *second) in rows.pieces("param", "grad", "momentum_buffer", *names):
        _, h, _, stays = pushed = _pushed([x, gradient, m], group)
        n = h.add(m, alpha=group["momentum"]) if group["nesterov"] else m
        for v in second:
            v.lerp_(h.square().clamp_(max=torch.finfo(v.dtype).max), _share(group, stays, v.dtype))
            n = (n / (v.sqrt() / root)).masked_fill_(v == 0, 0)
        _turn(rows, piece, [x, gradient, m], group, pushed, n, root)


def _angular_by_matrix(rows: RowSet, group: Options) -> None:
    """`angular` along NS(n)^⊥: the momenta first, then their matrices, then the turns."""
    names = ("param", "grad", "momentum_buffer")
    # m is computed again in the turn: kept until then it would be rounded in half precision.
    pieces = [rows.params[0].new_empty(0, rows.d, dtype=rows.dtype)]  # a rank without rows takes part in gathering
    for _, (x, gradient, m) in rows.pieces(*names, write=False):
        n = m.clone()
        _, h, _, stays = _pushed([x, gradient, n], group)
        n = h.add_(n, alpha=group["momentum"]) if group["nesterov"] else n
        pieces += zeroed(stays, n)
    along = rows.on_matrices(orthogonalized, torch.cat(pieces))
    root = (1 - group["beta2"] ** rows.advance()) ** 0.5
    for piece, tensors in rows.pieces(*names):
        at = root[piece].to(rows.dtype) if isinstance(root, Tensor) and root.ndim else root
        _turn(rows, piece, tensors, group, _pushed(tensors, group), along[piece], at)


def orthogonalized(stack: Tensor) -> Tensor:
    """The five Newton–Schulz steps of `torch.optim.Muon` on matrices of one shape, (k, a, b); 0 stays 0.

    X ← n/‖n‖;  five times G = XXᵀ, X ← aX + (bG + cG²)X.
    """
    x = stack.mT if stack.shape[1] > stack.shape[2] else stack
    size = norm(x.flatten(1)).unsqueeze(2)
    x = x / size.masked_fill_(size == 0, 1)
    if x.device.type != "cpu" and x.dtype != torch.float64:
        x = x.bfloat16()
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if stack.shape[1] > stack.shape[2] else x).to(stack.dtype)


Pushed = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _pushed(tensors: list[Tensor], group: Options) -> Pushed:
    """m ← β m + h in place; returns r (1 without a direction), h, the rows that turn and those that take no step."""
    x, gradient, m = tensors
    r = norm(x)
    gone = geometry.collapsed(r)
    r = r.masked_fill_(gone, 1)
    signed = -r if group["maximize"] else r
    along = dot(x, gradient) / signed
    h = (gradient * signed).addcmul_(x, along, value=-1)
    slope = norm(h)
    # The room above is for the squares of m.
    stays = failing(torch.isfinite(slope.square() * 2**20))
    # The tangent part of a radial gradient is rounding, which is no direction to turn in.
    moves = (slope > 16 * torch.finfo(h.dtype).eps * (along * r).abs_()) & ~gone
    moves = moves if stays is None else moves & ~stays
    (h,) = zeroed(failing(moves), h)
    if stays is None:
        torch.add(h, m, alpha=group["momentum"], out=m)
    else:
        m.copy_(torch.where(stays, m, torch.add(h, m, alpha=group["momentum"])))
    return r, h, moves, stays


def _share(group: Options, stays: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    """1 − β2, and 0 for rows that take no step."""
    share: float = 1 - group["beta2"]
    return share if stays is None else (~stays).to(dtype) * share


def _turn(
    rows: RowSet, piece: slice, tensors: list[Tensor], group: Options, pushed: Pushed, n: Tensor, root: float | Tensor
) -> None:
    """Turn x along −d by its angle and transport m, both as sums of x, n and m, with e = d/‖d‖ and d = n − ⟨n,u⟩u.

    x' = r(cos θ u − sin θ e);  Γ(m) = m^⊥ + ⟨m,e⟩((cos θ − 1)e + sin θ u).
    """
    (x, gradient, m), (r, _, moves, stays) = tensors, pushed
    inward, whole = dot(x, n) / r, norm(n)
    length = whole * (1 - (inward / whole.masked_fill(whole == 0, 1)).square_()).clamp_(min=0).sqrt_()
    theta = (moves & (length > 0)).to(x.dtype) * rate_of(group)
    if group["spread"] == "rms":
        v = rows.number("norm_sq")[piece]
        v.lerp_(length.square().clamp_(max=torch.finfo(v.dtype).max), _share(group, stays, v.dtype))
        theta = (theta * length / (v.sqrt() / root)).masked_fill_(v == 0, 0).clamp_(max=0.5)
    before = x if rows.telemetry is None else x.clone()
    sine, lost = theta.sin(), (theta / 2).sin().square_().mul_(2)
    reach = length.masked_fill(length == 0, 1)
    k = r * sine / reach
    kept = 1 - lost + k * inward / r
    if n is m:
        radial = inward if stays is None else inward.masked_fill(stays, 0)
        by_x = (length * sine - radial * (1 - lost)) / (r * kept)
        x.mul_(kept).addcmul_(m, k, value=-1)
        m.mul_(1 - lost + by_x * k).addcmul_(x, by_x)
    else:
        radial = dot(x, m) / r
        along = (dot(m, n) - radial * inward) / reach
        radial = radial if stays is None else radial.masked_fill(stays, 0)
        by_n = along * lost / reach
        y = (x * kept).addcmul_(n, k, value=-1)
        m.addcmul_(x, (along * sine + by_n * inward - radial) / r).addcmul_(n, by_n, value=-1)
        x.copy_(y)
    if rows.telemetry is not None:
        x.copy_(rows.kept(x))
        pace = theta.tan() / reach * dot(before, x)
        emit(rows, piece, before, x, gradient, pace=pace, inward=torch.zeros_like(theta))

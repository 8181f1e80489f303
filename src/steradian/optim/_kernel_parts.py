"""What the kernels of the fused step have in common: settings, limits, how m and v move with a row, telemetry."""

import triton
import triton.language as tl

__all__ = ["LANES"]

LANES = tl.constexpr(4096)

WITHOUT_B, WITHOUT_C = tl.constexpr(2), tl.constexpr(4)
DECOUPLED, MAXIMIZE = tl.constexpr(8), tl.constexpr(16)


@triton.jit
def settings_of(settings, rates, line, C: tl.constexpr):
    """ln β1, ln β2, 1−β1, 1−β2, ε, λ, flags and the rate of one group."""
    at = settings + line * 8
    address, single = tl.load(rates + line), tl.load(at + 7) != 0.0
    rate = tl.load(address.to(tl.pointer_type(tl.float32)), mask=single, other=0.0).to(tl.float64)
    rate += tl.load(address.to(tl.pointer_type(tl.float64)), mask=single == 0, other=0.0)
    log_beta1, log_beta2 = tl.load(at).to(C), tl.load(at + 1).to(C)
    share1, share2 = tl.load(at + 2).to(C), tl.load(at + 3).to(C)
    eps, decay, flags = tl.load(at + 4).to(C), tl.load(at + 5).to(C), tl.load(at + 6).to(tl.int32)
    return log_beta1, log_beta2, share1, share2, eps, decay, flags, rate.to(C)


@triton.jit
def limits(C: tl.constexpr):
    """Largest number, smallest normal number over the rounding unit, rounding unit to the power −2."""
    if C == tl.float64:
        return 1.7976931348623157e308, 1.002084180004486e-292, 2.028240960365167e31
    else:
        return 3.4028234663852886e38, 9.860761315262648e-32, 7.0368744177664e13


@triton.jit
def sign_and_scale(flags, grad_scale, SCALED: tl.constexpr, C: tl.constexpr):
    """What the gradient is multiplied by: −1 to maximize, over the gradient scaler's scale."""
    factor = tl.where((flags & MAXIMIZE) != 0, -1.0, 1.0).to(C)
    if SCALED:
        factor = factor / tl.load(grad_scale).to(C)
    return factor


@triton.jit
def motion(xx, yy, v, flags, C: tl.constexpr):
    """(r/r')² and the rows that keep their direction: `_motion.Motion`."""
    largest, smallest, steepest = limits(C)
    shrink = xx / yy
    there = (tl.minimum(xx, yy) >= smallest) & (yy <= largest) & (shrink <= steepest)
    there = there & (((flags & WITHOUT_C) == 0) | (v * shrink <= largest))
    return tl.where(there, shrink, 1.0), there


@triton.jit
def carried_in_plane(xx, yy, xy, my, shrink, there, flags, C: tl.constexpr):
    """m ← kept·m − removed·x of a step along m: transport where (b), times r/r' where (c) is neutralized."""
    largest, _smallest, _steepest = limits(C)
    scale = tl.where((flags & WITHOUT_C) != 0, yy, tl.sqrt(xx) * tl.sqrt(yy))
    kept, removed = xy / scale, my / scale
    moved = there & (tl.abs(removed) <= largest)
    transported = (flags & WITHOUT_B) != 0
    rescaled = tl.where((flags & WITHOUT_C) != 0, tl.sqrt(shrink), 1.0)
    kept = tl.where(transported, tl.where(moved, kept, 1.0), rescaled)
    return kept.to(C), tl.where(transported & moved, removed, 0.0).to(C)


@triton.jit
def one_minus_power(log_beta, step):
    """1 − β^t = −(e^u − 1) with u = t ln β: by its series for small u, where the difference would lose digits."""
    u = log_beta * step
    near = tl.maximum(u, -0.5)
    series = tl.zeros_like(near)
    for k in tl.static_range(14, 0, -1):
        series = (1.0 + series) * (near / k)
    return tl.where(u > -0.5, -series, 1.0 - tl.exp(u))


@triton.jit
def bias_corrections(step, log_beta1, log_beta2, rate):
    """η/(1−β1^t) and √(1−β2^t)."""
    return rate / one_minus_power(log_beta1, step), tl.sqrt(one_minus_power(log_beta2, step))


@triton.jit
def lerp(old, new, share):
    """(1−s)·old + s·new as `Tensor.lerp` has it: from the nearer end, so that s = 1 leaves nothing of the old."""
    near = share < 0.5
    return tl.where(near, old, new) + tl.where(near, share, share - 1.0) * (new - old)


@triton.jit
def divided(v, usable, pace, root, eps):
    """s = η̂/(√v̂ + ε), 0 where that divides by 0 or the row is not usable."""
    divisor = tl.sqrt(v) / root + eps
    return tl.where(usable & (divisor > 0), pace / tl.where(divisor > 0, divisor, 1.0), 0.0)


@triton.jit
def kept_in(value, P: tl.constexpr):
    """A number as it is kept: at the end of float16's range what lies beyond it, which would come back infinite."""
    if P == tl.float16:
        value = tl.where(value > 65504.0, 65504.0, tl.where(value < -65504.0, -65504.0, value))
    return value.to(P)


@triton.jit
def first(at):
    """A number that every program begins with: worth keeping in the cache through a step that streams by."""
    return tl.load(at, eviction_policy="evict_last")


@triton.jit
def low(packed):
    return (packed & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def high(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def angle(across, along):
    """atan2(across, along) for across ≥ 0: the angle is halved three times, then its series converges fast."""
    length = tl.sqrt(across * across + along * along)
    t = across / tl.where(length > 0, length + tl.abs(along), 1.0)
    t = t / (1.0 + tl.sqrt(1.0 + t * t))
    t = t / (1.0 + tl.sqrt(1.0 + t * t))
    series = tl.zeros_like(t)
    for k in tl.static_range(10, -1, -1):
        series = 1.0 / (2 * k + 1) - t * t * series
    angle = 8.0 * t * series
    return tl.where(along < 0, 3.141592653589793 - angle, angle)


@triton.jit
def _leave(told, also, column: tl.constexpr, value, alive):
    tl.store(told + column, value, mask=alive)
    tl.store(also + column, value, mask=alive)


@triton.jit
def emit(told, also, alive, xx, yy, xy, hh, xh, across, radial, there, pace, start, C: tl.constexpr):
    """The numbers of `TELEMETRY` for each row, in two places; h is the gradient alone, without L2."""
    largest, _smallest, _steepest = limits(C)
    radius, slope = tl.sqrt(xx), tl.sqrt(hh)
    along = tl.where(there, xy / tl.where(there, radius, 1.0), 1.0)
    rate = tl.where(there, pace / tl.where(there, start * xy, 1.0), 0.0)
    _leave(told, also, 0, radius.to(C), alive)
    _leave(told, also, 1, tl.where(there, angle(across, along), 0.0).to(C), alive)
    _leave(told, also, 2, tl.where(tl.abs(pace) <= largest, rate, 0.0).to(C), alive)
    _leave(told, also, 3, tl.sqrt(yy).to(C), alive)
    _leave(told, also, 4, slope.to(C), alive)
    inclined = there & (hh > 0) & (hh <= largest)
    defect = tl.abs(xh) / tl.where(inclined, radius * slope, 1.0)
    _leave(told, also, 5, tl.where(inclined, defect, 0.0).to(C), alive)
    _leave(told, also, 6, tl.where(there & (tl.abs(radial) <= largest), radial, 0.0).to(C), alive)

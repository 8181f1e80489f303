"""Nine sums over each row of what a step started from and left in the optimizer's state, in one Triton launch.

With q = a ⊘ b, in float64 whatever the dtype of the rows: ⟨x,x⟩, ⟨b,b⟩, ⟨q,x⟩, ⟨q,q⟩, ⟨g,g⟩, ⟨g,x⟩, ⟨a,x⟩, ⟨a,a⟩
and ⟨a,q⟩.
Everything that `_seen.Seen` measures in one step follows from them. The readings of a and b are those of `scheme`:
a = m/(1−β1) and b = (1−β1^t)/(1−β1)·(√(v/(1−β2^t)) + ε) for Adam, a = m/(1−τ) and b = 1/(1−τ) for SGD with momentum.
"""

import triton
import triton.language as tl

__all__ = ["LANES", "SUMS", "sweep_rows"]

LANES = tl.constexpr(1024)
SUMS = ("xx", "bb", "qx", "qq", "gg", "gx", "ax", "aa", "aq")


@triton.jit
def sweep_rows(items, lines, settings, out, ADAM: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """The sums of one piece of a row.

    `items` has five int64 per program: line, row, first entry, entries, place in `out`. `lines` has eight per
    parameter: addresses of x, gradient, m, v and step count; entries of a row; line of settings. `settings` has four
    float64 per group: for Adam β1, β2, ε; for SGD 1/(1−τ).
    """
    item = items + tl.program_id(0).to(tl.int64) * 5
    line = lines + tl.load(item) * 8
    at = tl.load(item + 1) * tl.load(line + 5) + tl.load(item + 2)
    entries, place = tl.load(item + 3), tl.load(item + 4)
    x_at, g_at = tl.load(line).to(tl.pointer_type(P)) + at, tl.load(line + 1).to(tl.pointer_type(P)) + at
    m_at, v_at = tl.load(line + 2).to(tl.pointer_type(P)) + at, tl.load(line + 3).to(tl.pointer_type(P)) + at
    group = settings + tl.load(line + 6) * 4
    first, second, third = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    grown, scale, shift = first, first, first * 0.0
    if ADAM:
        step = tl.load(tl.load(line + 4).to(tl.pointer_type(tl.float32))).to(tl.float64)
        share = (1.0 - tl.exp(step * tl.log(first))) / (1.0 - first)
        grown = 1.0 / (1.0 - first)
        scale, shift = share / tl.sqrt(1.0 - tl.exp(step * tl.log(second))), share * third
    zero = tl.zeros([LANES], dtype=tl.float64)
    xx, bb, qx, qq, gg = zero, zero, zero, zero, zero
    gx, ax, aa, aq = zero, zero, zero, zero
    for block in range(0, entries, LANES):
        lanes = block + tl.arange(0, LANES)
        mask = lanes < entries
        x = tl.load(x_at + lanes, mask=mask, other=0.0).to(tl.float64)
        g = tl.load(g_at + lanes, mask=mask, other=0.0).to(tl.float64)
        a = tl.load(m_at + lanes, mask=mask, other=0.0).to(tl.float64) * grown
        if ADAM:
            v = tl.load(v_at + lanes, mask=mask, other=0.0).to(C)
            b = tl.where(mask, tl.sqrt(v).to(tl.float64) * scale + shift, 0.0)
        else:
            b = tl.where(mask, scale + zero, 0.0)
        q = tl.where(b > 0, a / tl.where(b > 0, b, 1.0), 0.0)
        xx += x * x
        bb += b * b
        qx += q * x
        qq += q * q
        gg += g * g
        gx += g * x
        ax += a * x
        aa += a * a
        aq += a * q
    to = out + place * 9
    tl.store(to, tl.sum(xx, axis=0))
    tl.store(to + 1, tl.sum(bb, axis=0))
    tl.store(to + 2, tl.sum(qx, axis=0))
    tl.store(to + 3, tl.sum(qq, axis=0))
    tl.store(to + 4, tl.sum(gg, axis=0))
    tl.store(to + 5, tl.sum(gx, axis=0))
    tl.store(to + 6, tl.sum(ax, axis=0))
    tl.store(to + 7, tl.sum(aa, axis=0))
    tl.store(to + 8, tl.sum(aq, axis=0))

"""Decays of a chunk with one decay a channel: the gate, and the sums of its steps."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import divides, gate_rows, load_rows
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value


@triton.jit
def load_gate(gate, g, i_hv, o_i, m_i, o_k, S: tl.constexpr):
    """raw = g + dt_bias [BT, BK] and rate = exp(A_log), fp32. g: Rows of the chunk and head."""
    raw = load_rows(g, o_i, m_i, o_k, S.K).to(tl.float32)
    rate = 1.0
    if gate.dt_bias is not None:
        raw += tl.load(gate.dt_bias + i_hv * S.K + o_k, mask=o_k < S.K, other=0.0)[None, :]
    if gate.A_log is not None:
        rate = tl.exp(tl.load(gate.A_log + i_hv).to(tl.float32))
    return raw, rate


@triton.jit
def load_steps(gate, start, i_hv, o_i, m_i, o_k, S: tl.constexpr, R: tl.constexpr):
    """The log decay of each token [BT, BK] in the unit of gc, zero beyond the chunk and K. See
    `before` for the cut."""
    raw, rate = load_gate(gate, gate_rows(gate, start, i_hv), i_hv, o_i, m_i, o_k, S)
    b_g = tl.where(m_i[:, None], gate_value(raw, rate, gate.bound, R.GATE), 0.0)
    if not divides(o_k.shape[0], S.K):
        b_g = tl.where((o_k < S.K)[None, :], b_g, 0.0)
    if R.EXP2:
        b_g *= LOG2E
    if S.REMOVAL == "p":
        b_g = tl.maximum(b_g, -256.0)
    return b_g


@triton.jit
def before(d, steps):
    """From sums of log decays up to each row, those up to the row before. steps: `parts` of the log
    decays.

    A difference of two numbers errs by a rounding of the larger one. Where p reads before the
    decay, `load_steps` therefore cuts log decays at -256: below that their exponential is zero
    whatever it multiplies."""
    for n in tl.static_range(len(steps)):
        d -= steps[n].to(tl.float32)
    return d


ANCHORS = tl.constexpr(4)
"""Rows of a chunk of 64 whose gc is stored: 15, 31, 47 and 63. Any chunk has BT // 16 of them."""

STEEPEST = tl.constexpr(100.0)
"""The largest decay over 16 rows, in powers of two, for which a chunk takes the path of a safe gate
where it may take either. A safe gate stays below 116. With 100, the factors of rows and columns lie
between 2^-100 and 2^100, which leaves q and k the range from 2^-26 to 2^27."""


@triton.jit
def is_steep(anchors, S: tl.constexpr, R: tl.constexpr):
    """Whether a chunk and head needs the path of any gate. anchors: gc of its rows, [BT // 16, K].
    gc falls from row to row, so the anchors tell its largest step over 16 rows."""
    furthest = 0.0
    for first in tl.range(0, S.K, S.BK):
        k = first + tl.arange(0, S.BK)
        above = tl.zeros([S.BK], tl.float32)
        for row in tl.static_range(S.BT // 16):
            at = tl.load(anchors + row * S.K + k, mask=k < S.K, other=0.0)
            furthest = tl.maximum(furthest, tl.max(tl.abs(at - above)))
            above = at
    return furthest > (STEEPEST if R.EXP2 else STEEPEST / LOG2E)


@triton.jit
def blocks_of_16(x):
    """[BT, BK] as [BT / 16, 16, BK]."""
    return tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]])


@triton.jit
def whole(gc, UNIT: tl.constexpr):
    """gc in whole powers of two."""
    return tl.floor(gc / UNIT + 0.5)


@triton.jit
def shifted(x, n, rows):
    """x * 2^n in some rows, n [1, BK] from 0 down to -240. Two factors form it, as 2^n may
    underflow."""
    near = tl.where(rows, tl.exp2(tl.maximum(n, -120.0)), 1.0)
    far = tl.where(rows, tl.exp2(tl.minimum(n + 120.0, 0.0)), 1.0)
    return x * near * far

"""The recurrence token by token, forward only: for decoding and short prefixes.

A program has one sequence, value head and value tile, and holds that part of the state in
registers. A decode step is bound by reading and writing states once, so a tile's last dim is the
one that is contiguous in memory: V, or K where states are [V, K].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.kernels.triton.device.blocks import decay_exp, load_block, store_block, unit_rows
from fla_cp.kernels.triton.device.gates import GATES, LOG2E, sigmoid
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import TUNING
from fla_cp.rule import NORM_EPS, DeltaRule


@triton.jit
def load_row(ptr, o, N: tl.constexpr, m):
    """[BN] in fp32, zero beyond N and where m is False."""
    return tl.load(ptr + o, mask=(o < N) & m, other=0.0).to(tl.float32)


@triton.jit
def load_gates(ptr, o_k, K: tl.constexpr, m, PER_HEAD: tl.constexpr):
    """[BK] in fp32: one number a channel, or the head's in all of them."""
    if PER_HEAD:
        return tl.zeros([o_k.shape[0]], tl.float32) + tl.load(ptr, mask=m, other=0.0)
    else:
        return load_row(ptr, o_k, K, m)


@triton.jit
def load_token(
    q,
    k,
    v,
    g,
    beta,
    p,
    strides,
    t,
    m,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """q, k, g [BK], v [BV], beta and p [BK] of token t; zeros where m is False; 1 without beta, k
    without p."""
    q_t, k_t, v_t, g_t, beta_t, p_t = strides
    b_k = load_row(k + t * k_t, o_k, K, m)
    b_beta, b_p = 1.0, b_k
    if beta is not None:
        b_beta = tl.load(beta + t * beta_t, mask=m, other=0.0).to(tl.float32)
    if p is not None:
        b_p = load_row(p + t * p_t, o_k, K, m)
    return (
        load_row(q + t * q_t, o_k, K, m),
        b_k,
        load_row(v + t * v_t, o_v, V, m),
        load_gates(g + t * g_t, o_k, K, m, PER_HEAD),
        b_beta,
        b_p,
    )


@triton.jit
def recurrent_kernel(
    q,
    k,
    v,
    g,
    beta,
    p,
    A_log,
    dt_bias,
    S0,
    o,
    S_end,
    offsets,
    T,
    strides,
    q_h,
    k_h,
    v_h,
    g_h,
    beta_h,
    p_h,
    S0_n,
    S0_h,
    S_n,
    S_h,
    scale,
    bound,
    beta_factor,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    EXP2: tl.constexpr,
    EPS: tl.constexpr,
    V_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
    REMOVAL: tl.constexpr,
):
    """o [T, HV, V]; S_end unless None, which may be S0. strides: of tokens, of q, k, v, g, beta, p.

    T: tokens of a row; with offsets of all rows, and offsets beyond it are cut to it, since the
    host has not always read them.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h = tl.program_id(0) % tiles, tl.program_id(1).to(tl.int64)
    i_n = (tl.program_id(0) // tiles).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    # the state's rows and columns in memory
    R: tl.constexpr = V if V_FIRST else K
    C: tl.constexpr = K if V_FIRST else V
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    V_AXIS: tl.constexpr = 1 - K_AXIS
    o_r, o_c = o_k, o_v
    if V_FIRST:
        o_r, o_c = o_v, o_k
    if S0 is None:
        b_S = tl.zeros([o_r.shape[0], o_c.shape[0]], tl.float32)
    else:
        b_S = load_block(S0 + i_n * S0_n + i_h * S0_h, o_r, o_c, R, C)
    if offsets is None:
        start, length = i_n * T, T
    else:
        start = tl.maximum(tl.load(offsets + i_n).to(tl.int64), 0)
        length = tl.minimum(tl.load(offsets + i_n + 1).to(tl.int64), T) - start

    q += i_h // G * q_h
    k += i_h // G * k_h
    v += i_h * v_h
    g += i_h * g_h
    if beta is not None:
        beta += i_h * beta_h
    if p is not None:
        p += i_h // G * p_h
    rate, b_bias = 1.0, 0.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    if dt_bias is not None:
        b_bias = load_gates(dt_bias + i_h * (1 if PER_HEAD else K), o_k, K, True, PER_HEAD)
    # the next token is on its way while the state takes this one
    token = load_token(q, k, v, g, beta, p, strides, start, length > 0, o_k, o_v, K, V, PER_HEAD)
    for i in range(length):
        t = start + i
        b_q, b_k, b_v, b_g, b_beta, b_p = token
        token = load_token(
            q, k, v, g, beta, p, strides, t + 1, i + 1 < length, o_k, o_v, K, V, PER_HEAD
        )
        if NORM:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, axis=0) + EPS)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=0) + EPS)
            b_p *= tl.rsqrt(tl.sum(b_p * b_p, axis=0) + EPS)
        b_g = GATE(b_g + b_bias, rate, bound)
        if EXP2:
            b_g *= LOG2E
        if BETA_SIGMOID:
            b_beta = beta_factor * sigmoid(b_beta)
        b_u = b_v
        if REMOVAL == "p":  # reads before the decay
            b_u -= tl.sum(tl.expand_dims(b_p, V_AXIS) * b_S, axis=K_AXIS)
        b_S *= tl.expand_dims(decay_exp(b_g, EXP2), V_AXIS)
        b_kk = tl.expand_dims(b_k, V_AXIS)
        if REMOVAL == "k":
            b_u -= tl.sum(b_kk * b_S, axis=K_AXIS)
        b_u *= b_beta
        b_S += b_kk * tl.expand_dims(b_u, K_AXIS)
        b_o = scale * tl.sum(tl.expand_dims(b_q, V_AXIS) * b_S, axis=K_AXIS)
        tl.store(o + (t * HV + i_h) * V + o_v, b_o.to(o.dtype.element_ty), mask=o_v < V)
    if S_end is not None:
        store_block(S_end + i_n * S_n + i_h * S_h, b_S, o_r, o_c, R, C)


def recurrent(
    rule: DeltaRule, x: Inputs, S0: Tensor | None, S_end: Tensor | None, sequences: Sequences
) -> Tensor:
    """As stages/recurrent.py; states dense in their last two dims. Reads nothing on the host."""
    q, k, v, g = map(unit_rows, x[:4])
    x = x._replace(q=q, k=k, v=v, g=g)
    if S0 is not None and not S0[0, 0].is_contiguous():
        S0 = S0.contiguous()
    packed = (x.q, x.k, x.v, x.g, x.beta, x.p)
    strides = [(0, 0) if r is None else (*r.stride(), 0)[:2] for r in packed]
    tokens, (H, K), (HV, V) = len(x.q), x.q.shape[1:], x.v.shape[1:]
    t = TUNING.tile("recurrent", K, V, x.q.dtype)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    offsets = sequences.offsets
    if offsets is not None:
        offsets = offsets.to(x.q.device).contiguous()
    launch(
        recurrent_kernel,
        (cdiv(V, t.BV) * sequences.number, HV),
        *packed,
        *(None if r is None else r.contiguous() for r in (x.A_log, x.dt_bias)),
        S0,
        o,
        S_end,
        offsets,
        tokens // sequences.number if offsets is None else tokens,
        tuple(of_token for of_token, _ in strides),
        *(of_head for _, of_head in strides),
        *((0, 0) if S0 is None else S0.stride()[:2]),
        *((0, 0) if S_end is None else S_end.stride()[:2]),
        rule.scale,
        rule.lower_bound or 0.0,
        rule.beta_factor or 1.0,
        HV=HV,
        G=HV // H,
        K=K,
        V=V,
        BK=t.BK,
        BV=t.BV,
        GATE=GATES[rule.gate][0],
        NORM=rule.qk_l2norm,
        BETA_SIGMOID=rule.beta_factor is not None,
        EXP2=rule.use_exp2,
        EPS=NORM_EPS,
        V_FIRST=rule.state_v_first,
        PER_HEAD=rule.per_head,
        REMOVAL=rule.removal,
        num_warps=t.warps,
    )
    if S_end is not None and S_end is S0 and not S_end.is_inference():
        torch.autograd.graph.increment_version(S_end)
    return o

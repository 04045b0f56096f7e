"""The recurrence token by token, forward only: for decoding and short prefixes.

A program has one sequence, value head and value tile, and holds that part of the state in
registers. A decode step spends its time reading and writing states, so the last dim of a tile is
the one that is contiguous in memory: V, or K if states are [V, K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.kernels.triton.device.blocks import (
    EPS,
    decay_exp,
    load_block,
    rows_from,
    store_block,
    unit_rows,
)
from fla_cp.kernels.triton.device.bundles import Rows, gate, rows, rule_options, shape, state
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value, sigmoid
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import TUNING
from fla_cp.rule import DeltaRule


@triton.jit
def load_row(ptr, o, N: tl.constexpr, m):
    """[BN] in fp32, zero beyond N and where m is False."""
    return tl.load(ptr + o, mask=(o < N) & m, other=0.0).to(tl.float32)


@triton.jit
def load_gates(ptr, o_k, K: tl.constexpr, m, PER_HEAD: tl.constexpr):
    """[BK] in fp32: one number for each channel, or the head's number in all of them."""
    if PER_HEAD:
        return tl.zeros([o_k.shape[0]], tl.float32) + tl.load(ptr, mask=m, other=0.0)
    else:
        return load_row(ptr, o_k, K, m)


class Tokens(NamedTuple):
    """The inputs token by token; beta and p may be absent (ptr None)."""

    q: Rows
    k: Rows
    v: Rows
    g: Rows
    beta: Rows
    p: Rows


@triton.jit
def load_token(x, t, m, o_k, o_v, S: tl.constexpr):
    """q, k [BK], v [BV], g [BK], beta and p [BK] of token t, zero if m is False. Without beta it is
    1, and without p it is k."""
    b_k = load_row(x.k.ptr + t * x.k.row, o_k, S.K, m)
    b_beta, b_p = 1.0, b_k
    if x.beta.ptr is not None:
        b_beta = tl.load(x.beta.ptr + t * x.beta.row, mask=m, other=0.0).to(tl.float32)
    if x.p.ptr is not None:
        b_p = load_row(x.p.ptr + t * x.p.row, o_k, S.K, m)
    b_q = load_row(x.q.ptr + t * x.q.row, o_k, S.K, m)
    b_v = load_row(x.v.ptr + t * x.v.row, o_v, S.V, m)
    return b_q, b_k, b_v, load_gates(x.g.ptr + t * x.g.row, o_k, S.K, m, S.HEAD), b_beta, b_p


@triton.jit(do_not_specialize_on_alignment=["T", "columns", "P"])
def recurrent_kernel(
    x,
    gate,
    beta_factor,
    S0,
    o,
    S_end,
    offsets,
    places,
    columns,
    accepted,
    P,
    T,
    scale,
    S: tl.constexpr,
    R: tl.constexpr,
    V_FIRST: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """x: `Tokens`; gate: `Gate` (g is read from x); S0 and S_end: `State`, dense in their last two
    dims. o [T, HV, V]. S_end is written unless it is None, and may be S0.

    T: tokens of a row, or with offsets tokens of all rows. Offsets beyond T are cut to it, since
    the host has not always read them.
    places [N, columns], accepted [N], DRAFTS: see `Pool`, whose states are P; places may be None.
    """
    tiles: tl.constexpr = (S.V + S.BV - 1) // S.BV
    i_v, i_h = tl.program_id(0) % tiles, tl.program_id(1).to(tl.int64)
    i_n = (tl.program_id(0) // tiles).to(tl.int64)
    o_k = tl.arange(0, S.BK)
    o_v = i_v * S.BV + tl.arange(0, S.BV)
    # the state's rows and columns in memory
    ROWS: tl.constexpr = S.V if V_FIRST else S.K
    COLUMNS: tl.constexpr = S.K if V_FIRST else S.V
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    V_AXIS: tl.constexpr = 1 - K_AXIS
    o_r, o_c = o_k, o_v
    if V_FIRST:
        o_r, o_c = o_v, o_k
    place, exists = i_n, True
    if places is not None:
        column = 0
        if accepted is not None:
            column = tl.load(accepted + i_n).to(tl.int32) - 1
            column = tl.minimum(tl.maximum(column, 0), columns - 1)
        place = tl.load(places + i_n * columns + column).to(tl.int64)
        exists = (place >= 0) & (place < P)
        place = tl.where(exists, place, 0)
    if S0.ptr is None:
        b_S = tl.zeros([o_r.shape[0], o_c.shape[0]], tl.float32)
    else:
        b_S = load_block(S0.ptr + place * S0.n + i_h * S0.h, o_r, o_c, ROWS, COLUMNS)
        if places is not None:
            b_S = tl.where(exists, b_S, 0.0)
    if offsets is None:
        start, length = i_n * T, T
    else:
        start = tl.maximum(tl.load(offsets + i_n).to(tl.int64), 0)
        length = tl.minimum(tl.load(offsets + i_n + 1).to(tl.int64), T) - start

    i_g = i_h // S.G
    q, k = rows_from(x.q, 0, i_g), rows_from(x.k, 0, i_g)
    v, g = rows_from(x.v, 0, i_h), rows_from(x.g, 0, i_h)
    beta, p = x.beta, x.p
    if beta.ptr is not None:
        beta = rows_from(beta, 0, i_h)
    if p.ptr is not None:
        p = rows_from(p, 0, i_g)
    x = Tokens(q, k, v, g, beta, p)
    rate, b_bias = 1.0, 0.0
    if gate.A_log is not None:
        rate = tl.exp(tl.load(gate.A_log + i_h).to(tl.float32))
    if gate.dt_bias is not None:
        b_bias = load_gates(gate.dt_bias + i_h * (1 if S.HEAD else S.K), o_k, S.K, True, S.HEAD)
    # The next token is loaded while the state is updated with this one.
    token = load_token(x, start, length > 0, o_k, o_v, S)
    for i in range(length):
        t = start + i
        b_q, b_k, b_v, b_g, b_beta, b_p = token
        token = load_token(x, t + 1, i + 1 < length, o_k, o_v, S)
        if R.NORM:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, axis=0) + EPS)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=0) + EPS)
            b_p *= tl.rsqrt(tl.sum(b_p * b_p, axis=0) + EPS)
        b_g = gate_value(b_g + b_bias, rate, gate.bound, R.GATE)
        if R.EXP2:
            b_g *= LOG2E
        if R.BETA_SIGMOID:
            b_beta = beta_factor * sigmoid(b_beta)
        b_u = b_v
        if S.REMOVAL == "p":  # reads before the decay
            b_u -= tl.sum(tl.expand_dims(b_p, V_AXIS) * b_S, axis=K_AXIS)
        b_S *= tl.expand_dims(decay_exp(b_g, R.EXP2), V_AXIS)
        b_kk = tl.expand_dims(b_k, V_AXIS)
        if S.REMOVAL == "k":
            b_u -= tl.sum(b_kk * b_S, axis=K_AXIS)
        b_u *= b_beta
        b_S += b_kk * tl.expand_dims(b_u, K_AXIS)
        b_o = scale * tl.sum(tl.expand_dims(b_q, V_AXIS) * b_S, axis=K_AXIS)
        tl.store(o + (t * S.HV + i_h) * S.V + o_v, b_o.to(o.dtype.element_ty), mask=o_v < S.V)
        if DRAFTS:
            to = tl.load(places + i_n * columns + i, mask=i < columns, other=-1).to(tl.int64)
            if (to >= 0) & (to < P):
                store_block(S_end.ptr + to * S_end.n + i_h * S_end.h, b_S, o_r, o_c, ROWS, COLUMNS)
    if S_end.ptr is not None and not DRAFTS:  # noqa: SIM102, decided when the kernel is compiled
        if exists:
            store_block(S_end.ptr + place * S_end.n + i_h * S_end.h, b_S, o_r, o_c, ROWS, COLUMNS)


def recurrent(
    rule: DeltaRule, x: Inputs, S0: Tensor | None, S_end: Tensor | None, sequences: Sequences
) -> Tensor:
    """As in kernels/torch/recurrent.py, for states that are dense in their last two dims. It reads
    no value on the host."""
    q, k, v, g = map(unit_rows, x[:4])
    A_log, dt_bias = (None if r is None else r.contiguous() for r in (x.A_log, x.dt_bias))
    x = x._replace(q=q, k=k, v=v, g=g, A_log=A_log, dt_bias=dt_bias)
    if S0 is not None and not S0[0, 0].is_contiguous():
        S0 = S0.contiguous()
    tokens, (H, K), (HV, V) = len(x.q), x.q.shape[1:], x.v.shape[1:]
    t = TUNING.tile("recurrent", K, V, x.q.dtype)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    offsets, pool = sequences.offsets, sequences.pool
    if offsets is not None:
        offsets = offsets.to(x.q.device).contiguous()
    places, accepted = (None, None) if pool is None else (pool.places.contiguous(), pool.accepted)
    launch(
        recurrent_kernel,
        (cdiv(V, t.BV) * sequences.number, HV),
        Tokens(*(rows(r) for r in (x.q, x.k, x.v, x.g, x.beta, x.p))),
        gate(rule, x),
        rule.beta_factor or 1.0,
        state(S0),
        o,
        state(S_end),
        offsets,
        places,
        1 if places is None else places.shape[1],
        None if accepted is None else accepted.contiguous(),
        0 if places is None or S0 is None else len(S0),
        tokens // sequences.number if offsets is None else tokens,
        rule.scale,
        shape(rule, x.q.dtype, H, HV, K, V, t),
        rule_options(rule, x.q.dtype),
        rule.state_v_first,
        pool is not None and pool.drafts,
        num_warps=t.warps,
    )
    if S_end is not None and S_end is S0 and not S_end.is_inference():
        torch.autograd.graph.increment_version(S_end)
    return o

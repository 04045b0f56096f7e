"""States of a decoding step of several sequences that are written in one of several steps.

A step changes a state S [K, V] by a decay and by one update k u^T. Writing S takes as long as
reading it, and k and u together have 1/64 of its elements (K = V = 128). So a head writes its state
only in one of ROUND steps. Meanwhile memory has the state as it was written last, the decay since
then, and the updates since then, each decayed to the present:

    state = decay * S + sum of k_j u_j^T

Heads take turns, so that all steps take equally long. `Deferred.write_back` brings all states of a
layer up to date between any two steps. Once somebody has read a state, each step writes all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_cp.kernels.sm90.step_layouts import matrix, max_of
from fla_cp.kernels.triton.launch import launch

if TYPE_CHECKING:
    from fla_cp.kernels.sm90.rows_state import StateShape


EVERY_STEP = -(2**30)
"""A count of steps that stays negative."""


class Updates(NamedTuple):
    """What the states of a layer lack: for each head k [B * HV, ROUND, BK], whose last row is the
    decay, and u [B * HV, ROUND, V], fp32. steps: int32, whose first element counts the steps since
    all states were up to date. If it is negative, each step writes all states."""

    k: Tensor
    u: Tensor
    steps: Tensor


class Deferred:
    """A layer's states [B, HV, K, V] and what they lack. steps: see `Updates`. S: what the
    recurrence is compiled for."""

    def __init__(self, state: Tensor, steps: Tensor, S: StateShape) -> None:
        self.state, self.S = state, S
        k = state.new_zeros(S.B * S.HV, S.ROUND, S.BK)
        u = state.new_zeros(S.B * S.HV, S.ROUND, S.V)
        self.updates = Updates(k, u, steps)

    def write_back(self) -> None:
        """Brings the states up to date. The host does not wait for it."""
        S = self.S
        grid = S.B * S.HV, S.V // S.BV
        with torch.cuda.device_of(self.state):  # the caller may be on another GPU
            launch(rows_write_back_kernel, grid, self.state, self.updates, S, num_warps=S.WARPS)
        if not self.state.is_inference():
            torch.autograd.graph.increment_version(self.state)
        self.reset(False)

    def reset(self, every_step: bool) -> None:
        """Says that the states are up to date as they are in memory. every_step: whether the steps
        that follow write all of them, so that they stay up to date."""
        self.updates.steps.fill_(EVERY_STEP if every_step else 0)


@gluon.constexpr_function
def updates_layout(columns, S):
    """Updates of some heads [WARPS, ROUND, columns]: each warp has those of a head."""
    each = max(1, columns // 32)
    return gl.BlockedLayout([1, S.ROUND, each], [1, 1, 32], [S.WARPS, 1, 1], [2, 1, 0])


@gluon.jit
def turn_of(head, steps, S: gl.constexpr):
    """The position of heads in their rounds of ROUND steps, in the last of which they write their
    states, and the number of updates that their states lack. steps: see `Updates`. Heads of a
    program, which are P apart, have different positions, so that few of them write in one step."""
    turn = (steps + head + head // S.P * max_of(1, S.ROUND // 4)) % S.ROUND
    turn = gl.where(steps < 0, S.ROUND - 1, turn)
    return turn, gl.maximum(gl.minimum(turn, steps), 0)


@gluon.jit
def rows_of(ptr, head, N: gl.constexpr, S: gl.constexpr):
    """Pointers to updates [WARPS, ROUND, N] of heads [WARPS], and the numbers of the updates."""
    L: gl.constexpr = updates_layout(N, S)
    o_e = gl.arange(0, S.ROUND, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    o_n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :]
    p = ptr + (head[:, None] * S.ROUND + o_e) * N
    return p[:, :, None] + o_n[None, :, :], o_e


@gluon.jit
def load_updates(late, head_k, head_v, steps, S: gl.constexpr):
    """k [WARPS, ROUND, BK] of heads, with the decays as the last rows, and u [WARPS, ROUND, V].
    Rows without an update are zero, and a decay if there is no update."""
    _, held = turn_of(head_k, steps, S)
    p, o_e = rows_of(late.k, head_k, S.BK, S)
    there = (o_e < held[:, None]) | ((o_e == S.ROUND - 1) & (held > 0)[:, None])
    b_k = gl.load(p, mask=there[:, :, None], other=0.0)
    _, held = turn_of(head_v, steps, S)
    p, o_e = rows_of(late.u, head_v, S.V, S)
    return b_k, gl.load(p, mask=(o_e < held[:, None])[:, :, None], other=0.0)


@gluon.jit
def rows_write_back_kernel(state, late, S: gl.constexpr):
    """`Deferred.write_back` for BV columns of a head's state."""
    L: gl.constexpr = matrix(S.BV, 4, S.WARPS)
    head, column = gl.program_id(0), gl.program_id(1) * S.BV
    _, held = turn_of(head, gl.load(late.steps), S)
    if held > 0:
        o_k, o_c = (
            gl.arange(0, S.BK, gl.SliceLayout(1, L)),
            gl.arange(0, S.BV, gl.SliceLayout(0, L)),
        )
        m_k = o_k < S.K
        p = (state + head * (S.K * S.V) + column + o_k * S.V)[:, None] + o_c[None, :]
        p_k = late.k + head * (S.ROUND * S.BK) + o_k
        p_v = late.u + head * (S.ROUND * S.V) + column + o_c
        b_S = gl.load(p, mask=m_k[:, None], other=0.0)
        b_S *= gl.load(p_k + (S.ROUND - 1) * S.BK)[:, None]
        for _ in range(held):
            b_S += gl.load(p_k)[:, None] * gl.load(p_v)[None, :]
            p_k, p_v = p_k + S.BK, p_v + S.V
        gl.store(p, b_S, mask=m_k[:, None])

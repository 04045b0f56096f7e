"""References of the halves of a chunk, for the backward of the channelwise local stage, in Gluon.

The kernel of intra_channelwise_bwd.py has them where no 16 rows decay by more than 2^100. For
steeper decays it has those of intra_channelwise_bwd_quarters.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fla_cp.kernels.sm90.intra_channelwise import SLAB
from fla_cp.kernels.sm90.intra_channelwise_bwd_quarters import by_quarter, result, times

TO_END, UP_TO = gl.constexpr(1), gl.constexpr(2)
EARLY, LATE = gl.constexpr(3), gl.constexpr(5)
"""The numbers of the tables of `store_factors`: decays to the chunk's end, decays up to the middle,
and the first of two factors of the decay between the middles, which only the early or the late half
of the rows has; the others have 1."""


@gluon.jit
def whole_power(n):
    return gl.floor(n + 0.5)


@gluon.jit
def half_factors(anchors, w, c, S: gl.constexpr):
    """For each quarter w [4, 1] and channel c, [4, SLAB] each: by how much the middle of its half
    exceeds the whole number next to it; the decay from that number to the chunk's end; the decay up
    to that number. And two factors [SLAB] of the decay between the numbers of both halves."""
    a_0, a_1 = gl.load(anchors + c), gl.load(anchors + 2 * S.K + c)
    end = gl.load(anchors + 3 * S.K + c)[None, :]
    n_0, n_1 = whole_power(a_0), whole_power(a_1)
    a = gl.where(w < 2, a_0[None, :], a_1[None, :])
    n = gl.where(w < 2, n_0[None, :], n_1[None, :])
    across = n_1 - n_0
    near, far = gl.exp2(gl.maximum(across, -120.0)), gl.exp2(gl.minimum(across + 120.0, 0.0))
    return a - n, gl.exp2(end - n), gl.exp2(n), near, far


@gluon.jit
def store_factors(s_factors, factors, w):
    """Stores the tables that `of_half` and `across` read. factors: all of `half_factors` but the
    first. w [4, 1]: the quarter."""
    to_end, up_to, near, far = factors
    s_factors.index(TO_END).store(to_end)
    s_factors.index(UP_TO).store(up_to)
    near, far = near[None, :], far[None, :]
    s_factors.index(EARLY).store(gl.where(w < 2, near, 1.0))
    s_factors.index(EARLY + 1).store(gl.where(w < 2, far, 1.0))
    s_factors.index(LATE).store(gl.where(w < 2, 1.0, near))
    s_factors.index(LATE + 1).store(gl.where(w < 2, 1.0, far))


@gluon.jit
def of_half(s_factors, kind: gl.constexpr):
    """A table of `store_factors` [4, SLAB], as `times` takes it."""
    return s_factors.index(kind).load(gl.SliceLayout(1, by_quarter()))


@gluon.jit
def across(x, s_factors, kind: gl.constexpr):
    """x [64, SLAB], whose early or late half of the rows (EARLY, LATE) is multiplied by the decay
    between the middles of both halves."""
    return times(times(x, of_half(s_factors, kind)), of_half(s_factors, kind + 1))


@gluon.jit
def half_products(sums, s_s, s_f, s_factors, REMOVES: gl.constexpr):
    """Adds what the scores add to the gradients of rows of q, of rows of beta k and of columns.

    sums: the three gradients [64, SLAB] so far, those of rows relative to the chunk's start, those
    of columns relative to the middle of their half, like all results. s_s, s_f, s_factors: as in
    the kernel. No row has a score with a column of a later half.
    """
    b_dq, b_dr, b_dc = sums
    zero = gl.full([64, SLAB], 0.0, gl.float32, result())
    s_q, s_r, x_q, x_r = s_s.index(0), s_s.index(1), s_f.index(2), s_f.index(3)
    early, late = s_f.index(0).slice(0, 32), s_f.index(0).slice(32, 32)
    # What columns of the first half give all rows, and rows of the first half all columns
    near_q = warpgroup_mma(s_q.slice(0, 32, 1), early, zero, use_acc=False, is_async=True)
    near_r = near_q
    if REMOVES:
        near_r = warpgroup_mma(s_r.slice(0, 32, 1), early, zero, use_acc=False, is_async=True)
    own_s = s_q.slice(0, 32).permute((1, 0))
    b_dc = warpgroup_mma(own_s, x_q.slice(0, 32), b_dc, is_async=True)
    if REMOVES:
        own_s = s_r.slice(0, 32).permute((1, 0))
        b_dc = warpgroup_mma(own_s, x_r.slice(0, 32), b_dc, is_async=True)
        near_q, near_r = warpgroup_mma_wait(2, deps=(near_q, near_r))
    else:
        near_q = warpgroup_mma_wait(1, deps=(near_q,))
    e = of_half(s_factors, UP_TO)
    b_dq = times(b_dq, e) + across(near_q, s_factors, LATE)
    if REMOVES:
        b_dr = across(near_r, s_factors, LATE) - times(b_dr, e)
    # What rows of the second half give all columns, and columns of the second half its rows
    far_s = s_q.slice(32, 32).permute((1, 0))
    far = warpgroup_mma(far_s, x_q.slice(32, 32), zero, use_acc=False, is_async=True)
    if REMOVES:
        far_s = s_r.slice(32, 32).permute((1, 0))
        far = warpgroup_mma(far_s, x_r.slice(32, 32), far, is_async=True)
    b_dq = warpgroup_mma(s_q.slice(32, 32, 1), late, b_dq, is_async=True)
    if REMOVES:
        b_dr = warpgroup_mma(s_r.slice(32, 32, 1), late, b_dr, is_async=True)
    far, b_dc = warpgroup_mma_wait(2 if REMOVES else 1, deps=(far, b_dc))
    b_dc += across(far, s_factors, EARLY)
    if REMOVES:
        b_dq, b_dr = warpgroup_mma_wait(0, deps=(b_dq, b_dr))
    else:
        b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
    return b_dq, b_dr, b_dc

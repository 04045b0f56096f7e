"""The headwise backward for the tensor cores of sm_90, in Gluon.

triton/intra_headwise_bwd.py explains what is computed; the results are equal up to rounding. Here
one program computes all gradients of a chunk and a key head, so that no operand is read twice and
the gradients of the scores never leave the SM. Each SM runs one program, which works through its
share of the chunks. Eight warps form products. Meanwhile one warp copies in the operands of the
next chunk, and two form sums that no product needs and store the gradients of the last one.

The reverse scan wrote dv = beta y. It stands for y here: then no product needs beta, since beta
multiplies a row of y wherever it multiplies that row of k or p. Only the gradient of beta is
divided by it, for which no beta is zero (`away_from_zero`).
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.backend import ChunkStates
from fla_cp.kernels.sm90.intra_headwise_bwd_copies import (
    BAR_DH,
    BAR_H,
    BAR_K,
    BAR_STAGE,
    SLOT_GC,
    SLOT_GC_BEFORE,
    SLOT_K_FACTOR,
    SLOT_K_SCALE,
    SLOT_Q_SCALE,
    SLOT_R_SCALE,
    copy_items,
    planes_of,
    sum_and_store_items,
    tiles_of,
)
from fla_cp.kernels.sm90.tma import barrier, describe
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.bundles import ChunkTable, Grads, rule_options
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, ScanGrads, Tables
from fla_cp.kernels.triton.tile_table import WHOLE
from fla_cp.rule import CHUNK


@gluon.jit
def decayed(x, EXP2: gl.constexpr):
    if EXP2:
        return gl.exp2(x)
    else:
        return gl.exp(x)


@gluon.jit
def row_of(s_rows, plane, layout: gl.constexpr):
    """[BT, 1]: one of the planes of `Chunks.rows` that `copy_items` copied."""
    return s_rows.index(plane).permute((1, 0)).load(layout)


@gluon.jit
def weights(s_rows, slot, scale, sums, keep, EXP2: gl.constexpr, layout: gl.constexpr):
    """The weights of scores [BT, BT] where `keep` is set: scale_i exp(sums_i - gc_j) k_scale_j.
    scale, sums: planes of the rows. slot: see `form_items`."""
    x = row_of(s_rows, slot + sums, layout) - s_rows.index(slot + SLOT_GC).load(layout)
    x = decayed(gl.where(keep, x, 0.0), EXP2)
    k_scale = s_rows.index(slot + SLOT_K_SCALE).load(layout)
    return x * (row_of(s_rows, slot + scale, layout) * k_scale)


@gluon.jit
def add_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def rows_of(x):
    """[BT] of [BT, 1]."""
    return gl.sum(x, 1)


@gluon.jit
def weigh_scores(b_ds, b_da, s_rows, s_w, d, c, i, n, slot, S: gl.constexpr, R: gl.constexpr):
    """Stores the gradients of Aqk and Akk, b_ds and b_da, times the weights of the scores. Returns
    the diagonal of b_ds [BT]. d == c on the diagonal, and d > c below it. The first n rows i
    have a token. slot: see `form_items`."""
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, S.BT // 2, 16])
    half: gl.constexpr = s_w.dtype
    R_SCALE: gl.constexpr = SLOT_R_SCALE if S.REMOVAL == "p" else SLOT_K_SCALE
    R_SUMS: gl.constexpr = SLOT_GC_BEFORE if S.REMOVAL == "p" else SLOT_GC
    diagonal = gl.sum(gl.where(d == c, b_ds, 0.0), 1)
    keep = (d > c) & (i < n)
    if S.REMOVAL != "none":
        w = weights(s_rows, slot, R_SCALE, R_SUMS, keep, R.EXP2, square)
        s_w.index(slot + 1).store(gl.where(keep, b_da * -w, 0.0).to(half))
    w = weights(s_rows, slot, SLOT_Q_SCALE, SLOT_GC, keep, R.EXP2, square)
    s_w.index(slot).store(gl.where(keep, b_ds * w, 0.0).to(half))
    return diagonal


@gluon.jit
def state_products(s_h, s_dh, S: gl.constexpr, layout: gl.constexpr):
    """h * dh [K, V], the first and the last half of K added up: [BT, V]."""
    x = s_h.slice(0, S.BT).load(layout).to(gl.float32)
    x *= s_dh.slice(0, S.BT).load(layout).to(gl.float32)
    y = s_h.slice(S.BT, S.BT).load(layout).to(gl.float32)
    return x + y * s_dh.slice(S.BT, S.BT).load(layout).to(gl.float32)


@gluon.jit
def sum_of_products(s_h, s_dh, S: gl.constexpr):
    """The sum of h * dh [K, V] over all elements."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    x = gl.full([16, S.V], 0.0, gl.float32, flat)
    for part in gl.static_range(S.K // 16):
        b_h = s_h.slice(part * 16, 16).load(flat).to(gl.float32)
        x += b_h * s_dh.slice(part * 16, 16).load(flat).to(gl.float32)
    return gl.sum(gl.sum(x, 1), 0)


@gluon.jit
def finish_head(
    places, dq, dk, dp, diagonal, f_q, f_k, f_r, none, scale, S: gl.constexpr, R: gl.constexpr
):
    """Leaves the gradients of a key head's q, k and p in shared memory, in the inputs' place. f_q,
    f_k, f_r: the scales of the last value head. none: 0 in a form that the compiler cannot tell to
    be 0."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, S.K // 2, 16])
    half: gl.constexpr = places[7].dtype
    OWN: gl.constexpr = S.REMOVAL == "p"
    # The diagonal's row and column cancel in the gate's gradient.
    _do, _vn, _dv, _v, _h, _dh, s_q, s_k, s_p = tiles_of(places, 0, none)
    if OWN:  # first, to free its registers
        if R.NORM:
            b_p = s_p.load(wide).to(gl.float32)
            dp -= b_p * (gl.sum(b_p * dp, 1)[:, None] * f_r * f_r)
        s_p.store(dp.to(half))
    b_k, b_q = s_k.load(wide).to(gl.float32), s_q.load(wide).to(gl.float32)
    dq += diagonal[:, None] * b_k
    dk += diagonal[:, None] * b_q
    if R.NORM:
        f_q = f_q * (1.0 / scale)
        if S.G == 1 and not OWN:
            along_q, along_k = gl.reduce((b_q * dq, b_k * dk), 1, add_two)
            dq -= b_q * (along_q[:, None] * f_q * f_q)
        else:  # one after the other: together they need more registers
            dq -= b_q * (gl.sum(b_q * dq, 1)[:, None] * f_q * f_q)
            along_k = gl.sum(b_k * dk, 1)
        dk -= b_k * (along_k[:, None] * f_k * f_k)
    s_q.store(dq.to(half))
    s_k.store(dk.to(half))


@gluon.jit
def store_sums(more, b_dgc, b_z, beta, r, n, t, tokens, i_ch, i_hv, S: gl.constexpr):
    """Stores what there is one number of for each row r: the gradients of gc, of beta, but for v's
    share, and with p of the sums up to the token before. b_z: r dr, summed over channels. The first
    n rows have a token, the first of them token t."""
    gl.store(more.dgc + i_ch * S.BT + r, b_dgc)
    if S.REMOVAL != "none":
        to = more.shares + (tokens + t + r).to(gl.int64) * S.HV + i_hv
        gl.store(to, b_z / rows_of(beta), mask=r < n)
    if S.REMOVAL == "p":
        gl.store(more.shift + i_ch * S.BT + r, gl.where(r < n, b_z, 0.0))


@gluon.jit
def form_items(
    places,
    ready,
    free,
    done,
    more,
    items,
    programs,
    tokens,
    scale,
    S: gl.constexpr,
    R: gl.constexpr,
):
    """Forms the gradients of this program's items. An item is a chunk and a key head."""
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    OWN: gl.constexpr = S.REMOVAL == "p"
    R_SCALE: gl.constexpr = SLOT_R_SCALE if OWN else SLOT_K_SCALE
    R_SUMS: gl.constexpr = SLOT_GC_BEFORE if OWN else SLOT_GC
    EARLY: gl.constexpr = S.G == 1 and not OWN  # otherwise there are no registers for it
    H: gl.constexpr = S.HV // S.G
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, S.BT // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, S.K // 2, 16])
    i = gl.arange(0, S.BT, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, S.BT, gl.SliceLayout(0, square))[None, :]
    # A column index has two parts: c differs between the numbers of a thread, the rest between
    # threads. Rows are then compared with constants, and columns take no registers.
    c = j & 25
    ahead = i - (j & 38)
    r = gl.arange(0, S.BT, gl.SliceLayout(1, wide))
    none = gl.full([S.BT, S.BT], 0.0, gl.float32, square)
    nothing = gl.full([S.BT, S.K], 0.0, gl.float32, wide)
    heads, visits = 0, 0
    first = gl.program_id(0) // H
    n_now, t_now = gl.load(more.chunks.rows + first), gl.load(more.chunks.start + first)
    n_next, t_next = n_now, t_now
    for item in range(gl.program_id(0), items, programs):
        i_c, i_h = item // H, item % H
        # Sums over the value heads of the group. diagonal: the weights of k and q in dq and dk.
        # past: q dq - k dk of the heads before, summed over channels.
        dq, dk, dp = nothing, nothing, nothing
        diagonal = gl.full([S.BT], 0.0, gl.float32, gl.SliceLayout(1, wide))
        past, of_gc, of_beta = diagonal, diagonal, diagonal
        f_q = gl.full([S.BT, 1], 0.0, gl.float32, wide)
        f_k, f_r, divisor = f_q, f_q, f_q
        for i_g in range(S.G):
            n, t = n_now, t_now
            if S.G > 1:  # otherwise what depends on them stays in registers through the loop
                n, t = gl.load(more.chunks.rows + i_c), gl.load(more.chunks.start + i_c)
            i_hv = i_h * S.G + i_g
            i_ch = (i_c * S.HV + i_hv).to(gl.int64)
            parity = visits & 1
            # slot is 0 in a form that the compiler cannot tell to be 0. Otherwise it would form the
            # addresses of all tiles at the start, in more registers than there are. `row` and
            # `zero_..` below are other forms of 0. Phases that use them form their own addresses.
            slot = (n + i_g) // (S.BT + S.G)
            stage = visits % S.NS
            s_do, s_vn, s_dv, _v, s_h, s_dh, s_q, s_k, _p = tiles_of(places, slot + stage, slot)
            s_rows, s_w = places[9], places[10]
            s_hT, s_dhT = s_h.permute((1, 0)), s_dh.permute((1, 0))
            decay = gl.load(more.decay + i_ch * S.K)

            # Products with v_new, states and their gradients.
            mbarrier.wait(ready.index(BAR_STAGE + stage), (visits // S.NS) & 1)
            b_ds = warpgroup_mma(s_do, s_vn.permute((1, 0)), none, use_acc=False, is_async=True)
            b_da = b_ds
            if REMOVES:
                b_da = warpgroup_mma(s_dv, s_vn.permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(BAR_H), parity)
            b_dq = warpgroup_mma(s_do, s_hT, nothing, use_acc=False, is_async=True)
            b_dr = b_dq
            if REMOVES and S.G == 1:  # groups do this later: their sums leave no registers here
                b_dr = warpgroup_mma(s_dv, s_hT, nothing, use_acc=False, is_async=True)

            # The gradients of the scores, weighted with decays, norms and scale.
            if REMOVES:
                b_ds, b_da = warpgroup_mma_wait(2 if S.G == 1 else 1, deps=(b_ds, b_da))
            else:
                b_ds = warpgroup_mma_wait(1, deps=(b_ds,))
            of_row = weigh_scores(b_ds, b_da, s_rows, s_w, ahead + slot, c, i, n, slot, S, R)
            of_row = gl.convert_layout(of_row, gl.SliceLayout(1, wide))
            s_wq, s_wr = s_w.index(slot), s_w.index(slot + 1)
            row = (n + i_g) // (S.BT + S.G + 4)
            fence_async_shared()
            barrier()

            if S.G > 1:  # begun here, so that the sum so far and this head's part share registers
                e_q = decayed(row_of(s_rows, row + SLOT_GC, wide), R.EXP2)
                e_q = e_q * row_of(s_rows, row + SLOT_Q_SCALE, wide)
                b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
                b_dq = b_dq * e_q + dq
                mbarrier.wait(ready.index(BAR_K), heads & 1)
                b_dq = warpgroup_mma(s_wq, s_k, b_dq, is_async=True)
                if REMOVES:
                    zero_later = (n + i_g) // (S.BT + S.G + 1)
                    s_dv = places[2].index(zero_later + stage)
                    s_hT = places[4].index(zero_later).permute((1, 0))
                    b_dr = warpgroup_mma(s_dv, s_hT, nothing, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(BAR_DH), parity)
            b_c = b_dq
            if EARLY:
                b_c = warpgroup_mma(s_vn, s_dhT, nothing, use_acc=False, is_async=True)
                b_left = state_products(s_h, s_dh, S, wide) * decay
            else:
                b_left = sum_of_products(s_h, s_dh, S) * decay
            f_q = row_of(s_rows, row + SLOT_Q_SCALE, wide)
            f_k = row_of(s_rows, row + SLOT_K_SCALE, wide)
            f_r = row_of(s_rows, row + R_SCALE, wide)
            e_k = row_of(s_rows, row + SLOT_K_FACTOR, wide)
            beta = row_of(s_rows, row, wide)
            diagonal = diagonal + of_row * rows_of(f_q * f_k)
            if REMOVES:
                b_dq, b_dr = warpgroup_mma_wait(1 if EARLY else 0, deps=(b_dq, b_dr))
                e_r = decayed(row_of(s_rows, row + R_SUMS, wide), R.EXP2)
                b_dr = b_dr * -(e_r * f_r)
            else:
                b_dq = warpgroup_mma_wait(1 if EARLY else 0, deps=(b_dq,))
            if S.G == 1:
                e_q = decayed(row_of(s_rows, row + SLOT_GC, wide), R.EXP2)
                b_dq = b_dq * (e_q * f_q)
            mbarrier.arrive(free.index(BAR_H), count=1)
            if not EARLY:
                b_c = warpgroup_mma(s_vn, s_dhT, nothing, use_acc=False, is_async=True)
            b_c = warpgroup_mma_wait(0, deps=(b_c,))
            mbarrier.arrive(free.index(BAR_DH), count=1)
            mbarrier.arrive(free.index(BAR_STAGE + stage), count=1)
            zero_after = (n + i_g) // (S.BT + S.G + 2)
            s_q, s_k = places[6].index(zero_after), places[7].index(zero_after)
            s_r = places[8].index(zero_after) if OWN else s_k

            # What reaches k and the gate through the state at the end of the chunk.
            if S.G == 1:
                mbarrier.wait(ready.index(BAR_K), heads & 1)
            b_c = b_c * e_k
            b_kc = s_k.load(wide).to(gl.float32) * b_c
            if EARLY:
                end = gl.sum(gl.sum(b_kc + b_left, 1), 0)
            else:
                end = gl.sum(gl.sum(b_kc, 1), 0) + b_left

            # What reaches q, r and k through the scores.
            if S.G == 1:
                b_dq = warpgroup_mma(s_wq, s_k, b_dq, is_async=True)
            else:
                b_c = b_c + dk
            b_c = warpgroup_mma(s_wq.permute((1, 0)), s_q, b_c, is_async=True)
            if REMOVES:
                b_dr = warpgroup_mma(s_wr, s_k, b_dr, is_async=True)
                b_c = warpgroup_mma(s_wr.permute((1, 0)), s_r, b_c, is_async=True)
            if S.G == 1:  # needed at once when the next item begins
                coming = gl.minimum(item + programs, items - 1) // H
                n_next = gl.load(more.chunks.rows + coming)
                t_next = gl.load(more.chunks.start + coming)
            if REMOVES:
                b_dq, b_dr, b_c = warpgroup_mma_wait(0, deps=(b_dq, b_dr, b_c))
            else:
                b_dq, b_c = warpgroup_mma_wait(0, deps=(b_dq, b_c))
            b_k = s_k.load(wide).to(gl.float32)
            b_x = s_q.load(wide).to(gl.float32) * b_dq - b_k * b_c
            if not REMOVES:
                b_x = gl.sum(b_x, 1)
                b_z = b_x
                b_dgc = b_x - past
                past = b_x
                dk = b_c
            else:
                b_r = b_k
                if OWN:
                    b_r = s_r.load(wide).to(gl.float32)
                if EARLY:
                    b_z, b_x = gl.reduce((b_r * b_dr, b_x), 1, add_two)
                else:  # one after the other: together they need more registers
                    b_x = gl.sum(b_x, 1)
                    b_z = gl.sum(b_r * b_dr, 1)
                b_dgc = b_x - past + b_z
                if OWN:
                    dk, dp = b_c, b_dr
                else:
                    past = b_x - b_z
                    dk = b_c + b_dr
            dq = b_dq
            b_dgc = gl.where(r < n, b_dgc, 0.0) + gl.where(r == S.BT - 1, end, 0.0)
            if S.G > 1:
                store_sums(more, b_dgc, b_z, beta, r + slot, n, t, tokens, i_ch, i_hv, S)
            else:
                of_gc, of_beta, divisor = b_dgc, b_z, beta
            visits += 1

        zero = heads // 2**30
        finish_head(places, dq, dk, dp, diagonal, f_q, f_k, f_r, zero, scale, S, R)
        fence_async_shared()
        barrier()
        mbarrier.arrive(done.index(0), count=1)
        if S.G == 1:  # behind the fence, which waits for stores to memory, too
            i_ch = (i_c * S.HV + i_h).to(gl.int64)
            at = r + zero
            store_sums(more, of_gc, of_beta, divisor, at, n_now, t_now, tokens, i_ch, i_h, S)
            n_now, t_now = n_next, t_next
        heads += 1  # noqa: SIM113  # Gluon has no enumerate


class BwdMore(NamedTuple):
    """What the kernel takes besides TMA descriptors.

    dq_rows, ..: the gradients as pointers. heads: the strides of heads of do, v, q, k and p.
    shares [2, T, HV], dgc, shift: as in `Grads`."""

    dq_rows: Tensor
    dk_rows: Tensor
    dp_rows: Tensor | None
    decay: Tensor
    dgc: Tensor
    shift: Tensor | None
    shares: Tensor | None
    chunks: ChunkTable
    heads: tuple[int, ...]


@gluon.jit(do_not_specialize=["items", "programs", "tokens"])
def head_bwd_sm90_kernel(
    do,
    v_new,
    dv,
    v,
    h,
    dh,
    q,
    k,
    p,
    rows,
    dq,
    dk,
    dp,
    more,
    items,
    programs,
    tokens,
    scale,
    S: gl.constexpr,
    R: gl.constexpr,
):
    """dq, dk, dp [T, H, K]. Without p, p is k and dp is dk. dv: as the reverse scan wrote it."""
    half: gl.constexpr = k.dtype
    OWN: gl.constexpr = S.REMOVAL == "p"
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    scores: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    few: gl.constexpr = S.BT if REMOVES else 16
    s_k = gl.allocate_shared_memory(half, [1, S.BT, S.K], k.layout)
    s_p = s_k
    if OWN:
        s_p = gl.allocate_shared_memory(half, [1, S.BT, S.K], p.layout)
    places = (
        gl.allocate_shared_memory(half, [S.NS, S.BT, S.V], do.layout),
        gl.allocate_shared_memory(half, [S.NS, S.BT, S.V], v_new.layout),
        gl.allocate_shared_memory(half, [S.NS, few, S.V], dv.layout),
        gl.allocate_shared_memory(half, [1, few, S.V], v.layout),
        gl.allocate_shared_memory(half, [1, S.K, S.V], h.layout),
        gl.allocate_shared_memory(half, [1, S.K, S.V], dh.layout),
        gl.allocate_shared_memory(half, [1, S.BT, S.K], q.layout),
        s_k,
        s_p,
        gl.allocate_shared_memory(gl.float32, [planes_of(S), 1, S.BT], rows.layout),
        gl.allocate_shared_memory(half, [2, S.BT, S.BT], scores),
        gl.allocate_shared_memory(gl.float32, [S.BT], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    ready = gl.allocate_shared_memory(gl.int64, [BAR_STAGE + S.NS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BAR_STAGE + S.NS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(BAR_STAGE + S.NS):
        mbarrier.init(ready.index(n), count=1)
        if REMOVES and ((n == BAR_H) | (n >= BAR_STAGE)):  # two partitions read these tiles
            mbarrier.init(free.index(n), count=2)
        else:
            mbarrier.init(free.index(n), count=1)
    mbarrier.init(done.index(0), count=1)
    read = (do, v_new, dv, v, h, dh, q, k, p, rows)
    # Of a thread of the storing warps. With these, no warps spill.
    REGISTERS: gl.constexpr = 40 if S.G == 1 and not OWN else 48
    # fmt: off
    gl.warp_specialize([
        (form_items, (places, ready, free, done, more, items, programs, tokens, scale, S, R)),
        (copy_items, (read, places, ready, free, more, items, programs, S)),
        (sum_and_store_items, ((dq, dk, dp), places, ready, free, done, more, items, programs, S)),
    ], [1, 2], [40, REGISTERS])
    # fmt: on


def head_bwd(
    table: Tables,
    x: Inputs,
    c: Chunks,
    states: ChunkStates,
    grads: ScanGrads,
    out: Grads,
    programs: int,
) -> None:
    """Fills out, but for dv. programs: how many to start at most, one for each SM."""
    h, v_new = states
    items = len(table.chunk_start) * x.q.shape[1]
    programs = min(programs, items)
    p, dp = (x.k, out.dk) if x.p is None else (x.p, out.dp)
    read = {"do": grads.do, "v_new": v_new, "dv": out.dv, "v": x.v, "q": x.q, "k": x.k, "p": p}
    written = {"dq": out.dq, "dk": out.dk, "dp": dp}
    described = {n: describe(t, CHUNK, t.shape[-1]) for n, t in (read | written).items()}
    described |= {n: describe(t, *t.shape[-2:]) for n, t in (("h", h), ("dh", grads.dh))}
    heads = tuple(t.stride(1) for t in (grads.do, x.v, x.q, x.k, p))
    rest = c.decay, out.dgc, out.shift, out.shares, table.chunks, heads
    launch(
        head_bwd_sm90_kernel,
        (programs,),
        **described,
        rows=describe(c.rows, 1, CHUNK),
        more=BwdMore(out.dq, out.dk, dp, *rest),
        items=items,
        programs=programs,
        tokens=0 if out.shares is None else out.shares.shape[1],
        scale=c.rule.scale,
        S=c.shape(WHOLE._replace(stages=2 if x.p is None else 1)),
        R=rule_options(c.rule, x.q.dtype),
        num_warps=8,
    )

"""The backward of everything local to a chunk whose decays are too strong for the path of a safe
gate, for sm_90, in Gluon.

`intra_bwd_kernel` in triton/intra_channelwise_bwd.py explains what is computed; the results are
equal up to rounding. A program has a slab of 64 channels of a chunk and a head. A thread has 16
rows of two channels, a quarter of the chunk in a warp, and decays are products of the decays of
single tokens, as in intra_channelwise_steep.py. At each level, rows in second blocks and columns in
first blocks are stored as operands, and the products with the mirrored gradients of the scores come
back the same way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.sm90.intra_channelwise import (
    SLAB,
    copy_slab,
    load_raw,
    load_tall,
    of_quarters,
    plus,
    quarter_sum,
    store_tall,
)
from fla_cp.kernels.sm90.intra_channelwise_bwd import slopes, why_not_bwd
from fla_cp.kernels.sm90.intra_channelwise_steep import (
    doubled,
    halves,
    joined,
    load_decays,
    load_scaled,
    quarters_of,
)
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import rows_from
from fla_cp.kernels.triton.device.bundles import Grads, RuleOptions, Saved, gate, shape
from fla_cp.kernels.triton.device.planes import (
    CHANNELWISE_PLANES,
    DIAGONAL,
    GRAD_PLANES,
    K_DK,
    K_SCALE,
    Q_DQ,
    Q_SCALE,
)
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables
from fla_cp.kernels.triton.tile_table import Tile


@gluon.jit
def copy_scores(ptr, place, none, n: gl.constexpr):
    """Starts to copy a tile [64, 64], but for pairs of rows and columns that are not in both blocks
    of a pair of blocks of n rows; these become zero."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = none + gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
    pairs = (i // n) ^ 1 == j // n
    async_copy.async_copy_global_to_shared(place, ptr + (i * 64 + j), mask=pairs)


@gluon.jit
def load_diagonal(ptr):
    """The blocks of 16 on the diagonal of a tile [64, 64] as left operands [4, 16, 16]."""
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None][:, :, None]
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, :][:, None, :]
    return gl.load(ptr + (w * (16 * 64 + 16) + i * 64 + j))


@gluon.jit
def small_product(d, s_x, s_r, n: gl.constexpr):
    """Stores the products, within quarters, of scores d (`load_diagonal`) and rows at s_x. Of the
    scores, only pairs of rows count that are in both blocks of a pair of blocks of 2^n."""
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    deep: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, :][:, None, :]
    d = gl.where(((i ^ j) >> n) == 1, d, 0.0).to(d.dtype)
    b = s_x._reinterpret(d.dtype, [4, 16, SLAB], deep).load(gl.DotOperandLayout(1, small, 2))
    x = mma_v2(d, b, gl.full([4, 16, SLAB], 0.0, gl.float32, small))
    s_r.store(gl.reshape(x, [64, SLAB]))


@gluon.jit
def large_product(s_s, s_x, s_r):
    """Stores the product of two tiles, which may have been in the same place."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    x = gl.full([64, SLAB], 0.0, gl.float32, acc)
    x = warpgroup_mma(s_s, s_x, x, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    barrier()
    s_r.store(x)


BETA_K = gl.constexpr(3)
"""A plane in shared memory beside those of the chunk's rows: beta times what k is multiplied by."""


@gluon.jit
def rows_factor(s_rows, plane: gl.constexpr):
    """A plane of the chunk's rows [4, 16, 1]."""
    return s_rows.index(plane).load(gl.SliceLayout(2, quarters_of(16)))[:, :, None]


@gluon.jit
def of_pairs(x):
    """x [4, 16, SLAB] summed over pairs of channels, which are in one thread: [4, 16, SLAB / 2]."""
    a, b = gl.split(gl.reshape(x, [4, 16, SLAB // 2, 2]))
    return a + b


@gluon.jit
def add_to(place, x):
    """Adds x [4, 16, SLAB] to a tile in fp32 of shared memory, of which a thread has its own."""
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    store_tall(load_tall(place, tall, quarters_of(16)) + x, place, tall)


@gluon.jit
def large_level(grads, decays, w, s_x, s_s, s_rows, places, n: gl.constexpr, REMOVES: gl.constexpr):
    """The gradients of q [4, 16, SLAB] and, summed over pairs of channels, the products of k and
    the gradients of beta k, with what blocks of n rows, 16 or 32, add. Those of k and of the sums
    of decays are in shared memory.

    decays: those of each row from the start of its quarter and up to its end, and [4, 1, SLAB]
    that between the quarter and the middle of the chunk; w: the quarter."""
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = quarters_of(16)
    s_o, s_r, s_dk, s_g = places
    dq, share = grads
    upto, after, to_middle = decays
    second = (w // (n // 16)) % 2 == 1
    f = gl.where(second, upto, after)
    if n == 32:
        f *= to_middle
    b_x = load_tall(s_x.index(1), tall, quarters)
    b_x = gl.where(second, load_tall(s_x.index(0), tall, quarters), b_x)
    row = gl.where(second, rows_factor(s_rows, Q_SCALE), rows_factor(s_rows, K_SCALE))
    store_tall((b_x * row) * f, s_o.index(0), tall)
    if REMOVES:
        barrier()
        row = gl.where(second, rows_factor(s_rows, BETA_K), rows_factor(s_rows, K_SCALE))
        store_tall((load_tall(s_x.index(1), tall, quarters) * row) * f, s_o.index(1), tall)
    fence_async_shared()
    barrier()
    large_product(s_s.index(0), s_o.index(0), s_r)
    barrier()
    b_r = load_tall(s_r, tall, quarters)
    dq += gl.where(second, f * b_r, 0.0)
    add_to(s_dk, gl.where(second, 0.0, f * b_r))
    barrier()
    b_r *= load_tall(s_o.index(0), tall, quarters)
    add_to(s_g, gl.where(second, b_r, -b_r))
    if REMOVES:
        barrier()
        large_product(s_s.index(1), s_o.index(1), s_r)
        barrier()
        b_r = load_tall(s_r, tall, quarters)
        dr = f * b_r
        share += of_pairs(gl.where(second, load_tall(s_x.index(1), tall, quarters) * dr, 0.0))
        barrier()
        add_to(s_dk, gl.where(second, rows_factor(s_rows, 0) * dr, dr))
        barrier()
        b_r *= load_tall(s_o.index(1), tall, quarters)
        add_to(s_g, gl.where(second, b_r, -b_r))
    barrier()
    return dq, share


@gluon.jit
def small_level(
    grads,
    e,
    diagonals,
    s_x,
    s_rows,
    places,
    N: gl.constexpr,
    n: gl.constexpr,
    REMOVES: gl.constexpr,
):
    """`large_level` for blocks of N = 2^n rows, at most 8. e: their decays (`doubled`). diagonals:
    of `load_diagonal`."""
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = quarters_of(16)
    s_o, s_r, s_dk, s_g = places
    half: gl.constexpr = s_o.dtype
    dq, share = grads
    upto, after, _ = e
    _, f_b = halves(upto, N)
    f_a, _ = halves(after, N)
    k_a, _ = halves(load_scaled(s_x.index(1), s_rows.index(K_SCALE)), N)
    _, q_b = halves(load_scaled(s_x.index(0), s_rows.index(Q_SCALE)), N)
    x_a = (k_a * f_a).to(half)
    store_tall(joined(x_a, (q_b * f_b).to(half), N), s_o.index(0), tall)
    if REMOVES:
        barrier()
        _, y_b = halves(load_scaled(s_x.index(1), s_rows.index(BETA_K)), N)
        store_tall(joined(x_a, (y_b * f_b).to(half), N), s_o.index(1), tall)
    barrier()
    small_product(diagonals[0], s_o.index(0), s_r, n)
    barrier()
    r_a, r_b = halves(load_tall(s_r, tall, quarters), N)
    dq_a, dq_b = halves(dq, N)
    dq = joined(dq_a, dq_b + f_b * r_b, N)
    dk_a, dk_b = halves(load_tall(s_dk, tall, quarters), N)
    store_tall(joined(dk_a + f_a * r_a, dk_b, N), s_dk, tall)
    barrier()
    x_a, x_b = halves(load_tall(s_o.index(0), tall, quarters), N)
    add_to(s_g, joined(-x_a * r_a, x_b * r_b, N))
    if REMOVES:
        barrier()
        small_product(diagonals[1], s_o.index(1), s_r, n)
        barrier()
        r_a, r_b = halves(load_tall(s_r, tall, quarters), N)
        dr_b = f_b * r_b
        _, k_b = halves(load_tall(s_x.index(1), tall, quarters), N)
        share += of_pairs(joined(dr_b * 0.0, k_b * dr_b, N))
        _, beta_b = halves(rows_factor(s_rows, 0) + joined(f_a, f_b, N) * 0.0, N)
        add_to(s_dk, joined(f_a * r_a, beta_b * dr_b, N))
        barrier()
        x_a, x_b = halves(load_tall(s_o.index(1), tall, quarters), N)
        add_to(s_g, joined(-x_a * r_a, x_b * r_b, N))
    barrier()
    return dq, share


@gluon.jit
def steep_bwd_sm90_kernel(x, gate, out, chunks, tokens, scale, S: gl.constexpr, R: gl.constexpr):
    """`intra_bwd_kernel` for key tiles of 64 channels and the chunks that are marked in x.steep.
    tokens: the rows of out.shares."""
    tiles: gl.constexpr = S.K // SLAB
    i_k = gl.program_id(0) % tiles
    i_c, i_hv = (gl.program_id(0) // tiles).to(gl.int64), gl.program_id(1).to(gl.int64)
    i_h, i_ch = i_hv // S.G, i_c * S.HV + i_hv
    if gl.load(x.steep + i_ch) == 0:
        return
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    none = n_rows // (S.BT + 1)  # 0 in a form that the compiler cannot tell to be 0
    half: gl.constexpr = x.v_new.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    single: gl.constexpr = NVMMASharedLayout(128, 32, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = quarters_of(16)
    ends: gl.constexpr = gl.SliceLayout(1, quarters)
    column: gl.constexpr = gl.SliceLayout(0, ends)

    s_x = gl.allocate_shared_memory(half, [2, S.BT, SLAB], wide)  # q, k
    s_s = gl.allocate_shared_memory(half, [2, S.BT, SLAB], wide)  # gradients of the scores
    s_h = gl.allocate_shared_memory(half, [2, SLAB, S.V], wide)  # h, dh
    s_v = gl.allocate_shared_memory(half, [3, S.BT, S.V], wide)  # do, y, v_new
    s_rows = gl.allocate_shared_memory(gl.float32, [4, 4, 16], plain)
    q, k = rows_from(x.q, start, i_h), rows_from(x.k, start, i_h)
    do = rows_from(x.do, start, i_hv)
    states, values = (i_ch * S.K + i_k * SLAB) * S.V, i_ch * (S.BT * S.V)
    copy_slab(x.h + states, S.V, SLAB, s_h.index(0), S.BT, S.V)
    copy_slab(do.ptr, do.row, n_rows, s_v.index(0), S.BT, S.V)
    if REMOVES:
        copy_slab(x.y + values, S.V, S.BT, s_v.index(1), S.BT, S.V)
    copy_slab(x.dh + states, S.V, SLAB, s_h.index(1), S.BT, S.V)
    copy_slab(x.v_new + values, S.V, S.BT, s_v.index(2), S.BT, S.V)
    copy_slab(q.ptr + i_k * SLAB, q.row, n_rows, s_x.index(0), S.BT, SLAB)
    copy_slab(k.ptr + i_k * SLAB, k.row, n_rows, s_x.index(1), S.BT, SLAB)
    scores = out.scores + i_ch * (2 * S.BT * S.BT)
    copy_scores(scores, s_s.index(0), 0, 32)
    if REMOVES:
        copy_scores(scores + S.BT * S.BT, s_s.index(1), 0, 32)
    async_copy.commit_group()

    i_r = gl.arange(0, S.BT, gl.BlockedLayout([1], [32], [4], [0]))
    at = x.rows + i_ch * (CHANNELWISE_PLANES * S.BT) + i_r
    row_beta, row_k = gl.load(at), gl.load(at + K_SCALE * S.BT)
    s_rows.index(0)._reinterpret(gl.float32, [S.BT], line).store(row_beta)
    s_rows.index(K_SCALE)._reinterpret(gl.float32, [S.BT], line).store(row_k)
    s_rows.index(BETA_K)._reinterpret(gl.float32, [S.BT], line).store(row_beta * row_k)
    row_q = gl.load(at + Q_SCALE * S.BT)
    s_rows.index(Q_SCALE)._reinterpret(gl.float32, [S.BT], line).store(row_q)
    w = gl.arange(0, 4, gl.SliceLayout(1, ends))[:, None]
    c = gl.arange(0, SLAB, column)
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :][:, :, None]
    i = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None][:, :, None]
    i = i * 16 + r
    a = load_decays(gate, start, i_hv, i_k, i, c, n_rows, S, R.GATE)
    ones = gl.full([4, 16, SLAB], 1.0, gl.float32, quarters)
    e = a, ones, a
    e = doubled(e, 1)
    e = doubled(e, 2)
    e = doubled(e, 4)
    e = doubled(e, 8)
    upto, after, whole = e

    # What the states add.
    zero = gl.full([S.BT, SLAB], 0.0, gl.float32, acc)
    i_a = gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    c_a = gl.arange(0, SLAB, gl.SliceLayout(0, acc))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    h_dh = warpgroup_mma(
        s_h.index(0), s_h.index(1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    h_dh = warpgroup_mma_wait(0, deps=(h_dh,))
    h_dh = gl.sum(gl.where(i_a[:, None] == c_a[None, :], h_dh, 0.0), 1)  # of each channel
    s_dq = s_v.index(0)._reinterpret(gl.float32, [S.BT, SLAB], single)
    s_g = s_v.index(1)._reinterpret(gl.float32, [S.BT, SLAB], single)
    s_dk = s_v.index(2)._reinterpret(gl.float32, [S.BT, SLAB], single)
    s_r = s_h.index(0)._reinterpret(gl.float32, [S.BT, SLAB], single)
    s_a = s_h.index(1)._reinterpret(gl.float32, [S.BT, SLAB], single)
    # One after the other, each in the place of what it multiplied, since registers hold one.
    large_product(s_v.index(0), s_h.index(0).permute((1, 0)), s_dq)
    if REMOVES:
        large_product(s_v.index(1), s_h.index(0).permute((1, 0)), s_g)
    large_product(s_v.index(2), s_h.index(1).permute((1, 0)), s_dk)
    barrier()  # the tiles of states are free
    store_tall(a, s_a, tall)  # to free registers
    s_dl = s_h._reinterpret(gl.float32, [SLAB], line)
    s_dl.store(h_dh)
    s_ends = s_h._reinterpret(gl.float32, [2, 4, SLAB], plain).index(1)
    s_ends.store(gl.convert_layout(gl.reshape(whole, [4, SLAB]), ends))
    barrier()
    e_0, e_1 = quarter_sum(s_ends, 0, ends), quarter_sum(s_ends, 1, ends)
    e_2, e_3 = quarter_sum(s_ends, 2, ends), quarter_sum(s_ends, 3, ends)
    one = e_0 * 0.0 + 1.0
    from_start = of_quarters(w, one, e_0, e_0 * e_1, e_0 * e_1 * e_2)[:, None, :]
    to_end = of_quarters(w, e_1 * e_2 * e_3, e_2 * e_3, e_3, one)[:, None, :]
    to_middle = of_quarters(w, e_1, one, one, e_2)[:, None, :]
    dl = s_dl.load(column) * (e_0 * e_1 * e_2 * e_3)
    barrier()  # all have read the quarters' decays; others keep loads apart, to free registers
    dk = load_tall(s_dk, tall, quarters) * (after * to_end)
    dgc = load_scaled(s_x.index(1), s_rows.index(K_SCALE)) * dk
    s_ends.store(gl.sum(dgc, 1))
    barrier()
    dl += quarter_sum(s_ends, 0, ends) + quarter_sum(s_ends, 1, ends)
    dl += quarter_sum(s_ends, 2, ends) + quarter_sum(s_ends, 3, ends)
    if REMOVES:
        dr = load_tall(s_g, tall, quarters) * (upto * from_start) * -1.0
        b_k = load_tall(s_x.index(1), tall, quarters)
        share = of_pairs(b_k * dr)
        dgc -= (b_k * rows_factor(s_rows, BETA_K)) * dr
        dk += rows_factor(s_rows, 0) * dr
    store_tall(dk, s_dk, tall)
    barrier()
    dq = load_tall(s_dq, tall, quarters) * (upto * from_start)
    if not REMOVES:
        share = of_pairs(dq)
    store_tall(load_scaled(s_x.index(0), s_rows.index(Q_SCALE)) * dq - dgc, s_g, tall)
    barrier()

    # What the scores add, between quarters and then within them.
    s_o = s_v.index(0)._reinterpret(half, [2, S.BT, SLAB], wide)
    places = s_o, s_r, s_dk, s_g
    decays = upto, after, to_middle
    w_3 = w[:, None, :]
    grads = dq, share
    grads = large_level(grads, decays, w_3, s_x, s_s, s_rows, places, 32, REMOVES)
    copy_scores(scores, s_s.index(0), none, 16)
    if REMOVES:
        copy_scores(scores + S.BT * S.BT, s_s.index(1), none, 16)
    async_copy.commit_group()
    async_copy.wait_group(0)
    grads = large_level(grads, decays, w_3, s_x, s_s, s_rows, places, 16, REMOVES)
    d_q = load_diagonal(scores)
    d_k = d_q
    if REMOVES:
        d_k = load_diagonal(scores + S.BT * S.BT)
    diagonals = d_q, d_k
    a = load_tall(s_a, tall, quarters)
    e = a, ones, a
    for n in gl.static_range(4):
        grads = small_level(grads, e, diagonals, s_x, s_rows, places, 1 << n, n, REMOVES)
        if n < 3:
            e = doubled(e, 1 << n)
    dq, share = grads

    # Gradients of q and k. All is read and numbered again, to free registers.
    i, i_k = i + none, (gl.program_id(0) + none) % tiles
    i_c = ((gl.program_id(0) + none) // tiles).to(gl.int64)
    i_hv = (gl.program_id(1) + none).to(gl.int64)
    start, i_ch = gl.load(chunks.start + i_c).to(gl.int64), i_c * S.HV + i_hv
    n_rows = gl.load(chunks.rows + i_c)
    here = out.row_grads + i_ch * (GRAD_PLANES * S.BT) + i
    to = (start * S.HV + i_hv) * S.K + i_k * SLAB
    row: gl.constexpr = S.HV * S.K
    place = to + (i * row + c[None, :][:, None, :])
    if REMOVES:
        to_share = out.shares + ((i_k + 1).to(gl.int64) * tokens + start) * S.HV + i_hv
        i_s = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None] * 16
        i_s = i_s + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :]
        total = gl.convert_layout(gl.sum(share, 2), gl.SliceLayout(2, quarters))
        total *= s_rows.index(K_SCALE).load(gl.SliceLayout(2, quarters))
        gl.store(to_share + i_s * S.HV, total, mask=i_s < n_rows)
        barrier()
    diagonal = gl.load(here + DIAGONAL * S.BT)
    dq += diagonal * load_scaled(s_x.index(1), s_rows.index(K_SCALE))
    if R.NORM:
        b_q = load_scaled(s_x.index(0), s_rows.index(Q_SCALE))
        dq -= gl.load(here + Q_DQ * S.BT) / (scale * scale) * b_q
    dq *= rows_factor(s_rows, Q_SCALE)
    gl.store(out.dq + place, dq.to(out.dq.dtype.element_ty), mask=i < n_rows)
    barrier()
    dk = load_tall(s_dk, tall, quarters)
    dk += diagonal * load_scaled(s_x.index(0), s_rows.index(Q_SCALE))
    if R.NORM:
        b_k = load_scaled(s_x.index(1), s_rows.index(K_SCALE))
        dk -= gl.load(here + K_DK * S.BT) * b_k
    dk *= rows_factor(s_rows, K_SCALE)
    gl.store(out.dk + place, dk.to(out.dk.dtype.element_ty), mask=i < n_rows)
    barrier()

    # The gradient of the gate: sums over the rows from each one on.
    dgc = load_tall(s_g, tall, quarters)
    before = gl.associative_scan(dgc, 1, plus)
    whole = gl.sum(gl.where(r == 15, before, 0.0), 1)
    barrier()
    s_ends.store(whole)
    barrier()
    t_3 = quarter_sum(s_ends, 3, ends) + dl
    t_2 = quarter_sum(s_ends, 2, ends) + t_3
    t_1 = quarter_sum(s_ends, 1, ends) + t_2
    d = dgc + (whole + of_quarters(w, t_1, t_2, t_3, dl))[:, None, :] - before
    d = gl.where(i < n_rows, d, 0.0)
    raw, rate = load_raw(gate, start, i_hv, i_k, i, c, n_rows, S)
    d_raw, d_rate = slopes(raw, rate, gate.bound, d, R.GATE)
    gl.store(out.dg + place, d_raw.to(out.dg.dtype.element_ty), mask=i < n_rows)
    if out.dA_log is not None:
        total = gl.sum(gl.sum(gl.sum(d_rate, 1), 0), 0)
        gl.store(out.dA_log + (i_c * tiles + i_k) * S.HV + i_hv, total)
    if out.ddt_bias is not None:
        bias = out.ddt_bias + i_ch * S.K + i_k * SLAB + c
        gl.store(bias, gl.sum(gl.sum(d_raw, 1), 0))


def steep_bwd(
    table: Tables, x: Inputs, c: Chunks, read: Saved, out: Grads, t: Tile, R: RuleOptions
) -> None:
    """Launches the kernel. read, out: as `intra_bwd_kernel` takes them, out with parts for key
    tiles of 64 channels. Raises ValueError for chunks that the kernel does not support."""
    (NC, HV, K), H, V, rule = c.decay.shape, x.q.shape[1], x.v.shape[2], c.rule
    reason = why_not_bwd(x, c, read, R._replace(SAFE=True))
    if not R.BY_CHUNK:
        reason = "it serves what the path of a safe gate leaves out"
    elif t.BK != 64:
        reason = f"BK must be 64, got {t.BK}"
    if reason:
        raise ValueError(f"the tile {t} of stage intra_bwd_any cannot be used: {reason}")
    S = shape(rule, x.q.dtype, H, HV, K, V, t)
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    given = read, gate(rule, x), out, table.chunks, out.shares.shape[1], rule.scale
    launch(steep_bwd_sm90_kernel, (NC * (K // t.BK), HV), *given, **compiled)

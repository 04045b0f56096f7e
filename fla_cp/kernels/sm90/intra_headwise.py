"""The headwise local stage for the tensor cores of sm_90, in Gluon.

triton/intra_headwise.py explains what is computed; the results are equal up to rounding. Scores are
formed once for each key head, and the decays of each of its value heads multiply them afterwards.
Those of the removal are cut into the blocks that the inverse of a chunk is made of (inverse.py).
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

from fla_cp.kernels.sm90.intra_headwise_bwd import decayed
from fla_cp.kernels.sm90.inverse import store_inverse
from fla_cp.kernels.sm90.programs import chunk_and_head
from fla_cp.kernels.sm90.scan import rounded_off
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.sm90.warp_blocks import (
    blocks,
    diagonals,
    of_columns,
    on_diagonal,
    operands,
    warps,
)
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import EPS, rows_from
from fla_cp.kernels.triton.device.bundles import rows, rule_options
from fla_cp.kernels.triton.device.planes import (
    GC,
    GC_BEFORE,
    HEADWISE_PLANES,
    K_FACTOR,
    K_SCALE,
    Q_FACTOR,
    Q_SCALE,
    R_FACTOR,
    R_SCALE,
)
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables
from fla_cp.kernels.triton.tile_table import WHOLE


@gluon.jit
def copy_in(x, n, place, BT: gl.constexpr, K: gl.constexpr):
    """Starts to copy the first n rows of x [BT, K]; the rows after them become zero."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, BT, gl.SliceLayout(1, flat))
    j = gl.arange(0, K, gl.SliceLayout(0, flat))
    at = x.ptr + (i[:, None] * x.row + j[None, :])
    async_copy.async_copy_global_to_shared(place, at, mask=(i < n)[:, None])


@gluon.jit
def copy_planes(at, heads, place, BETAS: gl.constexpr, SUMS: gl.constexpr, BEFORE: gl.constexpr):
    """Starts to copy what is used late: betas, sums of log decays and those of the rows before, of
    as many value heads, to place [3 heads, rows]. at: the planes of the first head."""
    BT: gl.constexpr = place.shape[1]
    i = gl.arange(0, BT, gl.BlockedLayout([1], [32], [4], [0]))
    for i_g in range(heads):
        if BETAS:
            async_copy.async_copy_global_to_shared(place.index(3 * i_g), at + i)
        if SUMS:
            async_copy.async_copy_global_to_shared(place.index(3 * i_g + 1), at + (GC * BT + i))
        if BEFORE:
            async_copy.async_copy_global_to_shared(
                place.index(3 * i_g + 2), at + (GC_BEFORE * BT + i)
            )
        at += HEADWISE_PLANES * BT


@gluon.jit
def last_of(place, layout: gl.constexpr):
    """The last number of a plane in shared memory, [1]."""
    return place.slice(place.shape[0] - 1, 1).load(layout)


@gluon.jit
def squares(place, none, acc: gl.constexpr):
    """The sum of squares of each row [BT] of a tile in shared memory: the diagonals of products of
    each warp's rows with themselves."""
    a, b = operands(place)
    x = mma_v2(a, b, gl.full([4, 16, 16], 0.0, gl.float32, blocks()))
    x = gl.reshape(diagonals(x, none), [place.shape[0]])
    return gl.convert_layout(x, gl.SliceLayout(1, acc))


@gluon.jit
def store_square(x, to, place, flat: gl.constexpr):
    """Stores x [64, 64] by way of shared memory."""
    place.store(x)
    barrier()
    i = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
    gl.store(to + i * 64 + j, place.load(flat))


@gluon.jit
def logarithm(x, EXP2: gl.constexpr):
    if EXP2:
        return gl.log2(x)
    else:
        return gl.log(x)


@gluon.jit
def weights(sums, of_columns, i, j, EXP2: gl.constexpr):
    """exp(sums_i - of_columns_j) [BT, BT] for i >= j, zero elsewhere."""
    x = decayed(sums[:, None] - of_columns[None, :], EXP2)
    return gl.where(i[:, None] >= j[None, :], x, 0.0)


@gluon.jit
def store_terms(x, to, place, flat: gl.constexpr, TERMS: gl.constexpr):
    """Stores x [64, 64], fp32, as TERMS tiles that add up to it."""
    store_square(x.to(place.dtype), to, place, flat)
    if TERMS > 1:
        barrier()  # the first is read
        store_square(rounded_off(x, place.dtype), to + 64 * 64, place, flat)


@gluon.jit
def intra_head_sm90_kernel(q, k, p, out, chunks, first, scale, S: gl.constexpr, R: gl.constexpr):
    """`intra_head_kernel` for a chunk and a key head, after `head_rows_kernel`. p may be k."""
    i_c, i_h = chunk_and_head(gl.program_id(0), S.HV // S.G)
    i_c += first
    n = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    half: gl.constexpr = k.ptr.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    OWN: gl.constexpr = S.REMOVAL == "p"
    LATER: gl.constexpr = OWN or (REMOVES and (S.G > 1 or S.TERMS > 1))
    SUMS: gl.constexpr = S.G > 1 or LATER
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    banks: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])  # for lanes of a product
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_q = gl.allocate_shared_memory(half, [S.BT, S.K], wide)
    s_k = gl.allocate_shared_memory(half, [S.BT, S.K], wide)
    s_p = s_k
    if OWN:
        s_p = gl.allocate_shared_memory(half, [S.BT, S.K], wide)
    copy_in(rows_from(k, start, i_h), n, s_k, S.BT, S.K)
    if OWN:
        copy_in(rows_from(p, start, i_h), n, s_p, S.BT, S.K)
    copy_in(rows_from(q, start, i_h), n, s_q, S.BT, S.K)
    # Loaded late, these would be waited for; loaded now, they would take registers.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_rows = gl.allocate_shared_memory(gl.float32, [3 * S.G, S.BT], plain)
    at = out.rows + (i_c * S.HV + i_h * S.G) * HEADWISE_PLANES * S.BT
    copy_planes(at, S.G, s_rows, REMOVES, SUMS, OWN)
    async_copy.commit_group()
    i = gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    j = gl.arange(0, S.BT, gl.SliceLayout(0, acc))
    zero = gl.full([S.BT, S.BT], 0.0, gl.float32, acc)
    gc, end = gl.load(at + GC * S.BT + i), gl.load(at + ((GC + 1) * S.BT - 1))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    none = n // (S.BT + 1)
    q_scale = gl.full([S.BT], 1.0, gl.float32, gl.SliceLayout(1, acc)) * scale
    k_scale = gl.full([S.BT], 1.0, gl.float32, gl.SliceLayout(1, acc))
    r_scale = k_scale
    if R.NORM:
        q_scale *= gl.rsqrt(squares(s_q, none, acc) + EPS)
        if OWN:
            r_scale = gl.rsqrt(squares(s_p, none, acc) + EPS)
        if S.REMOVAL != "k":
            k_scale = gl.rsqrt(squares(s_k, none, acc) + EPS)
    b_qk = warpgroup_mma(s_q, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_rk = b_qk
    if REMOVES:
        b_rk = warpgroup_mma(s_p, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_qk, b_rk = warpgroup_mma_wait(0, deps=(b_qk, b_rk))
    else:
        b_qk = warpgroup_mma_wait(0, deps=(b_qk,))
    if R.NORM and S.REMOVAL == "k":
        diagonal = diagonals(on_diagonal(of_columns(b_rk), warps(none)), none)
        diagonal = gl.convert_layout(gl.reshape(diagonal, [S.BT]), gl.SliceLayout(1, acc))
        k_scale = gl.rsqrt(diagonal + EPS)
        r_scale = k_scale
    # The inputs are not needed any more: results on their way to memory and blocks of the inverse
    # take their place.
    s_out = s_q._reinterpret(half, [2, S.BT, S.BT], wide)
    s_k = s_k._reinterpret(half, [2, S.BT, S.BT], wide)
    barrier()
    b_qk *= q_scale[:, None]
    if REMOVES and R.NORM:
        b_rk *= r_scale[:, None]
    if LATER and R.NORM:
        b_rk *= gl.convert_layout(k_scale, gl.SliceLayout(0, acc))[None, :]
    if LATER:  # in shared memory: registers do not hold the scores next to the inverse
        s_rk = gl.allocate_shared_memory(gl.float32, [S.BT, S.BT], banks)
        s_rk.store(b_rk)
    for i_g in range(S.G):
        i_ch = i_c * S.HV + i_h * S.G + i_g
        at = out.rows + i_ch * HEADWISE_PLANES * S.BT
        none = (n + i_g) // (S.BT + S.G)
        r = i + none
        spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        to_end, whole = end, end
        if S.G > 1:
            gc = s_rows.index(3 * i_g + 1).load(gl.SliceLayout(1, acc))
            to_end = last_of(s_rows.index(3 * i_g + 1), gl.SliceLayout(1, acc))
            whole = last_of(s_rows.index(3 * i_g + 1), spread)
        gl.store(at + Q_SCALE * S.BT + r, q_scale)
        gl.store(at + K_SCALE * S.BT + r, k_scale)
        gl.store(at + Q_FACTOR * S.BT + r, q_scale * decayed(gc, R.EXP2))
        gl.store(at + K_FACTOR * S.BT + r, k_scale * decayed(to_end - gc, R.EXP2))
        before = gc
        if OWN:
            before = s_rows.index(3 * i_g + 2).load(gl.SliceLayout(1, acc))
        if REMOVES:
            gl.store(at + R_SCALE * S.BT + r, r_scale)
            gl.store(at + R_FACTOR * S.BT + r, r_scale * decayed(before, R.EXP2))
        whole = decayed(gl.full([S.K], 0.0, gl.float32, spread) + whole, R.EXP2)
        gl.store(out.decay + i_ch * S.K + (none + gl.arange(0, S.K, spread)), whole)

        # The weights contain k's scale as part of the decay.
        sums = gl.convert_layout(gc - logarithm(k_scale, R.EXP2), gl.SliceLayout(0, acc))
        w = weights(gc, sums, r, j, R.EXP2)
        square: gl.constexpr = S.TERMS * S.BT * S.BT
        b_out = b_qk * w
        store_terms(b_out, out.Aqk + i_ch * square, s_out.index(none), flat, S.TERMS)
        if REMOVES and not LATER:
            x = b_rk * w * -s_rows.index(3 * i_g).load(gl.SliceLayout(1, acc))[:, None]
            barrier()  # the scores are read
            places = s_out.index(0), s_out.index(1), s_k.index(0), s_k.index(1)
            store_inverse(x, out.T + i_ch * square, places, none, S.TERMS)
    if LATER:  # the inverses in a loop of their own, when the scores have left the registers
        barrier()
        for i_g in range(S.G):
            i_ch = i_c * S.HV + i_h * S.G + i_g
            none = (n + i_g) // (S.BT + S.G)
            gc = s_rows.index(3 * i_g + (2 if OWN else 1)).load(gl.SliceLayout(1, acc))
            sums = s_rows.index(3 * i_g + 1).load(gl.SliceLayout(0, acc))
            w = decayed(gc[:, None] - sums[None, :], R.EXP2)  # the rest is never read
            x = s_rk.load(acc) * w * -s_rows.index(3 * i_g).load(gl.SliceLayout(1, acc))[:, None]
            places = s_out.index(0), s_out.index(1), s_k.index(0), s_k.index(1)
            store_inverse(x, out.T + i_ch * (S.TERMS * S.BT * S.BT), places, none, S.TERMS)
            barrier()  # the inverse is read


def reads(x: Inputs) -> bool:
    """Whether the strides of q, k and p prove that copies of 16 bytes are aligned."""
    given = (t for t in (x.q, x.k, x.p) if t is not None)
    return all(n % 16 == 0 for t in given for n in t.stride()[:2])


def intra_head(table: Tables, x: Inputs, c: Chunks, first: int, stop: int) -> None:
    """Fills T, Aqk, decay, and the planes of rows that `head_rows_kernel` does not write, for the
    chunks from `first` up to `stop`."""
    rule, H = c.rule, x.q.shape[1]
    fewer = x.p is not None or c.terms > 1
    given = rows(x.q), rows(x.k), rows(x.k if x.p is None else x.p), c.formed(), table.chunks
    compiled = {"S": c.shape(WHOLE), "R": rule_options(rule, x.q.dtype), "num_warps": 4}
    registers = 168 if fewer else 128  # three programs an SM, or four
    grid, kernel = ((stop - first) * H,), intra_head_sm90_kernel
    launch(kernel, grid, *given, first, rule.scale, **compiled, maxnreg=registers)

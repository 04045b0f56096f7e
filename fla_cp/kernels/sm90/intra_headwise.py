"""The headwise local stage for the tensor cores of sm_90, in Gluon.

triton/intra_headwise.py explains what is computed; the results are equal up to rounding. Scores are
formed once for each key head, and the decays of each of its value heads multiply them afterwards.
The inverse of a chunk stays in registers. The result of a product is already laid out as the left
operand of the next one, provided that the rows of the right operand are stored in the order in
which registers hold columns (`turned`). Right operands are as narrow as the blocks that are joined.
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
from fla_cp.kernels.sm90.scan import rounded_off
from fla_cp.kernels.sm90.tma import barrier
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


@gluon.constexpr_function
def stripes(*dims):
    """The layout of a tensor core's result [64, N] in four warps, where N is the product of dims:
    each warp has 16 rows."""
    N = 1
    for n in dims:
        N *= n

    def column(c):
        place: list[int] = []
        for size in dims[::-1]:
            place, c = [c % size, *place], c // size
        return [0, *place]

    def row(r):
        return [r, *(0 for _ in dims)]

    registers, c = [column(1), row(8)], 8
    while c < N:
        registers.append(column(c))
        c *= 2
    lanes = [column(2), column(4), row(1), row(2), row(4)]
    return gl.DistributedLinearLayout(registers, lanes, [row(16), row(32)], [], [64, *dims])


@gluon.constexpr_function
def result(N):
    """The same layout in two dims, in the form in which products of 32-bit numbers take it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 8])


@gluon.jit
def indices(none, layout: gl.constexpr, A: gl.constexpr):
    """For each element of a tensor [64, A, ..] its row and its block of columns. none: 0."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    blocks: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    i = none + gl.arange(0, 64, rows)[:, None][:, :, None]
    a = gl.arange(0, A, blocks)[None, :][:, :, None]
    return i, a


@gluon.jit
def left(x):
    """x [64, 64] as a left operand. Each 8 columns stand in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    x = gl.permute(gl.reshape(x, [64, 8, 4, 2]), [0, 1, 3, 2])
    operand: gl.constexpr = gl.DotOperandLayout(0, result(16), 1)
    return gl.convert_layout(gl.reshape(x, [64, 64]), operand)


@gluon.jit
def turned(x, place, N: gl.constexpr):
    """x [64, N] as a right operand in shared memory, where it is [N, 64], with its rows in the
    order in which `left` has its columns."""
    x = gl.permute(gl.reshape(x, [8, 4, 2, N]), [0, 2, 1, 3])
    place = place.permute((1, 0))
    place.store(gl.reshape(x, [64, N]))
    fence_async_shared()
    barrier()
    return place


@gluon.jit
def nearest(x, TERMS: gl.constexpr):
    """As `nearest` of triton/device/inverse.py."""
    if TERMS > 1:
        bits = gl.cast(x, gl.int32, bitcast=True)
        return gl.cast((bits + 0x1000) & -0x2000, gl.float32, bitcast=True)
    else:
        return x


@gluon.jit
def product(a, b, N: gl.constexpr):
    """a @ b, [64, N], in TF32 like Triton's default."""
    zero = gl.full([64, N], 0.0, gl.float32, result(N))
    x = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(x,))


@gluon.jit
def pair(i, j, n: gl.constexpr):
    """Whether row i and column j are in the same pair of blocks of 2^n, the row in the second block
    and the column in the first."""
    return ((i >> (n + 1)) == (j >> (n + 1))) & (((i >> n) & 1) > ((j >> n) & 1))


@gluon.jit
def small_product(a, b, layout: gl.constexpr):
    a = gl.convert_layout(a, gl.DotOperandLayout(0, layout, 1))
    b = gl.convert_layout(b, gl.DotOperandLayout(1, layout, 1))
    return mma_v2(a, b, gl.full([4, 16, 16], 0.0, gl.float32, layout), input_precision="tf32")


@gluon.jit
def unit_lower_inverse(x, s_16, s_32, none, TERMS: gl.constexpr):
    """(I + L)^-1 [64, 2, 32], where L is the part of x [64, 64] below the diagonal.

    The algorithm is that of triton/device/inverse.py, but each row holds only the columns of its
    own block's inverse. s_16 [2, 16, 64], s_32 [2, 32, 64]: shared memory. none: 0 in a form that
    the compiler cannot tell to be 0; otherwise it would keep masks from one call to the next."""
    four: gl.constexpr = stripes(4, 16)
    two: gl.constexpr = stripes(2, 16)
    half: gl.constexpr = stripes(2, 32)
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    square: gl.constexpr = stripes(64)

    # Inverses of blocks of 16, one for each warp.
    i, a = indices(none, four, 4)
    own = gl.convert_layout(gl.reshape(x, [64, 4, 16]), four)
    D = gl.sum(gl.where(i // 16 == a, own, 0.0), 1)
    D = gl.convert_layout(gl.reshape(D, [4, 16, 16]), small)
    r = none + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, small)))[None, :][:, :, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, small)))[None, :][:, None, :]
    X = gl.where(r == c, 1.0, 0.0) - gl.where(pair(r, c, 0), D, 0.0)
    for level in gl.static_range(1, 4):
        C = nearest(gl.where(pair(r, c, level), D, 0.0), TERMS)
        N = nearest(X, TERMS)
        X = X - small_product(N, nearest(small_product(C, N, small), TERMS), small)
    X = gl.reshape(X, [64, 16])

    # Joined to inverses of blocks of 32.
    i_s = none + gl.arange(0, 64, gl.SliceLayout(1, square))[:, None]
    j_s = gl.arange(0, 64, gl.SliceLayout(0, square))[None, :]
    x = nearest(gl.convert_layout(x, square), TERMS)
    X = nearest(gl.convert_layout(X, gl.SliceLayout(1, four)), TERMS)
    C = left(gl.where(pair(i_s, j_s, 4), x, 0.0))
    P = product(C, turned(X, s_16.index(none), 16), 16)
    C = left(gl.reshape(gl.where(i // 16 == a, X[:, None, :], 0.0), [64, 64]))
    P = nearest(product(C, turned(nearest(P, TERMS), s_16.index(none + 1), 16), 16), TERMS)
    i, a = indices(none, two, 2)
    P = gl.convert_layout(P, gl.SliceLayout(1, two))[:, None, :]
    X = gl.convert_layout(X, gl.SliceLayout(1, two))[:, None, :]
    own = (i // 16) % 2 == a
    X = gl.where(own, X, gl.where(a == 0, -P, 0.0))

    # Joined to the whole inverse.
    X = gl.reshape(X, [64, 32])
    C = left(gl.where(pair(i_s, j_s, 5), x, 0.0))
    P = product(C, turned(X, s_32.index(none), 32), 32)
    i, a = indices(none, half, 2)
    X = gl.convert_layout(X, gl.SliceLayout(1, half))[:, None, :]
    own = i // 32 == a
    C = left(gl.reshape(gl.where(own, X, 0.0), [64, 64]))
    P = product(C, turned(nearest(P, TERMS), s_32.index(none + 1), 32), 32)
    P = gl.convert_layout(P, gl.SliceLayout(1, half))[:, None, :]
    return gl.where(own, X, gl.where(a == 0, -P, 0.0))


@gluon.jit
def copy_in(x, n, place, BT: gl.constexpr, K: gl.constexpr):
    """Starts to copy the first n rows of x [BT, K]; the rows after them become zero."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, BT, gl.SliceLayout(1, flat))
    j = gl.arange(0, K, gl.SliceLayout(0, flat))
    at = x.ptr + i[:, None] * x.row + j[None, :]
    async_copy.async_copy_global_to_shared(place, at, mask=(i < n)[:, None])


@gluon.jit
def squares(place, acc: gl.constexpr):
    """The sum of squares of each row [BT] of a tile in shared memory."""
    x = place.load(gl.DotOperandLayout(0, acc, 2)).to(gl.float32)
    return gl.convert_layout(gl.sum(x * x, 1), gl.SliceLayout(1, acc))


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
def store_inverse(x, to, places, none, flat: gl.constexpr, TERMS: gl.constexpr):
    """Stores (I + L)^-1 of x, see `unit_lower_inverse`."""
    s_out, s_16, s_32 = places
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = gl.reshape(unit_lower_inverse(x, s_16, s_32, none, TERMS), [64, 64])
    store_terms(gl.convert_layout(x, acc), to, s_out.index(none), flat, TERMS)


@gluon.jit
def intra_head_sm90_kernel(q, k, p, out, chunks, first, scale, S: gl.constexpr, R: gl.constexpr):
    """`intra_head_kernel` for a chunk and a key head, after `head_rows_kernel`. p may be k."""
    i_c, i_h = (first + gl.program_id(0)).to(gl.int64), gl.program_id(1).to(gl.int64)
    n = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    half: gl.constexpr = k.ptr.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    OWN: gl.constexpr = S.REMOVAL == "p"
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    single: gl.constexpr = NVMMASharedLayout(128, 32, 2)
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
    async_copy.commit_group()
    i = gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    j = gl.arange(0, S.BT, gl.SliceLayout(0, acc))
    zero = gl.full([S.BT, S.BT], 0.0, gl.float32, acc)
    at = out.rows + (i_c * S.HV + i_h * S.G) * HEADWISE_PLANES * S.BT
    gc, end, beta = (
        gl.load(at + GC * S.BT + i),
        gl.load(at + ((GC + 1) * S.BT - 1)),
        gl.load(at + i),
    )
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    b_qk = warpgroup_mma(s_q, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_rk = b_qk
    if REMOVES:
        b_rk = warpgroup_mma(s_p, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
    q_scale = gl.full([S.BT], 1.0, gl.float32, gl.SliceLayout(1, acc)) * scale
    k_scale = gl.full([S.BT], 1.0, gl.float32, gl.SliceLayout(1, acc))
    r_scale = k_scale
    if R.NORM:
        q_scale *= gl.rsqrt(squares(s_q, acc) + EPS)
        if OWN:
            r_scale = gl.rsqrt(squares(s_p, acc) + EPS)
        if S.REMOVAL != "k":
            k_scale = gl.rsqrt(squares(s_k, acc) + EPS)
    if REMOVES:
        b_qk, b_rk = warpgroup_mma_wait(0, deps=(b_qk, b_rk))
    else:
        b_qk = warpgroup_mma_wait(0, deps=(b_qk,))
    if R.NORM and S.REMOVAL == "k":
        k_scale = gl.rsqrt(gl.sum(gl.where(i[:, None] == j[None, :], b_rk, 0.0), 1) + EPS)
        r_scale = k_scale
    # The inputs are not needed any more: results on their way to memory and the operands of the
    # inverse take their place.
    s_out = s_q._reinterpret(half, [2, S.BT, S.BT], wide)
    s_16 = s_out.index(1)._reinterpret(gl.float32, [2, 16, S.BT], single)
    places = (s_out, s_16, s_k._reinterpret(gl.float32, [2, 32, S.BT], single))
    barrier()
    LATER: gl.constexpr = OWN or (REMOVES and (S.G > 1 or S.TERMS > 1))
    if LATER:  # kept in shared memory: registers do not hold it next to the inverse
        s_rk = gl.allocate_shared_memory(gl.float32, [S.BT, S.BT], single)
        s_rk.store(b_rk)
    for i_g in range(S.G):
        i_ch = i_c * S.HV + i_h * S.G + i_g
        at = out.rows + i_ch * HEADWISE_PLANES * S.BT
        none = (n + i_g) // (S.BT + S.G)
        r = i + none
        if S.G > 1:
            gc, end = gl.load(at + GC * S.BT + r), gl.load(at + ((GC + 1) * S.BT - 1))
        # The weights contain k's scale as part of the decay.
        of_columns = gl.convert_layout(gc - logarithm(k_scale, R.EXP2), gl.SliceLayout(0, acc))
        w = weights(gc, of_columns, r, j, R.EXP2)
        b_out = b_qk * w * q_scale[:, None]
        if REMOVES and not LATER:
            b_rk = b_rk * w * (beta * r_scale)[:, None]
        store_terms(
            b_out, out.Aqk + i_ch * (S.TERMS * S.BT * S.BT), s_out.index(none), flat, S.TERMS
        )
        gl.store(at + Q_SCALE * S.BT + r, q_scale)
        gl.store(at + K_SCALE * S.BT + r, k_scale)
        if REMOVES:
            gl.store(at + R_SCALE * S.BT + r, r_scale)
        gl.store(at + Q_FACTOR * S.BT + r, q_scale * decayed(gc, R.EXP2))
        if REMOVES:
            before = gc
            if OWN:
                before = gl.load(at + GC_BEFORE * S.BT + r)
            gl.store(at + R_FACTOR * S.BT + r, r_scale * decayed(before, R.EXP2))
        gl.store(at + K_FACTOR * S.BT + r, k_scale * decayed(end - gc, R.EXP2))
        spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        whole = decayed(gl.full([S.K], 0.0, gl.float32, spread) + end, R.EXP2)
        gl.store(out.decay + i_ch * S.K + gl.arange(0, S.K, spread), whole)
        if REMOVES and not LATER:
            store_inverse(b_rk, out.T + i_ch * (S.TERMS * S.BT * S.BT), places, none, flat, S.TERMS)
    if LATER:  # the inverses in a loop of their own, when the scores have left the registers
        barrier()
        for i_g in range(S.G):
            i_ch = i_c * S.HV + i_h * S.G + i_g
            at = out.rows + i_ch * HEADWISE_PLANES * S.BT
            none = (n + i_g) // (S.BT + S.G)
            r = i + none
            gc = gl.load(at + GC * S.BT + r)
            of_columns = gc - logarithm(gl.load(at + K_SCALE * S.BT + r), R.EXP2)
            of_columns = gl.convert_layout(of_columns, gl.SliceLayout(0, acc))
            if OWN:
                gc = gl.load(at + GC_BEFORE * S.BT + r)
            w = weights(gc, of_columns, r, j, R.EXP2)
            x = s_rk.load(acc) * w * (gl.load(at + r) * gl.load(at + R_SCALE * S.BT + r))[:, None]
            store_inverse(x, out.T + i_ch * (S.TERMS * S.BT * S.BT), places, none, flat, S.TERMS)


def reads(x: Inputs) -> bool:
    """Whether the strides of q, k and p prove that copies of 16 bytes are aligned."""
    given = (t for t in (x.q, x.k, x.p) if t is not None)
    return all(n % 16 == 0 for t in given for n in t.stride()[:2])


def intra_head(table: Tables, x: Inputs, c: Chunks, first: int, stop: int) -> None:
    """Fills T, Aqk, decay, and the planes of rows that `head_rows_kernel` does not write, for the
    chunks from `first` up to `stop`."""
    rule, H, HV = c.rule, x.q.shape[1], x.v.shape[1]
    fewer = x.p is not None or (c.terms > 1 and (HV > H or rule.removal == "none"))
    given = rows(x.q), rows(x.k), rows(x.k if x.p is None else x.p), c.formed(), table.chunks
    compiled = {"S": c.shape(WHOLE), "R": rule_options(rule, x.q.dtype), "num_warps": 4}
    registers = 168 if fewer else 128  # three programs an SM, or four
    grid, kernel = (stop - first, H), intra_head_sm90_kernel
    launch(kernel, grid, *given, first, rule.scale, **compiled, maxnreg=registers)

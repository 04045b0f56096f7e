"""The channelwise local stage for chunks whose decays are too strong for the path of a safe gate,
for sm_90, in Gluon.

triton/intra_channelwise.py explains what is computed; the results are equal up to rounding. Like
the kernel in intra_channelwise.py, this one has 16 rows of two channels in a thread, a quarter of
the chunk in a warp. No decay is a quotient or a difference here: each is a product of the decays of
single tokens, which lie between 0 and 1. So no gate is too strong.

The chunk is halved repeatedly. At each level the rows of the second block of a pair meet the
columns of the first block, relative to the boundary between both blocks: a row is multiplied by the
decay from the boundary to it, a column by the decay from it to the boundary. From level to level
these products double in length, with one multiplication each. Blocks of up to 8 rows are inside a
warp's quarter, where a small product of its own has the rows of q and k above each other. Blocks of
16 and of 32 rows are left in shared memory until both slabs of channels are there.
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
    indices,
    largest_of,
    load_tall,
    log2_of_more,
    log_decay,
    of_quarters,
    quarter_sum,
    scale_rows,
    sigmoid,
    store_tall,
    stripes,
    why_not,
)
from fla_cp.kernels.sm90.intra_headwise import store_terms
from fla_cp.kernels.sm90.inverse import store_inverse
from fla_cp.kernels.sm90.programs import chunk_and_head
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import rows_from
from fla_cp.kernels.triton.device.bundles import Rows, RuleOptions, beta, gate, rows, shape
from fla_cp.kernels.triton.device.channelwise_decay import ANCHORS, STEEPEST
from fla_cp.kernels.triton.device.gates import LOG2E
from fla_cp.kernels.triton.device.planes import CHANNELWISE_PLANES
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables
from fla_cp.kernels.triton.tile_table import Tile


@gluon.constexpr_function
def quarters_of(n):
    """The layout of [4, n, SLAB] in which a thread has all rows of two channels of a quarter."""
    return gl.BlockedLayout([1, n, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])


@gluon.jit
def halves(x, n: gl.constexpr):
    """The rows of x [4, N, SLAB] that are in the first and in the second blocks of pairs of blocks
    of n rows, [4, N / 2, SLAB] each. Registers are only named anew."""
    N: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [4, N // (2 * n), 2, n, SLAB]), [0, 1, 3, 4, 2])
    a, b = gl.split(x)
    a = gl.convert_layout(gl.reshape(a, [4, N // 2, SLAB]), quarters_of(N // 2))
    b = gl.convert_layout(gl.reshape(b, [4, N // 2, SLAB]), quarters_of(N // 2))
    return a, b


@gluon.jit
def joined(a, b, n: gl.constexpr):
    """The tensor of which `halves` makes a and b."""
    N: gl.constexpr = a.shape[1]
    a = gl.reshape(a, [4, N // n, n, SLAB])
    b = gl.reshape(b, [4, N // n, n, SLAB])
    x = gl.reshape(gl.permute(gl.join(a, b), [0, 1, 4, 2, 3]), [4, 2 * N, SLAB])
    return gl.convert_layout(x, quarters_of(2 * N))


@gluon.jit
def repeated(x, n: gl.constexpr):
    """Each row of x [4, N, SLAB] n times in succession."""
    if n > 1:
        x = repeated(joined(x, x, 1), n // 2)
    return x


@gluon.jit
def load_scaled(place, scales):
    """Rows of q or k in shared memory times their factors, [4, 16, SLAB]."""
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    x = load_tall(place, tall, quarters_of(16))
    return x * scales.load(gl.SliceLayout(2, quarters_of(16)))[:, :, None]


@gluon.jit
def load_decays(gate, start, i_hv, part, i, c, n_rows, S: gl.constexpr, GATE: gl.constexpr):
    """The decay of each token in rows i [4, 16, 1] and channels c [SLAB] of a slab, 1 beyond the
    chunk: there the projection is so small that no gate decays."""
    g = rows_from(Rows(gate.g, gate.row, gate.head), start, i_hv)
    at = g.ptr + part * SLAB + (i * g.row + c[None, :][:, None, :])
    x = gl.load(at, mask=i < n_rows, other=0.0 if GATE == "given" else -1e30).to(gl.float32)
    rate = 1.0
    if gate.A_log is not None:
        rate = gl.exp(gl.load(gate.A_log + i_hv).to(gl.float32))
    unit: gl.constexpr = LOG2E if GATE == "softplus" else 1.0
    if gate.dt_bias is not None:
        bias = gl.load(gate.dt_bias + (i_hv * S.K + part * SLAB) + c).to(gl.float32)
        x = x * unit + (bias * unit)[None, :][:, None, :]
    else:
        x = x * unit
    if GATE == "softplus":
        return gl.exp2(-rate * (gl.maximum(x, 0.0) + log2_of_more(gl.exp2(-gl.abs(x)))))
    else:
        return gl.exp2(log_decay(x, rate, gate.bound, GATE))


@gluon.jit
def doubled(e, n: gl.constexpr):
    """From decays over blocks of n rows those over blocks of 2 n.

    e: the decay from a block's start up to each row with it, and that after each row up to the
    block's end [4, 16, SLAB], and the block's [4, 16 / n, SLAB]."""
    upto, after, whole = e
    upto_a, upto_b = halves(upto, n)
    after_a, after_b = halves(after, n)
    whole_a, whole_b = halves(whole, 1)
    upto = joined(upto_a, upto_b * repeated(whole_a, n), n)
    after = joined(after_a * repeated(whole_b, n), after_b, n)
    return upto, after, whole_a * whole_b


@gluon.jit
def level_scores(b_q, b_k, e, places, half: gl.constexpr, n: gl.constexpr):
    """Adds what the blocks of n rows add to the scores within quarters. The result is the decays
    over blocks of 2 n, from e (`doubled`).

    places: shared memory of the rows of q and k that are in second blocks [4, 16, SLAB], of those
    of k in first blocks [4, 8, SLAB], and of the sums of their products [4, 16, 8]."""
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    s_rows, s_columns, s_x = places
    upto, after, _ = e
    _, upto_b = halves(upto, n)
    after_a, _ = halves(after, n)
    k_a, k_b = halves(b_k, n)
    _, q_b = halves(b_q, n)
    acc = s_x.load(small)
    s_rows.store(joined((q_b * upto_b).to(half), (k_b * upto_b).to(half), 8))
    s_columns.store((k_a * after_a).to(half))
    barrier()
    a = s_rows.load(gl.DotOperandLayout(0, small, 2))
    b = s_columns.permute((0, 2, 1)).load(gl.DotOperandLayout(1, small, 2))
    s_x.store(mma_v2(a, b, acc))
    barrier()
    return doubled(e, n)


@gluon.jit
def store_level(acc, s_q, s_k, n: gl.constexpr):
    """Stores acc [4, 16, 8], the sums of `level_scores`, where it belongs in the diagonal blocks of
    16 of both scores. What columns of another pair add is stored, too, where a larger n or no n
    belongs."""
    x = gl.permute(gl.reshape(acc, [4, 2, 8, 8]), [0, 2, 3, 1])
    q, k = gl.split(x)
    B: gl.constexpr = 8 // n
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0])
    to_q = s_q._reinterpret(gl.float32, [4, B, 2, n, B, 2, n], plain)
    to_k = s_k._reinterpret(gl.float32, [4, B, 2, n, B, 2, n], plain)
    to_q.slice(1, 1, 2).slice(0, 1, 5).store(gl.reshape(q, [4, B, 1, n, B, 1, n]))
    to_k.slice(1, 1, 2).slice(0, 1, 5).store(gl.reshape(k, [4, B, 1, n, B, 1, n]))
    barrier()


@gluon.jit
def far_scores(s_rows, s_columns, none, S: gl.constexpr):
    """Products over all channels of rows and columns in different blocks of 16, [64, 64]: only
    those of columns before the row are meant. s_rows, s_columns: factors of blocks of 16 and of
    32."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT // 2, 16])
    two: gl.constexpr = stripes(2, 32)
    near = gl.full([S.BT, S.BT], 0.0, gl.float32, acc)
    far = gl.full([S.BT, S.BT // 2], 0.0, gl.float32, half)
    for part in gl.static_range(S.K // SLAB):
        first = part == 0
        columns = s_columns[0].index(part).permute((1, 0))
        rows_16 = s_rows[0].index(part)
        near = warpgroup_mma(rows_16, columns, near, use_acc=not first, is_async=True)
        columns = s_columns[1].index(part).slice(0, S.BT // 2).permute((1, 0))
        rows_32 = s_rows[1].index(part)
        far = warpgroup_mma(rows_32, columns, far, use_acc=not first, is_async=True)
    near, far = warpgroup_mma_wait(0, deps=(near, far))
    i, a = indices(none, two, 2)
    near = gl.convert_layout(gl.reshape(near, [64, 2, 32]), two)
    far = gl.convert_layout(far, gl.SliceLayout(1, two))[:, None, :]
    return gl.reshape(gl.where((i >= 32) & (a == 0), far, near), [64, 64])


@gluon.jit
def with_diagonal(x, place, rows, columns, none):
    """x [64, 64] with the blocks of 16 at `place` on its diagonal, times factors of their rows and
    columns [4, 16] in shared memory."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    four: gl.constexpr = stripes(4, 16)
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    own = place._reinterpret(gl.float32, [4, 16, 16], plain).load(small)
    own *= rows.load(gl.SliceLayout(2, small))[:, :, None]
    own *= columns.load(gl.SliceLayout(1, small))[:, None, :]
    own = gl.convert_layout(gl.reshape(own, [64, 16]), gl.SliceLayout(1, four))
    i, a = indices(none, four, 4)
    x = gl.convert_layout(gl.reshape(x, [64, 4, 16]), four)
    x = gl.where(i // 16 == a, own[:, None, :], x)
    return gl.convert_layout(gl.reshape(x, [64, 64]), acc)


@gluon.jit
def form_slab(e, s_ends, places, out, at, S: gl.constexpr):
    """What scans read of a slab, and the factors of its blocks of 16 and 32 in shared memory.

    e: the decays over quarters (`doubled`). s_ends [4, SLAB]: memory for those of whole
    quarters. places: shared memory of q and k, which is used again, that of the factors of blocks
    of 16, and the scales of q and k. at: the slab's offset in what scans read."""
    s_q, s_k, s_q16, s_k16, s_scales = places
    upto, after, whole = e
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = quarters_of(16)
    ends: gl.constexpr = gl.SliceLayout(1, quarters)
    half: gl.constexpr = s_q16.dtype
    w = gl.arange(0, 4, gl.SliceLayout(1, ends))[:, None]
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :][:, :, None]
    c = gl.arange(0, SLAB, gl.SliceLayout(0, ends))[None, :]
    at, step = at + (w * (16 * S.K) + c)[:, None, :], r * S.K
    s_ends.store(gl.convert_layout(gl.reshape(whole, [4, SLAB]), ends))
    barrier()
    e_1, e_2 = quarter_sum(s_ends, 1, ends), quarter_sum(s_ends, 2, ends)
    one = e_1 * 0.0 + 1.0
    # Rows of the last quarter and columns of the first one are a quarter away from the middle.
    to_middle = of_quarters(w, e_1, one, one, e_2)[:, None, :]
    w_3 = w[:, None, :]

    b_k = load_scaled(s_k, s_scales.index(1))
    col, row = b_k * after, b_k * upto
    store_tall(gl.where(w_3 % 2 == 0, col, row), s_k16, tall)
    store_tall(gl.where(w_3 < 2, col, row) * to_middle, s_k, tall)
    e_3 = quarter_sum(s_ends, 3, ends)
    to_end = of_quarters(w, e_1 * e_2 * e_3, e_2 * e_3, e_3, one)[:, None, :]
    gl.store(out.kg + at + step, (col * to_end).to(half))
    e_0 = quarter_sum(s_ends, 0, ends)
    from_start = of_quarters(w, one, e_0, e_0 * e_1, e_0 * e_1 * e_2)[:, None, :]
    if S.REMOVAL != "none":
        gl.store(out.k_decayed + at + step, (row * from_start).to(half))
    b_q = load_scaled(s_q, s_scales.index(0))
    row = b_q * upto
    barrier()  # all have read the quarters' decays
    store_tall(row, s_q16, tall)
    store_tall(row * to_middle, s_q, tall)
    gl.store(out.qg + at + step, (row * from_start).to(half))


@gluon.jit
def is_steep(anchors, S: gl.constexpr):
    """`is_steep` of triton/device/channelwise_decay.py."""
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = anchors + gl.arange(0, S.K, spread)
    t_0, t_1 = gl.load(at), gl.load(at + S.K)
    t_2, t_3 = gl.load(at + 2 * S.K), gl.load(at + 3 * S.K)
    return largest_of(t_0, t_1 - t_0, t_2 - t_1, t_3 - t_2) > STEEPEST


@gluon.jit
def steep_sm90_kernel(q, k, gate, beta, out, chunks, scale, S: gl.constexpr, R: gl.constexpr):
    """`intra_kernel` for a chunk and a value head, on the path of any gate. It marks the chunks
    that it serves, by the anchors of the kernel before, whose decays of whole chunks it leaves."""
    i_c, i_hv = chunk_and_head(gl.program_id(0), S.HV)
    i_h, i_ch = i_hv // S.G, i_c * S.HV + i_hv
    steep = is_steep(out.anchors + i_ch * (ANCHORS * S.K), S)
    gl.store(out.steep + i_ch, steep.to(gl.int32))
    if not steep:
        return
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    none = n_rows // (S.BT + 1)  # 0 in a form that the compiler cannot tell to be 0
    half: gl.constexpr = k.ptr.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    PARTS: gl.constexpr = S.K // SLAB
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rank3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    deep: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = quarters_of(16)
    ends: gl.constexpr = gl.SliceLayout(1, quarters)

    s_q = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_k = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_q16 = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_k16 = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_scales = gl.allocate_shared_memory(gl.float32, [2, 4, 16], plain)
    s_x = gl.allocate_shared_memory(gl.float32, [4, 4, 16, 8], rank3)
    s_diagonal = gl.allocate_shared_memory(gl.float32, [S.BT], line)
    q, k = rows_from(q, start, i_h), rows_from(k, start, i_h)
    for part in gl.static_range(PARTS):
        copy_slab(q.ptr + part * SLAB, q.row, n_rows, s_q.index(part), S.BT, SLAB)
        copy_slab(k.ptr + part * SLAB, k.row, n_rows, s_k.index(part), S.BT, SLAB)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()

    at = out.rows + i_ch * (CHANNELWISE_PLANES * S.BT)
    scale_rows(s_q, s_k, s_scales, s_diagonal, at, scale, none, S, R)
    barrier()

    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :][:, :, None]
    c = gl.arange(0, SLAB, gl.SliceLayout(0, ends))
    numbers = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None][:, :, None]
    numbers = numbers * 16 + r
    for level in gl.static_range(4):
        s_x.index(level).store(gl.full([4, 16, 8], 0.0, gl.float32, small))
    for part in range(PARTS):
        # Rows are numbered anew, so that no address stays in registers from slab to slab.
        again = (n_rows + part) // (S.BT + PARTS)
        i = numbers + again
        e = load_decays(gate, start + again, i_hv + again, part, i, c, n_rows, S, R.GATE)
        b_k = load_tall(s_k.index(part), tall, quarters)
        b_q = load_tall(s_q.index(part), tall, quarters)
        s_rows = s_q16.index(part)._reinterpret(half, [4, 16, SLAB], deep)
        s_columns = s_k16.index(part)._reinterpret(half, [4, 16, SLAB], deep).slice(0, 8, 1)
        decays = e, gl.full([4, 16, SLAB], 1.0, gl.float32, quarters), e
        places = s_rows, s_columns, s_x.index(0)
        decays = level_scores(b_q, b_k, decays, places, half, 1)
        places = s_rows, s_columns, s_x.index(1)
        decays = level_scores(b_q, b_k, decays, places, half, 2)
        if S.TERMS > 1:  # for registers
            b_q = load_tall(s_q.index(part), tall, quarters)
        places = s_rows, s_columns, s_x.index(2)
        decays = level_scores(b_q, b_k, decays, places, half, 4)
        places = s_rows, s_columns, s_x.index(3)
        decays = level_scores(b_q, b_k, decays, places, half, 8)
        at_slab = (i_ch + again) * (S.BT * S.K) + (part + again) * SLAB
        given = s_q.index(part), s_k.index(part), s_q16.index(part), s_k16.index(part), s_scales
        s_ends = s_q16.index(part)._reinterpret(gl.float32, [4, SLAB], plain)
        form_slab(decays, s_ends, given, out, at_slab, S)
    fence_async_shared()
    barrier()

    # All is read and numbered again, to free registers.
    i_c, i_hv = chunk_and_head(gl.program_id(0) + none, S.HV)
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    none = n_rows // (S.BT + 1)
    i_ch = i_c * S.HV + i_hv
    at = out.rows + i_ch * (CHANNELWISE_PLANES * S.BT)
    i = none + gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    j = gl.arange(0, S.BT, gl.SliceLayout(0, acc))
    b_beta = gl.where(i < n_rows, 1.0, 0.0)
    if beta.ptr is not None:
        at_b = beta.ptr + (i_hv + start * beta.row)
        b_beta = gl.load(at_b + i * beta.row, mask=i < n_rows, other=0.0).to(gl.float32)
    if R.BETA_SIGMOID:
        b_beta = gl.where(i < n_rows, beta.factor * sigmoid(1.0, b_beta), 0.0)
    gl.store(at + i, b_beta)
    b_qk = far_scores((s_q16, s_q), (s_k16, s_k), none, S)
    b_kk = b_qk
    if REMOVES:
        b_kk = far_scores((s_k16, s_k), (s_k16, s_k), none, S)
    barrier()  # all products are done with the operands, whose place is used again
    s_out = s_q._reinterpret(half, [2, S.BT, S.BT], wide)
    d_q, d_k = s_q16.index(0), s_q16.index(1)
    store_level(s_x.index(0).load(small), d_q, d_k, 1)
    store_level(s_x.index(1).load(small), d_q, d_k, 2)
    store_level(s_x.index(2).load(small), d_q, d_k, 4)
    store_level(s_x.index(3).load(small), d_q, d_k, 8)
    b_qk = with_diagonal(b_qk, d_q, s_scales.index(0), s_scales.index(1), none)
    diagonal = s_diagonal.load(gl.SliceLayout(1, acc))
    rest = gl.where(i[:, None] == j[None, :], diagonal[:, None], 0.0)
    b_qk = gl.where(i[:, None] > j[None, :], b_qk, rest)
    store_terms(b_qk, out.Aqk + i_ch * (S.TERMS * S.BT * S.BT), s_out.index(none), flat, S.TERMS)
    if REMOVES:
        b_kk = with_diagonal(b_kk, d_k, s_scales.index(1), s_scales.index(1), none)
        b_kk *= -b_beta[:, None]
        four = s_out.index(0), s_out.index(1), s_k, s_k16
        to = out.T + i_ch * (S.TERMS * S.BT * S.BT)
        barrier()  # the scores are read
        store_inverse(b_kk, to, four, none, S.TERMS)


def intra_channel(table: Tables, x: Inputs, c: Chunks, t: Tile, R: RuleOptions) -> None:
    """Fills c where the decays are too strong for the path of a safe gate, and marks it in c.steep.
    Raises ValueError for chunks that the kernel cannot form."""
    reason = why_not(x, c, R._replace(SAFE=True))
    if not R.BY_CHUNK:
        reason = "it serves what the path of a safe gate leaves out"
    if reason:
        raise ValueError(f"the tile {t} of stage intra_any cannot be used: {reason}")
    given = rows(x.q), rows(x.k), gate(c.rule, x), beta(c.rule, x), c.formed(), table.chunks
    (NC, HV, K), H, V = c.decay.shape, x.q.shape[1], x.v.shape[2]
    S = shape(c.rule, x.q.dtype, H, HV, K, V, t)  # not c.shape: kg has a head for each value head
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    launch(steep_sm90_kernel, (NC * HV,), *given, c.rule.scale, **compiled)

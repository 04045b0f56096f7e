"""The channelwise local stage on the path of a safe gate for the tensor cores of sm_90, in Gluon.

triton/intra_channelwise.py explains what is computed; the results are equal up to rounding. A
thread has 16 rows of two channels, a quarter of the chunk. Sums of decays are therefore additions
in its own registers, and no product forms them.

Within a half, decays are relative to its row 15: rows are multiplied by 2^l and columns by 2^-l,
where l is the sum from that row to the row of the element. A safe gate keeps both below 2^116.
Everything else differs from these by a factor a channel. So each element takes two exponentials for
its decays, and two for its gate. Rows of the second half meet columns of the first one in a product
of their own, for which the columns take that factor.

With any gate the kernel leaves out chunks and heads whose decays are too strong for it, as soon as
it knows. Triton's second kernel finds them by their anchors.
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

from fla_cp.kernels.sm90.intra_headwise import store_terms
from fla_cp.kernels.sm90.inverse import store_inverse
from fla_cp.kernels.sm90.prefetch import prefetch_tile, program_ahead, rows_of_chunk
from fla_cp.kernels.sm90.programs import chunk_and_head
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.sm90.upcast import upcast
from fla_cp.kernels.sm90.warp_blocks import blocks, diagonals, operands
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import EPS, gate_rows, rows_from
from fla_cp.kernels.triton.device.bundles import (
    Rows,
    RuleOptions,
    beta,
    by_chunk,
    gate,
    rows,
    shape,
)
from fla_cp.kernels.triton.device.channelwise_decay import ANCHORS, STEEPEST
from fla_cp.kernels.triton.device.gates import LOG2E, SMALLEST_BETA
from fla_cp.kernels.triton.device.planes import CHANNELWISE_PLANES, K_SCALE, Q_SCALE
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables
from fla_cp.kernels.triton.tile_table import Tile

SLAB = gl.constexpr(64)
"""Channels that are formed at once."""

AHEAD = gl.constexpr(132)
"""How many programs later the one starts whose inputs are prefetched: as many as an
H200 has multiprocessors. With 66 the kernel takes 1% longer, with 264 4%."""


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def sigmoid(rate, x):
    """Of rate * x, as in triton/device/gates.py."""
    root = gl.rsqrt(1.0 + gl.exp2(x * (rate * -LOG2E)))
    return root * root


@gluon.jit
def log2_of_more(u):
    """log2(1 + u) for u from 0 to 1, as a polynomial that errs by 2e-7 of the result. Triton's log2
    takes 25 instructions, and 1 + u has lost most digits of a small u."""
    x = 0.007579137571156025 * u - 0.04268719255924225
    x = x * u + 0.11305198818445206
    x = x * u - 0.1972852200269699
    x = x * u + 0.27571967244148254
    x = x * u - 0.3584284782409668
    x = x * u + 0.4806954860687256
    x = x * u - 0.7213403582572937
    return (x * u + 1.4426950216293335) * u


@gluon.jit
def log_decay(raw, rate, bound, GATE: gl.constexpr):
    """`gate_value` of triton/device/gates.py in powers of two."""
    if GATE == "softplus":
        x = raw * LOG2E
        return -rate * (gl.maximum(x, 0.0) + log2_of_more(gl.exp2(-gl.abs(x))))
    elif GATE == "sigmoid":
        return (bound * LOG2E) * sigmoid(rate, raw)
    else:
        return raw * LOG2E


@gluon.jit
def times_power(x, n):
    """x * 2^n for n up to 0. Two factors form it, because 2^n may underflow where x is large."""
    return x * gl.exp2(gl.maximum(n, -120.0)) * gl.exp2(gl.minimum(n + 120.0, 0.0))


@gluon.jit
def copy_slab(ptr, row, n, place, BT: gl.constexpr, N: gl.constexpr):
    """Starts to copy the first n rows of a tile [BT, N], which are `row` elements apart; the rows
    after them become zero."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    i = gl.arange(0, BT, gl.SliceLayout(1, flat))[:, None]
    j = gl.arange(0, N, gl.SliceLayout(0, flat))[None, :]
    async_copy.async_copy_global_to_shared(place, ptr + (i * row + j), mask=i < n)


@gluon.jit
def load_g(gate, start, i_hv, part, i, c, n_rows):
    """g of rows i [4, 16, 1] and channels c [SLAB] of a slab. Rows from n_rows on are those of the
    last row before them: with a mask, there are too few predicates to load all rows at once."""
    g = gate_rows(gate, start, i_hv)
    i = gl.minimum(i, gl.maximum(n_rows, 1) - 1)
    return gl.load(g.ptr + part * SLAB + (i * g.row + c[None, :][:, None, :]))


@gluon.jit
def raw_and_rate(g, gate, i_hv, part, c, S: gl.constexpr):
    """raw = g + dt_bias, fp32, for g [4, 16, SLAB] and channels c [SLAB] of a slab, and rate =
    exp(A_log)."""
    raw, rate = upcast(g), 1.0
    if gate.dt_bias is not None:
        bias = gl.load(gate.dt_bias + (i_hv * S.K + part * SLAB) + c).to(gl.float32)
        raw += bias[None, :][:, None, :]
    if gate.A_log is not None:
        rate = gl.exp(gl.load(gate.A_log + i_hv).to(gl.float32))
    return raw, rate


@gluon.jit
def load_tall(place, tall: gl.constexpr, quarters: gl.constexpr):
    """A tile [64, N] of shared memory as [4, 16, N]."""
    x = place.load(tall)
    return upcast(gl.convert_layout(gl.reshape(x, [4, 16, x.shape[1]]), quarters))


@gluon.jit
def store_tall(x, place, tall: gl.constexpr):
    """Stores x [4, 16, N] as a tile [64, N] of shared memory."""
    x = gl.reshape(x.to(place.dtype), [64, x.shape[2]])
    place.store(gl.convert_layout(x, tall))


@gluon.jit
def of_quarters(w, a, b, c, d):
    """One of a, b, c and d [N], by the quarter w [4, 1]: [4, N]."""
    early = gl.where(w == 0, a[None, :], b[None, :])
    late = gl.where(w == 2, c[None, :], d[None, :])
    return gl.where(w < 2, early, late)


@gluon.jit
def quarter_sum(s_ends, w: gl.constexpr, ends: gl.constexpr):
    """Row w of s_ends [4, N]: [N]."""
    x = gl.reshape(s_ends.slice(w, 1).load(ends), [SLAB])
    return gl.convert_layout(x, gl.SliceLayout(0, ends))


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


@gluon.jit
def indices(none, layout: gl.constexpr, A: gl.constexpr):
    """For each element of a tensor [64, A, ..] its row and its block of columns. none: 0."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    blocks: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    i = none + gl.arange(0, 64, rows)[:, None][:, :, None]
    a = gl.arange(0, A, blocks)[None, :][:, :, None]
    return i, a


@gluon.jit
def scores(s_rows, s_near, s_far, none, S: gl.constexpr):
    """Products of rows and columns over all channels, [64, 64]: only those of columns before the
    row are meant."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT // 2, 16])
    two: gl.constexpr = stripes(2, 32)
    near = gl.full([S.BT, S.BT], 0.0, gl.float32, acc)
    far = gl.full([S.BT, S.BT // 2], 0.0, gl.float32, half)
    for part in gl.static_range(S.K // SLAB):
        rows, first = s_rows.index(part), part == 0
        columns = s_near.index(part).permute((1, 0))
        near = warpgroup_mma(rows, columns, near, use_acc=not first, is_async=True)
        columns = s_far.index(part).slice(0, S.BT // 2).permute((1, 0))
        far = warpgroup_mma(rows, columns, far, use_acc=not first, is_async=True)
    near, far = warpgroup_mma_wait(0, deps=(near, far))
    # Rows of the second half meet columns of the first half in `far`.
    i, a = indices(none, two, 2)
    near = gl.convert_layout(gl.reshape(near, [64, 2, 32]), two)
    far = gl.convert_layout(far, gl.SliceLayout(1, two))[:, None, :]
    x = gl.where((i >= 32) & (a == 0), far, near)
    return gl.convert_layout(gl.reshape(x, [64, 64]), acc)


@gluon.jit
def form_slab(l, s_ends, places, out, at, S: gl.constexpr):  # noqa: E741
    """What scans read of a slab, and the factors of its rows and columns in shared memory.

    l [4, 16, SLAB]: sums of log decays since the quarter began; s_ends [4, SLAB]: those over each
    quarter, read again where they are used, to free registers. places: shared memory of q, k, the
    near and the far columns, and the scales of q and k. at: offsets in what scans read."""
    s_q, s_k, s_near, s_far, s_scales = places
    first, place = at
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    half: gl.constexpr = s_near.dtype
    # l relative to the middle of the half, whose sum since the chunk began is `middle`.
    ends: gl.constexpr = gl.SliceLayout(1, quarters)
    w = gl.arange(0, 4, gl.SliceLayout(1, ends))[:, None]
    l -= gl.where(w % 2 == 0, s_ends.load(ends), 0.0)[:, None, :]  # noqa: E741

    # Columns: relative to the middle of their own half, then of the second half, then to the end.
    b_k = load_tall(s_k, tall, quarters)
    b_k *= s_scales.index(1).load(gl.SliceLayout(2, quarters))[:, :, None]
    col = b_k * gl.exp2(-l)
    store_tall(col, s_near, tall)
    between = quarter_sum(s_ends, 1, ends) + quarter_sum(s_ends, 2, ends)
    col = times_power(col, gl.where(w < 2, between[None, :], 0.0)[:, None, :])
    store_tall(col, s_far, tall)
    last = gl.exp2(quarter_sum(s_ends, 3, ends))[None, :]
    gl.store(out.kg + first + place, (col * last[:, None, :]).to(half))

    # Rows: what the scan reads, and the left operands of the scores.
    e = gl.exp2(l)
    middle = quarter_sum(s_ends, 0, ends)[None, :]
    middle = gl.where(w < 2, middle, middle + between[None, :])
    up_to = times_power(e, middle[:, None, :])
    if S.REMOVAL != "none":
        gl.store(out.k_decayed + first + place, (b_k * up_to).to(half))
        store_tall(b_k * e, s_k, tall)
    b_q = load_tall(s_q, tall, quarters)
    b_q *= s_scales.index(0).load(gl.SliceLayout(2, quarters))[:, :, None]
    gl.store(out.qg + first + place, (b_q * up_to).to(half))
    store_tall(b_q * e, s_q, tall)


@gluon.jit
def scale_rows(s_q, s_k, s_scales, s_diagonal, at, scale, none, S: gl.constexpr, R: gl.constexpr):
    """Stores the factors of the rows of q and k, which become part of them, to shared memory and to
    the planes of rows at `at`, and to shared memory the scores' diagonal."""
    of_rows: gl.constexpr = gl.SliceLayout(2, blocks())
    zero = gl.full([4, 16, 16], 0.0, gl.float32, blocks())
    qq, kk, qk = zero, zero, zero
    for part in gl.static_range(S.K // SLAB):
        q, q_t = operands(s_q.index(part))
        k, k_t = operands(s_k.index(part))
        qq, kk, qk = mma_v2(q, q_t, qq), mma_v2(k, k_t, kk), mma_v2(q, k_t, qk)
    k_scale = gl.full([4, 16], 1.0, gl.float32, of_rows)
    q_scale = k_scale * scale
    if R.NORM:
        q_scale *= gl.rsqrt(diagonals(qq, none) + EPS)
        k_scale *= gl.rsqrt(diagonals(kk, none) + EPS)
    w = gl.arange(0, 4, gl.SliceLayout(1, of_rows))[:, None]
    i = w * 16 + gl.arange(0, 16, gl.SliceLayout(0, of_rows))[None, :]
    gl.store(at + Q_SCALE * S.BT + i, q_scale)
    gl.store(at + K_SCALE * S.BT + i, k_scale)
    s_diagonal.store(gl.reshape(diagonals(qk, none) * q_scale * k_scale, [S.BT]))
    s_scales.index(0).store(q_scale)
    s_scales.index(1).store(k_scale)


@gluon.jit
def largest_of(a, b, c, d):
    """The largest size of an element of a, b, c and d [N]."""
    early = gl.maximum(gl.abs(a), gl.abs(b))
    late = gl.maximum(gl.abs(c), gl.abs(d))
    return gl.max(gl.maximum(early, late), 0)


@gluon.jit
def intra_sm90_kernel(q, k, gate, beta, out, chunks, scale, S: gl.constexpr, R: gl.constexpr):
    """`intra_kernel` for a chunk and a value head, on the path of a safe gate. With R.BY_CHUNK it
    ends early where decays are too strong, after the anchors by which `is_steep` finds the chunk:
    the same differences are compared, to the bit."""
    i_c, i_hv = chunk_and_head(gl.program_id(0), S.HV)
    i_h, i_ch = i_hv // S.G, i_c * S.HV + i_hv
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    c_later, hv_later = chunk_and_head(program_ahead(AHEAD), S.HV)
    later, last_later = rows_of_chunk(chunks, c_later)
    none = n_rows // (S.BT + 1)  # 0 in a form that the compiler cannot tell to be 0
    half: gl.constexpr = k.ptr.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    PARTS: gl.constexpr = S.K // SLAB
    STAGED: gl.constexpr = gate.g.dtype.element_ty == half  # g is copied to the far columns' place
    G_SIZE: gl.constexpr = 2 if STAGED else 4
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT, 16])
    # A thread has 16 rows of two channels in `quarters`.
    quarters: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    ends: gl.constexpr = gl.SliceLayout(1, quarters)

    s_q = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_k = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_near = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_far = gl.allocate_shared_memory(half, [PARTS, S.BT, SLAB], wide)
    s_scales = gl.allocate_shared_memory(gl.float32, [2, 4, 16], plain)
    s_ends = gl.allocate_shared_memory(gl.float32, [PARTS, 4, SLAB], plain)
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_diagonal = gl.allocate_shared_memory(gl.float32, [S.BT], of_rows)
    s_beta = gl.allocate_shared_memory(gl.float32, [2 * S.BT], of_rows)
    all_q, all_k = q, k
    q, k = rows_from(q, start, i_h), rows_from(k, start, i_h)
    for part in gl.static_range(PARTS):
        copy_slab(q.ptr + part * SLAB, q.row, n_rows, s_q.index(part), S.BT, SLAB)
        copy_slab(k.ptr + part * SLAB, k.row, n_rows, s_k.index(part), S.BT, SLAB)
    async_copy.commit_group()
    if STAGED:
        raw_g = gate_rows(gate, start, i_hv)
        for part in gl.static_range(PARTS):
            copy_slab(raw_g.ptr + part * SLAB, raw_g.row, n_rows, s_far.index(part), S.BT, SLAB)
        async_copy.commit_group()
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i_b = gl.arange(0, 2 * S.BT, line)  # one for each thread, so that none is stored twice
    if beta.ptr is not None:  # loaded where it is used, it would be waited for
        at_b = beta.ptr + (i_hv + start * beta.row)
        raw_beta = gl.load(at_b + i_b * beta.row, mask=i_b < n_rows, other=0.0)
    if STAGED:
        async_copy.wait_group(1)
    else:
        async_copy.wait_group(0)
    barrier()
    prefetch_tile(rows_from(all_q, later, hv_later // S.G), last_later, S.K, 2)
    prefetch_tile(rows_from(all_k, later, hv_later // S.G), last_later, S.K, 2)
    prefetch_tile(gate_rows(gate, later, hv_later), last_later, S.K, G_SIZE)

    at = out.rows + i_ch * (CHANNELWISE_PLANES * S.BT)
    b_beta = gl.where(i_b < n_rows, 1.0, 0.0)
    if beta.ptr is not None:
        b_beta = raw_beta.to(gl.float32)
    if R.BETA_SIGMOID:
        b_beta = gl.where(i_b < n_rows, beta.factor * sigmoid(1.0, b_beta), 0.0)
    # Like `away_from_zero`, since the backward may divide by it.
    small = (i_b < n_rows) & (gl.abs(b_beta) < SMALLEST_BETA)
    b_beta = gl.where(small, SMALLEST_BETA, b_beta)
    gl.store(at + i_b, b_beta, mask=i_b < S.BT)
    s_beta.store(b_beta)
    scale_rows(s_q, s_k, s_scales, s_diagonal, at, scale, none, S, R)
    w = gl.arange(0, 4, gl.SliceLayout(1, ends))[:, None]
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :][:, :, None]
    c = gl.arange(0, SLAB, gl.SliceLayout(0, ends))
    numbers = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None][:, :, None]
    numbers = numbers * 16 + r
    if STAGED:
        async_copy.wait_group(0)
        barrier()
    strongest = none * 0.0  # the largest decay over a quarter, where that decides on the path
    for part in range(PARTS):
        # Decays: l since the quarter began, and their sums over each quarter. Rows are numbered
        # anew, so that no address stays in registers from slab to slab.
        again = (n_rows + part) // (S.BT + PARTS)
        i, columns = numbers + again, c[None, :][:, None, :]
        head, ch, first = i_hv, i_ch, start
        if R.BY_CHUNK:
            head, ch, first = i_hv + again, i_ch + again, start + again
        if STAGED:
            b_g = load_tall(s_far.index(part), tall, quarters)
        else:
            b_g = load_g(gate, first, head, part, i, c, n_rows)
        raw, rate = raw_and_rate(b_g, gate, head, part, c, S)
        steps = log_decay(raw, rate, gate.bound, R.GATE)
        l = gl.associative_scan(gl.where(i < n_rows, steps, 0.0), 1, plus)  # noqa: E741
        mine = gl.sum(gl.where(r == 15, l, 0.0), 1)
        s_ends.index(part).store(mine)
        barrier()
        t = s_ends.index(part)
        t_0, t_1 = quarter_sum(t, 0, ends), quarter_sum(t, 1, ends)
        t_2, t_3 = quarter_sum(t, 2, ends), quarter_sum(t, 3, ends)
        t_1, t_2 = t_0 + t_1, t_0 + t_1 + t_2
        t_3 = t_2 + t_3
        anchors = out.anchors + (ch * ANCHORS * S.K + part * SLAB + w * S.K + c[None, :])
        gl.store(anchors, of_quarters(w, t_0, t_1, t_2, t_3))
        gl.store(out.decay + ch * S.K + part * SLAB + c, gl.exp2(t_3))
        if R.BY_CHUNK:
            strongest = gl.maximum(strongest, largest_of(t_0, t_1 - t_0, t_2 - t_1, t_3 - t_2))
        at_slab = ch * (S.BT * S.K) + (part + again) * SLAB, numbers * S.K + columns
        given = s_q.index(part), s_k.index(part), s_near.index(part), s_far.index(part), s_scales
        if R.BY_CHUNK:
            if strongest <= STEEPEST:
                form_slab(l, t, given, out, at_slab, S)
        else:
            form_slab(l, t, given, out, at_slab, S)
    if R.BY_CHUNK and strongest > STEEPEST:
        return
    fence_async_shared()
    barrier()

    if R.BY_CHUNK:  # all is read and numbered again, to free registers
        n_rows = gl.load(chunks.rows + i_c)
        none = n_rows // (S.BT + 1)
        i_ch = (gl.program_id(0) + none).to(gl.int64)
    i = none + gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    j = gl.arange(0, S.BT, gl.SliceLayout(0, acc))
    b_qk = scores(s_q, s_near, s_far, none, S)
    b_kk = b_qk
    if REMOVES:
        b_beta = s_beta.slice(0, S.BT).load(gl.SliceLayout(1, acc))
        b_kk = scores(s_k, s_near, s_far, none, S) * -b_beta[:, None]
    barrier()  # all products are done with the operands, whose place is used again
    s_out = s_q._reinterpret(half, [2, S.BT, S.BT], wide)
    diagonal = s_diagonal.load(gl.SliceLayout(1, acc))
    rest = gl.where(i[:, None] == j[None, :], diagonal[:, None], 0.0)
    b_qk = gl.where(i[:, None] > j[None, :], b_qk, rest)
    store_terms(b_qk, out.Aqk + i_ch * (S.TERMS * S.BT * S.BT), s_out.index(none), flat, S.TERMS)
    if REMOVES:
        places = s_out.index(0), s_k, s_near, s_far
        to = out.T + i_ch * (S.TERMS * S.BT * S.BT)
        barrier()  # the scores are read
        store_inverse(b_kk, to, places, none, S.TERMS)


def aligned(x: Rows) -> bool:
    """Whether the address and the strides prove that copies of 16 bytes are aligned."""
    return not (x.ptr.data_ptr() % 16 or x.row % 16 or x.head % 16)


def why_not(x: Inputs, c: Chunks, R: RuleOptions) -> str:
    """Why the kernel cannot form these chunks; "" if it can."""
    if x.q.shape[2] != 128:
        return f"K must be 128, got {x.q.shape[2]}"
    if c.rule.removal == "p":
        return "the rule removes along p"
    if not (R.SAFE and R.EXP2):
        return "it has only the path of a safe gate, in powers of two"
    if not (aligned(rows(x.q)) and aligned(rows(x.k))):
        return "addresses and strides of q and k do not prove that copies of 16 bytes are aligned"
    if x.g.dtype == x.k.dtype and not aligned(rows(x.g)):
        return "address and strides of g do not prove that copies of 16 bytes are aligned"
    return ""


def takes(x: Inputs, c: Chunks, paths: tuple[tuple[str, RuleOptions], ...]) -> bool:
    """Whether a call takes the kernel by itself. paths: of `local_paths`; the kernel is the first,
    and with any gate another one serves the chunks that are too steep for it."""
    return not why_not(x, c, paths[0][1])


def intra_channel(table: Tables, x: Inputs, c: Chunks, t: Tile, R: RuleOptions) -> None:
    """Fills c, on the path of a safe gate; with any gate only the anchors and decays of chunks that
    are too steep. Raises ValueError for chunks that it cannot form."""
    if reason := why_not(x, c, R):
        raise ValueError(f"the tile {t} of stage intra cannot be used: {reason}")
    given = rows(x.q), rows(x.k), gate(c.rule, x), beta(c.rule, x), c.formed(), table.chunks
    (NC, HV, K), H, V = c.decay.shape, x.q.shape[1], x.v.shape[2]
    S = shape(c.rule, x.q.dtype, H, HV, K, V, t)  # not c.shape: kg has a head for each value head
    R = R._replace(BY_CHUNK=by_chunk(c.rule, x.q.dtype))
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    launch(intra_sm90_kernel, (NC * HV,), *given, c.rule.scale, **compiled)

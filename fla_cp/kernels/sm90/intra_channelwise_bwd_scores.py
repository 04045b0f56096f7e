"""The backward of scores and values of a chunk with one decay a channel, for sm_90, in Gluon.

triton/intra_channelwise_bwd_scores.py explains what is computed; the results are equal up to
rounding. A program has a chunk and a value head, and copies or loads all operands at once.

Everything stays where a product leaves its results. Rows of v_new are copied in an order in which a
thread's results are 8 neighbouring columns, which it stores as they are. A thread loads 8
neighbouring values of a row as well. Products of small blocks take them as operands, since these
may have their values in any order that both operands share. The diagonals of such products are the
sums of v y and do o over values, and the diagonal of y v_new^T is that of v_new y.

If x.y is None, the reverse scan wrote dv = beta y, which stands for y here. Then beta is a factor
of the gradient of Akk, which therefore belongs to rows k and not to rows beta k, and of v's share
of dbeta, which `beta_bwd` divides by beta.
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

from fla_cp.kernels.sm90.intra_channelwise import aligned, copy_slab
from fla_cp.kernels.sm90.programs import chunk_and_head
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import rows_from
from fla_cp.kernels.triton.device.bundles import Grads, Rows, RuleOptions, Saved, shape
from fla_cp.kernels.triton.device.planes import (
    CHANNELWISE_PLANES,
    DIAGONAL,
    GRAD_PLANES,
    K_DK,
    Q_DQ,
)
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables, after_local
from fla_cp.kernels.triton.tile_table import Tile


@gluon.jit
def y_rows(x, out, start, i_ch, i_hv, n_rows, S: gl.constexpr):
    """y of a chunk and head, or dv where that stands for y: the address of the first row, the
    stride of rows, and how many there are."""
    if x.y is None:
        return out.dv + (start * S.HV + i_hv) * S.V, S.HV * S.V, n_rows
    else:
        return x.y + i_ch * (S.BT * S.V), S.V, S.BT


@gluon.constexpr_function
def pieces(N):
    """The layout of [64, N] in four warps in which a warp has 16 rows, and a thread 8 neighbouring
    columns of each 32 in two of them."""
    registers, c = [[0, 1], [0, 2], [0, 4], [8, 0]], 32
    while c < N:
        registers.append([0, c])
        c *= 2
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, N])


@gluon.jit
def token_of(c):
    """The token whose row of v_new is row c in shared memory."""
    return (c & 33) + ((c >> 1) & 3) * 8 + ((c >> 3) & 3) * 2


@gluon.jit
def in_order(x):
    """A product with v_new in columns [64, 64], with columns in the order of tokens. Registers are
    only named anew."""
    x = gl.permute(gl.reshape(x, [64, 2, 4, 4, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(x, [64, 64]), pieces(64))


@gluon.jit
def blocks_of(x):
    """x [64, 128] as [4, 16, 128], with values in the order in which threads of a product have
    them. Registers are only named anew."""
    x = gl.permute(gl.reshape(x, [4, 16, 4, 4, 4, 2]), [0, 1, 2, 4, 3, 5])
    return gl.reshape(x, [4, 16, 128])


@gluon.jit
def sums_of_products(x, y, rows: gl.constexpr):
    """For each row the sum over values of x y, [64]; both in the layout `pieces`."""
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, small, 2)
    a = gl.convert_layout(blocks_of(x), left)
    b = gl.convert_layout(gl.permute(blocks_of(y), [0, 2, 1]), right)
    p = mma_v2(a, b, gl.full([4, 16, 16], 0.0, gl.float32, small))
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, small)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, small)))[None, :][:, None, :]
    d = gl.sum(gl.where(i == j, p, 0.0), 2)
    return gl.convert_layout(gl.reshape(d, [64]), rows)


@gluon.jit
def diagonal_of(x, i):
    """The diagonal of x [64, 64] in the layout `pieces`. i: numbers of rows."""
    a, b = gl.split(gl.permute(gl.reshape(x, [64, 2, 32]), [0, 2, 1]))
    a, b = gl.convert_layout(a, pieces(32)), gl.convert_layout(b, pieces(32))
    j = gl.arange(0, 32, gl.SliceLayout(0, pieces(32)))[None, :]
    i = gl.convert_layout(i, gl.SliceLayout(1, pieces(32)))[:, None]
    d = gl.sum(gl.where((i & 31) == j, gl.where(i < 32, a, b), 0.0), 1)
    return gl.convert_layout(d, gl.SliceLayout(1, pieces(64)))


@gluon.jit
def mirrored(x, place):
    """x^T, by way of shared memory [64, 64]."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = gl.permute(gl.reshape(x, [2, 4, 4, 2, 64]), [0, 2, 1, 3, 4])
    place.store(gl.reshape(x, [64, 64]))
    barrier()
    return in_order(place.permute((1, 0)).load(acc))


@gluon.jit
def scores_bwd_sm90_kernel(x, out, chunks, S: gl.constexpr, R: gl.constexpr):
    """`scores_bwd_kernel` for 128 values."""
    i_c, i_hv = chunk_and_head(gl.program_id(0), S.HV)
    i_ch = i_c * S.HV + i_hv
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    half: gl.constexpr = x.v_new.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    of_values: gl.constexpr = pieces(S.V)
    square: gl.constexpr = pieces(S.BT)
    rows: gl.constexpr = gl.SliceLayout(1, square)

    s_do = gl.allocate_shared_memory(half, [S.BT, S.V], wide)
    s_y = gl.allocate_shared_memory(half, [S.BT, S.V], wide)
    s_new = gl.allocate_shared_memory(half, [S.BT, S.V], wide)
    # First what does not wait for the chunk's place among the tokens.
    c = gl.arange(0, S.BT, gl.SliceLayout(1, flat))[:, None]
    o_v = gl.arange(0, S.V, gl.SliceLayout(0, flat))[None, :]
    from_new = x.v_new + i_ch * (S.BT * S.V) + (token_of(c) * S.V + o_v)
    async_copy.async_copy_global_to_shared(s_new, from_new, mask=c < S.BT)
    y, y_row, y_n = y_rows(x, out, start, i_ch, i_hv, n_rows, S)
    copy_slab(y, y_row, y_n, s_y, S.BT, S.V)
    do, v, at = rows_from(x.do, start, i_hv), rows_from(x.v, start, i_hv), start * S.HV + i_hv
    copy_slab(do.ptr, do.row, n_rows, s_do, S.BT, S.V)
    async_copy.commit_group()
    i = gl.arange(0, S.BT, rows)
    i_v = gl.arange(0, S.BT, gl.SliceLayout(1, of_values))[:, None]
    o_v = gl.arange(0, S.V, gl.SliceLayout(0, of_values))[None, :]
    b_v = gl.load((v.ptr + i_v * v.row) + o_v, mask=i_v < n_rows, other=0.0)
    if R.NORM:
        b_o = gl.load((x.o + at * S.V + i_v * (S.HV * S.V)) + o_v, mask=i_v < n_rows, other=0.0)
    beta = gl.load(x.rows + i_ch * (CHANNELWISE_PLANES * S.BT) + i)

    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BT, 16])
    zero = gl.full([S.BT, S.BT], 0.0, gl.float32, acc)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    # Places of results are found here and not before, to free registers.
    none = n_rows // (S.BT + 1)  # 0 in a form that the compiler cannot tell to be 0
    i_c, i_hv = chunk_and_head(gl.program_id(0) + none, S.HV)
    i_ch = i_c * S.HV + i_hv
    to_rows = out.row_grads + i_ch * (GRAD_PLANES * S.BT) + i
    if R.NORM:
        b_do = s_do.load(of_values)
        gl.store(to_rows + Q_DQ * S.BT, sums_of_products(b_do, b_o, rows))
    columns = s_new.permute((1, 0))
    b_ds = warpgroup_mma(s_do, columns, zero, use_acc=False, is_async=True)
    if REMOVES or R.NORM:
        b_da = warpgroup_mma(s_y, columns, zero, use_acc=False, is_async=True)
    b_y = s_y.load(of_values)
    dbeta = sums_of_products(b_y, b_v, rows)
    at = gl.load(chunks.start + i_c).to(gl.int64) * S.HV + i_hv
    gl.store(out.shares + at + i * S.HV, dbeta, mask=i < n_rows)
    if x.y is not None:
        scale = gl.convert_layout(beta, gl.SliceLayout(1, of_values))[:, None]
        i_v += none
        to = (out.dv + at * S.V + i_v * (S.HV * S.V)) + o_v
        gl.store(to, (b_y.to(gl.float32) * scale).to(half), mask=i_v < n_rows)

    i += none
    j = gl.arange(0, S.BT, gl.SliceLayout(0, square))[None, :]
    below = j < gl.where(i < n_rows, i, 0)[:, None]
    if REMOVES or R.NORM:
        b_ds, b_da = warpgroup_mma_wait(0, deps=(b_ds, b_da))
        b_da = in_order(b_da)
    else:
        b_ds = warpgroup_mma_wait(0, deps=(b_ds,))
    b_ds = in_order(b_ds)
    gl.store(to_rows + DIAGONAL * S.BT, diagonal_of(b_ds, i))
    b_ds = gl.where(below, b_ds, 0.0).to(half)
    if R.NORM:
        k_dk = 2.0 * diagonal_of(b_da, i)
        if x.y is None:
            k_dk = gl.where(i < n_rows, k_dk / beta, 0.0) - dbeta
        else:
            k_dk -= beta * dbeta
        gl.store(to_rows + K_DK * S.BT, k_dk)
    if REMOVES:
        b_da = gl.where(below, b_da * -1.0, 0.0).to(half)
    if not R.SAFE:
        twice = True
        if R.BY_CHUNK:
            twice = gl.load(x.steep + i_ch) != 0
        if twice:
            barrier()  # the products have read the tiles
            b_ds += mirrored(b_ds, s_do._reinterpret(half, [S.BT, S.BT], wide))
            if REMOVES:
                b_da += mirrored(b_da, s_y._reinterpret(half, [S.BT, S.BT], wide))
    to_scores = out.scores + i_ch * (2 * S.BT * S.BT) + (i[:, None] * S.BT + j)
    gl.store(to_scores, b_ds)
    if REMOVES:
        gl.store(to_scores + S.BT * S.BT, b_da)


def why_not(x: Inputs, c: Chunks, do: Rows, R: RuleOptions) -> str:
    """Why the kernel does not support these chunks; "" if it does."""
    half = x.v.dtype
    if x.v.shape[2] != 128:
        return f"V must be 128, got {x.v.shape[2]}"
    if do.ptr.dtype != half or (R.NORM and (c.o is None or c.o.dtype != half)):
        return f"do and o must have the dtype of v, {half}"
    if not aligned(do):
        return "address and strides of do do not prove that copies of 16 bytes are aligned"
    return ""


def scores_bwd(
    table: Tables, x: Inputs, c: Chunks, read: Saved, out: Grads, t: Tile, R: RuleOptions
) -> None:
    """Launches the kernel. read, out: as `scores_bwd_kernel` takes them; R: options of the call.
    Raises ValueError for chunks that the kernel does not support."""
    (NC, HV, K), H, V = c.decay.shape, x.q.shape[1], x.v.shape[2]
    if reason := why_not(x, c, read.do, R):
        raise ValueError(f"the tile {t} of stage scores_bwd cannot be used: {reason}")
    S = shape(after_local(c.rule), x.q.dtype, H, HV, K, V, t)
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    launch(scores_bwd_sm90_kernel, (NC * HV,), read, out, table.chunks, **compiled)

"""References of quarters of a chunk, for the backward of the channelwise local stage, in Gluon.

The kernel of intra_channelwise_bwd.py has one for each half, so that no 16 rows may decay by more
than 2^100. Here decays are relative to the middle of their quarter's range, which need not be a
row: a quarter may decay by 2^200, and factors of rows and columns stay between 2^-101 and 2^101.

A pair of quarters with references n_b and n_a has another factor 2^(n_a - n_b) a channel. No
operand is multiplied by it, but sums are, in the manner of Horner. What rows receive is summed from
the first quarter of columns to the last one, and between two of them the sums of all later rows are
multiplied by the step from reference to reference. What columns receive is summed from the last
quarter of rows to the first one. So each quarter of rows or columns meets all columns or rows in
one product, and there is one tile for each operand.

References are whole, even powers of two. A step is up to 2^-201, too small for fp32, so sums are
multiplied twice by its square root, which is a power of two as well. As in the other kernel, what a
pair adds to the gradient of gc at its row cancels at its column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fla_cp.kernels.sm90.intra_channelwise import SLAB, largest_of, of_quarters
from fla_cp.kernels.triton.device.channelwise_decay import ANCHORS, STEEPEST

STEP_ROWS = gl.constexpr(4)
"""Where tables of quarters have their second part: `references`."""


@gluon.constexpr_function
def by_quarter():
    """The layout of a product's result [64, SLAB] as [4, 16, SLAB]: a quarter is a warp's."""
    registers = [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 16, 64])


@gluon.jit
def times(x, v):
    """x [64, SLAB], a product's result, times v [4, SLAB], a factor for each quarter."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    x = gl.convert_layout(gl.reshape(x, [4, 16, SLAB]), by_quarter()) * v[:, None, :]
    return gl.convert_layout(gl.reshape(x, [64, SLAB]), acc)


@gluon.jit
def even_power(a, b):
    """The even number next to the mean of a and b."""
    return 2.0 * gl.floor((a + b) * 0.25 + 0.5)


@gluon.jit
def references(anchors, w, c, S: gl.constexpr):
    """For each quarter w [4, 1] and channel c: by what sums of decays since the quarter began
    exceed those from its reference; the decay from the reference to the chunk's end; and the square
    root of the decay from its reference to the next one, in the last quarter the decay up to the
    first reference. [4, SLAB] each."""
    a_0, a_1 = gl.load(anchors + c), gl.load(anchors + S.K + c)
    a_2, a_3 = gl.load(anchors + 2 * S.K + c), gl.load(anchors + 3 * S.K + c)
    n_0, n_1 = even_power(a_0 * 0.0, a_0), even_power(a_0, a_1)
    n_2, n_3 = even_power(a_1, a_2), even_power(a_2, a_3)
    n = of_quarters(w, n_0, n_1, n_2, n_3)
    step = of_quarters(w, 0.5 * (n_1 - n_0), 0.5 * (n_2 - n_1), 0.5 * (n_3 - n_2), n_0)
    return n - of_quarters(w, a_0 * 0.0, a_0, a_1, a_2), gl.exp2(a_3[None, :] - n), gl.exp2(step)


@gluon.jit
def store_references(place, to_end, step):
    """Stores what `references` gives in shared memory, for `of_own` and `of_step`."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tables = place._reinterpret(gl.float32, [2, 4, SLAB], plain)
    tables.index(0).store(to_end)
    tables.index(1).store(step)


@gluon.jit
def of_own(place, layout: gl.constexpr):
    """The decay from each quarter's reference to the chunk's end [4, SLAB]."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return place._reinterpret(gl.float32, [2, 4, SLAB], plain).index(0).load(layout)


@gluon.jit
def of_step(place, n: gl.constexpr, layout: gl.constexpr):
    """Row n of the steps of `references` [SLAB]."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return place._reinterpret(gl.float32, [8, SLAB], line).index(STEP_ROWS + n).load(layout)


@gluon.jit
def column_blocks(place):
    """The four tiles [64, 16] of columns of a tile [64, 64] in shared memory, as left operands."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    x = gl.permute(gl.reshape(place.load(left), [64, 2, 2, 16]), [0, 3, 1, 2])
    even, odd = gl.split(x)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return (
        gl.convert_layout(a, left),
        gl.convert_layout(b, left),
        gl.convert_layout(c, left),
        gl.convert_layout(d, left),
    )


@gluon.jit
def quarter_step(sums, left, s_s, s_f, s_table, n: gl.constexpr, REMOVES: gl.constexpr):
    """Step n of `quarter_products`: adds what quarter n of the columns gives rows, and what quarter
    3 - n of the rows gives columns, and goes on to the next reference."""
    b_dq, b_dr, b_dc = sums
    left_q, left_r = left
    m: gl.constexpr = 3 - n
    layout: gl.constexpr = gl.SliceLayout(1, by_quarter())
    w = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None]
    columns = s_f.index(0).slice(16 * n, 16)
    scores, rows = s_s.index(0).slice(16 * m, 16), s_f.index(2).slice(16 * m, 16)
    b_dq = warpgroup_mma(left_q, columns, b_dq, is_async=True)
    b_dc = warpgroup_mma(scores.permute((1, 0)), rows, b_dc, use_acc=n > 0, is_async=True)
    if REMOVES:
        scores, rows = s_s.index(1).slice(16 * m, 16), s_f.index(3).slice(16 * m, 16)
        b_dr = warpgroup_mma(left_r, columns, b_dr, is_async=True)
        b_dc = warpgroup_mma(scores.permute((1, 0)), rows, b_dc, is_async=True)
        b_dq, b_dr, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dr, b_dc))
    else:
        b_dq, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dc))
    if n < 3:
        step = of_step(s_table, n, gl.SliceLayout(0, layout))[None, :]
        step = gl.where(w > n, step, 1.0)
        b_dq = times(times(b_dq, step), step)
        if REMOVES:
            b_dr = times(times(b_dr, step), step)
        step = of_step(s_table, m - 1, gl.SliceLayout(0, layout))[None, :]
        step = gl.where(w < m, step, 1.0)
        b_dc = times(times(b_dc, step), step)
    return b_dq, b_dr, b_dc


@gluon.jit
def quarter_products(sums, s_s, s_f, s_table, REMOVES: gl.constexpr):
    """Adds what the scores add to the gradients of rows of q, of rows of beta k and of columns.

    sums: the three gradients [64, SLAB] so far, those of rows relative to the first reference,
    those of columns relative to their own. The results are relative to their own reference. s_s:
    gradients of the scores, zero on and above the diagonal. s_f: columns, what is not read, and
    both kinds of rows. s_table: of `store_references`."""
    b_dq, b_dr, b_dc = sums
    left_q = column_blocks(s_s.index(0))
    left_r = left_q
    if REMOVES:
        left_r = column_blocks(s_s.index(1))
    sums = b_dq, b_dr, b_dc
    for n in gl.static_range(4):
        sums = quarter_step(sums, (left_q[n], left_r[n]), s_s, s_f, s_table, n, REMOVES)
    return sums[0], sums[1], b_dc + sums[2]


@gluon.jit
def mark_sm90_kernel(anchors, marks, HV: gl.constexpr, K: gl.constexpr):
    """Marks the chunks and heads that decay by more than twice STEEPEST over a quarter."""
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i_ch = gl.program_id(0).to(gl.int64) * HV + gl.program_id(1)
    at = anchors + i_ch * (ANCHORS * K) + gl.arange(0, K, spread)
    t_0, t_1 = gl.load(at), gl.load(at + K)
    t_2, t_3 = gl.load(at + 2 * K), gl.load(at + 3 * K)
    steep = largest_of(t_0, t_1 - t_0, t_2 - t_1, t_3 - t_2) > 2 * STEEPEST
    gl.store(marks + i_ch, steep.to(gl.int32))

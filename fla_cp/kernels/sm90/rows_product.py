"""Products of a decoding step of up to 64 sequences, on the tensor cores of sm_90.

Such a product takes the time in which its weight is read. A program has some columns of the result
for all sequences. One warp copies tiles of the weight and of the tokens to shared memory, and four
multiply them: if these copied, too, each tile would wait for barriers of the block. The first tiles
of the weight are copied before the kernel ahead has ended (triton/early.py), so that memory is busy
in between.

Where few columns would leave most of the GPU idle, SPLIT programs share them. Each has some columns
of the weight and writes its sums in fp32; `rows_sum_kernel` of triton/rows_sum.py adds them up.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fla_cp.kernels.sm90.step_words import sigmoid
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.triton.device.bundles import constants

ROWS = gl.constexpr(64)
"""The most sequences, the rows of an instruction of the tensor cores."""

STEP = gl.constexpr(64)
"""Columns of a tile of the weight and of the tokens."""


@constants
class RowsShape(NamedTuple):
    """What the kernel is compiled for.

    B: sequences. C: columns of the weight. N: columns of the result, of each of GROUPS products
    whose tokens and results lie side by side, and whose weights follow each other. ROW: columns
    from one row of the result to the next. TILE: columns of a program. SPLIT: programs that share
    them; 0: the result is not a sum of parts. SLOTS: places for tiles in shared memory. SWIGLU: the
    weight has 2 N rows, those of the gate first. EARLY: see triton/early.py.
    """

    B: int
    C: int
    N: int
    ROW: int
    GROUPS: int
    TILE: int
    SPLIT: int
    SLOTS: int
    SWIGLU: bool
    EARLY: bool


@gluon.constexpr_function
def over(a, b):
    """a / b, rounded up."""
    return -(-a // b)


@gluon.constexpr_function
def parts_of(S):
    """Tiles of the weight for one tile of the tokens."""
    return 2 if S.SWIGLU else 1


@gluon.jit
def allow_next(EARLY: gl.constexpr):
    """Allows the next kernel to start once all programs of this one have come here."""
    if EARLY:
        gdc_launch_dependents()


@gluon.jit
def wait_for_last(EARLY: gl.constexpr):
    """Waits until the kernel ahead has ended and its results are there."""
    if EARLY:
        gdc_wait()


@gluon.jit
def copy_weight(w, weights, bar, row, i, slot, S: gl.constexpr):
    """Starts the copies of tile i of the weight, whose rows begin at `row`, to a place. The barrier
    waits for these and for the tokens."""
    PARTS: gl.constexpr = parts_of(S)
    size: gl.constexpr = 2 * STEP * (ROWS + PARTS * S.TILE)
    mbarrier.expect(bar, size)
    for part in gl.static_range(PARTS):
        at = [row + part * S.N, i * STEP]
        tma.async_copy_global_to_shared(w, at, bar, weights.index(slot * PARTS + part))


@gluon.jit
def copy_tiles(
    x, w, tokens, weights, ready, free, row, column, first, n, S: gl.constexpr
):  # fmt: skip
    """Copies n tiles, from number `first` on, of the weight, whose rows begin at `row`, and of the
    tokens, whose columns begin at `column`."""
    for early in gl.static_range(S.SLOTS):
        if early < n:
            copy_weight(w, weights, ready.index(early), row, first + early, early, S)
    wait_for_last(S.EARLY)
    for i in range(n):
        slot = i % S.SLOTS
        if i >= S.SLOTS:
            mbarrier.wait(free.index(slot), (i // S.SLOTS - 1) & 1)
            copy_weight(w, weights, ready.index(slot), row, first + i, slot, S)
        at = [0, column + (first + i) * STEP]
        tma.async_copy_global_to_shared(x, at, ready.index(slot), tokens.index(slot))


@gluon.jit
def sum_tiles(
    tokens, weights, ready, free, n, y, bias, group, column, i_s, S: gl.constexpr
):  # fmt: skip
    """Sums up the products of n tiles, and stores the result's columns from `column` on."""
    PARTS: gl.constexpr = parts_of(S)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.TILE, 16])
    acc = gl.full([ROWS, S.TILE], 0.0, gl.float32, L)
    up = acc
    for i in range(n):
        slot = i % S.SLOTS
        mbarrier.wait(ready.index(slot), (i // S.SLOTS) & 1)
        b_x = tokens.index(slot)
        w_t = weights.index(slot * PARTS).permute((1, 0))
        acc = warpgroup_mma(b_x, w_t, acc, is_async=True)
        if S.SWIGLU:
            w_t = weights.index(slot * PARTS + 1).permute((1, 0))
            up = warpgroup_mma(b_x, w_t, up, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        if i > 0:  # the products of the tile before have ended
            mbarrier.arrive(free.index((i - 1) % S.SLOTS), count=1)
    if S.SWIGLU:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index((n - 1) % S.SLOTS), count=1)

    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    o_c = column + gl.arange(0, S.TILE, gl.SliceLayout(0, L))
    if S.SPLIT:
        to = y + i_s * ROWS * S.ROW + o_r[:, None] * S.ROW + o_c[None, :]
        gl.store(to, acc, mask=(o_c < S.N)[None, :])
    else:
        if bias is not None:
            b = gl.load(bias + group * S.N + o_c, mask=o_c < S.N, other=0.0)
            acc = acc + b.to(gl.float32)[None, :]
        if S.SWIGLU:
            acc = acc * sigmoid(acc) * up
        to = y + o_r[:, None] * S.ROW + (group * S.N + o_c)[None, :]
        gl.store(to, acc.to(gl.bfloat16), mask=(o_r < S.B)[:, None] & (o_c < S.N)[None, :])


@gluon.jit
def multiply(x, w, y, bias, i_t, i_s, S: gl.constexpr):
    """The columns of program i_t, or its part i_s of them, see `rows_product_kernel`. There must be
    at least one tile of the weight for each part."""
    PARTS: gl.constexpr = parts_of(S)
    SHARED: gl.constexpr = max(S.SPLIT, 1)
    tiles: gl.constexpr = over(S.N, S.TILE)
    steps: gl.constexpr = over(S.C, STEP)
    group, column = i_t // tiles, i_t % tiles * S.TILE
    first = i_s * steps // SHARED
    n = (i_s + 1) * steps // SHARED - first

    weights = gl.allocate_shared_memory(w.dtype, [S.SLOTS * PARTS, S.TILE, STEP], w.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [S.SLOTS, ROWS, STEP], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S.SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S.SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S.SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    barrier()
    row, columns = group * S.N + column, group * S.C
    # fmt: off
    gl.warp_specialize([
        (sum_tiles, (tokens, weights, ready, free, n, y, bias, group, column, i_s, S)),
        (copy_tiles, (x, w, tokens, weights, ready, free, row, columns, first, n, S)),
    ], [1], [40])
    # fmt: on


@gluon.jit
def rows_product_kernel(x, w, y, bias, S: gl.constexpr):
    """y [B, GROUPS * N], bf16, for x [B, GROUPS * C] and w [GROUPS * N, C], or [2 N, C] with
    SWIGLU; with SPLIT y [SPLIT, 64, N], fp32, whose sum is the result. x and w: TMA descriptors of
    tiles of 64 columns. bias: [GROUPS * N] or None."""
    allow_next(S.EARLY)
    multiply(x, w, y, bias, gl.program_id(0), gl.program_id(1), S)

"""Products of a decoding step of up to 64 sequences, on the tensor cores of sm_90.

Such a product takes the time in which its weight is read. A program has some columns of the result
for all sequences, and copies tiles of the weight and of the tokens to shared memory, several ahead
of their use. It copies the first tiles of the weight before the kernel ahead has ended
(triton/early.py), so that memory is busy in between, too.

Where few columns would leave most of the GPU idle, SPLIT programs share them. Each has some columns
of the weight and writes its sums in fp32; `rows_sum_kernel` of triton/rows_mixer.py adds them up.
The norm of a recurrent layer's heads is divided out here, head by head.
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
    weight has 2 N rows, those of the gate first. HEAD: tiles of a head by whose root its part of
    the tokens is divided; 0: none. PARTS: sums of squares of a head. EARLY: see triton/early.py.
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
    HEAD: int
    PARTS: int
    EARLY: bool


@gluon.constexpr_function
def over(a, b):
    """a / b, rounded up."""
    return -(-a // b)


@gluon.constexpr_function
def parts_of(S):
    """Tiles of the weight for one tile of the tokens."""
    return 2 if S.SWIGLU else 1


@gluon.constexpr_function
def adds(S, inner):
    """Whether the product of a tile, the `inner`-th of its head, is added to those before."""
    return S.HEAD == 0 or inner > 0


@gluon.constexpr_function
def steps_of(S):
    """Tiles that are one step: those of a head, or one."""
    return max(S.HEAD, 1)


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
def copy_weight(w, places, ready, row, i, slot, S: gl.constexpr):
    """Starts the copies of tile i of the weight, whose rows begin at `row`, to a place, whose
    barrier also waits for the tokens."""
    PARTS: gl.constexpr = parts_of(S)
    size: gl.constexpr = 2 * (PARTS * S.TILE + ROWS) * STEP
    mbarrier.expect(ready.index(slot), size)
    for part in gl.static_range(PARTS):
        at = [row + part * S.N, i * STEP]
        tma.async_copy_global_to_shared(w, at, ready.index(slot), places.index(slot * PARTS + part))


@gluon.jit
def copy_tokens(x, tokens, ready, column, i, slot):
    """Starts the copy of tile i of the tokens, whose columns begin at `column`, to a place."""
    at = [0, column + i * STEP]
    tma.async_copy_global_to_shared(x, at, ready.index(slot), tokens.index(slot))


@gluon.jit
def head_roots(squares, eps, total, o_r, head, S: gl.constexpr):
    """[64]: 1 / rms of a head of each row. total: zeros."""
    heads: gl.constexpr = over(S.C, S.HEAD * STEP)
    p = squares + (o_r * heads + head) * S.PARTS
    for n in gl.static_range(S.PARTS):
        total = total + gl.load(p + n, mask=o_r < S.B, other=1.0)
    return gl.rsqrt(total / (S.HEAD * STEP) + eps)


@gluon.jit
def rows_product_kernel(x, w, y, bias, squares, eps, S: gl.constexpr):
    """y [B, GROUPS * N], bf16, for x [B, GROUPS * C] and w [GROUPS * N, C], or [2 N, C] with
    SWIGLU; with SPLIT y [SPLIT, 64, N], fp32, whose sum is the result. x and w: TMA descriptors of
    tiles of 64 columns. bias: [GROUPS * N] or None. squares [B, heads, PARTS], fp32, and eps: of
    the norm of heads."""
    allow_next(S.EARLY)
    PARTS: gl.constexpr = parts_of(S)
    INNER: gl.constexpr = steps_of(S)
    SHARED: gl.constexpr = max(S.SPLIT, 1)
    tiles: gl.constexpr = over(S.N, S.TILE)
    steps: gl.constexpr = over(S.C, STEP * INNER)
    acc_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.TILE, 16])
    i_t, i_s = gl.program_id(0), gl.program_id(1)
    group = i_t // tiles
    row = group * S.N + (i_t % tiles) * S.TILE
    start = i_s * steps // SHARED
    n = ((i_s + 1) * steps // SHARED - start) * INNER
    first = start * INNER

    places = gl.allocate_shared_memory(w.dtype, [S.SLOTS * PARTS, S.TILE, STEP], w.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [S.SLOTS, ROWS, STEP], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S.SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S.SLOTS):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    barrier()
    for slot in gl.static_range(S.SLOTS):
        if slot < n:
            copy_weight(w, places, ready, row, first + slot, slot, S)
    wait_for_last(S.EARLY)
    for slot in gl.static_range(S.SLOTS):
        if slot < n:
            copy_tokens(x, tokens, ready, group * S.C, first + slot, slot)

    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, acc_of))
    o_c = gl.arange(0, S.TILE, gl.SliceLayout(0, acc_of))
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, acc_of))
    roots = none
    zero = gl.full([ROWS, S.TILE], 0.0, gl.float32, acc_of)
    acc, up, total = zero, zero, zero
    for turn in range(n // INNER):
        if S.HEAD:
            roots = head_roots(squares, eps, none, o_r, start + turn, S)
        for inner in gl.static_range(INNER):
            i = turn * INNER + inner
            place = i % S.SLOTS
            mbarrier.wait(ready.index(place), (i // S.SLOTS) & 1)
            s_x = tokens.index(place)
            s_w = places.index(place * PARTS).permute((1, 0))
            acc = warpgroup_mma(s_x, s_w, acc, use_acc=adds(S, inner), is_async=True)
            if S.SWIGLU:
                s_w = places.index(place * PARTS + 1).permute((1, 0))
                up = warpgroup_mma(s_x, s_w, up, is_async=True)
                acc, up = warpgroup_mma_wait(2, deps=(acc, up))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            # The products of the turn before have ended; their place is free.
            coming = i - 1 + S.SLOTS
            if (i > 0) & (coming < n):
                barrier()
                free = (i - 1) % S.SLOTS
                copy_weight(w, places, ready, row, first + coming, free, S)
                copy_tokens(x, tokens, ready, group * S.C, first + coming, free)
        if S.HEAD:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            total = total + acc * roots[:, None]
    if S.SWIGLU:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if S.HEAD:
        acc = total

    c = (i_t % tiles) * S.TILE + o_c
    if S.SPLIT:
        to = y + i_s * ROWS * S.ROW + o_r[:, None] * S.ROW + c[None, :]
        gl.store(to, acc, mask=(c < S.N)[None, :])
    else:
        if bias is not None:
            b = gl.load(bias + group * S.N + c, mask=c < S.N, other=0.0)
            acc = acc + b.to(gl.float32)[None, :]
        if S.SWIGLU:
            acc = acc * sigmoid(acc) * up
        to = y + o_r[:, None] * S.ROW + (group * S.N + c)[None, :]
        gl.store(to, acc.to(gl.bfloat16), mask=(o_r < S.B)[:, None] & (c < S.N)[None, :])

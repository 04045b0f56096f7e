"""Inverse of a unit lower triangular [C, C] matrix."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import dot, pair_mask


@triton.constexpr_function
def needs_nearest(TERMS, operand):
    """Whether T is kept so exactly that dropped bits of TF32 would be most of its error: in two
    terms, or in fp16, which has as many bits as TF32. In bf16, to round T errs by more."""
    return TERMS > 1 or operand == tl.float16


@triton.constexpr_function
def joins(BT):
    """How often pairs of blocks are joined until blocks of 16 rows are one of BT rows."""
    return BT.bit_length() - 5


@triton.jit
def nearest(x, NEAREST: tl.constexpr):
    """x in fp32; with NEAREST, rounded to the eleven bits of TF32. Products would drop the other
    bits, which errs three times as much and always in one direction."""
    if NEAREST:
        bits = tl.cast(x, tl.int32, bitcast=True)
        return tl.cast((bits + 0x1000) & -0x2000, tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def unit_lower_inverse(A, D, BT: tl.constexpr, NEAREST: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of strictly lower A [BT, BT]; D [BT / 16, 16, 16]: its diagonal blocks. NEAREST:
    see `needs_nearest`.

    [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]] joins inverses of blocks of S rows to
    inverses of blocks of 2S rows, all pairs at once; up to 16 rows this happens in D."""
    j = tl.arange(0, 16)
    X = tl.where((j[:, None] == j[None, :])[None], 1.0, 0.0)
    X -= tl.where(pair_mask(j, 0)[None], D, 0.0)
    for level in tl.static_range(3):
        C = nearest(tl.where(pair_mask(j, 1 + level)[None], D, 0.0), NEAREST)
        N = nearest(X, NEAREST)
        X -= dot(N, nearest(dot(C, N, PRECISION), NEAREST), PRECISION)
    i = tl.arange(0, BT)
    X = tl.broadcast_to(X[:, :, None, :], [BT // 16, 16, BT // 16, 16])
    X = tl.where((i // 16)[:, None] == (i // 16)[None, :], tl.reshape(X, [BT, BT]), 0.0)
    for level in tl.static_range(joins(BT)):
        C = nearest(tl.where(pair_mask(i, 4 + level), A, 0.0), NEAREST)
        N = nearest(X, NEAREST)
        X -= dot(N, nearest(dot(C, N, PRECISION), NEAREST), PRECISION)
    return X

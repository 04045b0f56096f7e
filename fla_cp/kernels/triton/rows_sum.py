"""The sums of products that several programs share, in a decoding step of several sequences, with
the norm behind those."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.early import allow_next, wait_for_last


@triton.jit
def rows_sum_kernel(
    parts, x, norm, y, eps, C: tl.constexpr, BC: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x [B, C] += the sum of parts [SPLIT, 64, C], fp32, if there are any. y [B, C] = x / rms(x) *
    norm [C], unless y is None. A program has one row."""
    allow_next(EARLY)
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.arange(0, BC)
    m_c = o_c < C
    b_w = 0.0
    if y is not None:
        b_w = tl.load(norm + o_c, mask=m_c, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    b_x = tl.load(x + i_b * C + o_c, mask=m_c, other=0.0)
    if SPLIT:
        b_s = b_x.to(tl.float32)
        for n in tl.static_range(SPLIT):
            b_s += tl.load(parts + (n * 64 + i_b) * C + o_c, mask=m_c, other=0.0)
        b_x = b_s.to(x.dtype.element_ty)
        tl.store(x + i_b * C + o_c, b_x, mask=m_c)
    if y is not None:
        b_y = b_x.to(tl.float32)
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=0) / C + eps) * b_w
        tl.store(y + i_b * C + o_c, b_y.to(y.dtype.element_ty), mask=m_c)

"""The gradients of A_log and dt_bias, from the shares that programs of a backward have written.

One launch adds up both: for a short sequence, the host would need longer for two sums of torch than
the GPU for the sums. Rows are added in a fixed order, so that equal calls give equal bits.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device.bundles import constants
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import power_of_two

ELEMENTS, WIDEST = 4096, 32
"""Elements of a [BR, BC] tile, and its most columns."""

WARPS = 4


class Shares(NamedTuple):
    """Shares [rows, columns] and their sum [columns], fp32 (ptr None: there are none)."""

    ptr: Any
    out: Any


@constants
class Columns(NamedTuple):
    """total: how many columns the shares have. [BR, BC]: a tile. programs: how many add them up."""

    total: int
    BR: int
    BC: int
    programs: int


@triton.jit
def add_up(x, rows, i, S: tl.constexpr):
    """Writes the sum of tile i of the columns of Shares x."""
    o_r, o_c = tl.arange(0, S.BR), i * S.BC + tl.arange(0, S.BC)
    m_c = (o_c < S.total)[None, :]
    b_x = tl.zeros([S.BR, S.BC], tl.float32)
    for r in range(0, rows, S.BR):
        o_x = (r + o_r).to(tl.int64)[:, None] * S.total + o_c[None, :]
        b_x += tl.load(x.ptr + o_x, mask=(r + o_r < rows)[:, None] & m_c, other=0.0)
    tl.store(x.out + o_c, tl.sum(b_x, axis=0), mask=o_c < S.total)


@triton.jit(do_not_specialize=["a_rows", "b_rows"])
def rate_grads_kernel(a, b, a_rows, b_rows, A: tl.constexpr, B: tl.constexpr):
    """a, b: Shares, of `Columns` A and B. The first programs add up a, the others b."""
    i = tl.program_id(0)
    if i < A.programs:
        if a.ptr is not None:
            add_up(a, a_rows, i, A)
    elif b.ptr is not None:
        add_up(b, b_rows, i - A.programs, B)


def _columns(x: Tensor | None) -> tuple[int, Columns]:
    """How many rows shares [rows, ..] have, and their columns."""
    if x is None:
        return 0, Columns(1, 1, 1, 0)
    total = math.prod(x.shape[1:])
    BC = min(WIDEST, power_of_two(total))
    return len(x), Columns(total, ELEMENTS // BC, BC, cdiv(total, BC))


def rate_grads(
    dA_log: Tensor | None, A_log: Tensor | None, ddt_bias: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A_log and dt_bias, fp32 and of their shapes, None for one that is None.

    dA_log [*, HV], ddt_bias [*, HV, K] or [*, HV]: shares of them, fp32 and dense.
    """
    (a_rows, A), (b_rows, B) = _columns(dA_log), _columns(ddt_bias)
    a, b = _shares(dA_log, A_log), _shares(ddt_bias, dt_bias)
    if A.programs + B.programs:
        grid = (A.programs + B.programs,)
        launch(rate_grads_kernel, grid, a, b, a_rows, b_rows, A, B, num_warps=WARPS)
    return a.out, b.out


def _shares(x: Tensor | None, like: Tensor | None) -> Shares:
    """The shares x with memory for their sum, in the shape of `like`."""
    if x is None or like is None:
        return Shares(None, None)
    return Shares(x, torch.empty(like.shape, dtype=x.dtype, device=x.device))

"""Products of sorted rows with the matrix of their group: each expert's rows with its own weight.

The rows [M, ..] lie group after group, and ends [E] int32, on the device, says where each group
ends. If torch's grouped product supports the tensors, it runs all groups in one launch, and on GPUs
of sm_90 and sm_100 in bfloat16 the host need not know the ends. Otherwise, in float64 and for sizes
that are no multiple of 16 bytes, a loop over the groups reads the ends, so the host waits. torch's
own fallback for float32 and float16 on GPUs reads them as well.

On a CPU every group is filled up with zeros to whole blocks of rows. Without this, the rounding of
a row would depend on the number of rows in its group, so that a token's result would depend on
which other tokens take the same expert.

Both products are ops of torch.library, which a compiled graph calls without tracing them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm

BLOCK = 16
"""How many rows a block has. In some of MKL's kernels, the rounding of a row depends on its place
among 4 rows, and small products have other kernels (torch 2.13)."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x W_e^T, [M, N], with the weight W_e of each row's group.

    x: [M, K], sorted by group. weight: [E, N, K], in x's dtype. ends: [E] int32, not decreasing,
    the last one M. Differentiable in x and weight; the gradient of a weight without rows is zero.
    """
    found: Tensor = torch.ops.fla_cp.grouped_linear(x, weight, ends, False)
    return found


def _fits(rows: int, *tensors: Tensor) -> bool:
    """Whether torch's grouped product supports these contiguous tensors. It needs rows whose sizes
    are multiples of 16 bytes, and refuses a product without rows (torch 2.13)."""
    return rows > 0 and all(
        t.dtype in _DTYPES and t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
        for t in tensors
    )


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    """The rows [first, stop) of each group, on the host."""
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _in_blocks(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] with each group filled up to whole blocks, [.., K]. Also returns where the groups of
    the result end, and the row of each row of x in it, [M]."""
    counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1])).long()
    filled = (counts + BLOCK - 1) // BLOCK * BLOCK
    stops = filled.cumsum(0)
    added = (stops - filled) - (ends - counts)  # rows that were added before each group
    rows = torch.arange(len(x), device=x.device) + added.repeat_interleave(counts)
    out = x.new_zeros(int(stops[-1]), x.shape[1])
    out[rows] = x
    return out, stops.to(ends.dtype), rows


@torch.library.custom_op("fla_cp::grouped_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """x [M, K], weight [E, N, K] -> [M, N]. transposed: x [M, N], the same weight -> [M, K]."""
    x, weight = x.contiguous(), weight.contiguous()
    if x.device.type == "cpu":
        blocks, stops, rows = _in_blocks(x, ends)
        return _products(blocks, weight, stops, transposed).index_select(0, rows)
    return _products(x, weight, ends, transposed)


def _products(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    width = weight.shape[2 if transposed else 1]
    out = x.new_empty(x.shape[0], width)
    if _fits(len(x), x, weight, out):
        found: Tensor = _grouped_mm(x, weight if transposed else weight.mT, offs=ends)
        return found
    for e, (first, last) in enumerate(_bounds(ends)):
        torch.mm(x[first:last], weight[e] if transposed else weight[e].t(), out=out[first:last])
    return out


@_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("fla_cp::grouped_outer", mutates_args=())
def _outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a_e^T b_e of each group: [E, N, K] for a [M, N] and b [M, K]."""
    a, b = a.contiguous(), b.contiguous()
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    if _fits(len(a), a, b, out):
        found: Tensor = _grouped_mm(a.t(), b, offs=ends)
        # torch's tests leave out what a group without rows gets on a GPU (torch 2.13)
        empty = torch.diff(ends, prepend=torch.zeros_like(ends[:1])) == 0
        return found.masked_fill_(empty[:, None, None], 0.0)
    for e, (first, last) in enumerate(_bounds(ends)):
        torch.mm(a[first:last].t(), b[first:last], out=out[e])
    return out


@_outer.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, ends, ctx.transposed = inputs
    assert not ctx.transposed, "the transposed product is used in the backward alone"
    ctx.save_for_backward(x, weight, ends)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, ends = ctx.saved_tensors
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    dx = _linear(grad, weight, ends, True) if wants_x else None
    return dx, _outer(grad, x, ends) if wants_weight else None, None, None


_linear.register_autograd(_gradients, setup_context=_setup)

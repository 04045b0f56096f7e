"""The cross-entropy of an output head, chunk by chunk, with its gradients formed in the forward.

The logits of a long sequence are the largest tensor of a step: 65536 tokens and 32000 ids make
4 GiB in bfloat16. `chunked_cross_entropy` therefore takes the tokens in chunks. For each chunk it
forms the logits and the losses. If gradients are needed, it also forms at once the gradient of the
logits, and from it those of x and of the weight. Only the last two are kept after a chunk, and
nothing is computed twice. This is possible because the loss is a plain sum: its gradients are known
except for one factor, by which the backward multiplies them.

With p = softmax(logits), the loss of a token is -log p[label], and the gradient of its logits is
p - onehot(label).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla_cp.once_differentiable import once_differentiable
from fla_cp.replay import without_autocast
from fla_cp.train.data import IGNORE

CHUNK_BYTES = 2**30
"""How many bytes the logits of a chunk and their gradient may take together, both in x's dtype.
1 GiB is 8320 tokens of 32000 ids in bfloat16. Products of that many rows fill a GPU. If the
pointwise part is not compiled, it holds a few more tensors of a chunk's size in float32."""

ROW_TILE = 128
"""Chunks, except the last, have a multiple of this many tokens, so that products have whole tiles.
"""

COMPILE = "FLA_CP_COMPILE_LOSS"
"""The environment variable that turns off compiling the pointwise part of a chunk on CUDA, if it is
0."""


def chunked_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy of labels under the logits x W^T.

    x: [T, hidden], of any floating dtype. weight: [vocabulary, hidden], in x's dtype. labels: [T]
    int64, ids below the vocabulary's size; a label of -100 is not counted. T may be 0.
    Returns a scalar in nats, the sum over all counted labels: float64 for float64, else float32.

    Logits and their gradient are rounded to x's dtype. Softmax, losses and the gradient of the
    weight are computed and summed in float32 (float64 for float64), also under autocast. The
    backward does not read the incoming gradient on the host. There are no second derivatives.

    On CUDA, with Triton, torch.compile makes one kernel of the pointwise part, or three if a chunk
    has few tokens. It compiles once, and a second time if a chunk has another length (a third time
    for a length of one token). FLA_CP_COMPILE_LOSS=0 turns this off.

    F.linear_cross_entropy, which torch 2.10 to 2.12 lack, keeps all logits for the backward by
    default. It can form gradients in the forward as here, but then it rounds the summed loss to x's
    dtype and runs each pointwise step as a kernel of its own.

    Raises ValueError if shapes or dtypes do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "x must be [T, hidden] and weight [vocabulary, hidden], "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(
            f"x and weight must have one floating dtype, got {x.dtype} and {weight.dtype}"
        )
    if labels.shape != x.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 of shape {tuple(x.shape[:1])}, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _ChunkedCrossEntropy.apply(x, weight, labels)
    with torch.no_grad():
        return _sums(x, weight, labels, False, False)[0]


@torch.no_grad()
def token_scores(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each label, and whether it is the likeliest id: [T] fp32 and bool.

    Arguments are as in `chunked_cross_entropy`, and tokens are taken in the same chunks. A label of
    -100 has a loss of 0 and is not the likeliest.
    """
    T, device = len(x), x.device
    losses = torch.zeros(T, dtype=torch.float32, device=device)
    hits = torch.zeros(T, dtype=torch.bool, device=device)
    rows = chunk_rows(T, len(weight), x.element_size())
    with without_autocast(device.type):
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            logits = torch.mm(x[part], weight.t())
            losses[part] = _losses(logits, labels[part]).to(torch.float32)
            hits[part] = logits.argmax(-1) == labels[part]
    return losses, hits


class _ChunkedCrossEntropy(torch.autograd.Function):
    """(x, weight, labels) -> loss. Keeps the gradients of x and weight for a loss gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        loss, *grads = _sums(x, weight, labels, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dweight = (
            None if grad is None else _scaled(grad, dloss, ctx.dtype) for grad in ctx.saved_tensors
        )
        return dx, dweight, None


def chunk_rows(tokens: int, vocabulary: int, itemsize: int) -> int:
    """How many tokens a chunk has, at least 1.

    There are as few chunks as CHUNK_BYTES allows, and all have about the same length.
    itemsize: bytes of an element of x.
    """
    most = max(1, CHUNK_BYTES // (2 * vocabulary * itemsize))
    most -= most % ROW_TILE if most > ROW_TILE else 0
    chunks = max(1, -(-tokens // most))
    rows = -(-tokens // chunks)
    return max(1, min(most, -(-rows // ROW_TILE) * ROW_TILE))


def _sums(
    x: Tensor, weight: Tensor, labels: Tensor, wants_dx: bool, wants_dweight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, the gradient of x in x's dtype, and the gradient of the weight in the loss's dtype.
    A gradient that is not wanted is None."""
    wide = torch.promote_types(x.dtype, torch.float32)
    T, device = len(x), x.device
    losses = torch.empty(T, dtype=wide, device=device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if wants_dx else None
    dweight = torch.zeros(weight.shape, dtype=wide, device=device) if wants_dweight else None
    rows = chunk_rows(T, len(weight), x.element_size())
    with without_autocast(device.type):
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            _chunk(
                x[part],
                weight,
                labels[part],
                losses[part],
                None if dx is None else dx[part],
                dweight,
            )
    return losses.sum(), dx, dweight


def _chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    losses: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
) -> None:
    """Writes the losses and dx of one chunk, and adds to dweight.

    It is a function of its own, so that the logits of a chunk are freed before those of the next
    chunk are made.
    """
    logits = torch.mm(x, weight.t())
    if dx is None and dweight is None:
        losses.copy_(_pointwise(_losses, x.device)(logits, labels))
        return
    found, dlogits = _pointwise(_losses_and_gradient, x.device)(logits, labels)
    losses.copy_(found)
    if dx is not None:
        torch.mm(dlogits, weight, out=dx)
    if dweight is not None:
        _add_product(dweight, dlogits.t(), x)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row [T], in float32 or a wider dtype; 0 where the label does not count.

    logits: [T, vocabulary]. labels: [T].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak, powers = _powers(logits)
    return _label_losses(logits, labels, peak, powers.sum(-1, keepdim=True))


def _losses_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`_losses`, and the gradient of their sum with respect to the logits, in the logits' dtype.

    The 1 of the label is subtracted from p before the gradient is rounded, so that the difference
    is accurate even if p is nearly 1.
    """
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    peak, powers = _powers(logits)
    total = powers.sum(-1, keepdim=True)
    losses = _label_losses(logits, labels, peak, total)
    p = powers / total
    ids = torch.arange(logits.shape[1], dtype=labels.dtype, device=labels.device)
    gradient = torch.where(ids == labels[:, None], p - 1, p)
    return losses, torch.where((labels != IGNORE)[:, None], gradient, 0.0).to(dtype)


def _powers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row [T, 1], and exp(logits - largest)."""
    peak = logits.amax(-1, keepdim=True)
    return peak, (logits - peak).exp()


def _label_losses(logits: Tensor, labels: Tensor, peak: Tensor, total: Tensor) -> Tensor:
    """The loss of each row. peak: the row's largest logit. total: the sum of exp(logits - peak)."""
    counts = labels != IGNORE
    chosen = logits.gather(1, torch.where(counts, labels, 0)[:, None])
    return torch.where(counts, (total.log() - (chosen - peak))[:, 0], 0.0)


def _pointwise(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, compiled where that makes one kernel of it: on CUDA with Triton."""
    wanted = device.type == "cuda" and os.environ.get(COMPILE, "1") != "0"
    return _compiled(function) if wanted and _has_triton() else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # By default the first length is compiled as it is, and the second makes the length a variable.
    with warnings.catch_warnings():
        # torch 2.13: inductor, which this imports, calls a function that torch has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.compile(function)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds the product a b to total, in place. Products are summed in total's dtype, which is
    float32 or wider. a, b: in the same dtype or a narrower one."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif _adds_in_float32(total.device.type, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif total.is_cuda:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


@functools.cache
def _adds_in_float32(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch can add products of `dtype` to a float32 matrix. It can only on CUDA, and
    some versions require the matrix itself to have `dtype`."""
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a scalar tensor, multiplied in the wider dtype of the two and rounded once, to
    dtype."""
    # A tensor without dims would first be rounded to x's dtype on CUDA.
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, factor.reshape(1), out=out)


def backward(loss: Tensor) -> None:
    """`loss.backward()` on the calling thread. By default torch runs it on a thread of the device
    while the calling one waits. The hand-over and the other thread's cold caches cost the host more
    time than a short layer does."""
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()

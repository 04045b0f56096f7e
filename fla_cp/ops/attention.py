"""Causal softmax attention over packed sequences, under a context too."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fla_cp.arguments import check_scale, check_tensors
from fla_cp.comm.keys_values.gathered import gather
from fla_cp.context import FLACPContext
from fla_cp.kernels.torch.attention import Attended, attend, attend_bwd
from fla_cp.ops.checks import FLOATS, check_sequences
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.key_rows import KeyRows, Lengths


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
) -> Tensor:
    """Each token attends to the tokens of its sequence up to itself.

    q [B, T, H, K], k [B, T, HK, K], v [B, T, HK, V]; H is a multiple of HK, and query head h reads
        key head h // (H / HK). bf16, fp16, fp32 or fp64. Under a context, this rank's tokens:
        [1, T_local, ..].
    scale: factor on the scores; None: K**-0.5.
    cu_seqlens: [N+1] offsets of packed sequences (B = 1); nothing crosses from one to the next.
    cp_context: keys and values come from the ranks that have them, and their gradients go back.
    Returns o [B, T, H, V] in q's dtype. Softmax in fp32 (fp64).
    Raises ValueError as in arguments.py and ops/checks.py, and for a context of fixed shape
    (max_sequences).
    """
    check_tensors(("q", "k", "v", "cu_seqlens"), (q, k, v, cu_seqlens), 3)
    _check_shapes(q, k, v)
    B, T = q.shape[:2]
    check_sequences(T, B, cu_seqlens, cp_context)
    factor = check_scale(scale)
    rows = key_rows(B, T, cu_seqlens, cp_context)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    k, v = keys_of(rows, cp_context, k, v)
    return attention_over(q, k, v, rows.lengths, factor).unflatten(0, (B, T))


def key_rows(B: int, T: int, cu_seqlens: Tensor | None, cp_context: FLACPContext | None) -> KeyRows:
    """Which keys the queries of a call attend to, and where they come from."""
    if cp_context is None:
        if cu_seqlens is None:
            return _rows_of(tuple(range(0, B * T + 1, T)))
        offsets = tuple(cu_seqlens.tolist())
        check_offsets("cu_seqlens", offsets, T)
        return _rows_of(offsets)
    if cp_context.max_sequences is not None:
        raise ValueError(
            "cp_context must be built without max_sequences for attention, got max_sequences="
            f"{cp_context.max_sequences}"
        )
    tables = cp_context.global_cu_seqlens, cp_context.token_ranges, cp_context.rank
    rows: KeyRows = cp_context.plans.cached(KeyRows, lambda: KeyRows.build(*tables))
    return rows


@lru_cache(maxsize=16)
def _rows_of(offsets: tuple[int, ...]) -> KeyRows:
    """On one rank that has all tokens."""
    return KeyRows.build(offsets, (((0, offsets[-1]),),), 0)


def keys_of(rows: KeyRows, cp_context: FLACPContext | None, *xs: Tensor) -> list[Tensor]:
    """Each x [T_local, ..], something of each token in one dtype, for all tokens that this rank's
    queries attend to, [sum(rows.lengths.keys), ..]. They come in one exchange from the ranks that
    have them, and their gradients go back. Work handed over with `Overlap` runs in the meantime."""
    group, flat = None, [x.flatten(1) for x in xs]
    sizes = [x.shape[1] for x in flat]
    if cp_context is not None:
        group = cp_context.group
        cp_context.before("causal_attention", size=sum(sizes), dtype=xs[0].dtype)
    if rows.crosses:
        found = list(gather(torch.cat(flat, 1), rows, group).split(sizes, 1))
    else:
        found = [gather(x, rows, group) for x in flat]
    return [y.unflatten(1, x.shape[1:]) for x, y in zip(xs, found, strict=True)]


def attention_over(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None
) -> Tensor:
    """q [Tq, H, K], k [Tk, HK, K], v [Tk, HK, V] of sequences side by side -> o [Tq, H, V]."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    o: Tensor = _Attention.apply(q, k, v, lengths, factor)
    return o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
    ) -> Tensor:
        found = attend(q, k, v, lengths, scale)
        ctx.save_for_backward(q, k, v, found.o, found.lse, *found.state)
        ctx.lengths, ctx.scale = lengths, scale
        return found.o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, *state = ctx.saved_tensors
        found = Attended(o, lse, tuple(state))
        return *attend_bwd(do, q, k, v, found, ctx.lengths, ctx.scale), None, None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, channels], got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be bf16, fp16, fp32 or fp64, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must have q's dtype and device, {q.dtype} on {q.device}, got {x.dtype} "
                f"on {x.device}"
            )
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have q's rows and tokens, {tuple(q.shape[:2])}, got "
                f"{tuple(x.shape[:2])}"
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's K = {q.shape[3]} channels, got {k.shape[3]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v must have k's HK = {k.shape[2]} heads, got {v.shape[2]}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q's heads must be a multiple of k's HK = {k.shape[2]}, got H = {q.shape[2]}"
        )

"""Causal softmax attention over packed sequences, under a context too."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_cp import remat
from fla_cp.arguments import check_choice, check_scale, check_tensors
from fla_cp.comm.keys_values import EXCHANGES, Sizes, make_exchange
from fla_cp.comm.keys_values.gathered import gather_all
from fla_cp.context import FLACPContext
from fla_cp.kernels.torch.attention import attend, attend_bwd
from fla_cp.ops.checks import FLOATS, check_sequences
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.key_rows import KeyRows, Lengths
from fla_cp.partition.key_tables import KeyTables


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    exchange: str = "auto",
) -> Tensor:
    """Each token attends to the tokens of its sequence up to itself.

    q [B, T, H, K], k [B, T, HK, K], v [B, T, HK, V]; H is a multiple of HK, and query head h reads
        key head h // (H / HK). bf16, fp16, fp32 or fp64. Under a context, this rank's tokens:
        [1, T_local, ..].
    scale: factor on the scores; None: K**-0.5.
    cu_seqlens: [N+1] offsets of packed sequences (B = 1); nothing crosses from one to the next.
    cp_context: keys and values come from the ranks that have them, and their gradients go back.
    exchange: how they come, see `fla_cp.comm.keys_values`. "gathered": each rank gets those that
        its queries read. "by_heads": each rank gets whole documents for its share of the heads.
        "ring": they come one rank after the other, so that a rank holds those of two others at
        most. "auto": that with the fewest bytes which fits in memory.
    Returns o [B, T, H, V] in q's dtype. Softmax in fp32 (fp64).
    Raises ValueError as in arguments.py and ops/checks.py, for a context of fixed shape
    (max_sequences), and for "by_heads" with heads that the ranks do not divide.
    """
    check_tensors(("q", "k", "v", "cu_seqlens"), (q, k, v, cu_seqlens), 3)
    _check_shapes(q, k, v)
    check_choice("exchange", exchange, EXCHANGES)
    B, T, H, K = q.shape
    check_sequences(T, B, cu_seqlens, cp_context)
    scale = check_scale(scale)
    factor = K**-0.5 if scale is None else scale
    tables = key_tables(B, T, cu_seqlens, cp_context)
    sizes = Sizes(H, k.shape[2], K, v.shape[3], q.element_size())
    name, scheme = make_exchange(exchange, tables, sizes)
    group = None
    if cp_context is not None:
        group, facts = cp_context.group, sizes._asdict()
        del facts["itemsize"]
        cp_context.before("causal_attention", **facts, dtype=q.dtype, exchange_of_keys=name)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return scheme.attention(q, k, v, group, factor, _KERNELS).unflatten(0, (B, T))


def key_tables(
    B: int, T: int, cu_seqlens: Tensor | None, cp_context: FLACPContext | None
) -> KeyTables:
    """Where the keys are that the queries of a call attend to."""
    if cp_context is None:
        if cu_seqlens is None:
            return _tables_of(tuple(range(0, B * T + 1, T)))
        offsets = tuple(cu_seqlens.tolist())
        check_offsets("cu_seqlens", offsets, T)
        return _tables_of(offsets)
    if cp_context.max_sequences is not None:
        raise ValueError(
            "cp_context must be built without max_sequences for attention, got max_sequences="
            f"{cp_context.max_sequences}"
        )
    given = cp_context.global_cu_seqlens, cp_context.token_ranges, cp_context.rank
    tables: KeyTables = cp_context.plans.cached(KeyTables, lambda: KeyTables(*given))
    return tables


@lru_cache(maxsize=16)
def _tables_of(offsets: tuple[int, ...]) -> KeyTables:
    """On one rank that has all tokens."""
    return KeyTables(offsets, (((0, offsets[-1]),),), 0)


def key_rows(B: int, T: int, cu_seqlens: Tensor | None, cp_context: FLACPContext | None) -> KeyRows:
    """Which keys the queries of a call attend to, and where they come from."""
    return key_tables(B, T, cu_seqlens, cp_context).rows


def keys_of(rows: KeyRows, cp_context: FLACPContext | None, *xs: Tensor) -> list[Tensor]:
    """Each x [T_local, ..], something of each token in one dtype, for all tokens that this rank's
    queries attend to, [sum(rows.lengths.keys), ..]. They come in one exchange from the ranks that
    have them, and their gradients go back. Work handed over with `Overlap` runs in the meantime."""
    group = None
    if cp_context is not None:
        group, size = cp_context.group, sum(x.shape[1:].numel() for x in xs)
        cp_context.before("keys_of", size=size, dtype=xs[0].dtype)
    return gather_all(xs, rows, group)


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
        call = ("attention", tuple(q.shape), tuple(v.shape), q.dtype, scale)
        kept = remat.kept(call)
        if kept is None:
            kept = attend(q, k, v, lengths, scale)
            remat.keep(call, kept)
        o, lse = kept
        assert o is not None
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.lengths, ctx.scale = lengths, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        return *attend_bwd(do, q, k, v, o, lse, ctx.lengths, ctx.scale), None, None


class _Kernels:
    """`fla_cp.comm.keys_values.base.Kernels`."""

    over = staticmethod(attention_over)
    attend = staticmethod(attend)
    attend_bwd = staticmethod(attend_bwd)


_KERNELS = _Kernels()


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

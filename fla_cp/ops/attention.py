"""Causal softmax attention over packed sequences, on one rank or under a context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fla_cp.arguments import check_choice, check_scale, check_tensors
from fla_cp.comm.keys_values import EXCHANGES, Sizes
from fla_cp.comm.keys_values.gathered import gather_all
from fla_cp.context import FLACPContext
from fla_cp.kernels.torch import attention
from fla_cp.kernels.torch.attention import attention_over as attention_over
from fla_cp.ops.attention_op import attention_op, send_keys_op
from fla_cp.ops.attention_plan import agreed_scheme, handle_of, key_tables
from fla_cp.ops.checks import FLOATS, check_no_offsets_compiled, check_sequences
from fla_cp.ops.latent_attention_op import latent_op, positions_op, send_latents_op
from fla_cp.partition.key_rows import KeyRows


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    exchange: str = "auto",
) -> Tensor:
    """Causal softmax attention: a token attends to the tokens of its sequence up to itself.

    q [B, T, H, K], k [B, T, HK, K], v [B, T, HK, V]; H is a multiple of HK, and query head h reads
        key head h // (H / HK). bf16, fp16, fp32 or fp64. Under a context, this rank's tokens:
        [1, T_local, ..].
    scale: factor on the scores; None: K**-0.5.
    cu_seqlens: [N+1] offsets of packed sequences (B = 1); nothing crosses from one to the next.
    cu_seqlens_cpu: the same on the host, which saves a synchronisation.
    cp_context: keys and values come from the ranks that have them, and their gradients go back.
    exchange: how keys and values travel, see `fla_cp.comm.keys_values`. "gathered": each rank gets
        those that its queries read. "by_heads": each rank gets whole documents for its share of the
        heads. "ring": they come from one rank after the other, so that a rank holds those of at
        most two others. "auto": the scheme with the fewest bytes among those that fit in memory.
        Compiled graphs take "gathered" or "ring", and exchange again in the backward.
    Returns o [B, T, H, V] in q's dtype. The softmax is formed in fp32 (fp64).
    Raises ValueError for arguments that do not fit, for "by_heads" with heads that the ranks do not
    divide, and for "by_heads" and "ring" under a context of fixed shape (max_sequences).
    """
    names = ("q", "k", "v", "cu_seqlens", "cu_seqlens_cpu")
    check_tensors(names, (q, k, v, cu_seqlens, cu_seqlens_cpu), 3)
    _check_shapes(q, k, v)
    check_choice("exchange", exchange, EXCHANGES)
    B, T, H, _ = q.shape
    check_sequences(T, B, cu_seqlens, cp_context, cu_seqlens_cpu)
    scale = check_scale(scale)
    packing = cu_seqlens, cu_seqlens_cpu, cp_context
    return attention_of_sent(lambda: q, H, k, v, None, *packing, scale=scale, exchange=exchange)


def send_keys(
    k: Tensor, v: Tensor, query_heads: int, cp_context: FLACPContext | None
) -> Tensor | None:
    """In a compiled graph of several ranks, starts to exchange k [1, T, HK, K] and v [1, T, HK, V]
    and returns the ticket for `attention_of_sent`. Otherwise it does nothing and returns None.
    Between the two calls the graph should do the work that needs no other rank's keys."""
    if not _sends_ahead(cp_context):
        return None
    found: Tensor = send_keys_op(k[0], v[0], query_heads, "auto", *handle_of(cp_context), 1)
    return found


def attention_of_sent(
    queries: Callable[[], Tensor],
    query_heads: int,
    k: Tensor,
    v: Tensor,
    ticket: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: FLACPContext | None,
    *,
    scale: float | None = None,
    exchange: str = "auto",
) -> Tensor:
    """`causal_attention` without its checks. ticket: that of `send_keys`, if the exchange of k and
    v has started; the scheme is then the one that `send_keys` chose.

    queries: returns q, which has query_heads heads. It is called once, when q is needed. If keys
    and values are gathered, they are under way by then.
    """
    B, T, HK, K = k.shape
    factor = K**-0.5 if scale is None else scale
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    check_no_offsets_compiled(cu_seqlens)
    if torch.compiler.is_compiling():
        q = queries().flatten(0, 1)
        o = attention_op(q, k, v, factor, exchange, *handle_of(cp_context), B, ticket)[0]
    else:
        offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        tables = key_tables(B, T, offsets, cp_context)
        sizes = Sizes(query_heads, HK, K, v.shape[2], k.element_size())
        scheme = agreed_scheme(exchange, tables, sizes, k.dtype, cp_context)
        group = None if cp_context is None else cp_context.group
        o = scheme.attention(lambda: queries().flatten(0, 1), k, v, group, factor, attention)
    return o.unflatten(0, (B, T))


def key_rows(B: int, T: int, cu_seqlens: Tensor | None, cp_context: FLACPContext | None) -> KeyRows:
    """Which keys the queries of a call attend to, and where they come from."""
    return key_tables(B, T, cu_seqlens, cp_context).rows


def keys_of(rows: KeyRows, cp_context: FLACPContext | None, *xs: Tensor) -> list[Tensor]:
    """The rows of each tensor for all tokens to which this rank's queries attend,
    [sum(rows.lengths.keys), ..]. xs: tensors [T_local, ..] of one dtype with a row for each of this
    rank's tokens. The rows come in one exchange from the ranks that have them, and their gradients
    go back. Work that was handed over with `Overlap` runs in the meantime."""
    group = None
    if cp_context is not None:
        group, size = cp_context.group, sum(x.shape[1:].numel() for x in xs)
        cp_context.before("keys_of", size=size, dtype=xs[0].dtype)
    return gather_all(xs, rows, group)


def send_latents(
    latent: Tensor, shared: Tensor, heads: tuple[int, int, int], cp_context: FLACPContext | None
) -> Tensor | None:
    """As `send_keys`, for latent [T, R] and shared [T, p]. The ticket is for
    `compiled_latent_attention`. heads: H, K and V of the attention."""
    if not _sends_ahead(cp_context):
        return None
    found: Tensor = send_latents_op(latent, shared, list(heads), *handle_of(cp_context), 1)
    return found


def _sends_ahead(cp_context: FLACPContext | None) -> bool:
    several = cp_context is not None and cp_context.group is not None
    return several and torch.compiler.is_compiling()


def compiled_latent_attention(
    q: Tensor,
    latent: Tensor,
    shared: Tensor,
    weight: Tensor,
    scale: float,
    cp_context: FLACPContext | None,
    B: int,
    ticket: Tensor | None = None,
) -> Tensor:
    """Latent attention in a compiled graph: o [B * T, H, V].

    q [B * T, H, K], latent [B * T, R], shared [B * T, p]: those of this rank's tokens.
    weight [H * (K - p + V), R]: expands a latent to the first K - p channels of each head's k, and
        to its v. The other p channels of every k are `shared`.
    ticket: from `send_latents`, or None.
    Latents and shared channels of other tokens come from the ranks that have them, and come again
    in the backward.
    """
    handle = handle_of(cp_context)
    o: Tensor = latent_op(q, latent, shared, weight, scale, *handle, B, ticket)[0]
    return o


def compiled_positions(like: Tensor, cp_context: FLACPContext | None, B: int) -> Tensor:
    """In a compiled graph, how many tokens of its sequence come before each token of `like`
    [B * T, ..], as [B * T] int64."""
    found: Tensor = positions_op(like, *handle_of(cp_context), B)
    return found


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, channels], got shape {tuple(x.shape)}")
        if not x.shape[3]:
            raise ValueError(f"{name} must have channels, got shape {tuple(x.shape)}")
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

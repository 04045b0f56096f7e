"""What layers remember of the tokens before, for generation.

A cache belongs to one layer and to the rows of one batch. A layer that is called with it reads it,
and writes the tokens of the call into it. A call may have any number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_cp.context import FLACPContext


@dataclass
class RecurrentCache:
    """conv: the convolution's state [B, D, W]. state: the operator's [B, HV, K, V], fp32 (fp64).
    Both are None before the first token."""

    conv: Tensor | None = None
    state: Tensor | None = None

    @staticmethod
    def joined(caches: Sequence[RecurrentCache]) -> RecurrentCache:
        """The rows of all caches, each of which has seen a token, in one."""
        convs, states = [c.conv for c in caches], [c.state for c in caches]
        return RecurrentCache(_cat(convs), _cat(states))


@dataclass
class AttentionCache:
    """keys [B, capacity, HK, K] and values [B, capacity, HK, V]; of latent attention HK is 1, the
    values are the latents, and the keys are these and the shared channels. lengths: [B] int64, how
    many tokens each row has. written: how many tokens have been written to the longest row."""

    keys: Tensor
    values: Tensor
    lengths: Tensor
    written: int = 0

    @staticmethod
    def joined(caches: Sequence[AttentionCache]) -> AttentionCache:
        """The rows of all caches, which have the same capacity, in one."""
        return AttentionCache(
            torch.cat([c.keys for c in caches]),
            torch.cat([c.values for c in caches]),
            torch.cat([c.lengths for c in caches]),
            max(c.written for c in caches),
        )

    def positions(self, tokens: int) -> Tensor:
        """[B, tokens] positions of the next tokens of each row."""
        return self.lengths[:, None] + torch.arange(
            tokens, dtype=torch.int64, device=self.lengths.device
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """o [B, T, H, V] of the next T tokens, whose keys and values are written first.

        Query h reads key head h // (H / HK). Raises ValueError if the tokens do not fit.
        """
        T, capacity = q.shape[1], self.keys.shape[1]
        if self.written + T > capacity:
            raise ValueError(
                f"cache must have room for {self.written + T} tokens, got a capacity of {capacity}"
            )
        places = self.positions(T)
        rows = torch.arange(len(q), dtype=torch.int64, device=q.device)[:, None]
        self.keys[rows, places] = k.to(self.keys.dtype)
        self.values[rows, places] = v.to(self.values.dtype)
        self.lengths += T
        self.written += T
        seen = torch.arange(self.written, dtype=torch.int64, device=q.device) <= places[..., None]
        keys, values = self.keys[:, : self.written], self.values[:, : self.written]
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.to(q.dtype).transpose(1, 2),
            values.to(q.dtype).transpose(1, 2),
            attn_mask=seen[:, None],
            scale=scale,
            enable_gqa=True,
        )
        return o.transpose(1, 2)


LayerCache = RecurrentCache | AttentionCache


def attention_cache(
    like: Tensor, rows: int, capacity: int, heads: int, channels: int, value_channels: int
) -> AttentionCache:
    """An empty cache with the dtype and device of `like`."""
    dtype, device = like.dtype, like.device
    return AttentionCache(
        torch.zeros(rows, capacity, heads, channels, dtype=dtype, device=device),
        torch.zeros(rows, capacity, heads, value_channels, dtype=dtype, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )


def check_cache(
    rows: int | None, x: Tensor, cu_seqlens: Tensor | None, cp_context: FLACPContext | None
) -> None:
    """Raises ValueError for a call that cannot use a cache. rows: those of the cache, None if it is
    empty."""
    if torch.is_grad_enabled():
        raise ValueError("cache must be None while gradients are recorded: use torch.no_grad()")
    if cu_seqlens is not None or cp_context is not None:
        raise ValueError("cache must be None with cu_seqlens or cp_context")
    if rows is not None and rows != len(x):
        raise ValueError(f"cache must have the {len(x)} rows of x, got {rows}")


def _cat(parts: Sequence[Tensor | None]) -> Tensor:
    found = [x for x in parts if x is not None]
    if len(found) != len(parts):
        raise ValueError("caches must each have seen a token before they are joined")
    return torch.cat(found)

"""Multi-head latent attention (MLA). Source: DeepSeek-V2, arXiv 2405.04434, sec. 2.1; without
positions as in Kimi Linear, arXiv 2510.26692, sec. 4.

The keys and values of all heads are projections of one latent vector a token. Only the latents
travel between ranks, together with the channels of the keys that all heads share. Each rank expands
the latents that it got: all at once, or in a ring those of one other rank at a time.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from fla_cp.arguments import check_number
from fla_cp.comm import Overlap
from fla_cp.comm.keys_values import LatentSizes
from fla_cp.comm.keys_values.latents import Expanded, latent_ring
from fla_cp.comm.keys_values.ring import RingCall
from fla_cp.context import FLACPContext
from fla_cp.nn.attention import SoftmaxAttention
from fla_cp.nn.cache import AttentionCache, attention_cache, check_cache
from fla_cp.nn.modules import RMSNorm, check_inner_dtype
from fla_cp.nn.projections import product_weight
from fla_cp.nn.rotary import Tables, YaRN, rotary_of, rotate
from fla_cp.ops.attention import (
    attention_of_sent,
    attention_over,
    compiled_latent_attention,
    keys_of,
    send_keys,
    send_latents,
)
from fla_cp.ops.attention_plan import key_tables, latent_scheme, ring_call
from fla_cp.partition.key_tables import KeyTables


class MultiHeadLatentAttention(SoftmaxAttention):
    """Causal softmax attention whose keys and values are expanded from latents. A token attends to
    the tokens of its sequence up to itself.

    hidden_size: width of x. num_heads: H. kv_lora_rank: how many channels a latent has.
    qk_nope_head_dim: how many channels of a head's q and k are projected from the latent.
    qk_rope_head_dim: how many further channels there are, in which all heads share k. v_head_dim:
    channels of a head's v. q_lora_rank: rank of the projection of q, with an RMSNorm inside
    (default: a plain projection).
    rope_theta: base of the rotary positions of the shared channels, which restart in each sequence.
    None: no positions (NoPE), as in Kimi Linear. rope_scaling: YaRN, whose magnitude is applied to
    all channels, through the scale, as in DeepSeek-V3. norm_eps: eps of the norms of latents and
    inside q. layer_idx: kept as an attribute, for the caller.
    Raises ValueError as `SoftmaxAttention` and `Rotary` do, for rope_scaling without positions, and
    unless norm_eps is a finite number from 0.
    """

    input_names = "q_proj", "kv_down"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        q_lora_rank: int | None = None,
        rope_theta: float | None = 10000.0,
        rope_scaling: YaRN | None = None,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(
            layer_idx,
            hidden_size=hidden_size,
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=1 if q_lora_rank is None else q_lora_rank,
        )
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        check_number("norm_eps", norm_eps, 0, or_equal=True)
        self.rotary = rotary_of(qk_rope_head_dim, rope_theta, rope_scaling)
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        magnitude = 1.0 if self.rotary is None else self.rotary.magnitude
        self.scale = self.qk_head_dim**-0.5 * magnitude**2

        def between(rank: int, size: int) -> nn.Linear:
            return nn.Linear(rank, num_heads * size, bias=False)

        self.q_proj: nn.Module
        if q_lora_rank is None:
            self.q_proj = self.linear(num_heads * self.qk_head_dim)
        else:
            up = between(q_lora_rank, self.qk_head_dim)
            self.q_proj = nn.Sequential(
                self.linear(q_lora_rank), RMSNorm(q_lora_rank, norm_eps), up
            )
        self.kv_down = self.linear(kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = RMSNorm(kv_lora_rank, norm_eps)
        self.kv_up = between(kv_lora_rank, qk_nope_head_dim + v_head_dim)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False)

    def make_cache(self, rows: int, capacity: int) -> AttentionCache:
        """An empty cache of latents and shared channels, as in `Attention`."""
        rank = self.kv_lora_rank
        wide = rank + self.qk_rope_head_dim
        return attention_cache(self, "kv_down", rows, capacity, 1, wide, rank)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: FLACPContext | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]; under a context [1, T_local, hidden].

        For each token, kv_lora_rank + qk_rope_head_dim numbers travel between ranks, in the dtype
        of the projections. Latents are gathered while q is projected. If the keys and values that
        are expanded from them would not fit (`fla_cp.comm.keys_values`), a ring is used instead.
        A kv_up with an adapter or hooks is always called. There is then no ring, compiled graphs
        exchange keys and values, and a call with a cache expands all latents of the cache.
        cu_seqlens_cpu: the values of cu_seqlens on the host, which saves synchronisations. cache:
        as in `LinearAttention`.
        """
        B, T = self.check(x, cu_seqlens, cu_seqlens_cpu, cp_context)
        offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        if cache is not None:
            check_cache(cache, AttentionCache, x, cu_seqlens, cp_context)
        latent, shared = self.kv_down(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        tables = self.rotary_tables(shared, offsets, cp_context, cache=cache)
        if tables is not None:
            shared = rotate(shared[:, :, None], tables)[:, :, 0]
        latent = self.kv_norm(latent).to(shared.dtype)  # autocast may choose another
        if cache is not None:
            o = self.over_latents(x, latent, shared, tables, cache, cp_context)
            o = o.flatten(2)
            check_inner_dtype(o, "o_proj", self.o_proj)
            return self.o_proj(o)
        latent, shared = latent.flatten(0, 1), shared.flatten(0, 1)
        if torch.compiler.is_compiling():
            o = self.compiled(x, latent, shared, tables, cp_context)
        else:
            tokens = key_tables(B, T, offsets, cp_context)
            ring = self.ring(shared, tokens, cp_context)
            if ring is None:
                with Overlap(lambda: self.queries(x, tables)) as queries:
                    latent, shared = keys_of(tokens.rows, cp_context, latent, shared)
                k, v = self.expanded(latent, shared)
                lengths = tokens.rows.lengths
                o = attention_over(queries().to(v.dtype), k, v, lengths, self.scale)
            else:
                q = self.queries(x, tables).to(shared.dtype)
                weight = self.kv_up.weight.to(shared.dtype)
                o = latent_ring(q, latent, shared, weight, ring)
        o = rearrange(o, "(b t) h v -> b t (h v)", b=B)
        check_inner_dtype(o, "o_proj", self.o_proj)
        return self.o_proj(o)

    def compiled(
        self,
        x: Tensor,
        latent: Tensor,
        shared: Tensor,
        tables: Tables | None,
        cp_context: FLACPContext | None,
    ) -> Tensor:
        """o [B * T, H, v_head_dim] in a compiled graph, from latent [B * T, R] and shared
        [B * T, p]."""
        B, weight = len(x), self.up_weight()
        if weight is not None:
            heads = self.num_heads, self.qk_head_dim, self.v_head_dim
            ticket = send_latents(latent, shared, heads, cp_context)
            q = self.queries(x, tables).to(shared.dtype)
            given = q, latent, shared, weight.to(shared.dtype), self.scale, cp_context, B, ticket
            return compiled_latent_attention(*given)
        k, v = (t.unflatten(0, x.shape[:2]) for t in self.expanded(latent, shared))
        ticket = send_keys(k, v, self.num_heads, cp_context)
        q = self.queries(x, tables).to(v.dtype).unflatten(0, x.shape[:2])
        packing = None, None, cp_context
        o = attention_of_sent(lambda: q, self.num_heads, k, v, ticket, *packing, scale=self.scale)
        return o.flatten(0, 1)

    def ring(
        self, like: Tensor, tables: KeyTables, cp_context: FLACPContext | None
    ) -> RingCall | None:
        """The arguments of a ring, if the keys and values of all tokens that a rank reads do not
        fit; otherwise None. like: gives the dtype of the latents."""
        if self.up_weight() is None:
            return None
        numbers = self.kv_lora_rank + self.qk_rope_head_dim
        heads = self.num_heads, self.qk_head_dim, self.v_head_dim
        sizes = LatentSizes(*heads, numbers, like.element_size())
        scheme = latent_scheme(sizes, like.dtype, tables, cp_context)
        return ring_call(scheme, self.scale, cp_context)

    def over_latents(
        self,
        x: Tensor,
        latent: Tensor,
        shared: Tensor,
        tables: Tables | None,
        cache: AttentionCache,
        cp_context: FLACPContext | None,
    ) -> Tensor:
        """o [B, T, H, v_head_dim] with a cache. If kv_up is only a product, it is applied to
        queries and outputs instead of to all latents. The result is the same, and the cost of it
        does not grow with the text."""
        q = self.queries(x, tables).to(shared.dtype).unflatten(0, x.shape[:2])
        weight = self.up_weight()
        if weight is None:

            def expand(keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
                both = keys[..., self.kv_lora_rank :], latents
                shared, latent = (t.to(q.dtype).flatten(0, 2) for t in both)
                k, v = self.expanded(latent, shared)
                return k.unflatten(0, keys.shape[:2]), v.unflatten(0, keys.shape[:2])

            keys = torch.cat([latent, shared], -1)[:, :, None]
            return cache.attend(q, keys, latent[:, :, None], self.scale, cp_context, expand)
        plain, rotated = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        up = weight.to(q.dtype).unflatten(0, (self.num_heads, -1))
        up_k, up_v = up.split([self.qk_nope_head_dim, self.v_head_dim], 1)
        q = torch.cat([torch.einsum("bthn,hnr->bthr", plain, up_k), rotated], -1)
        keys = torch.cat([latent, shared], -1)[:, :, None]
        o = cache.attend(q, keys, latent[:, :, None], self.scale, cp_context)
        return torch.einsum("bthr,hvr->bthv", o, up_v)

    def up_weight(self) -> Tensor | None:
        """The weight of kv_up, if its call is only a product with it. None if kv_up has to be
        called, because it has an adapter or hooks, or is quantised."""
        if nn.modules.module._has_any_global_hook():
            return None
        return product_weight(self.kv_up)

    def expanded(self, latent: Tensor, shared: Tensor) -> Expanded:
        """The keys and values of N tokens, from latent [N, R] and shared [N, p]."""
        check_inner_dtype(latent, "kv_up", self.kv_up)
        each = rearrange(self.kv_up(latent), "n (h k) -> n h k", h=self.num_heads)
        return Expanded.of(each, shared, self.v_head_dim)

    def queries(self, x: Tensor, tables: Tables | None) -> Tensor:
        """q [B * T, H, qk_head_dim]: first the channels that meet the latents, then the shared
        ones, which are rotated."""
        q: Tensor = rearrange(self.q_proj(x), "b t (h k) -> b t h k", h=self.num_heads)
        if tables is not None:
            plain, rotated = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
            q = torch.cat([plain, rotate(rotated, tables)], -1)
        return q.flatten(0, 1)

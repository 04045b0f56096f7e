"""Softmax attention with grouped queries, for hybrids with the recurrent layers.

Source: Qwen3-Next's attention layer: RMSNorm on the heads of q and k (arXiv 2302.05442), rotary
positions on some channels, and a sigmoid gate on the output (arXiv 2505.06708).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from fla_cp.arguments import check_count, check_flags, check_number, check_tensors
from fla_cp.comm import Overlap
from fla_cp.context import FLACPContext
from fla_cp.nn.cache import AttentionCache, attention_cache, check_cache
from fla_cp.nn.modules import RMSNorm, check_dtype, check_hidden, check_inner_dtype
from fla_cp.nn.rotary import Rotary, Tables, YaRN, rotary_of, rotate
from fla_cp.ops.attention import attention_of_sent, compiled_positions, key_rows, send_keys
from fla_cp.ops.checks import check_no_offsets_compiled, check_sequences
from fla_cp.rule import accumulator


class SoftmaxAttention(nn.Module):
    """The common part of attention layers. Sizes are integers from 1.

    Raises ValueError for other sizes. A call raises it for an x, cu_seqlens or cp_context that does
    not fit, before any projection runs.
    """

    rotary: Rotary | None = None
    input_names: tuple[str, ...]
    """The modules that read x."""

    def __init__(self, layer_idx: int | None, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            check_count(name, size)
        self.hidden_size, self.num_heads = sizes["hidden_size"], sizes["num_heads"]
        self.layer_idx = layer_idx

    def linear(self, size: int) -> nn.Linear:
        """[.., hidden] -> [.., size]."""
        return nn.Linear(self.hidden_size, size, bias=False)

    def reset_parameters(self) -> None:
        """Draws every parameter again, those of linear layers as torch does."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def check(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        cp_context: FLACPContext | None,
    ) -> tuple[int, int]:
        """B and T of a call, after checks of its arguments."""
        check_hidden(x, self.hidden_size, cu_seqlens, cp_context)
        check_dtype(x, **{name: getattr(self, name) for name in self.input_names})
        check_tensors(("cu_seqlens_cpu",), (cu_seqlens_cpu,), 0)
        B, T, _ = x.shape
        check_sequences(T, B, cu_seqlens, cp_context, cu_seqlens_cpu)
        return B, T

    def rotary_tables(
        self,
        like: Tensor,
        offsets: Tensor | None,
        cp_context: FLACPContext | None,
        magnitude: float = 1.0,
        cache: AttentionCache | None = None,
    ) -> Tables | None:
        """The rotary tables of the tokens of `like` [B, T, ..]; None for a layer without positions.
        offsets: cu_seqlens, or its copy on the host if there is one."""
        B, T = like.shape[:2]
        if self.rotary is None:
            return None
        if cache is not None:
            positions = cache.positions(T, cp_context).flatten()
            return self.rotary.turned(positions, accumulator(like.dtype), magnitude)
        check_no_offsets_compiled(offsets)
        if torch.compiler.is_compiling():
            positions = compiled_positions(like.flatten(0, 1), cp_context, B)
            return self.rotary.turned(positions, accumulator(like.dtype), magnitude)
        lengths = key_rows(B, T, offsets, cp_context).lengths
        return self.rotary.tables(lengths, like, magnitude)


class Attention(SoftmaxAttention):
    """Causal softmax attention with grouped queries: a token attends to the tokens of its sequence
    up to itself.

    hidden_size: width of x. num_heads: H query heads of head_dim channels. num_kv_heads: heads of
    keys and values, a divisor of num_heads (default: equal). qk_norm: RMSNorm on each head of q and
    k. output_gate: o is multiplied by a sigmoid of a projection of x. rope_theta: base of the
    rotary positions, which restart in each sequence; None: no positions. rotary_dim: the rotated
    channels of a head (default: all). rope_scaling: YaRN, whose magnitude is applied to the rotated
    channels of q and k. norm_eps: eps of the norms of q and k. layer_idx: kept as an attribute, for
    the caller.
    Raises ValueError as `SoftmaxAttention` and `Rotary` do, for heads that do not fit, for
    rotary_dim above head_dim, for rotary_dim or rope_scaling without positions, and unless norm_eps
    is a finite number from 0.
    """

    input_names = "q_proj", "k_proj", "v_proj", "g_proj"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        *,
        qk_norm: bool = False,
        output_gate: bool = False,
        rope_theta: float | None = 10000.0,
        rotary_dim: int | None = None,
        rope_scaling: YaRN | None = None,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(
            layer_idx,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if num_heads % num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        check_flags(("qk_norm", "output_gate"), (qk_norm, output_gate))
        check_number("norm_eps", norm_eps, 0, or_equal=True)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.rotary = rotary_of(head_dim, rope_theta, rope_scaling, rotary_dim)
        if self.rotary is not None and self.rotary.dim > head_dim:
            raise ValueError(f"rotary_dim must be at most head_dim={head_dim}, got {rotary_dim}")

        self.q_proj = self.linear(num_heads * head_dim)
        self.k_proj = self.linear(num_kv_heads * head_dim)
        self.v_proj = self.linear(num_kv_heads * head_dim)
        self.g_proj = self.linear(num_heads * head_dim) if output_gate else None
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def make_cache(self, rows: int, capacity: int) -> AttentionCache:
        """An empty cache for `rows` sequences of up to `capacity` tokens. Raises ValueError unless
        both are integers from 1."""
        heads, dim = self.num_kv_heads, self.head_dim
        return attention_cache(self, "k_proj", rows, capacity, heads, dim, dim)

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

        cu_seqlens_cpu: the values of cu_seqlens on the host, which saves synchronisations. cache:
        as in `LinearAttention`.
        """
        self.check(x, cu_seqlens, cu_seqlens_cpu, cp_context)
        if cache is not None:
            check_cache(cache, AttentionCache, x, cu_seqlens, cp_context)
        v, tables = self.heads(x, self.v_proj), None
        if self.rotary is not None:
            offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
            tables = self.rotary_tables(v, offsets, cp_context, self.rotary.magnitude, cache)
        # Autocast may run the norms in another dtype.
        k = self.heads(x, self.k_proj, self.k_norm, tables).to(v.dtype)
        ticket = None if cache is not None else send_keys(k, v, self.num_heads, cp_context)

        def queries() -> Tensor:
            return self.heads(x, self.q_proj, self.q_norm, tables).to(v.dtype)

        with Overlap(queries) as q, Overlap(lambda: self.gate(x)) as gate:
            if ticket is not None:
                q(), gate()  # a compiled graph computes both between sending and attention
            if cache is None:
                packing = cu_seqlens, cu_seqlens_cpu, cp_context
                o = attention_of_sent(q, self.num_heads, k, v, ticket, *packing)
            else:
                o = cache.attend(q(), k, v, self.head_dim**-0.5, cp_context)
        o, factor = rearrange(o, "b t h k -> b t (h k)"), gate()
        o = o if factor is None else o * factor
        check_inner_dtype(o, "o_proj", self.o_proj)
        return self.o_proj(o)

    def heads(
        self,
        x: Tensor,
        project: nn.Module,
        norm: nn.Module | None = None,
        tables: Tables | None = None,
    ) -> Tensor:
        """A projection of x as [B, T, heads, head_dim]. norm, tables: it is normalised and rotated
        if they are given."""
        found: Tensor = rearrange(project(x), "b t (h k) -> b t h k", k=self.head_dim)
        if norm is not None:
            found = norm(found)
        return found if tables is None else rotate(found, tables)

    def gate(self, x: Tensor) -> Tensor | None:
        """The output gate, the factor on o [B, T, H * head_dim]; None for a layer without one."""
        return None if self.g_proj is None else torch.sigmoid(self.g_proj(x))

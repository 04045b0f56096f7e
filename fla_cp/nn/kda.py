"""The Kimi Delta Attention layer. Source: Kimi Linear report, arXiv 2510.26692, sec. 4."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from fla_cp.arguments import check_lower_bound
from fla_cp.context import FLACPContext
from fla_cp.nn.initial import LOG_DECAY_RATE, STEP_BIAS, Initial, reset
from fla_cp.nn.linear_attention import LinearAttention, takes_recurrent_form
from fla_cp.nn.modules import GatedRMSNorm, at_least_fp32
from fla_cp.ops import chunk_kda, fused_recurrent_kda
from fla_cp.ops.checks import SAFE_GATE_BOUND


class KDACore(nn.Module):
    """The operator with the two parameters of its gate, A_log [HV] and dt_bias [HV*K], fp32.

    A module of its own so that FSDP can shard it with an fp32 policy inside a bf16 model: the
    decay is exp(-exp(A_log) ...), where bf16 would change the model.
    """

    def __init__(
        self,
        num_v_heads: int,
        head_dim: int,
        *,
        gate_lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        bound = check_lower_bound(gate_lower_bound, "gate_lower_bound")
        if bound is not None and bound < SAFE_GATE_BOUND:
            raise ValueError(
                f"gate_lower_bound must be in [{SAFE_GATE_BOUND:g}, 0), got {gate_lower_bound}"
            )
        self.num_v_heads, self.head_dim = num_v_heads, head_dim
        self.gate_lower_bound = bound
        self.allow_neg_eigval = allow_neg_eigval
        self.impl = impl
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads * head_dim, dtype=torch.float32))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Initial]:
        """How each parameter of its own starts."""
        return {"A_log": LOG_DECAY_RATE, "dt_bias": STEP_BIAS}

    def reset_parameters(self) -> None:
        """A uniform in [1, 16); step sizes log-uniform in [1e-3, 0.1], as in Mamba-2."""
        reset(self)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        cp_context: FLACPContext | None = None,
    ) -> Tensor:
        """Raw projections -> o [B, T, HV, V]; shapes as in `chunk_kda`."""
        options: dict[str, Any] = {
            "A_log": at_least_fp32(self.A_log),
            "dt_bias": at_least_fp32(self.dt_bias),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.gate_lower_bound,
            "cu_seqlens": cu_seqlens,
            "impl": self.impl,
        }
        if takes_recurrent_form(self, q, cp_context):
            return fused_recurrent_kda(q, k, v, g, beta, **options)[0]
        safe = self.gate_lower_bound is not None
        return chunk_kda(q, k, v, g, beta, safe_gate=safe, cp_context=cp_context, **options)[0]


class KimiDeltaAttention(LinearAttention):
    """q, k, v projections and short convolutions, low-rank decay gate, delta rule, gated norm.

    hidden_size: width of x. num_heads, head_dim: H and K. num_v_heads: HV, a multiple of
    num_heads (default: equal). head_v_dim: V (default: K). conv_size: W of the convolutions.
    gate_lower_bound: None for the softplus gate; a value in [-5, 0) bounds the log decay of a
    step and selects the safe gate. allow_neg_eigval: beta in (0, 2) instead of (0, 1).
    impl: "auto", "torch" or "triton". Raises ValueError for sizes that are no integers from 1, for
    head counts that do not fit, and when called with what is no x, cu_seqlens or cp_context, before
    a projection runs.
    """

    operator = "kda"
    per_head = False
    decay_name = "f_proj"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        gate_lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        impl: str = "auto",
        layer_idx: int | None = None,
    ) -> None:
        self._bound = gate_lower_bound
        super().__init__(
            hidden_size,
            num_heads,
            head_dim,
            num_v_heads=num_v_heads,
            head_v_dim=head_v_dim,
            conv_size=conv_size,
            norm_eps=norm_eps,
            allow_neg_eigval=allow_neg_eigval,
            impl=impl,
            layer_idx=layer_idx,
        )

    def make_decay_projection(self) -> nn.Module:
        down = self.linear(self.head_v_dim)  # the rank of both gates is one head, as in the report
        gates = self.num_v_heads * self.head_dim
        return nn.Sequential(down, nn.Linear(self.head_v_dim, gates, bias=False))

    def make_gate_projection(self) -> nn.Module:
        down, value = self.linear(self.head_v_dim), self.num_v_heads * self.head_v_dim
        return nn.Sequential(down, nn.Linear(self.head_v_dim, value, bias=True))

    def make_core(self, impl: str) -> nn.Module:
        return KDACore(
            self.num_v_heads,
            self.head_dim,
            gate_lower_bound=self._bound,
            allow_neg_eigval=self.allow_neg_eigval,
            impl=impl,
        )

    def make_norm(self, eps: float) -> nn.Module:
        return GatedRMSNorm(self.head_v_dim, eps)

    def early_gate(self, x: Tensor) -> Tensor:
        gate: Tensor = self.g_proj(x)
        return gate

    def gated(self, o: Tensor, x: Tensor, early: Tensor | None) -> Tensor:
        gate = rearrange(early, "b t (h v) -> b t h v", h=self.num_v_heads)
        normed: Tensor = self.o_norm(o, gate)
        return normed

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        cu_seqlens: Tensor | None,
        cp_context: FLACPContext | None,
    ) -> Tensor:
        o: Tensor = self.core(q, k, v, g, beta, cu_seqlens, cp_context)
        return o

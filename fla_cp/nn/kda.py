"""Kimi Delta Attention. Source: Kimi Linear report, arXiv 2510.26692, sec. 4."""

from typing import Any

from torch import Tensor, nn

from fla_cp.arguments import check_count, check_flags, check_lower_bound
from fla_cp.context import FLACPContext
from fla_cp.nn.cache import RecurrentCache
from fla_cp.nn.linear_attention import Core, LinearAttention
from fla_cp.nn.modules import GatedRMSNorm
from fla_cp.nn.projections import Projections
from fla_cp.ops.checks import MAX_DIM, SAFE_GATE_BOUND


class KDACore(Core):
    """KDA with the two parameters of its gate, A_log [HV] and dt_bias [HV*K], fp32.

    gate_lower_bound, allow_neg_eigval, impl: as in `KimiDeltaAttention`.
    """

    in_one_call = True

    def __init__(
        self,
        num_v_heads: int,
        head_dim: int,
        *,
        gate_lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        impl: str = "auto",
    ) -> None:
        check_count("num_v_heads", num_v_heads)
        check_count("head_dim", head_dim, MAX_DIM)
        sizes = num_v_heads, num_v_heads, head_dim
        super().__init__("kda", *sizes, allow_neg_eigval=allow_neg_eigval, impl=impl)
        bound = check_lower_bound(gate_lower_bound, "gate_lower_bound")
        if bound is not None and bound < SAFE_GATE_BOUND:
            raise ValueError(
                f"gate_lower_bound must be in [{SAFE_GATE_BOUND:g}, 0), got {gate_lower_bound}"
            )
        self.gate_lower_bound, self.head_dim = bound, head_dim

    def options(self, recurrent: bool) -> dict[str, Any]:
        options = super().options(recurrent) | {"lower_bound": self.gate_lower_bound}
        if not recurrent:
            options["safe_gate"] = self.gate_lower_bound is not None
        return options

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        cp_context: FLACPContext | None = None,
        cache: RecurrentCache | None = None,
    ) -> Tensor:
        """o [B, T, HV, V] from raw projections, whose shapes are as in `chunk_kda`."""
        batch: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cp_context": cp_context, "cache": cache}
        return super().forward(q, k, v, g, beta, **batch)


class KimiDeltaAttention(LinearAttention):
    """The KDA layer: projections of q, k and v with short convolutions, a low-rank decay gate, the
    delta rule, and a gated norm.

    hidden_size: width of x. num_heads, head_dim: H and K. num_v_heads: HV, a multiple of
    num_heads (default: equal). head_v_dim: V (default: K). K and V are at most 256. conv_size: W of
    the convolutions. norm_eps: eps of the output norm.
    gate_lower_bound: None for the softplus gate. A value in [-5, 0) bounds the log decay of a step
    and selects the safe gate. gate_bias: whether the output gate has a bias, as in the report; the
    published Kimi Linear has none. allow_neg_eigval: beta is in (0, 2) instead of (0, 1).
    impl: "auto", "torch" or "triton". layer_idx: kept as an attribute, for the caller.
    Raises ValueError as `LinearAttention` does.
    """

    operator = "kda"
    in_one_call = True
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
        gate_bias: bool = True,
        allow_neg_eigval: bool = False,
        impl: str = "auto",
        layer_idx: int | None = None,
    ) -> None:
        check_flags(("gate_bias",), (gate_bias,))
        self._bound, self._gate_bias = gate_lower_bound, gate_bias
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
        return nn.Sequential(down, nn.Linear(self.head_v_dim, value, bias=self._gate_bias))

    def make_core(self, impl: str) -> Core:
        return KDACore(
            self.num_v_heads,
            self.head_dim,
            gate_lower_bound=self._bound,
            allow_neg_eigval=self.allow_neg_eigval,
            impl=impl,
        )

    def make_norm(self, eps: float) -> nn.Module:
        return GatedRMSNorm(self.head_v_dim, eps, impl=self.core.impl)

    def early_gate(self, project: Projections) -> Tensor:
        return project(self.g_proj)

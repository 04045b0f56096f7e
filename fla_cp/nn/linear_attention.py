"""The layers of linear attention. `LinearAttention` is their common body, and each layer sets its
properties. Kimi Delta Attention is in kda.py.

A layer has projections of q, k and v, a short convolution over all of them (one halo exchange), the
operator with its gate inside, RMSNorm times the SiLU of an output gate, and an output projection.
Source: Gated Delta Networks, arXiv 2412.06464, fig. 1, and the papers named at each layer.
"""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fla_cp import ops
from fla_cp.comm import Overlap
from fla_cp.context import FLACPContext
from fla_cp.nn.cache import RecurrentCache, check_cache, check_cache_sizes
from fla_cp.nn.initial import LOG_DECAY_RATE, STEP_BIAS, Constant, Initial, InitializedModule
from fla_cp.nn.modules import (
    GatedRMSNorm,
    ShortConvolution,
    at_least_fp32,
    check_dtype,
    check_hidden,
    check_inner_dtype,
    check_layer,
)
from fla_cp.nn.one_call import one_call
from fla_cp.nn.projections import Projections, is_low_rank
from fla_cp.ops.checks import MAX_DIM, MAX_WIDE_DIM, check_conv1d_context, check_sequences
from fla_cp.ops.short_conv import Heads
from fla_cp.rule import NORM_EPS, accumulator

RECURRENT_TOKENS = 64
"""The longest input that a layer computes token by token, in evaluation mode without gradients."""


class Core(InitializedModule):
    """The operator with the parameters of its gate, A_log [HV] and dt_bias ([HV], or [HV*K] with
    `gates` = K), which stay fp32.

    It is a module of its own so that FSDP can shard it with an fp32 policy inside a bf16 model: the
    decay is exp(-exp(A_log) ...), where rounding to bf16 would change the model. name: that of the
    operator.
    """

    in_one_call = True

    def __init__(
        self,
        name: str,
        num_heads: int,
        num_v_heads: int,
        gates: int = 1,
        *,
        has_beta: bool = True,
        allow_neg_eigval: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.name, self.num_heads, self.num_v_heads = name, num_heads, num_v_heads
        self.has_beta, self.allow_neg_eigval, self.impl = has_beta, allow_neg_eigval, impl
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads * gates, dtype=torch.float32))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Initial]:
        """A is uniform in [1, 16), and step sizes are log-uniform in [1e-3, 0.1], as in Mamba-2."""
        return {"A_log": LOG_DECAY_RATE, "dt_bias": STEP_BIAS}

    def options(self, recurrent: bool) -> dict[str, Any]:
        """The operator's keywords, except those that say how the batch is divided. recurrent:
        whether the operator runs token by token."""
        options = {
            "A_log": at_least_fp32(self.A_log),
            "dt_bias": at_least_fp32(self.dt_bias),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "impl": self.impl,
        }
        if self.has_beta:
            options["use_beta_sigmoid_in_kernel"] = True
            options["allow_neg_eigval"] = self.allow_neg_eigval
        return options

    def forward(
        self,
        *inputs: Any,
        cu_seqlens: Tensor | None = None,
        cp_context: FLACPContext | None = None,
        cache: RecurrentCache | None = None,
    ) -> Tensor:
        """o [B, T, HV, V]. inputs: those of the operator, as raw projections."""
        idle = not torch.is_grad_enabled() and cp_context is None
        idle = idle and (cache is not None or not self.training)
        recurrent = idle and inputs[0].shape[1] <= RECURRENT_TOKENS
        options = {"cu_seqlens": cu_seqlens, **self.options(recurrent)}
        if not recurrent:
            options["cp_context"] = cp_context
        op = getattr(ops, f"{'fused_recurrent' if recurrent else 'chunk'}_{self.name}")
        if cache is not None:
            state = cache.take()
            in_place = recurrent and state is not None
            options["initial_state"] = state
            options["inplace_final_state" if in_place else "output_final_state"] = True
        o: Tensor
        o, final = op(*inputs, **options)[:2]
        if cache is not None:
            cache.put(final)
        return o


class CombaCore(Core):
    """The core of Comba. p = b k reads from the state what is removed, and q - d k reads the
    output. b = sigmoid(b_logit) and d are learnt for each head, [H] fp32."""

    def __init__(self, name: str, num_heads: int, *sizes: int, **options: Any) -> None:
        super().__init__(name, num_heads, *sizes, **options)
        self.b_logit = nn.Parameter(torch.full((num_heads,), 2.0, dtype=torch.float32))
        self.d = nn.Parameter(torch.full((num_heads,), 0.02, dtype=torch.float32))

    def initial_values(self) -> dict[str, Initial]:
        return super().initial_values() | {"b_logit": Constant(2.0), "d": Constant(0.02)}

    def options(self, recurrent: bool) -> dict[str, Any]:
        return super().options(recurrent) | {"use_qk_l2norm_in_kernel": False}

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **batch: Any
    ) -> Tensor:
        # q and k are normalised here, not in the operator, which would normalise p = b k as well.
        q, k = (x * _inverse_length(x) for x in (q, k))
        b, d = (x.to(k.dtype)[:, None] for x in (torch.sigmoid(self.b_logit), self.d))
        return super().forward(q - d * k, k, v, b * k, g, beta, **batch)


def _inverse_length(x: Tensor) -> Tensor:
    """1 / |x| over the last dim, in x's dtype, as the operators compute it."""
    squares = x.to(accumulator(x.dtype)).square().sum(-1, keepdim=True)
    return torch.rsqrt(squares + NORM_EPS).to(x.dtype)


class LinearAttention(nn.Module):
    """The common body of the layers. Each subclass names its operator.

    hidden_size: width of x. num_heads, head_dim: H and K. num_v_heads: HV, a multiple of
    num_heads (default: equal). head_v_dim: V (default: K). K and V are at most 256, and for members
    that remove nothing from the state at most 512. conv_size: W of the convolutions. norm_eps: eps
    of the output norm.
    allow_neg_eigval: beta is in (0, 2) instead of (0, 1). impl: "auto", "torch" or "triton".
    layer_idx: kept as an attribute, for the caller.
    Raises ValueError for sizes that are not integers as above, for head counts that do not fit, and
    unless norm_eps is a finite number from 0. A call raises it for an x, cu_seqlens or cp_context
    that does not fit, before any projection runs.
    """

    operator = ""
    per_head = True
    has_beta = True
    decay_name = "a_proj"
    rows = 1  # of k, v and beta for each token
    core_class: type[Core] = Core

    def __init_subclass__(cls, **options: Any) -> None:
        """Gives a member a copy of __init__ with the member's name, which Python shows in errors
        about arguments: the caller does not know the class that it inherits from."""
        super().__init_subclass__(**options)
        own: Any = cls.__init__
        if "__init__" not in vars(cls) and isinstance(own, FunctionType):
            where = own.__globals__, own.__name__, own.__defaults__, own.__closure__
            named = FunctionType(own.__code__, *where)
            named.__kwdefaults__, named.__annotations__ = own.__kwdefaults__, own.__annotations__
            named.__qualname__ = f"{cls.__qualname__}.__init__"
            cls.__init__ = named  # type: ignore[method-assign]

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
        allow_neg_eigval: bool = False,
        impl: str = "auto",
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        check_layer(
            impl,
            allow_neg_eigval=allow_neg_eigval,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            hidden_size=hidden_size,
            head_dim=head_dim,
            head_v_dim=head_v_dim,
            max_dim=MAX_DIM if self.has_beta else MAX_WIDE_DIM,
            norm_eps=norm_eps,
            conv_size=conv_size,
            num_householder=self.rows,
        )
        self.hidden_size = hidden_size
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_dim, self.head_v_dim = head_dim, head_v_dim
        self.allow_neg_eigval, self.layer_idx, rows = allow_neg_eigval, layer_idx, self.rows
        key, value = num_heads * head_dim, num_v_heads * head_v_dim

        self.q_proj = self.linear(key)
        self.k_proj = self.linear(rows * key)
        self.v_proj = self.linear(rows * value)
        self.qkv_conv = ShortConvolution(key + rows * (key + value), conv_size, impl=impl)
        setattr(self, self.decay_name, self.make_decay_projection())
        if self.has_beta:
            self.b_proj = self.linear(rows * num_v_heads)
        self.g_proj = self.make_gate_projection()
        self.core = self.make_core(impl)
        self.o_norm = self.make_norm(norm_eps)
        self.o_proj = nn.Linear(value, hidden_size, bias=False)

    # Members may override these. Parameters are drawn in the order in which they are made.

    def linear(self, size: int) -> nn.Linear:
        """[.., hidden] -> [.., size]."""
        return nn.Linear(self.hidden_size, size, bias=False)

    def make_decay_projection(self) -> nn.Module:
        """x -> raw log decays, [.., HV]. With one for each channel they are [.., HV*K], from a
        low-rank projection as in GLA and KDA."""
        projection = self.linear(self.num_v_heads)
        if self.per_head:
            return projection  # always made, so that a seed gives the same weights as before
        up = nn.Linear(self.head_v_dim, self.num_v_heads * self.head_dim, bias=False)
        return nn.Sequential(self.linear(self.head_v_dim), up)

    def make_gate_projection(self) -> nn.Module:
        """x -> the output gate before its activation, [.., HV*V]."""
        return self.linear(self.num_v_heads * self.head_v_dim)

    def make_core(self, impl: str) -> Core:
        """The operator with its fp32 parameters."""
        gates = 1 if self.per_head else self.head_dim
        sizes = self.num_heads, self.num_v_heads, gates
        beta = {"has_beta": self.has_beta, "allow_neg_eigval": self.allow_neg_eigval}
        return self.core_class(self.operator, *sizes, **beta, impl=impl)

    def make_norm(self, eps: float) -> nn.Module:
        """The norm of o, which also multiplies by the output gate."""
        return GatedRMSNorm(self.head_v_dim, eps, "silu", self.core.impl)

    def reset_parameters(self) -> None:
        """Draws every parameter again, those of linear layers as torch does."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def make_cache(self, rows: int, capacity: int) -> RecurrentCache:
        """The cache of `rows` sequences before their first token. Its size does not depend on
        `capacity`. Raises ValueError unless both are integers from 1."""
        check_cache_sizes(rows, capacity)
        return RecurrentCache()

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cp_context: FLACPContext | None = None,
        cache: RecurrentCache | None = None,
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]; under a context [1, T_local, hidden].

        The context must be built with conv1d_kernel_size=conv_size. cache: the state after earlier
        tokens. The tokens of x follow these, and the call updates the cache. A call with a cache
        needs torch.no_grad(), has no cu_seqlens, and its context must have one sequence.
        """
        check_hidden(x, self.hidden_size, cu_seqlens, cp_context)
        check_sequences(x.shape[1], x.shape[0], cu_seqlens, cp_context)
        if cp_context is not None:
            check_conv1d_context(self.qkv_conv.kernel_size, cp_context)
        if cache is not None:
            check_cache(cache, RecurrentCache, x, cu_seqlens, cp_context)
        exchanges = cp_context is not None and cp_context.world_size > 1
        inputs = self.input_projections()
        project = Projections(x, inputs)
        y = None if cache is not None else one_call(self, project, cu_seqlens, cp_context)
        if y is not None:
            return y
        named = zip(self.input_names(), inputs, strict=True)
        if not project.joined:
            check_dtype(x, **dict(named))
        else:  # x has the dtype of the weights that read it
            for name, module in named:
                if is_low_rank(module):
                    check_inner_dtype(x, name, module)
        qkv = self.read_qkv(project, () if exchanges else inputs[3:])
        heads = self.conv_heads()
        with Overlap(lambda: self.rates(project)) as rates:
            if cache is None:
                q, k, v = self.qkv_conv(qkv, cu_seqlens, cp_context, heads)
            else:
                (q, k, v), cache.conv = self.qkv_conv(
                    qkv, None, cp_context, heads, cache=cache.conv, output_final_state=True
                )
        operands = self.operands(q, k, v, *rates())
        with Overlap(lambda: self.early_gate(project)) as gate:
            options = {} if cache is None else {"cache": cache}
            o = self.core(*operands, cu_seqlens=cu_seqlens, cp_context=cp_context, **options)
        del rates, operands
        o = self.gated(o, project, gate()).flatten(-2)
        check_inner_dtype(o, "o_proj", self.o_proj)
        return self.o_proj(o)

    def conv_heads(self) -> Heads:
        """The heads and channels of q, k and v in the result of their convolution. There is one
        convolution for all three, so that its halo is exchanged once."""
        H, HV, n = self.num_heads, self.num_v_heads, self.rows
        return (H, self.head_dim), (n * H, self.head_dim), (n * HV, self.head_v_dim)

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
    ) -> list[Any]:
        """The core's inputs, in its order and shapes. q: [B, T, H, K]. k: [B, T, n*H, K]. v:
        [B, T, n*HV, V], with n = rows. g, beta: raw decays and raw beta, with B * T rows."""
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim
        (B, T), n = q.shape[:2], self.rows
        found: list[Any] = [q, k.reshape(B, n * T, H, K), v.reshape(B, n * T, HV, V)]
        found.append(g.view(B, T, HV) if self.per_head else g.view(B, T, HV, K))
        if beta is not None:
            found.append(beta.reshape(B, n * T, HV))
        if self.operator == "gated_delta_product":
            found.append(n)
        return found

    def input_projections(self) -> list[nn.Module]:
        """The modules that read x: first those of q, k and v, and then the others."""
        return [getattr(self, name) for name in self.input_names()]

    def input_names(self) -> list[str]:
        """The names of `input_projections`."""
        beta = ["b_proj"] if self.has_beta else []
        return ["q_proj", "k_proj", "v_proj", "g_proj", self.decay_name, *beta]

    def read_qkv(
        self, project: Projections, others: Sequence[nn.Module]
    ) -> Tensor | tuple[Tensor, ...]:
        """q, k and v before their convolution: one tensor [B, T, D] if modules are joined, else
        three. others: modules that are computed in the same product, if modules are joined."""
        qkv = self.q_proj, self.k_proj, self.v_proj
        if not project.joined:
            return tuple(project(module) for module in qkv)
        found, *rest = project.join(qkv, *((module,) for module in others))
        project.keep(others, rest)
        return found.view(*project.x.shape[:2], found.shape[1])

    def rates(self, project: Projections) -> tuple[Tensor, Tensor | None]:
        """The raw decays, [.., HV] or [.., HV*K], and the raw beta [.., rows*HV] or None."""
        others = self.input_projections()[3:]
        project.prepare(*(m for m in others if m is not self.g_proj or is_low_rank(m)))
        decay = project(getattr(self, self.decay_name))
        return decay, project(self.b_proj) if self.has_beta else None

    def early_gate(self, project: Projections) -> Tensor | None:
        """The part of the output gate that is computed while the operator exchanges states."""
        return None

    def gated(self, o: Tensor, project: Projections, early: Tensor | None) -> Tensor:
        """o [B, T, HV, V], normalised and gated."""
        normed: Tensor = self.o_norm(o, project(self.g_proj) if early is None else early)
        return normed


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet, arXiv 2412.06464: the gated delta rule. By default, FLA's layer has
    head_v_dim = 2 * head_dim."""

    operator = "gated_delta_rule"
    in_one_call = True


class Comba(LinearAttention):
    """Comba, arXiv 2506.02475: p = b k reads what is removed, with b learnt for each head."""

    operator = "comba"
    core_class = CombaCore


class GatedDeltaProduct(LinearAttention):
    """Gated DeltaProduct, arXiv 2502.10297: num_householder steps of the delta rule a token. Other
    arguments are those of `LinearAttention`."""

    operator = "gated_delta_product"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        num_householder: int = 2,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        allow_neg_eigval: bool = False,
        impl: str = "auto",
        layer_idx: int | None = None,
    ) -> None:
        self.rows = num_householder
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


class GatedLinearAttention(LinearAttention):
    """GLA, arXiv 2312.06635, with the gate of KDA: a decay per key channel, nothing removed."""

    operator = "gla"
    in_one_call = True
    per_head = False
    has_beta = False


class SimpleGatedLinearAttention(LinearAttention):
    """Simple GLA (Mamba-2's recurrence, arXiv 2405.21060): a decay per head, nothing removed."""

    operator = "simple_gla"
    in_one_call = True
    has_beta = False

"""Building blocks of the layers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fla_cp.arguments import (
    PLAIN_TENSORS,
    check_choice,
    check_count,
    check_dense,
    check_flags,
    check_number,
    check_tensors,
    described,
)
from fla_cp.context import FLACPContext
from fla_cp.kernels import TORCH, resolve
from fla_cp.kernels.torch.gated_norm import ACTIVATIONS
from fla_cp.nn.initial import Constant, Initial, InitializedModule, Uniform
from fla_cp.nn.projections import watched
from fla_cp.ops.checks import check_context, check_conv1d_state, check_sequences
from fla_cp.ops.gated_norm import gated_norm
from fla_cp.ops.short_conv import (
    Heads,
    causal_conv1d,
    causal_conv1d_update,
    conv1d_heads,
    conv1d_parts,
    head_views,
)
from fla_cp.replay import autocasts


def check_layer(
    impl: object,
    *,
    allow_neg_eigval: object,
    num_heads: int,
    num_v_heads: int,
    head_dim: int,
    head_v_dim: int,
    max_dim: int,
    norm_eps: object,
    **sizes: int,
) -> None:
    """Checks the arguments with which a layer is built. max_dim: the most channels of a head that
    the layer's operator takes."""
    for name, size in {"num_heads": num_heads, "num_v_heads": num_v_heads, **sizes}.items():
        check_count(name, size)
    check_count("head_dim", head_dim, max_dim)
    check_count("head_v_dim", head_v_dim, max_dim)
    if num_v_heads % num_heads:
        raise ValueError(
            "num_v_heads must be a multiple of num_heads, "
            f"got num_v_heads={num_v_heads}, num_heads={num_heads}"
        )
    check_flags(("allow_neg_eigval",), (allow_neg_eigval,))
    check_number("norm_eps", norm_eps, 0, or_equal=True)
    check_choice("impl", impl, ("auto", "torch", "triton"))


def check_hidden(
    x: object, size: int, cu_seqlens: Tensor | None, cp_context: FLACPContext | None
) -> None:
    """Checks the arguments of a layer's call, before its projections run. x may be a DTensor here:
    under tensor parallelism, a projection turns it into a local tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {described(x)}")
    check_dense("x", x)
    if x.ndim != 3 or x.shape[2] != size:
        raise ValueError(f"x must be [B, T, hidden_size={size}], got shape {tuple(x.shape)}")
    check_tensors(("cu_seqlens",), (cu_seqlens,), 0)
    if cp_context is not None:
        check_context(cp_context)


def check_dtype(x: Tensor, **modules: object) -> None:
    """Raises ValueError unless x has the dtype of the weights of these modules, which read it, or
    autocast converts both.

    modules: linear layers or sequences of them, by name; None stands for no module. A module that
    may convert x by itself is not checked: one of another class, with hooks, or with a weight that
    is no plain tensor.
    """
    for name, module in modules.items():
        if (found := _other_dtype(x, module)) is not None:
            every = {_other_dtype(x, other) for other in modules.values() if other is not None}
            raise ValueError(_of_x(x, found) if len(every) == 1 else _of_weight(name, x, found))


def check_inner_dtype(x: Tensor, name: str, module: object) -> None:
    """As `check_dtype`, for a module that reads a result x of other modules."""
    if (found := _other_dtype(x, module)) is not None:
        raise ValueError(_of_weight(name, x, found))


def _other_dtype(x: Tensor, module: object) -> torch.dtype | None:
    """The dtype of a module's weight if it differs from x's and autocast does not convert both.
    None if it fits, and for a module that is not checked."""
    if module.__class__ is nn.Sequential:
        parts: Any = module
        if not watched(parts):
            for part in parts:
                if part.__class__ not in (nn.Linear, RMSNorm) or watched(part):
                    break  # its result may have any dtype
                if (found := _other_dtype(x, part)) is not None:
                    return found
        return None
    if module.__class__ is not nn.Linear or x.__class__ not in PLAIN_TENSORS:
        return None
    weight: Any = module.__dict__["_parameters"].get("weight")
    if weight is None:  # a hook computes it, as under torch.nn.utils.prune
        return None
    dtype: torch.dtype = weight.dtype
    if dtype == x.dtype or weight.__class__ not in PLAIN_TENSORS:
        return None
    if (_casts(x, dtype) and autocasts(x.device.type)) or torch.compiler.is_compiling():
        return None
    if watched(module) or nn.modules.module._has_any_global_hook():
        return None
    return dtype


def _casts(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast would convert x and a weight of this dtype. It leaves fp64 as it is."""
    return x.is_floating_point() and torch.float64 not in (x.dtype, dtype)


def _of_x(x: Tensor, dtype: torch.dtype) -> str:
    """The message for an x whose dtype is not that of the layer's weights."""
    ways = [f"pass x.to({dtype})", *_ways(x, dtype)]
    return (
        f"x must have the dtype of the layer's weights, {dtype}, got {x.dtype}: "
        f"{', or '.join(ways)}"
    )


def _of_weight(name: str, x: Tensor, dtype: torch.dtype) -> str:
    """The message for one module of a layer, called `name`, whose weight has another dtype."""
    ways = _ways(x, dtype) or [f"pass x.to({dtype})"]
    return f"{name} must have the dtype of its input, {x.dtype}, got {dtype}: {', or '.join(ways)}"


def _ways(x: Tensor, dtype: torch.dtype) -> list[str]:
    """What can be done about a weight of this dtype if x is to stay as it is."""
    ways = [f"convert the layer with layer.to({x.dtype})"] if x.is_floating_point() else []
    if _casts(x, dtype):
        narrow = dtype if x.dtype == torch.float32 else x.dtype
        ways.append(f"call it under torch.autocast({x.device.type!r}, {narrow})")
    return ways


class RMSNorm(InitializedModule):
    """x / rms(x) * weight over the last dim. The mean of squares is formed in fp32. Raises
    ValueError unless eps is a finite number from 0."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_number("eps", eps, 0, or_equal=True)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def initial_values(self) -> dict[str, Initial]:
        return {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> [.., size], x's dtype."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) * activation(gate), with one kernel in each direction on CUDA.

    activation: "sigmoid", the output gate of the Kimi Linear report, or "silu". impl: "auto",
    "torch" or "triton".
    """

    def __init__(
        self, size: int, eps: float = 1e-5, activation: str = "sigmoid", impl: str = "auto"
    ) -> None:
        check_choice("activation", activation, tuple(ACTIVATIONS))
        super().__init__(size, eps)
        self.activation, self.impl = activation, impl

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """x [.., size] -> [.., size], x's dtype. gate has as many elements, in the same order."""
        if x.shape[-1:] != self.weight.shape:
            size = self.weight.shape[0]
            raise ValueError(f"x must be [.., {size}], got shape {tuple(x.shape)}")
        if gate.numel() != x.numel():
            raise ValueError(
                f"gate must have as many elements as x {tuple(x.shape)}, got {tuple(gate.shape)}"
            )
        given = x, gate.reshape(x.shape), self.weight
        plain = x.dtype == gate.dtype and all(t.__class__ in PLAIN_TENSORS for t in given)
        if not plain or torch.compiler.is_compiling() or transformed():
            return TORCH.gated_norm(*given, self.eps, self.activation)
        backend = resolve(self.impl, x.device, x.dtype)
        if not backend.compiles:
            return TORCH.gated_norm(*given, self.eps, self.activation)
        return gated_norm(backend, *given, self.eps, self.activation)


class ShortConvolution(InitializedModule):
    """Depthwise causal convolution with SiLU; weight [D, W]. size: D, the channels. kernel_size: W.
    bias: whether there is one. impl: "auto", "torch" or "triton"."""

    def __init__(
        self, size: int, kernel_size: int = 4, bias: bool = False, impl: str = "auto"
    ) -> None:
        super().__init__()
        check_count("size", size)
        check_count("kernel_size", kernel_size)
        self.kernel_size, self.impl = kernel_size, impl
        self.weight = nn.Parameter(torch.empty(size, kernel_size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.reset_parameters()

    def initial_values(self) -> dict[str, Initial]:
        bound = 1 / math.sqrt(self.kernel_size)
        return {"weight": Uniform(-bound, bound), "bias": Constant(0.0)}

    def forward(
        self,
        x: Tensor | tuple[Tensor, ...],
        cu_seqlens: Tensor | None = None,
        cp_context: FLACPContext | None = None,
        heads: Heads | None = None,
        *,
        residual: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...] | tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
        """y [B, T, D] from x [B, T, D], in x's dtype, to which the weights are converted; see
        `causal_conv1d`.

        heads: if given, y is returned in parts, [B, T, H, K] for each (H, K) of heads. x may then
        be given in parts, too, [B, T, H * K].
        residual: [B, T, D], added after the activation. cache: [N, D, W], the state from which the
        N sequences start. output_final_state: if given, the result is (y, cache), with None as the
        cache for False. cu_seqlens_cpu: the values of cu_seqlens on the host.
        As in FLA, a call with a cache and one token for each sequence, without a context and while
        no gradients are recorded, updates the cache in place (`step`) and returns it.
        """
        parts = x if isinstance(x, tuple) else (x,)
        check_tensors(("x",) * len(parts), parts, 1)
        if not residual is cache is output_final_state is cu_seqlens_cpu is None:
            whole = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
            where = cu_seqlens, cp_context, cu_seqlens_cpu
            y, final = self._with_cache(whole, residual, cache, output_final_state, *where)
            found = y if heads is None else head_views(y.flatten(0, 1), len(y), heads)
            return found if output_final_state is None else (found, final)
        given = *self._parameters_in(parts[0].dtype), "silu", cu_seqlens, cp_context
        if isinstance(x, tuple):
            assert heads is not None
            return conv1d_parts(x, *given, heads, impl=self.impl)
        if heads is None:
            return causal_conv1d(x, *given, impl=self.impl)
        return conv1d_heads(x, *given, heads, impl=self.impl)

    def step(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """y and the cache after one more token of each sequence; see `causal_conv1d_update`.

        x: [N, 1, D] or [1, N, D]. residual: like x. cache: [N, D, W], updated in place. None: the
        tokens are the first of their sequences. The cache is returned only with output_final_state.
        Forward only: call it under torch.no_grad().
        """
        check_tensors(("x", "residual", "cache"), (x, residual, cache), 1)
        weight, bias = self._parameters_in(x.dtype)
        if cache is None:
            shape = x.shape[:-1].numel(), *weight.shape
            cache = torch.zeros(shape, dtype=x.dtype, device=x.device)
        y, cache = causal_conv1d_update(x, cache, residual, weight, bias, "silu", impl=self.impl)
        return y, (cache if output_final_state else None)

    def _parameters_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def _with_cache(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool | None,
        cu_seqlens: Tensor | None,
        cp_context: FLACPContext | None,
        cu_seqlens_cpu: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D], and the final state if it is wanted. As `forward`, for one tensor x and any
        of the keyword arguments."""
        if output_final_state is not None:
            check_flags(("output_final_state",), (output_final_state,))
        wanted = bool(output_final_state)
        if cache is not None:
            given = cu_seqlens, cp_context, cu_seqlens_cpu
            names = ("cache", "cu_seqlens", "cu_seqlens_cpu")
            check_tensors(names, (cache, cu_seqlens, cu_seqlens_cpu), 1)
            if x.ndim != 3:
                raise ValueError(f"x must be [B, T, D], got shape {tuple(x.shape)}")
            N, T, _ = x.shape
            check_sequences(T, N, *given)
            if cp_context is not None:
                N = len(cp_context.global_cu_seqlens) - 1
            elif cu_seqlens is not None:
                N = len(cu_seqlens) - 1
            check_conv1d_state("cache", cache, (N, *self.weight.shape), x)
            offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
            in_place = cp_context is None and not torch.is_grad_enabled()
            if in_place and _one_token_each(T, offsets):
                return self.step(x, residual, cache, wanted)
        weight, bias = self._parameters_in(x.dtype)
        return causal_conv1d(
            x,
            weight,
            bias,
            "silu",
            cu_seqlens,
            cp_context,
            residual=residual,
            initial_state=cache,
            output_final_state=wanted,
            cu_seqlens_cpu=cu_seqlens_cpu,
            impl=self.impl,
        )


def _one_token_each(T: int, offsets: Tensor | None) -> bool:
    """Whether each sequence has one token. Sequences are rows of T tokens, or lie between the
    offsets."""
    if offsets is None:
        return T == 1
    return len(offsets) == T + 1 and bool((offsets.diff() == 1).all())


def transformed() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is under way."""
    # torch.autograd.Function asks in the same way (torch 2.10 to 2.13); no public call says so.
    return torch._C._are_functorch_transforms_active()


class SwiGLU(nn.Module):
    """x [..., hidden] -> down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        check_dtype(x, gate=self.gate, up=self.up)
        inner = nn.functional.silu(self.gate(x)) * self.up(x)
        check_inner_dtype(inner, "down", self.down)
        y: Tensor = self.down(inner)
        return y


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, if `module.to(torch.bfloat16)` has rounded it, and otherwise x itself. A model
    that keeps these parameters in fp32, as the trainer does, loses no accuracy."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x

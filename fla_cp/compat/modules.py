"""FLA's short convolution, norms and gates: its names, its order of arguments and its defaults."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fla_cp import ops
from fla_cp.arguments import check_choice, check_count, check_flags, check_tensors
from fla_cp.compat.arguments import nothing_left, places, refuse, wide
from fla_cp.context import FLACPContext
from fla_cp.nn import GatedRMSNorm
from fla_cp.ops.checks import check_conv1d_state, check_sequences
from fla_cp.rule import NORM_EPS, accumulator

_BACKENDS = ("triton", "cuda", "mix")


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(y, final_state), or (y, None) without output_final_state; see `fla_cp.causal_conv1d`.

    x: [B, T, D], or [B, T, ..] with D elements a token. weight and bias are read in x's dtype.
    """
    del chunk_indices
    check_choice("backend", backend, _BACKENDS)
    refuse("seq_idx", kwargs.pop("seq_idx", None), None, "pass cu_seqlens")
    nothing_left("causal_conv1d", kwargs)
    x_rows, weight, bias, residual = _as_ours(x, weight, bias, residual)
    y, final = ops.causal_conv1d(
        x_rows,
        weight,
        bias,
        activation,
        residual=residual,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )
    return y.view(x.shape), final


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, cache) after one more token of each sequence; see `fla_cp.causal_conv1d_update`."""
    x_rows, weight, bias, residual = _as_ours(x, weight, bias, residual)
    y, cache = ops.causal_conv1d_update(x_rows, cache, residual, weight, bias, activation)
    return y.view(x.shape), cache


def _as_ours(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x and residual with their dims after the second as one; weight and bias in x's dtype."""
    check_tensors(("x", "weight", "bias", "residual"), (x, weight, bias, residual), 2)
    assert weight is not None
    if x.ndim > 3:
        x, residual = x.flatten(2), None if residual is None else residual.flatten(2)
    return x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), residual


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution over hidden_size channels; weight [D, 1, W], as in FLA.

    activation: "silu", "swish" or None. backend: see docs/coming-from-fla.md.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if activation is not None:
            check_choice("activation", activation, ("silu", "swish"), or_none=True)
        check_choice("backend", backend, _BACKENDS[:2])
        if "use_fast_conv1d" in kwargs:
            del kwargs["use_fast_conv1d"]
            warnings.warn(
                "use_fast_conv1d is deprecated: FLA has replaced it by backend",
                DeprecationWarning,
                stacklevel=2,
            )
        nothing_left("ShortConvolution", kwargs)
        check_count("hidden_size", hidden_size)
        check_count("kernel_size", kernel_size)
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
            device=device,
            dtype=dtype,
        )
        self.hidden_size, self.activation = hidden_size, activation

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(y, final_state), or (y, None) without output_final_state.

        x: [B, T, D]. mask: [B, T], a factor on the tokens. kwargs: cp_context and cu_seqlens_cpu.
        A call without a context, with a cache and one token for each sequence, while no gradients
        are recorded, updates the cache in place (`step`).
        """
        del chunk_indices
        context, on_host = kwargs.pop("cp_context", None), kwargs.pop("cu_seqlens_cpu", None)
        nothing_left("ShortConvolution.forward", kwargs)
        names = "x", "mask", "cache", "cu_seqlens", "cu_seqlens_cpu"
        check_tensors(names, (x, mask, cache, cu_seqlens, on_host), 1)
        check_flags(("output_final_state",), (output_final_state,))
        if x.ndim != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"x must be [B, T, {self.hidden_size}], got shape {tuple(x.shape)}")
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask must be None beside cu_seqlens, got both")
            if mask.shape != x.shape[:2] or mask.device != x.device:
                raise ValueError(
                    f"mask must be [B, T] = {tuple(x.shape[:2])} on x's device {x.device}, got "
                    f"{tuple(mask.shape)} on {mask.device}"
                )
            x = x * mask[..., None].to(x.dtype)
        in_place = cache is not None and context is None and not torch.is_grad_enabled()
        if in_place and _one_token_each(x, cu_seqlens if on_host is None else on_host):
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        if cache is not None:
            (B, T), N = x.shape[:2], x.shape[0]
            if context is not None:
                check_sequences(T, B, None, context, None)
                N = len(context.global_cu_seqlens) - 1
            elif cu_seqlens is not None:
                check_sequences(T, B, cu_seqlens, None, on_host)
                N = len(cu_seqlens) - 1
            check_conv1d_state("cache", cache, (N, self.hidden_size, self.kernel_size[0]), x)
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=on_host,
            cp_context=context,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(y, cache) after one more token of each sequence, or (y, None) without
        output_final_state. x: [N, 1, D], or [1, N, D] with cu_seqlens."""
        del cu_seqlens
        check_tensors(("x",), (x,), 1)
        if cache is None:
            N = x.shape[:-1].numel()
            cache = x.new_zeros(N, self.hidden_size, self.kernel_size[0])
        weight = self.weight.squeeze(1)
        y, cache = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation)
        return y, (cache if output_final_state else None)

    @property
    def state_size(self) -> int:
        """Elements of a sequence's state."""
        return self.hidden_size * self.kernel_size[0]


def _one_token_each(x: Tensor, offsets: Tensor | None) -> bool:
    """Whether each sequence has one token, in rows or between the offsets."""
    if offsets is None:
        return x.shape[1] == 1
    return len(offsets) == x.shape[1] + 1 and bool((offsets.diff() == 1).all())


class FusedRMSNormGated(GatedRMSNorm):
    """RMSNorm(x) * activation(g), with one kernel in each direction on CUDA.

    activation: "swish" or "silu", or "sigmoid".
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        refuse("elementwise_affine", elementwise_affine, True, "a norm without a weight is missing")
        check_choice("activation", activation, ("swish", "silu", "sigmoid"))
        check_count("hidden_size", hidden_size)
        super().__init__(hidden_size, eps, "sigmoid" if activation == "sigmoid" else "silu")
        self.hidden_size = hidden_size
        self.to(device=device, dtype=dtype)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor:
        """x and g [.., hidden_size] -> [.., hidden_size], x's dtype."""
        del residual_in_fp32  # FLA reads it with a residual only
        refuse("residual", residual, None, "add it to x")
        refuse("prenorm", prenorm, False, "add the residual to x and keep the sum")
        check_tensors(("x", "g"), (x, g), 2)
        if x.shape[-1:] != self.weight.shape:
            raise ValueError(f"x must be [.., {self.hidden_size}], got shape {tuple(x.shape)}")
        if g.numel() != x.numel():
            raise ValueError(f"g must have x's shape {tuple(x.shape)}, got {tuple(g.shape)}")
        return super().forward(x, g)


def l2norm(x: Tensor, eps: float = NORM_EPS, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum of squares + eps) over the last dim, computed in fp32 (fp64), in output_dtype or
    x's dtype. The operators do it by themselves with use_qk_l2norm_in_kernel=True."""
    check_tensors(("x",), (x,), 1)
    y = x.to(accumulator(x.dtype))
    y = y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()
    return y.to(x.dtype if output_dtype is None else output_dtype)


l2_norm = l2norm


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """`fla_cp.kda_gate` in output_dtype: log decay [.., HV, K] of raw projections."""
    log_decay = ops.kda_gate(g, wide(A_log), wide(dt_bias), lower_bound=lower_bound)
    return log_decay.to(output_dtype)


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """`fla_cp.gdn_gate` in output_dtype: log decay [.., HV] of raw projections."""
    check_tensors(("g", "A_log"), (g, A_log), 2)
    rates = wide(A_log)
    assert rates is not None
    return ops.gdn_gate(g, rates, wide(dt_bias)).to(output_dtype)

"""The mixers of models of transformers, which mix tokens, under a context.

Under a context a mixer runs a copy of transformers' own `forward` with other globals: where that
code looks up the functions of its module that mix tokens, it finds the functions below. The module
itself, its classes and all other models stay as they are. transformers passes the keywords of a
model's call on to these functions, so the context comes with the call. A recomputation for an
activation checkpoint gets it too, whichever thread runs it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fla_cp.comm.keys_values import LatentSizes
from fla_cp.comm.keys_values.latents import latent_ring
from fla_cp.comm.keys_values.ring import RingCall
from fla_cp.context import FLACPContext
from fla_cp.ops import causal_attention, causal_conv1d, chunk_gated_delta_rule, chunk_kda
from fla_cp.ops.attention import attention_over, key_rows, keys_of
from fla_cp.ops.attention_plan import key_tables, latent_scheme, ring_call
from fla_cp.ops.options import ChunkOptions

UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Keywords by which transformers asks for attention that is not plainly causal."""

CACHE_KEYWORDS = ("cache", "past_key_values")
"""Names of the parameter by which a mixer takes its cache: since transformers 5.24, and before."""


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cp_context: FLACPContext,
    impl: str = "auto",
    **others: object,
) -> Tensor:
    """hidden_states [1, D, T_local] -> the same shape and dtype. Parameters may be wider, as under
    autocast. activation: any that transformers has; the operator has SiLU alone."""
    x = hidden_states.transpose(1, 2)
    bias = None if bias is None else bias.to(x.dtype)
    own = activation if activation in (None, "silu", "swish") else None
    y = causal_conv1d(x, weight.to(x.dtype), bias, own, cp_context=cp_context, impl=impl)
    if activation != own:
        from transformers.activations import ACT2FN

        y = ACT2FN[activation](y)
    return y.transpose(1, 2)


def _recurrence(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`operator` without the keywords of a model's call that it does not have."""
    known = ChunkOptions.__annotations__

    def run(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **keywords: object
    ) -> tuple[Tensor, ...]:
        options = cast(ChunkOptions, {k: v for k, v in keywords.items() if k in known})
        return operator(query, key, value, g, beta, **options)

    return run


def _one_dtype(*xs: Tensor) -> list[Tensor]:
    """Under autocast some of a mixer's tensors are narrower than others: torch's own attention
    would convert them."""
    kind = xs[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else xs[0].dtype
    return [x.to(dtype) for x in xs]


def _check_attention(dropout: float, keywords: Mapping[str, object]) -> None:
    if dropout:
        raise ValueError(f"attention_dropout must be 0 under a context, got {dropout}")
    if keywords.get("is_causal") is False:
        raise ValueError("is_causal must not be False under a context")
    for name in UNSUPPORTED:
        if keywords.get(name) is not None:
            raise ValueError(f"{name} must be left out under a context, got {keywords[name]!r}")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    dropout: float = 0.0,
    cp_context: FLACPContext,
    **keywords: object,
) -> tuple[Tensor, None]:
    """query [1, H, T_local, K], key [1, HK, T_local, K], value [1, HK, T_local, V] ->
    (o [1, T_local, H, V], no weights)."""
    _check_attention(dropout, keywords)
    q, k, v = (x.transpose(1, 2) for x in _one_dtype(query, key, value))
    return causal_attention(q, k, v, scale=scaling, cp_context=cp_context), None


def _latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    dropout: float = 0.0,
    cp_context: FLACPContext,
    cp_latents: _Latents,
    **keywords: object,
) -> tuple[Tensor, None]:
    """The same with keys and values [1, H, ..] that were expanded from `cp_latents`, unless these
    go round in a ring."""
    _check_attention(dropout, keywords)
    q, k, v = (x[0].transpose(0, 1) for x in _one_dtype(query, key, value))
    if cp_latents.own is not None:
        return cp_latents.around(q, *cp_latents.own, scaling)[None], None
    lengths = key_rows(1, len(q), None, cp_context).lengths
    return attention_over(q, k, v, lengths, scaling)[None], None


class _Latents:
    """Takes the place of the cache, which latent attention asks for the latents of all keys.

    Ranks exchange latents instead of keys and values, which are many times larger. If the keys and
    values would not fit into memory, the latents go round in a ring. transformers then gets the
    latents of a single token, and what it expands from them is not used.

    own: this rank's latents and shared channels, each [T_local, R], if they go round in a ring.
    """

    def __init__(self, mixer: nn.Module, context: FLACPContext):
        self.mixer: Any = mixer
        self.context = context
        self.own: tuple[Tensor, Tensor] | None = None

    def update(
        self, kv_nope: Tensor, k_rot: Tensor, layer: int, **others: object
    ) -> tuple[Tensor, ...]:
        """The latents and shared channels of all keys: [1, 1, T_local, R] -> [1, 1, keys, R]."""
        k_rot, kv_nope = _one_dtype(k_rot, kv_nope)
        latent, shared = (x[0].transpose(0, 1).flatten(1) for x in (kv_nope, k_rot))
        if self.ring(latent, shared, 1.0) is not None:
            self.own = latent, shared
            return kv_nope[:, :, :1], k_rot[:, :, :1]
        rows = key_rows(1, len(latent), None, self.context)
        return tuple(x[None, None] for x in keys_of(rows, self.context, latent, shared))

    def ring(self, latent: Tensor, shared: Tensor, scale: float) -> RingCall | None:
        m = self.mixer
        if type(m.kv_b_proj) is not nn.Linear:  # such as one with adapters, which has to be called
            return None
        numbers, itemsize = latent.shape[1] + shared.shape[1], latent.element_size()
        sizes = LatentSizes(m.num_heads, m.qk_head_dim, m.v_head_dim, numbers, itemsize)
        tables = key_tables(1, len(latent), None, self.context)
        scheme = latent_scheme(sizes, latent.dtype, tables, self.context)
        return ring_call(scheme, scale, self.context)

    def around(self, q: Tensor, latent: Tensor, shared: Tensor, scale: float) -> Tensor:
        """o [T_local, H, V] from q [T_local, H, K] and the rank's own latents, by a ring."""
        call = self.ring(latent, shared, scale)
        assert call is not None
        weight = self.mixer.kv_b_proj.weight.to(q.dtype)
        return latent_ring(q, latent.to(q.dtype), shared.to(q.dtype), weight, call)


class _Interfaces:
    """Takes the place of transformers' table of attention functions."""

    def __init__(self, attention: Callable[..., tuple[Tensor, None]]):
        self.attention = attention

    def get_interface(self, *asked: object) -> Callable[..., tuple[Tensor, None]]:
        return self.attention


class _Kind(NamedTuple):
    """A kind of mixer. replaced: names that the mixer's `forward` looks up, and what it finds under
    a context."""

    replaced: dict[str, object]
    latent: bool = False


_KDA = _Kind(
    {"chunk_kimi_delta_attention": _recurrence(chunk_kda), "causal_conv1d_fn": _convolution}
)
_GATED_DELTA = _Kind(
    {
        "torch_chunk_gated_delta_rule": _recurrence(chunk_gated_delta_rule),
        "causal_conv1d_fn": _convolution,
    }
)
_ATTENTION = _Kind({"ALL_ATTENTION_FUNCTIONS": _Interfaces(_attention)})
_LATENT_ATTENTION = _Kind({"ALL_ATTENTION_FUNCTIONS": _Interfaces(_latent_attention)}, latent=True)

KINDS = {
    "KimiLinearDeltaAttention": _KDA,
    "KimiLinearAttention": _LATENT_ATTENTION,
    "Qwen3NextGatedDeltaNet": _GATED_DELTA,
    "Qwen3NextAttention": _ATTENTION,
    "Qwen3_5GatedDeltaNet": _GATED_DELTA,
    "Qwen3_5Attention": _ATTENTION,
    "Qwen3_5MoeGatedDeltaNet": _GATED_DELTA,
    "Qwen3_5MoeAttention": _ATTENTION,
    "OlmoHybridGatedDeltaNet": _GATED_DELTA,
    "OlmoHybridAttention": _ATTENTION,
}
"""Mixers by the names of their classes."""


class ParallelForward:
    """A `forward` for this mixer alone: with cp_context it runs under that context, without it is
    the one of its class. Copies and pickles of the mixer get one of their own.

    Raises ValueError if the class's `forward` does not call what would have to be replaced.
    """

    def __init__(self, mixer: nn.Module) -> None:
        kind = KINDS[type(mixer).__name__]
        self.mixer, self.stock = mixer, type(mixer).forward
        # torch.compile would look up the globals of the copy in transformers' module.
        self.replaced = torch.compiler.disable(_with_globals(self.stock, kind.replaced))
        self.cache = _cache_keyword(self.stock) if kind.latent else None
        functools.update_wrapper(self, MethodType(self.stock, mixer))

    def __call__(self, *args: Any, cp_context: FLACPContext | None = None, **keywords: Any) -> Any:
        if cp_context is None:
            return self.stock(self.mixer, *args, **keywords)
        if self.cache is not None:
            for name in CACHE_KEYWORDS:
                keywords.pop(name, None)
            keywords[self.cache] = keywords["cp_latents"] = _Latents(self.mixer, cp_context)
        return self.replaced(self.mixer, *args, cp_context=cp_context, **keywords)

    def __reduce__(self) -> tuple[type[ParallelForward], tuple[nn.Module]]:
        """A bound function would be pickled by its name, which finds that of the class."""
        return ParallelForward, (self.mixer,)


def _cache_keyword(forward: Callable[..., Any]) -> str:
    """The parameter by which this version of transformers hands a mixer its cache."""
    parameters = inspect.signature(forward).parameters
    for name in CACHE_KEYWORDS:
        if name in parameters:
            return name
    raise ValueError(
        f"{forward.__qualname__} must have a parameter {' or '.join(CACHE_KEYWORDS)} to run under "
        "a context, but it does not in this version of transformers"
    )


def _with_globals(function: Any, replaced: Mapping[str, object]) -> FunctionType:
    """A copy of `function` that finds `replaced` among its globals. A decorated function keeps its
    decorators: the innermost one is copied, and each decorator's function around its copy."""
    names, closure = function.__globals__, function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        for name in replaced:
            if name not in function.__code__.co_names:
                raise ValueError(
                    f"{function.__qualname__} must call {name} to run under a context, but it does "
                    "not in this version of transformers"
                )
        names = {**names, **replaced}
    else:
        copy = _with_globals(inner, replaced)
        cells = closure or ()
        closure = tuple(CellType(copy) if c.cell_contents is inner else c for c in cells)
        assert closure != cells, function.__qualname__
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made

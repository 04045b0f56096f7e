"""FLA's operators token by token: its names, its order of arguments and its defaults."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla_cp import ops
from fla_cp.arguments import check_flags, check_tensors
from fla_cp.compat.arguments import (
    backwards,
    beside,
    channel_decay,
    gate,
    head_decay,
    no_decay,
    nothing_left,
    one_dtype,
    ones_or,
    places,
    refuse,
    refuse_vector,
    state_layout,
)
from fla_cp.ops.checks import check_sequences
from fla_cp.ops.family import GLA, KDA
from fla_cp.ops.options import Names, Tensors
from fla_cp.ops.recurrent import recurrent

_GV = "the decay of value channels is not supported"

# Errors name the arguments as FLA's functions do.
_GLA = GLA._replace(names=Names(g="gk", beta=None))
_GATED_BY_CHANNEL = KDA._replace(names=Names(g="gk"))


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_kda`. Tensors may differ in dtype; o has v's. kwargs:
    transpose_state_layout."""
    v_first = state_layout(state_v_first, kwargs)
    nothing_left("fused_recurrent_kda", kwargs)
    refuse_vector(beta)
    q, k, wide_v = one_dtype(q, k, v)
    o, final = ops.fused_recurrent_kda(
        q,
        k,
        wide_v,
        beside(q, g),
        beside(q, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=v_first,
        **gate(use_gate_in_kernel, A_log, dt_bias),
        **places(cu_seqlens),
    )
    return o.to(v.dtype), final


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_kda` for serving, with the states of a pool and in place unless told
    otherwise.

    Tensors may differ in dtype. out: like v; if given, o is written there, and it is returned.
    It has no gradients.
    """
    nothing_left("fused_recurrent_kda_fwd", kwargs)
    refuse_vector(beta)
    if out is not None:
        check_tensors(("v", "out"), (v, out), 2)
        if (out.shape, out.dtype, out.device) != (v.shape, v.dtype, v.device):
            raise ValueError(
                f"out must have v's shape {tuple(v.shape)}, dtype {v.dtype} and device {v.device}, "
                f"got {tuple(out.shape)}, {out.dtype} and {out.device}"
            )
    q, k, wide_v = one_dtype(q, k, v)
    with torch.no_grad():
        o, final = ops.fused_recurrent_kda(
            q,
            k,
            wide_v,
            beside(q, g),
            beside(q, beta),
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            inplace_final_state=inplace_final_state,
            ssm_state_indices=ssm_state_indices,
            num_accepted_tokens=num_accepted_tokens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            lower_bound=lower_bound,
            state_v_first=state_v_first,
            **gate(use_gate_in_kernel, A_log, dt_bias),
            **places(cu_seqlens),
        )
        return (o.to(v.dtype) if out is None else out.copy_(o)), final


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_gated_delta_rule`, or with gk `fla_cp.fused_recurrent_kda`.

    g=None: no decay. gk: [B, T, HV, K], the log decay of each key channel, beside that of g.
    beta=None: ones. Tensors may differ in dtype; o has v's. kwargs: transpose_state_layout.
    """
    refuse("gv", gv, None, _GV)
    if use_gate_in_kernel:
        refuse("gk", gk, None, "with use_gate_in_kernel=True only g is a decay")
    v_first = state_layout(state_v_first, kwargs)
    nothing_left("fused_recurrent_gated_delta_rule", kwargs)
    refuse_vector(beta)
    options: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": v_first,
        **gate(use_gate_in_kernel, A_log, dt_bias),
        **places(cu_seqlens),
    }
    strength = ones_or(beta, v)
    q, k, wide_v = one_dtype(q, k, v)
    g, gk, strength = beside(q, g), beside(q, gk), beside(q, strength)
    if gk is None:
        decay = no_decay(q, v) if g is None else g
        o, final = ops.fused_recurrent_gated_delta_rule(q, k, wide_v, decay, strength, **options)
        return o.to(v.dtype), final
    gk = channel_decay(q, v, g, gk, beta)
    o, final = recurrent(_GATED_BY_CHANNEL, Tensors(q, k, wide_v, gk, strength), options)
    return o.to(v.dtype), final


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_gated_delta_rule` without decay. beta=None: ones."""
    refuse_vector(beta)
    return ops.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        no_decay(q, v),
        ones_or(beta, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **places(cu_seqlens),
    )


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_comba`. In FLA p stands before v here, and after it in `chunk_comba`.
    p=None: k reads the state. beta=None: ones."""
    refuse_vector(beta)
    return ops.fused_recurrent_comba(
        q,
        k,
        v,
        k if p is None else p,
        g,
        ones_or(beta, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **places(cu_seqlens),
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_gla`. gk=None: no decay. reverse: from the last token of each
    sequence to the first. kwargs: transpose_state_layout."""
    refuse("gv", gv, None, _GV)
    check_flags(("reverse",), (reverse,))
    v_first = state_layout(state_v_first, kwargs)
    nothing_left("fused_recurrent_gla", kwargs)
    decay = no_decay(q, v)[..., None].expand(-1, -1, -1, q.shape[-1]) if gk is None else gk
    given: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "state_v_first": v_first,
    }

    def call(*tokens: Tensor, **offsets: Any) -> tuple[Tensor, Tensor | None]:
        return recurrent(_GLA, Tensors(*tokens), {**given, **offsets})

    return _turned(("q", "k", "v", "gk"), (q, k, v, decay), reverse, cu_seqlens, call)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_simple_gla`. g_gamma: [HV], the log decay at every token. reverse:
    from the last token of each sequence to the first. kwargs: transpose_state_layout."""
    check_flags(("reverse",), (reverse,))
    v_first = state_layout(state_v_first, kwargs)
    nothing_left("fused_recurrent_simple_gla", kwargs)
    call = functools.partial(
        ops.fused_recurrent_simple_gla,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first,
    )
    tokens = q, k, v, head_decay(q, v, g, g_gamma)
    return _turned(("q", "k", "v", "g"), tokens, reverse, cu_seqlens, call)


def _turned(
    names: tuple[str, ...],
    tokens: tuple[Tensor, ...],
    reverse: bool,
    cu_seqlens: Tensor | None,
    call: Callable[..., tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """`call` of tensors [B, T, ..], with reverse from the last token of each sequence to the
    first."""
    check_flags(("reverse",), (reverse,))
    if not reverse:
        return call(*tokens, **places(cu_seqlens))
    check_tensors(names, tokens, len(tokens))
    B_T = tokens[0].shape[:2]
    for name, x in zip(names, tokens, strict=True):
        if x.ndim < 3 or x.shape[:2] != B_T:
            raise ValueError(
                f"{name} must be [B, T, ..] with {names[0]}'s B and T, {tuple(B_T)}, got shape "
                f"{tuple(x.shape)}"
            )
    B, T = B_T
    check_sequences(T, B, cu_seqlens, None, None)
    turned = backwards(cu_seqlens)
    o, final = call(*map(turned, tokens), **places(cu_seqlens))
    return turned(o), final


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_dplr_delta_rule`. reverse: from the last token of each sequence to
    the first."""
    call = functools.partial(
        ops.fused_recurrent_dplr_delta_rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    names = "q", "k", "v", "a", "b", "gk"
    return _turned(names, (q, k, v, a, b, gk), reverse, cu_seqlens, call)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_rwkv7`. scale=None: K**-0.5, unlike in `chunk_rwkv7`."""
    return ops.fused_recurrent_rwkv7(
        r,
        w,
        k,
        v,
        a,
        b,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        **places(cu_seqlens),
    )


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla_cp.fused_recurrent_rwkv7` with the removal key kk and its rate a: what -kk reads is
    added along kk * a. reverse: from the last token of each sequence to the first."""
    check_tensors(("kk", "a"), (kk, a), 2)
    if (kk.shape, kk.dtype, kk.device) != (a.shape, a.dtype, a.device):
        raise ValueError(
            f"a must have kk's shape {tuple(kk.shape)}, dtype {kk.dtype} and device {kk.device}, "
            f"got {tuple(a.shape)}, {a.dtype} and {a.device}"
        )
    call = functools.partial(
        ops.fused_recurrent_rwkv7,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    tokens = r, w, k, v, -kk, kk * a
    return _turned(("r", "w", "k", "v", "kk", "a"), tokens, reverse, cu_seqlens, call)

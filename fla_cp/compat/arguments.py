"""What becomes of arguments that FLA's functions have and the operators do not.

An argument that changes no result is accepted and ignored, one that would is refused by name.
docs/coming-from-fla.md lists both.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla_cp.arguments import check_flags, check_lower_bound, check_tensors, described
from fla_cp.context import FLACPContext
from fla_cp.ops.checks import SAFE_GATE_BOUND
from fla_cp.rule import CHUNK, CHUNK_SIZES, accumulator


def refuse(name: str, value: object, only: object, instead: str) -> None:
    """Raises ValueError unless the argument has the one value that is supported."""
    if value is not only:
        raise ValueError(f"{name} must be {only}, got {described(value)}: {instead}")


def refuse_vector(beta: object) -> None:
    """Raises ValueError for a beta of each value channel, which FLA's recurrences take, too."""
    if isinstance(beta, Tensor) and beta.ndim == 4:
        raise ValueError(
            "beta must be [B, T, HV]: a beta of each value channel, [B, T, HV, V], is not "
            f"supported, got shape {tuple(beta.shape)}"
        )


def nothing_left(function: str, kwargs: dict[str, Any]) -> None:
    """Raises TypeError for keywords that FLA would swallow, or does not have."""
    for name in kwargs:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def places(
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: FLACPContext | None = None,
) -> dict[str, Any]:
    """How the tokens are divided. As in FLA, a context takes the place of the offsets."""
    if cp_context is not None:
        return {"cp_context": cp_context}
    if cu_seqlens is None:
        return {}
    return {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}


def check_layout(
    q: object, cu_seqlens: Tensor | None, cp_context: FLACPContext | None, name: str = "q"
) -> None:
    """Warns if q looks like [B, H, T, K], which FLA took with head_first=True. Its shape alone does
    not tell, because a row may have fewer tokens than heads. Offsets and contexts hold the number
    of tokens, so a call with them raises an error elsewhere."""
    if cu_seqlens is not None or cp_context is not None or torch.compiler.is_compiling():
        return
    if not isinstance(q, Tensor) or q.is_nested:
        return
    if q.ndim == 4 and 1 < q.shape[1] < q.shape[2]:
        warnings.warn(
            f"{name} has fewer tokens than heads, T={q.shape[1]} and H={q.shape[2]}: tensors must "
            "be [B, T, H, ..]; if they are [B, H, T, ..], pass x.transpose(1, 2) of each",
            UserWarning,
            stacklevel=3,  # where the operator is called
        )


def state_layout(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """Whether states are [V, K], under the present name of the option or the one before."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    before = kwargs.pop("transpose_state_layout")
    if state_v_first:
        raise ValueError(
            "transpose_state_layout is the former name of state_v_first: give one, got "
            f"{described(before)} and {described(state_v_first)}"
        )
    warnings.warn(
        "transpose_state_layout is deprecated: FLA has renamed it to state_v_first",
        DeprecationWarning,
        stacklevel=3,  # where the operator is called
    )
    check_flags(("transpose_state_layout",), (before,))
    return bool(before)


def gate(in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> dict[str, Any]:
    """The gate inside the operator. Its parameters are read in fp32, and without it not at all."""
    found: dict[str, Any] = {"use_gate_in_kernel": in_kernel}
    if in_kernel:
        found |= {"A_log": wide(A_log), "dt_bias": wide(dt_bias)}
    return found


def wide(x: Tensor | None) -> Tensor | None:
    """bf16 and fp16 as fp32, anything else as it is."""
    if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x


def one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the widest of their dtypes. FLA's recurrences read each of them in fp32."""
    check_tensors(("q", "k", "v"), (q, k, v), 3)
    widest = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    return q.to(widest), k.to(widest), v.to(widest)


def beside(q: Tensor, x: Any) -> Any:
    """A decay or a strength, in the dtype of sums if an operator would not take its dtype."""
    if not isinstance(x, Tensor) or x.dtype in (q.dtype, torch.float32, torch.float64):
        return x
    return x.to(accumulator(q.dtype))


def chunk_size(kwargs: dict[str, Any], sizes: tuple[int | None, ...]) -> int | None:
    """Takes chunk_size, which must be one of these sizes, out of the keywords. None, by which the
    call chooses, if it is missing or a size that the operators do not have."""
    if "chunk_size" not in kwargs:
        return None
    size: int | None = kwargs.pop("chunk_size")
    if isinstance(size, bool) or size not in sizes:
        listed = ", ".join(map(str, sizes[:-1]))
        raise ValueError(f"chunk_size must be {listed} or {sizes[-1]}, got {described(size)}")
    return size if size in CHUNK_SIZES else None


def bounded(safe_gate: bool, lower_bound: float | None, size: int | None) -> dict[str, Any]:
    """The options of DPLR with a bound of its decay and a number of tokens in a chunk. FLA reads
    the bound without safe_gate, too. A token has two rows here, and a chunk at most 64."""
    tokens = chunk_size({"chunk_size": size}, (16, 32, 64, None))
    bound = check_lower_bound(lower_bound)
    if safe_gate is False and bound is not None:
        safe_gate = bound >= SAFE_GATE_BOUND
    rows = None if tokens is None else min(2 * tokens, CHUNK)
    return {"safe_gate": safe_gate, "lower_bound": bound, "chunk_size": rows}


def backwards(cu_seqlens: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Puts the tokens of each sequence in reverse order, in tensors [B, T, ..]. The host reads no
    offset: tokens behind the last sequence stay where they are."""

    def turned(x: Tensor) -> Tensor:
        if cu_seqlens is None:
            return x.flip(1)
        ends = cu_seqlens.to(x.device, torch.int64)
        here = torch.arange(x.shape[1], device=x.device)
        last = len(ends) - 2
        sequence = torch.searchsorted(ends, here, right=True) - 1
        first, stop = ends[sequence.clamp(0, last)], ends[sequence.clamp(0, last) + 1]
        return x[:, torch.where(here < stop, first + stop - 1 - here, here)]

    return turned


def no_decay(q: Tensor, v: Tensor) -> Tensor:
    """The log decay of heads that forget nothing, [B, T, HV]."""
    B, T, HV = _rows_and_heads(q, v)
    return torch.zeros(B, T, HV, dtype=accumulator(q.dtype), device=q.device)


def head_decay(q: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor:
    """The log decay [B, T, HV]: g, or g_gamma [HV] at every token, or none."""
    if g_gamma is None:
        return no_decay(q, v) if g is None else g
    if g is not None:
        raise ValueError("g_gamma must be None beside g, because each of them is the decay")
    B, T, HV = _rows_and_heads(q, v)
    check_tensors(("g_gamma",), (g_gamma,), 1)
    if g_gamma.shape != (HV,):
        raise ValueError(f"g_gamma must have shape [HV] = ({HV},), got {tuple(g_gamma.shape)}")
    return g_gamma.to(accumulator(q.dtype)).expand(B, T, HV)


def channel_decay(
    q: Tensor, v: Tensor, g: Tensor | None, gk: Tensor, beta: Tensor | None
) -> Tensor:
    """The log decay [B, T, HV, K] of gk and, if given, of g beside it. beta: as the caller gave it.
    The chunked function has no gk, and its fifth argument is beta."""
    (B, T, HV), K = _rows_and_heads(q, v), q.shape[3]
    check_tensors(("gk", "g"), (gk, g), 1)
    for name, x, letters, expected in (
        ("gk", gk, "[B, T, HV, K]", (B, T, HV, K)),
        ("g", g, "[B, T, HV]", (B, T, HV)),
    ):
        if x is None:
            continue
        if x.shape != expected:
            rule = f"have shape {letters} = {expected}, got {tuple(x.shape)}"
            if x.ndim != len(expected):
                rule = f"have {len(expected)} dimensions, got shape {tuple(x.shape)}"
            if x is gk and beta is None and x.shape == expected[:3]:
                rule += ", which is that of beta: pass beta by name, because gk and gv come first"
            raise ValueError(f"{name} must {rule}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    return gk if g is None else g[..., None].to(accumulator(gk.dtype)) + gk


def ones_or(beta: Tensor | None, v: Tensor) -> Tensor:
    """beta, or ones [B, T, HV]."""
    if beta is not None:
        return beta
    _rows_and_heads(v, v)
    return v.new_ones(v.shape[:3])


def _rows_and_heads(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """B, T and HV."""
    check_tensors(("q", "v"), (q, v), 2)
    for name, x in (("q", q), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    return q.shape[0], q.shape[1], v.shape[2]

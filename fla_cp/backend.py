"""Backend: one set of stage functions that the pipeline runs, and how one is chosen.

A backend is replaced piece by piece: `dataclasses.replace(TORCH, scan=my_scan)`. The chunks that
`begin` returns are the backend's own; the pipeline only hands them on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .affine import walk
from .arguments import check_choice
from .packing import Packing
from .rule import CHUNK, DeltaRule, accumulator
from .stages import conv as _conv
from .stages import gate as _gate
from .stages import intra as _intra
from .stages import recurrent as _recurrent
from .stages import scan as _scan
from .stages.intra import Chunks, Inputs
from .state import AffineMap, States

Impl = Literal["auto", "torch", "triton"]
Stage = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """Stage functions, in the order in which the pipeline calls them.

    forward
      begin(rule, packing, inputs, seeds) -> chunks, AffineMap   all that the scan needs, and maps
                                             of the segments
      scores(rule, packing, chunks) -> chunks                    what only the output needs
      scan_output(rule, packing, chunks, S0, want_states, want_end) -> o, h, v_new, S_end
      in_token_order(packing, h) -> h                            one state a chunk
      keep(rule, chunks, h, v_new) -> tensors                    saved for the backward
    backward
      restore(rule, packing, inputs, tensors, o) -> chunks, h, v_new    h None: scan runs again
      output_bwd(rule, packing, chunks, do) -> output gradients
      beside(packing, chunks) -> bool                            scan runs beside what follows
      scan(packing, chunks, S0) -> a call that gives h, v_new    only if restore gave no h
      summarize_bwd(packing, chunks, output gradients, seeds, together) -> offset
      scan_bwd(packing, chunks, output gradients, dS_end, want_start, together)
                                             -> scan gradients, dS0; together: while `scan` runs
      intra_bwd(rule, packing, inputs, chunks, h, v_new, scan gradients) -> Inputs

      walk(owner, steps, transition, offset, start, out, transposed) -> out      see affine.py
      split(packing, HV, K, V, dtype, device, backward) -> packing
                                             cut finer where that fills the cards, on all ranks
                                             alike; backward: for both directions

    operators of their own
      conv(x, halo, where, weight, bias, silu) -> y
      conv_bwd(x, halo, where, weight, bias, silu, dy) -> dx, dhalo, dweight, dbias
      gate(rule, g, A_log, dt_bias) -> log decay                 differentiable
      recurrent(rule, inputs, S0, S_end, sequences) -> o         token by token; fills S_end

    reads_output: restore needs o. For torch.compile: kept_shapes(rule, dtype, NC, HV, K, V) gives
    (shape, dtype) of what `keep` returns, always_kept(rule) the places in it, where all is kept, of
    what it returns otherwise.
    """

    name: str
    reads_output: bool
    always_kept: Callable[[DeltaRule], tuple[int, ...]]
    kept_shapes: Callable[..., list[tuple[tuple[int, ...], torch.dtype]]]
    begin: Stage
    scores: Stage
    scan_output: Stage
    in_token_order: Stage
    keep: Stage
    restore: Stage
    output_bwd: Stage
    beside: Stage
    scan: Stage
    summarize_bwd: Stage
    scan_bwd: Stage
    intra_bwd: Stage
    walk: Stage
    split: Stage
    conv: Stage
    conv_bwd: Stage
    gate: Stage
    recurrent: Stage


def _begin(
    rule: DeltaRule, packing: Packing, x: Inputs, seeds: States | None
) -> tuple[Chunks, AffineMap]:
    c = _intra.intra(rule, packing, x)
    return c, _scan.summarize(packing, c, seeds)


def _scan_output(
    rule: DeltaRule,
    packing: Packing,
    c: Chunks,
    S0: States | None,
    *,
    want_states: bool,
    want_end: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h, v_new, S_end = _scan.scan(packing, c, S0)
    return _scan.output(rule, packing, c, h, v_new), h, v_new, S_end


def _start_scan(
    packing: Packing, c: Chunks, S0: States | None
) -> Callable[[], tuple[Tensor, Tensor]]:
    h, v_new, _ = _scan.scan(packing, c, S0)
    return lambda: (h, v_new)


def _in_token_order(packing: Packing, h: Tensor) -> Tensor:
    return h[packing.steps(h.device).natural]


def _keep(
    rule: DeltaRule, c: Chunks, h: Tensor | None, v_new: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not rule.keep_intermediates:
        return c.T, c.Aqk
    return (*(c if rule.removal == "p" else c[:-1]), h, v_new)


def _kept_shapes(
    rule: DeltaRule, dtype: torch.dtype, NC: int, HV: int, K: int, V: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    square = (NC, HV, CHUNK, CHUNK)
    shapes: list[tuple[int, ...]] = [square, square]
    if rule.keep_intermediates:
        k, v, gates = (NC, HV, CHUNK, K), (NC, HV, CHUNK, V), 1 if rule.per_head else K
        beta, gc, decay = (NC, HV, CHUNK, 1), (NC, HV, CHUNK, gates), (NC, HV, gates)
        p = [k] if rule.removal == "p" else []
        shapes = [k, k, v, beta, gc, square, square, k, k, v, decay, k, *p, (NC, HV, K, V), v]
    return [(shape, accumulator(dtype)) for shape in shapes]


def _restore(
    rule: DeltaRule, packing: Packing, x: Inputs, kept: tuple[Tensor, ...], o: Tensor | None
) -> tuple[Chunks, Tensor | None, Tensor | None]:
    if rule.keep_intermediates:
        return Chunks(*kept[:-2]), kept[-2], kept[-1]
    return _intra.intra(rule, packing, x, kept=(kept[0], kept[1])), None, None


def _gate_alone(rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    return _gate.activate(rule, g.to(accumulator(g.dtype)), A_log, dt_bias)


TORCH = Backend(
    name="torch",
    reads_output=False,
    always_kept=lambda rule: tuple(map(_intra.Chunks._fields.index, ("T", "Aqk"))),
    kept_shapes=_kept_shapes,
    begin=_begin,
    scores=_intra.scores,
    scan_output=_scan_output,
    in_token_order=_in_token_order,
    keep=_keep,
    restore=_restore,
    output_bwd=_scan.output_bwd,
    summarize_bwd=_scan.summarize_bwd,
    beside=lambda packing, c: False,
    scan=_start_scan,
    scan_bwd=_scan.scan_bwd,
    intra_bwd=_intra.intra_bwd,
    walk=walk,
    split=lambda packing, *shape: packing,
    conv=_conv.conv,
    conv_bwd=_conv.conv_bwd,
    gate=_gate_alone,
    recurrent=_recurrent.recurrent,
)


def resolve(impl: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend for `impl`; "auto" takes the fastest that this version has for the device and
    dtype: Triton on CUDA, but torch for fp64, which only it computes.

    Raises ValueError for an unknown name and for a backend that is not there or cannot run the
    input: an explicit choice is never replaced by another.
    """
    check_choice("impl", impl, ("auto", "torch", "triton"))
    if impl == "auto":
        impl = "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if impl == "torch":
        return TORCH
    if dtype == torch.float64:
        raise ValueError(f"impl='triton' computes bf16, fp16 and fp32, got {dtype}")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl='triton' runs on CUDA devices, got {device}; pass impl='torch'")
    try:
        from .kernels.backend import TRITON
    except ImportError as error:
        raise ValueError(
            f"impl='triton' on {device} needs Triton >= 3.6 ({error}); pass impl='torch' for the "
            "slow PyTorch stages"
        ) from error
    return TRITON

"""Backend: one set of stage functions that the pipeline runs, and how one is chosen.

A backend is replaced piece by piece: `dataclasses.replace(TORCH, scan=my_scan)`. The chunks that
`begin` returns are the backend's own; the pipeline only hands them on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fla_cp.rule import DeltaRule

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
    prepare_chunks: Stage
    scores: Stage
    scan_output: Stage
    in_token_order: Stage
    keep: Stage
    restore: Stage
    output_bwd: Stage
    runs_concurrently: Stage
    scan: Stage
    summarize_bwd: Stage
    scan_bwd: Stage
    intra_bwd: Stage
    fold: Stage
    split: Stage
    conv: Stage
    conv_bwd: Stage
    gate: Stage
    recurrent: Stage

"""Backend: one set of stage functions that the pipeline runs, and how one is chosen.

A backend is replaced piece by piece: `dataclasses.replace(TORCH, scan=my_scan)`. What `intra`
returns ("chunks") is the backend's own; the pipeline only hands it on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .packing import Packing
from .rule import DeltaRule
from .stages import intra as _intra
from .stages import scan as _scan
from .stages.intra import Chunks, Inputs

Impl = Literal["auto", "torch", "triton"]
Stage = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """Stage functions, in the order in which the pipeline calls them.

    forward
      intra(rule, packing, inputs) -> chunks                     all that the scan needs
      summarize(packing, chunks, seeds) -> AffineMap             per segment
      scores(rule, packing, chunks) -> chunks                    what only the output needs
      scan(packing, chunks, S0) -> h, v_new, S_end
      output(rule, packing, chunks, h, v_new) -> o
      keep(rule, chunks, h, v_new) -> tensors                    saved for the backward
    backward
      restore(rule, packing, inputs, tensors) -> chunks, h, v_new    h None: scan runs again
      output_bwd(rule, packing, chunks, do) -> output gradients
      summarize_bwd(packing, chunks, output gradients, seeds) -> offset
      scan_bwd(packing, chunks, output gradients, dS_end) -> scan gradients, dS0
      intra_bwd(rule, packing, inputs, chunks, h, v_new, scan gradients) -> Inputs
    """

    name: str
    intra: Stage
    summarize: Stage
    scores: Stage
    scan: Stage
    output: Stage
    keep: Stage
    restore: Stage
    output_bwd: Stage
    summarize_bwd: Stage
    scan_bwd: Stage
    intra_bwd: Stage


def _keep(rule: DeltaRule, c: Chunks, h: Tensor, v_new: Tensor) -> tuple[Tensor | None, ...]:
    return (*c, h, v_new) if rule.keep_intermediates else (c.T, c.Aqk)


def _restore(
    rule: DeltaRule, packing: Packing, x: Inputs, kept: tuple[Tensor, ...]
) -> tuple[Chunks, Tensor | None, Tensor | None]:
    if rule.keep_intermediates:
        return Chunks(*kept[:-2]), kept[-2], kept[-1]
    return _intra.intra(rule, packing, x, kept=(kept[0], kept[1])), None, None


TORCH = Backend(
    name="torch",
    intra=_intra.intra,
    summarize=_scan.summarize,
    scores=_intra.scores,
    scan=_scan.scan,
    output=_scan.output,
    keep=_keep,
    restore=_restore,
    output_bwd=_scan.output_bwd,
    summarize_bwd=_scan.summarize_bwd,
    scan_bwd=_scan.scan_bwd,
    intra_bwd=_intra.intra_bwd,
)

BACKENDS = {"torch": TORCH}


def resolve(impl: str, device: torch.device) -> Backend:
    """The backend for `impl`; "auto" takes the fastest that this version has for the device.

    Raises ValueError for an unknown name and for a backend that is not there: an explicit choice
    is never replaced by another.
    """
    if impl == "auto":
        return BACKENDS.get("triton", TORCH) if device.type == "cuda" else TORCH
    if impl in BACKENDS:
        return BACKENDS[impl]
    if impl == "triton":
        raise ValueError(
            "impl='triton' is not in this version: its kernels come with a later one; "
            "use impl='torch' or 'auto'"
        )
    raise ValueError(f"impl must be 'auto', 'torch' or 'triton', got {impl!r}")

"""The backend of plain PyTorch: any device and dtype, and the reference of every kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fla_cp.comm.affine import fold
from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.backend import Backend
from fla_cp.kernels.torch import conv as _conv
from fla_cp.kernels.torch import gate as _gate
from fla_cp.kernels.torch import intra as _intra
from fla_cp.kernels.torch import recurrent as _recurrent
from fla_cp.kernels.torch import scan as _scan
from fla_cp.kernels.torch.intra import Chunks, Inputs
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule, accumulator


def _prepare_chunks(
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
    prepare_chunks=_prepare_chunks,
    scores=_intra.scores,
    scan_output=_scan_output,
    in_token_order=_in_token_order,
    keep=_keep,
    restore=_restore,
    output_bwd=_scan.output_bwd,
    summarize_bwd=_scan.summarize_bwd,
    runs_concurrently=lambda packing, c: False,
    scan=_start_scan,
    scan_bwd=_scan.scan_bwd,
    intra_bwd=_intra.intra_bwd,
    fold=fold,
    split=lambda packing, *shape: packing,
    conv=_conv.conv,
    conv_bwd=_conv.conv_bwd,
    gate=_gate_alone,
    recurrent=_recurrent.recurrent,
)

"""The serial part: states along the chunks of each segment, its summary, and their adjoints.

Per chunk, with h the state at its start:

    v_new = u - w h          h' = decay h + kg^T v_new          o = scale (qg h + Aqk v_new)

and mirrored, with dh' the gradient of the state at its end:

    dv_new = scale Aqk^T do + kg dh'      dh = decay dh' + scale qg^T do - w^T dv_new

Segments are independent here; the caller decides which state enters each (fla_cp/comm/carry.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.torch.intra import Chunks, Inputs, ScanGrads, Spec, to_chunks, to_tokens
from fla_cp.partition.packing import Packing


def _placed(packing: Packing, states: States | None, order: tuple[int, ...], c: Chunks) -> Tensor:
    """A state for each segment of `order`, zero for those that are not in `states`."""
    shape = c.w.shape[1], c.w.shape[-1], c.u.shape[-1] if states is None else states.value.shape[-1]
    out = c.w.new_zeros(len(order), *shape)
    if states is not None:
        place = {i: p for p, i in enumerate(order)}
        rows = [(place[i], e) for e, i in enumerate(states.segments) if i in place]
        to = packing.index([p for p, _ in rows], out.device)
        out[to] = states.value[packing.index([e for _, e in rows], out.device)]
    return out


def scan(spec: Spec, c: Chunks, S0: States | None) -> tuple[Tensor, Tensor, Tensor]:
    """h [NC, HV, K, V] at each chunk's start, v_new [NC, HV, C, V], S_end [S, HV, K, V]."""
    packing = spec.packing
    table = packing.steps(c.w.device)
    S = _placed(packing, S0, table.longest_first, c)
    h = S.new_empty(c.w.shape[0], *S.shape[1:])
    v_new = torch.empty_like(c.u)
    for seg, chunk in table.fold():
        h[chunk] = S[seg]
        v_new[chunk] = c.u[chunk] - c.w[chunk] @ S[seg]
        S[seg] = c.decay[chunk][..., None] * S[seg] + c.kg[chunk].mT @ v_new[chunk]
    return h, v_new, S[packing.index(table.position, S.device)]


def summarize(spec: Spec, c: Chunks, seeds: States | None) -> AffineMap:
    """Affine maps of segments: transition of `packing.middle`, offset of `packing.feeding`.

    The offset is the state at the end of a segment that starts from its seed, or from zero if it
    has none. A segment that begins a sequence therefore needs no transition.
    """
    packing, offset, transition = spec.packing, None, None
    if packing.feeding:
        offset = _compose(packing, c, packing.feeding, c.u, seeds)
    if packing.middle:
        (_, HV, _, K), middle = c.w.shape, packing.middle
        eye = torch.eye(K, dtype=c.w.dtype, device=c.w.device).expand(len(middle), HV, K, K)
        transition = _compose(packing, c, middle, None, States(middle, eye))
    return AffineMap(transition, offset)


def _compose(
    packing: Packing, c: Chunks, segments: tuple[int, ...], u: Tensor | None, seeds: States | None
) -> Tensor:
    subset = packing.subset(segments, c.w.device)
    S = _placed(packing, seeds, subset.segments, c)
    for seg, chunk in packing.steps(c.w.device).fold(subset):
        v = -(c.w[chunk] @ S[seg]) if u is None else u[chunk] - c.w[chunk] @ S[seg]
        S[seg] = c.decay[chunk][..., None] * S[seg] + c.kg[chunk].mT @ v
    return S[packing.index(subset.places_of(segments), S.device)]


def output(spec: Spec, c: Chunks, h: Tensor, v_new: Tensor) -> Tensor:
    """o [T, HV, V] in the accumulator's dtype."""
    assert c.qg is not None and c.Aqk is not None
    return to_tokens(spec.rule.scale * (c.qg @ h + c.Aqk @ v_new), spec.packing)


class OutputGrads(NamedTuple):
    """The chunks, and the part of the output's adjoint that needs no gradient of a state: do
    (scaled) and dv_local [NC, HV, C, V], and into_h = qg^T do [NC, HV, K, V]."""

    chunks: Chunks
    do: Tensor
    dv_local: Tensor
    into_h: Tensor


def output_bwd(spec: Spec, chunks: Chunks, do: Tensor) -> OutputGrads:
    """`OutputGrads` from do [T, HV, V]."""
    assert chunks.qg is not None and chunks.Aqk is not None
    do = spec.rule.scale * to_chunks(do.to(chunks.u.dtype), spec.packing)
    return OutputGrads(chunks, do, chunks.Aqk.mT @ do, chunks.qg.mT @ do)


def _step_bwd(dout: OutputGrads, chunk: slice | Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """dv_new of a chunk, and the gradient of the state at its start. dS: that at its end."""
    c = dout.chunks
    dv = dout.dv_local[chunk] + c.kg[chunk] @ dS
    return dv, c.decay[chunk][..., None] * dS + dout.into_h[chunk] - c.w[chunk].mT @ dv


def summarize_bwd(
    spec: Spec, dout: OutputGrads, seeds: States | None, *, concurrent: bool
) -> Tensor | None:
    """The adjoint offsets of `packing.carried` [., HV, K, V]: the gradient of the state that enters
    a segment if the gradient of the state at its end is its seed. The transition of the adjoint map
    is the forward's, transposed.
    """
    packing, c = spec.packing, dout.chunks
    if not packing.carried:
        return None
    subset = packing.subset(packing.carried, c.w.device)
    dS = _placed(packing, seeds, subset.segments, c)
    for seg, chunk in packing.steps(c.w.device).fold(subset, reverse=True):
        dS[seg] = _step_bwd(dout, chunk, dS[seg])[1]
    return dS[packing.index(subset.places_of(packing.carried), dS.device)]


def scan_bwd(
    spec: Spec,
    x: Inputs,
    dout: OutputGrads,
    dS_end: States | None,
    *,
    want_start: bool,
    concurrent: bool,
) -> tuple[ScanGrads, Tensor]:
    """What `intra_bwd` needs, and the gradients of the states that enter segments [S, HV, K, V]."""
    packing, c = spec.packing, dout.chunks
    table = packing.steps(c.w.device)
    dS = _placed(packing, dS_end, table.longest_first, c)
    dh, dv = torch.empty_like(dout.into_h), torch.empty_like(c.u)
    for seg, chunk in table.fold(reverse=True):
        dh[chunk] = dS[seg]
        dv[chunk], dS[seg] = _step_bwd(dout, chunk, dS[seg])
    return ScanGrads(dout.do, dv, dh), dS[packing.index(table.position, dS.device)]

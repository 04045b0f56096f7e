"""The serial part: states along the chunks of each segment, its summary, and the adjoints.

Per chunk, with h the state at its start:

    v_new = u - w h          h' = decay h + kg^T v_new          o = scale (qg h + Aqk v_new)

and mirrored, with dh' the gradient of the state at its end:

    dv_new = scale Aqk^T do + kg dh'      dh = decay dh' + scale qg^T do - w^T dv_new

Segments are independent here; which state enters a segment is the caller's affair (state.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.comm.carry import AffineMap, States
from fla_cp.kernels.torch.intra import Chunks, ScanGrads, to_chunks, to_tokens
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule


def _placed(
    packing: Packing, states: States | None, walked: tuple[int, ...], like: Tensor
) -> Tensor:
    """A state per walked segment, in walking order, zero for those without."""
    out = like.new_zeros(len(walked), *like.shape[1:])
    if states is not None:
        place = {i: p for p, i in enumerate(walked)}
        rows = [(place[i], e) for e, i in enumerate(states.segments) if i in place]
        to = packing.index([p for p, _ in rows], like.device)
        out[to] = states.value[packing.index([e for _, e in rows], like.device)]
    return out


def _state_like(c: Chunks) -> Tensor:
    return c.decay.new_empty(0, c.w.shape[1], c.w.shape[-1], c.u.shape[-1])


def scan(packing: Packing, c: Chunks, S0: States | None) -> tuple[Tensor, Tensor, Tensor]:
    """h [NC, HV, K, V] at each chunk's start, v_new [NC, HV, C, V], S_end [S, HV, K, V]."""
    table = packing.steps(c.w.device)
    S = _placed(packing, S0, table.walked, _state_like(c))
    h = S.new_empty(c.w.shape[0], *S.shape[1:])
    v_new = torch.empty_like(c.u)
    for seg, chunk in table.fold():
        h[chunk] = S[seg]
        v_new[chunk] = c.u[chunk] - c.w[chunk] @ S[seg]
        S[seg] = c.decay[chunk][..., None] * S[seg] + c.kg[chunk].transpose(-1, -2) @ v_new[chunk]
    return h, v_new, S[packing.index(table.position, S.device)]


def summarize(packing: Packing, c: Chunks, seeds: States | None) -> AffineMap:
    """Affine maps of segments: transition of `packing.middle`, offset of `packing.feeding`.

    The offset is the segment's last state when it starts from its seed (zero without one), so
    that a segment which begins a sequence needs no transition.
    """
    offset = transition = None
    if packing.feeding:
        offset = _compose(packing, c, packing.feeding, c.u, seeds)
    if packing.middle:
        K = c.w.shape[-1]
        eye = torch.eye(K, dtype=c.w.dtype, device=c.w.device).expand(
            len(packing.middle), c.w.shape[1], K, K
        )
        transition = _compose(packing, c, packing.middle, None, States(packing.middle, eye))
    return AffineMap(transition, offset)


def _compose(
    packing: Packing, c: Chunks, segments: tuple[int, ...], u: Tensor | None, seeds: States | None
) -> Tensor:
    subset = packing.subset(segments, c.w.device)
    width = c.u.shape[-1] if u is not None else c.w.shape[-1]
    like = c.w.new_empty(0, c.w.shape[1], c.w.shape[-1], width)
    S = _placed(packing, seeds, subset.segments, like)
    for seg, chunk in packing.steps(c.w.device).fold(subset):
        v = -(c.w[chunk] @ S[seg]) if u is None else u[chunk] - c.w[chunk] @ S[seg]
        S[seg] = c.decay[chunk][..., None] * S[seg] + c.kg[chunk].transpose(-1, -2) @ v
    return S[packing.index(subset.places_of(segments), S.device)]


def output(rule: DeltaRule, packing: Packing, c: Chunks, h: Tensor, v_new: Tensor) -> Tensor:
    """o [T, HV, V] in the accumulator's dtype."""
    assert c.qg is not None and c.Aqk is not None
    return to_tokens(rule.scale * (c.qg @ h + c.Aqk @ v_new), packing)


class OutputGrads(NamedTuple):
    """Adjoint of the output where no state gradient is needed: do (scaled) and dv_local
    [NC, HV, C, V], and into_h = qg^T do [NC, HV, K, V]."""

    do: Tensor
    dv_local: Tensor
    into_h: Tensor


def output_bwd(rule: DeltaRule, packing: Packing, c: Chunks, do: Tensor) -> OutputGrads:
    """From do [T, HV, V]: everything that does not wait for a state's gradient."""
    assert c.qg is not None and c.Aqk is not None
    do_c = rule.scale * to_chunks(do.to(c.u.dtype), packing)
    return OutputGrads(do_c, c.Aqk.transpose(-1, -2) @ do_c, c.qg.transpose(-1, -2) @ do_c)


def _step_bwd(
    c: Chunks, g: OutputGrads, chunk: slice | Tensor, dS: Tensor
) -> tuple[Tensor, Tensor]:
    dv = g.dv_local[chunk] + c.kg[chunk] @ dS
    return dv, (
        c.decay[chunk][..., None] * dS + g.into_h[chunk] - c.w[chunk].transpose(-1, -2) @ dv
    )


def summarize_bwd(
    packing: Packing,
    c: Chunks,
    grads: OutputGrads,
    seeds: States | None,
    *,
    concurrent: bool = False,
) -> Tensor | None:
    """Adjoint offset of `packing.carried` [., HV, K, V]: the gradient of the segment's entry
    state when its last state's gradient is its seed. The transition is the forward one
    transposed."""
    if not packing.carried:
        return None
    subset = packing.subset(packing.carried, c.w.device)
    dS = _placed(packing, seeds, subset.segments, _state_like(c))
    for seg, chunk in packing.steps(c.w.device).fold(subset, reverse=True):
        dS[seg] = _step_bwd(c, grads, chunk, dS[seg])[1]
    return dS[packing.index(subset.places_of(packing.carried), dS.device)]


def scan_bwd(
    packing: Packing,
    c: Chunks,
    grads: OutputGrads,
    dS_end: States | None,
    *,
    want_start: bool = True,
    concurrent: bool = False,
) -> tuple[ScanGrads, Tensor]:
    """What `intra_bwd` needs, and the gradient of each segment's entry state [S, HV, K, V]."""
    table = packing.steps(c.w.device)
    dS = _placed(packing, dS_end, table.walked, _state_like(c))
    dh = torch.empty_like(grads.into_h)
    dv = torch.empty_like(c.u)
    for seg, chunk in table.fold(reverse=True):
        dh[chunk] = dS[seg]
        dv[chunk], dS[seg] = _step_bwd(c, grads, chunk, dS[seg])
    return ScanGrads(grads.do, dv, dh), dS[packing.index(table.position, dS.device)]

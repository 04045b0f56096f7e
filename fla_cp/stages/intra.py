"""What is local to a chunk: inputs -> the operands of the scan and of the output, and back.

Per chunk, with rows i, j, decay e = exp(gc) from the chunk's start, and b = beta:

    Akk = b k k^T (decayed, strictly lower)   T = (I + Akk)^-1   Aqk = q k^T (decayed, lower)
    u = T (b v)      w = T (b k e)      qg = q e      kg = k exp(gc_C - gc)

Source: docs/design.md "Chunk form"; Kimi Linear report, arXiv 2510.26692.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..packing import Packing
from ..rule import CHUNK, DeltaRule, accumulator
from .gate import activate, activate_beta, activate_beta_bwd, activate_bwd, l2norm, l2norm_bwd
from .gram import gram, gram_bwd


class Inputs(NamedTuple):
    """What the caller gave, packed: q, k [T, H, K], v [T, HV, V], g [T, HV, K], beta [T, HV],
    A_log [HV] or None, dt_bias [HV*K] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


class Chunks(NamedTuple):
    """Chunk-local tensors [NC, HV, C, .] in the accumulator's dtype; None where not formed.

    q, k (normalised, repeated per value head), v, beta [.., 1], gc; T and Aqk [.., C, C];
    kg, w, u: operands of the scan; decay [NC, HV, K]: exp(gc) of the last row; qg: of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gc: Tensor
    T: Tensor
    Aqk: Tensor | None
    kg: Tensor
    w: Tensor
    u: Tensor
    decay: Tensor
    qg: Tensor | None = None


def to_chunks(x: Tensor, packing: Packing) -> Tensor:
    """[T, HV, D] -> [NC, HV, C, D], rows beyond a segment's end zero."""
    table = packing.steps(x.device)
    rows = x[table.gather] if len(x) else x.new_zeros(0, *x.shape[1:])
    if table.padded is not None:
        rows.masked_fill_(table.padded.view(-1, 1, 1), 0)
    return rows.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()


def to_tokens(x: Tensor, packing: Packing) -> Tensor:
    """[NC, HV, C, D] -> [T, HV, D]: the adjoint of `to_chunks`."""
    return x.transpose(1, 2).flatten(0, 1)[packing.steps(x.device).scatter]


class Prepared(NamedTuple):
    """Inputs after gate, norm and beta, per token, in the accumulator's dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    g_raw: Tensor
    g: Tensor
    beta: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None


def prepare(rule: DeltaRule, x: Inputs) -> Prepared:
    dtype = accumulator(x.q.dtype)
    q, k, v, g_raw, beta = (t.to(dtype) for t in (x.q, x.k, x.v, x.g, x.beta))
    q_rstd = k_rstd = None
    if rule.qk_l2norm:
        q, q_rstd = l2norm(q)
        k, k_rstd = l2norm(k)
    g = activate(rule, g_raw, x.A_log, x.dt_bias)
    return Prepared(q, k, v, g_raw, g, activate_beta(rule, beta), q_rstd, k_rstd)


def intra(
    rule: DeltaRule, packing: Packing, x: Inputs, kept: tuple[Tensor, Tensor] | None = None
) -> Chunks:
    """The scan's operands; with `kept` = (T, Aqk) (in a backward) the output's as well."""
    t = prepare(rule, x)
    group = t.v.shape[1] // t.q.shape[1]
    q = to_chunks(t.q, packing).repeat_interleave(group, 1)
    k = to_chunks(t.k, packing).repeat_interleave(group, 1)
    v = to_chunks(t.v, packing)
    beta = to_chunks(t.beta[..., None], packing)
    gc = to_chunks(t.g, packing).cumsum(-2) * rule.gate_unit
    bk = beta * k
    if kept is None:
        T = gram(bk, k, gc, rule.exp, diagonal=False)
        T.diagonal(dim1=-2, dim2=-1).fill_(1)
        eye = torch.eye(CHUNK, dtype=T.dtype, device=T.device).expand_as(T)
        T = torch.linalg.solve_triangular(T, eye, upper=False, unitriangular=True)
    else:
        T = kept[0]
    last = gc[..., -1:, :]
    return Chunks(
        q=q,
        k=k,
        v=v,
        beta=beta,
        gc=gc,
        T=T,
        Aqk=None if kept is None else kept[1],
        kg=k * rule.exp(last - gc),
        w=T @ (bk * rule.exp(gc)),
        u=T @ (beta * v),
        decay=rule.exp(last[..., 0, :]),
        qg=None if kept is None else q * rule.exp(gc),
    )


def scores(rule: DeltaRule, packing: Packing, c: Chunks) -> Chunks:
    """Adds what only the output needs, Aqk and qg: work that can run during an exchange."""
    return c._replace(Aqk=gram(c.q, c.k, c.gc, rule.exp, diagonal=True), qg=c.q * rule.exp(c.gc))


class ScanGrads(NamedTuple):
    """What the adjoint of scan and output leaves for `intra_bwd`.

    do: scale * gradient of o [NC, HV, C, V]. dv: gradient of v_new [NC, HV, C, V].
    dh: gradient of the state at each chunk's end [NC, HV, K, V].
    """

    do: Tensor
    dv: Tensor
    dh: Tensor


def intra_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
) -> Inputs:
    """Gradients of every input, in the inputs' dtypes (A_log and dt_bias reduced in fp32).

    The gate's gradient needs no product of its own: gc enters only as exp(+gc_i) beside row
    factors x_i and exp(-gc_j) beside column factors y_j, so dgc = sum x dx - sum y dy.
    """
    assert c.Aqk is not None and c.qg is not None
    do, dv_new, dh = grads
    e, to_end = rule.exp(c.gc), rule.exp(c.gc[..., -1:, :] - c.gc)

    dAqk = do @ v_new.transpose(-1, -2)
    dq, dk_col = gram_bwd(dAqk, c.q, c.k, c.gc, rule.exp, diagonal=True)
    dq += e * (do @ h.transpose(-1, -2))
    dkg = v_new @ dh.transpose(-1, -2)

    # v_new = T (b v - b k e h), so that the inverse needs no product but y v_new^T
    y = c.T.transpose(-1, -2) @ dv_new
    dAkk = -(y @ v_new.transpose(-1, -2))
    bk = c.beta * c.k
    dbk_row, dk_kk = gram_bwd(dAkk, bk, c.k, c.gc, rule.exp, diagonal=False)
    dbk = dbk_row - e * (y @ h.transpose(-1, -2))
    dk_col += dk_kk + to_end * dkg
    dbeta = (c.k * dbk).sum(-1) + (c.v * y).sum(-1)

    dgc = c.q * dq + bk * dbk - c.k * dk_col
    dgc[..., -1, :] += (c.kg * dkg).sum(-2) + c.decay * (h * dh).sum(-1)
    dg = dgc.flip(-2).cumsum(-2).flip(-2)
    dk = c.beta * dbk + dk_col
    return _prepare_bwd(rule, packing, x, dq, dk, c.beta * y, dg, dbeta[..., None])


def _prepare_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
) -> Inputs:
    t = prepare(rule, x)
    H, group = t.q.shape[1], t.v.shape[1] // t.q.shape[1]
    dq, dk = (to_tokens(d, packing).unflatten(1, (H, group)).sum(2) for d in (dq, dk))
    dv, dg = to_tokens(dv, packing), to_tokens(dg, packing)
    dbeta = activate_beta_bwd(rule, t.beta, to_tokens(dbeta, packing)[..., 0])
    if t.q_rstd is not None and t.k_rstd is not None:
        dq, dk = l2norm_bwd(t.q, t.q_rstd, dq), l2norm_bwd(t.k, t.k_rstd, dk)
    dg, dA_log, ddt_bias = activate_bwd(rule, t.g_raw, x.A_log, x.dt_bias, dg)
    return Inputs(
        dq.to(x.q.dtype),
        dk.to(x.k.dtype),
        dv.to(x.v.dtype),
        dg.to(x.g.dtype),
        dbeta.to(x.beta.dtype),
        dA_log if x.A_log is None or dA_log is None else dA_log.view_as(x.A_log).to(x.A_log.dtype),
        ddt_bias
        if x.dt_bias is None or ddt_bias is None
        else ddt_bias.view_as(x.dt_bias).to(x.dt_bias.dtype),
    )

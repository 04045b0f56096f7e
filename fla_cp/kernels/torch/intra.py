"""The part that is local to a chunk: inputs -> operands of the scan and the output, and back.

Per chunk, with rows i, j, decay e = exp(gc) from the chunk's start, and b = beta:

    Akk = b k k^T (decayed, strictly lower)   T = (I + Akk)^-1   Aqk = q k^T (decayed, lower)
    u = T (b v)      w = T (b k e)      qg = q e      kg = k exp(gc_C - gc)

Source: docs/design.md "Chunk form"; Kimi Linear report, arXiv 2510.26692.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.kernels.torch import gate
from fla_cp.kernels.torch.scores import gram, gram_bwd
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule, accumulator


class Spec(NamedTuple):
    """What every stage computes: the options of the call, and how its tokens are laid out."""

    rule: DeltaRule
    packing: Packing


class Inputs(NamedTuple):
    """The caller's tensors with one dim for all tokens: q, k [T, H, K], v [T, HV, V], g [T, HV, K]
    ([T, HV] with one decay a head), beta [T, HV] or None, A_log [HV] or None, dt_bias [HV*K] ([HV])
    or None, p like k or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    p: Tensor | None = None


class Chunks(NamedTuple):
    """The tensors of chunks [NC, HV, C, .] in the accumulator's dtype; None if not formed.

    q, k and p are normalised and repeated for each value head. beta is [.., 1]. gc [.., K or 1] is
    the sum of log decays from the chunk's start. T and Aqk are [.., C, C]. The scan reads kg, w, u
    and decay [NC, HV, K or 1], which is exp(gc) of the last row. The output reads qg.
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
    p: Tensor | None = None


def to_chunks(x: Tensor, packing: Packing) -> Tensor:
    """[T, HV, D] -> [NC, HV, C, D]. Rows beyond a segment's end are zero."""
    table = packing.steps(x.device)
    rows = x[table.gather] if len(x) else x.new_zeros(0, *x.shape[1:])
    if table.padded is not None:
        rows.masked_fill_(table.padded.view(-1, 1, 1), 0)
    return rows.unflatten(0, (-1, packing.chunk)).transpose(1, 2).contiguous()


def to_tokens(x: Tensor, packing: Packing) -> Tensor:
    """[NC, HV, C, D] -> [T, HV, D]: the adjoint of `to_chunks`."""
    return x.transpose(1, 2).flatten(0, 1)[packing.steps(x.device).scatter]


class Prepared(NamedTuple):
    """The tokens' inputs after gate, norm and sigmoid, in the accumulator's dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    g_raw: Tensor
    g: Tensor
    beta: Tensor
    p: Tensor | None
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    p_rstd: Tensor | None


def prepare(rule: DeltaRule, x: Inputs) -> Prepared:
    dtype = accumulator(x.q.dtype)
    q, k, v, g_raw = (t.to(dtype) for t in (x.q, x.k, x.v, x.g))
    p = None if x.p is None else x.p.to(dtype)
    q_rstd = k_rstd = p_rstd = None
    if rule.qk_l2norm:
        (q, q_rstd), (k, k_rstd) = gate.l2norm(q), gate.l2norm(k)
        if p is not None:
            p, p_rstd = gate.l2norm(p)
    g_raw = g_raw[..., None] if rule.per_head else g_raw
    g = gate.activate(rule, g_raw, x.A_log, x.dt_bias)
    beta = v.new_ones(v.shape[:2]) if x.beta is None else gate.activate_beta(rule, x.beta.to(dtype))
    return Prepared(q, k, v, g_raw, g, beta, p, q_rstd, k_rstd, p_rstd)


def _removed(k: Tensor, p: Tensor | None, gc: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that read the state, and the sum of log decays up to each reading: k reads after its
    own token's decay, p before it."""
    if p is None:
        return k, gc
    return p, torch.nn.functional.pad(gc[..., :-1, :], (0, 0, 1, 0))


def intra(spec: Spec, x: Inputs, kept: tuple[Tensor, Tensor] | None = None) -> Chunks:
    """The operands of the scan, and in a backward, with `kept` = (T, Aqk), those of the output."""
    rule, packing = spec
    t = prepare(rule, x)
    group = t.v.shape[1] // t.q.shape[1]
    q, k = (to_chunks(d, packing).repeat_interleave(group, 1) for d in (t.q, t.k))
    p = None if t.p is None else to_chunks(t.p, packing).repeat_interleave(group, 1)
    v, beta = to_chunks(t.v, packing), to_chunks(t.beta[..., None], packing)
    gc = to_chunks(t.g, packing).cumsum(-2) * rule.gate_unit
    T, Aqk = kept or (None, None)
    C = packing.chunk
    eye = torch.eye(C, dtype=gc.dtype, device=gc.device).expand(*gc.shape[:-1], C)
    if rule.removal == "none":
        T, w, u = eye.contiguous(), torch.zeros_like(k), beta * v
    else:
        removed, before = _removed(k, p, gc)
        row = beta * removed
        if T is None:
            T = gram(row, k, before, gc, rule.exp, diagonal=False)
            T.diagonal(dim1=-2, dim2=-1).fill_(1)
            T = torch.linalg.solve_triangular(T, eye, upper=False, unitriangular=True)
        w, u = T @ (row * rule.exp(before)), T @ (beta * v)
    last = gc[..., -1:, :]
    kg, decay = k * rule.exp(last - gc), rule.exp(last[..., 0, :])
    qg = None if Aqk is None else q * rule.exp(gc)
    return Chunks(q, k, v, beta, gc, T, Aqk, kg, w, u, decay, qg, p)


def scores(spec: Spec, chunks: Chunks) -> Chunks:
    """Adds Aqk and qg, which only the output needs. This can run during an exchange."""
    c, exp = chunks, spec.rule.exp
    Aqk = gram(c.q, c.k, c.gc, c.gc, exp, diagonal=True)
    return c._replace(Aqk=Aqk, qg=c.q * exp(c.gc))


class ScanGrads(NamedTuple):
    """What the reverse scan leaves for `intra_bwd`.

    do: scale * gradient of o [NC, HV, C, V]. dv: gradient of v_new [NC, HV, C, V].
    dh: gradient of the state at each chunk's end [NC, HV, K, V].
    """

    do: Tensor
    dv: Tensor
    dh: Tensor


def intra_bwd(
    spec: Spec, x: Inputs, chunks: Chunks, states: tuple[Tensor, Tensor], dscan: ScanGrads
) -> Inputs:
    """Gradients of every input, in the inputs' dtypes (A_log and dt_bias are reduced in fp32).

    The gate's gradient needs no product of its own: gc appears only as exp(+gc_i) in a factor of
    row x_i and as exp(-gc_j) in a factor of column y_j, so dgc = sum x dx - sum y dy.
    """
    rule, c, (h, v_new), (do, dv_new, dh) = spec.rule, chunks, states, dscan
    e, to_end = rule.exp(c.gc), rule.exp(c.gc[..., -1:, :] - c.gc)

    dAqk = do @ v_new.transpose(-1, -2)
    dq, dk = gram_bwd(dAqk, c.q, c.k, c.gc, c.gc, rule.exp, diagonal=True)
    dq += e * (do @ h.transpose(-1, -2))
    dkg = v_new @ dh.transpose(-1, -2)
    dk += to_end * dkg
    dgc = c.q * dq

    dp = dbeta = shift = None
    if rule.removal == "none":
        dv = c.beta * dv_new
        dgc -= c.k * dk
    else:
        # v_new = T (b v - b r e h): the inverse's gradient needs only the product y v_new^T
        removed, before = _removed(c.k, c.p, c.gc)
        y = c.T.transpose(-1, -2) @ dv_new
        dAkk = -(y @ v_new.transpose(-1, -2))
        row = c.beta * removed
        drow, dk_kk = gram_bwd(dAkk, row, c.k, before, c.gc, rule.exp, diagonal=False)
        drow -= rule.exp(before) * (y @ h.transpose(-1, -2))
        dk += dk_kk
        dgc -= c.k * dk
        dbeta = (removed * drow).sum(-1, keepdim=True) + (c.v * y).sum(-1, keepdim=True)
        dv = c.beta * y
        shift = row * drow
        dgc += shift
        if c.p is None:
            dk += c.beta * drow
        else:
            dp = c.beta * drow

    dgc[..., -1, :] += (c.kg * dkg).sum(-2) + c.decay * (h * dh).sum(-1)
    dg = dgc.flip(-2).cumsum(-2).flip(-2)
    if c.p is not None and shift is not None:  # p does not see its own token's decay
        dg -= shift
    if rule.per_head:
        dg = dg.sum(-1, keepdim=True)
    return _prepare_bwd(spec, x, Inputs(dq, dk, dv, dg, dbeta, None, None, dp))


def _prepare_bwd(spec: Spec, x: Inputs, d: Inputs) -> Inputs:
    """The adjoint of `prepare`. d: the gradients of its results, in chunk layout."""
    rule, packing = spec
    t = prepare(rule, x)
    H, group = t.q.shape[1], t.v.shape[1] // t.q.shape[1]

    def of_keys(d: Tensor, y: Tensor, rstd: Tensor | None) -> Tensor:
        d = to_tokens(d, packing).unflatten(1, (H, group)).sum(2)
        return d if rstd is None else gate.l2norm_bwd(y, rstd, d)

    dq, dk = of_keys(d.q, t.q, t.q_rstd), of_keys(d.k, t.k, t.k_rstd)
    dv, dg = to_tokens(d.v, packing), to_tokens(d.g, packing)
    dg, dA_log, ddt_bias = gate.activate_bwd(rule, t.g_raw, x.A_log, x.dt_bias, dg)
    dbeta = dp = None
    if d.beta is not None:
        dbeta = gate.activate_beta_bwd(rule, t.beta, to_tokens(d.beta, packing)[..., 0])
    if d.p is not None and t.p is not None:
        dp = of_keys(d.p, t.p, t.p_rstd)
    grads = dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dp
    named = zip(x, grads, strict=True)
    return Inputs(
        *(None if y is None or dy is None else dy.view_as(y).to(y.dtype) for y, dy in named)  # type: ignore[arg-type]
    )

"""KDA and DPLR in fp64 with operands rounded where the kernels round theirs.

The result has the error that half precision costs for these inputs, in kernels that lose nothing
else. If keys are nearly parallel, o is a small difference of large terms, and a tolerance relative
to o says nothing about the error to expect; this does. Source: docs/design.md, "Chunk form". Names
are those of fla_cp/kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.cases import PACKED, Case
from tests.support.closeness import BUDGET
from tests.support.running import weights

C = 64

TERMS_OF_HIGH = ("T", "Aqk", "v_new of o", "T^T dv")
"""Operands that precision="high" represents by two terms."""

LOG2 = math.log(2.0)


OF_ROWS = ("qg", "k_decayed", "kg", "row", "column")
"""With one decay a head these operands are the inputs, and factors multiply the products."""


class Rounding:
    """Rounds operands of products, by their name.

    dtype: None rounds nothing. precise: precision="high". per_head: one decay a head. coarse: name
    of an operand that loses one more bit.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        precise: bool = False,
        per_head: bool = False,
        coarse: str = "",
    ):
        self.dtype, self.precise, self.coarse = dtype, precise, coarse
        self.exact = OF_ROWS if per_head else ()

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if self.dtype is None or name in self.exact:
            return x
        high = x.to(self.dtype).double()
        if name == self.coarse:
            return x + 2 * (high - x)
        if self.precise and name in TERMS_OF_HIGH:
            return high + (x - high).to(self.dtype).double()
        return high


class Rows(NamedTuple):
    """What chunks are formed of: q (with the scale), k, v, b [N, H, C, .] and gc, the sum of log
    decays from the chunk's start. p: what reads the state before the decay, or None if k reads it
    after. k_scale: with one decay a head, the factors [N, H, C, 1] by which k was multiplied."""

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    gc: Tensor
    p: Tensor | None = None
    k_scale: Tensor | None = None


class Gradients(NamedTuple):
    """Of `Rows`, dg before its gate, and what they are formed of that a norm of q and k needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    g: Tensor
    p: Tensor
    y: Tensor
    v_new: Tensor


def in_chunks(
    x: Rows, S: Tensor, do: Tensor, dS: Tensor, r: Rounding
) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    """o, the state after the last chunk, the gradient of the state S [H, K, V] before the first,
    and the other gradients."""
    (q, k, vc, b, gc), N = x[:5], len(x.q)
    reads, upto = k, gc
    if x.p is not None:
        reads, upto = x.p, torch.nn.functional.pad(gc[..., :-1, :], (0, 0, 1, 0))
    end, decay = gc[..., -1:, :], gc[..., -1, :].exp()[..., None]
    qg, k_decayed = r("qg", q * gc.exp()), r("k_decayed", reads * upto.exp())
    kg = r("kg", k * (end - gc).exp())

    def written(n: int) -> Tensor:
        """The contribution of chunk n to the state."""
        if x.k_scale is None:
            return kg[n].mT @ v_new[n]
        # k is not scaled; its factor multiplies v_new, which is rounded once more
        factor = x.k_scale[n] * (end - gc)[n].exp()
        return (k / x.k_scale)[n].mT @ r("w", factor * v_new[n])

    def scores(rows: Tensor, upto: Tensor) -> Tensor:
        halves = []
        for n in (0, C // 2):
            middle, half = gc[..., n + 15 : n + 16, :], slice(n, n + C // 2)
            col = r("column", k[..., half, :] * (middle - gc[..., half, :]).exp())
            row = rows * (upto - middle).clamp(max=80.0).exp()
            halves.append(r("row", row) @ col.mT)
        return torch.cat(halves, -1).tril(-1)

    eye = torch.eye(C, dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(eye + b * scores(reads, upto), eye, upper=False)
    Aqk = r("Aqk", scores(q, gc) + torch.diag_embed((q * k).sum(-1)))
    inverse = r("T", inverse)

    o, v_new, h = torch.empty_like(vc), torch.empty_like(vc), S.new_empty(N, *S.shape)
    for n in range(N):
        h[n] = r("S", S)
        fresh = inverse[n] @ r("r", b[n] * (vc[n] - k_decayed[n] @ h[n]))
        v_new[n] = r("v_new", fresh)
        o[n] = qg[n] @ h[n] + Aqk[n] @ r("v_new of o", fresh)
        S = decay[n] * S + written(n)
    final, o = S, r("o", o)

    dh, y, yn = torch.empty_like(h), torch.empty_like(o), torch.empty_like(o)
    for n in reversed(range(N)):
        dh[n] = r("dS", dS)
        yn[n] = inverse[n].mT @ r("T^T dv", kg[n] @ dh[n] + Aqk[n].mT @ do[n])
        y[n] = r("y", yn[n])
        dS = decay[n] * dS + qg[n].mT @ do[n] - k_decayed[n].mT @ r("x", b[n] * yn[n])

    # inside a chunk, each token has a row and a column factor, relative to a power of two
    dAqk, dAkk = do @ v_new.mT, -(y @ v_new.mT)
    diagonal = torch.diagonal(dAqk, dim1=-2, dim2=-1)[..., None]
    dAqk, dAkk = r("dAqk", dAqk.tril(-1)), r("dAkk", dAkk.tril(-1))
    n0, n1 = (torch.floor(gc[..., m : m + 1, :] / LOG2 + 0.5) * LOG2 for m in (15, 47))
    first = (torch.arange(C, device=q.device) < C // 2)[:, None]
    near = torch.where(first, n0, n1)
    f, f_read = (gc - near).exp(), (upto - near).exp()
    column = r("column", k / f)
    far = torch.where(first, column * (n1 - n0).exp(), column)

    def of_rows(states: Tensor, dA: Tensor) -> Tensor:
        return near.exp() * states + torch.where(first, dA @ column, dA @ far)

    def of_columns(dA: Tensor, row: Tensor) -> Tensor:
        shifted = torch.where(first, row, row * (n1 - n0).exp())
        return torch.where(first, dA.mT @ shifted, dA.mT @ row)

    dq, dread = of_rows(do @ h.mT, dAqk), of_rows(-(y @ h.mT), dAkk)
    into_end = (end - near).exp() * (v_new @ dh.mT)
    row_q, row_read = r("row", q * f), r("row", b * reads * f_read)
    dcolumn = into_end + of_columns(dAqk, row_q) + of_columns(dAkk, row_read)
    own = row_read * dread
    dgc = row_q * dq + own - column * dcolumn
    dgc[..., -1, :] += (h * dh).sum(-1) * decay[..., 0] + (column * into_end).sum(-2)
    dg = dgc.flip(-2).cumsum(-2).flip(-2)
    dq, dread = dq * f + diagonal * k, dread * f_read
    dk, dp = diagonal * q + dcolumn / f, b * dread
    if x.p is None:
        dk += dp
    else:  # it does not see its own token's decay
        dg = dg - own
    db = (vc * y).sum(-1, keepdim=True) + (reads * dread).sum(-1, keepdim=True)
    return o, final, dS, Gradients(dq, dk, b * y, db, dg, dp, y, v_new)


def chunks_of(x: Tensor) -> Tensor:
    """[T, H, D] as [N, H, C, D]."""
    return x.unflatten(0, (-1, C)).transpose(1, 2)


def tokens_of(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def rounded(
    case: Case, x: dict[str, Tensor], r: Rounding, into: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """o, final_state and every gradient, by name, fp64.

    case: one row of whole chunks, without groups and initial state; gate, norm and sigmoid inside.
    With one decay a head, the gate is that of the gated delta rule. x: inputs of the case, already
    rounded. into: gradients of o and of the final state; by default those of `weights`.
    """
    q, k, v, raw, beta, A_log, dt_bias = (
        x[n].double().squeeze(0) for n in (*PACKED, "A_log", "dt_bias")
    )
    (_, H, K), V, per_head = q.shape, v.shape[-1], raw.dim() == 2
    scale = K**-0.5
    do, dS = (w.to(q.device).double()[0] for w in into or weights(case))
    rate = A_log.exp()[:, None]
    if per_head:
        raw = raw[..., None] + dt_bias[:, None]
        step, slope = -rate * torch.nn.functional.softplus(raw), -rate * torch.sigmoid(raw)
    else:
        raw, bound = raw + dt_bias.view(H, K), case.keywords["lower_bound"]
        gate = torch.sigmoid(rate * raw)
        step, slope = bound * gate, bound * rate * gate * (1 - gate)
    q_scale, k_scale = ((t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    qn, kn = chunks_of(q * q_scale) * scale, chunks_of(k * k_scale)
    b, gc = chunks_of(beta.sigmoid()[..., None]), chunks_of(step).cumsum(-2)
    rows = Rows(qn, kn, chunks_of(v), b, gc, None, chunks_of(k_scale) if per_head else None)
    do = chunks_of(do)
    o, final, _, d = in_chunks(rows, q.new_zeros(H, K, V), do, dS, r)

    dg = tokens_of(d.g)
    if per_head:
        dg = dg.sum(-1, keepdim=True)
    dA_log = (dg * (step if per_head else slope * raw)).sum((0, 2))
    dg = dg * slope
    dq = d.q - qn / scale**2 * (do * o).sum(-1, keepdim=True)
    dk = d.k - kn * (d.y * (2 * d.v_new - b * rows.v)).sum(-1, keepdim=True)
    found = {
        "o": tokens_of(o),
        "dq": tokens_of(dq) * scale * q_scale,
        "dk": tokens_of(dk) * k_scale,
        "dv": tokens_of(d.v),
        "dg": dg[..., 0] if per_head else dg,
        "dbeta": tokens_of(d.b)[..., 0] * beta.sigmoid() * (1 - beta.sigmoid()),
    }
    found = {n: r(n, t)[None] for n, t in found.items()}
    sums = {"dA_log": dA_log, "ddt_bias": dg.sum(0).flatten()}
    return found | {"final_state": final[None], **sums}


def rounded_dplr(x: dict[str, Tensor], do: Tensor, dS: Tensor, r: Rounding) -> dict[str, Tensor]:
    """o, final_state and every gradient of `chunk_dplr_delta_rule`, by name, fp64.

    x: q, k, v, a, b, gk of one sequence, already rounded, gk a decay without a gate, and the
    initial state. do, dS: gradients of o and of the final state. A token has two rows, see
    fla_cp/ops/dplr.py. Decays must be those of chunks that take the path of a safe gate.
    """
    q, k, v, a, b, gk, S = (
        x[n].to(do.device).double()[0] for n in ("q", "k", "v", "a", "b", "gk", "initial_state")
    )
    (T, H, _), HV, scale = q.shape, v.shape[1], q.shape[-1] ** -0.5
    q, k, a, b = (t.repeat_interleave(HV // H, 1) for t in (q, k, a, b))

    def rows(one: Tensor | None, two: Tensor | None) -> Tensor:
        given = one if two is None else two
        pair = (torch.zeros_like(given) if t is None else t for t in (one, two))
        t = torch.stack([*pair], 1).flatten(0, 1)
        return chunks_of(torch.nn.functional.pad(t, (0, 0, 0, 0, 0, -len(t) % C)))

    gc = rows(gk, None).cumsum(-2)
    ones = gc.new_ones(len(gc), 1, 1, 1)
    chunks = Rows(rows(None, q * scale), rows(b, k), rows(None, v), ones, gc, rows(-a, None))
    do = rows(None, r("do", do.to(q)[0]))
    o, final, dS0, d = in_chunks(chunks, S, do, dS.to(q)[0], r)

    def of(t: Tensor, row: int) -> Tensor:
        """Of the first or second row of every token."""
        return tokens_of(t)[: 2 * T].unflatten(0, (T, 2))[:, row]

    def of_heads(t: Tensor) -> Tensor:
        return t.unflatten(1, (H, HV // H)).sum(2)

    found = {
        "o": of(o, 1),
        "dq": of_heads(of(d.q, 1)) * scale,
        "dk": of_heads(of(d.k, 1)),
        "dv": of(d.v, 1),
        "da": -of_heads(of(d.p, 0)),
        "db": of_heads(of(d.k, 0)),
        "dgk": of(d.g, 0),
    }
    states = {"final_state": final[None], "dinitial_state": dS0[None]}
    return {n: r(n, t)[None] for n, t in found.items()} | states


def relative(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """|actual - exact| / |exact| in Euclidean norms, by name."""
    return {
        n: ((actual[n].double() - t).norm() / t.double().norm()).item() for n, t in exact.items()
    }


LINEAR = ("o", "final_state", "dv")
"""Results that depend only on the scans, which round equally in all kernels."""

NAMES = (*LINEAR, "dq", "dk", "dg", "dbeta")


def over_budget(
    actual: dict[str, Tensor],
    exact: dict[str, Tensor],
    right: dict[str, Tensor],
    names: tuple[str, ...] = NAMES,
) -> dict[str, float]:
    """Errors by name, as multiples of the errors of `right`, that exceed BUDGET or are NaN.

    right: the result of `rounded`.
    """
    errors, expected = relative(actual, exact), relative(right, exact)
    shares = {n: errors[n] / expected[n] for n in names}
    return {n: share for n, share in shares.items() if not share <= BUDGET}


def results(op: Callable, x: dict[str, Tensor], do: Tensor, keywords: dict) -> dict[str, Tensor]:
    """o, the final state and the gradients for the gradient do of o, by name."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    o, final = op(**leaves, **keywords, output_final_state=True)[:2]
    grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype), allow_unused=True)
    found = {f"d{n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
    return {"o": o.detach(), "final_state": final.detach(), **found}


def inputs(
    case: Case, per_head: bool, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Tensor], dict]:
    """The inputs of the operator, and its keywords.

    per_head: one decay a head, that of the first channel, and no bound.
    """
    x = {n: t.to(device) for n, t in case.inputs(dtype=dtype).items()}
    keywords = case.keywords
    if per_head:
        x["g"], x["dt_bias"] = x["g"][..., 0].contiguous(), x["dt_bias"][:: case.K].contiguous()
        keywords = {n: k for n, k in keywords.items() if n not in ("safe_gate", "lower_bound")}
    return x, keywords

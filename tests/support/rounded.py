"""KDA in fp64 with operands rounded where the kernels round theirs.

The result has the error that half precision costs for these inputs, in kernels that lose nothing
else. If keys are nearly parallel, o is a small difference of large terms, and a tolerance relative
to o says nothing about the error to expect; this does. Source: docs/design.md, "Chunk form". Names
are those of fla_cp/kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.cases import PACKED, Case
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
    (T, H, K), V, per_head = q.shape, v.shape[-1], raw.dim() == 2
    N, scale, device = T // C, K**-0.5, q.device
    do, dS = (w.to(device).double() for w in into or weights(case))

    def chunks(t: Tensor) -> Tensor:
        return t.unflatten(0, (N, C)).transpose(1, 2)  # [N, H, C, ..]

    def tokens(t: Tensor) -> Tensor:
        return t.transpose(1, 2).flatten(0, 1)

    rate = A_log.exp()[:, None]
    if per_head:
        raw = raw[..., None] + dt_bias[:, None]
        step, slope = -rate * torch.nn.functional.softplus(raw), -rate * torch.sigmoid(raw)
    else:
        raw, bound = raw + dt_bias.view(H, K), case.keywords["lower_bound"]
        gate = torch.sigmoid(rate * raw)
        step, slope = bound * gate, bound * rate * gate * (1 - gate)
    gc = chunks(step).cumsum(-2)
    q_scale, k_scale = ((t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    qn, kn, vc, do = chunks(q * q_scale) * scale, chunks(k * k_scale), chunks(v), chunks(do[0])
    b = chunks(beta.sigmoid())[..., None]
    end, decay = gc[..., -1:, :], gc[..., -1, :].exp()[..., None]
    qg, k_decayed = r("qg", qn * gc.exp()), r("k_decayed", kn * gc.exp())
    kg = r("kg", kn * (end - gc).exp())

    def written(n: int) -> Tensor:
        """The contribution of chunk n to the state."""
        if per_head:  # k is not scaled; its factor multiplies v_new, which is rounded once more
            factor = chunks(k_scale)[n] * (end - gc)[n].exp()
            return chunks(k)[n].mT @ r("w", factor * v_new[n])
        return kg[n].mT @ v_new[n]

    def scores(rows: Tensor) -> Tensor:
        halves = []
        for n in (0, C // 2):
            middle, half = gc[..., n + 15 : n + 16, :], slice(n, n + C // 2)
            col = r("column", kn[..., half, :] * (middle - gc[..., half, :]).exp())
            row = rows * (gc - middle).clamp(max=80.0).exp()
            halves.append(r("row", row) @ col.mT)
        return torch.cat(halves, -1).tril(-1)

    eye = torch.eye(C, dtype=q.dtype, device=device)
    inverse = torch.linalg.solve_triangular(eye + b * scores(kn), eye, upper=False)
    Aqk = r("Aqk", scores(qn) + torch.diag_embed((qn * kn).sum(-1)))
    inverse = r("T", inverse)

    S = q.new_zeros(H, K, V)
    o, h, v_new = (q.new_empty(N, H, n, V) for n in (C, K, C))
    for n in range(N):
        h[n] = r("S", S)
        fresh = inverse[n] @ r("r", b[n] * (vc[n] - k_decayed[n] @ h[n]))
        v_new[n] = r("v_new", fresh)
        o[n] = qg[n] @ h[n] + Aqk[n] @ r("v_new of o", fresh)
        S = decay[n] * S + written(n)
    final, o = S, r("o", o)

    dh, y, yn = torch.empty_like(h), torch.empty_like(o), torch.empty_like(o)
    dS = dS[0]
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
    first = (torch.arange(C, device=device) < C // 2)[:, None]
    near = torch.where(first, n0, n1)
    f = (gc - near).exp()
    column = r("column", kn / f)
    far = torch.where(first, column * (n1 - n0).exp(), column)

    def of_rows(states: Tensor, dA: Tensor) -> Tensor:
        return near.exp() * states + torch.where(first, dA @ column, dA @ far)

    def of_columns(dA: Tensor, row: Tensor) -> Tensor:
        shifted = torch.where(first, row, row * (n1 - n0).exp())
        return torch.where(first, dA.mT @ shifted, dA.mT @ row)

    dq, drow = of_rows(do @ h.mT, dAqk), of_rows(-(y @ h.mT), dAkk)
    into_end = (end - near).exp() * (v_new @ dh.mT)
    row_q, row_k = r("row", qn * f), r("row", b * kn * f)
    dcolumn = into_end + of_columns(dAqk, row_q) + of_columns(dAkk, row_k)
    dgc = row_q * dq + row_k * drow - column * dcolumn
    dgc[..., -1, :] += (h * dh).sum(-1) * decay[..., 0] + (column * into_end).sum(-2)
    dg = tokens(dgc.flip(-2).cumsum(-2).flip(-2))
    if per_head:
        dg = dg.sum(-1, keepdim=True)
    dA_log = (dg * (step if per_head else slope * raw)).sum((0, 2))
    dg = dg * slope

    dq = dq * f + diagonal * kn
    dk = diagonal * qn + drow * f * b + dcolumn / f
    dbeta = (vc * y).sum(-1, keepdim=True) + (kn * drow * f).sum(-1, keepdim=True)
    dq -= qn / scale**2 * (do * o).sum(-1, keepdim=True)
    dk -= kn * (y * (2 * v_new - b * vc)).sum(-1, keepdim=True)
    found = {
        "o": tokens(o),
        "dq": tokens(dq) * scale * q_scale,
        "dk": tokens(dk) * k_scale,
        "dv": tokens(b * y),
        "dg": dg[..., 0] if per_head else dg,
        "dbeta": tokens(dbeta)[..., 0] * beta.sigmoid() * (1 - beta.sigmoid()),
    }
    found = {n: r(n, t)[None] for n, t in found.items()}
    sums = {"dA_log": dA_log, "ddt_bias": dg.sum(0).flatten()}
    return found | {"final_state": final[None], **sums}


def relative(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """|actual - exact| / |exact| in Euclidean norms, by name."""
    return {
        n: ((actual[n].double() - t).norm() / t.double().norm()).item() for n, t in exact.items()
    }


BUDGET = 1.25
"""A kernel's error may be this multiple of the error from rounding its operands alone, since it may
order and split sums in another way. Measured on an H200: 0.95 to 1.10 for every output and
gradient except those of A_log and dt_bias, which are sums of few numbers."""


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

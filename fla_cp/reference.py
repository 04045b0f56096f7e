"""The token recurrence of docs/design.md, one token after another: the reference of the tests.

It shares no code with the chunk form, is differentiable by autograd, and is slow. Use it in fp64.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fla_cp.rule import NORM_EPS


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    p: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    num_householder: int = 1,
    removal: bool = True,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final states [N, HV, K, V] of any member of the family.

    g: [B, T, HV, K], or [B, T, HV] for one decay a head. p: if given, it reads from the state
    before the decay what is removed. Otherwise k reads it after the decay, or nothing is removed
    with removal=False. a, b: for DPLR; what a reads before the decay is added along key b. k, v and
    beta have num_householder rows a token. Other arguments are those of `chunk_kda`; states are
    [K, V].
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q, k = (_unit(x) for x in (q, k))
        p = None if p is None else _unit(p)
    if g.ndim == 3:
        g = g[..., None]
    if use_gate_in_kernel:
        raw = g if dt_bias is None else g + dt_bias.view(HV, -1)
        rate = raw.new_ones(HV, 1) if A_log is None else A_log.exp().view(HV, 1)
        if lower_bound is None:
            g = -rate * (torch.log1p(torch.exp(-raw.abs())) + raw.clamp(min=0))
        else:
            g = lower_bound / (1 + torch.exp(-rate * raw))
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    elif use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + torch.exp(-beta))

    rows = [(row, 0, T) for row in range(B)]
    if cu_seqlens is not None:
        rows = [(0, lo, hi) for lo, hi in pairwise(cu_seqlens)]
    head = torch.arange(HV, device=q.device) // (HV // H)
    outputs, finals = [], []
    for n, (row, lo, hi) in enumerate(rows):
        S = q.new_zeros(HV, K, V) if initial_state is None else initial_state[n]
        for t in range(lo, hi):
            before, S = S, g[row, t].exp()[..., None] * S
            if a is not None and b is not None:
                read = torch.einsum("hk,hkv->hv", a[row, t, head], before)
                S = S + torch.einsum("hk,hv->hkv", b[row, t, head], read)
            for i in range(t * num_householder, (t + 1) * num_householder):
                k_i, delta = k[row, i, head], v[row, i]
                if p is not None:
                    delta = delta - torch.einsum("hk,hkv->hv", p[row, i, head], before)
                elif removal and a is None:
                    delta = delta - torch.einsum("hk,hkv->hv", k_i, S)
                S = S + torch.einsum("hk,hv->hkv", k_i, beta[row, i, :, None] * delta)
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[row, t, head], S))
        finals.append(S)
    o = torch.stack(outputs) if outputs else v.new_zeros(0, HV, V)
    return o.view(B, T, HV, V), torch.stack(finals)

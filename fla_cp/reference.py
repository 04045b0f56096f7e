"""The token recurrence of docs/design.md, one token after another: the oracle of the tests.

It shares nothing with the chunk form, is differentiable by autograd, and is slow. Use fp64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .rule import NORM_EPS


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
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
    """o [B, T, HV, V] and the final states [N, HV, K, V]; arguments as `chunk_kda`, states
    [K, V]."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q = q / (q.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
        k = k / (k.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    if use_gate_in_kernel:
        raw = g if dt_bias is None else g + dt_bias.view(HV, K)
        rate = raw.new_ones(HV, 1) if A_log is None else A_log.exp().view(HV, 1)
        if lower_bound is None:
            g = -rate * (torch.log1p(torch.exp(-raw.abs())) + raw.clamp(min=0))
        else:
            g = lower_bound / (1 + torch.exp(-rate * raw))
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + torch.exp(-beta))

    rows = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        rows = [(0, lo, hi) for lo, hi in pairwise(cu_seqlens)]
    head = torch.arange(HV) // (HV // H)
    outputs, finals = [], []
    for n, (b, lo, hi) in enumerate(rows):
        S = q.new_zeros(HV, K, V) if initial_state is None else initial_state[n]
        for t in range(lo, hi):
            k_t, q_t = k[b, t, head], q[b, t, head]
            S = g[b, t].exp()[..., None] * S
            removed = torch.einsum("hk,hkv->hv", k_t, S)
            S = S + torch.einsum("hk,hv->hkv", k_t, beta[b, t, :, None] * (v[b, t] - removed))
            outputs.append(scale * torch.einsum("hk,hkv->hv", q_t, S))
        finals.append(S)
    o = torch.stack(outputs) if outputs else v.new_zeros(0, HV, V)
    return o.view(B, T, HV, V), torch.stack(finals)

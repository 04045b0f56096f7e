"""The recurrence token by token, all sequences in parallel: forward only."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs, prepare
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.device_tables import to_device
from fla_cp.rule import DeltaRule


class Sequences(NamedTuple):
    """Which tokens form a sequence. number: how many sequences there are, N. offsets: int32 or
    int64 [N+1], as the caller gave them, or None for sequences of equal length. host: the same on
    the host, or None."""

    number: int
    offsets: Tensor | None = None
    host: Tensor | None = None

    def bounds(self, tokens: int) -> list[int]:
        """The N+1 offsets on the host, checked. It may have to wait for the device."""
        if self.offsets is None:
            return list(range(0, tokens + 1, tokens // self.number))
        values: list[int] = (self.offsets if self.host is None else self.host).tolist()
        check_offsets("cu_seqlens", values, tokens)
        return values


def recurrent(
    rule: DeltaRule, x: Inputs, S0: Tensor | None, S_end: Tensor | None, sequences: Sequences
) -> Tensor:
    """o [T, HV, V] in v's dtype; writes the final states to S_end unless it is None.

    S0, S_end: [N, HV, K, V], or [N, HV, V, K] with rule.state_v_first, fp32 (fp64); they may be
    the same memory. Inside, sequences are sorted by length, longest first, so that each step
    updates a slice of the states.
    """
    bounds = sequences.bounds(len(x.q))
    lengths = [b - a for a, b in pairwise(bounds)]
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    start = to_device([bounds[n] for n in order], torch.int64, x.q.device)

    t = prepare(rule, x)
    (HV, V), K = t.v.shape[1:], t.k.shape[-1]
    group = HV // t.k.shape[1]
    q, k = (d.repeat_interleave(group, 1) for d in (rule.scale * t.q, t.k))
    p = None if t.p is None else t.p.repeat_interleave(group, 1)
    decay = rule.exp(t.g * rule.gate_unit)
    if S0 is None:
        S = t.v.new_zeros(len(order), HV, K, V)
    else:
        S = (S0.mT if rule.state_v_first else S0)[order]
    o = torch.empty_like(t.v)
    for step in range(lengths[order[0]]):
        alive = sum(length > step for length in lengths)
        i = start[:alive] + step
        S_i = decay[i][..., None] * S[:alive]
        u = t.v[i]
        if rule.removal == "k":
            u = u - (k[i][..., None] * S_i).sum(-2)
        elif p is not None:  # p reads the state before the decay
            u = u - (p[i][..., None] * S[:alive]).sum(-2)
        u = t.beta[i][..., None] * u
        S_i += k[i][..., None] * u[..., None, :]
        o[i] = (q[i][..., None] * S_i).sum(-2)
        S[:alive] = S_i
    if S_end is not None:
        final = S_end.mT if rule.state_v_first else S_end
        final[order] = S
    return o.to(x.v.dtype)

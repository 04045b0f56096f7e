"""The recurrence token by token, all sequences in parallel: forward only."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fla_cp.kernels.torch.intra import Inputs, prepare
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.device_tables import to_device
from fla_cp.rule import DeltaRule


class Pool(NamedTuple):
    """Where the states of sequences are in a pool of P states, of which S0 and S_end are the whole.

    of_tokens: int32 or int64 [N, S], places in the pool. With `drafts`, the state after token t of
    sequence n is written to of_tokens[n, t]; otherwise S is 1, and the final state is written to
    the place from which the first one was read. A sequence starts from the state in its column
    accepted_tokens[n] - 1, or without `accepted_tokens` [N] in column 0. A place that is not from 0
    to P-1 is none: it reads as zeros, and nothing is written there.
    rows: how many steps of the recurrence a token has. Its last step leaves its state.

    `places` and `accepted` are the same with a column for each step, for a kernel that knows steps
    only. For rows = 2, of_tokens [[6, 1]] has the places [[-1, 6, -1, 1]], and two accepted tokens
    are four accepted steps. They are computed on the device, by three or four small operations.
    """

    of_tokens: Tensor
    accepted_tokens: Tensor | None
    drafts: bool
    rows: int = 1

    @property
    def places(self) -> Tensor:
        """[N, S * rows] with drafts, -1 after all steps but the last of a token; else of_tokens."""
        if not self.drafts or self.rows == 1:
            return self.of_tokens
        return pad(self.of_tokens[..., None], (self.rows - 1, 0), value=-1).flatten(1)

    @property
    def accepted(self) -> Tensor | None:
        """[N], from rows to S * rows, with drafts and several rows; else accepted_tokens."""
        if not self.drafts or self.rows == 1:
            return self.accepted_tokens
        N, S = self.of_tokens.shape
        if self.accepted_tokens is None:
            return self.of_tokens.new_full((N,), self.rows)
        return self.accepted_tokens.clamp(1, S) * self.rows


class Sequences(NamedTuple):
    """Which tokens form a sequence. number: how many sequences there are, N. offsets: int32 or
    int64 [N+1], as the caller gave them, or None for sequences of equal length. host: the same on
    the host, or None. pool: None if sequence n has state n."""

    number: int
    offsets: Tensor | None = None
    host: Tensor | None = None
    pool: Pool | None = None

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
    the same memory, and are with a pool, [P, ..]. Inside, sequences are sorted by length, longest
    first, so that each step updates a slice of the states.
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
    places = _Places.of(sequences.pool, len(order) if S0 is None else len(S0), lengths, order)
    if S0 is None:
        S = t.v.new_zeros(len(order), HV, K, V)
    else:
        S = (S0.mT if rule.state_v_first else S0)[places.first]
        S[places.missing] = 0.0
    final = None if S_end is None else S_end.mT if rule.state_v_first else S_end
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
        if final is not None and step < len(places.after):
            which, where = places.after[step]
            final[where] = S[which]
    if final is not None:
        which, where = places.last
        final[where] = S[which]
    return o.to(x.v.dtype)


Rows = tuple[list[int], list[int]]
"""States in the order of computation, and the places in memory to which they are written."""


class _Places(NamedTuple):
    """The places of sequences in the order of computation. first: where each state is read.
    missing: those of them that have none. after: what is written after each step; last: at the
    end."""

    first: list[int]
    missing: list[int]
    after: list[Rows]
    last: Rows

    @classmethod
    def of(cls, pool: Pool | None, size: int, lengths: list[int], order: list[int]) -> "_Places":
        if pool is None:
            return cls(order, [], [], (list(range(len(order))), order))
        places, columns = pool.of_tokens.tolist(), pool.of_tokens.shape[1]
        accepted = [1] * len(order)
        if pool.accepted_tokens is not None:
            accepted = pool.accepted_tokens.tolist()
        if not all(1 <= n <= columns for n in accepted):
            raise ValueError(
                f"num_accepted_tokens must be from 1 to {columns}, the columns of "
                f"ssm_state_indices, got {accepted}"
            )
        tokens = [length // pool.rows for length in lengths]
        if pool.drafts and max(tokens) > columns:
            raise ValueError(
                f"ssm_state_indices must have a column for each of {max(tokens)} tokens, got "
                f"{columns}"
            )
        given = sorted(p for row in places for p in row if p >= 0)
        if given and given[-1] >= size:
            raise ValueError(
                f"ssm_state_indices must be less than the {size} states of initial_state, got "
                f"{given[-1]}"
            )
        twice = next((a for a, b in pairwise(given) if a == b), None)
        if twice is not None:
            raise ValueError(f"ssm_state_indices must name each state once, got {twice} twice")
        start = [places[n][accepted[n] - 1] for n in order]

        def rows(found: list[tuple[int, int]]) -> Rows:
            kept = [(i, p) for i, p in found if p >= 0]
            return [i for i, _ in kept], [p for _, p in kept]

        ends: list[tuple[int, int]] = [] if pool.drafts else [*enumerate(start)]
        after: list[Rows] = []
        for t in range(max(tokens) if pool.drafts else 0):
            written = [(i, places[n][t]) for i, n in enumerate(order) if tokens[n] > t]
            after += [*[([], [])] * (pool.rows - 1), rows(written)]
        return cls(
            first=[max(p, 0) for p in start],
            missing=[i for i, p in enumerate(start) if p < 0],
            after=after,
            last=rows(ends),
        )

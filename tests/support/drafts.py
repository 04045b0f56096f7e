"""Calls with draft tokens on a pool of states, of any member, and the same token by token in fp64.

A server decodes like this: a call has some draft tokens of each sequence, and the next call goes on
from the state after those that were accepted.
"""

import dataclasses
from itertools import pairwise, repeat

import torch

import fla_cp
from fla_cp.reference import recurrence
from fla_cp.rule import accumulator
from tests.support.members import BY_NAME, Member

SERVED = BY_NAME | {"rwkv7": Member("rwkv7", per_head=False, beta=False, dplr=True)}
"""The members, with RWKV-7: DPLR with a scale of one and names of its own."""
FULL = 7.0
"""What is in a pool's states that no sequence has."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """Calls one after the other. places: ssm_state_indices of all of them, [N][S], in a pool of
    `size` states; column 0 has the initial states. rounds: for each call the range of tokens, and
    num_accepted_tokens. cu: offsets of packed sequences, the same in each round."""

    places: tuple[tuple[int, ...], ...]
    size: int
    rounds: tuple[tuple[range, tuple[int, ...] | None], ...]
    cu: tuple[int, ...] | None = None

    def pool(self, x):
        """The states before the first call, [size, HV, K, V]."""
        pool = x["initial_state"].new_full((self.size, *x["initial_state"].shape[1:]), FULL)
        for n, row in enumerate(self.places):
            if row[0] >= 0:
                pool[row[0]] = x["initial_state"][n]
        return pool


ROWS = Serving(
    places=((6, 1, 2), (0, 8, -1), (3, 4, 5)),
    size=9,
    # in the last round the second sequence accepts a token that has no state
    rounds=((range(3), None), (range(3, 5), (3, 1, 2)), (range(1, 4), (1, 3, 2))),
)
"""For three rows of five tokens."""
PACKED = Serving(
    places=((6, 1, 2, 4, 9), (0, 10, 11, 12, 13), (3, -1, 7, 8, 5)),
    size=15,
    rounds=((range(9), None), (range(9), (4, 1, 5)), (range(9), (1, 3, 2))),
    cu=(0, 4, 4, 9),
)
"""For nine tokens, of which one sequence has fewer than columns, and one none at all."""


def tokens(member, x, which):
    """The inputs of some tokens."""
    by_row = ("k", "v", "p", "beta")
    found = dict(x)
    for n in member.arguments:
        rows = member.steps if n in by_row else 1
        found[n] = x[n][:, which.start * rows : which.stop * rows]
    return found


def sequences(member, serving, x):
    """The inputs of each sequence alone, [1, T, ..]."""
    if serving.cu is not None:
        return [tokens(member, x, range(a, b)) for a, b in pairwise(serving.cu)]
    return [
        {i: t[n : n + 1] if i in member.arguments else t for i, t in x.items()}
        for n in range(len(serving.places))
    ]


def serve(member, serving, x, keywords, impl, v_first=False, device="cpu"):
    """o and the pool [size, HV, K, V] after each round, by name."""
    x = {n: t.to(device) for n, t in x.items()}
    pool = serving.pool(x).to(accumulator(x["q"].dtype))
    pool = pool.mT.contiguous() if v_first else pool
    more = {"initial_state": pool, "inplace_final_state": True, "state_v_first": v_first}
    more |= {"num_householder": member.steps} if "product" in member.name else {}
    cu = None if serving.cu is None else torch.tensor(serving.cu, device=device)
    places = torch.tensor(serving.places, dtype=torch.int32, device=device)
    found = {}
    for n, (which, accepted) in enumerate(serving.rounds):
        given = tokens(member, x, which) | more
        if member.name == "rwkv7":
            given["r"], given["w"] = given.pop("q"), given.pop("gk")
        o, final = getattr(fla_cp, f"fused_recurrent_{member.name}")(
            **given,
            **keywords,
            cu_seqlens=cu,
            ssm_state_indices=places,
            num_accepted_tokens=None if accepted is None else torch.tensor(accepted).to(device),
            impl=impl,
        )
        assert final is pool
        found |= {f"o {n}": o, f"pool {n}": (pool.mT if v_first else pool).clone()}
    return found


def expected(member, serving, x, keywords):
    """What `serve` finds, by the recurrence in fp64 of one token after the other."""
    x = {n: t.double() for n, t in x.items()}
    keywords = {n: v for n, v in keywords.items() if n != "use_exp2"}
    keywords |= {"num_householder": member.steps, "removal": member.beta}
    keywords |= {"scale": 1.0} if member.name == "rwkv7" else {}
    pool, found = serving.pool(x), {}
    for n, (which, accepted) in enumerate(serving.rounds):
        outs = []
        alone = sequences(member, serving, tokens(member, x, which))
        for row, column, y in zip(serving.places, accepted or repeat(1), alone, strict=False):
            place = row[column - 1]
            state = pool[place].clone() if place >= 0 else torch.zeros_like(pool[0])
            for t in range(y["q"].shape[1]):
                one = tokens(member, y, range(t, t + 1)) | {"initial_state": state[None]}
                one = {"g" if i == "gk" else i: z for i, z in one.items()}
                o, (state,) = recurrence(**one, **keywords)
                outs.append(o[0, 0])
                if row[t] >= 0:
                    pool[row[t]] = state
        rows = 1 if serving.cu is not None else len(serving.places)
        found |= {f"o {n}": torch.stack(outs).unflatten(0, (rows, -1))}
        found |= {f"pool {n}": pool.clone()}
    return found

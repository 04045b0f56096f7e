"""Draft tokens of members with several rows a token, on a GPU. checks.py has those of KDA."""

from __future__ import annotations

from itertools import product

from tests.gpu import checks
from tests.gpu.cases import BF16, FP32
from tests.support.drafts import ROWS, SERVED, serve
from tests.support.members import Call, draw

SIZES = ((64, 64), (128, 128))
MEMBERS = ("gated_delta_product2", "gated_delta_product3", "dplr_delta_rule")
DTYPES = BF16, FP32


def check_drafts() -> checks.Rows:
    """Outputs and the whole pool after each of three calls, which accept unequal numbers."""
    rows = []
    for key, (K, V), dtype, v_first in product(MEMBERS, SIZES, DTYPES, (False, True)):
        member = SERVED[key]
        x, keywords, _ = draw(member, Call(B=3, T=5, K=K, V=V, inside=True))
        x = {n: t.to(dtype if n in member.arguments else FP32) for n, t in x.items()}

        def call(
            x: checks.Named, impl: str, member=member, keywords=keywords, v_first=v_first
        ) -> checks.Named:
            return serve(member, ROWS, x, keywords, impl, v_first, checks.DEVICE)

        name = f"drafts {key} {'VK' if v_first else 'KV'}"
        rows.append({"K": K, "V": V, "case": name} | checks.judged(call, x, dtype))
    return rows

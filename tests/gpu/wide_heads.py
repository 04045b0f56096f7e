"""Heads that are cut into narrower ones, on a GPU: those of GLA and simple GLA with K = V = 512,
and those with one decay a head for which narrower kernels are faster."""

from __future__ import annotations

from unittest.mock import patch

from fla_cp.ops.wide_heads import Blocks
from tests.gpu import checks
from tests.gpu.cases import BF16, FP32
from tests.support.members import Call

SIZE = (512, 512, 300)
"""K, V, T."""

SPLIT_TOKENS = 2**15
"""Tokens of calls with 4 value heads, whose heads are split because the call is that large."""

SPLIT = (
    ("gated_delta_rule", 128, 256, None),
    ("gated_delta_rule", 128, 256, (0, 1, 66, 5000, 5000, SPLIT_TOKENS)),
    ("simple_gla", 256, 256, None),
)
"""Members, K, V and offsets of sequences of such calls."""


def check_wide(key: str) -> checks.Rows:
    """Outputs, states and gradients of chunks, and token by token. key: name of the member."""
    K, V, T = SIZE
    calls = ((T, BF16, False), (T, FP32, False), (1, BF16, True), (5, FP32, True))
    return [
        checks.check_member(key, K, V, tokens, dtype, stepwise=stepwise)
        for tokens, dtype, stepwise in calls
    ]


def check_split() -> checks.Rows:
    """Outputs, states and gradients of large calls, which must be split."""
    rows = []
    for key, K, V, cu in SPLIT:
        call = Call(T=SPLIT_TOKENS, H=2, HV=4, K=K, V=V, cu=cu, inside=True)
        name = f"{key} split" + " packed" * (cu is not None)
        with patch.object(Blocks, "of", side_effect=Blocks.of) as split:
            rows.append(checks.check_member(key, K, V, call.T, BF16, name=name, call=call))
        rows[-1]["ok"] &= split.called
        rows[-1]["splits"] = split.call_count
    return rows

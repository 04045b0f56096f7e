"""GLA and simple GLA with K = V = 512, whose heads are cut into parts, on a GPU."""

from __future__ import annotations

from tests.gpu import checks
from tests.gpu.cases import BF16, FP32

SIZE = (512, 512, 300)
"""K, V, T."""


def check_wide(key: str) -> checks.Rows:
    """Outputs, states and gradients of chunks, and token by token. key: name of the member."""
    K, V, T = SIZE
    calls = ((T, BF16, False), (T, FP32, False), (1, BF16, True), (5, FP32, True))
    return [
        checks.check_member(key, K, V, tokens, dtype, stepwise=stepwise)
        for tokens, dtype, stepwise in calls
    ]

"""What a kernel of softmax attention returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """o [Tq, H, V] in q's dtype; lse [H, Tq], the log of the sum of exponentials of each query's
    scores, fp32 (fp64 for fp64)."""

    o: Tensor
    lse: Tensor

"""The convolution with initial states, final states and a residual, on a GPU."""

from __future__ import annotations

from functools import partial

import torch

from fla_cp import causal_conv1d
from tests.gpu import checks
from tests.gpu.cases import BF16, FP16, FP32

CALLS = (
    (3, 1, 96, 4, None),
    (2, 300, 200, 2, None),
    (1, 1000, 1000, 4, (0, 1, 65, 65, 1000)),
    (1, 8192, 512, 4, None),
)
"""B, T, D, W, cu_seqlens: sequences shorter than W, an empty one, and long ones."""


def check_conv_states() -> checks.Rows:
    """y, the final states, and all gradients, those through the final states included."""
    gen = torch.Generator().manual_seed(0)
    rows = []
    for dtype in (BF16, FP16, FP32):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=gen).to(dtype)

        for B, T, D, W, cu in CALLS:
            N = B if cu is None else len(cu) - 1
            x = {"x": draw(B, T, D), "residual": draw(B, T, D), "initial_state": draw(N, D, W)}
            x |= {"weight": draw(D, W), "bias": draw(D)}
            dy, dfinal = draw(B, T, D), draw(N, D, W)
            offsets = None if cu is None else torch.tensor(cu, device=checks.DEVICE)

            def conv(
                x: checks.Named, impl: str, dy=dy, dfinal=dfinal, offsets=offsets
            ) -> checks.Named:
                leaves = checks.on_gpu(x)
                y, final = causal_conv1d(
                    **leaves,
                    activation="silu",
                    output_final_state=True,
                    cu_seqlens=offsets,
                    impl=impl,
                )
                into = [dy.to(y), dfinal.to(y)]
                grads = torch.autograd.grad([y, final], list(leaves.values()), into)
                found = {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
                return found | {"y": y.detach(), "final": final.detach()}

            row = checks.judged(conv, x, dtype, partial(checks.of_sums, dy=dy))
            rows.append({"case": f"conv states B={B} T={T} D={D} W={W} cu={cu}"} | row)
    return rows

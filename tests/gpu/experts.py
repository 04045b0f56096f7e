"""Checks of the mixture of experts, as in checks.py: torch's grouped products stand for the
kernels, and the loop over experts for the torch stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from fla_cp.nn import Experts, grouped
from tests.gpu import checks
from tests.gpu.cases import BF16

MIXTURES = {
    "Kimi": ((256, 128, 64, 8), {"routing": "sigmoid", "scale": 2.446, "shared_experts": 1}),
    "Qwen": ((256, 64, 128, 10), {"shared_experts": 1, "shared_gate": True}),
    "one expert": ((128, 64, 1, 1), {"normalize": False, "routing": "sigmoid"}),
}
"""Sizes and options of `nn.Experts`."""

TOKENS = (1, 5, 1000)
"""With 1 or 5 tokens, most experts have none."""

PRODUCTS = 6
"""Grouped products of a forward and a backward: two, and two for each of these."""


def check_experts() -> checks.Rows:
    """y, the counts, the summed probabilities and all gradients."""
    rows, gen = [], torch.Generator().manual_seed(0)
    for name, (sizes, options) in MIXTURES.items():
        for T in TOKENS:
            x = {}
            for n, t in Experts(*sizes, **options).state_dict().items():
                kind, std = (t.dtype, 0.3) if "bias" in n else (BF16, t.shape[-1] ** -0.5)
                x[n] = (std * torch.randn(t.shape, generator=gen)).to(kind)
            x |= {n: torch.randn(1, T, sizes[0], generator=gen).to(BF16) for n in ("x", "dy")}
            call = partial(mixture, sizes=sizes, options=options)
            rows.append({"case": f"experts {name} T={T}"} | checks.judged(call, x, BF16))
    return rows


def mixture(x: checks.Named, impl: str, *, sizes: tuple, options: dict) -> checks.Named:
    x = {n: t.to(checks.DEVICE) for n, t in x.items()}
    inputs, dy = x.pop("x").requires_grad_(), x.pop("dy")
    layer = Experts(*sizes, **options).to(checks.DEVICE)
    layer.load_state_dict(x, assign=True)
    with products(impl == "triton") as called:
        y, statistics = layer(inputs)
        leaves = {"x": inputs, **dict(layer.named_parameters())}
        found = checks.with_gradients(y, leaves, dy)
    expected = PRODUCTS if impl == "triton" else 0
    assert called.call_count == expected, f"{called.call_count} grouped products, not {expected}"
    counts, probabilities = statistics
    return found | {"counts": counts.double(), "probabilities": probabilities.detach()}


@contextmanager
def products(wanted: bool) -> Iterator[mock.Mock]:
    """Counts torch's grouped products; wanted: or takes the loop in their place."""
    with mock.patch.object(grouped, "_grouped_mm", wraps=grouped._grouped_mm) as called:
        fits = grouped._fits if wanted else lambda *given: False
        with mock.patch.object(grouped, "_fits", fits):
            yield called

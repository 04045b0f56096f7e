"""Checks of the stages of a decoding step, as in checks.py."""

from functools import partial

import torch

from fla_cp.kernels import resolve
from fla_cp.kernels.torch.decoding import StepProduct
from tests.gpu import checks
from tests.gpu.cases import BF16, FP16, FP32

PRODUCTS = {
    "normed": (1, 6416, 2048, ("norm",)),
    "inputs": (2, 1000, 128, ("bias",)),
    "SwiGLU": (1, 2 * 1376, 512, ("norm", "swiglu")),
    "added": (1, 500, 5504, ("onto",)),
}
"""Inputs, rows and columns of a weight, and what stands around the product."""

BATCHES = (1, 4, 5, 64)
"""Sequences: one kernel up to four of them."""

UPDATES = ((1, 6144, 4), (5, 300, 3), (64, 2000, 8), (3, 100, 9))
"""N, D, W of the convolution of one more token."""


def check_decoding() -> checks.Rows:
    rows, gen = [], torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    for dtype in (BF16, FP16, FP32):
        for name, (G, R, C, parts) in PRODUCTS.items():
            for B in BATCHES:
                given = {"norm": draw(C), "bias": draw(G * R), "onto": draw(B, R)}
                x = {"x": draw(B, G * C + 64), "weight": draw(G, R, C) / C**0.5}
                x |= {part: given[part] for part in parts if part in given}
                call = partial(product, swiglu="swiglu" in parts)
                found = checks.judged(call, {n: t.to(dtype) for n, t in x.items()}, dtype, of_terms)
                rows.append({"case": f"decode {name} B={B}"} | found)
        for N, D, W in UPDATES:
            x = {"x": draw(N, D + 8), "cache": draw(N, D, W), "weight": draw(D, W), "bias": draw(D)}
            found = checks.judged(update, {n: t.to(dtype) for n, t in x.items()}, dtype)
            rows.append({"case": f"decode convolution N={N} D={D} W={W}"} | found)
    return rows


def product(x: checks.Named, impl: str, *, swiglu: bool) -> checks.Named:
    """The product of rows that are part of a wider tensor."""
    x = {n: t.to(checks.DEVICE) for n, t in x.items()}
    wide, weight = x.pop("x"), x.pop("weight")
    if "onto" in x:
        x["onto"] = x["onto"].clone()
    p = StepProduct(wide[:, : weight.shape[0] * weight.shape[2]], weight, swiglu=swiglu, **x)
    p = p._replace(eps=1e-5)
    return {"y": resolve(impl, wide.device, wide.dtype).step_product(p)}


def of_terms(x: checks.Named, actual: checks.Named, exact: checks.Named) -> checks.Named:
    """The error that a sum of as many terms as the weight has columns may have in fp32."""
    unit = torch.finfo(FP32).eps * x["weight"].shape[-1] ** 0.5
    return {"y": torch.full_like(exact["y"], unit * exact["y"].abs().max().item())}


def update(x: checks.Named, impl: str) -> checks.Named:
    x = {n: t.to(checks.DEVICE) for n, t in x.items()}
    cache = x["cache"].clone()
    inputs = x["x"][:, : cache.shape[1]]
    backend = resolve(impl, inputs.device, inputs.dtype)
    y = backend.conv_update(inputs, cache, x["weight"], x["bias"], True)
    return {"y": y, "cache": cache}

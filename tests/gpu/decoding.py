"""Checks of the stages of a decoding step, as in checks.py."""

from collections.abc import Callable
from functools import partial

import torch

from fla_cp.kernels import resolve
from fla_cp.kernels.torch.decoding import StepMixer, StepProduct
from fla_cp.rule import DeltaRule
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

MIXERS = {
    "KDA": (16, 16, 128, 128, {}),
    "KDA, other sizes": (3, 3, 96, 64, {"gate": "sigmoid", "lower_bound": -5.0}),
    "GDN": (4, 4, 128, 128, {"per_head": True}),
    "GLA": (2, 2, 64, 128, {"removal": "none", "beta_factor": None}),
    "three stages": (2, 4, 128, 128, {}),
}
"""Heads, value heads, K, V and options of the rule."""

UPDATES = ((1, 6144, 4), (5, 300, 3), (64, 2000, 8), (3, 100, 9))
"""N, D, W of the convolution of one more token."""


LOGITS = ((1, 32000), (64, 32000), (33, 151936), (5, 250))
"""Rows of logits and their numbers."""


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
        rows += [likeliest(draw(B, N + 8).to(dtype)[:, :N]) for B, N in LOGITS]
        for name, (H, HV, K, V, options) in MIXERS.items():
            for B in BATCHES:
                x = {"qkv": draw(B, 2 * H * K + HV * V + 8), "state": draw(B, HV, K, V)}
                D, per_head = 2 * H * K + HV * V, options.get("per_head")
                x |= {"window": draw(B, D, 4), "taps": draw(D, 4), "beta": draw(B, HV)}
                x |= {"decay": draw(B, HV if per_head else HV * K), "gate": draw(B, HV * V)}
                x = {n: t.to(dtype) if n != "state" else t for n, t in x.items()}
                x |= {"norm": draw(V).to(dtype), "A_log": draw(HV) / 4}
                x["dt_bias"] = draw(HV if per_head else HV * K) - 1
                call = partial(mixer, H=H, options=options)
                found = checks.judged(call, x, dtype, partial(of_decays, call, dtype))
                rows.append({"case": f"decode mixer {name} B={B}"} | found)
    return rows


def likeliest(logits: torch.Tensor) -> dict:
    """Rows of logits, some of whose largest numbers come several times or are not numbers: how many
    of their indices are wrong."""
    B, N = logits.shape
    logits[::3, N // 2 :: N // 7] = logits.amax(1, keepdim=True)[::3]
    logits[1::3, N // 3] = float("nan")
    there = logits.to(checks.DEVICE)
    found = resolve("triton", there.device, there.dtype).argmax(there).cpu()
    wrong = int((found != logits.double().argmax(1)).sum())
    case, dtype = f"decode argmax B={B} N={N}", str(logits.dtype).removeprefix("torch.")
    return {"case": case, "dtype": dtype, "changed": wrong, "ok": wrong == 0}


def of_decays(
    call: Callable[[checks.Named, str], checks.Named],
    dtype: torch.dtype,
    x: checks.Named,
    actual: checks.Named,
    exact: checks.Named,
) -> checks.Named:
    """The errors that decays in fp32 may have, see `checks.of_approximations`."""
    return checks.of_approximations(call, x, exact) if dtype == FP32 else {}


def mixer(x: checks.Named, impl: str, *, H: int, options: dict) -> checks.Named:
    """Convolution, recurrence and gated norm; q, k and v are part of a wider tensor."""
    x = {n: t.to(checks.DEVICE) for n, t in x.items()}
    state, window = x["state"].clone(), x["window"].clone()
    qkv = x["qkv"][:, : window.shape[1]]
    rule = {"gate": "softplus", "qk_l2norm": True, "beta_factor": 1.0} | options
    m = StepMixer(
        rule=DeltaRule(state.shape[2] ** -0.5, **rule),
        qkv=qkv,
        window=window,
        taps=x["taps"],
        bias=None,
        state=state,
        decay=x["decay"],
        gate=x["gate"],
        beta=x["beta"] if rule["beta_factor"] else None,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        norm=x["norm"],
        eps=1e-5,
        activation="silu" if H < 16 else "sigmoid",
    )
    assert m.key_heads == H
    y = resolve(impl, qkv.device, qkv.dtype).step_mixer(m)
    return {"y": y, "state": state, "window": window}


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

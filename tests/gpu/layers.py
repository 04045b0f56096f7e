"""Checks of the gated norm and of layers whose calls are replayed, as in checks.py."""

from functools import partial

import torch

from fla_cp import nn
from fla_cp.kernels import resolve
from fla_cp.nn import one_call
from tests.gpu import checks
from tests.gpu.cases import BF16, FP16, FP32

NORMS = ((1, 1, 16), (63, 3, 96), (1000, 4, 128), (8192, 18, 128), (300, 2, 256))
"""T, H, V of the gated norm."""

LAYERS = ((2, 300), (1, 1000))
"""B, T of the layers."""

HIDDEN, HEADS = 256, {"num_heads": 2, "num_v_heads": 4, "head_dim": 128}

CALLS = 4
"""Calls of a layer; the third is the first one that is replayed."""


def check_norm() -> checks.Rows:
    """Both stages, with a gate that is part of a wider tensor."""
    rows, gen = [], torch.Generator().manual_seed(0)
    for dtype in (BF16, FP16, FP32):
        for T, H, V in NORMS:
            shapes = {"x": (T, H, V), "gate": (T, 2 * H * V), "weight": (V,), "dy": (T, H, V)}
            x = {n: torch.randn(*s, generator=gen).to(dtype) for n, s in shapes.items()}
            for name in ("sigmoid", "silu"):
                row = checks.judged(partial(norm, activation=name), x, dtype, of_rows)
                rows.append({"case": f"norm T={T} H={H} V={V} {name}"} | row)
    return rows


def norm(x: checks.Named, impl: str, *, activation: str) -> checks.Named:
    x = {n: t.to(checks.DEVICE) for n, t in x.items()}
    o, dy = x["x"], x["dy"]
    gate = x["gate"][:, : o[0].numel()].view(o.shape)
    backend, given = resolve(impl, o.device, o.dtype), (o, gate, x["weight"], 1e-5, activation)
    found = backend.gated_norm(*given), *backend.gated_norm_bwd(*given, dy)
    return dict(zip(("y", "dx", "dgate", "dweight"), found, strict=True))


def of_rows(x: checks.Named, actual: checks.Named, exact: checks.Named) -> checks.Named:
    """The error that dweight may have: it adds up a term of each row in fp32."""
    rows = x["x"][..., 0].numel()
    return {"dweight": torch.full_like(exact["dweight"], torch.finfo(FP32).eps * rows)}


def check_layers() -> checks.Rows:
    """The last of several calls: y and all gradients."""
    rows = []
    for kind in ("KimiDeltaAttention", "GatedDeltaNet", "GatedLinearAttention"):
        for B, T in LAYERS:
            torch.manual_seed(0)
            made = getattr(nn, kind)(HIDDEN, **HEADS)
            x = {
                n: p.detach().to(FP32 if "core" in n else BF16) for n, p in made.named_parameters()
            }
            x |= {n: torch.randn(B, T, HIDDEN).to(BF16) for n in ("x", "dy")}
            row = checks.judged(partial(layer, kind=kind), x, BF16, of_core)
            rows.append({"case": f"layer {kind} B={B} T={T}"} | row)
    return rows


def of_core(x: checks.Named, actual: checks.Named, exact: checks.Named) -> checks.Named:
    """The errors that results may have beside those of an operator.

    Gradients of the gate's parameters may err by 2% of the largest: they are sums that cancel, and
    the checks of the operators judge their rounding. In fp32 every result may err by 2^-20 of the
    largest element: products, convolutions and norms add up their terms in another order than the
    torch stages do, and both errors are of that size.
    """
    share = 2**-20 if actual["y"].dtype == FP32 else 0.0
    shares = {n: 0.02 if "core." in n else share for n in exact}
    return {n: torch.full_like(t, shares[n] * t.abs().max().item()) for n, t in exact.items()}


def layer(x: checks.Named, impl: str, *, kind: str) -> checks.Named:
    x = {n: t.to(checks.DEVICE) for n, t in x.items()}
    inputs, dy = x.pop("x"), x.pop("dy")
    made = getattr(nn, kind)(HIDDEN, **HEADS, impl=impl).to(checks.DEVICE)
    for name, p in list(made.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, torch.nn.Parameter(x[name].to(p.device)))
    if inputs.dtype == torch.float64:
        made.double()
    one_call._known.clear()
    for _ in range(CALLS if impl == "triton" else 1):
        leaf = inputs.clone().requires_grad_()
        y = made(leaf)
        leaves = {"x": leaf, **dict(made.named_parameters())}
        found = checks.with_gradients(y, leaves, dy)
    if impl == "triton" and checks.DEVICE == "cuda":
        (known,) = one_call._known.values()
        for direction in (known.kind.forward, known.kind.backward):
            assert not any(isinstance(p, str) for p in direction.known.values()), "not replayed"
    return found

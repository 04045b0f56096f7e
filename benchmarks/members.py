"""The members of the family as `benchmarks.ops` calls them, and who else has them.

KDA takes everything inside the operator, and so does the gated delta rule as "gdn-layer". The
others take g, a log decay, and beta as they act, since that is what their peers take; q and k are
normalised inside where the peer can. RWKV-7 has heads of 64 channels in its models.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import LOWER_BOUND, Shape


class Member(NamedTuple):
    """One row of the benchmark.

    name: our operator. peers: "module:function" by name. The other fields are its tensors; whether
    it has one decay a head; whether gate and beta's sigmoid, and the norm, are inside; Householder
    steps; rows that the operator makes of a token.
    """

    ours: str
    peers: dict[str, str]
    arguments: tuple[str, ...] = ("q", "k", "v", "g", "beta")
    per_head: bool = True
    inside: bool = False
    norm: bool = True
    steps: int = 1
    rows: int = 1

    @property
    def removes(self) -> bool:
        return bool({"beta", "a"} & set(self.arguments))


GLA = ("q", "k", "v", "g")
MEMBERS = {
    "kda": Member("chunk_kda", {"fla": "fla.ops.kda:chunk_kda"}, per_head=False, inside=True),
    "gdn": Member(
        "chunk_gated_delta_rule",
        {
            "flashqla": "flash_qla:chunk_gated_delta_rule",
            "fla": "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
        },
    ),
    "gdn-layer": Member(  # the call of a layer: FlashQLA's gate and sigmoid are computed in torch
        "chunk_gated_delta_rule",
        {"flashqla": "benchmarks.members:flashqla_of_a_layer"},
        inside=True,
    ),
    "comba": Member(
        "chunk_comba",
        {"fla": "fla.ops.comba:chunk_comba"},
        arguments=("q", "k", "v", "p", "g", "beta"),
    ),
    "rwkv7": Member(
        "chunk_rwkv7",
        {"fla": "fla.ops.rwkv7:chunk_rwkv7"},
        arguments=("r", "w", "k", "v", "a", "b"),
        per_head=False,
        norm=False,
        rows=2,
    ),
    "gdp2": Member(
        "chunk_gated_delta_product",
        {"fla": "fla.ops.gated_delta_product:chunk_gated_delta_product"},
        steps=2,
    ),
    "gla": Member(
        "chunk_gla", {"fla": "fla.ops.gla:chunk_gla"}, arguments=GLA, per_head=False, norm=False
    ),
    "simple_gla": Member(
        "chunk_simple_gla", {"fla": "fla.ops.simple_gla:chunk_simple_gla"}, GLA, norm=False
    ),
}


def flashqla_of_a_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    **_: object,
) -> tuple:
    """FlashQLA on logits of gate and beta: torch computes these, and FlashQLA the norm."""
    from flash_qla import chunk_gated_delta_rule

    g = -A_log.exp() * torch.nn.functional.softplus(g.float() + dt_bias)
    return chunk_gated_delta_rule(q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True)


DECAYS: dict[str, float | None] = {
    "strong": 0.0,
    "drawn": None,
    "weak": math.log(0.01 / -LOWER_BOUND) - 0.5,
}
"""Kinds of decays, and their b: a log decay is LOWER_BOUND sigmoid(n + b) with n from a standard
normal distribution. Its mean is -2.5 a token for b = 0 (strong), and for the last one -0.01 (weak),
since e^(n + b) has the mean e^(b + 1/2). None: as `draws` makes them by itself. For KDA that has
the mean -2.5, too, but rates and biases of its heads and channels differ, and some hardly decay."""


def draws(
    member: Member, shape: Shape, device: str, decay: str = "drawn"
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs by name, and do, from a fixed seed. decay: one of DECAYS; another than "drawn" is for
    KDA with a safe gate, and for operators that take a log decay g. Raises ValueError for others.
    """
    gen = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*size, generator=gen, device=device, dtype=dtype)

    T, H, HV, K, V = shape.T, shape.H, shape.HV, shape.K, shape.V
    rows = T * member.steps
    sizes = {"q": (T, H, K), "k": (rows, H, K), "v": (rows, HV, V), "p": (rows, H, K)}
    sizes |= {"g": (T, HV) if member.per_head else (T, HV, K), "beta": (rows, HV)}
    sizes |= {"r": sizes["q"], "w": sizes["g"], "a": sizes["k"], "b": sizes["k"]}
    x = {n: draw(1, *sizes[n]) for n in member.arguments}
    bias = DECAYS[decay]
    bounded = not member.per_head and shape.safe if member.inside else "g" in x
    if bias is not None and not bounded:
        raise ValueError(f"{member.ours} on shape {shape.name} has no decays of kind {decay!r}")
    if member.inside:
        x["A_log"] = draw(HV, dtype=torch.float32)
        x["dt_bias"] = draw(HV if member.per_head else HV * K, dtype=torch.float32)
        if bias is not None:
            x["A_log"].zero_()
            x["dt_bias"].fill_(bias)
    else:
        name = "w" if "w" in x else "g"
        raw = x[name].float()
        x[name] = torch.nn.functional.logsigmoid(raw + 2)
        if bias is not None:
            x[name] = LOWER_BOUND * (raw + bias).sigmoid()
        if "beta" in x:
            x["beta"] = x["beta"].sigmoid()
    if not member.norm:
        x |= {n: torch.nn.functional.normalize(x[n], dim=-1) for n in ("q", "k", "a") if n in x}
    if "b" in x:  # adds less than a reads, along nearly the same key
        x["b"] = -x["a"] * x["b"].sigmoid()
    return {n: t.requires_grad_() for n, t in x.items()}, draw(1, T, HV, V)


def log_decay(member: Member, x: dict[str, Tensor]) -> Tensor:
    """The log decays, fp32, of inputs of KDA with a safe gate, or of an operator that takes g."""
    g = x["g"].float()
    if not member.inside:
        return g
    (HV, K), A_log = g.shape[2:], x["A_log"][:, None]
    return LOWER_BOUND * (A_log.exp() * (g + x["dt_bias"].view(HV, K))).sigmoid()


def options(member: Member, shape: Shape) -> dict[str, object]:
    found: dict[str, object] = {"use_qk_l2norm_in_kernel": True} if member.norm else {}
    if member.inside and not member.per_head:
        found |= shape.options
    elif shape.disable_recompute or not shape.safe:
        raise SystemExit(f"shape {shape.name} has options of KDA only")
    elif member.inside:
        found |= dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    if member.steps > 1:
        found["num_householder"] = member.steps
    return found


def peer(member: Member, name: str) -> Callable[..., tuple]:
    if name not in member.peers:
        raise SystemExit(f"--peer {name}: has no {member.ours}; it has {sorted(member.peers)}")
    module, function = member.peers[name].split(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise SystemExit(f"--peer {name} needs {module.split('.')[0]} ({error})") from error
    if module != "flash_qla":
        return found

    def without_host_copy(*, cu_seqlens_cpu: object = None, **rest: object) -> tuple:
        return found(**rest)  # FlashQLA's operator does not take the host's copy of cu_seqlens

    return without_host_copy


def io_bytes(member: Member, shape: Shape) -> tuple[int, int]:
    """Bytes of the forward, and of forward and backward together.

    The forward reads the inputs and writes o once. The backward reads inputs and do once and writes
    the gradients of the inputs once. A_log and dt_bias are not counted.
    """
    T, HV, K, V = shape.T, shape.HV, shape.K, shape.V
    rows = T * member.steps
    gate = (HV if member.per_head else HV * K) * (2 if member.inside else 4)
    size = {"q": 2 * T * shape.H * K, "k": 2 * rows * shape.H * K, "v": 2 * rows * HV * V}
    size |= {"p": size["k"], "g": T * gate, "beta": 2 * rows * HV}
    size |= {"r": size["q"], "w": size["g"], "a": size["k"], "b": size["k"]}
    read = sum(size[n] for n in member.arguments)
    o = 2 * T * HV * V
    return read + o, 3 * read + 2 * o


def products(member: Member, shape: Shape) -> tuple[int, int]:
    """Operations of the chunk form's matrix products, of the forward, and of forward and backward
    together.

    Per value head and chunk of C = 64 rows, the products are Aqk C^2 K, Aqk v_new C^2 V, qg S and
    kg^T v_new C K V each, and, if the rule removes anything, Akk C^2 K, T r C^2 V and k_decayed S C
    K V; a multiplication counts as two operations. The backward recomputes the scan without o, and
    has two adjoints of each product.
    """
    C, K, V = 64, shape.K, shape.V
    chunks = 2 * shape.HV * (shape.T * member.steps * member.rows // C)
    removal = 1 if member.removes else 0
    forward = chunks * ((1 + removal) * C * C * (K + V) + (2 + removal) * C * K * V)
    again = chunks * (removal * (C * C * V + C * K * V) + C * K * V)
    return forward, 3 * forward + again

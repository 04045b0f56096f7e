"""Chunks of 16 and 32 tokens on a GPU: documents that are one chunk each, and longer ones that are
asked to have such chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from fla_cp import chunk_kda
from fla_cp.kernels import resolve, using
from tests.gpu import checks
from tests.gpu.cases import BF16, FP16, FP32
from tests.support.members import Call

LENGTHS = {16: (1, 16, 0, 7, 15, 16, 9), 32: (17, 32, 1, 0, 31, 16, 29)}
"""Tokens of documents by those of a chunk; they come in this order, again and again."""
KEYS = "kda", "gated_delta_rule", "comba", "gla", "simple_gla"
OPTIONS = {
    "any": {},
    "safe": {"safe_gate": True, "lower_bound": -5.0},
    "high kept": {"precision": "high", "disable_recompute": True},
}
VALUE_HEADS = 4
CALLS = (
    (128, 128, 7, BF16, 2),
    (128, 128, 200, BF16, 4),
    (128, 128, 50, FP16, 2),
    (24, 40, 50, BF16, 4),
)
"""K, V, documents, dtype, and heads of q and k. Many documents take other tiles than few."""
FRAMED = 200, 201, 202
"""Documents of calls that share a program: the first records, the second is recorded."""


ASKED_KEYS = (*KEYS, "dplr_delta_rule")
ASKED = (
    (128, 128, (0, 4001), BF16, 2),
    (128, 128, (0, 5, 200, 200, 777, 1000), BF16, 4),
    (128, 128, (0, 4001), FP32, 2),
    (24, 40, (0, 5, 200, 200, 777, 1000), FP16, 4),
    (256, 256, (0, 300), FP32, 4),
)
"""K, V, offsets, dtype, and heads of q and k of calls that ask for a chunk_size. The long document
is cut into segments."""


def offsets_of(chunk: int, documents: int) -> tuple[int, ...]:
    """cu_seqlens of so many documents."""
    offsets, lengths = [0], LENGTHS[chunk]
    for n in range(documents):
        offsets.append(offsets[-1] + lengths[n % len(lengths)])
    return tuple(offsets)


def short_parts() -> dict[str, Callable[[], checks.Rows]]:
    """Outputs, states and gradients; a part for each chunk and member, since each compiles many
    kernels."""
    found: dict[str, Callable[[], checks.Rows]] = {}
    for chunk in LENGTHS:
        found[f"short {chunk} frames"] = partial(check_short, framed, chunk)
        for key in KEYS:
            found[f"short {chunk} {key}"] = partial(check_short, rows_of, chunk, key)
        for key in ASKED_KEYS:
            found[f"asked {chunk} {key}"] = partial(check_short, asked, chunk, key)
    return found


def check_short(check: Callable[..., checks.Rows], *given: object) -> checks.Rows:
    """`check(*given)`, with chunks of both lengths chosen by themselves."""
    backend = resolve("triton", torch.device(checks.DEVICE), BF16)
    with using(replace(backend, short_chunks=tuple(LENGTHS))):
        return check(*given)


def rows_of(chunk: int, key: str) -> checks.Rows:
    rows = []
    for (name, more), call in product(OPTIONS.items(), CALLS):
        K, V, documents, dtype, H = call
        if name != "any" and (K < 128 or (name == "safe" and key not in ("kda", "gla"))):
            continue
        cu = offsets_of(chunk, documents)
        shape = {"T": cu[-1], "cu": cu, "H": H, "HV": VALUE_HEADS, "K": K, "V": V}
        given = Call(**shape, inside=True, options=tuple(more.items()))
        case = f"short {key} {name}, chunks of {chunk}, {documents} documents, H={H}"
        rows.append(checks.check_member(key, K, V, cu[-1], dtype, name=case, call=given))
    return rows


def asked(chunk: int, key: str) -> checks.Rows:
    rows = []
    for (name, more), call in product(OPTIONS.items(), ASKED):
        K, V, cu, dtype, H = call
        if name == "safe" and key not in ("kda", "gla"):
            continue
        options = {**more, "chunk_size": chunk}
        shape = {"T": cu[-1], "cu": cu, "H": H, "HV": VALUE_HEADS, "K": K, "V": V}
        given = Call(**shape, inside=True, options=tuple(options.items()))
        case = f"asked {key} {name}, chunks of {chunk}, T={cu[-1]}, H={H}"
        rows.append(checks.check_member(key, K, V, cu[-1], dtype, name=case, call=given))
    return rows


def framed(chunk: int) -> checks.Rows:
    """Calls without states, whose tables the GPU forms and which are replayed, have the bits of
    calls with a final state."""
    rows = []
    for documents in FRAMED:
        few, more = (called(chunk, documents, states) for states in (False, True))
        wrong = sum(int((a != b).sum()) for a, b in zip(few, more, strict=True))
        case = f"short calls without states, chunks of {chunk}, {documents} documents"
        rows.append({"case": case, "dtype": "bfloat16", "changed": wrong, "ok": wrong == 0})
    return rows


def called(chunk: int, documents: int, states: bool) -> list[Tensor]:
    """o and all gradients."""
    gen, offsets = torch.Generator().manual_seed(documents), offsets_of(chunk, documents)
    T, H, K = offsets[-1], 2, 64
    x = [torch.randn(1, T, H, K, generator=gen) for _ in range(3)]
    x += [-torch.rand(1, T, H, K, generator=gen), torch.rand(1, T, H, generator=gen)]
    leaves = [t.to(checks.DEVICE, checks.BF16).requires_grad_() for t in x]
    cu = torch.tensor(offsets)
    packing = {"cu_seqlens": cu.to(checks.DEVICE), "cu_seqlens_cpu": cu}
    more = {"output_final_state": states, "use_qk_l2norm_in_kernel": True, "impl": "triton"}
    o, _ = chunk_kda(*leaves, **packing, **more)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

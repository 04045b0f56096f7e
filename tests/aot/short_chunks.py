"""Calls whose documents are one chunk of 16 or 32 tokens each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch

from fla_cp.kernels import resolve, using
from tests.aot.compiling import Launch, launched
from tests.support.members import BY_NAME, Call, collect, draw, operator

SHORT: dict[str, tuple[str, int, int, dict]] = {
    "kda bf16 safe": ("kda", 2, 2, {"safe_gate": True, "lower_bound": -5.0}),
    "kda bf16 any": ("kda", 2, 64, {}),
    "gla bf16 any": ("gla", 2, 2, {}),
    "dplr bf16 any": ("dplr_delta_rule", 2, 2, {}),
    "comba bf16": ("comba", 2, 2, {}),
    "gated_delta_rule bf16": ("gated_delta_rule", 2, 64, {}),
    "gated_delta_rule bf16 groups": ("gated_delta_rule", 1, 2, {}),
}
"""Calls with short chunks: member, heads of q and k, documents, options. With 64 documents, scans
have tiles for many chains."""
OF_CHUNKS = "intra", "gated", "scan", "scores", "safe_bwd", "dqk", "dq_", "dk_", "head_gate"
"""How the names of kernels begin that read or write chunks."""


def compile_short(name: str, chunk: int) -> list[Launch]:
    """Kernels of a call of `SHORT`, of documents of one chunk each."""
    key, H, documents, options = SHORT[name]
    member, cu = BY_NAME[key], tuple(range(0, chunk * documents + 1, chunk))
    if member.dplr:  # two rows a token
        cu = tuple(n // 2 for n in cu)
    shape = {"T": cu[-1], "cu": cu, "H": H, "HV": 2, "K": 128, "V": 128}
    call = Call(**shape, inside=True, options=tuple(options.items()))
    x, keywords, weights = draw(member, call)
    half, wide = torch.bfloat16, torch.float32
    x = {n: t.to(half if n in member.arguments else wide) for n, t in x.items()}
    keywords |= {"cu_seqlens": torch.tensor(cu), "impl": "triton"}
    with launched() as kernels:
        backend = resolve("triton", torch.device("cpu"), half)
        with using(replace(backend, short_chunks=(16, 32))):
            collect(lambda leaves: operator(member, "chunk", leaves, **keywords), x, weights)
    return [k for k in dict.fromkeys(kernels) if k.kernel.startswith(OF_CHUNKS)]


def configurations() -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """The calls that are compiled, by name."""
    for name, chunk in product(SHORT, (16, 32)):
        yield f"{name}, chunks of {chunk}", functools.partial(compile_short, name, chunk)

"""Calls of several ranks whose packings share recorded programs, as in checks.py.

The ranks are threads that share one GPU, so a GPU is all that this needs. Calls on packings in
frames, most of which replay programs of other packings, have the bits of calls that run by
themselves on packings without frames.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fla_cp
from fla_cp import autograd, build_cp_context, pipeline
from fla_cp.ops import family
from fla_cp.ops.known import known_calls
from fla_cp.replay import Replayed
from tests.gpu import checks
from tests.support.ranks import run_threads

TOKENS, HEADS, DIM = 1024, 2, 128
"""Tokens of a rank, heads, and K and V."""

PACKINGS = 40
"""Packings of a case. In about half of them, a document passes through a whole range."""

IMPL = "triton"

CASES = {
    "kda, one range": ("chunk_kda", 3, False),
    "kda, two ranges": ("chunk_kda", 2, True),
    "gated delta rule, one range": ("chunk_gated_delta_rule", 2, False),
    "gated delta rule, two ranges": ("chunk_gated_delta_rule", 3, True),
}
"""The operator, ranks, and whether each of these has two ranges."""


def check_frames() -> checks.Rows:
    return [row(name, *case) for name, case in CASES.items()]


def row(name: str, operator: str, R: int, zigzag: bool) -> dict:
    """How many numbers of outputs and gradients differ, and how many directions were replayed."""
    given = operator, zigzag, packings(R)
    with mock.patch.object(family, "_shared_packing", lambda _, packing, *__: packing), alone():
        exact = run_threads(results, R, *given)
    known_calls.clear()
    with counted() as ran:
        found = run_threads(results, R, *given)
    changed = 0
    for mine, own in zip(found, exact, strict=True):
        for a, b in zip(mine, own, strict=True):
            changed += int((a != b).sum())
    replayed = 2 * R * PACKINGS - len(ran)
    # The interpreter has no programs.
    enough = replayed > R * PACKINGS // 2 or checks.DEVICE != "cuda"
    facts = {"case": f"frames, {name}, {R} ranks", "dtype": "bfloat16", "replayed": replayed}
    return facts | {"changed": changed, "ok": changed == 0 and enough}


def packings(R: int) -> list[tuple[int, ...]]:
    """Offsets of batches: two to five documents each, at random."""
    rng, T = random.Random(R), R * TOKENS
    return [(0, *sorted(rng.sample(range(1, T), rng.randint(1, 4))), T) for _ in range(PACKINGS)]


def results(
    group: dist.ProcessGroup, rank: int, operator: str, zigzag: bool, batches: list
) -> list[Tensor]:
    """o and the gradients of a call for each batch, of this rank's tokens."""
    R, channels = group.size(), (DIM,) if operator == "chunk_kda" else ()
    T, gen = R * TOKENS, torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, T, HEADS, DIM, generator=gen) for _ in range(4))
    g = -torch.rand(1, T, HEADS, *channels, generator=gen)
    beta = torch.rand(1, T, HEADS, generator=gen)
    options = {"use_qk_l2norm_in_kernel": True, "impl": IMPL}
    options |= {"safe_gate": True} if channels else {}
    divide = fla_cp.zigzag_token_ranges if zigzag else fla_cp.contiguous_token_ranges
    found = []
    for offsets in batches:
        context = build_cp_context(
            torch.tensor(offsets), group, token_ranges=divide(T, R), exchange="all_gather"
        )
        x = [context.shard(t).to(checks.DEVICE, checks.BF16) for t in (q, k, v, g, beta)]
        leaves = [t.requires_grad_() for t in x]
        o, _ = getattr(fla_cp, operator)(*leaves, **options, cp_context=context)
        given = context.shard(do).to(checks.DEVICE, checks.BF16)
        found += [o.detach(), *torch.autograd.grad(o, leaves, given)]
    if checks.DEVICE == "cuda":
        torch.cuda.synchronize()
    return found


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no call is replayed."""
    known_calls.clear()

    def run(self: Replayed, plan: Any, own: Any, inputs: Any, direction: Any) -> Any:
        return direction()

    with mock.patch.object(Replayed, "__call__", run):
        yield


@contextmanager
def counted() -> Iterator[list[str]]:
    """Inside, each direction that runs without a program adds its name to the list."""
    ran: list[str] = []

    def noting(name: str) -> Any:
        direction = getattr(pipeline, name)

        def run(*given: Any, **named: Any) -> Any:
            ran.append(name)
            return direction(*given, **named)

        return run

    changed = {name: noting(name) for name in ("forward", "backward")}
    with mock.patch.multiple(autograd, **changed):
        yield ran

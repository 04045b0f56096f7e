"""Calls on packings that were never seen before run programs that others recorded.

A driver whose launches do nothing stands in for a GPU; the kernels are compiled for an H200.
test_launch.py runs this file in a process of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime import driver

import fla_cp
from benchmarks import host
from benchmarks.tune import now
from fla_cp import autograd, pipeline
from fla_cp.kernels import using
from fla_cp.kernels.triton import streams
from fla_cp.ops.known import known_calls
from tests.support.driver import IdleDriver

D = 128
WARM, NEW = 100, 100
"""Packings before those that are counted, and how many are counted."""

MOST = 10
"""The most directions of NEW calls that run without a program: sequences that are cut, and sizes
that were not seen before."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls run the Triton backend on the CPU as on an H200."""
    active, found, backend = driver._active, IdleDriver(), now()
    driver.set_active(found)
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=found.cuda))
    facts = {"sms": 132, "architecture": 90, "gluon": False}
    backend = replace(backend, tuning=replace(backend.tuning, **facts))
    known_calls.clear()
    with using(backend), using(replace(backend, name="torch")):  # tensors are on the CPU
        yield
    driver._active = active
    streams.fork_of.cache_clear()
    known_calls.clear()


def unreplayed(
    operator: str, T: int, H: int, count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """How many directions of calls with new packings are not replayed."""
    ran = []
    for name in ("forward", "backward"):
        run = getattr(pipeline, name)

        def counted(*args, run=run, **options):
            ran.append(run)
            return run(*args, **options)

        monkeypatch.setattr(autograd, name, counted)
    channels = (D,) if operator == "chunk_kda" else ()
    shapes = *[(1, T, H, D)] * 3, (1, T, H, *channels), (1, T, H)
    x = [torch.empty(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    options = {"safe_gate": True} if channels else {}
    for packing in host.packings(count, T, seed, "cpu"):
        o, _ = getattr(fla_cp, operator)(*x, **options, **packing)
        torch.autograd.grad(o, x, torch.empty_like(o))
    return len(ran)


@pytest.mark.parametrize("operator", ["chunk_kda", "chunk_gated_delta_rule"])
@pytest.mark.parametrize("T, H", [(2048, 4), (2048, 32), (8192, 4)])
def test_new_packings_are_replayed(machine, monkeypatch, operator, T, H):
    """Calls with 8 to 24 documents share a few programs, whatever the documents' lengths."""
    unreplayed(operator, T, H, WARM, 1, monkeypatch)
    assert unreplayed(operator, T, H, NEW, 0, monkeypatch) <= MOST
    (known,) = known_calls.values()
    assert len(known.kind.forward.known) <= 12 and len(known.kind.backward.known) <= 12

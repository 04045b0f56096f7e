"""Calls on packings that were never seen before run programs that others recorded.

A driver whose launches do nothing stands in for a GPU; the kernels are compiled for an H200.
test_launch.py runs this file in a process of its own.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")
from triton.runtime import driver

import fla_cp
from benchmarks import host
from benchmarks.tune import now
from fla_cp import autograd, pipeline
from fla_cp.kernels import using
from fla_cp.kernels.triton import chunk_tables, streams
from fla_cp.ops import packed
from fla_cp.ops.known import known_calls
from fla_cp.partition import device_tables
from fla_cp.partition.packing import Packing
from fla_cp.partition.whole import WholeSequences
from fla_cp.program import Program
from tests.support.driver import IdleDriver
from tests.support.fake_group import one_of

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
    packed.plans.clear()
    with using(backend), using(replace(backend, name="torch")):  # tensors are on the CPU
        yield
    driver._active = active
    streams.fork_of.cache_clear()
    known_calls.clear()


def unreplayed(
    operator: str,
    T: int,
    H: int,
    count: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup | None = None,
    zigzag: bool = False,
) -> int:
    """How many directions of calls with new packings are not replayed. group: if given, its ranks
    share the documents, and each has T tokens, in two ranges if they are `zigzag`."""
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
    ranks = 1 if group is None else group.size()
    for packing in host.packings(count, ranks * T, seed, "cpu"):
        if group is not None:
            how = {"check": False, "exchange": "all_gather"}
            if zigzag:
                how["token_ranges"] = fla_cp.zigzag_token_ranges(ranks * T, ranks)
            packing = {"cp_context": fla_cp.build_cp_context(**packing, group=group, **how)}
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


def test_a_new_packing_takes_few_steps(machine, monkeypatch):
    """A replayed call with a new packing lists no segments and sends nothing to the device: one
    kernel forms its tables from cu_seqlens."""
    T, H, sent, formed = 2048, 4, [], []
    unreplayed("chunk_kda", T, H, WARM, 1, monkeypatch)

    def no_list(*args: object, **options: object) -> None:
        raise AssertionError("segments were listed")

    def counted(values: device_tables.Numbers, *where: Any) -> torch.Tensor:
        sent.append(len(values))
        return to_device(values, *where)

    def noted(*given: Any) -> device_tables.DeviceTable | None:
        formed.append(form(*given))
        return formed[-1]

    to_device, form = device_tables.to_device, chunk_tables.TableFormer.__call__
    monkeypatch.setattr(Packing, "build", no_list)
    monkeypatch.setattr(device_tables, "to_device", counted)
    monkeypatch.setattr(chunk_tables.TableFormer, "__call__", noted)
    assert unreplayed("chunk_kda", T, H, NEW, 2, monkeypatch) == 0
    assert len(formed) == NEW and None not in formed
    (known,) = known_calls.values()
    found = (*known.kind.forward.known.values(), *known.kind.backward.known.values())
    programs = [x for x in found if isinstance(x, Program)]
    assert len(programs) >= 2
    for program in programs:  # the order of segments is the same in all packings
        assert program.source.count("plan.packing.") == 1
    assert unreplayed("chunk_kda", T, H, 10, 2, monkeypatch) == 0
    assert len(formed) == NEW + 10  # the first ones were forgotten
    assert unreplayed("chunk_kda", T, H, 10, 2, monkeypatch) == 0
    assert len(formed) == NEW + 10
    assert sent == []


FEW = 14
"""The most calls of Python functions that a new packing adds to a forward."""


def python_calls(run: Callable[[], object]) -> Counter[str]:
    """The calls of Python functions in `run`, by name."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_new_packing_calls_few_functions(machine, monkeypatch):
    """The host's time for it is that of code which is in no cache of the processor, so it follows
    the number of functions."""
    T, H = 8192, 4
    unreplayed("chunk_gated_delta_rule", T, H, 3 * WARM, 1, monkeypatch)
    shapes = *[(1, T, H, D)] * 3, (1, T, H), (1, T, H)
    x = [torch.empty(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    added = []
    for packing in host.packings(NEW, T, 1, "cpu")[:20]:
        calls = [
            python_calls(lambda packing=packing: fla_cp.chunk_gated_delta_rule(*x, **packing))
            for _ in range(2)
        ]
        added.append(calls[0] - calls[1])
    middle = sorted(added, key=Counter.total)[len(added) // 2]
    assert 0 < middle.total() <= FEW, middle


def test_watched_calls_keep_plans_of_their_own(machine, monkeypatch):
    """They get no frame. Later calls with the same packings do."""

    def framed() -> int:
        found = (plan.spec.packing for plan in packed.plans.values())
        return sum(isinstance(packing, WholeSequences) for packing in found)

    given = "chunk_kda", 2048, 4, 3, 5, monkeypatch
    with monkeypatch.context() as watched:
        watched.setattr(type(now()), "replay_stream", lambda *_: None)
        unreplayed(*given)
    assert len(packed.plans) == 3 and framed() == 0
    unreplayed(*given)
    assert len(packed.plans) == 6 and framed() == 3


def test_calls_that_are_not_known_again_keep_no_plans(machine):
    x = [torch.empty(1, 64, 1, D, dtype=torch.bfloat16) for _ in range(4)]
    offsets = torch.tensor([0, 20, 64])
    given = *x, torch.empty(1, 64, 1, dtype=torch.bfloat16)
    fla_cp.chunk_kda(*given, scale=np.float64(0.5), cu_seqlens=offsets)
    assert not packed.plans
    fla_cp.chunk_kda(*given, scale=0.5, cu_seqlens=offsets)
    assert len(packed.plans) == 1


def test_a_call_that_failed_leaves_no_offsets_behind(machine, monkeypatch):
    """Tables are formed from the offsets of the call that asks for them first."""
    T, H = 2048, 4
    unreplayed("chunk_kda", T, H, WARM, 1, monkeypatch)
    shapes = *[(1, T, H, D)] * 4, (1, T, H)
    x = [torch.empty(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    offsets, read = torch.tensor([0, 700, 1500, T]), []
    (known,) = known_calls.values()

    def failing(*_: Any) -> None:
        raise MemoryError

    def noted(self: Any, build: Any, packing: Any, cu_seqlens: torch.Tensor, *rest: Any) -> Any:
        read.append(cu_seqlens)
        return form(self, build, packing, cu_seqlens, *rest)

    form = chunk_tables.TableFormer.__call__
    monkeypatch.setattr(chunk_tables.TableFormer, "__call__", noted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(known.kind.forward), "__call__", failing)
        with pytest.raises(MemoryError):
            fla_cp.chunk_kda(*x, safe_gate=True, cu_seqlens=offsets, cu_seqlens_cpu=offsets.clone())
    assert read == []
    again = offsets.clone()
    offsets.zero_()
    for _ in range(2):
        fla_cp.chunk_kda(*x, safe_gate=True, cu_seqlens=again, cu_seqlens_cpu=again.clone())
    assert len(read) == 1 and read[0] is again


SHARED = 24
"""The most programs of a direction under contexts: segments and chunks vary on every rank."""


@pytest.mark.parametrize("operator", ["chunk_kda", "chunk_gated_delta_rule"])
@pytest.mark.parametrize("T, H, ranks, rank, zigzag", [
    (2048, 32, 3, 1, False), (2048, 4, 3, 0, False), (8192, 32, 3, 2, False),
    (2048, 4, 1, 0, False), (8192, 32, 2, 1, True), (2048, 4, 4, 1, True),
])  # fmt: skip
def test_new_packings_under_contexts_are_replayed(
    machine, monkeypatch, operator, T, H, ranks, rank, zigzag
):
    """Ranks share documents, whose states cross them."""
    with one_of(ranks, rank) as group:
        unreplayed(operator, T, H, 2 * WARM, 1, monkeypatch, group, zigzag)
        left = unreplayed(operator, T, H, NEW, 0, monkeypatch, group, zigzag)
        assert left <= NEW // 5
    (known,) = known_calls.values()
    assert len(known.kind.forward.known) <= SHARED and len(known.kind.backward.known) <= SHARED

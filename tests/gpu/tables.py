"""Tables of packings that the GPU forms from cu_seqlens, and calls that read them."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fla_cp import chunk_kda
from fla_cp.kernels.triton import chunk_tables, scan
from fla_cp.kernels.triton.chunk_tables import TableFormer
from fla_cp.kernels.triton.launch import current_stream
from fla_cp.kernels.triton.operands import columns
from fla_cp.ops import packed
from fla_cp.partition.device_tables import DeviceTable
from fla_cp.partition.whole import WholeSequences
from tests.gpu import checks
from tests.gpu.cases import BF16
from tests.support.tuned import tuned

PACKINGS = ((24, 8192), (300, 32768), (4000, 65536))
"""Sequences and tokens. A tenth of the sequences have no tokens."""
CALL = 2048, 4, 128
"""T, heads, and K = V of the calls."""
CALLS = 6
"""Calls, each with a packing of its own. The first records, the second is recorded."""


def offsets_of(sequences: int, T: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    inner = sorted(draw.randint(0, T) for _ in range(sequences - 1))
    again = draw.sample(range(len(inner)), len(inner) // 10)
    for i in again:
        inner[i] = inner[max(i - 1, 0)]
    return (0, *inner, T)


def check_tables() -> checks.Rows:
    """The kernel's tables are the host's, and calls that read either have the same bits. Chunks of
    a frame that may have no tokens are cleared."""
    rows = cleared()
    for sequences, T in PACKINGS:
        for dtype in (torch.int32, torch.int64):
            offsets = offsets_of(sequences, T, sequences)
            given = torch.tensor(offsets, dtype=dtype, device=checks.DEVICE)
            frame, device = WholeSequences.of(offsets).frame, given.device
            former = chunk_tables.TableFormer(frame, device)
            packing = WholeSequences(offsets, frame, former, (given, current_stream()))
            found = packing.table(columns, torch.int32, device)
            wanted = DeviceTable.send(columns(packing), torch.int32, device).columns
            wrong = sum(int((a != b).sum()) for a, b in zip(found, wanted, strict=True))
            rows.append(row(f"tables N={sequences} T={T} {dtype}", wrong))
    with tuned():  # kinds of calls that no other check has seen
        (by_host, none), (by_kernel, formed) = (
            results(most) for most in (0, chunk_tables.MOST_SEQUENCES)
        )
    wrong = sum(int((a != b).sum()) for a, b in zip(by_host, by_kernel, strict=True))
    rows.append(row(f"calls with tables of the host and of the kernel x {CALLS}", wrong))
    if checks.DEVICE == "cuda":  # else no call is replayed, and the host forms all tables
        rows.append(
            row(f"{formed} of {CALLS} tables formed by the kernel", int(formed < CALLS - 2))
        )
    rows.append(row("none of the host's formed by the kernel", none))
    return rows


def cleared() -> checks.Rows:
    """The chunks of a frame from one on are zeros, and those before it stay."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        shapes = (41, 3, 128, 128), (41, 3, 64, 128)
        x = [torch.full(s, torch.nan, dtype=dtype, device=checks.DEVICE) for s in shapes]
        scan.clear(*(t[:-1] for t in x), 33)
        wrong = sum(int((t[33:-1] != 0).sum()) for t in x)
        wrong += sum(int((~t[[*range(33), -1]].isnan()).sum()) for t in x)
        rows.append(row("chunks without tokens cleared", wrong, str(dtype).removeprefix("torch.")))
    return rows


def row(case: str, changed: int, dtype: str = "int32") -> dict:
    return {"case": case, "dtype": dtype, "changed": changed, "ok": changed == 0}


def results(most: int) -> tuple[list[Tensor], int]:
    """o and all gradients of calls with new packings, and how many tables the kernel formed. most:
    sequences up to which it does."""
    packed.plans.clear()
    formed = []

    def counted(*given: Any) -> DeviceTable | None:
        table = form(*given)
        formed.extend([table] if table else [])
        return table

    before, form = chunk_tables.MOST_SEQUENCES, TableFormer.__call__
    chunk_tables.MOST_SEQUENCES = most
    try:
        with patch.object(TableFormer, "__call__", counted):
            return [x for seed in range(CALLS) for x in called(seed)], len(formed)
    finally:
        chunk_tables.MOST_SEQUENCES = before


def called(seed: int) -> list[Tensor]:
    T, H, K = CALL
    gen = torch.Generator().manual_seed(seed)
    x = [torch.randn(1, T, H, K, generator=gen) for _ in range(3)]
    x += [-torch.rand(1, T, H, K, generator=gen), torch.rand(1, T, H, generator=gen)]
    leaves = [t.to(checks.DEVICE, BF16).requires_grad_() for t in x]
    offsets = torch.tensor(offsets_of(9, T, seed))
    packing = {"cu_seqlens": offsets.to(checks.DEVICE), "cu_seqlens_cpu": offsets}
    o, _ = chunk_kda(*leaves, **packing, use_qk_l2norm_in_kernel=True, impl="triton")
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

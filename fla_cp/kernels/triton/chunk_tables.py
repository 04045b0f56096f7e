"""The tables of a new packing, formed on the GPU.

In a training, nearly every batch has a packing that was never seen before. The host would form its
tables with numpy, in pinned memory, and copy them: over 100 us of a short call. The offsets are on
the GPU already, as cu_seqlens, and one small kernel forms the same numbers from them.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.launch import cdiv, launch, launcher
from fla_cp.kernels.triton.operands import columns
from fla_cp.partition.device_tables import Build, DeviceTable, places_of
from fla_cp.partition.packing import Frame
from fla_cp.partition.whole import WholeSequences

CHUNKS, SEQUENCES = 128, 32
"""Chunks of a program, and sequences that it looks at together."""

MOST_SEQUENCES = 4096
"""Every program looks at all sequences. With more than these, the host forms the tables."""

TABLES = 16
"""How many tables are allocated together."""


@triton.jit(
    do_not_specialize=["N", "T", "chunks", "segments", "rows_at", "start_at", "stop_at", "chunk_at"]
)
def chunk_table_kernel(
    offsets,
    table,
    N,
    T,
    chunks,
    segments,
    rows_at,
    start_at,
    stop_at,
    chunk_at,
    C: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
):
    """Writes the columns of `operands.Tables` into table, int32: the chunks' first column starts at
    0 and has `chunks` numbers, as the one at rows_at, and those at start_at, stop_at and chunk_at
    have `segments`. offsets: cu_seqlens [N+1], from 0 to T.

    A segment is a sequence with tokens. Segments that fill a frame are at T, chunks that do are
    empty ones at token 0. Offsets outside of [0, T] are moved there: whatever they are, no table
    names a token that does not exist."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    i_c, o_n = pid * BC + tl.arange(0, BC), tl.arange(0, BN)
    start, rows = tl.zeros([BC], tl.int32), tl.zeros([BC], tl.int32)
    first, place = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for at in range(0, N, BN):
        there = at + o_n < N
        a = tl.load(offsets + at + o_n, mask=there, other=0).to(tl.int32)
        b = tl.load(offsets + at + o_n + 1, mask=there, other=0).to(tl.int32)
        a, b = tl.minimum(tl.maximum(a, 0), T), tl.minimum(tl.maximum(b, 0), T)
        count = tl.maximum(b - a + C - 1, 0) // C
        before = first + tl.cumsum(count, 0) - count
        nth = i_c[:, None] - before[None, :]
        inside = (nth >= 0) & (nth < count[None, :])
        token = a[None, :] + C * nth
        start += tl.sum(tl.where(inside, token, 0), 1)
        rows += tl.sum(tl.where(inside, tl.minimum(b[None, :] - token, C), 0), 1)
        full = (count > 0).to(tl.int32)
        segment = place + tl.cumsum(full, 0) - full
        mine = (full > 0) & (segment < segments) & (at // BN % programs == pid)
        tl.store(table + start_at + segment, a, mask=mine)
        tl.store(table + stop_at + segment, b, mask=mine)
        tl.store(table + chunk_at + segment, before, mask=mine)
        first += tl.sum(count)
        place += tl.sum(full)
    tl.store(table + i_c, start, mask=i_c < chunks)
    tl.store(table + rows_at + i_c, rows, mask=i_c < chunks)
    if pid == 0:
        for at in range(0, segments, BN):
            segment = at + o_n
            spare = (segment >= place) & (segment < segments)
            end = tl.zeros([BN], tl.int32)
            tl.store(table + start_at + segment, end + T, mask=spare)
            tl.store(table + stop_at + segment, end + T, mask=spare)
            tl.store(table + chunk_at + segment, end + first, mask=spare)


class TableFormer:
    """Forms the tables of packings of whole sequences with one frame, on one device, from offsets
    of one dtype. Every new packing calls it. Therefore it finds once what such packings have in
    common, launches the kernel with addresses, as a program does, and makes several tables
    together."""

    def __init__(self, frame: Frame, device: torch.device) -> None:
        self.device, self.lengths = device, (frame.chunks,) * 2 + (frame.segments,) * 3
        self.places, self.size = places_of(self.lengths, torch.int32)
        # There is a program for the segments that fill the frame, even if there are no chunks.
        self.grid = max(1, cdiv(frame.chunks, CHUNKS)), 1, 1
        sizes = frame.chunks, frame.segments, *self.places[1:]
        self.constants = *sizes, frame.chunk, CHUNKS, SEQUENCES
        self.short: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """The launcher, see `launcher`, once the kernel is compiled."""
        self.free: tuple[int | None, Iterator[DeviceTable]] = None, iter(())
        """Tables without values, for one stream. Threads may share an iterator under the GIL."""

    def __call__(
        self, build: Build, packing: WholeSequences, cu_seqlens: Tensor, stream: int | None
    ) -> DeviceTable | None:
        """See `Former`."""
        offsets, T, short = packing.given, packing.given[-1], self.short
        N = len(offsets) - 1
        if build is not columns or N > MOST_SEQUENCES:
            return None
        owner, tables = self.free
        table = next(tables, None) if owner == stream else None
        if table is None:
            table = self._allocate(stream)
        at = cu_seqlens.data_ptr()
        if short is None or stream is None or at % 16:
            self._launch(cu_seqlens, table, N, T)
        else:
            run, fixed = short
            run(*self.grid, stream, *fixed, at, table.addresses[0], N, T, *self.constants)
        return table

    def _launch(self, cu_seqlens: Tensor, table: DeviceTable, N: int, T: int) -> None:
        """Launches the kernel in the usual way. If that compiled it for addresses that are
        multiples of 16, the next launches may be short."""
        memory: Any = table.memory
        given = cu_seqlens, memory[table.first :], N, T, *self.constants
        compiled = launch(chunk_table_kernel, self.grid, *given)
        if compiled is not None and not cu_seqlens.data_ptr() % 16:
            self.short = launcher(compiled)

    def _allocate(self, stream: int | None) -> DeviceTable:
        """Returns a table and keeps more for later. All are for one stream, because their memory is
        free again for other work of this stream when they are."""
        count = 1 if stream is None else TABLES
        # Tables outlive a call, and autograd saves them, so they are no inference tensors.
        with torch.inference_mode(False):
            memory = torch.empty(count * self.size, dtype=torch.int32, device=self.device)
        found = [
            DeviceTable(memory, self.places, self.lengths, first=n * self.size)
            for n in range(count)
        ]
        for table in found:
            table.addresses  # noqa: B018  finds them now, beside the others
        tables = iter(found)
        self.free = stream, tables
        return next(tables)


@lru_cache(maxsize=256)  # each may hold 16 tables
def table_former(frame: Frame, offsets: torch.dtype, device: torch.device) -> TableFormer:
    """See `Backend.table_former`. Packings with equal frames share one."""
    return TableFormer(frame, device)

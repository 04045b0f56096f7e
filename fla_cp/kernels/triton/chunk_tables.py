"""The tables of a new packing, formed on the GPU.

In a training, nearly every batch has a packing that was never seen before. The host would form its
tables with numpy, in pinned memory, and copy them: over 100 us of a short call. The offsets are on
the GPU already, as cu_seqlens, and one small kernel forms the same numbers from them.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.launch import cdiv, launch_alike
from fla_cp.kernels.triton.operands import columns
from fla_cp.partition.device_tables import DeviceTable, places_of
from fla_cp.partition.packing import Frame, Packing

CHUNKS, SEQUENCES = 128, 32
"""Chunks of a program, and sequences that it looks at together."""

MOST_SEQUENCES = 4096
"""Every program looks at all sequences. With more than these, the host forms the tables."""


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


@lru_cache(maxsize=1024)
def _layout(
    frame: Frame,
) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, int, int], tuple[int, ...]]:
    """The lengths of the columns, where they start in one array, its size, the grid, which has a
    program for the segments that fill the frame even if there are no chunks, and the kernel's
    arguments that the frame decides."""
    lengths = (frame.chunks,) * 2 + (frame.segments,) * 3
    places, end = places_of(lengths, torch.int32)
    grid = max(1, cdiv(frame.chunks, CHUNKS)), 1, 1
    constants = frame.chunks, frame.segments, *places[1:], frame.chunk, CHUNKS, SEQUENCES
    return lengths, places, end, grid, constants


def form_tables(packing: Packing, cu_seqlens: Tensor) -> bool:
    """Forms the tables of a packing of whole sequences, with a frame, on the device of cu_seqlens,
    unless it has them there. Whether it has them now. cu_seqlens: int32 or int64 [N+1], the
    packing's offsets.

    While a CUDA graph is captured, nothing is formed: it would be formed in each replay only."""
    frame, device = packing.frame, cu_seqlens.device
    if packing.has_table(columns, device):
        return True
    if frame is None or packing.sequences > MOST_SEQUENCES or not cu_seqlens.is_contiguous():
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    lengths, places, end, grid, constants = _layout(frame)
    # Tables outlive a call, and autograd saves them, so they are no inference tensors.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            table = torch.empty(end, dtype=torch.int32, device=device)
    else:
        table = torch.empty(end, dtype=torch.int32, device=device)
    given = cu_seqlens, table, packing.sequences, packing.tokens, *constants
    kinds = cu_seqlens.dtype, cu_seqlens.data_ptr() % 16 == 0
    launch_alike(chunk_table_kernel, kinds, grid, *given)
    packing.keep_table(columns, DeviceTable(table, places, lengths), device)
    return True

"""What launches pass to each other: the chunks, and the tables of a packing."""

import functools
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fla_cp.kernels.backend import ChunkStates
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.bundles import (
    ChunkTable,
    Formed,
    Gate,
    Operands,
    Rows,
    Saved,
    Shape,
    rows,
    safe,
    shape,
    terms,
)
from fla_cp.kernels.triton.launch import cdiv
from fla_cp.kernels.triton.tile_table import TUNING, Tile, Tuning
from fla_cp.partition.device_tables import Joined, places_of
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule

DENSE = torch.contiguous_format

ALIGNED: Final = 16
"""Triton compiles a kernel for ints that this divides, and again for others."""


class Gating(NamedTuple):
    """How scans gate their operands: by this gate, with the kernels of this folder."""

    gate: Gate
    folder: str


class Chunks(NamedTuple):
    """What the local stage forms for each chunk, in token order, and the scans read.

    T, Aqk [NC, HV, terms * C, C]: in the inputs' dtype, one or two [C, C] terms that add up to it.
    decay [NC, HV, K], rows [NC, HV, planes, C] (device/planes.py): fp32.
    anchors [NC, HV, C / 16, K]: gc of rows 15, 31, 47 and 63, fp32; empty with one decay a head,
    and in another dtype than bf16.
    steep [NC, HV]: 1 where the decays are too strong for the path of a safe gate, else 0, int32;
    empty where one path serves all chunks.
    qg, k_decayed, kg [NC, HV, C, K]; with one decay a head the inputs q, k or p, and k [T, H, K].
    gating: None, unless the scans of a backward gate q, g and k [T, H or HV, K] themselves, which
    qg, k_decayed and kg are then.
    v: as given. o: in a backward only. If the rule removes nothing, T is empty, and with one decay
    a channel so is k_decayed."""

    T: Tensor
    Aqk: Tensor
    decay: Tensor
    rows: Tensor
    anchors: Tensor
    steep: Tensor
    qg: Tensor
    k_decayed: Tensor
    kg: Tensor
    v: Tensor
    rule: DeltaRule
    o: Tensor | None = None
    tuning: Tuning = TUNING
    gating: Gating | None = None

    @property
    def of_heads(self) -> bool:
        """Whether qg, k_decayed and kg have rows of tokens and heads, not of chunks."""
        return self.qg.dim() == 3

    @property
    def terms(self) -> int:
        return terms(self.rule, self.v.dtype)

    @property
    def tokens(self) -> int:
        """How many tokens a chunk has (C)."""
        return self.rows.shape[3]

    def shape(self, t: Tile) -> Shape:
        """What kernels that read the chunks are compiled for."""
        (HV, K), V = self.decay.shape[1:], self.v.shape[2]
        H, rule = self.kg.shape[1], after_local(self.rule)
        return shape(rule, self.Aqk.dtype, H, HV, K, V, t, self.tokens)

    def between(self, first: int, stop: int) -> "Chunks":
        """Those from `first` to before `stop`, with a decay a channel."""
        names = Formed._fields
        parts = {n: x[first:stop] for n in names if (x := getattr(self, n)).dim() > 1}
        return self._replace(**parts)

    def steep_or_none(self) -> Tensor | None:
        return self.steep if self.steep.dim() == 2 else None

    def formed(self) -> Formed:
        """What the local stage writes."""
        return Formed(*self[:9])._replace(steep=self.steep_or_none())

    def scan_operands(self) -> Operands:
        q, r, k = (rows(x) if self.of_heads else Rows(x, 0, 0) for x in self[6:9])
        return Operands(q, r, k, self.rows, self.T, self.Aqk, self.decay)


class Tables(NamedTuple):
    """The tables of a packing on the device, int32: of chunks [NC] and of segments [S]."""

    chunk_start: Tensor
    chunk_rows: Tensor
    seg_start: Tensor
    seg_stop: Tensor
    seg_chunk: Tensor

    @property
    def chunks(self) -> ChunkTable:
        return ChunkTable(self.chunk_start, self.chunk_rows)

    def between(self, first: int, stop: int) -> "Tables":
        """With the chunks from `first` to before `stop` alone."""
        start, rows = self.chunk_start[first:stop], self.chunk_rows[first:stop]
        return self._replace(chunk_start=start, chunk_rows=rows)


class ScanOutputs(NamedTuple):
    """What a scan writes, unless it is None: o [T, HV, V], the states at the chunks' starts h
    [NC, HV, K, V], v_new [NC, HV, C, V], the states at the segments' ends S_end [E, HV, K, V], and
    the transitions of `Packing.middle` [M, HV, K, K]."""

    o: Tensor | None = None
    h: Tensor | None = None
    v_new: Tensor | None = None
    S_end: Tensor | None = None
    transition: Tensor | None = None


class ScanGrads(NamedTuple):
    """do as given, and what the reverse scan writes: dh [NC, HV, K, V], and y [NC, HV, C, V] or, if
    all kernels of the local backward read it instead (`reads_dv`), dv = beta y [T, HV, V]."""

    do: Tensor
    y: Tensor | None
    dh: Tensor
    dv: Tensor | None = None


@functools.cache
def _full_chunks(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """For `columns`: where each chunk starts if all before it are full, and the rows of a full
    chunk, as an array, since numpy would convert an int in every call."""
    return np.arange(0, 2048 * chunk, chunk, dtype=np.int32), np.array(chunk, dtype=np.int32)


def columns(packing: Packing) -> Joined:
    """The columns of `Tables`. The host forms them for every new packing, so what there is for each
    segment stays in lists, and only what there is for each chunk takes operations of numpy, each of
    which costs 3 to 7 us."""
    start, stop, chunks = packing.spans()
    first = [0, *accumulate(chunks)]
    segments, total = len(start), first.pop()
    # Chunks without tokens, which fill a frame, are at an address that exists.
    size = total if packing.frame is None else packing.frame.chunks
    lengths = size, size, segments, segments, segments
    places, end = places_of(lengths, torch.int32)
    starts_at, rows_at, start_at, stop_at, _ = places
    # How far a segment's chunks are from where they would be if all chunks before were full.
    C = packing.chunk
    moved = [a - C * n for a, n in zip(start, first, strict=True)]
    values = np.zeros(end + 2 * segments, dtype=np.int32)  # what comes after `end` is not sent
    gap = [0] * (stop_at - start_at - segments)
    values[start_at:] = [*start, *gap, *stop, *gap, *first, *gap, *moved, *chunks]
    each = values[end + segments :]
    starts, rows = values[starts_at : starts_at + total], values[rows_at : rows_at + total]
    starts_if_full, rows_if_full = _full_chunks(C)
    many = total > len(starts_if_full)
    full = C * np.arange(total, dtype=np.int32) if many else starts_if_full[:total]
    np.add(values[end : end + segments].repeat(each), full, out=starts)
    np.subtract(values[stop_at : stop_at + segments].repeat(each), starts, out=rows)
    np.minimum(rows, rows_if_full, out=rows)
    return Joined(values[:end], places, lengths)


def tables(packing: Packing, device: torch.device) -> Tables:
    return Tables(*packing.table(columns, torch.int32, device))


def stage_name(stage: str, rule: DeltaRule, dtype: torch.dtype) -> str:
    """Name of a stage in the table of tiles."""
    if rule.per_head:
        return f"{stage}_head"
    return stage if safe(rule, dtype) else f"{stage}_any"


def after_local(rule: DeltaRule) -> DeltaRule:
    """The rule for kernels to which p and k are one, since they read k_decayed, with a decay a
    channel. So no kernel is compiled twice."""
    own = rule.removal == "p" and not rule.per_head
    return rule._replace(removal="k") if own else rule


def own(rule: DeltaRule) -> str:
    """The end of the names of local stages in the table of tiles."""
    return "_own" if after_local(rule) is not rule else ""


def planes(rule: DeltaRule) -> int:
    """How many planes `Chunks.rows` has."""
    return 9 if rule.per_head else 3


def empty_shares(count: int, x: Inputs) -> Tensor:
    """Memory for `count` parts of dbeta [count, T', HV], fp32. T' is T rounded up to a multiple of
    16: Triton compiles kernels that take it for such multiples, so no other T compiles them again.
    """
    T = len(x.q)
    rows = ALIGNED * cdiv(T, ALIGNED)
    shares = torch.empty(count, rows, x.v.shape[1], dtype=torch.float32, device=x.q.device)
    if rows > T:
        shares[:, T:].zero_()  # nothing writes them, but they are added up, too
    return shares


def saved(x: Inputs, c: Chunks, states: ChunkStates, grads: ScanGrads) -> Saved:
    """What the kernels of the local backward read."""
    (h, v_new), inputs = states, (rows(x.q), rows(x.k), rows(x.p), rows(x.v), rows(grads.do))
    return Saved(
        *inputs, c.o, h, grads.dh, v_new, grads.y, c.rows, c.decay, c.anchors, c.steep_or_none()
    )

"""Packing: how the tokens of one rank are divided into sequences, segments and chunks.

Everything here is computed on the host. Tensors are made when a backend asks for its tables on a
device.

Terms. A rank holds one or more token ranges of the global batch. Inside a range, the tokens of one
sequence are a part. A part may be cut into segments; otherwise it is one segment. A segment
consists of chunks of equally many tokens, of which the last may be shorter. Example: sequences of
100 and 60 tokens on one rank, without cuts, are the segments [0,100) and [100,160). In chunks of 64
tokens these have 2 chunks and 1 chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled, to_device
from fla_cp.partition.workload import Counts, Part, Workload, pieces
from fla_cp.rule import CHUNK


class Segment(NamedTuple):
    """A run of tokens of one sequence that is handled as one unit.

    start, stop: local token offsets. sequence: the sequence's index in the global batch. begins,
    ends: whether the sequence's first token, and its last, are in the segment. entry: the index,
    among the rank's ranges, of the range that the sequence enters with this segment; -1 if it
    enters none. exit: the index of the range that it leaves with this segment, or -1.
    """

    start: int
    stop: int
    sequence: int
    begins: bool
    ends: bool
    entry: int = -1
    exit: int = -1

    @property
    def continues(self) -> bool:
        """Whether the previous segment on this rank is the one before it in the sequence."""
        return not self.begins and self.entry < 0


class Frame(NamedTuple):
    """The sizes that several packings have in common on one rank, so that they can share recorded
    programs or a CUDA graph: the packings of a context with max_sequences, or similar packings.

    sequences: how many the global batch has. segments, chunks: how many there are, including
    segments and chunks without tokens that fill the list. The last segment, the spare, never has
    tokens. enters, leaves: into how many of the rank's ranges a state may come from the range
    before, and out of how many one may go on. largest: see `Packing.largest`; None means this
    rank's own counts. filled: how many chunks at the front have tokens in every packing. passes:
    through how many ranges a state may pass; None: through one if states may enter and leave.
    chunk: how many tokens a chunk has.
    """

    sequences: int
    segments: int
    chunks: int
    enters: int
    leaves: int
    largest: Counts | None = None
    filled: int = 0
    passes: int | None = None
    chunk: int = CHUNK

    @classmethod
    @lru_cache(maxsize=1024)
    def around(cls, segments: int, chunks: int, chunk: int = CHUNK) -> Frame:
        """The frame of packings of one rank alone that have about so many segments and chunks.
        Chunks are rounded up by at most a sixteenth, or to a multiple of 8. Segments are rounded up
        further, since a segment without tokens costs little. A small number stays nearly exact,
        because kernels are chosen by the number of segments."""
        least = 4 if segments < 8 else 8
        room = _rounded(segments + 1, max(least, _half_power(segments) // 4))
        step = max(8, _half_power(chunks) // 16)
        full = _rounded(chunks, step)
        filled = max(0, full - step)
        return cls(0, room, full, enters=0, leaves=0, filled=filled, chunk=chunk)

    @classmethod
    def around_ranks(cls, counts: Sequence[Counts], rank: int, chunk: int = CHUNK) -> Frame:
        """The frame of packings that are like one with these counts. counts: those of all ranks'
        parts. chunk: how many tokens a chunk has. It is exact how many states enter, leave and
        pass. So is a number of segments below 4, because with so few, an empty segment could change
        which kernels are chosen."""
        frames = []
        for c in counts:
            frame = cls.around(c.everything, c.chunks, chunk)
            if c.everything < 4:
                frame = frame._replace(segments=c.everything + 1)
            frame = frame._replace(enters=c.carried, leaves=c.feeding, passes=c.middle)
            frames.append(frame)
        largest = Counts.largest(frame.counts for frame in frames)
        largest = largest._replace(everything=largest.everything - 1)
        return frames[rank]._replace(largest=largest)

    @classmethod
    def of(
        cls, sequences: int, tokens: int, chunk: int = CHUNK, *, enters: bool, leaves: bool
    ) -> Frame:
        """The frame of a rank with one range of `tokens` tokens. enters, leaves: whether a state
        may come from another rank, or go to one."""
        parts = min(sequences, tokens)
        chunks = (tokens + (chunk - 1) * parts) // chunk
        filled = -(-tokens // chunk)
        crosses = int(enters), int(leaves)
        return cls(sequences, parts + 1, chunks, *crosses, filled=filled, chunk=chunk)

    @property
    def counts(self) -> Counts:
        return Counts(self.segments, self.leaves, self.enters, self.through, self.chunks)

    @property
    def through(self) -> int:
        """Through how many ranges a state may pass."""
        return min(self.enters, self.leaves, 1) if self.passes is None else self.passes


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


def _half_power(n: int) -> int:
    """The largest power of two that is at most n; 1 for n < 1."""
    return 1 << max(n, 1).bit_length() - 1


@dataclass(frozen=True)
class Packing(Tabled):
    """The segments of one rank, in local token order, and the tables derived from them.

    tokens: how many local tokens there are. sequences: how many sequences the global batch has (N).
    ranges: how many token ranges the rank owns. segments: see `Segment`. empty: the sequences
    without tokens whose final state this rank provides.
    chunk: how many tokens a chunk has.
    frame: the sizes to which segments and chunks are filled up. With a frame, `carried`, `feeding`
    and `middle` have as many segments as there are ranges that a state may enter, leave and pass.
    If this packing has none for the only such range, it is the spare, whose map nobody reads.
    loads: the workloads of all ranks, cut in the same way; empty if the rank is alone or has a
    frame.
    """

    tokens: int
    sequences: int
    ranges: int
    segments: tuple[Segment, ...]
    empty: tuple[int, ...] = ()
    frame: Frame | None = None
    loads: tuple[Workload, ...] = ()
    chunk: int = CHUNK

    @classmethod
    def build(
        cls,
        cu_seqlens: Sequence[int],
        ranges: Sequence[tuple[int, int]] | None = None,
        *,
        segment_chunks: int | None = None,
        counts_empty: bool = True,
        frame: Frame | None = None,
        loads: tuple[Workload, ...] = (),
        chunk: int = CHUNK,
    ) -> Packing:
        """The packing of the global token `ranges` (default: all tokens), in the given order.
        frame: with several ranges, one that has exactly as many states that enter, leave and pass.
        loads: the workloads of all ranks, before cuts. segment_chunks: cut into segments of at most
        that many chunks. counts_empty: whether this rank provides the final states of sequences
        without tokens."""
        total = cu_seqlens[-1]
        ranges = [(0, total)] if ranges is None else ranges
        segments: list[Segment] = []
        base = 0
        for r, (lo, hi) in enumerate(ranges):
            for n, start, stop in _parts(cu_seqlens, lo, hi):
                first, last = cu_seqlens[n], cu_seqlens[n + 1]
                segments.append(
                    Segment(
                        start=base + start - lo,
                        stop=base + stop - lo,
                        sequence=n,
                        begins=start == first,
                        ends=stop == last,
                        entry=r if start == lo and start > first else -1,
                        exit=r if stop == hi and stop < last else -1,
                    )
                )
            base += hi - lo
        if frame is not None:
            none = Segment(base, base, len(cu_seqlens) - 2, begins=True, ends=True)
            segments += [none] * (frame.segments - len(segments))
        empty = [n for n, (a, b) in enumerate(pairwise(cu_seqlens)) if a == b]
        whole = cls(
            tokens=base,
            sequences=len(cu_seqlens) - 1,
            ranges=len(ranges),
            segments=tuple(segments),
            empty=tuple(empty) if counts_empty else (),
            frame=frame,
            loads=loads,
            chunk=chunk,
        )
        return whole.cut(segment_chunks) if segment_chunks else whole

    def cut(self, chunks: int) -> Packing:
        """The same tokens with longer segments cut into equal pieces of at most `chunks` chunks."""
        segments: list[Segment] = []
        for s in self.segments:
            count = -(-(s.stop - s.start) // self.chunk)
            if count <= chunks:
                segments.append(s)
                continue
            _, length = pieces(count, chunks)
            for a in range(s.start, s.stop, length * self.chunk):
                b, first = min(a + length * self.chunk, s.stop), a == s.start
                last = b == s.stop
                segments.append(
                    s._replace(
                        start=a,
                        stop=b,
                        begins=s.begins and first,
                        ends=s.ends and last,
                        entry=s.entry if first else -1,
                        exit=s.exit if last else -1,
                    )
                )
        return Packing(
            tokens=self.tokens,
            sequences=self.sequences,
            ranges=self.ranges,
            segments=tuple(segments),
            empty=self.empty,
            frame=self.frame,
            loads=tuple(load.cut(chunks) for load in self.loads),
            chunk=self.chunk,
        )

    @cached_property
    def on_ranks(self) -> tuple[Workload, ...]:
        """The workloads of all ranks, or of this one if it is alone."""
        if self.loads:
            return self.loads
        chunks = ((-(-(s.stop - s.start) // self.chunk), s) for s in self.segments)
        return (Workload.of_parts(Part(n, s.begins, s.ends) for n, s in chunks),)

    @cached_property
    def largest(self) -> Counts:
        """The largest counts of any rank. They are equal on all ranks, so that they may decide
        which kernel is launched. With a frame they cover all packings."""
        if self.frame is not None:
            return self.frame.largest or self.frame.counts
        return Counts.largest(load.counts for load in self.on_ranks)

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """Indices of the segments that a state enters, from this rank or another."""
        which = tuple(i for i, s in enumerate(self.segments) if not s.begins)
        return self._or_spare(which, 0 if self.frame is None else self.frame.enters)

    @cached_property
    def feeding(self) -> tuple[int, ...]:
        """Indices of the segments that hand their state on, on this rank or to another."""
        which = tuple(i for i, s in enumerate(self.segments) if not s.ends)
        return self._or_spare(which, 0 if self.frame is None else self.frame.leaves)

    @cached_property
    def middle(self) -> tuple[int, ...]:
        """Indices of the segments through which a state passes. Only these need a transition."""
        which = tuple(i for i, s in enumerate(self.segments) if not s.begins and not s.ends)
        return self._or_spare(which, 0 if self.frame is None else self.frame.through)

    def _or_spare(self, which: tuple[int, ...], needed: int) -> tuple[int, ...]:
        """`which`, or the spare if there is to be one segment and none is in `which`."""
        found = (len(self.segments) - 1,) if needed == 1 and not which else which
        assert self.frame is None or len(found) == needed, "the frame is that of other packings"
        return found

    @property
    def count(self) -> int:
        """How many segments there are."""
        return len(self.segments) if self.frame is None else self.frame.segments

    @cached_property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(self.count))

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """Indices of the segments that hold the first token of their sequence."""
        return tuple(i for i, s in enumerate(self.segments) if s.begins)

    @cached_property
    def ending(self) -> tuple[int, ...]:
        """Indices of the segments that hold the last token of their sequence."""
        return tuple(i for i, s in enumerate(self.segments) if s.ends)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """The segments that a fold has to join, as lists of indices: runs of two or more linked
        segments of this rank, and single segments that a state enters or leaves across ranks."""
        runs: list[list[int]] = []
        for i, s in enumerate(self.segments):
            if s.continues:
                runs[-1].append(i)
            else:
                runs.append([i])
        return tuple(
            tuple(run)
            for run in runs
            if len(run) > 1 or self.segments[run[0]].entry >= 0 or self.segments[run[0]].exit >= 0
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """0, and then where each segment stops, in local tokens. The spare is left out."""
        return (0, *(s.stop for s in (self.segments[:-1] if self.frame else self.segments)))

    def spans(self) -> tuple[list[int], list[int], list[int]]:
        """Where each segment starts and where it stops, in local tokens, and how many chunks it
        has."""
        start, stop = [s.start for s in self.segments], [s.stop for s in self.segments]
        chunks = [-(-(b - a) // self.chunk) for a, b in zip(start, stop, strict=True)]
        return start, stop, chunks

    @cached_property
    def single(self) -> bool:
        """Whether there is one range and no chain has several segments. The map of the range is
        then that of a single segment, so that nothing needs to be folded."""
        return self.ranges == 1 and all(len(chain) == 1 for chain in self.chains)

    def index(self, which: Sequence[int], device: torch.device) -> Tensor:
        """`which` as an int64 tensor on `device`. It is made once."""
        which = tuple(which)
        return self.cached((which, device), lambda: to_device(which, torch.int64, device))

    def steps(self, device: torch.device) -> StepTable:
        """The chunk tables of the torch stages on `device`. They are made once.

        Raises RuntimeError while a CUDA graph is captured for several packings, because the tables'
        shapes and the loops over them depend on the packing.
        """
        fixed = self.frame is not None and device.type == "cuda"
        if fixed and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "under a context with max_sequences only impl='triton' can be captured in a CUDA "
                "graph, not impl='torch'"
            )
        return self.cached(device, lambda: StepTable.build(self, device))

    def subset(self, which: tuple[int, ...], device: torch.device) -> Subset:
        """The segments `which`, in the order in which a scan over them holds their states."""
        position = self.steps(device).position
        segments = tuple(sorted(which, key=position.__getitem__))
        places = tuple(position[i] for i in segments)
        return Subset(segments, places, self.index(places, device))


def _parts(cu_seqlens: Sequence[int], lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, start, stop) of each part of [lo, hi) that has tokens."""
    first, stop = max(bisect_right(cu_seqlens, lo) - 1, 0), bisect_left(cu_seqlens, hi)
    for n, (a, b) in enumerate(pairwise(cu_seqlens[first : stop + 1]), first):
        if max(a, lo) < min(b, hi):
            yield n, max(a, lo), min(b, hi)


class StepTable(NamedTuple):
    """An order of the chunks for a scan over all segments at once, in PyTorch. Segments are sorted
    by length, longest first, and the t-th chunks of all segments are one slice.

    At step t, a scan takes the chunks `bounds[t]`. They belong to the first
    `bounds[t][1] - bounds[t][0]` segments of `longest_first`.

    gather [NC*C]: the local token of each row of a chunk (0 for padding). padded [NC*C]: which rows
    are padding, or None. scatter [T]: the row of each local token. longest_first: the segments by
    length. position: the place of each segment in `longest_first`. bounds: the chunks of each step,
    as [start, stop). natural [NC]: the place of each chunk, in token order. Fields without a shape
    are on the host.
    """

    gather: Tensor
    padded: Tensor | None
    scatter: Tensor
    longest_first: tuple[int, ...]
    position: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    natural: Tensor

    @classmethod
    def build(cls, packing: Packing, device: torch.device) -> StepTable:
        """The table of a packing. Everything is computed on the host, and then sent."""
        start = torch.tensor([s.start for s in packing.segments], dtype=torch.int64, device="cpu")
        stop = torch.tensor([s.stop for s in packing.segments], dtype=torch.int64, device="cpu")
        C = packing.chunk
        chunks = (stop - start + C - 1) // C
        order = torch.argsort(chunks, descending=True, stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device="cpu")

        segment = torch.repeat_interleave(torch.arange(len(chunks), device="cpu"), chunks)
        step = torch.arange(len(segment), device="cpu") - (chunks.cumsum(0) - chunks)[segment]
        alive = torch.bincount(step) if len(step) else step
        edges = [0, *alive.cumsum(0).tolist()]
        edge = torch.tensor(edges[:-1], dtype=torch.int64, device="cpu")
        natural = edge[step] + position[segment]

        rows = torch.empty(len(segment), C, dtype=torch.int64, device="cpu")
        rows[natural] = (start[segment] + step * C)[:, None] + torch.arange(C, device="cpu")
        limit = torch.empty(len(segment), 1, dtype=torch.int64, device="cpu")
        limit[natural] = stop[segment][:, None]
        padded = (rows >= limit).flatten()
        gather = rows.flatten().masked_fill(padded, 0)
        scatter = torch.empty(packing.tokens, dtype=torch.int64, device="cpu")
        scatter[gather[~padded]] = torch.arange(len(gather), device="cpu")[~padded]
        return cls(
            gather=to_device(gather, torch.int64, device),
            padded=to_device(padded, torch.bool, device) if padded.any() else None,
            scatter=to_device(scatter, torch.int64, device),
            longest_first=tuple(order.tolist()),
            position=tuple(position.tolist()),
            bounds=tuple(pairwise(edges)),
            natural=to_device(natural, torch.int64, device),
        )

    def fold(
        self, subset: Subset | None = None, reverse: bool = False
    ) -> Iterator[tuple[slice, slice | Tensor]]:
        """For each step, (the rows of a state tensor, the chunks) that it takes.

        States are in the order of `longest_first` or, with a subset, in the subset's order.
        """
        for lo, hi in reversed(self.bounds) if reverse else self.bounds:
            if subset is None:
                yield slice(0, hi - lo), slice(lo, hi)
                continue
            n = bisect_left(subset.places, hi - lo)
            if n:
                yield slice(0, n), subset.rows[:n] + lo


class Subset(NamedTuple):
    """Some segments, longest first, as `StepTable.fold` needs them.

    segments: their indices. places: their places in `StepTable.longest_first`, on the host. rows:
    the same on the device.
    """

    segments: tuple[int, ...]
    places: tuple[int, ...]
    rows: Tensor

    def places_of(self, segments: Sequence[int]) -> list[int]:
        """The row of each of these segments in a state tensor of the subset."""
        row = {i: p for p, i in enumerate(self.segments)}
        return [row[i] for i in segments]

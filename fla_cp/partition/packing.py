"""Packing: how the tokens on one card are cut into sequences, segments and chunks.

Host arithmetic only; tensors appear when a backend asks for its tables on a device.

Terms. A card holds one or more token ranges of the global batch. Inside a range, the tokens of
one sequence are a part; a part is cut into segments of at most `segment_chunks` chunks, and a
segment into chunks of 64 tokens, the last one possibly shorter. Example: sequences of 100 and 60
tokens, one card, no cutting: segments [0,100) and [100,160) with 2 and 1 chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled, to_device
from fla_cp.partition.workload import Counts, Part, Workload, pieces
from fla_cp.rule import CHUNK


class Segment(NamedTuple):
    """A run of tokens of one sequence that is handled as one unit.

    start, stop: local token offsets. sequence: global index.
    begins, ends: the sequence's first / last token is here.
    entry, exit: index of the owned range whose first / last token this is, if the sequence goes
    on in an earlier / a later range; -1 otherwise.
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
        """True if the previous segment of this card's list is the one before it."""
        return not self.begins and self.entry < 0


class Frame(NamedTuple):
    """Sizes that every packing of a context with max_sequences has on this card, and what may
    happen to it there.

    sequences: of the global batch. segments: padded with such without tokens, the last of which,
    the spare, is one always. chunks: padded with such without tokens. enters, leaves: whether
    another rank's state may enter or this one's leave. largest: see `Packing.largest`; None: its
    own counts.
    """

    sequences: int
    segments: int
    chunks: int
    enters: bool
    leaves: bool
    largest: Counts | None = None

    @classmethod
    def of(cls, sequences: int, tokens: int, *, enters: bool, leaves: bool) -> Frame:
        """For one range of `tokens` tokens."""
        parts = min(sequences, tokens)
        chunks = (tokens + (CHUNK - 1) * parts) // CHUNK
        return cls(sequences, parts + 1, chunks, enters, leaves)

    @property
    def counts(self) -> Counts:
        through = self.enters and self.leaves
        return Counts(self.segments, int(self.leaves), int(self.enters), int(through), self.chunks)


@dataclass(frozen=True)
class Packing(Tabled):
    """The segments of one card, in local token order, and the tables derived from them.

    tokens: local tokens. sequences: sequences of the global batch (N). ranges: token ranges that
    this card owns. segments: see `Segment`.
    empty: sequences without a token whose final state this card accounts for.
    frame: the sizes that segments and chunks are padded to. Then exactly one segment is carried
    where a state may enter, one feeding where one may leave, one middle where both: that of the
    tokens, or the spare, whose map nobody reads.
    loads: of all ranks, cut like this card's; none: it is alone, or has a frame.
    """

    tokens: int
    sequences: int
    ranges: int
    segments: tuple[Segment, ...]
    empty: tuple[int, ...] = ()
    frame: Frame | None = None
    loads: tuple[Workload, ...] = ()

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
    ) -> Packing:
        """Segments of the global token `ranges` (default: all tokens), in the given order; with a
        frame of one range, padded to it. loads: of all ranks, uncut."""
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
        )
        return whole.cut(segment_chunks) if segment_chunks else whole

    def cut(self, chunks: int) -> Packing:
        """The same tokens, longer segments in pieces of equal length, at most `chunks` chunks."""
        segments: list[Segment] = []
        for s in self.segments:
            count = -(-(s.stop - s.start) // CHUNK)
            if count <= chunks:
                segments.append(s)
                continue
            _, length = pieces(count, chunks)
            for a in range(s.start, s.stop, length * CHUNK):
                b, first = min(a + length * CHUNK, s.stop), a == s.start
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
        loads = tuple(load.cut(chunks) for load in self.loads)
        return replace(self, segments=tuple(segments), loads=loads)

    @cached_property
    def on_ranks(self) -> tuple[Workload, ...]:
        """Loads of all ranks, or of this card where it is alone."""
        if self.loads:
            return self.loads
        chunks = ((-(-(s.stop - s.start) // CHUNK), s) for s in self.segments)
        return (Workload.of_parts(Part(n, s.begins, s.ends) for n, s in chunks),)

    @cached_property
    def largest(self) -> Counts:
        """The most that any rank has, equal on all: what may decide which kernel a launch takes. In
        a frame that of all packings."""
        if self.frame is not None:
            return self.frame.largest or self.frame.counts
        return Counts.largest(load.counts for load in self.on_ranks)

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """Segments that some segment precedes, on this card or another."""
        which = tuple(i for i, s in enumerate(self.segments) if not s.begins)
        return self._or_spare(which, self.frame is not None and self.frame.enters)

    @cached_property
    def feeding(self) -> tuple[int, ...]:
        """Segments that some segment follows, on this card or another."""
        which = tuple(i for i, s in enumerate(self.segments) if not s.ends)
        return self._or_spare(which, self.frame is not None and self.frame.leaves)

    @cached_property
    def middle(self) -> tuple[int, ...]:
        """Segments through which a state passes: only these need a transition."""
        which = tuple(i for i, s in enumerate(self.segments) if not s.begins and not s.ends)
        frame = self.frame
        return self._or_spare(which, frame is not None and frame.enters and frame.leaves)

    def _or_spare(self, which: tuple[int, ...], needed: bool) -> tuple[int, ...]:
        return (len(self.segments) - 1,) if needed and not which else which

    @cached_property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(len(self.segments)))

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """Segments that hold the first token of their sequence."""
        return tuple(i for i, s in enumerate(self.segments) if s.begins)

    @cached_property
    def ending(self) -> tuple[int, ...]:
        """Segments that hold the last token of their sequence."""
        return tuple(i for i, s in enumerate(self.segments) if s.ends)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Runs of two or more linked segments of this card, and single ones that cross its edge."""
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
        """Local: where each segment stops, after 0; without the spare."""
        return (0, *(s.stop for s in (self.segments[:-1] if self.frame else self.segments)))

    @cached_property
    def single(self) -> bool:
        """Whether the one range here has one segment at most at either edge: the range's map is
        the segment's."""
        return self.ranges == 1 and all(len(chain) == 1 for chain in self.chains)

    def index(self, which: Sequence[int], device: torch.device) -> Tensor:
        """`which` as an int64 tensor on `device`, made once."""
        which = tuple(which)
        return self.cached((which, device), lambda: to_device(which, torch.int64, device))

    def steps(self, device: torch.device) -> StepTable:
        """Chunk tables of the torch stages on `device`, made once.

        Raises RuntimeError while a CUDA graph is captured for several packings: their shapes, and
        the loops over them, follow the packing.
        """
        fixed = self.frame is not None and device.type == "cuda"
        if fixed and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "under a context with max_sequences only impl='triton' can be captured in a CUDA "
                "graph, not impl='torch'"
            )
        return self.cached(device, lambda: StepTable.build(self, device))

    def subset(self, which: tuple[int, ...], device: torch.device) -> Subset:
        """`which` in the order in which a scan over them alone holds their states."""
        position = self.steps(device).position
        segments = tuple(sorted(which, key=position.__getitem__))
        places = tuple(position[i] for i in segments)
        return Subset(segments, places, self.index(places, device))


def _parts(cu_seqlens: Sequence[int], lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, start, stop) of every non-empty piece of a sequence in [lo, hi)."""
    first, stop = max(bisect_right(cu_seqlens, lo) - 1, 0), bisect_left(cu_seqlens, hi)
    for n, (a, b) in enumerate(pairwise(cu_seqlens[first : stop + 1]), first):
        if max(a, lo) < min(b, hi):
            yield n, max(a, lo), min(b, hi)


class StepTable(NamedTuple):
    """Chunks ordered so that step t of all segments lies side by side, longest segments first.

    A scan then takes slices: at step t the chunks `bounds[t]` belong to the first
    `bounds[t][1] - bounds[t][0]` segments of `walked`.

    gather [NC*C]: local token of each chunk row (0 where padded); padded [NC*C] bool or None.
    scatter [T]: chunk row of each local token. walked: segments, longest first (host).
    position: place of each segment in `walked` (host). bounds: chunk slice of each step (host).
    natural [NC]: chunk of each chunk in token order.
    """

    gather: Tensor
    padded: Tensor | None
    scatter: Tensor
    walked: tuple[int, ...]
    position: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    natural: Tensor

    @classmethod
    def build(cls, packing: Packing, device: torch.device) -> StepTable:
        start = torch.tensor([s.start for s in packing.segments], dtype=torch.int64, device="cpu")
        stop = torch.tensor([s.stop for s in packing.segments], dtype=torch.int64, device="cpu")
        chunks = (stop - start + CHUNK - 1) // CHUNK
        order = torch.argsort(chunks, descending=True, stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device="cpu")

        segment = torch.repeat_interleave(torch.arange(len(chunks), device="cpu"), chunks)
        step = torch.arange(len(segment), device="cpu") - (chunks.cumsum(0) - chunks)[segment]
        alive = torch.bincount(step) if len(step) else step
        edges = [0, *alive.cumsum(0).tolist()]
        edge = torch.tensor(edges[:-1], dtype=torch.int64, device="cpu")
        natural = edge[step] + position[segment]

        rows = torch.empty(len(segment), CHUNK, dtype=torch.int64, device="cpu")
        rows[natural] = (start[segment] + step * CHUNK)[:, None] + torch.arange(CHUNK, device="cpu")
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
            walked=tuple(order.tolist()),
            position=tuple(position.tolist()),
            bounds=tuple(pairwise(edges)),
            natural=to_device(natural, torch.int64, device),
        )

    def fold(
        self, subset: Subset | None = None, reverse: bool = False
    ) -> Iterator[tuple[slice, slice | Tensor]]:
        """(states, chunks) of each step: rows of a state tensor and the chunks they meet.

        States are in the order of `walked`, or, with a subset, in the subset's order.
        """
        for lo, hi in reversed(self.bounds) if reverse else self.bounds:
            if subset is None:
                yield slice(0, hi - lo), slice(lo, hi)
                continue
            n = bisect_left(subset.places, hi - lo)
            if n:
                yield slice(0, n), subset.rows[:n] + lo


class Subset(NamedTuple):
    """Some segments, longest first, as `StepTable.walk` needs them.

    segments, places: segment and its place in the full order (host). rows: places on the device.
    """

    segments: tuple[int, ...]
    places: tuple[int, ...]
    rows: Tensor

    def places_of(self, segments: Sequence[int]) -> list[int]:
        """Row of each of `segments` in a state tensor of this subset."""
        row = {i: p for p, i in enumerate(self.segments)}
        return [row[i] for i in segments]

"""Packing and the slot table on random batches: properties of every partition."""

import random
import weakref
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch

from fla_cp.comm import Local
from fla_cp.custom_op import ONE_SLOT
from fla_cp.partition import device_tables
from fla_cp.partition.device_tables import DeviceTable, Tabled
from fla_cp.partition.packing import Frame, Packing
from fla_cp.partition.slots import link_slots
from fla_cp.partition.whole import WholeSequences
from fla_cp.pipeline import PlanKey
from fla_cp.rule import CHUNK


def batch(seed):
    """cu_seqlens with empty and one-token sequences, and ranges of up to 5 ranks, some empty."""
    rng = random.Random(seed)
    T, R = rng.choice([1, 5, 130, 400]), rng.randint(1, 5)
    cuts = sorted(rng.choices(range(T + 1), k=rng.randint(0, 6)))
    edges = [0, *sorted(rng.choices(range(T + 1), k=rng.randint(0, 2 * R))), T]
    pieces = list(pairwise(edges))
    rng.shuffle(pieces)
    ranges = [pieces[r::R] for r in range(R)]
    cu = (0, *cuts, T)
    packings = [
        Packing.build(cu, own, segment_chunks=rng.choice([None, 1, 2]), counts_empty=r == 0)
        for r, own in enumerate(ranges)
    ]
    return cu, ranges, packings


def spans(ranges, packing):
    """(global start, global stop, sequence, segment index) of each segment of a rank."""
    base, at = [], 0
    for lo, hi in ranges:
        base.append((at, at + hi - lo, lo))
        at += hi - lo
    for i, s in enumerate(packing.segments):
        ((start, lo),) = [(a, lo) for a, b, lo in base if a <= s.start and s.stop <= b and a < b]
        yield s.start - start + lo, s.stop - start + lo, s.sequence, i


SEEDS = pytest.mark.parametrize("seed", range(40))


@SEEDS
def test_segments_tile_the_batch_and_know_their_sequence(seed):
    cu, ranges, packings = batch(seed)
    everything = sorted(
        (*span[:3], r, span[3])
        for r, packing in enumerate(packings)
        for span in spans(ranges[r], packing)
    )
    at = 0
    for start, stop, n, r, i in everything:
        segment = packings[r].segments[i]
        assert start == at < stop
        assert cu[n] <= start < stop <= cu[n + 1]
        assert segment.begins == (start == cu[n])
        assert segment.ends == (stop == cu[n + 1])
        at = stop
    assert at == cu[-1]
    assert sum(packing.tokens for packing in packings) == cu[-1]
    empty = [n for n, (a, b) in enumerate(pairwise(cu)) if a == b]
    assert [n for packing in packings for n in packing.empty] == empty


@SEEDS
def test_every_link_is_inside_a_rank_or_between_slots(seed):
    """A segment that does not begin its sequence gets its state from the previous segment of its
    rank, or through the range (slot) that it opens. The same holds in reverse.
    """
    cu, ranges, packings = batch(seed)
    links = link_slots(cu, tuple(map(tuple, ranges)))
    slot = {owner_row: s for s, owner_row in enumerate(zip(links.owner, links.row, strict=True))}
    entered, left = set(), set()
    for r, packing in enumerate(packings):
        chained = {i for chain in packing.chains for i in chain[1:]}
        for i, s in enumerate(packing.segments):
            assert s.continues == (i in chained)
            assert s.begins + s.continues + (s.entry >= 0) == 1
            assert (i in packing.carried) == (not s.begins)
            assert (i in packing.feeding) == (not s.ends)
            assert (i in packing.middle) == (not s.begins and not s.ends)
            if s.entry >= 0:
                entered.add(slot[r, s.entry])
            if s.exit >= 0:
                left.add(slot[r, s.exit])
    assert entered == {s for s in range(links.count) if links.continues[s]}
    assert left == {s for s in range(links.count) if links.feeds(s)}


@SEEDS
def test_chunk_tables_hold_each_token_once_longest_segment_first(seed):
    _, _, packings = batch(seed)
    for packing in packings:
        table = packing.steps(torch.device("cpu"))
        lengths = [-(-(s.stop - s.start) // CHUNK) for s in packing.segments]
        by_length = [lengths[i] for i in table.longest_first]
        assert by_length == sorted(lengths, reverse=True)
        assert [table.longest_first[p] for p in table.position] == list(range(len(lengths)))
        rows = table.gather[table.scatter]
        assert torch.equal(rows, torch.arange(packing.tokens))
        kept = table.gather if table.padded is None else table.gather[~table.padded]
        assert len(kept) == packing.tokens
        first = table.gather.view(-1, CHUNK)[table.natural, 0].tolist()
        starts = [a for s in packing.segments for a in range(s.start, s.stop, CHUNK)]
        assert first == starts


@SEEDS
def test_a_subset_visits_only_its_own_chunks(seed):
    _, _, packings = batch(seed)
    cpu = torch.device("cpu")
    for packing in packings:
        if not packing.feeding:
            continue
        table, subset = packing.steps(cpu), packing.subset(packing.feeding, cpu)
        assert sorted(subset.segments) == sorted(packing.feeding)
        met = {i: [] for i in subset.segments}
        for states, chunks in table.fold(subset):
            for row, chunk in zip(range(states.start, states.stop), chunks.tolist(), strict=True):
                met[subset.segments[row]].append(int(table.gather[chunk * CHUNK]))
        for i, starts in met.items():
            s = packing.segments[i]
            assert starts == list(range(s.start, s.stop, CHUNK))


def test_tables_are_made_once_per_device():
    packing = Packing.build((0, 100, 200))
    cpu = torch.device("cpu")
    assert packing.steps(cpu) is packing.steps(cpu)
    assert packing.index([1, 0], cpu) is packing.index((1, 0), cpu)
    assert packing.index([1, 0], cpu).tolist() == [1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_frames_of_packings_without_a_context(seed):
    """Packings of as many tokens share few frames, which hold all of their chunks and segments and
    promise no chunk that one of them lacks."""
    rng, T, frames = random.Random(seed), 32768, set()
    for _ in range(50):
        edges = sorted(rng.sample(range(1, T), rng.randint(7, 23)))
        packing = WholeSequences.of((0, *edges, T))
        chunks = sum(-(-(s.stop - s.start) // 64) for s in packing.segments)
        frame = packing.frame
        assert frame.filled <= chunks <= frame.chunks <= chunks * 17 / 16 + 1
        assert len(packing.segments) == frame.segments
        assert packing.segments[-1].start == packing.segments[-1].stop  # the spare
        frames.add(frame)
        key = PlanKey.of(packing, ONE_SLOT, Local())
        assert key == PlanKey.of(WholeSequences.of((0, *edges, T)), ONE_SLOT, Local())
    assert len(frames) <= 12


@pytest.mark.parametrize("seed", range(40))
def test_whole_sequences_are_the_packing_of_their_frame(seed):
    """They list their segments late, and their tables come from the offsets: both are those of the
    packing that is built segment by segment."""
    rng = random.Random(seed)
    T, chunk = rng.choice([0, 1, 64, 400, 3000]), rng.choice([16, 32, CHUNK])
    offsets = (0, *sorted(rng.choices(range(T + 1), k=rng.randint(0, 20))), T)
    found = WholeSequences.of(offsets, chunk)
    counts = [-(-(b - a) // chunk) for a, b in pairwise(offsets)]
    frame = Frame.around(sum(n > 0 for n in counts), sum(counts), chunk)
    packing = Packing.build(offsets, frame=frame, chunk=chunk)
    for name in (*(f.name for f in fields(Packing)), "everything", "offsets", "beginning"):
        assert getattr(found, name) == getattr(packing, name), name
    assert found.spans() == packing.spans()


@pytest.mark.parametrize("seed", range(40))
def test_tables_of_the_kernels_are_those_of_the_segments(seed):
    operands = pytest.importorskip("fla_cp.kernels.triton.operands")
    cu, _, packings = batch(seed)
    # the last one has more chunks than numpy's constants
    long = WholeSequences.of((0, 3, 2100 * CHUNK + seed)) if seed == 0 else WholeSequences.of(cu)
    for packing in (*packings, WholeSequences.of(cu), WholeSequences.of(cu, 16), long):
        found = [t.tolist() for t in operands.tables(packing, torch.device("cpu"))]
        C = packing.chunk
        chunks = [(a, min(C, s.stop - a)) for s in packing.segments
                  for a in range(s.start, s.stop, C)]  # fmt: skip
        first = [sum(a < s.start for a, _ in chunks) for s in packing.segments]
        chunks += [(0, 0)] * ((packing.frame.chunks if packing.frame else 0) - len(chunks))
        edges = [s.start for s in packing.segments], [s.stop for s in packing.segments]
        assert found == [[a for a, _ in chunks], [n for _, n in chunks], *edges, first]


class Numbers(Tabled):
    """Keeps tables of multiples of `factor`."""

    def __init__(self, factor):
        self.factor = factor


def lists(x):
    return [x.factor, 2 * x.factor], (3 * x.factor,), np.arange(5) * x.factor


def tensors(x):
    return torch.full((3,), x.factor), [x.factor]


def counted(x):
    return (range(3),)


@pytest.mark.parametrize("build", [lists, tensors, counted])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_are_where_programs_look_for_them(build, dtype):
    """Programs know addresses alone. `take_tables` writes other values there."""
    cpu, old, new = torch.device("cpu"), Numbers(2), Numbers(7)
    at = old.addresses(build, dtype, cpu)
    columns = old.table(build, dtype, cpu)
    assert at == tuple(x.data_ptr() for x in columns) == old.addresses(build, dtype, cpu)
    assert all(place % 16 == 0 for place in at)
    new.take_tables(old)
    assert new.addresses(build, dtype, cpu) == at
    for found in (columns, new.table(build, dtype, cpu)):
        for x, values in zip(found, build(new), strict=True):
            assert x.dtype == dtype and x.tolist() == [int(n) for n in values]
    again = old.table(build, dtype, cpu)
    assert [x.tolist() for x in again] == [[int(n) for n in values] for values in build(old)]
    shared = again[0].data_ptr() == at[0]
    assert shared == (build is counted)  # what no packing changes is there once


def test_a_table_of_another_size_is_not_taken():
    cpu, old, new = torch.device("cpu"), WholeSequences.of((0, 70)), WholeSequences.of((*range(9),))
    count = lambda packing: (range(packing.count),)  # noqa: E731
    old.table(count, torch.int64, cpu)
    assert old.count != new.count
    with pytest.raises(AssertionError):
        new.take_tables(old)


def test_threads_that_make_one_table_get_the_same():
    """A program holds addresses of a table only, so no other thread may put another in its place.
    The second thread comes while the first one forms the columns."""
    links = link_slots((0, 20), (((0, 10),), ((10, 20),)))
    found = []

    def columns(owner):
        if not found:
            found.append(())
            found[0] = owner.addresses(columns, torch.int32, torch.device("cpu"))
        return [1, 2, 3], [4, 5]

    here = links.addresses(columns, torch.int32, torch.device("cpu"))
    assert here == found[0]
    assert links.addresses(columns, torch.int32, torch.device("cpu")) == here


def offsets_of(owner):
    return [[0, 5]]


def test_a_captured_graph_keeps_the_tables_that_it_reads(monkeypatch):
    """As on a GPU: the table is there before, and whoever kept it forgets it."""
    monkeypatch.setattr(device_tables, "_captured", set())
    gpu, kept = torch.device("cuda"), []
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        owner, memory = Tabled(), torch.tensor([0, 5], dtype=torch.int32)
        owner._on_devices[offsets_of, gpu] = DeviceTable(memory, (0,), (2,))
        owner.addresses(offsets_of, torch.int32, gpu)
        kept.append(weakref.ref(memory))
        del owner, memory
    assert [x() is not None for x in kept] == [False, True]


@pytest.mark.parametrize("chunk", [16, 32])
def test_shorter_chunks(chunk):
    """Sequences of 5, 0 and `chunk` tokens are a chunk each, and one of 64 is several."""
    packing = Packing.build((0, 5, 5, 5 + chunk), chunk=chunk)
    assert packing.spans()[2] == [1, 1]
    table = packing.steps(torch.device("cpu"))
    assert table.gather.shape == (2 * chunk,) and table.padded.sum() == chunk - 5
    assert table.gather[table.scatter].tolist() == list(range(5 + chunk))
    assert packing != Packing.build((0, 5, 5, 5 + chunk))
    assert PlanKey.of(packing, ONE_SLOT, Local()) != PlanKey.of(
        Packing.build((0, 5, 5, 5 + chunk)), ONE_SLOT, Local()
    )
    framed = [WholeSequences.of((0, 5, 5 + chunk), size) for size in (chunk, CHUNK)]
    assert framed[0].spans()[2] == framed[1].spans()[2]
    keys = [PlanKey.of(packing, ONE_SLOT, Local()) for packing in framed]
    assert keys[0] != keys[1]
    longer = Packing.build((0, 64), chunk=chunk)
    assert longer.spans()[2] == [64 // chunk]
    cut = longer.cut(1)
    assert cut.chunk == chunk and len(cut.segments) == 64 // chunk

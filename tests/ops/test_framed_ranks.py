"""Calls on packings that are filled up to the sizes of others, under contexts of several ranks,
return the same bits as calls on the packings themselves."""

import random
from itertools import pairwise

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context
from fla_cp.comm.carry import _fold_tables
from fla_cp.comm.exchange.base import Local, entering_table
from fla_cp.ops import family
from fla_cp.partition.packing import Frame, Packing
from fla_cp.partition.slots import link_slots
from fla_cp.partition.token_ranges import contiguous_token_ranges, zigzag_token_ranges
from fla_cp.partition.workload import Counts, Workload
from fla_cp.pipeline import PlanKey
from tests.support.ranks import run_threads

T = 210
PACKINGS = {
    "documents cross": (0, 40, 100, 140, T),
    "one passes a rank": (0, 10, 200, T),
    "nothing crosses": (0, 30, 70, 140, T),
    "short ones": (0, 1, 2, 3, 60, 61, 62, 63, 64, 65, 66, 150, T),
    "empty ones": (0, 0, 30, 30, 30, T, T),
}
ALL_CROSS = (0, 5, 202, T)
"""One document begins in the first range and ends in the last one, whoever owns those between."""

OPERATORS = {
    "kda": (fla_cp.chunk_kda, (8,), {"safe_gate": True}),
    "gdn": (fla_cp.chunk_gated_delta_rule, (), {}),
    "gla": (fla_cp.chunk_gla, (8,), {}),
}


def results(context, name, impl):
    """o and the gradients of a call. Kernels are interpreted, and have one head."""
    op, channels, options = OPERATORS[name]
    torch.manual_seed(0)
    H, HV = (2, 4) if impl == "torch" else (1, 1)
    if name == "gla":
        H = HV
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, 8), dim=-1) for _ in "qk")
    v, g = torch.randn(1, T, HV, 8), -0.1 * torch.rand(1, T, HV, *channels)
    beta = () if name == "gla" else (torch.rand(1, T, HV),)
    leaves = [context.shard(x).requires_grad_() for x in (q, k, v, g, *beta)]
    o, _ = op(*leaves, **options, impl=impl, cp_context=context)
    do = context.shard(torch.randn(1, T, HV, 8))
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def ranges_of(kind, R):
    """Ranges of R ranks. "uneven": several a rank, of any lengths, in any order."""
    if kind == "uneven":
        pieces = list(pairwise([0, 3, 50, 64, 90, 128, 129, T]))
        return [pieces[r::R][::-1] for r in range(R)]
    return {"zigzag": zigzag_token_ranges, "contiguous": contiguous_token_ranges}[kind](T, R)


def framed_equals_exact(group, rank, name, impl, packings, exchange, kind="contiguous"):
    used, ranges = [], ranges_of(kind, group.size())

    def framed(context, *_):
        used.append(context.framed(context.packing))
        return used[-1]

    for offsets in packings:
        found = []
        for shared in (None, framed):
            context = build_cp_context(
                torch.tensor(offsets), group, exchange=exchange, token_ranges=ranges
            )
            with pytest.MonkeyPatch.context() as patch:
                if shared is not None:
                    patch.setattr(family, "_shared_packing", shared)
                found.append(results(context, name, impl))
        for n, (a, b) in enumerate(zip(*found, strict=True)):
            assert torch.equal(a, b), (rank, offsets, n)
    return [packing.frame is not None and packing.frame.segments for packing in used]


@pytest.mark.bits
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("exchange", ["all_gather", "ring", "scan", "heads"])
def test_torch_stages_give_the_same_bits(gloo_pool, name, exchange):
    given = name, "torch", [*PACKINGS.values()], exchange
    for ranks in (3, 1) if exchange == "all_gather" else (3,):
        found = gloo_pool.run(framed_equals_exact, *given, world_size=ranks)
        assert len(found) == ranks and all(all(segments) for segments in found)


@pytest.mark.bits
@pytest.mark.parametrize("name, exchange, kind, ranks", [
    ("kda", "all_gather", "zigzag", 2),
    ("gdn", "all_gather", "zigzag", 3),
    ("gdn", "ring", "zigzag", 2),
    ("gdn", "scan", "zigzag", 3),
    ("gdn", "heads", "zigzag", 3),
    ("gdn", "all_gather", "uneven", 3),
])  # fmt: skip
def test_several_ranges_give_the_same_bits(gloo_pool, name, exchange, kind, ranks):
    given = name, "torch", [*PACKINGS.values(), ALL_CROSS], exchange, kind
    found = gloo_pool.run(framed_equals_exact, *given, world_size=ranks)
    assert len(found) == ranks and all(all(segments) for segments in found)


@pytest.mark.bits
@pytest.mark.parametrize("packing", [
    "documents cross",
    pytest.param("one passes a rank", marks=pytest.mark.wide),
])  # fmt: skip
def test_kernels_give_the_same_bits_with_several_ranges(gloo_pool, packing):
    pytest.importorskip("triton")
    given = "gdn", "triton", [PACKINGS[packing]], "all_gather", "zigzag"
    found = gloo_pool.run(framed_equals_exact, *given, world_size=2)
    assert all(all(segments) for segments in found)


@pytest.mark.bits
@pytest.mark.parametrize(
    "name, packing",
    [
        ("gdn", "one passes a rank"),
        pytest.param("kda", "short ones", marks=pytest.mark.wide),
        pytest.param("kda", "nothing crosses", marks=pytest.mark.wide),
        pytest.param("kda", "empty ones", marks=pytest.mark.wide),
        pytest.param("gla", "documents cross", marks=pytest.mark.wide),
    ],
)
def test_kernels_give_the_same_bits(gloo_pool, name, packing):
    pytest.importorskip("triton")
    given = name, "triton", [PACKINGS[packing]], "all_gather"
    found = gloo_pool.run(framed_equals_exact, *given, world_size=3)
    assert all(all(segments) for segments in found)


def frames(offsets, R=3, kind="contiguous"):
    """The framed packings of all ranks, and their links."""
    ranges = tuple(tuple(own) for own in ranges_of(kind, R))
    counts = [Workload.of(offsets, own).counts for own in ranges]
    found = [
        Packing.build(offsets, own, frame=Frame.around_ranks(counts, rank))
        for rank, own in enumerate(ranges)
    ]
    return found, link_slots(offsets, ranges)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "uneven"])
@pytest.mark.parametrize("offsets", [*PACKINGS.values(), ALL_CROSS], ids=[*PACKINGS, "all cross"])
def test_a_frame_adds_only_spare_entries(offsets, kind):
    framed, _ = frames(offsets, kind=kind)
    ranges = ranges_of(kind, 3)
    for rank, (packing, own) in enumerate(zip(framed, ranges, strict=True)):
        exact = Packing.build(offsets, own)
        assert packing.segments[: len(exact.segments)] == exact.segments
        spare = packing.segments[len(exact.segments) :]
        assert spare and all(s.start == s.stop == packing.tokens for s in spare)
        for name in ("carried", "feeding", "middle", "chains"):
            assert getattr(packing, name) == getattr(exact, name), (rank, name)
        assert packing.largest == framed[0].largest
        assert exact.largest.everything <= packing.largest.everything
        chunks = sum((s.stop - s.start + 63) // 64 for s in exact.segments)
        assert packing.frame.filled <= chunks <= packing.frame.chunks


def test_few_segments_choose_the_kernels_of_so_few():
    for n in (1, 2, 3):
        counts = Counts(everything=n, feeding=1, carried=0, middle=0, chunks=100)
        frame = Frame.around_ranks([counts, counts], 0)
        assert frame.segments == n + 1 and frame.largest.everything == n


def test_keys_of_frames_tell_crossings_apart():
    """Packings whose states cross the same ranks share a key; others do not."""

    def keys(offsets):
        framed, links = frames(offsets)
        return [PlanKey.of(packing, links, Local()) for packing in framed]

    assert keys((0, 40, 100, 150, T)) == keys((0, 33, 90, 160, T))
    whole = keys((0, 10, 200, T))
    assert all(a != b for a, b in zip(whole, keys((0, 10, 100, T)), strict=True))


def sizes(packing, links, rank):
    """The sizes that a recorded program has as constants."""
    names = "carried", "feeding", "middle", "everything"
    tables = []
    for reverse in (False, True):
        tables += _fold_tables(packing, reverse).values()
        direction = links.mirrored() if reverse else links
        tables.append(entering_table(rank, packing.ranges)(direction))
    lists = [getattr(packing, name) for name in names]
    return [len(column) for table in (lists, *tables) for column in table]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "uneven"])
def test_packings_with_one_key_have_tables_of_one_size(kind):
    """Also where states take different ways through the ranges."""
    draw, known, ways = random.Random(0), {}, {}
    for _ in range(400):
        offsets = (0, *sorted(draw.sample(range(1, T), draw.randint(1, 4))), T)
        framed, links = frames(offsets, kind=kind)
        for rank, packing in enumerate(framed):
            key = rank, PlanKey.of(packing, links, Local())
            found = sizes(packing, links, rank)
            assert known.setdefault(key, found) == found, (rank, offsets)
            ways.setdefault(key, set()).add(links)
    assert kind == "contiguous" or any(len(found) > 1 for found in ways.values())


@pytest.mark.parametrize("options", [
    {"exchange": "all_gather", "max_sequences": 5},
    {"token_ranges": [[(0, T)], [(0, 0)]]},
    {"token_ranges": [[(0, 50), (50, 50)], [(50, T)]]},
], ids=["fixed", "no tokens", "a range without tokens"])  # fmt: skip
def test_other_contexts_have_no_frame(options):
    def check(group, rank):
        cu = torch.tensor(PACKINGS["documents cross"])

        def framed(cu, **options):
            context = build_cp_context(cu, group, **options)
            return context.framed(context.packing)

        assert framed(cu, **options) is None
        assert framed(torch.tensor([0, T])) is None
        assert framed(cu) is not None

    run_threads(check, 2)

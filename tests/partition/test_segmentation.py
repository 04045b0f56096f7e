"""Segments inside a GPU: the rule, the cut and the fold; results do not depend on them."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.comm.affine import FoldTable, fold, leave, product
from fla_cp.comm.carry import AffineMap, SegmentMaps, carry
from fla_cp.comm.exchange.base import Local, pack
from fla_cp.kernels import TORCH, using
from fla_cp.kernels.torch.backend import TorchBackend
from fla_cp.partition.packing import Packing
from fla_cp.partition.segmentation import (
    MARGIN,
    SMALLEST,
    _cut_never_pays,
    longest_whole,
    predicted,
    split,
)
from fla_cp.partition.slots import link_slots
from fla_cp.partition.workload import Workload
from tests.support.cases import INSIDE, PACKED, Case, options
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.running import run, run_sharded
from tests.support.sweeps import crossed

PROCESSORS = 132


def programs(heads):
    return 4 * heads  # value tiles of 32 at V = 128


def cut(offsets, heads, ranges=None):
    packing = Packing.build(offsets, ranges)
    return packing, split(packing, programs(heads), programs(heads), PROCESSORS)


def time_of(packing, most, heads):
    return predicted(packing.on_ranks, most, *[programs(heads)] * 2, PROCESSORS)


@pytest.mark.parametrize("T, heads, least", [(131072, 4, 8), (32768, 8, 4), (8192, 1, 4)])
def test_few_heads_and_long_sequences_are_cut(T, heads, least):
    whole, pieces = cut((0, T), heads)
    assert len(pieces.segments) >= least
    most = pieces.on_ranks[0].amounts["everything"].longest
    assert time_of(whole, most, heads) <= MARGIN * time_of(whole, T // 64, heads)


@pytest.mark.parametrize("offsets, heads", [
    ((0, 32768), 32), ((0, 32768), 64), ((0, 131072), 128), ((0, 400), 1), ((0,), 4),
    (tuple(range(0, 65537, 1024)), 8),
], ids=str)  # fmt: skip
def test_a_full_gpu_and_short_sequences_are_not_cut(offsets, heads):
    whole, pieces = cut(offsets, heads)
    assert pieces is whole


@pytest.mark.parametrize("T, heads, least", [(2048, 4, 1.0), (8192, 4, 0.8), (8192, 32, 0.9),
                                             (32768, 8, 0.5), (65536, 16, 0.5)])  # fmt: skip
def test_what_is_clearly_whole_is_never_cut(T, heads, least):
    """For packed documents it is mostly clear, so that few packings are compared with their cuts.
    least: the share that must be clear."""
    rng, clear = random.Random(T + heads), 0
    for _ in range(100):
        offsets = (0, *sorted(rng.sample(range(1, T), rng.randint(1, 24))), T)
        packing = Packing.build(offsets)
        chunks = [-(-(b - a) // 64) for a, b in pairwise(offsets)]
        if max(chunks) <= longest_whole(sum(chunks), programs(heads), PROCESSORS):
            clear += 1
            for backward in (True, False):
                given = programs(heads), programs(heads), PROCESSORS, backward
                assert split(packing, *given) is packing
    assert clear >= 100 * least
    assert longest_whole(T // 64, programs(1), PROCESSORS) < T // 64 or T < 8192


@pytest.mark.parametrize("chunks", [0, 1, 8, 9, 140, 1000])
def test_longer_sequences_are_cut_sooner(chunks):
    """The longest sequence that clearly stays whole is found by halving, so none beyond it may."""
    for heads in (1, 4, 16, 64):
        given = chunks, programs(heads), PROCESSORS
        whole = [n <= longest_whole(*given) for n in range(chunks + 1)]
        direct = [n <= SMALLEST or _cut_never_pays(n, *given) for n in range(chunks + 1)]
        assert whole == direct
        assert longest_whole(chunks, programs(heads), 0) == chunks


def test_sequences_across_ranks_are_cut_for_their_summary():
    """With 32 heads, a rank in the middle has to run three scans one after another."""
    _, pieces = cut((0, 131072), 32, [(32768, 65536)])
    assert len(pieces.segments) > 1


def test_the_rule_is_asked_once():
    packing, pieces = cut((0, 131072), 4)
    assert split(packing, programs(4), programs(4), PROCESSORS) is pieces


@pytest.mark.parametrize("ranges", [None, [(100, 700), (20, 90)]], ids=["whole", "two ranges"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_cut(ranges, chunks):
    """The pieces tile the segments on the chunks' grid, and only end pieces have the properties of
    ends.
    """
    offsets = (0, 30, 30, 650, 700)
    whole = Packing.build(offsets, ranges)
    pieces = whole.cut(chunks)
    assert (pieces.tokens, pieces.ranges, pieces.empty) == (whole.tokens, whole.ranges, whole.empty)
    left = list(pieces.segments)
    for s in whole.segments:
        mine = [left.pop(0)]
        while mine[-1].stop < s.stop:
            mine.append(left.pop(0))
        assert (mine[0].start, mine[-1].stop) == (s.start, s.stop)
        assert all(a.stop == b.start for a, b in pairwise(mine))
        assert all((m.start - s.start) % 64 == 0 for m in mine)
        assert all(m.stop - m.start <= 64 * chunks for m in mine)
        assert [m.begins for m in mine] == [s.begins] + [False] * (len(mine) - 1)
        assert [m.ends for m in mine] == [False] * (len(mine) - 1) + [s.ends]
        assert (mine[0].entry, mine[-1].exit) == (s.entry, s.exit)
        assert all(m.entry == -1 for m in mine[1:]) and all(m.exit == -1 for m in mine[:-1])
    assert not left


def test_the_forward_alone_is_cut_where_the_gpu_is_half_idle():
    """With 32 heads the scans of a backward run at once, but the forward's leaves half of the GPU
    idle.
    """
    whole, both = cut((0, 32768), 32)
    alone = split(whole, programs(32), programs(32), PROCESSORS, False)
    assert both is whole and len(alone.segments) == 2
    assert split(alone, programs(32), programs(32), PROCESSORS, False) is alone


def on_ranks(cu, ranges, rank=0):
    """The packing of a rank that knows the tokens of the other ranks."""
    loads = tuple(Workload.of(cu, own) for own in ranges)
    return Packing.build(cu, ranges[rank], loads=loads)


def test_ranks_at_the_ends_cut_like_those_between():
    """On their own, the first and the last of four ranks with 131072 tokens and 32 heads would not
    cut.
    """
    shape = programs(32), programs(32), PROCESSORS
    cu, ranges = (0, 131072), [((r * 32768, (r + 1) * 32768),) for r in range(4)]
    assert [len(cut(cu, 32, own)[1].segments) for own in ranges] == [1, 2, 2, 1]
    ranks = [split(on_ranks(cu, ranges, r), *shape) for r in range(4)]
    assert [len(p.segments) for p in ranks] == [2, 2, 2, 2]
    first = ranks[0].segments
    assert (first[0].begins, first[0].entry, first[1].exit) == (True, -1, 0)
    short = on_ranks((0, 8192 * 4), [((r * 8192, (r + 1) * 8192),) for r in range(4)])
    assert split(short, *shape) is short


def test_the_slowest_rank_decides():
    """Only one rank has a long segment, in the batch or in its part of a document."""
    shape = programs(8), programs(8), PROCESSORS
    ranges = [((0, 600),), ((600, 33368),)]
    for cu in ((0, 600, 33368), (0, 33368)):
        ranks = [on_ranks(cu, ranges, r) for r in range(2)]
        pieces = [split(p, *shape) for p in ranks]
        assert [len(p.segments) for p in pieces] == [1, 8]
        assert pieces[0] is not ranks[0]  # or the first would cut its forward alone
        assert pieces[0].largest == pieces[1].largest


def test_each_step_takes_as_long_as_on_the_slowest_rank():
    """This holds if states cross ranks; otherwise the whole call is as slow as on that rank."""
    shape = 512, 512, 128
    scans = Workload.of((0, 6400), [(0, 6400)])
    summaries = Workload.of((0, 6400), [(64, 3200)])
    alone = [predicted((load,), 100, *shape) for load in (scans, summaries)]
    assert max(alone) < predicted((scans, summaries), 100, *shape) < sum(alone)
    short = Workload.of((0, 640), [(0, 640)])
    assert predicted((scans, short), 100, *shape) == alone[0]


@pytest.fixture(params=["both", "forward"])
def always_cut(request, monkeypatch):
    """Cuts every segment of both backends, or of the kernels in the forward, in pieces of two
    chunks.
    """
    import fla_cp.kernels
    from fla_cp.kernels.triton.backend import TRITON

    def pieces(packing, *shape):
        if request.param == "forward" and shape[-1]:
            return packing
        return packing.cached("pieces", lambda: packing.cut(2))

    for backend in (TRITON, TORCH) if request.param == "both" else (TRITON,):
        kind = type("Cut", (type(backend),), {"segment": lambda self, *args: pieces(*args)})
        monkeypatch.setitem(fla_cp.kernels._replaced, backend.name, kind())
    monkeypatch.setenv("TRITON_INTERPRET", "1")


CU = (0, 30, 30, 650, 700)
CASES = [
    Case("long", T=700, K=8, V=6),
    Case("packed", T=700, HV=4, K=8, V=6, cu_seqlens=CU, options=options(**INSIDE)),
    Case("kept", T=400, K=8, V=6, options=options(disable_recompute=True)),
]


@pytest.mark.parametrize("always_cut", ["both"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_results_do_not_depend_on_the_cut(case, always_cut, monkeypatch):
    pieces = run(case)
    monkeypatch.undo()
    for name, exact in run(case).items():
        assert_exact(name, pieces[name], exact)


ON_KERNELS = {
    "packed": replace(CASES[1], T=300, HV=2, cu_seqlens=(0, 30, 30, 280, 300)),
    "kept": replace(CASES[2], T=300),
}


@pytest.mark.parametrize(
    "always_cut, name", crossed(["forward", "both"], ON_KERNELS, fast=1), indirect=["always_cut"]
)
def test_kernels_with_cut_sequences(name, always_cut, monkeypatch):
    case = ON_KERNELS[name]
    pieces = run(case, torch.float32, impl="triton")
    plain = run(case, torch.float32)
    monkeypatch.undo()
    for name, exact in run(case).items():
        error, usual = ((x.double() - exact).abs().max() for x in (pieces[name], plain[name]))
        assert error <= 10 * usual + 1e-5 * exact.abs().max(), name


def test_only_the_forward_goes_through_its_own_cut(monkeypatch):
    """If states cross ranks it does not either, since the backward needs them, too."""
    from types import SimpleNamespace

    import fla_cp.kernels
    from fla_cp.custom_op import make_plan
    from fla_cp.kernels.triton.backend import TritonBackend

    segments = {}

    def noting(name):
        def stage(self, spec, *args, **keywords):
            segments.setdefault(name, []).append(len(spec.packing.segments))
            return getattr(TritonBackend, name)(self, spec, *args, **keywords)

        return stage

    stages = {n: noting(n) for n in ("scan_output", "scan", "scan_bwd")}

    def segment(self, packing, HV, K, V, device, backward, extra=None):
        return packing if backward else packing.cut(2)

    stages["segment"] = segment
    cutting = type("Cut", (TritonBackend,), stages)()
    monkeypatch.setitem(fla_cp.kernels._replaced, "triton", cutting)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run(replace(CASES[0], T=300), torch.float32, impl="triton")
    assert segments == {"scan_output": [3], "scan": [1], "scan_bwd": [1]}

    shape = 1, 8, 8, torch.device("cpu")
    for crosses, count in ((False, 6), (True, 1)):
        context = SimpleNamespace(links=SimpleNamespace(any=crosses), exchange=Local())
        plan = make_plan(None, Packing.build((0, 700)), context, cutting, shape)
        assert (len(plan.packing.segments), len(plan.ahead.segments)) == (1, count)


def cut_on_ranks(group, rank, ranges):
    class Cut(TorchBackend):
        def segment(self, packing, *shape):
            return packing.cut(2)

    case = CASES[1]
    context = build_cp_context(torch.tensor(case.offsets()), group, token_ranges=ranges)
    exact = run(case)
    with using(Cut()):
        mine = run_sharded(case, context)
    for name in ("o", "final_state", "dinitial_state", *(f"d{n}" for n in PACKED)):
        pick = (lambda t: t) if "state" in name else context.shard
        assert_exact(name, mine[name], pick(exact[name]))


@pytest.mark.parametrize("ranges", [None, zigzag_token_ranges(700, 3)], ids=["plain", "zigzag"])
def test_ranks_with_cut_sequences(gloo_pool, ranges):
    gloo_pool.run(cut_on_ranks, ranges, world_size=3)


SIZES = (16, 16), (13, 7), (100, 40), (192, 24)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("size, transposed", crossed(SIZES, [False, True]))
def test_kernel_of_the_fold(size, transposed, side_by_side, monkeypatch):
    """side_by_side: transitions and offsets in one tensor, as ranks send them."""
    pytest.importorskip("triton")
    from fla_cp.kernels.triton import fold as kernel

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    gen = torch.Generator().manual_seed(0)
    HV, (K, V) = 2, size
    M, B, start = (
        torch.randn(n, HV, K, size, generator=gen) / K**0.5 for n, size in ((4, K), (4, V), (2, V))
    )
    if side_by_side:
        wire = torch.cat([B, M], -1)
        M, B = wire[..., V:], wire[..., :V]
    steps = FoldTable.of([
        (1, 5, [(2, 0, -1), (0, 3, 1)]),
        (-1, -1, [(-1, 1, 2), (1, 2, 3)]),
        (0, 0, []),
        (0, -1, [(1, -1, 4)]),
        (-1, 6, [(-1, -1, -1), (-1, 1, -1), (2, 0, 7)]),
        (0, -1, [(-1, -1, 8)]),
    ])  # fmt: skip
    packing = Packing.build((0, 64))
    out, exact = torch.ones(9, HV, K, V), torch.ones(9, HV, K, V, dtype=torch.float64)
    kernel.fold(packing, steps, M, B, start, out, transposed=transposed)
    fold(packing, steps, M.double(), B.double(), start.double(), exact, transposed=transposed)
    assert exact.flatten(1).any(1).tolist() == [True] * 6 + [False, True, False]
    assert (out - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("size, transposed", crossed(SIZES, [True, False], fast=3))
def test_a_fold_gives_transitions_with_states(size, transposed, monkeypatch):
    """They equal those of separate folds; products of other widths may round in another way."""
    pytest.importorskip("triton")
    from fla_cp.kernels.triton import fold as kernel

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    gen, (K, V) = torch.Generator().manual_seed(0), size
    H = 1 if K > 128 else 2  # the interpreter takes a minute for two large heads
    M, B = (torch.randn(4, H, K, n, generator=gen) / K**0.5 for n in (K, V))
    chains = [[2, 0, 1], [-1, 2, 3], [3], [-1]]  # rows of transitions; -1: a document begins
    both = FoldTable.of(
        [(-1, -1, [(m, n, n if m == c[-1] else -1) for m in c]) for n, c in enumerate(chains)]
    )
    alone = [[(m, -1, n if m == c[-1] else -1) for m in c[1:]] for n, c in enumerate(chains)]
    alone = FoldTable.of([(c[0], -1 if c[1:] else n, alone[n]) for n, c in enumerate(chains)])
    packing, first = Packing.build((0, 64)), M.mT.contiguous() if transposed else M

    def folded(run, M, B, first):
        wire, offset, through = (M.new_full((5, H, K, n), 7.0) for n in (V + K, V, K))
        run(packing, both, M, B, None, wire, transposed=transposed)
        run(packing, both, M, B, None, offset, transposed=transposed)
        run(packing, alone, first, None, first, through, transposed=False)
        return wire, torch.cat([offset, through], -1), through

    in_one, exact, through = folded(fold, M.double(), B.double(), first.double())
    assert_exact("one fold", in_one, exact)
    assert through.flatten(1).any(1).tolist() == [True, False, True, False, True]
    for either in (fold, kernel.fold):
        wire, apart, _ = folded(either, M, B, first)
        for columns in (slice(V), slice(V, None)):
            parts = (t[..., columns] for t in (wire, exact, apart))
            assert_within_budget("columns of one fold", *parts)


WHOLE = ((0, 600),), ((600, 1200),), ((1200, 1800),), ((1800, 2400),)
ZIGZAG = ((0, 300), (2100, 2400)), ((300, 600), (1800, 2100)), ((600, 900), (900, 1800))
UNEVEN = ((0, 300), (1500, 2400)), ((300, 1500),)
OUTGOING = 4, 3  # K, V


def of_rank(ranges, rank, cu, reverse):
    """The arguments of `SegmentMaps` on a rank whose segments have at most two chunks."""
    (K, V), links = OUTGOING, link_slots(cu, ranges)
    packing = Packing.build(cu, ranges[rank]).cut(2)
    counts = len(packing.middle), len(packing.carried if reverse else packing.feeding)
    gen = torch.Generator().manual_seed(0)
    M, B = (
        torch.randn(n, 2, K, c, generator=gen, dtype=torch.float64)
        for n, c in zip(counts, (K, V), strict=True)
    )
    maps = AffineMap(M if len(M) else None, B if len(B) else None)
    return maps, packing, (2, K, V), B.new_empty(0), links.mirrored() if reverse else links


class Operations(TorchDispatchMode):
    """Names the operations that torch would launch, except views and allocations."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if not (f.is_view or "empty" in f.name()):
            self.seen.append(f.name())
        return f(*args, **kwargs or {})


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ranges, zeros", [
    (WHOLE, []), (ZIGZAG, []), (UNEVEN, ["aten::new_zeros"])
], ids=["whole", "zigzag", "a range for two slots"])  # fmt: skip
def test_one_launch_before_what_is_sent_and_one_after(ranges, zeros, reverse, monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.interpreter import GridExecutor

    from fla_cp.kernels.triton.fold import fold as kernel

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda f, *a, **kw: seen.append(f.fn.__name__))
    maps, packing, shape, like, links = of_rank(ranges, 1, (0, 2400), reverse)
    states = like.new_zeros(packing.ranges, *shape)

    def start(sent, links, fold):
        pack(sent, links)
        seen.append("sent")
        return SimpleNamespace(wait=lambda overlap: states)

    exchange, links = SimpleNamespace(start=start), links.mirrored() if reverse else links
    with Operations(seen):
        carry(maps, packing, links, exchange, shape, like, reverse=reverse, fold=kernel)()
    assert seen == [*zeros, "fold_kernel", "sent", "fold_kernel"]


@pytest.fixture
def unwritten_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cu", [(0, 2400), (0, 700, 800, 2400), (0, 300, 1200, 1900, 2400)])
@pytest.mark.parametrize("ranges", [WHOLE, ZIGZAG, UNEVEN, (((0, 900),), ((900, 2400),))])
def test_what_is_sent_is_the_maps_of_the_ranges(ranges, cu, reverse, unwritten_is_nan):
    K, V = OUTGOING
    for rank in range(len(ranges)):
        maps, packing, shape, like, links = of_rank(ranges, rank, cu, reverse)
        wire = pack(SegmentMaps(maps, packing, shape, like, reverse).outgoing(links), links)
        exact = wire.new_zeros(links.slots_per_rank, 2, K, V + K * links.any_through)
        sources = packing.carried if reverse else packing.feeding
        for chain in packing.chains:
            chain = chain[::-1] if reverse else chain
            last = packing.segments[chain[-1]]
            out = last.entry if reverse else last.exit
            state = through = None
            for i in chain if out >= 0 else ():
                M = maps.transition[packing.middle.index(i)] if i in packing.middle else None
                M = M.mT if M is not None and reverse else M
                state = leave(M, maps.offset[sources.index(i)], state)
                if i == chain[0]:
                    through = M
                else:
                    through = None if through is None else product(M, through)
            if out >= 0:
                exact[out, ..., :V] = state
            if through is not None and links.any_through:
                exact[out, ..., V:] = through
        assert_exact(f"sent by rank {rank}", wire, exact)

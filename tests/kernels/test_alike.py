"""All ranks of a batch cut at one length and take the same tiles and kernels.

This must hold whatever tokens each rank has. The operator runs on tensors without memory, without
launches, and every choice is recorded.
"""

import random
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fla_cp import zigzag_token_ranges
from fla_cp.custom_op import make_plan
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton import launch, scan, scan_bwd, streams
from fla_cp.kernels.triton.backend import TritonBackend
from fla_cp.kernels.triton.tile_table import Tuning
from fla_cp.partition.on_ranks import framed, layout
from fla_cp.partition.packing import Packing
from fla_cp.partition.token_ranges import contiguous_token_ranges
from fla_cp.partition.workload import Counts, Workload
from fla_cp.pipeline import backward, forward
from fla_cp.rule import DeltaRule

META, BF16 = torch.device("meta"), torch.bfloat16
BACKEND = TritonBackend(tuning=Tuning(sms=132))
STREAM = SimpleNamespace(cuda_stream=0)
FORK = SimpleNamespace(side=STREAM, side_waits=lambda: None, main_waits=lambda: None)


class Zeros:
    """An exchange in which every rank receives states."""

    group = None

    def __init__(self, *shape):
        self.shape = shape

    def start(self, maps, links, fold):
        return SimpleNamespace(wait=lambda overlap: torch.zeros(self.shape, device=META))


@pytest.fixture
def chosen(monkeypatch):
    """The choices that `run` made: longest segment of each cut, tile of each stage, and scans."""
    found = {}
    cut, tile, of_scan = Packing.cut, Tuning.tile, scan.scan_tile

    def noting_cut(packing, most):
        found.setdefault("cut", []).append(most)
        return cut(packing, most)

    def noting_tile(tuning, stage, *shape):
        t = tile(tuning, stage, *shape)
        assert found.setdefault(stage, t) == t
        return t

    def noting_scan(stage, *rest):
        found.setdefault("scans", set()).add(stage)
        return of_scan(stage, *rest)

    monkeypatch.setattr(Packing, "cut", noting_cut)
    monkeypatch.setattr(Tuning, "tile", noting_tile)
    for module in (scan, scan_bwd):
        monkeypatch.setattr(module, "scan_tile", noting_scan)
    monkeypatch.setattr(streams, "fork_of", lambda *args: FORK)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(launch, "runner", lambda *args, **options: None)
    return found


def run(chosen, packing, links, HV, per_head):
    """Forward and backward of KDA or the gated delta rule on one rank: its choices and its plan."""
    chosen.clear()
    T = packing.tokens
    q, k, v = (torch.empty(T, HV, 128, dtype=BF16, device=META) for _ in range(3))
    g = torch.empty(T, HV, *[128] * (not per_head), device=META)
    x = Inputs(q, k, v, g, torch.empty(T, HV, device=META), None, None)
    context = None
    if links is not None:
        context = SimpleNamespace(links=links, exchange=Zeros(packing.ranges, HV, 128, 128))
    shape = HV, 128, 128, META
    plan = make_plan(DeltaRule(scale=1.0, per_head=per_head), packing, context, BACKEND, shape)
    result = forward(plan, x, None, want_final=False, want_h=False)
    backward(plan, x, None, result.saved, result.o, v, None, want_dinitial=False)
    return dict(chosen), plan


def ranks(chosen, cu, ranges, HV, per_head, filled=False):
    """What each rank chooses. filled: for packings in the frames of several, if there are any."""
    ranges = tuple(tuple(map(tuple, own)) for own in ranges)
    layouts = [layout(cu, ranges, rank, None) for rank in range(len(ranges))]
    if filled:
        found = [framed(packing, cu, ranges, r) for r, (packing, _) in enumerate(layouts)]
        layouts = [(each, links) for each, (_, links) in zip(found, layouts, strict=True) if each]
        assert len(layouts) in (0, len(ranges))
    return [run(chosen, *each, HV, per_head) for each in layouts]


def assert_alike(found):
    """Asserts equal choices. A rank without a summary asks for no tile of it."""
    every, scans = {}, set()
    first, plan = found[0]
    for choices, other in found:
        assert choices.get("cut") == first.get("cut")
        scans |= choices.pop("scans")
        for stage, tile in choices.items():
            assert every.setdefault(stage, tile) == tile, stage
        for a, b in ((plan.packing, other.packing), (plan.ahead, other.ahead)):
            assert a.largest == b.largest and a.loads == b.loads
    for name in scans:
        assert f"{name}_concurrent" not in scans


def batch(seed):
    """Offsets of documents, and ranges of 2 to 8 ranks, equal or unequal."""
    rng = random.Random(seed)
    R, T = rng.randint(2, 8), rng.choice([4000, 40000, 131072, 300001])
    mean, cu = rng.choice([60, 700, 5000, 40000, 10**9]), [0]
    while cu[-1] < T:
        cu.append(min(T, cu[-1] + int(rng.expovariate(1 / mean))))
    kind = rng.choice(["equal", "zigzag", "uneven", "documents"])
    if kind == "equal":
        ranges = contiguous_token_ranges(T, R)
    elif kind == "zigzag":
        ranges = zigzag_token_ranges(T, R)
    elif kind == "uneven":
        edges = [0, *sorted(rng.choices(range(T + 1), k=2 * R - 1)), T]
        pieces = list(pairwise(edges))
        rng.shuffle(pieces)
        ranges = [pieces[r::R] for r in range(R)]
    else:  # no state crosses
        edges = [0, *sorted(rng.choices(cu, k=R - 1)), T]
        ranges = [[edge] for edge in pairwise(edges)]
    return tuple(cu), ranges, rng.choice([1, 4, 8, 32, 64])


@pytest.mark.parametrize("per_head", [False, True], ids=["channel", "head"])
@pytest.mark.parametrize("seed", range(60))
def test_ranks_choose_alike(seed, per_head, chosen):
    cu, ranges, HV = batch(seed)
    assert_alike(ranks(chosen, cu, ranges, HV, per_head))
    if found := ranks(chosen, cu, ranges, HV, per_head, filled=True):
        assert_alike(found)


@pytest.mark.parametrize("cu, ranges, HV", [
    ((0, 20000, 60000, 61000, 65536), contiguous_token_ranges(65536, 2), 32),
    ((0, 8192, 40000), [[(0, 8192)], [(8192, 40000)]], 4),  # no state crosses
    ((0, 256, 33024), [[(0, 256)], [(256, 33024)]], 4),
    ((0, 131072), [[(0, 2000)], [(2000, 131072)]], 8),
    (tuple(range(0, 65537, 512)), [[(0, 65000)], [(65000, 65536)]], 8),
    ((0, 131072), [[(0, 131072)], [], [(131072, 131072)]], 8),  # ranks without tokens
], ids=str)  # fmt: skip
def test_ranks_that_hold_other_things_choose_alike(cu, ranges, HV, chosen):
    for per_head in (False, True):
        assert_alike(ranks(chosen, cu, ranges, HV, per_head))


def test_uneven_ranks_cut_at_one_length(chosen):
    """On its own, the first rank would be cut in 2 and the second in 4."""
    cu = (0, 20000, 60000, 61000, 65536)
    found = ranks(chosen, cu, contiguous_token_ranges(65536, 2), 32, False)
    assert [choices["cut"] for choices, _ in found] == [[256], [256]]
    assert [len(plan.packing.segments) for _, plan in found] == [3, 4]
    assert found[0][1].packing.largest == Counts(4, 2, 2, 1, 513)


@pytest.mark.parametrize("seed", range(30))
def test_loads_are_those_of_the_packings(seed):
    cu, ranges, _ = batch(seed)
    packings = [Packing.build(cu, own) for own in ranges]
    loads = tuple(Workload.of(cu, own) for own in ranges)
    for most in (10**9, 40, 8, 3):
        own = [p.cut(most) for p in packings]
        counted = [load.cut(most) for load in loads]
        for packing, load in zip(own, counted, strict=True):
            assert dict(load.kinds) == dict(packing.on_ranks[0].kinds)
            assert packing.largest == load.counts
            chunks = [-(-(s.stop - s.start) // 64) for s in packing.segments]
            names = ("everything", "feeding", "carried", "middle")
            segments = (getattr(packing, name) for name in names)
            assert load.counts == (*map(len, segments), sum(chunks))
        for load, packing in zip(loads, own, strict=True):
            assert load.folds(most) == max(map(len, packing.chains), default=0)
        concurrent = Packing.build(cu, ranges[0], loads=loads).cut(most)
        assert concurrent.largest == Counts.largest(load.counts for load in counted)


PACKED = (0, 20000, 60000, 61000, 65536)
SHORT = tuple(range(0, 65537, 1024))
SMALL = (
    "scan 32 triton; scan_bwd 32 triton; "
    "scan_bwd_ends_concurrent 64 triton; scan_ends 32 triton; scan_states_concurrent 64 triton"
)
WHOLE = "scan 64; scan_bwd_concurrent 64; scan_states_concurrent 64"
AHEAD = "scan 64; scan_bwd_concurrent 64; scan_ends 64; scan_states_concurrent 64"
FEW = (  # in Gluon with one decay a head, which pays for fewer chunks than one a channel
    "scan 64; scan_bwd 64; scan_bwd_ends_concurrent 64; scan_ends 64; scan_states_concurrent 64"
)
CUT = "scan 64; scan_bwd 64; scan_bwd_ends 64; scan_ends 64; scan_states 64"
MANY = "scan 64; scan_bwd 64; scan_states 64"
WIDE = "scan 128; scan_bwd 64; scan_states 64"
TINY = "scan 32 triton; scan_bwd_concurrent 64 triton; scan_states_concurrent 64 triton"
ONE_CARD = [
    ((0, 8192), 4, False, (8, 8), SMALL),
    ((0, 8192), 32, False, (1, 1), WHOLE),
    ((0, 32768), 32, False, (1, 2), AHEAD),
    ((0, 32768), 8, False, (8, 8), CUT),
    ((0, 131072), 4, False, (16, 16), CUT),
    ((0, 131072), 16, False, (4, 4), CUT),
    ((0, 131072), 64, False, (1, 1), MANY),
    (PACKED, 32, False, (4, 4), WIDE),
    (SHORT, 4, False, (64, 64), WIDE),
    (SHORT, 32, False, (64, 64), WIDE),
    ((0, 400), 2, False, (1, 1), TINY),
    ((0, 32768), 4, True, (8, 8), FEW),
    ((0, 65536), 32, True, (1, 2), AHEAD),
    (PACKED, 8, True, (10, 10), CUT),
    (SHORT, 32, True, (64, 64), WIDE),
]


@pytest.mark.parametrize("cu, HV, per_head, segments, scans", ONE_CARD)
def test_one_gpu_chooses_as_before(cu, HV, per_head, segments, scans, chosen):
    """Segments of both directions and of the forward, and the scans' tiles. All values but FEW are
    from before ranks chose alike."""
    choices, plan = run(chosen, Packing.build(cu), None, HV, per_head)
    assert (len(plan.packing.segments), len(plan.ahead.segments)) == segments
    names = sorted(choices["scans"])  # some have a tile of their own with one decay a head
    tiles = {n: choices[n] if n in choices else choices[f"{n}_head"] for n in names}
    found = (f"{name} {t.BV}{' triton' * (t.folder == 'triton')}" for name, t in tiles.items())
    assert "; ".join(found) == scans


def test_a_rank_without_tokens_waits_for_no_stream(chosen, monkeypatch):
    """It starts no side stream, so it must not wait for one: a CUDA graph could not be captured."""
    waits = []

    def wait():
        waits.append(1)

    fork = SimpleNamespace(side=STREAM, side_waits=wait, main_waits=wait)
    monkeypatch.setattr(streams, "fork_of", lambda *args: fork)
    for _ in ranks(chosen, (0, 4096), [[(0, 4096)], []], 4, False):
        pass
    assert len(waits) == 2  # on the first rank: before the side stream starts, and for its results

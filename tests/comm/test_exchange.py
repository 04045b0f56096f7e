"""Every exchange scheme against a serial fold, over gloo, and the bytes that it sends."""

import gc
import random
import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fla_cp.comm.collectives as collectives
from fla_cp.comm import (
    AllGather,
    ByHeads,
    Links,
    Local,
    PrefixScan,
    Ring,
    SlotMaps,
    Symmetric,
    SymmetricOrGather,
    affine,
    make_exchange,
    measure_exchange,
    peer_memory,
)
from fla_cp.comm.affine import PeerFold, leave
from fla_cp.comm.carry import AffineMap, carry
from fla_cp.comm.exchange.base import entering_table, pack, unpack
from fla_cp.comm.peer_memory import PeerMemory
from fla_cp.context import build_cp_context
from fla_cp.partition.on_ranks import layout
from fla_cp.partition.slots import link_slots
from tests.support import peers
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads

HV, K, V = 2, 3, 2


def table(rng: random.Random, R: int) -> Links:
    """A random slot table: contiguous, zig-zag or shuffled ranges, some of them empty."""
    T = rng.choice([3, 20, 60])
    cuts = sorted(rng.choices(range(T + 1), k=rng.choice([0, 0, 1, 3])))
    edges = [0, *sorted(rng.choices(range(T + 1), k=2 * R - 1)), T]
    pieces = list(pairwise(edges))
    if rng.random() < 0.6:
        rng.shuffle(pieces)
    return link_slots((0, *cuts, T), tuple(tuple(pieces[r::R]) for r in range(R)))


def serial(links: Links, maps: list[SlotMaps]) -> list[torch.Tensor]:
    """States entering every rank's slots, computed by the definition."""
    entering = [torch.zeros_like(m.offset) for m in maps]
    state = torch.zeros(HV, K, V, dtype=torch.float64)
    for s, (owner, row) in enumerate(zip(links.owner, links.row, strict=True)):
        if links.continues[s]:
            entering[owner][row] = state
        out = maps[owner].offset[row]
        state = out + maps[owner].transition[row] @ state if links.through[s] else out
    return entering


def random_maps(links: Links, R: int, seed: int) -> list[SlotMaps]:
    gen = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    return [SlotMaps(draw(2, HV, K, K), draw(2, HV, K, V)) for _ in range(R)]


def sliced(maps: SlotMaps, links: Links) -> SlotMaps:
    """The same maps, as slices of the buffer that is sent."""
    wire = pack(maps, links)
    return unpack(wire, V)._replace(wire=wire)


def body(group, rank, R, scheme):
    rng = random.Random(7)
    exchange = scheme(group)
    for trial in range(25):
        links = table(rng, R)
        for direction in (links, links.mirrored()):
            maps = random_maps(direction, R, trial)
            expected = serial(direction, maps)[rank]
            mine = sliced(maps[rank], direction) if trial % 2 else maps[rank]
            pending = exchange.start(mine, direction)
            torch.ones(10).sum()  # work that needs no state
            assert_exact(f"trial {trial}", pending.wait(), expected)


@pytest.mark.parametrize("R", [2, 3, 4])
@pytest.mark.parametrize("scheme", [AllGather, Ring, PrefixScan, ByHeads])
def test_schemes_equal_the_serial_fold_on_processes(gloo_pool, scheme, R):
    gloo_pool.run(body, R, scheme, world_size=R)


def test_table_of_entering_states_is_the_documented_one():
    """The example of `entering_table`, and the table of the other rank."""
    links = link_slots((0, 40), (((0, 10), (30, 40)), ((10, 20), (20, 30))))
    first, second = (entering_table(rank, 2)(links) for rank in (0, 1))
    assert first.first == (0, 3, 4)
    assert (first.transition, first.offset) == ((-1, 2, 3, -1, -1), (0, 2, 3, -1, -1))
    assert first.store == (-1, -1, 1, 0, -1)
    assert second.first == (0, 2, 2)  # the second chain has no steps
    assert (second.transition, second.offset) == ((-1, 2, -1, -1, -1), (0, 2, -1, -1, -1))
    assert second.store == (0, 1, -1, -1, -1)


def start_before_the_others(group, rank, scheme):
    """Lets the peers of the middle rank begin only once its own `start` has returned."""
    R, first, go = group.size(), group.size() // 2, torch.zeros(1)
    links = link_slots((0, R * 10), tuple(((10 * r, 10 * r + 10),) for r in range(R)))
    for direction in (links, links.mirrored()):
        maps = [SlotMaps(m.transition[:1], m.offset[:1]) for m in random_maps(direction, R, 1)]
        if rank != first:
            dist.recv(go, group=group, group_src=first, tag=7)
        pending = scheme(group).start(maps[rank], direction)
        if rank == first:
            for peer in set(range(R)) - {first}:
                dist.send(go, group=group, group_dst=peer, tag=7)
        assert_exact("entering", pending.wait(), serial(direction, maps)[rank])
        dist.barrier(group=group)


@pytest.mark.parametrize("scheme", [AllGather, Ring, PrefixScan, ByHeads])
def test_start_waits_for_nobody(gloo_pool, scheme):
    gloo_pool.run(start_before_the_others, scheme, world_size=3, timeout=120)


@pytest.mark.parametrize("scheme", [AllGather, Ring, PrefixScan, ByHeads])
def test_schemes_equal_the_serial_fold_on_many_threads(scheme):
    run_threads(lambda group, rank: body(group, rank, 9, scheme), 9)


@pytest.mark.parametrize("R", [2, 3, 4, 9])
def test_symmetric_equals_the_serial_fold_on_threads(monkeypatch, R):
    peers.of_threads(monkeypatch)
    run_threads(lambda group, rank: body(group, rank, R, Symmetric), R)


def test_peer_memory_is_read_before_it_is_written_again(monkeypatch):
    """A barrier separates a read of a part from the next write of it. CUDA is replaced by a list of
    calls.
    """
    done, captured = [], False
    call = lambda name: lambda *args, **more: done.append(name)  # noqa: E731
    stream = SimpleNamespace(
        wait_stream=call("fork"), record_event=call("end"), wait_event=call("join")
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    memory = object.__new__(PeerMemory)
    memory.device, memory._turn, memory._stream = None, 0, stream
    memory._mine, memory._parts = range(3), range(3)
    memory._handle = SimpleNamespace(barrier=call("barrier"))
    for captured in (False, False, True, True, False, True, False, False):
        done.append("graph" if captured else "stream")
        memory.exchange(lambda part: done.append(("put", part)), lambda p: done.append(("take", p)))
    read = set()  # since the last barrier
    for what in done:
        if what == "barrier":
            read.clear()
        elif what[0] == "take":
            read.add(what[1])
        elif what[0] == "put":
            assert what[1] not in read
    graphs = [n for n, what in enumerate(done) if what == "graph"]
    assert all(done[n + 1 : n + 4] == ["fork", "barrier", ("put", 2)] for n in graphs)
    assert [what[1] for what in done if what[0] == "put"] == [0, 1, 2, 2, 0, 2, 1, 0]


@pytest.mark.parametrize("reverse", [False, True])
def test_what_the_kernel_reads_is_held_until_the_wait(monkeypatch, reverse):
    """The kernel runs on another stream, so the memory of the maps must not be given away before.
    The maps of a cut range are folded into memory that nobody else holds."""
    side = SimpleNamespace(main=1, cuda_stream=2, launches=nullcontext, wait=lambda: None)
    boxes = SimpleNamespace(open=lambda *, reverse: ((), side))
    monkeypatch.setattr("fla_cp.comm.peer_memory.mailboxes", lambda group, room: boxes)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: int(reverse))
    packing, links = layout((0, 4096), (((0, 2048),), ((2048, 4096),)), int(reverse), None)
    packing = packing.cut(8)
    sources = packing.carried if reverse else packing.feeding
    maps = AffineMap(torch.zeros(len(packing.middle), 1, 8, 8), torch.zeros(len(sources), 1, 8, 8))
    read = []
    pass_on = lambda M, B, *rest: read.append(weakref.ref(B.untyped_storage()))  # noqa: E731
    kernel = PeerFold(affine.fold, lambda *shape: (1, 1), pass_on)
    shape, like = (1, 8, 8), torch.zeros(0)
    wait = carry(
        maps, packing, links, Symmetric(object()), shape, like, reverse=reverse, fold=kernel
    )
    gc.collect()
    assert read[0]() is not None
    wait()
    gc.collect()
    assert read[0]() is None


@pytest.mark.parametrize(
    "reason, known, capturing, taken",
    [
        ("", True, True, Symmetric),
        ("", False, False, Symmetric),
        ("", False, True, AllGather),  # to find out would take a collective
        ("its ranks are on several hosts", True, False, AllGather),
        ("its ranks are on several hosts", False, False, AllGather),
    ],
)
def test_states_are_gathered_where_memory_is_not_shared(
    monkeypatch, reason, known, capturing, taken
):
    for scheme in (Symmetric, AllGather):
        monkeypatch.setattr(scheme, "start", lambda self, *_: type(self))
    monkeypatch.setattr(peer_memory, "known", lambda group: known)
    monkeypatch.setattr(peer_memory, "why_not", lambda group: reason)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert SymmetricOrGather(object()).start(None, None) is taken


def test_symmetric_is_refused_with_the_reason():
    def refused(group, rank):
        with pytest.raises(ValueError, match=r"'symmetric' cannot be used here: .* over nccl"):
            build_cp_context(torch.tensor([0, 20]), group, exchange="symmetric")
        one = build_cp_context(torch.tensor([0, 20]), None, exchange="symmetric")
        assert isinstance(one.exchange, Local)

    run_threads(refused, 2)


def test_nearest_reads_peers_memory_only_where_it_can(monkeypatch):
    """This is decided in the first exchange, but never while a CUDA graph is captured."""

    def started(scheme):
        return lambda self, maps, links, fold: scheme

    for scheme in (Symmetric, AllGather):
        monkeypatch.setattr(scheme, "start", started(scheme))
    for reason, found in (("", Symmetric), ("no", AllGather)):
        monkeypatch.setattr("fla_cp.comm.peer_memory.why_not", lambda group, reason=reason: reason)
        for asked in (True, False):
            monkeypatch.setattr("fla_cp.comm.peer_memory.known", lambda group, asked=asked: asked)
            for capturing in (True, False):
                capture = lambda capturing=capturing: capturing  # noqa: E731
                monkeypatch.setattr("torch.cuda.is_current_stream_capturing", capture)
                unknown = capturing and not asked
                assert SymmetricOrGather(object()).start(None, None) is (
                    AllGather if unknown else found
                )


def test_nearest_gathers_over_gloo(gloo_pool):
    S, M = HV * K * V * 8, HV * K * K * 8
    assert [b for b, _ in gloo_pool.run(traffic, SymmetricOrGather, 4)] == [3 * (S + M)] * 4


def test_local_folds_without_a_group():
    links = link_slots((0, 60), (((40, 60), (0, 40)),))
    (maps,) = random_maps(links, 1, 0)
    assert_exact("entering", Local().start(maps, links).wait(), serial(links, [maps])[0])


def traffic(group, rank, scheme, R):
    """Bytes that this rank sends for one document over all ranks, and its number of rounds."""
    sent, rounds = [], []
    original = {n: getattr(collectives, n) for n in ("all_gather", "send_and_receive")}

    def all_gather(x, group):
        sent.append(x.nbytes * (R - 1))
        return original["all_gather"](x, group)

    def send_and_receive(sends, receives, group):
        rounds.append(len(sends))
        sent.extend(x.nbytes for x, _ in sends)
        return original["send_and_receive"](sends, receives, group)

    links = link_slots((0, R * 10), tuple(((10 * r, 10 * r + 10),) for r in range(R)))
    maps = random_maps(links, R, 0)[rank]
    maps = SlotMaps(maps.transition[:1], maps.offset[:1])
    collectives.all_gather, collectives.send_and_receive = all_gather, send_and_receive
    try:
        scheme(group).start(maps, links).wait()
    finally:
        for n, f in original.items():
            setattr(collectives, n, f)
    return sum(sent), len(rounds)


def test_bytes_and_rounds_are_those_documented(gloo_pool):
    S, M = HV * K * V * 8, HV * K * K * 8
    gathered = gloo_pool.run(traffic, AllGather, 4)
    assert [b for b, _ in gathered] == [3 * (S + M)] * 4
    ring = gloo_pool.run(traffic, Ring, 4)
    assert [b for b, _ in ring] == [S, S, S, 0]
    scan = gloo_pool.run(traffic, PrefixScan, 4)
    assert [r for _, r in scan] == [3] * 4  # distances 1 and 2, and the shift
    assert max(b for b, _ in scan) <= 2 * (S + M) + S


def test_two_ranks_send_no_transition(gloo_pool):
    assert [b for b, _ in gloo_pool.run(traffic, AllGather, 2, world_size=2)] == [
        HV * K * V * 8
    ] * 2


def test_waiting_is_measured():
    links = link_slots((0, 60), (((40, 60), (0, 40)),))
    (maps,) = random_maps(links, 1, 0)
    with measure_exchange() as timer:
        Local().start(maps, links).wait()
        first = timer.elapsed_ms()
        assert first > 0
    Local().start(maps, links).wait()
    assert timer.elapsed_ms() == first


def test_choice_by_world_size():
    group = object()
    assert isinstance(make_exchange("auto", None, 1), Local)
    assert isinstance(make_exchange("auto", group, 8), AllGather)
    assert isinstance(make_exchange("auto", group, 9), ByHeads)
    assert isinstance(make_exchange("auto", group, 128), ByHeads)
    assert isinstance(make_exchange("auto", group, 129), PrefixScan)
    assert isinstance(make_exchange("auto", group, 9, fixed=True), AllGather)
    assert isinstance(make_exchange("auto", group, 8, tokens=8191), AllGather)
    assert isinstance(make_exchange("auto", group, 8, tokens=8192), SymmetricOrGather)
    assert isinstance(make_exchange("auto", group, 9, fixed=True, tokens=8192), SymmetricOrGather)
    assert isinstance(make_exchange("auto", group, 9, tokens=8192), ByHeads)
    assert isinstance(make_exchange("ring", group, 2), Ring)
    with pytest.raises(ValueError, match=r"exchange must be one of .*got 'tree'"):
        make_exchange("tree", group, 2)


def test_maps_are_multiplied_in_full_precision_whatever_is_allowed(monkeypatch):
    torch.manual_seed(0)
    M, S = torch.randn(2, HV, K, K), torch.randn(2, HV, K, V)
    plain = leave(M, S, S)
    assert torch.equal(leave(None, S, S), S)
    assert torch.equal(leave(M, S, None), S)
    monkeypatch.setattr("fla_cp.comm.affine._reduced", lambda x: True)
    wide = leave(M, S, S)
    exact = S.double() + M.double() @ S.double()
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().max() <= (plain - exact).abs().max() + 1e-7


@pytest.mark.parametrize(
    "allow",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    ],
    ids=["high", "medium", "in products", "everywhere"],
)
def test_every_way_to_allow_tf32_is_understood(allow):
    on_gpu, x = SimpleNamespace(is_cuda=True, dtype=torch.float32), torch.eye(K)
    assert not affine._reduced(on_gpu)
    try:
        allow()
        assert affine._reduced(on_gpu)
        assert torch.equal(leave(x, x, x), x + x)
    finally:
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    assert not affine._reduced(on_gpu)

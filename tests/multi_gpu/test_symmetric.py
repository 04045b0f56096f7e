"""Symmetric memory: many exchanges in a row, late readers, CUDA graphs between them, all exact.

Offsets are scaled by powers of two, so that one all-gather gives the expected result exactly. With
contiguous ranges a state passes from rank to rank (`Mailboxes`), otherwise ranks read their peers'
maps (`PeerMemory`).
"""

import gc
import random
import warnings
import weakref
from collections import deque
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.comm import AllGather, SlotMaps, Symmetric, peer_memory
from fla_cp.nn import KimiDeltaAttention
from fla_cp.partition.slots import link_slots
from fla_cp.partition.token_ranges import contiguous_token_ranges
from tests.support.ranks_against_one import device_of, need

HV, K, V = 16, 128, 64
RANGES = {"contiguous": contiguous_token_ranges, "zigzag": zigzag_token_ranges}


def scale(n):
    return 2.0 ** (n % 11 - 5)


def drawn(group, rank, ranges):
    """Links of one document in both directions, this rank's maps, and the states that enter its
    slots.
    """
    from fla_cp.kernels.triton.exchange import fold

    T, R, device = 40 * group.size(), group.size(), device_of(group)
    links = link_slots((0, T), tuple(map(tuple, RANGES[ranges](T, R))))
    J = links.slots_per_rank
    gen = torch.Generator(device).manual_seed(rank)
    M = torch.randn(J, HV, K, K, generator=gen, device=device) / K**0.5
    maps = SlotMaps(M, torch.randn(J, HV, K, V, generator=gen, device=device))
    both = links, links.mirrored()
    exact = [AllGather(group).start(maps, d, fold).wait() for d in both]
    for d, x in zip(both, exact, strict=True):
        assert torch.equal(Symmetric(group).start(maps, d, fold).wait(), x)
    return both, maps, exact, fold


def scaled(maps, n):
    return SlotMaps(maps.transition, maps.offset * scale(n))


def sleep(rng):
    """Occupies the current stream for up to 0.2 ms, now and then."""
    if rng.random() < 0.3:
        torch.cuda._sleep(rng.randrange(400_000))


@contextmanager
def late_readers(rng):
    """Makes ranks late: to read their peers' parts after the barrier, or to start their kernel."""
    read, begin = peer_memory.PeerMemory.exchange, peer_memory.Mailboxes.open

    def late_read(self, put, take):
        def late(parts):
            sleep(rng)
            take(parts)

        return read(self, put, late)

    def late_open(self, *, reverse):
        mail, side = begin(self, reverse=reverse)
        with side.launches():
            sleep(rng)
        return mail, side

    peer_memory.PeerMemory.exchange = late_read
    peer_memory.Mailboxes.open = late_open
    try:
        yield
    finally:
        peer_memory.PeerMemory.exchange = read
        peer_memory.Mailboxes.open = begin


@contextmanager
def counted():
    """Collects the names of the classes that run exchanges."""
    begins, ran = ((peer_memory.PeerMemory, "exchange"), (peer_memory.Mailboxes, "open")), []
    originals = [getattr(kind, name) for kind, name in begins]

    def count(kind, original):
        def begin(self, *args, **named):
            ran.append(kind.__name__)
            return original(self, *args, **named)

        return begin

    for (kind, name), original in zip(begins, originals, strict=True):
        setattr(kind, name, count(kind, original))
    try:
        yield ran
    finally:
        for (kind, name), original in zip(begins, originals, strict=True):
            setattr(kind, name, original)


@contextmanager
def no_waiting():
    """Fails if the host waits for the device."""
    with warnings.catch_warnings():  # torch warns that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(rank, found, exact):
    wrong = [n for n, way, x in found if not torch.equal(x, exact[way] * scale(n))]
    assert not wrong, f"rank {rank}: exchanges {wrong[:9]} of {len(found)}"


def many_in_a_row(group, rank, ranges):
    both, maps, exact, fold = drawn(group, rank, ranges)
    rng, found, pending = random.Random(rank), [], deque()

    def collect():
        n, way, started = pending.popleft()
        found.append((n, way, started.wait()))

    with late_readers(rng), counted() as ran, no_waiting():
        for n in range(300):
            sleep(rng)
            # also several in one direction: a rank may then run ahead of those after it
            way = n // 7 % 2 if n % 3 else n % 2
            started = Symmetric(group).start(scaled(maps, n), both[way], fold)
            pending.append((n, way, started))
            while len(pending) > rng.randrange(4):
                collect()
        while pending:
            collect()
    assert set(ran) == {"Mailboxes" if ranges == "contiguous" else "PeerMemory"}
    check(rank, found, exact)


@pytest.mark.bits
@pytest.mark.parametrize("ranges", RANGES)
def test_many_exchanges_in_a_row(run, ranges):
    need(run, "symmetric")
    run(many_in_a_row, ranges)


def replays(group, rank, ranges):
    both, maps, exact, fold = drawn(group, rank, ranges)
    rng, found = random.Random(rank), []
    given = SlotMaps(maps.transition, maps.offset.clone())
    graph = torch.cuda.CUDAGraph()
    with late_readers(rng):
        with torch.cuda.graph(graph):  # an odd number of exchanges
            out = [Symmetric(group).start(given, both[i % 2], fold).wait() for i in range(3)]
        with no_waiting():
            for n in range(100):
                given.offset.copy_(maps.offset * scale(n))
                sleep(rng)
                graph.replay()
                found += [(n, i % 2, x.clone()) for i, x in enumerate(out)]
                for i in range(n % 4):  # others between replays
                    state = Symmetric(group).start(scaled(maps, n + 5), both[i % 2], fold).wait()
                    found.append((n + 5, i % 2, state))
    check(rank, found, exact)


@pytest.mark.bits
@pytest.mark.parametrize("ranges", RANGES)
def test_replays_between_others(run, ranges):
    need(run, "symmetric")
    run(replays, ranges)


def not_made_while_captured(group, rank):
    def capture(make):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device_of(group))  # torch warns of an empty graph
            make()

    for make in (
        lambda: peer_memory.peer_memory(group, 12345, torch.float32),
        lambda: peer_memory.mailboxes(group, peer_memory.Room(12345, 7)),
    ):
        with pytest.raises(RuntimeError, match="run the same call once before it is captured"):
            capture(make)


def test_peer_memory_is_not_made_while_a_graph_is_captured(run):
    need(run, "symmetric")
    run(not_made_while_captured)


def freed(group, rank):
    other = dist.new_group(list(range(group.size())))
    assert not peer_memory.why_not(other)
    made = [
        weakref.ref(peer_memory.peer_memory(other, 1 << 20, torch.float32)),
        weakref.ref(peer_memory.mailboxes(other, peer_memory.Room(1 << 20, 128))),
    ]
    assert all(memory() is not None for memory in made)
    dist.barrier(group=group)
    dist.destroy_process_group(other)
    del other
    gc.collect()
    assert all(memory() is None for memory in made)


def test_peer_memory_is_freed_with_its_group(run):
    need(run, "symmetric")
    run(freed)


def compiled(group, rank):
    """A compiled graph gathers all maps, whatever the context's exchange."""
    device = device_of(group)
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, 2, 32).to(device, torch.bfloat16)
    cu = torch.tensor((0, 512), dtype=torch.int32, device=device)
    context = build_cp_context(cu, group, conv1d_kernel_size=4, exchange="symmetric")
    x = torch.randn(1, context.local_tokens, 64, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    # Dynamo of torch 2.11 instantiates autograd.Function, and torch warns about that
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    with counted() as ran:
        for f, expected in ((layer, ["Mailboxes"] * 2), (graph, [])):
            ran.clear()
            y = f(x, cp_context=context)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])))
            assert ran == expected
    for a, b in zip(*results, strict=True):
        a, b = a.float(), b.float()
        assert (a - b).abs().max() <= 2**-6 * a.abs().max()


def test_a_compiled_layer(run):
    need(run, "symmetric")
    run(compiled)


def chosen_by_itself(group, rank):
    """ "auto" takes it from 8192 tokens a rank on, at the first exchange, with the all-gather's
    results.
    """
    device = device_of(group)
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, 2, 32).to(device, torch.bfloat16)
    results = []
    with counted() as ran:
        for tokens, scheme, expected in (
            (8191, "auto", []),
            (8192, "all_gather", []),
            (8192, "auto", ["Mailboxes"] * 2),
        ):
            cu = torch.tensor((0, tokens * group.size()), device=device)
            context = build_cp_context(cu, group, conv1d_kernel_size=4, exchange=scheme)
            gen = torch.Generator(device).manual_seed(rank)
            x = torch.randn(1, tokens, 64, device=device, generator=gen).to(torch.bfloat16)
            x.requires_grad_()
            ran.clear()
            y = layer(x, cp_context=context)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
            assert ran == expected, (tokens, scheme)
    for a, b in zip(*results[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.bits
def test_auto_takes_symmetric_memory_with_many_tokens(run):
    need(run, "symmetric")
    run(chosen_by_itself)

"""The bytes that each exchange of keys and values moves, what it holds, and which one is chosen."""

import threading
import weakref
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context, causal_attention, zigzag_token_ranges
from fla_cp.comm import Overlap, collectives, keys_values, overlap
from fla_cp.comm.keys_values import RINGS, SCHEMES, LatentSizes, Sizes, make_exchange, ring
from fla_cp.nn import MultiHeadLatentAttention
from fla_cp.ops.attention_plan import key_tables
from fla_cp.partition.key_tables import KeyTables
from fla_cp.partition.token_ranges import contiguous_token_ranges
from tests.support.ranks import run_threads

T, R = 150, 4
OFFSETS = (0, 37, 40, 40, 101, T)
LAYOUTS = {
    "contiguous": contiguous_token_ranges(T, R),
    "zigzag": zigzag_token_ranges(T, R),
    "uneven": [[(0, 3)], [(3, 90)], [], [(90, T)]],
    "crossed": [[(120, T), (0, 20)], [(60, 120)], [(20, 60)], []],
    "far apart": [[(0, 20), (60, 80), (120, T)], [(20, 60)], [(100, 120)], [(80, 100)]],
}


def tables_of(layout, offsets=OFFSETS, rank=0):
    return KeyTables(offsets, tuple(tuple(map(tuple, r)) for r in LAYOUTS[layout]), rank)


def step(context, exchange, H, HK):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (
        context.shard(torch.randn(1, T, h, n, generator=gen)).requires_grad_()
        for h, n in ((H, 8), (HK, 8), (HK, 6))
    )
    o = causal_attention(q, k, v, cp_context=context, exchange=exchange)
    torch.autograd.grad(o.sum(), (q, k, v))


@pytest.mark.parametrize("offsets", [OFFSETS, (0, T)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_crossings_are_what_the_tables_send(layout, offsets):
    rows = [tables_of(layout, offsets, rank).rows for rank in range(R)]
    found = tables_of(layout, offsets).crossings
    for sender in range(R):
        for receiver in range(R):
            sent = rows[sender].send_counts[receiver] if sender != receiver else 0
            assert found.pairs.get((sender, receiver), 0) == sent
    assert found.gathered == tuple(sum(r.lengths.keys) for r in rows)
    assert found.tokens == tuple(r.tokens for r in rows)


@pytest.fixture
def counts(monkeypatch):
    """Bytes that each thread has sent to other ranks, and received from them."""
    found, real = {}, collectives.all_to_all

    def counted(x, send, receive, group):
        rank, mine = dist.get_rank(group), found.setdefault(threading.get_ident(), Counter())
        size = x.shape[1] * x.element_size()
        mine["sent"] += (sum(send) - send[rank]) * size
        mine["received"] += (sum(receive) - receive[rank]) * size
        return real(x, send, receive, group)

    monkeypatch.setattr(collectives, "all_to_all", counted)
    return found


def moved_bytes(group, rank, layout, exchange, heads, counts):
    """Sent and received, as counted and as computed."""
    context = build_cp_context(torch.tensor(OFFSETS), group, token_ranges=LAYOUTS[layout])
    step(context, exchange, *heads)
    counted = counts[threading.get_ident()]
    tables = key_tables(1, T, None, context)
    _, scheme = make_exchange(exchange, tables, Sizes(*heads, 8, 6, 4))
    return (counted["sent"], counted["received"]), tuple(scheme.traffic()[rank])


@pytest.mark.parametrize("heads", [(8, 8), (4, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", SCHEMES)
def test_bytes_are_those_computed(exchange, layout, heads, counts):
    for counted, computed in run_threads(moved_bytes, R, layout, exchange, heads, counts):
        assert counted == computed


def ring_buffers(group, rank, layout, most):
    context = build_cp_context(torch.tensor(OFFSETS), group, token_ranges=LAYOUTS[layout])
    step(context, "ring", 4, 2)
    return most[threading.get_ident()]


@pytest.mark.parametrize("layout", ["zigzag", "far apart"])
def test_a_ring_holds_the_keys_of_two_ranks(layout, monkeypatch):
    alive, most, real = {}, Counter(), ring.forward_step

    def counted(*args):
        started, me = real(*args), threading.get_ident()
        alive.setdefault(me, []).append(weakref.ref(started.under_way[0][0]))
        most[me] = max(most[me], sum(ref() is not None for ref in alive[me]))
        return started

    monkeypatch.setattr(ring, "forward_step", counted)
    assert set(run_threads(ring_buffers, R, layout, most)) == {2}


def taken(exchange="auto", layout="zigzag", heads=(8, 2), offsets=(0, T)):
    return make_exchange(exchange, tables_of(layout, offsets), Sizes(*heads, 64, 64, 2))[0]


def test_auto_takes_the_fewest_bytes_that_fit(monkeypatch):
    tables, sizes = tables_of("zigzag", (0, T)), Sizes(8, 2, 64, 64, 2)
    gathered, by_heads = (SCHEMES[name](tables, sizes) for name in ("gathered", "by_heads"))
    assert gathered.busiest < by_heads.busiest
    assert taken() == "gathered"
    assert taken(heads=(8, 8)) == "by_heads"  # as many keys as queries: whole documents are less
    assert taken(heads=(6, 6)) == "gathered"  # 4 ranks do not divide 6 heads
    monkeypatch.setattr(keys_values, "MAX_GATHERED", gathered.memory() - 1)
    assert taken() == taken(heads=(6, 6)) == "ring"
    assert taken(heads=(8, 8)) == "by_heads"
    monkeypatch.setattr(keys_values, "MAX_GATHERED", 0)
    assert taken() == taken(heads=(8, 8)) == "ring"
    assert taken("gathered") == "gathered"  # what was asked for is not replaced


def test_the_choice_is_equal_on_all_ranks():
    for layout in LAYOUTS:
        for heads in ((8, 8), (8, 2), (6, 3)):
            sizes = Sizes(*heads, 64, 64, 2)
            found = {make_exchange("auto", tables_of(layout, rank=r), sizes)[0] for r in range(R)}
            assert len(found) == 1


def test_nothing_is_sent_where_no_document_crosses():
    alone = (0, *(ranges[0][1] for ranges in LAYOUTS["contiguous"]))
    for exchange in ("auto", *SCHEMES):
        assert taken(exchange, "contiguous", offsets=alone) == "gathered"


def order_of_work(group, rank, exchange, log):
    """What a call does between the start of its first exchange and the wait for it."""
    context = build_cp_context(torch.tensor((0, T)), group, token_ranges=LAYOUTS["zigzag"])
    with Overlap(lambda: log[threading.get_ident()].append("work")):
        step(context, exchange, 4, 2)
    return log[threading.get_ident()][:3]


@pytest.mark.parametrize("exchange", SCHEMES)
def test_work_runs_while_keys_are_under_way(exchange, monkeypatch):
    log, start, wait = defaultdict(list), overlap.Arriving.__init__, overlap.Arriving.wait

    def started(*args):
        log[threading.get_ident()].append("start")
        start(*args)

    def waited(*args):
        log[threading.get_ident()].append("wait")
        return wait(*args)

    monkeypatch.setattr(overlap.Arriving, "__init__", started)
    monkeypatch.setattr(overlap.Arriving, "wait", waited)
    for found in run_threads(order_of_work, R, exchange, log):
        assert found == ["start", "work", "wait"]


KIMI = LatentSizes(32, 192, 128, 512 + 64, 2)


@pytest.mark.parametrize("R", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("layout", [contiguous_token_ranges, zigzag_token_ranges])
def test_latents_are_the_fewest_bytes_wherever_heads_divide(layout, R):
    """Why latents are not divided by heads, at Kimi Linear's sizes (comm/keys_values)."""
    n = 64 * R
    tables = KeyTables((0, n), tuple(tuple(map(tuple, r)) for r in layout(n, R)), 0)
    latents, around = (SCHEMES[name](tables, KIMI) for name in ("gathered", "ring"))
    expanded = SCHEMES["by_heads"](tables, Sizes(32, 32, 192, 128, 2))
    assert expanded.refusal() is None
    assert latents.busiest < min(expanded.busiest, around.busiest)
    more = KeyTables((0, 128), tuple(((a, a + 2),) for a in range(0, 128, 2)), 0)
    assert SCHEMES["by_heads"](more, Sizes(32, 32, 192, 128, 2)).refusal() is not None


@pytest.mark.parametrize("tokens, scheme", [(2**18, "gathered"), (2**20, "ring")])
def test_latents_go_round_where_what_they_expand_to_does_not_fit(tokens, scheme):
    tables = KeyTables((0, tokens), tuple(map(tuple, zigzag_token_ranges(tokens, 8))), 0)
    name, found = make_exchange("auto", tables, KIMI, allowed=RINGS)
    assert name == scheme
    each = 32 * (192 + 128) * 2  # bytes of a token's keys and values
    gathered = SCHEMES["gathered"](tables, KIMI).memory()
    assert gathered >= tokens * (each + 576 * 2)
    assert (gathered > keys_values.MAX_GATHERED) == (scheme == "ring")
    if scheme == "ring":  # latents of two ranks, and the keys and values of one
        assert found.memory() <= tokens // 8 * (each + 2 * 576 * 2)


def test_latent_attention_takes_no_exchange():
    with pytest.raises(TypeError, match="unexpected keyword argument 'exchange'"):
        MultiHeadLatentAttention(24, 2, exchange="ring")
    with pytest.raises(TypeError, match="unexpected keyword argument 'exchange'"):
        MultiHeadLatentAttention(24, 2)(torch.zeros(1, 3, 24), exchange="by_heads")

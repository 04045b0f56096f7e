"""One rank, N ranks and the recurrence give equal outputs, states and gradients."""

import random
from itertools import pairwise

import pytest
import torch

import fla_cp.comm.collectives as collectives
from fla_cp import build_cp_context, chunk_kda, cp_chunk_kda, zigzag_token_ranges
from fla_cp.partition.packing import Packing
from fla_cp.reference import recurrence
from tests.support import peers
from tests.support.cases import INSIDE, PACKED, Case, named, options
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads
from tests.support.running import oracle, run, run_sharded, weights
from tests.support.sweeps import crossed

SHARED = ("final_state", "dinitial_state")
PARAMETERS = ("dA_log", "ddt_bias")

SLOW = 0.01
"""Log decay per step that leaves e**-2 after 200 tokens: a state lost or misplaced at any rank
shows at all later ones, where a strong decay would hide it."""

CASES = [
    Case("one-document", T=300, decay=SLOW),
    Case("packed", T=300, cu_seqlens=(0, 1, 64, 64, 130, 131, 300), decay=SLOW),
    Case("across-three", T=300, cu_seqlens=(0, 40, 290, 300), decay=SLOW),
    Case("one-token-documents", T=6, cu_seqlens=(0, 1, 2, 3, 4, 5, 6)),
    Case("one-token-shards", T=4),
    Case("fewer-tokens-than-ranks", T=2, cu_seqlens=(0, 0, 2, 2)),
    Case("rows", T=70, B=3),
    Case("no-states", T=300, cu_seqlens=(0, 250, 300), decay=SLOW, states=False),
    Case("strong-decay", T=300, decay=30.0),
    Case("no-decay", T=300, decay=0.0, HV=4),
    Case("inside", T=200, HV=4, V=5, options=options(**INSIDE, allow_neg_eigval=True)),
    Case("bounded", T=200, options=options(**INSIDE, safe_gate=True, lower_bound=-5.0)),
    Case("kept", T=200, options=options(**INSIDE, disable_recompute=True)),
]


def shuffled(total, R):
    """Uneven ranges in random order, some empty."""
    rng = random.Random(total)
    edges = [0, *sorted(rng.choices(range(total + 1), k=2 * R - 1)), total]
    pieces = list(pairwise(edges))
    rng.shuffle(pieces)
    return [pieces[r::R] for r in range(R)]


def hoarded(total, R):
    """All tokens on the last two ranks, the middle ones on the last; others own no range."""
    a, b = total // 4, total // 2
    if R == 1:
        return [[(0, total)]]
    return [[] for _ in range(R - 2)] + [[(b, total), (0, a)], [(a, b)]]


RANGES = {
    "contiguous": lambda total, R: None,
    "zigzag": zigzag_token_ranges,
    "shuffled": shuffled,
    "hoarded": hoarded,
}


def check(group, rank, case, ranges, exchange="auto", segment_chunks=None):
    """Compares this rank with one device; returns its share of the parameters' gradients."""
    R = group.size()
    offsets = case.offsets()
    context = build_cp_context(
        torch.tensor(offsets),
        group,
        token_ranges=RANGES[ranges](offsets[-1], R),
        exchange=exchange,
        check=True,
    )
    if segment_chunks:
        own = context.token_ranges[rank]
        packing = Packing.build(offsets, own, segment_chunks=segment_chunks, counts_empty=rank == 0)
        object.__setattr__(context, "packing", packing)
    whole, mine = run(case), run_sharded(case, context)
    for name, value in whole.items():
        if name in PARAMETERS:
            continue
        expected = value if name in SHARED else context.shard(value)
        assert_exact(f"{name} of rank {rank}", mine[name], expected)
    return {name: mine[name] for name in PARAMETERS if name in mine}


def compare_parameters(case, shares):
    whole = run(case)
    for name in PARAMETERS:
        if name in whole:
            assert_exact(name, sum(s[name] for s in shares), whole[name])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_one_device_equals_the_recurrence(case):
    exact, actual = oracle(case), run(case)
    for name, value in exact.items():
        assert_exact(name, actual[name], value)


@pytest.mark.parametrize("case, ranges", crossed(CASES, RANGES))
def test_four_processes_equal_one_device(gloo_pool, case, ranges):
    compare_parameters(case, gloo_pool.run(check, case, ranges, "auto"))


@pytest.mark.parametrize("case, R", crossed(CASES[:5], [2, 3, 5, 9]))
def test_threads_equal_one_device(case, R):
    run_threads(check, R, case, "contiguous")


@pytest.mark.parametrize(
    "exchange, ranges", crossed(["all_gather", "ring", "scan", "heads"], RANGES)
)
def test_every_exchange(gloo_pool, exchange, ranges):
    case = named("grouped-heads", T=300, cu_seqlens=(0, 250, 300), decay=SLOW)
    gloo_pool.run(check, case, ranges, exchange)


@pytest.mark.parametrize("ranges", RANGES)
def test_symmetric_memory(monkeypatch, ranges):
    peers.of_threads(monkeypatch)
    case = named("grouped-heads", T=300, cu_seqlens=(0, 250, 300), decay=SLOW)
    run_threads(check, 4, case, ranges, "symmetric")


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("R", [1, 3])
def test_several_segments_a_rank(ranges, R):
    case = Case("long", T=700, cu_seqlens=(0, 100, 650, 700), decay=SLOW)
    run_threads(check, R, case, ranges, "auto", 1)


def random_batches(group, rank, seed, schemes):
    """Random documents, ranges, segments and schemes, different in every trial."""
    rng, R = random.Random(seed), group.size()
    for trial in range(6):
        T = rng.choice([R, 40, 150, 260])
        cuts = sorted(rng.choices(range(T + 1), k=rng.randint(0, 4)))
        case = Case(
            f"trial {trial}",
            T=T,
            H=1,
            K=4,
            V=3,
            cu_seqlens=(0, *cuts, T),
            decay=rng.choice([0, 0.01]),
        )
        scheme, size = rng.choice(schemes), rng.choice([None, 1])
        check(group, rank, case, rng.choice([*RANGES]), scheme, size)


@pytest.mark.parametrize("R", [2, 3, 4, 6])
def test_random_batches(R):
    run_threads(random_batches, R, R, ["all_gather", "ring", "scan", "heads"])


@pytest.mark.parametrize("R", [2, 4])
def test_random_batches_through_memory_of_peers(R, monkeypatch):
    peers.of_threads(monkeypatch)
    run_threads(random_batches, R, R, ["symmetric"])


def transposed(group, rank):
    case = named("grouped-heads", T=200, decay=SLOW)
    context = build_cp_context(torch.tensor([0, 200]), group)
    x, results = case.inputs(), []
    for v_first in (False, True):
        state = x["initial_state"].mT.contiguous() if v_first else x["initial_state"].clone()
        leaves = [context.shard(x[n]).requires_grad_() for n in PACKED] + [state.requires_grad_()]
        o, final, h = cp_chunk_kda(
            *leaves[:5],
            context,
            initial_state=state,
            output_final_state=True,
            return_intermediate_states=True,
            transpose_state_layout=v_first,
        )
        do, dS = weights(case)
        dS = dS.mT if v_first else dS
        grads = torch.autograd.grad([o, final], leaves, [context.shard(do), dS])
        flip = (lambda t: t.mT) if v_first else (lambda t: t)
        results.append((o, flip(final), flip(h), *grads[:5], flip(grads[5])))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_exact(f"result {i}", b, a)


def test_both_state_layouts(gloo_pool):
    gloo_pool.run(transposed)


def one_loss(group, rank, where):
    """A loss that reads only the output of one token, on one rank, or only the final state."""
    case = Case("one loss", T=200, decay=SLOW)
    context = build_cp_context(torch.tensor([0, 200]), group)
    x = case.inputs()

    def loss(leaves, **sharding):
        rest = {"initial_state": leaves["initial_state"], "output_final_state": True}
        o, final = chunk_kda(*[leaves[n] for n in PACKED], **rest, **sharding)
        if where == "final":
            return final.square().sum()
        mask = torch.zeros(1, 200, 1, 1, dtype=torch.float64)
        mask[:, where] = 1
        return (o.square() * (context.shard(mask) if sharding else mask)).sum()

    whole = {n: t.clone().requires_grad_() for n, t in x.items()}
    local = {n: context.shard(t) if n in PACKED else t for n, t in x.items()}
    local = {n: t.clone().requires_grad_() for n, t in local.items()}
    exact = torch.autograd.grad(loss(whole), list(whole.values()), allow_unused=True)
    actual = torch.autograd.grad(
        loss(local, cp_context=context), list(local.values()), allow_unused=True
    )
    for name, a, b in zip(x, actual, exact, strict=True):
        if b is not None:
            assert_exact(f"d{name}", a, context.shard(b) if name in PACKED else b)


@pytest.mark.parametrize("where", [0, 120, 199, "final"])
def test_a_loss_on_one_rank_reaches_all(gloo_pool, where):
    gloo_pool.run(one_loss, where)


def learned_state(group, rank):
    """The sum over the ranks of each parameter's gradient, by the recipe of docs/own_loop.md."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 4, generator=gen, dtype=torch.float64) for _ in range(3))
    S = torch.randn(2, 2, 4, 4, generator=gen, dtype=torch.float64).requires_grad_()
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    context = build_cp_context(torch.tensor([0, 7, 20]), group)
    R = context.world_size
    local = [context.shard(t) for t in (q * w, k, v, -q.abs(), q[..., 0].sigmoid())]
    state = S / R + (S - S / R).detach()
    o, _ = cp_chunk_kda(*local, context, initial_state=state)
    return torch.autograd.grad(o.sin().sum(), (S, w))


def test_gradients_of_a_learned_initial_state_add_up():
    expected = learned_state(None, 0)
    for n, name in enumerate(("initial state", "weight")):
        assert_exact(name, sum(found[n] for found in run_threads(learned_state, 3)), expected[n])


def chunk_starts(group, rank):
    case = Case("states", T=300, decay=SLOW)
    context = build_cp_context(torch.tensor([0, 300]), group)
    x = case.inputs()
    (start, stop) = context.token_ranges[rank][0]
    h = cp_chunk_kda(
        *[context.shard(x[n]) for n in PACKED],
        context,
        initial_state=x["initial_state"],
        return_intermediate_states=True,
    )[2]
    exact = [x["initial_state"]]
    for at in range(start, stop, 64):
        if at:
            cut = [x[n][:, :at] for n in PACKED]
            exact.append(recurrence(*cut, initial_state=x["initial_state"])[1])
    assert_exact("h", h[0], torch.cat(exact[-h.shape[1] :]))


def test_intermediate_states_are_the_global_ones(gloo_pool):
    gloo_pool.run(chunk_starts)


def counted(group, rank, cu):
    calls = []
    original = collectives.all_gather
    collectives.all_gather = lambda *x: calls.append(1) or original(*x)
    case = Case("x", T=cu[-1], cu_seqlens=cu, states=False)
    context = build_cp_context(torch.tensor(cu), group)
    try:
        inputs = case.inputs(dtype=torch.float32)
        leaves = [context.shard(inputs[n]).requires_grad_() for n in PACKED]
        cp_chunk_kda(*leaves, context)[0].sum().backward()
    finally:
        collectives.all_gather = original
    return len(calls)


def test_no_exchange_when_no_document_crosses(gloo_pool):
    assert gloo_pool.run(counted, (0, 64, 128, 192, 256)) == [0, 0, 0, 0]
    assert gloo_pool.run(counted, (0, 65, 128, 192, 256)) == [2, 2, 2, 2]


def in_fp32(group, rank):
    case = Case("fp32", T=300, options=options(**INSIDE))
    context = build_cp_context(torch.tensor([0, 300]), group)
    exact = run(case)
    one, mine = run(case, torch.float32), run_sharded(case, context, torch.float32)
    for name in ("o", *(f"d{n}" for n in PACKED)):
        error = (mine[name] - context.shard(exact[name])).norm()
        budget = (one[name] - exact[name]).norm()
        assert error <= 2 * budget, name


def test_fp32_ranks_err_no_more_than_one_device(gloo_pool):
    gloo_pool.run(in_fp32)

"""Ranks with different batches or shapes, or without their group.

Each rank raises an error that names the cause before any state crosses.
"""

import pytest
import torch
import torch.distributed as dist

from benchmarks import agreement as benchmark
from fla_cp import build_cp_context, causal_conv1d, chunk_gla, chunk_kda, zigzag_token_ranges
from fla_cp.comm import Local, SymmetricOrGather, agreement, collectives, keys_values, scheme_of
from fla_cp.comm.agreement import WATCHED, Agreement
from fla_cp.comm.exchange import SCHEMES
from tests.support.ranks import run_threads

T = 40


def tokens(context, HV=2, K=4, V=6, dtype=torch.float32):
    shapes = [(1, K), (1, K), (HV, V), (HV, K), (HV,)]
    q, k, v, g, beta = (torch.ones(1, context.local_tokens, *s, dtype=dtype) for s in shapes)
    return q, k, v, -g, beta


def call(context, **sizes):
    return chunk_kda(*tokens(context, **sizes), cp_context=context)


def convolve(context, D=3, W=4, dtype=torch.float32):
    x, weight = torch.ones(1, context.local_tokens, D, dtype=dtype), torch.ones(D, W, dtype=dtype)
    return causal_conv1d(x, weight, cp_context=context)


def with_state(operator, shape):
    """A call with an initial state of this shape that needs a gradient or not."""

    def run(context, wanted):
        state = torch.zeros(2, *shape, requires_grad=wanted)
        if operator is causal_conv1d:
            x, weight = torch.ones(1, context.local_tokens, 3), torch.ones(3, 4)
            return operator(x, weight, cp_context=context, initial_state=state)
        return operator(*tokens(context), cp_context=context, initial_state=state)

    return (lambda c: run(c, False)), (lambda c: run(c, True))


GRADIENT = r"initial_state.requires_grad \(False on ranks \[0\], True on ranks \[1\]\)$"


def build(group, offsets=(0, 15, T), width=4, **options):
    return build_cp_context(torch.tensor(offsets), group, conv1d_kernel_size=width, **options)


# the call on all ranks but the last, the call on the last, and the error
TABLES = {
    "packing": ({}, {"offsets": (0, 16, T)}, r"cu_seqlens \(on this rank \(0, 1[56], 40\)\)"),
    "nothing crosses": ({}, {"offsets": (0, 20, T)}, "cu_seqlens"),
    "total": ({}, {"offsets": (0, 15, T + 2)}, "cu_seqlens .*, token_ranges"),
    "layout": ({}, {"token_ranges": zigzag_token_ranges(T, 2)}, "token_ranges"),
    "width": ({}, {"width": 3}, r"conv1d_kernel_size \(4 on ranks \[0\], 3 on ranks \[1\]\)"),
    "exchange": (
        {"exchange": "ring"},
        {"exchange": "scan"},
        r"exchange \(ring on ranks \[0\], scan on ranks \[1\]\)",
    ),
    "default exchange": (
        {},
        {"exchange": "ring"},
        r"exchange \(all_gather on ranks \[0\], ring on ranks \[1\]\)",
    ),
    "most": ({"max_sequences": 5}, {"max_sequences": 4}, "max_sequences .5 on ranks .0., 4 on"),
}
CALLS = {
    "HV": (call, lambda c: call(c, HV=4), r"HV \(2 on ranks \[0\], 4 on ranks \[1\]\)"),
    "K": (call, lambda c: call(c, K=8), r"K \(4 on ranks \[0\], 8 on ranks \[1\]\)"),
    "V": (call, lambda c: call(c, V=7), "V .6 on ranks"),
    "dtype": (
        call,
        lambda c: call(c, dtype=torch.bfloat16),
        r"dtype \(torch.float32 on ranks \[0\], torch.bfloat16 on ranks \[1\]\)",
    ),
    "operator": (
        call,
        lambda c: chunk_gla(*tokens(c)[:-1], cp_context=c),
        r"call \(chunk_kda on ranks \[0\], chunk_gla on ranks \[1\]\)$",
    ),
    "final state": (
        call,
        lambda c: chunk_kda(*tokens(c), cp_context=c, output_final_state=True),
        "output_final_state",
    ),
    "channels": (convolve, lambda c: convolve(c, D=5), "D .3 on ranks .0., 5 on ranks .1."),
    "conv dtype": (convolve, lambda c: convolve(c, dtype=torch.float64), "dtype .torch.float32"),
    "gradient of a state": (*with_state(chunk_kda, (2, 4, 6)), GRADIENT),
    "gradient of a convolution's": (*with_state(causal_conv1d, (3, 4)), GRADIENT),
    "module": (convolve, call, r"call \(causal_conv1d on ranks \[0\], chunk_kda on ranks \[1\]\)$"),
    "unshard": (
        lambda c: c.unshard(torch.ones(1, c.local_tokens, 3)),
        lambda c: c.unshard(torch.ones(1, c.local_tokens)),
        "size .3 on ranks",
    ),
}


def tables_differ(group, rank, name, check):
    mine, other, message = TABLES[name]
    options = other if rank == 1 else mine
    message = rf"must agree, but ranks \[1\] differ from rank 0 in .*{message}"
    if check:
        with pytest.raises(ValueError, match=message):
            build(group, check=True, **options)
        return
    context = build(group, **options)
    with pytest.raises(ValueError, match=message):
        call(context)


@pytest.mark.parametrize("check", [None, True], ids=["first use", "build"])
@pytest.mark.parametrize("name", TABLES)
def test_ranks_with_other_tables(name, check):
    run_threads(tables_differ, 2, name, check)


def test_every_scheme_is_shown_by_name():
    kinds = [*SCHEMES.values(), SymmetricOrGather, Local]
    names = {*map(scheme_of, (kind(None) for kind in kinds)), *keys_values.SCHEMES}
    assert names >= {*SCHEMES, "local", "gathered"}
    assert names <= {*agreement._READABLE.values()}


def own_offsets(group, rank, lengths):
    """Each rank builds a context of its own tokens, as if there were no other rank."""
    mine = lengths[rank]
    context = build(group, (0, 5, mine))
    share = torch.ones(1, mine, 3)
    weight = torch.ones(3, 4)
    message = (
        rf"T={mine}, which is where cu_seqlens ends.* pass cp_context.shard\(x\)\. .*looks like "
        "this rank's own: give build_cp_context that of the whole batch$"
    )
    with pytest.raises(ValueError, match=message):
        causal_conv1d(share, weight, cp_context=context)
    for T in (mine - 1, mine + 1):  # neither the batch nor a share
        with pytest.raises(ValueError, match=rf"got T={T}$"):
            causal_conv1d(torch.ones(1, T, 3), weight, cp_context=context)
    if lengths[0] != lengths[1]:
        with pytest.raises(ValueError, match=r"own tokens, pass that of the whole batch$"):
            build(group, (0, 5, mine), check=True)


@pytest.mark.parametrize("lengths", [(20, 20), (20, 24)], ids=["equal", "other"])
def test_offsets_of_one_ranks_share_are_recognised(lengths):
    run_threads(own_offsets, 2, lengths)


def calls_differ(group, rank, name, before):
    mine, other, message = CALLS[name]
    context = build(group)
    for _ in range(before):
        call(context)
    with pytest.raises(ValueError, match=rf"ranks \[1\] differ from rank 0 in .*{message}"):
        (other if rank == 1 else mine)(context)


@pytest.mark.parametrize("before", [0, 1], ids=["first call", "second call"])
@pytest.mark.parametrize("name", CALLS)
def test_ranks_with_other_calls(name, before):
    run_threads(calls_differ, 2, name, before)


def processes_differ(group, rank):
    """Calls in which the sizes of a collective differ, so that gloo would end the process; ranks go
    on.
    """
    new = dist.new_group(list(range(group.size())))  # a context that was not compared yet
    context = build(new)
    with pytest.raises(ValueError, match=r"HV \(2 on ranks \[0, 1, 3\], 4 on ranks \[2\]\)"):
        call(context, HV=4 if rank == 2 else 2)
    with pytest.raises(ValueError, match=r"dtype \(torch.float32 on .*, torch.float64 on"):
        call(context, dtype=torch.float64 if rank == 2 else torch.float32)
    with pytest.raises(ValueError, match=r"ranks \[2\] differ from rank 0 in cu_seqlens"):
        call(build(new, (0, 15 + (rank == 2), T)))
    assert call(context)[0].isfinite().all()
    dist.destroy_process_group(new)


def test_processes_that_differ_go_on(gloo_pool):
    gloo_pool.run(processes_differ)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_calls_are_compared_when_they_run(gloo_pool):
    gloo_pool.run(compiled_calls_differ, world_size=2, timeout=200)


def compiled_calls_differ(group, rank):
    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="eager")
    context, other = build(group), build(group, (0, 15 + rank, T))
    assert torch.equal(run(context)[0], call(context)[0])
    with pytest.raises(Exception, match=r"ranks \[1\] differ from rank 0 in cu_seqlens"):
        run(other)


def updates_differ(group, rank):
    context = build(group, max_sequences=5)
    call(context)
    with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in cu_seqlens"):
        context.update(torch.tensor([0, 10 + rank, T]))
    assert context.global_cu_seqlens[:3] == (0, 15, T)  # it did not change
    call(context)
    with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in cu_seqlens"):
        context.update(torch.tensor([0, 10, T + rank]))  # another total: an error on both
    context.update(torch.tensor([0, 10, T]))
    call(context)
    ordinary = build(group, (0, 10, T))
    assert torch.allclose(call(context)[0], call(ordinary)[0])


def differs_again(group, rank):
    for _ in range(WATCHED):
        call(build(group))
    tables = [build(group, (0, 15 + rank, T), max_sequences=most) for most in (None, 5)]
    with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in cu_seqlens"):
        tables[1].update(torch.tensor([0, 10 + rank, T]))
    for context in tables:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in cu_seqlens"):
                call(context)


def test_a_table_that_differed_is_compared_again():
    run_threads(differs_again, 2)


def test_updates_that_differ():
    run_threads(updates_differ, 2)


def counted(group, rank, sent):
    """The number of comparisons in each step."""
    found = []

    def step(run):
        before = len(sent[rank])
        run()
        found.append(len(sent[rank]) - before)

    context = build(group)
    step(lambda: [call(context) for _ in range(WATCHED)])
    step(lambda: [call(context) for _ in range(3)])
    fresh = build(group)
    step(lambda: [(convolve(fresh), call(fresh), call(fresh)) for _ in range(2)])
    step(lambda: build(group))
    step(lambda: call(build(group, check=False)))
    checked = []
    step(lambda: checked.append(build(group, check=True)))
    step(lambda: call(checked[0]))
    apart = build(group, (0, 20, T))  # nothing crosses
    step(lambda: [call(apart) for _ in range(2)])
    fixed = build(group, max_sequences=5)
    step(lambda: fixed.update(torch.tensor([0, T])))
    step(lambda: call(fixed))
    leaf = torch.ones(1, fixed.local_tokens, 3, requires_grad=True)
    y = causal_conv1d(leaf, torch.ones(3, 4), cp_context=fixed)
    step(lambda: y.sum().backward())
    return found


def test_one_comparison_a_context_and_one_for_each_of_the_first_calls(monkeypatch):
    sent = {0: [], 1: []}
    gather = collectives.gather_numbers

    def traced(x, group):
        sent[dist.get_rank(group)].append(x.shape)
        return gather(x, group)

    monkeypatch.setattr(collectives, "gather_numbers", traced)
    for found in run_threads(lambda group, rank: counted(group, rank, sent), 2):
        assert found == [WATCHED, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0]
    assert {*sent[0], *sent[1]} == {(agreement.SENT,)}


def test_one_rank_compares_nothing(monkeypatch):
    monkeypatch.setattr(collectives, "gather_numbers", lambda *x: pytest.fail("it ran"))
    call(build(None))

    def alone(group, rank):
        call(build(group, check=True))

    run_threads(alone, 1)


class Event:
    """Replaces a CUDA event that tells when the numbers have arrived."""

    def __init__(self):
        self.arrived = False

    def query(self):
        return self.arrived


def test_over_nccl_a_difference_is_read_once_it_has_arrived(monkeypatch):
    """The host must not wait, nor query an event during a capture. CUDA is replaced by a list of
    calls.
    """
    capturing, event = [False], Event()
    monkeypatch.setattr(collectives, "wire_device", lambda *x: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    mine = Agreement(dist.ProcessGroup(0, 2), {"cu_seqlens": (0, 15, T)})
    mine._known, mine._state.calls = True, WATCHED
    sent = {"cu_seqlens": (0, 15, T), "call": "chunk_kda"}
    numbers = torch.tensor([[agreement._number(v) for v in sent.values()]] * 2)
    numbers[1, 0] += 1
    mine._state.late.append(agreement._Late(numbers, event, sent))
    mine.before("chunk_kda")  # not there yet
    event.arrived, capturing[0] = True, True
    mine.before("chunk_kda")
    capturing[0] = False
    with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 in cu_seqlens"):
        mine.before("chunk_kda")
    mine.before("chunk_kda")  # raised only once


def destroyed(group, rank):
    new = dist.new_group(list(range(group.size())))
    context = build(new, max_sequences=5)
    call(context)
    dist.destroy_process_group(new)
    x = torch.ones(1, context.local_tokens, 3)
    for use in (
        convolve,
        call,
        lambda c: chunk_gla(*tokens(c)[:-1], cp_context=c),
        lambda c: c.shard(torch.ones(1, T, 3)),
        lambda c: c.unshard(x),
        lambda c: c.update(torch.tensor([0, T])),
    ):
        with pytest.raises(ValueError, match="process group of cp_context must be alive"):
            use(context)
    with pytest.raises(ValueError, match=r"group must be alive, got .*, which was destroyed"):
        build(new)


def test_a_destroyed_group(gloo_pool):
    gloo_pool.run(destroyed)


def measured(group, rank):
    return benchmark.measure(group, torch.device("cpu"), sequences=2, repeats=2)


def test_the_benchmark_runs(gloo_pool):
    for rows in gloo_pool.run(measured, world_size=2):
        assert all(times["host"] > 0 for times in rows.values())

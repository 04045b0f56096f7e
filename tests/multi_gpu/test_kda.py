"""KDA on N ranks equals KDA on one, and both equal fp64: outputs, states and every gradient.

On the CPU this runs the torch stages in fp64. On GPUs it also runs the kernels in fp32 and bf16,
with an error budget: twice the error of one rank plus a few roundings.
"""

import random
import warnings

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context
from fla_cp.comm.peer_memory import why_not
from fla_cp.nn import GatedDeltaNet, KimiDeltaAttention
from tests.support.cases import INSIDE, PACKED, Case, options
from tests.support.ranks_against_one import (
    RANGES,
    assert_close,
    device_of,
    kinds,
    need,
    same_step,
    sum_of_errors,
)
from tests.support.running import run as run_alone
from tests.support.running import run_sharded

SCHEMES = ["all_gather", "ring", "scan", "heads", "symmetric"]
SAFE = {"safe_gate": True, "lower_bound": -5.0}
SHAPE = {"T": 520, "H": 2, "HV": 4, "K": 32, "V": 16, "decay": 0.05}


CASES = [
    Case("one document", **SHAPE),
    Case("odd places", **SHAPE, cu_seqlens=(0, 1, 77, 77, 300, 519, 520)),
    Case("one-token documents", **{**SHAPE, "T": 23}, cu_seqlens=tuple(range(24))),
    Case("inside", **SHAPE, options=options(**INSIDE)),
    Case("safe", **SHAPE, cu_seqlens=(0, 200, 520), options=options(**INSIDE, **SAFE)),
    Case("kept", **SHAPE, options=options(**INSIDE, disable_recompute=True)),
    Case("no states", **SHAPE, states=False, options=options(**INSIDE, **SAFE)),
]


def compare(group, rank, case, ranges, exchange="auto"):
    device = device_of(group)
    offsets = case.offsets()
    context = build_cp_context(
        torch.tensor(offsets, device=device),
        group,
        token_ranges=RANGES[ranges](offsets[-1], group.size()),
        exchange=exchange,
        check=True,
    )
    for dtype, impl in kinds(device):
        given = case.inputs(dtype=dtype)
        exact = run_alone(
            case, device=str(device), inputs={n: t.double() for n, t in given.items()}
        )
        one = run_alone(case, dtype, impl, str(device))
        mine = run_sharded(case, context, dtype, impl, str(device))
        for name, value in mine.items():
            what = f"{name} in {dtype} on rank {rank}"
            if name in ("dA_log", "ddt_bias"):  # each rank has a share, as of any weight's gradient
                value = value.double()
                dist.all_reduce(value, group=group)
                fold = sum_of_errors(one["dg"], exact["dg"], len(one["dA_log"]))
                assert_close(what, value, exact[name], one[name], fold)
                continue
            pick = context.shard if name == "o" or name[1:] in PACKED else (lambda t: t)
            assert_close(what, value, pick(exact[name]), pick(one[name]))


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_ranks_equal_one(run, case, ranges):
    run(compare, case, ranges)


def on_hopper(group, rank, ranges):
    """Forces the scans of sm90/, which a call of this size would not take."""
    from tests.support.tuned import tuned

    with tuned(min_chunk_heads=0):
        case = Case("hopper", **SHAPE | {"K": 128, "V": 128}, options=options(**INSIDE, **SAFE))
        compare(group, rank, case, ranges)


@pytest.mark.parametrize("ranges", RANGES)
def test_scans_for_hopper(run, ranges):
    if torch.cuda.device_count() == 0:
        pytest.skip("runs kernels for a GPU, this machine has none")
    run(on_hopper, ranges)


@pytest.mark.parametrize("exchange", SCHEMES)
@pytest.mark.parametrize("ranges", RANGES)
def test_every_exchange(run, exchange, ranges):
    need(run, exchange)
    run(compare, CASES[1], ranges, exchange)


def other_layout(group, rank):
    device = device_of(group)
    case = CASES[1]
    context = build_cp_context(torch.tensor(case.offsets(), device=device), group)
    plain = run_sharded(case, context, device=str(device))
    flipped = run_sharded(case, context, device=str(device), v_first=True)
    for name, value in plain.items():
        assert_close(name, flipped[name], value, value)


def test_both_layouts(run):
    run(other_layout)


def random_packings(group, rank, seed):
    """Random packings, ranges and schemes, different in every trial."""
    rng = random.Random(seed)
    for trial in range(4):
        T = rng.choice([group.size(), 64, 130, 300])
        cu = (0, *sorted(rng.choices(range(T + 1), k=rng.choice([0, 1, 3]))), T)
        case = Case(f"random {trial}", T=T, H=1, HV=2, K=16, V=16, decay=0.1, cu_seqlens=cu)
        schemes = SCHEMES[:-1] if why_not(group) else SCHEMES
        compare(group, rank, case, rng.choice([*RANGES]), rng.choice(schemes))


@pytest.mark.parametrize("seed", range(3))
def test_random_packings(run, seed):
    run(random_packings, seed)


def train_a_step(group, rank, ranges):
    same_step(group, ranges, lambda: KimiDeltaAttention(32, 2, 16, impl="torch"))


@pytest.mark.parametrize("ranges", RANGES)
def test_a_training_step(run, ranges):
    run(train_a_step, ranges)


def count_waits(group, rank, exchange):
    """Forward and backward of a layer, including the tables of a new packing."""
    device = device_of(group)
    layer = KimiDeltaAttention(64, 2, 32).to(device, torch.bfloat16)
    for cu in ((0, 300, 512), (0, 100, 512)):
        host = torch.tensor(cu, dtype=torch.int32)
        context = build_cp_context(
            host.to(device), group, conv1d_kernel_size=4, cu_seqlens_cpu=host, exchange=exchange
        )
        x = torch.randn(1, context.local_tokens, 64, device=device, dtype=torch.bfloat16)
        with warnings.catch_warnings():  # torch warns that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error" if cu[1] == 100 else "default")
        try:
            layer(x, cp_context=context).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("exchange", ["auto", "symmetric"])
def test_the_host_never_waits_for_the_device(run, exchange):
    if torch.cuda.device_count() == 0:
        pytest.skip("counts waits for a GPU, this machine has none")
    need(run, exchange)
    run(count_waits, exchange)


def replay(group, rank, exchange):
    """Captures a layer once and replays it with other tokens of the same packing."""
    device = device_of(group)
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, 2, 32).to(device, torch.bfloat16)
    host = torch.tensor((0, 512), dtype=torch.int32)
    context = build_cp_context(
        host.to(device), group, conv1d_kernel_size=4, cu_seqlens_cpu=host, exchange=exchange
    )
    x = torch.randn(1, context.local_tokens, 64, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            layer(x, cp_context=context)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x, cp_context=context)
    x.copy_(torch.randn_like(x))
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, layer(x, cp_context=context))


@pytest.mark.bits
@pytest.mark.parametrize("exchange", ["auto", "symmetric"])
def test_a_captured_layer_replays(run, exchange):
    if torch.cuda.device_count() == 0:
        pytest.skip("captures a CUDA graph, this machine has no GPU")
    need(run, exchange)
    run(replay, exchange)


LAYERS = {
    "kda": lambda: KimiDeltaAttention(64, 2, 32, gate_lower_bound=-5.0),
    "gdn": lambda: GatedDeltaNet(64, 2, 32),
}
PACKINGS = [
    (0, 512),
    (0, 1, 77, 77, 300, 512),  # the largest number of documents, one of them empty
    (0, 64, 128, 256, 384, 512),  # ends at the edges of ranks
    (0, 1, 2, 3, 511, 512),
    (0, 255, 512),
]


def replay_others(group, rank, name, alone, exchange):
    """Captures a layer under a context of fixed shape, and replays it for other packings.

    Forward and backward are captured once. The host must wait for nothing. alone: without the other
    ranks.
    """
    device = device_of(group)
    group = None if alone else group
    torch.manual_seed(0)
    layer = LAYERS[name]().to(device, torch.bfloat16)
    offsets = [torch.tensor(cu, dtype=torch.int32) for cu in PACKINGS]
    given = [(host.to(device), host) for host in offsets]

    def context_of(cu, host, **options):
        return build_cp_context(cu, group, conv1d_kernel_size=4, cu_seqlens_cpu=host, **options)

    fixed = context_of(*given[0], max_sequences=5, exchange=exchange)
    x, dy = torch.randn(2, 1, fixed.local_tokens, 64, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    leaves = [x, *layer.parameters()]

    def step(context):
        y = layer(x, cp_context=context)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(fixed)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(fixed)
    for cu, host in (*given[1:], given[0]):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        with warnings.catch_warnings():  # torch warns that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            fixed.update(cu, host)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for i, (a, b) in enumerate(zip(found, step(context_of(cu, host)), strict=True)):
            a, b = a.detach().float(), b.detach().float()
            error, largest = (a - b).abs().max(), b.abs().max()
            assert error <= 2**-6 * largest, (
                f"{host.tolist()}, rank {rank}: tensor {i} differs by {error:.1e} of {largest:.1e}"
            )
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["ranks", "alone", "symmetric"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_layer_replays_other_packings(run, name, how):
    if torch.cuda.device_count() == 0:
        pytest.skip("captures a CUDA graph, this machine has no GPU")
    need(run, how)
    exchange = "symmetric" if how == "symmetric" else "auto"
    run(replay_others, name, how == "alone", exchange)

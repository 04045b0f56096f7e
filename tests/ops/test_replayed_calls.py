"""Public calls, replayed on the CPU, where a tape records the torch stages op by op. Whatever
surrounds a call, its results equal those of the stages without a tape in every bit."""

import dataclasses
import gc
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fla_cp import build_cp_context, causal_conv1d, chunk_gated_delta_product, chunk_kda
from fla_cp.comm import Overlap
from fla_cp.comm.exchange.base import Exchange, Local
from fla_cp.custom_op import ONE_SLOT, packing_of
from fla_cp.kernels import TORCH, using
from fla_cp.ops.known import known_calls
from fla_cp.pipeline import PlanKey
from fla_cp.program import Program
from fla_cp.remat import Offloaded
from fla_cp.tape import active
from tests.support.ranks import run_threads

OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


class Recorded(type(TORCH)):
    """The torch stages as a backend whose calls are replayed."""

    def replay_stream(self, device):
        return 0


RECORDED = Recorded(**{f.name: getattr(TORCH, f.name) for f in dataclasses.fields(TORCH)})


@pytest.fixture(autouse=True)
def forget():
    known_calls.clear()
    yield
    known_calls.clear()


def leaves_of(seed):
    """qkv, in which q, k and v are side by side, g and beta."""
    torch.manual_seed(seed)
    qkv, g, beta = torch.randn(1, 70, 2, 24), -torch.rand(1, 70, 2, 8), torch.rand(1, 70, 2)
    return [x.requires_grad_() for x in (qkv, g, beta)]


def loss(qkv, g, beta):
    o, final = chunk_kda(*qkv.split(8, -1), g, beta, **OPTIONS)
    return o.square().sum() + final.square().sum()


def grads(seed, around=None):
    """The gradients of a call. around: a context in which its forward runs."""
    leaves = leaves_of(seed)
    if around is None:
        found = loss(*leaves)
    else:
        with around():
            found = loss(*leaves)
    found.backward()
    return [found.detach(), *(x.grad for x in leaves)]


def replayed():
    """How many programs there are, forward and backward."""
    kinds = (known.kind for known in known_calls.values())
    found = [(kind.forward.known.values(), kind.backward.known.values()) for kind in kinds]
    return tuple(
        sum(isinstance(p, Program) for ps in d for p in ps) for d in zip(*found, strict=True)
    )


def assert_same(found, seed):
    """found: of `grads`, from any backend."""
    with using(TORCH):
        exact = grads(seed)
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a, b)


def warm():
    """Three calls, of which the third replays."""
    for seed in range(3):
        assert_same(grads(seed), seed)
    assert replayed() == (1, 1)


@pytest.fixture
def recorded():
    with using(RECORDED):
        yield


def test_calls_are_replayed(recorded):
    warm()
    assert_same(grads(4), 4)


@pytest.mark.parametrize("offsets", [None, (0, 13, 20, 70)], ids=["one", "packed"])
@pytest.mark.parametrize("backend", [TORCH, RECORDED], ids=["eager", "replayed"])
def test_chunk_sizes_one_after_the_other(backend, offsets):
    """No call runs the program of another size. The states of chunks tell them apart."""
    cu = None if offsets is None else torch.tensor(offsets)
    lengths = [b - a for a, b in pairwise(offsets or (0, 70))]
    with using(backend):
        for seed, size in enumerate([64, 16, None, 32] * 4):
            qkv, *rest = leaves = leaves_of(seed)
            more = {"cu_seqlens": cu, "return_intermediate_states": seed % 8 < 4}
            o, _, *h = chunk_kda(*qkv.split(8, -1), *rest, chunk_size=size, **more, **OPTIONS)
            found = [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]
            if h:
                assert h[0].shape[1] == sum(-(-n // (size or 64)) for n in lengths)
            with using(TORCH):
                exact, _ = chunk_kda(*qkv.split(8, -1), *rest, cu_seqlens=cu, **OPTIONS)
                exact = [exact.detach(), *torch.autograd.grad(exact.square().sum(), leaves)]
            for a, b in zip(found, exact, strict=True):
                assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    assert replayed() == ((0, 0) if backend is TORCH else (8, 8))


def test_autocast_does_not_reach_a_replayed_call(recorded):
    warm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = leaves_of(4)
        o, final = chunk_kda(*leaves[0].split(8, -1), *leaves[1:], **OPTIONS)
        assert o.dtype == final.dtype == torch.float32
        torch.autograd.backward([o, final], [2 * o.detach(), 2 * final.detach()])
    assert_same([(o.square().sum() + final.square().sum()).detach(), *(x.grad for x in leaves)], 4)


def offloaded():
    return Offloaded(torch.device("cpu"), torch.nn.Linear(1, 1))


def moved():
    """Saved tensors come back at addresses that are no multiples of 16."""

    def pack(x):
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


@pytest.mark.parametrize("hooks", [offloaded, moved])
def test_saved_tensors_may_come_back_with_other_strides(recorded, hooks):
    """q, k and v are slices, of which a copy is dense."""
    warm()
    for seed in range(4, 8):
        assert_same(grads(seed, hooks), seed)
    assert replayed() == (1, 2)


def test_results_can_be_changed_in_place(recorded):
    for seed in range(5):
        qkv, *rest = leaves_of(seed)
        wanted = {**OPTIONS, "return_intermediate_states": True, "state_v_first": True}
        for x in chunk_kda(*qkv.split(8, -1), *rest, **wanted):
            x.mul_(2)


MM = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]


def test_modes_that_watch_ops_see_the_same_in_every_call(recorded):
    """torch's selective checkpoints count the ops of both runs, and flops are counted by op."""
    warm()
    counts = set()
    for seed in range(4):
        with FlopCounterMode(display=False) as counter:
            grads(seed)
        counts.add(counter.get_total_flops())
    assert len(counts) == 1
    contexts = partial(create_selective_checkpoint_contexts, MM)
    for seed in range(4):
        leaves = leaves_of(seed)
        found = checkpoint(loss, *leaves, use_reentrant=False, context_fn=contexts)
        found.backward()
        assert_same([found.detach(), *(x.grad for x in leaves)], seed)


@pytest.mark.parametrize(
    "first, then", [("inference_mode", "no_grad"), ("no_grad", "inference_mode")]
)
def test_a_program_serves_every_grad_mode(recorded, first, then):
    for seed, mode in enumerate((first, first, first, then, then)):
        with getattr(torch, mode)():
            found = loss(*leaves_of(seed))
        assert_same([found.clone(), *grads(seed)[1:]], seed)
    warm()


def test_checkpoints(recorded):
    for seed in range(5):
        leaves = leaves_of(seed)
        found = checkpoint(loss, *leaves, use_reentrant=False)
        found.backward()
        assert_same([found.detach(), *(x.grad for x in leaves)], seed)


def test_a_call_that_fails_while_it_is_recorded(recorded, monkeypatch):
    grads(0)
    with monkeypatch.context() as broken:
        broken.setattr(Recorded, "scan_output", lambda *given, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            grads(1)
    assert active() is None
    warm()


def test_replaying_can_be_turned_off(recorded, monkeypatch):
    monkeypatch.setenv("FLA_CP_REPLAY", "0")
    for seed in range(4):
        assert_same(grads(seed), seed)
    assert replayed() == (0, 0)


def test_a_variant_of_a_backend_replays_its_own_ops():
    """Ops of torch.library are told apart by their backend too, not by its name alone."""
    calls = []

    class Noisy(Recorded):
        def scan_output(self, *given, **named):
            calls.append(1)
            return super().scan_output(*given, **named)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager")
    given = [x.detach() for x in leaves_of(0)]
    with using(RECORDED):
        for _ in range(4):
            exact = compiled(*given)
    with using(Noisy(**{f.name: getattr(TORCH, f.name) for f in dataclasses.fields(TORCH)})):
        assert torch.equal(compiled(*given), exact)
    assert calls


def test_ops_of_a_compiled_function_know_no_autocast(recorded):
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager")
    for seed in range(4):
        given = [x.detach() for x in leaves_of(seed)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(compiled(*given), loss(*given))


def test_tensors_of_torch_func_are_refused_by_autograd(recorded):
    qkv, *rest = leaves_of(0)
    call = lambda qkv: chunk_kda(*qkv.split(8, -1), *rest)[0]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"autograd\.Function"):
        torch.func.vmap(call)(torch.stack((qkv, qkv)))


class Group:
    """Stands for a process group."""


def test_keys_tell_groups_apart_and_do_not_keep_them_alive():
    packing, group, other = packing_of((0, 64)), Group(), Group()
    key = PlanKey.of(packing, ONE_SLOT, Exchange(group))
    assert key == PlanKey.of(packing, ONE_SLOT, Exchange(group))
    assert hash(key) == hash(PlanKey.of(packing, ONE_SLOT, Exchange(group)))
    assert key != PlanKey.of(packing, ONE_SLOT, Exchange(other))
    assert key != PlanKey.of(packing, ONE_SLOT, Local(group))
    assert key != PlanKey.of(packing, ONE_SLOT, Exchange())
    seen = weakref.ref(group)
    del group
    gc.collect()
    assert seen() is None
    assert key != PlanKey.of(packing, ONE_SLOT, Exchange(Group()))


def sharded(group, rank, exchange, autocast):
    """The results of calls under contexts of two packings in turn, the same ones and new ones, and
    under one that is updated in place. With autocast, all calls but the first two run under it."""
    found, packings = [], [(0, 150), (0, 40, 110, 150)]
    kept = [build_cp_context(torch.tensor(x), group, exchange=exchange) for x in packings]
    fixed = exchange == "all_gather"
    if fixed:
        most = {"exchange": exchange, "max_sequences": 3}
        kept.append(build_cp_context(torch.tensor(packings[0]), group, **most))
    for seed in range(12):
        context = kept[seed % len(kept)]
        if context.max_sequences is not None:
            context.update(torch.tensor(packings[seed % 2]))
        elif seed > 8:
            context = build_cp_context(torch.tensor(packings[seed % 2]), group, exchange=exchange)
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator)
        shapes = [(2, 8), (2, 8), (2, 6), (2, 8), (2,)]
        q, k, v, g, beta = (context.shard(draw(1, 150, *s)).requires_grad_() for s in shapes)
        given, weight = (q, k, v, g, beta), draw(8, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and seed > 1):
            with Overlap(lambda k=k, w=weight: k @ w) as handed:
                o, final = chunk_kda(
                    q,
                    k,
                    v,
                    -g.abs(),
                    beta.sigmoid(),
                    use_qk_l2norm_in_kernel=True,
                    output_final_state=context.max_sequences is None,
                    cp_context=context,
                )
            found.append(handed().detach())
            loss = o.square().sum() if final is None else o.square().sum() + final.square().sum()
            found += [o.detach(), *torch.autograd.grad(loss, given)]
    return found


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "scan", "heads"])
@pytest.mark.parametrize("autocast", [False, True])
def test_calls_of_several_ranks(exchange, autocast):
    """Ranks are threads here, so they also share what is known of their calls. The second run meets
    the programs of the first, whose groups are gone."""
    with using(TORCH):
        exact = run_threads(sharded, 3, exchange, autocast)
    with using(RECORDED):
        run_threads(sharded, 3, exchange, autocast)
        found = run_threads(sharded, 3, exchange, autocast)
    assert all(n > 1 for n in replayed())
    for rank, (a, b) in enumerate(zip(found, exact, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), (rank, i)


def calls_under(context):
    """One of each kind, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    q, v = (context.shard(draw(1, 150, 2, d)).requires_grad_() for d in (8, 6))
    g, beta = -q.detach().abs(), v.detach()[..., 0].sigmoid()
    o, _ = chunk_kda(q, q, v, g, beta, cp_context=context, use_qk_l2norm_in_kernel=True)
    k, v2, b2 = (x.repeat_interleave(2, 1) for x in (q, v, beta))
    p, _ = chunk_gated_delta_product(q, k, v2, g[..., 0], b2, 2, cp_context=context)
    c = causal_conv1d(q.flatten(2), torch.ones(16, 3), cp_context=context)
    sum(x.square().sum() for x in (o, p, c)).backward()


def dropped(group, rank, options):
    """Whether a context's exchange is gone once the context is, before Python has looked for
    reference cycles."""
    packings = [torch.tensor(x) for x in ((0, 40, 150), (0, 100, 150))]
    context = build_cp_context(packings[0], group, conv1d_kernel_size=3, **options)
    for offsets in 2 * packings:
        if context.max_sequences is not None:
            context.update(offsets)
        calls_under(context)
    seen = weakref.ref(context.exchange)
    del context
    return seen() is None


CONTEXTS = [
    *({"exchange": x} for x in ("all_gather", "ring", "scan", "heads")),
    {"max_sequences": 3},
]


@pytest.mark.parametrize("options", CONTEXTS, ids=str)
@pytest.mark.parametrize("backend", [TORCH, RECORDED], ids=["run", "replayed"])
def test_nothing_keeps_a_context_or_its_group(backend, options):
    """PyTorch may abort a process that still holds a gloo group when it ends."""
    gc.disable()
    try:
        with using(backend):
            assert run_threads(dropped, 2, options) == [True, True]
    finally:
        gc.enable()

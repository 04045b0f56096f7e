"""Checkpointed calls: equal gradients, no stage and no collective twice, and errors."""

import gc
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fla_cp import build_cp_context, causal_attention, chunk_kda, remat, zigzag_token_ranges
from fla_cp.comm import collectives
from fla_cp.comm.keys_values import SCHEMES
from fla_cp.kernels import TORCH, using
from fla_cp.kernels.torch import attention
from fla_cp.nn import GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from fla_cp.remat import selective_checkpoint, selective_contexts
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads
from tests.support.sweeps import crossed

# Dynamo makes an instance of each autograd.Function that it traces (torch 2.13)
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

LAYERS = {
    "kda": KimiDeltaAttention,
    "gated delta rule": GatedDeltaNet,
    "product": GatedDeltaProduct,  # a context of its own, with two rows a token
}
CU = (0, 1, 64, 64, 130, 131, 300)

PLAIN = {
    "none": lambda f, *args, **keywords: f(*args, **keywords),
    "full": partial(checkpoint, use_reentrant=False),
    "without random numbers": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "full in selective": lambda f, *args: selective_checkpoint(
        partial(checkpoint, f, use_reentrant=False), *args
    ),
}
SELECTIVE = {
    "selective": selective_checkpoint,
    "context_fn": partial(checkpoint, use_reentrant=False, context_fn=selective_contexts),
    "offloaded": partial(selective_checkpoint, offload=True, preserve_rng_state=False),
    # The outer recomputation ends once it has the inner call's inputs, before the operator.
    "in full": lambda f, *args: checkpoint(
        partial(selective_checkpoint, f), *args, use_reentrant=False
    ),
    "in selective": lambda f, *args: selective_checkpoint(partial(selective_checkpoint, f), *args),
}


def block(layer, x, context=None):
    """A residual block, whose norm and gate are recomputed in any case."""
    return x + layer(nn.functional.rms_norm(x, x.shape[-1:]), cp_context=context).sin()


def results(f, x, parameters):
    """The output, and the gradients of x and of the parameters."""
    y = f(x)
    return y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])


STAGES = ("prepare_chunks", "scan_output", "scan", "restore")


@contextmanager
def counted_stages(like=TORCH):
    """Counts calls of a backend's stages."""
    calls = Counter()

    def count(name):
        def stage(self, *args, **keywords):
            calls[name] += 1
            return getattr(type(like), name)(self, *args, **keywords)

        return stage

    backend = type("Counting", (type(like),), {name: count(name) for name in STAGES})
    with using(backend()):
        yield calls


def stages(mode, times=1):
    """How often each stage runs in a forward, and in as many backwards of it."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8)
    x = torch.randn(1, 130, 16, requires_grad=True)
    with counted_stages() as calls:
        y = mode(partial(block, layer), x).sum()
        forward = Counter(calls)
        for i in range(times):
            y.backward(retain_graph=i + 1 < times)
        return dict(forward), dict(calls - forward)


FORWARD = {"prepare_chunks": 1, "scan_output": 1}


@pytest.mark.parametrize("name", ["kda", "gated delta rule"])
def test_kernels_of_a_checkpointed_layer(name, monkeypatch):
    """The Triton backend, interpreted: as often as on the torch backend, with equal gradients."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("fla_cp.kernels.triton.backend").TRITON
    torch.manual_seed(0)
    layer = LAYERS[name](16, 1, 16, impl="triton")
    x = torch.randn(1, 70, 16, requires_grad=True)
    expected = results(partial(block, layer), x, layer.parameters())
    for mode, backward in (
        (selective_checkpoint, {"restore": 1, "scan": 1}),
        (PLAIN["full"], {**FORWARD, "restore": 1}),
    ):
        with counted_stages(triton) as calls:
            y = mode(partial(block, layer), x)
            forward = Counter(calls)
            grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            assert (dict(forward), dict(calls - forward)) == (FORWARD, backward)
        for i, (a, b) in enumerate(zip((y, *grads), expected, strict=True)):
            # equal kernels on equal values; one reads states that the other computes again
            assert (a - b).abs().max() <= 1e-5 * b.abs().max(), i


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_keeps_its_intermediates(reentrant):
    """Its backward, which follows at once, scans no second time."""
    mode = partial(checkpoint, use_reentrant=reentrant)
    assert stages(mode) == (FORWARD, {**FORWARD, "restore": 1})
    assert stages(PLAIN["none"]) == (FORWARD, {"restore": 1, "scan": 1})


def test_a_hook_that_copies_saved_tensors_loses_the_intermediates_only():
    """Such a hook sees the recomputation's tensors if it is entered inside the function."""

    def inside(f, x):
        def copying(x):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
                return f(x)

        return checkpoint(copying, x, use_reentrant=True)

    assert stages(inside) == (FORWARD, {**FORWARD, "restore": 1, "scan": 1})


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("mode", SELECTIVE)
def test_selective_recomputes_no_operator(mode, times):
    backward = {"restore": times, "scan": times}
    assert stages(SELECTIVE[mode], times) == (FORWARD, backward)


def test_full_inside_selective_recomputes_as_it_was_told():
    forward, backward = stages(PLAIN["full in selective"])
    assert forward == FORWARD
    assert (backward["prepare_chunks"], backward["scan_output"]) == (1, 1)


@contextmanager
def counted_collectives():
    """Counts the collectives of each thread, without those that compare the ranks' calls: a group
    compares fewer of its calls after the first WATCHED ones."""
    names = ("all_gather", "all_reduce", "all_to_all", "send_and_receive")
    counts, lock = {}, threading.Lock()

    def count(name, call):
        def counted(*args):
            with lock:
                counts.setdefault(threading.get_ident(), Counter())[name] += 1
            return call(*args)

        return counted

    with mock.patch.multiple(
        collectives, **{name: count(name, getattr(collectives, name)) for name in names}
    ):
        yield counts


def two_layers(name):
    """Two layers and their input, drawn before threads that share the random numbers start."""
    torch.manual_seed(0)
    layers = [LAYERS[name](16, 2, 8, num_v_heads=4).double() for _ in range(2)]
    return layers, torch.randn(1, CU[-1], 16, dtype=torch.float64)


def sharded(group, rank, drawn, modes, counts):
    """Compares two blocks on this rank with one rank. Returns the collectives of each mode, and
    this rank's share of the parameters' gradients."""
    layers, whole = drawn
    parameters = [p for layer in layers for p in layer.parameters()]
    cu = torch.tensor(CU)
    own = build_cp_context(cu, group, conv1d_kernel_size=4)
    alone = build_cp_context(cu, None, conv1d_kernel_size=4)

    def run(mode, context, x):
        for layer in layers:
            x = mode(partial(block, layer), x, context)
        return x

    expected = results(
        partial(run, PLAIN["none"], alone), whole.clone().requires_grad_(), parameters
    )
    found, shares = {}, {}
    for mode, call in modes.items():
        x = own.shard(whole).requires_grad_()
        before = Counter(counts.get(threading.get_ident()))
        y, dx, *rest = results(partial(run, call, own), x, parameters)
        found[mode] = Counter(counts.get(threading.get_ident())) - before
        assert_exact(f"y, {mode}", y, own.shard(expected[0]))
        assert_exact(f"dx, {mode}", dx, own.shard(expected[1]))
        shares[mode] = rest
    return found, shares, expected[2:]


@pytest.mark.parametrize("name, R", crossed(LAYERS, [4, 1, 2]))
def test_equal_gradients_and_no_collective_twice(name, R):
    modes = {**PLAIN, **SELECTIVE}
    with counted_collectives() as counts:
        ranks = run_threads(sharded, R, two_layers(name), modes, counts)
    for found, _, _ in ranks:
        for mode in SELECTIVE:
            assert found[mode] == found["none"], mode
        more = {m for m in found if found[m].total() > found["none"].total()}
        assert more == (set(PLAIN) - {"none"} if R > 1 else set())
    for mode in modes:
        parts = zip(*(shares[mode] for _, shares, _ in ranks), strict=True)
        for i, (grads, expected) in enumerate(zip(parts, ranks[0][2], strict=True)):
            assert_exact(f"gradient {i}, {mode}", sum(grads), expected)


def attention_in(group, rank, drawn, exchange, counts):
    """Gradients of checkpointed attention, equal to those without; the collectives of each mode,
    forward and backward, and how often the forward's kernel ran."""
    context = build_cp_context(
        torch.tensor(CU), group, token_ranges=zigzag_token_ranges(CU[-1], group.size())
    )
    q, k, v = (context.shard(x).requires_grad_() for x in drawn)

    def f(q, k, v):
        o = causal_attention(q.sin(), k.sin(), v, cp_context=context, exchange=exchange)
        return o.cos()

    def run(call):
        marks = [Counter(counts.get(threading.get_ident()))]
        o = call(f, q, k, v)
        marks.append(Counter(counts.get(threading.get_ident())))
        grads = torch.autograd.grad(o.square().sum(), (q, k, v))
        marks.append(Counter(counts.get(threading.get_ident())))
        return [marks[1] - marks[0], marks[2] - marks[1]], (o.detach(), *grads)

    run(PLAIN["none"])  # compares the ranks
    expected = run(PLAIN["none"])
    found = {"none": expected[0]}
    for mode in ("full", *SELECTIVE):
        found[mode], tensors = run({**PLAIN, **SELECTIVE}[mode])
        for i, (a, b) in enumerate(zip(tensors, expected[1], strict=True)):
            assert_exact(f"result {i}, {mode}", a, b)
    return found


@pytest.mark.parametrize("exchange", SCHEMES)
def test_keys_and_values_are_not_exchanged_twice(exchange):
    torch.manual_seed(0)
    drawn = [torch.randn(1, CU[-1], h, 8, dtype=torch.float64) for h in (4, 2, 2)]
    attend = attention.attend
    with counted_collectives() as counts:

        def counted(*args):
            counts[threading.get_ident()]["attend"] += 1
            return attend(*args)

        with mock.patch.object(attention, "attend", counted):
            ranks = run_threads(attention_in, 4, drawn, exchange, counts)
    for found in ranks:
        for mode in SELECTIVE:
            assert found[mode] == found["none"], mode
        forward, backward = found["none"]
        assert found["full"] == [forward, backward + forward]
        assert forward["all_to_all"] > 0


def in_processes(group, rank, name):
    with counted_collectives() as counts:
        # The backward on the CPU runs in the thread that asks for it.
        return sharded(group, rank, two_layers(name), {**PLAIN, **SELECTIVE}, counts)[0]


def test_no_collective_twice_in_processes(gloo_pool):
    for found in gloo_pool.run(in_processes, "kda", world_size=2):
        assert found["selective"] == found["none"]
        assert found["full"].total() > found["none"].total()


def states_and_inputs():
    torch.manual_seed(0)
    T, H, K = CU[-1], 2, 8
    tensors = [torch.randn(1, T, H, K, dtype=torch.float64) for _ in range(3)]
    tensors += [-0.1 * torch.rand(1, T, H, K, dtype=torch.float64)]
    tensors += [torch.rand(1, T, H, dtype=torch.float64)]
    return tensors, torch.randn(len(CU) - 1, H, K, K, dtype=torch.float64)


def with_states(group, rank, drawn):
    """Initial, final and intermediate states of a checkpointed operator."""
    tensors, initial = drawn
    context = build_cp_context(torch.tensor(CU), group)

    def f(q, k, v, g, beta, initial):
        o, final, h = chunk_kda(
            q.sin(), k, v, g, beta, initial_state=initial, output_final_state=True,
            use_qk_l2norm_in_kernel=True, return_intermediate_states=True, cp_context=context,
        )  # fmt: skip
        return o.cos(), final, h

    leaves = [context.shard(t).requires_grad_() for t in tensors]
    leaves.append(initial.clone().requires_grad_())
    for mode in (selective_checkpoint, partial(checkpoint, use_reentrant=False)):
        found = []
        for call in (PLAIN["none"], mode):
            o, final, h = call(f, *leaves)
            grads = torch.autograd.grad(o.sum() + final.square().sum(), leaves)
            found.append((o, final, h, *grads))
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            assert_exact(f"result {i}", b, a)


@pytest.mark.parametrize("R", [1, 3])
def test_states_of_a_checkpointed_operator(R):
    run_threads(with_states, R, states_and_inputs())


def test_backward_inside_a_checkpointed_function():
    """A second run inside a first one neither takes from it nor adds to it."""
    torch.manual_seed(0)
    layer, inner = (KimiDeltaAttention(16, 2, 8).double() for _ in range(2))
    x = torch.randn(1, 70, 16, dtype=torch.float64, requires_grad=True)

    def f(mode, x):
        leaf = x.detach().requires_grad_()
        (d,) = torch.autograd.grad(mode(partial(block, inner), leaf).sum(), leaf)
        return block(layer, x) * d

    found = [
        torch.autograd.grad(call(partial(f, call), x).sum(), x)[0]
        for call in (PLAIN["none"], selective_checkpoint)
    ]
    assert_exact("dx", *found)


def test_gradient_that_is_kept_for_a_second_backward():
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8).double()
    x = torch.randn(1, 130, 16, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(block(layer, x).sum(), x)[0]
    for mode in (*SELECTIVE.values(), PLAIN["full"]):
        y = mode(partial(block, layer), x).sum()
        for _ in range(2):
            assert_exact("dx", torch.autograd.grad(y, x, retain_graph=True)[0], expected)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_nothing_is_left_after_the_backward(mode):
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8)
    x = torch.randn(1, 130, 16, requires_grad=True)

    def tensors():
        gc.collect()
        found = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))
        return {id(t): t for t in found if t.ndim >= 3}

    before = tensors()  # stay alive, so that no other tensor has their ids
    y = {**PLAIN, **SELECTIVE}[mode](partial(block, layer), x).sum()
    torch.autograd.grad(y, x)
    assert not remat.active()
    del y
    assert not tensors().keys() - before.keys()


def test_under_autocast():
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8)
    x = torch.randn(1, 130, 16, requires_grad=True)
    found = []
    for mode in (PLAIN["none"], selective_checkpoint, PLAIN["full"]):
        with torch.autocast("cpu", torch.bfloat16):
            y = mode(partial(block, layer), x)
        found.append(torch.autograd.grad(y.float().sum(), x)[0])
    for other in found[1:]:
        # the same operations on equal values; a library may round by alignment
        assert (other - found[0]).abs().max() <= 2**-7 * found[0].abs().max()


# Functions that are not the same a second time.


def draw(T=70):
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, 1, T, 2, 8)
    return [t.requires_grad_() for t in (q, k, v, -g.abs(), torch.rand(1, T, 2))]


def changing(first, second):
    """A function that calls `first` once and `second` from then on."""
    left = [first]
    return lambda *x: (left.pop() if left else second)(*x)


def kda(*x):
    return chunk_kda(*x)[0].sin()


def kda_twice(*x):
    o = chunk_kda(*x)[0].sin()
    return chunk_kda(*x[:2], o, *x[3:])[0].sin()


@pytest.mark.parametrize(
    "first, second, message",
    [
        (kda, kda_twice, r"its recomputation made 1 calls of operators, and then one more: \('op"),
        (kda_twice, kda, r"its recomputation made 1 of 2 calls, without \('operator'"),
        (
            kda,
            lambda q, *x: chunk_kda(q, *x, scale=0.5)[0].sin(),
            r"made as call 1, instead of \('operator', .*scale=0.35.*: \('op.*scale=0.5",
        ),
        (
            kda,
            lambda *x: chunk_kda(*x, chunk_size=16)[0].sin(),
            r"made as call 1, .*chunk_size=None.*: \('op.*chunk_size=16",
        ),
    ],
    ids=["more", "fewer", "other", "other chunks"],
)
def test_a_function_that_changes_is_refused(first, second, message):
    x = draw()
    with set_checkpoint_early_stop(False):
        o = selective_checkpoint(changing(first, second), *x)
        with pytest.raises(ValueError, match=message):
            o.sum().backward()
    assert not remat.active()


def test_results_that_were_changed_in_place_are_refused():
    def f(*x):
        o = chunk_kda(*x)[0]
        return o.mul_(2).sin()

    x = draw()
    o = selective_checkpoint(f, *x)
    with pytest.raises(ValueError, match=r"must not be changed in place, but those of \('op"):
        o.sum().backward()


def test_an_error_in_the_function_leaves_nothing_active():
    def f(x):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        selective_checkpoint(f, torch.ones(1, requires_grad=True))
    assert not remat.active()


def test_nothing_is_kept_without_a_gradient():
    with torch.no_grad(), mock.patch.object(remat, "_Kept", side_effect=AssertionError):
        selective_checkpoint(kda, *draw())


# Saved tensors in the host's memory. On the CPU it is the same memory, and the copies are counted.


def test_offloaded_tensors_are_copies_and_parameters_stay():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)).double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    expected = results(layer, x, layer.parameters())
    copies = []
    copy = remat.HostCopy.__init__

    def counted(self, x):
        copies.append(tuple(x.shape))
        copy(self, x)

    with mock.patch.object(remat.HostCopy, "__init__", counted):
        with remat.Offloaded(x.device, layer):
            y = layer(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert sorted(copies) == [(5, 8), (5, 16), (5, 16)]  # inputs of a linear layer, SiLU, linear
    for i, (a, b) in enumerate(zip((y.detach(), *grads), expected, strict=True)):
        assert_exact(f"result {i}", a, b)


def test_a_host_copy_keeps_values_shape_and_strides():
    x = torch.randn(3, 4).mT
    copied = remat.HostCopy(x)
    y = copied.restore()
    assert y.data_ptr() != x.data_ptr()
    assert (y.stride(), y.device) == (x.stride(), x.device)
    assert torch.equal(y, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_on_a_gpu():
    """Each mode keeps less than the one before, and gives the gradients of the first."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(256, 2, 128).cuda().bfloat16()
    x = torch.randn(1, 16384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    context = build_cp_context(torch.tensor([0, 16384]), None, conv1d_kernel_size=4)
    modes = PLAIN["none"], SELECTIVE["selective"], SELECTIVE["offloaded"]
    kept, expected = [], None
    for mode in modes:
        for _ in range(2):  # the first call compiles
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = mode(partial(block, layer), x, context)
            torch.cuda.synchronize()
            kept.append(torch.cuda.memory_allocated() - before)
            grads = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
            del y
        expected = expected or grads
        for i, (a, b) in enumerate(zip(grads, expected, strict=True)):
            assert (a - b).float().norm() <= 1e-2 * b.float().norm(), i
    assert kept[1] > 2 * kept[3] > 2 * kept[5], kept


# torch.compile


def compiled(group, rank):
    """Errors of compiled gradients, and the collectives in the graphs of each mode."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8).double()
    whole = torch.randn(1, 200, 16, dtype=torch.float64)
    context = build_cp_context(torch.tensor([0, 90, 200]), group, conv1d_kernel_size=4)
    x = context.shard(whole).requires_grad_()
    expected = results(partial(layer, cp_context=context), x, layer.parameters())
    found = {}
    for mode in ("none", "selective", "full"):
        names = []

        def inspect(graph, _, names=names):
            names += [str(n.target) for n in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=inspect,
            bw_compiler=inspect,
            partition_fn=min_cut_rematerialization_partition,
        )
        call = partial({**PLAIN, **SELECTIVE}[mode], layer, cp_context=context)
        f = torch.compile(call, fullgraph=True, backend=backend)
        for i, (a, b) in enumerate(zip(results(f, x, layer.parameters()), expected, strict=True)):
            assert_exact(f"{mode}, result {i}", a, b)
        wanted = ("all_gather_into_tensor", "reduce_scatter", "delta_rule_begin.", "delta_rule_f")
        found[mode] = [sum(w in n for n in names) for w in wanted]
    return found


def test_compiled_graphs_hold_no_collective_twice(gloo_pool):
    for found in gloo_pool.run(compiled, world_size=2):
        # states and halo, states backward; the halo's gradient; the operator's forward
        assert found["selective"] == found["none"] == [3, 1, 1, 2]
        assert found["full"] == [5, 1, 2, 3]

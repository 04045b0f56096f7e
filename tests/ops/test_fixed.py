"""Contexts of fixed shape equal ordinary ones after each `update` in place."""

from typing import ClassVar

import pytest
import torch

from fla_cp import build_cp_context, causal_conv1d, chunk_kda, cp_chunk_gated_delta_product
from fla_cp.partition.packing import Frame, Packing
from tests.support import peers
from tests.support.closeness import assert_exact
from tests.support.fixed import (
    CALLS,
    MOST,
    PACKINGS,
    T,
    draw,
    equal_ordinary,
    fixed,
    operator,
    tables,
)
from tests.support.ranks import run_threads

ONE_TOKEN = [tuple(range(10)), (0, 9), (0, 4, 5, 9)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_stages_equal_an_ordinary_context(gloo_pool, name, ranks):
    gloo_pool.run(equal_ordinary, name, "torch", PACKINGS, world_size=ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_symmetric_memory_equals_an_ordinary_context(monkeypatch, ranks):
    peers.of_threads(monkeypatch)
    run_threads(equal_ordinary, ranks, "operator", "torch", PACKINGS, "symmetric")


@pytest.mark.parametrize("name, ranks", [
    pytest.param("kda", 1, marks=pytest.mark.wide), pytest.param("gdn", 2, marks=pytest.mark.wide),
    pytest.param("operator", 3, marks=pytest.mark.wide),
])  # fmt: skip
def test_kernels_equal_an_ordinary_context(gloo_pool, name, ranks):
    pytest.importorskip("triton")
    packings = [PACKINGS[2], PACKINGS[0]]  # tables are made where nothing crosses
    gloo_pool.run(equal_ordinary, name, "triton", packings, world_size=ranks)


def one_token_documents(group, rank, impl):
    """Shards shorter than the convolution are included."""
    dtype = torch.float64 if impl == "torch" else torch.float32
    shapes = [(1, 9, 3), (3, 4), (1, 9, 3)]
    x, weight, dy = (draw(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes))
    context = fixed(ONE_TOKEN[0], group, 9, conv1d_kernel_size=4)
    for offsets in (*ONE_TOKEN, ONE_TOKEN[0]):
        context.update(torch.tensor(offsets))
        ordinary = build_cp_context(torch.tensor(offsets), group, conv1d_kernel_size=4)
        results = []
        for c in (context, ordinary):
            mine = c.shard(x).requires_grad_()
            y = causal_conv1d(mine, weight, activation="silu", cp_context=c, impl=impl)
            (dx,) = torch.autograd.grad(y, mine, c.shard(dy))
            results.append((y, dx))
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() <= 1e-6, offsets


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_token_documents_and_short_shards(gloo_pool, impl, ranks):
    gloo_pool.run(one_token_documents, impl, world_size=ranks)


def householder(group, rank):
    """Contexts with several rows a token are updated too."""
    shapes = [(1, T, 1, 8), (1, 2 * T, 1, 8), (1, 2 * T, 1, 6), (1, T, 1), (1, 2 * T, 1)]
    q, k, v, g, beta = (draw(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes))
    g, beta = -g.abs(), beta.sigmoid()
    context = fixed(PACKINGS[0], group)
    for offsets in PACKINGS[:3]:
        context.update(torch.tensor(offsets))
        ordinary = build_cp_context(torch.tensor(offsets), group)
        mine = [context.shard(q), None, None, context.shard(g), None]
        for i, x in ((1, k), (2, v), (4, beta)):
            mine[i] = context.repeated(2).shard(x)
        a, b = (cp_chunk_gated_delta_product(*mine, 2, c)[0] for c in (context, ordinary))
        assert (a - b).abs().max() <= 1e-12


def test_repeated_rows_are_updated_too():
    run_threads(householder, 2)


def nothing_of_the_packing_is_sent(group, rank, name):
    """The same collectives of the same shapes, whatever the packing."""
    import fla_cp.comm.collectives as collectives

    call, calls = CALLS[name](torch.float64, "torch"), []
    originals = {n: getattr(collectives, n) for n in ("all_gather", "all_to_all")}

    def traced(name):
        def f(x, *rest):
            calls.append((name, x.shape, *(r for r in rest if isinstance(r, list))))
            return originals[name](x, *rest)

        return f

    width = {"conv1d_kernel_size": 4} if name == "kda" else {}
    context, seen = fixed(PACKINGS[0], group, **width), []
    try:
        for each in originals:
            setattr(collectives, each, traced(each))
        for offsets in PACKINGS:
            calls.clear()
            context.update(torch.tensor(offsets))
            call(context)
            seen.append(list(calls))
    finally:
        for each, original in originals.items():
            setattr(collectives, each, original)
    assert all(s == seen[0] for s in seen)
    return [name for name, *_ in seen[0]]


COLLECTIVES = {
    "kda": ["all_to_all", "all_gather", "all_gather", "all_to_all"],
    "attention": ["all_to_all", "all_to_all"],
    "mla": ["all_to_all", "all_to_all"],
}


@pytest.mark.parametrize("name, names", COLLECTIVES.items())
def test_collectives_do_not_depend_on_the_packing(gloo_pool, name, names):
    for seen in gloo_pool.run(nothing_of_the_packing_is_sent, name, world_size=3):
        assert seen == names


def launches(group, rank, name):
    """What a CUDA graph would contain: kernels with grids and numbers, torch's operations with
    shapes.

    It also lists which tensors are the context's tables. Nothing is computed.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.interpreter import GridExecutor

    call = CALLS[name](torch.float32, "triton")
    context = fixed(PACKINGS[0], group, conv1d_kernel_size=4)
    seen = []

    def described(x, places):
        if isinstance(x, torch.Tensor):
            return tuple(x.shape), x.stride(), places.get(x.data_ptr())
        if isinstance(x, list | tuple):
            return tuple(described(y, places) for y in x)
        return type(x).__name__ if isinstance(x, torch.ScriptObject) else repr(x)

    class Operations(TorchDispatchMode):
        places: ClassVar[dict[int, str]] = {}

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append((str(f), described(args, self.places)))
            return f(*args, **kwargs or {})

    def launch(self, *args, **kwargs):
        grid = self.grid(kwargs) if callable(self.grid) else self.grid
        numbers = described(list(kwargs.values()), {})
        seen.append((self.fn.__name__, grid, described(args, Operations.places), numbers))

    held = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        call(context)
        Operations.places = {p: str(i) for i, (p, _) in enumerate(tables(context).values())}
        for offsets in PACKINGS:
            context.update(torch.tensor(offsets))
            seen.clear()
            with Operations():
                call(context)
            held.append(list(seen))
    kernels = {entry[0] for entry in held[0]}
    assert {"scan_kernel", "scan_bwd_kernel", "conv_kernel", "conv_bwd_kernel"} <= kernels
    assert ("fold_kernel" in kernels) == (context.world_size > 1)
    for offsets, other in zip(PACKINGS[1:], held[1:], strict=True):
        for a, b in zip(held[0], other, strict=True):
            assert a == b, (offsets, a, b)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_the_same_launches_whatever_the_packing(gloo_pool, name, ranks):
    pytest.importorskip("triton")
    gloo_pool.run(launches, name, world_size=ranks)


def test_a_convolution_finds_an_update_before_its_backward():
    x, weight = torch.randn(1, T, 3, requires_grad=True), torch.randn(3, 4)
    context = fixed(PACKINGS[0], None, conv1d_kernel_size=4)
    y = causal_conv1d(x, weight, cp_context=context)
    context.update(torch.tensor(PACKINGS[1]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("most", [None, MOST], ids=["ordinary", "fixed"])
def test_a_context_may_be_used_in_inference_mode_first(most):
    """Its tables are then written and saved by autograd like any others."""
    x, weight = torch.randn(1, T, 3), torch.randn(3, 4)
    with torch.inference_mode():
        context = build_cp_context(
            torch.tensor(PACKINGS[0]), None, conv1d_kernel_size=4, max_sequences=most
        )
        causal_conv1d(x, weight, cp_context=context)
    step = operator(torch.float64, "torch")
    if most:
        context.update(torch.tensor(PACKINGS[1]))
    step(context)
    causal_conv1d(x.requires_grad_(), weight, cp_context=context).sum().backward()
    alone = build_cp_context(torch.tensor(PACKINGS[1 if most else 0]), None)
    for i, (a, b) in enumerate(zip(step(context), step(alone), strict=True)):
        assert_exact(f"result {i}", a, b)


def test_torch_stages_are_not_captured_for_several_packings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    packing = fixed(PACKINGS[0], None).packing
    with pytest.raises(RuntimeError, match="only impl='triton' can be captured"):
        packing.steps(torch.device("cuda"))


@pytest.mark.parametrize("R", [1, 2, 3, 8])
def test_frames_have_one_size(R):
    frames = set()
    for offsets in PACKINGS:
        padded = offsets + offsets[-1:] * (MOST + 1 - len(offsets))
        for rank in range(R):
            lo, hi = T * rank // R, T * (rank + 1) // R
            frame = Frame.of(MOST, hi - lo, enters=rank > 0, leaves=rank + 1 < R)
            p = Packing.build(padded, [(lo, hi)], frame=frame)
            assert sum(-(-(s.stop - s.start) // 64) for s in p.segments) <= frame.chunks
            assert p.segments[-1].start == p.segments[-1].stop == p.tokens == hi - lo
            counts = len(p.carried), len(p.feeding), len(p.middle)
            assert counts == (rank > 0, rank + 1 < R, 0 < rank < R - 1)
            frames.add((rank, len(p.segments), len(p.offsets), frame))
    assert len(frames) == R


def counted(group, rank):
    """The counts that choose kernels, for each packing and for one with two rows a token."""
    context = fixed(PACKINGS[0], group)
    twice, found = context.repeated(2), []
    for offsets in PACKINGS:
        context.update(torch.tensor(offsets))
        found.append((context.packing.largest, twice.packing.largest))
    counts = context.packing.frame.counts
    assert all(n <= most for n, most in zip(counts, context.packing.largest, strict=True))
    return found


@pytest.mark.parametrize("ranks, crossing", [(1, (0, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1))])
def test_choices_of_kernels_depend_on_neither_packing_nor_rank(ranks, crossing):
    (found,) = {both for rank in run_threads(counted, ranks) for both in rank}
    tokens = -(-T // ranks)
    for n, counts in enumerate(found, 1):
        frame = Frame.of(MOST, n * tokens, enters=True, leaves=True)
        assert counts == (frame.segments, *crossing, frame.chunks)


def refused(group, rank):
    cu = torch.tensor([0, 5, 20])
    for options, message in (
        ({"max_sequences": 0}, "max_sequences must be at least 1, or None, got 0"),
        ({"max_sequences": 1}, "cu_seqlens must have at most max_sequences=1 sequences, got 2"),
        (
            {"max_sequences": 4, "token_ranges": [[(0, 10)], [(10, 20)]]},
            r"token_ranges must be None with max_sequences, got \[\[\(0, 10\)",
        ),
        (
            {"max_sequences": 4, "exchange": "ring"},
            "exchange must be 'auto', 'all_gather' or 'symmetric' with max_sequences, got 'ring'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build_cp_context(cu, group, **options)
    with pytest.raises(ValueError, match="a token a rank with max_sequences, got 1 tokens for 2"):
        build_cp_context(torch.tensor([0, 1]), group, max_sequences=4)
    with pytest.raises(ValueError, match="update needs a context built with max_sequences"):
        build_cp_context(cu, group).update(cu)
    context = build_cp_context(cu, group, max_sequences=3, conv1d_kernel_size=4, check=True)
    before = tables(context)
    for bad, message in (
        ([0, 5, 21], "cu_seqlens must end at the context's total_tokens=20, got 21"),
        ([0, 1, 2, 3, 20], "cu_seqlens must have at most max_sequences=3 sequences, got 4"),
        ([0, 9, 5, 20], "cu_seqlens must not decrease, got 9 then 5 at index 1"),
        ([1, 20], "cu_seqlens must start at 0, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            context.update(torch.tensor(bad))
    with pytest.raises(ValueError, match="cu_seqlens_cpu must equal cu_seqlens"):
        context.update(cu, torch.tensor([0, 6, 20]))
    assert tables(context) == before
    assert context.global_cu_seqlens == (0, 5, 20, 20)
    assert context.cu_seqlens.tolist() == context.cu_seqlens_cpu.tolist()
    x = [torch.rand(1, 10, 1, 4) for _ in range(4)]
    for name, value in (
        ("initial_state", torch.zeros(3, 1, 4, 4)),
        ("output_final_state", True),
        ("return_intermediate_states", True),
    ):
        with pytest.raises(ValueError, match=f"{name} must be left out under a context with max_"):
            chunk_kda(*x, torch.rand(1, 10, 1), cp_context=context, **{name: value})


def test_what_is_refused():
    run_threads(refused, 2)


def test_not_under_compile():
    context = fixed((0, 9), None, conv1d_kernel_size=4)
    x, weight = torch.randn(1, 9, 3), torch.randn(3, 4)

    @torch.compile(backend="eager", fullgraph=True)
    def f(x):
        return causal_conv1d(x, weight, cp_context=context)

    with pytest.raises(Exception, match="cannot be used under torch"):
        f(x)


def test_offsets_are_read_on_the_host():
    host = torch.tensor([0, 5, 15])
    unreadable = host.to("meta")
    context = build_cp_context(unreadable, None, cu_seqlens_cpu=host, max_sequences=4)
    context.update(torch.tensor([0, 15]).to("meta"), torch.tensor([0, 15]))
    assert context.cu_seqlens.shape == (5,)
    assert context.cu_seqlens_cpu.tolist() == [0, 15, 15, 15, 15]

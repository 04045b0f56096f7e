"""Convolutions that start from states and leave them, against plain torch, also under ranks."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fla_cp import build_cp_context, causal_conv1d, causal_conv1d_update, remat, zigzag_token_ranges
from fla_cp.comm import collectives
from fla_cp.nn import ShortConvolution
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.ranks import run_threads

D = 5
F32, F64 = torch.float32, torch.float64
PACKINGS = [(0, 20), (0, 1, 2, 4, 4, 9, 20), (0, 0, 1), (0, 2, 2)]


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def plain(x, weight, bias, residual, state, activation, cu):
    """y [1, T, D] and the final states [N, D, W], sequence by sequence."""
    W, y, final = weight.shape[1], [], []
    for n, (lo, hi) in enumerate(pairwise(cu)):
        before = x.new_zeros(x.shape[2], W) if state is None else state[n]
        tokens = torch.cat((before, x[0, lo:hi].mT), 1)
        final.append(tokens[:, -W:])
        if hi > lo:
            y.append(F.conv1d(tokens[:, 1:], weight[:, None], bias, groups=x.shape[2]).mT)
    out = torch.cat(y)[None]
    out = F.silu(out) if activation else out
    return out if residual is None else out + residual, torch.stack(final)


def setup(cu, W, *, bias=True, residual=True, state=True):
    """x, weight, bias, residual and initial state, then the gradients of y and of final states."""
    T, N = cu[-1], len(cu) - 1
    shapes = (
        ((1, T, D), True),
        ((D, W), True),
        ((D,), bias),
        ((1, T, D), residual),
        ((N, D, W), state),
    )
    leaves = [draw(*s, seed=i).requires_grad_() if on else None for i, (s, on) in enumerate(shapes)]
    return leaves, (draw(1, T, D, seed=8), draw(N, D, W, seed=9))


def call(x, weight, bias, residual, state, activation, **where):
    options = {"residual": residual, "initial_state": state, "output_final_state": True, **where}
    return causal_conv1d(x, weight, bias, activation, **options)


def gradients(outputs, grads, leaves):
    return torch.autograd.grad(outputs, [t for t in leaves if t is not None], grads)


@pytest.mark.parametrize("W", [1, 2, 4, 9])
@pytest.mark.parametrize("cu", PACKINGS, ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "none"])
@pytest.mark.parametrize("activation, extra", [("silu", True), (None, False)])
def test_equals_torch(W, cu, state, activation, extra):
    leaves, grads = setup(cu, W, bias=extra, residual=extra, state=state)
    exact = plain(*leaves, activation, cu)
    actual = call(*leaves, activation, cu_seqlens=torch.tensor(cu))
    for name, a, b in zip(("y", "final_state"), actual, exact, strict=True):
        assert_exact(name, a.detach(), b.detach())
    pairs = zip(gradients(actual, grads, leaves), gradients(exact, grads, leaves), strict=True)
    for a, b in pairs:
        assert_exact("gradient", a, b)


@pytest.mark.parametrize("used", [0, 1], ids=["y", "final_state"])
def test_gradients_of_one_result(used):
    cu = PACKINGS[1]
    leaves, grads = setup(cu, 4)
    leaves = [leaves[0], leaves[4]]
    rest = [draw(D, 4, seed=1), None, None]
    exact = plain(leaves[0], *rest, leaves[1], "silu", cu)[used]
    actual = call(leaves[0], *rest, leaves[1], "silu", cu_seqlens=torch.tensor(cu))[used]
    found = [gradients([y], [grads[used]], leaves) for y in (actual, exact)]
    for a, b in zip(*found, strict=True):
        assert_exact("gradient", a, b)


@pytest.mark.parametrize("T", [1, 3, 7])
def test_rows(T):
    x, weight, state = draw(3, T, D, seed=1), draw(D, 4, seed=2), draw(3, D, 4, seed=3)
    cu = tuple(range(0, 3 * T + 1, T))
    flat = x.reshape(1, 3 * T, D)
    exact, final = plain(flat, weight, None, None, state, "silu", cu)
    found = call(x, weight, None, None, state, "silu")
    assert_exact("y", found[0], exact.view(3, T, D))
    assert_exact("final_state", found[1], final)


def test_what_is_returned():
    """y alone unless output_final_state is given, as before there were states."""
    x, weight, state = draw(2, 6, D, seed=1), draw(D, 4, seed=2), draw(2, D, 4, seed=3)
    exact, none = causal_conv1d(x, weight, initial_state=state, output_final_state=False)
    assert none is None
    assert_exact("y", causal_conv1d(x, weight, initial_state=state), exact)
    y, none = causal_conv1d(x, weight, output_final_state=False)
    assert none is None
    assert_exact("y", causal_conv1d(x, weight), y)
    assert_exact("residual", causal_conv1d(x, weight, residual=x), y + x)
    # the oldest column belongs to a state but is read by no token
    state[:, :, 0] = float("nan")
    assert_exact("y", causal_conv1d(x, weight, initial_state=state), exact)


def test_a_host_copy_of_the_offsets():
    cu = torch.tensor(PACKINGS[1])
    leaves, _ = setup(PACKINGS[1], 4)
    with_copy = call(*leaves, "silu", cu_seqlens=cu, cu_seqlens_cpu=cu.clone())
    for a, b in zip(with_copy, call(*leaves, "silu", cu_seqlens=cu), strict=True):
        assert_exact("host copy", a.detach(), b.detach())
    y = causal_conv1d(*leaves[:2], cu_seqlens=cu, cu_seqlens_cpu=cu.clone())
    assert_exact("y", y.detach(), causal_conv1d(*leaves[:2], cu_seqlens=cu).detach())
    other = torch.tensor([0, 2, 2, 4, 4, 9, 20])
    for options in ({}, {"residual": leaves[3]}):
        with pytest.raises(ValueError, match="cu_seqlens_cpu must equal cu_seqlens"):
            causal_conv1d(*leaves[:2], cu_seqlens=cu, cu_seqlens_cpu=other, **options)


@pytest.mark.parametrize("W", [1, 2, 4])
def test_a_cache_splits_a_call_anywhere(W):
    x, weight, bias = draw(2, 11, D, seed=1), draw(D, W, seed=2), draw(D, seed=3)
    whole, end = call(x, weight, bias, None, None, "silu")
    for cut in range(1, 11):
        y, state = call(x[:, :cut], weight, bias, None, None, "silu")
        more, final = call(x[:, cut:], weight, bias, None, state, "silu")
        assert_exact("y", torch.cat((y, more), 1), whole)
        assert_exact("final_state", final, end)


@pytest.mark.parametrize("W", [1, 2, 4])
def test_steps_equal_the_parallel_call(W):
    N, T = 3, 7
    x, weight, bias = draw(N, T, D, seed=1), draw(D, W, seed=2), draw(D, seed=3)
    start = draw(N, D, W, seed=4)
    whole, end = call(x, weight, bias, x, start, "silu")
    for form in ((N, D), (N, 1, D), (1, N, D)):
        cache = start.clone()
        for t in range(T):
            token = x[:, t].reshape(form)
            y, same = causal_conv1d_update(token, cache, token, weight, bias, "silu")
            assert same is cache
            assert_exact("y", y, whole[:, t].reshape(form))
        assert_exact("cache", cache, end)


def test_a_step_in_half_precision_and_with_a_wider_cache():
    x, weight, state = (
        draw(*s, seed=i).bfloat16() for i, s in enumerate(((2, 8, D), (D, 4), (2, D, 4)))
    )
    y, final = call(x, weight, None, None, state, "silu")
    exact, _ = call(x.double(), weight.double(), None, None, state.double(), "silu")
    assert y.dtype == final.dtype == torch.bfloat16
    assert (y - exact).abs().max() <= 2**-8 * exact.abs().max()
    cache = state.float()
    steps = [causal_conv1d_update(x[:, t], cache, None, weight, None, "silu")[0] for t in range(8)]
    assert (torch.stack(steps, 1) - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert cache.dtype == F32
    assert_exact("cache", cache, final.float())


def half_precision(group, rank):
    """x in bf16, the state in fp32: the gradient of the state has its dtype."""
    cu = (0, 2, 3, 3, 17, 20)
    leaves, grads = setup(cu, 4)
    halves = [t.detach().bfloat16().requires_grad_() for t in leaves[:4]]
    state = leaves[4].detach().float().requires_grad_()
    exact_leaves = [t.detach().double().requires_grad_() for t in halves]
    exact_leaves.append(state.detach().bfloat16().double().requires_grad_())
    exact = plain(*exact_leaves, "silu", cu)
    exact_grads = gradients(exact, [g.bfloat16().double() for g in grads], exact_leaves)
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=4)
    local = [context.shard(t) if i in (0, 3) else t for i, t in enumerate(halves)]
    y, final = call(*local, state, "silu", cp_context=context)
    found = gradients(
        (y, final), (context.shard(grads[0]).bfloat16(), grads[1].bfloat16()), [state]
    )
    assert final.dtype == torch.bfloat16
    assert torch.equal(final.double(), exact[1])  # tokens and states are copied, not computed
    assert found[0].dtype == F32
    assert (found[0] - exact_grads[4]).abs().max() <= 2**-8 * exact_grads[4].abs().max()


def test_half_precision_over_ranks(gloo_pool):
    gloo_pool.run(half_precision, world_size=2)


def test_a_step_refuses_what_it_cannot_do():
    x, weight, cache = draw(2, D, seed=1), draw(D, 4, seed=2), draw(2, D, 4, seed=3)
    for name, bad, message in (
        ("x", x[:, None].expand(2, 2, D), r"x must be \[N, D\], \[N, 1, D\] or \[1, N, D\], got"),
        ("x", x[0], r"x must be \[N, D\]"),
        ("x", x[:0], "x must hold a token of at least one sequence"),
        ("weight", None, "weight must be a tensor, got None"),
        ("cache", cache[:1], r"cache must have shape \[N, D, W\] = \(2, 5, 4\), got \(1, 5, 4\)"),
        ("cache", cache[:, :, 1:], r"cache must have shape \[N, D, W\]"),
        ("cache", cache[:1].expand(2, D, 4), "cache must not overlap itself"),
        ("cache", cache.to("meta"), "cache must be on x's device cpu, got meta"),
        ("residual", x[:1], r"residual must have x's shape \(2, 5\), got \(1, 5\)"),
        (
            "weight",
            weight.clone().requires_grad_(),
            "causal_conv1d_update is forward only, got weight",
        ),
    ):
        before = cache.clone()
        with pytest.raises(ValueError, match=message):
            causal_conv1d_update(**{"x": x, "cache": cache, "weight": weight, name: bad})
        assert torch.equal(cache, before)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"initial_state": draw(1, D, 3, seed=0)}, r"initial_state must have shape \[N, D, W\]"),
        ({"initial_state": draw(1, 4, D, seed=0)}, r"initial_state must have shape"),
        ({"initial_state": torch.zeros(1, D, 4, dtype=torch.int64)}, "initial_state must be bf16"),
        ({"initial_state": torch.zeros(1, D, 4, device="meta")}, "initial_state must be on x's"),
        ({"residual": draw(1, 5, D, seed=0)}, r"residual must have x's shape \(1, 6, 5\), got"),
        ({"residual": draw(1, 6, D, seed=0).float()}, "residual must have x's dtype"),
        ({"residual": torch.zeros(1, 6, D, dtype=F64, device="meta")}, "residual must be on x's"),
        ({"output_final_state": 1}, "output_final_state must be True or False, got 1"),
        ({"cu_seqlens_cpu": torch.tensor([0, 6])}, "cu_seqlens_cpu is the host's copy"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        causal_conv1d(draw(1, 6, D, seed=1), draw(D, 4, seed=2), **changes)


def test_a_state_of_fp64_needs_x_of_fp64():
    x, weight = draw(1, 6, D, seed=1).float(), draw(D, 4, seed=2).float()
    with pytest.raises(ValueError, match=r"initial_state must be .* with x of torch\.float32"):
        causal_conv1d(x, weight, initial_state=draw(1, D, 4, seed=3))


def test_a_context_of_fixed_shape_has_no_states():
    context = build_cp_context(torch.tensor([0, 6]), None, conv1d_kernel_size=4, max_sequences=2)
    x, weight = draw(1, 6, D, seed=1), draw(D, 4, seed=2)
    for options in ({"initial_state": draw(2, D, 4, seed=3)}, {"output_final_state": True}):
        with pytest.raises(ValueError, match="must be left out under a context with max_sequences"):
            causal_conv1d(x, weight, cp_context=context, **options)
    y = causal_conv1d(x, weight, cp_context=context, residual=x)
    assert_exact("y", y, causal_conv1d(x, weight) + x)


LAYOUTS = {
    "contiguous": None,
    "zigzag": "zigzag",
    "uneven": [[(0, 1)], [(1, 3), (19, 20)], [(3, 19)]],
    "backwards": [[(10, 20)], [(3, 10)], [(0, 0), (0, 3)]],
    "rank without tokens": [[(2, 20)], [], [(1, 2), (0, 1)]],
}


def sharded(group, rank, cu, W, layout, state):
    """Results of a rank against the whole; the gradients that are sums over ranks are returned."""
    leaves, (dy, dfinal) = setup(cu, W, state=state)
    exact = call(*leaves, "silu", cu_seqlens=torch.tensor(cu))
    exact_grads = gradients(exact, (dy, dfinal), leaves)
    ranges = LAYOUTS[layout]
    if ranges == "zigzag":
        ranges = zigzag_token_ranges(cu[-1], group.size())
    context = build_cp_context(
        torch.tensor(cu), group, conv1d_kernel_size=W, token_ranges=ranges, check=True
    )
    local = [
        context.shard(t).detach().requires_grad_() if i in (0, 3) else t
        for i, t in enumerate(leaves)
    ]
    y, final = call(*local, "silu", cp_context=context)
    assert_exact("y", y.detach(), context.shard(exact[0]).detach())
    assert_exact("final_state", final.detach(), exact[1].detach())
    actual = gradients((y, final), (context.shard(dy), dfinal), local)
    for i in (0, 3):
        assert_exact("gradient of tokens", actual[i], context.shard(exact_grads[i]))
    if state:
        assert_exact("gradient of the state", actual[4], exact_grads[4])
    return actual[1:3], exact_grads[1:3]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cu", [(0, 20), (0, 2, 3, 3, 4, 17, 20, 20)], ids=str)
@pytest.mark.parametrize("W, state", [(1, True), (4, True), (4, False), (7, True)])
def test_three_ranks(cu, layout, W, state):
    results = run_threads(sharded, 3, cu, W, layout, state)
    for i, exact in enumerate(results[0][1]):
        assert_exact("parameter", sum(actual[i] for actual, _ in results), exact)


@pytest.mark.parametrize("world_size, layout", [(2, "contiguous"), (2, "zigzag"), (3, "uneven")])
def test_processes(gloo_pool, world_size, layout):
    cu = (0, 2, 3, 3, 4, 17, 20)
    results = gloo_pool.run(sharded, cu, 4, layout, True, world_size=world_size)
    for i, exact in enumerate(results[0][1]):
        assert_exact("parameter", sum(actual[i] for actual, _ in results), exact)


def test_one_rank_with_ranges_out_of_order():
    ranges, cu = [[(9, 20), (0, 3), (3, 9)]], torch.tensor(PACKINGS[1])
    context = build_cp_context(cu, None, conv1d_kernel_size=4, token_ranges=ranges)
    leaves, grads = setup(PACKINGS[1], 4)
    exact = call(*leaves, "silu", cu_seqlens=cu)
    local = [context.shard(t) if i in (0, 3) else t for i, t in enumerate(leaves)]
    actual = call(*local, "silu", cp_context=context)
    assert_exact("y", actual[0].detach(), context.shard(exact[0]).detach())
    assert_exact("final_state", actual[1].detach(), exact[1].detach())
    shared = (context.shard(grads[0]), grads[1])
    pairs = zip(gradients(actual, shared, leaves), gradients(exact, grads, leaves), strict=True)
    for a, b in pairs:
        assert_exact("gradient", a, b)


def differing(group, rank):
    x, weight = draw(1, 3, D, seed=1), draw(D, 4, seed=2)
    context = build_cp_context(torch.tensor([0, 6]), group, conv1d_kernel_size=4)
    states = {"output_final_state": True} if rank else {}
    with pytest.raises(
        ValueError, match=r"output_final_state \(False on ranks \[0\], True on ranks \[1\]"
    ):
        causal_conv1d(x, weight, cp_context=context, **states)


def test_ranks_that_ask_for_different_states():
    run_threads(differing, 2)


def checkpointed(group, rank):
    """The recomputation repeats no exchange, and gives the same gradients."""
    cu = (0, 2, 3, 3, 4, 17, 20)
    leaves, (dy, dfinal) = setup(cu, 4)
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=4, check=False)
    local = [
        context.shard(t).detach().requires_grad_() if i in (0, 3) else t
        for i, t in enumerate(leaves)
    ]
    grads = context.shard(dy), dfinal
    f = lambda *given: call(*given, "silu", cp_context=context)  # noqa: E731
    exact = gradients(f(*local), grads, local)
    counted = []
    for call_once in (f, lambda *given: remat.selective_checkpoint(f, *given)):
        before = collectives.all_reduce.calls
        found = gradients(call_once(*local), grads, local)
        counted.append(collectives.all_reduce.calls - before)
        for a, b in zip(found, exact, strict=True):
            assert_exact("gradient", a, b)
    assert counted[0] == counted[1] == 2, (
        counted
    )  # final states, and the gradient of the initial ones


def test_checkpoints_repeat_no_exchange(gloo_pool):
    gloo_pool.run(counting, world_size=2)


def counting(group, rank):
    inner = collectives.all_reduce

    def all_reduce(*given):
        all_reduce.calls += 1
        return inner(*given)

    all_reduce.calls = 0
    collectives.all_reduce = all_reduce
    try:
        checkpointed(group, rank)
    finally:
        collectives.all_reduce = inner


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("state", [True, False], ids=["state", "none"])
def test_compiled(rows, state):
    x, weight = draw(rows, 6, D, seed=1), draw(D, 4, seed=2)
    start = draw(rows, D, 4, seed=3) if state else None
    leaves = [t.requires_grad_() for t in (x, weight, start) if t is not None]
    grads = draw(rows, 6, D, seed=4), draw(rows, D, 4, seed=5)

    def f(x, weight, start):
        return call(x, weight, None, x, start, "silu")

    exact = f(x, weight, start)
    actual = torch.compile(f, backend="aot_eager", fullgraph=True)(x, weight, start)
    for a, b in zip(actual, exact, strict=True):
        assert_exact("result", a.detach(), b.detach())
    pairs = zip(gradients(actual, grads, leaves), gradients(exact, grads, leaves), strict=True)
    for a, b in pairs:
        assert_exact("gradient", a, b)


def test_a_compiled_step():
    x, weight, cache = draw(2, D, seed=1), draw(D, 4, seed=2), draw(2, D, 4, seed=3)
    step = torch.compile(causal_conv1d_update, backend="aot_eager", fullgraph=True)
    caches = cache.clone(), cache.clone()
    y, _ = step(x, caches[0], None, weight, None, "silu")
    assert_exact("y", y, causal_conv1d_update(x, caches[1], None, weight, None, "silu")[0])
    assert_exact("cache", *caches)


def test_states_under_a_context_and_compile():
    context = build_cp_context(torch.tensor([0, 6]), None, conv1d_kernel_size=4)
    f = torch.compile(
        lambda x, w: causal_conv1d(x, w, cp_context=context, output_final_state=True),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match=r"must be left out under a cp_context and torch\.compile"):
        f(draw(1, 6, D, seed=1), draw(D, 4, seed=2))


def module(**options):
    torch.manual_seed(0)
    conv = ShortConvolution(D, 4, bias=True, **options).double()
    torch.nn.init.normal_(conv.bias)
    return conv


@pytest.mark.parametrize("channels, width", [(1, 4), (3, 1), (3, 4)])
def test_results_may_be_changed_in_place(channels, width):
    x = draw(2, 6, channels, seed=1).requires_grad_()
    weight = draw(channels, width, seed=2)
    for found in causal_conv1d(x, weight, output_final_state=True):
        found *= 0
    found.sum().backward()
    assert not x.grad.any()


def test_a_module_prefills_returns_and_steps():
    conv, x = module(), draw(2, 12, D, seed=1)
    whole = conv(x).detach()
    y, cache = conv(x[:, :5], output_final_state=True)  # recorded, so nothing is in place
    more, final = conv(x[:, 5:6], cache=cache, output_final_state=True)
    assert final is not cache
    with torch.no_grad():
        again, same = conv(x[:, 5:6], cache=cache, output_final_state=True)
        assert same is cache
        assert_exact("step", again, more)
        assert_exact("cache", cache, final)
        chunk, cache = conv(x[:, 6:9], cache=cache, output_final_state=True)
        packed = x[:, 9].reshape(1, 2, D)
        cu = torch.arange(3)
        one, same = conv(packed, cu, residual=packed, cache=cache, output_final_state=True)
        assert same is cache
        two, none = conv(x[:, 10:11], cache=cache, output_final_state=False)
        three = conv(x[:, 11:], cache=cache)
    assert none is None
    assert_exact("packed", one[0], whole[:, 9] + x[:, 9])
    assert_exact("y", torch.cat((y, more, chunk), 1).detach(), whole[:, :9])
    assert_exact("y", torch.cat((two, three), 1), whole[:, 10:])
    assert_exact("cache", cache, x[:, -4:].mT)


def test_a_compiled_module_with_a_cache():
    conv, x = module(), draw(2, 7, D, seed=1)
    exact = conv(x).detach()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        y, cache = compiled(x[:, :6], output_final_state=True)
        more, same = compiled(x[:, 6:], cache=cache, output_final_state=True)
    assert same is cache
    assert_exact("y", torch.cat((y, more), 1), exact)
    assert_exact("cache", cache, x[:, -4:].mT)


def test_a_step_of_a_module_without_a_cache():
    conv, x = module(), draw(2, 2, D, seed=1)
    whole = conv(x).detach()
    with torch.no_grad():
        y, cache = conv.step(x[:, :1], output_final_state=True)
        more, none = conv.step(x[:, 1:], cache=cache)
    assert none is None
    assert_exact("y", torch.cat((y, more), 1), whole)


def test_a_packed_cache_of_a_module():
    """Documents continue in a second call, one of them by no token and one by a single one."""
    conv, lengths = module(), [(3, 4), (1, 1), (5, 0), (2, 6)]
    x = [draw(1, a + b, D, seed=i) for i, (a, b) in enumerate(lengths)]
    whole = [conv(t) for t in x]
    first = torch.cat([t[:, :a] for t, (a, _) in zip(x, lengths, strict=True)], 1)
    second = torch.cat([t[:, a:] for t, (a, _) in zip(x, lengths, strict=True)], 1)
    cu = [torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True)]
    y, cache = conv(first, cu[0], output_final_state=True)
    more, cache = conv(second, cu[1], cache=cache, output_final_state=True, cu_seqlens_cpu=cu[1])
    for i, t in enumerate(whole):
        mine = y[:, cu[0][i] : cu[0][i + 1]], more[:, cu[1][i] : cu[1][i + 1]]
        assert_exact("y", torch.cat(mine, 1).detach(), t.detach())
        n = min(4, x[i].shape[1])
        assert_exact("cache", cache[i, :, 4 - n :].detach(), x[i][0, -n:].mT)


def test_parts_of_a_module_with_a_cache():
    conv, x, cache = module(), draw(2, 6, D, seed=1), draw(2, D, 4, seed=2)
    exact, end = conv(x, cache=cache, output_final_state=True)
    for given in (x, x.split([4, 1], 2)):
        parts, final = conv(given, heads=((2, 2), (1, 1)), cache=cache, output_final_state=True)
        assert [p.shape for p in parts] == [(2, 6, 2, 2), (2, 6, 1, 1)]
        joined = torch.cat([p.flatten(2) for p in parts], 2)
        assert_exact("parts", joined.detach(), exact.detach())
        assert_exact("cache", final.detach(), end.detach())


def test_a_cache_of_another_shape():
    conv, x = module(), draw(2, 6, D, seed=1)
    for bad, message in (
        (draw(1, D, 4, seed=2), r"^cache must have shape \[N, D, W\] = \(2, 5, 4\), got"),
        ([], "^cache must be a tensor, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            conv(x, cache=bad)
    with pytest.raises(ValueError, match=r"^output_final_state must be True or False"):
        conv(x, output_final_state="yes")


def test_calls_without_states_build_no_tables(monkeypatch):
    """The plain call takes the way it took before there were states."""
    monkeypatch.setattr("fla_cp.ops.short_conv.Tables.of", lambda *a, **k: pytest.fail("built"))
    x, weight = draw(1, 6, D, seed=1), draw(D, 4, seed=2)
    y = causal_conv1d(x, weight.requires_grad_())
    y.sum().backward()
    assert weight.grad is not None


# Triton, interpreted on the CPU, against fp64.


def in_dtype(cu, W, dtype, impl, *, context=None):
    leaves, (dy, dfinal) = setup(cu, W)
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
    where = {"cu_seqlens": torch.tensor(cu)} if context is None else {"cp_context": context}
    found = call(*leaves, "silu", impl=impl, **where)
    grads = gradients(found, (dy.to(dtype), dfinal.to(dtype)), leaves)
    return [t.detach() for t in (*found, *grads)]


@pytest.mark.parametrize("W", [2, 4, 9])
@pytest.mark.parametrize("cu", [*PACKINGS[:3], (0, 17, 70)], ids=str)
def test_kernels(monkeypatch, W, cu):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    runs = [in_dtype(cu, W, *how) for how in ((F32, "triton"), (F64, "torch"), (F32, "torch"))]
    names = ("y", "final_state", "dx", "dweight", "dbias", "dresidual", "dstate")
    for name, *values in zip(names, *runs, strict=True):
        assert_within_budget(name, *values, factor=4.0)


def test_a_step_of_the_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, weight, start = (
        draw(*s, seed=i).float() for i, s in enumerate(((3, 5, D), (D, 4), (3, D, 4)))
    )
    whole, end = call(x, weight, None, None, start, "silu", impl="triton")
    exact, _ = call(x.double(), weight.double(), None, None, start.double(), "silu")
    cache = start.clone()
    for t in range(5):
        y, _ = causal_conv1d_update(x[:, t], cache, None, weight, None, "silu", impl="triton")
        assert_within_budget("step", y, exact[:, t], whole[:, t])
    assert_exact("cache", cache, end)


def kernels_sharded(group, rank):
    cu, T = (0, 2, 3, 3, 30, 41), 41
    leaves, (dy, dfinal) = setup(cu, 4)
    exact = call(*leaves, "silu", cu_seqlens=torch.tensor(cu))
    exact = *exact, *gradients(exact, (dy, dfinal), leaves)
    ranges = [[(0, 20), (40, 41)], [(20, 21)], [(21, 40)]]
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=4, token_ranges=ranges)
    local = [context.shard(t) if i in (0, 3) else t for i, t in enumerate(leaves)]
    local = [t.detach().float().requires_grad_() for t in local]
    found = call(*local, "silu", cp_context=context, impl="triton")
    grads = gradients(found, (context.shard(dy).float(), dfinal.float()), local)
    for i, a in enumerate((*found, *grads)):
        if i in (3, 4):  # dweight and dbias, sums over ranks
            continue
        b = exact[i] if i in (1, 6) else context.shard(exact[i])
        assert (a - b).abs().max() <= 1e-5 * exact[i].abs().max(), i
    assert context.total_tokens == T
    return [t.double() for t in grads[1:3]], exact[3:5]


def test_kernels_over_ranks(monkeypatch, gloo_pool):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results = gloo_pool.run(kernels_sharded, world_size=3)
    for i, exact in enumerate(results[0][1]):
        total = sum(mine[i] for mine, _ in results)
        assert (total - exact).abs().max() <= 1e-5 * exact.abs().max()

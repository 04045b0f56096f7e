"""Work that a layer does while an exchange is running."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fla_cp import build_cp_context, contiguous_token_ranges, zigzag_token_ranges
from fla_cp.comm import Overlap, collectives, overlap, run_overlap
from fla_cp.comm.exchange import base as exchange
from fla_cp.nn import GatedDeltaNet, KimiDeltaAttention, projections
from tests.support.closeness import assert_exact


def test_runs_once_in_the_first_exchange_or_when_asked():
    log = []
    with Overlap(lambda: log.append("work")) as work:
        run_overlap(lambda: log.append("wait"))
        run_overlap(lambda: log.append("wait"))
    work()
    assert log == ["work", "wait", "wait"]
    with Overlap(lambda: log.append("late")) as work:
        pass
    run_overlap(lambda: log.append("wait"))
    assert log[3:] == ["wait"]
    work(), work()
    assert log[4:] == ["late"]


def test_runs_as_before_the_block():
    """The work has gradients and autocast, although the operator turns both off inside."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    inside = torch.no_grad(), torch.autocast("cpu", enabled=False)
    with torch.autocast("cpu", torch.bfloat16), Overlap(lambda: x @ w) as product:
        with inside[0], inside[1]:
            run_overlap(lambda: None)
        assert product().dtype == torch.bfloat16
    assert torch.autograd.grad(product().float().sum(), w)[0].shape == w.shape
    inside = torch.enable_grad(), torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), Overlap(lambda: x @ w) as product, inside[0], inside[1]:
        run_overlap(lambda: None)
    assert not product().requires_grad and product().dtype == torch.float32


def test_a_failure_still_waits_and_leaves_nothing_behind():
    waited = []

    def fail():
        raise ArithmeticError("work")

    with pytest.raises(ArithmeticError, match="work"), Overlap(fail):
        run_overlap(lambda: waited.append(1))
    with pytest.raises(KeyError), Overlap(fail):
        raise KeyError
    run_overlap(lambda: waited.append(2))
    assert waited == [1, 2]


@contextmanager
def recorded(layer, log, hooked=True):
    """Adds the operations in calls of the layer to log, in order; with hooked also its modules."""
    patch = pytest.MonkeyPatch()
    for name in ("all_to_all", "all_gather"):
        real = getattr(collectives, name)
        start = lambda *a, real=real: (log.append("start"), real(*a))[1]  # noqa: E731
        patch.setattr(collectives, name, start)
    for module in (overlap, exchange):
        real = module.exchange_wait
        wait = lambda *a, real=real, **k: (log.append("wait"), real(*a, **k))[1]  # noqa: E731
        patch.setattr(module, "exchange_wait", wait)
    hooks = [
        getattr(layer, name).register_forward_hook(lambda *_, name=name: log.append(name))
        for name in ("a_proj", "b_proj", "f_proj", "g_proj", "o_proj")
        if hooked and hasattr(layer, name)
    ]
    try:
        yield log
    finally:
        patch.undo()
        for hook in hooks:
            hook.remove()


ORDER = {
    KimiDeltaAttention: "start f_proj b_proj wait start g_proj wait o_proj",
    # the output gate is a whole projection, which would occupy the GPU while others wait
    GatedDeltaNet: "start a_proj b_proj wait start wait g_proj o_proj",
}


def order(group, rank, kind):
    """The order of operations in a call, and of the modules' gradients.

    The batch crosses ranks, or does not. FSDP's collectives follow the order of the gradients.
    """
    torch.manual_seed(0)
    layer = kind(24, 2, 8).double()
    x = torch.randn(1, 96, 24, dtype=torch.float64)
    found = []
    names = {module: name for name, module in layer.named_children()}
    for cu in ((0, 96), (0, 48, 96)):
        context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=4)
        backward: list[str] = []

        def noted(module, _, out, to=backward, names=names):
            out = out[0] if isinstance(out, tuple) else out  # the convolution's are one node's
            out.register_hook(lambda _: to.append(names[module]))

        hooks = [m.register_forward_hook(noted) for m in layer.children()]
        with recorded(layer, []) as log:
            y = layer(context.shard(x), cp_context=context)
        y.sum().backward()
        for hook in hooks:
            hook.remove()
        found += [" ".join(log), backward]
    return found


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.__name__)
def test_projections_run_between_start_and_wait(gloo_pool, kind):
    """The order is the same if nothing crosses: ranks of other context-parallel groups have other
    documents, and FSDP runs its collectives in the order of the modules.
    """
    for crossing, backward, apart, backward_apart in gloo_pool.run(order, kind, world_size=2):
        assert crossing == ORDER[kind]
        assert apart == " ".join(w for w in ORDER[kind].split() if w not in ("start", "wait"))
        assert backward == backward_apart


# The first product is that of q, k and v, the last that of o_proj. In parentheses: columns.
JOINED = {
    KimiDeltaAttention: "joined(48) start joined(18) linear(16) wait start linear(16) wait "
    "linear(24)",
    GatedDeltaNet: "joined(48) start joined(4) wait start wait linear(16) linear(24)",
}


def joined_order(group, rank, kind):
    """The order of products without hooks, where projections share them; results and gradients
    beside those of one rank."""
    torch.manual_seed(0)
    layer, log = kind(24, 2, 8).double(), []
    x = torch.randn(1, 96, 24, dtype=torch.float64)
    alone = build_cp_context(torch.tensor([0, 96]), None, conv1d_kernel_size=4)
    context = build_cp_context(torch.tensor([0, 96]), group, conv1d_kernel_size=4)
    exact = layer(x, cp_context=alone)
    product, linear = projections.joint_product, torch.nn.functional.linear

    def joint_product(x, weights):
        log.append(f"joined({sum(map(len, weights))})")
        return product(x, weights)

    def one_product(x, weight, bias=None):
        log.append(f"linear({len(weight)})")
        return linear(x, weight, bias)

    with recorded(layer, log, hooked=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(projections, "joint_product", joint_product)
        patch.setattr(torch.nn.functional, "linear", one_product)
        y = layer(context.shard(x), cp_context=context)
    assert_exact("y", y.detach(), context.shard(exact).detach())
    leaves = list(layer.parameters())
    grads, expected = (torch.autograd.grad(t.square().sum(), leaves) for t in (y, exact))
    return " ".join(log), [(a, b) for a, b in zip(grads, expected, strict=True)]


@pytest.mark.parametrize("kind", JOINED, ids=lambda kind: kind.__name__)
def test_joined_products_run_between_start_and_wait(gloo_pool, kind):
    (log, mine), (other_log, others) = gloo_pool.run(joined_order, kind, world_size=2)
    assert log == other_log == JOINED[kind]
    for (a, exact), (b, _) in zip(mine, others, strict=True):
        assert_exact("gradient", a + b, exact)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's, by itself
@pytest.mark.parametrize("ranges", [contiguous_token_ranges, zigzag_token_ranges])
def test_a_compiled_core_in_an_eager_layer(ranges):
    """Inside a compiled operator autograd would not see the layer's work."""
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(24, 2, 8).double(), torch.randn(1, 96, 24, dtype=torch.float64)
    context = build_cp_context(
        torch.tensor([0, 96]), None, conv1d_kernel_size=4, token_ranges=ranges(96, 1)
    )
    found = []
    for _ in range(2):
        y = layer(context.shard(x), cp_context=context)
        found.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
        layer.core.compile(backend="aot_eager")
    for plain, compiled in zip(*found, strict=True):
        assert_exact("gradient", compiled, plain)


def recomputed(group, rank, reentrant):
    """Gradients with and without recomputing the layer's forward in the backward."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(24, 2, 8).double()
    context = build_cp_context(torch.tensor([0, 70, 96]), group, conv1d_kernel_size=4)
    x = context.shard(torch.randn(1, 96, 24, dtype=torch.float64)).requires_grad_()
    call = lambda x: layer(x, cp_context=context)  # noqa: E731
    leaves, found = [x, *layer.parameters()], []
    for y in (call(x), checkpoint(call, x, use_reentrant=reentrant)):
        y.square().sum().backward()  # what a reentrant checkpoint supports
        found.append([leaf.grad.clone() for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    for plain, again in zip(*found, strict=True):
        assert_exact("gradient", again, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_it(gloo_pool, reentrant):
    gloo_pool.run(recomputed, reentrant, world_size=2)

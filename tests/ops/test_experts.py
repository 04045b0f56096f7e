"""Mixture of experts: against a loop over tokens in fp64, ties, empty experts, ranks, balancing."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fla_cp.nn import Experts, Router, RoutingStatistics, grouped, load_balancing_loss
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.ranks import run_threads

CASES = {
    "softmax": {},
    "sigmoid": {"routing": "sigmoid", "scale": 2.446, "shared_experts": 1},
    "gated": {"shared_experts": 2, "shared_gate": True},
    "raw weights": {"normalize": False},
    "groups": {"routing": "sigmoid", "num_groups": 3, "top_groups": 2},
    "odd sizes": {"sizes": (7, 5, 6, 3)},
    "one of one": {"sizes": (8, 4, 1, 1), "normalize": False, "routing": "sigmoid"},
    "all of five": {"sizes": (8, 4, 5, 5)},
    "mostly empty": {"sizes": (8, 4, 90, 2)},
}
BATCHES = {"odd sizes": (3, 13), "mostly empty": (1, 5), "one of one": (1, 1)}


def drawn(name, dtype=torch.float64):
    """A layer with weights of std about 1, a bias that matters, and its input [B, T, hidden]."""
    options = dict(CASES[name])
    sizes = options.pop("sizes", (16, 8, 6, 2))
    gen = torch.Generator().manual_seed(0)
    layer = Experts(*sizes, **options).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) / math.sqrt(p.shape[-1]))
        if layer.router.correction_bias is not None:
            layer.router.correction_bias.copy_(torch.rand(sizes[2], generator=gen) - 0.5)
    x = torch.randn(*BATCHES.get(name, (2, 19)), sizes[0], generator=gen).to(dtype)
    return layer, x


def chosen_in_a_loop(router, scores):
    """The experts of one token, best first. scores: [E] floats."""
    bias = [0.0] * len(scores)
    if router.correction_bias is not None:
        bias = router.correction_bias.tolist()
    value = [s + b for s, b in zip(scores, bias, strict=True)]
    width = len(value) // router.num_groups
    groups = [range(i * width, (i + 1) * width) for i in range(router.num_groups)]
    best = [sum(sorted((value[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda i: (-best[i], i))[: router.top_groups]
    allowed = [e for i in kept for e in groups[i]]
    return sorted(allowed, key=lambda e: (-value[e], e))[: router.experts_per_token]


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def in_a_loop(layer, x):
    """The layer's output, counts and summed probabilities, token by token and expert by expert."""
    router, experts = layer.router, layer.experts
    rows, counts, total = [], [0] * router.num_experts, 0.0
    for token in x.flatten(0, 1):
        wide = torch.promote_types(token.dtype, torch.float32)
        logits = router.weight.to(wide) @ token.to(wide)
        scores = torch.sigmoid(logits) if router.routing == "sigmoid" else logits.softmax(0)
        taken = chosen_in_a_loop(router, scores.tolist())
        divisor = sum(scores[e] for e in taken) if router.normalize else 1.0
        y = torch.zeros_like(token)
        for e in taken:
            counts[e] += 1
            gate, up = experts.gate_up[e].chunk(2)
            weight = router.scale * scores[e] / divisor
            y = y + weight.to(token.dtype) * swiglu(token, gate, up, experts.down[e])
        if layer.shared is not None:
            s = layer.shared
            shared = swiglu(token, s.gate.weight, s.up.weight, s.down.weight)
            if layer.shared_gate is not None:
                shared = shared * torch.sigmoid(layer.shared_gate.weight[0] @ token)
            y = y + shared
        rows.append(y)
        total = total + scores / scores.sum()
    return torch.stack(rows).view_as(x), torch.tensor(counts), total


def results(layer, x, call):
    """Output, counts, summed probabilities and the gradients of all, by name."""
    x, names = x.detach().clone().requires_grad_(), [n for n, _ in layer.named_parameters()]
    y, counts, total = call(layer, x)
    gen = torch.Generator().manual_seed(1)
    signs = [torch.randint(-8, 9, t.shape, generator=gen).to(t.dtype) / 8 for t in (y, total)]
    grads = torch.autograd.grad([y, total], [x, *layer.parameters()], signs)
    named = zip(["x", *names], grads, strict=True)
    return {"y": y, "counts": counts, "total": total, **{f"d {n}": g for n, g in named}}


def called(layer, x):
    y, statistics = layer(x)
    return y, *statistics


@pytest.mark.parametrize("name", CASES)
def test_like_a_loop(name):
    layer, x = drawn(name)
    found, wanted = (results(layer, x, call) for call in (called, in_a_loop))
    assert found.keys() == wanted.keys()
    assert torch.equal(found["counts"], wanted["counts"])
    assert found["counts"].dtype == torch.int64
    for key in wanted.keys() - {"counts"}:
        assert wanted[key].abs().max() > 1e-6 or name in ("all of five", "one of one"), key
        assert_exact(key, found[key], wanted[key])
    if name == "mostly empty":
        empty = found["counts"] == 0
        assert empty.sum() >= 80
        assert not found["d experts.gate_up"][empty].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "gated", "mostly empty"])
def test_narrow_dtypes_use_the_grouped_product(name, dtype, monkeypatch):
    calls = []
    original = grouped._grouped_mm

    def noted(*args, **options):
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(grouped, "_grouped_mm", noted)
    layer, x = drawn(name, dtype)
    found, baseline = (results(layer, x, call) for call in (called, in_a_loop))
    assert (len(calls) == 6) == (dtype == torch.float32 or name != "mostly empty")
    exact = results(layer.double(), x.double(), in_a_loop)
    assert torch.equal(found["counts"], exact["counts"])
    assert found["y"].dtype == found["d experts.down"].dtype == dtype
    assert found["total"].dtype == torch.float32
    for key in exact.keys() - {"counts"}:
        assert_within_budget(key, found[key], exact[key], baseline[key])


def test_torch_with_another_product_gets_the_loop(monkeypatch):
    """Sizes that are no multiple of 16 bytes, and no rows at all, never reach torch's product."""
    monkeypatch.setattr(grouped, "_grouped_mm", None)
    layer, x = drawn("odd sizes", torch.float32)
    y, _ = layer(x)
    assert_within_budget("y", y, in_a_loop(layer.double(), x.double())[0], y)
    layer, x = drawn("softmax", torch.float32)
    x = x[:, :0].requires_grad_()
    y, statistics = layer(x)
    (y.sum() + statistics.probabilities.sum()).backward()
    assert y.shape == x.grad.shape == (2, 0, 16)
    assert not statistics.counts.any() and not layer.experts.down.grad.any()


def test_a_group_without_rows_has_a_gradient_of_zero_whatever_torch_leaves_there(monkeypatch):
    original = grouped._grouped_mm

    def unwritten(a, b, *, offs):
        out = original(a, b, offs=offs)
        if a.ndim == b.ndim == 2:
            out[torch.diff(offs, prepend=torch.zeros(1).int()) == 0] = math.nan
        return out

    layer, x = drawn("mostly empty", torch.float32)
    wanted = results(layer, x, called)
    monkeypatch.setattr(grouped, "_grouped_mm", unwritten)
    found = results(layer, x, called)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
def test_of_equal_scores_the_first_experts_are_chosen(routing):
    router = Router(4, 50, 3, routing=routing)
    torch.nn.init.zeros_(router.weight)
    found = router(torch.randn(9, 4))
    assert found.experts.tolist() == [[0, 1, 2]] * 9
    torch.testing.assert_close(found.weights, torch.full((9, 3), 1 / 3))
    groups = Router(4, 12, 2, routing="sigmoid", num_groups=4, top_groups=1)
    torch.nn.init.zeros_(groups.weight)
    groups.correction_bias[5] = groups.correction_bias[11] = 0.25
    assert groups(torch.randn(2, 4)).experts.tolist() == [[5, 3]] * 2


def test_negative_biases_choose_no_expert_outside_the_groups():
    router = Router(4, 6, 2, routing="sigmoid", num_groups=3, top_groups=1)
    torch.nn.init.zeros_(router.weight)
    router.correction_bias.copy_(torch.tensor([-5.0, -5.0, -4.0, -4.0, -6.0, -6.0]))
    assert router(torch.randn(3, 4)).experts.tolist() == [[2, 3]] * 3


def test_the_bias_chooses_but_does_not_weigh():
    layer, x = drawn("sigmoid")
    router, tokens = layer.router, x.flatten(0, 1)
    before = router(tokens)
    router.correction_bias.zero_()
    router.correction_bias[4] = 10.0
    found = router(tokens)
    assert (found.experts[:, 0] == 4).all() and not (before.experts[:, 0] == 4).all()
    scores = torch.sigmoid(tokens @ router.weight.T).gather(1, found.experts)
    assert_exact("weights", found.weights, 2.446 * scores / scores.sum(-1, keepdim=True))


def test_the_bias_follows_the_loads():
    router = Router(4, 4, 2, routing="sigmoid")
    router.move_bias(torch.tensor([8, 0, 4, 4]), 0.25)
    router.move_bias(torch.tensor([9, 1, 2, 4]), 0.25)
    assert router.correction_bias.tolist() == [-0.5, 0.5, 0.25, 0.0]
    with pytest.raises(ValueError, match="a bias needs routing=\"sigmoid\", got 'softmax'"):
        Router(4, 4, 2).move_bias(torch.ones(4), 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_converted_router_keeps_its_bias(dtype):
    """In bf16 it would stop at 0.5, where 0.001 is less than half of the last digit."""
    router = Router(4, 4, 2, routing="sigmoid")
    with torch.no_grad():
        router.correction_bias.fill_(0.7)
    for converted in (router.to(dtype), router.double().to(dtype), router.to(dtype)):
        assert converted.weight.dtype == dtype
        assert converted.correction_bias.dtype == torch.float32
    for _ in range(1000):
        router.move_bias(torch.tensor([0, 1, 2, 9]), 1e-3)
    expected = 0.7 + torch.tensor([1.0, 1.0, 1.0, -1.0])
    assert (router.correction_bias - expected).abs().max() < 1e-4
    assert "correction_bias" in router.state_dict()
    assert router.double().correction_bias.dtype == torch.float64
    assert router.to("meta").correction_bias.device.type == "meta"


def test_scores_are_those_of_float32_under_autocast():
    layer, x = drawn("gated", torch.float32)
    wanted = layer.router(x.flatten(0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.router(x.flatten(0, 1))
        y, _ = layer(x)
    torch.testing.assert_close(found, wanted)
    assert y.dtype == torch.float32
    exact = layer(x)[0]
    assert 1e-4 < (y - exact).norm() / exact.norm() < 0.02


def balance_of(rows, experts, k):
    """The loss by its definition. rows: [N, E] probabilities. experts: [N, k]."""
    N, E = rows.shape
    f = [(experts == e).sum().item() / N for e in range(E)]
    return E * sum(f[e] * rows[:, e].mean() for e in range(E))


def test_balancing_loss_by_its_definition():
    layer, x = drawn("softmax")
    routing = layer.router(x.flatten(0, 1))
    _, statistics = layer(x)
    loss = load_balancing_loss(statistics, 2)
    wanted = balance_of(routing.probabilities, routing.experts, 2)
    assert_exact("loss", loss, wanted)
    (found,), (grad,) = (torch.autograd.grad(v, [layer.router.weight]) for v in (loss, wanted))
    assert_exact("gradient", found, grad)
    even = RoutingStatistics(torch.full((2, 8), 30), torch.full((2, 8), 10.0))
    assert load_balancing_loss(even, 3).tolist() == [3.0, 3.0]
    nothing = RoutingStatistics(torch.zeros(4).long(), torch.zeros(4))
    assert load_balancing_loss(nothing, 2).item() == 0.0


def test_ranks_have_the_loss_and_the_gradients_of_one():
    """The tokens are divided unequally; one rank has none."""
    layer, x = drawn("softmax")
    x = x.view(1, -1, 16)
    _, statistics = layer(x)
    loss = load_balancing_loss(statistics, 2)
    (wanted,) = torch.autograd.grad(loss, [layer.router.weight])
    assert wanted.abs().max() > 1e-3

    def on_rank(group, rank):
        mine, part = drawn("softmax")[0], x[:, [0, 9, 9, 38][rank] : [9, 9, 38][rank]]
        _, found = mine(part)
        share = load_balancing_loss(found, 2, group)
        share.backward()
        return share.detach(), mine.router.weight.grad, found.counts

    shares, grads, counts = zip(*run_threads(on_rank, 3), strict=True)
    torch.testing.assert_close(sum(shares), loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(grads), wanted, rtol=1e-12, atol=1e-13)
    assert torch.equal(sum(counts), statistics.counts)


def test_a_recomputed_forward_reports_once():
    layer, x = drawn("sigmoid")
    calls, seen = [], []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    plain = results(layer, x, called)

    def recomputed(layer, x):
        y, statistics = checkpoint(layer, x, use_reentrant=False)
        seen.append(statistics.counts)
        return y, *statistics

    found = results(layer, x, recomputed)
    assert len(calls) == 3 and len(seen) == 1
    for key, value in plain.items():
        assert_exact(key, found[key], value)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["groups", "gated"])
def test_a_compiled_layer_is_one_graph(name):
    layer, x = drawn(name, torch.float32)
    torch._dynamo.reset()
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    exact = results(layer.double(), x.double(), called)
    layer.float()
    plain = results(layer, x, called)
    found = results(layer, x, lambda _, x: called(whole, x))
    assert torch.equal(found["counts"], plain["counts"])
    for key in exact.keys() - {"counts"}:
        assert_within_budget(key, found[key], exact[key], plain[key])


def test_nothing_but_the_product_reads_from_the_device():
    """A fake tensor has no values, so a size that depended on one would raise an error."""
    with FakeTensorMode():
        layer = Experts(16, 8, 6, 2, routing="sigmoid", num_groups=2, shared_experts=1)
        y, statistics = layer(torch.randn(2, 9, 16))
        (y.sum() + load_balancing_loss(statistics, 2)).backward()
    assert y.shape == (2, 9, 16) and layer.experts.down.grad.shape == (6, 16, 8)


@pytest.mark.bits
def test_sums_have_one_order():
    layer, x = drawn("gated", torch.bfloat16)
    first, second = (results(layer, x, called) for _ in range(2))
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ((16, 8, 6, 7), {}, "experts_per_token must be at most the 6 experts .* got 7"),
        ((16, 8, 0, 1), {}, "num_experts must be an integer from 1, got 0"),
        ((16, 0, 6, 1), {}, "expert_size must be an integer from 1, got 0"),
        ((16, 8, 6, 2), {"num_groups": 4}, "must be a multiple of num_groups, got num_experts=6"),
        ((16, 8, 6, 2), {"top_groups": 2}, "top_groups must be at most num_groups=1, got 2"),
        (
            (16, 8, 6, 3),
            {"num_groups": 3},
            "experts_per_token must be at most the 2 experts that may be chosen, got 3",
        ),
        ((16, 8, 6, 2), {"routing": "tanh"}, "routing must be 'softmax' or 'sigmoid', got 'tanh'"),
        ((16, 8, 6, 2), {"shared_experts": -1}, "shared_experts must be an integer from 1, got -1"),
        ((16, 8, 6, 2), {"shared_gate": True}, "shared_gate needs shared_experts from 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        Experts(*sizes, **options)


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.zeros(3, 16), r"x must be \[B, T, hidden_size=16\], got shape \(3, 16\)"),
        (torch.zeros(1, 3, 8), r"x must be \[B, T, hidden_size=16\], got shape \(1, 3, 8\)"),
        (torch.zeros(1, 3, 16).long(), "x must have a floating dtype, got torch.int64"),
        (None, "x must be a tensor, got None"),
    ],
)
def test_inputs_that_do_not_fit(x, message):
    with pytest.raises(ValueError, match=message):
        Experts(16, 8, 6, 2)(x)

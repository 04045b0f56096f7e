"""Layers whose modules share products, and layers in one call, against layers that call each
module; and who sees which."""

import copy
import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fla_cp import build_cp_context, remat
from fla_cp.kernels import TORCH, using
from fla_cp.nn import (
    Comba,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    SimpleGatedLinearAttention,
    one_call,
    projections,
)
from fla_cp.ops.known import known_calls
from tests.support.closeness import assert_exact, assert_within_budget

ONE_CALL = [KimiDeltaAttention, GatedDeltaNet, GatedLinearAttention, SimpleGatedLinearAttention]
EVERY = [*ONE_CALL, Comba, GatedDeltaProduct]
HIDDEN = 40


class Recorded(type(TORCH)):
    """The torch stages as a backend whose calls are replayed."""

    def replay_stream(self, device):
        return 0


RECORDED = Recorded(**{f.name: getattr(TORCH, f.name) for f in dataclasses.fields(TORCH)})


@pytest.fixture(autouse=True)
def forget():
    one_call._known.clear()
    yield
    one_call._known.clear()


def layer(kind=KimiDeltaAttention, dtype=torch.float64, **options):
    """A layer whose parameters all matter, with grouped heads and V unlike K."""
    torch.manual_seed(0)
    made = kind(HIDDEN, 2, 8, num_v_heads=4, head_v_dim=6, **options)
    for name in ("o_norm.weight", "core.dt_bias"):
        torch.nn.init.normal_(made.get_parameter(name))
    made = made.to(dtype)
    if dtype != torch.float64:
        made.core.float()
    return made


def apart(made):
    """The same layer, which calls each module, since a hook watches them."""
    made = copy.deepcopy(made)
    for module in made.modules():
        module.register_forward_hook(lambda *_: None)
    return made


def results(made, x, dy, **options):
    """y, dx and the gradients of all parameters, by name."""
    x = x.clone().requires_grad_()
    y = made(x, **options)
    names, leaves = zip(*made.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, [x, *leaves], dy)
    return dict(zip(("y", "dx", *names), (y.detach(), *grads), strict=True))


def draws(B=2, T=70, dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    x, dy = torch.randn(2, B, T, HIDDEN, dtype=torch.float64)
    return x.to(dtype), dy.to(dtype)


def assert_alike(found, expected):
    for name in expected:
        assert_exact(name, found[name], expected[name])


def runs_in_one_call(made, x=None, **options):
    y = made(draws()[0] if x is None else x, **options)
    return y.grad_fn is not None and "_OneCall" in y.grad_fn.name()


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_equals_a_layer_that_calls_its_modules(kind):
    made, given = layer(kind), draws()
    assert runs_in_one_call(made) == (kind in ONE_CALL)
    assert not runs_in_one_call(apart(made))
    assert_alike(results(made, *given), results(apart(made), *given))


@pytest.mark.parametrize("options", [
    {"gate_lower_bound": -5.0}, {"allow_neg_eigval": True}, {"conv_size": 1}, {"conv_size": 7},
    {"gate_bias": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("T", [1, 64, 65])
def test_options_of_a_layer_in_one_call(options, T):
    made, given = layer(**options), draws(B=3, T=T)
    assert runs_in_one_call(made)
    assert_alike(results(made, *given), results(apart(made), *given))


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_joined_products_of_packed_sequences(kind):
    """Calls with cu_seqlens are not one call, but their products are joined."""
    made, given = layer(kind), draws(B=1)
    cu = {"cu_seqlens": torch.tensor([0, 3, 3, 70])}
    assert not runs_in_one_call(made, given[0], **cu)
    assert_alike(results(made, *given, **cu), results(apart(made), *given, **cu))


@pytest.mark.parametrize("cut", [False, True])
def test_a_context_of_one_rank(cut):
    """In two ranges the convolution needs tokens of the other range, which is no call of one."""
    cu, made, given = torch.tensor([0, 20, 70]), layer(), draws(B=1)
    ranges = [[(35, 70), (0, 35)]] if cut else None
    context = build_cp_context(cu, None, conv1d_kernel_size=4, token_ranges=ranges)
    assert runs_in_one_call(made, given[0], cp_context=context) == (not cut)
    found = results(made, *(context.shard(t) for t in given), cp_context=context)
    expected = results(apart(made), *given, cu_seqlens=cu)
    for name in ("y", "dx"):
        expected[name] = context.shard(expected[name])
    assert_alike(found, expected)


@pytest.mark.parametrize("kind", ONE_CALL, ids=lambda kind: kind.__name__)
def test_bf16_is_as_exact_as_module_by_module(kind):
    made, (x, dy) = layer(kind, torch.bfloat16), draws(dtype=torch.bfloat16)
    exact = layer(kind, torch.bfloat16).double()
    exact = results(exact, x.double(), dy.double())
    found, baseline = results(made, x, dy), results(apart(made), x, dy)
    assert runs_in_one_call(made, x)
    for name, t in found.items():
        assert t.dtype == baseline[name].dtype
        assert_within_budget(name, t, exact[name], baseline[name])


@pytest.mark.parametrize("kind", ONE_CALL, ids=lambda kind: kind.__name__)
def test_replayed_calls_use_their_own_tensors(kind):
    """Two layers of equal sizes share programs, and each has its own weights, inputs and output
    gradients, of which some are laid out in another way."""
    first, second = layer(kind), layer(kind)
    with torch.no_grad():
        for p in second.parameters():
            p += 0.1 * torch.randn_like(p)
    with using(RECORDED):
        for seed in range(4):
            for made in (first, second):
                x, dy = draws(seed=seed)
                dy = dy if seed < 2 else dy[:, :1].expand(dy.shape)
                expected = results(apart(made), x, dy)
                assert_alike(results(made, x, dy), expected)
    (known,) = one_call._known.values()
    for direction, kinds in ((known.kind.forward, 1), (known.kind.backward, 2)):
        assert len(direction.known) == kinds
        assert not any(isinstance(p, str) for p in direction.known.values()), direction.known


def test_a_replay_knows_tables_of_other_tokens():
    """Contexts with equal sizes and other sequences have other tables, and without a context there
    is no halo."""
    made, given = layer(), draws(B=1)
    with using(RECORDED):
        for cu in ([0, 20, 70], [0, 50, 70], [0, 70], None) * 4:
            how = {}
            if cu is not None:
                how["cp_context"] = build_cp_context(torch.tensor(cu), None, conv1d_kernel_size=4)
            found, offsets = results(made, *given, **how), torch.tensor(cu or [0, 70])
            assert_alike(found, results(apart(made), *given, cu_seqlens=offsets))


@pytest.mark.parametrize("options", [{"gate_lower_bound": -5.0}, {"allow_neg_eigval": True}, {}])
@pytest.mark.parametrize("kind", ONE_CALL, ids=lambda kind: kind.__name__)
def test_the_operators_rule_is_that_of_the_core(kind, options):
    if kind is not KimiDeltaAttention and "gate_lower_bound" in options:
        options = {}
    known_calls.clear()
    made, (x, _) = layer(kind, **options), draws()
    made(x), apart(made)(x)
    (ours,), (theirs,) = one_call._known.values(), known_calls.values()
    assert ours.rule == theirs.rule and ours.backend is theirs.backend


@pytest.mark.parametrize("narrow", [0, 10, 1000])
def test_gradients_of_wide_and_narrow_parts(narrow, monkeypatch):
    """Wide parts have products of their own, narrow ones share one."""
    monkeypatch.setattr(projections, "NARROW", narrow)
    made, given = layer(GatedDeltaNet), draws(B=1)
    expected = results(apart(made), *given)
    assert_alike(results(made, *given), expected)
    assert_alike(results(made, *given, cu_seqlens=torch.tensor([0, 70])), expected)


def test_an_input_without_a_gradient():
    made, (x, dy) = layer(), draws()
    found = torch.autograd.grad(made(x), list(made.parameters()), dy)
    expected = results(apart(made), x, dy)
    for (name, _), grad in zip(made.named_parameters(), found, strict=True):
        assert_exact(name, grad, expected[name])


def test_the_result_may_be_changed_in_place():
    made, (x, _) = layer(), draws()
    y = made(x)
    y += 1
    y.sum().backward()
    assert made.o_proj.weight.grad is not None


def saved_on_the_host():
    return torch.autograd.graph.save_on_cpu()


class Own(KimiDeltaAttention):
    def gated(self, o, project, early):
        return 2 * super().gated(o, project, early)


OBSERVERS = {
    "hooks of saved tensors": (layer, saved_on_the_host),
    "autocast": (layer, lambda: torch.autocast("cpu", torch.bfloat16)),
    "no gradients": (layer, torch.no_grad),
    "a subclass": (lambda: layer(Own), None),
    "a frozen weight": (lambda: layer().requires_grad_(False), None),
    "a parametrised core": (
        lambda: torch.nn.utils.parametrize.register_parametrization(
            (made := layer()).core, "A_log", torch.nn.Identity()
        ) and made,
        None,
    ),
    "another dtype of the gate": (lambda: layer(dtype=torch.float32).bfloat16(), None),
}  # fmt: skip


@pytest.mark.parametrize("who", OBSERVERS)
def test_who_would_notice_gets_each_module(who):
    made, around = OBSERVERS[who]
    made = made()
    x = draws()[0].to(made.q_proj.weight.dtype)
    if around is None:
        assert not runs_in_one_call(made, x)
        return
    with around():
        assert not runs_in_one_call(made, x)
    assert runs_in_one_call(made, x)


MODULES = ("q_proj", "f_proj", "f_proj.0", "f_proj.1", "g_proj.0", "qkv_conv", "core", "o_norm")


@pytest.mark.parametrize("name", [*MODULES, "o_proj"])
def test_a_hook_sees_its_module(name):
    made, seen = layer(), []
    hook = made.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    assert not runs_in_one_call(made) and seen == [name]
    hook.remove()
    assert runs_in_one_call(made) and seen == [name]


@pytest.mark.parametrize("name", ["q_proj", "b_proj", "f_proj.0", "f_proj"])
def test_products_are_not_joined_around_a_hook(name, monkeypatch):
    made, calls = layer(), []
    real = projections.joint_product
    monkeypatch.setattr(projections, "joint_product", lambda *a: calls.append(1) or real(*a))
    given = {"cu_seqlens": torch.tensor([0, 70])}
    made(draws(B=1)[0], **given)
    assert calls == [1]
    made.get_submodule(name).register_forward_pre_hook(lambda *_: None)
    made(draws(B=1)[0], **given)
    assert calls == [1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_calls_its_modules(reentrant):
    """Its recomputation has to save what the first run did."""
    made, (x, dy) = layer(), draws()
    expected = results(made, x, dy)
    x = x.requires_grad_()
    y = checkpoint(made, x, use_reentrant=reentrant)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in made.named_parameters()}
    assert_alike(found, expected)
    x.grad = None
    made.zero_grad()
    remat.selective_checkpoint(made, x).backward(dy)
    assert_alike({"dx": x.grad} | {n: p.grad for n, p in made.named_parameters()},
                 {n: t for n, t in expected.items() if n != "y"})  # fmt: skip


def test_parameters_of_functional_call():
    made, (x, _) = layer(), draws()
    other = {n: (2 * p.detach()).requires_grad_() for n, p in made.named_parameters()}
    found = torch.func.functional_call(made, other, (x,))
    with torch.no_grad():
        for p in made.parameters():
            p *= 2
    assert_exact("y", found.detach(), made(x).detach())
    found.sum().backward()
    assert all(p.grad is not None for p in other.values())


def test_autocast_joins_products_of_fp32_weights():
    made, (x, dy) = layer(dtype=torch.float32), draws(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = results(made, x, dy), results(apart(made), x, dy)
    exact = layer(dtype=torch.float32).double()
    exact = results(exact, x.double(), dy.double())
    for name, t in found.items():
        assert t.dtype == expected[name].dtype
        assert_within_budget(name, t.float(), exact[name], expected[name].float())


def test_a_wrong_input_is_refused():
    made = layer()
    with pytest.raises(ValueError, match=r"x must be \[B, T, hidden_size=40\]"):
        made(torch.randn(2, 70, 41, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one row and one token, got B=2, T=0"):
        made(torch.randn(2, 0, HIDDEN, dtype=torch.float64))
    context = build_cp_context(torch.tensor([0, 70]), None, conv1d_kernel_size=3)
    with pytest.raises(ValueError, match="conv1d_kernel_size=3, but weight has W=4"):
        made(draws(B=1)[0], cp_context=context)
    with pytest.raises(ValueError, match="local_tokens=70, got T=69"):
        made(draws(B=1, T=69)[0], cp_context=context)


def test_layers_can_be_copied_and_saved_after_calls(tmp_path):
    made, (x, _) = layer(), draws()
    made(x)
    torch.save(made, tmp_path / "layer.pt")
    for other in (copy.deepcopy(made), torch.load(tmp_path / "layer.pt", weights_only=False)):
        assert torch.equal(other(x), made(x))

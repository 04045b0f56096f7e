"""Parallelized models that are copied, compiled, sharded in mixed precision, with latents in a
ring, and with rotary positions of every type."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    _iterate_valid_model_state,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fla_cp import build_cp_context
from fla_cp.comm import keys_values
from fla_cp.comm.keys_values import latents
from tests.support.ranks import run_threads

pytest.importorskip("transformers", minversion="5.23")

from fla_cp.integrations import rates
from fla_cp.integrations.transformers import parallelize, shard_rates
from fla_cp.nn import GatedDeltaNet, KimiDeltaAttention
from tests.support.parallelized import (
    LOGITS,
    OFFSETS,
    ONE_AT_A_TIME,
    added,
    alone,
    assert_same,
    drawn,
    one_rank,
    parallelized,
    rank_share,
)
from tests.support.stock_models import gradients, stock_model


@pytest.mark.parametrize("layout, remat", [("zigzag", "checkpoints"), ("uneven", "none")])
def test_latents_in_a_ring_equal_one_rank(layout, remat, monkeypatch):
    monkeypatch.setattr(keys_values, "MAX_GATHERED", 0)
    made, original = [], latents.LatentWire
    monkeypatch.setattr(latents, "LatentWire", lambda *x: made.append(1) or original(*x))
    wanted = alone("kimi_linear")[1]
    assert_same(added(run_threads(rank_share, 4, "kimi_linear", layout, remat)), wanted)
    assert len(made) >= 8


def with_exact_rates(model, group, dtype):
    """Shards a model in `dtype`; returns what it is called with."""
    tokens, labels = drawn()
    mesh = DeviceMesh.from_group(group, "cpu")
    shard_rates(model.model, mesh)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    model.activation_checkpointing_enable({"use_reentrant": False})
    context = build_cp_context(torch.tensor(OFFSETS), group, conv1d_kernel_size=4)
    mine = {"input_ids": context.shard(tokens), "labels": context.shard(labels)}
    return {**mine, "cp_context": context}


def whole_gradients(model):
    return {name: x.grad.full_tensor() for name, x in model.named_parameters()}


def shares_with_exact_rates(group, rank, kind, dtype):
    """The same in `dtype`, the dtypes of rates in the forward, and the names of the state."""
    model, seen = parallelized(kind), set()
    names, parameters = set(model.state_dict()), {name for name, _ in model.named_parameters()}
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    given = with_exact_rates(model, group, dtype)
    mixer = next(part for part in model.modules() if hasattr(part, "exact"))

    def note(mixer, args):
        matrix = next(x for x in mixer.parameters() if x.ndim == 2)
        seen.update((mixer.A_log.dtype, mixer.dt_bias.dtype, matrix.dtype))

    mixer.register_forward_pre_hook(note)
    for _ in range(2):  # the second call finds what the first one left
        model.zero_grad()
        out = model(**given)
        (out.loss * group.size()).backward()
    with torch.no_grad():
        again = model(**given)
    assert again.loss.equal(out.loss.detach())
    state = model.state_dict()
    assert set(state) == names
    assert {name for name, _ in model.named_parameters()} == parameters
    assert {n: type(m).__name__.removeprefix("FSDP") for n, m in model.named_modules()} == modules
    model.load_state_dict(state)
    logits = given["cp_context"].unshard(out.logits.detach()).float()
    return logits, out.loss.item(), whole_gradients(model), seen


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("kimi_linear", marks=pytest.mark.wide)])
def test_fsdp_keeps_decay_rates_in_float32(gloo_pool, kind):
    """Beside float32 weights nothing changes; beside weights in bfloat16 the rates are not cast."""
    run = partial(gloo_pool.run, shares_with_exact_rates, kind, world_size=2)
    (logits, loss, grads, seen), (_, other, _, _) = run(torch.float32)
    assert seen == {torch.float32}
    assert_same((logits, loss + other, grads), alone(kind)[1])
    (logits, loss, grads, seen), (_, other, _, _) = run(torch.bfloat16)
    assert seen == {torch.float32, torch.bfloat16}
    assert loss + other == pytest.approx(alone(kind)[1][1], rel=1e-2)


def test_parameters_are_found_by_the_names_of_the_state(monkeypatch):
    """By torch.distributed.checkpoint, which distributes a whole state over ranks."""
    monkeypatch.setattr(rates, "shard_without_hooks", lambda *parts: None)
    model = parallelized("qwen3_5")
    before = {name for name, _ in _iterate_valid_model_state(model)}
    for _ in range(2):  # the second call finds nothing to do
        shard_rates(model)
        assert {name for name, _ in _iterate_valid_model_state(model)} == before
    assert any(name.endswith("linear_attn.A_log") for name in before)


def mixed():
    return torch.nn.ModuleDict({"a": KimiDeltaAttention(16, 2, 8), "b": GatedDeltaNet(16, 2, 8)})


def refusals(group, rank):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = mixed()
    fully_shard(model["b"], mesh=mesh)
    with pytest.raises(
        ValueError, match=r"got ModuleDict with b\.core\.A_log as a DTensor: call sha"
    ):
        shard_rates(model, mesh)
    assert "A_log" in model["a"].core._parameters
    model = mixed()
    shard_rates(model["a"], mesh)
    with pytest.raises(ValueError, match="got ModuleDict, in which 1 of 2 have been in a call: ca"):
        shard_rates(model, mesh)
    shard_rates(model["b"], mesh)
    before = list(model.modules())
    for part in (model, model["a"]):
        assert shard_rates(part, mesh) is part
    assert list(model.modules()) == before


def test_rates_that_cannot_be_sharded_apart_are_named(gloo_pool):
    gloo_pool.run(refusals, world_size=2)
    with pytest.raises(ValueError, match="A_log or dt_bias, got Linear without: it needs no call"):
        shard_rates(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got 'model'"):
        shard_rates("model")


def states_after_a_restart(group, rank, kind):
    """Names of the optimiser's state; weights after two steps, and after one, a restart and one."""

    def started():
        model = parallelized(kind)
        given = with_exact_rates(model, group, torch.float32)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), given

    def step(model, optimizer, given):
        (model(**given).loss * group.size()).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, given = started()
    step(model, optimizer, given)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    step(model, optimizer, given)
    again, other, given = started()
    set_state_dict(again, other, model_state_dict=saved[0], optim_state_dict=saved[1])
    step(again, other, given)
    weights = [
        {n: x.full_tensor().detach() for n, x in m.named_parameters()} for m in (model, again)
    ]
    return set(saved[1]["state"]), *weights


def test_states_of_model_and_optimizer_come_back(gloo_pool):
    """Through torch.distributed.checkpoint.state_dict, by the names of the model."""
    for names, weights, again in gloo_pool.run(states_after_a_restart, "qwen3_5", world_size=2):
        assert names == weights.keys() == {n for n, _ in parallelized("qwen3_5").named_parameters()}
        for name, x in weights.items():
            assert x.equal(again[name]), name


def gradients_of_calls_in_between(group, rank, kind):
    """Of each of two calls, before whose backwards the rates were resharded."""
    model = parallelized(kind)
    given = with_exact_rates(model, group, torch.float32)
    outs = [model(**given) for _ in range(2)]
    with torch.no_grad():
        model(**given)
    found = []
    for out in outs:
        model.zero_grad()
        (out.loss * group.size()).backward()
        found.append(whole_gradients(model))
    return found


def test_calls_before_a_backward_leave_it_the_rates(gloo_pool):
    """As those of a reference model, whose layers are recomputed later with rates of their own."""
    kind = "qwen3_5"
    logits, loss, grads = alone(kind)[1]
    for found in gloo_pool.run(gradients_of_calls_in_between, kind, world_size=2)[0]:
        assert_same((logits, loss, found), (logits, loss, grads))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_5"])
def test_copies_run_under_a_context(kind, copied):
    """Each on its own weights, and without a context as transformers does."""
    stock, tokens = alone(kind)[0], drawn()[0]
    model = parallelized(kind)
    copied_model = copied(model)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
        found = copied_model(input_ids=tokens, cp_context=one_rank()).logits
        torch.testing.assert_close(found, alone(kind)[1][0], rtol=0, atol=LOGITS)
        plain, wanted = (m(input_ids=tokens, use_cache=False) for m in (copied_model, stock))
        torch.testing.assert_close(plain.logits, wanted.logits, rtol=0, atol=0)
        assert not model(input_ids=tokens, cp_context=one_rank()).logits.any()


# Dynamo reads it of tensors that it hands over between graphs (torch 2.13)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_5"])
def test_compiled_models(kind):
    """Graphs break around the mixers; nothing else changes."""
    model, (tokens, labels) = parallelized(kind), drawn()
    compiled = torch.compile(model, backend="eager")
    out = compiled(input_ids=tokens, labels=labels, cp_context=one_rank())
    out.loss.backward()
    found = out.logits.detach(), out.loss.item(), gradients(model)
    assert_same(found, alone(kind)[1])
    torch._dynamo.reset()


def with_rope(rope_type):
    """The logits of a stock model with such positions, and the model parallelized."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    if rope_type in ("yarn", "longrope"):
        rope["original_max_position_embeddings"] = 32
    with ONE_AT_A_TIME:
        stock = stock_model("qwen3_next", rope_parameters=rope, max_position_embeddings=64)
    with torch.no_grad():
        wanted = stock(input_ids=drawn()[0], use_cache=False).logits
    return wanted, parallelize(stock)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_call(rope_type):
    message = f"rotary_emb's rope_type must be .* default, linear, yarn .* got '{rope_type}'"
    with pytest.raises(ValueError, match=message):
        with_rope(rope_type)


def scaled_logits(group, rank, rope_type):
    wanted, model = with_rope(rope_type)
    context = build_cp_context(torch.tensor([0, 150]), group, conv1d_kernel_size=4)
    with torch.no_grad():
        out = model(input_ids=context.shard(drawn()[0]), cp_context=context)
    return wanted, context.unshard(out.logits)


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_frequencies_that_do_not(rope_type):
    for wanted, found in run_threads(scaled_logits, 2, rope_type):
        torch.testing.assert_close(found, wanted, rtol=0, atol=LOGITS)

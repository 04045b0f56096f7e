"""Stock models of transformers under a context, against themselves on each document alone."""

import copy
import sys
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fla_cp import build_cp_context, zigzag_token_ranges
from tests.support.ranks import run_threads
from tests.support.sweeps import crossed

pytest.importorskip("transformers", minversion="5.23")

from transformers import AttentionInterface

from fla_cp.integrations.transformers import parallelize, under
from tests.support.parallelized import (
    LAYOUTS,
    LOGITS,
    OFFSETS,
    REMAT,
    added,
    alone,
    assert_same,
    drawn,
    one_rank,
    parallelized,
    rank_share,
)
from tests.support.stock_models import MODELS, documents_alone, gradients, stock_model


@pytest.mark.parametrize("kind", MODELS)
def test_packed_documents_are_apart(kind):
    model, context = parallelized(kind), one_rank()
    tokens, labels = drawn()
    out = model(input_ids=tokens, labels=labels, cp_context=context)
    out.loss.backward()
    found = out.logits.detach(), out.loss.item(), gradients(model)
    assert_same(found, alone(kind)[1])


@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid"])
def test_another_activation_than_silu(kind):
    """Of the convolutions, too, whose operator knows none but SiLU."""
    model, context = stock_model(kind, hidden_act="gelu"), one_rank()
    wanted = documents_alone(model, *drawn(), OFFSETS)
    model = parallelize(model)
    model.zero_grad()
    tokens, labels = drawn()
    out = model(input_ids=tokens, labels=labels, cp_context=context)
    out.loss.backward()
    assert_same((out.logits.detach(), out.loss.item(), gradients(model)), wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["kimi_linear", pytest.param("qwen3_5", marks=pytest.mark.wide)])
def test_kernels(kind, monkeypatch):
    """The Triton kernels, interpreted."""
    pytest.importorskip("triton")
    model, (tokens, labels) = parallelized(kind), drawn()
    call = partial(model, input_ids=tokens, labels=labels, cp_context=one_rank(), impl="triton")
    with pytest.raises(ValueError, match="impl='triton' runs on CUDA devices, got cpu"):
        call()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = call()
    out.loss.backward()
    found = out.logits.detach(), out.loss.item(), gradients(model)
    assert_same(found, alone(kind)[1])


@pytest.mark.parametrize("kind, layout, remat, R", crossed(MODELS, LAYOUTS, REMAT, (4, 2)))
def test_ranks_equal_one(kind, layout, remat, R):
    wanted = alone(kind)[1]
    assert_same(added(run_threads(rank_share, R, kind, layout, remat)), wanted)


def seen_by_layers(group, rank):
    """The keywords that a layer gets, [positions, mask, cache]."""
    model, found = parallelized("qwen3_next"), []
    ranges = zigzag_token_ranges(150, group.size())
    options = {"conv1d_kernel_size": 4, "token_ranges": ranges}
    context = build_cp_context(torch.tensor(OFFSETS), group, **options)

    def keep(layer, args, keywords):
        found.extend(keywords[n] for n in ("position_ids", "attention_mask"))
        # transformers 5.24 renames the cache.
        found.append(keywords["cache"] if "cache" in keywords else keywords["past_key_values"])

    model.model.layers[1].register_forward_pre_hook(keep, with_kwargs=True)
    model(context.shard(drawn()[0]), cp_context=context)
    return context.unshard(found[0]), *found[1:]


def test_documents_count_from_zero_without_masks_and_caches():
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(OFFSETS)])[None]
    for positions, mask, cache_of_keys in run_threads(seen_by_layers, 2):
        assert positions.equal(places)
        assert mask is None
        assert cache_of_keys is None


def shares_under_fsdp(group, rank, kind):
    """The mean gradient that FSDP2 forms, with the loss times the number of ranks."""
    model, (tokens, labels) = parallelized(kind), drawn()
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    context = build_cp_context(torch.tensor(OFFSETS), group, conv1d_kernel_size=4)
    mine = {"input_ids": context.shard(tokens), "labels": context.shard(labels)}
    with under(context):
        out = model(**mine)
    (out.loss * group.size()).backward()
    grads = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
    return context.unshard(out.logits.detach()), out.loss.item(), grads


@pytest.mark.wide
@pytest.mark.parametrize("kind", MODELS)
def test_fsdp(gloo_pool, kind):
    (logits, loss, grads), (_, other, _) = gloo_pool.run(shares_under_fsdp, kind, world_size=2)
    assert_same((logits, loss + other, grads), alone(kind)[1])


@pytest.mark.wide
def test_processes_equal_one(gloo_pool):
    wanted = alone("qwen3_5_moe")[1]
    shares = gloo_pool.run(rank_share, "qwen3_5_moe", "zigzag", "checkpoints", world_size=2)
    assert_same(added(shares), wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_backward_of_another_thread_recomputes_under_the_context(use_reentrant):
    """As the backward on a GPU, which runs in a thread of autograd."""
    model, (tokens, labels) = parallelized("qwen3_5"), drawn()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    with under(one_rank()):
        out = model(input_ids=tokens, labels=labels)
    with under(one_rank((0, 150))):
        thread = threading.Thread(target=out.loss.backward)
        thread.start()
        thread.join()
    found = out.logits.detach(), out.loss.item(), gradients(model)
    assert_same(found, alone("qwen3_5")[1])


@pytest.mark.parametrize("kind", MODELS)
def test_calls_without_a_context_and_other_models_keep_their_bits(kind):
    stock, tokens = alone(kind)[0], drawn()[0]
    beside = copy.deepcopy(stock)
    before = stock(input_ids=tokens, labels=tokens, use_cache=False)
    model = parallelized(kind)
    config, tables = stock.config.to_dict(), list(AttentionInterface())
    with under(one_rank()):
        other = beside(input_ids=tokens, labels=tokens, use_cache=False)
        model(input_ids=tokens)
    after = model(input_ids=tokens, labels=tokens, use_cache=False, cp_context=None)
    for out in (other, after):
        torch.testing.assert_close(out.logits, before.logits, rtol=0, atol=0)
        torch.testing.assert_close(out.loss, before.loss, rtol=0, atol=0)
    assert model.config.to_dict() == config
    assert list(AttentionInterface()) == tables
    model.eval(), stock.eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    ids = tokens[:, :9]
    assert model.generate(ids, **options).equal(stock.generate(ids, **options))
    stock.train()


def test_text_models_and_embeddings():
    stock, tokens = alone("qwen3_next")[0], drawn()[0]
    text = parallelize(copy.deepcopy(stock.model))
    with under(one_rank()) as context:
        found = text(tokens).last_hidden_state
        torch.testing.assert_close(
            text(inputs_embeds=text.embed_tokens(tokens)).last_hidden_state, found
        )
    wanted = alone("qwen3_next")[1][0]
    torch.testing.assert_close(stock.lm_head(found), wanted, rtol=0, atol=LOGITS)
    assert context.total_tokens == 150


@pytest.mark.parametrize("kind", ["qwen3_5", "olmo_hybrid"])
def test_positions_may_be_given(kind):
    """Rotary positions are relative: the same offset for all tokens of a document changes nothing,
    stretched positions do."""
    model, tokens = parallelized(kind), drawn()[0]
    call = partial(model, input_ids=tokens, cp_context=one_rank())
    places = torch.arange(150)[None]
    torch.testing.assert_close(
        call(position_ids=places).logits, call().logits, rtol=0, atol=2 * LOGITS
    )
    assert not torch.allclose(call(position_ids=3 * places).logits, call().logits, atol=1e-3)


def with_positions(group, rank, kind, places):
    """Logits of all tokens, with this rank's columns of `places` as positions."""
    options = {"conv1d_kernel_size": 4}
    if group is not None:
        options["token_ranges"] = zigzag_token_ranges(150, group.size())
    context = build_cp_context(torch.tensor(OFFSETS), group, **options)
    mine = places[..., context.shard(torch.arange(150)[None])[0]]
    call = {"input_ids": context.shard(drawn()[0]), "position_ids": mine}
    with torch.no_grad():
        return context.unshard(parallelized(kind)(**call, cp_context=context).logits)


@pytest.mark.parametrize("kind, rows", [("qwen3_5", 4), ("qwen3_5", 3), ("qwen3_next", 0)])
def test_given_positions_are_those_of_a_ranks_own_tokens(kind, rows):
    """[1, T], or as in Qwen3.5 [3, 1, T] and [4, 1, T], of which each rank has its own columns."""
    places = 3 * torch.arange(150)[None]
    if rows:
        places = places.expand(rows, 1, 150) * torch.arange(1, rows + 1)[:, None, None]
    wanted = with_positions(None, 0, kind, places)
    assert not torch.allclose(wanted, alone(kind)[1][0], atol=1e-3)
    for found in run_threads(with_positions, 2, kind, places):
        torch.testing.assert_close(found, wanted, rtol=0, atol=LOGITS)


def given_labels(group, rank, shifted):
    """The shares of the loss from labels that the caller has shifted or counted."""
    model, (tokens, labels) = parallelized("qwen3_5"), drawn()
    context = build_cp_context(torch.tensor(OFFSETS), group, conv1d_kernel_size=4)
    call = partial(model, input_ids=context.shard(tokens), cp_context=context)
    labels = context.shard(labels)
    if shifted is None:
        return call(labels=labels, num_items_in_batch=10).loss.item()
    return call(labels=labels, shift_labels=context.shard(shifted)).loss.item()


def test_labels_that_were_shifted_or_counted():
    _, labels = drawn()
    loss = alone("qwen3_5")[1][1]
    shifted = labels.roll(-1, 1)
    ends = torch.tensor(OFFSETS[1:]) - 1
    shifted[:, ends] = -100
    count = int((shifted != -100).sum())
    assert sum(run_threads(given_labels, 2, shifted)) == pytest.approx(loss, rel=1e-5)
    assert sum(run_threads(given_labels, 2, None)) == pytest.approx(loss * count / 10, rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_autocast(kind):
    """The error of bf16 is at most twice that of the stock model, which rounds as often."""
    stock, (right, _, _) = alone(kind)
    model, tokens = parallelized(kind), drawn()[0]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = model(input_ids=tokens, cp_context=one_rank()).logits
        parts = [stock(input_ids=x, use_cache=False).logits for x in documents(tokens)]
    error, budget = ((x - right).norm() for x in (found, torch.cat(parts, 1)))
    assert error <= 2 * budget


def documents(x):
    return [x[:, a:b] for a, b in pairwise(OFFSETS) if b > a]


class Strange(nn.Module):
    pass


def test_models_and_layers_that_are_not_known():
    with pytest.raises(ValueError, match=r"model must be one of KimiLinearForCausalLM.*Linear"):
        parallelize(nn.Linear(2, 2))
    name = f"{__name__}.Strange"
    model = copy.deepcopy(alone("qwen3_5")[0])
    model.model.layers[1].self_attn = Strange()
    with pytest.raises(ValueError, match=f"layer 1 must mix tokens with one of .* got {name}"):
        parallelize(model)
    model.model.layers[1] = Strange()
    with pytest.raises(ValueError, match=f"layer 1 must be one of .* got {name}"):
        parallelize(model)
    assert "forward" not in vars(model.model.layers[0].linear_attn)


def test_a_forward_that_was_replaced():
    model = parallelized("olmo_hybrid")
    message = "the forward of layer 0's OlmoHybridGatedDeltaNet must be that of its class"
    with pytest.raises(ValueError, match=message):
        parallelize(model)


def test_a_windowed_attention():
    model = copy.deepcopy(alone("qwen3_5")[0])
    model.model.layers[1].self_attn.sliding_window = 8
    with pytest.raises(ValueError, match="layer 1's Qwen3_5Attention must have no sliding_window"):
        parallelize(model)


def test_a_version_whose_code_is_another(monkeypatch):
    model = copy.deepcopy(alone("qwen3_5")[0])
    kind = type(model.model.layers[1].self_attn)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **keywords: hidden_states)
    with pytest.raises(ValueError, match="must call ALL_ATTENTION_FUNCTIONS to run under"):
        parallelize(model)


def test_versions(monkeypatch):
    model = copy.deepcopy(alone("qwen3_5")[0])
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.1")
    with pytest.raises(ImportError, match=r"transformers 5\.23 or later, got 5\.22\.1"):
        parallelize(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'fla_cp\[hf\]'"):
        parallelize(model)


TOKENS = torch.full((1, 150), 5)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"attention_mask": torch.ones(1, 150)}, "attention_mask must be left out"),
        ({"cu_seq_lens_q": torch.tensor([0, 150])}, "cu_seq_lens_q must be left out"),
        ({"use_cache": True}, "use_cache and past_key_values must be left out"),
        ({"input_ids": TOKENS[:, 1:]}, r"input_ids must have .* \[1, 150\], .* \(1, 149\)"),
        ({"labels": TOKENS[:, 1:]}, r"labels must have this rank's tokens, \[1, 150\]"),
        ({"position_ids": TOKENS[:, 1:]}, "position_ids must be those of this rank's 150"),
        ({"input_ids": None}, "one of input_ids and inputs_embeds must be given"),
        ({"softcap": 3.0}, "softcap must be left out under a context, got 3.0"),
        ({"is_causal": False}, "is_causal must not be False"),
        ({"cp_context": "group"}, "cp_context must be a FLACPContext"),
        ({"cp_context": build_cp_context(torch.tensor(OFFSETS), None)}, "conv1d_kernel_size"),
    ],
)
def test_calls_that_are_not_supported(given, message):
    model = parallelized("qwen3_5")
    call = {"input_ids": TOKENS, "cp_context": one_rank()} | given
    with pytest.raises(ValueError, match=message):
        model(**call)


def test_arguments_by_position():
    model = parallelized("qwen3_5")
    with under(one_rank()), pytest.raises(ValueError, match="only input_ids may be passed by"):
        model(TOKENS, torch.ones(1, 150))
    with pytest.raises(ValueError, match="cp_context must be a FLACPContext"), under(None):
        pass


def rank_without_tokens(group, rank):
    ranges = [[(0, 150)], []]
    options = {"conv1d_kernel_size": 4, "token_ranges": ranges}
    context = build_cp_context(torch.tensor(OFFSETS), group, **options)
    parallelized("qwen3_5")(context.shard(TOKENS), cp_context=context)


def test_a_rank_without_tokens():
    message = r"every rank must have tokens, .* got \(150, 0\) tokens"
    with pytest.raises(ValueError, match=message):
        run_threads(rank_without_tokens, 2)


def test_attention_with_dropout():
    model = parallelize(stock_model("qwen3_next", attention_dropout=0.1))
    with under(one_rank()), pytest.raises(ValueError, match="attention_dropout must be 0"):
        model(TOKENS)
    with under(one_rank()):
        model.eval()(TOKENS)


def kept_logits(group, rank, kept):
    context = build_cp_context(torch.tensor(OFFSETS), group, conv1d_kernel_size=4)
    call = partial(parallelized("qwen3_5"), context.shard(TOKENS), cp_context=context)
    assert call(logits_to_keep=0).logits.shape[1] == context.local_tokens
    return call(logits_to_keep=kept).logits.shape[1]


def test_logits_to_keep_count_the_tokens_of_one_rank():
    assert run_threads(kept_logits, 1, 7) == [7]
    for kept in (7, torch.tensor([0])):
        with pytest.raises(ValueError, match="logits_to_keep must be 0 under a context of several"):
            run_threads(kept_logits, 2, kept)


def router_loss(group, rank):
    model = parallelized("qwen3_next")
    context = build_cp_context(torch.tensor(OFFSETS), group, conv1d_kernel_size=4)
    tokens = context.shard(TOKENS)
    model(input_ids=tokens, cp_context=context, output_router_logits=False)
    model(input_ids=tokens, cp_context=context, output_router_logits=True)


def test_a_loss_over_experts_belongs_to_one_rank():
    run_threads(router_loss, 1)
    with pytest.raises(ValueError, match="output_router_logits must be False under a context"):
        run_threads(router_loss, 2)

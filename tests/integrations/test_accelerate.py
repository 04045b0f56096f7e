"""CPAccelerator against loops on one process with stock models, a document at a time."""

import copy
import functools
import warnings
from contextlib import nullcontext, suppress
from itertools import accumulate, chain, cycle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, IterableDataset

from tests.support.accelerate_state import fresh_state
from tests.support.sweeps import crossed

pytest.importorskip("transformers", minversion="5.23")

from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)

from fla_cp import contiguous_token_ranges, zigzag_token_ranges
from fla_cp.integrations.accelerate import CPAccelerator
from fla_cp.integrations.whole_batches import Place, take_whole_batches
from fla_cp.nn import Attention, GatedDeltaNet, KimiDeltaAttention, RMSNorm
from tests.support.stock_models import documents_alone, drawn_tokens, routing_margins, stock_model

pytestmark = [
    # accelerate slices a mesh by the name of joined dimensions
    pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

TOKENS, SEED = 61, 500
PACKINGS = [(13, 1, 30, 17), (61,), (2, 59), (20, 20, 21), (1, 60), (40, 21), (31, 30), (7, 54)]
RATE, MOMENTUM = 0.03, 0.5
CLIP = (1.0, 1e9)
"""Limits of the gradient norm in turn: one that every step exceeds, and one that none does. Steps
that are all clipped would hide the size of gradients."""

MARGIN = 5e-6
"""What the scores of experts must differ by: four times what rounding on ranks changes in them."""

SPLITS = {"cp 4": {"cp_size": 4}, "dp 2 x cp 2": {"dp_shard_size": 2, "cp_size": 2}}


def rows():
    """(tokens, labels, lengths of the documents) of each row of the data set."""
    found = []
    for i, lengths in enumerate(PACKINGS):
        labels = drawn_tokens(TOKENS, seed=SEED + 50 + i)
        labels[:, 5 + i : 12 + i] = -100
        found.append((drawn_tokens(TOKENS, seed=SEED + i), labels, lengths))
    return found


def told(lengths, how):
    """The documents of a row, as a data loader tells of them."""
    if how == "seq_lens":
        return {"seq_lens": torch.tensor([*lengths, *[0] * (4 - len(lengths))])}
    if how == "position_ids":
        return {"position_ids": torch.cat([torch.arange(n) for n in lengths])}
    assert how == "cu_seq_lens_q"
    offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": max(lengths)}


def data(how):
    return [
        {"input_ids": tokens[0], "labels": labels[0], **told(lengths, how)}
        for tokens, labels, lengths in rows()
    ]


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


@functools.cache
def one_process(kind, dp, steps_of_accumulation):
    """Losses of all rows and the weights at the end, of a loop with the stock model."""
    model = stock_model(kind)
    margins = routing_margins(model)
    optimizer = optimizer_of(model)
    rates, losses, found = schedule(optimizer), [], rows()
    each = dp * steps_of_accumulation
    for step in range(len(found) // each):
        sums = {name: torch.zeros_like(x) for name, x in model.named_parameters()}
        for tokens, labels, lengths in found[step * each : (step + 1) * each]:
            offsets = tuple(accumulate(lengths, initial=0))
            _, loss, grads = documents_alone(model, tokens, labels, offsets)
            losses.append(loss)
            for name, grad in grads.items():
                sums[name] += grad / each
        for name, x in model.named_parameters():
            x.grad = sums[name]
        limit = CLIP[step % 2]
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        assert (norm > 1.5 * limit) == (step % 2 == 0), norm
        optimizer.step()
        for _ in range(dp):
            rates.step()
    assert min(margins, default=1.0) > MARGIN, "rounding would choose an expert: take other tokens"
    weights = {name: x.detach() for name, x in model.named_parameters()}
    return losses, weights, rates.get_last_lr()


def accelerator_of(sizes, **options):
    shards = {"auto_wrap_policy": "transformer_based_wrap"} | options.pop("fsdp", {})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **shards)
    config = ParallelismConfig(**sizes)
    return CPAccelerator(parallelism_config=config, fsdp_plugin=plugin, **options)


def whole_weights(model):
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()
        for name, x in model.named_parameters()
    }


def epoch(accelerator, model, optimizer, rates, loader, after=None):
    """The loop of a script for accelerate; returns its losses, one for each batch of the data."""
    losses, limits = [], cycle(CLIP)
    for i, batch in enumerate(loader):
        buffers = [batch["input_ids"], batch["labels"]]
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
            ),
        ):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), next(limits))
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        losses += accelerator.gather_for_metrics(loss.detach()[None]).tolist()
        if after is not None:
            after(i)
    return losses


def trained(group, rank, kind, sizes, how, options):
    with fresh_state(rank, 4):
        accelerator = accelerator_of(sizes, **options)
        model = stock_model(kind)
        optimizer = optimizer_of(model)
        loader = DataLoader(data(how), batch_size=1)
        parts = accelerator.prepare(model, optimizer, schedule(optimizer), loader)
        model, optimizer, rates, loader = parts
        losses = epoch(accelerator, model, optimizer, rates, loader)
        return losses, whole_weights(model), rates.get_last_lr()


def assert_same(found, wanted):
    (losses, weights, rate), (right, exact, right_rate) = found, wanted
    assert losses == pytest.approx(right, rel=1e-5)
    assert rate == pytest.approx(right_rate)
    for name, x in exact.items():
        difference = (weights[name] - x).norm() / x.norm()
        assert difference < 1e-5, f"{name}: {difference:.1e}"


CASES = crossed(
    ["qwen3_5", "kimi_linear", "qwen3_next", "qwen3_5_moe", "olmo_hybrid"],
    [("cp 4", 1, "seq_lens"), ("dp 2 x cp 2", 2, "position_ids"), ("cp 4", 2, "cu_seq_lens_q")],
    ["contiguous", "zigzag"],
    fast=2,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind, run, layout", CASES)
def test_trains_as_one_process(gloo_pool, kind, run, layout):
    split, accumulation, how = run
    options = {"gradient_accumulation_steps": accumulation, "layout": layout}
    dp = SPLITS[split].get("dp_shard_size", 1)
    wanted = one_process(kind, dp, accumulation)
    for found in gloo_pool.run(trained, kind, SPLITS[split], how, options):
        assert_same(found, wanted)


DOCUMENTS = {
    "one": ((0, 64), True),
    "two": ((0, 32, 64), False),
    "one long": ((0, 56, 64), True),
    "eight": (range(0, 72, 8), False),
}
"""Offsets, and whether zig-zag ranges balance the attention of two ranks."""


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_zigzag_ranges_where_they_balance_attention(name, softmax, monkeypatch):
    offsets, mirrored = DOCUMENTS[name]
    monkeypatch.setattr(Place, "size", 2)
    place = Place(None, softmax=softmax)
    divide = zigzag_token_ranges if mirrored and softmax else contiguous_token_ranges
    assert place._ranges(offsets) == divide(64, 2)
    for layout, given in (("zigzag", zigzag_token_ranges), ("contiguous", contiguous_token_ranges)):
        place.layout = layout
        assert place._ranges(offsets) == given(64, 2)


def test_softmax_attention_is_found():
    """In models of transformers and in layers of fla_cp, but not in recurrent ones."""

    def found(model):
        place = Place(None)
        take_whole_batches(model, place)
        return place.softmax

    assert found(stock_model("qwen3_next"))
    assert found(Attention(32, 2, head_dim=16)) and not found(GatedDeltaNet(32, 2, 16))


def padded_batch():
    """Two rows of odd lengths, padded on the right; labels of padding are not counted."""
    tokens = torch.cat([drawn_tokens(23, seed=1), drawn_tokens(23, seed=2)])
    mask = torch.ones_like(tokens)
    mask[1, 14:] = 0
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def padded(group, rank, options):
    with fresh_state(rank, 4):
        accelerator = accelerator_of({"cp_size": 4}, **options)
        model = stock_model("qwen3_next")
        model, _ = accelerator.prepare(model, optimizer_of(model))
        out = model(**padded_batch())
        accelerator.backward(out.loss)
        grads = [x.grad.full_tensor().float() for x in model.parameters()]
        logits = accelerator.context.unshard(out.logits.detach())
        return out.loss.item(), logits, torch.cat([g.flatten() for g in grads])


def plain_gradients(model, batch):
    """Of one call of a stock model: the loss and all gradients."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([x.grad.flatten().float() for x in model.parameters()])


def test_padding_is_left_out(gloo_pool):
    batch, model = padded_batch(), stock_model("qwen3_next")
    out = model(**batch, use_cache=False)
    exact, right = plain_gradients(model, batch)
    kept = out.logits.detach()[batch["attention_mask"] == 1]
    for loss, logits, grads in gloo_pool.run(padded, {}):
        assert loss == pytest.approx(exact, rel=1e-5)
        torch.testing.assert_close(logits[0], kept, rtol=0, atol=1e-5)
        assert (grads - right).norm() / right.norm() < 1e-5


def test_mixed_precision_and_checkpoints(gloo_pool):
    """bfloat16 costs no more than it costs the stock model, and a checkpoint's recomputation runs
    under the context."""
    batch = padded_batch()
    (exact, right), (rounded, baseline) = (
        plain_gradients(stock_model("qwen3_next").to(dtype), batch)
        for dtype in (torch.float32, torch.bfloat16)
    )
    options = {"mixed_precision": "bf16", "fsdp": {"activation_checkpointing": True}}
    for loss, _, grads in gloo_pool.run(padded, options):
        assert abs(loss - exact) <= 2 * abs(rounded - exact) + 2**-8 * exact
        assert (grads - right).norm() <= 2 * (baseline - right).norm()


def dtypes_of_rates(group, rank, shards, autocast):
    """What a recurrence computes with in bfloat16, and the warnings of `prepare` about it."""
    with fresh_state(rank, 4), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accelerator = accelerator_of({"cp_size": 4}, mixed_precision="bf16", fsdp=shards)
        model, seen = stock_model("qwen3_5"), []
        mixer = model.model.layers[0].linear_attn
        model, _ = accelerator.prepare(model, optimizer_of(model))
        mixer.register_forward_pre_hook(
            lambda m, args: seen.extend([m.A_log.dtype, m.dt_bias.dtype])
        )
        mixer.out_proj.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
        with accelerator.autocast() if autocast else nullcontext():
            model(**padded_batch())
        return seen, [str(w.message) for w in told if "decay rates" in str(w.message)]


EXACT = [torch.float32, torch.float32, torch.bfloat16]
"""Decay rates in float32, products in bfloat16."""


@pytest.mark.parametrize("efficient", [False, True])
def test_decay_rates_stay_in_float32(gloo_pool, efficient):
    shards = {"cpu_ram_efficient_loading": efficient}
    for found in gloo_pool.run(dtypes_of_rates, shards, False):
        assert found == (EXACT, [])


def test_decay_rates_stay_in_float32_with_a_policy_that_does_not_cast(gloo_pool):
    """autocast then computes the products in bfloat16; docs/accelerate.md has the lines."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for found in gloo_pool.run(dtypes_of_rates, {"mixed_precision_policy": policy}, True):
        assert found == (EXACT, [])


def warnings_of_rates(group, rank):
    """The warnings of `prepare` about decay rates, with parameters on the host."""
    with fresh_state(rank, 4), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shards = {"cpu_offload": True}
        accelerator = accelerator_of({"cp_size": 4}, mixed_precision="bf16", fsdp=shards)
        model = stock_model("qwen3_5")
        with suppress(RuntimeError):  # of FSDP2, which cannot do that on a machine without a GPU
            accelerator.prepare(model, optimizer_of(model))
        return [str(w.message) for w in told if "decay rates" in str(w.message)]


def test_decay_rates_that_are_rounded_are_told_by_one_rank(gloo_pool):
    first, *rest = gloo_pool.run(warnings_of_rates)
    assert len(first) == 1 and not any(rest)
    assert "casts the decay rates of the model to torch.bfloat16" in first[0]
    assert "model.layers.0.linear_attn." in first[0]


def rounded_epoch(group, rank, folder, efficient):
    """An epoch in bfloat16, whose second half is run again from a checkpoint: losses and weights of
    both, and the state dict."""
    with fresh_state(rank, 4):
        shards = {"cpu_ram_efficient_loading": efficient, "activation_checkpointing": True}
        sizes, options = SPLITS["dp 2 x cp 2"], {"mixed_precision": "bf16", "fsdp": shards}
        accelerator = accelerator_of(sizes, **options)
        model = stock_model("qwen3_5").bfloat16()
        optimizer = optimizer_of(model)
        loader = DataLoader(data("seq_lens"), batch_size=1)
        parts = accelerator.prepare(model, optimizer, schedule(optimizer), loader)
        model, optimizer, rates, loader = parts
        batches = list(loader)
        save = lambda i: accelerator.save_state(folder) if i == 1 else None  # noqa: E731
        losses = epoch(accelerator, model, optimizer, rates, batches, after=save)
        weights = whole_weights(model)
        accelerator.load_state(folder)
        again = epoch(accelerator, model, optimizer, rates, batches[2:])
        saved = accelerator.get_state_dict(model)
        return losses, again, weights, whole_weights(model), saved


@pytest.mark.parametrize("efficient", [False, True])
def test_decay_rates_are_trained_in_float32(gloo_pool, tmp_path, efficient):
    """Weights in bfloat16 become float32, rates too, and the optimizer takes steps with them. A
    checkpoint has them under their own names."""
    wanted, exact, _ = one_process("qwen3_5", 2, 1)
    start = dict(stock_model("qwen3_5").named_parameters())
    name = "model.layers.0.linear_attn.A_log"
    results = gloo_pool.run(rounded_epoch, str(tmp_path), efficient)
    for losses, again, weights, reached, _ in results:
        assert losses == pytest.approx(wanted, rel=2e-2)
        assert again == pytest.approx(losses[-len(again) :], rel=1e-5)
        weights, reached = (
            {n.replace("_checkpoint_wrapped_module.", ""): x for n, x in found.items()}
            for found in (weights, reached)
        )
        assert set(weights) == set(exact)
        assert all(x.dtype == torch.float32 for x in weights.values())
        for n, x in weights.items():
            torch.testing.assert_close(reached[n], x, rtol=1e-5, atol=1e-5)
        moved, right = weights[name] - start[name].bfloat16(), exact[name] - start[name]
        assert right.norm() > 0 and (moved - right).norm() < 0.3 * right.norm()
    saved = results[0][-1]
    torch.testing.assert_close(saved[name], results[0][3][_wrapped(name)].cpu())


def _wrapped(name):
    """The name of a layer's parameter in a model with activation checkpointing."""
    return name.replace(".linear_attn", "._checkpoint_wrapped_module.linear_attn")


class Small(nn.Module):
    """A model of the package's layers: KDA, then attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 32)
        self.kda = KimiDeltaAttention(32, 2, head_dim=16, conv_size=3)
        self.attention = Attention(32, 2, head_dim=16)
        self.norm, self.head = RMSNorm(32), nn.Linear(32, 97)

    def forward(self, tokens, shift_labels, num_items_in_batch=None, cp_context=None):
        x = self.embedding(tokens)
        x = x + self.kda(x, cp_context=cp_context)
        x = x + self.attention(x, cp_context=cp_context)
        logits = self.head(self.norm(x)).flatten(0, 1)
        loss = F.cross_entropy(logits, shift_labels.flatten(), reduction="sum")
        return loss / num_items_in_batch


def small():
    torch.manual_seed(3)
    return Small()


def small_batch():
    tokens = drawn_tokens(45, seed=8)
    return {"tokens": tokens, "labels": tokens, "seq_lens": [20, 25]}


def own(group, rank):
    with fresh_state(rank, 4):
        accelerator = accelerator_of({"cp_size": 4}, fsdp={"auto_wrap_policy": "no_wrap"})
        model = small()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        loss = model(**small_batch())
        accelerator.backward(loss)
        return loss.item(), {name: x.grad.full_tensor() for name, x in model.named_parameters()}


def test_module_that_takes_a_context(gloo_pool):
    model, tokens = small(), drawn_tokens(45, seed=8)
    loss = 0
    for part in tokens.split([20, 25], 1):
        targets = F.pad(part[:, 1:], (0, 1), value=-100)
        loss = loss + model(part, targets, num_items_in_batch=43)
    loss.backward()
    for found, grads in gloo_pool.run(own):
        assert found == pytest.approx(loss.item(), rel=1e-5)
        for name, x in model.named_parameters():
            assert (grads[name] - x.grad).norm() <= 2e-5 * x.grad.norm(), name


class Tied(Small):
    """Its head is its embedding, and it has no `tie_weights`, as models of transformers have."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


def tied(group, rank, efficient):
    with fresh_state(rank, 4):
        plugin = {"auto_wrap_policy": "no_wrap", "cpu_ram_efficient_loading": efficient}
        accelerator = accelerator_of({"cp_size": 4}, fsdp=plugin)
        torch.manual_seed(3)
        model = Tied()
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        losses = []
        for _ in range(3):
            loss = model(**small_batch())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert model.head.weight is model.embedding.weight
        return losses


@pytest.mark.parametrize("efficient", [False, True])
def test_tied_weights_stay_tied(gloo_pool, efficient):
    torch.manual_seed(3)
    model, tokens = Tied(), drawn_tokens(45, seed=8)
    optimizer, wanted = optimizer_of(model), []
    for _ in range(3):
        loss = 0
        for part in tokens.split([20, 25], 1):
            targets = F.pad(part[:, 1:], (0, 1), value=-100)
            loss = loss + model(part, targets, num_items_in_batch=43)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert wanted[2] < 0.9 * wanted[0]
    for found in gloo_pool.run(tied, efficient):
        assert found == pytest.approx(wanted, rel=1e-5)


def resumed(group, rank, folder):
    with fresh_state(rank, 4):
        accelerator = accelerator_of(SPLITS["dp 2 x cp 2"])
        model = stock_model("qwen3_5")
        optimizer = optimizer_of(model)
        loader = DataLoader(data("seq_lens"), batch_size=1, shuffle=True)
        parts = accelerator.prepare(model, optimizer, schedule(optimizer), loader)
        model, optimizer, rates, loader = parts
        batches = list(loader)
        save = lambda i: accelerator.save_state(folder) if i == 1 else None  # noqa: E731
        whole = epoch(accelerator, model, optimizer, rates, batches, after=save)
        weights, last = whole_weights(model), rates.get_last_lr()
        accelerator.load_state(folder)
        again = epoch(accelerator, model, optimizer, rates, batches[2:])
        samples = [batch["seq_lens"].tolist() for batch in batches]
        assert rates.get_last_lr() == last
        return whole[-len(again) :], again, weights, whole_weights(model), samples


def test_resumes(gloo_pool, tmp_path):
    results = gloo_pool.run(resumed, str(tmp_path))
    for before, after, weights, reached, _ in results:
        assert after == pytest.approx(before, rel=1e-6)
        for name, x in weights.items():
            torch.testing.assert_close(reached[name], x, rtol=1e-6, atol=1e-6)
    samples = [result[-1] for result in results]
    assert samples[0] == samples[1]
    assert samples[2] == samples[3]
    assert samples[0] != samples[2]


class Stream(IterableDataset):
    def __iter__(self):
        yield from ({"input_ids": torch.full((9,), i)} for i in range(6))


def gathered(group, rank):
    with fresh_state(rank, 4):
        accelerator = accelerator_of(SPLITS["dp 2 x cp 2"])
        numbers = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2))
        found = [accelerator.gather_for_metrics(x).tolist() for x in numbers]
        names = [accelerator.gather_for_metrics([f"s{n}" for n in x.tolist()]) for x in numbers]
        stream = accelerator.prepare(DataLoader(Stream(), batch_size=1))
        firsts = [batch["input_ids"][0, 0].item() for batch in stream]
        nested = accelerator.gather_for_metrics({"x": torch.full((1, 3), rank)})["x"].tolist()
        return found, names, firsts, nested, accelerator.context_parallel_rank


def test_metrics_have_each_sample_once(gloo_pool):
    for rank, result in enumerate(gloo_pool.run(gathered)):
        found, names, firsts, nested, cp_rank = result
        assert list(chain(*found)) == list(range(10))
        assert list(chain(*names)) == [f"s{n}" for n in range(10)]
        assert firsts == [[0, 2, 4], [1, 3, 5]][rank // 2]
        assert nested == [[0] * 3, [2] * 3]
        assert cp_rank == rank % 2


def differing(group, rank):
    with fresh_state(rank, 4):
        accelerator = accelerator_of({"cp_size": 4})
        model = stock_model("qwen3_5")
        model, _ = accelerator.prepare(model, optimizer_of(model))
        tokens = drawn_tokens(30)
        said = []
        for x in (
            {"input_ids": tokens.clone().index_fill_(1, torch.tensor([7]), 3 + int(rank == 2))},
            {"input_ids": tokens, "seq_lens": [10 + rank, 20 - rank]},
            {"input_ids": tokens[:, : 28 + int(rank < 2)]},
            {"input_ids": tokens, "seq_lens": [31] if rank == 3 else [30]},
        ):
            with pytest.raises(ValueError, match="must") as caught:
                model(**x)
            said.append(str(caught.value))
        return said


def test_ranks_with_different_batches(gloo_pool):
    results = gloo_pool.run(differing)
    same = "every rank of a cp group must call the model with the same whole batch, but ranks "
    odd = ["[2]", "[1, 2, 3]", "[2, 3]", "[3]"]
    for said in results[:3]:
        for text, ranks in zip(said, odd, strict=True):
            assert text.startswith(same + ranks), text
    assert results[3][3].startswith("seq_lens must cover the 30 tokens")


@pytest.fixture
def alone():
    """A CPAccelerator in this process, and a model that it has prepared."""
    with fresh_state():
        accelerator = CPAccelerator()
        yield accelerator, accelerator.prepare(stock_model("qwen3_5"))


MASK = torch.ones(2, 9, dtype=torch.int64)
HOLE = MASK.clone().index_fill_(1, torch.tensor([4]), 0)
LEFT = MASK.clone().index_fill_(1, torch.tensor([0]), 0)
RIGHT = MASK.clone().index_fill_(1, torch.tensor([8]), 0)
POSITIONS = torch.arange(9).expand(2, 9)
BAD_CALLS = {
    "hole": ({"attention_mask": HOLE}, "in row 0 tokens follow padding.*padding_side='right'"),
    "left": ({"attention_mask": LEFT}, "padding only at the ends of rows"),
    "4d": ({"attention_mask": MASK[:, None, None]}, r"shape of the tokens, \(2, 9\), got"),
    "numbers": ({"attention_mask": MASK * 2}, "values up to 2; numbers of documents go into seq"),
    "counted padding": ({"attention_mask": RIGHT, "labels": MASK}, "labels must be -100 where"),
    "global positions": ({"position_ids": POSITIONS + 4}, "got 4 for token 0"),
    "gap": ({"position_ids": POSITIONS * 2}, "count from 0 in each document, got 2 for token 1 af"),
    "rows": ({"seq_lens": [12, 6]}, r"begin a document with each row, at \(0, 9, 18\)"),
    "short": ({"seq_lens": [9, 8]}, "must cover the 18 tokens that are not padding, got 17"),
    "negative": ({"seq_lens": [9, 10, -1]}, "seq_lens must be integers from 0"),
    "float offsets": ({"cu_seqlens": torch.tensor([0.0, 18.0])}, "must be integers"),
    "offsets": ({"cu_seqlens": torch.tensor([0, 9, 5, 18])}, "not decrease"),
    "disagree": (
        {"position_ids": POSITIONS, "cu_seqlens": torch.tensor([0, 4, 9, 18])},
        r"cu_seqlens must begin documents where position_ids does, \(0, 9, 18\), got",
    ),
    "odd tensor": ({"weights": torch.ones(2)}, r"weights must have a value for each token"),
    "own context": ({"cp_context": object()}, "cp_context must be left out"),
    "caches": ({"use_cache": True}, "use_cache and past_key_values must be left out"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_are_refused(alone, name):
    arguments, error = BAD_CALLS[name]
    with pytest.raises(ValueError, match=error):
        alone[1](**{"input_ids": MASK, **arguments})


def test_documents_told_twice(alone):
    numbers = torch.tensor([[4] * 3 + [1] * 6])
    places = torch.cat([torch.arange(3), torch.arange(6)])[None]
    tokens = drawn_tokens(9)
    losses = [
        alone[1](tokens, labels=tokens, **told).loss.item()
        for told in ({"seq_idx": numbers, "position_ids": places}, {"seq_lens": [3, 6]})
    ]
    assert losses[0] == losses[1] != alone[1](tokens, labels=tokens).loss.item()


def test_torch_context_parallel_is_refused(alone, monkeypatch):
    from torch.distributed.tensor.experimental import _attention

    def ring(*args):
        raise AssertionError

    ring.__module__ = _attention.__name__  # as context_parallel replaces it
    monkeypatch.setattr(F, "scaled_dot_product_attention", ring)
    with pytest.raises(ValueError, match="torch's context_parallel must not be active"):
        alone[1](MASK)


BAD_ACCELERATORS = {
    "no sizes": ({"fsdp_plugin": None}, "parallelism_config must be given for 2 ranks"),
    "ranks": (
        {"parallelism_config": {"cp_size": 4}},
        "= 1 x 1 x 4 must be .* but 2 were started: accelerate launch --num_processes 4",
    ),
    "tp": ({"parallelism_config": {"tp_size": 2}}, "tp_size must be 1, got 2"),
    "sp": ({"parallelism_config": {"sp_size": 2}}, "sp_size must be 1, got 2"),
    "no fsdp": ({"fsdp_plugin": None, "parallelism_config": {"cp_size": 2}}, "got none"),
    "fsdp 1": ({"fsdp_version": 1, "parallelism_config": {"cp_size": 2}}, "got fsdp_version=1"),
    "dispatch": (
        {"dispatch_batches": True, "parallelism_config": {"cp_size": 2}},
        "dispatch_batches must be False or None, got True.*with dispatch_batches=False all ranks",
    ),
    "dynamo": (
        {"dynamo_backend": "inductor", "parallelism_config": {"cp_size": 2}},
        "dynamo_backend must be no, got inductor",
    ),
    "fp8": ({"mixed_precision": "fp8", "parallelism_config": {"cp_size": 2}}, "got fp8"),
    "deepspeed": ({"deepspeed_plugin": 1, "parallelism_config": {"cp_size": 2}}, "deepspeed_plug"),
    "layout": ({"layout": "head-tail"}, "layout must be one of auto, contiguous, zigzag"),
    "exchange": ({"exchange": "gather"}, "exchange must be one of .*'all_gather'.*, got 'gather'"),
    "convolution": ({"conv1d_kernel_size": 0}, "conv1d_kernel_size must be at least 1, .* got 0"),
}


@pytest.mark.filterwarnings("ignore:FSDP1:FutureWarning")
@pytest.mark.parametrize("name", BAD_ACCELERATORS)
def test_accelerators_that_are_refused(name, monkeypatch):
    arguments, error = copy.copy(BAD_ACCELERATORS[name][0]), BAD_ACCELERATORS[name][1]
    with fresh_state():
        monkeypatch.setenv("WORLD_SIZE", "2")
        if "parallelism_config" in arguments:
            arguments["parallelism_config"] = ParallelismConfig(**arguments["parallelism_config"])
        version = arguments.pop("fsdp_version", 2)
        arguments.setdefault("fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=version))
        dispatch = arguments.pop("dispatch_batches", None)
        loaders = DataLoaderConfiguration(dispatch_batches=dispatch)
        with pytest.raises(ValueError, match=error):
            CPAccelerator(dataloader_config=loaders, **arguments)


def test_backward_runs_on_the_calling_thread(alone):
    accelerator, _ = alone
    seen, x = [], torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))
    accelerator.backward(x.sum())
    assert seen == [False] and torch._C._is_multithreading_enabled()
    assert torch.equal(x.grad, torch.ones(2))


def test_models_and_schedulers_that_are_refused(alone):
    accelerator, _ = alone
    with pytest.raises(ValueError, match=r"nn.*Linear; or its forward must take cp_context"):
        accelerator.prepare(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    prepared = Accelerator().prepare_scheduler(schedule(optimizer))
    with pytest.raises(ValueError, match="pass the scheduler itself"):
        accelerator.prepare(prepared)
    accelerator.dataloader_config.dispatch_batches = True
    with pytest.raises(ValueError, match="dispatch_batches must be False"):
        accelerator.prepare(DataLoader([1]))


@pytest.mark.parametrize("length", [0, 3])
def test_model_of_several_convolutions(alone, length):
    model = stock_model("qwen3_5")
    model.model.layers[0].linear_attn.conv1d = nn.Conv1d(8, 8, 2 + length)
    alone[0]._place.width = None
    with pytest.raises(ValueError, match="give CPAccelerator the conv1d_kernel_size"):
        alone[0].prepare(model)

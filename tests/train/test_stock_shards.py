"""A rank of --model hf:DIR reads, draws and holds its own share, and never the logits."""

import json
import math
import shutil

import pytest

pytest.importorskip("transformers")

import torch

import fla_cp.integrations.stock_layout
from fla_cp import build_cp_context
from fla_cp.integrations.safetensors_folder import TensorFolder
from fla_cp.train import loss
from fla_cp.train.build import build_sharded
from fla_cp.train.config import ModelConfig
from fla_cp.train.stock_weights import published_name
from fla_cp.train.weights import local_tensor, owned_rows
from tests.support.held import Held
from tests.support.meshes import shard_ranks
from tests.support.ranks import run_threads
from tests.support.stock_folders import save_stock
from tests.support.stock_models import stock_model


def shares_of(folder, ranks, init="weights", seed=0):
    """{name: (rows, values)} of a rank's share, and its persistent buffers."""
    config = ModelConfig(size=f"hf:{folder}", init=init)
    model = build_sharded(config, 256, seed, ranks, torch.float32)
    shares = {
        published_name(name): (owned_rows(p), local_tensor(p.detach()).clone())
        for name, p in model.named_parameters()
    }
    kept = model.state_dict()
    assert not any(b.is_meta for b in model.buffers())
    return shares, {published_name(n): b for n, b in model.named_buffers() if n in kept}


def built(folder, world, **options):
    """`shares_of` each rank."""

    def on_rank(group, rank):
        return shares_of(folder, shard_ranks(world, rank), **options)

    return run_threads(on_rank, world)


@pytest.mark.parametrize(
    "kind, tied", [("kimi_linear", False), ("kimi_linear", True), ("qwen3_5_moe", True)]
)
@pytest.mark.parametrize("world", [1, 3])
def test_shares_are_the_rows_of_the_files(tmp_path, kind, tied, world):
    folder = save_stock(tmp_path, kind, tie_word_embeddings=tied)
    whole = stock_model(kind, vocab_size=256, tie_word_embeddings=tied)
    wanted = dict(whole.named_parameters())
    seen = dict.fromkeys(wanted, 0)
    for shares, buffers in built(folder, world):
        assert set(shares) == set(wanted)
        for name, (rows, values) in shares.items():
            seen[name] += len(rows)
            assert torch.equal(values, wanted[name].detach()[rows.start : rows.stop]), name
        for name, buffer in buffers.items():
            assert torch.equal(buffer, whole.get_buffer(name)), name
    assert seen == {name: len(x) for name, x in wanted.items()}


def drawn_on(group, rank, folder):
    return shares_of(folder, shard_ranks(4, rank), init="random")[0]


@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid"])
def test_random_weights_are_those_of_the_seed_on_every_split(gloo_pool, tmp_path, kind):
    folder = save_stock(tmp_path, kind)
    ((whole, _),) = built(folder, 1, init="random")
    for shares in gloo_pool.run(drawn_on, folder):  # threads would share a generator
        for name, (rows, values) in shares.items():
            assert torch.equal(values, whole[name][1][rows.start : rows.stop]), name
    ((other, _),) = built(folder, 1, init="random", seed=1)
    std = json.loads((tmp_path / "config.json").read_text())["initializer_range"]
    for name, (_, values) in whole.items():
        assert values.isfinite().all()
        drawn = not name.endswith(("norm.weight", "norm2.weight")) and values.std() > 0
        assert torch.equal(values, other[name][1]) != drawn, name
        if name.endswith("proj.weight") and values.numel() > 500:
            assert 0.8 * std < values.std() < 1.2 * std, name


@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_next"])
def test_a_rank_holds_its_share_and_a_piece_of_a_file(tmp_path, monkeypatch, kind):
    """Of a model with large experts, the last of 4 ranks reads a quarter, piece by piece."""
    sizes = {"num_local_experts" if kind == "kimi_linear" else "num_experts": 16}
    folder = save_stock(tmp_path, kind, moe_intermediate_size=64, **sizes)
    piece = 2**14
    monkeypatch.setattr(fla_cp.integrations.stock_layout, "READ_BYTES", piece)
    stored = TensorFolder(folder)
    whole = sum(x.nbytes for x in stored.tensors.values())
    read, held = [], Held()
    original = TensorFolder.read

    def counted(self, *args):
        found = original(self, *args)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(TensorFolder, "read", counted)

    # FSDP needs ranks; of these only one loads, since torch counts the tensors of a thread.
    def on_rank(group, rank):
        config = ModelConfig(size=f"hf:{folder}")
        ranks = shard_ranks(4, rank)
        if rank != 3:
            return build_sharded(config, 256, None, ranks, torch.float32) and None
        with held:
            model = build_sharded(config, 256, 0, ranks, torch.float32)
        return sum(local_tensor(p).nbytes for p in model.parameters())

    share = run_threads(on_rank, 4)[3]
    assert max(read) <= piece and whole > 20 * piece
    assert sum(read) < 0.3 * whole and share > 0.2 * whole
    tables = 8 * 16 * 128 * 3  # row numbers of the largest tensor, and what makes them
    assert held.peak < share + 2 * piece + tables + 2**15, (held.peak, share)


def test_logits_are_never_held(tmp_path, monkeypatch):
    """The peak of a forward and backward grows by far less than tokens x vocabulary x 4 bytes."""
    vocabulary, tokens = 20_000, 512
    folder = save_stock(tmp_path, "qwen3_5", vocab_size=vocabulary)
    monkeypatch.setattr(loss, "CHUNK_BYTES", 2**22)

    def on_rank(group, rank):
        config = ModelConfig(size=f"hf:{folder}", remat="full")
        model = build_sharded(config, 256, 0, shard_ranks(1, rank), torch.float32)
        offsets = torch.tensor([0, 200, tokens])
        context = build_cp_context(offsets, None, conv1d_kernel_size=4)
        ids = torch.arange(tokens)[None] % 90
        with Held() as held:
            model(ids, context, ids).backward()
        weights = sum(p.numel() * 4 for p in model.parameters())
        return held.peak, weights

    ((peak, weights),) = run_threads(on_rank, 1)
    logits = tokens * vocabulary * 4
    assert logits > 3 * weights
    assert peak < 3 * weights + logits / 4, (peak / logits, weights / logits)


def test_decay_rates_stay_float32(tmp_path):
    folder = save_stock(tmp_path, "kimi_linear")
    seen = {}

    def on_rank(group, rank):
        config = ModelConfig(size=f"hf:{folder}")
        model = build_sharded(config, 256, 0, shard_ranks(2, rank), torch.bfloat16)
        gate = model.stock.model.layers[0].self_attn.forget_gate
        gate.register_forward_pre_hook(
            lambda m, _: seen.update(A=m.A_log.dtype, b=m.dt_bias.dtype, w=m.f_a_proj.weight.dtype)
        )
        context = build_cp_context(torch.tensor([0, 30, 70]), None, conv1d_kernel_size=4)
        ids = torch.arange(70)[None] % 90
        value = model(ids, context, ids)
        value.backward()
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None and g.to_local().isfinite().all() for g in grads)
        return float(value.detach())

    first, second = run_threads(on_rank, 2)
    assert first == second and abs(first / 70 - math.log(256)) < 1
    assert seen == {"A": torch.float32, "b": torch.float32, "w": torch.bfloat16}


def test_an_auxiliary_loss_counts_where_transformers_adds_it(tmp_path):
    """Its gradient is our `load_balancing_loss`'s, and the loss that is shown is without it."""
    found = {}
    for asked in (False, True):
        folder = tmp_path / str(asked)
        save_stock(folder, "qwen3_next", output_router_logits=asked, router_aux_loss_coef=0.5)

        def on_rank(group, rank, folder=folder):
            results = []
            for remat in ("none", "full", "selective"):
                config = ModelConfig(size=f"hf:{folder}", remat=remat)
                ranks = shard_ranks(1, rank)
                model = build_sharded(config, 256, 0, ranks, torch.float64)
                context = build_cp_context(torch.tensor([0, 30, 70]), None, conv1d_kernel_size=4)
                ids = torch.arange(70)[None] % 90
                value = model(ids, context, ids)
                value.backward()
                grads = {n: local_tensor(p.grad) for n, p in model.named_parameters()}
                results.append((float(value.detach()), grads, model.balance.counts.clone()))
            return results

        (found[asked],) = run_threads(on_rank, 1)
    for results in found.values():
        for value, grads, counts in results[1:]:
            assert abs(value - results[0][0]) < 1e-9 and torch.equal(counts, results[0][2])
            for name, grad in grads.items():
                assert torch.allclose(grad, results[0][1][name], atol=1e-6), name
    plain, balanced = found[False][0], found[True][0]
    assert abs(plain[0] - balanced[0]) < 1e-9 and int(plain[2].sum()) == 3 * 70 * 2
    gate = "stock.model.layers.2.mlp.gate.weight"
    assert (plain[1][gate] - balanced[1][gate]).abs().max() > 1e-3
    assert torch.allclose(plain[1]["stock.lm_head.weight"], balanced[1]["stock.lm_head.weight"])


def test_a_checkpoint_needs_no_weights(tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    save_stock(tmp_path / "whole", "qwen3_5")
    shutil.copy(tmp_path / "whole/config.json", folder)
    ((shares, _),) = built(folder, 1, seed=None)
    assert all(not values.any() for _, values in shares.values())

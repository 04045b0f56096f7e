"""--model hf:DIR: models of transformers train like plain transformers, and like one rank."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

import fla_cp.train.parity
from fla_cp.train.build import build_sharded
from fla_cp.train.config import UserError
from fla_cp.train.device_rules import check_folder
from fla_cp.train.optim import build_optimizer, learning_rate, update
from fla_cp.train.parse import parse
from fla_cp.train.sources import build_dataset
from fla_cp.train.step import Feed, agree, forward_backward, reduce_metrics
from tests.support.meshes import ranks_of
from tests.support.stock_folders import FLAGS, save_stock, stock_losses
from tests.support.stock_models import MODELS, stock_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind of model -> its folder; "balanced" has an auxiliary loss."""
    root = tmp_path_factory.mktemp("models")
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    found = {kind: save_stock(root / kind, kind) for kind in MODELS}
    return found | {"balanced": save_stock(root / "balanced", "qwen3_next", **balanced)}


@pytest.fixture(scope="module")
def one_document(tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "one.txt"
    path.write_text("".join(random.Random(1).choices("abcdefgh ", k=4000)))
    return f"text:{path}"


def data_of(config):
    return build_dataset(config.data.source, config.data.seq_len, "train", config.run.seed)


def losses(model, config, ranks, steps):
    """Losses of a model's steps in the trainer, and the peaks of expert load."""
    optimizer = build_optimizer(model, config.optim)
    found = []
    with Feed(config, data_of(config), ranks, 0, workers=0) as feed:
        for step in range(1, steps + 1):
            batch = feed.take()
            targets = agree(batch, ranks).targets
            share = forward_backward(model, batch, targets, config, ranks)
            loss, norm = reduce_metrics(share, model, ranks)
            rate = learning_rate(config.optim, step, config.run.steps)
            update(model, optimizer, rate, norm, config.optim.clip_norm)
            optimizer.zero_grad()
            found.append(loss)
    return found


def on_rank(group, rank, flags, steps, dtype=torch.float32, ranks=None):
    config = parse(flags)
    ranks = ranks_of(" ".join(flags[: flags.index("--device")]), rank) if ranks is None else ranks
    model = build_sharded(config.model, 256, config.run.seed, ranks, dtype)
    return losses(model, config, ranks, steps)


def flags_of(split, folder, data, *more):
    return [*split.split(), *FLAGS, "--model", f"hf:{folder}", "--data", data, *more]


@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_those_of_plain_transformers(gloo_pool, ranks, folders, one_document, kind):
    """One document a step: cp 1, and cp 4 with remat, against the stock model and torch's AdamW."""
    flags = flags_of("--cp 1", folders[kind], one_document, "--global-batch-size", "1")
    config = parse(flags)
    with Feed(config, data_of(config), ranks, 0, workers=0) as feed:
        shares = [feed.take()[0].share for _ in range(3)]
    packs = [{"input_ids": share.tokens[0], "labels": share.labels[0]} for share in shares]
    model = stock_model(kind, vocab_size=256)
    wanted = torch.tensor(stock_losses(model, packs, 3, config))
    found = {"cp 1": on_rank(None, 0, flags, 3, ranks=ranks)}
    flags = ["--cp", "4", *flags[2:], "--remat", "full"]
    found["cp 4"] = gloo_pool.run(on_rank, flags, 3)[0]
    for name, values in found.items():
        assert (torch.tensor(values) - wanted).abs().max() < 1e-5, (name, values, wanted)
    assert abs(wanted[0] - wanted[2]) > 1e-3  # the steps did something


def report(group, rank, split, flags):
    config = parse(flags)
    return fla_cp.train.parity.compare(config, data_of(config), ranks_of(split, rank))


SPLITS = {
    "kimi_linear": ("--cp 4", "--parallel.layout", "zigzag"),
    "qwen3_next": ("--cp 2 --dp-shard 2", "--remat", "selective"),
    "qwen3_5": ("--cp 4", "--remat", "selective", "--optimizer", "muon"),
    "qwen3_5_moe": ("--cp 4", "--remat", "full", "--micro-batch-size", "1"),
    "olmo_hybrid": ("--cp 2 --dp-replicate 2",),
    "balanced": ("--cp 2 --dp-shard 2", "--remat", "full"),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_every_model_trains_like_one_rank(gloo_pool, folders, short_texts, kind):
    split, *more = SPLITS[kind]
    flags = flags_of(split, folders[kind], short_texts, "--check-parity", *more)
    found = gloo_pool.run(report, split, flags)[0]
    assert found.passed, found.table()
    for row in found.rows:
        limit = 1e-3 if row.parameter.endswith(("A_log", "dt_bias")) else 1e-4
        assert row.budget < limit, f"{row.parameter}\n{found.table()}"


def test_parity_needs_the_same_micro_batches_for_a_balancing_loss(folders, short_texts):
    def check(kind, split, *more):
        config = parse(flags_of(split, folders[kind], short_texts, *more))
        check_folder(config, 256, CPU, weights=True)

    given = "--check-parity", "--micro-batch-size", "1"
    message = (
        "^--micro-batch-size must be left out with --check-parity, data parallelism and the "
        "router_aux_loss_coef of --model hf:.*balanced, .* got 1"
    )
    with pytest.raises(UserError, match=message):
        check("balanced", "--dp-shard 2", *given)
    check("qwen3_next", "--dp-shard 2", *given)
    check("balanced", "--cp 2", *given)
    check("balanced", "--dp-shard 2", *given[1:])
    check("balanced", "--dp-shard 2", given[0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(
    "kind, name, value, part",
    [
        ("kimi_linear", "num_shared_experts", 0, "mlp.shared_experts.gate_proj.weight"),
        ("qwen3_5_moe", "shared_expert_intermediate_size", 0, "mlp.shared_expert.gate_proj.weight"),
    ],
)
def test_shared_experts_without_channels_are_refused(kind, name, value, part, folders, tmp_path):
    """FSDP2 cannot shard a weight without elements."""
    config = json.loads((Path(folders[kind]) / "config.json").read_text())
    assert name in config
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    flags = flags_of("--cp 1", tmp_path, "synthetic", "--model.init", "random")
    message = rf"^--model hf:{tmp_path}: model.layers.\d.{part} must have elements, .* \(0, 32\)"
    with pytest.raises(UserError, match=message):
        check_folder(parse(flags), 64, CPU, weights=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind, name, width",
    [
        ("kimi_linear", "moe_intermediate_size", 10),
        ("qwen3_next", "moe_intermediate_size", 12),
        ("qwen3_5_moe", "moe_intermediate_size", 24),
        ("qwen3_5_moe", "hidden_size", 36),
        ("qwen3_next", "hidden_size", 34),
        ("olmo_hybrid", "hidden_size", 36),
    ],
)
def test_widths_are_refused_where_the_grouped_product_fails(kind, name, width, dtype, tmp_path):
    model = stock_model(kind, **{name: width}).to(getattr(torch, dtype))
    model.config.save_pretrained(str(tmp_path))
    flags = flags_of("--cp 1", tmp_path, "synthetic", "--model.init", "random", "--dtype", dtype)
    config = parse(flags)
    failure = ""
    try:
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    except RuntimeError as error:
        failure = str(error)
    if not failure:
        check_folder(config, 64, CPU, weights=True)
        return
    assert "multiple of 16 bytes" in failure
    rule = f"{name} must be a multiple of {4 if dtype == 'float32' else 8}, 16 bytes in {dtype}"
    with pytest.raises(UserError, match=f"^--model hf:{tmp_path}: {rule}, .* got {width}$"):
        check_folder(config, 64, CPU, weights=True)

"""What runs on four ranks export: named sizes with their experts, and models of transformers."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from transformers import AutoModelForCausalLM

import fla_cp.train.main
from fla_cp.train.checkpoint import checkpoints
from fla_cp.train.export import export
from fla_cp.train.lock import RunLock
from fla_cp.train.parse import parse
from tests.support.exported import files, logits_of
from tests.support.meshes import ranks_of
from tests.support.stock_folders import save_stock

TINY = (
    "--model.layers 4 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 "
    "--model.experts 4 --model.experts-per-token 2 --model.expert-size 16"
)
RUN = (
    "--device cpu --impl torch --seq-len 75 --global-batch-size 2 --optim.weight-decay 0.1 "
    "--lr 0.05 --warmup-steps 0 --eval-every 0"
)
STILL = "--lr 1e-45"
"""A step at this rate changes no weight; the biases of routers have a rate of their own."""

MODELS = {
    "kimi-linear": f"--model kimi-linear {TINY}",
    "qwen3-next": f"--model qwen3-next {TINY}",
    "hf kimi_linear": "--model hf:FOLDER/kimi_linear",
    "hf qwen3_next": "--model hf:FOLDER/qwen3_next",
    "hf qwen3_5_moe": "--model hf:FOLDER/qwen3_5_moe",
    "hf qwen3_5": "--model hf:FOLDER/qwen3_5",
    "hf olmo_hybrid": "--model hf:FOLDER/olmo_hybrid",
}
FAST = ("kimi-linear", "qwen3-next", "hf qwen3_5_moe")
BIASES = ("kimi-linear",)
"""Models whose biases move in a step."""

OPTIONS = {
    "kimi-linear": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "num_local_experts": 4,
    },
    "qwen3-next": {"shared_expert_intermediate_size": 16, "num_experts": 4, "mlp_only_layers": []},
}
"""What config.json must say of the experts of a named size."""


def four_ranks(group, rank, flags):
    config = parse(flags)
    with RunLock() as lock:
        return fla_cp.train.main.train(config, ranks_of("--device cpu --cp 4", rank), lock)


@pytest.mark.bits
@pytest.mark.parametrize(
    "kind",
    [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.wide) for kind in MODELS],
)
def test_four_ranks_export_what_one_rank_does(gloo_pool, tmp_path, monkeypatch, short_texts, kind):
    """Two steps on four ranks; one rank goes on from their checkpoint without changing a weight."""
    flags = [*MODELS[kind].replace("FOLDER", str(tmp_path)).split(), *RUN.split()]
    flags += ["--data", short_texts]
    if kind.startswith("hf "):
        save_stock(tmp_path / kind[3:], kind[3:])
    split = [*flags, "--cp", "4", "--parallel.layout", "zigzag"]
    split += ["--max-steps", "2", "--out", str(tmp_path / "four")]
    assert gloo_pool.run(four_ranks, split) == [0] * 4

    tokens = torch.randint(256, (1, 150), generator=torch.Generator().manual_seed(1))
    original, found = fla_cp.train.main.Loop.run_all, []

    def noted(loop, *rest):
        stopped = original(loop, *rest)
        found.append(logits_of(loop.model, tokens))
        return stopped

    monkeypatch.setattr(fla_cp.train.main.Loop, "run_all", noted)
    (last,) = checkpoints(tmp_path / "four")
    more = [*STILL.split(), "--resume", str(last), "--max-steps", "3"]
    more += ["--model.bias-rate", "0"] if kind in BIASES else []
    assert fla_cp.train.main.main([*flags, *more, "--out", str(tmp_path / "one")]) == 0

    for name in ("four", "one"):
        export(tmp_path / name, tmp_path / f"{name}-hf")
    assert files(tmp_path / "four-hf") == files(tmp_path / "one-hf")
    model, missed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "four-hf",
        local_files_only=True,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert not any(missed.values()), missed
    for name, value in OPTIONS.get(kind, {}).items():
        assert getattr(model.config, name) == value, name
    if kind in BIASES:
        assert model.model.layers[1].mlp.gate.e_score_correction_bias.any()
    with torch.no_grad():
        theirs = model.eval()(input_ids=tokens, use_cache=False).logits
    assert found[0].abs().max() > 0.5
    assert (found[0] - theirs).abs().max() < 1e-5

"""fla-cp-export and --init-from: the same model in transformers, and the same bytes back."""

import json
import re
import shutil

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fla_cp.train.main
from fla_cp.integrations.safetensors_folder import TensorFolder, write_tensors
from fla_cp.train.build import build_sharded
from fla_cp.train.checkpoint import checkpoints, load
from fla_cp.train.config import UserError
from fla_cp.train.distributed import joined
from fla_cp.train.export import export
from fla_cp.train.export import main as export_main
from fla_cp.train.init_from import InitialFolder
from fla_cp.train.metrics import read_metrics
from fla_cp.train.model import build_model
from fla_cp.train.optim import build_optimizer
from fla_cp.train.weights import local_tensor
from tests.support.checkpoints import as_format_1
from tests.support.exported import (
    KIMI,
    KIMI_EXPERTS,
    MODELS,
    QWEN,
    QWEN_EXPERTS,
    TINY,
    VOCAB,
    files,
    logits_of,
    model_config,
    random_model,
    random_run,
    save,
)
from tests.support.meshes import ranks_of
from tests.support.tokenizers import save_tokenizer

LOGITS = 1e-5
"""Largest difference of logits that are of the order of one, in fp32."""


def loaded(folder, **options):
    """The stock model of a folder, which must need every tensor and miss none."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        output_loading_info=True,
        attn_implementation="eager",
        **options,
    )
    assert not any(info.values()), info
    return model.eval()


def tokens():
    return torch.randint(0, VOCAB, (1, 150), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Kind -> (run folder, our model, exported folder), made once."""
    found = {}

    def make(kind):
        if kind not in found:
            root = tmp_path_factory.mktemp(kind)
            model = random_run(root / "run", MODELS[kind])
            export(root / "run", root / "hf")
            found[kind] = root / "run", model, root / "hf"
        return found[kind]

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_has_the_same_logits(kind, made):
    _, model, folder = made(kind)
    ours = logits_of(model, tokens())
    with torch.no_grad():
        theirs = loaded(folder, dtype="float32")(input_ids=tokens(), use_cache=False).logits
    assert ours.abs().max() > 0.5
    assert (ours - theirs).abs().max() < LOGITS


def imported_and_saved(group, rank, flags, folder, run, split):
    """Fills the ranks of a split from a folder and saves a checkpoint; returns (bytes that this
    rank read, of the largest read, and of its shard)."""
    config = model_config(f"{flags} {split} --optim.weight-decay 0")
    ranks = ranks_of(f"--device cpu {split}", rank)
    model = build_sharded(config.model, VOCAB, None, ranks, torch.float32)
    sizes, read = [], TensorFolder.read

    def counted(self, *args):
        sizes.append((found := read(self, *args)).nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFolder, "read", counted)
        InitialFolder(folder, config.model, VOCAB, ranks).fill(model)
    save(run, model, config, ranks)
    return sum(sizes), max(sizes), sum(local_tensor(x).nbytes for x in model.parameters())


@pytest.mark.parametrize("kind", ["kimi", "kimi-experts", "qwen", "qwen-experts"])
@pytest.mark.parametrize("split", ["--cp 4", "--cp 2 --dp-shard 2"])
def test_four_ranks_import_their_shards_and_export_the_same_bytes(
    kind, split, made, tmp_path, gloo_pool
):
    _, _, folder = made(kind)
    args = MODELS[kind], str(folder), tmp_path / "run", split
    whole = sum(x.nbytes for x in TensorFolder(folder).tensors.values())
    for read, largest, shard in gloo_pool.run(imported_and_saved, *args, world_size=4):
        # A_log, biases of routers, and the rows of a tied head are read beside it.
        compared = 2 * 25 * 32 * 4 if kind == "kimi" else 0
        assert shard <= read <= shard + compared + 200
        assert largest < whole / 8
    export(tmp_path / "run", tmp_path / "hf")
    assert files(tmp_path / "hf") == files(folder)


def test_our_model_has_the_logits_of_a_folder_that_transformers_saved(made, tmp_path):
    """The published layout as transformers itself writes it, in half precision and in shards."""
    for kind in ("kimi-experts", "qwen-experts"):
        stock = loaded(made(kind)[2], dtype="bfloat16")
        folder = tmp_path / kind
        stock.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 3
        model = build_model(model_config(MODELS[kind]).model, VOCAB, 0)
        with joined(model_config("").parallel) as ranks:
            InitialFolder(str(folder), model_config(MODELS[kind]).model, VOCAB, ranks).fill(model)
        with torch.no_grad():
            wanted = stock.float()(input_ids=tokens(), use_cache=False).logits
        assert (logits_of(model, tokens()) - wanted).abs().max() < LOGITS


def test_a_folder_in_bfloat16_keeps_what_must_stay_exact(made, tmp_path):
    run, _, whole = made("kimi-experts")
    export(run, tmp_path / "hf", dtype=torch.bfloat16, shard_bytes=30_000)
    exact, rounded = TensorFolder(whole), TensorFolder(tmp_path / "hf")
    assert set(exact.tensors) == set(rounded.tensors)
    for name, stored in rounded.tensors.items():
        fp32 = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        assert stored.dtype == (torch.float32 if fp32 else torch.bfloat16), name
        assert torch.equal(rounded.read(name), exact.read(name).to(stored.dtype)), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


RUN = [
    *TINY.split(),
    *("--global-batch-size", "1", "--eval-every", "2", "--eval-batches", "1"),
    *("--tracker", "none", "--lr", "0.01", "--warmup-steps", "1"),
]


def train(run, steps, *flags):
    return fla_cp.train.main.main([*RUN, "--out", str(run), "--max-steps", str(steps), *flags])


def test_a_run_starts_from_a_folder_and_resumes_without_it(tmp_path, capsys):
    first, second, folder = tmp_path / "a", tmp_path / "b", tmp_path / "hf"
    assert train(first, 2, *KIMI.split()) == 0
    assert export_main([str(first), str(folder)]) == 0
    assert "kimi_linear of step-00000002" in capsys.readouterr().out
    given = [*KIMI.split(), "--init-from", str(folder)]
    assert train(second, 2, *given) == 0
    assert f"weights from {folder}" in capsys.readouterr().out
    before, after = (read_metrics(run) for run in (first, second))
    assert [row["step"] for row in after] == [0, 1, 2]
    # equal weights on equal held-out data, though the training begins anew
    assert after[0]["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=1e-6)
    assert before[0]["eval_loss"] != pytest.approx(before[-1]["eval_loss"], rel=1e-4)
    shutil.rmtree(folder)
    assert train(second, 3, "--resume", "auto", *given) == 0
    out = capsys.readouterr().out
    assert "resumed from" in out and "weights from" not in out


def test_the_tokenizer_goes_with_the_model(tmp_path):
    save_tokenizer(tmp_path / "tok")
    flags = ["--data", "stdlib", "--tokenizer", str(tmp_path / "tok"), *QWEN.split()]
    assert train(tmp_path / "run", 1, *flags, "--data.cache", str(tmp_path / "cache")) == 0
    export(tmp_path / "run", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert (
        tokenizer("The red fox").input_ids
        == AutoTokenizer.from_pretrained(tmp_path / "tok")("The red fox").input_ids
    )
    model = loaded(tmp_path / "hf")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == 64
    shutil.rmtree(tmp_path / "tok")
    with pytest.raises(UserError, match="the tokenizer of the run cannot be read"):
        export(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--mixer comba", "no published layout has the mixers of this model, Comba .block 0."),
        ("--mixer gla", "GatedLinearAttention .block 0.: Kimi Linear has KimiDeltaAttention and"),
        ("--model.pattern kda,attention", "KimiDeltaAttention .block 0. and Attention .block 1."),
        ("--mixer kda", "Kimi Linear, the KimiDeltaAttention of block 0 must have no bias in its"),
        (KIMI + "--model.gate-bias True", "gate .--model.gate-bias False., got one, for which"),
        (KIMI + "--model.gate-lower-bound -5", "no gate_lower_bound .*, got -5.0"),
        (KIMI + "--model.mla-rope", "MultiHeadLatentAttention of block 1 must have no rotary"),
        (KIMI + "--model.experts 4 --model.shared-experts 1", 'have routing="sigmoid", got softm'),
        (KIMI_EXPERTS.replace("experts 2", "experts 0"), "have a shared expert .* got none"),
        (
            KIMI_EXPERTS.replace("experts 6", "experts 1 --model.experts-per-token 1"),
            "the experts of block 1 must be two or more in a group, got 1",
        ),
        (QWEN + "--model.experts 4 --model.routing sigmoid --model.shared-experts 1", "softmax"),
        (QWEN + "--model.experts 4", "the experts of block 0 must have a shared expert"),
        (QWEN_EXPERTS + "--model.routing-scale 2", "have --model.routing-scale 1, got 2.0"),
    ],
)
def test_what_no_layout_expresses_is_refused_with_the_reason(flags, reason, tmp_path):
    random_run(tmp_path / "run", flags)
    with pytest.raises(ValueError, match=reason):
        export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_runs_that_cannot_be_exported(made, tmp_path, capsys):
    run, _, folder = made("kimi")
    shutil.copytree(run, tmp_path / "run")
    run = tmp_path / "run"
    (path,) = checkpoints(run)

    def refused(said, source=run, out=tmp_path / "hf", flags=()):
        assert export_main([str(source), str(out), *flags]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ") and said in line, line

    refused("must not exist yet", out=folder)
    refused("--shard-bytes must be at least 1, got 0", flags=["--shard-bytes", "0"])
    refused("RUN must be a run folder or a checkpoint", source=tmp_path)
    assert export_main([str(path), str(tmp_path / "of-checkpoint")]) == 0
    assert files(tmp_path / "of-checkpoint") == files(folder)
    shard = next(path.glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("differs from its checksum")
    shard.write_bytes(whole)
    as_format_1(path)
    refused("is of format 1")
    assert not (tmp_path / "hf").exists()


def refusal(folder, flags):
    config = model_config(flags)
    with (
        pytest.raises(UserError, match=r"^--init-from: ") as caught,
        joined(config.parallel) as ranks,
    ):
        InitialFolder(str(folder), config.model, VOCAB, ranks).fill(random_model(flags))
    return str(caught.value)


@pytest.fixture
def folder(made, tmp_path):
    """A copy of an exported folder, to be damaged."""
    shutil.copytree(made("kimi-experts")[2], tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "must not be quantised, got quant"),
        ({"vision_config": {"depth": 2}}, "must be a text model, but it has a vision tower"),
        ({"model_type": "llama"}, "must be a model of type kimi_linear, .* got 'llama'"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps in config.json of .* must be 1e-05, .* got 1e-06"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor .* must be 2.446, .* got 1.0"),
        ({"num_experts_per_token": 3}, "num_experts_per_tok in .* must be 2"),
        ({"moe_renormalize": False}, "norm_topk_prob in .* must be True"),
        ({"num_hidden_layers": "three"}, "config.json in .* is refused by transformers"),
    ],
)
def test_a_folder_of_another_model_is_refused_by_the_option(change, said, folder):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    assert re.search(said, refusal(folder, KIMI_EXPERTS))


def rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    write_tensors(folder, tensors.items())


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight (1 in all)"),
        (lambda t: t.update(stray=torch.ones(1)), "has stray (1 in all), for which this run's"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "(32,) of this run's model, "),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "torch.int8: quantised weights are not read",
        ),
    ],
)
def test_a_folder_of_other_tensors_is_refused_by_their_names(change, said, folder):
    rewritten(folder, change)
    assert said in refusal(folder, KIMI_EXPERTS)


def test_folders_that_cannot_be_read(folder, tmp_path):
    # also for a model without a layout: first the path has to be right
    for flags in (KIMI_EXPERTS, "--mixer kda"):
        rule = f"--init-from: must be a folder, got '{tmp_path}/nowhere', which does not exist"
        assert refusal(tmp_path / "nowhere", flags) == rule
    assert refusal(folder / "config.json", KIMI_EXPERTS).endswith("config.json', which is a file")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "model.safetensors cannot be read" in refusal(folder, KIMI_EXPERTS)
    weights.rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refusal(folder, KIMI_EXPERTS)
    (folder / "pytorch_model.bin").rename(weights)
    weights.write_bytes(whole)
    (folder / "config.json").unlink()
    assert "must have a config.json" in refusal(folder, KIMI_EXPERTS)


def test_a_head_of_its_own_is_no_tied_head(made, tmp_path):
    shutil.copytree(made("kimi")[2], tmp_path / "hf")
    rewritten(tmp_path / "hf", lambda t: t["lm_head.weight"].add_(1))
    said = refusal(tmp_path / "hf", KIMI)
    assert "lm_head.weight" in said and "--model.tie-embeddings False" in said


def test_other_positions_and_further_heads_are_noted(made, tmp_path):
    shutil.copytree(made("qwen")[2], tmp_path / "hf")
    rewritten(tmp_path / "hf", lambda t: t.update({"mtp.norm.weight": torch.ones(3)}))
    config = model_config(QWEN + "--model.rope-scaling yarn:4:64")
    with joined(config.parallel) as ranks:
        weights = InitialFolder(str(tmp_path / "hf"), config.model, VOCAB, ranks)
    positions, further = weights.notes
    assert positions.startswith("rotary positions differ: rope_parameters is {")
    assert further == "1 tensors such as mtp.norm.weight have no place and are not read"
    assert "rope_parameters" not in refusal(tmp_path / "hf", KIMI)


def test_a_larger_vocabulary_than_the_datas(tmp_path, capsys):
    random_run(tmp_path / "run", QWEN)
    export(tmp_path / "run", tmp_path / "hf")  # of 97 tokens, while synthetic data have 64
    flags = ["--init-from", str(tmp_path / "hf"), "--eval-every", "0", *QWEN.split()]
    assert train(tmp_path / "a", 1, *flags, "--model.vocab-size", "97") == 0
    export(tmp_path / "a", tmp_path / "again")
    assert loaded(tmp_path / "again").config.vocab_size == 97
    capsys.readouterr()
    assert train(tmp_path / "b", 1, *flags) == 2
    assert "vocab_size in config.json" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert train(tmp_path / "b", 1, *flags, "--model.vocab-size", "63") == 2
    assert "--model.vocab-size must be at least 64" in capsys.readouterr().err


def test_a_checkpoint_with_other_weights_is_not_resumed(tmp_path):
    random_run(tmp_path / "run", KIMI + "--model.gate-bias True")
    (path,) = checkpoints(tmp_path / "run")
    config = model_config(KIMI)
    said = "holds model.blocks.0.mixer.g_proj.1.bias, which this model does not have"
    with joined(config.parallel) as ranks:
        model = build_sharded(config.model, VOCAB, 0, ranks, torch.float32)
        optimizer = build_optimizer(model, config.optim)
        with pytest.raises(UserError, match=said):
            load(path, model, optimizer, ranks)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (
            "",
            "no bias in its output gate (--model.gate-bias False), got one, for which there is no",
        ),
        ("--model.gate-bias False", None),
        ("--mixer gdn", None),
        ("--mixer gla", "no published layout has the mixers of this model, GatedLinearAttention"),
    ],
)
def test_a_run_says_at_its_start_if_it_cannot_be_exported(flags, reason, tmp_path, capsys):
    short = f"{TINY} --max-steps 1 --eval-every 0 --tracker none --device cpu --seq-len 64"
    run = str(tmp_path / "run")
    assert fla_cp.train.main.main([*short.split(), *flags.split(), "--out", run]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "fla-cp-export" in line]
    assert len(said) == (reason is not None)
    for line in said:
        assert line.startswith("note: fla-cp-export cannot write this model for transformers: ")
        assert reason in line
    # what the note says is what the export does
    assert (export_main([run, str(tmp_path / "hf")]) == 0) == (reason is None)


def test_flags_that_do_not_go_together():
    for flags, said in (("--check-parity", "left out with --check-parity"), ("", "not be empty")):
        given = ["--init-from", "hf" if flags else "", *flags.split()]
        with pytest.raises(UserError, match=f"--init-from must .*{said}"):
            fla_cp.train.main.parse(given)

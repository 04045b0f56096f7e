"""Runs of --model hf:DIR, as a user starts them: resumed, saved, exported, refused."""

import json
import random
import shutil

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fla_cp.train.export
import fla_cp.train.main
from fla_cp.integrations.safetensors_folder import TensorFolder
from fla_cp.train import evaluate, generate
from fla_cp.train.checkpoint import checkpoints, read_record
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import parse
from tests.support.stock_folders import FLAGS, save_stock
from tests.support.stock_models import MODELS
from tests.support.tokenizers import save_tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a text and a tiny model of each kind, of which one is tied."""
    root = tmp_path_factory.mktemp("root")
    (root / "text.txt").write_text("".join(random.Random(1).choices("abcdefgh \n", k=4000)))
    for kind in MODELS:
        save_stock(root / "org/models" / kind, kind, tie_word_embeddings=kind == "olmo_hybrid")
    return root


def train(root, kind, run, steps, *flags):
    own = ["--model", f"hf:{root}/org/models/{kind}", "--data", f"text:{root}/text.txt"]
    out = ["--out", str(run)] if run else []
    quick = ["--max-steps", str(steps), "--tracker", "none", "--seq-len", "64"]
    return fla_cp.train.main.main([*FLAGS, *own, *out, *quick, *flags])


def tensors(folder):
    stored = TensorFolder(folder)
    return {name: stored.read(name) for name in stored.tensors}


def exported(run, out, *flags):
    assert fla_cp.train.export.main([str(run), str(out), *flags]) == 0
    return tensors(out)


def same(a, b):
    assert list(a) == list(b)
    return all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.bits
@pytest.mark.parametrize("kind", ["kimi_linear", "olmo_hybrid"])
def test_a_resumed_run_goes_on_in_the_same_bits(root, tmp_path, kind):
    flags = ["--schedule", "wsd", "--optim.decay-ratio", "0"]  # independent of the last step
    assert train(root, kind, tmp_path / "whole", 4, *flags) == 0
    assert train(root, kind, tmp_path / "parts", 2, *flags) == 0
    assert train(root, kind, tmp_path / "parts", 4, *flags, "--resume", "auto") == 0
    rows = [read_metrics(tmp_path / name) for name in ("whole", "parts")]
    assert [r["loss"] for r in rows[0]] == [r["loss"] for r in rows[1]] and len(rows[0]) == 4
    both = [exported(tmp_path / name, tmp_path / f"{name}-out") for name in ("whole", "parts")]
    assert same(*both)
    assert not same(both[0], tensors(root / "org/models" / kind))  # it has trained
    record, _ = read_record(checkpoints(tmp_path / "whole")[-1])
    assert record["folder"] == f"{root}/org/models/{kind}"


@pytest.mark.bits
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_exported_is_loaded_and_exported_again(root, tmp_path, kind):
    """A step at a rate of almost nothing changes no bit: what comes out is what went in."""
    still = ["--lr", "1e-45", "--warmup-steps", "0"]
    assert train(root, kind, tmp_path / "run", 1, *still) == 0
    first = exported(tmp_path / "run", tmp_path / "first", "--shard-bytes", "20000")
    source = root / "org/models" / kind
    assert same(dict(sorted(first.items())), dict(sorted(tensors(source).items())))
    stock, again = (
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        for folder in (source, tmp_path / "first")
    )
    ids = torch.arange(3, 60)[None]
    # equal weights, but files lay them elsewhere in memory, which some processors' products show
    assert (stock(ids).logits - again(ids).logits).abs().max() <= 1e-5
    copy = tmp_path / "org/models" / kind
    shutil.copytree(tmp_path / "first", copy)
    still += ["--data", f"text:{root}/text.txt"]
    assert train(tmp_path, kind, tmp_path / "run2", 1, *still) == 0
    assert same(first, exported(tmp_path / "run2", tmp_path / "second"))
    half = exported(tmp_path / "run", tmp_path / "half", "--dtype", "bfloat16")
    kinds = {x.dtype for name, x in half.items() if not name.endswith(("A_log", "dt_bias"))}
    assert torch.bfloat16 in kinds
    assert all(half[name].dtype == torch.float32 for name in half if name.endswith("A_log"))


READABLE = {
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "num_experts": 4,
    "intermediate_size": 64,
}
"""What makes the tiny Qwen3-Next one that our decoder expresses."""


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "readable"])
def test_generate_and_evaluate_name_a_way_out_that_works(root, tmp_path, kind, capsys):
    folder, name = root / "org/models" / kind, "qwen3_next" if kind == "readable" else kind
    if kind == "readable":
        save_stock(folder, name, **READABLE, vocab_size=256)
    assert train(root, kind, tmp_path / "run", 1) == 0
    capsys.readouterr()
    path, out = tmp_path / "run/checkpoints/step-00000001", tmp_path / "OUT"
    for program in (generate.main, evaluate.main):
        words = ["--prompt", "abc"] if program is generate.main else ["--packs", "1"]
        assert program([str(tmp_path / "run"), "--device", "cpu", *words]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        write = f"write it with fla-cp-export {path} OUT, and "
        start = f"error: RUN must not be a run of --model hf:DIR, got {path} of {name}: {write}"
        assert line.startswith(start)
        theirs = "use transformers' own generate on OUT, which fla_cp's decoder does not read: "
        assert (line == f"{start}give OUT instead") == (kind == "readable")
        assert line.startswith(start + theirs) == (kind != "readable")
    # OUT is read where the advice says so, and only there
    assert fla_cp.train.export.main([str(path), str(out)]) == 0
    words = ["--device", "cpu", "--prompt", "abc", "--max-new-tokens", "2"]
    assert (generate.main([str(out), *words]) == 0) == (kind == "readable")


def test_names_of_runs_and_resume_auto_survive_slashes(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "org/models/olmo_hybrid", tmp_path / "a/my model[1]")
    flags = ["--data", f"text:{root}/text.txt", "--seq-len", "64", "--tracker", "none"]
    for steps in (1, 2):
        model = ["--model", "hf:a/my model[1]/", "--max-steps", str(steps), "--resume", "auto"]
        assert fla_cp.train.main.main([*FLAGS, *flags, *model]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.partition("-hf-")[2].startswith("my-model-1--")
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    config = parse(["--config", str(run / "config.toml")])
    assert config.model.size == f"hf:{tmp_path}/a/my model[1]"
    assert "resumed from runs/" in capsys.readouterr().out


def test_the_folders_tokenizer_is_the_default(root, tmp_path):
    folder = tmp_path / "with"
    shutil.copytree(root / "org/models/kimi_linear", folder)
    flags = ["--device", "cpu", "--model", f"hf:{folder}"]
    assert parse([*flags, "--data", "stdlib"]).data.tokenizer is None
    save_tokenizer(folder)
    assert parse([*flags, "--data", "stdlib"]).data.tokenizer == str(folder)
    assert parse([*flags, "--data", "text:a:0.5,hf:b:0.5"]).data.tokenizer == str(folder)
    assert parse([*flags, "--data", "synthetic"]).data.tokenizer is None
    assert parse([*flags, "--tokenizer", str(root)]).data.tokenizer == str(root)


def test_random_weights_without_a_file(root, tmp_path, capsys):
    folder = tmp_path / "org/models/empty"
    folder.mkdir(parents=True)
    shutil.copy(root / "org/models/qwen3_5_moe/config.json", folder)
    data = ["--data", f"text:{root}/text.txt"]
    assert train(tmp_path, "empty", tmp_path / "run", 1, *data) == 2
    assert "must have weights (*.safetensors); for random ones, add" in capsys.readouterr().err
    still = ["--lr", "1e-45", "--warmup-steps", "0", "--model.init", "random", *data]
    assert train(tmp_path, "empty", tmp_path / "run", 1, *still) == 0
    drawn = exported(tmp_path / "run", tmp_path / "out")
    assert set(drawn) == set(tensors(root / "org/models/qwen3_5_moe"))
    std = json.loads((folder / "config.json").read_text())["initializer_range"]
    assert 0.9 * std < float(drawn["lm_head.weight"].std()) < 1.1 * std


REFUSED = {
    "--model.layers must be left out with --model hf:": ["--model.layers", "3"],
    "--model.experts must be left out with": ["--model.experts", "3"],
    "--model.offload must be left out with": ["--offload"],
    "--compile must be auto or off with": ["--compile"],
    "--cuda-graphs must be left out with": ["--cuda-graphs"],
    "--data must have at most the 256 tokens of --model": ["--data", "DATA"],
    "config.json cannot be read": ["--model", "hf:ROOT"],
    "must be a folder": ["--model", "hf:/no/such"],
    "--model must be one of 'tiny'": ["--model", "7B"],
    "--model.init must be left out without --model hf:DIR, got random": [
        *("--model", "tiny", "--model.init", "random")
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_mistakes_end_in_one_line_and_leave_no_folder(root, tmp_path, capsys, message):
    if "DATA" in REFUSED[message]:
        save_tokenizer(tmp_path / "tokens", merges=120)
        more = ["--tokenizer", str(tmp_path / "tokens"), "--data.cache", str(tmp_path / "cache")]
        text = tmp_path / "long.txt"
        text.write_text("The red fox sees 1 stones.\n" * 2000)
        flags = ["--data", f"text:{text}", *more]
    else:
        flags = [flag.replace("ROOT", str(root)) for flag in REFUSED[message]]
    assert train(root, "olmo_hybrid", tmp_path / "run", 1, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["qwen3_5", "olmo_hybrid"])
def test_a_head_that_differs_from_a_tied_one_is_refused(tmp_path, capsys, kind):
    """transformers would load it as a head of its own; an equal copy is a tied head."""
    folder, run = tmp_path / "org/models" / kind, tmp_path / "run"
    (tmp_path / "text.txt").write_text("abc " * 1000)
    weights = folder / "model.safetensors"
    save_stock(folder, kind, tie_word_embeddings=True)
    tied = load_file(weights)
    (embedding,) = (name for name in tied if name.endswith("embed_tokens.weight"))
    save_file({**tied, "lm_head.weight": tied[embedding].clone()}, weights)
    assert train(tmp_path, kind, run, 1) == 0
    equal = exported(run, tmp_path / "equal")
    assert torch.equal(equal["lm_head.weight"], equal[embedding])
    save_file({**tied, "lm_head.weight": tied[embedding] + 1}, weights)
    message = f"lm_head.weight in {folder} must equal {embedding} or be left out, because "
    capsys.readouterr()
    assert train(tmp_path, kind, tmp_path / "other", 1) == 2
    assert f"--model hf:{folder}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert fla_cp.train.export.main([str(run), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_damaged_weights_are_named_before_a_run_begins(root, tmp_path, capsys):
    folder = tmp_path / "org/models/kimi_linear"
    shutil.copytree(root / "org/models/kimi_linear", folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 40)
    data = ["--data", f"text:{root}/text.txt"]
    assert train(tmp_path, "kimi_linear", tmp_path / "run", 1, *data) == 2
    assert "model.safetensors cannot be read as safetensors" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

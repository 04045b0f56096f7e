"""fla-cp-evaluate: figures against plain sums, N ranks against one, needles."""

import json
import subprocess
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("matplotlib")

from fla_cp.train.evaluate import main as evaluate_main
from fla_cp.train.main import main as train_main
from fla_cp.train.metrics import read_metrics
from fla_cp.train.needle import ASK, FIRST_VALUE, MARK, NeedleSource, needle_document
from fla_cp.train.sources import build_dataset
from tests.support.exported import MODELS, logits_of, random_run
from tests.support.options import missing_options
from tests.support.processes import ROOT, environment
from tests.support.tokenizers import save_tokenizer
from tests.support.warm_python import run_unread, warm_python

OPTIONS = "--data synthetic --packs 2 --seq-len 96 --needle 33,64 --needle-count 3 --device cpu"


def evaluated(out, *words):
    assert evaluate_main([*map(str, words), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    return json.loads(out.with_suffix(".json").read_text())


def test_figures_are_plain_sums(tmp_path, capsys):
    model = random_run(tmp_path / "run", MODELS["kimi"]).eval()
    (tmp_path / "text.txt").write_bytes(bytes(range(10, 96)) * 2)
    words = (tmp_path / "run", *OPTIONS.split(), "--text", tmp_path / "text.txt")
    found = evaluated(tmp_path / "a.png", *words)
    packs = build_dataset("synthetic", 96, "valid", 0).head(2)
    by_position, by_length = {}, {}
    for pack in (packs[0], packs[1]):
        ends = pack["cu_seqlens"].tolist()
        for lo, hi in pairwise(ends):
            logs = logits_of(model, pack["tokens"][None, lo:hi])[0].log_softmax(-1)
            for i, label in enumerate(pack["labels"][lo:hi].tolist()):
                if label >= 0:
                    loss = -logs[i, label].item()
                    first = 2 ** (i.bit_length() - 1) if i else 0
                    by_position.setdefault(first, []).append(loss)
                    by_length.setdefault(2 ** ((hi - lo).bit_length() - 1), []).append(loss)
    for name, wanted in (("by_position", by_position), ("by_length", by_length)):
        rows = {first: (loss, count) for first, loss, count in found[name]}
        assert {first: count for first, (_, count) in rows.items()} == {
            first: len(losses) for first, losses in wanted.items()
        }
        for first, losses in wanted.items():
            assert rows[first][0] == pytest.approx(np.mean(losses), rel=1e-4)
    losses = [loss for losses in by_position.values() for loss in losses]
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    tokens = torch.tensor([list((tmp_path / "text.txt").read_bytes())])
    logs = torch.cat([logits_of(model, part)[0].log_softmax(-1) for part in tokens.split(96, 1)])
    nats = -logs[:-1].gather(1, tokens[0, 1:, None]).mean().item()
    assert found["perplexity"] == pytest.approx(np.exp(nats), rel=1e-4)
    bits = nats / np.log(2) * 171 / 172  # the first of the 172 bytes has no loss
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert "perplexity of the text" in capsys.readouterr().out


def test_a_runs_own_data_have_the_seed_of_the_run(tmp_path):
    """The held-out loss is then that which the run itself measured. All else has the seed 0."""
    run = tmp_path / "run"
    sizes = "--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16"
    data = "--data synthetic --seq-len 64 --global-batch-size 2 --eval-batches 3 --eval-every 2"
    flags = f"{sizes} {data} --device cpu --max-steps 2 --seed 7 --tracker none --out {run}"
    assert train_main(flags.split()) == 0
    words = run, "--device", "cpu", "--packs", "6", "--needle", "33"

    def figures(*more):
        found = evaluated(tmp_path / "a.png", *words, *more)
        return found["loss"], found["needle"]

    own, needle = figures()
    assert own == pytest.approx(read_metrics(run)[-1]["eval_loss"], rel=1e-5)
    assert own == figures("--seed", "7")[0] != figures("--seed", "0")[0]
    assert figures("--data", "synthetic") == figures("--seed", "0")
    assert needle == figures("--seed", "0")[1]


def test_a_perplexity_alone_has_no_picture(tmp_path, capsys):
    random_run(tmp_path / "run", MODELS["kimi"])
    (tmp_path / "text.txt").write_text("ABC")
    words = ["--packs", "0", "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert evaluate_main([str(tmp_path / "run"), *words, "--out", str(tmp_path / "a.png")]) == 0
    assert not (tmp_path / "a.png").exists()
    assert json.loads((tmp_path / "a.json").read_text())["perplexity"] > 1
    out = capsys.readouterr().out
    assert out.endswith(f"figures: {tmp_path / 'a.json'}\n")


@pytest.mark.slow
def test_two_ranks_give_the_figures_of_one(tmp_path):
    random_run(tmp_path / "run", MODELS["kimi"])
    one = evaluated(tmp_path / "a.png", tmp_path / "run", *OPTIONS.split())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "launch" / "evaluate.py"), str(tmp_path / "run"), *OPTIONS.split()]
    done = subprocess.run(
        [*warm_python(), *launcher, *script, "--cp", "2", "--out", str(tmp_path / "b.png")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "b.json").read_text())
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["needle"] == one["needle"]
    for name in ("by_position", "by_length"):
        for mine, other in zip(two[name], one[name], strict=True):
            assert mine == pytest.approx(other, rel=1e-4)


def test_needles_are_where_the_depth_says():
    rng = np.random.default_rng(0)
    for depth, at in ((0.0, 0), (0.5, 30), (1.0, 60)):
        tokens = needle_document(rng, 64, depth)
        assert (tokens[at], tokens[-2]) == (MARK, ASK)
        assert tokens[at + 1] == tokens[-1] >= FIRST_VALUE
    source = NeedleSource(64, 0, "valid")
    (targets,) = np.nonzero(source.counted(0, 1000))
    assert (source.tokens[targets] >= FIRST_VALUE).all()
    assert (source.tokens[targets - 1] == ASK).all()


def test_mistakes_are_named(tmp_path, capsys):
    assert evaluate_main([str(tmp_path), "--cp", "2"]) == 2
    assert "--cp must be the number of ranks that were started, 1, got 2" in capsys.readouterr().err
    assert evaluate_main([str(tmp_path), "--needle-count", "0"]) == 2
    assert "--needle-count must be at least 1, got 0" in capsys.readouterr().err
    assert evaluate_main([str(tmp_path), "--packs", "0"]) == 2
    assert "--packs must be at least 1 without --text and --needle" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate_main([str(tmp_path), "--needle", "64,long"])
    message = "--needle must be lengths with commas between them, such as 512,2048, got '64,long'"
    assert message in capsys.readouterr().err
    random_run(tmp_path / "run", MODELS["kimi"])  # of 97 tokens
    (tmp_path / "text.txt").write_text("abc")
    text = ["--packs", "0", "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert evaluate_main([str(tmp_path / "run"), *text]) == 2
    assert "error: --text must have bytes below 97" in capsys.readouterr().err
    with pytest.raises(ValueError, match="LENGTH from 16, got 8"):
        build_dataset("needle:8", 64, "train", 0)


@pytest.mark.parametrize("words", ["--text {0}/text.txt --packs 0", "--data stdlib"])
def test_a_missing_tokenizer_is_named(words, tmp_path, capsys):
    random_run(tmp_path / "run", MODELS["kimi"])
    (tmp_path / "text.txt").write_text("abc")
    wrong = [*words.format(tmp_path).split(), "--tokenizer", str(tmp_path / "no")]
    assert evaluate_main([str(tmp_path / "run"), *wrong, "--device", "cpu"]) == 2
    message = f"error: --tokenizer must be a folder, got '{tmp_path}/no', which does not exist\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_wrong_column_is_named_by_the_option_of_this_program(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    random_run(tmp_path / "run", MODELS["kimi"])
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    given = [str(tmp_path / "run"), "--data", f"hf:{tmp_path / 'a.jsonl'}", "--device", "cpu"]
    given += ["--tokenizer", str(tmp_path / "tokenizer"), "--column", "body"]
    assert evaluate_main([*given, "--out", str(tmp_path / "a.png")]) == 2
    said = capsys.readouterr().err
    assert f"error: --column must be a column of {tmp_path / 'a.jsonl'}, one of text, got" in said


def test_packs_of_one_token_are_refused_as_by_the_trainer(tmp_path, capsys):
    assert evaluate_main([str(tmp_path), "--seq-len", "1"]) == 2
    assert capsys.readouterr().err == "error: --seq-len must be at least 2, got 1\n"


@pytest.mark.parametrize("name", ["a.txt", "a", "missing/a.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("fla_cp.train.evaluate.evaluate", lambda *_: pytest.fail("measured"))
    assert evaluate_main([str(tmp_path), "--out", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    rule = "be in a folder that exists" if "missing" in name else "end in one of ."
    assert f"error: --out must {rule}" in err
    assert err.endswith(f", got {tmp_path / name}\n")


def test_figures_that_cannot_be_written_are_printed_and_told_in_one_line(tmp_path, capsys):
    random_run(tmp_path / "run", MODELS["kimi"])
    (tmp_path / "text.txt").write_text("ABC")
    (tmp_path / "a.json").mkdir()
    words = ["--packs", "0", "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert evaluate_main([str(tmp_path / "run"), *words, "--out", str(tmp_path / "a.png")]) == 2
    said = capsys.readouterr()
    assert "perplexity of the text: " in said.out
    assert f"error: --out: cannot write {tmp_path / 'a.json'}: Is a directory" in said.err


def test_figures_that_nobody_reads_are_written(tmp_path):
    random_run(tmp_path / "run", MODELS["kimi"])
    program = "import sys; from fla_cp.train.cli import run_evaluate; sys.exit(run_evaluate())"
    words = [str(tmp_path / "run"), *OPTIONS.split(), "--out", str(tmp_path / "a.png")]
    done = run_unread(program, *words)
    assert done.returncode == 0, done.stderr
    assert "Broken pipe" not in done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "a.json").read_text())["loss"] > 0


def test_the_page_has_every_option(capsys):
    assert missing_options(evaluate_main, capsys, "evaluation.md") == set()

"""Generation: greedy tokens are those of the parallel forward and of transformers."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from transformers import AutoModelForCausalLM

from fla_cp.train.export import export
from fla_cp.train.generate import Sampling, generate
from fla_cp.train.generate import main as generate_main
from tests.support.exported import MODELS, logits_of, random_model, random_run

PROMPTS = [[5, 17, 80, 3, 41, 9, 60], [2], [int(i * 31 % 97) for i in range(83)]]
NEW = 12


@pytest.mark.parametrize("kind", ["kimi-experts", "qwen-experts", "mla", "yarn"])
def test_greedy_tokens_are_those_of_the_parallel_forward(kind):
    model = random_model(MODELS[kind]).eval()
    found, _ = generate(model, PROMPTS, NEW, chunk=31)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert len(tokens) == NEW
        whole = torch.tensor([prompt + tokens])
        wanted = logits_of(model, whole)[0, len(prompt) - 1 : -1].argmax(-1)
        assert tokens == wanted.tolist()


@pytest.mark.parametrize("kind", ["kimi-experts", "qwen-experts"])
def test_greedy_tokens_are_those_of_transformers(kind, tmp_path, capsys):
    model = random_run(tmp_path / "run", MODELS[kind]).eval()
    export(tmp_path / "run", tmp_path / "hf")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32").eval()
    found, _ = generate(model, PROMPTS, NEW)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        given = torch.tensor([prompt])
        theirs = stock.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False
        )
        assert tokens == theirs[0, len(prompt) :].tolist()


def test_the_command_continues_bytes(tmp_path, capsys):
    model = random_run(tmp_path / "run", MODELS["kimi"]).eval()
    found, _ = generate(model, [list(b"A B"), list(b"A")], 6)
    command = [str(tmp_path / "run"), "--max-new-tokens", "6", "--device", "cpu"]
    assert generate_main([*command, "--prompt", "A"]) == 0
    out, err = capsys.readouterr()
    assert out == bytes(found[1]).decode() + "\n"
    assert "first token after" in err
    assert "tokens/s" in err
    assert generate_main([*command, "--prompt", "A B", "--prompt", "A"]) == 0
    texts = [bytes(tokens).decode() + "\n" for tokens in found]
    assert capsys.readouterr().out == "".join(texts)
    assert generate_main([*command, "--prompt", "abc"]) == 2
    assert "prompts must have tokens from 0 to 96" in capsys.readouterr().err
    assert generate_main([str(tmp_path), "--prompt", "A"]) == 2
    assert "holds no complete one" in capsys.readouterr().err


def test_a_row_stops_at_its_end_and_others_go_on():
    model = random_model(MODELS["kimi"]).eval()
    whole, _ = generate(model, PROMPTS[:2], NEW)
    end = whole[0][3]
    steps = []
    found, statistics = generate(model, PROMPTS[:2], NEW, end=end, on_tokens=steps.append)
    for before, now in zip(whole, found, strict=True):
        cut = before.index(end) + 1 if end in before else NEW
        assert now == before[:cut]
    assert statistics.steps == len(steps) - 1
    assert statistics.tokens == sum(map(len, found)) - 2


def test_sampling_keeps_to_the_likeliest_tokens():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = Sampling(1.0, 0.7).choose(logits, generator).bincount(minlength=4) / 2000
    torch.testing.assert_close(drawn, torch.tensor([0.625, 0.375, 0, 0]), atol=0.04, rtol=0)
    assert Sampling().choose(logits[:1]).tolist() == [0]
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        Sampling(1.0, 0)

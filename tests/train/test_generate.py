"""Generation: greedy tokens are those of the parallel forward and of transformers."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from transformers import AutoModelForCausalLM, AutoTokenizer

import fla_cp.train.generate
import fla_cp.train.main
from fla_cp.train.decoding import in_dtype, unsteady_steps
from fla_cp.train.export import export
from fla_cp.train.generate import Sampling, Statistics, generate, load_decoder
from fla_cp.train.generate import main as generate_main
from tests.support.exported import MODELS, TINY, logits_of, random_model, random_run
from tests.support.options import missing_options
from tests.support.processes import ROOT, environment
from tests.support.ranks import run_threads
from tests.support.tokenizers import TEXT, save_tokenizer
from tests.support.warm_python import run_unread, warm_python

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


@pytest.mark.parametrize("kind", ["kimi-experts", "qwen-experts", "mla", "yarn"])
def test_ranks_that_share_prompts_find_the_same_tokens(kind):
    """In chunks of 2 * 31 tokens, the last of which may be too short to share."""
    model = random_model(MODELS[kind]).eval()
    found, _ = generate(model, PROMPTS, NEW)

    def on_rank(group, rank):
        return generate(model, PROMPTS, NEW, chunk=31, group=group)[0]

    assert run_threads(on_rank, 2) == [found, found]


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
    err = capsys.readouterr().err
    assert "--prompt must have bytes below 97, the tokens of the model" in err
    assert "got 99: models of synthetic and needle:LENGTH read no text; train on stdlib" in err
    with pytest.raises(ValueError, match="prompts must have tokens from 0 to 96"):
        generate(model, [[97]], 1)
    assert generate_main([str(tmp_path), "--prompt", "A"]) == 2
    assert "holds no complete one" in capsys.readouterr().err


def test_the_command_decodes_in_bfloat16(tmp_path, capsys):
    """Decay rates and routers stay float32; the text is that of the model in bfloat16."""
    model = random_run(tmp_path / "run", MODELS["kimi-experts"]).eval()
    exact, _ = generate(model, [list(b"A B")], 24)
    half = in_dtype(model, torch.bfloat16)
    dtypes = {name: p.dtype for name, p in half.named_parameters()}
    wide = {n for n, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {n for n in dtypes if ".core." in n or ".router." in n}
    found, _ = generate(half, [list(b"A B")], 24)
    assert found != exact
    command = [str(tmp_path / "run"), "--max-new-tokens", "24", "--device", "cpu"]
    assert generate_main([*command, "--dtype", "bfloat16", "--prompt", "A B"]) == 0
    assert capsys.readouterr().out == bytes(found[0]).decode() + "\n"


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


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_low_temperature_takes_the_likeliest_token(temperature, dtype):
    """Also where the logits over the temperature overflow, or its reciprocal does."""
    logits = torch.tensor([[1.0, 5.0, 3.0, -40.0], [-9.0, -8.0, -7.0, -6.0], [0.0, 0.0, -1.0, 0.0]])
    found = Sampling(temperature).choose(logits.to(dtype).repeat(50, 1)).view(50, 3)
    assert (found[:, :2] == torch.tensor([1, 3])).all()
    assert set(found[:, 2].tolist()) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e-38])
def test_a_choice_needs_no_value_on_the_host(temperature):
    """Tensors of the meta device have none. On a GPU, the host would wait for such a value."""
    chosen = Sampling(temperature, 0.9).choose(torch.empty(3, 11, device="meta"))
    assert chosen.shape == (3,) and chosen.dtype == torch.int64


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 99999999999999999999999])
def test_seeds_that_pytorch_does_not_take_are_refused(seed):
    model = random_model(MODELS["kimi"]).eval()
    with pytest.raises(ValueError, match=rf"seed must be from -2\^63 to 2\^64 - 1, got {seed}"):
        generate(model, PROMPTS, 1, seed=seed)
    for taken in (2**64 - 1, -(2**63)):
        assert generate(model, PROMPTS, 1, seed=taken)[0]


class Clock(io.StringIO):
    """What is written, and how often it was flushed with something new."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def flush(self):
        if self.getvalue() != (self.shown[-1] if self.shown else ""):
            self.shown.append(self.getvalue())


@pytest.fixture(scope="module")
def tokenizer_run(tmp_path_factory):
    """A run of the trainer on text with a tokenizer: (run folder, tokenizer's folder)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text").mkdir()
    for n in range(30):
        (folder / "text" / f"{n}.txt").write_text("\n".join(TEXT[n % 4 :]) + "\n")
    words = (
        TINY.replace("--data synthetic", f"--data text:{folder / 'text'}")
        + f"--data.cache {folder / 'cache'} --tokenizer {save_tokenizer(folder / 'words')} "
        + f"--max-steps 24 --warmup-steps 4 --lr 1e-2 --eval-every 0 --out {folder / 'run'}"
    )
    assert fla_cp.train.main.main(words.split()) == 0
    return folder / "run", folder / "words"


def test_a_run_with_a_tokenizer_continues_text(tokenizer_run, capsys):
    run, words = tokenizer_run
    tokenizer = AutoTokenizer.from_pretrained(words)
    model, _ = load_decoder(run, torch.device("cpu"))
    prompt = "The red fox"
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) < len(prompt)
    (found,), _ = generate(model, [ids], 12, end=tokenizer.eos_token_id)
    capsys.readouterr()
    command = [str(run), "--max-new-tokens", "12", "--device", "cpu", "--prompt"]
    assert generate_main([*command, prompt]) == 0
    out, err = capsys.readouterr()
    assert out == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    assert "sees" in out  # it has learnt the sentences that it was trained on
    assert re.fullmatch(r"first token after \d+\.\d{3} s, then \d+\.\d tokens/s\n", err)
    assert generate_main([*command, prompt, "--prompt", "The"]) == 0
    assert capsys.readouterr().out.startswith(out)  # the texts of several prompts, one after other


def test_a_tokenizer_that_moved_is_given_by_its_flag(tokenizer_run, tmp_path, capsys):
    run, words = tokenizer_run
    command = [str(run), "--max-new-tokens", "4", "--device", "cpu", "--prompt", "The red fox"]
    assert generate_main(command) == 0
    text = capsys.readouterr().out
    moved = words.rename(tmp_path / "moved")
    try:
        assert generate_main(command) == 2
        assert (
            f"error: --tokenizer must be a folder, got '{words}', which" in capsys.readouterr().err
        )
        assert generate_main([*command, "--tokenizer", str(moved)]) == 0
        assert capsys.readouterr().out == text
    finally:
        moved.rename(words)


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(tmp_path, capsys):
    """Its tokens below the model's number mean something else to the model."""
    random_run(tmp_path / "run", MODELS["kimi"])
    words = save_tokenizer(tmp_path / "words")
    command = [str(tmp_path / "run"), "--device", "cpu", "--prompt", "o", "--tokenizer", str(words)]
    assert generate_main(command) == 2
    rule = "--tokenizer must have at most the 97 tokens of the model, got "
    assert f"error: {rule}{len(AutoTokenizer.from_pretrained(words))}" in capsys.readouterr().err


def test_text_is_printed_as_it_comes(tokenizer_run, monkeypatch):
    run, _ = tokenizer_run
    clock = Clock()
    monkeypatch.setattr(sys, "stdout", clock)
    command = [str(run), "--max-new-tokens", "8", "--device", "cpu", "--prompt", "The old"]
    assert generate_main(command) == 0
    assert len(clock.shown) >= 4
    for before, after in zip(clock.shown, clock.shown[1:], strict=False):
        assert after.startswith(before)


def test_the_last_piece_of_text_is_printed(tmp_path, monkeypatch, capsys):
    """A text may end within a character."""
    random_run(tmp_path / "run", MODELS["kimi"])

    def give(*args, on_tokens, **kwargs):
        for byte in b"A\xf0\x9f":
            on_tokens([byte])
        return [], Statistics()

    monkeypatch.setattr(fla_cp.train.generate, "generate", give)
    assert generate_main([str(tmp_path / "run"), "--device", "cpu", "--prompt", "A"]) == 0
    assert capsys.readouterr().out == "A\ufffd\n"


def test_the_time_to_the_first_token_and_the_rate_are_measured(monkeypatch):
    model = random_model(MODELS["kimi"]).eval()
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(Sampling):
        def choose(self, logits, generator=None):
            now[0] += 0.25 if now[0] else 2.0
            return super().choose(logits, generator)

    _, statistics = generate(model, PROMPTS[:2], 5, sampling=Slow())
    assert statistics.first_token == 2.0
    assert (statistics.steps, statistics.tokens, statistics.decoding) == (4, 8, 1.0)
    assert str(statistics) == "first token after 2.000 s, then 8.0 tokens/s"
    assert unsteady_steps(torch.device("cpu")) == 0
    # On a GPU, two steps run as they are written, and the third captures the graph.
    assert unsteady_steps(torch.device("cuda")) == 3
    monkeypatch.setattr(fla_cp.train.generate, "unsteady_steps", lambda device: 3)
    now[0] = 0.0
    _, statistics = generate(model, PROMPTS[:2], 6, sampling=Slow())
    assert (statistics.left_out, statistics.steps, statistics.tokens) == (3, 2, 4)
    assert statistics.decoding == 0.5
    assert str(statistics) == (
        "first token after 2.000 s, then 8.0 tokens/s, not counting 3 steps that compile and "
        "capture"
    )
    _, statistics = generate(model, PROMPTS[:2], 4, sampling=Slow())
    assert str(statistics).endswith(" s, too few tokens for tokens/s")


def launched(*words, ranks=1):
    """launch/generate.py in a process of its own, or in several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(ROOT / "launch" / "generate.py")
    command = [*warm_python(), *(torchrun if ranks > 1 else []), script, *map(str, words)]
    return subprocess.run(
        command, cwd=os.sep, env=environment(), capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_the_script_generates_text_and_reports_mistakes(tokenizer_run, capsys):
    run, _ = tokenizer_run
    command = [run, "--device", "cpu", "--max-new-tokens", 8, "--prompt", "The old owl"]
    done = launched(*command)
    assert done.returncode == 0, done.stderr
    capsys.readouterr()
    assert generate_main([*map(str, command)]) == 0
    assert done.stdout == capsys.readouterr().out
    assert "tokens/s" in done.stderr.splitlines()[-1]
    done = launched(*command, "--top-p", 2)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --top-p must be in (0, 1], got 2.0" in done.stderr


@pytest.mark.parametrize("prompts", [1, 2])
def test_text_that_nobody_reads_is_no_mistake(prompts, tmp_path):
    random_run(tmp_path / "run", MODELS["kimi"])
    program = "import sys; from fla_cp.train.cli import run_generate; sys.exit(run_generate())"
    words = ["--device", "cpu", "--max-new-tokens", "4", *["--prompt", "A"] * prompts]
    done = run_unread(program, str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    assert "Broken pipe" not in done.stderr and "tokens/s" in done.stderr


@pytest.mark.slow
def test_two_ranks_print_what_one_prints(tmp_path):
    random_run(tmp_path / "run", MODELS["kimi"])
    (tmp_path / "prompt.txt").write_text("WORDS THAT TWO RANKS SHARE.")
    command = [tmp_path / "run", "--device", "cpu", "--max-new-tokens", 6]
    command += ["--prompt-file", tmp_path / "prompt.txt"]
    one, two = launched(*command), launched(*command, "--cp", 2, ranks=2)
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout
    assert two.stderr.count("tokens/s") == 1
    wrong = launched(*command, "--cp", 2)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "error: --cp must be the number of ranks that were started, 1, got 2" in wrong.stderr


MISTAKES = {
    "no prompt": ([], "--prompt or --prompt-file must be given"),
    "file": (["--prompt-file", "missing.txt"], "--prompt-file: cannot read missing.txt: No such"),
    "bytes": (["--prompt-file", "latin1.txt"], "--prompt-file must be UTF-8, got latin1.txt: 'utf"),
    "count": (
        ["--prompt", "A", "--max-new-tokens", "0"],
        "--max-new-tokens must be at least 1, got 0",
    ),
    "temperature": (
        ["--prompt", "A", "--temperature", "-1"],
        "--temperature must be finite and from 0, got -1.0",
    ),
    "share": (["--prompt", "A", "--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
    "seed": (
        ["--prompt", "A", "--seed", "99999999999999999999999"],
        "--seed must be from -2^63 to 2^64 - 1, got 99999999999999999999999",
    ),
    "ranks": (
        ["--prompt", "A b", "--cp", "2"],
        "--cp must be the number of ranks that were started, 1, got 2; run torchrun "
        "--nproc-per-node 2 --no-python fla-cp-generate RUN --device cpu --prompt 'A b' --cp 2\n",
    ),
    "device": (["--prompt", "A", "--device", "gpu"], "--device must be cpu, cuda or cuda:NUMBER"),
    "GPUs": (
        ["--prompt", "A", "--device", "cuda:1"],
        "--device must be one of this host, which has 1 GPU, got cuda:1",
    ),
}


@pytest.mark.parametrize("words, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_by_flag_before_anything_is_loaded(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("sys.argv", ["fla-cp-generate"])
    monkeypatch.setattr("fla_cp.train.generate.load", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin1"))
    assert generate_main([str(tmp_path), "--device", "cpu", *words]) == 2
    shown = message.replace("RUN", str(tmp_path))
    assert f"error: {shown}" in capsys.readouterr().err


def test_a_run_that_does_not_exist_is_said_so(tmp_path, capsys):
    for path, problem in (("nowhere", "does not exist"), ("", "holds no complete one")):
        assert generate_main([str(tmp_path / path), "--device", "cpu", "--prompt", "A"]) == 2
        rule = "error: RUN must be a run folder or a checkpoint; "
        assert capsys.readouterr().err == f"{rule}{tmp_path / path} {problem}\n"


def test_a_prompt_without_tokens_is_named():
    model = random_model(MODELS["kimi"]).eval()
    with pytest.raises(ValueError, match="at least one token, got none in prompt 2"):
        generate(model, [[65], []], 1)
    with pytest.raises(ValueError, match="at least one token, got no prompts"):
        generate(model, [], 1)


def test_the_page_has_every_option(capsys):
    assert missing_options(generate_main, capsys, "generation.md") == set()

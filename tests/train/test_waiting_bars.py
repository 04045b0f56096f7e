"""Bars for what one waits for: what they show, who shows none, and where they are used."""

import io
import multiprocessing
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fla_cp.train.export
import fla_cp.train.main
import fla_cp.train.pretokenize
from fla_cp.train import (
    checkpoint,
    evaluate,
    export,
    generate,
    init_from,
    pretokenize,
    saver,
    stock_weights,
    tokenised,
    waiting_bars,
    weights,
)
from fla_cp.train.model import compile_blocks
from fla_cp.train.waiting_bars import shown
from tests.support.exported import MODELS, QWEN, TINY, random_run
from tests.support.processes import ROOT, environment
from tests.support.stock_folders import FLAGS, save_stock
from tests.support.tokenizers import TEXT, save_tokenizer

LIMIT_S = 30.0


class Terminal(io.StringIO):
    """What stderr is at a keyboard."""

    def isatty(self):
        return True

    def wait_for(self, text):
        end = time.monotonic() + LIMIT_S
        while text not in self.getvalue():
            assert time.monotonic() < end, f"{text!r} is not in {self.getvalue()!r}"
            time.sleep(0.01)


@pytest.fixture
def terminal(monkeypatch):
    found = Terminal()
    # pytest sets sys.stderr anew between a fixture and its test
    monkeypatch.setattr(waiting_bars, "sys", SimpleNamespace(stderr=found))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(waiting_bars, "QUIET_S", 0.0)
    monkeypatch.setattr(waiting_bars, "REDRAW_S", 0.01)
    return found


def threads():
    return [t for t in threading.enumerate() if t.name == "fla_cp-bar"]


def test_bar_counts_and_is_wiped_off(terminal):
    with shown("loading weights", 7, "tensors", done=3) as update:
        terminal.wait_for("3/7")
        update()
        update()
        terminal.wait_for("5/7")
        assert "loading weights:  71%" in terminal.getvalue()
        assert " tensors/s" in terminal.getvalue() or "? tensors/s" in terminal.getvalue()
    text = terminal.getvalue()
    assert "\n" not in text
    assert not text.rsplit("\r", 2)[-2].strip(), "the line is blank at the end"
    assert not threads()


def test_clock_goes_on_in_one_long_call(terminal):
    with shown("saving the checkpoint"):
        terminal.wait_for("saving the checkpoint: 00:00")
        terminal.wait_for("saving the checkpoint: 00:01")
    assert "it/s" not in terminal.getvalue()  # nothing is counted


def test_time_before_the_bar_counts(terminal, monkeypatch):
    monkeypatch.setattr(waiting_bars, "QUIET_S", 1.2)
    with shown("loading the checkpoint"):
        terminal.wait_for("loading")
    assert "00:00" not in terminal.getvalue()


def test_short_waits_show_nothing(terminal, monkeypatch):
    monkeypatch.setattr(waiting_bars, "QUIET_S", 1000.0)
    begin = time.monotonic()
    with shown("loading weights", 1, "tensors") as update:
        update()
    assert time.monotonic() - begin < LIMIT_S  # the end does not wait for the thread's pause
    assert not terminal.getvalue() and not threads()


def test_errors_pass_and_wipe_the_bar_off(terminal):
    def fail():
        with shown("loading weights", 1, "tensors"):
            terminal.wait_for("0/1")
            raise KeyError("broken")

    with pytest.raises(KeyError):
        fail()
    assert not threads() and not terminal.getvalue().rsplit("\r", 2)[-2].strip()


@pytest.mark.parametrize("fails", [False, True], ids=["done", "error"])
def test_compilations_of_blocks_have_a_bar(terminal, monkeypatch, fails):
    """Once `compile_blocks` was called, also after a reset of the compiler."""
    torch._dynamo.reset()
    block = SimpleNamespace(forward=None, mixer=None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **options: f)
        for _ in range(2):
            compile_blocks(SimpleNamespace(blocks=[block]))

    def backend(graph, inputs):
        terminal.wait_for("compiling the model: 00:00")
        assert len(threads()) == 1
        if fails:
            raise KeyError("broken")
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) if fails else nullcontext():
        assert double(torch.ones(())) == 2
    assert not threads() and not terminal.getvalue().rsplit("\r", 2)[-2].strip()
    before = terminal.getvalue()
    if not fails:
        double(torch.ones(()))
    assert terminal.getvalue() == before, "nothing was compiled"
    torch._dynamo.reset()


@pytest.mark.parametrize("why", ["a file", "RANK", "rank", "worker"])
def test_who_shows_none(terminal, monkeypatch, why):
    if why == "a file":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif why == "RANK":
        monkeypatch.setenv("RANK", "1")
    elif why == "rank":
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: 2)
    else:
        monkeypatch.setattr(multiprocessing, "parent_process", object)
    with shown("loading weights", 1, "tensors") as update:
        assert not threads()
        update()
    assert not terminal.getvalue()


@pytest.mark.parametrize("more", [{"TQDM_DISABLE": "1"}, {}])
def test_tqdm_can_be_turned_off(more):
    """It reads the variable when it is imported."""
    code = (
        "import sys, time; from fla_cp.train import waiting_bars as bars\n"
        "bars.QUIET_S = 0.0; sys.stderr.isatty = lambda: True\n"
        "with bars.shown('loading', 1, 'tensors') as update: time.sleep(1); update()"
    )
    given = {k: v for k, v in environment().items() if k != "TQDM_DISABLE"} | more
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, env=given, capture_output=True, text=True, check=True)
    assert ("loading" in done.stderr) == (not more)
    assert "Traceback" not in done.stderr


@pytest.fixture
def bars(monkeypatch):
    """[module, what, total, count] of all bars so far, whatever stderr is."""
    found = []

    def recorder(module):
        @contextmanager
        def recorded(what, total=None, unit="", *, done=0):
            bar = [module.__name__.rsplit(".", 1)[1], what, total, done]
            found.append(bar)

            def update():
                bar[3] += 1

            yield update

        return recorded

    modules = checkpoint, evaluate, export, generate, init_from, pretokenize, saver
    for module in (*modules, stock_weights, tokenised, weights):
        monkeypatch.setattr(module, "shown", recorder(module))
    return found


def of(bars, module, what):
    """The totals and counts of the bars of one kind."""
    return [tuple(bar[2:]) for bar in bars if bar[:2] == [module, what]]


def test_runs_have_bars(bars, tmp_path):
    pytest.importorskip("safetensors")
    flags = [*TINY.split(), *QWEN.split(), "--model.layers", "2", "--eval-every", "0"]
    flags += ["--tracker", "none"]

    def train(name, steps, *more):
        own = ["--out", str(tmp_path / name), "--max-steps", str(steps)]
        assert fla_cp.train.main.main([*flags, *own, *more]) == 0

    train("run", 2, "--checkpoint-every", "1")
    ((total, count),) = of(bars, "weights", "drawing weights")
    assert total == count > 0
    assert of(bars, "saver", "saving the checkpoint")
    assert not of(bars, "checkpoint", "loading the checkpoint")
    train("run", 3, "--resume", "auto")
    assert of(bars, "checkpoint", "loading the checkpoint") == [(None, 0)]
    assert fla_cp.train.export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    ((total, count),) = of(bars, "export", "writing the model")
    assert total == count > 0
    train("next", 1, "--init-from", str(tmp_path / "hf"))
    ((total, count),) = of(bars, "init_from", "loading weights")
    assert total == count > 0


def test_generation_and_evaluation_have_bars(bars, tmp_path):
    pytest.importorskip("matplotlib")
    model = random_run(tmp_path / "run", MODELS["kimi"]).eval()
    (tmp_path / "text.txt").write_text("A B" * 30)
    prompts = [[5] * 70, [1], [2] * 31]
    generate.generate(model, prompts, 1, chunk=31)
    assert of(bars, "generate", "reading the prompts") == [(5, 5)]
    command = [str(tmp_path / "run"), "--device", "cpu"]
    assert generate.main([*command, "--prompt", "A", "--max-new-tokens", "1"]) == 0
    assert of(bars, "generate", "loading weights") == [(None, 0)]
    command += ["--data", "synthetic", "--packs", "2", "--seq-len", "64", "--out"]
    command += [str(tmp_path / "a.png"), "--text", str(tmp_path / "text.txt")]
    command += ["--needle", "33,64", "--needle-depths", "2", "--needle-count", "1"]
    assert evaluate.main(command) == 0
    assert of(bars, "evaluate", "loading weights") == [(None, 0)]
    assert of(bars, "evaluate", "measuring the held-out loss") == [(2, 2)]
    assert of(bars, "evaluate", "reading the text") == [(2, 2)]
    assert of(bars, "evaluate", "recalling needles") == [(4, 4)]


def test_tokenising_has_bars(bars, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr(tokenised, "SHARD_BYTES", 2000)
    monkeypatch.setattr(tokenised, "PACKS_A_SHARD", 1)
    monkeypatch.setattr(pretokenize, "GROUP_BYTES", 2000)
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for i in range(200):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} {TEXT[i % len(TEXT)]} " * 3)
    data, tokenizer = f"text:{tmp_path}/text", ["--tokenizer", str(tmp_path / "tokenizer")]
    made = [data, *tokenizer, "--out", str(tmp_path / "tokens")]
    assert fla_cp.train.pretokenize.run(made) == 0
    ((total, count),) = of(bars, "pretokenize", "tokenising")
    assert total == count > 1
    flags = [*TINY.split(), "--data", data, *tokenizer, "--eval-every", "0", "--tracker", "none"]
    flags += ["--max-steps", "1", "--out", str(tmp_path / "run")]
    assert fla_cp.train.main.main([*flags, "--data.workers", "0"]) == 0
    assert sum(count for _, count in of(bars, "tokenised", "tokenising")) > 0


def test_models_of_transformers_have_a_bar(bars, tmp_path):
    pytest.importorskip("transformers", minversion="5.23")
    save_stock(tmp_path / "model", "olmo_hybrid")
    (tmp_path / "text.txt").write_text("abcdefgh \n" * 400)
    flags = ["--model", f"hf:{tmp_path}/model", "--data", f"text:{tmp_path}/text.txt"]
    flags += ["--max-steps", "1", "--tracker", "none", "--seq-len", "64", "--eval-every", "0"]
    assert fla_cp.train.main.main([*FLAGS, *flags, "--out", str(tmp_path / "run")]) == 0
    ((total, count),) = of(bars, "stock_weights", "loading weights")
    assert total == count > 0

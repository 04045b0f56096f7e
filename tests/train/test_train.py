"""Training end to end on CPU: every split gives one rank's losses, runs resume, bad steps skip.

One rank runs inside this process, through the same code; several ranks are started as a user would
start them.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fla_cp.train.advice
import fla_cp.train.main
import fla_cp.train.parity
from fla_cp import contiguous_token_ranges, zigzag_token_ranges
from fla_cp.train import memory, step, token_layout
from fla_cp.train.config import UserError
from fla_cp.train.distributed import launch as launch_ranks
from fla_cp.train.metrics import read_metrics
from fla_cp.train.model import build_model
from fla_cp.train.parse import load_toml, parse
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

TRAIN = ROOT / "launch" / "train.py"
STEPS = 20
# 2 packs of 150 tokens: no end of a chunk or a shard is the end of a pack or a document
MODEL = [
    *("--model.layers", "2", "--model.hidden-size", "32"),
    *("--model.num-heads", "2", "--model.head-dim", "16"),
]
BASE = [
    *MODEL,
    *("--device", "cpu", "--seq-len", "150", "--global-batch-size", "2", "--lr", "0.01"),
    *("--warmup-steps", "5", "--eval-every", "10", "--eval-batches", "3", "--seed", "1"),
    *("--max-steps", str(STEPS), "--checkpoint-every", "10", "--run.keep-checkpoints", "9"),
]
KEYS = [
    *("step", "loss", "eval_loss", "grad_norm", "lr", "tokens_per_second"),
    *(
        "tokens_per_second_per_gpu",
        "peak_memory_bytes",
        "exchange_ms",
        "skipped",
        "expert_load",
        "mfu",
        "exchange_under_way_ms",
        "slowest_rank",
        "wait_ms",
        "host_ms",
        "device_ms",
        "tokens",
    ),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The --data flags of a small corpus that a small model can learn."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(12)]
    for i in range(240):
        size = rng.randint(5, 60)
        (folder / f"{i}.txt").write_text(" ".join(rng.choices(words, k=size)))
    return ["--data", f"text:{folder}"]


def run_here(*flags):
    """Runs one rank in this process."""
    return fla_cp.train.main.main([*BASE, *flags])


def start(*flags, base=BASE, launcher=(), **more):
    """Starts a run as a process of its own, in a session of its own."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {k: v for k, v in environment().items() if k not in names}
    return subprocess.Popen(
        [*warm_python(), *launcher, *([] if launcher else [str(TRAIN)]), *base, *flags],
        env={**clean, **more},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=900):
    """(exit code, stdout, stderr) of a run, which is killed with its ranks after a timeout."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout} s\n{out}\n{err}")
    return process.returncode, out, err


def run_ranks(*flags, **options):
    code, out, err = finish(start(*flags, **options))
    assert code == 0, f"{out}\n{err}"
    return out


def column(run, name):
    """{step: value} of the steps that have a value."""
    return {row["step"]: row[name] for row in read_metrics(run) if row[name] is not None}


def worst_difference(actual, expected):
    assert actual.keys() == expected.keys()
    return max(abs(actual[step] - expected[step]) / abs(expected[step]) for step in expected)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, text):
    """The run folder of one rank, with checkpoints at 10 and 20."""
    run = tmp_path_factory.mktemp("reference") / "run"
    assert run_here(*text, "--out", str(run)) == 0
    return run


def test_one_rank_learns_and_writes_what_it_promises(reference, text):
    rows = read_metrics(reference)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(list(row) == KEYS for row in rows)
    # line 0 is the held-out loss of the initial weights
    assert rows[0]["loss"] is None
    assert list(column(reference, "eval_loss")) == [0, 10, 20]
    assert rows[0]["eval_loss"] == pytest.approx(math.log(256), rel=0.1)
    assert rows[-1]["eval_loss"] < 0.6 * rows[0]["eval_loss"]
    assert all(row["grad_norm"] > 0 and row["tokens_per_second"] > 0 for row in rows[1:])
    assert rows[-1]["peak_memory_bytes"] > 2**20
    assert rows[5]["lr"] == 0.01
    assert {row["skipped"] for row in rows} == {0}
    saved = load_toml(reference / "config.toml")
    assert saved == parse([*BASE, *text, "--out", str(reference)])
    assert (reference / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((reference / "tensorboard").glob("events*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        pytest.param("--cp 4 --micro-batch-size 1", marks=pytest.mark.wide),
        pytest.param("--cp 2 --dp-shard 2", marks=pytest.mark.wide),
        pytest.param(
            "--cp 2 --dp-replicate 2 --parallel.layout zigzag --remat", marks=pytest.mark.wide
        ),
    ],
)
def test_losses_are_those_of_one_rank(split, reference, text, tmp_path):
    out = run_ranks(*text, *split.split(), "--checkpoint-every", "0", "--out", str(tmp_path / "r"))
    ranks = parse(split.split()).parallel.world_size
    assert f"started as 1 process: launching {ranks} ranks" in out
    for name in ("loss", "eval_loss", "grad_norm"):
        actual, expected = column(tmp_path / "r", name), column(reference, name)
        assert worst_difference(actual, expected) < 1e-4, name


def test_resumed_run_continues_as_if_uninterrupted(reference, text, tmp_path, monkeypatch):
    run, calls = tmp_path / "run", []

    def crash_in_step_15(*args, **kwargs):
        calls.append(1)
        if len(calls) == 15:
            raise KeyError("power cut")
        return original(*args, **kwargs)

    original = fla_cp.train.main.forward_backward
    with monkeypatch.context() as patch:
        patch.setattr(fla_cp.train.main, "forward_backward", crash_in_step_15)
        with pytest.raises(KeyError, match="power cut"):
            run_here(*text, "--out", str(run))
    assert max(column(run, "loss")) == 14
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 15, "lo')
    assert run_here(*text, "--out", str(run), "--resume", "auto") == 0
    assert column(run, "lr") == column(reference, "lr")
    for name in ("loss", "eval_loss", "grad_norm"):  # rounding may differ with memory's alignment
        assert worst_difference(column(run, name), column(reference, name)) < 1e-5, name
    assert [row["step"] for row in read_metrics(run)] == list(range(STEPS + 1))


@pytest.mark.wide
@pytest.mark.slow
def test_resumes_on_another_split(reference, text, tmp_path):
    middle = reference / "checkpoints" / "step-00000010"
    run = tmp_path / "run"
    out = run_ranks(
        *text, "--cp", "2", "--dp-shard", "2", "--resume", str(middle), "--out", str(run)
    )
    assert f"resumed from {middle} at step 10" in out
    expected = {k: v for k, v in column(reference, "loss").items() if k > 10}
    assert worst_difference(column(run, "loss"), expected) < 1e-4
    # and back: one rank reads what four ranks wrote
    again = tmp_path / "again"
    last = run / "checkpoints" / "step-00000020"
    flags = ["--resume", str(last), "--max-steps", "21", "--out", str(again)]
    assert run_here(*text, *flags) == 0
    more = tmp_path / "more"
    last = reference / "checkpoints" / "step-00000020"
    flags = ["--resume", str(last), "--max-steps", "21", "--out", str(more)]
    assert run_here(*text, *flags) == 0
    assert worst_difference(column(again, "loss"), column(more, "loss")) < 1e-4


def test_finished_or_foreign_runs_are_not_overwritten(reference, text, capsys):
    before = (reference / "metrics.jsonl").read_text()
    assert run_here(*text, "--out", str(reference)) == 2
    assert f"--out {reference} already holds a run" in capsys.readouterr().err
    assert run_here(*text, "--out", str(reference), "--resume", "auto") == 0
    assert "finished: 20 of 20 steps" in capsys.readouterr().out
    assert (reference / "metrics.jsonl").read_text() == before


def test_resume_auto_without_out_finds_the_newest_run(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [*text, "--max-steps", "2", "--eval-every", "0", "--checkpoint-every", "0"]
    assert run_here(*flags) == 0
    (run,) = Path("runs").iterdir()
    assert run.name.endswith("-tiny")
    assert run_here(*flags, "--max-steps", "3", "--resume", "auto") == 0
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    assert list(Path("runs").iterdir()) == [run]
    assert run_here(*text, "--max-steps", "3", "--resume", "nowhere") == 2
    assert "nowhere does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_step_that_is_not_finite_is_skipped(poison, text, tmp_path, monkeypatch, capsys):
    weights = {}

    def poisoned(model, *args, **kwargs):
        share = original(model, *args, **kwargs)
        step = len(weights) + 1
        weights[step] = [p.full_tensor().clone() for p in model.parameters()]
        if step == 3 and poison == "loss":
            share.fill_(math.inf)
        if step == 3 and poison == "gradient":
            next(model.parameters()).grad.to_local()[0, 0] = math.nan
        return share

    original = fla_cp.train.main.forward_backward
    monkeypatch.setattr(fla_cp.train.main, "forward_backward", poisoned)
    assert run_here(*text, "--max-steps", "6", "--out", str(tmp_path / "run")) == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 1, 1, 1]
    assert rows[3]["loss" if poison == "loss" else "grad_norm"] is None
    torch.testing.assert_close(weights[4], weights[3], rtol=0, atol=0)
    assert not torch.equal(weights[5][0], weights[4][0])
    assert all(row["loss"] and row["grad_norm"] for row in rows[4:])
    out = capsys.readouterr().out
    assert "step 3: skipped" in out
    assert "skipped steps: 1" in out


@pytest.mark.wide
@pytest.mark.slow
def test_ranks_skip_alike_where_one_has_a_nan(text, tmp_path):
    script = tmp_path / "poisoned.py"
    script.write_text(
        "import os, sys\n"
        "import fla_cp.train.main as train\n"
        "original, calls = train.forward_backward, []\n"
        "def poisoned(model, *args, **kwargs):\n"
        "    share = original(model, *args, **kwargs)\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3 and os.environ['RANK'] == '1':\n"
        "        share.fill_(float('nan'))\n"
        "    return share\n"
        "train.forward_backward = poisoned\n"
        "sys.exit(train.main())\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    flags = ["--cp", "2", "--max-steps", "6", "--out", str(tmp_path / "run")]
    run_ranks(*text, *flags, launcher=torchrun)
    rows = read_metrics(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 1, 1, 1]
    assert rows[3]["loss"] is None
    # ranks that disagreed on the skip would hang or diverge
    losses = list(column(tmp_path / "run", "loss").values())
    assert losses[-1] < losses[0]


@pytest.mark.wide
@pytest.mark.slow
def test_sigterm_writes_a_checkpoint(text, tmp_path):
    run = tmp_path / "run"
    process = start(*text, "--cp", "2", "--max-steps", "100000", "--out", str(run))
    deadline = time.monotonic() + 600
    while len(read_metrics(run)) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.terminate()
    code, out, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert "stopped on request after" in out
    last = read_metrics(run)[-1]["step"]
    assert (run / "checkpoints" / f"step-{last:08d}").is_dir()
    flags = ["--resume", "auto", "--max-steps", str(last + 1), "--out", str(run)]
    assert run_here(*text, *flags) == 0
    assert read_metrics(run)[-1]["step"] == last + 1


@pytest.mark.wide
@pytest.mark.slow
def test_parity_of_a_split(text, tmp_path):
    flags = ["--cp", "2", "--check-parity", "--parity.steps", "2"]  # test_parity.py has more tests
    out = run_ranks(*text, *flags, "--out", str(tmp_path / "run"))
    assert "parity holds" in out
    report = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert report["passed"]
    assert len(report["losses"]) == 2
    model = build_model(parse(MODEL).model, 256, 0)
    assert [row["parameter"] for row in report["rows"]] == [n for n, _ in model.named_parameters()]
    assert all(0 <= row["relative"] <= row["budget"] < 1e-3 for row in report["rows"])
    assert all(row["norm"] > 0 for row in report["rows"])
    for name in [row["parameter"] for row in report["rows"]]:
        assert name in out


@pytest.mark.wide
@pytest.mark.slow
def test_parity_of_compiled_latent_attention(text, tmp_path):
    """One graph of each block serves one rank and each of two."""
    flags = ["--cp", "2", "--compile", "--check-parity", "--parity.steps", "2"]
    flags += ["--model.pattern", "kda,mla", "--model.mla-rope"]
    assert "parity holds" in run_ranks(*text, *flags, "--out", str(tmp_path / "run"))


def test_parity_fails_on_a_wrong_gradient(text, tmp_path, monkeypatch, capsys):
    def wrong(model, batches, targets, config, ranks, check=False):
        share = original(model, batches, targets, config, ranks, check)
        if ranks.mesh.mesh_dim_names != ("fsdp",):  # the split's run, not the one-rank run
            model.blocks[1].mixer.core.dt_bias.grad.mul_(1.001)
        return share

    original = fla_cp.train.parity.forward_backward
    monkeypatch.setattr(fla_cp.train.parity, "forward_backward", wrong)
    flags = ["--check-parity", "--parity.steps", "1"]
    assert run_here(*text, *flags, "--out", str(tmp_path / "run")) == 1
    out = capsys.readouterr().out
    assert "parity FAILS" in out
    assert "(blocks.1.mixer.core.dt_bias)" in out
    assert not json.loads((tmp_path / "run" / "parity.json").read_text())["passed"]


def test_wrong_number_of_ranks_names_the_command(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--cp", "4", "--data", "text:a b"]
    parallel = parse(argv).parallel
    command = r"torchrun --nproc-per-node 4 launch/train.py --cp 4 --data 'text:a b'"
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="needs 4 ranks, but 2 were started; run:\n") as error:
        launch_ranks(parallel, argv)
    assert str(error.value).endswith(command)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"torchrun --nnodes 2 --nproc-per-node 2 launch/train\.py"):
        launch_ranks(parallel, argv)


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--data nothing", "--data: unknown data 'nothing': expected one of "),
        ("--data text:EMPTY", "--data: text: no files below "),
        ("--data hf:/no/such", "--data: hf: no file or folder at /no/such\n"),
        ("--data hf:EMPTY", "--data: 'hf:EMPTY' needs --tokenizer, the folder of a tokenizer\n"),
        (
            "--tokenizer /no/such",
            "--tokenizer must be a folder, got '/no/such', which does not exist\n",
        ),
        ("--impl triton", "--impl with --device cpu: impl='triton' runs on CUDA devices, got cpu"),
        (
            "--parallel.flash-attention-3 on",
            "--parallel.flash-attention-3 on: FlashAttention-3 needs",
        ),
    ],
)
@pytest.mark.parametrize("parity", [[], ["--check-parity"]])
def test_mistakes_leave_no_folder(flags, message, parity, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "empty").mkdir()
    flags = flags.replace("EMPTY", str(tmp_path / "empty")).split()
    assert run_here(*text, *flags, *parity) == 2
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.startswith(f"error: {message.replace('EMPTY', str(tmp_path / 'empty'))}")
    assert run_here(*text, *flags, *parity, "--out", "named") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_fewer_steps_than_the_resumed_ones_are_refused(reference, text, tmp_path, capsys):
    before = (reference / "config.toml").read_text()
    flags = ["--resume", "auto", "--out", str(reference), "--max-steps", "19"]
    assert run_here(*text, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --max-steps must be at least 20, the step of the resumed")
    assert line.endswith("step-00000020, got 19")
    assert (reference / "config.toml").read_text() == before


@pytest.mark.parametrize(
    "flags, mirrored",
    [
        ("--cp 2 --model.pattern kda,attention", True),
        ("--cp 2 --model.pattern gdn,mla", True),
        ("--cp 2 --model kimi-linear-small", True),
        ("--cp 2 --mixer kda", False),
        ("--cp 1 --model.pattern kda,attention", False),
        ("--cp 2 --model.pattern kda,mla --data.max-documents 4 --cuda-graphs on", False),
        ("--cp 2 --model.pattern kda,attention --global-batch-size 2", False),  # whole packs
    ],
)
def test_ranges_mirror_each_other_where_that_divides_attention(flags, mirrored):
    def parsed(*more):
        return parse(["--seq-len", "512", "--global-batch-size", "1", *flags.split(), *more])

    def told(config):
        lines = fla_cp.train.advice.advice(config)
        return any("nearly twice the mean work" in line for line in lines)

    config, chosen = parsed(), token_layout.layout_of(parsed())
    assert chosen == ("zigzag" if mirrored else "contiguous") and not told(config)
    for name in ("contiguous", "zigzag"):
        if "max-documents" in flags and name == "zigzag":
            continue  # refused
        given = parsed("--parallel.layout", name)
        assert token_layout.layout_of(given) == name
        assert told(given) == (mirrored and name == "contiguous")


def test_a_run_has_the_chosen_ranges():
    """Its batches, its contexts, and what fla-cp-memory predicts for it."""
    flags = [
        "--cp",
        "2",
        "--model.pattern",
        "kda,attention",
        "--seq-len",
        "512",
        "--global-batch-size",
        "1",
    ]
    config = parse(flags)
    ranks = SimpleNamespace(cp=2, rank=1, dp=1, device="cpu", cp_group=None)
    sharing = step.sharing(config, ranks)
    batch = {name: torch.arange(512)[None] for name in ("tokens", "labels")}
    share = sharing.share(batch | {"cu_seqlens": torch.tensor([0, 512], dtype=torch.int32)})
    assert share.tokens.tolist() == [[*range(128, 384)]]
    with mock.patch.object(step, "build_cp_context") as build:
        step.place(share, config, ranks)
    assert build.call_args.kwargs["token_ranges"] == zigzag_token_ranges(512, 2)
    with mock.patch.object(memory, "build_cp_context") as build:
        memory.Predictor(config, 256).context(512, None)
    assert build.call_args.kwargs["token_ranges"] == zigzag_token_ranges(512, 2)


def test_a_mistake_in_held_out_data_names_the_way_without_them(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words " * 100)
    flags = ["--data", f"text:{tmp_path / 'text'}", "--out", str(tmp_path / "run")]
    assert run_here(*flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "fewer than one pack of seq_len=" in line
    assert line.endswith("; --eval-every 0 reads no held-out data")
    assert run_here(*flags, "--eval-every", "0", "--max-steps", "1") == 0


def test_unequal_work_of_attention_is_told(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fla_cp.train.advice, "mirrored_attention", lambda config: True)
    flags = ["--max-steps", "1", "--optim.momentum", "0.9", "--out", str(tmp_path / "run")]
    flags += ["--parallel.layout", "contiguous"]
    assert run_here(*text, *flags) == 0
    shown = capsys.readouterr().out
    assert "; --parallel.layout zigzag divides it about equally" in shown
    assert "note: --optim.momentum has no effect, because --optimizer is not muon\n" in shown


@pytest.mark.parametrize(
    "flags, unused",
    [
        ("--model.gate-lower-bound -5 --mixer gdn", "--model.gate-lower-bound"),
        ("--model.gate-lower-bound -5 --model.pattern gdn,kda", ""),
        ("--model.mla-rope --model.pattern kda,attention", "--model.mla-rope"),
        ("--model.mla-rope --model.rope-theta 500 --model.pattern kda,mla", ""),
        ("--model.rope-theta 500 --model.pattern kda,mla", "--model.rope-theta"),
        ("--model.rope-scaling yarn:4", "--model.rope-scaling"),
        ("--model.rope-scaling yarn:4 --model.pattern kda,attention", ""),
        ("--data.column body --data text:A:0.5,hf:B:0.5", ""),
        ("--data.column body --data text:A", "--data.column"),
        ("--optim.decay-ratio 0.1", "--optim.decay-ratio"),
        ("--optim.decay-ratio 0.1 --schedule wsd", ""),
        ("--optim.momentum 0.9", "--optim.momentum"),
        ("--optim.momentum 0.9 --optimizer muon", ""),
    ],
)
def test_flags_without_effect_are_named(flags, unused):
    config = parse(["--seq-len", "512", *flags.split()])
    assert [name for name, _ in fla_cp.train.advice.unused_flags(config)] == unused.split()


@pytest.mark.parametrize("size", ["tiny", "340M", "1.3B", "qwen3-next-small", "kimi-linear-small"])
def test_no_size_has_flags_without_effect(size):
    assert fla_cp.train.advice.unused_flags(parse(["--model", size])) == []


def test_programs_start_without_the_compiler():
    """Importing torch._dynamo takes a second, which programs that compile nothing need not. Models
    are made on the meta device without it, too."""
    names = ", ".join(f"fla_cp.train.{n}" for n in ("main", "evaluate", "export", "generate"))
    model = "fla_cp.train.model.build_model(fla_cp.train.parse.parse([]).model, 256, 0)"
    code = f"import sys, {names}; {model}; print('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_whole_packs_say_why_nothing_is_exchanged():
    """Such a run exchanges nothing, and says why; runs with other splits do not say so."""

    def is_whole(flags):
        config = parse([*BASE, *flags.split()])
        total = (config.data.micro_batch_size or 2) * config.data.seq_len
        cut = zigzag_token_ranges if config.parallel.layout == "zigzag" else contiguous_token_ranges
        ranges = cut(total, config.parallel.cp)
        at_packs = all(edge % 150 == 0 for r in ranges for lo_hi in r for edge in lo_hi)
        assert token_layout.whole_packs(config) == (at_packs and config.parallel.cp > 1)
        return at_packs

    assert is_whole("--cp 2")
    assert not is_whole("--cp 2 --micro-batch-size 1")
    assert not is_whole("--cp 4")
    assert not is_whole("--cp 2 --parallel.layout zigzag")
    assert is_whole("--cp 2 --parallel.layout zigzag --global-batch-size 4 --micro-batch-size 4")
    assert is_whole("--cp 1")


@pytest.mark.wide
@pytest.mark.slow
def test_mistakes_end_in_one_line_on_any_number_of_ranks():
    code, _, err = finish(start("--cp", "2", "--data", "nothing"))
    assert code == 2
    assert err.splitlines() == [
        "error: --data: unknown data 'nothing': expected one of "
        "stdlib, text:PATH, memmap:PATH, hf:PATH, synthetic, needle:LENGTH, A:WEIGHT,B:WEIGHT"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_missing_gpu_is_reported(capsys):
    for ranks, counts in ((2, "2 ranks, 0 GPUs"), (1, "1 rank, 0 GPUs")):
        assert run_here("--device", "cuda", "--cp", str(ranks)) == 2
        said = f"error: --device cuda needs a GPU per local rank: {counts}\n"
        assert said in capsys.readouterr().err

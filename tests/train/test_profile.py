"""--profile: traces and tables of a range of steps, and a training that does not notice."""

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fla_cp.train.main
from fla_cp.train.config import UserError
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import parse
from fla_cp.train.profile import StepProfile
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "32", "--model.num-heads", "2"),
    *("--model.head-dim", "16", "--device", "cpu", "--seq-len", "64", "--data", "synthetic"),
    *("--global-batch-size", "1", "--eval-every", "2", "--eval-batches", "1"),
    *("--warmup-steps", "1", "--lr", "0.01", "--tracker", "none"),
]


def train(run, steps, *flags):
    return fla_cp.train.main.main([*FLAGS, "--out", str(run), "--max-steps", str(steps), *flags])


def values(run):
    names = ("step", "loss", "grad_norm", "eval_loss", "lr")
    return [[row[name] for name in names] for row in read_metrics(run)]


def files(run):
    return sorted(path.name for path in (run / "profile").glob("*"))


def traced(run, name):
    """The steps of a trace in order of time, and the names of its operators."""
    trace = json.loads((run / "profile" / name).read_text())
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in spans if event["name"].startswith("step ")]
    order = [event["name"] for event in sorted(steps, key=lambda event: event["ts"])]
    return list(dict.fromkeys(order)), {event["name"] for event in spans}


@pytest.mark.bits
def test_the_training_does_not_notice(tmp_path, capsys):
    run, plain = tmp_path / "run", tmp_path / "plain"
    assert train(plain, 5) == 0
    capsys.readouterr()
    assert train(run, 5, "--profile", "2:4") == 0
    assert values(run) == values(plain)
    assert files(run) == ["steps-2-3-rank-0.json", "steps-2-3-rank-0.txt"]
    where = f"profile of steps 2 to 3: {run}/profile/steps-2-3-rank-0.json (for ui.perfetto.dev)"
    assert f"{where} and .txt\n" in capsys.readouterr().out
    steps, operators = traced(run, "steps-2-3-rank-0.json")
    assert steps == ["step 2", "step 3"]
    assert {"aten::mm", "DeltaRuleFunction"} <= operators
    table = (run / "profile" / "steps-2-3-rank-0.txt").read_text()
    assert "Self CPU" in table and "aten::mm" in table
    assert not (plain / "profile").exists()


@pytest.mark.slow
def test_every_rank_is_profiled(tmp_path):
    run = tmp_path / "run"
    flags = [*FLAGS, "--cp", "2", "--max-steps", "3", "--out", str(run), "--profile", "3:4"]
    command = [*warm_python(), str(ROOT / "launch" / "train.py"), *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(run) == [f"steps-3-3-rank-{r}.{kind}" for r in (0, 1) for kind in ("json", "txt")]
    assert done.stdout.count("profile of steps 3 to 3") == 1
    assert "and those of the other ranks beside it" in done.stdout
    for rank in (0, 1):
        steps, operators = traced(run, f"steps-3-3-rank-{rank}.json")
        assert steps == ["step 3"]
        exchanges = {name for name in operators if name.startswith("fla_cp.")}
        whats = "states", "a convolution's halo"
        assert {f"fla_cp.exchange of {what}" for what in whats} <= exchanges
        assert {f"fla_cp.start of exchange of {what}" for what in whats} <= exchanges


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_a_gpu_is_written_beside_the_trace(tmp_path, monkeypatch, capsys, fails):
    """There is no GPU here, so this holds what is called, when, and which file is written."""
    calls, said = [], []

    def record(enabled="all", **options):
        calls.append(enabled)
        if enabled:  # frames of C++ exist on x86-64 alone
            assert options["stacks"] == "python"

    def dump(path):
        if fails:
            raise RuntimeError("no memory history")
        calls.append("dump")
        Path(path).write_bytes(b"snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    ranks = SimpleNamespace(device=torch.device("cuda"), rank=1, world_size=2)
    with StepProfile(tmp_path, range(2, 4), ranks, said.append) as profile:
        for number in range(1, 6):
            with profile.step(number):
                torch.ones(2) + 1
    assert calls == (["all", None] if fails else ["all", "dump", None])
    name = "steps-2-3-rank-1"
    if fails:
        assert "warning: --profile: rank 1: no memory history" in capsys.readouterr().err
        return
    assert files(tmp_path) == [f"{name}-memory.pickle", f"{name}.json", f"{name}.txt"]
    assert "memory in -memory.pickle (for pytorch.org/memory_viz), and those of" in said[0]


def test_memory_is_not_recorded_after_an_error(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", **_: calls.append(enabled),
    )
    ranks = SimpleNamespace(device=torch.device("cuda"), rank=0, world_size=1)
    with (
        pytest.warns(UserWarning, match="CUDA is not available"),
        pytest.raises(KeyError),
        StepProfile(tmp_path, range(1, 9), ranks, print) as profile,
        profile.step(1),
    ):
        raise KeyError("power cut")
    assert calls == ["all", None] and files(tmp_path) == []


def test_a_run_that_is_stopped_writes_what_it_has(tmp_path, monkeypatch):
    run, step = tmp_path / "run", fla_cp.train.main.Loop._step

    def stop_in_step_3(loop, feed, received):
        if loop.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(loop, feed, received)

    with monkeypatch.context() as patch:
        patch.setattr(fla_cp.train.main.Loop, "_step", stop_in_step_3)
        assert train(run, 9, "--profile", "2:8") == 0
    assert files(run) == ["steps-2-3-rank-0.json", "steps-2-3-rank-0.txt"]


def test_an_error_leaves_no_profile_on(tmp_path, monkeypatch):
    run = tmp_path / "run"

    def fail(*args, **kwargs):
        raise KeyError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(fla_cp.train.main, "forward_backward", fail)
        with pytest.raises(KeyError, match="power cut"):
            train(run, 2, "--profile", "1:2")
    assert files(run) == []
    other = tmp_path / "other"
    assert train(other, 2, "--profile", "1:2") == 0  # a second profiler may start
    assert len(files(other)) == 2


def test_a_resumed_run_profiles_what_is_left(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, 2) == 0
    assert train(run, 4, "--resume", "auto", "--profile", "2:4") == 0
    assert files(run) == ["steps-3-3-rank-0.json", "steps-3-3-rank-0.txt"]
    note = "note: --profile 2:4: the run goes on after step 2, so only those from 3 on are profiled"
    assert note in capsys.readouterr().out
    assert train(run, 5, "--resume", "auto", "--profile", "2:4") == 0
    assert len(files(run)) == 2
    note = "note: --profile 2:4: the run goes on after step 4, so nothing is profiled"
    assert note in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "profile").write_text("a file")
    assert train(run, 2, "--profile", "1:2") == 0
    assert f"warning: --profile: rank 0: [Errno 17] File exists: '{run}/profile'" in (
        capsys.readouterr().err
    )
    assert len(read_metrics(run)) == 3


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "0:3", "3:3", "4:3", "a:b", "1:2:3", "-1:2"])
def test_ranges_that_are_refused(text):
    rule = "--profile must be A:B for the steps A to B - 1, with 1 <= A < B, got"
    with pytest.raises(UserError) as refused:
        parse([f"--profile={text}", "--max-steps", "9"])
    assert str(refused.value) == f"{rule} {text!r}"


def test_ranges_end_with_the_run():
    assert parse(["--profile", "9:10", "--max-steps", "9"]).run.profiled == range(9, 10)
    with pytest.raises(UserError, match=r"--profile must end at most at 10, --max-steps \+ 1"):
        parse(["--profile", "9:11", "--max-steps", "9"])
    with pytest.raises(UserError, match="--profile must be left out with --check-parity, got 1:2"):
        parse(["--profile", "1:2", "--check-parity"])

"""Restarts: a failed run goes on in its own folder, with the losses of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fla_cp.train.main
from fla_cp.train import restart
from fla_cp.train.config import UserError
from fla_cp.train.exit_codes import DIVERGED
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import parse
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

STEPS = 12
FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "16", "--model.num-heads", "1"),
    *("--model.head-dim", "16", "--device", "cpu", "--data", "synthetic", "--seq-len", "96"),
    *("--lr", "0.01", "--warmup-steps", "2", "--max-steps", str(STEPS), "--eval-every", "0"),
    *("--checkpoint-every", "4", "--tracker", "none"),
]


def run_here(*flags):
    return fla_cp.train.main.main([*FLAGS, *flags])


def losses(run):
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(
    "codes, restarts, calls, code",
    [
        ([0], 3, 1, 0),
        ([1, 4, 0], 3, 3, 0),
        ([1, 1, 1, 1], 2, 3, 1),
        ([4], 0, 1, 4),
        ([2], 3, 1, 2),
        ([1, DIVERGED], 3, 2, DIVERGED),
        ([128 + signal.SIGTERM], 3, 1, 128 + signal.SIGTERM),
    ],
)
def test_failures_that_may_pass_are_repeated(codes, restarts, calls, code, monkeypatch, capsys):
    monkeypatch.setenv(restart.COUNT, "0")
    counts = []

    def run():
        counts.append(os.environ[restart.COUNT])
        return codes[len(counts) - 1]

    assert restart.repeat(run, restarts) == code
    assert counts == [str(i) for i in range(calls)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == calls - 1
    if said:
        assert said[0] == f"the ranks failed (exit code {codes[0]}): restart 1 of {restarts}"


def test_launcher_is_told_from_others(tmp_path):
    mine = restart.launcher()
    assert 0 <= mine < 2**63 and mine == restart.launcher()
    code = "from fla_cp.train.restart import launcher; print(launcher())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(other.stdout) != mine  # its parent is this process, not our parent
    restart.claim(tmp_path, [mine, 7, mine])
    assert restart.claimed(tmp_path, [8, mine])
    assert not restart.claimed(tmp_path, [8])
    assert restart.find([7], [tmp_path / "none", tmp_path]) == tmp_path
    for damage in ("", "[", "[]", '{"launchers": 3}', '{"launchers": [[]]}'):
        (tmp_path / "launcher.json").write_text(damage)
        assert not restart.claimed(tmp_path, [mine])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of an uninterrupted run of one rank."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_here("--out", str(run)) == 0
    return losses(run)


def crash_in_call(number, monkeypatch):
    calls, original = [], fla_cp.train.main.forward_backward

    def crashing(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise KeyError("power cut")
        return original(*args, **kwargs)

    monkeypatch.setattr(fla_cp.train.main, "forward_backward", crashing)


@pytest.mark.parametrize(  # before and after the first checkpoint
    "count, step", [(restart.COUNT, 7), ("TORCHELASTIC_RESTART_COUNT", 3)]
)
def test_restarted_rank_finds_its_run(count, step, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        crash_in_call(step, patch)
        with pytest.raises(KeyError, match="power cut"):
            run_here()
    # a newer run of another launcher, and a start by another launcher
    other = Path("runs") / "99999999-000000-tiny"
    other.mkdir()
    restart.claim(other, [1])
    monkeypatch.setenv(count, "1")
    assert run_here() == 0
    out = capsys.readouterr().out
    (run,) = [run for run in Path("runs").iterdir() if run != other]
    assert losses(run) == whole
    assert ("resumed from" in out) == (step > 4)


def test_restarted_rank_continues_in_out_only_what_is_its_own(whole, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        crash_in_call(7, patch)
        with pytest.raises(KeyError, match="power cut"):
            run_here("--out", str(run))
    before = json.loads((run / "launcher.json").read_text())
    restart.claim(run, [1])
    monkeypatch.setenv(restart.COUNT, "1")
    assert run_here("--out", str(run)) == 2
    assert f"--out {run} already holds a run" in capsys.readouterr().err
    restart.claim(run, before["launchers"])
    assert run_here("--out", str(run)) == 0
    assert losses(run) == whole


def test_restarted_rank_goes_on_in_the_run_that_it_resumed(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shorter = ["--out", "first", "--checkpoint-every", "2", "--max-steps", "4"]
    assert run_here(*shorter, "--schedule", "wsd", "--optim.decay-ratio", "0") == 0
    flags = ["--resume", "first/checkpoints/step-00000004", "--checkpoint-every", "2"]
    with monkeypatch.context() as patch:
        crash_in_call(4, patch)  # in step 8, after the checkpoint of step 6
        with pytest.raises(KeyError, match="power cut"):
            run_here(*flags)
    # by another launcher it would delete that checkpoint, by this one it goes on from it
    assert run_here(*flags) == 2
    assert "--out must be given beside --resume" in capsys.readouterr().err
    monkeypatch.setenv(restart.COUNT, "1")
    assert run_here(*flags) == 0
    assert "resumed from first/checkpoints/step-00000006 at step 6" in capsys.readouterr().out
    assert len(losses(Path("first"))) == len(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_restart_flag_is_checked():
    with pytest.raises(UserError, match="--max-restarts must be at least 0, got -1"):
        parse(["--max-restarts", "-1"])
    with pytest.raises(UserError, match="--max-restarts must be 0 with --check-parity, got 2"):
        parse(["--max-restarts", "2", "--check-parity"])
    assert parse(["--max-restarts", "2"]).parallel.max_restarts == 2


KILLED = """
import os, signal, sys, time
from pathlib import Path
import fla_cp.train.distributed, fla_cp.train.main as train
fla_cp.train.distributed.TRAIN = Path(__file__)  # what our own launcher starts as ranks
victims = VICTIMS.split(",")  # one entry a start: the rank, all, or nobody
counts = [os.environ.get(n, "0") for n in ("FLA_CP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
victim = victims[max(map(int, counts))]
original, calls = train.forward_backward, []
def killed(*args, **kwargs):
    calls.append(1)
    if len(calls) == 6 and victim in ("all", os.environ["RANK"]):
        due = f"*/checkpoints/step-{4 * (1 + max(map(int, counts))):08d}"  # written meanwhile
        while not list(Path("runs").glob(due)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
train.forward_backward = killed
sys.exit(train.main())
"""


def run_killed(folder, victims, *flags, launcher=()):
    """Runs two ranks that die as `victims` says; returns (output, the run folder)."""
    folder.mkdir()
    script = folder / "killed.py"
    script.write_text(KILLED.replace("VICTIMS", repr(victims)))
    clean = environment()
    for name in ("RANK", "WORLD_SIZE"):
        clean.pop(name, None)
    done = subprocess.run(
        [*warm_python(), *launcher, str(script), *FLAGS, "--cp", "2", *flags],
        env=clean,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (run,) = (folder / "runs").iterdir()  # a single folder, named by the time
    return done.stdout, run


@pytest.mark.wide
@pytest.mark.slow
def test_killed_ranks_come_back_with_the_losses_of_an_uninterrupted_run(tmp_path):
    _, run = run_killed(tmp_path / "whole", "nobody")
    expected = losses(run)
    assert len(expected) == STEPS

    # step 6 ends rank 1, after the restart from 4 step 10 ends both, then it goes on from 8
    out, run = run_killed(tmp_path / "own", "1,all,nobody", "--max-restarts", "2")
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    assert "rank 1 ended with exit code -9" in out
    assert "restart 2 of 2" in out
    assert "at step 4" in out and "at step 8" in out
    assert "Traceback" not in out

    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    out, run = run_killed(tmp_path / "torchrun", "all,0,nobody", launcher=torchrun)
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    assert "at step 4" in out and "at step 8" in out

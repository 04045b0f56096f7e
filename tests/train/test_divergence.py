"""A diverging run ends with an error that names the cause, and keeps its good checkpoints.

The tests run one rank in this process, except `test_one_rank_alone_sees_it`.
"""

import math
import os
import signal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fla_cp.train.main
from fla_cp.train.build import build_sharded
from fla_cp.train.config import UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.divergence import find_not_finite
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import parse
from tests.support.ranks import run_threads

BASE = [
    *("--model.layers", "2", "--model.hidden-size", "32"),
    *("--model.num-heads", "2", "--model.head-dim", "16"),
    *("--device", "cpu", "--data", "synthetic", "--seq-len", "64", "--global-batch-size", "2"),
    *("--lr", "0.01", "--warmup-steps", "0", "--eval-every", "0", "--tracker", "none"),
]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def poison(monkeypatch):
    """poison(f): after every backward, f(step, model, share) is called; steps count from 1."""

    def install(spoil):
        steps = []

        def poisoned(model, *args, **kwargs):
            steps.append(1)
            share = original(model, *args, **kwargs)
            spoil(len(steps), model, share)
            return share

        monkeypatch.setattr(fla_cp.train.main, "forward_backward", poisoned)

    original = fla_cp.train.main.forward_backward
    return install


def train(run, *flags):
    return fla_cp.train.main.main([*BASE, "--out", str(run), *flags])


def saved(run):
    return sorted(int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*"))


def error_line(capsys):
    """The text on stderr, which must be one line; nothing may report success."""
    out, err = capsys.readouterr()
    assert "finished" not in out
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    return err.strip()


def grad(model, name):
    return model.get_parameter(name).grad.to_local()


def weight(model, name):
    return model.get_parameter(name).detach().to_local()


def test_large_rate_ends_after_ten_skips_and_keeps_the_good_checkpoints(run, capsys):
    every = ["--checkpoint-every", "2", "--run.keep-checkpoints", "2"]
    assert train(run, *every, "--max-steps", "4") == 0
    assert saved(run) == [2, 4]
    capsys.readouterr()
    flags = ["--resume", "auto", "--max-steps", "40", "--lr", "1e4"]
    assert train(run, *every, *flags) == 3
    error = error_line(capsys)
    assert (
        "training diverged: steps 6 to 15 were skipped in a row (--max-skips 10); step 6" in error
    )
    assert "the gradient of embedding.weight and 39 others; all weights are finite" in error
    assert error.endswith(f"the last checkpoint is {run}/checkpoints/step-00000004")
    assert saved(run) == [2, 4]
    assert [row["skipped"] for row in read_metrics(run)] == [0] * 5 + list(range(1, 11))
    # the run goes on from there with a suitable rate
    assert train(run, *every, "--resume", "auto", "--max-steps", "6") == 0
    assert saved(run) == [4, 6]


def test_a_good_step_resets_the_count_of_skips(run, poison, capsys):
    name = "blocks.1.mixer.core.dt_bias"

    def spoil(step, model, share):
        if step in (2, 3, 5, 6, 7):
            grad(model, name)[3] = math.nan

    poison(spoil)
    flags = ["--max-steps", "20", "--max-skips", "3", "--checkpoint-every", "1"]
    assert train(run, *flags) == 3
    error = error_line(capsys)
    assert "steps 5 to 7 were skipped in a row (--max-skips 3); step 5 had loss" in error
    assert f"gradient norm nan; not finite: the gradient of {name}; all weights are" in error
    assert saved(run) == [1, 4]
    assert read_metrics(run)[-1]["skipped"] == 5


def test_weights_that_are_not_finite_are_named(run, poison, capsys):
    def spoil(step, model, share):
        if step == 1:  # like weights after the update of a step
            weight(model, "blocks.0.ffn.up.weight")[1, 1] = math.nan
            weight(model, "blocks.1.ffn.up.weight")[0, 0] = math.inf

    poison(spoil)
    assert train(run, "--max-steps", "20", "--max-skips", "2") == 3
    error = error_line(capsys)
    assert "steps 2 to 3 were skipped" in error
    assert (
        "not finite: the weights of blocks.0.ffn.up.weight and 1 other; the gradient of " in error
    )
    assert error.endswith("there is no checkpoint")
    assert saved(run) == []


@pytest.mark.parametrize("every", ["0", "3"])
def test_weights_that_are_not_finite_are_not_saved(every, run, poison, capsys):
    def spoil(step, model, share):
        if step == 3:  # after the loss, like an update whose weights have had no loss yet
            weight(model, "norm.weight")[0] = math.inf

    poison(spoil)
    assert train(run, "--max-steps", "3", "--checkpoint-every", every) == 3
    error = error_line(capsys)
    assert "training diverged: after step 3 not finite: the weights of norm.weight" in error
    assert saved(run) == []


def test_run_that_ends_with_skipped_steps_has_not_finished(run, poison, capsys):
    def spoil(step, model, share):
        if step >= 4:
            share.fill_(math.inf)

    poison(spoil)
    assert train(run, "--max-steps", "5", "--checkpoint-every", "2") == 3
    error = error_line(capsys)
    assert "the last steps are missing: steps 4 to 5 were skipped in a row" in error
    assert "step 4 had loss inf and gradient norm " in error
    assert "not finite: no single gradient; all weights are finite, the largest is " in error
    assert saved(run) == [2]


def test_stop_among_skipped_steps_loses_and_drops_nothing(run, poison, capsys):
    def spoil(step, model, share):
        if step >= 3:
            share.fill_(math.nan)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    poison(spoil)
    flags = ["--max-steps", "9", "--checkpoint-every", "2", "--run.keep-checkpoints", "1"]
    assert train(run, *flags) == 0
    out = capsys.readouterr().out
    assert "stopped on request after 4 of 9 steps" in out
    assert "no checkpoint at step 4: steps 3 to 4 were skipped" in out
    assert saved(run) == [2, 4]


def test_healthy_step_reads_no_weights(run, monkeypatch):
    """Only a checkpoint reads the weights; here there is one, at the end of the run."""
    looks = []
    original = fla_cp.train.divergence.find_not_finite
    monkeypatch.setattr(
        fla_cp.train.divergence, "find_not_finite", lambda *args: looks.append(1) or original(*args)
    )
    assert train(run, "--max-steps", "4") == 0
    assert looks == [1]


def test_one_rank_alone_sees_it():
    """The shards differ, but all ranks report the same."""
    config = parse(BASE).model

    def on_rank(group, rank):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
        ranks = object.__new__(Ranks)
        values = {"rank": rank, "world_size": 3, "dp_replicate": 1}
        values.update(device=torch.device("cpu"), fsdp_mesh=mesh, host_group=group)
        for name, value in values.items():
            object.__setattr__(ranks, name, value)
        model = build_sharded(config, 64, 0, ranks, torch.float32)
        clean = find_not_finite(model, ranks)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if rank == 1:
            grad(model, "blocks.0.ffn.gate.weight")[0, 0] = 3e38  # its square is infinite
        if rank == 2:
            grad(model, "blocks.0.ffn.up.weight")[0, 0] = math.nan
            weight(model, "head.weight")[0, 0] = -math.inf
            weight(model, "norm.weight")[0] = 77.0
        return clean, find_not_finite(model, ranks)

    for clean, found in run_threads(on_rank, 3):
        assert (clean.weights, clean.gradients) == ([], [])
        assert found.weights == ["embedding.weight"]  # which is the head's
        assert found.gradients == ["blocks.0.ffn.gate.weight", "blocks.0.ffn.up.weight"]
        assert found.largest == (77.0, "norm.weight")


@pytest.mark.parametrize(
    "flag",
    [
        *("--lr", "--clip-norm", "--optim.min-lr-ratio", "--optim.weight-decay", "--optim.beta1"),
        *("--optim.beta2", "--optim.eps", "--parity.loss-budget", "--parity.grad-budget"),
        "--model.gate-lower-bound",
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
def test_numbers_must_be_finite(flag, value):
    with pytest.raises(UserError, match=f"^{flag} must be finite, got {value}$"):
        parse([f"{flag}={value}"])


def test_numbers_of_a_file_must_be_finite(tmp_path):
    (tmp_path / "c.toml").write_text("[optim]\nlr = nan\n")
    with pytest.raises(UserError, match=r"^--lr must be finite, got nan$"):
        parse(["--config", str(tmp_path / "c.toml")])

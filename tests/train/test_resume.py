"""Runs that resume or save under faults, end to end on one rank of this process."""

import os
import pickle
import resource
import shutil
import signal
import threading

import pytest

import fla_cp.train.main
import fla_cp.train.saver
from fla_cp.train.checkpoint import checkpoints
from fla_cp.train.data import StepBatchSampler
from fla_cp.train.metrics import read_metrics
from fla_cp.train.plot import read_runs
from fla_cp.train.saver import Saver
from fla_cp.train.untrusted import trusted_metadata
from tests.support.checkpoints import Evil, as_format_1, disk_of, names

FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "32", "--model.num-heads", "2"),
    *("--model.head-dim", "16", "--device", "cpu", "--seq-len", "64", "--data", "synthetic"),
    *("--global-batch-size", "1", "--eval-every", "0", "--checkpoint-every", "2"),
    *("--warmup-steps", "1", "--lr", "0.01", "--tracker", "none"),
]


def train(run, steps, *flags):
    return fla_cp.train.main.main([*FLAGS, "--out", str(run), "--max-steps", str(steps), *flags])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert train(run, 4) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "flags, before, after",
    [
        (["--mixer", "gdn"], "--model.mixer kda", "--model.mixer gdn"),
        (
            ["--model.gate-lower-bound", "-5"],
            "no --model.gate-lower-bound",
            "--model.gate-lower-bound -5.0",
        ),
        (
            ["--model.layers", "2", "--model.head-dim", "8"],
            "--model.layers 1 and --model.head-dim 16",
            "--model.layers 2 and --model.head-dim 8",
        ),
        (["--data", "stdlib"], "a vocabulary of 64 tokens (--data)", "a vocabulary of 256 tokens"),
    ],
)
def test_another_model_ends_in_one_line(flags, before, after, run, capsys):
    config = (run / "config.toml").read_text()
    assert train(run, 5, "--resume", "auto", *flags) == 2
    path = run / "checkpoints" / "step-00000004"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --resume: {path} was trained with {before}, but this run has")
    assert after in line
    assert line.endswith(f"; to continue it, use --config {run}/config.toml instead")
    # the advised file still has the options of the run
    assert (run / "config.toml").read_text() == config
    assert names(run) == ["step-00000002", "step-00000004"]
    if flags[0] == "--mixer":
        flags = ["--config", f"{run}/config.toml", "--resume", "auto", "--max-steps", "5"]
        assert fla_cp.train.main.main([*flags, "--out", str(run)]) == 0
        assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5]


def test_resumes_past_damage_and_strays(run, trained, capsys):
    root = run / "checkpoints"
    shard = root / "step-00000004" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    (root / ".partial-step-00000006").write_text("a file")
    (root / ".partial-step-00000008").symlink_to(run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    junk = [b"\xff\xfe\x00\n", b"[]\n", b'{"step": "one"}\n', b'{"step": 2, "loss": [1]}\n', b"\n"]
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], *junk, *lines[1:], b'{"step": 3, "l']))
    assert train(run, 4, "--resume", "auto") == 0
    out = capsys.readouterr().out
    assert f"{shard.parent} is damaged: {shard.name} differs from its checksum" in out
    assert "; trying the one before" in out
    assert f"resumed from {root / 'step-00000002'} at step 2" in out
    assert out.count(" is set aside as ") == 1
    assert names(run) == ["damaged-step-00000004", "step-00000002", "step-00000004"]
    losses = [row["loss"] for row in read_metrics(trained)]
    assert [row["loss"] for row in read_metrics(run)] == losses


def here(steps, *flags):
    """A run without --out; its exit code."""
    return fla_cp.train.main.main([*FLAGS, "--max-steps", str(steps), *flags])


@pytest.mark.parametrize("named", ["run", "checkpoint", "relative"])
def test_a_resumed_run_goes_on_in_its_own_folder(named, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = run / "checkpoints"
    path = {"run": run, "checkpoint": root / "step-00000004", "relative": "run"}[named]
    assert here(5, "--resume", str(path)) == 0
    shown = "run" if named == "relative" else run
    line = f"resumed from {shown}/checkpoints/step-00000004 at step 4; the run goes on in {shown}"
    assert line in capsys.readouterr().out.splitlines()
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5]
    assert names(run) == ["step-00000004", "step-00000005"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_outside_of_a_run_begins_a_folder(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loose = tmp_path / "kept" / "step-00000004"
    shutil.copytree(run / "checkpoints" / "step-00000004", loose)
    assert here(5, "--resume", str(loose)) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert f"at step 4; the run goes on in runs/{made.name}\n" in capsys.readouterr().out
    assert os.listdir(tmp_path / "kept") == ["step-00000004"]


def test_resuming_an_earlier_checkpoint_deletes_nothing_unasked(run, capsys):
    earlier = run / "checkpoints" / "step-00000002"
    assert here(5, "--resume", str(earlier)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: --out must be given beside --resume {earlier}, since {run} has later checkpoints, "
        f"up to step-00000004: --out {run} deletes them, and another folder keeps them"
    )
    assert names(run) == ["step-00000002", "step-00000004"]
    assert here(5, "--resume", str(earlier), "--out", str(run)) == 0
    assert f"removed {run}/checkpoints/step-00000004" in capsys.readouterr().out


def test_a_new_run_deletes_no_checkpoints_of_a_folder_without_metrics(run, capsys):
    """Such as a folder that holds a copy of another run's checkpoints."""
    (run / "metrics.jsonl").unlink()
    before = names(run)
    assert train(run, 6) == 2
    assert f"error: --out {run} already holds a run; continue it with" in capsys.readouterr().err
    assert names(run) == before


def test_a_comparison_in_the_folder_of_a_run_leaves_its_configuration(run):
    before = (run / "config.toml").read_text()
    assert train(run, 4, "--check-parity", "--parity.steps", "1") == 0
    assert (run / "parity.json").exists() and (run / "config.toml").read_text() == before


def test_a_run_without_steps_left_says_so_and_makes_no_folder(run, tmp_path, capsys):
    before = (run / "config.toml").read_text()
    last = run / "checkpoints" / "step-00000004"
    line = (
        f"finished: 4 of 4 steps are in {last}, so there is nothing to train; a larger --max-steps "
        "trains on"
    )
    for flags in ([], ["--out", str(tmp_path / "new")]):
        assert here(4, "--resume", str(run), *flags) == 0
        assert capsys.readouterr().out.splitlines() == [line]
    assert not (tmp_path / "new").exists()
    assert (run / "config.toml").read_text() == before


def test_auto_says_where_it_found_no_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "a", 1, "--resume", "auto") == 0
    line = f"--resume auto found no checkpoint in {tmp_path}/a: the run starts afresh, in "
    assert f"{line}{tmp_path}/a\n" in capsys.readouterr().out
    assert here(1, "--resume", "auto") == 0
    (made,) = (tmp_path / "runs").iterdir()
    line = "--resume auto found no checkpoint in runs/*-tiny: the run starts afresh, in "
    assert f"{line}runs/{made.name}\n" in capsys.readouterr().out


def test_foreign_checkpoint_is_refused_unless_trusted(run, tmp_path, capsys):
    path, marker = run / "checkpoints" / "step-00000004", tmp_path / "marker"
    metadata = trusted_metadata((path / ".metadata").read_bytes())
    metadata.planner_data = Evil(marker)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    as_format_1(path)
    flags = ["--resume", str(path)]
    assert train(tmp_path / "mine", 5, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "asks for os.makedirs" in line and "--run.trust-checkpoint loads it" in line
    assert not marker.exists()
    assert train(tmp_path / "mine", 5, *flags, "--run.trust-checkpoint") == 0
    assert marker.exists()
    assert "is of format 1: it has no checksums" in capsys.readouterr().out


def test_damage_everywhere_ends_in_one_line(run, capsys):
    for path in checkpoints(run):
        (path / "trainer.json").write_bytes(b"")
    for _ in range(2):
        assert train(run, 5, "--resume", "auto") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "step-00000002 is damaged: trainer.json is not valid JSON" in line
        assert "to start afresh: --resume none" in line
    assert train(run, 5, "--resume", str(run / "checkpoints" / "step-00000004")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-00000004 is damaged: trainer.json is not valid JSON" in line
    assert len(read_metrics(run)) == 4


@pytest.mark.parametrize("recorded", [True, False])
def test_another_batch_size_goes_on_behind_the_last_pack(recorded, tmp_path, monkeypatch):
    """recorded: False for checkpoints of versions that did not record the packs."""
    read, packs = [], StepBatchSampler.packs
    monkeypatch.setattr(
        StepBatchSampler, "packs", lambda *given: read.append(given[1:]) or packs(*given)
    )
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        if not recorded:
            patch.setattr(
                fla_cp.train.saver, "asdict", lambda p: {"step": p.step, "skipped": p.skipped}
            )
        assert train(run, 2) == 0
    assert train(run, 3, "--resume", "auto", "--global-batch-size", "4") == 0
    assert train(run, 5, "--resume", "auto", "--global-batch-size", "3") == 0
    assert list(dict.fromkeys(read)) == [(0, 1), (1, 2), (2, 6), (6, 9), (9, 12)]
    (axis,) = read_runs([run], "tokens")
    assert axis.series("loss")[0] == [64 * packs for packs in (1, 2, 6, 9, 12)]


def test_tokens_are_counted_on_with_another_pack(run, monkeypatch):
    read, packs = [], StepBatchSampler.packs
    monkeypatch.setattr(
        StepBatchSampler, "packs", lambda *given: read.append(given[1:]) or packs(*given)
    )
    assert train(run, 5, "--resume", "auto", "--seq-len", "32") == 0
    assert [row["tokens"] for row in read_metrics(run)] == [64, 128, 192, 256, 288]
    assert read == [(8, 9)]  # behind 256 tokens
    assert train(run, 7, "--resume", "auto", "--seq-len", "128", "--checkpoint-every", "1") == 0
    assert train(run, 8, "--resume", "auto", "--seq-len", "128") == 0
    assert read[1:] == [(2, 3), (3, 4), (4, 5)]


def test_full_disk_costs_periodic_checkpoints_only(tmp_path, monkeypatch, capsys):
    steps = []

    def freed(self, model, optimizer, progress):
        steps.append(progress.step)
        if len(steps) == 2:  # the disk is free again once the first checkpoint has failed
            self.wait()
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        start(self, model, optimizer, progress)

    start = Saver.start
    monkeypatch.setattr(Saver, "start", freed)
    with disk_of(100_000):
        assert train(tmp_path / "run", 5) == 0
    out = capsys.readouterr().out
    (warning,) = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert "the checkpoint of step 2 could not be written: [Errno 27]" in warning
    assert names(tmp_path / "run") == ["step-00000004", "step-00000005"]


def test_last_checkpoint_that_fails_is_an_error(run, capsys):
    with disk_of(100_000):
        assert train(run, 5, "--resume", "auto") == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: the checkpoint of step 5 could not be written: [Errno 27]")
    assert line.endswith("; the last whole one is of step 4")
    assert "finished" not in captured.out
    assert len(read_metrics(run)) == 5
    # the same if the checkpoint of the last step is periodic
    with disk_of(100_000):
        assert train(run, 6, "--resume", "auto") == 2
    assert "the checkpoint of step 6 could not be written" in capsys.readouterr().err
    assert names(run) == ["step-00000002", "step-00000004"]


def test_stop_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    def held(handle):  # the checkpoint of step 2 is written once step 3 was asked to stop
        if threading.current_thread() is not threading.main_thread():
            assert asked.wait(60)
        fsync(handle)

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            asked.set()
        return original(*args, **kwargs)

    calls, fsync, asked = [], os.fsync, threading.Event()
    original = fla_cp.train.main.forward_backward
    monkeypatch.setattr(fla_cp.train.main, "forward_backward", stopping)
    monkeypatch.setattr(os, "fsync", held)
    assert train(tmp_path / "run", 9) == 0
    # a signal in step 3 is agreed on with the batch of step 4, which is read while step 3 runs
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3
    assert names(tmp_path / "run") == ["step-00000002", "step-00000003"]


def test_crash_keeps_the_pending_checkpoint(tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("power cut")
        return original(*args, **kwargs)

    calls, original = [], fla_cp.train.main.forward_backward
    monkeypatch.setattr(fla_cp.train.main, "forward_backward", crash)
    with pytest.raises(KeyError, match="power cut"):
        train(tmp_path / "run", 9)
    assert names(tmp_path / "run") == ["step-00000002"]

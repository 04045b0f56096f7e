"""Starting ranks: errors for a wrong number, who can reach them, their end with the launcher."""

import os
import signal
import subprocess
import sys

import pytest

import fla_cp.train.main
from fla_cp.train.checkpoint import checkpoints, step_of
from fla_cp.train.config import UserError
from fla_cp.train.distributed import joined
from fla_cp.train.distributed import launch as launch_ranks
from fla_cp.train.loopback import LoopbackRendezvous
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parent import LAUNCHER, STARTED
from fla_cp.train.parse import load_toml, parse, to_toml
from tests.support.processes import (
    ROOT,
    alive,
    children,
    environment,
    is_loopback,
    listening,
    wait_for,
)

FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "16", "--model.num-heads", "1"),
    *("--model.head-dim", "16", "--device", "cpu", "--data", "synthetic", "--seq-len", "64"),
    *("--eval-every", "0", "--checkpoint-every", "5"),
]
RANK = """
import ctypes, sys, time
from fla_cp.train.parent import end_with_launcher
print(end_with_launcher(), flush=True)
# like a rank that hangs in C: it sleeps, and no other thread of Python gets to run
ctypes.PyDLL(None).sleep(600)
"""


def clean(**more):
    """The environment of this process without the variables of a launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rest = {k: v for k, v in environment().items() if k not in (*names, STARTED, LAUNCHER)}
    return {**rest, **more}


def test_children_find_what_this_process_finds(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    assert environment()["PYTHONPATH"] == os.pathsep.join([str(ROOT), "/somewhere/else"])
    monkeypatch.delenv("PYTHONPATH")
    assert environment(A="b")["PYTHONPATH"] == str(ROOT)


def start(command, tmp_path, **environment):
    """A process in a session of its own that writes to tmp_path/out."""
    with open(tmp_path / "out", "w") as out:
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=clean(**environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(*pids):
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "started, flags, message",
    [
        (
            2,
            "",
            "cp 1 x dp-shard 1 x dp-replicate 1 needs 1 rank, but 2 were started; to use them "
            "all, give --cp 2 (together they share a sequence) or --dp-shard 2 (each takes its own "
            "packs)",
        ),
        (
            8,
            "--cp 2 --dp-replicate 2",
            "cp 2 x dp-shard 1 x dp-replicate 2 needs 4 ranks, but 8 were started; to use them "
            "all, give --cp 4 (together they share a sequence) or --dp-shard 2 (each takes its own "
            "packs)",
        ),
    ],
)
def test_ranks_to_spare_are_told_the_flags_that_use_them(started, flags, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(UserError) as error:
        launch_ranks(parse(flags.split()).parallel, flags.split())
    assert str(error.value) == message
    for advice in ("--cp", "--dp-shard"):
        value = message.partition(f"{advice} ")[2].split()[0]
        config = parse([*flags.split(), "--global-batch-size", "8", advice, value])
        assert launch_ranks(config.parallel, []) is None, "the advised flags are those of a rank"


@pytest.mark.parametrize(
    "started, flags, shards",
    [(8, "--cp 2", 4), (8, "--cp 2 --dp-replicate 4", 1), (1, "", 1), (1, "--cp 4", 1)],
)
def test_dp_shard_minus_one_is_what_is_left(started, flags, shards, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(started))
    config = parse([*flags.split(), "--dp-shard", "-1", "--global-batch-size", "8"])
    assert config.parallel.dp_shard == shards
    assert f"dp_shard = {shards}\n" in to_toml(config)
    if started > 1:
        assert launch_ranks(config.parallel, []) is None


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--cp 3",
            "--dp-shard -1 needs a multiple of cp * dp-replicate = 3 * 1 ranks, but 8 were started",
        ),
        (
            "--global-batch-size 2",
            "--global-batch-size must be a multiple of dp-shard * dp-replicate = 8 * 1, got 2",
        ),
        ("--cp 0", "--cp must be at least 1, got 0"),
        ("--dp-shard 0", "--dp-shard must be at least 1, or -1 for what is left, got 0"),
    ],
)
def test_what_dp_shard_minus_one_cannot_be(flags, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError) as error:
        parse(["--dp-shard", "-1", *flags.split()])
    assert str(error.value) == message


def test_each_start_of_ranks_meets_at_a_new_store_on_the_loopback():
    handler = LoopbackRendezvous("run")
    before = listening(os.getpid())
    first = handler.next_rendezvous()
    first.store.set("key", "of ranks that failed")
    second = handler.next_rendezvous()
    found = set(listening(os.getpid())) - set(before)
    places = [info.bootstrap_store_info for info in (first, second)]
    assert found == {(place.master_addr, place.master_port) for place in places}
    assert all(is_loopback(address) for address, _ in found)
    assert not second.store.check(["key"])
    del first, second, places
    assert listening(os.getpid()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has another name")
def test_ranks_of_one_host_talk_over_the_loopback_unless_told_otherwise(monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    parallel = parse(["--device", "cpu"]).parallel
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with joined(parallel):
        assert [os.environ[name] for name in names] == ["lo", "lo"]
    monkeypatch.setenv(names[1], "ib0")
    with joined(parallel):
        assert [os.environ[name] for name in names] == ["lo", "ib0"]
    # a host of several: its ranks must reach the others
    monkeypatch.delenv(names[0])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with joined(parallel):
        assert names[0] not in os.environ


def test_rank_dies_with_its_launcher_in_c_code_and_stopped(tmp_path):
    """The launcher does not import torch, so that the test is fast."""
    launcher = (
        "import os, subprocess, sys\n"
        f"os.environ['{LAUNCHER}'] = str(os.getpid())\n"
        "ranks = [subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)\n"
        "         for _ in range(2)]\n"
        "ranks[0].wait()\n"
    )
    command = [sys.executable, "-c", launcher, RANK]
    process = start(command, tmp_path, **{STARTED: "run"})
    ranks = []
    try:
        wait_for("ranks", lambda: (tmp_path / "out").read_text() == "True\nTrue\n")
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        process.kill()
        process.wait()
        wait_for("the end of the ranks", lambda: not any(map(alive, ranks)))
    finally:
        end(process.pid, *ranks)


def test_process_without_a_launcher_outlives_its_parent(tmp_path):
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"
    process = start([sys.executable, "-c", parent, RANK], tmp_path)
    ranks = []
    try:
        wait_for("the process", lambda: (tmp_path / "out").read_text() == "False\n")
        ranks = children(process.pid)
        process.kill()
        process.wait()
        (rank,) = ranks
        # a signal from its parent's death would have come before the parent could be waited for
        assert alive(rank)
    finally:
        end(process.pid, *ranks)


def test_rank_that_begins_after_its_launcher_ended_ends_too(tmp_path):
    process = start([sys.executable, "-c", RANK], tmp_path, **{STARTED: "run", LAUNCHER: "1"})
    try:
        assert process.wait(60) == 1
    finally:
        end(process.pid)
    text = (tmp_path / "out").read_text()
    assert text == "error: launcher 1 ended before this rank began\n"


@pytest.mark.slow
def test_ranks_end_with_a_killed_torchrun(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = start([*torchrun, "--nproc-per-node", "2", "rank.py"], tmp_path, OMP_NUM_THREADS="1")
    ranks = []
    try:
        wait_for("ranks", lambda: (tmp_path / "out").read_text().count("True\n") == 2)
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.kill()
        process.wait()
        wait_for("the end of the ranks", lambda: not any(map(alive, ranks)))
    finally:
        end(process.pid, *ranks)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_alone_unreachable_and_ends_with_its_launcher(tmp_path, capsys):
    run = tmp_path / "run"
    flags = [*FLAGS, "--out", str(run)]
    split = ["--cp", "2", "--dp-shard", "-1", "--max-steps", "1000000"]
    process = start([sys.executable, str(ROOT / "launch" / "train.py"), *flags, *split], tmp_path)
    ranks = []
    try:

        def begun():
            assert process.poll() is None, (tmp_path / "out").read_text()
            return checkpoints(run)

        wait_for("a checkpoint", begun)
        ranks = children(process.pid)
        assert len(ranks) == 2
        assert load_toml(run / "config.toml").parallel.dp_shard == 1

        places = {pid: listening(pid) for pid in (process.pid, *ranks)}
        assert places[process.pid], "the launcher hosts the store that ranks meet at"
        assert all(is_loopback(address) for found in places.values() for address, _ in found)

        # a second run in this folder
        before = (run / "config.toml").read_bytes()
        assert fla_cp.train.main.main([*flags, "--resume", "auto"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: run folder {run} is in use by process {ranks[0]} on host ")
        assert (run / "config.toml").read_bytes() == before

        # one rank is stopped, so the other waits in a collective; then the launcher is killed
        os.kill(ranks[1], signal.SIGSTOP)
        process.kill()
        process.wait()
        wait_for("the end of the ranks", lambda: not any(map(alive, ranks)))
    finally:
        end(process.pid, *ranks)
    last = step_of(checkpoints(run)[-1])
    resume = [*flags, "--resume", "auto", "--max-steps", str(last + 1)]
    # threads of a killed rank may hold its lock for a moment after its main thread has ended
    wait_for("the run folder to be free", lambda: fla_cp.train.main.main(resume) == 0, 20)
    assert [row["step"] for row in read_metrics(run)] == list(range(1, last + 2))

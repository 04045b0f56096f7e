"""`python -m fla_cp.train.torchrun` ends as its ranks do; torchrun itself always ends with 1."""

import signal
import subprocess
import sys

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fla_cp.train.exit_codes import DIVERGED, FAILED, HUNG, MISTAKE
from fla_cp.train.torchrun import GRACE, first_failure, main
from tests.support.processes import PATIENCE, ROOT, environment, wait_for
from tests.support.warm_python import warm_python

OURS, THEIRS = "fla_cp.train.torchrun", "torch.distributed.run"

RANK = """
import os, signal, sys, time
from pathlib import Path
folder, ends = Path(sys.argv[1]), sys.argv[2].split(",")
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / f"{rank}-{attempt}").touch()
while len(list(folder.glob(f"*-{attempt}"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # torchrun ends ranks that have not started yet, too
end = ends[min(attempt, len(ends) - 1)].split("+")[int(rank)]
if end == "wait":
    time.sleep(600)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""


def launch(module, tmp_path, ends, *flags):
    """The exit code, what was printed to stderr, and which ranks were started in which attempt.

    ends: for each attempt what each rank does: it exits with a code, waits or kills itself.
    """
    (tmp_path / "rank.py").write_text(RANK)
    started = tmp_path / "started"
    started.mkdir()
    command = [*warm_python(), "-m", module, "--standalone", "--nproc-per-node", "2", *flags]
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py"), str(started), ends],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr, sorted(path.name for path in started.iterdir())


@pytest.mark.parametrize(
    "ends, code",
    [
        ("0+0", 0),
        (f"wait+{MISTAKE}", MISTAKE),
        (f"{DIVERGED}+wait", DIVERGED),
        (f"{HUNG}+wait", HUNG),
        ("wait+7", FAILED),
        ("kill+wait", FAILED),
    ],
)
def test_ends_with_the_code_of_the_first_rank_that_failed(ends, code, tmp_path):
    found, shown, started = launch(OURS, tmp_path, ends)
    assert found == code, shown
    assert started == ["0-0", "1-0"]
    assert "Traceback" not in shown
    if code in (MISTAKE, DIVERGED, HUNG):
        rank = ends.split("+").index(str(code))
        assert f"rank {rank} ended with exit code {code}\n" in shown


def test_torchrun_itself_hides_the_code(tmp_path):
    assert launch(THEIRS, tmp_path, f"wait+{MISTAKE}")[0] == 1


@pytest.mark.parametrize("code", [MISTAKE, DIVERGED])
def test_what_would_end_in_the_same_way_is_not_restarted(code, tmp_path):
    ends = f"kill+wait,wait+{code},0+0"
    found, shown, started = launch(OURS, tmp_path, ends, "--max-restarts", "3")
    assert found == code, shown
    assert started == ["0-0", "0-1", "1-0", "1-1"]


def test_other_failures_are_restarted(tmp_path):
    ends = f"kill+wait,{HUNG}+wait,0+0"
    found, shown, started = launch(OURS, tmp_path, ends, "--max-restarts", "2")
    assert found == 0, shown
    assert len(started) == 6


def test_arguments_are_torchruns(tmp_path):
    found, shown, _ = launch(OURS, tmp_path, "0+0", "--nproc-per-nodes", "2")
    assert found == MISTAKE
    assert "--nproc-per-nodes" in shown and "usage:" in shown


STOPPED = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def stop(*_):
    time.sleep(1)
    (folder / f"last-{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / f"first-{rank}").touch()
time.sleep(600)
"""


def test_ranks_finish_after_a_signal(tmp_path):
    (tmp_path / "rank.py").write_text(STOPPED)
    process = subprocess.Popen(
        [sys.executable, "-m", OURS, "--standalone", "--nproc-per-node", "2", "rank.py", "."],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for("both ranks to start", lambda: len(list(tmp_path.glob("first-*"))) == 2)
        process.send_signal(signal.SIGTERM)
        _, shown = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == FAILED
    assert shown.endswith("error: ended by SIGTERM\n") and "Traceback" not in shown
    assert sorted(path.name for path in tmp_path.glob("last-*")) == ["last-0", "last-1"]


@pytest.mark.parametrize("flags, seconds", [((), GRACE), (("--shutdown-timeout", "5"), 5)])
def test_how_long_ranks_may_take_after_a_signal(flags, seconds, monkeypatch):
    found = []
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # restored afterwards
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    monkeypatch.setattr(
        torch.distributed.run,
        "elastic_launch",
        lambda config, entrypoint: lambda *words: found.append(config),
    )
    assert main([*flags, "rank.py"]) == 0
    assert [config.shutdown_timeout for config in found] == [seconds]
    assert 30 < GRACE < 300
    assert "TERM@300" in (ROOT / "launch/slurm.sh").read_text()
    assert "terminationGracePeriodSeconds: 300" in (ROOT / "launch/kubernetes.yaml").read_text()


def failures(*codes):
    ends = [ProcessFailure(n, 100 + n, code, "none") for n, code in enumerate(codes)]
    return ChildFailedError("ranks", dict(enumerate(ends)))


@pytest.mark.parametrize(
    "codes, first",
    [
        ((HUNG, -9), 1),  # rank 0 lost rank 1, which was killed
        ((HUNG, -15, -9), 2),  # the launcher sends SIGTERM
        ((HUNG, -15), 0),
        ((HUNG, DIVERGED), 1),
        ((FAILED, DIVERGED), 0),
        ((-9, HUNG), 0),
    ],
)
def test_the_rank_that_explains_the_end(codes, first):
    rank, failure = first_failure(failures(*codes))
    assert (rank, failure.exitcode) == (first, codes[first])

"""The lock of a run folder: who is refused, with what message, and what frees it."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fla_cp.train.main
from fla_cp.train.config import UserError
from fla_cp.train.lock import FileLock, RunLock

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "16", "--model.num-heads", "1"),
    *("--model.head-dim", "16", "--device", "cpu", "--data", "synthetic", "--seq-len", "64"),
    *("--max-steps", "1", "--eval-every", "0"),
]


def contents(folder):
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_second_lock_names_folder_host_and_process(tmp_path):
    with RunLock() as first, RunLock() as second:
        first.take(tmp_path)
        first.take(tmp_path)  # taking it twice changes nothing
        with pytest.raises(UserError) as error:
            second.take(tmp_path)
        written = json.loads((tmp_path / ".lock").read_text())
        assert written.keys() == {"host", "pid", "since"}
        assert str(error.value) == (
            f"run folder {tmp_path} is in use by process {os.getpid()} on host "
            f"{socket.gethostname()} since {written['since']}; end that run, or name another "
            "folder with --out"
        )
    with RunLock() as third:
        third.take(tmp_path)


def test_holder_that_has_not_yet_written_is_refused_too(tmp_path):
    with RunLock() as first, RunLock() as second:
        first.take(tmp_path)
        (tmp_path / ".lock").write_text("")
        with pytest.raises(UserError, match="is in use by another process"):
            second.take(tmp_path)


def test_a_file_that_its_holder_removes_at_the_end_is_no_lock(tmp_path, monkeypatch):
    """The holder ends after the second process has opened the file, and before its flock."""
    path, flock = tmp_path / "lock", fcntl.flock

    def late(handle, operation):
        path.unlink()
        flock(handle, operation)

    with FileLock(lambda holder: f"held by {holder}") as lock:
        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(UserError, match="held by another process"):
            lock.take(path)


def test_children_do_not_hold_the_lock(tmp_path):
    """In a process of its own, without the threads that make a fork unsafe."""
    script = (
        "import os, signal, subprocess, sys\n"
        "from pathlib import Path\n"
        "from fla_cp.train.lock import RunLock\n"
        "run = Path(sys.argv[1])\n"
        "with RunLock() as lock:\n"
        "    lock.take(run)\n"
        "    started = subprocess.Popen(['sleep', '600'], close_fds=False)\n"
        "    ready, forked = os.pipe(), os.fork()\n"
        "    if not forked:\n"
        "        os.write(ready[1], b'1')\n"
        "        signal.pause()\n"
        "    os.read(ready[0], 1)\n"
        "    os.environ['HELD'] = str(run)\n"
        '    probe = \'import fcntl, os; fcntl.flock(os.open(os.environ["HELD"] + "/.lock", \'\n'
        "    probe += 'os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)'\n"
        "    held = subprocess.run([sys.executable, '-c', probe], capture_output=True, text=True)\n"
        "with RunLock() as again:\n"
        "    again.take(run)\n"
        "os.kill(forked, signal.SIGKILL)\n"
        "started.kill()\n"
        "assert 'BlockingIOError' in held.stderr, held\n"
        "print('taken again')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout == "taken again\n", result.stderr


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    number = errno.ENOSYS
    with RunLock() as lock:
        lock.take(tmp_path)
    out = capsys.readouterr().out
    assert out.startswith(f"note: the file system of {tmp_path} has no locks (flock: Function not")
    assert out.endswith("a second run in this folder would not be noticed\n")
    number = errno.EIO
    with RunLock() as lock, pytest.raises(OSError, match="Input/output error"):
        lock.take(tmp_path)


@pytest.mark.parametrize("flags", [[], ["--resume", "auto"], ["--check-parity"]])
def test_run_in_a_folder_in_use_ends_in_one_line(flags, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("the first run's")
    with RunLock() as lock:
        lock.take(run)
        before = contents(run)
        assert fla_cp.train.main.main([*FLAGS, "--out", str(run), *flags]) == 2
        assert contents(run) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: run folder {run} is in use by process {os.getpid()} on host ")


def test_resume_auto_refuses_the_newest_run_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert fla_cp.train.main.main(FLAGS) == 0
    (run,) = Path("runs").iterdir()
    with RunLock() as lock:
        lock.take(run)
        assert fla_cp.train.main.main([*FLAGS, "--resume", "auto"]) == 2
    assert f"error: run folder {run} is in use by" in capsys.readouterr().err
    assert list(Path("runs").iterdir()) == [run]


def test_run_that_fails_frees_its_folder(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("inside the run")

    with monkeypatch.context() as patch:
        patch.setattr(fla_cp.train.main, "build_optimizer", fail)
        with pytest.raises(KeyError, match="inside the run"):
            fla_cp.train.main.main([*FLAGS, "--out", str(tmp_path)])
    with RunLock() as lock:
        lock.take(tmp_path)


def test_mistake_leaves_no_folder_for_its_lock(tmp_path, capsys):
    flags = ["--resume", str(tmp_path / "nowhere"), "--out", str(tmp_path / "new")]
    assert fla_cp.train.main.main([*FLAGS, *flags]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

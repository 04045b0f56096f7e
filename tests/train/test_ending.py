"""The end of a rank (fla_cp/train/ending.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.parent import STARTED

ROOT = Path(__file__).parents[2]

ABORTS = """
import ctypes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # stands for C++ that fails while Python ends
"""


def ended(code, **variables):
    """A process that runs the code and would abort at an ordinary end."""
    given, env = [sys.executable, "-c", ABORTS + code], os.environ | variables
    return subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True)


def test_output_that_nobody_reads_is_lost_and_the_code_stays():
    code = """
import sys
from fla_cp.train.ending import say
say("first")
sys.stdin.read()
for i in range(3):
    say("more " * 10000)
print("buffered")
sys.exit(3)
"""
    given, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(
        given, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_lines_of_a_run_that_cannot_be_written_are_lost(tmp_path):
    code = f"""
import os, sys
from fla_cp.train.ending import say_if_possible
log = os.open({str(tmp_path / "log")!r}, os.O_CREAT | os.O_WRONLY)
say_if_possible("lost")
os.dup2(log, 1)  # there is room again
say_if_possible("written")
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
say_if_possible("lost, too")
sys.exit(3)
"""
    with open("/dev/full", "w") as full:
        given = [sys.executable, "-c", code]
        result = subprocess.run(given, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (3, "")
    assert (tmp_path / "log").read_text() == "written\n"


def test_everything_of_python_is_done_first():
    code = """
import atexit, sys, threading, time
from fla_cp.train.ending import leave
def late():
    time.sleep(0.2)
    print("thread")
atexit.register(lambda: print("at exit"))
threading.Thread(target=late).start()
print("begin")
print("error", file=sys.stderr)
leave(3)
"""
    result = ended(code)
    assert result.returncode == 3
    assert (result.stdout, result.stderr) == ("begin\nthread\nat exit\n", "error\n")


@pytest.mark.parametrize(
    "entry,mistake", [("run", "--zzz"), ("run_generate", "nowhere"), ("run_evaluate", "nowhere")]
)
def test_programs_end_their_ranks_so(entry, mistake):
    code = f"import sys; sys.argv[1:] = [{mistake!r}]; from fla_cp.train.cli import {entry} as run"
    result = ended(f"{code}\nsys.exit(run())", **{STARTED: "1"})
    assert result.returncode == MISTAKE, result.stderr
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "entry,flags",
    [
        ("run", ["--help"]),
        ("run_plot", ["RUN", "--out", "OUT"]),
        ("run_memory", ["--compile", "off", "--no-longest", "--seq-len", "64"]),
    ],
)
def test_programs_end_well_if_nobody_reads_what_they_print(entry, flags, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    places = {"RUN": str(tmp_path), "OUT": str(tmp_path / "runs.png")}
    code = f"import sys; from fla_cp.train.cli import {entry} as run; sys.exit(run())"
    given = [sys.executable, "-u", "-c", code, *(places.get(flag, flag) for flag in flags)]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as unread:
        result = subprocess.run(given, cwd=ROOT, stdout=unread, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (0, "")

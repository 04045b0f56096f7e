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

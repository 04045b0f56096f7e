"""`warm_python` runs programs as Python does: their arguments, folder, output, end and ranks."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.processes import alive, environment, wait_for
from tests.support.warm_python import warm_python

SHOW = """
import json, os, sys
there = {"argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "name": __name__}
there |= {"file": globals().get("__file__"), "package": __package__, "read": sys.stdin.read()}
there |= {"one": os.environ.get("LOCAL_ONE"), "main": sys.modules["__main__"].there is there}
print(json.dumps(there))
print("wrong", file=sys.stderr)
sys.exit(3)
"""


def ended(python, words, folder, **more):
    done = subprocess.run(
        [*python, *words],
        cwd=folder,
        env=environment(**more),
        input="text",
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "__init__.py").touch()
    (tmp_path / "shown" / "__main__.py").write_text(SHOW)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("show.py", "a", "-b"),
        ("-u", "shown/../show.py"),
        ("-m", "shown.__main__", "-m"),
        ("-m", "shown", "a"),
        ("-c", SHOW, "-c", "a"),
        ("-m", "missing"),
        ("missing.py",),
        ("-c", "import os; os.abort()"),
        ("-c", "import atexit; atexit.register(print, 'end'); raise SystemExit('why')"),
    ],
)
def test_programs_run_as_those_of_python(words, folder):
    expected = ended([sys.executable], words, folder, LOCAL_ONE="1")
    assert ended(warm_python(), words, folder, LOCAL_ONE="1") == expected
    assert expected[0] != 0


HAS_TORCH = "import sys; print('torch' in sys.modules)"


def test_torch_is_there_unless_the_environment_may_change_an_import(tmp_path):
    for more, found in (({}, "True\n"), ({"TRITON_INTERPRET": "1"}, "False\n")):
        assert ended(warm_python(), ["-c", HAS_TORCH], tmp_path, **more)[1] == found
    assert ended([*warm_python(), "-W", "error"], ["-c", HAS_TORCH], tmp_path)[1] == "False\n"


@pytest.mark.parametrize("by", ["torchrun", "the trainer"])
def test_ranks_start_likewise(by, tmp_path):
    (tmp_path / "rank.py").write_text(
        "import json, os, sys, time\n"
        "warm = 'torch' in sys.modules\n"
        "from fla_cp.train.parent import end_with_launcher\n"
        "print(json.dumps([os.environ['RANK'], warm, end_with_launcher()]))\n"
    )
    words = {
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "rank.py",
        ],
        "the trainer": [
            "-c",
            "from pathlib import Path; from fla_cp.train import distributed, main;"
            "distributed.TRAIN = Path('rank.py'); main.main()",
            *("--cp", "2", "--device", "cpu"),
        ],
    }[by]
    code, shown, wrong = ended(warm_python(), words, tmp_path)
    assert code == 0, wrong
    ranks = sorted(line for line in shown.splitlines() if line.startswith("["))
    assert [json.loads(line) for line in ranks] == [["0", True, True], ["1", True, True]]


SLOW = """
import os, signal, sys, time
def stop(*_):
    print("stopped", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "sent, code, rest", [(signal.SIGTERM, 7, "stopped\n"), (signal.SIGKILL, -9, "")]
)
def test_signals_reach_the_program(sent, code, rest):
    process = subprocess.Popen(
        [*warm_python(), "-c", SLOW], stdout=subprocess.PIPE, text=True, env=environment()
    )
    child = int(process.stdout.readline())
    assert child != process.pid and alive(child)
    process.send_signal(sent)
    assert process.communicate(timeout=120)[0] == rest
    assert process.returncode == code
    wait_for("the program to end", lambda: not alive(child))


def test_a_killed_program_kills_its_client():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert ended(warm_python(), ["-c", code], os.sep) == (-signal.SIGKILL, "", "")

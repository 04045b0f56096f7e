"""The setting of torch's allocator in the trainer's processes."""

import os
import subprocess
import sys

import pytest

from fla_cp.train.allocator import GROWING, VARIABLES, let_segments_grow


def test_segments_grow(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KEPT", "1")
    let_segments_grow()
    found = os.environ.pop(VARIABLES[0])
    assert found == GROWING and VARIABLES[1] not in os.environ


@pytest.mark.parametrize("name", VARIABLES)
def test_a_setting_of_the_user_is_kept(monkeypatch, name):
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    let_segments_grow()
    assert [os.environ.get(x) for x in VARIABLES].count("max_split_size_mb:64") == 1
    assert [os.environ.get(x) for x in VARIABLES].count(None) == 1


def test_the_trainer_lets_them_grow(tmp_path):
    """The process of a rank has the setting before it uses a GPU."""
    say = "import os, atexit; atexit.register(lambda: print(os.environ.get('PYTORCH_ALLOC_CONF')))"
    run = "import sys; sys.argv = ['train', '--help']; from fla_cp.train.cli import run; run()"
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    found = subprocess.run(
        [sys.executable, "-c", f"{say}; {run}"], capture_output=True, text=True, env=clean
    )
    assert found.stdout.rstrip().endswith(GROWING), found.stdout[-200:] + found.stderr[-500:]

"""Remembered launches. The tests are in remembered_launches.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.wide
def test_remembered_launches_run_what_triton_runs():
    """In a process of its own: after tests that interpret kernels, Triton may not compile."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "TRITON_INTERP"))}
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/kernels/remembered_launches.py",
        ],
        cwd=Path(__file__).parents[2],
        env=clean,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "passed" in result.stdout and "skipped" not in result.stdout

"""Launches whose kernels are not interpreted. The tests are in the files that this one runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        "remembered_launches",
        "replayed_counts",
        "compiled_variants",
        "compiled_together",
        "replayed_packings",
        "layer_counts",
        "peer_tuned",
    ],
)
def test_launches_that_are_compiled(name):
    """In a process of its own, without conftest.py: after tests that interpret kernels, Triton may
    not compile."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "TRITON_INTERP"))}
    options = ["-q", "-p", "no:cacheprovider", "--noconftest"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/kernels/{name}.py"],
        cwd=Path(__file__).parents[2],
        env=clean,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "passed" in result.stdout and "skipped" not in result.stdout

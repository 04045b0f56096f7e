"""Decoding in a CUDA graph equals decoding without one, and calls of the model."""

import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, environment


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_in_a_graph():
    """In a process of its own, since kernels are interpreted in this one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.decoding"],
        env=environment(TRITON_INTERPRET="0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal steps" in done.stdout

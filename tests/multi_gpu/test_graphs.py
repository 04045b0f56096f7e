"""Training steps through CUDA graphs equal steps without them, also after an evaluation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "flags", ["--data.max-documents=16", "--compile off", "--compile on"], ids=lambda x: x[2:]
)
def test_steps_through_graphs(flags):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.graphs", *flags.split()],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal steps" in done.stdout

"""Training steps through CUDA graphs equal steps without them, also after an evaluation."""

import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, environment


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "flags",
    [
        *("--data.max-documents=16", "--compile off", "--compile on"),
        "--data.max-documents=16 --dtype bfloat16 --model.pattern kda,attention",
        "--data.max-documents=16 --dtype bfloat16 --model.pattern kda,mla --model.mla-rope",
    ],
    ids=lambda x: x[2:],
)
def test_steps_through_graphs(flags):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.graphs", *flags.split()],
        env=environment(TRITON_INTERPRET="0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal steps" in done.stdout

"""The host waits for the device once in a training step, as CUDA itself reports it."""

import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, environment

FLAGS = [
    *("--device", "cuda", "--data", "synthetic", "--seq-len", "1024", "--eval-every", "0"),
    *("--global-batch-size", "4", "--micro-batch-size", "2", "--clip-norm", "0.01"),
    "--tracker",
    "none",
]


@pytest.mark.parametrize(
    "cp,flags", [(1, ""), (1, "--optimizer muon"), (2, ""), (2, "--optimizer muon --workers 1")]
)
def test_the_host_waits_once_in_a_step(tmp_path, cp, flags):
    if torch.cuda.device_count() < cp:
        pytest.skip(f"{cp} ranks need {cp} GPUs, this machine has {torch.cuda.device_count()}")
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(cp)] if cp > 1 else []
    done = subprocess.run(
        [sys.executable, *start, "-m", "tests.support.waits", *FLAGS, "--cp", str(cp)]
        + [*flags.split(), "--out", str(tmp_path / "run")],
        env=environment(TRITON_INTERPRET="0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one wait in each of 4 steps" in done.stdout

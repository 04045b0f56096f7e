"""Runs the tests that compare bits, or budgets of rounding, as other processors would.

    python -m tests.processors            # every combination, one line of a table each
    python -m tests.processors -k split   # with more arguments for pytest

Torch, MKL and oneDNN choose their kernels by the features of the processor. Three environment
variables make them use fewer features; all combinations of their values are run. A value that the
processor does not support changes nothing. The exit code is 1 if a test fails anywhere.
"""

import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VALUES = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2"),
}
TESTS = {
    "bits": ["-m", "bits and not wide"],
    "budgets": [
        "tests/partition/test_segmentation.py::test_a_fold_gives_transitions_with_states",
        "tests/gpu/test_checks.py::test_the_gpu_checks_themselves",
        "tests/gpu/test_checks.py::test_the_gates_budget_is_that_of_its_terms",
        "tests/gpu/test_checks.py::test_the_gpu_checks_of_layers",
        "tests/train/test_parity.py",
        "tests/train/test_train.py::test_parity_of_a_split",
    ],
}
"""Arguments of pytest: tests that compare bits, and budgets that failed on another processor."""


def outcome(settings: dict[str, str], arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, pytest's last line without its frame, and the whole output."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments], env=os.environ | settings, cwd=ROOT, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    last = re.sub(r" in [\d.]+s.*| *=+ *", "", said.strip().splitlines()[-1])
    return done.returncode, last, said


def main(more: list[str]) -> int:
    worst = 0
    print(*(f"{name:<24}" for name in VALUES), "tests    seconds  result")
    for values in product(*VALUES.values()):
        settings = dict(zip(VALUES, values, strict=True))
        for name, arguments in TESTS.items():
            started = time.monotonic()
            code, last, said = outcome(settings, [*arguments, *more])
            seconds = time.monotonic() - started
            worst = max(worst, code)
            print(*(f"{v:<24}" for v in values), f"{name:<8} {seconds:7.0f}  {last}", flush=True)
            if code:
                print(said, file=sys.stderr, flush=True)
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

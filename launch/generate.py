"""Continues prompts with the weights of a run or a folder. The code is in fla_cp/train/generate.py.

python launch/generate.py runs/20260101-000000-tiny --prompt "Once upon a time"
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this clone's fla_cp

from fla_cp.train.cli import run_generate  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_generate())

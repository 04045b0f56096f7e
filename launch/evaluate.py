"""Evaluates the weights of a run or a folder. The code is in fla_cp/train/evaluate.py.

python launch/evaluate.py runs/20260101-000000-tiny
torchrun --nproc-per-node 4 launch/evaluate.py runs/20260101-000000-tiny --cp 4
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this clone's fla_cp

from fla_cp.train.cli import run_evaluate  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_evaluate())

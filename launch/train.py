"""Trains a language model with the sequence sharded over ranks; fla_cp/train/ has the code.

torchrun --nproc-per-node 4 launch/train.py --cp 4
torchrun launch/train.py --cp 4          # launches its four ranks itself
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this clone, installed or not

from fla_cp.train.cli import run  # noqa: E402

if __name__ == "__main__":
    sys.exit(run())

"""Trains a language model with sequences sharded over ranks. The code is in fla_cp/train/.

torchrun --nproc-per-node 4 launch/train.py --cp 4
torchrun launch/train.py --cp 4          # launches its four ranks itself
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this clone's fla_cp

from fla_cp.train.cli import run  # noqa: E402

if __name__ == "__main__":
    sys.exit(run())

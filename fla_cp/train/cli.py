"""Entry of `fla-cp-train` and of launch/train.py: says which extra is missing, then trains."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.parent import end_with_launcher

NEEDED = ("accelerate", "tyro", "tqdm", "tensorboard")
"""Packages of the extra `train`."""


def run() -> int:
    """Trains as sys.argv says; the exit code, one of fla_cp/train/exit_codes.py."""
    end_with_launcher()  # before the seconds that the other imports take
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"error: fla-cp-train needs {', '.join(missing)}: pip install 'fla_cp[train]'",
            file=sys.stderr,
        )
        return MISTAKE
    from fla_cp.train.main import main

    return main()

"""Entry point of `fla-cp-train` and launch/train.py: it trains, or says which extra is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.parent import end_with_launcher

NEEDED = ("accelerate", "tyro", "tqdm", "tensorboard")
"""Packages that the extra `train` installs."""


def run() -> int:
    """Trains as sys.argv says and returns the exit code, see fla_cp/train/exit_codes.py."""
    end_with_launcher()  # first, because the other imports take seconds
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"error: fla-cp-train needs {', '.join(missing)}: pip install 'fla_cp[train]'",
            file=sys.stderr,
        )
        return MISTAKE
    from fla_cp.train.main import main

    return main()

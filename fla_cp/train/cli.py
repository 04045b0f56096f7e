"""Entry points of the programs that need the extra `train`. They say which extra is missing.

In a rank, those that train, generate and evaluate do not return: they end the process with the
exit code (fla_cp/train/ending.py).

launch/train.py, launch/generate.py and launch/evaluate.py use them, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from fla_cp.train.ending import ended
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.parent import end_with_launcher

NEEDED = ("accelerate", "tyro", "tqdm", "tensorboard")
"""Packages that the extra `train` installs."""


def run() -> int:
    """Trains as sys.argv says and returns the exit code, see fla_cp/train/exit_codes.py."""
    end_with_launcher()  # first, because the other imports take seconds
    if _lacks("fla-cp-train", "train", NEEDED):
        return MISTAKE
    from fla_cp.train.main import main

    return ended(main())


def run_export() -> int:
    """Exports as sys.argv says and returns the exit code, see fla_cp/train/exit_codes.py."""
    needed = (*NEEDED, "safetensors", "transformers")
    if _lacks("fla-cp-export", "train,hf", needed):
        return MISTAKE
    from fla_cp.train.export import main

    return main()


def run_memory() -> int:
    """Predicts memory as sys.argv says and returns the exit code, as `run` does."""
    if _lacks("fla-cp-memory", "train", NEEDED):
        return MISTAKE
    from fla_cp.train.memory import main

    return main()


def run_plot() -> int:
    """Draws runs as sys.argv says and returns the exit code, as `run` does."""
    if _lacks("fla-cp-plot", "train,plot", (*NEEDED, "matplotlib")):
        return MISTAKE
    from fla_cp.train.plot import main

    return main()


def run_generate() -> int:
    """Generates as sys.argv says and returns the exit code, see fla_cp/train/exit_codes.py."""
    if _lacks("fla-cp-generate", "train,hf", (*NEEDED, "safetensors", "transformers")):
        return MISTAKE
    from fla_cp.train.generate import main

    return ended(main())


def run_evaluate() -> int:
    """Evaluates as sys.argv says and returns the exit code, as `run` does."""
    needed = (*NEEDED, "safetensors", "transformers", "matplotlib")
    if _lacks("fla-cp-evaluate", "train,hf,plot", needed):
        return MISTAKE
    from fla_cp.train.evaluate import main

    return ended(main())


def _lacks(program: str, extras: str, needed: Sequence[str]) -> bool:
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print(
            f"error: {program} needs {', '.join(missing)}: pip install 'fla_cp[{extras}]'",
            file=sys.stderr,
        )
    return bool(missing)

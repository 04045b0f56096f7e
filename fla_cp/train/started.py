"""What the user started, for messages that name it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parents[1] / "launch"  # in a clone


def _script(command: str) -> Path:
    return LAUNCH / f"{command.removeprefix('fla-cp-')}.py"


def program(command: str) -> str:
    """The program that was started, as a usage message names it.

    command: the installed command that does the same, such as "fla-cp-train". It is the answer
    unless a script of the folder launch, a module, or another installed command was started.
    """
    started = Path(sys.argv[0])
    if started.resolve() == _script(command):
        return f"launch/{started.name}"
    if started.resolve().parent == HERE:
        return f"python -m fla_cp.train.{started.stem}"
    return started.name if started.name.startswith("fla-cp-") else command


def for_torchrun(command: str) -> str:
    """What torchrun has to be given to start the ranks of the program that was started. command:
    see `program`."""
    name, script = program(command), _script(command)
    if name.startswith("python "):
        return name.removeprefix("python ")
    if Path(sys.argv[0]).name != command and script.exists():
        return os.path.relpath(script)
    return f"--no-python {command}"

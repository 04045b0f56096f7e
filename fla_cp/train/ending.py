"""The end of a rank: as Python ends, but without taking the interpreter apart. And output that may
have no reader any more.

After a run, threads of process groups are still alive, because torch (2.13) keeps a group once it
was given to an operator. If such a thread frees a Python object while the interpreter is taken
apart, C++ ends the process with "terminate called without an active exception". A run that was
right would then count as failed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from fla_cp.train.parent import is_rank


def ended(code: int) -> int:
    """Leaves if a launcher started this process as a rank, and returns the code otherwise."""
    return leave(code) if is_rank() else code


def say(text: str, end: str = "\n") -> None:
    """Prints a text and `end` on stdout at once. If nobody reads it, as behind `| head -1`, it is
    lost."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        silence()  # Python writes what is left when it ends, which would fail once more


def say_if_possible(text: str) -> None:
    """Prints a line of a run on stdout at once. If it cannot be written, for example because the
    disk is full, it is lost: the run must not end for it."""
    try:
        say(text)
    except OSError:
        stdout = os.dup(sys.stdout.fileno())
        silence()
        sys.stdout.flush()  # so that Python does not end with what is left, and with an error
        os.dup2(stdout, sys.stdout.fileno())
        os.close(stdout)


def silence() -> None:
    """Lets everything that is printed on stdout from now on, or waits in its buffer, be lost."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code, after its threads have ended, what was registered with
    atexit has run, and all output is written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(code)

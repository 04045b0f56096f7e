"""Ends a rank as Python would, but without finalizing the interpreter. Also prints output that may
have no reader any more.

After a run, threads of process groups are still alive, because torch (2.13) keeps a group once it
was given to an operator. If such a thread frees a Python object while the interpreter is finalized,
C++ ends the process with "terminate called without an active exception". A successful run would
then count as failed.
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
    """Ends this process (`leave`) if a launcher started it as a rank; else returns the code."""
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
    disk is full, it is lost, because the run must not end for this reason."""
    try:
        say(text)
    except OSError:
        stdout = os.dup(sys.stdout.fileno())
        silence()
        sys.stdout.flush()  # otherwise Python would write the rest at its end, and fail
        os.dup2(stdout, sys.stdout.fileno())
        os.close(stdout)


def silence() -> None:
    """Discards everything in the buffer of stdout, and everything that is printed from now on."""
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

"""Ranks end with their launcher, so that a killed one leaves none training.

A launcher (torchrun's agent, or our own) that ends in order ends its ranks. One that is killed
cannot, and it starts each rank in a session of its own, so no terminal ends them either. Each rank
therefore asks the kernel for SIGKILL when its parent ends: this reaches a rank that is stopped,
waits in a collective or holds Python's lock inside C code, where a watching thread would not run.

The kernel counts the end of the parent's thread that started the process. Launchers start their
ranks from their main thread, which lives as long as they do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "FLA_CP_LAUNCHER"  # our launcher's pid, in the environment of its ranks
STARTED = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent and by ours for each rank
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> bool:
    """Whether this process is a rank of a launcher, which the kernel now kills when that ends.

    A process that no launcher started is left alone: it may outlive its shell. Call it early, as
    only our own launcher's death before this call is noticed, and only in a process of its own.
    Raises SystemExit if our launcher has ended already.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # popped: it does not concern our own children
    if STARTED not in os.environ or sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        print(f"note: this rank may outlive a killed launcher: prctl: {reason}", file=sys.stderr)
        return False
    if launcher is not None and os.getppid() != int(launcher):
        raise SystemExit(f"error: launcher {launcher} ended before this rank began")
    return True

"""Ranks end with their launcher, so that no rank goes on training after its launcher was killed.

A launcher (torchrun's agent, or our own) that ends normally ends its ranks. A killed launcher
cannot do that, and since each rank is started in a session of its own, no terminal does it either.
Each rank therefore asks the kernel for SIGKILL when its parent ends. This signal also reaches a
rank that is stopped, waits in a collective or holds Python's lock inside C code, where a thread
that watches the parent would not run.

The kernel sends the signal when the parent's thread that started the process ends. Launchers start
their ranks from their main thread, which lives as long as they do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "FLA_CP_LAUNCHER"  # pid of our launcher, set in the environment of its ranks
STARTED = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent and by ours for each rank
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> bool:
    """Asks the kernel to kill this process when its launcher ends; whether it has a launcher.

    Without a launcher nothing is changed: the process may outlive its shell. Call this early, since
    of the launchers that ended before the call only our own is noticed, and only in a process that
    was started for the training. Raises SystemExit if our launcher has ended already.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # not for our own children
    if not is_rank() or sys.platform != "linux":
        return False
    if problem := end_with_parent():
        print(f"note: this rank may outlive a killed launcher: {problem}", file=sys.stderr)
        return False
    if launcher is not None and os.getppid() != int(launcher):
        raise SystemExit(f"error: launcher {launcher} ended before this rank began")
    return True


def is_rank() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return STARTED in os.environ


def end_with_parent() -> str:
    """Asks the kernel to kill this process when its parent ends; returns what failed, or ""."""
    if sys.platform != "linux":
        return "only Linux can do that"
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return f"prctl: {os.strerror(ctypes.get_errno())}"
    return ""

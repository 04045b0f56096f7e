"""Restarts of a failed run: by this package's launcher (--max-restarts) or by torchrun's.

Restarted ranks must find the run folder of the ranks before them, although its name contains the
time, and although it already holds metrics. A run folder therefore holds launcher.json, which
identifies the launcher processes of its ranks, one for each host. These processes survive a
restart, and no other run has the same ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from fla_cp.train.exit_codes import DIVERGED, MISTAKE

COUNT = "FLA_CP_RESTART_COUNT"
_FILE = "launcher.json"


def repeat(run: Callable[[], int], restarts: int) -> int:
    """Calls `run`, and calls it again after a failure, at most `restarts` times; the exit code.

    It is not called again after a mistake of the user or a diverged run, which would end in the
    same way, nor if a signal ended the launcher (exit codes from 128).
    """
    for attempt in range(restarts + 1):
        os.environ[COUNT] = str(attempt)
        code = run()
        if code in (0, MISTAKE, DIVERGED) or code >= 128 or attempt == restarts:
            break
        print(
            f"the ranks failed (exit code {code}): restart {attempt + 1} of {restarts}",
            file=sys.stderr,
            flush=True,
        )
    return code


def restarted() -> bool:
    """Whether this process is a rank that its launcher has restarted."""
    names = (COUNT, "TORCHELASTIC_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in names)


def launcher() -> int:
    """A 63-bit hash of the host, pid and start time of the process that started this one."""
    boot, start, parent = Path("/proc/sys/kernel/random/boot_id"), "", os.getppid()
    try:
        after_name = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        start = boot.read_text() + after_name[19]
    except (OSError, IndexError):
        pass  # without /proc: a pid is reused too rarely to matter among restarts
    text = f"{os.uname().nodename} {parent} {start}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def claim(run: Path, launchers: Iterable[int]) -> None:
    """Writes the launchers of this run's ranks into the run folder."""
    partial = run / (_FILE + ".tmp")
    partial.write_text(json.dumps({"launchers": sorted(set(launchers))}) + "\n")
    os.replace(partial, run / _FILE)


def claimed(run: Path, launchers: Iterable[int]) -> bool:
    """Whether one of these launchers started the run in this folder."""
    try:
        before = json.loads((run / _FILE).read_text())["launchers"]
        return not set(before).isdisjoint(launchers)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find(launchers: Iterable[int], runs: Iterable[Path]) -> Path | None:
    """The first of these run folders whose run one of these launchers started."""
    return next((run for run in runs if claimed(run, launchers)), None)

"""Restarts of a failed run: by this package's launcher (--max-restarts) or by torchrun's.

Ranks that were started again must find the run folder of those before them, though it is named by
the clock or already holds their own metrics. So a run folder holds launcher.json: which launcher
processes, one a host, its ranks belong to. They outlive a restart, and no other run has them.
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
    """The exit code of `run`, called again after a failure, at most `restarts` times more.

    Not after a mistake of the user's or a diverged run, which would end the same way, nor
    where a signal ended the launcher (128 and more).
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
    """Whether this process is a rank that its launcher started again."""
    names = (COUNT, "TORCHELASTIC_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in names)


def launcher() -> int:
    """A number of 63 bits for the process that started this one: of its host, pid and start."""
    boot, start, parent = Path("/proc/sys/kernel/random/boot_id"), "", os.getppid()
    try:
        after_name = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        start = boot.read_text() + after_name[19]
    except (OSError, IndexError):
        pass  # no /proc: a pid alone comes back too seldom to matter among restarts
    text = f"{os.uname().nodename} {parent} {start}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def claim(run: Path, launchers: Iterable[int]) -> None:
    """Notes in the run folder which launchers its ranks have."""
    partial = run / (_FILE + ".tmp")
    partial.write_text(json.dumps({"launchers": sorted(set(launchers))}) + "\n")
    os.replace(partial, run / _FILE)


def claimed(run: Path, launchers: Iterable[int]) -> bool:
    """Whether the folder is that of a run which one of these launchers started."""
    try:
        before = json.loads((run / _FILE).read_text())["launchers"]
        return not set(before).isdisjoint(launchers)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find(launchers: Iterable[int], runs: Iterable[Path]) -> Path | None:
    """The first of these run folders that is theirs."""
    return next((run for run in runs if claimed(run, launchers)), None)

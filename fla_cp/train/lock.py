"""A lock on the run folder, so that only one run uses it: rank 0 holds RUN/.lock while it lives.

The lock is the kernel's (flock), not the file: it ends with the process, even if that is killed, so
nothing has to be cleaned up. The file says who holds the lock, for the message to a second run.
Network file systems share the lock between hosts if they are mounted that way: NFS is, Lustre with
`-o flock`. Where locks do not exist, a note says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import weakref
from datetime import datetime
from pathlib import Path

from fla_cp.train.config import UserError

# errors of flock where the file system has no locks, or its lock server does not answer
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """A context manager that holds at most one run folder, from `take` to the end of the block."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self._run: Path | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def take(self, run: Path) -> None:
        """Locks a folder that exists, or prints that its file system has no locks.

        Does nothing if this object holds the folder already. Raises UserError that names the holder
        if another run has it, and OSError if the lock file cannot be written.
        """
        if self._run == run:
            return
        self._close()
        path = run / ".lock"
        # Python closes this descriptor on exec: programs that a rank starts do not hold the lock.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(handle, run)
            holder = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
            }
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(holder).encode() + b"\n")
            os.fsync(handle)  # so that other hosts can read it
        except BaseException:
            os.close(handle)
            raise
        self._handle, self._run = handle, run
        # A forked child, such as a data loader's worker, would hold it after the rank has ended.
        mine = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close := mine()) and close())

    def _close(self) -> None:
        # LOCK_UN in a forked child would also release the parent's lock.
        if self._handle is not None:
            os.close(self._handle)
        self._handle = self._run = None


def _flock(handle: int, run: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"run folder {run} is in use by {_holder(handle)}; end that run, or name another "
            "folder with --out"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        print(
            f"note: the file system of {run} has no locks (flock: {error.strerror}), so a second "
            "run in this folder would not be noticed",
            flush=True,
        )


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # the holder is still writing the file
        return "another process"

"""Locks on files: rank 0 of a run holds RUN/.lock while it lives, so that only one run uses it.

The lock is the kernel's (flock), not the file: it ends with the process, even if that is killed, so
nothing has to be cleaned up. The file says who holds the lock, for the message to a second one.
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
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Self

from fla_cp.train.config import UserError

# errors of flock where the file system has no locks, or its lock server does not answer
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class FileLock:
    """A context manager that holds at most one file, from `take` to the end of the block.

    refusal: the message to a second process, from the words that name the holder.
    """

    def __init__(self, refusal: Callable[[str], str]) -> None:
        self._refusal = refusal
        self._handle: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def take(self, path: Path) -> None:
        """Locks a file, which is made if need be, or prints that its file system has no locks.

        Raises UserError that names the holder if another process has it, and OSError if the file
        cannot be written.
        """
        self._close()
        # Python closes this descriptor on exec: programs that a rank starts do not hold the lock.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._flock(handle, path.parent)
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
        self._handle = handle
        # A forked child, such as a data loader's worker, would hold it after the rank has ended.
        mine = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close := mine()) and close())

    def _close(self) -> None:
        # LOCK_UN in a forked child would also release the parent's lock.
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _flock(self, handle: int, folder: Path) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(self._refusal(_holder(handle))) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            print(
                f"note: the file system of {folder} has no locks (flock: {error.strerror}), so a "
                "second run in this folder would not be noticed",
                flush=True,
            )
        if not os.fstat(handle).st_nlink:  # the holder removed the file when it ended, just now
            raise UserError(self._refusal(_holder(handle)))


class RunLock(FileLock):
    """A context manager that holds at most one run folder, from `take` to the end of the block."""

    def __init__(self) -> None:
        super().__init__(
            lambda holder: (
                f"run folder {self._run} is in use by {holder}; end that run, or name another "
                "folder with --out"
            )
        )
        self._run: Path | None = None

    def take(self, run: Path) -> None:
        """Locks a folder that exists; see FileLock.

        Does nothing if this object holds the folder already.
        """
        if self._handle is None or self._run != run:
            self._run = run
            super().take(run / ".lock")


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # the holder is still writing the file
        return "another process"

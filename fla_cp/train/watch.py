"""The watchdog of a run: it names ranks that the others wait for, and ends a hung run.

Every few seconds, a thread of each rank writes a record of the rank's state (progress.py,
outlook.py) into the store of the rendezvous; this needs no collective and nothing in the step. When
a rank has made no progress for the notice time, the lowest living rank (rank 0, unless it is the
one that is stopped) reads the records of all ranks and prints who waits for whom. After the timeout
it writes a verdict into the store, and every rank that reads it ends with exit code HUNG.

A second thread never touches the store, so that a rank also ends if the process that hosts the
store is stopped. Both threads sleep between beats and end with the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fla_cp.comm.timing import waits
from fla_cp.train.exit_codes import HUNG
from fla_cp.train.outlook import Limits, Record, Seen, explain, hung, silent
from fla_cp.train.progress import doing

_VERDICT = "verdict"
_LOST = re.compile(r"Connection (closed|reset)|Broken pipe|Socket closed|Timed out waiting", re.I)


@dataclass
class Own:
    """When this rank's main thread last made progress, as the watchdog has observed it."""

    progress: tuple[int, int]
    since: float
    looked: float

    def look(self, progress: tuple[int, int], now: float, beat: float) -> float:
        """Seconds without progress.

        Time in which this process itself was stopped does not count: a suspended machine, or
        Ctrl-Z, stops all ranks at once, and that is no hang.
        """
        gap = now - self.looked
        if gap > 3 * beat + 5:
            self.since = min(now, self.since + gap)
        if progress != self.progress:
            self.progress, self.since = progress, now
        self.looked = now
        return now - self.since


class Watch:
    """The watchdog of one rank. store: a connection that only it uses. end: ends the process."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        limits: Limits,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.store: dist.Store | None = store
        self.rank, self.world, self.limits, self.end = rank, world, limits, end
        self.table: dict[int, Seen] = {}
        self.verdict = ""
        self.beat = 0
        self.idle = 0.0
        self.answered = time.monotonic()  # when the store last answered
        self.due = limits.notice
        self.said = False
        self.host, self.pid, self.parent = socket.gethostname(), os.getpid(), os.getppid()
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=f, name=f"watch-{f.__name__}", daemon=True)
            for f in (self._guard, self._carry)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads and drops the store."""
        self.stop.set()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(5)  # a thread that waits for a stopped store stays; it is a daemon
        if not any(thread.is_alive() for thread in self.threads):
            self.store = None

    def record(self) -> Record:
        self.beat += 1
        collective, at = _stack() if self.idle >= self.limits.look else ("", "")
        return Record(
            beat=self.beat,
            host=self.host,
            pid=self.pid,
            parent=self.parent,
            step=doing.step,
            phase=doing.phase,
            wait=doing.wait or waits.now or collective,
            long=doing.long,
            calls=doing.calls,
            exchanges=waits.count,
            idle=self.idle,
            at=at,
        )

    def settle(self, error: BaseException) -> None:
        """Handles the exception that ended the main thread.

        If another rank is the cause, this ends the process without a traceback, and prints the
        cause in one line unless a verdict has done so.
        """
        if self.idle > self.limits.look:  # the others' verdict may not have arrived yet
            self._pause(3, until_verdict=True)
        if self.verdict:
            self._exit()
        if isinstance(error, RuntimeError) and (lost := _LOST.search(str(error))):
            record = self.record()
            _say(
                f"error: rank {self.rank} (host {self.host}) has lost another rank in "
                f"{_where(record)}: "
                f"{str(error).splitlines()[0][lost.start() :]}"
            )
            self._exit()

    def _exit(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.end(HUNG)

    def _pause(self, beats: float, until_verdict: bool = False) -> None:
        deadline = time.monotonic() + beats * self.limits.beat
        while time.monotonic() < deadline and not (until_verdict and self.verdict):
            time.sleep(0.1)

    # The thread that must never block.

    def _guard(self) -> None:
        own = Own(doing.progress, time.monotonic(), time.monotonic())
        due = self.limits.notice
        while not self.stop.wait(self.limits.beat):
            now = time.monotonic()
            stopped = now - own.looked > 3 * self.limits.beat + 5
            self.idle = own.look(doing.progress, now, self.limits.beat)
            if stopped:
                self.answered = now
                self.table = {}
            deaf = now - self.answered
            if deaf < self.limits.silent or doing.long:
                continue
            text = (
                f"no answer for {deaf:.0f} s from the store of the rendezvous at "
                f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, held by the "
                "launcher or, without one, by rank 0: that process is stopped, or its host cannot "
                f"be reached. Rank {self.rank} (host {self.host}) stands in {_where(self.record())}"
            )
            slack = self.limits.look + 2 * self.limits.beat
            if self.idle >= self.limits.timeout and deaf >= self.limits.timeout - slack:
                _say(f"error: the run is hung: {text}")
                self._exit()
            elif self.idle >= due and self.rank <= 1:
                _say(f"waiting: {text}")
                due = 2 * self.idle

    # The thread that exchanges records.

    def _carry(self) -> None:
        while not self.stop.wait(self.limits.beat):
            # If the launcher, or rank 0, ends at the same time as this rank, the store does not
            # answer. The main thread's collectives and the other thread handle that.
            with contextlib.suppress(RuntimeError):
                self._round()

    def _round(self) -> None:
        limits, own = self.limits, self.record()
        assert self.store is not None
        self.store.set(str(self.rank), own.to_json())
        if self.store.check([_VERDICT]):
            self.verdict = self.store.get(_VERDICT).decode()
        self.answered = now = time.monotonic()
        if self.verdict:
            return self._obey()
        if own.idle < limits.look:
            if self.said:
                _say(f"going on: step {own.step}, {own.phase}")
            self.said, self.due, self.table = False, limits.notice, {}
            return None
        for lower in range(self.rank):
            if not silent(self._look(lower, now), now, limits):
                return None  # that rank prints for all
        for other in range(self.rank + 1, self.world):
            self._look(other, now)
        self.table[self.rank] = Seen(own, now)
        table = dict(sorted(self.table.items()))
        if hung(table, now, limits):
            stopped = [seen.record for seen in table.values() if silent(seen, now, limits)]
            self.store.set(_VERDICT, "\n".join(record.to_json() for record in stopped) or "{}")
            _say(
                f"error: the run is hung: no rank has made progress for {limits.timeout:.0f} s "
                f"(--parallel.timeout-seconds): {explain(table, now, limits)}; all ranks end now, "
                "stopped ones by SIGKILL"
            )
        elif own.idle >= self.due:
            self.due = 2 * own.idle
            records = [seen.record for seen in table.values()]
            if any(record.wait or not record.long for record in records):
                _say(f"waiting for {own.idle:.0f} s: {explain(table, now, limits)}")
                self.said = True
        return None

    def _look(self, rank: int, now: float) -> Seen:
        assert self.store is not None
        record = Record.from_json(self.store.get(str(rank)))
        before = self.table.get(rank)
        if before is None or before.record.beat != record.beat:
            self.table[rank] = Seen(record, now)
        return self.table[rank]

    def _obey(self) -> None:
        """Ends this process, and stopped ranks on this host, once all have read the verdict."""
        self._pause(2)
        for line in self.verdict.splitlines():
            if line != "{}":
                _end_sibling(Record.from_json(line), self.host, self.parent)
        self._exit()


def _end_sibling(record: Record, host: str, parent: int) -> None:
    """Kills a stopped rank of this host, which does not react to the launcher's SIGTERM.

    It kills the process only if it is a child of this rank's own launcher, as the record says.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        after_name = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()
        if record.host == host and record.parent == parent == int(after_name[1]):
            os.kill(record.pid, signal.SIGKILL)


def _stack() -> tuple[str, str]:
    """The innermost function of torch.distributed that the main thread is in, or "", and its line.

    This is the only name of the collectives of FSDP and of checkpoints.
    """
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
    while frame is not None:
        if "torch/distributed/" in frame.f_code.co_filename.replace(os.sep, "/"):
            return f"{frame.f_code.co_name} of torch.distributed", at
        frame = frame.f_back
    return "", at


def _where(record: Record) -> str:
    return f"step {record.step}, {record.phase}" + f", in {record.wait}" * bool(record.wait)


def _say(text: str) -> None:
    # a single write, so that lines of several ranks do not mix
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextlib.contextmanager
def watched(
    store: dist.Store, rank: int, world: int, notice: float, timeout: float
) -> Iterator[Watch | None]:
    """The watchdog of this rank while the block runs; None if there is only one rank.

    store: must hold a first record of each rank under its number, see `meeting.meet`.
    """
    if world == 1:
        yield None
        return
    own = store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
    watch = Watch(own, rank, world, Limits.of(notice, timeout))
    watch.start()
    try:
        yield watch
    finally:
        watch.close()

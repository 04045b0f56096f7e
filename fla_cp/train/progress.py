"""What this process is doing, noted by the main thread for the watchdog's threads to read.

    mark("data", step=12)                 # a new phase; a few attributes are set, nothing is sent
    with waiting("barrier"): ...          # inside a collective of all ranks
    with announced("checkpoint"): ...     # may take long: no hang as long as the process lives

A module global, like the timer of fla_cp.comm.timing: marks are made deep inside a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fla_cp.comm.timing import waits


@dataclass
class Doing:
    """The latest mark. step: of the run, 0 before the first. phase, wait: for people; wait is ""
    outside a collective. first: the phase is slow the first time. announced: how many blocks of
    `announced` surround it. marks: grows with each change. calls: collectives of all ranks that
    were entered, the same number on each rank at the same point of the program."""

    step: int = 0
    phase: str = "start"
    wait: str = ""
    first: bool = False
    announced: int = 0
    marks: int = 0
    calls: int = 0

    @property
    def long(self) -> bool:
        """Whether the phase may take longer than the timeout."""
        return self.first or self.announced > 0

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever the main thread gets on."""
        return self.marks, waits.count


doing = Doing()


def mark(phase: str, *, step: int | None = None, first: bool = False) -> None:
    """Notes a new phase. first: it compiles or warms up, so it may take longer than the timeout."""
    if step is not None:
        doing.step = step
    doing.phase, doing.wait, doing.first = phase, "", first
    doing.marks += 1


@contextmanager
def waiting(collective: str, *, until_mark: bool = False) -> Iterator[None]:
    """Notes that the block is a collective of all ranks.

    until_mark: the block only queues it on a GPU, and what the host waits for next is its result,
    so the note stays until the next mark.
    """
    doing.wait = collective  # after an error it stays: it says where
    doing.calls += 1
    doing.marks += 1
    yield
    if not until_mark:
        doing.wait = ""
    doing.marks += 1


@contextmanager
def announced(phase: str) -> Iterator[None]:
    """Notes a phase that may take longer than the timeout, as may all phases inside."""
    doing.announced += 1
    try:
        mark(phase)
        yield
    finally:
        doing.announced -= 1
        mark(f"after {phase}")

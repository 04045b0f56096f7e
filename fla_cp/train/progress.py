"""The current activity of this process: the main thread notes it, the watchdog's threads read it.

    mark("data", step=12)                 # a new phase; sets a few attributes and sends nothing
    with waiting("barrier"): ...          # inside a collective of all ranks
    with announced("checkpoint"): ...     # may take long: no hang as long as the process lives

It is a module global, like the timer of fla_cp.comm.timing, since marks are made deep inside a
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fla_cp.comm.timing import waits


@dataclass
class Doing:
    """The latest mark.

    step: step of the run, 0 before the first one. phase, wait: texts for messages; wait is ""
    outside a collective. first: whether the phase runs for the first time and so may be slow.
    announced: number of surrounding `announced` blocks. marks: grows with each change. calls:
    number of collectives of all ranks that were entered, which is the same on each rank at the same
    point of the program.
    """

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
        """A value that changes whenever the main thread makes progress."""
        return self.marks, waits.count


doing = Doing()


def mark(phase: str, *, step: int | None = None, first: bool = False) -> None:
    """Notes a new phase. first: it may compile or warm up, and so take longer than the timeout."""
    if step is not None:
        doing.step = step
    doing.phase, doing.wait, doing.first = phase, "", first
    doing.marks += 1


@contextmanager
def waiting(collective: str, *, until_mark: bool = False) -> Iterator[None]:
    """Notes that the block is a collective of all ranks.

    until_mark: the block only queues the collective on a GPU. The host waits for its result later,
    so the note stays until the next mark.
    """
    doing.wait = collective  # after an error it stays and tells where the error occurred
    doing.calls += 1
    doing.marks += 1
    yield
    if not until_mark:
        doing.wait = ""
    doing.marks += 1


@contextmanager
def announced(phase: str) -> Iterator[None]:
    """Notes a phase that may take longer than the timeout, and so may all phases inside it."""
    doing.announced += 1
    try:
        mark(phase)
        yield
    finally:
        doing.announced -= 1
        mark(f"after {phase}")

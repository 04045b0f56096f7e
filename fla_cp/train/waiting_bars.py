"""How far something is that one waits for: loading, tokenising, saving.

    with shown("loading weights", total=291, unit="tensors") as update:
        for tensor in tensors:
            ...
            update()

Rank 0 says it on stderr, once it takes longer than a few seconds: with a bar on a terminal, otherwise
in a line now and then. FLA_CP_PROGRESS=0 in the environment says nothing. A thread speaks, so
that it does even where one call takes all the time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

QUIET_S = 3.0
"""Seconds before anything is said."""

BAR_S = 0.5
"""Seconds between changes of the bar."""

LINE_S = 10.0
"""Seconds between lines where there is no terminal."""

Update = Callable[..., None]
"""Adds a number, by default 1, to what is done."""


@contextmanager
def shown(
    what: str, total: int | None = None, unit: str = "", *, done: int = 0
) -> Iterator[Update]:
    """In the block, says how far it is; gives the call that counts.

    what: a text like "loading weights". total: of how many; None: only the time is told, and what
    was counted. unit: what is counted, in the plural. done: how many there are already.
    """
    if not _speaks():
        yield lambda n=1: None
        return
    progress = _Progress(what, total, unit, done)
    progress.thread.start()
    try:
        yield progress.update
    finally:
        progress.over.set()
        progress.thread.join()


def _speaks() -> bool:
    """Whether this process is rank 0 itself, and not one of its workers, and may speak."""
    rank = os.environ.get("RANK", "0")
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    silent = os.environ.get("FLA_CP_PROGRESS", "1") == "0"
    return rank == "0" and multiprocessing.parent_process() is None and not silent


class _Progress:
    """One block of `shown`."""

    def __init__(self, what: str, total: int | None, unit: str, done: int) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self.begin = time.monotonic()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._speak, name="fla_cp-progress", daemon=True)

    def update(self, n: int = 1) -> None:
        self.done += n

    def _speak(self) -> None:
        if self.over.wait(QUIET_S):
            return
        if not sys.stderr.isatty():
            while True:
                self._line()
                if self.over.wait(LINE_S):
                    return
        bar = self._bar()
        try:
            while not self.over.wait(BAR_S):
                bar.n = self.done
                bar.refresh()
        finally:
            bar.close()

    def _line(self) -> None:
        seconds = f"{time.monotonic() - self.begin:.0f} s"
        of = "" if self.total is None else f" of {self.total}"
        counted = f"{self.done}{of} {self.unit}, " if self.unit else ""
        print(f"fla_cp: {self.what}: {counted}{seconds}", file=sys.stderr, flush=True)

    def _bar(self) -> Any:
        from tqdm import tqdm

        bar = tqdm(
            desc=f"fla_cp: {self.what}",
            total=self.total,
            initial=self.done,
            unit=f" {self.unit}" if self.unit else "",
            dynamic_ncols=True,
            leave=False,
            file=sys.stderr,
            bar_format=None if self.unit else "{desc}: {elapsed}",
        )
        bar.start_t -= time.monotonic() - self.begin
        return bar

"""A progress bar for work that takes long: loading, tokenising, saving, compiling.

    with shown("loading weights", total=291, unit="tensors") as update:
        for tensor in tensors:
            ...
            update()

Rank 0 draws the bar on stderr if that is a terminal, once the block has taken a few seconds, and
removes it at the end. A thread draws it, so that its clock continues while a single call runs. The
compilation of Triton's kernels has a message of its own (fla_cp/kernels/triton/compiling.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

QUIET_S = 3.0
"""Seconds before a bar appears."""

REDRAW_S = 0.5
"""Seconds between changes of a bar."""

Update = Callable[[], None]
"""Counts one more unit as done."""


@contextmanager
def shown(
    what: str, total: int | None = None, unit: str = "", *, done: int = 0
) -> Iterator[Update]:
    """Shows a bar while the block runs; gives the call that counts.

    what: a text like "loading weights". total: how many there are, or None if nobody knows. unit:
    what is counted, in the plural; "" shows only the time. done: how many were done before.
    """
    if not _shows():
        yield lambda: None
        return
    count, over = _Count(done), threading.Event()
    given = what, total, unit, count, over
    thread = threading.Thread(target=_draw, args=given, name="fla_cp-bar", daemon=True)
    thread.start()
    try:
        yield count.update
    finally:
        over.set()
        thread.join()


_compilation = ExitStack()
"""The bar of the compilation that is under way."""


def show_compilations() -> None:
    """From now on each compilation of torch.compile in this process has a bar."""
    # No public call says when one begins and ends. torch 2.10 to 2.13 have this.
    from torch._dynamo.callback import callback_handler

    if _compilation_begins not in callback_handler.start_callbacks:  # torch._dynamo.reset drops it
        callback_handler.register_start_callback(_compilation_begins)
        callback_handler.register_end_callback(_compilation_ends)


def _compilation_begins(*_: object) -> None:
    _compilation.enter_context(shown("compiling the model"))


def _compilation_ends(*_: object) -> None:
    _compilation.close()


def _shows() -> bool:
    """Whether stderr is a terminal, and this process is rank 0 itself and none of its workers."""
    rank = os.environ.get("RANK", "0")
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    return rank == "0" and multiprocessing.parent_process() is None and sys.stderr.isatty()


class _Count:
    """A number that the block raises and the thread reads."""

    def __init__(self, done: int) -> None:
        self.first = self.done = done

    def update(self) -> None:
        self.done += 1


def _draw(what: str, total: int | None, unit: str, count: _Count, over: threading.Event) -> None:
    """Draws until `over`. Only this thread touches the bar."""
    begin = time.time()  # tqdm's clock
    if over.wait(QUIET_S):
        return
    from tqdm import tqdm

    with tqdm(
        desc=what,
        total=total,
        initial=count.first,
        unit=f" {unit}",
        dynamic_ncols=True,
        leave=False,
        file=sys.stderr,
        bar_format=None if unit else "{desc}: {elapsed}",
        delay=1.0,  # it would draw itself at once, with a clock that begins now
    ) as bar:
        if bar.disable:  # TQDM_DISABLE in the environment
            return
        bar.start_t, bar.delay = begin, 0.0
        while True:
            bar.n = count.done
            bar.refresh()
            if over.wait(REDRAW_S):
                return

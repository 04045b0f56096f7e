"""The micro-batches of each step for one rank, which worker processes read ahead.

The ranks of a cp group share each micro-batch. A rank needs its own tokens, the offsets of all
documents, and a hash with which the ranks check that they have the same batch. `StepLoader` yields
these for one step after another. With workers, other processes read the packs, collate and hash
them, and cut out the rank's tokens.
"""

from __future__ import annotations

import multiprocessing
import signal
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fla_cp import contiguous_token_ranges, zigzag_token_ranges
from fla_cp.train.data import IGNORE, Batch, StepSampler, batch_hash, collate
from fla_cp.train.parent import end_with_parent


def token_ranges(total: int, cp: int, layout: str) -> list[list[tuple[int, int]]]:
    """For each cp rank, the ranges of a batch of `total` tokens that it owns.

    layout: `contiguous`, `zigzag` or `uneven`. With `uneven` each rank has one range, and that of
    rank r has r + 1 of 1 + 2 + .. + cp equal parts.
    """
    if layout == "uneven":
        parts = cp * (cp + 1) // 2
        edges = [total * (r * (r + 1) // 2) // parts for r in range(cp + 1)]
        return [[edge] for edge in pairwise(edges)]
    divide = zigzag_token_ranges if layout == "zigzag" else contiguous_token_ranges
    return divide(total, cp)


class Share(NamedTuple):
    """One cp rank's part of a collated batch, on the host.

    tokens, labels: [1, T_local] int64, in local order. cu_seqlens: int32 [N+1], the offsets of the
    whole batch. total: how many tokens the whole batch has. targets: how many of its labels count.
    digest: `batch_hash` of the whole batch, which the ranks compare.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    total: int
    targets: int
    digest: int

    def pinned(self) -> Share:
        """The same in pinned memory, from which a GPU can copy while the host goes on."""
        names = ("tokens", "labels", "cu_seqlens")
        return self._replace(**{name: getattr(self, name).pin_memory() for name in names})


@dataclass(frozen=True)
class Sharing:
    """Turns the packs of a data-parallel rank's step into its micro-batches. Workers call it.

    micro_batch_size: how many packs a micro-batch has. cp, cp_rank: how many ranks share it, and
    which one this is. layout: see `token_ranges`.
    """

    micro_batch_size: int
    cp: int
    cp_rank: int
    layout: str

    def __call__(self, packs: Sequence[Batch]) -> list[Share]:
        size = self.micro_batch_size
        return [self.share(collate(packs[i : i + size])) for i in range(0, len(packs), size)]

    def share(self, batch: Batch) -> Share:
        """This rank's part of a collated batch."""
        total = batch["tokens"].shape[1]
        own = token_ranges(total, self.cp, self.layout)[self.cp_rank]
        tokens, labels = (
            torch.cat([batch[name][:, lo:hi] for lo, hi in own], 1) for name in ("tokens", "labels")
        )
        targets = int(np.count_nonzero(batch["labels"].numpy() != IGNORE))
        return Share(tokens, labels, batch["cu_seqlens"], total, targets, batch_hash(batch))


class _OwnPacks:
    """The pack indices of one data-parallel rank in each step, without end."""

    def __init__(self, steps: StepSampler, dp: int, dp_rank: int) -> None:
        size = steps.global_batch_size // dp
        self.steps, self.own = steps, slice(dp_rank * size, (dp_rank + 1) * size)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self.own] for batch in self.steps)


class StepLoader:
    """Yields one rank's micro-batches of each step, in the sampler's order, without end.

    steps: yields the packs of each step, of all ranks together. dp, dp_rank: the packs are divided
    among the data-parallel ranks in their order. workers: how many processes read ahead, at most
    two steps each; with 0, `next` reads. The order does not depend on this number. pinned: return
    pinned memory, for a GPU.

    Workers are spawned, because a fork would copy the locks of other threads (gloo's, CUDA's, the
    watchdog's) in whatever state they are. Workers map the tokens in memory instead of copying
    them, leave SIGINT and SIGTERM to the rank, and are killed when it ends. At its end, the context
    manager ends the workers. If one has died, it raises a RuntimeError that says what may help.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        steps: StepSampler,
        sharing: Sharing,
        *,
        dp: int = 1,
        dp_rank: int = 0,
        workers: int = 0,
        pinned: bool = False,
    ) -> None:
        loader = DataLoader(
            dataset,
            batch_sampler=_OwnPacks(steps, dp, dp_rank),
            collate_fn=sharing,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=_begin_worker if workers else None,
            pin_memory=pinned,
            generator=torch.Generator(),  # it draws a seed, and must not move the global generator
        )
        others = set(multiprocessing.active_children())
        with _signals_kept() if workers else nullcontext():
            self._batches: Iterator[list[Share]] | None = iter(loader)
        self._workers = [p for p in multiprocessing.active_children() if p not in others]
        self._end = weakref.finalize(self, _kill, self._workers)  # at the latest when Python exits

    def __iter__(self) -> Iterator[list[Share]]:
        return self

    def __next__(self) -> list[Share]:
        assert self._batches is not None, "it was closed"
        return next(self._batches)

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        died = self._died() if isinstance(error, (RuntimeError, OSError, EOFError)) else ""
        self.close()
        if died:
            raise RuntimeError(
                f"a process that reads data has died: {died}. If the host ran out of memory or of "
                "shared memory (/dev/shm), take fewer --data.workers; with 0 the rank reads by "
                "itself"
            ) from error

    def _died(self) -> str:
        """Which worker has died, and how; "" if none has."""
        sentinels = [worker.sentinel for worker in self._workers]
        # A worker that is dying may have closed its connections and not have ended yet.
        ended = wait(sentinels, timeout=1) if sentinels else []
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()
            if worker.exitcode:
                return f"pid {worker.pid}, exit code {worker.exitcode} (-9: killed)"
        return ""

    def close(self) -> None:
        """Ends the workers."""
        self._batches = None  # its deletion asks them to end, unless a traceback still refers to it
        self._end()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Starts workers in the block: they block some signals, and this process's handling of signals
    stays as it was.

    Workers inherit that SIGINT and SIGTERM are blocked. Ctrl-C in a terminal and some schedulers
    signal all processes of a run, but the rank then finishes its step and still needs its workers.
    torch's handler of SIGCHLD, which is taken out again, would raise the error about a dead worker
    wherever the main thread is, for example in a collective. Without it, `next` raises the error
    within five seconds.
    """
    resource_tracker.ensure_running()  # its start, by the first worker, would unblock the signals
    handler = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)


def _kill(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Kills the workers that are still there. They do not react to SIGTERM."""
    for worker in workers:
        worker.kill()


def _begin_worker(number: int) -> None:
    end_with_parent()

"""--profile A:B: a profile of the steps A up to B, as traces and tables in the run folder, and on
CUDA with a snapshot of the memory.

Every rank is profiled, because only the traces of all ranks together show what a rank waits for.
Perfetto, chrome://tracing and `python -m benchmarks.timeline` can open a trace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from accelerate.utils import ProfileKwargs

from fla_cp.train.distributed import Ranks
from fla_cp.train.progress import announced

ALLOCATIONS = 200_000
"""The most events in the history of the memory that are kept. The latest ones are kept."""

ROWS = 60
"""The number of operators in a table, which begins with those that take longest."""


def missed(steps: range | None, start: int) -> list[str]:
    """A note if a run that goes on from step `start` has taken some of the steps before."""
    if steps is None or start < steps.start:
        return []
    left = f"only those from {start + 1} on are" if start < steps[-1] else "nothing is"
    span = f"{steps.start}:{steps.stop}"
    return [f"note: --profile {span}: the run goes on after step {start}, so {left} profiled"]


class StepProfile:
    """Profiles the steps of a range in the block; does nothing without one.

    run: the run folder. steps: their numbers in the log, or None. say: prints a line.
    A run that ends before the last of them, for example on a signal, writes what it has; after an
    error nothing is written.

    The host of a GPU is profiled too, which delays it, so steps take longer than others.
    """

    def __init__(
        self, run: Path, steps: range | None, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self.folder, self.ranks, self.say = run / "profile", ranks, say
        self.steps = steps if steps is not None else range(0)
        self.profiler: torch.profiler.profile | None = None
        self.done: list[int] = []

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.profiler is not None:
            self._stop(write=error is None)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of the training, which is profiled if its number is one of `steps`."""
        if number not in self.steps:
            yield
            return
        if self.profiler is None:
            self._start()
        with torch.profiler.record_function(f"step {number}"):
            yield
        self.done.append(number)
        if number == self.steps[-1]:
            self._stop(write=True)

    @announced("start of the profiler")
    def _start(self) -> None:
        cuda = self.ranks.device.type == "cuda"
        self.profiler = ProfileKwargs(activities=["cpu", "cuda"] if cuda else ["cpu"]).build()
        if cuda:  # torch's documentation of memory snapshots uses these names, too
            # Frames of C++ would slow each allocation down, and exist on x86-64 alone (torch 2.13).
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=ALLOCATIONS)
        self.profiler.start()

    @announced("profile")
    def _stop(self, *, write: bool) -> None:
        """Ends the profile. A file that cannot be written is a warning: the training goes on."""
        profiler, self.profiler = self.profiler, None
        assert profiler is not None
        if write:
            profiler.add_metadata_json("steps", json.dumps(len(self.done)))
        profiler.stop()
        cuda = self.ranks.device.type == "cuda"
        try:
            if write and self.done:
                self._write(profiler, cuda)
        finally:
            if cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: torch.profiler.profile, cuda: bool) -> None:
        first, last, rank = self.done[0], self.done[-1], self.ranks.rank
        name = f"steps-{first}-{last}-rank-{rank}"
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            table = profiler.key_averages().table(sort_by=key, row_limit=ROWS)
            (self.folder / f"{name}.txt").write_text(table, encoding="utf-8")
            profiler.export_chrome_trace(str(self.folder / f"{name}.json"))
            if cuda:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}-memory.pickle"))
        except (OSError, RuntimeError) as error:
            print(f"warning: --profile: rank {rank}: {error}", file=sys.stderr, flush=True)
            return
        memory = ", memory in -memory.pickle (for pytorch.org/memory_viz)" if cuda else ""
        others = ", and those of the other ranks beside it"
        self.say(
            f"profile of steps {first} to {last}: {self.folder / name}.json (for "
            f"ui.perfetto.dev) and .txt{memory}{others if self.ranks.world_size > 1 else ''}"
        )

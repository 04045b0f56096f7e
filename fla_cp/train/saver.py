"""Writes checkpoints atomically, and in the background while training goes on.

A periodic checkpoint pauses training only while the state is copied to the host's memory. A thread
of torch.distributed.checkpoint (DCP) writes the copy. DCP's collectives run on a gloo group of
their own, so that they cannot mix with those of the training. DCP gathers the results of all ranks
on rank 0, and later tells all ranks the outcome. Between the two, rank 0 writes trainer.json with
the checksums and gives the folder its final name. All ranks therefore agree on every checkpoint
without further collectives.
"""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from fla_cp.train.checkpoint import (
    FORMAT,
    PARTIAL,
    RECORD,
    Progress,
    checkpoints,
    first_cause,
    random_state,
    remove,
)
from fla_cp.train.config import UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.integrity import FileSums, SummedWriter, pack_sums, seal
from fla_cp.train.optim import Stepper
from fla_cp.train.waiting_bars import shown

WRITE_TIMEOUT = datetime.timedelta(hours=2)
"""How long ranks wait for the slowest rank's disk, while training goes on."""


@functools.cache
def stagers_can_be_used_again() -> bool:
    """Whether one stager can copy a second state.

    In torch 2.11, a stager closes itself after the first, and then fails with
    KeyError: <class 'type'>; see test_stagers_that_copy_once.
    """
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        for _ in range(2):
            stager.stage({"x": torch.zeros(1, dtype=torch.float32, device="cpu")})
    except KeyError:
        return False
    finally:
        stager.close()
    return True


class SaveFailed(UserError):
    """A checkpoint could not be written. The message is one line with the path and the reason."""


@dataclass
class _Pending:
    """A checkpoint that is being written. paused: for how many seconds training paused. begin, end:
    when the writing began and ended, in seconds of a clock; end is 0 until then."""

    step: int
    partial: Path
    future: Future
    paused: float
    begin: float
    end: float = 0.0


class Saver:
    """Writes one run's checkpoints, one at a time, and keeps the newest `keep`.

    facts: options with which a resumed run will be compared (checkpoint.facts). step: the step of
    the last complete checkpoint, or 0. say: prints a line, on rank 0. `poll` is local; the other
    methods are collective. Close the saver before the process group is destroyed.
    """

    def __init__(
        self,
        run: Path,
        facts: dict[str, Any],
        keep: int,
        ranks: Ranks,
        say: Callable[[str], None],
        step: int = 0,
    ) -> None:
        self.run, self.facts, self.keep = run, facts, keep
        self.ranks, self.say, self.step = ranks, say, step
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self.stager = self._new_stager()
        self.pending: _Pending | None = None
        self.notes: list[str] = []  # lines from the thread that writes

    def start(self, model: nn.Module, optimizer: Stepper, progress: Progress) -> None:
        """Begins to write a checkpoint in the background, after the one before is written. A
        failure is printed."""
        begin = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - begin
        try:
            partial = self._prepare(progress)
        except SaveFailed as error:
            self.say(f"warning: {error}")
            return
        if not stagers_can_be_used_again():
            self.stager = self._new_stager()
        future = dcp.async_save(
            self._state(model, optimizer, progress),
            storage_writer=self._writer(partial, progress),
            process_group=self.group,
            async_stager=self.stager,
        )
        assert isinstance(future, Future)
        pending = _Pending(progress.step, partial, future, time.perf_counter() - begin, begin)
        future.add_done_callback(lambda _: setattr(pending, "end", time.perf_counter()))
        self.pending = pending
        if waited > 0.1:
            self.say(f"step {progress.step}: waited {waited:.1f} s for the checkpoint before")

    def _new_stager(self) -> DefaultStager:
        """A stager, which copies the state to the host. It keeps its buffers between checkpoints if
        torch can do that, because pinning memory takes seconds."""
        cuda = self.ranks.device.type == "cuda"
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )

    def poll(self) -> None:
        """Prints the outcome of the checkpoint that is being written, if it is done."""
        if self.pending is not None and self.pending.future.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, if any, and prints its outcome."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        with shown("saving the checkpoint"):
            error = pending.future.exception()
        while not pending.end:  # callbacks run just after waiting threads are woken
            time.sleep(1e-3)
        if error is None:
            self.step = pending.step
            self.say(
                f"checkpoint step {pending.step}: paused the step for {pending.paused:.3f} s, "
                f"written in {pending.end - pending.begin:.3f} s"
            )
        else:
            self._drop(pending.partial)
            self.say(f"warning: {self._failure(pending.step, error)}")
        self._say_notes()

    def write(self, model: nn.Module, optimizer: Stepper, progress: Progress) -> Path:
        """Writes a checkpoint, after the pending one, and returns its folder. Raises SaveFailed."""
        self.wait()
        partial = self._prepare(progress)
        try:
            with shown("saving the checkpoint"):
                dcp.save(
                    self._state(model, optimizer, progress),
                    storage_writer=self._writer(partial, progress),
                    process_group=self.group,
                )
        except (CheckpointException, RuntimeError, OSError) as error:
            self._drop(partial)
            raise SaveFailed(self._failure(progress.step, error)) from error
        self.step = progress.step
        self._say_notes()
        return self._final(progress.step)

    def close(self) -> None:
        """Waits for the pending checkpoint, then frees the group and the buffers."""
        self.wait()
        self.stager.close()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _say_notes(self) -> None:
        while self.notes:
            self.say(self.notes.pop(0))

    def _final(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:08d}"

    def _prepare(self, progress: Progress) -> Path:
        """Makes an empty folder to write into. Raises SaveFailed, on all ranks. Collective."""
        final = self._final(progress.step)
        partial = final.with_name(PARTIAL + final.name)

        def make() -> None:
            try:
                remove(partial)
                partial.mkdir(parents=True)
            except OSError as error:
                raise SaveFailed(self._failure(progress.step, error)) from error

        self.ranks.decide(make)
        return partial

    def _state(self, model: nn.Module, optimizer: Stepper, progress: Progress) -> dict[str, Any]:
        parameters, moments = get_state_dict(model, optimizer)
        return {
            "model": parameters,
            "optimizer": moments,
            "progress": {
                name: torch.tensor(value, device="cpu") for name, value in asdict(progress).items()
            },
            "random": random_state(self.ranks),
        }

    def _writer(self, partial: Path, progress: Progress) -> SummedWriter:
        record = {"format": FORMAT, **asdict(progress), **self.facts}
        final = self._final(progress.step)

        def commit(files: list[FileSums]) -> None:
            self._commit(partial, final, {**record, "files": pack_sums(files)})

        return SummedWriter(partial, commit)

    def _commit(self, partial: Path, final: Path, record: dict[str, Any]) -> None:
        """Gives a written checkpoint its final name and deletes old checkpoints. It runs on rank 0,
        in any thread."""
        with open(partial / RECORD, "wb") as file:
            file.write(seal(record))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        old = final.with_name(f"{PARTIAL}old-{final.name}")
        if os.path.lexists(final):  # a run that resumed from an earlier step writes this one again
            remove(old)
            final.rename(old)
        partial.rename(final)
        _sync_folder(final.parent)
        stale = [old, *checkpoints(self.run)[: -self.keep]]
        for path in stale:
            try:
                if path != old:
                    # renamed first, so that a crash leaves no half-deleted checkpoint of that name
                    path = path.rename(path.with_name(f"{PARTIAL}old-{path.name}"))
                remove(path)
            except OSError as error:
                self.notes.append(f"warning: an old checkpoint could not be removed: {error}")

    def _drop(self, partial: Path) -> None:
        """Removes the folder of a failed save. No rank still writes, because DCP has heard from
        all."""
        if self.ranks.rank == 0:
            try:
                remove(partial)
            except OSError as error:
                self.notes.append(f"warning: could not remove {partial}: {error}")

    def _failure(self, step: int, error: BaseException) -> str:
        last = f"the last whole one is of step {self.step}" if self.step else "there is none yet"
        return f"the checkpoint of step {step} could not be written: {first_cause(error)}; {last}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The run folder: chooses it, finds the checkpoint to resume from, and locks it for this run.

`open_run` changes nothing except damaged checkpoints, which it sets aside; `begin_run` makes the
folder. The configuration is checked between the two, so that a mistake leaves no folder behind.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fla_cp.train import checkpoint, restart
from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.ending import say_if_possible
from fla_cp.train.lock import RunLock
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import to_toml
from fla_cp.train.progress import announced
from fla_cp.train.whole_paths import with_whole_paths


@dataclass(frozen=True)
class RunFolder:
    """path: the run folder. found: the checkpoint to resume from. step: its step, or 0. note: where
    `--resume auto` looked if it found none. The same on all ranks."""

    path: Path
    found: Path | None
    step: int = 0
    note: str = ""

    def ends(self, steps: int) -> str:
        """A line that says that a run of so many steps has none left, or ""."""
        if self.found is None or self.step < steps:
            return ""
        return (
            f"finished: {self.step} of {steps} steps are in {self.found}, so there is nothing to "
            "train; a larger --max-steps trains on"
        )


@announced("search for a checkpoint")
def open_run(config: TrainConfig, ranks: Ranks, lock: RunLock) -> RunFolder:
    """The run folder and the newest whole checkpoint that --resume names, the same on all ranks.

    Rank 0 searches, and locks the folder if it exists; all ranks verify the checkpoint. Raises
    UserError, on all ranks, for a --resume path without an undamaged checkpoint, for a checkpoint
    of a later step than --max-steps, for an earlier checkpoint of a run that would lose its later
    ones, and for a folder that holds another run or is in use by one.
    """
    launchers = _launchers(ranks)

    def look() -> tuple[Path, Sequence[Path]]:
        with _out_errors():
            return _look(config, launchers, lock)

    def say(line: str) -> None:
        if ranks.rank == 0:
            say_if_possible(line)

    run, candidates = ranks.decide(look)
    trust = config.run.trust_checkpoint
    whole, damaged = checkpoint.newest_whole(candidates, config.run.resume, trust, ranks, say)
    done, note = 0, ""
    if whole is None and config.run.resume == "auto" and not config.parity.check:
        looked = run if config.run.out is not None else f"runs/*-{config.model.name}"
        note = f"--resume auto found no checkpoint in {looked}: the run starts afresh, in {run}"
    if whole is not None and not config.parity.check:
        done = checkpoint.read_record(whole)[0]["step"]
        if done > config.run.steps:
            raise UserError(
                f"--max-steps must be at least {done}, the step of the resumed checkpoint {whole}, "
                f"got {config.run.steps}"
            )
    if ranks.rank == 0:
        for line in checkpoint.set_aside(run, damaged):
            say(line)
    return RunFolder(run, whole, done, note)


def _look(
    config: TrainConfig, launchers: Sequence[int], lock: RunLock
) -> tuple[Path, Sequence[Path]]:
    """The run folder, and the unverified checkpoints to resume from, best first. On rank 0."""
    run = Path(_name(config, launchers))
    if run.is_dir():
        lock.take(run)
    again = restart.restarted() and restart.claimed(run, launchers)
    found = checkpoint.find("auto", run) if again else []
    found = found or checkpoint.find(config.run.resume, run)
    inside = bool(found) and run.resolve() in found[0].resolve().parents
    if inside and config.run.out is None and not config.parity.check:
        _keep_later(found[0], run)
    continues = config.run.resume == "auto" or inside or again
    if _holds_run(run) and not continues and not config.parity.check:
        raise UserError(
            f"--out {run} already holds a run; continue it with --resume auto, or name another "
            "folder"
        )
    return run, found


def _holds_run(run: Path) -> bool:
    """Whether a folder has metrics, or checkpoints, which a new run would delete."""
    return bool(read_metrics(run) or checkpoint.find("auto", run))


def _keep_later(found: Path, run: Path) -> None:
    """Raises UserError if the run has later checkpoints than the one that --resume names."""
    last = checkpoint.find("auto", run)[0]
    if checkpoint.step_of(last) > checkpoint.step_of(found):
        raise UserError(
            f"--out must be given beside --resume {found}, since {run} has later checkpoints, up "
            f"to {last.name}: --out {run} deletes them, and another folder keeps them"
        )


def _name(config: TrainConfig, launchers: Sequence[int]) -> str:
    if config.run.out is not None:
        return config.run.out
    suffix = config.model.name + ("-parity" if config.parity.check else "")
    if restart.restarted():
        newest_first = sorted(Path("runs").glob(f"*-{suffix}"), reverse=True)
        if found := restart.find(launchers, newest_first):
            return str(found)
    if config.run.resume == "auto":
        # a run whose checkpoints are all damaged counts too: an older run must not replace it
        runs = [run for run in Path("runs").glob(f"*-{suffix}") if checkpoint.find("auto", run)]
        if runs:
            return str(max(runs, key=lambda run: run.name))
    elif not config.parity.check and (home := _home(checkpoint.find(config.run.resume, Path()))):
        return str(home)
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}-{suffix}"


def _home(found: Sequence[Path]) -> Path | None:
    """The run folder of these checkpoints; None if they are in none."""
    if not found or found[0].absolute().parent.name != "checkpoints":
        return None
    home = found[0].absolute().parent.parent
    return home if found[0].is_absolute() else Path(os.path.relpath(home))


def begin_run(config: TrainConfig, run: Path, ranks: Ranks, lock: RunLock) -> None:
    """Makes and locks the folder and writes config.toml, on rank 0, with whole paths of the data
    and the tokenizer. Raises UserError on all ranks. A comparison in the folder of a run leaves the
    run's own config.toml.

    To be called once the configuration is known to be valid: until then config.toml must stay,
    since a run that refuses to resume advises to use it.
    """
    launchers = _launchers(ranks)

    def begin() -> None:
        resolved = dataclasses.replace(config.run, out=str(run))
        with _out_errors():
            run.mkdir(parents=True, exist_ok=True)
            lock.take(run)
            if config.parity.check and _holds_run(run):
                return
            stored = dataclasses.replace(config, run=resolved, data=with_whole_paths(config.data))
            (run / "config.toml").write_text(to_toml(stored), encoding="utf-8")
            restart.claim(run, launchers)

    ranks.decide(begin)


def _launchers(ranks: Ranks) -> list[int]:
    """The number of each rank's launcher, in the order of the ranks. Collective."""
    return ranks.host_gather([restart.launcher()]).flatten().tolist()


@contextmanager
def _out_errors() -> Iterator[None]:
    """Turns what the file system refuses into a UserError about --out."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: {error}") from error

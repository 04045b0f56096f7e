"""Checkpoints: written whole or not at all, readable on any split.

RUN/checkpoints/step-00000020/ holds what torch.distributed.checkpoint writes (model, optimiser,
step, skipped steps, random number generators) and trainer.json, which says what was trained. It
is written as .partial-step-00000020, on disk before it gets its name; a folder under another name
than step-* never counts. The learning-rate schedule and the sampler are functions of the step, so
the step is all that they need.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from launch.config import TrainConfig, UserError
from launch.distributed import Ranks
from launch.model import shape_of

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Progress:
    """Where a run stands. step: optimiser steps taken or skipped, so also batches consumed."""

    step: int = 0
    skipped: int = 0


def complete(folder: Path) -> bool:
    """Whether this is a checkpoint that was written to its end."""
    files = (".metadata", "trainer.json")
    return bool(_NAME.fullmatch(folder.name)) and all((folder / f).is_file() for f in files)


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    folders = [f for f in (run / "checkpoints").glob("step-*") if complete(f)]
    return sorted(folders, key=step_of)


def find(resume: str, run: Path) -> Path | None:
    """The checkpoint that `--resume` names. Raises UserError if a path holds none."""
    if resume == "none":
        return None
    if resume == "auto":
        return next(reversed(checkpoints(run)), None)
    path = Path(resume)
    if complete(path):
        return path
    if found := checkpoints(path):
        return found[-1]
    raise UserError(
        f"--resume must be none, auto, or the path of a run or checkpoint; {resume} holds no "
        "complete checkpoint"
    )


def _facts(config: TrainConfig, vocab_size: int) -> dict:
    """What a resumed run should have in common with the one before."""
    data = config.data
    return {
        "model": {**asdict(shape_of(config.model)), "vocab_size": vocab_size},
        "data": {
            "source": data.source,
            "seq_len": data.seq_len,
            "global_batch_size": data.global_batch_size,
            "seed": config.run.seed,
        },
    }


def _random_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {f"cpu-{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state[f"cuda-{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return state


def save(
    run: Path,
    config: TrainConfig,
    vocab_size: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    ranks: Ranks,
) -> Path:
    """Writes RUN/checkpoints/step-*, keeping the newest keep_checkpoints. Collective."""
    root = run / "checkpoints"
    final = root / f"step-{progress.step:08d}"
    partial = root / (_PARTIAL + final.name)
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.barrier()
    parameters, moments = get_state_dict(model, optimizer)
    state = {
        "model": parameters,
        "optimizer": moments,
        "progress": {name: torch.tensor(value) for name, value in asdict(progress).items()},
        "random": _random_state(ranks),
    }
    dcp.save(state, checkpoint_id=partial, process_group=ranks.host_group)
    ranks.barrier()
    if ranks.rank == 0:
        facts = {"format": FORMAT, **asdict(progress), **_facts(config, vocab_size)}
        with open(partial / "trainer.json", "w") as file:
            json.dump(facts, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        if final.exists():  # a run that was resumed from an earlier step gets here again
            old = root / f"{_PARTIAL}old-{final.name}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        _sync_folder(root)
        for stale in checkpoints(run)[: -config.run.keep_checkpoints]:
            # renamed first, so that a crash in the middle leaves no half checkpoint by that name
            shutil.rmtree(stale.rename(root / (_PARTIAL + "old-" + stale.name)))
        clean(run)
    ranks.barrier()
    return final


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clean(run: Path, after: int | None = None) -> list[Path]:
    """Deletes what a crash left behind and, with `after`, checkpoints of later steps.

    Returns the complete checkpoints that it deleted. For one rank.
    """
    for folder in (run / "checkpoints").glob(_PARTIAL + "*"):
        shutil.rmtree(folder)
    later = [] if after is None else [f for f in checkpoints(run) if step_of(f) > after]
    for folder in later:
        shutil.rmtree(folder)
    return later


def check_matches(path: Path, config: TrainConfig, vocab_size: int) -> list[str]:
    """Differences in the data, for the user to know of. Raises UserError if the model differs."""
    saved, now = json.loads((path / "trainer.json").read_text()), _facts(config, vocab_size)
    if saved.get("format") != FORMAT:
        raise UserError(f"--resume: {path} has format {saved.get('format')}, expected {FORMAT}")
    for name, value in now["model"].items():
        if saved["model"].get(name) != value:
            raise UserError(
                f"--resume: {path} was trained with {name}={saved['model'].get(name)}, "
                f"but this run has {name}={value}"
            )
    return [
        f"{name} is {value}, was {saved['data'].get(name)}"
        for name, value in now["data"].items()
        if saved["data"].get(name) != value
    ]


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Progress:
    """Fills model and optimiser from a checkpoint of any split; returns where the run stood.

    Hyper-parameters of the optimiser stay as they are configured now. A rank whose generators
    were not saved (there were fewer ranks) keeps its own. Collective.
    """
    hyper = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    parameters, moments = get_state_dict(model, optimizer)
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    random = {k: v for k, v in _random_state(ranks).items() if f"random.{k}" in names}
    state = {
        "model": parameters,
        "optimizer": moments,
        "progress": {name: torch.tensor(0) for name in asdict(Progress())},
        "random": random,
    }
    dcp.load(state, checkpoint_id=path, process_group=ranks.host_group)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        group.update(values)
    if f"cpu-{ranks.rank}" in random:
        torch.set_rng_state(random[f"cpu-{ranks.rank}"])
    if f"cuda-{ranks.rank}" in random:
        torch.cuda.set_rng_state(random[f"cuda-{ranks.rank}"], ranks.device)
    return Progress(**{name: int(value) for name, value in state["progress"].items()})

"""Finds, verifies and loads checkpoints, and compares them with the configuration.

RUN/checkpoints/step-00000020/ holds what torch.distributed.checkpoint (DCP) writes (model,
optimiser, `Progress`, random number generators) and trainer.json, which says what was trained and
has the checksums of all files. saver.py writes the folder as .partial-step-00000020 and renames it
when it is on disk. A folder whose name is not step-* never counts as a checkpoint. The learning
rate is a function of the step, and a batch one of the tokens before it, so of the schedule and the
sampler nothing else is saved. A checkpoint can be loaded with any split over ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fla_cp.integrations.stock_folder import folder_facts
from fla_cp.train.config import OptimConfig, TrainConfig, UserError
from fla_cp.train.distributed import Ranks, local_ranks, threads_per_rank
from fla_cp.train.integrity import Damaged, FileSums, check_sizes, unpack_sums, unseal, verify
from fla_cp.train.model import shape_of
from fla_cp.train.optim import Stepper, learning_rate
from fla_cp.train.untrusted import CheckedReader, check_places, reading
from fla_cp.train.waiting_bars import shown
from fla_cp.train.whole_paths import same_path, with_whole_paths

FORMAT = 2
"""Version of trainer.json. Format 1 had no checksums, and only the shape among the model's options.
"""
RECORD = "trainer.json"
PARTIAL = ".partial-"
ASIDE = "damaged-"
_NAME = re.compile(r"step-(\d{8,})")

MODEL_NEUTRAL = ("size", "init", "impl", "compile", "remat", "offload", "aux_loss", "bias_rate")
"""Fields of ModelConfig that do not change the model. `size` is one, because it only fills in the
shape."""
POSITIONS = ("rope_theta", "rope_scaling", "rope_parameters")
"""Fields of the model that may change when a run is resumed, to train on longer sequences."""
IMPLIED = {"gate_bias": True}
"""The value that None stands for, in fields of ModelConfig that `Shape` does not fill in."""
DATA_NEUTRAL = ("micro_batch_size", "max_documents", "workers", "cache", "cache_gib")
"""Fields of DataConfig that do not change the batches."""


@dataclass(frozen=True)
class Progress:
    """How far a run is. step: how many optimiser steps were taken or skipped, which is also the
    number of batches consumed. skipped: how many of them were skipped. packs: how many packs these
    batches had, which --global-batch-size may change when a run is resumed. tokens: how many tokens
    these packs had, which --seq-len may change as well."""

    step: int = 0
    skipped: int = 0
    packs: int = 0
    tokens: int = 0


def complete(folder: Path) -> bool:
    """Whether the folder has the name of a finished checkpoint, and the files that are written
    last."""
    files = (".metadata", RECORD)
    return bool(_NAME.fullmatch(folder.name)) and all((folder / f).is_file() for f in files)


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    return [folder for folder in _named(run) if complete(folder)]


def _named(run: Path) -> list[Path]:
    """All entries of a run folder with a checkpoint's name, complete or not, oldest first."""
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=step_of)


def find(resume: str, run: Path) -> list[Path]:
    """The checkpoints that `--resume` may start from, best first. None has been verified yet.

    The list is empty for `none`, and for `auto` where there is no checkpoint. Raises UserError for
    a path without a checkpoint.
    """
    if resume == "none":
        return []
    if resume == "auto":
        return _named(run)[::-1]
    path = Path(resume)
    if _NAME.fullmatch(path.name) or (path / ".metadata").exists() or (path / RECORD).exists():
        if path.exists():
            return [path]
    elif found := _named(path):
        return found[::-1]
    problem = "holds no complete checkpoint" if path.exists() else "does not exist"
    raise UserError(
        f"--resume must be none, auto, or the path of a run or checkpoint; {resume} {problem}"
    )


def newest_whole(
    found: Sequence[Path],
    resume: str,
    trust: bool,
    ranks: Ranks,
    say: Callable[[str], None],
    flag: str = "--resume",
) -> tuple[Path | None, list[Path]]:
    """The first of these checkpoints that is undamaged, and the damaged ones before it.

    The path is None if there are no checkpoints at all. found: what `find` returned, the same on
    all ranks. trust: allow .metadata to run code. say: prints a line, on rank 0. flag: the flag
    that named the checkpoints, for errors. Every rank verifies a part of the files. Raises
    UserError if all checkpoints are damaged. Collective.
    """
    problem = ""
    for i, path in enumerate(found):
        problem = _problem(path, trust, ranks)
        if not problem:
            return path, list(found[:i])
        if i + 1 < len(found):
            say(f"{path} is damaged: {problem}; trying the one before")
    if not found:
        return None, []
    message = f"{flag}: {found[-1]} is damaged: {problem}"
    if Path(resume) != found[-1]:
        message += "; no checkpoint here is whole"
        if flag == "--resume":
            message += " (to start afresh: --resume none, another --out)"
    raise UserError(message)


def _problem(path: Path, trust: bool, ranks: Ranks) -> str:
    """The damage of a checkpoint, the same text on all ranks; "" if there is none. Collective."""

    def look() -> tuple[str, list[FileSums]]:
        try:
            _, files = read_record(path)
            check_sizes(path, files)
            check_places(path, read_metadata(path, files, trust))
        except Damaged as error:
            return str(error), []
        except OSError as error:
            return f"{error.filename or path} cannot be read: {error.strerror}", []
        return "", files

    problem, files = ranks.decide(look)
    if problem:
        return problem
    threads = threads_per_rank(local_ranks())
    problem = verify(path, files, ranks.rank, ranks.world_size, threads)
    if problem and ranks.world_size > 1:
        problem += f" (seen by rank {ranks.rank} on {socket.gethostname()})"
    return ranks.first_problem(problem)


def set_aside(run: Path, damaged: Sequence[Path]) -> list[str]:
    """Renames damaged checkpoints of this run, so that it can write these steps again.

    They are not deleted, because some of their data may be recoverable. Returns one line for each
    checkpoint. Call it on one rank only.
    """
    notes = []
    for path in damaged:
        aside = path.with_name(ASIDE + path.name)
        if path.parent.resolve() != (run / "checkpoints").resolve():
            continue  # it belongs to another run, which this one must not change
        try:
            remove(aside)
            path.rename(aside)
            notes.append(f"{path.name} is set aside as {aside}")
        except OSError as error:
            notes.append(f"could not set {path} aside: {error}")
    return notes


def read_record(path: Path) -> tuple[dict[str, Any], list[FileSums]]:
    """The contents of a checkpoint's trainer.json, and the checksums in it (none in format 1).

    Raises Damaged if it cannot be read, and UserError for the format of a later version.
    """
    if not path.is_dir():
        raise Damaged("it is no folder")
    try:
        record = unseal((path / RECORD).read_bytes())
    except OSError as error:
        raise Damaged(f"{RECORD} cannot be read: {error.strerror}") from None
    format = record.get("format")
    if type(format) is int and format > FORMAT and "checksum" in record:
        raise UserError(f"--resume: {path} has format {format}; this version reads 1 and 2")
    if (format == FORMAT) != ("files" in record) or format not in (1, FORMAT):
        raise Damaged(f"{RECORD} has format {format!r}; this version reads 1 and 2")
    for name, kind in (("step", int), ("skipped", int), ("model", dict), ("data", dict)):
        if type(record.get(name)) is not kind:
            raise Damaged(f"{RECORD} must hold {name}, of type {kind.__name__}")
    files = unpack_sums(record["files"]) if format == FORMAT else []
    if format == FORMAT and ".metadata" not in [file.name for file in files]:
        raise Damaged(f"{RECORD} has no checksum of .metadata")
    return record, files


def read_metadata(path: Path, files: Sequence[FileSums], trust: bool) -> dcp.Metadata:
    """The metadata of a checkpoint. Raises Damaged if it cannot be read.

    files: the checkpoint's checksums, if it has any. That of `.metadata` is compared first, so that
    a damaged pickle is never opened. trust: allow the pickle to run code.
    """
    problem = verify(path, [file for file in files if file.name == ".metadata"], 0, 1, 1)
    if problem:
        raise Damaged(problem)
    try:
        text = (path / ".metadata").read_bytes()
    except OSError as error:
        raise Damaged(f".metadata cannot be read: {error.strerror}") from None
    return reading(trust)[0](text)


def facts(
    config: TrainConfig, vocab_size: int, packs: int | str, dtype: torch.dtype
) -> dict[str, Any]:
    """The options that a resumed run should share with the run before, as JSON values.

    packs: how much data there is, see `Packs.extent`. Paths are whole. The folder of a model of
    transformers is among the options, but a resumed run may have it elsewhere.

    Every option counts unless MODEL_NEUTRAL or DATA_NEUTRAL names it, so a new option is compared
    without being listed anywhere.
    """
    folder = config.model.folder
    shape = asdict(shape_of(config.model)) if folder is None else folder_facts(folder)
    model = {**asdict(config.model), "vocab_size": vocab_size, **shape}
    data = {**asdict(with_whole_paths(config.data)), "seed": config.run.seed, "packs": packs}
    data["dtype"] = str(dtype).removeprefix("torch.")
    return json.loads(
        json.dumps(
            {
                "model": {k: v for k, v in model.items() if k not in MODEL_NEUTRAL},
                "data": {k: v for k, v in data.items() if k not in DATA_NEUTRAL},
                "optimizer": config.optim.name,
                "optim": {"max_steps": config.run.steps, **asdict(config.optim)},
                "folder": folder,
            }
        )
    )


_OTHER_FLAGS = {"seed": "--seed", "dtype": "--dtype", "packs": "packs in --data"}
_SHORT = ("max_steps", "lr", "schedule", "warmup_steps", "clip_norm")
"""Options of the optimiser whose flag is their name."""


def _shown(section: str, name: str, value: Any) -> str:
    if name == "vocab_size":
        return f"a vocabulary of {value} tokens (--data)"
    flag = f"--{section}.{name.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {value}"


def check_matches(path: Path, now: dict[str, Any]) -> list[str]:
    """Compares a checkpoint with this run. Returns notes on options that differ.

    now: the `facts` of this run. Data and rotary positions may change on purpose, for example
    between stages of a training, and so may the schedule; a difference is only noted. With another
    model the weights would not fit, or would mean something else. This raises UserError, in one
    line with every flag, both values, and how to take over the checkpoint's configuration. Another
    optimiser is refused as well, because its state would be missing.
    """
    try:
        record, _ = read_record(path)
    except Damaged as error:
        raise UserError(f"--resume: {path} is damaged: {error}") from None
    saved, new = record["model"], now["model"]
    differ = [name for name in new if name in saved and _meant(name, saved) != _meant(name, new)]
    changed = [name for name in differ if name not in POSITIONS]
    if changed:
        before = " and ".join(_shown("model", name, saved[name]) for name in changed)
        after = " and ".join(_shown("model", name, new[name]) for name in changed)
        config = path.parent.parent / "config.toml"
        advice = f"; to continue it, use --config {config} instead" if config.is_file() else ""
        raise UserError(
            f"--resume: {path} was trained with {before}, but this run has {after}{advice}"
        )
    optimizer = record.get("optimizer", "adamw")  # the only one before there was a choice
    if optimizer != now["optimizer"]:
        raise UserError(
            f"--resume: {path} was trained with --optimizer {optimizer}, whose state --optimizer "
            f"{now['optimizer']} cannot continue"
        )
    notes = [
        f"rotary positions differ: {_shown('model', name, new[name])}, "
        f"before {_shown('model', name, saved[name])}"
        for name in differ
        if name in POSITIONS
    ]
    for name, value in now["data"].items():
        if name in record["data"] and not same_path(name, record["data"][name], value):
            flag = _OTHER_FLAGS.get(name, f"--data.{name.replace('_', '-')}")
            was = record["data"][name]
            notes.append(f"the resumed run's data differ: {flag} is {value}, was {was}")
    notes += _schedule_notes(record, now["optim"])
    if record["format"] == 1:
        unknown = ", ".join(name for name in new if name not in saved)
        notes.append(
            f"{path} is of format 1: it has no checksums, so damage to it is not found, and does "
            f"not say what its {unknown} were"
        )
    return notes


def _meant(name: str, model: dict[str, Any]) -> Any:
    """The value of an option of the model."""
    return IMPLIED.get(name) if model[name] is None else model[name]


def _schedule_notes(record: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A note on options of the optimiser that differ, with what becomes of the learning rate.

    Empty if none differ, and for checkpoints of versions that did not record these options.
    """
    saved, step = record.get("optim"), record["step"]
    if not isinstance(saved, dict):
        return []
    changes = []
    for name in sorted(saved.keys() & now.keys(), key=list(now).index):
        if saved[name] != now[name]:
            flag = f"--{'' if name in _SHORT else 'optim.'}{name}".replace("_", "-")
            changes.append(f"{flag} is {now[name]}, was {saved[name]}")
    if not changes:
        return []
    was, becomes = _rate(saved, step), _rate(now, step + 1)
    return [
        f"the resumed run's schedule differs: {'; '.join(changes)}; the learning rate of step "
        f"{step} was {was:.1e}, that of step {step + 1} is {becomes:.1e}"
    ]


def _rate(options: dict[str, Any], step: int) -> float:
    """The learning rate of a step. options: the section "optim" of `facts`."""
    names = {field.name for field in fields(OptimConfig)}
    config = OptimConfig(**{name: value for name, value in options.items() if name in names})
    return learning_rate(config, step, options["max_steps"])


def random_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    """The states of this rank's random number generators, under names that contain the rank."""
    state = {f"cpu-{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state[f"cuda-{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return state


def load(
    path: Path, model: nn.Module, optimizer: Stepper, ranks: Ranks, trust: bool = False
) -> Progress:
    """Fills model and optimiser from a checkpoint of any split. Returns how far the run was.

    The optimiser keeps the hyper-parameters that are configured now. A rank whose random number
    generators were not saved, because there were fewer ranks, keeps its own. trust: allow the
    checkpoint's pickles to run code. Raises UserError, on all ranks, for a checkpoint that does not
    fit the model or cannot be read. Collective.
    """
    record: dict[str, Any] = {}
    metadata, problem = None, ""
    try:
        record, files = read_record(path)
        metadata = read_metadata(path, files, trust)
    except Damaged as error:
        problem = str(error)
    problem = ranks.first_problem(problem)
    if metadata is None or problem:
        raise UserError(f"--resume: {path} is damaged: {problem}")
    hyper = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    parameters, moments = get_state_dict(model, optimizer)
    names = metadata.state_dict_metadata
    random = {k: v for k, v in random_state(ranks).items() if f"random.{k}" in names}
    state: dict[str, Any] = {
        "model": parameters,
        "optimizer": moments,
        "progress": {
            name: torch.tensor(0, device="cpu")
            for name in asdict(Progress())
            if f"progress.{name}" in names
        },
        "random": random,
    }
    try:
        with shown("loading the checkpoint"):
            dcp.load(
                state,
                storage_reader=CheckedReader(path, metadata),
                planner=reading(trust)[1](),
                process_group=ranks.host_group,
            )
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    except (CheckpointException, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume: {path} cannot be loaded: {first_cause(error)}") from error
    if unknown := {n for n in names if n.startswith("model.")} - {f"model.{n}" for n in parameters}:
        raise UserError(
            f"--resume: {path} holds {min(unknown)}, which this model does not have; the run may "
            "have been started by a version with other defaults, such as --model.gate-bias True"
        )
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        group.update(values)
    if f"cpu-{ranks.rank}" in random:
        torch.set_rng_state(random[f"cpu-{ranks.rank}"])
    if f"cuda-{ranks.rank}" in random:
        torch.cuda.set_rng_state(random[f"cuda-{ranks.rank}"], ranks.device)
    progress = Progress(**{name: int(value) for name, value in state["progress"].items()})
    # versions that did not record packs or tokens: as if no batch or no pack had another size
    if "packs" not in state["progress"]:
        size = record["data"].get("global_batch_size", 0)
        progress = replace(progress, packs=progress.step * size)
    if "tokens" not in state["progress"]:
        progress = replace(progress, tokens=progress.packs * record["data"].get("seq_len", 0))
    return progress


def first_cause(error: BaseException) -> str:
    """The cause of a failure in DCP, in one line. If several ranks failed, it is that of the lowest
    rank."""
    rank = ""
    if isinstance(error, CheckpointException) and error.failures:
        number = min(error.failures)
        rank = f" (rank {number})" if len(error.failures) > 1 or number > 0 else ""
        error = error.failures[number][0]
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(" :.") if lines else type(error).__name__
    if not isinstance(error, (OSError, Damaged)):
        text = f"{type(error).__name__}: {text}" if lines else text
    return text + rank


def remove(path: Path) -> None:
    """Deletes a folder, a file or a link. The target of a link is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(run: Path, after: int | None = None) -> list[str]:
    """Deletes unfinished checkpoints and, with `after`, the checkpoints of later steps.

    Returns a line for each checkpoint of a later step and for everything that could not be deleted.
    Call it on one rank only.
    """
    root, notes = run / "checkpoints", []
    later = [] if after is None else [f for f in _named(run) if step_of(f) > after]
    for path in [*root.glob(PARTIAL + "*"), *later]:
        try:
            remove(path)
            if path in later:
                notes.append(f"removed {path}: later than the resumed step")
        except OSError as error:
            notes.append(f"could not remove {path}: {error}")
    return notes

"""The run's configuration: frozen dataclasses, a command line over them, and TOML in and out.

One tree, four ways in, later ones winning: the defaults below, `--config FILE.toml`, flags. Each
field has its full name (`--parallel.cp`) and, where it is used daily, a short one (`--cp`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro


class UserError(ValueError):
    """A mistake in what the user asked for: shown as one message, without a traceback."""


def _short(*flags: str) -> Any:
    return tyro.conf.arg(aliases=flags)


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. A named size sets every dimension; the others override one each."""

    size: Annotated[Literal["tiny", "340M", "1.3B"], _short("--model")] = "tiny"
    """Named size; `tiny` trains on a CPU."""
    mixer: Annotated[
        Literal["kda", "gdn", "comba", "gdp", "gla", "simple_gla"], _short("--mixer")
    ] = "kda"
    """Token mixer of each block: Kimi Delta Attention, Gated DeltaNet, Comba, Gated DeltaProduct,
    GLA or simple GLA."""
    layers: int | None = None
    """Number of blocks."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    num_heads: int | None = None
    """Heads of the mixer."""
    head_dim: int | None = None
    """Key and value channels of a head, at most 256."""
    tie_embeddings: bool | None = None
    """Use the embedding as the output head."""
    gate_lower_bound: float | None = None
    """Lowest log decay per token of kda, in [-5, 0); None leaves the gate unbounded."""
    impl: Annotated[Literal["auto", "torch", "triton"], _short("--impl")] = "auto"
    """Backend of the operators; auto chooses by device."""
    remat: Annotated[bool, _short("--remat")] = False
    """Recompute each block in the backward instead of keeping its activations."""


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how much of it a step takes."""

    source: Annotated[str, _short("--data")] = "stdlib"
    """stdlib, synthetic, text:PATH or memmap:PATH."""
    seq_len: Annotated[int, _short("--seq-len")] = 4096
    """Tokens of a pack; documents are packed into it, none attends to another."""
    global_batch_size: Annotated[int, _short("--global-batch-size")] = 2
    """Packs of a step, over all data-parallel ranks."""
    micro_batch_size: Annotated[int | None, _short("--micro-batch-size")] = None
    """Packs that one forward and backward takes on a data-parallel rank; None: all of its packs."""
    eval_batches: Annotated[int, _short("--eval-batches")] = 4
    """Held-out batches (of global_batch_size packs) that an evaluation reads, always the same."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is split: cp * dp_shard * dp_replicate ranks."""

    cp: Annotated[int, _short("--cp")] = 1
    """Ranks that share one sequence (context parallelism)."""
    dp_shard: Annotated[int, _short("--dp-shard")] = 1
    """Data-parallel ranks that shard the parameters (FSDP, together with the cp ranks)."""
    dp_replicate: Annotated[int, _short("--dp-replicate")] = 1
    """Data-parallel replicas of the sharded parameters (HSDP)."""
    layout: Literal["contiguous", "zigzag"] = "contiguous"
    """Which tokens a cp rank owns: one run, or two mirrored ones."""
    exchange: Annotated[
        Literal["auto", "all_gather", "ring", "scan", "heads", "symmetric"], _short("--exchange")
    ] = "auto"
    """How states travel between cp ranks; see fla_cp.comm."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _short("--device")] = "auto"
    """auto: cuda where every local rank has a GPU, else cpu."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _short("--dtype")] = "auto"
    """Compute dtype; parameters and optimiser stay float32. auto: bfloat16 on cuda."""

    @property
    def world_size(self) -> int:
        return self.cp * self.dp_shard * self.dp_replicate

    @property
    def dp(self) -> int:
        return self.dp_shard * self.dp_replicate


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and a cosine decay over run.max_steps."""

    lr: Annotated[float, _short("--lr")] = 4e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Last learning rate, as a share of the peak."""
    warmup_steps: Annotated[int, _short("--warmup-steps")] = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices; norms, biases, A_log and dt_bias have none."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    clip_norm: Annotated[float, _short("--clip-norm")] = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(frozen=True)
class RunConfig:
    """How long to train, and what is written where."""

    max_steps: Annotated[int, _short("--max-steps")] = 150
    """Optimiser steps of the whole run, those before a resume included."""
    seed: Annotated[int, _short("--seed")] = 0
    """Seed of the weights and of the order of the data."""
    eval_every: Annotated[int, _short("--eval-every")] = 25
    """Steps between held-out losses; also before the first and after the last. 0: never."""
    checkpoint_every: Annotated[int, _short("--checkpoint-every")] = 0
    """Steps between checkpoints. The end of a run and SIGTERM or SIGINT write one in any case."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    resume: Annotated[str, _short("--resume")] = "none"
    """none; auto: newest whole checkpoint of --out, if any; or a run's or a checkpoint's path.
    auto without --out looks in the newest runs/ folder of this model that has a checkpoint."""
    trust_checkpoint: bool = False
    """Load a checkpoint whose pickles hold what torch's own do not; they may run any code."""
    out: Annotated[str | None, _short("--out")] = None
    """Run folder, on a file system that all hosts share. None: runs/<date>-<time>-<model>."""
    log_every: Annotated[int, _short("--log-every")] = 10
    """Steps between printed lines where there is no terminal for a progress bar."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""


@dataclass(frozen=True)
class ParityConfig:
    """--check-parity: the same steps on one rank and on the given split, compared."""

    check: Annotated[bool, _short("--check-parity")] = False
    """Compare instead of training; exit code 1 over a budget."""
    steps: int = 3
    """Steps that are compared."""
    loss_budget: float | None = None
    """Largest relative difference of a loss; None: 1e-5 in float32, 5e-3 in bfloat16."""
    grad_budget: float | None = None
    """Largest relative L2 difference of a gradient; None: from each one's own error to float64."""


@dataclass(frozen=True)
class TrainConfig:
    """Trains a KDA language model with the sequence sharded over ranks."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    config: str | None = None
    """TOML file whose values replace the defaults; flags win over it."""


def parse(argv: Sequence[str], *, quiet: bool = False) -> TrainConfig:
    """The validated configuration of a command line (without the program's name).

    quiet: print nothing on a parse error (ranks other than 0). Raises UserError for an unreadable
    file, an unknown or ill-typed TOML key, or a value that breaks a rule; SystemExit for flags
    that tyro refuses.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")  # without a value: left to tyro, whose message fits
    path = finder.parse_known_args(list(argv))[0].config
    default = load_toml(Path(path)) if path else TrainConfig()
    # console_outputs alone leaves tyro's value errors on
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
        config = tyro.cli(
            TrainConfig,
            prog="launch/train.py",
            args=list(argv),
            default=default,
            console_outputs=not quiet,
        )
    config = dataclasses.replace(config, config=None)
    validate(config)
    return config


def load_toml(path: Path) -> TrainConfig:
    """The configuration in a TOML file: the defaults with the file's values. Raises UserError."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not valid TOML: {error}") from None
    return _from_table(TrainConfig, table, str(path), "")


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML that `load_toml` reads back; fields that are None are left out."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if not dataclasses.is_dataclass(value):
            continue
        lines.append(f"[{section.name}]")
        for item in dataclasses.fields(value):
            entry = getattr(value, item.name)
            if entry is not None:
                # a JSON string, number or boolean is the same in TOML
                lines.append(f"{item.name} = {json.dumps(entry, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


def _from_table(kind: type, table: dict, file: str, prefix: str) -> Any:
    hints = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind) if f.name != "config"]
    values = {}
    for key, value in table.items():
        name = prefix + key
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"--config: unknown key {name} in {file}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise UserError(f"--config: {name} in {file} must be a table, got {value!r}")
            values[key] = _from_table(hints[key], value, file, f"{name}.")
        else:
            values[key] = _typed(hints[key], value, f"--config: {name} in {file}")
    return kind(**values)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The value, as an instance of the annotated type. Raises UserError."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:
            return value
    wanted = [
        "one of " + ", ".join(map(repr, get_args(o))) if get_origin(o) is Literal else o.__name__
        for o in options
        if o is not type(None)
    ]
    raise UserError(f"{where} must be {' or '.join(wanted)}, got {value!r}")


def validate(config: TrainConfig) -> None:
    """Raises UserError with the flag, the rule and the value of the first broken rule."""

    def need(ok: bool, flag: str, rule: str, value: object) -> None:
        if not ok:
            raise UserError(f"{flag} must be {rule}, got {value}")

    def at_least(low: int, **flags: float | None) -> None:
        for name, value in flags.items():
            if value is not None:
                need(value >= low, "--" + name.replace("_", "-"), f"at least {low}", value)

    model, data, parallel = config.model, config.data, config.parallel
    optim, run, parity = config.optim, config.run, config.parity
    at_least(1, cp=parallel.cp, dp_shard=parallel.dp_shard, dp_replicate=parallel.dp_replicate)
    at_least(1, seq_len=data.seq_len, global_batch_size=data.global_batch_size)
    at_least(1, micro_batch_size=data.micro_batch_size, eval_batches=data.eval_batches)
    at_least(1, max_steps=run.max_steps, log_every=run.log_every)
    at_least(0, eval_every=run.eval_every, checkpoint_every=run.checkpoint_every, seed=run.seed)
    at_least(0, warmup_steps=optim.warmup_steps, clip_norm=optim.clip_norm)
    need(run.keep_checkpoints >= 1, "--run.keep-checkpoints", "at least 1", run.keep_checkpoints)
    need(parity.steps >= 1, "--parity.steps", "at least 1", parity.steps)
    for name in ("layers", "hidden_size", "num_heads", "head_dim"):
        value = getattr(model, name)
        need(value is None or value >= 1, f"--model.{name.replace('_', '-')}", "at least 1", value)
    need((model.head_dim or 1) <= 256, "--model.head-dim", "at most 256", model.head_dim)
    bound = model.gate_lower_bound
    need(bound is None or -5 <= bound < 0, "--model.gate-lower-bound", "in [-5, 0)", bound)
    need(optim.lr > 0, "--lr", "positive", optim.lr)
    need(0 <= optim.min_lr_ratio <= 1, "--optim.min-lr-ratio", "in [0, 1]", optim.min_lr_ratio)
    need(optim.weight_decay >= 0, "--optim.weight-decay", "at least 0", optim.weight_decay)
    for name, beta in (("beta1", optim.beta1), ("beta2", optim.beta2)):
        need(0 <= beta < 1, f"--optim.{name}", "in [0, 1)", beta)
    need(optim.eps > 0, "--optim.eps", "positive", optim.eps)

    batch, dp = data.global_batch_size, parallel.dp
    need(
        batch % dp == 0,
        "--global-batch-size",
        f"a multiple of dp-shard * dp-replicate = {parallel.dp_shard} * {parallel.dp_replicate}",
        batch,
    )
    micro = data.micro_batch_size
    need(
        micro is None or (batch // dp) % micro == 0,
        "--micro-batch-size",
        f"a divisor of the {batch // dp} packs of a data-parallel rank",
        micro,
    )
    rows = (micro or batch // dp) * data.seq_len
    need(
        rows >= parallel.cp,
        "--cp",
        f"at most the {rows} tokens of a micro-batch (--micro-batch-size packs of --seq-len)",
        parallel.cp,
    )

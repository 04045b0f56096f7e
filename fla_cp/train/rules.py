"""Rules for a run's configuration, which are checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

from fla_cp.ops.checks import MAX_DIM, MAX_WIDE_DIM
from fla_cp.train.arguments import file_among
from fla_cp.train.balance import check_micro_batches, rates
from fla_cp.train.config import SEEDS, ModelConfig, RunConfig, TrainConfig, UserError
from fla_cp.train.folder_rules import check_model_name
from fla_cp.train.model import shape_of
from fla_cp.train.pattern import SOFTMAX, parse_pattern, parse_stretch

EXPERT_OPTIONS = (
    *("experts_per_token", "shared_experts", "expert_size", "routing_scale", "routing"),
    *("dense_layers", "aux_loss", "bias_rate"),
)
"""Fields of ModelConfig that say something only with `experts`."""


def _check_texts(config: TrainConfig) -> None:
    """Raises UserError for a path or name that a file system or config.toml cannot hold."""
    data, run = config.data, config.run
    texts = {
        "--model": config.model.size,
        "--data": data.source,
        "--tokenizer": data.tokenizer,
        "--data.column": data.column,
        "--data.cache": data.cache,
        "--resume": run.resume,
        "--init-from": run.init_from,
        "--out": run.out,
        "--tracker": run.tracker,
    }
    for flag, text in texts.items():
        if text is None:
            continue
        if not text:
            raise UserError(f"{flag} must not be empty, got {text!r}")
        if any(unicodedata.category(letter) == "Cc" for letter in text):
            raise UserError(f"{flag} must not hold control characters, got {text!r}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{flag} must be valid UTF-8, got {text!r}") from None
    if config.run.out is not None:
        folder = Path(config.run.out)
        if (file := file_among(folder, *folder.parents)) is not None:
            below = "" if file == folder else f": {file} is one"
            raise UserError(f"--out must be a folder, not a file, got {config.run.out}{below}")


def _numbers(config: TrainConfig) -> Iterator[tuple[str, float]]:
    """Every float that is set, with its short flag or, if it has none, its full one."""
    for section in dataclasses.fields(config):
        hints = get_type_hints(type(getattr(config, section.name)), include_extras=True)
        for name, hint in hints.items():
            value = getattr(getattr(config, section.name), name)
            if isinstance(value, float):
                full = f"--{section.name}.{name}".replace("_", "-")
                short = hint.__metadata__[0].aliases if get_origin(hint) is Annotated else ()
                yield (short or (full,))[0], value


def _check_experts(config: TrainConfig) -> None:
    """Raises UserError for options of experts that do not fit each other or the model."""
    model = config.model

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            flag = f"--model.{name.replace('_', '-')}"
            raise UserError(f"{flag} must be {rule}, got {getattr(model, name)}")

    for name in ("experts_per_token", "expert_size"):
        value = getattr(model, name)
        need(value is None or value >= 1, name, "at least 1")
    for name in ("experts", "shared_experts", "aux_loss", "bias_rate", "dense_layers"):
        need((getattr(model, name) or 0) >= 0, name, "at least 0")
    scale = model.routing_scale
    need(scale is None or scale > 0, "routing_scale", "above 0")
    shape = shape_of(model)
    most, layers = shape.experts, shape.layers
    if most is None:
        for name in EXPERT_OPTIONS:
            need(getattr(model, name) is None, name, "left out without --model.experts")
        return

    def fits(ok: bool, name: str, rule: str) -> None:
        """The same for a value that the size may have set."""
        if not ok:
            flag = f"--model.{name.replace('_', '-')}"
            raise UserError(f"{flag} must be {rule}, got {getattr(shape, name)}")

    fits(shape.experts_per_token <= most, "experts_per_token", f"at most the {most} experts")
    fits(shape.dense_layers < layers, "dense_layers", f"below the number of blocks, {layers}")
    free = not model.bias_rate or shape.routing == "sigmoid"
    need(free, "bias_rate", "left out with --model.routing softmax")
    check_micro_batches(config, rates(model, shape.routing)["aux_loss"], "--model.aux-loss")


def _check_trackers(run: RunConfig) -> None:
    """Raises UserError for a name that accelerate does not know, and for one that comes twice."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # a second of imports, not for every tool

    for i, name in enumerate(run.trackers):
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(
                f"--tracker must be none, or names of {known} with commas between them, "
                f"got {run.tracker!r}"
            )
        if name in run.trackers[:i]:
            raise UserError(f"--tracker must name each tracker once, got {run.tracker!r}")


def _check_profile(config: TrainConfig) -> None:
    """Raises UserError for a --profile that is no range of the run's steps."""
    text, last = config.run.profile, config.run.steps
    if text is None:
        return
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if found is None or not 1 <= int(found[1]) < int(found[2]):
        raise UserError(
            f"--profile must be A:B for the steps A to B - 1, with 1 <= A < B, got {text!r}"
        )
    if int(found[2]) > last + 1:
        raise UserError(f"--profile must end at most at {last + 1}, --max-steps + 1, got {text}")
    if config.parity.check:
        raise UserError(f"--profile must be left out with --check-parity, got {text}")


def _mixers(model: ModelConfig) -> set[str]:
    """The mixers that the model may have. Raises UserError for texts that name none."""
    if model.pattern is not None and model.mixer is not None:
        raise UserError(
            f"--model.pattern must be left out beside --mixer {model.mixer}, got {model.pattern}"
        )
    try:
        flag, names = "--model.pattern:", {str(model.mixer)}
        if model.pattern is not None:
            names = set(parse_pattern(model.pattern))
        flag = "--model.rope-scaling"
        if model.rope_scaling is not None:
            parse_stretch(model.rope_scaling)
    except ValueError as error:
        raise UserError(f"{flag} {error}") from None
    return names


def validate(config: TrainConfig) -> None:
    """Raises UserError with the flag, the rule and the value of the first broken rule."""

    def need(ok: bool, flag: str, rule: str, value: object) -> None:
        if not ok:
            raise UserError(f"{flag} must be {rule}, got {value}")

    def at_least(low: int, **flags: float | None) -> None:
        for name, value in flags.items():
            if value is not None:
                need(value >= low, "--" + name.replace("_", "-"), f"at least {low}", value)

    for flag, value in _numbers(config):
        need(math.isfinite(value), flag, "finite", value)
    model, data, parallel = config.model, config.data, config.parallel
    optim, run, parity = config.optim, config.run, config.parity
    _check_texts(config)
    _check_trackers(run)
    check_model_name(config)
    at_least(1, cp=parallel.cp, dp_replicate=parallel.dp_replicate)
    shards = parallel.dp_shard
    need(shards >= 1, "--dp-shard", "at least 1, or -1 for what is left", shards)
    at_least(2, seq_len=data.seq_len)  # one token has no context
    at_least(1, global_batch_size=data.global_batch_size)
    at_least(1, micro_batch_size=data.micro_batch_size, eval_batches=data.eval_batches)
    documents = data.max_documents
    need(documents is None or documents >= 1, "--data.max-documents", "at least 1", documents)
    wanted = documents is None or parallel.cuda_graphs == "on"
    need(wanted, "--data.max-documents", "left out without --cuda-graphs", documents)
    repeats = model.remat == "selective" and model.compile == "on"  # around a compiled block
    need(not repeats, "--compile", "auto or off with --remat selective", model.compile)
    fixed = documents is not None and model.compile == "on"
    need(not fixed, "--data.max-documents", "left out with --compile", documents)
    at_least(0, workers=data.workers)
    need(data.cache_gib > 0, "--data.cache-gib", "positive", data.cache_gib)
    at_least(1, max_steps=run.max_steps, log_every=run.log_every)
    _check_profile(config)
    at_least(0, eval_every=run.eval_every, checkpoint_every=run.checkpoint_every)
    need(0 <= run.seed < SEEDS, "--seed", "at least 0 and below 2^32", run.seed)
    at_least(1, max_skips=run.max_skips)
    at_least(0, warmup_steps=optim.warmup_steps, clip_norm=optim.clip_norm)
    need(run.keep_checkpoints >= 1, "--run.keep-checkpoints", "at least 1", run.keep_checkpoints)
    for name in ("notice_seconds", "timeout_seconds", "rendezvous_seconds"):
        seconds = getattr(parallel, name)
        flag = f"--parallel.{name.replace('_', '-')}"
        # clocks and timeouts can represent the upper end
        need(1 <= seconds <= 1e6, flag, "in [1, 1000000]", seconds)
    at_least(0, max_restarts=parallel.max_restarts)
    twice = parity.check and parallel.max_restarts
    need(not twice, "--max-restarts", "0 with --check-parity", parallel.max_restarts)
    unread = parity.check and run.init_from is not None
    need(not unread, "--init-from", "left out with --check-parity", run.init_from)
    balanced = parallel.layout != "uneven" or parity.check
    layouts = "auto, contiguous or zigzag without --check-parity"
    need(balanced, "--parallel.layout", layouts, parallel.layout)
    need(parity.steps >= 1, "--parity.steps", "at least 1", parity.steps)
    for name in ("layers", "hidden_size", "num_heads", "head_dim"):
        value = getattr(model, name)
        need(value is None or value >= 1, f"--model.{name.replace('_', '-')}", "at least 1", value)
    mixers = _mixers(model)
    narrow = mixers - {"gla", "simple_gla"}
    most = MAX_DIM if narrow else MAX_WIDE_DIM
    rule = f"at most {most} with {' and '.join(sorted(narrow or mixers))}"
    need((model.head_dim or 1) <= most, "--model.head-dim", rule, model.head_dim)
    if model.folder is None:
        _check_experts(config)
    softmax = sorted(mixers & set(SOFTMAX))
    small = softmax and model.head_dim == 1
    need(not small, "--model.head-dim", f"at least 2 with {' and '.join(softmax)}", model.head_dim)
    eps = model.norm_eps
    need(eps is None or eps > 0, "--model.norm-eps", "above 0", eps)
    theta = model.rope_theta
    need(theta is None or theta > 1, "--model.rope-theta", "above 1", theta)
    bound = model.gate_lower_bound
    need(bound is None or -5 <= bound < 0, "--model.gate-lower-bound", "in [-5, 0)", bound)
    assert optim.lr is not None, "with_recipe sets it"
    need(optim.lr > 0, "--lr", "positive", optim.lr)
    need(0 <= optim.min_lr_ratio <= 1, "--optim.min-lr-ratio", "in [0, 1]", optim.min_lr_ratio)
    need(optim.weight_decay >= 0, "--optim.weight-decay", "at least 0", optim.weight_decay)
    for name in ("beta1", "beta2", "momentum"):
        decay = getattr(optim, name)
        need(0 <= decay < 1, f"--optim.{name}", "in [0, 1)", decay)
    need(0 <= optim.decay_ratio <= 1, "--optim.decay-ratio", "in [0, 1]", optim.decay_ratio)
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
    several = micro is not None and micro < batch // dp
    clash = parallel.cuda_graphs == "on" and several and parallel.reduce == "step"
    need(not clash, "--parallel.reduce", "micro_batch with --cuda-graphs", parallel.reduce)
    rows = (micro or batch // dp) * data.seq_len
    need(
        rows >= parallel.cp,
        "--cp",
        f"at most the {rows} tokens of a micro-batch (--micro-batch-size packs of --seq-len)",
        parallel.cp,
    )

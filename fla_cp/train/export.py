"""Entry point of `fla-cp-export`: a run's weights as a folder that transformers loads.

fla-cp-export runs/20260101-000000-tiny model/

The folder has config.json, the weights as safetensors in the layout of the published model whose
layers the run has, and the run's tokenizer. The model is what trainer.json of the checkpoint says,
so neither the split over ranks nor config.toml matters. One block's weights are held at a time.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fla_cp.integrations.layouts import Layout, layout_of
from fla_cp.integrations.layouts.table import own_shapes
from fla_cp.integrations.safetensors_folder import SHARD_BYTES, new_folder, write_tensors
from fla_cp.train import checkpoint
from fla_cp.train.arguments import Parser
from fla_cp.train.config import ModelConfig, ParallelConfig, UserError
from fla_cp.train.distributed import Ranks, joined
from fla_cp.train.ending import say
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.integrity import Damaged, FileSums
from fla_cp.train.model import Decoder, Shape
from fla_cp.train.published import why_not_read
from fla_cp.train.stock_checkpoint import export_checkpoint
from fla_cp.train.tokenizer import Tokenizer
from fla_cp.train.untrusted import CheckedReader, reading
from fla_cp.train.waiting_bars import Update, shown
from fla_cp.train.weights import on_meta

ALWAYS_FP32 = ("core.A_log", "core.dt_bias", "router.correction_bias")
"""Endings of the names of tensors that stay float32, because bfloat16 is too coarse for them."""

_PREFIX = "model."


def export(
    run: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    trust: bool = False,
) -> str:
    """Writes a run's newest whole checkpoint as a folder; returns a line about it.

    run: a run folder, or a checkpoint. out: a folder that does not exist, or an empty one. dtype:
    of the weights; decays and biases of routers stay float32. shard_bytes: see `write_tensors`.
    trust: allow the checkpoint's pickles to run code. The same weights give the same bytes, however
    the run was split over ranks.
    Raises ValueError (UserError) for a run without a whole checkpoint, for a model that no
    published layout expresses, with the reason, and for an `out` that has files.
    """
    with joined(ParallelConfig(device="cpu")) as ranks:  # DCP warns without a process group
        return _exported(whole_checkpoint(run, trust, ranks), out, dtype, shard_bytes, trust)


def _exported(path: Path, out: Path, dtype: torch.dtype, shard_bytes: int, trust: bool) -> str:
    record, files = checkpoint.read_record(path)
    if record["format"] == 1:
        raise UserError(
            f"RUN: {path} is of format 1, which does not say what its model's options were; resume "
            "it for one step and export that"
        )
    metadata = checkpoint.read_metadata(path, files, trust)
    if record.get("folder") is not None:
        return export_checkpoint(path, record, metadata, out, dtype, shard_bytes, trust)
    decoder = recorded_decoder(record)
    layout = layout_of(decoder)
    weights = _Weights(path, decoder, metadata, trust)
    with new_folder(out) as partial:
        ids = _save_tokenizer(record["data"].get("tokenizer"), partial)
        length = {layout.length_name: record["data"]["seq_len"]}
        kind = {"dtype": str(dtype).removeprefix("torch.")}
        config = {**length, **layout.config, **ids, **kind}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
        with shown("writing the model", len(layout.tensors), "tensors") as update:
            tensors = _published(layout, weights, dtype, update)
            write_tensors(partial, tensors, shard_bytes)
    count = sum(x.numel() for x in decoder.parameters())
    return f"{out}: {layout.model_type} of {path.name}, {count / 1e6:.2f} M parameters"


def recorded_decoder(record: Mapping[str, Any]) -> Decoder:
    """The decoder that a checkpoint's trainer.json describes, on the meta device."""
    model = record["model"]

    def values(kind: type) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: model[name] for name in names if name in model}

    with on_meta():
        config, shape = ModelConfig(**values(ModelConfig)), Shape(**values(Shape))
        return Decoder(config, model["vocab_size"], shape)


def own_record(path: Path) -> tuple[dict[str, Any], list[FileSums]]:
    """What `read_record` says of a checkpoint of fla_cp's own models.

    Raises UserError for format 1, and for a model of transformers, with the way to go on.
    """
    record, files = checkpoint.read_record(path)
    if record["format"] == 1:
        raise UserError(
            f"RUN: {path} is of format 1, which does not say what its model's options were; resume "
            "it for one step and take that"
        )
    if record.get("folder") is not None:
        kind = record["model"].get("model_type")
        source = shlex.quote(str(path))
        if reason := why_not_read(record["model"]):
            raise UserError(
                f"RUN must not be a run of --model hf:DIR, got {path} of {kind}: write it with "
                f"fla-cp-export {source} OUT, and use transformers' own generate on OUT, which "
                f"fla_cp's decoder does not read: {reason}"
            )
        raise UserError(
            f"RUN must not be a run of --model hf:DIR, got {path} of {kind}: write it with "
            f"fla-cp-export {source} OUT, and give OUT instead"
        )
    return record, files


def whole_checkpoint(run: Path, trust: bool, ranks: Ranks) -> Path:
    found = [run] if checkpoint.complete(run) else checkpoint.checkpoints(run)[::-1]
    if not found:
        problem = "holds no complete one" if run.exists() else "does not exist"
        raise UserError(f"RUN must be a run folder or a checkpoint; {run} {problem}")

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    path, _ = checkpoint.newest_whole(found, str(run), trust, ranks, say, flag="RUN")
    assert path is not None
    return path


class _Weights:
    """The decoder's tensors in a checkpoint, read a block at a time."""

    def __init__(self, path: Path, decoder: Decoder, metadata: dcp.Metadata, trust: bool) -> None:
        self.path, self.metadata, self.planner = path, metadata, reading(trust)[1]
        self.shapes = own_shapes(decoder)
        self.held: dict[str, Tensor] = {}
        _check_names(path, decoder, metadata)

    def __call__(self, name: str) -> Tensor:
        if name not in self.held:
            block = _block(name)
            self.held = {
                other: torch.empty(shape, dtype=torch.float32, device="cpu")
                for other, shape in self.shapes.items()
                if _block(other) == block
            }
            dcp.load(
                {"model": self.held},
                storage_reader=CheckedReader(self.path, self.metadata),
                planner=self.planner(),
            )
        return self.held[name]


def _block(name: str) -> str:
    """What is read at once: blocks.3, or a tensor outside of blocks."""
    return ".".join(name.split(".")[:2])


def _check_names(path: Path, decoder: Decoder, metadata: dcp.Metadata) -> None:
    """Raises UserError for a checkpoint of other tensors than the decoder's."""
    stored = {
        name.removeprefix(_PREFIX): getattr(entry, "size", None)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(_PREFIX)
    }
    wanted = {name: x.shape for name, x in decoder.state_dict().items()}
    for name in sorted({*stored, *wanted}):
        if stored.get(name) != wanted.get(name):
            raise UserError(
                f"RUN: {path} has {name} of shape {stored.get(name)}, but its options say "
                f"{wanted.get(name)}; it may be of an older version: resume it for one step and "
                "export that"
            )


def _published(
    layout: Layout, weights: _Weights, dtype: torch.dtype, update: Update
) -> Iterator[tuple[str, Tensor]]:
    for name, published in layout.tensors.items():
        whole = layout.assembled(name, weights)
        exact = any(run.own.endswith(ALWAYS_FP32) for run in published.runs)
        yield name, whole if exact else whole.to(dtype)
        update()
    for name, other in layout.copies.items():
        if name not in layout.tensors and layout.writes_copies:
            yield name, layout.assembled(other, weights).to(dtype)


def _save_tokenizer(source: str | None, folder: Path) -> dict[str, int | None]:
    """Writes the run's tokenizer; returns its special tokens as config.json names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if source is None:
        return dict.fromkeys(names)
    try:
        tokenizer = Tokenizer(source).hf
    except ValueError as error:
        raise UserError(f"the tokenizer of the run cannot be read: {error}") from None
    tokenizer.save_pretrained(str(folder))
    return {name: getattr(tokenizer, name, None) for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    """Exports as the arguments say and returns the exit code, see fla_cp/train/exit_codes.py."""
    parser = Parser(
        "fla-cp-export", description="Writes a run's weights as a folder for transformers."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a checkpoint in it")
    parser.add_argument("out", type=Path, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the weights in the files; bfloat16 rounds them, but A_log, dt_bias and "
        "the biases of routers stay float32 (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=SHARD_BYTES,
        help="largest size of a file in bytes, unless one tensor alone is larger "
        "(default: %(default)s)",
    )
    trust = "load a checkpoint whose pickles may run any code; otherwise it is refused"
    parser.add_argument("--trust-checkpoint", action="store_true", help=trust)
    given = parser.parse_args(argv)
    try:
        if given.shard_bytes < 1:
            raise UserError(f"--shard-bytes must be at least 1, got {given.shard_bytes}")
        line = export(
            given.run,
            given.out,
            dtype=getattr(torch, given.dtype),
            shard_bytes=given.shard_bytes,
            trust=given.trust_checkpoint,
        )
    except (ValueError, OSError, Damaged) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    say(line)
    return 0

"""The weights of a checkpoint of --model hf:DIR, as a folder in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fla_cp.integrations.stock_export import export_stock
from fla_cp.integrations.stock_folder import folder_facts
from fla_cp.train.config import UserError
from fla_cp.train.stock_weights import published_name
from fla_cp.train.untrusted import CheckedReader, reading

_PREFIX = "model."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def export_checkpoint(
    path: Path,
    record: Mapping[str, Any],
    metadata: dcp.Metadata,
    out: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    trust: bool,
) -> str:
    """Writes a verified checkpoint as `out`; returns a line about it. See `export_stock`.

    record: the checkpoint's trainer.json, with the folder that the run started from. metadata: of
    the checkpoint. Raises ValueError (UserError) if that folder is gone or has another model now,
    or if the checkpoint has other tensors than the model.
    """
    folder = record["folder"]
    for name, value in folder_facts(folder).items():
        if record["model"].get(name, value) != value:
            raise UserError(
                f"RUN: {path} was trained with {name} {record['model'][name]}, but the config.json "
                f"of its folder {folder} has {value}"
            )
    stored = {
        published_name(name.removeprefix(_PREFIX)): (name.removeprefix(_PREFIX), tuple(entry.size))
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(_PREFIX) and hasattr(entry, "size")
    }

    def whole(name: str) -> Tensor:
        if name == HEAD and name not in stored:
            name = EMBEDDING  # they are tied, and the checkpoint has them once
        if name not in stored:
            raise UserError(f"RUN: {path} has no {name}, which {folder} has")
        own, shape = stored[name]
        found = torch.empty(shape, dtype=torch.float32, device="cpu")
        dcp.load(
            {"model": {own: found}},
            storage_reader=CheckedReader(path, metadata),
            planner=reading(trust)[1](),
        )
        return found

    kind = export_stock(folder, out, whole, dtype=dtype, shard_bytes=shard_bytes)
    count = sum(torch.Size(shape).numel() for _, shape in stored.values())
    return f"{out}: {kind} of {path.name}, {count / 1e6:.2f} M parameters"

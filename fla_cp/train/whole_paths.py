"""The paths of a run's data as the run stores them: absolute, so that they name the same files from
any folder. Records of older versions have the paths as they were given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fla_cp.train.config import DataConfig
from fla_cp.train.mixture import changed_sources


def with_whole_paths(data: DataConfig) -> DataConfig:
    """The same data, with whole paths of the sources and of the tokenizer."""
    tokenizer = None if data.tokenizer is None else _whole(data.tokenizer)
    return dataclasses.replace(data, source=whole_source(data.source), tokenizer=tokenizer)


def whole_source(spec: str) -> str:
    """What `--data` names, with whole paths of text:, memmap: and hf:."""

    def whole(source: str) -> str:
        kind, _, path = source.partition(":")
        return f"{kind}:{_whole(path)}" if kind in ("text", "memmap", "hf") and path else source

    return changed_sources(spec, whole)


def same_path(name: str, stored: object, now: object) -> bool:
    """Whether a stored option of the data is the same as the run's, which has whole paths.

    name: of the option. stored: its value in a record of any version; a relative path counts from
    the present folder.
    """
    if isinstance(stored, str) and name in ("source", "tokenizer"):
        stored = whole_source(stored) if name == "source" else _whole(stored)
    return stored == now


def _whole(path: str) -> str:
    return str(Path(path).absolute())

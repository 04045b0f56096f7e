"""Limits the size of a folder of shards: the least recently used shards are deleted.

A shard is used when somebody opens it, which sets the time of its folder. Deleting one under a run
that reads it does no harm: its open files stay readable, and it is made again when it is needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30


def mark_used(shard: Path) -> None:
    """Makes a shard the one that was used last. In a folder that is read-only nothing happens."""
    with suppress(OSError):
        os.utime(shard)


def prune(root: Path, limit: int, keep: Path) -> int:
    """Deletes shards of any data set below `root`, least recently used first, until they have at
    most `limit` bytes. Returns how many were deleted. keep: a shard that stays in any case."""
    shards = sorted(_shards(root))
    excess, deleted = sum(size for _, size, _ in shards) - limit, 0
    for _, size, shard in shards:
        if excess <= 0:
            break
        if shard != keep and _deleted(shard):
            excess, deleted = excess - size, deleted + 1
    return deleted


def _shards(root: Path) -> Iterator[tuple[int, int, Path]]:
    """When each shard was used last, its bytes and its folder."""
    for shard in root.glob("*/[0-9]*"):
        with suppress(OSError):  # another process may be deleting it
            if shard.is_dir():
                size = sum(file.stat().st_size for file in shard.iterdir())
                yield shard.stat().st_mtime_ns, size, shard


def _deleted(shard: Path) -> bool:
    """Whether this process has deleted a shard. It is renamed first, since a shard that exists must
    be whole."""
    doomed = shard.with_name(f".{shard.name}-{os.getpid()}-pruned")
    try:
        shard.rename(doomed)
    except OSError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True

"""Documents in groups, each tokenised once and kept in a folder for all who read it.

A *shard* is a group of documents, in the format of memmap.py. Whoever needs one first makes it,
under a lock, so that the ranks and workers of a host share the work; a process that waits finds the
shard. A shard is written under another name and renamed, so one that exists is whole. Its tokens
are a function of the documents and the tokenizer: the folder may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from fla_cp.train.cache_limit import mark_used, prune
from fla_cp.train.documents import Documents
from fla_cp.train.memmap import DTYPES, MemmapSource, narrowest, write_memmap
from fla_cp.train.tokenizer import Tokenizer

_T = TypeVar("_T")

FORMAT = 1
"""Version of the shards. It must change if other tokens are written for the same documents."""

SHUFFLE_SEED = 0

_TOKENISING = threading.Lock()
"""A fast tokenizer raises "Already borrowed" if two threads of a process call it at once."""


class Shards:
    """The shards of some documents.

    root: folder in which these shards have a folder of their own, whose name depends on documents,
    tokenizer and grouping. shard_bytes: about how many bytes of text a shard has. shuffled: group
    the documents in an order that is random, but always the same. limit: the most bytes that all
    shards below root may have. If there are more, the least recently used shards are deleted. None:
    no limit.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        root: Path,
        shard_bytes: int,
        shuffled: bool = True,
        limit: int | None = None,
    ) -> None:
        self.root, self.limit, self.unpruned = root, limit, limit or 0
        self.documents, self.tokenizer, self.shuffled = documents, tokenizer, shuffled
        self.group = max(1, shard_bytes * len(documents) // max(documents.size, 1))
        facts = f"{FORMAT} {documents.digest} {tokenizer.digest} {self.group} {shuffled}"
        self.folder = root / hashlib.sha256(facts.encode()).hexdigest()[:32]

    @cached_property
    def _order(self) -> np.ndarray:
        count = len(self.documents)
        if not self.shuffled:
            return np.arange(count, dtype=np.int64)
        return np.random.default_rng(SHUFFLE_SEED).permutation(count)

    def __len__(self) -> int:
        return -(-len(self.documents) // self.group)

    def path(self, shard: int) -> Path:
        return self.folder / f"{shard:06d}"

    def exists(self, shard: int) -> bool:
        return self.path(shard).is_dir()

    def make(self, shard: int) -> Path:
        """The folder of a shard, which this process writes if nobody has.

        Raises ValueError for a document that cannot be tokenised.
        """
        path = self.path(shard)
        if self.exists(shard):
            mark_used(path)
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not self.exists(shard):
                self._write(shard, path)
                self._prune(path)
        return path

    def _prune(self, made: Path) -> None:
        """Keeps the limit. The folder is looked through only after each 64th of it was written."""
        if self.limit is not None:
            self.unpruned += sum(file.stat().st_size for file in made.iterdir())
            if self.unpruned >= self.limit // 64:
                self.unpruned = 0
                prune(self.root, self.limit, made)

    def _write(self, shard: int, path: Path) -> None:
        chosen = self._order[shard * self.group : (shard + 1) * self.group]
        with _TOKENISING:
            documents, names = self.documents.read(chosen.tolist())
            encoded = self.tokenizer.encode(self.documents.form, documents, names)
        masked = self.documents.form != "text"
        partial = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_memmap(
            partial / "tokens",
            [document.tokens for document in encoded],
            self.tokenizer.vocab_size,
            narrowest(self.tokenizer.vocab_size),
            [document.counted for document in encoded] if masked else None,
        )
        try:
            partial.rename(path)
        except OSError:  # where there are no locks, another process may have been faster
            if not path.is_dir():
                raise
            shutil.rmtree(partial)

    def tokens(self, shard: int) -> int:
        """How many tokens a shard has; it is made if need be."""
        size = self._opened(shard, lambda path: (path / "tokens.bin").stat().st_size)
        return size // DTYPES[narrowest(self.tokenizer.vocab_size)].itemsize

    def source(self, shard: int) -> MemmapSource:
        """The tokens of a shard; it is made if need be."""
        return self._opened(shard, MemmapSource)

    def _opened(self, shard: int, read: Callable[[Path], _T]) -> _T:
        """What `read` finds in a shard, which another process may delete before it is read."""
        try:
            return read(self.make(shard))
        except (OSError, ValueError):
            if self.exists(shard):
                raise
            return read(self.make(shard))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, where the file system has locks. The file is removed afterwards.

    A process that opened the file before its removal may hold another lock than one that comes
    later. Both may then write the shard; one of the two equal results stays.
    """
    with open(path, "wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

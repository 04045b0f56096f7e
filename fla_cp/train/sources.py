"""The data set that `--data` names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fla_cp.train.data import ArraySource, PackedDataset, Packs, TokenSource
from fla_cp.train.documents import Documents, RowDocuments, TextDocuments
from fla_cp.train.memmap import MemmapSource
from fla_cp.train.mixture import MixedPacks, parse_mixture
from fla_cp.train.needle import NeedleSource
from fla_cp.train.shards import Shards
from fla_cp.train.synthetic import synthetic_source
from fla_cp.train.text_files import (
    HELD_OUT,
    File,
    Split,
    file_errors,
    held_out_split,
    stdlib_files,
    text_files,
)
from fla_cp.train.tokenised import TokenisedPacks, shard_bytes
from fla_cp.train.tokenizer import Tokenizer

MAX_TEXT_BYTES = 1 << 30
SPECS = (
    *("stdlib", "text:PATH", "memmap:PATH", "hf:PATH", "synthetic", "needle:LENGTH"),
    "A:WEIGHT,B:WEIGHT",
)


@dataclass(frozen=True)
class Reading:
    """How documents are read. tokenizer: folder of a tokenizer; None: bytes are tokens. column: see
    RowDocuments. cache: folder for tokenised documents; None: `default_cache`. limit: bytes of
    tokenised documents that it may have, see `Shards`. column_flag, cache_flag: the program's
    options for column and cache, for errors."""

    tokenizer: str | None = None
    column: str | None = None
    cache: str | None = None
    limit: int | None = None
    column_flag: str = "--data.column"
    cache_flag: str = "--data.cache"

    @property
    def root(self) -> Path:
        return default_cache() if self.cache is None else Path(self.cache)


def default_cache() -> Path:
    """fla_cp/ in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fla_cp"


def build_dataset(
    spec: str, seq_len: int, split: Split, seed: int, reading: Reading | None = None
) -> Packs:
    """The packs that `spec` names.

    spec: one of
        stdlib       the running Python's standard library, one document a file
        text:PATH    a file, or each text file below a folder; binary files (with a NUL in their
                     first 8 KiB) and unreadable files are skipped, and links to folders are
                     not followed, with a note
        memmap:PATH  tokens written by `write_memmap` or fla-cp-tokenize
        hf:PATH      rows of text, instructions or conversations, see documents.py
        synthetic    generated from `seed`
        needle:N     likewise: documents of up to N tokens that hide a value, see needle.py
        A:0.7,B:0.3  several of these, mixed; see mixture.py
    Without a tokenizer, the bytes of stdlib and text are tokens 0..255, and `hf` is refused. With
    one, documents are tokenised as they are needed, in an order that also depends on the seed, see
    tokenised.py. split: `train` or `valid`. `valid` is about 3% of the files or rows, chosen by a
    hash of the relative path or the number; for `memmap`, or with too few files, it is the last 3%
    of the stream; for `synthetic` and `needle`, it has documents of its own.
    Raises ValueError for an unknown spec or split, missing or malformed files, too few tokens, and
    another vocabulary than the tokenizer's.
    """
    if split not in ("train", "valid"):
        raise ValueError(f"split must be 'train' or 'valid', got {split!r}")
    reading = Reading() if reading is None else reading
    tokenizer = None if reading.tokenizer is None else Tokenizer(reading.tokenizer)
    parts = parse_mixture(spec)
    found = [_source(one, seq_len, split, seed, reading, tokenizer) for one, _ in parts]
    for (one, _), packs in zip(parts, found, strict=True):
        if tokenizer is not None and packs.vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"{one!r} must have the vocabulary of --tokenizer, {tokenizer.vocab_size} tokens, "
                f"got {packs.vocab_size}"
            )
    if len(parts) == 1:
        return found[0]
    return MixedPacks(found, [weight for _, weight in parts], [one for one, _ in parts])


def open_documents(
    spec: str, split: Split | None, reading: Reading
) -> tuple[Documents, tuple[str, ...]] | None:
    """The documents of one source, and notes about files that were skipped; None if it has none.

    split: the part that is held out, the other part, or None for all.
    """
    kind, _, path = spec.partition(":")
    if spec == "stdlib":
        return TextDocuments(stdlib_files(), split), ()
    if kind == "text" and path:
        files, notes = _text_files(path, split)
        return TextDocuments(files, split), notes
    if kind == "hf" and path:
        _check_exists(path)
        given = reading.column, split, reading.root, reading.column_flag
        return RowDocuments(Path(path), *given), ()
    return None


def _source(
    spec: str, seq_len: int, split: Split, seed: int, reading: Reading, tokenizer: Tokenizer | None
) -> Packs:
    """The packs of one source."""
    kind, _, path = spec.partition(":")
    name = f"the {split} split of {spec!r}"
    if kind == "hf" and tokenizer is None:
        _check_exists(path)  # a tokenizer would not help
        raise ValueError(f"{spec!r} needs --tokenizer, the folder of a tokenizer")
    if tokenizer is not None:
        with _cache_errors(reading):
            if (opened := open_documents(spec, split, reading)) is not None:
                documents, notes = opened
                root, size = reading.root / "tokens", shard_bytes(seq_len)
                shards = Shards(documents, tokenizer, root, size, limit=reading.limit)
                ahead = split == "train"
                return TokenisedPacks(shards, seq_len, seed, ahead=ahead, name=name, notes=notes)
    if spec == "stdlib":
        return PackedDataset(_bytes(held_out_split(stdlib_files(), split)), seq_len, name=name)
    if spec == "synthetic":
        tokens, offsets, vocab_size = synthetic_source(seed, split)
        return PackedDataset(ArraySource(tokens, offsets, vocab_size), seq_len, name=name)
    if kind == "needle" and path.isascii() and path.isdigit():
        return PackedDataset(NeedleSource(int(path), seed, split), seq_len, name=name)
    notes = ()
    source: TokenSource
    if kind == "text" and path:
        files, notes = _text_files(path, split)
        chosen = held_out_split(files, split)
        if 0 < len(chosen) < len(files):
            return PackedDataset(_bytes(chosen), seq_len, name=name, notes=notes)
        source = _bytes(files)
    elif kind == "memmap" and path:
        source = MemmapSource(Path(path))
    else:
        raise ValueError(f"unknown data {spec!r}: expected one of {', '.join(SPECS)}")
    cut = len(source) - int(len(source) * HELD_OUT)
    first, stop = (0, cut) if split == "train" else (cut, len(source))
    return PackedDataset(source, seq_len, first=first, stop=stop, name=name, notes=notes)


@contextmanager
def _cache_errors(reading: Reading) -> Iterator[None]:
    """Turns an OSError of the block that is about the cache into a ValueError with its option."""
    try:
        yield
    except OSError as error:
        root = Path(os.path.abspath(reading.root))
        path = Path(os.path.abspath(str(error.filename)))
        above = root.is_relative_to(path) and not os.path.exists(path)
        if error.filename is None or not (above or path.is_relative_to(root)):
            raise
        raise ValueError(
            f"{reading.cache_flag} must be a folder that can be made and written, got "
            f"{reading.root}: {error.strerror}"
        ) from error


def _check_exists(path: str) -> None:
    """Raises ValueError for an hf:PATH that does not exist."""
    if not Path(path).exists():
        raise ValueError(f"hf: no file or folder at {path}")


def _text_files(path: str, split: Split | None) -> tuple[list[File], tuple[str, ...]]:
    """The files of `text:PATH`, and notes about what is left out."""
    files, notes = text_files(Path(path))
    return files, () if split == "valid" else notes  # both splits leave out the same


def _bytes(files: Sequence[File]) -> ArraySource:
    size = sum(path.stat().st_size for _, path in files)
    if size > MAX_TEXT_BYTES:
        raise ValueError(
            f"bytes of text are held in memory, so at most {MAX_TEXT_BYTES}, got {size}: "
            "give a --tokenizer, or write tokens with fla-cp-tokenize and use memmap:PATH"
        )
    documents = []
    for _, path in files:
        with file_errors(path):
            documents.append(path.read_bytes())
    tokens = np.frombuffer(b"".join(documents), dtype=np.uint8)
    offsets = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
    return ArraySource(tokens, offsets, vocab_size=256)

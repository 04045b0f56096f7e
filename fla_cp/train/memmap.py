"""Memory-mapped token files: PATH.bin, PATH.json and, optionally, PATH.offsets and PATH.mask.

    PATH.bin      the tokens, little-endian uint16 or uint32, one document after the other
    PATH.json     {"dtype": "uint16" | "uint32", "vocab_size": int}, and at most one of
                  {"eos_id": int}        a document ends after each such token
                  {"offsets": "FILE"}    in the same folder: little-endian int64 [documents + 1]
                                         from 0 to the number of tokens, never decreasing
                  With neither, the file is one document. Optionally
                  {"mask": "FILE"}       in the same folder: one byte a token, 1 where the token is
                                         a target of the training, 0 where it is only context

PATH may also be a folder that `fla-cp-tokenize` wrote, whose files are FOLDER/tokens.*.

Tokens are read when they are used, so a file may be larger than memory.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET = np.dtype("<i8")
OFFSETS_BLOCK = 1 << 20


def write_memmap(
    path: str | Path,
    documents: Iterable[Any],
    vocab_size: int,
    dtype: str = "uint16",
    masks: Iterable[Any] | None = None,
) -> None:
    """Writes documents (each a sequence of token ids) as PATH.bin, PATH.json and PATH.offsets.

    path: with or without the .bin ending. masks: for each document the tokens that count as
    targets, bool, as long as the document; they are written as PATH.mask. One document is held in
    memory at a time.
    Raises ValueError for an unknown dtype, a vocabulary that it cannot hold, a token outside
    `[0, vocab_size)`, or masks that do not fit the documents.
    """
    _check_vocab(vocab_size, dtype)
    base = _base(Path(path))
    offsets = [0]
    each_mask = None if masks is None else iter(masks)
    with ExitStack() as files:
        file = files.enter_context(open(f"{base}.bin", "wb"))
        if each_mask is not None:
            mask_file = files.enter_context(open(f"{base}.mask", "wb"))
        for index, document in enumerate(documents):
            tokens = np.asarray(document)
            if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
                raise ValueError(f"document {index}: tokens must be integers, got {tokens.dtype}")
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise ValueError(
                    f"document {index}: tokens must lie in [0, {vocab_size}), "
                    f"got {tokens.min()} to {tokens.max()}"
                )
            file.write(tokens.astype(DTYPES[dtype]).tobytes())
            offsets.append(offsets[-1] + tokens.size)
            if each_mask is not None:
                mask = np.asarray(next(each_mask, ()), dtype=bool)
                if mask.size != tokens.size:
                    raise ValueError(
                        f"document {index}: its mask must have as many values as it has tokens, "
                        f"{tokens.size}, got {mask.size}"
                    )
                mask_file.write(mask.tobytes())
    # not numpy's tofile, whose errors have neither a number nor a reason
    Path(f"{base}.offsets").write_bytes(np.array(offsets, dtype=OFFSET).tobytes())
    write_sidecar(base, vocab_size, dtype, masked=masks is not None)


def write_sidecar(base: Path, vocab_size: int, dtype: str, masked: bool) -> None:
    """Writes BASE.json for files with offsets and, if `masked`, a mask."""
    meta = {"dtype": dtype, "vocab_size": vocab_size, "offsets": f"{base.name}.offsets"}
    if masked:
        meta["mask"] = f"{base.name}.mask"
    Path(f"{base}.json").write_text(json.dumps(meta) + "\n")


def narrowest(vocab_size: int) -> str:
    """The smallest dtype that holds all tokens of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class MemmapSource:
    """The token source of files as described above, for example written by `write_memmap`.

    Raises ValueError that names the file and the broken rule. The constructor checks sizes, dtype,
    vocabulary, the types in PATH.json and the offsets, which it reads once; `read` raises for a
    token outside the vocabulary, `counted` for a mask of other values than 0 and 1.
    """

    def __init__(self, path: Path):
        base = _base(path)
        self.bin, sidecar = Path(f"{base}.bin"), Path(f"{base}.json")
        for file in (self.bin, sidecar):
            if not file.is_file():
                raise ValueError(f"memmap: no file at {file}")
        meta = _sidecar(sidecar)
        dtype, self.vocab_size = meta["dtype"], meta["vocab_size"]
        _check_vocab(self.vocab_size, dtype, str(sidecar))
        self.dtype = DTYPES[dtype]
        size, remainder = divmod(self.bin.stat().st_size, self.dtype.itemsize)
        if remainder or not size:
            raise ValueError(
                f"{self.bin}: size must be a positive multiple of {self.dtype.itemsize} bytes, "
                f"got {self.bin.stat().st_size}"
            )
        self.size = size
        self.eos_id = meta.get("eos_id")
        offsets = meta.get("offsets")
        self.offsets_file = None if offsets is None else base.parent / offsets
        if self.eos_id is not None and self.offsets_file is not None:
            raise ValueError(f"{sidecar}: give eos_id or offsets, not both")
        if self.eos_id is not None and not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(
                f"{sidecar}: eos_id must lie in [0, {self.vocab_size}), got {self.eos_id}"
            )
        if self.offsets_file is not None:
            self._check_offsets(self.offsets_file)
        mask = meta.get("mask")
        self.mask_file = None if mask is None else base.parent / mask
        if self.mask_file is not None:
            if not self.mask_file.is_file():
                raise ValueError(f"memmap: no file at {self.mask_file}")
            if (found := self.mask_file.stat().st_size) != size:
                raise ValueError(
                    f"{self.mask_file}: must hold one byte for each of the {size} tokens, "
                    f"got {found}"
                )

    def _check_offsets(self, file: Path) -> None:
        if not file.is_file():
            raise ValueError(f"memmap: no file at {file}")
        length, remainder = divmod(file.stat().st_size, OFFSET.itemsize)
        if remainder or length < 2:
            raise ValueError(f"{file}: must hold at least two int64, got {file.stat().st_size} B")
        if self._offsets[0] != 0 or self._offsets[-1] != self.size:
            raise ValueError(
                f"{file}: must go from 0 to the {self.size} tokens of {self.bin.name}, "
                f"got {self._offsets[0]} to {self._offsets[-1]}"
            )
        for start in range(0, length - 1, OFFSETS_BLOCK):
            block = self._offsets[start : start + OFFSETS_BLOCK + 1]
            falls = np.flatnonzero(block[1:] < block[:-1])
            if falls.size:
                at = int(falls[0])
                raise ValueError(
                    f"{file}: offsets must not decrease, got {block[at]} then {block[at + 1]} at "
                    f"index {start + at}"
                )

    # These are opened on first use and not pickled, so that a data loader's worker process maps the
    # files itself instead of receiving a copy of their contents.
    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.memmap(self.bin, dtype=self.dtype, mode="r")

    @cached_property
    def _offsets(self) -> np.ndarray:
        assert self.offsets_file is not None
        return np.memmap(self.offsets_file, dtype=OFFSET, mode="r")

    @cached_property
    def _mask(self) -> np.ndarray:
        assert self.mask_file is not None
        return np.memmap(self.mask_file, dtype=np.uint8, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_tokens", "_offsets", "_mask")
        return {k: v for k, v in self.__dict__.items() if k not in mapped}

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> np.ndarray:
        tokens = self._tokens[start:stop].astype(np.int64)
        if tokens.size and tokens.max() >= self.vocab_size:
            position = start + int(tokens.argmax())
            raise ValueError(
                f"{self.bin}: token {tokens.max()} at position {position} is outside the "
                f"vocabulary of {self.vocab_size}"
            )
        return tokens

    def starts(self, start: int, stop: int) -> np.ndarray:
        if self.eos_id is not None:
            return start + 1 + np.flatnonzero(self._tokens[start:stop] == self.eos_id)
        if self.offsets_file is None:
            return np.empty(0, dtype=np.int64)
        first, last = np.searchsorted(self._offsets, [start, stop], side="right")
        return np.unique(np.asarray(self._offsets[first:last]))

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        if self.mask_file is None:
            return None
        mask = self._mask[start:stop]
        if mask.size and mask.max() > 1:
            position = start + int(mask.argmax())
            raise ValueError(
                f"{self.mask_file}: must hold only 0 and 1, got {mask.max()} at {position}"
            )
        return mask == 1


def _sidecar(file: Path) -> dict[str, Any]:
    """The contents of PATH.json. Raises ValueError if a key or the type of a value is wrong."""
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must be JSON that holds dtype and vocab_size: {error}") from error
    if not isinstance(meta, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(meta).__name__}")
    kinds: dict[str, type] = {"dtype": str, "vocab_size": int, "eos_id": int}
    kinds |= {"offsets": str, "mask": str}
    if unknown := set(meta) - set(kinds):
        raise ValueError(f"{file}: unknown keys {sorted(unknown)}")
    meta = {name: value for name, value in meta.items() if value is not None}
    for name in ("dtype", "vocab_size"):
        if name not in meta:
            raise ValueError(f"{file} must hold dtype and vocab_size, but has no {name}")
    for name, value in meta.items():
        # not isinstance: JSON's true is a bool, which is an int in Python
        if type(value) is not kinds[name]:
            wanted = {str: "a string", int: "an integer"}[kinds[name]]
            raise ValueError(f"{file}: {name} must be {wanted}, got {value!r}")
    for name in ("offsets", "mask"):
        if meta.get(name) == "" or "\0" in meta.get(name, ""):
            raise ValueError(f"{file}: {name} must name a file, got {meta[name]!r}")
    return meta


def _check_vocab(vocab_size: object, dtype: str, where: str = "memmap") -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{where}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    limit = np.iinfo(DTYPES[dtype]).max + 1
    if not isinstance(vocab_size, int) or not 1 <= vocab_size <= limit:
        raise ValueError(f"{where}: vocab_size must lie in [1, {limit}], got {vocab_size!r}")


def _base(path: Path) -> Path:
    if (path / "tokens.bin").is_file():
        return path / "tokens"
    return path.with_suffix("") if path.suffix == ".bin" else path

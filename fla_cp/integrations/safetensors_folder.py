"""Folders of safetensors as Hugging Face keeps models: read in parts, written whole.

A folder has `model.safetensors`, or shards and `model.safetensors.index.json`, which says which
shard has which tensor.

    folder = TensorFolder(path)
    folder.tensors["lm_head.weight"].shape
    rows = folder.read("lm_head.weight", 1000, 2000)

    with new_folder(path) as partial:
        write_tensors(partial, named_tensors)
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in a shard that is written, as in transformers."""

_COMPARED_BYTES = 64 * 2**20
"""The most bytes of a tensor that `check_copies` reads at a time. It reads at least one row."""

_MAPPED_BYTES = 256 * 2**20
"""After so many bytes a shard is closed and opened again, because pages that were read stay mapped.
"""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def check_is_folder(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a path that does not exist, and for a file."""
    if not Path(path).is_dir():
        what = "is a file" if Path(path).exists() else "does not exist"
        raise ValueError(f"must be a folder, got {str(path)!r}, which {what}")


@dataclass(frozen=True)
class StoredTensor:
    """What a folder records about a tensor. file: name of the shard that has it."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFolder:
    """The tensors of a folder by name, of which `read` loads one, or some of its rows, at a time.

    path: a local folder. Only the heads of its files are read here. renamed: names in the files ->
    names by which those tensors are known here.
    Raises ValueError, with the name of the file, for a folder without safetensors, for one that has
    pickled weights alone, and for shards that are missing, cut short or at odds with the index.
    Raises ImportError without the library safetensors.
    """

    def __init__(
        self, path: str | os.PathLike[str], renamed: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        stored = self._stored()
        self._names = {(renamed or {}).get(name, name): name for name in stored}
        self.tensors: Mapping[str, StoredTensor] = {
            known: stored[name] for known, name in self._names.items()
        }
        self._file, self._opened, self._mapped = "", None, 0

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows begin to end of a tensor: [end - begin, ..], on the CPU, in its own dtype, a copy.

        begin, end: of the first dimension, from 0 to its size; by default all of them. A tensor
        without dimensions has no rows and is read whole.
        Raises KeyError for a name that the folder does not have, and ValueError for other rows.
        """
        stored = self.tensors[name]
        rows = stored.shape[0] if stored.shape else 1
        end = rows if end is None else end
        if not 0 <= begin <= end <= rows or (not stored.shape and end - begin != 1):
            raise ValueError(f"begin and end must be rows of {name}, 0 to {rows}: {begin}, {end}")
        opened: Any = self._open(stored, end - begin)
        if not stored.shape:
            return opened.get_tensor(self._names[name]).clone()
        return opened.get_slice(self._names[name])[begin:end].clone()

    def close(self) -> None:
        """Closes the shard that is open, if any. A later `read` opens it again."""
        self._file, self._opened, self._mapped = "", None, 0

    def _open(self, stored: StoredTensor, rows: int) -> object:
        if self._file != stored.file or self._mapped > _MAPPED_BYTES:
            self.close()
            self._file, self._opened = stored.file, _opened(self.path / stored.file)
        self._mapped += stored.nbytes * rows // max(1, stored.shape[0] if stored.shape else 1)
        return self._opened

    def _stored(self) -> dict[str, StoredTensor]:
        check_is_folder(self.path)
        if (self.path / SINGLE).is_file():
            return _heads(self.path, SINGLE)
        if (self.path / INDEX).is_file():
            return self._indexed()
        pickled = sorted(file.name for kind in PICKLED for file in self.path.glob(kind))
        if pickled:
            raise ValueError(
                f"{self.path} must have its weights as safetensors; {pickled[0]} is a pickle, "
                "which could run code and is not read"
            )
        raise ValueError(f"{self.path} must have {SINGLE} or {INDEX}")

    def _indexed(self) -> dict[str, StoredTensor]:
        places = _weight_map(self.path / INDEX)
        heads: dict[str, dict[str, StoredTensor]] = {}
        for file in sorted(set(places.values())):
            if Path(file).name != file:
                raise ValueError(f"{INDEX} must name files of its own folder, got {file!r}")
            if not (self.path / file).is_file():
                raise ValueError(f"{self.path} has no {file}, which {INDEX} names")
            heads[file] = _heads(self.path, file)
        for name, file in places.items():
            if name not in heads[file]:
                raise ValueError(f"{self.path / file} has no {name}, for which {INDEX} names it")
        return {name: heads[file][name] for name, file in places.items()}


def check_copies(
    folder: TensorFolder, copies: Mapping[str, str], advice: str, rows: range | None = None
) -> None:
    """Raises ValueError for a head of the folder that differs from the embedding to which it is
    tied. transformers loads such a folder with a separate head.

    copies: names of heads, which the folder need not have -> the tensor of which each is a copy, of
    the same shape. advice: what to do about a head that differs. rows: the rows that are compared;
    None for all. A few rows are held at a time.
    """
    for name, other in copies.items():
        if name not in folder.tensors:
            continue
        stored = folder.tensors[name]
        compared = range(stored.shape[0]) if rows is None else rows
        step = max(1, _COMPARED_BYTES * stored.shape[0] // max(1, stored.nbytes))
        for begin in compared[::step]:
            end = min(begin + step, compared.stop)
            head, embedding = (folder.read(x, begin, end).double() for x in (name, other))
            if not torch.equal(head, embedding):
                raise ValueError(
                    f"{name} in {folder.path} must equal {other} or be left out, because the "
                    f"model's head is tied to its embedding, but they differ; {advice}"
                )


def _weight_map(index: Path) -> dict[str, str]:
    """Name of each tensor -> name of its file."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} must be JSON with a weight_map: {error}") from None


def _opened(path: Path) -> Any:
    """The file, mapped. Raises ValueError for one that is damaged, cut short for example."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None


def _heads(folder: Path, file: str) -> dict[str, StoredTensor]:
    opened, found = _opened(folder / file), {}
    for name in sorted(opened.keys()):
        head = opened.get_slice(name)
        kind = head.get_dtype()
        if kind not in _DTYPES:
            raise ValueError(
                f"{name} in {folder / file} must have one of the dtypes {', '.join(_DTYPES)}, got "
                f"{kind}"
            )
        found[name] = StoredTensor(file, tuple(head.get_shape()), _DTYPES[kind])
    return found


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write into, which gets the name `path` at the end of the block.

    It stands beside `path` until then and is removed if the block fails, so `path` is never half
    written. Raises ValueError if `path` exists already and is no empty folder, or cannot be made.
    """
    final = Path(path)
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ValueError(f"{final} must not exist yet, or be an empty folder")
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{final} must be a folder that can be made: {error}") from None
    try:
        yield partial
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes tensors with their names as `model.safetensors`, or as shards and an index.

    folder: an empty folder; see `new_folder`. tensors: on any device, of any dtype that safetensors
    has; at most one shard of them is held at a time. shard_bytes: the most bytes of tensors in a
    shard, unless a single tensor is larger. Equal tensors in equal order give equal bytes.
    Raises ValueError for a name that comes twice, for no tensors, and for a size below 1; OSError
    for a file that cannot be written.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    names: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        _write(folder / _part(len(names)), shard)
        names.append(list(shard))
        total += sum(x.nbytes for x in shard.values())
    if not names:
        raise ValueError("tensors must hold one at least, got none")
    if len(names) == 1:
        (folder / _part(0)).rename(folder / SINGLE)
        return
    places: dict[str, str] = {}
    for i, part in enumerate(names):
        file = f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / _part(i)).rename(folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _part(i: int) -> str:
    """Name of the i-th shard until the number of shards is known."""
    return f"part-{i:05d}.safetensors"


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held, seen = 0, set()
    for name, x in tensors:
        if name in seen:
            raise ValueError(f"tensors must have names of their own, got {name} twice")
        seen.add(name)
        if shard and held + x.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        # A copy, since tensors that share memory are refused.
        shard[name] = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        held += x.nbytes
    if shard:
        yield shard


def _write(path: Path, shard: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:  # on a full disk, for example
        raise OSError(f"cannot write {path}: {error}") from error

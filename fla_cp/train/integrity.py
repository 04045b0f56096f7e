"""Checksums of a checkpoint, computed while files are written and verified before they are loaded.

CRC-32 (zlib) finds every change of a single bit and every burst of up to 32 bits, and misses other
damage once in 2^32. It processes about 3 GB/s a thread, and neither it nor the reads hold the
interpreter's lock. It protects against accidents, not against forgery, which untrusted.py is about.
Files have a checksum for each block of 64 MiB, so that ranks share the work evenly even if there
are few files, and so that a message can say where the damage is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

BLOCK = 64 * 2**20
"""Bytes covered by one checksum."""
READ = 2**20
"""Bytes read at once, few enough to be in the CPU's cache when their checksum is computed."""


class Damaged(Exception):
    """Damage to a checkpoint. The message is one line without the checkpoint's path."""


@dataclass(frozen=True)
class FileSums:
    """The checksums of a file. size: bytes. blocks: CRC-32 of each BLOCK bytes, in order."""

    name: str
    size: int
    blocks: tuple[int, ...]


def pack_sums(files: Sequence[FileSums]) -> dict[str, Any]:
    """The checksums as JSON values, which `unpack_sums` reads."""
    return {f.name: {"size": f.size, "crc32": [f"{crc:08x}" for crc in f.blocks]} for f in files}


def unpack_sums(table: Any) -> list[FileSums]:
    """The checksums in the output of `pack_sums`. Raises Damaged for anything else."""
    try:
        files = [
            FileSums(name, entry["size"], tuple(int(crc, 16) for crc in entry["crc32"]))
            for name, entry in table.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Damaged("trainer.json holds no table of checksums") from None
    for file in files:
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise Damaged(f"trainer.json names a file outside the checkpoint: {file.name!r}")
        if type(file.size) is not int or len(file.blocks) != -(-file.size // BLOCK):
            raise Damaged(f"trainer.json has the wrong number of checksums for {file.name}")
    return files


_SEAL = re.compile(rb'(.*"checksum": ")([0-9a-f]{8})("\n}\n)', re.DOTALL)


def seal(record: dict[str, Any]) -> bytes:
    """The record as JSON text that ends with a checksum of everything before it."""
    text = json.dumps({**record, "checksum": "0" * 8}, indent=1).encode() + b"\n"
    match = _SEAL.fullmatch(text)
    assert match is not None
    return match[1] + b"%08x" % zlib.crc32(match[1]) + match[3]


def unseal(text: bytes) -> dict[str, Any]:
    """The record in a text that `seal` wrote, or in one of format 1. Raises Damaged."""
    match = _SEAL.fullmatch(text)
    if match is not None and zlib.crc32(match[1]) != int(match[2], 16):
        raise Damaged("trainer.json differs from its checksum")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("trainer.json is not valid JSON") from None
    if not isinstance(record, dict):
        raise Damaged(f"trainer.json must hold an object, not a {type(record).__name__}")
    # Format 1 had no checksum; a text of format 2 that lost its checksum must not pass for it.
    if match is None and ("checksum" in record or "files" in record):
        raise Damaged("trainer.json differs from its checksum")
    return record


class _SummedFile:
    """A new file that is written in sequence, with the checksums of what was written.

    The error of a failed write is kept, and raised by `fileno` (before fsync) or `close`:
    torch.save writes from C++ and would turn it into an error that does not name the cause.
    """

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.error: OSError | None = None
        self.size, self.crc = 0, 0
        self.blocks: list[int] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self.file.write(view)
            except OSError as error:
                self.error = error
        start = 0
        while start < len(view):
            room = BLOCK - self.size % BLOCK
            part = view[start : start + room]
            self.crc = zlib.crc32(part, self.crc)
            self.size += len(part)
            start += len(part)
            if self.size % BLOCK == 0:
                self._end_block()
        return len(view)

    def _end_block(self) -> None:
        self.blocks.append(self.crc)
        self.crc = 0

    def sums(self, name: str) -> FileSums:
        """The checksums of what was written so far."""
        last = (self.crc,) if self.size % BLOCK else ()
        return FileSums(name, self.size, (*self.blocks, *last))

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if self.error is None and not self.file.closed:
            try:
                self.file.flush()
            except OSError as error:
                self.error = error

    def fileno(self) -> int:
        self.flush()
        if self.error is not None:
            raise self.error
        return self.file.fileno()

    def close(self) -> None:
        if self.file.closed:
            return
        try:
            self.file.close()
        except OSError as error:
            self.error = self.error or error
        if self.error is not None:
            raise self.error


class _SummedFiles(FileSystem):
    """The local file system. It keeps the checksums of every written file, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        path = Path(path)
        assert mode == "wb"
        try:
            with closing(_SummedFile(path)) as file:
                yield file
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        self.sums[path.name] = file.sums(path.name)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        old, new = Path(path).name, Path(new_path).name
        self.sums[new] = FileSums(new, *_contents(self.sums.pop(old)))


def _contents(sums: FileSums) -> tuple[int, tuple[int, ...]]:
    return sums.size, sums.blocks


class SummedWriter(FileSystemWriter):
    """DCP's writer to a folder. Once every file is on disk, rank 0 calls `commit(files)`.

    An exception in `commit` fails the save on all ranks, like a failed write of any rank.
    """

    def __init__(self, folder: Path, commit: Any) -> None:
        # With thread_count=1 and nothing copied ahead, the writer uses no CUDA stream. In a
        # background thread that stream would belong to GPU 0, whichever GPU this rank has.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = self._files = _SummedFiles()
        self._folder, self._commit = folder, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP's results, followed by this rank's `FileSums`.

        Raises OSError that names the file, the bytes needed and the bytes free.
        """
        try:
            results = super().write_data(plan, planner).wait()
        except OSError as error:
            needed, free = _planned_bytes(plan), shutil.disk_usage(self._folder).free
            reason = f"{error.strerror or error} ({needed} bytes to write, {free} bytes free)"
            raise OSError(error.errno, reason, error.filename) from error
        future: Future[list[Any]] = Future()
        future.set_result([*results, *self._files.sums.values()])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileSums] = {
            f.name: f for mine in results for f in mine if isinstance(f, FileSums)
        }
        written = [[r for r in mine if not isinstance(r, FileSums)] for mine in results]
        super().finish(metadata, written)
        files |= self._files.sums  # .metadata as well
        for file in files.values():
            path = self._folder / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                raise OSError(
                    f"{path} was written by a rank of another host and is not here: --out must be "
                    "on a file system that all hosts share"
                )
        self._commit(list(files.values()))


def _planned_bytes(plan: SavePlan) -> int:
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in tensors)


def verify(folder: Path, files: Sequence[FileSums], part: int, parts: int, threads: int) -> str:
    """The first damage in one of `parts` equal parts of a folder; "" if there is none."""
    blocks = [(file, i) for file in files for i in range(len(file.blocks))]
    mine = blocks[part::parts]
    with ThreadPoolExecutor(max(1, min(threads, len(mine)))) as pool:
        problems = pool.map(lambda block: _verify_block(folder, *block), mine)
        return next((problem for problem in problems if problem), "")


def check_sizes(folder: Path, files: Sequence[FileSums]) -> None:
    """Raises Damaged if a file is missing, is not a regular file, or has another size."""
    for file in files:
        try:
            found = os.stat(folder / file.name)
        except FileNotFoundError:
            raise Damaged(f"{file.name} is missing") from None
        except OSError as error:
            raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{file.name} is no regular file")
        if found.st_size != file.size:
            raise Damaged(f"{file.name} has {found.st_size} bytes instead of {file.size}")


def _verify_block(folder: Path, file: FileSums, index: int) -> str:
    start = index * BLOCK
    stop = min(start + BLOCK, file.size)
    crc, buffer = 0, memoryview(bytearray(READ))
    try:
        with open(folder / file.name, "rb", buffering=0) as stream:
            stream.seek(start)
            while start < stop:
                count = stream.readinto(buffer[: stop - start])
                if not count:
                    return f"{file.name} ends at byte {start} instead of {file.size}"
                crc = zlib.crc32(buffer[:count], crc)
                start += count
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if crc != file.blocks[index]:
        return f"{file.name} differs from its checksum within bytes {index * BLOCK} to {stop - 1}"
    return ""

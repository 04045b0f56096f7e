"""Training data: token sources, packs of fixed length, and the order in which steps read them.

A *source* is one long stream of tokens cut into documents. A *pack* is `seq_len` consecutive
tokens of the stream: a long document continues in the next pack, and a pack can hold many
documents. `cu_seqlens` says where they begin. Labels are shifted here, inside each document and
before anything is sharded, so a rank that owns the last token before a shard boundary also has its
target.

All data are a function of (spec, seq_len, split, seed) and of the files, so every rank that builds
the same data set reads the same tokens. Ranks check this with `batch_hash`.

loader.py turns packs into the micro-batches of a rank.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from fla_cp.train.memmap import MemmapSource
from fla_cp.train.synthetic import synthetic_source

Split = Literal["train", "valid"]
Batch = dict[str, Tensor]

IGNORE = -100  # cross_entropy's own ignore_index
HELD_OUT = 0.03
MAX_TEXT_BYTES = 1 << 30
SNIFFED_BYTES = 8192
SPECS = ("stdlib", "text:PATH", "memmap:PATH", "synthetic")

# `stdlib` leaves out tests (repetitive), code tables and one file of prose (not code), installed
# packages, and the files of the machine's vendor (they differ between machines with one Python).
STDLIB_SKIP = {
    *("test", "tests", "idle_test", "encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"),
}
STDLIB_SKIP_PREFIXES = ("_sysconfigdata", "config-")


class TokenSource(Protocol):
    """A stream of `len(source)` tokens in `[0, vocab_size)`, cut into documents."""

    vocab_size: int

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `[start, stop)` of the stream as int64."""

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions p with `start < p <= stop` at which a document begins, ascending, distinct."""


class ArraySource:
    """A source in memory: tokens [N] of any integer type, document offsets int64 [D+1]."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, vocab_size: int):
        self.tokens = tokens
        self.offsets = offsets
        self.vocab_size = vocab_size

    def __getstate__(self) -> dict[str, Any]:
        """Moves the arrays into shared memory, which a worker process maps instead of a copy."""
        if not hasattr(self, "_shared"):
            self._shared = [_shared_copy(array) for array in (self.tokens, self.offsets)]
            self._view()
        return {"_shared": self._shared, "vocab_size": self.vocab_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._view()

    def _view(self) -> None:
        self.tokens, self.offsets = (x.numpy().view(dtype) for x, dtype in self._shared)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop].astype(np.int64)

    def starts(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self.offsets, [start, stop], side="right")
        return np.unique(self.offsets[first:last])


def _shared_copy(array: np.ndarray) -> tuple[Tensor, np.dtype]:
    """The bytes of an array [N] in shared memory, as uint8, and the array's dtype."""
    array = np.ascontiguousarray(array)
    shared = torch.empty(array.nbytes, dtype=torch.uint8, device="cpu")
    try:
        shared.share_memory_()
    except RuntimeError as error:
        raise RuntimeError(
            f"--data.workers: {array.nbytes} bytes of tokens must fit into shared memory "
            "(/dev/shm), where the workers read them; take --data.workers 0 or --data memmap:PATH"
        ) from error
    shared.numpy()[:] = array.view(np.uint8)
    return shared, array.dtype


class PackedDataset(Dataset[Batch]):
    """Map-style packs of `seq_len` tokens from `[first, stop)` of a source.

    `dataset[i]` is a dict of CPU tensors: tokens int64 [T]; labels int64 [T], the next token of
    the same document or -100 where there is none in this split; cu_seqlens int32 [n+1] from 0 to
    T, without empty documents. Tokens at the end of the stream that do not fill a pack are left
    out. notes: lines for the user about how the data were read.
    Raises ValueError if `seq_len` < 1 or the stream does not fill one pack.
    """

    def __init__(
        self,
        source: TokenSource,
        seq_len: int,
        *,
        first: int = 0,
        stop: int | None = None,
        name: str = "",
        notes: Sequence[str] = (),
    ):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.source = source
        self.seq_len = seq_len
        self.first = first
        self.stop = len(source) if stop is None else stop
        self.vocab_size = source.vocab_size
        self.notes = tuple(notes)
        if self.stop - self.first < seq_len:
            raise ValueError(
                f"{name or 'the data set'} has {self.stop - self.first} tokens, fewer than one "
                f"pack of seq_len={seq_len}: give more data or a shorter seq_len"
            )

    def __len__(self) -> int:
        return (self.stop - self.first) // self.seq_len

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        T = self.seq_len
        start = self.first + (index % len(self)) * T
        block = self.source.read(start, min(start + T + 1, self.stop))
        begins = self.source.starts(start, start + T) - start
        tokens, labels = block[:T], np.full(T, IGNORE, dtype=np.int64)
        labels[: len(block) - 1] = block[1:]
        labels[begins - 1] = IGNORE
        cu_seqlens = np.concatenate([[0], begins[begins < T], [T]]).astype(np.int32)
        return {
            "tokens": torch.from_numpy(np.ascontiguousarray(tokens)),
            "labels": torch.from_numpy(labels),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
        }


def build_dataset(spec: str, seq_len: int, split: Split, seed: int) -> PackedDataset:
    """The packed data set that `spec` names.

    spec: one of
        stdlib       the bytes of the running Python's standard library, one document a file
        text:PATH    the bytes of a file, or of each text file below a folder; binary files (with a
                     NUL in their first 8 KiB) and unreadable files are skipped with a note
        memmap:PATH  tokens written by `write_memmap`
        synthetic    generated from `seed`, which nothing else depends on
    Bytes are tokens 0..255. split: `valid` holds out about 3% of the files, chosen by a hash of
    their relative path; for `memmap`, or with too few files, the last 3% of the stream.
    Raises ValueError for an unknown spec or split, missing or malformed files, too few tokens.
    """
    if split not in ("train", "valid"):
        raise ValueError(f"split must be 'train' or 'valid', got {split!r}")
    kind, _, path = spec.partition(":")
    name = f"the {split} split of {spec!r}"
    notes: list[str] = []
    source: TokenSource
    if spec == "stdlib":
        source = _byte_source(_held_out_split(_stdlib_files(), split))
        return PackedDataset(source, seq_len, name=name)
    if spec == "synthetic":
        tokens, offsets, vocab_size = synthetic_source(seed, split)
        return PackedDataset(ArraySource(tokens, offsets, vocab_size), seq_len, name=name)
    if kind == "text" and path:
        files, skipped = _text_files(Path(path))
        if skipped and split == "train":  # both splits skip the same files: one note is enough
            notes.append(_skipped_note(path, skipped))
        chosen = _held_out_split(files, split)
        if 0 < len(chosen) < len(files):
            return PackedDataset(_byte_source(chosen), seq_len, name=name, notes=notes)
        source = _byte_source(files)
    elif kind == "memmap" and path:
        source = MemmapSource(Path(path))
    else:
        raise ValueError(f"unknown data {spec!r}: expected one of {', '.join(SPECS)}")
    cut = len(source) - int(len(source) * HELD_OUT)
    first, stop = (0, cut) if split == "train" else (cut, len(source))
    return PackedDataset(source, seq_len, first=first, stop=stop, name=name, notes=notes)


class StepBatchSampler(Sampler[list[int]]):
    """Infinite batch sampler: `global_batch_size` pack indices a step, a new order each epoch.

    The order is a function of (seed, num_packs) alone. Step s takes its entries
    `[s * global_batch_size, (s + 1) * global_batch_size)`, across the ends of epochs. So any step
    can be read directly, and a batch may be larger than an epoch. `step` is the next one to yield.
    Raises ValueError if `num_packs` or `global_batch_size` is below 1, or seed or step below 0.
    """

    def __init__(self, num_packs: int, global_batch_size: int, seed: int, start_step: int = 0):
        if num_packs < 1 or global_batch_size < 1:
            raise ValueError(
                "num_packs and global_batch_size must be at least 1, "
                f"got {num_packs} and {global_batch_size}"
            )
        if seed < 0 or start_step < 0:
            raise ValueError(f"seed and start_step must be >= 0, got {seed} and {start_step}")
        self.num_packs = num_packs
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.step = start_step
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def batch(self, step: int) -> list[int]:
        """Pack indices of one step; it does not depend on earlier calls."""
        position, stop = step * self.global_batch_size, (step + 1) * self.global_batch_size
        indices: list[int] = []
        while position < stop:
            epoch, offset = divmod(position, self.num_packs)
            taken = self._order_of(epoch)[offset : offset + stop - position]
            indices.extend(taken.tolist())
            position += len(taken)
        return indices

    def _order_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_packs)
            self._epoch = epoch
        return self._order

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def collate(packs: Sequence[Batch]) -> Batch:
    """n packs of T tokens folded into one row of N documents.

    Returns tokens and labels [1, n*T] and cu_seqlens int32 [N+1].
    """
    n, T = len(packs), len(packs[0]["tokens"])
    if n * T > np.iinfo(np.int32).max:
        raise ValueError(f"a batch must fit int32 offsets, got {n * T} tokens")
    ends = [pack["cu_seqlens"][1:] + i * T for i, pack in enumerate(packs)]
    return {
        "tokens": rearrange([pack["tokens"] for pack in packs], "n T -> 1 (n T)"),
        "labels": rearrange([pack["labels"] for pack in packs], "n T -> 1 (n T)"),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int32, device="cpu"), *ends]),
    }


def batch_hash(batch: Batch) -> int:
    """Hash in [0, 2^63) of a collated CPU batch; two ranks with the same batch get the same hash.

    Each value is mixed with its position before the sum, so moving a token changes the hash.
    """
    tokens, labels = (rearrange(batch[key].numpy(), "1 T -> T") for key in ("tokens", "labels"))
    # A label is -100 or a token, so a label and a token fit into one 64-bit word.
    mixed = labels << 32
    mixed += tokens
    total = _positional_sum(mixed)
    total = (total * 31 + _positional_sum(batch["cu_seqlens"].numpy().astype(np.int64))) % 2**64
    return total >> 1


def _positional_sum(values: np.ndarray) -> int:
    """Sum of mixed (value, position) pairs mod 2^64. It overwrites `values`, which are int64."""
    words = values.view(np.uint64)
    words += np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0x94D049BB133111EB)
    return int(words.sum(dtype=np.uint64))


File = tuple[str, Path]  # the relative path with forward slashes, and the full path


def _stdlib_files() -> list[File]:
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, lambda n: n not in STDLIB_SKIP and not n.startswith(STDLIB_SKIP_PREFIXES))
    files = [file for file in files if file[0].endswith(".py")]
    if not files:
        raise ValueError(f"no .py files in this Python's standard library folder {root}")
    return files


def _text_files(path: Path) -> tuple[list[File], list[str]]:
    """The files to read, and the names of the files in the folder that are skipped.

    If `path` is a file, it is read whatever it holds.
    """
    if path.is_file():
        return [(path.name, path)], []
    if path.exists() and not path.is_dir():
        raise ValueError(f"text: {path} must be a file or a folder, not a device, pipe or socket")
    if not path.is_dir():
        raise ValueError(f"text: no file or folder at {path}")
    found = _walk(path, lambda name: not name.startswith("."))
    if not found:
        raise ValueError(f"text: no files below {path} (hidden ones are left out)")
    files = [file for file in found if _is_text(file[1])]
    kept = set(files)
    skipped = [name for name, file in found if (name, file) not in kept]
    if not files:
        raise ValueError(
            f"text: all {len(found)} files below {path} are binary or cannot be read, "
            f"{skipped[0]!r} among them; name a single file to train on its bytes all the same"
        )
    return files, skipped


def _is_text(path: Path) -> bool:
    """Whether a file can be read and has no NUL in its first bytes, the rule that grep uses."""
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(SNIFFED_BYTES)
    except OSError:
        return False


def _skipped_note(path: str, skipped: Sequence[str]) -> str:
    names = ", ".join(map(repr, skipped[:3])) + (", .." if len(skipped) > 3 else "")
    files = f"{len(skipped)} file{'s' * (len(skipped) > 1)}"
    return f"note: skipped {files} below {path} that are binary or cannot be read: {names}"


def _walk(root: Path, keep: Callable[[str], bool]) -> list[File]:
    """Regular files below `root`, by relative path. `keep` decides by name which are entered."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = filter(keep, folders)
        files += [Path(folder, name) for name in filter(keep, names)]
    return sorted((path.relative_to(root).as_posix(), path) for path in files if path.is_file())


def _held_out_split(files: Iterable[File], split: Split) -> list[File]:
    def held_out(name: str) -> bool:
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64

    return [file for file in files if held_out(file[0]) == (split == "valid")]


def _byte_source(files: Sequence[File]) -> ArraySource:
    size = sum(path.stat().st_size for _, path in files)
    if size > MAX_TEXT_BYTES:
        raise ValueError(
            f"text is held in memory, so at most {MAX_TEXT_BYTES} bytes, got {size}: "
            "tokenise it with fla_cp.train.memmap.write_memmap and use memmap:PATH"
        )
    documents = [path.read_bytes() for _, path in files]
    tokens = np.frombuffer(b"".join(documents), dtype=np.uint8)
    offsets = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
    return ArraySource(tokens, offsets, vocab_size=256)

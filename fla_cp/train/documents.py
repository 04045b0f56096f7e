"""The documents that a tokenizer turns into tokens: text files, and rows of data sets.

The columns of a row say what it is: text ("text"), an instruction ("prompt" and "completion"), or a
conversation ("messages"). `--data.column` names another column, of strings or of conversations.

About 3% of the documents are held out: the files or rows that a hash chooses, or the `validation`
split of a saved DatasetDict or of files that are named after splits. If the hash leaves a split
without documents, the last 3% of each file's bytes are held out instead, or the last 3% of the
rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fla_cp.train.text_files import HELD_OUT, File, Split, file_errors, held_out_split
from fla_cp.train.tokenizer import Form, needs_extra

PIECE_BYTES = 1 << 20
"""A longer text file is cut into several documents, each at the first line end after this many
bytes."""

VALIDATION = ("validation", "valid", "test")
"""Names of the split that is held out. The first one that exists is taken."""

STRINGS = ("string", "large_string", "string_view")
"""Types of a column of texts."""

_SPLIT_FILE = re.compile(r"(train|validation|valid|test)([-_.]?\d+(-of-\d+)?(-[0-9a-f]+)?)?")
"""Names, without their endings, of files that hold a split or a part of one."""


class Documents(Protocol):
    """Documents of one form. size: about how many bytes they have together. digest: a hash that
    changes if the documents do."""

    form: Form
    size: int
    digest: str

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> tuple[list[Any], list[str]]:
        """The documents at these indices, and the name of each for error messages."""


class Piece(NamedTuple):
    """Bytes [start, stop) of a file."""

    path: str
    start: int
    stop: int


class TextDocuments:
    """Text files. Each is one document, or several if it has more than PIECE_BYTES.

    files: those of all splits. split: "valid", the held-out part, "train", the rest, or None for
    all. Bytes that are not UTF-8 become U+FFFD. Raises ValueError if a split has no text, and for a
    file that cannot be read.
    """

    form: Form = "text"

    def __init__(self, files: Sequence[File], split: Split | None) -> None:
        chosen = files if split is None else held_out_split(files, split)
        by_hash = 0 < len(chosen) < len(files)
        pieces: list[Piece] = []
        total = hashlib.sha256(b"text")
        for name, path in chosen if by_hash else files:
            with file_errors(path):
                facts = path.stat()
                start, stop = 0, facts.st_size
                if split is not None and not by_hash:
                    cut = _held_out_start(path, stop)
                    start, stop = (0, cut) if split == "train" else (cut, stop)
                pieces += _pieces(path, start, stop)
            total.update(f"{name}\0{facts.st_size} {facts.st_mtime_ns}".encode(errors="replace"))
            total.update(f" {start} {stop}".encode())
        self.pieces = pieces
        self.size = sum(piece.stop - piece.start for piece in pieces)
        self.digest = total.hexdigest()
        if not pieces:
            raise ValueError(f"text: the {split or 'whole'} split must have text, got none")

    def __len__(self) -> int:
        return len(self.pieces)

    def read(self, indices: Sequence[int]) -> tuple[list[str], list[str]]:
        texts, names = [], []
        for piece in (self.pieces[i] for i in indices):
            with file_errors(piece.path), open(piece.path, "rb") as file:
                file.seek(piece.start)
                texts.append(file.read(piece.stop - piece.start).decode(errors="replace"))
            names.append(f"{piece.path} from byte {piece.start}")
        return texts, names


def _pieces(path: Path, start: int, stop: int) -> list[Piece]:
    pieces = []
    while start < stop:
        end = _line_end(path, start + PIECE_BYTES, stop)
        pieces.append(Piece(str(path), start, end))
        start = end
    return pieces


def _held_out_start(path: Path, size: int) -> int:
    """Where the held-out end of a file begins: after a line end, or at the begin of a character if
    the file ends before another line begins."""
    at = size - int(size * HELD_OUT)
    cut = _line_end(path, at, size)
    return cut if cut < size else _character(path, at, size)


def _line_end(path: Path, at: int, stop: int) -> int:
    """The first position, from `at` on, that follows a line end; at most `stop`.

    If the line goes on for more than PIECE_BYTES, it is the first position after these where a
    character begins.
    """
    if at >= stop:
        return stop
    with open(path, "rb") as file:
        file.seek(at)
        at += len(line := file.readline(PIECE_BYTES))
    return min(at, stop) if line.endswith(b"\n") else _character(path, at, stop)


def _character(path: Path, at: int, stop: int) -> int:
    """The first position, from `at` on, where a character of UTF-8 begins; at most `stop`."""
    with open(path, "rb") as file:
        file.seek(at)
        while at < stop and (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:
            at += 1
    return min(at, stop)


class _Opened(NamedTuple):
    """rows: rows of a data set. held_out: the name of the split that is held out, if the held-out
    rows are a split of their own. from_json: whether the rows come from jsonl files."""

    rows: Any
    held_out: str | None
    from_json: bool


class RowDocuments:
    """Rows of a data set on disk, read through `datasets`.

    path: a folder that `save_to_disk` wrote, a .parquet or .jsonl file, or a folder with such files
    of one kind. If these are named after splits, such as train-00000-of-00002.parquet, they are
    splits as in a DatasetDict. column: a column to read instead of those that the module names.
    Conversations lose what is null in them, except those of jsonl files, see `_without_nulls`.
    split: as in `TextDocuments`; None reads the split train of several. cache: folder for the
    memory-mapped form of jsonl and parquet files. column_flag: the program's option for the column,
    for errors. Processes that receive this object open the rows themselves.
    Raises ValueError for a path or columns that do not fit, for splits without one named train, for
    files of which only some are named after splits, and for an empty split.
    """

    def __init__(
        self,
        path: Path,
        column: str | None,
        split: Split | None,
        cache: Path,
        column_flag: str = "--data.column",
    ) -> None:
        needs_extra("--data hf:PATH", "datasets")
        self.path, self.cache, self.split = path, cache, split
        self.form, self.columns = _columns(self._rows, column, path, column_flag)
        self.nulls = self.form != "chat" or self._opened.from_json
        total = hashlib.sha256(f"rows {self.columns} {self._opened.held_out or False}".encode())
        if not self.nulls:
            total.update(b"without nulls")
        for file in sorted(file for file in _stored(path) if file.is_file()):
            facts = file.stat()
            total.update(
                f"{file.name}\0{facts.st_size} {facts.st_mtime_ns}".encode(errors="replace")
            )
        total.update(self._indices.tobytes())
        self.digest = total.hexdigest()
        share = len(self._indices) / max(len(self._rows), 1)
        self.size = max(1, int(self._rows.data.nbytes * share))
        if not len(self._indices):
            raise ValueError(f"hf: the {split or 'whole'} split of {path} must have rows, got none")

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_opened", "_indices")}

    @cached_property
    def _opened(self) -> _Opened:
        return _open_rows(self.path, self.split, self.cache)

    @property
    def _rows(self) -> Any:
        return self._opened.rows

    @property
    def _separate(self) -> bool:
        return self._opened.held_out is not None

    @cached_property
    def _indices(self) -> np.ndarray:
        rows = len(self._rows)
        indices = np.arange(rows, dtype=np.int64)
        if self.split is None or self._separate:
            return indices
        held_out = _hashed(indices) < HELD_OUT
        if held_out.all() or not held_out.any():
            held_out = indices >= rows - max(1, int(rows * HELD_OUT))
        return indices[held_out == (self.split == "valid")]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Sequence[int]) -> tuple[list[Any], list[str]]:
        rows = self._indices[np.asarray(indices, dtype=np.int64)].tolist()
        names = [f"{self.path}: {' and '.join(self.columns)} of row {row}" for row in rows]
        try:
            found = self._rows[rows]
        except UnicodeDecodeError:
            self._check_utf8(rows, names)
            raise
        columns = [found[name] for name in self.columns]
        if not self.nulls:
            columns = [_without_nulls(column) for column in columns]
        return list(columns[0] if len(columns) == 1 else zip(*columns, strict=True)), names

    def _check_utf8(self, rows: Sequence[int], names: Sequence[str]) -> None:
        """Raises ValueError for the first row that is not UTF-8, which pyarrow finds only now."""
        for row, name in zip(rows, names, strict=True):
            try:
                self._rows[row]
            except UnicodeDecodeError as error:
                shown = repr(error.object[:80])
                raise ValueError(f"{name} must be UTF-8, got {shown}: {error}") from None


def _hashed(indices: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each index. It does not depend on how many rows there are."""
    words = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    return words.astype(np.float64) / 2.0**64


def _stored(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*"))


def _without_nulls(value: Any) -> Any:
    """The same without keys whose value is null, at any depth.

    A struct of Arrow has the same keys in each row, so those that a message or a tool call lacks
    are null in it, and a chat template would render them. Only jsonl knows an explicit null.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _open_rows(path: Path, split: Split | None, cache: Path) -> _Opened:
    """Opens the rows of `RowDocuments`."""
    import datasets

    datasets.disable_progress_bars()
    saved = "what save_to_disk wrote"
    if (path / "dataset_dict.json").is_file():
        with _errors(path, saved):
            names = json.loads((path / "dataset_dict.json").read_text())["splits"]
        name, separate = _chosen(path, names, split)
        with _errors(path, saved):
            rows = datasets.load_from_disk(str(path / name))
            return _Opened(rows, name if separate else None, False)
    if (path / "state.json").is_file():
        with _errors(path, saved):
            return _Opened(datasets.load_from_disk(str(path)), None, False)
    files = [path] if path.is_file() else sorted(path.glob("*"))
    kinds = {
        kind: [str(file) for file in files if file.suffix == kind]
        for kind in (".parquet", ".jsonl")
    }
    kinds = {kind: found for kind, found in kinds.items() if found}
    if len(kinds) != 1:
        raise ValueError(
            "hf: the path must be a data set that save_to_disk wrote, or .parquet or .jsonl files "
            f"of one kind, got {' and '.join(kinds) or 'neither'} at {path}"
        )
    ((kind, found),) = kinds.items()
    named = None
    if not path.is_file() and (splits := _by_split(path, found)):
        name, separate = _chosen(path, list(splits), split)
        found, named = splits[name], name if separate else None
    read = datasets.Dataset.from_parquet if kind == ".parquet" else datasets.Dataset.from_json
    if not any(os.path.getsize(file) for file in found):
        raise ValueError(f"hf: the {kind} files of {path} must have rows, got empty files")
    with _errors(path, kind[1:]):
        rows = read(found, cache_dir=str(cache / "datasets"))
        return _Opened(rows, named, kind == ".jsonl")


def _by_split(path: Path, files: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split of a folder, if they are named after splits; otherwise {}. Raises
    ValueError if only some of them are."""
    splits: dict[str, list[str]] = {}
    others = []
    for file in files:
        if match := _SPLIT_FILE.fullmatch(Path(file).stem.lower()):
            splits.setdefault(match[1], []).append(file)
        else:
            others.append(Path(file).name)
    if splits and others:
        first = Path(next(iter(splits.values()))[0]).name
        raise ValueError(
            f"hf: the files of {path} must all be named after splits (train, validation, valid or "
            f"test, and perhaps a number), or none of them, got {first} and {others[0]}"
        )
    return splits


def _chosen(path: Path, names: Sequence[str], split: Split | None) -> tuple[str, bool]:
    """The name of the split to read, and whether the held-out rows are a split of their own.
    names: those of the splits that there are. Raises ValueError if none is named train."""
    if "train" not in names:
        raise ValueError(f"hf: {path} must have a split named train, got {', '.join(names)}")
    valid = next((name for name in VALIDATION if name in names), None)
    return (valid if valid is not None and split == "valid" else "train"), valid is not None


@contextmanager
def _errors(path: Path, what: str) -> Iterator[None]:
    """Names the path in an error of the libraries that read it, which raise all kinds. An OSError
    stays one, because it may be about the cache, and names its file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0]
        reason = reason if isinstance(cause, ValueError) else f"{type(cause).__name__}: {reason}"
        raise ValueError(f"hf: {path} cannot be read as {what}: {reason}") from error


def _columns(rows: Any, column: str | None, path: Path, flag: str) -> tuple[Form, tuple[str, ...]]:
    """The form of the rows, and the columns that hold them. flag: the option for the column."""
    names = rows.column_names
    if column is not None:
        if column not in names:
            raise ValueError(
                f"{flag} must be a column of {path}, one of {', '.join(names)}, got {column!r}"
            )
        text = getattr(rows.features[column], "dtype", None) in STRINGS
        return "text" if text else "chat", (column,)
    known: dict[Form, tuple[str, ...]] = {
        "text": ("text",),
        "instruction": ("prompt", "completion"),
        "chat": ("messages",),
    }
    found = [(form, needed) for form, needed in known.items() if set(needed) <= set(names)]
    if len(found) != 1:
        raise ValueError(
            f"hf: {path} must have one of the columns text, messages, or prompt and completion, "
            f"got {', '.join(names)}; {flag} names one of text or conversations"
        )
    return found[0]

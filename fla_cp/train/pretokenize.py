"""Entry point of `fla-cp-tokenize`: turns documents into the token files of memmap.py.

fla-cp-tokenize text:corpus/ --tokenizer DIR --out tokens/
fla-cp-train --data memmap:tokens/

Processes tokenise groups of documents, each group into files of its own in a folder beside --out.
When all groups are done, they are joined in the order of the documents. Only then does the result
get the name --out, so --out is either whole or missing. After an interruption, the same command
takes the groups that are there and continues. A mistake in the arguments or the documents leaves no
files; after a failure to write, for example on a full disk, the groups stay, too. While a command
runs, it holds a lock on a file beside --out, and a second command with the same --out is refused.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from fla_cp.train.arguments import Parser, file_among
from fla_cp.train.ending import say
from fla_cp.train.exit_codes import FAILED, MISTAKE
from fla_cp.train.lock import FileLock
from fla_cp.train.memmap import OFFSET, narrowest, write_sidecar
from fla_cp.train.shards import Shards
from fla_cp.train.sources import Reading, open_documents
from fla_cp.train.tokenizer import Tokenizer
from fla_cp.train.waiting_bars import shown

GROUP_BYTES = 1 << 22
"""About how many bytes of text a group of documents has."""


def tokenize(
    source: str, tokenizer: str, out: Path, *, column: str | None = None, processes: int = 1
) -> str:
    """Writes the tokens of a source to OUT/tokens.*; returns a line that says what was written.

    source: stdlib, text:PATH or hf:PATH. tokenizer: its folder. out: a folder that does not exist.
    column: see RowDocuments. processes: how many tokenise; with 1, this one does.
    Raises ValueError for a source that cannot be read or tokenised, and for an `out` that exists;
    OSError, which names --out, if it cannot be written; RuntimeError if a process has died.
    """
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    _check_new(out)
    if (file := file_among(*out.parents)) is not None:
        raise ValueError(f"--out must not be below a file, got {out}: {file} is one")
    loaded = Tokenizer(tokenizer)
    _ = loaded.hf  # a mistake is said before the documents are read
    parts = out.with_name(f".{out.name}.parts")
    with _held(out, parts):
        line = _tokenize(source, loaded, out, parts, column, processes)
    return f"{line}; train with --data memmap:{out}"


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"--out must not exist yet, got {out}")


@contextmanager
def _held(out: Path, parts: Path) -> Iterator[None]:
    """Keeps --out for this process: during the block, another command with it is refused.

    After a failure, folders above --out that were made for it are removed, unless work is in them.
    """
    path = out.with_name(f".{out.name}.lock")
    missing = [folder for folder in out.parents if not folder.exists()]
    lock = FileLock(
        lambda holder: (
            f"--out must be written by one fla-cp-tokenize at a time, got {out}, which {holder} "
            "is writing"
        )
    )
    try:
        with lock:
            with _out_errors(out, parts):
                out.parent.mkdir(parents=True, exist_ok=True)
                lock.take(path)
            try:
                _check_new(out)  # another command may have ended since the first check
                yield
            finally:
                path.unlink(missing_ok=True)
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # a folder that is not empty stays
                folder.rmdir()
        raise


def _tokenize(
    source: str, loaded: Tokenizer, out: Path, parts: Path, column: str | None, processes: int
) -> str:
    """Writes --out, and returns a line that says how much. parts: the folder for its parts."""
    interrupted = parts.exists()
    try:
        reading = Reading(column=column, cache=str(parts), column_flag="--column")
        with _out_errors(out, parts), _source_errors(source, parts):
            opened = open_documents(source, None, reading)
        if opened is None:
            raise ValueError(f"SOURCE must be stdlib, text:PATH or hf:PATH, got {source!r}")
        documents, notes = opened
        for note in notes:
            print(note, file=sys.stderr)
        shards = Shards(documents, loaded, parts, GROUP_BYTES, shuffled=False)
        with _out_errors(out, parts):
            _make(shards, min(processes, len(shards)))
            line = _join(shards, parts / "joined")
            (parts / "joined").rename(out)
    except ValueError:
        # The command without the mistake will write other parts. Parts of an earlier command stay,
        # because they may be useful.
        if not interrupted:
            shutil.rmtree(parts, ignore_errors=True)
        raise
    shutil.rmtree(parts)
    return line


@contextmanager
def _out_errors(out: Path, parts: Path) -> Iterator[None]:
    """Adds to an OSError of the block that it is about --out, and what stays of the work."""
    try:
        yield
    except OSError as error:
        done = f"; what is done stays in {parts}, and the same command continues it"
        kept = done if parts.is_dir() else ""
        raise OSError(f"--out: cannot write {out}: {error}{kept}") from error


@contextmanager
def _source_errors(source: str, parts: Path) -> Iterator[None]:
    """Turns an OSError of the block into a ValueError about SOURCE, unless it is about `parts`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and Path(error.filename).is_relative_to(parts):
            raise
        raise ValueError(f"SOURCE: cannot read {source}: {error}") from error


def _make(shards: Shards, processes: int) -> None:
    """Makes all shards that are missing."""
    missing = [shard for shard in range(len(shards)) if not shards.exists(shard)]
    ready = len(shards) - len(missing)
    with shown("tokenising", len(shards), "shards", done=ready) as update:
        if processes == 1:
            for shard in missing:
                shards.make(shard)
                update()
            return
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin)
        try:
            for done in as_completed([pool.submit(shards.make, shard) for shard in missing]):
                done.result()
                update()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that tokenises has died, mostly for lack of memory: take fewer "
                f"--processes, got {processes}; the same command continues the work"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Turns off the threads of a tokenizer: there is a process for each processor already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _join(shards: Shards, folder: Path) -> str:
    """Writes the tokens of all shards into one file, and offsets and mask likewise."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    masked = shards.documents.form != "text"
    names = ("tokens.bin", "tokens.mask") if masked else ("tokens.bin",)
    for name in names:
        with open(folder / name, "wb") as whole:
            for shard in range(len(shards)):
                with open(shards.path(shard) / name, "rb") as part:
                    shutil.copyfileobj(part, whole)
    total = count = 0
    with open(folder / "tokens.offsets", "wb") as whole:
        whole.write(np.zeros(1, dtype=OFFSET).tobytes())  # not tofile: see write_memmap
        for shard in range(len(shards)):
            ends = np.fromfile(shards.path(shard) / "tokens.offsets", dtype=OFFSET)[1:] + total
            whole.write(ends.astype(OFFSET).tobytes())
            total, count = int(ends[-1]), count + len(ends)
    if not total:
        raise ValueError(f"the documents must have at least one token, got {count} empty ones")
    vocab_size = shards.tokenizer.vocab_size
    write_sidecar(folder / "tokens", vocab_size, narrowest(vocab_size), masked)
    return f"{count} documents, {total} tokens of a vocabulary of {vocab_size}"


def run(argv: Sequence[str] | None = None) -> int:
    """Tokenises as the arguments say and returns the exit code, see fla_cp/train/exit_codes.py."""
    parser = Parser(
        "fla-cp-tokenize", description="Tokenises documents for fla-cp-train --data memmap:OUT."
    )
    about = "stdlib, text:PATH or hf:PATH, as for fla-cp-train --data"
    parser.add_argument("source", metavar="SOURCE", help=about)
    parser.add_argument(
        "--tokenizer", required=True, help="folder of a tokenizer that transformers saved"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--column", help="column of hf:PATH that holds texts or conversations")
    processes = "processes that tokenise (default: %(default)s, one for each processor)"
    count = os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=count, help=processes)
    given = parser.parse_args(argv)
    if find_spec("tqdm") is None:
        print("error: fla-cp-tokenize needs tqdm: pip install 'fla_cp[hf]'", file=sys.stderr)
        return MISTAKE
    try:
        line = tokenize(
            given.source, given.tokenizer, given.out, column=given.column, processes=given.processes
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    say(line)
    return 0
